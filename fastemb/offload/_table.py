"""An offloaded table and the batches that look its rows up."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastemb import _reference
from fastemb.offload._held import HeldRows
from fastemb.offload._interrupts import uninterrupted
from fastemb.offload._modes import outside_modes
from fastemb.offload._slots import CacheTooSmallError
from fastemb.offload._stored import alone
from fastemb.offload._trained import TrainedTable
from fastemb.offload._transfers import Failure

_ops = torch.ops.fastemb


# Elements that torch's operators go through on the calling thread. With more it asks for help of
# threads whose cores are those of the lanes, and waits until they let go.
_ON_ONE_THREAD = 1 << 15


def _range(numbers: Tensor) -> tuple[int, int]:
    """The least and the largest of [n], n > 0."""
    parts = [part.aminmax() for part in numbers.split(_ON_ONE_THREAD)]
    return min(int(part.min) for part in parts), max(int(part.max) for part in parts)


class Lookup(NamedTuple):
    """A lookup in terms of slots.

    Attributes:
        slots: of the ids, in their shape.
        padding: slot of the padding row, None: none of the ids is it.
        held: keeps the rows where they are.
    """

    slots: Tensor
    padding: int | None
    held: HeldRows


class Table(TrainedTable):
    """One offloaded table."""

    def distinct(self, op: str, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that ids name, ascending, how often, and the order that sorts the ids."""
        flat = ids.detach().reshape(-1).cpu()
        self.check_ids(op, flat)
        order, rows, segments, num_rows = _ops.group_indices(
            flat.view(-1, 1), None, self.shape[0], -1, False
        )
        number = int(num_rows)
        return rows[:number], segments[: number + 1].diff(), order

    def check_ids(self, op: str, flat: Tensor) -> None:
        if len(flat):
            least, largest = _range(flat)
            if least < 0 or largest >= self.shape[0]:
                _reference.check_indices(op, flat, self.shape[0], self.name)

    def check_room(self, rows: Tensor) -> None:
        """Raise `CacheTooSmallError` for a batch that the empty cache could not hold."""
        if len(rows) > self.num_slots:
            raise CacheTooSmallError(self.name, len(rows), len(rows), self.num_slots)

    @alone
    def bring(self, rows: Tensor, counts: Tensor, *, now: bool = True) -> HeldRows:
        """Have ``rows`` brought into the cache, and hold them; they are there after `wait`.

        Args:
            now: whether rows that are only looked ahead for give way where there is no room.

        Raises:
            CacheTooSmallError: there is no room.
        """
        try:
            with uninterrupted:
                return self._bring(rows, counts)
        except CacheTooSmallError:
            if not now or not self.engine.give_way():
                raise
        self.settle()
        with uninterrupted:
            return self._bring(rows, counts)

    def _bring(self, rows: Tensor, counts: Tensor) -> HeldRows:
        engine = self.engine
        plan = self.slots.plan(rows, counts, self.host.mark_dirty)
        evicted, missing = plan.evicted_rows, rows.index_select(0, plan.missing)
        try:
            held = HeldRows(self, rows, plan.slots)
            stored = self.stored  # what this plan evicts is none of its own rows
            if len(evicted):
                engine.transfers.write_back(self, evicted, plan.evicted_slots, engine.step)
                evicted = evicted[:0]
            self._fetch(missing, plan.slots.index_select(0, plan.missing), stored)
            held.delivered = self.delivered
        except BaseException as error:  # no memory, say: the plan must not pass for done
            if len(evicted):
                lost = RuntimeError(
                    f"table {self.name!r}: interrupted while rows were leaving the cache, so newer "
                    "values of them are lost; engine.load_state_dict() goes on from a checkpoint"
                )
                lost.__cause__ = error
                engine.transfers.failures.append(Failure(self, evicted, lost, True))
            self.spoiled.append(missing)
            raise
        engine.hits += len(rows) - len(missing)
        engine.misses += len(missing)
        return held

    def wait(self, held: HeldRows) -> None:
        """Until rows are in the cache, and no longer: those of later batches may still come."""
        delivered, mended = held.delivered, held.mended
        del held  # whoever keeps the traceback of an error must not keep the slots
        if self.spoiled:
            self.settle()
        if mended == self.mended:
            self.engine.wait(delivered)

    @alone
    def begin(self, held: HeldRows) -> None:
        """Lookups find these rows, and only these, from now on, until `end`."""
        self._end_those_over()
        with uninterrupted:
            if self.current:
                self._hide(self.current[-1])
            self.current.append(held)
            self._show(held)

    def end(self, held: HeldRows) -> None:
        """`begin` no longer holds; what held before does again.

        At once, or by the next `settle` where another thread has the lock: the collector may be
        what ends a loop, on a lane that this other thread waits for.
        """
        self.ended.append(held)
        if self.lock.acquire(blocking=False):
            try:
                self._end_those_over()
            finally:
                self.lock.release()

    @alone
    def settle(self) -> None:
        """See `StoredTable.settle`."""
        self._end_those_over()
        super().settle()

    @outside_modes
    def _end_those_over(self) -> None:
        while self.ended:
            with uninterrupted:
                held = self.ended.popleft()
                self._hide(held)
                if held in self.current:
                    self.current.remove(held)
                if self.current:
                    self._show(self.current[-1])

    def _show(self, held: HeldRows) -> None:
        rows, slots = (self._sent(x) for x in (held.rows, held.slots.int()))
        # On one thread, which indexing is not: the other's core is that of the lanes by now.
        self._slot_of_current.index_copy_(0, rows, slots)

    def _hide(self, held: HeldRows) -> None:
        self._slot_of_current.index_fill_(0, self._sent(held.rows), -1)

    def _sent(self, numbers: Tensor) -> Tensor:
        """On the device, without waiting for what that is doing."""
        if self.device.type == "cpu":
            return numbers
        return numbers.pin_memory().to(self.device, non_blocking=True)

    @alone
    def lookup(self, op: str, ids: Tensor, padding_idx: int | None) -> Lookup:
        """Slots for the ids of a lookup, whose rows are in the cache afterwards.

        Raises:
            IndexError: an id is out of range.
            CacheTooSmallError: its rows do not fit.
            IntegrityError: a record did not arrive as it was sent.
        """
        self.open()
        self.engine.check()
        self.settle()
        if self.leaf.requires_grad != self.weight.requires_grad:
            self.leaf.requires_grad_(self.weight.requires_grad)
        found = self._find(op, ids) if self.current else None
        if found is None:
            rows, counts, order = self.distinct(op, ids)
            self.check_room(rows)
            held = self.bring(rows, counts)
            try:
                self.wait(held)
            except BaseException:
                del held  # whoever keeps the traceback must not keep the slots
                raise
            slots = order.new_empty(len(order))
            slots[order.long()] = held.slots.int().repeat_interleave(counts)
            slots = slots.view(ids.shape).to(self.device)
        else:
            slots, held = found
        padding = None
        if padding_idx is not None:
            slot = int(self.slots.slot_of[padding_idx])
            padding = slot if slot >= 0 else None
        return Lookup(slots, padding, held)

    def _find(self, op: str, ids: Tensor) -> tuple[Tensor, HeldRows] | None:
        """Slots of ids that were all announced for the batch that is under way."""
        flat = ids.detach().reshape(-1)
        on_host = self.device.type == "cpu"
        if on_host:
            self.check_ids(op, flat)
        else:  # a kernel reports what is out of range as what was not announced: as slot -1
            outside = (flat < 0) | (flat >= self.shape[0])
            flat = flat.masked_fill(outside, 0)
        slots = self._slot_of_current.index_select(0, flat)
        if not on_host:
            slots = slots.masked_fill(outside, -1)
        elif len(slots) and _range(slots)[0] < 0:
            return None
        return slots.view(ids.shape), self.current[-1]

    @alone
    def touched(self, lookup: Lookup) -> None:
        """The rows of a lookup have been changed in the cache, by ``max_norm``."""
        self.slots.mark_dirty(lookup.held.slots)
        self.weight_has_changed()
