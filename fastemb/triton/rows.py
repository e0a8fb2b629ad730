"""What the kernels of the row optimizers share: which rows count, what goes in and what comes out.

`RowStep` in ``csrc/ops.h`` says what each of these does. ``at`` are places in param, whose rows may
lie apart, ``at_state`` those in the master and the states, whose rows do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastemb._reference import accumulation_dtype
from fastemb.triton.bags import (
    TRITON_DTYPES,
    VARIABLES,
    narrow,
    row_stride,
    tile,
    widen,
)
from fastemb.triton.segments import sum_partials, sum_segments
from fastemb.triton.stochastic import moment_bits, random_bits, round_stochastic, row_key

# For triton.jit(do_not_specialize=...), as in bags.py.
STEP_VARIABLES = [*VARIABLES, "grad_rows", "seed"]

# `AdamRounding` of csrc/common/stochastic.h.
FIRST = tl.constexpr(-1)
SECOND = tl.constexpr(-2)


# ---------------------------------------------------------------------------------------------
# device
# ---------------------------------------------------------------------------------------------


@triton.jit
def in_double(x):
    """A scalar in f64. Interpreted Triton passes a Python float, which has no ``to``."""
    return tl.full((), x, tl.float64)


@triton.jit
def integer_power(base, exponent, largest):
    """base ** exponent in f64 by square and multiply; ``largest`` is the largest exponent."""
    power = (exponent * 0).to(tl.float64) + 1.0
    exponent = tl.maximum(exponent, 0)
    while largest > 0:
        power = tl.where((exponent & 1) == 1, power * base, power)
        base *= base
        exponent >>= 1
        largest >>= 1
    return power


@triton.jit
def learning_rate(lr, lr_tensor):
    if lr_tensor is None:
        rate = in_double(lr)
    else:
        rate = tl.load(lr_tensor).to(tl.float64)
    return rate


@triton.jit
def rows_at(rows, place, count, num_embeddings):
    """Rows of the table at the places, and where there is one."""
    there = place < count
    if rows is None:
        row = place
    else:
        row = tl.load(rows + place, mask=there, other=0)
    return row, there & (row >= 0) & (row < num_embeddings)


@triton.jit
def load_values(param, master, at, at_state, mask, ACC: tl.constexpr):
    """The master, or the parameter's own value where somebody else has written it."""
    own = tl.load(param + at, mask=mask, other=0)
    value = widen(own, ACC)
    if master is not None:
        kept = tl.load(master + at_state, mask=mask, other=0)
        rounded = narrow(kept, own.dtype).to(tl.int16, bitcast=True)
        value = tl.where(rounded == own.to(tl.int16, bitcast=True), kept, value)
    return value


@triton.jit
def load_moment(state, at, mask, ACC: tl.constexpr):
    return widen(tl.load(state + at, mask=mask, other=0), ACC)


@triton.jit
def store_moment(
    state, at, value, mask, seed, step, column, stream: tl.constexpr, STOCHASTIC: tl.constexpr
):
    dtype: tl.constexpr = state.dtype.element_ty
    if STOCHASTIC and dtype == tl.bfloat16:
        random = moment_bits(value, seed, step, column[None, :], stream)
        tl.store(state + at, round_stochastic(value, random, dtype), mask=mask)
    else:
        tl.store(state + at, narrow(value, dtype), mask=mask)


