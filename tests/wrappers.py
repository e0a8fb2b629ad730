"""Wrappers of optimizers, as frameworks have them."""

from __future__ import annotations

from typing import Any

import torch


class Wrapper:
    """As many a framework has one: what it lacks is looked for in the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self) -> None:
        self.inner.step()


class Imitator(Wrapper):
    """As Lightning's: the class of the optimizer is among its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        cls = type(optimizer)
        self.__class__ = type(f"Imitator{cls.__name__}", (type(self), cls), {})


class SharingImitator(Imitator):
    """As Lightning's of before 2.1, with the attributes of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        vars(self).update(vars(optimizer))
        super().__init__(optimizer)
