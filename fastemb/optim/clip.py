"""Clipping of gradients by their norm, sparse ones included."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastemb._row_queue import QueuedRows, RowQueue, check_alone, on_host, summed, waiting
from fastemb.optim._dense import MemoryInUse, flat, has_address, is_dense
from fastemb.optim._gradients import check_sparse, row_gradient, row_order

__all__ = ["clip_grad_norm_"]

_OP = "clip_grad_norm_"
_PIECE = 1 << 15  # elements that are FP64 at a time on the CPU, within a core's cache
_HIGHEST_POWER = 4.0  # of float32 values and their sums that FP64 has room for
_LOW_PRECISION = (torch.float16, torch.bfloat16)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``.

    `torch.nn.utils.clip_grad_norm_` for dense and sparse (COO) gradients together. The norm of a
    sparse gradient is that of what it stands for: repeated rows are added up first, in FP32. Norms
    are computed in FP64, and such that powers do not overflow there. A parameter that is given
    twice counts once. Gradients that share their memory, as those of two tables whose outputs were
    added, are scaled once; one that has a part of another's gets memory of its own. Of a `DTensor`,
    also beside plain tensors, the norm is that of the whole, for which its processes wait. Does not
    wait for the device unless ``error_if_nonfinite``.

    Args:
        parameters: a tensor or an iterable of tensors whose ``.grad`` is clipped.
        max_norm: largest norm that stays as it is.
        norm_type: > 0, p of the p-norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise where the norm is NaN or infinite, before anything is scaled.
        foreach: False: one gradient at a time rather than lists of them. The result is the same.

    Returns:
        The norm before clipping, [] on the device of the first gradient, float32 (float64 where a
        gradient is or has its parts); 0 without gradients. What clips is the FP64 norm, also where
        float32 has only infinity for it.

    Raises:
        ValueError: ``norm_type`` is not > 0, ``max_norm`` not >= 0; a sparse gradient that is not
            one of rows.
        IndexError: a row of a sparse gradient outside its table, on the CPU.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; a table has queued
            gradients and a ``.grad`` as well.

    With :math:`n` the norm, gradients are multiplied by :math:`\\min(1, \\mathrm{max\\_norm} /
    (n + 10^{-6}))`, as torch does.
    """
    max_norm, norm_type = check_norm(_OP, max_norm, norm_type)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    found = _with_gradients(parameters)
    if not found:
        return torch.tensor(0.0, dtype=torch.float32)

    parts = [None if queue is None else summed(queue.merged()) for _, queue in found]
    values = [
        _summed(param, part or _grad(param)) for (param, _), part in zip(found, parts, strict=True)
    ]
    total = _total(values, norm_type, foreach)
    double = any(_widest(v) == v.dtype for v in values)
    returned = total if double else total.float()
    if error_if_nonfinite and not bool(torch.isfinite(returned)):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this error and scale the gradients by the "
            "non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
    params = [param for param, queue in found if queue is None]
    _scale(params, [part.grad for part in parts if part is not None], coefficient, foreach)
    for (_, queue), part in zip(found, parts, strict=True):
        if queue is not None and part is not None:
            queue.put(replace(part, version=part.grad._version))
    return returned


def check_norm(op: str, max_norm: float, norm_type: float) -> tuple[float, float]:
    """Both as floats; raise `ValueError` where they make no sense."""
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"{op}: max_norm must be >= 0, got {max_norm!r}")
    if not norm_type > 0:
        raise ValueError(f"{op}: norm_type must be > 0, got {norm_type!r}")
    return max_norm, norm_type


def _with_gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, RowQueue | None]]:
    """Parameters that have a gradient, with the queue of those whose gradient waits; checked."""
    found = []
    for param in {id(param): param for param in parameters}.values():
        queue = waiting(param)
        if queue is not None:
            check_alone(_OP, param, queue)
            queue.check_unchanged()
        elif param.grad is None:
            continue
        elif param.grad.layout != torch.strided:
            check_sparse(_OP, param.grad)
        found.append((param, queue))
    return found


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _summed(param: Tensor, grad: Tensor | QueuedRows) -> Tensor:
    """A dense gradient, or the values of one of rows after repeated ones were added up."""
    if isinstance(grad, Tensor) and grad.layout == torch.strided:
        return grad
    rows = row_gradient(grad)
    values = rows.values
    if rows.used_rows is not None:
        used = torch.arange(values.shape[0], device=values.device) < rows.used_rows
        values = torch.where(used.unsqueeze(1), values, 0.0)
    order = row_order(param, rows.rows[: values.shape[0]], rows.used_rows)
    return values if order is None else values[order]


