"""Loops over an `OffloadEngine` that break, fail, nest, evaluate, and outlive it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from offload_cases import (
    CASE,
    Case,
    TableCase,
    build,
    engine_values,
    ids_of,
    in_memory,
    limits,
    loss_of,
    new_engine,
    offloaded,
    optimizer_of,
    pinned,
    raises,
    saved,
    step,
    steps,
    train,
)
from optim_cases import bits
from torch.utils.data import DataLoader, Dataset

from fastemb.offload import CacheTooSmallError, OffloadEngine
from fastemb.offload._lanes import Lane

pytestmark = limits


# ---- loops that end early ----


def test_a_loop_that_breaks_and_the_next_one() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    for number, batch in enumerate(engine.prefetch(batches, ids=ids_of)):
        step(model, optimizer, batch)
        if number == 2:
            break
    assert pinned(engine) == 0
    for batch in engine.prefetch(batches, ids=ids_of):
        step(model, optimizer, batch)
    assert saved(model, optimizer) == in_memory(CASE, batches[:3] + batches)
    assert engine.stats.batches == 3 + len(batches)


def test_a_prefetcher_goes_round_as_often_as_its_loader() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    loader = engine.prefetch(batches, ids=ids_of)
    assert len(loader) == len(batches)
    for _ in range(3):
        train(CASE, model, optimizer, loader)
    assert saved(model, optimizer) == in_memory(CASE, batches * 3)


def test_an_exception_in_the_body_of_the_loop() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    with pytest.raises(ZeroDivisionError):
        steps(model, optimizer, engine.prefetch(batches, ids=ids_of), stop=3)
    train(CASE, model, optimizer, engine.prefetch(batches, ids=ids_of))
    assert saved(model, optimizer) == in_memory(CASE, batches[:4] + batches)
    assert pinned(engine) == 0


@pytest.mark.parametrize("depth", [0, 2, 4])
@pytest.mark.parametrize("place", ["loader", "ids", "range", "dtype", "name"])
def test_an_error_comes_in_place_of_the_batch_that_it_concerns(place: str, depth: int) -> None:
    batches = CASE.batches()
    bad = 4

    def loader() -> Iterator[dict[str, Any]]:
        for number, batch in enumerate(batches):
            if place == "loader" and number == bad:
                raise OSError("no more data")
            yield {**batch, "number": number}

    def ids(batch: dict[str, Any]) -> dict[str, Any]:
        given = ids_of(batch)
        if batch["number"] != bad:
            return given
        if place == "ids":
            raise LookupError("no ids")
        if place == "range":
            return {**given, "t1": torch.tensor([0, 40])}
        if place == "dtype":
            return {**given, "t1": torch.tensor([0.5])}
        return {**given, "t9": torch.tensor([0])}

    kind, *text = {
        "loader": (OSError, "no more data"),
        "ids": (LookupError, "no ids"),
        "range": (IndexError, "prefetch: index 40", "'t1' with 40 rows"),
        "dtype": (
            TypeError,
            "prefetch: ids of table 't1' must be an int32 or int64 tensor",
            "float32",
        ),
        "name": (ValueError, "prefetch: ids must name tables of the engine (t0, t1)", "'t9'"),
    }[place]
    engine, model, optimizer = offloaded(depth=depth, cache=60)
    done = 0
    with raises(kind, *text) as error:
        for batch in engine.prefetch(loader(), ids=ids):
            step(model, optimizer, batch)
            done += 1
    assert done == bad
    # Also while somebody keeps the error, and with it the frames it came from.
    assert pinned(engine) == 0
    assert error.value is not None
    train(CASE, model, optimizer, engine.prefetch(batches, ids=ids_of))
    assert saved(model, optimizer) == in_memory(CASE, batches[:bad] + batches)


class Mortal(Dataset[Any]):
    """The worker that is asked for item ``bad`` dies without a word."""

    def __init__(self, batches: list[dict[str, Any]], bad: int) -> None:
        self.batches, self.bad = batches, bad

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            os._exit(3)
        return self.batches[index]


def _only(items: list[Any]) -> Any:
    return items[0]


def test_a_loader_worker_that_dies() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded(depth=1)

    loader = DataLoader(Mortal(batches, 5), num_workers=1, collate_fn=_only, timeout=20)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        steps(model, optimizer, engine.prefetch(loader, ids=ids_of))
    gc.collect()  # or torch raises it again when the next process ends
    # torch raises it wherever the loop just is, so the last step may be made in part.
    plain, _ = build(CASE, None)
    engine.load_state_dict(engine_values(plain))
    model.load_state_dict(plain.state_dict())
    del optimizer
    optimizer = optimizer_of(CASE, model)
    optimizer.zero_grad()
    for batch in engine.prefetch(batches, ids=ids_of):
        step(model, optimizer, batch)
    assert saved(model, optimizer) == in_memory(CASE, batches)


@pytest.mark.parametrize("method", ["fetch", "write_back"])
def test_an_interrupt_while_rows_are_asked_for(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was planned but not done must not pass for done."""
    case = Case((TableCase(rows=60, bag=False),))
    engine, model, optimizer = offloaded(case, cache=4)
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[11, 12, 13]])
    values = model.t0.weight.detach().clone()
    model.t0(first).sum().backward()
    optimizer.step()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.transfers, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.t0(second)
    if method == "fetch":  # nothing is lost
        assert torch.equal(model.t0(second), values[second])
        model.t0(second).sum().backward()
        optimizer.step()
    else:
        for action in (lambda: model.t0(second), engine.flush, model.state_dict):
            with raises(RuntimeError, "'t0'", "interrupted", "load_state_dict"):
                action()
        engine.load_state_dict({"t0": values})
        assert torch.equal(model.t0(second), values[second])
    assert engine.verify() == {"t0": []}


