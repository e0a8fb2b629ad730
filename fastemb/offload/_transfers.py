"""Records on their way between the host table and the slots of the cache.

Two pipelines of two lanes each, with two reusable staging buffers between the lanes:

    fetch       gather:  host table -> staging        deliver: staging -> device -> slots, verified
    write-back  collect: slots -> device -> staging   store:   staging, verified -> host table

Everything is verified where it arrives: fetched records in the slots, others before they are
stored. Bytes between the fields of a record and behind them are not data: a fetch drops them and
does not look at them; elsewhere those between fields are verified with the rest.

Each wait has a name; the tests leave out one at a time and see that it is missed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from fastemb.offload import _mapping
from fastemb.offload._host import HostTable
from fastemb.offload._lanes import Event, Lane, computed
from fastemb.offload._modes import outside_modes
from fastemb.offload.errors import Direction, IntegrityError, Verify

LaneFactory = Callable[[str, torch.device], Lane]

_SAMPLED = 16  # with verify="sample" one record of so many

_ops = torch.ops.fastemb


@dataclass
class Traffic:
    """What has been moved and verified.

    Attributes:
        fetched, written_back: records.
        bytes_to_device, bytes_to_host: of records.
        checks: checksums of records that were recomputed and compared.
        busy_seconds: time that the lanes have worked, without waiting for one another.
    """

    fetched: int = 0
    written_back: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0
    checks: int = 0
    busy_seconds: float = 0.0

    def copy(self) -> Traffic:
        return Traffic(*(getattr(self, field.name) for field in fields(self)))


class CachedTable(Protocol):
    """What transfers have to know of a table.

    Attributes:
        name: for errors.
        host: the host table.
        cache: field -> [slots, width], in the order of the layout.
        headers: [slots, 2] int64.
        collected: the last time that slots were read for a write-back.
        stored: the last write-back.
    """

    name: str
    host: HostTable
    cache: dict[str, Tensor]
    headers: Tensor
    collected: Event | None
    stored: Event | None


@dataclass
class Failure:
    """A transfer that went wrong.

    Attributes:
        rows: those of its records.
        lost: whether what the device had is gone: a write-back that did not arrive.
    """

    table: CachedTable
    rows: Tensor
    error: BaseException
    lost: bool


class _Staging:
    """Two buffers on either side of one direction, and who has used them last."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._host = [_mapping.buffer(num_bytes, torch.uint8, device) for _ in range(2)]
        self.on_device = [
            torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        if device.type == "cuda":  # or the zeros could come after what a lane writes
            torch.cuda.current_stream(device).synchronize()
        self._users: list[Event | None] = [None, None]
        self._turn = 0

    def take(self) -> tuple[int, Event | None]:
        """The buffer whose turn it is, and the end of its last use."""
        self._turn ^= 1
        return self._turn, self._users[self._turn]

    def used(self, buffer: int, until: Event) -> None:
        self._users[buffer] = until

    def host(self, buffer: int, records: int, record_bytes: int) -> Tensor:
        return self._host[buffer][: records * record_bytes].view(records, record_bytes)

    def device(self, buffer: int, records: int, record_bytes: int) -> Tensor:
        return self.on_device[buffer][: records * record_bytes].view(records, record_bytes)


class Transfers:
    """The lanes and staging buffers of an engine.

    Args:
        device: of the cache.
        staging_bytes: size of one buffer; one record fits at least.
        verify: which records are verified.
        make_lane: name and device -> lane.

    Attributes:
        verify: as given.
        failures: of jobs, oldest first, until somebody takes them away, one by one: workers append
            to it at any time.
        reported: in the same way, what kernels of others have found wrong with their ids. On CUDA
            the next operator raises that, which may be one of a lane; it is for the loop to raise.
    """

    @outside_modes
    def __init__(
        self,
        device: torch.device,
        staging_bytes: int,
        verify: Verify,
        make_lane: LaneFactory,
    ) -> None:
        self.device = device
        self.failures: deque[Failure] = deque()
        self.reported: deque[BaseException] = deque()
        self.verify = verify
        self._gather = make_lane("gather", torch.device("cpu"))
        self._deliver = make_lane("deliver", device)
        self._collect = make_lane("collect", device)
        self._store = make_lane("store", torch.device("cpu"))
        self._lanes = (self._gather, self._deliver, self._collect, self._store)
        self._in = self._staging(staging_bytes)
        self._out = self._staging(staging_bytes)
        self._traffic = Traffic()
        self._counting = Lock()
        self._sampled = 0

    def traffic(self) -> Traffic:
        with self._counting:
            return self._traffic.copy()

    def make_room(self, record_bytes: int) -> None:
        """Have buffers that take a record of this size."""
        for name in ("_in", "_out"):
            if getattr(self, name).num_bytes < record_bytes:
                self.drain()  # the old ones are given back, and streams must have left them
                setattr(self, name, self._staging(record_bytes))

    def _staging(self, num_bytes: int) -> _Staging:
        staging = _Staging(self.device, num_bytes)
        for memory in staging.on_device:
            self.share(memory)
        return staging

    def share(self, memory: Tensor) -> None:
        """Lanes use ``memory`` on the device: once it is freed, nobody gets it before they end."""
        for lane in self._lanes:
            if lane.stream is not None:
                memory.record_stream(lane.stream)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def drain(self) -> None:
        """Wait until nothing is under way; failures stay in `failures`."""
        for lane in self._lanes:
            lane.submit("drain", lambda: None).wait()

    # ---- fetch ----

    def fetch(
        self, table: CachedTable, rows: Tensor, slots: Tensor, step: int, stored: Event | None
    ) -> Event | None:
        """Have records of ``rows`` brought into ``slots``; both [n] int64, on the host.

        Args:
            stored: the last write-back that any of the rows can be part of.

        Returns:
            The end of it, which raises what went wrong; None: there is nothing to do.
        """
        delivered = None
        before = computed(self.device)
        for begin, end in self._chunks(table, len(rows)):
            delivered = self._fetch_chunk(
                table, rows[begin:end], slots[begin:end], step, stored, before
            )
        return delivered

    def _fetch_chunk(
        self,
        table: CachedTable,
        rows: Tensor,
        slots: Tensor,
        step: int,
        stored: Event | None,
        before: Event,
    ) -> Event:
        host = table.host
        buffer, free = self._in.take()
        shape = (len(rows), host.layout.record_bytes)
        staged = self._in.host(buffer, *shape)
        arrived = self._in.device(buffer, *shape)
        collected = table.collected

        def gather() -> None:
            self._follow(self._gather, "staging free", free, even_if_failed=True)
            self._wait("stored", stored)
            with self._busy():
                host.gather(rows, staged)

        def deliver() -> None:
            self._wait("gathered", gathered)
            with self._busy():
                self._deliver.copy(arrived, staged)
                where, which, wanted = _on(self.device, slots, rows, host.expected(rows))
            self._follow(self._deliver, "slots collected", collected)
            self._follow(self._deliver, "slots used", before)
            with self._busy():
                self._launch(
                    _ops.row_copy_,
                    [table.headers, *table.cache.values()],
                    where,
                    [host.layout.headers(arrived), *host.layout.views(arrived).values()],
                    None,
                )
                self._verify_slots(table, where, which, wanted, rows, step)
            self._count(fetched=len(rows), bytes_to_device=staged.nbytes)

        gathered = self._gather.submit("gather", gather)
        delivered = self._deliver.submit("deliver", self._guarded(table, rows, deliver, lost=False))
        self._in.used(buffer, delivered)
        return delivered

    def _verify_slots(
        self,
        table: CachedTable,
        slots: Tensor,
        rows: Tensor,
        versions: Tensor,
        host_rows: Tensor,
        step: int,
    ) -> None:
        chosen = self._chosen(len(rows))
        if chosen is None:
            return
        slots, rows, versions, host_rows = (
            numbers[chosen].contiguous() for numbers in (slots, rows, versions, host_rows)
        )
        pieces = list(table.cache.values())
        seed = table.host.seed
        found = torch.tensor([0, len(rows)], device=self.device)
        self._launch(
            _ops.checksum_check_, table.headers, pieces, slots, rows, versions, seed, found
        )
        self._count(checks=len(rows))
        if int(found[0]):
            sums = self._launch(_ops.checksum, pieces, slots, rows, versions, seed)
            there = table.headers[slots]
            bad = ((there[:, 0] != sums) | (there[:, 1] != versions)).cpu()
            bad[int(found[1])] = True
            raise _integrity_error(
                table, host_rows[bad], step, "to device", there[:, 1].cpu()[bad],
                versions.cpu()[bad],
            )  # fmt: skip

    # ---- write-back ----

    def write_back(self, table: CachedTable, rows: Tensor, slots: Tensor, step: int) -> None:
        """Have the records in ``slots`` become those of ``rows``, with their next version.

        ``table.collected`` and ``table.stored`` say when the slots are free and when it is done.
        """
        if not len(rows):
            return
        before = computed(self.device)
        old = table.host.versions[rows]
        new = old + 1
        table.host.versions[rows] = new
        for begin, end in self._chunks(table, len(rows)):
            part = slice(begin, end)
            self._write_back_chunk(
                table, rows[part], slots[part], old[part].long(), new[part].long(), step, before
            )

    def _write_back_chunk(
        self,
        table: CachedTable,
        rows: Tensor,
        slots: Tensor,
        old: Tensor,
        new: Tensor,
        step: int,
        before: Event,
    ) -> None:
        host = table.host
        buffer, free = self._out.take()
        shape = (len(rows), host.layout.record_bytes)
        staged = self._out.host(buffer, *shape)
        leaving = self._out.device(buffer, *shape)

        def collect() -> None:
            self._follow(self._collect, "staging out free", free, even_if_failed=True)
            self._follow(self._collect, "slots computed", before)
            with self._busy():
                where, which, versions = _on(self.device, slots, rows, new)
                pieces = list(table.cache.values())
                self._launch(
                    _ops.checksum_seal_, table.headers, pieces, where, which, versions, host.seed
                )
                for begin, end in host.layout.gaps:
                    leaving[:, begin:end].zero_()
                self._launch(
                    _ops.row_copy_,
                    [host.layout.headers(leaving), *host.layout.views(leaving).values()],
                    None,
                    [table.headers, *pieces],
                    where,
                )
                self._collect.copy(staged, leaving)

        def store() -> None:
            self._wait("copied out", collected)
            with self._busy():
                self._verify_records(table, staged, None, rows, new, step, "to host")
                # Also what is about to be overwritten: somebody else may have written it.
                self._verify_records(table, host.records, rows, rows, old, step, "in host memory")
                host.scatter(rows, staged)
            self._count(written_back=len(rows), bytes_to_host=staged.nbytes)

        collected = self._collect.submit("collect", self._guarded(table, rows, collect, lost=True))
        stored = self._store.submit("store", self._guarded(table, rows, store, lost=True))
        self._out.used(buffer, stored)
        table.collected, table.stored = collected, stored

    def _verify_records(
        self,
        table: CachedTable,
        records: Tensor,
        at: Tensor | None,
        rows: Tensor,
        versions: Tensor,
        step: int,
        direction: Direction,
    ) -> None:
        chosen = self._chosen(len(rows))
        if chosen is None:
            return
        at = torch.arange(len(rows), device="cpu") if at is None else at
        at, rows, versions = (numbers[chosen].contiguous() for numbers in (at, rows, versions))
        layout, seed = table.host.layout, table.host.seed
        headers, pieces = layout.headers(records), [layout.payload(records)]
        found = torch.tensor([0, len(rows)], device="cpu")
        _ops.checksum_check_(headers, pieces, at, rows, versions, seed, found)
        self._count(checks=len(rows))
        if int(found[0]):
            there = headers[at]
            sums = _ops.checksum(pieces, at, rows, versions, seed)
            bad = (there[:, 0] != sums) | (there[:, 1] != versions)
            bad[int(found[1])] = True  # also where it is right by now: bytes may come late
            raise _integrity_error(
                table, rows[bad], step, direction, there[:, 1][bad], versions[bad],
                "; newer values of these rows were to be stored and are lost, and "
                "engine.load_state_dict() goes on from a checkpoint",
            )  # fmt: skip

    # ---- what both have in common ----

    def _chunks(self, table: CachedTable, number: int) -> Iterator[tuple[int, int]]:
        size = min(self._in.num_bytes, self._out.num_bytes) // table.host.layout.record_bytes
        for begin in range(0, number, size):
            yield begin, min(begin + size, number)

    def _chosen(self, number: int) -> slice | None:
        """Which of so many records are verified."""
        if self.verify == "off" or number == 0:
            return None
        if self.verify == "all":
            return slice(None)
        with self._counting:
            self._sampled += 1
            first = self._sampled % _SAMPLED
        return slice(min(first, number - 1), None, _SAMPLED)

    def _wait(self, name: str, event: Event | None) -> None:
        """The worker, or whoever calls, waits for a job and what it has launched."""
        if event is not None:
            event.wait()

    def _follow(
        self, lane: Lane, name: str, event: Event | None, *, even_if_failed: bool = False
    ) -> None:
        """What a job does from here on comes after another job.

        Args:
            even_if_failed: the other one need only be over. A buffer is free after any end of its
                last use; a transfer that has failed must not fail those that come later.
        """
        if event is not None:
            lane.after(event, even_if_failed=even_if_failed)

    def _guarded(
        self, table: CachedTable, rows: Tensor, job: Callable[[], None], *, lost: bool
    ) -> Callable[[], None]:
        def guarded() -> None:
            try:
                job()
            except BaseException as error:
                self.failures.append(Failure(table, rows, error, lost))
                raise

        return guarded

    def _launch(self, operator: Callable[..., Any], *args: Any) -> Any:
        """An operator on the device, in a job. It can be called again: it has not begun, or has
        done the same before.
        """
        last = ""
        while True:
            try:
                return operator(*args)
            except (IndexError, ValueError) as error:
                if self.device.type != "cuda" or str(error) == last:  # its own
                    raise
                last = str(error)
                self.reported.append(error)

    def _busy(self) -> _Stopwatch:
        return _Stopwatch(self)

    def _count(self, **numbers: float) -> None:
        with self._counting:
            for name, number in numbers.items():
                setattr(self._traffic, name, getattr(self._traffic, name) + number)


class _Stopwatch:
    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._transfers._count(busy_seconds=time.perf_counter() - self._start)


def _on(device: torch.device, *numbers: Tensor) -> tuple[Tensor, ...]:
    """Vectors of one length, moved in one piece."""
    if device.type == "cpu":
        return numbers
    return tuple(torch.stack(numbers).to(device).unbind())


def _integrity_error(
    table: CachedTable,
    rows: Tensor,
    step: int,
    direction: Direction,
    versions: Tensor,
    wanted: Tensor,
    then: str = "",
) -> IntegrityError:
    stale = torch.where(versions != wanted)[0].tolist()
    what = "the checksum is wrong"
    if stale:
        k = stale[0]
        what = (
            f"not what was sent: row {int(rows[k])} has version {int(versions[k])} and should have "
            f"{int(wanted[k])}"
        )
    return IntegrityError(table.name, rows.tolist(), step, direction, what + then)
