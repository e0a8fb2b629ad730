"""Operators that `torch.func` or forward-mode AD differentiates, in plain torch.

The operators have a backward and nothing else; these follow every transform that torch's own
operators follow: grad, vjp, jvp, vmap, and any nesting of them. Sums are kept in FP32 (FP64 for
FP64 tables), in no particular order, and gradients have the dtype of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad
from torch.nn import functional as torch_functional

from fastemb._reference import accumulation_dtype, check_indices, check_offsets


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether a transform wants a derivative by one of them.

    Where Dynamo traces, whether it may; those of `torch.func` are left to the kernels, which see
    them in the graph.
    """
    if torch.compiler.is_compiling():
        return _traces_forward_mode()
    if forward_ad._current_level < 0 and _functorch.peek_interpreter_stack() is None:
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


def _traces_forward_mode() -> bool:
    return forward_ad._current_level >= 0 and _functorch.peek_interpreter_stack() is None


# As in `fastemb.functional`: Dynamo calls it while it traces, and leaves nothing in the graph.
setattr(_traces_forward_mode, "_dynamo_marked_constant", True)  # noqa: B010


def differentiates_here(*tensors: Tensor) -> bool:
    """Whether the transform that calls an operator's autograd kernel wants a derivative.

    Those further out call the kernel again. What tensors require of plain autograd does not count.
    """
    inside_transform = _functorch.peek_interpreter_stack() is not None
    if forward_ad._current_level < 0 and not inside_transform:
        return False
    if any(_unpack(tensor).tangent is not None for tensor in tensors):
        return True
    return (
        inside_transform
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in tensors)
    )


def _unpack(tensor: Tensor) -> forward_ad.UnpackedDualTensor:
    """At the one level there is, also in a compiled graph, which does not say that it is there."""
    return forward_ad.unpack_dual(tensor, level=0)


def _constant(tensor: Tensor) -> Tensor:
    """The values, without what is derived; `detach` keeps a tangent."""
    return _unpack(tensor).primal.detach()


def _is_hidden(tensor: Tensor) -> bool:
    """Whether a compiler hides the values."""
    return torch.compiler.is_compiling() or is_fake(tensor)


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
) -> tuple[Tensor, Tensor]:
    op = "embedding_bag"
    bags = _Bags(indices, offsets, padding_idx, include_last_offset)
    if mode == "max":
        arguments = (indices, offsets, None, mode, padding_idx, include_last_offset)
        _, argmax = torch.ops.fastemb.embedding_bag(
            _constant(weight), *arguments, False, False, output_dtype, table
        )
        return winners(weight, indices, offsets, argmax).to(output_dtype), argmax

    if scale_grad_by_freq and include_last_offset and _is_hidden(indices):
        raise RuntimeError(
            f"{op}: scale_grad_by_freq must be False with include_last_offset where torch.compile "
            "traces a derivative of torch.func or of forward-mode AD"
        )
    terms = _rows(op, weight, bags.ids, scale_grad_by_freq, table)
    if per_sample_weights is not None:
        terms = terms * bags.cover(per_sample_weights).to(terms.dtype).unsqueeze(1)
    terms = torch.where(bags.present.unsqueeze(1), terms, 0)
    output = bags.sum(terms)
    if mode == "mean":
        output = output / bags.count(terms.dtype).unsqueeze(1)
    return output.to(output_dtype), indices.new_empty(0, dtype=torch.int32)


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
    bags = _Bags(indices, offsets, padding_idx, include_last_offset)
    grad = grad_output.to(grad_dtype)
    table = torch.zeros(
        (num_embeddings, grad.shape[1]), dtype=grad_dtype, device=grad_output.device
    )
    if mode == "max":
        assert argmax is not None
        if indices.numel() > 0:
            row, there = _winning_rows(indices, offsets, argmax)
            table = table.scatter_add(0, row, torch.where(there, grad, 0))
    else:
        if mode == "mean":
            grad = grad / bags.count(grad_dtype).unsqueeze(1)
        terms = grad[bags.bag_of]
        if per_sample_weights is not None:
            terms = terms * bags.cover(per_sample_weights).to(grad_dtype).unsqueeze(1)
        table = table.index_add(0, bags.ids, torch.where(bags.present.unsqueeze(1), terms, 0))
    if scale_grad_by_freq:
        present = bags.present.to(grad_dtype)
        counts = present.new_zeros(num_embeddings).index_add(0, bags.ids, present)
        table = table / counts.clamp(min=1).unsqueeze(1)
    return table if dense else table[rows[:out_rows]]


def embedding_bag_per_sample_weights_backward(
    grad_output: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
) -> Tensor:
    bags = _Bags(indices, offsets, padding_idx, include_last_offset)
    grad = grad_output.to(accumulation_dtype(weight.dtype))
    if mode == "mean":
        grad = grad / bags.count(grad.dtype).unsqueeze(1)
    rows = _rows("embedding_bag", weight, bags.ids, False, "")
    covered = torch.where(bags.present, (grad[bags.bag_of] * rows).sum(1), 0)
    behind = covered.new_zeros(indices.numel() - covered.numel())
    return torch.cat([covered, behind]).reshape(indices.shape)


