"""Optimizers that come, go and fail while a table is offloaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from offload_cases import (
    OPTIMIZERS,
    Case,
    Net,
    TableCase,
    build,
    limits,
    loss_of,
    new_engine,
    optimizer_of,
    raises,
    saved,
)
from offload_cases import train as train_case

import fastemb
from fastemb.offload import OffloadEngine
from fastemb.offload._host import HostTable
from fastemb.offload._stored import StoredTable

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
    with raises(RuntimeError, "'t0': another optimizer has trained it", "this Adam"):
        first.state_dict()


@pytest.mark.parametrize("before", OPTIMIZERS)
@pytest.mark.parametrize("after", ["RowWiseAdagrad", "Adagrad", "Adam bf16 states", "AdamW"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_takes_over_begins_anew(before: str, after: str, dtype: torch.dtype) -> None:
    first, second = Case(dtype=dtype, optimizer=before), Case(dtype=dtype, optimizer=after)
    data = first.batches()

    def run(engine: OffloadEngine | None) -> list[Any]:
        model, optimizer = build(first, engine)
        train_case(first, model, optimizer, data[:2])
        other = optimizer_of(second, model)
        train_case(first, model, optimizer, data[2:4])
        seen = [saved(model, optimizer)]
        train_case(second, model, other, data[4:])
        return [*seen, saved(model, other)]

    assert run(new_engine(cache=18)) == run(None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_before_the_first_step(name: str) -> None:
    case = Case(optimizer=name)
    assert saved(*build(case, new_engine(cache=18))) == saved(*build(case, None))


def test_optimizers_that_make_no_step_leave_room() -> None:
    case = Case()
    model, adam = build(case, new_engine(cache=18))
    for name in ("Adagrad", "RowWiseAdagrad", "Adam bf16 states"):
        optimizer_of(Case(optimizer=name), model)
        loss_of(model, case.batches()[0])
    train_case(case, model, adam, case.batches())
    alone, optimizer = build(case, None)
    train_case(case, alone, optimizer, case.batches())
    assert saved(model, adam) == saved(alone, optimizer)


def test_a_refused_step_takes_nothing_over() -> None:
    case = Case((TableCase(), TableCase(rows=30)))
    data = case.batches()
    model, first = build(case, new_engine(cache=1.0))
    train_case(case, model, first, data)
    before = saved(model, first)
    second = optimizer_of(case, model)
    loss_of(model, data[0])[0].backward()
    model.t1.weight.grad = torch.zeros_like(model.t1.weight)
    with raises(RuntimeError, "'t1'", ".grad"):
        second.step()
    second.zero_grad()
    assert saved(model, first) == before
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


TORCH = {
    "Adam": ("Adam", {}),
    "Adam amsgrad": ("Adam", {"amsgrad": True}),
    "AdamW": ("AdamW", {"weight_decay": 0.1}),
    "SGD": ("SGD", {}),
    "SGD momentum": ("SGD", {"momentum": 0.9, "dampening": 0.1}),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("AdamW", "AdamW"),
        ("Adam row counts", "Adam"),
        ("Adam amsgrad", "Adam"),
        ("Adam bf16 states", "Adam"),
        ("Adam", "Adam amsgrad"),
        ("SGD momentum", "SGD momentum"),
        ("SGD momentum", "SGD"),
        ("SGD", "SGD momentum"),
        ("SGD momentum", "Adam"),
    ],
)
def test_states_of_torch_are_loaded(name: str, given: str, steps: int, dtype: torch.dtype) -> None:
    """Also into records that hold something else; what they do not have begins anew."""
    case = Case(dtype=dtype, optimizer=name)
    data = case.batches()
    torch.manual_seed(1)
    theirs = Net(case)
    kind, options = TORCH[given]
    of_torch = getattr(torch.optim, kind)(theirs.parameters(), lr=0.05, **options)
    train_case(case, theirs, of_torch, data[:3])

    def run(engine: OffloadEngine | None) -> list[Any]:
        model, optimizer = build(case, engine)
        train_case(case, model, optimizer, data[:steps])
        model.load_state_dict(theirs.state_dict())
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({**of_torch.state_dict(), "param_groups": groups})
        seen = [saved(model, optimizer)]
        train_case(case, model, optimizer, data)
        return [*seen, saved(model, optimizer)]

    assert run(new_engine(cache=18)) == run(None)


@pytest.mark.parametrize("name", ["SGD momentum", "SGD nesterov", "AdamW", "Adam row counts"])
def test_states_of_dense_steps_are_taken(name: str) -> None:
    case = Case(optimizer=name)
    data = case.batches()

    def run(engine: OffloadEngine | None) -> Any:
        torch.manual_seed(0)
        model = Net(case)
        fastemb.convert(model, sparse=False)
        optimizer = optimizer_of(case, model)
        train_case(case, model, optimizer, data[:3])
        fastemb.convert(model, sparse="fused", offload=engine)
        train_case(case, model, optimizer, data[3:])
        return saved(model, optimizer)

    assert run(new_engine(cache=18)) == run(None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("AdamW", "decay", ["touched", "catch_up", "touched"]),
        ("Adam row counts", "row_bias_correction", [False, True, False]),
        ("Adam", "amsgrad", [True, False, True]),
        ("Adam", "state_dtype", [torch.bfloat16, None, torch.bfloat16]),
        ("SGD momentum", "momentum", [0.0, 0.5, 0.0]),
        ("SGD", "momentum", [0.5, 0.0, 0.5]),
    ],
)
def test_an_option_is_changed(name: str, option: str, values: Any, dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, optimizer=name)
    data = case.batches()

    def run(engine: OffloadEngine | None) -> list[Any]:
        model, optimizer = build(case, engine)
        train_case(case, model, optimizer, data)
        seen = [saved(model, optimizer)]
        for value in values:
            optimizer.param_groups[0][option] = value
            train_case(case, model, optimizer, data[:3])
            seen.append(saved(model, optimizer))
        return seen

    assert run(new_engine(cache=18)) == run(None)


def test_masters_are_made_of_the_weights_of_the_first_step() -> None:
    """Which ``max_norm`` of earlier lookups has changed."""
    case = Case((TableCase(max_norm=0.5),), torch.float16)
    data = case.batches()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(case, engine)
        for batch in data:
            loss_of(model, batch)
        train_case(case, model, optimizer, data[:2])
        return saved(model, optimizer)

    assert run(new_engine(cache=18)) == run(None)


def test_counters_of_rows_that_are_reset() -> None:
    """A row of new values owes no decay; without moments it has seen no step."""
    for name, counter, want in (("AdamW", "row_step", 6), ("Adam row counts", "row_count", 0)):
        case = Case(optimizer=name)
        engine = new_engine(cache=18)
        train_case(case, *build(case, engine), case.batches())
        rows, moments = torch.tensor([3]), {"exp_avg": torch.ones(1, 3)}
        engine.reset_rows("t0", rows, {"weight": torch.ones(1, 3)})
        fields = engine.state_dict()["t0"]
        assert float(fields["exp_avg_sq"][rows].sum()) == 0
        assert int(fields[counter][rows]) == want
        engine.reset_rows("t0", rows, {"weight": torch.ones(1, 3), **moments})
        assert int(engine.state_dict()["t0"][counter][rows]) == 6
        engine.close()


def test_counters_that_the_state_of_an_engine_lacks() -> None:
    case = Case(optimizer="AdamW")
    engine = new_engine(cache=18)
    model, optimizer = build(case, engine)
    train_case(case, model, optimizer, case.batches())
    kept = engine.state_dict()
    del kept["t0"]["row_step"]
    engine.load_state_dict(kept)
    assert (engine.state_dict()["t0"]["row_step"] == 6).all()
    engine.load_state_dict({"t0": kept["t0"]["weight"]})
    assert (engine.state_dict()["t0"]["row_step"] == 0).all()


@pytest.mark.parametrize("tables_first", [True, False])
def test_tables_and_layers_are_loaded_apart(tables_first: bool) -> None:
    case = Case(optimizer="AdamW")
    data = case.batches()
    engine = new_engine(cache=18)
    model, optimizer = build(case, engine)
    train_case(case, model, optimizer, data[:4])
    tables, checkpoint = engine.state_dict(), copy.deepcopy(optimizer.state_dict())
    layer = {k: v.clone() for k, v in model.layer.state_dict().items()}
    checkpoint["state"] = {1: checkpoint["state"][1], 2: checkpoint["state"][2]}
    train_case(case, model, optimizer, data[4:])
    want = saved(model, optimizer)
    if tables_first:
        engine.load_state_dict(tables)
    model.layer.load_state_dict(layer)
    optimizer.load_state_dict(checkpoint)
    if not tables_first:
        engine.load_state_dict(tables)
    train_case(case, model, optimizer, data[4:])
    assert saved(model, optimizer) == want


def test_rows_that_have_slept_are_offloaded() -> None:
    case = Case(optimizer="AdamW", options={"lazy": "exact"})
    data = case.batches()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(case, None)
        train_case(case, model, optimizer, data)
        fastemb.convert(model, sparse="fused", offload=engine)
        optimizer.param_groups[0]["lazy"] = "rows"
        train_case(case, model, optimizer, data)
        return saved(model, optimizer)

    assert run(new_engine(cache=18)) == run(None)


def test_states_of_adagrad_that_are_thrown_away() -> None:
    """They are there from the beginning, but not after that."""
    case = Case(optimizer="Adagrad")

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(case, engine)
        optimizer.state.clear()
        seen = [saved(model, optimizer)]
        train_case(case, model, optimizer, case.batches())
        return [*seen, saved(model, optimizer)]

    assert run(new_engine(cache=18)) == run(None)


def test_a_checkpoint_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that cannot grow stay what they are, and those of a table before are loaded."""
    case, larger = (
        Case((TableCase(), TableCase(rows=30)), options=o) for o in ({}, {"amsgrad": True})
    )
    data = case.batches()
    in_memory, other = build(larger, None)
    train_case(larger, in_memory, other, data)
    model, optimizer = build(case, new_engine(cache=24))
    train_case(case, model, optimizer, data[:3])
    before = saved(model, optimizer)
    make_room = StoredTable._make_room

    def full(self: StoredTable, *args: Any) -> bool:
        if self.name == "t1":
            raise MemoryError("no room for t1")
        return make_room(self, *args)

    monkeypatch.setattr(StoredTable, "_make_room", full)
    with pytest.raises(MemoryError, match="no room for t1"):
        optimizer.load_state_dict(other.state_dict())
    monkeypatch.undo()
    after = saved(model, optimizer)
    assert after[0] == before[0]
    assert [key for key in before[1] if after[1][key] != before[1][key]] == [0]
    assert not optimizer.param_groups[0]["amsgrad"]
    optimizer.load_state_dict(other.state_dict())
    assert saved(model, optimizer)[1] == saved(in_memory, other)[1]
