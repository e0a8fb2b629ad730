"""Gradients of several backwards under `fastemb.amp.GradScaler`: one scale, or a refusal."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from optim_cases import assert_same_bits, bits, snapshot
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastemb
from fastemb import optim
from fastemb.amp import GradScaler, GroupConfig

INF = float("inf")
CHANGED = "has the gradients of losses with two scales: some are from before an update"


def layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(2, 1), nn.Linear(2, 1)


X = torch.ones(3, 2)


@pytest.mark.parametrize("make", [optim.Adam, torch.optim.Adam])
def test_accumulation(make: Any) -> None:
    """The scale stands still between updates, whatever overflows."""
    runs = []
    for enabled in (True, False):
        torch.manual_seed(0)
        table = fastemb.nn.EmbeddingBag(6, 2, sparse=make is optim.Adam)
        head = nn.Linear(2, 1)
        optimizer = make([*table.parameters(), *head.parameters()], lr=0.1)
        scaler = GradScaler("cpu", growth_interval=1, enabled=enabled)
        for number in range(6):
            ids = torch.randint(0, 6, (4, 2))
            scaler.scale(head(table(ids)).square().mean() / 3).backward()
            if number % 3 == 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_an_overflow_in_one_of_several_backwards() -> None:
    """The boundary's flags last until the update, although the gradient is finite again."""
    scaler = GradScaler("cpu", init_scale=4.0)
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p])
    for factor in (INF, 1.0):
        scaler.scale((scaler.boundary(p * 1.0, "aux") * factor).sum()).backward()
        if factor == INF:
            p.grad.zero_()
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    scaler.update()
    groups = scaler.stats()["groups"]
    assert (groups["root"]["found_inf"], groups["aux"]["found_inf"]) == (True, False)


@pytest.mark.parametrize("how", ["another optimizer", "unscale_", "new scale"])
@pytest.mark.parametrize("registered", [False, True])
def test_accumulation_over_a_change_of_scale(how: str, registered: bool) -> None:
    one, other = layers()
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    optimizers = [optim.SGD(m.parameters()) for m in (one, other)]
    model = nn.ModuleDict({"one": one, "other": other})
    if registered:
        scaler.register(model, *optimizers)
    else:  # seen in an iteration before
        scaler.scale(torch.zeros(()))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    scaler.scale((one(X) + other(X)).sum()).backward()
    if how == "another optimizer":
        scaler.step(optimizers[1])
        optimizers[1].zero_grad()
        scaler.update()
    elif how == "unscale_":
        scaler.unscale_(optimizers[0])
        scaler.update()
    else:
        scaler.update(2.0)
        optimizers[1].zero_grad()
    name = "one.(weight|bias)" if registered else "parameter . of shape"
    if how != "unscale_":
        scaler.scale(other(X).sum()).backward()  # reaches none of them
    scaler.scale(one(X).sum()).backward()
    for use in (scaler.unscale_, scaler.step, partial(scaler.clip_grad_norm_, max_norm=1.0)):
        with pytest.raises(RuntimeError, match=f"^GradScaler.*: {name}.* {CHANGED}"):
            use(optimizers[0])
    one.zero_grad()
    other.zero_grad(set_to_none=False)
    scaler.scale((one(X) + other(X)).sum()).backward()
    assert_same_bits(one.bias.grad, torch.tensor([3.0 * scaler.get_scale()]))
    scaler.step(optimizers[0])
    scaler.update()
    scaler.scale(one(X).sum())  # used by a step: as without a scaler


def test_accumulation_over_an_update_that_changed_nothing() -> None:
    one, other = layers()
    plain = copy.deepcopy(one)
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizers = [optim.SGD(m.parameters()) for m in (one, other)]
    scaler.register(one, *optimizers)
    for _ in range(3):
        scaler.scale((one(X) + other(X)).sum()).backward()
        scaler.step(optimizers[1])
        scaler.update()
        plain(X).sum().backward()
    scaler.step(optimizers[0])
    optim.SGD(plain.parameters()).step()
    for p, q in zip(one.parameters(), plain.parameters(), strict=True):
        assert_same_bits(p, q)


