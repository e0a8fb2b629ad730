"""The row optimizers of every backend: the contract of ``csrc/ops.h``, from `RowStep` on.

One suite for all backends (see the ``backend`` fixture), against float64 intervals (`row_model`).
Interpreted Triton has a process of its own, as for ``test_operators.py``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Backend, backend_params, interpreting_triton
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from lookups import assert_same_bits
from numpy.typing import NDArray
from row_cases import (
    DTYPES,
    LOW_PRECISION,
    OPERATORS,
    OUTSIDE,
    RowCase,
    make,
    number,
    row_cases,
    total_memory,
    with_special_values,
    with_stale_masters,
)
from row_model import Model, assert_same_bytes, value_before
from same_bits import THREADS, digest_of, digests_of_levels, use_threads
from torch import Tensor

from fastemb import _native

Array = NDArray[np.float64]
LARGEST = 3_000 if interpreting_triton() else 20_000
examples = drawn(5 if interpreting_triton() else 40)
every_operator = pytest.mark.parametrize("op", OPERATORS)
low_precision = pytest.mark.parametrize("dtype", LOW_PRECISION)
# Those in which no element depends on another.
ELEMENTWISE = tuple(op for op in OPERATORS if op != "row_rowwise_adagrad_")
reference = _native.backend("reference")


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in got:
        assert_same_bits(got[name], want[name])


def check(backend: Backend, case: RowCase) -> dict[str, Tensor]:
    """Against the model, and on the CPU bit for bit against the reference."""
    got = case.run(backend.ops, backend.device)
    Model(case).check(got)
    if backend.name == "cpu":
        assert_same(got, case.run(reference))
    return got


# ---- any step ----------------------------------------------------------------------------------


@examples
@given(case=row_cases(LARGEST))
def test_any_step(backend: Backend, case: RowCase) -> None:
    check(backend, case)


@examples
@given(case=row_cases(LARGEST), seed=st.integers(0, 2**32))
def test_values_that_are_no_numbers(backend: Backend, case: RowCase, seed: int) -> None:
    """NaN and infinity stay in their element (their row, in row-wise Adagrad)."""
    case = with_special_values(case, seed)
    got = case.run(backend.ops, backend.device)
    want = case.run(reference)
    if backend.name == "cpu":
        assert_same(got, want)
    for name in got:
        assert torch.equal(got[name].isnan(), want[name].isnan()), name
        assert torch.equal(got[name].isinf(), want[name].isinf()), name


@pytest.mark.parametrize("found", [1.0, 2.0, -1.0, math.inf, math.nan])
@every_operator
def test_found_inf_leaves_every_byte(backend: Backend, op: str, found: float) -> None:
    for step in (1, 5):
        case = make(
            op,
            torch.float16,
            (6, 9),
            rows=[4, 0, 1],
            master=True,
            amsgrad=True,
            row_step=True,
            row_count=True,
            step=number(step),
            found_inf=number(found),
            weight_decay=0.1,
        )
        case = with_special_values(with_stale_masters(case, 0.5, 1), 2)
        got = case.run(backend.ops, backend.device)
        for name, tensor in case.before().items():
            assert_same_bytes(got[name], tensor)


@every_operator
def test_rows_that_do_not_count(backend: Backend, op: str) -> None:
    """Rows outside the table, and those behind used_rows, which hold what must not be read."""
    case = make(op, torch.float32, (5, 4), rows=[*OUTSIDE, 3, 5, 0, 2, -7], row_count=True)
    grad = case.grad.clone()
    grad[[0, 1, 2, 3, 4, 6, 8, 9]] = math.nan
    used = torch.tensor([len(OUTSIDE) + 3], dtype=torch.int32)
    case = replace(case, grad=grad, used_rows=used)
    assert case.table_rows() == [(5, 3), (7, 0)]
    check(backend, case)
    for count in (0, -1):
        none = replace(case, used_rows=torch.tensor([count], dtype=torch.int32))
        got = none.run(backend.ops, backend.device)
        for name, tensor in case.before().items():
            assert_same_bytes(got[name], tensor)
    more = torch.tensor([100], dtype=torch.int32)
    check(backend, replace(case, grad=torch.ones_like(grad), used_rows=more))


@pytest.mark.parametrize("table", [(0, 3), (3, 0), (0, 0)])
@every_operator
def test_empty_tables(backend: Backend, op: str, table: tuple[int, int]) -> None:
    for rows in (None, [], [-1, 7]):
        case = make(op, torch.float32, table, rows=rows)
        got = case.run(backend.ops, backend.device)
        for name, tensor in case.before().items():
            assert_same_bytes(got[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@every_operator
def test_dense_is_one_wide_row(backend: Backend, op: str, dtype: torch.dtype) -> None:
    """Rows given by number, rows in order, and all elements as one row: the same bits."""
    case = make(
        op,
        dtype,
        (7, 1501) if not interpreting_triton() else (5, 301),
        master=dtype in LOW_PRECISION,
        amsgrad=True,
        step=number(3),
        weight_decay=0.01,
        inv_scale=number(0.25),
    )
    size = case.memory.shape[0]
    in_order = check(backend, case)
    order = torch.randperm(size, generator=torch.Generator().manual_seed(4))
    by_number = replace(case, rows=order, grad=case.grad[order])
    assert_same(check(backend, by_number), in_order)
    if op not in ELEMENTWISE:
        return

    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.reshape(1, -1)

    one_row = replace(
        case,
        memory=case.memory.reshape(1, -1),
        dim=case.memory.numel(),
        grad=case.grad.reshape(1, -1),
        master=wide(case.master),
        states={name: wide(state) for name, state in case.states.items()},
    )
    got = check(backend, one_row)
    assert_same({name: x.reshape(in_order[name].shape) for name, x in got.items()}, in_order)


# ---- accuracy ----------------------------------------------------------------------------------


def textbook(case: RowCase) -> tuple[Array, Array]:
    """The new parameter in float64, as in the papers, and the magnitude of the update's terms."""
    p, g = case.param.double().numpy(), case.grad.double().numpy()
    state = {k: v.double().numpy() for k, v in case.states.items() if v is not None}
    t, lr = int(case.step), case.lr
    if case.op == "row_adam_":
        beta1, beta2, eps = (case.option(name) for name in ("beta1", "beta2", "eps"))
        old, new = beta1 * state["exp_avg"], (1 - beta1) * g
        v = beta2 * state["exp_avg_sq"] + (1 - beta2) * g**2
        rate = lr / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + eps)
        p = p * (1 - lr * case.weight_decay)
    elif case.op == "row_sgd_":
        old = 0 * g if t == 1 else case.option("momentum") * state["momentum_buffer"]
        new, rate = g, lr
    else:
        square = g**2
        if case.op == "row_rowwise_adagrad_":
            square = square.mean(axis=1)
        rate = lr / (np.sqrt(state["sum"] + square) + case.option("eps"))
        rate = rate.reshape(len(g), -1)
        old, new = 0 * g, g
    return p - (old + new) * rate, (np.abs(old) + np.abs(new)) * rate


