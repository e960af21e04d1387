"""The synchronous client, for Django, Flask and scripts. Its only dependency is msgpack.

    from tickwheel.sync import Client

    client = Client("tcp://127.0.0.1:7355")          # one for each process; any thread can use it
    client.enqueue("orders.close", b"42", delay=1800, timeout=2)

It runs the asynchronous client in a separate thread (``Runtime``), with the same verbs, arguments
and errors. Each verb copies the docstring, parameters and types of the asynchronous one.
Invariants:

* Every thread can use every object concurrently.
* The first call connects. If that fails, the next call tries again; concurrent calls wait for the
  same attempt, each up to its own timeout.
* A runtime belongs to the process that created it. After a fork, the child has the object but not
  its thread. In the child, the runtime does not use the event loop; it only ensures that the child
  does not keep the connection open. An inherited client opens a new connection in the child, and
  objects of the parent's connection raise ClientClosed.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from tickwheel.api.frames import AckWord
from tickwheel.api.groups import MadeGroup
from tickwheel.api.schedules import ScheduleInfo
from tickwheel.api.tasks import TaskInfo
from tickwheel.api.times import Duration, seconds
from tickwheel.client import Client as AsyncClient
from tickwheel.client import Delivery as AsyncDelivery
from tickwheel.client import Subscription as AsyncSubscription
from tickwheel.client.checks import Check
from tickwheel.client.connection import DEFAULT_URL, LOGGER
from tickwheel.client.delivery import Delivered, ack_in_s, mark_retrieved
from tickwheel.client.encodings import Codec, body_of
from tickwheel.client.link import closing_s, descriptors, unreachable
from tickwheel.client.producer import QUEUE_BYTES_MAX, QUEUE_TASKS_MAX
from tickwheel.client.sql import SCHEMA, ack_command, write
from tickwheel.client.subscription import settle_failed
from tickwheel.client.tasks import Receipt
from tickwheel.client.transactions import Transaction as AsyncTransaction
from tickwheel.errors import BadRequest, ClientClosed, Overloaded, StaleReceipt, TickwheelError
from tickwheel.limits import Limits
from tickwheel.version import __version__

__all__ = ["Client", "Delivery", "Subscription", "Transaction"]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H", bound=Callable[[Check], str | None])

NAME = f"tickwheel-python-sync/{__version__}"
"""The default name of a client."""
PAGE_ITEMS = 256
"""Number of items of a listing that one call fetches from the client's thread."""
EXIT_S = 1.0
"""Maximum seconds that an unclosed client takes to disconnect when the program ends."""
LEFT_S_MIN = 0.001
"""Minimum timeout of a call after connecting, so that the call itself reports the timeout."""
STOP_S = 5.0
"""Maximum seconds to wait for the thread after the client was closed."""


# --- the thread -----------------------------------------------------------------------------------


