"""A process whose children write a table's file until killed. See test_offload_dirty_files.

Reads lines "PATH MODE" and forks a child for each, so that torch is imported once. Writes the
child's number when it has begun to write, and "dead" when it has gone.

Row r in version v holds r + 1000 * v everywhere.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from killed import serve

from fastemb.offload._host import HostTable
from fastemb.offload._layout import Field, RecordLayout

NUM_ROWS = 48
WIDTH = 4096  # wide records: most of the time is spent in the middle of one
LAYOUT = RecordLayout([Field("weight", torch.float32, WIDTH), Field("state", torch.float32, WIDTH)])
SEED = 77
STEPS_AHEAD = 12


def value(rows: torch.Tensor, versions: torch.Tensor) -> torch.Tensor:
    return (rows + 1000 * versions).float()[:, None]


def sealed(rows: torch.Tensor, version: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Records of ``rows`` in ``version``, and their versions."""
    records = torch.zeros(len(rows), LAYOUT.record_bytes, dtype=torch.uint8)
    views = LAYOUT.views(records)
    versions = torch.full_like(rows, version)
    for view in views.values():
        view.copy_(value(rows, versions).expand(-1, WIDTH))
    headers = LAYOUT.headers(records)
    pieces = list(views.values())
    torch.ops.fastemb.checksum_seal_(headers, pieces, None, rows, versions, SEED)
    return records, versions


def train(path: Path, mode: str, begun: int) -> None:
    """Write half of the rows in each step; "flush" now and then, "never", or "idle" after one."""
    rows = torch.arange(NUM_ROWS)
    halves = rows[0::2].contiguous(), rows[1::2].contiguous()
    steps = [(halves[v % 2], *sealed(halves[v % 2], v)) for v in range(1, STEPS_AHEAD)]
    table = HostTable.create("victim", NUM_ROWS, LAYOUT, seed=SEED, storage=path)
    table.scatter(rows, *sealed(rows, 0))
    table.flush(0)
    os.write(begun, b"x")
    for version, (some, records, versions) in enumerate(steps, start=1):
        table.scatter(some, records, versions)
        if mode == "idle":
            table.flush(version)
            break
        if mode == "flush" and version % 2 == 0:
            table.flush(version)
            time.sleep(0.01)
    while mode == "never":  # the same records in two versions, again and again
        for some, records, versions in steps[-4:]:
            table.scatter(some, records, versions)
    time.sleep(60)


def main() -> None:
    torch.set_num_threads(1)
    serve(train)


if __name__ == "__main__":
    main()