class _Bags:
    """The ids of a lookup, which bag each is in, and whether they are more than padding.

    Where a compiler hides their values, ids behind the last offset are here, too: as padding, and
    as some id that every table has. Else they are left out.

    Raises:
        NotImplementedError: offsets that vmap maps over: their bags differ in size.
    """

    def __init__(
        self,
        indices: Tensor,
        offsets: Tensor | None,
        padding_idx: int,
        include_last_offset: bool,
    ) -> None:
        self.ids = indices.reshape(-1)
        self.present = self.ids != padding_idx
        if offsets is None:
            self._num_bags, length = indices.shape
            self.bag_of = torch.arange(self.ids.numel(), device=indices.device) // max(length, 1)
            return
        op = "embedding_bag"
        hidden = _is_hidden(offsets)
        if hidden:
            _check_offsets_later(op, offsets, indices.numel())
        else:
            check_same_offsets(op, offsets, "while the lookup is differentiated")
            check_offsets(op, offsets, indices.numel())
        begin = offsets.to(torch.int64)
        if include_last_offset:
            begin, end = begin[:-1], begin[-1]
        self._num_bags = begin.numel()
        if self._num_bags == 0:
            self.ids = self.ids[:0]
        elif include_last_offset and not hidden:
            self.ids = self.ids[: int(end)]
        positions = torch.arange(self.ids.numel(), device=indices.device)
        self.bag_of = torch.searchsorted(begin, positions, right=True) - 1
        self.present = self.cover(self.present)
        if include_last_offset and hidden:
            self.present = self.present & (positions < end)
            self.ids = torch.where(positions < end, self.ids, 0)

    def cover(self, of_each_index: Tensor) -> Tensor:
        """What belongs to the ids that are here."""
        return of_each_index.reshape(-1)[: self.ids.numel()]

    def sum(self, terms: Tensor) -> Tensor:
        shape = (self._num_bags, *terms.shape[1:])
        return torch.zeros(shape, dtype=terms.dtype, device=terms.device).index_add(
            0, self.bag_of, terms
        )

    def count(self, dtype: torch.dtype) -> Tensor:
        """What the mean of each bag divides by."""
        return self.sum(self.present.to(dtype)).clamp(min=1)


def check_same_offsets(op: str, offsets: Tensor, when: str) -> None:
    """Raise `NotImplementedError` for offsets that vmap maps over, which cannot be read."""
    if _is_batched(offsets):
        raise NotImplementedError(
            f"{op}: offsets must not differ between the examples of torch.vmap {when}; "
            "use 2-D input, padded with padding_idx"
        )


def _check_offsets_later(op: str, offsets: Tensor, num_indices: int) -> None:
    """`check_offsets` in a compiled graph, where an assertion is all that can be raised."""
    if offsets.numel() == 0:
        return
    good = (offsets[0] == 0) & (offsets.diff() >= 0).all() & (offsets[-1] <= num_indices)
    torch._assert_async(
        good, f"{op}: offsets must begin with 0, not fall, and not pass the {num_indices} indices"
    )


def _rows(op: str, weight: Tensor, indices: Tensor, scale_grad_by_freq: bool, table: str) -> Tensor:
    """Rows in the dtype that sums are kept in, so that their gradients are added up in it."""
    if not _is_hidden(indices) and not _is_batched(indices):  # else torch finds what is wrong
        check_indices(op, indices.reshape(-1), weight.shape[0], table)
    wide = weight.to(accumulation_dtype(weight.dtype))
    return torch_functional.embedding(indices, wide, scale_grad_by_freq=scale_grad_by_freq)


def _winning_rows(indices: Tensor, offsets: Tensor | None, argmax: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each maximum, int64 [num_bags, dim], and whether there is one; some index is."""
    num_bags = argmax.shape[0]
    if offsets is None:
        begin = torch.arange(num_bags, device=indices.device) * indices.shape[1]
    else:
        begin = offsets[:num_bags].to(torch.int64)
    position = begin.unsqueeze(1) + argmax
    row = indices.reshape(-1)[position.clamp(min=0, max=indices.numel() - 1)].to(torch.int64)
    there = argmax >= 0
    return torch.where(there, row, 0), there


def winners(table: Tensor, indices: Tensor, offsets: Tensor | None, argmax: Tensor) -> Tensor:
    """Elements of the table that argmax names, [num_bags, dim], 0 in an empty bag."""
    if indices.numel() == 0:
        return table.new_zeros(argmax.shape)
    row, there = _winning_rows(indices, offsets, argmax)
    return torch.where(there, table.gather(0, row), 0)
