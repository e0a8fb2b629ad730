"""The CUDA kernels on the CPU, under the shim of ``emu/cuda_emu.h``.

Same source files as nvcc compiles; blocks and threads run in drawn orders. Compared bit for bit
with the CPU backend, and with float64 sums under the bound of FP32 summation. `test_sanitized` runs
this file again on a build with AddressSanitizer and UBSan and another block size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emu import backend as emu_backend
from emu.sanitizer import run_sanitized
from emu.suite import BLOCK, SANITIZE, examples_of, needs_tools, orders
from hypothesis import given
from hypothesis import strategies as st
from lookups import ROUNDING, Case, assert_same_bits, assert_within, cases, one_bag

from fastemb import _reference as reference

pytestmark = needs_tools
examples = examples_of(40, sanitized=8)


@pytest.fixture(scope="module")
def emu() -> emu_backend.EmuBackend:
    return emu_backend.load(BLOCK, sanitize=SANITIZE)


# ---- the kernels --------------------------------------------------------------------------------


@examples
@given(case=cases(), order=orders)
def test_forward_bound(emu: emu_backend.EmuBackend, case: Case, order: tuple[str, int]) -> None:
    emu.set_order(*order)
    output, argmax = case.forward(emu)
    exact, exact_argmax = case.exact().forward(reference)
    if case.mode == "max":
        assert torch.equal(argmax, exact_argmax)
        assert_same_bits(output, exact.to(case.output_dtype))
        return
    size, _ = case.sizes().forward(reference)
    assert_within(output, exact, size, case.indices.numel(), case.acc)


@examples
@given(case=cases(), order=orders, dense=st.booleans())
def test_backward_bound(
    emu: emu_backend.EmuBackend, case: Case, order: tuple[str, int], dense: bool
) -> None:
    emu.set_order(*order)
    argmax = case.forward(emu)[1] if case.mode == "max" else None
    grad = case.backward(emu, dense, argmax)
    exact = case.exact().backward(reference, dense, argmax)
    size = case.sizes().backward(reference, dense, argmax)
    assert_within(grad, exact, size, case.indices.numel(), case.acc)


@examples
@given(case=cases(("sum", "mean")), order=orders)
def test_per_sample_backward_bound(
    emu: emu_backend.EmuBackend, case: Case, order: tuple[str, int]
) -> None:
    emu.set_order(*order)
    exact = case.exact().per_sample_backward(reference)
    size = case.sizes().per_sample_backward(reference)
    assert_within(case.per_sample_backward(emu), exact, size, case.weight.shape[1], case.acc)


@examples
@given(case=cases(), order=orders)
def test_group_indices(emu: emu_backend.EmuBackend, case: Case, order: tuple[str, int]) -> None:
    emu.set_order(*order)
    got, want = case.groups(emu), case.groups(reference)
    n = int(want[3])
    assert int(got[3]) == n
    assert torch.equal(got[2][: n + 1], want[2][: n + 1])
    assert torch.equal(got[1][:n], want[1][:n])
    covered = int(want[2][n])
    assert torch.equal(got[0][:covered], want[0][:covered])
    assert sorted(got[0].tolist()) == list(range(case.indices.numel()))


@pytest.mark.parametrize("num_embeddings", [2**31, 2**32 - 2, 2**32 - 1, 2**40])
def test_group_indices_wide_keys(emu: emu_backend.EmuBackend, num_embeddings: int) -> None:
    """Row numbers beyond 31 and 32 bits, on both sides of the switch of key width."""
    top = num_embeddings - 1
    indices = torch.tensor([top, 0, top, num_embeddings, 5, -1, top - 1])
    offsets = torch.tensor([0, 3])
    order, rows, segments, num_rows = emu.group_indices(indices, offsets, num_embeddings, 5, False)
    assert num_rows.tolist() == [3]
    assert rows[:3].tolist() == [0, top - 1, top]
    assert segments[:4].tolist() == [0, 1, 2, 4]
    assert order[:4].tolist() == [1, 6, 0, 2]


@examples
@given(case=cases(), order=orders)
def test_gather(emu: emu_backend.EmuBackend, case: Case, order: tuple[str, int]) -> None:
    emu.set_order(*order)
    arguments = (case.weight, case.indices, -1, False, False, case.output_dtype, "t")
    assert_same_bits(emu.embedding(*arguments), reference.embedding(*arguments))


@examples
@given(case=cases(), order=orders, norm_type=st.sampled_from([1.0, 2.0, torch.inf, 3.0, 0.5]))
def test_renorm(
    emu: emu_backend.EmuBackend, case: Case, order: tuple[str, int], norm_type: float
) -> None:
    emu.set_order(*order)
    table = case.weight
    before = table.clone()
    max_norm = 0.7 * float(torch.linalg.vector_norm(before[0].double(), norm_type))
    emu.embedding_renorm_(table, case.indices, max_norm, norm_type, "t")
    norms = torch.linalg.vector_norm(before.double(), norm_type, dim=1, keepdim=True)
    named = torch.zeros(table.shape[0], 1, dtype=torch.bool)
    named[case.indices.long().flatten()] = True
    scaled = before.double() * (max_norm / (norms + 1e-7))
    want = torch.where(named & (norms > max_norm), scaled, before.double())
    # Rows at the very limit may go either way; none is drawn, the limit is 0.7 of a norm.
    tolerance = (table.shape[1] + 8) * ROUNDING[case.acc][0] * 8
    assert_within(table, want, want.abs() * tolerance / ROUNDING[case.acc][0], 0, case.acc)


# ---- the same bits as the CPU backend -----------------------------------------------------------


@examples
@given(case=cases(), order=orders)
def test_forward_bits(
    emu: emu_backend.EmuBackend, cpu: Any, case: Case, order: tuple[str, int]
) -> None:
    emu.set_order(*order)
    for got, want in zip(case.forward(emu), case.forward(cpu), strict=True):
        assert_same_bits(got, want)


@examples
@given(case=cases(), order=orders, dense=st.booleans())
def test_backward_bits(
    emu: emu_backend.EmuBackend, cpu: Any, case: Case, order: tuple[str, int], dense: bool
) -> None:
    emu.set_order(*order)
    argmax = case.forward(emu)[1] if case.mode == "max" else None
    assert_same_bits(case.backward(emu, dense, argmax), case.backward(cpu, dense, argmax))


@examples
@given(case=cases(("sum", "mean")), order=orders)
def test_per_sample_backward_bits(
    emu: emu_backend.EmuBackend, cpu: Any, case: Case, order: tuple[str, int]
) -> None:
    emu.set_order(*order)
    assert_same_bits(case.per_sample_backward(emu), case.per_sample_backward(cpu))


@examples
@given(case=cases(), order=orders, norm_type=st.sampled_from([1.0, 2.0, torch.inf]))
def test_renorm_bits(
    emu: emu_backend.EmuBackend, cpu: Any, case: Case, order: tuple[str, int], norm_type: float
) -> None:
    emu.set_order(*order)
    got, want = case.weight.clone(), case.weight.clone()
    emu.embedding_renorm_(got, case.indices, 1.0, norm_type, "t")
    cpu.embedding_renorm_(want, case.indices, 1.0, norm_type, "t")
    assert_same_bits(got, want)


# ---- special values and long segments -----------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "winner"),
    [
        ([1.0, 2.0, 2.0], 1),
        ([0.0, -0.0], 0),
        ([-0.0, 0.0], 0),
        ([-torch.inf, -torch.inf], 0),
        ([1.0, torch.nan, torch.inf, torch.nan], 1),
        ([torch.nan, 3.0], 0),
    ],
)
def test_max_ties_and_nan(emu: emu_backend.EmuBackend, values: list[float], winner: int) -> None:
    output, argmax = one_bag(values, "max").forward(emu)
    assert argmax.tolist() == [[winner]]
    assert_same_bits(output, torch.tensor([[values[winner]]]))


def test_sums_do_not_stagnate(emu: emu_backend.EmuBackend) -> None:
    """2048 fp16 ones on top of 2048: an fp16 accumulator would stay at 2048."""
    case = one_bag([2048.0] + [1.0] * 2048, "sum")
    case = replace(case, weight=case.weight.half())
    assert case.forward(emu)[0].tolist() == [[4096.0]]


@pytest.mark.parametrize("seed", range(6))
def test_windows_of_two_long_segments(emu: emu_backend.EmuBackend, seed: int) -> None:
    """Segments just above a chunk, at every phase to the windows: each slot has one owner."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(250, 530, (9,), generator=generator).tolist()
    indices = torch.repeat_interleave(torch.arange(9), torch.tensor(lengths))
    indices = indices[torch.randperm(indices.numel(), generator=generator)].reshape(-1, 1)
    case = replace(
        one_bag([1.0] * 9, "sum"),
        indices=indices,
        grad_output=torch.ones(indices.numel(), 1),
    )
    emu.set_order("shuffled", seed)
    assert case.backward(emu, True, None).flatten().tolist() == [float(n) for n in lengths]


