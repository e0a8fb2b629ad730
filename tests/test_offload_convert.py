"""`fastemb.convert(offload=...)`, the way back, and what is refused."""

from __future__ import annotations

import copy
import itertools
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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastemb
from fastemb import offload
from fastemb.offload import IntegrityError, OffloadEngine
from fastemb.offload._stored import StoredTable

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


def plain(name: str = "dlrm") -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def frozen(model: nn.Module) -> Any:
    """What a refused conversion must leave as it was."""
    return [
        (
            name,
            type(module),
            vars(module).keys(),
            getattr(module, "sparse", None),
            {
                key: (id(p), bits(p), p.is_contiguous())
                for key, p in module._parameters.items()
                if p is not None
            },
        )
        for name, module in model.named_modules()
    ]


# ---- there and back ----


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


# ---- what is refused, without a change ----


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


def test_traces_and_fake_tensors_are_refused_before_the_first_use() -> None:
    """Nothing of a table is made from what they make of its shape."""
    module = nn.Embedding(9, 4)
    expected = bits(module.weight[:8])
    fastemb.convert(module, offload=new_engine(cache=8))
    ids = torch.arange(8)
    refused = "'embedding' is offloaded and cannot be looked up in a trace"
    with raises(RuntimeError, refused):
        torch.jit.trace(module, ids)
    with raises(RuntimeError, refused):
        make_fx(module)(ids)
    with FakeTensorMode(allow_non_fake_inputs=True), raises(RuntimeError, refused):
        module(ids)
    assert bits(module(ids)) == expected


@pytest.mark.parametrize("cached", [False, True])
def test_transforms_of_a_table_that_trains_are_refused_before_anything_moves(cached: bool) -> None:
    case = Case((TableCase(),))
    batches = case.batches()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(case, engine)
        train_case(case, model, optimizer, batches)
        if engine is not None:
            last = batches[-1 if cached else 0]

            def loss(layer: Tensor) -> Tensor:
                named = {"layer.weight": layer}
                return torch.func.functional_call(model, named, (last["lookups"],)).sum()

            weight = model.layer.weight.detach()
            refused = "table 't0' is offloaded, which cannot be used within torch.func"
            for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
                with raises(NotImplementedError, refused):
                    transform(loss)(weight)
            with raises(NotImplementedError, refused):
                torch.func.functionalize(loss)(weight)
        train_case(case, model, optimizer, batches)
        return saved(model, optimizer)

    assert run(new_engine(cache=12)) == run(None)


def test_a_loop_and_a_checkpoint_within_a_transform() -> None:
    """What an engine does is no part of it."""
    case = Case((TableCase(),))
    batches = case.batches()
    engine = new_engine(cache=12)
    model, optimizer = build(case, engine)
    train_case(case, model, optimizer, batches)

    def loss(scale: Tensor) -> Tensor:
        for _ in engine.prefetch(batches, ids=ids_of):
            scale = scale * 2
        return scale * len(model.state_dict())

    assert torch.func.grad(loss)(torch.tensor(1.0)) == 2 ** len(batches) * 3
    train_case(case, model, optimizer, batches)
    want, want_optimizer = build(case, None)
    train_case(case, want, want_optimizer, batches * 2)
    assert saved(model, optimizer) == saved(want, want_optimizer)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_transforms_with_a_frozen_table(max_norm: float | None) -> None:
    case = Case((TableCase(weighted=True, max_norm=max_norm),))
    batch = case.batches()[0]
    ids, weights = batch["lookups"]["t0"].values()

    def run(engine: OffloadEngine | None) -> Any:
        model, _ = build(case, engine)
        model.requires_grad_(False)

        def loss(ids: Tensor, weights: Tensor) -> Tensor:
            return model({"t0": {"input": ids, "per_sample_weights": weights}}).square().sum()

        found = torch.func.grad(loss, argnums=1)(ids, weights)
        each = torch.func.vmap(loss, (None, 0))(ids, weights.expand(3, *weights.shape))
        return bits(found), bits(each), bits(model.state_dict()["t0.weight"])

    engine = new_engine(cache=12)
    assert run(engine) == run(None)
    with raises(NotImplementedError, "whose ids cannot be mapped over by vmap"):
        model, _ = build(case, new_engine(cache=12))
        model.requires_grad_(False)
        torch.func.vmap(model.t0)(ids.unsqueeze(1), weights.unsqueeze(1))


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
