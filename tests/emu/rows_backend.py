"""The row optimizers of the CUDA kernels as a backend on CPU tensors, run by ``cuda_emu.h``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backend import DTYPES, address, load_module


def load(block: int = 64, sanitize: bool = False) -> EmuRows:
    return EmuRows(load_module(block, sanitize, "row_kernels"))


class EmuRows:
    """The operators of ``_row_ops.py`` and ``_lazy_ops.py`` over the emulated kernels."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.partials: Tensor | None = None

    def set_order(self, order: str, seed: int = 0) -> None:
        """Order of blocks and threads: ``forward``, ``backward`` or ``shuffled``."""
        self.module.set_order(order, seed)

    def row_adam_(
        self,
        param: Tensor,
        master: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        max_exp_avg_sq: Tensor | None,
        row_step: Tensor | None,
        row_count: Tensor | None,
        *common: Any,
    ) -> None:
        *common, beta1, beta2, eps, decoupled, corrected_denominator = common
        self.module.row_adam(
            **self._row_step(param, master, *common),
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
            max_exp_avg_sq=address(max_exp_avg_sq),
            moment_type=DTYPES[exp_avg.dtype],
            row_step=address(row_step),
            row_count=address(row_count),
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            decoupled=decoupled,
            corrected_denominator=corrected_denominator,
        )

    def row_adam_catch_up_(
        self,
        param: Tensor,
        master: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        max_exp_avg_sq: Tensor | None,
        row_step: Tensor,
        rows: Tensor | None,
        used_rows: Tensor | None,
        step: Tensor,
        history: Tensor,
        found_inf: Tensor | None,
        weight_decay: float,
        seed: int,
        beta1: float,
        beta2: float,
        eps: float,
        smallest_root: float,
        horizon: int,
        decoupled: bool,
    ) -> None:
        assert history.is_contiguous()
        target = (param, master, rows, used_rows, *(None,) * 4, step, None, found_inf)
        self.module.row_adam_catch_up(
            **self._row_step(*target, 0.0, None, weight_decay, False, seed),
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
            max_exp_avg_sq=address(max_exp_avg_sq),
            moment_type=DTYPES[exp_avg.dtype],
            row_step=row_step.data_ptr(),
            history=history.data_ptr(),
            capacity=history.shape[0],
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            smallest_root=smallest_root,
            horizon=horizon,
            decoupled=decoupled,
        )

    def row_adagrad_(self, param: Tensor, master: Tensor | None, sum: Tensor, *common: Any) -> None:
        *common, lr_decay, eps = common
        self.module.row_adagrad(
            **self._row_step(param, master, *common), sum=sum.data_ptr(), lr_decay=lr_decay, eps=eps
        )

    def row_rowwise_adagrad_(
        self, param: Tensor, master: Tensor | None, sum: Tensor, *common: Any
    ) -> None:
        *common, lr_decay, eps = common
        self.module.row_rowwise_adagrad(
            **self._row_step(param, master, *common), sum=sum.data_ptr(), lr_decay=lr_decay, eps=eps
        )

    def row_sgd_(
        self, param: Tensor, master: Tensor | None, momentum_buffer: Tensor | None, *common: Any
    ) -> None:
        *common, momentum, dampening, nesterov = common
        self.module.row_sgd(
            **self._row_step(param, master, *common),
            momentum_buffer=address(momentum_buffer),
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
        )

    def _row_step(
        self,
        param: Tensor,
        master: Tensor | None,
        rows: Tensor | None,
        used_rows: Tensor | None,
        grad: Tensor | None,
        segments: Tensor | None,
        sources: Tensor | None,
        coefficients: Tensor | None,
        step: Tensor,
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        lr: float,
        lr_tensor: Tensor | None,
        weight_decay: float,
        maximize: bool,
        seed: int,
    ) -> dict[str, Any]:
        assert param.stride(1) == 1 or param.shape[1] <= 1
        assert grad is None or grad.is_contiguous()
        assert segments is not None or grad is None or rows is None or len(rows) == len(grad)
        # Kept until the next step, which is longer than its address is in use.
        self.partials = None
        if sources is not None:
            partial_rows = self.module.bag_backward_partial_rows(len(sources))
            shape = (partial_rows, param.shape[1])
            wide = param.dtype == torch.float64
            self.partials = torch.full(
                shape, torch.nan, dtype=torch.float64 if wide else torch.float32
            )
        return {
            "param": param.data_ptr(),
            "param_type": DTYPES[param.dtype],
            "param_stride": param.stride(0) if param.shape[0] > 1 else param.shape[1],
            "master": address(master),
            "num_embeddings": param.shape[0],
            "dim": param.shape[1],
            "rows": address(rows),
            "num_rows": len(next(x for x in (rows, grad, param) if x is not None)),
            "used_rows": address(used_rows),
            "grad": address(grad),
            "grad_type": DTYPES[param.dtype if grad is None else grad.dtype],
            "segments": address(segments),
            "sources": address(sources),
            "coefficients": address(coefficients),
            "num_terms": 0 if sources is None else len(sources),
            "partials": address(self.partials),
            "inv_scale": address(inv_scale),
            "found_inf": address(found_inf),
            "step": step.data_ptr(),
            "lr": lr,
            "lr_tensor": address(lr_tensor),
            "lr_type": DTYPES[torch.float32 if lr_tensor is None else lr_tensor.dtype],
            "weight_decay": weight_decay,
            "maximize": maximize,
            "stochastic": seed >= 0,
            "seed": max(seed, 0),
        }


class Misaligned:
    """A backend whose tensors begin one element behind a word of 16 bytes."""

    def __init__(self, backend: EmuRows) -> None:
        self.backend = backend

    def __getattr__(self, op: str) -> Any:
        def step(*arguments: Any) -> None:
            moved = [self._moved(x) if isinstance(x, Tensor) else x for x in arguments]
            getattr(self.backend, op)(*moved)
            for old, new in zip(arguments, moved, strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        return step

    def _moved(self, x: Tensor) -> Tensor:
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
