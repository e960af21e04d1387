"""Threads for handlers that are plain functions.

Not a ``ThreadPoolExecutor``: that one is joined when the interpreter ends, so that a handler which
hangs would keep a stopped worker from ending. Threads are reused, so that what a handler keeps in
thread-local storage (a database connection) lives on. Invariant: at most as many threads as calls
were under way at a time; what a call returns to is the event loop it came from.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any


class Call:
    """One call. ``ended`` is done when the function has returned; it is never cancelled."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._function = function
        self._arguments = arguments
        self.result: asyncio.Future[Any] = self._loop.create_future()
        """What it returned or raised; whoever waits for it may be cancelled."""
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def run(self) -> None:
        """In the thread."""
        value: Any = None
        error: BaseException | None = None
        try:
            value = self._context.run(self._function, *self._arguments)
        except BaseException as problem:
            error = problem
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finish, value, error)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        self.ended.set_result(None)
        if self.result.done():
            return
        if error is None:
            self.result.set_result(value)
        elif isinstance(error, (Exception, asyncio.CancelledError)):
            self.result.set_exception(_awaitable(error))
            self.result.exception()  # seen: the job may have been given up
        else:  # SystemExit in a thread ends the thread's call, not the program
            self.result.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
            self.result.exception()


class Threads:
    """``start`` calls; ``stop`` lets idle threads end. Threads never keep the process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def start(self, function: Callable[..., Any], *arguments: Any) -> Call:
        """Call it in a thread, with the context variables of now."""
        call = Call(function, arguments)
        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            self._count += 1
            name = f"{self._name}-{self._count}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return call

    def stop(self) -> None:
        """Each thread ends when it is done with what it does."""
        for _ in range(self._count):
            self._calls.put(None)
        self._count = 0

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call
            self._idle.release()


def _awaitable(error: BaseException) -> BaseException:
    """A future cannot hold StopIteration, and a cancelled one would look like a cancelled job."""
    if isinstance(error, (StopIteration, asyncio.CancelledError)):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