@pytest.mark.parametrize("step", [1, 2, 100, 100_000])
@every_operator
def test_within_two_ulp_of_float64(backend: Backend, op: str, step: int) -> None:
    """Two units of the parameter; an update that is no small part of it adds units of its own.

    Its formula has about ten roundings, torch's as well: half a unit each, of its terms.
    """
    for lr in (0.1, 1e-3, 1e-4):
        adam = op == "row_adam_"
        case = make(
            op,
            torch.float32,
            (40, 64),
            data_seed=step,
            lr=lr,
            step=number(step),
            weight_decay=0.01 if adam else 0.0,
            options={"decoupled": True} if adam else {},
        )
        want, update = textbook(case)
        before = np.abs(case.param.double().numpy())
        got = case.run(backend.ops, backend.device)["param"].double().numpy()
        error = np.abs(got - want)
        small = update <= before / 8
        assert (error <= 2 * ulp(before))[small].all()
        assert (error <= 2 * ulp(before) + 5 * ulp(update)).all()
        assert small.mean() > (0.8 if lr < 0.1 else 0.01)


@pytest.mark.parametrize(
    ("betas", "old", "grad", "first", "second"),
    [
        ((0.0, 0.0), 1e3, 0.1, 0.1, 0.01),  # what is forgotten must not hide what comes
        ((0.9, 0.0), 1e3, 0.1, 900.01, 0.01),
        ((0.9, 0.999), 1e25, 1.0, 9e24, math.inf),  # the square has overflowed before, as in torch
        ((0.9, 0.999), 0.0, 1e20, 1e19, 1e37),  # its own square would, but not what is kept of it
    ],
)
def test_gradients_of_another_size_than_the_moments(
    backend: Backend,
    betas: tuple[float, float],
    old: float,
    grad: float,
    first: float,
    second: float,
) -> None:
    case = make("row_adam_", torch.float32, (3, 37), step=number(1000), lr=0.01)
    case = replace(
        case,
        grad=torch.full_like(case.grad, grad),
        states={"exp_avg": case.grad * 0 + old, "exp_avg_sq": (case.grad * 0 + old).square()},
        options={"beta1": betas[0], "beta2": betas[1]},
    )
    got = case.run(backend.ops, backend.device)
    bias = [1 - beta**1000 for beta in betas]
    want = case.param - 0.01 * (first / bias[0]) / math.sqrt(second / bias[1])
    for name, value in (("exp_avg", first), ("exp_avg_sq", second)):
        torch.testing.assert_close(got[name], torch.full_like(got[name], value))
    torch.testing.assert_close(got["param"], want)


