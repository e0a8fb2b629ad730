"""Optimizer steps on the CPU against the peers: sparse Adam, row-wise Adagrad, dense Adam, masters.

    python bench/optim.py                 everything (about 10 minutes)
    python bench/optim.py --quick         2 threads, fp32, fewer cells
    python bench/optim.py --out FILE      also write the tables

Sparse cells: one table of 1e6 rows, 4096 bags; ``train`` is forward + backward + step with
``sparse=True``, ``train fused`` the same with ``sparse="fused"`` (against the same peer), and
``step`` the step alone on the gradient of one batch. torch is measured as a user has it and, in a
process of its own, on huge pages with an allocator that keeps its pages. Bytes of a step: row
numbers and gradients read once, parameter and moments of each touched row read and written once.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch
from torch import Tensor

import fastemb.nn
import fastemb.optim

Batch = tuple[Tensor, Tensor]  # indices, offsets

ROWS = 1_000_000
BAGS = 4096
DENSE_ELEMENTS = 50_000_000
KEPT_PAGES = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


@dataclass(frozen=True)
class Cell:
    dim: int
    bag: int
    ids: str

    def __str__(self) -> str:
        return f"D{self.dim} L{self.bag} {self.ids}"


def batches(cell: Cell) -> list[Batch]:
    """A number without a common factor with 2 or 3, the contestants that take turns on them."""
    rng = np.random.default_rng(7)
    result = []
    for _ in range(7 if cell.bag < 50 else 5):
        n = BAGS * cell.bag
        if cell.ids == "uniform":
            ids = rng.integers(0, ROWS, n)
        else:
            ids = harness.bounded_zipf(ROWS, n, 1.05, rng)
        result.append((torch.from_numpy(ids.astype(np.int64)), torch.arange(0, n, cell.bag)))
    return result


def training(module: Any, optim: Any, turns: Iterator[Batch], grad: Tensor) -> Callable[[], None]:
    """One forward, backward and step on the next batch."""

    def train() -> None:
        indices, offsets = next(turns)
        optim.zero_grad(set_to_none=True)
        module(indices, offsets).backward(grad)
        optim.step()

    return train


def sparse_adam(cell: Cell, seconds: float) -> dict[str, Any]:
    ids = batches(cell)
    turns = itertools.cycle(ids)
    grad = torch.randn(BAGS, cell.dim)
    contestants, steps = {}, {}
    for name, kind, sparse, optimizer in (
        ("torch", torch.nn.EmbeddingBag, True, torch.optim.SparseAdam),
        ("fastemb", fastemb.nn.EmbeddingBag, True, fastemb.optim.SparseAdam),
        ("fused", fastemb.nn.EmbeddingBag, "fused", fastemb.optim.SparseAdam),
    ):
        torch.manual_seed(0)
        module = kind(ROWS, cell.dim, mode="sum", sparse=sparse)
        optim = optimizer(module.parameters())

        contestants[name] = training(module, optim, turns, grad)
        if sparse is True:  # with "fused" a step without a backward has nothing to do
            steps[name] = optim.step
    distinct = float(np.mean([len(np.unique(batch.numpy())) for batch, _ in ids]))
    train_ms = harness.paired(contestants, seconds, rounds=(5, 50))
    step_ms = harness.paired(steps, seconds, rounds=(5, 50))
    touched = int(distinct * (8 + 4 * cell.dim * 7))
    return {
        "train": medians(train_ms),
        "train fused": medians(train_ms, "fused"),
        "step": {**medians(step_ms), "gbps": touched / harness.median(step_ms["fastemb"]) / 1e6},
    }


def rowwise_adagrad(cell: Cell, seconds: float) -> dict[str, Any] | None:
    """Forward, backward and step against FBGEMM's table-batched embedding, where it is there."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return None
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    ids = batches(cell)
    turns = itertools.cycle(ids)
    grad = torch.randn(BAGS, cell.dim)
    peer = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, cell.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
    )
    peer.init_embedding_weights_uniform(-0.01, 0.01)

    def train_peer() -> None:
        indices, offsets = next(turns)
        peer(indices, torch.cat([offsets, offsets.new_tensor([indices.numel()])])).backward(grad)

    contestants: harness.Contestants = {"torch": train_peer}
    for name, sparse in (("fastemb", True), ("fused", "fused")):
        module = fastemb.nn.EmbeddingBag(ROWS, cell.dim, mode="sum", sparse=sparse)
        optim = fastemb.optim.RowWiseAdagrad(module.parameters(), lr=0.01)

        contestants[name] = training(module, optim, turns, grad)
    times = harness.paired(contestants, seconds, rounds=(5, 50))
    return {"train": medians(times), "train fused": medians(times, "fused")}


