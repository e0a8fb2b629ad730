"""``sparse="fused"`` trains with the bits of ``sparse=True``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from draws import drawn
from fused_cases import (  # noqa: F401
    DIM,
    ROWS,
    Twins,
    _no_queue_is_left,
    as_on_a_device,
    waiting,
)
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import CLASSES, bits
from torch import Tensor, nn

from fastemb import functional as F
from fastemb import nn as fnn
from fastemb import optim

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:fastemb.optim.*rows that a sparse gradient"),
]

OPTIONS: dict[type, list[dict[str, Any]]] = {
    optim.Adam: [
        {},
        {"amsgrad": True, "maximize": True},
        {"row_bias_correction": True},
        {"weight_decay": 0.1, "decay": "all"},
        {"lazy": "exact"},
        {"lazy": "exact", "weight_decay": 0.1, "amsgrad": True},
    ],
    optim.AdamW: [{}, {"decay": "touched"}, {"lazy": "exact", "lr": torch.tensor(0.05)}],
    optim.SparseAdam: [{}, {"row_bias_correction": True}],
    optim.Adagrad: [{"weight_decay": 0.1, "lr_decay": 0.1}, {"decay": "all"}],
    optim.RowWiseAdagrad: [{}, {"weight_decay": 0.1}],
    optim.SGD: [{}, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.9, "nesterov": True}],
}
assert set(OPTIONS) == set(CLASSES)
LOW = [{}, {"rounding": "stochastic", "seed": 3}]


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    cls = draw(st.sampled_from(CLASSES))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]))
    options = {"lr": 0.05, **draw(st.sampled_from(OPTIONS[cls]))}
    if dtype in (torch.float16, torch.bfloat16):
        options |= draw(st.sampled_from(LOW))
        if "betas" in cls.__init__.__annotations__ and draw(st.booleans()):
            options["state_dtype"] = torch.bfloat16
    mode = draw(st.sampled_from(["lookup", "sum", "mean", "max"]))
    return {
        "cls": cls,
        "options": options,
        "dtype": dtype,
        "output_dtype": draw(st.sampled_from([None, torch.float32, torch.float64])),
        "mode": mode,
        "padding_idx": draw(st.sampled_from([None, 4])),
        "max_norm": draw(st.sampled_from([None, None, 1.0])),
        "scale_grad_by_freq": mode != "max" and draw(st.booleans()),
        "weighted": mode in ("sum", "mean") and draw(st.booleans()),
        "offsets": draw(st.booleans()),
        "bag_length": draw(st.sampled_from([1, 3])),
        "accumulate": draw(st.sampled_from([1, 1, 2, 3])),
        "twice": draw(st.sampled_from([False, False, True])),
        "scale": draw(st.sampled_from([None, 0.25, 0.3])),
        "on_device": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


def make_model(t: dict[str, Any]) -> nn.Module:
    names = ("dtype", "output_dtype", "padding_idx", "max_norm", "scale_grad_by_freq")
    options = {name: t[name] for name in names}
    torch.manual_seed(t["seed"])
    if t["mode"] == "lookup":
        return fnn.Embedding(ROWS, DIM, sparse=True, **options)
    return fnn.EmbeddingBag(ROWS, DIM, mode=t["mode"], sparse=True, **options)


def make_batch(t: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, ...]:
    bags, length = 4, t["bag_length"]
    ids = torch.randint(0, ROWS, (bags, length), generator=generator)
    if t["mode"] == "lookup":
        return (ids,)
    weights = torch.rand(ids.shape, generator=generator) if t["weighted"] else None
    if not t["offsets"]:
        return (ids, None, weights)
    offsets = torch.randint(0, ids.numel() + 1, (bags,), generator=generator).sort().values
    offsets[0] = 0
    return (ids.flatten(), offsets, None if weights is None else weights.flatten())


@drawn(30)
@given(trainings())
def test_the_bits_of_sparse_true(t: dict[str, Any]) -> None:
    # The unfused path scales the parts of such a sum one by one: only powers of two agree.
    scale = 0.25 if t["scale"] is not None and t["twice"] else t["scale"]
    twins = Twins(make_model(t), t["cls"], **t["options"])
    generator = torch.Generator().manual_seed(t["seed"])
    with pytest.MonkeyPatch.context() as patch:
        if t["on_device"]:
            as_on_a_device(patch)
        for step in range(22):
            batches = [make_batch(t, generator) for _ in range(t["accumulate"])]
            found_inf = torch.tensor(float(step % 7 == 3))

            def train(model: Any, optimizer: Any) -> None:
                optimizer.zero_grad()
                for batch in batches:  # noqa: B023
                    output = model(*batch)
                    if t["twice"]:
                        output = output * 0.7 + model(*batch).flip(0)
                    output.tanh().square().sum().backward()
                if scale is not None:
                    given = (torch.tensor(scale), found_inf)  # noqa: B023
                    optimizer._param_scaling = {model.weight: given}
                optimizer.step()

            twins.run(train)
            twins.assert_equal()
    assert waiting(twins.models[1]) == 0
    if t["options"].get("lazy") == "exact":
        twins.run(lambda _, optimizer: optimizer.flush())
        twins.assert_equal()


@drawn(20)
@given(
    cls=st.sampled_from(CLASSES),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    norm_type=st.sampled_from([2.0, 1.0, float("inf")]),
    mode=st.sampled_from(["sum", "mean", "max"]),
    accumulate=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_clipping(
    cls: type,
    dtype: torch.dtype,
    norm_type: float,
    mode: str,
    accumulate: int,
    seed: int,
) -> None:
    """Among other gradients, with a norm that is that of the sums of rows."""
    torch.manual_seed(seed)
    bag = fnn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=True, dtype=dtype)
    twins = Twins(nn.Sequential(bag, nn.Linear(DIM, 2, dtype=dtype)), cls, lr=0.1)
    norms: list[Any] = []

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        for ids in batches:
            model(ids).square().sum().backward()
        norm = optim.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        norms.append(bits(norm))
        # More that comes after the clipping is not clipped.
        model(batches[0]).sum().backward()
        optimizer.step()

    for _ in range(5):
        batches = [torch.randint(0, ROWS, (4, 3)) for _ in range(accumulate)]
        twins.run(train)
        assert norms[-2] == norms[-1]
        twins.assert_equal()


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_clipping_on_a_device(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is one of more zeros there, which changes the order of its sum."""
    as_on_a_device(monkeypatch)
    torch.manual_seed(0)
    bag = fnn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=True, dtype=torch.float64)
    twins = Twins(bag, optim.SGD, lr=1.0)
    norms = []

    def train(model: Any, optimizer: Any) -> None:
        for ids in (torch.tensor([[1, 2, 2], [3, 1, 1]]), torch.tensor([[7, 2, 1]])):
            model(ids).square().sum().backward()
        norms.append(optim.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()

    twins.run(train)
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-14, atol=0)
    plain, fused = (model.weight for model in twins.models)
    torch.testing.assert_close(fused, plain, rtol=1e-13, atol=0)


