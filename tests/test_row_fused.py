"""Optimizer steps that sum their gradients themselves: the bits of the backward and the step.

One suite for all backends (see the ``backend`` fixture). Interpreted Triton has a process of its
own, as for ``test_operators.py``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Backend, backend_params, interpreting_triton
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from lookups import Case, assert_same_bits
from row_cases import LOW_PRECISION, OPERATORS, make, number, sprinkle
from row_fused_cases import (
    FusedCase,
    documented_gradient,
    documented_terms,
    fused_cases,
)
from row_model import Model, assert_same_bytes
from same_bits import THREADS, digest_of, digests_of_levels, use_threads
from strategies import lookups
from torch import Tensor

LARGEST = 3_000 if interpreting_triton() else 100_000
examples = drawn(5 if interpreting_triton() else 30)
every_operator = pytest.mark.parametrize("op", OPERATORS)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in got:
        assert_same_bits(got[name], want[name])


def check(backend: Backend, case: FusedCase) -> dict[str, Tensor]:
    """Against the two calls it stands for, bit for bit, and against the model."""
    fused, unfused = case.both(backend.ops, backend.device)
    got = fused.run(backend.ops, backend.device)
    assert_same(got, unfused.run(backend.ops, backend.device))
    Model(fused).check(got)
    return got


def lookup(
    dtype: torch.dtype,
    indices: Tensor,
    rows: int,
    dim: int,
    mode: str = "sum",
    *,
    offsets: Tensor | None = None,
    samples: bool = False,
    grad_dtype: torch.dtype | None = None,
    **changes: Any,
) -> Case:
    generator = torch.Generator().manual_seed(indices.numel() + dim)
    bags = indices.shape[0] if offsets is None else offsets.numel()
    if changes.get("include_last_offset"):
        bags -= 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    case = Case(
        weight=normal(rows, dim).to(dtype),
        indices=indices,
        offsets=offsets,
        per_sample_weights=normal(*indices.shape).to(dtype) if samples else None,
        mode=mode,
        padding_idx=-1,
        include_last_offset=False,
        scale_grad_by_freq=False,
        output_dtype=dtype,
        grad_output=normal(bags, dim).to(grad_dtype or dtype),
    )
    return replace(case, **changes)


# ---- any step ----------------------------------------------------------------------------------


@examples
@given(case=fused_cases(LARGEST))
def test_any_step(backend: Backend, case: FusedCase) -> None:
    check(backend, case)


@examples
@given(case=fused_cases(LARGEST), seed=st.integers(0, 2**32))
def test_gradients_that_are_no_numbers(backend: Backend, case: FusedCase, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grad = sprinkle(case.lookup.grad_output, generator)
    samples = case.lookup.per_sample_weights
    if samples is not None:
        samples = sprinkle(samples, generator)
    case = replace(case, lookup=replace(case.lookup, grad_output=grad, per_sample_weights=samples))
    fused, unfused = case.both(backend.ops, backend.device)
    assert_same(fused.run(backend.ops, backend.device), unfused.run(backend.ops, backend.device))


@pytest.mark.parametrize("backend", backend_params("cpu", "cuda", "triton"), indirect=True)
@examples
@given(case=fused_cases(LARGEST))
def test_the_sum_is_the_documented_one(backend: Backend, case: FusedCase) -> None:
    """In chunks, in order, whatever shares the work: bit for bit."""
    fused, unfused = case.both(backend.ops, backend.device)
    documented = replace(unfused, grad=documented_gradient(case.lookup))
    assert_same(fused.run(backend.ops, backend.device), documented.run(backend.ops, backend.device))


# ---- long segments -----------------------------------------------------------------------------


def with_segments(lengths: tuple[int, ...], columns: int) -> Tensor:
    """[positions / columns, columns] ids in any order; row k stands in lengths[k] places."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ids = ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(1))]
    return ids[: ids.numel() // columns * columns].reshape(-1, columns)


# Around chunks and windows of 256 positions, and the 2048 from which CPU threads share one.
LONG: list[tuple[int, ...]] = [(256, 257, 1), (2, 513, 3, 300)]
if not interpreting_triton():
    LONG += [(1, 255, 600), (1, 2047, 2048, 2049), (5, 5000, 2, 3000)]


MODES = (("sum", False), ("sum", True), ("mean", True))


def long_segments() -> list[Any]:
    """Every operator with every mode and all lengths, and every mode with every one of these."""
    return [
        (op, *MODES[(i + k) % len(MODES)], lengths)
        for i, op in enumerate(OPERATORS)
        for k, lengths in enumerate(LONG)
    ]


@pytest.mark.parametrize(("op", "mode", "samples", "lengths"), long_segments(), ids=str)
def test_long_segments(
    backend: Backend, op: str, mode: str, samples: bool, lengths: tuple[int, ...]
) -> None:
    kinds: list[tuple[torch.dtype, torch.dtype | None, int, int]] = [
        (torch.float16, torch.float16, 5, 3),
        (torch.float32, torch.bfloat16, 40, 1),
        (torch.float64, None, 2, 2),
    ]
    for dtype, grad_dtype, dim, columns in kinds[:1] if interpreting_triton() else kinds:
        ids = with_segments(lengths, columns)
        case = lookup(dtype, ids, len(lengths), dim, mode, samples=samples, grad_dtype=grad_dtype)
        step = make(op, dtype, (len(lengths), dim), master=dtype in LOW_PRECISION, amsgrad=True)
        check(backend, FusedCase(case, step))
        if not interpreting_triton():
            check(backend, FusedCase(case, step, used=len(lengths) - 1, trimmed=True))
            check(backend, FusedCase(case, step, outside={1: -1}))


@every_operator
def test_one_row_that_all_positions_name(backend: Backend, op: str) -> None:
    """Also a table of a single row, which kernels share out by columns."""
    for dim in (300,) if interpreting_triton() else (5, 300, 700):
        ids = torch.zeros(150, 2, dtype=torch.int32)
        case = lookup(torch.float32, ids, 1, dim, "mean")
        check(backend, FusedCase(case, make(op, torch.float32, (1, dim), weight_decay=0.1)))


# ---- layouts of the bags -----------------------------------------------------------------------


@pytest.mark.parametrize("padding_idx", [-1, 1])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@every_operator
def test_bags(backend: Backend, op: str, mode: str, padding_idx: int) -> None:
    """Empty bags, repeated rows, bags of nothing but padding, positions behind the last bag."""
    ids = torch.tensor([3, 1, 3, 1, 1, 0, 3, 2, 2])
    layouts: list[tuple[Tensor, dict[str, Any]]] = [
        (ids, {"offsets": torch.tensor([0, 3, 3, 5])}),
        (ids, {"offsets": torch.tensor([0, 3, 3, 5, 7]), "include_last_offset": True}),
        (ids.reshape(3, 3), {}),
        (ids.reshape(1, 9), {}),
        (ids.reshape(9, 1), {}),
    ]
    for (indices, layout), samples in itertools.product(layouts, (False, True)):
        case = lookup(
            torch.float32, indices, 5, 4, mode, samples=samples, padding_idx=padding_idx, **layout
        )
        got = check(backend, FusedCase(case, make(op, torch.float32, (5, 4))))
        named = set(case.groups(backend.ops)[1][: int(case.groups(backend.ops)[3])].tolist())
        assert named == {0, 1, 2, 3} - {padding_idx} - (
            {2} if "include_last_offset" in layout else set()
        )
        assert got["param"].shape == (5, 4)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    ("shape", "offsets"),
    [((0,), []), ((0,), [0, 0, 0]), ((3,), []), ((0, 3), None), ((3, 0), None), ((2, 2), None)],
)
@every_operator
def test_nothing_to_do(
    backend: Backend, op: str, shape: tuple[int, ...], offsets: list[int] | None, mode: str
) -> None:
    """No bags, no positions, nothing but padding: every byte stays as it is."""
    case = lookup(
        torch.float32,
        torch.zeros(shape, dtype=torch.int64),
        3,
        2,
        mode,
        offsets=None if offsets is None else torch.tensor(offsets, dtype=torch.int64),
        padding_idx=0,
    )
    step = make(op, torch.float32, (3, 2), amsgrad=True, row_step=True, row_count=True)
    for trimmed in (False, True):
        fused, _ = FusedCase(case, step, trimmed=trimmed).both(backend.ops, backend.device)
        got = fused.run(backend.ops, backend.device)
        for name, tensor in fused.before().items():
            assert_same_bytes(got[name], tensor)


