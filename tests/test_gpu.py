"""The CUDA operators on CUDA tensors: ``pytest -m gpu``.

Bit for bit what the CPU operators give; wrong ids surface as errors and leave the device usable;
the current stream is used; the dense path never waits for the device; training ends with the same
bits.
``FASTEMB_GPU_EXAMPLES`` sets how many lookups hypothesis draws for each operator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fused_steps import FusedStep, fused_steps, grouped, step_after
from gpu_suite import can_capture
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_cases import LazyCase, lazy_cases, with_limits
from lazy_cases import make as make_lazy
from lazy_cases import with_special_values as with_special_moments
from lookups import Case, assert_same_bits, assert_same_states, cases, one_bag
from row_cases import OPERATORS, RowCase, make, number, row_cases, with_special_values
from torch import Tensor

import fastemb
from fastemb import _native
from fastemb import nn as fnn

pytestmark = pytest.mark.gpu
examples = settings(
    max_examples=int(os.environ.get("FASTEMB_GPU_EXAMPLES", "100")),
    deadline=None,
    derandomize=True,
    database=None,
)
DEVICE = "cuda"


@pytest.fixture(scope="module")
def cuda() -> SimpleNamespace:
    return _native.backend("cuda")


@pytest.fixture(scope="module")
def cpu() -> SimpleNamespace:
    return _native.backend("cpu")


@pytest.fixture(autouse=True)
def no_error_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends without a pending error."""
    monkeypatch.delenv("FASTEMB_SYNC_CHECKS", raising=False)
    fastemb.check_errors()
    yield
    fastemb.check_errors()


# ---- the same bits as the CPU -------------------------------------------------------------------


@examples
@given(case=cases())
def test_forward_bits(cuda: SimpleNamespace, cpu: SimpleNamespace, case: Case) -> None:
    for got, want in zip(case.to(DEVICE).forward(cuda), case.forward(cpu), strict=True):
        assert_same_bits(got.cpu(), want)


@examples
@given(case=cases(), dense=st.booleans())
def test_backward_bits(
    cuda: SimpleNamespace, cpu: SimpleNamespace, case: Case, dense: bool
) -> None:
    argmax = case.forward(cpu)[1] if case.mode == "max" else None
    on_device = None if argmax is None else argmax.to(DEVICE)
    got = case.to(DEVICE).backward(cuda, dense, on_device)
    assert_same_bits(got.cpu(), case.backward(cpu, dense, argmax))


@examples
@given(case=cases(("sum", "mean")))
def test_per_sample_backward_bits(cuda: SimpleNamespace, cpu: SimpleNamespace, case: Case) -> None:
    case = replace(case, grad_output=case.grad_output.to(case.acc))
    got = case.to(DEVICE).per_sample_backward(cuda)
    assert_same_bits(got.cpu(), case.per_sample_backward(cpu))


@examples
@given(case=cases())
def test_group_indices(cuda: SimpleNamespace, cpu: SimpleNamespace, case: Case) -> None:
    got = [x.cpu() for x in case.to(DEVICE).groups(cuda)]
    want = case.groups(cpu)
    n = int(want[3])
    assert int(got[3]) == n
    assert torch.equal(got[2][: n + 1], want[2][: n + 1])
    assert torch.equal(got[1][:n], want[1][:n])
    covered = int(want[2][n])
    assert torch.equal(got[0][:covered], want[0][:covered])


@examples
@given(case=cases())
def test_gather_bits(cuda: SimpleNamespace, cpu: SimpleNamespace, case: Case) -> None:
    there = case.to(DEVICE)
    options = (-1, False, False, case.output_dtype, "t")
    got = cuda.embedding(there.weight, there.indices, *options)
    assert_same_bits(got.cpu(), cpu.embedding(case.weight, case.indices, *options))


