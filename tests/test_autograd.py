"""Derivatives of the operators: registration, finite differences, sparse against dense."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fastemb import functional as F
from fastemb import nn as fnn
from fastemb._ops import SCHEMAS

ops = torch.ops.fastemb
MODES = ["sum", "mean", "max"]
# A bag with a duplicate, an empty one, one that ends with padding (row 3).
IDS = torch.tensor([2, 0, 2, 1, 3])
OFFSETS = torch.tensor([0, 3, 3])
bags = pytest.mark.parametrize(
    "inputs",
    [
        pytest.param((IDS, OFFSETS), id="offsets"),
        pytest.param((IDS[:4].reshape(2, 2), None), id="2d"),
    ],
)


def table(dtype: torch.dtype = torch.float64, rows: int = 4, dim: int = 3) -> Tensor:
    """No two entries are equal, so that a maximum has one winner."""
    order = torch.randperm(rows * dim, generator=torch.Generator().manual_seed(2))
    values = (order.double() / 7 - 1).reshape(rows, dim).to(dtype)
    return values.requires_grad_()


def samples(like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(0.5, -1.5, like.numel(), dtype=dtype).reshape(like.shape).requires_grad_()


# ---- torch's own checks --------------------------------------------------------------------------


def _calls() -> dict[str, list[tuple[Any, ...]]]:
    """Arguments for every operator; every output element of these calls is defined."""
    distinct, offsets = torch.tensor([3, 0, 2]), torch.tensor([0, 1])
    groups = ops.group_indices(distinct, offsets, 4, -1, False)
    grad = torch.randn(2, 3)
    calls: dict[str, list[tuple[Any, ...]]] = {name: [] for name in SCHEMAS}
    for dtype in (torch.float32, torch.float16):
        for ids in (IDS, IDS[:4].reshape(2, 2), IDS[0]):
            calls["embedding"].append((table(dtype), ids, 3, False, False, torch.float32, "t"))
        for mode in MODES:
            weights = None if mode == "max" else samples(IDS, torch.float32)
            row = None if weights is None else weights.detach().reshape(1, 5)
            plain = (3, False, False, False, dtype, "t")
            other = (-1, True, mode != "max", False, torch.float32, "")
            closed = torch.tensor([0, 3, 5])
            calls["embedding_bag"] += [
                (table(dtype), IDS, OFFSETS, weights, mode, *plain),
                (table(dtype), IDS.reshape(1, 5), None, row, mode, *plain),
                (table(dtype), IDS.int(), closed, None, mode, *other),
            ]
        calls["embedding_renorm_"].append((table(dtype).detach() * 9, IDS, 1.0, 2.0, "t"))
    calls["group_indices"].append((distinct, offsets, 4, -1, False))
    for mode in MODES:
        argmax = torch.tensor([[0, 0, 0], [1, 0, 1]], dtype=torch.int32) if mode == "max" else None
        for dense, out_rows in ((True, 4), (False, 3)):
            options = (4, out_rows, mode, -1, False, False, dense, torch.float32)
            calls["embedding_bag_backward"].append(
                (grad, distinct, offsets, None, argmax, *groups, *options)
            )
        if mode != "max":
            for weights in (None, torch.rand(3)):
                calls["bag_terms"].append(
                    (distinct, offsets, weights, groups[0], 4, mode, -1, False, torch.float32)
                )
            calls["embedding_bag_per_sample_weights_backward"].append(
                (grad, table(torch.float32).detach(), distinct, offsets, mode, -1, False)
            )
    return calls


@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(name: str) -> None:
    calls = _calls()[name]
    assert calls
    for arguments in calls:
        torch.library.opcheck(getattr(ops, name).default, arguments)


# ---- finite differences --------------------------------------------------------------------------


@bags
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_the_table(mode: str, padding_idx: int | None, inputs: Any) -> None:
    ids, offsets = inputs

    def lookup(weight: Tensor) -> Tensor:
        return F.embedding_bag(ids, weight, offsets, mode=mode, padding_idx=padding_idx)

    assert torch.autograd.gradcheck(lookup, (table(),))
    assert torch.autograd.gradgradcheck(lookup, (table(),))


@bags
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_with_samples(mode: str, inputs: Any) -> None:
    ids, offsets = inputs

    def lookup(weight: Tensor, per_sample_weights: Tensor) -> Tensor:
        return F.embedding_bag(
            ids,
            weight,
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            padding_idx=3,
        )

    assert torch.autograd.gradcheck(lookup, (table(), samples(ids)))
    assert torch.autograd.gradgradcheck(lookup, (table(), samples(ids)))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_with_the_last_offset(mode: str) -> None:
    def lookup(weight: Tensor) -> Tensor:
        return F.embedding_bag(
            IDS, weight, torch.tensor([0, 1, 4]), mode=mode, include_last_offset=True
        )

    assert torch.autograd.gradcheck(lookup, (table(),))
    assert torch.autograd.gradgradcheck(lookup, (table(),))


@pytest.mark.parametrize("shape", [(), (5,), (5, 1)])
def test_gradients_of_embedding(shape: tuple[int, ...]) -> None:
    ids = IDS.reshape(shape) if shape else IDS[0]

    def lookup(weight: Tensor) -> Tensor:
        return F.embedding(ids, weight)

    assert torch.autograd.gradcheck(lookup, (table(),))
    assert torch.autograd.gradgradcheck(lookup, (table(),))


def test_embedding_gives_padding_no_gradient() -> None:
    weight = table()
    output = F.embedding(IDS, weight, padding_idx=3)
    assert torch.equal(output[4], weight[3])  # looked up like any row
    output.sum().backward()
    assert weight.grad[:, 0].tolist() == [1, 1, 2, 0]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_second_derivative_with_frequencies(mode: str) -> None:
    """Scaled by frequency, the gradient is no derivative, but it is linear in what comes in."""
    grad = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    groups = ops.group_indices(IDS, OFFSETS, 4, -1, False)

    def backward(grad_output: Tensor, weights: Tensor) -> Tensor:
        return ops.embedding_bag_backward(
            grad_output, IDS, OFFSETS, weights, None, *groups, 4, 4, mode, -1, False, True, True,
            torch.float64,
        )  # fmt: skip

    assert torch.autograd.gradcheck(backward, (grad, samples(IDS)))


# ---- sparse and dense ----------------------------------------------------------------------------


@bags
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_have_the_bits_of_dense_ones(
    mode: str, dtype: torch.dtype, inputs: Any
) -> None:
    grads = []
    for sparse in (False, True):
        bag = fnn.EmbeddingBag.from_pretrained(
            table(dtype).detach(), freeze=False, mode=mode, sparse=sparse, padding_idx=3
        )
        ids, offsets = inputs
        bag(ids, offsets).double().square().sum().backward()
        grads.append(bag.weight.grad)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert [grad.dtype for grad in grads] == [wide, wide]
    assert torch.equal(grads[1].to_dense(), grads[0])
    assert grads[1]._indices()[0].tolist() == [0, 1, 2]
    assert torch.equal(grads[0][3], torch.zeros(3, dtype=wide))


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_accumulate(dtype: torch.dtype, sparse: bool, kind: type) -> None:
    module = kind(6, 2, sparse=sparse, dtype=dtype)
    for ids in ([[0, 1, 1]], [[1, 4, 4]]):
        module(torch.tensor(ids)).float().sum().backward()
    grad = module.weight.grad
    assert grad.dtype == torch.float32
    grad = grad.coalesce().to_dense() if sparse else grad
    scale = 3 if kind is fnn.EmbeddingBag else 1  # a mean of three
    torch.testing.assert_close(grad[:, 0] * scale, torch.tensor([1.0, 3, 0, 0, 2, 0]))


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_gradients_accumulate_onto_one_of_no_rows(kind: type) -> None:
    """Of a batch that is all padding, or empty: torch puts the next one into its memory."""
    for nothing in ([[0, 0]], [[]]):
        module = kind(4, 3, padding_idx=0, sparse=True)
        for ids in (nothing, [[1, 2]], nothing, [[2, 3]]):
            module(torch.tensor(ids, dtype=torch.int64)).sum().backward()
        share = 1 if kind is fnn.Embedding else 0.5  # of a mean
        assert module.weight.grad.to_dense()[:, 0].tolist() == [0, share, 2 * share, share]


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_that_no_bag_names(sparse: bool) -> None:
    bag = fnn.EmbeddingBag(4, 2, mode="sum", sparse=sparse, padding_idx=1)
    bag(torch.tensor([[1, 1], [1, 1]])).sum().backward()
    grad = bag.weight.grad
    assert grad._nnz() == 0 if sparse else not bool(grad.any())


def test_the_table_is_not_kept_for_the_backward() -> None:
    """An optimizer may step between forward and backward; torch's own bag allows it, too."""
    bag = fnn.EmbeddingBag(4, 2, mode="sum")
    output = bag(torch.tensor([[0, 1]]))
    with torch.no_grad():
        bag.weight.zero_()
    output.sum().backward()
    assert bag.weight.grad.sum().item() == 4


