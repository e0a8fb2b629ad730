"""Gradients that change or go between a pass of `fastemb.amp.GradScaler` over them and the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastemb
from fastemb import optim
from fastemb.amp import BoundaryLinear, GradScaler

INF = float("inf")


class Case:
    """One table or parameter of ones, whose gradient a backward makes."""

    def __init__(self, kind: str, make: Any = optim.SGD, **options: Any) -> None:
        self.kind = kind
        self.table = fastemb.nn.EmbeddingBag(
            2, 2, mode="sum", sparse={"dense": False, "sparse": True, "fused": "fused"}[kind]
        )
        nn.init.ones_(self.table.weight)
        self.weight = self.table.weight
        self.optimizer = make([self.weight], lr=1.0)
        self.scaler = GradScaler("cpu", init_scale=8.0, **options)

    def loss(self, factor: float = 1.0) -> Tensor:
        return (self.table(torch.tensor([[0, 1, 1]])) * factor).sum()

    def backward(self, factor: float = 1.0) -> None:
        """Gradients of ``factor`` for row 0 and twice that for row 1."""
        self.scaler.scale(self.loss(factor)).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)

    def assert_at(self, row0: float, row1: float) -> None:
        want = torch.tensor([[row0] * 2, [row1] * 2])
        torch.testing.assert_close(self.weight.detach(), want, rtol=1e-5, atol=1e-6)


KINDS = ["dense", "sparse", "fused"]
NORM = (2 * (1.0 + 4.0)) ** 0.5  # of a backward with the factor 1


def first_pass(case: Case, how: str) -> None:
    if how == "clip_grad_norm_":
        case.scaler.clip_grad_norm_(case.optimizer, 1e-3)
    elif how == "unscale_":
        case.scaler.unscale_(case.optimizer)
    else:
        handle = case.optimizer.register_step_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            case.step()
        handle.remove()


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("how", ["clip_grad_norm_", "unscale_", "a step that raises"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_dropped(kind: str, how: str) -> None:
    """Neither its verdict nor its coefficient reaches the next one."""
    for first, second in ((1.0, INF), (INF, 1.0), (1.0, 1.0)):
        case = Case(kind)
        case.backward(first)
        first_pass(case, how)
        case.optimizer.zero_grad()
        case.backward(second)
        case.step()
        assert case.scaler.step_was_skipped(case.optimizer) == (second == INF)
        if second == INF:
            case.assert_at(1.0, 1.0)
        else:
            case.assert_at(0.0, -1.0)
        case.scaler.update()
        assert case.scaler.get_scale() == (4.0 if second == INF else 8.0)


@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD])
@pytest.mark.parametrize("how", ["clip_grad_norm_", "unscale_", "a step that raises"])
def test_gradients_that_are_set_by_hand(how: str, make: Any) -> None:
    """Without a loss in between; then the step has to see that the gradient is another one."""
    case = Case("dense", make)
    case.backward()
    first_pass(case, how)
    case.optimizer.zero_grad()
    case.weight.grad = torch.full((2, 2), INF)
    case.step()
    assert case.scaler.step_was_skipped(case.optimizer)
    case.assert_at(1.0, 1.0)


def test_a_coefficient_goes_with_the_last_gradient_it_was_for() -> None:
    case = Case("dense")
    case.backward()
    case.scaler.clip_grad_norm_(case.optimizer, 1e-3)
    case.weight.grad = torch.full((2, 2), 8.0)
    case.step()
    case.assert_at(0.0, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_raised_is_repeated(kind: str) -> None:
    for make in (optim.SGD, torch.optim.SGD)[: 1 if kind == "fused" else 2]:
        case = Case(kind, make)
        case.backward()
        first_pass(case, "a step that raises")
        case.step()
        case.assert_at(0.0, -1.0)


@pytest.mark.parametrize("how", ["clip_grad_norm_", "unscale_"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_further_backward_with_an_overflow(kind: str, how: str) -> None:
    case = Case(kind)
    case.backward()
    first_pass(case, how)
    case.backward(INF)
    case.step()
    assert case.scaler.step_was_skipped(case.optimizer)
    case.assert_at(1.0, 1.0)
    case.scaler.update()
    assert case.scaler.get_scale() == 4.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_further_backward_is_clipped_with_the_others(kind: str) -> None:
    case = Case(kind)
    case.backward()
    norm = case.scaler.clip_grad_norm_(case.optimizer, NORM / 2)
    assert norm.item() == pytest.approx(NORM)
    case.backward()
    case.step()
    case.assert_at(0.5, 0.0)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_values_that_are_written_after_the_pass(kind: str) -> None:
    for how in ("clip_grad_norm_", "unscale_"):
        case = Case(kind)
        case.backward()
        first_pass(case, how)
        grad = case.weight.grad
        (grad._values() if kind == "sparse" else grad)[0, 0] = INF
        case.step()
        case.assert_at(1.0, 1.0)


def test_an_overflow_that_was_unscaled_stays_one() -> None:
    """As with torch's scaler."""
    case = Case("dense")
    case.backward(INF)
    case.scaler.unscale_(case.optimizer)
    case.weight.grad.nan_to_num_(posinf=1.0)
    case.step()
    case.assert_at(1.0, 1.0)


