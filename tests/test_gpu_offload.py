"""Offloading with the cache on a CUDA device: ``pytest -m gpu``.

The same bits as without it, ids that were not announced, damage on either way, memory that copies
need not wait for, and the order of what is on several streams. Any training is in
``test_offload_bits.py``, any damage in ``test_offload_integrity.py``, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from gpu_suite import DEVICE, waiting_is_an_error
from offload_cases import (
    Case,
    Net,
    TableCase,
    delayed,
    ids_of,
    loss_of,
    new_engine,
    optimizer_of,
    saved,
    train,
)
from optim_cases import bits
from torch import Tensor, nn

import fastemb
from fastemb.offload import HostStates, IntegrityError, OffloadEngine
from fastemb.offload._lanes import Event, Lane, computed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

F16, F32 = torch.float16, torch.float32
CPU = torch.device("cpu")
TABLES = (TableCase(rows=40, mode="mean", layout="bags", weighted=True), TableCase(bag=False))
BUSY_CYCLES = 20_000_000  # about 10 ms
MakeLane = Callable[[str, torch.device], Lane]


@pytest.fixture(autouse=True)
def no_error_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends without a pending error."""
    monkeypatch.delenv("FASTEMB_SYNC_CHECKS", raising=False)
    fastemb.check_errors()
    yield
    fastemb.check_errors()


def on_device(value: Any) -> Any:
    """A batch, or a part of one."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    return {name: on_device(part) for name, part in value.items()}


def build(case: Case, engine: OffloadEngine | None) -> tuple[Net, torch.optim.Optimizer]:
    """A model on the device, but for what is offloaded, and its optimizer."""
    torch.manual_seed(0)
    model = Net(case)
    fastemb.convert(model, dtype=case.dtype, sparse="fused", offload=engine)
    model.to(DEVICE)
    return model, optimizer_of(case, model)


def small_engine(cache: int = 14, **options: Any) -> OffloadEngine:
    """Few slots, and several chunks for each batch."""
    return new_engine(device=DEVICE, cache=cache, **{"staging_bytes": 256, **options})


def loader_of(
    batches: list[dict[str, Any]], engine: OffloadEngine | None, prefetch: bool = True
) -> Iterable[dict[str, Any]]:
    """Batches on the device; those to come are kept in the order in which the engine wants them."""
    if engine is None or not prefetch:
        return map(on_device, batches)
    return map(on_device, engine.prefetch(batches, ids=ids_of))


def trained(
    case: Case,
    engine: OffloadEngine | None,
    *,
    prefetch: bool = True,
    busy: bool = False,
) -> tuple[Any, ...]:
    """All bits that a training has to show.

    Args:
        busy: the device is always far behind the host, so that lanes get ahead of it.
    """
    model, optimizer = build(case, engine)
    loader = loader_of(case.batches(), engine, prefetch)
    if busy:
        loader = map(late, loader)
    result = (train(case, model, optimizer, loader), *saved(model, optimizer))
    if engine is not None:
        stats = engine.stats
        assert stats.fetched > 20, stats
        assert stats.written_back > 20, stats
        assert stats.checks >= stats.fetched + stats.written_back
        assert not any(engine.verify().values())
        engine.close()
    return result


def late(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch, for which the device has time only later."""
    torch.cuda._sleep(BUSY_CYCLES)
    return batch


# ---- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("optimizer", ["Adam", "RowWiseAdagrad", "SGD momentum"])
def test_training_ends_with_the_same_bits(
    optimizer: str, dtype: torch.dtype, prefetch: bool
) -> None:
    case = Case(TABLES, dtype, optimizer, size=5)
    assert trained(case, small_engine(), prefetch=prefetch) == trained(case, None)


