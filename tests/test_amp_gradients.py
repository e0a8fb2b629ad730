"""Gradients of every kind under `fastemb.amp.GradScaler`, and what is counted of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from optim_cases import assert_same_bits, bits, coo, random_rows, snapshot
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fastemb
from fastemb import optim
from fastemb.amp import GradScaler

INF, NAN = float("inf"), float("nan")
SCALE = 1024.0


def begin(**options: Any) -> GradScaler:
    scaler = GradScaler("cpu", init_scale=SCALE, **options)
    scaler.scale(torch.zeros(()))
    return scaler


def with_grad(value: Tensor, grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(value)
    if grad.dtype != param.dtype:
        param.grad_dtype = grad.dtype
    param.grad = grad
    return param


# ---- memory ----


@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD])
@pytest.mark.parametrize("explicit", [False, True])
def test_shared_values_are_unscaled_once(make: Any, explicit: bool) -> None:
    """Two tables whose outputs are added have one tensor of values; torch unscales it twice."""
    a, b = (nn.Embedding(5, 3, sparse=True) for _ in range(2))
    ids = torch.tensor([1, 3])
    scaler = begin()
    optimizer = make([a.weight, b.weight], lr=1.0)
    before = a.weight.detach().clone(), b.weight.detach().clone()
    scaler.scale(((a(ids) + b(ids)) * torch.ones(2, 3)).sum()).backward()
    values = [p.weight.grad._values() for p in (a, b)]
    assert values[0].data_ptr() == values[1].data_ptr()
    if explicit:
        scaler.unscale_(optimizer)
        for table in (a, b):
            assert_same_bits(table.weight.grad.to_dense()[ids], torch.ones(2, 3))
    scaler.step(optimizer)
    for table, old in zip((a, b), before, strict=True):
        old[ids] -= 1.0
        assert_same_bits(table.weight, old)


@pytest.mark.parametrize("makes", [(torch.optim.SGD,) * 2, (optim.SGD, torch.optim.SGD)])
@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
def test_optimizers_that_share_values(makes: Any, how: str) -> None:
    """What one has unscaled, the other must not find unscaled, nor unscale again."""
    values = torch.full((2, 2), SCALE)
    params = [with_grad(torch.zeros(4, 2), coo([1, 2], values, 4)) for _ in range(2)]
    optimizers = [make([p], lr=1.0) for make, p in zip(makes, params, strict=True)]
    scaler = begin()
    scaler.register(nn.ParameterList(params), *optimizers)
    if how == "clip":
        scaler.clip_grad_norm_(optimizers[0], 10.0)
    if how != "step":
        scaler.unscale_(optimizers[1])
    for optimizer in optimizers:
        scaler.step(optimizer)
    for param in params:
        assert_same_bits(param, torch.tensor([[0.0, -1.0, -1.0, 0.0]] * 2).T)


def test_shared_values_with_repeated_rows_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastemb.optim._gradients.on_host", lambda _: False)
    values = torch.full((3, 2), SCALE)
    params = [with_grad(torch.zeros(4, 2), coo([1, 1, 2], values, 4)) for _ in range(2)]
    scaler = begin()
    optimizer = optim.SGD(params, lr=1.0)
    scaler.unscale_(optimizer)
    for param in params:
        assert_same_bits(param.grad.to_dense(), torch.tensor([[0.0, 2.0, 1.0, 0.0]] * 2).T)
    scaler.step(optimizer)
    scaler.update()
    rows = [row["elements"] for row in scaler.stats()["gradients"].values()]
    assert rows == [4, 4]


def test_memory_that_overlaps_in_part() -> None:
    memory = torch.arange(8.0) * SCALE
    params = [with_grad(torch.zeros(5), memory[:5]), with_grad(torch.zeros(5), memory[3:])]
    scaler = begin()
    scaler.unscale_(torch.optim.SGD(params, 1.0))
    assert_same_bits(params[0].grad, torch.arange(5.0))
    assert_same_bits(params[1].grad, torch.arange(3.0, 8.0))


@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD])
def test_memory_layouts(make: Any) -> None:
    """Transposed, with gaps, expanded."""
    full = torch.arange(24.0).view(4, 6) * SCALE
    grads = [full.t(), full[:, ::2], torch.full((1, 1), SCALE).expand(3, 2)]
    expected = [g.clone() / SCALE for g in grads]
    for explicit in (False, True):
        params = [nn.Parameter(torch.zeros(g.shape)) for g in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone(memory_format=torch.preserve_format)
        params[2].grad = grads[2]
        scaler = begin()
        optimizer = make(params, lr=1.0)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        for param, want in zip(params, expected, strict=True):
            assert_same_bits(param.detach(), 0.0 - want)


def test_gradients_are_only_read() -> None:
    grads = [torch.randn(3, 2), torch.randn(4), coo([0, 2], torch.randn(2, 2), 5, coalesced=True)]
    params = [with_grad(torch.zeros(g.shape), g.clone()) for g in grads]
    scaler = begin()
    optimizer = optim.Adam(params)
    scaler.clip_grad_norm_(optimizer, 0.1)
    scaler.step(optimizer)
    for param, grad in zip(params, grads, strict=True):
        assert_same_bits(param.grad.to_dense(), grad.to_dense())


# ---- repeated rows ----


def test_repeated_rows_are_summed_before_they_are_checked() -> None:
    for make in (optim.SGD, optim.SparseAdam, torch.optim.SparseAdam):
        p = with_grad(torch.ones(4, 2), coo([1, 1], torch.full((2, 2), 3e38), 4))
        scaler = begin()
        optimizer = make([p], lr=0.1)
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer)
        assert_same_bits(p.detach(), torch.ones(4, 2))
        scaler.update()
        assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD])
def test_sums_of_repeated_rows(make: Any, dtype: torch.dtype) -> None:
    """One row 300 times: 300 is no bfloat16 and 300 * SCALE no float16."""
    grad = coo([2] * 300 + [0], torch.full((301, 2), SCALE, dtype=dtype), 4)
    p = with_grad(torch.zeros(4, 2, dtype=dtype), grad)
    scaler = begin()
    optimizer = make([p], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # fp16 in an optimizer of torch
        scaler.unscale_(optimizer)
    assert scaler._iteration.passes[id(optimizer)].found[torch.device("cpu")] == 0
    got = p.grad.to_dense()
    assert got.dtype == (dtype if make is torch.optim.SGD else torch.float32)
    want = torch.zeros(4, 2)
    want[2], want[0] = 300.0, 1.0
    assert_same_bits(got, want.to(got.dtype))
    scaler.step(optimizer)
    assert_same_bits(p.detach(), 0 - want.to(dtype))


def test_sums_that_the_dtype_of_the_optimizer_cannot_hold() -> None:
    grad = coo([2] * 100, torch.full((100, 2), 6e4, dtype=torch.float16), 4)
    p = with_grad(torch.zeros(4, 2, dtype=torch.float16), grad)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    optimizer = torch.optim.SGD([p], 1.0)
    with pytest.warns(RuntimeWarning, match="float16"):
        scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)
    assert_same_bits(p.detach(), torch.zeros(4, 2, dtype=torch.float16))


@pytest.mark.parametrize("explicit", [False, True])
def test_rows_as_on_a_device(monkeypatch: pytest.MonkeyPatch, explicit: bool) -> None:
    """Where the number of rows may not be read: repeated ones stay, the checks see their sums."""
    generator = torch.Generator().manual_seed(0)
    runs = []
    for on_host in (True, False):
        monkeypatch.setattr("fastemb.optim._gradients.on_host", lambda _, on_host=on_host: on_host)
        generator.manual_seed(0)
        scaler = begin()
        params = [
            with_grad(torch.ones(6, 3).to(dtype), random_rows(generator, 6, 3, 9, dtype) * SCALE)
            for dtype in (torch.float32, torch.float16)
        ]
        optimizer = optim.Adam(params, 0.1)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        runs.append((snapshot(optimizer), scaler.stats()["gradients"]))
    assert runs[0] == runs[1]


def test_other_sparse_gradients() -> None:
    """Both dimensions sparse; torch sums those."""
    for values, skipped in (([2.0, 3.0], False), ([3e38, 3e38], True)):
        grad = torch.sparse_coo_tensor(
            torch.tensor([[1, 1], [0, 0]]), torch.tensor(values), (2, 2), check_invariants=False
        )
        p = with_grad(torch.zeros(2, 2), grad)
        scaler = GradScaler("cpu", init_scale=1.0)
        scaler.scale(torch.zeros(()))
        optimizer = torch.optim.SGD([p], 1.0)
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer) == skipped
        assert float(p[1, 0].detach()) == (0.0 if skipped else -5.0)


def test_layouts_that_nobody_can_unscale() -> None:
    p = nn.Parameter(torch.ones(2, 2).to_sparse_csr())
    p.grad = torch.ones(2, 2).to_sparse_csr()
    scaler = begin()
    with pytest.raises(ValueError, match=r"must be dense or sparse COO, got torch.sparse_csr for"):
        scaler.step(torch.optim.SGD([p]))


def test_wrappers_that_nobody_can_unscale() -> None:
    p = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    p.grad = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(
        ValueError, match=r"must be plain tensors, got TwoTensor for parameter 0 of"
    ):
        begin().step(torch.optim.SGD([p]))


# ---- fp16 ----


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_fp16_gradients_keep_what_the_scale_has_saved(explicit: bool, sparse: bool) -> None:
    """2**-20 / 1024 is no float16, and is what reaches the FP32 moments."""
    values = torch.full((2, 2), 2.0**-20, dtype=torch.float16)
    grad = coo([0, 1], values, 2, coalesced=True) if sparse else values
    p = with_grad(torch.ones(2, 2, dtype=torch.float16), grad)
    scaler = begin()
    optimizer = optim.Adam([p], 0.1, betas=(0.0, 0.5))
    if explicit:
        scaler.unscale_(optimizer)
        assert p.grad.dtype == torch.float32
        assert float(p.grad.to_dense()[1, 1]) == 2.0**-30
    scaler.step(optimizer)
    assert float(optimizer.state[p]["exp_avg"][1, 1]) == 2.0**-30


@pytest.mark.parametrize("sparse", [False, True])
def test_half_gradients_can_be_assigned_after_fp32_ones(sparse: bool) -> None:
    """Unscaling replaces them by FP32 ones, which must not bind the next batch."""
    p = nn.Parameter(torch.ones(3, 2, dtype=torch.float16))
    optimizer = optim.Adam([p], lr=0.125)
    scaler = begin()
    for number in range(1, 4):
        half = torch.full((3, 2), SCALE, dtype=torch.float16)
        p.grad = coo([0, 1, 1], half, 3) if sparse else half
        scaler.unscale_(optimizer)
        assert p.grad.dtype == torch.float32
        scaler.step(optimizer)
        scaler.update()
        assert p.detach()[0, 0].item() == pytest.approx(1 - 0.125 * number, abs=1e-3)
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["step", "unscale", "clip"])
def test_complex_gradients(how: str) -> None:
    p = nn.Parameter(torch.tensor([[1 + 2j, 3.0], [0.0, 1j]]))
    optimizer = optim.SGD([p], lr=1.0)
    scaler = begin()
    before = p.detach().clone()
    grad = torch.tensor([[3 + 4j, 0.0], [0.0, 12.0]])
    p.grad = (grad * SCALE).t().conj()  # in another order of memory, conjugated on reading
    factor = 1.0
    if how == "unscale":
        scaler.unscale_(optimizer)
        torch.testing.assert_close(p.grad.resolve_conj(), grad.t().conj().resolve_conj())
    elif how == "clip":
        assert float(scaler.clip_grad_norm_(optimizer, 6.5)) == 13.0
        factor = 0.5
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(p.detach(), before - factor * grad.t().conj())
    before = p.detach().clone()
    p.grad = torch.full((2, 2), complex(1.0, NAN))
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits(torch.view_as_real(p.detach()), torch.view_as_real(before))
    assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("how", ["step", "unscale", "clip"])
@pytest.mark.parametrize("make", [optim.SGD, torch.optim.SGD])
def test_gradients_that_are_negated_when_they_are_read(how: str, make: Any) -> None:
    p = with_grad(torch.zeros(1), torch.tensor([3j * SCALE]).conj().imag)
    assert p.grad is not None
    assert p.grad.is_neg()
    optimizer, scaler = make([p], lr=1.0), begin()
    if how == "unscale":
        scaler.unscale_(optimizer)
        torch.testing.assert_close(p.grad, torch.tensor([-3.0]))
    elif how == "clip":
        assert float(scaler.clip_grad_norm_(optimizer, 10.0)) == 3.0
    scaler.step(optimizer)
    torch.testing.assert_close(p.detach(), torch.tensor([3.0]))


@pytest.mark.parametrize("sparse", [False, True])
def test_fp16_gradients_with_optimizers_of_torch(sparse: bool) -> None:
    values = torch.full((2, 2), 512.0, dtype=torch.float16)
    grad = coo([0, 1], values, 2, coalesced=True) if sparse else values
    p = with_grad(torch.ones(2, 2, dtype=torch.float16), grad)
    model = nn.Module()
    model.table = p
    scaler = begin()
    scaler.register(model)
    with pytest.warns(RuntimeWarning, match="the gradient of table is float16 and is unscaled in"):
        scaler.step(torch.optim.SGD([p], 1.0))
    assert_same_bits(p.detach(), torch.full((2, 2), 0.5, dtype=torch.float16))


# ---- no gradients, several devices' worth of optimizers ----


@pytest.mark.parametrize("make", [optim.Adam, torch.optim.SGD])
def test_no_gradients_count_as_nothing(make: Any) -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    scaler = begin(growth_interval=2)
    optimizers = [make([p], lr=1.0), make([q], lr=1.0)]
    scaler.step(optimizers[0])
    scaler.update()
    assert scaler._get_growth_tracker() == 0
    assert not scaler.step_was_skipped(optimizers[0])
    for _ in range(2):
        q.grad = torch.ones(2)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2 * SCALE


def test_several_optimizers_skip_on_their_own() -> None:
    p, q = (with_grad(torch.ones(1), torch.tensor([g])) for g in (INF, SCALE))
    scaler = begin()
    optimizers = [optim.SGD([p], lr=0.5), torch.optim.SGD([q], lr=0.5)]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert (float(p.detach()), float(q.detach())) == (1.0, 0.5)
    assert [scaler.step_was_skipped(o) for o in optimizers] == [True, False]
    assert scaler.get_scale() == SCALE / 2


def test_skip_all() -> None:
    """The second optimizer is known by an earlier step, and is looked at before the first's."""
    p, q = (nn.Parameter(torch.ones(1)) for _ in range(2))
    scaler = begin(skip="all")
    optimizers = [optim.SGD([p], lr=0.5), torch.optim.SGD([q], lr=0.5)]
    scaler.register(nn.Module(), optimizers[1])
    for bad, expected in ((True, 1.0), (False, 0.5)):
        scale = scaler.get_scale()
        p.grad, q.grad = torch.tensor([scale]), torch.tensor([INF if bad else scale])
        for optimizer in optimizers:
            scaler.step(optimizer)
            assert scaler.step_was_skipped(optimizer) == bad
        scaler.update()
        assert (float(p.detach()), float(q.detach())) == (expected, expected)
        assert scaler.stats()["gradients"]["parameter 0 of shape (1,)"]["elements"] == 1


