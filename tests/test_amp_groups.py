"""Scale groups: which parameters are in one, who is to blame for an overflow, who is skipped."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from amp_cases import AUX, IDS, MAIN, backward, group_scales, scaled
from optim_cases import assert_same_bits, bits, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastemb
from fastemb import optim
from fastemb.amp import GradScaler, GroupConfig

INF, NAN = float("inf"), float("nan")


# ---- gradients ----


def test_gradients_have_the_scale_of_their_group() -> None:
    scaler, model = scaled(groups={"aux": {"init_scale": 2.0**12}})
    plain = copy.deepcopy(model)
    plain(IDS).backward()
    backward(scaler, model)
    for names, scale in ((MAIN, 2.0**4), (AUX, 2.0**12)):
        for name in names:
            want = plain.get_parameter(name).grad * scale
            assert_same_bits(model.get_parameter(name).grad, want)


@pytest.mark.parametrize("functional", [nn.functional, fastemb.functional])
def test_sparse_gradients_pass_boundaries(functional: Any) -> None:
    """Of a weight behind a boundary, whose rows are looked up in front of it."""
    scaler = GradScaler("cpu", init_scale=2.0**4, groups={"aux": {"init_scale": 2.0**12}})
    p = nn.Parameter(torch.ones(4, 2))
    optimizer = optim.SGD([p], lr=1.0)
    ids = torch.tensor([3, 1, 3])
    for factor in (1.0, INF):
        optimizer.zero_grad()
        rows = functional.embedding(ids, scaler.boundary(p, "aux"), sparse=True)
        scaler.scale((rows * factor).sum()).backward()
        assert p.grad.is_sparse
        want = torch.tensor([0.0, 1.0, 0.0, 2.0]) * 2.0**12 * factor
        assert_same_bits(p.grad.to_dense()[:, 0].nan_to_num(0.0), want.nan_to_num(0.0))
        scaler.step(optimizer)
        scaler.update()
        assert p[:, 0].tolist() == [1.0, 0.0, 1.0, -1.0]
    assert group_scales(scaler) == {"root": 2.0**3, "aux": 2.0**12}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("skip", ["optimizer", "group", "all"])
@pytest.mark.parametrize("make", [optim.Adam, optim.SGD, torch.optim.Adam, torch.optim.SGD])
def test_training_is_that_without_scales(make: Any, skip: str, explicit: bool) -> None:
    if skip == "group" and make.__module__.startswith("torch"):
        pytest.skip("refused, see below")
    scaler, model = scaled(groups={"aux": GroupConfig(2.0**12, growth_interval=2)}, skip=skip)
    plain = copy.deepcopy(model)
    optimizers = [make(m.parameters(), lr=0.1) for m in (model, plain)]
    for _ in range(5):
        backward(scaler, model)
        if explicit:
            scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.update()
        plain.zero_grad()
        plain(IDS).backward()
        optimizers[1].step()
    assert snapshot(optimizers[0]) == snapshot(optimizers[1])
    assert group_scales(scaler) == {"root": 2.0**4, "aux": 2.0**14}


def test_fused_optimizers_of_torch() -> None:
    scaler, model = scaled()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1, fused=True) for m in (model, plain)]
    for bad in ({"aux__weight": INF}, {}):
        before = snapshot(optimizers[0])
        backward(scaler, model, **bad)
        scaler.step(optimizers[0])
        if bad:
            assert [p for p, _ in snapshot(optimizers[0])] == [p for p, _ in before]
        scaler.update()
    plain(IDS).backward()
    optimizers[1].step()
    assert snapshot(optimizers[0]) == snapshot(optimizers[1])


def test_clipping_over_groups() -> None:
    scaler, model = scaled(groups={"aux": {"init_scale": 2.0**12}})
    plain = copy.deepcopy(model)
    optimizers = [optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    backward(scaler, model)
    norm = scaler.clip_grad_norm_(optimizers[0], 0.25)
    scaler.step(optimizers[0])
    plain(IDS).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
    assert float(expected) > 0.25
    optimizers[1].step()
    torch.testing.assert_close(norm, expected)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


# ---- who is to blame ----


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize(
    ("name", "expected"),
    [("main__weight", {"root": 8.0, "aux": 16.0}), ("aux__bias", {"root": 16.0, "aux": 8.0})],
)
def test_a_group_backs_off_for_its_own(name: str, expected: dict[str, float], value: float) -> None:
    scaler, model = scaled()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    backward(scaler, model, **{name: value})
    scaler.step(optimizer)
    scaler.update()
    assert group_scales(scaler) == expected


def test_what_comes_in_broken_is_the_fault_outside() -> None:
    scaler, model = scaled()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model.zero_grad()
    scaler.scale(model(IDS, weight=INF)).backward()
    assert not torch.isfinite(model.aux_table.weight.grad[IDS]).any()
    assert torch.isfinite(model.main_table.weight.grad).all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_was_skipped(optimizer)
    assert group_scales(scaler) == {"root": 8.0, "aux": 16.0}


def test_what_the_boundary_breaks_is_the_fault_of_its_group() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, groups={"aux": {"init_scale": 2.0**24}})
    p = nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = optim.SGD([p], lr=0.1)
    scaler.scale(scaler.boundary(p, "aux").sum().float()).backward()
    assert torch.isinf(p.grad).all()
    scaler.step(optimizer)
    scaler.update()
    assert group_scales(scaler) == {"root": 1.0, "aux": 2.0**23}


def test_what_the_boundary_breaks_and_no_parameter_gets() -> None:
    scaler = GradScaler("cpu", init_scale=1.0, groups={"aux": {"init_scale": 2.0**10}})
    p = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = optim.SGD([p], lr=0.1)
    x = torch.cat([p, torch.ones(1, dtype=torch.float16)])
    weights = torch.tensor([1.0, 2.0**10], dtype=torch.float16)
    scaler.scale((scaler.boundary(x, "aux") * weights).sum()).backward()
    assert torch.isfinite(p.grad).all()
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    scaler.update()
    assert group_scales(scaler) == {"root": 1.0, "aux": 2.0**9}


def nested(scaler: GradScaler, factors: tuple[float, float, float]) -> list[nn.Parameter]:
    """root -> outer -> inner, a parameter in each; the factors come into the gradients there."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    innermost = params[2] * factors[2]
    inner = scaler.boundary(innermost, "inner") + params[1]
    outer = scaler.boundary(inner * factors[1], "outer") + params[0]
    scaler.scale((outer * factors[0]).sum()).backward()
    return params