class Runtime:
    """Runs an asynchronous client in a thread. Any thread can use ``call``; ``close`` ends it."""

    _tasks = _bytes = 0
    """Tasks and bytes of ``submit_task`` without an outcome."""

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        self._pid = os.getpid()
        self._make = make
        self._client: AsyncClient | None = None
        self._attempt: AsyncClient | None = None
        self._waiting = 0
        """Calls that wait for the connection."""
        self._connecting: asyncio.Task[AsyncClient] | None = None
        self._closed = False
        self._lock = threading.RLock()
        """Held while a call is passed to the loop, so that every call gets an answer. It is
        reentrant, because a signal handler may call the client at that moment."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="tickwheel-client", daemon=True)
        self._thread.start()

    # --- for callers, in their threads ----------------------------------------------------------

    def call(
        self, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **options: Any
    ) -> T:
        """Run ``method(client, *arguments, **options)`` in the thread. Return its result or raise
        its error."""
        return self.call_or(None, method, *arguments, **options)

    def _check_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise BadRequest(
                "a blocking call in the client's own thread would wait for itself forever: in a"
                " future's callback, use enqueue_nowait or another thread"
            )

    def call_or(
        self,
        on_unused: Callable[[T], None] | None,
        method: Callable[..., Coroutine[Any, Any, T]],
        *arguments: Any,
        **options: Any,
    ) -> T:
        """Do the same as ``call``. If the caller is interrupted, ``on_unused`` is called with the
        result, in the loop's thread."""
        self._check_thread()
        future = self.submit(method, *arguments, **options)
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client was closed during the call") from None
        except BaseException as error:
            # This is the error of the call, or an interruption by Ctrl-C.
            if not (future.done() and not future.cancelled() and future.exception() is error):
                future.cancel()
                if on_unused is not None:
                    future.add_done_callback(_unless_failed(on_unused))
            raise

    def submit(
        self, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **options: Any
    ) -> Future[T]:
        """Do the same as ``call``, but return a future of the result."""
        if self._pid != os.getpid():
            raise ClientClosed(
                "this object belongs to the parent process of a fork: subscriptions and deliveries"
                " stay with the process that has the connection"
            )
        with self._lock:
            if self._closed:
                raise ClientClosed("the client is closed")
            work = self._call(method, arguments, options)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def submit_task(
        self, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **options: Any
    ) -> Future[T]:
        """Do the same as ``submit`` for the enqueue of one task. Raise Overloaded if too many of
        them wait."""
        body = arguments[1] if len(arguments) > 1 else options["body"]
        size = len(body) if isinstance(body, (bytes, bytearray, memoryview)) else 0
        with self._lock:
            has_room = self._tasks < QUEUE_TASKS_MAX and self._bytes + size <= QUEUE_BYTES_MAX
            if self._tasks and not has_room:
                raise Overloaded(
                    f"{self._tasks} tasks with {self._bytes} bytes wait to be sent or answered; the"
                    f" limits are {QUEUE_TASKS_MAX} and {QUEUE_BYTES_MAX}: wait for some futures"
                )
            future = self.submit(method, *arguments, **options)
            self._count(1, size)
        future.add_done_callback(lambda _: self._count(-1, -size))
        return future

    def _count(self, tasks: int, size: int) -> None:
        with self._lock:
            self._tasks += tasks
            self._bytes += size

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of ``work()``, which runs in the thread even without a connection."""
        self._check_thread()
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result()

    @property
    def connected(self) -> bool:
        client = self._client
        return client is not None and client.connected

    def close(self, timeout_s: float | None) -> None:
        """Close the client and end the thread. Do nothing if it is closed, or in another
        process."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._check_thread()
            self._closed = True
        asyncio.run_coroutine_threadsafe(self._close(timeout_s), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)

    def forget(self) -> None:
        """Abandon the connection in the child of a fork, because only the parent uses it."""
        client = self._client
        if client is None:
            return
        for descriptor in descriptors(client):
            self._replace_with_devnull(descriptor)

    @staticmethod
    def _replace_with_devnull(descriptor: int) -> None:
        # Do not close the descriptor: the abandoned socket will close the same number later, when
        # it may belong to another file. Closing it in the loop would change the shared epoll set.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)

    # --- in the loop's thread -------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while True:
                try:
                    self._loop.run_forever()
                    break
                except (SystemExit, KeyboardInterrupt) as error:
                    # A callback or check handler exits. Without this thread, calls would hang.
                    LOGGER.error("a function in the client's thread raised %r", error)
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
        client = self._client
        if client is None:
            began_s, timeout = self._loop.time(), options.get("timeout")
            timeout_s = None if timeout is None else seconds(timeout, "timeout")
            client = await self._connected_client(timeout_s)
            if timeout_s is not None:
                left_s = timeout_s - (self._loop.time() - began_s)
                options["timeout"] = max(left_s, LEFT_S_MIN)
        return await method(client, *arguments, **options)

    async def _connected_client(self, timeout_s: float | None) -> AsyncClient:
        """Return the connected client. Raise the errors of ``Client.connect``, and Unreachable
        after ``timeout_s``."""
        if self._connecting is None or self._connecting.done():
            self._attempt = self._make()
            self._connecting = self._loop.create_task(self._connect(self._attempt))
            self._connecting.add_done_callback(mark_retrieved)
        connecting, attempt = self._connecting, self._attempt
        self._waiting += 1
        try:
            done, _ = await asyncio.wait((connecting,), timeout=timeout_s)
        finally:
            self._waiting -= 1
        if not done:
            assert timeout_s is not None and attempt is not None
            raise unreachable(attempt, timeout_s)
        if connecting.cancelled():
            raise ClientClosed("the client was closed before it had connected")
        return connecting.result()

    async def _connect(self, attempt: AsyncClient) -> AsyncClient:
        self._client = await attempt.connect()
        return self._client

    async def _close(self, timeout_s: float | None) -> None:
        if self._connecting is not None and self._attempt is not None:
            began_s, limit_s = self._loop.time(), closing_s(self._attempt, timeout_s)
            if self._waiting:  # flush what was enqueued before the connection
                await asyncio.wait((self._connecting,), timeout=limit_s)
            timeout_s = max(0.0, limit_s - (self._loop.time() - began_s))
            self._connecting.cancel()
            await asyncio.wait((self._connecting,))
        if self._client is not None:
            await self._client.close(timeout_s)
        # The remaining tasks have nothing to wait for, because the subscriptions have ended.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, stuck = await asyncio.wait(others, timeout=1.0)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)


