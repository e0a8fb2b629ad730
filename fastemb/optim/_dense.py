"""Dense parameters for torch's fused kernels: memory layouts, and gradients in bounded scratch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastemb import _dense_reference
from fastemb.optim._options import float_or_tensor
from fastemb.optim._scaling import Scaling

# Elements that are unscaled at a time. A parameter is cut at multiples of _ALIGNMENT, so that a
# vectorised kernel treats each element as it does in one call over the whole.
_CHUNK = {"cpu": 1 << 20}
_CHUNK_ELSEWHERE = 1 << 24
_ALIGNMENT = 1 << 14


class DenseUpdate(NamedTuple):
    """One parameter with what its update reads and writes, all of one shape but the step."""

    param: Tensor
    grad: Tensor
    states: tuple[Tensor, ...]
    step: Tensor | None


# Called with parameters, gradients, one list per state, and steps.
Kernel = Callable[[list[Tensor], list[Tensor], list[list[Tensor]], list[Tensor]], None]
# Called with flat float32 pieces, whose gradients it unscales and does not write.
OnePass = Callable[[DenseUpdate], None]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory: no gaps, no overlap, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor that `is_dense`, 1-D, in the order of memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def has_address(tensor: Tensor) -> bool:
    """Whether ``data_ptr()`` is one; that of a wrapper such as `DTensor` may be a mere offset."""
    wrapped: bool = is_traceable_wrapper_subclass(tensor)
    return not wrapped and tensor.data_ptr() != 0


class MemoryInUse:
    """The memory of tensors, from the first to the last element of each."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by storage

    def overlaps(self, tensor: Tensor) -> bool:
        """Whether one that this was asked for before has this memory, or a part of it.

        Never for what has no memory of its own: on "meta", and wrappers such as `DTensor`.
        """
        if not has_address(tensor) or tensor.numel() == 0:
            return False
        begin = tensor.data_ptr()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = begin + (last + 1) * tensor.element_size()
        ranges = self._ranges[tensor.untyped_storage().data_ptr()]
        overlaps = any(begin < e and b < end for b, e in ranges)
        ranges.append((begin, end))
        return overlaps


def same_layout(tensor: Tensor, template: Tensor) -> bool:
    """Whether the elements have the order in memory that those of ``template``, dense, have."""
    if tensor.stride() == template.stride():
        return True
    return tensor.is_contiguous() and template.is_contiguous()


def laid_out_like(tensor: Tensor, template: Tensor) -> Tensor:
    """``tensor``, or a copy of it with the strides of ``template``, which is dense."""
    if same_layout(tensor, template):
        return tensor
    return torch.empty_like(template, dtype=tensor.dtype).copy_(tensor)


def scalar_for(value: float | Tensor, param: Tensor) -> float | Tensor:
    """A hyperparameter for torch's fused kernels: on the CPU or where the parameter is."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        # A copy to the host that nothing waits for would be read before it is there.
        return value.to(param.device, non_blocking=param.device.type != "cpu")
    return float_or_tensor(value)


def run_fused(
    kernel: Kernel,
    updates: Sequence[DenseUpdate],
    scaling: Scaling,
    one_pass: OnePass | None = None,
) -> None:
    """Call ``kernel`` for parameters of one device and dtype.

    Gradients are never written: torch's fused kernels would store what they unscale, so they get
    gradients that are unscaled already, in scratch memory that does not grow with the model.

    Args:
        one_pass: does the same to the bit without that detour, for large float32 parameters. Only
            on the CPU, and with something to unscale by.
    """
    prepared = []
    copies = []
    for update in updates:
        param = update.param
        if param.numel() == 0:
            continue
        if not is_dense(param):
            param = torch.empty_like(param).copy_(param)
            copies.append((update.param, param))
        # torch's kernels refuse what is negated when it is read, after the step was counted.
        grad = laid_out_like(update.grad.resolve_neg(), param)
        prepared.append(update._replace(param=param, grad=grad))
    if one_pass is not None:
        prepared = [rest for update in prepared for rest in _in_one_pass(one_pass, update)]
    if scaling.multiplier is None and all(u.grad.dtype == u.param.dtype for u in prepared):
        _call(kernel, prepared)
    elif prepared:
        # One for all: new memory would cost more than the unscaling.
        scratch = prepared[0].param.new_empty(
            min(_chunk(prepared[0].param), sum(u.param.numel() for u in prepared))
        )
        for batch in _batches(prepared):
            _call(kernel, _unscaled(batch, scaling, scratch))
    for param, copy in copies:
        param.copy_(copy)


def _in_one_pass(one_pass: OnePass, update: DenseUpdate) -> list[DenseUpdate]:
    """What is left of an update: elements that are too few, or of another dtype."""
    param, grad, states, step = update
    whole = param.numel() - param.numel() % _dense_reference.ELEMENTS
    if (
        whole < _ALIGNMENT
        or any(tensor.dtype != torch.float32 for tensor in (param, grad, *states))
        or type(grad) is not Tensor  # a fake one, say
    ):
        return [update]
    columns = [flat(tensor) for tensor in (param, grad, *states)]
    p, g, *s = (column[:whole] for column in columns)
    one_pass(DenseUpdate(p, g, tuple(s), step))
    p, g, *s = (column[whole:] for column in columns)
    return [DenseUpdate(p, g, tuple(s), step)] if len(p) else []


def _call(kernel: Kernel, updates: Sequence[DenseUpdate]) -> None:
    if updates:
        kernel(
            [u.param for u in updates],
            [u.grad for u in updates],
            [list(states) for states in zip(*(u.states for u in updates), strict=True)],
            [u.step for u in updates if u.step is not None],
        )


def _chunk(param: Tensor) -> int:
    return _CHUNK.get(param.device.type, _CHUNK_ELSEWHERE)


def _batches(updates: Sequence[DenseUpdate]) -> Iterator[list[DenseUpdate]]:
    """Flat pieces of the updates, at most a chunk of elements together."""
    batch: list[DenseUpdate] = []
    room = limit = 0
    for param, grad, states, step in updates:
        limit = _chunk(param)
        if not batch:
            room = limit
        columns = [flat(tensor) for tensor in (param, grad, *states)]
        begin, size = 0, param.numel()
        while begin < size:
            length = min(size - begin, room)
            if begin + length < size:
                length -= length % _ALIGNMENT
            if length == 0:
                yield batch
                batch, room = [], limit
                continue
            p, g, *s = (column[begin : begin + length] for column in columns)
            batch.append(DenseUpdate(p, g, tuple(s), step))
            begin, room = begin + length, room - length
    if batch:
        yield batch


def _unscaled(batch: list[DenseUpdate], scaling: Scaling, scratch: Tensor) -> list[DenseUpdate]:
    """The batch with its gradients unscaled and clipped, in ``scratch``, whose size is enough."""
    sizes = [u.grad.numel() for u in batch]
    grads = list(scratch[: sum(sizes)].split(sizes))
    scaling.apply([u.grad for u in batch], grads)
    return [u._replace(grad=grad) for u, grad in zip(batch, grads, strict=True)]
