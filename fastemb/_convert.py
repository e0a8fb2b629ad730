"""`convert` swaps torch's embedding modules in a model for those of `fastemb.nn`, in place.

Nothing is rebuilt: a module keeps its identity, name, hooks and attributes and only changes its
class; a parameter stays the same object, so ties and existing optimizers hold. Everything is
checked before the first change, so a refused model is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from fastemb import _convert_boundary, _convert_offload
from fastemb._convert_report import ConvertedTable, Report, covers, display, short, taken
from fastemb._memory import advise_huge_pages
from fastemb._row_queue import refuse_waiting
from fastemb._sleeping import wake_all
from fastemb.functional import TABLE_DTYPES, Sparse
from fastemb.nn import Embedding, EmbeddingBag
from fastemb.nn._table import Table, check_table_dtype, keep_full_gradients

if TYPE_CHECKING:
    from fastemb.offload.engine import OffloadEngine

__all__ = ["convert", "revert"]

Skip = Collection[str] | Callable[[str, nn.Module], bool]

_OURS: dict[type[nn.Module], type[Table]] = {
    nn.Embedding: Embedding,
    nn.EmbeddingBag: EmbeddingBag,
}
_ORIGIN = "_fastemb_origin"  # attribute of a converted module: what it was
_ATTRIBUTES = ("output_dtype", "table", _ORIGIN)  # what a converted module has beyond torch's
# What a subclass may define and still be no more than a torch module once it is built.
_CONSTRUCTION_ONLY = {
    "__init__",
    "__new__",
    "reset_parameters",
    "_fill_padding_idx_with_zero",
    "extra_repr",
    "from_pretrained",
}
_CHECKED_ELEMENTS = 1 << 20  # at a time, so that a large table is not copied twice
# What Python itself puts into a class.
_BOOKKEEPING = {"_abc_impl", "__annotate__", "__annotate_func__"}


def convert(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    sparse: Sparse | None = None,
    *,
    output_dtype: torch.dtype | None = None,
    skip: Skip = (),
    boundary: Collection[str] = (),
    offload: OffloadEngine | None = None,
) -> Report:
    """Swap every `nn.Embedding` and `nn.EmbeddingBag` in ``model`` for the one of `fastemb.nn`.

    Works in place on the model and on what it contains at any depth; a model that is itself an
    embedding changes its class. Parameters stay the same objects. Tables of `fastemb.nn` that are
    there already take the new ``dtype``, ``sparse`` and ``output_dtype``, so calling it again with
    the same arguments changes nothing.

    Args:
        model: any module.
        dtype: the new dtype of the tables (float16, bfloat16, float32 or float64); None keeps it.
            The outputs of a table keep the dtype they had, through ``module.output_dtype``, so the
            rest of the model works as before. Gradients that are there are converted.
        sparse: whether the weight gradients are sparse, or "fused" (see
            `fastemb.functional.embedding`); None keeps it.
        output_dtype: dtype of the outputs of every table, in place of the one they had.
        skip: what to leave alone: qualified module names (a name covers everything below it, too),
            or a function of (name, module), called for every embedding, that returns True.
        boundary: qualified names of the `nn.Linear` that become `fastemb.amp.BoundaryLinear`, the
            first ones behind the embeddings; see there.
        offload: engine that takes over the tables, under the names of their modules ("embedding"
            for a model that is one itself); see `fastemb.offload.OffloadEngine`. They then have
            ``sparse="fused"``.

    Returns:
        A line per table; ``print`` it.

    Raises:
        ValueError: a module that cannot be converted, by name, with the reason: a subclass with
            methods or attributes of its own, a ``forward`` set on the module, a parametrized,
            quantized or scripted one, one with an attribute, buffer or submodule under a name that
            the new class needs (``table``, ``output_dtype``), a change of dtype of a weight that
            another, unconverted module uses, or to one that cannot hold a value. Also a name in
            ``skip`` or ``boundary`` that is not in the model, or one in ``boundary`` that is no
            plain `nn.Linear`. With ``offload`` also a table with hooks or a gradient, a subclass of
            a `fastemb.nn` module, a weight that another, unconverted module uses, and what the
            engine refuses.
        TypeError: a dtype outside those above, or an argument of the wrong type.
        RuntimeError: a table whose dtype changes while gradients of ``sparse="fused"`` wait.
        In all cases the model is unchanged.
    """
    if dtype is not None:
        check_table_dtype("convert", dtype)
    if output_dtype is not None and output_dtype not in TABLE_DTYPES:
        raise TypeError(
            "convert: output_dtype must be float16, bfloat16, float32 or float64, "
            f"got {output_dtype}"
        )
    if sparse is not None and not isinstance(sparse, bool) and sparse != "fused":
        raise TypeError(f"convert: sparse must be True, False, 'fused' or None, got {sparse!r}")
    skip = _checked_skip("convert", model, skip)
    chosen, skipped = _select(model, skip)
    layers = _convert_boundary.select(model, boundary)
    for name, module in chosen.items():
        reason = _obstacle(module)
        if reason is not None:
            raise ValueError(f"convert: {display(name)} {reason}; skip={[name]!r} leaves it alone")
    if dtype is not None:
        changing = {n: m for n, m in chosen.items() if m.weight.dtype != dtype}
        _refuse_outside_users("convert", model, chosen, changing, "its dtype cannot change")
        _refuse_waiting("convert", changing)
    if offload is not None:
        _convert_offload.check_engine(offload)
        if sparse not in (None, "fused"):
            raise ValueError(
                "convert: sparse must be 'fused' or None with offload=, which has no gradient "
                f"tensor, got {sparse!r}"
            )
        sparse = "fused"
        moving = {n: m for n, m in chosen.items() if not _convert_offload.is_offloaded(m)}
        _convert_offload.refuse_modules(moving)
        _refuse_outside_users("convert", model, chosen, moving, "it cannot be offloaded")
        _refuse_waiting("convert", moving)
    _convert_offload.refuse_changes(chosen, dtype, sparse)
    if dtype is not None:
        for name, module in changing.items():
            _refuse_overflow("convert", name, module, dtype)
    if offload is not None:
        for module in chosen.values():
            wake_all(module.weight)
        _convert_offload.adopt(offload, chosen, dtype)

    _convert_boundary.make(layers)
    shares = _ties(model)
    advised: set[int] = set()
    rows = []
    for name, module in _tables(model):
        if name in skipped:
            if getattr(module, "weight", None) is None:
                continue  # nothing to report, as for a quantized one
            rows.append(_row(name, module, module.weight.dtype, "skipped", shares))
            continue
        before = module.weight.dtype if shares[name] is None else _old(rows, shares[name])
        rows.append(
            _convert_one(name, module, before, dtype, sparse, output_dtype, shares, advised)
        )
        if offload is not None:
            _convert_offload.give(module, offload, name)
    return Report(rows)


def revert(model: nn.Module, *, skip: Skip = ()) -> Report:
    """Undo `convert`: give tables of `fastemb.nn` and boundaries the torch class, in place.

    A converted table gets back its class, dtype, ``sparse`` and the output dtype that goes with
    them; bits that were rounded away stay lost. A table that was built as `fastemb.nn` becomes the
    torch class, in its ``output_dtype`` if it has one, with ``sparse=True`` for "fused". Options
    that torch's modules lack, like weighted means, fail when the reverted model is used.

    Args:
        model: any module.
        skip: what to leave alone, as in `convert`.

    Raises:
        ValueError: a subclass of a `fastemb` module or a table without its weight, by name, or a
            change of dtype of a weight that another, unreverted module uses, or to one that cannot
            hold a value.
        TypeError: an argument of the wrong type.
        RuntimeError: gradients of ``sparse="fused"`` wait for a step.
        In all cases the model is unchanged.
    """
    skip = _checked_skip("revert", model, skip)
    chosen, skipped = _select(model, skip)
    ours = {name: module for name, module in chosen.items() if isinstance(module, Table)}
    for name, module in ours.items():
        if module._parameters.get("weight") is None:
            raise ValueError(
                f"revert: {display(name)} has no parameter named weight; "
                f"skip={[name]!r} leaves it alone"
            )
        if type(module) not in _OURS.values() and not _convert_offload.is_offloaded(module):
            raise ValueError(
                f"revert: {display(name)} is a {type(module).__name__}, a class of its own; "
                f"skip={[name]!r} leaves it alone"
            )
    origins = {name: _origin(module) for name, module in ours.items()}
    changing = {n: m for n, m in ours.items() if m.weight.dtype != origins[n].dtype}
    _refuse_outside_users("revert", model, ours, changing, "its dtype cannot change")
    offloaded = {n: m for n, m in ours.items() if _convert_offload.is_offloaded(m)}
    _refuse_outside_users("revert", model, ours, offloaded, "it cannot leave its engine")
    _refuse_disagreement(ours, origins)
    _refuse_waiting("revert", ours)
    for name, module in changing.items():
        _refuse_overflow("revert", name, module, origins[name].dtype)

    _convert_boundary.unmake(_convert_boundary.boundaries(model, skip))
    shares = _ties(model)
    rows = []
    for name, module in _tables(model):
        if name in skipped or name not in ours:
            if getattr(module, "weight", None) is None:
                continue
            action = "skipped" if name in skipped else "unchanged"
            rows.append(_row(name, module, module.weight.dtype, action, shares))
            continue
        before = module.weight.dtype if shares[name] is None else _old(rows, shares[name])
        origin = origins[name]
        wake_all(module.weight)
        if _convert_offload.is_offloaded(module):
            _convert_offload.take_back(module, origin.dtype)
        _set_dtype(module.weight, origin.dtype)
        module.__class__ = origin.kind
        module.sparse = origin.sparse
        for attribute in _ATTRIBUTES:
            vars(module).pop(attribute, None)
        # torch rounds the gradient to the dtype of the table; ours may be wider.
        weight = module.weight
        if weight.is_leaf and weight.grad_dtype != weight.dtype:
            grad, weight.grad = weight.grad, None
            weight.grad_dtype = weight.dtype
            weight.grad = None if grad is None else grad.to(weight.dtype)
        rows.append(_row(name, module, before, "reverted", shares))
    return Report(rows)


# ---------------------------------------------------------------------------------------------
# what to convert
# ---------------------------------------------------------------------------------------------


def _tables(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules of torch's two kinds and of ours; one that is there twice comes once."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield name, module


def _embeddings(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The tables, and the quantized and scripted ones, which are classes of another kind."""
    for name, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            or _is_quantized(module)
            or _is_scripted(module)
        ):
            yield name, module


