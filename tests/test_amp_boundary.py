"""`fastemb.amp.BoundaryLinear`: torch's forward and weight gradients, its own input gradient."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from optim_cases import assert_same_bits, bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastemb
from fastemb import optim
from fastemb.amp import BoundaryLinear, GradScaler, boundary

LOW = [torch.float16, torch.bfloat16]


def layers(bias: bool = True, features: int = 8) -> tuple[nn.Linear, BoundaryLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(features, 5, bias)
    ours = BoundaryLinear(features, 5, bias)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8,), (7, 8), (2, 3, 8), (0, 8), (1, 8)])
def test_forward_and_weight_gradients_are_those_of_torch(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> None:
    outputs = []
    for layer in layers(bias):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with autocast(dtype):
            y = layer(x)
            outputs.append(y.detach().clone())
            y = nn.functional.relu(y, inplace=True)
        assert y.dtype == dtype
        y.float().square().sum().backward()
        outputs += [x.grad, *(p.grad for p in layer.parameters())]
    half = len(outputs) // 2
    for index, (want, got) in enumerate(zip(outputs[:half], outputs[half:], strict=True)):
        if index == 1:
            torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-8)
        else:
            assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", LOW)
def test_input_gradient_is_that_of_the_rounded_operands_in_float32(dtype: torch.dtype) -> None:
    _, layer = layers()
    x = torch.randn(7, 8).requires_grad_()
    weights = torch.randn(7, 5).to(dtype)
    with autocast(dtype):
        y = layer(x)
    y.backward(weights)
    want = weights.float() @ layer.weight.detach().to(dtype).float()
    assert_same_bits(x.grad, want)
    assert not (x.grad.to(dtype).float() == x.grad).all()


def test_small_gradients_survive() -> None:
    """Per sample 2**-26: fp16 has nothing for that, and the tables would stand still."""
    for make, survives in ((nn.Linear, False), (BoundaryLinear, True)):
        layer = make(4, 1)
        nn.init.constant_(layer.weight, 2.0**-6)
        x = torch.ones(3, 4, requires_grad=True)
        with autocast(torch.float16):
            y = layer(x)
        y.backward(torch.full((3, 1), 2.0**-20, dtype=torch.float16))
        assert bool((x.grad == 2.0**-26).all()) == survives
        assert bool((x.grad == 0).all()) != survives


@pytest.mark.parametrize("shape", [(2, 5, 0), (0, 0), (0, 4), (2, 0, 4), (4,)])
def test_shapes_without_elements(shape: tuple[int, ...]) -> None:
    layer, plain = BoundaryLinear(shape[-1], 3), nn.Linear(shape[-1], 3)
    layer.load_state_dict(plain.state_dict())
    x = torch.ones(shape, requires_grad=True)
    with autocast(torch.bfloat16):
        y, want = layer(x), plain(x)
    assert_same_bits(y, want)
    y.float().sum().backward()
    assert x.grad.shape == shape


def test_group_of_what_lies_behind() -> None:
    """The table has the scale of the group; layer and what follows have that of the loss."""
    scaler = GradScaler("cpu", init_scale=2.0**3, groups={"embedding": {"init_scale": 2.0**15}})
    torch.manual_seed(0)
    model = nn.Sequential(fastemb.nn.Embedding(6, 8), BoundaryLinear(8, 5), nn.Linear(5, 1))
    plain = copy.deepcopy(model)
    scaler.register(model)
    ids = torch.tensor([1, 4, 1])
    with autocast(torch.bfloat16):
        losses = [m(ids).float().sum() for m in (model, plain)]
    scaler.scale(losses[0]).backward()
    losses[1].backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        scale = 2.0**15 if name == "0.weight" else 2.0**3
        assert_same_bits(p.grad, q.grad * scale)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    other = optim.SGD(plain.parameters(), lr=1.0)
    scaler.step(optimizer)
    other.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same_bits(p, q)
    scaler.update()
    boundaries = scaler.stats()["boundaries"]
    assert {name: row["elements"] for name, row in boundaries.items()} == {"0": 24, "1": 24}
    # Both of the same gradient, each unscaled by the scale it has.
    assert boundaries["0"]["largest"] == boundaries["1"]["largest"]


def test_overflows_in_the_tower_leave_the_embedding_scale() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**4)
    model = nn.Sequential(nn.Embedding(6, 8), BoundaryLinear(8, 5), nn.Linear(5, 1))
    scaler.register(model)
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    for _ in range(3):
        with autocast(torch.float16):
            loss = model(torch.tensor([1, 2])).float().sum()
        scaler.scale(loss).backward()
        model[2].bias.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    groups = scaler.stats()["groups"]
    assert scaler.get_scale() == 2.0
    assert (groups["root"]["skips"], groups["embedding"]["skips"]) == (3, 0)
    assert groups["embedding"]["scale"] == 2.0**4


def test_without_autocast() -> None:
    scaler = GradScaler("cpu", init_scale=2.0, groups={"embedding": {"init_scale": 32.0}})
    plain, layer = layers()
    x = torch.randn(3, 8)
    for m, scaled in ((plain, False), (layer, False), (layer, True)):
        if scaled:
            scaler.register(layer)
            m.zero_grad()
        inputs = x.clone().requires_grad_()
        loss = m(inputs).square().sum()
        (scaler.scale(loss) if scaled else loss).backward()
        if m is plain:
            want = inputs.grad, m.weight.grad
        factors = (32.0, 2.0) if scaled else (1.0, 1.0)
        for got, grad, factor in zip((inputs.grad, m.weight.grad), want, factors, strict=True):
            assert_same_bits(got, grad * factor)


@pytest.mark.parametrize("dtype", LOW)
def test_inputs_whose_gradient_would_be_rounded(dtype: torch.dtype) -> None:
    _, layer = layers()
    x = torch.ones(2, 8, dtype=dtype)
    with autocast(dtype):
        layer(x)
        with pytest.raises(TypeError, match=r"must be float32, got .* output_dtype=torch"):
            layer(x.requires_grad_())
        with torch.no_grad():
            layer(x)


def test_frozen_layers() -> None:
    _, layer = layers()
    layer.requires_grad_(False)
    x = torch.ones(2, 8, requires_grad=True)
    with autocast(torch.float16):
        y = layer(x)
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert layer.weight.grad is None


def test_changed_weights_are_noticed() -> None:
    _, layer = layers()
    x = torch.ones(2, 8, requires_grad=True)
    with autocast(torch.float16):
        y = layer(x)
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_double_backward_is_refused() -> None:
    _, layer = layers()
    x = torch.ones(2, 8, requires_grad=True)
    with autocast(torch.float16):
        y = layer(x)
    (grad,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    """Reentrant checkpointing hides the boundary from the scaler, which says so."""
    grads = []
    for how in ("plain", "checkpoint"):
        scaler = GradScaler("cpu", init_scale=2.0, groups={"embedding": {"init_scale": 2.0**9}})
        torch.manual_seed(0)
        model = nn.Sequential(BoundaryLinear(8, 5), nn.ReLU(inplace=True), nn.Linear(5, 1))
        scaler.register(model)
        x = torch.randn(4, 8, requires_grad=True)
        with autocast(torch.bfloat16):
            y = model(x) if how == "plain" else checkpoint(model, x, use_reentrant=reentrant)
        loss = scaler.scale(y.float().sum())
        if reentrant and how == "checkpoint":
            with pytest.raises(RuntimeError, match=r"did not go through scaler\.scale"):
                loss.backward()
            return
        loss.backward()
        grads.append([bits(g) for g in (x.grad, *(p.grad for p in model.parameters()))])
    assert grads[0] == grads[1]


def test_compile() -> None:
    _, layer = layers()
    model = nn.Sequential(layer, nn.ReLU())
    scaler = GradScaler("cpu", init_scale=2.0, groups={"embedding": {"init_scale": 2.0**9}})
    scaler.register(model)
    compiled = torch.compile(model, backend="eager")
    grads = []
    for m in (model, compiled):
        x = torch.ones(4, 8, requires_grad=True)
        with autocast(torch.bfloat16):
            loss = m(x).float().sum()
        scaler.scale(loss).backward()
        grads.append(bits(x.grad))
    assert grads[0] == grads[1]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict", "save"])
def test_copies_are_without_a_scaler(how: str) -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    model = nn.Sequential(fastemb.nn.Embedding(4, 8), BoundaryLinear(8, 5, group="x"))
    scaler.register(model)
    other: Any
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    elif how == "save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        assert list(model[1].state_dict()) == ["weight", "bias"]
        other = nn.Sequential(fastemb.nn.Embedding(4, 8), BoundaryLinear(8, 5, group="x"))
        other.load_state_dict(model.state_dict())
    assert other[1]._scaler is None
    assert other[1].group == "x"
    other(torch.tensor([1])).sum().backward()
    assert other[0].weight.grad.abs().max() < 3  # not scaled
    with pytest.raises(RuntimeError, match="group 'x' \\(1\\)"):
        model(torch.tensor([1])).sum().backward()
    del scaler
    model(torch.tensor([1])).sum().backward()


def test_a_gpu_without_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe asks once, and a device that cannot multiply into float32 falls back."""
    cpu = torch.device("cpu")
    boundary._multiplies_into_float32.cache_clear()
    assert not boundary._multiplies_into_float32(cpu, torch.float16)
    calls = []

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        calls.append(out_dtype)
        return a.float() @ b.float()

    monkeypatch.setattr(torch, "mm", mm)
    boundary._multiplies_into_float32.cache_clear()
    assert boundary._multiplies_into_float32(cpu, torch.float16)
    assert boundary._multiplies_into_float32(cpu, torch.float16)
    assert calls == [torch.float32]
    boundary._multiplies_into_float32.cache_clear()


