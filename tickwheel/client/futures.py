"""Futures that somebody may or may not look at."""

from __future__ import annotations

import asyncio
from typing import Any

from tickwheel.errors import TickwheelError


def fail(future: asyncio.Future[Any], error: TickwheelError) -> bool:
    """Set the exception unless it is done; whether it was set.

    It counts as seen: a future of ``enqueue_nowait`` or ``ack_nowait`` that nobody looks at
    must not end in "exception was never retrieved". The client logs such failures itself, one
    line a frame.
    """
    if future.done():
        return False
    future.set_exception(error)
    future.exception()
    return True
