"""Functions with the signatures of `torch.nn.functional`, validated, over every backend.

The only callers of the lookups in ``torch.ops.fastemb``. What depends on the values of ids and
offsets is checked by the operators themselves: on the CPU before anything is written (`IndexError`,
`ValueError`); on CUDA without a host sync, raised by a later call (see `fastemb.check_errors`).
"""

from __future__ import annotations

import operator
import warnings
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C import _functorch
from torch._compile import _disable_dynamo
from torch.nn import Parameter

from fastemb import _fused, _ops, _transforms
from fastemb._renorm import renorm_
from fastemb._sleeping import TABLES, wake_batch, wake_batch_outside_graph

__all__ = ["embedding", "embedding_bag"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)
TABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INDEX_DTYPES = (torch.int32, torch.int64)
_MODES = ("sum", "mean", "max")
Sparse = bool | Literal["fused"]
_MAX_INDICES = 2**31 - 1


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: Sparse = False,
    *,
    output_dtype: torch.dtype | None = None,
    table: str = "",
) -> Tensor:
    """Rows of ``weight`` named by ``input``; `torch.nn.functional.embedding` and more.

    Args:
        input: int32 or int64, any shape.
        weight: (num_embeddings, embedding_dim), float16, bfloat16, float32 or float64.
        padding_idx: row that gets no gradient; negative counts from the end.
        max_norm: rows looked up whose ``norm_type`` norm exceeds this are scaled down to it, in
            place, before the lookup.
        scale_grad_by_freq: divide a row's gradient by how often ``input`` names it.
        sparse: True: the gradient of ``weight`` is a coalesced COO tensor of the rows looked up.
            "fused": there is none, ``weight.grad`` stays None. The backward queues what the rows of
            the gradient are made of, and the step of an optimizer of `fastemb.optim` sums and
            applies them in one kernel, with the bits that True gives, accumulation included. What
            would see a gradient is refused by name: other optimizers, `torch.amp.GradScaler`,
            `torch.autograd.grad` for the weight, its hooks, ``create_graph=True``, a weight that is
            no leaf, `torch.func`. The queue is emptied by the step and by ``zero_grad()`` of the
            optimizer or of the module, not by ``zero_grad()`` of a module around it. Where the
            lookup is traced (`torch.jit.trace`, `torch.export`, tensor subclasses) it is True.
        output_dtype: dtype of the result; that of ``weight`` by default.
        table: the table's name in error messages.

    Returns:
        ``(*input.shape, embedding_dim)``. Gradients reach ``weight`` in FP32 (FP64 for a float64
        table); autograd rounds them to ``weight.dtype`` unless ``weight.grad_dtype`` says float32.
        Within a `torch.compile` graph they are always rounded so: AOTAutograd does not know
        ``grad_dtype``. Sparse gradients stay outside the graph and keep FP32.
        What `torch.func` or forward-mode AD differentiates is computed in plain torch; its
        gradients have the dtype of ``weight`` and are never sparse.

    Raises:
        TypeError: a dtype outside those above, an option of another type.
        ValueError: a shape, device or option that does not fit.
        IndexError: an id outside ``[0, num_embeddings)``.
        RuntimeError: see ``sparse``; when the lookup is made, in the backward or in the step.
    """
    op = "embedding"
    check_weight(op, weight)
    check_sparse(op, sparse)
    check_options(op, scale_grad_by_freq, False, table)
    _check_input(op, input, weight)
    pad = resolve_padding(op, padding_idx, weight.shape[0])
    dtype = _resolve_output_dtype(op, output_dtype, weight)
    fused = sparse == "fused" and _queues_gradients(op, weight, table)
    _wake(weight, input, None)  # a lookup reads its padding row, too
    if max_norm is not None:
        _renorm(weight, input, max_norm, norm_type, table)
    args = (weight, input, pad, scale_grad_by_freq, bool(sparse), dtype, table)
    if _transforms.differentiates(weight):
        return _transforms.embedding(*args)
    if fused:
        return _fused.embedding(*args)
    if _in_compiled_training(weight):
        if sparse:
            return _embedding_outside_graph(sparse, *args)
        if weight.dtype in _LOW_PRECISION:
            _warn_of_rounded_gradient()
    lookup = _ops.embedding if _is_plain(weight) else torch.ops.fastemb.embedding
    return lookup(*args)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: Sparse = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    *,
    output_dtype: torch.dtype | None = None,
    table: str = "",
) -> Tensor:
    """Sums, means or maxima of bags of rows; `torch.nn.functional.embedding_bag` and more.

    Args:
        input: int32 or int64 ids; (num_bags, bag_length), or 1-D with ``offsets``.
        weight: (num_embeddings, embedding_dim), float16, bfloat16, float32 or float64.
        offsets: int32 or int64, where each bag begins in a 1-D ``input``: ascending from 0.
        max_norm, norm_type, scale_grad_by_freq, sparse, output_dtype, table: as in `embedding`.
        mode: "sum", "mean" or "max". In "max" a NaN wins, and of equal values the first.
        per_sample_weights: weight of each id, shape of ``input``, any float dtype; "sum" and
            "mean". The mean divides the weighted sum by the number of ids in the bag.
        include_last_offset: the last offset closes the last bag; ids behind it are in no bag.
        padding_idx: ids equal to it are left out of the bag; negative counts from the end.

    Returns:
        ``(num_bags, embedding_dim)``; an empty bag is zero. Sums are kept in FP32 (FP64 for a
        float64 table) and rounded once.

    Raises:
        TypeError, ValueError, IndexError: as in `embedding`; ValueError also for offsets that do
        not ascend from 0 or pass the end of ``input``.
        NotImplementedError: offsets that `torch.vmap` maps over, with ``max_norm`` or where the
            lookup is differentiated by `torch.func`.
        RuntimeError: as in `embedding`.
    """
    op = "embedding_bag"
    check_weight(op, weight)
    check_sparse(op, sparse)
    check_options(op, scale_grad_by_freq, include_last_offset, table)
    _check_input(op, input, weight)
    _check_bags(op, input, offsets, include_last_offset)
    check_mode(op, mode, scale_grad_by_freq)
    if per_sample_weights is not None:
        _check_per_sample_weights(op, per_sample_weights, input, mode)
    pad = resolve_padding(op, padding_idx, weight.shape[0])
    dtype = _resolve_output_dtype(op, output_dtype, weight)
    fused = sparse == "fused" and _queues_gradients(op, weight, table)
    # The padding row is in no bag, but max_norm shrinks it with the others.
    _wake(weight, input, padding_idx if max_norm is None else None)
    if max_norm is not None:
        _renorm(weight, input, max_norm, norm_type, table, offsets, include_last_offset)
    args = (
        weight,
        input,
        offsets,
        per_sample_weights,
        mode,
        pad,
        include_last_offset,
        scale_grad_by_freq,
        bool(sparse),
        dtype,
        table,
    )
    if _transforms.differentiates(weight, per_sample_weights):
        return _transforms.embedding_bag(*args)[0]
    if fused:
        return _fused.embedding_bag(*args)[0]
    if _in_compiled_training(weight):
        if sparse:
            return _embedding_bag_outside_graph(sparse, *args)
        if weight.dtype in _LOW_PRECISION:
            _warn_of_rounded_gradient()
    lookup = _ops.embedding_bag if _is_plain(weight) else torch.ops.fastemb.embedding_bag
    return lookup(*args)[0]


