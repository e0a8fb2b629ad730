"""Groups, options and their errors, schedulers, state_dict in both directions, pickles."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from optim_cases import CLASSES, assert_same_bits, bits, random_rows, snapshot
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fastemb import optim

PAIRS = [
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {}),
    ("SparseAdam", {}),
    ("Adagrad", {"initial_accumulator_value": 0.1}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1}),
    ("SGD", {}),
]


def train(optimizer: torch.optim.Optimizer, seed: int, steps: int = 2) -> None:
    """Sparse gradients for SparseAdam, dense ones for the others."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = torch.randn(param.shape, generator=generator).to(param.dtype)
                sparse = type(optimizer).__name__ == "SparseAdam"
                param.grad = grad.to_sparse(1) if sparse else grad
        optimizer.step()


def saved(state: Any, weights_only: bool = True) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def fused(cls: type) -> dict[str, bool]:
    in_torch = cls.__module__.startswith("torch.") and cls.__name__ != "SparseAdam"
    return {"fused": True} if in_torch else {}


# ---- state_dict ----


@pytest.mark.parametrize(("name", "options"), PAIRS)
def test_state_dicts_go_to_torch_and_back(name: str, options: dict[str, Any]) -> None:
    ours, theirs = getattr(optim, name), getattr(torch.optim, name)
    start = [torch.randn(4, 3), torch.randn(5, 2)]
    want = [nn.Parameter(s.clone()) for s in start]
    reference = theirs(want, lr=0.1, **options, **fused(theirs))
    train(reference, 0)
    train(reference, 1)
    for first, second in ((theirs, ours), (ours, theirs), (ours, ours)):
        params = [nn.Parameter(s.clone()) for s in start]
        a = first(params, lr=0.1, **options, **fused(first))
        train(a, 0)
        exported = saved(a.state_dict())
        if first is ours:
            reached = reference.state_dict()["state"]
            extra = {"step"} if "dampening" in options else set()
            for key, state in exported["state"].items():
                assert set(state) == set(reached[key]) | extra
                for entry in set(reached[key]):
                    assert type(state[entry]) is type(reached[key][entry])
        b = second(params, lr=7.0, **options, **fused(second))
        b.load_state_dict(exported)
        assert b.param_groups[0]["lr"] == 0.1
        if second is theirs and exported["param_groups"][0].get("fused", 0) is None:
            for group in b.param_groups:
                group["fused"] = True
        train(b, 1)
        for p, q in zip(params, want, strict=True):
            if name == "SparseAdam":
                torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-6)
            else:
                assert_same_bits(p, q)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_state_dict_is_exact(cls: type[optim.Adam], dtype: torch.dtype) -> None:
    """Saved with weights_only, loaded: the same bits, in memory of their own; and so on."""
    generator = torch.Generator().manual_seed(0)
    options = {optim.AdamW: {"row_bias_correction": True}, optim.SGD: {"momentum": 0.9}}.get(
        cls, {}
    )
    weight = torch.randn(6, 4, generator=generator).to(dtype)
    p, q = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    a, b = cls([p], lr=0.1, **options), cls([q], lr=0.1, **options)
    gradients = [random_rows(generator, 6, 4, 5, dtype) for _ in range(4)]

    def run(optimizer: torch.optim.Optimizer, param: nn.Parameter, of: slice) -> None:
        for gradient in gradients[of]:
            param.grad = gradient
            optimizer.step()

    run(a, p, slice(0, 2))
    q.data.copy_(p.data)
    b.load_state_dict(saved(a.state_dict()))
    assert snapshot(a) == snapshot(b)
    b.load_state_dict(a.state_dict())
    before = snapshot(a)
    run(b, q, slice(2, 4))
    assert snapshot(a) == before  # nothing is shared
    run(a, p, slice(2, 4))
    assert snapshot(a) == snapshot(b)