@pytest.mark.parametrize(("broken", "blamed"), [(0, "root"), (1, "outer"), (2, "inner")])
def test_nested_boundaries(broken: int, blamed: str) -> None:
    groups = {"outer": {"init_scale": 8.0}, "inner": {"init_scale": 32.0}}
    scaler = GradScaler("cpu", init_scale=2.0, groups=groups)
    params = nested(scaler, (1.0, 1.0, 1.0))
    assert [float(p.grad) for p in params] == [2.0, 8.0, 32.0]
    scaler = GradScaler("cpu", init_scale=2.0, groups=groups)
    factors = [1.0, 1.0, 1.0]
    factors[broken] = INF
    params = nested(scaler, tuple(factors))
    optimizer = optim.SGD(params, lr=0.1)
    scaler.step(optimizer)
    scaler.update()
    expected = {"root": 2.0, "outer": 8.0, "inner": 32.0}
    expected[blamed] /= 2
    assert group_scales(scaler) == expected
    assert_same_bits(params[0].detach(), torch.ones(1))


def test_groups_without_gradients_stand_still() -> None:
    scaler, model = scaled(groups={"aux": {"growth_interval": 2}, "idle": {"growth_interval": 1}})
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        backward(scaler, model)
        scaler.step(optimizer)
        scaler.update()
    assert group_scales(scaler) == {"root": 16.0, "aux": 32.0, "idle": 16.0}


