"""What a step of a row optimizer must give, in float64 intervals.

Nothing here calls an operator or `fastemb`. Each quantity is an interval that begins as the exact
value; every operation of the formulas in ``csrc/ops.h`` is done on both ends and widened by one
rounding in the accumulation type. What a kernel computes lies inside, whatever cancels on the way.
The ends are rounded to the type of the result, so a result that was rounded twice is outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from row_cases import LOW_PRECISION, RowCase
from torch import Tensor

Array = NDArray[np.float64]
# For float64 this model rounds as well.
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-51}
SMALLEST = {torch.float32: 2.0**-149, torch.float64: 2.0**-1074}
# Scalars are computed in double; 1 - beta^t loses digits there where it is small.
SCALAR_UNIT = 2.0**-38


@dataclass(frozen=True)
class Interval:
    low: Array
    high: Array
    acc: torch.dtype

    def _rounded(self, low: Array, high: Array, roundings: float = 1.0) -> Interval:
        size = np.maximum(np.abs(low), np.abs(high))
        slack = roundings * (1.001 * UNIT[self.acc] * size + SMALLEST[self.acc])
        return Interval(low - slack, high + slack, self.acc)

    def __add__(self, other: Interval) -> Interval:
        return self._rounded(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low, self.acc)

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        corners = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return self._rounded(np.minimum.reduce(corners), np.maximum.reduce(corners))

    def __truediv__(self, other: Interval) -> Interval:
        assert bool((other.low > 0).all())
        corners = [a / b for a in (self.low, self.high) for b in (other.low, other.high)]
        return self._rounded(np.minimum.reduce(corners), np.maximum.reduce(corners))

    def squared(self) -> Interval:
        squares = self.low * self.low, self.high * self.high
        least = np.where((self.low < 0) & (self.high > 0), 0.0, np.minimum(*squares))
        return self._rounded(least, np.maximum(*squares))

    def root(self) -> Interval:
        return self._rounded(np.sqrt(np.maximum(self.low, 0)), np.sqrt(np.maximum(self.high, 0)))

    def maximum(self, other: Interval) -> Interval:
        return Interval(
            np.maximum(self.low, other.low), np.maximum(self.high, other.high), self.acc
        )

    def row_sums(self) -> Interval:
        """Of each row, as [rows, 1]; in 256 partial sums that are folded in halves."""
        low, high = (x.sum(axis=1, keepdims=True) for x in (self.low, self.high))
        return self._rounded(low, high, roundings=self.low.shape[1] / 256 + 9)

    def check(self, got: Tensor, what: str, stochastic: bool = False) -> None:
        """Assert that ``got`` is a value of this interval, rounded to got's type once."""
        low, high = (
            _outward(end, sign, got.dtype) for end, sign in ((self.low, -1), (self.high, 1))
        )
        if stochastic:
            # The neighbours of the value: the next one on either side is behind it.
            inside = (_next(got, 1) > low) & (_next(got, -1) < high)
        else:
            low, high = low.to(got.dtype).double(), high.to(got.dtype).double()
            inside = (low <= got.double()) & (got.double() <= high)
        if not bool(inside.all()):
            at = tuple((~inside).nonzero()[0].tolist())
            raise AssertionError(
                f"{int((~inside).sum())} of {inside.numel()} of {what} are wrong; at {at}: got "
                f"{float(got[at])!r}, expected within [{float(low[at])!r}, {float(high[at])!r}]"
            )


def _outward(end: Array, sign: int, dtype: torch.dtype) -> Tensor:
    """An end of an interval, in float32 where the way to ``dtype`` leads through it."""
    if dtype not in LOW_PRECISION:
        return torch.from_numpy(end)
    single = end.astype(np.float32)
    inward = single < end if sign > 0 else single > end
    moved = np.nextafter(single, np.float32(sign * np.inf))
    return torch.from_numpy(np.where(inward, moved, single).astype(np.float64))