def test_torch_checkpoint_of_a_bfloat16_model() -> None:
    """Moments become FP32, the master comes from the parameter, also one loaded afterwards."""
    p = nn.Parameter(torch.randn(3, 4).bfloat16())
    theirs = torch.optim.AdamW([p], lr=0.1)
    train(theirs, 0)
    q = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    ours = optim.AdamW([q], lr=0.1)
    train(ours, 5)  # has a master of its own
    ours.load_state_dict(theirs.state_dict())
    q.data.copy_(p.data)
    state = ours.state[q]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert state["exp_avg"].dtype == torch.float32
    assert_same_bits(state["exp_avg"].bfloat16(), theirs.state[p]["exp_avg"])
    fresh = optim.AdamW([nn.Parameter(p.detach().float())], lr=0.1)
    fresh.load_state_dict(theirs.state_dict())
    for optimizer in (ours, fresh):
        param = optimizer.param_groups[0]["params"][0]
        param.grad = torch.ones(3, 4, dtype=param.dtype)
        optimizer.step()
    torch.testing.assert_close(
        ours.state[q]["master"], fresh.param_groups[0]["params"][0].detach(), rtol=1e-6, atol=1e-6
    )


def test_extras_that_went_through_torch_are_made_again() -> None:
    """torch casts all states to the parameter's dtype, and does not keep ours up to date."""
    p = nn.Parameter(torch.ones(4, 2, dtype=torch.bfloat16))
    ours = optim.AdamW([p], lr=0.1, row_bias_correction=True)
    for _ in range(3):
        p.grad = random_rows(torch.Generator().manual_seed(0), 4, 2, 2, torch.bfloat16)
        ours.step()
    assert {"master", "row_step", "row_count"} < set(ours.state[p])
    theirs = torch.optim.AdamW([p], lr=0.1)
    theirs.load_state_dict(ours.state_dict())
    train(theirs, 0)
    ours.load_state_dict(theirs.state_dict())
    assert set(ours.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    p.grad = random_rows(torch.Generator().manual_seed(0), 4, 2, 2, torch.bfloat16)
    touched = set(p.grad._indices()[0].tolist())
    ours.step()
    assert ours.state[p]["row_count"].tolist() == [6 if row in touched else 5 for row in range(4)]
    assert ours.state[p]["row_step"].tolist() == [6 if row in touched else 5 for row in range(4)]


def test_options_that_a_checkpoint_does_not_have_stay() -> None:
    p, q = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    theirs = torch.optim.Adam([p], lr=0.3)
    train(theirs, 0)
    wanted = {
        "lazy": "rows",
        "decay": "all",
        "row_bias_correction": True,
        "rounding": "stochastic",
        "seed": 5,
        "state_dtype": torch.bfloat16,
    }
    ours = optim.Adam([{"params": [q], **wanted}])
    state_dict = theirs.state_dict()
    ours.load_state_dict(state_dict)
    group = ours.param_groups[0]
    assert {name: group[name] for name in wanted} == wanted
    assert group["lr"] == 0.3
    assert ours.state[q]["exp_avg"].dtype == torch.bfloat16
    assert "seed" not in state_dict["param_groups"][0]  # it is only read


def test_default_decay_is_that_of_the_loaded_kind() -> None:
    """Adam becomes AdamW by a checkpoint, as in torch; AdamW stays what it is."""
    for first, decay in ((torch.optim.Adam, "touched"), (torch.optim.AdamW, "catch_up")):
        p = nn.Parameter(torch.ones(4, 3))
        theirs = first([p])
        train(theirs, 0)
        state_dict = theirs.state_dict()
        ours = optim.Adam([p], lazy="exact")
        ours.load_state_dict(state_dict)
        assert ours.param_groups[0]["decay"] == decay
        del state_dict["param_groups"][0]["decoupled_weight_decay"]  # before torch 2.7
        ours = optim.AdamW([p], lazy="exact")
        ours.load_state_dict(state_dict)
        group = ours.param_groups[0]
        assert (group["decoupled_weight_decay"], group["decay"]) == (True, "catch_up")


def test_rowwise_sum_has_the_shape_of_torchrec() -> None:
    p = nn.Parameter(torch.ones(5, 3))
    optimizer = optim.RowWiseAdagrad([p], initial_accumulator_value=0.5)
    assert optimizer.state_dict()["state"][0]["sum"].shape == (5, 1)
    assert bool((optimizer.state[p]["sum"] == 0.5).all())


def test_states_of_another_shape_are_refused_before_anything_is_loaded() -> None:
    p, q = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(4, 3))
    a, b = optim.Adam([p]), optim.Adam([q])
    train(a, 0)
    train(b, 0)
    before = snapshot(b)
    with pytest.raises(
        ValueError, match=r"state 'exp_avg' of parameter 0 .*\(4, 3\), got \(5, 3\)"
    ):
        b.load_state_dict(a.state_dict())
    assert snapshot(b) == before


