"""``lazy="exact"``: dense Adam's result at the cost of the rows that are used."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from lazy_training import (  # noqa: F401  (fixtures)
    DIM,
    ROWS,
    _no_table_is_left,
    asleep,
    errors,
    flushed_copy,
    gradients,
    lookup_step,
    make,
    sleepers_of,
    sleeping,
    train,
)
from optim_cases import assert_same_bits, bits, coo, snapshot
from torch import Tensor, nn

from fastemb import nn as fnn
from fastemb import optim
from fastemb.optim import _exact, _history

# ---- the numbers of dense Adam ----


@pytest.mark.usefixtures("one_thread")
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


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.01},
        {"weight_decay": 0.01, "amsgrad": True},
        {"weight_decay": 0.01, "maximize": True},
        {"eps": 1e-3},
        {"betas": (0.0, 0.9)},
        {"betas": (0.99, 0.9)},  # the series diverges
        {"betas": (0.9, 0.0)},
        {"betas": (0.9, 0.01), "eps": 1e-2},  # a row that sleeps moves far with less
        {"betas": (0.9, 1e-300), "amsgrad": True},
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


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.9, 0.0), (0.9, 1e-320), (1e-200, 0.0)], ids=str)
def test_second_moments_that_fade_at_once(betas: tuple[float, float]) -> None:
    batches = gradients(30, 20, 2, 5)
    weight = torch.randn(20, 2, dtype=torch.float64)
    want, _ = train(torch.optim.Adam, weight, batches, 1e-2, False, betas=betas)
    got, _ = train(optim.Adam, weight, batches, 1e-2, True, lazy="exact", betas=betas)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("eps", [1e-8, 1e-5, 1e-3])
def test_float64_and_tables_of_one_column(eps: float) -> None:
    batches = gradients(400, 50, 4, 2)
    weight = torch.randn(50, 4, dtype=torch.float64)
    want, _ = train(torch.optim.AdamW, weight, batches, 1e-2, False, eps=eps)
    got, _ = train(optim.AdamW, weight, batches, 1e-2, True, lazy="exact", eps=eps)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)

    flat = [(rows, values[:, 0]) for rows, values in batches]
    want, _ = train(torch.optim.AdamW, weight[:, 0], flat, 1e-2, False, eps=eps)
    got, _ = train(optim.AdamW, weight[:, 0], flat, 1e-2, True, lazy="exact", eps=eps)
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
