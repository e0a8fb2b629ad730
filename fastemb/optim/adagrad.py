"""Adagrad, and Adagrad with one accumulator per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from fastemb import _offloaded
from fastemb.optim._base import RowCall, RowOptimizer, Update
from fastemb.optim._dense import DenseUpdate, run_fused, scalar_for
from fastemb.optim._options import Options, float_or_tensor, floats
from fastemb.optim._scaling import Scaling
from fastemb.optim._states import ParamsT, State, is_trainable

if TYPE_CHECKING:
    from fastemb.offload._dense import HostStates

__all__ = ["Adagrad", "RowWiseAdagrad"]


class _AdagradBase(RowOptimizer):
    """The state of Adagrad, which is there from the beginning, as torch's is."""

    _moment_names = ("sum",)
    _whole_state = ("step", "sum")

    def __init__(
        self, params: ParamsT, defaults: Options, offload: str | HostStates | None
    ) -> None:
        super().__init__(params, defaults, offload)
        for group in self.param_groups:
            for param in group["params"]:
                if id(param) in _offloaded.TABLES:
                    self.state[param] = {}  # the records may be another's until the first step
                elif is_trainable(param) or param.is_complex():
                    self.state[param] = self._first_state(param, group)

    def _first_state(self, param: Tensor, group: Options) -> State:
        state: State = {}
        self._prepare(param, group, state, sparse=False)
        return state

    def share_memory(self) -> None:
        """Move the accumulators to shared memory, for training in several processes."""
        for state in self.state.values():
            if "sum" in state:
                state["sum"].share_memory_()

    def _check_options(self, options: Options) -> None:
        super()._check_options(options)
        for name in ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"):
            self._require_number(options, name)

    def _moments(self, group: Options) -> dict[str, float]:
        return {"sum": group["initial_accumulator_value"]}


class Adagrad(_AdagradBase):
    r"""`torch.optim.Adagrad` for dense and row-sparse gradients, in low precision, fused.

    .. math::
        s \leftarrow s + g^2 \qquad
        p \leftarrow p - \frac{\mathrm{lr}}{1 + (t - 1) \cdot \mathrm{lr\_decay}}
        \frac{g}{\sqrt{s} + \epsilon}

    (Duchi, Hazan and Singer, *Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization*, 2011.) Dense float32 and float64 parameters are updated by torch's own kernels,
    bit for bit as ``torch.optim.Adagrad(fused=True)`` does; a sparse gradient updates its rows.

    Args:
        params: parameters (or pairs of name and parameter), or groups of them as dicts. Dense
            tensors of float16, bfloat16, float32 or float64; complex ones as in `Adam`.
        lr: learning rate, a number or a tensor of one element.
        lr_decay: how fast the learning rate falls with the steps.
        weight_decay: factor of the L2 penalty.
        initial_accumulator_value: what :math:`s` begins with.
        eps: added to the denominator.
        foreach: see `Adam`.
        maximize: go up instead of down.
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

    State of a parameter: ``step`` and ``sum``; for low precision ``master``.
    """

    _fused_operator = "_fused_adagrad_"
    _takes_complex = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
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
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "foreach": foreach,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
            "decay": decay,
            "master": master,
            "rounding": rounding,
            "seed": seed,
        }
        super().__init__(params, defaults, offload)

    def _row_step(self, group: Options, call: RowCall) -> None:
        torch.ops.fastemb.row_adagrad_(
            call.param,
            call.master,
            call.moments["sum"],
            *call.common,
            float(group["lr_decay"]),
            float(group["eps"]),
        )

    def _fused_step(self, group: Options, updates: Sequence[DenseUpdate], scaling: Scaling) -> None:
        lr = scalar_for(group["lr"], updates[0].param)

        def kernel(
            params: list[Tensor],
            grads: list[Tensor],
            sums: list[list[Tensor]],
            steps: list[Tensor],
        ) -> None:
            torch._fused_adagrad_(
                params,
                grads,
                sums[0],
                steps,
                lr=lr,
                lr_decay=float(group["lr_decay"]),
                weight_decay=float(group["weight_decay"]),
                eps=float(group["eps"]),
                maximize=bool(group["maximize"]),
                found_inf=scaling.skip,
            )

        run_fused(kernel, updates, scaling)

    def _functional_step(self, group: Options, updates: Sequence[Update]) -> None:
        adagrad(
            [u.param for u in updates],
            [u.grad for u in updates],
            [u.state["sum"] for u in updates],
            [u.state["step"] for u in updates],
            foreach=group["foreach"],
            fused=False,
            differentiable=group["differentiable"],
            has_complex=any(u.param.is_complex() for u in updates),
            lr=float_or_tensor(group["lr"]),
            **floats(group, "lr_decay", "weight_decay", "eps"),
            maximize=group["maximize"],
        )


class RowWiseAdagrad(_AdagradBase):
    r"""Adagrad with one accumulator per row, as TorchRec's ``RowWiseAdagrad``.

    .. math::
        s_r \leftarrow s_r + \frac{1}{\dim} \sum_d g_{rd}^2 \qquad
        p_{rd} \leftarrow p_{rd} - \frac{\mathrm{lr}}{1 + (t - 1) \cdot \mathrm{lr\_decay}}
        \frac{g_{rd}}{\sqrt{s_r} + \epsilon}

    A parameter of another shape than (rows, dim) is taken as (shape[0], the rest).

    Args:
        params: parameters (or pairs of name and parameter), or groups of them as dicts. Dense
            tensors of float16, bfloat16, float32 or float64.
        lr: learning rate, a number or a tensor of one element.
        lr_decay: how fast the learning rate falls with the steps.
        weight_decay: factor of the L2 penalty.
        initial_accumulator_value: what :math:`s` begins with.
        eps: added to the denominator.
        maximize: go up instead of down.
        decay: see `Adagrad`, as for the other arguments.
        master: see `Adam`.
        rounding: see `Adam`.
        seed: see `Adam`.
        offload: see `Adam`.

    Raises:
        ValueError: an option outside the values above; a parameter or gradient of another kind.
        TypeError: an option that is not a number where one is expected.

    State of a parameter: ``step``, ``sum`` of shape (rows, 1), and for low precision ``master``.
    """

    _row_wise = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        decay: str = "touched",
        master: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        offload: str | HostStates | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "maximize": maximize,
            "decay": decay,
            "master": master,
            "rounding": rounding,
            "seed": seed,
        }
        super().__init__(params, defaults, offload)

    def _state_shape(self, param: Tensor, name: str) -> torch.Size | None:
        if name == "sum":
            return torch.Size((param.shape[0] if param.dim() else 1, 1))
        return super()._state_shape(param, name)

    def _row_step(self, group: Options, call: RowCall) -> None:
        torch.ops.fastemb.row_rowwise_adagrad_(
            call.param,
            call.master,
            call.moments["sum"],
            *call.common,
            float(group["lr_decay"]),
            float(group["eps"]),
        )