@pytest.mark.parametrize(
    ("cls", "there", "message"),
    [
        (optim.Adam, ["step", "exp_avg"], "'step', 'exp_avg', 'exp_avg_sq', got .*'exp_avg'"),
        (optim.AdamW, ["exp_avg", "exp_avg_sq"], "parameter 1 must have 'step', 'exp_avg'"),
        (optim.SparseAdam, ["step", "sum"], "parameter 1 must have .*got .*'sum'"),
        (optim.Adam, ["momentum_buffer"], "parameter 1 must have .*got .*'momentum_buffer'"),
        (optim.Adagrad, ["step"], "parameter 1 must have 'step', 'sum', got .*'step'"),
        (optim.RowWiseAdagrad, ["sum"], "parameter 1 must have 'step', 'sum', got .*'sum'"),
    ],
)
def test_parts_of_a_state_and_those_of_others_are_refused(
    cls: type[optim.Adam], there: list[str], message: str
) -> None:
    optimizer = cls([nn.Parameter(torch.ones(5, 3)) for _ in range(2)])
    train(optimizer, 0)
    before = snapshot(optimizer)
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0]["lr"] = 7.0
    state = {name: torch.tensor(9.0) if name == "step" else torch.ones(5, 3) for name in there}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict({**state_dict, "state": {1: {**state, "none": None}}})
    assert snapshot(optimizer) == before
    assert optimizer.param_groups[0]["lr"] != 7.0
    optimizer.load_state_dict({**state_dict, "state": {1: {}}})
    train(optimizer, 1)


def test_step_of_a_loaded_state_is_one_number() -> None:
    optimizer = optim.Adam([nn.Parameter(torch.ones(2))])
    train(optimizer, 0)
    state_dict = optimizer.state_dict()
    state_dict["state"][0]["step"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"'step' of parameter 0 must have 1 element, got \(2,\)"):
        optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("cls", CLASSES)
def test_states_of_a_replaced_parameter_are_not_saved(cls: type[optim.Adam]) -> None:
    old, new = (nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = cls([old])
    train(optimizer, 0)
    optimizer.param_groups[0]["params"] = [new]
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}: .*\(4, 3\) .* removed or replaced"):
        optimizer.state_dict()
    optimizer.state[new] = optimizer.state.pop(old)
    assert optimizer.state_dict()["state"].keys() == {0}


def test_hooks_of_load_state_dict_see_tensors() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([p])
    train(optimizer, 0)
    seen = []

    def before(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(state_dict["state"][0]["exp_avg"])
        state = {0: {**state_dict["state"][0], "exp_avg": torch.full((2,), 5.0), "note": "x"}}
        return {**state_dict, "state": {**state, "other": {"kept": 1}}}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[p]["exp_avg"]))
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(isinstance(value, Tensor) for value in seen)
    assert seen[1].tolist() == [5.0, 5.0]
    assert optimizer.state[p]["note"] == "x"
    assert optimizer.state["other"] == {"kept": 1}
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


