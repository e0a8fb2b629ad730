"""Processes that are started to be killed: what the kill tests' children have in common."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def serve(train: Callable[[Path, str, int], None]) -> None:
    """Fork a process for each line of stdin, "PATH MODE", and print its number once it has begun.

    It calls ``train`` with the path, the mode and a file descriptor, to which it writes a byte when
    it may be killed; "dead" is printed when it was.
    """
    for line in sys.stdin:
        path, mode = line.split()
        begun_read, begun = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                train(Path(path), mode, begun)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(begun)
        started = os.read(begun_read, 1)
        os.close(begun_read)
        print(child if started else -1, flush=True)
        os.waitpid(child, 0)
        print("dead", flush=True)