def _next(x: Tensor, sign: int) -> Tensor:
    """The neighbour of a number of 16 bits, as float64."""
    if x.dtype not in LOW_PRECISION:
        return x.double()
    bits = x.view(torch.int16).int()
    order = torch.where(bits < 0, -(bits & 0x7FFF), bits) + sign
    # Both zeros are one number.
    neighbour = torch.where(order < 0, (-order) | 0x8000, order)
    return neighbour.to(torch.int16).view(x.dtype).double()


def value_before(case: RowCase) -> Tensor:
    """[num_embeddings, dim]: the master where it is the parameter's, else the parameter's value."""
    own = case.param.to(case.acc)
    if case.master is None:
        return own
    fresh = case.master.to(case.memory.dtype).view(torch.int16) == case.param.contiguous().view(
        torch.int16
    )
    return torch.where(fresh, case.master, own)


def _double(tensor: Tensor) -> Array:
    return tensor.double().numpy()


class Model:
    """Expected values of the rows that a step touches.

    Attributes:
        rows: those rows, in the order of the gradient's.
        value: of the parameter in the accumulation type, [rows, dim].
        states: name -> expectation, [rows, dim] or [rows, 1].
        counters: name -> exact values of row_step and row_count.
        update: what is subtracted from the parameter.
    """

    def __init__(self, case: RowCase) -> None:
        self.case = case
        pairs = case.table_rows()
        self.rows = [row for _, row in pairs]
        self.states: dict[str, Interval] = {}
        self.counters: dict[str, list[int]] = {}
        self.step = int(case.step)
        self.lr = case.lr if case.lr_tensor is None else float(case.lr_tensor)
        self.param = self._exact(_double(value_before(case)[self.rows]))
        self.grad = self._gradient([k for k, _ in pairs])
        if case.inv_scale is not None:
            self.grad = self.grad * self._exact(_double(case.inv_scale))
        if case.maximize:
            self.grad = -self.grad
        if case.weight_decay and not case.options.get("decoupled", False):
            self.grad = self.grad + self.param * self._scalar(case.weight_decay)
        kept, self.update = getattr(self, case.op.strip("_"))()
        self.value = kept - self.update

    def _exact(self, value: Array) -> Interval:
        return Interval(value, value, self.case.acc)

    def _gradient(self, places: list[int]) -> Interval:
        """The rows of the gradient, or the sums of their terms in the accumulation type."""
        case = self.case
        if case.segments is None:
            return self._exact(_double(case.grad[places]))
        assert case.sources is not None
        grad, bounds, sources = _double(case.grad), case.segments.tolist(), case.sources.tolist()
        factors = None if case.coefficients is None else _double(case.coefficients)
        sums, slack = np.zeros((2, len(places), case.dim))
        for at, place in enumerate(places):
            span = slice(bounds[place], bounds[place + 1])
            terms = grad[sources[span]]
            if factors is not None:
                terms = terms * factors[span, None]
            sums[at] = terms.sum(axis=0)
            # The product and every addition are rounded.
            unit = 1.01 * (len(terms) + 2)
            slack[at] = unit * (UNIT[case.acc] * np.abs(terms).sum(axis=0) + SMALLEST[case.acc])
        return Interval(sums - slack, sums + slack, case.acc)

    def _scalar(self, value: float | Array) -> Interval:
        array = np.asarray(value, dtype=np.float64)
        slack = np.abs(array) * (UNIT[self.case.acc] + SCALAR_UNIT)
        return Interval(array - slack, array + slack, self.case.acc)

    def _state(self, name: str) -> Interval | None:
        state = self.case.states.get(name)
        if state is None:
            return None
        width = 1 if self.case.op == "row_rowwise_adagrad_" else self.case.dim
        return self._exact(_double(state[self.rows]).reshape(len(self.rows), width))

    def _per_row(self, name: str) -> Array | None:
        state = self.case.states.get(name)
        return None if state is None else _double(state[self.rows]).reshape(-1, 1)

    def row_adam(self) -> tuple[Interval, Interval]:
        case = self.case
        beta1, beta2 = case.option("beta1"), case.option("beta2")
        t = np.array([[float(self.step)]])
        count = self._per_row("row_count")
        if count is not None:
            t = count + 1
            self.counters["row_count"] = t.ravel().astype(int).tolist()
        slept = np.array([[1.0]])
        last = self._per_row("row_step")
        if last is not None:
            slept = self.step - last
            self.counters["row_step"] = [self.step] * len(self.rows)
        correction1, correction2 = 1 - beta1**t, 1 - beta2**t

        m, v = self._state("exp_avg"), self._state("exp_avg_sq")
        assert m is not None
        assert v is not None
        m = m * self._scalar(beta1) + self.grad * self._scalar(1 - beta1)
        v = v * self._scalar(beta2) + self.grad.squared() * self._scalar(1 - beta2)
        self.states.update(exp_avg=m, exp_avg_sq=v)
        largest = self._state("max_exp_avg_sq")
        if largest is not None:
            v = self.states["max_exp_avg_sq"] = largest.maximum(v)
        root, factor = v.root(), self.lr * np.sqrt(correction2) / correction1
        if case.option("corrected_denominator"):
            root, factor = root / self._scalar(np.sqrt(correction2)), self.lr / correction1
        update = m / (root + self._scalar(case.option("eps"))) * self._scalar(factor)
        kept = self.param
        if case.option("decoupled") and case.weight_decay:
            kept = kept * self._scalar((1 - self.lr * case.weight_decay) ** slept)
        return kept, update

    def _decayed_rate(self) -> Interval:
        return self._scalar(self.lr / (1 + (self.step - 1) * self.case.option("lr_decay")))

    def row_adagrad(self) -> tuple[Interval, Interval]:
        total = self._state("sum")
        assert total is not None
        total = self.states["sum"] = total + self.grad.squared()
        scaled = self.grad / (total.root() + self._scalar(self.case.option("eps")))
        return self.param, scaled * self._decayed_rate()

    def row_rowwise_adagrad(self) -> tuple[Interval, Interval]:
        total = self._state("sum")
        assert total is not None
        mean = self.grad.squared().row_sums() / self._exact(np.array(float(self.case.dim)))
        total = self.states["sum"] = total + mean
        rate = self._decayed_rate() / (total.root() + self._scalar(self.case.option("eps")))
        return self.param, rate * self.grad

    def row_sgd(self) -> tuple[Interval, Interval]:
        direction, buffer = self.grad, self._state("momentum_buffer")
        if buffer is not None:
            momentum = self._scalar(self.case.option("momentum"))
            if self.step == 1:
                buffer = self.grad
            else:
                keep = self._scalar(1 - self.case.option("dampening"))
                buffer = buffer * momentum + self.grad * keep
            self.states["momentum_buffer"] = buffer
            nesterov = self.case.option("nesterov")
            direction = self.grad + buffer * momentum if nesterov else buffer
        return self.param, direction * self._scalar(self.lr)

    def check(self, got: dict[str, Tensor]) -> None:
        """Everything that the operator wrote, and that it wrote nothing else."""
        case, dim, rows = self.case, self.case.dim, self.rows
        rounds = case.memory.dtype in LOW_PRECISION and case.master is None
        self.value.check(got["param"][rows, :dim], "param", case.seed >= 0 and rounds)
        if case.master is not None:
            self.value.check(got["master"][rows], "master")
            rounded = got["master"][rows].to(case.memory.dtype)
            assert torch.equal(rounded, got["param"][rows, :dim])
        for name, state in self.states.items():
            value = got[name][rows].reshape(state.low.shape)
            state.check(value, name, case.seed >= 0 and value.dtype == torch.bfloat16)
        for name, numbers in self.counters.items():
            assert got[name][rows].tolist() == numbers, name
        others = [row for row in range(case.memory.shape[0]) if row not in set(rows)]
        for name, tensor in case.before().items():
            assert_same_bytes(got[name][others], tensor[others])
        assert_same_bytes(got["param"][:, dim:], case.memory[:, dim:])


def assert_same_bytes(got: Tensor, want: Tensor) -> None:
    """Bit for bit, NaN included."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.numel():
        a, b = (x.contiguous().view(-1).view(torch.uint8) for x in (got, want))
        assert torch.equal(a, b)