@pytest.mark.parametrize("cls", [torch.optim.SparseAdam, *CLASSES])
def test_hooks_of_state_dict_see_what_is_saved(cls: type[optim.Adam]) -> None:
    p = nn.Parameter(torch.ones(3, 2))
    optimizer = cls([p], lr=0.1)
    optimizer.state["note"] = 3  # of a user, no state of a parameter
    train(optimizer, 0)
    seen: list[Any] = []

    def after(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(state_dict["state"])
        return {"param_groups": state_dict["param_groups"]}

    saved = optimizer.state_dict()
    assert saved["state"]["note"] == 3
    optimizer.register_state_dict_post_hook(after)
    assert list(optimizer.state_dict()) == ["param_groups"]
    assert len(optimizer._optimizer_state_dict_post_hooks) == 1
    step = type(saved["state"].get(0, {}).get("step"))
    assert type(seen[0].get(0, {}).get("step")) is step
    assert (step is int) == (cls.__name__ == "SparseAdam")
    optimizer.load_state_dict(saved)
    assert optimizer.state["note"] == 3


# ---- pickle, deepcopy ----


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_go_on_alike(cls: type[optim.Adam], how: str) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    params = nn.ParameterList([nn.Parameter(torch.randn(3, 2).to(d)) for d in dtypes])
    optimizer = cls(params, lr=0.1)
    train(optimizer, 0)
    pair = (params, optimizer)
    twin = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert snapshot(twin[1]) == snapshot(optimizer)
    train(optimizer, 1)
    before = snapshot(twin[1])
    train(twin[1], 1)
    assert snapshot(twin[1]) == snapshot(optimizer) != before
    assert bits(twin[0][0]) == bits(params[0])


# ---- the interface of torch ----


@pytest.mark.parametrize("cls", CLASSES)
def test_params_groups_hooks_and_closures(cls: type[optim.Adam]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    optimizer = cls(model.parameters(), lr=0.1)  # a generator
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": extra, "lr": 0.5})
    assert optimizer.param_groups[1]["lr"] == 0.5
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).sum() + extra.sum()
        loss.backward()
        return loss

    frozen, before = bits(model[0].bias), bits(extra)
    loss = optimizer.step(closure)
    assert isinstance(loss, Tensor)
    assert calls == ["pre", "closure", "post"]
    assert bits(model[0].bias) == frozen
    assert bits(extra) != before
    optimizer.zero_grad(set_to_none=False)
    assert extra.grad is not None
    assert float(extra.grad.abs().sum()) == 0
    assert cls.__name__ in repr(optimizer)


@pytest.mark.parametrize("betas", [UserList([0.8, 0.9]), np.array([0.8, 0.9])])
@pytest.mark.parametrize("name", ["Adam", "SparseAdam"])
def test_betas_may_be_any_sequence(name: str, betas: Any) -> None:
    """That of a configuration by Hydra is no list."""
    params = []
    for library, value in ((optim, betas), (optim, (0.8, 0.9)), (torch.optim, betas)):
        params.append(nn.Parameter(torch.ones(3, 2)))
        optimizer = getattr(library, name)([params[-1]], lr=0.1, betas=value)
        train(optimizer, 0)
    assert_same_bits(params[0], params[1])
    torch.testing.assert_close(params[0], params[2])


def test_named_parameters_and_empty_groups() -> None:
    model = nn.Linear(2, 2)
    optimizer = optim.Adam(model.named_parameters())
    train(optimizer, 0)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    empty = optim.SGD([{"params": []}, {"params": model.parameters()}])
    empty.step()
    with pytest.raises(ValueError, match="empty parameter list"):
        optim.Adam([])


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers(cls: type[optim.Adam], tensor: bool) -> None:
    """Learning rates as numbers and as tensors: the same steps, for every kind of parameter."""
    params = [
        nn.Parameter(torch.linspace(-1, 1, 6).view(3, 2).to(d))
        for d in (torch.float32, torch.bfloat16)
    ]
    lr = torch.tensor(0.5) if tensor else 0.5
    optimizer = cls(params, lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    manual = [nn.Parameter(p.detach().clone()) for p in params]
    reference = cls(manual, lr=0.5)
    for number in range(3):
        train(optimizer, number, 1)
        train(reference, number, 1)
        scheduler.step()
        reference.param_groups[0]["lr"] = 0.5 ** (number + 2)
    assert float(optimizer.param_groups[0]["lr"]) == 0.5**4
    for p, q in zip(params, manual, strict=True):
        assert_same_bits(p, q)


def test_one_cycle_moves_momentum_and_betas() -> None:
    for cls, more in ((optim.Adam, {}), (optim.SGD, {"momentum": 0.9})):
        p = nn.Parameter(torch.ones(2))
        optimizer = cls([p], lr=0.1, **more)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)
        for number in range(4):
            train(optimizer, number, 1)
            cycle.step()


def test_states_are_made_when_needed() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], lr=0.1)
    train(optimizer, 0)
    assert optimizer.state_dict()["state"] == {}
    assert optim.Adam([p]).state_dict()["state"] == {}
    assert set(optim.Adagrad([p]).state_dict()["state"][0]) == {"step", "sum"}


