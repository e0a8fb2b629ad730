"""Lookups with ``sparse="fused"``: their backward queues row gradients for `fastemb.optim`.

The forward and the gradient of ``per_sample_weights`` are those of the operators; ``weight.grad``
stays None. What would need a gradient tensor is refused by name.

Lookups in an offloaded table read its cache on the device, a leaf that says in ``stands_for``, a
weak reference, which parameter it stands for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd.function import BackwardCFunction

from fastemb import _ops, _row_queue, _transforms
from fastemb._autograd import make_function
from fastemb._offloaded import HeldSlots


def check(op: str, weight: Tensor, table: str) -> None:
    """Raise for a weight whose gradient somebody wants to see.

    Raises:
        RuntimeError: ``weight`` is no leaf, or has hooks.
        NotImplementedError: within a transform of `torch.func`.
    """
    if _functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            f"{op}: {_row_queue.named(weight, table)} has sparse='fused', which cannot be used "
            "within torch.func (grad, vmap, ...) while its weight requires grad; use sparse=True"
        )
    if not weight.is_leaf:
        raise RuntimeError(
            f"{op}: with sparse='fused' weight must be a leaf, but that of "
            f"{_row_queue.named(weight, table)} was computed (a parametrization, a replica, a "
            "cast); use sparse=True"
        )
    _refuse_hooks(op, weight, table)


def hold(output: Tensor, slots: HeldSlots) -> None:
    """Let the backward of a lookup that made ``output`` find its rows where they were.

    What `fastemb._transforms` has made has nodes of torch, which keep copies of rows.
    """
    node: Any = output.grad_fn
    if isinstance(node, BackwardCFunction):
        node.hold = Hold(slots)  # type: ignore[attr-defined]


class Hold:
    """What the backward of a lookup in an offloaded table keeps in place until it runs."""

    def __init__(self, slots: HeldSlots) -> None:
        self._slots: HeldSlots | None = slots
        self._seen = weakref.ref(slots)

    def take(self, op: str) -> HeldSlots:
        """The slots, which from now on only the queued gradient holds.

        Raises:
            RuntimeError: a step has consumed that gradient, and the rows may be gone.
        """
        slots = self._slots or self._seen()
        if slots is None:
            raise RuntimeError(
                f"{op}: a second backward through a lookup in an offloaded table has to come "
                "before optimizer.step(), which lets its rows leave the cache"
            )
        self._slots = None
        return slots


class DenseGradientHook:
    """A hook for what is accumulated in ``.grad``, that misses nothing where there is no ``.grad``.

    Args:
        call: with the parameter.
    """

    def __init__(self, call: Callable[[Tensor], None]) -> None:
        self._call = call

    def __call__(self, param: Tensor) -> None:
        self._call(param)


def has_hooks(weight: Tensor) -> bool:
    """Whether somebody waits for its gradients, also for those that never come into ``.grad``."""
    after = (weight._post_accumulate_grad_hooks or {}).values()
    ours = all(isinstance(hook, DenseGradientHook) for hook in after)
    return bool(weight._backward_hooks) or not ours


def _refuse_hooks(op: str, weight: Tensor, table: str) -> None:
    if has_hooks(weight):
        raise RuntimeError(
            f"{op}: the weight of {_row_queue.named(weight, table)} has hooks, but with "
            "sparse='fused' there is no gradient to call them with; remove them, or use sparse=True"
        )


def _queue(
    ctx: Any,
    grad_output: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: int,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    sparse: bool,
    grad_dtype: torch.dtype,
    leaf: weakref.ref[Tensor],
) -> None:
    """In place of `_ops.weight_gradient`: queue the gradient, and return none."""
    weight = leaf()
    if weight is None or not weight.requires_grad or not _wants_gradient(ctx, weight):
        return
    keeps: tuple[object, ...] = ()
    if hasattr(ctx, "hold"):
        hold = ctx.hold.take(ctx.op)
        weight, keeps = hold.weight, (hold,)
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{ctx.op}: {_row_queue.named(weight, ctx.table)} has sparse='fused', whose gradient "
            "cannot be differentiated again (create_graph=True); use sparse=True"
        )
    if _transforms.differentiates(grad_output, per_sample_weights):
        raise RuntimeError(
            f"{ctx.op}: {_row_queue.named(weight, ctx.table)} has sparse='fused', whose gradient "
            "has no tangent for forward-mode AD; use sparse=False"
        )
    _refuse_hooks(ctx.op, weight, ctx.table)

    operators = torch.ops.fastemb
    order, rows, segments, num_rows = operators.group_indices(
        indices, offsets, num_embeddings, padding_idx, include_last_offset
    )
    backward = torch._C._current_graph_task_id()
    if mode == "max" or scale_grad_by_freq:
        # No matrix product of the two: the rows are made here, with room for all there can be.
        room = int(num_rows) if _row_queue.on_host(num_rows) else min(len(rows), num_embeddings)
        values = operators.embedding_bag_backward(
            grad_output,
            indices,
            offsets,
            per_sample_weights,
            argmax,
            order,
            rows,
            segments,
            num_rows,
            num_embeddings,
            room,
            mode,
            padding_idx,
            include_last_offset,
            scale_grad_by_freq,
            False,
            grad_dtype,
        )
        part = _row_queue.queued_rows(
            values, rows[: len(values)], num_rows, None, None, None, num_embeddings, backward,
            keeps,
        )  # fmt: skip
    else:
        grad = grad_output.detach()
        if grad._is_zerotensor():  # has no memory, and contiguous() leaves it so
            grad = grad.clone()
        if (grad.dtype == torch.float64) != (grad_dtype == torch.float64):
            grad = grad.to(grad_dtype)
        sources, coefficients = order, None
        if per_sample_weights is not None or indices.dim() != 2 or indices.shape[1] != 1:
            sources, coefficients = operators.bag_terms(
                indices,
                offsets,
                per_sample_weights,
                order,
                num_embeddings,
                mode,
                padding_idx,
                include_last_offset,
                grad_dtype,
            )
            if mode == "sum" and per_sample_weights is None:
                coefficients = None  # all are 1
        part = _row_queue.queued_rows(
            grad.contiguous(),
            rows,
            num_rows,
            segments,
            sources,
            coefficients,
            num_embeddings,
            backward,
            keeps,
        )
    _row_queue.append(weight, ctx.table, part)


def _wants_gradient(ctx: Any, weight: Tensor) -> bool:
    """Whether this backward is to accumulate a gradient of the weight."""
    accumulate = ctx.next_functions[0][0]
    try:
        return torch._C._will_engine_execute_node(accumulate)
    except RuntimeError:  # the engine answers for .backward() only: a gradient is to be returned
        raise RuntimeError(
            f"{ctx.op}: torch.autograd.grad cannot return the gradient of "
            f"{_row_queue.named(weight, ctx.table)}, which has sparse='fused'; use backward() and "
            "an optimizer of fastemb.optim, or sparse=True"
        ) from None


def _make_lookup(
    op: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> Callable[..., Any]:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        setup_context(ctx, inputs, output)
        ctx.op, ctx.table = op, inputs[-1]

    def queueing_backward(ctx: Any, *grads: Tensor | None) -> Any:
        return backward(ctx, *grads, weight_gradient=partial(_queue, ctx))

    in_memory = make_function(op, queueing_backward, setup)

    # The parameter is the input that autograd sees, so that a gradient which is asked for by name
    # finds it, and so does `fastemb.amp`, which looks for the parameters behind a boundary.
    def forward(ctx: Any, weight: Tensor, *args: Any) -> Any:
        *args_of_lookup, cache = args
        output = in_memory.forward(ctx, cache, *args_of_lookup)
        ctx.leaf = weakref.ref(weight)
        return output

    def offloaded_backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (*queueing_backward(ctx, *grads), None)

    offloaded = type(
        op,
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(offloaded_backward)},
    )

    def lookup(weight: Tensor, *args: Any) -> Any:
        stands_for = getattr(weight, "stands_for", None)
        if stands_for is None:
            return in_memory.apply(weight, *args)
        return offloaded.apply(stands_for(), *args, weight.detach())  # type: ignore[attr-defined]

    return lookup


# They take what the operators take, with ``sparse`` True; the weight requires grad and passes
# `check`.
embedding = _make_lookup("embedding", _ops.differentiate_embedding, _ops.setup_embedding)
embedding_bag = _make_lookup(
    "embedding_bag", _ops.differentiate_embedding_bag, _ops.setup_embedding_bag
)
