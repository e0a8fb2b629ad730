"""Tables whose rows live in host memory: what lookups and optimizers have to know about them.

`fastemb.offload` enters such a table here, by the id of its parameter. The parameter is the host
table; lookups and steps work on a cache of rows on the device, under slot numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastemb._row_queue import QueuedRows


class HeldSlots(Protocol):
    """Slots that keep their rows as long as this object lives.

    Attributes:
        weight: the parameter, the host table.
    """

    @property
    def weight(self) -> Tensor: ...


class RowState(NamedTuple):
    """A state that an optimizer keeps for every row.

    Attributes:
        name: as in the state of the parameter.
        dtype: of its elements.
        width: elements per row.
        flat: whether it is a vector over the rows, not a matrix.
        fill: its first value; None: that of the parameter, in FP32.
    """

    name: str
    dtype: torch.dtype
    width: int
    flat: bool
    fill: float | None


class OffloadedTable(Protocol):
    """One table.

    Attributes:
        name: of the table.
        device: of the cache, where the kernels run.
        leaf: [slots, dim], the weights in the cache; what lookups read.
        cache: all that is in the cache, [slots, width] each, by name.
    """

    name: str
    device: torch.device

    @property
    def leaf(self) -> Tensor: ...

    @property
    def cache(self) -> Mapping[str, Tensor]: ...

    def has_states_of_another(self, optimizer: object) -> bool:
        """Whether the records hold what another optimizer, still there, has made steps with."""

    def bind(self, optimizer: object, states: Sequence[RowState]) -> None:
        """Make room for the states in the records; nothing happens where they have it.

        Another optimizer that had its states there is not served any more.

        Raises:
            RuntimeError: that optimizer is this one.
        """

    def host_states(self) -> dict[str, Tensor]:
        """Views of the states in host memory, by name, as `RowState` describes them."""

    def take_states(self, given: Mapping[str, object]) -> None:
        """Let the records have those of ``given`` that are no views of them: from before."""

    def begin_anew(self) -> None:
        """Where the states in the records were used, let them be as at first."""

    @property
    def steps(self) -> float:
        """Steps that the states in the records have seen already."""

    def stepped(self, part: QueuedRows, step: Tensor) -> None:
        """The rows of a queued gradient were updated in the cache, in the optimizer's ``step``."""

    def row_order(self, slots: Tensor) -> Tensor:
        """Positions of ``slots`` [n] int64 in the order of their rows; those of -1 come last."""

    def flush(self) -> None:
        """Bring the host table, and the states in it, up to date."""

    def replaced(self, step: Tensor | None = None) -> None:
        """The host table, or the states in it, was written in place: forget the cache.

        Args:
            step: that of the new states, None: it is as before.
        """


# By id of the parameter. An entry goes when its parameter does.
TABLES: dict[int, OffloadedTable] = {}


def device_of(param: Tensor) -> torch.device:
    """Where the steps of a parameter run."""
    table = TABLES.get(id(param))
    return param.device if table is None else table.device
