"""`GradScaler`: loss scaling with a scale for each group of parameters."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fastemb import _row_queue
from fastemb.amp._checking import CheckingScaler
from fastemb.amp._fingerprint import Fingerprint, parameters
from fastemb.amp._gradients import Pass, has_double, has_gradient
from fastemb.amp._graph import lists, tensors, walk
from fastemb.amp._groups import ROOT, check_config
from fastemb.amp._iteration import Iteration
from fastemb.optim._base import RowOptimizer
from fastemb.optim.clip import check_norm, clip_grad_norm_

__all__ = ["GradScaler"]

_OP = "GradScaler"


class GradScaler(CheckingScaler):
    """`torch.amp.GradScaler` with scale groups, statistics and no wait for the device.

    Same methods, same use, and as long as no group is declared the same bits. On top of torch's:

    - a group of parameters can have a scale of its own, which an overflow elsewhere leaves alone:
      what lies behind a `BoundaryLinear` (after `register`) or behind `boundary`;
    - sparse gradients are summed before they are checked, gradients that share memory are unscaled
      once, and fp16 gradients are taken;
    - `step` only reads the gradients of optimizers of `fastemb.optim`, which unscale them on the
      way; `clip_grad_norm_` adds no pass over memory to that;
    - the scale never becomes 0; statistics (`stats`), and an alarm after many skipped iterations.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in
            `torch.amp.GradScaler`; those of the root, the scale of the loss.
        groups: scale groups by name, each a `GroupConfig` or a dict of its attributes. A group that
            is not here and that a boundary names has the default configuration.
        skip: what an overflow throws away. "optimizer": the step of every optimizer with a
            parameter in a group with an overflow; "group": the update of the parameters of such
            groups (optimizers of `fastemb.optim` only); "all": the steps of all optimizers that
            the scaler knows (from `register`, or an earlier `step`), whose gradients must be
            complete before the first `step`.
        min_scale, max_scale: limits of the root, by default 2**-126 and none.
        hysteresis: consecutive iterations with an overflow of which the last, and any that
            follows it, has the root back off.
        max_consecutive_skips: iterations with an overflow in one group before the alarm.
        alarm: "warn" once until the group has an iteration without an overflow, or "raise" from
            every `update` (or `stats`) that learns of a further skipped iteration.
        mode: "guard": the scale stays 1. What remains is to skip, to count and to clip. For
            bfloat16 and float32, whose smallest number is 2**-133 or below: there is nothing that
            a scale would save from underflow, but a bad batch must not reach the weights all the
            same.
        process_group: processes that agree on what to skip, by one all_reduce in each `unscale_`,
            `clip_grad_norm_` and `step` (with ``skip="all"`` for each optimizer there);
            `DistributedDataParallel` agrees through its gradients only, not through row gradients
            and boundaries. All processes must make the same calls and have the same groups in the
            same order; a group counts as used in all where it was in one. Pickle leaves it out.

    With groups, all scales and factors must be powers of two, which unscale without rounding.

    Raises:
        ValueError: an argument out of its range, by name.
    """

    # ---- the loss ----

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or any nesting of iterables of losses, by the scale of the root.

        While there are groups, this goes through the graph to find which parameters are in one.

        What was found so far in gradients that no longer exist is forgotten here: the pass of
        `unscale_` or `clip_grad_norm_` over an optimizer that has no gradient left, and what
        boundaries have found, once no parameter that a loss has reached since the last `update`
        has a gradient that no step has used. So a batch can be dropped with ``zero_grad()``. With
        ``set_to_none=False`` gradients stay, and what boundaries have found counts until the
        `update`.

        Raises:
            RuntimeError: a parameter or a boundary that is reached through two groups, by name.
            ValueError: ``outputs`` has something else than tensors, such as the keys of a dict.
        """
        if not self._enabled:
            return outputs
        grouped = len(self._groups) > 1
        if grouped or self._leftovers:
            outputs = lists(outputs)
        scaled = super().scale(outputs)
        iteration, scales = self._iteration, self._scales
        iteration.scaled = True
        self._drop_abandoned()
        if not grouped:
            iteration.unwalked = True
        if scales is None or not (grouped or self._leftovers):
            return scaled

        def leaf(param: Tensor, group: int) -> None:
            if grouped:
                iteration.enter(param, group, self._two_groups)
            if self._leftovers:
                self._leftovers.meet(param, scales.values[group])

        if walk(tensors(outputs), self._enter if grouped else None, leaf):
            iteration.hides = True
            self._leftovers.hide()
        return scaled

    def _two_groups(self, param: Tensor, one: int, other: int) -> str:
        names = self.group_names
        return (
            f"{_OP}: {self._registry.name_of(param)} is reached through the groups {names[one]!r} "
            f"and {names[other]!r}, whose gradients have different scales, so their sum cannot be "
            "unscaled; put all its uses behind boundaries of one group"
        )

    # ---- gradients ----

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by their scale, in place, and check them.

        For those who read or change gradients before `step` (to clip them there is
        `clip_grad_norm_`); otherwise it is not needed, and for optimizers of `fastemb.optim` it
        costs a pass over memory. fp16 gradients become FP32 ones for those, and are rounded to
        fp16, with a warning, for others. Repeated rows of sparse gradients are summed, on the CPU.
        Does not wait for the device.

        `step` checks gradients that were changed after this once more, without unscaling them: a
        further backward would add scaled gradients to unscaled ones, as with torch's scaler. The
        gradient of a parameter that several optimizers have is unscaled once.

        Raises:
            RuntimeError: called twice since the last `update`, or after `step`; gradients of
                losses with two scales, or of none that is known, as in `step`.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        self._meet(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        result = self._examine(optimizer, "unscale_", unscale=True)
        self._tell_torch(optimizer, result)
        state["stage"] = OptState.UNSCALED

    def clip_grad_norm_(
        self, optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clip the gradients of an optimizer by their unscaled norm, before `step`.

        In place of ``unscale_`` and ``torch.nn.utils.clip_grad_norm_``. With an optimizer of
        `fastemb.optim` and ``norm_type`` 2, the norm comes from the pass that checks the gradients,
        and the step multiplies by the coefficient: gradients are read twice and never written.
        Otherwise, where a gradient is float64, and where hooks or an overridden ``step`` will see
        them, they are unscaled and clipped in place by `fastemb.optim.clip_grad_norm_`.

        Holds for the gradients as they are now, so call it after the last backward; of several
        calls the last one counts. Where `step` finds further gradients added, it takes norm and
        coefficient once more, for the same ``max_norm``.

        No need to look at the norm for overflows: call `step` and `update` all the same. They skip
        the batch and lower the scale, which a batch that is dropped before does not.

        Args:
            optimizer: the owner of the gradients.
            max_norm: largest norm that stays as it is.
            norm_type: p of the p-norm.

        Returns:
            The norm before clipping, [] float32 (float64 where a gradient is). Where it is not
            finite, `step` will be skipped. With ``skip="group"`` it is that of the groups without
            an overflow, float32.

        Raises:
            RuntimeError: after `step`; gradients of losses with two scales, or of none that is
                known, as in `step`.
            ValueError: ``max_norm`` is not >= 0, or ``norm_type`` not > 0; ``skip="group"`` and
                another norm or an optimizer that is not of `fastemb.optim`: one group that is not
                finite would reach all others.
        """
        if not self._enabled:
            return clip_grad_norm_(parameters(optimizer), max_norm, norm_type)
        self._check_scale_growth_tracker("clip_grad_norm_")
        max_norm, norm_type = check_norm(f"{_OP}.clip_grad_norm_", max_norm, norm_type)
        self._meet(optimizer)
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        if stage is OptState.STEPPED:
            raise RuntimeError("clip_grad_norm_() is being called after step().")
        fused = _is_ours(optimizer) and norm_type == 2.0
        by_group = self._skip == "group" and len(self._groups) > 1
        if by_group and not fused:
            raise ValueError(
                f"{_OP}.clip_grad_norm_: with skip='group' norm_type must be 2 and the optimizer "
                f"one of fastemb.optim, got {norm_type!r} and {type(optimizer).__name__}"
            )
        in_place = stage is OptState.UNSCALED or not fused or has_double(optimizer)
        in_place = in_place or _has_hooks(optimizer) or _has_other_step(optimizer)
        if in_place and not by_group:
            if stage is not OptState.UNSCALED:
                self.unscale_(optimizer)
                result = self._iteration.passes[id(optimizer)]
            else:
                result = self._current(optimizer, "clip_grad_norm_")
            result.max_norm = result.norm = result.clip = None
            norm = clip_grad_norm_(parameters(optimizer), max_norm, norm_type)
            # Clipping makes no finite gradient infinite; it need not be checked again.
            result.gradients = Fingerprint(parameters(optimizer))
            return norm
        result = self._examine(optimizer, "clip_grad_norm_", max_norm=max_norm)
        assert result.norm is not None
        return result.norm.float()

    # ---- the step ----

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unless gradients overflowed, unscale them and call ``optimizer.step(*args, **kwargs)``.

        A skipped step leaves parameters, optimizer states and step counters as they are, bit for
        bit. Optimizers of `fastemb.optim`, and those of torch with ``fused=True``, decide that on
        the device; for all others this waits for it, as for one of `fastemb.optim` whose ``step``
        is overridden, by a subclass or on the instance. Without any gradient the step does nothing
        and counts as nothing. Gradients that were changed since `unscale_` or `clip_grad_norm_` are
        checked again, except where they were written through ``.data``, which leaves no trace.

        Gradients that have waited since before an `update` are unscaled by the scale of their loss,
        if the scaler knew the optimizer by then (from `register`, or an earlier `step`).

        Hooks that run before the step of an optimizer find unscaled gradients, and so does an
        overridden ``step`` of one of `fastemb.optim`.

        If ``optimizer.step`` raises, the step has not happened: it can be called again, or the
        batch dropped.

        Raises:
            RuntimeError: a second step since the last `update`; a closure; ``skip="group"``
                with an optimizer that is not of `fastemb.optim` while there are groups; a
                parameter with the gradients of losses with two scales: of an optimizer that the
                scaler knew (from `register`, or an earlier `step`) when an `update` changed its
                scale, some from before that and some from after it; where there are groups, a
                gradient other than 0 that no loss since the last `update` is known to reach.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or any(map(callable, args)):
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._check_scale_growth_tracker("step")
        self._meet(optimizer)
        scales, iteration = self._scales, self._iteration
        assert scales is not None
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")

        ours = _is_ours(optimizer)
        grouped = len(scales) > 1
        on_device = _skips_by_itself(optimizer)
        if self._skip == "group" and grouped and not ours:
            raise RuntimeError(
                f"{_OP}: skip='group' needs an optimizer of fastemb.optim, which can leave out "
                f"parameters on the device; {type(optimizer).__name__} is none"
            )
        if on_device and not ours and "grad_scaler" in inspect.signature(optimizer.step).parameters:
            if state["stage"] is OptState.UNSCALED:
                self._tell_torch(optimizer, self._current(optimizer, "step"))
            else:
                self._refuse_other_scales(optimizer)
            returned = super().step(optimizer, *args, **kwargs)  # torch's contract of old
            iteration.consume(parameters(optimizer))
            return returned

        reads_only = on_device and not _has_hooks(optimizer)
        if reads_only and not ours:  # torch's unscale all gradients alike, and write them
            reads_only = not grouped and not self._shares(optimizer)
        one_scale = ours or not self._leftovers.of(optimizer)  # all that others can unscale by
        if state["stage"] is OptState.READY and not (reads_only and one_scale):
            self.unscale_(optimizer)
            result = iteration.passes[id(optimizer)]
        else:
            result = self._current(optimizer, "step")
        returned = None
        try:
            skip, skip_groups = self._to_skip(optimizer)
            self._tell_torch(optimizer, result)
            if _is_ours(optimizer):
                done = self._unscaled_elsewhere(optimizer)
                self._hand_over(optimizer, result, skip, skip_groups, done)
            elif on_device:
                self._announce(optimizer, result, skip)
            if on_device or not bool(skip):
                returned = optimizer.step(*args, **kwargs)
        except BaseException:
            if not result.unscaled:  # what has been unscaled must not be again
                iteration.passes.pop(id(optimizer), None)
            raise
        finally:
            for name in ("grad_scale", "found_inf", "_param_scaling", "_clip_coefficient"):
                vars(optimizer).pop(name, None)
        state["stage"] = OptState.STEPPED
        result.handed_over = on_device and not ours and not result.unscaled and not self._guard
        iteration.consume(parameters(optimizer))
        self._verdicts[id(optimizer)] = (weakref.ref(optimizer), skip)
        return returned

    def _announce(self, optimizer: Any, result: Pass, skip: Tensor) -> None:
        """torch's contract with optimizers that unscale and skip by themselves."""
        if result.unscaled:
            # None, unless somebody has set it: then that has yet to be divided by.
            optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
        else:
            scale = None if self._guard else self._get_scale_async()
            if scale is not None:
                scale = scale * getattr(optimizer, "grad_scale", 1)
            optimizer.grad_scale = scale
        optimizer.found_inf = skip

    def _hand_over(
        self,
        optimizer: RowOptimizer,
        result: Pass,
        skip: Tensor,
        skip_groups: Tensor,
        done: Callable[[Tensor], bool],
    ) -> None:
        """The same for optimizers of `fastemb.optim`, which take parameters one by one."""
        self._announce(optimizer, result, skip)
        optimizer._clip_coefficient = result.clip
        scales = self._scales
        assert scales is not None
        grouped = len(scales) > 1
        flags = skip_groups.unbind() if self._skip == "group" else (skip,) * len(scales)
        scaling = {}
        for param in parameters(optimizer):
            if not has_gradient(param):
                continue
            unscaled = result.unscaled or done(param)
            queued = _row_queue.waiting(param) is not None
            group, kept = self._origin(f"{_OP}.step", param, unscaled=unscaled)
            if grouped or queued or kept is not None or unscaled is not result.unscaled:
                device = param.device
                inverse = scales.inverse(group, device) if kept is None else kept.inverse(device)
                scaling[param] = (None if unscaled else inverse, flags[group])
        optimizer._param_scaling = scaling

    def step_was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last `step` of an optimizer was skipped, for learning rate schedulers.

        With ``skip="group"``: whether all its parameters were left out. Waits for the device.

        Raises:
            RuntimeError: there was no step yet.
        """
        if not self._enabled:
            return False
        reference, skipped = self._verdicts.get(id(optimizer), (None, False))
        if reference is None or reference() is not optimizer:
            raise RuntimeError(f"{_OP}: step() was never called with this optimizer")
        return bool(skipped)

    # ---- the scale ----

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale of every group, once all optimizers had their `step`.

        A group backs off where a gradient became not finite in it: one of its parameters, one at
        its boundary, or one that left it through a further boundary, unless what came into the
        group was not finite already. Does not wait for the device, except for the value of a
        tensor ``new_scale`` where there are groups.

        Args:
            new_scale: the new scale of the root, a number or a tensor of one element; other groups
                stay as they are.

        Raises:
            AssertionError: no `step` or `unscale_` since the last one.
            RuntimeError: with ``alarm="raise"``, after too many skipped iterations.
            TypeError: ``new_scale`` is neither a number nor a tensor.
            ValueError: a new scale beyond the limits, one that is no power of two where there are
                groups, or any with ``mode="guard"``. Without groups the values of tensors on a
                device are not looked at.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("update")
        scales, iteration = self._scales, self._iteration
        assert scales is not None
        stages = {k: s["stage"] for k, s in self._per_optimizer_states.items()}
        if new_scale is None and not any(s is not OptState.READY for s in stages.values()):
            raise AssertionError("No inf checks were recorded prior to update.")
        self._leftovers.collect(
            ((o, stages.get(id(o)) is OptState.STEPPED) for o in self._registry.optimizers()),
            iteration,
            scales,
            self._known_origin,
        )
        before = scales.values.clone()
        blamed = iteration.blamed(scales)
        if new_scale is not None:
            self._set_scale(new_scale)
        elif any(result.groups for result in iteration.passes.values()):
            self._steps += 1
            scales.configure(ROOT, self._root_config())
            if len(scales) > 1 and not self._guard:
                check_config(_OP, self._root_config(), exact=True)
            present = iteration.agreed
            if present is None and len(iteration.present) < len(scales):
                present = scales.mask(iteration.present) != 0
            scales.update(blamed, present)
            self._statistics.record(
                self._steps,
                self.group_names,
                [counted for result in iteration.passes.values() for counted in result.stats],
                iteration.named_stats(scales.device),
                before,
                scales.states,
                blamed,
            )
        self._per_optimizer_states.clear()
        self._iteration = Iteration(iteration.number + 1)
        self._statistics.read()

    def _set_scale(self, new_scale: Any) -> None:
        if self._guard:
            raise ValueError(f"{_OP}: update() takes no new_scale with mode='guard'")
        if isinstance(new_scale, Tensor):
            new_scale = new_scale.reshape(()) if new_scale.numel() == 1 else new_scale
        elif isinstance(new_scale, bool) or not isinstance(new_scale, Real):
            raise TypeError(
                f"{_OP}.update: new_scale must be a number or a tensor of one, got {new_scale!r}"
            )
        else:
            new_scale = float(new_scale)
        self._check_scale(f"{_OP}.update", "new_scale", new_scale)
        super().update(new_scale)
        assert self._scales is not None
        self._scales.forget()

    def stats(self, *, wait: bool = False) -> dict[str, Any]:
        """Numbers of the last iteration that have arrived from the device, all plain.

        On a device that is an earlier one than the last; "step" tells which.

        Args:
            wait: wait for those of the last `update`.

        Returns:
            "step", the number of the `update`, among those that moved the scales: with gradients
            and without ``new_scale``; one with ``new_scale`` leaves no numbers. "groups": of each
            the "scale" in that iteration,
            "found_inf" (whether it is to blame for an overflow), "skips" (consecutive iterations
            with one), "growth_tracker", and the counts of its gradients.
            "gradients": by parameter, its "group" and counts; repeated rows of a sparse gradient
            are summed before. "boundaries": counts of what has passed, by module or group.

            Counts are "elements", of which "zeros" are 0, "tiny" have an unscaled magnitude below
            2**-24 (fp16 would flush them without a scale), "flushed" at most 2**-25 and
            "subnormal" more, but below 2**-14, as they are scaled, "infinite", "nan", and
            "largest", the largest finite unscaled magnitude.

        A gradient that went through fp16 before shows "zeros" in place of "flushed" ones.
        """
        return self._statistics.latest(wait=wait)


def _is_ours(optimizer: torch.optim.Optimizer) -> TypeGuard[RowOptimizer]:
    """Whether the step of an optimizer of `fastemb.optim` sees what is set here."""
    return isinstance(optimizer, RowOptimizer) and not optimizer._is_wrapper()


def _skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer unscales and skips its step when it is told to, on the device.

    A wrapper that passes on what it does not have is not told for the optimizer in it.
    """
    if isinstance(optimizer, RowOptimizer) and optimizer._is_wrapper():
        return False
    if _has_other_step(optimizer):
        return False
    name = "_step_supports_amp_scaling"
    declared = name in vars(optimizer) or hasattr(type(optimizer), name)
    return declared and bool(getattr(optimizer, name))


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks, its own or those of all optimizers, see the gradients before the step does."""
    if getattr(optimizer, "_optimizer_step_pre_hooks", None):
        return True
    ours = _row_queue.refuse_other_optimizers
    return any(hook is not ours for hook in _global_optimizer_pre_hooks.values())


def _has_other_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of an optimizer of `fastemb.optim` is overridden by code of others.

    That may read or write gradients, and parameters also where the step is to be skipped. torch
    itself wraps steps, for its profiler and its learning rate schedulers; what it wraps counts.
    """
    if not isinstance(optimizer, RowOptimizer):
        return False
    for step in (type(optimizer).step, vars(optimizer).get("step")):
        while step is not None:
            step = getattr(step, "__func__", step)
            # Not __module__, which a wrapper has from what it wraps.
            module = getattr(step, "__globals__", {}).get("__name__", "")
            if module.partition(".")[0] not in ("torch", "fastemb"):
                return True
            step = getattr(step, "__wrapped__", None)
    return False