def test_accumulation_onto_what_was_unscaled() -> None:
    """The scale is as it was, but the gradients have lost it."""
    one, _ = layers()
    scaler = GradScaler("cpu", init_scale=4.0)
    optimizer = optim.SGD(one.parameters())
    scaler.scale(one(X).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    scaler.scale(one(X).sum()).backward()
    with pytest.raises(RuntimeError, match=CHANGED):
        scaler.step(optimizer)


def test_scales_of_groups_and_gradients_from_before() -> None:
    """Only the group's scale counts, and a parameter may not come to another group meanwhile."""
    scaler = GradScaler("cpu", init_scale=4.0, groups={"aux": {}})
    one, other = layers()
    optimizers = [optim.SGD(m.parameters()) for m in (one, other)]
    scaler.register(one, *optimizers)
    scaler.scale((scaler.boundary(one(X), "aux") + other(X)).sum()).backward()
    other.weight.grad.fill_(INF)
    scaler.step(optimizers[1])
    scaler.update()
    optimizers[1].zero_grad()
    assert scaler.get_scale() == 2.0
    scaler.scale(scaler.boundary(one(X), "aux").sum()).backward()
    scaler.step(optimizers[1])
    scaler.update(4.0)
    scaler.update(2.0)
    scaler.scale(one(X).sum()).backward()
    with pytest.raises(RuntimeError, match=CHANGED):
        scaler.step(optimizers[0])


def test_queued_rows_from_before() -> None:
    table = fastemb.nn.EmbeddingBag(6, 2, sparse="fused", mode="sum")
    head = nn.Linear(2, 1)
    scaler = GradScaler("cpu", growth_interval=1)
    optimizers = [optim.SGD(m.parameters()) for m in (table, head)]
    scaler.register(nn.ModuleDict({"table": table, "head": head}), *optimizers)
    ids = torch.tensor([[1, 2]])
    scaler.scale(head(table(ids)).sum()).backward()
    scaler.step(optimizers[1])
    scaler.update()
    optimizers[1].zero_grad()
    scaler.scale(head(table(ids)).sum()).backward()
    with pytest.raises(RuntimeError, match=f"table.weight {CHANGED}"):
        scaler.step(optimizers[0])
    optimizers[0].zero_grad()
    scaler.scale(head(table(ids)).sum()).backward()
    scaler.step(optimizers[0])


def test_gradients_of_alternating_optimizers() -> None:
    """As with a GAN: what the other's loss leaves behind is cleared before it would count."""
    one, other = layers()
    scaler = GradScaler("cpu", growth_interval=1)
    optimizers = [optim.SGD(m.parameters()) for m in (one, other)]
    for _ in range(3):
        for optimizer in optimizers:
            for o in optimizers:
                o.zero_grad(set_to_none=False)
            scaler.scale((one(X) * other(X)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()


def test_gradients_that_are_thrown_away() -> None:
    """A critic's loss reaches the generator, whose own step begins with a zero_grad()."""
    trained = []
    for enabled in (True, False):
        generator, critic = (nn.Linear(2, n) for n in (2, 1))
        torch.manual_seed(0)
        for p in (*generator.parameters(), *critic.parameters()):
            nn.init.normal_(p)
        slow, fast = (optim.SGD(m.parameters(), lr=0.01) for m in (generator, critic))
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2, enabled=enabled)
        for number in range(12):
            fast.zero_grad()
            scaler.scale(critic(generator(X)).sum()).backward()
            scaler.step(fast)
            if number % 3 == 2:
                slow.zero_grad(set_to_none=number % 2 == 0)
                scaler.scale(-critic(generator(X)).sum()).backward()
                scaler.step(slow)
            scaler.update()
        trained.append([bits(p.detach()) for p in generator.parameters()])
    assert trained[0] == trained[1]


@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD, partial(torch.optim.SGD, fused=True)])
@pytest.mark.parametrize("how", ["step", "unscale_", "clip_grad_norm_", "unscaled before"])
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("group", ["root", "aux"])
def test_an_update_after_the_step_of_each_optimizer(
    group: str, overflow: bool, how: str, make: Any
) -> None:
    """A gradient that waits is unscaled by the scale that its loss had."""
    one, other = layers()
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    if group == "aux":
        scaler._declare("aux", GroupConfig(init_scale=4.0, growth_interval=1))
    optimizers = [make(m.parameters(), lr=1.0) for m in (one, other)]
    scaler.register(nn.ModuleList([one, other]), *optimizers)
    before = other.bias.item()

    def waiting() -> torch.Tensor:
        y = other(X)
        return (scaler.boundary(y, group) if group == "aux" else y).mean()

    scaler.scale(one(X).mean() * (INF if overflow else 1.0)).backward()
    scaler.scale(waiting()).backward()
    if how == "unscaled before":
        scaler.unscale_(optimizers[1])
    for _ in range(2):  # the second loss does not reach what waits
        scaler.step(optimizers[0])
        scaler.update()
        one.zero_grad()
        scaler.scale(one(X).mean()).backward()
    if how == "unscale_":
        scaler.unscale_(optimizers[1])
    elif how == "clip_grad_norm_":
        assert scaler.clip_grad_norm_(optimizers[1], 9.0).item() == pytest.approx(3.0**0.5)
    scaler.step(optimizers[1])
    assert before - other.bias.item() == pytest.approx(1.0)
    scaler.update()
    other.zero_grad()
    scaler.scale(waiting()).backward()
    scaler.step(optimizers[1])
    assert before - other.bias.item() == pytest.approx(2.0)


