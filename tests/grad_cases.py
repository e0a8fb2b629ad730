"""Gradients that hypothesis draws for the operators of gradient scaling, and what is to be found.

`Tensors`, `Rows` and `Boundary` are calls of ``grad_check_``, ``row_grad_check_`` and
``boundary_gradient``. Each has ``run``, which gives everything that the call has written, and
``expected``, the same worked out in NumPy.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from lookups import assert_same_bits
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Around the bounds of the counters, and the ends of the types.
SPECIAL = (
    *(0.0, -0.0, math.inf, -math.inf, math.nan),
    *(sign * 2.0**-exponent for sign in (1, -1) for exponent in (13, 14, 15, 23, 24, 25, 26)),
    *(2.0**-25 * (1 + 2.0**-7), 2.0**-24 * (1 - 2.0**-9), 2.0**-14 * (1 - 2.0**-10)),
    *(65504.0, -65520.0, 3e38, -3.4e38, 1e-45, 1e-40, 6e-8, 1e300),
)
SCALES = (1.0, 2.0**-16, 3e-4, 4.0, 2.0**126, 2.0**-126, 1e-40, 0.0, math.inf, math.nan)
EVERYTHING = frozenset({"found_inf", "stats", "square_sums"})


def accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def number(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value, dtype=torch.float32)


def stats_before(gradients: int) -> Tensor:
    """Counters that something has been counted in already; the largest so far is 2**-30."""
    stats = torch.arange(8 * gradients).reshape(gradients, 8) * 1000
    stats[:, 7] = int(torch.tensor(2.0**-30).view(torch.int32))
    return stats


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int, specials: int) -> Tensor:
    """Of one magnitude, with so many special ones here and there."""
    generator = torch.Generator().manual_seed(seed)
    exponent = int(torch.randint(-36, 12, (), generator=generator))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 2.0**exponent
    flat = x.view(-1)
    for _ in range(specials if flat.numel() else 0):
        at, which = torch.randint(2**31, (2,), generator=generator).tolist()
        flat[at % flat.numel()] = SPECIAL[which % len(SPECIAL)]
    return x.to(dtype)


@dataclass(frozen=True)
class Found:
    """What a call has written."""

    grads: list[Tensor]
    found_inf: Tensor | None
    stats: Tensor | None
    square_sums: Tensor | None

    def check(self, want: Found, tolerance: float = 1e-12) -> None:
        for got, expected in zip(self.grads, want.grads, strict=True):
            assert_same_bits(got, expected)
        for name in ("found_inf", "stats"):
            got, expected = getattr(self, name), getattr(want, name)
            assert (got is None) == (expected is None), name
            if got is not None:
                assert torch.equal(got, expected), (name, got, expected)
        assert (self.square_sums is None) == (want.square_sums is None)
        if self.square_sums is not None and want.square_sums is not None:
            torch.testing.assert_close(
                self.square_sums, want.square_sums, rtol=tolerance, atol=0.0, equal_nan=True
            )


def _product(x: Tensor, factor: float | None) -> Tensor:
    """factor * x in the accumulator's type, one IEEE multiplication each."""
    wide = x.to(accumulation(x.dtype)).numpy()
    with np.errstate(all="ignore"):
        scale = wide.dtype.type(np.float32(1.0 if factor is None else factor))
        return torch.from_numpy(np.asarray(wide * scale))


def _square_sum(g: Tensor) -> float:
    with np.errstate(all="ignore"):
        squares = np.square(g.double().numpy().ravel())
    return math.fsum(squares) if np.isfinite(squares).all() else float(squares.sum())


def _count(stats: Tensor, x: Tensor, g: Tensor) -> None:
    """Adds to one row of counters what they say about x and g."""
    a, b = np.abs(x.double().numpy().ravel()), np.abs(g.double().numpy().ravel())
    there = a != 0  # NaN, too
    with np.errstate(all="ignore"):
        found = [
            np.full(a.shape, True),
            a == 0,
            there & (b < 2.0**-24),
            there & (a <= 2.0**-25),
            (a > 2.0**-25) & (a < 2.0**-14),
            np.isinf(b),
            np.isnan(b),
        ]
        largest = np.float32(b[np.isfinite(b)].max(initial=0.0))
    for column, mask in enumerate(found):
        stats[column] += int(mask.sum())
    stats[7] = max(int(stats[7]), int(largest.view(np.int32)))


