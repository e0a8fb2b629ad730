"""The offload engine on the CPU: what a step costs, how much of the transfers is hidden, checksums.

    python bench/offload.py                  everything (about 5 minutes)
    python bench/offload.py --out FILE       also write the tables
    python bench/offload.py --device cuda    with the cache on a GPU
    python bench/offload.py --quick          one case of ``steps`` and nothing else (half a minute)

The model is an `EmbeddingBag` (sum, fp32, 1 M x 64, Zipf 1.05, bags of 20) under a small MLP, the
optimizer `fastemb.optim.SparseAdam`: a record has 832 bytes. The cache has room for 10 % of the
rows.

``steps``: blocks of steps in memory (``sparse="fused"``) and offloaded, in turn; a block ends when
the lanes are idle. ``links``: the lanes that copy take the time that a link of that speed takes,
and the copies' own; the hidden share is of all that the lanes do. ``records``: gathering and
scattering records of random rows in ascending order, as the engine has them, and their checksums,
against a large copy on as many threads; bytes read and written.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import torch

import fastemb
from fastemb.offload._lanes import Lane, ThrottledLane
from fastemb.offload._layout import Field, RecordLayout

ROWS, DIM, BAG, CACHE, EXPONENT = 1_000_000, 64, 20, 0.1, 1.05
WARM, BLOCK, ROUNDS = 60, 10, 9
DLRM = (1024, 1024, 512, 256)  # the top MLP of the MLPerf benchmark
STEPS = ((2048, DLRM), (2048, (512, 512)), (2048, (64,)))  # batch and widths of the MLP

_ops = torch.ops.fastemb


def batches(batch_size: int, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """The same for every contestant, without an end."""
    rng = np.random.default_rng(0)
    stock = torch.from_numpy(harness.bounded_zipf(ROWS, 200_000 * BAG, EXPONENT, rng)).view(-1, BAG)
    while True:  # drawn anew, or the cache would learn the stock by heart
        ids = stock[torch.from_numpy(rng.integers(len(stock), size=batch_size))]
        yield {"embedding": ids, "input": ids.to(device)}


class Training:
    """A loop that can be stopped and gone on with."""

    def __init__(
        self, batch_size: int, widths: tuple[int, ...], device: torch.device, engine: Any = None
    ) -> None:
        torch.manual_seed(0)
        self.engine = engine
        self.embedding = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum")
        fastemb.convert(self.embedding, sparse="fused", offload=engine)
        if engine is None:
            self.embedding.to(device)
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise((DIM, *widths)):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        self.top = torch.nn.Sequential(*layers, torch.nn.Linear(widths[-1], 1)).to(device)
        self.rows = fastemb.optim.SparseAdam(self.embedding.parameters(), lr=1e-3)
        self.dense = torch.optim.SGD(self.top.parameters(), lr=1e-3)
        loader = batches(batch_size, device)
        self.loader = iter(loader if engine is None else engine.prefetch(loader))
        self.device = device

    def steps(self, number: int) -> None:
        for batch in itertools.islice(self.loader, number):
            loss = self.top(self.embedding(batch["input"])).square().mean()
            loss.backward()
            self.rows.step()
            self.dense.step()
            self.rows.zero_grad()
            self.dense.zero_grad()
        if self.engine is not None:
            self.engine.drain()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def engine(device: torch.device, verify: str = "all", link: float | None = None) -> Any:
    threads = 1 if device.type == "cpu" else None  # as the engine has it by default

    def make_lane(name: str, where: torch.device) -> Lane:
        if link is None:
            return Lane(name, where, threads=threads)
        return ThrottledLane(name, where, threads=threads, bytes_per_second=link * 1e9)

    return fastemb.offload.OffloadEngine(
        device=device,
        cache=CACHE,
        verify=verify,
        make_lane=make_lane,  # type: ignore[arg-type]
    )


def blocks(contestants: dict[str, Training]) -> dict[str, list[float]]:
    """Milliseconds of a step, by contestant and round."""
    for training in contestants.values():
        training.steps(WARM)
    runs = {name: partial(training.steps, BLOCK) for name, training in contestants.items()}
    times = harness.paired(runs, seconds=0.0, rounds=(ROUNDS, ROUNDS), warm=0)
    return {name: [t / BLOCK for t in values] for name, values in times.items()}


def steps_table(device: torch.device, cases: Sequence[tuple[int, tuple[int, ...]]] = STEPS) -> str:
    lines = []
    for batch_size, widths in cases:
        make = partial(Training, batch_size, widths, device)
        contestants = {
            "memory": make(),
            "all": make(engine(device)),
            "off": make(engine(device, verify="off")),
        }
        times = blocks(contestants)
        stats = contestants["all"].engine.stats
        lines.append(
            [
                str(batch_size),
                "-".join(map(str, widths)),
                *(f"{statistics.median(times[name]):.1f}" for name in contestants),
                f"{harness.ratio(times['all'], times['memory']):.2f}",
                f"{harness.ratio(times['all'], times['off']):.2f}",
                f"{stats.hit_rate:.3f}",
                f"{stats.hidden_share:.2f}",
            ]
        )
        print(" ".join(lines[-1]), flush=True)
        for training in contestants.values():
            if training.engine is not None:
                training.engine.close()
    header = ["batch", "MLP", "in memory ms", "offloaded ms", "verify='off' ms"]
    more = ["offloaded / in memory", "with / without checksums", "hit rate", "hidden share"]
    return harness.markdown(header + more, lines)


def links_table(device: torch.device) -> str:
    lines = []
    for link in (16.0, 32.0):
        for widths in (DLRM, (512, 512)):
            training = Training(2048, widths, device, engine(device, link=link))
            training.steps(WARM)
            before = training.engine.stats
            start = time.perf_counter()
            training.steps(BLOCK * ROUNDS)
            seconds = time.perf_counter() - start
            after = training.engine.stats
            moved = after.bytes_to_device + after.bytes_to_host
            moved -= before.bytes_to_device + before.bytes_to_host
            busy = after.transfer_seconds - before.transfer_seconds
            waited = after.waited_seconds - before.waited_seconds
            steps = BLOCK * ROUNDS
            lines.append(
                [
                    f"{link:.0f}",
                    "-".join(map(str, widths)),
                    f"{seconds / steps * 1e3:.1f}",
                    f"{moved / steps / 1e6:.2f}",
                    f"{busy / steps * 1e3:.2f}",
                    f"{waited / steps * 1e3:.2f}",
                    f"{1 - waited / busy:.3f}",
                ]
            )
            print(" ".join(lines[-1]), flush=True)
            training.engine.close()
    header = ["link GB/s", "MLP", "step ms", "MB / step", "lanes ms / step"]
    return harness.markdown([*header, "waited ms / step", "hidden"], lines)


def records_table() -> str:
    states = (Field("exp_avg", torch.float32, DIM), Field("exp_avg_sq", torch.float32, DIM))
    layout = RecordLayout((Field("weight", torch.float32, DIM), *states))
    size, number = layout.record_bytes, 16_384
    table = torch.from_numpy(harness.huge_page_array(ROWS * size >> 20).view(np.uint8))
    table = table[: table.numel() // size * size].view(-1, size)
    staged = torch.zeros(number, size, dtype=torch.uint8)
    picks = [torch.randperm(len(table))[:number].sort().values for _ in range(16)]
    turn = itertools.cycle(picks)
    versions = torch.zeros(number, dtype=torch.int64)
    rows = torch.arange(number)
    cases = {
        "gather": lambda: _ops.row_copy_([staged], None, [table], next(turn)),
        "scatter": lambda: _ops.row_copy_([table], next(turn), [staged], None),
        "checksum": lambda: _ops.checksum([layout.payload(staged)], None, rows, versions, 0),
    }
    lines = []
    for threads in (2, 1):
        with harness.use_threads(threads):
            limit = harness.copy_bandwidth(threads)
            for name, case in cases.items():
                times = harness.paired({name: case}, seconds=1.0)[name]
                moved = staged.nbytes * (1 if name == "checksum" else 2)
                gbps = moved / statistics.median(times) / 1e6
                lines.append([name, str(threads), f"{gbps:.1f}", f"{gbps / limit:.2f}"])
                print(" ".join(lines[-1]), flush=True)
    return harness.markdown(["case", "threads", "GB/s", "of copy limit"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="one case of steps and nothing else")
    args = parser.parse_args()
    device = torch.device(args.device)
    parts = [harness.machine() + "; " + harness.versions()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    if args.quick:
        parts.append(steps_table(device, STEPS[:1]))
    else:
        parts += [records_table(), steps_table(device), links_table(device)]
    text = "\n\n".join(parts)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
