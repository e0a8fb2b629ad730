"""Gradient scalers, skipped steps, and clipping within the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import CLASSES, assert_same_bits, bits, coo, random_rows, snapshot
from torch import Tensor, nn

import fastemb
from fastemb import optim

KINDS = {
    "dense float32": (torch.float32, False),
    "dense float64": (torch.float64, False),
    "dense bfloat16": (torch.bfloat16, False),
    "rows float32": (torch.float32, True),
    "rows float16": (torch.float16, True),
}
OPTIONS: dict[type, dict[str, Any]] = {
    optim.Adam: {"row_bias_correction": True, "amsgrad": True},
    optim.AdamW: {"weight_decay": 0.1},
    optim.SGD: {"momentum": 0.9, "dampening": 0.1},
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(6, 4, generator=generator).to(dtype))
        for dtype, _ in KINDS.values()
    ]


def set_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param, (dtype, sparse) in zip(params, KINDS.values(), strict=True):
        if sparse:
            grad = random_rows(generator, 6, 4, 5, torch.float32) * scale
        else:
            grad = torch.randn(6, 4, generator=generator) * scale
        param.grad_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        param.grad = grad.double() if dtype == torch.float64 else grad


def step(optimizer: torch.optim.Optimizer, scale: float | None, found_inf: float) -> None:
    """What `torch.amp.GradScaler.step` does."""
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    optimizer.found_inf = torch.tensor(found_inf)
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("found_inf", [1.0, 2.0, float("nan")])
def test_skipped_steps_change_nothing(cls: type[optim.Adam], found_inf: float) -> None:
    """Also the very first ones; later steps are those of a run without the skipped ones."""
    options = OPTIONS.get(cls, {})
    runs = []
    for skips in (True, False):
        params = parameters()
        optimizer = cls(params, lr=0.1, **options)
        for number in range(3):
            if skips:
                for _ in range(2):
                    set_gradients(params, 100, float("inf"))
                    before = [bits(p) for p in params]
                    states = snapshot(optimizer)
                    step(optimizer, 1024.0, found_inf)
                    assert [bits(p) for p in params] == before
                    if number > 0:
                        assert snapshot(optimizer) == states
                    for param in params:
                        assert float(optimizer.state[param]["step"]) == number
            set_gradients(params, number, 1024.0)
            step(optimizer, 1024.0, 0.0)
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("cls", CLASSES)
def test_scale_makes_no_difference(cls: type[optim.Adam]) -> None:
    """A power of two: the same bits with and without, and after an explicit unscale_."""
    runs = []
    for how in ("plain", "in step", "unscale_"):
        params = parameters()
        optimizer = cls(params, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=how != "plain")
        scaler.scale(torch.zeros(1))
        for number in range(3):
            set_gradients(params, number, 1.0 if how == "plain" else 256.0)
            if how == "unscale_":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("explicit", [{"foreach": True}, {"foreach": False}, {"fused": False}])
@pytest.mark.parametrize("cls", [optim.Adam, optim.Adagrad, optim.SGD])
def test_torchs_unfused_kernels_follow_the_scaler_too(
    cls: type[optim.Adam], explicit: dict[str, bool]
) -> None:
    more = {"momentum": 0.9, "dampening": 0.1} if cls is optim.SGD else {}
    params = parameters()[:2], parameters()[:2]
    scaled, plain = (cls(p, lr=0.1, **explicit, **more) for p in params)
    for number in range(3):
        for group in params:
            set_gradients([*group, *parameters()[2:]], number)
        for param in params[0]:
            param.grad *= 8.0
        grads = [bits(p.grad) for p in params[0]]
        step(scaled, 8.0, 1.0)
        step(scaled, 8.0, 0.0)
        plain.step()
        assert [bits(p.grad) for p in params[0]] == grads
    for p, q in zip(*params, strict=True):
        assert_same_bits(p, q)


@pytest.mark.parametrize("cls", CLASSES)
def test_scales_and_flags_of_single_parameters(cls: type[optim.Adam]) -> None:
    params, others = parameters(), parameters()
    optimizer, reference = cls(params, lr=0.1), cls(others, lr=0.1)
    skipped = {0, 3}
    for number in range(2):
        set_gradients(params, number)
        set_gradients(others, number)
        flags = {}
        for index, param in enumerate(params):
            scale = 2.0 ** (index + 1)
            param.grad = param.grad * scale
            flag = torch.tensor(3.0 if index in skipped else 0.0)
            flags[param] = (torch.tensor(1 / scale), flag)
        del flags[params[1]]  # this one goes by the common scale
        optimizer._param_scaling = flags
        step(optimizer, 4.0, 0.0)
        optimizer._param_scaling = None
        for index in skipped:
            others[index].grad = None
        reference.step()
    for index, (p, q) in enumerate(zip(params, others, strict=True)):
        assert_same_bits(p, q)
        if index in skipped:
            assert float(optimizer.state[p].get("step", 0)) == 0


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("scale", [None, 16.0])
def test_clip_coefficient(cls: type[optim.Adam], scale: float | None) -> None:
    params, others = parameters(), parameters()
    optimizer, reference = cls(params, lr=0.1), cls(others, lr=0.1)
    for number in range(2):
        set_gradients(params, number, scale or 1.0)
        set_gradients(others, number)
        optimizer._clip_coefficient = torch.tensor(0.25)
        step(optimizer, scale, 0.0)
        for param in others:
            param.grad = param.grad * 0.25
        reference.step()
    assert snapshot(optimizer) == snapshot(reference)


def test_scaler_of_torch_on_a_whole_model() -> None:
    """fp16 tables beside fp32 layers; overflows at the first and at a later step."""
    torch.manual_seed(0)
    table = fastemb.nn.EmbeddingBag(20, 4, sparse=True, dtype=torch.float16)
    head = nn.Linear(4, 1)
    params = [*table.parameters(), *head.parameters()]
    optimizer = optim.Adam(params, lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    ids = torch.randint(0, 20, (16, 3))
    losses = []
    for number in range(40):
        optimizer.zero_grad()
        loss = (head(table(ids).float()) - 1).square().mean()
        losses.append(loss.item())
        factor = float("inf") if number in (0, 7) else 1.0
        before = [bits(p) for p in params]
        scaler.scale(loss * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert ([bits(p) for p in params] == before) == (number in (0, 7))
    assert scaler.get_scale() == 2.0**10
    assert losses[-1] < losses[0] / 20
    assert all(float(optimizer.state[p]["step"]) == 38 for p in params)


def test_no_gradients_at_all() -> None:
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([p])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    scaler.step(optimizer)
    assert bits(p) == bits(torch.ones(2))


@pytest.mark.parametrize("decay", ["touched", "all"])
def test_values_overflow_only_when_scaled_rows_are_summed(decay: str) -> None:
    p = nn.Parameter(torch.zeros(4, 2))
    optimizer = optim.SGD([p], lr=1.0, decay=decay)
    p.grad = coo([1, 1], torch.full((2, 2), 3e38), 4)
    step(optimizer, 2.0**100, 0.0)
    expected = torch.zeros(4, 2)
    expected[1] = -float(torch.tensor(3e38)) * 2.0**-99
    assert_same_bits(p, expected)


@pytest.mark.parametrize("cls", CLASSES)
def test_sums_of_rows_as_on_a_device(
    monkeypatch: pytest.MonkeyPatch, cls: type[optim.Adam]
) -> None:
    """With room for more rows than there are, as where their number may not be read."""
    runs = []
    for on_host in (True, False):
        monkeypatch.setattr("fastemb.optim._gradients.on_host", lambda _, on_host=on_host: on_host)
        params = parameters()
        optimizer = cls(params, lr=0.1)
        for number in range(3):
            set_gradients(params, number, 8.0)
            step(optimizer, 8.0, 0.0)
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_step_reads_no_flag_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and flagged sorted rows: nothing is read that a GPU would have to be waited for."""
    params = parameters()
    optimizer = optim.Adam(params, lr=0.1)
    set_gradients(params, 0)
    step(optimizer, 8.0, 0.0)
    for param in params:
        if param.grad.is_sparse:
            param.grad = coo([1, 3], torch.ones(2, 4), 6, coalesced=True)

    def fail(*_: Any) -> None:
        raise AssertionError("the host has read a tensor")

    monkeypatch.setattr("fastemb.optim._gradients.on_host", lambda _: False)
    operator = torch.ops.fastemb.row_adam_
    calls = []
    monkeypatch.setattr(
        torch.ops.fastemb, "row_adam_", lambda *args: calls.append((operator, args))
    )
    for name in ("item", "__bool__", "__float__", "__int__", "tolist"):
        monkeypatch.setattr(Tensor, name, fail)
    step(optimizer, 8.0, 0.0)
    assert len(calls) == 3
