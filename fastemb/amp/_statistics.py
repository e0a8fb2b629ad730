"""What the passes over gradients have counted, copied from the device and read when it is there."""

from __future__ import annotations

import struct
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastemb._grad_reference import GRAD_STATS
from fastemb.amp._gradients import Counted

_COUNTERS = [name for name in GRAD_STATS._fields if name != "largest"]
_COLUMNS = len(GRAD_STATS)


@dataclass(eq=False)
class _Record:
    """The numbers of one iteration on their way to the host.

    Attributes:
        numbers: int64 on the host: a row of statistics for each gradient and boundary; then for
            each group the bits of its scale, three state counters, and whether it is to blame.
        arrived: set on the device after the copy; None where there was nothing to wait for.
    """

    step: int
    group_names: list[str]
    params: list[str]
    param_groups: list[int]
    boundaries: list[str]
    numbers: Tensor
    arrived: torch.cuda.Event | None

    def complete(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def skips(self) -> list[int]:
        """Consecutive iterations with an overflow, for each group."""
        groups = len(self.group_names)
        return self.numbers[-3 * groups : -groups].view(groups, 2)[:, 1].tolist()


class Statistics:
    """Numbers of the iterations, and the alarm where a group is skipped again and again.

    Args:
        name_of: what a parameter is called.
        max_consecutive_skips: of a group, after which there is an alarm.
        alarm: "warn" or "raise".
    """

    def __init__(
        self, name_of: Callable[[Tensor], str], max_consecutive_skips: int, alarm: str
    ) -> None:
        self._name_of = name_of
        self._most_skips = max_consecutive_skips
        self._alarm = alarm
        self._pending: deque[_Record] = deque()
        self._latest: _Record | None = None
        self._alarmed: set[str] = set()  # groups that were warned of

    def record(
        self,
        step: int,
        group_names: Sequence[str],
        counted: Sequence[Counted],
        boundaries: Mapping[str, Tensor],
        scales: Tensor,
        states: Tensor,
        blamed: Tensor,
    ) -> None:
        """Send the numbers of an iteration to the host, which does not wait for them.

        Args:
            scales: [groups], those that the iteration had.
            states, blamed: [groups, 2] and [groups], after the update.
        """
        device = scales.device
        pieces = [c.rows for c in counted] + list(boundaries.values())
        pieces += [scales.view(torch.int32), states, blamed]
        packed = torch.cat([p.to(device, torch.int64).reshape(-1) for p in pieces])
        if type(packed) is not Tensor:  # a fake one, which has no numbers
            return
        arrived = None
        if packed.is_cuda:
            packed = packed.to("cpu", non_blocking=True)  # into pinned memory
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
        elif device.type != "cpu":
            packed = packed.cpu()
        params = [self._name_of(p) for c in counted for p in c.params]
        groups = [g for c in counted for g in c.groups]
        self._pending.append(
            _Record(step, list(group_names), params, groups, list(boundaries), packed, arrived)
        )

    def read(self) -> None:
        """Take in what has arrived.

        Raises:
            RuntimeError: a group was skipped too often, with ``alarm="raise"``; each time that it
                is skipped once more.
        """
        while self._pending and self._pending[0].complete():
            self._latest = self._pending.popleft()
            self._check(self._latest)

    def latest(self, *, wait: bool) -> dict[str, Any]:
        if wait and self._pending:
            arrived = self._pending[-1].arrived
            if arrived is not None:
                arrived.synchronize()
        self.read()
        if self._latest is None:
            return {"step": 0, "groups": {}, "gradients": {}, "boundaries": {}}
        return self._unpack(self._latest)

    def _unpack(self, record: _Record) -> dict[str, Any]:
        groups = len(record.group_names)
        sizes = [_COLUMNS * len(record.params), _COLUMNS * len(record.boundaries)]
        sizes += [groups, 2 * groups, groups]
        gradients, boundaries, scales, states, blamed = record.numbers.split(sizes)
        found: dict[str, dict[str, Any]] = {}
        rows = gradients.view(-1, _COLUMNS).tolist()
        for name, group, row in zip(record.params, record.param_groups, rows, strict=True):
            counts = {"group": record.group_names[group], **_counts(row)}
            found[name] = _merged(found[name], counts) if name in found else counts
        group_states = zip(
            record.group_names,
            scales.tolist(),
            states.view(-1, 2).tolist(),
            blamed.tolist(),
            strict=True,
        )
        group_counts = {name: _counts([0] * _COLUMNS) for name in record.group_names}
        for counts in found.values():
            group_counts[counts["group"]] = _merged(group_counts[counts["group"]], counts)
        return {
            "step": record.step,
            "groups": {
                name: {
                    "scale": _float(scale),
                    "found_inf": bool(blame),
                    "skips": state[1],
                    "growth_tracker": state[0],
                    **group_counts[name],
                }
                for name, scale, state, blame in group_states
            },
            "gradients": found,
            "boundaries": {
                name: _counts(row)
                for name, row in zip(
                    record.boundaries, boundaries.view(-1, _COLUMNS).tolist(), strict=True
                )
            },
        }

    def _check(self, record: _Record) -> None:
        texts = []
        for group, skips in zip(record.group_names, record.skips(), strict=True):
            if skips == 0:
                self._alarmed.discard(group)
            if skips < self._most_skips or group in self._alarmed:
                continue
            if self._alarm == "warn":
                self._alarmed.add(group)
            numbers = self._unpack(record)
            texts.append(
                f"GradScaler: gradients of group {group!r} were not finite in {skips} consecutive "
                f"iterations (max_consecutive_skips={self._most_skips}); its scale is "
                f"{numbers['groups'][group]['scale']:g}, {_culprit(group, numbers)}"
            )
        if texts and self._alarm == "raise":
            raise RuntimeError("\n".join(texts))
        for text in texts:
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _culprit(group: str, numbers: dict[str, Any]) -> str:
    for name, counts in numbers["gradients"].items():
        if counts["group"] != group or not counts["nan"] + counts["infinite"]:
            continue
        cure = "; no scale cures NaN" if counts["nan"] else ""
        return (
            f"and the gradient of {name} has {counts['nan']} NaN and {counts['infinite']} infinite "
            f"elements of {counts['elements']}{cure}"
        )
    return "and the first values that were not finite are those of its boundary"


def _counts(row: list[int]) -> dict[str, Any]:
    counts: dict[str, Any] = {name: row[getattr(GRAD_STATS, name)] for name in _COUNTERS}
    counts["largest"] = _float(row[GRAD_STATS.largest])
    return counts


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Counts of both; what else ``a`` has."""
    both = {name: a[name] + b[name] for name in _COUNTERS}
    return {**a, **both, "largest": max(a["largest"], b["largest"])}


def _float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
