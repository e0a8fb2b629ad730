"""`torch.compile` and `torch.export`."""

from __future__ import annotations

import copy
import os
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fresh_process import execute
from torch import Tensor, nn

import fastemb
from fastemb import functional
from fastemb import nn as fnn

IDS = torch.tensor([[1, 2, 2], [4, 1, 0]])
KINDS = [fnn.Embedding, fnn.EmbeddingBag]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(functional, "_warned_of_graph_break", False)
    # Told once per process; the test of it sets it back.
    monkeypatch.setattr(functional, "_warned_of_rounded_gradient", True)
    yield
    torch._dynamo.reset()


def step(module: nn.Module, function: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
    """Output and gradient."""
    module.zero_grad()
    output = function(*inputs)
    output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output))
    grad = module.weight.grad
    return output.detach(), grad.to_dense() if grad.layout != torch.strided else grad


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding_idx": 1},
        {"max_norm": 0.5},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16, "output_dtype": torch.float32},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph(kind: type, options: dict) -> None:
    module = kind(5, 3, **options)
    compiled_module = copy.deepcopy(module)
    compiled = torch.compile(compiled_module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        want = step(module, module, IDS)
        got = step(compiled_module, compiled, IDS)
        assert torch.equal(got[0], want[0])
        assert torch.equal(compiled_module.weight, module.weight)
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if "output_dtype" in options else {}
        torch.testing.assert_close(got[1], want[1], **tolerance)
        assert got[1].dtype == want[1].dtype


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_in_one_graph(mode: str) -> None:
    module = fnn.EmbeddingBag(5, 3, mode=mode)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    weights = None if mode == "max" else torch.tensor([0.5, 2.0, -1.0, 3.0])
    for inputs in (
        (torch.tensor([1, 4, 2, 2]), torch.tensor([0, 3]), weights),
        (torch.tensor([1, 4, 2, 2], dtype=torch.int32), torch.tensor([0, 0, 4]), weights),
    ):
        want = step(module, module, *inputs)
        got = step(module, compiled, *inputs)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_other_batch_sizes_need_no_other_graph() -> None:
    module = fnn.EmbeddingBag(5, 3, mode="sum")
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (4, 7, 12):
            ids = torch.arange(size).remainder(5)
            offsets = torch.tensor([0, 2, 3])
            assert torch.equal(compiled(ids, offsets), module(ids, offsets))


TABLE = torch.tensor([[0.5, -2, 1], [1.5, 3, -1], [-0.5, 2, 2.5], [4, -3, 0.25], [1, 0, 2]])
FLAT = torch.tensor([2, 0, 2, 1, 3])
OFFSETS = torch.tensor([0, 3, 3])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "lookup",
    [
        pytest.param(lambda w: functional.embedding(IDS, w, 1), id="embedding"),
        *[
            pytest.param(
                lambda w, mode=mode, last=last: functional.embedding_bag(
                    FLAT, w, OFFSETS, mode=mode, padding_idx=3, include_last_offset=last
                ),
                id=f"{mode}-{last}",
            )
            for mode, last in (("sum", True), ("mean", False), ("max", False))
        ],
        pytest.param(
            lambda w: functional.embedding_bag(IDS, TABLE, per_sample_weights=w[:2]),
            id="per_sample_weights",
        ),
    ],
)
def test_derivatives_of_torch_func_and_forward_mode(lookup: Any, backend: str) -> None:
    def dual(weight: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            output = lookup(torch.autograd.forward_ad.make_dual(weight, weight))
            return torch.autograd.forward_ad.unpack_dual(output).tangent

    def loss(weight: Tensor) -> Tensor:
        return lookup(weight).square().sum()

    def tangent(weight: Tensor) -> Tensor:
        return torch.func.jvp(loss, (weight,), (weight,))[1]

    for function in (dual, tangent, torch.func.grad(loss)):
        expected = function(TABLE)
        assert bool(expected.any())
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(TABLE), expected)


@pytest.mark.parametrize("offsets", [[0, 9, 9], [0, 3, 2], [1, 3, 3]])
def test_bad_offsets_of_derivatives(offsets: list[int]) -> None:
    def loss(weight: Tensor, offsets: Tensor) -> Tensor:
        return functional.embedding_bag(FLAT, weight, offsets).sum()

    compiled = torch.compile(torch.func.grad(loss), backend="aot_eager")
    compiled(TABLE, OFFSETS)
    with pytest.raises(RuntimeError, match="embedding_bag: offsets must begin with 0, not fall"):
        compiled(TABLE, torch.tensor(offsets))


