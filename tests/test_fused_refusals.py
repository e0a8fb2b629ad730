"""What cannot be had with ``sparse="fused"`` says so, by the name of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_cases import DIM, ROWS, _no_queue_is_left, same, waiting  # noqa: F401
from optim_cases import CLASSES, snapshot
from torch import nn

import fastemb
from fastemb import functional as F
from fastemb import nn as fnn
from fastemb import optim

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:fastemb.optim.*rows that a sparse gradient"),
]
IDS = torch.tensor([[1, 2], [5, 1]])


def bag(**options: Any) -> fnn.EmbeddingBag:
    return fnn.EmbeddingBag(ROWS, DIM, mode="sum", sparse="fused", table="user", **options)


def test_values_of_sparse() -> None:
    message = "sparse must be True, False or 'fused', got 'rows'"
    with pytest.raises(TypeError, match=f"EmbeddingBag: {message}"):
        fnn.EmbeddingBag(3, 2, sparse="rows")
    with pytest.raises(TypeError, match=f"Embedding: {message}"):
        fnn.Embedding.from_pretrained(torch.zeros(3, 2), sparse="rows")
    with pytest.raises(TypeError, match=f"embedding: {message}"):
        F.embedding(torch.tensor([1]), torch.zeros(3, 2), sparse="rows")
    with pytest.raises(TypeError, match=f"embedding_bag: {message}"):
        F.embedding_bag(torch.tensor([[1]]), torch.zeros(3, 2), sparse="rows")
    with pytest.raises(TypeError, match="sparse must be True, False, 'fused' or None, got 'rows'"):
        fastemb.convert(nn.Embedding(3, 2), sparse="rows")


@pytest.mark.parametrize("cls", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.AdamW])
def test_other_optimizers(cls: type[torch.optim.Optimizer]) -> None:
    module = nn.Sequential(bag(), nn.Linear(DIM, 1))
    optimizer = cls(module.parameters(), lr=0.1)
    before = module[0].weight.detach().clone(), module[1].weight.detach().clone()
    module(IDS).sum().backward()
    with pytest.raises(RuntimeError, match=rf"{cls.__name__}: table 'user' has .*fastemb\.optim"):
        optimizer.step()
    assert same(module[0].weight, before[0])
    assert same(module[1].weight, before[1])
    optim.SGD(module.parameters()).zero_grad()
    optimizer.step()  # nothing waits any more


def test_other_optimizers_of_other_tables() -> None:
    """Only parameters of that optimizer count."""
    module = bag()
    module(IDS).sum().backward()
    other = nn.Linear(2, 1)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters()).step()
    assert waiting(module) == 1


@pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed")
def test_a_table_that_fully_shard_has_taken() -> None:
    """Its lookups read another parameter than the optimizer has, which would never see a step."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Sequential(bag(), nn.Linear(DIM, 1))
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
        module(IDS).sum().backward()
        for cls in (optim.SGD, torch.optim.SGD):
            optimizer = cls(module.parameters(), lr=0.1)
            with pytest.raises(RuntimeError, match=r"table 'user' .* fully_shard .* sparse=False"):
                optimizer.step()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
