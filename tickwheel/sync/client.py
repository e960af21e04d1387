"""``Client``, ``Subscription`` and ``Delivery`` of the synchronous client.

Each verb is the asynchronous one's, called in the client's thread (``runtime.py``);
``generated.py`` has their signatures. Invariants: every object may be used by every thread at
once; a client that was there before a fork connects anew in the child, and what belongs to the
parent's connection says so.
"""

# ruff: noqa: A002
from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Self, TypeVar, Unpack

from tickwheel.api.policies import Retry
from tickwheel.api.schedules import ScheduleInfo
from tickwheel.api.tasks import TaskInfo
from tickwheel.api.times import Duration, seconds
from tickwheel.api.words import AckMode, AckWord, CountFrom
from tickwheel.client import Client as AsyncClient
from tickwheel.client import Delivery as AsyncDelivery
from tickwheel.client import Subscription as AsyncSubscription
from tickwheel.client.delivery import Delivered
from tickwheel.client.encodings import UNPACKED_BYTES_MAX, Compression, body_of
from tickwheel.client.keywords import GroupKeywords
from tickwheel.client.reconnector import HEARTBEAT_S
from tickwheel.client.subscription import settle_failed
from tickwheel.client.tasks import Receipt, refuse_unknown, spelled_out
from tickwheel.client.transactions import Check
from tickwheel.client.transactions import Transaction as AsyncTransaction
from tickwheel.errors import ClientClosed, TickwheelError
from tickwheel.limits import Limits
from tickwheel.sync import generated
from tickwheel.sync.runtime import Runtime
from tickwheel.version import __version__

R = TypeVar("R")
H = TypeVar("H", bound=Callable[[Check], str | None])

PART = 256
"""How many items of a listing are fetched from the client's thread at once."""
EXIT_S = 1.0
"""How long, in seconds, an unclosed client may take for its goodbye when the program ends."""


class Delivery(generated.Delivery, Delivered):
    """One task, to be finished by ``ack``, or given back by ``nack``, ``reject``, ``release``.
    As the asynchronous one; every verb returns when it is durable."""

    __slots__ = ("_inner", "_runtime")

    def __init__(self, runtime: Runtime, inner: AsyncDelivery) -> None:
        super().__init__(inner._batch, inner._item)
        self._runtime = runtime
        self._inner = inner

    @property
    def settled(self) -> bool:
        """Whether ack, nack, reject or release was called; not whether it was answered."""
        return self._inner.settled

    def _call(
        self, method: Callable[..., Coroutine[Any, Any, R]], /, *arguments: Any, **options: Any
    ) -> R:
        return self._runtime.call(lambda _: method(self._inner, *arguments, **options))

    def ack_nowait(self) -> Future[AckWord]:
        """``ack`` as a future; acks that come together share a frame."""

        async def work(_: AsyncClient) -> AckWord:
            return await self._inner.ack()

        return self._runtime.submit(work)

    def ack_unwatched(self) -> None:
        """``ack`` without waiting; an answer that is not "acked" is logged."""

        async def work(_: AsyncClient) -> None:
            self._inner.ack_unwatched()

        self._runtime.submit(work)


