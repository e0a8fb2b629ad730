"""`fastemb.convert(offload=...)`: the same training, earlier states, names, saving."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MODELS, Batch, TwoTower, batches, train
from offload_cases import (
    Case,
    TableCase,
    build,
    frozen,
    ids_of,
    limits,
    new_engine,
    optimizer_of,
    plain,
    raises,
    saved,
)
from offload_cases import train as train_case
from optim_cases import bits
from torch import nn

import fastemb
from fastemb import offload
from fastemb.offload import IntegrityError, OffloadEngine

pytestmark = limits


def announced(name: str) -> Callable[[Batch], dict[str, Any]]:
    """The ids of a batch of `models`, by table."""

    def dlrm(batch: Batch) -> dict[str, Any]:
        return {f"tables.{k}": bag[0] for k, bag in enumerate(batch["bags"])}

    def deepfm(batch: Batch) -> dict[str, Any]:
        fields = batch["fields"]
        ids = fields + torch.arange(fields.shape[1]) * 60
        return {"first_order": ids, "factors": ids}

    def two_tower(batch: Batch) -> dict[str, Any]:
        return {"user.id": batch["user"], "user.history": [batch["bags"][0][0], batch["item"]]}

    return {"dlrm": dlrm, "deepfm": deepfm, "two_tower": two_tower}[name]


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_without(name: str, prefetch: bool, dtype: torch.dtype | None) -> None:
    data = list(batches(8))

    def run(engine: OffloadEngine | None) -> Any:
        model = plain(name)
        fastemb.convert(model, dtype, sparse="fused", offload=engine)
        optimizer = fastemb.optim.Adam(model.parameters(), lr=0.01, lazy="rows")
        loader: Any = data
        if engine is not None and prefetch:
            loader = engine.prefetch(data, ids=announced(name))
        losses = train(model, [optimizer], loader)
        return bits(losses), *saved(model, optimizer)

    assert run(new_engine(cache=60)) == run(None)


def test_convert_twice_changes_nothing() -> None:
    model = plain()
    engine = new_engine(cache=60)
    fastemb.convert(model, torch.float16, offload=engine)
    tables = dict(engine.tables)
    optimizer = fastemb.optim.Adam(model.parameters(), lazy="rows")
    train(model, [optimizer], list(batches(2)))
    before = saved(model, optimizer)
    for arguments in ({"dtype": torch.float16}, {}, {"sparse": "fused"}):
        report = fastemb.convert(model, offload=engine, **arguments)
        assert {row.action for row in report} == {"unchanged"}
    fastemb.convert(model)  # without an engine: it stays offloaded
    assert engine.tables == tables
    assert saved(model, optimizer) == before


def test_a_model_that_is_a_table_itself() -> None:
    model = nn.Embedding(20, 3)
    engine = new_engine(cache=8)
    fastemb.convert(model, offload=engine)
    assert list(engine.tables) == ["embedding"]
    assert type(model) is offload.Embedding
    optimizer = fastemb.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    for ids in engine.prefetch([torch.tensor([3, 3]), torch.tensor([5])], ids=lambda ids: ids):
        model(ids).sum().backward()
        optimizer.step()
    before[3] -= 2
    before[5] -= 1
    assert torch.equal(model.state_dict()["weight"], before)


# ---- which comes first ----


@pytest.mark.parametrize("options", ["Adam amsgrad", "Adam row counts", "Adagrad", "SGD momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_states_from_before_come_along(options: str, dtype: torch.dtype) -> None:
    """Training begins in memory and goes on with an engine."""
    case = Case((TableCase(rows=40), TableCase(bag=False)), dtype, options, steps=6)
    data = case.batches()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(case, None)
        train_case(case, model, optimizer, data)
        if engine is not None:
            fastemb.convert(model, offload=engine)
            train_case(case, model, optimizer, engine.prefetch(data, ids=ids_of))
        else:
            train_case(case, model, optimizer, data)
        return saved(model, optimizer)

    assert run(new_engine(cache=30)) == run(None)


def test_states_from_before_are_saved_also_without_a_step() -> None:
    case = Case(steps=6)
    model, optimizer = build(case, None)
    train_case(case, model, optimizer, case.batches())
    want = saved(model, optimizer)
    engine = new_engine(cache=18)
    fastemb.convert(model, offload=engine)
    with torch.no_grad():
        model(case.batches()[0]["lookups"])
    assert saved(model, optimizer) == want


@pytest.mark.parametrize("first", ["convert", "optimizer"])
@pytest.mark.parametrize("used", [True, False])
def test_convert_and_optimizer_in_either_order(first: str, used: bool) -> None:
    case = Case(dtype=torch.float16)
    data = case.batches()
    want_model, want_optimizer = build(case, None)
    train_case(case, want_model, want_optimizer, data)

    torch.manual_seed(0)
    model, optimizer = build(case, None)  # in this order
    engine = new_engine(cache=18)
    if first == "convert":
        fastemb.convert(model, offload=engine)
        if used:
            with torch.no_grad():
                model(data[0]["lookups"])
        optimizer = optimizer_of(case, model)
    else:
        fastemb.convert(model, offload=engine)
    train_case(case, model, optimizer, engine.prefetch(data, ids=ids_of))
    assert saved(model, optimizer) == saved(want_model, want_optimizer)


def test_a_table_that_joins_a_running_optimizer() -> None:
    engine = new_engine(cache=8)
    model = offload.Embedding(20, 3, engine=engine, table="late")
    layer = nn.Linear(3, 1)
    optimizer = fastemb.optim.Adam(layer.parameters(), lazy="rows")
    layer(model(torch.tensor([1]))).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": model.parameters(), "lr": 0.1})
    before = model.state_dict()["weight"]
    layer(model(torch.tensor([1]))).sum().backward()
    optimizer.step()
    assert (model.state_dict()["weight"] != before).any(1).nonzero().view(-1).tolist() == [1]


def test_names_are_unique_in_an_engine() -> None:
    engine = new_engine(cache=60)
    first = plain()
    fastemb.convert(first, offload=engine)
    other = plain()
    before = frozen(other)
    with raises(ValueError, "there is a table 'tables.0' already"):
        fastemb.convert(other, offload=engine)
    assert frozen(other) == before
    engine.close()
    with raises(RuntimeError, "closed"):
        fastemb.convert(other, offload=engine)
    assert frozen(other) == before


def test_the_name_of_a_table_whose_module_is_gone_is_free(tmp_path: Any) -> None:
    engine = new_engine(cache=8)
    seeds = []
    for rows in (9, 12, 15):
        module = nn.Sequential(nn.Embedding(rows, 4))
        expected = module[0].weight.detach()[:8].clone()
        fastemb.convert(module, offload=engine)
        assert bits(module(torch.arange(8))) == bits(expected)
        seeds.append(engine.tables["0"].host.seed)
        del module
    assert len(set(seeds)) == 3  # of the checksums
    engine = new_engine(cache=8, storage=tmp_path)
    module = nn.Embedding(9, 4)
    fastemb.convert(module, offload=engine)
    del module  # its file is there to be read
    with raises(ValueError, "there is a table 'embedding' already"):
        fastemb.convert(nn.Embedding(9, 4), offload=engine)


# ---- moving, copying, saving ----


def test_moving_and_converting_the_model() -> None:
    case = Case(steps=4)
    data = case.batches()
    model, optimizer = build(case, new_engine(cache=18))
    train_case(case, model, optimizer, data)
    before = saved(model, optimizer)
    weight = model.t0.weight
    assert model.cpu().to("cpu").float().to(torch.float32) is model
    assert model.t0.weight is weight
    assert saved(model, optimizer) == before
    for conversion in (nn.Module.half, nn.Module.double, lambda m: m.to(torch.bfloat16)):
        with raises(RuntimeError, "'t0' is offloaded and stays torch.float32"):
            conversion(model.t0)
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with raises(RuntimeError, "'t0' is offloaded", "state_dict()", "fastemb.revert(model)"):
            copying(model.t0)
    assert saved(model, optimizer) == before
    train_case(case, model, optimizer, data)


def test_a_state_dict_is_a_copy() -> None:
    case = Case(steps=4)
    model, optimizer = build(case, new_engine(cache=18))
    train_case(case, model, optimizer, case.batches())
    weights, states = model.state_dict(), optimizer.state_dict()["state"]
    taken = bits(weights["t0.weight"]), bits(states[0]["exp_avg"])
    assert weights["t0.weight"].is_contiguous()
    train_case(case, model, optimizer, case.batches())
    assert (bits(weights["t0.weight"]), bits(states[0]["exp_avg"])) == taken
    assert bits(model.state_dict()["t0.weight"]) != taken[0]
    assert model.state_dict(keep_vars=True)["t0.weight"] is model.t0.weight


def test_what_the_modules_show() -> None:
    engine = new_engine(cache=60)
    model = plain("two_tower")
    fastemb.convert(model, torch.float16, offload=engine)
    assert repr(model.user["id"]) == (
        "Embedding(60, 8, padding_idx=59, sparse='fused', output_dtype=torch.float32, offloaded)"
    )
    assert model.user["id"].engine is engine
    assert isinstance(model.user["history"], fastemb.nn.EmbeddingBag)
    assert isinstance(model.user["history"], nn.EmbeddingBag)


def test_a_module_in_memory() -> None:
    engine = new_engine(cache=8)
    torch.manual_seed(0)
    want = nn.Embedding(20, 3, dtype=torch.float64)
    torch.manual_seed(0)
    made = offload.Embedding(20, 3, dtype=torch.float64, engine=engine, table="t")
    assert torch.equal(made.weight, want.weight)
    made.load_state_dict(nn.Embedding(20, 3).state_dict())
    half = offload.EmbeddingBag(
        20, 3, dtype=torch.float16, output_dtype=torch.float32, engine=engine, table="u"
    )
    assert half(torch.tensor([[1, 2]])).dtype == torch.float32


def test_a_damaged_record_is_not_saved() -> None:
    case = Case(steps=2)
    engine = new_engine(cache=18)
    model, optimizer = build(case, engine)
    train_case(case, model, optimizer, case.batches())
    engine.flush()
    engine.tables["t0"].host.fields["weight"].data[7, 1] += 1
    for save in (model.state_dict, optimizer.state_dict, engine.state_dict):
        with raises(IntegrityError, "'t0', row 7", "in host memory"):
            save()
    engine.reset_rows("t0", torch.tensor([7]), {"weight": torch.zeros(1, 3)})
    assert (model.state_dict()["t0.weight"][7] == 0).all()


def test_models_need_not_have_tied_names() -> None:
    """Two modules with one parameter are one table, under the name of the first."""
    torch.manual_seed(0)
    model = TwoTower()
    engine = new_engine(cache=60)
    fastemb.convert(model, offload=engine)
    assert list(engine.tables) == ["user.id", "user.history"]
    assert model.item[0].table == "user.history"