def test_share_memory() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.Adagrad([p])
    optimizer.share_memory()
    assert optimizer.state[p]["sum"].is_shared()


def test_under_torch_compile() -> None:
    """A graph break, not an error."""
    p = nn.Parameter(torch.ones(3))
    optimizer = optim.Adam([p], lr=0.1)
    p.grad = torch.ones(3)
    torch.compile(optimizer.step, backend="eager")()
    assert bool((p < 1).all())


# ---- errors ----

WRONG: list[tuple[type, dict[str, Any], type[Exception], str]] = [
    (optim.Adam, {"lr": -1.0}, ValueError, r"Adam: lr must be >= 0, got -1\.0"),
    (optim.Adam, {"lr": float("nan")}, ValueError, "lr must be >= 0, got nan"),
    (optim.Adam, {"lr": "fast"}, TypeError, "lr must be a number >= 0, got 'fast'"),
    (optim.Adam, {"lr": torch.ones(2)}, ValueError, "lr must have 1 element"),
    (optim.Adam, {"lr": torch.tensor(0.1), "foreach": True}, ValueError, "lr must be a float"),
    (optim.Adam, {"betas": (1.0, 0.9)}, ValueError, r"betas\[0\] must be < 1, got 1\.0"),
    (optim.Adam, {"betas": (0.9, -0.1)}, ValueError, r"betas\[1\] must be >= 0, got -0\.1"),
    (optim.Adam, {"lr": "1e-3"}, TypeError, "Adam: lr must be a number >= 0, got '1e-3'"),
    (optim.Adam, {"betas": (0.9, "0.9")}, TypeError, r"betas\[1\] must be a number >= 0"),
    (optim.Adam, {"betas": 0.9}, ValueError, "betas must be 2 numbers, got 0.9"),
    (optim.Adam, {"betas": {0.8, 0.9}}, ValueError, "betas must be 2 numbers, got {0"),
    (optim.AdamW, {"eps": -1}, ValueError, "AdamW: eps must be >= 0, got -1"),
    (optim.Adam, {"weight_decay": -0.1}, ValueError, "weight_decay must be >= 0"),
    (optim.Adam, {"fused": True, "foreach": True}, ValueError, "foreach must be False"),
    (optim.SGD, {"fused": True, "differentiable": True}, ValueError, "differentiable must be"),
    (optim.Adam, {"decay": "some"}, ValueError, "decay must be one of 'touched', .*got 'some'"),
    (optim.Adam, {"decay": "catch_up"}, ValueError, "L2 penalty .*got 'catch_up'"),
    (optim.SGD, {"decay": "catch_up"}, ValueError, "one of 'touched', 'all', got 'catch_up'"),
    (optim.Adam, {"master": "fp16"}, ValueError, "master must be 'fp32' or None"),
    (optim.Adam, {"rounding": "up"}, ValueError, "rounding must be 'nearest' or 'stochastic'"),
    (
        optim.Adam,
        {"rounding": "stochastic", "master": "fp32"},
        ValueError,
        "master must be None with rounding='stochastic'",
    ),
    (optim.Adam, {"seed": -1}, ValueError, "seed must be an int"),
    (optim.Adam, {"state_dtype": torch.float16}, ValueError, "state_dtype must be .*float16"),
    (optim.SparseAdam, {"lr": 0.0}, ValueError, r"lr must be > 0, got 0\.0"),
    (optim.SparseAdam, {"eps": 0.0}, ValueError, "eps must be > 0"),
    (optim.Adagrad, {"lr_decay": -1.0}, ValueError, "lr_decay must be >= 0"),
    (optim.Adagrad, {"initial_accumulator_value": -1}, ValueError, "initial_accumulator_value"),
    (optim.RowWiseAdagrad, {"eps": -1}, ValueError, "RowWiseAdagrad: eps must be >= 0"),
    (optim.SGD, {"momentum": -0.5}, ValueError, "momentum must be >= 0"),
    (optim.SGD, {"nesterov": True}, ValueError, "nesterov=True needs momentum > 0"),
]


