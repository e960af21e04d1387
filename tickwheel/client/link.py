"""The connection to one shard with its enqueues, acks, calls, subscriptions and checks.

``Verbs`` is the base of all verbs of a client: it asks one link or all shards, and reads the
answer, as the verb's declaration (``tickwheel.api``) says.

A ``Link`` is opened by its first use and reconnects by itself; a link that failed to connect can be
used again. A client has one link, or one for each shard if there are several. Invariants:

* A link keeps to its first shard: a daemon with another shard is refused.
* All links of a client share one options object.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.api import shapes
from tickwheel.api.bulk import BulkPreview, BulkTrial
from tickwheel.api.frames import SESSION_BYTES, FrameType
from tickwheel.api.groups import MadeGroup
from tickwheel.api.tasks import MOVES, Selection, check_selection
from tickwheel.api.times import Duration, seconds
from tickwheel.api.verbs import VERBS
from tickwheel.client.checks import Answers, Checks
from tickwheel.client.delivery import Acks, Delivery, mark_retrieved
from tickwheel.client.encodings import Codec
from tickwheel.client.keywords import DeadSelectionKeywords, TaskSelectionKeywords
from tickwheel.client.producer import Producer
from tickwheel.client.reconnector import ConnectOptions, Reconnector
from tickwheel.client.requests import Calls, check_filter, list_of, own_name, read
from tickwheel.client.search import ShardAddresses
from tickwheel.client.subscription import SpreadSubscription, Subscription, Subscriptions
from tickwheel.client.tasks import TaskChecker
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    ConnectionLost,
    NotFound,
    TickwheelError,
    shown,
)
from tickwheel.limits import Limits
from tickwheel.version import __version__
from tickwheel.waiting import finish_despite_cancellation

if TYPE_CHECKING:
    from tickwheel.api.verb import Verb

PAGE = 1000
"""Maximum items of a listing in one request."""
BULK_STARTS = ("make_bulk", "reset_group")
"""Verbs that start a bulk operation."""


@dataclass(slots=True)
class LinkOptions(ConnectOptions):
    """Options that all links of a client share."""

    token: str | None
    name: str
    retries: int
    codec: Codec
    retries_refusals: bool = True
    """Whether a request that a daemon refuses for the moment is repeated."""
    checker: TaskChecker = field(default_factory=TaskChecker)
    checks: Checks = field(default_factory=Checks)
    session: bytes | None = None
    """The session of every link, which a later process may continue; None: a new one for each."""
    first_number: int = 1
    """The number of a link's first frame, apart from frames whose number the caller chooses."""

    @property
    def total_s(self) -> float:
        """Maximum seconds of a call."""
        return self.send_timeout_s * (1 + self.retries)


@dataclass(slots=True, frozen=True)
class ClientCallbacks:
    """Callbacks of a client for its first link."""

    spread: Callable[[Sequence[str], tuple[int, int]], None]
    """Connect to all shards, given their URLs and the link's (shard, number of shards)."""
    forget_shards: Callable[[], Awaitable[None]]
    """Forget the shards: the link could not connect."""
    parts: Callable[[Subscription], Awaitable[SpreadSubscription | None]]
    """Return the subscriptions on all shards that deliver to this one; None: there is one shard."""


