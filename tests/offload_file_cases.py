"""A small table in a file, for the tests of such files."""

from __future__ import annotations

from pathlib import Path

import torch

from fastemb.offload._host import HostTable
from fastemb.offload._layout import Field, RecordLayout

NUM_ROWS = 40
LAYOUT = RecordLayout(
    [
        Field("weight", torch.bfloat16, 3),
        Field("exp_avg", torch.float32, 3),
        Field("master", torch.float32, 3, None),
        Field("row_step", torch.int32, 1, 7),
    ]
)


def create(path: Path, layout: RecordLayout = LAYOUT) -> HostTable:
    """A table whose rows hold their numbers, flushed at step 5."""
    table = HostTable.create("users", NUM_ROWS, layout, seed=-3, storage=path)
    for field in table.fields.values():
        field.copy_(torch.arange(NUM_ROWS)[:, None].expand_as(field))
    table.optimizer_step = 12.5
    table.seal()
    table.flush(5)
    return table


def damage(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
