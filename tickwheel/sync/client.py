"""``Client``, ``Subscription`` and ``Delivery`` of the synchronous client.

Each verb is the asynchronous one's, called in the client's thread (``runtime.py``); nothing about
a verb is said here a second time. Invariants: every object may be used by every thread at once; a
client that was there before a fork connects anew in the child, and what belongs to the parent's
connection says so.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import inspect
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from tickwheel.api.times import Duration, seconds
from tickwheel.api.words import AckWord
from tickwheel.client import Client as AsyncClient
from tickwheel.client import Delivery as AsyncDelivery
from tickwheel.client import Subscription as AsyncSubscription
from tickwheel.client.autoack import reason_of
from tickwheel.client.delivery import Delivered
from tickwheel.client.reconnector import HEARTBEAT_S
from tickwheel.client.tasks import Receipt
from tickwheel.client.transactions import Check
from tickwheel.client.transactions import Transaction as AsyncTransaction
from tickwheel.errors import ClientClosed, TickwheelError
from tickwheel.limits import Limits
from tickwheel.sync.runtime import Runtime
from tickwheel.version import __version__

P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")
H = TypeVar("H", bound=Callable[[Check], str | None])

PART = 256
"""How many items of a listing are fetched from the client's thread at once."""
EXIT_S = 1.0
"""How long, in seconds, an unclosed client may take for its goodbye when the program ends."""


def _telling(
    made: Callable[P, R], method: Callable[..., Any], returns: tuple[str, str] = ("", "")
) -> Callable[P, R]:
    """Give ``made`` the help of ``method``. ``returns``: the beginning of the result there, and
    what it is here."""
    signature, (theirs, ours) = inspect.signature(method), returns
    told = ours + str(signature.return_annotation).removeprefix(theirs)
    if ours.endswith("[") and not theirs:
        told += "]"
    functools.update_wrapper(made, method)
    del made.__wrapped__  # type: ignore[attr-defined]  # help() and inspect would follow it
    made.__signature__ = signature.replace(return_annotation=told)  # type: ignore[attr-defined]
    made.__annotations__ = {**made.__annotations__, "return": told}
    made.__module__ = __name__
    return made


def _runtime_for(verb: Callable[..., Any], client: Client, options: Mapping[str, Any]) -> Runtime:
    """The runtime for a call of the verb. Raises TypeError, as Python does, for an unknown keyword:
    at once, whether or not there is a daemon."""
    known = verb.__signature__.parameters  # type: ignore[attr-defined]  # _telling has made it
    if not options.keys() <= known.keys():
        name = next(name for name in options if name not in known)
        raise TypeError(f"{verb.__qualname__}() got an unexpected keyword argument {name!r}")
    return client._runtime()


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Client, P], R]:
    """The verb as a function that returns when it is answered."""

    def call(self: Client, /, *arguments: P.args, **options: P.kwargs) -> R:
        return _runtime_for(call, self, options).call(method, *arguments, **options)

    return _telling(call, method)


def _submitting(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Client, P], Future[R]]:
    """The verb as a function that returns its future at once."""

    def submit(self: Client, /, *arguments: P.args, **options: P.kwargs) -> Future[R]:
        return _runtime_for(submit, self, options).submit(method, *arguments, **options)

    return _telling(submit, method, ("", "Future["))


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[R]],
) -> Callable[Concatenate[Client, P], Iterator[R]]:
    """The listing as an iterator."""

    def listed(self: Client, /, *arguments: P.args, **options: P.kwargs) -> Iterator[R]:
        runtime = _runtime_for(listed, self, options)
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

        # Its time is for connecting here; each page has it anew.
        timeout = options.get("timeout")
        named: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        while True:
            found = runtime.call(part, **named)
            yield from found
            if len(found) < PART:
                return

    return _telling(listed, method, ("Async", ""))