def test_clipping_that_raises_changes_nothing() -> None:
    twins = Twins(fnn.EmbeddingBag(ROWS, DIM, sparse=True), optim.SGD, lr=0.1)
    ids = torch.tensor([[1, 2], [1, 3]])

    def train(model: Any, optimizer: Any) -> None:
        model(ids).sum().backward()
        bad = nn.Parameter(torch.zeros(1))
        bad.grad = torch.tensor([float("nan")])
        with pytest.raises(RuntimeError, match="non-finite"):
            optim.clip_grad_norm_([model.weight, bad], 1e-3, error_if_nonfinite=True)
        optimizer.step()

    twins.run(train)
    twins.assert_equal()


class Tied(nn.Module):
    """One table in two modules and in a function, and a second table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.bag = fnn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=True)
        self.row = fnn.Embedding(ROWS, DIM, sparse=True)
        self.row.weight = self.bag.weight
        self.other = fnn.EmbeddingBag(ROWS, DIM, mode="max", sparse=True)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        by_function = F.embedding(ids[:, 0], self.row.weight, sparse=self.row.sparse)
        return self.head(self.bag(ids) * self.row(ids[:, 1]) + by_function + self.other(ids))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("cls", CLASSES)
def test_tied_tables(cls: type, on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_device:
        as_on_a_device(monkeypatch)
    twins = Twins(Tied(), cls, lr=0.05)
    for _ in range(20):
        batches = [torch.randint(0, ROWS, (5, 2)) for _ in range(2)]

        def train(model: Any, optimizer: Any) -> None:
            for ids in batches:  # noqa: B023
                model(ids).tanh().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        twins.run(train)
        twins.assert_equal()


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("cls", CLASSES)
def test_rows_that_occur_often(cls: type, mode: str) -> None:
    """Summed in chunks, in the backward and in the fused step alike."""
    torch.manual_seed(0)
    twins = Twins(fnn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=True), cls, lr=0.1)
    for _ in range(3):
        ids = torch.randint(0, ROWS, (700, 3)).clamp(max=2)

        def train(model: Any, optimizer: Any) -> None:
            optimizer.zero_grad()
            model(ids).tanh().sum().backward()  # noqa: B023
            optimizer.step()

        twins.run(train)
        twins.assert_equal()


def test_more_parts_than_a_queue_keeps() -> None:
    """A table that nobody steps must not hold the gradients of all its lookups."""
    twins = Twins(Tied(), optim.SGD, lr=0.1)
    batches = [torch.randint(0, ROWS, (5, 2)) for _ in range(40)]

    def train(model: Any, optimizer: Any) -> None:
        for ids in batches:
            model(ids).square().sum().backward()
            if model.bag.sparse == "fused":
                assert waiting(model.bag) <= 16
        optimizer.step()

    twins.run(train)
    twins.assert_equal()


def test_gradients_of_the_weights_of_samples() -> None:
    twins = Twins(fnn.EmbeddingBag(ROWS, DIM, mode="mean", sparse=True), optim.Adam, lazy="exact")
    found = []

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        weights = samples.clone().requires_grad_()
        model(ids, per_sample_weights=weights).square().sum().backward()
        optimizer.step()
        found.append(bits(weights.grad))

    for _ in range(20):
        ids, samples = torch.randint(0, ROWS, (4, 3)), torch.rand(4, 3)
        twins.run(train)
        assert found[-2] == found[-1]
        twins.assert_equal()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_zeros_without_memory(mode: str) -> None:
    """What autograd passes on where a tangent or a gradient is zero everywhere."""
    twins = Twins(fnn.EmbeddingBag(ROWS, DIM, mode=mode, sparse=True), optim.SGD, momentum=0.9)

    def train(gradient: Tensor, model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.tensor([[1, 2], [2, 3]])).backward(gradient)
        optimizer.step()

    for gradient in (torch.ones(2, DIM), torch._efficientzerotensor((2, DIM))):
        twins.run(partial(train, gradient))
        twins.assert_equal()


def test_closures_and_skipped_gradients() -> None:
    """A step with a closure, and one without any lookup."""
    twins = Twins(fnn.Embedding(ROWS, DIM, sparse=True), optim.Adam, lr=0.1, lazy="rows")
    ids = torch.tensor([1, 1, 5])

    def train(model: Any, optimizer: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(ids).square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
        optimizer.zero_grad()
        optimizer.step()
        model(ids[:0]).sum().backward()
        optimizer.step()

    for _ in range(3):
        twins.run(train)
        twins.assert_equal()
    assert float(twins.optimizers[1].state[twins.models[1].weight]["step"]) == 6


def test_clipping_within_the_step() -> None:
    twins = Twins(fnn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True), optim.SGD, lr=0.1)

    def train(model: Any, optimizer: Any) -> None:
        model(torch.tensor([[1, 2, 2]])).square().sum().backward()
        optimizer._clip_coefficient = torch.tensor(0.3)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        twins.run(train)
        twins.assert_equal()
