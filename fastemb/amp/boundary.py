"""Boundaries between scale groups: where a gradient leaves one scale for another."""

from __future__ import annotations

import math
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fastemb.amp._graph import Link

if TYPE_CHECKING:
    from fastemb.amp._grouped import GroupedScaler

__all__ = ["BoundaryLinear"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_DTYPES = (*_LOW_PRECISION, torch.float32, torch.float64)


class _Boundary(torch.autograd.Function):
    """Identity; the gradient goes on with the scale of the link's group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.fastemb_link = link
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        link: Link = ctx.fastemb_link
        return link.scaler._pass_boundary(link, grad), None


def is_transformed() -> bool:
    """Whether torch.func differentiates, whose losses no scaler has scaled."""
    return _functorch.peek_interpreter_stack() is not None


@_disable_dynamo
def boundary(x: Tensor, link: Link) -> Tensor:
    if is_transformed():
        return x
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"GradScaler.boundary: x must be float16, bfloat16, float32 or float64, got "
            f"{str(x.dtype).removeprefix('torch.')} at the boundary {link.name}"
        )
    return _Boundary.apply(x, link)  # type: ignore[no-untyped-call]


class _InputGradient(torch.autograd.Function):
    """Nothing in forward; gives x the gradient that ``output`` = linear(x, weight) leaves out.

    ``output`` was computed from a detached x by torch, whose own backward makes the gradients of
    weight and bias. It counts as changed in place rather than as a view, which the next layer
    could not change in place.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, weight: Tensor, link: Link | None) -> Tensor:
        ctx.fastemb_link = link
        ctx.dtype = output.dtype
        ctx.save_for_backward(weight)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        grad_input = _product(grad.to(ctx.dtype), weight.to(ctx.dtype))
        link: Link | None = ctx.fastemb_link
        if link is not None:
            grad_input = link.scaler._pass_boundary(link, grad_input)
        return grad, grad_input, None, None


# The edge of _InputGradient's node that leads to x.
_INPUT = 1


class BoundaryLinear(nn.Linear):
    """`torch.nn.Linear` whose input gradient is FP32, and begins a scale group.

    For the first layer behind the embeddings. Under autocast to float16 or bfloat16 the forward and
    the gradients of weight and bias are bit for bit those of `torch.nn.Linear`. The gradient of
    the input, which autocast would round to the low precision, leaves in FP32: the product of the
    rounded operands, accumulated in FP32, times the scale of ``group`` over the scale outside. So
    what flows on into the tables neither underflows nor depends on a scale that the dense layers
    hold low.

    Without a scaler (`GradScaler.register` gives it one) there is no group, only the FP32 gradient.
    Without autocast it is `torch.nn.Linear` behind ``scaler.boundary``, and in what `torch.func`
    differentiates, plain `torch.nn.Linear`. For `torch.fx` it has to be a leaf.

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`.
        group: the scale group of what lies behind.

    Shape:
        input ``(*, in_features)``, float32 under autocast; output ``(*, out_features)``.

    Raises:
        TypeError: in forward, under autocast: an input that requires grad and is not float32, for
            autograd would round its gradient to that dtype.
    """

    # Class attributes, so that a module which `fastemb.convert` made from torch's has them too.
    group: str = "embedding"
    # Of the scaler; copies and files of the module are without.
    _scaler: weakref.ref[GroupedScaler] | None = None
    _boundary_name: str = ""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: str = "embedding",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``."""
        if not (input.requires_grad and torch.is_grad_enabled()):
            return F.linear(input, self.weight, self.bias)
        return self._forward(input)

    @_disable_dynamo
    def _forward(self, input: Tensor) -> Tensor:
        device_type = input.device.type
        low = torch.is_autocast_enabled(device_type)
        low = low and torch.get_autocast_dtype(device_type) in _LOW_PRECISION
        if not low or is_transformed():
            link = self._link(inner=0)
            if link is not None:
                input = boundary(input, link)
            return F.linear(input, self.weight, self.bias)
        if input.dtype != torch.float32:
            raise TypeError(
                f"{type(self).__name__}: under autocast the input must be float32, got "
                f"{str(input.dtype).removeprefix('torch.')}, to which autograd would round its "
                "gradient; give the embeddings output_dtype=torch.float32"
            )
        # A matrix, as torch makes of it, too: otherwise the output is a view.
        rows = math.prod(input.shape[:-1])
        x = input if input.dim() == 2 else input.reshape(rows, input.shape[-1])
        output = F.linear(x.detach(), self.weight, self.bias)
        args = (output, x, self.weight.detach(), self._link(inner=_INPUT))
        output = _InputGradient.apply(*args)  # type: ignore[no-untyped-call]
        return output.view(*input.shape[:-1], self.out_features)

    def _link(self, inner: int) -> Link | None:
        scaler = None if self._scaler is None else self._scaler()
        if scaler is None or not scaler.is_enabled():
            return None
        return scaler._link(self.group, self._boundary_name or self.group, inner)

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        for name in ("_scaler", "_boundary_name"):
            state.pop(name, None)
        return state

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group={self.group!r}"


def _product(grad: Tensor, weight: Tensor) -> Tensor:
    """``grad @ weight`` of matrices in low precision, in FP32."""
    with torch.autocast(grad.device.type, enabled=False):
        if grad.is_cuda and _multiplies_into_float32(grad.device, grad.dtype):
            return torch.mm(grad, weight, out_dtype=torch.float32)
        return grad.float() @ weight.float()


@cache
def _multiplies_into_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device has products of matrices with an FP32 result."""
    matrix = torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(matrix, matrix, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True
