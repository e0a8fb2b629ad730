"""Unscaling, checking and clipping of gradients on the CPU against torch.

    python bench/grad_scale.py               everything (about 3 minutes)
    python bench/grad_scale.py --out FILE    also write the tables

``rows``: row gradients of one table, [409,600, 64], coalesced; ours in one pass with statistics,
torch's is `torch._amp_foreach_non_finite_check_and_unscale_`. ``fp16 rows``: the same with repeated
rows in float16, which torch has to coalesce first. ``step``: unscale, clip and Adam step of one
fp32 parameter of 50 M elements: torch's `unscale_`, `clip_grad_norm_` and fused Adam, ours
`fastemb.amp.GradScaler.clip_grad_norm_` and `fastemb.optim.Adam`. Bytes: gradients read and
written once; for the step 32 for each element.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import fastemb.amp
import fastemb.optim
from fastemb._grad_ops import GRAD_STATS

NNZ, DIM, TABLE = 409_600, 64, 1_000_000
DENSE_ELEMENTS = 50_000_000
SCALE = 2.0**16


def row_gradients() -> dict[str, Any]:
    values = torch.randn(NNZ, DIM)
    inverse, found = torch.tensor(1.0), torch.zeros(())  # 1: the values stay what they are
    stats = torch.zeros(len(GRAD_STATS), dtype=torch.int64)

    def ours() -> None:
        torch.ops.fastemb.row_grad_check_(
            values, None, None, None, None, inverse, found, stats, None, True
        )

    def torchs() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_([values], found, inverse)

    times = harness.paired({"torch": torchs, "fastemb": ours})
    return row(times, bytes_moved=2 * values.nbytes)


def repeated_half_rows() -> dict[str, Any]:
    indices = torch.randint(TABLE, (1, NNZ))
    values = torch.randn(NNZ, DIM, dtype=torch.float16)
    inverse, found = torch.tensor(1.0 / SCALE), torch.zeros(())
    stats = torch.zeros(len(GRAD_STATS), dtype=torch.int64)

    def gradient() -> Tensor:
        return torch.sparse_coo_tensor(indices, values, (TABLE, DIM), check_invariants=False)

    def torchs() -> None:
        summed = gradient().coalesce()
        torch._amp_foreach_non_finite_check_and_unscale_([summed._values()], found, inverse)

    def ours() -> None:
        lookups = indices[0].unsqueeze(1)
        order, _, segments, num_rows = torch.ops.fastemb.group_indices(
            lookups, None, TABLE, -1, False
        )
        torch.ops.fastemb.row_grad_check_(
            values, num_rows, segments, order, None, inverse, found, stats, None, False
        )

    return row(harness.paired({"torch": torchs, "fastemb": ours}))


def clipped_step() -> dict[str, Any]:
    def setup(optimizer: Any, scaler: Any) -> tuple[Any, Any, Any]:
        param = torch.nn.Parameter(torch.randn(DENSE_ELEMENTS))
        scaler.scale(torch.zeros(()))
        return param, optimizer([param]), scaler

    grad = torch.randn(DENSE_ELEMENTS) * SCALE
    theirs = setup(
        lambda p: torch.optim.Adam(p, fused=True), torch.amp.GradScaler("cpu", init_scale=SCALE)
    )
    mine = setup(fastemb.optim.Adam, fastemb.amp.GradScaler("cpu", init_scale=SCALE))

    def torchs() -> None:
        param, optimizer, scaler = theirs
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        scaler.step(optimizer)
        scaler.update()

    def ours() -> None:
        _, optimizer, scaler = mine
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    times: dict[str, list[float]] = {"torch": [], "fastemb": []}
    for _ in range(9):  # torch's way writes the gradient: it gets a new one, outside the clock
        for name, run, (param, _, _) in (("torch", torchs, theirs), ("fastemb", ours, mine)):
            if param.grad is None:
                param.grad = torch.empty_like(grad)
            param.grad.copy_(grad)
            times[name] += harness.paired({name: run}, rounds=(1, 1), warm=0)[name]
    return row({name: runs[2:] for name, runs in times.items()}, 32 * DENSE_ELEMENTS)


def row(times: dict[str, list[float]], bytes_moved: int | None = None) -> dict[str, Any]:
    ours = statistics.median(times["fastemb"])
    return {
        "torch_ms": statistics.median(times["torch"]),
        "fastemb_ms": ours,
        "ratio": harness.ratio(times["torch"], times["fastemb"]),
        "gbps": None if bytes_moved is None else bytes_moved / ours / 1e6,
    }


CASES = {
    "rows, fp32": row_gradients,
    "rows, fp16, repeated": repeated_half_rows,
    "unscale + clip + Adam step": clipped_step,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    args = parser.parse_args()

    lines = []
    for threads in args.threads:
        with harness.use_threads(threads):
            limit = harness.copy_bandwidth(threads)
            for name, case in CASES.items():
                found = case()
                gbps = found["gbps"]
                lines.append(
                    [
                        name,
                        str(threads),
                        f"{found['torch_ms']:.2f}",
                        f"{found['fastemb_ms']:.2f}",
                        f"{found['ratio']:.2f}",
                        "" if gbps is None else f"{gbps:.1f}",
                        "" if gbps is None else f"{gbps / limit:.2f}",
                    ]
                )
                print(" ".join(lines[-1]), flush=True)
    header = ["case", "threads", "torch ms", "fastemb ms", "torch / fastemb", "GB/s"]
    text = f"{harness.machine()}; {harness.versions()}\n\n" + harness.markdown(
        [*header, "of copy limit"], lines
    )
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
