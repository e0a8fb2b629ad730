"""The learning rates that sleeping rows have missed: `AdamHistory` of ``csrc/ops.h``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CAPACITY = 1024  # steps; the whole table is caught up once in so many
_SERIES = 4  # terms; what the next one would add is below the rounding of the dtype, given _RATIO
_RATIO = {torch.float32: 2.0**6, torch.float64: 2.0**13}  # of sqrt(v) to eps, at least
_NEGLIGIBLE = {torch.float32: 2.0**-32, torch.float64: 2.0**-61}


class AdamHistory:
    """A ring of the last `CAPACITY` steps of one parameter, on its device.

    `append` is made of tensor operations alone, so that neither a learning rate on the device nor a
    skipped step is waited for.

    Args:
        step: [] float32, the newest step so far.
        dtype: of the moments, float32 or float64: how far the series and the momentum count.

    Attributes:
        table: [CAPACITY, 8] float64, as the kernels read it.
        step: [] float32, the newest step in it.
        smallest_root, horizon: see `RowAdamCatchUp` in ``csrc/ops.h``.
    """

    def __init__(
        self,
        step: Tensor,
        beta1: float,
        beta2: float,
        eps: float,
        *,
        amsgrad: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        device = step.device
        self.table = torch.zeros((CAPACITY, 8), dtype=torch.float64, device=device)
        self.table[:, _SERIES] = 1.0  # keep
        self._awake = self.table[0, : _SERIES + 1].clone()
        self.step = step.clone()
        self._before_slots = -1 - torch.arange(CAPACITY, device=device)
        self._powers = torch.arange(1, _SERIES + 1, dtype=torch.float64, device=device)
        self._betas = torch.tensor([beta1, beta2], dtype=torch.float64, device=device)
        fade2 = 1.0 if amsgrad else beta2
        # What a term of the series is multiplied by in so many steps, from 1 on.
        fade = beta1 * fade2 ** (-self._powers / 2)
        ages = torch.arange(1, CAPACITY + 1, dtype=torch.float64, device=device)
        self._fades = fade ** ages.unsqueeze(1)

        # Of a small fade2 the inverse overflows, and 0 has none.
        diverges = beta1 >= fade2 ** (_SERIES / 2)
        root = math.sqrt(fade2)
        self.horizon = CAPACITY
        if beta1 == 0.0:
            self.horizon = 1
        elif beta1 < root:
            wanted = math.ceil(math.log(_NEGLIGIBLE[dtype]) / math.log(beta1 / root))
            self.horizon = min(CAPACITY, max(1, wanted))
        if diverges:
            self.smallest_root = math.inf  # replay
            self._fades.zero_()
        else:
            self.smallest_root = max(_RATIO[dtype] * eps * root**-self.horizon, 1e-30)

    def append(self, step: Tensor, lr: float | Tensor, decay: float, skip: Tensor | None) -> None:
        """Add the step that has just been made.

        Args:
            step: [] float32, its number.
            lr: its learning rate.
            decay: decoupled weight decay; 0 without.
            skip: [] tensor: not 0, the step was not made and nothing changes; None: it was.
        """
        t = step.to(torch.int64)
        if isinstance(lr, Tensor):
            lr = lr.to(self.table.device, torch.float64, non_blocking=True).reshape(())
        corrections = 1.0 - self._betas ** step.to(torch.float64)
        rate = lr / corrections[0]
        root = corrections[1].sqrt()
        keep = torch.ones_like(rate) - lr * decay
        own = torch.cat([self._awake, torch.stack([rate, root, keep])]).unsqueeze(0)

        capacity = len(self.table)
        slot = (t % capacity).reshape(1)
        if skip is not None:
            made = skip.to(self.table.device) == 0
            own = torch.where(made, own, self.table.index_select(0, slot))
            rate = torch.where(made, rate, 0.0)
            keep = torch.where(made, keep, 1.0)
            step = torch.where(made, step, self.step)
        # Slot i holds the latest step before t that is i modulo the capacity.
        fades = self._fades.index_select(0, (t + self._before_slots) % capacity)
        self.table[:, : _SERIES + 1] *= keep
        self.table[:, :_SERIES] += fades * (rate * root**self._powers)
        self.table.index_copy_(0, slot, own)
        self.step.copy_(step)
