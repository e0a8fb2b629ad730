"""Row steps that are fused with the backward, on the CUDA kernels under ``emu/cuda_emu.h``.

Bit for bit what the backward and an unfused step of the same kernels give, and what the CPU backend
gives. `test_sanitized` runs this file again on a build with AddressSanitizer and UBSan.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emu import backend as emu_backend
from emu import rows_backend
from emu.sanitizer import run_sanitized
from emu.suite import BLOCK, SANITIZE, examples_of, needs_tools, orders
from fused_steps import (
    TRAP,
    FusedStep,
    fused_steps,
    grouped,
    step_after,
)
from hypothesis import given
from hypothesis import strategies as st
from lookups import Case, assert_same_bits, assert_same_states, cases, one_bag
from row_cases import OPERATORS, number
from row_model import assert_same_bytes

from fastemb import _reference as reference

pytestmark = needs_tools
examples = examples_of(50, sanitized=8)


@pytest.fixture(scope="module")
def lookups() -> emu_backend.EmuBackend:
    return emu_backend.load(BLOCK, sanitize=SANITIZE)


@pytest.fixture(scope="module")
def emu() -> rows_backend.EmuRows:
    return rows_backend.load(BLOCK, sanitize=SANITIZE)


# ---- the terms ----------------------------------------------------------------------------------


@examples
@given(case=cases(("sum", "mean")), order=orders)
def test_bag_terms(lookups: emu_backend.EmuBackend, case: Case, order: tuple[str, int]) -> None:
    lookups.set_order(*order)
    positions, _, segments, num_rows = case.groups(lookups)
    covered = int(segments[int(num_rows)])
    got = case.terms(lookups, positions)
    want = case.terms(reference, positions)
    assert got[1].shape == want[1].shape
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a[:covered], b[:covered])


@examples
@given(case=cases(("sum", "mean")))
def test_bag_terms_cpu_bits(lookups: emu_backend.EmuBackend, cpu: Any, case: Case) -> None:
    positions, _, segments, num_rows = case.groups(lookups)
    covered = int(segments[int(num_rows)])
    got, want = (case.terms(backend, positions) for backend in (lookups, cpu))
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a[:covered], b[:covered])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_positions_of_no_bag(
    lookups: emu_backend.EmuBackend, emu: rows_backend.EmuRows, mode: str
) -> None:
    """Offsets that the forward has reported: the terms of wrong bags are left out."""
    case = replace(
        one_bag([1.0, 2.0, 3.0, 4.0, 5.0], mode),
        indices=torch.tensor([0, 1, 2, 3, 1]),
        offsets=torch.tensor([0, 2, 9]),
        per_sample_weights=torch.ones(5),
        grad_output=torch.tensor([[1.0], [2.0], [3.0]]),
    )
    sources, coefficients = case.terms(lookups, torch.arange(5, dtype=torch.int32))
    assert sources.tolist() == [0, 0, -1, -1, -1]
    assert coefficients.tolist() == [{"sum": 1.0, "mean": 0.5}[mode]] * 2 + [0.0] * 3
    for op in OPERATORS:
        step_after(case, op).check(lookups, emu)


def test_order_of_nothing(lookups: emu_backend.EmuBackend) -> None:
    """Numbers that are no position are not followed."""
    case = replace(one_bag([1.0, 2.0, 3.0], "sum"), per_sample_weights=torch.ones(1, 3))
    order = torch.tensor([3, -1, TRAP], dtype=torch.int32)
    sources, coefficients = case.terms(lookups, order)
    assert sources.tolist() == [-1, -1, -1]
    assert coefficients.tolist() == [0.0, 0.0, 0.0]


# ---- the steps ----------------------------------------------------------------------------------


@examples
@given(case=fused_steps(), misaligned=st.booleans(), order=orders)
def test_same_bits_as_unfused(
    lookups: emu_backend.EmuBackend,
    emu: rows_backend.EmuRows,
    case: FusedStep,
    misaligned: bool,
    order: tuple[str, int],
) -> None:
    lookups.set_order(*order)
    emu.set_order(*order)
    case.check(lookups, rows_backend.Misaligned(emu) if misaligned else emu)


@examples
@given(case=fused_steps(), order=orders)
def test_cpu_bits(
    lookups: emu_backend.EmuBackend,
    emu: rows_backend.EmuRows,
    cpu: Any,
    case: FusedStep,
    order: tuple[str, int],
) -> None:
    emu.set_order(*order)
    assert_same_states(case.fused(lookups).run(emu), case.fused(cpu).run(cpu))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("op", OPERATORS)
def test_long_segments(
    lookups: emu_backend.EmuBackend,
    emu: rows_backend.EmuRows,
    op: str,
    dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> None:
    """More chunks than are on the way at once, whole chunks, and short segments between them."""
    many = [2, 2600, 256, 0, 257, 512, 1, 1025]
    for seed, (lengths, dim, mode, weighted) in enumerate(
        (
            (many, 1, "sum", False),
            (many, 3, "sum", True),
            (many, 8, "mean", True),
            ([3, 600], 40, "mean", False),
            ([3, 257], 264, "sum", True),
        )
    ):
        lookup = grouped(
            lengths, dim, dtype, grad_dtype=grad_dtype, mode=mode, weighted=weighted, seed=seed
        )
        for backend in (lookups, emu):
            backend.set_order("shuffled", seed)
        step_after(lookup, op, row_count=seed == 2, weight_decay=0.1 * seed).check(lookups, emu)


@pytest.mark.parametrize("seed", range(6))
def test_windows_of_two_long_segments(
    lookups: emu_backend.EmuBackend, emu: rows_backend.EmuRows, seed: int
) -> None:
    """Segments just above a chunk, at every phase to the windows: SGD adds up their lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(250, 530, (9,), generator=generator).tolist()
    lookup = grouped(lengths, 1, seed=seed)
    lookup = replace(lookup, grad_output=torch.ones_like(lookup.grad_output))
    emu.set_order("shuffled", seed)
    step = step_after(lookup, "row_sgd_", momentum=0.0, lr=-1.0, scale=0.0).fused(lookups)
    assert step.run(emu)["param"].flatten().tolist() == [float(n) for n in lengths]


