"""Gradient scaling by the CUDA kernels as a backend on CPU tensors, run by ``cuda_emu.h``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import DTYPES, address, load_module


def load(block: int = 64, sanitize: bool = False) -> EmuGrads:
    return EmuGrads(load_module(block, sanitize, "grad_kernels"))


class EmuGrads:
    """The operators of ``_grad_ops.py`` over the emulated kernels. Scratch is filled with NaN."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def set_order(self, order: str, seed: int = 0) -> None:
        """Order of blocks and threads: ``forward``, ``backward`` or ``shuffled``."""
        self.module.set_order(order, seed)

    def grad_check_(
        self,
        grads: list[Tensor],
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        stats: Tensor | None,
        square_sums: Tensor | None,
        unscale: bool,
    ) -> None:
        assert all(grad.is_contiguous() for grad in grads)
        scratch = [self._scratch(grad.numel(), square_sums) for grad in grads]
        self.module.grad_check(
            [
                {
                    "grad": grad.data_ptr(),
                    "grad_type": DTYPES[grad.dtype],
                    "numel": grad.numel(),
                    "inv_scale": address(inv_scale),
                    "found_inf": address(found_inf),
                    "stats": 0 if stats is None else stats[i].data_ptr(),
                    "square_sum": 0 if square_sums is None else square_sums[i].data_ptr(),
                    "scratch": address(scratch[i]),
                    "unscale": unscale,
                }
                for i, grad in enumerate(grads)
            ]
        )

    def row_grad_check_(
        self,
        grad: Tensor,
        used_rows: Tensor | None,
        segments: Tensor | None,
        sources: Tensor | None,
        coefficients: Tensor | None,
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        stats: Tensor | None,
        square_sum: Tensor | None,
        unscale: bool,
    ) -> None:
        assert grad.is_contiguous()
        num_rows = grad.shape[0] if segments is None else segments.numel() - 1
        terms = 0 if sources is None else sources.numel()
        partials = None
        if sources is not None:
            acc = torch.float64 if grad.dtype == torch.float64 else torch.float32
            shape = (self.module.bag_backward_partial_rows(terms), grad.shape[1])
            partials = torch.full(shape, torch.nan, dtype=acc)
        scratch = self._scratch(num_rows * grad.shape[1], square_sum)
        self.module.row_grad_check(
            grad=grad.data_ptr(),
            grad_type=DTYPES[grad.dtype],
            dim=grad.shape[1],
            num_rows=num_rows,
            used_rows=address(used_rows),
            segments=address(segments),
            sources=address(sources),
            coefficients=address(coefficients),
            num_terms=terms,
            partials=address(partials),
            inv_scale=address(inv_scale),
            found_inf=address(found_inf),
            stats=address(stats),
            square_sum=address(square_sum),
            scratch=address(scratch),
            unscale=unscale,
        )

    def boundary_gradient(
        self,
        grad: Tensor,
        ratio: Tensor,
        inv_scale: Tensor | None,
        flags: Tensor,
        stats: Tensor | None,
    ) -> Tensor:
        grad = grad.contiguous()
        output = torch.full_like(grad, torch.nan)
        self.module.boundary_gradient(
            grad=grad.data_ptr(),
            grad_type=DTYPES[grad.dtype],
            numel=grad.numel(),
            ratio=ratio.data_ptr(),
            inv_scale=address(inv_scale),
            output=output.data_ptr(),
            flags=flags.data_ptr(),
            stats=address(stats),
        )
        return output

    def scale_update_(
        self, scales: Tensor, states: Tensor, found_inf: Tensor, configs: Tensor
    ) -> None:
        self.module.scale_update(
            scales=scales.data_ptr(),
            states=states.data_ptr(),
            found_inf=found_inf.data_ptr(),
            configs=configs.data_ptr(),
            groups=scales.numel(),
        )

    def _scratch(self, numel: int, square_sums: Tensor | None) -> Tensor | None:
        if square_sums is None:
            return None
        return torch.full((self.module.grad_check_scratch(numel),), torch.nan, dtype=torch.float64)
