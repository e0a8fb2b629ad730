"""Random programs: ``lazy="exact"`` against dense torch, with whatever else happens to a training.

Both are in float64, so that what differs is an update that was lost or made twice, and no rounding.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fastemb
from fastemb import optim

TOLERANCE = 1e-9
DIM = 3


@dataclass
class Training:
    """The same tables twice, and their optimizers: dense torch, and lazy here."""

    tables: tuple[dict[str, Any], ...]
    kind: str
    options: dict[str, Any]
    sparse: bool | str

    def __post_init__(self) -> None:
        self.dense, self.lazy = (self._model(ours) for ours in (False, True))
        self.dense_optimizer: Any = getattr(torch.optim, self.kind)(
            self.dense.parameters(), **self.options
        )
        self.optimizer = self._optimizer()

    def _model(self, ours: bool) -> nn.ModuleList:
        torch.manual_seed(0)
        model = nn.ModuleList()
        for options in self.tables:
            options = dict(options)
            cls = nn.Embedding if options["mode"] == "" else nn.EmbeddingBag
            if cls is nn.Embedding:
                del options["mode"]
            model.append(cls(**options, embedding_dim=DIM, dtype=torch.float64))
        if ours:
            fastemb.convert(model, sparse=self.sparse)
        return model

    def _optimizer(self) -> optim.Adam:
        cls = getattr(optim, self.kind)
        optimizer: optim.Adam = cls(self.lazy.parameters(), lazy="exact", **self.options)
        return optimizer

    def losses(self, batch: list[Tensor | None]) -> list[Tensor]:
        result = []
        for model in (self.dense, self.lazy):
            outputs = [
                module(ids).flatten()
                for module, ids in zip(model, batch, strict=True)
                if ids is not None
            ]
            result.append(torch.cat(outputs).square().sum())
        torch.testing.assert_close(result[1], result[0], rtol=TOLERANCE, atol=TOLERANCE)
        return result

    def check(self) -> None:
        self.optimizer.flush()
        torch.testing.assert_close(
            list(self.lazy.parameters()),
            list(self.dense.parameters()),
            rtol=TOLERANCE,
            atol=TOLERANCE,
        )

    # ---- what happens between backwards; each takes the ids of a batch and a number ----

    def step(self, batch: list[Tensor | None], number: int) -> None:
        for optimizer in (self.dense_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def look(self, batch: list[Tensor | None], number: int) -> None:
        with torch.no_grad():
            self.losses(batch)

    def flush(self, batch: list[Tensor | None], number: int) -> None:
        self.check()

    def set_lr(self, batch: list[Tensor | None], number: int) -> None:
        for optimizer in (self.dense_optimizer, self.optimizer):
            optimizer.param_groups[0]["lr"] = (0.0, 0.001, 0.05)[number % 3]

    def set_options(self, batch: list[Tensor | None], number: int) -> None:
        change: dict[str, Any] = ({"weight_decay": 0.1}, {"betas": (0.8, 0.99)}, {"eps": 1e-6})[
            number % 3
        ]
        for optimizer in (self.dense_optimizer, self.optimizer):
            optimizer.param_groups[0].update(change)

    def write(self, batch: list[Tensor | None], number: int) -> None:
        self.optimizer.flush()
        table = number % len(self.tables)
        with torch.no_grad():
            for model in (self.dense, self.lazy):
                model[table].weight[0] = 0.5

    def freeze(self, batch: list[Tensor | None], number: int) -> None:
        table = number % len(self.tables)
        for model in (self.dense, self.lazy):
            model[table].weight.requires_grad_(not model[table].weight.requires_grad)

    def copy(self, batch: list[Tensor | None], number: int) -> None:
        self._drop_gradients()
        both = (self.lazy, self.optimizer)
        self.lazy, self.optimizer = (
            copy.deepcopy(both) if number % 2 else pickle.loads(pickle.dumps(both))
        )

    def resume(self, batch: list[Tensor | None], number: int) -> None:
        """With states of its own, or those of torch, which are the same."""
        self._drop_gradients()
        optimizer = self.optimizer if number % 2 else self.dense_optimizer
        state = copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(self.lazy.state_dict())
        required = [param.requires_grad for param in self.lazy.parameters()]
        self.lazy = self._model(True)
        self.optimizer = self._optimizer()
        self.lazy.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        for param, requires_grad in zip(self.lazy.parameters(), required, strict=True):
            param.requires_grad_(requires_grad)

    def begin_anew(self, batch: list[Tensor | None], number: int) -> None:
        self.dense_optimizer = type(self.dense_optimizer)(self.dense.parameters(), **self.options)
        self.optimizer = self._optimizer()

    def fail(self, batch: list[Tensor | None], number: int) -> None:
        """A step that is refused, behind a lookup that was."""
        with pytest.raises(IndexError):
            self.lazy[0](torch.full((1, 1), self.tables[0]["num_embeddings"]))
        group = self.optimizer.param_groups[0]
        lr, group["lr"] = group["lr"], "high"
        with pytest.raises((TypeError, ValueError)):
            self.optimizer.step()
        group["lr"] = lr

    def turn_back(self, batch: list[Tensor | None], number: int) -> None:
        self._drop_gradients()
        fastemb.revert(self.lazy)
        fastemb.convert(self.lazy, sparse=self.sparse)

    def _drop_gradients(self) -> None:
        for optimizer in (self.dense_optimizer, self.optimizer):
            optimizer.zero_grad()


EVENTS: tuple[Callable[[Training, list[Tensor | None], int], None], ...] = (
    Training.look,
    Training.flush,
    Training.set_lr,
    Training.set_options,
    Training.write,
    Training.freeze,
    Training.copy,
    Training.resume,
    Training.begin_anew,
    Training.fail,
    Training.turn_back,
)


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    tables = st.fixed_dictionaries(
        {
            "num_embeddings": st.sampled_from([1, 4, 30]),
            "mode": st.sampled_from(["", "sum", "mean", "max"]),
            "padding_idx": st.sampled_from([None, 0]),
            "max_norm": st.sampled_from([None, None, 1.5]),
        }
    )
    options = {
        "lr": 0.02,
        "weight_decay": draw(st.sampled_from([0.0, 0.05])),
        "amsgrad": draw(st.booleans()),
        "betas": draw(st.sampled_from([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99), (0.9, 0.9)])),
        "eps": draw(st.sampled_from([1e-8, 1e-4])),
    }
    return Training(
        tuple(draw(st.lists(tables, min_size=1, max_size=2))),
        draw(st.sampled_from(["Adam", "AdamW"])),
        options,
        draw(st.sampled_from([True, "fused"])),
    )


@given(
    trainings(), st.integers(0, 2**32), st.lists(st.sampled_from(EVENTS), min_size=8, max_size=25)
)
@drawn(20)
def test_programs(training: Training, seed: int, events: list[Any]) -> None:
    generator = torch.Generator().manual_seed(seed)

    def any_number(end: int) -> int:
        return int(torch.randint(0, end, (), generator=generator))

    def batch() -> list[Tensor | None]:
        rows = [options["num_embeddings"] for options in training.tables]
        few = 3 if any_number(4) else 30  # mostly the same ids, so that others sleep
        ids: list[Tensor | None] = [
            torch.randint(0, min(few, count), (2, 2), generator=generator) for count in rows
        ]
        if len(ids) > 1 and any_number(5) == 0:
            ids[any_number(len(ids))] = None
        return ids

    for event in events:
        losses = training.losses(batch())
        if losses[0].requires_grad:
            for loss in losses:
                loss.backward()
        if any_number(6):
            training.step([], 0)
        event(training, batch(), any_number(1 << 16))
        if any_number(5) == 0:
            training.check()
    training.check()
