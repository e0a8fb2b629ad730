"""Damage to records, wherever it happens, is found before a step uses them, and can be repaired."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from offload_cases import Case, TableCase, limits, raises
from offload_faults import (
    CASE,
    RECORD_BYTES,
    SLOTS,
    Dropped,
    Fault,
    Flip,
    HalfWay,
    Late,
    Pair,
    Stale,
    Swapped,
)

from fastemb.offload import (
    CacheTooSmallError,
    DirtyFileError,
    FileFormatError,
    FileGoneError,
    FileInUseError,
    IntegrityError,
    _slots,
    _transfers,
)
from fastemb.offload._file import HEADER_BYTES
from fastemb.offload._host import HostTable

pytestmark = limits

# Of a record of CASE: checksum, version, and three fields of twelve bytes, each with a gap of four.
PARTS = {"checksum": 0, "version": 8, "weight": 16, "exp_avg": 32 + 5, "exp_avg_sq": 48 + 11}
GAPS = (28, 44, 60)

FAULTS: dict[str, Callable[[str], Fault]] = {
    **{
        f"flip in {name}": lambda lane, byte=byte, k=k: Flip(lane, 5 + 2 * k, byte=byte, bit=k)
        for k, (name, byte) in enumerate(PARTS.items())
    },
    "dropped": lambda lane: Dropped(lane, 9),
    "half dropped": lambda lane: HalfWay(lane, 6),
    "late": lambda lane: Late(lane, 8),
    "stale": lambda lane: Stale(lane, 10),
    "swapped": lambda lane: Swapped(lane, 11),
}


def fails(pair: Pair, direction: str) -> IntegrityError:
    """Train until an error, which says what it must; no step was made with wrong data."""
    with pytest.raises(IntegrityError) as caught:
        pair.train()
    error = caught.value
    check_message(error)
    assert error.table == "t0"
    assert error.direction == direction
    assert error.rows
    way = "to device" if direction == "to device" else "to host"
    assert any(
        (way, error.step) == sent[:2] and set(error.rows) <= sent[2] for sent in pair.sent
    ), (error, pair.sent)
    assert 0 < pair.steps < len(pair.batches)
    weight = pair.model.get_parameter("t0.weight")
    assert float(pair.optimizer.state[weight]["step"]) == pair.steps
    return error


def check_message(error: IntegrityError) -> None:
    """It names table, rows, step and direction."""
    text = str(error)
    for part in (f"table {error.table!r}", str(error.rows[0]), f"step {error.step}"):
        assert part in text
    assert error.direction in text


def train_and_flush(pair: Pair) -> None:
    pair.train()
    pair.engine.flush()


def values_of(pair: Pair, rows: list[int]) -> dict[str, torch.Tensor]:
    return {name: value[rows] for name, value in pair.wanted().items()}


# ---------------------------------------------------------------------------------------------
# on the way to the device
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_damage_on_the_way_to_the_device(name: str, prefetch: bool) -> None:
    fault = FAULTS[name]("deliver")
    pair = Pair(prefetch=prefetch, make_lane=fault.make_lane)
    error = fails(pair, "to device")
    assert fault.happened == 1
    if name.startswith("flip"):
        assert len(error.rows) == 1
    assert ("should have" in str(error)) == (
        name in ("flip in version", "dropped", "half dropped", "late", "stale", "swapped")
    ) or "checksum" in str(error)
    assert pair.differing() == set()  # on the host all is well
    time.sleep(0.05)  # until what is late is there
    if name == "swapped" and not error.also:  # the other half of it
        with pytest.raises(IntegrityError):
            pair.train()
        assert pair.differing() == set()
    pair.finish()


def test_all_damage_that_was_found_by_then_is_reported() -> None:
    pair = Pair(make_lane=Dropped("deliver", 10, 12).make_lane)
    wait = pair.engine.wait

    def late_wait(event: Any) -> None:
        pair.engine.transfers.drain()  # all that was sent has arrived
        wait(event)

    pair.engine.wait = late_wait  # type: ignore[method-assign]
    error = fails(pair, "to device")
    (other,) = error.also
    check_message(other)
    assert str(other) in str(error)
    assert {("to device", e.step) for e in (error, other)} <= {sent[:2] for sent in pair.sent}
    assert not set(error.rows) & set(other.rows)
    pair.finish()  # neither of them is met again


@pytest.mark.parametrize("prefetch", [True, False])
def test_damage_that_lasts_is_found_as_long_as_it_does(prefetch: bool) -> None:
    fault = Flip("deliver", 5, 300, byte=40, record=-1)
    pair = Pair(prefetch=prefetch, make_lane=fault.make_lane)
    fails(pair, "to device")
    for _ in range(3):
        with pytest.raises(IntegrityError):
            pair.train()
    assert pair.differing() == set()
    fault.numbers = range(0)
    pair.finish()


def test_gaps_of_records_are_no_data() -> None:
    for byte in GAPS:
        pair = Pair(make_lane=Flip("deliver", 3, 300, byte=byte, record=None).make_lane)
        pair.finish()


def _row_copy(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The operators, with other slots for what arrives."""

    def row_copy_(to: Any, to_rows: Any, from_: Any, from_rows: Any) -> None:
        if from_rows is None and to_rows is not None:
            to_rows = change(to_rows)
        torch.ops.fastemb.row_copy_(to, to_rows, from_, from_rows)

    names = ("checksum", "checksum_seal_", "checksum_check_")
    return SimpleNamespace(
        row_copy_=row_copy_, **{name: getattr(torch.ops.fastemb, name) for name in names}
    )


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("content", ["clean", "dirty"])
def test_a_record_in_the_wrong_slot(
    monkeypatch: pytest.MonkeyPatch, content: str, prefetch: bool
) -> None:
    pair = Pair(prefetch=prefetch)
    pair.train(5)
    slots = pair.table.slots
    if content == "clean":
        pair.engine.flush()
    hit: list[int] = []

    def change(where: torch.Tensor) -> torch.Tensor:
        # Not slots.dirty(): this is the thread of a lane, the loop may be changing slots.
        dirty = content == "dirty"
        others = torch.where(slots._content == _slots._DIRTY if dirty else slots.row_of >= 0)[0]
        others = others[~torch.isin(others, where)]
        if hit or not len(others):
            return where
        hit.append(int(slots.row_of[others[0]]))
        where = where.clone()
        where[0] = others[0]
        return where

    monkeypatch.setattr(_transfers, "_ops", _row_copy(change))
    error = fails(pair, "to device")
    monkeypatch.undo()
    assert hit
    if content == "clean":
        assert pair.differing() == set()
    else:
        # The row that had the slot is gone, and is named when the engine is to go on.
        assert pair.differing() == set(hit)
        with raises(IntegrityError, "t0", f"row {hit[0]} ", "to device", "load_state_dict") as lost:
            pair.train()
        assert lost.value.rows == hit != error.rows
        assert_nothing_goes_on(pair)
        pair.engine.load_state_dict({"t0": pair.wanted()})
    pair.finish()


