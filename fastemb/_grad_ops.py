"""The torch contract page of gradient scaling: schemas and fake kernels.

What happens to gradients between the backward and the step: they are looked at (finite or not,
statistics, norm) in one pass, unscaled on request, and the scales of all groups are updated. All of
it stays on the device. Nothing here is differentiable. The semantics are defined in
``csrc/ops.h`` (`GradCheck` and what follows it).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastemb import _grad_reference
from fastemb._grad_reference import GRAD_STATS
from fastemb._ops import LIBRARY, define

__all__ = ["GRAD_STATS", "OPERATORS", "SCHEMAS"]

# Shapes and dtypes; every tensor is on the gradients' device:
#   inv_scale    [] float32: what gradients are multiplied by; None: 1
#   found_inf    [] float32: becomes 1 where a value is not finite, before or after inv_scale
#   stats        [len(grads), 8] int64 (GRAD_STATS), or [8] for one gradient: added to
#   square_sums  [len(grads)] float64, or [] for one gradient: sums of squares, unscaled
#   unscale      write the product with inv_scale back, rounded to nearest
SCHEMAS = {
    # grads: floating, contiguous, distinct memory.
    "grad_check_": (
        "(Tensor(a!)[] grads, Tensor? inv_scale, Tensor(b!)? found_inf, Tensor(c!)? stats, "
        "Tensor(d!)? square_sums, bool unscale) -> ()"
    ),
    # grad [num_rows, dim], of which the first used_rows count; with segments, sources and
    # coefficients as those of the row optimizers in _row_ops.py, and then it is not written.
    "row_grad_check_": (
        "(Tensor(a!) grad, Tensor? used_rows, Tensor? segments, Tensor? sources, "
        "Tensor? coefficients, Tensor? inv_scale, Tensor(b!)? found_inf, Tensor(c!)? stats, "
        "Tensor(d!)? square_sum, bool unscale) -> ()"
    ),
    # ratio [] float32. flags [2] float32: [0] becomes 1 where grad is not finite, [1] where the
    # result is not and grad is.
    "boundary_gradient": (
        "(Tensor grad, Tensor ratio, Tensor? inv_scale, Tensor(a!) flags, Tensor(b!)? stats) "
        "-> Tensor"
    ),
    # scales, found_inf [groups] float32; states [groups, 2] int32: growth, skips;
    # configs [groups, 6] float64: growth_factor, backoff_factor, min_scale, max_scale,
    # growth_interval, hysteresis.
    "scale_update_": (
        "(Tensor(a!) scales, Tensor(b!) states, Tensor found_inf, Tensor configs) -> ()"
    ),
}

OPERATORS = define(SCHEMAS, _grad_reference)


def _nothing(*args: object) -> None:
    return None


for _name in ("grad_check_", "row_grad_check_", "scale_update_"):
    torch.library.register_fake(f"fastemb::{_name}", _nothing, lib=LIBRARY)


@torch.library.register_fake("fastemb::boundary_gradient", lib=LIBRARY)
def _boundary_gradient_fake(
    grad: Tensor, ratio: Tensor, inv_scale: Tensor | None, flags: Tensor, stats: Tensor | None
) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)
