"""Large tensors between one device and the host, in chunks through staging buffers, verified.

There are two lanes in each direction, and two staging buffers between them, which are allocated
once: while one chunk is on the link, the host copies the one before or after it::

    to host     "collect": device -> staging      "store": staging -> host memory, check
    to device   "gather":  host memory -> staging "deliver": staging -> device, checksum there

The checksum of a chunk is taken where it comes from and where it ends, of the memory that is used
from then on, so that it covers everything in between. Each chunk that is ever sent has a seed of
its own: one that was sent at another time, or belongs elsewhere, is not taken for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from fastemb import _record_ops  # noqa: F401  (defines the checksum operators)
from fastemb.offload import _mapping
from fastemb.offload._lanes import Event, Lane, computed
from fastemb.offload.errors import Verify

_ops = torch.ops.fastemb

HOST = torch.device("cpu")
_BUFFERS = 2
_ROW_BYTES = 4096  # what one checksum is taken of; those of a chunk are added up
_SAMPLED_BITS = 4  # "sample" verifies one chunk in so many powers of two
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class LinkOptions:
    """How data is moved.

    Attributes:
        verify: which chunks are checked on arrival.
        chunk_bytes: size of a staging buffer.
        lane: makes a lane, of a name and a device.
    """

    verify: Verify
    chunk_bytes: int
    lane: Callable[[str, torch.device], Lane]


class Sums:
    """Checksums of 1-D contiguous tensors on one device."""

    def __init__(self, device: torch.device, chunk_bytes: int) -> None:
        self._rows = torch.arange(chunk_bytes // _ROW_BYTES + 1, device=device)
        self._versions = torch.zeros_like(self._rows)
        if device.type == "cuda":  # they are used on other streams
            torch.cuda.current_stream(device).synchronize()

    def of(self, values: Tensor, seed: int) -> Tensor:
        """[1] int64, of at most a chunk of bytes; does not wait for the device."""
        per_row = _ROW_BYTES // values.element_size()
        full = values.numel() // per_row
        if full == 0 or values.numel() == per_row:
            return self._of_rows(values.unsqueeze(0), 0, seed)
        total = self._of_rows(values[: full * per_row].view(full, per_row), 0, seed)
        total = total.sum(0, keepdim=True)  # modulo 2**64
        if values.numel() % per_row:
            total += self._of_rows(values[full * per_row :].unsqueeze(0), full, seed)
        return total

    def of_chunks(self, chunks: tuple[Tensor, ...], seed: int) -> Tensor:
        """[n] int64; chunk k has the seed ``seed`` + k."""
        return torch.cat([self.of(chunk, seed + k) for k, chunk in enumerate(chunks)])

    def _of_rows(self, rows: Tensor, first: int, seed: int) -> Tensor:
        numbers = slice(first, first + len(rows))
        return _ops.checksum([rows], None, self._rows[numbers], self._versions[numbers], seed)


@dataclass(eq=False)
class Transfer:
    """One tensor that is sent once.

    Attributes:
        seed: of the first chunk; the others follow.
        sent: [chunks] int64 on the host, the checksums of what was sent; those after the event.
        arrived: the same of what has arrived, where ``checked``.
        events: when the chunks are there.
    """

    seed: int
    sent: Tensor
    arrived: Tensor
    checked: list[bool]
    events: list[Event] = field(default_factory=list)
    superseded: bool = False

    def done(self) -> bool:
        return all(event.done() for event in self.events)

    def wait(self) -> None:
        """Until it has arrived; raises what went wrong on the way, but does not look at it."""
        for event in self.events:
            event.wait()

    def damaged(self) -> list[int]:
        """Chunks that have arrived and are not what was sent, of those that are checked."""
        same = (self.sent == self.arrived).tolist()
        verdicts = enumerate(zip(same, self.checked, strict=True))
        return [k for k, (good, checked) in verdicts if checked and not good]


class _Source:
    """What is sent to the host; made when it is first needed, which may take a copy."""

    def __init__(self, flatten: Callable[[], Tensor], elements: int) -> None:
        self._flatten = flatten
        self._elements = elements
        self._chunks: tuple[Tensor, ...] | None = None

    def chunk(self, k: int) -> Tensor:
        if self._chunks is None:
            self._chunks = self._flatten().split(self._elements)
        return self._chunks[k]


class _Staging:
    """Buffers in host memory that take turns."""

    def __init__(self, chunk_bytes: int, device: torch.device) -> None:
        self._buffers = [_mapping.buffer(chunk_bytes, torch.uint8, device) for _ in range(_BUFFERS)]
        self._headers = [_mapping.buffer(1, torch.int64, device) for _ in range(_BUFFERS)]
        self._free = [computed(HOST) for _ in range(_BUFFERS)]
        self._turn = 0

    def next(self, like: Tensor) -> tuple[int, Tensor, Tensor, Event]:
        """Number of a buffer, its part that takes ``like``, its header, and when it is free."""
        number = self._turn
        self._turn = (number + 1) % _BUFFERS
        part = self._buffers[number][: like.numel() * like.element_size()].view(like.dtype)
        return number, part, self._headers[number], self._free[number]

    def used_until(self, number: int, event: Event) -> None:
        self._free[number] = event


class Link:
    """Between a device and the host.

    All that waits for something else does so by `_after` or `_wait`, by a name.
    """

    def __init__(self, device: torch.device, how: LinkOptions) -> None:
        self.device = device
        self._how = how
        self._collect = how.lane("collect", device)
        self._store = how.lane("store", HOST)
        self._gather = how.lane("gather", HOST)
        self._deliver = how.lane("deliver", device)
        self._incoming = _Staging(how.chunk_bytes, device)
        self._outgoing = _Staging(how.chunk_bytes, device)
        self.sums = Sums(device, how.chunk_bytes)
        self._host_sums = Sums(HOST, how.chunk_bytes)
        self._seed = 0
        self._lock = Lock()  # of the order of jobs, and the turns of the buffers

    def chunks(self, values: Tensor) -> tuple[Tensor, ...]:
        """1-D ``values`` cut as it would be sent."""
        return values.split(self._how.chunk_bytes // values.element_size())

    def to_host(self, target: Tensor, flatten: Callable[[], Tensor]) -> Transfer:
        """Send what ``flatten`` returns, 1-D on the device, to ``target`` in host memory.

        ``flatten`` is called on a lane. What the caller's current stream has been given so far
        comes before that, and the memory is held until it was sent; who writes it meanwhile gets a
        mixture.
        """
        targets = self.chunks(target)
        with self._lock:
            transfer = self._new(len(targets))
            source = _Source(flatten, self._how.chunk_bytes // target.element_size())
            ready = computed(self.device)
            for k, part in enumerate(targets):
                number, staged, header, free = self._incoming.next(part)
                collected = self._collect.submit(
                    "collect",
                    partial(self._collect_job, transfer, k, source, staged, header, ready, free),
                )
                stored = self._store.submit(
                    "store",
                    partial(self._store_job, transfer, k, source, staged, header, collected, part),
                )
                self._incoming.used_until(number, stored)
                transfer.events.append(stored)
        return transfer

    def to_device(self, target: Tensor, source: Tensor) -> Transfer:
        """Send 1-D ``source`` in host memory, which must not change meanwhile, to ``target``.

        What the caller's current stream has been given so far comes before ``target`` is written.
        """
        targets = self.chunks(target)
        with self._lock:
            transfer = self._new(len(targets))
            ready = computed(self.device)
            for k, (part, values) in enumerate(zip(targets, self.chunks(source), strict=True)):
                number, staged, _, free = self._outgoing.next(part)
                gathered = self._gather.submit(
                    "gather", partial(self._gather_job, transfer, k, values, staged, free)
                )
                delivered = self._deliver.submit(
                    "deliver",
                    partial(self._deliver_job, transfer, k, staged, gathered, ready, part),
                )
                self._outgoing.used_until(number, delivered)
                transfer.events.append(delivered)
        return transfer

    def arrived(self, transfer: Transfer) -> None:
        """Wait for a transfer to the host."""
        self._wait("arrived on the host", transfer.wait)

    def hold(self, transfer: Transfer) -> None:
        """What the caller's current stream is given from now on comes after one to the device."""
        for event in transfer.events:
            self._wait("arrived on the device", event.hold_stream)

    def delivered(self, transfer: Transfer) -> None:
        """Wait for one to the device."""
        self._wait("delivery is over", transfer.wait)

    # ---- jobs ----

    def _collect_job(
        self,
        transfer: Transfer,
        k: int,
        source: _Source,
        staged: Tensor,
        header: Tensor,
        ready: Event,
        free: Event,
    ) -> None:
        lane = self._collect
        if transfer.superseded:
            return
        self._after("source is computed", lane, ready)
        self._after("incoming buffer is free", lane, free, even_if_failed=True)
        chunk = source.chunk(k)
        total = self.sums.of(chunk, transfer.seed + k)
        lane.copy(staged, chunk)
        lane.copy(header, total)

    def _store_job(
        self,
        transfer: Transfer,
        k: int,
        source: _Source,
        staged: Tensor,
        header: Tensor,
        collected: Event,
        target: Tensor,
    ) -> None:
        # Also where it is superseded: until then this job holds the source, which is being read.
        self._wait("incoming buffer is filled", collected.wait)
        if transfer.superseded:
            return
        target.copy_(staged)
        transfer.sent[k] = header[0]
        if transfer.checked[k]:
            transfer.arrived[k] = self._host_sums.of(target, transfer.seed + k)[0]

    def _gather_job(
        self, transfer: Transfer, k: int, source: Tensor, staged: Tensor, free: Event
    ) -> None:
        self._after("outgoing buffer is free", self._gather, free, even_if_failed=True)
        transfer.sent[k] = self._host_sums.of(source, transfer.seed + k)[0]
        staged.copy_(source)

    def _deliver_job(
        self,
        transfer: Transfer,
        k: int,
        staged: Tensor,
        gathered: Event,
        ready: Event,
        target: Tensor,
    ) -> None:
        lane = self._deliver
        self._after("target is not in use", lane, ready)
        self._after("outgoing buffer is filled", lane, gathered)
        lane.copy(target, staged)
        if transfer.checked[k]:
            lane.copy(transfer.arrived[k : k + 1], self.sums.of(target, transfer.seed + k))

    def _after(self, name: str, lane: Lane, event: Event, *, even_if_failed: bool = False) -> None:
        lane.after(event, even_if_failed=even_if_failed)

    def _wait(self, name: str, wait: Callable[[], None]) -> None:
        wait()

    # ---- numbers ----

    def _new(self, chunks: int) -> Transfer:
        seed = self._seed
        self._seed += chunks
        sent = torch.zeros(chunks, dtype=torch.int64, device="cpu")
        arrived = _mapping.buffer(chunks, torch.int64, self.device)
        return Transfer(seed, sent, arrived, [self._checks(seed + k) for k in range(chunks)])

    def _checks(self, seed: int) -> bool:
        if self._how.verify == "sample":
            return (seed * _GOLDEN) % 2**64 >> (64 - _SAMPLED_BITS) == 0
        return self._how.verify == "all"
