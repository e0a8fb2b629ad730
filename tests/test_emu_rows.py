"""The CUDA kernels of the row optimizers on the CPU, under the shim of ``emu/cuda_emu.h``.

Compared bit for bit with the reference, which does the same operations in the same order, and with
the CPU backend; and with the float64 intervals of `row_model`. `test_sanitized` runs this file
again on a build with AddressSanitizer and UBSan.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emu import rows_backend
from emu.sanitizer import run_sanitized
from emu.suite import BLOCK, SANITIZE, examples_of, needs_tools, orders
from hypothesis import given
from hypothesis import strategies as st
from lookups import assert_same_states
from row_cases import (
    LOW_PRECISION,
    OPERATORS,
    OUTSIDE,
    RowCase,
    make,
    number,
    row_cases,
    with_special_values,
)
from row_model import Model, assert_same_bytes
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fastemb import _row_reference

pytestmark = needs_tools
examples = examples_of(60, sanitized=12)


@pytest.fixture(scope="module")
def emu() -> rows_backend.EmuRows:
    return rows_backend.load(BLOCK, sanitize=SANITIZE)


class RoundedRoots(TorchFunctionMode):
    """Square roots to nearest, which torch's on the CPU are not for one number in a hundred."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.sqrt:
            with np.errstate(invalid="ignore"):
                return torch.from_numpy(np.asarray(np.sqrt(args[0].numpy())))
        return func(*args, **(kwargs or {}))


reference = SimpleNamespace(**{op: getattr(_row_reference, op) for op in OPERATORS})


@st.composite
def aligned_cases(draw: st.DrawFn) -> RowCase:
    """Rows of whole words: below, at and above what a warp, a block and a fold cover."""
    op, dtype = (
        draw(st.sampled_from(OPERATORS)),
        draw(st.sampled_from([*LOW_PRECISION, torch.float32, torch.float64])),
    )
    dim = draw(st.sampled_from([8, 16, 64, 128, 256, 264, 1032, 4096]))
    size = draw(st.sampled_from([1, 3, 50])) if dim <= 128 else draw(st.sampled_from([1, 3]))
    rows = draw(st.one_of(st.none(), st.permutations([*range(size), *OUTSIDE])))
    low = dtype in LOW_PRECISION
    master = low and draw(st.booleans())
    grad_dtypes = [torch.float64] if dtype == torch.float64 else [*LOW_PRECISION, torch.float32]
    moments = [None] if dtype == torch.float64 else [None, torch.bfloat16]
    return make(
        op,
        dtype,
        (size, dim),
        rows=rows,
        data_seed=draw(st.integers(0, 2**32)),
        grad_dtype=draw(st.sampled_from(grad_dtypes)),
        moment_dtype=draw(st.sampled_from(moments)),
        master=master,
        amsgrad=draw(st.booleans()),
        row_step=draw(st.booleans()),
        row_count=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 8])),
        step=number(draw(st.sampled_from([1, 1000, 2**24]))),
        weight_decay=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.sampled_from([-1, 7])),
        options={"decoupled": draw(st.booleans())} if op == "row_adam_" else {},
    )


cases = st.one_of(row_cases(largest=5000), aligned_cases())
seeds = st.one_of(st.none(), st.integers(0, 2**32))


@examples
@given(case=cases, special=seeds, misaligned=st.booleans(), order=orders)
def test_reference_bits(
    emu: rows_backend.EmuRows,
    case: RowCase,
    special: int | None,
    misaligned: bool,
    order: tuple[str, int],
) -> None:
    if special is not None:
        case = with_special_values(case, special)
    emu.set_order(*order)
    got = case.run(rows_backend.Misaligned(emu) if misaligned else emu)
    with RoundedRoots():
        want = case.run(reference)
    assert_same_states(got, want)


@examples
@given(case=cases, special=seeds, order=orders)
def test_cpu_bits(
    emu: rows_backend.EmuRows, cpu: Any, case: RowCase, special: int | None, order: tuple[str, int]
) -> None:
    if special is not None:
        case = with_special_values(case, special)
    emu.set_order(*order)
    assert_same_states(case.run(emu), case.run(cpu))


@examples
@given(case=cases, order=orders)
def test_model(emu: rows_backend.EmuRows, case: RowCase, order: tuple[str, int]) -> None:
    emu.set_order(*order)
    Model(case).check(case.run(emu))


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -torch.inf, torch.nan])
@pytest.mark.parametrize("op", OPERATORS)
def test_skipped_step_writes_nothing(emu: rows_backend.EmuRows, op: str, found_inf: float) -> None:
    master = found_inf == 1.0
    case = make(op, torch.float16, (3, 8), master=master, row_step=True, row_count=True)
    got = replace(case, found_inf=number(found_inf)).run(emu)
    for name, tensor in case.before().items():
        assert_same_bytes(got[name], tensor)
    assert not torch.equal(case.run(emu)["param"], case.memory)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", ["row_adam_", "row_adagrad_", "row_sgd_"])
def test_one_row_of_any_length(emu: rows_backend.EmuRows, op: str, dtype: torch.dtype) -> None:
    """A dense parameter: shared out over blocks in whole words, and what is left at its end."""
    for dim in (1, 7, 9, 4099, 4104):
        case = make(op, dtype, (1, dim), seed=7)
        emu.set_order("shuffled", dim)
        Model(case).check(case.run(emu))


@pytest.mark.parametrize("op", OPERATORS)
def test_nothing_to_do(emu: rows_backend.EmuRows, op: str) -> None:
    for table, rows in (((3, 4), []), ((0, 4), [0, 1]), ((3, 0), [0])):
        case = make(op, torch.bfloat16, table, rows=rows)
        got = case.run(emu)
        for name, tensor in case.before().items():
            assert_same_bytes(got[name], tensor)


@pytest.mark.parametrize("used", [-1, 0, 5, 2**31 - 1])
@pytest.mark.parametrize("op", OPERATORS)
def test_used_rows_beyond_the_gradient(emu: rows_backend.EmuRows, op: str, used: int) -> None:
    case = make(op, torch.float32, (4, 8), rows=[3, 0, 1], row_count=True)
    case = replace(case, used_rows=torch.tensor([used], dtype=torch.int32))
    Model(case).check(case.run(emu))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(SANITIZE, reason="this is the sanitized run")
def test_sanitized() -> None:
    run_sanitized(Path(__file__), "-k", "not cpu")
