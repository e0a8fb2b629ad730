"""``lazy="exact"``: the rows of one table that sleep until they are read or written."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch

from fastemb import _lazy_ops  # noqa: F401  (defines the operator)
from fastemb._inference import lasting
from fastemb._parameter_reference import ParameterReference
from fastemb._row_queue import on_host
from fastemb._sleeping import TABLES
from fastemb.optim._history import AdamHistory
from fastemb.optim._states import LOW_PRECISION, State

_ops = torch.ops.fastemb


class Rule(NamedTuple):
    """What the steps that a row sleeps depend on, and must not change meanwhile.

    Attributes:
        weight_decay: of the L2 penalty, 0 without; decoupled decay may change, like the learning
            rate: both are in the history.
        dtype: of the moments; bfloat16 ones count as float32.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    decoupled: bool
    dtype: torch.dtype


class SleepingRows:
    """`fastemb._sleeping.Sleepers` of a parameter that one optimizer trains.

    It outlives the optimizer, which may go out of scope while rows sleep, and holds the states that
    are needed to wake them. The next reader then catches up the whole table and ends it.

    Attributes:
        lock: of the table, its states and what is here. `step` of the optimizer holds it, too.
        state: that of the optimizer. Only while this exists there is ``row_step`` in it.
        pending: steps since all rows were current; skipped ones may count.
    """

    def __init__(
        self, owner: torch.optim.Optimizer, param: Tensor, state: State, rule: Rule
    ) -> None:
        self.lock = Lock()
        self.state = state
        self.pending = 0
        self._owner = weakref.ref(owner)
        self._param = ParameterReference(param, _forget)
        self._woken = 0
        self._seed = -1
        self._rule = rule
        self._history = self._new_history(state["step"])

    @lasting()
    def _new_history(self, step: Tensor) -> AdamHistory:
        rule = self._rule
        return AdamHistory(
            step, rule.beta1, rule.beta2, rule.eps, amsgrad=rule.amsgrad, dtype=rule.dtype
        )

    def belongs_to(self, owner: object) -> bool:
        return self._owner() is owner

    def has_state_in(self, states: Mapping[Tensor, State]) -> bool:
        param = self._param()
        return param is not None and states.get(param) is self.state

    # ---- for readers of the table ----

    def wake_batch(self, ids: Tensor, padding_idx: int | None) -> None:
        param = self._param()
        if param is None:
            return
        if self._owner() is None or type(ids) is not Tensor or _is_traced():
            self.wake_all()
            return
        if not _fits(ids, param):
            return
        refuse_capture(param, "a lookup in")
        if self.pending == 0 or not self._has_rows_of(param):
            return
        num_embeddings = param.shape[0]
        padding = -1 if padding_idx is None else padding_idx % num_embeddings
        with torch.no_grad(), _unseen():
            lookups = ids.detach().reshape(-1, 1)
            _, rows, _, num_rows = _ops.group_indices(lookups, None, num_embeddings, padding, False)
            used: Tensor | None = num_rows
            with self.lock:
                if on_host(param):
                    rows, used = rows[: int(num_rows)], None
                    rows = rows[self.state["row_step"][rows] != int(self._history.step)]
                    if rows.numel() == 0:
                        return
                self._wake(param, rows, used)

    def wake_all(self) -> None:
        param = self._param()
        if param is not None:
            refuse_capture(param, "reading")
        with _unseen():
            if self._owner() is None:
                self.retire()
            else:
                with self.lock:
                    self._settle()

    def shares_memory(self, weight: Tensor) -> bool:
        param = self._param()
        return param is not None and torch._C._is_alias_of(param, weight)  # type: ignore[attr-defined]

    def is_whole(self, weight: Tensor) -> bool:
        param = self._param()
        return param is not None and _layout(weight) == _layout(param)

    def unreferenced(self) -> AbstractContextManager[None]:
        return self._param.taken_off()

    def content_version(self) -> int:
        with self.lock:
            param = self._param()
            return -1 if param is None else param._version - self._woken

    # ---- for the optimizer ----

    def retire(self) -> None:
        """Catch up all rows and be no more: the state is that of dense Adam."""
        with self.lock:
            self._settle()
            self.state.pop("row_step", None)
            param = self._param()
            if param is not None and TABLES.get(id(param)) is self:
                del TABLES[id(param)]

    def begin_step(self, rule: Rule, seed: int, skip: Tensor | None) -> bool:
        """Prepare for a step; False: it is known to be skipped. The caller has the lock.

        Rows that sleep under another rule, or for as long as the history goes back, are woken
        first. That is rare, so that a flag on the device can be waited for.
        """
        self._seed = seed
        if rule != self._rule or self.pending >= len(self._history.table) - 1:
            if skip is not None and bool(skip):
                return False
            self._settle()
            if rule != self._rule:
                self._rule = rule
                self._history = self._new_history(self._history.step)
        # Threads that share an optimizer have advanced it without the lock.
        made = 1.0 if skip is None else 1.0 - skip
        self.state["step"].copy_(self._history.step + made)
        return True

    def catch_up(
        self, table: Tensor, rows: Tensor | None, used_rows: Tensor | None, skip: Tensor | None
    ) -> None:
        """Bring rows to the end of the newest step in the history. The caller has the lock.

        Args:
            table: [num_embeddings, dim], the parameter or what will be copied to it.
            rows, used_rows: see the operator; None: all.
            skip: not 0: do nothing.
        """
        state, rule, history = self.state, self._rule, self._history
        has_master = table.dtype in LOW_PRECISION and "master" in state
        _ops.row_adam_catch_up_(
            table,
            as_table(state["master"]) if has_master else None,
            as_table(state["exp_avg"]),
            as_table(state["exp_avg_sq"]),
            as_table(state["max_exp_avg_sq"]) if rule.amsgrad else None,
            state["row_step"],
            rows,
            used_rows,
            history.step,
            history.table,
            skip,
            rule.weight_decay,
            self._seed,
            rule.beta1,
            rule.beta2,
            rule.eps,
            history.smallest_root,
            history.horizon,
            rule.decoupled,
        )

    def end_step(self, lr: float | Tensor, decay: float, skip: Tensor | None) -> None:
        """Add the step to the history. The caller has the lock."""
        self._history.append(self.state["step"], lr, decay, skip)
        self.pending += 1

    def _settle(self) -> None:
        param = self._param()
        if param is None or self.pending == 0 or param.numel() == 0:
            return
        if not self._has_rows_of(param):
            return
        with torch.no_grad():
            asleep = True
            if on_host(param):
                asleep = bool((self.state["row_step"] != int(self._history.step)).any())
            if asleep:
                self._wake(param, None, None)
        self.pending = 0

    def _has_rows_of(self, param: Tensor) -> bool:
        """Whether there are states for the parameter as it is; else it begins anew.

        Raises:
            RuntimeError: its ``.data`` was replaced by another shape, and the optimizer still has
                the states of the old one.
        """
        shape = self.state["exp_avg"].shape
        if param.shape == shape:
            return True
        owner = self._owner()
        if owner is not None and owner.state.get(param) is self.state:
            raise RuntimeError(
                f"lazy='exact': the rows of a parameter of shape {tuple(shape)} slept when it got "
                f"the shape {tuple(param.shape)}, and cannot be woken; call optimizer.flush() "
                "before, or delete its entry in optimizer.state, without which it begins anew"
            )
        return False

    def _wake(self, param: Tensor, rows: Tensor | None, used_rows: Tensor | None) -> None:
        """Catch up rows, and tell autograd.

        Graphs of others that have saved the parameter may have read what changes here. On a device
        nobody knows whether any row has slept, so that they are refused also where none has.
        """
        version = param._version
        self.catch_up(as_table(param.detach()), rows, used_rows, None)
        torch.autograd.graph.increment_version(param)
        self._woken += param._version - version  # kernels in Python count by themselves


