"""Which slots of a device cache go to other rows: scores of slots, and their order.

Scores are int64, none negative; the lowest goes first. Ranking all slots costs some ten times as
much as planning a batch, so one ranking serves many plans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastemb._memory import advise_huge_pages

# Score of a slot with nothing in it: ranks behind every other.
EMPTY = 2**63 - 1
# A ranking brings the slots / _RANKED_SHARE lowest in order. The larger this part, the rarer the
# rankings, and the longer the rows that came after one are safe.
_RANKED_SHARE = 4
# Uses per slot after which older uses count half: the W = 10 x cache size of TinyLFU (Einziger,
# Friedman, Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", 2017).
_USES_PER_HALVING = 10
# Weight of a use at which all counts are scaled down, exactly; far from both ends of FP32.
_LARGEST_WEIGHT = 2.0**60


def host_array(size: int, dtype: torch.dtype) -> Tensor:
    """[size], not written to yet; its elements are looked up in any order."""
    array = torch.empty(size, dtype=dtype, device="cpu")
    advise_huge_pages(array)
    return array


class Recency:
    """Scores by last use: the number of the plan."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """As new."""
        self._number = 1

    def score(
        self, rows: Tensor, counts: Tensor | None, slots: Tensor, missing: Tensor, scores: Tensor
    ) -> Tensor:
        """Scores ([n] int64) that ``rows`` have with the use that comes next; changes nothing.

        Args:
            rows: [n] int64.
            counts: [n] integers, how often each is used; None: once.
            slots: [n] int64; any slot for a row that is not in the cache.
            missing: [m] int64, positions of these.
            scores: of all slots.
        """
        return rows.new_full((len(rows),), self._number)

    def used(self, number: int) -> None:
        """That use, of ``number`` rows, has happened."""
        self._number += 1

    def leave(self, rows: Tensor, scores: Tensor) -> None:
        """``rows`` ([n] int64), with ``scores`` ([n]), are no longer in the cache."""

    def rescale(self, scores: Tensor) -> None:
        """Keep numbers in range, also in ``scores``, those of all slots; they rank as before."""


class Frequency(Recency):
    """Scores by how often a row was used, then by last use.

    The count of a row is in the score of its slot, and in ``_counts`` while it has none. Instead of
    halving all counts now and then, a use weighs twice as much from then on: that ranks the same,
    and takes no pass over the table. FP32 counts saturate of themselves, at 2**24 times the
    present weight.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self._counts = host_array(num_rows, torch.float32)
        self._uses_per_halving = _USES_PER_HALVING * num_slots
        super().__init__()

    def clear(self) -> None:
        super().clear()
        self._counts.zero_()
        self._uses = 0
        self._weight = 1.0

    def score(
        self, rows: Tensor, counts: Tensor | None, slots: Tensor, missing: Tensor, scores: Tensor
    ) -> Tensor:
        total = _unpack(scores.index_select(0, slots))
        total.index_copy_(0, missing, self._counts.index_select(0, rows.index_select(0, missing)))
        total.add_(self._weight if counts is None else counts.float().mul_(self._weight))
        return _pack(total, self._number)

    def used(self, number: int) -> None:
        super().used(number)
        self._uses += number
        if self._uses >= self._uses_per_halving:
            self._uses = 0
            self._weight *= 2

    def leave(self, rows: Tensor, scores: Tensor) -> None:
        self._counts.index_copy_(0, rows, _unpack(scores))

    def rescale(self, scores: Tensor) -> None:
        if self._weight < _LARGEST_WEIGHT:
            return
        self._counts.div_(self._weight)
        scaled = _pack(_unpack(scores).div_(self._weight), scores)
        torch.where(scores == EMPTY, scores, scaled, out=scores)
        self._weight = 1.0


def _pack(counts: Tensor, recency: Tensor | int) -> Tensor:
    """Ranks by ``counts`` (FP32, none negative), then by the low half of ``recency``."""
    # Floats that are not negative rank as their bits do.
    return (counts.view(torch.int32).long() << 32).bitwise_or_(recency & 0xFFFFFFFF)


def _unpack(scores: Tensor) -> Tensor:
    """The counts; something else for empty slots."""
    return (scores >> 32).int().view(torch.float32)


class Ranking:
    """The slots with the lowest scores, in order, and how far they were taken."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The scores are no longer what they were."""
        self._slots = self._scores = torch.empty(0, dtype=torch.int64, device="cpu")
        self._next = 0

    def take(self, number: int, scores: Tensor, pins: Tensor) -> Tensor:
        """``number`` slots ([number] int64), neither pinned nor empty; there must be that many."""
        victims = self._take(number, scores, pins)
        if victims is None:
            # All of them from the new ranking, which knows better than what was left of the old.
            self._rank(max(number, len(scores) // _RANKED_SHARE), scores, pins)
            victims = self._take(number, scores, pins)
            assert victims is not None, "more slots wanted than there are"
        return victims

    def _rank(self, number: int, scores: Tensor, pins: Tensor) -> None:
        lowest = torch.where(pins == 0, scores, EMPTY).topk(number, largest=False)
        known = int((lowest.values != EMPTY).sum())
        self._scores, self._slots = lowest.values[:known], lowest.indices[:known]
        self._next = 0

    def _take(self, number: int, scores: Tensor, pins: Tensor) -> Tensor | None:
        """The next ``number`` of those that are still as when ranked; None: there are fewer."""
        window = number + number // 4
        while self._next + number <= len(self._slots):
            part = slice(self._next, self._next + window)
            slots = self._slots[part]
            # Used since, dropped, or all were rescaled: has another score.
            same = scores.index_select(0, slots) == self._scores[part]
            idle = same.logical_and_(pins.index_select(0, slots) == 0).nonzero().view(-1)
            if len(idle) >= number:
                self._next += int(idle[number - 1]) + 1
                return slots.index_select(0, idle[:number])
            if part.stop >= len(self._slots):
                break
            window *= 2
        return None