@pytest.mark.parametrize(
    ("make", "set_to_none"), [(optim.SGD, True), (optim.SGD, False), (torch.optim.SGD, True)]
)
def test_leaving_out_batches_by_their_norm(set_to_none: bool, make: Any) -> None:
    case = Case("dense", make)
    for factor in (INF, 1.0):
        case.optimizer.zero_grad(set_to_none)
        case.backward(factor)
        norm = case.scaler.clip_grad_norm_(case.optimizer, NORM / 2)
        if not norm.isfinite():
            continue
        case.step()
        case.assert_at(0.5, 0.0)
    assert norm.item() == pytest.approx(NORM)


@pytest.mark.parametrize("clip", [True, False])
def test_a_dropped_batch_behind_a_boundary(clip: bool) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    table, layer = nn.Embedding(2, 2), BoundaryLinear(2, 1)
    model = nn.Sequential(table, layer)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    scaler.register(model)
    for factor in (INF, 1.0):
        optimizer.zero_grad()
        scaler.scale((model(torch.tensor([1])) * factor).sum()).backward()
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)
    scaler.update()
    assert not any(g["found_inf"] for g in scaler.stats()["groups"].values())


def two_steps() -> tuple[GradScaler, list[nn.Parameter], list[Any], Callable[..., None]]:
    scaler = GradScaler("cpu", init_scale=8.0, groups={"aux": {}})
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [optim.SGD([p], lr=1.0) for p in params]

    def backward(which: int, factor: float = 1.0) -> None:
        x = scaler.boundary(params[which] * 1.0, "aux")
        scaler.scale((x * factor).sum()).backward()

    return scaler, params, optimizers, backward


@pytest.mark.parametrize("zero", [True, False])
def test_what_a_boundary_has_found_for_an_earlier_step(zero: bool) -> None:
    """It is not for the other's step, but the scale has to know."""
    scaler, params, optimizers, backward = two_steps()
    backward(0, INF)
    scaler.step(optimizers[0])
    if zero:
        optimizers[0].zero_grad()
    backward(1)
    scaler.step(optimizers[1])
    assert [scaler.step_was_skipped(o) for o in optimizers] == [True, False]
    assert params[1].tolist() == [0.0, 0.0]
    scaler._group("late")  # flags that are kept make room as well
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_what_a_boundary_has_found_lasts_while_a_gradient_waits() -> None:
    scaler, _, optimizers, backward = two_steps()
    backward(0, INF)
    backward(1)
    optimizers[0].zero_grad()
    backward(1)  # the gradient of this one was there when the other was dropped
    scaler.step(optimizers[1])
    assert scaler.step_was_skipped(optimizers[1])


