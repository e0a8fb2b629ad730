"""Lookups under `torch.func` and forward-mode AD, against what reverse mode makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from fastemb import functional as F

IDS = torch.tensor([2, 0, 2, 1, 3])
OFFSETS = torch.tensor([0, 3, 3])  # the second bag is empty
PAIRS = IDS[:4].reshape(2, 2)
# No two entries are equal, so that a maximum has one winner.
TABLE = torch.tensor([[0.5, -2, 1], [1.5, 3, -1], [-0.5, 2, 2.5], [4, -3, 0.25]]).double()

lookups = pytest.mark.parametrize(
    ("lookup", "x"),
    [
        pytest.param(lambda x: F.embedding(PAIRS, x, 1), TABLE, id="embedding"),
        *[
            pytest.param(
                lambda x, mode=mode: F.embedding_bag(
                    IDS, x, OFFSETS, mode=mode, padding_idx=3, include_last_offset=mode == "sum"
                ),
                TABLE,
                id=f"{mode}-offsets",
            )
            for mode in ("sum", "mean", "max")
        ],
        *[
            pytest.param(
                lambda x, mode=mode: F.embedding_bag(PAIRS, x, mode=mode, padding_idx=2),
                TABLE,
                id=f"{mode}-2d",
            )
            for mode in ("sum", "mean", "max")
        ],
        pytest.param(
            lambda x: F.embedding_bag(IDS, TABLE, OFFSETS, mode="mean", per_sample_weights=x),
            torch.linspace(-1, 2, 5).double(),
            id="per_sample_weights",
        ),
    ],
)


@lookups
def test_derivatives(lookup: Callable[[Tensor], Tensor], x: Tensor) -> None:
    expected = torch.autograd.functional.jacobian(lookup, x)
    assert_close(jacrev(lookup)(x), expected)
    assert_close(jacfwd(lookup)(x), expected)
    output, tangent = jvp(lookup, (x,), (x,))
    assert_close(output, lookup(x))
    with torch.autograd.forward_ad.dual_level():
        dual = lookup(torch.autograd.forward_ad.make_dual(x, x))
        assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)
    output, backward = vjp(lookup, x)
    assert_close(backward(output)[0], grad(lambda x: lookup(x).square().sum() / 2)(x))


@lookups
def test_tangents_of_the_backward(lookup: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """A backward is linear in what comes down; forward mode may differentiate it by that."""
    x = x.clone().requires_grad_()
    output = lookup(x)
    down = torch.linspace(-1, 3, output.numel(), dtype=x.dtype).view_as(output)
    (expected,) = torch.autograd.grad(output, x, down, retain_graph=True)
    assert bool(expected.any())

    def backward(down: Tensor, create_graph: bool = False) -> Tensor:
        return torch.autograd.grad(output, x, down, True, create_graph)[0]

    with torch.autograd.forward_ad.dual_level():
        dual = backward(torch.autograd.forward_ad.make_dual(torch.ones_like(down), down))
        assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, expected)
    assert_close(jvp(backward, (torch.ones_like(down),), (down,))[1], expected)
    _, forward = jvp(lookup, (x.detach(),), (expected,))
    got = grad(lambda down: (backward(down, create_graph=True) * expected).sum())(down)
    assert_close(got, forward)


@lookups
def test_second_derivatives(lookup: Callable[[Tensor], Tensor], x: Tensor) -> None:
    def cubes(x: Tensor) -> Tensor:
        return lookup(x).pow(3).sum()

    expected = torch.autograd.functional.hessian(cubes, x)
    assert bool(expected.any())
    assert_close(hessian(cubes)(x), expected)
    assert_close(jacrev(grad(cubes))(x), expected)


@pytest.mark.parametrize("offsets", [None, OFFSETS])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", None])
def test_gradients_of_each_example(mode: str | None, offsets: Tensor | None) -> None:
    def loss(weight: Tensor, ids: Tensor) -> Tensor:
        if mode is None:
            return F.embedding(ids, weight, 2).square().sum()
        bags = F.embedding_bag(ids, weight, offsets, mode=mode, padding_idx=2)
        return bags.square().sum()

    ids = torch.stack([IDS, IDS.flip(0)])
    ids = ids if offsets is not None else ids[:, :4].reshape(2, 2, 2)
    tables = torch.stack([TABLE, TABLE * 2])
    for dims, given in (((None, 0), TABLE), ((0, 0), tables)):
        got = torch.vmap(grad(loss), dims)(given, ids)
        each = [given, given] if dims[0] is None else list(given)
        assert_close(got, torch.stack([grad(loss)(w, i) for w, i in zip(each, ids, strict=True)]))
    total = grad(lambda weight: torch.vmap(loss, (None, 0))(weight, ids).sum())(TABLE)
    assert_close(total, torch.vmap(grad(loss), (None, 0))(TABLE, ids).sum(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_are_kept_in_fp32(dtype: torch.dtype) -> None:
    ids = torch.zeros(4096, 1, dtype=torch.int64)
    for lookup in (F.embedding, F.embedding_bag):
        got = grad(lambda weight: lookup(ids, weight).sum())(torch.ones(2, 3, dtype=dtype))  # noqa: B023
        assert got.dtype == dtype
        assert got.tolist() == [[4096] * 3, [0] * 3]


def test_frequency_divides_each_row_by_its_own_count() -> None:
    def total(weight: Tensor) -> Tensor:
        return F.embedding(IDS, weight, scale_grad_by_freq=True).sum()

    assert grad(total)(TABLE)[:, 0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "text", "arguments"),
    [
        (IndexError, "index 9 at position 1 is out of range for table 'user'", ([0, 9], [0])),
        (IndexError, "index -1 at position 0 is out of range for table 'user'", ([-1, 2], [0])),
        (
            ValueError,
            r"offsets\[1\] = 3 is greater than the number of indices, 2",
            ([0, 1], [0, 3]),
        ),
        (ValueError, r"offsets\[2\] = 1 is less than offsets\[1\] = 2", ([0, 1], [0, 2, 1])),
    ],
)
def test_errors_are_the_usual_ones(kind: type[Exception], text: str, arguments: Any) -> None:
    ids, offsets = (torch.tensor(x) for x in arguments)
    for mode in ("sum", "max"):
        with pytest.raises(kind, match=text):
            grad(
                lambda w: F.embedding_bag(ids, w, offsets, mode=mode, table="user").sum()  # noqa: B023
            )(TABLE)
    if kind is IndexError:
        with pytest.raises(kind, match=text):
            grad(lambda w: F.embedding(ids, w, table="user").sum())(TABLE)
        with pytest.raises(kind):  # torch's own: the values are hidden
            torch.vmap(grad(lambda w, i: F.embedding(i, w).sum()), (None, 0))(TABLE, ids[None])


def test_offsets_of_each_example_are_refused() -> None:
    def loss(weight: Tensor, offsets: Tensor) -> Tensor:
        return F.embedding_bag(IDS, weight, offsets).sum()

    def scaled(weight: Tensor, offsets: Tensor) -> Tensor:
        return F.embedding_bag(IDS, weight, offsets, max_norm=1.0)

    for lookup in (grad(loss), scaled):
        with pytest.raises(NotImplementedError, match="offsets must not differ"):
            torch.vmap(lookup, (None, 0))(TABLE.clone(), OFFSETS[None])


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (1, 0), (2, 1), (None, 0)])
@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 1])])
def test_max_norm_of_each_example(
    dims: tuple[int | None, int | None], offsets: Tensor | None
) -> None:
    def lookup(weight: Tensor, ids: Tensor) -> Tensor:
        if offsets is None:
            return F.embedding(ids, weight, max_norm=1.0)
        return F.embedding_bag(ids, weight, offsets, max_norm=1.0, include_last_offset=True)

    tables = torch.stack([TABLE, TABLE * 2])
    ids = torch.stack([PAIRS[0], PAIRS[1]])
    weight, of_each = TABLE.clone(), ids[0]
    if dims[0] is not None:
        weight = tables.movedim(0, dims[0]).contiguous()
    if dims[1] is not None:
        of_each = ids.movedim(0, dims[1])
    alone = weight.clone()
    expected = [
        lookup(
            alone if dims[0] is None else alone.select(dims[0], example),
            of_each if dims[1] is None else of_each.select(dims[1], example),
        )
        for example in range(2)
    ]
    assert torch.equal(torch.vmap(lookup, dims)(weight, of_each), torch.stack(expected))
    assert torch.equal(weight, alone)


@pytest.mark.parametrize("bad", [-1, 4])
def test_max_norm_of_wrong_ids_writes_nothing(bad: int) -> None:
    tables = torch.stack([TABLE, TABLE * 2])
    before = tables.clone()
    for ids in ([[0, bad], [1, 2]], [[1, 2], [0, bad]]):
        with pytest.raises(IndexError, match="embedding_renorm_: index"):
            torch.vmap(lambda w, i: F.embedding(i, w, max_norm=1.0))(tables, torch.tensor(ids))
    assert torch.equal(tables, before)


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    table = x.clone()
    return F.embedding(PAIRS, table, max_norm=1.0), table


def _scaled_bag(x: Tensor) -> tuple[Tensor, Tensor]:
    table = x.clone()
    closed = torch.tensor([0, 3, 3])  # row 3 is in no bag
    return F.embedding_bag(IDS, table, closed, max_norm=1.0, include_last_offset=True), table


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("lookup", [_scaled, _scaled_bag])
def test_max_norm_made_functional(lookup: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    tables = torch.stack([TABLE, TABLE * 2])
    expected = lookup(TABLE)
    assert_close(functionalize(lookup)(TABLE), expected)
    assert_close(functionalize(torch.vmap(lookup))(tables), torch.vmap(lookup)(tables))
    assert_close(torch.vmap(functionalize(lookup))(tables), torch.vmap(lookup)(tables))
    graph = make_fx(functionalize(lookup))(TABLE)
    assert_close(graph(TABLE), expected)
    called = [node.target for node in graph.graph.nodes if isinstance(node.target, OpOverload)]
    assert torch.ops.fastemb.renormed.default in called
    assert not any(target._schema.is_mutable for target in called)


@pytest.mark.parametrize("bag", [False, True])
def test_max_norm_of_a_negated_table(bag: bool) -> None:
    weight = torch.complex(TABLE, -TABLE).conj().imag
    assert weight.is_neg()
    plain = weight.resolve_neg()
    for table in (weight, plain):
        if bag:
            F.embedding_bag(IDS, table, OFFSETS, max_norm=1.0)
        else:
            F.embedding(IDS, table, max_norm=1.0)
    assert torch.equal(weight, plain)
    assert weight[0].norm() < 1.001


def test_transforms_of_something_else() -> None:
    """A lookup is a constant to them."""
    weight, x = TABLE.float(), torch.ones(3)
    expected = F.embedding_bag(PAIRS, weight)
    each = torch.vmap(lambda row: F.embedding_bag(row[None], weight)[0])(PAIRS)
    assert torch.equal(each, expected)
    both = torch.vmap(F.embedding_bag, (None, 0))(PAIRS, torch.stack([weight, weight * 2]))
    assert_close(both, torch.stack([expected, expected * 2]))
    got = grad(lambda x: (F.embedding_bag(PAIRS, weight) * x).sum())(x)
    assert_close(got, expected.sum(0))
    _, got = jvp(lambda x: F.embedding_bag(PAIRS, weight) * x, (x,), (x,))
    assert torch.equal(got, expected)
