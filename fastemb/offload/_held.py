"""Rows that lookups and batches keep in the cache."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from fastemb.offload._lanes import Event
from fastemb.offload._slots import SlotMap

if TYPE_CHECKING:
    from fastemb.offload._stored import StoredTable


class HeldRows:
    """Rows that stay in their slots as long as this object lives."""

    def __init__(self, table: StoredTable, rows: Tensor, slots: Tensor) -> None:
        self.map = table.slots
        self.slots = slots
        self.rows = rows
        self.table = table
        self.delivered: Event | None = None  # when the last of them, and all before it, has come
        self.mended = table.mended
        table.pins.add(Pins(self, table))

    @property
    def weight(self) -> Tensor:
        """For the backward.

        Raises:
            RuntimeError: the slots were taken away since.
        """
        if self.map is not self.table.slots:
            raise RuntimeError(
                f"table {self.table.name!r}: the cache was begun anew after this lookup, so there "
                "can be no backward through it"
            )
        return self.table.weight


class Pins(weakref.ref[HeldRows]):
    """What `HeldRows` leaves when it goes, on whatever thread; the planner comes by.

    No instruction of Python runs then, such as those of a ``__del__``, between which a signal
    handler may raise an error that nobody sees, and the slots would stay pinned.
    """

    map: SlotMap
    slots: Tensor

    def __new__(cls, held: HeldRows, table: StoredTable) -> Pins:
        pins = super().__new__(cls, held, table.released.append)
        pins.map, pins.slots = held.map, held.slots
        return pins

    def __init__(self, held: HeldRows, table: StoredTable) -> None:
        pass
