"""What happened to gradients since the last update, and what is left over from before it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastemb._grad_reference import GRAD_STATS
from fastemb.amp._fingerprint import Fingerprint, parameters
from fastemb.amp._gradients import Pass, has_gradient, values_of
from fastemb.amp._groups import ROOT, KeptScale, Scales, place


@dataclass
class Iteration:
    """From one update to the next.

    Attributes:
        number: counts the iterations.
        passes: by id of the optimizer.
        scaled: whether a loss was scaled.
        unwalked: whether one was scaled whose leaves were not looked for, as without groups.
        hides: whether the root of one has leaves that cannot be found.
        agreed: [groups] bool, the groups that had a gradient in any process of the last all_reduce.
        boundary_stats: by name and device, [8] int64.
    """

    number: int
    passes: dict[int, Pass] = field(default_factory=dict)
    scaled: bool = False
    unwalked: bool = False
    hides: bool = False
    agreed: Tensor | None = None
    boundary_stats: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)
    _groups: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    _present: set[int] = field(default_factory=lambda: {ROOT})
    # by device, [groups, groups, 2]: what boundary_gradient has found, by inner and outer group
    _flags: dict[torch.device, Tensor] = field(default_factory=dict)
    # the same, of gradients that a step has used before the flags started over
    _settled: dict[torch.device, Tensor] = field(default_factory=dict)
    _consumed: set[int] = field(default_factory=set)
    _used: bool = False

    # ---- groups of parameters ----

    def group_of(self, param: Tensor) -> int | None:
        """The group in which a loss has reached a parameter; None: none is known to have."""
        entry = self._groups.get(id(param))
        return None if entry is None or entry[0]() is not param else entry[1]

    def enter(self, param: Tensor, group: int, describe: Callable[[Tensor, int, int], str]) -> None:
        """Note the group of a parameter that a loss has reached.

        Raises:
            RuntimeError: it has another one; ``describe`` says so.
        """
        entry = self._groups.get(id(param))
        if entry is None or entry[0]() is not param:
            earlier = group
            self._consumed.discard(id(param))
            if self.unwalked and group != ROOT and has_gradient(param):
                earlier = ROOT
        else:
            earlier = entry[1]
        if earlier != group:
            raise RuntimeError(describe(param, earlier, group))
        self._groups[id(param)] = (weakref.ref(param), group)

    @property
    def present(self) -> list[int]:
        """The groups that had a gradient; the root always counts."""
        found = self._present.union(*(p.groups for p in self.passes.values()))
        return sorted(found)

    def has_unscaled(self, param: Tensor, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradient was unscaled in place, as one of this or another optimizer."""
        own = self.passes.get(id(optimizer))
        if own is not None and own.unscaled:
            return True
        unscaled = (p.gradients for p in self.passes.values() if p.unscaled)
        return any(gradients is not None and gradients.holds(param) for gradients in unscaled)

    def set_aside(self, key: int) -> None:
        """Let another optimizer have an id: what was found in the gradients of the first counts."""
        earlier = self.passes.pop(key, None)
        if earlier is not None:
            self.passes[min([0, *self.passes]) - 1] = earlier  # no id

    # ---- boundaries ----

    def boundary_flags(self, inner: int, outer: int, device: torch.device, groups: int) -> Tensor:
        """[2] float32, the ``flags`` of boundary_gradient."""
        self._present |= {inner, outer}
        if device not in self._flags:
            self._flags[device] = torch.zeros(groups, groups, 2, dtype=torch.float32, device=device)
        return self._flags[device][inner, outer]

    def consume(self, params: Iterable[Tensor]) -> None:
        """A step has used the gradients of ``params``, and the flags up to now count."""
        self._used = True
        if self._groups:
            self._consumed.update(id(p) for p in params if id(p) in self._groups)

    def pending(self) -> bool:
        """Whether a parameter that a loss has reached has a gradient that no step has used."""
        for key, (reference, _) in self._groups.items():
            param = reference()
            if key not in self._consumed and param is not None and has_gradient(param):
                return True
        return False

    def start_flags_over(self) -> None:
        """Before a further loss: forget what boundaries have found in gradients that were dropped.

        Flags belong to all gradients since they started; as long as one of those is there that no
        step has used, they stay. What a step has used still counts in `blamed`.
        """
        if not self._flags or self.pending():
            return
        for device, flags in self._flags.items():
            if self._used:
                earlier = self._settled.get(device)
                self._settled[device] = (
                    flags.clone() if earlier is None else torch.maximum(earlier, flags)
                )
            flags.zero_()
        self._used = False

    def stats_of(self, name: str, device: torch.device) -> Tensor:
        """[8] int64 for the statistics of what passes a boundary."""
        key = (name, device)
        if key not in self.boundary_stats:
            self.boundary_stats[key] = torch.zeros(
                len(GRAD_STATS), dtype=torch.int64, device=device
            )
        return self.boundary_stats[key]

    def named_stats(self, device: torch.device) -> dict[str, Tensor]:
        """The statistics of boundaries, those of one name on several devices together."""
        named: dict[str, Tensor] = {}
        for (name, _), row in self.boundary_stats.items():
            row = place(row, device)
            if name in named:
                largest = torch.maximum(named[name], row)[GRAD_STATS.largest]
                row = named[name] + row
                row[GRAD_STATS.largest] = largest
            named[name] = row
        return named

    # ---- verdicts ----

    def flags(self, scales: Scales) -> Tensor | None:
        """[groups, groups, 2] bool on the device of the scales, None without boundaries."""
        return _any(self._flags.values(), scales.device)

    def set_flags(self, flags: Tensor) -> None:
        """Replace what all boundaries have found."""
        self._flags = {flags.device: flags}

    def in_groups(self, found: Tensor, scales: Scales) -> Tensor:
        """[groups] float32 of {0, 1}: whether gradients of the groups are to be thrown away.

        Args:
            found: [groups] float32, of gradients of parameters.
        """
        flags = self.flags(scales)
        if flags is None:
            return found
        return ((found != 0) | flags.any(2).any(1)).float()

    def blamed(self, scales: Scales) -> Tensor:
        """[groups] float32 of {0, 1}: the groups in which gradients became not finite.

        Those of parameters, at a boundary into the group, and at the boundaries out of it, unless
        what had come into the group was not finite already.
        """
        found = torch.zeros(len(scales), dtype=torch.float32, device=scales.device)
        for result in self.passes.values():
            for flags in result.found.values():
                found = torch.maximum(found, place(flags, scales.device))
        boundaries = _any([*self._flags.values(), *self._settled.values()], scales.device)
        if boundaries is None:
            return found
        incoming, made = boundaries.unbind(2)
        bad = (found != 0) | made.any(1) | incoming.any(0)
        return (bad & ~incoming.any(1)).float()

    def grow(self, groups: int) -> None:
        """Make room for further groups."""
        for result in self.passes.values():
            for device, found in result.found.items():
                result.found[device] = pad(found, (0, groups - found.numel()))
        if self.agreed is not None:
            self.agreed = pad(self.agreed, (0, groups - self.agreed.numel()))
        for all_flags in (self._flags, self._settled):
            for device, flags in all_flags.items():
                more = groups - flags.shape[0]
                all_flags[device] = pad(flags, (0, 0, 0, more, 0, more))


