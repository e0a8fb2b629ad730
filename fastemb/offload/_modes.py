"""Work whose tensors outlive the mode of torch that its caller happens to be in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_inference_mode(function: _Function) -> _Function:
    """Have nothing that ``function`` makes be an inference tensor.

    Such a tensor can only be written in that mode, and what is made here is written in training.
    """

    @wraps(function)
    def outside(*args: Any, **options: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **options)
        with torch.inference_mode(False), torch.no_grad():  # which the former would end, too
            return function(*args, **options)

    return cast(_Function, outside)
