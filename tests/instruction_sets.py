"""One script at every instruction-set level of the CPU kernels that this machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fastemb import _native


def printed_by_each(script: str) -> dict[str, str]:
    """What ``script`` prints at each level, in a process of its own: the level is chosen at load.

    Args:
        script: Python that prints the active level and one more word; it can import the tests.
    """
    words = {}
    for level in _native.cpu_isa()["available"]:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parent,
            env={**os.environ, "FASTEMB_CPU_ISA": level},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        active, words[level] = done.stdout.split()
        assert active == level
    assert words
    return words