def test_limits_and_hysteresis_of_a_group() -> None:
    config = GroupConfig(8.0, growth_interval=1, hysteresis=2, min_scale=4.0, max_scale=16.0)
    scaler, model = scaled(groups={"aux": config})
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    seen = []
    for bad in (0, 0, 1, 0, 1, 1, 1, 1, 0, 1):
        backward(scaler, model, **({"aux__weight": INF} if bad else {}))
        scaler.step(optimizer)
        scaler.update()
        seen.append(group_scales(scaler)["aux"])
    assert seen == [16, 16, 16, 16, 16, 8, 4, 4, 8, 8]


# ---- who is skipped ----


@pytest.mark.parametrize("bad", [MAIN[1], AUX[1]])
def test_skipping_a_group(bad: str) -> None:
    scaler, model = scaled(skip="group")
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    params = dict(model.named_parameters())
    before = {name: bits(p) for name, p in params.items()}
    backward(scaler, model, **{bad.replace(".", "__"): NAN})
    scaler.step(optimizer)
    moved = {name for name, p in params.items() if bits(p) != before[name]}
    skipped = set(MAIN if bad in MAIN else AUX)
    assert moved == params.keys() - skipped
    assert {n for n, p in params.items() if float(optimizer.state[p]["step"]) == 0} == skipped
    assert not scaler.step_was_skipped(optimizer)
    scaler.update()
    backward(scaler, model, main__bias=INF, aux__bias=INF)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


def test_clipping_leaves_groups_to_themselves() -> None:
    """The norm of a group that is not finite would reach the other one."""
    for explicit in (False, True):
        scaler, model = scaled(skip="group", groups={"aux": {"init_scale": 2.0**12}})
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        backward(scaler, model, aux__weight=INF)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        grads = [model.get_parameter(name).grad / 2.0**4 for name in MAIN]
        want = torch.stack([g.norm() for g in grads]).norm()
        if explicit:
            scaler.unscale_(optimizer)
        norm = scaler.clip_grad_norm_(optimizer, 0.25)
        assert want > 0.25
        torch.testing.assert_close(norm, want)
        scaler.step(optimizer)
        for name, grad in zip(MAIN, grads, strict=True):
            moved = before[name] - model.get_parameter(name).detach()
            torch.testing.assert_close(moved, grad * (0.25 / want), rtol=1e-4, atol=1e-6)
        for name in AUX:
            assert_same_bits(model.get_parameter(name), before[name])
    scaler.update()
    backward(scaler, model)
    with pytest.raises(ValueError, match=r"with skip='group' norm_type must be 2 .* got 1.0 and"):
        scaler.clip_grad_norm_(optimizer, 1.0, 1.0)


def test_clipping_after_unscale_keeps_what_was_found() -> None:
    """Although the gradients have another scale by then, and somebody has mended them."""
    numbers = []
    for explicit in (False, True):
        scaler, model = scaled(skip="group")
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        backward(scaler, model, aux__weight=INF, main__bias=2.0**-24)
        before = bits(model.aux.bias)
        if explicit:
            scaler.unscale_(optimizer)
            model.aux.weight.grad.nan_to_num_(posinf=0.0)
        scaler.clip_grad_norm_(optimizer, 0.25)
        scaler.step(optimizer)
        assert bits(model.aux.bias) == before
        scaler.update()
        assert group_scales(scaler) == {"root": 16.0, "aux": 8.0}
        numbers.append(scaler.stats())
    assert numbers[0] == numbers[1]


