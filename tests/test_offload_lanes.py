"""Lanes: order, errors, and that nothing hangs."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from fastemb.offload._lanes import Event, Lane, LaneClosedError, ThrottledLane, computed
from fastemb.offload._transfers import Transfers

CPU = torch.device("cpu")

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("test", CPU)
    yield lane
    lane.close()


def test_jobs_run_in_order_on_another_thread_without_gradients(lane: Lane) -> None:
    seen: list[object] = []
    for number in range(20):
        last = lane.submit("count", lambda number=number: seen.append(number))
    lane.submit("look", lambda: seen.extend([threading.current_thread(), torch.is_grad_enabled()]))
    last.wait()
    lane.submit("end", lambda: None).wait()
    assert seen[:20] == list(range(20))
    assert seen[20] is not threading.current_thread()
    assert seen[21] is False


def test_a_worker_that_cannot_start_may_later(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            lane.submit("job", lambda: None)
    lane.submit("job", lambda: None).wait()


def test_wait_and_done() -> None:
    gate = threading.Event()
    lane = Lane("test", CPU, delay=lambda label: gate.wait(20) if label == "slow" else None)
    event = lane.submit("slow", lambda: None)
    assert not event.done()
    gate.set()
    event.wait()
    event.hold_stream()
    assert event.done()
    assert computed(CPU).done()
    lane.close()


def test_an_error_reaches_all_that_wait_and_nobody_else(lane: Lane) -> None:
    def fail() -> None:
        raise ValueError("broken")

    other = Lane("other", CPU)
    failed = lane.submit("fail", fail)
    follows = other.submit("follow", lambda: other.after(failed))
    frees = other.submit("free", lambda: other.after(failed, even_if_failed=True))
    for event in (failed, follows, failed):
        with pytest.raises(ValueError, match="broken"):
            event.wait()
        assert event.done()
    frees.wait()
    lane.submit("next", lambda: None).wait()
    other.close()


def test_a_traceback_does_not_grow_with_those_who_wait(lane: Lane) -> None:
    def fail() -> None:
        raise ValueError("broken")

    event = lane.submit("fail", fail)

    def length() -> int:
        try:
            event.wait()
        except ValueError as error:
            frames, frame = 0, error.__traceback__
            while frame is not None:
                frames, frame = frames + 1, frame.tb_next
            return frames
        return 0

    assert length() == length() == length() > 1


def test_a_job_that_waits_for_a_later_one_is_told(lane: Lane) -> None:
    gate = threading.Event()
    events = []

    def job() -> None:
        gate.wait(20)
        lane.after(events[1])

    events += [lane.submit("first", job), lane.submit("second", lambda: None)]
    gate.set()
    with pytest.raises(RuntimeError, match="a job waits for 'second', which is itself or comes"):
        events[0].wait()
    events[1].wait()


def test_close_finishes_what_was_submitted() -> None:
    lane = Lane("test", CPU)
    seen: list[int] = []
    for number in range(5):
        lane.submit("slow", lambda number=number: (time.sleep(0.01), seen.append(number)))
    lane.close()
    lane.close()
    assert seen == list(range(5))
    with pytest.raises(LaneClosedError, match="lane 'test' is closed, 'late' cannot run"):
        lane.submit("late", lambda: None)
    Lane("never used", CPU).close()


def test_close_gives_up_on_a_job_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastemb.offload._lanes._JOIN_SECONDS", 0.05)
    gate = threading.Event()
    lane = Lane("test", CPU)
    hangs = lane.submit("hang", lambda: gate.wait(20))
    never = lane.submit("never", lambda: None)
    lane.close()
    assert not hangs.done()
    gate.set()
    hangs.wait()
    with pytest.raises(LaneClosedError, match="was closed before 'never' ran"):
        never.wait()


def test_an_unused_lane_is_collected_without_the_cycle_collector() -> None:
    gc.disable()
    try:
        lane = Lane("test", CPU)
        lane.submit("job", lambda: None).wait()
        gone, worker = weakref.ref(lane), lane._worker
        del lane
        assert gone() is None
        assert worker is not None
        worker.join(10)
        assert not worker.is_alive()
    finally:
        gc.enable()


def test_a_job_may_hold_the_last_reference_to_its_lane() -> None:
    lane = Lane("test", CPU)
    holder, gate = [lane], threading.Event()
    event = lane.submit("last", lambda: (gate.wait(20), holder.clear()))
    worker = lane._worker
    assert worker is not None
    del lane
    gate.set()
    event.wait()
    worker.join(10)
    assert not worker.is_alive()


def test_results_of_jobs_are_not_kept(lane: Lane) -> None:
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    lane.submit("use", lambda tensor=tensor: tensor.add_(1)).wait()
    del tensor
    lane.submit("next", lambda: None).wait()
    assert gone() is None


def test_copy_moves_what_is_alike(lane: Lane) -> None:
    target = torch.zeros(3)
    lane.submit("copy", lambda: lane.copy(target, torch.ones(3))).wait()
    assert torch.equal(target, torch.ones(3))
    with pytest.raises(ValueError, match=r"target must be as source, torch.float32 \[2\], got"):
        lane.copy(target, torch.ones(2))
    with pytest.raises(ValueError, match="target must be as source"):
        lane.copy(target, torch.ones(3, dtype=torch.float64))


def test_throttled_copies_take_their_time() -> None:
    lane = ThrottledLane("test", CPU, bytes_per_second=1e6)
    begin = time.perf_counter()
    target = torch.zeros(5000)
    lane.submit("copy", lambda: lane.copy(target, torch.ones(5000))).wait()
    assert time.perf_counter() - begin >= 0.02
    assert torch.equal(target, torch.ones(5000))
    lane.close()
    with pytest.raises(ValueError, match="bytes_per_second must be > 0, got 0"):
        ThrottledLane("test", CPU, bytes_per_second=0)


@pytest.mark.parametrize("slow", ["producer", "consumer"])
def test_after_orders_two_lanes(slow: str) -> None:
    """A value goes over and its box comes back, whichever lane lags behind."""

    def lag(name: str) -> Callable[[str], None] | None:
        return (lambda label: time.sleep(0.01)) if name == slow else None

    producer, consumer = (Lane(name, CPU, delay=lag(name)) for name in ("producer", "consumer"))
    box = torch.zeros(1, dtype=torch.int64)
    seen: list[int] = []
    taken = computed(CPU)
    for number in range(1, 11):

        def put(number: int = number, taken: Event = taken) -> None:
            producer.after(taken)
            box.fill_(number)

        given = producer.submit("put", put)

        def take(given: Event = given) -> None:
            consumer.after(given)
            seen.append(int(box))

        taken = consumer.submit("take", take)
    taken.wait()
    assert seen == list(range(1, 11))
    for lane in (producer, consumer):
        lane.close()


def test_lanes_run_at_the_same_time(lane: Lane) -> None:
    """Each of two jobs waits until the other one has begun."""
    meeting = threading.Barrier(2)
    other = Lane("other", CPU)
    events = [each.submit("meet", lambda: (meeting.wait(20), None)[1]) for each in (lane, other)]
    for event in events:
        event.wait()
    other.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_no_exception_ends_the_worker(lane: Lane, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    event = lane.submit("fail", fail)
    lane.submit("later", lambda: None).wait()
    with pytest.raises(error):
        event.wait()


def test_a_failing_delay_fails_its_job() -> None:
    def delay(label: str) -> None:
        if label == "bad":
            raise ValueError("injected")

    lane = Lane("test", CPU, delay=delay)
    seen: list[str] = []
    bad = lane.submit("bad", lambda: seen.append("bad"))
    lane.submit("good", lambda: seen.append("good")).wait()
    with pytest.raises(ValueError, match="injected"):
        bad.wait()
    assert seen == ["good"]
    lane.close()


def test_a_failed_job_is_let_go_with_its_event(lane: Lane) -> None:
    """No later job needs to come: what it holds may be a buffer."""
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)

    def fail(tensor: torch.Tensor = tensor) -> None:
        raise ValueError(str(tensor.shape))

    event = lane.submit("fail", fail)
    with pytest.raises(ValueError, match=r"torch.Size\(\[3\]\)"):
        event.wait()
    del event, fail, tensor  # the event has the error, whose traceback has the frame of the job
    end = time.monotonic() + 20
    while gone() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


def test_many_threads_submit(lane: Lane) -> None:
    seen: list[tuple[int, int]] = []

    def submit(thread: int) -> None:
        for number in range(50):
            lane.submit("job", lambda number=number: seen.append((thread, number)))

    threads = [threading.Thread(target=submit, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    lane.submit("last", lambda: None).wait()
    for k in range(4):
        assert [number for thread, number in seen if thread == k] == list(range(50))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_gets_an_error() -> None:
    script = """
