"""What all kernels of this backend share: bags, conversions between types, tile sizes, launches.

Arguments have the same names and meanings in every kernel:
  indices, offsets, num_indices, num_offsets, num_bags, bag_length, num_embeddings, padding_idx
                 as in ``csrc/ops.h``; offsets is None for bags of one length
  DIM, STRIDE    columns of the table, elements between its rows. Constants, because Triton knows
                 what divides a constant, but of a variable only whether 16 does: dim 100 would be
                 read one element at a time instead of four. A model has few shapes of tables.
  ACC            type of the accumulators
  ROWS, COLUMNS  the tile of one step
All other integers are variables without specialization: a kernel is compiled once, not once for
each batch size that happens to be 1 or a multiple of 16.

Loops with bounds from memory are while loops: interpreted Triton cannot give ``range`` a tensor.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

# Terms per partial sum, kChunk of csrc/ops.h. Both forms: kernels read the constexpr.
CHUNK_TERMS = 256
CHUNK = tl.constexpr(CHUNK_TERMS)

# For triton.jit(do_not_specialize=...): integers that change from batch to batch.
VARIABLES = [
    "caller",
    "num_indices",
    "num_offsets",
    "num_bags",
    "bag_length",
    "num_embeddings",
    "padding_idx",
    "search_steps",
]

TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

_MAX_INDICES = 2**31 - 1


# ---------------------------------------------------------------------------------------------
# device
# ---------------------------------------------------------------------------------------------


@triton.jit
def widen(x, ACC: tl.constexpr):
    """To the accumulator's type, exactly. bf16 by its bits: interpreted Triton cannot to f64."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True).to(ACC)
    else:
        wide = x.to(ACC)
    return wide


@triton.jit
def _to_float_odd(x):
    """f64 to f32, inexact results made odd, so that a second rounding to bf16 is right."""
    nearest = x.to(tl.float32)
    back = nearest.to(tl.float64)
    bits = nearest.to(tl.int32, bitcast=True)
    mend = (back != x) & (x == x) & (bits % 2 == 0)
    toward_zero = tl.abs(back) > tl.abs(x)
    odd = tl.where(toward_zero, bits - 1, bits + 1)
    return tl.where(mend, odd, bits).to(tl.float32, bitcast=True)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """From the accumulator's type, rounded once to nearest, ties to even.

    bf16 by its bits, since interpreted Triton truncates and there is no direct way from f64.
    """
    if dtype == tl.bfloat16:
        if x.dtype == tl.float64:
            single = _to_float_odd(x)
        else:
            single = x
        bits = single.to(tl.uint32, bitcast=True)
        is_nan = single != single
        quiet_nan = (bits >> 16) | 0x40
        # NaNs are left out of the addition, which could carry out of 32 bits.
        number = tl.where(is_nan, 0, bits)
        nearest = (number + 0x7FFF + ((number >> 16) & 1)) >> 16
        upper = tl.where(is_nan, quiet_nan, nearest)
        rounded = upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x.to(dtype)
    return rounded


@triton.jit
def divide(x, y):
    """IEEE division; Triton's own ``/`` is approximate for f32."""
    if x.dtype == tl.float32:
        quotient = tl.div_rn(x, y)
    else:
        quotient = x / y
    return quotient


@triton.jit
def square_root(x):
    """IEEE square root; Triton's own is approximate for f32."""
    if x.dtype == tl.float32:
        root = tl.sqrt_rn(x)
    else:
        root = tl.sqrt(x)
    return root


@triton.jit
def bag_range(offsets, bag, num_indices, num_offsets, num_bags, bag_length):
    """Positions [begin, end) of a bag (scalar or block) and the place of a wrong offset, or -1.

    A bag with a wrong offset is empty. So is bag ``num_bags``, which may be asked for so that a
    lone last offset is looked at too.
    """
    if offsets is None:
        begin = bag * bag_length
        end = begin + bag_length
        wrong = tl.full((), -1, tl.int64)
    else:
        begin = tl.load(offsets + bag, mask=bag < num_offsets, other=0).to(tl.int64)
        end = tl.load(offsets + bag + 1, mask=bag + 1 < num_offsets, other=0).to(tl.int64)
        end = tl.where(bag + 1 < num_offsets, end, num_indices)
        bad_begin = (begin < 0) | (begin > num_indices) | ((bag == 0) & (begin != 0))
        bad_end = (end < begin) | (end > num_indices)
        wrong = tl.where(bad_begin, bag, tl.where(bad_end, bag + 1, -1))
        begin = tl.where(wrong >= 0, 0, begin)
        end = tl.where((wrong >= 0) | (bag >= num_bags), begin, end)
    return begin, end, wrong