@triton.jit
def load_gradient(
    grad,
    segments,
    sources,
    coefficients,
    partials,
    place,
    there,
    column,
    dim,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[ROWS, COLUMNS] of the gradient rows at the places; summed here where segments are given."""
    if segments is None:
        at = place[:, None] * dim + column[None, :]
        mask = there[:, None] & (column < dim)[None, :]
        g = widen(tl.load(grad + at, mask=mask, other=0), ACC)
    else:
        g = sum_segments(
            grad, sources, coefficients, None, None, partials, segments, place, there, column, dim,
            ACC, ROWS, COLUMNS,
        )  # fmt: skip
    return g


@triton.jit
def adjust_gradient(
    g,
    value,
    inv_scale,
    weight_decay,
    MAXIMIZE: tl.constexpr,
    DECAY: tl.constexpr,
    ACC: tl.constexpr,
):
    """What the rules take; value is that of the parameter."""
    if inv_scale is not None:
        g *= tl.load(inv_scale).to(ACC)
    if MAXIMIZE:
        g *= -1.0  # minus is a subtraction from zero in Triton, and loses the sign of zeros
    if DECAY:
        g += value * in_double(weight_decay).to(ACC)
    return g


@triton.jit
def store_values(
    param, master, value, at, at_state, mask, seed, step, row, column, STOCHASTIC: tl.constexpr
):
    dtype: tl.constexpr = param.dtype.element_ty
    half: tl.constexpr = dtype == tl.float16 or dtype == tl.bfloat16
    if master is not None:
        tl.store(master + at_state, value, mask=mask)
    if STOCHASTIC and (half and master is None):
        random = random_bits(row_key(seed, step, row)[:, None], column[None, :])
        tl.store(param + at, round_stochastic(value, random, dtype), mask=mask)
    else:
        tl.store(param + at, narrow(value, dtype), mask=mask)


# ---------------------------------------------------------------------------------------------
# host
# ---------------------------------------------------------------------------------------------

# Of a tile: eight f32 a lane, for up to six values each, and a warp needs no more to be busy.
TILE_ELEMENTS = 256
# The arguments that every kernel of a step takes, in its order.
STEP_TENSORS = (
    *("rows", "used_rows", "grad", "segments", "sources", "coefficients", "step", "inv_scale"),
    "found_inf",
)
STEP_NUMBERS = ("lr", "lr_tensor", "weight_decay", "seed")


def gradient_rows(arguments: Mapping[str, Any]) -> int:
    """How many rows have a gradient, used or not."""
    rows = arguments["rows"]
    return int(arguments["grad"].shape[0] if rows is None else rows.numel())


def partials_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """Of the long segments of a step that sums its gradients itself."""
    if arguments["segments"] is None:
        return None
    param = arguments["param"]
    return sum_partials(
        arguments["grad"],
        arguments["sources"],
        arguments["coefficients"],
        arguments["segments"],
        arguments["used_rows"],
        accumulation_dtype(param.dtype),
        found_inf=arguments["found_inf"],
        one_row=param.shape[0] == 1,
    )


def programs(device: torch.device, tiles: int) -> int:
    """Enough to balance the multiprocessors, which hold 64 warps at most; interpreted, two, so that
    one has several tiles.
    """
    if device.type == "cpu":
        return min(tiles, 2)
    return min(tiles, 256 * torch.cuda.get_device_properties(device).multi_processor_count)


def step_constants(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the launches have in common: constants and options."""
    param = arguments["param"]
    acc = accumulation_dtype(param.dtype)
    one_row = param.shape[0] == 1
    return {
        "STOCHASTIC": arguments["seed"] >= 0,
        # A constant (see bags.py), but not another one for each length of a single row.
        "STRIDE": 0 if one_row else row_stride(param),
        "ACC": TRITON_DTYPES[acc],
        # It would round otherwise than the CPU and CUDA kernels do.
        "enable_fp_fusion": False,
        **tile(param.shape[1], acc, elements=TILE_ELEMENTS, most_rows=TILE_ELEMENTS),
    }


def elementwise_constants(arguments: Mapping[str, Any], rows: int) -> tuple[dict[str, Any], int]:
    """The same where a row may be shared out, with DIM; and the number of tiles of ``rows`` rows.

    DIM is None for a parameter of one row, which any dense parameter becomes: there are too many
    lengths to compile for each.
    """
    num_embeddings, dim = arguments["param"].shape
    constants = step_constants(arguments)
    constants["DIM"] = dim
    if num_embeddings == 1:
        constants |= {"DIM": None, "ROWS": 1, "COLUMNS": TILE_ELEMENTS}
    blocks = triton.cdiv(dim, constants["COLUMNS"])
    return constants, triton.cdiv(rows, constants["ROWS"]) * blocks
