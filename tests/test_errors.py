"""Wrong input: the type of the error, what it says, and that nothing was written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastemb import functional as F
from fastemb import nn as fnn
from fastemb import optim

IDS = torch.tensor([1, 2, 4])
OFFSETS = torch.tensor([0, 2])
TORCH = torch.torch_version.TorchVersion(torch.__version__)


def table(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(10, dtype=torch.float32).reshape(5, 2).to(dtype))


def fails(
    kind: type[Exception], text: str, function: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> None:
    """The call raises ``kind`` with ``text``, and no tensor among its arguments has changed."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_meta]
    for x in tensors:
        if isinstance(x, torch.nn.Parameter):
            x.grad = torch.ones_like(x)
    before = [x.detach().clone() for x in tensors]
    with pytest.raises(kind, match=re.escape(text)) as caught:
        function(*args, **kwargs)
    assert type(caught.value) is kind
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x.detach(), y)
        if isinstance(x, torch.nn.Parameter):
            assert torch.equal(x.grad, torch.ones_like(x))


# ---- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [5, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("named", ["user", ""])
def test_ids_out_of_range(named: str, bad: int, index_dtype: torch.dtype) -> None:
    ids = torch.tensor([1, 4, bad, 0], dtype=index_dtype)
    whose = "table 'user'" if named else "the table"
    where = f"index {bad} at position 2 is out of range for {whose} with 5 rows"
    fails(IndexError, f"embedding: {where}", F.embedding, ids, table(), table=named)
    for mode in ("sum", "mean", "max"):
        for options in ({}, {"padding_idx": 4}):
            fails(
                IndexError,
                f"embedding_bag: {where}",
                F.embedding_bag,
                ids,
                table(),
                OFFSETS,
                mode=mode,
                table=named,
                **options,
            )
            fails(
                IndexError,
                f"embedding_bag: {where}",
                F.embedding_bag,
                ids.reshape(2, 2),
                table(),
                mode=mode,
                table=named,
                **options,
            )
    # Rows are shrunk before the lookup, so that step has to see the ids first.
    for function in (F.embedding, F.embedding_bag):
        offsets = () if function is F.embedding else (OFFSETS,)
        fails(
            IndexError,
            f"embedding_renorm_: {where}",
            function,
            ids,
            table(),
            *offsets,
            max_norm=0.1,
            table=named,
        )


@pytest.mark.parametrize("how", ["parameter", "traced", "compiled"])
@pytest.mark.parametrize("offsets", [[0, 5], [1, 2]])
def test_wrong_offsets_leave_the_table_alone(how: str, offsets: list[int]) -> None:
    """`max_norm` writes rows before the lookup, also where Python does not see the values."""
    module = fnn.EmbeddingBag(5, 2, max_norm=0.1)
    module.requires_grad_(False)
    lookup: Any = module
    bad = torch.tensor(offsets)
    if how == "traced":
        lookup = torch.jit.trace(module, (IDS, torch.tensor([0, 1])))
    elif how == "compiled":
        lookup = torch.compile(module, backend="aot_eager", fullgraph=True)
    else:
        bad = torch.nn.Parameter(bad, requires_grad=False)
    before = module.weight.fill_(1).clone()
    with pytest.raises((ValueError, RuntimeError), match="embedding_bag: offsets"):
        lookup(IDS, bad)
    assert torch.equal(module.weight, before)


def test_max_norm_is_not_for_ids_behind_the_last_offset() -> None:
    for last, rows in ((2, [0, 1]), (1, [0]), (0, [])):
        weight = torch.full((4, 2), 5.0)
        ids = torch.tensor([0, 1, 99])
        F.embedding_bag(
            ids, weight, torch.tensor([0, last]), max_norm=1.0, include_last_offset=True
        )
        assert (weight[:, 0] < 5).nonzero().flatten().tolist() == rows


def test_max_norm_is_not_for_ids_in_no_bag() -> None:
    weight = torch.full((4, 2), 5.0)
    none = torch.zeros(0, dtype=torch.int64)
    for mode in ("sum", "mean", "max"):
        assert F.embedding_bag(IDS, weight, none, max_norm=1.0, mode=mode).shape == (0, 2)
        assert F.embedding_bag(IDS + 99, weight, none, max_norm=1.0, mode=mode).shape == (0, 2)
    assert torch.equal(weight, torch.full((4, 2), 5.0))


