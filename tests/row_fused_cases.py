"""Steps that sum their gradients themselves, and the backward and the step that they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from lookups import Case
from numpy.typing import NDArray
from row_cases import OUTSIDE, RowCase, row_cases
from strategies import lookups
from tolerance import bag_bounds, rows_in_use, winners
from torch import Tensor

CHUNK = 256  # kChunk of csrc/ops.h
# Stands where nothing may be read: whoever follows it reads far outside.
TRAP = 2**31 - 1


@dataclass(frozen=True)
class FusedCase:
    """A lookup and an optimizer step on its table's gradient.

    Attributes:
        lookup: whose grad_output the gradient is made of.
        step: all but the gradient; its own ``grad``, ``rows`` and ``used_rows`` are not looked at.
        used: how many of the named rows count; None: all.
        outside: place among the named rows -> row that no table has, which stands there instead.
        trimmed: whether rows and segments end where the named rows do. Else they are as
            group_indices made them, and what lies behind is filled with what must not be read.
    """

    lookup: Case
    step: RowCase
    used: int | None = None
    outside: dict[int, int] = field(default_factory=dict)
    trimmed: bool = False

    def both(self, ops: Any, device: torch.device | str) -> tuple[RowCase, RowCase]:
        """The fused step, and the step on the gradient that the backward has made, on the CPU."""
        there = self.lookup.to(device)
        groups = there.groups(ops)
        terms = there.terms(ops, groups[0])
        gradient = there.backward(ops, False, None).cpu()
        _, rows, segments, num_rows = (x.cpu().clone() for x in groups)
        sources, coefficients = (x.cpu().clone() for x in terms)
        count = int(num_rows)
        for place, row in self.outside.items():
            if place < count:
                rows[place] = row
        used = count if self.used is None else min(self.used, count)
        used_rows: Tensor | None = torch.tensor([used], dtype=torch.int32)

        unfused = replace(self.step, rows=rows[:count], grad=gradient, used_rows=used_rows)
        if self.trimmed:
            rows, segments = rows[:count], segments[: count + 1]
            used_rows = used_rows if used < count else None
        else:
            rows[count:] = 0
            segments[count + 1 :] = TRAP
        end = int(segments[count])
        sources[end:] = TRAP
        all_ones = self.lookup.mode == "sum" and self.lookup.per_sample_weights is None
        assert coefficients.numel() == (0 if all_ones else sources.numel())
        if not all_ones:
            coefficients[end:] = math.nan
        fused = replace(
            self.step,
            rows=rows,
            used_rows=used_rows,
            grad=self.lookup.grad_output.contiguous(),
            segments=segments,
            sources=sources,
            coefficients=None if all_ones else coefficients,
        )
        return fused, unfused


@st.composite
def fused_cases(draw: st.DrawFn, largest: int) -> FusedCase:
    """Any lookup that sums, with any step on its table.

    Args:
        largest: bound for positions x embedding_dim.
    """
    lookup = replace(
        draw(lookups(("sum", "mean"), largest=largest, special=False)), scale_grad_by_freq=False
    )
    size, dim = lookup.weight.shape
    step = draw(row_cases(table=(lookup.weight.dtype, size, dim)))
    places = st.dictionaries(
        st.integers(0, size - 1), st.sampled_from((size, *OUTSIDE)), max_size=2
    )
    return FusedCase(
        lookup,
        step,
        used=draw(st.one_of(st.none(), st.integers(0, size))),
        outside=draw(places),
        trimmed=draw(st.booleans()),
    )


# ---- the contract, position by position ----------------------------------------------------------


def documented_terms(case: Case) -> dict[int, tuple[int, np.floating[Any] | None]]:
    """Position that takes part -> its bag and its factor, None for one that is not multiplied."""
    number = np.float64 if case.acc == torch.float64 else np.float32
    ids = case.indices.reshape(-1).tolist()
    samples = case.per_sample_weights
    weights = None if samples is None else samples.reshape(-1).double().tolist()
    found: dict[int, tuple[int, np.floating[Any] | None]] = {}
    for bag, (begin, end) in enumerate(bag_bounds(case)):
        positions = [p for p in range(begin, end) if ids[p] != case.padding_idx]
        for p in positions:
            factor = None if weights is None else number(weights[p])
            if case.mode == "mean":
                factor = (number(1) if factor is None else factor) / number(len(positions))
            found[p] = bag, factor
    return found


def documented_gradient(case: Case) -> Tensor:
    """[distinct rows, dim]: every product and sum rounded by itself, in the documented order."""
    dtype = np.float64 if case.acc == torch.float64 else np.float32
    grad: NDArray[np.floating[Any]] = case.grad_output.to(case.acc).numpy()
    places = winners(case) if case.mode == "max" else None
    terms, bounds = documented_terms(case), bag_bounds(case)
    rows = []
    for positions in rows_in_use(case).values():
        total = np.zeros(case.weight.shape[1], dtype)
        for begin in range(0, len(positions), CHUNK):
            part = np.zeros_like(total)
            for p in positions[begin : begin + CHUNK]:
                bag, factor = terms[p]
                term = grad[bag] if factor is None else factor * grad[bag]
                if places is not None:
                    term = np.where(places[bag] == p - bounds[bag][0], term, 0)
                part += term
            total += part
        if case.scale_grad_by_freq:
            total /= dtype(len(positions))
        rows.append(total)
    return torch.from_numpy(np.array(rows, dtype).reshape(len(rows), case.weight.shape[1]))