@dataclass(frozen=True)
class Check:
    """What every call asks for."""

    inv_scale: float | None = None
    asked: frozenset[str] = EVERYTHING
    unscale: bool = False
    found_before: float = 0.0

    def places(self, gradients: int, device: Any) -> dict[str, Tensor | None]:
        """Where the findings go; sums are overwritten."""
        places = {
            "found_inf": torch.tensor([self.found_before]),
            "stats": stats_before(gradients),
            "square_sums": torch.full((gradients,), 7.0, dtype=torch.float64),
        }
        return {name: x.to(device) if name in self.asked else None for name, x in places.items()}

    def scale(self, device: Any) -> Tensor | None:
        scale = number(self.inv_scale)
        return None if scale is None else scale.to(device)

    def expected_of(self, grads: list[Tensor], looked_at: list[Tensor]) -> Found:
        """``looked_at`` is what the gradients are, where they are sums of terms."""
        places = self.places(len(grads), "cpu")
        found, stats, sums = places["found_inf"], places["stats"], places["square_sums"]
        after = []
        for index, (grad, x) in enumerate(zip(grads, looked_at, strict=True)):
            g = _product(x, self.inv_scale)
            if found is not None and not (bool(x.isfinite().all()) and bool(g.isfinite().all())):
                found.fill_(1.0)
            if stats is not None:
                _count(stats[index], x, g)
            if sums is not None:
                sums[index] = _square_sum(g)
            after.append(grad.clone())
            if self.unscale:
                after[-1].view(-1)[: g.numel()] = g.reshape(-1).to(grad.dtype)
        return Found(after, found, stats, sums)


@dataclass(frozen=True)
class Tensors:
    """A call of grad_check_."""

    grads: list[Tensor]
    check: Check = field(default_factory=Check)

    def run(self, ops: Any, device: Any = "cpu") -> Found:
        grads = [grad.to(device, copy=True) for grad in self.grads]
        places = self.check.places(len(grads), device)
        ops.grad_check_(grads, self.check.scale(device), *places.values(), self.check.unscale)
        return _on_cpu(grads, places)

    def expected(self) -> Found:
        return self.check.expected_of(self.grads, self.grads)


@dataclass(frozen=True)
class Rows:
    """A call of row_grad_check_."""

    grad: Tensor
    used_rows: int | None = None
    segments: Tensor | None = None
    sources: Tensor | None = None
    coefficients: Tensor | None = None
    check: Check = field(default_factory=Check)

    def run(self, ops: Any, device: Any = "cpu") -> Found:
        grad = self.grad.to(device, copy=True)
        used = None
        if self.used_rows is not None:
            used = torch.tensor([self.used_rows], dtype=torch.int32, device=device)
        terms = [
            None if x is None else x.to(device)
            for x in (self.segments, self.sources, self.coefficients)
        ]
        places = self.check.places(1, device)
        one = [None if x is None else x.squeeze(0) for x in places.values()]  # of one gradient
        arguments = (grad, used, *terms, self.check.scale(device), *one)
        ops.row_grad_check_(*arguments, self.check.unscale)
        return _on_cpu([grad], places)

    @property
    def count(self) -> int:
        """Rows that count."""
        rows = len(self.grad) if self.segments is None else len(self.segments) - 1
        return rows if self.used_rows is None else max(0, min(rows, self.used_rows))

    def rows(self) -> Tensor:
        """The rows that count, their terms added in the order of ``csrc/ops.h``."""
        if self.segments is None:
            return self.grad[: self.count]
        assert self.sources is not None
        segments, dim = self.segments[: self.count + 1].tolist(), self.grad.shape[1]
        wide = self.grad.to(accumulation(self.grad.dtype)).numpy()
        sums = np.zeros((self.count, dim), wide.dtype)
        with np.errstate(all="ignore"):
            terms = wide[self.sources[: segments[-1]].numpy()]
            if self.coefficients is not None:
                terms = terms * self.coefficients[: segments[-1], None].numpy()
            for row, (begin, end) in enumerate(itertools.pairwise(segments)):
                for chunk in range(begin, end, 256):
                    part = np.zeros(dim, wide.dtype)
                    for term in terms[chunk : min(chunk + 256, end)]:
                        part += term
                    sums[row] += part
        return torch.from_numpy(sums)

    def summed(self, rows: Tensor) -> Rows:
        """The same with the sums, rows that count, in place of terms."""
        return Rows(rows, check=self.check)

    def expected(self) -> Found:
        return self.check.expected_of([self.grad], [self.rows()])


