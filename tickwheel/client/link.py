"""One shard's connection and all that goes over it: enqueues, acks, calls, subscriptions, answers.

``Verbs`` is what all verbs of a client rest on: they ask one link or all shards as the declaration
of the verb (``tickwheel.api``) says, and read the answer so.

A ``Link`` is opened by its first use and mends its connection by itself; one that could not connect
may be used again. A client has one, and, where its daemon is one of several shards, one to each.
Invariants:

* A link keeps to the shard that it has begun with: a daemon that has another one is refused.
* The options of all links of a client are the same object.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.api import shapes
from tickwheel.api.bulk import BulkPreview, BulkTrial
from tickwheel.api.frames import SESSION_BYTES, FrameType
from tickwheel.api.groups import MadeGroup
from tickwheel.api.tasks import MOVES, Selection, check_selection
from tickwheel.api.times import Duration, seconds
from tickwheel.api.verbs import VERBS
from tickwheel.client.checks import Answers, Checks
from tickwheel.client.connection import Address, Open
from tickwheel.client.delivery import Acks, Delivery, seen
from tickwheel.client.encodings import Codec
from tickwheel.client.keywords import DeadSelectionKeywords, TaskSelectionKeywords
from tickwheel.client.producer import Producer
from tickwheel.client.reconnector import Reconnector
from tickwheel.client.requests import Calls, check_filter, list_of, own_name, read
from tickwheel.client.subscription import Spread, Subscription, Subscriptions
from tickwheel.client.tasks import TaskChecker
from tickwheel.errors import BadRequest, ClientClosed, ConnectionLost, TickwheelError, shown
from tickwheel.limits import Limits
from tickwheel.version import __version__

if TYPE_CHECKING:
    from tickwheel.api.verb import Verb
    from tickwheel.client.search import Route

PAGE = 1000
"""How many items of a listing are asked for at a time."""


@dataclass(slots=True)
class LinkOptions:
    """What all links of a client have in common."""

    addresses: Sequence[Address]
    open_to: Open
    """Opens a connection to an address; to a daemon in this process it is another way."""
    tls: ssl.SSLContext | None
    token: str | None
    name: str
    retries: int
    send_timeout_s: float
    connect_timeout_s: float
    active_timeout_s: float
    heartbeat_s: float
    codec: Codec
    checker: TaskChecker = field(default_factory=TaskChecker)
    checks: Checks = field(default_factory=Checks)

    @property
    def total_s(self) -> float:
        """How long a call may take, in seconds."""
        return self.send_timeout_s * (1 + self.retries)


@dataclass(slots=True, frozen=True)
class Whole:
    """What a client does for the link that it begins with."""

    spread: Callable[[Sequence[str], tuple[int, int]], None]
    """Take the URLs of several shards, and which of how many this link is connected to."""
    undone: Callable[[], Awaitable[None]]
    """Forget these shards: the link could not connect."""
    parts: Callable[[Subscription], Awaitable[Spread | None]]
    """A subscription on each shard for this one, if there are several."""


class Link:
    """A connection to one shard, with its producer, acks, calls and subscriptions."""

    reconnector: Reconnector
    producer: Producer
    acks: Acks
    calls: Calls
    subscriptions: Subscriptions
    answers: Answers
    connecting: asyncio.Task[None]
    """Ends when the first connection stands, or with the reason why none does."""

    def __init__(
        self,
        options: LinkOptions,
        *,
        whole: Whole | None = None,
        place: tuple[int, int] | None = None,
        route: Route | None = None,
    ) -> None:
        """``whole``: of the link that a client begins with, which may find that there are more."""
        self.options = options
        self.state = "new"
        self.is_begun = False
        """Whether it was ever used, so that it has a reconnector and the rest."""
        self.place = place
        """Which shard it is connected to, and how many there are; None: no daemon has said it."""
        self.route = route
        """Where that shard is looked for, if it is one of several."""
        self._whole = whole

    @property
    def connected(self) -> bool:
        """Whether a connection stands right now."""
        return self.state != "new" and self.is_begun and self.reconnector.connection is not None

    # --- life -----------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Wait until it is connected. Raises why it is not; then it may be called again."""
        if self.state == "open":
            await asyncio.shield(self.connecting)
        else:
            self.ready()
            await self.connecting

    def ready(self) -> None:
        """Begin to connect, if it has not. Raises ClientClosed."""
        if self.state == "closed":
            raise ClientClosed("the client is closed; make a new one")
        if self.state == "new":
            self.begin()

    def begin(self) -> None:
        """Open the link: requests are sent when the connection stands, or fail with the reason why
        there is none."""
        options = self.options
        self.state, self.is_begun = "open", True
        hello: dict[str, Any] = {"session": os.urandom(SESSION_BYTES), "token": options.token}
        hello |= {
            "client": options.name,
            "host": socket.gethostname()[:255],
            "pid": os.getpid(),
            "version": __version__,
        }
        self.reconnector = reconnector = Reconnector(
            options.addresses,
            hello,
            send_timeout_s=options.send_timeout_s,
            connect_timeout_s=options.connect_timeout_s,
            active_timeout_s=options.active_timeout_s,
            heartbeat_s=options.heartbeat_s,
            deliver=self._deliver,
            ended=self._ended,
            asked=self._asked,
            greeted=self._greeted,
            tls=options.tls,
            open_to=options.open_to,
            route=self.route,
        )
        self.producer = Producer(reconnector, options.total_s, options.retries)
        self.acks = Acks(reconnector, options.total_s)
        self.calls = Calls(reconnector, options.total_s, options.retries)
        parts = None if self._whole is None else self._whole.parts
        self.subscriptions = Subscriptions(reconnector, self.calls, self.acks, options.codec, parts)
        self.answers = Answers(options.checks, reconnector, self.calls)
        # In the order of their frames: acks first, they set credit free; then what calls ask.
        reconnector.sources += [self.acks, self.producer, self.calls, self.subscriptions]
        reconnector.sources.append(self.answers)
        self.connecting = reconnector.loop.create_task(self._connect(reconnector))
        self.connecting.add_done_callback(seen)

    async def _connect(self, reconnector: Reconnector) -> None:
        try:
            await reconnector.start()
        except BaseException as error:
            if self.state == "open":
                self.state = "new"
            told = (
                error if isinstance(error, TickwheelError) else ClientClosed("it did not connect")
            )
            await reconnector.stop(told)
            if self._whole is not None:
                await self._whole.undone()
            raise

    def _greeted(self, limits: Limits) -> None:
        """Take what a daemon says of itself in HELLO. Raises ConnectionLost for one that is not
        the shard that this link has begun with."""
        self.options.checker.set_limits(limits)
        info = self.reconnector.info
        urls: Sequence[str] = info.get("shards") or ("",)
        place = (info.get("shard", 0), len(urls))
        if self.place is None and len(urls) > 1 and self._whole is not None:
            self._whole.spread(urls, place)
        elif self.place not in (None, place):
            raise ConnectionLost(
                "shard {} of {} answers here; this client has begun with shard {} of {}".format(
                    *place, *self.place
                )
            )
        self.place = place

    def _deliver(self, sub: int, epoch: int, delivered_ms: int, items: tuple[Any, ...]) -> None:
        self.subscriptions.deliver(sub, epoch, delivered_ms, items)

    def _ended(self, sub: int, error: TickwheelError) -> None:
        self.subscriptions.ended(sub, error)

    def _asked(self, group: str, items: Iterable[Any]) -> None:
        self.answers.asked(group, items)

    async def close(self, limit_s: float, others: Sequence[Link] = ()) -> None:
        """Flush acks and enqueues, give back what was not handed out, and say goodbye; of these
        ``others`` too, whose deliveries subscriptions of this link hand out."""
        if self.state != "open":
            self.state = "closed"
            return
        self.state = "closed"
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._finish(others)
        finally:
            await close_all(others, 0.0)
            self.connecting.cancel()
            await asyncio.wait((self.connecting,))
            await self.reconnector.stop(ClientClosed("the client was closed"))

    async def _finish(self, others: Sequence[Link]) -> None:
        subscriptions = self.subscriptions.all()
        await asyncio.gather(*(s.close() for s in subscriptions), return_exceptions=True)
        begun = [link for link in (self, *others) if link.is_begun]
        await asyncio.gather(*(link.acks.wait_idle() for link in begun))
        await asyncio.gather(*(link.producer.wait_idle() for link in begun))
        await close_all(others, self.options.send_timeout_s)
        connection = self.reconnector.connection
        if connection is not None and not connection.leaving:
            with suppress(TickwheelError):
                await self.calls.call(FrameType.BYE, repeat=False)

    # --- what is asked of the shard -------------------------------------------------------------

    def until(self, timeout: Duration | None) -> float | None:
        """When a call's own time is over, by the loop's clock; None: it has none."""
        self.ready()
        if timeout is None:
            return None
        return self.reconnector.loop.time() + seconds(timeout, "timeout")

    async def ask(self, kind: FrameType, *fields: Any, until_s: float | None = None) -> Any:
        """The answer to a frame, as it comes."""
        self.ready()
        return await self.calls.call(kind, *fields, until_s=until_s)

    async def call(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """The answer to the frame of a verb, as it comes; the link is open."""
        assert verb.frame is not None, verb.name
        if verb.word:
            place, *rest = fields
            fields = (place, verb.word, *(rest or [None] * _has_options(verb.frame)))
        return await self.calls.call(
            verb.frame, *fields, extra_s=verb.extra_s, until_s=until_s, prompt=verb.prompt,
            repeat=verb.repeat,
        )  # fmt: skip

    async def pages(
        self, verb: Verb, keywords: Mapping[str, Any], limit: int | None, timeout: Duration | None
    ) -> AsyncGenerator[Any, None]:
        """The items of a listing, page by page; ``timeout`` is for each page."""
        asked, left = verb.asked.of_keywords(keywords), limit
        while left is None or left > 0:
            asked["limit"] = PAGE if left is None else min(left, PAGE)
            raw = await self.call(verb, verb.asked.to_frame(asked), self.until(timeout))
            page = read(shapes.reader_of(verb.answer), raw)
            # A page may be longer than asked: that of consumers ends behind all of a connection.
            items = getattr(page, verb.pages)[:left]
            for item in items:
                yield item
            asked["after"] = following = page.next
            if following is None:
                return
            if left is not None:
                left -= len(items)

    async def preview(self, asked: Mapping[str, Any], timeout: Duration | None) -> BulkPreview:
        """What a bulk operation would do in this shard: its parts, together."""
        verb, found, asked = VERBS["preview_bulk"], None, {**asked}
        while True:
            part = BulkPreview.of(
                await self.call(verb, BulkTrial.to_frame(asked), self.until(timeout))
            )
            found = part if found is None else found.and_then(part)
            if part.next is None:
                return found
            asked |= {"after": part.next, "until_id": part.until_id, "until_ms": part.until_ms}

    async def pull(
        self,
        names: tuple[str, str],
        count: int,
        wait_ms: int,
        options: dict[str, Any],
        until_s: float | None,
        made: Callable[[MadeGroup], None],
    ) -> list[Delivery]:
        """Return up to ``count`` deliveries of the topic and group ``names``. ``made`` is called
        with the group where the pull has made it."""
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
            made(MadeGroup.of(answer[3]))
        return read(lambda raw: self.subscriptions.pulled(*names, raw), answer)


async def close_all(links: Iterable[Link], limit_s: float) -> None:
    """Close links side by side, whatever becomes of each."""
    await asyncio.gather(*(link.close(limit_s) for link in links), return_exceptions=True)


def _has_options(frame: FrameType) -> bool:
    """Whether a frame that several verbs share has a place for options."""
    return any(verb.asked.options() for verb in VERBS.values() if verb.frame is frame)


class Routes(Protocol):
    """All shards of a client, as its verbs see them; each method is as that of ``Link``."""

    links: Sequence[Link]
    """One to each."""

    async def call(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any: ...

    def pages(
        self, verb: Verb, keywords: Mapping[str, Any], limit: int | None, timeout: Duration | None
    ) -> AsyncGenerator[Any, None]: ...

    async def place_of_transaction(
        self,
        place: tuple[Link, int] | None,
        name: str,
        wires: Sequence[Any],
        until_s: float | None,
    ) -> tuple[Link, int]:
        """The link to the shard of a transaction with these half tasks, and the number of the
        claim of its name. Raises BadRequest, Conflict."""

    def answer_checks(self) -> None:
        """Answer at all shards for the producer groups that the client answers for."""


class Verbs:
    """A client as its verbs see it. ``Client`` fills in what is only declared here."""

    _checker: TaskChecker
    _link: Link
    """The link that it has begun with."""
    _shards: Routes | None
    """All shards, once it is known that there are several; None: that link is to the only one."""

    @property
    def _links(self) -> Sequence[Link]:
        """The links to all shards, as far as these are known."""
        return (self._link,) if self._shards is None else self._shards.links

    @property
    def _reconnector(self) -> Reconnector:
        return self._link.reconnector

    def _ready(self) -> None:
        """Let a new client begin to connect. Raises ClientClosed."""
        raise NotImplementedError

    async def _know_shards(self, until_s: float | None = None) -> Routes | None:
        """All shards, when it is known whether there are several. Raises why it is not."""
        raise NotImplementedError

    def _until(self, timeout: Duration | None) -> float | None:
        """When a call's own time is over, by the loop's clock; None: it has none."""
        self._ready()
        return self._link.until(timeout)

    async def _ask(
        self, name: str, keywords: Mapping[str, Any], timeout: Duration | None, gives: str = ""
    ) -> Any:
        """The answer of a verb that is asked with these keywords, or its field ``gives``."""
        verb, until_s = VERBS[name], self._until(timeout)
        values = verb.asked.of_keywords(keywords)
        raw = await self._call(verb, verb.asked.to_frame(values), until_s)
        if verb.answer in (None, tuple):
            return raw
        answer = read(shapes.reader_of(verb.answer), raw)
        return getattr(answer, gives) if gives else answer

    async def _ask_word(
        self, name: str, keywords: Mapping[str, Any], timeout: Duration | None
    ) -> Any:
        """The word for the one task that a verb is asked about."""
        outcomes = await self._ask(name, keywords, timeout)
        return read(lambda found: str(found[0].status), outcomes)

    async def _call(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """The daemon's answer, as it comes, to the frame of a verb; over several shards one answer
        that is made of theirs."""
        whole = await self._know_shards(until_s) or self._link
        return await whole.call(verb, fields, until_s)

    async def _each(
        self,
        name: str,
        items: Iterable[Any],
        timeout: Duration | None = None,
        keywords: Mapping[str, Any] = {},
    ) -> list[Any]:
        """The answers of a verb for each item, asked in as many frames as there must be; all of
        them have these keywords."""
        verb, until_s = VERBS[name], self._until(timeout)
        request, field = verb.asked, verb.asked.places()[0]
        values: Sequence[Any] = field.kind.of_python(items, field.python)
        same = request.of_keywords(keywords)
        found: list[Any] = []
        step = self._reconnector.limits.ids_per_frame_max
        for start in range(0, len(values), step):
            some = values[start : start + step]
            asked = request.to_frame({**same, field.name: some})
            found += list_of(await self._call(verb, asked, until_s), len(some), verb.answer)
        return found

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
        """What became of what is ``named`` by itself (the id of a task, or pairs of dead letters),
        or of a key's tasks, each; or the bulk operation for all that matches, which alone has a
        rate and an id among its keywords. Raises BadRequest unless it is one of the three."""
        verb, own = VERBS[name], {"rate": keywords.pop("rate"), "id": keywords.pop("id")}
        of_tasks = issubclass(verb.asked, Selection)
        ids = [named] if of_tasks and named is not None else named
        check_selection(ids, topic, key, matching)
        if verb.bulk in MOVES:
            move = MOVES[verb.bulk]
            move(**move.of_keywords(keywords)).moved()
        if matching is not None:
            block = TaskSelectionKeywords if of_tasks else DeadSelectionKeywords
            check_filter(matching, block, verb.methods[0].name)
            asked = {"kind": verb.bulk, "topic": topic, **matching, **keywords, **own}
            asked["id"] = own_name(verb.bulk) if own["id"] is None else own["id"]
            return await self._ask("make_bulk", asked, timeout)
        if any(value is not None for value in own.values()):
            raise BadRequest(f"{' and '.join(own)} go with a filter")
        if ids is not None:
            found = await self._each(name, ids, timeout, keywords)
            if not of_tasks:
                return found
            return found[0].status if verb.methods[0].word else found[0]
        return await self._ask(name, {"topic": topic, "key": key, **keywords}, timeout)

    async def _pages(
        self,
        name: str,
        keywords: Mapping[str, Any],
        limit: int | None,
        timeout: Duration | None,
    ) -> AsyncGenerator[Any, None]:
        """The items of a listing; ``timeout`` is for each page."""
        self._ready()
        if limit is not None and (type(limit) is not int or limit < 1):
            raise BadRequest(f"limit must be an integer of 1 or more, not {shown(limit)}")
        verb = VERBS[name]
        whole = await self._know_shards(self._until(timeout)) or self._link
        async with aclosing(whole.pages(verb, keywords, limit, timeout)) as items:
            async for item in items:
                yield item