def ulp(x: Array) -> Array:
    return np.spacing(x.astype(np.float32)).astype(np.float64)


def torch_optimizer(name: str, weight: Tensor, **options: Any) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)([weight], **options)


@pytest.mark.parametrize(
    ("name", "options", "op", "ours"),
    [
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}, "row_adam_", {}),
        ("AdamW", {"weight_decay": 0.1, "maximize": True}, "row_adam_", {"decoupled": True}),
        ("SparseAdam", {}, "row_adam_", {"corrected_denominator": False}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.3}, "row_adagrad_", {"lr_decay": 0.3}),
        (
            "SGD",
            {"lr": 0.1, "momentum": 0.8, "dampening": 0.4, "weight_decay": 0.2},
            "row_sgd_",
            {"dampening": 0.4},
        ),
        (
            "SGD",
            {"lr": 0.1, "momentum": 0.8, "nesterov": True, "maximize": True},
            "row_sgd_",
            {"nesterov": True},
        ),
        ("SGD", {"lr": 0.1, "weight_decay": 0.2}, "row_sgd_", {}),
    ],
)
def test_follows_torch_in_float64(
    backend: Backend, name: str, options: dict[str, Any], op: str, ours: dict[str, Any]
) -> None:
    """From empty states, five steps with new gradients; SparseAdam with new rows as well."""
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch_optimizer(name, weight, **options)
    sparse = name == "SparseAdam"
    case = make(
        op,
        torch.float64,
        (6, 5),
        momentum=options.get("momentum", 0.0),
        amsgrad=options.get("amsgrad", False),
        lr=options.get("lr", 1e-3),
        weight_decay=options.get("weight_decay", 0.0),
        maximize=options.get("maximize", False),
        options=ours,
    )
    states = {k: None if v is None else torch.zeros_like(v) for k, v in case.states.items()}
    case = replace(case, memory=weight.detach().clone(), states=states)
    for step in range(1, 6):
        grad = torch.randn(6, 5, generator=generator, dtype=torch.float64)
        rows = torch.randperm(6, generator=generator)[:3].sort().values if sparse else None
        if rows is not None:
            grad = grad[:3]
            weight.grad = torch.sparse_coo_tensor(
                rows.unsqueeze(0), grad, (6, 5), check_invariants=True
            )
        else:
            weight.grad = grad
        optimizer.step()
        case = replace(case, grad=grad, rows=rows, step=number(step))
        got = case.run(backend.ops, backend.device)
        torch.testing.assert_close(got["param"], weight.detach(), rtol=1e-12, atol=1e-14)
        case = replace(
            case,
            memory=got["param"],
            states={k: got.get(k) for k in case.states},
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_slept_are_decayed_for_every_step(backend: Backend, dtype: torch.dtype) -> None:
    case = make(
        "row_adam_",
        dtype,
        (4, 8),
        row_step=True,
        step=number(1200),
        lr=0.01,
        weight_decay=0.05,
        options={"decoupled": True},
        scale=1.0,
    )
    slept = torch.tensor([1199, 1190, 200, 0], dtype=torch.int32)
    case = replace(case, states={**case.states, "row_step": slept})
    got = check(backend, case)
    assert got["row_step"].tolist() == [1200] * 4
    kept = (1 - 0.01 * 0.05) ** np.array([[1.0], [10], [1000], [1200]])
    still = replace(
        case, grad=torch.zeros_like(case.grad), states={**case.states, "exp_avg": case.grad * 0}
    )
    ratio = still.run(backend.ops, backend.device)["param"].double() / case.param.double()
    rounding = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float32: 3e-7}.get(dtype, 1e-12)
    assert np.allclose(ratio.numpy(), kept, rtol=rounding, atol=0)


