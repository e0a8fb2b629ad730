"""What the host has of one dense parameter whose optimizer state is offloaded."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastemb._memory import advise_huge_pages
from fastemb.offload._link import HOST, Link, Transfer
from fastemb.offload._modes import outside_modes
from fastemb.optim._dense import flat

__all__ = ["Twin"]


class Twin:
    """What the host has of one parameter.

    Attributes:
        param: its copy, laid out alike.
        grad: what its gradient has arrived in, and whose memory is used again.
        gradient: the newest transfer of the gradient.
        known: the transfer after which device and host had the same parameter.
        delivery: the transfer to the device that has not been looked at yet.
    """

    def __init__(self, name: str, param: Tensor, link: Link) -> None:
        self.name = name
        self.link = link
        self.param = _on_host(param.detach(), param.dtype)
        self.grad: Tensor | None = None
        self.gradient: Transfer | None = None
        self.known: Transfer | None = None
        self.delivery: Transfer | None = None
        self._kind = _kind(param)

    def fits(self, param: Tensor) -> bool:
        return self._kind == _kind(param)

    def fetch_gradient(self, grad: Tensor) -> None:
        if self.gradient is not None:
            self.gradient.superseded = True
        if self.grad is None or self.grad.dtype != grad.dtype:
            self.grad = _on_host(self.param, grad.dtype)
        layout = partial(_flat_like, grad.detach(), self.param)
        self.gradient = self.link.to_host(flat(self.grad), layout)

    def fetch_parameter(self, param: Tensor) -> None:
        self.known = self.link.to_host(flat(self.param), partial(flat, param))

    @outside_modes
    def send_parameter(self, param: Tensor) -> None:
        self.known = self.delivery = self.link.to_device(flat(param), flat(self.param))

    def has_gradient_in(self, dtype: torch.dtype) -> bool:
        return self.gradient is not None and self.grad is not None and self.grad.dtype == dtype

    def sums_of_gradient(self, grad: Tensor) -> Tensor:
        """[chunks] int64 on the device: what was sent if it was this."""
        assert self.gradient is not None
        values = _flat_like(grad.detach(), self.param)
        return self.link.sums.of_chunks(self.link.chunks(values), self.gradient.seed)

    def sums_of_parameter(self, param: Tensor) -> Tensor:
        assert self.known is not None
        return self.link.sums.of_chunks(self.link.chunks(flat(param)), self.known.seed)


def _kind(param: Tensor) -> tuple[Any, ...]:
    return param.dtype, param.device, param.shape, param.stride()


def _flat_like(tensor: Tensor, template: Tensor) -> Tensor:
    """The elements of ``tensor`` in the order in which ``template`` has them in memory."""
    if tensor.stride() == template.stride() or (
        tensor.is_contiguous() and template.is_contiguous()
    ):
        return flat(tensor)
    return flat(
        torch.empty_strided(
            template.shape, template.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    )


def _on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=HOST)
    advise_huge_pages(result)
    return result