def test_repr() -> None:
    assert repr(BoundaryLinear(2, 3)) == (
        "BoundaryLinear(in_features=2, out_features=3, bias=True, group='embedding')"
    )


# ---- convert ----


def towers() -> nn.Module:
    return nn.ModuleDict(
        {"table": nn.Embedding(4, 8), "tower": nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1))}
    )


def test_convert_and_revert() -> None:
    model = towers()
    state = {name: bits(value) for name, value in model.state_dict().items()}
    first = model["tower"][0]
    for names in (["tower.0"], "tower.0", ()):
        report = fastemb.convert(model, boundary=names)
        assert len(report) == 1
        assert type(first) is BoundaryLinear
        assert type(model["tower"][1]) is nn.Linear
    assert model["tower"][0] is first
    assert first.group == "embedding"
    assert {name: bits(value) for name, value in model.state_dict().items()} == state
    scaler = GradScaler("cpu", init_scale=2.0, groups={"embedding": {"init_scale": 32.0}})
    scaler.register(model)
    scaler.scale(model["tower"](model["table"](torch.tensor([1]))).sum()).backward()
    for skip in (["tower"], lambda name, _: name == "tower.0"):
        fastemb.revert(model, skip=skip)
        assert type(first) is BoundaryLinear
    fastemb.revert(model)
    assert type(first) is nn.Linear
    assert repr(first) == repr(nn.Linear(8, 5))
    assert pickle.dumps(first)


