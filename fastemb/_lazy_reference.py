"""``row_adam_catch_up_`` in plain torch: the steps that a row slept, one by one.

The definition that the series of ``csrc/common/adam_catch_up.h`` is tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastemb._reference import accumulation_dtype
from fastemb._row_checks import check
from fastemb._row_reference import STREAMS, _Rows, larger, square_root

# Columns of the history that concern one step (`AdamHistory` in csrc/ops.h).
RATE, ROOT, DECAY = 5, 6, 7


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
    check("row_adam_catch_up_", locals())
    index = torch.arange(param.shape[0], device=param.device) if rows is None else rows
    nothing = param.new_zeros(1, dtype=accumulation_dtype(param.dtype)).expand(
        len(index), param.shape[1]
    )
    r = _Rows(
        param, master, index, used_rows, nothing, None, None, None, step, None, found_inf,
        0.0, None, weight_decay, False, seed,
    )  # fmt: skip
    if r.skip:
        return
    last = row_step[r.index].to(torch.int64)
    sleeping = last < r.step
    r.index, last, value = r.index[sleeping], last[sleeping], r.param[sleeping]
    if r.index.numel() == 0:
        return
    m = exp_avg[r.index].to(r.acc)
    v = exp_avg_sq[r.index].to(r.acc)
    largest = None if max_exp_avg_sq is None else max_exp_avg_sq[r.index].to(r.acc)
    for s in range(int(last.min()) + 1, int(r.step) + 1):
        at = history[s % history.shape[0]]
        grad = torch.zeros_like(value)
        if not decoupled:
            grad = value * r.scalar(weight_decay)
        next_m = m * r.scalar(beta1) + grad * r.scalar(1.0 - beta1)
        next_v = v * r.scalar(beta2) + grad * r.scalar(1.0 - beta2) * grad
        root = square_root(next_v if largest is None else larger(largest, next_v))
        update = next_m / (root / at[ROOT].to(r.acc) + r.scalar(eps)) * at[RATE].to(r.acc)
        slept = (last < s).unsqueeze(1)
        value = torch.where(slept, value * at[DECAY].to(r.acc) - update, value)
        if largest is not None:
            largest = torch.where(slept, larger(largest, next_v), largest)
        m, v = torch.where(slept, next_m, m), torch.where(slept, next_v, v)
    r.store_moment(exp_avg, m, STREAMS[0])
    r.store_moment(exp_avg_sq, v, STREAMS[1])
    if max_exp_avg_sq is not None and largest is not None:
        r.store_moment(max_exp_avg_sq, largest, STREAMS[2])
    row_step[r.index] = r.step.to(torch.int32)
    r.store(value)
