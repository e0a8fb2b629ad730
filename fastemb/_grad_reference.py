"""Gradient scaling in plain torch: the fallback for any device, and the oracle of the tests.

Same arguments as the schemas in `_grad_ops`, same semantics as ``csrc/ops.h``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastemb._grad_checks import (
    check_boundary,
    check_gradients,
    check_row_gradient,
    check_scales,
)
from fastemb._reference import accumulation_dtype, sum_terms


class GradStats(NamedTuple):
    """Columns of the statistics of gradients, x an element, g = inv_scale * x."""

    elements: int = 0
    zeros: int = 1  # x == 0
    tiny: int = 2  # 0 < |g| < 2**-24: fp16 would flush them without a scale
    flushed: int = 3  # 0 < |x| <= 2**-25: fp16 flushes them at this scale
    subnormal: int = 4  # 2**-25 < |x| < 2**-14: fp16 rounds them to fewer bits
    infinite: int = 5
    nan: int = 6
    largest: int = 7  # bits of the largest finite |g| as a float32


GRAD_STATS = GradStats()


def grad_check_(
    grads: list[Tensor],
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    stats: Tensor | None,
    square_sums: Tensor | None,
    unscale: bool,
) -> None:
    check_gradients("grad_check_", grads, inv_scale, found_inf, stats, square_sums)
    for index, grad in enumerate(grads):
        _check(
            grad.detach(),
            inv_scale,
            found_inf,
            None if stats is None else stats.view(len(grads), -1)[index],
            None if square_sums is None else square_sums.view(-1)[index],
            unscale,
        )


def row_grad_check_(
    grad: Tensor,
    used_rows: Tensor | None,
    segments: Tensor | None,
    sources: Tensor | None,
    coefficients: Tensor | None,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    stats: Tensor | None,
    square_sum: Tensor | None,
    unscale: bool,
) -> None:
    op = "row_grad_check_"
    check_row_gradient(op, grad, used_rows, segments, sources, coefficients, unscale)
    check_gradients(op, [grad], inv_scale, found_inf, stats, square_sum)
    rows = grad.detach()
    count = rows.shape[0] if segments is None else segments.numel() - 1
    if used_rows is not None:
        count = max(0, min(int(used_rows), count))
    if segments is None:
        rows = rows[:count]
    else:
        assert sources is not None
        wide = rows.to(accumulation_dtype(rows.dtype))
        rows = sum_terms(wide, segments[: count + 1], sources, coefficients)
    places = None if stats is None else stats.view(-1)
    _check(rows, inv_scale, found_inf, places, square_sum, unscale)


def boundary_gradient(
    grad: Tensor, ratio: Tensor, inv_scale: Tensor | None, flags: Tensor, stats: Tensor | None
) -> Tensor:
    check_boundary("boundary_gradient", grad, ratio, inv_scale, flags, stats)
    grad = grad.detach()
    _count(grad, inv_scale, stats)
    output = (grad.to(accumulation_dtype(grad.dtype)) * ratio.reshape(())).to(grad.dtype)
    finite = grad.isfinite()
    flags[0].masked_fill_(~finite.all(), 1.0)
    flags[1].masked_fill_((finite & ~output.isfinite()).any(), 1.0)
    return output.contiguous()


def scale_update_(scales: Tensor, states: Tensor, found_inf: Tensor, configs: Tensor) -> None:
    check_scales("scale_update_", scales, states, found_inf, configs)
    growth_factor, backoff_factor, min_scale, max_scale, growth_interval, hysteresis = (
        configs.unbind(1)
    )
    growth, skips = states.unbind(1)
    overflow = found_inf != 0
    skips.copy_(torch.where(overflow, skips + 1, 0))
    growth.copy_(torch.where(overflow, 0, growth + 1))
    backs_off = overflow & (skips >= hysteresis)
    grows = growth >= growth_interval
    growth.masked_fill_(grows, 0)
    wide = scales.to(torch.float64)
    smaller = torch.maximum(wide * backoff_factor, min_scale).to(torch.float32)
    larger = torch.minimum((wide * growth_factor).to(torch.float32), max_scale.to(torch.float32))
    larger = torch.where((wide * growth_factor).to(torch.float32).isfinite(), larger, scales)
    scales.copy_(
        torch.where(backs_off, smaller, torch.where(grows, torch.maximum(larger, scales), scales))
    )


def _check(
    grad: Tensor,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    stats: Tensor | None,
    square_sum: Tensor | None,
    unscale: bool,
) -> None:
    unscaled = _unscaled(grad, inv_scale)
    _count(grad, inv_scale, stats)
    if found_inf is not None:
        finite = grad.isfinite().all() & unscaled.isfinite().all()
        found_inf.masked_fill_(~finite, 1.0)
    if square_sum is not None:
        square_sum.fill_(unscaled.to(torch.float64).square().sum())
    if unscale:
        grad.copy_(unscaled)


def _unscaled(grad: Tensor, inv_scale: Tensor | None) -> Tensor:
    wide = grad.to(accumulation_dtype(grad.dtype))
    return wide if inv_scale is None else wide * inv_scale.reshape(()).to(wide.dtype)


def _count(grad: Tensor, inv_scale: Tensor | None, stats: Tensor | None) -> None:
    if stats is None:
        return
    unscaled = _unscaled(grad, inv_scale).abs()
    scaled = grad.to(unscaled.dtype).abs()
    flushed = scaled <= 2.0**-25
    there = scaled > 0
    counters = {
        "zeros": scaled == 0,
        "tiny": there & (unscaled < 2.0**-24),
        "flushed": there & flushed,
        "subnormal": ~flushed & (scaled < 2.0**-14),
        "infinite": (unscaled == torch.inf) | (scaled == torch.inf) & ~unscaled.isnan(),
        "nan": unscaled.isnan(),
    }
    stats[GRAD_STATS.elements] += grad.numel()
    for name, mask in counters.items():
        stats[getattr(GRAD_STATS, name)] += mask.sum()
    finite = torch.where(unscaled.isfinite(), unscaled, 0).to(torch.float32)
    largest = finite.max() if finite.numel() > 0 else finite.new_zeros(())
    bits = largest.view(torch.int32).to(torch.int64)
    stats[GRAD_STATS.largest] = torch.maximum(stats[GRAD_STATS.largest], bits)