def test_frozen_table_with_learned_samples() -> None:
    bag = fnn.EmbeddingBag.from_pretrained(torch.tensor([[1.0, 2.0], [3.0, 5.0]]), mode="sum")
    weights = torch.ones(1, 2, requires_grad=True)
    bag(torch.tensor([[0, 1]]), per_sample_weights=weights).sum().backward()
    assert weights.grad.tolist() == [[3, 8]]
    assert bag.weight.grad is None


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_samples_have_their_dtype(dtype: torch.dtype, mode: str) -> None:
    weights = torch.ones(1, 2, dtype=dtype, requires_grad=True)
    bag = fnn.EmbeddingBag.from_pretrained(torch.tensor([[1.0, 2.0], [3.0, 5.0]]), mode=mode)
    bag(torch.tensor([[0, 1]]), per_sample_weights=weights).sum().backward()
    assert weights.grad.dtype == dtype
    assert (weights.grad * (2 if mode == "mean" else 1)).tolist() == [[3, 8]]


# ---- what autograd stores -----------------------------------------------------------------------


def test_sparse_gradients_are_stored_coalesced() -> None:
    weight = torch.nn.Parameter(table().detach())
    at: list[int] = []
    weight.register_hook(lambda grad: at.append(grad._values().data_ptr()))
    F.embedding(IDS, weight, sparse=True).sum().backward()
    assert weight.grad.is_coalesced()
    assert weight.grad._values().data_ptr() == at[0]  # ours, not a copy
    # A sum is flagged by torch itself, or not at all; what the flag says is true.
    F.embedding(IDS[:2], weight, sparse=True).sum().backward()
    rows = weight.grad._indices()[0].tolist()
    assert not weight.grad.is_coalesced() or rows == sorted(set(rows))
    assert weight.grad.to_dense()[:, 0].tolist() == [2, 1, 3, 1]


