"""EmbeddingBag on the CPU against torch: forward, sparse and dense backward, peak memory.

    python bench/embedding_bag.py                 every cell (about 15 minutes)
    python bench/embedding_bag.py --quick         fp32 and bf16, sum, 2 threads
    python bench/embedding_bag.py --out FILE      also write the tables

Torch is measured as a user has it and, in a process of its own, with its allocator on huge pages
(THP_MEM_ALLOC_ENABLE=1); fastemb's table sits on huge pages either way. Bytes: every looked-up row
and index once, offsets and output once (forward); each distinct row gradient written once, the
output gradient read once per lookup (backward).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

import fastemb.nn

ROWS = 1_000_000
BAGS = 4096
PARTS = {
    "forward": "Forward",
    "sparse": "Backward to coalesced row gradients (torch: backward + coalesce)",
    "dense": "Backward to a dense gradient",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cell:
    dtype: str
    mode: str
    dim: int
    bag: int
    ids: str

    def __str__(self) -> str:
        return f"{self.mode} {self.dtype} D{self.dim} L{self.bag} {self.ids}"


def batches(cell: Cell) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Enough that a batch comes back only after the caches have forgotten it.

    An odd number, so that contestants that take turns each meet every batch.
    """
    rng = np.random.default_rng(7)
    result = []
    for _ in range(17 if cell.bag < 50 else 5):
        n = BAGS * cell.bag
        if cell.ids == "uniform":
            ids = rng.integers(0, ROWS, n)
        else:
            ids = harness.bounded_zipf(ROWS, n, 1.05, rng)
        offsets = torch.arange(0, n, cell.bag)
        result.append((torch.from_numpy(ids.astype(np.int64)), offsets))
    return result


