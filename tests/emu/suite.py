"""What every test file of the emulated kernels has in common.

`SANITIZE` is set where `sanitizer.run_sanitized` runs the file again: on a slower build, with
another block size and fewer examples.
"""

from __future__ import annotations

import os

import pytest
from draws import drawn
from hypothesis import settings
from hypothesis import strategies as st

from .backend import missing_tools

SANITIZE = os.environ.get("FASTEMB_EMU_SANITIZE") == "1"
BLOCK = 32 if SANITIZE else 64

needs_tools = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))
# Of blocks and threads: the arguments of set_order.
orders = st.tuples(st.sampled_from(["forward", "backward", "shuffled"]), st.integers(0, 2**32))


def examples_of(number: int, sanitized: int) -> settings:
    """So many examples, the same in every run."""
    return drawn(sanitized if SANITIZE else number, derandomize=True, database=None)
