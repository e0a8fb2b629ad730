"""Whether the gradients of an optimizer are still those that were looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from fastemb import _row_queue


class Fingerprint:
    """The gradients of parameters at one time: which objects they are, and their versions.

    They are held weakly. What is written through ``.data``, which has no version, goes unnoticed.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._of: dict[int, tuple[list[Callable[[], object]], tuple[int, ...]]] = {}
        for param in params:
            objects, versions = _state(param)
            if objects:
                self._of[id(param)] = [_reference(o) for o in objects], versions

    def matches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether no gradient has come, gone, or been written."""
        found = 0
        for param in parameters(optimizer):
            if not _state(param)[0]:
                continue
            if not self.unchanged(param):
                return False
            found += 1
        return found == len(self._of)

    def unchanged(self, param: Tensor) -> bool:
        """The same for the gradient of one parameter that has one."""
        objects, now = _state(param)
        references, versions = self._of.get(id(param), ([], ()))
        if versions != now or len(references) != len(objects):
            return False
        return all(r() is item for r, item in zip(references, objects, strict=True))

    def survives(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a gradient is still there, with whatever was added to it since."""
        return any(map(self.holds, parameters(optimizer)))

    def holds(self, param: Tensor) -> bool:
        """Whether that of one parameter is."""
        references, _ = self._of.get(id(param), ([], ()))
        return bool(references) and any(r() is o for r in references for o in _state(param)[0])


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _state(param: Tensor) -> tuple[list[object], tuple[int, ...]]:
    """The objects that make up a gradient, and what tells whether they were written."""
    grad = param.grad
    queue = _row_queue.waiting(param)
    # Parts are never changed: another gradient is another part.
    objects: list[object] = list(queue or ())
    if grad is None:
        return objects, ()
    objects.append(grad)
    if grad.is_inference():
        return objects, ()
    if grad.layout != torch.sparse_coo:
        return objects, (grad._version,)
    values = grad._values()
    return objects, (grad._version, values._version, values.data_ptr())


def _reference(item: object) -> Callable[[], object]:
    # A plain weak reference to a tensor that only C++ holds may give back a dead object.
    return TensorWeakRef(item) if isinstance(item, Tensor) else weakref.ref(item)
