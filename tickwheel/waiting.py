"""Waiting that is not cut short by a cancellation, for clients and the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


async def finish_despite_cancellation(work: Awaitable[_T]) -> _T:
    """Run ``work`` to its end even if the caller is cancelled, once or repeatedly. Then raise the
    error of ``work`` or the cancellation, or return the result of ``work``."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
