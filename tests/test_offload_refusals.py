"""Models, options and optimizers that do not go with an engine are refused, without a change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batches
from offload_cases import (
    Case,
    build,
    frozen,
    limits,
    loss_of,
    new_engine,
    plain,
    raises,
    saved,
)
from offload_cases import train as train_case
from optim_cases import bits
from torch import nn

import fastemb

pytestmark = limits


def _hooked(model: Any) -> None:
    model.tables[1].weight.register_hook(lambda grad: grad)


def _with_gradient(model: Any) -> None:
    model.tables[1].weight.grad = torch.zeros(60, 8)


def _tied_outside(model: Any) -> None:
    model.outside = nn.Linear(8, 60, bias=False)
    model.outside.weight = model.tables[1].weight


def _empty(model: Any) -> None:
    model.tables[1] = nn.EmbeddingBag(0, 8)


def _subclass(model: Any) -> None:
    class Own(nn.EmbeddingBag):
        def forward(self, *args: Any) -> Any:
            return super().forward(*args)

    model.tables[1] = Own(60, 8)


def _subclass_of_ours(model: Any) -> None:
    class Own(fastemb.nn.EmbeddingBag):
        pass

    model.tables[1] = Own(60, 8)


def _name_in_use(model: Any) -> None:
    model.tables[1].engine = "mine"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_hooked, ("tables.1", "hooks")),
        (_with_gradient, ("tables.1", "gradient", "zero_grad()")),
        (_tied_outside, ("tables.1", "outside.weight", "it cannot be offloaded")),
        (_empty, ("'tables.1'", "must have rows and columns", "(0, 8)")),
        (_subclass, ("tables.1", "Own")),
        (_subclass_of_ours, ("tables.1", "Own", "cannot be offloaded")),
        (_name_in_use, ("tables.1", "'engine' of its own")),
    ],
    ids=["hooks", "gradient", "tied", "empty", "subclass", "subclass of ours", "name"],
)
def test_a_refused_model_is_as_it_was(change: Any, text: tuple[str, ...]) -> None:
    model = plain()
    change(model)
    before = frozen(model)
    engine = new_engine(cache=60)
    with raises(ValueError, *text):
        fastemb.convert(model, offload=engine)
    assert frozen(model) == before
    assert engine.tables == {}
    fastemb.convert(model, offload=engine, skip=["tables.1"])
    assert list(engine.tables) == ["tables.0", "tables.2"]


def test_a_refused_model_leaves_no_table_under_the_name_of_one_that_is_gone() -> None:
    engine = new_engine(cache=60)
    gone = nn.Sequential(nn.Embedding(5, 3))
    fastemb.convert(gone, offload=engine)
    del gone
    model = nn.Sequential(nn.Embedding(5, 3), nn.Embedding(5, 3))
    model[1].weight.grad = torch.zeros(5, 3)
    with raises(ValueError, "gradient"):
        fastemb.convert(model, offload=engine)
    assert engine.tables == {}


def test_arguments_that_do_not_go_together_are_refused() -> None:
    model = plain()
    before = frozen(model)
    engine = new_engine(cache=60)
    for sparse in (True, False):
        with raises(ValueError, "sparse must be 'fused' or None with offload=", repr(sparse)):
            fastemb.convert(model, sparse=sparse, offload=engine)
    for wrong in ("cpu", True, object()):
        with raises(TypeError, "convert: offload must be an OffloadEngine"):
            fastemb.convert(model, offload=wrong)
    assert frozen(model) == before

    fastemb.convert(model, offload=engine)
    before = frozen(model)
    with raises(ValueError, "tables.0 is offloaded", "sparse must be 'fused' or None", "True"):
        fastemb.convert(model, sparse=True)
    with raises(ValueError, "tables.0 is offloaded as torch.float32", "torch.float16"):
        fastemb.convert(model, torch.float16)
    with raises(ValueError, "belongs to another engine"):
        fastemb.convert(model, offload=new_engine(cache=60))
    assert frozen(model) == before


def test_gradients_that_wait_are_not_lost() -> None:
    model = plain()
    fastemb.convert(model, sparse="fused")
    batch = next(batches(1))
    model(batch).sum().backward()
    with raises(RuntimeError, "'tables.0'", "wait for optimizer.step()"):
        fastemb.convert(model, offload=new_engine(cache=60))
    model = plain()
    fastemb.convert(model, offload=new_engine(cache=60))
    model(batch).sum().backward()
    with raises(RuntimeError, "'tables.0'", "wait for optimizer.step()"):
        fastemb.revert(model)


@pytest.mark.parametrize(
    ("options", "name", "dtype"),
    [
        ({"rounding": "stochastic"}, "rounding", torch.float16),
        ({"lazy": "exact"}, "lazy", torch.float32),
        ({"lazy": "rows", "decay": "all", "weight_decay": 0.1}, "decay", torch.float32),
    ],
)
@pytest.mark.parametrize("first", ["convert", "optimizer"])
def test_options_that_need_the_whole_table_are_refused(
    options: dict[str, Any], name: str, dtype: torch.dtype, first: str
) -> None:
    case = Case(dtype=dtype)
    engine = new_engine(cache=18)
    model, _ = build(case, engine if first == "convert" else None)
    batch = case.batches()[0]
    value = repr(options[name])
    if first == "convert":
        with raises(ValueError, f"Adam: {name} of an offloaded table must be", value):
            fastemb.optim.Adam(model.parameters(), **options)
        return
    optimizer = fastemb.optim.Adam(model.parameters(), **options)
    fastemb.convert(model, offload=engine)
    loss, _ = loss_of(model, batch)
    loss.backward()
    before = {key: bits(value) for key, value in model.state_dict().items()}
    with raises(ValueError, f"Adam: {name} of an offloaded table must be", value):
        optimizer.step()
    assert {key: bits(value) for key, value in model.state_dict().items()} == before


def test_a_gradient_of_the_whole_weight_is_refused() -> None:
    case = Case()
    data = case.batches()
    model, optimizer = build(case, new_engine(cache=18))
    train_case(case, model, optimizer, data)
    before = saved(model, optimizer)
    model.t0.weight.square().sum().backward()
    with raises(RuntimeError, "Adam: the weight of table 't0' is offloaded and has a .grad"):
        optimizer.step()
    with raises(RuntimeError, "'t0'", "a .grad from elsewhere"):
        train_case(case, model, optimizer, data)
    optimizer.zero_grad()
    assert saved(model, optimizer) == before
    train_case(case, model, optimizer, data)


def test_optimizers_and_scalers_of_torch_are_refused_by_name() -> None:
    case = Case()
    model, optimizer = build(case, new_engine(cache=18))
    loss, _ = loss_of(model, case.batches()[0])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss).backward()
    with raises(RuntimeError, "torch.amp.GradScaler", "'t0'", "fastemb.amp.GradScaler"):
        scaler.step(optimizer)
    with raises(RuntimeError, "torch.optim.adagrad.Adagrad", "'t0'", "fastemb.optim"):
        torch.optim.Adagrad(model.parameters()).step()
