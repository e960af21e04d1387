"""The HTTP API of all shards together, in the process that answers HTTP for them
(``server/http/whole.py``).

``Gateway`` is an ASGI application: the API of a daemon, with the document and the console, whose
operations are those of ``OverShards``. These do nothing themselves: each asks the shards as an
ordinary client does, a ``Teller``, and the client knows which shards are asked and how their
answers become one. Invariants:

* This process has no rights of its own. It asks with the token of whoever asks it, and the daemons
  decide. Tokens are in its memory only, and go with it.
* A stream has a client of its own, whose connections end with it: the daemons see its consumer go.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote, urlsplit

from h11 import RemoteProtocolError
from starlette.applications import Starlette

from tickwheel.api.bulk import BulkPreview
from tickwheel.api.frames import FrameType
from tickwheel.api.groups import MadeGroup
from tickwheel.api.tasks import once_parts, rest_key
from tickwheel.api.verb import Over
from tickwheel.api.verbs import VERBS
from tickwheel.client import Client
from tickwheel.client.connection import Trust
from tickwheel.client.merging import ask_in_parts, raise_first, status_of
from tickwheel.client.shards import AWAY, checked_basis
from tickwheel.client.subscription import SubscribeOptions
from tickwheel.client.tasks import FRAME_BYTES, merged_receipts, receipts, size_of
from tickwheel.errors import (
    BadRequest,
    Forbidden,
    LimitExceeded,
    NotFound,
    Overloaded,
    TickwheelError,
    Unreachable,
    from_wire,
)
from tickwheel.model.records import DEFAULT_GROUP
from tickwheel.model.values import SHARD_BITS, shard_of
from tickwheel.server import checks
from tickwheel.server.http.api import Api
from tickwheel.server.http.app import API_PREFIX
from tickwheel.server.http.call import Exchange, as_json
from tickwheel.server.http.deliveries import Told, answer_view, delivery_view
from tickwheel.server.http.pages import pages
from tickwheel.server.http.whole import Silent, fetch
from tickwheel.server.logins import LINK_PREFIX
from tickwheel.server.settings import found_here, split_address
from tickwheel.server.shard.callers import ANONYMOUS, NOBODY, PRINCIPALS_KEPT_MAX
from tickwheel.server.shard.guard import AuditStage, behind
from tickwheel.server.shard.operations import StandbyOperations, table
from tickwheel.server.shard.overview import report_page
from tickwheel.webhooks import read_token

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tickwheel.api.daemon import Nothing
    from tickwheel.api.shapes import Request
    from tickwheel.api.targets import SettleCallback
    from tickwheel.api.verb import Verb
    from tickwheel.client.delivery import Delivery
    from tickwheel.client.link import Link
    from tickwheel.client.tasks import Receipt
    from tickwheel.clock import Clock, Now
    from tickwheel.engine.sessions import ReplySink
    from tickwheel.engine.topics import DeliverySink
    from tickwheel.server.http.call import Route
    from tickwheel.server.logins import Logins
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import Ask, Caller, OnEvent, Principal
    from tickwheel.server.shard.delivery import Tell
    from tickwheel.server.shard.operations import Conversing
    from tickwheel.server.shard.verbs import Verbs

CLIENTS_MAX: Final = 256
"""Clients in use, one for each token: with a request under way, or the lease of a pull that is not
over; streams have their own beside them."""
IDLE_MAX: Final = 64
"""Clients that are kept beside these."""
STREAM_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of bodies that wait for the reader of a stream, before the shards send no more."""
IDLE_S: Final = 60.0
"""Seconds after which a client that was asked nothing is closed, with no lease of a pull left."""
LOOK_S: Final = 5.0
ANSWER_S: Final = 5.0
"""How long, in seconds, the HTTP of a shard may take to answer."""
STATUS_S: Final = 2.0
"""How long, in seconds, a shard may take to say how it is."""
ANSWER_BYTES_MAX: Final = 64 * 1024
NAME: Final = "http of all shards"
ASK_IT: Final = "ask one at its own address: /v1/shards says where they are"
_BY_COLUMNS: Final = ("ack", "release", "extend")
"""Verbs that take ids and attempts apart; others take an item for each delivery."""


# --- a client of all shards ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wish(SubscribeOptions):
    """What a stream asks for, whose options are in the form of the wire already."""

    options: Mapping[str, Any] = field(default_factory=dict)

    def fields(self, number: int, prefetch: int) -> tuple[Any, ...]:
        return number, self.topic, self.group or None, prefetch, self.options


