"""Every operator in plain torch: the fallback for any device, and the oracle of the tests.

Same arguments and results as the schemas in `_ops`; sums are kept in FP32 (FP64 for FP64 tables)
and use `torch.segment_reduce`, which is free of atomics. Written to be read, not to be fast: a
lookup here makes an ``[indices, dim]`` temporary that the other backends avoid.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over rows of ``dtype`` are kept in, and what their row gradients have."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Bags:
    """Positions, in order, that take part in a lookup, and the bags they belong to."""

    def __init__(
        self,
        op: str,
        indices: Tensor,
        offsets: Tensor | None,
        num_embeddings: int,
        padding_idx: int,
        include_last_offset: bool,
        table: str = "",
    ) -> None:
        flat = indices.reshape(-1).to(torch.int64)
        device = flat.device
        bounds = bag_bounds(op, indices, offsets, include_last_offset)
        num_bags = bounds.numel() - 1
        covered = flat[: int(bounds[-1])] if num_bags > 0 else flat[:0]
        check_indices(op, covered, num_embeddings, table)
        self.num_bags = num_bags
        self.begin = bounds[:-1]
        # bag_of[p] for every covered position, then only for those that are not padding
        bag_of = torch.repeat_interleave(
            torch.arange(num_bags, device=device), bounds[1:] - bounds[:-1]
        )
        self.positions = (covered != padding_idx).nonzero().squeeze(1)
        self.bag_of = bag_of[self.positions]
        self.rows = covered[self.positions]
        self.count = torch.bincount(self.bag_of, minlength=num_bags)

    def sum(self, terms: Tensor) -> Tensor:
        """[num_bags, dim] sums of terms [positions, dim]."""
        return _segment_sum(terms, self.count)


def bag_bounds(
    op: str, indices: Tensor, offsets: Tensor | None, include_last_offset: bool
) -> Tensor:
    """[num_bags + 1] int64: bag b has the positions from bound b to the next; checks offsets."""
    if offsets is None:
        num_bags, length = indices.shape
        return torch.arange(num_bags + 1, device=indices.device) * length
    check_offsets(op, offsets, indices.numel())
    bounds = offsets.to(torch.int64)
    if include_last_offset:
        return bounds
    return torch.cat([bounds, bounds.new_tensor([indices.numel()])])


def _segment_sum(terms: Tensor, lengths: Tensor) -> Tensor:
    if terms.numel() == 0 or lengths.numel() == 0:
        return terms.new_zeros((lengths.numel(), terms.shape[1]))
    return torch.segment_reduce(terms, "sum", lengths=lengths, axis=0, initial=0)


def _named(table: str) -> str:
    return f"table '{table}'" if table else "the table"


def check_indices(op: str, indices: Tensor, num_embeddings: int, table: str) -> None:
    bad = ((indices < 0) | (indices >= num_embeddings)).nonzero()
    if bad.numel():
        position = int(bad[0])
        raise IndexError(
            f"{op}: index {int(indices[position])} at position {position} is out of range for "
            f"{_named(table)} with {num_embeddings} rows"
        )


def check_offsets(op: str, offsets: Tensor, num_indices: int) -> None:
    values = offsets.to(torch.int64)
    if values.numel() == 0:
        return
    if int(values[0]) != 0:
        raise ValueError(f"{op}: offsets[0] must be 0, got {int(values[0])}")
    falls = (values[1:] < values[:-1]).nonzero()
    beyond = (values > num_indices).nonzero()
    first_fall = int(falls[0]) + 1 if falls.numel() else values.numel()
    first_beyond = int(beyond[0]) if beyond.numel() else values.numel()
    if first_beyond <= first_fall and first_beyond < values.numel():
        raise ValueError(
            f"{op}: offsets[{first_beyond}] = {int(values[first_beyond])} is greater than the "
            f"number of indices, {num_indices}"
        )
    if first_fall < values.numel():
        raise ValueError(
            f"{op}: offsets[{first_fall}] = {int(values[first_fall])} is less than "
            f"offsets[{first_fall - 1}] = {int(values[first_fall - 1])}"
        )


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    output_dtype: torch.dtype,
    table: str,
) -> Tensor:
    flat = indices.reshape(-1).to(torch.int64)
    check_indices("embedding", flat, weight.shape[0], table)
    # No view of the rows is returned: autograd would refuse to have it changed in place.
    dim = weight.shape[1]
    output = weight.new_empty((*indices.shape, dim), dtype=output_dtype)
    output.view(flat.numel(), dim).copy_(weight.detach().index_select(0, flat))
    return output


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    sparse: bool,
    output_dtype: torch.dtype,
    table: str,
) -> tuple[Tensor, Tensor]:
    bags = _Bags(
        "embedding_bag", indices, offsets, weight.shape[0], padding_idx, include_last_offset, table
    )
    acc = accumulation_dtype(weight.dtype)
    terms = weight.detach().index_select(0, bags.rows).to(acc)
    if mode == "max":
        return _max(terms, bags, output_dtype)
    if per_sample_weights is not None:
        samples = per_sample_weights.detach().reshape(-1)[bags.positions].to(acc)
        terms = terms * samples.unsqueeze(1)
    output = bags.sum(terms)
    if mode == "mean":
        output = output / bags.count.clamp(min=1).to(acc).unsqueeze(1)
    return output.to(output_dtype), weight.new_empty(0, dtype=torch.int32)


def _max(terms: Tensor, bags: _Bags, output_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Largest value per bag and column, NaN above all, and the position where it first stands."""
    shape = (bags.num_bags, terms.shape[1])
    bag = bags.bag_of.unsqueeze(1).expand_as(terms)
    # NaN ranks above +inf: compare (is NaN, value) pairs in two steps.
    is_nan = terms.isnan()
    has_nan = torch.zeros(shape, dtype=torch.int32, device=terms.device)
    has_nan.scatter_reduce_(0, bag, is_nan.to(torch.int32), "amax")
    largest = torch.full(shape, -torch.inf, dtype=terms.dtype, device=terms.device)
    largest.scatter_reduce_(0, bag, terms.masked_fill(is_nan, -torch.inf), "amax")
    wins = torch.where(has_nan.gather(0, bag).bool(), is_nan, terms == largest.gather(0, bag))
    within = (bags.positions - bags.begin[bags.bag_of]).unsqueeze(1).expand_as(terms)
    none = torch.iinfo(torch.int64).max
    argmax = torch.full(shape, none, dtype=torch.int64, device=terms.device)
    argmax.scatter_reduce_(0, bag, torch.where(wins, within, none), "amin")
    empty = argmax == none
    # Of zeros that are equal, the sign is that of the first.
    first = wins & (within == argmax.gather(0, bag))
    output = torch.full_like(largest, -torch.inf)
    output.scatter_reduce_(0, bag, terms.masked_fill(~first | is_nan, -torch.inf), "amax")
    output = output.masked_fill(has_nan.bool(), torch.nan).masked_fill(empty, 0)
    return output.to(output_dtype), argmax.masked_fill(empty, -1).to(torch.int32)


