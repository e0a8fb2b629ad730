"""What every operator must return, from loops over positions in float64, and how far it may be off.

Nothing here calls an embedding operator or `fastemb`. Each expectation is an interval: the exact
value, widened by the textbook bound for rounding in the accumulation type, then rounded to the
type of the result. Both ends are rounded, so a result that was rounded twice is outside.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from lookups import Case
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


@dataclass(frozen=True)
class Expected:
    """Sums as numbers.

    Attributes:
        value: the sums in float64.
        size: the sums of the magnitudes of the terms.
        terms: number of terms of each sum, shape broadcastable to value.
    """

    value: Array
    size: Array
    terms: Array

    def check(self, got: Tensor, accumulation: torch.dtype) -> None:
        """Assert that ``got`` is a correctly rounded result of a sum in ``accumulation``."""
        assert tuple(got.shape) == self.value.shape, (tuple(got.shape), self.value.shape)
        with np.errstate(invalid="ignore", over="ignore"):
            # Each term: rounding of its weight, division by a count, product, and each addition;
            # then one division of the finished sum. (1 + u)^n - 1 < 1.01 n u for these n.
            slack = 1.01 * (self.terms + 4) * UNIT[accumulation] * self.size
            # Below the normal range errors are absolute.
            slack = slack + (self.terms + 4) * 2.0**-149 * (accumulation == torch.float32)
            slack = np.where(self.terms == 0, 0.0, slack)
            low, high = self.value - slack, self.value + slack
        finite = np.isfinite(self.value)
        result = got.detach().cpu().double().numpy()
        lowest = torch.from_numpy(low).to(got.dtype).double().numpy()
        highest = torch.from_numpy(high).to(got.dtype).double().numpy()
        inside = (lowest <= result) & (result <= highest)
        same = (result == self.value) | (np.isnan(result) & np.isnan(self.value))
        wrong = ~np.where(finite, inside, same)
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise AssertionError(
                f"{int(wrong.sum())} of {wrong.size} values are wrong; at {at}: got "
                f"{result[at]!r}, expected {self.value[at]!r} within [{lowest[at]!r}, "
                f"{highest[at]!r}]"
            )


def _numpy(tensor: Tensor) -> Array:
    return tensor.detach().cpu().double().numpy()


def bag_bounds(case: Case) -> list[tuple[int, int]]:
    """First and last-plus-one position of every bag."""
    if case.offsets is None:
        count, length = case.indices.shape
        return [(bag * length, (bag + 1) * length) for bag in range(count)]
    starts = case.offsets.tolist()
    if case.include_last_offset:
        return list(itertools.pairwise(starts))
    return list(zip(starts, [*starts[1:], case.indices.numel()], strict=True)) if starts else []


def _bags(case: Case) -> list[list[int]]:
    """Positions of every bag that are not padding."""
    ids = case.indices.reshape(-1).tolist()
    return [
        [position for position in range(begin, end) if ids[position] != case.padding_idx]
        for begin, end in bag_bounds(case)
    ]


def _sample_weights(case: Case) -> list[float] | None:
    samples = case.per_sample_weights
    return None if samples is None else samples.detach().double().reshape(-1).tolist()


def pooled(case: Case) -> Expected:
    """Sums or means of bags."""
    table, ids = _numpy(case.weight), case.indices.reshape(-1).tolist()
    samples = _sample_weights(case)
    bags = _bags(case)
    value = np.zeros((len(bags), table.shape[1]))
    size = np.zeros_like(value)
    for bag, positions in enumerate(bags):
        for position in positions:
            term = table[ids[position]]
            if samples is not None:
                with np.errstate(invalid="ignore"):
                    term = term * samples[position]
            with np.errstate(invalid="ignore"):
                value[bag] += term
                size[bag] += np.abs(term)
        if case.mode == "mean" and positions:
            value[bag] /= len(positions)
            size[bag] /= len(positions)
    terms = np.array([[float(len(positions))] for positions in bags]).reshape(len(bags), 1)
    return Expected(value, size, terms)


def winners(case: Case) -> NDArray[np.int64]:
    """Position within the bag of each column's largest value, the first NaN if any; -1 if empty."""
    table, ids = _numpy(case.weight), case.indices.reshape(-1).tolist()
    bags = _bags(case)
    best = np.full((len(bags), table.shape[1]), -1, dtype=np.int64)
    for bag, ((begin, _), positions) in enumerate(zip(bag_bounds(case), bags, strict=True)):
        if positions:
            # numpy's argmax is the first of the largest, and a NaN is larger than all else.
            first = table[[ids[position] for position in positions]].argmax(axis=0)
            best[bag] = np.array(positions)[first] - begin
    return best


def maxima(case: Case, places: NDArray[np.int64]) -> Tensor:
    """Table entries at ``places``, in the output dtype; zero in an empty bag."""
    ids = case.indices.reshape(-1)
    output = torch.zeros(places.shape, dtype=case.output_dtype)
    for bag, (begin, _) in enumerate(bag_bounds(case)):
        place = torch.from_numpy(places[bag])
        if len(place) and place[0] >= 0:
            chosen = case.weight[ids[begin + place], torch.arange(len(place))]
            output[bag] = chosen.to(case.output_dtype)
    return output


def row_gradient(case: Case) -> Expected:
    """Gradient of the whole table; ``terms`` is 0 for rows that no bag names."""
    rows, dim = case.weight.shape
    grad, ids = _numpy(case.grad_output), case.indices.reshape(-1).tolist()
    samples = _sample_weights(case)
    places = winners(case) if case.mode == "max" else None
    value, size = np.zeros((rows, dim)), np.zeros((rows, dim))
    terms = np.zeros((rows, 1))
    for bag, ((begin, _), positions) in enumerate(zip(bag_bounds(case), _bags(case), strict=True)):
        for position in positions:
            term = grad[bag]
            if places is not None:
                wins = places[bag] == position - begin
                term = np.where(wins, term, 0.0)
            with np.errstate(invalid="ignore"):
                if samples is not None:
                    term = term * samples[position]
                if case.mode == "mean":
                    term = term / len(positions)
                value[ids[position]] += term
                size[ids[position]] += np.abs(term)
            terms[ids[position]] += 1
    if case.scale_grad_by_freq:
        value /= np.maximum(terms, 1)
        size /= np.maximum(terms, 1)
    return Expected(value, size, terms)


def sample_gradient(case: Case) -> Expected:
    """Gradient of the per-sample weights, zero where a position is in no bag or is padding."""
    table, grad, ids = _numpy(case.weight), _numpy(case.grad_output), case.indices.reshape(-1)
    value, size = np.zeros(ids.numel()), np.zeros(ids.numel())
    terms = np.zeros(ids.numel())
    for bag, positions in enumerate(_bags(case)):
        for position in positions:
            with np.errstate(invalid="ignore"):
                products = table[int(ids[position])] * grad[bag]
                value[position] = products.sum()
                size[position] = np.abs(products).sum()
            terms[position] = table.shape[1]
            if case.mode == "mean":
                value[position] /= len(positions)
                size[position] /= len(positions)
    shape = tuple(case.indices.shape)
    return Expected(value.reshape(shape), size.reshape(shape), terms.reshape(shape))


def rows_in_use(case: Case) -> dict[int, list[int]]:
    """Row -> its positions in ascending order; rows ascending."""
    ids = case.indices.reshape(-1).tolist()
    found: dict[int, list[int]] = {}
    for positions in _bags(case):
        for position in positions:
            found.setdefault(ids[position], []).append(position)
    return {row: sorted(found[row]) for row in sorted(found)}
