"""Builds, tests and measures fastemb on a machine with a CUDA GPU, in less than six minutes.

    python bench/gpu_check.py                build, pytest -m gpu, compute-sanitizer, benchmarks
    python bench/gpu_check.py --only bench   one step (build, report, tests, sanitizer, offload,
                                             bench)

Needs torch >= 2.11 built for CUDA, nvcc, pytest and hypothesis in the Python that runs it. Tables
go to ``bench/results/`` as Markdown and CSV, named after the GPU. Exits with 1 when a step fails or
finds no time left; the steps after a failed one still run.

The benchmark interleaves the contestants (fastemb, `torch.nn.EmbeddingBag`, FBGEMM where it is
installed), empties the L2 cache before each run and times with CUDA events; figures are medians.
``offload`` is one case of ``bench/offload.py``.

Bytes are what must move. Forward: every looked-up row, index and offset once, the output once.
Backward: the output gradient and each index once, the gradient of each distinct row (of each row of
the table when dense); the sort that groups the indices is not counted. "copy" is a device-to-device
copy measured in the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
BUDGET_SECONDS = 350.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Run = Callable[[], object]


# ---- benchmark ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    part: str  # forward, sparse (forward and sparse backward) or dense
    dtype: str
    mode: str
    dim: int
    length: int
    ids: str  # uniform or zipf


CELLS = [
    *(
        Cell("forward", dtype, "sum", dim, 20, ids)
        for dtype in DTYPES
        for dim in (32, 128)
        for ids in ("uniform", "zipf")
    ),
    Cell("forward", "fp16", "mean", 128, 20, "zipf"),
    Cell("forward", "fp16", "max", 128, 20, "zipf"),
    Cell("forward", "fp16", "sum", 128, 1, "uniform"),
    Cell("forward", "fp16", "sum", 100, 20, "uniform"),
    *(
        Cell("sparse", dtype, "sum", 128, 20, ids)
        for dtype in DTYPES
        for ids in ("uniform", "zipf")
    ),
    Cell("sparse", "fp16", "mean", 128, 20, "zipf"),
    *(Cell("dense", dtype, "sum", 128, 20, "zipf") for dtype in DTYPES),
    Cell("dense", "fp16", "max", 128, 20, "zipf"),
]


@dataclass
class Batch:
    indices: torch.Tensor
    offsets: torch.Tensor
    grad: torch.Tensor
    distinct: int


def make_batch(cell: Cell, rows: int, bags: int) -> Batch:
    rng = np.random.default_rng(7)
    n = bags * cell.length
    if cell.ids == "uniform":
        ids = rng.integers(0, rows, n)
    else:
        ids = harness.bounded_zipf(rows, n, 1.05, rng)
    return Batch(
        torch.from_numpy(ids.astype(np.int64)).to("cuda"),
        torch.arange(0, n, cell.length).to("cuda"),
        torch.ones(bags, cell.dim, dtype=DTYPES[cell.dtype]).to("cuda"),
        len(np.unique(ids)),
    )


def bytes_moved(cell: Cell, batch: Batch, rows: int) -> int:
    element = DTYPES[cell.dtype].itemsize
    n, bags = batch.indices.numel(), batch.offsets.numel()
    forward = n * cell.dim * element + n * 8 + bags * 8 + bags * cell.dim * element
    if cell.mode == "max":
        forward += bags * cell.dim * 4
    if cell.part == "forward":
        return forward
    written = rows if cell.part == "dense" else batch.distinct
    backward = bags * cell.dim * element + written * cell.dim * 4 + n * 8
    if cell.mode == "max":
        backward += bags * cell.dim * 4
    return forward + backward


def contestants(cell: Cell, batch: Batch, rows: int) -> dict[str, Run]:
    from fastemb import nn as fnn

    sparse = cell.part == "sparse"
    shared: dict[str, Any] = {"mode": cell.mode, "dtype": DTYPES[cell.dtype], "device": "cuda"}
    runs: dict[str, Run] = {}

    def lookup(bag: torch.nn.Module) -> Run:
        def forward() -> object:
            with torch.no_grad():
                return bag(batch.indices, batch.offsets)

        def both() -> None:
            bag.weight.grad = None
            bag(batch.indices, batch.offsets).backward(batch.grad)

        return forward if cell.part == "forward" else both

    runs["fastemb"] = lookup(fnn.EmbeddingBag(rows, cell.dim, sparse=sparse, **shared))
    if not (sparse and cell.mode == "max"):  # which torch does not have
        runs["torch"] = lookup(torch.nn.EmbeddingBag(rows, cell.dim, sparse=sparse, **shared))
    if cell.part == "forward" and importlib.util.find_spec("fbgemm_gpu") is not None:
        try:
            runs |= fbgemm(cell, batch, rows)
        except Exception as error:  # a peer that does not run here is no fault of ours
            print(f"fbgemm left out: {type(error).__name__}: {error}")
    return runs


def fbgemm(cell: Cell, batch: Batch, rows: int) -> dict[str, Run]:
    """The forward of FBGEMM's table batched embedding, where it has the case."""
    if cell.dtype == "bf16" or cell.mode == "max" or cell.dim % 4:
        return {}
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    precision = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}[cell.dtype]
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, cell.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        weights_precision=precision,
        output_dtype=precision,
        pooling_mode={"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}[cell.mode],
    )
    end = batch.offsets.new_full((1,), batch.indices.numel())
    offsets = torch.cat([batch.offsets, end])

    def forward() -> object:
        with torch.no_grad():
            return table(batch.indices, offsets)

    return {"fbgemm": forward}


