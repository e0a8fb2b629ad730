"""Optimizer states in host memory: the same bits as without, whatever happens in between."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from offload_dense_cases import OPTIMIZERS, Training, random_delays, slow
from optim_cases import CLASSES, bits, snapshot
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fastemb
from fastemb import optim
from fastemb.offload import HostStates, OffloadEngine
from fastemb.offload._lanes import Lane

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:fastemb.optim"),  # of lazy="rows"
    pytest.mark.filterwarnings("ignore:.*unscaled in float16"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step"),
    pytest.mark.timeout(120),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def pair(config: HostStates | str, name: str, dtype: torch.dtype, **how: Any) -> list[Training]:
    return [Training(name, dtype, offload, **how) for offload in (None, config)]


def linear(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(6, 5, dtype=dtype)


def set_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


SMALL = HostStates(chunk_bytes=16)


# ---------------------------------------------------------------------------------------------
# the same bits
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Adam", torch.float16),
        ("AdamW", torch.float32),
        ("Adam stochastic", torch.bfloat16),
        ("Adagrad", torch.bfloat16),
        ("RowWiseAdagrad", torch.float32),
        ("SGD momentum", torch.bfloat16),
    ],
    ids=str,
)
def test_many_steps_with_overflows_in_between(name: str, dtype: torch.dtype) -> None:
    config = HostStates(chunk_bytes=128, lane=random_delays(1, 2e-4))
    plain, offloaded = pair(config, name, dtype, scaler="fastemb", clip="scaler")
    for step in range(55):
        plain.step()
        offloaded.step()
        assert plain.bits() == offloaded.bits(), step
    assert all(p.isfinite().all() for p in offloaded.model.parameters())
    assert plain.scaler.get_scale() == offloaded.scaler.get_scale()


@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtype=st.sampled_from(DTYPES),
    chunk_bytes=st.sampled_from([8, 24, 64, 1000, 4096, 1 << 20]),
    verify=st.sampled_from(["all", "sample", "off"]),
    scaler=st.sampled_from([None, "torch", "fastemb"]),
    clip=st.sampled_from([None, "ours", "torch", "scaler"]),
    seed=st.integers(0, 2**31),
)
def test_same_bits(
    name: str,
    dtype: torch.dtype,
    chunk_bytes: int,
    verify: Any,
    scaler: str | None,
    clip: str | None,
    seed: int,
) -> None:
    assume(name != "Adam bf16 states" or dtype != torch.float64)  # which the operator refuses
    if scaler == "torch" and dtype == torch.float16:
        clip = None  # torch's scaler unscales no fp16 gradients
    config = HostStates(verify, chunk_bytes, random_delays(seed, 2e-4))
    plain, offloaded = pair(config, name, dtype, scaler=scaler, clip=clip, seed=seed)
    for step in range(6):
        plain.step()
        offloaded.step()
        assert plain.bits() == offloaded.bits(), step


@pytest.mark.parametrize("cls", CLASSES)
def test_layouts_of_parameters_and_gradients(cls: type[optim.Adam]) -> None:
    """Transposed, channels last, a scalar, none at all; gradients expanded, transposed, FP32."""

    def params() -> list[nn.Parameter]:
        torch.manual_seed(0)
        return [
            nn.Parameter(torch.randn(4, 6).t()),
            nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(())),
            nn.Parameter(torch.randn(0, 3)),
            nn.Parameter(torch.randn(3, 4).bfloat16()),
            nn.Parameter(torch.randn(3, 5)),
        ]

    runs = []
    for offload in (None, SMALL):
        leaves = params()
        leaves[4].grad_dtype = torch.float32
        optimizer = cls(leaves, lr=0.1, offload=offload)
        for step in range(3):
            torch.manual_seed(step)
            leaves[0].grad = torch.randn(6, 4)
            leaves[1].grad = torch.randn(2, 3, 4, 5)
            leaves[2].grad = torch.randn(())
            leaves[3].grad = torch.randn(0, 3)
            leaves[4].grad = torch.randn(4, 3).t()
            leaves[5].grad = torch.randn(3, 1).expand(3, 5)
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_skipped_first_steps_make_the_same_states() -> None:
    runs = []
    for offload in (None, SMALL):
        model = linear(torch.bfloat16)
        optimizer = optim.Adam(model.parameters(), offload=offload)
        before = [bits(p) for p in model.parameters()]
        for found_inf in (1.0, float("nan"), 2.0):
            set_gradients(model, 0)
            optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found_inf)
            optimizer.step()
            del optimizer.grad_scale, optimizer.found_inf
            assert [bits(p) for p in model.parameters()] == before
        runs.append(snapshot(optimizer))
        set_gradients(model, 1)
        optimizer.step()
        runs.append(snapshot(optimizer))
    assert runs[:2] == runs[2:]


def test_scale_groups_skip_single_parameters() -> None:
    runs = []
    for offload in (None, SMALL):
        model = linear()
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, offload=offload)
        set_gradients(model, 0)
        flags = {model.weight: (torch.tensor(0.5), torch.tensor(1.0))}
        flags[model.bias] = (torch.tensor(0.5), torch.tensor(0.0))
        before = bits(model.weight)
        optimizer._param_scaling = flags
        optimizer.step()
        assert bits(model.weight) == before
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


# ---------------------------------------------------------------------------------------------
# while the backward, and the step, go on
# ---------------------------------------------------------------------------------------------


class Recorder(Lane):
    """Calls ``seen`` with the name of the lane and what it has carried."""

    seen: Any = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        super().copy(target, source)
        self.seen(self.name, source)


def test_gradients_travel_while_the_backward_goes_on() -> None:
    arrived = threading.Event()

    def seen(name: str, source: Tensor) -> None:
        if name == "collect" and source.shape == (5,):  # the bias of the last layer
            arrived.set()

    def lane(name: str, device: torch.device) -> Lane:
        made = Recorder(name, device)
        made.seen = seen
        return made

    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            waited.append(arrived.wait(20))
            return grad

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    optimizer = optim.Adam(model.parameters(), offload=HostStates(lane=lane))
    for _ in range(2):  # the first time it is not known yet which gradients are dense
        waited: list[bool] = []
        arrived.clear()
        optimizer.zero_grad()
        if optimizer.state:
            model[1](Wait.apply(model[0](torch.randn(2, 3)))).sum().backward()
        else:
            model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    assert waited == [True]


def test_parameters_travel_while_others_are_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = threading.Event()

    def seen(name: str, source: Tensor) -> None:
        if name == "deliver":
            arrived.set()

    def lane(name: str, device: torch.device) -> Lane:
        made = Recorder(name, device)
        made.seen = seen
        return made

    model = linear()
    optimizer = optim.SGD(model.parameters(), lr=0.1, offload=HostStates("off", 16, lane))
    waited = []
    step = optim.SGD._fused_step

    def slow_step(self: optim.SGD, *args: Any) -> None:
        waited.append(arrived.wait(20 if waited else 0))
        step(self, *args)

    monkeypatch.setattr(optim.SGD, "_fused_step", slow_step)
    set_gradients(model, 0)
    optimizer.step()
    assert waited == [False, True]


def test_gradients_are_only_sent_once() -> None:
    """Also under fastemb's scaler with clipping, which only reads them, and when written alike."""
    carried = []

    def lane(name: str, device: torch.device) -> Lane:
        made = Recorder(name, device)
        made.seen = lambda name, source: carried.append((name, source.numel()))
        return made

    model = linear()
    optimizer = optim.Adam(model.parameters(), offload=HostStates("off", lane=lane))
    scaler = fastemb.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        carried.clear()
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(3, 6)).sum()).backward()
        for param in model.parameters():
            param.grad.mul_(1.0)
        scaler.clip_grad_norm_(optimizer, 1e-3)
        scaler.step(optimizer)
        scaler.update()
        to_host = sorted(n for name, n in carried if name == "collect" and n != 1)
        assert to_host == ([5, 5, 30, 30] if step == 0 else [5, 30])  # at first parameters, too
        assert sorted(n for name, n in carried if name == "deliver") == [5, 30]


