"""The Triton kernels, interpreted on CPU tensors.

Not collected by default: `test_triton` runs this file in a process of its own, because
TRITON_INTERPRET=1 and FASTEMB_BACKEND=triton must be set before Triton and fastemb are imported.
Lookups are kept small: an interpreted step takes about a millisecond.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from lookups import Case, assert_same_bits, assert_within, cases, one_bag
from torch import Tensor

import fastemb
from fastemb import _dense_ops, _native, _record_ops
from fastemb.triton import errors, renorm

assert os.environ.get("TRITON_INTERPRET") == "1"
assert os.environ.get("FASTEMB_BACKEND") == "triton"

triton = _native.backend("triton")
reference = _native.backend("reference")
examples = drawn(12, derandomize=True, database=None)
small = cases().filter(lambda case: case.indices.numel() * case.weight.shape[1] <= 10_000)


def test_the_backend_serves_cpu_tensors() -> None:
    for op, serving in _native.report()["operators"].items():
        # Records have no Triton kernels: the offload engine is tested on CUDA and the CPU.
        has_none = op in _record_ops.SCHEMAS or op in _dense_ops.SCHEMAS
        assert serving["cpu"] == ("reference" if has_none else "triton"), op


# ---- the numerics contract ------------------------------------------------------------------


@examples
@given(case=small)
def test_forward(case: Case) -> None:
    output, argmax = case.forward(triton)
    exact, exact_argmax = case.exact().forward(reference)
    if case.mode == "max":
        assert torch.equal(argmax, exact_argmax)
        assert_same_bits(output, exact.to(case.output_dtype))
        return
    size, _ = case.sizes().forward(reference)
    assert_within(output, exact, size, case.indices.numel(), case.acc)


@examples
@given(case=small, dense=st.booleans())
def test_backward(case: Case, dense: bool) -> None:
    argmax = case.forward(reference)[1] if case.mode == "max" else None
    grad = case.backward(triton, dense, argmax)
    exact = case.exact().backward(reference, dense, argmax)
    size = case.sizes().backward(reference, dense, argmax)
    assert_within(grad, exact, size, case.indices.numel(), case.acc)
    assert_same_bits(case.backward(triton, dense, argmax), grad)


@examples
@given(case=small.filter(lambda case: case.mode != "max"))
def test_per_sample_backward(case: Case) -> None:
    exact = case.exact().per_sample_backward(reference)
    size = case.sizes().per_sample_backward(reference)
    assert_within(case.per_sample_backward(triton), exact, size, case.weight.shape[1], case.acc)


@examples
@given(case=small)
def test_gather(case: Case) -> None:
    arguments = (case.weight, case.indices, -1, False, False, case.output_dtype, "t")
    assert_same_bits(triton.embedding(*arguments), reference.embedding(*arguments))


@examples
@given(case=small, norm_type=st.sampled_from([1.0, 2.0, 3.0, 0.5, float("inf")]))
def test_renorm(case: Case, norm_type: float) -> None:
    table, expected = case.weight, case.weight.double()
    max_norm = 0.7 * float(torch.linalg.vector_norm(expected[0], norm_type))
    triton.embedding_renorm_(table, case.indices, max_norm, norm_type, "t")
    reference.embedding_renorm_(expected, case.indices, max_norm, norm_type, "t")
    # The norm's relative error, through a root that may be a square; then one rounding.
    assert_within(table, expected, expected.abs(), 4 * table.shape[1], case.acc)


def test_norm_limit_of_a_float64_table_is_float64() -> None:
    table = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    triton.embedding_renorm_(table, torch.tensor([0]), 0.1, 2.0, "")
    factor = 0.1 / (5.0 + 1e-7)
    assert table[0].tolist() == pytest.approx([3.0 * factor, 4.0 * factor], rel=1e-15)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("lengths", [(256, 257, 1), (1, 255, 600), (255, 2, 513), (1030, 3, 300)])
def test_long_segments_at_the_edges_of_windows(lengths: tuple[int, ...], dense: bool) -> None:
    """Small whole numbers add up exactly in any order: the bits must be the reference's."""
    indices = torch.repeat_interleave(torch.arange(len(lengths)) * 2, torch.tensor(lengths))
    generator = torch.Generator().manual_seed(0)
    indices = indices[torch.randperm(indices.numel(), generator=generator)].reshape(-1, 1)
    grad = torch.randint(-8, 8, (indices.numel(), 3), generator=generator).float()
    groups = reference.group_indices(indices, None, 6, -1, False)
    rest = (*groups, 6, 6 if dense else 3, "sum", -1, False, False, dense, torch.float32)
    arguments = (grad, indices, None, None, None, *rest)
    got = triton.embedding_bag_backward(*arguments)
    assert_same_bits(got, reference.embedding_bag_backward(*arguments))


