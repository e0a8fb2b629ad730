"""What every benchmark here shares: paired timing, the machine's own limits, tables.

A figure is a median of interleaved runs: each round times every contestant once, so that drift of
the machine meets them all. Bandwidths are measured in the same process as what they judge.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

Contestants = dict[str, Callable[[], object]]


def paired(
    contestants: Contestants,
    seconds: float = 0.6,
    rounds: tuple[int, int] = (7, 200),
    warm: int = 2,
) -> dict[str, list[float]]:
    """Milliseconds of each contestant, one list entry per round, after `warm` runs of each."""
    for run in contestants.values():
        for _ in range(warm):
            run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    start = time.perf_counter()
    done = 0
    while done < rounds[0] or (time.perf_counter() - start < seconds and done < rounds[1]):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - begin) * 1e3)
        done += 1
    return times


def median(times: Sequence[float]) -> float:
    return statistics.median(times)


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over rounds of slow / fast."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def huge_page_array(megabytes: int) -> np.ndarray:
    """A float32 array on huge pages (as torch's allocator would not give it)."""
    from fastemb._memory import advise_huge_pages

    tensor = torch.empty(megabytes << 18)
    advise_huge_pages(tensor)
    return tensor.fill_(1.0).numpy()


def copy_bandwidth(threads: int, megabytes: int = 256) -> float:
    """GB/s read plus written by a large non-temporal copy on huge pages, `threads` at once."""
    from concurrent.futures import ThreadPoolExecutor

    source, target = huge_page_array(megabytes), huge_page_array(megabytes)
    pieces = list(
        zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)
    )
    with ThreadPoolExecutor(threads) as pool:

        def copy() -> None:
            list(pool.map(lambda pair: np.copyto(*pair), pieces))

        times = paired({"copy": copy}, seconds=0.1)["copy"]
    return 2 * source.nbytes / min(times) / 1e6


def read_bandwidth(threads: int, megabytes: int = 256) -> float:
    """GB/s of a streaming read (sum) on huge pages."""
    source = torch.from_numpy(huge_page_array(megabytes))
    with use_threads(threads):
        times = paired({"read": source.sum}, seconds=0.1)["read"]
    return source.nbytes / min(times) / 1e6


class use_threads:
    """Context in which torch computes with so many threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __enter__(self) -> None:
        self.before = torch.get_num_threads()
        torch.set_num_threads(self.threads)

    def __exit__(self, *exc: object) -> None:
        torch.set_num_threads(self.before)


def peak_extra_bytes(run: Callable[[], object]) -> int | None:
    """How far the process's resident memory rises above its start while `run` runs (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        run()
        return _status("VmHWM") - before
    except OSError:
        return None


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def bounded_zipf(rows: int, count: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    """Ids whose popularity falls as rank ** -exponent, ranks scattered over the table."""
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weights)
    ranks = np.searchsorted(cumulative, rng.random(count) * cumulative[-1])
    return rng.permutation(rows)[ranks]


def machine() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


def versions() -> str:
    import fastemb

    parts = [f"fastemb {fastemb.__version__}", f"torch {torch.__version__}"]
    parts += [f"numpy {np.__version__}", f"Python {platform.python_version()}"]
    return ", ".join(parts)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
