"""Wait for events in tests, within a bounded time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")
WAIT_S = 60.0
LOOK_S = 0.01
BUSY_S_MAX = float(os.environ.get("BUSY_S_MAX", "120"))
"""Maximum seconds that a wait is prolonged on a busy machine."""
_PRESSURE = Path("/proc/pressure/cpu")


class Patience:
    """Count down seconds of patience.

    Time in which processes waited for a processor does not count, up to `BUSY_S_MAX` seconds: an
    action that takes one second on an idle machine takes many on a busy one. Every second counts
    where the kernel does not report how busy it is.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._began_busy_s = busy_s()

    @property
    def is_over(self) -> bool:
        passed_s = time.monotonic() - self._began_s
        if passed_s < self._timeout_s:
            return False
        return passed_s - min(BUSY_S_MAX, busy_s() - self._began_busy_s) >= self._timeout_s


def busy_s() -> float:
    """Return the seconds since boot in which some process waited for a processor."""
    try:
        return int(_PRESSURE.read_text().partition("total=")[2].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0


@contextmanager
def counted_turns() -> Iterator[list[int]]:
    """Count the turns of the running event loop, in the only element of the list."""
    loop, turns = asyncio.get_running_loop(), [0]

    def turned() -> None:
        nonlocal handle
        turns[0] += 1
        handle = loop.call_soon(turned)

    handle = loop.call_soon(turned)
    try:
        yield turns
    finally:
        handle.cancel()


async def soon(awaitable: Awaitable[T]) -> T:
    """Return the result of `awaitable`. Raise TimeoutError if it takes too long."""
    async with asyncio.timeout(WAIT_S):
        return await awaitable


def until(
    look: Callable[[], T], timeout_s: float = 60.0, log: Callable[[], object] = lambda: ""
) -> T:
    """Call `look` until it returns a true value, and return that.

    For events in another process that cannot be signalled. A failure shows the text of `log`.
    """
    patience = Patience(timeout_s)
    while not (result := look()):
        assert not patience.is_over, f"not within {timeout_s} s: {log()}"
        time.sleep(LOOK_S)  # real time: another process
    return result


async def comes(
    look: Callable[[], T | Awaitable[T]], timeout_s: float = 60.0, every_s: float = LOOK_S
) -> T:
    """Like `until`, in an event loop; `look` may be a coroutine function."""
    patience = Patience(timeout_s)
    async with asyncio.timeout(timeout_s + BUSY_S_MAX):
        while True:
            result = look()
            if isawaitable(result):
                result = await result
            if result:
                return result
            if patience.is_over:
                raise TimeoutError(f"not within {timeout_s} s")
            await asyncio.sleep(every_s)  # real time: another process, or a thread


def slowly(monkeypatch: pytest.MonkeyPatch, times: float = 5.0) -> None:
    """Slow down the clock of this event loop.

    A busy machine can stop a process for a tenth of a second, and a lease of that length would
    end.
    """
    loop = asyncio.get_running_loop()
    real, began_s = loop.time, loop.time()
    monkeypatch.setattr(loop, "time", lambda: began_s + (real() - began_s) / times)


async def rest(seconds: float) -> None:
    """Pause a program that loads or disturbs a daemon in another process."""
    await asyncio.sleep(seconds)  # real time: it is the load
