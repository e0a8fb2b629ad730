"""What nvcc says about every CUDA kernel, on a machine without a GPU.

For each kernel instance and architecture: registers, spilled bytes, shared memory, theoretical
occupancy (warps in flight of those the SM holds, from registers, threads and shared memory), the
widest load from global memory in its PTX, and the bytes that a reference problem has to move (for
the row optimizers: every position a row, with FP32 gradients, and FP32 masters for 16-bit
parameters, and one term a row when fused; for catching up: every position a row that sleeps; for
gradient checks: every position a row).
Exits with 1 when a kernel spills registers or when a kernel built for 16-byte vectors has no
16-byte load.

    python bench/static_report.py [--arch 80 90 100]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Kernel", "faults", "main", "measure", "replace"]

CSRC = Path(__file__).resolve().parent.parent / "csrc"
ARCHS = ("80", "90", "100")
BLOCK_THREADS = 256  # FASTEMB_BLOCK_THREADS
# As setup.py compiles them; warnings of the host and the device compiler are errors.
NVCC = (
    "-std=c++20",
    "-O3",
    "--fmad=false",
    "-Werror=all-warnings",
    "-Xcompiler=-Wall,-Wextra,-Werror",
)
# Threads and KiB of shared memory per SM: CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability". 64 Ki registers and 32 blocks on each of these.
SM_THREADS = {"80": 2048, "90": 2048, "100": 2048}
SM_SHARED = {"80": 164, "90": 228, "100": 228}
SM_REGISTERS = 65536
SM_BLOCKS = 32
ELEMENT_BYTES = {"double": 8, "float": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True)
class Kernel:
    """One instance on one architecture."""

    arch: str
    symbol: str
    name: str  # demangled, without namespaces
    registers: int
    spills: int  # bytes stored and loaded
    stack: int
    shared: int
    widest_load: int  # bytes

    @property
    def arguments(self) -> list[str]:
        inside = re.search(r"<(.*)>", self.name)
        return [] if inside is None else [a.strip() for a in inside[1].split(",")]

    @property
    def vector(self) -> bool:
        """Whether this instance was made for 16-byte accesses."""
        if self.name.startswith(("per_sample_kernel", "renorm_kernel", "rowwise_")):
            return self.arguments[-1] == "true"
        if self.name.startswith(
            ("bag_forward_", "gather_", "short_", "long_", "row_step_", "term_", "adam_")
        ):
            return self.arguments[-1] != "1"
        return self.name.startswith(
            ("grad_check_", "row_grad_check_", "boundary_", "row_copy_", "checksum_")
        )

    @property
    def occupancy(self) -> float:
        """Fraction of the SM's threads that can be resident."""
        # Registers are given to warps in steps of 8 a thread.
        registers = -(-self.registers // 8) * 8 * BLOCK_THREADS
        blocks = min(SM_BLOCKS, SM_THREADS[self.arch] // BLOCK_THREADS, SM_REGISTERS // registers)
        if self.shared:
            blocks = min(blocks, SM_SHARED[self.arch] * 1024 // (self.shared + 1024))
        return blocks * BLOCK_THREADS / SM_THREADS[self.arch]

    def bytes_moved(self) -> int | None:
        """Lower bound for the reference problem, every row read from memory once per use."""
        bags, length, dim = REFERENCE
        positions = bags * length
        kind = self.name.split("<")[0]
        element = ELEMENT_BYTES.get(self.arguments[0] if self.arguments else "", 0)
        acc = 8 if element == 8 else 4
        index = 8 if "long" in self.arguments else 4
        rows = positions * dim * element
        if kind == "bag_forward_kernel":
            winners = bags * dim * 4 if "true" in self.arguments else 0
            return rows + positions * index + bags * dim * element + winners
        if kind == "gather_kernel":
            return 2 * rows + positions * index
        if kind == "short_segments_kernel":
            winners = positions * dim * 4 if "true" in self.arguments else 0
            segments = positions * (4 + 4 + 8)  # order, segments, rows: every position its own row
            return rows + positions * dim * acc + winners + segments
        if kind == "per_sample_kernel":
            return rows + positions * dim * acc + positions * (8 + acc)
        if kind == "renorm_kernel":
            return 2 * rows + positions * 8
        if kind in ("grad_check_kernel", "row_grad_check_kernel"):
            return rows
        if kind == "boundary_gradient_kernel":
            return 2 * rows
        if kind in ("row_step_kernel", "rowwise_adagrad_kernel", "adam_catch_up_kernel"):
            elements = positions * dim
            master = 2 * elements * acc if element == 2 else 0
            other = elements * acc  # the gradient
            if kind == "rowwise_adagrad_kernel":
                state = 2 * positions * acc
            elif kind == "adam_catch_up_kernel" or "AdamStep" in self.arguments:
                state = 2 * 2 * elements * ELEMENT_BYTES[self.arguments[1]]
            else:
                state = 2 * elements * acc
            if kind == "adam_catch_up_kernel":
                other = 2 * positions * 4  # row_step
            elif "true" in self.arguments[:-1]:  # fused
                other += positions * (4 + 4)  # segments, sources: one term for each row
            return 2 * rows + master + state + other + positions * 8
        return None


REFERENCE = (65536, 20, 128)  # bags, positions in each, columns


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _demangled(symbols: Sequence[str]) -> list[str]:
    if shutil.which("c++filt") is None:
        raise RuntimeError("c++filt (binutils) is needed to read kernel names")
    names = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    short = []
    for name in names:
        name = re.sub(r"fastemb::|cuda::|^void |\((?:bool|int|fastemb::ChecksumMode)\)", "", name)
        short.append(re.sub(r"\(.*", "", name))
    return short


def _ours(symbol: str) -> bool:
    """CUB's kernels are the library's business."""
    return "fastemb" in symbol and "cub" not in symbol


def _resources(log: str) -> dict[str, dict[str, int]]:
    """symbol -> numbers, from ``ptxas -v``."""
    found: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)'", line):
            current = found.setdefault(entry[1], {"spills": 0, "stack": 0, "shared": 0})
        elif spill := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", line):
            current["stack"] = int(spill[1])
            current["spills"] = int(spill[2]) + int(spill[3])
        elif used := re.search(r"Used (\d+) registers", line):
            current["registers"] = int(used[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                current["shared"] = int(shared[1])
    return found


def _widest_loads(ptx: str) -> dict[str, int]:
    """symbol -> bytes of its widest load from global memory."""
    widest: dict[str, int] = {}
    symbol = ""
    load = re.compile(r"\bld\.global[.\w:]*?(?:\.v(\d))?\.[bsuf](\d+)\s")
    for line in ptx.splitlines():
        if entry := re.search(r"\.entry (\w+)\s*\(", line):
            symbol = entry[1]
            widest[symbol] = 0
        elif (found := load.search(line)) and symbol:
            size = int(found[1] or 1) * int(found[2]) // 8
            widest[symbol] = max(widest[symbol], size)
    return widest


def _compile(source: Path, arch: str, folder: Path) -> list[Kernel]:
    stem = folder / f"{source.stem}.{arch}"
    command = ["nvcc", *NVCC, f"-I{CSRC}", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    command += ["--keep", f"--keep-dir={stem}", "-Xptxas=-v", "-cubin", str(source)]
    stem.mkdir()
    log = _run([*command, "-o", str(stem / "out.cubin")])
    (ptx,) = stem.glob("*.ptx")
    loads = _widest_loads(ptx.read_text())
    found = {s: r for s, r in _resources(log).items() if _ours(s)}
    names = _demangled(list(found))
    return [
        Kernel(arch, symbol, name, widest_load=loads[symbol], **numbers)
        for (symbol, numbers), name in zip(found.items(), names, strict=True)
    ]


def measure(archs: Iterable[str], folder: Path, jobs: int = 2) -> list[Kernel]:
    """Compile every ``csrc/cuda/*.cu`` for each architecture; raises RuntimeError on a warning."""
    work = [(source, arch) for arch in archs for source in sorted((CSRC / "cuda").glob("*.cu"))]
    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(lambda item: _compile(*item, folder), work))
    return [kernel for part in parts for kernel in part]


def faults(kernels: Iterable[Kernel]) -> list[str]:
    """What must not be: a line for each."""
    lines = []
    for kernel in kernels:
        if kernel.spills:
            lines.append(f"sm_{kernel.arch} {kernel.name} spills {kernel.spills} bytes")
        if kernel.vector and kernel.widest_load < 16:
            lines.append(f"sm_{kernel.arch} {kernel.name} loads {kernel.widest_load} bytes at most")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", nargs="+", default=ARCHS, choices=sorted(SM_THREADS))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("static_report: nvcc is not on PATH", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        kernels = measure(options.arch, Path(folder), options.jobs)
    bags, length, dim = REFERENCE
    print(f"reference problem: {bags} bags of {length} positions, {dim} columns\n")
    print(
        f"{'arch':6} {'kernel':48} {'regs':>4} {'spill':>5} {'smem':>5} {'occ':>5} {'load':>4} "
        f"{'MB':>7}"
    )
    for k in sorted(kernels, key=lambda k: (int(k.arch), k.name)):
        moved = k.bytes_moved()
        megabytes = "" if moved is None else f"{moved / 1e6:.1f}"
        print(
            f"sm_{k.arch:3} {k.name:48} {k.registers:4} {k.spills:5} {k.shared:5} "
            f"{k.occupancy:5.0%} {k.widest_load:4} {megabytes:>7}"
        )
    found = faults(kernels)
    for line in found:
        print(f"fault: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