@pytest.mark.parametrize("make_lane", [Lane, delayed(1, 5e-3)], ids=["prompt", "late"])
def test_training_ends_with_the_same_bits_on_a_busy_device(make_lane: MakeLane) -> None:
    case = Case(TABLES, F32, steps=10, size=5)
    engine = small_engine(make_lane=make_lane, depth=3)
    assert trained(case, engine, busy=True) == trained(case, None)


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_scaler_skips_the_same_steps(prefetch: bool) -> None:
    case = Case(TABLES, F16, steps=8, size=5)

    def run(engine: OffloadEngine | None) -> tuple[Any, ...]:
        model, optimizer = build(case, engine)
        scaler = fastemb.amp.GradScaler(DEVICE, init_scale=2.0**8, growth_interval=3)
        scales = []
        for number, batch in enumerate(loader_of(case.batches(), engine, prefetch)):
            loss, _ = loss_of(model, batch)
            if number == 4:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if number % 2:
                scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        return (scales, *saved(model, optimizer))

    want = run(None)
    assert want[0][4] < want[0][3] < want[0][-1] * 4
    assert run(small_engine()) == want


@pytest.mark.parametrize("offloaded_first", [True, False])
def test_a_checkpoint_goes_on_with_or_without_an_engine(offloaded_first: bool) -> None:
    case = Case(TABLES, F16, size=5)
    batches = case.batches()

    def part(
        engine: OffloadEngine | None, states: Any, steps: slice
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = build(case, engine)
        if states is not None:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        train(case, model, optimizer, loader_of(batches[steps], engine))
        return model, optimizer

    engines: list[OffloadEngine | None] = [small_engine(), None]
    if not offloaded_first:
        engines.reverse()
    model, optimizer = part(engines[0], None, slice(3))
    states = model.state_dict(), optimizer.state_dict()
    assert saved(*part(engines[1], states, slice(3, None))) == trained(case, None)[1:]


def test_revert_moves_the_table_to_the_device() -> None:
    case = Case(TABLES, F32, size=5)
    engine = small_engine()
    model, optimizer = build(case, engine)
    train(case, model, optimizer, loader_of(case.batches(), engine))
    want = saved(model, optimizer)[0]
    fastemb.revert(model)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert {name: bits(value) for name, value in model.state_dict().items()} == want


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_dense_parameters_are_stepped_on_the_host(dtype: torch.dtype) -> None:
    """What ``offload="cpu"`` gives is the training whose step is made on copies on the host."""
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(4, 9, generator=generator).to(DEVICE, dtype) for _ in range(5)]

    def model() -> nn.Module:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(9, 33), nn.ReLU(), nn.Linear(33, 1))
        return layers.to(DEVICE, dtype)

    def backward(layers: nn.Module, x: Tensor) -> None:
        layers.zero_grad()
        layers(x).float().square().mean().backward()

    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}
    offloaded = model()
    config = HostStates(chunk_bytes=256)
    optimizer = fastemb.optim.Adam(offloaded.parameters(), offload=config, **options)
    plain = model()
    copies = [nn.Parameter(p.detach().cpu()) for p in plain.parameters()]
    stepped = fastemb.optim.Adam(copies, **options)
    for x in inputs:
        backward(offloaded, x)
        optimizer.step()
        backward(plain, x)
        for copied, p in zip(copies, plain.parameters(), strict=True):
            assert p.grad is not None
            copied.grad = p.grad.cpu()
        stepped.step()
        with torch.no_grad():
            for copied, p in zip(copies, plain.parameters(), strict=True):
                p.copy_(copied)
    for got, want in zip(offloaded.parameters(), copies, strict=True):
        assert got.is_cuda
        assert bits(got) == bits(want)
        states = optimizer.state[got]
        assert states["exp_avg"].device == CPU
        for name, value in stepped.state[want].items():
            assert bits(states[name]) == bits(value)


# ---- memory -------------------------------------------------------------------------------------


def pinning_shows() -> bool:
    """False where the driver is a stand-in that does not tell which memory is pinned."""
    return torch.zeros(8, pin_memory=True).is_pinned()


