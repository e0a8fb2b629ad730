"""The record operators on CUDA tensors: ``pytest -m gpu``; any call is in `test_record_operators`.

Never waits for the device, can be captured in a graph, reports row numbers out of range later, and
counts beyond 2**31 bytes.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_suite import DEVICE, can_capture, there, waiting_is_an_error
from record_cases import MAX, NO_DAMAGE, Copy, Piece, Records, checksum_of, records_of, table_of
from torch import Tensor

import fastemb
from fastemb import _native

pytestmark = pytest.mark.gpu
F32, F16, U8, I64 = torch.float32, torch.float16, torch.uint8, torch.int64
WIDTHS = [(F16, 33), (F32, 33), (F32, 1)]


@pytest.fixture(scope="module")
def cuda() -> SimpleNamespace:
    return _native.backend("cuda")


def numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=I64)


def records_in(rows: int) -> Records:
    table = records_of(rows, WIDTHS, rows)
    header = Piece(0, I64, 16, 0, table.pieces[0].stride)
    with_header = replace(table, pieces=[header, *table.pieces])
    return Records(with_header, None, numbers(rows) * 7, numbers(rows) - 3, 5)


def test_nothing_waits(cuda: SimpleNamespace) -> None:
    """From staged records to slots that are checked, and back to records that are sealed."""
    case = records_in(40).seal(_native.backend("reference"))
    stored = case.table.on(DEVICE)
    slots = table_of(50, [(I64, 2), *WIDTHS], 3).on(DEVICE)
    places, rows, versions = there(numbers(40) * 7 % 50, case.rows, case.versions)
    found = torch.tensor(NO_DAMAGE).to(DEVICE)
    from_, to = stored.views(), slots.views()
    with waiting_is_an_error():
        cuda.row_copy_(to, places, from_, None)
        cuda.checksum_check_(to[0], to[1:], places, rows, versions, 5, found)
        sums = cuda.checksum(to[1:], places, rows, versions, 5)
        cuda.checksum_seal_(to[0], to[1:], places, rows, versions, 5)
        cuda.row_copy_(from_, None, to, places)
    assert found.tolist() == NO_DAMAGE
    assert sums.tolist() == case.wanted()
    assert stored.bytes() == case.table.bytes()


@pytest.mark.parametrize("bad", [-1, 6, 2**62, -(2**63)])
def test_rows_that_are_not_there(cuda: SimpleNamespace, bad: int) -> None:
    """They are left out, the others are done, and the error comes when somebody asks."""
    places, rest = torch.tensor([3, bad, 0, 1]), torch.tensor([0, 2, 3])
    others = torch.tensor([0, 2, 4, 5])
    words = rf"index {bad} at position 1 is out of range for the table with 6 rows"

    def raises_later(op: str, *arguments: Any) -> Any:
        result = getattr(cuda, op)(*arguments)
        with pytest.raises(IndexError, match=f"{op}: {words}"):
            fastemb.check_errors()
        return result

    for to_rows, from_rows in ((places, others), (others, places)):
        copy = Copy(table_of(6, WIDTHS), to_rows[rest], table_of(6, WIDTHS, 9), from_rows[rest])
        to, from_ = copy.to.on(DEVICE), copy.from_.on(DEVICE)
        to_places, from_places = there(to_rows, from_rows)
        raises_later("row_copy_", to.views(), to_places, from_.views(), from_places)
        assert to.bytes() == copy.expected()
    case = replace(records_in(6), at=places[rest], rows=numbers(4)[rest], versions=rest + 9)
    table = case.table.on(DEVICE)
    headers, *pieces = table.views()
    at, rows, versions = there(places, numbers(4), numbers(4) + 9)
    sums = raises_later("checksum", pieces, at, rows, versions, case.seed)
    assert sums.cpu()[rest].tolist() == case.wanted()
    raises_later("checksum_seal_", headers, pieces, at, rows, versions, case.seed)
    assert table.bytes() == case.sealed()
    (found,) = there(torch.tensor(NO_DAMAGE))
    raises_later("checksum_check_", headers, pieces, at, rows, versions, case.seed, found)
    assert found.tolist() == NO_DAMAGE


def test_in_a_graph(cuda: SimpleNamespace) -> None:
    """A replay looks at what lies in memory then."""
    if not can_capture():
        pytest.skip("no graph capture on this device")
    case = records_in(40).seal(_native.backend("reference"))
    staged = case.table.on(DEVICE)
    slots = table_of(50, [(I64, 2), *WIDTHS], 3).on(DEVICE)
    places, rows, versions = there(numbers(40) + 3, case.rows, case.versions)
    (found,) = there(torch.tensor(NO_DAMAGE))
    from_, to = staged.views(), slots.views()

    def fetch() -> None:
        cuda.row_copy_(to, places, from_, None)
        cuda.checksum_check_(to[0], to[1:], places, rows, versions, 5, found)

    fetch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fetch()
    assert found.tolist() == NO_DAMAGE
    damaged = case.damaged(2, 17, 100).damaged(1, 20, 0)
    staged.memories[0].copy_(damaged.table.memories[0])
    graph.replay()
    torch.cuda.synchronize()
    assert found.tolist() == [2, 17]
    copy = Copy(table_of(50, [(I64, 2), *WIDTHS], 3), numbers(40) + 3, damaged.table, None)
    assert slots.bytes() == copy.expected()


@pytest.mark.slow
def test_more_than_2_31_bytes(cuda: SimpleNamespace) -> None:
    """Rows behind them, and a row that is so long."""
    size = 2**31 + 64
    if torch.cuda.mem_get_info()[0] < 3 * size:
        pytest.skip("needs 7 GB of device memory")
    memory = torch.zeros(size, dtype=U8, device=DEVICE)
    record = torch.arange(64, dtype=U8)
    last = size // 64 - 1
    at, row, version = there(torch.tensor([last]), torch.tensor([last]), torch.tensor([1]))
    cuda.row_copy_([memory.view(-1, 64)], at, [record.to(DEVICE).view(1, 64)], None)
    assert memory[-64:].tolist() == record.tolist()
    assert int(memory.sum()) == int(record.sum())
    want = checksum_of([bytes(range(64))], last, 1, 7)
    assert cuda.checksum([memory.view(-1, 64)], at, row, version, 7).tolist() == [want]
    found = torch.tensor(NO_DAMAGE, device=DEVICE)
    headers = memory.view(-1, 64)[:, :16].view(I64)
    payload = [memory.view(-1, 64)[:, 16:]]
    cuda.checksum_seal_(headers, payload, at, row, version, 7)
    cuda.checksum_check_(headers, payload, at, row, version, 7, found)
    assert found.tolist() == NO_DAMAGE
    cuda.checksum_check_(headers, payload, None, *[numbers(last + 1).to(DEVICE)] * 2, 7, found)
    assert found.tolist() == [last + 1, 0]
    # One row of all that memory.
    copy = torch.zeros(1, size, dtype=U8, device=DEVICE)
    cuda.row_copy_([copy], None, [memory.view(1, -1)], None)
    assert torch.equal(copy[0], memory)
    (one,) = there(torch.ones(1, dtype=I64))
    sums = [cuda.checksum([x.view(1, -1)], None, one, one, 7).item() for x in (copy, memory)]
    assert sums[0] == sums[1]
    copy[0, -1] ^= 1
    assert cuda.checksum([copy], None, one, one, 7).item() != sums[0]


def test_first_of_many(cuda: SimpleNamespace) -> None:
    """Blocks that find something at once agree on the first."""
    case = records_in(700)
    assert case.check(cuda, DEVICE) == [700, 0]
    sealed = case.seal(cuda, DEVICE)
    for k in (699, 345, 512, 130):
        sealed = sealed.damaged(3, k, 31)
    assert sealed.check(cuda, DEVICE, found=(1, MAX)) == [5, 130]