@pytest.mark.parametrize("hook", ["of autograd", "of the weight"])
def test_stored_gradients_keep_their_flag(hook: str) -> None:
    """Who gets the gradient while it is stored, as `DistributedDataParallel`, may read the flag."""
    weight = torch.nn.Parameter(table().detach())
    edge = torch.autograd.graph.get_gradient_edge(weight)  # lives as long as somebody holds it
    seen: list[bool] = []

    def look(*_: object) -> None:
        seen.append(weight.grad.is_coalesced())

    if hook == "of the weight":
        weight.register_post_accumulate_grad_hook(look)
    else:
        edge.node.register_hook(look)
    F.embedding(IDS, weight, sparse=True).sum().backward()
    assert seen == [weight.grad.is_coalesced()] == [hook == "of autograd"]


def test_lookups_leave_no_hooks_behind() -> None:
    weight = torch.nn.Parameter(table().detach())
    torch.autograd.grad(F.embedding(IDS, weight, sparse=True).sum(), weight)
    assert not weight._post_accumulate_grad_hooks
    F.embedding(IDS, weight, sparse=True).sum().backward()
    assert not weight._post_accumulate_grad_hooks
    assert weight.grad.is_coalesced()


@pytest.mark.parametrize("change", ["rows", "values", "both"])
def test_another_gradient_is_not_marked_coalesced(change: str) -> None:
    """A hook may put something else in place of the gradient, even in memory that ours had."""
    weight = torch.nn.Parameter(table().detach())

    def other(grad: Tensor) -> Tensor:
        rows, values = grad._indices(), grad._values()
        rows = rows.flip(1) if change != "values" else rows
        values = values * 2 if change != "rows" else values
        return torch.sparse_coo_tensor(rows, values, grad.shape, check_invariants=False)

    weight.register_hook(other)
    F.embedding(IDS, weight, sparse=True).sum().backward()
    assert not weight.grad.is_coalesced()
    assert weight.grad._nnz() == 4


