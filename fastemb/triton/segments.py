"""Sums over segments: what each row of a table gets of the gradient of the bags.

group_indices has put the positions that name a row next to each other (a segment), `terms` says
what each of them gives. Nothing is added atomically, the host learns no count, and every sum is in
the order of the positions, term by term as ``csrc/ops.h`` has it: a row's gradient has the same
bits whichever kernel makes it, whatever tile that works on and whatever shares its lanes.

- A segment of at most CHUNK positions is summed where the gradient is needed.
- A longer one is cut into chunks of CHUNK positions, whose sums `long_chunks_kernel` has made
  before. Where the gradient is needed they are added, in order.

Where partial sums lie. Cut the sorted positions into windows of CHUNK. A segment's chunks begin
CHUNK apart, so it begins at most one in each window, and a window sees at most two chunks of long
segments begin: one that opens its segment, and before it one that continues a segment from the
window before. Slot ``2 * window + (1 if it opens its segment else 0)`` is therefore the chunk's
own, and the chunk is found from its slot: an opening one belongs to the segment that also holds the
next window's first position, a continuing one to that which holds this window's first position.

Arguments have the same names and meanings in every kernel:
  grad           [any, dim], rows of the gradient of the bags
  sources        of each sorted position, its row of grad; -1: it gives nothing
  coefficients   of each, its factor; None: all are 1
  argmax, within for max only, else None: where the winners stand in their bags, and where each
                 sorted position does
  segments       of each row, its first sorted position; one more that ends the last
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastemb.triton.bags import (
    CHUNK,
    CHUNK_TERMS,
    TRITON_DTYPES,
    VARIABLES,
    column_blocks,
    tile,
    widen,
)

# Of a tile. With AHEAD terms of each row on their way, a lane holds eight f32 of each.
SUM_ELEMENTS = 256
AHEAD = tl.constexpr(4)


# ---------------------------------------------------------------------------------------------
# device
# ---------------------------------------------------------------------------------------------


@triton.jit
def rows_to_update(grad_rows, used_rows, found_inf):
    """How many leading rows count, int64, none if below 0; none in a step that is skipped."""
    count = tl.full((), grad_rows, tl.int64)
    if used_rows is not None:
        count = tl.minimum(count, tl.load(used_rows).to(tl.int64))
    if found_inf is not None:
        count = tl.where(tl.load(found_inf) != 0, 0, count)
    return count


@triton.jit
def sum_terms(
    grad,
    sources,
    coefficients,
    argmax,
    within,
    begin,
    end,
    column,
    dim,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[ROWS, COLUMNS] sums over the sorted positions [begin, end), blocks of int64, in order."""
    inside = (column < dim)[None, :]
    total = tl.zeros((ROWS, COLUMNS), ACC)
    longest = tl.max(end - begin, 0)
    done = longest * 0
    while done < longest:
        for ahead in tl.static_range(AHEAD):
            place = begin + done + ahead
            there = place < end
            source = tl.load(sources + place, mask=there, other=-1).to(tl.int64)
            there = source >= 0
            mask = there[:, None] & inside
            at = source[:, None] * dim + column[None, :]
            if argmax is not None:
                winner = tl.load(argmax + at, mask=mask, other=-1)
                own = tl.load(within + place, mask=there, other=0)
                mask = mask & (winner == own[:, None])
            term = widen(tl.load(grad + at, mask=mask, other=0), ACC)
            if coefficients is not None:
                term *= tl.load(coefficients + place, mask=there, other=0)[:, None]
            # What is masked adds 0, and no sum that begins with 0 is -0.
            total += term
        done += AHEAD
    return total


