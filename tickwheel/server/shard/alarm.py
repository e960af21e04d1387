"""An alarm: calls back once, at a moment that is set in nanoseconds.

An event loop's own timers count whole milliseconds of the steady clock, and a task is due at the
beginning of a millisecond of the wall clock: with them a delivery left half a millisecond late on
average, and up to two. A timerfd is a file that can be read from a moment on, to the microsecond
(timerfd_create(2)); the event loop waits for it as for a socket. Where there is none (not Linux, no
file left, a loop that watches no files) the loop's timer stands in for it.

Knows nothing of tasks and of wall time. At most one call back comes of each ``set``.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

NS_A_SECOND = 1_000_000_000


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: it does not repeat, since ``interval`` is zero."""

    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class Alarm:
    """Calls ``ring`` in the event loop. ``close`` it in the end."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._fd: int | None = None
        self._spec = _TimerSpec()
        self._set_time: Callable[..., int] = int
        with suppress(OSError, AttributeError, NotImplementedError):
            self._open()

    def _open(self) -> None:
        """Raises what prevents it."""
        libc = _libc()
        make, self._set_time = libc.timerfd_create, libc.timerfd_settime
        # Its two flags are those of open(2).
        fd = make(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        try:
            self._loop.add_reader(fd, self._rings)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def set(self, after_ns: int) -> None:
        """Ring after so many nanoseconds, and not when it was set to before."""
        if self._fd is None:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0, after_ns) / NS_A_SECOND, self._ring)
            return
        value = self._spec.value
        # A value of zero would turn it off.
        value.seconds, value.nanoseconds = divmod(max(1, after_ns), NS_A_SECOND)
        self._set_time(self._fd, 0, ctypes.byref(self._spec), None)

    def _rings(self) -> None:
        assert self._fd is not None, "it is watched"
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was set anew in this turn of the loop
        self._ring()

    def close(self) -> None:
        """It does not ring any more. May be called twice."""
        if self._handle is not None:
            self._handle.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
        self._ring = _nothing


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _nothing() -> None:
    """What a closed alarm rings."""
