"""What a scaler finds in gradients, and whose steps are skipped for it."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.nn.functional import pad

from fastemb.amp._fingerprint import parameters
from fastemb.amp._gradients import GradientCheck, Pass, has_gradient
from fastemb.amp._grouped import GroupedScaler
from fastemb.amp._groups import ROOT, KeptScale, place
from fastemb.amp._iteration import counts

_OP = "GradScaler"
# Groups up to which all processes reduce the same number of elements, whatever they have.
_ROOM = 16


class CheckingScaler(GroupedScaler):
    """Base of `fastemb.amp.GradScaler`: the passes over gradients and their verdicts."""

    def _examine(
        self,
        optimizer: torch.optim.Optimizer,
        op: str,
        *,
        max_norm: float | None = None,
        unscale: bool = False,
    ) -> Pass:
        """Look at the gradients of an optimizer as they are now; statistics count them once.

        What was found before counts no more, unless the gradients were unscaled since: then it is
        for the user to change them, but what `unscale_` has found stays, as in torch. A norm that
        they were to be clipped to stays while any of the gradients is there that it was given for.
        """
        scales, iteration = self._scales, self._iteration
        assert scales is not None
        earlier = iteration.passes.get(id(optimizer))
        if max_norm is None and earlier is not None and earlier.max_norm is not None:
            assert earlier.gradients is not None
            if earlier.gradients.survives(optimizer):
                max_norm = earlier.max_norm
        unscaled = earlier is not None and earlier.unscaled
        check = GradientCheck(
            f"{_OP}.{op}",
            scales,
            partial(self._origin, f"{_OP}.{op}", unscaled=unscaled),
            self._registry.name_of,
            norm=max_norm is not None,
            unscale=unscale,
            unscaled=unscaled,
            done=self._unscaled_elsewhere(optimizer),
            refuse=partial(self._refuse_mixed, f"{_OP}.{op}"),
        )
        others = (o for o in self._registry.optimizers() if o is not optimizer)
        kept = self._leftovers.of(optimizer)
        waiting = [o for o in others if self._stage(o) is not OptState.STEPPED]
        try:
            result = check.run(optimizer, waiting)
        except Exception:
            if self._process_group is not None:
                self._agree(None)
            raise
        self._leftovers.follow(kept)
        if earlier is not None and earlier.unscaled:
            result.stats = earlier.stats
            result.groups |= earlier.groups
            for device, found in earlier.found.items():
                flags = result.found_on(device, len(scales))
                torch.maximum(flags, found, out=flags)
        iteration.passes[id(optimizer)] = result
        if self._process_group is not None:
            self._agree(result)
        if max_norm is not None:
            result.max_norm, result.norm = max_norm, self._norm(result)
            result.clip = (max_norm / (result.norm + 1e-6)).clamp(max=1.0)
        return result

    def _known_origin(self, param: Tensor) -> tuple[int, KeptScale | None] | None:
        """The group of a gradient, and its scale if it is from before an update; None: unknown."""
        scales, iteration = self._scales, self._iteration
        assert scales is not None
        group = iteration.group_of(param)
        if group is not None:
            return group, None
        kept = self._leftovers.scale_of(param)
        if kept is not None:
            return kept.group, None if scales.fixed else kept
        if len(scales) == 1 or scales.fixed or iteration.unwalked or iteration.hides:
            return ROOT, None
        return None

    def _origin(self, op: str, param: Tensor, *, unscaled: bool) -> tuple[int, KeptScale | None]:
        """The same, where it has to be known: of gradients that have a scale and are not all 0."""
        origin = self._known_origin(param)
        if origin is not None:
            return origin
        if unscaled or not counts(param):
            return ROOT, None
        raise RuntimeError(
            f"{op}: {self._registry.name_of(param)} has a gradient, but no loss given to scale() "
            "since the last update() is known to reach it, so it may have the scale of any group; "
            "register() the optimizer if its gradients wait over an update(), give parameters to "
            "an autograd.Function as inputs, and reach them in every process (by 0 times the "
            "output of a branch that is not used)"
        )

    def _unscaled_elsewhere(self, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], bool]:
        """Whether the gradient of a parameter was unscaled as one of another optimizer.

        Raises:
            RuntimeError: only the device knows; the scaler was not told of both before.
        """
        passes = self._iteration.passes.items()
        others = [
            (result.gradients, result.handed_over)
            for key, result in passes
            if key != id(optimizer) and (result.unscaled or result.handed_over)
        ]

        def done(param: Tensor) -> bool:
            for gradients, handed_over in others:
                if gradients is None or not gradients.holds(param):
                    continue
                if handed_over:
                    raise RuntimeError(
                        f"{_OP}: {self._registry.name_of(param)} of a {type(optimizer).__name__} "
                        "is also one of an optimizer that unscales gradients by itself; tell the "
                        "scaler of both before their first step, by register()"
                    )
                return True
            return False

        return done

    def _shares(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether another optimizer has one of its parameters."""
        own = {id(param) for param in parameters(optimizer)}
        others = (o for o in self._registry.optimizers() if o is not optimizer)
        return any(id(param) in own for other in others for param in parameters(other))

    def _refuse_mixed(self, op: str, param: Tensor) -> None:
        if self._leftovers.mixed(param):
            raise RuntimeError(
                f"{op}: {self._registry.name_of(param)} has the gradients of losses with two "
                "scales: some are from before an update() that has changed its scale; call "
                "update() after the last backward of an accumulation, or zero_grad()"
            )

    def _refuse_other_scales(self, optimizer: torch.optim.Optimizer) -> None:
        """For optimizers that unscale all gradients by the scale of the root as it is now."""
        scales = self._scales
        assert scales is not None
        for param in filter(has_gradient, parameters(optimizer)):
            group, kept = self._origin(f"{_OP}.step", param, unscaled=False)
            if group == ROOT and kept is None:
                continue
            scale = scales.values[group] if kept is None else kept.value
            if not bool(scale == scales.values[ROOT]):
                raise RuntimeError(
                    f"{_OP}.step: {self._registry.name_of(param)} has another scale than the loss, "
                    f"by which {type(optimizer).__name__} unscales all gradients; use an optimizer "
                    "that does not take the scaler as an argument"
                )

    def _current(self, optimizer: torch.optim.Optimizer, op: str) -> Pass:
        """What is in the gradients as they are now: an earlier pass where it still holds."""
        result = self._iteration.passes.get(id(optimizer))
        if result is None or result.gradients is None or not result.gradients.matches(optimizer):
            return self._examine(optimizer, op)
        if self._process_group is not None:
            self._agree(result)  # those of another process may have changed
        return result

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Before anything else is done for an optimizer: it may have the id of one that is gone."""
        if self._registry.knows(optimizer):
            return
        key = id(optimizer)
        self._per_optimizer_states.pop(key, None)
        self._iteration.set_aside(key)
        self._registry.see(optimizer)

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def _drop_abandoned(self) -> None:
        """Before a further loss: forget what was found in gradients that were all thrown away."""
        iteration = self._iteration
        for optimizer in self._registry.optimizers():
            key = id(optimizer)
            if key not in iteration.passes or self._stage(optimizer) is OptState.STEPPED:
                continue
            if not any(has_gradient(param) for param in parameters(optimizer)):
                del iteration.passes[key]
                self._per_optimizer_states.pop(key)
        iteration.start_flags_over()

    def _agree(self, result: Pass | None) -> None:
        """One all_reduce of everything that was found; every process comes by here.

        Args:
            result: None: this process has refused its gradients.

        Raises:
            RuntimeError: another process has done so, or has other groups. Where only the device
                knows that, the step is skipped, and the process with the error ends the run.
        """
        scales, iteration = self._scales, self._iteration
        assert scales is not None
        groups, names = len(scales), "\0".join(self.group_names)
        if result is not None:
            result.groups |= set(iteration.present)
        found = torch.zeros_like(scales.values) if result is None else self._found(result)
        flags = iteration.flags(scales)
        if flags is None:
            flags = torch.zeros(groups, groups, 2, dtype=torch.float32, device=scales.device)
        present = scales.mask(iteration.present if result is None else result.groups)
        table = torch.cat([found[:, None], present[:, None], flags.flatten(1).float()], 1)
        # Padded: what differs in size, gloo would abort on.
        room = max(_ROOM, 1 << (groups - 1).bit_length())
        table = pad(table, (0, 2 * (room - groups), 0, room - groups))
        code = zlib.crc32(names.encode()) % 2**24  # that float32 has
        head = torch.tensor([result is None, code, -code], dtype=torch.float32, device="cpu")
        packed = torch.cat([place(head, scales.device), table.flatten()])
        torch.distributed.all_reduce(
            packed, torch.distributed.ReduceOp.MAX, group=self._process_group
        )
        if result is None:
            return
        refused, differ = packed[0] != 0, packed[1] + packed[2] != 0
        if scales.device.type == "cpu" or names != self._agreed_names:
            self._check_agreement(bool(refused), bool(differ))
            self._agreed_names = names
        table = packed[3:].view(room, -1)[:groups]
        result.found = {scales.device: torch.maximum(table[:, 0], (refused | differ).float())}
        iteration.agreed = table[:, 1] != 0
        if groups > 1:
            iteration.set_flags(table[:, 2 : 2 + 2 * groups].reshape(groups, groups, 2))

    def _check_agreement(self, refused: bool, differ: bool) -> None:
        if refused:
            raise RuntimeError(
                f"{_OP}: another process of process_group has refused its gradients; it says why"
            )
        if differ:
            raise RuntimeError(
                f"{_OP}: all processes of process_group must have the same groups in the same "
                f"order; this one has {', '.join(self.group_names)}, another one has others; name "
                "all of them in groups="
            )

    def _found(self, result: Pass) -> Tensor:
        """[groups] float32 of {0, 1} on the device of the scales."""
        scales = self._scales
        assert scales is not None
        flags = [place(f, scales.device) for f in result.found.values()]
        if len(flags) == 1:
            return flags[0]
        found = torch.zeros(len(scales), dtype=torch.float32, device=scales.device)
        for flag in flags:
            found = torch.maximum(found, flag)
        return found

    def _norm(self, result: Pass) -> Tensor:
        """[] float64: the norm of all unscaled gradients that are to be applied."""
        scales = self._scales
        assert scales is not None
        finite_only = self._skip == "group" and len(scales) > 1
        total = torch.zeros((), dtype=torch.float64, device=scales.device)
        found = self._iteration.in_groups(self._found(result), scales)
        for group, sums in result.square_sums:
            part = place(sums, scales.device).sum()
            if finite_only:
                part = torch.where(found[group] != 0, 0.0, part)
            total += part
        return total.sqrt()

    def _to_skip(self, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
        """Whether to skip the whole step, [], and whether each group, [groups]; {0, 1}."""
        scales, iteration = self._scales, self._iteration
        assert scales is not None

        def verdict(result: Pass) -> tuple[Tensor, Tensor]:
            found = iteration.in_groups(self._found(result), scales)
            if len(scales) == 1:
                return found[ROOT], found
            flags = [found[group] for group in sorted(result.groups)]
            policy = torch.amin if self._skip == "group" else torch.amax
            if iteration.agreed is not None:
                flags = [torch.where(iteration.agreed, found, found[ROOT])]
            return policy(torch.stack(flags)) if flags else found[ROOT] * 0, found

        if self._skip != "all":
            return verdict(iteration.passes[id(optimizer)])
        for other in self._registry.optimizers():
            if other is not optimizer and self._stage(other) is not OptState.STEPPED:
                self._current(other, "step")
        verdicts = [verdict(result)[0] for result in iteration.passes.values()]
        skip = torch.stack(verdicts).amax()
        return skip, skip.expand(len(scales))

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """torch's name for the pass that only reads."""
        self._check_scale_growth_tracker("_check_inf_per_device")
        self._meet(optimizer)
        return self._tell_torch(optimizer, self._examine(optimizer, "step"))

    def _tell_torch(self, optimizer: torch.optim.Optimizer, result: Pass) -> dict[Any, Any]:
        """Keep what torch's scaler keeps."""
        found = {}
        if result.groups:
            found = {device: flags.amax() for device, flags in result.found.items()}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found