def test_step_was_skipped_needs_a_step() -> None:
    with pytest.raises(RuntimeError, match="step\\(\\) was never called with this optimizer"):
        begin().step_was_skipped(optim.SGD([nn.Parameter(torch.ones(1))]))


@pytest.mark.parametrize("cls", [optim.Adam, optim.Adagrad, optim.RowWiseAdagrad, optim.SGD])
def test_skipped_steps_leave_everything(cls: Any) -> None:
    """Also row-sparse gradients, fp16 tables and queued rows; the first step, and a later one."""
    table = fastemb.nn.EmbeddingBag(8, 2, sparse=True, dtype=torch.float16)
    fused = fastemb.nn.EmbeddingBag(8, 2, sparse="fused", mode="sum")
    head = nn.Linear(4, 1)
    model = nn.ModuleDict({"table": table, "fused": fused, "head": head})
    optimizer = cls(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0**4)
    ids = torch.tensor([[1, 2, 2], [1, 5, 0]])
    for number, bad in enumerate((True, False, True, False)):
        optimizer.zero_grad()
        vectors = torch.cat([table(ids).float(), fused(ids)], dim=1)
        loss = head(vectors).sum() * (INF if bad else 1.0)
        # The first step, skipped or not, makes states, which start with zeros.
        before = snapshot(optimizer) if number else [bits(p) for p in model.parameters()]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = snapshot(optimizer) if number else [bits(p) for p in model.parameters()]
        assert (after == before) == bad
        assert scaler.step_was_skipped(optimizer) == bad
    assert scaler.get_scale() == 4.0