@dataclass(frozen=True)
class Boundary:
    """A call of boundary_gradient; its output is the gradient found, the flags are found_inf."""

    grad: Tensor
    ratio: float
    inv_scale: float | None = None
    counted: bool = True
    flags: tuple[float, float] = (0.0, 0.0)

    def run(self, ops: Any, device: Any = "cpu") -> Found:
        grad = self.grad.to(device)
        flags = torch.tensor(self.flags, device=device)
        stats = stats_before(1)[0].to(device) if self.counted else None
        check = Check(self.inv_scale)
        ratio = number(self.ratio)
        assert ratio is not None
        output = ops.boundary_gradient(grad, ratio.to(device), check.scale(device), flags, stats)
        assert output.is_contiguous()
        assert output.shape == grad.shape
        return _on_cpu([output], {"found_inf": flags, "stats": stats, "square_sums": None})

    def expected(self) -> Found:
        grad = self.grad.contiguous()
        output = _product(grad, self.ratio).to(grad.dtype)
        flags = torch.tensor(self.flags)
        flags[0].masked_fill_(~grad.isfinite().all(), 1.0)
        flags[1].masked_fill_((grad.isfinite() & ~output.isfinite()).any(), 1.0)
        stats = stats_before(1)[0] if self.counted else None
        if stats is not None:
            _count(stats, grad, _product(grad, self.inv_scale))
        return Found([output], flags, stats, None)


def _on_cpu(grads: list[Tensor], places: dict[str, Tensor | None]) -> Found:
    return Found(
        [grad.cpu() for grad in grads],
        *(None if x is None else x.cpu() for x in places.values()),
    )


# ---- scales ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scales:
    """Calls of scale_update_, one for each row of ``found_inf``."""

    scales: Tensor
    states: Tensor
    configs: Tensor
    found_inf: Tensor  # [calls, groups]

    def run(self, ops: Any, device: Any = "cpu") -> list[tuple[Tensor, Tensor]]:
        """Scales and states after each call."""
        scales, states = (x.to(device, copy=True) for x in (self.scales, self.states))
        configs, after = self.configs.to(device), []
        for found in self.found_inf:
            ops.scale_update_(scales, states, found.to(device), configs)
            after.append((scales.to("cpu", copy=True), states.to("cpu", copy=True)))
        return after

    def expected(self) -> list[tuple[Tensor, Tensor]]:
        scales, states = self.scales.tolist(), self.states.tolist()
        after = []
        for found in self.found_inf.tolist():
            for group, config in enumerate(self.configs.tolist()):
                scales[group] = _updated(scales[group], states[group], found[group] != 0, *config)
            counters = torch.tensor(states, dtype=torch.int32).reshape(-1, 2)
            after.append((torch.tensor(scales), counters))
        return after


def _updated(
    scale: float,
    state: list[int],
    overflow: bool,
    growth_factor: float,
    backoff_factor: float,
    min_scale: float,
    max_scale: float,
    growth_interval: float,
    hysteresis: float,
) -> float:
    """The scale of a group after a step; its state is changed in place."""
    growth, skips = state
    if overflow:
        state[:] = [0, skips + 1]
        if skips + 1 < hysteresis:
            return scale
        with np.errstate(all="ignore"):
            return float(np.float32(max(scale * backoff_factor, min_scale)))
    state[:] = [growth + 1, 0]
    if growth + 1 < growth_interval:
        return scale
    state[0] = 0
    with np.errstate(all="ignore"):
        larger = float(np.float32(scale * growth_factor))
        most = float(np.float32(max_scale))
    return max(scale, min(larger, most)) if math.isfinite(larger) else scale


# ---- what hypothesis draws ---------------------------------------------------------------------

SEEDS = st.integers(0, 2**31)
SPECIALS = st.sampled_from([0, 0, 1, 3, 20])


@st.composite
def checks(draw: st.DrawFn, unscale: bool = True) -> Check:
    return Check(
        inv_scale=draw(st.one_of(st.none(), st.sampled_from(SCALES))),
        asked=draw(
            st.one_of(st.just(EVERYTHING), st.frozensets(st.sampled_from(sorted(EVERYTHING))))
        ),
        unscale=unscale and draw(st.booleans()),
        found_before=draw(st.sampled_from([0.0, 0.0, 1.0])),
    )


@st.composite
def lengths(draw: st.DrawFn, largest: int) -> int:
    """Around words, granules, tiles, warps' shares and chunks."""
    edges = [n + d for n in (8, 16, 32, 256, 2048, 8192, 16384) for d in (-1, 0, 1)]
    edges = [n for n in (0, 1, *edges) if n <= largest]
    return draw(st.one_of(st.integers(0, min(largest, 300)), st.sampled_from(edges)))


