"""Work that outlives the mode of torch that its caller happens to be in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from fastemb._inference import lasting

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_modes(function: _Function) -> _Function:
    """Have ``function`` work in neither inference mode nor a transform of `torch.func`.

    An inference tensor can only be written in that mode, and what is made here is written in
    training. A transform lets nothing be written in place that it has not made.
    """

    @wraps(function)
    def outside(*args: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled() and _functorch.peek_interpreter_stack() is None:
            return function(*args, **options)
        with temporarily_clear_interpreter_stack(), lasting():
            return function(*args, **options)

    return cast(_Function, outside)
