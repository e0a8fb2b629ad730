"""The torch contract page: schema, fake kernel and autograd formula of every operator.

Kernels live elsewhere: `_reference` is registered here for every device, `_native` then loads the
faster ones over it. Callers use `fastemb.functional`, which validates; the operators check only
what memory safety needs. The numerics are defined in ``csrc/ops.h``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.multiprocessing.reductions import StorageWeakRef

from fastemb import _reference, _transforms
from fastemb._autograd import register_autograd
from fastemb._reference import accumulation_dtype
from fastemb._sleeping import TABLES, KeptTable, sleepers_behind

LIBRARY = torch.library.Library("fastemb", "DEF")
_ops = torch.ops.fastemb


def define(schemas: Mapping[str, str], reference: ModuleType) -> dict[str, Callable[..., Any]]:
    """Define operators; ``reference`` holds the kernel for any device under the same name.

    Returns:
        name -> reference kernel, what `_native.load` takes.
    """
    kernels = {name: getattr(reference, name) for name in schemas}
    for name, schema in schemas.items():
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(name, kernels[name], "CompositeExplicitAutograd")
    return kernels


SCHEMAS = {
    "embedding": (
        "(Tensor weight, Tensor indices, int padding_idx, bool scale_grad_by_freq, bool sparse, "
        "ScalarType output_dtype, str table) -> Tensor"
    ),
    "embedding_bag": (
        "(Tensor weight, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, str mode, "
        "int padding_idx, bool include_last_offset, bool scale_grad_by_freq, bool sparse, "
        "ScalarType output_dtype, str table) -> (Tensor output, Tensor argmax)"
    ),
    "group_indices": (
        "(Tensor indices, Tensor? offsets, SymInt num_embeddings, int padding_idx, "
        "bool include_last_offset) "
        "-> (Tensor order, Tensor rows, Tensor segments, Tensor num_rows)"
    ),
    "embedding_bag_backward": (
        "(Tensor grad_output, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, "
        "Tensor? argmax, Tensor order, Tensor rows, Tensor segments, Tensor num_rows, "
        "SymInt num_embeddings, SymInt out_rows, str mode, int padding_idx, "
        "bool include_last_offset, bool scale_grad_by_freq, bool dense, ScalarType grad_dtype) "
        "-> Tensor"
    ),
    "bag_terms": (
        "(Tensor indices, Tensor? offsets, Tensor? per_sample_weights, Tensor order, "
        "SymInt num_embeddings, str mode, int padding_idx, bool include_last_offset, "
        "ScalarType acc_dtype) -> (Tensor sources, Tensor coefficients)"
    ),
    "embedding_bag_per_sample_weights_backward": (
        "(Tensor grad_output, Tensor weight, Tensor indices, Tensor? offsets, str mode, "
        "int padding_idx, bool include_last_offset) -> Tensor"
    ),
    "embedding_renorm_": (
        "(Tensor(a!) weight, Tensor indices, float max_norm, float norm_type, str table) -> ()"
    ),
}

OPERATORS = define(SCHEMAS, _reference)

# Waits for the probe's device and raises what its kernels have reported (`fastemb.check_errors`);
# only CUDA kernels defer their errors.
LIBRARY.define("check_errors(Tensor probe) -> ()")
LIBRARY.impl("check_errors", lambda probe: None, "CompositeExplicitAutograd")


# What makes the gradient of a table, with the arguments of `_weight_gradient`.
WeightGradient = Callable[..., Tensor | None]


def _remember_table(ctx: Any, weight: Tensor) -> None:
    ctx.num_embeddings = weight.shape[0]
    ctx.grad_dtype = accumulation_dtype(weight.dtype)
    ctx.leaf = weakref.ref(weight) if ctx.sparse and weight.is_leaf else None


def _num_bags(indices: Tensor, offsets: Tensor | None, include_last_offset: bool) -> int:
    if offsets is None:
        return indices.shape[0]
    return offsets.shape[0] - int(include_last_offset)


# ---------------------------------------------------------------------------------------------
# embedding
# ---------------------------------------------------------------------------------------------


@torch.library.register_fake("fastemb::embedding", lib=LIBRARY)
def _embedding_fake(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    output_dtype: torch.dtype,
    table: str,
) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]), dtype=output_dtype)


def setup_embedding(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, ctx.padding_idx, ctx.scale_grad_by_freq, ctx.sparse, _, _ = inputs
    ctx.save_for_backward(indices)
    _remember_table(ctx, weight)


def differentiate_embedding(
    ctx: Any, grad: Tensor | None, weight_gradient: WeightGradient | None = None
) -> tuple[Tensor | None, ...]:
    """The backward; ``weight_gradient`` stands in for `_weight_gradient`, with its arguments."""
    if grad is None:
        return (None,) * 7
    (indices,) = ctx.saved_tensors
    grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_weight = (weight_gradient or _weight_gradient)(
            grad.reshape(indices.numel(), grad.shape[-1]),
            indices.reshape(-1, 1),
            None,
            None,
            None,
            ctx.num_embeddings,
            "sum",
            ctx.padding_idx,
            False,
            ctx.scale_grad_by_freq,
            ctx.sparse,
            ctx.grad_dtype,
            ctx.leaf,
        )
    return grad_weight, None, None, None, None, None, None


embedding = register_autograd(
    LIBRARY, "embedding", differentiate_embedding, setup_embedding, _transforms.embedding
)


# ---------------------------------------------------------------------------------------------
# embedding_bag
# ---------------------------------------------------------------------------------------------


@torch.library.register_fake("fastemb::embedding_bag", lib=LIBRARY)
def _embedding_bag_fake(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    sparse: bool,
    output_dtype: torch.dtype,
    table: str,
) -> tuple[Tensor, Tensor]:
    shape = (_num_bags(indices, offsets, include_last_offset), weight.shape[1])
    argmax = weight.new_empty(shape if mode == "max" else (0,), dtype=torch.int32)
    return weight.new_empty(shape, dtype=output_dtype), argmax


def setup_embedding_bag(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    weight, indices, offsets, per_sample_weights, *options = inputs
    (
        ctx.mode,
        ctx.padding_idx,
        ctx.include_last_offset,
        ctx.scale_grad_by_freq,
        ctx.sparse,
        _,
        table,
    ) = options
    argmax = output[1]
    ctx.mark_non_differentiable(argmax)
    ctx.set_materialize_grads(False)  # no zeros of argmax's size
    # The weight is kept only for the gradient that reads it, so that an optimizer may step in
    # between and the table is not pinned to the graph.
    needs_weight = per_sample_weights is not None and per_sample_weights.requires_grad
    sleepers = sleepers_behind(weight) if needs_weight and TABLES else None
    ctx.kept = None
    if sleepers is not None:
        ctx.kept = KeptTable("embedding_bag", weight, sleepers, table)
    ctx.save_for_backward(
        indices,
        offsets,
        per_sample_weights,
        argmax if ctx.mode == "max" else None,
        weight if needs_weight and sleepers is None else None,
    )
    _remember_table(ctx, weight)


def differentiate_embedding_bag(
    ctx: Any,
    grad: Tensor | None,
    _grad_argmax: Tensor | None,
    weight_gradient: WeightGradient | None = None,
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 11
    indices, offsets, per_sample_weights, argmax, weight = ctx.saved_tensors
    grad_weight = grad_per_sample = None
    if ctx.needs_input_grad[0]:
        grad_weight = (weight_gradient or _weight_gradient)(
            grad,
            indices,
            offsets,
            per_sample_weights,
            argmax,
            ctx.num_embeddings,
            ctx.mode,
            ctx.padding_idx,
            ctx.include_last_offset,
            ctx.scale_grad_by_freq,
            ctx.sparse,
            ctx.grad_dtype,
            ctx.leaf,
        )
    if ctx.needs_input_grad[3]:
        grad_per_sample = _ops.embedding_bag_per_sample_weights_backward(
            grad.to(ctx.grad_dtype),
            weight if ctx.kept is None else ctx.kept.unpack(),
            indices,
            offsets,
            ctx.mode,
            ctx.padding_idx,
            ctx.include_last_offset,
        ).to(per_sample_weights.dtype)
    return grad_weight, None, None, grad_per_sample, *[None] * 7


embedding_bag = register_autograd(
    LIBRARY,
    "embedding_bag",
    differentiate_embedding_bag,
    setup_embedding_bag,
    _transforms.embedding_bag,
)


# ---------------------------------------------------------------------------------------------
# row gradients
# ---------------------------------------------------------------------------------------------


def _weight_gradient(
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
    leaf: weakref.ref[Tensor] | None = None,
) -> Tensor:
    """Gradient of the table: dense, or a coalesced COO tensor of the rows that were looked up."""
    order, rows, segments, num_rows = _ops.group_indices(
        indices, offsets, num_embeddings, padding_idx, include_last_offset
    )
    out_rows = _count_rows(rows, num_rows, num_embeddings) if sparse else num_embeddings
    # No detour through the dispatcher when there is nothing to derive again.
    below = not torch.is_grad_enabled() and _functorch.peek_interpreter_stack() is None
    row_gradient = embedding_bag_backward if below else _ops.embedding_bag_backward
    values = row_gradient(
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
        out_rows,
        mode,
        padding_idx,
        include_last_offset,
        scale_grad_by_freq,
        not sparse,
        grad_dtype,
    )
    if not sparse:
        return values
    rows = rows[:out_rows]
    if out_rows == 0:
        # What is added to an empty sparse tensor is put into its memory, resized; that of the
        # kernels cannot be.
        rows, values = rows.clone(), values.clone()
    gradient = torch.sparse_coo_tensor(
        rows.unsqueeze(0),
        values,
        (num_embeddings, values.shape[1]),
        device=values.device,
        is_coalesced=True,
        check_invariants=False,
    )
    if leaf is not None:
        _keep_coalesced(leaf, gradient)
    return gradient


def _count_rows(rows: Tensor, num_rows: Tensor, num_embeddings: int) -> int:
    """How many of the rows count: the one host sync of a backward, for that is data.

    What they are at most where no tensor has values. A graph that is recorded so will see real ones
    and must not contain that bound, so there it stays torch's error.
    """
    without_values = num_rows.is_meta or (
        isinstance(num_rows, FakeTensor) and get_proxy_mode() is None
    )
    return min(rows.shape[0], num_embeddings) if without_values else int(num_rows.item())


def _keep_coalesced(leaf: weakref.ref[Tensor], gradient: Tensor) -> None:
    """Autograd drops the coalesced flag when it stores a sparse gradient; set it again.

    Without it every reader sorts and copies rows that are sorted already (`SparseAdam`, or
    ``coalesce()``, which takes longer than the backward). Only a gradient that still is this one,
    not a sum of several, is marked, and at once: what runs next, such as the hook by which
    `DistributedDataParallel` starts to reduce, may hand it to threads that read the flag. Hooks of
    the weight that are there already would come before that, and it stays unmarked.
    """
    weight = leaf()
    if weight is None or not weight.requires_grad or weight._post_accumulate_grad_hooks:
        return

    def identity(tensor: Tensor) -> tuple[object, ...]:
        # A weak reference keeps no memory, yet while it lives no other storage compares equal:
        # an address would, once the gradient is freed and its memory in use again.
        parts = (tensor._indices(), tensor._values())
        return tuple(
            (StorageWeakRef(x.untyped_storage()), x.storage_offset(), x.shape) for x in parts
        )

    ours = identity(gradient)

    def mark(weight: Tensor) -> None:
        handle.remove()
        stored = weight.grad
        if stored is not None and stored.layout == torch.sparse_coo and identity(stored) == ours:
            stored._coalesced_(True)

    handle = weight.register_post_accumulate_grad_hook(mark)
    # `torch.autograd.grad` stores nothing. A backward that raises does not call what is queued, but
    # lets go of it.
    remove = partial(handle.remove)
    weakref.finalize(remove, handle.remove)
    torch.autograd.Variable._execution_engine.queue_callback(remove)


@torch.library.register_fake("fastemb::group_indices", lib=LIBRARY)
def _group_indices_fake(
    indices: Tensor,
    offsets: Tensor | None,
    num_embeddings: int,
    padding_idx: int,
    include_last_offset: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = indices.numel()
    return (
        indices.new_empty((n,), dtype=torch.int32),
        indices.new_empty((n,), dtype=torch.int64),
        indices.new_empty((n + 1,), dtype=torch.int32),
        indices.new_empty((1,), dtype=torch.int32),
    )


@torch.library.register_fake("fastemb::bag_terms", lib=LIBRARY)
def _bag_terms_fake(
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    order: Tensor,
    num_embeddings: int,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
    acc_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    n = indices.numel()
    all_ones = mode == "sum" and per_sample_weights is None
    return (
        indices.new_empty((n,), dtype=torch.int32),
        indices.new_empty((0 if all_ones else n,), dtype=acc_dtype),
    )


@torch.library.register_fake("fastemb::embedding_bag_backward", lib=LIBRARY)
def _row_gradient_fake(
    grad_output: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    order: Tensor,
    rows: Tensor,
    segments: Tensor,
    num_rows: Tensor,
    num_embeddings: int,
    out_rows: int,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
    scale_grad_by_freq: bool,
    dense: bool,
    grad_dtype: torch.dtype,
) -> Tensor:
    return grad_output.new_empty((out_rows, grad_output.shape[1]), dtype=grad_dtype)


def _row_gradient_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, options = inputs[:9], inputs[9:]
    ctx.save_for_backward(*tensors)
    (
        ctx.num_embeddings,
        _,
        ctx.mode,
        ctx.padding_idx,
        ctx.include_last_offset,
        ctx.scale_grad_by_freq,
        ctx.dense,
        _,
    ) = options


def _row_gradient_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    """The row gradient is linear in grad_output and in the weights of the samples.

    With G the incoming gradient as a table, d/d grad_output is the forward lookup in G and
    d/d per_sample_weights the per-sample gradient against G.
    """
    if grad is None:
        return (None,) * 17
    saved = ctx.saved_tensors
    grad_output, indices, offsets, per_sample_weights, argmax, _, rows, segments, num_rows = saved
    count = _count_rows(rows, num_rows, ctx.num_embeddings)
    used = rows[:count]
    values = grad.index_select(0, used) if ctx.dense else grad
    if ctx.scale_grad_by_freq:
        occurrences = (segments[1 : count + 1] - segments[:count]).to(grad.dtype)
        values = values / occurrences.unsqueeze(1)
    table = grad.new_zeros((ctx.num_embeddings, grad.shape[1])).index_copy(0, used, values)

    grad_grad_output = grad_per_sample = None
    if ctx.needs_input_grad[0]:
        if ctx.mode == "max":
            grad_grad_output = _transforms.winners(table, indices, offsets, argmax).to(
                grad_output.dtype
            )
        else:
            grad_grad_output = _ops.embedding_bag(
                table,
                indices,
                offsets,
                per_sample_weights,
                ctx.mode,
                ctx.padding_idx,
                ctx.include_last_offset,
                False,
                False,
                grad_output.dtype,
                "",
            )[0]
    if per_sample_weights is not None and ctx.needs_input_grad[3]:
        grad_per_sample = _ops.embedding_bag_per_sample_weights_backward(
            grad_output.to(grad.dtype),
            table,
            indices,
            offsets,
            ctx.mode,
            ctx.padding_idx,
            ctx.include_last_offset,
        ).to(per_sample_weights.dtype)
    return grad_grad_output, None, None, grad_per_sample, *[None] * 13


embedding_bag_backward = register_autograd(
    LIBRARY,
    "embedding_bag_backward",
    _row_gradient_backward,
    _row_gradient_setup,
    _transforms.embedding_bag_backward,
)


# ---------------------------------------------------------------------------------------------
# gradient of the per-sample weights
# ---------------------------------------------------------------------------------------------


@torch.library.register_fake("fastemb::embedding_bag_per_sample_weights_backward", lib=LIBRARY)
def _per_sample_fake(
    grad_output: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    mode: str,
    padding_idx: int,
    include_last_offset: bool,
) -> Tensor:
    return weight.new_empty(indices.shape, dtype=accumulation_dtype(weight.dtype))


def _per_sample_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.mode, ctx.padding_idx, ctx.include_last_offset = inputs
    ctx.save_for_backward(*tensors)


def _per_sample_backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    """Bilinear in grad_output and weight: each derivative is a lookup weighted by ``grad``."""
    if grad is None:
        return (None,) * 7
    grad_output, weight, indices, offsets = ctx.saved_tensors
    grad_grad_output = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_grad_output = _ops.embedding_bag(
            weight,
            indices,
            offsets,
            grad,
            ctx.mode,
            ctx.padding_idx,
            ctx.include_last_offset,
            False,
            False,
            grad_output.dtype,
            "",
        )[0]
    if ctx.needs_input_grad[1]:
        grad_weight = _weight_gradient(
            grad_output,
            indices,
            offsets,
            grad,
            None,
            weight.shape[0],
            ctx.mode,
            ctx.padding_idx,
            ctx.include_last_offset,
            False,
            False,
            accumulation_dtype(weight.dtype),
        )
    return grad_grad_output, grad_weight, None, None, None, None, None


register_autograd(
    LIBRARY,
    "embedding_bag_per_sample_weights_backward",
    _per_sample_backward,
    _per_sample_setup,
    _transforms.embedding_bag_per_sample_weights_backward,
)


# ---------------------------------------------------------------------------------------------
# renorm
# ---------------------------------------------------------------------------------------------


@torch.library.register_fake("fastemb::embedding_renorm_", lib=LIBRARY)
def _renorm_fake(
    weight: Tensor, indices: Tensor, max_norm: float, norm_type: float, table: str
) -> None:
    return None


# One operator, not a check and `embedding_renorm_`: what traces lookups sees no values, and records
# no check of them. No backend has a kernel of its own for it.
LIBRARY.define(
    "embedding_bag_renorm_(Tensor(a!) weight, Tensor indices, Tensor offsets, "
    "bool include_last_offset, float max_norm, float norm_type, str table) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _bag_renorm(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    include_last_offset: bool,
    max_norm: float,
    norm_type: float,
    table: str,
) -> None:
    """`embedding_renorm_` for the ids that are in a bag, once the offsets are known to be good.

    On CUDA offsets are left to the lookup, but ``include_last_offset`` waits for the last one.
    """
    op = "embedding_bag"
    _transforms.check_same_offsets(op, offsets, "with max_norm")
    if offsets.is_cpu:
        _reference.check_offsets(op, offsets, indices.numel())
    if offsets.numel() == 0:
        indices = indices[:0]  # no bags
    elif include_last_offset:
        indices = indices[: max(int(offsets[-1]), 0)]
    _ops.embedding_renorm_(weight, indices, max_norm, norm_type, table)


LIBRARY.impl("embedding_bag_renorm_", _bag_renorm, "CompositeExplicitAutograd")


@torch.library.register_fake("fastemb::embedding_bag_renorm_", lib=LIBRARY)
def _bag_renorm_fake(*args: object) -> None:
    return None


def _renorm_batched(
    info: Any, in_dims: tuple[int | None, ...], weight: Tensor, indices: Tensor, *options: Any
) -> tuple[None, None]:
    """`torch.vmap`: all tables as one, so that all ids are checked before anything is written.

    An error counts the rows of all tables, too.
    """
    table_dim, ids_dim = in_dims[:2]
    if table_dim is None:
        _ops.embedding_renorm_(weight, indices, *options)
        return None, None
    tables = weight.movedim(table_dim, 0)
    num_tables, num_rows, _ = tables.shape
    one_table = tables.reshape(-1, tables.shape[2])
    ids = indices.expand(num_tables, *indices.shape) if ids_dim is None else indices
    ids = ids.movedim(ids_dim or 0, 0).reshape(num_tables, -1).to(torch.int64)
    begin = torch.arange(num_tables, device=ids.device).unsqueeze(1) * num_rows
    # Past the last of all rows, if it is past the last of its own.
    begin = torch.where(ids < num_rows, begin, (num_tables - 1) * num_rows)
    _ops.embedding_renorm_(one_table, torch.where(ids < 0, ids, ids + begin), *options)
    tables.copy_(one_table.view_as(tables))  # nothing where they share memory
    return None, None


torch.library.register_vmap("fastemb::embedding_renorm_", _renorm_batched, lib=LIBRARY)
LIBRARY.impl("embedding_bag_renorm_", _bag_renorm, "FuncTorchBatched")


def _count_writes(name: str) -> None:
    """Let an operator tell autograd that it has written ``weight``: what was saved is stale.

    The dispatcher does not do so by itself. One that raises has written nothing.
    """
    operator = getattr(_ops, name).default

    def count(weight: Tensor, *args: Any) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            operator(weight, *args)
        torch.autograd.graph.increment_version(weight)

    LIBRARY.impl(name, count, "ADInplaceOrView")


_count_writes("embedding_renorm_")
_count_writes("embedding_bag_renorm_")
