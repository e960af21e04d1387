"""Waiting that a cancellation does not cut short, and threads that nothing has to wait for, for
clients and the daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

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


AGAIN_S = 5.0
"""Seconds that a cancelled task has for its end before it is cancelled again."""


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until they have ended, ignoring their errors, also those of tasks that
    had ended before. A task that has not ended after ``AGAIN_S`` is cancelled again: a library can
    report a result, or the loss of its connection, that came at the same moment, instead of the
    cancellation."""
    ended = set(tasks)
    pending = {task for task in ended if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
    for task in ended:
        if not task.cancelled():
            task.exception()  # it is not reported as never retrieved


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a daemon thread and return its result. At exit, the process would wait for a
    thread of the loop's executor, even one whose input or endpoint never answers."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[_T] = loop.create_future()

    def finish(result: _T | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(result)  # type: ignore[arg-type]  # the result of ``work``

    def run() -> None:
        result: _T | None = None
        problem: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            problem = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, problem)

    threading.Thread(target=run, name="tickwheel-work", daemon=True).start()
    return await ended