class Runner:
    """One table in both libraries, and the operations to be timed on rotating batches."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        dtype = DTYPES[cell.dtype]
        ids = batches(cell)
        self.distinct = float(np.mean([len(np.unique(batch.numpy())) for batch, _ in ids]))
        self.batches = itertools.cycle(ids)
        # Tables are filled through FP32 rows so that both hold the same numbers.
        self.modules = {}
        for name, cls in (("torch", torch.nn.EmbeddingBag), ("fastemb", fastemb.nn.EmbeddingBag)):
            torch.manual_seed(0)
            self.modules[name] = cls(ROWS, cell.dim, mode=cell.mode, dtype=dtype)
        self.grad = torch.randn(BAGS, cell.dim).to(dtype)

    def forward(self, name: str) -> Any:
        module = self.modules[name]

        def run() -> None:
            ids, offsets = next(self.batches)
            with torch.no_grad():
                module(ids, offsets)

        return run

    def backward(self, name: str, sparse: bool) -> Any:
        """The backward alone: the forward runs before, outside the clock (see `Timed`)."""
        module = self.modules[name]
        module.sparse = sparse

        def prepare() -> torch.Tensor:
            module.weight.grad = None
            ids, offsets = next(self.batches)
            return module(ids, offsets)

        def run(output: torch.Tensor) -> None:
            output.backward(self.grad)
            if sparse:
                module.weight.grad.coalesce()

        return Timed(prepare, run)

    def bytes_forward(self) -> int:
        cell, size = self.cell, DTYPES[self.cell.dtype].itemsize
        n = BAGS * cell.bag
        return n * cell.dim * size + n * 8 + BAGS * 8 + BAGS * cell.dim * size

    def bytes_backward(self) -> int:
        cell, size = self.cell, DTYPES[self.cell.dtype].itemsize
        n = BAGS * cell.bag
        return int(n * cell.dim * size + self.distinct * (cell.dim * 4 + 8) + n * 8)


@dataclass
class Timed:
    """A run with a preparation that is not timed."""

    prepare: Any
    run: Any


def paired_prepared(contestants: dict[str, Timed], seconds: float) -> dict[str, list[float]]:
    import time

    times: dict[str, list[float]] = {name: [] for name in contestants}
    start = time.perf_counter()
    rounds = 0
    while rounds < 7 or time.perf_counter() - start < seconds:
        for name, contestant in contestants.items():
            state = contestant.prepare()
            begin = time.perf_counter()
            contestant.run(state)
            elapsed = (time.perf_counter() - begin) * 1e3
            if rounds >= 2:
                times[name].append(elapsed)
        rounds += 1
    return times


def measure(runner: Runner, parts: Sequence[str], threads: int, seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {**asdict(runner.cell), "threads": threads}
    with harness.use_threads(threads):
        if "forward" in parts:
            times = harness.paired(
                {name: runner.forward(name) for name in runner.modules}, seconds=seconds
            )
            row["forward"] = summary(times, runner.bytes_forward())
        for label in ("sparse", "dense"):
            if label not in parts:
                continue
            pairs = {name: runner.backward(name, label == "sparse") for name in runner.modules}
            times = paired_prepared(pairs, seconds)
            row[label] = summary(times, runner.bytes_backward())
            if threads > 1:
                row[label]["peak_mb"] = {name: peak(pair) for name, pair in pairs.items()}
    return row


def peak(pair: Timed) -> float:
    """MB that forward and backward add to the resident set, once buffers exist."""
    for _ in range(2):
        pair.run(pair.prepare())
    extra = harness.peak_extra_bytes(lambda: pair.run(pair.prepare()))
    return float("nan") if extra is None else extra / 1e6


def summary(times: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    ours = harness.median(times["fastemb"])
    return {
        "torch_ms": harness.median(times["torch"]),
        "fastemb_ms": ours,
        "ratio": harness.ratio(times["torch"], times["fastemb"]),
        "gbps": num_bytes / ours / 1e6,
    }


def worker(cells: list[Cell], parts: Sequence[str], threads: list[int], seconds: float) -> None:
    """Prints one JSON row for each cell and number of threads."""
    for cell in cells:
        runner = Runner(cell)
        for count in threads:
            row = measure(runner, parts, count, seconds)
            # The machine drifts: its limits are measured beside each cell.
            row["copy_gbps"] = harness.copy_bandwidth(count, 128)
            row["read_gbps"] = harness.read_bandwidth(count, 128)
            print(json.dumps(row), flush=True)


def run_worker(arguments: list[str], huge_pages: bool) -> list[dict[str, Any]]:
    env = dict(os.environ, THP_MEM_ALLOC_ENABLE="1" if huge_pages else "0")
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    rows = []
    for line in process.stdout:
        rows.append(json.loads(line))
        row = rows[-1]
        print(
            f"{'huge' if huge_pages else 'plain':5} {row['threads']} thr "
            f"{row['mode']} {row['dtype']} D{row['dim']} L{row['bag']} {row['ids']:7}  "
            + "  ".join(f"{part} x{row[part]['ratio']:.2f}" for part in PARTS if part in row),
            file=sys.stderr,
            flush=True,
        )
    if process.wait() != 0:
        raise RuntimeError(f"benchmark worker failed with status {process.returncode}")
    return rows


def table(rows: list[dict[str, Any]], part: str) -> str:
    lines = []
    for row in rows:
        cell = row[part]
        limit = "read_gbps" if part == "forward" else "copy_gbps"
        peaks = cell.get("peak_mb")
        lines.append(
            [
                f"{row['mode']} {row['dtype']} D{row['dim']} L{row['bag']} {row['ids']}",
                str(row["threads"]),
                f"{cell['torch_ms']:.2f}",
                f"{cell['fastemb_ms']:.2f}",
                f"{cell['ratio']:.2f}",
                f"{cell['gbps']:.1f}",
                f"{cell['gbps'] / row[limit]:.2f}",
                *(
                    [f"{peaks['torch']:.0f} / {peaks['fastemb']:.0f}" if peaks else "-"]
                    if part != "forward"
                    else []
                ),
            ]
        )
    header = ["case", "threads", "torch ms", "fastemb ms", "torch / fastemb", "GB/s"]
    header.append("of read limit" if part == "forward" else "of copy limit")
    if part != "forward":
        header.append("peak MB, torch / fastemb")
    return harness.markdown(header, lines)


def limits_of(rows: list[dict[str, Any]], threads: int) -> str:
    mine = [row for row in rows if row["threads"] == threads]
    copy = harness.median([row["copy_gbps"] for row in mine])
    read = harness.median([row["read_gbps"] for row in mine])
    return f"{threads} threads: copy {copy:.1f}, read {read:.1f} GB/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.4, help="per timing")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="substring of a cell's name")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--threads", type=int, nargs="+")
    parser.add_argument("--huge", type=int, choices=(0, 1), help="only one of torch's two ways")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

    dtypes = ["fp32", "bf16"] if args.quick else list(DTYPES)
    modes = ["sum"] if args.quick else ["sum", "mean"]
    shapes = itertools.product(dtypes, modes, (64, 128), (20, 100), ("uniform", "zipf"))
    cells = [Cell(*shape) for shape in shapes]
    if args.only:
        cells = [cell for cell in cells if args.only in str(cell)]
    threads = args.threads or ([2] if args.quick else [2, 1])
    if args.worker:
        worker(cells, args.parts, threads, args.seconds)
        return

    arguments = [a for a in sys.argv[1:] if a != "--worker"]
    report = [f"{harness.machine()}; {harness.versions()}; {ROWS:,} rows, {BAGS} bags"]
    for huge_pages in (False, True) if args.huge is None else (bool(args.huge),):
        rows = run_worker(arguments, huge_pages)
        where = "torch on huge pages" if huge_pages else "torch as installed"
        limits = ", ".join(limits_of(rows, count) for count in threads)
        report.append(f"\n## {where} ({limits})")
        for part in args.parts:
            middle = harness.median([r[part]["ratio"] for r in rows])
            low = min(r[part]["ratio"] for r in rows)
            report.append(f"\n### {PARTS[part]}: median x{middle:.2f}, least x{low:.2f}\n")
            report.append(table(rows, part))
    text = "\n".join(report)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
