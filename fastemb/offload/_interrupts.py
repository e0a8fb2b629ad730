"""Work that Ctrl-C, or the death of a worker of a `DataLoader`, must not end half way.

Python calls signal handlers between any two instructions of the main thread, and those that raise
leave behind what was just changing. Here they are called a little later.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` costs ten times as much, for its enums
import signal
import threading
from collections import deque
from types import FrameType

# Those whose handlers raise, in Python, torch and test runners.
_SIGNALS = tuple(
    map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGHUP))
)


class _Uninterrupted:
    """A context whose signals are handled when it is left; wait for nothing in it.

    Reentrant. Nothing on other threads, where Python calls no handlers.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, object] = {}
        self._waiting: deque[tuple[int, FrameType | None]] = deque()

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._depth:
            # A handler that raises here leaves `_note`, which passes on what it gets, until the
            # next time.
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler) and handler != self._note:
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            self._leave()

    def _leave(self) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        self._depth = 0
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == self._note:
                    _signal.signal(number, handler)
        finally:
            self._catch_up()

    def _catch_up(self) -> None:
        if self._waiting:
            try:
                self._call(*self._waiting.popleft())
            finally:
                self._catch_up()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            if all(number != other for other, _ in self._waiting):  # as those that a process blocks
                self._waiting.append((number, frame))
        else:
            self._call(number, frame)

    def _call(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers[number]
        assert callable(handler)
        handler(number, frame)


uninterrupted = _Uninterrupted()
