"""What can go wrong with offloaded optimizer states on the way, and that it is noticed.

Each kind of damage is done to one copy, and must be reported before it is used. And each wait of
the engine is left out in turn: then slow lanes must lead to an error or to other bits.
"""

from __future__ import annotations

import copy
import itertools
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_dense_cases import CARRIERS, Faulty, slow
from optim_cases import snapshot
from torch import Tensor, nn

from fastemb import optim
from fastemb.offload import HostStates, _link
from fastemb.offload._lanes import Event, Lane
from fastemb.offload._link import HOST, Link, LinkOptions
from fastemb.offload.errors import IntegrityError

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]

CHUNK = 64  # bytes, 16 floats; the weight has 6 chunks
STEPS = 4


class Run:
    def __init__(self, config: HostStates | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(12, 8)
        self.optimizer = optim.Adam(
            self.model.named_parameters(), lr=0.1, amsgrad=True, offload=config
        )

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(3, 12, generator=torch.Generator().manual_seed(step))
        self.model(x).square().sum().backward()

    def steps(self, begin: int = 0, end: int = STEPS) -> None:
        for step in range(begin, end):
            self.backward(step)
            self.optimizer.step()

    def bits(self) -> list[Any]:
        return snapshot(self.optimizer)


@pytest.mark.parametrize("room", [0, 2, 4])
def test_a_step_without_memory_for_all_states_moves_nothing(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plain = Run(HostStates(chunk_bytes=CHUNK)), Run(None)
    allocate, done = optim.Adam._empty_like, itertools.count()

    def empty_like(self: optim.Adam, param: Tensor, dtype: torch.dtype) -> Tensor:
        if next(done) == room:
            raise MemoryError("no room")
        return allocate(self, param, dtype)

    run.backward(0)
    before = [param.tolist() for param in run.model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(optim.Adam, "_empty_like", empty_like)
        with pytest.raises(MemoryError, match="no room"):
            run.optimizer.step()
    assert [param.tolist() for param in run.model.parameters()] == before
    run.optimizer.step()
    run.steps(1)
    plain.steps()
    assert run.bits() == plain.bits()


def test_steps_in_inference_mode_leave_nothing_behind() -> None:
    """Torch's own optimizers can be stepped in it once they have their states."""
    run, plain = Run(HostStates(chunk_bytes=CHUNK)), Run(None)
    for step in range(STEPS):
        for each in (run, plain):
            each.backward(step)
            with torch.inference_mode(step % 2 == 1):
                each.optimizer.step()
    assert run.bits() == plain.bits()


def test_buffers_that_are_made_in_inference_mode() -> None:
    run, plain = Run(HostStates(chunk_bytes=CHUNK)), Run(None)
    state = copy.deepcopy(run.optimizer.state_dict())
    for each in (run, plain):
        each.backward(0)
        with torch.inference_mode():
            each.optimizer.step()
        each.optimizer.load_state_dict(state)  # those that were made in the mode stay in it
        each.steps(1)
    assert run.bits() == plain.bits()


def faulty(direction: str, kind: str, when: int, verify: Any = "all") -> tuple[Run, list[Faulty]]:
    made: list[Faulty] = []

    def lane(name: str, device: torch.device) -> Lane:
        carrier = CARRIERS[direction]
        made.append(Faulty(name, device, carrier=carrier, kind=kind, when=when, size=16))
        return made[-1]

    return Run(HostStates(verify, CHUNK, lane)), made


def reference(steps: int) -> Run:
    run = Run(None)
    run.steps(end=steps)
    return run


KINDS = ("flip", "drop", "late", "swap")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_damaged_gradient_is_not_used(kind: str, chunk: int) -> None:
    # 6 chunks of the gradient and 6 of the parameter come in the first step.
    run, lanes = faulty("to host", kind, 12 + 6 + chunk + 1)
    run.steps(end=2)
    run.backward(2)
    with pytest.raises(IntegrityError) as caught:
        run.optimizer.step()
    assert any(lane.struck for lane in lanes)
    error = caught.value
    assert (error.table, error.step, error.direction) == ("weight", 3, "to host")
    assert chunk in error.rows
    assert kind == "swap" or error.rows == [chunk]
    assert "gradient" in str(error)
    assert run.bits() == reference(2).bits()
    time.sleep(0.15)  # what comes late has come
    run.optimizer.step()  # sends it again
    run.steps(3)
    assert run.bits() == reference(STEPS).bits()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_copy_of_a_parameter_is_not_used(kind: str) -> None:
    run, _ = faulty("to host", kind, 6 + 3)
    run.backward(0)
    with pytest.raises(IntegrityError, match="of the parameter are not what was sent") as caught:
        run.optimizer.step()
    assert (caught.value.table, caught.value.step, caught.value.direction) == (
        "weight", 1, "to host",
    )  # fmt: skip
    assert run.bits() == Run(None).bits()
    time.sleep(0.15)
    run.optimizer.step()
    run.steps(1)
    assert run.bits() == reference(STEPS).bits()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_damaged_parameter_is_reported_by_its_step(kind: str, chunk: int) -> None:
    run, lanes = faulty("to device", kind, 6 + chunk + 1)
    run.steps(end=1)
    model = copy.deepcopy(run.model.state_dict())
    states = copy.deepcopy(run.optimizer.state_dict())
    run.backward(1)
    with pytest.raises(IntegrityError) as caught:
        run.optimizer.step()
    assert any(lane.struck for lane in lanes)
    error = caught.value
    assert (error.table, error.step, error.direction) == ("weight", 2, "to device")
    assert chunk in error.rows
    with pytest.raises(IntegrityError):  # and goes on to be
        run.steps(2, 3)
    time.sleep(0.15)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(states)
    run.steps(1)
    assert run.bits() == reference(STEPS).bits()


@pytest.mark.parametrize("direction", CARRIERS)
def test_verify_off_does_not_look(direction: str) -> None:
    """Or the tests above would not show that the verification finds it."""
    run, lanes = faulty(direction, "flip", 12 + 6 + 3, "off")
    run.steps()
    assert any(lane.struck for lane in lanes)
    assert run.bits() != reference(STEPS).bits()


@pytest.mark.parametrize("direction", CARRIERS)
def test_a_sample_finds_lasting_damage(direction: str) -> None:
    checked = []

    class Bad(Lane):
        def copy(self, target: Tensor, source: Tensor) -> None:
            super().copy(target, source)
            if self.name == CARRIERS[direction] and source.dtype != torch.int64:
                target.view(torch.uint8)[0] ^= 1
                checked.append(1)

    run = Run(HostStates("sample", CHUNK, Bad))
    with pytest.raises(IntegrityError):
        run.steps(end=30)
    assert len(checked) > 1


# ---------------------------------------------------------------------------------------------
# waits
# ---------------------------------------------------------------------------------------------

# Name of a wait: the lane that it waits for, on the CPU.
ON_THE_HOST = {
    "incoming buffer is free": "store",
    "incoming buffer is filled": "collect",
    "arrived on the host": "store",
    "outgoing buffer is free": "deliver",
    "outgoing buffer is filled": "gather",
    "arrived on the device": "deliver",
}
# Those for a stream, which there is none of on the CPU.
ON_THE_DEVICE = {"source is computed", "target is not in use", "delivery is over"}


def leave_out(patch: pytest.MonkeyPatch, name: str) -> None:
    after, wait = Link._after, Link._wait

    def patched_after(self: Link, wait_name: str, *args: Any, **kwargs: Any) -> None:
        if wait_name != name:
            after(self, wait_name, *args, **kwargs)

    def patched_wait(self: Link, wait_name: str, waits: Callable[[], None]) -> None:
        if wait_name != name:
            wait(self, wait_name, waits)

    patch.setattr(Link, "_after", patched_after)
    patch.setattr(Link, "_wait", patched_wait)


def test_all_waits_are_left_out_here() -> None:
    source = Path(_link.__file__).read_text()
    named = re.findall(r'self\._(?:after|wait)\(\s*"([^"]+)"', source)
    assert sorted(named) == sorted({*ON_THE_HOST, *ON_THE_DEVICE})


@pytest.mark.parametrize("verify", ["all", "off"])
@pytest.mark.parametrize("slow_lane", sorted(set(ON_THE_HOST.values())))
def test_slow_lanes_change_nothing(slow_lane: str, verify: Any) -> None:
    run = Run(HostStates(verify, CHUNK, slow(slow_lane)))
    run.steps()
    assert run.bits() == reference(STEPS).bits()


@pytest.mark.parametrize("verify", ["all", "off"])
@pytest.mark.parametrize("name", ON_THE_HOST)
def test_each_wait_is_needed(name: str, verify: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out(monkeypatch, name)
    run = Run(HostStates(verify, CHUNK, slow(ON_THE_HOST[name])))
    try:
        run.steps()
    except IntegrityError:
        return
    assert run.bits() != reference(STEPS).bits()


class Slow:
    """A device that is still busy: the end of what it was given comes when the test says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.event = Event("busy", threading.current_thread())
        made = _link.computed

        def computed(device: torch.device) -> Event:
            return self.event if self.started else made(device)

        self.started = False
        patch.setattr(_link, "computed", computed)


def test_a_source_is_read_when_it_has_been_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def send() -> Tensor:
        with monkeypatch.context() as patch:
            device = Slow(patch)
            link = Link(HOST, LinkOptions("all", CHUNK, Lane))
            device.started = True
            source, target = torch.zeros(40), torch.zeros(40)
            transfer = link.to_host(target, lambda: source)
            time.sleep(0.05)
            source.fill_(1.0)  # as a kernel that takes its time
            device.event._end(None)
            transfer.wait()
            return target

    assert torch.equal(send(), torch.ones(40))
    leave_out(monkeypatch, "source is computed")
    assert not torch.equal(send(), torch.ones(40))


def test_a_target_is_written_when_it_is_not_read_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def send() -> Tensor:
        with monkeypatch.context() as patch:
            device = Slow(patch)
            link = Link(HOST, LinkOptions("all", CHUNK, Lane))
            device.started = True
            target = torch.zeros(40)
            transfer = link.to_device(target, torch.ones(40))
            time.sleep(0.05)
            read = target.clone()
            device.event._end(None)
            transfer.wait()
            assert torch.equal(target, torch.ones(40))
            return read

    assert torch.equal(send(), torch.zeros(40))
    leave_out(monkeypatch, "target is not in use")
    assert torch.equal(send(), torch.ones(40))


def test_a_delivery_is_looked_at_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the host does not wait for it at the end of the step."""
    monkeypatch.setattr(Event, "hold_stream", lambda self: None)

    def gradients(run: Run, step: int) -> None:
        for param in run.model.parameters():
            param.grad = torch.full_like(param, step + 1.0)

    def steps(opens_after: float) -> Run:
        gate = threading.Event()

        def delay(label: str) -> None:
            if label == "deliver":
                gate.wait(20)

        run = Run(HostStates("all", CHUNK, lambda *args: Lane(*args, delay=delay)))
        gradients(run, 0)
        run.optimizer.step()
        timer = threading.Timer(opens_after, gate.set)
        timer.start()
        try:
            gradients(run, 1)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.optimizer.step()
        finally:
            timer.cancel()
            gate.set()
        return run

    expected = Run(None)
    for step in range(2):
        gradients(expected, step)
        expected.optimizer.step()
    assert steps(0.05).bits() == expected.bits()
    leave_out(monkeypatch, "delivery is over")
    with pytest.raises(IntegrityError):
        steps(20)
