"""Rows whose norm is too large are scaled down in place. One program for each row named."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from fastemb import _reference
from fastemb._reference import accumulation_dtype
from fastemb.triton.bags import (
    TRITON_DTYPES,
    VARIABLES,
    Bags,
    divide,
    load_rows,
    narrow,
    on,
    require,
    row_stride,
    square_root,
    widen,
    with_whole_rows,
)
from fastemb.triton.errors import caller_of, report_index, settle, status_of, wrong_positions


@triton.jit(do_not_specialize=VARIABLES)
def check_indices_kernel(indices, status, caller, num_indices, num_embeddings, ROWS: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = position < num_indices
    _, valid = load_rows(indices, position, there, num_embeddings)
    bad = wrong_positions(position, there, valid)
    report_index(status, caller, bad, indices, num_embeddings)


@triton.jit
def power(x, exponent):
    """x ** exponent for x >= 0, in f64: an f32 logarithm times a large exponent is too coarse."""
    is_zero = x == 0
    raised = tl.exp2(tl.log2(tl.where(is_zero, 1, x).to(tl.float64)) * exponent)
    return tl.where(is_zero, 0, raised)


@triton.jit
def renorm_kernel(
    weight,
    rows,
    num_rows,
    MAX_NORM: tl.constexpr,
    NORM_TYPE: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """MAX_NORM and NORM_TYPE are constants because Triton passes a float argument as f32.

    NORM_TYPE 0 stands for the largest absolute value.
    """
    program = tl.program_id(0)
    if program < tl.load(num_rows):
        start_of_row = weight + tl.load(rows + program) * STRIDE
        part = tl.zeros((COLUMNS,), ACC)
        for start in range(0, DIM, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            x = widen(tl.load(start_of_row + column, mask=column < DIM, other=0), ACC)
            size = tl.abs(x)
            if NORM_TYPE == 0:
                # A NaN wins over every number, so that it reaches the norm.
                part = tl.where((size > part) | (size != size), size, part)
            elif NORM_TYPE == 1:
                part += size
            elif NORM_TYPE == 2:
                part += x * x
            else:
                part += power(size, NORM_TYPE).to(ACC)
        if NORM_TYPE == 0:
            has_nan = tl.max((part != part).to(tl.int32), axis=0) != 0
            norm = tl.where(has_nan, float("nan"), tl.max(part, axis=0))
        elif NORM_TYPE == 1:
            norm = tl.sum(part, axis=0)
        elif NORM_TYPE == 2:
            norm = square_root(tl.sum(part, axis=0))
        else:
            norm = power(tl.sum(part, axis=0), 1.0 / NORM_TYPE)
        norm = norm.to(ACC)
        max_norm = tl.full((), MAX_NORM, ACC)
        if norm > max_norm:
            factor = divide(max_norm, norm + tl.full((), 1e-7, ACC))
            for start in range(0, DIM, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                x = widen(tl.load(start_of_row + column, mask=column < DIM, other=0), ACC)
                scaled = narrow(x * factor, weight.dtype.element_ty)
                # Short rows are read by several lanes and written by one: after all have read.
                tl.debug_barrier()
                tl.store(start_of_row + column, scaled, mask=column < DIM)


def embedding_renorm_(
    weight: Tensor, indices: Tensor, max_norm: float, norm_type: float, table: str
) -> None:
    op = "embedding_renorm_"
    require(weight.dim() == 2, op, f"weight must be 2-D, got {weight.dim()}-D")
    bags = Bags(op, indices.reshape(-1, 1), None, weight.shape[0])
    n = bags.num_indices
    dim = weight.shape[1]
    if n == 0:
        return
    with on(weight.device):
        check_indices_kernel[(triton.cdiv(n, 256),)](
            bags.indices,
            status_of(weight.device),
            caller_of(op, table),
            n,
            bags.num_embeddings,
            ROWS=256,
            num_warps=4,
        )
        # Before a row is written, where the host learns of it at all.
        settle(weight.device)
        if dim == 0 or weight.shape[0] == 0:
            return
        groups = _reference.group_indices(bags.indices, None, weight.shape[0], -1, False)
        _, rows, _, num_rows = groups
        values = with_whole_rows(weight)
        acc = accumulation_dtype(weight.dtype)
        # Up to 256 columns, eight f32 a lane, keep a row of that size in registers.
        renorm_kernel[(min(n, weight.shape[0]),)](
            values,
            rows,
            num_rows,
            MAX_NORM=max_norm,
            NORM_TYPE=0.0 if math.isinf(norm_type) else norm_type,
            DIM=dim,
            STRIDE=row_stride(values),
            ACC=TRITON_DTYPES[acc],
            COLUMNS=min(triton.next_power_of_2(dim), 256),
            num_warps=1,
        )
        if values.data_ptr() != weight.data_ptr():
            weight.detach().copy_(values)