@pytest.mark.parametrize("norms", [(1.0, 2.0), (2.0, 1.0)])
@pytest.mark.parametrize("kind", KINDS)
def test_of_several_clippings_the_last_counts(kind: str, norms: tuple[float, float]) -> None:
    for unscale in (True, False):
        case = Case(kind)
        case.backward()
        case.scaler.clip_grad_norm_(case.optimizer, norms[0])
        if unscale:
            case.scaler.unscale_(case.optimizer)
        norm = case.scaler.clip_grad_norm_(case.optimizer, norms[1])
        assert norm.item() == pytest.approx(NORM)
        case.step()
        case.assert_at(1.0 - norms[1] / NORM, 1.0 - 2.0 * norms[1] / NORM)


def test_clipping_and_then_unscaling() -> None:
    case = Case("dense")
    case.backward()
    case.scaler.clip_grad_norm_(case.optimizer, NORM / 2)
    case.scaler.unscale_(case.optimizer)
    case.step()
    case.assert_at(0.5, 0.0)


def test_skipping_together_sees_what_has_changed() -> None:
    scaler = GradScaler("cpu", skip="all")
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [optim.SGD([p], lr=1.0) for p in params]
    scaler.register(nn.ParameterList(params), *optimizers)
    scaler.scale(params[0].sum() + params[1].sum()).backward()
    scaler.clip_grad_norm_(optimizers[1], 1.0)
    params[1].grad[0] = INF
    for optimizer in optimizers:
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer)


def test_unchanged_gradients_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass for clipping and step, also where clipping is in place."""
    for norm_type in (2.0, INF):
        case = Case("dense")
        case.backward()
        case.scaler.clip_grad_norm_(case.optimizer, 1.0, norm_type)
        with monkeypatch.context() as patch:
            patch.setattr(case.scaler, "_examine", _fail)
            case.step()


# ---- inference mode ----


@pytest.mark.parametrize("how", ["scale", "load", "register", "set"])
def test_scales_that_were_made_in_inference_mode(how: str) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], lr=0.5)
    if how != "scale":
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.inference_mode():
        if how == "scale":  # of the loss of an evaluation
            scaler.scale(p.sum())
        elif how == "load":
            scaler.load_state_dict(scaler.state_dict())
        elif how == "register":
            scaler.register(nn.Sequential(BoundaryLinear(2, 1, group="aux")))
        else:
            scaler._scale = torch.tensor(8.0)
    for _ in range(2):
        optimizer.zero_grad()
        x = scaler.boundary(p, "aux") if how == "register" else p
        scaler.scale(x.square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert p.tolist() == [0.0, 0.0]


def test_a_group_that_comes_in_inference_mode_before_the_step() -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], lr=0.5)
    scaler.scale(scaler.boundary(p, "first").sum()).backward()
    with torch.inference_mode():
        scaler.register(nn.Sequential(BoundaryLinear(2, 1, group="aux")))
    optimizer.zero_grad()
    scaler.scale(scaler.boundary(p, "first").sum()).backward()
    scaler.step(optimizer)
    assert p.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("kind", ["half", "fused"])
def test_gradients_that_are_unscaled_in_inference_mode(kind: str) -> None:
    """They are gradients like others: changed by hand, added to, stepped with."""
    table = fastemb.nn.EmbeddingBag(1, 1, mode="sum", sparse="fused")
    weight = table.weight if kind == "fused" else nn.Parameter(torch.zeros(1, 1).half())
    nn.init.zeros_(weight)
    loss = lambda: (table(torch.tensor([[0]])) if kind == "fused" else weight).sum()  # noqa: E731
    optimizer = optim.SGD([weight], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss()).backward()
    with torch.inference_mode():
        scaler.unscale_(optimizer)
    loss().backward()
    scaler.step(optimizer)
    assert weight.tolist() == [[-2.0]]
