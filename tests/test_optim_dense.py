"""Dense parameters: the bits of torch's optimizers, over options, layouts and gradient scalers."""

from __future__ import annotations

import copy
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import assert_same_bits, coo, snapshot
from torch import Tensor, nn

from fastemb import optim
from fastemb.optim import _dense


def shared(draw: st.DrawFn, *more: str) -> dict[str, Any]:
    values: dict[str, st.SearchStrategy[Any]] = {
        "lr": st.sampled_from([1e-3, 0.3, 0.0, torch.tensor(0.05)]),
        "weight_decay": st.sampled_from([0, 0.1]),
        "maximize": st.booleans(),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
        "eps": st.sampled_from([1e-8, 0.1, 0.0]),
        "amsgrad": st.booleans(),
        "lr_decay": st.sampled_from([0, 0.1]),
        "initial_accumulator_value": st.sampled_from([0, 0.5]),
        "momentum": st.sampled_from([0, 0.9]),
        "dampening": st.sampled_from([0, 0.3]),
        "nesterov": st.booleans(),
    }
    return {name: draw(values[name]) for name in ("lr", "weight_decay", "maximize", *more)}


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(["Adam", "AdamW", "Adagrad", "SGD"]))
    if name == "SGD":
        options = shared(draw, "momentum", "dampening", "nesterov")
        if options["nesterov"]:
            options.update(momentum=0.9, dampening=0)
    elif name == "Adagrad":
        options = shared(draw, "lr_decay", "eps", "initial_accumulator_value")
    else:
        options = shared(draw, "betas", "eps", "amsgrad")
    return name, options


def parameters(dtype: torch.dtype, seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    tensors = [
        values(),
        values(0, 3),
        values(37),
        values(5, 7),
        values(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        values(6, 4).t(),
        values(3, 8)[:, ::2],  # with gaps
    ]
    return [nn.Parameter(t) for t in tensors]


def set_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, dtype=param.dtype) * scale
        if grad.numel() > 4:
            grad.view(-1)[::5] = 0.0  # also -0.0 under maximize
        param.grad = torch.empty_like(param).copy_(grad)


def contiguous(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """What torch's fused kernels can take: they do not look at strides."""
    return [
        p
        if _dense.is_dense(p)
        else nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))
        for p in params
    ]


@given(
    optimizer=optimizers(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    implementation=st.sampled_from([{}, {"fused": True}, {"foreach": True}, {"foreach": False}]),
    seed=st.integers(0, 1000),
)
@drawn(40)
def test_bits_of_torch(
    optimizer: tuple[str, dict[str, Any]],
    dtype: torch.dtype,
    implementation: dict[str, bool],
    seed: int,
) -> None:
    name, options = optimizer
    if implementation.get("foreach") and isinstance(options["lr"], Tensor):
        options = {**options, "lr": 0.05}
    ours, theirs = parameters(dtype, seed), contiguous(parameters(dtype, seed))
    a = getattr(optim, name)(ours, **options, **implementation)
    b = getattr(torch.optim, name)(theirs, **options, **(implementation or {"fused": True}))
    for step in range(3):
        set_gradients(ours, seed + step)
        set_gradients(theirs, seed + step)
        if step == 1:  # a parameter that is not part of every step
            ours[3].grad = theirs[3].grad = None
        a.step()
        b.step()
        for x, y in zip(ours, theirs, strict=True):
            assert_same_bits(x, y)
    for x, y in zip(ours, theirs, strict=True):
        for key, value in b.state[y].items():
            if x.numel():
                assert_same_bits(a.state[x][key], value)


@pytest.mark.parametrize("scale", [2.0**10, 1000.0])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
        ("AdamW", {}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("SGD", {}),
    ],
)
def test_bits_of_torch_under_its_gradient_scaler(
    monkeypatch: pytest.MonkeyPatch, scale: float, name: str, options: dict[str, Any]
) -> None:
    """Also where gradients are unscaled piece by piece; and they are not written."""
    peer = getattr(torch.optim, name)([nn.Parameter(torch.zeros(1))], lr=0.01, fused=True)
    if scale == 1000.0 and not getattr(peer, "_step_supports_amp_scaling", False):
        pytest.skip("this torch multiplies by 1 / scale before the step, rounded (Adagrad in 2.11)")
    monkeypatch.setitem(_dense._CHUNK, "cpu", 1 << 14)
    sizes = [5, (1 << 14) - 3, 3 * (1 << 14) + 77, 11]
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(n, generator=generator)) for n in sizes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    results = []
    for params, cls, extra in (
        (ours, getattr(optim, name), {}),
        (theirs, getattr(torch.optim, name), {"fused": True}),
    ):
        optimizer = cls(params, lr=0.01, **options, **extra)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        scaler.scale(torch.zeros(1))
        for step in range(4):
            set_gradients(params, step, scaler.get_scale())
            if step == 2:
                params[0].grad[1] = float("inf")
            before = [p.grad.clone() for p in params]
            scaler.step(optimizer)
            scaler.update()
            if params is ours:
                for param, grad in zip(params, before, strict=True):
                    assert_same_bits(param.grad, grad)
        results.append((optimizer, scaler.get_scale()))
    (a, scale_a), (b, scale_b) = results
    assert scale_a == scale_b
    for x, y in zip(ours, theirs, strict=True):
        assert_same_bits(x, y)
        for key, value in b.state[y].items():
            assert_same_bits(a.state[x][key], value)