class Teller(Client):
    """A client for one token: what HTTP's handlers ask, in the form of the wire."""

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None) -> None:
        super().__init__(url, token=token, name=NAME)
        self._options.tls = tls
        self.under_way = 0
        """Requests that it works on."""
        self.leased_until_s = 0.0
        """When the last lease of a pull is over, by the loop's clock: its end would end them."""
        self.idle_since_s = 0.0
        """When it was asked last."""

    def keep_for(self, lease_s: float) -> None:
        """Let nobody close it before a lease is over."""
        self.leased_until_s = max(self.leased_until_s, _now_s() + lease_s)

    @property
    def is_in_use(self) -> bool:
        """Whether somebody would miss it."""
        return self.under_way > 0 or self.leased_until_s > _now_s()

    async def tell(self, verb: Verb, request: Request) -> Any:
        """The answer to a declared verb."""
        asked = request.said()
        shards = await self._know_shards()
        if verb.name == "preview_bulk":
            return await self._trial(asked)
        fields = verb.asked.to_frame(asked)
        if shards is not None and verb.over is Over.PAGES:
            return await shards.page(verb, asked, None)
        return await self._call(verb, fields, None)

    async def look(self) -> Any:
        """The status of all shards as one. Raises Unreachable when there is none."""
        shards, verb = await self._know_shards(), VERBS["status"]
        until_s = _now_s() + STATUS_S
        for link in self._links:
            link.ready()
        asking = (link.call(verb, (), until_s) for link in self._links)
        ends: list[Any] = await asyncio.gather(*asking, return_exceptions=True)
        raise_first([end for end in ends if not isinstance(end, AWAY)])
        answers = [end for end in ends if not isinstance(end, BaseException)]
        if not answers or shards is None:
            raise_first(ends)
            return answers[0]
        return status_of(ends, answers[0]["shards"])

    async def _trial(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A dry run of a bulk operation as a whole: its parts are no parts of one list."""
        asked = {name: asked[name] for name in asked if name not in ("after", "until_id")}
        parts = [await link.preview(asked, None) for link in self._links]
        found = reduce(BulkPreview.and_then, parts)
        return {one.name: getattr(found, one.name) for one in found.fields()} | {"next": None}

    async def put(self, tasks: tuple[Any, ...]) -> tuple[Any, ...]:
        """Enqueue tasks; the answer in the form of one with rules, which says all of each."""
        shards, size = await self._know_shards(), self._checked_size(tasks)
        producer = self._producer if shards is None else shards.producer
        if producer.is_full:
            await producer.wait_room()
        is_ruled = any(len(task) == 4 and "if_pending" in task[3] for task in tasks)
        return _stored(await producer.put(list(tasks), len(tasks), size, is_ruled=is_ruled))

    def _checked_size(self, tasks: tuple[Any, ...]) -> int:
        """How many bytes the tasks take in a frame, at most. Raises BadRequest, LimitExceeded."""
        limits, size = self.limits, size_of(tasks)
        if not checks.array(tasks, "tasks", limits.tasks_per_frame_max):
            raise BadRequest("tasks has 0 elements; at least 1 is needed")
        if size + FRAME_BYTES > limits.frame_bytes_max:
            raise LimitExceeded(
                f"the tasks take up to {size} bytes; the limit is {limits.frame_bytes_max}"
                " (frame_bytes_max)"
            )
        return size

    async def put_once(self, key: bytes, fingerprint: int, tasks: Any) -> tuple[Any, ...]:
        """``put`` for an idempotency key. The shard that the key names, its home, is asked first,
        also when it has none of the tasks: what came under the key before counts, wherever its
        tasks went. Each shard remembers its part."""
        shards = await self._know_shards()
        self._checked_size(tasks)
        if shards is not None:
            for task in tasks:
                checked_basis(task[3] if len(task) == 4 else {})
        return _stored(await self._put_once(key, fingerprint, tasks))

    async def _put_once(
        self, key: bytes, fingerprint: int, tasks: Sequence[Any]
    ) -> Sequence[Receipt]:
        links = self._links
        parts, home = once_parts(tasks, key, len(links)), shard_of(key.hex(), len(links))

        async def put(shard: int) -> Sequence[Receipt] | dict[str, Any]:
            some = [tasks[index] for index in parts.get(shard, ())]
            return await self._put_once_at(links[shard], key, fingerprint, some)

        async def ask(shard: int, indexes: Sequence[int]) -> Any:
            return at_home if shard == home else await put(shard)

        at_home = await put(home)
        if not isinstance(at_home, dict):
            return await ask_in_parts(parts, ask)
        # It was taken while there were other shards. What these have not taken comes now, under a
        # key that follows from this one, so that it comes once, too.
        found = self._former_receipts(at_home, key, tasks)
        rest = [index for index in range(len(tasks)) if index not in found]
        if rest:
            some = [tasks[index] for index in rest]
            made = await self._put_once(rest_key(key), fingerprint, some)
            found |= zip(rest, made, strict=True)
        return [found[index] for index in range(len(tasks))]

    def _former_receipts(
        self, before: dict[str, Any], key: bytes, tasks: Sequence[Any]
    ) -> dict[int, Receipt]:
        """What became of the tasks that former shards have taken, by their places."""
        levels_ms, found = self._reconnector.delay_levels_ms, {}
        parts = once_parts(tasks, key, before["shards"])
        for shard, accepted_ms, ids, outcomes in before["parts"]:
            places = parts.get(shard, [])
            plain = receipts([tasks[index] for index in places], ids, accepted_ms, levels_ms)
            for index, receipt, (word, due_ms) in zip(places, plain, outcomes, strict=True):
                due_ms = receipt.due_ms if due_ms is None else due_ms
                found[index] = receipt._replace(due_ms=due_ms, outcome=word)
        return found

    async def _put_once_at(
        self, link: Link, key: bytes, fingerprint: int, tasks: Any
    ) -> list[Receipt] | dict[str, Any]:
        """What became of the tasks for an idempotency key that belong into the link's shard; or
        what former shards have answered to all tasks of the request."""
        accepted_ms, ids, *more = await link.ask(FrameType.ENQUEUE_ONCE, key, fingerprint, tasks)
        said = more[0] if more else {}
        if "before" in said:
            return dict(said["before"])
        if "outcomes" in said:
            return merged_receipts(ids, said["outcomes"])
        levels_ms = self._reconnector.delay_levels_ms
        return receipts(tasks, ids, accepted_ms, levels_ms, said.get("dues_ms", ()))

    async def prepare(self, name: str, group: str, part: int, tasks: Any, options: Any) -> Any:
        """Keep half tasks, in the shard that the name is claimed for."""
        shards = await self._know_shards()
        self._checked_size(tasks)
        home = self._link
        if shards is not None:
            home, claim = await shards.place_of_transaction(None, name, tasks, None)
            options = {**options, "claim": claim} if claim else options
        return await home.ask(FrameType.PREPARE, name, group, part, tasks, options)

    async def take(
        self, topic: str, group: str, count: int, wait_ms: int, options: dict[str, Any],
        told: Callable[[MadeGroup], None],
    ) -> list[Delivery]:  # fmt: skip
        """Up to ``count`` deliveries, as soon as there is one; ``told`` of a group it makes."""
        whole = await self._know_shards() or self._link
        return await whole.pull((topic, group), count, wait_ms, options, None, told)

    async def settle(
        self, verb: Verb, items: Sequence[Any], fields_of: Callable[[list[Any]], tuple[Any, ...]]
    ) -> list[str | None]:
        """A word for each delivery, whose item begins with its id; None: the usual word."""
        frame = verb.frame
        assert frame is not None
        shards, parts = await self._know_shards(), dict[int, list[int]]()
        links = self._links
        for index, item in enumerate(items):
            for shard in (0,) if shards is None else shards.shards_of(item[0]):
                parts.setdefault(shard, []).append(index)

        async def ask(shard: int, indexes: Sequence[int]) -> Sequence[str | None]:
            fields = fields_of([items[index] for index in indexes])
            return await links[shard].ask(frame, *fields) or [None] * len(indexes)

        return await ask_in_parts(parts, ask)

    def wish(self, wish: SubscribeOptions, prefetch: int) -> Any:
        """A subscription that is not started."""
        self._ready()
        subscriptions = self._link.subscriptions
        subscriptions.buffer_bytes_max = STREAM_BYTES_MAX
        return subscriptions.make(wish, prefetch)


# --- what a principal may ask --------------------------------------------------------------------


class OverShards(StandbyOperations):
    """The operations of one principal. They have the form of a daemon's; the answers come later."""

    role = "active"

    def __init__(self, gateway: Gateway, principal: Principal) -> None:
        settings = gateway.settings
        super().__init__(
            settings, settings.limits(), gateway.clock, active=lambda: None, status=dict,
            on_event=gateway.on_event,
        )  # fmt: skip
        self._gateway, self._principal = gateway, principal
        self._tasks: dict[Caller, set[asyncio.Task[None]]] = {}
        self._open: dict[Caller, asyncio.Event] = {}
        """Of a caller that a stream goes to: set while it reads."""
        found = {name: getattr(self, name) for name in VERBS if name in vars(OverShards)}
        for name, verb in VERBS.items():
            if name in _BY_COLUMNS or name in ("nack", "reject", "snooze"):
                found[name] = partial(self._settle, verb)
            elif name not in found and verb.frame is not None and not verb.is_by_hand:
                found[name] = partial(self._tell, verb)
        self.verbs = table(found, self.verbs.plain_tasks, self.verbs.unreadable)

    # --- declared verbs --------------------------------------------------------------------------

    def _tell(self, verb: Verb, ask: Ask[Any]) -> None:
        self._answer(ask, lambda client: client.tell(verb, ask.request))

    def status(self, ask: Ask[Nothing]) -> None:
        """Answer how all shards are; those that are away are said to be."""
        self._answer(ask, Teller.look)

    def report(self, ask: Ask[Any]) -> None:
        """Answer the page of the last report, which is a file of this machine, to whoever may read
        all topics."""
        folder = self.settings.report_dir

        async def read(client: Teller) -> dict[str, bytes]:
            if folder is None:
                raise NotFound("there is no report: the setting report_dir names no folder")
            verb = VERBS["load"]  # it needs the same right
            await client.tell(verb, verb.asked.checked({"steps": 1}, self.limits))
            return {"page": await asyncio.to_thread(report_page, Path(folder) / "report.html")}

        self._answer(ask, read)

    def settle_callback(self, ask: Ask[SettleCallback]) -> None:
        """Pass a callback on to the shard of its task. The token is its proof, so it needs no
        client and no right."""
        said = ask.request.said()
        token = said.pop("token")
        shard = read_token(token)[0].id & ((1 << SHARD_BITS) - 1)

        answer = self._gateway.post(shard, f"/v1/callbacks/{quote(token)}", said)
        self._keep(ask.caller, self._end(ask.caller, ask.number, answer, witness=ask.witness))

    # --- verbs whose frames are written by hand --------------------------------------------------

    def enqueue(
        self, caller: Caller, request: int, floor: object, tasks: tuple[Any, ...], now: Now
    ) -> None:
        """Enqueue tasks, each in its shard; those that may be anywhere go together."""
        self._begin(caller, request, lambda client: client.put(tasks))

    def enqueue_once(
        self, caller: Caller, key: bytes, fingerprint: int, tasks: tuple[Any, ...], now: Now
    ) -> None:
        """``enqueue`` for an idempotency key; the request has the number ``fingerprint``."""
        self._begin(caller, fingerprint, lambda client: client.put_once(key, fingerprint, tasks))

    def prepare(
        self, caller: Caller, request: int, name: str, group: str, part: int, tasks: Any,
        options: dict[str, Any], now: Now,
    ) -> None:  # fmt: skip
        """Keep half tasks of a transaction."""
        self._begin(
            caller, request, lambda client: client.prepare(name, group, part, tasks, options)
        )

    def pull(
        self, caller: Caller, request: int, topic: str, group: str | None, count: int,
        wait_ms: int, options: Mapping[str, Any], sink: DeliverySink, now: Now, tell: Tell,
    ) -> None:  # fmt: skip
        """Answer deliveries of all shards."""
        checks.integer(count, "max", 1, self.limits.pull_max)
        name, of = checks.name(topic, "topic"), checks.name(group or DEFAULT_GROUP, "group")
        said = {key: value for key, value in options.items() if value is not None}
        lease_s = (said.get("lease_ms") or self.settings.lease_default_s * 1000) / 1000

        async def take(client: Teller) -> bytes:
            new: list[MadeGroup] = []
            found = await client.take(name, of, count, wait_ms, said, new.append)
            if found:
                # Leases of an answered pull last as long as the connection that it came by.
                client.keep_for(lease_s)
            views = [
                delivery_view(_told(one), name, of, one.epoch, one.delivered_ms) for one in found
            ]
            made = MadeGroup.joined(new)
            return as_json(answer_view(views, None if made is None else dict(made.raw)))

        self._begin(caller, request, take, is_made=True)

    def _settle(self, verb: Verb, caller: Caller, request: int, *said: Any) -> None:
        topic, group, *rest = said
        if verb.name != "ack":
            rest.pop()  # the time
        if verb.name in _BY_COLUMNS:
            epoch, ids, attempts, *more = rest
            items = list(zip(ids, attempts, strict=True))

            def fields_of(some: list[Any]) -> tuple[Any, ...]:
                return topic, group, epoch, *map(tuple, zip(*some, strict=True)), *more

        else:
            [items] = rest

            def fields_of(some: list[Any]) -> tuple[Any, ...]:
                return topic, group, tuple(some)

        async def settle(client: Teller) -> list[str | None]:
            words = await client.settle(verb, items, fields_of)
            if verb.name == "extend":
                client.keep_for(rest[-1] / 1000)
            return words

        self._begin(caller, request, settle)

    # --- streams ---------------------------------------------------------------------------------

    def subscribe(
        self, caller: Caller, request: int, sub: int, topic: str, group: str | None, credit: int,
        options: Mapping[str, Any], sink: DeliverySink, now: Now,
    ) -> None:  # fmt: skip
        """Send deliveries of all shards to ``sink``, by a client of the stream's own."""
        said = {key: value for key, value in options.items() if value is not None}
        is_broadcast = bool(said.get("broadcast"))
        wish = _Wish(
            checks.name(topic, "topic"),
            "" if is_broadcast else checks.name(group or DEFAULT_GROUP, "group"),
            said.get("lease_ms"), ack=said["ack"], broadcast=is_broadcast, options=said,
        )  # fmt: skip
        client = self._gateway.new_client(self._principal)
        self._keep(caller, self._stream(caller, request, client, wish, credit, sink))

    async def _stream(
        self, caller: Caller, request: int, client: Teller, wish: _Wish, credit: int,
        sink: DeliverySink,
    ) -> None:  # fmt: skip
        reads = self._open[caller] = asyncio.Event()
        reads.set()
        has_begun = False
        try:
            await client.connect()
            subscription = client.wish(wish, credit)
            await subscription.start()
            made = subscription.new_group
            caller.answer(request, {} if made is None else {"new_group": dict(made.raw)})
            has_begun = True
            async for some in subscription.batches():
                for one in some:
                    items = cast("Any", [_told(one)])
                    sink.deliver(one.epoch, one.delivered_ms, items)
                    await reads.wait()
        except TickwheelError as error:
            if has_begun:
                sink.ended(error.code, error.message)
            else:
                _settled(caller, request, error)
        finally:
            del self._open[caller]
            await client.close(0)  # no goodbye: its leases end soon

    def blocked(self, caller: Caller) -> None:
        if caller in self._open:
            self._open[caller].clear()

    def unblocked(self, caller: Caller) -> None:
        if caller in self._open:
            self._open[caller].set()

    # --- the work --------------------------------------------------------------------------------

    def _answer(self, ask: Ask[Any], work: Callable[[Teller], Awaitable[Any]]) -> None:
        """Answer a request with what ``work`` returns, or raises."""
        answer = self._end(ask.caller, ask.number, self._ask(work), witness=ask.witness)
        self._keep(ask.caller, answer)

    def _begin(
        self,
        caller: Caller,
        request: int,
        work: Callable[[Teller], Awaitable[Any]],
        *,
        is_made: bool = False,
    ) -> None:
        """Answer a request with what ``work`` returns, or raises. ``is_made``: that is the answer's
        bytes already."""
        self._keep(caller, self._end(caller, request, self._ask(work), is_made=is_made))

    def _keep(self, caller: Caller, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks = self._tasks.setdefault(caller, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _ask(self, work: Callable[[Teller], Awaitable[Any]]) -> Any:
        async with self._gateway.client_of(self._principal) as client:
            return await work(client)

    async def _end(
        self,
        caller: Caller,
        request: int,
        work: Awaitable[Any],
        *,
        is_made: bool = False,
        witness: ReplySink | None = None,
    ) -> None:
        try:
            answer = await work
        except Exception as error:
            what = f"a request over HTTP from {caller.address}"
            said = error if isinstance(error, TickwheelError) else self.survive(what, error)
            if witness is not None:
                witness.error(request, said.code, said.message)
            _settled(caller, request, said)
        else:
            if witness is not None:
                witness.give(witness.answer_to(request, answer))
            if is_made:
                _settled(caller, request, answer)
            else:
                caller.answer(request, answer)

    def closed(self, caller: Caller, broke: str = "") -> None:
        for task in self._tasks.pop(caller, ()):
            task.cancel()
        super().closed(caller, broke)

    def finished(self, caller: Caller) -> None:
        self.closed(caller)


def _settled(caller: Caller, request: int, value: Any) -> None:
    """Complete an answer, or an error in its place, if somebody waits for it."""
    if isinstance(caller.replies, Exchange):
        caller.replies.settle(request, value)


def _stored(kept: Sequence[Receipt]) -> tuple[Any, ...]:
    """The answer to an enqueue in the form of one with rules, which says all of each task."""
    outcomes = [(one.outcome, one.due_ms) for one in kept]
    return 0, [one.id for one in kept], {"outcomes": outcomes}


def _told(one: Delivery) -> Told:
    task_id, attempt, due_ms, body, *more = one.raw
    return Told(task_id, attempt, due_ms, body, dict(more[0]) if more else {})


def _now_s() -> float:
    return asyncio.get_running_loop().time()


# --- all of them ---------------------------------------------------------------------------------


class _Api(Api):
    """The API, which remembers the token of each principal."""

    def __init__(self, gateway: Gateway, logins: Logins, observed: Observed) -> None:
        super().__init__(gateway.settings, gateway.nobody, logins, observed)
        self._gateway = gateway

    def _principal(
        self, route: Route, headers: dict[bytes, bytes], peer: Any, address: str
    ) -> Principal:
        principal = super()._principal(route, headers, peer, address)
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() == b"bearer" and not token.strip().startswith(LINK_PREFIX.encode()):
            self._gateway.tokens[principal] = token.strip().decode("utf-8", "replace")
        return principal


class Gateway:
    """The ASGI application; ``start`` it, and ``stop`` it at the end."""

    def __init__(
        self,
        settings: Settings,
        daemons: Iterable[Settings],
        http_of: Callable[[int], str],
        logins: Logins,
        clock: Clock,
        observed: Observed,
        on_event: OnEvent,
    ) -> None:
        """``daemons``: the settings of those at whose addresses shards are looked for. ``http_of``:
        where the HTTP of a shard is now; empty: nobody knows."""
        self.settings, self.clock, self.on_event = settings, clock, on_event
        self._logins = logins
        self._url = ",".join(dict.fromkeys(url for one in daemons for url in urls_of(one)))
        self._http_of = http_of
        self._tls: tuple[int, ssl.SSLContext] | None = None
        """When the file of the certificate was written, and a context that trusts it."""
        self.tokens: dict[Principal, str] = {}
        """What was shown by whom, for as long as it is valid."""
        self._clients: dict[Principal, Teller] = {}
        """The client of each token, the one that was asked last at the end."""
        self._closing: set[asyncio.Task[None]] = set()
        self.nobody = StandbyOperations(
            settings, settings.limits(), clock, active=lambda: None, status=dict, on_event=on_event
        )
        self._api = _Api(self, logins, observed)
        self._api.serve_each(lru_cache(maxsize=PRINCIPALS_KEPT_MAX)(self._operations_of))
        self._rest = Starlette(routes=pages(wait_ms_max=self._api.wait_ms_max))
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def stop(self) -> None:
        self._api.stop()
        if self._looking is not None:
            self._looking.cancel()
        clients, self._clients = self._clients, {}
        closing = (*map(Teller.close, clients.values()), *self._closing)
        await asyncio.gather(*closing, return_exceptions=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_api = scope["path"].startswith(API_PREFIX)
        await (self._api if is_api else self._rest)(scope, receive, send)

    # --- principals ------------------------------------------------------------------------------

    def _operations_of(self, principal: Principal) -> tuple[Conversing, Verbs]:
        """The operations of a principal, and its verbs with a line in the log for each one of an
        operator: the shards see the address of this process, and this one that of whoever asks."""
        operations, log = OverShards(self, principal), self._logins.audit
        if log is None:
            return operations, operations.verbs
        audit = AuditStage(log, lambda caller, transaction: False)  # HTTP is asked about none
        return operations, behind(audit.before, operations.verbs, None, audit.unreadable)

    @property
    def present(self) -> Sequence[Principal]:
        """Who has a request under way, or a token or a client here."""
        return (*self._api.principals, *self.tokens, *self._clients)

    def dismiss(self) -> None:
        """End whoever may not stay, and forget what they have shown."""
        self._api.dismiss()
        for principal in {*self.tokens, *self._clients}:
            if not self._logins.is_valid(principal):
                self.tokens.pop(principal, None)
                self._close(principal)

    # --- clients ---------------------------------------------------------------------------------

    def new_client(self, principal: Principal) -> Teller:
        """A client with the token of a principal. Raises Forbidden."""
        token = self.tokens.get(principal)
        if token is None:
            if principal not in (ANONYMOUS, NOBODY):
                raise Forbidden(
                    "a certificate alone cannot be passed on to the shards: show a token, or"
                    f" {ASK_IT}"
                )
            token = ""
        return Teller(self._url, token, self._trust())

    @asynccontextmanager
    async def client_of(self, principal: Principal) -> AsyncIterator[Teller]:
        """The client of a principal, which is kept for the next request. Raises Overloaded."""
        client = self._clients.pop(principal, None)
        if client is None:
            self._make_room()
            client = self.new_client(principal)
        self._clients[principal] = client
        client.under_way += 1
        try:
            yield client
        finally:
            client.under_way -= 1
            client.idle_since_s = _now_s()

    def _make_room(self) -> None:
        """Close the client that was idle longest, if there are too many of them. Raises Overloaded
        where too many are in use: what they have leased would be handed out again."""
        idle = [who for who, client in self._clients.items() if not client.is_in_use]
        in_use = len(self._clients) - len(idle)
        if in_use >= CLIENTS_MAX:
            raise Overloaded(
                f"{in_use} tokens are in use, with requests or pulled tasks; the limit is"
                f" {CLIENTS_MAX} (CLIENTS_MAX)"
            )
        if len(idle) >= IDLE_MAX:
            self._close(min(idle, key=lambda who: self._clients[who].idle_since_s))

    def _close(self, principal: Principal) -> None:
        """Close the client of a principal, if it has one."""
        client = self._clients.pop(principal, None)
        if client is not None:
            closing = asyncio.get_running_loop().create_task(client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _look(self) -> None:
        """Close clients that nobody needs."""
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = _now_s()
            for who, client in list(self._clients.items()):
                if not client.is_in_use and client.idle_since_s + IDLE_S <= now_s:
                    self._close(who)

    def _trust(self) -> ssl.SSLContext | None:
        return self._context() if self.settings.speaks_tls("listen") else None

    def _context(self) -> ssl.SSLContext:
        """Trust whom clients of this machine trust, and the daemons' own certificate, also where
        nobody has signed it."""
        own = self.settings.tls_cert
        written_ns = 0 if own is None else os.stat(own).st_mtime_ns
        if self._tls is None or self._tls[0] != written_ns:
            context = Trust().context()
            if own is not None:
                context.load_verify_locations(own)
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            self._tls = written_ns, context
        return self._tls[1]

    async def post(self, shard: int, path: str, said: Mapping[str, Any]) -> Any:
        """What the HTTP of a shard answers to a POST. Raises Unreachable, and what it refuses."""
        url = urlsplit(self._http_of(shard))
        if url.hostname is None or url.port is None:
            raise Unreachable(f"nobody is known to serve shard {shard} now")
        tls = self._context() if url.scheme == "https" else None
        asked = url.hostname, url.port, path, "application/json", ANSWER_BYTES_MAX, tls
        try:
            async with asyncio.timeout(ANSWER_S):
                status, body = await fetch(*asked, sent=as_json(said))
            found = json.loads(body)
            if status == HTTPStatus.OK:
                return found
            error = from_wire(found["code"], found["detail"])
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            Silent,
            RemoteProtocolError,
        ) as problem:
            what = type(problem).__name__
            raise Unreachable(
                f"shard {shard} at {url.netloc} gives no answer: {str(problem) or what}"
            ) from None
        raise error


def urls_of(daemon: Settings) -> Sequence[str]:
    """Where a daemon of this machine is found: as others find it, and without TLS, whose
    certificate is made out to that name, also where it listens."""
    found = [daemon.advertise or daemon.listen]
    if not daemon.speaks_tls("listen"):
        host, port = split_address(daemon.listen, "listen")
        host = found_here(host)
        found.insert(0, f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
    return found
