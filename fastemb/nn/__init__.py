"""Drop-ins for `torch.nn.Embedding` and `torch.nn.EmbeddingBag`."""

from __future__ import annotations

from fastemb.nn.embedding import Embedding
from fastemb.nn.embedding_bag import EmbeddingBag

__all__ = ["Embedding", "EmbeddingBag"]