def _settling(
    method: Callable[Concatenate[AsyncDelivery, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Delivery, P], R]:
    """The verb of a delivery as a function that returns when it is answered."""

    def settle(self: Delivery, /, *arguments: P.args, **options: P.kwargs) -> R:
        async def work(_: AsyncClient) -> R:
            return await method(self._inner, *arguments, **options)

        return self._runtime.call(work)

    return _telling(settle, method)


def _in_transaction(
    method: Callable[Concatenate[AsyncTransaction, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Transaction, P], R]:
    """The verb of a transaction as a function that returns when it is answered."""

    def call(self: Transaction, /, *arguments: P.args, **options: P.kwargs) -> R:
        async def work(_: AsyncClient) -> R:
            return await method(self._inner, *arguments, **options)

        return self._runtime.call(work)

    return _telling(call, method)


def _making(
    method: Callable[Concatenate[AsyncClient, P], A], kind: Callable[[Runtime, A], R]
) -> Callable[Concatenate[Client, P], R]:
    """The verb as a function that wraps the asynchronous object in ``kind``."""

    def make(self: Client, /, *arguments: P.args, **options: P.kwargs) -> R:
        runtime = _runtime_for(make, self, options)

        async def work(client: AsyncClient) -> A:
            return method(client, *arguments, **options)

        return kind(runtime, runtime.call(work))

    return _telling(make, method)


def _pulling(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, list[AsyncDelivery]]],
) -> Callable[Concatenate[Client, P], list[Delivery]]:
    """The verb as a function that returns this client's deliveries."""

    def pull(self: Client, /, *arguments: P.args, **options: P.kwargs) -> list[Delivery]:
        runtime = _runtime_for(pull, self, options)
        found = runtime.call(method, *arguments, **options)
        return [Delivery(runtime, one) for one in found]

    return _telling(pull, method)


class Delivery(Delivered):
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

    ack = _settling(AsyncDelivery.ack)
    nack = _settling(AsyncDelivery.nack)
    reject = _settling(AsyncDelivery.reject)
    extend = _settling(AsyncDelivery.extend)
    release = _settling(AsyncDelivery.release)
    snooze = _settling(AsyncDelivery.snooze)

    def ack_nowait(self) -> Future[AckWord]:
        """``ack`` as a future; acks that come together share a frame."""

        async def work(_: AsyncClient) -> AckWord:
            return await self._inner.ack()

        return self._runtime.submit(work)