# ---- wrong input: nothing out of bounds, the first report kept ----------------------------------


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31), 2**62])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bad_index(emu: emu_backend.EmuBackend, bad: int, mode: str) -> None:
    dtype = torch.int64 if abs(bad) >= 2**31 else torch.int32
    indices = torch.tensor([[1, bad, 2], [3, 4, 0]], dtype=dtype)
    case = replace(one_bag([1.0, 2.0, 3.0, 4.0, 5.0], mode), indices=indices)
    with pytest.raises(IndexError, match=f"index {bad} at position 1"):
        case.forward(emu)
    with pytest.raises(IndexError, match=f"index {bad} at position 1"):
        emu.embedding(case.weight, indices, -1, False, False, torch.float32, "t")
    emu.raises = False
    try:
        output, argmax = case.forward(emu)
        gathered = emu.embedding(case.weight, indices, -1, False, False, torch.float32, "t")
        assert emu.error == (1, 1, bad, 5)
    finally:
        emu.raises = True
    # The wrong index counts as absent.
    expected = {"sum": 5.0, "mean": 2.5, "max": 3.0}[mode]
    assert output[0].tolist() == [expected]
    assert gathered.flatten().tolist() == [2.0, 0.0, 3.0, 4.0, 5.0, 1.0]
    case = replace(case, grad_output=torch.ones(2, 1))
    grad = case.backward(emu, True, argmax if mode == "max" else None)
    assert bool(grad.isfinite().all())
    if mode != "max":
        assert bool(case.per_sample_backward(emu).isfinite().all())


