"""The row optimizers' Triton kernels, interpreted on CPU tensors.

Run by `test_triton` in a process of its own, as ``triton_interpreted.py``. NumPy rounds every
operation by itself, and so do the kernels as they are compiled, which add in the documented order:
steps must give the bits of the reference. Not so in float64, where torch's square root is not
always the nearest. Steps that sum their gradients themselves are in `test_row_fused`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from lookups import DTYPES, assert_same_bits
from torch import Tensor

from fastemb import _native

# NumPy tells of every infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

assert os.environ.get("TRITON_INTERPRET") == "1"
assert os.environ.get("FASTEMB_BACKEND") == "triton"

triton = _native.backend("triton")
reference = _native.backend("reference")
F16, BF16, F32, F64 = DTYPES
STATES = {
    "row_adam_": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step", "row_count"),
    "row_adagrad_": ("sum",),
    "row_rowwise_adagrad_": ("sum",),
    "row_sgd_": ("momentum_buffer",),
}
ELEMENTWISE = tuple(op for op in STATES if op != "row_rowwise_adagrad_")
SPECIAL = torch.tensor(
    [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 65504.0, -3e38, 1e-45, 6e-8], dtype=F64
)


# ---- steps ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One call of an operator; ``writes`` are the arguments that it may change."""

    op: str
    arguments: dict[str, Any]

    @property
    def writes(self) -> list[str]:
        names = ("param", "master", *STATES[self.op])
        return [name for name in names if self.arguments[name] is not None]

    def changed(self, **arguments: Any) -> Step:
        assert arguments.keys() <= self.arguments.keys()
        return replace(self, arguments={**self.arguments, **arguments})

    def run(self, backend: Any) -> dict[str, Tensor]:
        """What it writes, in copies; param with what lies between its rows."""
        given = dict(self.arguments)
        for name in self.writes:
            x = given[name]
            whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
            given[name] = whole.clone().as_strided(x.shape, x.stride(), x.storage_offset())
        getattr(backend, self.op)(**given)
        return {name: given[name] for name in self.writes}


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def make(
    op: str,
    dtype: torch.dtype,
    shape: tuple[int, int],
    *,
    rows: list[int] | None = None,
    grad_dtype: torch.dtype | None = None,
    moment_dtype: torch.dtype | None = None,
    number: int = 3,
    gap: int = 0,
    master: bool = False,
    values: int = 0,
    extra_states: tuple[str, ...] = (),
    **changes: Any,
) -> Step:
    """A step with random values.

    Args:
        gap: elements between the rows of param.
        values: seed of the values.
        extra_states: those that the operator may do without and that it shall have.
    """
    acc = F64 if dtype == F64 else F32
    count = shape[0] if rows is None else len(rows)
    param = normal((shape[0], shape[1] + gap), dtype, values)[:, : shape[1]]
    copy = None
    if master:
        # Near enough to round to the parameter, for most elements.
        copy = param.float() * (1 + 2.0**-13 * normal(shape, F32, values + 1).tanh())
    arguments: dict[str, Any] = {"param": param, "master": copy}
    moment = moment_dtype or acc
    square = normal(shape, F64, values + 2).square()
    counter = torch.arange(shape[0], dtype=torch.int32) % number
    if op == "row_adam_":
        arguments |= {
            "exp_avg": normal(shape, moment, values + 3),
            "exp_avg_sq": square.to(moment),
            "max_exp_avg_sq": (1.01 * square.flip(0)).to(moment),
            "row_step": counter,
            "row_count": counter.flip(0),
        }
        rest = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        rest |= {"decoupled": False, "corrected_denominator": True}
    elif op == "row_sgd_":
        arguments["momentum_buffer"] = normal(shape, acc, values + 3)
        rest = {"momentum": 0.8, "dampening": 0.0, "nesterov": False}
    else:
        total = square[:, 0].contiguous() if op == "row_rowwise_adagrad_" else square
        arguments["sum"] = total.to(acc)
        rest = {"lr_decay": 0.0, "eps": 1e-10}
    for name in ("max_exp_avg_sq", "row_step", "row_count", "momentum_buffer"):
        if name in arguments and name not in extra_states:
            arguments[name] = None
    arguments |= {
        "rows": None if rows is None else torch.tensor(rows, dtype=torch.int64),
        "used_rows": None,
        "grad": normal((count, shape[1]), grad_dtype or acc, values + 4),
        **dict.fromkeys(("segments", "sources", "coefficients")),
        "step": torch.tensor(float(number)),
        "inv_scale": None,
        "found_inf": None,
        "lr": 0.1,
        "lr_tensor": None,
        "weight_decay": 0.0,
        "maximize": False,
        "seed": -1,
    }
    return Step(op, arguments | rest).changed(**changes)


OUTSIDE = (-1, -(2**63), 2**31, 2**40, 2**63 - 1)