def test_torchs_scaler(cls: type[optim.Adam], head: bool, unscale: bool) -> None:
    module = nn.Sequential(bag(), nn.Linear(DIM, 1)) if head else nn.Sequential(bag())
    optimizer = cls(module.parameters(), lr=0.1)
    before = snapshot(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(module(IDS).sum()).backward()
    if unscale:
        scaler.unscale_(optimizer)
    message = f"{cls.__name__}: torch.amp.GradScaler sees no gradient of table 'user'"
    with pytest.raises(RuntimeError, match=message):
        scaler.step(optimizer)
    assert snapshot(optimizer) == before
    assert waiting(module[0]) == 1


def test_a_disabled_scaler_is_none() -> None:
    module = bag()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(module(IDS).sum()).backward()
    scaler.step(optimizer)
    assert waiting(module) == 0


@pytest.mark.parametrize("cls", CLASSES)
def test_a_gradient_from_elsewhere(cls: type[optim.Adam]) -> None:
    """Also of a later parameter, and before an earlier one is updated."""
    first, module = nn.Linear(1, 1), bag()
    optimizer = cls([{"params": first.parameters()}, {"params": module.parameters()}], lr=0.1)
    before = snapshot(optimizer)
    first(torch.ones(1, 1)).sum().backward()
    module(IDS).sum().backward()
    module.weight.square().sum().backward()
    with pytest.raises(RuntimeError, match=f"{cls.__name__}: table 'user' has .* and a .grad"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: table 'user' has .* and a .grad"):
        optim.clip_grad_norm_([*first.parameters(), module.weight], 1.0)
    assert snapshot(optimizer) == before
    optimizer.zero_grad()
    module(IDS).sum().backward()
    optimizer.step()


def test_a_gradient_that_was_changed() -> None:
    first, module = nn.Linear(1, 1), bag()
    optimizer = optim.SGD([*first.parameters(), module.weight], lr=0.1)
    before = snapshot(optimizer)
    grad = torch.ones(2, DIM)
    module(IDS).backward(grad)
    first(torch.ones(1, 1)).sum().backward()
    grad.zero_()
    with pytest.raises(RuntimeError, match=r"a lookup in table 'user' was changed in place"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"a lookup in table 'user' was changed in place"):
        optim.clip_grad_norm_([module.weight], 1.0)
    assert snapshot(optimizer) == before


def test_gradients_that_others_accumulate_in_place_are_their_own() -> None:
    """Autograd gives one tensor to all summands, and may keep it as the .grad of one of them."""
    row = fnn.Embedding(ROWS, DIM, sparse="fused")
    flat, square = nn.Parameter(torch.zeros(4 * DIM)), nn.Parameter(torch.zeros(4, DIM))
    optimizer = optim.SGD([row.weight, flat, square], lr=1.0)
    before = row.weight.detach().clone()
    ids = torch.arange(4)
    for _ in range(2):
        ((row(ids).view(-1) + flat).view(4, DIM) + square).sum().backward()
        for parameter in (flat, square):
            parameter.grad.mul_(0.5)
    optimizer.step()
    assert same(row.weight[:4], before[:4] - 2)


def call_grad(inputs: Callable[[fnn.EmbeddingBag], list[Any]], **options: Any) -> Any:
    module = bag()
    outside = torch.ones(2, DIM, requires_grad=True)
    module.outside = outside
    result = torch.autograd.grad((module(IDS) * outside).sum(), inputs(module), **options)
    assert waiting(module) == 0
    return result


def test_autograd_grad() -> None:
    message = "embedding_bag: torch.autograd.grad cannot return the gradient of table 'user'"
    with pytest.raises(RuntimeError, match=message):
        call_grad(lambda m: [m.weight])
    with pytest.raises(RuntimeError, match=message):
        call_grad(lambda m: [m.outside, m.weight], allow_unused=True)
    assert call_grad(lambda m: [m.outside])[0].shape == (2, DIM)
    call_grad(lambda m: [m.outside], create_graph=True)


def test_backward_with_inputs() -> None:
    """Queued where .grad would be set."""
    module, outside = bag(), torch.ones(2, DIM, requires_grad=True)
    (module(IDS) * outside).sum().backward(inputs=[outside])
    assert waiting(module) == 0
    (module(IDS) * outside).sum().backward(inputs=[module.weight])
    assert waiting(module) == 1
    samples = torch.ones(2, 2, requires_grad=True)
    module(IDS, per_sample_weights=samples).sum().backward(inputs=[samples])
    assert waiting(module) == 1
    assert samples.grad is not None


def test_forward_mode() -> None:
    module, one = bag(), torch.ones(DIM)
    with torch.autograd.forward_ad.dual_level():
        loss = (module(IDS) * torch.autograd.forward_ad.make_dual(one, one)).sum()
        with pytest.raises(RuntimeError, match=r"table 'user' .* has no tangent"):
            loss.backward()
    assert waiting(module) == 0


def test_second_derivatives() -> None:
    module = bag()
    with pytest.raises(RuntimeError, match=r"embedding_bag: table 'user' .* \(create_graph=True\)"):
        module(IDS).sum().backward(create_graph=True)
    assert waiting(module) == 0


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks(kind: str) -> None:
    module = bag()
    output = module(IDS)
    handle = getattr(module.weight, kind)(lambda _: None)
    message = "embedding_bag: the weight of table 'user' has hooks"
    with pytest.raises(RuntimeError, match=message):
        module(IDS)
    with pytest.raises(RuntimeError, match=message):
        output.sum().backward()
    assert waiting(module) == 0
    with torch.no_grad():
        module(IDS)
    handle.remove()
    module(IDS).sum().backward()
    assert waiting(module) == 1


def test_weights_that_are_no_leaves() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    with pytest.raises(RuntimeError, match=r"embedding: .* weight must be a leaf, but .*'user'"):
        F.embedding(torch.tensor([1]), weight * 2, sparse="fused", table="user")
    module = bag()
    with pytest.raises(RuntimeError, match="weight must be a leaf"):
        torch.func.functional_call(module, {"weight": module.weight * 2}, (IDS,))
    torch.func.functional_call(module, {"weight": module.weight.detach()}, (IDS,))


def test_transforms() -> None:
    module, head = bag(), nn.Linear(DIM, 1)

    def loss(params: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(head, params, (module(ids),)).sum()

    params = {name: value.detach() for name, value in head.named_parameters()}
    with pytest.raises(NotImplementedError, match=r"table 'user' .*torch\.func"):
        torch.func.grad(loss)(params, IDS)
    module.requires_grad_(False)
    assert torch.func.grad(loss)(params, IDS)["bias"].item() == 2.0


def test_changes_of_the_table_while_gradients_wait() -> None:
    module = nn.ModuleDict({"user": bag()})
    weight = module["user"].weight
    module["user"](IDS).sum().backward()
    text = "lookups in table 'user' with sparse='fused' wait for optimizer.step"
    for change in (module.half, module.double, lambda: module.to("meta")):
        with pytest.raises(RuntimeError, match=f"EmbeddingBag: gradients of {text}"):
            change()
    with pytest.raises(RuntimeError, match=f"convert: gradients of {text}"):
        fastemb.convert(module, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=f"revert: gradients of {text}"):
        fastemb.revert(module)
    assert type(module["user"]) is fnn.EmbeddingBag
    assert module["user"].weight is weight
    assert weight.dtype == torch.float32
    fastemb.convert(module, sparse="fused")
    module["user"].zero_grad()
    assert module.half()["user"].weight.dtype == torch.float16


def test_two_optimizers_of_one_table() -> None:
    module = bag()
    first, second = (optim.SGD(module.parameters(), lr=1.0) for _ in range(2))
    module(IDS).sum().backward()
    first.step()
    before = module.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"another optimizer has consumed .* table 'user'"):
        second.step()
    first.step()  # nothing waits, and nothing is missing
    first.zero_grad()
    second.step()
    assert torch.equal(module.weight, before)
