"""Row gradients between a backward and a step: what ``sparse="fused"`` has in place of ``.grad``.

A backward of `fastemb._fused` queues what the row gradients are made of, and `fastemb.optim` sums
and applies them in one kernel. A queue is known by the id of its parameter, and goes with it:
neither deepcopy nor pickle carries it along. What nobody but an optimizer of this package may
consume is refused by name here.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastemb._parameter_reference import ParameterReference
from fastemb._reference import accumulation_dtype

_ops = torch.ops.fastemb

# Parts that wait before they are summed. A table that no optimizer has would otherwise keep the
# gradients of all its lookups; so it keeps one gradient, as with .grad.
_MOST_PARTS = 16


@dataclass(frozen=True, eq=False)
class QueuedRows:
    """The row gradients of one lookup; gradient row k belongs to row ``rows[k]`` of the table.

    It is ``grad[k]``, or with ``segments`` the sum over j in [segments[k], segments[k + 1]) of
    ``coefficients[j] * grad[sources[j]]``; see ``csrc/ops.h``.

    Attributes:
        grad: [any, dim], contiguous, float64 for a float64 table and only there.
        rows: [n] int64, ascending and distinct.
        num_rows: [1] int32, how many of them count; what lies behind is unspecified.
        segments: [n + 1] int32, or None.
        sources: int32, rows of ``grad``; with segments.
        coefficients: FP32 (FP64 for float64), one for each source; None: all 1.
        num_embeddings: of the table.
        backward: number of the backward that this comes from.
        version: of ``grad``, which others may hold as well, when it was queued.
        stream: the CUDA stream on which all this was made, None elsewhere.
        keeps: what has to stay alive as long as this waits: the slots of an offloaded table.
    """

    grad: Tensor
    rows: Tensor
    num_rows: Tensor
    segments: Tensor | None
    sources: Tensor | None
    coefficients: Tensor | None
    num_embeddings: int
    backward: int
    version: int
    stream: torch.cuda.Stream | None
    keeps: tuple[object, ...] = ()

    @property
    def room(self) -> int:
        """How many rows there are: exactly on the CPU, at most elsewhere, which waits for none."""
        if on_host(self.rows):
            return int(self.num_rows)
        return min(self.rows.shape[0], self.num_embeddings)

    def tensors(self) -> Iterable[Tensor]:
        parts = (self.grad, self.rows, self.num_rows)
        yield from parts
        for tensor in (self.segments, self.sources, self.coefficients):
            if tensor is not None:
                yield tensor


def on_host(tensor: Tensor) -> bool:
    """Whether reading a tensor waits for nothing."""
    return tensor.device.type == "cpu"


def queued_rows(
    grad: Tensor,
    rows: Tensor,
    num_rows: Tensor,
    segments: Tensor | None,
    sources: Tensor | None,
    coefficients: Tensor | None,
    num_embeddings: int,
    backward: int = -1,
    keeps: tuple[object, ...] = (),
) -> QueuedRows:
    if grad.is_inference():
        grad = grad.clone()  # has no version to tell a change by
    stream = torch.cuda.current_stream(grad.device) if grad.is_cuda else None
    return QueuedRows(
        grad, rows, num_rows, segments, sources, coefficients, num_embeddings, backward,
        grad._version, stream, keeps,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# sums
# ---------------------------------------------------------------------------------------------


def add_rows_(table: Tensor, rows: Tensor, part: QueuedRows, multiplier: Tensor | None) -> None:
    """Add gradient k, times ``multiplier``, to row ``rows[k]`` of a zero ``table``.

    A step of SGD with the learning rate -1 does just that: 0 - (-1 * g) is g, on every backend and
    in the order of summation that every optimizer has.
    """
    if table.numel() == 0 or rows.numel() == 0:
        return
    segments, grad = part.segments, part.grad
    if segments is None:
        grad = grad[: rows.shape[0]]
    else:
        segments = segments[: rows.shape[0] + 1]
    _ops.row_sgd_(
        table, None, None, rows, part.num_rows, grad, segments, part.sources, part.coefficients,
        torch.ones((), dtype=torch.float32, device=table.device), multiplier, None, -1.0, None, 0.0,
        False, -1, 0.0, 0.0, False,
    )  # fmt: skip


def summed(part: QueuedRows) -> QueuedRows:
    """The same gradient without segments, in memory that nobody else has."""
    if part.segments is None:
        return part
    room = part.room
    sums = part.grad.new_zeros(
        (room, part.grad.shape[1]), dtype=accumulation_dtype(part.grad.dtype)
    )
    add_rows_(sums, torch.arange(room, device=sums.device), part, None)
    return queued_rows(
        sums, part.rows[:room], part.num_rows, None, None, None, part.num_embeddings,
        part.backward, part.keeps,
    )  # fmt: skip


def combined(parts: list[QueuedRows]) -> QueuedRows:
    """Several gradients as one: those of one backward are added first, as autograd does it."""
    backwards = defaultdict(list)
    for part in parts:
        backwards[part.backward].append(part)
    return _sum([_sum(same) for same in backwards.values()])


def _sum(parts: list[QueuedRows]) -> QueuedRows:
    if len(parts) == 1:
        return parts[0]
    plain = [summed(part) for part in parts]
    num_embeddings = parts[0].num_embeddings
    keys = []
    for part in plain:
        rows = part.rows
        if not on_host(rows):
            used = torch.arange(rows.shape[0], device=rows.device) < part.num_rows
            rows = torch.where(used, rows, num_embeddings)  # one past the table: padding
        keys.append(rows)
    order, rows, segments, num_rows = _ops.group_indices(
        torch.cat(keys).unsqueeze(1), None, num_embeddings + 1, num_embeddings, False
    )
    return queued_rows(
        torch.cat([part.grad for part in plain]), rows, num_rows, segments, order, None,
        num_embeddings, parts[0].backward, tuple({k: None for part in plain for k in part.keeps}),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# queues
# ---------------------------------------------------------------------------------------------


class RowQueue:
    """What waits for the step of one parameter.

    Attributes:
        table: how errors call it.
        consumer: the optimizer that took what waited last, until a backward or zero_grad().
    """

    def __init__(self, weight: Tensor, table: str) -> None:
        self.table = named(weight, table)
        self.consumer: weakref.ref[torch.optim.Optimizer] | None = None
        self._weight = ParameterReference(weight, _forget)
        self._parts: list[QueuedRows] = []
        self._lock = Lock()

    def unreferenced(self) -> AbstractContextManager[None]:
        """For the time of it there is no weak reference to the parameter."""
        return self._weight.taken_off()

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[QueuedRows]:
        return iter(self._parts)

    def append(self, part: QueuedRows) -> None:
        with self._lock:
            self.consumer = None
            self._parts.append(part)
            if len(self._parts) > _MOST_PARTS:
                self.check_unchanged()
                # This backward may have more to come, which goes with its own parts first.
                own = [p for p in self._parts if p.backward == part.backward]
                others = [p for p in self._parts if p.backward != part.backward]
                kinds = [kind for kind in (others, own) if kind]
                self._parts = [self._here(summed(combined(kind))) for kind in kinds]

    def check_unchanged(self) -> None:
        """Raise `RuntimeError` where somebody has written what a backward has handed over."""
        if any(part.grad._version != part.version for part in self._parts):
            raise RuntimeError(
                f"sparse='fused': the gradient of a lookup in {self.table} was changed in place "
                "after the backward and before optimizer.step(), which still needs it (a tensor "
                "given to backward(), or kept by a hook); change a copy, or call zero_grad()"
            )

    def check_reachable(self, op: str) -> None:
        """Raise `RuntimeError` for gradients of a parameter that stands in for another one.

        `torch.distributed.fsdp.fully_shard` gives lookups such a one, which no optimizer has, and
        frees its memory after the backward.
        """
        weight = self._weight()
        if weight is None or not self._parts or weight.numel() == 0:
            return
        if weight.untyped_storage().nbytes() == 0:
            raise RuntimeError(
                f"{op}: gradients of lookups in {self.table} with sparse='fused' wait for a weight "
                "whose memory was freed, as fully_shard does after the backward; use sparse=False "
                "for a table that is sharded"
            )

    def merged(self) -> QueuedRows:
        """All that waits, as one; the queue is not empty."""
        with self._lock:
            self.check_unchanged()
            parts = [self._here(part) for part in self._parts]
            self._parts = [combined(parts)]
            return self._parts[0]

    def put(self, part: QueuedRows) -> None:
        """Let ``part`` alone wait."""
        with self._lock:
            self._parts = [part]

    def consume(self, part: QueuedRows, optimizer: torch.optim.Optimizer) -> None:
        """Forget what `merged` has returned, and nothing that came later."""
        with self._lock:
            self._parts = [p for p in self._parts if p is not part]
            self.consumer = weakref.ref(optimizer)

    def clear(self) -> None:
        with self._lock:
            self._parts = []
            self.consumer = None

    @staticmethod
    def _here(part: QueuedRows) -> QueuedRows:
        """The part for the current stream. Autograd makes that wait for leaves of its own only."""
        if part.stream is None:
            return part
        stream = torch.cuda.current_stream(part.grad.device)
        if stream == part.stream:
            return part
        stream.wait_stream(part.stream)
        for tensor in part.tensors():
            tensor.record_stream(stream)
        return replace(part, stream=stream)


# By id of the parameter. An entry goes when its parameter does.
_QUEUES: dict[int, RowQueue] = {}
_linking = Lock()
_guarded = False


def append(weight: Tensor, table: str, part: QueuedRows) -> None:
    """Let a row gradient wait for the step of ``weight``."""
    global _guarded
    with _linking:
        if not _guarded:
            register_optimizer_step_pre_hook(refuse_other_optimizers)
            _guarded = True
        queue = _QUEUES.get(id(weight))
        if queue is None:
            queue = _QUEUES[id(weight)] = RowQueue(weight, table)
    queue.append(part)


def check_not_consumed(optimizer: torch.optim.Optimizer, weight: Tensor) -> None:
    """Raise `RuntimeError` where another optimizer has taken the gradient of ``weight``."""
    queue = _QUEUES.get(id(weight))
    if queue is None or queue or queue.consumer is None:
        return
    consumer = queue.consumer()
    if consumer is not None and consumer is not optimizer:
        raise RuntimeError(
            f"{type(optimizer).__name__}: the step of another optimizer has consumed the gradient "
            f"of {queue.table}, which has sparse='fused' (zero_grad() of an optimizer says that "
            "nothing is wanted of it); use sparse=True for a table with two optimizers"
        )


def queue_of(weight: Tensor) -> RowQueue | None:
    """The queue of a parameter, empty or not."""
    return _QUEUES.get(id(weight))


def waiting(weight: Tensor | None) -> RowQueue | None:
    """The queue of a parameter, if anything is in it."""
    queue = _QUEUES.get(id(weight))
    return queue if queue else None


def drop(weight: Tensor | None) -> None:
    """Forget the gradients that wait: ``zero_grad``."""
    queue = _QUEUES.get(id(weight))
    if queue is not None:
        queue.clear()


def check_alone(op: str, weight: Tensor, queue: RowQueue) -> None:
    """Raise `RuntimeError` where a parameter has a gradient as well."""
    if weight.grad is not None:
        raise RuntimeError(
            f"{op}: {queue.table} has gradients of lookups with sparse='fused', and a .grad from "
            "elsewhere (a lookup without it, another module with the same weight, a penalty); use "
            "sparse=True for all of them, or call zero_grad()"
        )


def refuse_waiting(op: str, weight: Tensor | None, why: str) -> None:
    """Raise `RuntimeError` where gradients wait that ``op`` would put out of place."""
    queue = waiting(weight)
    if queue is not None:
        raise RuntimeError(
            f"{op}: gradients of lookups in {queue.table} with sparse='fused' wait for "
            f"optimizer.step() and {why}; call optimizer.step() or optimizer.zero_grad() first"
        )


def named(weight: Tensor, table: str) -> str:
    return f"table {table!r}" if table else f"the table of shape {tuple(weight.shape)}"


def refuse_other_optimizers(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before every step of every optimizer: one that reads ``.grad`` would leave the table out."""
    for any_queue in list(_QUEUES.values()):
        any_queue.check_reachable(type(optimizer).__name__)
    if getattr(optimizer, "_takes_queued_rows", False):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            queue = waiting(param)
            if queue is not None:
                raise RuntimeError(
                    f"{type(optimizer).__module__}.{type(optimizer).__name__}: {queue.table} has "
                    "gradients of lookups with sparse='fused', which only the optimizers of "
                    "fastemb.optim can apply; use one of those, or sparse=True"
                )


def _forget(key: int, reference: weakref.ref[Tensor]) -> None:
    queue = _QUEUES.get(key)
    if queue is not None and queue._weight.made(reference):
        del _QUEUES[key]