def test_skipping_optimizers() -> None:
    """One optimizer for each head; an overflow in one group is that optimizer's."""
    for skip, both in (("optimizer", False), ("all", True)):
        scaler, model = scaled(skip=skip)
        heads = [[model.get_parameter(n) for n in names] for names in (MAIN, AUX)]
        optimizers = [optim.SGD(p, lr=0.1) for p in heads]
        scaler.register(model, *optimizers)
        before = snapshot(optimizers[0])
        backward(scaler, model, aux__weight=INF)
        for optimizer in optimizers:
            scaler.step(optimizer)
        assert [scaler.step_was_skipped(o) for o in optimizers] == [both, True]
        assert (snapshot(optimizers[0]) == before) == both
        scaler.update()
        assert group_scales(scaler) == {"root": 16.0, "aux": 8.0}


def test_skipping_groups_needs_our_optimizers() -> None:
    scaler, model = scaled(skip="group")
    backward(scaler, model)
    with pytest.raises(RuntimeError, match=r"skip='group' needs an optimizer of .*; SGD is none"):
        scaler.step(torch.optim.SGD(model.parameters()))


# ---- with the rest of torch ----


@pytest.mark.parametrize("where", ["around", "within"])
def test_checkpointing(where: str) -> None:
    grads = []
    for how in ("plain", "checkpoint"):
        torch.manual_seed(0)
        scaler = GradScaler("cpu", groups={"aux": {"init_scale": 2.0**10}})
        block, head = nn.Linear(3, 3), nn.Linear(3, 1)

        def run(x: Tensor, block: nn.Module = block, scaler: GradScaler = scaler) -> Tensor:
            y = block(x)
            return scaler.boundary(y, "aux").sin() if where == "within" else y.sin()

        x = torch.ones(2, 3)
        y = run(x) if how == "plain" else checkpoint(run, x, use_reentrant=False)
        if where == "around":
            y = scaler.boundary(y, "aux")
        scaler.scale(head(y).sum()).backward()
        grads.append([bits(p.grad) for p in (*block.parameters(), *head.parameters())])
    assert grads[0] == grads[1]


def test_reentrant_checkpointing_behind_a_boundary() -> None:
    scaler = GradScaler("cpu")
    block = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    y = scaler.boundary(checkpoint(block, x, use_reentrant=True), "aux")
    with pytest.raises(RuntimeError, match="use_reentrant=True behind a boundary"):
        scaler.scale(y.sum())


def test_retained_graphs_and_several_losses() -> None:
    scaler, model = scaled(groups={"aux": {"init_scale": 2.0**12}})
    plain = copy.deepcopy(model)
    loss, other = (m(IDS) for m in (model, plain))
    for part in scaler.scale([loss, loss * 2]):
        part.backward(retain_graph=True)
    other.backward(retain_graph=True)
    (other * 2).backward()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)


def test_a_group_that_comes_late() -> None:
    """Declared by a boundary after scales and flags exist."""
    scaler, model = scaled(groups={"first": {}})
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    p = nn.Parameter(torch.ones(1))
    scaler.scale(scaler.boundary(p * INF, "first").sum()).backward()
    backward(scaler, model)
    scaler.step(optim.SGD([p]))
    scaler.step(optimizer)
    scaler.update()
    assert group_scales(scaler) == {"root": 16.0, "first": 8.0, "aux": 16.0}
    assert scaler._scale.data_ptr() == scaler._scales.values.data_ptr()


def test_no_gradient_wanted() -> None:
    scaler = GradScaler("cpu")
    x = torch.ones(1)
    assert scaler.boundary(x, "aux") is x
    x.requires_grad_()
    with torch.no_grad():
        assert scaler.boundary(x, "aux") is x


# ---- state ----


