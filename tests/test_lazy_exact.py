"""``lazy="exact"``: dense Adam's result at the cost of the rows that are used."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from optim_cases import assert_same_bits, bits, coo, snapshot
from torch import Tensor, nn

import fastemb
from fastemb import nn as fnn
from fastemb import optim
from fastemb._sleeping import TABLES
from fastemb.optim import _exact, _history, _lazy_adam

ROWS, DIM = 60, 5
KINDS = ("Adam", "AdamW")


@pytest.fixture(autouse=True)
def _no_table_is_left() -> Iterator[None]:
    before = set(TABLES)
    yield
    if TABLES.keys() - before:
        gc.collect()
    assert not TABLES.keys() - before


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Thousands of tiny steps: on a busy machine threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def schedule(step: int, steps: int, top: float) -> float:
    """Warm-up, then half a cosine."""
    warm = steps // 20
    if step < warm:
        return top * (step + 1) / warm
    return top * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def zipf_rows(generator: torch.Generator, num_embeddings: int, count: int) -> Tensor:
    weights = 1.0 / torch.arange(1, num_embeddings + 1, dtype=torch.float64) ** 1.2
    return torch.multinomial(weights, count, replacement=True, generator=generator)


@cache
def gradients(
    steps: int, num_embeddings: int, dim: int, count: int, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Rows and values of each step; the values of a row have a direction and noise."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(num_embeddings, dim, generator=generator)
    scale = 10.0 ** (-4.0 * torch.rand(num_embeddings, 1, generator=generator))
    result = []
    for _ in range(steps):
        rows = zipf_rows(generator, num_embeddings, count).unique()
        noise = torch.randn(len(rows), dim, generator=generator)
        result.append((rows, (bias[rows] + 2 * noise) * scale[rows]))
    return result


def train(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    weight: Tensor,
    batches: list[tuple[Tensor, Tensor]],
    top: float,
    sparse: bool,
    **options: Any,
) -> tuple[Tensor, torch.optim.Optimizer]:
    p = nn.Parameter(weight.clone())
    optimizer = optimizer_class([p], lr=top, **options)
    for step, (rows, values) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = schedule(step, len(batches), top)
        grad = coo(rows.tolist(), values.to(p.dtype), len(p), coalesced=True)
        p.grad = grad if sparse else grad.to_dense()
        optimizer.step()
    if sparse:
        optimizer.flush()
    return p.detach(), optimizer


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Norm of the error, and its maximum over the largest weight."""
    error = got.double() - want
    return error.norm().item(), (error.abs().max() / want.abs().max()).item()


