"""An offloaded table: records on the host, a cache on the device, and how they stay equal."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fastemb import _offloaded
from fastemb._memory import advise_huge_pages
from fastemb._offloaded import RowState
from fastemb._row_queue import drop
from fastemb.nn._table import keep_full_gradients
from fastemb.offload._file import FileGoneError
from fastemb.offload._held import HeldRows, Pins
from fastemb.offload._host import HostTable, fill
from fastemb.offload._interrupts import uninterrupted
from fastemb.offload._lanes import Event
from fastemb.offload._layout import Field, RecordLayout, why_unfit
from fastemb.offload._modes import outside_modes
from fastemb.offload._slots import Policy, SlotMap
from fastemb.offload.errors import IntegrityError

if TYPE_CHECKING:
    from fastemb.offload.engine import OffloadEngine

_ops = torch.ops.fastemb

_Method = TypeVar("_Method", bound=Callable[..., Any])


def alone(method: _Method) -> _Method:
    """Have other threads wait while one changes what the tables of an engine know."""
    outside = outside_modes(method)

    @wraps(method)
    def locked(self: StoredTable, *args: Any, **options: Any) -> Any:
        with self.lock:
            return outside(self, *args, **options)

    return cast(_Method, locked)


class StoredTable:
    """What of a table does not depend on batches, nor on optimizers.

    Attributes:
        name: in messages, and of the file.
        weight: the parameter. Its memory is that of the records once there are any.
        shape: of it.
        host, slots, headers, leaf, cache: from the first use on.
        collected, stored: see `fastemb.offload._transfers.CachedTable`.
        delivered: the last fetch.
        spoiled: rows in the cache whose fetch has failed.
        mended: how often all that is in the cache was fetched again.
        lock: of the engine.
        pins: those of all `HeldRows`.
        released: of these the ones that are to be taken away.
        current: what lookups find without asking for it, the last of them.
        ended: of these the ones that they shall no longer find.
    """

    host: HostTable
    slots: SlotMap
    headers: Tensor
    leaf: nn.Parameter
    _slot_of_current: Tensor

    def __init__(
        self,
        engine: OffloadEngine,
        name: str,
        weight: nn.Parameter,
        num_slots: int,
        policy: Policy,
        seed: int,
    ) -> None:
        self.name = name
        self.lock = engine.lock
        self.device = engine.device
        self.shape = weight.shape[0], weight.shape[1]
        self.num_slots = num_slots
        self.cache: dict[str, Tensor] = {}
        self.collected: Event | None = None
        self.stored: Event | None = None
        self.delivered: Event | None = None
        self.spoiled: list[Tensor] = []
        self.mended = 0
        self.pins: set[Pins] = set()
        self.released: deque[Pins] = deque()
        self.current: list[HeldRows] = []
        self.ended: deque[HeldRows] = deque()
        self._engine = weakref.ref(engine)
        self._weight = weakref.ref(weight)
        self._policy: Policy = policy
        self._seed = seed
        self._states: tuple[RowState, ...] = ()
        self._optimizer: weakref.ref[object] | None = None
        self._retired: weakref.WeakSet[object] = weakref.WeakSet()  # those before it
        self._step: Tensor | None = None
        self._resumed_at: float | None = None  # the step of weights that are those of a file
        # The step of states that a file or `load` has given, until an optimizer has made another.
        self._restored: float | None = None
        # States that every record has as they are at first, with what that is.
        self._fresh: dict[str, float | None] = {}
        self._version = weight._version
        self._opened = False
        self._sealed = False
        self._closed = False
        self._given_back = False

    # ---- memory ----

    @property
    def engine(self) -> OffloadEngine:
        engine = self._engine()
        if engine is None:
            raise RuntimeError(f"table {self.name!r}: its OffloadEngine is gone")
        return engine

    @property
    def weight(self) -> nn.Parameter:
        weight = self._weight()
        if weight is None:
            raise RuntimeError(f"table {self.name!r}: its module is gone")
        return weight

    @property
    def readable(self) -> bool:
        """Whether its module is there."""
        return self._weight() is not None

    @property
    def abandoned(self) -> bool:
        """Whether its module is gone and has never used it, so that there are no records."""
        return not self._opened and not self.readable

    def layout(self, steps: float) -> RecordLayout:
        """Of the records, where new states are filled as after so many steps."""
        if hasattr(self, "host"):
            weight = self.host.layout.fields[0]
        else:
            weight = Field("weight", self.weight.dtype, self.shape[1])
        states = (Field(s.name, s.dtype, s.width, s.first(steps)) for s in self._states)
        return RecordLayout((weight, *states))

    def take(self, host: HostTable, sealed: bool, dtype: torch.dtype) -> None:
        """Records that are there already, in a file. Nothing else changes before `open`.

        Args:
            sealed: whether they are whole; else the module still writes its weight.

        Raises:
            ValueError: they are of another table.
        """
        require_weight(host, dtype, self.shape)
        self.host = host
        self._sealed = sealed
        self._states = _row_states(host.layout)
        if self._states:
            self._resumed_at = host.optimizer_step
        if host.optimizer_step:
            self._restored = host.optimizer_step

    @alone
    @torch.no_grad()
    def open(self) -> None:
        """Make records and cache, at the first use; before it nothing is known of the optimizer.

        Raises:
            RuntimeError: the engine was closed.
        """
        if self._closed:
            raise RuntimeError(f"table {self.name!r} is closed, as its OffloadEngine is")
        if not self._opened:
            self._open()

    def _open(self) -> None:
        path = self.engine._path(self.name)
        there: set[str] = set()  # states that the records have already
        if hasattr(self, "host"):
            layout = self.layout(self.host.optimizer_step)
            if self._restored is not None:
                there = self.host.fields.keys() & {state.name for state in self._states}
        else:
            layout = self.layout(0.0)
            host = HostTable.create(
                *(self.name, self.shape[0], layout),
                seed=self._seed,
                storage=path,
                pin=path is None and self.device.type == "cuda",
            )
            try:
                host.fields["weight"].copy_(self.weight.detach())
                self._fresh = fill(host.fields, layout.fields[1:])
            except BaseException:  # an interrupt, say: what is half filled must not be sealed later
                host.close()
                raise
            self.host = host
        if not self._sealed:
            self.host.seal()
            self.host.flush(self.engine.step)
        elif self.weight._version != self._version:
            warnings.warn(
                f"table {self.name!r}: its weight was written while the engine had not yet read "
                "its file, whose values take the place of what was written; what shall stay is "
                "written after engine.flush()",
                RuntimeWarning,
                stacklevel=4,
            )
        if self.host.torn:  # until they are reset there can be no other records
            self._states = _row_states(self.host.layout)
        elif layout != self.host.layout:
            anew = {state.name for state in self._states} - there
            self.host = self.host.rebuilt(layout, anew=anew)
            self._fresh = {f.name: f.fill for f in layout.fields if f.name in anew}
        self._point_weight()
        self._open_cache()

    @alone
    @torch.no_grad()
    def give_back(self, dtype: torch.dtype) -> None:
        """Let the parameter have memory of its own again, up to date, on the engine's device.

        And its states in the optimizer, too. Where there is no memory for all of them, all is as it
        was. Only the first of several calls does anything.

        Args:
            dtype: that the parameter then has.
        """
        if self._given_back:
            return
        self.flush(reading=True)
        weight = self.weight
        optimizer = None if self._optimizer is None else self._optimizer()
        states = getattr(optimizer, "state", {}).get(weight, {})
        views = {n: v for n, v in states.items() if isinstance(v, Tensor) and v.dim()}  # no step
        values = self._own(weight.detach(), dtype)
        owned = {name: self._own(view, view.dtype) for name, view in views.items()}
        grad, weight.grad = weight.grad, None  # torch lets no other dtype come under a gradient
        weight.data = values
        keep_full_gradients(weight)
        if grad is not None:
            weight.grad = grad.to(weight.device, weight.grad_dtype)
        states.update(owned)
        self._given_back = True
        self.engine.forget(self)

    def _own(self, view: Tensor, dtype: torch.dtype) -> Tensor:
        values = torch.empty(view.shape, dtype=dtype, device=self.device)
        advise_huge_pages(values)
        return values.copy_(view)

    def _point_weight(self) -> None:
        """Let the parameter be the host table, from which the module reads and saves."""
        weight = self.weight
        weight.data = self.host.fields["weight"]
        self._version = weight._version

    def _open_cache(self) -> None:
        rows, _ = self.shape
        self.slots = SlotMap(self.name, rows, self.num_slots, self._policy)
        self.headers = torch.zeros(self.num_slots, 2, dtype=torch.int64, device=self.device)
        self._slot_of_current = torch.full((rows,), -1, dtype=torch.int32, device=self.device)
        self.engine.transfers.share(self.headers)
        self.cache = self._cache_of(self.host.layout)
        self.leaf = nn.Parameter(self.cache["weight"], self.weight.requires_grad)
        keep_full_gradients(self.leaf)
        self.leaf.stands_for = self._weight  # type: ignore[attr-defined]
        self.engine.transfers.make_room(self.host.layout.record_bytes)
        self._opened = True

    def _cache_of(self, layout: RecordLayout) -> dict[str, Tensor]:
        """Arrays for its fields: those that there are, and new ones."""
        arrays = layout.slots(self.num_slots, self.device)
        cache = {}
        for name, array in arrays.items():
            old = self.cache.get(name, array)
            cache[name] = old if (old.dtype, old.shape) == (array.dtype, array.shape) else array
        for array in cache.values():
            advise_huge_pages(array)
            self.engine.transfers.share(array)
        return cache

    # ---- states ----

    def _make_room(self, states: tuple[RowState, ...], kept: set[str], steps: float) -> bool:
        """Have the records hold ``states``. Where that fails all is as it was.

        Args:
            kept: names of states that keep their values, the others begin anew.
            steps: made with them.

        Returns:
            Whether the records had to be made anew; else nothing is filled.
        """
        before, at = self._states, self.host.optimizer_step
        self._states = states
        layout = self.layout(steps)
        if layout == self.host.layout:
            self.host.layout = layout
            return False
        anew = {state.name for state in states} - kept
        try:
            cache = self._cache_of(layout)
            self.host.optimizer_step = steps  # in the file, which is clean, too
            self.host = self.host.rebuilt(layout, anew=anew)
        except BaseException:
            self._states, self.host.optimizer_step = before, at
            raise
        self._fresh = {
            f.name: f.fill if f.name in anew else self._fresh[f.name]
            for f in layout.fields[1:]
            if f.name in anew or f.name in self._fresh
        }
        self.cache = cache
        self._point_weight()
        self.engine.transfers.make_room(self.host.layout.record_bytes)
        self._refetch()
        self._refetched()
        return True

    def weight_has_changed(self) -> None:
        """Copies of it are no longer what they would be made of it."""
        self._fresh = {name: value for name, value in self._fresh.items() if value is not None}

    @property
    def optimizer_step(self) -> float:
        """Of the states in the records, now."""
        return self.host.optimizer_step if self._step is None else float(self._step)

    def set_optimizer_step(self, step: float) -> None:
        self.host.optimizer_step = step
        if self._step is not None:
            self._step.fill_(step)  # the one in the state of the optimizer

    # ---- host and cache ----

    @alone
    def flush(self, *, reading: bool = False) -> None:
        """Bring the records up to date, before somebody reads all of them, or writes some fields.

        Args:
            reading: where the disk fails, a checkpoint may well go to another one.

        Raises:
            IntegrityError: a record is wrong. It would be saved, or sealed with what is written.
            FileGoneError, OSError: as `HostTable.flush`; a warning where they are only read.
        """
        if self._closed:  # which has brought them up to date
            self.engine.check_lost()
            return
        self.update()
        if not self._opened:
            return
        try:
            self.save()
        except (FileGoneError, OSError) as error:
            if not reading:
                raise
            warnings.warn(
                f"{error}. What is read of table {self.name!r} now is up to date all the same",
                RuntimeWarning,
                stacklevel=4,
            )
        if self.engine.transfers.verify != "off":
            wrong = self.host.verify()
            if wrong:
                raise IntegrityError(
                    *(self.name, wrong, self.engine.step, self.host.place),
                    "the records are wrong; engine.reset_rows() or engine.load_state_dict() "
                    "replaces them",
                )

    @alone
    @torch.no_grad()
    def update(self) -> None:
        """Bring the records up to date in memory; the cache stays as it is."""
        if self.abandoned:
            return
        self.open()
        engine = self.engine
        engine.check()
        self.settle()
        dirty = self.slots.dirty()
        if len(dirty):
            self.host.mark_dirty()
            with uninterrupted:
                engine.transfers.write_back(self, self.slots.row_of[dirty], dirty, engine.step)
                self.slots.mark_clean(dirty)
        engine.drain()
        if self._step is not None:
            self.host.optimizer_step = float(self._step)

    @alone
    def save(self) -> None:
        """After `update`: bring a file to the disk, where it then is clean."""
        if self._opened:
            self.host.flush(self.engine.step)

    @alone
    @torch.no_grad()
    def replaced(self) -> None:
        with uninterrupted:
            self._reseal()
            self._resumed_at = None
            self.weight_has_changed()
        self._refetched()

    def _reseal(self) -> None:
        """Take what is in the records, and bring it to the cache; `_refetched` waits for it.

        Nothing is under way: whoever wrote them has flushed before, or drained the lanes, and only
        the training loop begins transfers.
        """
        self.host.seal()
        self._refetch()
        if self.readable:
            self._version = self.weight._version

    def loadable(self, given: object) -> dict[str, Tensor]:
        """What `load` takes, of what was given for this table.

        Raises:
            TypeError, ValueError: it does not fit.
        """
        where = f"load_state_dict: table {self.name!r}"
        values = {"weight": given} if isinstance(given, Tensor) else given
        if not isinstance(values, Mapping):
            raise TypeError(f"{where} must have a tensor or a mapping, got {type(given).__name__}")
        fields = self.host.fields
        if "weight" not in values:
            raise ValueError(f"{where} must have 'weight', got {list(values)}")
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{where}: {name} must be a tensor, got {type(value).__name__}")
            if name != "step" and name not in fields:
                raise ValueError(
                    f"{where}: {name!r} is none of its fields ({', '.join(fields)}); an optimizer "
                    "that needs it has to be made first"
                )
            unfit = why_unfit(value)
            if unfit is not None:
                raise ValueError(f"{where}: {name} must be dense and real, got {unfit}")
            shape = torch.Size() if name == "step" else fields[name].shape
            if value.shape != shape:
                raise ValueError(
                    f"{where}: {name} must have shape {tuple(shape)}, got {tuple(value.shape)}"
                )
        step = values.get("step")
        if step is not None and not (step >= 0 and step.isfinite()):
            raise ValueError(f"{where}: step must be finite and not negative, got {float(step)}")
        return dict(values)

    @alone
    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Write all records; fields that are not among ``values`` begin anew."""
        step = values.get("step")
        values = {name: value for name, value in values.items() if name != "step"}
        if step is not None or len(values) == 1:
            self.set_optimizer_step(0.0 if step is None else float(step))
        missing = [f for f in self.layout(self.optimizer_step).fields if f.name not in values]
        self.spoiled = []
        self.collected = self.stored = self.delivered = None  # over, and maybe failed
        if self.slots.torn:  # by an interrupt
            self._forget_cache()
        self.host.mark_dirty()
        for name, value in values.items():
            self.host.fields[name].copy_(value)
        fresh = fill(self.host.fields, missing)
        self.replaced()
        self._fresh = fresh
        self._restored = self.optimizer_step if step is not None or len(values) > 1 else None

    def _forget_cache(self) -> None:
        """Begin with an empty one; what lookups still hold is worth nothing."""
        self.engine.give_way()
        drop(self._weight())
        self.slots = SlotMap(self.name, self.shape[0], self.num_slots, self._policy)
        self.current = []
        self._slot_of_current.fill_(-1)

    @alone
    @torch.no_grad()
    def reset(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Write the records of some rows, which may be those that a transfer has found wrong.

        A row that is not given its counters has missed no step; moments that begin anew have not
        seen any.
        """
        self.engine.drain(raising=False)
        self.delivered = None  # over, and maybe failed
        self.engine.check()
        fields = self.layout(self.optimizer_step).fields
        if not any(s.name in values for s in self._states if s.fill is not None and not s.counts):
            fields = tuple(replace(f, fill=0.0) if f.name == "row_count" else f for f in fields)
        self.host.layout = RecordLayout(fields)
        with uninterrupted:
            self.host.reset(rows, values)
            slots = self.slots.slot_of[rows].long()
            there = slots >= 0
            self.slots.mark_clean(slots[there])
            self._fetch(rows[there], slots[there])
        self.engine.wait(self.delivered)

    def _refetch(self) -> None:
        """Bring the rows that are in the cache there again; `_refetched` waits for them."""
        filled = torch.where(self.slots.row_of >= 0)[0]
        self.slots.mark_clean(filled)
        self._fetch(self.slots.row_of[filled], filled)

    def _refetched(self) -> None:
        self.engine.wait(self.delivered)
        self.mended += 1

    @alone
    def settle(self) -> None:
        """Take notice of what happened since the last time: released rows, writes, failures."""
        while self.released:
            with uninterrupted:
                pins = self.released.popleft()
                self.pins.discard(pins)
                if pins.map is self.slots:
                    pins.map.release(pins.slots)
        self.host.require_in_place()
        weight = self._weight()
        if weight is not None:
            if weight.data_ptr() != self.host.fields["weight"].data_ptr():
                raise RuntimeError(
                    f"table {self.name!r}: its weight was given other memory (weight.data = ...), "
                    "which the engine does not know; write it in place under no_grad() after "
                    "engine.flush(), or use load_state_dict()"
                )
            if weight._version != self._version:
                self._adopt_writes()
        if self.spoiled:
            self._mend()

    def _mend(self) -> None:
        """Fetch again what did not arrive as it was sent.

        A record may have gone to the slot of another row. So all clean slots are filled again;
        dirty ones have what nobody else has, but the header there tells.

        Raises:
            IntegrityError: a record came to a dirty slot, or is wrong again.
        """
        rows = torch.cat(self.spoiled).unique()
        dirty = self.slots.dirty()
        sent = self.host.layout.headers(self.host.records)[rows, 0]
        lost = torch.isin(self.headers[dirty.to(self.device), 0].cpu(), sent)
        lost &= ~torch.isin(self.slots.row_of[dirty], rows)
        if lost.any():
            self.engine.lose(
                IntegrityError(
                    *(self.name, self.slots.row_of[dirty[lost]].tolist(), self.engine.step),
                    "to device",
                    "other records were written to the slots of these rows, whose newer values are "
                    "lost; engine.load_state_dict() goes on from a checkpoint",
                )
            )
        clean = self.slots.row_of >= 0
        clean[dirty] = False
        slots = torch.where(clean)[0]
        with uninterrupted:
            self.spoiled = []
            self.delivered = None  # has failed
            self._fetch(self.slots.row_of[slots], slots, self.stored)
        self.engine.wait(self.delivered)
        self.mended += 1

    @torch.no_grad()
    def _adopt_writes(self) -> None:
        """Somebody has written the parameter in place: those records are sealed again.

        Raises:
            IntegrityError: one of them has a newer value in the cache; it would win, or be lost. Or
                it has another version than the last one, which no write to the weight explains.
        """
        self.engine.drain()
        written = self.host.verify()
        if written:
            rows = torch.tensor(written, device="cpu")
            found = self.host.layout.headers(self.host.records)[rows, 1]
            stale = rows[found != self.host.expected(rows)]
            if len(stale):
                raise IntegrityError(
                    *(self.name, stale.tolist(), self.engine.step, self.host.place),
                    "the records are older than they should be, or damaged; engine.reset_rows() or "
                    "engine.load_state_dict() replaces them",
                )
            slots = self.slots.slot_of[rows].long()
            dirty = torch.zeros(self.num_slots, dtype=torch.bool, device="cpu")
            dirty[self.slots.dirty()] = True
            lost = rows[(slots >= 0) & dirty[slots.clamp(min=0)]]
            if len(lost):
                raise IntegrityError(
                    self.name, lost.tolist(), self.engine.step, "in host memory",
                    "the weight was written in place while newer values of these rows were in the "
                    "cache; call engine.flush() before writing it (now engine.load_state_dict() "
                    "goes on from a checkpoint)",
                )  # fmt: skip
            with uninterrupted:
                self.host.seal(rows)
                there = slots >= 0
                self._fetch(rows[there], slots[there])
            self.engine.wait(self.delivered)
            self._resumed_at = None
            self.weight_has_changed()
        self._version = self.weight._version

    def _fetch(self, rows: Tensor, slots: Tensor, stored: Event | None = None) -> None:
        if len(rows):
            engine = self.engine
            self.delivered = engine.transfers.fetch(self, rows, slots, engine.step, stored)

    def register(self) -> None:
        self._key = id(self.weight)
        _offloaded.TABLES[self._key] = cast(_offloaded.OffloadedTable, self)  # which a `Table` is
        weakref.finalize(self.weight, _offloaded.TABLES.pop, self._key, None)

    def unregister(self) -> None:
        _offloaded.TABLES.pop(self._key, None)

    def close(self) -> None:
        self._closed = True
        if hasattr(self, "host"):
            self.host.close()


def require_weight(host: HostTable, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Close a file and raise `ValueError` where it has the records of another table."""
    there = host.layout.fields[0]
    if (there.name, there.dtype, host.num_rows, there.width) != ("weight", dtype, *shape):
        host.close()
        raise ValueError(
            f"table {host.name!r}: the file has weight {there.dtype} "
            f"[{host.num_rows}, {there.width}], the module {dtype} {list(shape)}"
        )


def _row_states(layout: RecordLayout) -> tuple[RowState, ...]:
    """The states in records; what a file does not say of them, `TrainedTable.bind` will."""
    return tuple(
        RowState(f.name, f.dtype, f.width, f.dtype == torch.int32, f.fill)
        for f in layout.fields[1:]
    )


def signature(states: Sequence[RowState]) -> list[tuple[str, torch.dtype, int]]:
    return [(state.name, state.dtype, state.width) for state in states]