def test_memory_on_the_host_is_pinned() -> None:
    case = Case(TABLES, F32, steps=1)
    engine = small_engine()
    model, optimizer = build(case, engine)
    train(case, model, optimizer, loader_of(case.batches(), engine))
    dense = fastemb.optim.Adam(model.layer.parameters(), offload="cpu")
    loss_of(model, on_device(case.batches()[0]))[0].backward()
    dense.step()
    assert dense._offload is not None
    (link,) = dense._offload._links.values()
    hosts = [table.host for table in engine.tables.values()]
    assert len(hosts) == 2
    assert all(host.pinned for host in hosts)
    if not pinning_shows():
        pytest.skip("this driver does not tell which memory is pinned")
    transfers = engine.transfers
    staging = [s.host(k, 1, 16) for s in (transfers._in, transfers._out) for k in range(2)]
    staging += [b for s in (link._incoming, link._outgoing) for b in (*s._buffers, *s._headers)]
    assert len(staging) == 12
    for memory in (*(host.records for host in hosts), *staging):
        assert memory.is_pinned()


def test_the_loop_does_not_wait_for_the_device_within_a_batch() -> None:
    case = Case(TABLES, F32, "SGD", steps=4)
    engine = small_engine(depth=0)  # so that no lane works meanwhile
    model, optimizer = build(case, engine)
    batches = [on_device(batch) for batch in case.batches()]
    for number, batch in enumerate(engine.prefetch(batches, ids=ids_of)):
        if number == 0:  # which makes what is needed from then on
            train(case, model, optimizer, [batch])
            continue
        with waiting_is_an_error():
            loss_of(model, batch)[0].backward()
            optimizer.step()
            optimizer.zero_grad()


# ---- ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("unknown", [7, -1, 20, 2**40], ids=str)
@pytest.mark.parametrize("bag", [True, False])
def test_ids_that_were_not_announced(unknown: int, bag: bool) -> None:
    """They are absent, in the backward too, and the error comes when somebody waits."""
    case = Case((TableCase(bag=bag, padding_idx=1),), F32, "SGD")
    engine = new_engine(device=DEVICE, cache=20)
    model, optimizer = build(case, engine)
    table = model.t0
    before = model.state_dict()["t0.weight"]
    announced = torch.tensor([[3], [5], [3]])
    looked_up = torch.tensor([[3], [unknown], [3]])
    for batch in engine.prefetch([announced], ids=lambda ids: ids):
        out = table(looked_up.to(DEVICE)).reshape(3, -1)
        with pytest.raises(IndexError, match=r"'t0'.* position 1|position 1.*'t0'"):
            fastemb.check_errors()
        assert bits(out[1]) == bits(torch.zeros(3))
        assert bits(out[0]) == bits(before[3]) == bits(out[2])
        out.sum().backward()
        optimizer.step()
        fastemb.check_errors()  # once is enough
        assert batch is announced
    want = before.clone()
    want[3] -= 0.05 * 2
    assert bits(model.state_dict()["t0.weight"]) == bits(want)
    engine.close()


def test_ids_that_were_not_announced_with_checks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTEMB_SYNC_CHECKS", "1")
    engine = new_engine(device=DEVICE, cache=20)
    model, _ = build(Case((TableCase(),), F32), engine)
    for ids in engine.prefetch([torch.tensor([[3]])], ids=lambda ids: ids):
        with pytest.raises(IndexError, match="'t0'"):
            model.t0(on_device(ids + 1))
        model.t0(on_device(ids))