@st.composite
def steps(draw: st.DrawFn, operators: tuple[str, ...] = tuple(STATES)) -> Step:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def maybe(value: Any) -> Any:
        return value if draw(st.booleans()) else None

    op, dtype = one_of(*operators), one_of(*DTYPES)
    table, dim = one_of(1, 2, 6, 40), one_of(1, 2, 3, 8, 17, 33, 64, 100, 257, 300)
    rows = None
    if draw(st.booleans()):
        rows = draw(st.permutations((*range(table), table, *OUTSIDE)))
        rows = rows[: draw(st.integers(0, 12))]
    count = table if rows is None else len(rows)
    master = dtype in (F16, BF16) and draw(st.booleans())
    own = {
        "row_adam_": {
            "beta1": one_of(0.9, 0.0),
            "eps": one_of(1e-8, 1e-3),
            "decoupled": draw(st.booleans()),
            "corrected_denominator": draw(st.booleans()),
        },
        "row_sgd_": {"dampening": one_of(0.0, 0.3), "nesterov": draw(st.booleans())},
    }.get(op, {"lr_decay": one_of(0.0, 0.01)})
    step = make(
        op,
        dtype,
        (table, dim),
        rows=rows,
        grad_dtype=F64 if dtype == F64 else one_of(F16, BF16, F32),
        moment_dtype=None if dtype == F64 else one_of(None, BF16),
        number=one_of(1, 2, 7, 1000, 123_457),
        gap=one_of(0, 0, 1, 8),
        master=master,
        values=draw(st.integers(0, 2**31)),
        extra_states=tuple(draw(st.sets(st.sampled_from([s for x in STATES.values() for s in x])))),
        used_rows=maybe(torch.tensor([draw(st.integers(0, count + 1))], dtype=torch.int32)),
        inv_scale=maybe(torch.tensor(one_of(0.25, 1 / 3))),
        found_inf=maybe(torch.tensor(one_of(0.0, -0.0))),
        lr=one_of(0.1, 1e-3),
        lr_tensor=one_of(None, None, torch.tensor(0.03), torch.tensor(0.03, dtype=F64)),
        weight_decay=one_of(0.0, 0.01),
        maximize=draw(st.booleans()),
        seed=one_of(-1, 0, 1, 2**31, 2**63 - 1),
        **own,
    )
    if master and draw(st.booleans()):
        step.arguments["master"][0] += 1  # the first row was written by somebody else
    return step


def with_special_values(step: Step, seed: int) -> Step:
    """NaN, infinities, signed zeros and the ends of the ranges in every tensor of numbers."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name in ("param", "master", "grad", *STATES[step.op][:3]):
        x = step.arguments[name]
        if x is not None:
            which = torch.randint(0, 4 * len(SPECIAL), x.shape, generator=generator)
            special = SPECIAL[which % len(SPECIAL)].to(x.dtype)
            changes[name] = torch.where(which < len(SPECIAL), special, x)
    return step.changed(**changes)


# ---- the numerics contract ------------------------------------------------------------------


def whole(x: Tensor) -> Tensor:
    """With what lies between its rows."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def assert_bits_of_the_reference(step: Step) -> None:
    got, want = step.run(triton), step.run(reference)
    for name in got:
        try:
            assert_same_bits(whole(got[name]), whole(want[name]))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def assert_near_the_reference(step: Step) -> None:
    """What comes of a root, within its bound; everything else bit for bit."""
    before, got, want = step.arguments, step.run(triton), step.run(reference)
    dtype = before["param"].dtype
    unit = (2 * before["param"].shape[1] + 16) * (2.0**-53 if dtype == F64 else 2.0**-24)
    for name in got:
        size = want[name].double().abs()
        if name in ("param", "master"):
            # The update is no larger than what it leads from and to together.
            error = unit * (size + before["param"].double().abs())
            if name == "param" and dtype in (F16, BF16):
                error += torch.finfo(dtype).eps * size + 2.0**-24  # rounded to the next number
        elif name == "sum" and step.op == "row_rowwise_adagrad_":
            error = unit * size
        else:
            assert_same_bits(got[name], want[name])
            continue
        excess = (got[name].double() - want[name].double()).abs() - error
        assert bool((excess <= 0).all()), f"{name}: off by {excess.max().item()} too much"
    others = [row for row in range(before["param"].shape[0]) if row not in updated_rows(step)]
    for name in got:
        assert_same_bits(got[name][others], before[name][others])
    assert_same_bits(gaps(got["param"]), gaps(before["param"]))


def updated_rows(step: Step) -> list[int]:
    x = step.arguments
    rows = list(range(x["grad"].shape[0])) if x["rows"] is None else x["rows"].tolist()
    return rows if x["used_rows"] is None else rows[: int(x["used_rows"])]


def gaps(param: Tensor) -> Tensor:
    """What lies between the rows, which nobody may write."""
    rows, dim = param.shape
    return param.as_strided((rows - 1, param.stride(0) - dim), param.stride(), dim).contiguous()


examples = drawn(15, derandomize=True, database=None)
single = steps().filter(lambda step: step.arguments["param"].dtype != F64)


@examples
@given(step=single)
def test_steps(step: Step) -> None:
    assert_bits_of_the_reference(step)


