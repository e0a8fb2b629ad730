"""Optimizers that come, go and fail while a table is offloaded."""

from __future__ import annotations

from typing import Any

import pytest
from offload_cases import Case, build, limits, new_engine, raises, saved
from offload_cases import train as train_case

import fastemb
from fastemb.offload import OffloadEngine
from fastemb.offload._host import HostTable

pytestmark = limits


def test_an_optimizer_takes_over_from_one_that_has_made_steps() -> None:
    case = Case()
    data = case.batches()

    def run(engine: OffloadEngine | None) -> tuple[Any, Any, Any]:
        model, first = build(case, engine)
        train_case(case, model, first, data)
        second = fastemb.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        train_case(case, model, second, data)
        return saved(model, second), model, first

    offloaded, model, first = run(new_engine(cache=18))
    assert offloaded == run(None)[0]
    with raises(RuntimeError, "'t0': another optimizer has trained it", "this Adam"):
        train_case(case, model, first, data)


def test_of_two_optimizers_the_one_that_makes_steps_trains() -> None:
    case = Case()
    data = case.batches()
    model, first = build(case, new_engine(cache=18))
    fastemb.optim.SGD(model.parameters(), lr=0.1)
    train_case(case, model, first, data)
    alone, optimizer = build(case, None)
    train_case(case, alone, optimizer, data)
    assert saved(model, first) == saved(alone, optimizer)


def test_an_optimizer_may_follow_one_that_is_gone() -> None:
    case = Case()
    data = case.batches()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(case, engine)
        train_case(case, model, optimizer, data)
        del optimizer
        optimizer = fastemb.optim.Adam(model.parameters(), lr=0.05, lazy="rows", amsgrad=True)
        train_case(case, model, optimizer, data)
        return saved(model, optimizer)

    assert run(new_engine(cache=18)) == run(None)


def test_an_optimizer_changes_nothing_before_it_makes_a_step() -> None:
    """It may get the states of the one before, as in memory."""
    case = Case()
    data = case.batches()

    def run(engine: OffloadEngine | None) -> list[Any]:
        model, first = build(case, engine)
        train_case(case, model, first, data)
        seen = [saved(model, first)]
        second = fastemb.optim.Adam(model.parameters(), lr=0.01, lazy="rows")
        assert saved(model, first) == seen[0]
        second.load_state_dict(first.state_dict())
        seen.append(saved(model, second))
        train_case(case, model, second, data)
        return [*seen, saved(model, second)]

    assert run(new_engine(cache=18)) == run(None)


def test_an_optimizer_that_cannot_be_made_changes_nothing() -> None:
    case = Case()
    data = case.batches()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(case, engine)
        train_case(case, model, optimizer, data)
        groups = [
            {"params": model.t0.parameters()},
            {"params": model.layer.parameters(), "betas": (2, 0)},
        ]
        with pytest.raises(ValueError, match="betas"):
            fastemb.optim.Adam(groups)
        train_case(case, model, optimizer, data)
        return saved(model, optimizer)

    assert run(new_engine(cache=18)) == run(None)


def test_records_that_cannot_grow_stay_as_they_are(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, say, when an optimizer wants room for its states."""
    case = Case(optimizer="SGD")
    data = case.batches()

    def run(engine: OffloadEngine | None) -> list[Any]:
        model, first = build(case, engine)
        train_case(case, model, first, data)
        second = fastemb.optim.Adam(model.parameters(), lr=0.01, lazy="rows")
        if engine is not None:
            with monkeypatch.context() as full:
                full.setattr(HostTable, "rebuilt", _no_space)
                with pytest.raises(OSError, match="no space"):
                    train_case(case, model, second, data)
            second.zero_grad()
        train_case(case, model, first, data)
        seen = [saved(model, first)]
        train_case(case, model, second, data)
        return [*seen, saved(model, second)]

    assert run(new_engine(cache=18, storage=tmp_path)) == run(None)


def _no_space(*args: object, **kwargs: object) -> None:
    raise OSError("no space")