import os, threading, torch
from fastemb.offload._lanes import Lane, LaneClosedError
gate = threading.Event()
lane = Lane("test", torch.device("cpu"))
event = lane.submit("pending", lambda: gate.wait(30))
child = os.fork()
if child == 0:
    try:
        for act in (lambda: lane.submit("late", lambda: None), event.wait):
            try:
                act()
                os._exit(1)
            except LaneClosedError:
                pass
        os._exit(0)
    except BaseException:
        os._exit(2)
_, status = os.waitpid(child, 0)
gate.set()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)


def test_the_interpreter_ends_with_jobs_pending() -> None:
    script = """
import time, torch
from fastemb.offload._lanes import Lane
lane = Lane("test", torch.device("cpu"))
lane.submit("slow", lambda: time.sleep(0.2))
lane.submit("print", lambda: print("done", flush=True))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=50, capture_output=True, text=True
    )
    assert run.stdout == "done\n"
    assert not run.stderr


def test_the_interpreter_ends_with_a_job_that_hangs() -> None:
    script = """
import threading, torch
from fastemb.offload import _lanes
_lanes._JOIN_SECONDS = 0.1
lane = _lanes.Lane("test", torch.device("cpu"))
lane.submit("hang", threading.Event().wait)
print("end", flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=50, capture_output=True, text=True
    )
    assert run.stdout == "end\n"
    assert not run.stderr