@pytest.mark.parametrize("found_inf", [1.0, 2.0, torch.nan])
@pytest.mark.parametrize("op", OPERATORS)
def test_skipped_step_writes_nothing(
    lookups: emu_backend.EmuBackend, emu: rows_backend.EmuRows, op: str, found_inf: float
) -> None:
    lookup = grouped([3, 300], 8, torch.float16)
    step = step_after(lookup, op, row_step=True, row_count=True).fused(lookups)
    got = replace(step, found_inf=number(found_inf)).run(emu)
    assert emu.partials is not None
    assert bool(emu.partials.isnan().all())
    for name, tensor in step.before().items():
        assert_same_bytes(got[name], tensor)
    assert not torch.equal(step.run(emu)["param"], step.memory)
    assert not bool(emu.partials.isnan().all())


@pytest.mark.parametrize("used", [-1, 0, 1, 2, 3, TRAP])
@pytest.mark.parametrize("op", OPERATORS)
def test_used_rows(
    lookups: emu_backend.EmuBackend, emu: rows_backend.EmuRows, op: str, used: int
) -> None:
    """Only so many rows as count; all of those there are where the number is too large."""
    case = step_after(grouped([300, 2, 400], 8), op)
    fused, unfused = case.fused(lookups), case.unfused(lookups)
    assert fused.rows is not None
    assert fused.segments is not None
    fused = replace(fused, rows=fused.rows[:3], segments=fused.segments[:4])
    number_of_rows = torch.tensor([used], dtype=torch.int32)
    assert_same_states(
        replace(fused, used_rows=number_of_rows).run(emu),
        replace(unfused, used_rows=number_of_rows).run(emu),
    )


@pytest.mark.parametrize("op", OPERATORS)
def test_one_row_of_odd_length(
    lookups: emu_backend.EmuBackend, emu: rows_backend.EmuRows, op: str
) -> None:
    """A table of one row does not make the rows of the gradient begin at whole words."""
    for dim in (9, 13, 515):
        lookup = grouped([1], dim)
        case = step_after(replace(lookup, grad_output=torch.ones(1, dim)), op)
        case.check(lookups, emu)
        step = case.fused(lookups)
        moved = replace(
            step,
            grad=torch.cat([torch.full_like(step.grad, torch.nan), step.grad]),
            sources=torch.ones_like(step.sources),
        )
        assert_same_states(moved.run(emu), step.run(emu))


@pytest.mark.parametrize("op", OPERATORS)
def test_nothing_to_do(lookups: emu_backend.EmuBackend, emu: rows_backend.EmuRows, op: str) -> None:
    """No positions; padding only; no columns."""
    empty = replace(grouped([3], 4), indices=torch.empty(0, dtype=torch.int64))
    padding = replace(grouped([3], 4), padding_idx=0)
    for lookup in (empty, padding, grouped([300], 0)):
        step = step_after(lookup, op).fused(lookups)
        for name, tensor in step.before().items():
            if name != "sum" or lookup.weight.numel():
                assert_same_bytes(step.run(emu)[name], tensor)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(SANITIZE, reason="this is the sanitized run")
def test_sanitized() -> None:
    # The kernel of Adam is that of Adagrad and SGD, too.
    twins = "test_long_segments and (row_adagrad_ or row_sgd_)"
    run_sanitized(Path(__file__), "-k", f"not cpu and not ({twins})")
