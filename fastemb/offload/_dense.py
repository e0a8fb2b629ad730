"""Optimizer states of dense parameters in host memory, where the step is made as well."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from fastemb import _row_queue
from fastemb._fused import DenseGradientHook
from fastemb._offloaded import TABLES, device_of
from fastemb.offload._lanes import Lane
from fastemb.offload._link import HOST, Link, LinkOptions, Transfer
from fastemb.offload._modes import outside_modes
from fastemb.offload._twin import Twin
from fastemb.offload.errors import VERIFY, Direction, IntegrityError, Verify
from fastemb.optim._dense import is_dense
from fastemb.optim._states import ROW_COUNTERS, State

if TYPE_CHECKING:
    from fastemb.optim._base import RowOptimizer
    from fastemb.optim._scaling import StepScaling

__all__ = ["DenseOffload", "HostStates"]

Params = Sequence[tuple[int, Tensor]]


@dataclass(frozen=True)
class HostStates:
    """Where an optimizer of `fastemb.optim` keeps the states of dense parameters: on the host.

    Optimizers take it as ``offload=``; ``offload="cpu"`` is one with the defaults. For every
    parameter with dense gradients the host has the states, the FP32 master, and a copy of the
    parameter and of its gradient. Gradients are sent there in chunks while the backward goes on;
    `step` is made there, by the kernels for the CPU and with their bits, and sends the parameters
    back, each while the next ones are stepped. Without a GPU all this happens too, to other memory.

    A gradient that is changed after it was sent, to clip it for one, is sent again by `step`, which
    finds that by its checksum. What others write to a parameter is found in the same way, and
    wins over the copy on the host, as over a master.

    An `IntegrityError` names the parameter, and as rows the chunks of it that are wrong. One on the
    way to the host is raised before anything is changed, and `step` can be called again. One on the
    way to the device means that the parameter there is not the result of the step: `step` then
    refuses to go on, until states were loaded by `load_state_dict`, which takes the parameters as
    they then are.

    Attributes:
        verify: "all": every chunk that arrives is checked; "sample": one in 16; "off": none.
        chunk_bytes: size of a staging buffer, of which there are two in each direction and device;
            a multiple of 8.
        lane: makes the lanes, of a name and a device; tests and benchmarks have other ones.

    Raises:
        ValueError: an attribute outside the values above.
    """

    verify: Verify = "all"
    chunk_bytes: int = 4 << 20
    lane: Callable[[str, torch.device], Lane] = Lane

    def __post_init__(self) -> None:
        if self.verify not in VERIFY:
            known = ", ".join(map(repr, VERIFY))
            raise ValueError(f"HostStates: verify must be one of {known}, got {self.verify!r}")
        size = self.chunk_bytes
        if not isinstance(size, int) or size < 8 or size % 8:
            raise ValueError(
                f"HostStates: chunk_bytes must be a positive multiple of 8, got {size!r}"
            )


class DenseOffload:
    """The part of an optimizer that knows what is on the host.

    Args:
        op: name of the optimizer, for messages.
    """

    def __init__(self, op: str, config: HostStates) -> None:
        self.config = config
        self._op = op
        self._links: dict[torch.device, Link] = {}
        self._twins: dict[Tensor, Twin] = {}
        self._names: dict[Tensor, str] = {}
        self._here: set[Tensor] = set()  # parameters whose states are where they are
        self._active: dict[Tensor, Twin] = {}  # those that this step is made for on the host
        self._skipped: dict[Tensor, bool] = {}
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._lock = Lock()  # hooks come from the threads of the backward
        self._steps = 0
        self._addresses: list[int] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False

    # ---- for the optimizer ----

    def follow(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Know the parameters in the groups of the optimizer, and no others any more.

        Messages call them by their name or their number.
        """
        names: dict[Tensor, str] = {}
        positions = count()
        for group in groups:
            given = group.get("param_names") or ()
            for index, param in enumerate(group["params"]):
                number = next(positions)
                names.setdefault(param, given[index] if index < len(given) else str(number))
        for param in self._names.keys() - names.keys():
            with self._lock:
                self._twins.pop(param, None)
            self._here.discard(param)
            if param in self._hooks:
                self._hooks.pop(param).remove()
        self._names = names

    def _watch(self, param: Tensor) -> None:
        """Send further gradients of a parameter, which has a dense one, once they are there."""
        if param in self._hooks or not (param.requires_grad and param.is_leaf):
            return
        reference = weakref.ref(self)

        def on_gradient(param: Tensor) -> None:
            offload = reference()
            if offload is not None:
                offload._gradient_is_ready(param)

        hook = DenseGradientHook(on_gradient)
        self._hooks[param] = param.register_post_accumulate_grad_hook(hook)

    def device_of(self, param: Tensor) -> torch.device:
        """Where new states of a parameter belong."""
        empty = not is_lazy(param) and param.numel() == 0
        here = param in self._here or empty or id(param) in TABLES
        return device_of(param) if here else HOST

    @outside_modes
    def begin(self, optimizer: RowOptimizer, scaling: StepScaling) -> None:
        """Have everything on the host that the step will read, and look at it.

        Raises:
            IntegrityError: something has not arrived as it was sent; nothing is changed.
            ValueError: a parameter that is not in one piece of memory, or shares it with another,
                or a wrapper such as `DTensor`.
        """
        params = {param for group in optimizer.param_groups for param in group["params"]}
        if params != self._names.keys():  # somebody has edited the groups
            self.follow(optimizer.param_groups)
        self._look_at_deliveries(wait=True)
        self._active = {}
        found = list(dict(self._dense_gradients(optimizer)).items())  # each once
        for param, grad in found:
            wrapped: bool = is_traceable_wrapper_subclass(param)
            if wrapped:
                raise ValueError(
                    f"{self._op}: with offload= parameters must be plain tensors, got "
                    f"{type(param.data).__name__} for {self._names[param]}; what fully_shard makes "
                    "is kept on the host by its CPUOffloadPolicy"
                )
            self._watch(param)
            twin = self._twin(param)
            if twin is None:
                raise ValueError(
                    f"{self._op}: with offload= parameters must fill their memory, got strides "
                    f"{param.stride()} for shape {tuple(param.shape)} of {self._names[param]}"
                )
            with self._lock:
                if not twin.has_gradient_in(grad.dtype):
                    twin.fetch_gradient(grad)
            self._active[param] = twin
        self._check_overlaps()

        self._wait_for_gradients(check=False)
        adopted = []
        for (param, grad), same in zip(found, self._unchanged(found), strict=True):
            twin = self._active[param]
            same_grad, same_param = same
            with self._lock:
                if not same_grad:
                    twin.fetch_gradient(grad)
                if not same_param:
                    twin.fetch_parameter(param)
                    adopted.append(twin)
        self._wait_for_gradients(check=True)
        for twin in adopted:
            self._wait_for_parameter(twin)
        self._skipped = {}
        for param in self._active:
            skip = scaling.of(param, HOST).skip
            self._skipped[param] = skip is not None and bool(skip)
        self._steps += 1

    def steps(self, param: Tensor) -> bool:
        """Whether this step of a parameter is made on the host."""
        return param in self._active

    @outside_modes
    def home(
        self, param: Tensor, grad: Tensor, state: State
    ) -> tuple[Tensor, Tensor, torch.device]:
        """What the step is made with: parameter, gradient and where; the states are moved there."""
        twin = self._active.get(param)
        if twin is None:
            self._here.add(param)
            self._twins.pop(param, None)
            device = device_of(param)
            if id(param) not in TABLES:
                _place(state, device)
            return param, grad, device
        self._here.discard(param)
        _place(state, HOST)
        assert twin.grad is not None
        return twin.param, twin.grad, HOST

    def run(self, step: Callable[[Params], None], params: Params) -> None:
        """Make the step of some parameters after the other, and send each as soon as it is made.

        One that is there twice is sent twice. What is sent first may be a mixture, which nobody
        looks at and the second overwrites.
        """
        for batch in self._batches(params):
            try:
                step(batch)
            except BaseException:
                for _, param in batch:  # as it is on the device
                    self._twins.pop(param, None)
                raise
            for param in {param: None for _, param in batch}:
                twin = self._active.get(param)
                if twin is not None and not self._skipped[param]:
                    twin.send_parameter(param)

    def end(self) -> None:
        """After the step, or what was made of it: what comes now sees the parameters."""
        active, self._active = self._active, {}
        for twin in active.values():
            if twin.delivery is not None:
                twin.link.hold(twin.delivery)
        self._look_at_deliveries(wait=False)

    def reset(self) -> None:
        """States were loaded: begin anew, with the parameters as they are."""
        with self._lock:
            self._twins.clear()

    # ---- gradients ----

    @outside_modes
    def _gradient_is_ready(self, param: Tensor) -> None:
        grad = param.grad
        if grad is None or grad.layout != torch.strided or param in self._here:
            return
        with torch.no_grad():
            twin = self._twin(param)
            if twin is not None:
                with self._lock:
                    twin.fetch_gradient(grad)

    def _dense_gradients(self, optimizer: RowOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is None or grad.layout != torch.strided or param.numel() == 0:
                    continue
                state = optimizer.state.get(param, {})
                if _row_queue.waiting(param) is None and not any(n in state for n in ROW_COUNTERS):
                    yield param, grad

    def _twin(self, param: Tensor) -> Twin | None:
        """That of a parameter, None: it is not in one piece of memory."""
        with self._lock:
            twin = self._twins.get(param)
            if twin is not None and twin.fits(param):
                return twin
            if not is_dense(param):
                return None
            link = self._links.get(param.device)
            if link is None:
                config = self.config
                how = LinkOptions(config.verify, config.chunk_bytes, config.lane)
                link = self._links[param.device] = Link(param.device, how)
            twin = self._twins[param] = Twin(self._names[param], param, link)
            return twin

    def _unchanged(self, found: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[bool, bool]]:
        """Whether each gradient, and each parameter, is what the host has of it."""
        sums: dict[torch.device, list[Tensor]] = {}
        for param, grad in found:
            twin = self._active[param]
            there = sums.setdefault(param.device, [])
            there.append(twin.sums_of_gradient(grad))
            if twin.known is not None:
                there.append(twin.sums_of_parameter(param))
        read = {
            device: iter(torch.cat(there).cpu().split([len(t) for t in there]))
            for device, there in sums.items()
        }  # waits once for each device
        for param, _ in found:
            twin = self._active[param]
            assert twin.gradient is not None
            now = read[param.device]
            same_grad = torch.equal(next(now), twin.gradient.sent)
            same_param = twin.known is not None and torch.equal(next(now), twin.known.sent)
            yield same_grad, same_param

    def _wait_for_gradients(self, *, check: bool) -> None:
        for twin in self._active.values():
            transfer, twin.gradient = twin.gradient, None  # sent again if this raises
            assert transfer is not None
            twin.link.arrived(transfer)
            if check:
                self._check(twin, transfer, "to host", "gradient")
            twin.gradient = transfer

    def _wait_for_parameter(self, twin: Twin) -> None:
        transfer, twin.known = twin.known, None
        assert transfer is not None
        twin.link.arrived(transfer)
        self._check(twin, transfer, "to host", "parameter")
        twin.known = transfer

    # ---- parameters ----

    def _batches(self, params: Params) -> Iterator[Params]:
        """At least a chunk of bytes at a time: each costs some calls."""
        batch: list[tuple[int, Tensor]] = []
        size = 0
        for position, param in params:
            batch.append((position, param))
            size += param.numel() * param.element_size()
            if size >= self.config.chunk_bytes:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _look_at_deliveries(self, *, wait: bool) -> None:
        """Raise where a parameter is not what was sent; without ``wait``, where that is known."""
        for twin in list(self._twins.values()):
            transfer = twin.delivery
            if transfer is None or not (wait or transfer.done()):
                continue
            # What raises here stays, and will again: the parameter is not that of its step.
            twin.link.delivered(transfer)
            self._check(twin, transfer, "to device", "parameter")
            twin.delivery = None

    def _check(self, twin: Twin, transfer: Transfer, direction: Direction, what: str) -> None:
        damaged = transfer.damaged()
        if damaged:
            size = self.config.chunk_bytes
            raise IntegrityError(
                twin.name,
                damaged,
                self._steps + (direction == "to host"),  # for the step to come
                direction,
                f"chunks (of {size} bytes) of the {what} are not what was sent",
            )

    def _check_overlaps(self) -> None:
        """Of two parameters in the same memory each would undo the step of the other."""
        addresses = [param.data_ptr() for param in self._active]
        if addresses == self._addresses:
            return
        end, before = 0, ""
        for param in sorted(self._active, key=lambda param: param.data_ptr()):
            if param.data_ptr() < end:
                raise ValueError(
                    f"{self._op}: with offload= parameters must not share memory, got "
                    f"{before} and {self._names[param]}"
                )
            end = param.data_ptr() + param.numel() * param.element_size()
            before = self._names[param]
        self._addresses = addresses


def _remove(hooks: dict[Tensor, RemovableHandle]) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()


def _place(state: State, device: torch.device) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device != device:
            state[name] = value.to(device)
