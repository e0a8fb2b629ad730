"""What the row optimizers refuse and how they are registered, on every backend."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from conftest import Backend, backend_params
from row_cases import OPERATORS, STATES, make, number, with_its_strides
from torch import Tensor

from fastemb._row_ops import SCHEMAS

# Of a step that sums its gradients itself.
TERMS: dict[str, Tensor] = {
    "rows": torch.arange(4),
    "grad": torch.ones(2, 3),
    "segments": torch.tensor([0, 1, 2, 4, 6], dtype=torch.int32),
    "sources": torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.int32),
    "coefficients": torch.ones(6),
}


def wrong_terms() -> dict[str, tuple[dict[str, Any], str]]:
    """The same for the terms of a fused step: changes to `TERMS`, and the whole message."""
    together = "segments and sources go together, coefficients only with them"
    segments = "segments must be contiguous int32, one element more than rows"
    sources = "sources must be contiguous int32"
    factors = "coefficients must be contiguous, float32, one for each of sources"
    wide = {
        name: torch.ones(4, 3, dtype=torch.float64)
        for name in ("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
    }
    return {
        "no sources": ({"sources": None, "coefficients": None}, together),
        "only segments and coefficients": ({"sources": None}, together),
        "no segments": ({"segments": None, "coefficients": None}, together),
        "only coefficients": ({"segments": None, "sources": None}, together),
        "no rows": ({"rows": None}, "rows must be given with segments"),
        "segments int64": ({"segments": TERMS["segments"].long()}, segments),
        "segments short": ({"segments": TERMS["segments"][:4]}, segments),
        "segments long": ({"segments": torch.zeros(6, dtype=torch.int32)}, segments),
        "segments strided": ({"segments": torch.zeros(10, dtype=torch.int32)[::2]}, segments),
        "sources int64": ({"sources": TERMS["sources"].long()}, sources),
        "sources strided": ({"sources": torch.zeros(12, dtype=torch.int32)[::2]}, sources),
        "coefficients half": ({"coefficients": torch.ones(6).half()}, factors),
        "coefficients double": ({"coefficients": torch.ones(6).double()}, factors),
        "coefficients short": ({"coefficients": torch.ones(5)}, factors),
        "coefficients strided": ({"coefficients": torch.ones(12)[::2]}, factors),
        "coefficients of float64": (
            wide | {"grad": torch.ones(2, 3, dtype=torch.float64)},
            factors.replace("32", "64"),
        ),
        "grad columns": (
            {"grad": torch.ones(2, 4)},
            "grad must be contiguous, [rows, columns of param]",
        ),
        "grad double": (
            {"grad": torch.ones(2, 3, dtype=torch.float64)},
            "grad must be float64 when param is, and only then",
        ),
    }


def wrong_arguments() -> dict[str, tuple[str, dict[str, Any], str]]:
    """What must be refused, since a kernel would leave its memory: operator, changes, words."""
    half, wide = torch.float16, torch.float64
    ones, int64 = torch.ones, torch.int64
    wrong: dict[str, tuple[str, dict[str, Any], str]] = {
        "param 1-D": ("row_sgd_", {"param": ones(12)}, "(param must be 2-D|grad must be)"),
        "param int": ("row_sgd_", {"param": ones(4, 3, dtype=torch.int32)}, "dtype must be"),
        "param columns apart": ("row_sgd_", {"param": ones(4, 6)[:, ::2]}, "neighbours"),
        "param rows overlap": ("row_sgd_", {"param": ones(3).expand(4, 3)}, "must not overlap"),
        "master short": ("row_sgd_", {"param": ones(4, 3).half(), "master": ones(3, 3)}, "master"),
        "master half": (
            "row_sgd_",
            {"param": ones(4, 3).half(), "master": ones(4, 3).half()},
            "master",
        ),
        "master strided": (
            "row_sgd_",
            {"param": ones(4, 3).half(), "master": ones(3, 4).t()},
            "master",
        ),
        "master of float32": ("row_sgd_", {"master": ones(4, 3)}, "master must be None"),
        "rows int32": ("row_sgd_", {"rows": torch.arange(4, dtype=torch.int32)}, "rows must be"),
        "rows short": ("row_sgd_", {"rows": torch.arange(3)}, "rows must"),
        "rows strided": ("row_sgd_", {"rows": torch.arange(8)[::2]}, "rows must be"),
        "grad rows": ("row_sgd_", {"grad": ones(5, 3)}, "more rows than param"),
        "grad columns": ("row_sgd_", {"grad": ones(4, 2)}, "grad must be"),
        "grad 1-D": ("row_sgd_", {"grad": ones(12)}, "grad must be"),
        "grad strided": ("row_sgd_", {"grad": ones(3, 4).t()}, "grad must be"),
        "grad wide": ("row_sgd_", {"grad": ones(4, 3, dtype=wide)}, "grad must be float64"),
        "grad narrow": (
            "row_sgd_",
            {"param": ones(4, 3, dtype=wide), "momentum_buffer": None},
            "grad must be float64",
        ),
        "grad int": ("row_sgd_", {"grad": ones(4, 3, dtype=int64)}, "dtype must be"),
        "used_rows": ("row_sgd_", {"used_rows": ones(1, dtype=int64)}, "used_rows must be"),
        "used_rows two": (
            "row_sgd_",
            {"used_rows": ones(2, dtype=torch.int32)},
            "used_rows must be",
        ),
        "lr int": ("row_sgd_", {"lr_tensor": ones((), dtype=int64)}, "(lr|d)"),
        "lr half": ("row_sgd_", {"lr_tensor": ones((), dtype=half)}, "lr_tensor must be"),
        "lr two": ("row_sgd_", {"lr_tensor": ones(2)}, "lr_tensor must be"),
        "moments mixed": (
            "row_adam_",
            {"exp_avg": ones(4, 3, dtype=torch.bfloat16)},
            "must have one dtype",
        ),
        "moments bf16 of float64": (
            "row_adam_",
            {
                "param": ones(4, 3, dtype=wide),
                "grad": ones(4, 3, dtype=wide),
                "exp_avg": ones(4, 3, dtype=torch.bfloat16),
                "exp_avg_sq": ones(4, 3, dtype=torch.bfloat16),
            },
            "exp_avg must be",
        ),
        "sum of rows": ("row_rowwise_adagrad_", {"sum": ones(3)}, "sum must be"),
    }
    for name in ("step", "inv_scale", "found_inf"):
        wrong[f"{name} double"] = ("row_sgd_", {name: ones((), dtype=wide)}, f"{name} must be")
        wrong[f"{name} two"] = ("row_sgd_", {name: ones(2)}, f"{name} must be")
    for op, name in (
        ("row_adam_", "exp_avg"),
        ("row_adam_", "exp_avg_sq"),
        ("row_adam_", "max_exp_avg_sq"),
        ("row_adagrad_", "sum"),
        ("row_sgd_", "momentum_buffer"),
    ):
        wrong[f"{op}{name} short"] = (op, {name: ones(4, 2)}, f"{name} must be")
        wrong[f"{op}{name} strided"] = (op, {name: ones(3, 4).t()}, f"{name} must be")
        wrong[f"{op}{name} half"] = (op, {name: ones(4, 3, dtype=half)}, f"{name} must be")
    for name in ("row_step", "row_count"):
        wrong[f"{name} short"] = ("row_adam_", {name: ones(3).int()}, f"{name} must be")
        wrong[f"{name} long"] = ("row_adam_", {name: ones(4).long()}, f"{name} must be")
        wrong[f"{name} strided"] = ("row_adam_", {name: ones(8).int()[::2]}, f"{name} must be")
    return wrong


WRONG = wrong_arguments()
WRONG_TERMS = wrong_terms()


def prepared(op: str, changes: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    case = make(op, torch.float32, (4, 3), amsgrad=True, row_step=True, row_count=True)
    arguments = case.arguments() | changes
    assert list(arguments) == [
        a.name for a in getattr(torch.ops.fastemb, op).default._schema.arguments
    ]
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            arguments[name] = with_its_strides(value, device)
    return arguments


def call(op: str, ops: Any, changes: dict[str, Any], device: torch.device | str) -> None:
    getattr(ops, op)(*prepared(op, changes, device).values())


def refusal(op: str, ops: Any, arguments: dict[str, Any]) -> str:
    """What the operator says, which must leave every tensor as it was."""
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    with pytest.raises(ValueError) as error:
        getattr(ops, op)(*arguments.values())
    for name, tensor in before.items():
        assert torch.equal(arguments[name], tensor), name
    return str(error.value)


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_that_would_break_memory_are_refused(backend: Backend, wrong: str) -> None:
    op, changes, words = WRONG[wrong]
    call(op, backend.ops, {}, backend.device)
    message = refusal(op, backend.ops, prepared(op, changes, backend.device))
    assert re.match(f"{op}: .*{words}", message), message


@pytest.mark.parametrize("wrong", WRONG_TERMS)
@pytest.mark.parametrize("op", OPERATORS)
def test_terms_that_would_break_memory_are_refused(backend: Backend, op: str, wrong: str) -> None:
    changes, words = WRONG_TERMS[wrong]
    good = prepared(op, {}, backend.device)
    changes = {name: value for name, value in changes.items() if name in good}
    if op == "row_rowwise_adagrad_" and "sum" in changes:
        changes["sum"] = changes["sum"][:, 0].contiguous()
    call(op, backend.ops, TERMS, backend.device)
    call(op, backend.ops, TERMS | {"coefficients": None}, backend.device)
    got = refusal(op, backend.ops, prepared(op, TERMS | changes, backend.device))
    assert got == f"{op}: {words}"


@pytest.mark.parametrize("backend", backend_params("reference", "triton"), indirect=True)
@pytest.mark.parametrize("op", OPERATORS)
def test_tensors_of_other_devices_are_refused(backend: Backend, op: str) -> None:
    for name in (*STATES[op], "grad", "step", "found_inf"):
        kind = torch.int32 if name.startswith("row_") else torch.float32
        shape = {"step": (), "found_inf": (), "row_step": (4,), "row_count": (4,)}
        elsewhere = torch.ones(shape.get(name, (4, 3)), dtype=kind, device="meta")
        with pytest.raises(ValueError, match=f"{name} must be .*on param's device"):
            call(op, backend.ops, {name: elsewhere}, backend.device)
    for name in ("segments", "sources", "coefficients"):
        changes = TERMS | {name: TERMS[name].to("meta")}
        with pytest.raises(ValueError, match=f"{name} must be on param's device"):
            call(op, backend.ops, changes, backend.device)


# ---- registration ------------------------------------------------------------------------------


@pytest.mark.parametrize("op", SCHEMAS)
def test_opcheck(op: str) -> None:
    for changes in (
        {"dtype": torch.float32, "rows": [1, 3], "step": number(4)},
        {"dtype": torch.bfloat16, "master": True, "amsgrad": True, "inv_scale": number(0.5)},
        {"dtype": torch.float16, "row_step": True, "row_count": True, "seed": 3},
    ):
        case = make(op, table=(5, 4), **changes)
        arguments = tuple(case.arguments().values())
        torch.library.opcheck(getattr(torch.ops.fastemb, op).default, arguments)
    for changes in ({}, {"coefficients": None, "used_rows": torch.tensor([3], dtype=torch.int32)}):
        arguments = tuple(prepared(op, TERMS | changes, "cpu").values())
        torch.library.opcheck(getattr(torch.ops.fastemb, op).default, arguments)
