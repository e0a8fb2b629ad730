"""A table in host memory with 5 % of its rows on the device, and the bits of training without that.

    python examples/offload.py

The model says from its schedule whether a flight will be more than 15 minutes late: one table of
138,480 rows for all features and crosses, an `EmbeddingBag` that sums the 13 rows of a flight, and
an MLP, in plain torch. It is trained on the flights of January to October and judged by those of
November and December, AUC 0.622. Flights held out at random would give 0.677, but then other
flights of the same days are in the training data, which nobody has in advance. What delays flights
most, the weather and the delay at departure, no schedule knows. A second epoch makes it worse: the
crosses are learnt by heart.

Three runs, the same but for the place of the table:
1. in memory, with its Adam states, as `fastemb.convert(model, sparse="fused")` leaves it
2. offloaded: 5 % of the rows in the cache, the row used least leaves it
3. the same, but the row used longest ago leaves

The losses of all steps, the weights, the Adam states and the predictions of 2 and 3 have to be
those of 1, bit for bit, or this program fails. In the end one bit in host memory is turned over:
the row is named when it is used, before anything is computed with it, and put right.

Without a GPU the "device" is a second place in the same memory, and threads move the records. That
shows that the bits are right and what is moved, but not what a link to a GPU takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import _offload_data as data
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from tqdm import tqdm

import fastemb
from fastemb.offload import IntegrityError, OffloadEngine, OffloadStats

LR = 1e-3
# A batch of 256 flights has some 2,100 distinct rows, the cache 6,924 slots: there is room for the
# batch under way and the two that are looked ahead at, and for what comes again after them.
CACHE, DEPTH = 0.05, 2
STAGING_BYTES = 256 << 10  # a step moves 400 kB in either direction
TABLE = "embedding"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Model(nn.Module):
    """Sum of the rows of a flight's ids, then an MLP. Nothing here knows of fastemb."""

    def __init__(self, num_ids: int, dim: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(num_ids, dim, mode="sum")
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.embedding(ids)).squeeze(1)  # [flights] float32, logits


class Loader:
    """Batches of (ids, late), in the order of `parts`."""

    def __init__(self, bags: data.Bags, parts: tuple[Tensor, ...]) -> None:
        self.bags, self.parts = bags, parts

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((self.bags.ids[part], self.bags.late[part]) for part in self.parts)


@dataclass
class Run:
    """One way of training, and what was seen of it.

    Attributes:
        engine: None: the table is in memory.
        losses: of the steps.
        stats: of the engine after the training.
        logits: of the held-out flights.
    """

    name: str
    model: Model
    optimizer: fastemb.optim.Adam
    engine: OffloadEngine | None
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    stats: OffloadStats | None = None
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    auc: float = 0.0


def make_run(name: str, policy: str | None, num_ids: int, seed: int) -> Run:
    torch.manual_seed(seed)
    model = Model(num_ids)
    engine = None
    if policy is None:
        fastemb.convert(model, sparse="fused")
    else:
        engine = OffloadEngine(
            device=DEVICE, cache=CACHE, policy=policy, depth=DEPTH, staging_bytes=STAGING_BYTES
        )
        fastemb.convert(model, offload=engine)
    model.to(DEVICE)  # but for an offloaded table
    optimizer = fastemb.optim.Adam(model.parameters(), lr=LR, lazy="rows")
    return Run(name, model, optimizer, engine)


def train(run: Run, loader: Loader) -> None:
    """The loop of any model; the wrapped loader is all there is to it."""
    engine = run.engine
    batches = loader if engine is None else engine.prefetch(loader, ids=lambda batch: batch[0])
    start = time.perf_counter()
    for ids, late in tqdm(batches, desc=run.name, unit="step"):
        run.optimizer.zero_grad()
        loss = loss_of(run.model(ids.to(DEVICE)), late.to(DEVICE))
        loss.backward()
        run.optimizer.step()
        run.losses.append(loss.item())
    if engine is not None:
        engine.flush()
        run.stats = engine.stats
    run.seconds = time.perf_counter() - start


@torch.no_grad()
def evaluate(run: Run, loader: Loader) -> None:
    engine = run.engine
    batches = loader if engine is None else engine.prefetch(loader, ids=lambda batch: batch[0])
    run.logits = torch.cat([run.model(ids.to(DEVICE)) for ids, _ in batches]).cpu()
    run.auc = float(roc_auc_score(loader.bags.late, run.logits))


# ---------------------------------------------------------------------------------------------
# what came out
# ---------------------------------------------------------------------------------------------


def tensors(run: Run) -> dict[str, Tensor]:
    """Everything that training has made: weights, Adam states, losses, predictions."""
    made = {"losses": torch.tensor(run.losses, dtype=torch.float64), "predictions": run.logits}
    made |= run.model.state_dict()
    for position, states in run.optimizer.state_dict()["state"].items():
        made |= {f"{name} of parameter {position}": value for name, value in states.items()}
    return made


def differences(run: Run, reference: Run) -> list[str]:
    """Names of what has not the bits of the reference."""

    def bits(value: Tensor) -> Tensor:  # 0.0 and -0.0 are not the same, a NaN is the same as itself
        return value.reshape(-1).view(torch.uint8).cpu()

    ours, theirs = tensors(run), tensors(reference)
    return sorted(ours.keys() ^ theirs.keys()) + [
        name
        for name, value in ours.items()
        if name in theirs
        and not (value.shape == theirs[name].shape and torch.equal(bits(value), bits(theirs[name])))
    ]


