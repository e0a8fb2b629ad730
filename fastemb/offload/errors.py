"""What goes wrong with data that moves between host and device."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

# Which of what arrives is compared with its checksum.
Verify = Literal["all", "sample", "off"]
VERIFY: tuple[Verify, ...] = ("all", "sample", "off")

Direction = Literal["to device", "to host", "in host memory", "in file"]


class IntegrityError(RuntimeError):
    """A record is not what was sent.

    Attributes:
        table: name of the table.
        rows: its rows that are wrong, as far as they were looked for; at least one.
        step: batches that the engine had been given when the records were sent.
        direction: where they were found wrong.
        also: what else was found by the time that this was raised.
    """

    def __init__(
        self,
        table: str,
        rows: list[int],
        step: int,
        direction: Direction,
        what: str,
        also: Sequence[IntegrityError] = (),
    ) -> None:
        self.table = table
        self.rows = rows
        self.step = step
        self.direction: Direction = direction
        self.also = tuple(also)
        self._what = what
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        super().__init__(
            f"table {table!r}, {'rows' if len(rows) > 1 else 'row'} {shown} "
            f"({len(rows)} in all), step {step}, {direction}: {what}"
            + "".join(f"; also {other}" for other in self.also)
        )

    def _arguments(self) -> tuple[str, list[int], int, Direction, str]:
        return self.table, self.rows, self.step, self.direction, self._what

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (*self._arguments(), self.also)


def together(errors: Sequence[BaseException]) -> BaseException:
    """One error to raise for several, of which none may go unsaid that found records wrong."""
    first, *rest = errors
    also = [error for error in rest if isinstance(error, IntegrityError)]
    if not also or not isinstance(first, IntegrityError):
        return first
    error = IntegrityError(*first._arguments(), also)
    error.__cause__ = first
    return error


def again(error: BaseException) -> BaseException:
    """The error of a job to raise elsewhere: the same, where that is possible.

    The event of a job keeps its error. One that was raised in the training loop refers to the
    frames it came through, and so to their batches, whose rows could then not leave the cache.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # whose arguments are not what it was made of
        return error
    if type(copied) is not type(error) or str(copied) != str(error):
        return error
    copied.__cause__ = error
    return copied
