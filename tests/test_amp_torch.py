"""Without groups, `fastemb.amp.GradScaler` is `torch.amp.GradScaler`, bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import assert_same_bits, bits, coo, snapshot
from torch import nn

import fastemb
from fastemb import optim
from fastemb.amp import GradScaler, GroupConfig

Scaler = torch.amp.GradScaler
INF, NAN = float("inf"), float("nan")

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "torch Adam": lambda p: torch.optim.Adam(p, 0.1),
    "torch Adam foreach": lambda p: torch.optim.Adam(p, 0.1, foreach=True),
    "torch AdamW fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "torch Adagrad fused": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
    "Adam": lambda p: optim.Adam(p, 0.1),
    "Adam foreach": lambda p: optim.Adam(p, 0.1, foreach=True),
    "AdamW": lambda p: optim.AdamW(p, 0.1),
    "Adagrad": lambda p: optim.Adagrad(p, 0.1),
    "RowWiseAdagrad": lambda p: optim.RowWiseAdagrad(p, 0.1),
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9),
}


def train(
    scaler: Scaler,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    steps: int = 40,
    dtype: torch.dtype = torch.float32,
    how: str = "step",
) -> list[object]:
    """Everything that there is after each step; a sixth of the steps overflows."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.Generator().manual_seed(1)

    def parameters() -> list[nn.Parameter]:
        shapes = ((5, 3), (7,))
        return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]

    params, others = parameters(), parameters()
    optimizers = [make(params), make(others)]
    history: list[object] = []
    for number in range(steps):
        x = torch.randn(5, 3, generator=generator).to(dtype)
        losses = [((p * x).sum() + q.sum()).square() for p, q in (params, others)]
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        for loss in scaler.scale(losses):
            loss.backward()
        for p in (params[0], others[1]):
            draw = float(torch.rand((), generator=draws))
            if draw < 1 / 12:
                p.grad.view(-1)[3] = INF if draw < 1 / 24 else NAN
        for optimizer in optimizers:
            if how != "step":
                scaler.unscale_(optimizer)
            if how == "clip":
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            scaler.step(optimizer)
        scaler.update()
        if number == steps // 2:
            scaler.set_growth_factor(3.0)
            scaler.set_backoff_factor(0.7)
            scaler.set_growth_interval(4)
        history.append([bits(p.detach()) for p in (*params, *others)])
        history.append((scaler.get_scale(), scaler._get_growth_tracker()))
    history += [snapshot(optimizer) for optimizer in optimizers]
    return history


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize(
    ("dtype", "how", "init_scale"),
    [
        (torch.float32, "step", 2.0**16),
        (torch.float32, "step", 3000.0),
        (torch.float32, "unscale_", 3000.0),
        (torch.float32, "clip", 2.0**10),
        (torch.float64, "step", 777.0),
        (torch.bfloat16, "unscale_", 999.0),
    ],
)
def test_same_bits_as_torch(
    make: Callable[..., Any], dtype: torch.dtype, how: str, init_scale: float
) -> None:
    options = {"init_scale": init_scale, "growth_interval": 3}
    runs = [
        train(cls("cpu", **options), make, dtype=dtype, how=how) for cls in (Scaler, GradScaler)
    ]
    assert runs[0] == runs[1]


def test_same_bits_over_hundreds_of_steps() -> None:
    runs = [
        train(cls("cpu", init_scale=1234.5, growth_interval=5), OPTIMIZERS["torch Adam"], steps=600)
        for cls in (Scaler, GradScaler)
    ]
    assert runs[0] == runs[1]
    skipped = sum(a != b for a, b in zip(runs[1][1:-2:2], runs[1][3:-2:2], strict=False))
    assert skipped > 60


