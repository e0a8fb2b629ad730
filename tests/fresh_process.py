"""Processes that begin with torch imported, and nothing of fastemb.

A new Python takes seconds to import torch. Here one process does it once, which forks the others.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from subprocess import CompletedProcess


def forkserver() -> ForkServerContext:
    """Where such processes come from, with what our tests import at hand, too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest", "hypothesis"])
    return context


def execute(script: str, folder: Path, environment: Mapping[str, str]) -> CompletedProcess[str]:
    """As ``python -c script`` in a folder, which comes first on the path."""
    with tempfile.TemporaryDirectory() as output:
        process = forkserver().Process(
            target=_execute, args=(script, str(folder), dict(environment), output)
        )
        process.start()
        process.join()
        texts = [Path(output, name).read_text() for name in ("stdout", "stderr")]
    assert process.exitcode is not None
    return CompletedProcess(script, process.exitcode, *texts)


def _execute(script: str, folder: str, environment: dict[str, str], output: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        target = os.open(Path(output, stream.name.strip("<>")), os.O_WRONLY | os.O_CREAT)
        os.dup2(target, stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    exec(script, {"__name__": "__main__"})
