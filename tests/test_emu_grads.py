"""Gradient scaling by the CUDA kernels on the CPU, under the shim of ``emu/cuda_emu.h``.

Compared with NumPy and with the CPU kernels: what is unscaled, counted and flagged to the bit, sums
of squares, whose order is a backend's own, closely. `test_sanitized` runs this file again on a
build with AddressSanitizer and UBSan.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emu import grads_backend
from emu.sanitizer import run_sanitized
from emu.suite import BLOCK, SANITIZE, examples_of, needs_tools, orders
from grad_cases import (
    DTYPES,
    EVERYTHING,
    Boundary,
    Check,
    Rows,
    Scales,
    Tensors,
    boundaries,
    rows,
    scales,
    tensors,
    terms,
    values,
)
from hypothesis import given
from hypothesis import strategies as st
from lookups import assert_same_bits
from torch import Tensor

pytestmark = needs_tools
examples = examples_of(50, sanitized=12)


@pytest.fixture(scope="module")
def emu() -> grads_backend.EmuGrads:
    return grads_backend.load(BLOCK, sanitize=SANITIZE)


def placed(x: Tensor, offset: int) -> Tensor:
    """The same, that many elements behind the start of its memory."""
    return x.new_empty(x.numel() + offset)[offset:].view(x.shape).copy_(x)


class Misaligned:
    """A backend whose gradients begin one element behind a word of 16 bytes."""

    def __init__(self, backend: grads_backend.EmuGrads) -> None:
        self.backend = backend

    def grad_check_(self, grads: list[Tensor], *others: Any) -> None:
        moved = [placed(grad, 1) for grad in grads]
        self.backend.grad_check_(moved, *others)
        for old, new in zip(grads, moved, strict=True):
            old.copy_(new)

    def row_grad_check_(self, grad: Tensor, *others: Any) -> None:
        moved = placed(grad, 1)
        self.backend.row_grad_check_(moved, *others)
        grad.copy_(moved)

    def boundary_gradient(self, grad: Tensor, *others: Any) -> Tensor:
        return self.backend.boundary_gradient(placed(grad.contiguous(), 1), *others)


def same_squares(got: Any, want: Any) -> None:
    assert (got.square_sums is None) == (want.square_sums is None)
    if got.square_sums is not None:
        assert_same_bits(got.square_sums, want.square_sums)


# ---- any call ----------------------------------------------------------------------------------


@examples
@given(case=tensors(), order=orders)
def test_tensors(emu: grads_backend.EmuGrads, case: Tensors, order: tuple[str, int]) -> None:
    """The squares have the same bits in any order of threads, and wherever the memory begins."""
    want = case.expected()
    emu.set_order(*order)
    got = case.run(emu)
    got.check(want)
    misaligned = case.run(Misaligned(emu))
    misaligned.check(want)
    same_squares(misaligned, got)
    emu.set_order("forward")
    same_squares(case.run(emu), got)


@examples
@given(case=rows(), order=orders)
def test_rows(emu: grads_backend.EmuGrads, case: Rows, order: tuple[str, int]) -> None:
    emu.set_order(*order)
    got = case.run(emu)
    got.check(case.expected())
    misaligned = case.run(Misaligned(emu))
    misaligned.check(case.expected())
    same_squares(misaligned, got)


@examples
@given(case=terms(), order=orders)
def test_sums_of_terms(emu: grads_backend.EmuGrads, case: Rows, order: tuple[str, int]) -> None:
    """As the rows that they are the sums of, to the last bit of the squares."""
    emu.set_order(*order)
    got = case.run(emu)
    got.check(case.expected())
    misaligned = case.run(Misaligned(emu))
    misaligned.check(case.expected())
    same_squares(misaligned, got)
    same_squares(case.summed(case.rows()).run(emu), got)


@examples
@given(case=boundaries(), order=orders, misaligned=st.booleans())
def test_boundaries(
    emu: grads_backend.EmuGrads, case: Boundary, order: tuple[str, int], misaligned: bool
) -> None:
    emu.set_order(*order)
    case.run(Misaligned(emu) if misaligned else emu).check(case.expected())


@examples
@given(case=scales())
def test_scales(emu: grads_backend.EmuGrads, case: Scales) -> None:
    for got, want in zip(case.run(emu), case.expected(), strict=True):
        assert_same_bits(got[0], want[0])
        assert torch.equal(got[1], want[1])


@examples
@given(case=st.one_of(tensors(), rows(), terms(), boundaries()), order=orders)
def test_as_the_cpu_kernels(
    emu: grads_backend.EmuGrads, cpu: Any, case: Any, order: tuple[str, int]
) -> None:
    emu.set_order(*order)
    case.run(emu).check(case.run(cpu))


# ---- one thing at a time -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_gradients(emu: grads_backend.EmuGrads, dtype: torch.dtype) -> None:
    """More chunks than blocks, and an end that fills no granule."""
    for numel in (8 * 8192, 9 * 8192 + 13):
        case = Tensors([values((numel,), dtype, numel, 5)], Check(0.5, EVERYTHING, True))
        emu.set_order("shuffled", numel)
        case.run(emu).check(case.expected())


def test_blocks_that_share_tensors(emu: grads_backend.EmuGrads) -> None:
    """Chunks of several tensors in one block, and tensors in several blocks, in one launch."""
    lengths = (3, 0, 8192, 8191, 30_000, 1, 0, 16_385, 5)
    grads = [values((n,), torch.float16, n, 0) for n in lengths]
    for asked in (EVERYTHING, frozenset({"square_sums"}), frozenset({"stats"})):
        for seed in range(3):
            emu.set_order("shuffled", seed)
            case = Tensors(grads, Check(2.0, asked))
            case.run(emu).check(case.expected())


@pytest.mark.parametrize("more", [-1, 0, 1, 200])
def test_more_tensors_than_a_launch_takes(emu: grads_backend.EmuGrads, more: int) -> None:
    count = emu.module.tensors_of_a_launch + more
    grads = [values((i % 5,), torch.bfloat16, i, 0) for i in range(count)]
    grads.append(torch.full((2,), torch.nan, dtype=torch.bfloat16))
    case = Tensors(grads, Check(0.5, EVERYTHING, True))
    case.run(emu).check(case.expected())


@pytest.mark.parametrize("dim", [1, 8, 12, 40, 260, 8200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_segments_of_any_length(emu: grads_backend.EmuGrads, dtype: torch.dtype, dim: int) -> None:
    """Rows of a word, of none, and wider than a chunk; sums of one term, of a chunk and of many."""
    lengths = [1, 256, 257, 2, 700, 1] if dim < 1000 else [1, 2]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    terms_of = torch.randint(9, (sum(lengths),), generator=torch.Generator().manual_seed(dim))
    case = Rows(values((9, dim), dtype, dim, 0), None, ends, terms_of.to(torch.int32))
    emu.set_order("shuffled", dim)
    case.run(emu).check(case.expected())
    fewer = replace(case, used_rows=len(lengths) - 1)
    fewer.run(emu).check(fewer.expected())


def test_nothing_to_look_at(emu: grads_backend.EmuGrads) -> None:
    """Sums are 0, whatever stood there."""
    for case in (
        Tensors([torch.empty(0)]),
        Rows(torch.empty(0, 8)),
        Rows(torch.empty(3, 0)),
        Rows(torch.ones(3, 4), used_rows=0),
    ):
        found = case.run(emu)
        found.check(case.expected())
        assert found.square_sums is not None
        assert found.square_sums.tolist() == [0.0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(SANITIZE, reason="this is the sanitized run")
def test_sanitized() -> None:
    run_sanitized(Path(__file__), "-k", "not cpu")
