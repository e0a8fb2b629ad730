"""The gradients of one optimizer: one pass that looks at them, and unscales them on request."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastemb import _row_queue
from fastemb._grad_reference import GRAD_STATS
from fastemb._inference import lasting
from fastemb._offloaded import TABLES
from fastemb._row_queue import RowQueue
from fastemb.amp._fingerprint import Fingerprint, parameters
from fastemb.amp._groups import KeptScale, Scales
from fastemb.optim._base import RowOptimizer
from fastemb.optim._dense import MemoryInUse, flat, is_dense
from fastemb.optim._gradients import row_gradient, row_order
from fastemb.optim._states import LOW_PRECISION

_ops = torch.ops.fastemb
_COLUMNS = len(GRAD_STATS)


class Counted(NamedTuple):
    """Statistics of gradients.

    Attributes:
        params: a parameter for each row; some have more than one.
        groups: their scale groups.
        rows: [len(params), 8] int64, columns `GRAD_STATS`.
    """

    params: list[Tensor]
    groups: list[int]
    rows: Tensor


@dataclass
class Pass:
    """What was found in the gradients of one optimizer, as they were at that time.

    Attributes:
        found: by device, [groups] float32: 1 where a gradient of the group is not finite.
        groups: those that the gradients have.
        stats: see `Counted`.
        square_sums: groups with [n] float64 sums of squares of unscaled gradients; where a norm
            was asked for.
        max_norm: what their norm is to be clipped to in the step, None: nothing.
        norm: [] float64, that norm.
        clip: [] what unscaled gradients are to be multiplied by for it.
        unscaled: whether the gradients have been unscaled in place.
        handed_over: whether the step of an optimizer has unscaled them, unless it was skipped.
        gradients: tells whether they are still the same; None until the pass is over.
    """

    found: dict[torch.device, Tensor] = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)
    stats: list[Counted] = field(default_factory=list)
    square_sums: list[tuple[int, Tensor]] = field(default_factory=list)
    max_norm: float | None = None
    norm: Tensor | None = None
    clip: Tensor | None = None
    unscaled: bool = False
    handed_over: bool = False
    gradients: Fingerprint | None = None

    def found_on(self, device: torch.device, groups: int) -> Tensor:
        if device not in self.found:
            self.found[device] = torch.zeros(groups, dtype=torch.float32, device=device)
        return self.found[device]


def has_gradient(param: Tensor) -> bool:
    return param.grad is not None or _row_queue.waiting(param) is not None


def has_double(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a gradient is float64, or has parts that are."""
    found = False
    for param in parameters(optimizer):
        if param.grad is not None:
            found = found or param.grad.dtype in (torch.float64, torch.complex128)
        queue = _row_queue.waiting(param)
        found = found or any(part.grad.dtype == torch.float64 for part in queue or ())
    return found


def values_of(grad: Tensor) -> Tensor:
    return grad._values() if grad.layout == torch.sparse_coo else grad


