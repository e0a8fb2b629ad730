"""Optimizers for dense and row-sparse gradients in one step, in any floating dtype.

Drop-in for the classes of the same names in `torch.optim`, and `clip_grad_norm_`.
"""

from __future__ import annotations

from fastemb.optim.adagrad import Adagrad, RowWiseAdagrad
from fastemb.optim.adam import Adam, AdamW, SparseAdam
from fastemb.optim.clip import clip_grad_norm_
from fastemb.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "RowWiseAdagrad",
    "SparseAdam",
    "clip_grad_norm_",
]
