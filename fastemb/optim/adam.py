"""Adam, AdamW and SparseAdam."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.adam import adam

from fastemb.optim._base import Update
from fastemb.optim._dense import DenseUpdate, run_fused, scalar_for
from fastemb.optim._dense_adam import adam_in_one_pass, agrees
from fastemb.optim._lazy_adam import AdamRows, LazyAdam, default_decay
from fastemb.optim._options import Options, float_or_tensor, floats
from fastemb.optim._scaling import Scaling
from fastemb.optim._states import ParamsT, State

if TYPE_CHECKING:
    from fastemb.offload._dense import HostStates

__all__ = ["Adam", "AdamW", "SparseAdam"]


class Adam(LazyAdam):
    r"""`torch.optim.Adam` for dense and row-sparse gradients, in low precision, fused.

    Dense float32 and float64 parameters are updated bit for bit as by
    ``torch.optim.Adam(fused=True)``: by torch's own kernels, or, where there is a scale to divide
    by on the CPU, by one that does not write the gradient. Parameters in float16 and bfloat16 have
    FP32 moments and a FP32 master copy. Sparse (COO) gradients update the rows they have, by the
    formula of `torch.optim.SparseAdam`:

    .. math::
        m \leftarrow \beta_1 m + (1 - \beta_1) g \qquad
        v \leftarrow \beta_2 v + (1 - \beta_2) g^2 \qquad
        p \leftarrow p - \mathrm{lr} \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
        \frac{m}{\sqrt{v} + \epsilon}

    with :math:`t` the number of steps of the parameter (Kingma and Ba, *Adam: A Method for
    Stochastic Optimization*, 2015, end of section 2). Moments of the other rows do not decay.
    Repeated rows are summed in FP32 first. Gradients are never written.

    Args:
        params: parameters (or pairs of name and parameter), or groups of them as dicts. Dense
            tensors of float16, bfloat16, float32 or float64; complex ones with dense gradients,
            as pairs of real numbers and not ``fused``.
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the first and the second moment, in [0, 1).
        eps: added to the denominator.
        weight_decay: factor of the L2 penalty, or of the decoupled decay.
        amsgrad: divide by the largest second moment so far (Reddi, Kale and Kumar, 2018).
        foreach: True: torch's multi-tensor implementation for dense parameters, False: its loop.
            Only for float32 and float64. Under a gradient scaler both wait for the device.
        maximize: go up instead of down.
        capturable: as in torch; the fused and the row kernels always can be captured.
        differentiable: let autograd see the step. Dense gradients of float32 and float64 only.
        fused: torch's fused kernels for dense parameters; by default where torch has them.
        decoupled_weight_decay: decay the parameter, not the gradient: `AdamW`.
        lazy: what happens to the rows that a sparse gradient does not have. ``"rows"``: nothing, as
            with `torch.optim.SparseAdam`. ``"exact"``: what dense Adam does with a gradient of
            zero, at the cost of the rows that are used. Default: ``"rows"``, and a warning, once,
            when the first sparse gradient comes.
        decay: what ``weight_decay`` means for a sparse gradient under ``lazy="rows"``.
            ``"touched"``: its rows decay, the others do not. ``"all"``: the gradient is made dense,
            and the step is that of a dense one. ``"catch_up"``, decoupled decay only: a row decays
            for all the steps that have passed since its last update,
            :math:`(1 - \mathrm{lr} \cdot \mathrm{wd})^k`, with the learning rate of now.
            Default: ``"touched"``, decoupled ``"catch_up"``.
        row_bias_correction: :math:`t` is the number of updates of the row, not the step.
        master: ``"fp32"``: float16 and bfloat16 parameters have a FP32 copy in the state, and are
            its rounding; the default unless ``rounding="stochastic"``. Where somebody else has
            written the parameter, it wins over the copy.
        rounding: ``"stochastic"``: float16 and bfloat16 parameters are rounded to one of two
            neighbours at random, such that the expectation is exact, and have no copy.
        seed: of stochastic rounding, whose bits depend on it, the position of the parameter in the
            optimizer, the step, the row and the column, and on nothing else; those of moments on
            the value and not on the row. A parameter that has only seen dense gradients is one
            long row, in the order of its memory.
        state_dtype: of the moments; ``torch.bfloat16`` halves their memory. They are then rounded
            stochastically, whatever ``rounding`` is: to nearest, they would not follow small
            changes. Default: float32 (float64 for float64 parameters).
        offload: ``"cpu"``: the states and masters of parameters with dense gradients are in host
            memory, and so is their step; or `fastemb.offload.HostStates`, which says how. The
            result is that of a step on the CPU, bit for bit. Not with ``capturable`` and
            ``differentiable``.

    **lazy="exact".** The result is that of dense Adam or AdamW, to the last digits: momentum goes
    on moving a row whose gradient is zero, its moments fade, and weight decay shrinks it. Such rows
    sleep; before one is read by `fastemb.nn` or `fastemb.functional`, in training or not, or
    updated, all steps that it has slept are made up for, with the learning rates of those steps. A
    table is caught up whole once in some 1,000 steps, when betas, eps, an L2 penalty or amsgrad
    change, and by lookups in a view of a part of it or under `torch.func`. Others that read or
    write such a table have to call `flush` first. A graph of others that has saved the table for
    its backward is refused by autograd when a later lookup wakes rows. Not within CUDA graphs;
    `torch.compile` looks up such a table outside its graph. With an eps of 0 rows that never had a
    gradient keep their values, which dense Adam makes 0 / 0.

    Raises:
        ValueError: an option outside the values above; a parameter or gradient of another kind.
        TypeError: an option that is not a number where one is expected.

    State of a parameter: ``step``, ``exp_avg``, ``exp_avg_sq``, with ``amsgrad``
    ``max_exp_avg_sq``, and where needed ``master`` (float32) and, int32 of one number per row,
    ``row_step`` and ``row_count``. `state_dict` goes to and comes from the torch optimizer. Under
    ``lazy="exact"`` ``row_step`` is the step up to which a row is current, and is not saved:
    `state_dict` catches up all rows.
    """

    _fused_operator = "_fused_adam_"
    _takes_complex = True
    _decays = ("touched", "catch_up", "all")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        lazy: str | None = None,
        decay: str | None = None,
        row_bias_correction: bool = False,
        master: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        state_dtype: torch.dtype | None = None,
        offload: str | HostStates | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "foreach": foreach,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "lazy": lazy,
            "decay": decay or default_decay(decoupled_weight_decay),
            "row_bias_correction": row_bias_correction,
            "master": master,
            "rounding": rounding,
            "seed": seed,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults, offload)

    def _check_options(self, options: Options) -> None:
        super()._check_options(options)
        self._require_number(options, "weight_decay")
        if options["decay"] == "catch_up" and not options["decoupled_weight_decay"]:
            raise self._error(
                "decay must be 'touched' or 'all' where weight_decay is an L2 penalty "
                "(decoupled_weight_decay=False)",
                options["decay"],
            )

    def _fused_step(self, group: Options, updates: Sequence[DenseUpdate], scaling: Scaling) -> None:
        decoupled = group["decoupled_weight_decay"]
        operator = torch._fused_adamw_ if decoupled else torch._fused_adam_
        lr = scalar_for(group["lr"], updates[0].param)
        beta1, beta2 = map(float, group["betas"])

        def kernel(
            params: list[Tensor],
            grads: list[Tensor],
            moments: list[list[Tensor]],
            steps: list[Tensor],
        ) -> None:
            exp_avgs, exp_avg_sqs, *largest = moments
            operator(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                largest[0] if largest else [],
                steps,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=float(group["weight_decay"]),
                eps=float(group["eps"]),
                amsgrad=bool(group["amsgrad"]),
                maximize=bool(group["maximize"]),
                found_inf=scaling.skip,
            )

        one_pass = None
        if scaling.multiplier is not None and updates[0].param.device.type == "cpu" and agrees():
            one_pass = partial(adam_in_one_pass, group=group, scaling=scaling)
        run_fused(kernel, updates, scaling, one_pass)

    def _functional_step(self, group: Options, updates: Sequence[Update]) -> None:
        beta1, beta2 = group["betas"]
        if not (group["capturable"] or group["differentiable"]):
            beta1, beta2 = float(beta1), float(beta2)  # torch's foreach takes no tensors here
        states = [u.state for u in updates]
        adam(
            [u.param for u in updates],
            [u.grad for u in updates],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else [],
            [s["step"] for s in states],
            foreach=group["foreach"],
            fused=False,
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            has_complex=any(u.param.is_complex() for u in updates),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=float_or_tensor(group["lr"]),
            **floats(group, "weight_decay", "eps"),
            maximize=group["maximize"],
        )


class AdamW(Adam):
    r"""`torch.optim.AdamW` for dense and row-sparse gradients, in low precision, fused.

    `Adam` with decoupled weight decay (Loshchilov and Hutter, *Decoupled Weight Decay
    Regularization*, 2019) of 1e-2 by default: a parameter is multiplied by
    :math:`1 - \mathrm{lr} \cdot \mathrm{wd}` in each step. With the default ``decay="catch_up"`` a
    row of a sparse gradient makes up for the steps that it slept. See `Adam` for the arguments.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        lazy: str | None = None,
        decay: str = "catch_up",
        row_bias_correction: bool = False,
        master: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        state_dtype: torch.dtype | None = None,
        offload: str | HostStates | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            lazy=lazy,
            decay=decay,
            row_bias_correction=row_bias_correction,
            master=master,
            rounding=rounding,
            seed=seed,
            state_dtype=state_dtype,
            offload=offload,
        )

    def _loaded_group(self, own: Options, saved: Options) -> Options:
        # torch's AdamW of before 2.7 does not say so.
        return super()._loaded_group(own, {**saved, "decoupled_weight_decay": True})


