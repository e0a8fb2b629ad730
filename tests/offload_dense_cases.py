"""Lanes that are slow or do damage, and trainings, for the tests of offloaded optimizer states."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from optim_cases import snapshot
from torch import Tensor, nn

import fastemb
from fastemb import optim
from fastemb.offload import HostStates
from fastemb.offload._lanes import Lane

# What lanes carry, by the direction of an `IntegrityError`.
CARRIERS = {"to host": "collect", "to device": "deliver"}

OPTIMIZERS: dict[str, tuple[type[optim.Adam], dict[str, Any]]] = {
    "Adam": (optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    "AdamW": (optim.AdamW, {}),
    "Adam stochastic": (optim.Adam, {"rounding": "stochastic", "seed": 3}),
    "Adam bf16 states": (optim.Adam, {"state_dtype": torch.bfloat16}),
    "Adam foreach": (optim.Adam, {"foreach": True}),
    "Adam exact": (optim.Adam, {"lazy": "exact"}),
    "SparseAdam": (optim.SparseAdam, {"row_bias_correction": True}),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "RowWiseAdagrad": (optim.RowWiseAdagrad, {}),
    "SGD": (optim.SGD, {}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD all": (optim.SGD, {"momentum": 0.9, "nesterov": True, "decay": "all"}),
}


def random_delays(seed: int, most: float = 1e-3) -> Callable[[str, torch.device], Lane]:
    generator = random.Random(seed)

    def delay(_: str) -> None:
        if generator.random() < 0.2:
            time.sleep(generator.random() * most)

    return lambda name, device: Lane(name, device, delay=delay)


def slow(slow_name: str, seconds: float = 0.02) -> Callable[[str, torch.device], Lane]:
    """Lanes of which one is slow."""

    def delay(label: str) -> None:
        if label == slow_name:
            time.sleep(seconds)

    return lambda name, device: Lane(name, device, delay=delay)


class Faulty(Lane):
    """Does one kind of damage to one copy.

    Args:
        kind: "flip" a bit; "drop" the copy; "late": it comes after the job has ended; "swap": the
            other staging buffer is taken.
        when: number of the copy of a chunk of ``size`` elements that is damaged.
    """

    def __init__(
        self, name: str, device: torch.device, *, carrier: str, kind: str, when: int, size: int
    ) -> None:
        super().__init__(name, device)
        self._kind, self._when, self._size = kind, when, size
        self._damages = name == carrier
        self._copies = 0
        self._staging: dict[int, Tensor] = {}
        self.struck = False

    def copy(self, target: Tensor, source: Tensor) -> None:
        if not self._damages or source.dtype == torch.int64 or source.numel() != self._size:
            super().copy(target, source)
            return
        staged = target if self.name == "collect" else source
        self._staging[staged.data_ptr()] = staged
        self._copies += 1
        if self._copies != self._when:
            super().copy(target, source)
            return
        self.struck = True
        if self._kind == "flip":
            super().copy(target, source)
            target.view(torch.uint8)[self._size // 2] ^= 16
        elif self._kind == "late":
            threading.Timer(0.1, super().copy, (target, source.clone())).start()
        elif self._kind == "swap":
            (other,) = (t for place, t in self._staging.items() if place != staged.data_ptr())
            super().copy(*((other, source) if self.name == "collect" else (target, other)))


class Model(nn.Module):
    """Dense layers, tied and frozen ones, one that is not always used, and three kinds of table."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.fused = fastemb.nn.EmbeddingBag(9, 6, mode="sum", sparse="fused", dtype=dtype)
        self.rows = fastemb.nn.EmbeddingBag(9, 6, mode="sum", sparse=True, dtype=dtype)
        self.tied = fastemb.nn.Embedding(9, 6, dtype=dtype)
        self.first = nn.Linear(6, 10, dtype=dtype)
        self.sometimes = nn.Linear(10, 10, bias=False, dtype=dtype)
        self.last = nn.Linear(10, 6, dtype=dtype)
        self.output = nn.Linear(6, 9, bias=False, dtype=dtype)
        self.output.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.ones(6, dtype=dtype), requires_grad=False)

    def forward(self, ids: Tensor, *, skip: bool) -> Tensor:
        x = self.fused(ids) + self.rows(ids) + self.tied(ids[:, 0]) * self.frozen
        x = torch.relu(self.first(x))
        x = x if skip else x + self.sometimes(x)
        return self.output(self.last(x)).float().square().mean()


