"""Tables of an `OffloadEngine` in files: made, closed, resumed, recovered."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_cases import (
    Case,
    Net,
    TableCase,
    build,
    ids_of,
    limits,
    loss_of,
    new_engine,
    optimizer_of,
    raises,
    saved,
)
from offload_cases import train as train_case
from optim_cases import bits
from torch import nn

import fastemb
from fastemb import offload
from fastemb.offload import IntegrityError, OffloadEngine
from fastemb.offload._file import DirtyFileError, FileGoneError

pytestmark = limits


def run_files(
    case: Case, directory: Path, data: list[Any], *, seed: int = 0, **options: Any
) -> tuple[OffloadEngine, nn.Module, torch.optim.Optimizer]:
    engine = new_engine(cache=0.75, storage=directory, **options)
    model, optimizer = build(case, engine, seed)
    train_case(case, model, optimizer, engine.prefetch(data, ids=ids_of))
    return engine, model, optimizer


@pytest.mark.parametrize("options", ["Adam", "Adam row counts", "RowWiseAdagrad", "SGD momentum"])
def test_training_resumes_from_files(options: str, tmp_path: Path) -> None:
    """Values, states and the step are in the files; the layers come from a checkpoint."""
    case = Case((TableCase(rows=40), TableCase(bag=False)), torch.float16, options, steps=6)
    data = case.batches()
    engine, model, optimizer = run_files(case, tmp_path, data)
    layers = {k: v.clone() for k, v in model.state_dict().items() if k.startswith("layer")}
    other = optimizer.state_dict()
    at_the_end = saved(model, optimizer)
    engine.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t0.fetab", "t1.fetab"]

    again = new_engine(cache=0.5, storage=tmp_path, resume=True)
    model, optimizer = build(case, again, seed=99)
    model.load_state_dict(layers, strict=False)
    # States of the layers alone: those of the tables are in the files.
    dense = [k for k, p in enumerate(model.parameters()) if p.dim() < 2 or p is model.layer.weight]
    kept = {k: v for k, v in other["state"].items() if k in dense}
    optimizer.load_state_dict({**other, "state": kept})
    assert saved(model, optimizer) == at_the_end
    train_case(case, model, optimizer, again.prefetch(data, ids=ids_of))

    want_model, want_optimizer = build(case, None)
    train_case(case, want_model, want_optimizer, data)
    train_case(case, want_model, want_optimizer, data)
    assert saved(model, optimizer) == saved(want_model, want_optimizer)
    assert again.stats.batches == len(data), "those of this engine"
    again.close()


def test_the_step_in_a_file_is_that_of_loaded_states(tmp_path: Path) -> None:
    case = Case(steps=6)
    model, optimizer = build(case, None)
    train_case(case, model, optimizer, case.batches())
    checkpoint = model.state_dict(), optimizer.state_dict()
    engine = new_engine(cache=18, storage=tmp_path)
    model, optimizer = build(case, engine)
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    engine.close()

    again = new_engine(cache=18, storage=tmp_path, resume=True)
    model, optimizer = build(case, again)
    model.load_state_dict({k: v for k, v in checkpoint[0].items() if "layer" in k}, strict=False)
    loss, _ = loss_of(model, case.batches()[0])
    loss.backward()
    optimizer.step()
    assert float(optimizer.state[model.t0.weight]["step"]) == 7
    again.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("before", "after", "goes_on"),
    [
        ("SGD", "Adam", False),
        ("SGD momentum", "Adam", False),
        ("Adagrad", "Adam", False),
        ("Adagrad", "RowWiseAdagrad", False),
        ("Adam", "SGD momentum", False),
        ("SGD", "SGD", True),
        ("SGD momentum", "SGD", True),
        ("Adagrad", "Adagrad", True),
        ("Adam", "AdamW", True),
        ("Adam", "Adam amsgrad", True),
        ("Adam", "Adam bf16 states", True),
        ("Adam amsgrad", "Adam", True),
        ("AdamW", "AdamW touched", True),
        ("AdamW touched", "AdamW", True),
        ("AdamW", "Adam row counts", True),
    ],
)
def test_files_of_another_optimizer(
    before: str, after: str, goes_on: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """One whose states it can use is taken for a checkpoint, else it begins anew."""
    first, second = Case(dtype=dtype, optimizer=before), Case(dtype=dtype, optimizer=after)
    data = first.batches()
    model, optimizer = build(first, None)
    train_case(first, model, optimizer, data)
    states = optimizer.state_dict()["state"]
    optimizer = optimizer_of(second, model)
    if goes_on:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": states, "param_groups": groups})
    train_case(second, model, optimizer, data)
    want = saved(model, optimizer)

    engine, model, optimizer = run_files(first, tmp_path, data)
    layers, states = model.layer.state_dict(), optimizer.state_dict()["state"]
    engine.close()
    again = new_engine(cache=18, storage=tmp_path, resume=True)
    model, optimizer = build(second, again, seed=99)
    model.layer.load_state_dict(layers)
    if goes_on:
        groups = optimizer.state_dict()["param_groups"]
        layer = {key: state for key, state in states.items() if key != 0}
        optimizer.load_state_dict({"state": layer, "param_groups": groups})
    train_case(second, model, optimizer, data)
    assert saved(model, optimizer) == want
    again.close()


@pytest.mark.parametrize("options", ["Adam", "Adagrad", "RowWiseAdagrad", "SGD momentum"])
def test_files_go_to_an_optimizer_that_was_there_before(options: str, tmp_path: Path) -> None:
    """Also where it has a state from the beginning."""
    case = Case(optimizer=options)
    data = case.batches()
    engine, model, optimizer = run_files(case, tmp_path, data)
    layer, states = model.layer.state_dict(), saved(model, optimizer)[1]
    engine.close()

    torch.manual_seed(99)
    model = Net(case)
    optimizer = optimizer_of(case, model)
    again = new_engine(cache=18, storage=tmp_path, resume=True)
    fastemb.convert(model, offload=again)
    assert saved(model, optimizer)[1][0] == states[0]
    model.layer.load_state_dict(layer)
    model.layer.requires_grad_(False)
    train_case(case, model, optimizer, again.prefetch(data, ids=ids_of))

    want, want_optimizer = build(case, None)
    train_case(case, want, want_optimizer, data)
    want.layer.requires_grad_(False)
    train_case(case, want, want_optimizer, data)
    assert saved(model, optimizer)[0] == saved(want, want_optimizer)[0]
    assert saved(model, optimizer)[1][0] == saved(want, want_optimizer)[1][0]
    again.close()


def test_states_of_another_step_than_the_weights_are_refused(tmp_path: Path) -> None:
    case = Case(steps=6)
    data = case.batches()
    engine = new_engine(cache=18, storage=tmp_path)
    model, optimizer = build(case, engine)
    train_case(case, model, optimizer, engine.prefetch(data[:4], ids=ids_of))
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train_case(case, model, optimizer, engine.prefetch(data[4:], ids=ids_of))
    want = saved(model, optimizer)
    engine.close()

    again = new_engine(cache=18, storage=tmp_path, resume=True)
    model, optimizer = build(case, again)
    # Of the layers alone, as the other tables come from their files.
    model.load_state_dict({k: v for k, v in checkpoint[0].items() if "t0" not in k}, strict=False)
    optimizer.load_state_dict(checkpoint[1])
    loss_of(model, data[4])[0].backward()
    with raises(RuntimeError, "'t0'", "file of step 6", "checkpoint of step 4"):
        optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(checkpoint[0])
    train_case(case, model, optimizer, again.prefetch(data[4:], ids=ids_of))
    assert saved(model, optimizer) == want
    again.close()


def test_files_are_not_taken_or_overwritten_by_mistake(tmp_path: Path) -> None:
    case = Case(steps=2)
    engine, model, optimizer = run_files(case, tmp_path, case.batches())
    want = saved(model, optimizer)[0]
    engine.close()
    content = (tmp_path / "t0.fetab").read_bytes()
    for options, wrong, error in (
        ({}, case, FileExistsError),
        ({"resume": True}, Case((TableCase(rows=21),)), ValueError),
        ({"resume": True}, Case((TableCase(dim=4),)), ValueError),
        ({"resume": True}, Case(dtype=torch.float16), ValueError),
    ):
        other = new_engine(cache=18, storage=tmp_path, **options)
        with raises(error, "t0"):
            build(wrong, other)
        assert other.tables == {}
        other.close()
    assert (tmp_path / "t0.fetab").read_bytes() == content
    again = new_engine(cache=18, storage=tmp_path, resume=True)
    model, _ = build(case, again)
    assert bits(model.state_dict()["t0.weight"]) == want["t0.weight"]
    again.close()


def test_a_file_that_was_not_flushed_needs_recover(tmp_path: Path) -> None:
    case = Case(steps=4)
    engine, model, optimizer = run_files(case, tmp_path, case.batches())
    engine.flush()
    train_case(case, model, optimizer, case.batches())
    engine.transfers.drain()
    # As if the process had ended here.
    engine.transfers.close()
    engine.tables["t0"].host.close()
    other = new_engine(cache=18, storage=tmp_path, resume=True)
    with raises(RuntimeError, "recover"):
        build(case, other)
    other = new_engine(cache=18, storage=tmp_path, resume=True, recover=True)
    with pytest.warns(RuntimeWarning, match="this is no checkpoint"):
        model, optimizer = build(case, other)
    assert other.torn() == {"t0": []}
    train_case(case, model, optimizer, case.batches())
    other.close()


def test_a_table_in_a_file_cannot_move_to_shared_memory(tmp_path: Path) -> None:
    case = Case(steps=4)
    engine, model, optimizer = run_files(case, tmp_path, case.batches())
    want, _ = saved(model, optimizer)
    queue: Any = torch.multiprocessing.Queue()
    queue.put(model.t0.weight.detach()[:2])
    queue.get()
    for action in (
        lambda: model(case.batches()[0]["lookups"]),
        lambda: next(iter(engine.prefetch(case.batches(), ids=ids_of))),
        engine.flush,
        engine.verify,
        model.state_dict,
        engine.close,
    ):
        with raises(RuntimeError, "'t0'", "moved from", "to shared memory"):
            action()
    # What was flushed last is there.
    again = new_engine(cache=18, storage=tmp_path, resume=True)
    model, optimizer = build(case, again, seed=5)
    assert bits(model.state_dict()["t0.weight"]) == want["t0.weight"]


def test_tables_in_memory_may_move_to_shared_memory() -> None:
    case = Case(steps=4)
    engine = new_engine(cache=1.0)
    model, optimizer = build(case, engine)
    train_case(case, model, optimizer, case.batches())
    engine.flush()
    model.share_memory()
    train_case(case, model, optimizer, engine.prefetch(case.batches(), ids=ids_of))
    plain, plain_optimizer = build(case, None)
    train_case(case, plain, plain_optimizer, case.batches() * 2)
    assert saved(model, optimizer) == saved(plain, plain_optimizer)
    assert engine.verify() == {"t0": []}


def test_torn_rows_are_reset_before_an_optimizer_makes_room(tmp_path: Path) -> None:
    case = Case(steps=4)
    engine, _, _ = run_files(case, tmp_path, case.batches())
    engine.flush()
    host = engine.tables["t0"].host
    host.mark_dirty()
    host.records[3, 20] ^= 1
    engine.transfers.close()
    host.close()
    again = new_engine(cache=18, storage=tmp_path, resume=True, recover=True)
    with pytest.warns(RuntimeWarning, match="row 3 is torn"):
        model, optimizer = build(Case(optimizer="Adam amsgrad"), again)
    loss_of(model, {**case.batches()[0], "lookups": {"t0": {"input": torch.tensor([[5]])}}})
    with raises(IntegrityError, "'t0'", "row 3"):
        again.flush()
    again.reset_rows("t0", torch.tensor([3]), {"weight": torch.ones(1, 3)})
    train_case(case, model, optimizer, case.batches())
    state = optimizer.state_dict()["state"][0]
    assert float(state["step"]) == 8
    assert "max_exp_avg_sq" in state
    again.close()


def test_torn_rows_keep_no_other_table_from_the_disk(tmp_path: Path) -> None:
    case = Case((TableCase(), TableCase(bag=False)))
    engine, _, _ = run_files(case, tmp_path, case.batches())
    engine.transfers.close()
    for table in engine.tables.values():
        table.host.mark_dirty()
    engine.tables["t0"].host.records[3, 20] ^= 1
    for table in engine.tables.values():
        table.host.close()
    with pytest.warns(RuntimeWarning, match="was not flushed"):
        engine, model, _ = run_files(case, tmp_path, [], resume=True, recover=True)
    with raises(IntegrityError, "'t0', row 3", "torn"):
        engine.close()
    again = new_engine(cache=18, storage=tmp_path, resume=True)
    with raises(DirtyFileError, "t0.fetab"):
        offload.EmbeddingBag(20, 3, engine=again, table="t0")
    kept = offload.Embedding(20, 3, engine=again, table="t1")
    assert torch.equal(kept.weight, model.t1.weight)
    again.close()


def test_modules_that_are_made_in_files_have_the_values_of_torch(tmp_path: Path) -> None:
    engine = new_engine(cache=0.1, storage=tmp_path)
    rows, dim = 70_001, 17  # more than one portion of the initialisation
    torch.manual_seed(3)
    want = nn.EmbeddingBag(rows, dim, mode="sum", padding_idx=4)
    torch.manual_seed(3)
    made = offload.EmbeddingBag(
        rows, dim, mode="sum", padding_idx=4, engine=engine, table="users/name of them"
    )
    assert torch.equal(made.weight, want.weight)
    ids = torch.randint(0, rows, (40, 3), generator=torch.Generator().manual_seed(0))
    assert torch.equal(made(ids), want(ids))
    optimizer = fastemb.optim.Adagrad(made.parameters(), lr=0.5)
    made(ids).sum().backward()
    optimizer.step()
    trained = made.state_dict()["weight"]
    made.reset_parameters()
    assert not torch.equal(made(ids), want(ids))
    engine.close()

    again = new_engine(cache=0.1, storage=tmp_path, resume=True)
    with raises(ValueError, "users/name of them", "[70001, 17]"):
        offload.EmbeddingBag(rows, 16, engine=again, table="users/name of them")
    made = offload.EmbeddingBag(rows, dim, mode="sum", engine=again, table="users/name of them")
    assert torch.equal(made.weight[ids.view(-1)], made(ids.view(-1, 1)))
    assert not torch.equal(made.weight, trained)
    again.close()


@pytest.mark.parametrize("converted", [False, True])
def test_what_a_model_begins_with_does_not_reach_the_file_that_is_resumed(
    converted: bool, tmp_path: Path
) -> None:
    def made(resume: bool) -> tuple[OffloadEngine, nn.Module]:
        engine = new_engine(cache=8, storage=tmp_path, resume=resume)
        model = nn.Sequential(nn.Embedding(20, 3, dtype=torch.float32))
        if converted:
            fastemb.convert(model, torch.float16, offload=engine)
        else:
            model[0] = offload.Embedding(20, 3, dtype=torch.float16, engine=engine, table="0")
        nn.init.constant_(model[0].weight, 0.5)
        return engine, model

    engine, model = made(False)
    ids = torch.tensor([3, 5])
    assert model(ids).tolist() == [[0.5] * 3] * 2
    engine.flush()
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(60).view(20, 3))
    trained = model(ids).detach()
    engine.close()
    before = (tmp_path / "0.fetab").read_bytes()

    again, model = made(True)
    assert (tmp_path / "0.fetab").read_bytes() == before
    with pytest.warns(RuntimeWarning, match="'0'.* was written .* its file.* engine.flush"):
        assert torch.equal(model(ids), trained)
    with torch.no_grad():
        model[0].weight.fill_(2)
    assert model(ids).tolist() == [[2.0] * 3] * 2, "after the first use it counts"
    assert again.verify() == {"0": []}
    again.close()


@pytest.mark.parametrize("stored", [True, False])
def test_a_module_that_cannot_be_made_leaves_the_name_free(stored: bool, tmp_path: Path) -> None:
    engine = new_engine(cache=8, storage=tmp_path if stored else None)
    with pytest.raises((AssertionError, ValueError)):
        offload.Embedding(20, 3, padding_idx=20, engine=engine, table="t")
    made = offload.Embedding(20, 3, padding_idx=19, engine=engine, table="t")
    assert (made(torch.tensor([19, 0])) == 0).all(1).tolist() == [True, False]
    with raises(ValueError, "'t'"):
        offload.Embedding(20, 3, engine=engine, table="t")
    assert list(engine.tables) == ["t"]
    with pytest.raises((AssertionError, ValueError)):
        offload.Embedding(20, 3, padding_idx=20, engine=engine, table="other")
    engine.close()
    assert [path.name for path in tmp_path.iterdir()] == (["t.fetab"] if stored else [])
    if stored:
        kept = new_engine(cache=8, storage=tmp_path, resume=True)
        with pytest.raises((AssertionError, ValueError)):
            offload.Embedding(20, 3, padding_idx=20, engine=kept, table="t")
        kept.close()
        again = new_engine(cache=8, storage=tmp_path, resume=True)
        offload.Embedding(20, 3, engine=again, table="t")
        again.close()


def test_tables_from_files_have_checksums_of_their_own(tmp_path: Path) -> None:
    """Whatever the order in which engines have made them."""
    engine = new_engine(cache=8, storage=tmp_path)
    first = offload.Embedding(20, 3, engine=engine, table="first")
    first(torch.tensor([1]))
    engine.close()
    again = new_engine(cache=8, storage=tmp_path, resume=True)
    with pytest.warns(RuntimeWarning, match="begins anew"):
        modules = [offload.Embedding(20, 3, engine=again, table=f"new {k}") for k in range(4)]
    modules.append(offload.Embedding(20, 3, engine=again, table="first"))
    for module in modules:
        module(torch.tensor([1]))
    assert len({table.host.seed for table in again.tables.values()}) == 5
    again.close()


def test_files_stay_where_they_are_when_the_process_changes_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Hydra does."""
    case = Case(steps=2)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    engine = new_engine(cache=18, storage="tables")
    other = offload.Embedding(20, 3, engine=engine, table="other")
    monkeypatch.chdir(there)
    elsewhere = new_engine(cache=18, storage="tables")
    foreign = offload.Embedding(20, 3, engine=elsewhere, table="other")
    model, optimizer = build(case, engine)
    train_case(case, model, optimizer, case.batches())
    other(torch.tensor([1]))
    engine.close()
    assert {path.name for path in (here / "tables").iterdir()} == {"other.fetab", "t0.fetab"}
    foreign(torch.tensor([1]))
    elsewhere.close()
    assert [path.name for path in (there / "tables").iterdir()] == ["other.fetab"]


