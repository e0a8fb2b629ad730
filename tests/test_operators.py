"""The operators of every backend against float64 loops: the numerics contract of ``csrc/ops.h``.

One suite for all backends (see the ``backend`` fixture). Interpreted Triton has a process of its
own: ``TRITON_INTERPRET=1 FASTEMB_BACKEND=triton pytest tests/test_operators.py -k triton``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Backend, backend_params, interpreting_triton
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from lookups import DTYPES, Case, assert_same_bits
from row_fused_cases import documented_gradient
from same_bits import digest_of, digests_of_levels, use_threads
from strategies import lookups
from tolerance import Expected, maxima, pooled, row_gradient, rows_in_use, sample_gradient, winners
from torch import Tensor

# An interpreted step takes about a millisecond.
LARGEST = 10_000 if interpreting_triton() else 200_000
examples = drawn(5 if interpreting_triton() else 40)
any_lookup = lookups(largest=LARGEST)
low_precision = [torch.float16, torch.bfloat16]


def accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_case(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None = None,
    mode: str = "sum",
    samples: Tensor | None = None,
    **changes: object,
) -> Case:
    num_bags = indices.shape[0] if offsets is None else offsets.numel()
    if changes.get("include_last_offset"):
        num_bags -= 1
    grad = torch.linspace(-2, 2, num_bags * weight.shape[1]).reshape(num_bags, weight.shape[1])
    case = Case(
        weight=weight,
        indices=indices,
        offsets=offsets,
        per_sample_weights=samples,
        mode=mode,
        padding_idx=-1,
        include_last_offset=False,
        scale_grad_by_freq=False,
        output_dtype=weight.dtype,
        grad_output=grad.to(weight.dtype),
    )
    return replace(case, **changes)


def check_forward(backend: Backend, case: Case) -> None:
    output, argmax = case.to(backend.device).forward(backend.ops)
    assert output.dtype == case.output_dtype
    assert output.is_contiguous()
    if case.mode == "max":
        places = winners(case)
        assert argmax.dtype == torch.int32
        assert np.array_equal(argmax.cpu().numpy(), places)
        assert_same_bits(output.cpu(), maxima(case, places))
        return
    assert argmax.numel() == 0
    pooled(case).check(output, case.acc)


def check_backward(backend: Backend, case: Case, dense: bool) -> None:
    there = case.to(backend.device)
    argmax = there.forward(backend.ops)[1] if case.mode == "max" else None
    grad = there.backward(backend.ops, dense, argmax)
    assert grad.dtype == case.acc
    expected = row_gradient(case)
    if not dense:
        used = list(rows_in_use(case))
        expected = Expected(expected.value[used], expected.size[used], expected.terms[used])
    expected.check(grad, case.acc)


def check(backend: Backend, case: Case) -> None:
    """Forward and every gradient."""
    check_forward(backend, case)
    check_backward(backend, case, dense=True)
    check_backward(backend, case, dense=False)
    if case.mode != "max":
        there = case.to(backend.device)
        sample_gradient(case).check(there.per_sample_backward(backend.ops), case.acc)


# ---- any lookup --------------------------------------------------------------------------------


@examples
@given(case=any_lookup)
def test_forward(backend: Backend, case: Case) -> None:
    check_forward(backend, case)


@examples
@given(case=any_lookup, dense=st.booleans())
def test_row_gradient(backend: Backend, case: Case, dense: bool) -> None:
    check_backward(backend, case, dense)


@pytest.mark.parametrize("backend", backend_params("cpu", "cuda", "triton"), indirect=True)
@examples
@given(case=any_lookup)
def test_row_gradient_is_the_documented_sum(backend: Backend, case: Case) -> None:
    """In chunks, in order, every operation rounded by itself: bit for bit."""
    there = case.to(backend.device)
    argmax = there.forward(backend.ops)[1] if case.mode == "max" else None
    got = there.backward(backend.ops, False, argmax)
    assert_same_bits(got.cpu(), documented_gradient(case))


@examples
@given(case=lookups(("sum", "mean"), largest=LARGEST))
def test_sample_gradient(backend: Backend, case: Case) -> None:
    got = case.to(backend.device).per_sample_backward(backend.ops)
    sample_gradient(case).check(got, case.acc)


@examples
@given(case=any_lookup)
def test_groups(backend: Backend, case: Case) -> None:
    order, rows, segments, num_rows = (x.cpu() for x in case.to(backend.device).groups(backend.ops))
    expected = rows_in_use(case)
    positions = [p for group in expected.values() for p in group]
    assert num_rows.tolist() == [len(expected)]
    assert rows[: len(expected)].tolist() == list(expected)
    bounds = np.cumsum([0, *map(len, expected.values())]).tolist()
    assert segments[: len(expected) + 1].tolist() == bounds
    assert order[: len(positions)].tolist() == positions
    # The rest of order is made of the positions that take no part.
    assert sorted(order.tolist()) == list(range(case.indices.numel()))


@examples
@given(case=any_lookup)
def test_gather(backend: Backend, case: Case) -> None:
    there = case.to(backend.device)
    got = backend.ops.embedding(
        there.weight, there.indices, case.padding_idx, False, False, case.output_dtype, "t"
    )
    flat = case.indices.reshape(-1).long()
    expected = case.weight[flat].to(case.output_dtype)
    assert_same_bits(got.cpu(), expected.reshape(*case.indices.shape, case.weight.shape[1]))


@examples
@given(
    case=lookups(largest=LARGEST, special=False),
    max_norm=st.sampled_from([0.0, 0.5, 3.0]),
    norm_type=st.sampled_from([1.0, 2.0, 3.0, float("inf")]),
)
def test_renorm(backend: Backend, case: Case, max_norm: float, norm_type: float) -> None:
    original = case.weight.clone()
    there = case.to(backend.device)
    backend.ops.embedding_renorm_(there.weight, there.indices, max_norm, norm_type, "t")
    result = there.weight.cpu()
    before, after = original.double(), result.double()
    named = set(case.indices.reshape(-1).tolist())
    rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(case.weight.dtype, 0.0)
    unit = 2.0**-53 if case.weight.dtype == torch.float64 else 2.0**-24
    for row in range(before.shape[0]):
        norm = float(torch.linalg.vector_norm(before[row], norm_type))
        if row not in named or norm <= max_norm * (1 - 1e-5):
            assert_same_bits(result[row], original[row])
        elif norm > max_norm * (1 + 1e-5):
            expected = before[row] * (max_norm / (norm + 1e-7))
            # powf and a sum of `dim` powers
            loose = rounding + unit * (64 + 2 * case.weight.shape[1])
            bound = loose * expected.abs() + 2.0**-25 * (case.weight.dtype == torch.float16)
            assert bool(((after[row] - expected).abs() <= bound).all())


@examples
@given(case=any_lookup)
def test_same_bits_again_and_for_any_number_of_threads(backend: Backend, case: Case) -> None:
    there = case.to(backend.device)

    def everything() -> list[Tensor]:
        output, argmax = there.forward(backend.ops)
        results = [output, argmax]
        winners = argmax if case.mode == "max" else None
        results += [there.backward(backend.ops, dense, winners) for dense in (True, False)]
        if case.mode != "max":
            results.append(there.per_sample_backward(backend.ops))
        return results

    first = everything()
    # Threads matter to the CPU library only; elsewhere it is the repetition that counts.
    for threads in (1, 2, 3) if backend.name == "cpu" else (torch.get_num_threads(),):
        with use_threads(threads):
            for got, want in zip(everything(), first, strict=True):
                assert_same_bits(got, want)


# ---- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    "dim",
    [1, 33, 4096]
    if interpreting_triton()
    else [1, 3, 4, 7, 31, 32, 127, 129, 1000, 1536, 2047, 4096],
)
def test_dims(backend: Backend, dim: int, mode: str) -> None:
    generator = torch.Generator().manual_seed(dim)
    for dtype in DTYPES:
        weight = torch.randn(5, dim, generator=generator, dtype=torch.float64).to(dtype)
        indices = torch.tensor([4, 0, 1, 1, 3, 0, 1], dtype=torch.int32)
        check(backend, make_case(weight, indices, torch.tensor([0, 3, 3]), mode))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    "length", [257] if interpreting_triton() else [255, 256, 257, 511, 513, 2000]
)
def test_long_bags_and_long_segments(backend: Backend, length: int, mode: str) -> None:
    """Sums of more than one chunk, over a bag and over the occurrences of a row."""
    generator = torch.Generator().manual_seed(length)
    for dtype in (torch.float16,) if interpreting_triton() else (torch.float16, torch.float32):
        weight = torch.randn(3, 4, generator=generator).to(dtype)
        one_row = torch.ones(length, 1, dtype=torch.int64)
        one_row[::7] = 2
        check(backend, make_case(weight, one_row.T.contiguous(), mode=mode))  # one bag
        check(backend, make_case(weight, one_row, mode=mode))  # one row in many bags


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    ("indices", "offsets"),
    [
        ([], []),  # no bags at all
        ([], [0, 0, 0]),  # only empty bags
        ([2, 2], [0, 0, 2, 2]),  # one bag of four has something
        ([1, 1, 1], [0]),  # rows that nothing names
        ([0, 1, 2], []),  # ids, but no bag that holds them
    ],
)
def test_empty_bags(backend: Backend, indices: list[int], offsets: list[int], mode: str) -> None:
    weight = torch.arange(12.0).reshape(4, 3) - 20
    ids = torch.tensor(indices, dtype=torch.int64)
    starts = torch.tensor(offsets, dtype=torch.int64)
    check(backend, make_case(weight, ids, starts, mode))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_empty_2d(backend: Backend, shape: tuple[int, int], mode: str) -> None:
    case = make_case(torch.ones(4, 3), torch.zeros(shape, dtype=torch.int64), mode=mode)
    output, _ = case.to(backend.device).forward(backend.ops)
    assert_same_bits(output.cpu(), torch.zeros(shape[0], 3))
    check_backward(backend, case, dense=True)
    check_backward(backend, case, dense=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_results_are_no_views(backend: Backend, dtype: torch.dtype) -> None:
    """Autograd refuses to have a view that a custom function returns changed in place."""
    weight = torch.ones(4, 3, dtype=dtype, device=backend.device)
    indices = torch.tensor([[0, 1], [2, 3]], device=backend.device)
    rest = (False, False, torch.float32, "")
    for ids in (indices, indices[0, 0]):
        assert not backend.ops.embedding(weight, ids, -1, *rest)._is_view()
    for mode in ("sum", "mean", "max"):
        results = backend.ops.embedding_bag(weight, indices, None, None, mode, -1, False, *rest)
        assert not any(result._is_view() for result in results)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_nothing_behind_the_last_offset_counts(backend: Backend, mode: str) -> None:
    weight = torch.tensor([[1.0, 2], [4, 3], [5, 9], [8, 7]])
    case = make_case(
        weight,
        torch.tensor([0, 1, 2, 3, 3]),
        torch.tensor([0, 2, 4]),
        mode,
        include_last_offset=True,
    )
    expected = {
        "sum": [[5.0, 5], [13, 16]],
        "mean": [[2.5, 2.5], [6.5, 8]],
        "max": [[4.0, 3], [8, 9]],
    }
    output, _ = case.to(backend.device).forward(backend.ops)
    assert output.tolist() == expected[mode]
    check(backend, case)


# ---- what a low-precision accumulator gets wrong ------------------------------------------------


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("dtype", low_precision)
def test_small_terms_are_not_lost(backend: Backend, dtype: torch.dtype, mode: str) -> None:
    """A large term and many small ones: in fp16 or bf16, large + small = large, every time."""
    large = 2048.0 if dtype == torch.float16 else 256.0
    count = 300 if interpreting_triton() else 600  # more than a chunk
    weight = torch.tensor([[large], [1.0]]).to(dtype)
    indices = torch.ones(1, count + 1, dtype=torch.int64)
    indices[0, 0] = 0
    case = make_case(weight, indices, mode=mode, output_dtype=torch.float32)
    output, _ = case.to(backend.device).forward(backend.ops)
    total = large + count
    assert output.item() == (
        total if mode == "sum" else float(np.float32(total) / np.float32(count + 1))
    )
    # The gradient of a row with one large and many small gradients of the output.
    many = make_case(weight, torch.ones(count + 1, 1, dtype=torch.int64), mode=mode)
    grad = torch.ones(count + 1, 1, dtype=dtype)
    grad[0] = large
    there = replace(many, grad_output=grad).to(backend.device)
    assert there.backward(backend.ops, True, None).tolist() == [[0.0], [total]]
    assert there.backward(backend.ops, False, None).tolist() == [[total]]


@pytest.mark.parametrize("dtype", low_precision)
def test_gradients_below_the_range_of_the_table_survive(
    backend: Backend, dtype: torch.dtype
) -> None:
    tiny = 2.0**-120 if dtype == torch.bfloat16 else 2.0**-24
    weight = torch.ones(3, 2, dtype=dtype)
    samples = torch.full((1, 2), 2.0**-10)
    case = make_case(weight, torch.tensor([[1, 2]]), samples=samples)
    case = replace(case, grad_output=torch.full((1, 2), tiny, dtype=dtype)).to(backend.device)
    grad = case.backward(backend.ops, True, None)
    assert grad.tolist() == [[0.0, 0.0], [tiny * 2.0**-10] * 2, [tiny * 2.0**-10] * 2]


def test_frequency_divides_each_row_by_its_own_count(backend: Backend) -> None:
    case = make_case(
        torch.ones(5, 2),
        torch.tensor([4, 4, 0, 2, 2, 2, 3]),
        torch.tensor([0, 3, 5]),
        "mean",
        scale_grad_by_freq=True,
        grad_output=torch.ones(3, 2),
    ).to(backend.device)
    thirds = np.float32(1) / np.float32(3)
    grad = case.backward(backend.ops, True, None)[:, 0].cpu().numpy()
    assert np.allclose(grad, [thirds, 0, 0.5, 0.5, thirds], rtol=1e-6, atol=0)


# ---- values that are no numbers ------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_unnamed_and_padding_rows_never_leak(backend: Backend, mode: str, value: float) -> None:
    weight = torch.arange(20.0).reshape(5, 4)
    weight[3:] = value
    indices, offsets = torch.tensor([3, 0, 3, 1, 2, 3]), torch.tensor([0, 4])
    samples = None if mode == "max" else torch.ones(6)
    case = make_case(weight, indices, offsets, mode, samples, padding_idx=3)
    output, _ = case.to(backend.device).forward(backend.ops)
    assert bool(output.isfinite().all())
    assert float(output.max()) < 100
    check(backend, case)


def test_a_gradient_that_is_no_number_stays_in_its_bag(backend: Backend) -> None:
    case = make_case(torch.ones(4, 2), torch.tensor([[0, 1], [2, 2]]))
    grad = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]])
    there = replace(case, grad_output=grad).to(backend.device)
    got = there.backward(backend.ops, True, None).cpu()
    assert got[:2].tolist() == [[1, 2], [1, 2]]
    assert got[2, 0].isnan()
    assert got[2, 1].isinf()
    assert got[3].tolist() == [0, 0]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_max_keeps_a_nan_wherever_it_stands(backend: Backend, order: list[int]) -> None:
    nan, inf = float("nan"), float("inf")
    weight = torch.tensor([[nan, 1.0, -inf], [2.0, inf, -inf], [3.0, 5.0, -inf]])
    output, argmax = (
        make_case(weight, torch.tensor([order]), mode="max").to(backend.device).forward(backend.ops)
    )
    assert output[0, 0].isnan()
    assert output[0, 1:].tolist() == [inf, -inf]
    assert argmax[0].tolist() == [order.index(0), order.index(1), 0]


def test_max_sends_a_tie_to_the_first(backend: Backend) -> None:
    case = make_case(torch.zeros(4, 2), torch.tensor([[2, 1, 1, 3]]), mode="max")
    there = replace(case, grad_output=torch.tensor([[5.0, 7.0]])).to(backend.device)
    _, argmax = there.forward(backend.ops)
    grad = there.backward(backend.ops, True, argmax)
    assert grad.tolist() == [[0, 0], [0, 0], [5, 7], [0, 0]]


@pytest.mark.parametrize("dim", [2, 16, 33])
def test_max_has_the_sign_of_the_first_of_equal_zeros(backend: Backend, dim: int) -> None:
    weight = torch.tensor([[-0.0], [0.0]]).expand(2, dim).contiguous()
    case = make_case(weight, torch.tensor([[0, 1], [1, 0]]), mode="max").to(backend.device)
    output, _ = case.forward(backend.ops)
    assert_same_bits(output.cpu(), weight)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["transposed", "strided columns", "padded rows", "misaligned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_of_the_table(backend: Backend, dtype: torch.dtype, layout: str) -> None:
    rows, dim = 6, 40
    values = torch.randn(rows, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = {
        "transposed": lambda: values.t().contiguous().t(),
        "strided columns": lambda: values.repeat_interleave(2, dim=1)[:, ::2],
        "padded rows": lambda: torch.cat([values, values * torch.nan], dim=1)[:, :dim],
        "misaligned": lambda: torch.cat([values.new_zeros(1), values.reshape(-1)])[1:].reshape(
            rows, dim
        ),
    }[layout]()
    indices = torch.tensor([[5, 0, 5], [1, 2, 2]])
    for mode in ("sum", "mean", "max"):
        there = make_case(values, indices, mode=mode).to(backend.device)
        moved = make_case(weight, indices, mode=mode).to(backend.device)
        assert moved.weight.stride() == weight.stride()
        for x, y in zip(moved.forward(backend.ops), there.forward(backend.ops), strict=True):
            assert_same_bits(x, y)
    # An in-place operator must write through the layout.
    before = values.clone()
    for case in (moved, there):
        backend.ops.embedding_renorm_(case.weight, case.indices, 0.5, 2.0, "t")
    assert_same_bits(moved.weight.contiguous(), there.weight)
    assert not torch.equal(there.weight.cpu(), before)


@pytest.mark.parametrize("backend", backend_params("cpu", "reference", "triton"), indirect=True)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_more_than_2_31_elements(backend: Backend, index_dtype: torch.dtype) -> None:
    """The row begins at element 2^31 + 320. Nearly all pages of the table stay untouched."""
    rows, dim, row = 2**25 + 8, 64, 2**25 + 5
    weight = torch.empty(rows, dim, dtype=torch.float16, device=backend.device)
    weight[row], weight[3] = 1.5, 2.0
    indices = torch.tensor([[row, 3]], dtype=index_dtype, device=backend.device)
    for mode, expected in (("sum", 3.5), ("max", 2.0)):
        case = make_case(torch.ones(1, dim, dtype=torch.float16), indices[:, :1], mode=mode)
        there = replace(case, weight=weight, indices=indices)
        there = replace(there, grad_output=torch.ones_like(weight[:1]))
        output, argmax = there.forward(backend.ops)
        assert output.unique().tolist() == [expected]
        grad = there.backward(backend.ops, False, argmax if mode == "max" else None)
        assert grad.float().unique(dim=1).tolist() == (
            [[1.0], [1.0]] if mode == "sum" else [[1.0], [0.0]]
        )
        assert there.groups(backend.ops)[1].tolist() == [3, row]
    gathered = backend.ops.embedding(weight, indices, -1, False, False, torch.float32, "t")
    assert gathered[0, 0].unique().tolist() == [1.5]
    backend.ops.embedding_renorm_(weight, indices[:, :1], 1.0, float("inf"), "t")
    assert weight[row].unique().tolist() == [1.0]


# ---- the CPU library -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", backend_params("cpu"), indirect=True)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_bits_as_torch(backend: Backend, dtype: torch.dtype, mode: str) -> None:
    """Within one chunk torch sums in the same order, so that nothing differs at all."""
    generator = torch.Generator().manual_seed(5)
    for dim in (1, 3, 8, 17, 64, 128):
        weight = torch.randn(50, dim, generator=generator, dtype=dtype)
        lengths = torch.tensor([0, 1, 2, 3, 20, 100, 256, 5])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
        indices = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
        expected = torch.nn.functional.embedding_bag(indices, weight, offsets, mode=mode)
        output, _ = make_case(weight, indices, offsets, mode).forward(backend.ops)
        assert torch.equal(output, expected)


def digest(ops: Any) -> str:
    """Of all that some calls write."""
    results = []
    generator = torch.Generator().manual_seed(3)
    kinds = itertools.product(
        DTYPES, ("sum", "mean", "max"), (1, 7, 16, 100, 129), (torch.int32, torch.int64)
    )
    for dtype, mode, dim, index_dtype in kinds:
        weight = (torch.randn(30, dim, generator=generator, dtype=torch.float64) * 3).to(dtype)
        indices = torch.randint(0, 30, (700,), generator=generator, dtype=index_dtype)
        samples = torch.randn(700, generator=generator) if dim % 2 and mode != "max" else None
        grad = torch.randn(6, dim, generator=generator).to(dtype)
        offsets = torch.tensor([0, 0, 1, 5, 40, 330])
        case = Case(weight, indices, offsets, samples, mode, 7, False, mode == "mean", dtype, grad)
        output, argmax = case.forward(ops)
        results += [output, argmax, case.backward(ops, True, argmax if mode == "max" else None)]
        if mode != "max":
            results.append(case.per_sample_backward(ops))
        ops.embedding_renorm_(weight, indices[:50], 2.0, 2.0, "t")
        results.append(weight)
    return digest_of(results)


@pytest.mark.parametrize("backend", backend_params("cpu"), indirect=True)
def test_same_bits_for_every_instruction_set(backend: Backend) -> None:
    digests = digests_of_levels("test_operators")
    assert len(set(digests.values())) == 1, digests
