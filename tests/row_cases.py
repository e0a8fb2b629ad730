"""Steps of the row optimizers: what they are, and how hypothesis draws them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

OPERATORS = ("row_adam_", "row_adagrad_", "row_rowwise_adagrad_", "row_sgd_")
LOW_PRECISION = (torch.float16, torch.bfloat16)
DTYPES = (*LOW_PRECISION, torch.float32, torch.float64)
# Their order in the schemas, for each operator.
STATES = {
    "row_adam_": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step", "row_count"),
    "row_adagrad_": ("sum",),
    "row_rowwise_adagrad_": ("sum",),
    "row_sgd_": ("momentum_buffer",),
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "row_adam_": {
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "decoupled": False,
        "corrected_denominator": True,
    },
    "row_adagrad_": {"lr_decay": 0.0, "eps": 1e-10},
    "row_rowwise_adagrad_": {"lr_decay": 0.0, "eps": 1e-10},
    "row_sgd_": {"momentum": 0.9, "dampening": 0.0, "nesterov": False},
}
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 65504.0, -3e38, 1e-45, 6e-8)
# Rows that no table has.
OUTSIDE = (-1, -(2**63), 2**31, 2**40, 2**63 - 1)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def number(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def with_its_strides(x: Tensor, device: torch.device | str) -> Tensor:
    """``x`` on the device; `Tensor.to` would make a view contiguous."""
    storage = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


@dataclass(frozen=True)
class RowCase:
    """One call. ``memory`` holds param in its first ``dim`` columns; what lies behind is a gap."""

    op: str
    memory: Tensor
    dim: int
    grad: Tensor
    states: dict[str, Tensor | None]
    master: Tensor | None = None
    rows: Tensor | None = None
    used_rows: Tensor | None = None
    segments: Tensor | None = None
    sources: Tensor | None = None
    coefficients: Tensor | None = None
    step: Tensor = field(default_factory=lambda: number(1))
    inv_scale: Tensor | None = None
    found_inf: Tensor | None = None
    lr: float = 1e-3
    lr_tensor: Tensor | None = None
    weight_decay: float = 0.0
    maximize: bool = False
    seed: int = -1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def param(self) -> Tensor:
        return self.memory[:, : self.dim]

    @property
    def acc(self) -> torch.dtype:
        return accumulation(self.memory.dtype)

    def option(self, name: str) -> Any:
        return self.options.get(name, DEFAULTS[self.op][name])

    def arguments(self) -> dict[str, Any]:
        """In the order of the schema."""
        return {
            "param": self.param,
            "master": self.master,
            **{name: self.states.get(name) for name in STATES[self.op]},
            "rows": self.rows,
            "used_rows": self.used_rows,
            "grad": self.grad,
            "segments": self.segments,
            "sources": self.sources,
            "coefficients": self.coefficients,
            "step": self.step,
            "inv_scale": self.inv_scale,
            "found_inf": self.found_inf,
            "lr": self.lr,
            "lr_tensor": self.lr_tensor,
            "weight_decay": self.weight_decay,
            "maximize": self.maximize,
            "seed": self.seed,
            **{name: self.option(name) for name in DEFAULTS[self.op]},
        }

    def run(self, ops: Any, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Everything that the operator may write, on the CPU; the case itself stays as it is."""
        there = {
            name: value.to(device, copy=True) if isinstance(value, Tensor) else value
            for name, value in self.arguments().items()
        }
        memory = self.memory.to(device, copy=True)
        there["param"] = memory[:, : self.dim]
        assert getattr(ops, self.op)(*there.values()) is None
        written = {"param": memory, **{name: there[name] for name in ("master", *STATES[self.op])}}
        return {name: tensor.cpu() for name, tensor in written.items() if tensor is not None}

    def before(self) -> dict[str, Tensor]:
        """What `run` gives, as it was before the step."""
        written = {"param": self.memory, "master": self.master, **self.states}
        return {name: tensor for name, tensor in written.items() if tensor is not None}

    def table_rows(self) -> list[tuple[int, int]]:
        """(row of the gradient, row of the table) for those that count."""
        count = self.grad.shape[0] if self.rows is None else self.rows.numel()
        used = count if self.used_rows is None else int(self.used_rows)
        rows = list(range(count)) if self.rows is None else self.rows.tolist()
        size = self.memory.shape[0]
        return [(k, row) for k, row in enumerate(rows) if k < used and 0 <= row < size]