@examples
@given(step=single, seed=st.integers(0, 2**32))
def test_special_values(step: Step, seed: int) -> None:
    assert_bits_of_the_reference(with_special_values(step, seed))


@examples
@given(step=steps().filter(lambda step: step.arguments["param"].dtype == F64))
def test_float64(step: Step) -> None:
    assert_near_the_reference(step)


@pytest.mark.parametrize("op", STATES)
@pytest.mark.parametrize("found", [1.0, 2.0, float("inf"), float("nan")])
def test_a_skipped_step_writes_nothing(op: str, found: float) -> None:
    step = make(op, BF16, (4, 3), master=True, extra_states=STATES[op])
    got = step.changed(found_inf=torch.tensor(found)).run(triton)
    for name, after in got.items():
        assert_same_bits(after, step.arguments[name])


@pytest.mark.parametrize("op", ELEMENTWISE)
@pytest.mark.parametrize("length", [1, 255, 1792, 5003])
def test_one_wide_row(op: str, length: int) -> None:
    """As dense parameters come; several programs share it."""
    assert_bits_of_the_reference(make(op, F16, (1, length), seed=11, extra_states=STATES[op]))


def test_counters_of_rows_of_several_tiles() -> None:
    """Every tile needs the count from before the step."""
    step = make("row_adam_", F32, (3, 1100), number=50, extra_states=("row_step", "row_count"))
    assert_bits_of_the_reference(step.changed(decoupled=True, weight_decay=0.1))


def test_masked_columns_add_nothing_to_the_sum() -> None:
    """Zero times an infinite scale is a NaN."""
    step = make("row_rowwise_adagrad_", F32, (2, 3), inv_scale=torch.tensor(torch.inf))
    assert step.run(triton)["sum"].tolist() == [torch.inf] * 2


@pytest.mark.parametrize("op", STATES)
def test_wrong_arguments(op: str) -> None:
    step = make(op, F32, (4, 3), grad=torch.zeros(4, 2))
    with pytest.raises(ValueError, match=rf"^{op}: ") as want:
        step.run(reference)
    with pytest.raises(ValueError, match=rf"^{op}: ") as got:
        step.run(triton)
    assert str(got.value) == str(want.value)


# ---- stochastic rounding --------------------------------------------------------------------


def rounding(values: Tensor, dtype: torch.dtype, seed: int, number: int = 1) -> Step:
    """The step that takes zeros to ``values``, rounded stochastically."""
    shape = (values.shape[0], values.shape[1])
    step = make("row_sgd_", dtype, shape, grad=-values, lr=1.0, seed=seed, number=number)
    return step.changed(param=torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(("seed", "number"), [(0, 1), (2**31, 77), (2**63 - 1, 2**24)])
def test_stochastic_bits(dtype: torch.dtype, seed: int, number: int) -> None:
    """Any float32: subnormals of fp16, infinities, NaN and what rounds past the largest too."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (9, 100), generator=generator).to(torch.int32)
    small = torch.randn(4, 100, generator=generator) * torch.logspace(-9, -3, 100)
    large = 65504.0 + torch.linspace(-40, 40, 100)
    values = torch.cat([bits.view(F32), small, large.reshape(1, -1)])
    assert_bits_of_the_reference(rounding(values, dtype, seed, number))


@pytest.mark.parametrize(
    ("dtype", "share", "low"),
    [(F16, 0.1, 1.0), (F16, 0.5, 2.0**-16), (BF16, 0.5, 2.0**-130), (BF16, 0.77, 1.0)],
)
def test_stochastic_rounding_is_unbiased(dtype: torch.dtype, share: float, low: float) -> None:
    """A value ``share`` of the way between two neighbours goes up that often."""
    neighbours = torch.tensor([low], dtype=dtype)
    gap = torch.nextafter(neighbours, 2 * neighbours).double().item() - low
    values = torch.full((100, 60), low + share * gap)
    up = (rounding(values, dtype, 3).run(triton)["param"].double() - low) / gap
    assert set(up.unique().tolist()) == {0.0, 1.0}
    deviation = (share * (1 - share)) ** 0.5
    assert abs(up.mean().item() - share) < 4 * deviation / up.numel() ** 0.5
    for axis in (0, 1):  # nor does a row or a column lean to one side
        expected = deviation / up.shape[axis] ** 0.5
        assert up.mean(axis).std().item() == pytest.approx(expected, rel=0.35)


def test_stochastic_bits_are_those_of_step_row_and_column() -> None:
    whole_table = rounding(torch.full((40, 20), 1.0 + 2.0**-9), BF16, 5)
    want = whole_table.run(triton)["param"]
    some = torch.tensor([31, 2, 17])
    part = whole_table.changed(rows=some, grad=whole_table.arguments["grad"][:3])
    assert_same_bits(part.run(triton)["param"][some], want[some])
    for other in ({"step": torch.tensor(2.0)}, {"seed": 6}):
        assert not torch.equal(whole_table.changed(**other).run(triton)["param"], want)