class Link:
    """A connection to one shard, with its producer, acks, calls and subscriptions."""

    reconnector: Reconnector
    producer: Producer
    acks: Acks
    calls: Calls
    subscriptions: Subscriptions
    answers: Answers
    connecting: asyncio.Task[None]
    """Ends when the first connection is open, or raises the error that prevented it."""

    def __init__(
        self,
        options: LinkOptions,
        *,
        callbacks: ClientCallbacks | None = None,
        shard_and_count: tuple[int, int] | None = None,
        shard_addresses: ShardAddresses | None = None,
    ) -> None:
        """``callbacks``: only for the client's first link, which may find that there are more
        shards."""
        self.options = options
        self.state = "new"
        self.is_started = False
        """Whether the link was ever used, and therefore has a reconnector."""
        self.shard_and_count = shard_and_count
        """The link's shard and the number of shards; None: not known yet."""
        self.shard_addresses = shard_addresses
        """The addresses to try; None: the configured ones, for a single shard."""
        self._callbacks = callbacks
        self._waiting = 0
        """Callers that wait for the first connection."""

    @property
    def connected(self) -> bool:
        """Whether a connection is open now."""
        return self.state != "new" and self.is_started and self.reconnector.connection is not None

    # --- life -----------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Wait for the connection. Raise its error; the caller can try again."""
        self.ready()
        connecting = await self.wait_connecting()
        if connecting.cancelled():
            raise ClientClosed("the client was closed before it had connected")
        connecting.result()

    async def wait_connecting(self, timeout_s: float | None = None) -> asyncio.Task[None]:
        """Return the attempt to connect after it has ended, or after ``timeout_s``."""
        connecting = self.connecting
        self._waiting += 1
        try:
            await asyncio.wait((connecting,), timeout=timeout_s)
        finally:
            self._waiting -= 1
        return connecting

    async def abandon(self) -> None:
        """End the attempt to connect, unless another caller or a request waits for it."""
        is_wanted = self._waiting or self.calls.count or not self.producer.is_idle
        if self.state == "open" and not self.connecting.done() and not is_wanted:
            self.state = "new"
            self.connecting.cancel()
            await asyncio.wait((self.connecting,))

    def ready(self) -> None:
        """Start to connect if the link is new or could not connect. Raise ClientClosed."""
        if self.state == "closed":
            raise ClientClosed("the client is closed; create a new one")
        if self.state == "new":
            self.begin()
        self.reconnector.check_loop()

    def begin(self) -> None:
        """Open the link. Requests are sent once connected, or fail with the connection's error."""
        options = self.options
        self.state, self.is_started = "open", True
        session = options.session or os.urandom(SESSION_BYTES)
        hello: dict[str, Any] = {"session": session, "token": options.token}
        hello |= {
            "client": options.name,
            "host": socket.gethostname()[:255],
            "pid": os.getpid(),
            "version": __version__,
        }
        addresses = self.shard_addresses
        if addresses is None:
            addresses = ShardAddresses(1, options.addresses, secure=options.tls is not None)
        shard = 0 if self.shard_and_count is None else self.shard_and_count[0]
        self.reconnector = reconnector = Reconnector(
            options, addresses, shard, hello, deliver=self._deliver, ended=self._ended,
            asked=self._asked, greeted=self._greeted,
        )  # fmt: skip
        reconnector.number_from(options.first_number)
        retries = options.retries if options.retries_refusals else 0
        self.producer = Producer(reconnector, options.total_s, retries)
        self.acks = Acks(reconnector, options.total_s)
        self.calls = Calls(reconnector, options.total_s, retries)
        parts = None if self._callbacks is None else self._callbacks.parts
        self.subscriptions = Subscriptions(reconnector, self.calls, self.acks, options.codec, parts)
        self.answers = Answers(options.checks, reconnector, self.calls)
        # The order of frames in a flush: acks come first, because they free credit.
        reconnector.sources += [self.acks, self.producer, self.calls, self.subscriptions]
        reconnector.sources.append(self.answers)
        self.connecting = reconnector.loop.create_task(self._connect(reconnector))
        self.connecting.add_done_callback(mark_retrieved)

    async def _connect(self, reconnector: Reconnector) -> None:
        try:
            await reconnector.start()
        except BaseException as error:
            if self.state == "open" and self.reconnector is reconnector:
                self.state = "new"
            failure = (
                error
                if isinstance(error, TickwheelError)
                else ClientClosed("the client did not connect")
            )
            await reconnector.stop(failure)
            if self._callbacks is not None:
                await self._callbacks.forget_shards()
            raise

    def _greeted(self, limits: Limits) -> None:
        """Store the daemon's answer to HELLO. Raise ConnectionLost if the daemon has another
        shard than the link."""
        self.options.checker.set_limits(limits)
        info = self.reconnector.info
        urls: Sequence[str] = info.get("shards") or ("",)
        shard_and_count = (info.get("shard", 0), len(urls))
        if self.shard_and_count is None and len(urls) > 1 and self._callbacks is not None:
            self._callbacks.spread(urls, shard_and_count)
        elif self.shard_and_count not in (None, shard_and_count):
            raise ConnectionLost(
                "shard {} of {} answers here, but this client uses shard {} of {}".format(
                    *shard_and_count, *self.shard_and_count
                )
            )
        self.shard_and_count = shard_and_count

    def _deliver(self, sub: int, epoch: int, delivered_ms: int, items: tuple[Any, ...]) -> None:
        self.subscriptions.deliver(sub, epoch, delivered_ms, items)

    def _ended(self, sub: int, error: TickwheelError) -> None:
        self.subscriptions.ended(sub, error)

    def _asked(self, group: str, items: Iterable[Any]) -> None:
        self.answers.check(group, items)

    async def close(self, limit_s: float, others: Sequence[Link] = ()) -> None:
        """Flush acks and enqueues, release unread deliveries, and disconnect. Does the same for
        ``others``, which deliver to subscriptions of this link."""
        if self.state != "open" or self.reconnector.loop.is_closed():
            self.state = "closed"
            return
        self.state = "closed"
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._finish(others)
        finally:
            # Nothing else would close the connection of a client whose close was cancelled.
            await finish_despite_cancellation(self._disconnect(others))

    async def _disconnect(self, others: Sequence[Link]) -> None:
        await close_all(others, 0.0)
        self.connecting.cancel()
        await asyncio.wait((self.connecting,))
        await self.reconnector.stop(ClientClosed("the client was closed"))

    async def _finish(self, others: Sequence[Link]) -> None:
        subscriptions = self.subscriptions.all()
        await asyncio.gather(*(s.close() for s in subscriptions), return_exceptions=True)
        started = [link for link in (self, *others) if link.is_started]
        await asyncio.gather(*(link.acks.wait_idle() for link in started))
        await asyncio.gather(*(link.producer.wait_idle() for link in started))
        await close_all(others, self.options.send_timeout_s)
        connection = self.reconnector.connection
        if connection is not None and not connection.leaving:
            with suppress(TickwheelError):
                await self.calls.call(FrameType.BYE, repeat=False)

    # --- requests -------------------------------------------------------------------------------

    def until(self, timeout: Duration | None) -> float | None:
        """Return a call's deadline by the loop's clock; None: no timeout."""
        self.ready()
        if timeout is None:
            return None
        return self.reconnector.loop.time() + seconds(timeout, "timeout")

    async def ask(self, kind: FrameType, *fields: Any, until_s: float | None = None) -> Any:
        """Return the raw answer to a frame."""
        self.ready()
        return await self.calls.call(kind, *fields, until_s=until_s)

    async def call(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """Return the raw answer to a verb's frame; the link must be open."""
        assert verb.frame is not None, verb.name
        repeat = verb.repeat and verb.request_type.is_repeatable(fields)
        if verb.word:
            first, *rest = fields
            fields = (first, verb.word, *(rest or [None] * _has_options(verb.frame)))
        return await self.calls.call(
            verb.frame, *fields, extra_s=verb.extra_s, until_s=until_s, prompt=verb.prompt,
            repeat=repeat,
        )  # fmt: skip

    async def pages(
        self, verb: Verb, keywords: Mapping[str, Any], limit: int | None, timeout: Duration | None
    ) -> AsyncGenerator[Any, None]:
        """Yield the items of a listing, page by page; ``timeout`` applies to each page."""
        fields, left = verb.request_type.of_keywords(keywords), limit
        while left is None or left > 0:
            fields["limit"] = PAGE if left is None else min(left, PAGE)
            raw = await self.call(verb, verb.request_type.to_frame(fields), self.until(timeout))
            page = read(shapes.reader_of(verb.answer), raw)
            # A page may exceed its limit: a page of consumers includes all of a connection.
            items = getattr(page, verb.pages)[:left]
            for item in items:
                yield item
            fields["after"] = following = page.next
            if following is None:
                return
            if left is not None:
                left -= len(items)

    async def preview(self, fields: Mapping[str, Any], timeout: Duration | None) -> BulkPreview:
        """Return what a bulk operation would do in this shard, merged from its parts."""
        verb, preview, fields = VERBS["preview_bulk"], None, {**fields}
        while True:
            part = BulkPreview.of(
                await self.call(verb, BulkTrial.to_frame(fields), self.until(timeout))
            )
            preview = part if preview is None else preview.and_then(part)
            if part.next is None:
                return preview
            fields |= {"after": part.next, "until_id": part.until_id, "until_ms": part.until_ms}

    async def pull(
        self,
        names: tuple[str, str],
        count: int,
        wait_ms: int,
        options: dict[str, Any],
        until_s: float | None,
        on_made: Callable[[MadeGroup], None],
    ) -> list[Delivery]:
        """Return up to ``count`` deliveries of the topic and group ``names``. Calls ``on_made``
        with the group if the pull has created it."""
        answer = await self.calls.call(
            FrameType.PULL,
            *names,
            count,
            wait_ms,
            {**options, "tell": True},
            extra_s=wait_ms / 1000,
            until_s=until_s,
            prompt=False,
            orphaned=lambda raw: self.subscriptions.give_back(*names, raw),
        )
        if len(answer) > 3 and answer[3] is not None:
            on_made(MadeGroup.of(answer[3]))
        return read(lambda raw: self.subscriptions.pulled(*names, raw), answer)


async def close_all(links: Iterable[Link], limit_s: float) -> None:
    """Close links concurrently, ignoring their errors."""
    await asyncio.gather(*(link.close(limit_s) for link in links), return_exceptions=True)


def with_bulk_id(verb: Verb, fields: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the fields of a verb. If it starts a bulk operation without an id of the caller's,
    they have a random id, so that a resend, or another shard, gets the same."""
    if verb.name not in BULK_STARTS or fields[-1].get("id") is not None:
        return fields
    kind = fields[1] if verb.name == "make_bulk" else "reset"
    return (*fields[:-1], {**fields[-1], "id": own_name(kind)})


def _has_options(frame: FrameType) -> bool:
    """Return whether a frame that several verbs share has a field for options."""
    return any(verb.request_type.options() for verb in VERBS.values() if verb.frame is frame)


class Routes(Protocol):
    """All shards of a client, as its verbs use them; the methods match those of ``Link``."""

    links: Sequence[Link]
    """A link for each shard."""

    async def call(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any: ...

    def pages(
        self, verb: Verb, keywords: Mapping[str, Any], limit: int | None, timeout: Duration | None
    ) -> AsyncGenerator[Any, None]: ...

    async def link_of_transaction(
        self, last: tuple[Link, int] | None, name: str, wires: Sequence[Any], until_s: float | None
    ) -> tuple[Link, int]:
        """Return the link to the shard that gets a transaction's half tasks ``wires``, and the
        number of the claim of its name. ``last``: the last result for the transaction. Raise
        BadRequest or Conflict."""

    def connect_for_checks(self) -> None:
        """Connect to all shards if the client answers checks of transactions."""


class Verbs:
    """The base class of a client's verbs. ``Client`` implements the abstract methods."""

    _checker: TaskChecker
    _link: Link
    """The client's first link."""
    _shards: Routes | None
    """All shards, if there are several; None: there is one, or that is not known yet."""

    @property
    def _links(self) -> Sequence[Link]:
        """The links to all known shards."""
        return (self._link,) if self._shards is None else self._shards.links

    @property
    def _reconnector(self) -> Reconnector:
        return self._link.reconnector

    def _ready(self) -> None:
        """Start to connect a new client. Raise ClientClosed."""
        raise NotImplementedError

    async def _know_shards(self, until_s: float | None = None) -> Routes | None:
        """Return all shards once it is known whether there are several; None: there is one. Raise
        if it stays unknown."""
        raise NotImplementedError

    def _until(self, timeout: Duration | None) -> float | None:
        """Return a call's deadline by the loop's clock; None: no timeout."""
        self._ready()
        return self._link.until(timeout)

    async def _ask(
        self, name: str, keywords: Mapping[str, Any], timeout: Duration | None, gives: str = ""
    ) -> Any:
        """Return the answer of a verb with these keywords, or only its field ``gives``."""
        verb, until_s = VERBS[name], self._until(timeout)
        values = verb.request_type.of_keywords(keywords)
        raw = await self._call(verb, verb.request_type.to_frame(values), until_s)
        if verb.answer in (None, tuple):
            return raw
        answer = read(shapes.reader_of(verb.answer), raw)
        return getattr(answer, gives) if gives else answer

    async def _ask_word(
        self, name: str, keywords: Mapping[str, Any], timeout: Duration | None
    ) -> Any:
        """Return the outcome of a verb for a single task."""
        outcomes = await self._ask(name, keywords, timeout)
        return read(lambda rows: str(rows[0].status), outcomes)

    async def _call(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """Return the raw answer to a verb; with several shards, the merged answer."""
        shards = await self._know_shards(until_s)
        if shards is not None:
            return await shards.call(verb, fields, until_s)
        return await self._link.call(verb, with_bulk_id(verb, fields), until_s)

    async def _each(
        self,
        name: str,
        items: Iterable[Any],
        timeout: Duration | None = None,
        keywords: Mapping[str, Any] = {},
    ) -> list[Any]:
        """Return a verb's answers for each item, asked in as many frames as needed with the same
        keywords."""
        verb, until_s = VERBS[name], self._until(timeout)
        request, field = verb.request_type, verb.request_type.places()[0]
        values: Sequence[Any] = field.kind.of_python(items, field.python)
        same = request.of_keywords(keywords)
        answers: list[Any] = []
        step = self._reconnector.limits.ids_per_frame_max
        for start in range(0, len(values), step):
            part = values[start : start + step]
            frame = request.to_frame({**same, field.name: part})
            answers += list_of(await self._call(verb, frame, until_s), len(part), verb.answer)
        return answers

    async def _selected(
        self,
        name: str,
        named: Any,
        topic: str | None,
        key: str | None,
        matching: Mapping[str, Any] | None,
        keywords: dict[str, Any],
        timeout: Duration | None,
    ) -> Any:
        """Return the outcome for ``named`` (a task's id, or an (id, group) pair for each dead
        letter), or the outcomes of a key's tasks, or the bulk operation for all that match, which
        alone accepts a rate and an id. Raise BadRequest unless exactly one of the three is given.
        """
        verb, own = VERBS[name], {"rate": keywords.pop("rate"), "id": keywords.pop("id")}
        of_tasks = issubclass(verb.request_type, Selection)
        ids = [named] if of_tasks and named is not None else named
        check_selection(ids, topic, key, matching)
        if verb.bulk in MOVES:
            move = MOVES[verb.bulk]
            move(**move.of_keywords(keywords)).move_fields()
        if matching is not None:
            block = TaskSelectionKeywords if of_tasks else DeadSelectionKeywords
            check_filter(matching, block, verb.methods[0].name)
            fields = {"kind": verb.bulk, "topic": topic, **matching, **keywords, **own}
            return await self._ask("make_bulk", fields, timeout)
        if any(value is not None for value in own.values()):
            raise BadRequest(f"{' and '.join(own)} require a filter")
        if ids is not None:
            outcomes = await self._each(name, ids, timeout, keywords)
            if not of_tasks:
                return outcomes
            return outcomes[0].status if verb.methods[0].word else outcomes[0]
        return await self._ask(name, {"topic": topic, "key": key, **keywords}, timeout)

    async def _preview(self, fields: Mapping[str, Any], timeout: Duration | None) -> BulkPreview:
        """Return what a bulk operation would do in all shards. Raise NotFound if no shard has its
        topic."""
        previews: list[BulkPreview] = []
        for link in self._links:
            try:
                previews.append(await link.preview(fields, timeout))
            except NotFound as error:
                missing = error
        if not previews:
            raise missing
        return reduce(BulkPreview.and_then, previews)

    async def _pages(
        self, name: str, keywords: Mapping[str, Any], limit: int | None, timeout: Duration | None
    ) -> AsyncGenerator[Any, None]:
        """Yield the items of a listing; ``timeout`` applies to each page."""
        self._ready()
        if limit is not None and (type(limit) is not int or limit < 1):
            raise BadRequest(f"limit must be a positive integer, not {shown(limit)}")
        verb = VERBS[name]
        target = await self._know_shards(self._until(timeout)) or self._link
        async with aclosing(target.pages(verb, keywords, limit, timeout)) as items:
            async for item in items:
                yield item


def descriptors(client: Verbs) -> list[int]:
    """Return the file descriptors of a client's open connections."""
    links = [link for link in client._links if link.is_started]
    connections = [link.reconnector.connection for link in links]
    found = [connection.fileno() for connection in connections if connection is not None]
    return [descriptor for descriptor in found if descriptor >= 0]


def unreachable(client: Verbs, waited_s: float) -> TickwheelError:
    """Return why a client that has begun to connect has no connection after ``waited_s``."""
    return client._reconnector.unreachable(waited_s)


def closing_s(client: Verbs, timeout_s: float | None) -> float:
    """Return the maximum seconds that the ``close`` of a client takes."""
    return client._link.options.send_timeout_s if timeout_s is None else timeout_s
