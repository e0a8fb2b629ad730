"""Runs a test file again, on kernels built with AddressSanitizer and UBSan.

The file reads ``FASTEMB_EMU_SANITIZE`` and loads the sanitized kernels with 32 threads a block.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def _preload() -> str | None:
    """Libraries to load first: the sanitizer, and what it looks up ``__cxa_throw`` in."""
    compiler = os.environ.get("CXX", "g++")
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if not os.path.isabs(path):
            return None
        found.append(path)
    return " ".join(found)


def run_sanitized(file: Path, *options: str) -> None:
    """Fails with the output of ``pytest file options`` on sanitized kernels."""
    libraries = _preload()
    if libraries is None:
        pytest.skip("the compiler has no AddressSanitizer")
    environment = {
        **os.environ,
        "FASTEMB_EMU_SANITIZE": "1",
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    # The limit of the test that calls this holds: the first test in there compiles.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "--timeout=0", str(file)]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", *options],
        cwd=file.resolve().parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
