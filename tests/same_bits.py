"""The CPU kernels give the same bits on any number of threads, at every instruction-set level."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from fresh_process import execute
from torch import Tensor

from fastemb import _native

THREADS = (1, 2, 3, 7)
SCRIPT = """
import {module}
from fastemb import _native
print(_native.cpu_isa()["active"], {module}.digest(_native.backend("cpu")))
"""


@contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Of every bit; any NaN counts as any other."""
    found = sha256()
    for x in tensors:
        x = torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x
        found.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests_of_threads(digest: Callable[[Any], str]) -> set[str]:
    """What ``digest(ops)`` of the CPU's operators is on each number of threads."""
    digests = set()
    for threads in THREADS:
        with use_threads(threads):
            digests.add(digest(_native.backend("cpu")))
    return digests


def digests_of_levels(module: str) -> dict[str, str]:
    """What a test module's ``digest(ops)`` is at each level that this machine has.

    Each in a process of its own: the level is chosen when the library is loaded.
    """
    digests = {}
    for level in _native.cpu_isa()["available"]:
        done = execute(
            SCRIPT.format(module=module),
            Path(__file__).parent,
            {**os.environ, "FASTEMB_CPU_ISA": level},
        )
        assert done.returncode == 0, done.stderr
        active, digests[level] = done.stdout.split()
        assert active == level
    assert digests
    return digests