class Clock:
    """Milliseconds of interleaved runs, each on a cold L2 cache."""

    def __init__(self, cache_bytes: int) -> None:
        self.flush = torch.empty(cache_bytes // 4, dtype=torch.int32, device="cuda")

    def once(self, run: Run) -> float:
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def paired(self, runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run()
        start = time.perf_counter()
        while len(next(iter(times.values()))) < 7 or time.perf_counter() - start < seconds:
            for name, run in runs.items():
                times[name].append(self.once(run))
        return times


def copy_bandwidth(clock: Clock, megabytes: int) -> float:
    """GB/s read plus written."""
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = clock.paired({"copy": lambda: target.copy_(source)}, 0.5)["copy"]
    return 2 * source.numel() / statistics.median(times) / 1e6


def benchmark(rows: int, bags: int, seconds: float, deadline: float) -> list[dict[str, Any]]:
    clock = Clock(max(64 << 20, 4 * torch.cuda.get_device_properties(0).L2_cache_size))
    copy = copy_bandwidth(clock, max(1, min(1024, rows * 512 >> 20)))
    print(f"copy: {copy:.0f} GB/s", flush=True)
    results = []
    for cell in CELLS:
        if time.monotonic() > deadline:
            print(f"out of time: {len(CELLS) - len(results)} cells not measured")
            break
        batch = make_batch(cell, rows, bags)
        times = clock.paired(contestants(cell, batch, rows), seconds)
        moved = bytes_moved(cell, batch, rows)
        ours = statistics.median(times["fastemb"])
        row: dict[str, Any] = asdict(cell) | {
            "rows": rows,
            "bags": bags,
            "megabytes": round(moved / 1e6, 1),
            "copy_gb_s": round(copy, 1),
            "fastemb_ms": round(ours, 4),
            "fastemb_gb_s": round(moved / ours / 1e6, 1),
            "of_copy": round(moved / ours / 1e6 / copy, 3),
        }
        for peer in ("torch", "fbgemm"):
            if peer in times:
                row[f"{peer}_ms"] = round(statistics.median(times[peer]), 4)
                row[f"{peer}_ratio"] = round(harness.ratio(times[peer], times["fastemb"]), 2)
        results.append(row)
        print(row, flush=True)
        torch.cuda.empty_cache()
    return results


COLUMNS = (
    *("part", "dtype", "mode", "dim", "length", "ids", "rows", "bags", "megabytes", "copy_gb_s"),
    *("fastemb_ms", "fastemb_gb_s", "of_copy"),
    *("torch_ms", "torch_ratio", "fbgemm_ms", "fbgemm_ratio"),
)


def results_file(folder: Path, kind: str) -> Path:
    """``<kind>-<gpu>.md``"""
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{kind}-{name}.md"


def write_tables(results: list[dict[str, Any]], folder: Path) -> Path:
    """``<gpu>.md`` and ``<gpu>.csv``; ratios are the peer's time over fastemb's."""
    gpu = torch.cuda.get_device_name()
    versions = f"{gpu}, CUDA {torch.version.cuda}, {harness.versions()}"
    text = [f"# EmbeddingBag on {gpu}", "", f"{versions}. {harness.machine()}.", ""]
    text += ["Ratios: the peer's time over fastemb's. of_copy: fraction of the measured copy", ""]
    text += [harness.markdown(COLUMNS, [[str(r.get(c, "")) for c in COLUMNS] for r in results])]
    target = results_file(folder, "gpu")
    target.write_text("\n".join(text) + "\n")
    with target.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["machine", *COLUMNS], restval="")
        writer.writeheader()
        writer.writerows({"machine": versions} | row for row in results)
    return target


# ---- a small case for compute-sanitizer ---------------------------------------------------------


def small_case() -> None:
    """Every operator once on small input, long segments and wrong ids included."""
    import fastemb
    from fastemb import _native

    cuda, cpu = _native.backend("cuda"), _native.backend("cpu")
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 24, generator=generator).half()
    indices = torch.randint(0, 40, (1500,), generator=generator)
    indices[:700] = 3
    offsets = torch.tensor([0, 0, 10, 600, 1500])
    there = [x.to("cuda") for x in (weight, indices, offsets)]
    for mode in ("sum", "mean", "max"):
        options = (None, mode, 5, False, False, False, torch.float16, "t")
        got = cuda.embedding_bag(*there, *options)
        want = cpu.embedding_bag(weight, indices, offsets, *options)
        groups = cuda.group_indices(there[1], there[2], 40, 5, False)
        grad = torch.ones(5, 24, dtype=torch.float16)
        rest = (40, 40, mode, 5, False, False, True, torch.float32)
        argmax = (got[1], want[1]) if mode == "max" else (None, None)
        on_gpu = cuda.embedding_bag_backward(
            grad.to("cuda"), there[1], there[2], None, argmax[0], *groups, *rest
        )
        host_groups = cpu.group_indices(indices, offsets, 40, 5, False)
        on_cpu = cpu.embedding_bag_backward(
            grad, indices, offsets, None, argmax[1], *host_groups, *rest
        )
        if not torch.equal(got[0].cpu(), want[0]) or not torch.equal(on_gpu.cpu(), on_cpu):
            raise AssertionError(f"mode {mode}: CUDA and CPU differ")
        if mode != "max":
            cuda.embedding_bag_per_sample_weights_backward(
                grad.float().to("cuda"), *there, mode, 5, False
            )
    cuda.embedding(there[0], there[1], -1, False, False, torch.float32, "t")
    cuda.embedding_renorm_(there[0], there[1], 1.0, 2.0, "t")
    wrong = torch.tensor([[0, -1], [40, 2**40]]).to("cuda")
    cuda.embedding_bag(there[0], wrong, None, *options)
    torch.cuda.synchronize()
    with contextlib.suppress(IndexError):  # of the wrong ids
        fastemb.check_errors()
    small_offload()


