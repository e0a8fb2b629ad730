"""SGD with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fastemb._inference import lasting
from fastemb.optim._base import RowCall, RowOptimizer, Update
from fastemb.optim._dense import DenseUpdate, run_fused, scalar_for
from fastemb.optim._options import Options, float_or_tensor, floats
from fastemb.optim._scaling import Scaling
from fastemb.optim._states import ParamsT, State

if TYPE_CHECKING:
    from fastemb.offload._dense import HostStates

__all__ = ["SGD"]


class SGD(RowOptimizer):
    r"""`torch.optim.SGD` for dense and row-sparse gradients, in low precision, fused.

    With momentum :math:`\mu`, dampening :math:`\tau`, and the first step's :math:`b = g`:

    .. math::
        b \leftarrow \mu b + (1 - \tau) g \qquad
        p \leftarrow p - \mathrm{lr} \cdot (g + \mu b \text{ with nesterov, else } b)

    Dense float32 and float64 parameters are updated by torch's own kernels, bit for bit as
    ``torch.optim.SGD(fused=True)`` does. A sparse gradient updates the rows it has; the momentum of
    the others rests, in a dense buffer, where torch's is sparse and grows with every row it meets.

    Args:
        params: parameters (or pairs of name and parameter), or groups of them as dicts. Dense
            tensors of float16, bfloat16, float32 or float64; complex ones as in `Adam`.
        lr: learning rate, a number or a tensor of one element.
        momentum: factor of the last update.
        dampening: how much of a gradient does not reach the momentum.
        weight_decay: factor of the L2 penalty.
        nesterov: Nesterov momentum; needs a momentum, which a schedule may take to 0 and back, and
            no dampening.
        maximize: go up instead of down.
        foreach: see `Adam`.
        differentiable: see `Adam`.
        fused: see `Adam`.
        decay: what ``weight_decay`` means for a sparse gradient. ``"touched"``: its rows decay,
            the others do not. ``"all"``: the gradient is made dense, and the step is that of a
            dense one.
        master: see `Adam`.
        rounding: see `Adam`.
        seed: see `Adam`.
        offload: see `Adam`.

    Raises:
        ValueError: an option outside the values above; a parameter or gradient of another kind.
        TypeError: an option that is not a number where one is expected.

    State of a parameter: with momentum ``momentum_buffer``; ``step`` where the first one is
    another than the later ones, and for sparse gradients and low precision; there, ``master``. A
    momentum that is switched on later begins with a first step, and ``step`` with it.
    """

    _fused_operator = "_fused_sgd_"
    _takes_complex = True
    _moment_names = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        decay: str = "touched",
        master: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        offload: str | HostStates | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
            "decay": decay,
            "master": master,
            "rounding": rounding,
            "seed": seed,
        }
        super().__init__(params, defaults, offload)

    def _check_options(self, options: Options) -> None:
        super()._check_options(options)
        self._require_number(options, "momentum")
        self._require_number(options, "weight_decay")
        self._require_number(options, "dampening", float("-inf"))
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise self._error(
                "nesterov=True needs momentum > 0 and dampening 0",
                {name: options[name] for name in ("momentum", "dampening")},
            )

    def _check_group(self, group: Options) -> None:
        # A schedule may pass through a momentum of 0, whose step is the same with nesterov.
        super()._check_group({**group, "nesterov": group["nesterov"] and group["momentum"] != 0})

    def _moments(self, group: Options) -> dict[str, float]:
        # -0.0 + g is g for every g, also for -0.0: the first step needs no case of its own
        # unless there is dampening.
        return {"momentum_buffer": -0.0} if group["momentum"] != 0 else {}

    def _steps_of(self, state: State) -> float:
        # torch keeps no count; with a buffer of its making the first step is over.
        return float("momentum_buffer" in state)

    def _add_step(self, param: Tensor, group: Options, state: State) -> None:
        """Have ``step`` be 0 exactly before the step that makes the buffer."""
        super()._add_step(param, group, state)
        if group["momentum"] != 0 and "momentum_buffer" not in state:
            with lasting():
                state["step"] = torch.zeros_like(state["step"])  # of steps without momentum

    def _prepare_dense(self, param: Tensor, group: Options, state: State) -> None:
        if group["momentum"] != 0 and group["dampening"] != 0:
            self._add_step(param, group, state)
        self._add_moments(param, group, state)

    def _row_step(self, group: Options, call: RowCall) -> None:
        torch.ops.fastemb.row_sgd_(
            call.param,
            call.master,
            call.moments.get("momentum_buffer"),
            *call.common,
            float(group["momentum"]),
            float(group["dampening"]),
            bool(group["nesterov"]),
        )

    def _fused_step(self, group: Options, updates: Sequence[DenseUpdate], scaling: Scaling) -> None:
        if group["momentum"] == 0 or group["dampening"] == 0:
            self._fused_call(group, updates, scaling, scaling.skip, first=False)
            return
        # Which step it is, is known on the device only, where an earlier one may have been
        # skipped: both kinds are launched, and one of them does nothing.
        for update in updates:
            assert update.step is not None
            for first in (True, False):
                other = (update.step != 1) if first else (update.step == 1)
                skip = other if scaling.skip is None else other | (scaling.skip != 0)
                self._fused_call(group, [update], scaling, skip.float(), first=first)

    def _fused_call(
        self,
        group: Options,
        updates: Sequence[DenseUpdate],
        scaling: Scaling,
        skip: Tensor | None,
        *,
        first: bool,
    ) -> None:
        lr = scalar_for(group["lr"], updates[0].param)

        def kernel(
            params: list[Tensor],
            grads: list[Tensor],
            buffers: list[list[Tensor]],
            steps: list[Tensor],
        ) -> None:
            torch._fused_sgd_(
                params,
                grads,
                buffers[0] if buffers else [],
                weight_decay=float(group["weight_decay"]),
                momentum=float(group["momentum"]),
                lr=lr,
                dampening=float(group["dampening"]),
                nesterov=bool(group["nesterov"]),
                maximize=bool(group["maximize"]),
                is_first_step=first,
                found_inf=skip,
            )

        run_fused(kernel, updates, scaling)

    def _functional_step(self, group: Options, updates: Sequence[Update]) -> None:
        buffers = [u.state.get("momentum_buffer") for u in updates]
        for index, update in enumerate(updates):
            step = update.state.get("step")
            if step is not None:
                step += 1
                if bool(step == 1):
                    buffers[index] = None  # torch makes it of the gradient
        grads = [u.grad for u in updates]
        if group["nesterov"] and group["foreach"] is not False:
            grads = [grad.clone() for grad in grads]  # torch's foreach adds the momentum to them
        sgd(
            [u.param for u in updates],
            grads,
            buffers,
            foreach=group["foreach"],
            fused=False,
            lr=float_or_tensor(group["lr"]),
            **floats(group, "weight_decay", "momentum", "dampening"),
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"] != 0:
            for update, buffer in zip(updates, buffers, strict=True):
                update.state["momentum_buffer"] = buffer