# ---------------------------------------------------------------------------------------------
# checks that read shapes and dtypes only
# ---------------------------------------------------------------------------------------------


def _is_traced(tensor: Tensor) -> bool:
    """Whether shapes and values are not to be looked at: in a compiler, recorded, or fake."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or type(tensor) is not Tensor
    )


def _is_plain(weight: Tensor) -> bool:
    """Whether nothing stands above autograd that would have to see the operator itself."""
    return (
        type(weight) in (Tensor, Parameter)
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and _functorch.peek_interpreter_stack() is None
    )


def _got(tensor: Tensor) -> str:
    return f"{tensor.dim()}-D {str(tensor.dtype).removeprefix('torch.')}"


def check_weight(op: str, weight: Tensor, name: str = "weight") -> None:
    """Raise for what cannot be a table; ``name`` is that of the argument."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(weight).__name__}")
    if weight.dtype not in TABLE_DTYPES:
        raise TypeError(
            f"{op}: {name} must be float16, bfloat16, float32 or float64, got {_got(weight)}"
        )
    if weight.dim() != 2:
        raise ValueError(f"{op}: {name} must be 2-D, got {_got(weight)}")
    _check_layout(op, name, weight)


def _check_layout(op: str, name: str, tensor: Tensor) -> None:
    if tensor.is_nested:
        raise ValueError(f"{op}: {name} must not be nested; pass its values() and offsets()")
    if tensor.layout != torch.strided and type(tensor) in (Tensor, Parameter):
        raise ValueError(f"{op}: {name} must be a dense tensor, got one of {tensor.layout}")


def check_sparse(op: str, sparse: Sparse) -> None:
    if not isinstance(sparse, int) and sparse != "fused":  # torch takes 0 and 1, too
        raise TypeError(f"{op}: sparse must be True, False or 'fused', got {sparse!r}")


