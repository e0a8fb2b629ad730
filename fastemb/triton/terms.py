"""The row gradients as a sparse matrix times the gradient of the bags: what each position gives."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastemb.triton.bags import (
    TRITON_DTYPES,
    VARIABLES,
    Bags,
    bag_at,
    divide,
    on,
    require,
    widen,
)


@triton.jit(do_not_specialize=VARIABLES)
def bag_terms_kernel(
    sources,
    coefficients,
    within,
    order,
    offsets,
    samples,
    bag_of,
    counts,
    num_indices,
    bag_length,
    ACC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of each sorted position: its bag, -1 for none, its factor, and its place in the bag.

    counts is set for mean only, coefficients where they are not all 1, within for max only.
    """
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = place < num_indices
    position = tl.load(order + place, mask=there, other=0)
    bag = bag_at(bag_of, position, there, bag_length)
    used = bag >= 0
    tl.store(sources + place, bag.to(tl.int32), mask=there)
    if coefficients is not None:
        factor = tl.full((ROWS,), 1, ACC)
        if samples is not None:
            factor = widen(tl.load(samples + position, mask=used, other=0), ACC)
        if counts is not None:
            count = tl.load(counts + bag, mask=used, other=1)
            # Padding lies behind the last segment, and may lie in a bag that has nothing else.
            factor = divide(factor, tl.maximum(count, 1.0))
        tl.store(coefficients + place, factor, mask=there)
    if within is not None:
        if offsets is None:
            first = bag * bag_length
        else:
            first = tl.load(offsets + bag, mask=used, other=0).to(tl.int64)
        tl.store(within + place, (position.to(tl.int64) - first).to(tl.int32), mask=there)


def samples_of(op: str, per_sample_weights: Tensor | None, num_indices: int) -> Tensor | None:
    """The per-sample weights, checked and contiguous."""
    if per_sample_weights is None:
        return None
    require(
        per_sample_weights.numel() == num_indices,
        op,
        "per_sample_weights must have one element per index",
    )
    return per_sample_weights.detach().contiguous()


def terms_of(
    bags: Bags, order: Tensor, samples: Tensor | None, mode: str, acc: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """sources, coefficients and within, as `segments` takes them."""
    n = bags.num_indices

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.empty(n, dtype=dtype, device=bags.device)

    sources = empty(torch.int32)
    coefficients = empty(acc) if mode == "mean" or samples is not None else None
    within = empty(torch.int32) if mode == "max" else None
    if n > 0:
        rows = 256
        bag_terms_kernel[(triton.cdiv(n, rows),)](
            sources,
            coefficients,
            within,
            order,
            bags.offsets,
            samples,
            bags.bag_of(),
            bags.counts(acc) if mode == "mean" else None,
            n,
            bags.bag_length,
            ACC=TRITON_DTYPES[acc],
            ROWS=rows,
            num_warps=4,
        )
    return sources, coefficients, within


def bag_terms(
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    order: Tensor,
    num_embeddings: int,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
    acc_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    op = "bag_terms"
    bags = Bags(op, indices, offsets, num_embeddings, padding_idx, include_last_offset)
    require(
        order.dtype == torch.int32
        and order.numel() == bags.num_indices
        and order.is_contiguous()
        and order.device == indices.device,
        op,
        "order must be what group_indices made of these indices",
    )
    require(acc_dtype in (torch.float32, torch.float64), op, "acc_dtype must be float32 or float64")
    samples = samples_of(op, per_sample_weights, bags.num_indices)
    require(mode in ("sum", "mean"), op, f"mode must be 'sum' or 'mean', got '{mode}'")
    with on(indices.device):
        sources, coefficients, _ = terms_of(bags, order, samples, mode, acc_dtype)
    if coefficients is None:
        coefficients = torch.empty(0, dtype=acc_dtype, device=indices.device)
    return sources, coefficients