def test_wrong_ids_do_no_harm_to_transfers() -> None:
    """Whose operators may be the next ones on the device, which raise what was found wrong."""
    case = Case((TableCase(rows=40, bag=False),), F32, steps=10, size=5)
    engine = small_engine(depth=0)
    model, optimizer = build(case, engine)
    batches = case.batches()
    wrong = torch.tensor([[2**40]]).to(DEVICE)
    done: list[Any] = []

    def go_on() -> None:
        for batch in loader_of(batches[len(done) :], engine):
            done.extend(train(case, model, optimizer, [batch]))
            if len(done) in (3, 6):
                with torch.no_grad():
                    model.t0(wrong)
                torch.cuda.synchronize()

    for number in (3, 6):
        with pytest.raises(IndexError, match="position 0"):
            go_on()
        assert number <= len(done) < number + 3
    go_on()
    assert len(done) == 10
    assert engine.stats.written_back > 20
    assert saved(model, optimizer) == trained(case, None)[1:]


# ---- damage -------------------------------------------------------------------------------------


class Flipping(Lane):
    """One copy has one bit wrong where it arrives."""

    def __init__(self, name: str, device: torch.device, number: int, byte: int) -> None:
        super().__init__(name, device)
        self.number, self.byte = number, byte

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.number -= 1
        if self.number:
            super().copy(target, source)
            return
        damaged = source.to(CPU, copy=True)  # in order: this is a job, on the lane's stream
        damaged.view(torch.uint8).view(-1)[self.byte] ^= 4
        target.copy_(damaged)


def flipping(lane: str, number: int = 5, byte: int = 17) -> MakeLane:
    def make_lane(name: str, device: torch.device) -> Lane:
        return Flipping(name, device, number, byte) if name == lane else Lane(name, device)

    return make_lane


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("byte", [0, 8, 17], ids=["checksum", "version", "weight"])
def test_damage_on_the_way_to_the_device(byte: int, prefetch: bool) -> None:
    """It is found before the step, and the batch can be taken again."""
    case = Case((TableCase(rows=40),), F32, steps=8, size=5)
    batches = case.batches()
    engine = small_engine(make_lane=flipping("deliver", 12, byte))
    model, optimizer = build(case, engine)
    done: list[Any] = []

    def go_on() -> None:
        for batch in loader_of(batches[len(done) :], engine, prefetch):
            done.extend(train(case, model, optimizer, [batch]))

    with pytest.raises(IntegrityError) as caught:
        go_on()
    assert (caught.value.table, caught.value.direction) == ("t0", "to device")
    assert 0 < len(done) < len(batches)
    assert optimizer.state[model.t0.weight]["step"] == len(done)
    go_on()
    assert (done, *saved(model, optimizer)) == trained(case, None)


@pytest.mark.parametrize("prefetch", [True, False])
def test_damage_on_the_way_to_the_host(prefetch: bool) -> None:
    """It is not stored; until the tables are loaded again nothing goes on."""
    case = Case((TableCase(rows=40),), F32, steps=8, size=5)
    engine = small_engine(make_lane=flipping("collect", 6))
    model, optimizer = build(case, engine)
    checkpoint = {"t0": {"weight": model.state_dict()["t0.weight"]}}
    done: list[Any] = []

    def go_on() -> None:
        for batch in loader_of(case.batches(), engine, prefetch):
            done.extend(train(case, model, optimizer, [batch]))

    with pytest.raises(IntegrityError) as caught:
        go_on()
    error = caught.value
    assert (error.table, error.direction) == ("t0", "to host")
    assert 0 < len(done) < 8
    assert optimizer.state[model.t0.weight]["step"] == len(done)
    host = engine.tables["t0"].host
    versions = host.layout.headers(host.records)[error.rows, 1]
    assert (versions == host.versions[error.rows] - 1).all()
    with pytest.raises(IntegrityError, match="to host"):
        model.state_dict()
    engine.load_state_dict(checkpoint)
    assert bits(model.state_dict()["t0.weight"]) == bits(checkpoint["t0"]["weight"])
    go_on()
    assert not any(engine.verify().values())


