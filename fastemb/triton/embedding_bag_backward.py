"""Gradients of the bag: of the table's rows and of the per-sample weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastemb import _reference
from fastemb._reference import accumulation_dtype
from fastemb.triton.bags import (
    TRITON_DTYPES,
    VARIABLES,
    Bags,
    bag_at,
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
from fastemb.triton.segments import SUM_ELEMENTS, rows_to_update, sum_partials, sum_segments
from fastemb.triton.terms import samples_of, terms_of

# Sorts with torch, has static shapes and no host sync.
group_indices = _reference.group_indices


@triton.jit(do_not_specialize=VARIABLES)
def row_gradients_kernel(
    grad_rows,
    grad,
    sources,
    coefficients,
    argmax,
    within,
    partials,
    rows,
    segments,
    num_rows,
    capacity,
    BY_FREQUENCY: tl.constexpr,
    DENSE: tl.constexpr,
    DIM: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradients of the distinct rows, of which there are no more than capacity."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = place < rows_to_update(capacity, num_rows, None)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = sum_segments(
        grad, sources, coefficients, argmax, within, partials, segments, place, there, column, DIM,
        ACC, ROWS, COLUMNS,
    )  # fmt: skip
    if BY_FREQUENCY:
        begin = tl.load(segments + place, mask=there, other=0)
        end = tl.load(segments + place + 1, mask=there, other=1)
        total = divide(total, (end - begin).to(ACC)[:, None])
    row = place
    if DENSE:
        row = tl.load(rows + place, mask=there, other=0)
    mask = there[:, None] & (column < DIM)[None, :]
    tl.store(grad_rows + row[:, None] * DIM + column[None, :], total, mask=mask)


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
    samples = samples_of(op, per_sample_weights, n)
    winners = None
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

    sizes = tile(dim, grad_dtype, elements=SUM_ELEMENTS)
    grid = (triton.cdiv(capacity, sizes["ROWS"]), column_blocks(dim, sizes["COLUMNS"]))
    with on(device):
        sources, coefficients, within = terms_of(bags, order, samples, mode, grad_dtype)
        partials = sum_partials(
            grad,
            sources,
            coefficients,
            segments,
            num_rows,
            grad_dtype,
            argmax=winners,
            within=within,
        )
        row_gradients_kernel[grid](
            grad_rows,
            grad,
            sources,
            coefficients,
            winners,
            within,
            partials,
            rows,
            segments,
            num_rows,
            capacity,
            BY_FREQUENCY=scale_grad_by_freq,
            DENSE=dense,
            DIM=dim,
            ACC=TRITON_DTYPES[grad_dtype],
            enable_fp_fusion=False,  # it would round otherwise than ops.h says
            **sizes,
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
