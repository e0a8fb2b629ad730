"""Every wait of the offload engine is needed: without one a training with delays goes wrong.

Delays only make sure that the job that should be waited for is late. What they find missing is not
always a wrong checksum: records that are sealed too late, or read too early by the training loop,
are wrong in their bits.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from offload_cases import limits
from offload_faults import CASE, RECORD_BYTES, STAGING_BYTES, Copy, Flip, LateLanes, Pair
from optim_cases import bits

from fastemb.offload import OffloadEngine, _prefetch, _stored, _table, _trained, _transfers, engine
from fastemb.offload._lanes import Event, Lane
from fastemb.offload._table import Table
from fastemb.offload._transfers import Transfers

pytestmark = limits

SHORT = replace(CASE, steps=9)
LONG = 0.15  # seconds, for what happens once; longer than the training loop is kept from going on


def judge(scenario: Callable[[], None], *, needed: bool) -> None:
    """Whether a scenario fails, as it must exactly when a wait is missing."""
    if not needed:
        scenario()
        return
    with pytest.raises(Exception):  # noqa: B017  (an IntegrityError, or bits that differ)
        scenario()


# ---------------------------------------------------------------------------------------------
# waits of the lanes
# ---------------------------------------------------------------------------------------------

# Name of a wait -> label of the jobs that it waits for.
WAITS = {
    "staging free": "deliver",
    "stored": "store",
    "gathered": "gather",
    "slots collected": "collect",
    "staging out free": "store",
    "copied out": "collect",
}
# These wait for what the training loop has launched, which is over at once without CUDA.
STREAM_WAITS = {"slots used", "slots computed"}


def leave_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    wait, follow = Transfers._wait, Transfers._follow

    def _wait(self: Transfers, given: str, event: Event | None) -> None:
        if given != name:
            wait(self, given, event)

    def _follow(
        self: Transfers, lane: Lane, given: str, event: Event | None, **options: bool
    ) -> None:
        if given != name:
            follow(self, lane, given, event, **options)

    monkeypatch.setattr(Transfers, "_wait", _wait)
    monkeypatch.setattr(Transfers, "_follow", _follow)


def test_all_waits_of_the_lanes_are_here() -> None:
    names = set()
    for node in ast.walk(ast.parse(inspect.getsource(_transfers))):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("_wait", "_follow"):
            name = node.args[node.func.attr == "_follow"]
            assert isinstance(name, ast.Constant)
            assert name.value not in names
            names.add(name.value)
    assert names == WAITS.keys() | STREAM_WAITS


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_waits_of_the_lanes(monkeypatch: pytest.MonkeyPatch, name: str, missing: bool) -> None:
    if missing:
        leave_out(monkeypatch, name)

    def scenario() -> None:
        # Rows that have left are wanted again soon, which is what "stored" needs to be late for.
        seconds = 0.06 if name == "stored" else 0.025
        pair = Pair(SHORT, make_lane=LateLanes(WAITS[name], seconds))
        pair.train(2)
        pair.finish()

    judge(scenario, needed=missing)


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", sorted(STREAM_WAITS))
def test_waits_for_the_stream_of_the_training_loop(
    monkeypatch: pytest.MonkeyPatch, name: str, missing: bool
) -> None:
    """With a lane in place of that stream: what is launched there happens later."""
    pair = Pair(SHORT)
    pair.train(3)
    pair.engine.flush()
    stream = Lane("compute", torch.device("cpu"), delay=lambda _: time.sleep(0.2))
    monkeypatch.setattr(
        _transfers, "computed", lambda device: stream.submit("so far", lambda: None)
    )
    if missing:
        leave_out(monkeypatch, name)
    table = pair.table
    slots = torch.where(table.slots.row_of >= 0)[0][:3]
    rows = table.slots.row_of[slots]
    cached = table.cache["weight"]
    seen = torch.zeros(3, cached.shape[1])
    want = cached[slots] + 1

    if name == "slots computed":  # the step of an optimizer, whose result is collected
        stream.submit("step", lambda: cached.index_add_(0, slots, torch.ones_like(seen)))
        pair.engine.transfers.write_back(table, rows, slots, 0)
        pair.engine.drain()
        seen = table.host.fields["weight"][rows]
        assert pair.engine.verify() == {"t0": []}  # sealed with what was there, right or not
    else:  # a lookup, whose rows then leave their slots
        want = cached[slots].clone()
        others = torch.where(table.slots.slot_of < 0)[0][:3]
        stream.submit("lookup", lambda: seen.copy_(cached[slots]))
        event = pair.engine.transfers.fetch(table, others, slots, 0, None)
        assert event is not None
        event.wait()
        stream.submit("end", lambda: None).wait()
    stream.close()
    assert torch.equal(seen, want) == (not missing)


# ---------------------------------------------------------------------------------------------
# waits of the training loop
# ---------------------------------------------------------------------------------------------


def lookup_without_prefetch() -> None:
    pair = Pair(SHORT, prefetch=False, make_lane=LateLanes("deliver", 0.01))
    pair.finish()


def lookup_with_prefetch() -> None:
    pair = Pair(SHORT, make_lane=LateLanes("deliver", 0.01))
    pair.finish()


def read_after_flush() -> None:
    lanes = LateLanes("store")
    pair = Pair(SHORT, make_lane=lanes)
    pair.train(4)
    lanes.seconds = LONG
    pair.engine.flush()
    assert bits(pair.model.get_parameter("t0.weight")) == bits(pair.wanted()["weight"])


def load_under_way() -> None:
    """While records are written back."""
    lanes = LateLanes("store")
    pair = Pair(SHORT, make_lane=lanes)
    pair.train(3)
    lanes.seconds = LONG
    pair.train(1)
    pair.engine.load_state_dict({"t0": pair.wanted()})
    lanes.seconds = 0
    pair.finish()


def load_within_a_batch() -> None:
    """Whose rows are in the cache, and must be those that were loaded."""
    lanes = LateLanes("deliver")
    pair = Pair(SHORT, make_lane=lanes)
    pair.train(2)
    other = torch.randn(pair.model.get_parameter("t0.weight").shape)
    for batch in pair.loader(1):
        lanes.seconds = LONG
        pair.engine.load_state_dict({"t0": other})
        with torch.no_grad():
            pair.plain[0].get_parameter("t0.weight").copy_(other)
        assert bits(pair.model(batch["lookups"])) == bits(pair.plain[0](batch["lookups"]))
    pair.engine.close()


def write_under_way() -> None:
    """In place, to a row that nothing is known of, while others are written back."""
    lanes = LateLanes("store")
    pair = Pair(SHORT, make_lane=lanes)
    pair.train(3)
    lanes.seconds = LONG
    pair.train(1)
    row = int(torch.where((pair.table.slots.slot_of < 0) & (pair.table.host.versions == 1))[0][0])
    with torch.no_grad():
        for model in (pair.model, pair.plain[0]):
            model.get_parameter("t0.weight")[row] = 0.5
    pair.train(1)
    lanes.seconds = 0.0
    pair.finish()


def write_within_a_batch() -> None:
    """In place, to a row that a lookup of this batch then reads."""
    lanes = LateLanes("deliver")
    pair = Pair(SHORT, make_lane=lanes)
    pair.train(2)
    for batch in pair.loader(1):
        pair.engine.flush()
        row = int(batch["lookups"]["t0"]["input"].view(-1)[0])
        lanes.seconds = LONG
        with torch.no_grad():
            for model in (pair.model, pair.plain[0]):
                model.get_parameter("t0.weight")[row] = 0.5
        assert bits(pair.model(batch["lookups"])) == bits(pair.plain[0](batch["lookups"]))
    pair.engine.close()


def _value(pair: Pair, row: int) -> dict[str, torch.Tensor]:
    return {name: value[[row]] for name, value in pair.wanted().items()}


def reset_under_way() -> None:
    """A row that has been read, but has not arrived."""
    lanes = LateLanes("deliver")
    pair = Pair(SHORT, make_lane=lanes)
    pair.train(2)
    host = pair.table.host
    usual, read = host.gather, set()

    def gather(rows: torch.Tensor, records: torch.Tensor) -> None:
        usual(rows, records)
        read.update(rows.tolist())

    host.gather = gather  # type: ignore[method-assign]
    lanes.seconds = 2 * LONG
    for _ in pair.loader(3):
        direction, _, rows = pair.sent[-1]
        assert direction == "to device"
        row = min(rows)  # in the first chunk
        end = time.monotonic() + 10
        while row not in read:
            assert time.monotonic() < end
            time.sleep(0.001)
        pair.engine.reset_rows("t0", torch.tensor([row]), _value(pair, row))
        break
    lanes.seconds = 0
    pair.finish()


def reset_within_a_batch() -> None:
    """A row that a lookup of this batch then reads."""
    lanes = LateLanes("deliver")
    pair = Pair(SHORT, make_lane=lanes)
    pair.train(2)
    for batch in pair.loader(1):
        row = int(batch["lookups"]["t0"]["input"].view(-1)[0])
        values = {name: torch.full_like(v, 0.5) for name, v in _value(pair, row).items()}
        lanes.seconds = LONG
        pair.engine.reset_rows("t0", torch.tensor([row]), values)
        with torch.no_grad():
            pair.plain[0].get_parameter("t0.weight")[row] = 0.5
        assert bits(pair.model(batch["lookups"])) == bits(pair.plain[0](batch["lookups"]))
    pair.engine.close()


class GatedFlip(Flip):
    """It does not happen before it may, and is slow to go away."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate = threading.Event()

    def happen(self, copy: Copy, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.gate.wait(20)
        super().happen(copy, target, source)

    def usual(self, copy: Copy, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.happened:
            time.sleep(LONG / 3)
        super().usual(copy, target, source)


def mend_between_batches() -> None:
    """What came wrong for the next batch, of which only the engine knows so far."""
    first = SHORT.batches()[0]["lookups"]["t0"]["input"].unique()
    chunks = -(-len(first) * RECORD_BYTES // STAGING_BYTES)
    fault = GatedFlip("deliver", chunks, byte=16 + 3, bit=6, record=None)
    pair = Pair(SHORT, cache=48, make_lane=fault.make_lane)
    for number, batch in enumerate(pair.loader(3)):
        if number == 0:
            fault.gate.set()
            row = int(torch.where(pair.table.slots.slot_of < 0)[0][0])
            # Waits for the lanes, and has nothing to say of other rows.
            pair.engine.reset_rows("t0", torch.tensor([row]), _value(pair, row))
        assert fault.happened == 1
        assert bits(pair.model(batch["lookups"])) == bits(pair.plain[0](batch["lookups"]))
    pair.engine.close()


# (what is called, by which function of which module) -> scenarios that fail without the call.
CALLS: dict[tuple[str, str], list[Callable[[], None]]] = {
    ("Table.wait", "lookup"): [lookup_without_prefetch],
    ("Table.wait", "_batches"): [lookup_with_prefetch],
    ("OffloadEngine.wait", "wait"): [lookup_without_prefetch, lookup_with_prefetch],
    ("OffloadEngine.wait", "_refetched"): [load_within_a_batch],
    ("OffloadEngine.wait", "_mend"): [mend_between_batches],
    ("OffloadEngine.wait", "_adopt_writes"): [write_within_a_batch],
    ("OffloadEngine.wait", "reset"): [reset_within_a_batch],
    ("OffloadEngine.drain", "update"): [read_after_flush],
    ("OffloadEngine.drain", "reset"): [reset_under_way],
    ("OffloadEngine.drain", "_adopt_writes"): [write_under_way],
    ("Transfers.drain", "load_state_dict"): [load_under_way],
}
# What these two are made of, and one that only streams need: see Transfers.make_room.
INNER = {("Event.wait", "wait"), ("Transfers.drain", "drain")}

OWNERS = {"Table": Table, "OffloadEngine": OffloadEngine, "Transfers": Transfers}
RECEIVERS = {
    "engine": "OffloadEngine",
    "self.engine": "OffloadEngine",
    "self": "Table",
    "table": "Table",
    "self.transfers": "Transfers",
    "engine.transfers": "Transfers",
    "event": "Event",
}


def test_all_waits_of_the_training_loop_are_here() -> None:
    found = set()
    for module in (_stored, _trained, _table, _prefetch, engine):
        for function in ast.walk(ast.parse(inspect.getsource(module))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    name = node.func.attr
                    if name in ("wait", "drain"):
                        owner = RECEIVERS[ast.unparse(node.func.value)]
                        found.add((f"{owner}.{name}", function.name))
    assert found == CALLS.keys() | INNER


def leave_out_call(monkeypatch: pytest.MonkeyPatch, what: str, caller: str) -> None:
    owner, method = what.split(".")
    usual = getattr(OWNERS[owner], method)

    def skipping(self: Any, *args: Any, **options: Any) -> None:
        if sys._getframe(1).f_code.co_name != caller:
            usual(self, *args, **options)
        elif isinstance(self, OffloadEngine):  # which still sees what has failed so far
            self._take_failures(**options)

    monkeypatch.setattr(OWNERS[owner], method, skipping)


@pytest.mark.parametrize(
    "scenario",
    {s: None for scenarios in CALLS.values() for s in scenarios},
    ids=lambda s: s.__name__,
)
def test_scenarios_pass_with_all_waits(scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.parametrize(
    ("what", "caller", "scenario"),
    [(*call, scenario) for call, scenarios in CALLS.items() for scenario in scenarios],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_waits_of_the_training_loop(
    monkeypatch: pytest.MonkeyPatch, what: str, caller: str, scenario: Callable[[], None]
) -> None:
    leave_out_call(monkeypatch, what, caller)
    judge(scenario, needed=True)


def test_records_are_as_long_as_the_tests_think() -> None:
    pair = Pair(SHORT)
    pair.train(1)
    assert pair.table.host.layout.record_bytes == RECORD_BYTES
    pair.engine.close()