class SparseAdam(AdamRows):
    """`torch.optim.SparseAdam`, which also takes dense gradients, and low precision.

    The formula is that of `Adam` for sparse gradients, and for a dense one the same with all rows.
    As torch's, it has an int ``step`` in `state_dict`, which so waits for the device.

    Args:
        params: parameters (or pairs of name and parameter), or groups of them as dicts. Dense
            tensors of float16, bfloat16, float32 or float64.
        lr: learning rate > 0, a number or a tensor of one element.
        betas: decay of the first and the second moment, in [0, 1).
        eps: added to the denominator, > 0.
        maximize: go up instead of down.
        row_bias_correction: see `Adam`, as for the other arguments.
        master: see `Adam`.
        rounding: see `Adam`.
        seed: see `Adam`.
        state_dtype: see `Adam`.
        offload: see `Adam`.

    Raises:
        ValueError: an option outside the values above; a parameter or gradient of another kind.
        TypeError: an option that is not a number where one is expected.
    """

    _positive_lr = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        maximize: bool = False,
        *,
        row_bias_correction: bool = False,
        master: str | None = None,
        rounding: str = "nearest",
        seed: int = 0,
        state_dtype: torch.dtype | None = None,
        offload: str | HostStates | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "maximize": maximize,
            "row_bias_correction": row_bias_correction,
            "master": master,
            "rounding": rounding,
            "seed": seed,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults, offload)

    def _check_options(self, options: Options) -> None:
        super()._check_options(options)
        self._require_number(options, "eps", open_low=True)

    def _corrects_denominator(self, group: Options, sparse: bool) -> bool:
        return False

    def _saved(self, state: State) -> State:
        # As torch's: an int, which waits for the device.
        return {**state, "step": int(state["step"])} if "step" in state else state
