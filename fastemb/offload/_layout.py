"""What a record consists of, and where its fields are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

HEADER_BYTES = 16  # checksum and version, 8 bytes each
_FIELD_ALIGNMENT = 8  # a word of the checksum
_RECORD_ALIGNMENT = 16
# Records of whole cache lines are gathered in two thirds of the time and scattered in half; that is
# worth one part in so many of the memory, and of what goes over the link.
_LINE = 64
_LINE_SHARE = 16


@dataclass(frozen=True)
class Field:
    """One part of a record.

    Attributes:
        name: "weight", or as the optimizer calls its state.
        dtype: of its elements.
        width: elements per row.
        fill: what the elements are at first; None: the values of the weight.
    """

    name: str
    dtype: torch.dtype
    width: int
    fill: float | None = 0.0

    @property
    def bytes(self) -> int:
        """Of one row, without padding."""
        return self.width * self.dtype.itemsize


class RecordLayout:
    """Header and fields one after the other.

    Attributes:
        fields: "weight" comes first.
        offsets: byte at which each field begins, a multiple of 8; what lies between is zero.
        record_bytes: size of a record: a multiple of 64 where that makes it longer by no more than
            a sixteenth, else of 16.
        gaps: bytes from where to where belong to no field.
    """

    def __init__(self, fields: Iterable[Field]) -> None:
        self.fields = tuple(fields)
        self.offsets: dict[str, int] = {}
        gaps = []
        end = HEADER_BYTES
        for field in self.fields:
            self.offsets[field.name] = end
            end += _round_up(field.bytes, _FIELD_ALIGNMENT)
            gaps.append((self.offsets[field.name] + field.bytes, end))
        self._payload_end = end
        self.record_bytes = _round_up(end, _LINE)
        if (self.record_bytes - end) * _LINE_SHARE > end:
            self.record_bytes = _round_up(end, _RECORD_ALIGNMENT)
        gaps.append((end, self.record_bytes))
        self.gaps = tuple((begin, end) for begin, end in gaps if begin < end)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecordLayout) and self.signature() == other.signature()

    def __hash__(self) -> int:
        return hash(self.signature())

    def signature(self) -> tuple[tuple[str, torch.dtype, int], ...]:
        """What two layouts must agree in for records to be exchanged."""
        return tuple((field.name, field.dtype, field.width) for field in self.fields)

    def __str__(self) -> str:
        parts = (
            f"{field.name} {str(field.dtype).removeprefix('torch.')}[{field.width}]"
            for field in self.fields
        )
        return ", ".join(parts)

    def headers(self, records: Tensor) -> Tensor:
        """[n, 2] int64 view of ``records`` [n, record_bytes] uint8."""
        return records[:, :HEADER_BYTES].view(torch.int64)

    def payload(self, records: Tensor) -> Tensor:
        """What the checksum of ``records`` [n, record_bytes] is taken of, as one piece."""
        return records[:, HEADER_BYTES : self._payload_end]

    def views(self, records: Tensor) -> dict[str, Tensor]:
        """Name -> [n, width] view of ``records`` [n, record_bytes] uint8, whose rows lie apart."""
        return {
            field.name: records[:, begin : begin + field.bytes].view(field.dtype)
            for field in self.fields
            for begin in (self.offsets[field.name],)
        }

    def slots(self, number: int, device: torch.device) -> dict[str, Tensor]:
        """Name -> zeros [number, width] on ``device``: fields of records in arrays of their own."""
        return {
            field.name: torch.zeros(number, field.width, dtype=field.dtype, device=device)
            for field in self.fields
        }


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def why_unfit(value: Tensor) -> str | None:
    """What it is about a tensor that no field can be filled with it; None: one can."""
    if value.is_meta:
        return "a tensor on meta"
    if value.layout != torch.strided:
        return str(value.layout)
    if value.is_complex() or value.is_quantized or value.dtype == torch.bool:
        return str(value.dtype)
    return None
