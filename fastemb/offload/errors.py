"""What goes wrong with data that moves between host and device."""

from __future__ import annotations

from typing import Literal

Direction = Literal["to device", "to host", "in host memory", "in file"]


class IntegrityError(RuntimeError):
    """A record is not what was sent.

    Attributes:
        table: name of the table.
        rows: its rows that are wrong, as far as they were looked for; at least one.
        step: batches that the engine had been given when the records were sent.
        direction: where they were found wrong.
    """

    def __init__(
        self, table: str, rows: list[int], step: int, direction: Direction, what: str
    ) -> None:
        self.table = table
        self.rows = rows
        self.step = step
        self.direction: Direction = direction
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        super().__init__(
            f"table {table!r}, {'rows' if len(rows) > 1 else 'row'} {shown} "
            f"({len(rows)} in all), step {step}, {direction}: {what}"
        )