@st.composite
def tensors(draw: st.DrawFn, largest: int = 20_000) -> Tensors:
    grads = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(lengths(largest))
        shape = (length // 4, 4) if length % 4 == 0 and draw(st.booleans()) else (length,)
        grads.append(values(shape, draw(st.sampled_from(DTYPES)), draw(SEEDS), draw(SPECIALS)))
    return Tensors(grads, draw(checks()))


dims = st.sampled_from([0, 1, 3, 4, 7, 8, 10, 16, 33, 64, 100, 128, 300])


@st.composite
def used(draw: st.DrawFn, rows: int) -> int | None:
    edges = st.sampled_from([-1, 0, rows, rows + 1, 2**31 - 1])
    return draw(st.one_of(st.none(), edges, st.integers(0, rows)))


@st.composite
def rows(draw: st.DrawFn, largest: int = 20_000) -> Rows:
    dim = draw(dims)
    count = draw(lengths(largest // max(dim, 1)))
    grad = values((count, dim), draw(st.sampled_from(DTYPES)), draw(SEEDS), draw(SPECIALS))
    return Rows(grad, draw(used(count)), check=draw(checks()))


@st.composite
def terms(draw: st.DrawFn, largest: int = 20_000) -> Rows:
    """Rows that are sums of terms; what lies behind the rows and terms in use is no number."""
    dim = draw(dims)
    most = max(largest // max(dim, 1), 1)
    sizes = st.sampled_from([1, 1, 2, 3, 5, 31, 255, 256, 257, 512, 513, 800])
    lengths_of_rows, total = [], 0
    for length in draw(st.lists(sizes, max_size=draw(st.sampled_from([3, 60])))):
        if total + length <= most:
            lengths_of_rows.append(length)
            total += length
    seed = draw(SEEDS)
    generator = torch.Generator().manual_seed(seed)
    dtype = draw(st.sampled_from(DTYPES))
    bags = draw(st.integers(1, 20))
    segments = torch.tensor([0, *np.cumsum(lengths_of_rows)], dtype=torch.int32)
    sources = torch.randint(bags, (total,), generator=generator, dtype=torch.int32)
    coefficients = None
    if draw(st.booleans()):
        coefficients = torch.randn(total, generator=generator, dtype=accumulation(dtype))
    behind = draw(st.sampled_from([0, 0, 1, 700]))
    used_rows = draw(used(len(lengths_of_rows)))
    if behind:
        used_rows = len(lengths_of_rows) if used_rows is None else used_rows
        used_rows = min(used_rows, len(lengths_of_rows))
        segments = torch.cat([segments, torch.full((behind,), 2**31 - 1, dtype=torch.int32)])
        sources = torch.cat([sources, torch.full((behind,), 2**31 - 1, dtype=torch.int32)])
        if coefficients is not None:
            coefficients = torch.cat([coefficients, coefficients.new_full((behind,), torch.nan)])
    grad = values((bags, dim), dtype, seed, draw(SPECIALS))
    return Rows(grad, used_rows, segments, sources, coefficients, draw(checks(unscale=False)))


@st.composite
def boundaries(draw: st.DrawFn, largest: int = 20_000) -> Boundary:
    length = draw(lengths(largest))
    grad = values((length,), draw(st.sampled_from(DTYPES)), draw(SEEDS), draw(SPECIALS))
    layout = draw(st.sampled_from(["plain", "plain", "transposed", "every second", "expanded"]))
    if layout == "transposed" and length % 4 == 0:
        grad = grad.view(4, -1).t()
    elif layout == "every second":
        grad = grad[::2]
    elif layout == "expanded":
        grad = grad[:1].unsqueeze(1).expand(-1, 5)
    return Boundary(
        grad,
        draw(st.sampled_from([*SCALES, 2.0**13, 65536.0])),
        draw(st.one_of(st.none(), st.sampled_from(SCALES))),
        draw(st.booleans()),
        draw(st.sampled_from([(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)])),
    )


@st.composite
def scales(draw: st.DrawFn) -> Scales:
    groups = draw(st.sampled_from([0, 1, 1, 2, 3, 33, 70]))
    calls = draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(SEEDS))

    def choose(options: list[float], *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        at = torch.randint(len(options), shape, generator=generator)
        return torch.tensor(options, dtype=dtype)[at]

    configs = torch.stack(
        [
            choose([2.0, 1.5, 4.0, 1.1, 3.0], groups),
            choose([0.5, 0.25, 0.3, 1 / 3], groups),
            choose([0.0, 1.0, 2.0**-126, 100.0], groups),
            choose([2.0**24, math.inf, 100.0, 3e38, 1e300], groups),
            choose([1.0, 2.0, 3.0, 2000.0], groups),
            choose([1.0, 1.0, 2.0, 3.0], groups),
        ],
        dim=1,
    )
    return Scales(
        choose([65536.0, 1.0, 90.0, 1e-38, 2.0**-126, 2.0**127, 3e38], groups, dtype=torch.float32),
        choose([0, 0, 1, 1998, 1999], groups, 2, dtype=torch.int32),
        configs,
        choose([0.0, 0.0, -0.0, 1.0, 2.0, math.inf, math.nan], calls, groups, dtype=torch.float32),
    )
