"""Attaches a derivative to an operator.

`torch.library.register_autograd` does the same and costs a small lookup some 60 microseconds more,
which it spends on filling in defaults that these schemas do not have. So does a
`torch.autograd.Function` with a ``setup_context`` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastemb._transforms import differentiates_here


def register_autograd(
    library: torch.library.Library,
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    plain: Callable[..., Any],
) -> Callable[..., Any]:
    """``backward`` and ``setup_context`` are those of `torch.autograd.Function`.

    ``plain`` is the operator in plain torch, for `torch.func` and forward-mode AD, which would not
    see what happens below autograd.

    Returns:
        The operator as its autograd kernel, for calls that need nothing above it: no transform of
        `torch.func`, no tracer. That spares them one way through the dispatcher.
    """
    below_autograd = _below_autograd(name)
    apply = make_function(name, backward, setup_context).apply

    def kernel(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if differentiates_here(*tensors):
            return plain(*args)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return apply(*args)
        return below_autograd(*args)

    library.impl(name, kernel, "Autograd")
    return kernel


def make_function(
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
) -> Any:
    """An operator, called below autograd, as a `torch.autograd.Function` with this derivative."""
    below_autograd = _below_autograd(name)

    def forward(ctx: Any, *args: Any) -> Any:
        output = below_autograd(*args)
        setup_context(ctx, args, output)
        return output

    return type(
        name,
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


def _below_autograd(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.fastemb, name).default

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return below_autograd
