"""Records that hypothesis draws for the record operators, and what is to come of them.

A `Table` is memory and the pieces in it, a `Copy` a call of ``row_copy_``, `Records` calls of the
checksum operators. What is to come is worked out here on bytes and Python's whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (
    *(torch.uint8, torch.int8, torch.float16, torch.bfloat16),
    *(torch.int32, torch.float32, torch.float64, torch.int64),
)
WORD = 2**64
MAX = 2**63 - 1
MOST_PIECES = 12
NO_DAMAGE = [0, MAX]

int64s = st.one_of(st.integers(-2, 40), st.integers(-(2**63), MAX))


# ---- the formula -------------------------------------------------------------------------------


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % WORD
    x ^= x >> 27
    x = x * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def checksum_of(pieces: list[bytes], row: int, version: int, seed: int) -> int:
    """Of one record, as ``csrc/ops.h`` has it; the bits of a uint64 as an int64."""
    key = mix((mix((mix(seed % WORD) + row) % WORD) + version) % WORD)
    payload = b"".join(piece + bytes(-len(piece) % 8) for piece in pieces)
    for i in range(len(payload) // 8):
        word = int.from_bytes(payload[8 * i : 8 * i + 8], "little")
        key += mix((word + (i + 1) * 0x9E3779B97F4A7C15) % WORD)
    return signed(mix(key % WORD))


def signed(x: int) -> int:
    x %= WORD
    return x - WORD if x > MAX else x


# ---- memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Rows in one of a table's memories; all lengths in bytes."""

    memory: int
    dtype: torch.dtype
    bytes: int
    offset: int
    stride: int

    def of(self, memory: Tensor, rows: int) -> Tensor:
        size = self.dtype.itemsize
        shape, strides = (rows, self.bytes // size), (self.stride // size, 1)
        return memory.view(self.dtype).as_strided(shape, strides, self.offset // size)

    def range(self, row: int) -> slice:
        begin = self.offset + row * self.stride
        return slice(begin, begin + self.bytes)


@dataclass(frozen=True)
class Table:
    """``rows`` rows of ``pieces`` in ``memories``, which are bytes in a line."""

    memories: list[Tensor]
    rows: int
    pieces: list[Piece]

    def on(self, device: torch.device | str) -> Table:
        """A copy of the memories."""
        return replace(self, memories=[m.to(device, copy=True) for m in self.memories])

    def views(self) -> list[Tensor]:
        return [piece.of(self.memories[piece.memory], self.rows) for piece in self.pieces]

    def bytes(self) -> list[bytearray]:
        return [bytearray(m.cpu().numpy().tobytes()) for m in self.memories]

    def __repr__(self) -> str:
        return f"Table({[len(m) for m in self.memories]}, {self.rows}, {self.pieces})"


def random_bytes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count,), generator=generator, dtype=torch.uint8)


def table_of(rows: int, widths: list[tuple[torch.dtype, int]], seed: int = 0) -> Table:
    """Packed arrays with rows of so many elements."""
    memories, pieces = [], []
    for i, (dtype, width) in enumerate(widths):
        size = width * dtype.itemsize
        memories.append(random_bytes(rows * size + -(rows * size) % 16, seed + i))
        pieces.append(Piece(i, dtype, size, 0, size))
    return Table(memories, rows, pieces)


def records_of(rows: int, widths: list[tuple[torch.dtype, int]], seed: int = 0) -> Table:
    """The same as records with room for a header, the layout of the host table."""
    pieces, end = [], 16
    for dtype, width in widths:
        size = width * dtype.itemsize
        pieces.append((dtype, size, end))
        end += size + -size % 8
    end += -end % 16
    placed = [Piece(0, dtype, size, offset, end) for dtype, size, offset in pieces]
    return Table([random_bytes(rows * end, seed)], rows, placed)