class Own(BoundaryLinear):
    pass


@pytest.mark.parametrize(
    ("boundary", "error", "match"),
    [
        (["tower.7"], ValueError, "boundary must name modules of the model, got 'tower.7'"),
        (["table"], ValueError, "table is a Embedding, and only nn.Linear can become a boundary"),
        (["tower"], ValueError, "tower is a Sequential, and only nn.Linear"),
        (["tower.2"], ValueError, "tower.2 has 'group' of its own, a name that a boundary needs"),
        (["tower.1"], ValueError, "tower.1 has a forward set on the module itself"),
        (True, TypeError, "boundary must be names of modules, got True"),
    ],
)
def test_refused_conversions_change_nothing(
    boundary: Any, error: type[Exception], match: str
) -> None:
    model = towers()
    model["tower"][1].forward = lambda x: x
    model["tower"].append(nn.Linear(1, 1))
    model["tower"][2].group = "mine"
    with pytest.raises(error, match=match):
        fastemb.convert(model, boundary=["tower.0", *boundary] if boundary is not True else True)
    assert type(model["tower"][0]) is nn.Linear
    assert type(model["table"]) is nn.Embedding


def test_boundaries_of_a_class_of_their_own() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), Own(8, 2))
    fastemb.convert(model)
    with pytest.raises(ValueError, match="revert: 1 is a Own, a class of its own"):
        fastemb.revert(model)
    fastemb.revert(model, skip=["1"])
    assert type(model[0]) is nn.Embedding
