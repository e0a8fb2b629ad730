"""Tables that ``lazy=\"exact\"`` trains: what its tests share."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from optim_cases import coo
from torch import Tensor, nn

from fastemb import nn as fnn
from fastemb import optim
from fastemb._sleeping import TABLES

ROWS, DIM = 60, 5
KINDS = ("Adam", "AdamW")


@pytest.fixture(autouse=True)
def _no_table_is_left() -> Iterator[None]:
    before = set(TABLES)
    yield
    if TABLES.keys() - before:
        gc.collect()
    assert not TABLES.keys() - before


def schedule(step: int, steps: int, top: float) -> float:
    """Warm-up, then half a cosine."""
    warm = steps // 20
    if step < warm:
        return top * (step + 1) / warm
    return top * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def zipf_rows(generator: torch.Generator, num_embeddings: int, count: int) -> Tensor:
    weights = 1.0 / torch.arange(1, num_embeddings + 1, dtype=torch.float64) ** 1.2
    return torch.multinomial(weights, count, replacement=True, generator=generator)


@cache
def gradients(
    steps: int, num_embeddings: int, dim: int, count: int, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Rows and values of each step; the values of a row have a direction and noise."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(num_embeddings, dim, generator=generator)
    scale = 10.0 ** (-4.0 * torch.rand(num_embeddings, 1, generator=generator))
    result = []
    for _ in range(steps):
        rows = zipf_rows(generator, num_embeddings, count).unique()
        noise = torch.randn(len(rows), dim, generator=generator)
        result.append((rows, (bias[rows] + 2 * noise) * scale[rows]))
    return result


def train(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    weight: Tensor,
    batches: list[tuple[Tensor, Tensor]],
    top: float,
    sparse: bool,
    **options: Any,
) -> tuple[Tensor, torch.optim.Optimizer]:
    p = nn.Parameter(weight.clone())
    optimizer = optimizer_class([p], lr=top, **options)
    for step, (rows, values) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = schedule(step, len(batches), top)
        grad = coo(rows.tolist(), values.to(p.dtype), len(p), coalesced=True)
        p.grad = grad if sparse else grad.to_dense()
        optimizer.step()
    if sparse:
        optimizer.flush()
    return p.detach(), optimizer


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Norm of the error, and its maximum over the largest weight."""
    error = got.double() - want
    return error.norm().item(), (error.abs().max() / want.abs().max()).item()


def lookup_step(module: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
    optimizer.zero_grad()
    module(*inputs).square().sum().backward()
    optimizer.step()


def make(
    kind: str = "AdamW", rows: int = ROWS, dim: int = DIM, **options: Any
) -> tuple[fnn.Embedding, optim.Adam]:
    torch.manual_seed(0)
    module = fnn.Embedding(rows, dim, sparse=True, table="users")
    options = {"lr": 0.05, **options}
    return module, getattr(optim, kind)(module.parameters(), lazy="exact", **options)


def asleep(steps: int = 4, **options: Any) -> tuple[fnn.Embedding, optim.Adam]:
    """A table in which all rows have moved once, and rows other than 0 and 1 sleep."""
    module, optimizer = make(**options)
    lookup_step(module, optimizer, torch.arange(ROWS))
    for _ in range(steps):
        lookup_step(module, optimizer, torch.tensor([0, 1]))
    assert sleeping(module) == set(range(2, ROWS))
    return module, optimizer


def sleepers_of(module: nn.Module) -> Any:
    return TABLES[id(module.weight)]


def sleeping(module: nn.Module) -> set[int]:
    sleepers = sleepers_of(module)
    behind = sleepers.state["row_step"] != int(sleepers._history.step)
    return set(behind.nonzero().flatten().tolist())


def flushed_copy(module: nn.Module) -> Tensor:
    """The weights as `flush` would leave them; the table itself goes on sleeping."""
    sleepers = sleepers_of(module)
    twin = copy.copy(sleepers)
    twin.state = {name: value.clone() for name, value in sleepers.state.items()}
    weight = module.weight.detach().clone()
    twin.catch_up(weight, None, None, None)
    return weight