# ---------------------------------------------------------------------------------------------
# on the way to the host
# ---------------------------------------------------------------------------------------------


def assert_nothing_goes_on(pair: Pair) -> None:
    engine, model = pair.engine, pair.model
    values = values_of(pair, [0])
    uses: list[Callable[[], Any]] = [
        pair.train,
        lambda: next(iter(engine.prefetch(pair.batches[pair.steps :], ids=lambda b: {}))),
        lambda: model(pair.batches[-1]["lookups"]),
        engine.flush,
        engine.verify,
        engine.state_dict,
        model.state_dict,
        pair.optimizer.state_dict,
        lambda: model.load_state_dict(pair.plain[0].state_dict()),
        lambda: pair.optimizer.load_state_dict(pair.plain[1].state_dict()),
        lambda: engine.reset_rows("t0", torch.tensor([0]), values),
    ]
    for use in uses * 2:
        with pytest.raises(IntegrityError):
            use()


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_damage_on_the_way_to_the_host(name: str, prefetch: bool) -> None:
    fault = FAULTS[name]("collect")
    pair = Pair(prefetch=prefetch, make_lane=fault.make_lane)
    error = fails(pair, "to host")
    assert fault.happened == 1
    if name.startswith("flip"):
        assert len(error.rows) == 1
    assert pair.differing() <= pair.lost()  # what was written back is right, or known not to be
    assert set(error.rows) <= pair.lost()
    assert_nothing_goes_on(pair)
    time.sleep(0.05)
    fault.numbers = range(0)  # nor the other half of a swap
    pair.engine.load_state_dict({"t0": pair.wanted()})
    pair.finish()