# ---------------------------------------------------------------------------------------------
# state_dict, copies, groups
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("saved", "loaded"), [(None, SMALL), (SMALL, None), (SMALL, "cpu")])
def test_state_dicts_go_both_ways(name: str, saved: Any, loaded: Any) -> None:
    dtype = torch.bfloat16
    reference, source, target = (Training(name, dtype, o) for o in (None, saved, loaded))
    for training in (reference, source):
        for _ in range(3):
            training.step()
    file = io.BytesIO()
    torch.save([source.model.state_dict(), source.optimizer.state_dict()], file)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=True)
    target.step()
    target.model.load_state_dict(model)
    target.optimizer.load_state_dict(optimizer)
    target.random.setstate(reference.random.getstate())
    # Rows sleep from a state_dict on with lazy="exact", where the reference has none.
    reference.optimizer.load_state_dict(reference.optimizer.state_dict())
    for _ in range(3):
        reference.step()
        target.step()
    assert reference.bits() == target.bits()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_offloaded_too(how: str) -> None:
    model = linear()
    optimizer = optim.Adam(model.parameters(), offload=SMALL)
    set_gradients(model, 0)
    optimizer.step()
    both = (model, optimizer)
    copied = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    assert copied[1]._offload.config == SMALL
    assert copied[1]._offload is not optimizer._offload
    for m, o in (both, copied):
        for step in range(2):
            set_gradients(m, step)
            o.step()
    assert snapshot(optimizer) == snapshot(copied[1])
    assert bits(model.weight) != bits(linear().weight)


