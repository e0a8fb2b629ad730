"""Tables whose rows may be behind: what readers of a table and ``lazy="exact"`` have in common.

`fastemb.optim.Adam` with ``lazy="exact"`` lets rows sleep and enters their table here; whoever
reads the table, or hands it on, wakes them first. A table is known by the id of its parameter:
neither deepcopy nor pickle carries that along. Where nothing sleeps, a lookup pays for one look
into a dict; else, in a tensor that is no such parameter, for the question whether it is a view of
one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torch._C import _functorch
from torch._compile import _disable_dynamo


class Sleepers(Protocol):
    """The sleeping rows of one table."""

    def wake_batch(self, ids: Tensor, padding_idx: int | None) -> None:
        """Catch up the rows that a batch names.

        Args:
            ids: any shape; what no lookup would take, and ids out of range, are left to the lookup.
            padding_idx: the row that the lookup does not read; None: it reads all.
        """

    def wake_all(self) -> None:
        """Catch up all rows."""

    def shares_memory(self, weight: Tensor) -> bool:
        """Whether ``weight``, another tensor than the parameter, has its memory or a part of it."""

    def is_whole(self, weight: Tensor) -> bool:
        """Whether ``weight``, which shares memory, has the rows of the parameter and no others."""

    def content_version(self) -> int:
        """The version of the parameter, not counting the times that rows were woken."""

    def unreferenced(self) -> AbstractContextManager[None]:
        """For the time of it there is no weak reference to the parameter, nor is it known."""


# By id of the parameter. An entry goes when its parameter does.
TABLES: dict[int, Sleepers] = {}


def wake_batch(weight: Tensor, ids: Tensor, padding_idx: int | None) -> None:
    """Catch up the rows that a lookup reads, or what its ``weight`` is a view of.

    Args:
        weight: a parameter; a view of one, or another tensor of the same memory, such as
            ``detach()`` makes; what `torch.func` has wrapped one of these in.
        ids, padding_idx: of the lookup.
    """
    sleepers = TABLES.get(id(weight))
    if sleepers is not None:
        sleepers.wake_batch(ids, padding_idx)
        return
    weight = _unwrapped(weight)
    for sleepers in _tables_of(weight):
        if sleepers.is_whole(weight):
            sleepers.wake_batch(ids, padding_idx)
        else:
            sleepers.wake_all()


@_disable_dynamo
def wake_batch_outside_graph(weight: Tensor, ids: Tensor, padding_idx: int | None) -> None:
    """`wake_batch` within `torch.compile`: a graph would have the history of one step in it."""
    wake_batch(weight, ids, padding_idx)


def wake_all(*weights: Tensor) -> None:
    """Catch up all rows of parameters, and of those that share memory with one of ``weights``."""
    if TABLES:
        for weight in weights:
            for sleepers in _tables_of(_unwrapped(weight)):
                sleepers.wake_all()


wake_all_outside_graph = _disable_dynamo(wake_all)


def sleepers_behind(weight: Tensor) -> Sleepers | None:
    """Those of a parameter, or of the only one that ``weight`` shares memory with."""
    known = _tables_of(weight)
    return known[0] if len(known) == 1 else None


def _unwrapped(weight: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(weight):  # once for each transform
        weight = _functorch.get_unwrapped(weight)
    return weight


def _tables_of(weight: Tensor) -> list[Sleepers]:
    known = TABLES.get(id(weight))
    if known is not None:
        return [known]
    return [sleepers for sleepers in list(TABLES.values()) if sleepers.shares_memory(weight)]


class KeptTable:
    """A table that a lookup keeps for its backward; in place of ``save_for_backward``.

    Other rows may be woken in between, for another lookup of the same table: autograd would refuse
    that. The rows of this lookup were awake when it read them, so they only change if the table
    itself does.
    """

    def __init__(self, op: str, weight: Tensor, sleepers: Sleepers, table: str) -> None:
        self._op = op
        self._table = table
        self._weight = weight
        self._sleepers = sleepers
        self._version = sleepers.content_version()

    def unpack(self) -> Tensor:
        """The table.

        Raises:
            RuntimeError: it is not what the lookup has read.
        """
        if self._sleepers.content_version() != self._version:
            name = f"table {self._table!r}" if self._table else "the table"
            raise RuntimeError(
                f"{self._op}: {name} was written after this lookup (by an optimizer step, say), "
                "and the gradient of per_sample_weights needs the rows as they were; call "
                "backward() first"
            )
        return self._weight
