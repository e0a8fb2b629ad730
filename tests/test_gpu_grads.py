"""Gradient scaling on CUDA tensors: ``pytest -m gpu``; any call is in ``test_grad_operators.py``.

Never waits for the device, can be captured in a graph, gives the same bits in every run, and counts
beyond 2**31 elements.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpu_suite import DEVICE, can_capture, there, waiting_is_an_error
from grad_cases import (
    DTYPES,
    EVERYTHING,
    Boundary,
    Check,
    Rows,
    Tensors,
    number,
    stats_before,
    values,
)
from lookups import assert_same_bits

from fastemb import _native
from fastemb._grad_ops import GRAD_STATS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cuda() -> SimpleNamespace:
    return _native.backend("cuda")


def test_nothing_waits(cuda: SimpleNamespace) -> None:
    """A bad step from its gradients to the new scale."""
    grads = there(values((70, 9), torch.float16, 1, 0), values((33,), torch.float32, 2, 0))
    bags = values((5, 8), torch.float16, 3, 0)
    bags[3, 2] = torch.inf
    segments = torch.tensor([0, 1, 3, 300], dtype=torch.int32)
    sources = torch.arange(300, dtype=torch.int32) % 5
    used = torch.tensor([3], dtype=torch.int32)
    (bags_there, segments, sources, used) = there(bags, segments, sources, used)
    (inv_scale, found, flags) = there(torch.tensor(2.0**-16), torch.zeros(2), torch.zeros(2))
    stats, sums = there(torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, dtype=torch.float64))
    scales, states = there(torch.full((2,), 65536.0), torch.zeros(2, 2, dtype=torch.int32))
    config = torch.tensor([2.0, 0.5, 1.0, 2.0**24, 2000.0, 1.0], dtype=torch.float64)
    (configs,) = there(config.repeat(2, 1))
    with waiting_is_an_error():
        cuda.grad_check_(grads, inv_scale, found[0], stats[:2], sums[:2], True)
        cuda.row_grad_check_(
            *(bags_there, used, segments, sources, None),
            *(inv_scale, found[1], stats[2], sums[2], False),
        )
        passed = cuda.boundary_gradient(bags_there, inv_scale, inv_scale, flags, stats[2])
        cuda.scale_update_(scales, states, found, configs)
    assert found.tolist() == [0.0, 1.0]
    assert flags.tolist() == [1.0, 0.0]
    assert scales.tolist() == [65536.0, 32768.0]
    assert states.tolist() == [[1, 0], [0, 1]]
    assert stats.cpu()[:, GRAD_STATS.elements].tolist() == [630, 33, 24 + 40]
    assert passed.cpu().isinf().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_run_has_the_same_bits(cuda: SimpleNamespace, dtype: torch.dtype) -> None:
    """Of many chunks, and in segments of several."""
    grad = values((100_001,), dtype, 1, 3).nan_to_num()
    sizes = torch.tensor([1, 700, 2, 3] * 40)
    sources = torch.randint(50, (int(sizes.sum()),), generator=torch.Generator().manual_seed(2))
    terms = Rows(
        values((50, 24), dtype, 3, 0),
        segments=torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(torch.int32),
        sources=sources.to(torch.int32),
        check=Check(0.1),
    )
    for case in (Tensors([grad, grad[:77]], Check(3e-4)), terms):
        first = case.run(cuda, DEVICE)
        assert first.square_sums is not None
        for _ in range(3):
            again = case.run(cuda, DEVICE)
            again.check(first)
            assert again.square_sums is not None
            assert_same_bits(again.square_sums, first.square_sums)


def test_in_a_graph(cuda: SimpleNamespace) -> None:
    """A replay looks at what lies in memory then."""
    if not can_capture():
        pytest.skip("no graph capture on this device")
    case = Tensors([torch.ones(40), torch.ones(9)], Check(0.5, EVERYTHING, True))
    grads = there(*case.grads)
    places = case.check.places(2, DEVICE)
    scale = case.check.scale(DEVICE)
    graph = torch.cuda.CUDAGraph()
    cuda.grad_check_(grads, scale, *places.values(), True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cuda.grad_check_(grads, scale, *places.values(), True)
    bad = values((40,), torch.float32, 1, 0)
    bad[7] = torch.nan
    later = Tensors([bad, torch.zeros(9)], case.check)
    for grad, value in zip(grads, later.grads, strict=True):
        grad.copy_(value)
    found, stats, sums = places.values()
    assert found is not None
    assert stats is not None
    assert sums is not None
    stats.copy_(stats_before(2))
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    want = later.expected()
    assert found.cpu() == want.found_inf
    assert torch.equal(stats.cpu(), want.stats)
    torch.testing.assert_close(sums.cpu(), want.square_sums, rtol=1e-12, atol=0.0, equal_nan=True)
    for grad, value in zip(grads, want.grads, strict=True):
        assert_same_bits(grad.cpu(), value)


@pytest.mark.slow
def test_more_than_2_31_elements(cuda: SimpleNamespace) -> None:
    count = 2**31 + 9
    if torch.cuda.mem_get_info()[0] < 3 * count * 2:
        pytest.skip("needs 13 GB of device memory")
    grad = torch.full((count,), 2.0, dtype=torch.bfloat16, device=DEVICE)
    grad[-1] = torch.inf
    check = Check(0.5, EVERYTHING, True)
    places = check.places(1, DEVICE)
    found, stats, sums = places.values()
    assert found is not None
    assert stats is not None
    assert sums is not None
    cuda.grad_check_([grad], check.scale(DEVICE), found, stats, None, True)
    assert found.item() == 1
    counted = (stats.cpu() - stats_before(1))[0]
    assert counted[GRAD_STATS.elements] == count
    assert counted[GRAD_STATS.infinite] == 1
    grad[-1] = 1.0
    cuda.row_grad_check_(grad.view(-1, 1), None, None, None, None, None, None, None, sums, False)
    assert sums.item() == count
    flags = torch.zeros(2, device=DEVICE)
    ratio = number(4.0)
    assert ratio is not None
    passed = cuda.boundary_gradient(grad, ratio.to(DEVICE), None, flags, None)
    assert bool((passed == 4.0).all())
    assert flags.tolist() == [0.0, 0.0]


def test_boundaries_keep_the_layout_of_what_they_give(cuda: SimpleNamespace) -> None:
    """A gradient that `sum` has expanded takes memory of its own when it has passed."""
    case = Boundary(torch.ones(1, 1).expand(6, 8), 2.0)
    case.run(cuda, DEVICE).check(case.expected())
