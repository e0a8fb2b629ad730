"""Asynchronous work in order: what CUDA streams are, also where there is no CUDA.

A lane is a worker thread; on CUDA it has a stream of its own, and what its jobs launch goes there.
On the CPU the jobs themselves are the work, which is truly concurrent as torch's operators let go
of the interpreter lock. The same engine so runs on both, and a wait that it lacks fails on both.

A job may wait only for what was submitted before it; then nothing can wait in a circle.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import TracebackType

import torch
from torch import Tensor

__all__ = ["Event", "Lane", "LaneClosedError", "ThrottledLane", "computed"]

_JOIN_SECONDS = 10.0  # how long closing waits for the jobs that were submitted
_LIVENESS_SECONDS = 1.0  # how often who waits looks whether the worker is still there


class LaneClosedError(RuntimeError):
    """A job came too late: its lane was closed, or its process is another one."""


class Event:
    """The end of a submitted job."""

    def __init__(self, label: str, worker: threading.Thread | None) -> None:
        self._label = label
        self._worker = worker
        self._returned = threading.Event()
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._on_stream: torch.cuda.Event | None = None
        self._device: torch.device | None = None

    def __repr__(self) -> str:
        state = "pending"
        if self._returned.is_set():
            state = "returned" if self._error is None else "failed"
        return f"Event({self._label!r}, {state})"

    def wait(self) -> None:
        """The calling host thread waits for the job, and on CUDA for what it has launched.

        Raises:
            BaseException: what the job has raised.
            LaneClosedError: the job will never run.
            RuntimeError: a job waits for itself or for a later job of its own lane.
        """
        self._wait_until_returned()
        if self._on_stream is not None:
            self._on_stream.synchronize()

    def hold_stream(self) -> None:
        """What the caller's current stream is given from now on comes after the job.

        On CUDA the host waits only until the job has launched its work; on the CPU this is `wait`.
        """
        self._wait_until_returned()
        if self._on_stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._on_stream)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if not self._returned.is_set():
            return False
        return self._error is not None or self._on_stream is None or self._on_stream.query()

    def failure(self) -> BaseException | None:
        """What the job has raised, as it left the job; None: nothing so far."""
        return None if self._error is None else self._error.with_traceback(self._traceback)

    def _wait_until_returned(self) -> None:
        if not self._returned.is_set() and self._worker is threading.current_thread():
            raise RuntimeError(
                f"{self._worker.name}: a job waits for {self._label!r}, which is itself or comes "
                "later on the same lane"
            )
        while not self._returned.wait(_LIVENESS_SECONDS):
            # A thread does not survive a fork, nor the end of the interpreter.
            if self._worker is not None and not self._worker.is_alive():
                if self._returned.is_set():
                    break
                raise LaneClosedError(f"{self._worker.name} is gone, {self._label!r} has not run")
        if self._error is not None:
            # Raised anew for everyone, or the traceback would grow with each.
            raise self._error.with_traceback(self._traceback)

    def _record(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        event = torch.cuda.Event()
        event.record(stream)
        self._on_stream = event

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._traceback = None if error is None else error.__traceback__
        self._returned.set()


class Lane:
    """Does jobs one after the other, on a thread that starts with the first one.

    Args:
        name: for messages.
        device: a CUDA device: jobs run with a stream of their own.
        threads: that torch's operators on the CPU use in a job; None: as many as elsewhere.
        delay: called with the label of each job before it, on the worker; tests sleep in it.

    Attributes:
        stream: that of the jobs; None on the CPU.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        threads: int | None = None,
        delay: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self._threads = threads
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._delay = delay
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._abandoned = threading.Event()
        self._lock = threading.Lock()  # of the following three, and the order of jobs and the end
        self._closed = False
        self._worker: threading.Thread | None = None
        self._stop: Callable[[], object] | None = None

    def submit(self, label: str, job: Callable[[], None]) -> Event:
        """Have ``job`` done after all those submitted before, without gradients.

        A job that raises fails its event; later ones run all the same, and get to know when they
        wait for that event.

        Raises:
            LaneClosedError: after `close`, and in a process forked from that of the worker.
        """
        with self._lock:
            if self._closed:
                raise LaneClosedError(f"lane {self.name!r} is closed, {label!r} cannot run")
            if self._worker is None:
                self._start()
            assert self._worker is not None
            if not self._worker.is_alive():
                raise LaneClosedError(f"the worker of lane {self.name!r} is gone (after a fork?)")
            event = Event(label, self._worker)
            self._jobs.put((label, job, event))
        return event

    def after(self, event: Event, *, even_if_failed: bool = False) -> None:
        """In a job: what it does from here on comes after ``event``, or fails as that has.

        Args:
            even_if_failed: it need only be over, as who waits for a buffer to be free again.
        """
        try:
            event._wait_until_returned()
        except BaseException:
            if not even_if_failed or not event._returned.is_set():
                raise
        if event._on_stream is None:
            return
        if self.stream is None:
            event._on_stream.synchronize()
        else:
            self.stream.wait_event(event._on_stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """In a job: move the bytes of ``source`` over this lane's link.

        Raises:
            ValueError: shapes or dtypes differ.
        """
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(
                f"lane {self.name!r}: target must be as source, {source.dtype} "
                f"{list(source.shape)}, got {target.dtype} {list(target.shape)}"
            )
        target.copy_(source, non_blocking=True)

    def close(self) -> None:
        """Let the jobs end that were submitted, for some seconds; what has not begun then fails.

        The same happens when the lane is collected and when the interpreter ends.
        """
        with self._lock:
            self._closed = True
            stop, self._stop = self._stop, None
        if stop is not None:
            stop()

    def _start(self) -> None:
        # The worker holds what it needs but not the lane, which could not be collected otherwise.
        worker = threading.Thread(
            target=_work,
            args=(self._jobs, self.name, self.stream, self._delay, self._abandoned),
            name=f"fastemb lane {self.name!r}",
            daemon=True,
        )
        worker.start()  # where there are threads enough; else the next job tries again
        self._worker = worker
        self._stop = weakref.finalize(self, _stop, self._jobs, worker, self._abandoned)
        if self._threads is not None:
            # A thread has a number of its own, but also sets what threads yet to come begin with.
            elsewhere = torch.get_num_threads()
            limited = Event("threads", worker)
            self._jobs.put(("threads", partial(_limit_threads, self._threads), limited))
            limited.wait()
            torch.set_num_threads(elsewhere)


class ThrottledLane(Lane):
    """A lane over a link of a given speed, for benchmarks and tests.

    Args:
        bytes_per_second: `copy` takes at least the time that the bytes need at this speed.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        *,
        bytes_per_second: float,
        threads: int | None = None,
        delay: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(name, device, threads=threads, delay=delay)
        if not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second must be > 0, got {bytes_per_second!r}")
        self._bytes_per_second = bytes_per_second

    def copy(self, target: Tensor, source: Tensor) -> None:
        end = time.perf_counter() + source.nbytes / self._bytes_per_second
        super().copy(target, source)
        if self.stream is not None:
            self.stream.synchronize()
        time.sleep(max(0.0, end - time.perf_counter()))


def computed(device: torch.device) -> Event:
    """The end of what the caller's current stream has been given so far; on the CPU, of nothing."""
    event = Event("computed", None)
    if device.type == "cuda":
        event._record(torch.cuda.current_stream(device))
    event._end(None)
    return event


_Job = tuple[str, Callable[[], None], Event]


def _work(
    jobs: SimpleQueue[_Job | None],
    name: str,
    stream: torch.cuda.Stream | None,
    delay: Callable[[str], None] | None,
    abandoned: threading.Event,
) -> None:
    with torch.no_grad(), torch.cuda.stream(stream):
        while (item := jobs.get()) is not None:
            label, job, event = item
            error: BaseException | None = None
            try:
                if abandoned.is_set():
                    raise LaneClosedError(f"lane {name!r} was closed before {label!r} ran")
                if delay is not None:
                    delay(label)
                job()
            except BaseException as raised:
                # Without this frame, which would keep its variables.
                error = raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)
            try:
                if stream is not None:
                    # Also of a job that failed: some of its work may have been launched.
                    event._record(stream)
            except BaseException as raised:
                error = error or raised
            event._end(error)
            # Nothing of a job may live until the next one comes.
            del item, label, job, event, error


def _limit_threads(number: int) -> None:
    torch.get_num_threads()  # the first call on a thread sets the number that is set elsewhere
    torch.set_num_threads(number)


def _stop(
    jobs: SimpleQueue[_Job | None], worker: threading.Thread, abandoned: threading.Event
) -> None:
    jobs.put(None)
    if worker is threading.current_thread():  # a job held the last reference to its lane
        return
    if worker.is_alive():
        worker.join(_JOIN_SECONDS)
    if worker.is_alive():
        abandoned.set()
