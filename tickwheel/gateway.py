"""The HTTP API of all shards together, in the process that answers HTTP for them
(``server/http/whole.py``).

``Gateway`` is an ASGI application: the API of a daemon, with the document and the console, whose
handlers ask by ``OfAll`` in place of the exchange with one shard. It does nothing itself, but asks
the shards as an ordinary client does, a ``Teller``, and the client knows which shards are asked and
how their answers become one. Invariants:

* This process has no rights of its own. It asks with the token of whoever asks it, and the daemons
  decide. Tokens are in its memory only, and go with it.
* A stream has a client of its own, whose connections end with it: the daemons see its consumer go.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
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
from tickwheel.client.producer import Partly
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
from tickwheel.model.values import INTEGER_MAX, SHARD_BITS, shard_of
from tickwheel.server import checks
from tickwheel.server.http.api import Api
from tickwheel.server.http.app import API_PREFIX
from tickwheel.server.http.call import as_json
from tickwheel.server.http.deliveries import Told
from tickwheel.server.http.exchange import Exchange, settled_fields
from tickwheel.server.http.pages import pages
from tickwheel.server.http.whole import Silent, fetch
from tickwheel.server.logins import LINK_PREFIX
from tickwheel.server.settings import found_here, split_address
from tickwheel.server.shard.callers import ANONYMOUS, NOBODY, Caller, Nobody
from tickwheel.server.shard.guard import AuditStage
from tickwheel.server.shard.operations import StandbyOperations
from tickwheel.server.shard.overview import report_page
from tickwheel.webhooks import read_token

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tickwheel.api.shapes import Request
    from tickwheel.api.verb import Verb
    from tickwheel.client.delivery import Delivery
    from tickwheel.client.link import Link
    from tickwheel.client.tasks import Receipt as TaskReceipt
    from tickwheel.clock import Clock
    from tickwheel.engine.topics import DeliverySink
    from tickwheel.server.http.call import Route
    from tickwheel.server.http.exchange import Answer, Pulled, Receipt, Render, Wish
    from tickwheel.server.http.types import Once
    from tickwheel.server.logins import Logins
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.callers import OnEvent, Principal

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


# --- a client of all shards ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _StreamOptions(SubscribeOptions):
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

    async def put_each(self, tasks: tuple[Any, ...]) -> tuple[Any, ...] | list[Any]:
        """``put`` for tasks of which each is taken or refused for itself: where some are refused,
        the list of the answer or the error of each."""
        try:
            return await self.put(tasks)
        except TickwheelError as error:
            if len(tasks) == 1 or (error.retryable and not isinstance(error, Partly)):
                raise
            ends: list[Any] = error.receipts if isinstance(error, Partly) else [error] * len(tasks)
        ends = [end if isinstance(end, TickwheelError) else _stored([end]) for end in ends]
        # The daemon refuses a frame for one of its tasks: the others are asked for again.
        again = [
            index
            for index, end in enumerate(ends)
            if isinstance(end, TickwheelError) and not end.retryable
        ]
        answers = (self.put((tasks[index],)) for index in again)
        for index, answer in zip(
            again, await asyncio.gather(*answers, return_exceptions=True), strict=True
        ):
            ends[index] = answer
        return ends

    def _checked_size(self, tasks: tuple[Any, ...]) -> int:
        """How many bytes the tasks take in a frame, at most. Raises BadRequest, DueTooFar,
        LimitExceeded."""
        limits, size = self.limits, size_of(tasks)
        for index, task in enumerate(tasks):
            if type(task[2]) is int and task[2] > INTEGER_MAX:  # a frame could not hold it
                checks.due(task[2], None, f"tasks[{index}]", 0, limits)
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
    ) -> Sequence[TaskReceipt]:
        links = self._links
        parts, home = once_parts(tasks, key, len(links)), shard_of(key.hex(), len(links))

        async def put(shard: int) -> Sequence[TaskReceipt] | dict[str, Any]:
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
    ) -> dict[int, TaskReceipt]:
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
    ) -> list[TaskReceipt] | dict[str, Any]:
        """What became of the tasks for an idempotency key that belong into the link's shard; or
        what former shards have answered to all tasks of the request."""
        accepted_ms, ids, *more = await link.ask(FrameType.ENQUEUE_ONCE, key, fingerprint, tasks)
        said = more[0] if more else {}
        if "before" in said:
            return dict(said["before"])
        if "outcomes" in said:
            return merged_receipts(ids, said["outcomes"])
        made = receipts(tasks, ids, accepted_ms, self._reconnector.delay_levels_ms)
        if "dues_ms" in said:  # None: the task has gone since
            return [
                one._replace(due_ms=due_ms)
                for one, due_ms in zip(made, said["dues_ms"], strict=True)
            ]
        return made

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
        self, verb: str, receipts: Sequence[Receipt], more: tuple[Any, ...]
    ) -> list[str | None]:
        """A word for each delivery; None: the usual word."""
        frame = VERBS[verb].frame
        assert frame is not None
        shards, parts = await self._know_shards(), dict[int, list[int]]()
        links = self._links
        for index, receipt in enumerate(receipts):
            for shard in (0,) if shards is None else shards.shards_of(receipt.id):
                parts.setdefault(shard, []).append(index)

        async def ask(shard: int, indexes: Sequence[int]) -> Sequence[str | None]:
            fields = settled_fields(verb, [receipts[index] for index in indexes], more)
            return await links[shard].ask(frame, *fields) or [None] * len(indexes)

        return await ask_in_parts(parts, ask)

    def wish(self, wish: SubscribeOptions, prefetch: int) -> Any:
        """A subscription that is not started."""
        self._ready()
        subscriptions = self._link.subscriptions
        subscriptions.buffer_bytes_max = STREAM_BYTES_MAX
        return subscriptions.make(wish, prefetch)


# --- a request -----------------------------------------------------------------------------------


class OfAll(Exchange):
    """An exchange with all shards: each question is asked by the client of its principal."""

    def __init__(self, gateway: Gateway, principal: Principal, address: str) -> None:
        super().__init__(Caller(Nobody(), principal=principal, address=address))
        self._gateway = gateway
        self.settings, self.limits = gateway.settings, gateway.limits
        self.clock = gateway.clock
        self._under_way: dict[Answer, asyncio.Task[None]] = {}
        self._pulls = 0
        """Pulls that wait for a delivery."""
        self._reads = asyncio.Event()
        """Set while somebody reads the stream."""
        self._reads.set()

    def _unanswered(self) -> Sequence[Answer]:
        return list(self._under_way)

    # --- what handlers ask -----------------------------------------------------------------------

    def ask(self, verb: str, request: Request, render: Render | None = None) -> Answer:
        def work() -> Awaitable[Any]:
            answer, audit = self._answer_of(verb, request), self._gateway.audit
            return answer if audit is None else audit.awaited(self.caller, verb, request, answer)

        return self._begin(work, render)

    async def _answer_of(self, verb: str, request: Request) -> Any:
        if verb == "settle_callback":
            return await self._settle_callback(request)
        async with self._gateway.client_of(self.caller.principal) as client:
            if verb == "status":
                return await client.look()  # says which shards are away
            if verb == "report":
                return await self._report(client)
            return await client.tell(VERBS[verb], request)

    async def _report(self, client: Teller) -> dict[str, bytes]:
        """Return the page of the last report, which is a file of this machine, to whoever may read
        all topics."""
        folder = self.settings.report_dir
        if folder is None:
            raise NotFound("there is no report: the setting report_dir names no folder")
        verb = VERBS["load"]  # it needs the same right
        await client.tell(verb, verb.asked.checked({"steps": 1}, self.limits))
        return {"page": await asyncio.to_thread(report_page, Path(folder) / "report.html")}

    async def _settle_callback(self, request: Request) -> Any:
        """Pass a callback on to the shard of its task. The token is its proof, so it needs no
        client and no right."""
        said = request.said()
        token = said.pop("token")
        shard = read_token(token)[0].id & ((1 << SHARD_BITS) - 1)
        return await self._gateway.post(shard, f"/v1/callbacks/{quote(token)}", said)

    def enqueue(self, tasks: tuple[Any, ...]) -> Answer:
        return self._ask(lambda client: client.put(tasks))

    def enqueue_each(self, tasks: tuple[Any, ...]) -> Answer:
        return self._ask(lambda client: client.put_each(tasks))

    def enqueue_once(self, once: Once, tasks: tuple[Any, ...]) -> Answer:
        return self._ask(lambda client: client.put_once(*once, tasks))

    def prepare(
        self, name: str, group: str, part: int, tasks: tuple[Any, ...], options: dict[str, Any]
    ) -> Answer:
        return self._ask(lambda client: client.prepare(name, group, part, tasks, options))

    def pull(self, wish: Wish, wait_ms: int, render: Pulled) -> Answer:
        checks.integer(wish.most, "max", 1, self.limits.pull_max)
        topic = checks.name(wish.topic, "topic")
        group = checks.name(wish.group or DEFAULT_GROUP, "group")
        options = {key: value for key, value in wish.options.items() if value is not None}
        lease_s = (options.get("lease_ms") or self.settings.lease_default_s * 1000) / 1000

        async def take(client: Teller) -> bytes:
            new: list[MadeGroup] = []
            self._pulls += 1
            try:
                found = await client.take(topic, group, wish.most, wait_ms, options, new.append)
            finally:
                self._pulls -= 1
            if found:
                # Leases of an answered pull last as long as the connection that it came by.
                client.keep_for(lease_s)
            made = MadeGroup.joined(new)
            return render(
                [(_told(one), topic, group, one.epoch, one.delivered_ms) for one in found],
                None if made is None else dict(made.raw),
            )

        return self._ask(take)

    def settle(self, verb: str, receipts: Sequence[Receipt], more: tuple[Any, ...]) -> Answer:
        async def settle(client: Teller) -> list[str | None]:
            words = await client.settle(verb, receipts, more)
            if verb == "extend":
                client.keep_for(more[-1] / 1000)
            return words

        return self._ask(settle)

    # --- streams ---------------------------------------------------------------------------------

    def subscribe(self, wish: Wish, sink: DeliverySink) -> Answer:
        options = {key: value for key, value in wish.options.items() if value is not None}
        is_broadcast = bool(options.get("broadcast"))
        asked = _StreamOptions(
            checks.name(wish.topic, "topic"),
            "" if is_broadcast else checks.name(wish.group or DEFAULT_GROUP, "group"),
            options.get("lease_ms"), ack=options["ack"], broadcast=is_broadcast, options=options,
        )  # fmt: skip
        opened = self._new_answer()
        client = self._gateway.new_client(self.caller.principal)
        return self._keep(opened, self._stream(opened, client, asked, wish.most, sink))

    async def _stream(
        self, opened: Answer, client: Teller, wish: _StreamOptions, credit: int, sink: DeliverySink
    ) -> None:
        """Send deliveries of all shards to ``sink``, by a client of the stream's own."""
        try:
            await client.connect()
            subscription = client.wish(wish, credit)
            await subscription.start()
            made = subscription.new_group
            _settle(opened, {} if made is None else {"new_group": dict(made.raw)})
            async for some in subscription.batches():
                for one in some:
                    items = cast("Any", [_told(one)])
                    sink.deliver(one.epoch, one.delivered_ms, items)
                    await self._reads.wait()
        except TickwheelError as error:
            if opened.done():
                sink.ended(error.code, error.message)
            else:
                opened.set_exception(error)
        finally:
            await client.close(0)  # no goodbye: its leases end soon

    def blocked(self) -> None:
        self._reads.clear()

    def unblocked(self) -> None:
        self._reads.set()

    # --- the work --------------------------------------------------------------------------------

    def _ask(self, work: Callable[[Teller], Awaitable[Any]]) -> Answer:
        """Return a future of what ``work`` returns with the principal's client, or raises."""

        async def ask() -> Any:
            async with self._gateway.client_of(self.caller.principal) as client:
                return await work(client)

        return self._begin(ask)

    def _begin(self, work: Callable[[], Awaitable[Any]], render: Render | None = None) -> Answer:
        """Return a future of what ``work`` returns, as ``render`` makes it, or raises."""
        answer = self._new_answer()

        async def end() -> None:
            try:
                found = await work()
                value = found if render is None else render(found)
            except TickwheelError as error:
                value = error
            except Exception as error:
                value = self.survive(f"a request over HTTP from {self.caller.address}", error)
            _settle(answer, value)

        return self._keep(answer, end())

    def _new_answer(self) -> Answer:
        """Return the future of a new answer. Raises the reason when the exchange is ended."""
        if self.ended is not None:
            raise self.ended
        return asyncio.get_running_loop().create_future()

    def _keep(self, answer: Answer, work: Coroutine[Any, Any, None]) -> Answer:
        """Do the work until the exchange is closed."""
        self._under_way[answer] = task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda _: self._under_way.pop(answer, None))
        return answer

    # --- its life --------------------------------------------------------------------------------

    @property
    def only_waits(self) -> bool:
        return self._pulls > 0 or super().only_waits

    def heard(self) -> None:
        """Do nothing: the shards hear what is settled."""

    def unreadable(self, verb: str, error: TickwheelError) -> None:
        if self._gateway.audit is not None:
            self._gateway.audit.unreadable(self.caller, verb, error)

    def survive(self, what: str, error: Exception) -> TickwheelError:
        return self._gateway.nobody.survive(what, error)

    def finished(self) -> None:
        self.closed()

    def closed(self, broke: str = "") -> None:
        under_way, self._under_way = self._under_way, {}
        for task in under_way.values():
            task.cancel()
        self.caller.close()


def _settle(answer: Answer, value: Any) -> None:
    """Complete an answer, or an error in its place, if somebody waits for it."""
    if answer.done():
        return
    if isinstance(value, TickwheelError):
        answer.set_exception(value)
    else:
        answer.set_result(value)


def _stored(kept: Sequence[TaskReceipt]) -> tuple[Any, ...]:
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
        self.settings, self.limits, self.clock = settings, settings.limits(), clock
        self._logins = logins
        self.audit = None if logins.audit is None else AuditStage(logins.audit)
        """Logs who asked: the shards see the address of this process only."""
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
            settings, self.limits, clock, active=lambda: None, status=dict, on_event=on_event
        )
        self._api = _Api(self, logins, observed)
        self._api.serve_with(partial(OfAll, self))
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
