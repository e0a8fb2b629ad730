"""Row-sparse gradients and low precision: against torch, and against formulae in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import CLASSES, Model64, assert_same_bits, bits, coo, random_rows, snapshot
from torch import Tensor, nn

import fastemb
from fastemb import optim
from fastemb.optim._gradients import check_sparse, row_gradient

ROW_OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # class, its options, further options of the model
    ("Adam", {"lr": 0.1}, {}),
    ("Adam", {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}, {}),
    ("Adam", {"lr": 0.1, "row_bias_correction": True, "maximize": True}, {}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.1}, {"catch_up": True}),
    ("AdamW", {"lr": 0.1, "weight_decay": 0.1, "decay": "touched"}, {}),
    ("SparseAdam", {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}, {}),
    ("SparseAdam", {"lr": 0.1, "row_bias_correction": True}, {}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}, {"eps": 1e-10}),
    ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5, "maximize": True}, {"eps": 1e-10}),
    ("RowWiseAdagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}, {"eps": 1e-10}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.1}, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, {}),
]
IDS = [f"{name}-{'-'.join(options)}" for name, options, _ in ROW_OPTIONS]


def ulp(size: Tensor) -> Tensor:
    """The unit in the last place of FP32 numbers as large as ``size``."""
    return torch.from_numpy(np.spacing(size.abs().float().numpy())).double()


@pytest.mark.parametrize(("name", "options", "more"), ROW_OPTIONS, ids=IDS)
def test_rows_follow_the_float64_model(
    name: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 6, generator=generator)
    p = nn.Parameter(weight.clone())
    optimizer = getattr(optim, name)([p], **options)
    model = Model64(name, weight, **options, **more)
    for step in range(12):
        p.grad = random_rows(generator, 20, 6, 9, torch.float32)
        before = p.detach().double()
        optimizer.step()
        model.step(p.grad)
        if step == 0:  # within 2 ulp, counting those of the weights and of the update
            error = (p.detach().double() - model.weight).abs()
            weights = ulp(torch.maximum(model.weight.abs(), before.abs()))
            assert bool((error <= 2 * weights + 2 * ulp(model.weight - before)).all())
    torch.testing.assert_close(p.detach().double(), model.weight, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("name", "options", "more"), ROW_OPTIONS, ids=IDS)
def test_float64_rows(name: str, options: dict[str, Any], more: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    p = nn.Parameter(weight.clone())
    optimizer = getattr(optim, name)([p], **options)
    model = Model64(name, weight, **options, **more)
    for _ in range(5):
        p.grad = random_rows(generator, 20, 6, 9, torch.float64)
        optimizer.step()
        model.step(p.grad)
    torch.testing.assert_close(p.detach(), model.weight, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SparseAdam", {"lr": 0.1}),
        ("SparseAdam", {"lr": torch.tensor(0.1), "maximize": True}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
        ("SGD", {"lr": 0.1}),
    ],
)
@given(seed=st.integers(0, 1000), count=st.integers(0, 30), dim=st.integers(1, 9))
@drawn(15)
def test_rows_of_torch(name: str, options: dict[str, Any], seed: int, count: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(11, dim, generator=generator))
    q = nn.Parameter(p.detach().clone())
    ours, theirs = getattr(optim, name)([p], **options), getattr(torch.optim, name)([q], **options)
    for _ in range(3):
        p.grad = random_rows(generator, 11, dim, count, torch.float32)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_way_to_write_a_sparse_gradient(cls: type[optim.Adam], dtype: torch.dtype) -> None:
    """Rows sorted, in disorder, repeated, flagged as coalesced or not: the same step."""
    weight = torch.randn(6, 3).to(dtype)
    values = torch.tensor([[1.0, -2.0, 0.5], [4.0, 0.25, -1.0]], dtype=dtype)
    gradients = [
        coo([1, 4], values, 6, coalesced=True),
        coo([1, 4], values, 6),
        coo([4, 1], values.flip(0), 6),
        coo([4, 1, 1, 4], torch.stack([values[1], values[0], 0 * values[0], 0 * values[1]]), 6),
        coo(
            [1, 1, 4, 4], torch.stack([values[0] / 2, values[0] / 2, values[1] * 2, -values[1]]), 6
        ),
        coo([1, 4], torch.cat([values, values], 1)[:, :3], 6),  # values with gaps
    ]
    results = []
    for gradient in gradients:
        p = nn.Parameter(weight.clone())
        optimizer = cls([p], lr=0.5)
        for _ in range(2):
            p.grad = gradient
            optimizer.step()
        results.append(snapshot(optimizer))
        assert not torch.equal(p.detach()[1], weight[1])
        assert_same_bits(p.detach()[[0, 2, 3, 5]], weight[[0, 2, 3, 5]])
    for other in results[1:]:
        assert other == results[0]


def test_sums_of_repeated_rows_are_fp32() -> None:
    """fp16 sticks at 2048 when ones are added up, bf16 at 256."""
    for dtype in (torch.float16, torch.bfloat16):
        p = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
        optimizer = optim.SGD([p], lr=1.0)
        p.grad = coo([1] * 3000, torch.ones(3000, 2, dtype=dtype), 3)
        optimizer.step()
        assert optimizer.state[p]["master"][1].tolist() == [-3000.0, -3000.0]


def test_gradients_are_read_only() -> None:
    p = nn.Parameter(torch.zeros(5, 2))
    p.grad = grad = coo([3, 1, 3], torch.randn(3, 2), 5)
    before = (bits(grad._indices()), bits(grad._values()))
    optimizer = optim.Adam([p])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    optimizer.step()
    assert p.grad is grad
    assert (bits(grad._indices()), bits(grad._values())) == before


@pytest.mark.parametrize("cls", CLASSES)
def test_empty_gradient_counts_as_a_step(cls: type[optim.Adam]) -> None:
    p = nn.Parameter(torch.randn(4, 2))
    optimizer = cls([p], lr=0.5)
    before = bits(p)
    p.grad = coo([], torch.zeros(0, 2), 4)
    optimizer.step()
    assert bits(p) == before
    assert float(optimizer.state[p]["step"]) == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_one_dimensional_table(cls: type[optim.Adam]) -> None:
    p, q = nn.Parameter(torch.arange(5.0)), nn.Parameter(torch.arange(5.0).unsqueeze(1))
    a, b = cls([p], lr=0.1), cls([q], lr=0.1)
    for _ in range(2):
        p.grad = coo([3, 0, 3], torch.tensor([1.0, 2.0, 3.0]), 5)
        q.grad = coo([3, 0, 3], torch.tensor([[1.0], [2.0], [3.0]]), 5)
        a.step()
        b.step()
    assert_same_bits(p.detach(), q.detach().squeeze(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cls", CLASSES)
def test_table_of_matrices(cls: type[optim.Adam], dtype: torch.dtype) -> None:
    """(num_embeddings, 2, 3) is (num_embeddings, 6), in the step and before it."""
    start = torch.randn(5, 2, 3).to(dtype)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.flatten(1))
    a, b = cls([p], lr=0.1), cls([q], lr=0.1)
    for rows in ([3, 0, 3], [], [1, 3]):
        values = torch.randn(len(rows), 2, 3).to(dtype)
        p.grad = coo(rows, values.clone(), 5)
        q.grad = coo(rows, values.flatten(1), 5)
        norms = [optim.clip_grad_norm_([param], 1.0) for param in (p, q)]
        assert_same_bits(*norms)
        a.step()
        b.step()
    assert_same_bits(p.detach().flatten(1), q)
    assert bits(p[2]) == bits(start[2])


def test_table_with_gaps_between_rows() -> None:
    wide = torch.randn(5, 8)
    p, q = nn.Parameter(wide[:, :3]), nn.Parameter(wide[:, :3].clone())
    beyond = bits(wide[:, 3:])
    for param in (p, q):
        param.grad = coo([2, 4], torch.ones(2, 3), 5)
        optim.Adam([param], lr=0.1).step()
    assert_same_bits(p, q)
    assert bits(wide[:, 3:]) == beyond


def test_gradients_that_are_not_rows_are_refused() -> None:
    p = nn.Parameter(torch.zeros(3, 4))
    p.grad = torch.eye(3, 4).to_sparse()
    with pytest.raises(ValueError, match=r"SGD: .*1 sparse dimension.* got sparse_dim 2"):
        optim.SGD([p]).step()
    q = nn.Parameter(torch.zeros(3, 2, 4).transpose(1, 2))
    q.grad = torch.ones(3, 4, 2).to_sparse(1)
    with pytest.raises(ValueError, match=r"contiguous rows.*strides \(8, 1, 4\)"):
        optim.Adam([q]).step()
    r = nn.Parameter(torch.zeros(4, 3).t())
    r.grad = coo([1], torch.ones(1, 4), 3)
    with pytest.raises(ValueError, match=r"contiguous rows.*strides \(1, 3\)"):
        optim.Adam([r]).step()
    with pytest.raises(ValueError, match=r"sparse COO, got torch\.sparse_csr"):
        check_sparse("Adam", torch.sparse_csr_tensor([0, 1], [0], [1.0], (1, 2)))


@pytest.mark.parametrize("rows", [[0, 4], [-1], [2, 2**40, 1]], ids=str)
def test_rows_outside_the_table_are_refused(rows: list[int]) -> None:
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4, 3))
    p.grad, q.grad = torch.ones(2), coo(rows, torch.ones(len(rows), 3), 4)
    (bad,) = [row for row in rows if not 0 <= row < 4]
    for cls in CLASSES:
        with pytest.raises(IndexError, match=f"{cls.__name__}: row {bad} .* table of 4 rows"):
            cls([p, q], lr=0.1).step()
        assert p.count_nonzero() == q.count_nonzero() == 0
    with pytest.raises(IndexError, match=f"clip_grad_norm_: row {bad} .* table of 4 rows"):
        optim.clip_grad_norm_([p, q], 0.1)
    assert p.grad.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sparse", [False, True])
def test_momentum_that_is_switched_on_later_begins_with_a_gradient(
    dtype: torch.dtype, sparse: bool
) -> None:
    """Also after a step that was skipped, and out of a checkpoint from before."""
    p, q = (nn.Parameter(torch.ones(3, 2, dtype=d)) for d in (dtype, torch.float64))
    ours, theirs = optim.SGD([p], lr=0.1), torch.optim.SGD([q], lr=0.1)
    for step in range(6):
        if step == 2:
            ours.load_state_dict(ours.state_dict())
            for group in (*ours.param_groups, *theirs.param_groups):
                group.update(momentum=0.9, dampening=0.5)
        values = torch.full((3, 2), step + 1.0)
        p.grad = coo([0, 1, 2], values.to(dtype), 3) if sparse else values.to(dtype)
        if step == 2:
            ours.found_inf = torch.ones(())
            ours.step()
            del ours.found_inf
        q.grad = values.double()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p.double(), q, rtol=2.0**-8, atol=0)
    torch.testing.assert_close(
        ours.state[p]["momentum_buffer"].double(), theirs.state[q]["momentum_buffer"]
    )


# ---- weight decay ----


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_decay_all_is_the_dense_step(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(7, 3, generator=generator))
    q = nn.Parameter(p.detach().clone())
    ours = getattr(optim, name)([p], lr=0.1, weight_decay=0.1, decay="all")
    theirs = getattr(torch.optim, name)([q], lr=0.1, weight_decay=0.1, fused=True)
    for count in (5, 0, 1):
        p.grad = random_rows(generator, 7, 3, count, torch.float32)
        q.grad = p.grad.to_dense()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-6)


def test_catch_up_decays_for_the_steps_that_a_row_slept() -> None:
    p = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    optimizer = optim.AdamW([p], lr=0.1, weight_decay=0.5)
    zero = torch.zeros(1, 2, dtype=torch.float64)
    for rows in ([0], [0], [1], [0]):
        p.grad = coo(rows, zero, 3)
        optimizer.step()
    kept = 1 - 0.1 * 0.5
    expected = torch.tensor([kept**4, kept**3, 1.0], dtype=torch.float64)
    torch.testing.assert_close(p.detach()[:, 0], expected)
    assert optimizer.state[p]["row_step"].tolist() == [4, 3, 0]


def test_dense_and_sparse_gradients_of_one_parameter_take_turns() -> None:
    """Counters of rows are kept by dense steps too, which then catch up the sleeping rows."""
    weight = torch.randn(4, 3, dtype=torch.float64)
    p = nn.Parameter(weight.clone())
    options = {"lr": 0.1, "weight_decay": 0.2, "row_bias_correction": True}
    optimizer = optim.AdamW([p], **options)
    model = Model64("AdamW", weight, catch_up=True, **options)
    for step in range(6):
        dense = torch.randn(4, 3, dtype=torch.float64)
        p.grad = dense if step in (0, 3) else coo([step % 4], dense[:1], 4)
        optimizer.step()
        model.step(p.grad)
    torch.testing.assert_close(p.detach(), model.weight, rtol=1e-12, atol=1e-12)


# ---- dense gradients by the row operators ----


@pytest.mark.parametrize(("name", "options", "more"), ROW_OPTIONS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_the_rounding_of_fp32(
    name: str, options: dict[str, Any], more: dict[str, Any], dtype: torch.dtype
) -> None:
    """Dense and sparse steps in turn, on matrices in both orders of memory and on a scalar."""
    if name in ("Adam", "AdamW", "SparseAdam"):
        options = {**options, "eps": 1e-2}  # else the sign of tiny gradients decides
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(6, 4, generator=generator).to(dtype) for _ in range(3)]
    weights[1] = weights[1].t().contiguous().t()
    params = [nn.Parameter(w.clone()) for w in weights]
    optimizer = getattr(optim, name)(params, **options)
    models = [Model64(name, w, **options, **more) for w in weights]
    for step in range(6):
        for index, (param, model) in enumerate(zip(params, models, strict=True)):
            sparse = index == 2 and step % 2 == 0
            param.grad_dtype = None
            param.grad = (
                random_rows(generator, 6, 4, 4, dtype)
                if sparse
                else torch.randn(6, 4, generator=generator).to(dtype)
            )
            model.step(param.grad)
        optimizer.step()
    for param, model in zip(params, models, strict=True):
        master = optimizer.state[param]["master"]
        assert master.dtype == torch.float32
        torch.testing.assert_close(master.double(), model.weight, rtol=3e-6, atol=3e-6)
        assert_same_bits(param, master.to(dtype))


def test_sparse_adam_takes_dense_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(5, 2, generator=generator))
    q = nn.Parameter(p.detach().clone())
    ours, theirs = optim.SparseAdam([p], lr=0.1), torch.optim.SparseAdam([q], lr=0.1)
    for _ in range(3):
        p.grad = torch.randn(5, 2, generator=generator)
        q.grad = p.grad.to_sparse(1)
        ours.step()
        theirs.step()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_bfloat16_moments(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.randn(4, 3).to(dtype))
    optimizer = optim.Adam([p], lr=0.1, state_dtype=torch.bfloat16, amsgrad=True)
    model = Model64("Adam", p, lr=0.1, amsgrad=True)
    for step in range(3):
        p.grad = torch.randn(4, 3).to(dtype)
        if step == 1:
            p.grad = p.grad.to_sparse(1)
        optimizer.step()
        model.step(p.grad)
    state = optimizer.state[p]
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert state[name].dtype == torch.bfloat16
    torch.testing.assert_close(p.detach().double(), model.weight, rtol=0.05, atol=0.05)


def test_row_wise_adagrad_of_other_shapes() -> None:
    """(rows, the rest), whatever the order of memory."""
    image = torch.randn(3, 2, 4, 5).contiguous(memory_format=torch.channels_last)
    for weight in (image, torch.randn(4), torch.randn(3, 4).t(), torch.tensor(2.0)):
        for dtype in (torch.float32, torch.bfloat16):
            p = nn.Parameter(weight.to(dtype, copy=True))
            grad = torch.randn(weight.shape).to(dtype)
            p.grad = grad.clone()
            optimizer = optim.RowWiseAdagrad([p], lr=0.1)
            optimizer.step()
            rows = weight.shape[0] if weight.dim() else 1
            model = Model64("RowWiseAdagrad", weight.to(dtype).reshape(rows, -1), lr=0.1, eps=1e-10)
            model.step(grad.reshape(rows, -1))
            assert optimizer.state[p]["sum"].shape == (rows, 1)
            expected = model.weight.reshape(weight.shape).to(dtype)
            torch.testing.assert_close(p.detach(), expected, rtol=2.0**-8, atol=1e-6)


# ---- master copies and stochastic rounding ----


def updated_by(write: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """A parameter after a step, a foreign write and a step; and with the write in a fresh copy."""
    table = fastemb.nn.EmbeddingBag(6, 4, mode="sum", sparse=True, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        table.weight.copy_(torch.randn(6, 4, generator=generator))
    optimizer = optim.SGD(table.parameters(), lr=2.0**-12)
    loss_rows = torch.tensor([[0, 1], [1, 5]])
    table(loss_rows).float().sum().backward()
    optimizer.step()
    write(table)
    value = table.weight.detach().clone()
    table.zero_grad()
    table(loss_rows).float().sum().backward()
    optimizer.step()
    fresh = value.float()
    fresh[[0, 1, 5]] -= 2.0**-12 * torch.tensor([[1.0], [2.0], [1.0]])
    return optimizer.state[table.weight]["master"], fresh


WRITES = {
    "load_state_dict": lambda t: t.load_state_dict({"weight": torch.full((6, 4), 3.0)}),
    "data": lambda t: t.weight.data.mul_(2),
    "ema swap": lambda t: setattr(t.weight, "data", torch.linspace(1, 2, 24).view(6, 4).bfloat16()),
    "max_norm": lambda t: fastemb.functional.embedding(
        torch.arange(6), t.weight, max_norm=0.5, norm_type=2.0
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_no_stale_masters(write: Any) -> None:
    master, fresh = updated_by(write)
    assert_same_bits(master[[0, 1, 5]], fresh[[0, 1, 5]])


def test_masters_keep_what_the_parameter_cannot() -> None:
    p = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    optimizer = optim.SGD([p], lr=2.0**-12)
    for _ in range(64):
        p.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        optimizer.step()
    assert p.item() == 1 - 64 * 2.0**-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding(dtype: torch.dtype) -> None:
    """Reproducible, different in each step and element, right on average, no copy."""

    def train(seed: int) -> list[nn.Parameter]:
        params = [nn.Parameter(torch.ones(64, 8, dtype=dtype)) for _ in range(2)]
        optimizer = optim.SGD(params, lr=2.0**-14, rounding="stochastic", seed=seed)
        for step in range(16):
            for p in params:
                p.grad = torch.ones(64, 8, dtype=dtype)
                if step % 2:
                    p.grad = p.grad.to_sparse(1)
            optimizer.step()
        assert all(set(optimizer.state[p]) == {"step"} for p in params)
        return params

    (first, second), (again, _), (other, _) = train(3), train(3), train(4)
    assert_same_bits(first, again)
    assert bits(first) != bits(other)
    assert bits(first) != bits(second)
    exact = 1 - 16 * 2.0**-14
    unit = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    # The standard error of the mean of 512 random walks of 16 steps, each off by at most a unit.
    deviation = (unit * 2.0**-14 * 16 / 512) ** 0.5
    assert abs(float(first.detach().double().mean()) - exact) < 5 * deviation
    assert first.unique().numel() > 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sparse", [False, True])
def test_bfloat16_moments_do_not_stand_still(dtype: torch.dtype, sparse: bool) -> None:
    """A step changes exp_avg_sq by less than half an ulp, up and down."""
    p = nn.Parameter(torch.zeros(2, 512, dtype=dtype))
    options: dict[str, Any] = {"lazy": "rows", "amsgrad": True, "state_dtype": torch.bfloat16}
    optimizer = optim.Adam([p], lr=1e-4, betas=(0.99, 0.99), **options)
    state, want = optimizer.state[p], {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    for size in (1.0, 10.0, 0.5):
        p.grad = torch.full_like(p, size)
        if sparse:
            p.grad = p.grad.to_sparse(1)
        for _ in range(300):
            optimizer.step()
        for name, end in (("exp_avg", size), ("exp_avg_sq", size**2)):
            want[name] = end + (want[name] - end) * 0.99**300
            values = state[name].double()
            assert values.mean().item() == pytest.approx(want[name], rel=1e-2)
            assert values.std() < 0.05 * want[name]
    assert state["max_exp_avg_sq"].mean().item() == pytest.approx(95, rel=0.02)


@pytest.mark.parametrize("lazy", ["rows", "exact"])
def test_bfloat16_moments_are_reproducible(lazy: str) -> None:
    """The same bits for the same seed, also across a checkpoint; others for another seed."""
    rows = [[0, 3, 4, 8], [1, 2, 3, 9], [0, 1, 5, 6]]

    def train(seed: int, saved_at: int | None = None) -> list[Tensor]:
        p = nn.Parameter(torch.ones(10, 33))
        options: dict[str, Any] = {"lazy": lazy, "seed": seed, "state_dtype": torch.bfloat16}
        optimizer = optim.Adam([p], lr=0.01, **options)
        generator = torch.Generator().manual_seed(1)
        for step in range(9):
            if step == 4:
                saved = optimizer.state_dict()  # wakes all rows, with or without a resume
                if saved_at == step:
                    p = nn.Parameter(p.detach().clone())
                    optimizer = optim.Adam([p], lr=0.01, **options)
                    optimizer.load_state_dict(saved)
            values = torch.randn(4, 33, generator=generator)
            p.grad = coo(rows[step % 3], values, 10)
            optimizer.step()
        optimizer.state_dict()
        return [p.detach(), *(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq"))]

    for one, same, other in zip(train(3), train(3, saved_at=4), train(4), strict=True):
        assert_same_bits(one, same)
        assert bits(one) != bits(other)


# ---- many tables ----


def test_aliased_gradients_of_added_tables() -> None:
    """a(i) + b(j): autograd gives both tables the same memory."""
    results = []
    for cls in (nn.Embedding, fastemb.nn.Embedding):
        torch.manual_seed(0)
        a, b = cls(5, 3, sparse=True), cls(7, 3, sparse=True)
        with torch.no_grad():
            a.weight.copy_(torch.arange(15.0).view(5, 3))
            b.weight.copy_(torch.arange(21.0).view(7, 3))
        optimizer = optim.SGD([a.weight, b.weight], lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        out = a(torch.tensor([1, 2, 1])) + b(torch.tensor([3, 3, 6]))
        scaler.scale((out * torch.tensor([[1.0], [2.0], [4.0]])).sum()).backward()
        scaler.step(optimizer)
        results.append((a.weight.detach(), b.weight.detach()))
        expected = torch.arange(15.0).view(5, 3)
        expected[1] -= 5
        expected[2] -= 2
        assert_same_bits(a.weight, expected)
        expected = torch.arange(21.0).view(7, 3)
        expected[3] -= 3
        expected[6] -= 4
        assert_same_bits(b.weight, expected)


def test_model_with_dense_and_sparse_gradients_learns() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        table = fastemb.nn.EmbeddingBag(50, 8, sparse=True, dtype=dtype, output_dtype=torch.float32)
        head = nn.Linear(8, 1)
        optimizer = optim.Adam([*table.parameters(), *head.parameters()], lr=0.03)
        ids = torch.randint(0, 50, (32, 3))
        target = (ids % 2).float().mean(1, keepdim=True)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (head(table(ids)) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 20, (dtype, losses[0], losses[-1])


def test_multiplier_comes_before_the_sum() -> None:
    gradient = coo([1, 1], torch.full((2, 2), 3e38), 3)
    rows = row_gradient(gradient, torch.tensor(2.0**-16))
    assert rows.unscaled
    torch.testing.assert_close(rows.values, torch.full((1, 2), 6e38 / 2**16))


def test_states_are_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice comes for every large state, and while its memory is still untouched."""
    asked = []
    monkeypatch.setattr("fastemb.optim._states.advise_huge_pages", asked.append)
    p = nn.Parameter(torch.zeros(4, 2, dtype=torch.bfloat16))
    optimizer = optim.AdamW([p], amsgrad=True, row_bias_correction=True)
    p.grad = coo([1], torch.ones(1, 2, dtype=torch.bfloat16), 4)
    optimizer.step()
    advised = {tensor.data_ptr() for tensor in asked}
    states = {name: value for name, value in optimizer.state[p].items() if name != "step"}
    assert {value.data_ptr() for value in states.values()} == advised
    assert len(states) == 6


