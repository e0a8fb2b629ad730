"""Ctrl-C in the middle of what must happen as a whole: it comes later, and nothing is lost."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import (
    CASE,
    engine_values,
    ids_of,
    in_memory,
    limits,
    offloaded,
    pinned,
    saved,
    step,
    steps,
)

from fastemb.offload._interrupts import uninterrupted

pytestmark = limits


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Those of a program in the foreground; one in the background begins with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def _interrupted(function: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The function, in whose call number ``at`` there is a Ctrl-C, before it and after it."""
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            signal.raise_signal(signal.SIGINT)
        result = function(*args, **options)
        if calls == at:
            signal.raise_signal(signal.SIGINT)
        return result

    return call


# What changes hands in the planning of a batch: owner, method, and a call that has work to do.
PLACES = {
    "slots are chosen": ("slots", "_choose", 7),
    "uses are counted": ("_uses", "used", 7),
    "pins are taken away": ("slots", "release", 2),
    "rows leave": ("transfers", "write_back", 2),
    "rows come": ("transfers", "fetch", 9),
    "a batch begins": ("table", "_show", 3),
    "a batch ends": ("table", "_hide", 3),
}


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on(place: str, prefetch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded(cache=30, depth=1)
    model.state_dict()  # which makes the cache
    table = engine.tables["t0"]
    owner, method, at = PLACES[place]
    owners = {"table": table, "slots": table.slots, "_uses": table.slots._uses}
    target = owners.get(owner, engine.transfers)
    monkeypatch.setattr(target, method, _interrupted(getattr(target, method), at))

    done = interrupts = 0
    while done < len(batches):
        left = batches[done:]
        try:
            for batch in engine.prefetch(left, ids=ids_of) if prefetch else left:
                step(model, optimizer, batch)
                done += 1
        except KeyboardInterrupt:
            interrupts += 1
    if prefetch or owner != "table":  # only batches that were announced begin and end
        assert interrupts, f"{method} was called less than {at} times"
    gc.collect()
    assert saved(model, optimizer) == in_memory(CASE, batches)
    assert engine.verify() == {"t0": [], "t1": []}
    assert pinned(engine) == 0


def test_a_flush_that_is_interrupted_is_not_taken_for_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    steps(model, optimizer, batches)
    transfers = engine.transfers
    monkeypatch.setattr(transfers, "write_back", _interrupted(transfers.write_back, 1))
    with pytest.raises(KeyboardInterrupt):
        engine.flush()
    assert saved(model, optimizer) == in_memory(CASE, batches)


def test_a_load_that_is_interrupted_leaves_nothing_old_in_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    steps(model, optimizer, batches)
    values = {name: value + 1 for name, value in engine_values(model).items()}
    table = engine.tables["t0"]
    monkeypatch.setattr(table.host, "seal", _interrupted(table.host.seal, 1))
    with pytest.raises(KeyboardInterrupt):
        engine.load_state_dict(values)
    rows = table.slots.row_of[table.slots.row_of >= 0]
    assert len(rows)
    found = model.t0(rows.view(-1, 1))
    assert (found.view_as(values["t0"][rows]) == values["t0"][rows]).all()


@pytest.mark.parametrize("files", [False, True])
def test_a_first_use_that_is_interrupted_is_begun_anew(
    files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded(storage=tmp_path if files else None)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", _interrupted(torch.Tensor.copy_, 1))
        with pytest.raises(KeyboardInterrupt):
            model.state_dict()
    steps(model, optimizer, batches)
    assert saved(model, optimizer) == in_memory(CASE, batches)
    engine.close()


def test_an_interrupt_while_a_file_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded(storage=tmp_path)
    rename = os.replace

    def interrupted(old: Path, new: Path) -> None:
        rename(old, new)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.state_dict()
    steps(model, optimizer, batches)
    assert saved(model, optimizer) == in_memory(CASE, batches)
    engine.close()


def _interrupted_work(seen: list[str]) -> None:
    with uninterrupted:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
            signal.raise_signal(number)
        seen.append("done")


def test_handlers_are_called_in_order_when_all_is_done() -> None:
    seen: list[str] = []
    kinds = {signal.SIGTERM: "terminate", signal.SIGHUP: "hang up"}
    before = {
        number: signal.signal(number, lambda got, frame: seen.append(kinds[signal.Signals(got)]))
        for number in kinds
    }
    try:
        with uninterrupted:
            signal.raise_signal(signal.SIGHUP)
            with uninterrupted:
                signal.raise_signal(signal.SIGTERM)
            assert not seen
        assert seen == ["hang up", "terminate"]
        with pytest.raises(KeyboardInterrupt):
            _interrupted_work(seen)
        assert seen[2:] == ["done", "hang up"]  # a handler that raises keeps no other from its turn
        with pytest.raises(ZeroDivisionError), uninterrupted:
            raise ZeroDivisionError
        signal.raise_signal(signal.SIGTERM)
        assert seen[4:] == ["terminate"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ignored_signals_and_other_threads_are_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

    def elsewhere() -> None:
        with uninterrupted:
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[Any] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert handlers == [before]
