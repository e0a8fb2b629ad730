"""Small models, data and trainings with and without an `OffloadEngine`, for the tests of it."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from draws import TIMES
from models import MODELS
from optim_cases import bits
from torch import Tensor, nn

import fastemb
from fastemb import offload
from fastemb.offload._lanes import Lane

# No test waits longer for anything; what hangs fails.
limits = [pytest.mark.timeout(120 * TIMES), pytest.mark.usefixtures("one_thread")]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# All optimizers, with the options that add states to the records or change how they are used.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD momentum": ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD nesterov": ("SGD", {"momentum": 0.5, "nesterov": True, "maximize": True}),
    "Adam": ("Adam", {"lazy": "rows"}),
    "Adam amsgrad": ("Adam", {"lazy": "rows", "amsgrad": True, "weight_decay": 0.1}),
    "Adam row counts": ("Adam", {"lazy": "rows", "row_bias_correction": True}),
    "Adam bf16 states": ("Adam", {"lazy": "rows", "state_dtype": torch.bfloat16}),
    "AdamW": ("AdamW", {"lazy": "rows", "weight_decay": 0.1, "decay": "catch_up"}),
    "AdamW touched": ("AdamW", {"lazy": "rows", "weight_decay": 0.1, "decay": "touched"}),
    "SparseAdam": ("SparseAdam", {"row_bias_correction": True}),
    "Adagrad": ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "RowWiseAdagrad": ("RowWiseAdagrad", {"initial_accumulator_value": 0.25}),
}


@dataclass(frozen=True)
class TableCase:
    """One table and its lookups.

    Attributes:
        layout: of the ids: "matrix", or "bags" with offsets, or "closed" with the last one, too.
        weighted: whether there are per_sample_weights, with gradients.
    """

    rows: int = 20
    dim: int = 3
    bag: bool = True
    mode: str = "sum"
    layout: str = "matrix"
    weighted: bool = False
    padding_idx: int | None = None
    max_norm: float | None = None
    by_freq: bool = False
    index_dtype: torch.dtype = torch.int64

    def module(self, dtype: torch.dtype) -> nn.Module:
        options = {
            "max_norm": self.max_norm,
            "padding_idx": self.padding_idx,
            "scale_grad_by_freq": self.by_freq,
            "dtype": dtype,
        }
        if not self.bag:
            return nn.Embedding(self.rows, self.dim, **options)
        closed = self.layout == "closed"
        return nn.EmbeddingBag(
            self.rows, self.dim, mode=self.mode, include_last_offset=closed, **options
        )

    def draw(self, generator: torch.Generator, size: int) -> dict[str, Tensor]:
        """Arguments of a lookup of ``size`` bags; small ids are frequent."""

        def ids(*shape: int) -> Tensor:
            skewed = torch.rand(*shape, generator=generator) ** 2
            return (skewed * self.rows).to(self.index_dtype)

        if not self.bag or self.layout == "matrix":
            given = {"input": ids(size, int(torch.randint(1, 4, (), generator=generator)))}
        else:
            lengths = torch.randint(0, 4, (size,), generator=generator)
            ends = lengths.cumsum(0)
            offsets = ends - lengths
            if self.layout == "closed":
                offsets = torch.cat([offsets, ends[-1:]])
            given = {"input": ids(int(ends[-1])), "offsets": offsets.to(self.index_dtype)}
        if self.weighted:
            given["per_sample_weights"] = torch.rand(given["input"].shape, generator=generator)
        return given


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        tables: of the model; the parameter of table k is ``t{k}.weight``.
        dtype: of the tables after `fastemb.convert`.
        optimizer: key of `OPTIMIZERS`.
        steps, size, seed: of the data.
        accumulate: batches per step.
        clip: largest norm of the gradients of a step, None: they are not clipped.
        schedule: whether the learning rate falls.
    """

    tables: tuple[TableCase, ...] = (TableCase(),)
    dtype: torch.dtype = torch.float32
    optimizer: str = "Adam"
    steps: int = 6
    size: int = 4
    seed: int = 0
    accumulate: int = 1
    clip: float | None = None
    schedule: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def batches(self) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            {
                "lookups": {
                    f"t{k}": table.draw(generator, self.size) for k, table in enumerate(self.tables)
                },
                "target": torch.randn(self.size, generator=generator),
            }
            for _ in range(self.steps)
        ]


class Net(nn.Module):
    """Tables ``t0``, ``t1``, ..., and a layer behind them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        plain = torch.float64 if case.dtype == torch.float64 else torch.float32
        for k, table in enumerate(case.tables):
            self.add_module(f"t{k}", table.module(plain))
        self.layer = nn.Linear(sum(table.dim for table in case.tables), 1, dtype=plain)

    def forward(self, lookups: dict[str, dict[str, Tensor]]) -> Tensor:
        columns = []
        for name, given in lookups.items():
            found = self.get_submodule(name)(**given)
            columns.append(found.sum(1) if found.dim() == 3 else found)
        return self.layer(torch.cat(columns, dim=1)).squeeze(1)


def ids_of(batch: dict[str, Any]) -> dict[str, Tensor]:
    return {name: given["input"] for name, given in batch["lookups"].items()}


def largest(case: Case, batches: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Slots that each table needs at least: the distinct rows of its largest batch."""
    needed = {f"t{k}": 1 for k in range(len(case.tables))}
    for batch in batches:
        for name, ids in ids_of(batch).items():
            needed[name] = max(needed[name], len(ids.unique()))
    return needed


