"""The part of `convert` and `revert` that swaps `nn.Linear` for `fastemb.amp.BoundaryLinear`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import nn

from fastemb._convert_report import covers, display, taken
from fastemb.amp.boundary import BoundaryLinear

_ATTRIBUTES = ("group", "_scaler", "_boundary_name")  # of a boundary


def select(model: nn.Module, boundary: Collection[str]) -> list[nn.Linear]:
    """The layers that ``boundary`` names.

    Raises:
        TypeError: ``boundary`` is not names.
        ValueError: a name that is not in the model, or of something that cannot become one.
    """
    if isinstance(boundary, str):
        boundary = [boundary]
    if not isinstance(boundary, Iterable):
        raise TypeError(f"convert: boundary must be names of modules, got {boundary!r}")
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = []
    for name in boundary:
        module = modules.get(name)
        if module is None:
            raise ValueError(f"convert: boundary must name modules of the model, got {name!r}")
        if type(module) not in (nn.Linear, BoundaryLinear):
            raise ValueError(
                f"convert: {display(name)} is a {type(module).__name__}, and only nn.Linear can "
                "become a boundary"
            )
        if "forward" in vars(module):
            raise ValueError(
                f"convert: {display(name)} has a forward set on the module itself, which the "
                "conversion would not replace"
            )
        attribute = None if isinstance(module, BoundaryLinear) else taken(module, _ATTRIBUTES)
        if attribute is not None:
            raise ValueError(
                f"convert: {display(name)} has {attribute!r} of its own, a name that a boundary "
                "needs; rename it"
            )
        chosen.append(module)
    return chosen


def make(layers: Iterable[nn.Linear]) -> None:
    for layer in layers:
        layer.__class__ = BoundaryLinear


def boundaries(
    model: nn.Module, skip: Collection[str] | Callable[[str, nn.Module], bool]
) -> list[BoundaryLinear]:
    """The boundaries that `revert` takes away; ``skip`` has been checked.

    Raises:
        ValueError: one of a class of its own, by name.
    """
    chosen: dict[int, tuple[str, BoundaryLinear]] = {}
    left: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, BoundaryLinear):
            continue
        if skip(name, module) if callable(skip) else covers(skip, name):
            left.add(id(module))
        chosen.setdefault(id(module), (name, module))
    for key, (name, module) in chosen.items():
        if key not in left and type(module) is not BoundaryLinear:
            raise ValueError(
                f"revert: {display(name)} is a {type(module).__name__}, a class of its own; "
                f"skip={[name]!r} leaves it alone"
            )
    return [module for key, (_, module) in chosen.items() if key not in left]


def unmake(layers: Iterable[BoundaryLinear]) -> None:
    for layer in layers:
        layer.__class__ = nn.Linear  # type: ignore[assignment]
        for attribute in _ATTRIBUTES:
            vars(layer).pop(attribute, None)
