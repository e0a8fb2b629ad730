"""Scale groups: how each is configured, and the scales of all of them on the device.

Group 0 is the root, the scale that `torch.amp.GradScaler` has. The scale of a group is absolute:
what its gradients are multiplied by, whatever the scale of the group outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fastemb import _grad_ops  # noqa: F401  (defines the operators of gradient scaling)
from fastemb._inference import lasting

ROOT = 0
ROOT_NAME = "root"
# The smallest scale of the root unless told otherwise: its inverse is finite, and torch's scaler
# has the same bits until it goes below.
SMALLEST_SCALE = 2.0**-126

_LARGEST_SCALE = torch.finfo(torch.float32).max
MOST_STEPS = 2**31 - 1  # that the device counts
_SCALES = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")


def plain(value: Any) -> Any:
    """A number of numpy or torch as one of Python, which every checkpoint can hold."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


@dataclass(frozen=True)
class GroupConfig:
    """How the scale of one group moves. Scales and factors are powers of two.

    Attributes:
        init_scale: the first scale; None: that of the root, within the two limits.
        growth_factor, backoff_factor, growth_interval: as in `torch.amp.GradScaler`; with a factor
            of 1 the scale does not move that way.
        hysteresis: consecutive iterations with an overflow of which the last, and any that
            follows it, has the scale back off.
        min_scale, max_scale: limits of the scale.
    """

    init_scale: float | None = None
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))

    def limited(self, scale: float) -> float:
        """The nearest scale that the limits allow."""
        return min(max(scale, self.min_scale), self.max_scale)

    def row(self) -> list[float]:
        """The configuration as ``scale_update_`` takes it."""
        return [
            self.growth_factor,
            self.backoff_factor,
            self.min_scale,
            self.max_scale,
            min(self.growth_interval, MOST_STEPS),
            min(self.hysteresis, MOST_STEPS),
        ]


# No growth, no backoff, only the count of skipped steps: the scale of ``mode="guard"``.
GUARD = GroupConfig(1.0, 1.0, 1.0, MOST_STEPS, MOST_STEPS, 1.0, 1.0)


@dataclass
class Group:
    """A group, and where its state on the device starts.

    Attributes:
        config: with ``mode="guard"`` without effect; for a state that another mode loads.
        state: iterations without an overflow since the last growth, consecutive ones with one.
    """

    name: str
    config: GroupConfig
    scale: float
    state: tuple[int, int] = (0, 0)


def is_power_of_two(value: float) -> bool:
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5