def small_offload() -> None:
    """A training whose rows come and go in every step, and an id that is out of range."""
    import fastemb

    weights = []
    for cache in (None, 24):
        options = {"device": "cuda", "cache": cache, "staging_bytes": 512}
        engine = None if cache is None else fastemb.offload.OffloadEngine(**options)
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.EmbeddingBag(60, 10, mode="sum"))
        fastemb.convert(model, sparse="fused", offload=engine)
        model.to("cuda")
        optimizer = fastemb.optim.SparseAdam(model.parameters(), lr=0.1)
        batches = [torch.randint(0, 60, (4, 3)) for _ in range(4)]
        for ids in batches if engine is None else engine.prefetch(batches, lambda ids: ids):
            model(ids.to("cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.state_dict()["0.weight"].cpu())
        if engine is not None:
            for ids in engine.prefetch(batches[:1], lambda ids: ids):
                model(torch.full_like(ids, 10**6).to("cuda"))
            torch.cuda.synchronize()
            with contextlib.suppress(IndexError):  # of the wrong id
                fastemb.check_errors()
            engine.close()
    if not torch.equal(*weights):
        raise AssertionError("training differs with an OffloadEngine")


# ---- steps --------------------------------------------------------------------------------------


def run(command: list[str], limit: float, **environment: str) -> bool:
    if limit <= 0:
        print("no time left: not run")
        return False
    print(f"$ {' '.join(command)}", flush=True)
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, start_new_session=True
    )
    try:
        return process.wait(limit) == 0
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit:.0f} s")
        return False
    finally:
        # With all that it started: a child that lives on would share the GPU with the next step.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def build(left: float) -> bool:
    major, minor = torch.cuda.get_device_capability()
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-build-isolation",
        "--no-deps",
        "-e",
        ".",
    ]
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")
    return run(command, left, FASTEMB_BUILD="cuda", TORCH_CUDA_ARCH_LIST=archs)


