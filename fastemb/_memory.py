"""Huge pages for the memory behind large CPU tables.

A lookup of random rows in a large table misses the TLB at nearly every row when the table sits on
4 KiB pages. On Linux ``madvise`` asks for 2 MiB pages; where the kernel cannot, nothing changes.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_SMALLEST = 2 * _HUGE_PAGE  # below it the TLB is no problem
_MADV_HUGEPAGE = 14  # pages that are touched from now on
_MADV_COLLAPSE = 25  # Linux 6.1: pages that are there already, at the cost of a copy


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


def advise_huge_pages(tensor: Tensor, *, collapse: bool = False) -> bool:
    """Ask the kernel to put the storage of ``tensor`` on huge pages.

    The advice holds for pages touched after it, so give it between allocation and first write.
    ``collapse=True`` moves the pages that were touched before: a copy of the table within the
    kernel, some seconds per GB, worth it once in the life of a table.

    Returns:
        Whether the kernel took the advice. False for tensors that are not on the CPU, have no
        memory (meta, fake), or are smaller than 4 MiB, and on systems other than Linux.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return False
    if type(tensor.data) is not Tensor:  # a fake tensor, or another one without memory of its own
        return False
    madvise = _madvise()
    if madvise is None:
        return False
    storage = tensor.untyped_storage()
    begin, size = storage.data_ptr(), storage.nbytes()
    if begin == 0 or size < _SMALLEST:
        return False
    first = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
    last = (begin + size) // _HUGE_PAGE * _HUGE_PAGE
    took = madvise(first, last - first, _MADV_HUGEPAGE) == 0
    if collapse:
        took = madvise(first, last - first, _MADV_COLLAPSE) == 0 and took
    return took
