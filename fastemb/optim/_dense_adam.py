"""Dense Adam on the CPU that unscales gradients on the way, where its bits are those of torch."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fastemb import _dense_reference
from fastemb.optim._dense import DenseUpdate
from fastemb.optim._options import Options
from fastemb.optim._scaling import Scaling


def adam_in_one_pass(update: DenseUpdate, group: Options, scaling: Scaling) -> None:
    """A step of flat float32 pieces; see `fastemb.optim._dense.OnePass`."""
    exp_avg, exp_avg_sq, *largest = update.states
    divide = scaling.divisor is not None
    beta1, beta2 = map(float, group["betas"])
    torch.ops.fastemb.dense_adam_(
        update.param,
        update.grad,
        exp_avg,
        exp_avg_sq,
        largest[0] if largest else None,
        cast(Tensor, update.step).float(),
        cast(Tensor, scaling.divisor if divide else scaling.multiplier).float(),
        divide,
        scaling.skip,
        float(group["lr"]),
        beta1,
        beta2,
        float(group["eps"]),
        float(group["weight_decay"]),
        bool(group["decoupled_weight_decay"]),
        bool(group["maximize"]),
    )


@cache
@_disable_current_modes()  # they have no part in it, and fake samples would tell nothing
def agrees() -> bool:
    """Whether ``dense_adam_`` has the bits of torch's kernel, on the CPU.

    Those depend on how torch was built and on the instructions that it chose. Samples tell:
    elements of many magnitudes, in all variants.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are

    def sample(low: float, high: float) -> Tensor:
        sizes = torch.empty(4096, **kind).uniform_(low, high, generator=generator).exp()
        return torch.randn(4096, **kind, generator=generator) * sizes

    for decoupled, amsgrad, weight_decay, beta1 in product(
        (False, True), (False, True), (0.0, 0.1), (0.9, 0.3)
    ):
        exp_avg, exp_avg_sq, largest = (sample(-15, 0), sample(-25, 0).abs(), sample(-25, 0).abs())
        ours = [sample(-7, 3), exp_avg, exp_avg_sq, *([largest] if amsgrad else [])]
        torchs = [values.clone() for values in ours]
        for step in (1.0, 1000.0):
            grad = sample(-10, 10)
            for operator, tensors in (
                (torch.ops.fastemb.dense_adam_, ours),
                (_dense_reference.dense_adam_, torchs),
            ):
                operator(
                    tensors[0],
                    grad,
                    tensors[1],
                    tensors[2],
                    tensors[3] if amsgrad else None,
                    torch.tensor(step, **kind),
                    torch.tensor(0.3, **kind),
                    divide=False,
                    found_inf=None,
                    lr=1e-2,
                    beta1=beta1,
                    beta2=0.99,
                    eps=1e-8,
                    weight_decay=weight_decay,
                    decoupled=decoupled,
                    maximize=False,
                )
        if not all(map(torch.equal, ours, torchs)):
            return False
    return True
