"""Whether the gradients of an optimizer are still those that were looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from fastemb import _row_queue


class Fingerprint:
    """The gradients of an optimizer at one time: which objects they are, and their versions.

    They are held weakly. What is written through ``.data``, which has no version, goes unnoticed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._of: dict[int, tuple[list[Callable[[], object]], list[int]]] = {}
        for param in _parameters(optimizer):
            objects = _objects(param)
            if objects:
                references = [_reference(o) for o in objects]
                self._of[id(param)] = references, _versions(param.grad)

    def matches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether no gradient has come, gone, or been written."""
        found = 0
        for param in _parameters(optimizer):
            objects = _objects(param)
            if not objects:
                continue
            references, versions = self._of.get(id(param), ([], []))
            if len(references) != len(objects) or versions != _versions(param.grad):
                return False
            if any(r() is not o for r, o in zip(references, objects, strict=True)):
                return False
            found += 1
        return found == len(self._of)

    def survives(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a gradient is still there, with whatever was added to it since."""
        for param in _parameters(optimizer):
            references, _ = self._of.get(id(param), ([], []))
            objects = _objects(param)
            if any(r() is o for r in references for o in objects):
                return True
        return False


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _objects(param: Tensor) -> list[object]:
    queue = _row_queue.waiting(param)
    # Parts are never changed: another gradient is another part.
    objects: list[object] = [] if queue is None else list(queue._parts)
    if param.grad is not None:
        objects.append(param.grad)
    return objects


def _reference(item: object) -> Callable[[], object]:
    # A plain weak reference to a tensor that only C++ holds may give back a dead object.
    return TensorWeakRef(item) if isinstance(item, Tensor) else weakref.ref(item)


def _versions(grad: Tensor | None) -> list[int]:
    if grad is None or grad.is_inference():
        return []
    if grad.layout != torch.sparse_coo:
        return [grad._version]
    values = grad._values()
    return [grad._version, values._version, values.data_ptr()]