def lookup_step(module: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> None:
    optimizer.zero_grad()
    module(*inputs).square().sum().backward()
    optimizer.step()


def make(
    kind: str = "AdamW", rows: int = ROWS, dim: int = DIM, **options: Any
) -> tuple[fnn.Embedding, optim.Adam]:
    torch.manual_seed(0)
    module = fnn.Embedding(rows, dim, sparse=True, table="users")
    options = {"lr": 0.05, **options}
    return module, getattr(optim, kind)(module.parameters(), lazy="exact", **options)


def asleep(steps: int = 4, **options: Any) -> tuple[fnn.Embedding, optim.Adam]:
    """A table in which all rows have moved once, and rows other than 0 and 1 sleep."""
    module, optimizer = make(**options)
    lookup_step(module, optimizer, torch.arange(ROWS))
    for _ in range(steps):
        lookup_step(module, optimizer, torch.tensor([0, 1]))
    assert sleeping(module) == set(range(2, ROWS))
    return module, optimizer


def sleepers_of(module: nn.Module) -> Any:
    return TABLES[id(module.weight)]


def sleeping(module: nn.Module) -> set[int]:
    sleepers = sleepers_of(module)
    behind = sleepers.state["row_step"] != int(sleepers._history.step)
    return set(behind.nonzero().flatten().tolist())


def flushed_copy(module: nn.Module) -> Tensor:
    """The weights as `flush` would leave them; the table itself goes on sleeping."""
    sleepers = sleepers_of(module)
    twin = copy.copy(sleepers)
    twin.state = {name: value.clone() for name, value in sleepers.state.items()}
    weight = module.weight.detach().clone()
    twin.catch_up(weight, None, None, None)
    return weight


# ---- the numbers of dense Adam ----


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("kind", "options"),
    [("Adam", {}), ("AdamW", {}), ("AdamW", {"amsgrad": True})],
    ids=str,
)
def test_error_is_that_of_dense_fp32_adam(kind: str, options: dict[str, Any]) -> None:
    rows, dim = 300, 6
    batches = gradients(1000, rows, dim, 50)
    weight = torch.randn(rows, dim, generator=torch.Generator().manual_seed(9)) * 0.1
    dense = getattr(torch.optim, kind)
    want, _ = train(dense, weight.double(), batches, 1e-2, False, **options)
    peer, _ = train(dense, weight, batches, 1e-2, False, **options)
    got, _ = train(getattr(optim, kind), weight, batches, 1e-2, True, lazy="exact", **options)
    uses = torch.cat([batch[0] for batch in batches]).bincount(minlength=rows)
    assert uses.min() < 50 < 900 < uses.max()  # some rows sleep long
    for ours, theirs in zip(errors(got, want), errors(peer, want), strict=True):
        assert ours <= 1.5 * theirs


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.01},
        {"weight_decay": 0.01, "amsgrad": True},
        {"weight_decay": 0.01, "maximize": True},
        {"eps": 1e-3},
        {"betas": (0.0, 0.9)},
        {"betas": (0.99, 0.9)},  # the series diverges
    ],
    ids=str,
)
def test_replayed_steps(options: dict[str, Any]) -> None:
    batches = gradients(100, 100, 5, 20)
    weight = torch.randn(100, 5, generator=torch.Generator().manual_seed(9))
    want, _ = train(torch.optim.Adam, weight.double(), batches, 1e-2, False, **options)
    peer, _ = train(torch.optim.Adam, weight, batches, 1e-2, False, **options)
    got, _ = train(optim.Adam, weight, batches, 1e-2, True, lazy="exact", **options)
    for ours, theirs in zip(errors(got, want), errors(peer, want), strict=True):
        assert ours <= 1.5 * theirs


def test_float64_and_tables_of_one_column() -> None:
    batches = gradients(100, 50, 4, 10)
    weight = torch.randn(50, 4, dtype=torch.float64)
    want, _ = train(torch.optim.AdamW, weight, batches, 1e-2, False)
    got, _ = train(optim.AdamW, weight, batches, 1e-2, True, lazy="exact")
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)

    flat = [(rows, values[:, 0]) for rows, values in batches]
    want, _ = train(torch.optim.AdamW, weight[:, 0], flat, 1e-2, False)
    got, _ = train(optim.AdamW, weight[:, 0], flat, 1e-2, True, lazy="exact")
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters(dtype: torch.dtype) -> None:
    batches = [(rows, values.to(dtype)) for rows, values in gradients(200, 100, 8, 20)]
    weight = torch.randn(100, 8).to(dtype)
    want, _ = train(torch.optim.AdamW, weight.double(), batches, 1e-2, False)
    got, optimizer = train(optim.AdamW, weight, batches, 1e-2, True, lazy="exact")
    (param,) = optimizer.param_groups[0]["params"]
    master = optimizer.state[param]["master"]
    torch.testing.assert_close(master.double(), want, rtol=1e-5, atol=1e-5)
    assert_same_bits(got, master.to(dtype))


