"""Records in plain torch: the fallback for any device, and the oracle of the tests.

Same arguments as the schemas in `_record_ops`, same semantics as ``csrc/ops.h``, same rules and
words as ``csrc/torch/record_operators.h``.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_PIECES = 12
_GOLDEN = 0x9E3779B97F4A7C15


def row_copy_(
    to: list[Tensor], to_rows: Tensor | None, from_: list[Tensor], from_rows: Tensor | None
) -> None:
    op = "row_copy_"
    _require(op, len(to) == len(from_), "to and from_ must have the same number of pieces")
    _check_pieces(op, to)
    _check_pieces(op, from_)
    _require(op, to[0].device == from_[0].device, "all tensors must be on one device")
    for target, source in zip(to, from_, strict=True):
        _require(
            op,
            _row_bytes(target) == _row_bytes(source),
            "pieces must have rows of the same number of bytes",
        )
    num_rows = _num_rows(op, to, to_rows, from_, from_rows)
    _check_rows(op, to, to_rows, num_rows)
    _check_rows(op, from_, from_rows, num_rows)
    for target, source in zip(to, from_, strict=True):
        moved = _take(_bytes(source), from_rows, num_rows)
        _bytes(target)[slice(num_rows) if to_rows is None else to_rows] = moved


def checksum(
    pieces: list[Tensor], at: Tensor | None, rows: Tensor, versions: Tensor, seed: int
) -> Tensor:
    _check_records("checksum", None, pieces, at, rows, versions)
    return _checksums(pieces, at, rows, versions, seed)


def checksum_seal_(
    headers: Tensor,
    pieces: list[Tensor],
    at: Tensor | None,
    rows: Tensor,
    versions: Tensor,
    seed: int,
) -> None:
    _check_records("checksum_seal_", headers, pieces, at, rows, versions)
    sealed = torch.stack((_checksums(pieces, at, rows, versions, seed), versions), 1)
    headers[slice(len(rows)) if at is None else at] = sealed


def checksum_check_(
    headers: Tensor,
    pieces: list[Tensor],
    at: Tensor | None,
    rows: Tensor,
    versions: Tensor | None,
    seed: int,
    found: Tensor,
) -> None:
    op = "checksum_check_"
    _check_records(op, headers, pieces, at, rows, versions)
    _require(op, found.device == headers.device, "all tensors must be on one device")
    _require(
        op,
        found.dtype == torch.int64 and found.numel() == 2 and found.is_contiguous(),
        "found must be contiguous int64 of 2 elements",
    )
    there = _take(headers, at, len(rows))
    wanted = there[:, 1] if versions is None else versions
    good = (there[:, 0] == _checksums(pieces, at, rows, wanted, seed)) & (there[:, 1] == wanted)
    bad = torch.where(~good)[0]
    found[0] += len(bad)
    if len(bad):
        found[1] = torch.minimum(found[1], bad[0])


# ---------------------------------------------------------------------------------------------
# rules
# ---------------------------------------------------------------------------------------------


def _require(op: str, good: bool, rule: str) -> None:
    if not good:
        raise ValueError(f"{op}: {rule}")


def _check_pieces(op: str, pieces: list[Tensor]) -> None:
    _require(op, 1 <= len(pieces) <= MAX_PIECES, f"there must be 1 to {MAX_PIECES} pieces")
    for piece in pieces:
        _require(op, piece.dim() == 2, "pieces must be 2-D")
        _require(op, piece.shape[1] <= 1 or piece.stride(1) == 1, "rows must be contiguous")
        _require(op, piece.device == pieces[0].device, "all tensors must be on one device")
        _require(op, len(piece) == len(pieces[0]), "pieces must have the same number of rows")


def _check_numbers(op: str, name: str, numbers: Tensor | None, like: Tensor) -> None:
    if numbers is None:
        return
    _require(op, numbers.device == like.device, "all tensors must be on one device")
    _require(
        op,
        numbers.dtype == torch.int64 and numbers.dim() == 1 and numbers.is_contiguous(),
        f"{name} must be contiguous 1-D int64",
    )


def _num_rows(
    op: str,
    to: list[Tensor],
    to_rows: Tensor | None,
    from_: list[Tensor],
    from_rows: Tensor | None,
) -> int:
    _check_numbers(op, "to_rows", to_rows, to[0])
    _check_numbers(op, "from_rows", from_rows, to[0])
    if to_rows is not None and from_rows is not None:
        _require(
            op, len(to_rows) == len(from_rows), "to_rows and from_rows must have the same length"
        )
    given = to_rows if to_rows is not None else from_rows
    if given is not None:
        return len(given)
    _require(op, len(to[0]) == len(from_[0]), "without row numbers to and from_ must be as long")
    return len(to[0])


def _check_rows(op: str, pieces: list[Tensor], rows: Tensor | None, num_rows: int) -> None:
    """Every row named is there; without row numbers the first ``num_rows`` are named."""
    limit = len(pieces[0])
    if rows is None:
        _require(op, num_rows <= limit, "pieces must have a row for each row number")
        return
    bad = torch.where((rows < 0) | (rows >= limit))[0]
    if len(bad):
        position = int(bad[0])
        raise IndexError(
            f"{op}: index {int(rows[position])} at position {position} is out of range for the "
            f"table with {limit} rows"
        )


def _check_records(
    op: str,
    headers: Tensor | None,
    pieces: list[Tensor],
    at: Tensor | None,
    rows: Tensor,
    versions: Tensor | None,
) -> None:
    _check_pieces(op, pieces)
    _check_numbers(op, "at", at, pieces[0])
    _check_numbers(op, "rows", rows, pieces[0])
    _check_numbers(op, "versions", versions, pieces[0])
    if at is not None:
        _require(op, len(at) == len(rows), "at and rows must have the same length")
    if versions is not None:
        _require(op, len(versions) == len(rows), "versions and rows must have the same length")
    if headers is not None:
        _require(op, headers.device == pieces[0].device, "all tensors must be on one device")
        _require(
            op,
            headers.dtype == torch.int64
            and headers.dim() == 2
            and headers.shape[1] == 2
            and headers.stride(1) == 1
            and len(headers) == len(pieces[0]),
            "headers must be int64 [rows, 2], with a row for each row of the pieces",
        )
    _check_rows(op, pieces, at, len(rows))


# ---------------------------------------------------------------------------------------------
# checksums: int64 stands for uint64, whose products and sums have the same bits
# ---------------------------------------------------------------------------------------------


def _row_bytes(piece: Tensor) -> int:
    return piece.shape[1] * piece.element_size()


def _take(piece: Tensor, at: Tensor | None, num_rows: int) -> Tensor:
    return piece[:num_rows] if at is None else piece[at]


def _bytes(piece: Tensor) -> Tensor:
    """The piece's own memory, [rows, bytes]."""
    rows = piece.detach()
    if rows.shape[1] <= 1:  # whose stride may be any
        rows = rows.as_strided(rows.shape, (rows.stride(0), 1))
    return rows.view(torch.uint8)


def _words(piece: Tensor, at: Tensor | None, num_rows: int) -> Tensor:
    """[num_rows, words], the last one filled up with zeros."""
    rows = _take(_bytes(piece), at, num_rows)
    count = -(-rows.shape[1] // 8)
    words = rows.new_zeros(num_rows * count * 8)
    words.view(num_rows, count * 8)[:, : rows.shape[1]] = rows
    return words.view(torch.int64).view(num_rows, count)


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _checksums(
    pieces: list[Tensor], at: Tensor | None, rows: Tensor, versions: Tensor, seed: int
) -> Tensor:
    num_rows = len(rows)
    key = _mix(torch.full_like(rows, _signed(seed)))
    key = _mix(_mix(key + rows) + versions)
    total = torch.zeros_like(rows)
    first = 0
    for piece in pieces:
        words = _words(piece, at, num_rows)
        count = words.shape[1]
        places = torch.arange(first + 1, first + count + 1, device=words.device)
        total += _mix(words + places * _signed(_GOLDEN)).sum(1)
        first += count
    return _mix(key + total)
