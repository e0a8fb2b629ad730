"""Lookups that hypothesis draws for the operators, on top of `lookups.cases`."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st
from lookups import DTYPES, Case, cases
from torch import Tensor

SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 65504.0, 6e-8)


def _every_second(tensor: Tensor) -> Tensor:
    """The same values with gaps in memory; the gaps hold what must not be read."""
    wide = torch.full((*tensor.shape, 2), -7, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


@st.composite
def lookups(
    draw: st.DrawFn,
    modes: tuple[str, ...] = ("sum", "mean", "max"),
    largest: int = 400_000,
    special: bool = True,
) -> Case:
    """Any lookup: layouts, dtypes of its own for every tensor, special values in the table.

    Args:
        modes: what to draw from.
        largest: bound for positions x embedding_dim, which is what the loops cost.
        special: whether rows may hold NaN, infinities and the ends of the fp16 range.
    """
    case = draw(cases(modes).filter(lambda c: c.indices.numel() * c.weight.shape[1] <= largest))
    changes: dict[str, Tensor] = {}
    if case.per_sample_weights is not None:
        samples = case.per_sample_weights.to(draw(st.sampled_from(DTYPES)))
        changes["per_sample_weights"] = _every_second(samples) if draw(st.booleans()) else samples
    if draw(st.booleans()):
        changes["indices"] = _every_second(case.indices)
    if case.offsets is not None and draw(st.booleans()):
        changes["offsets"] = _every_second(case.offsets)
    if special and draw(st.integers(0, 3)) == 0:
        weight = case.weight
        rows, dim = weight.shape
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, rows - 1)), draw(st.integers(0, dim - 1))
            weight[at] = draw(st.sampled_from(SPECIAL))
    if case.grad_output.shape[0] > 0 and draw(st.integers(0, 3)) == 0:
        # What `output.sum().backward()` sends: one number, expanded.
        one = case.grad_output[:1, :1]
        changes["grad_output"] = one.expand(case.grad_output.shape)
    return replace(case, **changes)
