"""What `fastemb.amp.GradScaler` refuses: mixed scales, unscaled losses, arguments."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from amp_cases import IDS, group_scales, scaled
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastemb import optim
from fastemb.amp import BoundaryLinear, GradScaler, GroupConfig

INF = float("inf")
NAN = float("nan")


def test_a_tied_table_is_refused_by_name() -> None:
    scaler, model = scaled()
    model.aux_table.weight = model.main_table.weight
    with pytest.raises(RuntimeError, match=r"main_table.weight is reached .* 'root' .* 'aux'|"
                       r"main_table.weight is reached .* 'aux' .* 'root'"):  # fmt: skip
        scaler.scale(model(IDS))
    scaler = GradScaler("cpu")
    uses = [scaler.boundary(t(IDS), "aux") for t in (model.main_table, model.aux_table)]
    scaler.scale((uses[0] * uses[1]).sum()).backward()  # all of them in one group


def test_two_towers_that_share_a_table() -> None:
    for groups in (("user", "user"), ("user", "item")):
        scaler = GradScaler("cpu")
        table = nn.Embedding(4, 2)
        towers = [nn.Linear(2, 2), nn.Linear(2, 2)]
        outputs = [
            scaler.boundary(tower(table(IDS % 4)), group)
            for tower, group in zip(towers, groups, strict=True)
        ]
        loss = (outputs[0] * outputs[1]).sum()
        if groups[0] == groups[1]:
            scaler.scale(loss).backward()
        else:
            with pytest.raises(RuntimeError, match=r"parameter 0 of shape \(4, 2\) is reached"):
                scaler.scale(loss)


def test_two_losses_in_one_iteration() -> None:
    """The second reaches through a boundary what the first has reached without."""
    for declared in (True, False):
        groups = {"aux": GroupConfig()} if declared else None
        scaler = GradScaler("cpu", groups=groups)
        layer = nn.Linear(2, 1)
        x = torch.ones(1, 2)
        scaler.scale(layer(x).sum()).backward()
        with pytest.raises(RuntimeError, match="reached through the groups 'root' and 'aux'"):
            scaler.scale(scaler.boundary(layer(x), "aux").sum())


def test_a_boundary_that_two_groups_share() -> None:
    scaler = GradScaler("cpu")
    p = nn.Parameter(torch.ones(1))
    inner = scaler.boundary(p * 2, "inner")
    with pytest.raises(RuntimeError, match=r"the boundary of group 'inner' \(inner\) is reached"):
        scaler.scale((inner + scaler.boundary(inner * 1, "outer")).sum())


def test_a_loss_that_was_not_scaled() -> None:
    scaler, model = scaled()
    with pytest.raises(RuntimeError, match=r"group 'aux' \(aux\) from a loss that did not go"):
        model(IDS).backward()
    loss = model(IDS)
    scaler.scale(loss).backward(retain_graph=True)
    scaler.step(optim.SGD(model.parameters()))
    scaler.update()
    with pytest.raises(RuntimeError, match=r"did not go through scaler\.scale"):
        loss.backward()


def test_dtypes_that_no_boundary_takes() -> None:
    x = torch.ones(2, 2, dtype=torch.complex64, requires_grad=True)
    scaler = GradScaler("cpu")
    layer = BoundaryLinear(2, 2, dtype=torch.complex64)
    match = r"^GradScaler\.boundary: x must be .* got complex64 at the boundary"
    layer(x).abs().sum().backward()
    scaler.register(layer)
    for use in (lambda: scaler.boundary(x, "aux"), lambda: layer(x)):
        with pytest.raises(TypeError, match=match):
            use()


def test_losses_by_name() -> None:
    loss = torch.ones((), requires_grad=True)
    scaler = GradScaler("cpu", groups={"aux": {}})
    for losses in ({"main": loss}, [loss, {"m": loss}], "main"):
        with pytest.raises(ValueError, match=r"^GradScaler\.scale: outputs must be .*, got 'm"):
            scaler.scale(losses)
    (scaled,) = scaler.scale({"main": loss}.values())
    assert scaled.item() == 2.0**16


def test_a_boundary_of_another_scaler() -> None:
    _, model = scaled()
    with pytest.raises(RuntimeError, match="the boundary aux belongs to another GradScaler"):
        GradScaler("cpu", groups={"x": {}}).scale(model(IDS))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init_scale": 3.0}, "init_scale must be a power of two"),
        ({"growth_factor": 1.5}, "growth_factor must be a power of two"),
        ({"backoff_factor": 0.6}, "backoff_factor must be a power of two"),
        ({"min_scale": 0.3}, "min_scale must be a power of two"),
        ({"max_scale": 70000.0}, "max_scale must be a power of two"),
    ],
)
def test_powers_of_two(options: dict[str, float], match: str) -> None:
    GradScaler("cpu", **options)
    with pytest.raises(ValueError, match=f"^GradScaler: {match}"):
        GradScaler("cpu", **options, groups={"aux": {}})
    with pytest.raises(ValueError, match=rf"^GradScaler: groups\['aux'\]: {match}"):
        GradScaler("cpu", groups={"aux": options})
    p = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=match):
        GradScaler("cpu", **options).boundary(p, "aux")


def test_other_arguments_of_groups() -> None:
    for groups, match in (
        ({"root": {}}, "a group must have a name other than 'root'"),
        ({"": {}}, "a group must have a name"),
        ({"aux": {"scale": 1.0}}, "has scale; it can have init_scale, growth_factor"),
        ({"aux": {"growth_factor": 0.5}}, "growth_factor must be >= 1"),
        ({"aux": {"backoff_factor": 2.0}}, "backoff_factor must be > 0 and at most 1"),
        ({"aux": {"init_scale": 0.5}}, "init_scale must be between min_scale"),
        ({"aux": {"hysteresis": 1.5}}, "hysteresis must be an int >= 1"),
    ):
        with pytest.raises(ValueError, match=match):
            GradScaler("cpu", groups=groups)
    scaler = GradScaler("cpu", groups={"aux": {}})
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="new_scale must be a power of two"):
        scaler.update(3.0)
    for value in (3.0, 0.0, INF, float("nan")):
        with pytest.raises(ValueError, match=r"^GradScaler.update: new_scale must be"):
            scaler.update(torch.tensor([value]))
    assert group_scales(scaler) == {"root": 2.0**16, "aux": 2.0**16}
    scaler.update(torch.tensor(8.0))
    assert scaler.get_scale() == 8.0
    scaler.load_state_dict(scaler.state_dict())
    scaler.update(4.0)
    assert group_scales(scaler) == {"root": 4.0, "aux": 2.0**16}
    assert scaler.group_names == ["root", "aux"]


def test_a_group_that_comes_after_a_scale_without_powers_of_two() -> None:
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(3.0))
    with pytest.raises(ValueError, match="init_scale must be a power of two"):
        scaler.boundary(nn.Parameter(torch.ones(1)), "aux")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"groups": 3}, "groups must map names to GroupConfig or dict, got 3"),
        ({"groups": ["e"]}, r"groups must map names to GroupConfig or dict, got \['e'\]"),
        ({"groups": {"e": 3}}, r"groups\['e'\] must be a GroupConfig or dict, got 3"),
        ({"groups": {"e": None}}, r"groups\['e'\] must be a GroupConfig or dict, got None"),
        ({"max_consecutive_skips": None}, "max_consecutive_skips must be a number, got None"),
        ({"max_consecutive_skips": "9"}, "max_consecutive_skips must be a number, got '9'"),
    ],
)
def test_arguments_of_other_types(options: dict[str, Any], match: str) -> None:
    with pytest.raises(TypeError, match=f"^GradScaler: {match}"):
        GradScaler("cpu", **options)


def test_max_consecutive_skips_of_nan() -> None:
    with pytest.raises(ValueError, match="max_consecutive_skips must be >= 1, got nan"):
        GradScaler("cpu", max_consecutive_skips=float("nan"))


@pytest.mark.parametrize("known", ["by the loss", "by register", "not at all"])
def test_loading_while_gradients_wait(known: str) -> None:
    """The state says nothing of which gradients have which scale."""
    groups = {"aux": {"init_scale": 2.0}} if known == "by the loss" else None
    scaler = GradScaler("cpu", init_scale=8.0, groups=groups)
    p = nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([p], lr=1.0)
    if known == "by register":
        scaler.register(nn.ParameterList([p]), optimizer)
    state = scaler.state_dict()
    scaler.load_state_dict(state)
    x = scaler.boundary(p, "aux") if known == "by the loss" else p
    scaler.scale(x.sum()).backward()
    if known == "not at all":  # as with torch's
        scaler.load_state_dict(state)
    else:
        with pytest.raises(
            RuntimeError, match=r"^GradScaler\.load_state_dict: there are gradients"
        ):
            scaler.load_state_dict(state)
    scaler.step(optimizer)
    assert p.item() == 0.0
    scaler.load_state_dict(state)  # used
    scaler.scale(p.sum()).backward()
    optimizer.zero_grad()
    scaler.load_state_dict(state)  # dropped


def test_get_scale_names_the_groups() -> None:
    scaler = GradScaler("cpu", groups={"aux": {"init_scale": 8.0}})
    assert scaler.get_scale("aux") == 8.0
    assert scaler.get_scale() == scaler.get_scale("root") == 2.0**16
    with pytest.raises(ValueError, match="group must be one of root, aux, got 'main'"):
        scaler.get_scale("main")


@pytest.mark.parametrize("value", ["a", True, [8.0]])
def test_new_scales_that_are_no_numbers(value: Any) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    with pytest.raises(TypeError, match=r"^GradScaler.update: new_scale must be a number or a"):
        scaler.update(value)
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("value", [INF, 2.0**128, 1e39, NAN])
def test_scales_that_no_gradient_can_have(value: float) -> None:
    with pytest.raises(ValueError, match="init_scale must be"):
        GradScaler("cpu", init_scale=value)
    for bad in (value, -value, 0.0):
        scaler = GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        for new_scale in (bad, torch.tensor(bad)):
            with pytest.raises(ValueError, match="new_scale must be"):
                scaler.update(new_scale)
        with pytest.raises(ValueError, match="_scale must be"):
            scaler._scale = torch.tensor(bad)
        assert scaler.get_scale() == 8.0


def test_limits_hold_for_a_new_scale() -> None:
    scaler = GradScaler("cpu", init_scale=8.0, min_scale=4.0, max_scale=16.0)
    scaler.scale(torch.zeros(()))
    for value in (2.0, 32.0):
        with pytest.raises(ValueError, match="between min_scale"):
            scaler.update(value)
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("growth_factor", (3.0, 1.0, np.float32(4.0)), (0.5, NAN, INF, "2")),
        ("backoff_factor", (0.25, 1.0), (2.0, 0.0, -1.0, NAN)),
        ("growth_interval", (10**10, sys.maxsize, np.int64(7)), (0, -1, 1.5)),
    ],
)
def test_setters(name: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for value in good:
        getattr(scaler, f"set_{name}")(value)
        if value != 1.0:  # which torch's constructor refuses
            GradScaler("cpu", **{name: value})
        scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    before = getattr(scaler, f"get_{name}")()
    for value in bad:
        with pytest.raises((ValueError, TypeError), match=f"set_{name}: {name} must be"):
            getattr(scaler, f"set_{name}")(value)
    assert getattr(scaler, f"get_{name}")() == before


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s.pop("growth_interval"), "the state has no growth_interval"),
        (lambda s: s.update(scale=NAN), "scale must be a finite number >= 0, got nan"),
        (lambda s: s.update(scale=INF), "scale must be a finite number >= 0, got inf"),
        (lambda s: s.update(scale=-4.0), "scale must be a finite number >= 0, got -4.0"),
        (lambda s: s.update(growth_factor=0.5), "growth_factor must be >= 1"),
        (lambda s: s["fastemb"]["groups"]["aux"].pop("hysteresis"), "has no hysteresis"),
        (lambda s: s["fastemb"]["groups"]["aux"].update(scale=3.0), "a power of two"),
        (lambda s: s["fastemb"]["groups"]["aux"].update(scale=INF), "between min_scale"),
        (lambda s: s["fastemb"]["groups"]["aux"].update(growth_factor=3.0), "a power of two"),
        (lambda s: s["fastemb"]["groups"]["aux"].update(scale=None), "'aux'.*scale must be"),
        (lambda s: s["fastemb"]["groups"]["aux"].update(skips=2**40), "'aux'.*skips must be"),
        (lambda s: s["fastemb"]["groups"]["aux"].update(skips=-1), "'aux'.*skips must be"),
        (lambda s: s["fastemb"]["groups"]["aux"].update(growth_tracker="a"), "growth_tracker must"),
        (lambda s: s["fastemb"]["groups"]["root"].update(skips=None), "'root'.*skips must be"),
        (lambda s: s["fastemb"]["groups"].update({"": s["fastemb"]["groups"]["aux"]}), "a name"),
        (lambda s: s["fastemb"]["groups"].update(aux=3), "'aux'.* must be a dict, got 3"),
        (lambda s: s["fastemb"].pop("version"), "fastemb: the state has no version"),
        (lambda s: s["fastemb"].pop("groups"), "fastemb: the state has no groups"),
        (lambda s: s["fastemb"].update(mode="bf16"), "mode must be one of"),
        (lambda s: s.update(fastemb=None), "fastemb must be a dict, got None"),
        (lambda s: s.update(_growth_tracker=-5), "_growth_tracker must be a whole number"),
        (lambda s: s.update(_growth_tracker=2**40), "_growth_tracker must be a whole number"),
        (lambda s: s.update(scale=torch.tensor([8.0])), "scale must be a finite number"),
    ],
)
def test_states_that_make_no_sense(change: Callable[[Any], Any], match: str) -> None:
    """Nothing of them is loaded."""
    other = GradScaler("cpu", init_scale=2.0, groups={"aux": {"init_scale": 4.0}})
    other.set_growth_interval(7)
    state = copy.deepcopy(other.state_dict())
    change(state)
    scaler = GradScaler("cpu", init_scale=8.0, groups={"aux": {"init_scale": 16.0}})
    before = scaler.state_dict()
    with pytest.raises((ValueError, TypeError), match=match):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


class Recomputed(torch.autograd.Function):
    """Checkpointing as others write it."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.x = block, x.detach().requires_grad_()
        return block(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.block(ctx.x).backward(grad)
        return None, ctx.x.grad


@pytest.mark.parametrize("use", ["step", "unscale_", "clip_grad_norm_"])
@pytest.mark.parametrize("how", ["recomputed", "copied", "a waiting one of an unknown optimizer"])
@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD])
def test_gradients_that_no_loss_is_known_to_reach(make: Any, how: str, use: str) -> None:
    """With groups, their scale may be any; nothing is written before the refusal."""
    block, head = nn.Linear(2, 1), nn.Linear(1, 1)
    scaler = GradScaler("cpu", init_scale=1024.0, groups={"aux": {"init_scale": 4.0}})
    masters = copy.deepcopy(block) if how == "copied" else block
    scaler.register(masters)
    optimizer = make([*head.parameters(), *masters.parameters()], lr=1.0)
    x = torch.ones(1, 2, requires_grad=True)
    y = Recomputed.apply(block, x) if how == "recomputed" else block(x)
    scaler.scale((head(torch.ones(1, 1)) + scaler.boundary(y, "aux")).sum()).backward()
    if how == "copied":
        for master, p in zip(masters.parameters(), block.parameters(), strict=True):
            master.grad = p.grad
    elif how != "recomputed":
        other = optim.SGD([x], lr=1.0)
        scaler.step(other)
        scaler.update()
        head.zero_grad()
        scaler.scale(head(torch.ones(1, 1)).sum()).backward()
    params = [*head.parameters(), *masters.parameters()]
    before = copy.deepcopy([(p, p.grad) for p in params])
    call = getattr(scaler, use)
    with pytest.raises(RuntimeError, match=r"^GradScaler\.\w+: weight has a gradient, but"):
        call(optimizer, *([1.0] if use == "clip_grad_norm_" else []))
    for p, (q, grad) in zip(params, before, strict=True):
        assert torch.equal(p, q)
        assert p.grad is not None
        assert torch.equal(p.grad, grad)
    masters.zero_grad(set_to_none=False)  # zeros have any scale
    scaler.step(optimizer)
    assert not scaler.step_was_skipped(optimizer)


def test_gradients_that_a_checkpoint_of_the_root_hides() -> None:
    """It is refused behind a boundary, so they have the scale of the loss."""
    block, head = nn.Linear(2, 1), nn.Linear(2, 1)
    scaler = GradScaler("cpu", init_scale=1024.0, groups={"aux": {"init_scale": 4.0}})
    optimizer = optim.SGD([*block.parameters(), *head.parameters()], lr=1.0)
    before = block.bias.item()
    x = torch.ones(1, 2, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=True) + scaler.boundary(head(torch.ones(1, 2)), "aux")
    scaler.scale(y.sum()).backward()
    scaler.step(optimizer)
    assert before - block.bias.item() == pytest.approx(1.0)
