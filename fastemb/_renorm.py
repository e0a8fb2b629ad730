"""``max_norm`` where torch hides the table from an operator that writes it.

`torch.func.functionalize` takes no such operator, and the fallback for lazily negated tensors wants
one that returns something.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from fastemb._ops import LIBRARY

_ops = torch.ops.fastemb


def renorm_(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    include_last_offset: bool,
    *options: Any,
) -> None:
    """Scale down the rows that a lookup names; ``options`` are max_norm, norm_type and table."""
    if _functionalizes():
        weight.copy_(_ops.renormed(weight, indices, offsets, include_last_offset, *options))
    elif offsets is None:
        _ops.embedding_renorm_(weight, indices, *options)
    else:
        _ops.embedding_bag_renorm_(weight, indices, offsets, include_last_offset, *options)


def _functionalizes() -> bool:
    """Whether `torch.func.functionalize` is among the transforms around."""
    if torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is None:
        return False
    stack = _functorch.get_interpreter_stack() or []
    return any(each.key() == _functorch.TransformType.Functionalize for each in stack)


# A kernel of the two operators for its dispatch key would do as well, but with one `torch.compile`
# no longer makes them functional by itself, which spares it the copy.
LIBRARY.define(
    "renormed(Tensor weight, Tensor indices, Tensor? offsets, bool include_last_offset, "
    "float max_norm, float norm_type, str table) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _renormed(weight: Tensor, *args: Any) -> Tensor:
    copy = weight.clone()
    renorm_(copy, *args)
    return copy


LIBRARY.impl("renormed", _renormed, "CompositeExplicitAutograd")


@torch.library.register_fake("fastemb::renormed", lib=LIBRARY)
def _renormed_fake(weight: Tensor, *args: object) -> Tensor:
    return weight.clone()


def _resolve_negation(name: str) -> None:
    """Let an operator write a table like ``z.conj().imag``, which is negated when it is read."""
    operator = getattr(_ops, name).default

    def resolved(weight: Tensor, *args: Any) -> None:
        plain = weight.resolve_neg()
        operator(plain, *(arg.resolve_neg() if isinstance(arg, Tensor) else arg for arg in args))
        if weight.is_neg():
            weight.copy_(plain)

    LIBRARY.impl(name, resolved, "Negative")


_resolve_negation("embedding_renorm_")
_resolve_negation("embedding_bag_renorm_")
