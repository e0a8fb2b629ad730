"""The record operators on every backend: the contract of ``csrc/ops.h``, from `RowPieces` on.

One suite for all backends (see the ``backend`` fixture), against Python's whole numbers
(`record_cases`). Triton has no kernels of these.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Backend, backend_params
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from record_cases import (
    DTYPES,
    MAX,
    MOST_PIECES,
    NO_DAMAGE,
    Copy,
    Piece,
    Records,
    Table,
    checksum_of,
    copies,
    damages,
    flipped,
    random_bytes,
    records,
    records_of,
    table_of,
)
from same_bits import digests_of_levels, digests_of_threads
from torch import Tensor

from fastemb import _native
from fastemb._record_ops import SCHEMAS

BACKENDS = ("cpu", "cuda", "reference")
everywhere = pytest.mark.parametrize("backend", backend_params(*BACKENDS), indirect=True)
# Where row numbers are looked at before anything is written; CUDA kernels report them later.
on_the_host = pytest.mark.parametrize("backend", backend_params("cpu", "reference"), indirect=True)
examples = drawn(40)
F32, F16, U8, I32, I64 = torch.float32, torch.float16, torch.uint8, torch.int32, torch.int64


def numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=I64)


def records_in(rows: int, widths: list[tuple[torch.dtype, int]], seed: int = 5) -> Records:
    """Records with their headers in front, as the host table has them."""
    table = records_of(rows, widths, rows)
    header = Piece(0, I64, 16, 0, table.pieces[0].stride)
    with_header = replace(table, pieces=[header, *table.pieces])
    return Records(with_header, None, numbers(rows) * 7, numbers(rows) - 3, seed)


# ---- copies ------------------------------------------------------------------------------------


@everywhere
@examples
@given(case=copies())
def test_copies(backend: Backend, case: Copy) -> None:
    assert case.run(backend.ops, backend.device) == case.expected()


@everywhere
def test_from_records_to_arrays_and_back(backend: Backend) -> None:
    """All dtypes, every bit: NaNs keep their payload, booleans what they are."""
    widths = [*((dtype, 33) for dtype in DTYPES), (torch.bool, 3), (torch.float8_e4m3fn, 5)]
    stored, slots = records_of(40, widths, 1), table_of(9, widths, 2)
    rows = torch.tensor([39, 0, 7, 8, 9, 31, 2, 5, 22])
    fetched = Copy(slots, None, stored, rows).run(backend.ops, backend.device)
    memories = [torch.tensor(list(memory), dtype=U8) for memory in fetched]
    for slot, record in zip(replace(slots, memories=memories).views(), stored.views(), strict=True):
        assert torch.equal(slot.view(U8), record.view(U8)[rows])
    blank = replace(stored, memories=[torch.zeros_like(m) for m in stored.memories])
    back = Copy(blank, rows, replace(slots, memories=memories), None)
    (written,) = back.run(backend.ops, backend.device)
    (before,) = stored.bytes()
    for piece in stored.pieces:
        for row in rows.tolist():
            assert written[piece.range(row)] == before[piece.range(row)]


@everywhere
def test_copies_between_pieces_of_one_table(backend: Backend) -> None:
    stored = records_of(6, [(F32, 4), (F32, 4)], 3)
    first, second = stored.pieces
    (want,) = stored.bytes()
    for row in range(6):
        want[second.range(row)] = want[first.range(row)]
    there = stored.on(backend.device)
    source, target = there.views()
    backend.ops.row_copy_([target], None, [source], None)
    assert there.bytes() == [want]


@everywhere
@pytest.mark.parametrize("size", [64, 832, 848])
@pytest.mark.parametrize("stride", [896, 912])
@pytest.mark.parametrize("offset", [0, 16, 64])
def test_records_of_whole_cache_lines(
    backend: Backend, size: int, stride: int, offset: int
) -> None:
    """And of others; rows that follow one another are written to and picked ones are."""
    count = 100
    picked = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    memories = [random_bytes(offset + count * stride, seed) for seed in (1, 2)]
    piece = Piece(0, U8, size, offset, stride)
    assert all(memory.data_ptr() % 64 == 0 for memory in memories)
    to, from_ = (Table([memory], count, [piece]) for memory in memories)
    for case in (Copy(to, None, from_, picked), Copy(to, picked, from_, None)):
        assert case.run(backend.ops, backend.device) == case.expected()


@everywhere
def test_columns_may_have_any_stride_where_there_is_one(backend: Backend) -> None:
    """What transposing a row gives, and no columns at all."""
    row = torch.arange(4.0).view(1, 4).to(backend.device)
    to = torch.zeros(4, 1).to(backend.device)
    backend.ops.row_copy_([to], None, [row.t()], None)
    assert to.cpu().flatten().tolist() == [0, 1, 2, 3]
    for count in (1, 4):
        number = numbers(count).to(backend.device)
        sums = [backend.ops.checksum([x], None, number, number, 3) for x in (row.t(), to)]
        assert torch.equal(sums[0].cpu(), sums[1].cpu())
    nothing, empty = torch.zeros(0, 4).to(backend.device), torch.zeros(4, 0).to(backend.device)
    backend.ops.row_copy_([nothing.t()], None, [empty], None)


@everywhere
def test_leaves_of_autograd_are_written(backend: Backend) -> None:
    """A parameter is memory like any other."""
    weight = torch.nn.Parameter(torch.zeros(3, 2).to(backend.device))
    with torch.no_grad():
        backend.ops.row_copy_([weight], None, [torch.ones(3, 2).to(backend.device)], None)
    assert weight.detach().cpu().tolist() == [[1, 1]] * 3


# ---- checksums ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "row", "version", "seed", "checksum"),
    [
        ([b""], 0, 0, 0, 0x0000000000000000),
        ([bytes(8)], 0, 0, 0, 0x48218226FF3CD4BF),
        ([b"\x01"], 0, 0, 0, 0xDCE423FC82C0D5B8),
        ([b"abcdefgh"], 1, 2, 3, 0x61EEC61323E05CAD),
        ([b"abcdefgh", b"", b"ijk"], 123456789, -1, -5, 0xFC9B52197EAA6EC5),
        ([bytes(range(40)), b"\xff\x80"], 2**62, 7, 2**63 - 1, 0x238E1BE2DE1D31DE),
    ],
)
@everywhere
def test_pinned(
    backend: Backend, pieces: list[bytes], row: int, version: int, seed: int, checksum: int
) -> None:
    """The formula is part of the file format: it must never change."""
    there = [torch.tensor(list(p), dtype=U8, device=backend.device).view(1, -1) for p in pieces]
    at = [torch.tensor([x], dtype=I64).to(backend.device) for x in (row, version)]
    got = backend.ops.checksum(there, None, *at, seed)
    assert got.item() % 2**64 == checksum
    assert checksum_of(pieces, row, version, seed) % 2**64 == checksum


@everywhere
@examples
@given(case=records(), versions=st.booleans())
def test_checksums(backend: Backend, case: Records, versions: bool) -> None:
    assert case.compute(backend.ops, backend.device) == case.wanted()
    # Random headers are all wrong.
    found = case.check(backend.ops, backend.device, versions=versions)
    assert found == [len(case), 0 if len(case) else MAX]


@everywhere
@examples
@given(case=records(distinct=True), data=st.data())
def test_one_damaged_bit(backend: Backend, case: Records, data: st.DataObject) -> None:
    where: tuple[Any, Any] = backend.ops, backend.device
    sealed = case.seal(*where)
    assert sealed.table.bytes() == case.sealed()
    versions = data.draw(st.booleans(), label="versions")
    assert sealed.check(*where, versions=versions, found=(5, 2)) == [5, 2]
    if len(case) == 0:
        return
    k = data.draw(st.integers(0, len(case) - 1), label="k")
    piece, bit = data.draw(damages(case), label="damage")
    damaged = sealed.damaged(piece, k, bit)
    assert damaged.check(*where, versions=versions, found=(5, MAX)) == [6, k]
    assert damaged.check(*where, versions=versions, found=(0, -1)) == [1, -1]
    bit = data.draw(st.integers(0, 63), label="bit")
    other = replace(sealed, rows=flipped(case.rows, k, bit))
    assert other.check(*where, versions=versions) == [1, k]
    later = replace(sealed, versions=flipped(case.versions, k, bit))
    assert later.check(*where) == [1, k]
    assert later.check(*where, versions=False) == NO_DAMAGE


@everywhere
def test_every_single_bit(backend: Backend) -> None:
    """Of headers, payload, row and version: as many records as bits, each with another wrong."""
    widths = [(F32, 5), (F16, 3), (U8, 1), (F32, 0), (I64, 1), (U8, 17)]
    pieces = records_in(1, widths).table.pieces
    bits = [(i, bit) for i, piece in enumerate(pieces) for bit in range(8 * piece.bytes)]
    count = len(bits)
    case = records_in(count, widths)
    one_row = case.table.memories[0].view(count, -1)[:1]
    same = replace(case.table, memories=[one_row.expand(count, -1).contiguous().flatten()])
    case = replace(case, table=same, rows=torch.full((count,), 9), versions=torch.full((count,), 4))
    sealed = case.seal(backend.ops, backend.device)
    assert sealed.check(backend.ops, backend.device) == NO_DAMAGE
    (memory,) = (m.clone() for m in sealed.table.memories)
    for k, (piece, bit) in enumerate(bits):
        memory[sealed.table.pieces[piece].range(k).start + bit // 8] ^= 1 << bit % 8
    damaged = replace(sealed, table=replace(sealed.table, memories=[memory]))
    for versions in (True, False):
        found = damaged.check(backend.ops, backend.device, versions=versions)
        assert found == [count, 0], versions
    for name in ("rows", "versions"):
        wrong = getattr(sealed, name).clone()
        wrong[100:164] ^= torch.ones(64, dtype=I64) << numbers(64)
        other = replace(sealed, **{name: wrong})
        assert other.check(backend.ops, backend.device) == [64, 100]


@everywhere
def test_words_and_records_in_each_others_place(backend: Backend) -> None:
    """Any two words of a record, of one piece or of two, and records with their headers."""
    widths = [(I64, 6), (I32, 2), (F32, 6)]
    case = records_in(1, widths)
    swapped = {case.compute(backend.ops, backend.device)[0]}
    places = range(2, 12)  # words behind the header
    for a, b in itertools.combinations(places, 2):
        words = case.table.memories[0].clone().view(I64)
        words[[a, b]] = words[[b, a]]
        table = replace(case.table, memories=[words.view(U8)])
        swapped.add(replace(case, table=table).compute(backend.ops, backend.device)[0])
    assert len(swapped) == 1 + len(places) * (len(places) - 1) // 2
    sealed = records_in(20, widths).seal(backend.ops, backend.device)
    memory = sealed.table.memories[0].clone().view(20, -1)
    memory[[3, 11]] = memory[[11, 3]]
    wrong = replace(sealed, table=replace(sealed.table, memories=[memory.flatten()]))
    for versions in (True, False):
        assert wrong.check(backend.ops, backend.device, versions=versions) == [2, 3]
    # A record that an older one has replaced is whole, but not what is asked for.
    stale = replace(sealed, versions=sealed.versions + (numbers(20) == 4))
    assert stale.check(backend.ops, backend.device) == [1, 4]
    assert stale.check(backend.ops, backend.device, versions=False) == NO_DAMAGE


@everywhere
def test_a_word_is_not_the_word_before_it_moved(backend: Backend) -> None:
    """Zeros are counted, and where a piece ends: only its padding is like zeros."""
    one = torch.ones(1, dtype=I64, device=backend.device)

    def checksum(*pieces: list[int]) -> int:
        there = [torch.tensor([p], dtype=U8, device=backend.device) for p in pieces]
        return int(backend.ops.checksum(there, None, one, one, 7).item())

    assert checksum([1, 2, 3]) == checksum([1, 2, 3, 0]) == checksum([1, 2, 3], [])
    different = [
        checksum([1] * 8),
        checksum([1] * 8, [0]),
        checksum([0], [1] * 8),
        checksum([1] * 4, [1] * 4),
        checksum([1] * 8, [0], [0]),
    ]
    assert len(set(different)) == len(different)


@everywhere
def test_slots_and_records_have_the_same_checksums(backend: Backend) -> None:
    widths = [(F16, 33), (F32, 33), (F32, 1), (I32, 1)]
    case = records_in(12, widths)
    slots = [x.contiguous().to(backend.device) for x in case.table.views()[1:]]
    rows, versions = case.rows.to(backend.device), case.versions.to(backend.device)
    sums = backend.ops.checksum(slots, None, rows, versions, case.seed)
    assert sums.tolist() == case.wanted()


@everywhere
def test_nothing_to_do(backend: Backend) -> None:
    """No rows of a table, no table, and no records to look at."""
    none = numbers(0)
    for rows in (0, 3):
        to, from_ = table_of(rows, [(F32, 3)], 1), table_of(rows, [(F32, 3)], 2)
        for to_rows, from_rows in ((none, None), (None, none), (none, none)):
            case = Copy(to, to_rows, from_, from_rows)
            assert case.run(backend.ops, backend.device) == to.bytes()
        for at in (none, None):
            nothing = replace(records_in(rows, [(F32, 3)]), at=at, rows=none, versions=none)
            assert nothing.compute(backend.ops, backend.device) == []
            sealed = nothing.seal(backend.ops, backend.device)
            assert sealed.table.bytes() == nothing.table.bytes()
            assert nothing.check(backend.ops, backend.device, found=(4, 4)) == [4, 4]


# ---- the CPU -----------------------------------------------------------------------------------


def digest(ops: Any) -> str:
    """Of every bit that fixed calls write, on more rows than one thread has."""
    found = hashlib.sha256()
    for widths in (
        [(F32, 1), (F32, 1), (I32, 1)],
        [(F16, 127), (F32, 127), (F32, 1), (U8, 5)],
        [(F32, 4099)],
        [(F32, 208)],  # whole cache lines
    ):
        rows = 100_000 // sum(width for _, width in widths)
        case = records_in(rows, widths)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(3))
        slots = table_of(rows, widths, 4)
        for copy in (
            Copy(slots, None, replace(case.table, pieces=case.table.pieces[1:]), order),
            Copy(replace(case.table, pieces=case.table.pieces[1:]), order, slots, None),
        ):
            for memory in copy.run(ops):
                found.update(memory)
        sealed = replace(case, at=order).seal(ops)
        for bad in (5, rows // 3, rows - 1):
            sealed = sealed.damaged(1, bad, 3)
        for result in (case.compute(ops), sealed.check(ops), sealed.check(ops, versions=False)):
            found.update(repr(result).encode())
        assert sealed.check(ops) == [3, 5]
    return found.hexdigest()


def test_thread_counts() -> None:
    assert digests_of_threads(digest) == {digest(_native.backend("reference"))}


def test_instruction_sets() -> None:
    digests = digests_of_levels("test_record_operators")
    assert len(set(digests.values())) == 1, digests


# ---- what is refused ---------------------------------------------------------------------------


def _call(op: str) -> dict[str, Any]:
    """A good call, by argument name. What it writes shows when it has run."""
    stored = random_bytes(6 * 48, 1).view(6, 48)
    if op == "row_copy_":
        return {
            "to": [torch.zeros(5, 3), torch.zeros(5, 8, dtype=U8)],
            "to_rows": torch.tensor([4, 0]),
            "from_": [stored[:, 16:28].view(F32), stored[:, 32:40].view(F16)],
            "from_rows": torch.tensor([0, 5]),
        }
    call: dict[str, Any] = {
        "headers": stored[:, :16].view(I64),
        "pieces": [stored[:, 16:28].view(F32), stored[:, 32:40].view(F16)],
        "at": torch.tensor([5, 0, 2]),
        "rows": torch.tensor([9, 1, -4]),
        "versions": torch.tensor([0, 2, 1]),
        "seed": 11,
    }
    if op == "checksum":
        del call["headers"]
    if op == "checksum_check_":
        call["found"] = torch.tensor(NO_DAMAGE)
    return call


CHECKSUMS = ("checksum", "checksum_seal_", "checksum_check_")


def _wrong_calls() -> dict[str, tuple[str, dict[str, Any], str]]:
    """name -> (operator, changes to `_call`, the whole message behind the operator's name)"""
    wrong: dict[str, tuple[str, dict[str, Any], str]] = {}
    strided = torch.zeros(3, 6).t()
    many = [torch.zeros(6, 1)] * (MOST_PIECES + 1)
    count = "there must be 1 to 12 pieces"
    whole = "rows must be contiguous"
    long = "pieces must have the same number of rows"
    copy: dict[str, tuple[dict[str, Any], str]] = {
        "of one piece": (
            {"to": [torch.zeros(5, 3)]},
            "to and from_ must have the same number of pieces",
        ),
        "of none": ({"to": [], "from_": []}, count),
        "of many": ({"to": many, "from_": many}, count),
        "flat": ({"to": [torch.zeros(5), torch.zeros(5, 8)]}, "pieces must be 2-D"),
        "from flat": ({"from_": [torch.zeros(5), torch.zeros(5, 8)]}, "pieces must be 2-D"),
        "strided": ({"to": [strided, torch.zeros(6, 8, dtype=U8)]}, whole),
        "from strided": ({"from_": [strided, torch.zeros(6, 8, dtype=U8)]}, whole),
        "long": ({"to": [torch.zeros(5, 3), torch.zeros(6, 8, dtype=U8)]}, long),
        "from long": ({"from_": [torch.zeros(5, 3), torch.zeros(6, 8, dtype=U8)]}, long),
        "wide": (
            {"to": [torch.zeros(5, 3), torch.zeros(5, 9, dtype=U8)]},
            "pieces must have rows of the same number of bytes",
        ),
        "rows of two lengths": (
            {"to_rows": torch.tensor([1])},
            "to_rows and from_rows must have the same length",
        ),
        "no rows": (
            {"to_rows": None, "from_rows": None},
            "without row numbers to and from_ must be as long",
        ),
        "more rows than to has": (
            {"to_rows": None, "from_rows": torch.zeros(6, dtype=I64)},
            "pieces must have a row for each row number",
        ),
        "more rows than from_ has": (
            {"to_rows": torch.zeros(7, dtype=I64), "from_rows": None},
            "pieces must have a row for each row number",
        ),
    }
    for name, (changes, rule) in copy.items():
        wrong[f"copy {name}"] = ("row_copy_", changes, rule)
    rows = torch.tensor([1, 2, 3, 4, 0, 5])
    for op in SCHEMAS:
        for name in ("to_rows", "from_rows", "at", "rows", "versions"):
            if name not in _call(op):
                continue
            rule = f"{name} must be contiguous 1-D int64"
            wrong[f"{op} {name} int32"] = (op, {name: torch.zeros(3, dtype=I32)}, rule)
            wrong[f"{op} {name} 2-D"] = (op, {name: torch.zeros(1, 3, dtype=I64)}, rule)
            wrong[f"{op} {name} strided"] = (op, {name: rows[::2]}, rule)
    for op in CHECKSUMS:
        changes = {
            "none": ({"pieces": []}, count),
            "many": ({"pieces": many}, count),
            "flat": ({"pieces": [torch.zeros(6)]}, "pieces must be 2-D"),
            "strided": ({"pieces": [strided]}, whole),
            "long": ({"pieces": [torch.zeros(6, 3), torch.zeros(5, 3)]}, long),
            "at long": ({"at": rows}, "at and rows must have the same length"),
            "versions long": ({"versions": rows}, "versions and rows must have the same length"),
            "few": (
                {name: torch.zeros(7, dtype=I64) for name in ("rows", "versions")} | {"at": None},
                "pieces must have a row for each row number",
            ),
        }
        for name, (change, rule) in changes.items():
            wrong[f"{op} {name}"] = (op, change, rule)
        if op == "checksum":
            continue
        rule = "headers must be int64 [rows, 2], with a row for each row of the pieces"
        for name, value in {
            "float": torch.zeros(6, 2, dtype=torch.float64),
            "flat": torch.zeros(12, dtype=I64),
            "wide": torch.zeros(6, 3, dtype=I64),
            "strided": torch.zeros(2, 6, dtype=I64).t(),
            "few": torch.zeros(5, 2, dtype=I64),
        }.items():
            wrong[f"{op} headers {name}"] = (op, {"headers": value}, rule)
    for name, value in {
        "int32": torch.zeros(2, dtype=I32),
        "one": torch.zeros(1, dtype=I64),
        "strided": torch.zeros(4, dtype=I64)[::2],
    }.items():
        rule = "found must be contiguous int64 of 2 elements"
        wrong[f"found {name}"] = ("checksum_check_", {"found": value}, rule)
    return wrong


WRONG = _wrong_calls()


def _memory(x: Tensor) -> Tensor:
    """All that a tensor is a view of, in a line."""
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


def _call_on(device: torch.device, op: str, changes: dict[str, Any]) -> dict[str, Any]:
    def there(value: Any) -> Any:
        if isinstance(value, list):
            return [there(x) for x in value]
        if not isinstance(value, Tensor):
            return value
        memory = _memory(value).to(device, copy=True)
        return memory.as_strided(value.shape, value.stride(), value.storage_offset())

    call = {key: there(value) for key, value in (_call(op) | changes).items()}
    assert list(call) == [a.name for a in getattr(torch.ops.fastemb, op).default._schema.arguments]
    return call


def _assert_refused(
    backend: Backend, op: str, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    """In these words, and nothing is written."""
    call = _call_on(backend.device, op, changes)
    flat = [x for value in call.values() for x in (value if isinstance(value, list) else [value])]
    tensors = [x for x in flat if isinstance(x, Tensor)]
    before = [_memory(x).to("cpu", copy=True) for x in tensors]
    with pytest.raises(error) as raised:
        getattr(backend.ops, op)(*call.values())
    assert str(raised.value).splitlines()[0] == f"{op}: {words}"
    for x, old in zip(tensors, before, strict=True):
        assert torch.equal(_memory(x).cpu().view(U8), old.view(U8))


@everywhere
@pytest.mark.parametrize("name", WRONG)
def test_what_would_break_memory_is_refused(backend: Backend, name: str) -> None:
    op, changes, words = WRONG[name]
    _assert_refused(backend, op, changes, ValueError, words)


@on_the_host
@pytest.mark.parametrize("bad", [-1, 6, 2**40, -(2**63)])
@pytest.mark.parametrize("op", SCHEMAS)
def test_rows_that_are_not_there_are_refused(backend: Backend, op: str, bad: int) -> None:
    for name in ("to_rows", "from_rows", "at"):
        if name not in _call(op):
            continue
        rows = _call(op)[name].clone()
        rows[1] = bad
        limit = 5 if name == "to_rows" else 6
        words = f"index {bad} at position 1 is out of range for the table with {limit} rows"
        _assert_refused(backend, op, {name: rows}, IndexError, words)


@on_the_host
def test_a_table_without_rows_has_no_row_0(backend: Backend) -> None:
    empty = torch.zeros(0, 3)
    words = "index 0 at position 0 is out of range for the table with 0 rows"
    for name, there in (("from_", "from_rows"), ("to", "to_rows")):
        changes = {"to": [torch.zeros(1, 3)], "to_rows": None, "from_rows": None}
        changes |= {"from_": [torch.zeros(1, 3)], name: [empty], there: numbers(1)}
        _assert_refused(backend, "row_copy_", changes, IndexError, words)


@pytest.mark.parametrize("op", SCHEMAS)
def test_tensors_of_other_devices_are_refused(op: str) -> None:
    reference = getattr(_native.backend("reference"), op)
    for name, value in _call(op).items():
        if isinstance(value, int):
            continue
        call = _call(op)
        call[name] = [x.to("meta") for x in value] if isinstance(value, list) else value.to("meta")
        with pytest.raises(ValueError, match=f"{op}: all tensors must be on one device"):
            reference(*call.values())


@everywhere
@pytest.mark.parametrize("op", SCHEMAS)
def test_good_calls_are_good(backend: Backend, op: str) -> None:
    getattr(backend.ops, op)(*_call_on(backend.device, op, {}).values())


@pytest.mark.parametrize("op", SCHEMAS)
def test_opcheck(op: str) -> None:
    operator = getattr(torch.ops.fastemb, op).default
    torch.library.opcheck(operator, tuple(_call(op).values()))
    without: dict[str, Any] = {"at": None, "versions": None, "to_rows": None}
    if op != "checksum_check_":
        del without["versions"]
    call = _call(op) | {key: value for key, value in without.items() if key in _call(op)}
    torch.library.opcheck(operator, tuple(call.values()))
