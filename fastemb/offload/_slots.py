"""Which row of an offloaded table is in which slot of the device cache.

Bookkeeping on the host only: it says what must move, and moves nothing. A plan is made in the step
of the user, so all of it is tensor operations, and as few as possible that jump about in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fastemb.offload._eviction import EMPTY, Frequency, Ranking, Recency, host_array

Policy = Literal["lfu", "lru"]

_ABSENT = -1
_VACANT, _CLEAN, _DIRTY = 0, 1, 2  # what is in a slot
_MOST_PINS = 2**15 - 1  # what two bytes can count


class CacheTooSmallError(RuntimeError):
    """The rows of the batches in flight do not fit into the cache; nothing has changed.

    Attributes:
        num_needed: slots for the rows of this batch and for those that other batches hold besides.
        num_slots: slots there are.
    """

    def __init__(self, table: str, num_rows: int, num_needed: int, num_slots: int) -> None:
        self.num_needed = num_needed
        self.num_slots = num_slots
        self._batch = table, num_rows
        held = num_needed - num_rows
        others = (
            f", and {held} more are held for batches that are under way, in a loop that has not "
            "gone on or with a backward or step still to come"
            if held
            else ""
        )
        super().__init__(
            f"table {table!r}: a batch with {num_rows} distinct rows needs as many slots{others}; "
            f"the cache has {num_slots} slots and would need {num_needed}: give the engine a "
            "larger cache"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self._batch, self.num_needed, self.num_slots)


@dataclass(frozen=True, eq=False)
class Plan:
    """What must happen before a batch can use its rows; all tensors int64.

    Attributes:
        slots: [n], the slot of each row; pinned until `SlotMap.release`.
        missing: [m], positions in the rows, ascending, of those that must be fetched.
        evicted_rows: [e], dirty rows that gave up their slots and must be written back before
            these are filled. Nothing is lost with rows that were clean, so they are not here.
        evicted_slots: [e], where the rows still are; each is the slot of a missing row.
    """

    slots: Tensor
    missing: Tensor
    evicted_rows: Tensor
    evicted_slots: Tensor


class SlotMap:
    """Rows in slots: at most one row in a slot, and one slot for a row.

    Not thread-safe: its owner has a lock. A method that raises has changed nothing. Only where an
    interrupt (Ctrl-C) hits the middle of a change, all methods refuse until `clear`.

    Args:
        table: name, for messages.
        num_rows: of the table.
        num_slots: of the cache, at least 1 and less than 2**31.
        policy: whose slots go to other rows, after the empty ones. ``"lfu"``: those of the rows
            used least, and among equals longest ago. Uses count also while a row is not in the
            cache, and half as much after ten uses per slot. ``"lru"``: those of the rows used
            longest ago. The order is that of the last ranking (a quarter of the slots, or what one
            plan needs), without the slots that are pinned or were used since.

    Attributes:
        slot_of: [num_rows] int32, -1: not in the cache.
        row_of: [num_slots] int64, -1: empty.
    """

    def __init__(self, table: str, num_rows: int, num_slots: int, policy: Policy) -> None:
        if num_rows < 0:
            raise ValueError(f"table {table!r}: num_rows must not be negative, got {num_rows}")
        if not 1 <= num_slots < 2**31:
            raise ValueError(
                f"table {table!r}: num_slots must be at least 1 and less than 2**31, "
                f"got {num_slots}"
            )
        if policy not in ("lfu", "lru"):
            raise ValueError(f"table {table!r}: policy must be 'lfu' or 'lru', got {policy!r}")
        self.table = table
        self.num_rows = num_rows
        self.num_slots = num_slots
        # Whatever mode or default device the caller is in: all this is written to on the host.
        with torch.inference_mode(False):
            self.slot_of = host_array(num_rows, torch.int32)
            self.row_of = host_array(num_slots, torch.int64)
            self._content = host_array(num_slots, torch.uint8)
            self._pins = host_array(num_slots, torch.int16)
            self._scores = host_array(num_slots, torch.int64)
            # A stack, of which the first _num_free count.
            self._free = host_array(num_slots, torch.int32)
            self._uses = Frequency(num_rows, num_slots) if policy == "lfu" else Recency()
        self._ranking = Ranking()
        self._num_free = 0
        self._num_pinned = 0
        self._torn = False
        self.clear()

    def plan(
        self,
        rows: Tensor,
        counts: Tensor | None = None,
        before_eviction: Callable[[], None] = lambda: None,
    ) -> Plan:
        """Find or make a slot for each of ``rows``, and pin it.

        Args:
            rows: [n] int64, ascending and distinct.
            counts: [n] integers of at least 1, how often each row occurs in the batch (for
                ``"lfu"``); None: once.
            before_eviction: called where rows must be written back, before anything is changed.

        Raises:
            CacheTooSmallError: they do not fit in beside the slots that are pinned already.
            ValueError, IndexError: ``rows`` or ``counts`` are not what they must be.
        """
        self._check_whole()
        self._check_rows(rows)
        if counts is not None:
            self._check_counts(counts, len(rows))
        slots = self.slot_of.index_select(0, rows).long()
        absent = slots < 0
        missing = absent.nonzero().view(-1)
        # Missing rows pass through slot 0 with nothing to add: cheaper than to leave them out.
        slots.clamp_(min=0)
        present = absent.logical_not_().short()
        pins = self._pins.index_select(0, slots)
        num_pinned = self._num_pinned + len(missing) + int((present > pins).sum())
        if num_pinned > self.num_slots:
            raise CacheTooSmallError(self.table, len(rows), num_pinned, self.num_slots)
        if len(rows) and int(pins.max()) == _MOST_PINS:
            raise RuntimeError(
                f"table {self.table!r}: more than {_MOST_PINS} batches or lookups in flight hold "
                "the same row"
            )
        scores = self._uses.score(rows, counts, slots, missing, self._scores)

        with self._change():
            try:
                self._pins.scatter_add_(0, slots, present)  # so that none becomes a victim
                chosen, victims = self._choose(len(missing))
                evicted = self.row_of.index_select(0, victims)
                evicted_scores = self._scores.index_select(0, victims)
                dirty = (self._content.index_select(0, victims) == _DIRTY).nonzero().view(-1)
                plan = Plan(slots, missing, evicted[dirty], victims[dirty])
                new_rows, new_slots = rows.index_select(0, missing), chosen.int()
                if len(dirty):
                    before_eviction()
            except BaseException:
                self._pins.scatter_(0, slots, pins)
                self._ranking.forget()  # which takes the victims for gone
                self._torn = False
                raise
            self._num_free -= len(missing) - len(victims)
            self._num_pinned = num_pinned
            self._uses.leave(evicted, evicted_scores)
            self._uses.used(len(rows))
            self.slot_of.index_fill_(0, evicted, _ABSENT)
            self.slot_of.index_copy_(0, new_rows, new_slots)
            self.row_of.index_copy_(0, chosen, new_rows)
            self._content.index_fill_(0, chosen, _CLEAN)
            self._pins.index_fill_(0, chosen, 1)
            slots.index_copy_(0, missing, chosen)
            self._scores.index_copy_(0, slots, scores)
            self._uses.rescale(self._scores)
        return plan

    def release(self, slots: Tensor) -> None:
        """Take one pin off each of ``slots`` ([n] int64, distinct), such as those of a plan.

        Raises:
            ValueError: one of them is not pinned.
        """
        self._check_whole()
        pins = self._pins.index_select(0, slots)
        if bool((pins == 0).any()):
            raise ValueError(
                f"table {self.table!r}: slot {int(slots[pins == 0][0])} is released more often "
                "than it was planned"
            )
        last = int((pins == 1).sum())
        with self._change():
            self._pins.index_copy_(0, slots, pins.sub_(1))
            self._num_pinned -= last

    def mark_dirty(self, slots: Tensor) -> None:
        """The rows in ``slots`` ([n] int64) differ from those on the host.

        Raises:
            ValueError: one of them is empty.
        """
        self._mark(slots, _DIRTY)

    def mark_clean(self, slots: Tensor) -> None:
        """The rows in ``slots`` ([n] int64) are written back, or will be.

        Raises:
            ValueError: one of them is empty.
        """
        self._mark(slots, _CLEAN)

    def dirty(self) -> Tensor:
        """Slots ([d] int64, ascending) whose rows must be written back sometime."""
        self._check_whole()
        return (self._content == _DIRTY).nonzero().view(-1)

    def drop(self, rows: Tensor, force: bool = False) -> None:
        """Forget ``rows`` ([n] int64) as far as they are here, without writing them back.

        Args:
            rows: in any order.
            force: also pinned ones. That takes all pins off them, so nobody may release these
                slots again.

        Raises:
            ValueError: one of them is pinned, without ``force``.
        """
        self._check_whole()
        slots = self.slot_of.index_select(0, rows)
        free = slots[slots >= 0].unique()  # a row that is given twice frees one slot
        slots = free.long()
        rows = self.row_of.index_select(0, slots)
        pinned = self._pins.index_select(0, slots) > 0
        num_pinned = int(pinned.sum())
        if num_pinned and not force:
            raise ValueError(
                f"table {self.table!r}: row {int(rows[pinned][0])} cannot be dropped: "
                "a batch in flight uses it"
            )
        scores = self._scores.index_select(0, slots)
        with self._change():
            self._uses.leave(rows, scores)
            self.slot_of.index_fill_(0, rows, _ABSENT)
            self.row_of.index_fill_(0, slots, _ABSENT)
            self._content.index_fill_(0, slots, _VACANT)
            self._pins.index_fill_(0, slots, 0)
            self._scores.index_fill_(0, slots, EMPTY)
            self._free[self._num_free : self._num_free + len(free)] = free
            self._num_free += len(free)
            self._num_pinned -= num_pinned

    @property
    def torn(self) -> bool:
        """Whether an interrupt has hit the middle of a change, so that only `clear` is left."""
        return self._torn

    def clear(self) -> None:
        """As new: nothing in the cache, pinned, dirty or counted."""
        self._torn = True
        self.slot_of.fill_(_ABSENT)
        self.row_of.fill_(_ABSENT)
        self._content.fill_(_VACANT)
        self._pins.zero_()
        self._scores.fill_(EMPTY)
        torch.arange(self.num_slots - 1, -1, -1, out=self._free, device="cpu")  # slot 0 on top
        self._num_free = self.num_slots
        self._num_pinned = 0
        self._uses.clear()
        self._ranking.forget()
        self._torn = False

    def _choose(self, number: int) -> tuple[Tensor, Tensor]:
        """``number`` slots, free ones first, and those among them whose rows must leave."""
        num_free = min(self._num_free, number)
        free = self._free[self._num_free - num_free : self._num_free].flip(0).long()
        if num_free == number:
            return free, free[:0]
        victims = self._ranking.take(number - num_free, self._scores, self._pins)
        return torch.cat([free, victims]), victims

    def _mark(self, slots: Tensor, content: int) -> None:
        self._check_whole()
        vacant = self._content.index_select(0, slots) == _VACANT
        if bool(vacant.any()):
            raise ValueError(
                f"table {self.table!r}: slot {int(slots[vacant][0])} is empty and can be neither "
                "dirty nor clean"
            )
        self._content.index_fill_(0, slots, content)

    @contextmanager
    def _change(self) -> Iterator[None]:
        """What happens in here must happen as a whole."""
        self._torn = True
        yield
        self._torn = False

    def _check_whole(self) -> None:
        if self._torn:
            raise RuntimeError(
                f"table {self.table!r}: the cache was interrupted while its slots changed hands, "
                "so newer values in it are lost; engine.load_state_dict() goes on from a checkpoint"
            )

    def _check_rows(self, rows: Tensor) -> None:
        if rows.dim() != 1 or rows.dtype != torch.int64 or rows.device.type != "cpu":
            raise ValueError(
                f"table {self.table!r}: rows must be one-dimensional, int64 and on the host, "
                f"got {rows.dtype} {list(rows.shape)} on {rows.device}"
            )
        if not len(rows):
            return
        if not bool((rows[1:] > rows[:-1]).all()):
            raise ValueError(f"table {self.table!r}: rows must be ascending and distinct")
        first, last = int(rows[0]), int(rows[-1])
        if first < 0 or last >= self.num_rows:
            raise IndexError(
                f"table {self.table!r}: row {first if first < 0 else last} is out of range for "
                f"{self.num_rows} rows"
            )

    def _check_counts(self, counts: Tensor, num_rows: int) -> None:
        if counts.shape != (num_rows,) or counts.is_floating_point() or counts.is_complex():
            raise ValueError(
                f"table {self.table!r}: counts must be {num_rows} integers, one for each row, "
                f"got {counts.dtype} {list(counts.shape)}"
            )
        if num_rows and int(counts.min()) < 1:
            raise ValueError(
                f"table {self.table!r}: counts must be at least 1, got {int(counts.min())}"
            )
