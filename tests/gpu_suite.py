"""What the files of GPU tests have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

DEVICE = "cuda"


def there(*tensors: Tensor) -> list[Tensor]:
    return [x.to(DEVICE, copy=True) for x in tensors]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def can_capture() -> bool:
    """False where the driver is a stand-in without graphs."""
    x = torch.zeros(1).to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            x.zero_()
    except RuntimeError:
        return False
    return True
