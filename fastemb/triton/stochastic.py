"""Stochastic rounding, bit for bit that of ``csrc/common/stochastic.h``.

A value between two neighbours of fp16 or bf16 goes to either with the probability that makes the
expectation the value. The random bits are a function of (seed, step, row, column) and of no block,
warp or order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastemb.triton.bags import narrow

_FIRST_FACTOR = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = tl.constexpr(0x94D049BB133111EB)
_COLUMN_FACTOR = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def mix(x):
    """A bijection of uint64 in which every input bit reaches every output bit."""
    x ^= x >> 30
    x *= tl.full((), _FIRST_FACTOR, tl.uint64)
    x ^= x >> 27
    x *= tl.full((), _SECOND_FACTOR, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, step, row):
    """Of rows in a step, from int64; once per row."""
    key = mix(seed.to(tl.uint64)) + step.to(tl.uint64)
    return mix(mix(key) + row.to(tl.uint64))


@triton.jit
def random_bits(key, column):
    """uint32; key and column (int64) broadcast."""
    column_key = column.to(tl.uint64) * tl.full((), _COLUMN_FACTOR, tl.uint64)
    return (mix(key + column_key) >> 32).to(tl.uint32)


@triton.jit
def moment_bits(x, seed, step, column, stream: tl.constexpr):
    """uint32, of a moment of Adam in f32: a function of its value, not of its row."""
    key = row_key(seed, step, tl.full((), stream, tl.int64))
    return random_bits(key + (x.to(tl.uint32, bitcast=True).to(tl.uint64) << 32), column)


@triton.jit
def round_stochastic(x, random, dtype: tl.constexpr):
    """f32 to fp16 or bf16. What is NaN, infinite or would round past the largest finite value is
    rounded to nearest.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    if dtype == tl.bfloat16:
        # Random bits below the 16 that stay, and the rest is cut off.
        upper = (magnitude + (random >> 16)) >> 16
        too_large = magnitude >= 0x7F7F0000
    else:
        is_normal = magnitude >= 0x38800000
        normal = (magnitude - 0x38000000 + (random >> 19)) >> 13
        # Subnormal: in units of 2^-24, exactly; the fraction against 24 random bits.
        units = tl.where(is_normal, 0, magnitude).to(tl.float32, bitcast=True) * 16777216.0
        whole = units.to(tl.uint32)
        fraction = (units - whole.to(tl.float32)) * 16777216.0
        up = (random >> 8).to(tl.float32) < fraction
        upper = tl.where(is_normal, normal, whole + up.to(tl.uint32))
        too_large = magnitude >= 0x477FE000
    upper = (upper & 0x7FFF) | ((bits >> 16) & 0x8000)
    rounded = upper.to(tl.uint16).to(dtype, bitcast=True)
    return tl.where(too_large, narrow(x, dtype), rounded)