# ---- sparse="fused" ----


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
def test_queued_rows_are_those_of_sparse_gradients(mode: str, how: str) -> None:
    runs = []
    for sparse in (True, "fused"):
        torch.manual_seed(0)
        table = fastemb.nn.EmbeddingBag(8, 3, sparse=sparse, mode=mode)
        head = nn.Linear(3, 1)
        optimizer = optim.Adam([*table.parameters(), *head.parameters()], lr=0.1)
        scaler = GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
        norms = []
        for number in range(5):
            optimizer.zero_grad()
            for _ in range(2):
                ids = torch.randint(0, 8, (4, 3))
                factor = NAN if number == 2 else 1.0
                scaler.scale(head(table(ids)).square().sum() * factor).backward()
            if how == "unscale_":
                scaler.unscale_(optimizer)
            elif how == "clip":
                norms.append(bits(scaler.clip_grad_norm_(optimizer, 0.5)))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.step_was_skipped(optimizer) == (number == 2)
        numbers = scaler.stats()
        runs.append((snapshot(optimizer), numbers["gradients"], numbers["groups"], norms))
    assert runs[0] == runs[1]


def test_queued_rows_beside_a_gradient() -> None:
    table = fastemb.nn.Embedding(4, 2, sparse="fused", table="user")
    scaler = begin()
    scaler.scale(table(torch.tensor([1])).sum()).backward()
    table.weight.grad = torch.zeros(4, 2)
    with pytest.raises(RuntimeError, match=r"GradScaler.step: table 'user' has gradients of"):
        scaler.step(optim.Adam(table.parameters()))


