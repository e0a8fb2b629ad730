"""Dense steps by torch's own kernels: the fallback for any device, and the oracle of the tests.

Same arguments as the schemas in `_dense_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastemb._grad_checks import memory, one_float, require

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
    op, numel = "dense_adam_", param.numel()
    words = f"the number of elements must be a multiple of {ELEMENTS}, got {numel}"
    require(op, numel % ELEMENTS == 0, words)
    for name, tensor in (
        ("param", param),
        ("grad", grad),
        ("exp_avg", exp_avg),
        ("exp_avg_sq", exp_avg_sq),
        ("max_exp_avg_sq", max_exp_avg_sq),
    ):
        memory(op, name, tensor, torch.float32, numel, param, "param's device")
    for name, number in (("step", step), ("factor", factor), ("found_inf", found_inf)):
        one_float(op, name, number, param, "param's device")
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
