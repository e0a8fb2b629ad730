"""`torch.set_default_dtype` and `torch.set_default_device` do not reach a training under way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optim_cases import bits
from torch import Tensor, nn

import fastemb
from fastemb import optim
from fastemb.amp import GradScaler

LR = torch.tensor(0.1)

OURS = {
    "adam": lambda params: optim.Adam(params, lr=0.1, lazy="rows", row_bias_correction=True),
    "exact": lambda params: optim.Adam(params, lr=0.1, lazy="exact", weight_decay=0.1),
    "bf16 moments": lambda params: optim.Adam(
        params, lr=0.1, lazy="rows", state_dtype=torch.bfloat16
    ),
    "adamw": lambda params: optim.AdamW(params, lr=LR, lazy="rows"),
    "sparse adam": lambda params: optim.SparseAdam(params, lr=0.1),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "row-wise": lambda params: optim.RowWiseAdagrad(params, lr=0.1),
    "decay all": lambda params: optim.SGD(
        params, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1, decay="all"
    ),
}


@contextmanager
def default(of_torch: Any) -> Iterator[None]:
    try:
        if isinstance(of_torch, torch.dtype):
            torch.set_default_dtype(of_torch)
        else:
            torch.set_default_device(of_torch)
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def trained(model: nn.ModuleDict, make: Any, scaler: GradScaler | None) -> list[Any]:
    """Bits after three steps: two lookups each, clipping, a checkpoint and groups in between."""
    optimizer = make(model.parameters())
    if scaler is not None:
        scaler.register(model, optimizer)
    for number in range(3):
        ids = torch.tensor([[number, 1], [3, 3]], device="cpu")
        optimizer.zero_grad()
        found = model["table"](ids).float() + model["table"](ids.flip(0)).float()
        if scaler is None:
            model["layer"](found).square().sum().backward()
            optim.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        else:
            loss = model["layer"](scaler.boundary(found, "table")).square().sum()
            scaler.scale(loss).backward()
            if number == 1:
                scaler.unscale_(optimizer)
            else:
                scaler.clip_grad_norm_(optimizer, 0.5)
            scaler.step(optimizer)
            scaler.update()
        if number == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = [s for state in optimizer.state_dict()["state"].values() for s in state.values()]
    tensors = [*model.parameters(), *(s for s in states if isinstance(s, Tensor))]
    scales = [] if scaler is None else [scaler.get_scale(), scaler.stats(wait=True)["gradients"]]
    return [*map(bits, tensors), *(s for s in states if not isinstance(s, Tensor)), *scales]


def model_of(table: nn.Module) -> nn.ModuleDict:
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({"table": table, "layer": nn.Linear(3, 1)})
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


def assert_defaults_do_not_matter(of_torch: Any, table: Any, make: Any, *, scaled: bool) -> None:
    def run() -> list[Any]:
        scaler = GradScaler("cpu", init_scale=2.0**8) if scaled else None
        return trained(models.pop(), make, scaler)

    models = [model_of(table()) for _ in range(2)]
    want = run()
    with default(of_torch):
        got = run()
    assert got == want


DEFAULTS = [torch.float64, torch.bfloat16, "meta"]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("sparse", [False, True, "fused"])
@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("of_torch", DEFAULTS)
def test_training(of_torch: Any, name: str, sparse: Any, scaled: bool) -> None:
    def table() -> nn.Module:
        dtype = torch.float16 if name in ("adam", "row-wise") else torch.float32
        return fastemb.nn.EmbeddingBag(6, 3, mode="mean", sparse=sparse, dtype=dtype)

    assert_defaults_do_not_matter(of_torch, table, OURS[name], scaled=scaled)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("of_torch", DEFAULTS)
def test_torchs_tables_and_optimizers(of_torch: Any, scaled: bool) -> None:
    """Row gradients with repeated rows, which the scaler sums."""
    for sparse in (False, True):

        def make(params: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD(params, lr=0.1)

        assert_defaults_do_not_matter(
            of_torch,
            lambda: nn.EmbeddingBag(6, 3, sparse=sparse),  # noqa: B023
            make,
            scaled=scaled,
        )


@pytest.mark.parametrize("of_torch", DEFAULTS)
def test_an_offloaded_table(of_torch: Any) -> None:
    def run() -> tuple[list[Any], Any]:
        model = models.pop()
        engine = fastemb.offload.OffloadEngine(cache=4, device="cpu")
        fastemb.convert(model, offload=engine)
        found = trained(model, OURS["adam"], GradScaler("cpu", init_scale=2.0**8))
        engine.flush()
        return found, {k: bits(v) for k, v in engine.state_dict()["table"].items()}

    models = [model_of(nn.EmbeddingBag(6, 3, mode="mean")) for _ in range(2)]
    want = run()
    with default(of_torch):
        got = run()
    assert got == want


@pytest.mark.parametrize("of_torch", DEFAULTS[:2])
def test_a_norm_of_nothing(of_torch: Any) -> None:
    with default(of_torch):
        assert optim.clip_grad_norm_([], 1.0).dtype == torch.float32