@pytest.mark.parametrize("bad", [2**31, 2**32, 2**62, -(2**62)])
def test_ids_are_not_cut_to_32_bits(bad: int) -> None:
    text = f"index {bad} at position 1 is out of range"
    fails(IndexError, text, F.embedding, torch.tensor([0, bad]), table())
    fails(IndexError, text, F.embedding_bag, torch.tensor([[0, bad]]), table())


def test_any_id_is_wrong_for_a_table_without_rows() -> None:
    empty = torch.empty(0, 2)
    fails(IndexError, "index 0 at position 0", F.embedding, torch.tensor([0]), empty)
    assert F.embedding(IDS[:0], empty).shape == (0, 2)


def test_the_first_wrong_id_is_named() -> None:
    ids = torch.zeros(100_000, dtype=torch.int64)
    ids[70_000:] = 9
    fails(IndexError, "index 9 at position 70000", F.embedding, ids, table())
    fails(IndexError, "index 9 at position 70000", F.embedding_bag, ids, table(), OFFSETS)


# ---- offsets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "text"),
    [
        ([1, 2], "offsets[0] must be 0, got 1"),
        ([-1, 2], "offsets[0] must be 0, got -1"),
        ([0, 3, 1], "offsets[2] = 1 is less than offsets[1] = 3"),
        ([0, -2, 3], "offsets[1] = -2 is less than offsets[0] = 0"),
        ([0, 5, 2], "offsets[1] = 5 is greater than the number of indices, 3"),
        ([0, 1, 4], "offsets[2] = 4 is greater than the number of indices, 3"),
    ],
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_offsets(mode: str, offsets: list[int], text: str) -> None:
    for dtype in (torch.int32, torch.int64):
        starts = torch.tensor(offsets, dtype=dtype)
        for options in ({}, {"include_last_offset": True}, {"max_norm": 0.1}):
            fails(
                ValueError,
                f"embedding_bag: {text}",
                F.embedding_bag,
                IDS,
                table(),
                starts,
                mode=mode,
                **options,
            )


def test_offsets_are_not_cut_to_32_bits() -> None:
    text = f"offsets[1] = {2**40} is greater than the number of indices, 3"
    fails(ValueError, text, F.embedding_bag, IDS, table(), torch.tensor([0, 2**40, 1]))


def test_offsets_beyond_an_empty_input() -> None:
    text = "offsets[1] = 2 is greater than the number of indices, 0"
    fails(ValueError, text, F.embedding_bag, IDS[:0], table(), torch.tensor([0, 2, 0]))


# ---- shapes, dtypes, devices, options ------------------------------------------------------------


