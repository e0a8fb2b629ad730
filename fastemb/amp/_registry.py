"""What a scaler was told about: names of parameters, optimizers, tables to look at."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.parallel import DistributedDataParallel

from fastemb.amp.boundary import BoundaryLinear
from fastemb.nn._table import Table

if TYPE_CHECKING:
    from fastemb.amp._grouped import GroupedScaler


class Registry:
    """Everything is held weakly: a scaler keeps no model alive."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._nameless = 0

    def name_of(self, param: Tensor) -> str:
        """The registered name, else one that is made up of the shape; no two are the same."""
        entry = self._names.get(id(param))
        if entry is not None and entry[0]() is param:
            return entry[1]
        name = f"parameter {self._nameless} of shape {tuple(param.shape)}"
        self._nameless += 1
        self._names[id(param)] = (weakref.ref(param), name)
        return name

    def see(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.knows(optimizer):
            key = id(optimizer)
            forget = self._optimizers.pop
            self._optimizers[key] = weakref.ref(optimizer, lambda _: forget(key, None))

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        reference = self._optimizers.get(id(optimizer))
        return reference is not None and reference() is optimizer

    def optimizers(self) -> Iterator[torch.optim.Optimizer]:
        for reference in list(self._optimizers.values()):
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def register(self, scaler: GroupedScaler, model: nn.Module) -> list[str]:
        """Name parameters, give boundaries their scaler, hook tables.

        Returns:
            The groups of the boundaries.
        """
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        if isinstance(model, DistributedDataParallel):
            model = model.module
            _refuse_wide_gradients(model)
        for name, param in model.named_parameters():
            self._names[id(param)] = (weakref.ref(param), name)
        groups = []
        for name, module in model.named_modules():
            if isinstance(module, BoundaryLinear):
                module._scaler = weakref.ref(scaler)
                module._boundary_name = name
                groups.append(module.group)
            elif isinstance(module, Table):
                _hook(module, scaler, name)
        return groups


def _hook(module: Table, scaler: GroupedScaler, name: str) -> None:
    """Give a table the one hook of ``scaler``, and take away those of scalers that are gone."""
    hooks = [hook for hook in module._forward_hooks.values() if isinstance(hook, _TableHook)]
    own = None
    for hook in hooks:
        owner = hook.owner()
        if owner is scaler:
            own = hook
        elif owner is None:
            hook.remove_from(module)
    if own is None:
        module.register_forward_hook(_TableHook(scaler, name))
    else:
        own.name = name


class _TableHook:
    """Lets a scaler look at the gradient that comes into a table.

    Removes itself from a module that is no table any more, where its scaler is gone, and where it
    is a copy, which comes without a scaler.
    """

    def __init__(self, scaler: GroupedScaler | None, name: str = "") -> None:
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self.name = name

    def owner(self) -> GroupedScaler | None:
        return None if self._scaler is None else self._scaler()

    def remove_from(self, module: nn.Module) -> None:
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        if _is_traced():
            return
        if self._scaler is None or self._scaler() is None or not isinstance(module, Table):
            self.remove_from(module)
            return
        if not isinstance(output, Tensor) or not output.requires_grad:
            return
        weight: weakref.ref[Any] = weakref.ref(module.weight)
        reference, name = self._scaler, self.name

        def look(grad: Tensor) -> None:
            if _functorch.is_batchedtensor(grad) or _functorch.is_legacy_batchedtensor(grad):
                return  # of autograd.grad(is_grads_batched=True), where no loss was scaled
            scaler, param = reference(), weight()
            if scaler is not None and param is not None:
                scaler._look(name, param, grad)

        output.register_hook(look)

    def __reduce__(self) -> tuple[Any, ...]:
        return _TableHook, (None,)


def _is_traced() -> bool:
    """Whether a hook on a gradient would break a graph of torch.compile, or a transform."""
    return torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is not None


def _refuse_wide_gradients(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.requires_grad and param.grad_dtype not in (None, param.dtype):
            raise ValueError(
                f"GradScaler.register: {name} is {param.dtype} with gradients of "
                f"{param.grad_dtype}, which DistributedDataParallel cannot reduce; use float32 "
                "tables with it"
            )
