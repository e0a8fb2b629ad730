"""A scaler's groups: what is declared, registered, passed in the backward, saved and loaded."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from fastemb._inference import lasting
from fastemb.amp._fingerprint import parameters
from fastemb.amp._gradients import has_gradient
from fastemb.amp._graph import Link
from fastemb.amp._groups import (
    GUARD,
    MOST_STEPS,
    ROOT,
    ROOT_NAME,
    SMALLEST_SCALE,
    Group,
    GroupConfig,
    Scales,
    check_config,
    plain,
)
from fastemb.amp._iteration import Iteration, Leftovers
from fastemb.amp._registry import Registry
from fastemb.amp._statistics import Statistics
from fastemb.amp.boundary import boundary

_INIT_SCALE = 2.0**16
# Entries of torch's state that say how the scale moves.
_MOVES = ("growth_factor", "backoff_factor", "growth_interval")
# Those that a group has: `Group.state`.
_COUNTERS = ("growth_tracker", "skips")
_FIELDS = tuple(asdict(GroupConfig()))
_MODES = ("scale", "guard")
_OP = "GradScaler"


class GroupedScaler(torch.amp.GradScaler):
    """Base of `fastemb.amp.GradScaler`, which documents the arguments."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("_unscale_grads_", "_maybe_opt_step"):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__}.{name} would never be called: {_OP} has passes of its own; "
                    "override unscale_ or step, or use process_group, skip and stats"
                )

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = _INIT_SCALE,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        groups: Mapping[str, GroupConfig | Mapping[str, Any]] | None = None,
        skip: Literal["optimizer", "group", "all"] = "optimizer",
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int = 50,
        alarm: Literal["warn", "raise"] = "warn",
        mode: Literal["scale", "guard"] = "scale",
        process_group: Any = None,
    ) -> None:
        for name, value, choices in (
            ("skip", skip, ("optimizer", "group", "all")),
            ("alarm", alarm, ("warn", "raise")),
            ("mode", mode, _MODES),
        ):
            if value not in choices:
                raise ValueError(f"{_OP}: {name} must be one of {choices}, got {value!r}")
        if not isinstance(max_consecutive_skips, (int, float)):
            raise TypeError(
                f"{_OP}: max_consecutive_skips must be a number, got {max_consecutive_skips!r}"
            )
        if groups is not None and not isinstance(groups, Mapping):
            raise TypeError(f"{_OP}: groups must map names to GroupConfig or dict, got {groups!r}")
        if not max_consecutive_skips >= 1:
            raise ValueError(
                f"{_OP}: max_consecutive_skips must be >= 1, got {max_consecutive_skips!r}"
            )
        if mode == "guard":
            if init_scale not in (_INIT_SCALE, 1.0):
                raise ValueError(
                    f"{_OP}: init_scale must be left out with mode='guard', whose scale is 1, "
                    f"got {init_scale!r}"
                )
            init_scale = 1.0
        numbers = (init_scale, growth_factor, backoff_factor, growth_interval)
        super().__init__(device, *map(plain, numbers), enabled)  # type: ignore[call-arg]
        self._skip = skip
        self._guard = mode == "guard"
        self._process_group = process_group
        self._alarm = (max_consecutive_skips, alarm)
        self._limits = (
            SMALLEST_SCALE if min_scale is None else float(min_scale),
            math.inf if max_scale is None else float(max_scale),
            hysteresis,
        )
        self._scales: Scales | None = None
        self._steps = 0
        self._start_over()
        if not self._enabled:
            return
        self._groups = [Group(ROOT_NAME, self._root_config(), self._init_scale)]
        if not self._guard:
            check_config(_OP, self._groups[ROOT].config, exact=False)
        for name, config in (groups or {}).items():
            self._declare(
                name, config if isinstance(config, GroupConfig) else _config_from(name, config)
            )

    def _start_over(self) -> None:
        """Forget what belongs to one process and one model."""
        self._registry = Registry()
        self._iteration = Iteration(self._steps)
        self._leftovers = Leftovers()
        self._agreed_names = ""  # the groups that all processes have had
        self._statistics = Statistics(self._registry.name_of, *self._alarm)
        # By id of the optimizer: whether its last step was skipped.
        self._verdicts: dict[int, tuple[weakref.ref[Any], Tensor | bool]] = {}

    # ---- groups ----

    @property
    def group_names(self) -> list[str]:
        """Names of the groups; the first is "root"."""
        return [group.name for group in self._groups] if self._enabled else [ROOT_NAME]

    def _root_config(self) -> GroupConfig:
        if self._guard:
            return GUARD
        smallest, largest, hysteresis = self._limits
        return GroupConfig(
            self._init_scale,
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            hysteresis,
            smallest,
            largest,
        )

    def _declare(self, name: str, config: GroupConfig) -> int:
        _check_name(name)
        if not self._guard:
            root = self._root_config()
            if self._scales is not None:  # this waits for the device, once for each late group
                root = replace(root, init_scale=float(self._scales.values[ROOT]))
            check_config(_OP, root, exact=True)
        check_config(f"{_OP}: groups[{name!r}]", config, exact=True)
        group = Group(name, config, self._first_scale(config, self._init_scale))
        self._groups.append(group)
        if self._scales is not None:
            self._scales.add([group])
            with lasting():
                self._iteration.grow(len(self._groups))
        return len(self._groups) - 1

    def _first_scale(self, config: GroupConfig, root: float) -> float:
        """What a group starts with next to a root with the scale ``root``."""
        if self._guard:
            return 1.0
        return config.limited(root) if config.init_scale is None else config.init_scale

    def _group(self, name: str) -> int:
        """The number of a group, declared by default."""
        names = self.group_names
        return names.index(name) if name in names else self._declare(name, GroupConfig())

    def boundary(self, x: Tensor, group: str) -> Tensor:
        """Identity; parameters that the loss reaches only through it belong to ``group``.

        In the backward, the gradient is multiplied by the group's scale over the scale outside.
        Place it where the gradient is still FP32: at the root of a branch such as an auxiliary
        head. A loss with a boundary has to go through `scale`, or the backward raises.

        Args:
            x: any floating tensor. Its gradient may be dense or sparse COO.
            group: a name, of a new group or of one there is; "root" for the scale of the loss.

        Returns:
            A view of ``x``, which cannot be changed in place; ``x`` where no gradient is wanted.

        Raises:
            TypeError: ``x`` is complex, or of a dtype that gradients cannot be scaled in.
        """
        if not self._enabled or not x.requires_grad or not torch.is_grad_enabled():
            return x
        return boundary(x, self._link(group, group, 0))

    def _link(self, group: str, name: str, inner: int) -> Link:
        return Link(self, self._group(group), name, inner)

    def register(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Tell the scaler about a model, and about optimizers that `step` has not seen yet.

        Only of optimizers that it knows can it see gradients that wait for a step of their own.
        Names its parameters in statistics and messages, makes each `BoundaryLinear` begin its
        group, and counts what flows into the tables of `fastemb.nn`. Call it again for layers that
        come later. The scaler keeps neither alive; copies and pickles of either are without.

        Raises:
            ValueError: a `DistributedDataParallel` with a table of low precision, whose gradients
                it cannot reduce.
        """
        if not self._enabled:
            return
        for group in self._registry.register(self, model):
            self._group(group)
        for optimizer in optimizers:
            self._meet(optimizer)

    def _enter(self, link: Link, outer: int) -> None:
        """A loss that is being scaled has a boundary."""
        if link.scaler is not self:
            raise RuntimeError(
                f"{_OP}: the boundary {link.name} belongs to another GradScaler than the one that "
                "scales the loss"
            )
        iteration, scales = self._iteration, self._scales
        link.enter(outer, iteration.number)
        # Made here and not in the backward, whose streams do not wait for each other.
        assert scales is not None
        scales.inverse(outer, scales.device)
        scales.ratio(link.group, outer, scales.device)
        iteration.boundary_flags(link.group, outer, scales.device, len(scales))
        iteration.stats_of(link.name, scales.device)

    # ---- in the backward ----

    def _pass_boundary(self, link: Link, grad: Tensor) -> Tensor:
        """The gradient behind a boundary."""
        iteration, scales = self._iteration, self._scales
        if scales is None or link.outer is None or link.iteration != iteration.number:
            raise RuntimeError(
                f"{_OP}: a gradient came to the boundary of group {self.group_names[link.group]!r} "
                f"({link.name}) from a loss that did not go through scaler.scale() since the last "
                "update()"
            )
        if grad.layout == torch.sparse_coo:  # of a weight with rows that were looked up
            return torch.sparse_coo_tensor(
                grad._indices(),
                self._pass_boundary(link, grad._values()),
                grad.shape,
                is_coalesced=grad.is_coalesced(),
                check_invariants=False,
            )
        device = grad.device
        return torch.ops.fastemb.boundary_gradient(
            grad.contiguous(),
            scales.ratio(link.group, link.outer, device),
            scales.inverse(link.outer, device),
            iteration.boundary_flags(link.group, link.outer, device, len(scales)),
            iteration.stats_of(link.name, device),
        )

    def _look(self, name: str, param: Tensor, grad: Tensor) -> None:
        """Count the gradient that comes into the table ``param``."""
        iteration, scales = self._iteration, self._scales
        if scales is None or not iteration.scaled:
            return
        inverse = scales.inverse(iteration.group_of(param) or ROOT, grad.device)
        stats = iteration.stats_of(name, grad.device)
        grad = grad.detach().contiguous()
        torch.ops.fastemb.grad_check_([grad], inverse, None, stats, None, False)

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        raise NotImplementedError

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        assert self._scales is None, "the scale is on its device already"
        root = self._groups[ROOT]
        root.config, root.scale = self._root_config(), self._init_scale
        root.state = (self._init_growth_tracker, *root.state[1:])
        self._scales = Scales(self._groups, dev, fixed=self._guard)

    # torch's attributes are views of the group's state. There are programs that assign to them, to
    # keep the scale from falling, which must not part the scale of the loss from that of gradients.

    @property
    def _scale(self) -> Tensor | None:
        scales = self._started()
        return None if scales is None else scales.values[ROOT]

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        scales = self._started()
        if scales is None or value is None:  # None is what torch begins with
            return
        if self._guard:
            raise ValueError(f"{_OP}: there is no scale to set with mode='guard'")
        self._check_scale(_OP, "_scale", value)
        with lasting():
            values = scales.values.clone()  # graphs may need the old ones
            values[ROOT] = value
        scales.values = values
        scales.forget()

    @property
    def _growth_tracker(self) -> Tensor | None:
        scales = self._started()
        return None if scales is None else scales.states[ROOT, 0]

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor | None) -> None:
        scales = self._started()
        if scales is not None and value is not None:
            scales.states[ROOT, 0] = value

    def _check_scale(self, where: str, name: str, value: float | Tensor) -> None:
        """Raise `ValueError` for a scale, the argument ``name``, that the root cannot have.

        With groups, this waits for one on a device.
        """
        grouped = len(self._groups) > 1
        if isinstance(value, Tensor):
            if value.numel() != 1 or (value.device.type != "cpu" and not grouped):
                return  # torch refuses several
            value = float(value)
        config = replace(self._root_config(), init_scale=value)
        check_config(where, config, exact=grouped, scale=name)

    def set_growth_factor(self, new_factor: float) -> None:
        """As `torch.amp.GradScaler` does it; `ValueError` for one that is not > 1."""
        self._check_moves("set_growth_factor", growth_factor=new_factor)
        super().set_growth_factor(plain(new_factor))

    def set_backoff_factor(self, new_factor: float) -> None:
        """As `torch.amp.GradScaler` does it; `ValueError` for one not between 0 and 1."""
        self._check_moves("set_backoff_factor", backoff_factor=new_factor)
        super().set_backoff_factor(plain(new_factor))

    def set_growth_interval(self, new_interval: int) -> None:
        """As `torch.amp.GradScaler` does it; `ValueError` for one that is no int >= 1.

        One that the clean steps since the last growth have reached makes the scale grow after the
        next one. torch's scaler, which waits for equality, would never grow again.
        """
        self._check_moves("set_growth_interval", growth_interval=new_interval)
        super().set_growth_interval(plain(new_interval))

    def _check_moves(self, setter: str, **moves: Any) -> None:
        if self._enabled and not self._guard:
            config = replace(self._root_config(), init_scale=None, **moves)
            check_config(f"{_OP}.{setter}", config, exact=len(self._groups) > 1)

    def _started(self) -> Scales | None:
        scales: Scales | None = vars(self).get("_scales")  # torch assigns before there are any
        return scales

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, which its scaler loads, and "fastemb" with the groups."""
        state = super().state_dict()
        if not self._enabled:
            return state
        groups: dict[str, dict[str, Any]] = {}
        for group in self._current_groups():
            entry = {} if group.name == ROOT_NAME else asdict(group.config)
            entry |= zip(_COUNTERS, group.state, strict=True)
            groups[group.name] = entry | {"scale": group.scale}
        mode = "guard" if self._guard else "scale"
        state["fastemb"] = {"version": 1, "mode": mode, "groups": groups}
        return state

    def get_scale(self, group: str = ROOT_NAME) -> float:
        """The scale of a group, by default the root's; 1 where scaling is disabled.

        Waits for the device.

        Raises:
            ValueError: a name that no group has.
        """
        if group == ROOT_NAME:
            return super().get_scale()
        if group not in self.group_names:
            raise ValueError(
                f"{_OP}: group must be one of {', '.join(self.group_names)}, got {group!r}"
            )
        return next(g.scale for g in self._current_groups() if g.name == group)

    def _current_groups(self) -> list[Group]:
        """The groups as they are on the device."""
        if self._scales is None:
            return self._groups
        values = self._scales.values.tolist()
        states = self._scales.states.tolist()
        return [
            replace(group, scale=value, state=tuple(state))
            for group, value, state in zip(self._groups, values, states, strict=True)
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this scaler, or one of torch's: then groups start with its scale.

        Groups that the state has and this scaler does not are declared as they were; groups that it
        does not have start over, and so do all where the state is one of ``mode="guard"``, which
        has no scales. With ``mode="guard"`` all scales are 1 whatever the state. A scale of the
        root beyond the limits of this scaler, such as the 0 that torch's reaches, becomes the
        nearest that they allow.

        Raises:
            ValueError, TypeError: a version that is not known; an entry that is missing or makes no
                sense; a scale that is no power of two where there are groups. Nothing is loaded.
            RuntimeError: there are gradients of a loss that was scaled since the last `update`.
        """
        if not self._enabled:
            return
        if self._pending():
            raise RuntimeError(
                f"{_OP}.load_state_dict: there are gradients that have the scales of before and "
                "have not been used; call step() and update(), or zero_grad(), first"
            )
        if not state_dict:
            super().load_state_dict(state_dict)  # torch refuses it
        saved_by, saved, root_state = _saved_groups(state_dict)
        own = {group.name: group.config for group in self._groups[1:]}
        names = [*own, *(name for name in saved if name not in own)]
        numbers = self._numbers_of(state_dict, grouped=bool(names))
        groups = []
        for name in names:
            group = saved.get(name) or Group(name, own[name], numbers["scale"])
            if saved_by == "guard":
                group.config = own.get(name, group.config)
            if self._guard or saved_by == "guard" or (saved_by == "scale" and name not in saved):
                group.scale = self._first_scale(group.config, numbers["scale"])
            elif saved_by == "torch":
                group.scale = group.config.limited(group.scale)
            groups.append(group)
        super().load_state_dict({**state_dict, **numbers})
        root_state = (self._init_growth_tracker, *root_state[1:])
        root = Group(ROOT_NAME, self._root_config(), self._init_scale, root_state)
        self._groups = groups = [root, *groups]
        if self._scales is not None:
            self._scales = Scales(groups, self._scales.device, fixed=self._guard)
        self._per_optimizer_states.clear()
        self._iteration = Iteration(self._iteration.number + 1)

    def _numbers_of(self, state_dict: Mapping[str, Any], *, grouped: bool) -> dict[str, Any]:
        """torch's entries as the root takes them over, once they were found to make sense."""
        where = f"{_OP}.load_state_dict"
        numbers = _entries(where, state_dict, ["scale", *_MOVES, "_growth_tracker"])
        numbers = {name: plain(value) for name, value in numbers.items()}
        scale = numbers["scale"]
        if not isinstance(scale, (int, float)) or not 0 <= scale < math.inf:
            raise ValueError(f"{where}: scale must be a finite number >= 0, got {scale!r}")
        limits = self._root_config()
        numbers["scale"] = scale = limits.limited(scale)
        loaded = replace(limits, init_scale=scale, **{name: numbers[name] for name in _MOVES})
        check_config(where, loaded, exact=grouped and not self._guard)
        numbers["_growth_tracker"] = _count(where, "_growth_tracker", numbers["_growth_tracker"])
        return numbers

    def _pending(self) -> bool:
        """Whether a known parameter has a gradient of this iteration that no step has used."""
        if not self._iteration.scaled:
            return False
        for optimizer in self._registry.optimizers():
            state = self._per_optimizer_states.get(id(optimizer))
            stepped = state is not None and state["stage"] is OptState.STEPPED
            if not stepped and any(has_gradient(p) for p in parameters(optimizer)):
                return True
        return self._iteration.pending()

    def __getstate__(self) -> dict[str, Any]:
        if not self._enabled:
            state = self.__dict__.copy()
        else:
            state = super().__getstate__()
            state["_groups"] = [replace(group) for group in self._current_groups()]
        for name in ("_scales", "_registry", "_iteration", "_leftovers", "_statistics"):
            del state[name]
        del state["_verdicts"], state["_process_group"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._scales = None
        self._process_group = None
        self._start_over()


def _saved_groups(
    state_dict: Mapping[str, Any],
) -> tuple[str, dict[str, Group], tuple[int, int]]:
    """What a state has of groups, once that was found to make sense.

    Returns:
        Who has saved it: "torch", or the mode of a `GradScaler`; all groups but the root; the
        `Group.state` of that.
    """
    where = f"{_OP}.load_state_dict"
    saved: dict[str, Group] = {}
    root = (0, 0)
    if "fastemb" not in state_dict:
        return "torch", saved, root
    own = state_dict["fastemb"]
    version = _entries(f"{where}: fastemb", own, ["version"])["version"]
    if version != 1:
        raise ValueError(f"{where}: cannot load a state of version {version!r}")
    entries = _entries(f"{where}: fastemb", own, ["groups"])["groups"]
    mode = own.get("mode", "scale")  # which the first states did not have
    if mode not in _MODES:
        raise ValueError(f"{where}: fastemb: mode must be one of {_MODES}, got {mode!r}")
    for name, entry in _entries(f"{where}: groups", entries, entries).items():
        at = f"{where}: groups[{name!r}]"
        counters = _entries(at, entry, _COUNTERS).items()
        growth, skips = (_count(at, counter, value) for counter, value in counters)
        state = (growth, skips)
        if name == ROOT_NAME:  # the rest of it is in torch's entries
            root = state
            continue
        _check_name(name)
        config = GroupConfig(**_entries(at, entry, _FIELDS))
        check_config(at, config, exact=True)
        scale = plain(_entries(at, entry, ["scale"])["scale"])
        if not isinstance(scale, (int, float)):
            raise TypeError(f"{at}: scale must be a number, got {scale!r}")
        if mode == "scale":
            check_config(at, replace(config, init_scale=scale), exact=True)
        saved[name] = Group(name, config, float(scale), state)
    return mode, saved, root


def _entries(where: str, state: Any, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise TypeError(f"{where} must be a dict, got {state!r}")
    missing = [name for name in names if name not in state]
    if missing:
        raise ValueError(f"{where}: the state has no {', '.join(missing)}")
    return {name: state[name] for name in names}


def _count(where: str, name: str, value: Any) -> int:
    value = plain(value)
    if not isinstance(value, (int, float)) or not 0 <= value <= MOST_STEPS or value != int(value):
        raise ValueError(
            f"{where}: {name} must be a whole number from 0 to 2**31 - 1, got {value!r}"
        )
    return int(value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or name == ROOT_NAME:
        raise ValueError(f"{_OP}: a group must have a name other than 'root', got {name!r}")


def _config_from(name: str, values: Mapping[str, Any]) -> GroupConfig:
    if not isinstance(values, Mapping):
        raise TypeError(f"{_OP}: groups[{name!r}] must be a GroupConfig or dict, got {values!r}")
    unknown = set(values) - set(asdict(GroupConfig()))
    if unknown:
        known = ", ".join(asdict(GroupConfig()))
        raise ValueError(
            f"{_OP}: groups[{name!r}] has {', '.join(sorted(unknown))}; it can have {known}"
        )
    return GroupConfig(**values)
