"""The step of all optimizers: which kernel updates a parameter, and with what.

A subclass says what its states are and calls its kernels; see the methods of `RowOptimizer` that
raise `NotImplementedError`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastemb import _offloaded, _row_queue
from fastemb._offloaded import device_of
from fastemb._reference import accumulation_dtype
from fastemb._row_queue import QueuedRows, RowQueue
from fastemb._sleeping import TABLES
from fastemb.optim._dense import DenseUpdate, flat, is_dense, laid_out_like
from fastemb.optim._exact import as_table, release
from fastemb.optim._gradients import check_sparse, dense_gradient, row_gradient
from fastemb.optim._options import Options
from fastemb.optim._scaling import Scaling, StepScaling
from fastemb.optim._states import (
    DTYPES,
    LOW_PRECISION,
    ROW_COUNTERS,
    State,
    StatefulOptimizer,
    has_master,
    is_trainable,
)

if TYPE_CHECKING:
    from fastemb.offload._dense import DenseOffload


class Update(NamedTuple):
    """One parameter in one step.

    Attributes:
        position: counted over all groups.
        grad: the gradient, dense or sparse; with ``queued`` no more than what it is made of.
        queued: what lookups with ``sparse="fused"`` have in place of a gradient.
    """

    position: int
    param: Tensor
    grad: Tensor
    state: State
    scaling: Scaling
    queued: QueuedRows | None = None

    @property
    def sparse(self) -> bool:
        """Whether the gradient is one of rows."""
        return self.queued is not None or self.grad.layout != torch.strided


class RowCall(NamedTuple):
    """Arguments of a row operator.

    Attributes:
        param, master, moments: matrices of the same rows; moments by name.
        counters: one int32 number per row, by name; those there are.
        common: what all row operators take, from ``rows`` to ``seed`` of their schemas.
        sparse: whether the gradient is.
        parameter: what ``param`` is a view or a copy of.
    """

    param: Tensor
    master: Tensor | None
    moments: dict[str, Tensor]
    counters: dict[str, Tensor]
    common: tuple[Any, ...]
    sparse: bool
    parameter: Tensor

    @property
    def skip(self) -> Tensor | None:
        """``found_inf``."""
        return self.common[8]


class Offloaded(NamedTuple):
    """A table with a gradient, and what there is of it here."""

    table: _offloaded.OffloadedTable
    param: Tensor
    group: Options


class _StepTakesScaling:
    """True, but False on wrappers that imitate an optimizer, whose step would not see the scaling.

    Can be overridden on an instance, as torch's optimizers do.
    """

    def __get__(self, optimizer: RowOptimizer | None, owner: type[RowOptimizer]) -> bool:
        if optimizer is None or not optimizer._is_wrapper():
            return True
        for group in optimizer.param_groups:
            for param in group["params"]:
                queue = _row_queue.waiting(param)
                if queue is not None:
                    raise _sees_no_gradient(owner.__name__, queue)
        return False


class RowOptimizer(StatefulOptimizer):
    """Base of the optimizers for dense and row-sparse gradients, in any floating dtype.

    Attributes:
        grad_scale, found_inf: set by `torch.amp.GradScaler` for the time of a step.
        _param_scaling: inverse scale and found_inf of single parameters, in place of those two.
        _clip_coefficient: [] tensor that multiplies every gradient in the step.
    """

    # The scaler hands over its scale and its flag instead of writing gradients and waiting.
    _step_supports_amp_scaling = _StepTakesScaling()

    _param_scaling: Mapping[Tensor, tuple[Tensor | None, Tensor | None]] | None = None
    _clip_coefficient: Tensor | None = None

    # Other optimizers are kept from parameters with gradients of ``sparse="fused"``.
    _takes_queued_rows = True

    # torch's kernel for dense FP32 and FP64 parameters, None: they take the row operator, too.
    _fused_operator: str | None = None

    # ---- what a subclass defines ----

    def _prepare(self, param: Tensor, group: Options, state: State, *, sparse: bool) -> None:
        """Add to ``state`` what a step of the row operator needs; drop what it would not keep."""
        self._add_step(param, group, state)
        self._add_moments(param, group, state)

    def _prepare_dense(self, param: Tensor, group: Options, state: State) -> None:
        """Add to ``state`` what a step of torch's kernels needs."""
        self._add_step(param, group, state)
        self._add_moments(param, group, state)

    def _row_step(self, group: Options, call: RowCall) -> None:
        """Call the row operator."""
        raise NotImplementedError

    def _fused_step(self, group: Options, updates: Sequence[DenseUpdate], scaling: Scaling) -> None:
        """Update dense parameters of one device and dtype by torch's fused kernel."""
        raise NotImplementedError

    def _functional_step(self, group: Options, updates: Sequence[Update]) -> None:
        """Update dense parameters by torch's functional optimizer, which advances their steps."""
        raise NotImplementedError

    # ---- the step ----

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; gradients are only read.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The loss of ``closure``, else None.

        Raises:
            ValueError, TypeError: an option was edited to what the constructor refuses.
            ValueError: a sparse gradient that is not one of rows, or a table with sparse gradients
                whose rows are not contiguous.
            IndexError: a row of a sparse gradient outside its table, on the CPU.
            RuntimeError: ``differentiable=True`` and a gradient that torch's optimizers do not
                take; a sparse gradient of a complex parameter; a gradient or a state of another
                shape than its parameter, as after a new ``.data``; a gradient of a dtype, or a
                parameter with expanded memory, that cannot be updated; a table with
                ``sparse="fused"`` that also has a ``.grad``, under a `torch.amp.GradScaler`, whose
                incoming gradients were changed since the backward, or whose gradient another
                optimizer has consumed. Nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            self._check_step()
            scaling = StepScaling(
                getattr(self, "grad_scale", None),
                getattr(self, "found_inf", None),
                self._param_scaling,
                self._clip_coefficient,
            )
            if self._offload is None:
                self._step_groups(scaling)
            else:
                self._offload.begin(self, scaling)
                try:
                    self._make_states(self._offload)
                    self._step_groups(scaling)
                finally:
                    self._offload.end()
        return loss

    def _check_step(self) -> None:
        """Refuse options and gradients that cannot be applied, before any is.

        Then have the records of offloaded tables hold what the step needs.
        """
        tables = []
        for group in self.param_groups:
            self._check_group(group)
            for param in group["params"]:
                queue = _row_queue.waiting(param)
                if queue is not None:
                    self._check_queue(param, queue)
                    sparse = True
                elif param.grad is None:
                    _row_queue.check_not_consumed(self, param)
                    continue
                else:
                    sparse = param.grad.layout != torch.strided
                    if sparse:
                        check_sparse(type(self).__name__, param.grad)
                sparse = sparse and group.get("decay") != "all"  # which makes it dense
                state = self.state.get(param, {})
                table = _offloaded.TABLES.get(id(param))
                self._check_shapes(param, queue if table is None else None, state)
                by_rows = sparse or not self._goes_through_torch(group, param, state)
                if by_rows:
                    self._check_row_update(group, param, state, sparse)
                if param.grad is not None:
                    self._check_dtype(param, param.grad, by_rows)
                if table is not None:
                    self._check_offloaded(table, param, group)
                    table.check_usable(self, self._state_of(table, param, group).get("step"))
                    tables.append(Offloaded(table, param, group))
        self._bind_offloaded(tables)

    def _check_shapes(self, param: Tensor, queue: RowQueue | None, state: State) -> None:
        """Refuse a parameter whose ``.data`` was replaced by another shape; no kernel would.

        Args:
            queue: None also for an offloaded table, whose lookups are of slots.
        """
        shape = tuple(param.shape)
        grads = [] if param.grad is None else [tuple(param.grad.shape)]
        if queue is not None:
            grads = [(part.num_embeddings, *shape[1:]) for part in queue]
        for grad in grads:
            if grad != shape:
                raise RuntimeError(
                    f"{type(self).__name__}: the gradient of a parameter of shape {shape} must "
                    f"have that shape, got {grad}; call zero_grad()"
                )
        strides = param.stride()
        if any(size > 1 and stride == 0 for size, stride in zip(shape, strides, strict=True)):
            raise RuntimeError(
                f"{type(self).__name__}: a parameter of shape {shape} must have memory for each "
                f"element, got strides {strides}; use a copy of what was expanded"
            )
        for name, value in state.items():
            wanted = self._state_shape(param, name)
            if wanted is None and name != "step":
                continue  # somebody else's
            if not isinstance(value, Tensor):
                if value is None and name in self._moment_names:
                    continue  # made again
                if name == "step" and isinstance(value, (int, float)):
                    continue  # of those who edit states of torch's SparseAdam
                raise RuntimeError(
                    f"{type(self).__name__}: state {name!r} of a parameter of shape {shape} must "
                    f"be a tensor, got {value!r}"
                )
            if wanted is not None and value.shape != wanted:
                raise RuntimeError(
                    f"{type(self).__name__}: state {name!r} of a parameter of shape {shape} must "
                    f"have shape {tuple(wanted)}, got {tuple(value.shape)}; a parameter that has "
                    "changed its shape begins anew without its entry in optimizer.state"
                )

    def _check_dtype(self, param: Tensor, grad: Tensor, by_rows: bool) -> None:
        """Refuse gradients, which ``grad_dtype = None`` lets be of any dtype, that no kernel takes.

        Args:
            by_rows: the row operator updates the parameter. Others convert a gradient.
        """
        if by_rows or grad.layout != torch.strided:
            good, expected = grad.dtype in DTYPES, "float16, bfloat16, float32 or float64"
        else:
            good, expected = param.is_complex() or not grad.is_complex(), "real"
        if not good:
            raise RuntimeError(
                f"{type(self).__name__}: the gradient of a {param.dtype} parameter of shape "
                f"{tuple(param.shape)} must be {expected}, got {grad.dtype}"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for param in group["params"]:
                table = _offloaded.TABLES.get(id(param))
                if table is not None:
                    self._check_offloaded(table, param, group)
                    table.reserve(self, self._row_states(param, group))
        except BaseException:
            self.param_groups.pop()
            raise

    add_param_group.__doc__ = StatefulOptimizer.add_param_group.__doc__

    def _check_offloaded(
        self, table: _offloaded.OffloadedTable, param: Tensor, group: Options
    ) -> None:
        """Refuse options and gradients that a table whose rows are elsewhere cannot have."""
        for option, value in (("rounding", "stochastic"), ("decay", "all"), ("lazy", "exact")):
            if group.get(option) == value:
                raise self._error(
                    f"{option} of an offloaded table must be another than {value!r}, which needs "
                    "the whole table or its row numbers in every step",
                    value,
                )
        if param.grad is not None:
            raise RuntimeError(
                f"{type(self).__name__}: the weight of table {table.name!r} is offloaded and has a "
                ".grad (of something else than its lookups, say a penalty on it), which cannot be "
                "applied; call zero_grad()"
            )

    def _bind_offloaded(self, tables: Sequence[Offloaded]) -> None:
        """Have the records hold what the step needs, and the states show them."""
        bound = []
        for table, param, group in tables:
            state = dict(self._state_of(table, param, group))
            wanted = self._row_states(param, group)
            for name in {"master", *ROW_COUNTERS}.difference(s.name for s in wanted):
                state.pop(name, None)  # not kept up from here on
            self._add_step(param, group, state)
            state["step"] = state["step"].to(table.device)
            bound.append((table, param, wanted, state))
        for table, _, wanted, state in bound:
            if not table.holds(wanted, state):
                table.flush()  # may refuse, while nothing is changed
        for table, param, wanted, state in bound:
            state |= table.bind(self, wanted, state)
            own = self.state[param]
            own.update(state)
            for name in own.keys() - state.keys():
                del own[name]

    def _check_queue(self, param: Tensor, queue: RowQueue) -> None:
        op = type(self).__name__
        _row_queue.check_alone(op, param, queue)
        queue.check_unchanged()
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        if scaled and param not in (self._param_scaling or {}):
            raise _sees_no_gradient(op, queue)

    def _make_states(self, offload: DenseOffload) -> None:
        """Those on the host, before the first step: there may be no memory for all of them."""
        for group in self.param_groups:
            for param in group["params"]:
                if offload.steps(param):
                    assert param.grad is not None
                    state = self.state.get(param, {})
                    place, _, _ = offload.home(param, param.grad, state)
                    self._make_state(place, group, state, sparse=False)
                    if state:  # SGD can do without
                        self.state[param] = state

    def _make_state(self, param: Tensor, group: Options, state: State, *, sparse: bool) -> bool:
        """Add to ``state`` what a step needs; whether the row operator makes that."""
        by_rows = sparse or not self._goes_through_torch(group, param, state)
        if by_rows:
            self._prepare(param, group, state, sparse=sparse)
            self._add_master(param, group, state)
        else:
            self._prepare_dense(param, group, state)
        return by_rows

    def _step_groups(self, scaling: StepScaling) -> None:
        positions = count()
        for group in self.param_groups:
            params = [(next(positions), param) for param in group["params"]]
            for distinct in _rounds(params):
                if self._offload is None:
                    self._step_group(group, distinct, scaling)
                else:
                    self._offload.run(partial(self._step_group, group, scaling=scaling), distinct)

    def _step_group(
        self, group: Options, params: Sequence[tuple[int, Tensor]], scaling: StepScaling
    ) -> None:
        fused: dict[Hashable, list[Update]] = defaultdict(list)
        functional: list[Update] = []
        rows: list[Update] = []
        consumed: list[tuple[RowQueue, QueuedRows]] = []
        for position, param in params:
            queue, queued = _row_queue.waiting(param), None
            if queue is not None:
                queued = queue.merged()
                consumed.append((queue, queued))
            grad = param.grad if queued is None else queued.grad
            if grad is None:
                continue
            state = self.state.get(param, {})
            if id(param) in TABLES:
                release(self, param, state)
            place, device = param, device_of(param)
            if self._offload is not None:  # the step may be made with what is on the host
                place, grad, device = self._offload.home(param, grad, state)
            update = Update(position, place, grad, state, scaling.of(param, device), queued)
            if update.sparse and group.get("decay") == "all":
                update = update._replace(
                    grad=dense_gradient(queued or grad, update.scaling.multiplier),
                    scaling=Scaling(skip=update.scaling.skip),
                    queued=None,
                )
            sparse = update.sparse
            table = _offloaded.TABLES.get(id(param))
            if table is not None:
                table.begin_step(state["step"])
                rows.append(update)
            elif self._make_state(place, group, state, sparse=sparse):
                rows.append(update)
            elif _is_fused(group, place, self._fused_operator):
                fused[place.device, place.dtype, id(update.scaling)].append(update)
            else:
                functional.append(update)
            if state:
                self.state[param] = state

        steps: dict[Scaling, list[Tensor]] = defaultdict(list)
        for update in chain(rows, *fused.values()):
            if "step" in update.state:
                steps[update.scaling].append(update.state["step"])
        for how, counters in steps.items():
            how.advance(counters)

        moments = tuple(self._moments(group))
        for updates in fused.values():
            dense = [
                DenseUpdate(
                    u.param, u.grad, tuple(u.state[name] for name in moments), u.state.get("step")
                )
                for u in updates
            ]
            self._fused_step(group, dense, updates[0].scaling)
            # torch's fused kernels do not tell autograd.
            torch.autograd.graph.increment_version([u.param for u in updates])
        if functional:
            self._functional_step(group, list(_taken(functional)))
        for update in rows:
            self._step_rows(group, update)
        for queue, part in consumed:  # also by a step that was skipped: a new backward follows
            queue.consume(part, self)

    def _goes_through_torch(self, group: Options, param: Tensor, state: State) -> bool:
        """Whether torch's own optimizer updates the parameter by a dense gradient."""
        return (
            self._fused_operator is not None
            and param.dtype not in LOW_PRECISION
            and self._moment_dtype(param, group) == param.dtype
            and not self._keeps_rows(state)
        )

    def _check_row_update(self, group: Options, param: Tensor, state: State, sparse: bool) -> None:
        if group.get("differentiable"):
            raise RuntimeError(
                f"{type(self).__name__}: differentiable=True takes dense gradients of float32 and "
                f"float64 parameters only, got a {'sparse' if sparse else 'dense'} gradient "
                f"of a {param.dtype} parameter"
            )
        if param.is_complex():
            raise RuntimeError(
                f"{type(self).__name__}: a {param.dtype} parameter takes dense gradients only"
            )
        if not is_trainable(param):
            raise RuntimeError(
                f"{type(self).__name__}: a {param.dtype} parameter cannot be optimized; it must "
                "have no gradient"
            )
        wrapped: bool = is_traceable_wrapper_subclass(param)
        if wrapped:
            raise RuntimeError(
                f"{type(self).__name__}: a {param.dtype} parameter of a wrapper such as DTensor, "
                "which fully_shard makes, is left to torch's own kernels, which know no master, no "
                "other dtype of states and no rows; use float32 or float64 parameters with dense "
                "gradients, and for low precision the MixedPrecisionPolicy of fully_shard"
            )
        # What sparse gradients have begun to count for each row goes on with dense ones.
        counted = any(name in state for name in ROW_COUNTERS)
        if (sparse or counted) and not _has_rows(param):
            raise self._error(
                "a table with sparse gradients must have contiguous rows, param.stride(1) == 1",
                f"strides {param.stride()} for shape {tuple(param.shape)}",
            )

    def _step_rows(self, group: Options, update: Update) -> None:
        """Update a parameter by the row operator: the rows it has, or, dense, as one long row."""
        position, param, grad, state, scaling, queued = update
        sparse = update.sparse
        if param.numel() == 0:
            return
        table = _offloaded.TABLES.get(id(param))
        work, states = param.detach(), state
        if table is not None:
            work, states = table.leaf.detach(), {**state, **table.cache}
        view = as_table
        rows = used_rows = segments = sources = coefficients = None
        multiplier = scaling.multiplier
        if sparse:
            rows, used_rows, values, unscaled, segments, sources, coefficients = row_gradient(
                queued or grad, multiplier
            )
            if rows.numel() == 0:
                return
            multiplier = None if unscaled else multiplier
        else:
            if not self._keeps_rows(state):
                view = _as_one_row
            if not (is_dense(work) if view is _as_one_row else work.is_contiguous()):
                work = self._empty_like(param, param.dtype).copy_(param)
            values = view(laid_out_like(grad, work))
        if (values.dtype == torch.float64) != (param.dtype == torch.float64):
            values = values.to(accumulation_dtype(param.dtype))

        lr, lr_tensor = _learning_rate(group["lr"], work.device)
        common = (
            rows,
            used_rows,
            values,
            segments,
            sources,
            coefficients,
            state["step"],
            multiplier,
            scaling.skip,
            lr,
            lr_tensor,
            float(group.get("weight_decay", 0.0)),
            bool(group["maximize"]),
            seed_of(group, param, position),
        )
        self._row_step(
            group,
            RowCall(
                view(work),
                view(states["master"]) if has_master(param, group) else None,
                {name: view(states[name]) for name in self._moments(group)},
                {name: states[name].view(-1) for name in ROW_COUNTERS if name in states},
                common,
                sparse,
                param,
            ),
        )
        if table is not None:
            assert queued is not None
            torch.autograd.graph.increment_version(table.leaf)
            table.stepped(queued)
        elif work.data_ptr() != param.data_ptr():
            param.copy_(work)
        else:
            torch.autograd.graph.increment_version(param)

    def _keeps_rows(self, state: State) -> bool:
        """Whether a dense step tells the rows of a parameter apart."""
        return self._row_wise or any(name in state for name in ROW_COUNTERS)


def _sees_no_gradient(op: str, queue: RowQueue) -> RuntimeError:
    return RuntimeError(
        f"{op}: torch.amp.GradScaler sees no gradient of {queue.table}, which has sparse='fused', "
        "and cannot tell whether it overflowed; use fastemb.amp.GradScaler, or sparse=True"
    )


def _rounds(params: Sequence[tuple[int, Tensor]]) -> Iterator[Sequence[tuple[int, Tensor]]]:
    """The parameters, in parts that have each at most once; torch updates one as often as it is."""
    while params:
        first: dict[int, tuple[int, Tensor]] = {}
        again = []
        for entry in params:
            if first.setdefault(id(entry[1]), entry) is not entry:
                again.append(entry)
        yield list(first.values())
        params = again


def _has_rows(param: Tensor) -> bool:
    if param.dim() != 2:
        return param.dim() < 2 or param.is_contiguous()
    return param.shape[1] <= 1 or param.stride(1) == 1


def _as_one_row(tensor: Tensor) -> Tensor:
    return flat(tensor).unsqueeze(0)


def _learning_rate(lr: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """``lr`` and ``lr_tensor`` of a row operator."""
    if not isinstance(lr, Tensor):
        return float(lr), None
    dtype = lr.dtype if lr.dtype == torch.float64 else torch.float32
    # A copy to the host that nothing waits for would be read before it is there.
    return 0.0, lr.to(device, dtype, non_blocking=device.type != "cpu").reshape(())


def seed_of(group: Options, param: Tensor, position: int) -> int:
    """Of stochastic rounding, -1 for none; parameters must not be rounded alike."""
    rounds_param = group["rounding"] == "stochastic" and param.dtype in LOW_PRECISION
    rounds_moments = group.get("state_dtype") == torch.bfloat16
    if not (rounds_param or rounds_moments):
        return -1
    return int((group["seed"] + (position << 32)) % 2**63)


def _is_fused(group: Options, param: Tensor, operator: str | None) -> bool:
    """Whether torch's fused kernel is what was asked for, or what there is to choose.

    Unlike torch, which then takes foreach, ``foreach=None, fused=None`` means fused. Not for
    wrappers such as `DTensor`, which do not know all fused kernels.
    """
    if param.is_complex():  # there is none
        return False
    fused = group.get("fused")
    if fused is None:
        fused = group.get("foreach") is None and not group.get("differentiable")
        fused = fused and _has_kernel(cast(str, operator), param.device.type)
        fused = fused and not is_traceable_wrapper_subclass(param)
    return bool(fused)


@cache
def _has_kernel(operator: str, device_type: str) -> bool:
    key = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}.get(device_type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(
        f"aten::{operator}", key
    )


def _taken(updates: Iterable[Update]) -> Iterator[Update]:
    """Those whose step is not skipped, with their gradients unscaled, out of place.

    torch's functional optimizers know no flag that stays on the device, so this waits for it, as
    `torch.amp.GradScaler` does for them.
    """
    skips: dict[Scaling, bool] = {}
    for update in updates:
        scaling = update.scaling
        if scaling not in skips:
            skips[scaling] = scaling.skip is not None and bool(scaling.skip)
        if skips[scaling]:
            continue
        grad = update.grad.resolve_conj()
        if grad.dtype != update.param.dtype:
            grad = grad.to(update.param.dtype)
        if scaling.multiplier is not None:
            grad = grad.clone() if grad is update.grad else grad
            scaling.apply([grad], [grad])
        yield update._replace(grad=grad)
