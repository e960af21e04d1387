"""How long a test waits for what should happen at once; only a failing one waits so long."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")
WAIT_S = 60.0
LOOK_S = 0.01
BUSY_S_MAX = float(os.environ.get("BUSY_S_MAX", "120"))
"""So much longer what has not come is waited for on a machine that has other work."""
_PRESSURE = Path("/proc/pressure/cpu")


class Patience:
    """So many seconds, of which those do not count in which processes had to wait for a processor
    (``BUSY_S_MAX`` of them at most): what takes a second on a machine that has time for it takes
    many where it has not. Where the kernel does not say how busy it is, every second counts."""

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
    """For so long, since the machine's start, somebody has waited for a processor."""
    try:
        return int(_PRESSURE.read_text().partition("total=")[2].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0


async def soon(awaitable: Awaitable[T]) -> T:
    """The result, within a bounded time."""
    async with asyncio.timeout(WAIT_S):
        return await awaitable


def until(
    look: Callable[[], T], timeout_s: float = 60.0, log: Callable[[], object] = lambda: ""
) -> T:
    """What ``look`` finds, as soon as it finds something: for what another process does, and says
    nowhere else. ``log`` is what to show when that does not happen."""
    patience = Patience(timeout_s)
    while not (found := look()):
        assert not patience.is_over, f"not within {timeout_s} s: {log()}"
        time.sleep(LOOK_S)  # real time: another process
    return found


async def comes(
    look: Callable[[], T | Awaitable[T]], timeout_s: float = 60.0, every_s: float = LOOK_S
) -> T:
    """The same in an event loop; ``look`` may have to be awaited."""
    patience = Patience(timeout_s)
    async with asyncio.timeout(timeout_s + BUSY_S_MAX):
        while True:
            found = look()
            if isawaitable(found):
                found = await found
            if found:
                return found
            if patience.is_over:
                raise TimeoutError(f"not within {timeout_s} s")
            await asyncio.sleep(every_s)  # real time: another process, or a thread


def slowly(monkeypatch: pytest.MonkeyPatch, times: float = 5.0) -> None:
    """This loop's clock goes so much slower: a busy machine may hold a process up for a tenth of a
    second, and a lease or a wait of that length is over then, as it should be."""
    loop = asyncio.get_running_loop()
    real, began_s = loop.time, loop.time()
    monkeypatch.setattr(loop, "time", lambda: began_s + (real() - began_s) / times)


async def rest(seconds: float) -> None:
    """A pause of whoever loads or disturbs a daemon in another process; it waits for nothing."""
    await asyncio.sleep(seconds)  # real time: it is the load