def check_options(op: str, scale_grad_by_freq: bool, include_last_offset: bool, table: str) -> None:
    for name, flag in (
        ("scale_grad_by_freq", scale_grad_by_freq),
        ("include_last_offset", include_last_offset),
    ):
        if not isinstance(flag, int):  # 0 and 1 will do, as for sparse
            raise TypeError(f"{op}: {name} must be True or False, got {flag!r}")
    if not isinstance(table, str):
        raise TypeError(f"{op}: table must be a string, got {table!r}")


def check_mode(op: str, mode: str, scale_grad_by_freq: bool) -> None:
    if mode not in _MODES:
        raise ValueError(f"{op}: mode must be 'sum', 'mean' or 'max', got {mode!r}")
    if mode == "max" and scale_grad_by_freq:
        raise ValueError(f"{op}: scale_grad_by_freq must be False in mode 'max', got True")


def _check_input(op: str, input: Tensor, weight: Tensor) -> None:
    if not isinstance(input, Tensor):
        raise TypeError(f"{op}: input must be a tensor, got {type(input).__name__}")
    if input.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{op}: input must be int32 or int64, got {_got(input)}")
    _check_layout(op, "input", input)
    if input.device != weight.device:
        raise ValueError(
            f"{op}: input must be on weight's device {weight.device}, got {input.device}"
        )
    # While tracing it would become a guard on the batch size; the kernels check it themselves.
    if not _is_traced(input) and input.numel() > _MAX_INDICES:
        raise ValueError(f"{op}: input must hold at most {_MAX_INDICES} ids, got {input.numel()}")


