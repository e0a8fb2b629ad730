"""What a gradient scaler and a clipping pass hand to one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scaling:
    """How the gradient of one parameter becomes the one that is applied; all on its device.

    Attributes:
        multiplier: [] float32, or None: 1.
        divisor: where set, dense gradients are divided by it instead of multiplied. The quotient
            is what torch's fused kernels compute, the product with the rounded reciprocal is not
            (for scales that are no powers of two).
        skip: [] float32, 1 where the step must change nothing and 0 elsewhere; None: 0.
    """

    multiplier: Tensor | None = None
    divisor: Tensor | None = None
    skip: Tensor | None = None

    def apply(self, grads: list[Tensor], out: list[Tensor]) -> None:
        """Dense gradients, unscaled and clipped, to tensors of one dtype; also in place."""
        factor = self.multiplier if self.divisor is None else self.divisor
        operation = torch.mul if self.divisor is None else torch.div
        for grad, result in zip(grads, out, strict=True):
            if factor is None:
                result.copy_(grad)
            elif grad.dtype == result.dtype:
                operation(grad, factor.to(result.dtype), out=result)
            else:
                result.copy_(grad)
                operation(result, factor.to(result.dtype), out=result)

    def advance(self, steps: list[Tensor]) -> None:
        """Count one step, unless it is skipped."""
        if not steps:
            return
        if self.skip is None:
            torch._foreach_add_(steps, 1.0)
        else:  # as one tensor it would be read by fake steps
            torch._foreach_add_(steps, [1.0 - self.skip] * len(steps))


class StepScaling:
    """The `Scaling` of every parameter in one step; nothing here waits for the device.

    Args:
        grad_scale: what the loss was multiplied by, None: 1. `torch.amp.GradScaler` sets it.
        found_inf: not 0 (it may be a sum of flags) skips the step. `torch.amp.GradScaler` sets it.
        param_scaling: inverse scale and found_inf of single parameters, in place of the two above.
        clip_coefficient: multiplies every gradient after it was unscaled.
    """

    def __init__(
        self,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        param_scaling: Mapping[Tensor, tuple[Tensor | None, Tensor | None]] | None,
        clip_coefficient: Tensor | None,
    ) -> None:
        self._common = (grad_scale, found_inf)
        self._of_params = param_scaling or {}
        self._clip = clip_coefficient
        # Parameters that share flags and a device share one Scaling, and so one kernel launch.
        self._known: dict[tuple[object, ...], Scaling] = {}

    def of(self, param: Tensor, device: torch.device) -> Scaling:
        """That of a parameter, for a step on ``device``."""
        own = self._of_params.get(param)
        key = (device, None if own is None else (id(own[0]), id(own[1])))
        scaling = self._known.get(key)
        if scaling is None:
            scaling = self._known[key] = self._make(device, own)
        return scaling

    def _make(
        self, device: torch.device, own: tuple[Tensor | None, Tensor | None] | None
    ) -> Scaling:
        def here(value: Tensor | None) -> Tensor | None:
            if value is None:
                return None
            # A copy to the host that nothing waits for would be read before it is there.
            return value.to(device, non_blocking=device.type != "cpu").reshape(())

        divisor = None
        if own is not None:
            multiplier, found_inf = here(own[0]), here(own[1])
            multiplier = None if multiplier is None else multiplier.float()
        else:
            divisor, found_inf = here(self._common[0]), here(self._common[1])
            # The reciprocal as torch.amp.GradScaler.unscale_ takes it.
            multiplier = None if divisor is None else divisor.double().reciprocal().float()
        clip = here(self._clip)
        if clip is not None:
            divisor = None
            multiplier = clip.float() if multiplier is None else multiplier * clip.float()
        # torch's kernels skip for exactly 1 only.
        skip = None if found_inf is None else (found_inf != 0).to(torch.float32)
        return Scaling(multiplier, divisor, skip)