@triton.jit
def sum_segments(
    grad,
    sources,
    coefficients,
    argmax,
    within,
    partials,
    segments,
    place,
    there,
    column,
    dim,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[ROWS, COLUMNS] sums of the segments at the places; partials is None where none is long."""
    begin = tl.load(segments + place, mask=there, other=0).to(tl.int64)
    end = tl.load(segments + place + 1, mask=there, other=0).to(tl.int64)
    is_long = end - begin > CHUNK
    total = sum_terms(
        grad, sources, coefficients, argmax, within,
        begin, tl.where(is_long, begin, end), column, dim,
        ACC, ROWS, COLUMNS,
    )  # fmt: skip
    if partials is not None:
        longest = tl.max(tl.where(is_long, end - begin, 0), 0)
        done = longest * 0
        while done < longest:
            start = begin + done
            slot = start // CHUNK * 2 + (done == 0).to(tl.int64)
            mask = (is_long & (start < end))[:, None] & (column < dim)[None, :]
            total += tl.load(partials + slot[:, None] * dim + column[None, :], mask=mask, other=0)
            done += CHUNK
    return total


@triton.jit
def chunks_of_slots(segments, count, slot):
    """[begin, end) of the chunks whose sums lie in the slots, empty where a slot has none."""
    window = slot // 2 * CHUNK
    opens = slot % 2 == 1
    held = tl.where(opens, window + CHUNK, window)
    # The last segment that begins at or before `held`. segments[0] is 0, so there is one.
    low = slot * 0
    high = low + count
    while tl.max(high - low, 0) > 1:
        middle = low + (high - low) // 2  # low itself where the search is over, and then no change
        before = tl.load(segments + middle) <= held
        high = tl.where(before, high, middle)
        low = tl.where(before, middle, low)
    first = tl.load(segments + low).to(tl.int64)
    end = tl.load(segments + low + 1).to(tl.int64)
    continued = first + (window - first + CHUNK - 1) // CHUNK * CHUNK
    begin = tl.where(opens, first, continued)
    opens_here = (first >= window) & (first < window + CHUNK)
    right = tl.where(opens, opens_here, (first < window) & (continued < end))
    exists = (held < tl.load(segments + count)) & (end - first > CHUNK) & right
    return begin, tl.where(exists, tl.minimum(begin + CHUNK, end), begin)


@triton.jit(do_not_specialize=[*VARIABLES, "grad_rows", "slots", "width"])
def long_chunks_kernel(
    partials,
    grad,
    sources,
    coefficients,
    argmax,
    within,
    segments,
    used_rows,
    found_inf,
    grad_rows,
    slots,
    width,
    DIM: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of the long segments' chunks. DIM is None for a table of one row, and width its dim."""
    if DIM is None:
        dim = tl.full((), width, tl.int64)
    else:
        dim = DIM
    count = tl.maximum(rows_to_update(grad_rows, used_rows, found_inf), 0)
    blocks = tl.cdiv(dim, COLUMNS)
    slot = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    begin, end = chunks_of_slots(segments, count, slot)
    total = sum_terms(
        grad, sources, coefficients, argmax, within, begin, end, column, dim, ACC, ROWS, COLUMNS
    )
    mask = ((begin < end) & (slot < slots))[:, None] & (column < dim)[None, :]
    tl.store(partials + slot[:, None] * dim + column[None, :], total, mask=mask)


# ---------------------------------------------------------------------------------------------
# host
# ---------------------------------------------------------------------------------------------


def sum_partials(
    grad: Tensor,
    sources: Tensor,
    coefficients: Tensor | None,
    segments: Tensor,
    used_rows: Tensor | None,
    acc: torch.dtype,
    *,
    argmax: Tensor | None = None,
    within: Tensor | None = None,
    found_inf: Tensor | None = None,
    one_row: bool = False,
) -> Tensor | None:
    """What `sum_segments` takes as partials: None where no segment can be long.

    Args:
        one_row: whether the table has one row, for which there are too many lengths to compile for
            each.
    """
    terms, dim = sources.numel(), grad.shape[1]
    if terms <= CHUNK_TERMS or dim == 0:
        return None
    slots = 2 * triton.cdiv(terms, CHUNK_TERMS)
    partials = torch.empty((slots, dim), dtype=acc, device=grad.device)
    sizes = tile(dim, acc, elements=SUM_ELEMENTS)
    programs = triton.cdiv(slots, sizes["ROWS"]) * column_blocks(dim, sizes["COLUMNS"])
    long_chunks_kernel[(programs,)](
        partials,
        grad,
        sources,
        coefficients,
        argmax,
        within,
        segments,
        used_rows,
        found_inf,
        segments.numel() - 1,
        slots,
        dim,
        DIM=None if one_row else dim,
        ACC=TRITON_DTYPES[acc],
        enable_fp_fusion=False,  # it would round otherwise than ops.h says
        **sizes,
    )
    return partials
