"""What a step refuses, before it changes anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optim_cases import CLASSES, assert_same_bits, coo, snapshot
from torch import Tensor, nn

import fastemb
from fastemb import optim


def _gradient(values: Tensor) -> Any:
    def assign(param: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        param.grad, param.grad_dtype = None, None
        param.grad = values

    return assign


ONES = torch.ones(3, 2)
DTYPES = (torch.float32, torch.float16, torch.float32)

REFUSED: dict[str, tuple[Any, str]] = {
    "sparse int64": (_gradient(ONES.long().to_sparse(1)), r"float64, got torch\.int64"),
    "sparse bool": (_gradient(ONES.bool().to_sparse(1)), r"float64, got torch\.bool"),
    "sparse complex": (_gradient(ONES.cfloat().to_sparse(1)), r"float64, got torch\.complex64"),
    "complex": (_gradient(ONES.cfloat()), r"must be .*, got torch\.complex64"),
    "expanded": (
        lambda p, o: setattr(p, "data", torch.ones(1, 2).expand(3, 2)),
        r"memory for each element, got strides \(0, 1\)",
    ),
    "no step": (
        lambda p, o: o.state[p].update(step=None),
        "state 'step' .* must be a tensor, got None",
    ),
    "lr on meta": (
        lambda p, o: o.param_groups[1].update(lr=torch.ones((), device="meta")),
        "lr must have a value",
    ),
    "complex lr": (
        lambda p, o: o.param_groups[1].update(lr=torch.tensor(1j)),
        "lr must be a number",
    ),
}


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_kernel_takes_changes_nothing(cls: type[optim.Adam], kind: str) -> None:
    good, half, bad = (nn.Parameter(ONES.to(dtype, copy=True)) for dtype in DTYPES)
    optimizer = cls([{"params": [good, half]}, {"params": [bad]}], lr=0.1)
    for param in (good, half, bad):
        param.grad = torch.ones_like(param)
    optimizer.step()
    spoil, message = REFUSED[kind]
    spoil(bad, optimizer)
    before = snapshot(optimizer)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=f"{cls.__name__}: .*{message}"):
        optimizer.step()
    assert snapshot(optimizer) == before


@pytest.mark.parametrize("decay", ["touched", "all"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.cfloat, torch.float8_e4m3fn])
def test_dtypes_of_gradients_of_rows(decay: str, dtype: torch.dtype) -> None:
    param = nn.Parameter(ONES.half())
    optimizer = optim.SGD([param], lr=0.1, decay=decay)
    for values in (ONES.to(dtype), coo([1], torch.ones(1, 2).to(dtype), 3)):
        _gradient(values)(param, optimizer)
        with pytest.raises(RuntimeError, match=r"gradient of a torch\.float16 .* must be float16"):
            optimizer.step()
    assert not optimizer.state
    assert torch.equal(param, ONES.half())


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("kind", ["dense", "bfloat16", "rows", "queued"])
@pytest.mark.parametrize("when", ["gradient", "state"])
def test_a_parameter_of_another_shape_than_before(when: str, kind: str, rows: int) -> None:
    """A table that was resized in place; kernels would write beyond it or its states."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    sparse: Any = {"rows": True, "queued": "fused"}.get(kind, False)
    table = fastemb.nn.Embedding(4, 3, sparse=sparse, dtype=dtype)
    optimizer = optim.Adam(table.parameters(), lr=0.1, lazy="rows")

    def backward() -> None:
        table(torch.tensor([0, 1])).sum().backward()

    backward()
    if when == "state":
        optimizer.step()
        optimizer.zero_grad()
    table.weight.data = torch.ones(rows, 3, dtype=dtype)
    if when == "state":
        backward()
    before = table.weight.detach().clone()
    with pytest.raises(RuntimeError, match=rf"^Adam: .*{when}.* of shape \({rows}, 3\)"):
        optimizer.step()
    assert_same_bits(table.weight, before)
    optimizer.zero_grad()
    optimizer.state.clear()
    backward()
    optimizer.step()
    assert bool((table.weight != before).any())


@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 2)])
@pytest.mark.parametrize(
    "options", [{"lazy": "exact"}, {"lazy": "rows", "row_bias_correction": True}], ids=str
)
def test_row_counters_of_a_table_that_lost_its_contiguous_rows(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """A dense step goes on counting; of three dimensions it moved a copy, and no parameter."""
    beside, table = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(shape))
    optimizer = optim.Adam([beside, table], **options)
    beside.grad, table.grad = torch.ones(3), torch.ones(shape).to_sparse(1)
    optimizer.step()
    table.data = table.detach().transpose(0, 1).contiguous().transpose(0, 1)
    table.grad = torch.ones(shape)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="must have contiguous rows"):
        optimizer.step()
    assert snapshot(optimizer) == before
    table.data = table.detach().contiguous()
    optimizer.step()
    assert_same_bits(table, torch.full_like(table, table.flatten()[0].item()))
    assert table.flatten()[0] < 0.9985