@pytest.mark.gpu
def test_streams_wait_for_each_other() -> None:
    device = torch.device("cuda")
    first, second = Lane("first", device), Lane("second", device)
    host = torch.arange(1 << 22, pin_memory=True)
    staged, out = torch.zeros_like(host, device=device), torch.zeros_like(host, device=device)

    def put() -> None:
        torch.cuda._sleep(50_000_000)
        first.copy(staged, host)

    def take() -> None:
        second.after(given)
        out.copy_(staged).add_(1)

    torch.cuda.synchronize()
    given = first.submit("put", put)
    second.submit("take", take).hold_stream()
    assert torch.equal(out.cpu(), host + 1)

    torch.cuda._sleep(50_000_000)
    out.fill_(7)
    before = computed(device)

    def read() -> None:
        first.after(before)
        first.copy(host, out)

    first.submit("read", read).wait()
    assert int(host.min()) == int(host.max()) == 7
    for lane in (first, second):
        lane.close()


def test_lanes_share_all_staging_memory_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or who gets it after the engine is gone would find late copies of lanes in it."""
    shared: set[int] = set()
    monkeypatch.setattr(Transfers, "share", lambda self, memory: shared.add(memory.data_ptr()))
    transfers = Transfers(CPU, 64, "off", Lane)
    for record_bytes in (64, 128):
        transfers.make_room(record_bytes)
        for staging in (transfers._in, transfers._out):
            assert {staging.device(k, 1, record_bytes).data_ptr() for k in range(2)} <= shared
    transfers.close()