@pytest.mark.parametrize("inputs", [(IDS,), (FLAT, OFFSETS)])
def test_max_norm_counts_as_a_change_of_the_table(inputs: tuple[Tensor, ...]) -> None:
    module = fnn.EmbeddingBag(5, 3, max_norm=0.1)
    other = torch.ones(1, 3, requires_grad=True)

    def total(*inputs: Tensor) -> Tensor:
        product = module.weight @ other.t()  # saves the table, for the gradient of other
        return module(*inputs).sum() + product.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.compile(total, backend="aot_eager")(*inputs).backward()


@pytest.mark.parametrize("kind", KINDS)
def test_tables_alike_share_a_graph(kind: type) -> None:
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            module = kind(5, 3)
            assert torch.equal(torch.compile(module, backend="eager")(IDS), module(IDS))


@pytest.mark.slow
def test_inductor() -> None:
    model = nn.Sequential(fnn.EmbeddingBag(5, 4, mode="mean"), nn.Linear(4, 2), nn.ReLU())
    want = model(IDS)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(IDS), want)
    want.sum().backward()
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    compiled(IDS).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_break_the_graph_and_say_so_once(kind: type) -> None:
    module = kind(5, 3, sparse=True, dtype=torch.float16)
    compiled = torch.compile(module, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = step(module, compiled, IDS)
        grad = module.weight.grad
        step(module, compiled, IDS)
        other = torch.compile(kind(5, 3, sparse=True), backend="aot_eager")
        other(IDS).sum().backward()
    ours = [str(w.message) for w in caught if "fastemb" in str(w.message)]
    assert len(ours) == 1
    assert "outside the compiled graph" in ours[0]
    assert grad.layout == torch.sparse_coo
    assert grad.dtype == torch.float32
    want = step(module, module, IDS)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    # Without gradients there is nothing to break the graph for.
    module.requires_grad_(False)
    module.weight.grad = None  # dynamo takes no fp16 tensor with an FP32 gradient
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(IDS), want[0])


@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_in_a_graph_warns_once(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "_warned_of_rounded_gradient", False)
    module = kind(5, 3, dtype=torch.float16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
            grad = step(module, compiled, IDS)[1]
            torch._dynamo.reset()
    assert len([w for w in caught if "rounds the finished gradient" in str(w.message)]) == 1
    # Rounded, but summed in FP32, and still where an FP32 gradient belongs.
    assert grad.dtype == torch.float32
    want = step(module, module, IDS)[1]
    assert torch.equal(grad, want.half().float())


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_export(kind: type, strict: bool) -> None:
    module = kind(5, 3, max_norm=0.7, dtype=torch.float16, output_dtype=torch.float32)
    program = torch.export.export(copy.deepcopy(module), (IDS,), strict=strict)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any(name.startswith("fastemb.") for name in names)
    again = torch.export.export(program.module(), (IDS,)).module()
    assert torch.equal(again(IDS), module(IDS))


def test_export_with_a_free_batch_size() -> None:
    module = fnn.EmbeddingBag(5, 3, mode="mean")
    inputs = (torch.tensor([1, 4, 2, 2]), torch.tensor([0, 3]))
    dims = ({0: torch.export.Dim("ids")}, {0: torch.export.Dim("bags")})
    program = torch.export.export(module, inputs, dynamic_shapes=dims)
    more = (torch.tensor([1, 4, 2, 2, 0, 0]), torch.tensor([0, 3, 4]))
    assert torch.equal(program.module()(*more), module(*more))


def test_converted_models_compile() -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 1))
    want = model(IDS)
    fastemb.convert(model)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(IDS), want)


def test_wrong_ids_raise_from_a_graph() -> None:
    compiled = torch.compile(fnn.Embedding(5, 3, table="t"), fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"index 7 at position 0 .* table 't' with 5 rows"):
        compiled(torch.tensor([7]))


def test_exported_programs_are_saved_and_loaded(tmp_path: Any) -> None:
    """Loaded by another process, which only imports fastemb."""
    module = fnn.EmbeddingBag(5, 3, mode="sum")
    torch.export.save(torch.export.export(module, (IDS,)), tmp_path / "program.pt2")
    torch.save(module(IDS).detach(), tmp_path / "expected.pt")
    script = f"""
        import torch, fastemb
        program = torch.export.load(r"{tmp_path / "program.pt2"}").module()
        expected = torch.load(r"{tmp_path / "expected.pt"}")
        assert torch.equal(program(torch.tensor({IDS.tolist()})), expected)
    """
    done = execute(textwrap.dedent(script), tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