def test_add_param_group() -> None:
    runs = []
    for offload in (None, SMALL):
        model, more = linear(), linear(seed=1)
        optimizer = optim.AdamW(model.parameters(), offload=offload)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": more.parameters(), "lr": 0.1})
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(3, 6, generator=generator)
            (model(x).square() + more(x).square()).sum().backward()
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_groups_that_are_edited() -> None:
    """Parameters that are appended to a group, replaced in it, and taken out of it."""
    runs = []
    for offload in (None, SMALL):
        model, more = linear(), linear(seed=1)
        optimizer = optim.Adam(model.named_parameters(), lr=0.1, offload=offload)
        params = optimizer.param_groups[0]["params"]
        for step in range(8):
            if step == 2:
                params.append(more.weight)
            if step == 4:
                model.weight = nn.Parameter(model.weight.detach() * 0.5)
                params[0] = model.weight
            if step == 6:
                optimizer.add_param_group({"params": [("bias of more", more.bias)]})
            if step == 7:
                params.pop()
            optimizer.zero_grad()
            more.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(3, 6, generator=generator)
            (model(x).square() + more(x).square()).sum().backward()
            optimizer.step()
        runs.append((snapshot(optimizer), bits(more.weight)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["Adam", "SGD", "SGD momentum", "Adagrad"])
def test_a_parameter_that_is_there_twice(name: str) -> None:
    cls, options = OPTIMIZERS[name]
    runs = []
    for offload in (None, HostStates(chunk_bytes=16, lane=slow("deliver", 0.002))):
        model = linear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of it
            optimizer = cls([model.weight, model.bias, model.weight], offload=offload, **options)
        for step in range(4):
            set_gradients(model, step)
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("how", ["fused", "offload"])
def test_a_table_is_converted_after_steps_with_dense_gradients(how: str) -> None:
    runs = []
    for offload in (None, SMALL):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3))
        fastemb.convert(model, sparse=False)
        optimizer = optim.Adam(model.parameters(), lr=0.1, lazy="rows", offload=offload)
        for step in range(6):
            if step == 3:
                optimizer.zero_grad()
                engine = OffloadEngine(device="cpu", cache=5)
                options = {"offload": engine} if how == "offload" else {"sparse": "fused"}
                fastemb.convert(model, **options)  # type: ignore[arg-type]
            optimizer.zero_grad()
            model(torch.tensor([step % 5, 1])).square().sum().backward()
            optimizer.step()
        model.state_dict()
        runs.append(snapshot(optimizer))
        model[0].weight.register_post_accumulate_grad_hook(lambda param: None)
        with pytest.raises(RuntimeError, match="has hooks"):
            model(torch.tensor([1]))
    assert runs[0] == runs[1]


def test_parameters_freeze_and_thaw() -> None:
    runs = []
    for offload in (None, SMALL):
        model = linear()
        model.weight.requires_grad_(False)
        optimizer = optim.Adam(model.parameters(), lr=0.1, offload=offload)
        for step in range(6):
            model.weight.requires_grad_(step in (2, 3))
            optimizer.zero_grad()
            model(torch.ones(2, 6) * step).square().sum().backward()
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_a_table_that_changes_between_dense_and_sparse_gradients() -> None:
    runs = []
    for offload in (None, SMALL):
        torch.manual_seed(0)
        table = fastemb.nn.Embedding(5, 3)
        optimizer = optim.Adam(table.parameters(), lr=0.1, lazy="rows", offload=offload)
        for step in range(8):
            table.sparse = step % 3 == 0
            optimizer.zero_grad()
            table(torch.tensor([step % 5, 1])).square().sum().backward()
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