@triton.jit
def bag_at(bag_of, position, there, bag_length):
    """The bags of the positions, int64, -1 for none. Positions fit 31 bits."""
    if bag_of is None:
        bag = tl.where(there, position // bag_length, -1)
    else:
        bag = tl.load(bag_of + position, mask=there, other=-1)
    return bag.to(tl.int64)


@triton.jit
def load_rows(indices, position, there, num_embeddings):
    """Row numbers at the positions, and where they are there and in the table."""
    row = tl.load(indices + position, mask=there, other=0).to(tl.int64)
    return row, there & (row >= 0) & (row < num_embeddings)


@triton.jit(do_not_specialize=VARIABLES)
def find_bags_kernel(
    bag_of, offsets, num_indices, num_offsets, num_bags, search_steps, ROWS: tl.constexpr
):
    """bag_of[p] = the bag that position p lies in, or -1."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # low becomes the number of bags that begin at or before the position.
    low = tl.zeros((ROWS,), tl.int64)
    high = low + num_bags
    while search_steps > 0:
        search_steps -= 1
        middle = (low + high) // 2
        searching = low < high
        begin = tl.load(offsets + middle, mask=searching, other=0)
        right = searching & (begin <= position)
        high = tl.where(searching & (begin > position), middle, high)
        low = tl.where(right, middle + 1, low)
    bag = tl.maximum(low - 1, 0)
    begin, end, _ = bag_range(offsets, bag, num_indices, num_offsets, num_bags, 0)
    inside = (low > 0) & (begin <= position) & (position < end)
    tl.store(bag_of + position, tl.where(inside, bag, -1).to(tl.int32), mask=position < num_indices)


@triton.jit(do_not_specialize=VARIABLES)
def count_bags_kernel(
    counts,
    indices,
    offsets,
    num_indices,
    num_offsets,
    num_bags,
    bag_length,
    num_embeddings,
    padding_idx,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """counts[b] = positions of the bag that are not padding."""
    bag = tl.program_id(0).to(tl.int64)
    begin, end, _ = bag_range(offsets, bag, num_indices, num_offsets, num_bags, bag_length)
    count = tl.zeros((ROWS,), tl.int32)
    start = begin
    while start < end:
        position = start + tl.arange(0, ROWS)
        row, valid = load_rows(indices, position, position < end, num_embeddings)
        count += (valid & (row != padding_idx)).to(tl.int32)
        start += ROWS
    tl.store(counts + bag, tl.sum(count, axis=0).to(ACC))


# ---------------------------------------------------------------------------------------------
# host
# ---------------------------------------------------------------------------------------------


def require(good: bool, op: str, rule: str) -> None:
    """For what memory safety needs; `fastemb.functional` has raised before, with better words."""
    if not good:
        raise ValueError(f"{op}: {rule}")


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device current: Triton launches on the current one, whatever the tensors say."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def with_whole_rows(weight: Tensor) -> Tensor:
    """Rows may lie apart, the elements of a row may not: a transposed table is copied."""
    weight = weight.detach()
    return weight if weight.shape[1] <= 1 or weight.stride(1) == 1 else weight.contiguous()


def row_stride(weight: Tensor) -> int:
    return weight.shape[1] if weight.shape[0] <= 1 else weight.stride(0)


def tile(dim: int, acc: torch.dtype, *, elements: int, most_rows: int = 16) -> dict[str, int]:
    """Rows and columns of the tile that one warp works on.

    ``elements`` is for f32 and a matter of registers: 1024 are 32 a lane. One warp is enough: at
    128 columns it has eight rows on the way, each in 16-byte loads, and small programs balance bags
    of uneven length without any exchange between warps. More than 16 rows would be idle in most
    bags.
    """
    if acc == torch.float64:
        elements //= 2
    columns = min(triton.next_power_of_2(max(dim, 1)), 256)
    return {"ROWS": min(max(elements // columns, 1), most_rows), "COLUMNS": columns, "num_warps": 1}


def column_blocks(dim: int, columns: int) -> int:
    """At least one, so that a table without columns still has its ids checked."""
    return max(triton.cdiv(dim, columns), 1)


class Bags:
    """How the positions of ``indices`` fall into bags, contiguous and checked."""

    def __init__(
        self,
        op: str,
        indices: Tensor,
        offsets: Tensor | None,
        num_embeddings: int,
        padding_idx: int = -1,
        include_last_offset: bool = False,
    ) -> None:
        integers = (torch.int32, torch.int64)
        require(indices.dtype in integers, op, "indices and offsets must be int32 or int64")
        require(
            indices.numel() <= _MAX_INDICES, op, f"indices must hold at most {_MAX_INDICES} ids"
        )
        self.indices = indices.reshape(-1).contiguous()
        self.device = indices.device
        self.num_indices = indices.numel()
        self.num_embeddings = num_embeddings
        self.padding_idx = padding_idx
        self.offsets: Tensor | None = None
        self.num_offsets = 0
        self.bag_length = 0
        if offsets is None:
            require(indices.dim() == 2, op, "indices must be 2-D without offsets")
            self.num_bags, self.bag_length = indices.shape
            return
        require(offsets.dtype in integers, op, "indices and offsets must be int32 or int64")
        require(indices.dim() == 1 and offsets.dim() == 1, op, "indices and offsets must be 1-D")
        require(
            offsets.shape[0] > 0 or not include_last_offset,
            op,
            "offsets must hold at least one element with include_last_offset, got 0",
        )
        self.offsets = offsets.contiguous()
        self.num_offsets = offsets.shape[0]
        self.num_bags = self.num_offsets - int(include_last_offset)

    def bag_of(self) -> Tensor | None:
        """The bag of every position, -1 for none; None where a division tells."""
        if self.offsets is None:
            return None
        bag_of = torch.empty(self.num_indices, dtype=torch.int32, device=self.device)
        if self.num_indices > 0:
            rows = 256
            find_bags_kernel[(triton.cdiv(self.num_indices, rows),)](
                bag_of,
                self.offsets,
                self.num_indices,
                self.num_offsets,
                self.num_bags,
                self.num_bags.bit_length(),
                ROWS=rows,
                num_warps=4,
            )
        return bag_of

    def counts(self, acc: torch.dtype) -> Tensor:
        """Positions of every bag that are not padding."""
        counts = torch.empty(self.num_bags, dtype=acc, device=self.device)
        if self.num_bags > 0:
            count_bags_kernel[(self.num_bags,)](
                counts,
                self.indices,
                self.offsets,
                self.num_indices,
                self.num_offsets,
                self.num_bags,
                self.bag_length,
                self.num_embeddings,
                self.padding_idx,
                ACC=TRITON_DTYPES[acc],
                ROWS=32,  # one load a lane; most bags are no longer
                num_warps=1,
            )
        return counts
