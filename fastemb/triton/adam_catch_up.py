"""Lazy Adam with the result of dense Adam: rows that slept are caught up, in place.

The arithmetic is that of ``csrc/common/adam_catch_up.h``, operation by operation: the series where
the root of the second moment is large enough, beside eps, and the steps one by one where it is not
or where an L2 penalty makes a gradient of its own. Tiles, ROWS, COLUMNS, DIM and width are those of
`row_steps`; given_rows is the number of rows that are named.

A tile walks no further than the longest sleep of those of its elements that are replayed. The steps
that its rows are current at are set by a kernel of their own, after all tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastemb._row_checks import check
from fastemb.triton.bags import divide, on, square_root
from fastemb.triton.row_steps import adam_change, adam_moments
from fastemb.triton.rows import (
    FIRST,
    SECOND,
    STEP_VARIABLES,
    elementwise_constants,
    in_double,
    integer_power,
    load_moment,
    load_values,
    programs,
    rows_at,
    store_moment,
    store_values,
)
from fastemb.triton.segments import rows_to_update

# `AdamHistory` of csrc/ops.h: numbers of a step, and their places after the series.
_NUMBERS = tl.constexpr(8)
_KEEP = tl.constexpr(4)
_RATE = tl.constexpr(5)
_ROOT = tl.constexpr(6)
_DECAY = tl.constexpr(7)

_VARIABLES = [*STEP_VARIABLES, "given_rows", "capacity", "horizon"]


# ---------------------------------------------------------------------------------------------
# device
# ---------------------------------------------------------------------------------------------


@triton.jit
def recorded(history, slot, number, ACC: tl.constexpr):
    """One number of each row's slot, [ROWS, 1]. Every slot lies in the ring: nothing is masked."""
    return tl.load(history + slot * _NUMBERS + number).to(ACC)[:, None]


@triton.jit
def series(history, slot, m, root, eps, ACC: tl.constexpr):
    """How far the parameter has moved since the step of the slot."""
    e = divide(eps, root)
    total = recorded(history, slot, 2, ACC) - e * recorded(history, slot, 3, ACC)
    total = recorded(history, slot, 1, ACC) - e * total
    total = recorded(history, slot, 0, ACC) - e * total
    return divide(m, root) * total


@triton.jit
def replayed(
    history,
    capacity,
    slot,
    sleep,
    needed,
    m,
    v,
    fixed_root,
    beta1,
    beta2,
    eps,
    AMSGRAD: tl.constexpr,
    ACC: tl.constexpr,
):
    """The same step by step, where needed; sleep, of each row, is at most the horizon."""
    keep = recorded(history, (slot + sleep) % capacity, _KEEP, ACC)
    total = m * 0.0
    longest = tl.max(tl.max(tl.where(needed, sleep[:, None], 0), 1), 0)
    done = longest * 0
    while done < longest:
        done += 1
        slot = tl.where(slot + 1 == capacity, 0, slot + 1)
        m *= beta1
        v *= beta2
        if AMSGRAD:
            root = fixed_root
        else:
            root = square_root(v)
        root = divide(root, recorded(history, slot, _ROOT, ACC))
        change = divide(m, root + eps) * recorded(history, slot, _RATE, ACC)
        after = total * recorded(history, slot, _DECAY, ACC) + change
        total = tl.where((done <= sleep)[:, None], after, total)
    return total * keep


@triton.jit
def penalised(
    history,
    capacity,
    slot,
    sleep,
    value,
    m,
    v,
    largest,
    beta1,
    beta2,
    rate1,
    rate2,
    eps,
    weight_decay,
    AMSGRAD: tl.constexpr,
    ACC: tl.constexpr,
):
    """Dense Adam with weight_decay times the parameter as gradient."""
    longest = tl.max(sleep, 0)
    done = longest * 0
    while done < longest:
        done += 1
        slot = tl.where(slot + 1 == capacity, 0, slot + 1)
        next_m, next_v, next_largest = adam_moments(
            value * weight_decay, m, v, largest, beta1, beta2, rate1, rate2, AMSGRAD
        )
        factor = recorded(history, slot, _RATE, ACC)
        divisor = recorded(history, slot, _ROOT, ACC)
        change = adam_change(next_m, next_largest, eps, factor, divisor, True)
        slept = (done <= sleep)[:, None]
        value = tl.where(slept, value - change, value)
        m = tl.where(slept, next_m, m)
        v = tl.where(slept, next_v, v)
        largest = tl.where(slept, next_largest, largest)
    return value, m, v, largest


