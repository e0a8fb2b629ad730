"""What kernels find wrong with ids and offsets, told to the host without making it wait.

Each device has four int64 words: a claim, and three numbers about it. The program that changes the
claim from zero owns the other words; later findings are dropped until the host has raised that one.
The claim says who launched the kernel (operator and table, numbered by the host) and what is wrong.

On the CPU (interpreted kernels) errors are raised before an operator returns, on CUDA at the next
point where the host waits anyway, or at once with ``FASTEMB_SYNC_CHECKS=1``.
"""

from __future__ import annotations

import os
import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

# What is wrong; a claim is caller * KINDS + kind.
BAD_INDEX = tl.constexpr(1)  # words: position, id, rows of the table
FIRST_OFFSET = tl.constexpr(2)  # words: 0, the offset, unused
OFFSET_BEYOND = tl.constexpr(3)  # words: place, the offset, number of indices
OFFSET_FALLS = tl.constexpr(4)  # words: place, the offset, the one before
KINDS = tl.constexpr(8)

# A position that no index has: positions are below 2**31 - 1.
NO_POSITION = tl.constexpr(2**31 - 1)


@triton.jit
def report(status, caller, kind, position, value, other):
    claim = caller.to(tl.int64) * KINDS + kind
    free = tl.full((), 0, tl.int64)
    if tl.atomic_cas(status, free, claim) == 0:
        tl.store(status + 1, position.to(tl.int64))
        tl.store(status + 2, value.to(tl.int64))
        tl.store(status + 3, other.to(tl.int64))


@triton.jit
def wrong_positions(position, there, valid):
    """For `report_index`: the positions that are there and name no row."""
    return tl.where(there & ~valid, position.to(tl.int32), NO_POSITION)


@triton.jit
def report_index(status, caller, first_bad, indices, num_embeddings):
    """first_bad: block of positions of wrong ids, NO_POSITION where there is none."""
    position = tl.min(first_bad, axis=0)
    if position != NO_POSITION:
        report(status, caller, BAD_INDEX, position, tl.load(indices + position), num_embeddings)


@triton.jit
def report_offset(status, caller, wrong, offsets, num_indices):
    """wrong: place of a wrong offset, negative for none."""
    if wrong >= 0:
        value = tl.load(offsets + wrong).to(tl.int64)
        before = tl.load(offsets + wrong - 1, mask=wrong > 0, other=0).to(tl.int64)
        beyond = value > num_indices
        kind = tl.where(wrong == 0, FIRST_OFFSET, tl.where(beyond, OFFSET_BEYOND, OFFSET_FALLS))
        other = tl.where(beyond, num_indices, before)
        report(status, caller, kind, wrong, value, other)


_lock = threading.Lock()
_status: dict[torch.device, Tensor] = {}
_callers: list[tuple[str, str]] = []
_numbers: dict[tuple[str, str], int] = {}


def status_of(device: torch.device) -> Tensor:
    """The device's four words."""
    with _lock:
        if device not in _status:
            status = torch.zeros(4, dtype=torch.int64, device=device)
            if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                # Kernels on other streams could come before the zeros.
                torch.cuda.current_stream(device).synchronize()
            _status[device] = status
        return _status[device]


def caller_of(op: str, table: str) -> int:
    """Number by which kernels name an operator that reads a table; small and never zero."""
    with _lock:
        number = _numbers.get((op, table))
        if number is None:
            _callers.append((op, table))
            number = _numbers[op, table] = len(_callers)
        return number


def settle(device: torch.device) -> None:
    """Call after every launch: raises at once where that was asked for or costs nothing."""
    asked = os.environ.get("FASTEMB_SYNC_CHECKS", "0") not in ("", "0")
    # A graph that is being captured has not run, and nothing may wait for it.
    if device.type == "cpu" or (asked and not torch.cuda.is_current_stream_capturing()):
        raise_pending(device)


def raise_pending(device: torch.device) -> None:
    """Raise what kernels launched so far on the current stream have found. The host waits.

    Raises:
        IndexError: an id is outside its table.
        ValueError: offsets do not ascend from 0 or pass the end of the indices.
    """
    with _lock:
        status = _status.get(device)
        if status is None:
            return
        claim, position, value, other = status.tolist()
        if claim == 0:
            return
        status.zero_()
        op, table = _callers[claim // KINDS.value - 1]
    kind = claim % KINDS.value
    if kind == BAD_INDEX.value:
        name = f"table '{table}'" if table else "the table"
        raise IndexError(
            f"{op}: index {value} at position {position} is out of range for {name} with "
            f"{other} rows"
        )
    if kind == FIRST_OFFSET.value:
        raise ValueError(f"{op}: offsets[0] must be 0, got {value}")
    if kind == OFFSET_BEYOND.value:
        raise ValueError(
            f"{op}: offsets[{position}] = {value} is greater than the number of indices, {other}"
        )
    raise ValueError(
        f"{op}: offsets[{position}] = {value} is less than offsets[{position - 1}] = {other}"
    )


def check_errors() -> None:
    """Wait for every device that has run kernels of this backend and raise what they have found."""
    for device in list(_status):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        raise_pending(device)