def test_stochastic_rounding_and_low_precision_moments() -> None:
    batches = gradients(100, 40, 64, 10)
    weight = torch.randn(40, 64).to(torch.bfloat16)
    want, _ = train(torch.optim.AdamW, weight.double(), batches, 1e-2, False)
    options = {"lazy": "exact", "rounding": "stochastic", "seed": 3}
    got, optimizer = train(optim.AdamW, weight, batches, 1e-2, True, **options)
    again, _ = train(optim.AdamW, weight, batches, 1e-2, True, **options)
    assert_same_bits(got, again)
    (param,) = optimizer.param_groups[0]["params"]
    assert "master" not in optimizer.state[param]
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05)
    assert abs((got.double() - want).mean().item()) < 2e-3  # unbiased

    weight = weight.float()
    options = {"lazy": "exact", "state_dtype": torch.bfloat16}
    got, optimizer = train(optim.AdamW, weight, batches, 1e-2, True, **options)
    (param,) = optimizer.param_groups[0]["params"]
    assert optimizer.state[param]["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05)


def test_dense_and_empty_gradients_move_all_rows() -> None:
    """A table that is tied to a dense layer, say; and a batch without ids."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    exact, dense = optim.AdamW([ours], lazy="exact"), torch.optim.AdamW([theirs])
    for step in range(40):
        grad = torch.zeros_like(weight)
        rows = torch.randperm(30, generator=generator)[:4].sort().values
        grad[rows] = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        if step % 10 == 9:
            grad = torch.randn(30, 4, generator=generator, dtype=torch.float64)
            ours.grad = grad.clone()
        elif step % 10 == 5:
            grad.zero_()
            ours.grad = coo([], torch.zeros(0, 4, dtype=torch.float64), 30)
        else:
            ours.grad = coo(rows.tolist(), grad[rows], 30, coalesced=True)
        theirs.grad = grad
        exact.step()
        dense.step()
        if step % 10 == 9:
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    exact.flush()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_tables_with_rows_apart() -> None:
    storage = torch.randn(20, 8)
    ours = nn.Parameter(storage[:, :4])
    theirs = nn.Parameter(ours.detach().clone())
    exact, dense = optim.AdamW([ours], lazy="exact"), torch.optim.AdamW([theirs])
    for step in range(6):
        grad = coo([step, 9], torch.randn(2, 4), 20, coalesced=True)
        ours.grad = grad if step != 4 else grad.to_dense()
        theirs.grad = grad.to_dense()
        exact.step()
        dense.step()
    exact.flush()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_groups_closure_schedulers_and_tensor_learning_rates() -> None:
    torch.manual_seed(0)
    tables = [fnn.EmbeddingBag(20, 4, mode="sum", sparse=True, dtype=torch.float64) for _ in "ab"]
    peers = [nn.EmbeddingBag(20, 4, mode="sum", dtype=torch.float64) for _ in "ab"]
    for table, peer in zip(tables, peers, strict=True):
        peer.load_state_dict(table.state_dict())
    models = []
    for modules, kind, options in (
        (tables, optim.AdamW, {"lazy": "exact"}),
        (peers, torch.optim.AdamW, {}),
    ):
        rate = torch.tensor(0.02, dtype=torch.float64)
        first = {"params": modules[0].parameters(), "lr": rate}
        second = {"params": modules[1].parameters(), "lr": 0.05, "weight_decay": 0.1}
        optimizer = kind([first], **options)
        optimizer.add_param_group(second)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        models.append((modules, optimizer, scheduler))
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        ids = torch.randint(0, 20, (3, 2), generator=generator)
        for modules, optimizer, scheduler in models:

            def closure(
                modules: Any = modules, optimizer: Any = optimizer, ids: Tensor = ids
            ) -> Tensor:
                optimizer.zero_grad()
                loss = sum((m(ids) - 1).square().sum() for m in modules)
                loss.backward()
                return loss

            optimizer.step(closure)
            scheduler.step()
    models[0][1].flush()
    for table, peer in zip(tables, peers, strict=True):
        torch.testing.assert_close(table.weight, peer.weight, rtol=1e-11, atol=1e-11)


def test_two_lookups_and_accumulation() -> None:
    """Modules read caught-up rows, so that losses and gradients are those of dense Adam."""
    module, optimizer = make()
    module.double()
    peer = nn.Embedding(ROWS, DIM, dtype=torch.float64)
    peer.load_state_dict(module.state_dict())
    dense = torch.optim.AdamW(peer.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    for step in range(60):
        optimizer.zero_grad()
        dense.zero_grad()
        for _ in range(1 + step % 2):
            a, b = torch.randint(0, ROWS, (2, 5), generator=generator)
            losses = [(m(a) * m(b) - m(a)).square().sum() for m in (module, peer)]
            torch.testing.assert_close(*losses, rtol=1e-9, atol=1e-9)
            for loss in losses:
                loss.backward()
        optimizer.step()
        dense.step()
    optimizer.flush()
    torch.testing.assert_close(module.weight, peer.weight, rtol=1e-9, atol=1e-9)


# ---- changes while rows sleep ----


def test_long_sleep_overflows_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_history, "CAPACITY", 8)
    batches = gradients(100, 200, 4, 10)
    weight = torch.randn(200, 4, dtype=torch.float64)
    want, _ = train(torch.optim.AdamW, weight, batches, 1e-2, False)
    got, _ = train(optim.AdamW, weight, batches, 1e-2, True, lazy="exact")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "change", "wakes"),
    [
        ("Adam", {"betas": (0.5, 0.9)}, True),
        ("Adam", {"eps": 1e-2}, True),
        ("Adam", {"weight_decay": 0.1}, True),
        ("Adam", {"amsgrad": True}, True),
        ("Adam", {"lazy": "rows"}, True),
        ("AdamW", {"weight_decay": 0.5}, False),
        ("AdamW", {"lr": 0.01}, False),
    ],
    ids=str,
)
def test_changed_options_do_not_reach_back(kind: str, change: dict[str, Any], wakes: bool) -> None:
    results = []
    for flush in (False, True):
        module, optimizer = asleep(kind=kind)
        if flush:
            optimizer.flush()
        optimizer.param_groups[0].update(change)
        lookup_step(module, optimizer, torch.tensor([0, 3]))
        if not flush and wakes and "lazy" not in change:
            assert sleeping(module) == set(range(ROWS)) - {0, 3}
        optimizer.flush()
        results.append(module.weight.detach().clone())
    if wakes:
        assert_same_bits(*results)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_betas_change_as_in_dense_adam() -> None:
    batches = gradients(60, 80, 4, 10)
    weight = torch.randn(80, 4, dtype=torch.float64)
    params = [nn.Parameter(weight.clone()) for _ in range(2)]
    optimizers = [optim.Adam(params[:1], lazy="exact"), torch.optim.Adam(params[1:])]
    for step, (rows, values) in enumerate(batches):
        grad = coo(rows.tolist(), values.double(), 80, coalesced=True)
        for p, optimizer, g in zip(params, optimizers, (grad, grad.to_dense()), strict=True):
            optimizer.param_groups[0]["betas"] = (0.9, 0.999) if step < 30 else (0.8, 0.99)
            p.grad = g
            optimizer.step()
    optimizers[0].flush()
    torch.testing.assert_close(*params, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("event", ["none", "betas", "overflow"])
def test_skipped_steps_leave_every_bit(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if event == "overflow":
        monkeypatch.setattr(_history, "CAPACITY", 6)
    module, optimizer = asleep()
    sleepers = sleepers_of(module)
    module.weight.grad = coo([3, 4], torch.full((2, DIM), math.inf), ROWS)
    if event == "betas":
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    before = [snapshot(optimizer), bits(sleepers._history.table), bits(sleepers._history.step)]
    for flag in (1.0, 2.0, math.nan):
        optimizer.found_inf = torch.tensor(flag)
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.step()
        after = [snapshot(optimizer), bits(sleepers._history.table), bits(sleepers._history.step)]
        assert before == after
    module.weight.grad = coo([3, 4], torch.ones(2, DIM), ROWS)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert int(optimizer.state[module.weight]["step"]) == 6
    assert not {3, 4} & sleeping(module)


def test_training_with_skipped_steps_is_training_without_them() -> None:
    weights = []
    for skipping in (False, True):
        module, optimizer = make()
        for step in range(30):
            lookup_step(module, optimizer, torch.tensor([step % 7, 9 + step]))
            if skipping and step % 3 == 0:
                module.weight.grad = coo([1, 50], torch.ones(2, DIM), ROWS)
                optimizer.found_inf = torch.tensor(1.0)
                optimizer.step()
                del optimizer.found_inf
        optimizer.flush()
        weights.append(module.weight.detach())
    assert_same_bits(*weights)


# ---- readers ----


def test_flush_is_idempotent() -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    assert not torch.equal(want, module.weight)
    optimizer.flush()
    assert_same_bits(module.weight, want)
    assert not sleeping(module)
    before, version = snapshot(optimizer), module.weight._version
    optimizer.flush()
    assert before == snapshot(optimizer)
    assert version == module.weight._version
    lookup_step(module, optimizer, torch.arange(ROWS))  # nothing sleeps, and the optimizer stepped
    version = module.weight._version
    optimizer.flush()
    assert version == module.weight._version


@pytest.mark.parametrize("host", [True, False], ids=["cpu", "as on a device"])
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode"])
def test_lookups_see_caught_up_rows(mode: str, host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not host:
        monkeypatch.setattr(_exact, "on_host", lambda tensor: False)
    module, _optimizer = asleep()
    want = flushed_copy(module)
    module.train(mode == "train")
    ids = torch.tensor([[5, 0, 7], [5, 8, 1]], dtype=torch.int32)
    contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    version = module.weight._version
    with contexts.get(mode, torch.enable_grad)():
        got = module(ids)
        assert_same_bits(got, want[ids])
        assert sleeping(module) == set(range(2, ROWS)) - {5, 7, 8}
        assert module.weight._version > version
        version = module.weight._version
        assert_same_bits(module(ids), want[ids])  # nothing left to do
        if host:
            assert module.weight._version == version
    assert_same_bits(flushed_copy(module), want)


def test_ids_that_are_not_looked_up_wake_nothing() -> None:
    torch.manual_seed(0)
    bag = fnn.EmbeddingBag(ROWS, DIM, sparse=True, padding_idx=-3)
    optimizer = optim.AdamW(bag.parameters(), lr=0.1, lazy="exact")
    lookup_step(bag, optimizer, torch.arange(ROWS).view(1, -1))
    lookup_step(bag, optimizer, torch.tensor([[0, 1]]))
    want = flushed_copy(bag)
    assert_same_bits(bag(torch.tensor([[5, ROWS - 3]])).detach(), want[5:6])
    assert ROWS - 3 in sleeping(bag)
    assert 5 not in sleeping(bag)
    with pytest.raises(IndexError, match="index 99 at position 1"):
        bag(torch.tensor([[6, 99]]))
    assert 7 in sleeping(bag)
    for wrong in (torch.tensor([[0.5]]), torch.tensor(3), "ids"):
        with pytest.raises((TypeError, ValueError)):
            bag(wrong)
    assert bag(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, DIM)
    assert 7 in sleeping(bag)


def test_the_padding_row_decays_where_it_is_read() -> None:
    """`Embedding` returns the row, which dense AdamW shrinks like any other."""
    weight = torch.randn(8, 3, dtype=torch.float64)
    ours = fnn.Embedding.from_pretrained(weight.clone(), False, 2, sparse=True)
    peer = nn.Embedding.from_pretrained(weight.clone(), False, 2)
    optimizer = optim.AdamW(ours.parameters(), lr=0.1, lazy="exact")
    dense = torch.optim.AdamW(peer.parameters(), lr=0.1)
    for ids in ([2, 3], [1, 3], [1, 0], [2, 4]):
        torch.testing.assert_close(ours(torch.tensor(ids)), peer(torch.tensor(ids)))
        lookup_step(ours, optimizer, torch.tensor(ids))
        lookup_step(peer, dense, torch.tensor(ids))
    optimizer.flush()
    torch.testing.assert_close(ours.weight, peer.weight, rtol=1e-12, atol=1e-12)


def test_cost_is_that_of_the_rows_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = make(rows=5000)
    calls: list[tuple[str, set[int] | None]] = []

    def spy(name: str, position: int) -> None:
        operator = getattr(torch.ops.fastemb, name)

        def call(*args: Any) -> None:
            rows = args[position]
            calls.append((name, None if rows is None else set(rows.tolist())))
            operator(*args)

        monkeypatch.setattr(torch.ops.fastemb, name, call)

    spy("row_adam_catch_up_", 6)
    spy("row_adam_", 7)
    generator = torch.Generator().manual_seed(0)
    for step in range(50):
        calls.clear()
        ids = torch.randint(0, 5000, (20,), generator=generator)
        lookup_step(module, optimizer, ids)
        touched = [rows for _, rows in calls]
        assert all(rows is not None and rows <= set(ids.tolist()) for rows in touched)
        names = ["row_adam_catch_up_", "row_adam_"]
        assert [name for name, _ in calls] == (names if step == 0 else [names[0], *names])
    module.eval()
    calls.clear()
    module(ids)
    module(torch.tensor([7, 7, 9]))
    assert calls == [("row_adam_catch_up_", {7, 9})]
    optimizer.flush()
    calls.clear()
    module(torch.tensor([1, 2, 3]))
    optimizer.flush()
    assert calls == []


def test_threads_wake_each_row_once() -> None:
    for _ in range(5):
        module, _optimizer = asleep()
        want = flushed_copy(module)
        wrong: list[Tensor] = []

        def read(
            seed: int, module: Any = module, want: Tensor = want, wrong: list[Tensor] = wrong
        ) -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(10):
                ids = torch.randint(0, ROWS, (9,), generator=generator)
                with torch.no_grad():
                    got = module(ids)
                if not torch.equal(got, want[ids]):
                    wrong.append(ids)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert_same_bits(flushed_copy(module), want)


@pytest.mark.parametrize("what", ["lookup", "step", "flush"])
def test_one_thread_at_a_time_wakes_rows(what: str) -> None:
    module, optimizer = asleep()
    module.weight.grad = coo([3], torch.ones(1, DIM), ROWS)
    ids = torch.tensor([3])
    work = {"lookup": lambda: module(ids), "step": optimizer.step, "flush": optimizer.flush}[what]
    thread = threading.Thread(target=work)
    before = bits(module.weight)
    with sleepers_of(module).lock:
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert bits(module.weight) == before
    thread.join()
    assert 3 not in sleeping(module)


def test_threads_read_while_the_optimizer_steps() -> None:
    batches = gradients(100, ROWS, DIM, 10)
    module, optimizer = make()
    module.double()
    theirs = nn.Parameter(module.weight.detach().clone())
    dense = torch.optim.AdamW([theirs], lr=0.05)
    done = threading.Event()

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        while not done.is_set():
            with torch.no_grad():
                module(torch.randint(0, ROWS, (9,), generator=generator))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for rows, values in batches:
        module.weight.grad = coo(rows.tolist(), values.double(), ROWS, coalesced=True)
        theirs.grad = module.weight.grad.to_dense()
        optimizer.step()
        dense.step()
    done.set()
    for thread in threads:
        thread.join()
    optimizer.flush()
    torch.testing.assert_close(module.weight, theirs, rtol=1e-8, atol=1e-8)


# ---- graphs that keep the table ----


def weighted_bag() -> tuple[fnn.EmbeddingBag, optim.Adam]:
    torch.manual_seed(0)
    bag = fnn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, table="users")
    optimizer = optim.AdamW(bag.parameters(), lr=0.1, lazy="exact")
    lookup_step(bag, optimizer, torch.arange(ROWS).view(1, -1))
    lookup_step(bag, optimizer, torch.tensor([[0, 1]]))
    return bag, optimizer


def test_per_sample_weights_of_two_lookups() -> None:
    """The second wakes rows, which are none of the first."""
    bag, _optimizer = weighted_bag()
    want = flushed_copy(bag)
    ids = [torch.tensor([[3, 4, 5]]), torch.tensor([[5, 6, 7]])]
    weights = [torch.ones(1, 3, requires_grad=True) for _ in ids]
    outputs = [bag(i, per_sample_weights=w) for i, w in zip(ids, weights, strict=True)]
    sum(output.square().sum() for output in outputs).backward()
    for i, w, output in zip(ids, weights, outputs, strict=True):
        torch.testing.assert_close(w.grad, (want[i] @ (2 * output.detach().T)).squeeze(-1))


def test_a_graph_from_before_a_step_is_refused_by_name() -> None:
    bag, optimizer = weighted_bag()
    weights = torch.ones(1, 2, requires_grad=True)
    kept = bag(torch.tensor([[3, 4]]), per_sample_weights=weights)
    lookup_step(bag, optimizer, torch.tensor([[9, 10]]))
    with pytest.raises(RuntimeError, match="embedding_bag: table 'users' was written after"):
        kept.sum().backward()
    # Other gradients need no rows.
    kept = bag(torch.tensor([[3, 4]]))
    lookup_step(bag, optimizer, torch.tensor([[9, 10]]))
    kept.sum().backward()


def test_flush_does_not_break_a_graph() -> None:
    bag, optimizer = weighted_bag()
    weights = torch.ones(1, 2, requires_grad=True)
    kept = bag(torch.tensor([[3, 4]]), per_sample_weights=weights)
    optimizer.flush()
    bag.state_dict()
    kept.sum().backward()
    torch.testing.assert_close(weights.grad, bag.weight.detach()[3:5].sum(1).view(1, 2))


def test_graphs_of_others_are_refused_by_autograd() -> None:
    module, _optimizer = asleep()
    penalty = module.weight.square().sum()  # saves the table, sleeping rows and all
    module(torch.tensor([5]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_compiled_lookups_wake_rows() -> None:
    module, _optimizer = asleep()
    module.eval()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        for ids in (torch.tensor([3, 5, 0]), torch.tensor([3, 8, 9])):
            want = flushed_copy(module)
            assert_same_bits(compiled(ids), want[ids])
    # A graph from before a table has sleeping rows is not used for it.
    torch.compiler.reset()
    other, optimizer = make()
    compiled = torch.compile(other, backend="eager")
    with torch.no_grad():
        assert_same_bits(compiled(torch.tensor([3])), other.weight.detach()[3:4])
    lookup_step(other, optimizer, torch.arange(ROWS))
    lookup_step(other, optimizer, torch.tensor([0]))
    want = flushed_copy(other)
    with torch.no_grad():
        assert_same_bits(compiled(torch.tensor([3])), want[3:4])
        torch.compiler.reset()
        whole = torch.compile(other, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="wake_batch_outside_graph"):
            whole(torch.tensor([4]))


def test_cuda_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = asleep()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    with pytest.raises(RuntimeError, match=r"a lookup in a table .* CUDA graph"):
        module(torch.tensor([3]))
    module.weight.grad = coo([3], torch.ones(1, DIM), ROWS)
    with pytest.raises(RuntimeError, match=r"a step of a table .* CUDA graph"):
        optimizer.step()


# ---- copies and checkpoints ----


HANDED_ON: dict[str, Callable[[fnn.Embedding, optim.Adam], Tensor]] = {
    "state_dict": lambda m, o: m.state_dict()["weight"],
    "state_dict of the parent": lambda m, o: nn.Sequential(m).state_dict()["0.weight"],
    "deepcopy": lambda m, o: copy.deepcopy(m).weight,
    "deepcopy of the parent": lambda m, o: copy.deepcopy(nn.Sequential(m))[0].weight,
    "pickle": lambda m, o: pickle.loads(pickle.dumps(m)).weight,
    "to": lambda m, o: m.to("cpu").weight,
    "convert": lambda m, o: fastemb.convert(m) and m.weight,
    "revert": lambda m, o: fastemb.revert(m) and m.weight,
    "state_dict of the optimizer": lambda m, o: o.state_dict() and m.weight,
    "deepcopy of the optimizer": lambda m, o: copy.deepcopy(o).param_groups[0]["params"][0],
    "pickle of the optimizer": lambda m, o: pickle.loads(pickle.dumps(o)).param_groups[0]["params"][
        0
    ],
    "flush": lambda m, o: o.flush() or m.weight,
}


@pytest.mark.parametrize("way", HANDED_ON)
def test_copies_have_caught_up_rows(way: str) -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    got = HANDED_ON[way](module, optimizer)
    assert_same_bits(got, want)
    assert_same_bits(module.weight, want)


def test_converted_dtype() -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    fastemb.convert(module, torch.bfloat16)
    assert_same_bits(module.weight, want.to(torch.bfloat16))
    lookup_step(module, optimizer, torch.tensor([3, 4]))
    lookup_step(module, optimizer, torch.tensor([5]))
    optimizer.flush()
    assert_same_bits(module.weight, optimizer.state[module.weight]["master"].to(torch.bfloat16))


def test_loaded_weights_move_on_by_the_momentum() -> None:
    """As in dense Adam: from the loaded values, by the steps after loading only."""
    module, optimizer = asleep(kind="Adam")
    peer = nn.Embedding(ROWS, DIM)
    peer.load_state_dict(module.state_dict())
    dense = torch.optim.Adam(peer.parameters(), lr=0.05)
    dense.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((module, optimizer), (peer, dense)):
        lookup_step(m, o, torch.tensor([0]))
    loaded = torch.randn(ROWS, DIM)
    for m, o in ((module, optimizer), (peer, dense)):
        m.load_state_dict({"weight": loaded})
        assert torch.equal(m.weight, loaded)
        lookup_step(m, o, torch.tensor([0]))
    optimizer.flush()
    assert not torch.equal(module.weight, loaded)
    torch.testing.assert_close(module.weight, peer.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_to_and_from_dense_torch(kind: str, ours_first: bool) -> None:
    batches = gradients(60, ROWS, DIM, 10)
    weight = torch.randn(ROWS, DIM, dtype=torch.float64)

    def build(ours: bool, p: nn.Parameter) -> torch.optim.Optimizer:
        if ours:
            return getattr(optim, kind)([p], lr=0.01, lazy="exact")
        return getattr(torch.optim, kind)([p], lr=0.01)

    def run(part: list[Any], ours: bool, p: nn.Parameter, o: torch.optim.Optimizer) -> None:
        for rows, values in part:
            p.grad = coo(rows.tolist(), values.to(p.dtype), ROWS, coalesced=True)
            p.grad = p.grad if ours else p.grad.to_dense()
            o.step()

    p = nn.Parameter(weight.clone())
    whole = build(ours_first, p)
    run(batches, ours_first, p, whole)
    q = nn.Parameter(weight.clone())
    first = build(ours_first, q)
    run(batches[:30], ours_first, q, first)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    r = nn.Parameter(q.detach().clone())
    second = build(not ours_first, r)
    second.load_state_dict(saved)
    run(batches[30:], not ours_first, r, second)
    if ours_first:
        whole.flush()
    else:
        second.flush()
    torch.testing.assert_close(r, p, rtol=1e-10, atol=1e-10)
    # and the first one is none the worse for having been saved
    run(batches[30:], ours_first, q, first)
    if ours_first:
        first.flush()
    torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-10)


def test_loading_a_state_pays_what_the_old_one_owes() -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    other, second = make()
    lookup_step(other, second, torch.arange(ROWS))
    optimizer.load_state_dict(second.state_dict())
    assert_same_bits(module.weight, want)
    assert int(optimizer.state[module.weight]["step"]) == 1
    lookup_step(module, optimizer, torch.tensor([0]))
    assert sleeping(module) == set(range(1, ROWS))


def test_deepcopied_training_goes_on_alike() -> None:
    module, optimizer = asleep()
    twin, copied = copy.deepcopy((module, optimizer))
    assert copied.param_groups[0]["params"][0] is twin.weight
    for m, o in ((module, optimizer), (twin, copied)):
        for row in range(10):
            lookup_step(m, o, torch.tensor([row, row + 20]))
        o.flush()
    assert_same_bits(module.weight, twin.weight)


# ---- whose rows they are ----


def test_rows_outlive_their_optimizer() -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    del optimizer
    gc.collect()
    assert_same_bits(module(torch.tensor([9])).detach(), want[9:10])
    assert_same_bits(module.weight, want)
    assert id(module.weight) not in TABLES


def test_entries_go_with_the_parameter() -> None:
    module, optimizer = asleep()
    key = id(module.weight)
    assert key in TABLES
    del module, optimizer
    gc.collect()
    assert key not in TABLES


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_another_optimizer_takes_over(kind: str) -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    other = getattr(optim, kind)(
        module.parameters(), lr=0.0, **({"lazy": "exact"} if kind == "AdamW" else {})
    )
    module.weight.grad = coo([3], torch.ones(1, DIM), ROWS)
    other.step()
    assert_same_bits(module.weight, want)
    assert "row_step" not in optimizer.state[module.weight]
    for _ in range(3):  # in turns: each knows its own steps
        lookup_step(module, optimizer, torch.tensor([1]))
        lookup_step(module, other, torch.tensor([2]))
    assert int(optimizer.state[module.weight]["step"]) == 8
    optimizer.flush()


def test_a_cleared_state_begins_anew() -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.0
    module.weight.grad = coo([3], torch.ones(1, DIM), ROWS)
    optimizer.step()
    assert_same_bits(module.weight, want)
    assert int(optimizer.state[module.weight]["step"]) == 1


# ---- options ----


def test_options_that_contradict_dense_semantics() -> None:
    p = [nn.Parameter(torch.zeros(3, 2))]
    for kind, options, words in (
        (optim.Adam, {"lazy": "dense"}, "lazy must be 'rows' or 'exact'"),
        (optim.Adam, {"lazy": "exact", "decay": "all"}, "decay must be left at its default"),
        (optim.AdamW, {"lazy": "exact", "decay": "touched"}, "decay must be left at its default"),
        (optim.Adam, {"lazy": "exact", "row_bias_correction": True}, "row_bias_correction must be"),
    ):
        with pytest.raises(ValueError, match=words):
            kind(p, **options)
    with pytest.raises(TypeError, match="lazy"):
        optim.SparseAdam(p, lazy="exact")


def test_one_warning_says_what_lazy_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(kind: Callable[..., Any], **options: Any) -> list[str]:
        p = nn.Parameter(torch.zeros(3, 2))
        p.grad = coo([1], torch.ones(1, 2), 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kind([p], **options).step()
        return [str(w.message) for w in caught if "fastemb" in str(w.message)]

    monkeypatch.setattr(_lazy_adam, "_warned_of_rows", False)
    assert step(optim.SparseAdam) == []
    for lazy in ("rows", "exact"):
        assert step(optim.AdamW, lazy=lazy) == []
    (message,) = step(optim.AdamW)
    assert "fastemb.optim.AdamW" in message
    assert "momentum" in message
    assert "lazy='exact'" in message
    assert step(optim.Adam) == []
