"""Does the customer recommend the item? One model with a large table, trained eight ways.

    python examples/reviews.py

1. torch, fp32 table, `SparseAdam`
2. torch, fp16 table, with an FP32 copy that `SparseAdam` trains: torch's optimizers cannot train
   the fp16 table itself (the first lines of the output show what each of them does)
3. fastemb, fp16 table, `fastemb.optim.Adam`, which keeps the FP32 copy itself
4. the same without a copy (stochastic rounding) and with bf16 moments: half the memory of 1
5. torch, fp32 table, dense gradients, `Adam`: every row moves in every step
6. fastemb, fp16 table, sparse gradients, `Adam(lazy="exact")`: what 5 computes, for the rows in use
7. 1 under fp16 autocast with `torch.amp.GradScaler`
8. 3 under fp16 autocast with `fastemb.amp.GradScaler` and a scale of its own for the table, which
   begins at the first layer (`BoundaryLinear`)

All start from the same weights and see the same batches, step by step in turn, so that a busy
machine slows all of them. In 7 and 8 a scale grows after 10 steps without an overflow: the default
of 2,000 is more than there are steps here, and the scales would stay where they begin. That a table
has a scale of its own does not matter here; `two_heads.py` shows when it does.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _reviews_data as data
import torch
from _reviews_figure import draw
from _reviews_probe import probe
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from tqdm import tqdm

import fastemb
from fastemb.amp import GradScaler

TABLE_LR, MLP_LR = 1e-2, 1e-3
GRADIENTS_EVERY = 3  # steps; looking at the gradients costs more time than some of the steps do
GROWTH_INTERVAL = 10  # steps
EVALUATIONS = 12
FIGURE = Path(__file__).parent / "output" / "reviews.png"
LOG2_EDGES = torch.arange(-31, -7.75, 0.5)  # bins of log2 |gradient|, two per binade

torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, else torch warns at each use


# ---------------------------------------------------------------------------------------------
# the model
# ---------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Mean of the rows of a review's ids, then an MLP. Plain torch, as a user would have it."""

    def __init__(self, num_ids: int, dim: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(num_ids, dim, mode="mean", sparse=True)
        nn.init.normal_(self.bag.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.mlp(self.bag(ids, offsets).float()).squeeze(1)  # [reviews], logits


class MasterCopy:
    """Trains an fp16 table through an FP32 copy of it; `adam.step()` is what a user calls."""

    def __init__(self, table: nn.Parameter, master: Tensor) -> None:
        self.table = table
        self.master = nn.Parameter(master)
        self.adam = torch.optim.SparseAdam([self.master], lr=TABLE_LR)

    @torch.no_grad()
    def step(self) -> None:
        self.master.grad = self.table.grad.float().coalesce()
        self.adam.step()
        rows = self.master.grad.indices()[0]  # the only rows that changed
        self.table[rows] = self.master[rows].to(self.table.dtype)


# ---------------------------------------------------------------------------------------------
# one way of training it
# ---------------------------------------------------------------------------------------------


@dataclass
class Gradients:
    """What arrived at the rows of one group of ids."""

    group: Tensor  # [num_ids] bool: the ids looked at
    elements: int = 0
    zeros: int = 0
    histogram: Tensor = field(default_factory=lambda: torch.zeros(len(LOG2_EDGES) - 1))

    def add(self, rows: Tensor, values: Tensor) -> None:
        values = values[self.group[rows]].abs()
        values = values[values.isfinite()]  # all of them, unless a scale was too high
        nonzero = values[values > 0]
        self.elements += values.numel()
        self.zeros += values.numel() - nonzero.numel()
        self.histogram += torch.histogram(nonzero.log2(), LOG2_EDGES).hist

    @property
    def zero_share(self) -> float:
        return self.zeros / max(self.elements, 1)


class Run:
    """A model, its optimizers and what was measured of it.

    Args:
        table: dtype of the table: ``"fp32"``, ``"fp16"`` by torch, or ``"fastemb fp16"``.
        adam: ``"sparse"`` or ``"dense"`` by torch, or options of `fastemb.optim.Adam`.
        amp: fp16 autocast and a gradient scaler, fastemb's where the optimizer is.
    """

    def __init__(
        self,
        name: str,
        table: str,
        adam: str | dict[str, Any],
        amp: bool,
        reviews: data.Reviews,
        seed: int,
    ) -> None:
        self.name = name
        self.like_dense = adam == "dense" or (isinstance(adam, dict) and adam["lazy"] == "exact")
        torch.manual_seed(seed)
        self.model = Model(reviews.num_ids)
        self.initial = self.model.bag.weight.detach().clone()

        self.model.bag.sparse = adam != "dense"
        if table == "fp16":
            self.model.bag.half()
        elif table == "fastemb fp16":
            boundary = ["mlp.0"] if amp else []
            fastemb.convert(self.model, dtype=torch.float16, boundary=boundary)
        self.table = self.model.bag.weight

        mlp = list(self.model.mlp.parameters())
        self.master: Tensor | None = None
        if isinstance(adam, dict):
            groups = [{"params": [self.table], "lr": TABLE_LR}, {"params": mlp, "lr": MLP_LR}]
            self.optimizers: list[Any] = [fastemb.optim.Adam(groups, **adam)]
            self.states = self.optimizers[0].state
        else:
            self.optimizers = [torch.optim.Adam(mlp, lr=MLP_LR)]
            if table == "fp16":
                copy = MasterCopy(self.table, self.initial.clone())
                self.optimizers.append(copy)
                self.master, self.states = copy.master, copy.adam.state
            else:
                kind = torch.optim.SparseAdam if adam == "sparse" else torch.optim.Adam
                self.optimizers.append(kind([self.table], lr=TABLE_LR))
                self.states = self.optimizers[-1].state

        self.amp = amp
        if isinstance(adam, dict):
            # torch's two optimizers skip their steps separately, too.
            self.scaler: torch.amp.GradScaler = GradScaler(
                "cpu",
                growth_interval=GROWTH_INTERVAL,
                enabled=amp,
                groups={"embedding": {"growth_interval": GROWTH_INTERVAL}},
                skip="group",
            )
            self.scaler.register(self.model, *self.optimizers)
        else:
            self.scaler = torch.amp.GradScaler("cpu", growth_interval=GROWTH_INTERVAL, enabled=amp)
        self.scales: list[tuple[float, float]] = []  # of the loss and of the table, in each step

        count = reviews.count
        self.rare = Gradients((count > 0) & (count <= data.RARE))
        self.frequent = Gradients(count > data.FREQUENT)
        self.seconds: list[float] = []
        self.auc: list[tuple[int, float]] = []  # (steps done, AUC)
        self.auc_rare = float("nan")

    def step(self, ids: Tensor, offsets: Tensor, label: Tensor) -> None:
        self.scales.append(self.current_scales())
        start = time.perf_counter()
        self.model.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=self.amp):
            logits = self.model(ids, offsets)
        self.scaler.scale(loss_of(logits.float(), label)).backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.seconds.append(time.perf_counter() - start)

    def current_scales(self) -> tuple[float, float]:
        root = self.scaler.get_scale()
        if "embedding" not in getattr(self.scaler, "group_names", ()):
            return root, root
        return root, self.scaler.get_scale("embedding")

    def look_at_gradients(self) -> None:
        """Count the gradients of the last step."""
        grad = self.table.grad.float()
        if isinstance(self.optimizers[0], fastemb.optim.Adam):
            grad = grad / self.scales[-1][1]  # it unscales on the way, and leaves them as they are
        if grad.layout == torch.strided:  # zeros of rows that are not in the batch say nothing
            return
        grad = grad.coalesce()
        for group in (self.rare, self.frequent):
            group.add(grad.indices()[0], grad.values())

    def finish(self) -> None:
        """Rows of `lazy="exact"` that nobody has looked up since are caught up."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, fastemb.optim.Adam):
                optimizer.flush()

    @torch.no_grad()
    def evaluate(self, reviews: data.Reviews) -> None:
        parts = torch.arange(len(reviews.test)).split(1024)
        score = torch.cat([self.model(*reviews.test.batch(part)[:2]) for part in parts])
        label, rarest = reviews.test.label, reviews.rarest_quarter
        self.auc.append((len(self.seconds), float(roc_auc_score(label, score))))
        self.auc_rare = float(roc_auc_score(label[rarest], score[rarest]))

    def memory(self) -> dict[str, int]:
        """Bytes that belong to the table, as they stood after the last step."""
        grad = self.table.grad
        state = self.states[self.table if self.master is None else self.master]
        copy = state.get("master", self.master)
        sparse = grad.layout != torch.strided
        rest = [value for name, value in state.items() if name not in ("step", "master")]
        parts = {
            "table": [self.table],
            "FP32 copy": [] if copy is None else [copy],
            # not coalesced: as the backward left it
            "gradient": [grad._indices(), grad._values()] if sparse else [grad],
            "Adam states": rest,
        }
        return {name: sum(t.nbytes for t in tensors) for name, tensors in parts.items()}

    def rare_row_error(self, reference: Run) -> float:
        """How far rare rows went from where they went in `reference`: |difference| / |change|."""
        rows = self.rare.group
        difference = self.table.detach()[rows].float() - reference.table.detach()[rows]
        change = reference.table.detach()[rows] - reference.initial[rows]
        return float(difference.norm() / change.norm())


# ---------------------------------------------------------------------------------------------
# the runs
# ---------------------------------------------------------------------------------------------


def train(runs: list[Run], reviews: data.Reviews, epochs: int, batch: int, seed: int) -> None:
    """Train all runs in lockstep: each batch goes to every run, the first to go rotating."""
    shuffle = torch.Generator().manual_seed(seed)
    order = [
        part
        for _ in range(epochs)
        for part in torch.randperm(len(reviews.train), generator=shuffle).split(batch)
    ]
    every = max(1, len(order) // EVALUATIONS)
    bar = tqdm(order, desc="training", unit="step")
    for step, part in enumerate(bar):
        inputs = reviews.train.batch(part)
        for turn in range(len(runs)):
            run = runs[(step + turn) % len(runs)]
            run.step(*inputs)
            if step % GRADIENTS_EVERY == 0:
                run.look_at_gradients()
        if (step + 1) % every == 0 or step + 1 == len(order):
            for run in runs:
                run.evaluate(reviews)
            bar.set_postfix_str("AUC " + " ".join(f"{run.auc[-1][1]:.4f}" for run in runs))
    for run in runs:
        run.finish()


def report(runs: list[Run]) -> str:
    """The results, one column per run."""
    fp32, dense = runs[0], runs[4]

    def share(gradients: Gradients) -> str:
        return f"{gradients.zeros / gradients.elements:.2%}" if gradients.elements else "-"

    def slowdown(run: Run) -> float:
        return median([a / b for a, b in zip(run.seconds, fp32.seconds, strict=True)])

    rows = {
        "AUC": [f"{run.auc[-1][1]:.4f}" for run in runs],
        "AUC, quarter of the reviews with most rare ids": [f"{run.auc_rare:.4f}" for run in runs],
        f"gradients exactly 0, ids seen <= {data.RARE} times": [share(run.rare) for run in runs],
        f"gradients exactly 0, ids seen > {data.FREQUENT} times": [
            share(run.frequent) for run in runs
        ],
        "rows of rare ids, distance from torch's fp32": [
            f"{run.rare_row_error(dense if run.like_dense else fp32):.2%}" for run in runs
        ],
    }
    for i, scaled in enumerate(("the loss", "the table")):
        rows[f"log2 of the scale of {scaled}, median"] = [
            f"{math.log2(median([scales[i] for scales in run.scales])):.0f}" if run.amp else "-"
            for run in runs
        ]
    for part in fp32.memory():
        rows[f"MB of {part}"] = [f"{run.memory()[part] / 1e6:.1f}" for run in runs]
    rows["MB of all four"] = [f"{sum(run.memory().values()) / 1e6:.1f}" for run in runs]
    rows["ms per step, median"] = [f"{1e3 * median(run.seconds):.1f}" for run in runs]
    rows["time against torch fp32, median of steps"] = [f"{slowdown(run):.2f}" for run in runs]

    lines = [("", [run.name for run in runs]), *rows.items()]
    return "\n".join(f"{name:48}" + "".join(f"{c:>15}" for c in cells) for name, cells in lines)


def median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2048, help="reviews per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="threads of torch and fastemb")
    parser.add_argument("--quick", action="store_true", help="a few steps on 1,000 reviews")
    parser.add_argument("--out", type=Path, default=FIGURE, help="where the figure goes")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.quick:
        args.epochs, args.batch = 1, min(args.batch, 200)

    start = time.perf_counter()
    reviews = data.load(limit=1000 if args.quick else None)
    bag = len(reviews.train.ids) / len(reviews.train)
    seen = reviews.count[reviews.count > 0]
    print(
        f"{len(reviews.train):,} reviews to train on, {len(reviews.test):,} held out; "
        f"{reviews.num_ids:,} ids, {bag:.0f} per review; of the ids that are trained, "
        f"{(seen == 1).float().mean():.0%} occur once, {(seen <= data.RARE).float().mean():.0%} "
        f"at most {data.RARE} times.\n"
    )
    probe(Model, reviews, TABLE_LR, args.batch, args.seed)

    lean = {"rounding": "stochastic", "state_dtype": torch.bfloat16}
    runs = [
        Run(name, table, adam, name.endswith("AMP"), reviews, args.seed)
        for name, table, adam in (
            ("torch fp32", "fp32", "sparse"),
            ("torch fp16", "fp16", "sparse"),
            ("fastemb fp16", "fastemb fp16", {"lazy": "rows"}),
            ("fastemb lean", "fastemb fp16", {"lazy": "rows", **lean}),
            ("torch dense", "fp32", "dense"),
            ("fastemb exact", "fastemb fp16", {"lazy": "exact"}),
            ("torch AMP", "fp32", "sparse"),
            ("fastemb AMP", "fastemb fp16", {"lazy": "rows"}),
        )
    ]
    train(runs, reviews, args.epochs, args.batch, args.seed)
    print(f"\n{report(runs)}\n")
    draw(runs, LOG2_EDGES, args.out)
    kernels = fastemb.report()["operators"]["embedding_bag"]["cpu"]
    print(
        f"Figure: {args.out}\n"
        f"{time.perf_counter() - start:.0f} s on {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, fastemb {fastemb.__version__} ({kernels} kernels)"
    )


if __name__ == "__main__":
    main()
