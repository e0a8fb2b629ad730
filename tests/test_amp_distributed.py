"""`fastemb.amp.GradScaler` in two processes that agree on what to skip."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh_process import forkserver
from torch import nn
from torch.multiprocessing import start_processes
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
        start_processes(
            _worker, (work, path), nprocs=2, start_method=forkserver().get_start_method()
        )
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


class Branches:
    """Two parameters, of which one has a group; whether a loss reaches it, a process decides."""

    def __init__(self, skip: Any = "optimizer", **config: Any) -> None:
        self.scaler = GradScaler(
            "cpu", init_scale=2.0**6, groups={"aux": config}, skip=skip,
            process_group=dist.group.WORLD,
        )  # fmt: skip
        self.main, self.aux = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        self.optimizer = optim.SGD([self.main, self.aux], lr=1.0)
        self.scaler.register(nn.ParameterList([self.main, self.aux]), self.optimizer)

    def backward(self, aux: bool) -> None:
        self.optimizer.zero_grad()
        loss = self.main.sum()
        if aux:
            loss = loss + self.scaler.boundary(self.aux * 1.0, "aux").sum()
        self.scaler.scale(loss).backward()

    def step(self) -> list[Any]:
        self.scaler.step(self.optimizer)
        skipped = self.scaler.step_was_skipped(self.optimizer)
        self.scaler.update()
        return [skipped, *map(self.scaler.get_scale, self.scaler.group_names)]


def with_a_branch_in_one_process(rank: int) -> Any:
    results = []
    for skip in ("optimizer", "group", "all"):
        case = Branches(skip, init_scale=4.0, growth_interval=2)
        for number in range(4):
            case.backward(aux=rank == 0)
            if (number, rank) == (3, 0):
                case.aux.grad.fill_(float("inf"))
            results.append(case.step())
    return results


def test_a_branch_in_one_process(differing: dict[str, list[Any]]) -> None:
    """A group moves everywhere when it was used anywhere."""
    first, second = differing[with_a_branch_in_one_process.__name__]
    assert first == second
    scales = [[2.0**6, 4.0], [2.0**6, 8.0], [2.0**6, 8.0]]
    for skip in range(3):
        *good, last = first[4 * skip : 4 * skip + 4]
        assert good == [[False, *values] for values in scales]
        assert last == [skip != 1, 2.0**6, 4.0]


def _error(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        call(*args)
    return str(caught.value)


def with_other_groups(rank: int) -> Any:
    """In another order, then more of them than the others have."""
    errors = []
    for names in (["aux", "a", "b"][:: 1 - 2 * rank], [f"{n}" for n in range(1 + 9 * rank)]):
        case = Branches()
        for name in names:
            case.scaler._group(name)
        case.backward(aux=False)
        errors.append(_error(case.scaler.step, case.optimizer))
        assert case.main.item() == 0.0
    return errors


def test_groups_that_are_not_the_same(differing: dict[str, list[Any]]) -> None:
    for rank, (order, number) in enumerate(differing[with_other_groups.__name__]):
        assert f"this one has root, aux, {'b, a' if rank else 'a, b'}, another" in order
        assert f"this one has root, aux, 0{', 1, 2' if rank else ', another'}" in number


def with_a_gradient_of_another_process(rank: int) -> Any:
    torch.manual_seed(0)
    case = Branches(init_scale=4.0)
    case.backward(aux=rank == 0)
    if rank == 1:
        case.aux.grad = torch.full((1,), 4.0)  # as DistributedDataParallel leaves it
    errors = [_error(case.scaler.step, case.optimizer) for _ in range(2)]
    assert case.main.item() == case.aux.item() == 0.0
    case.backward(aux=True)
    return errors, case.step(), case.aux.item()


def test_gradients_whose_scale_one_process_does_not_know(differing: dict[str, list[Any]]) -> None:
    """The others learn of it, and the next batch goes on."""
    (first, *rest), (second, *others) = differing[with_a_gradient_of_another_process.__name__]
    assert rest == others == [[False, 2.0**6, 4.0], -1.0]
    assert all("another process of process_group has refused" in error for error in first)
    assert all("1 has a gradient, but no loss" in error for error in second)


def with_other_gradients(rank: int) -> Any:
    """What the processes have must not decide how often they speak to each other."""
    results = []
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float64))
    scaler = GradScaler("cpu", init_scale=2.0**6, process_group=dist.group.WORLD)
    hooked, plain = optim.SGD([a, b], lr=1.0), torch.optim.SGD([b], lr=1.0)
    hooked.register_step_pre_hook(lambda *_: None)
    for optimizer in (hooked, plain):
        scaler.register(nn.ParameterList([a, b]), optimizer)
        for number in range(3):
            hooked.zero_grad()
            loss = a.sum() * (float("inf") if (number, rank) == (1, 0) else 1.0)
            if rank == 0:
                scaler.scale(b.sum()).backward()
            if optimizer is hooked:
                scaler.scale(loss).backward()
                scaler.clip_grad_norm_(optimizer, 9.0)
            else:
                scaler.unscale_(optimizer)
                scaler.scale(loss).backward()  # starts over where no gradient is
            scaler.step(optimizer)
            results.append(scaler.step_was_skipped(optimizer))
            scaler.update()
    return results, scaler.get_scale()


def test_gradients_that_only_one_process_has(differing: dict[str, list[Any]]) -> None:
    first, second = differing[with_other_gradients.__name__]
    assert first == second == ([False, True, False, False, False, False], 2.0**5)


def all_that_differs(rank: int) -> dict[str, Any]:
    works = (
        with_a_branch_in_one_process,
        with_other_groups,
        with_a_gradient_of_another_process,
        with_other_gradients,
    )
    return {work.__name__: work(rank) for work in works}


@pytest.fixture(scope="module")
def differing() -> dict[str, list[Any]]:
    """The results of both processes, which are slow to start."""
    first, second = run(all_that_differs)
    return {name: [result, second[name]] for name, result in first.items()}
