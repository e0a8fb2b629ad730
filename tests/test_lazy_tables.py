"""``lazy="exact"``: what keeps, copies, saves or takes over a table whose rows sleep."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_training import (  # noqa: F401  (fixtures)
    DIM,
    KINDS,
    ROWS,
    _no_table_is_left,
    asleep,
    flushed_copy,
    gradients,
    lookup_step,
    make,
    sleeping,
)
from optim_cases import assert_same_bits, coo
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.utils import parametrize
from wrappers import Imitator, SharingImitator

import fastemb
from fastemb import _row_queue, optim
from fastemb import functional as F
from fastemb import nn as fnn
from fastemb._sleeping import TABLES
from fastemb.optim import _lazy_adam

# ---- graphs that keep the table ----


def weighted_bag() -> tuple[fnn.EmbeddingBag, optim.Adam]:
    torch.manual_seed(0)
    bag = fnn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True, table="users")
    optimizer = optim.AdamW(bag.parameters(), lr=0.1, lazy="exact")
    lookup_step(bag, optimizer, torch.arange(ROWS).view(1, -1))
    lookup_step(bag, optimizer, torch.tensor([[0, 1]]))
    return bag, optimizer


@pytest.mark.parametrize("detached", [False, True])
def test_per_sample_weights_of_two_lookups(detached: bool) -> None:
    """The second wakes rows, which are none of the first."""
    bag, _optimizer = weighted_bag()
    params = {"weight": bag.weight.detach()} if detached else {}
    want = flushed_copy(bag)
    ids = [torch.tensor([[3, 4, 5]]), torch.tensor([[5, 6, 7]])]
    weights = [torch.ones(1, 3, requires_grad=True) for _ in ids]
    outputs = [
        functional_call(bag, params, (i,), {"per_sample_weights": w})
        for i, w in zip(ids, weights, strict=True)
    ]
    sum(output.square().sum() for output in outputs).backward()
    for i, w, output in zip(ids, weights, outputs, strict=True):
        torch.testing.assert_close(w.grad, (want[i] @ (2 * output.detach().T)).squeeze(-1))


def test_a_graph_from_before_a_step_is_refused_by_name() -> None:
    bag, optimizer = weighted_bag()
    weights = torch.ones(1, 2, requires_grad=True)
    kept = bag(torch.tensor([[3, 4]]), per_sample_weights=weights)
    lookup_step(bag, optimizer, torch.tensor([[9, 10]]))
    with pytest.raises(RuntimeError, match="embedding_bag: table 'users' was written after"):
        kept.sum().backward()
    # Other gradients need no rows.
    kept = bag(torch.tensor([[3, 4]]))
    lookup_step(bag, optimizer, torch.tensor([[9, 10]]))
    kept.sum().backward()


def test_flush_does_not_break_a_graph() -> None:
    bag, optimizer = weighted_bag()
    weights = torch.ones(1, 2, requires_grad=True)
    kept = bag(torch.tensor([[3, 4]]), per_sample_weights=weights)
    optimizer.flush()
    bag.state_dict()
    kept.sum().backward()
    torch.testing.assert_close(weights.grad, bag.weight.detach()[3:5].sum(1).view(1, 2))


def test_graphs_of_others_are_refused_by_autograd() -> None:
    module, _optimizer = asleep()
    penalty = module.weight.square().sum()  # saves the table, sleeping rows and all
    module(torch.tensor([5]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_compiled_lookups_wake_rows() -> None:
    module, _optimizer = asleep()
    module.eval()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        for ids in (torch.tensor([3, 5, 0]), torch.tensor([3, 8, 9])):
            want = flushed_copy(module)
            assert_same_bits(compiled(ids), want[ids])
    # A graph from before a table has sleeping rows is not used for it.
    torch.compiler.reset()
    other, optimizer = make()
    compiled = torch.compile(other, backend="eager")
    with torch.no_grad():
        assert_same_bits(compiled(torch.tensor([3])), other.weight.detach()[3:4])
    lookup_step(other, optimizer, torch.arange(ROWS))
    lookup_step(other, optimizer, torch.tensor([0]))
    want = flushed_copy(other)
    with torch.no_grad():
        assert_same_bits(compiled(torch.tensor([3])), want[3:4])
        torch.compiler.reset()
        whole = torch.compile(other, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="wake_batch_outside_graph"):
            whole(torch.tensor([4]))


def test_cuda_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = asleep()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    with pytest.raises(RuntimeError, match=r"a lookup in a table .* CUDA graph"):
        module(torch.tensor([3]))
    module.weight.grad = coo([3], torch.ones(1, DIM), ROWS)
    with pytest.raises(RuntimeError, match=r"a step of a table .* CUDA graph"):
        optimizer.step()


# ---- readers that do not have the parameter itself ----

IDS = torch.tensor([3, 5, 0])

VIEWS: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "detach": lambda w: F.embedding(IDS, w.detach()),
    "data": lambda w: F.embedding(IDS, w.data),
    "rows": lambda w: F.embedding(IDS, w[:10]),
    "columns": lambda w: F.embedding(IDS, w[:, 2:]),
    "module": lambda w: fnn.Embedding.from_pretrained(w)(IDS),
    "bag": lambda w: F.embedding_bag(IDS.view(-1, 1), w.view(w.shape), mode="sum"),
    "vjp": lambda w: vjp(lambda x: F.embedding(IDS, x), w)[0],
    "jvp": lambda w: jvp(lambda x: F.embedding(IDS, x), (w,), (w,))[0],
    "grad": lambda w: grad(lambda x: F.embedding(IDS, x).square().sum() / 2)(w)[IDS],
    "vmap": lambda w: vmap(lambda i: F.embedding(i, w.detach()))(IDS),
    "functionalize": lambda w: torch.func.functionalize(F.embedding)(IDS, w),
    "compiled": lambda w: torch.compile(F.embedding, backend="eager")(IDS, w.detach()),
}


@pytest.mark.parametrize("way", VIEWS)
def test_views_and_transforms_read_rows_that_are_awake(way: str) -> None:
    module, _optimizer = asleep()
    want = flushed_copy(module)
    got = VIEWS[way](module.weight).detach()
    assert_same_bits(got, want[IDS, -got.shape[1] :])


def test_a_whole_view_wakes_the_rows_it_reads() -> None:
    module, _optimizer = asleep()
    F.embedding(IDS, module.weight.detach())
    assert sleeping(module) == set(range(2, ROWS)) - {3, 5}
    other = fnn.Embedding(ROWS, DIM)
    F.embedding(IDS, other.weight)
    assert sleeping(module) == set(range(2, ROWS)) - {3, 5}


def test_gradients_of_single_examples() -> None:
    module, _optimizer = asleep()
    want = flushed_copy(module)

    def loss(params: dict[str, Tensor], ids: Tensor) -> Tensor:
        return functional_call(module, params, (ids,)).square().sum() / 2

    params = {name: param.detach() for name, param in module.named_parameters()}
    got = vmap(grad(loss), in_dims=(None, 0))(params, IDS)["weight"]
    assert_same_bits(got[range(len(IDS)), IDS], want[IDS])
    assert torch.count_nonzero(got).item() == IDS.numel() * DIM


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_parametrized_tables_are_computed_from_rows_that_are_awake(compiled: bool) -> None:
    module = fnn.Embedding(ROWS, DIM, sparse=True)
    parametrize.register_parametrization(module, "weight", Doubled())
    original = module.parametrizations.weight.original
    optimizer = optim.Adam(module.parameters(), lr=0.05, lazy="exact")
    peer = nn.Parameter(original.detach().clone())
    dense = torch.optim.Adam([peer], lr=0.05)
    lookup = torch.compile(module, backend="eager") if compiled else module
    for ids in (torch.arange(ROWS), *torch.tensor([[0, 1], [0, 2], [3, 0]])):
        torch.testing.assert_close(lookup(ids), peer[ids] * 2, rtol=1e-5, atol=1e-6)
        lookup_step(lookup, optimizer, ids)
        dense.zero_grad()
        (peer[ids] * 2).square().sum().backward()
        dense.step()
    saved = module.state_dict()["parametrizations.weight.original"]
    torch.testing.assert_close(saved, peer.detach(), rtol=1e-5, atol=1e-6)


def test_wake_ups_are_no_part_of_a_trace() -> None:
    """Not of the graph, which would repeat them; all rows are awake for what is looked up in it."""
    module, _optimizer = asleep()
    want = flushed_copy(module)
    traced = torch.jit.trace(module, (IDS,))
    assert "catch_up" not in str(traced.graph)
    assert sleeping(module) == set()
    assert_same_bits(traced(IDS + 20).detach(), want[IDS + 20])
    module, _optimizer = asleep()
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda ids: module(ids))(IDS)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.fastemb.embedding.default]
    assert_same_bits(graph(IDS).detach(), want[IDS])


# ---- copies and checkpoints ----


HANDED_ON: dict[str, Callable[[fnn.Embedding, optim.Adam], Tensor]] = {
    "state_dict": lambda m, o: m.state_dict()["weight"],
    "state_dict of the parent": lambda m, o: nn.Sequential(m).state_dict()["0.weight"],
    "deepcopy": lambda m, o: copy.deepcopy(m).weight,
    "deepcopy of the parent": lambda m, o: copy.deepcopy(nn.Sequential(m))[0].weight,
    "pickle": lambda m, o: pickle.loads(pickle.dumps(m)).weight,
    "to": lambda m, o: m.to("cpu").weight,
    "convert": lambda m, o: fastemb.convert(m) and m.weight,
    "revert": lambda m, o: fastemb.revert(m) and m.weight,
    "state_dict of the optimizer": lambda m, o: o.state_dict() and m.weight,
    "deepcopy of the optimizer": lambda m, o: copy.deepcopy(o).param_groups[0]["params"][0],
    "pickle of the optimizer": lambda m, o: pickle.loads(pickle.dumps(o)).param_groups[0]["params"][
        0
    ],
    "flush": lambda m, o: o.flush() or m.weight,
}


@pytest.mark.parametrize("way", HANDED_ON)
def test_copies_have_caught_up_rows(way: str) -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    got = HANDED_ON[way](module, optimizer)
    assert_same_bits(got, want)
    assert_same_bits(module.weight, want)


def test_converted_dtype() -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    fastemb.convert(module, torch.bfloat16)
    assert_same_bits(module.weight, want.to(torch.bfloat16))
    lookup_step(module, optimizer, torch.tensor([3, 4]))
    lookup_step(module, optimizer, torch.tensor([5]))
    optimizer.flush()
    assert_same_bits(module.weight, optimizer.state[module.weight]["master"].to(torch.bfloat16))


def test_loaded_weights_move_on_by_the_momentum() -> None:
    """As in dense Adam: from the loaded values, by the steps after loading only."""
    module, optimizer = asleep(kind="Adam")
    peer = nn.Embedding(ROWS, DIM)
    peer.load_state_dict(module.state_dict())
    dense = torch.optim.Adam(peer.parameters(), lr=0.05)
    dense.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((module, optimizer), (peer, dense)):
        lookup_step(m, o, torch.tensor([0]))
    loaded = torch.randn(ROWS, DIM)
    for m, o in ((module, optimizer), (peer, dense)):
        m.load_state_dict({"weight": loaded})
        assert torch.equal(m.weight, loaded)
        lookup_step(m, o, torch.tensor([0]))
    optimizer.flush()
    assert not torch.equal(module.weight, loaded)
    torch.testing.assert_close(module.weight, peer.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ours_first", [True, False])
def test_checkpoints_to_and_from_dense_torch(kind: str, ours_first: bool) -> None:
    batches = gradients(60, ROWS, DIM, 10)
    weight = torch.randn(ROWS, DIM, dtype=torch.float64)

    def build(ours: bool, p: nn.Parameter) -> torch.optim.Optimizer:
        if ours:
            return getattr(optim, kind)([p], lr=0.01, lazy="exact")
        return getattr(torch.optim, kind)([p], lr=0.01)

    def run(part: list[Any], ours: bool, p: nn.Parameter, o: torch.optim.Optimizer) -> None:
        for rows, values in part:
            p.grad = coo(rows.tolist(), values.to(p.dtype), ROWS, coalesced=True)
            p.grad = p.grad if ours else p.grad.to_dense()
            o.step()

    p = nn.Parameter(weight.clone())
    whole = build(ours_first, p)
    run(batches, ours_first, p, whole)
    q = nn.Parameter(weight.clone())
    first = build(ours_first, q)
    run(batches[:30], ours_first, q, first)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    r = nn.Parameter(q.detach().clone())
    second = build(not ours_first, r)
    second.load_state_dict(saved)
    run(batches[30:], not ours_first, r, second)
    if ours_first:
        whole.flush()
    else:
        second.flush()
    torch.testing.assert_close(r, p, rtol=1e-10, atol=1e-10)
    # and the first one is none the worse for having been saved
    run(batches[30:], ours_first, q, first)
    if ours_first:
        first.flush()
    torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-10)


def test_loading_a_state_pays_what_the_old_one_owes() -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    other, second = make()
    lookup_step(other, second, torch.arange(ROWS))
    optimizer.load_state_dict(second.state_dict())
    assert_same_bits(module.weight, want)
    assert int(optimizer.state[module.weight]["step"]) == 1
    lookup_step(module, optimizer, torch.tensor([0]))
    assert sleeping(module) == set(range(1, ROWS))


def test_deepcopied_training_goes_on_alike() -> None:
    module, optimizer = asleep()
    twin, copied = copy.deepcopy((module, optimizer))
    assert copied.param_groups[0]["params"][0] is twin.weight
    for m, o in ((module, optimizer), (twin, copied)):
        for row in range(10):
            lookup_step(m, o, torch.tensor([row, row + 20]))
        o.flush()
    assert_same_bits(module.weight, twin.weight)


@pytest.mark.parametrize("change", ["double", "load_state_dict"])
@pytest.mark.parametrize("sparse", [True, "fused"])
def test_parameters_that_torch_swaps(sparse: bool | str, change: str) -> None:
    """Instead of giving them other data; they are the same objects afterwards."""

    def train(swap: bool) -> Tensor:
        module, optimizer = asleep()
        module.sparse = sparse
        lookup_step(module, optimizer, torch.tensor([4, 5]))
        optimizer.zero_grad()
        arguments = [copy.deepcopy(module.state_dict())] if change == "load_state_dict" else []
        with torch.no_grad():
            for value in arguments:
                value["weight"].add_(1)
        before = module.weight
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            getattr(module, change)(*arguments)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert module.weight is before
        lookup_step(module, optimizer, torch.tensor([0, 6]))
        lookup_step(module, optimizer, torch.tensor([0, 1]))
        assert 6 in sleeping(module)
        optimizer.flush()
        return module.weight.detach()

    assert_same_bits(train(swap=True), train(swap=False))
    gc.collect()
    assert not _row_queue._QUEUES


# ---- whose rows they are ----


def test_rows_outlive_their_optimizer() -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    del optimizer
    gc.collect()
    assert_same_bits(module(torch.tensor([9])).detach(), want[9:10])
    assert_same_bits(module.weight, want)
    assert id(module.weight) not in TABLES


@pytest.mark.parametrize("gone", [False, True])
def test_flush_of_the_next_optimizer(gone: bool) -> None:
    """As after a restart with another learning rate, before anything has been looked up."""
    module, optimizer = asleep()
    want = flushed_copy(module)
    other = optim.Adam(module.parameters(), lazy="exact")
    if gone:
        del optimizer
        gc.collect()
    other.flush()
    assert_same_bits(module.weight, want)
    assert not other.state


def test_entries_go_with_the_parameter() -> None:
    module, optimizer = asleep()
    key = id(module.weight)
    assert key in TABLES
    del module, optimizer
    gc.collect()
    assert key not in TABLES


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_another_optimizer_takes_over(kind: str) -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    other = getattr(optim, kind)(
        module.parameters(), lr=0.0, **({"lazy": "exact"} if kind == "AdamW" else {})
    )
    module.weight.grad = coo([3], torch.ones(1, DIM), ROWS)
    other.step()
    assert_same_bits(module.weight, want)
    assert "row_step" not in optimizer.state[module.weight]
    for _ in range(3):  # in turns: each knows its own steps
        lookup_step(module, optimizer, torch.tensor([1]))
        lookup_step(module, other, torch.tensor([2]))
    assert int(optimizer.state[module.weight]["step"]) == 8
    optimizer.flush()


@pytest.mark.parametrize("make_other", [Imitator, SharingImitator, copy.copy])
def test_wrappers_and_copies_with_the_states_wake_rows(make_other: Any) -> None:
    """Only what has stepped is the owner; these are optimizers of the same rows all the same."""
    module, optimizer = make()
    other = make_other(optimizer)
    for _ in range(2):
        lookup_step(module, optimizer, torch.arange(ROWS))
        lookup_step(module, optimizer, torch.tensor([0]))
        want = flushed_copy(module)
        other.flush()
        assert_same_bits(module.weight, want)
    twin, copied = copy.deepcopy((module, optimizer))
    for m, o in ((module, optimizer), (twin, copied)):
        lookup_step(m, o, torch.tensor([1]))
    got, want = (o.state_dict()["state"][0] for o in (other, copied))
    assert got.keys() == want.keys()
    for name in want:
        assert_same_bits(got[name], want[name])


def test_a_cleared_state_begins_anew() -> None:
    module, optimizer = asleep()
    want = flushed_copy(module)
    optimizer.state.clear()
    optimizer.param_groups[0]["lr"] = 0.0
    module.weight.grad = coo([3], torch.ones(1, DIM), ROWS)
    optimizer.step()
    assert_same_bits(module.weight, want)
    assert int(optimizer.state[module.weight]["step"]) == 1


def test_a_padding_row_that_max_norm_shrinks() -> None:
    """It has no gradient, but decays in each step, before the lookup that shrinks it."""
    torch.manual_seed(0)
    dense = nn.EmbeddingBag(4, DIM, padding_idx=0, max_norm=1.0)
    with torch.no_grad():
        dense.weight.fill_(2.0)
    bag = copy.deepcopy(dense)
    fastemb.convert(bag, sparse=True)
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 1.0}
    optimizers = [
        torch.optim.AdamW(dense.parameters(), **options),
        optim.AdamW(bag.parameters(), lazy="exact", **options),
    ]
    for ids in ([1, 2, 3], [1, 2], [2], [0, 1], [3], [0]):
        for module, optimizer in zip((dense, bag), optimizers, strict=True):
            lookup_step(module, optimizer, torch.tensor([ids]))
    optimizers[1].flush()
    torch.testing.assert_close(bag.weight, dense.weight)


@pytest.mark.parametrize("rows", [ROWS - 20, ROWS + 20])
def test_another_shape_while_rows_sleep(rows: int) -> None:
    """A vocabulary that grows or shrinks, without a flush before."""
    module, optimizer = asleep()
    data = torch.cat([module.weight.data, torch.ones(20, DIM)])[:rows]
    module.weight.data, module.num_embeddings = data.clone(), rows
    ids = torch.tensor([rows - 1])
    words = rf"\({ROWS}, {DIM}\) slept .* the shape \({rows}, {DIM}\)"
    for read in (lambda: module(ids), optimizer.flush, optimizer.state_dict, module.state_dict):
        with pytest.raises(RuntimeError, match=words):
            read()
    assert_same_bits(module.weight, data)
    del optimizer.state[module.weight]
    lookup_step(module, optimizer, ids)
    assert_same_bits(module.weight[: rows - 1], data[: rows - 1])
    assert int(optimizer.state[module.weight]["step"]) == 1
    assert optimizer.state[module.weight]["exp_avg"].shape == data.shape


# ---- options ----


def test_options_that_contradict_dense_semantics() -> None:
    p = [nn.Parameter(torch.zeros(3, 2))]
    for kind, options, words in (
        (optim.Adam, {"lazy": "dense"}, "lazy must be 'rows' or 'exact'"),
        (optim.Adam, {"lazy": "exact", "decay": "all"}, "decay must be left at its default"),
        (optim.AdamW, {"lazy": "exact", "decay": "touched"}, "decay must be left at its default"),
        (optim.Adam, {"lazy": "exact", "row_bias_correction": True}, "row_bias_correction must be"),
    ):
        with pytest.raises(ValueError, match=words):
            kind(p, **options)
    with pytest.raises(TypeError, match="lazy"):
        optim.SparseAdam(p, lazy="exact")


def test_one_warning_says_what_lazy_rows_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(kind: Callable[..., Any], **options: Any) -> list[str]:
        p = nn.Parameter(torch.zeros(3, 2))
        p.grad = coo([1], torch.ones(1, 2), 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kind([p], **options).step()
        return [str(w.message) for w in caught if "fastemb" in str(w.message)]

    monkeypatch.setattr(_lazy_adam, "_warned_of_rows", False)
    assert step(optim.SparseAdam) == []
    for lazy in ("rows", "exact"):
        assert step(optim.AdamW, lazy=lazy) == []
    (message,) = step(optim.AdamW)
    assert "fastemb.optim.AdamW" in message
    assert "momentum" in message
    assert "lazy='exact'" in message
    assert step(optim.Adam) == []
