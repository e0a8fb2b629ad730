"""The elementwise row optimizers: one step on the rows of one parameter, in place.

The arithmetic is that of ``csrc/common/row_update.h``: what comes of the hyperparameters in float64
and rounded once, the elements in the accumulator's type. Kernels are launched without fused
multiply-add, and so give the bits of the CPU and CUDA kernels.

Everything that may change from step to step and lives on the device (step, scale, flags, learning
rate, number of rows) is read there. Further arguments, the same in every kernel:
  grad_rows      rows of the gradient, with `rows` as many as that has
  segments, sources, coefficients, partials
                 as in `segments`, where the step sums its gradients itself; else None
  RULE           which optimizer; state1..3 and hyper1..3 are its own:
                   ADAM     exp_avg, exp_avg_sq, max_exp_avg_sq or None;  beta1, beta2, eps
                   ADAGRAD  sum;                                          lr_decay, eps
                   SGD      momentum_buffer or None;                      momentum, dampening
  DIM, width     columns; DIM is None for a parameter of one row, and width, a variable, says it

A tile is some rows and a block of columns, so that one wide row is shared out as well. Programs
stride over the tiles: the scalars, float64, are computed once for several. Nothing that several
tiles read is written by one of them; a row's counters are brought up to date by a kernel of their
own, after all tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fastemb._row_checks import check
from fastemb.triton.bags import divide, on, square_root
from fastemb.triton.rows import (
    FIRST,
    SECOND,
    STEP_NUMBERS,
    STEP_TENSORS,
    STEP_VARIABLES,
    adjust_gradient,
    elementwise_constants,
    gradient_rows,
    in_double,
    integer_power,
    learning_rate,
    load_gradient,
    load_moment,
    load_values,
    partials_of,
    programs,
    rows_at,
    store_moment,
    store_values,
)
from fastemb.triton.segments import rows_to_update

ADAM = tl.constexpr(0)
ADAGRAD = tl.constexpr(1)
SGD = tl.constexpr(2)


# ---------------------------------------------------------------------------------------------
# device: the rules
# ---------------------------------------------------------------------------------------------


@triton.jit
def adam_scalars(
    lr, beta1, beta2, update, largest, CORRECTED_DENOMINATOR: tl.constexpr, ACC: tl.constexpr
):
    """Step size and divisor of the root, for the update's number (scalar or block)."""
    correction = 1.0 - integer_power(beta1, update, largest)
    root = tl.sqrt(1.0 - integer_power(beta2, update, largest))
    if CORRECTED_DENOMINATOR:
        step_size = lr / correction
    else:
        step_size = lr * root / correction
    return step_size.to(ACC), root.to(ACC)


@triton.jit
def adam_moments(g, m, v, largest, beta1, beta2, rate1, rate2, AMSGRAD: tl.constexpr):
    """After gradient g; the third is what to divide by the root of."""
    m = m * beta1 + g * rate1
    v = v * beta2 + g * rate2 * g
    if AMSGRAD:
        # A NaN wins over every number.
        largest = tl.where((largest > v) | (largest != largest), largest, v)
    else:
        largest = v
    return m, v, largest


@triton.jit
def adam_change(m, v, eps, factor, divisor, CORRECTED_DENOMINATOR: tl.constexpr):
    """What is subtracted from the parameter."""
    root = square_root(v)
    if CORRECTED_DENOMINATOR:
        root = divide(root, divisor)
    return divide(m, root + eps) * factor


