"""Every operator of this backend, by its name and with the arguments of its schema.

Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastemb.triton import (
    adam_catch_up,
    embedding_bag,
    embedding_bag_backward,
    grad_check,
    renorm,
    row_steps,
    rowwise_adagrad,
    terms,
)

KERNELS: dict[str, Callable[..., Any]] = {
    "embedding": embedding_bag.embedding,
    "embedding_bag": embedding_bag.embedding_bag,
    "group_indices": embedding_bag_backward.group_indices,
    "embedding_bag_backward": embedding_bag_backward.embedding_bag_backward,
    "bag_terms": terms.bag_terms,
    "embedding_bag_per_sample_weights_backward": (
        embedding_bag_backward.embedding_bag_per_sample_weights_backward
    ),
    "embedding_renorm_": renorm.embedding_renorm_,
    "row_adam_": row_steps.row_adam_,
    "row_adam_catch_up_": adam_catch_up.row_adam_catch_up_,
    "row_adagrad_": row_steps.row_adagrad_,
    "row_rowwise_adagrad_": rowwise_adagrad.row_rowwise_adagrad_,
    "row_sgd_": row_steps.row_sgd_,
    "grad_check_": grad_check.grad_check_,
    "row_grad_check_": grad_check.row_grad_check_,
    "boundary_gradient": grad_check.boundary_gradient,
    "scale_update_": grad_check.scale_update_,
}