def check_config(
    where: str, config: GroupConfig, *, exact: bool, scale: str = "init_scale"
) -> None:
    """Raise `ValueError` for a configuration that makes no sense, by the name of the argument.

    Args:
        where: how the message calls the arguments.
        exact: whether scales and factors have to be powers of two.
        scale: how the message calls ``init_scale``.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, Real) and not (value is None and field.default is None):
            raise TypeError(f"{where}: {field.name} must be a number, got {value!r}")

    def require(good: bool, name: str, rule: str) -> None:
        if not good:
            called = scale if name == "init_scale" else name
            raise ValueError(f"{where}: {called} must be {rule}, got {getattr(config, name)!r}")

    require(1 <= config.growth_factor < math.inf, "growth_factor", ">= 1 and finite")
    require(0 < config.backoff_factor <= 1, "backoff_factor", "> 0 and at most 1")
    for name in ("growth_interval", "hysteresis"):
        value = getattr(config, name)
        require(isinstance(value, int) and value >= 1, name, "an int >= 1")
    require(config.min_scale >= SMALLEST_SCALE, "min_scale", ">= 2**-126")
    require(config.max_scale >= config.min_scale, "max_scale", ">= min_scale")
    if config.init_scale is not None:
        require(
            config.min_scale <= config.init_scale <= config.max_scale,
            "init_scale",
            f"between min_scale ({config.min_scale}) and max_scale ({config.max_scale})",
        )
        require(config.init_scale <= _LARGEST_SCALE, "init_scale", "a number that float32 has")
    if exact:
        for name in _SCALES:
            value = getattr(config, name)
            if value is None or (name == "max_scale" and value == math.inf):
                continue
            require(is_power_of_two(value), name, "a power of two where there are scale groups")


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting where that is safe: not for what the host reads."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def _inverse(values: Tensor) -> Tensor:
    """The reciprocal as torch.amp.GradScaler takes it."""
    return values.double().reciprocal().float()


class KeptScale:
    """The scale of gradients that no step had used before an update.

    Attributes:
        group: that of the gradients.
        value: [] float32; 1 where they had been unscaled.
    """

    def __init__(self, group: int, value: Tensor) -> None:
        self.group = group
        self.value = value
        self._inverses: dict[torch.device, Tensor] = {}

    def inverse(self, device: torch.device) -> Tensor:
        """[] float32."""
        if device not in self._inverses:
            self._inverses[device] = place(_inverse(self.value), device)
        return self._inverses[device]


class Scales:
    """The scales of all groups, on the device of the loss; nothing here waits for it.

    Attributes:
        values: [groups] float32.
        states: [groups, 2] int32, `Group.state`.
        fixed: whether all scales are 1 for good, whatever the configurations.
    """

    @lasting()
    def __init__(self, groups: Sequence[Group], device: torch.device, *, fixed: bool) -> None:
        self.device = device
        self.fixed = fixed
        self._configs: list[GroupConfig] = []
        self.values = torch.empty(0, dtype=torch.float32, device=device)
        self.states = torch.empty(0, 2, dtype=torch.int32, device=device)
        self._config_rows = torch.empty(0, 6, dtype=torch.float64, device=device)
        self.add(groups)

    def __len__(self) -> int:
        return len(self._configs)

    @lasting()
    def add(self, groups: Sequence[Group]) -> None:
        """Add groups behind those there are."""

        def behind(old: Tensor, new: list[object]) -> Tensor:
            rows = torch.tensor(new, dtype=old.dtype, device=self.device)
            return torch.cat([old, rows.view(-1, *old.shape[1:])])

        configs = [GUARD if self.fixed else group.config for group in groups]
        self._configs += configs
        self.values = behind(self.values, [group.scale for group in groups])
        self.states = behind(self.states, [list(group.state) for group in groups])
        self._config_rows = behind(self._config_rows, [config.row() for config in configs])
        self.forget()

    def forget(self) -> None:
        """After the values were written: drop what was computed from them."""
        self._inverses: dict[torch.device, Sequence[Tensor]] = {}
        self._ratios: dict[tuple[int, int, torch.device], Tensor] = {}

    def configure(self, group: int, config: GroupConfig) -> None:
        if self._configs[group] != config:
            self._configs[group] = config
            self._config_rows[group] = torch.tensor(config.row(), dtype=torch.float64, device="cpu")

    def inverse(self, group: int, device: torch.device) -> Tensor | None:
        """[] float32, the same tensor until the scales change; None: 1."""
        if self.fixed:
            return None
        inverses = self._inverses.get(device)
        if inverses is None:
            inverses = self._inverses[device] = place(_inverse(self.values), device).unbind()
        return inverses[group]

    def ratio(self, inner: int, outer: int, device: torch.device) -> Tensor:
        """[] float32: what a gradient with the scale of ``outer`` is multiplied by for ``inner``.

        Exact: scales of groups are powers of two.
        """
        key = (inner, outer, device)
        if key not in self._ratios:
            self._ratios[key] = place(self.values[inner] / self.values[outer], device)
        return self._ratios[key]

    def mask(self, groups: Iterable[int]) -> Tensor:
        """[groups] float32 of {0, 1}, 1 for some of them."""
        mask = torch.zeros(len(self), dtype=torch.float32, device="cpu")
        mask[list(groups)] = 1.0
        return place(mask, self.device)

    def update(self, found_inf: Tensor, present: Tensor | None) -> None:
        """Move the scales of the groups that were used.

        Args:
            found_inf: [groups] float32.
            present: [groups] bool, those that had a gradient; the others stay as they are; None:
                all of them.
        """
        update = torch.ops.fastemb.scale_update_
        if present is None:
            update(self.values, self.states, found_inf, self._config_rows)
        else:
            values, states = self.values.clone(), self.states.clone()
            update(values, states, found_inf, self._config_rows)
            self.values.copy_(torch.where(present, values, self.values))
            self.states.copy_(torch.where(present[:, None], states, self.states))
        # A loss that was scaled before cannot be differentiated any more; autograd says so.
        torch.autograd.graph.increment_version(self.values)
        self.forget()