def test_chunks_cover_every_element_once() -> None:
    n = _dense._ALIGNMENT
    sizes = [3, n, 1, 5 * n + 7, 0, 2]
    updates = [
        _dense.DenseUpdate(torch.zeros(s), torch.zeros(s), (torch.zeros(s),), None) for s in sizes
    ]
    limit = _dense._CHUNK["cpu"]
    _dense._CHUNK["cpu"] = 2 * n
    try:
        for batch in _dense._batches([u for u in updates if u.param.numel()]):
            assert sum(piece.param.numel() for piece in batch) <= 2 * n
            for piece in batch:
                assert piece.param.storage_offset() % n == 0
                piece.param.add_(1)
                piece.grad.add_(1)
                piece.states[0].add_(1)
    finally:
        _dense._CHUNK["cpu"] = limit
    for update in updates:
        for tensor in (update.param, update.grad, *update.states):
            assert bool((tensor == 1).all())


def test_gradients_of_other_dtypes_and_strides() -> None:
    start = torch.randn(4, 6, dtype=torch.float32)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    p.grad_dtype = torch.bfloat16
    grad = torch.randn(6, 4).bfloat16().t()
    p.grad, q.grad = grad, grad.float().contiguous()
    optim.Adam([p], lr=0.1).step()
    torch.optim.Adam([q], lr=0.1, fused=True).step()
    assert_same_bits(p, q)
    assert p.grad is grad


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_gradients_that_are_negated_when_they_are_read(name: str) -> None:
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    p.grad, q.grad = torch.tensor([2j]).conj().imag, torch.tensor([-2.0])
    assert p.grad.is_neg()
    getattr(optim, name)([p], lr=0.1).step()
    getattr(torch.optim, name)([q], lr=0.1, fused=True).step()
    assert_same_bits(p, q)


def test_default_is_fused_and_explicit_choices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = torch._fused_adam_
    monkeypatch.setattr(
        torch, "_fused_adam_", lambda *a, **k: (calls.append(1), kernel(*a, **k))[1]
    )
    for options, fused in (
        ({}, True),
        ({"fused": True}, True),
        ({"fused": False}, False),
        ({"foreach": False}, False),
        ({"foreach": True}, False),
        ({"capturable": True}, True),
    ):
        calls.clear()
        p = nn.Parameter(torch.ones(3))
        p.grad = torch.ones(3)
        optim.Adam([p], **options).step()
        assert bool(calls) == fused, options
        assert bool((p < 1).all())


@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
        ("AdamW", {"maximize": True}),
        ("Adagrad", {"initial_accumulator_value": 0.5}),
        ("SGD", {"momentum": 0.9, "dampening": 0.1}),
    ],
)
def test_complex_parameters_are_pairs_of_real_numbers(
    name: str, options: dict[str, Any], dtype: torch.dtype, implementation: dict[str, Any]
) -> None:
    options = {"lr": 0.1, **options, **implementation}
    start = torch.randn(3, 2, dtype=dtype)
    p, q = nn.Parameter(start.clone()), nn.Parameter(torch.view_as_real(start).clone())
    ours, theirs = getattr(optim, name)([p], **options), getattr(torch.optim, name)([q], **options)
    for step in range(4):
        grad = torch.randn(3, 2, dtype=dtype)
        p.grad, q.grad = grad.conj(), torch.view_as_real(grad.conj().resolve_conj())
        ours.step()
        theirs.step()
        if step == 1:
            ours.load_state_dict(ours.state_dict())
    torch.testing.assert_close(torch.view_as_real(p.detach()), q.detach())


