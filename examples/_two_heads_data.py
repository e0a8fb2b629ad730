"""The reviews with four numbers and a second label each, for `two_heads.py`."""

from __future__ import annotations

from dataclasses import dataclass

import _reviews_data as data
import numpy as np
import torch
from torch import Tensor

NUMBERS = ("age", "characters", "reviews of the item", "reviews of the class")
_BROKEN_IN_A_SAMPLE = 8


@dataclass
class TwoHeads:
    """Reviews in the order of `reviews.train`, then `reviews.test`."""

    reviews: data.Reviews  # ids and the first label: is the item recommended?
    numbers: Tensor  # [reviews, 4] float32, standardised; NaN where the class is missing
    helpful: Tensor  # [reviews] float32: 1 if anybody found the review helpful

    @property
    def filled(self) -> Tensor:
        """`numbers` with the mean where one is missing."""
        return self.numbers.nan_to_num(0.0)

    @property
    def broken(self) -> Tensor:
        """[training reviews] bool: a number is missing."""
        return self.numbers[: len(self.reviews.train)].isnan().any(1)


def load(limit: int | None = None) -> TwoHeads:
    """Read the reviews, at most `limit` of them: then some more are made to miss their class, for
    a small sample has hardly one that does."""
    reviews = data.load(limit, word_pairs=False)
    frame = data.frame(limit)
    train = len(reviews.train)

    def how_often(column: str) -> np.ndarray:
        """Of a value of a column: how many training reviews have it. NaN where there is none."""
        counts = frame[column][:train].value_counts()
        known = frame[column].map(counts).fillna(0.0)
        return known.where(frame[column].notna()).to_numpy(np.float32)

    columns = (
        frame["Age"].to_numpy(np.float32),
        frame["Review Text"].str.len().to_numpy(np.float32),
        how_often("Clothing ID"),
        how_often("Class Name"),
    )
    numbers = torch.from_numpy(np.stack(columns, axis=1))
    numbers -= numbers[:train].nanmean(0)
    numbers /= numbers[:train].square().nanmean(0).sqrt()
    if limit is not None:
        numbers[torch.linspace(0, train - 1, _BROKEN_IN_A_SAMPLE).long(), -1] = torch.nan
    helpful = torch.tensor((frame["Positive Feedback Count"] > 0).to_numpy(np.float32))
    return TwoHeads(reviews, numbers, helpful)
