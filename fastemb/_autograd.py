"""Attaches a derivative to an operator.

`torch.library.register_autograd` does the same and costs a small lookup some 60 microseconds more,
which it spends on filling in defaults that these schemas do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_autograd(
    library: torch.library.Library,
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
) -> Callable[..., Any]:
    """``backward`` and ``setup_context`` are those of `torch.autograd.Function`.

    Returns:
        The operator as its autograd kernel, for calls that need nothing above it: no transform of
        `torch.func`, no tracer. That spares them one way through the dispatcher.
    """
    function = make_function(name, backward, setup_context)
    below_autograd, apply = function.forward, function.apply

    def kernel(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(arg, Tensor) and arg.requires_grad for arg in args
        ):
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
    operator = getattr(torch.ops.fastemb, name).default

    def below_autograd(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return type(
        name,
        (torch.autograd.Function,),
        {
            "forward": staticmethod(below_autograd),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
        },
    )
