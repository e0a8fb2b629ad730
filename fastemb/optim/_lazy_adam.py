"""The states of Adam and its row step, and ``lazy="exact"`` on top of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from fastemb._reference import accumulation_dtype
from fastemb._sleeping import wake_all
from fastemb.optim._base import Offloaded, RowCall, RowOptimizer, Update, seed_of
from fastemb.optim._exact import Rule, all_sleepers_of, link, refuse_capture, sleepers_of
from fastemb.optim._options import Options, float_or_tensor, require_number
from fastemb.optim._states import ROW_COUNTERS, State

_STATE_DTYPES = (None, torch.float32, torch.bfloat16)


class AdamRows(RowOptimizer):
    """The states of Adam, and its row step."""

    _moment_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    _whole_state = ("step", "exp_avg", "exp_avg_sq")

    def _check_options(self, options: Options) -> None:
        super()._check_options(options)
        self._require_number(options, "eps")
        try:  # whatever has an order; configurations as of OmegaConf have sequences of their own
            betas = tuple(options["betas"][:])
        except (TypeError, LookupError):
            betas = ()
        if len(betas) != 2:
            raise self._error("betas must be 2 numbers", options["betas"])
        for index, beta in enumerate(betas):
            require_number(type(self).__name__, f"betas[{index}]", beta)
            if not beta < 1.0:
                raise self._error(f"betas[{index}] must be < 1", beta)
        if options["state_dtype"] not in _STATE_DTYPES:
            raise self._error(
                "state_dtype must be torch.float32, torch.bfloat16 or None, the default",
                options["state_dtype"],
            )

    def _moments(self, group: Options) -> dict[str, float]:
        moments = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
        if group.get("amsgrad"):
            moments["max_exp_avg_sq"] = 0.0
        return moments

    def _moment_dtype(self, param: Tensor, group: Options) -> torch.dtype:
        if group["state_dtype"] == torch.bfloat16:
            return torch.bfloat16
        return super()._moment_dtype(param, group)

    def _prepare(self, param: Tensor, group: Options, state: State, *, sparse: bool) -> None:
        super()._prepare(param, group, state, sparse=sparse)
        wanted = self._counters(param, group)
        for name in ROW_COUNTERS:
            if name not in wanted:
                state.pop(name, None)  # not kept up from here on
            elif sparse or name in state:
                self._add_counter(param, state, name)

    def _counters(self, param: Tensor, group: Options) -> tuple[str, ...]:
        wanted = {
            "row_step": self._keeps_row_step(param, group),
            "row_count": group["row_bias_correction"],
        }
        return tuple(name for name in ROW_COUNTERS if wanted[name])

    def _keeps_row_step(self, param: Tensor, group: Options) -> bool:
        return False

    def _corrects_denominator(self, group: Options, sparse: bool) -> bool:
        raise NotImplementedError

    def _row_step(self, group: Options, call: RowCall) -> None:
        beta1, beta2 = group["betas"]
        torch.ops.fastemb.row_adam_(
            call.param,
            call.master,
            call.moments["exp_avg"],
            call.moments["exp_avg_sq"],
            call.moments.get("max_exp_avg_sq"),
            call.counters.get("row_step"),
            call.counters.get("row_count"),
            *call.common,
            float(beta1),
            float(beta2),
            float(group["eps"]),
            bool(group.get("decoupled_weight_decay")),
            self._corrects_denominator(group, call.sparse),
        )


class LazyAdam(AdamRows):
    """Adam whose rows without a gradient stand still or sleep: option ``lazy``."""

    def _check_options(self, options: Options) -> None:
        super()._check_options(options)
        if options.get("lazy") not in (None, "rows", "exact"):
            raise self._error("lazy must be 'rows' or 'exact'", options["lazy"])
        if _is_exact(options):
            if options["decay"] != default_decay(options["decoupled_weight_decay"]):
                raise self._error(
                    "decay must be left at its default with lazy='exact', where every row decays "
                    "in every step",
                    options["decay"],
                )
            if options["row_bias_correction"]:
                raise self._error(
                    "row_bias_correction must be False with lazy='exact', which corrects as dense "
                    "Adam does",
                    True,
                )

    def _loaded_group(self, own: Options, saved: Options) -> Options:
        group = super()._loaded_group(own, saved)
        if "decay" not in saved and own["decay"] == default_decay(own["decoupled_weight_decay"]):
            group["decay"] = default_decay(group["decoupled_weight_decay"])
        return group

    def flush(self) -> None:
        """Catch up all rows that sleep under ``lazy="exact"``; without any this does nothing.

        Also rows that sleep for an earlier optimizer of the same parameters, which may be gone.
        Afterwards every weight and every state is what dense Adam would have, up to rounding. Call
        it before anything but `fastemb.nn` and `fastemb.functional` reads or writes such a table:
        a lookup by torch, an average or a norm of the weights, an export, or assigning weights.
        What has to read the table whole does so by itself:
        `state_dict` and pickle of the optimizer, and of modules of `fastemb.nn` also loading,
        ``to()`` and deepcopy, `fastemb.convert` and `fastemb.revert`.

        It costs a pass over each table and its moments where steps were made since the last time.
        """
        for sleepers in all_sleepers_of(self):
            sleepers.wake_all()
        # Rows may still sleep for an optimizer that had the parameters before this one.
        wake_all(*chain.from_iterable(group["params"] for group in self.param_groups))

    def _retire_sleepers(self) -> None:
        """Make all states those of dense Adam, without ``row_step``; the next step begins anew."""
        for sleepers in all_sleepers_of(self):
            sleepers.retire()

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`, after `flush`: it fits torch's Adam."""
        self._retire_sleepers()
        return super().state_dict()

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # What the moments from before still owe the weights.
        self._retire_sleepers()
        super().load_state_dict(state_dict)

    load_state_dict.__doc__ = RowOptimizer.load_state_dict.__doc__

    def __getstate__(self) -> dict[str, Any]:
        self._retire_sleepers()  # deepcopy and pickle
        return super().__getstate__()

    def _keeps_row_step(self, param: Tensor, group: Options) -> bool:
        if _is_exact(group):
            return sleepers_of(self, param) is not None
        return bool(group["decay"] == "catch_up" and group["weight_decay"] != 0)

    def _prepare(self, param: Tensor, group: Options, state: State, *, sparse: bool) -> None:
        if sparse and group.get("lazy") is None:
            _warn_of_rows(type(self).__name__)
        if not _is_exact(group):
            self._end_sleep(param)
        super()._prepare(param, group, state, sparse=sparse)
        if sparse and _is_exact(group) and sleepers_of(self, param) is None:
            self._add_counter(param, state, "row_step")
            link(self, param, state, _rule(group, param))

    def _bind_offloaded(self, tables: Sequence[Offloaded]) -> None:
        for _, param, _ in tables:
            self._end_sleep(param)  # as `fastemb.convert` has woken all rows
        super()._bind_offloaded(tables)

    def _end_sleep(self, param: Tensor) -> None:
        """Where ``lazy`` was "exact" until now."""
        sleepers = sleepers_of(self, param)
        if sleepers is not None:
            sleepers.retire()

    def _step_rows(self, group: Options, update: Update) -> None:
        sleepers = sleepers_of(self, update.param)
        if sleepers is None:
            super()._step_rows(group, update)
            return
        refuse_capture(update.param, "a step of")
        skip = update.scaling.skip
        decay = float(group["weight_decay"]) if group["decoupled_weight_decay"] else 0.0
        with sleepers.lock:
            seed = seed_of(group, update.param, update.position)
            if sleepers.begin_step(_rule(group, update.param), seed, skip):
                super()._step_rows(group, update)
                sleepers.end_step(float_or_tensor(group["lr"]), decay, skip)

    def _row_step(self, group: Options, call: RowCall) -> None:
        sleepers = sleepers_of(self, call.parameter)
        if sleepers is not None:
            rows, used_rows = call.common[:2]
            sleepers.catch_up(call.param, rows, used_rows, call.skip)
        super()._row_step(group, call)

    def _corrects_denominator(self, group: Options, sparse: bool) -> bool:
        return not sparse or _is_exact(group)


def default_decay(decoupled: bool) -> str:
    """Option ``decay`` where it is not given."""
    return "catch_up" if decoupled else "touched"


def _is_exact(group: Options) -> bool:
    return group.get("lazy") == "exact"


def _rule(group: Options, param: Tensor) -> Rule:
    beta1, beta2 = group["betas"]
    decoupled = bool(group["decoupled_weight_decay"])
    return Rule(
        float(beta1),
        float(beta2),
        float(group["eps"]),
        0.0 if decoupled else float(group["weight_decay"]),
        bool(group["amsgrad"]),
        decoupled,
        accumulation_dtype(param.dtype),
    )


_warned_of_rows = False


def _warn_of_rows(name: str) -> None:
    global _warned_of_rows
    if not _warned_of_rows:
        _warned_of_rows = True
        warnings.warn(
            f"fastemb.optim.{name}: rows that a sparse gradient does not have stand still, while "
            "dense Adam goes on moving them by their momentum and weight decay; lazy='exact' gives "
            "the result of dense Adam, and lazy='rows' keeps this one without a warning",
            stacklevel=2,
        )
