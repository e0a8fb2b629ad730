"""The record operators by the CUDA kernels as a backend on CPU tensors, run by ``cuda_emu.h``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import UNWRITTEN, address, load_module

COMPUTE, SEAL, CHECK = range(3)
# (address, bytes from row to row, bytes of a row)
Piece = tuple[int, int, int]


def load(block: int = 64, sanitize: bool = False) -> EmuRecords:
    return EmuRecords(load_module(block, sanitize, "record_kernels"))


class EmuRecords:
    """The operators of ``_record_ops.py`` over the emulated kernels.

    A row that is not there raises once the kernel has ended, in the words of the library, and is
    left in ``error``: position, row and limit.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.error: tuple[int, int, int] | None = None

    def set_order(self, order: str, seed: int = 0) -> None:
        """Order of blocks and threads: ``forward``, ``backward`` or ``shuffled``."""
        self.module.set_order(order, seed)

    def row_copy_(
        self,
        to: list[Tensor],
        to_rows: Tensor | None,
        from_: list[Tensor],
        from_rows: Tensor | None,
    ) -> None:
        given = to_rows if to_rows is not None else from_rows
        report = torch.zeros(4, dtype=torch.int64)
        self.module.row_copy(
            **{"to": _pieces(to), "from": _pieces(from_)},
            to_limit=len(to[0]),
            from_limit=len(from_[0]),
            to_rows=address(to_rows),
            from_rows=address(from_rows),
            num_rows=len(to[0]) if given is None else len(given),
            error=report.data_ptr(),
        )
        self._check("row_copy_", report)

    def checksum(
        self, pieces: list[Tensor], at: Tensor | None, rows: Tensor, versions: Tensor, seed: int
    ) -> Tensor:
        output = torch.full_like(rows, UNWRITTEN)
        self._run("checksum", COMPUTE, None, pieces, at, rows, versions, seed, output=output)
        return output

    def checksum_seal_(
        self,
        headers: Tensor,
        pieces: list[Tensor],
        at: Tensor | None,
        rows: Tensor,
        versions: Tensor,
        seed: int,
    ) -> None:
        self._run("checksum_seal_", SEAL, headers, pieces, at, rows, versions, seed)

    def checksum_check_(
        self,
        headers: Tensor,
        pieces: list[Tensor],
        at: Tensor | None,
        rows: Tensor,
        versions: Tensor | None,
        seed: int,
        found: Tensor,
    ) -> None:
        self._run("checksum_check_", CHECK, headers, pieces, at, rows, versions, seed, found=found)

    def _run(
        self,
        op: str,
        mode: int,
        headers: Tensor | None,
        pieces: list[Tensor],
        at: Tensor | None,
        rows: Tensor,
        versions: Tensor | None,
        seed: int,
        output: Tensor | None = None,
        found: Tensor | None = None,
    ) -> None:
        report = torch.zeros(4, dtype=torch.int64)
        self.module.checksum(
            mode=mode,
            pieces=_pieces(pieces),
            limit=len(pieces[0]),
            headers=address(headers),
            header_stride=0 if headers is None else headers.stride(0) * headers.element_size(),
            at=address(at),
            rows=address(rows),
            versions=address(versions),
            num_rows=len(rows),
            seed=seed,
            output=address(output),
            found=address(found),
            error=report.data_ptr(),
        )
        self._check(op, report)

    def _check(self, op: str, report: Tensor) -> None:
        code, position, row, limit = report.tolist()
        self.error = None if code == 0 else (position, row, limit)
        if self.error is not None:
            assert code & 0xFFFFFFFF == 1
            raise IndexError(
                f"{op}: index {row} at position {position} is out of range for the table with "
                f"{limit} rows"
            )


def _pieces(tensors: list[Tensor]) -> list[Piece]:
    assert all(x.dim() == 2 and (x.shape[1] <= 1 or x.stride(1) == 1) for x in tensors)
    size = [x.element_size() for x in tensors]
    return [
        (x.data_ptr(), x.stride(0) * n, x.shape[1] * n) for x, n in zip(tensors, size, strict=True)
    ]
