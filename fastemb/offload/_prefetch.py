"""The loop over batches whose rows are fetched before their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
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


@dataclass(eq=False)
class LookAhead(Generic[Batch]):
    """How far a loop has looked.

    Attributes:
        source: what the loader gives.
        ahead: what came from it and was not handed out yet.
        exhausted: whether no more will come.
    """

    source: Iterator[Batch]
    ahead: deque[_Ahead[Batch]] = field(default_factory=deque)
    exhausted: bool = False

    def let_go(self) -> bool:
        """Hold no rows, until it is the turn of their batches; whether some were held."""
        some = False
        for seen in list(self.ahead):
            some = some or seen.held is not None
            seen.held = None
        return some


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
        self._left: deque[_Ahead[Batch]] = deque()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        self._engine.check()
        looking = LookAhead(iter(self._loader))
        if looking.source is self._loader:  # which will not give again what it gave a loop before
            looking.ahead = self._left
        with self._engine.lock:
            self._engine.loops.add(looking)
        return _Loop(partial(self._batches, looking))

    def _batches(self, looking: LookAhead[Batch]) -> Generator[Batch, None, None]:
        engine, ahead = self._engine, looking.ahead
        try:
            while True:
                self._look_ahead(looking)
                if not ahead:
                    return
                engine.check()
                with engine.lock:  # or a lookup of another thread could have the rows give way
                    self._bring(ahead)
                    if ahead[0].error is not None:
                        raise ahead.popleft().error  # type: ignore[misc]
                    rows = ahead[0].held
                    tables = [table for table, _, _ in ahead[0].rows]
                assert rows is not None  # there was room for the first, or an error
                for number, table in enumerate(tables):
                    table.wait(rows[number])
                try:
                    for table, held in zip(tables, rows, strict=True):
                        table.begin(held)
                        del held
                    engine.step += 1
                    engine.batches += 1
                    yield ahead.popleft().batch  # type: ignore[misc]
                finally:
                    with uninterrupted:
                        for table, held in zip(tables, rows, strict=True):
                            table.end(held)
                            del held
                        del rows
        finally:  # whoever keeps the traceback of an error must not keep the slots
            looking.let_go()
            rows = None

    def _look_ahead(self, looking: LookAhead[Batch]) -> None:
        """See the next batches, up to one that is an error."""
        ahead = looking.ahead
        while len(ahead) <= self._engine.depth and not (ahead and ahead[-1].error is not None):
            seen = None if looking.exhausted else self._see(looking.source)
            if seen is None:
                looking.exhausted = True
                return
            ahead.append(seen)

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
        tables = self._tables()
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
        tables = self._tables()
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

    def _tables(self) -> dict[str, Table]:
        """Those that can be looked up."""
        return {name: table for name, table in self._engine.tables.items() if table.readable}

    def _bring(self, ahead: deque[_Ahead[Batch]]) -> None:
        """Fetch for the batches that are seen, in order, as far as there is room.

        Raises:
            CacheTooSmallError: there is none for the first, which stays where it is.
        """
        for position, batch in enumerate(ahead):
            if batch.error is not None:
                return
            if batch.held is None:
                try:
                    batch.held = self._hold(batch, its_turn=position == 0)
                except CacheTooSmallError:
                    if position == 0:
                        raise
                    return  # when those before it have left

    def _hold(self, batch: _Ahead[Batch], *, its_turn: bool) -> list[HeldRows]:
        for table, _, _ in batch.rows:
            table.settle()
        return [table.bring(rows, counts, now=its_turn) for table, rows, counts in batch.rows]


class _Loop(Iterator[Batch]):
    """The batches of one loop, also those behind one whose place an error has taken.

    A generator is over once it has raised; then another one goes on with what the first has seen.
    """

    def __init__(self, batches: Callable[[], Generator[Batch, None, None]]) -> None:
        self._make = batches
        self._batches = batches()

    def __next__(self) -> Batch:
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException:
            if getgeneratorstate(self._batches) == GEN_CLOSED:
                self._batches = self._make()
            raise

    def close(self) -> None:
        """Hold no rows any more, and end."""
        self._batches.close()


def _describe(value: object) -> str:
    kind = type(value).__name__
    return f"{kind} with keys {list(value)}" if isinstance(value, Mapping) else kind