@pytest.mark.parametrize("name", ["input", "weight", "offsets", "per_sample_weights"])
def test_sparse_layouts(name: str) -> None:
    arguments = {
        "input": IDS,
        "weight": table(),
        "offsets": OFFSETS,
        "per_sample_weights": torch.ones(len(IDS)),
    }
    arguments[name] = arguments[name].to_sparse()
    text = f": {name} must be a dense tensor, got one of torch.sparse_coo"
    with pytest.raises(ValueError, match=f"embedding_bag{text}"):
        F.embedding_bag(**arguments, mode="sum")
    if name in ("input", "weight"):
        with pytest.raises(ValueError, match=f"embedding{text}"):
            F.embedding(arguments["input"], arguments["weight"])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("function", [F.embedding, F.embedding_bag])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_input(function: Callable[..., Tensor], layout: torch.layout) -> None:
    ids = torch.nested.nested_tensor([IDS, IDS[:1]], layout=layout)
    with pytest.raises(ValueError, match="input must not be nested; pass its values"):
        function(ids, table())


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_initial_weights(kind: type) -> None:
    op = kind.__name__
    for error, text, weight in (
        (ValueError, "_weight must have the shape (3, 2), got (4, 2)", torch.ones(4, 2)),
        (ValueError, "_weight must be 2-D, got 1-D float32", torch.ones(3)),
        (TypeError, "_weight must be float16,", torch.ones(3, 2, dtype=torch.int64)),
        (TypeError, "_weight must be a tensor, got ndarray", torch.ones(3, 2).numpy()),
    ):
        fails(error, f"{op}: {text}", kind, 3, 2, _weight=weight)


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        (TypeError, "weight must be a tensor, got list", {"weight": [[1.0]]}),
        (
            TypeError,
            "weight must be float16, bfloat16, float32 or float64, got 2-D int64",
            {"weight": torch.ones(2, 2, dtype=torch.int64)},
        ),
        (ValueError, "weight must be 2-D, got 1-D float32", {"weight": torch.ones(3)}),
        (ValueError, "weight must be 2-D, got 3-D float32", {"weight": torch.ones(3, 2, 2)}),
        (TypeError, "input must be a tensor, got list", {"input": [1, 2]}),
        (
            TypeError,
            "input must be int32 or int64, got 1-D float32",
            {"input": torch.ones(3)},
        ),
        (
            TypeError,
            "input must be int32 or int64, got 1-D int16",
            {"input": IDS.short()},
        ),
        (
            ValueError,
            "input must be on weight's device cpu, got meta",
            {"input": IDS.to("meta")},
        ),
        (ValueError, "padding_idx must be within [-5, 5), got 5", {"padding_idx": 5}),
        (ValueError, "padding_idx must be within [-5, 5), got -6", {"padding_idx": -6}),
        (TypeError, "padding_idx must be an integer or None, got '1'", {"padding_idx": "1"}),
        (TypeError, "padding_idx must be an integer or None, got 1.5", {"padding_idx": 1.5}),
        (TypeError, "padding_idx must be an integer or None, got True", {"padding_idx": True}),
        (
            TypeError,
            "scale_grad_by_freq must be True or False, got None",
            {"scale_grad_by_freq": None},
        ),
        (TypeError, "table must be a string, got 1", {"table": 1}),
        (TypeError, "max_norm must be a number, got '1'", {"max_norm": "1"}),
        (TypeError, "max_norm must be a number, got tensor(", {"max_norm": torch.ones(2)}),
        (TypeError, "norm_type must be a number, got None", {"max_norm": 1.0, "norm_type": None}),
        (
            TypeError,
            "output_dtype must be float16, bfloat16, float32 or float64, got torch.int32",
            {"output_dtype": torch.int32},
        ),
        (ValueError, "max_norm must not be negative, got -1.0", {"max_norm": -1.0}),
        (ValueError, "max_norm must not be negative, got nan", {"max_norm": float("nan")}),
        (
            ValueError,
            "norm_type must be positive, got 0.0",
            {"max_norm": 1.0, "norm_type": 0.0},
        ),
        (
            ValueError,
            "weight must have memory for each element of a row, which max_norm writes, "
            "got strides (1, 0)",
            {"max_norm": 1.0, "weight": torch.ones(5, 1).expand(5, 2)},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_common_arguments(kind: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    for function, more in ((F.embedding, {}), (F.embedding_bag, {"offsets": OFFSETS})):
        given = {"input": IDS, "weight": table(), **more, **arguments}
        fails(kind, text, function, **given)


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        (ValueError, "offsets must be a tensor for a 1-D input, got None", {}),
        (
            ValueError,
            "offsets must be None for a 2-D input, got 1-D int64",
            {"input": IDS.reshape(1, 3), "offsets": OFFSETS},
        ),
        (ValueError, "input must be 1-D or 2-D, got 0-D int64", {"input": IDS[0]}),
        (ValueError, "input must be 1-D or 2-D, got 3-D int64", {"input": IDS.reshape(1, 1, 3)}),
        (
            TypeError,
            "offsets must be 1-D int32 or int64, got 1-D float32",
            {"offsets": OFFSETS.float()},
        ),
        (
            ValueError,
            "offsets must be 1-D int32 or int64, got 2-D int64",
            {"offsets": OFFSETS.reshape(1, 2)},
        ),
        (
            ValueError,
            "offsets must be on input's device cpu, got meta",
            {"offsets": OFFSETS.to("meta")},
        ),
        (
            ValueError,
            "offsets must hold at least one element with include_last_offset, got 0",
            {"offsets": OFFSETS[:0], "include_last_offset": True},
        ),
        (
            TypeError,
            "include_last_offset must be True or False, got None",
            {"offsets": OFFSETS, "include_last_offset": None},
        ),
        (
            ValueError,
            "mode must be 'sum', 'mean' or 'max', got 'median'",
            {"offsets": OFFSETS, "mode": "median"},
        ),
        (
            ValueError,
            "scale_grad_by_freq must be False in mode 'max', got True",
            {"offsets": OFFSETS, "mode": "max", "scale_grad_by_freq": True},
        ),
        (
            ValueError,
            "per_sample_weights must be None in mode 'max', got a tensor",
            {"offsets": OFFSETS, "mode": "max", "per_sample_weights": torch.ones(3)},
        ),
        (
            TypeError,
            "per_sample_weights must be a tensor, got list",
            {"offsets": OFFSETS, "per_sample_weights": [1.0, 1.0, 1.0]},
        ),
        (
            TypeError,
            "per_sample_weights must be float16, bfloat16, float32 or float64, got 1-D int64",
            {"offsets": OFFSETS, "per_sample_weights": IDS},
        ),
        (
            ValueError,
            "per_sample_weights must have input's shape (3,), got (2,)",
            {"offsets": OFFSETS, "per_sample_weights": torch.ones(2)},
        ),
        (
            ValueError,
            "per_sample_weights must be on input's device cpu, got meta",
            {"offsets": OFFSETS, "per_sample_weights": torch.ones(3, device="meta")},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bag_arguments(kind: type[Exception], text: str, arguments: dict[str, Any]) -> None:
    given = {"input": IDS, "weight": table(), **arguments}
    fails(kind, f"embedding_bag: {text}", F.embedding_bag, **given)


def test_more_ids_than_positions_can_be_counted() -> None:
    ids = torch.zeros(1, dtype=torch.int64).expand(2**31)  # takes no memory
    text = "input must hold at most 2147483647 ids, got 2147483648"
    with pytest.raises(ValueError, match=text):
        F.embedding(ids, table())
    with pytest.raises(ValueError, match=text):
        F.embedding_bag(ids, table(), OFFSETS)


# ---- modules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_constructors(kind: type) -> None:
    name = kind.__name__
    with pytest.raises(ValueError, match=rf"{name}: padding_idx must be within \[-5, 5\), got 7"):
        kind(5, 2, padding_idx=7)
    with pytest.raises(TypeError, match=f"{name}: padding_idx must be an integer .* got 1.5"):
        kind(5, 2, padding_idx=1.5)
    with pytest.raises(TypeError, match=f"{name}: scale_grad_by_freq must be .* got None"):
        kind(5, 2, scale_grad_by_freq=None)
    with pytest.raises(TypeError, match=f"{name}: table must be a string, got 7"):
        kind(5, 2, table=7)
    with pytest.raises(TypeError, match=f"{name}: dtype must be .* got torch.int64"):
        kind(5, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=f"{name}: output_dtype must be .* got torch.int8"):
        kind(5, 2, output_dtype=torch.int8)
    with pytest.raises(ValueError, match=f"{name}: embeddings must be 2-D, got 1-D float32"):
        kind.from_pretrained(torch.ones(3))
    with pytest.raises(TypeError, match=f"{name}: embeddings must be a tensor, got list"):
        kind.from_pretrained([[1.0]])
    with pytest.raises(TypeError, match="positional argument"):
        kind(*range(1, 14))


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
@pytest.mark.parametrize("padding_idx", [None, 1])
def test_sizes(kind: type, padding_idx: int | None) -> None:
    for error, text, sizes in (
        (TypeError, "num_embeddings must be an integer, got None", (None, 2)),
        (TypeError, "num_embeddings must be an integer, got 5.0", (5.0, 2)),
        (TypeError, "embedding_dim must be an integer, got '2'", (5, "2")),
        (ValueError, "num_embeddings must not be negative, got -5", (-5, 2)),
        (ValueError, "embedding_dim must not be negative, got -2", (5, -2)),
    ):
        fails(error, f"{kind.__name__}: {text}", kind, *sizes, padding_idx=padding_idx)
    module = kind(torch.tensor(5), torch.tensor(2), padding_idx=padding_idx)
    assert module.weight.shape == (5, 2)


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_sparse_is_a_bool_or_fused(kind: type) -> None:
    message = f"{kind.__name__}: sparse must be True, False or 'fused', got 'yes'"
    with pytest.raises(TypeError, match=message):
        kind(5, 2, sparse="yes")
    kind(5, 2, sparse=1)(torch.tensor([[1]])).sum().backward()


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_a_table_of_no_rows_has_no_padding(kind: type) -> None:
    with pytest.raises(ValueError, match="padding_idx must be None for a table of no rows, got 0"):
        kind(0, 2, padding_idx=0)


def test_bag_constructor() -> None:
    with pytest.raises(ValueError, match=r"EmbeddingBag: mode must be .* got 'prod'"):
        fnn.EmbeddingBag(5, 2, mode="prod")
    for kind in (torch.nn.EmbeddingBag, fnn.EmbeddingBag):
        bag = kind(5, 2, mode="max", scale_grad_by_freq=True)  # torch sees it when used
        with pytest.raises(ValueError, match=r"scal.*freq"):
            bag(torch.tensor([[0]]))


def test_modules_name_their_table() -> None:
    bag = fnn.EmbeddingBag(5, 2, table="clicks")
    with pytest.raises(IndexError, match="out of range for table 'clicks' with 5 rows"):
        bag(torch.tensor([[9]]))


# ---- autograd notices what it must ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_max_norm_counts_as_a_change_of_the_table(kind: type) -> None:
    """What another operation saved is stale, and autograd says so."""
    module = kind(3, 2, max_norm=0.1)
    other = torch.ones(1, 2, requires_grad=True)
    product = module.weight @ other.t()
    looked_up = module(torch.tensor([[0, 1]]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (product.sum() + looked_up.sum()).backward()


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_max_norm_that_has_written_nothing_is_no_change(kind: type) -> None:
    """A loop that leaves out a bad batch can go on to the backward of the one before."""
    module = kind(3, 2, max_norm=0.1)
    product = (module.weight @ torch.ones(2, 1, requires_grad=True)).sum()
    with pytest.raises(IndexError, match="out of range"):
        module(torch.tensor([[0, 3]]))
    product.backward()
    assert module.weight.grad.eq(1).all()


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_max_norm_writes_where_saved_tensors_may_change(kind: type) -> None:
    """autograd clones what it has saved before it is written, at the version of then."""
    module = kind(2, 2, max_norm=1.0, _weight=torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
    other = torch.tensor([[1.0], [2.0]], requires_grad=True)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        product = module.weight @ other
        looked_up = module(torch.tensor([[0, 1]]))
        (product.sum() + looked_up.sum()).backward()
    assert other.grad.flatten().tolist() == [9.0, 12.0]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_buffers_refilled_before_the_backward(mode: str) -> None:
    for position, value in ((0, 3), (1, 0)):
        inputs = [torch.tensor([0, 1, 2]), torch.tensor([0, 2])]
        output = fnn.EmbeddingBag(4, 2, mode=mode)(*inputs)
        inputs[position].fill_(value)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()
    ids = torch.tensor([0, 1])
    output = fnn.Embedding(4, 2)(ids)
    ids.fill_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("sparse", [False, True, "fused"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_buffers_refilled_behind_the_back_of_autograd(mode: str, sparse: Any) -> None:
    """By NumPy, DLPack or ``.data``. The backward reads what is there, and no other memory."""
    for bad, text in ((2**40, "is greater than the number of indices, 3"), (-1, "is less than")):
        offsets = torch.tensor([0, 2])
        bag = fnn.EmbeddingBag(4, 2, mode=mode, sparse=sparse)
        output = bag(torch.tensor([0, 1, 2]), offsets)
        offsets.data[1] = bad
        with pytest.raises(ValueError, match=rf"offsets\[1\] = {bad} {text}"):
            output.sum().backward()
        assert bag.weight.grad is None
    for bad in (2**40, -1):
        ids = torch.tensor([0, 1, 2])
        bag = fnn.EmbeddingBag(4, 2, mode=mode, sparse=bool(sparse))
        output = bag(ids, torch.tensor([0, 2]))
        ids.data[1] = bad
        try:
            output.sum().backward()
        except IndexError:
            continue
        assert bag.weight.grad.to_dense()[1].tolist() == [0, 0]


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
@pytest.mark.parametrize("position", [0, 2])
def test_ids_refilled_before_the_gradient_of_their_weights(position: int, bad: int) -> None:
    ids, samples = torch.tensor([0, 1, 2]), torch.ones(3, requires_grad=True)
    bag = fnn.EmbeddingBag(4, 2, mode="sum")
    output = bag(ids, torch.tensor([0, 2]), samples)
    ids.data[position] = bad
    with pytest.raises(IndexError, match=f"index {bad} at position {position} is out of range"):
        output.sum().backward()


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("what", ["weight", "indices", "offsets", "per_sample_weights"])
def test_memory_that_was_freed(what: str) -> None:
    """As FSDP frees that of parameters, and schedulers of pipelines that of activations."""
    tensors = {
        "weight": torch.ones(4, 2),
        "indices": torch.tensor([0, 1, 2]),
        "offsets": torch.tensor([0, 2]),
        "per_sample_weights": torch.ones(3),
    }
    tensors[what] = freed(tensors[what])
    with pytest.raises(RuntimeError, match=r"storage|not allocated"):
        F.embedding_bag(
            tensors["indices"],
            tensors["weight"],
            tensors["offsets"],
            mode="sum",
            per_sample_weights=tensors["per_sample_weights"],
        )


@pytest.mark.parametrize("what", ["weight", "exp_avg"])
def test_a_step_in_memory_that_was_freed(what: str) -> None:
    module = fnn.Embedding(4, 2, sparse=True)
    optimizer = optim.SparseAdam(module.parameters())
    module(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    freed(module.weight if what == "weight" else optimizer.state[module.weight][what])
    with pytest.raises(RuntimeError, match="storage"):
        optimizer.step()


def test_operators_in_memory_that_was_freed(cpu: Any) -> None:
    """The native ones, which would follow the pointer: every tensor of those below in turn."""
    lookups = (torch.tensor([[0, 1], [1, 3]]), None)
    groups = cpu.group_indices(*lookups, 4, -1, False)
    options = ("sum", -1, False)
    rows = torch.tensor([0, 2])
    calls: dict[str, tuple[Any, ...]] = {
        "embedding_bag_backward": (
            torch.ones(2, 3), *lookups, None, None, *groups, 4, 4, *options, False, True,
            torch.float32,
        ),
        "bag_terms": (*lookups, None, groups[0], 4, *options, torch.float32),
        "scale_update_": (
            torch.ones(1), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1),
            torch.ones(1, 6, dtype=torch.float64),
        ),
        "boundary_gradient": (torch.ones(3), torch.ones(()), None, torch.zeros(2), None),
        "row_copy_": ([torch.ones(4, 3)], rows, [torch.ones(4, 3)], rows),
        "checksum": ([torch.ones(4, 3), torch.ones(4, 2)], rows, rows, rows, 0),
    }  # fmt: skip
    for name, arguments in calls.items():
        call = getattr(cpu, name)
        call(*arguments)
        for position, argument in enumerate(arguments):
            given = list(arguments)
            if isinstance(argument, Tensor):
                given[position] = freed(argument.clone())
            elif isinstance(argument, list):
                given[position] = [*argument[1:], freed(argument[0].clone())]
            else:
                continue
            with pytest.raises(RuntimeError, match=f"{name}: .* its storage has 0"):
                call(*given)


@pytest.mark.usefixtures("cpu")
def test_too_little_memory() -> None:
    """Who then goes on with a smaller batch looks for the words of torch's allocator."""
    words = "DefaultCPUAllocator: can't allocate memory"
    ids = torch.zeros(1 << 24, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=words if TORCH >= (2, 13) else "failed"):
        F.embedding(ids, torch.zeros(1, 1 << 22))
    weight = torch.zeros(1, 64).expand(1 << 40, 64).requires_grad_()
    output = F.embedding_bag(torch.tensor([[0]]), weight).sum()
    with pytest.raises(RuntimeError, match=words):
        output.backward()


def test_weights_changed_before_the_backward() -> None:
    bag, samples = fnn.EmbeddingBag(4, 2, mode="sum"), torch.ones(1, 3)
    output = bag(torch.tensor([[0, 1, 2]]), per_sample_weights=samples)
    samples.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    # The table itself is read by the gradient of the samples only.
    for learns, expectation in ((False, None), (True, RuntimeError)):
        samples = torch.ones(1, 3, requires_grad=learns)
        output = bag(torch.tensor([[0, 1, 2]]), per_sample_weights=samples)
        with torch.no_grad():
            bag.weight.zero_()
        if expectation is None:
            output.sum().backward()
        else:
            with pytest.raises(expectation, match="modified by an inplace operation"):
                output.sum().backward()
