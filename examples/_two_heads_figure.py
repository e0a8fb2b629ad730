"""The picture of `two_heads.py`: scales, zero gradients and AUC over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from two_heads import Run

# fp32, torch, one scale with a floor, two scales; then torch and two scales with numbers filled in
COLOURS = ("#4d4d4d", "#d95f02", "#b8860b", "#1b7fb5", "#f0a97a", "#7fb9da")
STYLES = ("-", "-", "-", "--", "-", "--")
WINDOW = 9  # steps that the shares of zeros are averaged over


def draw(runs: list[Run], path: Path) -> None:
    """Save the figure as a PNG. `runs` are those of `two_heads.py`, in its order."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (scales, zeros, main, aux) = plt.subplots(
        1, 4, figsize=(19, 4.8), layout="constrained", width_ratios=(1.3, 1, 1, 1)
    )
    draw_scales(scales, runs)
    draw_zeros(zeros, runs)
    draw_auc(main, runs, 1, "Held-out AUC, main head")
    draw_auc(aux, runs, 2, "Held-out AUC, head of weight 1e-4")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_scales(axes: Axes, runs: list[Run]) -> None:
    _, theirs, floor, own, filled, _ = runs
    curves = (
        ("torch, numbers filled in", [s.scale for s in filled.steps], 4, "-"),
        ("torch", [s.scale for s in theirs.steps], 1, "-"),
        ("one scale, floor", [s.scale for s in floor.steps], 2, "-"),
        ("two scales: of the loss", [s.scale for s in own.steps], 3, ":"),
        ("two scales: of the auxiliary head", [s.aux_scale for s in own.steps], 3, "--"),
    )
    for label, values, colour, style in curves:
        axes.plot(_log2(values), label=label, color=COLOURS[colour], linestyle=style, linewidth=2.2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{y:.0f}}}$"))
    axes.set_title("Loss scale", loc="left", weight="bold")
    axes.set_xlabel("training step")
    axes.legend(loc="lower left", frameon=False)


def draw_zeros(axes: Axes, runs: list[Run]) -> None:
    for run, colour, style in zip(runs, COLOURS, STYLES, strict=True):
        done = [(i, 100 * s.zeros["aux"]) for i, s in enumerate(run.steps) if not s.skipped]
        step, share = torch.tensor(done).unfold(0, min(WINDOW, len(done)), 1).mean(2).unbind(1)
        axes.plot(step, share, color=colour, linestyle=style, linewidth=2, label=run.name)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f} %"))
    axes.set_ylim(-3, 103)
    axes.set_title("Gradients of the auxiliary table that are 0", loc="left", weight="bold")
    axes.set_xlabel("training step")
    axes.legend(loc="center right", frameon=False)


def draw_auc(axes: Axes, runs: list[Run], head: int, title: str) -> None:
    for run, colour, style in zip(runs, COLOURS, STYLES, strict=True):
        steps, values = [row[0] for row in run.auc], [row[head] for row in run.auc]
        label = f"{run.name}: {values[-1]:.4f}"
        axes.plot(steps, values, color=colour, linestyle=style, linewidth=2, label=label)
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.55 * (high - low), high)  # room for the legend
    axes.set_title(title, loc="left", weight="bold")
    axes.set_xlabel("training step")
    axes.legend(loc="lower right", frameon=False, title="after the last step")


def _log2(values: Sequence[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).log2().tolist()