def make(
    op: str,
    dtype: torch.dtype,
    table: tuple[int, int],
    *,
    rows: list[int] | None = None,
    data_seed: int = 0,
    scale: float = 0.1,
    grad_scale: float = 0.01,
    grad_dtype: torch.dtype | None = None,
    moment_dtype: torch.dtype | None = None,
    master: bool = False,
    momentum: float = 0.9,
    amsgrad: bool = False,
    row_step: bool = False,
    row_count: bool = False,
    gap: int = 0,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> RowCase:
    """A step in the middle of a training run, with normally distributed values.

    Args:
        table: rows and columns.
        rows: of the table, that have a gradient; None: all.
        data_seed: of the values.
        scale, grad_scale: of the parameter; of the gradient and, accordingly, the states.
        master, momentum, amsgrad, row_step, row_count: which states there are.
        gap: elements between the rows of param.
        options: hyperparameters of this operator.
        fields: of `RowCase`.
    """
    generator = torch.Generator().manual_seed(data_seed)
    size, dim = table
    acc = accumulation(dtype)
    moments = moment_dtype or acc
    step = int(fields.get("step", number(1)))

    def normal(*shape: int, factor: float = grad_scale) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * factor

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator, dtype=torch.int32)

    values = normal(size, dim, factor=scale).to(acc)
    memory = torch.full((size, dim + gap), -7.0, dtype=dtype)
    memory[:, :dim] = values.to(dtype)
    grad = normal(size if rows is None else len(rows), dim).to(grad_dtype or acc)
    options = options or {}
    states: dict[str, Tensor | None]
    if op == "row_adam_":
        states = {
            "exp_avg": normal(size, dim).to(moments),
            "exp_avg_sq": normal(size, dim).square().to(moments),
            "max_exp_avg_sq": normal(size, dim).square().to(moments) if amsgrad else None,
            "row_step": integers(max(0, step - 1000), max(step, 1)) if row_step else None,
            "row_count": integers(0, 1000) if row_count else None,
        }
    elif op == "row_sgd_":
        states = {"momentum_buffer": normal(size, dim).to(acc) if momentum else None}
        options = {"momentum": momentum, **options}
    else:
        shape = (size, dim) if op == "row_adagrad_" else (size,)
        states = {"sum": normal(*shape).square().to(acc)}
    return RowCase(
        op=op,
        memory=memory,
        dim=dim,
        grad=grad,
        states=states,
        master=values if master else None,
        rows=None if rows is None else torch.tensor(rows, dtype=torch.int64),
        options=options,
        **fields,
    )


def with_stale_masters(case: RowCase, share: float, seed: int) -> RowCase:
    """Some elements of param written by somebody else, among them a zero whose sign changed."""
    assert case.master is not None
    generator = torch.Generator().manual_seed(seed)
    memory, master = case.memory.clone(), case.master.clone()
    stale = torch.rand(case.param.shape, generator=generator) < share
    other = torch.randn(case.param.shape, generator=generator)
    memory[:, : case.dim][stale] = other.to(memory.dtype)[stale]
    if master.numel():
        master[0, 0], memory[0, 0] = 0.0, -0.0
    return replace(case, memory=memory, master=master)


def sprinkle(x: Tensor, generator: torch.Generator) -> Tensor:
    """A copy in which NaN, infinities or ends of the ranges have taken one place in five."""
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    where = torch.rand(x.shape, generator=generator) < 0.2
    which = torch.randint(0, len(SPECIAL), x.shape, generator=generator)
    return torch.where(where, special[which].to(x.dtype), x)


