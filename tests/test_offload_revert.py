"""`fastemb.revert` of offloaded tables."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from models import MODELS, batches, train
from offload_cases import (
    Case,
    TableCase,
    build,
    frozen,
    limits,
    new_engine,
    plain,
    raises,
    saved,
)
from offload_cases import train as train_case
from optim_cases import bits
from torch import Tensor, nn

import fastemb
from fastemb import offload
from fastemb.offload import OffloadEngine
from fastemb.offload._stored import StoredTable

pytestmark = limits


@pytest.mark.parametrize("name", MODELS)
def test_revert_gives_the_model_back(name: str) -> None:
    data = list(batches(6))
    model = plain(name)
    was = [(n, type(m)) for n, m in model.named_modules()]
    parameters = [id(p) for p in model.parameters()]
    engine = new_engine(cache=60)
    report = fastemb.convert(model, offload=engine)
    assert {row.action for row in report} == {"converted"}
    assert [id(p) for p in model.parameters()] == parameters
    optimizer = fastemb.optim.Adam(model.parameters(), lr=0.01, lazy="rows")
    train(model, [optimizer], data)
    weights = {key: bits(value) for key, value in model.state_dict().items()}
    states = saved(model, optimizer)[1]

    report = fastemb.revert(model)
    assert {row.action for row in report} == {"reverted"}
    assert [(n, type(m)) for n, m in model.named_modules()] == was
    assert [id(p) for p in model.parameters()] == parameters
    assert all(p.is_contiguous() for p in model.parameters())
    assert saved(model, optimizer) == (weights, states)
    for state in optimizer.state.values():
        assert all(value.is_contiguous() for value in state.values())
    assert engine.tables == {}
    assert engine.stats.misses > 0, "what was done was done"
    engine.close()
    train(model, [optimizer], data)  # with dense gradients, and the states it had


def test_training_goes_on_after_revert_as_if_there_had_been_no_engine() -> None:
    data = list(batches(6))

    def run(engine: OffloadEngine | None) -> Any:
        model = plain()
        fastemb.convert(model, torch.bfloat16, sparse="fused", offload=engine)
        optimizer = fastemb.optim.Adagrad(model.parameters(), lr=0.01)
        train(model, [optimizer], data)
        if engine is not None:
            fastemb.revert(model)
            fastemb.convert(model, torch.bfloat16, sparse="fused")
        else:  # revert rounds nothing: bfloat16 to float32 and back
            fastemb.revert(model)
            fastemb.convert(model, torch.bfloat16, sparse="fused")
        train(model, [optimizer], data)
        return saved(model, optimizer)

    assert run(new_engine(cache=60)) == run(None)


def test_revert_after_close() -> None:
    model = plain()
    engine = new_engine(cache=60)
    fastemb.convert(model, offload=engine)
    optimizer = fastemb.optim.Adam(model.parameters(), lazy="rows")
    train(model, [optimizer], list(batches(3)))
    want = saved(model, optimizer)
    engine.close()
    fastemb.revert(model)
    assert saved(model, optimizer) == want
    assert all(p.is_contiguous() for p in model.parameters())


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_revert_without_memory_changes_nothing(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((TableCase(),), dtype=torch.float16)
    batches = case.batches()
    model, optimizer = build(case, new_engine(cache=12))
    train_case(case, model, optimizer, batches)
    want = saved(model, optimizer)
    allocate, done = StoredTable._own, itertools.count()

    def own(self: StoredTable, view: Tensor, dtype: torch.dtype) -> Tensor:
        if next(done) == room:
            raise torch.OutOfMemoryError("no room")
        return allocate(self, view, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(StoredTable, "_own", own)
        with raises(torch.OutOfMemoryError, "no room"):
            fastemb.revert(model)
    assert saved(model, optimizer) == want
    train_case(case, model, optimizer, batches)
    other, other_optimizer = build(case, None)
    train_case(case, other, other_optimizer, batches * 2)
    want = saved(other, other_optimizer)
    assert saved(model, optimizer) == want
    model.t0.weight.grad = torch.ones(20, 3)  # also with a gradient, whose dtype is not the table's
    fastemb.revert(model)
    assert model.t0.weight.dtype == model.t0.weight.grad.dtype == torch.float32
    assert bits(model.t0.weight.half()) == want[0]["t0.weight"]


def test_revert_of_one_of_two_modules_with_one_table_is_refused() -> None:
    model = plain("two_tower")
    fastemb.convert(model, offload=new_engine(cache=60))
    before = frozen(model)
    with raises(ValueError, "user.history shares its weight", "item.0.weight", "its engine"):
        fastemb.revert(model, skip=["item.0"])
    assert frozen(model) == before
    fastemb.revert(model, skip=["user.id"])
    assert type(model.user["history"]) is nn.EmbeddingBag
    assert type(model.user["id"]) is offload.Embedding


def test_revert_sees_values_that_are_in_the_cache() -> None:
    model = nn.Embedding(20, 3).half()
    fastemb.convert(model, torch.float32, offload=new_engine(cache=8))
    optimizer = fastemb.optim.SGD(model.parameters(), lr=1e6)
    model(torch.tensor([2, 5])).float().sum().backward()
    optimizer.step()
    with raises(ValueError, "revert: (the model itself)", "in row 2, which float16 cannot hold"):
        fastemb.revert(model)
    assert type(model) is offload.Embedding
    assert model(torch.tensor([2])).isinf().all()  # its outputs are fp16
    model.load_state_dict({"weight": torch.ones(20, 3)})
    fastemb.revert(model)
    assert model.weight.dtype == torch.float16