@pytest.mark.parametrize(
    ("offsets", "include_last", "position", "value"),
    [
        ([1, 2], False, 0, 1),
        ([0, 3, 2], False, 2, 2),
        ([0, 7], False, 1, 7),
        ([0, -1], False, 1, -1),
        ([0, 2, 7], True, 2, 7),
        ([0, 2**40], False, 1, 2**40),
        ([-(2**40), 2], False, 0, -(2**40)),
    ],
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bad_offsets(
    emu: emu_backend.EmuBackend,
    offsets: list[int],
    include_last: bool,
    position: int,
    value: int,
    mode: str,
) -> None:
    bags = len(offsets) - include_last
    case = replace(
        one_bag([1.0, 2.0, 3.0, 4.0, 5.0], mode),
        indices=torch.arange(5),
        offsets=torch.tensor(offsets),
        include_last_offset=include_last,
        grad_output=torch.ones(bags, 1),
    )
    emu.set_order("forward")
    emu.raises = False
    try:
        output, argmax = case.forward(emu)
        assert emu.error == (2, position, value, 5)
    finally:
        emu.raises = True
    assert bool(output.isfinite().all())
    grad = case.backward(emu, True, argmax if mode == "max" else None)
    assert bool(grad.isfinite().all())
    if mode != "max":
        assert bool(case.per_sample_backward(emu).isfinite().all())


def test_empty_table(emu: emu_backend.EmuBackend) -> None:
    case = replace(one_bag([1.0], "sum"), weight=torch.empty(0, 4), grad_output=torch.ones(1, 4))
    with pytest.raises(IndexError, match="0 rows"):
        case.forward(emu)
    assert case.backward(emu, True, None).shape == (0, 4)


# ---- the shim itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("early_return", "barrier divergence: thread 5 has returned"),
        ("two_barriers", "barrier divergence"),
        ("missing_lane", "shuffle with missing lanes"),
        ("half_mask", "without the full mask"),
        ("misaligned", "misaligned access of 16 bytes"),
        ("no_blocks", "launch of 0 blocks"),
        ("part_of_a_warp", "not whole warps"),
    ],
)
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_shim_refuses(emu: emu_backend.EmuBackend, name: str, message: str, order: str) -> None:
    out = torch.zeros(128, dtype=torch.int32)
    emu.set_order(order, 1)
    with pytest.raises(RuntimeError, match=message):
        emu.module.shim_case(name, out.data_ptr())
    # The machine is usable after an error.
    emu.module.shim_case("lanes_exchange", out.data_ptr())
    assert out[:64].tolist() == [i ^ 16 for i in range(64)]


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_shim_shows_a_missing_barrier(emu: emu_backend.EmuBackend, order: str) -> None:
    want = list(range(63, -1, -1))
    out = torch.zeros(64, dtype=torch.int32)
    emu.set_order(order, 1)
    emu.module.shim_case("reverse", out.data_ptr())
    assert out.tolist() == want
    emu.module.shim_case("reverse_without_barrier", out.data_ptr())
    assert out.tolist() != want


def test_shim_poisons_shared_memory(emu: emu_backend.EmuBackend) -> None:
    out = torch.zeros(64)
    emu.module.shim_case("half_written", out.data_ptr())
    assert bool(out.isnan().all())


# ---- sanitizers ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(SANITIZE, reason="this is the sanitized run")
def test_sanitized() -> None:
    run_sanitized(Path(__file__), "-k", "not bits")