def test_an_interrupt_while_slots_change_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    train(CASE, model, optimizer, batches[:2])
    values = engine_values(model)
    kept = iter(engine.prefetch(batches, ids=ids_of))
    next(kept)
    late = model.t0(torch.tensor([[1, 2]])).sum()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.tables["t0"].slots._uses, "used", interrupt)
        with pytest.raises(KeyboardInterrupt):
            steps(model, optimizer, engine.prefetch(batches, ids=ids_of))
    for action in (engine.flush, model.state_dict, lambda: model(batches[1]["lookups"])):
        with raises(RuntimeError, "'t0'", "interrupted while its slots changed hands"):
            action()
    engine.load_state_dict(values)
    assert {name: bits(value) for name, value in engine_values(model).items()} == {
        name: bits(value) for name, value in values.items()
    }
    with raises(RuntimeError, "'t0'", "begun anew after this lookup"):
        late.backward()
    for batch in batches[1:]:  # the rows that were looked ahead for come into the new cache
        assert next(kept) is batch
        for name, value in values.items():
            rows = ids_of(batch)[name].unique()
            assert torch.equal(getattr(model, name)(rows.view(-1, 1)).view(-1, 3), value[rows])
    kept.close()  # type: ignore[attr-defined]
    train(CASE, model, optimizer, engine.prefetch(batches, ids=ids_of))
    assert engine.verify() == {"t0": [], "t1": []}
    assert pinned(engine) == 0


def test_an_iterator_that_is_kept_holds_its_rows_until_it_is_dropped() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded(cache=60, depth=1)
    kept = iter(engine.prefetch(batches, ids=ids_of))
    step(model, optimizer, next(kept))
    assert pinned(engine) > 0
    train(CASE, model, optimizer, engine.prefetch(batches, ids=ids_of))
    step(model, optimizer, next(kept))
    del kept
    gc.collect()
    assert pinned(engine) == 0
    assert saved(model, optimizer) == in_memory(CASE, [batches[0], *batches, batches[1]])


def test_the_collector_may_end_a_loop_on_a_lane_that_is_waited_for() -> None:
    def delay(label: str) -> None:
        if label == "drain":
            gc.collect()

    batches = CASE.batches()
    engine, model, optimizer = offloaded(make_lane=lambda *given: Lane(*given, delay=delay))
    loop = [iter(engine.prefetch(batches, ids=ids_of))]
    step(model, optimizer, next(loop[0]))
    ended = weakref.ref(loop[0])
    loop.append(loop)  # a cycle
    del loop
    engine.flush()
    assert ended() is None
    assert pinned(engine) == 0
    steps(model, optimizer, engine.prefetch(batches[1:], ids=ids_of))
    assert saved(model, optimizer) == in_memory(CASE, batches)