def test_damage_to_a_dense_gradient() -> None:
    """Found before anything is changed; the same step can be made again."""
    layer = nn.Linear(40, 1).to(DEVICE)
    before = [bits(p) for p in layer.parameters()]
    config = HostStates(chunk_bytes=64, lane=flipping("collect", 3))
    optimizer = fastemb.optim.Adam(layer.parameters(), offload=config)
    layer(torch.ones(2, 40, device=DEVICE)).sum().backward()
    with pytest.raises(IntegrityError) as caught:
        optimizer.step()
    assert caught.value.direction == "to host"
    assert [bits(p) for p in layer.parameters()] == before
    optimizer.step()
    assert all(bits(p) != b for p, b in zip(layer.parameters(), before, strict=True))


# ---- streams ------------------------------------------------------------------------------------


@pytest.fixture
def lanes() -> Iterator[list[Lane]]:
    device = torch.device(DEVICE, torch.cuda.current_device())
    lanes = [Lane(name, device) for name in ("one", "other")]
    yield lanes
    for lane in lanes:
        lane.close()


def test_a_lane_has_a_stream_of_its_own(lanes: list[Lane]) -> None:
    seen: list[torch.cuda.Stream] = []
    for lane in lanes:
        lane.submit("look", lambda: seen.append(torch.cuda.current_stream())).wait()
    assert seen == [lane.stream for lane in lanes]
    everywhere = [*seen, torch.cuda.current_stream(), torch.cuda.default_stream()]
    assert len({stream.cuda_stream for stream in everywhere}) >= 3
    assert torch.cuda.default_stream() not in seen


class Marks:
    """A value on the device that is written late."""

    def __init__(self) -> None:
        self.value = torch.zeros(1000).to(DEVICE)
        self.seen = torch.zeros(1000, pin_memory=True)
        torch.cuda.synchronize()

    def write(self, mark: float) -> None:
        torch.cuda._sleep(BUSY_CYCLES)
        self.value.copy_(torch.full((1000,), mark).pin_memory(), non_blocking=True)


def test_what_is_computed_comes_before_what_a_lane_does_after_it(lanes: list[Lane]) -> None:
    marks, (lane, _) = Marks(), lanes
    marks.write(3.0)
    ready = computed(marks.value.device)

    def job() -> None:
        lane.after(ready)
        lane.copy(marks.seen, marks.value)

    lane.submit("read", job).wait()
    assert marks.seen.tolist() == [3.0] * 1000
    assert ready.done()


@pytest.mark.parametrize("how", ["after", "wait"])
def test_a_lane_comes_after_another(lanes: list[Lane], how: str) -> None:
    marks, (first, second) = Marks(), lanes
    written = first.submit("write", lambda: marks.write(4.0))

    def job() -> None:
        if how == "after":
            second.after(written)
        else:
            written.wait()
        second.copy(marks.seen, marks.value)

    second.submit("read", job).wait()
    assert marks.seen.tolist() == [4.0] * 1000


@pytest.mark.parametrize("wait", [Event.wait, Event.hold_stream])
def test_the_loop_comes_after_a_lane(lanes: list[Lane], wait: Callable[[Event], None]) -> None:
    marks, (lane, _) = Marks(), lanes
    wait(lane.submit("write", lambda: marks.write(5.0)))
    marks.seen.copy_(marks.value, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert marks.seen.tolist() == [5.0] * 1000


def test_slots_are_used_before_they_are_filled_anew() -> None:
    """Lookups that the device has not made yet see the rows that were in their slots then."""
    case = Case((TableCase(rows=40, bag=False),), F32)
    engine = new_engine(device=DEVICE, cache=4)
    model, _ = build(case, engine)
    weight = model.state_dict()["t0.weight"]
    rows = torch.arange(40).view(10, 4)
    found = []
    with torch.no_grad():
        for ids in engine.prefetch(list(rows), ids=lambda ids: ids):
            there = ids.to(DEVICE)
            torch.cuda._sleep(BUSY_CYCLES)
            found.append(model.t0(there))
    assert engine.stats.misses == 40
    assert bits(torch.cat(found)) == bits(weight)
