"""Sparse gradients as rows to update: sorted, distinct, repeated ones summed in FP32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastemb import _row_ops  # noqa: F401  (defines the row operators)
from fastemb._offloaded import TABLES
from fastemb._reference import accumulation_dtype
from fastemb._row_queue import QueuedRows, add_rows_, on_host

_ops = torch.ops.fastemb


class RowGradient(NamedTuple):
    """Gradient row k belongs to row ``rows[k]`` of the parameter.

    Attributes:
        rows: [n] int64, ascending, distinct.
        used_rows: [1] int32 on the gradient's device: how many of them count; None: all.
        values: [n, dim], contiguous; with segments [any, dim].
        unscaled: whether the multiplier given to `row_gradient` has been applied.
        segments, sources, coefficients: of `fastemb._row_queue.QueuedRows`.
    """

    rows: Tensor
    used_rows: Tensor | None
    values: Tensor
    unscaled: bool
    segments: Tensor | None = None
    sources: Tensor | None = None
    coefficients: Tensor | None = None


def check_sparse(op: str, grad: Tensor) -> None:
    """Raise for a sparse gradient that is not one of rows.

    Raises:
        ValueError: another layout, or other sparse dimensions.
        IndexError: a row outside the table. On the CPU only: a device would be waited for, and its
            kernels pass over such rows.
    """
    if grad.layout != torch.sparse_coo:
        raise ValueError(f"{op}: gradients must be dense or sparse COO, got {grad.layout}")
    if grad.sparse_dim() != 1:
        raise ValueError(
            f"{op}: a sparse gradient must have 1 sparse dimension, its rows, got sparse_dim "
            f"{grad.sparse_dim()} and dense_dim {grad.dense_dim()} for shape {tuple(grad.shape)}"
        )
    rows = grad._indices()[0]
    if on_host(grad) and rows.numel() > 0:
        for row in map(int, rows.aminmax()):
            if not 0 <= row < grad.shape[0]:
                raise IndexError(
                    f"{op}: row {row} of a sparse gradient is outside its table of "
                    f"{grad.shape[0]} rows"
                )


def row_gradient(grad: Tensor | QueuedRows, multiplier: Tensor | None = None) -> RowGradient:
    """The rows of a sparse gradient that `check_sparse` passes; ``grad`` itself is only read.

    What a lookup with ``sparse="fused"`` has queued is passed on, for the kernels to sum.

    On a device this never waits for it: where rows have to be summed the result has room for the
    most there can be, and `RowGradient.used_rows` says how many there are.

    Args:
        grad: COO, (num_embeddings, ...), coalesced or not; or queued.
        multiplier: [] float32, applied where rows are summed, and before they are: a sum of scaled
            gradients can overflow where the gradient itself does not.
    """
    if isinstance(grad, QueuedRows):
        exact = grad.segments is None and on_host(grad.rows)
        return RowGradient(
            grad.rows,
            None if exact else grad.num_rows,
            grad.grad,
            False,
            grad.segments,
            grad.sources,
            grad.coefficients,
        )
    indices, values = _parts(grad)
    if _distinct_and_sorted(grad, indices):
        return RowGradient(indices, None, values.contiguous(), False)
    capacity = None if on_host(grad) else min(indices.numel(), grad.shape[0])
    rows, num_rows, sums = _sum_rows(grad.shape[0], indices, values, multiplier, capacity)
    used = None if capacity is None else num_rows
    return RowGradient(rows[: sums.shape[0]], used, sums, True)


def row_order(param: Tensor, rows: Tensor, used_rows: Tensor | None) -> Tensor | None:
    """Positions of ``rows`` of a queued gradient, in the order of the rows of ``param``.

    None: they are in it. Those of an offloaded table are slots, and a sum over all of them must not
    depend on which row is in which slot.

    Args:
        used_rows: how many of them count, None: all. The others come last.
    """
    table = TABLES.get(id(param))
    if table is None:
        return None
    if used_rows is not None:
        used = torch.arange(rows.shape[0], device=rows.device) < used_rows
        rows = torch.where(used, rows, -1)
    return table.row_order(rows)


def dense_gradient(grad: Tensor | QueuedRows, multiplier: Tensor | None = None) -> Tensor:
    """A gradient that `row_gradient` takes, as a dense FP32 (FP64 for float64) tensor.

    ``multiplier`` is applied before rows are summed, as by `row_gradient`; to queued rows after.
    """
    if isinstance(grad, QueuedRows):
        dtype = accumulation_dtype(grad.grad.dtype)
        table = grad.grad.new_zeros((grad.num_embeddings, grad.grad.shape[1]), dtype=dtype)
        add_rows_(table, grad.rows, grad, multiplier)
        return table
    indices, values = _parts(grad)
    rows = grad.shape[0]
    if indices.numel() == 0:
        dtype = accumulation_dtype(values.dtype)
        return torch.zeros(grad.shape, dtype=dtype, device=grad.device)
    _, _, sums = _sum_rows(rows, indices, values, multiplier, rows, dense=True)
    return sums.view(grad.shape)


def _parts(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers [nnz] int64, and values [nnz, dim] as they are stored."""
    values = grad._values()
    values = values.flatten(1) if grad.dense_dim() > 0 else values.unsqueeze(1)
    return grad._indices()[0].contiguous(), values


def _distinct_and_sorted(grad: Tensor, indices: Tensor) -> bool:
    """Whether the rows can be taken as they are.

    On the CPU the rows themselves are looked at: autograd drops the coalesced flag from gradients
    that deserve it. On a device that would be a synchronisation, and the flag decides.
    """
    if indices.numel() < 2:
        return True
    if on_host(grad):
        return bool((indices[1:] > indices[:-1]).all())
    return grad.is_coalesced()


def _sum_rows(
    num_embeddings: int,
    indices: Tensor,
    values: Tensor,
    multiplier: Tensor | None,
    out_rows: int | None,
    *,
    dense: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct rows, their number, and their sums: the backward of a lookup of ``indices``.

    ``out_rows`` None: as many as there are, which is read from the device.
    """
    lookups = indices.view(-1, 1)
    order, rows, segments, num_rows = _ops.group_indices(lookups, None, num_embeddings, -1, False)
    weights = None
    if multiplier is not None:
        weights = multiplier.expand(lookups.shape).contiguous()
    sums = _ops.embedding_bag_backward(
        values.contiguous(),
        lookups,
        None,
        weights,
        None,
        order,
        rows,
        segments,
        num_rows,
        num_embeddings,
        int(num_rows.item()) if out_rows is None else out_rows,
        "sum",
        -1,
        False,
        False,
        dense,
        accumulation_dtype(values.dtype),
    )
    return rows, num_rows, sums