_linking = Lock()


def link(owner: torch.optim.Optimizer, param: Tensor, state: State, rule: Rule) -> None:
    """Let the rows of a table sleep from here on, unless they do already.

    Args:
        owner: the optimizer.
        state: of the parameter, with ``step``, the moments and a ``row_step`` of no use yet.
    """
    with _linking:
        known = TABLES.get(id(param))
        if isinstance(known, SleepingRows) and known.belongs_to(owner) and known.state is state:
            return
        if isinstance(known, SleepingRows):
            known.retire()
        TABLES[id(param)] = SleepingRows(owner, param, state, rule)


def sleepers_of(owner: object, param: Tensor) -> SleepingRows | None:
    """What sleeps in a parameter and belongs to an optimizer."""
    known = TABLES.get(id(param))
    if isinstance(known, SleepingRows) and known.belongs_to(owner):
        return known
    return None


def all_sleepers_of(owner: torch.optim.Optimizer) -> list[SleepingRows]:
    """Of all parameters, also those that are in no group any more.

    And those with the states of ``owner``: it may be a wrapper of the optimizer, or a copy.
    """
    known = [s for s in list(TABLES.values()) if isinstance(s, SleepingRows)]
    return [s for s in known if s.belongs_to(owner) or s.has_state_in(owner.state)]


def release(owner: object, param: Tensor, state: State) -> None:
    """End what sleeps in a parameter for another optimizer, or with a state that was replaced."""
    known = TABLES.get(id(param))
    if isinstance(known, SleepingRows) and not (known.belongs_to(owner) and known.state is state):
        known.retire()


def refuse_capture(param: Tensor, what: str) -> None:
    if param.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"lazy='exact': {what} a table whose rows may sleep cannot be captured in a CUDA "
            "graph, which would repeat the steps of the time of its capture"
        )


def as_table(tensor: Tensor) -> Tensor:
    """(num_embeddings, ...) as [num_embeddings, dim]; no copy of what has rows or is dense."""
    if tensor.dim() == 2:
        return tensor
    return tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)


def _is_traced() -> bool:
    """Whether a graph is made that will read other rows, or `torch.func` wraps tensors."""
    recorded = torch._C._get_tracing_state() is not None
    return recorded or _functorch.peek_interpreter_stack() is not None


@contextmanager
def _unseen() -> Iterator[None]:
    """No tracer or transform is shown what is done here: it is no part of the lookup.

    Other dispatch modes are, such as those that look out for tensors that are written.
    """
    if not _is_traced() and torch._C._len_torch_dispatch_stack() == 0:
        yield  # at once, as nearly always
        return
    tracing = torch._C._get_tracing_state()
    modes = [torch._C._unset_dispatch_mode(key) for key in _TRACERS]
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C._DisableFuncTorch():
            yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
        for mode in modes:
            if mode is not None:
                torch._C._set_dispatch_mode(mode)


_TRACERS = (
    torch._C._TorchDispatchModeKey.FAKE,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _fits(ids: object, param: Tensor) -> bool:
    return (
        isinstance(ids, Tensor)
        and ids.dtype in (torch.int32, torch.int64)
        and ids.device == param.device
        and ids.numel() > 0
        and param.shape[0] > 0
    )


def _forget(key: int, reference: weakref.ref[Tensor]) -> None:
    """The parameter is gone, and with it all that slept."""
    known = TABLES.get(key)
    if isinstance(known, SleepingRows) and known._param.made(reference):
        del TABLES[key]
