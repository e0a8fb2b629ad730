"""Rows that slept: calls of ``row_adam_catch_up_``, and how far a result may be off.

The exact result is that of ``fastemb/_lazy_reference.py`` in float64, the steps one by one. With
unit u of the accumulation type, a row that slept n steps, and S the sum of the magnitudes of what
the steps subtract from an element, each step's reduced by later decay:

- The series rounds each coefficient once, eps and eps / root four times, three more operations for
  each of the three terms that are at most 1/64 of the one before, and the division and product
  outside: 8 u S. What it leaves out of 1 / (1 + x) after four terms is x^4 / (1 + x), with x of
  each step known.
- The replay rounds m twice in each step, v twice (halved by the root), some ten operations in the
  last one, and three times in each addition: (3 n + 12) u S. It leaves out the steps behind the
  horizon, which are known.
- The parameter is decayed (2 u) and the difference rounded (u).

Under an L2 penalty the operator is the reference, operation by operation: the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from row_cases import DTYPES, LOW_PRECISION, OUTSIDE, accumulation, number, sprinkle
from row_model import Interval, assert_same_bytes, value_before
from torch import Tensor

from fastemb import _lazy_reference as reference
from fastemb.optim._history import AdamHistory

Array = NDArray[np.float64]
OP = "row_adam_catch_up_"
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "row_step")
KEEP, RATE, ROOT = 4, 5, 6  # columns of the history
# In float64 the reference rounds as well, and more often.
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-50}
SMALLEST = 2.0**-149


@lru_cache(maxsize=64)
def history(
    steps: int, beta1: float, beta2: float, eps: float, amsgrad: bool, decay: float
) -> AdamHistory:
    """After ``steps`` steps, with a learning rate that changes and a skipped step in between."""
    ring = AdamHistory(number(0), beta1, beta2, eps, amsgrad=amsgrad)
    for t in range(1, steps + 1):
        if t % 5 == 2:
            ring.append(number(t), 10.0, decay, number(1))
        ring.append(number(t), 0.01 * (1 + 0.5 * (t % 7)), decay, number(0) if t % 2 else None)
    return ring


@dataclass(frozen=True)
class LazyCase:
    """One call. ``memory`` holds param in its first ``dim`` columns; what lies behind is a gap."""

    memory: Tensor
    dim: int
    states: dict[str, Tensor | None]
    history: AdamHistory
    beta1: float
    beta2: float
    eps: float
    master: Tensor | None = None
    rows: Tensor | None = None
    used_rows: Tensor | None = None
    found_inf: Tensor | None = None
    weight_decay: float = 0.0
    seed: int = -1
    decoupled: bool = True

    @property
    def param(self) -> Tensor:
        return self.memory[:, : self.dim]

    @property
    def acc(self) -> torch.dtype:
        return accumulation(self.memory.dtype)

    @property
    def penalised(self) -> bool:
        return self.weight_decay != 0 and not self.decoupled

    def arguments(self) -> dict[str, Any]:
        """In the order of the schema."""
        return {
            "param": self.param,
            "master": self.master,
            **{name: self.states[name] for name in STATES},
            "rows": self.rows,
            "used_rows": self.used_rows,
            "step": self.history.step,
            "history": self.history.table,
            "found_inf": self.found_inf,
            "weight_decay": self.weight_decay,
            "seed": self.seed,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "eps": self.eps,
            "smallest_root": self.history.smallest_root,
            "horizon": self.history.horizon,
            "decoupled": self.decoupled,
        }

    def run(
        self, ops: Any, device: torch.device | str = "cpu", calls: int = 1
    ) -> dict[str, Tensor]:
        """Everything that the operator may write, on the CPU; the case itself stays as it is."""
        there = {
            name: value.to(device, copy=True) if isinstance(value, Tensor) else value
            for name, value in self.arguments().items()
        }
        memory = self.memory.to(device, copy=True)
        there["param"] = memory[:, : self.dim]
        for _ in range(calls):
            assert getattr(ops, OP)(*there.values()) is None
        written = {"param": memory, **{name: there[name] for name in ("master", *STATES)}}
        return {name: tensor.cpu() for name, tensor in written.items() if tensor is not None}

    def before(self) -> dict[str, Tensor]:
        """What `run` gives, as it was before the call."""
        written = {"param": self.memory, "master": self.master, **self.states}
        return {name: tensor for name, tensor in written.items() if tensor is not None}

    def sleepers(self) -> list[int]:
        """The rows that must be caught up."""
        if self.found_inf is not None and float(self.found_inf) != 0:
            return []
        size, row_step = self.memory.shape[0], self.states["row_step"]
        assert row_step is not None
        rows = list(range(size)) if self.rows is None else self.rows.tolist()
        used = len(rows) if self.used_rows is None else int(self.used_rows)
        now = int(self.history.step)
        return [row for row in rows[:used] if 0 <= row < size and int(row_step[row]) < now]

    # ---- what must come out ---------------------------------------------------------------------

    def check(self, got: dict[str, Tensor]) -> None:
        """Everything that the operator wrote, and that it wrote nothing else."""
        rows, now = self.sleepers(), int(self.history.step)
        assert got["row_step"][rows].tolist() == [now] * len(rows)
        others = [row for row in range(self.memory.shape[0]) if row not in set(rows)]
        for name, tensor in self.before().items():
            assert_same_bytes(got[name][others], tensor[others])
        assert_same_bytes(got["param"][:, self.dim :], self.memory[:, self.dim :])
        if self.penalised:
            for name, tensor in self.run(reference).items():
                assert_same_bytes(got[name], tensor)
            return
        exact = self._exact(rows)
        error = np.zeros((len(rows), self.dim))
        for place, row in enumerate(rows):
            error[place] = self._error(row)
        unit = UNIT[self.acc]

        def within(name: str, value: Tensor, slack: Array, what: Tensor) -> None:
            middle = value.numpy()
            stochastic = self.seed >= 0 and what.dtype in LOW_PRECISION
            stochastic = stochastic and not (name == "param" and self.master is not None)
            Interval(middle - slack, middle + slack, self.acc).check(what, name, stochastic)

        within("param", exact["param"], error, got["param"][rows, : self.dim])
        if self.master is not None:
            within("master", exact["param"], error, got["master"][rows])
            rounded = got["master"][rows].to(self.memory.dtype)
            assert_same_bytes(got["param"][rows, : self.dim], rounded)
        slept = now - self.before()["row_step"][rows].numpy()[:, None]
        roundings = 2.01 + (slept if self.acc == torch.float64 else 0)
        for name in ("exp_avg", "exp_avg_sq"):
            size = exact[name].abs().numpy()
            old = self.before()[name][rows].abs().double().numpy()
            within(
                name, exact[name], unit * roundings * size + SMALLEST * (1 + old), got[name][rows]
            )
        if self.states["max_exp_avg_sq"] is not None:
            assert_same_bytes(got["max_exp_avg_sq"], self.before()["max_exp_avg_sq"])

    def _exact(self, rows: list[int]) -> dict[str, Tensor]:
        """The steps one by one, in float64; of the rows."""
        arguments = self.arguments() | {"master": None, "used_rows": None, "found_inf": None}
        arguments |= {"rows": torch.tensor(rows, dtype=torch.int64), "seed": -1}
        arguments["param"] = value_before(self).double()  # type: ignore[arg-type]
        for name in STATES:
            state = arguments[name]
            if state is not None:
                arguments[name] = state.clone() if name == "row_step" else state.double()
        for name in ("param", "exp_avg", "exp_avg_sq"):
            arguments[name] = arguments[name].clone()
        getattr(reference, OP)(**arguments)
        return {name: arguments[name][rows] for name in ("param", "exp_avg", "exp_avg_sq")}

    def _error(self, row: int) -> Array:
        """How far the elements of a row that slept may be off."""
        before, ring = self.before(), self.history
        table, now = ring.table.numpy(), int(ring.step)
        last = int(before["row_step"][row])
        m, v = (before[name][row].double().numpy() for name in ("exp_avg", "exp_avg_sq"))
        amsgrad = self.states["max_exp_avg_sq"] is not None
        second = before["max_exp_avg_sq"][row].double().numpy() if amsgrad else v
        size, remainder, dropped = np.zeros(self.dim), np.zeros(self.dim), np.zeros(self.dim)
        for age in range(1, now - last + 1):
            at = table[(last + age) % len(table)]
            root = np.sqrt(second * (1.0 if amsgrad else self.beta2**age))
            momentum = np.abs(m) * self.beta1**age * at[RATE] * at[KEEP]
            change = np.zeros(self.dim)
            np.divide(momentum, root / at[ROOT] + self.eps, out=change, where=momentum > 0)
            size += change
            if age > ring.horizon:
                dropped += change
            x = np.divide(self.eps * at[ROOT], root, out=np.zeros(self.dim), where=root > 0)
            remainder += change * x**4
        kind = np.float64 if self.acc == torch.float64 else np.float32
        has_series = np.sqrt(second.astype(kind)) >= kind(ring.smallest_root)
        slept = now - last
        steps = 3 * slept if self.acc == torch.float64 else 0
        moved = np.where(
            has_series,
            remainder + (8 + steps) * UNIT[self.acc] * size,
            dropped + (3 * slept + 12) * UNIT[self.acc] * size,
        )
        kept = np.abs(value_before(self)[row].double().numpy()) * table[last % len(table), KEEP]  # type: ignore[arg-type]
        return moved + UNIT[self.acc] * (3 * kept + size) + 4 * SMALLEST


def make(
    dtype: torch.dtype,
    table: tuple[int, int],
    *,
    steps: int = 40,
    last: Sequence[int] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    amsgrad: bool = False,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    master: bool = False,
    moment_dtype: torch.dtype | None = None,
    rows: list[int] | None = None,
    used_rows: int | None = None,
    gap: int = 0,
    data_seed: int = 0,
    **fields: Any,
) -> LazyCase:
    """Rows with every ratio of the second moment to eps, some elements without any momentum.

    Args:
        steps: that have been made.
        last: of each row, the step that it is current at; by default one of each kind.
        master: half of its first row is stale.
    """
    generator = torch.Generator().manual_seed(data_seed)
    size, dim = table
    acc = accumulation(dtype)

    def normal() -> Tensor:
        return torch.randn(size, dim, generator=generator, dtype=torch.float64)

    values = (0.1 * normal()).to(acc)
    memory = torch.full((size, dim + gap), -7.0, dtype=dtype)
    memory[:, :dim] = values.to(dtype)
    if master:
        memory[0, : dim // 2] = 0.75
    magnitude = torch.rand(size, dim, generator=generator, dtype=torch.float64)
    squares = 10.0 ** (20 * magnitude - 22)  # roots of 1e-11 to 0.1
    # Such that each step moves an element by the learning rate or so.
    momentum = normal() * (squares.sqrt() + eps)
    momentum[torch.rand(size, dim, generator=generator) < 0.1] = 0.0
    moments = moment_dtype or acc
    if last is None:
        # Never updated, current, of the last step, ahead, and any.
        any_step = torch.randint(0, steps + 1, (size,), generator=generator).tolist()
        last = [0, steps, steps - 1, steps + 3, *any_step][:size]
    decay = weight_decay if decoupled else 0.0
    return LazyCase(
        memory=memory,
        dim=dim,
        states={
            "exp_avg": momentum.to(moments),
            "exp_avg_sq": squares.to(moments),
            "max_exp_avg_sq": (squares * 1.5).to(moments) if amsgrad else None,
            "row_step": torch.tensor(last, dtype=torch.int32),
        },
        history=history(steps, *betas, eps, amsgrad, decay),
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        master=values if master else None,
        rows=None if rows is None else torch.tensor(rows, dtype=torch.int64),
        used_rows=None if used_rows is None else torch.tensor([used_rows], dtype=torch.int32),
        weight_decay=weight_decay,
        decoupled=decoupled,
        **fields,
    )


def with_limits(case: LazyCase, smallest_root: float | None, horizon: int | None) -> LazyCase:
    """With other bounds of series and replay than the history asks for; None: the same."""
    ring = copy.copy(case.history)
    if smallest_root is not None:
        ring.smallest_root = smallest_root
    if horizon is not None:
        ring.horizon = horizon
    return replace(case, history=ring)


def with_special_values(case: LazyCase, seed: int) -> LazyCase:
    """NaN, infinities, ends of the ranges in param, master and moments."""
    generator = torch.Generator().manual_seed(seed)

    def sprinkled(x: Tensor) -> Tensor:
        return sprinkle(x, generator) if x.is_floating_point() else x

    return replace(
        case,
        memory=sprinkled(case.memory),
        states={name: None if x is None else sprinkled(x) for name, x in case.states.items()},
        master=None if case.master is None else sprinkled(case.master),
    )


BETAS = {
    "usual": (0.9, 0.999),
    "short horizon": (0.5, 0.9),
    "no momentum": (0.0, 0.99),
    "slow": (0.95, 0.9999),
    "series diverges": (0.9, 0.9),
    "replay grows": (0.9, 0.8),
}


@st.composite
def lazy_cases(draw: st.DrawFn, wide: bool) -> LazyCase:
    """Any call whose values are all finite."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    dtype = one_of(*DTYPES)
    low = dtype in LOW_PRECISION
    size = draw(st.integers(1, 12))
    dims = (1, 2, 7, 16, 33) + ((64, 100, 300) if wide else ())
    rows = None
    if draw(st.booleans()):
        rows = draw(st.permutations((*range(size), size, *OUTSIDE)))
        rows = rows[: draw(st.integers(0, size + 3))]
    master = low and draw(st.booleans())
    count = size if rows is None else len(rows)
    return make(
        dtype,
        (size, one_of(*dims)),
        steps=one_of(1, 6, 25),
        betas=one_of(*BETAS.values()),
        eps=one_of(1e-8, 1e-3, 0.0),
        amsgrad=draw(st.booleans()),
        weight_decay=one_of(0.0, 0.03),
        decoupled=draw(st.booleans()),
        master=master,
        moment_dtype=None if dtype == torch.float64 else one_of(None, torch.bfloat16),
        rows=rows,
        used_rows=one_of(None, draw(st.integers(0, count + 1))),
        gap=one_of(0, 0, 1, 8),
        data_seed=draw(st.integers(0, 2**32)),
        found_inf=one_of(None, number(0.0), number(-0.0)),
        seed=one_of(-1, 0, 7, 2**63 - 1),
    )
