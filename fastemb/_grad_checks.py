"""What the arguments of gradient scaling must be for its kernels to stay inside their memory.

For the backends that are written in Python; ``csrc/torch/grad_operators.h`` has the same rules and
words for the native ones. `fastemb.amp` makes arguments that keep them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STATS = 8


def require(op: str, good: bool, rule: str) -> None:
    if not good:
        raise ValueError(f"{op}: {rule}")


_DEVICE = "the gradients' device"  # in messages


def one_float(
    op: str, name: str, tensor: Tensor | None, like: Tensor, device: str = _DEVICE
) -> None:
    """Raise `ValueError` unless a tensor is one float32 element where ``like`` is, or None."""
    if tensor is None:
        return
    require(op, tensor.device == like.device, f"{name} must be on {device}")
    require(
        op,
        tensor.dtype == torch.float32 and tensor.numel() == 1,
        f"{name} must be one float32 element",
    )


def memory(
    op: str,
    name: str,
    tensor: Tensor | None,
    dtype: torch.dtype,
    elements: int,
    like: Tensor,
    device: str = _DEVICE,
) -> None:
    """Raise `ValueError` unless a tensor is that much memory where ``like`` is, or None."""
    if tensor is None:
        return
    require(op, tensor.device == like.device, f"{name} must be on {device}")
    word = str(dtype).removeprefix("torch.")
    require(
        op,
        tensor.dtype == dtype and tensor.numel() == elements and tensor.is_contiguous(),
        f"{name} must be contiguous {word} of {elements} elements",
    )


def check_gradients(
    op: str,
    grads: list[Tensor],
    inv_scale: Tensor | None,
    found_inf: Tensor | None,
    stats: Tensor | None,
    square_sums: Tensor | None,
) -> None:
    """Raise `ValueError` for gradients, or places for what is found in them, that do not fit."""
    for grad in grads:
        require(op, grad.dtype in _FLOATS, "dtype must be float16, bfloat16, float32 or float64")
        require(op, grad.is_contiguous(), "gradients must be contiguous")
        require(op, grad.device == grads[0].device, "gradients must be on one device")
    if not grads:
        return
    for name, number in (("inv_scale", inv_scale), ("found_inf", found_inf)):
        one_float(op, name, number, grads[0])
    for name, places, dtype, elements in (
        ("stats", stats, torch.int64, _STATS * len(grads)),
        ("square_sums", square_sums, torch.float64, len(grads)),
    ):
        memory(op, name, places, dtype, elements, grads[0])


def check_row_gradient(
    op: str,
    grad: Tensor,
    used_rows: Tensor | None,
    segments: Tensor | None,
    sources: Tensor | None,
    coefficients: Tensor | None,
    unscale: bool,
) -> None:
    """Raise `ValueError` for a gradient of rows, or the terms of one, that do not fit."""
    require(
        op, grad.dim() == 2 and grad.is_contiguous(), "grad must be contiguous, [rows, columns]"
    )
    for name, tensor in (
        ("used_rows", used_rows),
        ("segments", segments),
        ("sources", sources),
        ("coefficients", coefficients),
    ):
        if tensor is not None:
            require(op, tensor.device == grad.device, f"{name} must be on the gradients' device")
    require(
        op,
        used_rows is None or (used_rows.numel() == 1 and used_rows.dtype == torch.int32),
        "used_rows must be one int32 element",
    )
    check_terms(op, grad, segments, sources, coefficients)
    require(op, segments is None or not unscale, "unscale must be False with segments")


def check_terms(
    op: str,
    grad: Tensor,
    segments: Tensor | None,
    sources: Tensor | None,
    coefficients: Tensor | None,
) -> None:
    """Raise `ValueError` for terms of a gradient (``segments`` of ``_row_ops.py``) that do not fit.

    How many segments there must be is for the caller.
    """
    fused = segments is not None
    require(
        op,
        fused == (sources is not None) and (fused or coefficients is None),
        "segments and sources go together, coefficients only with them",
    )
    if segments is None or sources is None:
        return
    require(
        op,
        segments.dtype == torch.int32 and segments.numel() >= 1 and segments.is_contiguous(),
        "segments must be contiguous int32, one element more than rows",
    )
    require(
        op,
        sources.dtype == torch.int32 and sources.is_contiguous(),
        "sources must be contiguous int32",
    )
    acc = torch.float64 if grad.dtype == torch.float64 else torch.float32
    require(
        op,
        coefficients is None
        or (
            coefficients.dtype == acc
            and coefficients.numel() == sources.numel()
            and coefficients.is_contiguous()
        ),
        f"coefficients must be contiguous, {str(acc).removeprefix('torch.')}, one for each of "
        "sources",
    )


def check_boundary(
    op: str,
    grad: Tensor,
    ratio: Tensor,
    inv_scale: Tensor | None,
    flags: Tensor,
    stats: Tensor | None,
) -> None:
    """Raise `ValueError` for the arguments of ``boundary_gradient`` that do not fit."""
    require(op, grad.dtype in _FLOATS, "dtype must be float16, bfloat16, float32 or float64")
    for name, number in (("ratio", ratio), ("inv_scale", inv_scale)):
        one_float(op, name, number, grad)
    for name, places, dtype, elements in (
        ("flags", flags, torch.float32, 2),
        ("stats", stats, torch.int64, _STATS),
    ):
        memory(op, name, places, dtype, elements, grad)


def check_scales(
    op: str, scales: Tensor, states: Tensor, found_inf: Tensor, configs: Tensor
) -> None:
    """Raise `ValueError` for the arguments of ``scale_update_`` that do not fit."""
    groups = scales.numel()
    for name, tensor, dtype, columns in (
        ("scales", scales, torch.float32, 1),
        ("states", states, torch.int32, 2),
        ("found_inf", found_inf, torch.float32, 1),
        ("configs", configs, torch.float64, 6),
    ):
        require(op, tensor.device == scales.device, f"{name} must be on the device of scales")
        word = str(dtype).removeprefix("torch.")
        require(
            op,
            tensor.dtype == dtype and tensor.numel() == groups * columns and tensor.is_contiguous(),
            f"{name} must be contiguous {word} of {groups * columns} elements",
        )
