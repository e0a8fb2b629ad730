"""Dense steps by torch's own kernels: the fallback for any device, and the oracle of the tests.

Same arguments as the schemas in `_dense_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What torch's vectorised loop leaves over, up to this many elements, has other roundings.
ELEMENTS = 64


def dense_adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: Tensor,
    factor: Tensor,
    divide: bool,
    found_inf: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    numel = param.numel()
    if numel % ELEMENTS != 0:
        raise ValueError(
            f"dense_adam_: the number of elements must be a multiple of {ELEMENTS}, got {numel}"
        )
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if max_exp_avg_sq is not None:
        tensors["max_exp_avg_sq"] = max_exp_avg_sq
    for name, tensor in tensors.items():
        if not (
            tensor.device == param.device
            and tensor.dtype == torch.float32
            and tensor.is_contiguous()
            and tensor.numel() == numel
        ):
            raise ValueError(
                f"dense_adam_: {name} must be contiguous float32 of {numel} elements, with param"
            )
    numbers = {"step": step, "factor": factor}
    if found_inf is not None:
        numbers["found_inf"] = found_inf
    for name, tensor in numbers.items():
        if not (
            tensor.device == param.device and tensor.dtype == torch.float32 and tensor.numel() == 1
        ):
            raise ValueError(f"dense_adam_: {name} must be one float32 element, with param")
    operator = torch._fused_adamw_ if decoupled else torch._fused_adam_
    operator(
        [param],
        [grad / factor if divide else grad * factor],
        [exp_avg],
        [exp_avg_sq],
        [] if max_exp_avg_sq is None else [max_exp_avg_sq],
        [step],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=max_exp_avg_sq is not None,
        maximize=maximize,
        # torch's kernels skip for exactly 1 only.
        found_inf=None if found_inf is None else (found_inf != 0).to(torch.float32),
    )