def test_rows_have_their_own_bias_correction(backend: Backend) -> None:
    """A row's first update has the size of the learning rate, however late it comes."""
    case = make("row_adam_", torch.float32, (3, 4), row_count=True, step=number(5000), lr=0.5)
    zeros = {k: None if v is None else torch.zeros_like(v) for k, v in case.states.items()}
    case = replace(case, states=zeros)
    got = check(backend, case)
    update = (case.param - got["param"]).abs()
    assert torch.allclose(update, torch.full_like(update, 0.5), rtol=1e-4)
    assert got["row_count"].tolist() == [1, 1, 1]


# ---- masters -----------------------------------------------------------------------------------


@low_precision
@every_operator
def test_small_updates_reach_the_master(backend: Backend, op: str, dtype: torch.dtype) -> None:
    """Updates below half a unit of the parameter add up instead of being lost."""
    case = make(op, dtype, (2, 3), master=True, momentum=0.0, lr=1e-6, options={})
    master = torch.ones(2, 3)
    case = replace(case, memory=master.to(dtype), master=master, grad=torch.ones(2, 3))
    for step in range(1, 4):
        case = replace(case, step=number(step))
        got = check(backend, case)
        assert bool((got["master"] < case.master).all())
        assert got["param"].unique().tolist() == [1.0]
        states = {name: got.get(name) for name in case.states}
        case = replace(case, master=got["master"], memory=got["param"], states=states)


@low_precision
@every_operator
def test_a_stale_master_gives_way(backend: Backend, op: str, dtype: torch.dtype) -> None:
    fresh = make(op, dtype, (5, 70), master=True, weight_decay=0.1, rows=[3, 1, 4, 0])
    for share in (0.3, 1.0):
        case = with_stale_masters(fresh, share, 7)
        got = check(backend, case)
        # As if the master had been made of the parameter.
        mended = replace(case, master=value_before(case))
        assert_same(mended.run(backend.ops, backend.device) | {"master": got["master"]}, got)
    # The sign of a zero is what somebody wrote, too.
    still = replace(case, grad=torch.zeros_like(case.grad), weight_decay=0.0)
    still = replace(
        still, states={k: None if k == "momentum_buffer" else v for k, v in still.states.items()}
    )
    if op == "row_sgd_":
        got = still.run(backend.ops, backend.device)
        assert math.copysign(1, got["master"][0, 0]) == -1
        assert math.copysign(1, got["param"][0, 0]) == -1


# Bits of a float between a parameter and its master: around half a unit of fp16 and bf16, and a
# whole one.
DISTANCES = (0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x10000)


