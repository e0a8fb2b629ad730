"""Tensors that outlive the inference mode in which they happen to be made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors that can be saved and written after a ``torch.inference_mode()``, too."""
    with torch.inference_mode(False), torch.no_grad():  # which the former would end, too
        yield
