"""`clip_grad_norm_`: torch's on dense gradients, and the same for sums of sparse ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import assert_same_bits, bits, coo, random_rows
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from fastemb.optim import clip_grad_norm_

NORMS = st.sampled_from([2.0, 1.0, 3.0, 0.5, math.inf])


def with_gradients(*grads: Tensor) -> list[nn.Parameter]:
    params = []
    for grad in grads:
        param = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
        param.grad = grad
        params.append(param)
    return params


@given(
    norm_type=NORMS,
    max_norm=st.sampled_from([0.0, 1e-3, 1.0, 1e6]),
    foreach=st.sampled_from([None, True, False]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_dense_as_torch(
    norm_type: float, max_norm: float, foreach: bool | None, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(s, generator=generator, dtype=dtype) for s in ((3, 4), (), (0,), (7,))]
    ours = with_gradients(*(g.clone() for g in grads))
    theirs = with_gradients(*(g for g in grads if g.numel()))  # torch has no largest of none
    total = clip_grad_norm_(ours, max_norm, norm_type, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    assert total.dtype == dtype
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    for p, q in zip([p for p in ours if p.numel()], theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=0)


@given(
    norm_type=NORMS,
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    foreach=st.sampled_from([None, False]),
    seed=st.integers(0, 1000),
)
def test_sparse_as_the_sum_of_its_rows(
    norm_type: float, dtype: torch.dtype, foreach: bool | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sparse = random_rows(generator, 5, 3, 9, dtype)
    dense = torch.randn(4, generator=generator).to(dtype)
    want = torch.cat([sparse.double().to_dense().flatten(), dense.double()])
    norm = torch.linalg.vector_norm(want, norm_type)
    params = with_gradients(sparse, dense)
    total = clip_grad_norm_(iter(params), 0.5, norm_type, foreach=foreach)
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(total.double(), norm, rtol=1e-5, atol=0)
    got = torch.cat(
        [
            p.grad.double().to_dense().flatten() if p.grad.is_sparse else p.grad.double()
            for p in params
        ]
    )
    precision = {torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}.get(dtype, 1e-5)
    torch.testing.assert_close(
        got, want * min(1.0, 0.5 / float(norm)), rtol=precision, atol=precision
    )


@pytest.mark.parametrize("foreach", [None, False])
def test_as_on_a_device(monkeypatch: pytest.MonkeyPatch, foreach: bool | None) -> None:
    """With room for more rows than there are, and whatever lies there."""
    monkeypatch.setattr("fastemb.optim._gradients.on_host", lambda _: False)
    monkeypatch.setattr("fastemb.optim.clip.on_host", lambda _: False)
    p, q = with_gradients(
        coo([1, 1, 3], torch.tensor([[2.0], [1.0], [4.0]]), 4), torch.tensor(12.0)
    )
    assert clip_grad_norm_([p, q], 1.0, foreach=foreach).item() == 13.0


def test_the_norm_of_repeated_rows_is_that_of_their_sum() -> None:
    p, q = with_gradients(coo([1, 1], torch.tensor([[3.0], [1.0]]), 4), torch.tensor([3.0]))
    assert clip_grad_norm_([p, q], 1.0).item() == 5.0
    torch.testing.assert_close(p.grad.to_dense()[1], torch.tensor([0.8]))
    torch.testing.assert_close(q.grad, torch.tensor([0.6]))


def test_what_is_small_enough_keeps_its_bits() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        params = with_gradients(coo([1, 1], torch.rand(2, 2).to(dtype), 3), torch.rand(3).to(dtype))
        before = [bits(params[0].grad._values()), bits(params[1].grad)]
        clip_grad_norm_(params, 100.0)
        assert [bits(params[0].grad._values()), bits(params[1].grad)] == before


def test_squares_do_not_overflow_nor_vanish() -> None:
    (p,) = with_gradients(torch.tensor([3e30, 4e30]))
    assert clip_grad_norm_([p], 1.0).item() == pytest.approx(5e30)
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
    (p,) = with_gradients(torch.tensor([3e-30, 4e-30]))
    assert clip_grad_norm_([p], 1.0).item() == pytest.approx(5e-30)
    (p,) = with_gradients(torch.full((4,), 60000.0, dtype=torch.float16))
    assert clip_grad_norm_([p], 1e-3).item() == 120000.0
    torch.testing.assert_close(p.grad, torch.full((4,), 5e-4, dtype=torch.float16))
    (p,) = with_gradients(torch.full((2,), 3e38))  # the norm is beyond float32
    clip_grad_norm_([p], 1.0)
    torch.testing.assert_close(p.grad, torch.full((2,), 0.5**0.5))


@pytest.mark.parametrize("device_like", [False, True])
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("size", [1e200, 1e-200, 3e307, 5e-324])
def test_powers_in_float64_do_not_overflow_nor_vanish(
    monkeypatch: pytest.MonkeyPatch, size: float, foreach: bool | None, device_like: bool
) -> None:
    if device_like:
        monkeypatch.setattr("fastemb.optim.clip.on_host", lambda _: False)
    ours, other, empty = with_gradients(
        torch.full((16,), size, dtype=torch.float64), torch.zeros(3), torch.zeros(0)
    )
    total = clip_grad_norm_([other, ours, empty], 1.0, foreach=foreach, error_if_nonfinite=True)
    assert total.item() == pytest.approx(4 * size, rel=1e-12, abs=0)
    want = 0.25 if size > 1 else size
    assert ours.grad.tolist() == pytest.approx([want] * 16, rel=1e-12, abs=0)


def test_high_powers() -> None:
    (p,) = with_gradients(torch.full((2,), 1e38))
    total = clip_grad_norm_([p], 1.0, 20.0)
    assert total.item() == pytest.approx(1e38 * 2**0.05)
    torch.testing.assert_close(p.grad, torch.full((2,), 2**-0.05))


def test_norms_beyond_float32() -> None:
    """Are returned as torch does, and it is what ``error_if_nonfinite`` refuses."""
    (p,) = with_gradients(torch.full((4,), 3e38))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([p], 1.0).item() == math.inf
    torch.testing.assert_close(p.grad, torch.full((4,), 0.5))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_complex_gradients(norm_type: float, foreach: bool | None) -> None:
    gradients = torch.tensor([3 + 4j, 0.5j]), torch.tensor([-1.0, 2.0])
    ours, theirs = (with_gradients(*(g.clone() for g in gradients)) for _ in range(2))
    total = clip_grad_norm_(ours, 1.0, norm_type, foreach=foreach)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    torch.testing.assert_close(total, wanted)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_gradients_that_are_changed_when_they_are_read(foreach: bool | None) -> None:
    z = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    (z.conj() * 5).sum().real.backward()
    assert z.grad is not None
    assert z.grad.is_conj()
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.full((3,), 2j).conj().imag
    assert p.grad.is_neg()
    norm = clip_grad_norm_([z, p], 1.0, foreach=foreach)
    expected = math.sqrt(6 * 25 + 3 * 4)
    torch.testing.assert_close(norm, torch.tensor(expected))
    torch.testing.assert_close(z.grad, torch.full((3, 2), 5 / expected, dtype=torch.complex64))
    torch.testing.assert_close(p.grad, torch.full((3,), -2 / expected))


def test_aliased_gradients_are_scaled_once() -> None:
    values = torch.full((2, 2), 2.0)
    a, b = with_gradients(coo([0, 1], values, 3), coo([2, 0], values, 4))
    shared = torch.full((2,), 2.0)
    c, d = with_gradients(shared, shared)
    assert a.grad._values().data_ptr() == b.grad._values().data_ptr()
    norm = clip_grad_norm_([a, b, c, d], 1.0)
    assert norm.item() == pytest.approx(48**0.5)
    for grad in (a.grad._values(), b.grad._values(), c.grad, d.grad):
        torch.testing.assert_close(grad, torch.full(grad.shape, 2 / 48**0.5))


@pytest.mark.parametrize("whole_first", [False, True])
def test_gradients_that_overlap_in_part_are_scaled_once(whole_first: bool) -> None:
    whole = torch.arange(1.0, 7.0)
    grads = [whole, whole[2:5], whole[5:], whole[:3], whole.view(2, 3).t()]
    if not whole_first:
        grads.reverse()
    rows = coo([0], whole[3:6].view(1, 3), 2)  # shares their memory, too
    want = torch.cat([g.flatten() for g in (*grads, whole[3:6])])
    params = [*with_gradients(*grads), *with_gradients(rows)]
    assert clip_grad_norm_(params, 1.0).item() == pytest.approx(want.norm().item())
    got = torch.cat(
        [
            p.grad.coalesce().values().flatten() if p.grad.is_sparse else p.grad.flatten()
            for p in params
        ]
    )
    torch.testing.assert_close(got, want / want.norm())


def test_gradients_without_memory_of_their_own() -> None:
    """As that of `DTensor`: two of the same shape are not the same one."""
    params = [nn.Parameter(TwoTensor(torch.zeros(3), torch.zeros(3))) for _ in range(2)]
    for param in params:
        param.grad = TwoTensor(torch.ones(3), torch.ones(3))
    clip_grad_norm_(params, 1.0, foreach=False)
    for param in params:
        torch.testing.assert_close(param.grad.a, torch.full((3,), 6**-0.5))


@pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed")
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2.0, 3.0, 7.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sharded_gradients(foreach: bool | None, norm_type: float, dtype: torch.dtype) -> None:
    """As `fully_shard` makes them, two at the same place of a buffer each, and a plain one."""
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        grads = [torch.randn(4, 3, dtype=dtype) for _ in range(3)]
        params = [
            *(
                nn.Parameter(DTensor.from_local(torch.cat([g, g])[4:], mesh, [Shard(0)]))
                for g in grads[:2]
            ),
            nn.Parameter(grads[2].clone()),
        ]
        for param in params:
            param.grad = param.detach()
        want = with_gradients(*(g.clone() for g in grads))
        total = clip_grad_norm_(params, 0.5, norm_type, foreach=foreach)
        torch.testing.assert_close(total, clip_grad_norm_(want, 0.5, norm_type))
        for param, plain in zip(params, want, strict=True):
            got = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            torch.testing.assert_close(got, plain.grad)
    finally:
        dist.destroy_process_group()


def test_a_parameter_given_twice_counts_once() -> None:
    p, q = with_gradients(torch.full((3,), 2.0), coo([0, 1], torch.tensor([[2.0], [3.0]]), 3))
    assert clip_grad_norm_([p, q, p, q], 1.0).item() == 5.0
    torch.testing.assert_close(p.grad, torch.full((3,), 0.4))
    torch.testing.assert_close(q.grad._values(), torch.tensor([[0.4], [0.6]]))


def test_gradients_that_overlap_themselves() -> None:
    """sum().backward() on a lookup: all rows are one row in memory."""
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([0, 2])).sum().backward()
    dense = nn.Parameter(torch.zeros(2, 3))
    dense.grad = torch.ones(1, 1).expand(2, 3)
    assert clip_grad_norm_([table.weight, dense], 1.0).item() == pytest.approx(12**0.5)
    torch.testing.assert_close(
        table.weight.grad.to_dense()[[0, 2]], torch.full((2, 3), 1 / 12**0.5)
    )
    torch.testing.assert_close(dense.grad, torch.full((2, 3), 1 / 12**0.5))


def test_large_gradients_in_any_order_of_memory() -> None:
    wide = torch.randn(400, 1000, generator=torch.Generator().manual_seed(0))
    for grad in (wide, wide.t(), wide[:, ::2]):
        (p,) = with_gradients(torch.zeros(grad.shape))
        p.grad = grad
        want = grad.double().square().sum().sqrt()
        kept = grad.clone()
        assert clip_grad_norm_([p], 1e-3).item() == pytest.approx(want.item(), rel=1e-6)
        assert p.grad is grad
        torch.testing.assert_close(grad, kept * (1e-3 / want.item()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite(bad: float) -> None:
    p, q = with_gradients(torch.tensor([1.0, 2.0]), coo([0], torch.tensor([[bad]]), 2))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([p, q], 1.0, error_if_nonfinite=True)
    assert p.grad.tolist() == [1.0, 2.0]
    assert not bool(torch.isfinite(clip_grad_norm_([p, q], 1.0)))


def test_arguments() -> None:
    p = nn.Parameter(torch.ones(2))
    total = clip_grad_norm_(p, 1.0)
    assert_same_bits(total, torch.tensor(0.0))
    (p,) = with_gradients(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm_(p, 1.0).item() == 5.0
    with pytest.raises(ValueError, match=r"norm_type must be > 0, got 0\.0"):
        clip_grad_norm_(p, 1.0, 0)
    p = nn.Parameter(torch.zeros(3, 4))
    p.grad = torch.eye(3, 4).to_sparse()
    with pytest.raises(ValueError, match=r"clip_grad_norm_: .*sparse_dim 2"):
        clip_grad_norm_(p, 1.0)
