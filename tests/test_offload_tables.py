"""Tables of an `OffloadEngine` that are loaded, saved, shared, and written by others."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from offload_cases import (
    CASE,
    Case,
    Net,
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
    raises,
    saved,
    step,
    train,
    trained,
)
from optim_cases import bits
from torch import nn
from torch.nn.utils import prune

import fastemb
from fastemb import offload
from fastemb.offload import IntegrityError, OffloadEngine

pytestmark = limits

ONE = Case((TableCase(rows=60),))


def test_a_checkpoint_is_loaded_in_the_middle_of_training() -> None:
    """Into a trained model, whose states stay, from a plain one."""
    batches = CASE.batches()
    torch.manual_seed(9)
    other = Net(CASE).state_dict()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(CASE, engine)
        loader: Any = batches if engine is None else engine.prefetch(batches, ids=ids_of)
        for number, batch in enumerate(loader):
            if number == 4:
                model.load_state_dict(other)
            step(model, optimizer, batch)
        return saved(model, optimizer)

    assert run(new_engine(cache=36)) == run(None)


def test_a_low_precision_table_takes_loaded_values_over_its_master() -> None:
    case = Case((TableCase(rows=60),), torch.bfloat16, steps=8)
    batches = case.batches()
    torch.manual_seed(9)
    other = Net(case).state_dict()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(case, engine)
        for number, batch in enumerate(batches):
            if number == 4:
                model.load_state_dict(other)
            step(model, optimizer, batch)
        return saved(model, optimizer)

    assert run(new_engine(cache=36)) == run(None)


def test_assign_copies_into_the_host_table() -> None:
    batches = CASE.batches()
    _, model, optimizer = offloaded()
    train(CASE, model, optimizer, batches)
    plain = Net(CASE)
    weight = model.t0.weight
    model.load_state_dict(plain.state_dict(), assign=True)
    assert model.t0.weight is weight
    assert torch.equal(model.state_dict()["t0.weight"], plain.t0.weight)
    train(CASE, model, optimizer, batches)


def test_what_is_saved_loads_into_plain_modules(tmp_path: Any) -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    train(CASE, model, optimizer, engine.prefetch(batches, ids=ids_of))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save(engine.state_dict(), tmp_path / "engine.pt")
    for name in ("model", "optimizer", "engine"):  # no records in them
        assert (tmp_path / f"{name}.pt").stat().st_size < 40_000

    plain = Net(CASE)
    plain.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert bits(plain.t0.weight) == bits(model.t0.weight)
    torch_optimizer = torch.optim.Adam(plain.parameters())
    torch_optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    tables = torch.load(tmp_path / "engine.pt", weights_only=True)
    assert bits(tables["t0"]["weight"]) == bits(plain.t0.weight)
    assert bits(tables["t0"]["exp_avg"]) == bits(torch_optimizer.state[plain.t0.weight]["exp_avg"])


def test_states_of_model_and_optimizer_go_to_and_fro() -> None:
    batches = CASE.batches()
    plain, plain_optimizer = build(CASE, None)
    train(CASE, plain, plain_optimizer, batches)
    checkpoint = plain.state_dict(), plain_optimizer.state_dict()
    engine, model, optimizer = offloaded(seed=3)
    train(CASE, model, optimizer, batches[:3])  # something else is in the cache
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    assert saved(model, optimizer) == saved(plain, plain_optimizer)
    train(CASE, model, optimizer, engine.prefetch(batches, ids=ids_of))
    train(CASE, plain, plain_optimizer, batches)
    assert saved(model, optimizer) == saved(plain, plain_optimizer)

    back, back_optimizer = build(CASE, None, seed=7)
    back.load_state_dict(model.state_dict())
    back_optimizer.load_state_dict(optimizer.state_dict())
    train(CASE, back, back_optimizer, batches)
    train(CASE, model, optimizer, batches)
    assert saved(model, optimizer) == saved(back, back_optimizer)


def test_the_state_dict_of_an_engine_goes_into_another() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    train(CASE, model, optimizer, engine.prefetch(batches, ids=ids_of))
    want = engine.state_dict()
    other, other_model, other_optimizer = offloaded()
    train(CASE, other_model, other_optimizer, batches[:2])
    other.load_state_dict(want)
    for name, fields in other.state_dict().items():
        assert {f: bits(v) for f, v in fields.items()} == {
            f: bits(v) for f, v in want[name].items()
        }
    # States without a step leave that as it is.
    other.load_state_dict({n: {f: v for f, v in t.items() if f != "step"} for n, t in want.items()})
    assert float(other.state_dict()["t0"]["step"]) == len(batches)
    # A weight alone begins anew with the states, and with the step.
    other.load_state_dict({name: fields["weight"] for name, fields in want.items()})
    table = other.state_dict()["t0"]
    assert bits(table["weight"]) == bits(want["t0"]["weight"])
    assert not table["exp_avg"].any()
    assert float(table["step"]) == 0


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    train(CASE, model, optimizer, batches)
    before = saved(model, optimizer)
    good = engine.state_dict()
    with raises(KeyError, "'t1'"):
        engine.load_state_dict({"t0": good["t0"]})
    with raises(ValueError, "table 't1': exp_avg must have shape (40, 3)", "(1, 3)"):
        engine.load_state_dict({**good, "t1": {**good["t1"], "exp_avg": torch.ones(1, 3)}})
    with raises(ValueError, "table 't0' must have 'weight'"):
        engine.load_state_dict({**good, "t0": {}})
    with raises(KeyError, "no tables ['t9'] in the engine, only t0, t1"):
        engine.load_state_dict({**good, "t9": good["t0"]})
    values = torch.ones(40, 3)
    for unfit, got in (
        (values * 1j, "torch.complex64"),
        (values.to("meta"), "a tensor on meta"),
        (values.to_sparse(), "torch.sparse_coo"),
        (values.bool(), "torch.bool"),
    ):
        with raises(ValueError, f"table 't1': exp_avg must be dense and real, got {got}"):
            engine.load_state_dict({**good, "t1": {**good["t1"], "exp_avg": unfit}})
    for step_count in (-3.0, float("nan"), float("inf")):
        with raises(ValueError, "table 't1': step must be finite", f"got {step_count}"):
            bad = torch.tensor(step_count)
            engine.load_state_dict({**good, "t1": {**good["t1"], "step": bad}})
    assert saved(model, optimizer) == before


def test_reset_rows() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    train(CASE, model, optimizer, batches)
    before = engine.state_dict()["t0"]
    rows = torch.tensor([3, 0, 59])
    engine.reset_rows("t0", rows, {"weight": torch.full((3, 3), 2.0)})
    after = engine.state_dict()["t0"]
    before["weight"][rows] = 2.0
    before["exp_avg"][rows] = 0
    before["exp_avg_sq"][rows] = 0
    assert {f: bits(v) for f, v in after.items()} == {f: bits(v) for f, v in before.items()}
    assert (model.t0(torch.tensor([[59]])) == 2).all()
    with raises(KeyError, "t9"):
        engine.reset_rows("t9", rows, {"weight": torch.zeros(3, 3)})
    for row in (60, -1):
        with raises(IndexError, f"row {row} at position 1", "'t0' with 60 rows"):
            engine.reset_rows("t0", torch.tensor([5, row]), {"weight": torch.zeros(2, 3)})
    assert {f: bits(v) for f, v in engine.state_dict()["t0"].items()} == {
        f: bits(v) for f, v in after.items()
    }


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_weight_that_is_written_after_a_flush(prefetch: bool) -> None:
    batches = CASE.batches()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(CASE, engine)
        loader: Any = batches
        if engine is not None and prefetch:
            loader = engine.prefetch(batches, ids=ids_of)
        for number, batch in enumerate(loader):
            if number in (2, 5):
                if engine is not None:
                    engine.flush()
                with torch.no_grad():
                    model.t0.weight.mul_(0.5)
                    model.t1.weight[3:7] = 0.25
            step(model, optimizer, batch)
        return saved(model, optimizer)

    assert run(new_engine(cache=36)) == run(None)


def test_a_weight_that_is_written_before_its_first_use() -> None:
    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(CASE, engine)
        nn.init.constant_(model.t0.weight, 0.5)
        model.t1.weight.data.fill_(0.25)
        for batch in CASE.batches():
            step(model, optimizer, batch)
        return saved(model, optimizer)

    assert run(new_engine(cache=36)) == run(None)


def test_a_weight_that_is_written_without_a_flush() -> None:
    batches = CASE.batches()
    engine, model, optimizer = offloaded()
    step(model, optimizer, batches[0])
    changed = batches[0]["lookups"]["t0"]["input"].unique().tolist()
    with torch.no_grad():
        model.t0.weight.zero_()
    with raises(IntegrityError, "table 't0'", "in host memory", "engine.flush()") as error:
        model(batches[0]["lookups"])
    assert error.value.table == "t0"
    assert error.value.rows == changed
    assert error.value.direction == "in host memory"
    # The way out is to say what the weight is to be.
    engine.load_state_dict(engine_values(model))
    train(CASE, model, optimizer, batches)


@pytest.mark.parametrize("dirty", [True, False])
def test_what_goes_past_autograd_is_found_when_the_row_moves(dirty: bool) -> None:
    """``.data`` has no version that would tell of a write."""
    case = Case((TableCase(rows=60, bag=False),), steps=1)
    engine, model, optimizer = offloaded(case, cache=4)
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[11, 12, 13]])
    if dirty:
        model.t0(first).sum().backward()
        optimizer.step()
    else:
        with torch.no_grad():
            model.t0(second)
    model.t0.weight.data[2] = 5.0
    with raises(IntegrityError, "table 't0', row 2") as error:
        with torch.no_grad():
            model.t0(second if dirty else first)
        engine.flush()
    assert error.value.rows == [2]
    engine.load_state_dict({"t0": model.t0.weight.detach().clone()})
    assert engine.verify() == {"t0": []}


def test_two_engines_for_two_tables() -> None:
    batches = CASE.batches()
    torch.manual_seed(0)
    model = Net(CASE)
    engines = [new_engine(cache=30), new_engine(cache=30)]
    fastemb.convert(model, offload=engines[0], skip=["t1"])
    fastemb.convert(model, offload=engines[1], skip=["t0"])
    assert [list(engine.tables) for engine in engines] == [["t0"], ["t1"]]
    optimizer = fastemb.optim.Adam(model.parameters(), lr=0.05, lazy="rows")
    inner = engines[1].prefetch(batches, ids=lambda batch: ids_of(batch)["t1"])
    train(CASE, model, optimizer, engines[0].prefetch(inner, ids=lambda b: ids_of(b)["t0"]))
    assert saved(model, optimizer) == in_memory(CASE, batches)


def test_one_table_in_two_modules() -> None:
    case = Case((TableCase(rows=40), TableCase(rows=40, bag=False)), steps=6)
    batches = case.batches()

    def run(engine: OffloadEngine | None) -> Any:
        torch.manual_seed(0)
        model = Net(case)
        model.t1.weight = model.t0.weight
        fastemb.convert(model, sparse="fused", offload=engine)
        optimizer = fastemb.optim.Adam(model.parameters(), lr=0.05, lazy="rows")
        loader: Any = batches
        if engine is not None:
            assert list(engine.tables) == ["t0"]
            assert (model.t0.table, model.t1.table) == ("t0", "t0")
            loader = engine.prefetch(
                batches, ids=lambda b: [ids.reshape(-1) for ids in ids_of(b).values()]
            )
        train(case, model, optimizer, loader)
        return saved(model, optimizer)

    assert run(new_engine(cache=40)) == run(None)
    assert run(new_engine(cache=40, depth=0)) == run(None)


def test_ids_on_another_device_and_of_another_kind_are_refused() -> None:
    _, model, _ = offloaded()
    with raises(TypeError, "embedding_bag: input must be int32 or int64", "float32"):
        model.t0(torch.zeros(2, 2))
    with raises(TypeError, "embedding: input must be a tensor", "list"):
        model.t1([1])
    with raises(ValueError, "input must be on the engine's device cpu", "meta"):
        model.t0(torch.zeros(2, 2, dtype=torch.int64, device="meta"))
    with raises(IndexError, "embedding: index 40 at position 1", "table 't1' with 40 rows"):
        model.t1(torch.tensor([1, 40]))
    with raises(IndexError, "-1"):
        model.t1(torch.tensor([-1]))


@pytest.mark.parametrize("kind", [offload.Embedding, offload.EmbeddingBag])
def test_a_table_from_elsewhere_is_refused(kind: Any) -> None:
    refused = f"{kind.__name__}.from_pretrained: a table cannot be offloaded where it is"
    with raises(NotImplementedError, refused):
        kind.from_pretrained(torch.ones(9, 4))
    with raises(NotImplementedError, refused):
        kind.from_pretrained(torch.ones(9, 4), engine=new_engine(), table="t")


def test_a_weight_that_is_computed_is_refused() -> None:
    _, model, _ = offloaded()
    batch = CASE.batches()[0]
    prune.random_unstructured(model.t0, "weight", 0.5)
    for use in (model.state_dict, lambda: model(batch["lookups"]), lambda: model.to("cpu")):
        with raises(RuntimeError, "table 't0' is offloaded, so its weight must stay the parameter"):
            use()


def test_the_device_is_called_as_that_of_tensors() -> None:
    engine, model, optimizer = offloaded(device="cpu:0")
    assert engine.device == torch.device("cpu")
    train(CASE, model, optimizer, engine.prefetch(CASE.batches(), ids=ids_of))
    assert saved(model, optimizer) == in_memory(CASE, CASE.batches())


def test_weights_without_values_to_train_are_refused() -> None:
    engine = new_engine()
    with torch.inference_mode():
        inferring = nn.Embedding(9, 4)
    for module, text in (
        (nn.Embedding(9, 4, device="meta"), "got a weight on meta"),
        (inferring, "made in torch.inference_mode()"),
    ):
        with raises(ValueError, "table 'embedding' must have values that can be trained", text):
            fastemb.convert(module, offload=engine)
        assert type(module) is nn.Embedding
    assert engine.tables == {}


@pytest.mark.parametrize("inferring", ["engine", "convert", "lookup", "optimizer", "revert"])
def test_training_after_inference_mode(inferring: str) -> None:
    """What is made in the mode, whatever it is, can be written outside of it."""
    case = Case((TableCase(),), optimizer="SGD momentum")
    batches = case.batches()

    def mode(part: str) -> torch.inference_mode:
        return torch.inference_mode(part == inferring)

    torch.manual_seed(0)
    model = Net(case)
    with mode("engine"):
        engine = new_engine(cache=12)
    with mode("convert"):
        fastemb.convert(model, offload=engine)
    with mode("lookup"):
        model(batches[0]["lookups"])
    with mode("optimizer"):
        optimizer = optimizer_of(case, model)
    train(case, model, optimizer, engine.prefetch(batches, ids=ids_of))
    with mode("revert"):
        fastemb.revert(model)
    fastemb.convert(model, sparse="fused")
    train(case, model, optimizer, batches)
    assert saved(model, optimizer) == in_memory(case, batches * 2)


def test_arguments_are_checked() -> None:
    for name, value in (
        ("policy", "mru"), ("verify", "some"), ("depth", -1), ("depth", 1.5),
        ("staging_bytes", 0), ("cache", 0), ("cache", 0.0), ("cache", 1.5), ("cache", True),
        ("cache", {"t0": -3}), ("resume", True), ("recover", True),
    ):  # fmt: skip
        with raises(ValueError, "OffloadEngine", name):
            new_engine(**{name: value})
    engine = new_engine(cache={"t0": 5})
    with raises(ValueError, "cache must have a size for table 't1'"):
        build(CASE, engine)
    assert engine.tables == {}


def test_the_engine_is_the_same_after_training_elsewhere() -> None:
    """`trained` asserts that all records are right at the end."""
    assert trained(CASE, new_engine(cache=0.5, verify="sample")) == trained(CASE, None)


def test_copies_of_an_optimizer_have_the_states_of_now() -> None:
    for copied in (copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))):
        _, model, optimizer = offloaded()
        train(CASE, model, optimizer, CASE.batches())
        other = copied(optimizer)  # before any flush
        wanted = optimizer.state_dict()["state"]
        found = other.state_dict()["state"]
        for index, state in wanted.items():
            assert {n: bits(v) for n, v in found[index].items()} == {
                n: bits(v) for n, v in state.items()
            }
        train(CASE, model, optimizer, CASE.batches())  # the records are still those of the first


def test_another_weight_is_refused() -> None:
    engine, model, optimizer = offloaded()
    train(CASE, model, optimizer, CASE.batches())
    ids = torch.zeros(1, 1, dtype=torch.int64)
    own = model.t0.weight.data
    model.t0.weight.data = torch.ones(own.shape)
    for use in (lambda: model.t0(ids), model.state_dict, engine.flush, optimizer.state_dict):
        with raises(RuntimeError, "'t0'", "weight.data", "load_state_dict()"):
            use()
    model.t0.weight.data = own
    weight = model.t0.weight
    model.t0.weight = nn.Parameter(torch.ones(own.shape))
    for use in (lambda: model.t0(ids), model.state_dict):
        with raises(RuntimeError, "'t0'", "another parameter"):
            use()
    model.t0.weight = weight
    train(CASE, model, optimizer, CASE.batches())


def test_states_that_are_thrown_away_begin_anew() -> None:
    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(CASE, engine)
        train(CASE, model, optimizer, CASE.batches())
        optimizer.state.clear()
        train(CASE, model, optimizer, CASE.batches())
        return saved(model, optimizer)

    assert run(new_engine(cache=36)) == run(None)


@pytest.mark.parametrize("options", ["Adam", "SGD"])
def test_the_step_of_the_optimizer_is_in_the_state_of_the_engine(options: str) -> None:
    """Also of one without other states."""
    case = replace(CASE, optimizer=options)
    batches = case.batches()
    engine = new_engine(cache=60)
    model, optimizer = build(case, engine)
    train(case, model, optimizer, batches)
    kept = engine.state_dict()
    assert all(float(fields["step"]) == len(batches) for fields in kept.values())
    train(case, model, optimizer, batches)
    engine.load_state_dict(kept)  # back to where it was
    again = engine.state_dict()
    for name, fields in kept.items():
        assert {n: bits(v) for n, v in again[name].items()} == {
            n: bits(v) for n, v in fields.items()
        }
    assert float(optimizer.state[model.t0.weight]["step"]) == len(batches)


def test_a_weight_that_is_written_between_backward_and_step() -> None:
    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(CASE, engine)
        for batch in CASE.batches():
            optimizer.zero_grad()
            loss_of(model, batch)[0].backward()
            if engine is not None:
                engine.flush()
            with torch.no_grad():
                model.t0.weight.clamp_(-0.5, 0.5)
            optimizer.step()
        return saved(model, optimizer)

    assert run(new_engine(cache=36)) == run(None)


def test_states_without_room_are_refused() -> None:
    engine, model, optimizer = offloaded()
    train(CASE, model, optimizer, CASE.batches())
    kept = engine.state_dict()
    engine, model = new_engine(cache=36), Net(CASE)
    fastemb.convert(model, offload=engine)
    before = {name: bits(fields["weight"]) for name, fields in engine.state_dict().items()}
    with raises(ValueError, "'exp_avg' is none of its fields (weight)", "optimizer"):
        engine.load_state_dict(kept)
    assert {n: bits(f["weight"]) for n, f in engine.state_dict().items()} == before
    for bad, text in ((None, "NoneType"), ({n: [1.0] for n in kept}, "list")):
        with raises(TypeError, "load_state_dict", text):
            engine.load_state_dict(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "rows", "kind", "text"),
    [
        ("t9", torch.tensor([0]), KeyError, "no table 't9'"),
        ("t0", [0], TypeError, "rows must be 1-D int64, got [0]"),
        ("t0", torch.tensor([0.5]), TypeError, "1-D torch.float32"),
        ("t0", torch.tensor([1, 1]), ValueError, "distinct"),
    ],
)
def test_rows_to_reset_are_checked(name: str, rows: Any, kind: type[Exception], text: str) -> None:
    engine, _, _ = offloaded()
    with raises(kind, text):
        engine.reset_rows(name, rows, {"weight": torch.zeros(len(rows), 3)})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (torch.zeros(1, 3), "values must be a mapping, got Tensor"),
        ({"weight": [[1.0, 2.0, 3.0]]}, "values['weight'] must be a dense, real tensor, got list"),
        ({"weight": torch.zeros(1, 3) * 1j}, "must be a dense, real tensor, got torch.complex64"),
        ({"weight": torch.zeros(1, 3, device="meta")}, "got a tensor on meta"),
    ],
)
def test_values_of_rows_to_reset_are_checked(values: Any, text: str) -> None:
    engine, _, _ = offloaded()
    with raises(TypeError, "reset_rows: ", text):
        engine.reset_rows("t0", torch.tensor([0]), values)


def test_a_closed_engine_says_so() -> None:
    engine, _, _ = offloaded()
    state = engine.state_dict()
    engine.close()
    rows, values = torch.tensor([0]), {"weight": torch.zeros(1, 3)}
    for action in (
        lambda: engine.load_state_dict(state),
        lambda: engine.reset_rows("t0", rows, values),
        engine.state_dict,
        engine.verify,
        engine.flush,
    ):
        with raises(RuntimeError, "the OffloadEngine is closed"):
            action()


def test_an_engine_is_neither_copied_nor_pickled() -> None:
    engine, _, _ = offloaded()
    for thing in (engine, engine.prefetch([])):
        for action in (copy.deepcopy, pickle.dumps):
            with raises(RuntimeError, "OffloadEngine", "cannot be copied or pickled"):
                action(thing)


@pytest.mark.parametrize("kind", [offload.Embedding, offload.EmbeddingBag])
@pytest.mark.parametrize("stored", [False, True])
def test_modules_need_an_engine_and_a_name(kind: Any, stored: bool, tmp_path: Any) -> None:
    engine = new_engine(storage=tmp_path if stored else None)
    with raises(TypeError, f"{kind.__name__}: engine must be an OffloadEngine, got NoneType"):
        kind(5, 3, engine=None, table="users")
    for name in (None, "", 3):
        with raises(TypeError, "table must ", repr(name)):
            kind(5, 3, engine=engine, table=name)
    assert engine.tables == {}


def test_a_table_whose_module_is_gone_before_its_first_use() -> None:
    engine, gone = new_engine(cache=36), Net(ONE)
    fastemb.convert(gone, offload=engine)
    del gone
    model = nn.Sequential(nn.EmbeddingBag(20, 3))
    fastemb.convert(model, offload=engine)
    assert list(engine.state_dict()) == list(engine.verify()) == ["0"]
    engine.flush()
    ids = torch.tensor([[1]])
    assert len(list(engine.prefetch([ids], ids=lambda ids: ids))) == 1
    with raises(ValueError, "must name tables of the engine (0)", "'t0'"):
        list(engine.prefetch([ids], ids=lambda ids: {"t0": ids}))
    values = torch.ones(20, 3)
    engine.load_state_dict({"0": values})
    assert bits(model.state_dict()["0.weight"]) == bits(values)
    engine.close()


def test_a_table_whose_module_is_gone_is_loaded_all_the_same() -> None:
    engine, gone = new_engine(cache=36), Net(ONE)
    fastemb.convert(gone, offload=engine)
    gone(ONE.batches()[0]["lookups"])
    del gone
    model = nn.Sequential(nn.EmbeddingBag(20, 3))
    fastemb.convert(model, offload=engine)
    values = {"t0": torch.full((60, 3), 2.0), "0": torch.ones(20, 3)}
    engine.load_state_dict(values)
    loaded = engine.state_dict()
    assert {name: bits(loaded[name]["weight"]) for name in values} == {
        name: bits(value) for name, value in values.items()
    }
    engine.load_state_dict({"0": values["0"] * 3})
    assert torch.equal(model(torch.tensor([[1]])), torch.full((1, 3), 3.0))
    assert engine.verify() == {"t0": [], "0": []}


@pytest.mark.parametrize("given", [[1, 2], 3, None, {"t0": None}, {"t0": [None]}])
def test_ids_that_are_no_tensors(given: Any) -> None:
    engine, _, _ = offloaded()
    with pytest.raises(TypeError, match="prefetch: ids"):
        next(iter(engine.prefetch(CASE.batches(), ids=lambda batch: given)))
    with raises(TypeError, "ids must be a function", "'emb'"):
        engine.prefetch(CASE.batches(), ids="emb")  # type: ignore[arg-type]


def test_a_file_that_is_not_there_to_resume(tmp_path: Any) -> None:
    engine = new_engine(cache=36, storage=tmp_path, resume=True)
    with pytest.warns(RuntimeWarning, match="no .* to resume table 't0' from, which begins anew"):
        fastemb.convert(Net(CASE), offload=engine)