def delayed(seed: int, most: float = 1e-3) -> Callable[[str, torch.device], Lane]:
    """Lanes that sleep now and then before a job."""
    generator = random.Random(seed)

    def delay(_: str) -> None:
        if generator.random() < 0.3:
            time.sleep(generator.random() * most)

    return lambda name, device: Lane(name, device, delay=delay)


def new_engine(**options: Any) -> offload.OffloadEngine:
    return offload.OffloadEngine(**{"device": "cpu", "staging_bytes": 1 << 12, **options})


def build(
    case: Case, engine: offload.OffloadEngine | None, seed: int = 0
) -> tuple[Net, torch.optim.Optimizer]:
    """A model that is converted, and its optimizer."""
    torch.manual_seed(seed)
    model = Net(case)
    fastemb.convert(model, dtype=case.dtype, sparse="fused", offload=engine)
    return model, optimizer_of(case, model)


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    name, options = OPTIMIZERS[case.optimizer]
    options = {"lr": 0.05, **options, **case.options}
    return getattr(fastemb.optim, name)(model.parameters(), **options)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the per_sample_weights that take part in it, as leaves of their own."""
    leaves = []
    lookups = {}
    for name, given in batch["lookups"].items():
        lookups[name] = dict(given)
        if "per_sample_weights" in given:
            leaf = given["per_sample_weights"].clone().requires_grad_()
            lookups[name]["per_sample_weights"] = leaf
            leaves.append(leaf)
    return (model(lookups) - batch["target"]).square().mean(), leaves


def train(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[dict[str, Any]],
) -> list[Any]:
    """The bits of all losses and of the gradients of per_sample_weights."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if case.schedule else None
    seen: list[Any] = []
    for number, batch in enumerate(loader, 1):
        loss, leaves = loss_of(model, batch)
        loss.backward()
        seen += [bits(loss), *(bits(leaf.grad) for leaf in leaves)]
        if number % case.accumulate:
            continue
        if case.clip is not None:
            seen.append(bits(fastemb.optim.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return seen


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The bits of the weights and of the states, as checkpoints have them."""
    states = optimizer.state_dict()["state"]
    return (
        {name: bits(value) for name, value in model.state_dict().items()},
        {
            key: {name: bits(value) for name, value in state.items()}
            for key, state in states.items()
        },
    )


def trained(
    case: Case,
    engine: offload.OffloadEngine | None,
    *,
    prefetch: bool = True,
    batches: list[dict[str, Any]] | None = None,
) -> tuple[Any, ...]:
    """All bits that a training has to show, with the engine or, None, without one."""
    batches = case.batches() if batches is None else batches
    model, optimizer = build(case, engine)
    loader: Iterable[dict[str, Any]] = batches
    if engine is not None and prefetch:
        loader = engine.prefetch(batches, ids=ids_of)
    seen = train(case, model, optimizer, loader)
    result = (seen, *saved(model, optimizer))
    if engine is not None:
        assert not any(engine.verify().values())
        engine.close()
    return result


def assert_same_training(case: Case, *, prefetch: bool = True, **options: Any) -> None:
    """An engine with these options changes no bit of the training.

    ``cache`` is here what there is besides the slots for the largest batch.
    """
    batches = case.batches()
    spare = options.pop("cache", 0)
    slots = {name: number + spare for name, number in largest(case, batches).items()}
    if case.accumulate > 1:  # what waits for a step stays in the cache
        slots = {f"t{k}": table.rows for k, table in enumerate(case.tables)}
    engine = new_engine(cache=slots, **options)
    want = trained(case, None, batches=batches)
    got = trained(case, engine, prefetch=prefetch, batches=batches)
    for w, g in zip(want, got, strict=True):
        assert g == w


def raises(kind: type[BaseException], *parts: str) -> AbstractContextManager[Any]:
    """`pytest.raises` for a message that has all these parts in it, in this order."""

    return pytest.raises(kind, match=".*".join(re.escape(part) for part in parts))


# ---- loops ----

CASE = Case((TableCase(rows=60), TableCase(rows=40, bag=False)), steps=8)


def offloaded(
    case: Case = CASE, **options: Any
) -> tuple[offload.OffloadEngine, Net, torch.optim.Optimizer]:
    engine = new_engine(**{"cache": 36, **options})
    return engine, *build(case, engine)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> None:
    loss, _ = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, stop: int | None = None
) -> None:
    """A step per batch; an exception after batch ``stop``."""
    for number, batch in enumerate(loader):
        step(model, optimizer, batch)
        if number == stop:
            raise ZeroDivisionError


def in_memory(case: Case, batches: list[dict[str, Any]]) -> tuple[Any, Any]:
    """What a training without an engine on these batches ends with."""
    model, optimizer = build(case, None)
    for batch in batches:
        step(model, optimizer, batch)
    return saved(model, optimizer)


def pinned(engine: offload.OffloadEngine) -> int:
    """Slots whose rows are held."""
    for table in engine.tables.values():
        table.settle()
    return sum(table.slots._num_pinned for table in engine.tables.values())


def engine_values(model: Net) -> dict[str, torch.Tensor]:
    return {name: getattr(model, name).weight.detach().clone() for name in ("t0", "t1")}


def plain(name: str = "dlrm") -> nn.Module:
    """A model of `models` that has not met fastemb, always with the same weights."""
    torch.manual_seed(0)
    return MODELS[name]()


def frozen(model: nn.Module) -> Any:
    """What a refused conversion must leave as it was."""
    return [
        (
            name,
            type(module),
            vars(module).keys(),
            getattr(module, "sparse", None),
            {
                key: (id(p), bits(p), p.is_contiguous())
                for key, p in module._parameters.items()
                if p is not None
            },
        )
        for name, module in model.named_modules()
    ]
