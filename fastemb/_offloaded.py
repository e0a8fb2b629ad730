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
        fill: its first value; None: that of the parameter, in FP32. Counters of steps, which are
            the int32 states, begin at the steps so far: rows are taken to have been part of them.
    """

    name: str
    dtype: torch.dtype
    width: int
    flat: bool
    fill: float | None

    @property
    def counts(self) -> bool:
        return self.dtype == torch.int32

    def first(self, steps: float) -> float | None:
        """As ``fill``, after so many steps."""
        return steps if self.counts else self.fill


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

    def check_served(self, optimizer: object) -> None:
        """Raise `RuntimeError` where another optimizer's states have taken the place of its own."""

    def check_usable(self, optimizer: object, step: Tensor | None = None) -> None:
        """The same where it cannot write the records, or those are not of its ``step``."""

    def reserve(self, optimizer: object, states: Sequence[RowState]) -> None:
        """Have room for the states before the first step; what is in use stays as it is."""

    def restored(self, optimizer: object) -> dict[str, Tensor]:
        """Views of the states that no optimizer has given, and their "step"; else nothing."""

    def holds(self, states: Sequence[RowState], given: Mapping[str, Tensor]) -> bool:
        """Whether the records have what `bind` would let them have."""

    def bind(
        self, optimizer: object, states: Sequence[RowState], given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Let the records have the states, and no others. Where that fails all is as it was.

        Another optimizer that had its states there is not served any more.

        Args:
            given: the states by name, which may be views of the records; one that is missing
                begins anew. "step" must be there.

        Returns:
            Views of the states in host memory, by name, as `RowState` describes them.
        """

    def begin_step(self, step: Tensor) -> None:
        """From now on the states are those of the optimizer's ``step``."""

    def stepped(self, part: QueuedRows) -> None:
        """The rows of a queued gradient were updated in the cache."""

    def row_order(self, slots: Tensor) -> Tensor:
        """Positions of ``slots`` [n] int64 in the order of their rows; those of -1 come last."""

    def flush(self, *, reading: bool = False) -> None:
        """Bring the host table, and the states in it, up to date, and a file to the disk.

        Args:
            reading: the table will only be read, so a disk that fails is no more than a warning.
        """

    def replaced(self) -> None:
        """The host table was written in place: forget the cache."""


# By id of the parameter. An entry goes when its parameter does.
TABLES: dict[int, OffloadedTable] = {}


def device_of(param: Tensor) -> torch.device:
    """Where the steps of a parameter run."""
    table = TABLES.get(id(param))
    return param.device if table is None else table.device
