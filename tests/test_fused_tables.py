"""Tables with ``sparse="fused"``: modules, and the queue from the backward to the step."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from fused_cases import DIM, ROWS, Twins, _no_queue_is_left, same, waiting  # noqa: F401
from lazy_training import asleep, flushed_copy, sleeping
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastemb
from fastemb import _row_queue, optim
from fastemb import functional as F
from fastemb import nn as fnn

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.tensor([[1, 2], [5, 1]])


def make(kind: type = fnn.EmbeddingBag, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(ROWS, DIM, sparse="fused", **options)


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_the_option(kind: type) -> None:
    module = make(kind)
    assert repr(module).count("sparse") == 1
    assert "sparse='fused'" in repr(module)
    assert "sparse" not in repr(kind(2, 2))
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.copy(module)):
        assert twin.sparse == "fused"
    loaded = kind.from_pretrained(torch.ones(3, 2), sparse="fused")
    assert loaded.sparse == "fused"
    loaded(IDS % 3).sum()  # frozen
    assert waiting(loaded) == 0


@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_without_a_gradient_it_is_a_lookup(kind: type) -> None:
    module = make(kind)
    plain = copy.deepcopy(module)
    plain.sparse = False
    want = plain(IDS)
    for manager in (torch.no_grad(), torch.inference_mode()):
        with manager:
            output = module(IDS)
        assert same(output, want)
        assert not output.requires_grad
    module.requires_grad_(False)
    assert module(IDS).grad_fn is None
    module.requires_grad_(True)
    output = module(IDS)
    assert same(output, want)
    module.requires_grad_(False)
    output.sum().backward()  # torch sets no .grad either
    assert waiting(module) == 0


def test_gradients_stay_none_and_wait() -> None:
    module = make()
    for count in (1, 2):
        module(IDS).sum().backward()
        assert module.weight.grad is None
        assert waiting(module) == count
    module.zero_grad()
    assert waiting(module) == 0
    module(IDS).sum().backward()
    optimizer = optim.SGD(module.parameters(), lr=1.0)
    optimizer.zero_grad(set_to_none=False)
    assert waiting(module) == 0
    before = module.weight.detach().clone()
    optimizer.step()
    assert same(module.weight, before)


def test_retained_graphs_queue_again() -> None:
    module = make(mode="sum")
    optimizer = optim.SGD(module.parameters(), lr=1.0)
    before = module.weight.detach().clone()
    loss = module(IDS).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    counts = torch.bincount(IDS.flatten(), minlength=ROWS).unsqueeze(1)
    torch.testing.assert_close(module.weight.detach(), before - 2 * counts)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(fnn.EmbeddingBag(ROWS, DIM, sparse=True), nn.Linear(DIM, 2), nn.Tanh())
    twins = Twins(model, optim.SGD, lr=0.1)

    def train(model: Any, optimizer: Any) -> None:
        anchor = torch.ones((), requires_grad=True)  # reentrant ones need an input that does
        checkpoint(
            lambda ids, one: model(ids) * one, IDS, anchor, use_reentrant=reentrant
        ).sum().backward()
        if model[0].sparse == "fused":
            assert waiting(model[0]) == 1
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        twins.run(train)
        twins.assert_equal()


def test_copies_carry_nothing_along() -> None:
    module = make()
    module(IDS).sum().backward()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert waiting(twin) == 0
    assert waiting(copy.copy(module)) == 1  # the same parameter
    fresh = make()
    fresh.load_state_dict(module.state_dict())
    assert waiting(fresh) == 0
    module.load_state_dict(fresh.state_dict())
    assert waiting(module) == 1  # as .grad


def test_the_queue_goes_with_the_parameter() -> None:
    module = make()
    optimizer = optim.Adam(module.parameters(), lazy="rows")
    grad = torch.ones(2, DIM)
    module(IDS).backward(grad)
    kept = weakref.ref(_row_queue.waiting(module.weight)._parts[0])
    assert kept().grad is not None
    optimizer.step()
    gc.collect()
    assert kept() is None
    module(IDS).backward(grad)
    kept, key = weakref.ref(_row_queue.waiting(module.weight)._parts[0]), id(module.weight)
    del module, optimizer
    gc.collect()
    assert kept() is None
    assert key not in _row_queue._QUEUES


def test_a_graph_does_not_keep_the_table() -> None:
    module = make()
    output = module(IDS).sum()
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
    output.backward()


def test_threads() -> None:
    """Backwards of several threads: every gradient arrives."""
    module = make(mode="sum")
    optimizer = optim.SGD(module.parameters(), lr=1.0)
    before = module.weight.detach().clone()

    def work() -> None:
        for _ in range(20):
            module(IDS).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.step()
    counts = torch.bincount(IDS.flatten(), minlength=ROWS).unsqueeze(1)
    torch.testing.assert_close(module.weight.detach(), before - 80 * counts)


def test_convert_and_revert() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(4, 2), "b": nn.EmbeddingBag(4, 2, sparse=True)})
    fastemb.convert(model, sparse="fused")
    assert (model["a"].sparse, model["b"].sparse) == ("fused", "fused")
    assert {row.action for row in fastemb.convert(model, sparse="fused")} == {"unchanged"}
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    before = model["a"].weight.detach().clone()
    model["a"](torch.tensor([1, 1])).sum().backward()
    optimizer.step()
    assert same(model["a"].weight[1], before[1] - 2)
    fastemb.revert(model)
    assert (type(model["a"]), model["a"].sparse) == (nn.Embedding, False)
    assert (type(model["b"]), model["b"].sparse) == (nn.EmbeddingBag, True)
    built = make()
    fastemb.revert(built)
    assert built.sparse is True


def test_functions() -> None:
    weight = nn.Parameter(torch.ones(4, 2, dtype=torch.float16))
    optimizer = optim.SGD([weight], lr=1.0)
    ids = torch.tensor([[1, 1], [3, 0]])
    output = F.embedding_bag(ids, weight, mode="sum", sparse="fused", output_dtype=torch.float32)
    F.embedding(ids, weight, sparse="fused").sum().backward()
    output.sum().backward()
    assert weight.grad is None
    optimizer.step()
    assert weight[:, 0].tolist() == [-1, -3, 1, -1]


def test_functions_wake_rows() -> None:
    """What sleeps under lazy="exact" is read by nobody, the functions included."""
    module, _ = asleep()
    want = flushed_copy(module)
    ids = torch.tensor([3, 7])
    assert same(F.embedding(ids, module.weight), want[ids])
    bags = F.embedding_bag(torch.tensor([[9], [9]]), module.weight, mode="sum")
    assert same(bags, want[[9, 9]])
    assert not {3, 7, 9} & sleeping(module)
    before = sleeping(module)
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([len(want)]), module.weight)
    with pytest.raises(TypeError):
        F.embedding(torch.tensor([20.0]), module.weight)
    assert sleeping(module) == before


def test_traced_lookups_are_sparse() -> None:
    module = make(mode="sum")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, (IDS,), check_trace=False)
    traced(IDS).sum().backward()
    assert module.weight.grad.layout == torch.sparse_coo
    assert waiting(module) == 0
    exported = torch.export.export(make(), (IDS,)).module()
    assert same(exported(IDS), make()(IDS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [fnn.Embedding, fnn.EmbeddingBag])
def test_compiled(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "_warned_of_graph_break", False)
    torch.compiler.reset()
    torch.manual_seed(0)
    twins = Twins(nn.Sequential(kind(ROWS, DIM, sparse=True), nn.Tanh()), optim.SGD, lr=0.1)
    plain, fused = twins.models
    compiled = torch.compile(fused, backend="aot_eager")
    with pytest.warns(UserWarning, match="sparse='fused' runs outside the compiled graph"):
        compiled(IDS).sum().backward()
    assert waiting(fused[0]) == 1
    plain(IDS).sum().backward()
    twins.run(lambda _, optimizer: optimizer.step())
    twins.assert_equal()
    with torch.no_grad():
        assert same(compiled(IDS), plain(IDS))
    message = "the weight of the table of shape"
    fused[0].weight.register_hook(lambda _: None)
    with pytest.raises(RuntimeError, match=message):
        compiled(IDS)


def test_anomaly_mode() -> None:
    module = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            module(IDS).sum().backward()
    assert waiting(module) == 1


def test_gradients_made_in_inference_mode() -> None:
    """They have no version by which a change could be told, and are copied."""
    module = make(mode="sum")
    with torch.inference_mode():
        grad = torch.ones(2, DIM)
    module(IDS).backward(grad)
    with torch.inference_mode():
        grad.zero_()
    before = module.weight.detach().clone()
    optim.SGD(module.parameters(), lr=1.0).step()
    assert same(module.weight[5], before[5] - 1)


def test_weights_that_hold_no_rows_side_by_side() -> None:
    weight = nn.Parameter(torch.zeros(DIM, ROWS).t())
    F.embedding(torch.tensor([1]), weight, sparse="fused").sum().backward()
    with pytest.raises(ValueError, match="must have contiguous rows"):
        optim.SGD([weight]).step()


def test_differentiable_steps() -> None:
    module = make()
    module(IDS).sum().backward()
    with pytest.raises(RuntimeError, match="differentiable=True takes dense gradients"):
        optim.SGD(module.parameters(), differentiable=True).step()


def test_a_table_of_no_rows_and_of_no_columns() -> None:
    for module in (fnn.EmbeddingBag(3, 0, sparse="fused"), fnn.EmbeddingBag(1, 2, sparse="fused")):
        optimizer = optim.Adam(module.parameters(), lazy="rows")
        for ids in (torch.empty(2, 0, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)):
            output: Tensor = module(ids)
            output.sum().backward()
            optim.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    assert float(optimizer.state[module.weight]["step"]) == 2