class Transaction(generated.Transaction):
    """``with client.transaction("payments") as tx: tx.enqueue(…)``; as the asynchronous one."""

    def __init__(self, runtime: Runtime, inner: AsyncTransaction) -> None:
        self.id, self.group = inner.id, inner.group
        self._runtime = runtime
        self._inner = inner

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts of the tasks, once the transaction is committed."""
        return self._inner.receipts

    def _call(
        self, method: Callable[..., Coroutine[Any, Any, R]], /, *arguments: Any, **options: Any
    ) -> R:
        return self._runtime.call(lambda _: method(self._inner, *arguments, **options))

    def __enter__(self) -> Self:
        self._runtime.call(lambda _: self._inner.__aenter__())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._runtime.call(lambda _: self._inner.__aexit__(kind, error, trace))


class Subscription:
    """``with client.subscribe(…) as deliveries: for delivery in deliveries: …``

    Several threads may iterate over one subscription; each delivery goes to one of them. Without
    ``with`` it starts at the first delivery asked for and ends with the client. ``auto_ack``: a
    delivery is acked when its thread asks for the next one or leaves the ``with``; nacked when an
    exception leaves the ``with``.
    """

    def __init__(self, runtime: Runtime, inner: AsyncSubscription) -> None:
        self.topic, self.group = inner.topic, inner.group
        self._runtime = runtime
        self._inner = inner
        self._auto_ack = inner.auto_ack
        self._held: dict[int, Delivery] = {}
        """With ``auto_ack``: id of a thread → the delivery that its body works on."""

    def start(self) -> Self:
        """Subscribe. Raises what the daemon objects to. Harmless when it is started."""
        self._runtime.call(lambda _: self._inner.start())
        return self

    def close(self) -> None:
        """No more deliveries; those not handed out go back. Harmless when it is closed."""
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
        """The next delivery; None when there is none for ``timeout`` seconds, or there will be
        none any more (``closed``)."""
        self._finish(None)
        timeout_s = None if timeout is None else seconds(timeout, "timeout")
        inner = self._runtime.call_or(self._give_back, self._take, timeout_s)
        if inner is None:
            return None
        delivery = Delivery(self._runtime, inner)
        if self._auto_ack:
            self._held[threading.get_ident()] = delivery
        return delivery

    @property
    def closed(self) -> bool:
        """Whether no more deliveries will come."""
        return self._inner._closed

    async def _take(self, _: AsyncClient, timeout_s: float | None) -> AsyncDelivery | None:
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(timeout_s):
                return await self._inner._take()
        return None

    def _give_back(self, inner: AsyncDelivery | None) -> None:
        """Release a delivery whose caller was interrupted before getting it."""
        if inner is not None:
            with suppress(TickwheelError):
                self._runtime.submit(lambda _: inner.release())

    def _finish(self, error: BaseException | None) -> None:
        """With ``auto_ack``: settle the delivery that this thread is done with."""
        held = self._held.pop(threading.get_ident(), None)
        if held is None or held.settled:
            return
        if error is None:
            held.ack_unwatched()
        else:
            inner = held._inner
            with suppress(TickwheelError):
                self._runtime.call(lambda _: settle_failed(inner, error))


class Client(generated.Client):
    """The client for programs without an event loop; every thread may use it at once.

    Arguments, verbs and errors are those of ``tickwheel.Client``; each call returns when it is
    answered, and takes ``timeout``. It connects with its first call (or ``connect``), in a
    thread of its own; a program needs one for each daemon, kept for as long as it runs. ``close``,
    or ``with``, ends it; what a program leaves open is closed when it ends.

    After a fork (gunicorn's ``preload_app``, multiprocessing) the child's first call makes a new
    connection. Subscriptions and deliveries from before stay with the parent: here they raise
    ClientClosed.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        send_timeout: float = 3.0,
        retries: int = 2,
        connect_timeout: float = 10.0,
        active_timeout: float = 10.0,
        heartbeat: float = HEARTBEAT_S,
        ca: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
        compress: Compression | None = None,
        compress_over: int | None = None,
        keys: Mapping[str, bytes] | None = None,
        keys_file: str | os.PathLike[str] | None = None,
        encrypt_with: str | None = None,
        unpacked_bytes_max: int = UNPACKED_BYTES_MAX,
        name: str = f"tickwheel-python-sync/{__version__}",
    ) -> None:
        self._make: Callable[[], AsyncClient] = functools.partial(
            AsyncClient, url, token=token, send_timeout=send_timeout, retries=retries,
            connect_timeout=connect_timeout, active_timeout=active_timeout, heartbeat=heartbeat,
            name=name, ca=ca, client_cert=client_cert, client_key=client_key, compress=compress,
            compress_over=compress_over, keys=keys, keys_file=keys_file,
            encrypt_with=encrypt_with, unpacked_bytes_max=unpacked_bytes_max,
        )  # fmt: skip
        self._codec = self._make()._codec  # what is wrong with the arguments is said here
        self._handlers: dict[str, Callable[[Check], Coroutine[Any, Any, str | None]]] = {}
        """Producer group → the handler of its checks."""
        self._closed = False
        self._lock = threading.Lock()
        self._made: Runtime | None = None
        _CLIENTS.add(self)

    # --- life -----------------------------------------------------------------------------------

    def connect(self) -> Self:
        """Connect now rather than with the first call. Raises as the asynchronous one, and may be
        called again."""

        async def nothing(_: AsyncClient) -> None: ...

        self._runtime().call(nothing)
        return self

    def close(self, timeout: float | None = None) -> None:
        """Flush acks and enqueues, give back what was not handed out, and say goodbye. Calls that
        other threads wait for end with ClientClosed. Harmless when it is closed."""
        with self._lock:
            self._closed = True
            runtime, self._made = self._made, None
        if runtime is not None:
            runtime.close(timeout)

    def __enter__(self) -> Self:
        return self.connect()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _runtime(self) -> Runtime:
        made = self._made
        if made is None:
            with self._lock:
                if self._closed:
                    raise ClientClosed("the client is closed; make a new one")
                if self._made is None:
                    self._made = Runtime(self._make_asked)
                made = self._made
        return made

    def _make_asked(self) -> AsyncClient:
        client = self._make()
        for group, handler in list(self._handlers.items()):
            client.on_check(group)(handler)
        return client

    def _forked(self) -> None:
        """Begin anew in the child of a fork: the lock may be held by a thread that is not here."""
        self._lock = threading.Lock()
        made, self._made = self._made, None
        if made is not None:
            made.forget()
            _PARENTS.append(made)

    # --- how verbs are called -------------------------------------------------------------------

    def _call(
        self, method: Callable[..., Coroutine[Any, Any, R]], /, *arguments: Any, **options: Any
    ) -> R:
        return self._runtime().call(method, *arguments, **options)

    def _submit(
        self, method: Callable[..., Coroutine[Any, Any, R]], /, *arguments: Any, **options: Any
    ) -> Future[R]:
        return self._runtime().submit(method, *arguments, **options)

    def _iterate(
        self, method: Callable[..., AsyncIterator[R]], /, *arguments: Any, **options: Any
    ) -> Iterator[R]:
        runtime = self._runtime()
        source: AsyncIterator[R] | None = None

        async def part(client: AsyncClient, **_: Any) -> list[R]:
            nonlocal source
            source = source or method(client, *arguments, **options)
            found: list[R] = []
            async for item in source:
                found.append(item)
                if len(found) == PART:
                    break
            return found

        while True:
            # Its time is for connecting here; each page has it anew.
            found = runtime.call(part, timeout=options.get("timeout"))
            yield from found
            if len(found) < PART:
                return

    def _make_there(
        self, method: Callable[..., R], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Runtime, R]:
        """An object of the asynchronous client, made in its thread."""

        async def work(client: AsyncClient) -> R:
            return method(client, *arguments, **options)

        runtime = self._runtime()
        return runtime, runtime.call(work)

    def _subscribing(
        self, method: Callable[..., AsyncSubscription], /, *arguments: Any, **options: Any
    ) -> Subscription:
        return Subscription(*self._make_there(method, arguments, options))

    def _transacting(
        self, method: Callable[..., AsyncTransaction], /, *arguments: Any, **options: Any
    ) -> Transaction:
        return Transaction(*self._make_there(method, arguments, options))

    def _pulling(
        self,
        method: Callable[..., Coroutine[Any, Any, list[AsyncDelivery]]],
        /,
        *arguments: Any,
        **options: Any,
    ) -> list[Delivery]:
        runtime = self._runtime()
        return [Delivery(runtime, one) for one in runtime.call(method, *arguments, **options)]

    # generated: what is answered with objects of this client
    @spelled_out(GroupKeywords)
    def subscribe(
        self,
        topic: str,
        *,
        group: str = "default",
        prefetch: int | None = None,
        lease: Duration | None = None,
        retry: Retry | None = None,
        ack: AckMode = "manual",
        auto_ack: bool = False,
        broadcast: bool = False,
        **settings: Unpack[GroupKeywords],
    ) -> Subscription:
        """Deliveries as they come due, to one of the group's members each.

        At most ``prefetch`` of them are unsettled here (default: 256, of each shard where there
        are several); ``lease``: how long one may take before it is delivered again (default: the
        daemon's). ``retry``: the policy of a group that has none of its own; where it has another
        one, the subscription ends with Conflict.

        ``ack="on_delivery"``: at most once. The task is over before it is sent; a crash here
        loses it, and ``close`` what was not read. ``broadcast``: everything that comes due while
        connected, for this subscriber alone; no group, no retry. For both, every verb answers
        "done", without the daemon. ``auto_ack``: a delivery is acked when the next one is asked
        for, and when the ``with`` ends; nacked when an exception leaves the ``with``. More of it
        is in ``AutoAck``.

        ``settings`` are those of GroupKeywords: of the group, when it is made by this; where it
        has others, the subscription ends with Conflict. A broadcast has the filter alone: what it
        gets."""
        refuse_unknown(settings, GroupKeywords, "Client.subscribe")
        return self._subscribing(
            AsyncClient.subscribe,
            topic,
            group=group,
            prefetch=prefetch,
            lease=lease,
            retry=retry,
            ack=ack,
            auto_ack=auto_ack,
            broadcast=broadcast,
            **settings,
        )

    def transaction(
        self, group: str, *, id: str | None = None, count_from: CountFrom = "enqueue"
    ) -> Transaction:
        """A transaction of the producer group ``group``, to be used in a ``with`` block.

        ``id``: its name; yours for ever, so do not use one twice (default: a random one).
        ``count_from``: what the delays of its tasks count from, "enqueue" or "commit"."""
        return self._transacting(AsyncClient.transaction, group, id=id, count_from=count_from)

    @spelled_out(GroupKeywords)
    def pull(
        self,
        topic: str,
        *,
        group: str = "default",
        max: int = 32,
        wait: Duration = 0.0,
        lease: Duration | None = None,
        timeout: Duration | None = None,
        **settings: Unpack[GroupKeywords],
    ) -> list[Delivery]:
        """Up to ``max`` deliveries; none after ``wait`` seconds without any. ``timeout`` is for
        all of it, ``wait`` included; ``settings`` are as in ``subscribe``."""
        refuse_unknown(settings, GroupKeywords, "Client.pull")
        return self._pulling(
            AsyncClient.pull,
            topic,
            group=group,
            max=max,
            wait=wait,
            lease=lease,
            timeout=timeout,
            **settings,
        )

    # end

    def on_check(self, group: str) -> Callable[[H], H]:
        """``@client.on_check("payments")``: as the asynchronous one; the function is called in a
        thread of its own, and may use the client. It is asked while the client is connected:
        ``connect`` does that if nothing else has."""

        def register(handler: H) -> H:
            async def answer(check: Check) -> str | None:
                return await asyncio.to_thread(handler, check)

            AsyncClient().on_check(group)(answer)  # what is wrong with it is said here
            self._handlers[group] = answer
            made = self._made
            if made is not None:

                async def tell(client: AsyncClient) -> None:
                    client.on_check(group)(answer)

                made.submit(tell)
            return handler

        return register

    def body_of(self, task: TaskInfo | ScheduleInfo) -> bytes | None:
        """The body of a task that was looked up or listed, or of a schedule's tasks, unpacked;
        None: it has ended, and has none. Raises Undecodable, as ``Delivery.body`` does."""
        return body_of(self._codec, task)

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the daemon said last in answer to HELLO: v, epoch, node, role, now_ms, limits."""

        async def read(client: AsyncClient) -> Mapping[str, Any]:
            return client.server_info

        return self._runtime().call(read)

    @property
    def limits(self) -> Limits:
        """The limits of the daemon."""

        async def read(client: AsyncClient) -> Limits:
            return client.limits

        return self._runtime().call(read)

    @property
    def connected(self) -> bool:
        """Whether a connection stands right now; calls make one, or wait for the next."""
        made = self._made
        return made is not None and made.connected


_CLIENTS: weakref.WeakSet[Client] = weakref.WeakSet()
_PARENTS: list[Runtime] = []
"""In a child: the parent's runtimes. Kept, for their end would close what the parent uses."""


def _after_fork() -> None:
    for client in list(_CLIENTS):
        client._forked()


def _at_exit() -> None:
    for client in list(_CLIENTS):
        with suppress(Exception):
            client.close(EXIT_S)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
