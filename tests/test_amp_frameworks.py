"""`fastemb.amp.GradScaler` in Lightning and Accelerate, where those are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import bits
from torch import Tensor, nn

import fastemb
from fastemb import optim
from fastemb.amp import GradScaler

INF = float("inf")
IDS = torch.tensor([[1, 2], [3, 3], [0, 5]])


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(fastemb.nn.EmbeddingBag(6, 4, sparse=True, mode="sum"), nn.Linear(4, 1))


def trained_by_hand(
    make: Any, scaler: torch.amp.GradScaler, *, low: bool, max_norm: float = INF
) -> list[Any]:
    model = model_of()
    optimizer = make(model.parameters())
    for number in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=low):
            loss = loss_of(model, number)
        scaler.scale(loss).backward()
        if max_norm < INF:
            scaler.unscale_(optimizer)
            optim.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    return [bits(p) for p in model.parameters()]


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Overflows in the second step."""
    return model(IDS).float().square().sum() * (INF if number == 1 else 1.0)


def adam(params: Any) -> optim.Adam:
    return optim.Adam(params, lr=0.1, lazy="rows")


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1)


def own_sgd(params: Any) -> optim.SGD:
    return optim.SGD(params, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [INF, 1.0])
@pytest.mark.parametrize("make", [adam, sgd, own_sgd])
def test_lightning(make: Any, max_norm: float, tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning")
    precision = pytest.importorskip("lightning.pytorch.plugins.precision")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of()

        def training_step(self, batch: Any, number: int) -> Tensor:
            return loss_of(self.model, number)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(self.parameters())

        def train_dataloader(self) -> list[int]:
            return [0] * 4

        def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
            """In place of gradient_clip_val, which refuses optimizers that unscale in the step."""
            if max_norm < INF:
                scaler.clip_grad_norm_(optimizer, max_norm)

    def plugin() -> tuple[GradScaler, Any]:
        scaler = GradScaler("cpu", init_scale=2.0**8)
        return scaler, precision.MixedPrecision("16-mixed", "cpu", scaler=scaler)

    scaler, mixed = plugin()
    # Lightning has float16 for GPUs only.
    mixed.autocast_context_manager = lambda: torch.autocast("cpu", torch.float16)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", plugins=[mixed], logger=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    assert scaler.get_scale() == 2.0**7
    by_hand = GradScaler("cpu", init_scale=2.0**8)
    if max_norm == INF:
        by_hand = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    want = trained_by_hand(make, by_hand, low=True, max_norm=max_norm)
    assert [bits(p) for p in module.parameters()] == want

    path = tmp_path / "checkpoint.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)["MixedPrecision"]
    assert saved["fastemb"]["version"] == 1
    other, mixed = plugin()
    mixed.load_state_dict(saved)
    assert other.get_scale() == 2.0**7


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [INF, 1.0])
@pytest.mark.parametrize("scaler_class", [GradScaler, torch.amp.GradScaler])
def test_fabric(scaler_class: Any, max_norm: float) -> None:
    """Its wrapper has the class of the optimizer among its own."""
    lightning = pytest.importorskip("lightning")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(model := model_of(), own_sgd(model.parameters()))
    assert isinstance(optimizer, optim.SGD)
    scaler = scaler_class("cpu", init_scale=2.0**8)
    for number in range(4):
        optimizer.zero_grad()
        fabric.backward(scaler.scale(loss_of(model, number)))
        if max_norm < INF and scaler_class is GradScaler:
            scaler.clip_grad_norm_(optimizer, max_norm)
        elif max_norm < INF:
            scaler.unscale_(optimizer)
            optim.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    by_hand = GradScaler("cpu", init_scale=2.0**8)
    want = trained_by_hand(own_sgd, by_hand, low=False, max_norm=max_norm)
    assert [bits(p) for p in model.parameters()] == want


@pytest.mark.slow
@pytest.mark.parametrize("make", [adam, sgd])
def test_accelerate(make: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    scaler = GradScaler("cpu", init_scale=2.0**8)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = scaler
    model = model_of()
    model, optimizer = accelerator.prepare(model, make(model.parameters()))
    for number in range(4):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, number))
        optimizer.step()
        assert accelerator.optimizer_step_was_skipped == (number == 1)
        assert scaler.step_was_skipped(optimizer.optimizer) == (number == 1)
    want = trained_by_hand(make, torch.amp.GradScaler("cpu", init_scale=2.0**8), low=False)
    assert [bits(p) for p in model.parameters()] == want
    assert scaler.get_scale() == 2.0**7
