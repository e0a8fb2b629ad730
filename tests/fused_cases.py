"""Two models that differ in ``sparse`` alone: what the tests of ``sparse="fused"`` share."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optim_cases import bits, snapshot
from torch import Tensor, nn

from fastemb import _row_queue

ROWS, DIM = 12, 3


@pytest.fixture(autouse=True)
def _no_queue_is_left() -> Iterator[None]:
    before = set(_row_queue._QUEUES)
    yield
    if _row_queue._QUEUES.keys() - before:
        gc.collect()
    assert not _row_queue._QUEUES.keys() - before


def as_on_a_device(patch: pytest.MonkeyPatch) -> None:
    """With room for more rows than there are, which are not counted by the host."""
    for module in ("_row_queue", "optim._gradients", "optim.clip"):
        patch.setattr(f"fastemb.{module}.on_host", lambda _: False)


class Twins:
    """A model with ``sparse=True`` and its twin with ``sparse="fused"``, with an optimizer each."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: Callable[..., torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        fused = copy.deepcopy(model)
        for module in fused.modules():
            if getattr(module, "sparse", False):
                module.sparse = "fused"
        self.models = (model, fused)
        self.optimizers = tuple(optimizer_class(m.parameters(), **options) for m in self.models)

    def run(self, action: Callable[[nn.Module, Any], None]) -> None:
        """``action`` on both models and optimizers."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            action(model, optimizer)

    def assert_equal(self) -> None:
        """All parameters and states have the same bits, and no fused table has a gradient."""
        plain, fused = (snapshot(optimizer) for optimizer in self.optimizers)
        assert fused == plain
        for module in self.models[1].modules():
            if getattr(module, "sparse", False) == "fused":
                assert module.weight.grad is None


def waiting(module: nn.Module) -> int:
    """How many parts wait for a step."""
    queue = _row_queue.waiting(module.weight)
    return 0 if queue is None else len(queue)


def same(a: Tensor, b: Tensor) -> bool:
    return bits(a) == bits(b)