class GradientCheck:
    """One pass over the gradients of an optimizer.

    Args:
        op: of the scaler, for messages.
        origin_of: the scale group of a gradient, and the scale it has, None: that of the group.
        name_of: what messages call a parameter.
        norm: whether to sum the squares of the unscaled gradients.
        unscale: whether to unscale in place; gradients that share memory get their own.
        unscaled: whether they are unscaled already.
        done: whether that of one parameter is, as the gradient of another optimizer.
        refuse: raises where that of one parameter is not to be used.
    """

    def __init__(
        self,
        op: str,
        scales: Scales,
        origin_of: Callable[[Tensor], tuple[int, KeptScale | None]],
        name_of: Callable[[Tensor], str],
        *,
        norm: bool = False,
        unscale: bool = False,
        unscaled: bool = False,
        done: Callable[[Tensor], bool],
        refuse: Callable[[Tensor], None],
    ) -> None:
        self._op = op
        self._scales = scales
        self._origin_of = origin_of
        self._origins: dict[int, tuple[int, KeptScale | None]] = {}
        self._name_of = name_of
        self._norm = norm
        self._unscale = unscale
        self._unscaled = unscaled
        self._done = done
        self._refuse = refuse
        self._result = Pass(unscaled=unscale or unscaled)
        self._taken = MemoryInUse()  # that others read or that will be written
        # What was looked at elsewhere before.
        self._looked_at: list[tuple[Tensor, Tensor, Tensor]] = []

    @lasting()
    def run(
        self, optimizer: torch.optim.Optimizer, waiting: Iterable[torch.optim.Optimizer] = ()
    ) -> Pass:
        """Look at every gradient of ``optimizer``.

        Args:
            waiting: other optimizers, whose gradients must stay as they are.

        Raises:
            ValueError: a gradient that is neither dense nor sparse COO, or a wrapper as `DTensor`.
            RuntimeError: a table with ``sparse="fused"`` that has a ``.grad`` as well, or whose
                incoming gradients were changed since the backward.
        """
        ours = isinstance(optimizer, RowOptimizer)
        # Before anything is written.
        params = [param for param in parameters(optimizer) if self._takes_part(param)]
        done_by_others = [self._done(param) for param in params]
        self._origins = {id(param): self._origin_of(param) for param in params}
        if self._unscale:
            self._spare(optimizer, waiting)
        dense: dict[
            tuple[torch.device, int, KeptScale | None, bool], list[tuple[Tensor, Tensor]]
        ] = defaultdict(list)
        for param, done in zip(params, done_by_others, strict=True):
            queue, grad = _row_queue.waiting(param), param.grad
            unscale = self._unscale and not done
            if queue is not None:
                self._check_queue(param, queue, unscale, done)
                continue
            assert grad is not None
            if grad.layout == torch.strided:
                values = self._dense(param, grad, ours, unscale)
            elif grad.sparse_dim() == 1 and grad.dense_dim() <= 1:
                values = self._rows(param, grad, ours, unscale, done)
            else:
                values = self._coalesced(param, grad, unscale)
            if values is not None:
                key = (values.device, *self._origins[id(param)], done)
                dense[key].append((param, values))
        for (device, group, _, done), members in dense.items():
            self._check(device, group, members, done)
        for values, inverse, found in self._looked_at:
            _ops.grad_check_([values], inverse, None, None, None, True)
            self._check_rounded([values], found)
        self._result.gradients = Fingerprint(params)
        return self._result

    def _takes_part(self, param: Tensor) -> bool:
        """Whether a parameter has a gradient, which is one that can be looked at."""
        queue, grad = _row_queue.waiting(param), param.grad
        if queue is not None:
            _row_queue.check_alone(self._op, param, queue)
            queue.check_unchanged()
        elif grad is None:
            return False
        else:
            wrapped: bool = is_traceable_wrapper_subclass(grad)
            if wrapped:
                raise ValueError(
                    f"{self._op}: gradients must be plain tensors, got {type(grad).__name__} for "
                    f"{self._name_of(param)}; torch.amp.GradScaler takes those that are sharded"
                )
            if grad.layout not in (torch.strided, torch.sparse_coo):
                raise ValueError(
                    f"{self._op}: gradients must be dense or sparse COO, got {grad.layout} for "
                    f"{self._name_of(param)}"
                )
        self._refuse(param)
        return True

    # ---- kinds of gradients: values to look at, or None where that is done ----

    def _dense(self, param: Tensor, grad: Tensor, ours: bool, unscale: bool) -> Tensor | None:
        grad = grad.detach()
        is_complex = grad.is_complex()
        if is_complex:
            if grad.is_conj():
                grad = grad.resolve_conj()
                _set_grad(param, grad)
            grad = torch.view_as_real(grad)
        if not unscale:
            return _one_piece(grad)
        if grad.dtype == torch.float16 and ours:
            grad = grad.float()  # what the scale has saved, fp16 would flush again
            _set_grad(param, grad)
        elif grad.dtype == torch.float16:
            self._warn_of_rounding(param)
        return self._writable(
            param, grad, lambda values: torch.view_as_complex(values) if is_complex else values
        )

    def _rows(
        self, param: Tensor, grad: Tensor, ours: bool, unscale: bool, done: bool
    ) -> Tensor | None:
        """Repeated rows are summed first: finite ones may have a sum that is not."""
        rows = row_gradient(grad)
        values, dtype = grad._values(), grad.dtype
        if rows.used_rows is not None:
            # How many rows there are, only the device knows; the sums are looked at, and the
            # gradient keeps its repeated rows.
            self._check_rows(param, rows.values, rows.used_rows, done=done)
            if unscale:
                self._unscale_looked_at(param, grad, ours)
            return None
        summed = rows.values.data_ptr() != values.data_ptr()
        if summed:
            values = rows.values.view(-1, *values.shape[1:])
        if summed and values.dtype != dtype and not ours:
            # Other optimizers take no gradient of another dtype.
            if not unscale:
                return values
            found = self._check(values.device, self._group_of(param), [(param, values)], done)
            values = values.to(dtype)
            _set_grad(param, _rows_of(grad, rows.rows, values))
            if dtype == torch.float16:
                self._warn_of_rounding(param)
            self._check_rounded([values], found)
            return None
        if unscale and dtype == torch.float16:
            if not ours:
                self._warn_of_rounding(param)
            elif not summed:
                values = values.float()
        if summed or values.dtype != dtype:
            _set_grad(param, _rows_of(grad, rows.rows, values))
        if not unscale:
            return _one_piece(values)
        return self._writable(param, values, lambda own: _rows_of(grad, rows.rows, own))

    def _unscale_looked_at(self, param: Tensor, grad: Tensor, ours: bool) -> None:
        """Unscale a gradient of rows of which some are repeated."""
        values, rows = grad._values(), grad._indices()[0]
        if values.dtype == torch.float16 and ours:
            values = values.float()
            _set_grad(param, _rows_of(grad, rows, values, distinct=False))
        elif values.dtype == torch.float16:
            self._warn_of_rounding(param)
        own = self._writable(param, values, lambda v: _rows_of(grad, rows, v, distinct=False))
        group = self._group_of(param)
        inverse = self._inverse(param, values.device)
        if inverse is not None:
            found = self._result.found_on(values.device, len(self._scales))
            self._looked_at.append((own, inverse, found[group]))

    def _coalesced(self, param: Tensor, grad: Tensor, unscale: bool) -> Tensor | None:
        """A sparse gradient of something else than rows, which torch can sum."""
        if not grad.is_coalesced():
            grad = grad.coalesce()
            _set_grad(param, grad)
        values = grad._values()
        if not unscale:
            return _one_piece(values)
        if values.dtype == torch.float16:
            self._warn_of_rounding(param)
        return self._writable(
            param,
            values,
            lambda own: torch.sparse_coo_tensor(
                grad._indices(),
                own,
                grad.shape,
                device=own.device,
                is_coalesced=True,
                check_invariants=False,
            ),
        )

    def _check_queue(self, param: Tensor, queue: RowQueue, unscale: bool, done: bool) -> None:
        """A gradient of ``sparse="fused"``, which is summed while it is looked at."""
        part = queue.merged()
        offloaded = self._norm and id(param) in TABLES
        if unscale or offloaded:
            part = _row_queue.summed(part)  # what it is made of is not ours to write
        order = row_order(param, part.rows, part.num_rows) if offloaded else None
        if order is None:
            self._check_rows(
                param, part.grad, part.num_rows, part.segments, part.sources, part.coefficients,
                unscale=unscale, done=done,
            )  # fmt: skip
        else:
            grad = part.grad[order]
            self._check_rows(param, grad, part.num_rows, unscale=unscale, done=done)
            if unscale:
                part.grad[order] = grad
        if unscale:
            queue.put(replace(part, version=part.grad._version))

    # ---- the operators ----

    def _group_of(self, param: Tensor) -> int:
        return self._origins[id(param)][0]

    def _inverse(self, param: Tensor, device: torch.device, done: bool = False) -> Tensor | None:
        if self._unscaled or done:
            return None
        group, kept = self._origins[id(param)]
        return self._scales.inverse(group, device) if kept is None else kept.inverse(device)

    def _places(
        self, device: torch.device, group: int, params: Sequence[Tensor], done: bool
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
        """Inverse scale, found_inf, statistics and sums of squares for gradients of one origin.

        Those that are done count in the statistics of the other optimizer.
        """
        result = self._result
        result.groups.add(group)
        found = result.found_on(device, len(self._scales))
        counted = Counted(
            list(params),
            [group] * len(params),
            torch.zeros(len(params), _COLUMNS, dtype=torch.int64, device=device),
        )
        if not done:
            result.stats.append(counted)
        squares = None
        if self._norm:
            squares = torch.zeros(len(params), dtype=torch.float64, device=device)
            result.square_sums.append((group, squares))
        return self._inverse(params[0], device, done), found[group], counted.rows, squares

    def _check(
        self,
        device: torch.device,
        group: int,
        members: Sequence[tuple[Tensor, Tensor]],
        done: bool,
    ) -> Tensor:
        """Returns: where it is noted that a gradient is not finite."""
        params, grads = [p for p, _ in members], [g for _, g in members]
        inverse, found, stats, squares = self._places(device, group, params, done)
        unscale = self._unscale and inverse is not None
        _ops.grad_check_(grads, inverse, found, stats, squares, unscale)
        if unscale:
            self._check_rounded(grads, found)
        return found

    def _check_rounded(self, grads: Sequence[Tensor], found: Tensor) -> None:
        """Below a scale of 1, what was finite in FP32 need not be so in 16 bits."""
        narrow = [grad for grad in grads if grad.dtype in LOW_PRECISION]
        if narrow:
            _ops.grad_check_(narrow, None, found, None, None, False)

    def _check_rows(
        self,
        param: Tensor,
        grad: Tensor,
        used_rows: Tensor | None,
        segments: Tensor | None = None,
        sources: Tensor | None = None,
        coefficients: Tensor | None = None,
        *,
        unscale: bool = False,
        done: bool,
    ) -> None:
        group = self._group_of(param)
        inverse, found, stats, squares = self._places(grad.device, group, [param], done)
        _ops.row_grad_check_(
            grad, used_rows, segments, sources, coefficients, inverse, found, stats[0],
            None if squares is None else squares[0], unscale and inverse is not None,
        )  # fmt: skip

    # ---- memory ----

    def _spare(
        self, optimizer: torch.optim.Optimizer, others: Iterable[torch.optim.Optimizer]
    ) -> None:
        """Take the memory of gradients that ``others`` have and ``optimizer`` does not."""
        own = {id(param) for param in parameters(optimizer)}
        for param in chain.from_iterable(map(parameters, others)):
            grad = param.grad
            if id(param) in own or grad is None:
                continue
            values = values_of(grad)
            if values.layout == torch.strided:
                self._taken.overlaps(values)

    def _writable(
        self, param: Tensor, values: Tensor, gradient: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Values in one piece of memory that no other gradient of this pass has.

        Nothing is written before all gradients came by here, so each is unscaled once.

        Args:
            gradient: the ``.grad`` that has other values, where these cannot be written.
        """
        writable = is_dense(values) and not values.is_neg()
        if values.numel() > 0 and (not writable or self._taken.overlaps(values)):
            values = values.clone(memory_format=torch.contiguous_format)
            _set_grad(param, gradient(values))
        return _one_piece(values)

    def _warn_of_rounding(self, param: Tensor) -> None:
        if self._scales.fixed:
            return
        warnings.warn(
            f"{self._op}: the gradient of {self._name_of(param)} is float16 and is unscaled in "
            "float16, which flushes what the scale has saved; use an optimizer of fastemb.optim, "
            "or param.grad_dtype = torch.float32",
            RuntimeWarning,
            stacklevel=4,
        )


def _one_piece(grad: Tensor) -> Tensor:
    """The elements as the operators take them, without a copy where that is possible."""
    grad = grad.resolve_neg()
    if grad.is_contiguous():
        return grad
    return flat(grad) if is_dense(grad) else grad.contiguous()


def _rows_of(grad: Tensor, rows: Tensor, values: Tensor, *, distinct: bool = True) -> Tensor:
    """A gradient like ``grad`` with other rows."""
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0),
        values,
        grad.shape,
        device=values.device,
        is_coalesced=distinct,
        check_invariants=False,
    )


def _set_grad(param: Tensor, grad: Tensor) -> None:
    """Replace a gradient, also by one of another dtype."""
    if param.grad_dtype not in (None, grad.dtype):
        param.grad = None  # torch refuses to change grad_dtype under a gradient
        param.grad_dtype = None  # any: the next gradient can have the dtype of before
    param.grad = grad