# ---------------------------------------------------------------------------------------------
# what others do
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "write",
    [
        lambda m, o: m.load_state_dict(linear(m.weight.dtype, seed=5).state_dict()),
        lambda m, o: m.weight.data.copy_(torch.ones(5, 6)),
        lambda m, o: m.weight.data.mul_(0.5),
        lambda m, o: m.weight.mul_(0.5),
        lambda m, o: m.weight[2].zero_(),
        lambda m, o: setattr(m.weight, "data", torch.full((5, 6), 2.0, dtype=m.weight.dtype)),
        lambda m, o: m.weight.grad.data.mul_(0.5),
        lambda m, o: m.weight.grad.mul_(0.5),
        lambda m, o: setattr(m.weight, "grad", torch.ones(5, 6, dtype=m.weight.dtype)),
        lambda m, o: setattr(m.weight, "grad", None),
        lambda m, o: o.zero_grad(),
        lambda m, o: o.zero_grad(set_to_none=False),
    ],
)
def test_what_others_write_counts(write: Any, dtype: torch.dtype) -> None:
    runs = []
    for offload in (None, HostStates(chunk_bytes=16, lane=slow("store", 0.003))):
        model = linear(dtype)
        optimizer = optim.Adam(model.parameters(), lr=0.01, offload=offload)
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(3, 6, generator=generator).to(model.weight.dtype)
            model(x).square().sum().backward()
            if step == 2:
                with torch.no_grad():
                    write(model, optimizer)
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_a_step_raises_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stepped before is there afterwards, and later steps go on from there."""
    model = linear()
    optimizer = optim.SGD(model.parameters(), lr=1.0, offload=SMALL)
    step = optim.SGD._fused_step
    calls = []

    def breaking(self: optim.SGD, *args: Any) -> None:
        calls.append(1)
        step(self, *args)
        if len(calls) == 2:
            raise MemoryError("no more")

    monkeypatch.setattr(optim.SGD, "_fused_step", breaking)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    set_gradients(model, 0)
    with pytest.raises(MemoryError, match="no more"):
        optimizer.step()
    assert torch.equal(model.weight, weight - model.weight.grad)
    assert torch.equal(model.bias, bias)
    optimizer.step()
    assert torch.equal(model.weight, weight - model.weight.grad - model.weight.grad)
    assert torch.equal(model.bias, bias - model.bias.grad)


class Breaking(Lane):
    """Its n-th copy of a chunk raises."""

    def __init__(self, name: str, device: torch.device, breaks: str, when: int) -> None:
        super().__init__(name, device)
        self._when = when if name == breaks else 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        if source.dtype != torch.int64:
            self._when -= 1
            if self._when == 0:
                raise OSError("the link is down")
        super().copy(target, source)


def test_a_lane_that_fails_on_the_way_to_the_host() -> None:
    plain, offloaded = linear(), linear()
    config = HostStates(chunk_bytes=16, lane=lambda *args: Breaking(*args, "collect", 25))
    optimizers = [
        optim.Adam(plain.parameters()),
        optim.Adam(offloaded.parameters(), offload=config),
    ]
    failed = 0
    for step in range(4):
        for model, optimizer in zip((plain, offloaded), optimizers, strict=True):
            set_gradients(model, step)
            before = snapshot(optimizer)
            try:
                optimizer.step()
            except OSError:
                failed += 1
                assert snapshot(optimizer) == before
                optimizer.step()
    assert failed == 1
    assert snapshot(optimizers[0]) == snapshot(optimizers[1])


def test_a_lane_that_fails_on_the_way_to_the_device() -> None:
    model = linear()
    config = HostStates(chunk_bytes=16, lane=lambda *args: Breaking(*args, "deliver", 3))
    optimizer = optim.Adam(model.parameters(), offload=config)
    set_gradients(model, 0)
    for _ in range(3):
        with pytest.raises(OSError, match="the link is down"):
            optimizer.step()


# ---------------------------------------------------------------------------------------------
# limits
# ---------------------------------------------------------------------------------------------


def test_nothing_grows_with_steps() -> None:
    training = Training("Adam", torch.bfloat16, HostStates(chunk_bytes=64), scaler="fastemb")
    counts = []
    for step in range(60):
        training.step()
        if step in (30, 59):
            gc.collect()
            counts.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))
    assert counts[1] <= counts[0] + 10


def test_an_abandoned_batch_does_not_pile_up() -> None:
    """Backwards without a step: what has not been sent yet is not any more, and is let go."""
    gate = threading.Event()
    carried = []

    def lane(name: str, device: torch.device) -> Lane:
        made = Recorder(name, device, delay=lambda _: gate.wait(20))
        made.seen = lambda name, source: carried.append((name, source.numel()))
        return made

    model = linear()
    optimizer = optim.Adam(model.parameters(), offload=HostStates(lane=lane))
    gate.set()
    set_gradients(model, 0)
    optimizer.step()
    gate.clear()
    carried.clear()
    grads = []
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.ones(1, 6)).sum().backward()
        grads.append(weakref.ref(model.weight.grad.untyped_storage()))
    gate.set()
    optimizer.step()
    assert sum(grad() is not None for grad in grads) <= 1
    assert sum(carry == ("collect", 30) for carry in carried) <= 2


def test_parameters_that_have_left_are_freed() -> None:
    stays, leaves = linear(), linear(seed=1)
    optimizer = optim.Adam([{"params": stays.parameters()}, {"params": leaves.parameters()}],
                           offload=SMALL)  # fmt: skip
    for model in (stays, leaves):
        set_gradients(model, 0)
    optimizer.step()
    for param in optimizer.param_groups.pop()["params"]:
        del optimizer.state[param]
    optimizer.step()
    assert not leaves.weight._post_accumulate_grad_hooks
    assert stays.weight._post_accumulate_grad_hooks
    gone = [weakref.ref(leaves.weight), weakref.ref(leaves.bias)]
    del leaves, model, param
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_everything_goes_with_the_optimizer() -> None:
    before = {thread.name for thread in threading.enumerate()}
    model = linear()
    optimizer = optim.Adam(model.parameters(), offload=HostStates(lane=random_delays(0)))
    set_gradients(model, 0)
    optimizer.step()
    assert any("fastemb lane" in t.name for t in threading.enumerate())
    assert model.weight._post_accumulate_grad_hooks
    gone = weakref.ref(optimizer._offload)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not model.weight._post_accumulate_grad_hooks
    deadline = time.monotonic() + 10
    while {t.name for t in threading.enumerate()} - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not {t.name for t in threading.enumerate()} - before
    model(torch.ones(1, 6)).sum().backward()


# ---------------------------------------------------------------------------------------------
# refusals
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("offload", ["cuda", True, 3])
def test_another_offload_is_refused(cls: type[optim.Adam], offload: Any) -> None:
    with pytest.raises(
        ValueError, match=f"{cls.__name__}: offload must be 'cpu'.* got {offload!r}"
    ):
        cls(linear().parameters(), offload=offload)


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_need_the_device_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"Adam: {option} must be False with offload=, got True"):
        optim.Adam(linear().parameters(), offload="cpu", **{option: True})
    optimizer = optim.Adam(linear().parameters(), offload="cpu")
    with pytest.raises(ValueError, match=f"{option} must be False"):
        optimizer.add_param_group({"params": linear().parameters(), option: True})


@pytest.mark.parametrize("size", [0, -8, 12, 64.0])
def test_chunk_bytes_is_checked(size: Any) -> None:
    with pytest.raises(ValueError, match="chunk_bytes must be a positive multiple of 8, got"):
        HostStates(chunk_bytes=size)


def test_verify_is_checked() -> None:
    with pytest.raises(ValueError, match="verify must be one of 'all', 'sample', 'off', got 'no'"):
        HostStates(verify="no")  # type: ignore[arg-type]


def test_parameters_without_memory_of_their_own_are_refused() -> None:
    """As those that `fully_shard` makes."""
    param = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    optimizer = optim.SGD([("sharded", param)], offload=SMALL)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"must be plain tensors, got TwoTensor for sharded"):
        optimizer.step()
    torch.testing.assert_close(param.a, torch.ones(3))


def test_parameters_in_the_same_memory_are_refused() -> None:
    memory = torch.randn(8)
    params = [("one", nn.Parameter(memory[:5])), ("two", nn.Parameter(memory[4:]))]
    optimizer = optim.SGD(params, offload=SMALL)
    for _, param in params:
        param.grad = torch.ones_like(param)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="must not share memory, got one and two"):
        optimizer.step()
    assert snapshot(optimizer) == before
    params[1][1].grad = None
    optimizer.step()


def test_parameters_with_gaps_are_refused() -> None:
    param = nn.Parameter(torch.randn(4, 6)[:, ::2])
    optimizer = optim.SGD([param], offload=SMALL)
    param.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"must fill their memory, got strides \(6, 2\)"):
        optimizer.step()