class Transaction:
    """``with client.transaction("payments") as tx: tx.enqueue(…)``; as the asynchronous one."""

    def __init__(self, runtime: Runtime, inner: AsyncTransaction) -> None:
        self.id, self.group = inner.id, inner.group
        self._runtime = runtime
        self._inner = inner

    @property
    def receipts(self) -> list[Receipt]:
        """The receipts of the tasks, once the transaction is committed."""
        return self._inner.receipts

    enqueue = _in_transaction(AsyncTransaction.enqueue)
    enqueue_many = _in_transaction(AsyncTransaction.enqueue_many)
    commit = _in_transaction(AsyncTransaction.commit)
    rollback = _in_transaction(AsyncTransaction.rollback)

    def __enter__(self) -> Self:
        self._runtime.call(lambda _: self._inner.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            held.ack_nowait()
        else:
            with suppress(TickwheelError):
                if isinstance(error, Exception):
                    held.nack(reason=reason_of(error))
                else:
                    held.release()


class Client:
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
        connect_timeout: float = 3.0,
        active_timeout: float = 10.0,
        heartbeat: float = HEARTBEAT_S,
        ca: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
        name: str = f"tickwheel-python-sync/{__version__}",
    ) -> None:
        self._make = functools.partial(
            AsyncClient, url, token=token, send_timeout=send_timeout, retries=retries,
            connect_timeout=connect_timeout, active_timeout=active_timeout, heartbeat=heartbeat,
            name=name, ca=ca, client_cert=client_cert, client_key=client_key,
        )  # fmt: skip
        self._make()  # what is wrong with the arguments is said here
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    # --- what is more than an answer ------------------------------------------------------------

    subscribe = _making(AsyncClient.subscribe, Subscription)
    transaction = _making(AsyncClient.transaction, Transaction)
    pull = _pulling(AsyncClient.pull)

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

    # --- every other verb -----------------------------------------------------------------------

    enqueue = _blocking(AsyncClient.enqueue)
    enqueue_nowait = _submitting(AsyncClient.enqueue)
    enqueue_many = _blocking(AsyncClient.enqueue_many)
    enqueue_columns = _blocking(AsyncClient.enqueue_columns)
    oneway = _blocking(AsyncClient.oneway)
    cancel = _blocking(AsyncClient.cancel)
    cancel_many = _blocking(AsyncClient.cancel_many)
    reschedule = _blocking(AsyncClient.reschedule)
    run_now = _blocking(AsyncClient.run_now)
    run_now_many = _blocking(AsyncClient.run_now_many)
    lookup = _blocking(AsyncClient.lookup)
    lookup_many = _blocking(AsyncClient.lookup_many)
    list_tasks = _iterating(AsyncClient.list_tasks)
    find = _blocking(AsyncClient.find)
    dead_list = _iterating(AsyncClient.dead_list)
    dead_requeue = _blocking(AsyncClient.dead_requeue)
    dead_delete = _blocking(AsyncClient.dead_delete)
    load = _blocking(AsyncClient.load)
    put_schedule = _blocking(AsyncClient.put_schedule)
    list_schedules = _iterating(AsyncClient.list_schedules)
    show_schedule = _blocking(AsyncClient.show_schedule)
    pause_schedule = _blocking(AsyncClient.pause_schedule)
    resume_schedule = _blocking(AsyncClient.resume_schedule)
    delete_schedule = _blocking(AsyncClient.delete_schedule)
    run_schedule = _blocking(AsyncClient.run_schedule)
    backfill_schedule = _blocking(AsyncClient.backfill_schedule)
    create_group = _blocking(AsyncClient.create_group)
    delete_group = _blocking(AsyncClient.delete_group)
    delete_topic = _blocking(AsyncClient.delete_topic)
    held_keys = _blocking(AsyncClient.held_keys)
    key_lines = _blocking(AsyncClient.key_lines)
    release_key = _blocking(AsyncClient.release_key)
    skip_key = _blocking(AsyncClient.skip_key)
    configure = _blocking(AsyncClient.configure)
    list_consumers = _iterating(AsyncClient.list_consumers)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    cancel_matching = _blocking(AsyncClient.cancel_matching)
    reschedule_matching = _blocking(AsyncClient.reschedule_matching)
    run_now_matching = _blocking(AsyncClient.run_now_matching)
    dead_requeue_matching = _blocking(AsyncClient.dead_requeue_matching)
    dead_delete_matching = _blocking(AsyncClient.dead_delete_matching)
    preview_matching = _blocking(AsyncClient.preview_matching)
    list_bulk = _iterating(AsyncClient.list_bulk)
    show_bulk = _blocking(AsyncClient.show_bulk)
    cancel_bulk = _blocking(AsyncClient.cancel_bulk)
    wait_bulk = _blocking(AsyncClient.wait_bulk)
    reset_group = _blocking(AsyncClient.reset_group)
    preview_reset = _blocking(AsyncClient.preview_reset)
    list_transactions = _iterating(AsyncClient.list_transactions)
    show_transaction = _blocking(AsyncClient.show_transaction)
    commit_transaction = _blocking(AsyncClient.commit_transaction)
    rollback_transaction = _blocking(AsyncClient.rollback_transaction)
    stats = _blocking(AsyncClient.stats)
    status = _blocking(AsyncClient.status)
    backup = _blocking(AsyncClient.backup)
    ping = _blocking(AsyncClient.ping)

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


def _name_verbs(kind: type) -> None:
    """Name verbs by where they are found, and not by the asynchronous ones they are made of."""
    for name, verb in vars(kind).items():
        if inspect.isfunction(verb) and not name.startswith("_"):
            verb.__name__, verb.__qualname__ = name, f"{kind.__name__}.{name}"


for _kind in (Client, Delivery, Subscription, Transaction):
    _name_verbs(_kind)

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
