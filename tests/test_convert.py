"""`fastemb.convert` and `fastemb.revert`: on recommenders, on odd models, on what they refuse."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from models import MODELS, TwoTower, batches, train
from torch import nn
from torch.nn.utils import parametrize

import fastemb
from fastemb import _convert
from fastemb import nn as fnn


def tables(model: nn.Module) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }


def snapshot(model: nn.Module) -> object:
    """What a refusal must leave alone."""
    return (
        {name: type(module) for name, module in model.named_modules()},
        {
            name: (id(p), p.dtype, p.data_ptr(), p.detach().clone().tolist())
            for name, p in model.named_parameters()
        },
        {name: dict(vars(module)).keys() for name, module in model.named_modules()},
    )


# ---- recommenders --------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_training_goes_as_with_torch(name: str, sparse: bool) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    expected = copy.deepcopy(model)
    for module in tables(expected).values():
        module.sparse = sparse
    report = fastemb.convert(model, sparse=sparse)
    assert [row.name for row in report] == list(tables(model))
    data = list(batches(2)) * 8

    def optimizers(of: nn.Module) -> list[torch.optim.Optimizer]:
        owned = {id(module.weight): module.weight for module in tables(of).values()}
        others = [p for p in of.parameters() if id(p) not in owned]
        kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
        return [kind(owned.values(), lr=0.01), torch.optim.Adam(others, lr=0.01)]

    got = train(model, optimizers(model), data)
    want = train(expected, optimizers(expected), data)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=1e-4)
    assert got[-2:].mean() < got[:2].mean()


@pytest.mark.parametrize("name", MODELS)
def test_an_existing_optimizer_goes_on(name: str) -> None:
    """Converted in the middle of a training, with momentum and gradients there."""
    torch.manual_seed(2)
    model = MODELS[name]()
    expected = copy.deepcopy(model)
    data = list(batches(8))
    runs = []
    for each in (model, expected):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9)
        losses = [train(each, [optimizer], data[:4])]
        gradients = {n: p.grad for n, p in each.named_parameters()}
        if each is model:
            fastemb.convert(model)
            assert {n: p.grad for n, p in each.named_parameters()} == gradients
        losses.append(train(each, [optimizer], data[4:]))
        runs.append(torch.cat(losses))
    torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_low_precision_tables_train_in_a_float32_model(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    parameters = dict(model.named_parameters())
    expected = copy.deepcopy(model)
    report = fastemb.convert(model, dtype=dtype)
    assert report.new_bytes * 2 == report.old_bytes
    assert {n: id(p) for n, p in model.named_parameters()} == {
        n: id(p) for n, p in parameters.items()
    }
    data = list(batches(10))
    got = train(model, [optimizer], data)
    for module in tables(model).values():
        assert module.weight.dtype == dtype
        assert module.weight.grad.dtype == torch.float32
        assert module.output_dtype == torch.float32
    want = train(expected, [torch.optim.SGD(expected.parameters(), lr=0.05)], data)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)


def test_state_dicts_go_both_ways() -> None:
    torch.manual_seed(4)
    plain, converted = TwoTower(), TwoTower()
    fastemb.convert(converted)
    assert list(plain.state_dict()) == list(converted.state_dict())
    converted.load_state_dict(plain.state_dict())
    batch = next(batches(1))
    torch.testing.assert_close(converted(batch), plain(batch))
    plain.load_state_dict(converted.state_dict())


# ---- in place ------------------------------------------------------------------------------------


def test_names_hooks_and_attributes_stay() -> None:
    calls: list[str] = []
    model = nn.Sequential(nn.ModuleDict({"a": nn.Embedding(5, 2, padding_idx=1)}), nn.Linear(2, 1))
    table = model[0]["a"]
    table.register_forward_hook(lambda *_: calls.append("forward"))
    table.weight.register_hook(lambda grad: calls.append(f"{grad.dtype}"))
    table.weight.requires_grad_(True)
    table.remark = "mine"
    table.eval()
    weight = table.weight
    fastemb.convert(model, dtype=torch.float16)
    assert model[0]["a"] is table
    assert isinstance(table, fnn.Embedding)
    assert table.weight is weight
    assert (table.remark, table.training, table.padding_idx) == ("mine", False, 1)
    table(torch.tensor([1, 2])).sum().backward()
    assert calls[0] == "forward"
    assert len(calls) == 2
    assert weight.grad[1].tolist() == [0, 0]


def test_frozen_tables_stay_frozen() -> None:
    model = nn.Sequential(nn.EmbeddingBag.from_pretrained(torch.ones(4, 2)))
    fastemb.convert(model, dtype=torch.bfloat16)
    assert not model[0].weight.requires_grad
    assert not model[0](torch.tensor([[1]])).requires_grad


def test_the_model_itself() -> None:
    table = nn.EmbeddingBag(5, 2, mode="max")
    report = fastemb.convert(table, dtype=torch.float16)
    assert type(table) is fnn.EmbeddingBag
    assert report[0].name == ""
    assert "(the model itself)" in str(report)
    fastemb.revert(table)
    assert type(table) is nn.EmbeddingBag


def test_tied_and_shared() -> None:
    shared = nn.Embedding(5, 2)
    model = nn.Module()
    model.a = shared
    model.again = shared  # the same module twice
    model.b = nn.EmbeddingBag(5, 2)
    model.b.weight = shared.weight  # the same parameter in another module
    report = fastemb.convert(model, dtype=torch.float16)
    assert [(row.name, row.shares) for row in report] == [("a", None), ("b", "a")]
    assert {row.old_dtype for row in report} == {torch.float32}
    assert report.old_bytes == 40
    assert model.a is model.again
    assert model.a.weight is model.b.weight
    assert model.b.output_dtype == torch.float32
    ids = torch.tensor([[1, 2]])
    (model.a(ids).sum() + model.b(ids).sum()).backward()
    assert shared.weight.grad.dtype == torch.float32
    assert shared.weight.grad[1].tolist() == [1.5, 1.5]


def test_gradients_are_converted() -> None:
    model = nn.Sequential(nn.Embedding(5, 2))
    weight = model[0].weight
    weight.grad = torch.full((5, 2), 2.0**-40)  # zero in fp16
    fastemb.convert(model, dtype=torch.float16)
    assert weight.grad.dtype == torch.float32
    assert weight.grad.unique().tolist() == [2.0**-40]
    fastemb.convert(model, dtype=torch.bfloat16)
    assert weight.grad.unique().tolist() == [2.0**-40]
    model[0](torch.tensor([1])).sum().backward()
    fastemb.convert(model, dtype=torch.float64)
    assert weight.grad.dtype == torch.float64
    assert weight.grad[1, 0] == 1
    fastemb.revert(model)
    assert weight.grad.dtype == torch.float32


def test_twice_is_once() -> None:
    model = TwoTower()
    fastemb.convert(model, dtype=torch.float16, sparse=True)
    before = snapshot(model)
    again = fastemb.convert(model, dtype=torch.float16, sparse=True)
    assert {row.action for row in again} == {"unchanged"}
    assert snapshot(model) == before
    changed = fastemb.convert(model, dtype=torch.bfloat16)
    assert {row.action for row in changed} == {"changed"}
    assert model.user["id"].output_dtype == torch.float32
    assert model.user["id"].sparse


def test_output_dtype_is_chosen() -> None:
    model = nn.Sequential(nn.Embedding(5, 2))
    fastemb.convert(model, dtype=torch.float16, output_dtype=torch.bfloat16)
    assert model(torch.tensor([1])).dtype == torch.bfloat16


def test_half_models_keep_their_outputs() -> None:
    model = nn.Sequential(nn.Embedding(5, 2).half())
    fastemb.convert(model, dtype=torch.float32)
    assert model(torch.tensor([1])).dtype == torch.float16


def test_meta_device() -> None:
    model = nn.Sequential(nn.Embedding(5, 2, device="meta"))
    fastemb.convert(model, dtype=torch.float16)
    model.to_empty(device="cpu")
    assert model[0].weight.dtype == torch.float16
    assert model[0].weight.grad_dtype == torch.float32
    assert model(torch.tensor([1])).dtype == torch.float32


def test_errors_name_the_table() -> None:
    model = nn.ModuleDict({"users": nn.Embedding(5, 2)})
    fastemb.convert(model)
    with pytest.raises(IndexError, match=r"index 9 at position 0 .*table 'users' with 5 rows"):
        model["users"](torch.tensor([9]))


def test_copies_of_converted_models() -> None:
    model = nn.Sequential(nn.Embedding(5, 2))
    fastemb.convert(model, dtype=torch.float16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is fnn.Embedding
        assert other[0].weight.grad_dtype == torch.float32
        fastemb.revert(other)
        assert type(other[0]) is nn.Embedding
        assert other[0].weight.dtype == torch.float32


# ---- what to leave alone -------------------------------------------------------------------------


def test_skip_by_name_and_by_function() -> None:
    model = TwoTower()
    report = fastemb.convert(model, skip=["user.id"])
    assert {row.name: row.action for row in report}["user.id"] == "skipped"
    assert type(model.user["id"]) is nn.Embedding
    assert type(model.item[0]) is fnn.Embedding

    model = TwoTower()
    fastemb.convert(model, skip=["user", "item"])
    assert not any(isinstance(m, (fnn.Embedding, fnn.EmbeddingBag)) for m in model.modules())

    model = TwoTower()
    fastemb.convert(model, skip=lambda name, module: isinstance(module, nn.EmbeddingBag))
    assert type(model.user["history"]) is nn.EmbeddingBag
    assert type(model.user["id"]) is fnn.Embedding


def test_skip_by_names_that_can_be_read_once() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Embedding(4, 2), nn.Linear(2, 2))
    fastemb.convert(model, skip=(name for name in ["0"]), boundary=["2"])
    assert [type(module) for module in model] == [
        nn.Embedding,
        fnn.Embedding,
        fastemb.amp.BoundaryLinear,
    ]

    fastemb.revert(model, skip=(name for name in ["1", "2"]))
    assert [type(module) for module in model] == [
        nn.Embedding,
        fnn.Embedding,
        fastemb.amp.BoundaryLinear,
    ]


def test_skip_the_model_itself_and_so_all() -> None:
    model = TwoTower()
    fastemb.convert(model, skip=[""])
    assert not any(isinstance(m, (fnn.Embedding, fnn.EmbeddingBag)) for m in model.modules())


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="skip must name modules of the model, got 'usr'"):
        fastemb.convert(TwoTower(), skip=["usr"])


# ---- refusals ------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Initialised(nn.Embedding):
    def __init__(self, rows: int) -> None:
        super().__init__(rows, 2)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def refused(model: nn.Module, match: str, **options: object) -> None:
    before = snapshot(model)
    with pytest.raises(ValueError, match=match):
        fastemb.convert(model, **options)
    assert snapshot(model) == before


def test_a_forward_of_its_own() -> None:
    model = nn.ModuleDict({"first": nn.Embedding(3, 2), "odd": Scaled(3, 2)})
    refused(model, r"convert: odd is a Scaled, a subclass of nn.Embedding with its own forward")
    fastemb.convert(model, skip=["odd"])
    assert type(model["odd"]) is Scaled


def test_a_subclass_that_only_initialises() -> None:
    model = nn.Sequential(Initialised(3))
    fastemb.convert(model)
    assert type(model[0]) is fnn.Embedding
    fastemb.revert(model)
    assert type(model[0]) is Initialised


class Constant(nn.Embedding):
    """Its documentation and annotations are no loss, nor is what the module has itself."""

    remark: str
    padding_idx = None


class Offset(Constant):
    SCALE = 5


class Counted:
    def count(self) -> int:
        return 1


class Mixed(nn.EmbeddingBag, Counted):
    pass


def test_class_attributes_of_its_own() -> None:
    refused(nn.Sequential(Offset(3, 2)), "convert: 0 is a Offset, .* with its own SCALE")
    refused(nn.Sequential(Mixed(3, 2)), "convert: 0 is a Mixed, .* with its own count")
    model = nn.Sequential(Constant(3, 2))
    fastemb.convert(model)
    assert type(model[0]) is fnn.Embedding


def test_a_forward_of_the_module_itself() -> None:
    model = nn.Sequential(nn.Embedding(3, 2))
    model[0].forward = model[0].forward
    refused(model, "convert: 0 has a forward set on the module itself")
    del model[0].forward
    fastemb.convert(model)
    model[0].forward = model[0].forward  # of ours: nothing is lost
    fastemb.convert(model, dtype=torch.float16)
    assert model(torch.tensor([1])).dtype == torch.float32


OCCUPY = {
    "attribute": lambda module, name: setattr(module, name, "mine"),
    "buffer": lambda module, name: module.register_buffer(name, torch.ones(2)),
    "parameter": lambda module, name: setattr(module, name, nn.Parameter(torch.ones(2))),
    "submodule": lambda module, name: setattr(module, name, nn.Identity()),
}


@pytest.mark.parametrize("name", ["table", "output_dtype"])
@pytest.mark.parametrize("occupy", OCCUPY.values(), ids=OCCUPY)
def test_a_name_that_the_conversion_needs(occupy: Callable[..., None], name: str) -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2))
    occupy(model[1], name)
    refused(model, f"convert: 1 has '{name}' of its own", dtype=torch.float16)
    fastemb.convert(model, skip=["1"])
    fastemb.revert(model)
    assert hasattr(model[1], name)


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        (torch.float32, torch.float16, 65520.0),
        (torch.bfloat16, torch.float16, -65536.0),  # the limit, 65504, is no bf16
        (torch.float32, torch.bfloat16, 3.4e38),
        (torch.float64, torch.float32, 1e200),
    ],
)
def test_values_that_the_new_dtype_cannot_hold(
    old: torch.dtype, new: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_convert, "_CHECKED_ELEMENTS", 4)  # rows 0 and 1, 2 and 3, 4
    model = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(5, 2), nn.Embedding(0, 2)).to(old)
    weight = model[1].weight.detach()
    largest = torch.finfo(new).max * (1 - 2**-8)
    weight[:2] = torch.tensor([[float("inf"), 0], [largest, 0]])
    weight[3, 1] = value
    text = f"convert: 1 has a value of {weight[3, 1].item():g} in row 3, which"
    refused(model, re.escape(text), dtype=new)
    weight[3] = torch.tensor([-largest, float("nan")])
    fastemb.convert(model, dtype=new)
    assert model[1].weight[:, 0].isfinite().tolist() == [False, True, True, True, True]
    assert model[1].weight[3, 1].isnan()


def test_revert_refuses_values_that_the_old_dtype_cannot_hold() -> None:
    model = nn.Sequential(nn.Embedding(3, 2).half())
    fastemb.convert(model, dtype=torch.float32)
    with torch.no_grad():
        model[0].weight[2, 0] = 1e5
    with pytest.raises(ValueError, match="revert: 0 has a value of 100000 in row 2, which float16"):
        fastemb.revert(model)
    assert type(model[0]) is fnn.Embedding


def test_a_table_without_weight() -> None:
    model = nn.ModuleDict({"none": nn.Embedding(3, 2), "table": nn.Embedding(3, 2)})
    model["none"].weight = None
    refused(model, "convert: none has no parameter named weight")
    assert [row.name for row in fastemb.convert(model, skip=["none"])] == ["table"]
    assert [row.name for row in fastemb.revert(model)] == ["table"]
    ours = nn.Sequential(fnn.Embedding(3, 2))
    ours[0].weight = None
    with pytest.raises(ValueError, match="revert: 0 has no parameter named weight"):
        fastemb.revert(ours)


def test_lazy_modules_beside_tables() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.LazyLinear(4), nn.LazyBatchNorm1d())
    fastemb.convert(model, dtype=torch.float16)
    assert model(torch.tensor([1, 2])).shape == (2, 4)


def test_arguments_of_the_wrong_type() -> None:
    model = nn.Sequential(nn.Embedding(3, 2))
    for sparse in ("rows", 1):
        message = f"sparse must be True, False, 'fused' or None, got {sparse!r}"
        with pytest.raises(TypeError, match=message):
            fastemb.convert(model, sparse=sparse)
    for function in (fastemb.convert, fastemb.revert):
        op = function.__name__
        with pytest.raises(TypeError, match=rf"{op}: model must be a torch.nn.Module, got list"):
            function([model])
        with pytest.raises(TypeError, match=f"{op}: skip must be names of modules or .* got None"):
            function(model, skip=None)
    assert type(model[0]) is nn.Embedding


def test_a_weight_that_another_module_uses() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["table"].weight
    refused(
        model, "table shares its weight with head.weight, which is not conv", dtype=torch.float16
    )
    fastemb.convert(model)  # the dtype stays, and so may the tie
    assert model["head"].weight is model["table"].weight


def test_a_weight_that_a_skipped_table_uses() -> None:
    model = TwoTower()
    refused(
        model,
        r"user\.history shares its weight with item\.0\.weight",
        dtype=torch.float16,
        skip=["item.0"],
    )


def test_the_same_memory_under_two_parameters() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(3, 2), "b": nn.Embedding(3, 2)})
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    refused(model, "a and b have different parameters in the same memory", dtype=torch.float16)
    fastemb.convert(model)


def test_disjoint_views_of_one_buffer() -> None:
    flat = torch.arange(12.0)
    model = nn.ModuleDict({"a": nn.Embedding(3, 2), "b": nn.Embedding(3, 2)})
    model["a"].weight = nn.Parameter(flat[:6].view(3, 2))
    model["b"].weight = nn.Parameter(flat[6:].view(3, 2))
    fastemb.convert(model, dtype=torch.float16)
    assert torch.equal(torch.cat([model[name].weight.flatten() for name in "ab"]).float(), flat)
    model["a"].weight = nn.Parameter(flat[:6].view(3, 2))
    model["b"].weight = nn.Parameter(flat[4:10].view(3, 2))
    refused(model, "a and b have different parameters in the same memory", dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted() -> None:
    model = nn.ModuleDict({"net": nn.Sequential(nn.Embedding(3, 2)), "table": nn.Embedding(3, 2)})
    ids = torch.tensor([1])
    for net in (torch.jit.script(model["net"]), torch.jit.trace(model["net"], (ids,))):
        model["net"] = net
        with pytest.raises(ValueError, match=r"convert: net\.0 was scripted or traced"):
            fastemb.convert(model)
        assert type(model["table"]) is nn.Embedding
    report = fastemb.convert(model, skip=["net"])
    assert [row.name for row in report] == ["table"]
    assert [row.action for row in fastemb.revert(model)] == ["reverted"]


def test_parametrized() -> None:
    model = nn.Sequential(nn.Embedding(3, 2))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    with pytest.raises(ValueError, match="convert: 0 is parametrized"):
        fastemb.convert(model)


def test_a_weight_that_a_hook_computes() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Embedding(3, 2))
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model[1])
    refused(model, "convert: 1 has no parameter named weight")
    fastemb.convert(model, skip="1")
    assert type(model[0]) is fnn.Embedding


def test_a_weight_of_another_kind() -> None:
    class Special(nn.Parameter):
        pass

    model = nn.Sequential(nn.Embedding(3, 2))
    model[0].weight = Special(torch.ones(3, 2))
    refused(model, "convert: 0 has a weight of type Special, not a plain tensor")


def test_quantized() -> None:
    from torch.ao.nn.quantized import EmbeddingBag

    model = nn.ModuleDict({"small": EmbeddingBag(4, 4), "table": nn.Embedding(3, 2)})
    with pytest.raises(ValueError, match="convert: small is quantized"):
        fastemb.convert(model)
    assert type(model["table"]) is nn.Embedding
    report = fastemb.convert(model, skip=["small"])
    assert [row.name for row in report] == ["table"]


def test_dtypes_that_no_table_has() -> None:
    model = nn.Sequential(nn.Embedding(3, 2))
    with pytest.raises(TypeError, match=r"convert: dtype must be .* got torch.int8"):
        fastemb.convert(model, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"convert: output_dtype must be .* got torch.int8"):
        fastemb.convert(model, output_dtype=torch.int8)
    refused(nn.Sequential(nn.Embedding(3, 2, dtype=torch.complex64)), "has a weight of complex64")


# ---- back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_revert(name: str) -> None:
    torch.manual_seed(5)
    model = MODELS[name]()
    original = copy.deepcopy(model)
    fastemb.convert(model, dtype=torch.bfloat16, sparse=True)
    report = fastemb.revert(model)
    assert {row.action for row in report} == {"reverted"}
    assert {n: type(m) for n, m in model.named_modules()} == {
        n: type(m) for n, m in original.named_modules()
    }
    for (key, value), kept in zip(tables(model).items(), tables(original).values(), strict=True):
        assert vars(value).keys() == vars(kept).keys(), key
        assert value.sparse == kept.sparse
        assert value.weight.dtype == torch.float32
        assert value.weight.grad_dtype == torch.float32
        assert torch.equal(value.weight, kept.weight.bfloat16().float())
    assert repr(model) == repr(original)
    batch = next(batches(1))
    torch.testing.assert_close(model(batch), original(batch), rtol=0.1, atol=0.1)
    assert {row.action for row in fastemb.revert(model)} == {"unchanged"}


def test_revert_of_tables_that_were_ours_from_the_start() -> None:
    model = nn.Sequential(fnn.Embedding(5, 2, dtype=torch.float16, output_dtype=torch.float32))
    before = model(torch.tensor([3]))
    fastemb.revert(model)
    assert type(model[0]) is nn.Embedding
    assert model[0].weight.dtype == torch.float32
    assert torch.equal(model(torch.tensor([3])), before)
    half = nn.Sequential(fnn.Embedding(5, 2, dtype=torch.float16))
    half[0](torch.tensor([1])).sum().backward()
    fastemb.revert(half)
    assert half[0].weight.grad.dtype == torch.float16
    assert half[0].weight.grad_dtype == torch.float16


def test_revert_refuses_tables_that_disagree() -> None:
    """They came to share a weight after they were converted from different dtypes."""
    model = nn.ModuleDict({"a": nn.Embedding(3, 2), "b": nn.Embedding(3, 2).double()})
    fastemb.convert(model, dtype=torch.float16)
    model["b"].weight = model["a"].weight
    with pytest.raises(ValueError, match="a and b share a weight but were float32 and float64"):
        fastemb.revert(model)
    assert type(model["a"]) is fnn.Embedding


def test_revert_refuses_a_subclass() -> None:
    class Mine(fnn.Embedding):
        pass

    model = nn.Sequential(Mine(3, 2), fnn.Embedding(3, 2))
    with pytest.raises(ValueError, match="revert: 0 is a Mine"):
        fastemb.revert(model)
    assert type(model[1]) is fnn.Embedding
    fastemb.revert(model, skip=["0"])
    assert type(model[1]) is nn.Embedding


# ---- the report ----------------------------------------------------------------------------------


def test_report() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(1024, 2), "b": nn.EmbeddingBag(3, 2)})
    report = fastemb.convert(model, dtype=torch.float16, skip=["b"])
    assert len(report) == 2
    assert [row.action for row in report[:]] == ["converted", "skipped"]
    assert str(report).splitlines() == [
        "table  kind          dtype               size                action",
        "a      Embedding     float32 -> float16  8.0 KiB -> 4.0 KiB  converted",
        "b      EmbeddingBag  float32             24 B                skipped",
        "total                                    8.0 KiB -> 4.0 KiB",
    ]
    assert repr(report) == str(report)
    assert str(fastemb.convert(nn.Linear(2, 2))) == "no embedding tables"


# ---- transformers --------------------------------------------------------------------------------


def test_bert() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=20,
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    ids = torch.randint(0, 50, (2, 7))
    expected = model(input_ids=ids).last_hidden_state
    report = fastemb.convert(model)
    assert "embeddings.word_embeddings" in [row.name for row in report]
    assert torch.equal(model(input_ids=ids).last_hidden_state, expected)
    fastemb.convert(model, dtype=torch.bfloat16)
    got = model(input_ids=ids).last_hidden_state
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0.1, atol=0.1)
    got.sum().backward()
    assert model.embeddings.word_embeddings.weight.grad.dtype == torch.float32


def test_gpt2_has_a_tied_head() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=20)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(0, 50, (2, 7))
    expected = model(input_ids=ids, labels=ids)
    with pytest.raises(
        ValueError, match=r"transformer\.wte shares its weight with lm_head\.weight"
    ):
        fastemb.convert(model, dtype=torch.float16)
    assert type(model.transformer.wpe) is nn.Embedding
    fastemb.convert(model)
    got = model(input_ids=ids, labels=ids)
    assert torch.equal(got.logits, expected.logits)
    got.loss.backward()
    assert model.lm_head.weight is model.transformer.wte.weight
    # The positions are not tied, so their table may change.
    fastemb.convert(model, dtype=torch.float16, skip=["transformer.wte"])
    assert model.transformer.wpe.weight.dtype == torch.float16
    assert model(input_ids=ids).logits.dtype == torch.float32
