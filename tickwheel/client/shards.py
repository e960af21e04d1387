"""A client over several shards: where requests and tasks go.

``Shards`` has a link to each shard; the first link exists already when the client learns that there
are several shards. It routes verbs by their ``Verb.routing``, and gives each task to the producer
of its shard. ``merging.py`` has the rules that merge answers. A client imports both modules only
when it has learnt of several shards. Invariants:

* A task with a basis (its ``shard_by``, order key or key) goes to shard crc32(basis) mod the number
  of shards, and nowhere else, even when that shard is unreachable. A task without a basis goes to
  any shard, and is sent again only to the same one.
* An id contains the shard of its task, unless the number of shards has changed since (``moved_id``
  of HELLO): then any shard may have the task, and all are asked.
* An answer is merged from all shards concerned, or is an error.
* The number of shards does not change while the client is open; their addresses can.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from tickwheel.api.groups import KEYS_MAX, KeysPage
from tickwheel.api.schedules import NewSchedule
from tickwheel.api.tasks import basis_of
from tickwheel.api.verb import Routing
from tickwheel.api.verbs import VERBS
from tickwheel.client.connection import LOGGER, fail, is_secure
from tickwheel.client.link import BULK_STARTS, Link, close_all, with_bulk_id
from tickwheel.client.merging import (
    BY_SHARD,
    MERGED,
    Raw,
    ask_in_parts,
    bulks_of,
    explanation_of,
    in_order,
    limit_of,
    numbered,
    once,
    page_of,
)
from tickwheel.client.producer import Batch, ColumnBatch, Producer, failure, outcomes_of
from tickwheel.client.requests import own_number, raise_first, read
from tickwheel.client.search import ShardAddresses
from tickwheel.client.subscription import JOIN_S, SpreadSubscription
from tickwheel.client.tasks import FRAME_BYTES, size_of
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    Conflict,
    ConnectionLost,
    Draining,
    Forbidden,
    NotActive,
    NotFound,
    OutcomeUnknown,
    ProtocolError,
    SendTimeout,
    TickwheelError,
    Unreachable,
)
from tickwheel.model.values import SHARD_BITS, shard_of

if TYPE_CHECKING:
    from tickwheel.api.groups import MadeGroup
    from tickwheel.api.times import Duration
    from tickwheel.api.verb import Verb
    from tickwheel.client.delivery import Delivery
    from tickwheel.client.subscription import Subscription, Subscriptions
    from tickwheel.client.tasks import Columns, Receipt, Receipts, WireTask

CLAIM_TRIES = 3
"""Attempts to claim a name after ending an earlier claim that was not used."""
WAIT_MS = 1_000
"""Milliseconds that a pull waits at all shards at once; it releases deliveries after the first."""

TOGETHER = 512
"""Consecutive tasks without a basis that go to one shard before the next shard is chosen."""

AWAY = (Unreachable, SendTimeout, ConnectionLost, OutcomeUnknown, NotActive, Draining)
"""Errors of a shard that is unreachable or stops."""
ANSWERS_S = 3.0
"""Seconds after which a shard that has not explained a task is taken to be away."""
UNSURE = (SendTimeout, ConnectionLost, OutcomeUnknown)
"""Errors in ``AWAY`` after which the shard may have processed the request."""


def checked_basis(options: Mapping[str, Any]) -> str | None:
    """Return the basis of a task with these options; None: it can be in any shard. Raise
    BadRequest for a rule for pending keys if tasks with the same key may be in different shards."""
    shard_by, key = options.get("shard_by"), options.get("key")
    basis = basis_of(shard_by, options.get("order_key"), key)
    if "if_pending" in options and basis != key:
        name = "order_key" if shard_by is None else "shard_by"
        raise BadRequest(
            f"if_pending compares tasks with the same key, but {name} decides the shard of a task:"
            f" with if_pending, {name} must equal key"
        )
    return basis


class Shards:
    """All shards of one client."""

    def __init__(self, own: Link, urls: Sequence[str], shard_and_count: tuple[int, int]) -> None:
        """``own``: the first link; ``urls``: of all shards, "" for a shard without a daemon;
        ``shard_and_count``: the shard of ``own``, and the number of shards. Raise ConnectionLost if
        some shards use TLS and others do not."""
        options, (own_shard, count) = own.options, shard_and_count
        for shard, url in enumerate(urls):
            if url and shard != own_shard and is_secure(url) != (options.tls is not None):
                raise ConnectionLost(
                    f"shard {shard} is at {url:.200}: either all shards or none must use TLS"
                )
        addresses = ShardAddresses(count, options.addresses, secure=options.tls is not None)
        addresses.learn(own.reconnector.info)
        own.shard_and_count, own.shard_addresses = shard_and_count, addresses
        own.reconnector.follow(addresses, own_shard)
        self.links: Sequence[Link] = [
            own
            if shard == own_shard
            else Link(options, shard_and_count=(shard, count), shard_addresses=addresses)
            for shard in range(count)
        ]
        self.own = own
        self._others = [link for link in self.links if link is not own]
        self._reconnector = own.reconnector
        self._is_closed = False
        self._next = own_shard
        """The shard that got the last task without a basis."""
        self._filling: Producer | None = None
        """The producer of tasks without a basis."""
        self._left = 0
        """Further tasks without a basis that can go to ``_filling``."""

    # --- routing --------------------------------------------------------------------------------

    def of_basis(self, basis: str) -> Link:
        """Return the link to the shard that has the tasks with this basis, or the settings of the
        topic with this name. Raise BadRequest."""
        try:
            shard = shard_of(basis, len(self.links))
        except UnicodeEncodeError as error:
            raise BadRequest(f"a name must be valid UTF-8: {error}") from None
        return self.opened(self.links[shard])

    def any(self) -> Link:
        """Return the link to the shard with the fewest unanswered tasks among the connected shards
        with room; the next in turn among equals."""
        links, count = self.links, len(self.links)
        best, least = (self._next + 1) % count, (2, 0)
        for step in range(1, count + 1):
            index = (self._next + step) % count
            link = self.opened(links[index])
            if link.connected:
                producer = link.producer
                waiting = int(producer.is_full), producer.tasks
                if waiting < least:
                    best, least = index, waiting
        self._next = best
        return links[best]

    async def link_of_transaction(
        self,
        last: tuple[Link, int] | None,
        name: str,
        wires: Sequence[WireTask],
        until_s: float | None,
    ) -> tuple[Link, int]:
        """Return the link to the shard that gets a transaction's half tasks ``wires``, and the
        number of the claim of its name; 0: no claim is needed. ``last``: the result for its earlier
        half tasks. Raise BadRequest if the tasks belong to several shards, Conflict if another
        client uses the name in another shard."""
        home = None if last is None else last[0]
        bases = {checked_basis(wire[3]) for wire in wires if len(wire) == 4} - {None}
        homes = {shard_of(basis, len(self.links)) for basis in bases if basis is not None}
        current = next((n for n, link in enumerate(self.links) if link is home), None)
        if len(homes | ({current} - {None})) > 1:
            raise BadRequest(
                f"transaction {name} must have its tasks in one shard, but these keys are in"
                f" several: {', '.join(sorted(map(str, bases)))}; give all of them the same"
                " shard_by. The first tasks choose the shard, and tasks without a key follow"
            )
        if last is not None:
            return last
        wanted, topic = homes.pop() if homes else None, wires[0][0]
        shard, number = await self._claim("transaction", name, topic, wanted, until_s)
        return self.opened(self.links[shard]), number

    async def _claim(
        self, kind: str, name: str, topic: Any, wanted: int | None, until_s: float | None
    ) -> tuple[int, int]:
        """Return the shard of the schedule or transaction with this name, which exists or is about
        to be created, and the number of the claim. ``wanted``: the only possible shard; None: any,
        by default the name's home. Raise Conflict if the name is used in another shard."""
        home, verb = shard_of(name, len(self.links)), VERBS[f"claim_{kind}"]

        async def ask(at: int, shard: int, number: int, *, is_over: bool) -> tuple[int, int]:
            options = {"topic": topic, "shard": shard, "number": number, "over": is_over}
            fields = verb.request_type.to_frame({"name": name, **options})
            answer = await self._ask(self.links[at], verb, fields, until_s)
            return read(lambda raw: (int(raw["shard"]), int(raw["number"])), answer)

        requested = home if wanted is None else wanted
        for _ in range(CLAIM_TRIES):
            shard, number = await ask(home, requested, 0, is_over=False)
            if wanted is None or shard == wanted:
                return shard, number
            # Another client has claimed the name for ``shard`` and may never use the claim. End it
            # there (an answer other than 0: the claim was used), then at the home, and try again.
            if not number or (await ask(shard, shard, number, is_over=True))[1]:
                break
            await ask(home, shard, number, is_over=True)
        way_out = "delete it first" if kind == "schedule" else "choose another name"
        raise Conflict(
            f"{kind} {name} is in shard {shard}, but the keys of its tasks belong to shard"
            f" {requested}: use the key or shard_by of the existing tasks, or {way_out}"
        )

    def connect_for_checks(self) -> None:
        """Connect to all shards if the client answers checks of transactions."""
        if self.own.options.checks.handlers:
            for link in self._others:
                self.opened(link)

    def opened(self, link: Link) -> Link:
        """Return the link, and start to connect it if necessary. Raise ClientClosed."""
        if self._is_closed:
            raise ClientClosed("the client is closed; create a new one")
        link.ready()
        return link

    async def close(self) -> None:
        """Close the other links: ``own`` could not connect, and may find other shards next time."""
        self._is_closed = True
        self.own.shard_and_count = self.own.shard_addresses = None
        await close_all(self._others, 0.0)

    # --- enqueues -------------------------------------------------------------------------------

    def home(self, wire: WireTask) -> Producer:
        """Return the producer of a task; a fast path for most tasks. Raise BadRequest."""
        if len(wire) == 4:
            basis = checked_basis(wire[3])
            if basis is not None:
                return self.of_basis(basis).producer
        producer = self._filling
        if (
            self._left
            and producer is not None
            and producer.has_open
            and producer.reconnector.connection is not None
        ):
            self._left -= 1
            return producer
        self._left = TOGETHER - 1
        self._filling = producer = self.any().producer
        return producer

    @property
    def is_full(self) -> bool:
        """Whether all connected shards are full."""
        producers = [link.producer for link in self.links if link.connected]
        return bool(producers) and all(producer.is_full for producer in producers)

    async def wait_room(self, time_s: float | None = None) -> None:
        await self.any().producer.wait_room(time_s)

    def put(
        self,
        tasks: list[WireTask],
        count: int,
        size: int,
        time_s: float | None = None,
        *,
        is_ruled: bool = False,
    ) -> asyncio.Future[Any]:
        """``Producer.put``, in a frame for each shard."""

        def send(to: Producer, part: list[WireTask]) -> asyncio.Future[Any]:
            return to.put(part, count and len(part), size_of(part), time_s, is_ruled=is_ruled)

        return self._divide(tasks, count, send)

    def add_columns(
        self, columns: Columns, time_s: float | None = None
    ) -> asyncio.Future[Receipts]:
        return self.any().producer.add_columns(columns, time_s)

    def take_over(self, batches: Iterable[Batch]) -> None:
        """Send tasks that were enqueued before the client knew of several shards."""
        for batch in batches:
            [future] = batch.futures
            if isinstance(batch, ColumnBatch):
                self.any().producer.adopt(batch)
                continue
            try:
                self._divide(batch.tasks, batch.counts[0], partial(_adopted, batch), future)
            except TickwheelError as error:
                fail(future, error)

    def _divide(
        self,
        tasks: list[WireTask],
        count: int,
        send: Callable[[Producer, list[WireTask]], asyncio.Future[Any]],
        future: asyncio.Future[Any] | None = None,
    ) -> asyncio.Future[Any]:
        """Send the tasks of one frame to their shards, in a frame each. Return the caller's future
        (``future``, if it exists already)."""
        parts: dict[Producer, list[int]] = {}
        free: Producer | None = None
        for index, wire in enumerate(tasks):
            basis = checked_basis(wire[3]) if len(wire) == 4 else None
            if basis is not None:
                home = self.of_basis(basis).producer
            else:
                home = free = free or self.home(wire)
            parts.setdefault(home, []).append(index)
        if len(parts) == 1 and future is None:
            [home] = parts
            return send(home, tasks)
        sent: list[tuple[list[int], asyncio.Future[Any]]] = []
        joined = self._reconnector.loop.create_future() if future is None else future
        for home, indexes in parts.items():
            try:
                part = send(home, [tasks[index] for index in indexes])
            except TickwheelError as error:
                part = home.create_future()
                fail(part, error)
            sent.append((indexes, part))
        ended = asyncio.gather(*(part for _, part in sent), return_exceptions=True)
        ended.add_done_callback(partial(_join, sent, count, joined))
        return joined

    # --- verbs ----------------------------------------------------------------------------------

    async def call(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """Return the answer to a verb, in wire form."""
        asks: Mapping[Routing | None, Callable[..., Any]] = {
            Routing.ONE: self._ask_own, Routing.IDS: self._ask_ids, Routing.NAME: self._ask_name,
            Routing.ALL: self._ask_all, Routing.TURN: self._ask_in_turn,
            Routing.BASIS: self._put_schedule, Routing.TOGETHER: self._ask_together,
            Routing.HOME: self._ask_home_first, Routing.HOME_LAST: self._ask_home_last,
            Routing.TASK: self._ask_task,
        }  # fmt: skip
        return await asks[verb.routing](verb, fields, until_s)

    async def _ask(
        self, link: Link, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        return await self.opened(link).call(verb, fields, until_s)

    async def _ask_own(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        if verb.name == "resend":
            *names, number = fields
            count = len(self.links)
            number, shard = divmod(number, count)
            sent = await self._ask(self.links[shard], verb, (*names, number), until_s)
            return {**sent, "number": sent["number"] * count + shard}
        return await self._ask(self.own, verb, fields, until_s)

    async def _ask_ids(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        names = [field.name for field in verb.request_type.places()]
        position = names.index("pairs" if "pairs" in names else "ids")
        if fields[position] is None:
            return await self._ask_all(verb, fields, until_s)
        groups: dict[int, list[int]] = {}
        for index, item in enumerate(fields[position]):
            for shard in self.shards_of(item if isinstance(item, int) else item[0]):
                groups.setdefault(shard, []).append(index)

        async def ask(shard: int, indexes: Sequence[int]) -> Sequence[Any]:
            part = [fields[position][index] for index in indexes]
            shard_fields = (*fields[:position], part, *fields[position + 1 :])
            answer = await self._ask(self.links[shard], verb, shard_fields, until_s)
            if not isinstance(answer, tuple) or len(answer) != len(part):
                raise ProtocolError(f"the daemon's answer does not have {len(part)} elements")
            return answer

        return tuple(await ask_in_parts(groups, ask))

    async def _ask_task(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """Return the explanation of a task, which names unreachable shards that may have it."""
        task_id = fields[0]
        shards = range(len(self.links)) if task_id is None else self.shards_of(task_id)
        soon_s = asyncio.get_running_loop().time() + ANSWERS_S
        until_s = soon_s if until_s is None else min(until_s, soon_s)
        calls = [self._ask(self.links[shard], verb, fields, until_s) for shard in shards]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        raise_first([end for end in ends if not isinstance(end, AWAY)])
        return explanation_of(task_id, dict(zip(shards, ends, strict=True)))

    def shards_of(self, task_id: int) -> Iterable[int]:
        """Return the shards that may have the task."""
        count, shard = len(self.links), task_id & ((1 << SHARD_BITS) - 1)
        if task_id <= self._reconnector.info.get("moved_id", 0):
            return range(count)
        return (shard if shard < count else 0,)

    async def _ask_name(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """Return the answer of the shard that has the named object; the others may be away."""
        calls = [
            asyncio.ensure_future(self._ask(link, verb, fields, until_s)) for link in self.links
        ]
        errors: list[BaseException] = []
        try:
            for end in asyncio.as_completed(calls):
                try:
                    return await end
                except TickwheelError as error:
                    errors.append(error)
        finally:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        raise next((error for error in errors if not isinstance(error, NotFound)), errors[0])

    async def _ask_all(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        links, first, shard_fields = self.links, [], fields
        if verb.name == "load":
            # The first shard's answer sets the beginning of the spans.
            first = [await self._ask(links[0], verb, fields, until_s)]
            shard_fields = ({**fields[0], "from_ms": first[0]["from_ms"]},)
            links = links[1:]
        if verb.request is KeysPage:
            # The first keys of all shards need not be among the first of each.
            shard_fields = (*fields[:-1], {**fields[-1], "limit": KEYS_MAX})
        calls = (self._ask(link, verb, shard_fields, until_s) for link in links)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        return self._merged(verb, [*first, *ends], fields)

    async def _ask_in_turn(
        self, verb: Verb, fields: tuple[Any, ...], until_s: float | None,
        links: Sequence[Link] | None = None,
    ) -> Any:  # fmt: skip
        """Ask all shards in turn, in the order of ``links``. The first error ends it, and the
        caller can repeat the call. A shard that has no such object is skipped."""
        ends: list[Any] = []
        for shard, link in enumerate(links or self.links):
            shard_fields = (_file_of(fields[0], shard),) if verb.name == "backup" else fields
            try:
                ends.append(await self._ask(link, verb, shard_fields, until_s))
            except NotFound as error:
                ends.append(error)
        return self._merged(verb, ends, fields)

    async def _ask_together(
        self, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        """Start a restore in all shards under one id, or in none: each restores its own backup into
        its own file. A restore of single tasks starts in the shards that may have them. Shards that
        may be away are asked first, so that no other starts in vain."""
        if verb.name in BULK_STARTS:
            return await self._start_bulk(verb, fields, until_s)
        into, options = fields
        options = {"id": own_number(), **options}
        parts = self._restored_ids(options)
        answers: list[Raw | None] = [None] * len(self.links)
        for shard in sorted(parts, key=lambda n: (self.opened(self.links[n]).connected, n)):
            shard_options = {**options, "of_shards": len(parts), **parts[shard]}
            if options.get("backup") is not None:
                shard_options["backup"] = _file_of(options["backup"], shard)
            try:
                answers[shard] = await self._ask(
                    self.links[shard], verb, (_file_of(into, shard), shard_options), until_s
                )
            except TickwheelError as error:
                started = [n for n, answer in enumerate(answers) if answer is not None]
                cancel, name = VERBS["cancel_restore"], options["id"]
                raise await self._cancel_started(error, shard, started, cancel, name) from error
        return MERGED["show_restore"](answers, options)

    async def _start_bulk(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """Start a bulk operation in all shards under one id, which the first shard grants. If a
        shard does not start it, cancel it in the others, unless the caller has chosen the id and
        can complete it by repeating the call."""
        is_chosen, fields = fields[-1].get("id") is not None, with_bulk_id(verb, fields)
        name = fields[-1]["id"]
        await self._look_for_topic(fields[0], until_s)
        ends: list[Any] = []
        for shard, link in enumerate(self.links):
            try:
                ends.append(await self._ask(link, verb, fields, until_s))
            except NotFound as error:
                ends.append(error)
            except TickwheelError as error:
                started = [n for n, end in enumerate(ends) if not isinstance(end, NotFound)]
                if not started:
                    raise
                if is_chosen and error.retryable:
                    raise OutcomeUnknown(
                        f"shard {shard}: {error.message}; bulk operation {name} has started in"
                        f" shards {', '.join(map(str, started))}: repeat the call with this id to"
                        " start it in the others"
                    ) from error
                cancel = VERBS["cancel_bulk"]
                raise await self._cancel_started(error, shard, started, cancel, name) from error
        return self._merged(verb, ends, fields)

    async def _look_for_topic(self, topic: Any, until_s: float | None) -> None:
        """Raise NotFound if no shard has the topic, or the error of a shard that does not answer.
        Shards that let the caller only operate on the topic do not say whether they have it."""
        show = VERBS["show_topic"]
        calls = (self._ask(link, show, (topic,), until_s) for link in self.links)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        raise_first([end for end in ends if not isinstance(end, (NotFound, Forbidden))])
        if all(isinstance(end, NotFound) for end in ends):
            raise_first(ends)

    def _restored_ids(self, options: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
        """Return the shards that restore tasks, and the ids that each one is asked for."""
        ids = options.get("ids")
        if not ids:
            return {shard: {} for shard in range(len(self.links))}
        by_shard: dict[int, list[int]] = {}
        for task_id in ids:
            for shard in self.shards_of(task_id):
                by_shard.setdefault(shard, []).append(task_id)
        return {shard: {"ids": part} for shard, part in by_shard.items()}

    async def _cancel_started(
        self, error: TickwheelError, shard: int, started: Sequence[int], cancel: Verb, name: Any
    ) -> TickwheelError:
        """Cancel a restore or bulk operation, with the verb ``cancel``, in the shards that started
        it, because ``shard`` did not. Return the error for the caller: OutcomeUnknown if tasks have
        changed, or may still change."""
        noun = "restore" if cancel.name == "cancel_restore" else "bulk operation"
        maybe = [*started, *([shard] if isinstance(error, UNSURE) else [])]
        calls = (self._ask_soon(self.links[n], cancel, (name,), None) for n in maybe)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        changed = sum(end.get("changed", 0) for end in ends if isinstance(end, Mapping))
        left = [
            n for n, end in zip(maybe, ends, strict=True)
            if isinstance(end, BaseException) and not isinstance(end, NotFound)
        ]  # fmt: skip
        cancelled = ", ".join(str(n) for n in started if n not in left)
        parts = [f"shard {shard}: {error.message}"]
        if cancelled:
            parts.append(
                f"{noun} {name} was cancelled in shards {cancelled}, which had started it"
                + (f" and changed {changed} tasks" if changed else "")
            )
        if left:
            names = ", ".join(map(str, left))
            parts.append(f"{noun} {name} may still run in shards {names}: cancel it again")
        if not cancelled and not left:
            parts.append(f"no shard has started the {noun}")
        return (OutcomeUnknown if changed or left else type(error))("; ".join(parts))

    async def _ask_home_first(
        self, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        """Ask the home of a topic's settings, and unless it refuses, then the others. A shard
        that is unreachable, or does not know the group yet, follows the home by itself."""
        home, others = self._home_and_others(fields[0])
        first = await self._ask(home, verb, fields, until_s)
        calls = (self._ask_soon(link, verb, fields, until_s) for link in others)
        ends: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        raise_first([end for end in ends if not isinstance(end, (NotFound, *AWAY))])
        away = [link for link, end in zip(others, ends, strict=True) if isinstance(end, AWAY)]
        if away:
            names = ", ".join(str(self.links.index(link)) for link in away)
            LOGGER.info(
                "%s of topic %s: shards %s cannot be reached and will follow later",
                verb.name, fields[0], names,
            )  # fmt: skip
        answers = [end for end in ends if not isinstance(end, BaseException)]
        return self._merged(verb, [first, *answers], fields)

    async def _ask_soon(
        self, link: Link, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        """Ask a shard that may be away: wait at most ``JOIN_S`` for its connection."""
        if not self.opened(link).connected:
            soon_s = self._reconnector.loop.time() + JOIN_S
            until_s = soon_s if until_s is None else min(until_s, soon_s)
        return await self._ask(link, verb, fields, until_s)

    async def _ask_home_last(
        self, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        """Delete an object in all shards, after all have checked that none refuses; in its home
        last: if a shard still fails, the object exists there and at the home, and the other shards
        follow the home and create it again, empty."""
        home, others = self._home_and_others(fields[0])
        trial = (*fields[:-1], {**fields[-1], "dry_run": True})
        checks = (self._ask(link, verb, trial, until_s) for link in self.links)
        self._merged(verb, await asyncio.gather(*checks, return_exceptions=True), fields)
        return await self._ask_in_turn(verb, fields, until_s, (*others, home))

    def _home_and_others(self, topic: Any) -> tuple[Link, list[Link]]:
        """Return the link to the home of a topic's settings, and the links to all other shards.
        Raise BadRequest."""
        home = self.of_basis(topic) if isinstance(topic, str) else self.links[0]
        return home, [link for link in self.links if link is not home]

    def _merged(self, verb: Verb, ends: Sequence[Any], fields: tuple[Any, ...]) -> Any:
        """Merge the answers of all shards, some of which may have no such object."""
        raise_first([end for end in ends if not isinstance(end, NotFound)])
        answers = [end for end in ends if not isinstance(end, NotFound)]
        if not answers:
            raise ends[0]
        if verb.name in BY_SHARD:
            answers = [None if isinstance(end, NotFound) else end for end in ends]
        if verb.name == "push_log":
            answers = [numbered(end, n, len(ends)) for n, end in enumerate(ends)
                       if not isinstance(end, NotFound)]  # fmt: skip
        options = fields[-1] if fields and isinstance(fields[-1], Mapping) else {}
        return MERGED[verb.name](answers, options)

    async def _put_schedule(
        self, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        """Store a schedule in the shard of its tasks, or else in the home of its name. Raise
        Conflict if another shard has a schedule of that name. The home knows of it, unless it was
        restored from an older backup; so the other shards are asked, but need not answer, or allow
        the caller to read."""
        name, options = fields[0], fields[-1]
        basis = checked_basis(options.get(NewSchedule.field("task").name) or {})
        home = self.of_basis(name if basis is None else basis)
        shard, topic = self.links.index(home), options.get("topic")
        _, number = await self._claim("schedule", name, topic, shard, until_s)
        if number:
            claim, claimed = VERBS["claim_schedule"], {"shard": shard, "number": number}
            fields_of_claim = claim.request_type.to_frame({"name": name, "topic": topic, **claimed})
            await self._ask(home, claim, fields_of_claim, until_s)
        show = VERBS["show_schedule"]
        show_fields = show.request_type.to_frame({"name": name, "next": 0})
        rest = [link for link in self.links if link is not home]
        calls = (self._ask_soon(link, show, show_fields, until_s) for link in rest)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        raise_first([end for end in ends if not isinstance(end, (NotFound, Forbidden, *AWAY))])
        if not all(isinstance(end, BaseException) for end in ends):
            raise Conflict(
                f"schedule {name} exists in another shard, which its current key selects; delete it"
                " before you change the key"
            )
        return await self._ask(home, verb, fields, until_s)

    async def pages(
        self, verb: Verb, keywords: Mapping[str, Any], limit: int | None, timeout: Duration | None
    ) -> AsyncGenerator[Any, None]:
        """Yield the items of a listing of all shards in its order."""
        shard_limit, state = limit, keywords.get("state")
        if verb.name == "list_bulk":
            # The newest bulk operations of one shard may not be the newest of all, and the part in
            # one shard may be done while others run.
            shard_limit, keywords = None, {**keywords, "state": None}
            if state is not None:
                verb.request_type.field("state").kind.check(
                    state, "state", self._reconnector.limits
                )
        lists = [
            self.opened(link).pages(verb, keywords, shard_limit, timeout) for link in self.links
        ]
        if verb.name == "list_bulk":
            items = bulks_of(lists, state)
        else:
            items = in_order(verb, lists, reverse=bool(keywords.get("newest_first")))
        if verb.name == "list_transactions":
            items = once(items)
        left = limit
        async with aclosing(items):
            async for item in items:
                yield item
                if left is not None:
                    left -= 1
                    if not left:
                        return

    async def page(self, verb: Verb, query: Raw, until_s: float | None) -> Raw:
        """Return a page of a listing of all shards, as one daemon would; ``after`` is ``next`` of
        the previous page. Consumers are listed shard by shard, everything else in the order of the
        list."""
        if verb.name == "consumers":
            return await self._page_in_turn(verb, query, until_s)
        if verb.name == "list_bulk":
            return await self._page_of_bulks(query)
        fields = verb.request_type.to_frame(query)
        calls = (self._ask(link, verb, fields, until_s) for link in self.links)
        answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        raise_first(answers)
        return page_of(verb, query, answers)

    async def _page_in_turn(self, verb: Verb, query: Raw, until_s: float | None) -> Raw:
        """Return a page that continues with the next shard where a shard's list ends. ``next``
        combines the position in a shard's list with the shard's index."""
        count, limit, rows = len(self.links), limit_of(verb, query), list[Raw]()
        position, shard = divmod(query.get("after") or 0, count)
        while True:
            part = {**query, "after": position, "limit": limit - len(rows)}
            answer = await self._ask(self.links[shard], verb, (part,), until_s)
            rows += answer[verb.pages]
            position = answer["next"]
            if position is None:
                position, shard = 0, shard + 1
            if shard == count or len(rows) >= limit:
                following = None if shard == count else position * count + shard
                return {**answer, verb.pages: rows, "next": following}

    async def _page_of_bulks(self, query: Raw) -> Raw:
        """Return a page of bulk operations. All are read, because the shards keep only a few."""
        wanted, state = {"topic": query.get("topic")}, query.get("state")
        operations = [item.raw async for item in self.pages(VERBS["list_bulk"], wanted, None, None)]
        after, start = query.get("after"), 0
        if after is not None:
            ids = [operation["id"] for operation in operations]
            start = 1 + (ids.index(after) if after in ids else len(ids))
            if start > len(operations):
                raise NotFound(f"there is no bulk operation {after}")
        rest = [item for item in operations[start:] if state in (None, item["state"])]
        page = rest[: limit_of(VERBS["list_bulk"], query)]
        return {"bulk": page, "next": page[-1]["id"] if len(page) < len(rest) else None}

    # --- consumers ------------------------------------------------------------------------------

    def parts(self, front: Subscription) -> SpreadSubscription:
        """Return the subscriptions on all shards, which deliver to ``front``."""

        async def subscriptions_at(shard: int) -> Subscriptions:
            link = self.links[shard]
            await link.connect()
            return link.subscriptions

        return SpreadSubscription(len(self.links), subscriptions_at, front)

    async def pull(
        self,
        names: tuple[str, str],
        count: int,
        wait_ms: int,
        options: dict[str, Any],
        until_s: float | None,
        on_made: Callable[[MadeGroup], None],
    ) -> list[Delivery]:
        """Return up to ``count`` deliveries of all shards: waiting ones, or else the first that
        arrive."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_ms / 1000
        self._next = (self._next + 1) % len(self.links)
        links = [*self.links[self._next :], *self.links[: self._next]]
        order = sorted(map(self.opened, links), key=lambda link: not link.connected)
        deliveries: list[Delivery] = []
        errors: list[TickwheelError] = []
        tries = 0
        try:
            for link in order:
                # Neither deliveries already received nor a caller that waits for the first one
                # should wait for an unreachable shard.
                is_asked = link.connected or not (deliveries or wait_ms)
                if is_asked and (len(deliveries) < count or not count):
                    tries += 1
                    try:
                        left = count - len(deliveries)
                        deliveries += await link.pull(names, left, 0, options, until_s, on_made)
                    except TickwheelError as error:
                        errors.append(error)
            if errors and (len(errors) == tries or not errors[0].retryable):
                raise errors[0]
        except BaseException:
            self._release(deliveries)
            raise
        while not deliveries and (left_ms := int((end_s - loop.time()) * 1000)) > 0:
            wait_ms = min(left_ms, WAIT_MS)
            deliveries = await self._wait(order, names, count, wait_ms, options, until_s, on_made)
        return deliveries

    async def _wait(
        self, order: Sequence[Link], names: tuple[str, str], count: int, wait_ms: int,
        options: dict[str, Any], until_s: float | None, on_made: Callable[[MadeGroup], None],
    ) -> list[Delivery]:  # fmt: skip
        """Return the first deliveries of any shard; release later ones and those over ``count``."""
        each, extra = divmod(count, len(order))
        shares = [max(1, each + (index < extra)) for index in range(len(order))]
        pulls = [
            asyncio.ensure_future(link.pull(names, share, wait_ms, options, until_s, on_made))
            for link, share in zip(order, shares, strict=True)
        ]
        deliveries: list[Delivery] = []
        errors: list[BaseException] = []
        loop = asyncio.get_running_loop()
        over_s = loop.time() + wait_ms / 1000 + JOIN_S
        left_s: float | None = None
        waiting = set(pulls)
        try:
            while waiting and not deliveries:
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                errors += filter(None, (pull.exception() for pull in done))
                deliveries = [d for pull in done if not pull.exception() for d in pull.result()]
                if len(errors) + len(waiting) < len(pulls):
                    # A shard has answered: wait only a while for unreachable ones.
                    left_s = max(0.0, over_s - loop.time())
        finally:
            for pull in waiting:
                pull.cancel()
                pull.add_done_callback(self._release_late)
        if len(errors) == len(pulls):
            raise errors[0]
        try:
            with suppress(TickwheelError):
                await asyncio.gather(*(delivery.release() for delivery in deliveries[count:]))
        except BaseException:
            self._release(deliveries)
            raise
        return deliveries[:count]

    def _release_late(self, pull: asyncio.Task[list[Delivery]]) -> None:
        """Release the deliveries of a pull that nobody waits for."""
        if not pull.cancelled() and pull.exception() is None:
            self._release(pull.result())

    def _release(self, deliveries: Sequence[Delivery]) -> None:
        """Release deliveries that nobody waits for."""

        async def release() -> None:
            releasing = (delivery.release() for delivery in deliveries)
            await asyncio.gather(*releasing, return_exceptions=True)

        if deliveries:
            self._reconnector.spawn(release())


def _file_of(name: str, shard: int) -> str:
    """Return the name of a shard's own file; an invalid file name is returned unchanged."""
    path = PurePosixPath(name)
    if path.name != name or name == "..":
        return name
    return f"{path.stem}-shard-{shard}{path.suffix}"


def _join(
    sent: Sequence[tuple[list[int], asyncio.Future[Any]]], count: int, joined: asyncio.Future[Any],
    _: object,
) -> None:  # fmt: skip
    """Give ``joined`` the outcomes, which have all arrived, of one caller's tasks in the shards."""
    if joined.done():
        return
    outcomes: dict[int, Receipt | TickwheelError] = {}
    for indexes, part in sent:
        is_single = not count and not part.cancelled() and part.exception() is None
        results = [part.result()] if is_single else outcomes_of(part, len(indexes))
        outcomes.update(zip(indexes, results, strict=True))
    ends = [outcomes[index] for index in range(len(outcomes))]
    errors = [end for end in ends if isinstance(end, TickwheelError)]
    if errors:
        fail(joined, failure(ends, errors) if count else errors[0])
    else:
        joined.set_result(ends if count else ends[0])


def _adopted(batch: Batch, producer: Producer, tasks: list[WireTask]) -> asyncio.Future[Any]:
    """Give some tasks of a batch to a producer, in a new frame with the same deadline."""
    part = Batch(producer, FRAME_BYTES, batch.began_s, batch.deadline_s)
    future = part.put(tasks, batch.counts[0] and len(tasks), size_of(tasks))
    producer.adopt(part)
    return future
