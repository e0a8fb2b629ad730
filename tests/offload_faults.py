"""Trainings in which something goes wrong with the data that moves, beside some that go well."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from offload_cases import Case, TableCase, build, ids_of, loss_of, new_engine, saved
from optim_cases import bits
from torch import Tensor

from fastemb.offload._lanes import Lane
from fastemb.offload._table import Table

# Few slots for many rows: nearly all of them move in every step, in several chunks.
CASE = Case(tables=(TableCase(rows=48, dim=3, padding_idx=5),), steps=14, size=6)
SLOTS = 18
STAGING_BYTES = 256  # four records
RECORD_BYTES = 64

Copy = Callable[[Tensor, Tensor], None]


class Pair:
    """A training with an engine, and after each of its steps the same step without one."""

    def __init__(self, case: Case = CASE, *, prefetch: bool = True, **options: Any) -> None:
        options = {"cache": SLOTS, "staging_bytes": STAGING_BYTES, "depth": 1, **options}
        self.engine = new_engine(**options)
        self.prefetch = prefetch
        self.batches = case.batches()
        self.steps = 0
        self.model, self.optimizer = build(case, self.engine)
        self.plain = build(case, None)
        self.table = self.engine.tables["t0"]
        self.sent: list[tuple[str, int, set[int]]] = []  # direction, step, rows of all transfers
        self._listen()

    def _listen(self) -> None:
        transfers = self.engine.transfers
        fetch, write_back = transfers.fetch, transfers.write_back

        def listening_fetch(
            table: Table, rows: Tensor, slots: Tensor, step: int, *rest: Any
        ) -> Any:
            self.sent.append(("to device", step, set(rows.tolist())))
            return fetch(table, rows, slots, step, *rest)

        def listening_write_back(table: Table, rows: Tensor, slots: Tensor, step: int) -> None:
            self.sent.append(("to host", step, set(rows.tolist())))
            write_back(table, rows, slots, step)

        transfers.fetch = listening_fetch  # type: ignore[method-assign]
        transfers.write_back = listening_write_back  # type: ignore[method-assign]

    def loader(self, number: int | None = None) -> Iterable[dict[str, Any]]:
        rest = self.batches[self.steps :][:number]
        return self.engine.prefetch(rest, ids=ids_of) if self.prefetch else rest

    def train(self, number: int | None = None) -> None:
        """The next ``number`` steps, or all that there are."""
        for batch in self.loader(number):
            loss = _step(self.model, self.optimizer, batch)
            self.steps += 1
            assert bits(loss) == bits(_step(*self.plain, batch))

    def wanted(self) -> dict[str, Tensor]:
        """What the records must have by now."""
        weight = self.plain[0].get_parameter("t0.weight")
        states = self.plain[1].state.get(weight, {})
        fields = {"weight": weight.detach(), **states}
        return {
            name: fields[name].view(len(weight), -1) if name in fields else torch.zeros_like(view)
            for name, view in self.table.host.fields.items()
        }

    def found(self) -> dict[str, Tensor]:
        """What they have: that in the cache, where it is newer than that on the host."""
        self.engine.transfers.drain()
        table = self.table
        dirty = table.slots.dirty()
        result = {}
        for name, view in table.host.fields.items():
            result[name] = view.clone()
            result[name][table.slots.row_of[dirty]] = table.cache[name][dirty]
        return result

    def differing(self) -> set[int]:
        """Rows that are not what they must be."""
        wanted, found = self.wanted(), self.found()
        return {
            row
            for row in range(len(wanted["weight"]))
            if any(bits(wanted[name][row]) != bits(found[name][row]) for name in wanted)
        }

    def lost(self) -> set[int]:
        """Rows whose record on the host is not in the version that it must have."""
        host = self.table.host
        versions = host.layout.headers(host.records)[:, 1]
        return set(torch.where(versions != host.versions)[0].tolist())

    def finish(self) -> None:
        """Train to the end, which has the bits it must have."""
        self.train()
        assert saved(self.model, self.optimizer) == saved(*self.plain)
        assert not any(self.engine.verify().values())
        self.engine.close()


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> Tensor:
    loss, _ = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Fault:
    """Something that happens to copies over one lane.

    Args:
        lane: "deliver" or "collect".
        begin, end: numbers of the copies that it happens to.
    """

    def __init__(self, lane: str, begin: int, end: int | None = None) -> None:
        self.lane = lane
        self.numbers = range(begin, begin + 1 if end is None else end)
        self.count = 0
        self.happened = 0
        self.seen: list[Tensor] = []

    def make_lane(self, name: str, device: torch.device) -> Lane:
        return FaultyLane(name, device, self) if name == self.lane else Lane(name, device)

    def copy(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        number = self.count
        self.count += 1
        if number in self.numbers:
            self.happened += 1
            self.happen(copy, target, source)
        else:
            self.usual(copy, target, source)
        self.seen = [*self.seen[-3:], source.clone()]

    def usual(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        copy(target, source)

    def happen(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        raise NotImplementedError


class FaultyLane(Lane):
    def __init__(self, name: str, device: torch.device, fault: Fault) -> None:
        super().__init__(name, device)
        self._fault = fault

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._fault.copy(super().copy, target, source)


class Flip(Fault):
    """One bit of one record, or of all, arrives wrong."""

    def __init__(self, *args: Any, byte: int, bit: int = 0, record: int | None = 0) -> None:
        super().__init__(*args)
        self.byte, self.bit, self.record = byte, bit, record

    def happen(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        copy(target, source)
        records = slice(None) if self.record is None else self.record % len(target)
        target[records, self.byte] ^= 1 << self.bit


class Dropped(Fault):
    """The buffer keeps what it had."""

    def happen(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        pass


class Late(Fault):
    """The bytes come some time after the copy has ended."""

    def happen(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        threading.Timer(0.03, copy, (target, source.clone())).start()


class Stale(Fault):
    """What was sent before is sent again."""

    def happen(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        _fill(target, self.seen[-1])


class Swapped(Fault):
    """What was to be sent comes with the next copy, and the other way round."""

    def happen(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        _fill(target, self.seen[-1])

    def usual(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        if self.count - 2 in self.numbers:
            _fill(target, self.seen[-1])
        else:
            copy(target, source)


class HalfWay(Fault):
    """The second half of the records does not come."""

    def happen(self, copy: Copy, target: Tensor, source: Tensor) -> None:
        half = len(source) // 2
        copy(target[:half], source[:half])


def _fill(target: Tensor, records: Tensor) -> None:
    number = min(len(target), len(records))
    target[:number] = records[:number]


class LateLanes:
    """Makes lanes that sleep before jobs with this label; they may be made to later."""

    def __init__(self, label: str, seconds: float = 0.0) -> None:
        self.label = label
        self.seconds = seconds

    def __call__(self, name: str, device: torch.device) -> Lane:
        return Lane(name, device, delay=self._delay)

    def _delay(self, label: str) -> None:
        if label == self.label:
            time.sleep(self.seconds)