@pytest.mark.parametrize(("cls", "options", "error", "message"), WRONG)
def test_options_out_of_range(
    cls: type, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(error, match=message):
        cls([p], **options)
    optimizer = cls([p])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("cls", "options", "error", "message"),
    [
        *(case for case in WRONG if "lr" not in case[1]),
        (optim.Adam, {"lr": "1e-3"}, TypeError, "Adam: lr must be a number .*'1e-3'"),
        (optim.SGD, {"lr": float("nan")}, ValueError, "SGD: lr must be .*nan"),
        (optim.AdamW, {"lazy": "exact", "decay": "touched"}, ValueError, "decay must be left"),
        (optim.Adam, {"lazy": "some"}, ValueError, "lazy must be 'rows' or 'exact'"),
    ],
)
def test_options_edited_out_of_range(
    cls: type, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Also in the last group, before anything is updated; mended, the step is made."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = cls([{"params": [first]}, {"params": [second]}])
    group = optimizer.param_groups[1]
    kept = dict(group)
    first.grad = torch.ones(2)
    before = snapshot(optimizer)
    group.update(options)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert snapshot(optimizer) == before
    group.update(kept)
    optimizer.step()
    assert snapshot(optimizer) != before


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0), -1.0])
def test_learning_rates_on_a_schedule(cls: type[optim.Adam], lr: float | Tensor) -> None:
    """The constructor refuses 0 for SparseAdam, and what is negative."""
    p = nn.Parameter(torch.ones(2))
    optimizer = cls([p])
    optimizer.param_groups[0]["lr"] = lr
    p.grad = torch.ones(2)
    optimizer.step()
    assert bool((p == 1).all()) == (lr == 0)


def test_edited_options_on_a_device_are_not_waited_for() -> None:
    from fastemb.optim._options import at_hand

    with FakeTensorMode():
        elsewhere = torch.ones((), device="cuda")
    for option in (elsewhere, (0.9, elsewhere), [elsewhere, 0.9]):
        assert all(
            not isinstance(v, Tensor) or v.is_cpu
            for v in torch.utils._pytree.tree_leaves(at_hand(option))
        )
    assert at_hand(0.5) == 0.5
    assert at_hand("x") == "x"


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.ones(2).to(torch.float8_e5m2), r"params\[0\] must be float16.*float8_e5m2"),
        (torch.ones(2).to_sparse(), r"params\[0\] must be a dense tensor, got torch\.sparse_coo"),
    ],
)
def test_parameters_that_cannot_be_optimized(param: Tensor, message: str) -> None:
    for cls in CLASSES:
        with pytest.raises(ValueError, match=message):
            cls([param.requires_grad_()])


def test_integers_among_the_parameters() -> None:
    """As quantized layers have them, which require no gradient."""
    for cls in CLASSES:
        p, q = nn.Parameter(torch.ones(2, 3)), torch.arange(2)
        optimizer = cls([p, nn.Parameter(q, requires_grad=False), q])
        p.grad = torch.ones(2, 3)
        optimizer.step()
        assert set(optimizer.state) <= {p}
        cls(optimizer.param_groups[0]["params"]).load_state_dict(optimizer.state_dict())
        before = p.detach().clone()
        q.grad = torch.ones_like(q)
        with pytest.raises(RuntimeError, match=r"torch\.int64 parameter cannot be optimized"):
            optimizer.step()
        assert_same_bits(p, before)