class Leftovers:
    """Gradients that no step has used before an update, with the scale that they have."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[Tensor], Fingerprint, KeptScale]] = {}
        # Whether a loss may have reached some of them unseen.
        self._hidden = False
        # Those to which a loss with another scale was added, or will be.
        self._mixed: dict[int, tuple[weakref.ref[Tensor], Fingerprint]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    def collect(
        self,
        optimizers: Iterable[tuple[torch.optim.Optimizer, bool]],
        iteration: Iteration,
        scales: Scales,
        origin_of: Callable[[Tensor], tuple[int, KeptScale | None] | None],
    ) -> None:
        """Before the scales are updated: look for gradients in optimizers without a step.

        Args:
            optimizers: those that are known, and whether they had a step.
            origin_of: the group of a gradient and its scale, as far as they are known.
        """
        new: dict[tuple[int, bool], KeptScale] = {}
        for optimizer, stepped in optimizers:
            for param in parameters(optimizer):
                origin = None if stepped or not has_gradient(param) else origin_of(param)
                if origin is None:
                    self._of.pop(id(param), None)
                    continue
                group, kept = origin
                unscaled = iteration.has_unscaled(param, optimizer)
                if kept is None or unscaled:
                    value = scales.values[group]
                    kept = new.setdefault(
                        (group, unscaled),
                        KeptScale(group, torch.ones_like(value) if unscaled else value.clone()),
                    )
                self._of[id(param)] = (weakref.ref(param), Fingerprint([param]), kept)
        self._hidden = False

    def scale_of(self, param: Tensor) -> KeptScale | None:
        """The scale of a gradient from before; None: of that none is there any more."""
        reference, gradient, kept = self._of.get(id(param), (None, None, None))
        if reference is None or reference() is not param:
            return None
        assert gradient is not None
        there = gradient.unchanged if self._hidden else gradient.holds
        return kept if there(param) else None

    def of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The parameters of an optimizer with a gradient from before."""
        if not self._of:
            return []
        return [param for param in parameters(optimizer) if self.scale_of(param) is not None]

    def follow(self, params: Iterable[Tensor]) -> None:
        """Their gradients were summed or unscaled, but are no others."""
        for param in params:
            reference, _, kept = self._of[id(param)]
            self._of[id(param)] = (reference, Fingerprint([param]), kept)

    def hide(self) -> None:
        """A loss may have reached any parameter: a gradient that was written since is its own."""
        self._hidden = True

    def meet(self, param: Tensor, scale: Tensor) -> None:
        """A loss with ``scale`` has reached a parameter.

        Waits for the device, but only where there is a gradient from before.
        """
        entry = self._of.get(id(param))
        if entry is None or entry[0]() is not param:
            return
        if not counts(param):
            del self._of[id(param)]
            self._mixed.pop(id(param), None)
        elif not bool(entry[2].value == scale):
            self._mixed[id(param)] = (weakref.ref(param), Fingerprint([param]))

    def mixed(self, param: Tensor) -> bool:
        """Whether a gradient is the sum of some with several scales."""
        entry = self._mixed.get(id(param))
        if entry is None:
            return False
        if entry[0]() is param and entry[1].holds(param) and counts(param):
            return True
        del self._mixed[id(param)]
        return False


def counts(param: Tensor) -> bool:
    """Whether there is a gradient that its scale matters to: zeros have any."""
    if param.grad is None:
        return has_gradient(param)
    return bool((values_of(param.grad) != 0).any())


def _any(all_flags: Iterable[Tensor], device: torch.device) -> Tensor | None:
    """Whether any of several flags is set, on ``device``; None where there are none."""
    found: Tensor | None = None
    for flags in all_flags:
        here = place(flags, device) != 0
        found = here if found is None else found | here
    return found
