"""The torch contract page of dense steps on the CPU: schema and fake kernel.

torch's fused kernels write the gradients that they unscale. This one does not, and is the same to
the bit; elsewhere torch's is called, with scratch memory. Nothing here is differentiable. The
formula is in ``csrc/ops.h`` (`DenseAdam`).
"""

from __future__ import annotations

import torch

from fastemb import _dense_reference
from fastemb._ops import LIBRARY, define

__all__ = ["OPERATORS", "SCHEMAS"]

# All tensors are contiguous, float32 and on one device; step (from 1 on), factor and found_inf (not
# 0: nothing happens) of one element, the others of one size that `_dense_reference.ELEMENTS`
# divides. The gradient is multiplied, or divided, by factor.
SCHEMAS = {
    "dense_adam_": (
        "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
        "Tensor(d!)? max_exp_avg_sq, Tensor step, Tensor factor, bool divide, Tensor? found_inf, "
        "float lr, float beta1, float beta2, float eps, float weight_decay, bool decoupled, "
        "bool maximize) -> ()"
    ),
}

OPERATORS = define(SCHEMAS, _dense_reference)


@torch.library.register_fake("fastemb::dense_adam_", lib=LIBRARY)
def _dense_adam_fake(*args: object) -> None:
    return None