@triton.jit(do_not_specialize=_VARIABLES)
def adam_catch_up_kernel(
    param,
    master,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    row_step,
    rows,
    used_rows,
    step,
    history,
    found_inf,
    weight_decay: tl.float64,
    seed,
    beta1: tl.float64,
    beta2: tl.float64,
    eps: tl.float64,
    smallest_root: tl.float64,
    horizon,
    capacity,
    given_rows,
    num_embeddings,
    width,
    PENALTY: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DIM: tl.constexpr,
    STRIDE: tl.constexpr,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    AMSGRAD: tl.constexpr = max_exp_avg_sq is not None
    if DIM is None:
        dim = tl.full((), width, tl.int64)
    else:
        dim = DIM
    count = rows_to_update(given_rows, used_rows, found_inf)
    number = tl.load(step).to(tl.int64)
    small = in_double(eps).to(ACC)

    blocks = tl.cdiv(dim, COLUMNS)
    tiles = tl.cdiv(count, ROWS) * blocks
    tile_index = tl.program_id(0).to(tl.int64)
    while tile_index < tiles:
        place = tile_index // blocks * ROWS + tl.arange(0, ROWS)
        column = tile_index % blocks * COLUMNS + tl.arange(0, COLUMNS)
        row, there = rows_at(rows, place, count, num_embeddings)
        last = tl.load(row_step + row, mask=there, other=0).to(tl.int64)
        sleep = tl.where(there, tl.maximum(number - last, 0), 0)
        slot = tl.maximum(last, 0) % capacity
        mask = (sleep > 0)[:, None] & (column < dim)[None, :]
        at = row[:, None] * STRIDE + column[None, :]
        at_state = row[:, None] * dim + column[None, :]

        m = load_moment(exp_avg, at_state, mask, ACC)
        v = load_moment(exp_avg_sq, at_state, mask, ACC)
        largest = v
        if AMSGRAD:
            largest = load_moment(max_exp_avg_sq, at_state, mask, ACC)
        if PENALTY:
            value = load_values(param, master, at, at_state, mask, ACC)
            rate1 = (1.0 - in_double(beta1)).to(ACC)
            rate2 = (1.0 - in_double(beta2)).to(ACC)
            decay = in_double(weight_decay).to(ACC)
            value, m, v, largest = penalised(
                history,
                capacity,
                slot,
                sleep,
                value,
                m,
                v,
                largest,
                in_double(beta1).to(ACC),
                in_double(beta2).to(ACC),
                rate1,
                rate2,
                small,
                decay,
                AMSGRAD,
                ACC,
            )
            store_moment(exp_avg, at_state, m, mask, seed, number, column, FIRST, STOCHASTIC)
            store_moment(exp_avg_sq, at_state, v, mask, seed, number, column, SECOND, STOCHASTIC)
            if AMSGRAD:
                store_moment(
                    max_exp_avg_sq, at_state, largest, mask, seed, number, column, SECOND,
                    STOCHASTIC,
                )  # fmt: skip
        else:
            longest = tl.max(sleep, 0)
            fade1 = integer_power(in_double(beta1), sleep, longest).to(ACC)[:, None]
            fade2 = integer_power(in_double(beta2), sleep, longest).to(ACC)[:, None]
            next_m, next_v = m * fade1, v * fade2
            # Before the replay, which needs the registers; the parameter is read after it.
            store_moment(exp_avg, at_state, next_m, mask, seed, number, column, FIRST, STOCHASTIC)
            store_moment(
                exp_avg_sq, at_state, next_v, mask, seed, number, column, SECOND, STOCHASTIC
            )
            root = square_root(largest)
            large = root >= in_double(smallest_root).to(ACC)  # not where it is NaN
            needed = mask & tl.where(large, False, m != 0.0)
            moved = tl.where(large, series(history, slot, m, root, small, ACC), 0.0)
            steps = replayed(
                history,
                capacity,
                slot,
                tl.minimum(sleep, tl.maximum(horizon, 0)),
                needed,
                m,
                v,
                root,
                in_double(beta1).to(ACC),
                in_double(beta2).to(ACC),
                small,
                AMSGRAD,
                ACC,
            )
            moved = tl.where(needed, steps, moved)
            value = load_values(param, master, at, at_state, mask, ACC)
            value = value * recorded(history, slot, _KEEP, ACC) - moved
        store_values(
            param, master, value, at, at_state, mask, seed, number, row, column, STOCHASTIC
        )
        tile_index += tl.num_programs(0)


@triton.jit(do_not_specialize=_VARIABLES)
def mark_current_kernel(
    row_step, rows, used_rows, step, found_inf, given_rows, num_embeddings, ROWS: tl.constexpr
):
    """Rows that were behind are current at this step."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    count = rows_to_update(given_rows, used_rows, found_inf)
    row, there = rows_at(rows, place, count, num_embeddings)
    number = tl.load(step).to(tl.int32)
    last = tl.load(row_step + row, mask=there, other=0)
    tl.store(row_step + row, tl.maximum(last, number), mask=there)


# ---------------------------------------------------------------------------------------------
# host
# ---------------------------------------------------------------------------------------------


def row_adam_catch_up_(
    param: Tensor,
    master: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    row_step: Tensor,
    rows: Tensor | None,
    used_rows: Tensor | None,
    step: Tensor,
    history: Tensor,
    found_inf: Tensor | None,
    weight_decay: float,
    seed: int,
    beta1: float,
    beta2: float,
    eps: float,
    smallest_root: float,
    horizon: int,
    decoupled: bool,
) -> None:
    arguments = locals()
    check("row_adam_catch_up_", arguments)
    num_embeddings, dim = param.shape
    given_rows = num_embeddings if rows is None else rows.numel()
    if given_rows == 0:
        return
    constants, tiles = elementwise_constants(arguments, given_rows)
    with on(param.device):
        if tiles > 0:
            adam_catch_up_kernel[(programs(param.device, tiles),)](
                param,
                master,
                exp_avg,
                exp_avg_sq,
                max_exp_avg_sq,
                row_step,
                rows,
                used_rows,
                step,
                history,
                found_inf,
                weight_decay,
                seed,
                beta1,
                beta2,
                eps,
                smallest_root,
                horizon,
                history.shape[0],
                given_rows,
                num_embeddings,
                dim,
                PENALTY=weight_decay != 0 and not decoupled,
                **constants,
            )
        mark_current_kernel[(triton.cdiv(given_rows, 256),)](
            row_step,
            rows,
            used_rows,
            step,
            found_inf,
            given_rows,
            num_embeddings,
            ROWS=256,
            num_warps=4,
        )
