"""`fastemb.amp` on every device there is: the same training on the CPU and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import assert_same_bits, bits
from torch import nn

import fastemb
from fastemb import optim
from fastemb.amp import BoundaryLinear, GradScaler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INF = float("inf")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_same_bits_as_torch(device: str, fused: bool) -> None:
    runs = []
    for cls in (torch.amp.GradScaler, GradScaler):
        torch.manual_seed(0)
        layer = nn.Linear(5, 3).to(device)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1, fused=fused)
        scaler = cls(device, init_scale=3000.0, growth_interval=3)
        seen = []
        for number in range(12):
            optimizer.zero_grad()
            x = torch.full((4, 5), 0.1 * number, device=device)
            scaler.scale(layer(x).square().sum() * (INF if number in (0, 5) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((scaler.get_scale(), [bits(p.cpu()) for p in layer.parameters()]))
        runs.append(seen)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sparse", [False, True, "fused"])
def test_a_model_with_groups(device: str, sparse: Any) -> None:
    """fp16 tables and autocast; an overflow in the tower, and one in the table."""
    torch.manual_seed(0)
    table = fastemb.nn.EmbeddingBag(
        20, 8, sparse=sparse, mode="sum", dtype=torch.float16, output_dtype=torch.float32
    )
    model = nn.Sequential(table, BoundaryLinear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
    model.to(device)
    optimizer = optim.Adam(model.parameters(), lr=0.01, lazy="rows")
    scaler = GradScaler(device, init_scale=2.0**8, groups={"embedding": {"init_scale": 2.0**12}})
    scaler.register(model, optimizer)
    ids = torch.randint(0, 20, (16, 4), device=device)
    losses = []
    for number in range(12):
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = (model(ids).float() - 1).square().mean()
        losses.append(float(loss.detach()))
        scaler.scale(loss).backward()
        if number == 2:
            model[3].weight.grad.fill_(INF)
        before = [bits(p.cpu()) for p in model.parameters()]
        norm = scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_was_skipped(optimizer) == (number == 2)
        assert ([bits(p.cpu()) for p in model.parameters()] == before) == (number == 2)
        assert bool(norm.isfinite()) == (number != 2)
    assert losses[-1] < losses[0]
    numbers = scaler.stats(wait=True)
    assert numbers["step"] == 12
    assert numbers["groups"]["root"]["scale"] == 2.0**7
    assert numbers["groups"]["embedding"]["scale"] == 2.0**12
    assert numbers["boundaries"]["1"]["elements"] == 16 * 8
    assert numbers["gradients"]["0.weight"]["group"] == "embedding"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_input_gradient_in_float32(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = BoundaryLinear(16, 24).to(device)
    x = torch.randn(32, 16, device=device).requires_grad_()
    weights = torch.randn(32, 24, device=device).to(dtype)
    with torch.autocast(device, dtype):
        y = layer(x)
    y.backward(weights)
    want = weights.double() @ layer.weight.detach().to(dtype).double()
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, want.float(), rtol=1e-5, atol=1e-5)
    assert not (x.grad.to(dtype).float() == x.grad).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_on_the_cpu_and_layers_elsewhere(device: str) -> None:
    torch.manual_seed(0)
    table, head = fastemb.nn.Embedding(6, 4, sparse=True), nn.Linear(4, 1).to(device)
    optimizer = optim.SGD([*table.parameters(), *head.parameters()], lr=0.5)
    scaler = GradScaler(device, init_scale=2.0**4)
    for number in range(4):
        optimizer.zero_grad()
        vectors = table(torch.tensor([1, 2, 2]))
        loss = head(vectors.to(device)).sum()
        scaler.scale(loss).backward()
        if number == 0:
            head.weight.grad.fill_(INF)
        elif number == 2:
            table.weight.grad._values().fill_(INF)
        before = [p.detach().clone() for p in (*table.parameters(), *head.parameters())]
        scaler.step(optimizer)
        scaler.update()
        skipped = number in (0, 2)
        assert scaler.step_was_skipped(optimizer) == skipped
        if skipped:
            for p, q in zip((*table.parameters(), *head.parameters()), before, strict=True):
                assert_same_bits(p.detach().cpu(), q.cpu())
    assert scaler.get_scale() == 4.0