def test_a_file_behind_a_link_grows_where_it_is(tmp_path: Path) -> None:
    case = Case(steps=2)
    link, large = tmp_path / "t0.fetab", tmp_path / "large" / "records"
    large.parent.mkdir()
    engine = new_engine(cache=18, storage=tmp_path)
    offload.EmbeddingBag(20, 3, engine=engine, table="t0")(torch.tensor([[1]]))
    engine.close()
    before = link.stat().st_size
    link.rename(large)
    link.symlink_to(large)
    engine, *_ = run_files(case, tmp_path, case.batches(), resume=True)
    engine.close()
    assert link.is_symlink()
    assert large.stat().st_size > before, "states have come"
    assert [path.name for path in large.parent.iterdir()] == ["records"]


def test_where_files_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for storage, text in ((5, "5"), (b"x", "b'x'"), (file, "the file")):
        with raises(ValueError, "OffloadEngine: storage must be a", text):
            new_engine(storage=storage)
    engine = new_engine(storage=tmp_path / "tables")
    with raises(ValueError, "the name of a table must be shorter", "'ä"):
        offload.Embedding(20, 3, engine=engine, table="ä" * 41)  # as %C3%A4
    offload.Embedding(20, 3, engine=engine, table="ä" * 40)
    engine.close()