def memory(run: Run) -> tuple[int, int]:
    """Bytes of the table and its Adam states: on the host, and on the device."""
    weight = run.model.embedding.weight
    if run.engine is None:
        states = run.optimizer.state[weight]
        return 0, sum(t.nbytes for t in (weight, states["exp_avg"], states["exp_avg_sq"]))
    table = run.engine.tables[TABLE]
    slots = sum(t.nbytes for t in (*table.cache.values(), table.headers))
    slot_numbers = 4 * len(weight)  # an int32 for every row of the table
    return table.host.records.nbytes, slots + slot_numbers + 4 * STAGING_BYTES


def report(runs: list[Run]) -> str:
    """The results, one column per run."""

    def of_engine(form: str, value: Callable[[OffloadStats], float]) -> list[str]:
        return [format(value(run.stats), form) if run.stats else "-" for run in runs]

    equal = ["no" if differences(run, runs[0]) else "yes" for run in runs[1:]]
    rows = {
        "AUC, November and December": [f"{run.auc:.4f}" for run in runs],
        "bits equal": ["-", *equal],
        "distinct rows found in the cache": of_engine(".1%", lambda stats: stats.hit_rate),
        "MB moved to the device": of_engine(".0f", lambda stats: stats.bytes_to_device / 1e6),
        "MB moved to the host": of_engine(".0f", lambda stats: stats.bytes_to_host / 1e6),
        "checksums compared": of_engine(",", lambda stats: stats.checks),
        "transfer time hidden behind the steps": of_engine(".0%", lambda stats: stats.hidden_share),
        "ms per step": [f"{1e3 * run.seconds / len(run.losses):.1f}" for run in runs],
        "table and Adam states on the host, MB": [f"{memory(run)[0] / 1e6:.1f}" for run in runs],
        "table and Adam states on the device, MB": [f"{memory(run)[1] / 1e6:.1f}" for run in runs],
    }
    lines = [("", [run.name for run in runs]), *rows.items()]
    return "\n".join(f"{name:42}" + "".join(f"{c:>16}" for c in cells) for name, cells in lines)


def damage(run: Run, reference: Run) -> str:
    """Turn one bit over in host memory, see that it is noticed, and put the row right."""
    assert run.engine is not None
    engine, table = run.engine, run.engine.tables[TABLE]
    row = int((table.slots.slot_of < 0).nonzero()[0])  # not in the cache
    table.host.fields["exp_avg"][row].view(torch.uint8)[0] ^= 1
    try:
        run.model(torch.tensor([[row]], device=DEVICE))
    except IntegrityError as error:
        found = str(error)
    else:
        sys.exit("One bit was turned over in host memory, and nobody noticed")
    weight = reference.model.embedding.weight.detach()
    states = reference.optimizer.state[reference.model.embedding.weight]
    whole = {"weight": weight, "exp_avg": states["exp_avg"], "exp_avg_sq": states["exp_avg_sq"]}
    values = {name: rows[row : row + 1].cpu() for name, rows in whole.items()}
    engine.reset_rows(TABLE, torch.tensor([row]), values)
    if wrong := engine.verify()[TABLE] or differences(run, reference):
        sys.exit(f"A row was written again with reset_rows, but still wrong: {wrong}")
    return (
        f"One bit turned over in host memory, in a moment of row {row}. Its lookup raises\n"
        f"  IntegrityError: {found}\n"
        "Written again with reset_rows: all checksums right, all bits equal."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256, help="flights per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="beside those that move records")
    parser.add_argument("--quick", action="store_true", help="some steps on 3,000 flights")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.batch = min(args.batch, 16)

    start = time.perf_counter()
    flights = data.load(limit=3000 if args.quick else None)
    count = len(flights.train)
    print(
        f"{count:,} flights to train on, {len(flights.test):,} held out, "
        f"{flights.test.late.mean():.1%} of these late; {flights.num_ids:,} ids\n"
    )
    shuffle = torch.Generator().manual_seed(args.seed)
    parts = [
        part
        for _ in range(args.epochs)
        for part in torch.randperm(count, generator=shuffle).split(args.batch)
    ]
    held_out = torch.arange(len(flights.test)).split(args.batch)
    runs = [
        make_run(name, policy, flights.num_ids, args.seed)
        for name, policy in (("in memory", None), ("offload, lfu", "lfu"), ("offload, lru", "lru"))
    ]
    for run in runs:
        train(run, Loader(flights.train, tuple(parts)))
        evaluate(run, Loader(flights.test, held_out))
    print(f"\n{report(runs)}\n")
    different = {run.name: differences(run, runs[0]) for run in runs[1:]}
    if any(different.values()):
        sys.exit(f"Not the bits of the training in memory: {different}")
    print(f"{damage(runs[1], runs[0])}\n")
    print(
        f"{time.perf_counter() - start:.0f} s on {args.threads} threads, "
        f"torch {torch.__version__}, fastemb {fastemb.__version__}"
    )
    for run in runs[1:]:
        assert run.engine is not None
        run.engine.close()


if __name__ == "__main__":
    main()
