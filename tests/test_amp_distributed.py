"""`fastemb.amp.GradScaler` in two processes that agree on what to skip."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastemb
from fastemb import optim
from fastemb.amp import GradScaler

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.slow,
]


def _worker(rank: int, work: Callable[..., Any], path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    try:
        torch.save(work(rank), f"{path}/{rank}")
    finally:
        dist.destroy_process_group()


def run(work: Callable[..., Any]) -> list[Any]:
    """What ``work(rank)`` returns in each of two processes."""
    with tempfile.TemporaryDirectory() as path:
        torch.multiprocessing.spawn(_worker, (work, path), nprocs=2)
        return [torch.load(f"{path}/{rank}") for rank in range(2)]


class Model(nn.Module):
    def __init__(self, scaler: GradScaler, sparse: bool | str) -> None:
        super().__init__()
        self.scaler = scaler
        self.table = fastemb.nn.EmbeddingBag(8, 4, sparse=sparse, mode="sum")
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        vectors = self.table(ids)
        return self.head(self.scaler.boundary(vectors, "embedding"))


def with_ddp(rank: int) -> Any:
    torch.manual_seed(0)
    scaler = GradScaler("cpu", init_scale=2.0**6, process_group=dist.group.WORLD)
    model = DistributedDataParallel(Model(scaler, sparse=False))
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    scaler.register(model, optimizer)
    skips = []
    for number in range(4):
        ids = torch.randint(
            0, 8, (4, 2), generator=torch.Generator().manual_seed(2 * number + rank)
        )
        optimizer.zero_grad()
        # Only the second process has a bad batch.
        factor = float("inf") if (number, rank) == (1, 1) else 1.0
        scaler.scale((model(ids) * factor).sum()).backward()
        scaler.step(optimizer)
        skips.append(scaler.step_was_skipped(optimizer))
        scaler.update()
    names = sorted(scaler.stats()["gradients"])
    return [p.detach() for p in model.parameters()], skips, scaler.state_dict(), names


def test_distributed_data_parallel() -> None:
    (params, skips, state, names), (others, *rest) = run(with_ddp)
    assert [skips, state, names] == rest
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        assert torch.isfinite(p).all()
    assert skips == [False, True, False, False]
    assert names == ["head.bias", "head.weight", "table.weight"]
    assert state["fastemb"]["groups"]["embedding"]["scale"] == 2.0**6
    assert state["scale"] == 2.0**5


def with_own_tables(rank: int) -> Any:
    """Row gradients that nobody reduces, and an optimizer without gradients in one process."""
    torch.manual_seed(0)
    scaler = GradScaler("cpu", init_scale=2.0**6, process_group=dist.group.WORLD)
    model = Model(scaler, sparse="fused")
    lone = nn.Parameter(torch.ones(2))
    optimizers = [optim.Adam(model.parameters(), lr=0.1), torch.optim.SGD([lone], lr=0.1)]
    skips = []
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(torch.tensor([[1, 2], [3, 3]])).sum()
        if rank == 1:
            loss = loss + lone.sum()
        scaler.scale(loss).backward()
        if (number, rank) == (1, 0):
            model.head.weight.grad.fill_(float("nan"))
        if (number, rank) == (2, 1):
            lone.grad.fill_(float("nan"))
        for optimizer in optimizers:
            scaler.step(optimizer)
        skips.append([scaler.step_was_skipped(o) for o in optimizers])
        scaler.update()
    return skips, scaler.state_dict(), lone.detach()


def test_gradients_that_are_not_reduced() -> None:
    results = run(with_own_tables)
    assert results[0][:2] == results[1][:2]
    assert results[0][0] == [[False, False], [True, False], [False, True]]
    assert results[0][1]["scale"] == 2.0**4
    assert results[0][2].tolist() == [1.0, 1.0]
    assert results[1][2].tolist() == pytest.approx([0.8, 0.8])


def with_low_precision(rank: int) -> Any:
    model = nn.ModuleDict({"table": fastemb.nn.Embedding(4, 2, dtype=torch.float16)})
    scaler = GradScaler("cpu")
    scaler.register(model)
    with pytest.raises(ValueError, match=r"table.weight is torch.float16 .* cannot reduce"):
        scaler.register(DistributedDataParallel(model))
    return True


def test_low_precision_tables_are_refused() -> None:
    assert run(with_low_precision) == [True, True]