@pytest.mark.parametrize(
    ("values", "winner"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([float("-inf")] * 20, 0),
        ([2.0, float("nan"), float("inf"), float("nan")], 1),
        ([0.0] * 17 + [float("inf")] * 20, 17),
        ([float("nan")] * 40, 0),
        ([-1.0] * 30 + [float("nan")], 30),
        ([-1.0, -0.0, 0.0], 1),
        ([-1.0, 0.0, -0.0], 1),
    ],
)
def test_first_winner(values: list[float], winner: int) -> None:
    output, argmax = one_bag(values, "max").forward(triton)
    assert argmax.item() == winner
    assert_same_bits(output, torch.tensor([[values[winner]]]))


# ---- conversions ----------------------------------------------------------------------------


def looked_up(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values after a lookup that rounds them to ``dtype``."""
    table = values.reshape(1, -1)
    row = torch.tensor([0])
    return triton.embedding(table, row, -1, False, False, dtype, "").reshape(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_from_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (4000,), generator=generator).to(torch.int32)
    ties = (bits & ~0xFFFF) | 0x8000
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.9, 65520.0])
    tiny = torch.linspace(-(2.0**-13), 2.0**-13, 999)
    values = torch.cat([bits.view(torch.float32), ties.view(torch.float32), special, tiny])
    assert_same_bits(looked_up(values, dtype), values.to(dtype))


def test_rounding_from_float64_is_one_rounding() -> None:
    """Just above and below a tie of bf16, by less than float32 can tell."""
    step, hair = 2.0**-7, 2.0**-45
    tie = 1 + step / 2
    values = [tie, tie + hair, tie - hair, -tie - hair, 1 + 1.5 * step - hair, 2.0**-140]
    rounded = [1.0, 1 + step, 1.0, -1 - step, 1 + step, 0.0]
    got = looked_up(torch.tensor(values, dtype=torch.float64), torch.bfloat16)
    assert got.tolist() == rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_widening_is_exact(dtype: torch.dtype, wide: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert_same_bits(looked_up(values, wide), values.to(wide))


# ---- errors ---------------------------------------------------------------------------------


def bag(indices: list[int], offsets: list[int], last: bool = False) -> tuple[object, ...]:
    table = torch.arange(6.0).reshape(3, 2)
    return (table, torch.tensor(indices), torch.tensor(offsets), None, "sum", -1, last)


WRONG_BAGS = [
    bag([0, 3], [0]),
    bag([0, 1, -1, 7], [0, 1]),
    bag([0, 1], [1]),
    bag([0, 1, 2], [0, 2, 1]),
    bag([0, 1, 2], [0, 2, 1], last=True),
    bag([0, 1, 2], [0, 4]),
    bag([0, 1, 2], [0, 1, 4], last=True),
    bag([0, 1, 2], [0, -1, 2]),
    bag([0, 1, 2], [1], last=True),
]


@pytest.mark.parametrize("arguments", WRONG_BAGS)
@pytest.mark.parametrize("mode", ["mean", "max"])
def test_wrong_bags(arguments: tuple[object, ...], mode: str) -> None:
    arguments = (*arguments[:4], mode, *arguments[5:], False, False, torch.float32, "users")
    with pytest.raises((IndexError, ValueError)) as want:
        reference.embedding_bag(*arguments)
    with pytest.raises((IndexError, ValueError)) as got:
        triton.embedding_bag(*arguments)
    assert (got.type, str(got.value)) == (want.type, str(want.value))
    one_bag([1.0], "sum").forward(triton)  # nothing is left pending


@pytest.mark.parametrize("indices", [[0, 1, 3], [-1], [2**40, 0]])
@pytest.mark.parametrize("table", ["", "items"])
def test_wrong_ids(indices: list[int], table: str) -> None:
    arguments = (torch.zeros(3, 0), torch.tensor(indices), -1, False, False, torch.float32, table)
    with pytest.raises(IndexError) as want:
        reference.embedding(*arguments)
    with pytest.raises(IndexError) as got:
        triton.embedding(*arguments)
    assert str(got.value) == str(want.value)


def test_wrong_ids_leave_the_table_alone() -> None:
    table = torch.full((3, 4), 9.0)
    with pytest.raises(
        IndexError, match=r"^embedding_renorm_: index 5 at position 1 .* 'u' with 3"
    ):
        triton.embedding_renorm_(table, torch.tensor([0, 5]), 1.0, 2.0, "u")
    assert bool((table == 9).all())


def test_first_error_is_kept_and_raised_once() -> None:
    """On a device nothing is raised at once: many programs report, one of them is heard."""
    device = torch.device("cpu")
    status, caller = errors.status_of(device), errors.caller_of("op", "t")
    indices = torch.tensor([0, 8, 9] * 40)
    renorm.check_indices_kernel[(2,)](indices, status, caller, indices.numel(), 3, ROWS=64)
    with pytest.raises(
        IndexError, match=r"^op: index 8 at position 1 is out of range for table 't'"
    ):
        errors.check_errors()
    errors.check_errors()


def test_words_are_zero_before_another_stream_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device, words = torch.device("cuda", 0), torch.zeros(4, dtype=torch.int64)
    waited: list[torch.device] = []

    def current_stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(errors, "_status", {})
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: words)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    for _ in range(2):
        assert errors.status_of(device) is words
    assert waited == [device]  # once, not at each launch


@pytest.mark.parametrize("value", [None, "", "0", "1", "true"])
@pytest.mark.parametrize("capturing", [False, True])
def test_checks_at_once(
    monkeypatch: pytest.MonkeyPatch, capturing: bool, value: str | None
) -> None:
    """They are asked for as with the CUDA library, and spare the capture of a graph."""
    device = torch.device("cuda", 0)
    claim = errors.caller_of("op", "t") * errors.KINDS.value + errors.BAD_INDEX.value
    monkeypatch.setitem(errors._status, device, torch.tensor([claim, 1, 8, 3]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    if value is None:
        monkeypatch.delenv("FASTEMB_SYNC_CHECKS", raising=False)
    else:
        monkeypatch.setenv("FASTEMB_SYNC_CHECKS", value)
    if capturing or value not in ("1", "true"):
        errors.settle(device)
        return
    with pytest.raises(IndexError, match=r"^op: index 8 at position 1"):
        errors.settle(device)


def test_a_pending_error_surfaces_in_the_sparse_backward() -> None:
    device = torch.device("cpu")
    indices = torch.tensor([[4]])
    arguments = (indices, errors.status_of(device), errors.caller_of("embedding_bag", ""), 1, 3)
    renorm.check_indices_kernel[(1,)](*arguments, ROWS=1)
    groups = reference.group_indices(indices, None, 3, -1, False)
    with pytest.raises(IndexError, match=r"^embedding_bag: index 4 at position 0"):
        triton.embedding_bag_backward(
            torch.zeros(1, 2), indices, None, None, None, *groups, 3, 0, "sum", -1, False, False,
            False, torch.float32,
        )  # fmt: skip


# ---- models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_training(mode: str, sparse: bool) -> None:
    torch.manual_seed(0)
    theirs = torch.nn.EmbeddingBag(20, 5, mode=mode, padding_idx=3)
    ours = fastemb.nn.EmbeddingBag(20, 5, mode=mode, padding_idx=3, sparse=sparse)
    ours.load_state_dict(theirs.state_dict())
    steps = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (theirs, ours)]
    losses: list[Tensor] = []
    for _ in range(3):
        indices, offsets = torch.randint(20, (12,)), torch.tensor([0, 5, 5, 9])
        for module, step in zip((theirs, ours), steps, strict=True):
            step.zero_grad()
            loss = module(indices, offsets).square().sum()
            loss.backward()
            step.step()
            losses.append(loss.detach())
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(losses[1::2], losses[::2], rtol=1e-5, atol=0)


def test_training_of_sample_weights() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    samples = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(6, (2, 4))

    def lookup(weight: Tensor, samples: Tensor) -> Tensor:
        return fastemb.functional.embedding_bag(
            indices, weight, mode="mean", per_sample_weights=samples, padding_idx=0
        )

    assert torch.autograd.gradcheck(lookup, (weight, samples))