def test_complex_parameters_take_dense_gradients_only() -> None:
    p = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 2, dtype=torch.complex64), (3, 2))
    optimizer = optim.Adam([p])
    with pytest.raises(RuntimeError, match=r"Adam: a torch\.complex64 parameter takes dense"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_step_of_nesterov_only_reads_gradients(dtype: torch.dtype, foreach: bool | None) -> None:
    """Also where parameters share one, whose elements share memory: that of a sum."""
    start = torch.randn(4, dtype=dtype)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    p, q, r = (nn.Parameter(start.clone()) for _ in range(3))
    grad = torch.full((), 0.5, dtype=dtype).expand(4)
    p.grad = q.grad = grad
    ours = optim.SGD([p, q], foreach=foreach, **options)
    theirs = torch.optim.SGD([r], foreach=False, **options)
    for _ in range(3):
        ours.step()
        r.grad = grad.clone()
        theirs.step()
        assert bool((grad == 0.5).all())
    torch.testing.assert_close(p, r)
    assert_same_bits(p, q)


@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_schedule_takes_the_momentum_of_nesterov_to_zero(
    implementation: dict[str, Any], dtype: torch.dtype, sparse: bool
) -> None:
    """As `CyclicLR` and warm-ups do; a step without momentum is that of plain SGD, as in torch."""
    p, q = nn.Parameter(torch.ones(3, 2, dtype=dtype)), nn.Parameter(torch.ones(3, 2))
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    ours, theirs = optim.SGD([p], **options, **implementation), torch.optim.SGD([q], **options)
    for momentum in (0.0, 0.9, 0.0, 0.5):
        grad = torch.full((3, 2), 0.25)
        p.grad, q.grad = (coo([0, 1, 2], grad.to(dtype), 3) if sparse else grad.to(dtype)), grad
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["momentum"] = momentum
            optimizer.step()
    torch.testing.assert_close(p, q, check_dtype=False, rtol=1e-3, atol=0)


@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"foreach": False}])
def test_betas_may_be_tensors_of_one_element(implementation: dict[str, Any]) -> None:
    start = torch.randn(4)
    p, q = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    betas = torch.tensor(0.5), torch.tensor([0.75])
    ours = optim.Adam([p], lr=0.1, betas=betas, **implementation)
    theirs = optim.Adam([q], lr=0.1, betas=(0.5, 0.75), **implementation)
    for _ in range(3):
        p.grad = q.grad = torch.randn(4)
        ours.step()
        theirs.step()
    assert_same_bits(p, q)


NUMBERS = {
    "Adam": ("eps", "weight_decay", "lr"),
    "AdamW": ("eps", "weight_decay", "lr"),
    "Adagrad": ("eps", "weight_decay", "lr_decay", "initial_accumulator_value", "lr"),
    "SGD": ("momentum", "dampening", "weight_decay", "lr"),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize(
    "number",
    [
        np.array,
        np.float32,
        Fraction,
        Decimal,
        lambda value: torch.tensor([value]),
        lambda value: nn.Parameter(torch.tensor(value)),
    ],
    ids=["array", "numpy", "fraction", "decimal", "tensor", "parameter"],
)
def test_options_may_be_any_numbers(name: str, implementation: Any, number: Any) -> None:
    """Dense, in low precision, and as rows."""
    results = []
    for kind in (number, float):
        options = {option: kind(0.5) for option in NUMBERS[name]}
        if "foreach" in implementation and isinstance(options["lr"], Tensor):
            options["lr"] = 0.5
        params = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
        params.append(nn.Parameter(torch.ones(3, 2, dtype=torch.float16)))
        if name.startswith("Adam"):
            options["lazy"] = "exact"
        optimizer = getattr(optim, name)(params, **options, **implementation)
        for _ in range(2):
            for param in params:
                param.grad = torch.full_like(param, 0.25)
            params[1].grad = coo([1], torch.ones(1, 2), 3)
            optimizer.step()
        results.append(snapshot(optimizer))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["Adagrad", "SGD"])
def test_foreach_with_a_tensor_as_learning_rate(name: str) -> None:
    """These have it also without a CUDA graph, unlike Adam."""
    start = torch.randn(4)
    results = []
    for module in (optim, torch.optim):
        p = nn.Parameter(start.clone())
        optimizer = getattr(module, name)([p], lr=torch.tensor(0.1), foreach=True)
        p.grad = torch.tensor([1.0, -2.0, 0.0, 3.0])
        optimizer.step()
        optimizer.step()
        results.append(p)
    assert_same_bits(*results)


@pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed")
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_sharded_parameters(name: str) -> None:
    """As `fully_shard` makes them; not all fused kernels of torch know them."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        start, grad = torch.randn(4, 3), torch.randn(4, 3)
        results = []
        for module in (optim, torch.optim):
            p = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
            optimizer = getattr(module, name)([p], lr=0.1)
            p.grad = distribute_tensor(grad, mesh, [Shard(0)])
            optimizer.step()
            optimizer.step()
            assert isinstance(p.data, DTensor)
            results.append(p.full_tensor().detach())
        torch.testing.assert_close(*results)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed")
def test_sharded_parameters_that_torch_does_not_step() -> None:
    """Nothing is changed, not even the parameter that comes first."""
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        shard = distribute_tensor(torch.ones(4, 3, dtype=torch.bfloat16), mesh, [Shard(0)])
        first, p = nn.Parameter(torch.ones(2)), nn.Parameter(shard)
        optimizer = optim.Adam([first, p], lr=0.1)
        first.grad, p.grad = torch.ones(2), torch.ones_like(shard)
        with pytest.raises(RuntimeError, match=r"a torch\.bfloat16 parameter of a wrapper such"):
            optimizer.step()
        assert first.tolist() == [1, 1]
        assert not optimizer.state
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("implementation", [{}, {"foreach": True}, {"foreach": False}])
def test_a_parameter_given_twice_is_updated_twice(implementation: dict[str, Any]) -> None:
    """One after the other, each with the bias correction of its own step."""
    start = torch.randn(4)
    p, q, other = (nn.Parameter(start.clone()) for _ in range(3))
    twice = optim.Adam([p, other, p], lr=0.1, **implementation)
    once = optim.Adam([q], lr=0.1, **implementation)
    p.grad = q.grad = other.grad = torch.tensor([1.0, -2.0, 0.0, 3.0])
    twice.step()
    once.step()
    assert_same_bits(other, q)
    once.step()
    assert_same_bits(p, q)
    assert float(twice.state[p]["step"]) == 2


def test_differentiable_step() -> None:
    """A gradient with a graph: d parameter / d lr-like factor, as torch gives it."""
    results = []
    for cls in (optim.Adam, torch.optim.Adam):
        factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
        start = torch.tensor([1.0, -2.0], dtype=torch.float64)
        param = start.clone()
        param.requires_grad_(True)
        copy = param.clone()
        copy.retain_grad()
        optimizer = cls([copy], lr=0.1, differentiable=True)
        copy.grad = factor * torch.tensor([3.0, 0.5], dtype=torch.float64)
        optimizer.step()
        results.append(torch.autograd.grad(copy.sum(), factor)[0])
    assert_same_bits(results[0], results[1])


def test_differentiable_refuses_what_torch_does_not_do() -> None:
    p = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    p.grad = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"differentiable=True .*bfloat16 parameter"):
        optim.Adam([p], differentiable=True).step()


def test_autograd_notices_the_step() -> None:
    """A graph that has saved a parameter refuses to run after the step."""
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.ones(3, dtype=dtype))
        loss = (p * p).sum()
        loss.backward(retain_graph=True)
        optim.Adam([p]).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("offload", [None, "cpu"])
@pytest.mark.parametrize("cls", [optim.Adam, optim.AdamW, optim.SparseAdam, optim.SGD])
def test_loading_before_a_lazy_module_has_shapes(cls: Any, offload: str | None) -> None:
    def made(features: int = 0) -> tuple[nn.Module, optim.Adam]:
        torch.manual_seed(0)
        layer = nn.Linear(features, 3) if features else nn.LazyLinear(3)
        momentum = {"momentum": 0.9} if cls is optim.SGD else {}
        return layer, cls(layer.parameters(), lr=0.1, offload=offload, **momentum)

    def step(layer: nn.Module, optimizer: optim.Adam, features: int = 4) -> None:
        optimizer.zero_grad()
        layer(torch.ones(2, features)).sum().backward()
        optimizer.step()

    layer, optimizer = made(4)
    step(layer, optimizer)
    checkpoint = copy.deepcopy((layer.state_dict(), optimizer.state_dict()))
    step(layer, optimizer)
    other, second = made()
    second.load_state_dict(checkpoint[1])
    other.load_state_dict(checkpoint[0])
    step(other, second)
    for got, want in zip(other.parameters(), layer.parameters(), strict=True):
        assert_same_bits(got, want)
    wrong, third = made()
    third.load_state_dict(checkpoint[1])
    with pytest.raises(RuntimeError, match=r"state .* must have shape \(3, 5\), got \(3, 4\)"):
        step(wrong, third, 5)