@pytest.mark.parametrize("where", ["this weight", "elsewhere"])
def test_a_backward_that_raises_leaves_no_hook(where: str) -> None:
    def refuse(grad: Tensor) -> Tensor:
        raise ValueError("no")

    module = fnn.Embedding(4, 2, sparse=True)
    scale = torch.nn.Parameter(torch.ones(2))
    loss = (module(IDS[:2]) * (scale * 2).exp()).sum()
    handle = (module.weight if where == "this weight" else scale).register_hook(refuse)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            loss.backward(retain_graph=True)
        assert not module.weight._post_accumulate_grad_hooks
    handle.remove()
    module.weight.grad = None
    loss.backward()
    assert module.weight.grad.is_coalesced()
    module.sparse = "fused"  # which refuses hooks
    module(IDS[:2])


def test_freed_gradients_do_not_lend_their_address() -> None:
    from fastemb._ops import _keep_coalesced

    weight = torch.nn.Parameter(torch.zeros(4, 2))
    rows, values = torch.arange(3).reshape(1, 3), torch.ones(3, 2)
    buffers = [bytearray(x.nbytes) for x in (rows, values)]

    def gradient() -> Tensor:  # always at the same address
        parts = [
            torch.frombuffer(buffer, dtype=x.dtype).reshape(x.shape)
            for buffer, x in zip(buffers, (rows, values), strict=True)
        ]
        for part, x in zip(parts, (rows, values), strict=True):
            part.copy_(x)
        return torch.sparse_coo_tensor(*parts, weight.shape, check_invariants=False)

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            _keep_coalesced(weakref.ref(weight), gradient())  # freed at once
            return gradient()

    Backward.apply(weight).backward()
    assert weight.grad._values().data_ptr() == gradient()._values().data_ptr()
    assert not weight.grad.is_coalesced()


@pytest.mark.parametrize("sparse", [True, "fused"])
def test_sparse_gradients_of_fake_tensors(sparse: Any) -> None:
    with FakeTensorMode():
        for kind in (fnn.Embedding, fnn.EmbeddingBag):
            module = kind(50, 2, sparse=sparse)
            module(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
            grad = module.weight.grad
            assert (type(grad), grad.layout, grad.shape) == (FakeTensor, torch.sparse_coo, (50, 2))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_recorded_backward_does_not_guess_the_number_of_rows(mode: str) -> None:
    """torch records nothing that depends on data, and a bound would be wrong in the graph."""

    def gradient(weight: Tensor, ids: Tensor) -> Tensor:
        loss = F.embedding(ids, weight, sparse=True).sum()
        return torch.autograd.grad(loss, weight)[0]._values()

    with pytest.raises((RuntimeError, GuardOnDataDependentSymNode)):
        make_fx(gradient, tracing_mode=mode)(table(), IDS)


def test_sparse_gradients_on_meta() -> None:
    """The number of rows is unknown there: it is what it is at most."""
    for kind in (fnn.Embedding, fnn.EmbeddingBag):
        module = kind(50, 2, sparse=True, device="meta")
        module(torch.empty(2, 3, dtype=torch.int64, device="meta")).sum().backward()
        grad = module.weight.grad
        assert (grad.is_meta, grad.layout, grad.shape) == (True, torch.sparse_coo, (50, 2))
        assert grad._values().shape == (6, 2)
