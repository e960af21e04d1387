"""Waiting that a cancellation does not cut short, for clients and daemon alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

_T = TypeVar("_T")


async def to_its_end(work: Awaitable[_T]) -> _T:
    """Run ``work`` to its end, also when the caller is cancelled meanwhile, once or more often;
    then return or raise as it did, or raise the cancellation."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    found = task.result()
    if cancelled is not None:
        raise cancelled
    return found
