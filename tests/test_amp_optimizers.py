"""What optimizers may be under `fastemb.amp.GradScaler`: wrapped, sharing, hooked, short-lived."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook
from wrappers import Imitator, SharingImitator, Wrapper

import fastemb
from fastemb import optim
from fastemb.amp import GradScaler
from fastemb.optim import _dense_adam

INF = float("inf")
KINDS = [optim.SGD, torch.optim.SGD, lambda p, lr: torch.optim.SGD(p, lr=lr, fused=True)]


def begin(value: float = 1.0, **options: Any) -> tuple[GradScaler, nn.Parameter]:
    return GradScaler("cpu", init_scale=1024.0, **options), nn.Parameter(torch.tensor([value]))


def backward(scaler: GradScaler, param: nn.Parameter, factor: float = 1.0) -> None:
    scaler.scale((param * factor).sum()).backward()


@pytest.mark.parametrize("kind", ["float32", "float16", "rows", "fused"])
@pytest.mark.parametrize("cls", [optim.Adam, optim.SGD, optim.RowWiseAdagrad])
def test_fake_tensors(cls: Callable[..., Any], kind: str) -> None:
    """As for an estimate of memory: torch's scaler and fused optimizers read no value either."""
    _dense_adam.agrees.cache_clear()  # is found out with numbers, whoever asks first
    with FakeTensorMode():
        table = fastemb.nn.EmbeddingBag(
            10,
            4,
            sparse={"rows": True, "fused": "fused"}.get(kind, False),
            dtype=torch.float16 if kind == "float16" else torch.float32,
        )
        model = nn.Sequential(table, nn.Linear(4, 2, dtype=table.weight.dtype))
        optimizer, scaler = cls(model.parameters(), lr=0.1), GradScaler("cpu")
        for clips in (False, True):
            scaler.scale(model(torch.ones(3, 2, dtype=torch.int64)).float().sum()).backward()
            if clips:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.stats(wait=True)["gradients"] == {}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("closure", [lambda: None, torch.ones])
def test_closures(make: Callable[..., Any], closure: Callable[..., Any]) -> None:
    scaler, p = begin()
    backward(scaler, p)
    optimizer = make([p], lr=1.0)
    for args, kwargs in (([closure], {}), ([], {"closure": closure})):
        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            scaler.step(optimizer, *args, **kwargs)
    scaler.step(optimizer, None)
    assert p.tolist() == [0.0]


@pytest.mark.parametrize("make", KINDS)
def test_wrappers(make: Callable[..., Any]) -> None:
    scaler, p = begin()
    wrapper: Any = Wrapper(make([p], lr=1.0))
    for factor in (1.0, INF, 1.0):
        wrapper.zero_grad()
        backward(scaler, p, factor)
        scaler.step(wrapper)
        assert scaler.step_was_skipped(wrapper) == (factor == INF)
        scaler.update()
    assert p.tolist() == [-1.0]


@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("wrap", [Imitator, SharingImitator])
def test_wrappers_that_imitate_the_class(wrap: Any, scaler_class: Any, how: str) -> None:
    """What a scaler sets on one would not reach the step of the optimizer in it."""
    p = nn.Parameter(torch.ones(1))
    scaler = scaler_class("cpu", init_scale=1024.0)
    wrapper = wrap(optim.SGD([p], lr=1.0))
    for factor in (2.0, INF, 2.0):
        wrapper.zero_grad()
        backward(scaler, p, factor)
        if how == "unscale_":
            scaler.unscale_(wrapper)
        elif how == "clip" and scaler_class is GradScaler:
            assert scaler.clip_grad_norm_(wrapper, 1.0).item() == factor
        scaler.step(wrapper)
        scaler.update()
    clipped = how == "clip" and scaler_class is GradScaler
    assert p.item() == pytest.approx(-1.0 if clipped else -3.0, abs=1e-5)
    assert scaler.get_scale() == 512.0


