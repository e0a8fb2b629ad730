"""`fastemb.convert` for tables that go to an engine of `fastemb.offload`, and the way back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastemb._convert_report import display, taken
from fastemb._fused import has_hooks
from fastemb.nn import Embedding, EmbeddingBag
from fastemb.nn._table import Table

if TYPE_CHECKING:
    from fastemb.offload._table import Table as OffloadedTable
    from fastemb.offload.engine import OffloadEngine


def is_offloaded(module: nn.Module) -> bool:
    from fastemb.offload.modules import OffloadedModule  # which imports what convert is part of

    return isinstance(module, OffloadedModule)


def check_engine(engine: object) -> None:
    from fastemb.offload.engine import OffloadEngine  # which imports what convert is part of

    if not isinstance(engine, OffloadEngine):
        raise TypeError(
            f"convert: offload must be an OffloadEngine or None, got {type(engine).__name__}"
        )


def refuse_modules(tables: dict[str, Any]) -> None:
    """Raise `ValueError` for a module that cannot become one of `fastemb.offload`."""
    for name, module in tables.items():
        reason = None
        attribute = taken(module, ("_table", "engine"))
        if attribute is not None:
            reason = f"has {attribute!r} of its own, a name that an offloaded table needs"
        elif isinstance(module, Table) and type(module) not in (Embedding, EmbeddingBag):
            reason = f"is a {type(module).__name__}, a class of its own, and cannot be offloaded"
        if reason is not None:
            raise ValueError(f"convert: {display(name)} {reason}; skip={[name]!r} leaves it alone")


def table_name(name: str) -> str:
    """What the engine calls the table of the module ``name``; "" is the model itself."""
    return name or "embedding"


def refuse_changes(chosen: dict[str, Any], dtype: torch.dtype | None, sparse: object) -> None:
    """Raise `ValueError` where tables are offloaded already and would change."""
    for name, module in chosen.items():
        if not is_offloaded(module):
            continue
        if sparse not in (None, "fused"):
            raise ValueError(
                f"convert: {display(name)} is offloaded, so sparse must be 'fused' or None, "
                f"got {sparse!r}"
            )
        if dtype not in (None, module.weight.dtype):
            raise ValueError(
                f"convert: {display(name)} is offloaded as {module.weight.dtype}, so its dtype "
                f"cannot change, got {dtype}; fastemb.revert(model) first"
            )


def adopt(
    engine: OffloadEngine, chosen: dict[str, Any], dtype: torch.dtype | None
) -> dict[str, OffloadedTable]:
    """Have the engine take over the tables, all or none; the modules are not changed yet.

    Raises:
        ValueError, FileExistsError, ...: what `OffloadEngine.adopt` raises; a table with hooks or a
            gradient.
    """
    done: dict[str, OffloadedTable] = {}
    before = list(engine.tables.values())
    try:
        for name, module in chosen.items():
            weight = module.weight
            if has_hooks(weight):
                raise ValueError(
                    f"convert: the weight of {display(name)} has hooks, but an offloaded table has "
                    "no gradient to call them with; remove them"
                )
            if weight.grad is not None:
                raise ValueError(
                    f"convert: {display(name)} has a gradient, which an offloaded table cannot "
                    "keep; call zero_grad() first"
                )
            done[name] = engine.adopt(weight, table_name(name), dtype or weight.dtype)
    except BaseException:
        for table in {*done.values()}.difference(before):
            engine.forget(table)
        raise
    return done


def give(module: Any, engine: OffloadEngine, name: str) -> None:
    """Make a converted module one of `fastemb.offload`."""
    from fastemb.offload import modules  # not above: it imports what convert is part of

    kinds = {Embedding: modules.Embedding, EmbeddingBag: modules.EmbeddingBag}
    if type(module) in kinds:  # else it is offloaded already
        module.__class__ = kinds[type(module)]
    module._offload(engine, table_name(name))


def write_back(module: Any) -> None:
    """Let the weight of an offloaded module be up to date."""
    table = module._table
    if table.weight is module.weight:
        table.flush()


def take_back(module: Any, dtype: torch.dtype) -> None:
    """Give a module its weights back, in memory of its own and up to date, as ``dtype``."""
    table = module._table
    if table.weight is module.weight:
        table.give_back(dtype)
    del module._table, module.engine
