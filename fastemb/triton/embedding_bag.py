"""Forward of embedding_bag and embedding. One program for a bag and a block of columns.

Ids are checked where they are read anyway, by the programs of the first block of columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastemb._reference import accumulation_dtype
from fastemb.triton.bags import (
    CHUNK,
    TRITON_DTYPES,
    VARIABLES,
    Bags,
    bag_range,
    column_blocks,
    divide,
    load_rows,
    narrow,
    on,
    require,
    row_stride,
    tile,
    widen,
    with_whole_rows,
)
from fastemb.triton.errors import (
    NO_POSITION,
    caller_of,
    report_index,
    report_offset,
    settle,
    status_of,
    wrong_positions,
)


@triton.jit
def read_rows(
    weight,
    indices,
    position,
    end,
    column,
    first_bad,
    num_embeddings,
    padding_idx,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
):
    """Values of the rows at the positions before end, and which count; first_bad brought up to
    date.
    """
    there = position < end
    row, valid = load_rows(indices, position, there, num_embeddings)
    first_bad = tl.minimum(first_bad, wrong_positions(position, there, valid))
    used = valid & (row != padding_idx)
    x = tl.load(
        weight + row[:, None] * STRIDE + column[None, :],
        mask=used[:, None] & (column < DIM)[None, :],
        other=0,
    )
    return widen(x, ACC), used, first_bad


@triton.jit
def report_bag(status, caller, first_bad, wrong, indices, offsets, num_indices, num_embeddings):
    """Once for a bag: by the program of its first columns."""
    if tl.program_id(1) == 0:
        report_index(status, caller, first_bad, indices, num_embeddings)
        if offsets is not None:
            report_offset(status, caller, wrong, offsets, num_indices)


@triton.jit(do_not_specialize=VARIABLES)
def bag_sum_kernel(
    output,
    weight,
    indices,
    offsets,
    samples,
    status,
    caller,
    num_indices,
    num_offsets,
    num_bags,
    bag_length,
    num_embeddings,
    padding_idx,
    MEAN: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """sum and mean. samples: weight of each position, or None."""
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < DIM
    begin, end, wrong = bag_range(offsets, bag, num_indices, num_offsets, num_bags, bag_length)
    first_bad = tl.full((ROWS,), NO_POSITION, tl.int32)
    count = tl.zeros((ROWS,), tl.int32)
    total = tl.zeros((COLUMNS,), ACC)
    chunk = begin
    while chunk < end:
        stop = tl.minimum(chunk + CHUNK, end)
        part = tl.zeros((ROWS, COLUMNS), ACC)
        start = chunk
        while start < stop:
            position = start + tl.arange(0, ROWS)
            x, used, first_bad = read_rows(
                weight, indices, position, stop, column, first_bad, num_embeddings, padding_idx,
                DIM, STRIDE, ACC,
            )  # fmt: skip
            count += used.to(tl.int32)
            if samples is not None:
                scale = widen(tl.load(samples + position, mask=used, other=0), ACC)
                x = scale[:, None] * x
            part += x
            start += ROWS
        total += tl.sum(part, axis=0)
        chunk += CHUNK
    if MEAN:
        total = divide(total, tl.maximum(tl.sum(count, axis=0), 1).to(ACC))
    tl.store(
        output + bag * DIM + column,
        narrow(total, output.dtype.element_ty),
        mask=inside & (bag < num_bags),
    )
    report_bag(status, caller, first_bad, wrong, indices, offsets, num_indices, num_embeddings)


@triton.jit(do_not_specialize=VARIABLES)
def bag_max_kernel(
    output,
    argmax,
    weight,
    indices,
    offsets,
    status,
    caller,
    num_indices,
    num_offsets,
    num_bags,
    bag_length,
    num_embeddings,
    padding_idx,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """max, and the position within the bag where each winner stands, -1 in an empty bag."""
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < DIM
    begin, end, wrong = bag_range(offsets, bag, num_indices, num_offsets, num_bags, bag_length)
    first_bad = tl.full((ROWS,), NO_POSITION, tl.int32)
    best = tl.full((ROWS, COLUMNS), float("-inf"), ACC)
    winner = tl.full((ROWS, COLUMNS), NO_POSITION, tl.int32)
    start = begin
    while start < end:
        position = start + tl.arange(0, ROWS)
        x, used, first_bad = read_rows(
            weight, indices, position, end, column, first_bad, num_embeddings, padding_idx,
            DIM, STRIDE, ACC,
        )  # fmt: skip
        # Within one row of the tile positions ascend, so the first of equals is already there.
        first_nan = (x != x) & (best == best)
        wins = used[:, None] & ((winner == NO_POSITION) | (x > best) | first_nan)
        best = tl.where(wins, x, best)
        within = (position - begin).to(tl.int32)
        winner = tl.where(wins, within[:, None], winner)
        start += ROWS

    # Over the rows of the tile: NaN above all, then the largest, and the first that equals it.
    is_nan = best != best
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) != 0
    largest = tl.max(tl.where(is_nan, float("-inf"), best), axis=0)
    wins = tl.where(has_nan[None, :], is_nan, best == largest[None, :])
    first = tl.min(tl.where(wins, winner, NO_POSITION), axis=0)
    empty = first == NO_POSITION
    # The winner itself and not what equals it: -0.0 and 0.0 do. It is the only one of its column
    # that is not replaced by the smallest integer, which is -0.0 and can stand for itself.
    chosen = winner == first[None, :]
    if best.dtype == tl.float64:
        bits = tl.where(chosen, best.to(tl.int64, bitcast=True), -(2**63))
    else:
        bits = tl.where(chosen, best.to(tl.int32, bitcast=True), -(2**31))
    value = tl.where(empty, 0.0, tl.max(bits, axis=0).to(ACC, bitcast=True))
    at = bag * DIM + column
    present = inside & (bag < num_bags)
    tl.store(output + at, narrow(value, output.dtype.element_ty), mask=present)
    tl.store(argmax + at, tl.where(empty, -1, first), mask=present)
    report_bag(status, caller, first_bad, wrong, indices, offsets, num_indices, num_embeddings)


@triton.jit(do_not_specialize=VARIABLES)
def gather_kernel(
    output,
    weight,
    indices,
    status,
    caller,
    num_indices,
    num_embeddings,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """output[n] = weight[indices[n]], zero where the id is wrong. ROWS neighbours a program."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < DIM
    there = position < num_indices
    row, valid = load_rows(indices, position, there, num_embeddings)
    x = tl.load(
        weight + row[:, None] * STRIDE + column[None, :],
        mask=valid[:, None] & inside[None, :],
        other=0,
    )
    if weight.dtype.element_ty != output.dtype.element_ty:
        x = narrow(widen(x, ACC), output.dtype.element_ty)
    tl.store(
        output + position[:, None] * DIM + column[None, :],
        x,
        mask=there[:, None] & inside[None, :],
    )
    if tl.program_id(1) == 0:
        bad = wrong_positions(position, there, valid)
        report_index(status, caller, bad, indices, num_embeddings)


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    output_dtype: torch.dtype,
    table: str,
) -> Tensor:
    op = "embedding"
    require(weight.dim() == 2, op, f"weight must be 2-D, got {weight.dim()}-D")
    bags = Bags(op, indices.reshape(-1, 1), None, weight.shape[0])
    rows = with_whole_rows(weight)
    dim = weight.shape[1]
    acc = accumulation_dtype(weight.dtype)
    output = weight.new_empty((*indices.shape, dim), dtype=output_dtype)
    if bags.num_indices == 0:
        return output
    sizes = tile(dim, acc, elements=1024)
    with on(weight.device):
        blocks = column_blocks(dim, sizes["COLUMNS"])
        gather_kernel[(triton.cdiv(bags.num_indices, sizes["ROWS"]), blocks)](
            output,
            rows,
            bags.indices,
            status_of(weight.device),
            caller_of(op, table),
            bags.num_indices,
            bags.num_embeddings,
            DIM=dim,
            STRIDE=row_stride(rows),
            ACC=TRITON_DTYPES[acc],
            **sizes,
        )
        settle(weight.device)
    return output


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    sparse: bool,
    output_dtype: torch.dtype,
    table: str,
) -> tuple[Tensor, Tensor]:
    op = "embedding_bag"
    require(weight.dim() == 2, op, f"weight must be 2-D, got {weight.dim()}-D")
    require(
        mode in ("sum", "mean", "max"), op, f"mode must be 'sum', 'mean' or 'max', got '{mode}'"
    )
    bags = Bags(op, indices, offsets, weight.shape[0], padding_idx, include_last_offset)
    samples = None
    if per_sample_weights is not None:
        require(mode != "max", op, "per_sample_weights must be None in mode 'max'")
        require(
            per_sample_weights.numel() == bags.num_indices,
            op,
            "per_sample_weights must have one element per index",
        )
        samples = per_sample_weights.detach().contiguous()
    rows = with_whole_rows(weight)
    dim = weight.shape[1]
    acc = accumulation_dtype(weight.dtype)
    shape = (bags.num_bags, dim)
    output = weight.new_empty(shape, dtype=output_dtype)
    argmax = weight.new_empty(shape if mode == "max" else (0,), dtype=torch.int32)
    # One program looks at the first offset even where there is no bag.
    programs = max(bags.num_bags, min(bags.num_offsets, 1))
    if programs == 0:
        return output, argmax

    # A winner's place takes as many registers as its value.
    sizes = tile(dim, acc, elements=512 if mode == "max" else 1024)
    grid = (programs, column_blocks(dim, sizes["COLUMNS"]))
    described = (
        status_of(weight.device),
        caller_of(op, table),
        bags.num_indices,
        bags.num_offsets,
        bags.num_bags,
        bags.bag_length,
        bags.num_embeddings,
        bags.padding_idx,
    )
    constants = {"DIM": dim, "STRIDE": row_stride(rows), "ACC": TRITON_DTYPES[acc], **sizes}
    with on(weight.device):
        if mode == "max":
            bag_max_kernel[grid](
                output, argmax, rows, bags.indices, bags.offsets, *described, **constants
            )
        else:
            bag_sum_kernel[grid](
                output,
                rows,
                bags.indices,
                bags.offsets,
                samples,
                *described,
                MEAN=mode == "mean",
                **constants,
            )
        settle(weight.device)
    return output, argmax
