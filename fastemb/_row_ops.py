"""The torch contract page of the row optimizers: schemas and fake kernels.

Each operator does one step of an optimizer on the rows of one parameter, in place, without a host
synchronisation. They are not differentiable. The arithmetic is defined in ``csrc/ops.h``
(`RowStep` and what follows it) and ``csrc/common/row_update.h``.
"""

from __future__ import annotations

import torch

from fastemb import _row_reference
from fastemb._ops import LIBRARY, define

# Shapes and dtypes, with [num_embeddings, dim] the shape of param and acc float64 for a float64
# param, else float32:
#   param        float16, bfloat16, float32 or float64; rows may lie apart, elements may not
#   master       like param, acc, contiguous: the FP32 copy of a float16 or bfloat16 param
#   rows         [num_rows] int64, distinct; None: gradient row k belongs to row k of param
#   used_rows    [1] int32: how many leading rows count; None: all
#   grad         [num_rows, dim], floating (float64 goes with a float64 param and only there)
#   segments     [num_rows + 1] int32: the step is fused with the backward. grad is [any, dim], and
#                the gradient of row k the sum of coefficients[j] * grad[sources[j]] over j in
#                [segments[k], segments[k + 1]), as embedding_bag_backward would have summed it.
#                group_indices makes segments, bag_terms the other two. None: as above
#   sources      [num_terms] int32, rows of grad; with segments
#   coefficients [num_terms] acc, None: all 1; with segments
#   step         [] float32, the number of this step, from 1
#   inv_scale    [] float32: what gradients are multiplied by; None: 1
#   found_inf    [] float32: not 0 leaves everything as it is; None: 0
#   lr_tensor    [] float32 or float64, in place of lr
#   seed         -1: round to nearest; else moments in bfloat16, and a float16 or bfloat16 param
#                without a master, are rounded stochastically
_COMMON_TENSORS = (
    "Tensor? rows, Tensor? used_rows, Tensor grad, Tensor? segments, Tensor? sources, "
    "Tensor? coefficients, Tensor step, Tensor? inv_scale, Tensor? found_inf, float lr, "
    "Tensor? lr_tensor, float weight_decay, bool maximize, int seed, "
)

SCHEMAS = {
    # exp_avg, exp_avg_sq, max_exp_avg_sq: like param, contiguous, of one dtype: acc, or bfloat16
    # where acc is float32.
    # row_step, row_count: [num_embeddings] int32.
    "row_adam_": (
        "(Tensor(a!) param, Tensor(b!)? master, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, "
        "Tensor(e!)? max_exp_avg_sq, Tensor(f!)? row_step, Tensor(g!)? row_count, "
        + _COMMON_TENSORS
        + "float beta1, float beta2, float eps, bool decoupled, bool corrected_denominator) -> ()"
    ),
    # sum: like param, acc, contiguous.
    "row_adagrad_": (
        "(Tensor(a!) param, Tensor(b!)? master, Tensor(c!) sum, "
        + _COMMON_TENSORS
        + "float lr_decay, float eps) -> ()"
    ),
    # sum: num_embeddings elements, acc, contiguous.
    "row_rowwise_adagrad_": (
        "(Tensor(a!) param, Tensor(b!)? master, Tensor(c!) sum, "
        + _COMMON_TENSORS
        + "float lr_decay, float eps) -> ()"
    ),
    # momentum_buffer: like param, acc, contiguous; None: no momentum.
    "row_sgd_": (
        "(Tensor(a!) param, Tensor(b!)? master, Tensor(c!)? momentum_buffer, "
        + _COMMON_TENSORS
        + "float momentum, float dampening, bool nesterov) -> ()"
    ),
}


def _fake(*args: object) -> None:
    return None


OPERATORS = define(SCHEMAS, _row_reference)
for _name in SCHEMAS:
    torch.library.register_fake(f"fastemb::{_name}", _fake, lib=LIBRARY)
