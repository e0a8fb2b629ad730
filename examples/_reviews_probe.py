"""What torch's own optimizers do with an fp16 table: a few steps of each, for `reviews.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from _reviews_data import Reviews
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of

STEPS = 5


class Stepper(Protocol):
    def step(self) -> object: ...


class ScaledSGD:
    """SGD behind `torch.amp.GradScaler`."""

    def __init__(self, table: nn.Parameter, lr: float) -> None:
        self.sgd = torch.optim.SGD([table], lr)
        self.scaler = torch.amp.GradScaler(table.device.type)
        self.scaler.scale(torch.zeros((), device=table.device))  # its first use makes its state

    def step(self) -> None:
        self.scaler.step(self.sgd)


def probe(
    make_model: Callable[[int], nn.Module], reviews: Reviews, lr: float, batch: int, seed: int
) -> None:
    """Print, for each optimizer, whether it runs and how far it moves the table.

    A step of Adam moves a value by about one learning rate, so `STEPS` steps by about `STEPS`.
    """

    def outcome(
        dtype: torch.dtype, sparse: bool, make_optimizer: Callable[[nn.Parameter], Stepper]
    ) -> str:
        torch.manual_seed(seed)
        model = make_model(reviews.num_ids)
        model.bag.to(dtype)
        model.bag.sparse = sparse
        table = model.bag.weight
        before = table.detach().to(torch.float32, copy=True)
        seen = torch.zeros(reviews.num_ids, dtype=torch.bool)
        optimizer = make_optimizer(table)
        for step in range(STEPS):
            part = torch.arange(step * batch, (step + 1) * batch) % len(reviews.train)
            ids, offsets, label = reviews.train.batch(part)
            seen[ids] = True
            model.zero_grad()
            loss_of(model(ids, offsets), label).backward()
            try:
                optimizer.step()
            except (RuntimeError, ValueError) as error:
                return f"{type(error).__name__}: {error}"
            broken = 1 - torch.isfinite(table.detach()[seen]).float().mean().item()
            if broken:
                return f"step {step + 1} leaves inf or NaN in {broken:.0%} of the rows looked up"
        farthest = (table.detach().float() - before).abs().max().item() / lr
        return f"the farthest value has moved by {farthest:,.0f} learning rates"

    def adam_fused(table: nn.Parameter) -> Stepper:
        return torch.optim.Adam([table], lr, fused=True)

    fp16, fp32, optim = torch.float16, torch.float32, torch.optim
    print(f"{STEPS} steps of torch's optimizers on the table itself:")
    for name, result in (
        ("fp16, SparseAdam", outcome(fp16, True, lambda t: optim.SparseAdam([t], lr))),
        ("fp16, Adam", outcome(fp16, False, lambda t: optim.Adam([t], lr))),
        ("fp16, Adam(fused=True)", outcome(fp16, False, adam_fused)),
        ("fp32, Adam(fused=True)", outcome(fp32, False, adam_fused)),
        ("fp16, SGD + GradScaler", outcome(fp16, False, lambda t: ScaledSGD(t, lr))),
    ):
        print(f"  {name:24}{result}")
    print(flush=True)