@low_precision
def test_a_master_is_one_as_long_as_it_rounds_to_the_parameter(
    backend: Backend, dtype: torch.dtype
) -> None:
    """Ties, both ends of the range, the other sign and numbers that are none, against torch."""
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    some = [0.0, smallest, smallest / 4, 1.0, 1.0 + torch.finfo(dtype).eps, 3.14, largest, math.inf]
    own = torch.tensor([*some, *(-x for x in some)]).to(dtype)
    bits = own.float().view(torch.int32)
    kept = torch.stack(
        [
            *((bits + away).view(torch.float32) for d in DISTANCES for away in (d, -d)),
            -own.float(),
            *(torch.full(own.shape, x) for x in (0.0, -0.0, 1.0, math.inf, -math.inf, math.nan)),
        ]
    )
    param = own.expand(kept.shape).contiguous()
    still = RowCase(
        op="row_sgd_",
        memory=param,
        dim=own.numel(),
        grad=torch.zeros(kept.shape),
        states={"momentum_buffer": None},
        master=kept,
    )
    got = still.run(backend.ops, backend.device)
    integer = torch.int16
    is_one = kept.to(dtype).view(integer) == param.view(integer)
    assert 0.2 < is_one.float().mean() < 0.6
    assert_same_bits(got["master"], torch.where(is_one, kept, param.float()))
    assert_same_bits(got["param"], param)


# ---- stochastic rounding -----------------------------------------------------------------------


def exact_step(values: Tensor, dtype: torch.dtype, **changes: Any) -> RowCase:
    """SGD whose new parameter is ``values``, exactly, before it is rounded."""
    return RowCase(
        op="row_sgd_",
        memory=torch.zeros(values.shape, dtype=dtype),
        dim=values.shape[1],
        grad=-values,
        states={"momentum_buffer": None},
        lr=1.0,
        **changes,
    )


def documented_bits(seed: int, step: int, row: int, column: int, value: int = 0) -> int:
    """``random_bits`` of ``csrc/common/stochastic.h`` in Python's integers.

    Args:
        value: of a moment, its bits as float32; row is then that of its stream.
    """
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x &= mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    key = mix(mix(mix(seed) + step) + row) + (value << 32)
    return mix(key + column * 0x9E3779B97F4A7C15) >> 32


def documented_rounding(x: float, dtype: torch.dtype, random: int) -> float:
    """The neighbour of x that the random bits choose, by the rule in the header, in fractions."""
    if x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 1, -14 if dtype == torch.float16 else -126)
    digits = 10 if dtype == torch.float16 else 7
    unit = Fraction(2) ** (exponent - digits)
    whole, rest = divmod(abs(Fraction(x)), unit)
    # How many bits of a float lie below the unit: so many random ones are added to them.
    subnormal = dtype == torch.float16 and abs(x) < 2.0**-14
    bits = 24 if subnormal else 23 - digits
    drawn = Fraction(random >> (32 - bits), 2**bits)
    up = drawn < rest / unit if subnormal else drawn + rest / unit >= 1
    return math.copysign(float((whole + up) * unit), x)


