"""The CUDA kernel that catches up sleeping rows, on the CPU under the shim of ``emu/cuda_emu.h``.

Compared bit for bit with the CPU kernel. `test_sanitized` runs this file again on a build with
AddressSanitizer and UBSan.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emu import rows_backend
from emu.sanitizer import run_sanitized
from emu.suite import BLOCK, SANITIZE, examples_of, needs_tools, orders
from hypothesis import given
from hypothesis import strategies as st
from lazy_cases import STATES, LazyCase, lazy_cases, make, with_limits, with_special_values
from lookups import assert_same_states
from row_cases import DTYPES, LOW_PRECISION, number
from row_model import assert_same_bytes
from torch import Tensor

pytestmark = needs_tools
examples = examples_of(50, sanitized=10)


@pytest.fixture(scope="module")
def emu() -> rows_backend.EmuRows:
    return rows_backend.load(BLOCK, sanitize=SANITIZE)


@examples
@given(
    case=lazy_cases(wide=True),
    smallest_root=st.sampled_from([None, None, torch.inf, 1e-30, 0.0]),
    horizon=st.sampled_from([None, 1, 5]),
    special=st.one_of(st.none(), st.integers(0, 2**32)),
    order=orders,
)
def test_cpu_bits(
    emu: rows_backend.EmuRows,
    cpu: Any,
    case: LazyCase,
    smallest_root: float | None,
    horizon: int | None,
    special: int | None,
    order: tuple[str, int],
) -> None:
    case = with_limits(case, smallest_root, horizon)
    if special is not None:
        case = with_special_values(case, special)
    emu.set_order(*order)
    assert_same_states(case.run(emu), case.run(cpu))


@examples
@given(case=lazy_cases(wide=True), order=orders)
def test_steps_one_by_one(
    emu: rows_backend.EmuRows, case: LazyCase, order: tuple[str, int]
) -> None:
    """Near what they give; rows that are current or behind used_rows stay as they are."""
    emu.set_order(*order)
    case.check(case.run(emu))


@pytest.mark.parametrize("dim", [8, 256, 1032, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_wider_than_a_warp(
    emu: rows_backend.EmuRows, cpu: Any, dtype: torch.dtype, dim: int
) -> None:
    for table in ((5, dim), (1, dim)):
        for moments in {None, None if dtype == torch.float64 else torch.bfloat16}:
            case = make(dtype, table, moment_dtype=moments, master=dtype in LOW_PRECISION)
            emu.set_order("shuffled", dim)
            assert_same_states(case.run(emu), case.run(cpu))


@pytest.mark.parametrize("dim", [16, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_tensors(
    emu: rows_backend.EmuRows, cpu: Any, dtype: torch.dtype, dim: int
) -> None:
    """Tensors that begin one element behind a word of 16 bytes, each by itself."""

    def moved(x: Tensor) -> Tensor:
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    case = make(dtype, (5, dim), amsgrad=True, master=dtype in LOW_PRECISION)
    want = case.run(cpu)
    for name in ("param", "master", *STATES):
        if name not in want:
            continue
        there = {
            key: x.clone() if isinstance(x, Tensor) else x for key, x in case.arguments().items()
        }
        there[name] = moved(there[name])
        emu.row_adam_catch_up_(*there.values())
        assert_same_states({key: there[key] for key in want}, want)


@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
def test_around_the_ring(emu: rows_backend.EmuRows, cpu: Any, weight_decay: float) -> None:
    for amsgrad in (False, True):
        case = make(
            torch.float32,
            (4, 16),
            steps=1100,
            last=[77, 78, 600, 1099],
            weight_decay=weight_decay,
            decoupled=False,
            amsgrad=amsgrad,
        )
        assert_same_states(case.run(emu), case.run(cpu))


@pytest.mark.parametrize("found_inf", [1.0, 2.0, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_skipped_call_writes_nothing(
    emu: rows_backend.EmuRows, dtype: torch.dtype, found_inf: float
) -> None:
    case = make(dtype, (6, 8), master=dtype == torch.float16, amsgrad=True)
    got = replace(case, found_inf=number(found_inf)).run(emu)
    for name, tensor in case.before().items():
        assert_same_bytes(got[name], tensor)
    assert not torch.equal(case.run(emu)["param"], case.memory)


def test_nothing_to_do(emu: rows_backend.EmuRows) -> None:
    """No rows, no table, and no columns, where row_step stays too."""
    for table, rows in (((3, 4), []), ((0, 4), [0, 1]), ((3, 0), [0])):
        case = make(torch.bfloat16, table, rows=rows)
        got = case.run(emu)
        for name, tensor in case.before().items():
            assert_same_bytes(got[name], tensor)


@pytest.mark.parametrize("smallest_root", [0.0, torch.inf])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_rows_that_the_history_does_not_know(
    emu: rows_backend.EmuRows, cpu: Any, weight_decay: float, smallest_root: float
) -> None:
    """A row_step that nobody wrote leads to no memory outside the ring."""
    case = make(
        torch.float32, (3, 8), last=[-1, -5000, -1024], weight_decay=weight_decay, decoupled=False
    )
    case = with_limits(case, smallest_root, None)
    assert_same_states(case.run(emu), case.run(cpu))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(SANITIZE, reason="this is the sanitized run")
def test_sanitized() -> None:
    run_sanitized(Path(__file__), "-k", "not one_by_one")
