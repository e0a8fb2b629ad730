"""Pages that hold the records of a table: anonymous, or those of a file; pinned if asked for."""

from __future__ import annotations

import contextlib
import mmap
import warnings
from functools import cache

import torch
from torch import Tensor

from fastemb._memory import advise_huge_pages

_PORTION = 32 << 20  # bytes that are copied at a time
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux; in Python from 3.13 on


class Mapping(mmap.mmap):
    """Memory that lives as long as something refers to it, such as a tensor of `tensor`.

    ``close()`` would pull it from under those tensors and is never called: drop the references.
    """

    _of_file = False
    _pinned_at: int | None = None

    @classmethod
    def anonymous(cls, size: int) -> Mapping:
        """Zeros in RAM, exactly ``size`` bytes, on huge pages where there are any."""
        mapping = cls(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise_huge_pages(mapping.tensor())
        return mapping

    @classmethod
    def of_file(cls, descriptor: int, size: int) -> Mapping:
        """The whole file; what is written into it reaches the file."""
        mapping = cls(descriptor, size)
        mapping._of_file = True
        mapping.read_ahead(False)
        return mapping

    @classmethod
    def copy_of_file(cls, descriptor: int, size: int) -> Mapping:
        """The whole file; what is written into it stays here, and takes memory only then."""
        return cls(descriptor, size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)

    def tensor(self, offset: int = 0) -> Tensor:
        """[bytes] uint8 from ``offset`` on, which keeps the memory alive."""
        return torch.frombuffer(self, dtype=torch.uint8, offset=offset)

    def rewrite(self, offset: int) -> None:
        """Write what is there again, from ``offset`` on, so that the disk gets all of it anew."""
        for begin in range(offset, len(self), _PORTION):
            part = slice(begin, begin + _PORTION)
            self[part] = self[part]

    def read_ahead(self, on: bool) -> None:
        """Rows are looked up all over a file, so reading ahead is for scans only."""
        if self._of_file:
            self.madvise(mmap.MADV_SEQUENTIAL if on else mmap.MADV_RANDOM)

    @property
    def pinned(self) -> bool:
        return self._pinned_at is not None

    def pin(self, owner: str) -> None:
        """Register the memory with CUDA; where that fails, warn that ``owner`` stays pageable."""
        address = self.tensor().data_ptr()
        try:
            error = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        except (RuntimeError, AssertionError) as reason:  # no driver; a torch without CUDA
            why = str(reason)
        else:
            if error == 0:
                self._pinned_at = address
                return
            why = f"cudaHostRegister returned CUDA error {error}"
            _clear_cuda_error()
        warnings.warn(
            f"{owner}: {len(self)} bytes could not be pinned and stay pageable, which makes copies "
            f"to and from the device slower: {why}",
            RuntimeWarning,
            stacklevel=3,
        )

    def unpin(self) -> None:
        if self._pinned_at is not None:
            address, self._pinned_at = self._pinned_at, None
            torch.cuda.cudart().cudaHostUnregister(address)

    def __del__(self) -> None:
        # Before the pages go. Not a weakref callback: mmap runs those after it has unmapped.
        with contextlib.suppress(Exception):  # when the process ends CUDA may be gone already
            self.unpin()


def buffer(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[elements] zeros on the host, for copies from and to ``device`` that nobody waits for."""
    if device.type == "cuda":
        try:
            return torch.zeros(elements, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _warn_of_pageable(str(error))
    return torch.zeros(elements, dtype=dtype, device="cpu")


@cache
def _warn_of_pageable(why: str) -> None:
    warnings.warn(
        f"fastemb.offload: buffers cannot be pinned ({why}); copies from pageable memory are slow "
        "and do not overlap with computation",
        RuntimeWarning,
        stacklevel=3,
    )


def _clear_cuda_error() -> None:
    """CUDA keeps a failed call as its last error, which torch would raise at its next kernel."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device="cuda").add_(1)
