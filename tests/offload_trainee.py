"""A process whose children train a table in a file until they are killed. See test_offload_kill.

Reads lines "DIRECTORY MODE" and forks a child for each, so that torch is imported once. Writes the
child's number when its training has begun, and "dead" when it has gone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from killed import serve
from torch import Tensor, nn

import fastemb
from fastemb.offload import OffloadEngine
from fastemb.offload._host import HostTable

NUM_ROWS = 40
DIM = 1500  # wide records: a good part of the time is spent in the middle of one
STEPS = 60


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, NUM_ROWS, (4, 2), generator=generator) for _ in range(STEPS)]


def new_model(engine: OffloadEngine | None) -> tuple[nn.EmbeddingBag, torch.optim.Optimizer]:
    """All that there is to know of it is in the table and its file."""
    torch.manual_seed(3)
    model = nn.Sequential()
    model.add_module("table", nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum"))
    fastemb.convert(model, sparse="fused", offload=engine)
    return model.get_submodule("table"), fastemb.optim.Adam(model.parameters(), lr=0.1, lazy="rows")


def new_engine(directory: Path, **options: Any) -> OffloadEngine:
    return OffloadEngine(
        device="cpu", cache=14, depth=1, staging_bytes=1 << 16, storage=directory, **options
    )


def step(model: nn.EmbeddingBag, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    model(ids).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def write_slowly() -> None:
    """As memory that is mapped from a busy disk: records are written in two halves."""
    usual = HostTable.scatter

    def scatter(host: HostTable, rows: Tensor, records: Tensor, *rest: Any) -> None:
        host.mark_dirty()
        half = host.layout.record_bytes // 2
        host.records[rows, :half] = records[: len(rows), :half]
        time.sleep(0.004)
        usual(host, rows, records, *rest)

    HostTable.scatter = scatter  # type: ignore[method-assign]


def train(directory: Path, mode: str, begun: int) -> None:
    """All steps, with a flush after every fourth, or after the tenth ("idle"), or "never".

    Mode "slowly" is "never" with `write_slowly`.
    """
    if mode == "slowly":
        write_slowly()
    engine = new_engine(directory)
    model, optimizer = new_model(engine)
    engine.flush()
    os.write(begun, b"x")
    for number, ids in enumerate(engine.prefetch(batches(), ids=lambda ids: ids), 1):
        step(model, optimizer, ids)
        if mode == "idle" and number == 10:
            engine.flush()
            break
        if mode == "flush" and number % 4 == 0:
            engine.flush()
    time.sleep(60)


def main() -> None:
    torch.set_num_threads(1)
    new_model(None)  # what is imported at the first use
    serve(train)


if __name__ == "__main__":
    main()