def test_copies_of_an_optimizer_are_no_wrappers() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    copies = [copy.copy(optimizer), copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    assert all(o._step_supports_amp_scaling is True for o in (optimizer, *copies))
    assert Imitator(optimizer)._step_supports_amp_scaling is False


def test_queued_gradients_under_a_wrapper_that_imitates_the_class() -> None:
    table = fastemb.nn.EmbeddingBag(2, 1, mode="sum", sparse="fused")
    layer = nn.Linear(1, 1)
    nn.init.zeros_(table.weight)
    wrapper: Any = Imitator(optim.SGD([table.weight, *layer.parameters()], lr=1.0))
    theirs = torch.amp.GradScaler("cpu")
    theirs.scale(layer(table(torch.tensor([[0]]))).sum()).backward()
    with pytest.raises(RuntimeError, match=r"torch.amp.GradScaler sees no gradient of .*fused"):
        theirs.step(wrapper)
    assert table.weight.count_nonzero() == 0
    wrapper.zero_grad()
    ours = GradScaler("cpu", init_scale=1024.0)
    for factor in (INF, 2.0):
        wrapper.zero_grad()
        ours.scale(table(torch.tensor([[0, 0]])).sum() * factor).backward()
        ours.step(wrapper)
        ours.update()
    assert table.weight.flatten().tolist() == [-4.0, 0.0]


@pytest.mark.parametrize("groups", [None, {"aux": {}}])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_a_parameter_of_two_optimizers(
    first: Callable[..., Any], second: Callable[..., Any], groups: Any
) -> None:
    """Its gradient is unscaled once, whoever comes first, and whatever is done before."""
    for unscale in ((False, False), (True, False), (True, True)):
        scaler, p = begin(groups=groups)
        q = nn.Parameter(torch.ones(1))
        optimizers = [make([p, q][: 1 + (make is second)], lr=1.0) for make in (first, second)]
        scaler.register(nn.Module(), *optimizers)
        scaler.scale((p + q).sum()).backward()
        for optimizer, now in zip(optimizers, unscale, strict=True):
            if now:
                scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        assert (p.item(), q.item()) == (-1.0, -1.0 if first is second else 0.0)


def test_a_parameter_of_a_fused_optimizer_that_was_not_registered() -> None:
    """Its step has unscaled the gradient, unless it was skipped; only the device knows."""
    scaler, p = begin()
    first, second = KINDS[2]([p], lr=1.0), optim.SGD([p], lr=1.0)
    backward(scaler, p)
    scaler.step(first)
    with pytest.raises(RuntimeError, match=r"of a SGD is also one of .* register\(\)"):
        scaler.step(second)
    scaler.update()
    for value in (1024.0, INF):
        p.grad = torch.tensor([value])
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert p.tolist() == [-2.0]


def test_a_table_of_two_optimizers() -> None:
    """The same for gradients that wait in a queue; what has come since is another gradient."""
    table = fastemb.nn.EmbeddingBag(3, 1, mode="sum", sparse=True)
    nn.init.zeros_(table.weight)
    scaler = GradScaler("cpu", init_scale=1024.0)
    optimizers = [optim.SGD(table.parameters(), lr=1.0) for _ in range(2)]
    scaler.scale(table(torch.tensor([[1, 1, 2]])).sum()).backward()
    assert scaler.clip_grad_norm_(optimizers[0], 100.0).item() == pytest.approx(5**0.5)
    scaler.unscale_(optimizers[1])
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert table.weight.flatten().tolist() == [0.0, -4.0, -2.0]


def test_an_optimizer_with_the_id_of_another() -> None:
    scaler, p = begin()
    q = nn.Parameter(torch.ones(1))
    first = torch.optim.SGD([p], lr=1.0)
    backward(scaler, p)
    scaler.unscale_(first)
    # Nobody can choose an id: what the scaler keeps of the first one moves to that of the second.
    second = torch.optim.SGD([q], lr=1.0)
    old, new = id(first), id(second)
    scaler._per_optimizer_states[new] = scaler._per_optimizer_states.pop(old)
    scaler._iteration.passes[new] = scaler._iteration.passes.pop(old)
    del first
    gc.collect()
    backward(scaler, q)
    scaler.step(second)
    assert q.tolist() == [0.0]
    scaler.update()
    assert len(scaler.stats(wait=True)["gradients"]) == 2  # what the first one had counts


def test_hooks_before_the_step_find_unscaled_gradients() -> None:
    for make in KINDS:
        scaler, p = begin()
        optimizer = make([p], lr=1.0)
        seen: list[float] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(p.grad.item()))  # noqa: B023
        backward(scaler, p, 0.25)
        scaler.step(optimizer)
        assert (seen, p.tolist()) == ([0.25], [0.75])


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_that_clip(make: Callable[..., Any], everywhere: bool) -> None:
    scaler, p = begin()
    optimizer = make([p], lr=1.0)
    seen: list[float] = []

    def hook(*_: Any) -> None:
        seen.append(p.grad.item())
        nn.utils.clip_grad_norm_([p], 100.0)

    if everywhere:
        handle = register_optimizer_step_pre_hook(hook)
    else:
        handle = optimizer.register_step_pre_hook(hook)
    try:
        for max_norm, grad in ((INF, 8.0), (2.0, 2.0)):
            optimizer.zero_grad()
            backward(scaler, p, 8.0)
            if max_norm < INF:
                scaler.clip_grad_norm_(optimizer, max_norm)
            scaler.step(optimizer)
            scaler.update()
            assert seen.pop() == pytest.approx(grad)
    finally:
        handle.remove()
    assert p.item() == pytest.approx(1.0 - 8.0 - 2.0)


