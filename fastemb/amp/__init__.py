"""Loss scaling that treats the gradients of embeddings separately.

`GradScaler` is a `torch.amp.GradScaler`; without scale groups it does the same, bit for bit.
"""

from __future__ import annotations

from fastemb.amp._groups import GroupConfig
from fastemb.amp.boundary import BoundaryLinear
from fastemb.amp.grad_scaler import GradScaler

__all__ = ["BoundaryLinear", "GradScaler", "GroupConfig"]
