"""What a loop over an `OffloadEngine` has seen ahead of its turn is neither lost nor in the way."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from offload_cases import (
    CASE,
    Case,
    TableCase,
    build,
    ids_of,
    largest,
    limits,
    loss_of,
    new_engine,
    offloaded,
    pinned,
    saved,
    step,
)
from optim_cases import bits
from torch.utils.data import DataLoader, Dataset

from fastemb.offload import CacheTooSmallError

pytestmark = limits

ONE = Case((TableCase(rows=60, bag=False),))


@pytest.mark.parametrize("depth", [0, 1, 3, 20])
def test_a_generator_goes_on_in_the_next_loop(depth: int) -> None:
    def numbers() -> Iterator[int]:
        yield from range(7)
        raise OSError("no more data")

    def loops(source: Any) -> list[Any]:
        """As far as an error, in loops of two batches; nothing may come after it."""
        seen: list[Any] = []
        try:
            while True:
                seen.append(list(itertools.islice(source, 2)))
        except OSError as error:
            seen.append(str(error))
        return [*seen, list(source)]

    engine, _, _ = offloaded(ONE, depth=depth)
    ids = {"t0": torch.tensor([1])}
    assert loops(engine.prefetch(numbers(), ids=lambda _: ids)) == loops(numbers())
    assert pinned(engine) == 0
    # Nothing that was seen in one epoch comes in another where each begins anew.
    again = engine.prefetch(range(7), ids=lambda _: ids)
    assert [list(itertools.islice(again, 2)) for _ in range(2)] == [[0, 1], [0, 1]]


class Faulty(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index in (2, 3, 7):
            raise ValueError(f"no item {index}")
        return index


def every_batch(source: Any, kind: type[BaseException]) -> list[Any]:
    """What an iterator gives, with its errors in between, until it is over."""
    iterator, seen = iter(source), []
    while True:
        try:
            seen.append(next(iterator))
        except StopIteration:
            return [*seen, next(iterator, "over")]
        except kind as error:
            seen.append(str(error).splitlines()[0])


@pytest.mark.parametrize("depth", [0, 2, 20])
def test_an_iterator_goes_on_after_an_error_as_that_of_its_loader(depth: int) -> None:
    loader = DataLoader(Faulty(), batch_size=None)
    engine, _, _ = offloaded(ONE, depth=depth)
    got = every_batch(engine.prefetch(loader, ids=lambda n: {"t0": torch.tensor([n])}), ValueError)
    assert got == every_batch(loader, ValueError)
    assert len(got) == 9
    ids = [torch.tensor([n]) for n in (1, 60, 3)]
    seen = every_batch(engine.prefetch(ids, ids=lambda ids: {"t0": ids}), IndexError)
    assert [int(seen[0]), int(seen[2]), seen[3]] == [1, 3, "over"]
    assert "index 60" in seen[1]
    assert pinned(engine) == 0


def test_a_batch_without_room_comes_once_there_is_some() -> None:
    engine, model, optimizer = offloaded(ONE, cache=20)
    batches = [{"t0": torch.arange(begin, begin + 9)} for begin in range(0, 50, 9)]
    iterator = iter(engine.prefetch(batches))
    done, errors = [], 0
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except CacheTooSmallError:
            errors += 1
            optimizer.step()
            optimizer.zero_grad()
            continue
        model.t0(batch["t0"]).sum().backward()  # waits for a step, and stays in the cache
        done.append(batch)
    assert all(map(operator.is_, done, batches))
    assert (len(done), errors) == (6, 2)


def test_an_iterator_that_is_closed_is_over() -> None:
    engine, _, _ = offloaded(ONE)
    iterator = iter(engine.prefetch([0, 1], ids=lambda _: {"t0": torch.tensor([1])}))
    assert next(iterator) == 0
    iterator.close()  # type: ignore[attr-defined]
    assert next(iterator, None) is None
    assert pinned(engine) == 0


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_what_is_only_looked_ahead_for_gives_way(depth: int, wrapped: bool) -> None:
    """To an evaluation in between: the cache has room for one batch of each loop."""
    batches = CASE.batches()
    others = dataclasses.replace(CASE, seed=7).batches()
    needed = [largest(CASE, items) for items in (batches, others)]
    engine = new_engine(depth=depth, cache={n: needed[0][n] + needed[1][n] for n in needed[0]})
    model, optimizer = build(CASE, engine)
    plain, plain_optimizer = build(CASE, None)
    for batch in engine.prefetch(batches, ids=ids_of):
        loss_of(model, batch)[0].backward()
        with torch.no_grad():
            for other in engine.prefetch(others, ids=ids_of) if wrapped else others:
                assert bits(model(other["lookups"])) == bits(plain(other["lookups"]))
        optimizer.step()
        optimizer.zero_grad()
        step(plain, plain_optimizer, batch)
    assert saved(model, optimizer) == saved(plain, plain_optimizer)
    assert engine.stats.batches == len(batches) + len(batches) * len(others) * wrapped
    assert pinned(engine) == 0