@pytest.mark.parametrize("damage", ["record", "nothing"])
def test_a_flush_that_fails_leaves_no_clean_file(tmp_path: Path, damage: str) -> None:
    fault = Flip("collect", 10**6, byte=20)
    pair = Pair(make_lane=fault.make_lane, storage=tmp_path)
    pair.train(4)
    if damage == "record":
        fault.numbers = range(fault.count, fault.count + 1)
        with pytest.raises(IntegrityError):
            pair.engine.flush()
        for _ in range(2):
            with pytest.raises(IntegrityError):
                pair.engine.flush()
    else:
        pair.engine.flush()
    host = pair.table.host
    assert host._file is not None
    assert host._file.header.clean == (damage == "nothing")
    pair.engine.close()


# ---------------------------------------------------------------------------------------------
# in host memory, and in a file
# ---------------------------------------------------------------------------------------------


def absent_row(pair: Pair) -> int:
    """A row that is not in the cache, and that a later batch uses."""
    later = torch.cat([b["lookups"]["t0"]["input"].reshape(-1) for b in pair.batches[pair.steps :]])
    where = pair.table.slots.slot_of[later]
    return int(later[where < 0][0])


def dirty_row(pair: Pair) -> int:
    return int(pair.table.slots.row_of[pair.table.slots.dirty()[0]])


