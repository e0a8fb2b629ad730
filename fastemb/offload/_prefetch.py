"""The loop over batches whose rows are fetched before their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from fastemb.offload._held import HeldRows
from fastemb.offload._interrupts import uninterrupted
from fastemb.offload._slots import CacheTooSmallError
from fastemb.offload._table import Table

if TYPE_CHECKING:
    from fastemb.offload.engine import OffloadEngine

Batch = TypeVar("Batch")
Ids = Tensor | Sequence[Tensor]


@dataclass
class _Ahead(Generic[Batch]):
    """A batch that was seen before its turn.

    Attributes:
        rows: of each table, with their counts; None: what there is instead is an error.
        held: what keeps them in the cache, once there is room for them.
    """

    batch: Batch | None
    rows: list[tuple[Table, Tensor, Tensor]]
    held: list[HeldRows] | None = None
    error: BaseException | None = None


class Prefetcher(Generic[Batch]):
    """What `OffloadEngine.prefetch` returns."""

    def __init__(
        self,
        engine: OffloadEngine,
        loader: Iterable[Batch],
        ids: Callable[[Batch], Mapping[str, Ids] | Ids] | None,
    ) -> None:
        self._engine = engine
        self._loader = loader
        self._ids = ids

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        engine = self._engine
        engine.check()
        source = iter(self._loader)
        ahead: deque[_Ahead[Batch]] = deque()
        exhausted = False
        try:
            while True:
                while not exhausted and len(ahead) <= engine.depth:
                    seen = self._see(source)
                    if seen is None:
                        exhausted = True
                        break
                    ahead.append(seen)
                    exhausted = seen.error is not None
                    del seen
                self._bring(ahead)
                if not ahead:
                    return
                now = ahead.popleft()
                if now.error is not None:
                    raise now.error
                batch, tables, rows = now.batch, [table for table, _, _ in now.rows], now.held
                del now
                assert rows is not None  # there was room for the first, or an error
                for number, table in enumerate(tables):
                    table.wait(rows[number])
                try:
                    for table, held in zip(tables, rows, strict=True):
                        table.begin(held)
                        del held
                    engine.step += 1
                    yield batch  # type: ignore[misc]
                finally:
                    with engine.lock, uninterrupted:
                        for table, held in zip(tables, rows, strict=True):
                            table.end(held)
                            del held
                        del rows, batch
        finally:  # whoever keeps the traceback of an error must not keep the slots
            ahead.clear()
            rows = None

    def _see(self, source: Iterator[Batch]) -> _Ahead[Batch] | None:
        """The next batch and its rows; None: there are no more."""
        try:
            batch = next(source)
        except StopIteration:
            return None
        except Exception as error:  # for its turn: the batches before it are good
            return _Ahead(None, [], error=error)
        try:
            return _Ahead(batch, self._rows(batch))
        except Exception as error:
            return _Ahead(batch, [], error=error)

    def _rows(self, batch: Batch) -> list[tuple[Table, Tensor, Tensor]]:
        tables = self._engine.tables
        rows = []
        for name, given in self._announced(batch).items():
            if name not in tables:
                raise ValueError(
                    f"prefetch: ids must name tables of the engine ({', '.join(tables)}), "
                    f"got {name!r}"
                )
            parts: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
            for part in parts:
                if not isinstance(part, Tensor) or part.dtype not in (torch.int32, torch.int64):
                    got = part.dtype if isinstance(part, Tensor) else type(part).__name__
                    raise TypeError(
                        f"prefetch: ids of table {name!r} must be an int32 or int64 tensor, or a "
                        f"list of them, got {got}"
                    )
            if not parts:
                continue
            ids = torch.cat([part.detach().reshape(-1).cpu() for part in parts])
            table = tables[name]
            table.open()
            distinct, counts, _ = table.distinct("prefetch", ids)
            table.check_room(distinct)
            rows.append((table, distinct, counts))
        return rows

    def _announced(self, batch: Batch) -> Mapping[str, Ids]:
        tables = self._engine.tables
        if self._ids is None:
            if not isinstance(batch, Mapping) or not batch.keys() & tables.keys():
                raise TypeError(
                    "prefetch: without ids= a batch must be a mapping that has ids under names of "
                    f"tables ({', '.join(tables)}), got {_describe(batch)}"
                )
            return {name: batch[name] for name in tables if name in batch}
        given = self._ids(batch)
        if isinstance(given, Mapping):
            return given
        if len(tables) != 1:
            raise TypeError(
                f"prefetch: ids must return a mapping where there are {len(tables)} tables "
                f"({', '.join(tables)}), got {_describe(given)}"
            )
        return {next(iter(tables)): given}

    def _bring(self, ahead: deque[_Ahead[Batch]]) -> None:
        """Fetch for the batches that are seen, in order, as far as there is room."""
        for position, batch in enumerate(ahead):
            if batch.error is not None:
                return
            if batch.held is None:
                try:
                    batch.held = self._hold(batch)
                except CacheTooSmallError:
                    if position == 0:
                        raise
                    return  # when those before it have left

    def _hold(self, batch: _Ahead[Batch]) -> list[HeldRows]:
        for table, _, _ in batch.rows:
            table.settle()
        return [table.bring(rows, counts) for table, rows, counts in batch.rows]


def _describe(value: object) -> str:
    kind = type(value).__name__
    return f"{kind} with keys {list(value)}" if isinstance(value, Mapping) else kind