@pytest.mark.parametrize("sparse", [True, "fused"])
def test_rows_that_wait_over_an_update(sparse: bool | str) -> None:
    """Also once a pass has summed them or made FP32 ones of them."""
    table = fastemb.nn.EmbeddingBag(6, 2, sparse=sparse, mode="sum", dtype=torch.float16)
    nn.init.ones_(table.weight)
    head = nn.Linear(2, 1)
    scaler = GradScaler("cpu", init_scale=64.0, groups={"aux": {"init_scale": 4.0}})
    optimizers = [optim.SGD(m.parameters(), lr=0.5) for m in (table, head)]
    scaler.register(nn.ModuleList([table, head]), *optimizers)
    scaler.scale(scaler.boundary(table(torch.tensor([[1, 1, 2]])).float(), "aux").sum()).backward()
    for _ in range(2):
        optimizers[1].zero_grad()
        scaler.scale(head(X).sum() * INF).backward()
        scaler.clip_grad_norm_(optimizers[0], 100.0)
        scaler.step(optimizers[1])
        scaler.update()
    scaler.unscale_(optimizers[0])
    scaler.step(optimizers[0])
    assert table.weight[:, 0].tolist() == [1.0, 0.0, 0.5, 1.0, 1.0, 1.0]


def test_zeroed_gradients_that_a_loss_reaches_unseen() -> None:
    """Reentrant checkpointing hides the parameters, whose gradients stay the same objects."""
    one, other = layers()
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizers = [optim.SGD(m.parameters(), lr=1.0) for m in (one, other)]
    scaler.register(nn.ModuleList([one, other]), *optimizers)
    scaler.scale((one(X) + other(X)).mean()).backward()
    scaler.step(optimizers[0])
    scaler.update()
    other.zero_grad(set_to_none=False)
    before = other.bias.item()
    x = X.clone().requires_grad_()
    scaler.scale(checkpoint(other, x, use_reentrant=True).mean()).backward()
    scaler.step(optimizers[1])
    assert before - other.bias.item() == pytest.approx(1.0)