@pytest.fixture(params=["RAM", "file"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "tables" if request.param == "file" else None


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_damage_in_host_memory(part: str, prefetch: bool, storage: Path | None) -> None:
    pair = Pair(prefetch=prefetch, storage=storage)
    pair.train(4)
    row = absent_row(pair)
    if storage is None:
        pair.table.host.records[row, PARTS[part]] ^= 32
    else:
        flip_in_file(storage / "t0.fetab", row, PARTS[part], 32)
    error = fails(pair, "to device")
    assert error.rows == [row]
    assert pair.differing() <= {row}
    with pytest.raises(IntegrityError):
        pair.train()
    pair.engine.reset_rows("t0", torch.tensor([row]), values_of(pair, [row]))
    assert pair.differing() == set()
    pair.finish()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam row counts", "RowWiseAdagrad"])
def test_every_byte_of_a_record(optimizer: str, dtype: torch.dtype) -> None:
    """Is looked at on arrival in the cache, with masters and row counters, but for the gaps."""
    pair = Pair(replace(CASE, optimizer=optimizer, dtype=dtype, steps=2))
    pair.train()
    pair.engine.flush()
    host, transfers = pair.table.host, pair.engine.transfers
    row = torch.tensor([int(host.versions.argmax())])
    gaps = {byte for begin, end in host.layout.gaps for byte in range(begin, end)}
    assert gaps or dtype == torch.float64
    for byte in range(host.layout.record_bytes):
        host.records[row, byte] ^= 1 << byte % 8
        event = transfers.fetch(pair.table, row, torch.tensor([0]), 7, None)
        assert event is not None
        if byte in gaps:
            event.wait()
        else:
            with raises(IntegrityError, "t0", f"row {int(row)} ", "step 7", "to device"):
                event.wait()
        host.records[row, byte] ^= 1 << byte % 8
    transfers.failures.clear()
    assert host.verify() == []
    pair.engine.close()


def flip_in_file(path: Path, row: int, byte: int, mask: int) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + row * RECORD_BYTES + byte)
        (there,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([there ^ mask]))


@pytest.mark.parametrize("verify", ["all", "off"])
@pytest.mark.parametrize("part", PARTS)
def test_damage_in_a_file_between_two_sessions(tmp_path: Path, part: str, verify: str) -> None:
    first = Pair(storage=tmp_path)
    first.train(5)
    values = values_of(first, list(range(48)))
    first.engine.close()
    row = int(first.batches[5]["lookups"]["t0"]["input"].view(-1)[0])
    flip_in_file(tmp_path / "t0.fetab", row, PARTS[part], 4)

    pair = Pair(storage=tmp_path, resume=True, verify=verify)
    pair.batches, pair.plain = pair.batches[5:], first.plain
    pair.model.layer.load_state_dict(pair.plain[0].layer.state_dict())
    batch = pair.batches[0]["lookups"]
    if verify == "off":
        pair.model(batch)
        assert pair.engine.stats.checks == 0
        pair.engine.close()
        return
    with raises(IntegrityError, "t0", f"row {row} ", "to device"):
        pair.model(batch)
    pair.engine.reset_rows(
        "t0", torch.tensor([row]), {name: value[[row]] for name, value in values.items()}
    )
    assert torch.equal(pair.model(batch), pair.plain[0](batch))
    pair.engine.close()


def test_damage_under_a_row_with_newer_values() -> None:
    pair = Pair()
    pair.train(4)
    row = dirty_row(pair)
    pair.table.host.records[row, PARTS["weight"]] ^= 1
    with pytest.raises(IntegrityError) as caught:
        train_and_flush(pair)
    error = caught.value
    check_message(error)
    assert (error.rows, error.direction) == ([row], "in host memory")
    assert pair.differing() <= pair.lost() | {row}
    assert_nothing_goes_on(pair)
    pair.engine.load_state_dict({"t0": pair.wanted()})
    pair.finish()


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_outside_write_that_nobody_announces(prefetch: bool) -> None:
    pair = Pair(prefetch=prefetch)
    pair.train(4)
    row = absent_row(pair)
    pair.model.get_parameter("t0.weight").data[row] += 1  # which autograd does not see
    assert fails(pair, "to device").rows == [row]
    assert pair.differing() == {row}
    pair.engine.load_state_dict({"t0": pair.wanted()})
    pair.finish()


@pytest.mark.parametrize("prefetch", [True, False])
def test_an_old_record_put_back(prefetch: bool) -> None:
    """It has the checksum of its row and of its version, which is not the last one."""
    pair = Pair(prefetch=prefetch)
    pair.train(2)
    pair.engine.flush()
    old = pair.table.host.records.clone()
    versions = pair.table.host.versions.clone()
    pair.train(4)
    later = torch.cat([b["lookups"]["t0"]["input"].reshape(-1) for b in pair.batches[6:]])
    pair.engine.transfers.drain()
    newer = pair.table.host.versions > versions
    row = next(row for row in later.tolist() if newer[row] and pair.table.slots.slot_of[row] < 0)
    pair.table.host.records[row] = old[row]
    error = fails(pair, "to device")
    assert error.rows == [row]
    assert f"has version {int(versions[row])} and should have {int(versions[row]) + 1}" in str(
        error
    ) or "should have" in str(error)
    assert pair.differing() == {row}
    pair.engine.reset_rows("t0", torch.tensor([row]), values_of(pair, [row]))
    pair.finish()


def test_an_old_record_is_not_sealed_with_what_was_written() -> None:
    pair = Pair(cache=40)
    pair.train(3)
    pair.engine.flush()
    row, other = (int(row) for row in torch.where(pair.table.host.versions > 1)[0][:2])
    good = pair.table.host.records[row].clone()
    headers = pair.table.host.layout.headers(pair.table.host.records)
    headers[row, 1] -= 1
    with torch.no_grad():
        for model in (pair.model, pair.plain[0]):
            model.get_parameter("t0.weight")[other] = 0.25
    for use in (pair.train, pair.engine.flush, pair.model.state_dict):
        with raises(IntegrityError, "t0", f"row {row} ", "in host memory", "older", "reset_rows"):
            use()
    pair.table.host.records[row] = good
    pair.finish()


def _elsewhere(rows: torch.Tensor) -> torch.Tensor:
    taken = set(rows.tolist())
    free = next(row for row in range(47, -1, -1) if row not in taken)
    rows = rows.clone()
    rows[0] = free
    return rows


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("what", ["lost", "elsewhere", "among themselves"])
def test_a_write_back_to_the_wrong_row(
    monkeypatch: pytest.MonkeyPatch, what: str, prefetch: bool
) -> None:
    """After it was verified, so that it is found only when one of the rows is used next."""
    pair = Pair(prefetch=prefetch)
    pair.train(4)
    usual = HostTable.scatter
    done: list[torch.Tensor] = []

    def scatter(host: HostTable, rows: torch.Tensor, *rest: Any) -> None:
        if done or (what == "among themselves" and len(rows) < 2):
            return usual(host, rows, *rest)
        done.append(rows)
        if what == "elsewhere":
            return usual(host, _elsewhere(rows), *rest)
        if what == "among themselves":
            return usual(host, rows.roll(1), *rest)
        return None

    monkeypatch.setattr(HostTable, "scatter", scatter)
    with pytest.raises(IntegrityError) as caught:
        pair.finish()  # at the latest when it is saved
    monkeypatch.undo()
    error = caught.value
    check_message(error)
    touched = set(done[0].tolist())
    if what == "elsewhere":
        touched = {int(done[0][0]), int(_elsewhere(done[0])[0])}
    assert set(error.rows) <= touched
    assert pair.differing() <= touched | pair.lost()
    pair.engine.load_state_dict({"t0": pair.wanted()})
    pair.finish()


def test_damaged_rows_are_neither_saved_nor_sealed_with_others() -> None:
    pair = Pair()
    pair.train(5)
    pair.engine.flush()
    weights, states = pair.plain[0].state_dict(), pair.plain[1].state_dict()
    row = 7
    pair.table.host.records[row, PARTS["exp_avg"]] ^= 8
    before = pair.table.host.records.clone()
    for use in (
        pair.engine.state_dict,
        pair.model.state_dict,
        pair.optimizer.state_dict,
        pair.model.get_submodule("t0").reset_parameters,
        lambda: pair.model.load_state_dict(weights),
        lambda: pair.optimizer.load_state_dict(states),
    ):
        with raises(IntegrityError, "t0", "row 7 ", "in host memory", "reset_rows"):
            use()
        assert torch.equal(pair.table.host.records, before)
    assert pair.engine.verify() == {"t0": [row]}
    pair.engine.reset_rows("t0", torch.tensor([row]), values_of(pair, [row]))
    pair.finish()


# ---------------------------------------------------------------------------------------------
# how much is verified
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", ["deliver", "collect"])
def test_a_sample_finds_damage_that_recurs(lane: str) -> None:
    fault = Flip(lane, 0, 10**6, byte=PARTS["weight"], record=None)
    pair = Pair(verify="sample", make_lane=fault.make_lane)
    with pytest.raises(IntegrityError) as caught:
        train_and_flush(pair)
    check_message(caught.value)


def test_a_sample_is_a_sixteenth() -> None:
    case = Case(tables=(TableCase(rows=5000, dim=3),), steps=2, size=1500)
    checks = {}
    for verify in ("all", "sample"):
        pair = Pair(case, verify=verify, cache=4000, staging_bytes=1 << 20)
        pair.train()
        pair.engine.flush()
        stats = pair.engine.stats
        checks[verify] = stats.checks
        if verify == "all":  # on the way to the host also what is overwritten
            assert stats.checks == stats.fetched + 2 * stats.written_back > 3000
    assert checks["all"] / 18 < checks["sample"] < checks["all"] / 14


@pytest.mark.parametrize("lane", ["deliver", "collect"])
@pytest.mark.parametrize("fault", [Flip, Dropped])
def test_nothing_is_verified_when_it_is_off(lane: str, fault: Any) -> None:
    options = {"byte": PARTS["weight"] + 3} if fault is Flip else {}
    damage = fault(lane, 8, **options)
    pair = Pair(verify="off", make_lane=damage.make_lane)
    for batch in pair.loader():
        pair.model(batch["lookups"]).sum().backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    pair.engine.state_dict()
    assert damage.happened == 1
    assert pair.engine.stats.checks == 0
    pair.engine.close()


# ---------------------------------------------------------------------------------------------
# going on
# ---------------------------------------------------------------------------------------------


def test_what_has_failed_holds_no_rows() -> None:
    """Neither does its traceback, when the cache has no slot to spare."""
    case = Case(tables=(TableCase(rows=48, dim=3),), steps=8, size=6)
    most = max(len(b["lookups"]["t0"]["input"].unique()) for b in case.batches())
    for prefetch in (True, False):
        fault = Flip("deliver", 4, byte=PARTS["weight"])
        pair = Pair(case, prefetch=prefetch, cache=most, make_lane=fault.make_lane)

        def attempt(pair: Pair) -> None:
            with pytest.raises(IntegrityError):
                pair.train()

        attempt(pair)
        skipped = pair.batches.pop(pair.steps)  # other rows are next
        assert skipped is not None
        pair.finish()


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("job", ["gather", "scatter"])
def test_a_worker_that_fails_otherwise(
    monkeypatch: pytest.MonkeyPatch, job: str, prefetch: bool
) -> None:
    pair = Pair(prefetch=prefetch)
    pair.train(3)

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(HostTable, job, broken)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            pair.train()
    monkeypatch.undo()
    if job == "gather":
        assert pair.differing() == set()
    else:
        with pytest.raises(OSError, match="Input/output"):
            pair.model.state_dict()
        pair.engine.load_state_dict({"t0": pair.wanted()})
    pair.finish()


def test_several_transfers_that_fail_are_one_error() -> None:
    """Of a row that is wrong in host memory and that several batches ahead want."""
    case = Case(tables=(TableCase(rows=12, dim=3),), steps=12, size=4)
    pair = Pair(case, cache=12, depth=4, staging_bytes=64)
    pair.train(1)
    rows = torch.where(pair.table.slots.slot_of < 0)[0]
    assert len(rows) > 1
    pair.table.host.records[rows, PARTS["weight"]] ^= 1
    with pytest.raises(IntegrityError):
        pair.train()
    pair.engine.reset_rows("t0", rows, values_of(pair, rows.tolist()))
    pair.finish()


def test_two_tables_have_errors_of_their_own() -> None:
    case = Case(tables=(TableCase(rows=48, dim=3), TableCase(rows=30, dim=2)), steps=8, size=5)
    pair = Pair(case)
    pair.train(3)
    host = pair.engine.tables["t1"].host
    later = torch.cat([b["lookups"]["t1"]["input"].reshape(-1) for b in pair.batches[3:]])
    row = int(later[pair.engine.tables["t1"].slots.slot_of[later] < 0][0])
    good = host.records[row].clone()
    host.records[row, 20] ^= 2
    with raises(IntegrityError, "table 't1', row", "to device"):
        pair.train()
    assert pair.differing() == set()  # of t0
    host.records[row] = good
    pair.finish()


def test_records_of_one_table_are_none_of_another() -> None:
    """Though row and version are the same: their checksums have other seeds."""
    case = Case(tables=(TableCase(rows=48, dim=3), TableCase(rows=48, dim=3)), steps=8, size=5)
    pair = Pair(case)
    pair.train(3)
    hosts = [table.host for table in pair.engine.tables.values()]
    row = absent_row(pair)
    hosts[1].versions[row] = hosts[0].versions[row]
    hosts[0].records[row] = hosts[1].records[row]
    hosts[0]._headers[row, 1] = hosts[0].versions[row].long()
    assert fails(pair, "to device").rows == [row]


def test_errors_can_be_copied_and_pickled() -> None:
    found = IntegrityError("u", [5], 6, "to host", "the checksum is wrong")
    error = IntegrityError("t", [3, 4], 7, "to device", "the checksum is wrong", [found])
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(other) == str(error)
        assert (other.table, other.rows, other.step) == ("t", [3, 4], 7)
        assert other.direction == "to device"
        assert [str(also) for also in other.also] == [str(found)]
    for error in (
        CacheTooSmallError("t", 5, 7, 6),
        DirtyFileError(Path("t"), 3),
        FileFormatError(Path("t"), "a table", "nothing"),
        FileGoneError(Path("t")),
        FileInUseError(Path("t")),
    ):
        for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert (type(other), str(other)) == (type(error), str(error))
            assert vars(other) == vars(error)


# ---------------------------------------------------------------------------------------------
# anything, anywhere, at any time
# ---------------------------------------------------------------------------------------------


@drawn(60)
@given(data=st.data())
def test_flipped_bits_are_found_or_do_no_harm(data: st.DataObject) -> None:
    case = replace(CASE, steps=8)
    place = data.draw(st.sampled_from(["deliver", "collect", "host"]))
    byte = data.draw(st.integers(0, RECORD_BYTES - 1), label="byte")
    bit = data.draw(st.integers(0, 7), label="bit")
    prefetch = data.draw(st.booleans(), label="prefetch")
    options: dict[str, Any] = {
        "policy": data.draw(st.sampled_from(["lfu", "lru"])),
        "depth": data.draw(st.integers(0, 3)),
        "cache": data.draw(st.integers(SLOTS, 2 * SLOTS)),
    }
    fault = Flip("none", 10**6, byte=byte, bit=bit)
    if place != "host":
        record = data.draw(st.integers(0, 3), label="record")
        fault = Flip(place, data.draw(st.integers(0, 40)), byte=byte, bit=bit, record=record)
    pair = Pair(case, prefetch=prefetch, make_lane=fault.make_lane, **options)
    if place == "host":
        pair.train(data.draw(st.integers(1, case.steps), label="steps before"))
        row = data.draw(st.integers(0, 47), label="row")
        pair.engine.transfers.drain()
        pair.table.host.records[row, byte] ^= 1 << bit
    try:
        pair.finish()
    except IntegrityError as error:
        check_message(error)
        pair.engine.load_state_dict({"t0": pair.wanted()})
        pair.finish()
