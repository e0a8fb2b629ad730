"""The row optimizers in plain torch: the fallback for any device.

Same arguments as the schemas in `_row_ops`, same order of operations as
``csrc/common/row_update.h``, hence the same bits as the native kernels. Written to be read, not to
be fast.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastemb._reference import accumulation_dtype, sum_terms
from fastemb._row_checks import check

_M64 = (1 << 64) - 1
_DOT_LANES = 256  # kDotLanes of csrc/ops.h
# `AdamRounding` of csrc/common/stochastic.h, for exp_avg, exp_avg_sq and max_exp_avg_sq.
STREAMS = (-1, -2, -2)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _M64
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def random_bits(
    seed: int, step: Tensor, rows: Tensor, dim: int, values: Tensor | int = 0
) -> Tensor:
    """[rows, dim] int64 below 2**32: the bits of ``csrc/common/stochastic.h``."""
    key = _mix(torch.full_like(rows, _signed(seed))) + step.to(torch.int64)
    key = _mix(_mix(key) + rows)
    columns = torch.arange(dim, device=rows.device) * _signed(0x9E3779B97F4A7C15)
    return _shifted(_mix(key.unsqueeze(1) + columns + (values << 32)), 32)


def round_stochastic(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Float32 ``x`` to one of its neighbours in ``dtype``, by 32 random bits per element."""
    u = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    magnitude, negative = u & 0x7FFFFFFF, (u >> 31).to(torch.bool)
    if dtype == torch.bfloat16:
        bits = (magnitude + (random >> 16)) >> 16
        limit = 0x7F7F0000
    else:
        normal = (magnitude - 0x38000000 + (random >> 19)) >> 13
        units = x.abs() * 2.0**24
        whole = units.floor()
        up = (random >> 8).to(torch.float32) < (units - whole) * 2.0**24
        subnormal = whole.nan_to_num(0, 0).clamp(max=1024).to(torch.int64) + up
        bits = torch.where(magnitude >= 0x38800000, normal, subnormal)
        limit = 0x477FE000
    bits = (bits & 0x7FFF) | (negative.to(torch.int64) << 15)
    rounded = (bits - ((bits >> 15) << 16)).to(torch.int16).view(dtype)
    return torch.where(magnitude >= limit, x.to(dtype), rounded)


def larger(x: Tensor, y: Tensor) -> Tensor:
    """A NaN on either side wins; of two zeros y."""
    return torch.where((x > y) | x.isnan(), x, y)


def square_root(x: Tensor) -> Tensor:
    """Rounded once, which torch's own on the CPU is not for one element in a hundred."""
    if x.device.type != "cpu":
        return x.sqrt()
    if x.dtype != torch.float64:
        return x.to(torch.float64).sqrt().to(x.dtype)
    roots = [math.sqrt(value) if value >= 0 else math.nan for value in x.flatten().tolist()]
    return torch.tensor(roots, dtype=x.dtype, device=x.device).view(x.shape)


def integer_power(base: Tensor, exponent: Tensor) -> Tensor:
    """``base ** exponent`` in float64 (1 below 0), multiplied in the order of ``row_update.h``."""
    power, square = torch.ones_like(exponent, dtype=torch.float64), base
    while bool((exponent > 0).any()):
        power = torch.where((exponent > 0) & ((exponent & 1) == 1), power * square, power)
        square = square * square
        exponent = exponent >> 1
    return power


def _sum_of_squares(x: Tensor) -> Tensor:
    """Of each row, in the order of ``dot`` in ``csrc/ops.h``."""
    lanes = x.new_zeros((x.shape[0], _DOT_LANES))
    for part in x.split(_DOT_LANES, dim=1):
        lanes[:, : part.shape[1]] += part * part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