@pytest.mark.parametrize("sparse", [True, "fused"])
def test_a_bad_gradient_in_a_later_group_changes_nothing(sparse: Any) -> None:
    table = fastemb.nn.Embedding(4, 2, sparse=sparse)
    bad = nn.Parameter(torch.ones(2, 2))
    optimizer = optim.SGD([{"params": [table.weight]}, {"params": [bad]}], lr=1.0)
    table(torch.tensor([1])).sum().backward()
    bad.grad = torch.ones(2, 2).to_sparse(2)
    before = table.weight.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="1 sparse dimension"):
            optimizer.step()
    assert torch.equal(table.weight, before)
    bad.grad = None
    optimizer.step()
    assert torch.equal(table.weight[1], before[1] - 1)


def test_a_number_as_the_step() -> None:
    """torch's SparseAdam has one, so that it can be set."""
    params = []
    for make in (torch.optim.SparseAdam, optim.SparseAdam, partial(optim.Adam, lazy="rows")):
        p = nn.Parameter(torch.ones(3, 2))
        optimizer = make([p], lr=0.1)
        for _ in range(2):
            p.grad = coo([1], torch.ones(1, 2), 3)
            optimizer.step()
            optimizer.state[p]["step"] = 4
        assert optimizer.state_dict()["state"][0]["step"] == 4
        params.append(p.detach())
    for param in params[1:]:
        torch.testing.assert_close(param, params[0])