@triton.jit(do_not_specialize=STEP_VARIABLES)
def elementwise_step_kernel(
    param,
    master,
    state1,
    state2,
    state3,
    row_step,
    row_count,
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
    hyper1: tl.float64,
    hyper2: tl.float64,
    hyper3: tl.float64,
    grad_rows,
    num_embeddings,
    width,
    RULE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    CORRECTED_DENOMINATOR: tl.constexpr,
    NESTEROV: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adam, Adagrad and SGD. DECOUPLED and CORRECTED_DENOMINATOR are Adam's, NESTEROV is SGD's."""
    if DIM is None:
        dim = tl.full((), width, tl.int64)
    else:
        dim = DIM
    count = rows_to_update(grad_rows, used_rows, found_inf)
    number = tl.load(step).to(tl.int64)
    rate = learning_rate(lr, lr_tensor)
    if RULE == ADAM:
        beta1, beta2 = in_double(hyper1), in_double(hyper2)
        keep = 1.0 - rate * in_double(weight_decay)
        step_size, root_scale = adam_scalars(
            rate, beta1, beta2, number, number, CORRECTED_DENOMINATOR, ACC
        )
        rate1, rate2 = (1.0 - beta1).to(ACC), (1.0 - beta2).to(ACC)
        keep1, keep2 = beta1.to(ACC), beta2.to(ACC)
        eps = in_double(hyper3).to(ACC)
    elif RULE == ADAGRAD:
        clr = (rate / (1.0 + (number - 1).to(tl.float64) * in_double(hyper1))).to(ACC)
        eps = in_double(hyper2).to(ACC)
    else:
        momentum = in_double(hyper1).to(ACC)
        fresh = (1.0 - in_double(hyper2)).to(ACC)
        sgd_lr = rate.to(ACC)

    blocks = tl.cdiv(dim, COLUMNS)
    tiles = tl.cdiv(count, ROWS) * blocks
    tile_index = tl.program_id(0).to(tl.int64)
    while tile_index < tiles:
        place = tile_index // blocks * ROWS + tl.arange(0, ROWS)
        column = tile_index % blocks * COLUMNS + tl.arange(0, COLUMNS)
        row, there = rows_at(rows, place, count, num_embeddings)
        mask = there[:, None] & (column < dim)[None, :]
        at = row[:, None] * STRIDE + column[None, :]
        at_state = row[:, None] * dim + column[None, :]

        g = load_gradient(
            grad, segments, sources, coefficients, partials, place, there, column, dim,
            ACC, ROWS, COLUMNS,
        )  # fmt: skip
        value = load_values(param, master, at, at_state, mask, ACC)
        g = adjust_gradient(g, value, inv_scale, weight_decay, MAXIMIZE, DECAY, ACC)
        if RULE == ADAM:
            if row_count is None:
                factor, divisor = step_size, root_scale
            else:
                update = tl.load(row_count + row, mask=there, other=0).to(tl.int64) + 1
                factor, divisor = adam_scalars(
                    rate, beta1, beta2, update, tl.max(update, 0), CORRECTED_DENOMINATOR, ACC
                )
                factor, divisor = factor[:, None], divisor[:, None]
            m = load_moment(state1, at_state, mask, ACC)
            v = load_moment(state2, at_state, mask, ACC)
            largest = v
            if state3 is not None:
                largest = load_moment(state3, at_state, mask, ACC)
            m, v, largest = adam_moments(
                g, m, v, largest, keep1, keep2, rate1, rate2, state3 is not None
            )
            store_moment(state1, at_state, m, mask, seed, number, column, FIRST, STOCHASTIC)
            store_moment(state2, at_state, v, mask, seed, number, column, SECOND, STOCHASTIC)
            if state3 is not None:
                store_moment(
                    state3, at_state, largest, mask, seed, number, column, SECOND, STOCHASTIC
                )
            change = adam_change(m, largest, eps, factor, divisor, CORRECTED_DENOMINATOR)
            if DECOUPLED:
                if row_step is None:
                    value *= keep.to(ACC)
                else:
                    slept = number - tl.load(row_step + row, mask=there, other=0).to(tl.int64)
                    value *= integer_power(keep, slept, tl.max(slept, 0)).to(ACC)[:, None]
        elif RULE == ADAGRAD:
            total = tl.load(state1 + at_state, mask=mask, other=0) + g * g
            tl.store(state1 + at_state, total, mask=mask)
            change = divide(g, square_root(total) + eps) * clr
        else:
            if state1 is not None:
                buffer = tl.load(state1 + at_state, mask=mask, other=0) * momentum + g * fresh
                buffer = tl.where(number == 1, g, buffer)
                tl.store(state1 + at_state, buffer, mask=mask)
                if NESTEROV:
                    g += buffer * momentum
                else:
                    g = buffer
            change = g * sgd_lr
        value -= change
        store_values(
            param, master, value, at, at_state, mask, seed, number, row, column, STOCHASTIC
        )
        tile_index += tl.num_programs(0)


@triton.jit(do_not_specialize=STEP_VARIABLES)
def update_counters_kernel(
    row_step,
    row_count,
    rows,
    used_rows,
    step,
    found_inf,
    grad_rows,
    num_embeddings,
    ROWS: tl.constexpr,
):
    """Of each updated row: the number of this step, and one update more."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    count = rows_to_update(grad_rows, used_rows, found_inf)
    row, there = rows_at(rows, place, count, num_embeddings)
    if row_step is not None:
        tl.store(row_step + row, tl.load(step).to(tl.int32), mask=there)
    if row_count is not None:
        updates = tl.load(row_count + row, mask=there, other=0)
        tl.store(row_count + row, updates + 1, mask=there)


# ---------------------------------------------------------------------------------------------
# host
# ---------------------------------------------------------------------------------------------


def _step(
    arguments: Mapping[str, Any],
    rule: tl.constexpr,
    states: tuple[Tensor | None, Tensor | None, Tensor | None],
    hypers: tuple[float, float, float],
    *,
    row_step: Tensor | None = None,
    row_count: Tensor | None = None,
    decoupled: bool = False,
    corrected_denominator: bool = False,
    nesterov: bool = False,
) -> None:
    """One step of an elementwise rule."""
    param, grad_rows = arguments["param"], gradient_rows(arguments)
    if grad_rows == 0:
        return
    num_embeddings, dim = param.shape
    constants, tiles = elementwise_constants(arguments, grad_rows)
    has_decay = arguments["weight_decay"] != 0
    with on(param.device):
        if tiles > 0:
            elementwise_step_kernel[(programs(param.device, tiles),)](
                param,
                arguments["master"],
                *states,
                row_step,
                row_count,
                partials_of(arguments),
                *(arguments[name] for name in (*STEP_TENSORS, *STEP_NUMBERS)),
                *hypers,
                grad_rows,
                num_embeddings,
                dim,
                RULE=rule.value,
                MAXIMIZE=arguments["maximize"],
                DECAY=has_decay and not decoupled,
                DECOUPLED=has_decay and decoupled,
                CORRECTED_DENOMINATOR=corrected_denominator,
                NESTEROV=nesterov,
                **constants,
            )
        if row_step is not None or row_count is not None:
            update_counters_kernel[(triton.cdiv(grad_rows, 256),)](
                row_step,
                row_count,
                *(arguments[name] for name in ("rows", "used_rows", "step", "found_inf")),
                grad_rows,
                num_embeddings,
                ROWS=256,
                num_warps=4,
            )


def row_adam_(
    param: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    row_step: Tensor | None,
    row_count: Tensor | None,
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
    beta1: float,
    beta2: float,
    eps: float,
    decoupled: bool,
    corrected_denominator: bool,
) -> None:
    arguments = locals()
    check("row_adam_", arguments)
    _step(
        arguments,
        ADAM,
        (exp_avg, exp_avg_sq, max_exp_avg_sq),
        (beta1, beta2, eps),
        row_step=row_step,
        row_count=row_count,
        decoupled=decoupled,
        corrected_denominator=corrected_denominator,
    )


def row_adagrad_(
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
    check("row_adagrad_", arguments)
    _step(arguments, ADAGRAD, (sum, None, None), (lr_decay, eps, 0.0))


def row_sgd_(
    param: Tensor,
    master: Tensor | None,
    momentum_buffer: Tensor | None,
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
    momentum: float,
    dampening: float,
    nesterov: bool,
) -> None:
    arguments = locals()
    check("row_sgd_", arguments)
    hypers = (momentum, dampening, 0.0)
    _step(arguments, SGD, (momentum_buffer, None, None), hypers, nesterov=nesterov)