@low_precision
def test_stochastic_rounding_is_the_documented_one(backend: Backend, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(4, 33, generator=generator)
    exponents = torch.randint(-27, 15, values.shape, generator=generator)
    values = torch.ldexp(values, exponents)
    values[0, :6] = torch.tensor([0.0, -0.0, 2.0**-14, 1.0, -1.5, 2.0**-24])
    for seed, step in ((0, 1), (123, 7), (2**63 - 1, 100_000)):
        case = exact_step(values, dtype, seed=seed, step=number(step))
        got = check(backend, case)["param"].double()
        for row in range(values.shape[0]):
            for column in range(values.shape[1]):
                random = documented_bits(seed, step, row, column)
                want = documented_rounding(float(values[row, column]), dtype, random)
                assert float(got[row, column]) == want, (row, column)


@pytest.mark.parametrize("dtype", [*LOW_PRECISION, torch.float32])
def test_stochastic_moments_are_the_documented_ones(backend: Backend, dtype: torch.dtype) -> None:
    """Whatever param is, whether it has a master, and wherever the rows lie."""
    low = dtype in LOW_PRECISION
    case = make(
        *("row_adam_", dtype, (3, 19)), amsgrad=True, moment_dtype=torch.bfloat16, step=number(7)
    )
    wide = {name: None if x is None else x.float() for name, x in case.states.items()}
    exact = replace(case, states=wide).run(backend.ops, backend.device)
    for seed, master in ((0, True), (2**63 - 1, False)):
        stochastic = replace(case, seed=seed, master=case.param.float() if master and low else None)
        got = check(backend, stochastic)
        for name, stream in (("exp_avg", -1), ("exp_avg_sq", -2), ("max_exp_avg_sq", -2)):
            patterns = exact[name].view(torch.int32)
            for row, column in itertools.product(range(3), range(19)):
                value, pattern = float(exact[name][row, column]), int(patterns[row, column])
                random = documented_bits(seed, 7, stream, column, pattern & 0xFFFFFFFF)
                want = documented_rounding(value, torch.bfloat16, random)
                assert float(got[name][row, column]) == want, (name, row, column)
        assert_same_bits(
            got["max_exp_avg_sq"], torch.maximum(case.states["max_exp_avg_sq"], got["exp_avg_sq"])
        )


@low_precision
def test_stochastic_rounding_at_the_ends_of_the_range(backend: Backend, dtype: torch.dtype) -> None:
    """What no finite neighbour holds is rounded to nearest."""
    largest = float(torch.finfo(dtype).max)
    ends = [largest, largest * (1 + 2.0**-14), largest * (1 - 2.0**-14), math.inf, math.nan, 3e38]
    values = torch.tensor([[*ends, *(-x for x in ends)]])
    got = exact_step(values, dtype, seed=5).run(backend.ops, backend.device)["param"]
    finite = values.abs() < largest
    assert_same_bits(got[~finite], values.to(dtype)[~finite])
    assert bool(got[finite].isfinite().all())


@low_precision
@pytest.mark.parametrize("size", [1.0, -3.0, 1e-6, 300.0])
@pytest.mark.parametrize("part", [0.5, 0.1, 0.999])
def test_stochastic_rounding_is_unbiased(
    backend: Backend, dtype: torch.dtype, size: float, part: float
) -> None:
    """The share of values rounded away from zero, over elements and over steps."""
    down = torch.tensor(size).to(dtype)
    bits = down.view(torch.int16) + 1  # the neighbour away from zero
    up = bits.view(dtype)
    value = float(down) + part * (float(up) - float(down))
    share = (float(np.float32(value)) - float(down)) / (float(up) - float(down))
    shape, steps = ((16, 64), 3) if interpreting_triton() else ((64, 256), 5)
    values = torch.full(shape, value)
    results = []
    for step in range(1, steps + 1):
        case = exact_step(values, dtype, seed=99, step=number(step))
        got = case.run(backend.ops, backend.device)["param"]
        assert bool(((got == down) | (got == up)).all())
        results.append((got == up).double())
    chosen = torch.stack(results)
    deviation = math.sqrt(share * (1 - share))

    def close(mean: Tensor, count: int) -> bool:
        return bool(((mean - share).abs() <= 5.5 * deviation / math.sqrt(count) + 1e-12).all())

    assert close(chosen.mean(), chosen.numel())
    assert close(chosen.mean(dim=(1, 2)), values.numel())
    # No element or row is favoured, and steps do not repeat each other.
    assert close(chosen.mean(dim=(0, 1)), steps * shape[0])
    assert close(chosen.mean(dim=(0, 2)), steps * shape[1])
    both = (chosen[0] * chosen[1]).mean() - share * share
    assert abs(float(both)) <= 5.5 * share * math.sqrt(1 - share**2) / math.sqrt(values.numel())


@low_precision
def test_stochastic_bits_belong_to_the_row(backend: Backend, dtype: torch.dtype) -> None:
    """Not to its place in the gradient; other steps and seeds have others."""
    values = torch.randn(20, 50, generator=torch.Generator().manual_seed(3))
    case = exact_step(values, dtype, seed=42)
    first = case.run(backend.ops, backend.device)["param"]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(5))
    moved = replace(case, rows=order, grad=case.grad[order])
    assert_same_bits(moved.run(backend.ops, backend.device)["param"], first)
    for other in (replace(case, seed=43), replace(case, step=number(2))):
        assert not torch.equal(other.run(backend.ops, backend.device)["param"], first)


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", backend_params("cpu", "reference", "triton"), indirect=True)
@pytest.mark.parametrize("op", ["row_sgd_", "row_adam_"])
@pytest.mark.skipif(total_memory() < 16 * 2**30, reason="needs 16 GB of RAM")
def test_more_than_2_31_elements(backend: Backend, op: str) -> None:
    """A row begins at element 2^31 + 320. Nearly all pages of the tensors stay untouched."""
    size, dim, row = 2**25 + 8, 64, 2**25 + 5

    def table(dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dim, dtype=dtype, device=backend.device)

    rows = [row, 3, size]
    case = make(op, torch.float16, (6, dim), rows=[5, 3, 6], moment_dtype=torch.bfloat16)
    if op == "row_sgd_":
        case = replace(case, states={"momentum_buffer": None})
    want = case.run(reference)
    param = table(torch.float16)
    states = {name: None if x is None else table(x.dtype) for name, x in case.states.items()}
    for name, big in {"param": param, **states}.items():
        if big is not None:
            small = case.before()[name]
            big[row], big[3], big[row - 2**25] = small[5], small[3], 7.0
    case = replace(case, memory=param, rows=torch.tensor(rows), states=states)
    arguments = case.arguments().values()
    there = [x.to(backend.device) if isinstance(x, Tensor) else x for x in arguments]
    getattr(backend.ops, op)(*there)
    for name, big in {"param": param, **states}.items():
        if big is not None:
            assert_same_bits(big[[row, 3]].cpu(), want[name][[5, 3]])
            assert big[row - 2**25].unique().tolist() == [7.0]


