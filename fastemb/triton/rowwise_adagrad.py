"""Row-wise Adagrad: one step on the rows of one parameter, in place.

Apart from the elementwise rules of `row_steps`, because the rate of a row comes of its whole
gradient. Arguments have the same names and meanings as there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastemb._row_checks import check
from fastemb.triton.bags import divide, on, square_root
from fastemb.triton.rows import (
    STEP_NUMBERS,
    STEP_TENSORS,
    STEP_VARIABLES,
    in_double,
    learning_rate,
    load_gradient,
    load_values,
    programs,
    rows_at,
    rows_to_update,
    step_constants,
    store_values,
)


@triton.jit(do_not_specialize=STEP_VARIABLES)
def rowwise_adagrad_kernel(
    param,
    master,
    sums,
    rows,
    used_rows,
    grad,
    step,
    inv_scale,
    found_inf,
    lr: tl.float64,
    lr_tensor,
    weight_decay: tl.float64,
    seed,
    lr_decay: tl.float64,
    eps: tl.float64,
    grad_rows,
    num_embeddings,
    MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has rows to itself: their sum of squares first, then the update."""
    count = rows_to_update(grad_rows, used_rows, found_inf)
    number = tl.load(step).to(tl.int64)
    rate = learning_rate(lr, lr_tensor)
    clr = (rate / (1.0 + (number - 1).to(tl.float64) * in_double(lr_decay))).to(ACC)
    small = in_double(eps).to(ACC)

    tiles = tl.cdiv(count, ROWS)
    tile_index = tl.program_id(0).to(tl.int64)
    while tile_index < tiles:
        place = tile_index * ROWS + tl.arange(0, ROWS)
        row, there = rows_at(rows, place, count, num_embeddings)
        part = tl.zeros((ROWS, COLUMNS), ACC)
        for start in range(0, DIM, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            mask = there[:, None] & (column < DIM)[None, :]
            at_grad = place[:, None] * DIM + column[None, :]
            value = tl.zeros((ROWS, COLUMNS), ACC)
            if DECAY:
                at = row[:, None] * STRIDE + column[None, :]
                at_state = row[:, None] * DIM + column[None, :]
                value = load_values(param, master, at, at_state, mask, ACC)
            g = load_gradient(
                grad, value, at_grad, mask, inv_scale, weight_decay, MAXIMIZE, DECAY, ACC
            )
            part += tl.where(mask, g * g, 0.0)  # 0 * inv_scale may be a NaN
        before = tl.load(sums + row, mask=there, other=0)
        total = before + divide(tl.sum(part, axis=1), tl.full((), DIM, ACC))
        # Several lanes read what one writes: after all have read.
        tl.debug_barrier()
        tl.store(sums + row, total, mask=there)
        row_rate = divide(clr, square_root(total) + small)
        for start in range(0, DIM, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            mask = there[:, None] & (column < DIM)[None, :]
            at = row[:, None] * STRIDE + column[None, :]
            at_state = row[:, None] * DIM + column[None, :]
            at_grad = place[:, None] * DIM + column[None, :]
            value = load_values(param, master, at, at_state, mask, ACC)
            g = load_gradient(
                grad, value, at_grad, mask, inv_scale, weight_decay, MAXIMIZE, DECAY, ACC
            )
            value -= row_rate[:, None] * g
            store_values(
                param, master, value, at, at_state, mask, seed, number, row, column, STOCHASTIC
            )
        tile_index += tl.num_programs(0)


def row_rowwise_adagrad_(
    param: Tensor,
    master: Tensor | None,
    sum: Tensor,
    rows: Tensor | None,
    used_rows: Tensor | None,
    grad: Tensor,
    step: Tensor,
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    lr: float,
    lr_tensor: Tensor | None,
    weight_decay: float,
    maximize: bool,
    seed: int,
    lr_decay: float,
    eps: float,
) -> None:
    arguments = locals()
    check("row_rowwise_adagrad_", arguments)
    grad_rows, dim = grad.shape
    if grad_rows == 0 or dim == 0:
        return
    constants = step_constants(arguments)
    tiles = triton.cdiv(grad_rows, constants["ROWS"])
    with on(param.device):
        rowwise_adagrad_kernel[(programs(param.device, tiles),)](
            param,
            master,
            sum,
            *(arguments[name] for name in (*STEP_TENSORS, *STEP_NUMBERS)),
            lr_decay,
            eps,
            grad_rows,
            param.shape[0],
            MAXIMIZE=maximize,
            DECAY=weight_decay != 0,
            DIM=dim,
            **constants,
        )