@pytest.mark.parametrize("cls", [c for c in CLASSES if c is not optim.SparseAdam])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_converted_between_steps(cls: type[optim.Adam], dtype: torch.dtype) -> None:
    """Moments follow, where torch fails; its Adagrad, which has them from the beginning, does."""
    module = nn.Linear(3, 2)
    start = copy.deepcopy(module)
    optimizer, other = cls(module.parameters(), lr=0.1), cls(start.parameters(), lr=0.1)
    train(optimizer, 0)
    train(other, 0)
    module.to(dtype)
    train(optimizer, 1)
    train(other, 1)
    tolerance = 1e-5 if dtype == torch.float64 else 2e-2
    for p, q in zip(module.parameters(), start.parameters(), strict=True):
        assert p.dtype == dtype
        torch.testing.assert_close(p.float(), q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("cls", CLASSES)
def test_parameters_in_another_memory_format_than_their_states(
    cls: type[optim.Adam], dtype: torch.dtype
) -> None:
    """As by ``model.to(memory_format=torch.channels_last)`` between steps, or after a load."""
    options = {"momentum": 0.9} if cls is optim.SGD else {}
    start = torch.randn(4, 3, 2, 5)
    results = []
    for after in (None, 0, 1):
        param = nn.Parameter(start.to(dtype, copy=True))
        optimizer = cls([param], lr=0.1, **options)
        for step in range(3):
            if step == after:  # Adagrad has its state from the beginning
                param.data = param.detach().to(memory_format=torch.channels_last)
            generator = torch.Generator().manual_seed(step)
            param.grad = torch.randn(start.shape, generator=generator).to(dtype)
            optimizer.step()
        results.append(param.detach())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("step", Tensor.long),
        ("step", Tensor.double),
        ("exp_avg", Tensor.double),
        ("exp_avg", lambda state: state.t().contiguous().t()),
        ("exp_avg_sq", lambda state: torch.stack([state, state], -1)[..., 0]),
        ("master", Tensor.double),
        ("master", lambda state: state.t().contiguous().t()),
        ("row_step", Tensor.long),
        ("row_count", Tensor.float),
    ],
)
@pytest.mark.parametrize("sparse", [True, False])
def test_states_edited_to_another_dtype_or_layout(name: str, edit: Any, sparse: bool) -> None:
    """All of a step is made, for the parameters beside it, too."""
    start = torch.randn(6, 4).half(), torch.randn(3)
    results = []
    for edited in (False, True):
        params = [nn.Parameter(s.clone()) for s in start]
        params[0].grad_dtype = None
        optimizer = optim.AdamW(params, lr=0.1, lazy="rows", row_bias_correction=True)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            grad = random_rows(generator, 6, 4, 5, torch.float32)
            params[0].grad = grad if sparse or step < 2 else grad.to_dense()
            params[1].grad = torch.randn(3, generator=generator)
            if step == 2 and edited:
                state = optimizer.state[params[0]]
                state[name] = edit(state[name])
            optimizer.step()
        results.append(snapshot(optimizer))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (optim.Adam, "amsgrad"),
        (optim.Adam, "maximize"),
        (optim.AdamW, "maximize"),
        (optim.Adagrad, "maximize"),
        (optim.SGD, "maximize"),
        (optim.SGD, "nesterov"),
    ],
)
def test_flags_may_be_numbers(cls: type[optim.Adam], name: str) -> None:
    more = {"momentum": 0.9} if cls is optim.SGD else {}
    results = []
    for flag in (1, True):
        p = nn.Parameter(torch.ones(2, 3))
        train(cls([p], **{name: flag}, **more), 0)
        results.append(p)
    assert_same_bits(*results)


