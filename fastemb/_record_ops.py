"""The torch contract page of records: schemas and fake kernels.

A record is a row of an offloaded table with its optimizer state, a version and a checksum. Its
parts lie together in the host table and in staging buffers, and in arrays of their own in the
cache on the device. Nothing here is differentiable. The semantics are defined in ``csrc/ops.h``
(`RowCopy` and `Checksum`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastemb import _record_reference
from fastemb._ops import LIBRARY, define

__all__ = ["OPERATORS", "SCHEMAS"]

# Shapes and dtypes; all tensors of a call are on one device:
#   pieces, to, from_   lists of [rows, any] tensors of any dtype; the elements of a row are
#                       contiguous, rows may lie apart. to[i] and from_[i] have rows of the same
#                       number of bytes.
#   to_rows, from_rows, at   [n] int64, contiguous: rows of the pieces; None: 0, 1, ... n - 1
#   rows                [n] int64, contiguous: rows of the table, part of the checksum
#   versions            [n] int64, contiguous
#   headers             [rows, 2] int64: checksum (the bits of a uint64) and version
#   found               [2] int64: how many headers are wrong, added to; the first, a minimum
SCHEMAS = {
    "row_copy_": "(Tensor(a!)[] to, Tensor? to_rows, Tensor[] from_, Tensor? from_rows) -> ()",
    "checksum": ("(Tensor[] pieces, Tensor? at, Tensor rows, Tensor versions, int seed) -> Tensor"),
    "checksum_seal_": (
        "(Tensor(a!) headers, Tensor[] pieces, Tensor? at, Tensor rows, Tensor versions, int seed) "
        "-> ()"
    ),
    # versions None: whatever version a header has is right.
    "checksum_check_": (
        "(Tensor headers, Tensor[] pieces, Tensor? at, Tensor rows, Tensor? versions, int seed, "
        "Tensor(a!) found) -> ()"
    ),
}

OPERATORS = define(SCHEMAS, _record_reference)


def _nothing(*args: object) -> None:
    return None


for _name in ("row_copy_", "checksum_seal_", "checksum_check_"):
    torch.library.register_fake(f"fastemb::{_name}", _nothing, lib=LIBRARY)


@torch.library.register_fake("fastemb::checksum", lib=LIBRARY)
def _checksum_fake(
    pieces: list[Tensor], at: Tensor | None, rows: Tensor, versions: Tensor, seed: int
) -> Tensor:
    return torch.empty_like(rows)