def with_special_values(case: RowCase, seed: int) -> RowCase:
    """NaN, infinities, ends of the ranges in param, gradient and states."""
    generator = torch.Generator().manual_seed(seed)

    def sprinkled(tensor: Tensor) -> Tensor:
        return sprinkle(tensor, generator)

    states = {
        name: state if state is None or not state.is_floating_point() else sprinkled(state)
        for name, state in case.states.items()
    }
    return replace(
        case,
        memory=sprinkled(case.memory),
        grad=sprinkled(case.grad),
        states=states,
        master=None if case.master is None else sprinkled(case.master),
    )


@st.composite
def row_cases(
    draw: st.DrawFn, largest: int = 20_000, table: tuple[torch.dtype, int, int] | None = None
) -> RowCase:
    """Any step whose values are all finite.

    Args:
        largest: bound for the number of elements of the table.
        table: dtype, rows and columns, where they are given.
    """

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    op = one_of(*OPERATORS)
    if table is None:
        odd = [dim for dim in (1023, 2049, 4100) if dim <= largest]
        dim = draw(st.one_of(st.integers(1, 300), st.sampled_from(odd)))
        size = draw(st.integers(1, max(1, min(40, largest // dim))))
        table = one_of(*DTYPES), size, dim
    dtype, size, dim = table
    low, double = dtype in LOW_PRECISION, dtype == torch.float64
    rows: list[int] | None = None
    if draw(st.booleans()):
        rows = draw(st.permutations(range(size)))[: draw(st.integers(0, size))]
        if draw(st.booleans()):
            rows.insert(draw(st.integers(0, len(rows))), one_of(size, *OUTSIDE))
    master = low and draw(st.booleans())
    if op == "row_adam_":
        beta1, beta2 = one_of((0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.95, 0.9999))
        options = {
            "beta1": beta1,
            "beta2": beta2,
            "eps": one_of(1e-8, 1e-3),
            "decoupled": draw(st.booleans()),
            "corrected_denominator": draw(st.booleans()),
        }
    elif op == "row_sgd_":
        options = {"dampening": one_of(0.0, 0.3), "nesterov": draw(st.booleans())}
    else:
        options = {"lr_decay": one_of(0.0, 1e-4), "eps": one_of(1e-10, 1e-3)}
    case = make(
        op,
        dtype,
        (size, dim),
        rows=rows,
        data_seed=draw(st.integers(0, 2**32)),
        scale=one_of(1.0, 0.1, 1e-6),
        grad_scale=one_of(100.0, 0.1, 1e-3, 1e-7, 1e-20),
        grad_dtype=torch.float64 if double else one_of(*LOW_PRECISION, torch.float32),
        moment_dtype=None if double else one_of(None, torch.bfloat16),
        master=master,
        momentum=one_of(0.0, 0.9),
        amsgrad=draw(st.booleans()),
        row_step=draw(st.booleans()),
        row_count=draw(st.booleans()),
        gap=one_of(0, 0, 1, 24),
        step=number(one_of(1, 2, 10, 1000, 100_000)),
        inv_scale=one_of(None, None, number(2.0**-10), number(1 / 3)),
        found_inf=one_of(None, number(0.0), number(-0.0)),
        lr=one_of(1e-3, 0.1, 1e-5, 0.0),
        lr_tensor=one_of(None, None, number(0.02), number(0.02, torch.float64)),
        weight_decay=one_of(0.0, 0.01, 0.3),
        maximize=draw(st.booleans()),
        seed=one_of(-1, -1, 0, 7, 2**63 - 1),
        options=options,
    )
    if draw(st.booleans()):
        used = draw(st.integers(0, case.grad.shape[0]))
        case = replace(case, used_rows=torch.tensor([used], dtype=torch.int32))
    if master and draw(st.booleans()):
        case = with_stale_masters(case, one_of(0.1, 1.0), draw(st.integers(0, 2**32)))
    return case


def total_memory() -> int:
    """Bytes of RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
