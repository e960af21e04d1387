"""SIGTERM and SIGINT while a worker runs: the first asks it to stop, the second to hurry."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_signals(stop: Callable[[], None], hurry: Callable[[], None]) -> Iterator[None]:
    """Handlers for the block's time; none where the platform or the thread allows none."""
    loop = asyncio.get_running_loop()
    asked = False

    def heard() -> None:
        nonlocal asked
        (hurry if asked else stop)()
        asked = True

    before = {}
    for number in SIGNALS:
        try:
            before[number] = signal.getsignal(number)
            loop.add_signal_handler(number, heard)
        except (NotImplementedError, RuntimeError, ValueError):
            before.pop(number, None)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # None: installed by something that is not Python
                signal.signal(number, handler)
