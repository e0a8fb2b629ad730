"""Gradient scaling: gradients looked at in one pass, boundaries between scale groups, the scales.

What each operator does is in ``csrc/ops.h``, from `GradCheck` on. Counters are whole numbers and
added atomically. Sums of squares are not: each chunk of tiles writes one, and those are added up
afterwards, in an order that only the shape decides.

Dense gradients, and the rows of sparse ones, are one line of elements; rows that are sums of terms
are summed here, as in a step. Arguments have the same names and meanings in every kernel:
  used_rows, segments, sources, coefficients, partials
               as in `segments`; segments is None for a line of elements
  grad_rows    rows of the gradient, used or not; 1 for a dense one
  width, DIM   their columns; DIM is None for a dense gradient, whose length is a variable
  chunks       of all rows, used or not
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastemb._grad_checks import (
    check_boundary,
    check_gradients,
    check_row_gradient,
    check_scales,
)
from fastemb._reference import accumulation_dtype
from fastemb.triton.bags import TRITON_DTYPES, narrow, on, tile, widen
from fastemb.triton.rows import load_gradient, programs
from fastemb.triton.segments import rows_to_update, sum_partials

TWO_14 = tl.constexpr(2.0**-14)
TWO_24 = tl.constexpr(2.0**-24)
TWO_25 = tl.constexpr(2.0**-25)
INFINITY = tl.constexpr(float("inf"))

# Of a tile: eight f32 a lane, four where they are sums, which need registers of their own.
ELEMENTS = 256
SUM_ELEMENTS = 128
# Of a chunk, at most 127: its counters are bytes.
CHUNK_TILES = 32
TILES = tl.constexpr(CHUNK_TILES)


# ---------------------------------------------------------------------------------------------
# device
# ---------------------------------------------------------------------------------------------


@triton.jit
def count_elements(x, g, mask, small, others):
    """The counters after the elements x of a tile, unscaled g, where the mask is set.

    A lane's counters of one chunk, TILES at most, are bytes, so that few registers hold them:
    zeros, tiny, flushed and subnormal in ``small``, in that order, elements, infinite and NaN in
    ``others``.
    """
    magnitude = tl.abs(x)
    unscaled = tl.abs(g)
    there = mask & (x != 0)
    small += (mask & (x == 0)).to(tl.int32)
    small += (there & (unscaled < TWO_24)).to(tl.int32) << 8
    small += (there & (magnitude <= TWO_25)).to(tl.int32) << 16
    small += (mask & (magnitude > TWO_25) & (magnitude < TWO_14)).to(tl.int32) << 24
    others += mask.to(tl.int32)
    others += (mask & (unscaled == INFINITY)).to(tl.int32) << 8
    others += (mask & (g != g)).to(tl.int32) << 16
    return small, others


@triton.jit
def total_of(counters, SHIFT: tl.constexpr):
    return tl.sum(tl.sum((counters >> SHIFT) & 255, 1), 0)


@triton.jit
def largest_of(values):
    return tl.max(tl.max(values, 1), 0)


@triton.jit
def add_chunk(small, others, count, zeros, tiny, flushed, subnormal, infinite, nan):
    """The totals of a program after the counters of one more chunk."""
    count += total_of(others, 0)
    zeros += total_of(small, 0)
    tiny += total_of(small, 8)
    flushed += total_of(small, 16)
    subnormal += total_of(small, 24)
    infinite += total_of(others, 8)
    nan += total_of(others, 16)
    return count, zeros, tiny, flushed, subnormal, infinite, nan


@triton.jit
def add_to_stats(stats, count, zeros, tiny, flushed, subnormal, infinite, nan, largest):
    """In the order of GRAD_STATS."""
    tl.atomic_add(stats, count.to(tl.int64))
    tl.atomic_add(stats + 1, zeros.to(tl.int64))
    tl.atomic_add(stats + 2, tiny.to(tl.int64))
    tl.atomic_add(stats + 3, flushed.to(tl.int64))
    tl.atomic_add(stats + 4, subnormal.to(tl.int64))
    tl.atomic_add(stats + 5, infinite.to(tl.int64))
    tl.atomic_add(stats + 6, nan.to(tl.int64))
    most = largest_of(largest).to(tl.float32)
    tl.atomic_max(stats + 7, most.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit
def scale_or_one(inv_scale, ACC: tl.constexpr):
    if inv_scale is None:
        factor = tl.full((), 1.0, ACC)
    else:
        factor = tl.load(inv_scale).to(ACC)
    return factor


@triton.jit(do_not_specialize=["grad_rows", "chunks"])
def grad_check_kernel(
    grad,
    used_rows,
    segments,
    sources,
    coefficients,
    partials,
    inv_scale,
    found_inf,
    stats,
    chunk_sums,
    grad_rows,
    width,
    chunks,
    UNSCALE: tl.constexpr,
    DIM: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """grad_check_ of one tensor, and row_grad_check_."""
    count = tl.maximum(rows_to_update(grad_rows, used_rows, None), 0)
    if segments is not None:
        dim = tl.full((), DIM, tl.int64)
    elif DIM is None:
        dim = tl.full((), width, tl.int64)
    else:
        dim = count * DIM
    if segments is None:
        count = tl.full((), 1, tl.int64)
    blocks = tl.cdiv(dim, COLUMNS)
    tiles = tl.cdiv(count, ROWS) * blocks
    factor = scale_or_one(inv_scale, ACC)

    # Totals of the program; 2**31 elements would be a gradient of terabytes.
    seen = tl.zeros((), tl.int32)
    zeros, tiny, flushed = seen, seen, seen
    subnormal, infinite, nan = seen, seen, seen
    largest = tl.zeros((ROWS, COLUMNS), ACC)
    bad = tl.zeros((ROWS, COLUMNS), tl.int32)
    chunk = tl.program_id(0).to(tl.int64)
    while chunk < chunks:
        squares = tl.zeros((ROWS, COLUMNS), tl.float64)
        small = tl.zeros((ROWS, COLUMNS), tl.int32)
        others = tl.zeros((ROWS, COLUMNS), tl.int32)
        tile_index = chunk * TILES
        last = tl.minimum(tile_index + TILES, tiles)
        while tile_index < last:
            column = tile_index % blocks * COLUMNS + tl.arange(0, COLUMNS)
            if segments is None:
                place = tl.zeros((ROWS,), tl.int64)
                there = place == 0
            else:
                place = tile_index // blocks * ROWS + tl.arange(0, ROWS)
                there = place < count
            mask = there[:, None] & (column < dim)[None, :]
            x = load_gradient(
                grad, segments, sources, coefficients, partials, place, there, column, dim,
                ACC, ROWS, COLUMNS,
            )  # fmt: skip
            g = x * factor
            finite = tl.abs(g) < INFINITY  # and then x is, too
            bad |= (mask & (finite == 0)).to(tl.int32)
            if stats is not None:
                small, others = count_elements(x, g, mask, small, others)
                largest = tl.maximum(largest, tl.where(mask & finite, tl.abs(g), 0))
            if chunk_sums is not None:
                wide = tl.where(mask, g, 0).to(tl.float64)  # 0 times infinity is no 0
                squares += wide * wide
            if UNSCALE:
                tl.store(
                    grad + place[:, None] * dim + column[None, :],
                    narrow(g, grad.dtype.element_ty),
                    mask=mask,
                )
            tile_index += 1
        if chunk_sums is not None:
            tl.store(chunk_sums + chunk, tl.sum(tl.sum(squares, 1), 0))
        if stats is not None:
            seen, zeros, tiny, flushed, subnormal, infinite, nan = add_chunk(
                small, others, seen, zeros, tiny, flushed, subnormal, infinite, nan
            )
        chunk += tl.num_programs(0)
    if found_inf is not None:
        tl.store(found_inf, 1.0, mask=largest_of(bad) > 0)
    if stats is not None:
        add_to_stats(stats, seen, zeros, tiny, flushed, subnormal, infinite, nan, largest)


@triton.jit(do_not_specialize=["chunks"])
def boundary_gradient_kernel(
    output,
    grad,
    ratio,
    inv_scale,
    flags,
    stats,
    width,
    chunks,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """ROWS is 1."""
    dim = tl.full((), width, tl.int64)
    tiles = tl.cdiv(dim, COLUMNS)
    factor = scale_or_one(inv_scale, ACC)
    passes = tl.load(ratio).to(ACC)

    # Totals of the program; 2**31 elements would be a gradient of terabytes.
    seen = tl.zeros((), tl.int32)
    zeros, tiny, flushed = seen, seen, seen
    subnormal, infinite, nan = seen, seen, seen
    largest = tl.zeros((ROWS, COLUMNS), ACC)
    bad = tl.zeros((ROWS, COLUMNS), tl.int32)  # 1: what came, 2: what was made
    place = tl.zeros((ROWS,), tl.int64)
    chunk = tl.program_id(0).to(tl.int64)
    while chunk < chunks:
        small = tl.zeros((ROWS, COLUMNS), tl.int32)
        others = tl.zeros((ROWS, COLUMNS), tl.int32)
        tile_index = chunk * TILES
        last = tl.minimum(tile_index + TILES, tiles)
        while tile_index < last:
            column = tile_index * COLUMNS + tl.arange(0, COLUMNS)
            mask = (place == 0)[:, None] & (column < dim)[None, :]
            x = load_gradient(
                grad, None, None, None, None, place, place == 0, column, dim, ACC, ROWS, COLUMNS
            )
            passed = narrow(x * passes, output.dtype.element_ty)
            tl.store(output + place[:, None] * dim + column[None, :], passed, mask=mask)
            finite = tl.abs(x) < INFINITY
            remains = tl.abs(widen(passed, ACC)) < INFINITY
            bad |= (mask & (finite == 0)).to(tl.int32)
            bad |= (mask & finite & (remains == 0)).to(tl.int32) << 1
            if stats is not None:
                g = x * factor
                small, others = count_elements(x, g, mask, small, others)
                counts = mask & (tl.abs(g) < INFINITY)
                largest = tl.maximum(largest, tl.where(counts, tl.abs(g), 0))
            tile_index += 1
        if stats is not None:
            seen, zeros, tiny, flushed, subnormal, infinite, nan = add_chunk(
                small, others, seen, zeros, tiny, flushed, subnormal, infinite, nan
            )
        chunk += tl.num_programs(0)
    tl.store(flags, 1.0, mask=largest_of(bad & 1) > 0)
    tl.store(flags + 1, 1.0, mask=largest_of(bad & 2) > 0)
    if stats is not None:
        add_to_stats(stats, seen, zeros, tiny, flushed, subnormal, infinite, nan, largest)


@triton.jit(do_not_specialize=["groups"])
def scale_update_kernel(scales, states, found_inf, configs, groups, ROWS: tl.constexpr):
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = group < groups
    state = states + group * 2
    config = configs + group * 6
    scale = tl.load(scales + group, mask=mask, other=0)
    growth = tl.load(state, mask=mask, other=0)
    skips = tl.load(state + 1, mask=mask, other=0)
    overflow = tl.load(found_inf + group, mask=mask, other=0) != 0
    growth_factor = tl.load(config, mask=mask, other=1)
    backoff_factor = tl.load(config + 1, mask=mask, other=1)
    min_scale = tl.load(config + 2, mask=mask, other=0)
    max_scale = tl.load(config + 3, mask=mask, other=0)
    growth_interval = tl.load(config + 4, mask=mask, other=1)
    hysteresis = tl.load(config + 5, mask=mask, other=1)

    skips = tl.where(overflow, skips + 1, 0)
    growth = tl.where(overflow, 0, growth + 1)
    backs_off = overflow & (skips.to(tl.float64) >= hysteresis)
    grows = (overflow == 0) & (growth.to(tl.float64) >= growth_interval)
    growth = tl.where(grows, 0, growth)

    wide = scale.to(tl.float64)
    smaller = wide * backoff_factor
    smaller = tl.where(smaller > min_scale, smaller, min_scale).to(tl.float32)
    larger = (wide * growth_factor).to(tl.float32)
    most = max_scale.to(tl.float32)
    capped = tl.where(larger < most, larger, most)
    grows = grows & (tl.abs(larger) < INFINITY) & (capped > scale)
    scale = tl.where(backs_off, smaller, tl.where(grows, capped, scale))
    tl.store(scales + group, scale, mask=mask)
    tl.store(state, growth, mask=mask)
    tl.store(state + 1, skips, mask=mask)


# ---------------------------------------------------------------------------------------------
# host
# ---------------------------------------------------------------------------------------------


def _line(acc: torch.dtype) -> dict[str, Any]:
    """Constants for a line of elements; float64 needs twice the registers for each."""
    columns = ELEMENTS // 2 if acc == torch.float64 else ELEMENTS
    return {"ROWS": 1, "COLUMNS": columns, "ACC": TRITON_DTYPES[acc], "num_warps": 1}


def _programs(device: torch.device, chunks: int) -> int:
    """Few that live long: each adds to the statistics once."""
    if device.type == "cpu":
        return programs(device, chunks)
    return min(chunks, 32 * torch.cuda.get_device_properties(device).multi_processor_count)


def _look(
    grad: Tensor,
    used_rows: Tensor | None,
    terms: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    grad_rows: int,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    stats: Tensor | None,
    square_sum: Tensor | None,
    unscale: bool,
    dim: int | None,
) -> None:
    """One gradient. ``terms`` are segments, sources, coefficients and partials; ``dim`` is DIM."""
    acc = accumulation_dtype(grad.dtype)
    if terms[0] is None or dim is None:
        constants = _line(acc)
        tiles = triton.cdiv(grad.numel(), constants["COLUMNS"])
    else:
        sizes = tile(min(dim, SUM_ELEMENTS), acc, elements=SUM_ELEMENTS)
        constants = {**sizes, "ACC": TRITON_DTYPES[acc]}
        across = triton.cdiv(dim, constants["COLUMNS"])
        tiles = triton.cdiv(grad_rows, constants["ROWS"]) * across
    chunks = triton.cdiv(tiles, CHUNK_TILES)
    sums = None
    if square_sum is not None:
        sums = torch.empty(chunks, dtype=torch.float64, device=grad.device)
    if chunks > 0:
        grad_check_kernel[(_programs(grad.device, chunks),)](
            grad,
            used_rows,
            *terms,
            inv_scale,
            found_inf,
            stats,
            sums,
            grad_rows,
            grad.numel(),
            chunks,
            UNSCALE=unscale,
            DIM=dim,
            enable_fp_fusion=False,  # it would round otherwise than ops.h says
            **constants,
        )
    if square_sum is not None and sums is not None:
        square_sum.copy_(sums.sum().reshape(square_sum.shape))


def grad_check_(
    grads: list[Tensor],
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    stats: Tensor | None,
    square_sums: Tensor | None,
    unscale: bool,
) -> None:
    check_gradients("grad_check_", grads, inv_scale, found_inf, stats, square_sums)
    if not grads:
        return
    places = None if stats is None else stats.view(len(grads), -1)
    sums = None if square_sums is None else square_sums.view(len(grads))
    with on(grads[0].device):
        for index, grad in enumerate(grads):
            _look(
                grad.detach(),
                None,
                (None, None, None, None),
                1,
                inv_scale,
                found_inf,
                None if places is None else places[index],
                None if sums is None else sums[index],
                unscale,
                None,
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
    grad = grad.detach()
    grad_rows = grad.shape[0] if segments is None else segments.numel() - 1
    with on(grad.device):
        partials = None
        if segments is not None and sources is not None:
            acc = accumulation_dtype(grad.dtype)
            partials = sum_partials(grad, sources, coefficients, segments, used_rows, acc)
        _look(
            grad,
            used_rows,
            (segments, sources, coefficients, partials),
            grad_rows,
            inv_scale,
            found_inf,
            stats,
            square_sum,
            unscale,
            grad.shape[1],
        )


def boundary_gradient(
    grad: Tensor, ratio: Tensor, inv_scale: Tensor | None, flags: Tensor, stats: Tensor | None
) -> Tensor:
    check_boundary("boundary_gradient", grad, ratio, inv_scale, flags, stats)
    grad = grad.detach().contiguous()
    output = torch.empty_like(grad)
    constants = _line(accumulation_dtype(grad.dtype))
    chunks = triton.cdiv(triton.cdiv(grad.numel(), constants["COLUMNS"]), CHUNK_TILES)
    if chunks > 0:
        with on(grad.device):
            boundary_gradient_kernel[(_programs(grad.device, chunks),)](
                output,
                grad,
                ratio,
                inv_scale,
                flags,
                stats,
                grad.numel(),
                chunks,
                enable_fp_fusion=False,
                **constants,
            )
    return output


def scale_update_(scales: Tensor, states: Tensor, found_inf: Tensor, configs: Tensor) -> None:
    check_scales("scale_update_", scales, states, found_inf, configs)
    groups = scales.numel()
    if groups == 0:
        return
    with on(scales.device):
        scale_update_kernel[(triton.cdiv(groups, 32),)](
            scales, states, found_inf, configs, groups, ROWS=32, num_warps=1
        )
