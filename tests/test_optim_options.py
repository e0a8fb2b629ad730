"""Options and parameters of optimizers: what they may be, and what is refused."""

from __future__ import annotations

from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from optim_cases import CLASSES, assert_same_bits, snapshot, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fastemb import optim


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
    (optim.SparseAdam, {"lr": -1.0}, ValueError, r"lr must be > 0, got -1\.0"),
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
        # What a schedule may pass through: see the tests of those.
        *(case for case in WRONG if case[1].keys().isdisjoint({"lr", "nesterov"})),
        (optim.Adam, {"lr": "1e-3"}, TypeError, "Adam: lr must be a number .*'1e-3'"),
        (optim.SGD, {"lr": float("nan")}, ValueError, "SGD: lr must be .*nan"),
        (optim.SGD, {"momentum": 0.9, "dampening": 0.5, "nesterov": True}, ValueError, "nesterov"),
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
