"""Three recommenders in plain torch, as people write them, and batches to train them on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 60
BATCH = 16
Batch = dict[str, Any]


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    """Bags of sparse features, dense features through an MLP, dot products of all pairs."""

    def __init__(self, tables: int = 3, dim: int = 8) -> None:
        super().__init__()
        self.bottom = _mlp(4, 16, dim)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(ROWS, dim, mode="sum", padding_idx=0) for _ in range(tables)
        )
        pairs = (tables + 1) * tables // 2
        self.top = _mlp(dim + pairs, 16, 1)

    def forward(self, batch: Batch) -> Tensor:
        dense = self.bottom(batch["dense"])
        bags = zip(self.tables, batch["bags"], strict=True)
        vectors = torch.stack([dense, *(table(*bag) for table, bag in bags)], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        i, j = torch.tril_indices(*products.shape[1:], offset=-1)
        return self.top(torch.cat([dense, products[:, i, j]], dim=1)).squeeze(1)


class DeepFM(nn.Module):
    """A factorization machine and an MLP over the same embeddings of one id per field."""

    def __init__(self, fields: int = 4, dim: int = 6) -> None:
        super().__init__()
        self.first_order = nn.Embedding(fields * ROWS, 1)
        self.factors = nn.Embedding(fields * ROWS, dim)
        self.deep = _mlp(fields * dim, 16, 1)
        self.register_buffer("field_start", torch.arange(fields) * ROWS)

    def forward(self, batch: Batch) -> Tensor:
        ids = batch["fields"] + self.field_start
        factors = self.factors(ids)
        square_of_sum = factors.sum(1).square()
        interaction = (square_of_sum - factors.square().sum(1)).sum(1) / 2
        deep = self.deep(factors.flatten(1)).squeeze(1)
        return self.first_order(ids).sum((1, 2)) + interaction + deep


class TwoTower(nn.Module):
    """User and item towers; the history of a user is a bag over the table of the items."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.user = nn.ModuleDict(
            {
                "id": nn.Embedding(ROWS, dim, padding_idx=-1),
                "history": nn.EmbeddingBag(ROWS, dim, mode="mean"),
            }
        )
        self.item = nn.Sequential(nn.Embedding(ROWS, dim), nn.Linear(dim, dim))
        self.user["history"].weight = self.item[0].weight
        self.user_tower = _mlp(2 * dim, 16, dim)

    def forward(self, batch: Batch) -> Tensor:
        user = torch.cat(
            [self.user["id"](batch["user"]), self.user["history"](*batch["bags"][0])], dim=1
        )
        return (self.user_tower(user) * self.item(batch["item"])).sum(1)


MODELS: dict[str, type[nn.Module]] = {"dlrm": DLRM, "deepfm": DeepFM, "two_tower": TwoTower}


def batches(count: int, seed: int = 0) -> Iterator[Batch]:
    """Ids are skewed, bags have 0 to 6 ids; the label is a coin weighted by two of the ids."""
    generator = torch.Generator().manual_seed(seed)

    def ids(*shape: int) -> Tensor:
        skewed = torch.rand(*shape, generator=generator) ** 3
        return (skewed * ROWS).long()

    for _ in range(count):
        bags = []
        for _ in range(3):
            lengths = torch.randint(0, 7, (BATCH,), generator=generator)
            offsets = lengths.cumsum(0) - lengths
            bags.append((ids(int(lengths.sum())), offsets))
        user, item = ids(BATCH), ids(BATCH)
        likes = ((user + item) % 2).float() * 0.8 + 0.1
        yield {
            "dense": torch.randn(BATCH, 4, generator=generator),
            "bags": bags,
            "fields": ids(BATCH, 4),
            "user": user,
            "item": item,
            "label": torch.bernoulli(likes, generator=generator),
        }


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], data: list[Batch]) -> Tensor:
    """One step per batch; the losses."""
    losses = []
    for batch in data:
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)