def _check_bags(op: str, input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> None:
    if input.dim() == 2:
        if offsets is not None:
            raise ValueError(f"{op}: offsets must be None for a 2-D input, got {_got(offsets)}")
        return
    if input.dim() != 1:
        raise ValueError(f"{op}: input must be 1-D or 2-D, got {_got(input)}")
    if not isinstance(offsets, Tensor):
        raise ValueError(f"{op}: offsets must be a tensor for a 1-D input, got {offsets!r}")
    if offsets.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{op}: offsets must be 1-D int32 or int64, got {_got(offsets)}")
    if offsets.dim() != 1:
        raise ValueError(f"{op}: offsets must be 1-D int32 or int64, got {_got(offsets)}")
    _check_layout(op, "offsets", offsets)
    if offsets.device != input.device:
        raise ValueError(
            f"{op}: offsets must be on input's device {input.device}, got {offsets.device}"
        )
    if include_last_offset and offsets.shape[0] == 0:
        raise ValueError(
            f"{op}: offsets must hold at least one element with include_last_offset, got 0"
        )


def _check_per_sample_weights(op: str, weights: Tensor, input: Tensor, mode: str) -> None:
    if mode == "max":
        raise ValueError(f"{op}: per_sample_weights must be None in mode 'max', got a tensor")
    if not isinstance(weights, Tensor):
        raise TypeError(f"{op}: per_sample_weights must be a tensor, got {type(weights).__name__}")
    if weights.dtype not in TABLE_DTYPES:
        raise TypeError(
            f"{op}: per_sample_weights must be float16, bfloat16, float32 or float64, "
            f"got {_got(weights)}"
        )
    _check_layout(op, "per_sample_weights", weights)
    if weights.shape != input.shape:
        raise ValueError(
            f"{op}: per_sample_weights must have input's shape {tuple(input.shape)}, "
            f"got {tuple(weights.shape)}"
        )
    if weights.device != input.device:
        raise ValueError(
            f"{op}: per_sample_weights must be on input's device {input.device}, "
            f"got {weights.device}"
        )


def resolve_padding(op: str, padding_idx: int | None, num_embeddings: int) -> int:
    """Non-negative padding row, -1 for none."""
    if padding_idx is None:
        return -1
    try:
        row = None if isinstance(padding_idx, bool) else operator.index(padding_idx)
    except TypeError:
        row = None
    if row is None:
        raise TypeError(f"{op}: padding_idx must be an integer or None, got {padding_idx!r}")
    if num_embeddings == 0:
        raise ValueError(
            f"{op}: padding_idx must be None for a table of no rows, got {padding_idx}"
        )
    if not -num_embeddings <= row < num_embeddings:
        raise ValueError(
            f"{op}: padding_idx must be within [-{num_embeddings}, {num_embeddings}), "
            f"got {padding_idx}"
        )
    return row % num_embeddings


def _resolve_output_dtype(op: str, output_dtype: torch.dtype | None, weight: Tensor) -> torch.dtype:
    if output_dtype is None:
        return weight.dtype
    if output_dtype not in TABLE_DTYPES:
        raise TypeError(
            f"{op}: output_dtype must be float16, bfloat16, float32 or float64, got {output_dtype}"
        )
    return output_dtype


def _renorm(
    weight: Tensor,
    input: Tensor,
    max_norm: float,
    norm_type: float,
    table: str,
    offsets: Tensor | None = None,
    include_last_offset: bool = False,
) -> None:
    options = (_number("max_norm", max_norm), _number("norm_type", norm_type), table)
    if not max_norm >= 0:
        raise ValueError(f"embedding_renorm_: max_norm must not be negative, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"embedding_renorm_: norm_type must be positive, got {norm_type}")
    if weight.shape[1] > 1 and weight.stride(1) == 0:
        raise ValueError(
            "embedding_renorm_: weight must have memory for each element of a row, which max_norm "
            f"writes, got strides {weight.stride()}; use a copy of what was expanded"
        )
    with torch.no_grad():
        renorm_(weight, input, offsets, include_last_offset, *options)


def _number(name: str, value: Any) -> float:
    one_element = isinstance(value, Tensor) and value.numel() == 1  # which torch takes, too
    if not isinstance(value, (int, float, Real)) and not one_element:
        raise TypeError(f"embedding_renorm_: {name} must be a number, got {value!r}")
    return float(value)


def _queues_gradients(op: str, weight: Tensor, table: str) -> bool:
    """Whether a lookup with ``sparse="fused"`` is more than a lookup; refuse it where it cannot be.

    Not where the operator itself has to be seen: a trace, a subclass of tensors.
    """
    if (
        not (weight.requires_grad and torch.is_grad_enabled())
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or type(weight) not in (Tensor, Parameter)
    ):
        return False
    _fused.check(op, weight, table)
    return True


def _wake(weight: Tensor, input: Tensor, padding_idx: int | None) -> None:
    """Wake rows that ``lazy="exact"`` lets sleep, once the lookup is known to be a good one."""
    if not torch.compiler.is_compiling():
        if TABLES:
            wake_batch(weight, input, padding_idx)
    # Dynamo guards on what is asked here: as long as there are no such tables, not on each weight.
    # What is no parameter may be a view of one, which only the tensors themselves can tell.
    elif TABLES and (not isinstance(weight, Parameter) or id(weight) in TABLES):
        wake_batch_outside_graph(weight, input, padding_idx)


# ---------------------------------------------------------------------------------------------
# gradients under torch.compile
# ---------------------------------------------------------------------------------------------

# _disable_dynamo is torch.compiler.disable without the seconds that importing Dynamo costs.

_warned_of_graph_break = False
_warned_of_rounded_gradient = False


def _in_compiled_training(weight: Tensor) -> bool:
    """Dynamo is tracing and a gradient will be wanted: AOTAutograd cannot trace a COO gradient."""
    return (
        torch.compiler.is_dynamo_compiling()
        and not torch.compiler.is_exporting()
        and weight.requires_grad
        and torch.is_grad_enabled()
    )


def _warn_of_graph_break(sparse: Sparse) -> None:
    global _warned_of_graph_break
    if not _warned_of_graph_break:
        _warned_of_graph_break = True
        warnings.warn(
            f"fastemb: a lookup with sparse={sparse!r} runs outside the compiled graph "
            "(torch.compile cannot trace sparse gradients); use sparse=False for one graph",
            stacklevel=3,
        )


@_disable_dynamo
def _embedding_outside_graph(sparse: Sparse, weight: Tensor, *args: object) -> Tensor:
    _warn_of_graph_break(sparse)
    if sparse == "fused" and _queues_gradients("embedding", weight, str(args[-1])):
        return _fused.embedding(weight, *args)
    return torch.ops.fastemb.embedding(weight, *args)


@_disable_dynamo
def _embedding_bag_outside_graph(sparse: Sparse, weight: Tensor, *args: object) -> Tensor:
    _warn_of_graph_break(sparse)
    if sparse == "fused" and _queues_gradients("embedding_bag", weight, str(args[-1])):
        return _fused.embedding_bag(weight, *args)[0]
    return torch.ops.fastemb.embedding_bag(weight, *args)[0]


def _warn_of_rounded_gradient() -> None:
    """AOTAutograd traces parameters without their ``grad_dtype``."""
    global _warned_of_rounded_gradient
    if not _warned_of_rounded_gradient:
        _warned_of_rounded_gradient = True
        warnings.warn(
            "fastemb: torch.compile rounds the finished gradient of an fp16 or bf16 table to the "
            "dtype of the table, so values below its range are lost; sparse=True, or the lookup "
            "outside the compiled region, keeps it in FP32",
            stacklevel=2,
        )


# What torch.compiler.assume_constant_result does, again without importing Dynamo: the warning is
# given while Dynamo traces and leaves nothing in the graph.
setattr(_warn_of_rounded_gradient, "_dynamo_marked_constant", True)  # noqa: B010
