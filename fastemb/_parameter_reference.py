"""Weak references to parameters, which can be taken off for a while."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor


class ParameterReference:
    """Gives a parameter as long as it lives, else None.

    Args:
        param: the parameter.
        forget: called with its id, and the reference that `made` knows, when it is gone. No method,
            or the owner of this would live in a circle.
    """

    def __init__(self, param: Tensor, forget: Callable[[int, weakref.ref[Tensor]], object]) -> None:
        self._forget = forget
        self._reference: weakref.ref[Tensor] | None = None
        self._refer_to(param)

    def __call__(self) -> Tensor | None:
        return None if self._reference is None else self._reference()

    def _refer_to(self, param: Tensor) -> None:
        self._reference = weakref.ref(param, partial(self._forget, id(param)))

    def made(self, reference: weakref.ref[Tensor]) -> bool:
        """Whether ``reference``, of a parameter that is gone, is the one in here."""
        return self._reference is reference

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """For the time of it there is no weak reference; this gives None."""
        param = self()
        self._reference = None
        try:
            yield
        finally:
            if param is not None:
                self._refer_to(param)
