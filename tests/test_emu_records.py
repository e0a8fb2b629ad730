"""The record operators by the CUDA kernels on the CPU, under the shim of ``emu/cuda_emu.h``.

`test_sanitized` runs this file again on a build with AddressSanitizer and UBSan.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emu import records_backend
from emu.sanitizer import run_sanitized
from emu.suite import BLOCK, SANITIZE, examples_of, needs_tools, orders
from hypothesis import given
from hypothesis import strategies as st
from record_cases import (
    MAX,
    NO_DAMAGE,
    Copy,
    Records,
    copies,
    damages,
    flipped,
    records,
    records_of,
    table_of,
)

pytestmark = needs_tools
examples = examples_of(60, sanitized=15)
F32, F16, U8, I64 = torch.float32, torch.float16, torch.uint8, torch.int64


@pytest.fixture(scope="module")
def emu() -> records_backend.EmuRecords:
    return records_backend.load(BLOCK, sanitize=SANITIZE)


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=I64)


def records_in(rows: int, widths: list[tuple[torch.dtype, int]]) -> Records:
    """Headers are an array of their own, in front."""
    table = table_of(rows, [(I64, 2), *widths], rows)
    return Records(table, None, numbers(rows) * 7, numbers(rows) - 3, 2**63 - 5)


# ---- any call ----------------------------------------------------------------------------------


@examples
@given(case=copies(), order=orders)
def test_copies(emu: records_backend.EmuRecords, case: Copy, order: tuple[str, int]) -> None:
    emu.set_order(*order)
    assert case.run(emu) == case.expected()


@examples
@given(case=records(), order=orders, versions=st.booleans())
def test_checksums(
    emu: records_backend.EmuRecords, case: Records, order: tuple[str, int], versions: bool
) -> None:
    emu.set_order(*order)
    wanted = case.wanted()
    assert case.compute(emu) == wanted
    # Random headers are all wrong.
    first = 0 if len(case) else MAX
    assert case.check(emu, versions=versions) == [len(case), first]


@examples
@given(case=records(distinct=True), order=orders, data=st.data())
def test_one_damaged_bit(
    emu: records_backend.EmuRecords, case: Records, order: tuple[str, int], data: st.DataObject
) -> None:
    emu.set_order(*order)
    sealed = case.seal(emu)
    assert sealed.table.bytes() == case.sealed()
    versions = data.draw(st.booleans(), label="versions")
    assert sealed.check(emu, versions=versions, found=(5, 2)) == [5, 2]
    if len(case) == 0:
        return
    k = data.draw(st.integers(0, len(case) - 1), label="k")
    piece, bit = data.draw(damages(case), label="damage")
    assert sealed.damaged(piece, k, bit).check(emu, versions=versions, found=(5, MAX)) == [6, k]
    bit = data.draw(st.integers(0, 63), label="bit")
    assert replace(sealed, rows=flipped(case.rows, k, bit)).check(emu, versions=False) == [1, k]
    later = replace(sealed, versions=flipped(case.versions, k, bit))
    assert later.check(emu) == [1, k]
    assert later.check(emu, versions=False) == NO_DAMAGE


@examples
@given(copy=copies(), case=records(distinct=True), order=orders)
def test_as_the_cpu_kernels(
    emu: records_backend.EmuRecords,
    cpu: Any,
    copy: Copy,
    case: Records,
    order: tuple[str, int],
) -> None:
    emu.set_order(*order)
    assert copy.run(emu) == copy.run(cpu)
    assert case.compute(emu) == case.compute(cpu)
    assert case.seal(emu).table.bytes() == case.seal(cpu).table.bytes()
    assert case.check(emu) == case.check(cpu)


# ---- one thing at a time -----------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 200, 700])
@pytest.mark.parametrize("width", [1, 3, 33])
def test_more_rows_than_the_blocks_have(
    emu: records_backend.EmuRecords, rows: int, width: int
) -> None:
    """Blocks go round, warps with some rows missing; several blocks find something."""
    widths = [(F32, width), (F16, width), (I64, 1)]
    to, from_ = table_of(rows, widths), records_of(rows, widths, 9)
    copy = Copy(to, numbers(rows).flip(0), from_, None)
    case = records_in(rows, widths)
    for order in ("forward", "backward", "shuffled"):
        emu.set_order(order, rows)
        assert copy.run(emu) == copy.expected()
        sealed = case.seal(emu)
        assert sealed.table.bytes() == case.sealed()
        assert sealed.check(emu) == NO_DAMAGE
        bad = sorted({rows - 1, rows // 2, rows * 2 // 3, max(rows - 40, 0)})
        for k in bad:
            sealed = sealed.damaged(1, k, 5)
        assert sealed.check(emu, found=(1, MAX)) == [1 + len(bad), bad[0]]


@pytest.mark.parametrize("versions", [True, False])
def test_every_bit_of_a_header(emu: records_backend.EmuRecords, versions: bool) -> None:
    """The version that is expected is compared, too: the checksum alone would be right."""
    sealed = records_in(128, [(F32, 3)]).seal(emu)
    for bit in range(128):
        sealed = sealed.damaged(0, bit, bit)
    assert sealed.check(emu, versions=versions) == [128, 0]


@pytest.mark.parametrize("width", [4096, 5000, 4099])
def test_wide_rows(emu: records_backend.EmuRecords, width: int) -> None:
    """More units than a block has threads; at the end one that is no whole word."""
    widths = [(F16, width), (F32, 1), (F32, width), (U8, 3)]
    copy = Copy(records_of(3, widths), None, table_of(3, widths, 9), torch.tensor([2, 2, 0]))
    assert copy.run(emu) == copy.expected()
    case = records_in(2, widths)
    assert case.compute(emu) == case.wanted()


@pytest.mark.parametrize("offset", range(1, 17))
def test_memory_that_begins_anywhere(emu: records_backend.EmuRecords, offset: int) -> None:
    """Each width of word, on either side."""
    wide = table_of(5, [(I64, 2), (U8, 96)])
    header, piece = (replace(piece, bytes=min(piece.bytes, 64)) for piece in wide.pieces)
    moved = replace(piece, offset=offset)
    straight, shifted = (replace(wide, pieces=[p]) for p in (piece, moved))
    for copy in (Copy(straight, None, shifted, None), Copy(shifted, None, straight, None)):
        assert copy.run(emu) == copy.expected()
    case = Records(replace(wide, pieces=[header, moved]), None, numbers(5), numbers(5), 1)
    assert case.compute(emu) == case.wanted()


@pytest.mark.parametrize("bad", [-1, 6, 2**62, -(2**63)])
def test_rows_that_are_not_there(emu: records_backend.EmuRecords, bad: int) -> None:
    """They are left out and reported, the others are done."""
    widths = [(F32, 5), (F16, 1)]
    places = torch.tensor([3, bad, 0, 1])
    words = rf"index {bad} at position 1 is out of range for the table with 6 rows"
    for copy in (
        Copy(table_of(6, widths), places, table_of(6, widths, 9), torch.tensor([0, 2, 4, 5])),
        Copy(table_of(6, widths), torch.tensor([0, 2, 4, 5]), table_of(6, widths, 9), places),
    ):
        to = copy.to.on("cpu")
        with pytest.raises(IndexError, match=f"row_copy_: {words}"):
            emu.row_copy_(to.views(), copy.to_rows, copy.from_.views(), copy.from_rows)
        rest = torch.tensor([0, 2, 3])
        assert copy.to_rows is not None
        assert copy.from_rows is not None
        fewer = replace(copy, to_rows=copy.to_rows[rest], from_rows=copy.from_rows[rest])
        assert to.bytes() == fewer.expected()
    case = replace(records_in(6, widths), at=places, rows=numbers(4), versions=numbers(4))
    rest_of = replace(case, at=places[rest], rows=case.rows[rest], versions=case.versions[rest])
    table = case.table.on("cpu")
    headers, *pieces = table.views()
    with pytest.raises(IndexError, match=f"checksum: {words}"):
        case.compute(emu)
    with pytest.raises(IndexError, match=f"checksum_seal_: {words}"):
        emu.checksum_seal_(headers, pieces, places, case.rows, case.versions, case.seed)
    assert table.bytes() == rest_of.sealed()
    found = torch.tensor([0, MAX])
    with pytest.raises(IndexError, match=f"checksum_check_: {words}"):
        emu.checksum_check_(headers, pieces, places, case.rows, None, case.seed, found)
    assert found.tolist() == NO_DAMAGE


def test_no_bytes_at_all(emu: records_backend.EmuRecords) -> None:
    """Rows are looked at all the same."""
    empty = table_of(4, [(F32, 0)])
    assert Copy(empty, None, empty, numbers(4)).run(emu) == [bytearray()]
    with pytest.raises(IndexError):
        emu.row_copy_(empty.views(), None, empty.views(), numbers(4) + 1)
    case = records_in(4, [(F32, 0)])
    assert case.compute(emu) == case.wanted()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(SANITIZE, reason="this is the sanitized run")
def test_sanitized() -> None:
    run_sanitized(Path(__file__), "-k", "not cpu")
