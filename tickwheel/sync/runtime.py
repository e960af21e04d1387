"""A thread with an event loop, and in it one asynchronous client: what blocking calls rest on.

Knows no verb. Invariants: the connection is made with the first call, and tried again with the
next one when that failed; calls that come meanwhile wait for the same attempt, each for its own
time. A runtime belongs to the process that made it: after a fork the child has the object and not
the thread, so it never touches its loop, and only makes sure that it does not hold the connection.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from tickwheel.api.times import seconds
from tickwheel.client import Client
from tickwheel.client.delivery import seen
from tickwheel.errors import BadRequest, ClientClosed

T = TypeVar("T")

LEFT_S_MIN = 0.001
"""The least time, in seconds, that a call has left after connecting: it says that it is over."""
STOP_S = 5.0
"""How long, in seconds, the thread may take to end after the client was closed."""


class Runtime:
    """Runs an asynchronous client in a thread: ``call`` from any thread, ``close`` once."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._pid = os.getpid()
        self._make = make
        self._client: Client | None = None
        self._attempt: Client | None = None
        self._connecting: asyncio.Task[Client] | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Held while a call is handed to the loop: a call that was handed over is answered."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="tickwheel-client", daemon=True)
        self._thread.start()

    # --- for callers, in their threads ----------------------------------------------------------

    def call(
        self, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **options: Any
    ) -> T:
        """Return or raise what ``method(client, *arguments, **options)`` does."""
        return self.call_or(None, method, *arguments, **options)

    def call_or(
        self,
        unused: Callable[[T], None] | None,
        method: Callable[..., Coroutine[Any, Any, T]],
        *arguments: Any,
        **options: Any,
    ) -> T:
        """``call``; ``unused`` gets, in the loop's thread, a result that came when the caller had
        been interrupted."""
        if threading.current_thread() is self._thread:
            raise BadRequest(
                "a blocking call in the client's own thread would wait for itself for ever: in the"
                " callback of a future use enqueue_nowait, or another thread"
            )
        future = self.submit(method, *arguments, **options)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client was closed while the call was under way") from None
        except BaseException as error:
            # An answer of the call itself, or Ctrl-C while it was waited for.
            if not (future.done() and not future.cancelled() and future.exception() is error):
                future.cancel()
                if unused is not None:
                    future.add_done_callback(_give(unused))
            raise

    def submit(
        self, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **options: Any
    ) -> Future[T]:
        """``call`` as a future."""
        if self._pid != os.getpid():
            raise ClientClosed(
                "this is of the process from before a fork: subscriptions and deliveries stay with"
                " the process that has the connection"
            )
        with self._lock:
            if self._closed:
                raise ClientClosed("the client is closed")
            work = self._call(method, arguments, options)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def connected(self) -> bool:
        client = self._client
        return client is not None and client.connected

    def close(self, timeout_s: float | None) -> None:
        """Close the client and end the thread; harmless if closed, or of another process."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._close(timeout_s), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def forget(self) -> None:
        """Abandon the connection in the child of a fork: it is the parent's alone."""
        connection = None if self._client is None else self._client._reconnector.connection
        descriptor = -1 if connection is None else connection.fileno()
        if descriptor < 0:
            return
        # A descriptor that is closed here may be another file's when the abandoned socket closes
        # it again; and the loop's epoll set, which closing it by the loop would change, is shared.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)

    # --- in the loop's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def _call(
        self,
        method: Callable[..., Coroutine[Any, Any, T]],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> T:
        if self._closed:
            raise ClientClosed("the client was closed before the call was made")
        client = self._client
        if client is None:
            began_s, timeout = self._loop.time(), options.get("timeout")
            timeout_s = None if timeout is None else seconds(timeout, "timeout")
            client = await self._connected(timeout_s)
            if timeout_s is not None:
                left_s = timeout_s - (self._loop.time() - began_s)
                options["timeout"] = max(left_s, LEFT_S_MIN)
        return await method(client, *arguments, **options)

    async def _connected(self, timeout_s: float | None) -> Client:
        """The connected client. Raises as ``Client.connect``, and after ``timeout_s``."""
        if self._connecting is None or self._connecting.done():
            self._connecting = self._loop.create_task(self._connect())
            self._connecting.add_done_callback(seen)
        done, _ = await asyncio.wait((self._connecting,), timeout=timeout_s)
        if not done:
            assert timeout_s is not None and self._attempt is not None
            raise self._attempt._reconnector.unreachable(timeout_s)
        return self._connecting.result()

    async def _connect(self) -> Client:
        self._attempt = self._make()
        self._client = await self._attempt.connect()
        return self._client

    async def _close(self, timeout_s: float | None) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        if self._client is not None:
            await self._client.close(timeout_s)
        # What is left waits for nothing that could come: a subscription's next delivery ended.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, stuck = await asyncio.wait(others, timeout=1.0)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)


def _give(unused: Callable[[T], None]) -> Callable[[Future[T]], None]:
    def give(future: Future[T]) -> None:
        if not future.cancelled() and future.exception() is None:
            unused(future.result())

    return give