@examples
@given(case=cases(), norm_type=st.sampled_from([1.0, 2.0, torch.inf]))
def test_renorm_bits(
    cuda: SimpleNamespace, cpu: SimpleNamespace, case: Case, norm_type: float
) -> None:
    there = case.to(DEVICE)
    cuda.embedding_renorm_(there.weight, there.indices, 1.0, norm_type, "t")
    want = case.weight.clone()
    cpu.embedding_renorm_(want, case.indices, 1.0, norm_type, "t")
    assert_same_bits(there.to("cpu").weight.contiguous(), want.contiguous())


@examples
@given(case=row_cases(largest=5000), special=st.one_of(st.none(), st.integers(0, 2**32)))
def test_row_step_bits(
    cuda: SimpleNamespace, cpu: SimpleNamespace, case: RowCase, special: int | None
) -> None:
    if special is not None:
        case = with_special_values(case, special)
    got, want = case.run(cuda, DEVICE), case.run(cpu)
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert_same_bits(value, want[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", OPERATORS)
def test_row_step_bits_in_whole_words(
    cuda: SimpleNamespace, cpu: SimpleNamespace, op: str, dtype: torch.dtype
) -> None:
    """Widths of a warp, of a block and more, and one row of any length."""
    for table in ((9, 64), (3, 256), (2, 2048), (1, 4100), (1, 5)):
        for master in {False, dtype != torch.float32}:
            case = make(op, dtype, table, master=master, row_count=table[0] > 1)
            got, want = case.run(cuda, DEVICE), case.run(cpu)
            for name, value in got.items():
                assert_same_bits(value, want[name])


@examples
@given(case=cases(("sum", "mean")))
def test_bag_terms_bits(cuda: SimpleNamespace, cpu: SimpleNamespace, case: Case) -> None:
    order, _, segments, num_rows = case.groups(cpu)
    covered = int(segments[int(num_rows)])
    got = case.to(DEVICE).terms(cuda, order.to(DEVICE))
    for x, y in zip(got, case.terms(cpu, order), strict=True):
        assert_same_bits(x.cpu()[:covered], y[:covered])


@examples
@given(case=fused_steps())
def test_fused_step_bits(cuda: SimpleNamespace, cpu: SimpleNamespace, case: FusedStep) -> None:
    got = case.fused(cuda, DEVICE).run(cuda, DEVICE)
    assert_same_states(got, case.unfused(cpu).run(cpu))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", OPERATORS)
def test_fused_step_bits_of_long_segments(
    cuda: SimpleNamespace, cpu: SimpleNamespace, op: str, dtype: torch.dtype
) -> None:
    """More chunks than are on the way at once, in whole words and element by element."""
    low = dtype in (torch.float16, torch.bfloat16)
    for dim, mode, weighted in ((3, "sum", True), (8, "mean", False), (264, "sum", False)):
        lengths = [2, 1100, 256, 257, 1, 512] if dim < 264 else [1, 300]
        lookup = grouped(lengths, dim, dtype, mode=mode, weighted=weighted, seed=dim)
        case = step_after(lookup, op, master=low, row_count=dim == 8)
        got = case.fused(cuda, DEVICE).run(cuda, DEVICE)
        assert_same_states(got, case.unfused(cpu).run(cpu))


@examples
@given(
    case=lazy_cases(wide=True),
    smallest_root=st.sampled_from([None, None, torch.inf, 1e-30, 0.0]),
    horizon=st.sampled_from([None, 1, 5]),
    special=st.one_of(st.none(), st.integers(0, 2**32)),
)
def test_catch_up_bits(
    cuda: SimpleNamespace,
    cpu: SimpleNamespace,
    case: LazyCase,
    smallest_root: float | None,
    horizon: int | None,
    special: int | None,
) -> None:
    case = with_limits(case, smallest_root, horizon)
    if special is not None:
        case = with_special_moments(case, special)
    got, want = case.run(cuda, DEVICE), case.run(cpu)
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert_same_bits(value, want[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_catch_up_bits_in_whole_words(
    cuda: SimpleNamespace, cpu: SimpleNamespace, dtype: torch.dtype
) -> None:
    """Widths of less than a warp, of one and more, and sleeps around the end of the ring."""
    for table, steps in (((9, 8), 40), ((3, 256), 40), ((2, 1032), 40), ((5, 16), 1100)):
        last = None if steps == 40 else [77, 78, 300, 1098, 1099]
        for moments in (None, torch.bfloat16):
            case = make_lazy(dtype, table, steps=steps, last=last, moment_dtype=moments)
            got, want = case.run(cuda, DEVICE), case.run(cpu)
            for name, value in got.items():
                assert_same_bits(value, want[name])


@pytest.mark.parametrize("num_embeddings", [2**31, 2**32 - 2, 2**32 - 1, 2**40])
def test_group_indices_wide_keys(cuda: SimpleNamespace, num_embeddings: int) -> None:
    top = num_embeddings - 1
    indices = torch.tensor([top, 0, top, num_embeddings, 5, -1, top - 1]).to(DEVICE)
    offsets = torch.tensor([0, 3]).to(DEVICE)
    groups = cuda.group_indices(indices, offsets, num_embeddings, 5, False)
    order, rows, segments, num_rows = (x.cpu() for x in groups)
    assert num_rows.tolist() == [3]
    assert rows[:3].tolist() == [0, top - 1, top]
    assert segments[:4].tolist() == [0, 1, 2, 4]
    assert order[:4].tolist() == [1, 6, 0, 2]


@pytest.mark.slow
def test_more_than_2_31_elements(cuda: SimpleNamespace) -> None:
    """The last rows of a table whose elements need 64-bit numbers."""
    rows, dim = 2**24 + 3, 128
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * rows * dim * 2:
        pytest.skip("needs 9 GB of device memory")
    weight = torch.empty(rows, dim, dtype=torch.float16, device=DEVICE)
    weight[-3:] = torch.arange(3 * dim, device=DEVICE).reshape(3, dim)
    indices = torch.tensor([[rows - 1, rows - 3], [rows - 2, rows - 2]], device=DEVICE)
    options = (-1, False, False, torch.float32, "t")
    gathered = cuda.embedding(weight, indices, *options)
    assert torch.equal(gathered, weight[indices].float())
    pooled, _ = cuda.embedding_bag(
        weight, indices, None, None, "sum", -1, False, False, False, torch.float32, "t"
    )
    assert torch.equal(pooled, weight[indices].float().sum(1))


@pytest.mark.slow
@pytest.mark.parametrize("dense", [False, True])
def test_row_step_on_more_than_2_31_elements(cuda: SimpleNamespace, dense: bool) -> None:
    """Plain SGD on the last rows of such a table, or on all of it as one row."""
    rows, dim = 2**24 + 3, 128
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * rows * dim * 2:
        pytest.skip("needs 13 GB of device memory")
    table = torch.zeros(rows, dim, dtype=torch.bfloat16, device=DEVICE)
    last = torch.arange(rows - 3, rows, device=DEVICE)
    if dense:
        param, named = table.view(1, -1), None
        grad = torch.full_like(param, 3.0)
    else:
        param, named = table, last
        grad = torch.full((3, dim), 3.0, device=DEVICE)
    step = torch.ones((), device=DEVICE)
    common = (named, None, grad, None, None, None, step, None, None, -1.0, None, 0.0, False, -1)
    cuda.row_sgd_(param, None, None, *common, 0.0, 0.0, False)
    assert bool((table[-3:] == 3.0).all())
    assert bool((table[:-3] == (3.0 if dense else 0.0)).all())


# ---- errors -------------------------------------------------------------------------------------


def _lookup(indices: list[int], table: str = "user") -> Tensor:
    """A lookup in a table of 5 rows through the public module."""
    bag = fnn.EmbeddingBag(5, 4, mode="sum", table=table).to(DEVICE)
    return bag(torch.tensor([indices]).to(DEVICE))


def test_wrong_index_surfaces_later() -> None:
    message = r"embedding_bag: index 7 at position 2 .* table 'user' with 5 rows"
    output = _lookup([0, 1, 7])
    assert output.cpu().isfinite().all()
    with pytest.raises(IndexError, match=message):
        _lookup([0])
    # Raised once; the device goes on.
    assert _lookup([0]).shape == (1, 4)


def test_check_errors_raises() -> None:
    _lookup([-1], table="item")
    with pytest.raises(IndexError, match=r"index -1 at position 0 .* table 'item'"):
        fastemb.check_errors()
    fastemb.check_errors()


def test_sync_checks_raise_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTEMB_SYNC_CHECKS", "1")
    with pytest.raises(IndexError, match="index 5 at position 1"):
        _lookup([4, 5])
    assert _lookup([4]).shape == (1, 4)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2], r"offsets\[0\] must be 0, got 1"),
        ([0, 3, 2], r"offsets\[2\] = 2 is less than offsets\[1\]"),
        ([0, 7], r"offsets\[1\] = 7 is greater than the number of indices, 5"),
    ],
)
def test_wrong_offsets(cuda: SimpleNamespace, offsets: list[int], message: str) -> None:
    case = replace(
        one_bag([1.0, 2.0, 3.0, 4.0, 5.0], "mean"),
        indices=torch.arange(5),
        offsets=torch.tensor(offsets),
        grad_output=torch.ones(len(offsets), 1),
    ).to(DEVICE)
    output, _ = case.forward(cuda)
    with pytest.raises(ValueError, match=message):
        fastemb.check_errors()
    assert output.cpu().isfinite().all()
    assert case.backward(cuda, True, None).cpu().isfinite().all()
    assert case.per_sample_backward(cuda).cpu().isfinite().all()


