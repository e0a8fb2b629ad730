"""Gradients of the bag: of the table's rows and of the per-sample weights.

Row gradients are sums over the positions that name the row, which group_indices has put next to
each other (a segment). Nothing is added atomically and the host learns no count, so a result does
not depend on the schedule:

- segments of at most CHUNK positions: one program for each (and a block of columns) adds them up;
- longer segments: one program for each chunk of CHUNK positions writes a partial sum, then one for
  each segment adds its partial sums in order.

Where partial sums lie. Cut the sorted positions into windows of CHUNK. A segment's chunks begin
CHUNK apart, so it begins at most one in each window, and a window sees at most two chunks of long
segments begin: one that opens its segment, and before it one that continues a segment from the
window before. Slot ``2 * window + (1 if it opens its segment else 0)`` is therefore the chunk's
own, and the chunk is found from its slot: an opening one belongs to the segment that also holds the
next window's first position, a continuing one to that which holds this window's first position.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastemb import _reference
from fastemb._reference import accumulation_dtype
from fastemb.triton.bags import (
    CHUNK,
    CHUNK_TERMS,
    TRITON_DTYPES,
    VARIABLES,
    Bags,
    column_blocks,
    divide,
    load_rows,
    on,
    require,
    row_stride,
    tile,
    widen,
    with_whole_rows,
)
from fastemb.triton.errors import (
    caller_of,
    raise_pending,
    report_index,
    settle,
    status_of,
    wrong_positions,
)

# Sorts with torch, has static shapes and no host sync.
group_indices = _reference.group_indices


@triton.jit
def bag_at(bag_of, position, there, bag_length):
    """The bags of the positions, int64, -1 for none. Positions fit 31 bits."""
    if bag_of is None:
        bag = tl.where(there, position // bag_length, -1)
    else:
        bag = tl.load(bag_of + position, mask=there, other=-1)
    return bag.to(tl.int64)


@triton.jit
def sum_positions(
    grad_output,
    argmax,
    offsets,
    samples,
    bag_of,
    counts,
    order,
    begin,
    end,
    column,
    bag_length,
    DIM: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum over the sorted positions [begin, end) of what each gives to its row's gradient.

    argmax is set for max only, counts for mean only.
    """
    inside = column < DIM
    part = tl.zeros((ROWS, COLUMNS), ACC)
    start = begin
    while start < end:
        place = start + tl.arange(0, ROWS)
        there = place < end
        position = tl.load(order + place, mask=there, other=0)
        bag = bag_at(bag_of, position, there, bag_length)
        used = bag >= 0
        at = bag[:, None] * DIM + column[None, :]
        mask = used[:, None] & inside[None, :]
        if argmax is not None:
            if offsets is None:
                first = bag * bag_length
            else:
                first = tl.load(offsets + bag, mask=used, other=0).to(tl.int64)
            within = position.to(tl.int64) - first
            winner = tl.load(argmax + at, mask=mask, other=-1)
            mask = mask & (winner == within[:, None])
        term = widen(tl.load(grad_output + at, mask=mask, other=0), ACC)
        if samples is not None:
            scale = widen(tl.load(samples + position, mask=used, other=0), ACC)
        if counts is not None:
            count = tl.load(counts + bag, mask=used, other=1)
            if samples is not None:
                scale = divide(scale, count)
            else:
                scale = divide(tl.full((ROWS,), 1, ACC), count)
        if (samples is not None) or (counts is not None):
            term = scale[:, None] * term
        part += term
        start += ROWS
    return tl.sum(part, axis=0)


@triton.jit
def store_row_gradient(
    grad_rows, rows, segment, length, total, column, BY_FREQUENCY, DENSE, DIM: tl.constexpr
):
    if BY_FREQUENCY:
        total = divide(total, length.to(total.dtype))
    if DENSE:
        row = tl.load(rows + segment)
    else:
        row = segment.to(tl.int64)
    tl.store(grad_rows + row * DIM + column, total, mask=column < DIM)