class ForeignLoop(Runtime):
    """A runtime that uses an event loop and an asynchronous client of the program. It ends neither
    of them."""

    def __init__(self, client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self._pid = os.getpid()
        self._client = client
        self._closed = False
        self._lock = threading.RLock()
        self._loop = loop

    def _check_thread(self) -> None:
        with suppress(RuntimeError):  # no event loop runs in this thread
            if asyncio.get_running_loop() is self._loop:
                raise BadRequest(
                    "a blocking call on the event loop would wait for itself forever: in a"
                    " coroutine, such as an async def endpoint, await the asynchronous client"
                )

    def submit(
        self, method: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **options: Any
    ) -> Future[T]:
        if self._loop.is_closed():
            raise ClientClosed("the event loop of the client has ended")
        return super().submit(method, *arguments, **options)

    def close(self, timeout_s: float | None) -> None:
        self._closed = True


def _unless_failed(on_unused: Callable[[T], None]) -> Callable[[Future[T]], None]:
    def pass_on(future: Future[T]) -> None:
        if not future.cancelled() and future.exception() is None:
            on_unused(future.result())

    return pass_on


# --- verbs of the asynchronous client ------------------------------------------------------------


def _mirror(
    method: Callable[Concatenate[Any, P], Any], call: Callable[..., R], suffix: str = ""
) -> Callable[Concatenate[Any, P], R]:
    """Return a verb with the docstring and parameters of ``method``. It returns the result of
    ``call`` with the object, ``method`` and the arguments. It raises TypeError at once for
    arguments that do not fit, even if no daemon is available."""
    method = inspect.unwrap(
        method
    )  # without the check for a running loop, which is in another thread
    signature, name = inspect.signature(method), method.__name__ + suffix
    _, *parameters = signature.parameters.values()
    needed = [p for p in parameters if p.default is p.empty]
    optional = {p.name for p in parameters if p.default is not p.empty}
    # Binding is slow. Arguments fit if all required ones are positional and all others keywords.
    positional_count = -1 if any(p.kind is p.KEYWORD_ONLY for p in needed) else len(needed)
    return_type = str(signature.return_annotation).removeprefix("Async")

    @functools.wraps(method)
    def verb(self: Any, /, *arguments: P.args, **options: P.kwargs) -> R:
        if len(arguments) != positional_count or not optional.issuperset(options):
            try:
                signature.bind(self, *arguments, **options)
            except TypeError as error:
                raise TypeError(f"{type(self).__name__}.{name}() {error}") from None
        return call(self, method, *arguments, **options)

    returns = f"Future[{return_type}]" if suffix else return_type
    verb.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
    verb.__module__, verb.__name__, verb.__qualname__ = __name__, name, f"Client.{name}"
    return verb


def _with_parameters_of(
    method: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Copy the parameters of ``method`` to a function that calls it with the same arguments."""

    def decorate(function: Any) -> Any:
        *parameters, name = inspect.signature(method).parameters.values()
        function.__signature__ = inspect.Signature([*parameters, name.replace(default=NAME)])
        return function

    return decorate


class Calling(Protocol):
    """An object that has verbs."""

    def _call(
        self, method: Callable[..., Coroutine[Any, Any, R]], /, *arguments: Any, **options: Any
    ) -> R:
        """Call ``method`` in the client's thread, with the asynchronous object, and return the
        result."""
        ...


def _wait(
    caller: Calling,
    method: Callable[..., Coroutine[Any, Any, R]],
    /,
    *arguments: Any,
    **options: Any,
) -> R:
    return caller._call(method, *arguments, **options)


def waits(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """Return a verb that blocks until it is answered."""
    return _mirror(method, _wait)


def _submits(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], Future[R]]:
    """Return a verb that does not wait and returns a future."""

    def submit(client: Client, *arguments: Any, **options: Any) -> Future[R]:
        return client._runtime().submit_task(*arguments, **options)

    return _mirror(method, submit, "_nowait")


def _iterates(
    method: Callable[Concatenate[Any, P], AsyncIterator[R]],
) -> Callable[Concatenate[Any, P], Iterator[R]]:
    """Return a verb that iterates over a listing."""

    def iterate(client: Client, method: Any, *arguments: Any, **options: Any) -> Iterator[R]:
        runtime = client._runtime()
        source: AsyncIterator[R] | None = None

        async def read_page(async_client: AsyncClient, **_: Any) -> list[R]:
            nonlocal source
            source = source or method(async_client, *arguments, **options)
            items: list[R] = []
            async for item in source:
                items.append(item)
                if len(items) == PAGE_ITEMS:
                    break
            return items

        while True:
            # The timeout applies to the connection, and then to each page.
            items = runtime.call(read_page, timeout=options.get("timeout"))
            yield from items
            if len(items) < PAGE_ITEMS:
                return

    return _mirror(method, iterate)


def _make_in_thread(
    client: Client, method: Callable[..., R], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Runtime, R]:
    """Create an object of the asynchronous client in its thread."""

    async def work(async_client: AsyncClient) -> R:
        return method(async_client, *arguments, **options)

    runtime = client._runtime()
    return runtime, runtime.call(work)


def _subscribe(client: Client, method: Any, *arguments: Any, **options: Any) -> Subscription:
    return Subscription(*_make_in_thread(client, method, arguments, options))


def _transact(client: Client, method: Any, *arguments: Any, **options: Any) -> Transaction:
    return Transaction(*_make_in_thread(client, method, arguments, options))


def _pull(client: Client, *arguments: Any, **options: Any) -> list[Delivery]:
    runtime = client._runtime()
    inners = runtime.call_or(functools.partial(_release, runtime), *arguments, **options)
    return [Delivery(runtime, inner) for inner in inners]


def _release(runtime: Runtime, deliveries: Iterable[AsyncDelivery]) -> None:
    """Release deliveries whose caller was interrupted before receiving them."""

    async def work(_: AsyncClient) -> None:
        releasing = (delivery.release() for delivery in deliveries)
        await asyncio.gather(*releasing, return_exceptions=True)

    with suppress(TickwheelError):
        runtime.submit(work)


# --- objects --------------------------------------------------------------------------------------


class _Wrapper(Generic[T]):
    """A wrapper of an object of the asynchronous client. Its verbs call that object."""

    __slots__ = ()

    _inner: T
    _runtime: Runtime

    def _call(
        self, method: Callable[..., Coroutine[Any, Any, R]], /, *arguments: Any, **options: Any
    ) -> R:
        return self._runtime.call(lambda _: method(self._inner, *arguments, **options))


class Delivery(_Wrapper[AsyncDelivery], Delivered):
    """One task, finished by ``ack`` or ``reject``, or returned by ``nack``, ``snooze`` or
    ``release``. Every verb returns when the settlement is durable."""

    __slots__ = ("_inner", "_runtime")

    def __init__(self, runtime: Runtime, inner: AsyncDelivery) -> None:
        super().__init__(inner)
        self._runtime = runtime
        self._inner = inner

    @property
    def settled(self) -> bool:
        """Whether ack, nack, reject, release or snooze was called, even if not yet answered."""
        return self._inner.settled

    ack = waits(AsyncDelivery.ack)
    nack = waits(AsyncDelivery.nack)
    reject = waits(AsyncDelivery.reject)
    extend = waits(AsyncDelivery.extend)
    release = waits(AsyncDelivery.release)
    snooze = waits(AsyncDelivery.snooze)

    def ack_in(
        self, connection: Any, *, schema: str = SCHEMA, timeout: Duration | None = None
    ) -> None:
        """``ack_in`` of the asynchronous delivery, in the transaction of a synchronous
        connection."""
        word = self.extend(ack_in_s(self), timeout=timeout)
        if word != "extended":
            raise StaleReceipt(f"task {self.id}, attempt {self.attempt}: {word}")
        receipt = self.epoch, self.id, self.attempt
        write(connection, ack_command(self.topic, self.group, *receipt), schema)

    def ack_nowait(self) -> Future[AckWord]:
        """Ack, and return a future of the answer. Acks at about the same time share a frame."""

        async def work(_: AsyncClient) -> AckWord:
            return await self._inner.ack()

        return self._runtime.submit(work)

    def ack_unwatched(self) -> None:
        """Ack without waiting. An answer other than "acked" is logged."""

        async def work(_: AsyncClient) -> None:
            self._inner.ack_unwatched()

        self._runtime.submit(work)


class Transaction(_Wrapper[AsyncTransaction]):
    """``with client.transaction("payments") as tx: tx.enqueue(…)``; see
    ``tickwheel.Transaction``."""

    def __init__(self, runtime: Runtime, inner: AsyncTransaction) -> None:
        self.id, self.group = inner.id, inner.group
        self._runtime = runtime
        self._inner = inner

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts of the tasks; empty before the transaction is committed."""
        return self._inner.receipts

    enqueue = waits(AsyncTransaction.enqueue)
    enqueue_many = waits(AsyncTransaction.enqueue_many)
    commit = waits(AsyncTransaction.commit)
    rollback = waits(AsyncTransaction.rollback)

    def __enter__(self) -> Self:
        self._runtime.call(lambda _: self._inner.__aenter__())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._runtime.call(lambda _: self._inner.__aexit__(kind, error, trace))


class Subscription:
    """``with client.subscribe(…) as deliveries: for delivery in deliveries: …``

    Several threads can iterate over one subscription; each delivery goes to one of them. Without
    ``with`` the subscription starts at the first request for a delivery and ends with the client.
    With ``auto_ack`` a delivery is acked when its thread requests the next one or leaves the
    ``with``, and nacked when an exception leaves the ``with``.
    """

    def __init__(self, runtime: Runtime, inner: AsyncSubscription) -> None:
        self.topic, self.group = inner.topic, inner.group
        self._runtime = runtime
        self._inner = inner
        self._auto_ack = inner.auto_ack
        self._of_thread = threading.local()
        """With ``auto_ack``, ``delivery`` is the current delivery of the thread."""

    def start(self) -> Self:
        """Subscribe unless this was already done. Raise the error with which the daemon refuses."""
        self._runtime.call(lambda _: self._inner.start())
        return self

    def close(self) -> None:
        """End the subscription and release unread deliveries. Do nothing if it has ended."""
        self._runtime.call(lambda _: self._inner.close())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(ClientClosed):
            self._finish(error)
            self.close()

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        delivery = self.get()
        if delivery is None:
            raise StopIteration
        return delivery

    def get(self, timeout: Duration | None = None) -> Delivery | None:
        """Return the next delivery, or None if none arrives within ``timeout`` seconds or the
        subscription has ended (``closed``)."""
        self._finish(None)
        timeout_s = None if timeout is None else seconds(timeout, "timeout")
        inner = self._runtime.call_or(self._release, self._take, timeout_s)
        if inner is None:
            return None
        delivery = Delivery(self._runtime, inner)
        if self._auto_ack:
            self._of_thread.delivery = delivery
        return delivery

    @property
    def closed(self) -> bool:
        """Whether the subscription has ended."""
        return self._inner.closed

    @property
    def new_group(self) -> MadeGroup | None:
        """A description of the group if this subscription created it, otherwise None."""
        return self._inner.new_group

    async def _take(self, _: AsyncClient, timeout_s: float | None) -> AsyncDelivery | None:
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(timeout_s):
                return await self._inner.take()
        return None

    def _release(self, inner: AsyncDelivery | None) -> None:
        _release(self._runtime, () if inner is None else (inner,))

    def _finish(self, error: BaseException | None) -> None:
        """With ``auto_ack``, settle the delivery that this thread has finished."""
        delivery: Delivery | None = getattr(self._of_thread, "delivery", None)
        self._of_thread.delivery = None
        if delivery is None or delivery.settled:
            return
        if error is None:
            delivery.ack_unwatched()
        else:
            inner = delivery._inner
            with suppress(TickwheelError):
                self._runtime.call(lambda _: settle_failed(inner, error))


class Client:
    """The client for programs without an event loop. All threads can use it concurrently.

    Arguments, verbs and errors are those of ``tickwheel.Client``. Each call blocks until it is
    answered, and takes ``timeout``. The first call (or ``connect``) connects, in a separate thread.
    A program needs one client for each daemon, kept for as long as it runs. ``close``, or the end
    of ``with``, disconnects; a client that is still open is closed when the program ends.

    After a fork (gunicorn's ``preload_app``, multiprocessing) the child's first call opens a new
    connection. Subscriptions and deliveries from before the fork belong to the parent; in the child
    they raise ClientClosed.
    """

    @_with_parameters_of(AsyncClient.__init__)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("name", NAME)
        make = functools.partial(AsyncClient, *arguments, **options)
        self._set_up(make, make().codec)  # raises for invalid arguments
        _CLIENTS.add(self)

    def _set_up(self, make: Callable[[], AsyncClient], codec: Codec) -> None:
        self._make = make
        self._codec = codec
        self._handlers: dict[str, Callable[[Check], Coroutine[Any, Any, str | None]]] = {}
        """Producer group → the handler of its checks."""
        self._closed = False
        self._lock = threading.RLock()
        self._current: Runtime | None = None

    # --- lifecycle ------------------------------------------------------------------------------

    def connect(self) -> Self:
        """Connect now, instead of with the first call. Raise the errors of
        ``tickwheel.Client.connect``; the caller can then try again."""

        async def nothing(_: AsyncClient) -> None: ...

        self._runtime().call(nothing)
        return self

    def close(self, timeout: float | None = None) -> None:
        """Flush acks and enqueues, release unread deliveries, and disconnect. Calls for which other
        threads wait raise ClientClosed. Do nothing if the client is closed."""
        with self._lock:
            runtime = self._current
            self._closed = self._closed or runtime is None
        if runtime is not None:
            runtime.close(timeout)  # in the client's own thread it raises, and nothing is closed
            self._closed, self._current = True, None

    def __enter__(self) -> Self:
        try:
            return self.connect()
        except BaseException as error:  # ``__exit__`` is not called
            is_closed = self._closed
            self.close(0.0)
            self._closed = is_closed or not isinstance(error, Exception)
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _runtime(self) -> Runtime:
        current = self._current
        if current is None:
            with self._lock:
                if self._closed:
                    raise ClientClosed("the client is closed; create a new one")
                if self._current is None:
                    self._current = Runtime(self._make_client)
                current = self._current
        return current

    def _call(
        self, method: Callable[..., Coroutine[Any, Any, R]], /, *arguments: Any, **options: Any
    ) -> R:
        return self._runtime().call(method, *arguments, **options)

    def _make_client(self) -> AsyncClient:
        client = self._make()
        for group, handler in list(self._handlers.items()):
            client.on_check(group)(handler)
        return client

    def _reset_after_fork(self) -> None:
        """Reset the client in the child of a fork, because a thread of the parent may hold the
        lock."""
        self._lock = threading.RLock()
        runtime, self._current = self._current, None
        if runtime is not None:
            runtime.forget()
            _PARENT_RUNTIMES.append(runtime)

    # --- verbs ----------------------------------------------------------------------------------

    enqueue = waits(AsyncClient.enqueue)
    enqueue_nowait = _submits(AsyncClient.enqueue)
    enqueue_many = waits(AsyncClient.enqueue_many)
    enqueue_columns = waits(AsyncClient.enqueue_columns)
    oneway = waits(AsyncClient.oneway)
    ping = waits(AsyncClient.ping)
    flush_acks = waits(AsyncClient.flush_acks)
    lookup = waits(AsyncClient.lookup)
    explain = waits(AsyncClient.explain)
    lookup_many = waits(AsyncClient.lookup_many)
    find = waits(AsyncClient.find)
    pause = waits(AsyncClient.pause)
    resume = waits(AsyncClient.resume)
    preview_bulk = waits(AsyncClient.preview_bulk)
    wait_bulk = waits(AsyncClient.wait_bulk)
    put_schedule = waits(AsyncClient.put_schedule)
    run_schedule = waits(AsyncClient.run_schedule)
    backfill_schedule = waits(AsyncClient.backfill_schedule)
    commit_transaction = waits(AsyncClient.commit_transaction)
    rollback_transaction = waits(AsyncClient.rollback_transaction)
    cancel = waits(AsyncClient.cancel)
    cancel_many = waits(AsyncClient.cancel_many)
    reschedule = waits(AsyncClient.reschedule)
    reschedule_many = waits(AsyncClient.reschedule_many)
    spread = waits(AsyncClient.spread)
    spread_many = waits(AsyncClient.spread_many)
    run_now = waits(AsyncClient.run_now)
    run_now_many = waits(AsyncClient.run_now_many)
    list_tasks = _iterates(AsyncClient.list_tasks)
    peek = _iterates(AsyncClient.peek)
    dead_list = _iterates(AsyncClient.dead_list)
    dead_requeue = waits(AsyncClient.dead_requeue)
    dead_delete = waits(AsyncClient.dead_delete)
    create_group = waits(AsyncClient.create_group)
    configure = waits(AsyncClient.configure)
    delete_group = waits(AsyncClient.delete_group)
    delete_topic = waits(AsyncClient.delete_topic)
    reset_group = waits(AsyncClient.reset_group)
    preview_reset = waits(AsyncClient.preview_reset)
    held_keys = waits(AsyncClient.held_keys)
    paused_keys = waits(AsyncClient.paused_keys)
    key_lines = waits(AsyncClient.key_lines)
    release_key = waits(AsyncClient.release_key)
    skip_key = waits(AsyncClient.skip_key)
    pause_key = waits(AsyncClient.pause_key)
    resume_key = waits(AsyncClient.resume_key)
    list_schedules = _iterates(AsyncClient.list_schedules)
    show_schedule = waits(AsyncClient.show_schedule)
    pause_schedule = waits(AsyncClient.pause_schedule)
    resume_schedule = waits(AsyncClient.resume_schedule)
    delete_schedule = waits(AsyncClient.delete_schedule)
    list_transactions = _iterates(AsyncClient.list_transactions)
    show_transaction = waits(AsyncClient.show_transaction)
    list_bulk = _iterates(AsyncClient.list_bulk)
    show_bulk = waits(AsyncClient.show_bulk)
    cancel_bulk = waits(AsyncClient.cancel_bulk)
    set_push = waits(AsyncClient.set_push)
    set_forward = waits(AsyncClient.set_forward)
    remove_target = waits(AsyncClient.remove_target)
    targets = waits(AsyncClient.targets)
    test_push = waits(AsyncClient.test_push)
    push_log = waits(AsyncClient.push_log)
    resend = waits(AsyncClient.resend)
    nodes = waits(AsyncClient.nodes)
    move_shard = waits(AsyncClient.move_shard)
    drain_node = waits(AsyncClient.drain_node)
    status = waits(AsyncClient.status)
    stats = waits(AsyncClient.stats)
    load = waits(AsyncClient.load)
    overview = waits(AsyncClient.overview)
    task_history = waits(AsyncClient.task_history)
    list_consumers = _iterates(AsyncClient.list_consumers)
    backup = waits(AsyncClient.backup)
    subscribe = _mirror(AsyncClient.subscribe, _subscribe)
    transaction = _mirror(AsyncClient.transaction, _transact)
    pull = _mirror(AsyncClient.pull, _pull)

    def on_check(self, group: str) -> Callable[[H], H]:
        """Register a function that decides transactions: ``@client.on_check("payments")``. See
        ``tickwheel.Client.on_check``. The function is called in a separate thread and can use the
        client. It is called only while the client is connected, so call ``connect`` if
        necessary."""

        def register(handler: H) -> H:
            async def answer(check: Check) -> str | None:
                return await asyncio.to_thread(handler, check)

            AsyncClient().on_check(group)(answer)  # raises for an invalid handler
            self._handlers[group] = answer
            current = self._current
            if current is not None:

                async def register_there(client: AsyncClient) -> None:
                    client.on_check(group)(answer)

                current.submit(register_there)
            return handler

        return register

    def body_of(self, task: TaskInfo | ScheduleInfo) -> bytes | None:
        """Return the decoded body of a task that was looked up or listed, or of a schedule's tasks.
        Return None if the task has ended and its body was deleted. Raise Undecodable like
        ``Delivery.body``."""
        return body_of(self._codec, task)

    @property
    def server_info(self) -> Mapping[str, Any]:
        """The daemon's last answer to HELLO: v, epoch, node, role, now_ms, limits."""

        async def read(client: AsyncClient) -> Mapping[str, Any]:
            return client.server_info

        return self._runtime().call(read)

    @property
    def limits(self) -> Limits:
        """The daemon's limits."""

        async def read(client: AsyncClient) -> Limits:
            return client.limits

        return self._runtime().call(read)

    @property
    def connected(self) -> bool:
        """Whether a connection is open now. A call opens one or waits for it."""
        current = self._current
        return current is not None and current.connected


class HostedClient(Client):
    """A client of a program that makes the asynchronous client, and decides where it runs."""

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        """``make`` is called in the client's thread."""
        self._set_up(make, AsyncClient(DEFAULT_URL).codec)
        _CLIENTS.add(self)

    @property
    def runtime(self) -> Runtime | None:
        """What runs the asynchronous client; None: the next call starts a thread for it."""
        return self._current

    @runtime.setter
    def runtime(self, runtime: Runtime | None) -> None:
        self._current = runtime

    def call(self, method: Callable[[AsyncClient], Coroutine[Any, Any, R]], /) -> R:
        """Call ``method`` in the client's thread, and return its result."""
        return self._call(method)


def on_loop(client: AsyncClient, loop: asyncio.AbstractEventLoop) -> Client:
    """Return a synchronous client for other threads. It uses an asynchronous client on this event
    loop, with the same connection and thread, and ends when the asynchronous client is closed."""
    client_for_threads = Client.__new__(Client)
    client_for_threads._set_up(lambda: client, client.codec)
    client_for_threads._current = ForeignLoop(client, loop)
    return client_for_threads


_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()
_PARENT_RUNTIMES: list[Runtime] = []
"""In a child, the runtimes of the parent. They are kept because deallocating them would close
descriptors that the parent uses."""


def _after_fork() -> None:
    for client in list(_CLIENTS):
        client._reset_after_fork()


def _at_exit() -> None:
    for client in list(_CLIENTS):
        with suppress(Exception):
            client.close(EXIT_S)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
