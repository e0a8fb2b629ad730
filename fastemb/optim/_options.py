"""Checks of the options that all optimizers have; errors name argument, expectation and value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Options of a param group, or the defaults of all groups.
Options = dict[str, Any]


def option_error(op: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{op}: {expected}, got {got!r}")


def require_number(
    op: str, name: str, value: Any, low: float = 0.0, *, open_low: bool = False
) -> None:
    """Raise unless ``value`` is a number, or a tensor of one, from ``low`` on (or above it)."""
    bound = f"> {low:g}" if open_low else f">= {low:g}"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise option_error(op, f"{name} must have 1 element", f"shape {tuple(value.shape)}")
        if value.is_meta:
            raise option_error(op, f"{name} must have a value", "a tensor on meta")
    try:
        if isinstance(value, Tensor) and value.is_complex():
            raise TypeError
        inside = value > low if open_low else value >= low  # not for "1e-3", which float() takes
        if not isinstance(value, Tensor):
            float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} must be a number {bound}, got {value!r}") from None
    if not inside:
        raise option_error(op, f"{name} must be {bound}", value)


_IN_BOUNDS = torch.tensor(0.5, dtype=torch.float32, device="cpu")


def at_hand(value: Any) -> Any:
    """An option, or one inside all bounds in place of a tensor that would be waited for."""
    if isinstance(value, (tuple, list)):
        return tuple(map(at_hand, value))
    elsewhere = isinstance(value, Tensor) and value.device.type not in ("cpu", "meta")
    return _IN_BOUNDS if elsewhere and value.numel() == 1 else value


def floats(options: Options, *names: str) -> dict[str, Any]:
    """Options as torch's functional optimizers take them.

    Those refuse some of the numbers that a constructor takes, when half of a step is made. A tensor
    remains one where autograd or a CUDA graph wants it.
    """
    keeps_tensors = options.get("capturable") or options.get("differentiable")
    return {
        name: value if keeps_tensors and isinstance(value, Tensor) else float(value)
        for name, value in ((name, options[name]) for name in names)
    }


def float_or_tensor(value: Any) -> Any:
    """A learning rate, which torch's optimizers take as either."""
    return value if isinstance(value, Tensor) else float(value)


def check_options(op: str, options: Options, decays: tuple[str, ...], *, positive_lr: bool) -> None:
    """Raise for what all optimizers refuse; options that an optimizer lacks are not looked at.

    Args:
        op: name of the optimizer.
        options: of the constructor or of a group.
        decays: what ``decay`` may be.
        positive_lr: whether 0 is no learning rate.
    """
    lr = options["lr"]
    require_number(op, "lr", lr, open_low=positive_lr)
    # Without an option "capturable" torch's foreach kernels take a tensor.
    if isinstance(lr, Tensor) and options.get("foreach") and not options.get("capturable", True):
        raise option_error(op, "lr must be a float with foreach=True and capturable=False", lr)
    for other in ("differentiable", "foreach"):
        if options.get("fused") and options.get(other):
            raise option_error(op, f"{other} must be False with fused=True", options[other])
    if "decay" in options and options["decay"] not in decays:
        known = ", ".join(map(repr, decays))
        raise option_error(op, f"decay must be one of {known}", options["decay"])

    master, rounding, seed = options["master"], options["rounding"], options["seed"]
    if rounding not in ("nearest", "stochastic"):
        raise option_error(op, "rounding must be 'nearest' or 'stochastic'", rounding)
    if master not in (None, "fp32"):
        raise option_error(op, "master must be 'fp32' or None, the default", master)
    if master is not None and rounding == "stochastic":
        raise option_error(
            op, "master must be None with rounding='stochastic', which keeps no copy", master
        )
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise option_error(op, "seed must be an int in [0, 2**63)", seed)