def test_a_kept_iterator_is_named_where_its_rows_are_in_the_way() -> None:
    engine, _, _ = offloaded(Case((TableCase(rows=60),)), cache=16, depth=2)
    first, *others = [{"t0": torch.arange(begin, begin + 10)} for begin in (0, 10, 20, 30)]
    kept = iter(engine.prefetch([first]))
    next(kept)
    with raises(CacheTooSmallError, "'t0'", "10 more are held for batches", "16 slots"):
        list(engine.prefetch(others))
    kept.close()  # type: ignore[attr-defined]
    assert len(list(engine.prefetch(others))) == 3


def test_an_empty_loader() -> None:
    engine, _, _ = offloaded()
    assert list(engine.prefetch([], ids=ids_of)) == []
    assert engine.stats.batches == 0


def test_a_batch_does_not_wait_for_the_rows_of_those_after_it() -> None:
    """Which come while it is trained."""
    order: list[str] = []
    trained_first = threading.Event()

    def delay(label: str) -> None:
        if label == "gather":
            if len(order) == 1:
                trained_first.wait(20)
            order.append(label)

    case = Case((TableCase(rows=60),))
    engine, model, _ = offloaded(
        case, depth=1, make_lane=lambda name, device: Lane(name, device, delay=delay)
    )
    for batch in engine.prefetch([{"t0": torch.tensor([[1, 2]])}, {"t0": torch.tensor([[3]])}]):
        model.t0(batch["t0"])
        order.append("trained")
        trained_first.set()
    assert order == ["gather", "trained", "gather", "trained"]


# ---- nesting and evaluation ----


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_within_training(grad: Any, wrapped: bool) -> None:
    batches = CASE.batches()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(CASE, engine)
        seen = []

        def loader(items: list[Any], prefetch: bool = True) -> Any:
            return items if engine is None or not prefetch else engine.prefetch(items, ids=ids_of)

        with grad():  # also the very first lookup
            seen.append(bits(model(batches[3]["lookups"]).clone()))
        for number, batch in enumerate(loader(batches)):
            loss, _ = loss_of(model, batch)
            loss.backward()
            if number % 3 == 1:
                model.eval()
                with grad():
                    for other in loader(batches[2:5], wrapped):
                        seen.append(bits(model(other["lookups"]).clone()))
                model.train()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(bits(loss))
        return (seen, *saved(model, optimizer))

    assert run(new_engine(cache=60)) == run(None)


def test_evaluation_holds_nothing() -> None:
    engine, model, _ = offloaded()
    outputs = []
    with torch.no_grad():
        for batch in CASE.batches():
            outputs.append(model(batch["lookups"]))
    assert pinned(engine) == 0


def test_ids_that_were_not_announced_are_fetched_and_announced_ones_need_no_lookup() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded(cache=60)

    def others(batch: dict[str, Any]) -> dict[str, Any]:
        given = ids_of(batch)
        return {"t0": given["t0"].flatten()[:2], "t1": torch.arange(20)}

    train(CASE, model, optimizer, engine.prefetch(batches, ids=others))
    assert saved(model, optimizer) == in_memory(CASE, batches)


def test_ids_may_be_several_tensors_or_those_of_some_tables() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()

    def some(batch: dict[str, Any]) -> dict[str, Any]:
        return {"t0": list(ids_of(batch)["t0"].int())}

    train(CASE, model, optimizer, engine.prefetch(batches, ids=some))
    assert saved(model, optimizer) == in_memory(CASE, batches)