def _is_quantized(module: nn.Module) -> bool:
    kind = type(module)
    return "quantized" in kind.__module__.split(".") and kind.__name__.startswith("Embedding")


def _is_scripted(module: nn.Module) -> bool:
    """By `torch.jit.script` or `torch.jit.trace`, which keep no more than the name of the class."""
    return isinstance(module, torch.jit.ScriptModule) and (
        module.original_name in (nn.Embedding.__name__, nn.EmbeddingBag.__name__)
    )


def _checked_skip(op: str, model: nn.Module, skip: Skip) -> Skip:
    """``skip`` as a function or as names that are in the model, to be read more than once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model must be a torch.nn.Module, got {type(model).__name__}")
    if callable(skip):
        return skip
    if not isinstance(skip, Iterable):
        raise TypeError(f"{op}: skip must be names of modules or a function, got {skip!r}")
    names = (skip,) if isinstance(skip, str) else tuple(skip)
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for entry in names:
        if entry not in known:
            raise ValueError(f"{op}: skip must name modules of the model, got {entry!r}")
    return names


def _select(model: nn.Module, skip: Skip) -> tuple[dict[str, Any], set[str]]:
    """Embeddings by name, without those to skip, and the names of these."""
    if callable(skip):
        skipped = {name for name, module in _embeddings(model) if skip(name, module)}
    else:
        # A module may be reached by several names; any of them will do.
        left = {
            id(module)
            for name, module in model.named_modules(remove_duplicate=False)
            if covers(skip, name)
        }
        skipped = {name for name, module in _embeddings(model) if id(module) in left}
    return {n: m for n, m in _embeddings(model) if n not in skipped}, skipped


def _obstacle(module: nn.Module) -> str | None:
    """Why a module cannot be converted, as the rest of a sentence; None when it can."""
    if _is_quantized(module):
        return f"is quantized ({type(module).__module__}.{type(module).__name__})"
    if _is_scripted(module):
        return "was scripted or traced by torch.jit: convert the model before that"
    if parametrize.is_parametrized(module):
        return "is parametrized (torch.nn.utils.parametrize): its weight is computed, not stored"
    base = _base(module)
    own = [] if isinstance(module, Table) else _own_attributes(module, base)
    if "forward" in own and "forward" in vars(module):
        return "has a forward set on the module itself, which the conversion would not replace"
    if own:
        return (
            f"is a {type(module).__name__}, a subclass of nn.{base.__name__} with its own "
            f"{', '.join(own)}, which the conversion would lose"
        )
    attribute = None if isinstance(module, Table) else taken(module, _ATTRIBUTES)
    if attribute is not None:
        return f"has {attribute!r} of its own, a name that the tables of fastemb.nn need"
    weight = module._parameters.get("weight")
    if weight is None:
        return "has no parameter named weight: it is computed, not stored"
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        kind = type(weight.data) if type(weight) is nn.Parameter else type(weight)
        return f"has a weight of type {kind.__name__}, not a plain tensor"
    if weight.dtype not in TABLE_DTYPES or weight.layout != torch.strided:
        return f"has a weight of {short(weight.dtype)}, {weight.layout}"
    return None


def _base(module: nn.Module) -> type[nn.Module]:
    return nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag


def _own_attributes(module: nn.Module, base: type) -> list[str]:
    """What a module would lose with its class, beyond what serves its construction.

    A class attribute that the module overrides stays with the module. A ``forward`` that is set on
    the module counts, for it would be called in place of ours.
    """
    found = {"forward"} & vars(module).keys()
    for ancestor in type(module).__mro__:
        if ancestor in base.__mro__ or ancestor.__module__ in ("abc", "typing"):
            continue
        for name, value in vars(ancestor).items():
            is_code = callable(value) or isinstance(value, (property, classmethod, staticmethod))
            if name in _CONSTRUCTION_ONLY or name in _BOOKKEEPING:
                continue
            is_dunder = name.startswith("__") and name.endswith("__")
            if is_code or not (is_dunder or name in vars(module)):
                found.add(name)
    # what matters most, first
    return sorted(found, key=lambda name: (name != "forward", name))


def _refuse_outside_users(
    op: str, model: nn.Module, chosen: dict[str, Any], changing: dict[str, Any], so: str
) -> None:
    """A change of a weight must not reach a module that does not expect it."""
    members = {id(module) for module in chosen.values()}
    for name, module in changing.items():
        weight = module.weight
        for other_name, other in model.named_modules():
            if id(other) in members:
                continue
            for key, tensor in (*other._parameters.items(), *other._buffers.items()):
                if tensor is not None and (tensor is weight or _same_memory(tensor, weight)):
                    user = f"{other_name}.{key}" if other_name else key
                    raise ValueError(
                        f"{op}: {display(name)} shares its weight with {user}, which is not "
                        f"converted, so {so}; leave that out, or skip={[name]!r}"
                    )
        for other_name, other in changing.items():
            if other.weight is not weight and _same_memory(other.weight, weight):
                raise ValueError(
                    f"{op}: {display(name)} and {display(other_name)} have different parameters "
                    f"in the same memory, so {so}; use one parameter for both"
                )


def _refuse_overflow(op: str, name: str, module: Any, dtype: torch.dtype) -> None:
    """A value that is finite must not become an infinity."""
    weight = module.weight.detach()
    limit = torch.finfo(dtype).max
    if limit >= torch.finfo(weight.dtype).max or weight.numel() == 0:
        return
    if weight.is_meta or is_fake(weight):
        return
    wake_all(module.weight)
    if _convert_offload.is_offloaded(module):
        _convert_offload.write_back(module)
    rows = max(1, _CHECKED_ELEMENTS // weight.shape[1])
    for first in range(0, weight.shape[0], rows):
        part = weight[first : first + rows]
        low, high = (extreme.item() for extreme in part.aminmax())
        if low >= -limit and high <= limit:
            continue
        lost = part.isfinite() & ~part.to(dtype).isfinite()  # a little more is rounded down to it
        if lost.any():
            row, column = lost.nonzero()[0].tolist()
            raise ValueError(
                f"{op}: {display(name)} has a value of {part[row, column].item():g} in row "
                f"{first + row}, which {short(dtype)} cannot hold; skip={[name]!r} leaves it alone"
            )


def _refuse_waiting(op: str, tables: dict[str, Any]) -> None:
    for name, module in tables.items():
        refuse_waiting(op, module.weight, f"would be lost with the change of {display(name)}")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether they overlap; disjoint views of one buffer do not."""
    if is_lazy(a) or is_lazy(b):  # no memory yet
        return False
    try:
        (begin_a, end_a), (begin_b, end_b) = _span(a), _span(b)
    except (RuntimeError, NotImplementedError):  # fake, sparse and other tensors without memory
        return False
    return begin_a != 0 and begin_a < end_b and begin_b < end_a


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address, and the one behind the last; 0, 0 for a tensor without elements."""
    if tensor.numel() == 0:
        return 0, 0
    begin = tensor.data_ptr()
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    return begin, begin + (last + 1) * tensor.itemsize


def _refuse_disagreement(ours: dict[str, Any], origins: dict[str, _Origin]) -> None:
    """Modules that came to share a weight after they were converted may have differed before."""
    first: dict[int, str] = {}
    for name, module in ours.items():
        other = first.setdefault(id(module.weight), name)
        if origins[other].dtype != origins[name].dtype:
            raise ValueError(
                f"revert: {display(other)} and {display(name)} share a weight but were "
                f"{short(origins[other].dtype)} and {short(origins[name].dtype)}"
            )


def _ties(model: nn.Module) -> dict[str, str | None]:
    """For each embedding the first one that has the same weight, None when it is the first."""
    first: dict[int, str] = {}
    ties: dict[str, str | None] = {}
    for name, module in _tables(model):
        # A parametrized module has no stored weight, and shares none.
        weight = module._parameters.get("weight")
        other = first.setdefault(id(module if weight is None else weight), name)
        ties[name] = None if other == name else other
    return ties


# ---------------------------------------------------------------------------------------------
# one table
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """What a converted module was; `revert` reads it."""

    kind: type[nn.Module]
    dtype: torch.dtype
    sparse: Sparse


def _origin(module: Any) -> _Origin:
    origin = getattr(module, _ORIGIN, None)
    if origin is not None:
        return origin
    dtype = module.output_dtype or module.weight.dtype
    return _Origin(_base(module), dtype, bool(module.sparse))


def _convert_one(
    name: str,
    module: Any,
    before: torch.dtype,
    dtype: torch.dtype | None,
    sparse: Sparse | None,
    output_dtype: torch.dtype | None,
    shares: dict[str, str | None],
    advised: set[int],
) -> ConvertedTable:
    new = not isinstance(module, Table)
    wake_all(module.weight)
    if new:
        setattr(module, _ORIGIN, _Origin(type(module), before, module.sparse))
        module.__class__ = _OURS[_base(module)]
        module.table = name
    settings = (module.output_dtype, module.sparse)
    if dtype is not None and dtype != before and module.output_dtype is None:
        module.output_dtype = before
    if output_dtype is not None:
        module.output_dtype = output_dtype
    if sparse is not None:
        module.sparse = sparse
    weight = module.weight
    changes_dtype = dtype is not None and weight.dtype != dtype
    if dtype is not None and changes_dtype:
        _set_dtype(weight, dtype)
    elif new and id(weight) not in advised:
        advise_huge_pages(weight, collapse=True)
    advised.add(id(weight))
    keep_full_gradients(weight)
    if new:
        action = "converted"
    elif weight.dtype != before or settings != (module.output_dtype, module.sparse):
        action = "changed"
    else:
        action = "unchanged"
    return _row(name, module, before, action, shares)


def _set_dtype(weight: nn.Parameter, dtype: torch.dtype) -> None:
    """Change the dtype of a parameter in place; its gradient goes along at full precision."""
    if weight.dtype == dtype:
        return
    grad = weight.grad
    weight.grad = None
    values = torch.empty_like(weight.data, dtype=dtype)
    advise_huge_pages(values)
    weight.data = values.copy_(weight.data)
    keep_full_gradients(weight)
    if grad is not None:
        weight.grad = grad.to(weight.grad_dtype)


def _row(
    name: str, module: Any, old_dtype: torch.dtype, action: str, shares: dict[str, str | None]
) -> ConvertedTable:
    weight = module.weight
    return ConvertedTable(
        name,
        _base(module).__name__,
        old_dtype,
        weight.dtype,
        weight.numel() * old_dtype.itemsize,
        weight.numel() * weight.dtype.itemsize,
        action,
        shares[name],
    )


def _old(rows: list[ConvertedTable], name: str | None) -> torch.dtype:
    return next(row.old_dtype for row in rows if row.name == name)