@pytest.mark.parametrize("closing", [False, True])
def test_a_disk_that_fails_keeps_no_checkpoint_from_another_one(
    closing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((TableCase(), TableCase(bag=False)))
    data = case.batches()
    engine, model, optimizer = run_files(case, tmp_path, data)
    want, want_optimizer = build(case, None)
    train_case(case, want, want_optimizer, data)
    expected = saved(want, want_optimizer)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        named = "table 't0' does not come to the disk", str(tmp_path / "t0.fetab")
        with raises(OSError, *named):
            engine.close() if closing else engine.flush()
        if closing:
            assert saved(model, optimizer) == expected
        else:
            with pytest.warns(RuntimeWarning, match="does not come to the disk.*up to date"):
                assert saved(model, optimizer) == expected
            with raises(OSError, *named):
                model.load_state_dict(want.state_dict())
    engine.close()
    with pytest.warns(RuntimeWarning) if closing else nullcontext():
        again = new_engine(cache=0.75, storage=tmp_path, resume=True, recover=closing)
        model, optimizer = build(case, again)
    assert saved(model, optimizer)[0]["t0.weight"] == expected[0]["t0.weight"]
    again.close()


@pytest.mark.parametrize("prefetch", [True, False])
def test_rows_stay_in_the_cache_while_the_disk_fails(
    prefetch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file must be called dirty before the first of them leaves."""
    case = Case((TableCase(rows=60),), steps=12)
    data = case.batches()
    engine = new_engine(cache=14, storage=tmp_path)
    model, optimizer = build(case, engine)
    errors = 0

    def failing(_: int) -> None:
        raise OSError(5, "Input/output error")

    for before, batch in zip(data[::2], data[1::2], strict=True):
        engine.flush()
        train_case(case, model, optimizer, [before])
        loader = engine.prefetch([batch], ids=ids_of) if prefetch else [batch]
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing)
            try:
                train_case(case, model, optimizer, loader)
                continue
            except OSError as error:
                errors += "'t0' cannot be called dirty on the disk (Input/output" in str(error)
        train_case(case, model, optimizer, loader)
    assert errors
    want, want_optimizer = build(case, None)
    train_case(case, want, want_optimizer, data)
    assert saved(model, optimizer) == saved(want, want_optimizer)
    assert engine.verify() == {"t0": []}
    engine.close()


def test_a_file_that_is_gone_keeps_no_checkpoint_from_another_disk(tmp_path: Path) -> None:
    case = Case()
    engine, model, optimizer = run_files(case, tmp_path, case.batches())
    (tmp_path / "t0.fetab.partial").unlink(missing_ok=True)
    (tmp_path / "t0.fetab").unlink(missing_ok=True)
    with pytest.warns(RuntimeWarning, match="no longer the file that is open"):
        states = saved(model, optimizer)
    want, want_optimizer = build(case, None)
    train_case(case, want, want_optimizer, case.batches())
    assert states == saved(want, want_optimizer)
    with raises(FileGoneError, "t0.fetab"):
        engine.close()
