"""The picture of `reviews.py`: AUC over the steps, gradients of rare ids, loss scales, memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from torch import Tensor

if TYPE_CHECKING:
    from reviews import Run

# torch fp32, torch fp16, fastemb fp16, lean, torch dense, fastemb exact, torch AMP, fastemb AMP
COLOURS = ("#4d4d4d", "#d95f02", "#1b7fb5", "#66a61e", "#a6761d", "#7570b3", "#c2185b", "#00897b")
STYLES = ("-", "--", ":", "-.", "-", ":", "--", ":")
PART_SHADES = (1.0, 0.7, 0.45, 0.22)
FP16_SMALLEST, FP16_NORMAL = -24, -14  # log2 of the smallest subnormal and the smallest normal


def draw(runs: list[Run], log2_edges: Tensor, path: Path) -> None:
    """Save the figure as a PNG. `runs` are those of `reviews.py`, in its order."""
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(20, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 3, width_ratios=(1, 1.3, 1.4), height_ratios=(2.2, 1))
    quality = figure.add_subplot(grid[0, 0])
    draw_auc(quality, figure.add_subplot(grid[1, 0], sharex=quality), runs)
    draw_gradients(figure.add_subplot(grid[0, 1]), runs[:3], log2_edges)
    draw_scales(figure.add_subplot(grid[1, 1]), *runs[6:])
    draw_memory(figure.add_subplot(grid[:, 2]), runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_auc(top: Axes, bottom: Axes, runs: list[Run]) -> None:
    steps = [step for step, _ in runs[0].auc]
    base = torch.tensor([value for _, value in runs[0].auc])
    for run, colour, style in zip(runs, COLOURS, STYLES, strict=True):
        values = torch.tensor([value for _, value in run.auc])
        label = f"{run.name}: {values[-1]:.4f}"
        top.plot(steps, values, color=colour, linestyle=style, linewidth=2.2, label=label)
        bottom.plot(steps, 1e3 * (values - base), color=colour, linestyle=style, linewidth=1.8)
    top.set_title("Held-out AUC", loc="left", weight="bold")
    top.legend(loc="lower right", frameon=False, title="after the last step")
    top.tick_params(labelbottom=False)
    bottom.set_ylabel("minus fp32\n(thousandths)")
    bottom.set_xlabel("training step")


def draw_gradients(axes: Axes, runs: list[Run], log2_edges: Tensor) -> None:
    edges = log2_edges.numpy()
    width = float(edges[1] - edges[0])
    centres = edges[:-1] + width / 2
    at_zero = float(edges[0]) - 2.5  # where the bars of exact zeros stand
    shares = [100 * run.rare.histogram.numpy() / max(run.rare.elements, 1) for run in runs]

    axes.axvspan(FP16_SMALLEST, FP16_NORMAL, color="#f2e6d0", alpha=0.6, zorder=0, linewidth=0)
    axes.axvline(FP16_SMALLEST, color="#8a6d3b", linewidth=1.2)
    axes.fill_between(centres, shares[0], color=COLOURS[0], alpha=0.22, step="mid", linewidth=0)
    axes.bar(centres, shares[1], width * 0.72, color=COLOURS[1], alpha=0.75)
    axes.step(centres, shares[2], where="mid", color=COLOURS[2], linewidth=2)

    top = max(max(share.max() for share in shares), 100 * runs[1].rare.zero_share) * 1.28
    for i, (run, colour) in enumerate(zip(runs, COLOURS[:3], strict=True)):
        zero, x = 100 * run.rare.zero_share, at_zero + (i - 1) * 1.9
        axes.bar(x, zero, 1.6, color=colour, alpha=0.85)
        text = f"{zero:.1f} %" if zero >= 0.05 else f"{zero:.2g} %"
        axes.text(x, zero + top * 0.012, text, ha="center", color=colour, weight="bold", fontsize=9)
    axes.axvline(at_zero + 3.4, color="#cccccc", linewidth=1)
    note = {"va": "top", "fontsize": 9, "color": "#8a6d3b"}
    axes.text(FP16_SMALLEST + 0.25, top * 0.985, "fp16 subnormals: 1 to 10 bits left", **note)
    axes.text(FP16_SMALLEST - 0.25, top * 0.985, "below $2^{-24}$", ha="right", **note)

    axes.set_ylim(0, top)
    axes.set_xlim(at_zero - 3.2, FP16_NORMAL + 1.5)
    ticks = list(range(-28, -13, 4))
    axes.set_xticks([at_zero, *ticks])
    axes.set_xticklabels(["exactly 0", *(f"$2^{{{tick}}}$" for tick in ticks)])
    axes.set_xlabel("|gradient| of one value of the table")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.0f} %"))
    axes.set_title("Gradients of ids seen at most 5 times", loc="left", weight="bold")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[:3]]
    off = [f"\n(rows end {run.rare_row_error(runs[0]):.2%} off fp32)" for run in runs[1:]]
    labels = [run.name + text for run, text in zip(runs, ["", *off], strict=True)]
    axes.legend(handles, labels, loc="upper right", bbox_to_anchor=(1.0, 0.9), frameon=False)


def draw_scales(axes: Axes, theirs: Run, ours: Run) -> None:
    curves = (
        (f"{theirs.name}: the only scale", theirs, 0, "-"),
        (f"{ours.name}: of the loss", ours, 0, ":"),
        (f"{ours.name}: of the table", ours, 1, "-"),
    )
    for label, run, which, style in curves:
        values = torch.tensor([scales[which] for scales in run.scales]).log2()
        colour = COLOURS[6] if run is theirs else COLOURS[7]
        axes.plot(values, label=label, color=colour, linestyle=style, linewidth=2.2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{y:.0f}}}$"))
    axes.set_title("Loss scale", loc="left", weight="bold")
    axes.set_xlabel("training step")
    axes.legend(loc="upper left", frameon=False, fontsize=9)


def draw_memory(axes: Axes, runs: list[Run]) -> None:
    for x, (run, colour) in enumerate(zip(runs, COLOURS, strict=True)):
        bottom = 0.0
        for (part, size), shade in zip(run.memory().items(), PART_SHADES, strict=True):
            height = size / 1e6
            axes.bar(x, height, 0.84, bottom=bottom, color=colour, alpha=shade, edgecolor="white")
            if height > 3:
                ink = "white" if shade > 0.6 else "black"
                style = {"ha": "center", "va": "center", "color": ink, "fontsize": 8.5}
                label = part.replace(" ", "\n", 1) if height > 8 else part
                axes.text(x, bottom + height / 2, f"{label} {height:.0f}", **style)
            bottom += height
        axes.text(x, bottom + 1, f"{bottom:.0f} MB", ha="center", va="bottom", weight="bold")
    axes.set_xticks(range(len(runs)), [run.name.replace(" ", "\n") for run in runs])
    axes.set_ylabel("MB")
    axes.set_ylim(0, max(sum(run.memory().values()) for run in runs) / 1e6 * 1.08)
    axes.set_title("Memory for the table", loc="left", weight="bold")
