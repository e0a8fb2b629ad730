"""What optimizers do with an offloaded table: have its records hold their states."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fastemb._offloaded import RowState
from fastemb._row_queue import QueuedRows
from fastemb.offload._held import HeldRows
from fastemb.offload._host import fill
from fastemb.offload._interrupts import uninterrupted
from fastemb.offload._modes import outside_modes
from fastemb.offload._stored import StoredTable, alone, signature


class TrainedTable(StoredTable):
    """A table for `RowOptimizer`; `fastemb._offloaded.OffloadedTable` says what its methods do."""

    def check_served(self, optimizer: object) -> None:
        if optimizer in self._retired:
            raise RuntimeError(
                f"table {self.name!r}: another optimizer has trained it since, and its states "
                f"have begun anew; this {type(optimizer).__name__} can no longer train it, "
                "nor save its states"
            )

    def check_usable(self, optimizer: object, step: Tensor | None = None) -> None:
        if self._closed:
            raise RuntimeError(f"table {self.name!r} is closed, as its OffloadEngine is")
        self.check_served(optimizer)
        at = self._resumed_at
        if at is not None and step is not None and float(step) != at:
            raise RuntimeError(
                f"table {self.name!r}: its weights are from a file of step {at:g}, "
                f"its states from a checkpoint of step {float(step):g}; load the weights of "
                "that checkpoint as well, or only the states that the file lacks"
            )

    def _owner(self) -> object | None:
        return None if self._optimizer is None else self._optimizer()

    def _has_states_of_another(self, optimizer: object) -> bool:
        """Whether the records hold what another optimizer, still there, has made steps with."""
        return self._step is not None and self._owner() not in (None, optimizer)

    @alone
    def reserve(self, optimizer: object, states: Sequence[RowState]) -> None:
        self.check_usable(optimizer)
        if self._step is not None and self._owner() is not None:
            return
        there = {} if self._restored is None else {s.name: s for s in self._states}
        wanted = (*(there.pop(s.name, s) for s in states), *there.values())
        if not self._opened:
            self._states = wanted
        elif signature(wanted) != signature(self._states):
            self.flush()
            kept = set(signature(wanted)) & set(signature(self._states))
            self._make_room(wanted, {name for name, _, _ in kept}, self.optimizer_step)

    @outside_modes
    def restored(self, optimizer: object) -> dict[str, Tensor]:
        if self._restored is None or self._closed or self._has_states_of_another(optimizer):
            return {}
        step = torch.tensor(self._restored, dtype=torch.float32, device=self.device)
        views = self.host_states().items()
        return {"step": step, **{name: view for name, view in views if name not in self._fresh}}

    @alone
    def holds(self, states: Sequence[RowState], given: Mapping[str, Tensor]) -> bool:
        self.open()
        self.settle()  # a step must see what was written since the lookup
        views = self.host_states()
        return signature(states) == signature(self._states) and all(
            self._is_fresh(state, given["step"])
            if given.get(state.name) is None
            else _shows(given[state.name], views[state.name])
            for state in states
        )

    def _is_fresh(self, state: RowState, step: Tensor) -> bool:
        if state.name not in self._fresh:
            return False
        return self._fresh[state.name] == (float(step) if state.counts else state.fill)

    @alone
    @torch.no_grad()
    def bind(
        self, optimizer: object, states: Sequence[RowState], given: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        if self.holds(states, given):
            self._states = tuple(states)
            self._serve(optimizer, given["step"])
        else:
            self._rewrite(optimizer, tuple(states), given)
        return self.host_states()

    def _serve(self, optimizer: object, step: Tensor) -> None:
        if self._has_states_of_another(optimizer):
            self._retired.add(self._owner())
        self._optimizer = weakref.ref(optimizer)
        self._step = step
        self._restored = None

    def _rewrite(
        self, optimizer: object, states: tuple[RowState, ...], given: Mapping[str, Tensor]
    ) -> None:
        self.flush()
        views = self.host_states()
        there = {s.name: given[s.name] for s in states if given.get(s.name) is not None}
        kept = {n for n, value in there.items() if n in views and _shows(value, views[n])}
        rebuilt = self._make_room(states, kept, float(given["step"]))
        self._serve(optimizer, given["step"])  # the other's are lost from here on
        views, written = self.host_states(), there.keys() - kept
        if rebuilt and not written:
            return
        with uninterrupted:
            self.host.mark_dirty()
            for name in written:
                views[name].copy_(there[name])
                self._fresh.pop(name, None)
            if not rebuilt:
                missing = (f for f in self.host.layout.fields[1:] if f.name not in there)
                self._fresh = fill(self.host.fields, missing)
            self._reseal()
        self._refetched()

    def host_states(self) -> dict[str, Tensor]:
        self.open()
        fields = self.host.fields
        return {s.name: fields[s.name][:, 0] if s.flat else fields[s.name] for s in self._states}

    @alone
    def begin_step(self, step: Tensor) -> None:
        self._step = step
        self._resumed_at = self._restored = None
        self._fresh = {}

    @alone
    def stepped(self, part: QueuedRows) -> None:
        for held in part.keeps:
            assert isinstance(held, HeldRows)
            self.slots.mark_dirty(held.slots)

    def row_order(self, slots: Tensor) -> Tensor:
        slots = slots.cpu()
        rows = torch.where(slots < 0, self.shape[0], self.slots.row_of[slots.clamp(min=0)])
        return rows.argsort(stable=True).to(self.device)


def _shows(value: Tensor, view: Tensor) -> bool:
    return value.data_ptr() == view.data_ptr()
