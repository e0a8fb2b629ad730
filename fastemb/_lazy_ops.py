"""The torch contract page of ``lazy="exact"``: rows that slept are caught up.

Numbers as `RowAdamCatchUp` in ``csrc/ops.h`` and ``csrc/common/adam_catch_up.h`` define them.
"""

from __future__ import annotations

import torch

from fastemb import _lazy_reference
from fastemb._ops import LIBRARY, define

SCHEMAS = {
    # param, master, rows, used_rows, step, found_inf, seed and the moments are those of row_adam_
    # (see _row_ops); rows None: all rows of param. step is the one up to which rows are caught up.
    #   row_step   [num_embeddings] int32: the step that each row is current at, set to step
    #   history    [capacity, 8] float64, the ring of `AdamHistory`; step - row_step < capacity
    "row_adam_catch_up_": (
        "(Tensor(a!) param, Tensor(b!)? master, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, "
        "Tensor(e!)? max_exp_avg_sq, Tensor(f!) row_step, Tensor? rows, Tensor? used_rows, "
        "Tensor step, Tensor history, Tensor? found_inf, float weight_decay, int seed, "
        "float beta1, float beta2, float eps, float smallest_root, int horizon, bool decoupled) "
        "-> ()"
    ),
}

OPERATORS = define(SCHEMAS, _lazy_reference)
torch.library.register_fake("fastemb::row_adam_catch_up_", lambda *args: None, lib=LIBRARY)
