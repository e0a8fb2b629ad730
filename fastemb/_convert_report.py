"""What `fastemb.convert` and `fastemb.revert` return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import nn


@dataclass(frozen=True)
class ConvertedTable:
    """One line of a `Report`.

    Attributes:
        name: qualified name of the module, "" for the model itself.
        kind: "Embedding" or "EmbeddingBag".
        old_dtype, new_dtype: of the weight.
        old_bytes, new_bytes: size of the weight.
        action: "converted", "changed" (was converted before), "unchanged", "skipped" or "reverted".
        shares: name of an earlier module with the same weight, None for none.
    """

    name: str
    kind: str
    old_dtype: torch.dtype
    new_dtype: torch.dtype
    old_bytes: int
    new_bytes: int
    action: str
    shares: str | None = None


class Report(Sequence[ConvertedTable]):
    """What `convert` or `revert` did, a sequence of `ConvertedTable`; ``print`` shows a table."""

    def __init__(self, rows: Iterable[ConvertedTable]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> ConvertedTable: ...
    @overload
    def __getitem__(self, index: slice) -> Report: ...
    def __getitem__(self, index: int | slice) -> ConvertedTable | Report:
        if isinstance(index, slice):
            return Report(self._rows[index])
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ConvertedTable]:
        return iter(self._rows)

    @property
    def old_bytes(self) -> int:
        """Bytes of all tables before; a shared table counts once."""
        return sum(row.old_bytes for row in self._rows if row.shares is None)

    @property
    def new_bytes(self) -> int:
        """Bytes of all tables after; a shared table counts once."""
        return sum(row.new_bytes for row in self._rows if row.shares is None)

    def __str__(self) -> str:
        if not self._rows:
            return "no embedding tables"
        lines = [("table", "kind", "dtype", "size", "action")]
        for row in self._rows:
            size = _change(_size(row.old_bytes), _size(row.new_bytes))
            lines.append(
                (
                    display(row.name),
                    row.kind,
                    _change(short(row.old_dtype), short(row.new_dtype)),
                    size if row.shares is None else f"(in {display(row.shares)})",
                    row.action,
                )
            )
        total = _change(_size(self.old_bytes), _size(self.new_bytes))
        lines.append(("total", "", "", total, ""))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def __repr__(self) -> str:
        return str(self)


def display(name: str) -> str:
    return name or "(the model itself)"


def covers(names: Iterable[str], name: str) -> bool:
    """Whether ``name`` is one of the ``names``, or below one; all is below the model itself, ""."""
    return any(name == entry or name.startswith(entry and f"{entry}.") for entry in names)


def taken(module: nn.Module, names: Iterable[str]) -> str | None:
    """The first of the names under which a module has something of its own, None for none."""
    own = (vars(module), module._parameters, module._buffers, module._modules)
    return next((name for name in names if any(name in kept for kept in own)), None)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _change(old: str, new: str) -> str:
    return old if old == new else f"{old} -> {new}"


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            break
    return f"{size:.1f} {unit}"