@pytest.mark.parametrize("found", [1.0, 2.0, -1.0, math.inf, math.nan])
@every_operator
def test_found_inf_leaves_every_byte(backend: Backend, op: str, found: float) -> None:
    ids = with_segments((4 if interpreting_triton() else 300, 2, 1), 1)
    case = lookup(torch.float16, ids, 4, 3, "mean", samples=True)
    step = make(
        op,
        torch.float16,
        (4, 3),
        master=True,
        amsgrad=True,
        row_step=True,
        row_count=True,
        found_inf=number(found),
        weight_decay=0.1,
    )
    fused, _ = FusedCase(case, step).both(backend.ops, backend.device)
    for step_number in (1, 5):
        fused = replace(fused, step=number(step_number))
        got = fused.run(backend.ops, backend.device)
        for name, tensor in fused.before().items():
            assert_same_bytes(got[name], tensor)


@every_operator
def test_number_of_used_rows(backend: Backend, op: str) -> None:
    """More than there are rows is all of them; below zero is none."""
    ids = with_segments((4 if interpreting_triton() else 300, 2, 1), 1)
    case = lookup(torch.float32, ids, 3, 2)
    step = make(op, torch.float32, (3, 2))
    fused, unfused = FusedCase(case, step, trimmed=True).both(backend.ops, backend.device)
    for count in (100, 3, 2, 0, -1):
        used = torch.tensor([count], dtype=torch.int32)
        got = replace(fused, used_rows=used).run(backend.ops, backend.device)
        want = replace(unfused, used_rows=used).run(backend.ops, backend.device)
        assert_same(got, want)
        untouched = all(torch.equal(got[k], v) for k, v in fused.before().items())
        assert untouched == (count <= 0)