@st.composite
def tables(
    draw: st.DrawFn, rows: int, widths: list[tuple[torch.dtype, int]], seed: int = 0
) -> Table:
    """Any table whose pieces have those dtypes and bytes: records, arrays, in memory with gaps."""
    pieces: list[Piece] = []
    memories = []
    together = draw(st.booleans())
    packed = draw(st.booleans())

    def gap(step: int) -> int:
        return 0 if packed else step * draw(st.integers(0, 3))

    end = gap(1)
    for i, (dtype, size) in enumerate(widths):
        item = dtype.itemsize
        if together:
            end += -end % item
            pieces.append(Piece(0, dtype, size, end, 0))
            end += size + gap(1)
            continue
        piece = Piece(i, dtype, size, gap(item), size + gap(item))
        pieces.append(piece)
        memories.append(piece.offset + rows * piece.stride)
    if together:
        step = max(dtype.itemsize for dtype, _ in widths)
        end += -end % (step if draw(st.booleans()) else 16)
        pieces = [replace(piece, stride=end) for piece in pieces]
        memories = [rows * end]
    # Whole words, or memory could not be viewed as elements of any type.
    made = [random_bytes(size + -size % 16, seed + i) for i, size in enumerate(memories)]
    return Table(made, rows, pieces)


@st.composite
def row_bytes(draw: st.DrawFn, multiple: int, largest: int) -> int:
    count = draw(st.one_of(st.integers(0, 9), st.sampled_from((16, 31, 64, 65, 130, 300))))
    return min(count, largest // multiple) * multiple


def rows_among(limit: int, count: int, distinct: bool) -> st.SearchStrategy[Tensor]:
    """[count] row numbers."""
    if limit == 0:
        assert count == 0
        return st.just(torch.zeros(0, dtype=torch.int64))
    numbers = st.lists(st.integers(0, limit - 1), min_size=count, max_size=count, unique=distinct)
    return numbers.map(lambda x: torch.tensor(x, dtype=torch.int64))


# ---- row_copy_ ---------------------------------------------------------------------------------


def _there(x: Tensor | None, device: torch.device | str) -> Tensor | None:
    return None if x is None else x.to(device)


@dataclass(frozen=True)
class Copy:
    """A call of ``row_copy_``."""

    to: Table
    to_rows: Tensor | None
    from_: Table
    from_rows: Tensor | None

    def run(self, ops: Any, device: torch.device | str = "cpu") -> list[bytearray]:
        """What `to` holds then, the memory between its rows too. Nothing else has changed."""
        to, from_ = self.to.on(device), self.from_.on(device)
        to_rows, from_rows = _there(self.to_rows, device), _there(self.from_rows, device)
        ops.row_copy_(to.views(), to_rows, from_.views(), from_rows)
        assert from_.bytes() == self.from_.bytes()
        return to.bytes()

    def expected(self) -> list[bytearray]:
        to, from_ = self.to.bytes(), self.from_.bytes()
        given = self.to_rows if self.to_rows is not None else self.from_rows
        count = self.to.rows if given is None else len(given)
        for k in range(count):
            target = k if self.to_rows is None else int(self.to_rows[k])
            source = k if self.from_rows is None else int(self.from_rows[k])
            for t, f in zip(self.to.pieces, self.from_.pieces, strict=True):
                to[t.memory][t.range(target)] = from_[f.memory][f.range(source)]
        return to


@st.composite
def copies(draw: st.DrawFn, largest: int = 2600) -> Copy:
    """Any copy; rows of `largest` bytes a piece at most."""
    widths = []
    for _ in range(draw(st.sampled_from((1, 1, 2, 3, 5, MOST_PIECES)))):
        to, from_ = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
        size = draw(row_bytes(max(to.itemsize, from_.itemsize), largest))
        widths.append(((to, size), (from_, size)))
    count = draw(st.integers(0, 9))
    to_given, from_given = draw(st.booleans()), draw(st.booleans())
    more = to_given or from_given  # rows than are copied
    to_limit, from_limit = (count + draw(st.integers(0, 4)) * more for _ in range(2))
    if from_given and from_limit > 1 and draw(st.booleans()):
        from_limit = 1  # one row many times
    return Copy(
        draw(tables(to_limit, [w[0] for w in widths])),
        draw(rows_among(to_limit, count, distinct=True)) if to_given else None,
        draw(tables(from_limit, [w[1] for w in widths], 50)),
        draw(rows_among(from_limit, count, distinct=False)) if from_given else None,
    )


# ---- checksums ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """Calls of the checksum operators. The first piece of the table is the header."""

    table: Table
    at: Tensor | None
    rows: Tensor
    versions: Tensor
    seed: int

    def __len__(self) -> int:
        return len(self.rows)

    def wanted(self) -> list[int]:
        memories = self.table.bytes()
        payload = [
            [
                bytes(memories[p.memory][p.range(k if self.at is None else int(self.at[k]))])
                for p in self.table.pieces[1:]
            ]
            for k in range(len(self))
        ]
        numbers = zip(payload, self.rows.tolist(), self.versions.tolist(), strict=True)
        return [checksum_of(pieces, row, version, self.seed) for pieces, row, version in numbers]

    def _numbers(self, device: torch.device | str) -> tuple[Tensor | None, Tensor, Tensor]:
        return _there(self.at, device), self.rows.to(device), self.versions.to(device)

    def compute(self, ops: Any, device: torch.device | str = "cpu") -> list[int]:
        at, rows, versions = self._numbers(device)
        output = ops.checksum(self.table.on(device).views()[1:], at, rows, versions, self.seed)
        assert output.dtype == torch.int64
        assert output.shape == rows.shape
        return output.tolist()

    def seal(self, ops: Any, device: torch.device | str = "cpu") -> Records:
        """The same with the headers that are right."""
        table = self.table.on(device)
        at, rows, versions = self._numbers(device)
        headers, *pieces = table.views()
        ops.checksum_seal_(headers, pieces, at, rows, versions, self.seed)
        return replace(self, table=table.on("cpu"))

    def sealed(self) -> list[bytearray]:
        """What the memories are to hold after `seal`."""
        memories, header = self.table.bytes(), self.table.pieces[0]
        for k, checksum in enumerate(self.wanted()):
            row = k if self.at is None else int(self.at[k])
            words = (checksum, int(self.versions[k]))
            written = b"".join(word.to_bytes(8, "little", signed=True) for word in words)
            memories[header.memory][header.range(row)] = written
        return memories

    def check(
        self,
        ops: Any,
        device: torch.device | str = "cpu",
        *,
        versions: bool = True,
        found: tuple[int, int] = (0, MAX),
    ) -> list[int]:
        """How many are wrong, and the first. Nothing else is written."""
        table = self.table.on(device)
        at, rows, own = self._numbers(device)
        headers, *pieces = table.views()
        place = torch.tensor(found, dtype=torch.int64).to(device)
        ops.checksum_check_(headers, pieces, at, rows, own if versions else None, self.seed, place)
        assert table.bytes() == self.table.bytes()
        return place.tolist()

    def damaged(self, piece: int, k: int, bit: int) -> Records:
        """With a bit of one piece of record k flipped."""
        table, place = self.table.on("cpu"), self.table.pieces[piece]
        row = k if self.at is None else int(self.at[k])
        table.memories[place.memory][place.range(row).start + bit // 8] ^= 1 << bit % 8
        return replace(self, table=table)


def flipped(x: Tensor, k: int, bit: int) -> Tensor:
    """The same int64 numbers with one bit of one of them flipped."""
    x = x.clone()
    x[k] ^= signed(1 << bit)
    return x


@st.composite
def records(draw: st.DrawFn, largest: int = 2600, distinct: bool = False) -> Records:
    """Any records; `distinct`: no two of them in one place, as must be to seal."""
    widths = [(torch.int64, 16)]  # the header
    for _ in range(draw(st.sampled_from((1, 1, 2, 3, 5, MOST_PIECES)))):
        dtype = draw(st.sampled_from(DTYPES))
        widths.append((dtype, draw(row_bytes(dtype.itemsize, largest))))
    count = draw(st.integers(0, 9))
    limit = count + draw(st.integers(0, 4))
    at = draw(rows_among(limit, count, distinct)) if draw(st.booleans()) else None
    numbers = st.lists(int64s, min_size=count, max_size=count)
    rows, versions = (torch.tensor(draw(numbers), dtype=torch.int64) for _ in range(2))
    return Records(draw(tables(limit, widths)), at, rows, versions, draw(int64s))


@st.composite
def damages(draw: st.DrawFn, case: Records) -> tuple[int, int]:
    """(piece, bit) of a record, its header included."""
    pieces = [i for i, piece in enumerate(case.table.pieces) if piece.bytes > 0]
    i = draw(st.sampled_from(pieces))
    return i, draw(st.integers(0, 8 * case.table.pieces[i].bytes - 1))
