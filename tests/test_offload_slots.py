"""The slot map of the offload engine against a model made of dictionaries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

import pytest
import torch
from draws import drawn
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from fastemb.offload import _eviction
from fastemb.offload._slots import CacheTooSmallError, Plan, Policy, SlotMap


def ids(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def frozen(value: Any) -> Any:
    """All that an object consists of, to compare it with what it was."""
    if isinstance(value, Tensor):
        return value.tolist()
    if hasattr(value, "__dict__"):
        return {name: frozen(part) for name, part in vars(value).items()}
    return value


def use(slots: SlotMap, *rows: int, counts: list[int] | None = None) -> Plan:
    """A batch from plan to release."""
    plan = slots.plan(ids(*rows), None if counts is None else ids(*counts))
    slots.release(plan.slots)
    return plan


def cached(slots: SlotMap) -> set[int]:
    return {row for row in slots.row_of.tolist() if row >= 0}


class Model(RuleBasedStateMachine):
    """Random batches; every answer is compared with what dictionaries say.

    ``fresh``: the map ranks for every plan, so its order must be exact.
    """

    policy: ClassVar[Policy]
    fresh: ClassVar[bool]

    @initialize(data=st.data())
    def make(self, data: st.DataObject) -> None:
        self.num_slots = data.draw(st.integers(1, 8), "num_slots")
        self.num_rows = data.draw(st.integers(0, 3 * self.num_slots), "num_rows")
        self.slots = SlotMap("t", self.num_rows, self.num_slots, self.policy)
        self.twin = SlotMap("t", self.num_rows, self.num_slots, self.policy)
        self.flying: list[list[int]] = []  # rows of the plans that are not released
        self.forget()

    def forget(self) -> None:
        self.slot_of: dict[int, int] = {}
        self.dirty: set[int] = set()
        self.counts: dict[int, Fraction] = {}
        self.last: dict[int, int] = {}
        self.number = 0
        self.uses = 0

    def pins(self) -> Counter[int]:
        return Counter(row for rows in self.flying for row in rows)

    def score(self, row: int) -> tuple[Fraction, int]:
        frequency = self.counts[row] if self.policy == "lfu" else Fraction(0)
        return frequency, self.last[row]

    def both(self, call: Callable[[SlotMap], Any]) -> Any:
        """The same call on both maps must give the same."""
        answer, twin = call(self.slots), call(self.twin)
        assert frozen(answer) == frozen(twin)
        return answer

    def draw_rows(self, data: st.DataObject, rows: list[int], most: int | None = None) -> list[int]:
        if not rows:
            return []
        return sorted(data.draw(st.sets(st.sampled_from(rows), max_size=most), "rows"))

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        # One more than fits at times.
        rows = self.draw_rows(data, list(range(self.num_rows)), self.num_slots + 1)
        counts = None
        if data.draw(st.booleans(), "counted"):
            counts = [data.draw(st.integers(1, 3)) for _ in rows]
        held = set(self.pins())
        needed = len(held | set(rows))
        arguments = ids(*rows), None if counts is None else ids(*counts)
        if needed > self.num_slots:
            before = frozen(self.slots)
            for slots in (self.slots, self.twin):
                with pytest.raises(CacheTooSmallError) as error:
                    slots.plan(*arguments)
                assert error.value.num_needed == needed
                assert error.value.num_slots == self.num_slots
            assert frozen(self.slots) == before
            return
        plan = self.both(lambda slots: slots.plan(*arguments))
        self.check(plan, rows, held)
        self.enter(plan, rows, counts)

    def check(self, plan: Plan, rows: list[int], held: set[int]) -> None:
        here = plan.slots.tolist()
        missing = [k for k, row in enumerate(rows) if row not in self.slot_of]
        assert plan.missing.tolist() == missing
        for row, slot in zip(rows, here, strict=True):
            assert self.slot_of.get(row, slot) == slot
        row_in = {slot: row for row, slot in self.slot_of.items()}
        taken = [here[k] for k in missing]
        assert len(set(here)) == len(here)
        num_free = self.num_slots - len(row_in)
        victims = [row_in[slot] for slot in taken if slot in row_in]
        assert len(victims) == max(0, len(missing) - num_free), "free slots come first"
        assert not held.union(rows) & set(victims), "a pinned row was evicted"
        if self.fresh:
            others = sorted(self.score(row) for row in set(self.slot_of) - held - set(rows))
            assert sorted(map(self.score, victims)) == others[: len(victims)]
        evicted = dict(zip(plan.evicted_rows.tolist(), plan.evicted_slots.tolist(), strict=True))
        assert evicted == {row: self.slot_of[row] for row in victims if row in self.dirty}
        assert len(evicted) == len(plan.evicted_rows), "a row is reported once"

    def enter(self, plan: Plan, rows: list[int], counts: list[int] | None) -> None:
        here = plan.slots.tolist()
        row_in = {slot: row for row, slot in self.slot_of.items()}
        for k in plan.missing.tolist():
            if here[k] in row_in:
                victim = row_in[here[k]]
                del self.slot_of[victim]
                self.dirty.discard(victim)
            self.slot_of[rows[k]] = here[k]
        self.flying.append(rows)
        self.number += 1
        for row, count in zip(rows, counts or [1] * len(rows), strict=True):
            self.counts[row] = self.counts.get(row, Fraction(0)) + count
            self.last[row] = self.number
        self.uses += len(rows)
        if self.uses >= _eviction._USES_PER_HALVING * self.num_slots:
            self.uses = 0
            self.counts = {row: count / 2 for row, count in self.counts.items()}

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rows = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1), "plan"))
        here = ids(*(self.slot_of[row] for row in rows))
        self.both(lambda slots: slots.release(here))

    @precondition(lambda self: self.slot_of)
    @rule(data=st.data(), dirty=st.booleans())
    def mark(self, data: st.DataObject, dirty: bool) -> None:
        rows = self.draw_rows(data, sorted(self.slot_of))
        here = ids(*(self.slot_of[row] for row in rows))
        self.both(lambda slots: (slots.mark_dirty if dirty else slots.mark_clean)(here))
        (self.dirty.update if dirty else self.dirty.difference_update)(rows)

    @rule(data=st.data(), force=st.booleans())
    def drop(self, data: st.DataObject, force: bool) -> None:
        among = sorted(self.slot_of) if data.draw(st.booleans(), "cached") else range(self.num_rows)
        rows = self.draw_rows(data, list(among), 3)
        pins = self.pins()
        if not force and any(pins[row] for row in rows):
            before = frozen(self.slots)
            for slots in (self.slots, self.twin):
                with pytest.raises(ValueError, match="cannot be dropped"):
                    slots.drop(ids(*rows))
            assert frozen(self.slots) == before
            return
        self.both(lambda slots: slots.drop(ids(*rows, *rows[:1]), force=force))
        for row in rows:
            self.slot_of.pop(row, None)
        self.dirty.difference_update(rows)
        self.flying = [[row for row in flying if row not in rows] for flying in self.flying]

    @rule()
    def release_unpinned(self) -> None:
        """Refused, and nothing happens to the pinned ones that are named as well."""
        pins = self.pins()
        unpinned = [slot for row, slot in self.slot_of.items() if not pins[row]]
        pinned = [slot for row, slot in self.slot_of.items() if pins[row]]
        if not unpinned:
            return
        before = frozen(self.slots)
        with pytest.raises(ValueError, match=f"slot {unpinned[0]} is released more often"):
            self.slots.release(ids(*pinned, unpinned[0]))
        assert frozen(self.slots) == before

    @precondition(lambda self: self.number > 3)
    @rule()
    def clear(self) -> None:
        self.both(SlotMap.clear)
        self.flying.clear()
        self.forget()

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "slots"):
            return
        assert {r: s for r, s in enumerate(self.slots.slot_of.tolist()) if s >= 0} == self.slot_of
        row_in = {s: r for s, r in enumerate(self.slots.row_of.tolist()) if r >= 0}
        assert row_in == {slot: row for row, slot in self.slot_of.items()}
        assert self.slots.dirty().tolist() == sorted(self.slot_of[row] for row in self.dirty)


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "ranked"])
def test_against_model(policy: Policy, fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # What one plan needs, or all slots: then most of a ranking is used when it is old.
    monkeypatch.setattr(_eviction, "_RANKED_SHARE", 10**9 if fresh else 1)
    # FP32 counts are exact as long as there are few halvings; scaled down every other one.
    monkeypatch.setattr(_eviction, "_USES_PER_HALVING", 4)
    monkeypatch.setattr(_eviction, "_LARGEST_WEIGHT", 4.0)
    machine = type("Machine", (Model,), {"policy": policy, "fresh": fresh})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine, settings=drawn(40, stateful_step_count=40)
    )


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_no_rows(policy: Policy) -> None:
    slots = SlotMap("t", 0, 1, policy)
    plan = slots.plan(ids())
    for part in (plan.slots, plan.missing, plan.evicted_rows, plan.evicted_slots, slots.dirty()):
        assert part.dtype == torch.int64
        assert part.shape == (0,)
    slots.release(plan.slots)
    slots.drop(ids())
    slots.mark_dirty(ids())


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_room_for_all(policy: Policy) -> None:
    """Every row is fetched once and stays."""
    slots = SlotMap("t", 10, 12, policy)
    fetched: list[int] = []
    for first in range(8):
        plan = use(slots, *range(first, first + 3))
        fetched += (plan.missing + first).tolist()
        slots.mark_dirty(plan.slots)
        assert not len(plan.evicted_rows)
    assert fetched == list(range(10))
    assert sorted(slots.slot_of.tolist()) == list(range(10))


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_exactly_as_many_as_needed(policy: Policy) -> None:
    slots = SlotMap("t", 100, 4, policy)
    first = slots.plan(ids(1, 2))
    second = slots.plan(ids(2, 3, 4))
    assert sorted({*first.slots.tolist(), *second.slots.tolist()}) == [0, 1, 2, 3]
    with pytest.raises(CacheTooSmallError) as error:
        slots.plan(ids(4, 5))
    assert (error.value.num_needed, error.value.num_slots) == (5, 4)
    assert str(error.value) == (
        "table 't': a batch with 2 distinct rows needs as many slots, and 3 more are held for "
        "batches that are under way, in a loop that has not gone on or with a backward or step "
        "still to come; the cache has 4 slots and would need 5: give the engine a larger cache"
    )
    slots.release(first.slots)  # 2 is still held by the other
    third = slots.plan(ids(4, 5))
    assert slots.row_of.tolist().count(1) == 0
    for plan in (second, third):
        slots.release(plan.slots)
    assert len(slots.plan(ids(6, 7, 8, 9)).missing) == 4
    with pytest.raises(CacheTooSmallError, match="5 distinct rows needs as many slots; the cache"):
        SlotMap("t", 100, 4, policy).plan(ids(1, 2, 3, 4, 5))


def test_evicted_dirty_rows_are_reported_once() -> None:
    slots = SlotMap("t", 10, 2, "lru")
    dirty = use(slots, 0, 1)
    slots.mark_dirty(dirty.slots[:1])
    plan = use(slots, 2, 3)
    assert plan.evicted_rows.tolist() == [0]
    assert plan.evicted_slots.tolist() == dirty.slots[:1].tolist()
    assert not len(slots.dirty())
    assert not len(use(slots, 0, 1).evicted_rows)


def test_dropped_rows_leave_nothing_behind() -> None:
    slots = SlotMap("t", 10, 2, "lru")
    plan = use(slots, 0, 1)
    slots.mark_dirty(plan.slots)
    slots.drop(ids(7, 0))
    assert slots.dirty().tolist() == plan.slots[1:].tolist()
    with pytest.raises(ValueError, match="is empty"):
        slots.mark_dirty(plan.slots[:1])
    assert not len(use(slots, 0).evicted_rows)
    assert slots.dirty().tolist() == plan.slots[1:].tolist()


def test_dropping_by_force_takes_the_pins_off() -> None:
    slots = SlotMap("t", 10, 2, "lru")
    plan = slots.plan(ids(0, 1))
    slots.drop(ids(0), force=True)
    with pytest.raises(ValueError, match=f"slot {int(plan.slots[0])} is released more often"):
        slots.release(plan.slots)
    slots.plan(ids(5))
    with pytest.raises(CacheTooSmallError):
        slots.plan(ids(6))
    slots.release(plan.slots[1:])
    slots.plan(ids(6))


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_cleared_is_as_new(policy: Policy) -> None:
    slots = SlotMap("t", 100, 16, policy)
    for row in range(60):
        plan = use(slots, row, row + 1)
        slots.mark_dirty(plan.slots)
    slots.plan(ids(5, 6))
    slots.clear()
    assert frozen(slots) == frozen(SlotMap("t", 100, 16, policy))


def test_lru() -> None:
    slots = SlotMap("t", 10, 3, "lru")
    for row in (0, 1, 2, 0):
        use(slots, row)
    use(slots, 3)
    assert cached(slots) == {0, 2, 3}
    use(slots, 4)
    assert cached(slots) == {0, 3, 4}


def test_lfu_counts_occurrences_and_breaks_ties_by_age() -> None:
    slots = SlotMap("t", 10, 3, "lfu")
    use(slots, 0, counts=[5])
    use(slots, 1, counts=[2])
    use(slots, 2)
    use(slots, 2)
    use(slots, 3)
    assert cached(slots) == {0, 2, 3}, "1 was used as often as 2, and longer ago"
    use(slots, 1)
    assert cached(slots) == {0, 1, 2}
    use(slots, 3)
    use(slots, 3)
    assert cached(slots) == {0, 1, 3}, "the use of 3 before it was evicted counts"


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_rows_used_since_the_ranking_stay(policy: Policy) -> None:
    slots = SlotMap("t", 100, 16, policy)
    for row in range(16):
        use(slots, row)
    use(slots, 20)  # ranks a quarter of the slots: those of 0, 1, 2, 3
    assert cached(slots) == {*range(1, 16), 20}
    use(slots, 1)
    held = slots.plan(ids(2))
    assert use(slots, 3, 21).missing.tolist() == [1]  # 3 is next, but in the same batch
    assert cached(slots) == {1, 2, 3, *range(5, 16), 20, 21}
    slots.release(held.slots)
    slots.drop(ids(5))
    use(slots, 22)  # the empty slot first
    assert cached(slots) == {1, 2, 3, *range(6, 16), 20, 21, 22}
    use(slots, 23)
    assert 6 not in cached(slots)


def test_dropped_slots_are_no_victims() -> None:
    """A slot that was ranked and is empty now must not be taken twice."""
    slots = SlotMap("t", 100, 16, "lfu")
    for row in range(16):
        use(slots, row)
    use(slots, 20)
    slots.drop(ids(1))
    plan = slots.plan(ids(30, 31, 32))
    assert len(set(plan.slots.tolist())) == 3
    assert cached(slots) == {*range(4, 16), 20, 30, 31, 32}


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_slots_empty_when_ranked_are_no_victims(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_eviction, "_RANKED_SHARE", 1)
    slots = SlotMap("t", 10, 4, policy)
    for row in range(3):
        use(slots, row)
    use(slots, 3, 4)  # ranks all slots, while the one that 3 gets is empty
    slots.drop(ids(3))
    use(slots, 1)
    use(slots, 2)
    plan = use(slots, 5, 6)
    assert len(set(plan.slots.tolist())) == 2
    assert cached(slots) == {1, 2, 5, 6}


def test_lfu_forgets_what_was_hot_long_ago() -> None:
    slots = SlotMap("t", 10, 2, "lfu")
    use(slots, 0, counts=[100_000])
    use(slots, 1)
    use(slots, 2)
    assert cached(slots) == {0, 2}
    for _ in range(300):  # ten uses per slot: 15 halvings
        use(slots, 2)
    use(slots, 1)
    assert cached(slots) == {1, 2}, "100 000 uses 15 halvings ago are less than the last 300"


def test_lfu_counts_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_eviction, "_USES_PER_HALVING", 10**9)
    slots = SlotMap("t", 10, 2, "lfu")
    use(slots, 0, counts=[2**62])
    use(slots, 1, counts=[2**24])
    for _ in range(3):
        use(slots, 1)  # has no effect any more
        use(slots, 0, counts=[2**62])
    scores = slots._scores[slots.slot_of[:2].long()]
    assert float(_eviction._unpack(scores)[1]) == 2.0**24
    assert bool((scores < _eviction.EMPTY).all())
    use(slots, 2)
    assert cached(slots) == {0, 2}


def test_lfu_scales_down_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """After more halvings than FP32 has binary exponents the order is still right."""
    monkeypatch.setattr(_eviction, "_USES_PER_HALVING", 1)
    slots = SlotMap("t", 10, 3, "lfu")
    for _ in range(300):
        use(slots, 0, 1, counts=[1, 3])
        use(slots, 2)
    counts = slots._uses._counts
    assert bool(counts.isfinite().all())
    totals = _eviction._unpack(slots._scores[slots.slot_of[:3].long()])
    assert bool(totals.isfinite().all())
    assert float(totals[0]) > 0
    assert float(totals[1] / totals[0]) == pytest.approx(3)
    use(slots, 2, counts=[9])
    use(slots, 4)
    assert cached(slots) == {1, 2, 4}


def test_lfu_scales_down_rows_that_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_eviction, "_USES_PER_HALVING", 1)
    monkeypatch.setattr(_eviction, "_LARGEST_WEIGHT", 2.0)  # at every halving
    slots = SlotMap("t", 10, 3, "lfu")
    use(slots, 0, counts=[16])
    for row in (1, 2, 3):
        use(slots, row, counts=[640])
    assert cached(slots) == {1, 2, 3}
    for _ in range(30):  # ten halvings
        use(slots, 1, counts=[640])
    use(slots, 0)
    use(slots, 5, counts=[2])
    assert cached(slots) == {0, 1, 5}
    use(slots, 6)
    assert cached(slots) == {1, 5, 6}, "the 16 uses of 0 are long ago"


def test_interrupted_choice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SlotMap("t", 10, 3, "lru")
    use(slots, 0, 1, 2)
    before = frozen(slots)

    def interrupted(*_: object) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_eviction.Ranking, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slots.plan(ids(1, 5))
    assert frozen(slots) == before
    assert sorted(slots.plan(ids(1, 5, 6)).slots.tolist()) == [0, 1, 2]


def test_interrupted_change_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SlotMap("t", 10, 3, "lru")
    plan = slots.plan(ids(0, 1))

    def interrupted(number: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(slots._uses, "used", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slots.plan(ids(2))
    for call in (
        lambda: slots.plan(ids(3)),
        lambda: slots.release(plan.slots),
        lambda: slots.mark_dirty(plan.slots),
        lambda: slots.mark_clean(plan.slots),
        lambda: slots.drop(ids(0)),
        slots.dirty,
    ):
        with pytest.raises(RuntimeError, match="newer values in it are lost"):
            call()
    slots.clear()
    assert len(slots.plan(ids(0, 1, 2)).missing) == 3


def test_a_row_in_many_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = SlotMap("t", 3, 3, "lru")
    plans = [slots.plan(ids(1)) for _ in range(300)]
    before = frozen(slots)
    monkeypatch.setattr("fastemb.offload._slots._MOST_PINS", 300)
    with pytest.raises(RuntimeError, match="more than 300 batches or lookups in flight hold the"):
        slots.plan(ids(0, 1))
    assert frozen(slots) == before
    for plan in plans:
        slots.release(plan.slots)
    slots.drop(ids(1))


@pytest.mark.parametrize(
    ("rows", "counts", "error", "text"),
    [
        (ids(3, 2), None, ValueError, "rows must be ascending and distinct"),
        (ids(2, 2), None, ValueError, "rows must be ascending and distinct"),
        (ids(-1, 2), None, IndexError, "row -1 is out of range for 5 rows"),
        (ids(2, 5), None, IndexError, "row 5 is out of range for 5 rows"),
        (ids(2).int(), None, ValueError, r"got torch.int32 \[1\] on cpu"),
        (ids(2)[None], None, ValueError, r"got torch.int64 \[1, 1\] on cpu"),
        (ids(2).to("meta"), None, ValueError, r"got torch.int64 \[1\] on meta"),
        (ids(2), ids(1, 1), ValueError, r"counts must be 1 integers.*got torch.int64 \[2\]"),
        (ids(2), ids(1).float(), ValueError, r"got torch.float32 \[1\]"),
        (ids(1, 2), ids(1, 0), ValueError, "counts must be at least 1, got 0"),
    ],
)
def test_wrong_plans(
    rows: Tensor, counts: Tensor | None, error: type[Exception], text: str
) -> None:
    slots = SlotMap("t", 5, 4, "lfu")
    use(slots, 0, 1)
    before = frozen(slots)
    with pytest.raises(error, match=f"table 't': .*{text}"):
        slots.plan(rows, counts)
    assert frozen(slots) == before


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="num_rows must not be negative, got -1"):
        SlotMap("t", -1, 4, "lfu")
    for number in (0, 2**31):
        with pytest.raises(ValueError, match=f"num_slots must be at least 1.*got {number}"):
            SlotMap("t", 5, number, "lfu")
    with pytest.raises(ValueError, match="policy must be 'lfu' or 'lru', got 'fifo'"):
        SlotMap("t", 5, 4, "fifo")  # type: ignore[arg-type]
    slots = SlotMap("t", 5, 4, "lfu")
    for mark in (slots.mark_dirty, slots.mark_clean):
        with pytest.raises(ValueError, match="slot 2 is empty"):
            mark(ids(2))


def test_modes_of_the_caller() -> None:
    """A default device or inference mode changes neither where nor how things are kept."""
    with torch.inference_mode(), torch.device("meta"):
        slots = SlotMap("t", 20, 4, "lfu")
        rows = torch.arange(4, device="cpu")
        for first in range(0, 20, 4):
            slots.release(slots.plan(rows + first).slots)
        slots.clear()
        slots.release(slots.plan(rows).slots)
    for first in range(0, 20, 4):
        plan = slots.plan(ids(*range(first, first + 4)))
        slots.mark_dirty(plan.slots)
        slots.release(plan.slots)
    assert cached(slots) == {16, 17, 18, 19}
    assert plan.evicted_rows.tolist() == slots.row_of.new_tensor([12, 13, 14, 15]).tolist()


def test_memory_does_not_grow() -> None:
    slots = SlotMap("t", 1000, 64, "lfu")

    def size() -> int:
        parts = [slots, slots._uses, slots._ranking]
        tensors = [t for part in parts for t in vars(part).values() if isinstance(t, Tensor)]
        return sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
        )

    generator = torch.Generator().manual_seed(0)
    sizes = []
    for _ in range(300):
        plan = slots.plan(torch.randint(1000, (40,), generator=generator).unique())
        slots.mark_dirty(plan.slots)
        slots.release(plan.slots)
        sizes.append(size())
    assert max(sizes[100:]) <= max(sizes[:100])