def test_state_of_groups() -> None:
    scaler, model = scaled(groups={"aux": GroupConfig(2.0**12, hysteresis=2, growth_interval=7)})
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    for bad in ({}, {"aux__weight": INF}):
        backward(scaler, model, **bad)
        scaler.step(optimizer)
        scaler.update()
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert state["fastemb"]["groups"]["aux"]["skips"] == 1

    for used in (False, True):
        other = GradScaler("cpu")
        if used:
            other.scale(torch.ones(()))
        other.load_state_dict(state)
        assert other.state_dict() == state
    for again in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert again.state_dict() == state

    torch.amp.GradScaler("cpu").load_state_dict(state)
    of_torch = torch.amp.GradScaler("cpu", init_scale=2.0**6).state_dict()
    scaler.load_state_dict(of_torch)
    assert group_scales(scaler) == {"root": 2.0**6, "aux": 2.0**6}
    assert scaler.state_dict()["fastemb"]["groups"]["aux"]["hysteresis"] == 2
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="init_scale must be a power of two"):
        scaler.load_state_dict({**of_torch, "scale": 3.0})
    with pytest.raises(ValueError, match="growth_factor must be a power of two"):
        scaler.load_state_dict({**of_torch, "growth_factor": 3.0})
    assert scaler.state_dict() == before
    with pytest.raises(ValueError, match="cannot load a state of version 2"):
        scaler.load_state_dict({**of_torch, "fastemb": {"version": 2}})


def saved_by(mode: str, **group: float) -> dict[str, Any]:
    scaler = GradScaler("cpu", mode=mode, groups={"aux": group})
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([p, q])
    scaler.scale((p + scaler.boundary(q, "aux")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.state_dict()


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_states_with_scales_in_guard(declared: bool, used: bool) -> None:
    """All scales stay 1, and the gradients are the true ones."""
    scaler = GradScaler("cpu", mode="guard", groups={"aux": {}} if declared else None)
    if used:
        scaler.scale(torch.ones(()))
    scaler.load_state_dict(saved_by("scale", init_scale=2.0**12, hysteresis=3))
    p = nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([p])
    for clean in range(2, 4):
        optimizer.zero_grad()
        scaler.scale(scaler.boundary(p, "aux").sum()).backward()
        assert p.grad.tolist() == [1.0]
        scaler.step(optimizer)
        scaler.update()
        assert group_scales(scaler) == {"root": 1.0, "aux": 1.0}
        entry = scaler.state_dict()["fastemb"]["groups"]["aux"]
        assert (entry["growth_tracker"], entry["hysteresis"]) == (clean, 3)


@pytest.mark.parametrize("own", [None, {"growth_interval": 1}, {"init_scale": 8.0}])
def test_states_of_guard_have_no_scales(own: dict[str, float] | None) -> None:
    """Their groups start over, as this scaler has them if it does, and move again."""
    state = saved_by("guard", init_scale=2.0**12, growth_interval=2)
    scaler = GradScaler("cpu", groups=own and {"aux": own})
    scaler.load_state_dict(state)
    first = 2.0**12 if own is None else own.get("init_scale", 1.0)
    assert group_scales(scaler) == {"root": 1.0, "aux": first}
    p = nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([p])
    scaler.scale(scaler.boundary(p, "aux").sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    grows = own is None or "growth_interval" in own
    assert group_scales(scaler)["aux"] == first * (2.0 if grows else 1.0)


def test_groups_that_a_state_lacks_start_over() -> None:
    scaler = GradScaler("cpu", groups={"aux": {"init_scale": 4.0}, "other": {}})
    scaler.load_state_dict(GradScaler("cpu", init_scale=64.0).state_dict())
    assert group_scales(scaler) == {"root": 64.0, "aux": 4.0, "other": 64.0}


def test_numbers_of_states_as_tensors() -> None:
    state = saved_by("scale", init_scale=8.0)
    as_tensors = {k: torch.tensor(v) for k, v in state.items() if k != "fastemb"}
    entry = {k: torch.tensor(v) for k, v in state["fastemb"]["groups"]["aux"].items()}
    groups = {**state["fastemb"]["groups"], "aux": entry}
    scaler = GradScaler("cpu")
    scaler.load_state_dict({**as_tensors, "fastemb": {**state["fastemb"], "groups": groups}})
    assert scaler.state_dict() == state
    assert all(type(value) in (int, float, dict) for value in scaler.state_dict().values())