def dense_adam(kind: str, seconds: float) -> dict[str, Any]:
    """The step alone on one parameter of 50 M elements; torch: fused, fp32."""

    def parameter(dtype: torch.dtype) -> torch.nn.Parameter:
        param = torch.nn.Parameter(torch.empty(DENSE_ELEMENTS, dtype=dtype).normal_())
        param.grad = torch.empty_like(param).normal_()
        return param

    dtype = {"fp32": torch.float32, "bf16 + master": torch.bfloat16}[kind]
    peer = torch.optim.Adam([parameter(torch.float32)], fused=True)
    optim = fastemb.optim.Adam([parameter(dtype)])
    times = harness.paired({"torch": peer.step, "fastemb": optim.step}, seconds, rounds=(5, 50))
    read_and_written = DENSE_ELEMENTS * (28 if dtype == torch.float32 else 2 + 2 + 2 + 6 * 4)
    ours = harness.median(times["fastemb"])
    return {"step": {**medians(times), "gbps": read_and_written / ours / 1e6}}


def medians(times: dict[str, list[float]], ours: str = "fastemb") -> dict[str, float]:
    return {
        "peer_ms": harness.median(times["torch"]),
        "fastemb_ms": harness.median(times[ours]),
        "ratio": harness.ratio(times["torch"], times[ours]),
    }


def jobs(quick: bool) -> list[tuple[str, Any]]:
    cells = [Cell(*shape) for shape in itertools.product((64, 128), (20, 100), ("uniform", "zipf"))]
    if quick:
        cells = [cell for cell in cells if cell.dim == 64]
    result: list[tuple[str, Any]] = [("sparse Adam", cell) for cell in cells]
    result += [("row-wise Adagrad", cell) for cell in cells]
    result += [("dense Adam", kind) for kind in ("fp32", "bf16 + master")]
    return result


RUNNERS = {
    "sparse Adam": sparse_adam,
    "row-wise Adagrad": rowwise_adagrad,
    "dense Adam": dense_adam,
}


def worker(args: argparse.Namespace) -> None:
    for threads in args.threads:
        with harness.use_threads(threads):
            limit = harness.copy_bandwidth(threads, 128)
            for job, what in jobs(args.quick):
                if args.only and args.only not in f"{job} {what}":
                    continue
                found = RUNNERS[job](what, args.seconds)
                for part, row in (found or {}).items():
                    named = {"job": job, "case": str(what), "part": part, "threads": threads}
                    print(json.dumps({**named, "copy_gbps": limit, **row}), flush=True)


def run_worker(arguments: list[str], kept_pages: bool) -> list[dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", *arguments],
        env={**os.environ, **(KEPT_PAGES if kept_pages else {})},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    rows = []
    for line in process.stdout:
        row = json.loads(line)
        rows.append(row)
        print(
            f"{'kept pages' if kept_pages else 'plain':10} {row['threads']} thr {row['job']} "
            f"{row['case']} {row['part']}: {row['peer_ms']:.1f} / {row['fastemb_ms']:.2f} ms "
            f"x{row['ratio']:.2f}",
            file=sys.stderr,
            flush=True,
        )
    if process.wait() != 0:
        raise RuntimeError(f"benchmark worker failed with status {process.returncode}")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    header = ["case", "part", "threads", "peer ms", "fastemb ms", "peer / fastemb"]
    header += ["GB/s", "of copy limit"]
    lines = []
    for row in rows:
        gbps = row.get("gbps")
        lines.append(
            [
                row["case"],
                row["part"],
                str(row["threads"]),
                f"{row['peer_ms']:.2f}",
                f"{row['fastemb_ms']:.2f}",
                f"{row['ratio']:.2f}",
                "" if gbps is None else f"{gbps:.1f}",
                "" if gbps is None else f"{gbps / row['copy_gbps']:.2f}",
            ]
        )
    return harness.markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5, help="per timing")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="substring of a job's name and case")
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.threads = args.threads[:1]
    if args.worker:
        worker(args)
        return

    arguments = [a for a in sys.argv[1:] if a != "--worker"]
    report = [f"{harness.machine()}; {harness.versions()}; {ROWS:,} rows, {BAGS} bags"]
    for kept_pages in (False, True):
        rows = run_worker(arguments, kept_pages)
        where = "peers on huge pages that are kept" if kept_pages else "peers as installed"
        report.append(f"\n## {where}")
        for job in RUNNERS:
            mine = [row for row in rows if row["job"] == job]
            if not mine:
                continue
            for part in dict.fromkeys(row["part"] for row in mine):
                ratios = [row["ratio"] for row in mine if row["part"] == part]
                middle, least = harness.median(ratios), min(ratios)
                report.append(f"\n### {job}, {part}: median x{middle:.2f}, least x{least:.2f}\n")
                report.append(table([row for row in mine if row["part"] == part]))
    text = "\n".join(report)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