# ---- streams, graphs, syncs ---------------------------------------------------------------------


def test_current_stream_is_used(cuda: SimpleNamespace, cpu: SimpleNamespace) -> None:
    """Input that a busy side stream has yet to write is read after it was written."""
    case = one_bag([float(i) for i in range(64)], "sum")
    there = case.to(DEVICE)
    late = torch.zeros_like(there.weight)
    busy = torch.zeros(1 << 22).to(DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            busy.zero_()
        late.copy_(there.weight, non_blocking=True)
        output, _ = replace(there, weight=late).forward(cuda)
    stream.synchronize()
    assert_same_bits(output.cpu(), case.forward(cpu)[0])


def test_graph_capture(cuda: SimpleNamespace, cpu: SimpleNamespace) -> None:
    if not can_capture():
        pytest.skip("no graph capture on this device")
    case = one_bag([1.0, 2.0, 3.0, 4.0], "mean")
    there = case.to(DEVICE)
    there.forward(cuda)
    there.backward(cuda, True, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _ = there.forward(cuda)
        grad = there.backward(cuda, True, None)
    there.weight.mul_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    twice = replace(case, weight=case.weight * 2)
    assert_same_bits(output.cpu(), twice.forward(cpu)[0])
    assert_same_bits(grad.cpu(), case.backward(cpu, True, None))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_dense_training_never_waits(mode: str) -> None:
    bag = fnn.EmbeddingBag(50, 8, mode=mode, dtype=torch.float16).to(DEVICE)
    indices = torch.arange(40).reshape(4, 10).to(DEVICE)
    grad = torch.ones(4, 8, dtype=torch.float16).to(DEVICE)
    bag(indices).backward(grad)  # the first call sets things up
    bag.weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bag(indices).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert bag.weight.grad is not None
    assert bag.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("op", OPERATORS)
def test_row_steps_never_wait(cuda: SimpleNamespace, cpu: SimpleNamespace, op: str) -> None:
    case = make(
        op,
        torch.float16,
        (6, 8),
        rows=[4, 0, 5],
        master=True,
        row_count=True,
        used_rows=torch.tensor([2], dtype=torch.int32),
        inv_scale=number(0.5),
        found_inf=number(0.0),
        lr_tensor=number(0.1),
    )
    arguments = {
        name: x.to(DEVICE, copy=True) if isinstance(x, Tensor) else x
        for name, x in case.arguments().items()
    }
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        getattr(cuda, op)(*arguments.values())
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert_same_bits(arguments["param"].cpu(), case.run(cpu)["param"])


@pytest.mark.parametrize("op", OPERATORS)
def test_fused_steps_never_wait(cuda: SimpleNamespace, cpu: SimpleNamespace, op: str) -> None:
    """From the lookup's positions to the new parameter."""
    case = step_after(grouped([1, 3, 300], 8, torch.float16, mode="mean"), op, master=True)
    arguments = {
        name: x.to(DEVICE, copy=True) if isinstance(x, Tensor) else x
        for name, x in case.step.arguments().items()
    }
    lookup = case.lookup.to(DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        order, rows, segments, num_rows = lookup.groups(cuda)
        sources, coefficients = lookup.terms(cuda, order)
        arguments.update(
            rows=rows,
            used_rows=num_rows,
            grad=lookup.grad_output,
            segments=segments,
            sources=sources,
            coefficients=coefficients,
        )
        getattr(cuda, op)(*arguments.values())
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert_same_bits(arguments["param"].cpu(), case.unfused(cpu).run(cpu)["param"])


def test_catching_up_never_waits(cuda: SimpleNamespace, cpu: SimpleNamespace) -> None:
    case = make_lazy(
        torch.float16,
        (6, 8),
        rows=[4, 0, 5],
        used_rows=2,
        master=True,
        weight_decay=0.1,
        found_inf=number(0.0),
    )
    arguments = {
        name: x.to(DEVICE, copy=True) if isinstance(x, Tensor) else x
        for name, x in case.arguments().items()
    }
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cuda.row_adam_catch_up_(*arguments.values())
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert_same_bits(arguments["param"].cpu(), case.run(cpu)["param"])


def test_row_step_in_a_graph(cuda: SimpleNamespace, cpu: SimpleNamespace) -> None:
    """A replay takes the step, the learning rate and found_inf that lie in memory then."""
    if not can_capture():
        pytest.skip("no graph capture on this device")
    case = make(
        "row_adam_",
        torch.bfloat16,
        (6, 8),
        rows=[4, 0],
        master=True,
        found_inf=number(1.0),
        lr_tensor=number(0.1),
    )
    there = {
        name: x.to(DEVICE, copy=True) if isinstance(x, Tensor) else x
        for name, x in case.arguments().items()
    }
    cuda.row_adam_(*there.values())  # skipped: found_inf is 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.row_adam_(*there.values())
    changed = {"found_inf": number(0.0), "step": number(3), "lr_tensor": number(0.2)}
    for name, value in changed.items():
        there[name].copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    for name, value in replace(case, **changed).run(cpu).items():
        assert_same_bits(there[name].cpu(), value)


# ---- training -----------------------------------------------------------------------------------


def _train(device: str, mode: str, dtype: torch.dtype, sparse: bool, steps: int) -> Tensor:
    """SGD on a small table; the update itself runs on the CPU, so only our operators differ."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(30, 12, generator=generator).to(dtype)
    bag = fnn.EmbeddingBag(30, 12, mode=mode, sparse=sparse, padding_idx=3, dtype=dtype)
    with torch.no_grad():
        bag.weight.copy_(values)
    bag.to(device)
    for _ in range(steps):
        indices = torch.randint(0, 30, (60,), generator=generator)
        offsets = torch.tensor([0, 0, 7, 30, 59])
        grad = torch.randn(5, 12, generator=generator).to(dtype)
        bag.weight.grad = None
        bag(indices.to(device), offsets.to(device)).backward(grad.to(device))
        assert bag.weight.grad is not None
        gradient = bag.weight.grad.cpu()
        gradient = gradient.to_dense() if sparse else gradient
        updated = (bag.weight.detach().cpu().to(gradient.dtype) - 0.1 * gradient).to(dtype)
        with torch.no_grad():
            bag.weight.copy_(updated)
    return bag.weight.detach().cpu()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_training_ends_with_the_same_bits(mode: str, dtype: torch.dtype, sparse: bool) -> None:
    steps = 4
    assert_same_bits(
        _train(DEVICE, mode, dtype, sparse, steps), _train("cpu", mode, dtype, sparse, steps)
    )