def test_growth_after_an_interval_that_was_lowered_too_far() -> None:
    """torch's scaler looks for a count that has passed already, and keeps its scale for good."""
    scales = []
    for cls in (Scaler, GradScaler):
        scaler = cls("cpu", init_scale=4.0, growth_interval=5)
        p = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([p], 0.0)
        for step in range(8):
            if step == 3:
                scaler.set_growth_interval(2)
            scaler.scale(p.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    assert scales == [4.0] * 8 + [4.0] * 3 + [8.0] * 2 + [16.0] * 2 + [32.0]


def test_scale_at_its_limits_is_that_of_torch() -> None:
    """Growth up to the largest float32, backoff down to 2**-126, where torch goes on to 0."""
    for value in (1.0, INF):
        scales = []
        for cls in (Scaler, GradScaler):
            scaler = cls("cpu", init_scale=3.0, growth_interval=1)
            p = nn.Parameter(torch.ones(1))
            optimizer = torch.optim.SGD([p], 0.0)
            seen = []
            for _ in range(140):
                scaler.scale(p.sum())
                p.grad = torch.full((1,), value)
                scaler.step(optimizer)
                scaler.update()
                seen.append(scaler.get_scale())
            scales.append(seen)
        if value == INF:
            assert scales[0][126:] != scales[1][126:]
            assert scales[1][-1] == 2.0**-126
            scales = [seen[:126] for seen in scales]
        assert scales[0] == scales[1]


def test_sparse_gradients_with_torch_optimizers() -> None:
    runs = []
    for cls in (Scaler, GradScaler):
        generator = torch.Generator().manual_seed(0)
        scaler = cls("cpu", init_scale=3000.0, growth_interval=2)
        p = nn.Parameter(torch.ones(6, 2))
        optimizer = torch.optim.SparseAdam([p], 0.1)
        for number in range(40):
            scaler.scale(torch.zeros(1))
            values = torch.randn(3, 2, generator=generator) * 3000
            if number % 7 == 0:
                values[1, 1] = NAN
            p.grad = coo([1, 2, 5], values, 6)
            scaler.step(optimizer)
            scaler.update()
        runs.append((bits(p.detach()), snapshot(optimizer), scaler.get_scale()))
    assert runs[0] == runs[1]


# ---- the same calls, the same errors ----


def test_outputs_of_every_kind() -> None:
    x = torch.ones(2, requires_grad=True)
    scaler = GradScaler("cpu", init_scale=4.0)
    assert_same_bits(scaler.scale(x.sum()).detach(), torch.tensor(8.0))
    nested = scaler.scale([x, (x, [x])])
    assert isinstance(nested, list)
    assert isinstance(nested[1], tuple)
    assert_same_bits(nested[1][1][0].detach(), x.detach() * 4)
    assert [y.sum().item() for y in scaler.scale(iter([x, x]))] == [8.0, 8.0]
    with pytest.raises(ValueError, match="outputs must be a Tensor"):
        scaler.scale(3)


@pytest.mark.parametrize("cls", [Scaler, GradScaler])
def test_misuse_is_refused_as_by_torch(cls: type[Scaler]) -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.1)
    scaler = cls("cpu")
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(AssertionError, match="_scale is None"):
            call(optimizer)
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.update()
    scaler.scale(p.sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    for name in ("growth_factor", "backoff_factor"):
        with pytest.raises(AssertionError, match=name.replace("_", " ")):
            cls("cpu", **{name: 1.0})
    scaled = scaler.scale(p.sum())
    scaler.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.backward()


def test_disabled() -> None:
    for scaler in (GradScaler("cpu", enabled=False), GradScaler("cpu", enabled=False, groups={})):
        p = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([p], 1.0)
        loss = scaler.boundary(p, "x").sum()
        assert scaler.scale(loss) is loss
        loss.backward()
        scaler.unscale_(optimizer)
        assert float(scaler.clip_grad_norm_(optimizer, 10.0)) == pytest.approx(2**0.5)
        scaler.register(nn.Linear(1, 1), optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert_same_bits(p.detach(), torch.zeros(2))
        assert scaler.state_dict() == {}
        assert scaler.get_scale() == 1.0
        assert not scaler.step_was_skipped(optimizer)
        assert scaler.stats()["gradients"] == {}
        assert not pickle.loads(pickle.dumps(scaler)).is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
def test_cuda_where_there_is_none() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = GradScaler()
    assert not scaler.is_enabled()


def test_new_scale() -> None:
    p = nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu")
    scaler.scale(p.sum())
    one_element = torch.tensor([16.0])
    for new, expected in (
        (8.0, 8.0),
        (4, 4.0),
        (torch.tensor(3.0), 3.0),
        (one_element, 16.0),
    ):
        scaler.update(new)
        assert scaler.get_scale() == expected
        assert float(scaler.scale(torch.ones(()))) == expected
    with pytest.raises(AssertionError, match="new_scale should be"):
        scaler.update(torch.ones(2))


@pytest.mark.parametrize("cls", [Scaler, GradScaler])
@pytest.mark.parametrize("fused", [False, True])
def test_scale_that_is_assigned(cls: type[Scaler], fused: bool) -> None:
    """A recipe of old against a scale that falls: gradients are divided by the new one, too."""
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    scaler = cls("cpu", init_scale=2.0, growth_interval=3)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    old = scaler.scale(p.sum())
    scaler._scale = torch.tensor(128.0).to(scaler._scale)
    scaler._growth_tracker = torch.tensor(2, dtype=torch.int32)
    assert scaler.get_scale() == 128.0
    old.backward()
    assert p.grad is not None
    assert p.grad.tolist() == [2.0, 2.0]
    optimizer.zero_grad()
    scaler.scale(p.sum()).backward()
    assert p.grad.tolist() == [128.0, 128.0]
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [-1.0, -1.0]
    assert scaler.get_scale() == 256.0  # after three steps


def test_scale_that_cannot_be_assigned() -> None:
    scaler = GradScaler("cpu", groups={"table": {}})
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="power of two"):
        scaler._scale = torch.tensor(100.0)
    assert scaler.get_scale() == 2.0**16
    guard = GradScaler("cpu", mode="guard")
    guard.scale(torch.ones(()))
    with pytest.raises(ValueError, match="mode='guard'"):
        guard._scale = torch.tensor(8.0)


# ---- state ----


def trained(cls: type[Scaler]) -> Scaler:
    scaler = cls("cpu", init_scale=640.0, growth_factor=4.0, growth_interval=9)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.0)
    for value in (INF, 1.0, 1.0):
        scaler.scale(p.sum())
        p.grad = torch.full((2,), value)
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(("one", "other"), [(Scaler, GradScaler), (GradScaler, Scaler)])
def test_state_goes_to_torch_and_back(one: type[Scaler], other: type[Scaler], used: bool) -> None:
    scaler, target = trained(one), other("cpu")
    if used:
        target.scale(torch.ones(()))
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True))
    target.scale(torch.ones(()))
    keys = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
    states = [s.state_dict() for s in (scaler, target)]
    assert [states[0][k] for k in keys] == [states[1][k] for k in keys] == [320.0, 4.0, 0.5, 9, 2]
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        target.load_state_dict({})


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    ("scale", "limits", "expected"),
    [
        (0.0, {}, 2.0**-126),
        (2.0**-70, {"min_scale": 1.0}, 1.0),
        (2.0**20, {"max_scale": 2.0**16}, 2.0**16),
        (0.0, {"groups": {"aux": {}}}, 2.0**-126),
    ],
)
def test_states_beyond_the_limits(
    scale: float, limits: dict[str, Any], expected: float, used: bool
) -> None:
    """A scale that torch's scaler has driven to 0 makes every gradient NaN."""
    state = {**Scaler("cpu").state_dict(), "scale": scale}
    scaler = GradScaler("cpu", init_scale=limits.get("max_scale", 2.0**16), **limits)
    if used:
        scaler.scale(torch.ones(()))
    scaler.load_state_dict(state)
    assert scaler.get_scale() == expected
    assert float(scaler.scale(torch.ones(()))) == expected