def test_batches_that_are_mappings_need_no_ids_function() -> None:
    batches = [
        {"t0": b["lookups"]["t0"]["input"], "t1": b["lookups"]["t1"]["input"], "x": 1}
        for b in CASE.batches()
    ]
    engine, model, _ = offloaded()
    for batch in engine.prefetch(batches):
        assert batch["x"] == 1
        hits = engine.stats.hits
        model.t0(batch["t0"])
        assert engine.stats.hits == hits  # was there: the cache was not even asked
    with raises(TypeError, "without ids=", "t0, t1", "list"):
        list(engine.prefetch([[1, 2]]))
    with raises(TypeError, "without ids=", "t0, t1", "keys ['x']"):
        list(engine.prefetch([{"x": 1}]))
    with raises(TypeError, "must return a mapping where there are 2 tables"):
        list(engine.prefetch(batches, ids=lambda batch: batch["t0"]))


# ---- closing ----


def test_close_brings_the_tables_up_to_date_and_ends_the_engine() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    train(CASE, model, optimizer, engine.prefetch(batches, ids=ids_of))
    counted = engine.stats[:3]
    assert min(counted) > 0
    engine.close()
    engine.close()
    assert engine.stats[:3] == counted
    assert saved(model, optimizer) == in_memory(CASE, batches)
    with raises(RuntimeError, "closed"):
        model(batches[0]["lookups"])
    with raises(RuntimeError, "closed"):
        list(engine.prefetch(batches, ids=ids_of))


def test_a_loop_whose_engine_was_closed_is_over() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded(depth=1)
    loop = iter(engine.prefetch(batches, ids=ids_of))
    step(model, optimizer, next(loop))
    engine.close()
    for _ in batches:  # the second has been looked ahead for, the others have not
        with raises(RuntimeError, "the OffloadEngine is closed"):
            next(loop)
    engine, *_ = offloaded()
    for _ in engine.prefetch(batches[:1], ids=ids_of):
        engine.close()


def test_a_with_block_closes_the_engine_also_after_an_error() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    with pytest.raises(ZeroDivisionError), engine as entered:
        steps(model, optimizer, entered.prefetch(batches, ids=ids_of), stop=3)
    with raises(RuntimeError, "closed"):
        engine.flush()
    assert saved(model, optimizer) == in_memory(CASE, batches[:4])


@pytest.mark.parametrize("prefetch", [True, False])
def test_lookups_of_other_threads(prefetch: bool) -> None:
    """They wait for each other, and find their rows, while one thread trains another table."""
    case = Case((TableCase(rows=200), TableCase(rows=40, bag=False)), steps=30)
    batches = case.batches()
    engine, model, optimizer = offloaded(case, cache={"t0": 60, "t1": 36})
    model.t0.weight.requires_grad_(False)
    values = model.t0.weight.detach().clone()
    wrong: list[object] = []

    def look_up(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(100):
                ids = torch.randint(0, 200, (10, 1), generator=generator)
                if not torch.equal(model.t0(ids), values[ids[:, 0]]):
                    wrong.append(ids)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for batch in engine.prefetch(batches, ids=ids_of) if prefetch else batches:
        step(model, optimizer, batch)
    for thread in threads:
        thread.join()
    assert not wrong
    plain, plain_optimizer = build(case, None)
    plain.t0.weight.requires_grad_(False)
    for batch in batches:
        step(plain, plain_optimizer, batch)
    assert saved(model, optimizer) == saved(plain, plain_optimizer)
    assert engine.verify() == {"t0": [], "t1": []}
    assert pinned(engine) == 0


def test_close_after_the_model_is_gone(tmp_path: Any) -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded(storage=tmp_path)
    train(CASE, model, optimizer, engine.prefetch(batches, ids=ids_of))
    want, _ = in_memory(CASE, batches)
    del model, optimizer
    gc.collect()
    engine.close()
    again = new_engine(cache=36, storage=tmp_path, resume=True)
    model, _ = build(CASE, again, seed=5)
    state = model.state_dict()
    for name in ("t0.weight", "t1.weight"):
        assert bits(state[name]) == want[name]


def test_an_engine_without_tables() -> None:
    engine = new_engine()
    engine.flush()
    assert engine.state_dict() == {}
    assert engine.stats.hit_rate == 1.0
    assert engine.stats.hidden_share == 1.0
    engine.close()