def report(left: float) -> bool:
    return run([sys.executable, "-m", "fastemb"], min(left, 60))


def tests(left: float) -> bool:
    return run([sys.executable, "-m", "pytest", "-m", "gpu", "-q"], min(left, 150))


def sanitizer(left: float) -> bool:
    deadline = time.monotonic() + min(left, 90)
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not on PATH: left out")
        return True
    case = [sys.executable, str(Path(__file__).resolve()), "--only", "small-case"]
    good = True
    # Calls that fail are raised by who makes them; torch makes some to find out what there is.
    for options in (["--tool=memcheck", "--report-api-errors=no"], ["--tool=racecheck"]):
        command = [tool, *options, "--error-exitcode=9", *case]
        # Without the caching allocator every tensor has bounds of its own.
        left = deadline - time.monotonic()
        good &= run(command, left, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return good


def offload(left: float) -> bool:
    script = Path(__file__).resolve().with_name("offload.py")
    command = [sys.executable, str(script), "--device", "cuda", "--quick"]
    return run([*command, "--out", str(results_file(RESULTS, "offload"))], min(left, 60))


def bench(left: float) -> bool:
    command = [sys.executable, str(Path(__file__).resolve()), "--only", "bench"]
    return run([*command, "--limit", str(max(1, int(left) - 15))], left)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    steps = ("build", "report", "tests", "sanitizer", "offload", "bench")
    parser.add_argument("--only", choices=[*steps, "small-case"])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--bags", type=int, default=65_536)
    parser.add_argument("--seconds", type=float, default=0.4, help="per cell")
    parser.add_argument(
        "--limit", type=float, default=BUDGET_SECONDS, help="of the benchmark, in s"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device", file=sys.stderr)
        return 2
    if options.only == "small-case":
        small_case()
        return 0
    if options.only == "bench":
        deadline = time.monotonic() + options.limit
        results = benchmark(options.rows, options.bags, options.seconds, deadline)
        print(f"wrote {write_tables(results, options.out)}")
        return 0
    start = time.monotonic()
    failed = []
    for step in (build, report, tests, sanitizer, offload, bench):
        if options.only in (None, step.__name__):
            begin = time.monotonic()
            good = step(BUDGET_SECONDS - (begin - start))
            print(
                f"{step.__name__}: {'ok' if good else 'FAILED'}, {time.monotonic() - begin:.0f} s"
            )
            if not good:
                failed.append(step.__name__)
    print(f"{time.monotonic() - start:.0f} s in all; " + (f"failed: {failed}" if failed else "ok"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
