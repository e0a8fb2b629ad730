"""Every operator of this backend, by its name in ``fastemb/_ops.py`` and with its arguments.

Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastemb.triton import embedding_bag, embedding_bag_backward, renorm

KERNELS: dict[str, Callable[..., Any]] = {
    "embedding": embedding_bag.embedding,
    "embedding_bag": embedding_bag.embedding_bag,
    "group_indices": embedding_bag_backward.group_indices,
    "embedding_bag_backward": embedding_bag_backward.embedding_bag_backward,
    "embedding_bag_per_sample_weights_backward": (
        embedding_bag_backward.embedding_bag_per_sample_weights_backward
    ),
    "embedding_renorm_": renorm.embedding_renorm_,
}
