"""Steps that are fused with the backward of a lookup, and the same steps after that backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from lookups import Case, assert_same_states, cases
from row_cases import LOW_PRECISION, OPERATORS, OUTSIDE, RowCase, make, number
from torch import Tensor

# What stands behind the entries in use: whoever follows it, reads far outside.
TRAP = 2**31 - 1


@dataclass(frozen=True)
class FusedStep:
    """A lookup and a step of its table. ``step`` still lacks rows and gradient.

    Attributes:
        outside: stands for the first row that the lookup names, where it is not None.
    """

    lookup: Case
    step: RowCase
    outside: int | None = None

    def fused(self, lookups: Any, device: torch.device | str = "cpu") -> RowCase:
        """The step on ``grad_output``, grouped and described by the backend ``lookups``."""
        there = self.lookup.to(device)
        order, rows, segments, num_rows = there.groups(lookups)
        sources, coefficients = (x.cpu() for x in there.terms(lookups, order))
        rows, segments, num_rows = rows.cpu(), segments.cpu(), num_rows.cpu()
        n = int(num_rows)
        covered = int(segments[n])
        rows[n:], segments[n + 1 :], sources[covered:] = 0, TRAP, TRAP
        coefficients[covered:] = torch.nan
        return replace(
            self.step,
            rows=self._named(rows, n),
            used_rows=num_rows,
            grad=self.lookup.grad_output,
            segments=segments,
            sources=sources,
            coefficients=coefficients if coefficients.numel() else None,
        )

    def unfused(self, lookups: Any, device: torch.device | str = "cpu") -> RowCase:
        """The step on the row gradients that the backend ``lookups`` makes first."""
        there = self.lookup.to(device)
        _, rows, _, num_rows = there.groups(lookups)
        n = int(num_rows)
        gradient = there.backward(lookups, False, None).cpu()
        return replace(self.step, rows=self._named(rows[:n].cpu(), n), grad=gradient)

    def _named(self, rows: Tensor, n: int) -> Tensor:
        if self.outside is None or n == 0:
            return rows
        rows = rows.clone()
        rows[0] = self.outside
        return rows

    def check(self, lookups: Any, ops: Any, device: torch.device | str = "cpu") -> None:
        """Fused and unfused, all of it on one device, give the same bits."""
        got = self.fused(lookups, device).run(ops, device)
        want = self.unfused(lookups, device).run(ops, device)
        assert_same_states(got, want)


def step_after(lookup: Case, op: str, **options: Any) -> FusedStep:
    """A step of the lookup's table; options of `row_cases.make`."""
    lookup = replace(lookup, scale_grad_by_freq=False)
    rows, dim = lookup.weight.shape
    return FusedStep(lookup, make(op, lookup.weight.dtype, (rows, dim), rows=[], **options))


def grouped(
    lengths: list[int],
    dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    grad_dtype: torch.dtype | None = None,
    mode: str = "sum",
    weighted: bool = False,
    seed: int = 0,
) -> Case:
    """A lookup in which row k is named ``lengths[k]`` times, in bags of three positions."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    n = indices.numel()
    offsets = torch.arange(0, n, 3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Case(
        weight=normal(len(lengths), dim).to(dtype),
        indices=indices[torch.randperm(n, generator=generator)],
        offsets=offsets,
        per_sample_weights=normal(n).to(dtype) if weighted else None,
        mode=mode,
        padding_idx=-1,
        include_last_offset=False,
        scale_grad_by_freq=False,
        output_dtype=dtype,
        grad_output=normal(len(offsets), dim).to(grad_dtype or dtype),
    )


@st.composite
def fused_steps(draw: st.DrawFn) -> FusedStep:
    """Any step behind any lookup that sums or averages."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    lookup = draw(cases(("sum", "mean")))
    dtype = lookup.weight.dtype
    master = dtype in LOW_PRECISION and draw(st.booleans())
    op = one_of(*OPERATORS)
    case = step_after(
        lookup,
        op,
        data_seed=draw(st.integers(0, 2**32)),
        moment_dtype=None if dtype == torch.float64 else one_of(None, torch.bfloat16),
        master=master,
        momentum=one_of(0.0, 0.9),
        amsgrad=draw(st.booleans()),
        row_step=draw(st.booleans()),
        row_count=draw(st.booleans()),
        gap=one_of(0, 0, 1, 8),
        step=number(one_of(1, 10)),
        inv_scale=one_of(None, number(1 / 3)),
        found_inf=one_of(None, number(0.0)),
        weight_decay=one_of(0.0, 0.3),
        maximize=draw(st.booleans()),
        seed=-1 if master else one_of(-1, 7),
        options={"decoupled": draw(st.booleans())} if op == "row_adam_" else {},
    )
    return replace(case, outside=one_of(None, None, *OUTSIDE))
