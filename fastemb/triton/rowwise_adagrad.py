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
    adjust_gradient,
    gradient_rows,
    in_double,
    learning_rate,
    load_gradient,
    load_values,
    partials_of,
    programs,
    rows_at,
    step_constants,
    store_values,
)
from fastemb.triton.segments import rows_to_update


@triton.jit
def sum_in_halves(x):
    """Sums over the columns, a power of two of them: the first half plus the second, and so on.

    Not `tl.sum`, whose order depends on how the compiler shares a block out over lanes, and that on
    the types of what is loaded and stored.
    """
    rows: tl.constexpr = x.shape[0]
    for _ in tl.static_range(8):  # 256 columns at most
        if x.shape[1] > 1:
            halves = tl.permute(tl.reshape(x, (rows, 2, x.shape[1] // 2)), (0, 2, 1))
            first, second = tl.split(halves)
            x = first + second
    return tl.reshape(x, (rows,))


@triton.jit
def load_block(
    param,
    master,
    grad,
    segments,
    sources,
    coefficients,
    partials,
    inv_scale,
    weight_decay,
    row,
    place,
    there,
    start,
    MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Value and gradient of the columns from start."""
    column = start + tl.arange(0, COLUMNS)
    g = load_gradient(
        grad, segments, sources, coefficients, partials, place, there, column, DIM,
        ACC, ROWS, COLUMNS,
    )  # fmt: skip
    mask = there[:, None] & (column < DIM)[None, :]
    at = row[:, None] * STRIDE + column[None, :]
    value = load_values(param, master, at, row[:, None] * DIM + column[None, :], mask, ACC)
    return value, adjust_gradient(g, value, inv_scale, weight_decay, MAXIMIZE, DECAY, ACC)


@triton.jit
def store_block(
    param,
    master,
    value,
    row,
    there,
    start,
    seed,
    number,
    STOCHASTIC: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = start + tl.arange(0, COLUMNS)
    mask = there[:, None] & (column < DIM)[None, :]
    at = row[:, None] * STRIDE + column[None, :]
    at_state = row[:, None] * DIM + column[None, :]
    store_values(param, master, value, at, at_state, mask, seed, number, row, column, STOCHASTIC)


@triton.jit(do_not_specialize=STEP_VARIABLES)
def rowwise_adagrad_kernel(
    param,
    master,
    sums,
    partials,
    rows,
    used_rows,
    grad,
    segments,
    sources,
    coefficients,
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
    """A program has rows to itself: their sum of squares first, then the update.

    The first block of columns, all there is of most rows, is kept in between; the others are read
    and summed again.
    """
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
        value, g = load_block(
            param, master, grad, segments, sources, coefficients, partials, inv_scale,
            weight_decay, row, place, there, 0,
            MAXIMIZE, DECAY, DIM, STRIDE, ACC, ROWS, COLUMNS,
        )  # fmt: skip
        inside = there[:, None] & (tl.arange(0, COLUMNS) < DIM)[None, :]
        part = tl.where(inside, g * g, 0.0)  # 0 * inv_scale may be a NaN
        for start in range(COLUMNS, DIM, COLUMNS):
            _, other = load_block(
                param, master, grad, segments, sources, coefficients, partials, inv_scale,
                weight_decay, row, place, there, start,
                MAXIMIZE, DECAY, DIM, STRIDE, ACC, ROWS, COLUMNS,
            )  # fmt: skip
            inside = there[:, None] & (start + tl.arange(0, COLUMNS) < DIM)[None, :]
            part += tl.where(inside, other * other, 0.0)
        before = tl.load(sums + row, mask=there, other=0)
        total = before + divide(sum_in_halves(part), tl.full((), DIM, ACC))
        # Several lanes read what one writes: after all have read.
        tl.debug_barrier()
        tl.store(sums + row, total, mask=there)
        row_rate = divide(clr, square_root(total) + small)[:, None]
        store_block(
            param, master, value - row_rate * g, row, there, 0, seed, number,
            STOCHASTIC, DIM, STRIDE, COLUMNS,
        )  # fmt: skip
        for start in range(COLUMNS, DIM, COLUMNS):
            value, g = load_block(
                param, master, grad, segments, sources, coefficients, partials, inv_scale,
                weight_decay, row, place, there, start,
                MAXIMIZE, DECAY, DIM, STRIDE, ACC, ROWS, COLUMNS,
            )  # fmt: skip
            store_block(
                param, master, value - row_rate * g, row, there, start, seed, number,
                STOCHASTIC, DIM, STRIDE, COLUMNS,
            )  # fmt: skip
        tile_index += tl.num_programs(0)


def row_rowwise_adagrad_(
    param: Tensor,
    master: Tensor | None,
    sum: Tensor,
    rows: Tensor | None,
    used_rows: Tensor | None,
    grad: Tensor,
    segments: Tensor | None,
    sources: Tensor | None,
    coefficients: Tensor | None,
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
    grad_rows, dim = gradient_rows(arguments), param.shape[1]
    if grad_rows == 0 or dim == 0:
        return
    constants = step_constants(arguments)
    tiles = triton.cdiv(grad_rows, constants["ROWS"])
    with on(param.device):
        rowwise_adagrad_kernel[(programs(param.device, tiles),)](
            param,
            master,
            sum,
            partials_of(arguments),
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