# ---- bag_terms ---------------------------------------------------------------------------------


@examples
@given(case=lookups(("sum", "mean"), largest=LARGEST))
def test_terms(backend: Backend, case: Case) -> None:
    there = case.to(backend.device)
    order, _, segments, num_rows = there.groups(backend.ops)
    sources, coefficients = (x.cpu() for x in there.terms(backend.ops, order))
    n, end = case.indices.numel(), int(segments[int(num_rows)])
    all_ones = case.mode == "sum" and case.per_sample_weights is None
    assert (sources.dtype, sources.shape) == (torch.int32, (n,))
    assert (coefficients.dtype, coefficients.shape) == (case.acc, (0 if all_ones else n,))
    terms = documented_terms(case)
    assert len(terms) == end
    want = [terms[position] for position in order.tolist()[:end]]
    assert sources[:end].tolist() == [bag for bag, _ in want]
    if not all_ones:
        factors = torch.tensor([float(factor) for _, factor in want], dtype=case.acc)
        assert_same_bits(coefficients[:end], factors)


@pytest.mark.parametrize("backend", backend_params("cpu", "cuda", "triton"), indirect=True)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mode": "max"}, "mode must be 'sum' or 'mean', got 'max'"),
        ({"acc_dtype": torch.float16}, "acc_dtype must be float32 or float64"),
        ({"order": torch.arange(4)}, "order must be what group_indices made of these indices"),
        (
            {"order": torch.arange(3, dtype=torch.int32)},
            "order must be what group_indices made of these indices",
        ),
        (
            {"order": torch.arange(8, dtype=torch.int32)[::2]},
            "order must be what group_indices made of these indices",
        ),
        (
            {"per_sample_weights": torch.ones(3)},
            "per_sample_weights must have one element per index",
        ),
        ({"indices": torch.zeros(4, dtype=torch.int64)}, "indices must be 2-D without offsets"),
    ],
    ids=str,
)
def test_terms_refuse(backend: Backend, wrong: dict[str, Any], words: str) -> None:
    arguments = {
        "indices": torch.tensor([[0, 1], [1, 2]]),
        "offsets": None,
        "per_sample_weights": None,
        "order": torch.arange(4, dtype=torch.int32),
        "num_embeddings": 3,
        "mode": "sum",
        "padding_idx": -1,
        "include_last_offset": False,
        "acc_dtype": torch.float32,
    }

    def call(changes: dict[str, Any]) -> None:
        given = [
            x.to(backend.device) if isinstance(x, Tensor) and x.is_contiguous() else x
            for x in (arguments | changes).values()
        ]
        backend.ops.bag_terms(*given)

    call({})
    with pytest.raises(ValueError) as error:
        call(wrong)
    assert str(error.value) == f"bag_terms: {words}"


# ---- the CPU library ---------------------------------------------------------------------------


def several_steps(ops: Any, positions: int = 6000, rows: int = 90) -> list[FusedCase]:
    """Every operator; segments of which one is long enough to be shared out, most are short."""
    generator = torch.Generator().manual_seed(2)
    cases = []
    kinds = itertools.product(OPERATORS, (torch.float32, torch.bfloat16), ("sum", "mean"), (5, 65))
    for op, dtype, mode, dim in kinds:
        ids = torch.randint(0, rows, (positions // 5, 5), generator=generator)
        ids[torch.rand(ids.shape, generator=generator) < 0.6] = rows // 2
        case = lookup(dtype, ids, rows, dim, mode, samples=dim == 5, padding_idx=3)
        step = make(
            op,
            dtype,
            (rows, dim),
            master=dtype == torch.bfloat16,
            amsgrad=True,
            step=number(4),
            weight_decay=0.01,
        )
        cases.append(FusedCase(case, step))
    return cases


@pytest.mark.parametrize("backend", backend_params("cpu"), indirect=True)
def test_same_bits_for_any_number_of_threads(backend: Backend) -> None:
    for case in several_steps(backend.ops):
        with use_threads(1):
            first = check(backend, case)
        for threads in THREADS:
            with use_threads(threads):
                fused, unfused = case.both(backend.ops, "cpu")
                assert_same(fused.run(backend.ops), first)
                assert_same(unfused.run(backend.ops), first)


def digest(ops: Any) -> str:
    """Of everything that `several_steps` write."""
    written: list[Tensor] = []
    for case in several_steps(ops, 3000):
        fused, _ = case.both(ops, "cpu")
        assert fused.sources is not None
        end = int(fused.segments[int(fused.used_rows)])  # type: ignore[index, arg-type]
        written.append(fused.sources[:end])
        if fused.coefficients is not None:
            written.append(fused.coefficients[:end])
        written += fused.run(ops).values()
    return digest_of(written)


@pytest.mark.parametrize("backend", backend_params("cpu"), indirect=True)
def test_same_bits_for_every_instruction_set(backend: Backend) -> None:
    digests = digests_of_levels("test_row_fused")
    assert len(set(digests.values())) == 1, digests
