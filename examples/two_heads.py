"""A second head of weight 1e-4, with a table of its own, under fp16 autocast and a `GradScaler`.

    python examples/two_heads.py

The main head says whether a customer recommends the item, the auxiliary one whether anybody found
the review helpful. They share nothing but the loss, `main + 1e-4 * aux`, and the optimizer. Four
numbers of a review are standardised and given to the main head. One of them, how many reviews there
are of the item's class, is NaN where the data names no class: in 12 of 18,112 reviews.

Nobody has filled in those 12. A batch with one of them has NaN gradients under any scale. A
`GradScaler` skips such a batch, so the training survives; but it takes the NaN for an overflow and
halves the scale, 12 times per epoch or a little less, where one doubling takes 2,000 clean steps.
That is what holds the scale low here. The scale that the main head can do with is far too small for
gradients that start out 1e-4 times as large.

With the numbers missing (every run skips the same steps):
1. fp32, no autocast and no scale, only a guard that skips: what there is to reach
2. `torch.amp.GradScaler`
3. `fastemb.amp.GradScaler(min_scale=1)`: a floor, but one scale for both heads
4. the same with `scaler.boundary` at the auxiliary logit: the head and its table have a scale
With the numbers filled in, where no batch overflows:
5. `torch.amp.GradScaler`, 6. as 4: there is nothing to gain, and nothing is lost.

Everything else is the same: the initial weights, the batches (each goes to all runs in turn), the
tables and the optimizer, `fastemb.optim.Adam`. Its eps is 1e-16, as the default of 1e-8 is more
than most gradients of the auxiliary table, which then hardly learns under any scaler, or in fp32.

Zeros are what a scale is to blame for; what they cost is up to the data. With `--table-lr 1e-2` the
auxiliary head overfits, and the run that loses two thirds of its gradients has the better AUC.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import _two_heads_data as data
import torch
from _two_heads_figure import draw
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as loss_of
from tqdm import tqdm

import fastemb
from fastemb.amp import GradScaler

AUX_WEIGHT = 1e-4
MLP_LR, EPS = 1e-3, 1e-16
EVALUATIONS = 16
FIGURE = Path(__file__).parent / "output" / "two_heads.png"


class Head(nn.Module):
    """Mean of the rows of a review's ids, and its numbers if there are any; then an MLP."""

    def __init__(self, num_ids: int, numbers: int, dim: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.bag = fastemb.nn.EmbeddingBag(num_ids, dim, mode="mean", sparse=True)
        nn.init.normal_(self.bag.weight, std=0.1)
        self.mlp = nn.Sequential(nn.Linear(dim + numbers, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids: Tensor, offsets: Tensor, *numbers: Tensor) -> Tensor:
        x = torch.cat([self.bag(ids, offsets), *numbers], dim=1)
        return self.mlp(x).float().squeeze(1)  # [reviews] float32, logits


def no_boundary(logit: Tensor) -> Tensor:
    return logit


class Model(nn.Module):
    """Two heads, one of which may have a scale of its own."""

    def __init__(self, num_ids: int, boundary: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.main = Head(num_ids, len(data.NUMBERS))
        self.aux = Head(num_ids, 0)
        self.boundary = boundary

    def forward(self, ids: Tensor, offsets: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        # The boundary stands where the gradient is still FP32: on the way to the fp16 layers it is
        # multiplied by the head's own scale first, and rounded then.
        return self.main(ids, offsets, numbers), self.boundary(self.aux(ids, offsets))


# ---------------------------------------------------------------------------------------------
# one way of training it
# ---------------------------------------------------------------------------------------------


@dataclass
class Step:
    """What was seen of one step."""

    skipped: bool
    scale: float  # of the loss, after the step
    aux_scale: float  # of the auxiliary head; the same, unless it has its own
    zeros: dict[str, float]  # by head: share of the values in its row gradients that are 0


class Run:
    """A model, its optimizer and scaler, and what was measured of it.

    Args:
        numbers: [reviews, 4], with or without NaN.
        scaler: who scales.
        own_scale: whether the auxiliary head has a scale of its own (a `fastemb.amp.GradScaler`).
        autocast: fp16, or everything in fp32.
    """

    def __init__(
        self,
        name: str,
        heads: data.TwoHeads,
        numbers: Tensor,
        scaler: torch.amp.GradScaler,
        seed: int,
        table_lr: float,
        own_scale: bool = False,
        autocast: bool = True,
    ) -> None:
        self.name, self.heads, self.numbers, self.scaler = name, heads, numbers, scaler
        self.autocast = autocast
        boundary: Callable[[Tensor], Tensor] = no_boundary
        if own_scale:
            assert isinstance(scaler, GradScaler)
            boundary = partial(scaler.boundary, group="aux")
        torch.manual_seed(seed)
        self.model = Model(heads.reviews.num_ids, boundary)
        self.tables = {name: getattr(self.model, name).bag.weight for name in ("main", "aux")}
        layers = [p for head in (self.model.main, self.model.aux) for p in head.mlp.parameters()]
        self.optimizer = fastemb.optim.Adam(
            [{"params": list(self.tables.values()), "lr": table_lr}, {"params": layers}],
            lr=MLP_LR,
            eps=EPS,
            lazy="rows",
        )
        if isinstance(scaler, GradScaler):
            scaler.register(self.model, self.optimizer)
        self.steps: list[Step] = []
        self.steps_done = 0  # by the optimizer, which leaves skipped ones out
        self.auc: list[tuple[int, float, float]] = []  # (steps done, main head, auxiliary head)

    def step(self, part: Tensor) -> None:
        ids, offsets, recommended = self.heads.reviews.train.batch(part)
        helpful = self.heads.helpful[part]

        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=self.autocast):
            main, aux = self.model(ids, offsets, self.numbers[part])
        loss = loss_of(main, recommended) + AUX_WEIGHT * loss_of(aux, helpful)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

        zeros = {
            name: (table.grad._values() == 0).float().mean().item()
            for name, table in self.tables.items()
        }
        done = self.optimizer.state.get(self.model.main.mlp[-1].bias, {}).get("step", 0)
        skipped, self.steps_done = int(done) == self.steps_done, int(done)
        scale = self.scaler.get_scale()
        self.steps.append(Step(skipped, scale, self.aux_scale(scale), zeros))

    def aux_scale(self, scale: float) -> float:
        if not isinstance(self.scaler, GradScaler):
            return scale
        return self.scaler.get_scale("aux") if "aux" in self.scaler.group_names else scale

    @torch.no_grad()
    def evaluate(self) -> None:
        test, first = self.heads.reviews.test, len(self.heads.reviews.train)
        filled = self.heads.filled[first:]
        parts = torch.arange(len(test)).split(1024)
        logits = [self.model(*test.batch(part)[:2], filled[part]) for part in parts]
        main, aux = (torch.cat(head) for head in zip(*logits, strict=True))
        labels = test.label, self.heads.helpful[first:]
        self.auc.append(
            (
                len(self.steps),
                float(roc_auc_score(labels[0], main)),
                float(roc_auc_score(labels[1], aux)),
            )
        )

    def zeros(self, head: str) -> float:
        """Share of zeros in the row gradients of the steps that were not skipped."""
        shares = [step.zeros[head] for step in self.steps if not step.skipped]
        return sum(shares) / len(shares)


# ---------------------------------------------------------------------------------------------
# the runs
# ---------------------------------------------------------------------------------------------


def make_runs(heads: data.TwoHeads, seed: int, table_lr: float) -> list[Run]:
    missing, filled = heads.numbers, heads.filled
    rest = (seed, table_lr)

    def ours() -> GradScaler:
        return GradScaler("cpu", min_scale=1.0)

    def theirs() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu")

    guard = GradScaler("cpu", mode="guard")
    return [
        Run("fp32", heads, missing, guard, *rest, autocast=False),
        Run("torch", heads, missing, theirs(), *rest),
        Run("one scale, floor", heads, missing, ours(), *rest),
        Run("two scales", heads, missing, ours(), *rest, own_scale=True),
        Run("torch, filled", heads, filled, theirs(), *rest),
        Run("two, filled", heads, filled, ours(), *rest, own_scale=True),
    ]


def train(runs: list[Run], count: int, epochs: int, batch: int, seed: int) -> None:
    """Train all runs in lockstep on the same batches of `count` reviews."""
    shuffle = torch.Generator().manual_seed(seed)
    order = [
        part
        for _ in range(epochs)
        for part in torch.randperm(count, generator=shuffle).split(batch)
    ]
    every = max(1, len(order) // EVALUATIONS)
    for step, part in enumerate(tqdm(order, desc="training", unit="step")):
        for run in runs:
            run.step(part)
        if (step + 1) % every == 0 or step + 1 == len(order):
            for run in runs:
                run.evaluate()


def report(runs: list[Run]) -> str:
    """The results, one column per run."""

    def scale(value: float) -> str:
        return f"2^{torch.tensor(value, dtype=torch.float64).log2().item():.0f}"

    rows = {
        "AUC, recommended (main head)": [f"{run.auc[-1][1]:.4f}" for run in runs],
        "AUC, helpful (weight 1e-4)": [f"{run.auc[-1][2]:.4f}" for run in runs],
        "gradients exactly 0, main table": [f"{run.zeros('main'):.2%}" for run in runs],
        "gradients exactly 0, auxiliary table": [f"{run.zeros('aux'):.2%}" for run in runs],
        "scale of the loss, at the end": [scale(run.steps[-1].scale) for run in runs],
        "scale of the auxiliary head": [scale(run.steps[-1].aux_scale) for run in runs],
        "steps skipped": [f"{sum(step.skipped for step in run.steps)}" for run in runs],
    }
    lines = [("", [run.name for run in runs]), *rows.items()]
    return "\n".join(f"{name:38}" + "".join(f"{c:>18}" for c in cells) for name, cells in lines)


def conclusion(runs: list[Run]) -> str:
    """What the numbers mean, with the case in which nothing is gained."""
    fp32, theirs, floor, own, theirs_filled, own_filled = runs

    def lost(run: Run, reference: Run = fp32) -> str:
        return " and ".join(
            f"{round(reference.auc[-1][i] - run.auc[-1][i], 4) + 0.0:.4f}" for i in (1, 2)
        )

    aux = own.scaler.stats(wait=True)["groups"]["aux"]
    return (
        "AUC below fp32, main and auxiliary head, with numbers missing:\n"
        f"  torch's scale, which ends at {theirs.steps[-1].scale:.0e}: {lost(theirs)}\n"
        f"  one scale that ends at a floor of {floor.steps[-1].scale:g}: {lost(floor)}, as "
        f"{floor.zeros('aux'):.0%} of the auxiliary gradients are 0\n"
        f"  a scale of its own for the auxiliary head: {lost(own)}\n"
        "With numbers filled in the only scale stays healthy and a second one makes no "
        f"difference: {lost(own_filled, theirs_filled)} below torch.\n"
        f"scaler.stats() of the auxiliary head in the last step: {aux['elements']:,} gradient "
        f"values, {aux['tiny'] / aux['elements']:.0%} of them below 2^-24, which fp16 would make "
        "0 without a scale."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=512, help="reviews per step")
    parser.add_argument("--table-lr", type=float, default=3e-3, help="learning rate of the tables")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="more gain little on such layers")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps on 1,000 reviews, 8 of them broken"
    )
    parser.add_argument("--out", type=Path, default=FIGURE, help="where the figure goes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, else torch warns
    if args.quick:
        args.epochs, args.batch = 4, min(args.batch, 50)

    start = time.perf_counter()
    heads = data.load(limit=1000 if args.quick else None)
    train_size = len(heads.reviews.train)
    print(
        f"{train_size:,} reviews to train on, {int(heads.broken.sum())} of them with a number "
        f"missing; {heads.reviews.num_ids:,} ids\n"
    )
    runs = make_runs(heads, args.seed, args.table_lr)
    train(runs, train_size, args.epochs, args.batch, args.seed)
    print(f"\n{report(runs)}\n\n{conclusion(runs)}\n")
    draw(runs, args.out)
    print(
        f"Figure: {args.out}\n{time.perf_counter() - start:.0f} s on {args.threads} threads, "
        f"torch {torch.__version__}, fastemb {fastemb.__version__}"
    )


if __name__ == "__main__":
    main()