class Training:
    """Steps that a seed chooses; two of the same seed make the same.

    Args:
        scaler: None, "torch" or "fastemb".
        clip: None, "ours", "torch" or "scaler": what clips gradients.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        offload: HostStates | str | None,
        *,
        scaler: str | None = None,
        clip: str | None = None,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.model = Model(dtype)
        if scaler == "torch":  # which sees no gradient of fused tables
            self.model.fused.sparse = True
        cls, options = OPTIMIZERS[name]
        self.optimizer = cls(
            [
                {"params": [self.model.first.weight, self.model.frozen], "lr": 0.02},
                {"params": [p for n, p in self.model.named_parameters()
                            if n not in ("first.weight", "frozen")]},
            ],
            lr=0.01,
            offload=offload,
            **options,
        )  # fmt: skip
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.clip = clip
        self.scaler: torch.amp.GradScaler | None = None
        if scaler is not None:
            cls = torch.amp.GradScaler if scaler == "torch" else fastemb.amp.GradScaler
            self.scaler = cls("cpu", init_scale=256.0, growth_interval=5)

    def backward(self, *, poison: bool = False) -> None:
        ids = torch.tensor([[self.random.randrange(9) for _ in range(3)] for _ in range(4)])
        loss = self.model(ids, skip=self.random.random() < 0.3)
        if poison:
            loss = loss * float("inf")
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        again = self.random.random() < 0.1
        loss.backward(retain_graph=again)
        if again:
            loss.backward()

    def step(self) -> None:
        chance = self.random.random
        poison = self.scaler is not None and chance() < 0.2
        self.optimizer.zero_grad(set_to_none=chance() < 0.7)
        for _ in range(1 if chance() < 0.7 else 3):
            self.backward(poison=poison)
        if chance() < 0.1:  # the batch is dropped
            self.optimizer.zero_grad()
            self.backward(poison=poison)
        self.change()
        self.clip_gradients()
        before = snapshot(self.optimizer)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if poison:
                after = snapshot(self.optimizer)
                assert [bits for bits, _ in after] == [bits for bits, _ in before]
                for (_, now), (_, then) in zip(after, before, strict=True):
                    assert {name: now[name] for name in then} == then
        self.schedule.step()

    def clip_gradients(self) -> None:
        params = list(self.model.parameters())
        if self.clip == "scaler" and isinstance(self.scaler, fastemb.amp.GradScaler):
            self.scaler.clip_grad_norm_(self.optimizer, 0.5)
        elif self.clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self.clip == "torch":
                nn.utils.clip_grad_value_([p for p in params if p.grad is not None
                                           and p.grad.layout == torch.strided], 0.01)  # fmt: skip
            else:
                optim.clip_grad_norm_(params, 0.5)

    def change(self) -> None:
        """Somebody else writes parameters or gradients, in one way or another."""
        which = self.random.randrange(16)
        weight = self.model.last.weight
        with torch.no_grad():
            if which == 0:
                weight.mul_(0.5)
            elif which == 1:
                weight.data.add_(0.25)
            elif which == 2:
                self.model.load_state_dict(
                    {k: v * 0.75 for k, v in self.model.state_dict().items()}
                )
            elif which == 3:
                weight.data = weight.data * 1.25
            elif which == 4 and weight.grad is not None:
                weight.grad.data.mul_(0.5)
            elif which == 5 and weight.grad is not None:
                weight.grad = weight.grad * 0.5
            elif which == 6:
                self.optimizer.load_state_dict(self.optimizer.state_dict())

    def bits(self) -> list[Any]:
        return snapshot(self.optimizer)