def _total(values: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """FP64 norm of the tensors together, on the device of the first."""
    device = values[0].device

    def total(norm_type: float, unit: Tensor | None) -> Tensor:
        # The largest of no values is an error in torch; here empty gradients just do not count.
        norms = _norms([v for v in values if v.numel() > 0], norm_type, foreach, unit)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.linalg.vector_norm(
            torch.stack([zero, *(n.to(device) for n in norms)]), norm_type
        )

    if norm_type <= _HIGHEST_POWER and all(_widest(v) != v.dtype for v in values):
        return total(norm_type, None)
    largest = total(math.inf, None)
    if norm_type == math.inf:
        return largest
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return total(norm_type, unit) * unit


def _norms(
    tensors: list[Tensor], norm_type: float, foreach: bool | None, unit: Tensor | None
) -> list[Tensor]:
    """FP64 norms that together have the norm of the tensors together, measured in ``unit``."""
    norms: list[Tensor] = []
    for members in _by_kind(tensors).values():
        dtype = _widest(members[0])
        if _is_wrapper(members[0]):
            norms += [_norm_of_wrapper(member, norm_type, unit) for member in members]
            continue
        if on_host(members[0]):
            norms += [_norm_in_pieces(member, norm_type, unit) for member in members]
            continue
        if unit is not None:
            members = [m.to(dtype) / unit.to(m.device) for m in members]
        if foreach is False:
            norms += [torch.linalg.vector_norm(m, norm_type, dtype=dtype) for m in members]
        else:
            norms += torch._foreach_norm(members, norm_type, dtype=dtype)
    return norms


def _norm_in_pieces(tensor: Tensor, norm_type: float, unit: Tensor | None) -> Tensor:
    """FP64 norm; torch's kernel for the CPU would first make a copy of the whole in FP64."""
    values = flat(tensor) if is_dense(tensor) else tensor.reshape(-1)
    dtype = _widest(tensor)
    norms = []
    for piece in values.split(_PIECE):
        if unit is not None:
            piece = piece.to(dtype) / unit.to(piece.device)
        norms.append(torch.linalg.vector_norm(piece, norm_type, dtype=dtype))
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)


def _norm_of_wrapper(tensor: Tensor, norm_type: float, unit: Tensor | None) -> Tensor:
    """FP64 norm of what cannot be cut; that of a `DTensor` comes from all who have a part of it."""
    if unit is not None:
        tensor = tensor.to(_widest(tensor)) / unit.to(tensor.device)
    norm = torch.linalg.vector_norm(tensor, norm_type, dtype=_widest(tensor))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _is_wrapper(tensor: Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _scale(
    params: list[Tensor], queued: list[Tensor], coefficient: Tensor, foreach: bool | None
) -> None:
    """Multiply every gradient once, also where several share memory."""
    targets: dict[tuple[object, ...], Tensor] = {}
    in_use = MemoryInUse()
    for param in params:
        grad = _grad(param)
        sparse = grad.layout != torch.strided
        target = grad._values() if sparse else grad
        if (
            target.is_conj()  # torch multiplies no list of what is conjugated when it is read
            or target.is_neg()
            or _overlaps_itself(target)
            or (_place(target) not in targets and in_use.overlaps(target))
        ):
            target = target.clone(memory_format=torch.contiguous_format)
            param.grad = _with_values(grad, target) if sparse else target
        targets.setdefault(_place(target), target)

    for members in _by_kind([*targets.values(), *queued]).values():
        first = members[0]
        if first.dtype in _LOW_PRECISION:
            # The coefficient would be rounded to their dtype, or to 0.
            factor = coefficient.to(first.device, torch.float32)
            for member in members:
                member.copy_(member.float().mul_(factor))
        elif foreach is False:
            for member in members:
                member.mul_(coefficient.to(first.device, first.dtype))
        else:
            torch._foreach_mul_(members, coefficient.to(first.device, first.dtype))


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors of the same elements; those of wrappers such as `DTensor` are elsewhere."""
    known_by = tensor.data_ptr() if has_address(tensor) else id(tensor)
    return (known_by, tensor.shape, tensor.stride())


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether it was expanded: what autograd makes of a sum, for one."""
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _with_values(grad: Tensor, values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        grad._indices(),
        values,
        grad.shape,
        device=values.device,
        is_coalesced=grad.is_coalesced(),
        check_invariants=False,
    )


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[object, ...], list[Tensor]]:
    """The tensors of each device and dtype; a wrapper such as `DTensor` is in no list of others."""
    kinds: dict[tuple[object, ...], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alone = id(tensor) if _is_wrapper(tensor) else None
        kinds[tensor.device, tensor.dtype, alone].append(tensor)
    return kinds