def group_indices(
    indices: Tensor,
    offsets: Tensor | None,
    num_embeddings: int,
    padding_idx: int,
    include_last_offset: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """No data-dependent shapes and no host sync, so that other backends on a device may use it."""
    keys = indices.reshape(-1).to(torch.int64)
    n = keys.numel()
    device = keys.device
    position = torch.arange(n, device=device)
    absent = (keys == padding_idx) | (keys < 0) | (keys >= num_embeddings)
    if offsets is not None and offsets.numel() == 0:
        absent.fill_(True)  # no bag holds any position
    elif offsets is not None and include_last_offset:
        absent |= position >= offsets[-1]
    keys = keys.masked_fill(absent, num_embeddings)
    ordered, order = torch.sort(keys, stable=True)
    present = ordered < num_embeddings
    head = present.clone()
    head[1:] &= ordered[1:] != ordered[:-1]
    # Heads are written at their rank, everything else at a spare last place.
    rank = torch.where(head, head.cumsum(0) - 1, n)
    rows = keys.new_zeros(n + 1).scatter_(0, rank, ordered)[:n]
    total = present.sum(dtype=torch.int32).reshape(1)
    segments = torch.empty(n + 2, dtype=torch.int32, device=device)
    segments.copy_(total.expand(n + 2))
    segments = segments.scatter_(0, torch.where(head, rank, n + 1), position.to(torch.int32))
    num_rows = head.sum(dtype=torch.int32).reshape(1)
    return order.to(torch.int32), rows, segments[: n + 1], num_rows


def embedding_bag_backward(
    grad_output: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    order: Tensor,
    rows: Tensor,
    segments: Tensor,
    num_rows: Tensor,
    num_embeddings: int,
    out_rows: int,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    dense: bool,
    grad_dtype: torch.dtype,
) -> Tensor:
    bags = _Bags(
        "embedding_bag", indices, offsets, num_embeddings, padding_idx, include_last_offset
    )
    count = int(num_rows)
    lengths = (segments[1 : count + 1] - segments[:count]).to(torch.int64)
    sorted_positions = order[: int(lengths.sum())].to(torch.int64)
    bag_at = torch.zeros(indices.numel(), dtype=torch.int64, device=indices.device)
    bag_at[bags.positions] = bags.bag_of
    bag = bag_at[sorted_positions]
    terms = grad_output.detach()[bag].to(grad_dtype)
    if mode == "max":
        assert argmax is not None
        within = (sorted_positions - bags.begin[bag]).unsqueeze(1)
        terms = torch.where(argmax[bag] == within, terms, 0)
    else:
        scale = None
        if per_sample_weights is not None:
            scale = per_sample_weights.detach().reshape(-1)[sorted_positions].to(grad_dtype)
        if mode == "mean":
            one = torch.ones((), dtype=grad_dtype, device=terms.device)
            scale = (one if scale is None else scale) / bags.count[bag].to(grad_dtype)
        if scale is not None:
            terms = terms * scale.unsqueeze(1)
    values = _segment_sum(terms, lengths)
    if scale_grad_by_freq:
        values = values / lengths.to(grad_dtype).unsqueeze(1)
    if not dense:
        return values
    full = values.new_zeros((out_rows, values.shape[1]))
    return full.index_copy_(0, rows[:count], values)


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
    bags = _Bags(
        "embedding_bag", indices, offsets, num_embeddings, padding_idx, include_last_offset
    )
    bag_at = torch.zeros(indices.numel(), dtype=torch.int32, device=indices.device)
    bag_at[bags.positions] = bags.bag_of.to(torch.int32)
    sources = bag_at[order]
    coefficients = torch.ones(indices.numel(), dtype=acc_dtype, device=indices.device)
    if per_sample_weights is not None:
        coefficients = per_sample_weights.detach().reshape(-1)[order].to(acc_dtype)
    if mode == "mean":
        count_at = torch.ones_like(coefficients)
        count_at[bags.positions] = bags.count[bags.bag_of].to(acc_dtype)
        coefficients = coefficients / count_at[order]
    elif per_sample_weights is None:
        coefficients = coefficients[:0]
    return sources, coefficients


def sum_terms(
    grad: Tensor, segments: Tensor, sources: Tensor, coefficients: Tensor | None
) -> Tensor:
    """[rows, dim] sums of ``coefficients[j] * grad[sources[j]]`` over the segments of the rows."""
    used = int(segments[-1])
    terms = grad[sources[:used]]
    if coefficients is not None:
        terms = terms * coefficients[:used].unsqueeze(1)
    return _segment_sum(terms, (segments[1:] - segments[:-1]).to(torch.int64))


def embedding_bag_per_sample_weights_backward(
    grad_output: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
) -> Tensor:
    bags = _Bags(
        "embedding_bag", indices, offsets, weight.shape[0], padding_idx, include_last_offset
    )
    acc = accumulation_dtype(weight.dtype)
    rows = weight.detach().index_select(0, bags.rows).to(acc)
    dots = (rows * grad_output.detach()[bags.bag_of].to(acc)).sum(1)
    if mode == "mean":
        dots = dots / bags.count[bags.bag_of].to(acc)
    result = dots.new_zeros(indices.numel())
    result[bags.positions] = dots
    return result.reshape(indices.shape)


def embedding_renorm_(
    weight: Tensor, indices: Tensor, max_norm: float, norm_type: float, table: str
) -> None:
    flat = indices.reshape(-1).to(torch.int64)
    check_indices("embedding_renorm_", flat, weight.shape[0], table)
    rows = flat.unique()
    values = weight.detach().index_select(0, rows).to(accumulation_dtype(weight.dtype))
    norms = torch.linalg.vector_norm(values, norm_type, dim=1, keepdim=True)
    scaled = values * (max_norm / (norms + 1e-7))
    over = (norms > max_norm).squeeze(1)
    weight.detach().index_copy_(0, rows[over], scaled[over].to(weight.dtype))
