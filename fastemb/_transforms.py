"""Lookups that `torch.func` or forward-mode AD differentiates, in plain torch.

The operators have a backward and nothing else; these follow every transform that torch's own
operators follow: grad, vjp, jvp, vmap, and any nesting of them. Sums are kept in FP32 (FP64 for
FP64 tables), in no particular order, and gradients have the dtype of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.nn import functional as torch_functional

from fastemb import _ops
from fastemb._reference import accumulation_dtype, bag_bounds, check_indices


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a transform wants a derivative by one of them."""
    if torch.compiler.is_compiling() or (
        forward_ad._current_level < 0 and _functorch.peek_interpreter_stack() is None
    ):
        return False
    # Only the innermost transform shows its tangents; what an outer jvp has wrapped may have one.
    outer_jvps = {
        transform.level()
        for transform in (_functorch.get_interpreter_stack() or [])[:-1]
        if transform.key() == _functorch.TransformType.Jvp
    }
    for tensor in tensors:
        if tensor is None:
            continue
        if forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        while _functorch.is_functorch_wrapped_tensor(tensor):  # once for each transform
            if _functorch.is_gradtrackingtensor(tensor) and (
                tensor.requires_grad or _functorch.maybe_get_level(tensor) in outer_jvps
            ):
                return True
            tensor = _functorch.get_unwrapped(tensor)
    return False


def _is_batched(tensor: Tensor) -> bool:
    """Whether vmap hides the values."""
    while _functorch.is_functorch_wrapped_tensor(tensor):  # once for each transform
        if _functorch.is_batchedtensor(tensor):
            return True
        tensor = _functorch.get_unwrapped(tensor)
    return False


def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    output_dtype: torch.dtype,
    table: str,
) -> Tensor:
    rows = _rows("embedding", weight, indices, scale_grad_by_freq, table)
    if padding_idx >= 0:
        rows = torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return rows.to(output_dtype)


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
) -> tuple[Tensor, None]:
    """Raises NotImplementedError for offsets that vmap maps over: their bags differ in size."""
    op = "embedding_bag"
    if offsets is not None and _is_batched(offsets):
        raise NotImplementedError(
            f"{op}: offsets must not differ between the examples of torch.vmap while the lookup "
            "is differentiated; use 2-D input, padded with padding_idx"
        )
    if mode == "max":
        arguments = (indices, offsets, None, mode, padding_idx, include_last_offset)
        _, argmax = torch.ops.fastemb.embedding_bag(
            weight.detach(), *arguments, False, False, output_dtype, table
        )
        return _ops.winners(weight, indices, offsets, argmax).to(output_dtype), None

    lengths = bag_bounds(op, indices, offsets, include_last_offset).diff()
    bags = torch.arange(lengths.numel(), device=indices.device)
    bag_of = torch.repeat_interleave(bags, lengths)
    covered = indices.reshape(-1)[: bag_of.numel()]
    present = covered != padding_idx
    terms = _rows(op, weight, covered, scale_grad_by_freq, table)
    if per_sample_weights is not None:
        samples = per_sample_weights.reshape(-1)[: bag_of.numel()].to(terms.dtype)
        terms = terms * samples.unsqueeze(1)
    terms = torch.where(present.unsqueeze(1), terms, 0)
    output = torch.zeros(
        (lengths.numel(), weight.shape[1]), dtype=terms.dtype, device=terms.device
    ).index_add(0, bag_of, terms)
    if mode == "mean":
        zeros = torch.zeros(lengths.numel(), dtype=terms.dtype, device=terms.device)
        count = zeros.index_add(0, bag_of, present.to(terms.dtype))
        output = output / count.clamp(min=1).unsqueeze(1)
    return output.to(output_dtype), None


def _rows(op: str, weight: Tensor, indices: Tensor, scale_grad_by_freq: bool, table: str) -> Tensor:
    """Rows in the dtype that sums are kept in, so that their gradients are added up in it."""
    if not _is_batched(indices):  # else torch finds what is wrong
        check_indices(op, indices.reshape(-1), weight.shape[0], table)
    wide = weight.to(accumulation_dtype(weight.dtype))
    return torch_functional.embedding(indices, wide, scale_grad_by_freq=scale_grad_by_freq)