# ---- the CPU library ---------------------------------------------------------------------------


MANY_ROWS, WIDE_ROW, COUNTED_ROWS = (700, 65), (1, 40_003), (9, 5)
SMALL = ((40, 65), (1, 4_103), COUNTED_ROWS)


def several_steps(*tables: tuple[int, int]) -> list[RowCase]:
    """Every operator, dtype and way to store; every second row of tables of more than ten."""
    cases: list[RowCase] = []
    for op, dtype, table in itertools.product(OPERATORS, DTYPES, tables):
        low = dtype in LOW_PRECISION
        narrow = op == "row_adam_" and dtype != torch.float64
        for seed in (-1, 17) if low or narrow else (-1,):
            case = make(
                op,
                dtype,
                table,
                rows=[*range(0, table[0], 2)] if table[0] > 10 else None,
                data_seed=len(cases),
                master=low and seed < 0,
                moment_dtype=torch.bfloat16 if narrow and dtype != torch.bfloat16 else None,
                amsgrad=True,
                row_step=table == COUNTED_ROWS,
                row_count=table == COUNTED_ROWS,
                step=number(30),
                weight_decay=0.01,
                seed=seed,
            )
            cases.append(case)
    return cases


@pytest.mark.parametrize("backend", backend_params("cpu"), indirect=True)
def test_same_bits_for_any_number_of_threads(backend: Backend) -> None:
    for case in several_steps(MANY_ROWS, WIDE_ROW):
        with use_threads(1):
            first = case.run(backend.ops)
        for threads in THREADS:
            with use_threads(threads):
                assert_same(case.run(backend.ops), first)


def digest(ops: Any) -> str:
    """Of everything that `several_steps` write."""
    return digest_of(x for case in several_steps(*SMALL) for x in case.run(ops).values())


@pytest.mark.parametrize("backend", backend_params("cpu"), indirect=True)
def test_same_bits_for_every_instruction_set_and_the_reference(backend: Backend) -> None:
    digests = {"reference": digest(reference)} | digests_of_levels("test_row_operators")
    assert len(set(digests.values())) == 1, digests