class Clipping(optim.SGD):
    """Has a step of its own, which has an effect without gradients, too."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        (param,) = self.param_groups[0]["params"]
        nn.utils.clip_grad_norm_([param], 4.0)
        return super().step(closure)


def clipping(how: str, param: nn.Parameter) -> Any:
    if how == "subclass":
        return Clipping([param], lr=1.0)
    optimizer: Any = optim.SGD([param], lr=1.0)
    inner, optimizer.steps = optimizer.step, 0

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer.steps += 1
        nn.utils.clip_grad_norm_([param], 4.0)
        return inner(*args, **kwargs)

    if how == "wraps":
        step = functools.wraps(inner)(step)
    optimizer.step = (
        types.MethodType(lambda _, *args: step(*args), optimizer) if (how == "method") else step
    )
    return optimizer


@pytest.mark.parametrize(
    ("how", "scheduled"),
    [
        ("subclass", False), ("subclass", True), ("instance", False), ("wraps", False),
        ("method", False), ("method", True),
    ],
)  # fmt: skip
def test_steps_that_are_overridden(how: str, scheduled: bool) -> None:
    """They find unscaled gradients, and are not called where the step is skipped."""
    scaler, p = begin()
    optimizer = clipping(how, p)
    if scheduled:  # by one of torch's, which wraps the step, and takes methods only
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for factor, moved, steps in ((2.0, 2.0, 1), (INF, 0.0, 1), (8.0, 4.0, 2)):
        optimizer.zero_grad()
        before = p.item()
        backward(scaler, p, factor)
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer) == (factor == INF)
        scaler.update()
        assert before - p.item() == pytest.approx(moved)
        assert optimizer.steps == steps


def test_steps_that_only_torch_has_wrapped() -> None:
    """Their gradients are only read."""

    class Plain(optim.SGD):
        pass

    for cls in (optim.SGD, Plain):
        scaler, p = begin()
        optimizer = cls([p], lr=1.0)
        for _ in range(2):
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        optimizer.step = optimizer.step  # as those do who put back what they had replaced
        backward(scaler, p)
        scaler.step(optimizer)
        assert (p.grad.item(), p.item()) == (1024.0, 0.0)


def test_nothing_is_unscaled_where_a_gradient_is_refused() -> None:
    tables = [fastemb.nn.EmbeddingBag(2, 1, mode="sum", sparse="fused") for _ in range(2)]
    for table in tables:
        nn.init.zeros_(table.weight)
    optimizer = optim.SGD([t.weight for t in tables], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    scaler.scale(sum(t(torch.tensor([[0]])).sum() for t in tables)).backward()
    tables[1].weight.grad = torch.ones(2, 1)
    for use in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match="grad"):
            use(optimizer)
    tables[1].weight.grad = None
    scaler.step(optimizer)
    assert [t.weight[0].item() for t in tables] == [-1.0, -1.0]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finite_gradients_that_overflow_when_they_are_unscaled(
    dtype: torch.dtype, sparse: bool
) -> None:
    """Below a scale of 1 that is an overflow like any other."""
    p = nn.Parameter(torch.ones(2, 1, dtype=dtype))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=0.25)
    scaler.scale(torch.zeros(()))
    grad = torch.full((2, 1), torch.finfo(dtype).max * 0.6).to(dtype)
    p.grad = grad.to_sparse(1) if sparse else grad
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert p.tolist() == [[1.0], [1.0]]
    assert scaler.step_was_skipped(optimizer)
    assert not torch.isfinite(norm)
    scaler.update()
    assert scaler.get_scale() == 0.125


@pytest.mark.parametrize("make", KINDS)
def test_clipping_of_float64(make: Callable[..., Any]) -> None:
    scaler, _ = begin()
    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = make([p], lr=1.0)
    scaler.scale((p * 1e100).sum()).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    torch.testing.assert_close(norm, torch.tensor(2.0**0.5 * 1e100, dtype=torch.float64))
    torch.testing.assert_close(p.detach(), torch.full_like(p, 1 - 0.5**0.5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("max_norm", [-1.0, float("nan")])
def test_norms_that_make_no_sense(max_norm: float) -> None:
    scaler, p = begin()
    backward(scaler, p)
    optimizer = optim.SGD([p], lr=1.0)
    with pytest.raises(ValueError, match="max_norm must be >= 0, got"):
        scaler.clip_grad_norm_(optimizer, max_norm)
    with pytest.raises(ValueError, match="norm_type must be > 0, got 0"):
        scaler.clip_grad_norm_(optimizer, 1.0, 0)
    with pytest.raises(ValueError, match="max_norm must be >= 0, got"):
        optim.clip_grad_norm_([p], max_norm)
    assert p.grad.item() == 1024.0


def test_parameters_live_no_longer_than_their_iteration() -> None:
    scaler, p = begin(groups={"aux": {}})
    alive = weakref.ref(p)
    optimizer = optim.SGD([p], lr=1.0)
    backward(scaler, p)
    scaler.step(optimizer)
    scaler.update()
    del p, optimizer
    gc.collect()
    assert alive() is None
    x = torch.ones(1, requires_grad=True)  # an input that a loss reaches
    reached = weakref.ref(x)
    scaler.scale(scaler.boundary(x * 1.0, "aux").sum()).backward()
    del x
    gc.collect()
    assert reached() is None


def test_methods_that_are_never_called_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match=r"Mine\._unscale_grads_ would never be called"):
        type("Mine", (GradScaler,), {"_unscale_grads_": lambda *_: {}})
    type("Mine", (GradScaler,), {"step": lambda *_: None})


def test_batched_gradients_of_a_registered_table() -> None:
    table = fastemb.nn.EmbeddingBag(3, 2, mode="sum")
    scaler = GradScaler("cpu")
    scaler.register(table)
    scaler.scale(torch.zeros(()))
    out = table(torch.tensor([[0, 1]]))
    (grad,) = torch.autograd.grad(
        out, table.weight, torch.eye(2).view(2, 1, 2), is_grads_batched=True
    )
    assert grad.sum((1, 2)).tolist() == [2.0, 2.0]


def test_what_torch_func_differentiates_was_not_scaled() -> None:
    layer = fastemb.amp.BoundaryLinear(2, 1)
    scaler = GradScaler("cpu", groups={"embedding": {"init_scale": 8.0}})
    scaler.register(layer)
    for f in (layer, lambda x: scaler.boundary(x, "embedding") @ layer.weight.t()):
        for low in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                got = torch.func.grad(lambda x: f(x).float().sum())(torch.ones(1, 2))  # noqa: B023
            torch.testing.assert_close(got, layer.weight.detach(), rtol=1e-2, atol=1e-2)