@triton.jit(do_not_specialize=VARIABLES)
def short_segments_kernel(
    grad_rows,
    grad_output,
    argmax,
    offsets,
    samples,
    bag_of,
    counts,
    order,
    rows,
    segments,
    num_rows,
    bag_length,
    BY_FREQUENCY: tl.constexpr,
    DENSE: tl.constexpr,
    DIM: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Row gradients of segments of at most CHUNK positions."""
    segment = tl.program_id(0)
    if segment < tl.load(num_rows):
        begin = tl.load(segments + segment)
        end = tl.load(segments + segment + 1)
        if end - begin <= CHUNK:
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            total = sum_positions(
                grad_output,
                argmax,
                offsets,
                samples,
                bag_of,
                counts,
                order,
                begin,
                end,
                column,
                bag_length,
                DIM,
                ACC,
                ROWS,
                COLUMNS,
            )
            store_row_gradient(
                grad_rows, rows, segment, end - begin, total, column, BY_FREQUENCY, DENSE, DIM
            )


@triton.jit
def chunk_of_slot(segments, num_rows, slot):
    """The chunk whose partial sum lies in the slot: (segment, its first position, its end, begin).

    begin is the chunk's first sorted position, -1 where the slot has no chunk.
    """
    window = slot // 2 * CHUNK
    opens = slot % 2 == 1
    held = tl.where(opens, window + CHUNK, window)
    # The last segment that begins at or before `held`. segments[0] is 0, so there is one.
    count = tl.load(num_rows)
    low = tl.zeros_like(count)
    high = count
    while high - low > 1:
        middle = low + (high - low) // 2
        before = tl.load(segments + middle) <= held
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    first = tl.load(segments + low).to(tl.int64)
    end = tl.load(segments + low + 1).to(tl.int64)
    continued = first + (window - first + CHUNK - 1) // CHUNK * CHUNK
    begin = tl.where(opens, first, continued)
    opens_here = (first >= window) & (first < window + CHUNK)
    right = tl.where(opens, opens_here, (first < window) & (continued < end))
    exists = (held < tl.load(segments + count)) & (end - first > CHUNK) & right
    return low, first, end, tl.where(exists, begin, -1)


@triton.jit(do_not_specialize=VARIABLES)
def long_chunks_kernel(
    partials,
    grad_output,
    argmax,
    offsets,
    samples,
    bag_of,
    counts,
    order,
    segments,
    num_rows,
    bag_length,
    DIM: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Partial sums of the long segments' chunks."""
    slot = tl.program_id(0).to(tl.int64)
    _segment, _first, end, begin = chunk_of_slot(segments, num_rows, slot)
    if begin >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = sum_positions(
            grad_output,
            argmax,
            offsets,
            samples,
            bag_of,
            counts,
            order,
            begin,
            tl.minimum(begin + CHUNK, end),
            column,
            bag_length,
            DIM,
            ACC,
            ROWS,
            COLUMNS,
        )
        tl.store(partials + slot * DIM + column, total, mask=column < DIM)


@triton.jit(do_not_specialize=VARIABLES)
def long_segments_kernel(
    grad_rows,
    partials,
    rows,
    segments,
    num_rows,
    BY_FREQUENCY: tl.constexpr,
    DENSE: tl.constexpr,
    DIM: tl.constexpr,
    ACC: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Row gradients of the long segments: the window that sees one open adds its partial sums."""
    slot = tl.program_id(0).to(tl.int64) * 2 + 1
    segment, first, end, begin = chunk_of_slot(segments, num_rows, slot)
    if begin >= 0:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < DIM
        total = tl.load(partials + slot * DIM + column, mask=inside, other=0)
        start = first + CHUNK
        while start < end:
            at = (start // CHUNK * 2) * DIM + column
            total += tl.load(partials + at, mask=inside, other=0)
            start += CHUNK
        store_row_gradient(
            grad_rows, rows, segment, end - first, total, column, BY_FREQUENCY, DENSE, DIM
        )


@triton.jit(do_not_specialize=VARIABLES)
def per_sample_kernel(
    grad_weights,
    grad_output,
    weight,
    indices,
    bag_of,
    counts,
    status,
    caller,
    num_indices,
    bag_length,
    num_embeddings,
    padding_idx,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """grad_weights[p] = dot(grad_output[bag(p)], weight[indices[p]]), for mean / counts[bag(p)]."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = place < num_indices
    bag = bag_at(bag_of, place.to(tl.int32), there, bag_length)
    covered = bag >= 0
    row, valid = load_rows(indices, place, covered, num_embeddings)
    used = valid & (row != padding_idx)
    part = tl.zeros((ROWS, COLUMNS), ACC)
    for start in range(0, DIM, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        mask = used[:, None] & (column < DIM)[None, :]
        x = tl.load(weight + row[:, None] * STRIDE + column[None, :], mask=mask, other=0)
        g = tl.load(grad_output + bag[:, None] * DIM + column[None, :], mask=mask, other=0)
        part += widen(x, ACC) * g
    dot = tl.sum(part, axis=1)
    if counts is not None:
        dot = divide(dot, tl.load(counts + bag, mask=used, other=1))
    tl.store(grad_weights + place, dot, mask=there)
    bad = wrong_positions(place, covered, valid)
    report_index(status, caller, bad, indices, num_embeddings)


def embedding_bag_backward(
    grad_output: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    order: Tensor,
    rows: Tensor,
    segments: Tensor,
    num_rows: Tensor,
    num_embeddings: int,
    out_rows: int,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    dense: bool,
    grad_dtype: torch.dtype,
) -> Tensor:
    op = "embedding_bag_backward"
    device = grad_output.device
    if not dense:
        # The host has just waited for out_rows: what the forward found is known by now.
        raise_pending(device)
    bags = Bags(op, indices, offsets, num_embeddings, padding_idx, include_last_offset)
    n = bags.num_indices
    require(
        grad_dtype in (torch.float32, torch.float64), op, "grad_dtype must be float32 or float64"
    )
    require(
        grad_output.dim() == 2 and grad_output.shape[0] == bags.num_bags,
        op,
        "grad_output must have one row per bag",
    )
    require(
        out_rows == num_embeddings if dense else out_rows <= n,
        op,
        "a dense gradient has num_embeddings rows, another at most one per index",
    )
    require(
        order.numel() == n
        and rows.numel() == n
        and segments.numel() == n + 1
        and num_rows.numel() == 1
        and all(t.is_contiguous() for t in (order, rows, segments)),
        op,
        "order, rows, segments and num_rows must be what group_indices made of these indices",
    )
    samples = winners = None
    if per_sample_weights is not None:
        require(
            per_sample_weights.numel() == n,
            op,
            "per_sample_weights must have one element per index",
        )
        samples = per_sample_weights.detach().contiguous()
    if mode == "max":
        require(
            argmax is not None
            and argmax.shape == grad_output.shape
            and argmax.dtype == torch.int32,
            op,
            "argmax must be the int32 argmax of the forward",
        )
        assert argmax is not None
        winners = argmax.contiguous()

    dim = grad_output.shape[1]
    grad = grad_output.detach().contiguous()
    grad_rows = (torch.zeros if dense else torch.empty)(
        (out_rows, dim), dtype=grad_dtype, device=device
    )
    capacity = min(n, out_rows)  # of distinct rows
    if capacity == 0 or dim == 0:
        return grad_rows

    # Most segments have few positions; the sum of a row on its way needs few registers.
    sizes = tile(dim, grad_dtype, elements=512)
    blocks = column_blocks(dim, sizes["COLUMNS"])
    acc = TRITON_DTYPES[grad_dtype]
    with on(device):
        described = (
            grad,
            winners,
            bags.offsets,
            samples,
            bags.bag_of(),
            bags.counts(grad_dtype) if mode == "mean" else None,
            order,
        )
        finish = {"BY_FREQUENCY": scale_grad_by_freq, "DENSE": dense, "DIM": dim, "ACC": acc}
        short_segments_kernel[(capacity, blocks)](
            grad_rows, *described, rows, segments, num_rows, bags.bag_length, **finish, **sizes
        )
        if n > CHUNK_TERMS:
            windows = triton.cdiv(n, CHUNK_TERMS)
            partials = torch.empty((2 * windows, dim), dtype=grad_dtype, device=device)
            long_chunks_kernel[(2 * windows, blocks)](
                partials,
                *described,
                segments,
                num_rows,
                bags.bag_length,
                DIM=dim,
                ACC=acc,
                **sizes,
            )
            long_segments_kernel[(windows, blocks)](
                grad_rows,
                partials,
                rows,
                segments,
                num_rows,
                **finish,
                COLUMNS=sizes["COLUMNS"],
                num_warps=1,
            )
    return grad_rows


def embedding_bag_per_sample_weights_backward(
    grad_output: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
) -> Tensor:
    op = "embedding_bag_per_sample_weights_backward"
    require(weight.dim() == 2, op, f"weight must be 2-D, got {weight.dim()}-D")
    require(mode != "max", op, "mode must be 'sum' or 'mean', got 'max'")
    bags = Bags(op, indices, offsets, weight.shape[0], padding_idx, include_last_offset)
    dim = weight.shape[1]
    require(
        grad_output.shape == (bags.num_bags, dim),
        op,
        "grad_output must have one row per bag and weight's columns",
    )
    acc = accumulation_dtype(weight.dtype)
    grad = grad_output.detach().to(acc).contiguous()
    table = with_whole_rows(weight)
    result = torch.empty(indices.shape, dtype=acc, device=weight.device)
    if bags.num_indices == 0:
        return result
    sizes = tile(dim, acc, elements=1024)
    with on(weight.device):
        per_sample_kernel[(triton.cdiv(bags.num_indices, sizes["ROWS"]),)](
            result,
            grad,
            table,
            bags.indices,
            bags.bag_of(),
            bags.counts(acc) if mode == "mean" else None,
            status_of(weight.device),
            caller_of(op, ""),
            bags.num_indices,
            bags.bag_length,
            bags.num_embeddings,
            bags.padding_idx,
            DIM=dim,
            STRIDE=row_stride(table),
            ACC=TRITON_DTYPES[acc],
            **sizes,
        )
        settle(weight.device)
    return result