# ---- clipping ----


@pytest.mark.parametrize("how", ["fused", "unscale_ first", "other norm", "torch optimizer"])
def test_clipping(how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (7,))
    grads = [torch.randn(s, generator=generator) for s in shapes]
    grads.append(random_rows(generator, 5, 3, 6, torch.float32))
    norm_type = 1.0 if how == "other norm" else 2.0
    make = torch.optim.SGD if how == "torch optimizer" else optim.SGD

    reference = [with_grad(torch.zeros(g.shape), g.clone()) for g in grads]
    expected = optim.clip_grad_norm_(reference, 1.0, norm_type)
    make(reference, lr=1.0).step()

    params = [with_grad(torch.zeros(g.shape), g * SCALE) for g in grads]
    scaler = begin()
    optimizer = make(params, lr=1.0)
    if how == "unscale_ first":
        scaler.unscale_(optimizer)
    norm = scaler.clip_grad_norm_(optimizer, 1.0, norm_type)
    scaler.step(optimizer)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for param, other in zip(params, reference, strict=True):
        torch.testing.assert_close(param, other, rtol=2e-6, atol=1e-7)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.clip_grad_norm_(optimizer, 1.0)


def test_small_norms_are_not_clipped() -> None:
    p = with_grad(torch.zeros(2), torch.tensor([3.0, 4.0]) * SCALE)
    scaler = begin()
    optimizer = optim.SGD([p], lr=1.0)
    assert float(scaler.clip_grad_norm_(optimizer, 6.0)) == 5.0
    scaler.step(optimizer)
    assert p.tolist() == [-3.0, -4.0]


def test_clipping_what_is_not_finite() -> None:
    p = with_grad(torch.ones(2), torch.tensor([1.0, INF]))
    scaler = begin()
    optimizer = optim.Adam([p])
    assert not torch.isfinite(scaler.clip_grad_norm_(optimizer, 6.0))
    scaler.step(optimizer)
    assert_same_bits(p.detach(), torch.ones(2))


def test_clip_then_unscale() -> None:
    p = with_grad(torch.zeros(2), torch.tensor([30.0, 40.0]) * SCALE)
    scaler = begin()
    optimizer = optim.SGD([p], lr=1.0)
    scaler.clip_grad_norm_(optimizer, 5.0)
    scaler.unscale_(optimizer)
    assert p.grad.tolist() == [30.0, 40.0]
    scaler.step(optimizer)
    torch.testing.assert_close(p.detach(), torch.tensor([-3.0, -4.0]))
