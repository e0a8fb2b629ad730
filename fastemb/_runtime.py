"""Controls of the running process: deferred CUDA errors and recycled CPU memory."""

from __future__ import annotations

import ctypes
import sys

import torch

from fastemb import _native


def check_errors(device: torch.device | str | int | None = None) -> None:
    """Wait for a CUDA device and raise what fastemb's kernels on it have found wrong.

    On CUDA a bad id or offset is left out of its bag, reported by the kernel, and raised by the
    next fastemb operator on that device. This call raises it now. ``FASTEMB_SYNC_CHECKS=1`` in the
    environment makes every operator wait and raise its own errors, for debugging.

    Args:
        device: the CUDA device, the current one by default. Without CUDA nothing is pending: CPU
            operators raise at once.

    Raises:
        IndexError: an id was outside its table.
        ValueError: offsets did not ascend from 0 or passed the end of the ids.
    """
    if not torch.cuda.is_initialized():
        return
    with torch.cuda.device(device):
        torch.ops.fastemb.check_errors(torch.empty(0, device="cuda"))
    triton_errors = sys.modules.get("fastemb.triton.errors")
    if triton_errors is not None:
        triton_errors.check_errors()


def empty_cache() -> int:
    """Give recycled CPU buffers (gradients and scratch) back to the system.

    At most 1 GiB is kept, or one buffer that is larger.

    Returns:
        How many bytes were given back.
    """
    function = _native.cpu_function("fastemb_empty_cpu_cache")
    if function is None:
        return 0
    function.restype = ctypes.c_int64
    return int(function())