def test_skips_are_saved_too() -> None:
    scaler = GradScaler("cpu", hysteresis=3)
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.0)

    def overflow(scaler: GradScaler) -> None:
        scaler.scale(p.sum())
        p.grad = torch.full((2,), INF)
        scaler.step(optimizer)
        scaler.update()

    overflow(scaler)
    overflow(scaler)
    assert scaler.get_scale() == 2.0**16
    other = GradScaler("cpu", hysteresis=3)
    other.load_state_dict(scaler.state_dict())
    for again in (other, pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        overflow(again)
        assert again.get_scale() == 2.0**15
        assert again.stats()["groups"]["root"]["skips"] == 3


def test_pickle_in_an_iteration_is_refused_as_by_torch() -> None:
    scaler = trained(GradScaler)
    again = pickle.loads(pickle.dumps(scaler))
    assert again.state_dict() == scaler.state_dict()
    p = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], 0.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        pickle.dumps(scaler)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"skip": "none"}, ValueError, "skip must be one of"),
        ({"alarm": "no"}, ValueError, "alarm must be one of"),
        ({"mode": "bf16"}, ValueError, "mode must be one of"),
        ({"mode": "guard", "init_scale": 2.0}, ValueError, "init_scale must be left out"),
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips must be >= 1"),
        ({"hysteresis": 0}, ValueError, "hysteresis must be an int >= 1"),
        ({"min_scale": 0.0}, ValueError, "min_scale must be >= 2"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "max_scale must be >= min_scale"),
        ({"max_scale": 2.0}, ValueError, "init_scale must be between"),
        ({"growth_interval": "x"}, TypeError, "growth_interval must be a number"),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GradScaler("cpu", **options)


def test_is_one_of_torchs() -> None:
    assert isinstance(fastemb.amp.GradScaler("cpu"), torch.amp.GradScaler)


def test_step_returns_what_the_optimizer_returns() -> None:
    class Returns(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return 7

    p = nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    assert scaler.step(Returns([p], 0.1)) == 7


class TakesScaler(torch.optim.SGD):
    _step_supports_amp_scaling = True
    seen: Any = ()

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
        found = grad_scaler._check_inf_per_device(self)
        self.seen = grad_scaler, {device: float(flag) for device, flag in found.items()}


def test_optimizers_that_take_the_scaler_itself() -> None:
    """torch's contract of old: a keyword argument, with a warning."""
    p = nn.Parameter(torch.ones(2))
    scaler = GradScaler("cpu")
    scaler.scale(p.sum() * INF).backward()
    optimizer = TakesScaler([p], 0.1)
    with pytest.warns(FutureWarning, match="going to stop passing itself"):
        scaler.step(optimizer)
    assert optimizer.seen == (scaler, {torch.device("cpu"): 1.0})
    scaler.update()
    assert scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("how", ["a group", "an update before"])
def test_optimizers_that_know_of_one_scale_only(how: str) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizer = TakesScaler(params[:1], 0.1)
    scaler.register(nn.ParameterList(params), optimizer)
    if how == "a group":
        scaler._declare("aux", GroupConfig(init_scale=4.0))
        scaler.scale(scaler.boundary(params[0] * 1.0, "aux").sum()).backward()
    else:
        other = torch.optim.SGD(params[1:], 0.1)
        scaler.scale(params[0].sum() + params[1].sum()).backward()
        scaler.step(other)
        scaler.update()
    with pytest.raises(RuntimeError, match=r"step: 0 has another scale than the loss, by which T"):
        scaler.step(optimizer)
    assert not optimizer.seen