@pytest.mark.parametrize("cls", CLASSES)
def test_loading_adds_no_options(cls: type[optim.Adam]) -> None:
    optimizer = cls([nn.Parameter(torch.ones(2))])
    before = repr(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert repr(optimizer) == before
    assert repr(pickle.loads(pickle.dumps(optimizer))) == before


@pytest.mark.parametrize("cls", CLASSES)
def test_a_state_dict_that_cannot_be_loaded_changes_nothing(cls: type[optim.Adam]) -> None:
    """Neither where a state cannot be copied, nor where a hook raises afterwards."""
    more = {"momentum": 0.9} if cls is optim.SGD else {}
    optimizer = cls([nn.Parameter(torch.ones(2, 3)) for _ in range(2)], **more)
    train(optimizer, 0)
    good = copy.deepcopy(optimizer.state_dict())
    train(optimizer, 1)
    before, group = snapshot(optimizer), dict(optimizer.param_groups[0])
    bad = copy.deepcopy(good)
    moment = next(n for n, value in bad["state"][1].items() if n != "step" and value is not None)
    bad["state"][1][moment] = bad["state"][1][moment].to("meta")
    bad["param_groups"][0]["lr"] = 5.0
    with pytest.raises(NotImplementedError, match="meta"):
        optimizer.load_state_dict(bad)
    handle = optimizer.register_load_state_dict_post_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.load_state_dict(good)
    handle.remove()
    assert snapshot(optimizer) == before
    assert optimizer.param_groups[0] == group
    train(optimizer, 2)


@pytest.mark.parametrize("cls", CLASSES)
def test_states_loaded_in_inference_mode_are_those_of_training(cls: type[optim.Adam]) -> None:
    optimizer = cls([nn.Parameter(torch.ones(2, 3))])
    train(optimizer, 0)
    with torch.inference_mode():
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_first_step_in_inference_mode_is_as_any(
    cls: type[optim.Adam], sparse: bool, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if cls is optim.SGD else {}
    options |= {"lazy": "exact"} if cls in (optim.Adam, optim.AdamW) else {}
    start = torch.randn(6, 4).to(dtype)
    results = []
    for mode in (contextlib.nullcontext(), torch.inference_mode()):
        param = nn.Parameter(start.clone())
        param.grad_dtype = None
        with mode:
            optimizer = cls([param], lr=0.1, **options)
        for step in range(4):
            grad = random_rows(torch.Generator().manual_seed(step), 6, 4, 5, torch.float32)
            param.grad = grad if sparse else grad.to_dense()
            if step == 2:  # a momentum, or another rule for rows that sleep, begins here
                optimizer.param_groups[0]["betas"] = (0.8, 0.9)
                optimizer.param_groups[0]["momentum"] = 0.8
            with mode if step in (0, 2) else contextlib.nullcontext():
                optimizer.step()
        optimizer.state_dict()
        results.append(snapshot(optimizer))
    assert results[0] == results[1]


@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.Adagrad, optim.SGD])
def test_parameters_on_meta(cls: type[optim.Adam]) -> None:
    p = nn.Parameter(torch.empty(2, 3, device="meta"))
    optimizer = cls([p])
    p.grad = torch.empty_like(p)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert p.device.type == "meta"


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (optim.Adam, {"fused": True}, "must not be complex with fused=True"),
        (optim.AdamW, {"state_dtype": torch.bfloat16}, "must not be complex with state_dtype="),
        (optim.SGD, {"offload": "cpu"}, "must not be complex with offload="),
        (optim.SparseAdam, {}, "must be float16, bfloat16, float32 or float64"),
        (optim.RowWiseAdagrad, {}, "must be float16, bfloat16, float32 or float64"),
    ],
)
def test_what_complex_parameters_cannot_have(
    cls: type[optim.Adam], options: dict[str, Any], message: str
) -> None:
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=rf"params\[0\] {message}.* got torch\.complex64"):
        cls([p], **options)


def test_moments_of_float64_parameters_are_not_bf16() -> None:
    p = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"params\[0\] must not be float64 with state_dtype"):
        optim.Adam([p], state_dtype=torch.bfloat16)