class _Rows:
    """What every row step begins and ends with (`RowStep` in ``csrc/ops.h``)."""

    def __init__(
        self,
        param: Tensor,
        master: Tensor | None,
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
    ) -> None:
        self.skip = found_inf is not None and bool(found_inf != 0)
        if self.skip:
            return
        self.acc = accumulation_dtype(param.dtype)
        place = torch.arange(grad.shape[0] if rows is None else rows.shape[0], device=param.device)
        index = place if rows is None else rows
        inside = (index >= 0) & (index < param.shape[0])
        if used_rows is not None:
            inside &= place < used_rows
        self.index = index[inside]
        self.step = step.reshape(()).to(torch.int64)
        # A tensor: torch makes number / tensor a product with the reciprocal, which rounds twice.
        self.lr = torch.tensor(lr, dtype=torch.float64, device=param.device)
        if lr_tensor is not None:
            self.lr = lr_tensor.reshape(()).to(torch.float64)
        self.weight_decay = weight_decay
        self.seed = seed
        self.table, self.master = param.detach(), master

        own = self.table[self.index]
        self.param = own.to(self.acc)
        if master is not None:
            kept = master.view(param.shape)[self.index]
            # Bits, not values: -0.0 is not 0.0, and a NaN is itself.
            untouched = kept.to(param.dtype).view(torch.int16) == own.view(torch.int16)
            self.param = torch.where(untouched, kept, self.param)
        self.grad = grad.detach().to(self.acc)
        if segments is not None:
            count = index.shape[0]
            if used_rows is not None:
                count = max(0, min(int(used_rows), count))
            assert sources is not None
            self.grad = sum_terms(self.grad, segments[: count + 1], sources, coefficients)
            inside = inside[:count]
        self.grad = self.grad[inside]
        if inv_scale is not None:
            self.grad = self.grad * inv_scale.to(self.acc)
        if maximize:
            self.grad = -self.grad

    def scalar(self, value: float) -> Tensor:
        """A hyperparameter, rounded to acc once."""
        return torch.tensor(value, dtype=self.acc, device=self.table.device)

    def add_weight_decay(self) -> None:
        if self.weight_decay != 0:
            self.grad = self.grad + self.param * self.scalar(self.weight_decay)

    def decayed_rate(self, lr_decay: float) -> Tensor:
        """Adagrad's learning rate in this step."""
        before = (self.step - 1).to(torch.float64)
        return (self.lr / (1.0 + before * lr_decay)).to(self.acc)

    def store(self, value: Tensor) -> None:
        if self.master is not None:
            self.master.view(self.table.shape)[self.index] = value
        half = self.table.dtype in (torch.float16, torch.bfloat16)
        if self.seed >= 0 and half and self.master is None:
            random = random_bits(self.seed, self.step, self.index, self.table.shape[1])
            self.table[self.index] = round_stochastic(value, self.table.dtype, random)
        else:
            self.table[self.index] = value.to(self.table.dtype)

    def store_moment(self, moment: Tensor, value: Tensor, stream: int) -> None:
        """``moment`` like the table; ``stream``: of its random bits."""
        if self.seed < 0 or moment.dtype != torch.bfloat16:
            moment[self.index] = value.to(moment.dtype)
            return
        row, pattern = self.index.new_full((1,), stream), value.view(torch.int32).to(torch.int64)
        random = random_bits(self.seed, self.step, row, value.shape[1], pattern)
        moment[self.index] = round_stochastic(value, moment.dtype, random)


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
    check("row_adam_", locals())
    r = _Rows(
        param, master, rows, used_rows, grad, segments, sources, coefficients, step, inv_scale,
        found_inf, lr, lr_tensor, weight_decay, maximize, seed,
    )  # fmt: skip
    if r.skip:
        return
    # The update's number and the steps since the row's last one: [], or [rows, 1].
    t, slept = r.step, torch.ones_like(r.step)
    if row_count is not None:
        counts = row_count.view(-1)
        counts[r.index] += 1
        t = counts[r.index].unsqueeze(1)
    if row_step is not None:
        last = row_step.view(-1)
        slept = (r.step - last[r.index]).unsqueeze(1)
        last[r.index] = r.step.to(torch.int32)
    correction1, correction2 = (
        1.0 - integer_power(torch.full_like(r.lr, beta), t) for beta in (beta1, beta2)
    )
    root2 = square_root(correction2)
    step_size = r.lr / correction1 if corrected_denominator else r.lr * root2 / correction1

    if not decoupled:
        r.add_weight_decay()
    moments = [exp_avg.view(param.shape), exp_avg_sq.view(param.shape)]
    m, v = (moment[r.index].to(r.acc) for moment in moments)
    m = m * r.scalar(beta1) + r.grad * r.scalar(1.0 - beta1)
    v = v * r.scalar(beta2) + r.grad * r.scalar(1.0 - beta2) * r.grad
    new = [m, v]
    if max_exp_avg_sq is not None:
        moments.append(max_exp_avg_sq.view(param.shape))
        new.append(larger(moments[-1][r.index].to(r.acc), v))
    root = square_root(new[-1])
    for moment, value, stream in zip(moments, new, STREAMS, strict=False):
        r.store_moment(moment, value, stream)
    if corrected_denominator:
        root = root / root2.to(r.acc)
    update = m / (root + r.scalar(eps)) * step_size.to(r.acc)
    kept = r.param
    if decoupled and weight_decay != 0:
        kept = kept * integer_power(1.0 - r.lr * weight_decay, slept).to(r.acc)
    r.store(kept - update)


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
    check("row_adagrad_", locals())
    r = _Rows(
        param, master, rows, used_rows, grad, segments, sources, coefficients, step, inv_scale,
        found_inf, lr, lr_tensor, weight_decay, maximize, seed,
    )  # fmt: skip
    if r.skip:
        return
    r.add_weight_decay()
    sums = sum.view(param.shape)
    total = sums[r.index] + r.grad * r.grad
    sums[r.index] = total
    r.store(r.param - r.grad / (square_root(total) + r.scalar(eps)) * r.decayed_rate(lr_decay))


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
    check("row_rowwise_adagrad_", locals())
    r = _Rows(
        param, master, rows, used_rows, grad, segments, sources, coefficients, step, inv_scale,
        found_inf, lr, lr_tensor, weight_decay, maximize, seed,
    )  # fmt: skip
    if r.skip:
        return
    r.add_weight_decay()
    if param.shape[1] == 0:
        return
    sums = sum.view(-1)
    total = sums[r.index] + _sum_of_squares(r.grad) / r.scalar(param.shape[1])
    sums[r.index] = total
    rate = r.decayed_rate(lr_decay) / (square_root(total) + r.scalar(eps))
    r.store(r.param - rate.unsqueeze(1) * r.grad)


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
    check("row_sgd_", locals())
    r = _Rows(
        param, master, rows, used_rows, grad, segments, sources, coefficients, step, inv_scale,
        found_inf, lr, lr_tensor, weight_decay, maximize, seed,
    )  # fmt: skip
    if r.skip:
        return
    r.add_weight_decay()
    update = r.grad
    if momentum_buffer is not None:
        buffers = momentum_buffer.view(param.shape)
        buffer = r.grad
        if r.step != 1:
            kept = buffers[r.index] * r.scalar(momentum)
            buffer = kept + r.grad * r.scalar(1.0 - dampening)
        buffers[r.index] = buffer
        update = r.grad + buffer * r.scalar(momentum) if nesterov else buffer
    r.store(r.param - update * r.lr.to(r.acc))
