"""A client over several shards: where everything goes.

``Shards`` has a link to each shard, of which one is there when the client learns of the others, and
asks verbs as their declarations say (``Over``); ``SpreadProducer`` gives each task to the producer
of its shard; a subscription on each shard behind one front is in ``spread_subscription.py``, and
the rules by which answers become one are in ``merging.py``.
Imported by a client that has learnt of several shards, and by no other. Invariants:

* A task with a basis (its ``shard_by``, order key or key) goes to shard crc32(basis) mod the number
  of shards, and nowhere else, also when that shard is away. One without a basis goes to any shard,
  and is sent again to the same one only.
* An id says the shard of its task, unless it is from before a change of the number of shards
  (``moved_id`` of HELLO): then the task may be in any of them, and all are asked.
* An answer is made of the answers of all shards that it is about, or is an error.
* The number of shards does not change while the client is open; where they are does.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from tickwheel.api.schedules import NewSchedule
from tickwheel.api.tasks import basis_of
from tickwheel.api.verb import Over
from tickwheel.api.verbs import VERBS
from tickwheel.client.connection import LOGGER, fail, is_secure, parse_url
from tickwheel.client.link import Link, close_all
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
    raise_first,
)
from tickwheel.client.producer import Batch, ColumnBatch, Producer, failure, outcomes_of
from tickwheel.client.requests import own_name, own_number, read
from tickwheel.client.search import Seen
from tickwheel.client.spread_subscription import JOIN_S, SpreadSubscription
from tickwheel.client.tasks import FRAME_BYTES, size_of
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    Conflict,
    ConnectionLost,
    Draining,
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
    from tickwheel.client.connection import Address
    from tickwheel.client.delivery import Delivery
    from tickwheel.client.subscription import Subscription
    from tickwheel.client.tasks import CheckedTask, Columns, Receipt, Receipts, WireTask

CLAIM_TRIES = 3
"""How often a name is claimed whose former claim, of which nothing was made, was ended."""
OTHERS_MAX = 8
"""Addresses of other shards at which a round looks for one."""
WAIT_MS = 1_000
"""How long a pull waits at a shard at a time: what comes there when it has ended is given back."""

AWAY = (Unreachable, SendTimeout, ConnectionLost, OutcomeUnknown, NotActive, Draining)
"""Errors of a shard that is away, or goes."""
ANSWERS_S = 3.0
"""A shard that has not explained a task within so many seconds is away."""
UNSURE = (SendTimeout, ConnectionLost, OutcomeUnknown)
"""Those of them after which it may have done what it was asked."""


def checked_basis(options: Mapping[str, Any]) -> str | None:
    """What says where a task with these options belongs; None: it may be anywhere. Raises
    BadRequest for a rule about tasks with its key that may be in other shards."""
    shard_by, key = options.get("shard_by"), options.get("key")
    basis = basis_of(shard_by, options.get("order_key"), key)
    if "if_pending" in options and basis != key:
        name = "order_key" if shard_by is None else "shard_by"
        raise BadRequest(
            f"if_pending is about tasks with the same key, and {name} says in which of several"
            " shards a task is: with if_pending they must be the same"
        )
    return basis


class Places:
    """Where the daemons of all shards are, as far as it is known: said in answers to HELLO, and
    seen from connections that stand. What is wrong here costs attempts, and no more."""

    def __init__(self, count: int, given: Sequence[Address], *, secure: bool) -> None:
        """``given``: the addresses that the client was given. ``secure``: it speaks TLS, and
        passes over addresses without."""
        self._given, self._secure = given, secure
        self.seen = Seen()
        self._named: list[Address | None] = [None] * count
        """The address of each shard's daemon; None: nobody is known to serve it."""
        self._version = 0
        self._doors: list[Address] = []
        """The front doors of nodes: each is there while its node is, whatever it leads."""
        self._standing: dict[int, Address] = {}
        """Shard → the address of the connection to it."""
        self._found: dict[int, Address] = {}
        """Shard → where it was found last: its daemon may not be named yet when it serves."""

    def learn(self, info: Mapping[str, Any]) -> None:
        """Take the addresses of the answer to a HELLO, unless newer ones are known."""
        urls, version = info.get("shards"), info.get("route_version", 0)
        is_route = isinstance(urls, (list, tuple)) and len(urls) == len(self._named)
        if is_route and type(version) is int and version >= self._version:
            is_newer, self._version = version > self._version, version
            before, self._named = self._named, [self._address(url) for url in urls or ()]
            for address in set(filter(None, self._named)).difference(before) if is_newer else ():
                self.seen.silent_until_s.pop(address, None)  # it has spoken since
            doors = info.get("doors")
            if isinstance(doors, (list, tuple)):
                self._doors = [*filter(None, map(self._address, doors[:OTHERS_MAX]))]

    def _address(self, url: Any) -> Address | None:
        if not isinstance(url, str) or not url:
            return None
        with suppress(BadRequest):
            return parse_url(url)[0] if is_secure(url) == self._secure else None
        return None

    def stands(self, shard: int, at: Address | None) -> None:
        """Take note of the address of the connection to a shard; None: it has ended."""
        self._standing.pop(shard, None)
        if at is not None:
            self._standing[shard] = self._found[shard] = at

    def around(self, shard: int) -> list[Address]:
        """Where to look for a shard: at its own address, where the client was told to begin, at
        daemons that are there, at the doors of nodes and at daemons of other shards; one of each
        host before a second."""
        own = (self._named[shard], self._found.get(shard))
        first = dict.fromkeys((*filter(None, own), *self._given))
        others = dict.fromkeys((*self._standing.values(), *self._doors, *filter(None, self._named)))
        hosts: Counter[str] = Counter()
        ranked: list[tuple[int, int, Address]] = []
        for index, address in enumerate(one for one in others if one not in first):
            ranked.append((hosts[address[0]], index, address))
            hosts[address[0]] += 1
        return [*first, *(one[2] for one in sorted(ranked)[:OTHERS_MAX])]


class Place:
    """Where one shard is: the ``Route`` of its client's connection."""

    def __init__(self, places: Places, shard: int) -> None:
        self._places, self.shard = places, shard
        self.learn, self.seen = places.learn, places.seen

    def addresses(self) -> Sequence[Address]:
        return self._places.around(self.shard)

    def stands(self, at: Address | None) -> None:
        self._places.stands(self.shard, at)


class Shards:
    """All shards of one client."""

    def __init__(self, own: Link, urls: Sequence[str], place: tuple[int, int]) -> None:
        """``own``: the link that is there; ``urls``: of all shards, "" while nobody serves one;
        ``place``: which of how many the own one is. Raises ConnectionLost where a shard would speak
        with TLS and the own one does not, or the other way round."""
        options = own.options
        for shard, url in enumerate(urls):
            if url and shard != place[0] and is_secure(url) != (options.tls is not None):
                raise ConnectionLost(f"shard {shard} is at {url:.200}: all or none must have TLS")
        places = Places(place[1], options.addresses, secure=options.tls is not None)
        places.learn(own.reconnector.info)
        own.place, own.route = place, Place(places, place[0])
        own.reconnector.follow(own.route)
        self.links: Sequence[Link] = [
            own
            if shard == place[0]
            else Link(options, place=(shard, place[1]), route=Place(places, shard))
            for shard in range(place[1])
        ]
        self.own = own
        self._others = [link for link in self.links if link is not own]
        self._reconnector = own.reconnector
        self._is_closed = False
        self.producer = SpreadProducer(self)
        self._next = place[0]
        """The shard that tasks without a basis go to."""

    # --- where things go ------------------------------------------------------------------------

    def of_basis(self, basis: str) -> Link:
        """The link to the shard that has the tasks with this basis, or the settings of the topic
        with this name. Raises BadRequest."""
        try:
            shard = shard_of(basis, len(self.links))
        except UnicodeEncodeError as error:
            raise BadRequest(f"a name must be text that UTF-8 can say: {error}") from None
        return self.opened(self.links[shard])

    def home_of(self, wire: WireTask) -> Link:
        """The link to the shard that a task goes to. Raises BadRequest."""
        basis = checked_basis(wire[3]) if len(wire) == 4 else None
        return self.any() if basis is None else self.of_basis(basis)

    def any(self) -> Link:
        """The link to the shard with the fewest tasks on their way, of those that are connected
        and have room; the next one in turn, where several have as few."""
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

    async def place_of_transaction(
        self,
        place: tuple[Link, int] | None,
        name: str,
        wires: Sequence[WireTask],
        until_s: float | None,
    ) -> tuple[Link, int]:
        """The link to the shard of a transaction with these half tasks, which is that of
        ``place`` if it has some already, and the number of the claim of its name there; 0: it needs
        none. Raises BadRequest when they belong into several, Conflict when others have it in
        another shard."""
        home = None if place is None else place[0]
        bases = {checked_basis(wire[3]) for wire in wires if len(wire) == 4} - {None}
        homes = {shard_of(basis, len(self.links)) for basis in bases if basis is not None}
        known = next((n for n, link in enumerate(self.links) if link is home), None)
        if len(homes | ({known} - {None})) > 1:
            raise BadRequest(
                f"transaction {name} has tasks in one shard, and their keys are of several:"
                f" {', '.join(sorted(map(str, bases)))}; give all of them one shard_by. A task"
                " without a key goes along with the others; the first ones say which shard it is"
            )
        if place is not None:
            return place
        wanted, topic = homes.pop() if homes else None, wires[0][0]
        shard, number = await self._claim("transaction", name, topic, wanted, until_s)
        return self.opened(self.links[shard]), number

    async def _claim(
        self, of: str, name: str, topic: Any, wanted: int | None, until_s: float | None
    ) -> tuple[int, int]:
        """The shard where what has this name is, or is about to be made, and the number of the
        claim. ``wanted``: the only shard where it may be; None: any, or else the name's home.
        Raises Conflict where it is in another one."""
        home, verb = shard_of(name, len(self.links)), VERBS[f"claim_{of}"]

        async def ask(at: int, shard: int, number: int, *, over: bool) -> tuple[int, int]:
            said = {"topic": topic, "shard": shard, "number": number, "over": over}
            asked = verb.asked.to_frame({"name": name, **said})
            answer = await self._ask(self.links[at], verb, asked, until_s)
            return read(lambda raw: (int(raw["shard"]), int(raw["number"])), answer)

        place = home if wanted is None else wanted
        for _ in range(CLAIM_TRIES):
            shard, number = await ask(home, place, 0, over=False)
            if wanted is None or shard == wanted:
                return shard, number
            # It may be that nothing was made of the claim, and nothing shall be.
            if not number or (await ask(shard, shard, number, over=True))[1]:
                break
            await ask(home, shard, number, over=True)
        way_out = "delete it first" if of == "schedule" else "choose another name"
        raise Conflict(
            f"{of} {name} is in shard {shard}, and the keys of its tasks belong into shard {place}:"
            f" give them the key or the shard_by that they have there, or {way_out}"
        )

    def answer_checks(self) -> None:
        """Answer at all shards for the producer groups that the client answers for."""
        if self.own.options.checks.handlers:
            for link in self._others:
                self.opened(link)

    def opened(self, link: Link) -> Link:
        """The link, which begins to connect if it has not. Raises ClientClosed."""
        if self._is_closed:
            raise ClientClosed("the client is closed; make a new one")
        link.ready()
        return link

    async def close(self) -> None:
        """Close all links but the own one, which could not connect and may find other shards."""
        self._is_closed = True
        self.own.place = self.own.route = None
        await close_all(self._others, 0.0)

    # --- verbs ----------------------------------------------------------------------------------

    async def call(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """The answer to a verb, in the form of the wire."""
        asks: Mapping[Over | None, Callable[..., Any]] = {
            Over.ONE: self._ask_own, Over.IDS: self._ask_ids, Over.NAME: self._ask_name,
            Over.ALL: self._ask_all, Over.TURN: self._ask_in_turn, Over.BASIS: self._put_schedule,
            Over.TOGETHER: self._ask_together, Over.HOME: self._ask_home_first,
            Over.HOME_LAST: self._ask_home_last, Over.TASK: self._ask_task,
        }  # fmt: skip
        return await asks[verb.over](verb, fields, until_s)

    async def _ask(
        self, link: Link, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        return await self.opened(link).call(verb, fields, until_s)

    async def _ask_own(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        if verb.name == "resend":
            *names, number = fields
            count = len(self.links)
            link = self.links[number % count]
            return await self._ask(link, verb, (*names, number // count), until_s)
        return await self._ask(self.own, verb, fields, until_s)

    async def _ask_ids(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        names = [field.name for field in verb.asked.places()]
        place = names.index("pairs" if "pairs" in names else "ids")
        if fields[place] is None:
            return await self._ask_all(verb, fields, until_s)
        groups: dict[int, list[int]] = {}
        for index, item in enumerate(fields[place]):
            for shard in self.shards_of(item if isinstance(item, int) else item[0]):
                groups.setdefault(shard, []).append(index)

        async def ask(shard: int, indexes: Sequence[int]) -> Sequence[Any]:
            some = [fields[place][index] for index in indexes]
            asked = (*fields[:place], some, *fields[place + 1 :])
            answer = await self._ask(self.links[shard], verb, asked, until_s)
            if not isinstance(answer, tuple) or len(answer) != len(some):
                raise ProtocolError(f"the daemon's answer is not a list of {len(some)}")
            return answer

        return tuple(await ask_in_parts(groups, ask))

    async def _ask_task(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """The answer of the shard that knows the task, or that one is away that may know it."""
        task_id = fields[0]
        shards = range(len(self.links)) if task_id is None else self.shards_of(task_id)
        soon_s = asyncio.get_running_loop().time() + ANSWERS_S
        until_s = soon_s if until_s is None else min(until_s, soon_s)
        asking = [self._ask(self.links[shard], verb, fields, until_s) for shard in shards]
        ends = await asyncio.gather(*asking, return_exceptions=True)
        raise_first([end for end in ends if not isinstance(end, AWAY)])
        return explanation_of(task_id, dict(zip(shards, ends, strict=True)))

    def shards_of(self, task_id: int) -> Iterable[int]:
        """The shards that may have the task."""
        count, shard = len(self.links), task_id & ((1 << SHARD_BITS) - 1)
        if task_id <= self._reconnector.info.get("moved_id", 0):
            return range(count)
        return (shard if shard < count else 0,)

    async def _ask_name(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """The answer of the shard that has what is named; the others need not be there."""
        asking = [
            asyncio.ensure_future(self._ask(link, verb, fields, until_s)) for link in self.links
        ]
        errors: list[BaseException] = []
        try:
            for end in asyncio.as_completed(asking):
                try:
                    return await end
                except TickwheelError as error:
                    errors.append(error)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        raise next((error for error in errors if not isinstance(error, NotFound)), errors[0])

    async def _ask_all(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        links, first = self.links, []
        if verb.name == "load":
            # The first one says when the spans begin.
            first = [await self._ask(links[0], verb, fields, until_s)]
            fields = ({**fields[0], "from_ms": first[0]["from_ms"]},)
            links = links[1:]
        asking = (self._ask(link, verb, fields, until_s) for link in links)
        ends = await asyncio.gather(*asking, return_exceptions=True)
        return self._merged(verb, [*first, *ends], fields)

    async def _ask_in_turn(self, verb: Verb, fields: tuple[Any, ...], until_s: float | None) -> Any:
        """What all shards are told; the first error ends it, and a repeat mends it. What one of
        them has not is passed over."""
        if verb.name in ("reset_group", "make_bulk") and fields[-1].get("id") is None:
            # The same name in each, so that it is shown, and cancelled, as one.
            fields = (*fields[:-1], {**fields[-1], "id": own_name("reset")})
        ends: list[Any] = []
        for shard, link in enumerate(self.links):
            asked = (_file_of(fields[0], shard),) if verb.name == "backup" else fields
            try:
                ends.append(await self._ask(link, verb, asked, until_s))
            except NotFound as error:
                ends.append(error)
        return self._merged(verb, ends, fields)

    async def _ask_together(
        self, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        """A restore that all shards begin under one id, or none: each from its own backup into its
        own file; of tasks that are named, the shards that may have them. Those that may be away are
        asked first, so that none begins in vain."""
        into, options = fields
        options = {"id": own_number(), **options}
        parts = self._restored(options)
        answers: list[Raw | None] = [None] * len(self.links)
        for shard in sorted(parts, key=lambda n: (self.opened(self.links[n]).connected, n)):
            asked = {**options, "of_shards": len(parts), **parts[shard]}
            if options.get("backup") is not None:
                asked["backup"] = _file_of(options["backup"], shard)
            try:
                answers[shard] = await self._ask(
                    self.links[shard], verb, (_file_of(into, shard), asked), until_s
                )
            except TickwheelError as error:
                begun = [n for n, answer in enumerate(answers) if answer is not None]
                raise await self._begun_in_vain(error, shard, begun, options["id"]) from error
        return MERGED["show_restore"](answers, options)

    def _restored(self, options: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
        """The shards that restore something, and the ids that each one is asked for."""
        ids = options.get("ids")
        if not ids:
            return {shard: {} for shard in range(len(self.links))}
        found: dict[int, list[int]] = {}
        for one in ids:
            for shard in self.shards_of(one):
                found.setdefault(shard, []).append(one)
        return {shard: {"ids": some} for shard, some in found.items()}

    async def _begun_in_vain(
        self, error: TickwheelError, shard: int, begun: Sequence[int], restore: int
    ) -> TickwheelError:
        """Cancel a restore in the shards that have begun it, since ``shard`` has not; the error
        that says so."""
        maybe = [*begun, *([shard] if isinstance(error, UNSURE) else [])]
        verb = VERBS["cancel_restore"]
        asking = (self._ask_soon(self.links[n], verb, (restore,), None) for n in maybe)
        ends = await asyncio.gather(*asking, return_exceptions=True)
        left = [
            n for n, end in zip(maybe, ends, strict=True)
            if isinstance(end, BaseException) and not isinstance(end, NotFound)
        ]  # fmt: skip
        over = ", ".join(str(n) for n in begun if n not in left)
        said = [f"shard {shard}: {error.message}"]
        if over:
            said.append(f"restore {restore} had begun in shards {over}, and was cancelled there")
        if left:
            names = ", ".join(map(str, left))
            said.append(f"restore {restore} may go on in shards {names}: cancel it once more")
        return type(error)("; ".join(said if over or left else [*said, "no shard has begun it"]))

    async def _ask_home_first(
        self, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        """What the home of a topic's settings is told, whose error ends it, and then the others.
        One of these that is away, or does not know the group yet, follows the home by itself."""
        home, others = self._home_and_others(fields[0])
        first = await self._ask(home, verb, fields, until_s)
        asking = (self._ask_soon(link, verb, fields, until_s) for link in others)
        ends: list[Any] = await asyncio.gather(*asking, return_exceptions=True)
        raise_first([end for end in ends if not isinstance(end, (NotFound, *AWAY))])
        away = [link for link, end in zip(others, ends, strict=True) if isinstance(end, AWAY)]
        if away:
            names = ", ".join(str(self.links.index(link)) for link in away)
            LOGGER.info(
                "%s of topic %s: shards %s were away, and follow when they are back",
                verb.name, fields[0], names,
            )  # fmt: skip
        answers = [end for end in ends if not isinstance(end, BaseException)]
        return self._merged(verb, [first, *answers], fields)

    async def _ask_soon(
        self, link: Link, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        """Ask a shard that need not be there: without a connection it is waited for ``JOIN_S``."""
        if not self.opened(link).connected:
            soon_s = self._reconnector.loop.time() + JOIN_S
            until_s = soon_s if until_s is None else min(until_s, soon_s)
        return await self._ask(link, verb, fields, until_s)

    async def _ask_home_last(
        self, verb: Verb, fields: tuple[Any, ...], until_s: float | None
    ) -> Any:
        """What is deleted in all shards, at its home when it has gone in all others: what one of
        them refuses is still there, and the others follow the home and have it again."""
        home, others = self._home_and_others(fields[0])
        ends: list[Any] = []
        for link in (*others, home):
            try:
                ends.append(await self._ask(link, verb, fields, until_s))
            except NotFound as error:
                ends.append(error)
        return self._merged(verb, ends, fields)

    def _home_and_others(self, topic: Any) -> tuple[Link, list[Link]]:
        """The link to the shard where the settings of a topic have their home, and those of all
        others. Raises BadRequest."""
        home = self.of_basis(topic) if isinstance(topic, str) else self.links[0]
        return home, [link for link in self.links if link is not home]

    def _merged(self, verb: Verb, ends: Sequence[Any], fields: tuple[Any, ...]) -> Any:
        """One answer of those of all shards, of which some may have nothing of it."""
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
        """Put a schedule where its tasks belong, or else where its name does. Raises Conflict where
        another shard has one of that name."""
        name, options = fields[0], fields[-1]
        basis = checked_basis(options.get(NewSchedule.field("task").name) or {})
        home = self.of_basis(name if basis is None else basis)
        place, topic = self.links.index(home), options.get("topic")
        _, number = await self._claim("schedule", name, topic, place, until_s)
        if number:
            claim, said = VERBS["claim_schedule"], {"shard": place, "number": number}
            fields_of_claim = claim.asked.to_frame({"name": name, "topic": topic, **said})
            await self._ask(home, claim, fields_of_claim, until_s)
        show = VERBS["show_schedule"]
        asked = show.asked.to_frame({"name": name, "next": 0})
        rest = [link for link in self.links if link is not home]
        looks = (self._ask(link, show, asked, until_s) for link in rest)
        ends = await asyncio.gather(*looks, return_exceptions=True)
        raise_first([end for end in ends if not isinstance(end, NotFound)])
        if not all(isinstance(end, NotFound) for end in ends):
            raise Conflict(
                f"schedule {name} is in the shard of another key; with the key that its tasks have"
                " now it belongs into another shard: delete it first"
            )
        return await self._ask(home, verb, fields, until_s)

    async def pages(
        self, verb: Verb, keywords: Mapping[str, Any], limit: int | None, timeout: Duration | None
    ) -> AsyncGenerator[Any, None]:
        """The items of a listing of all shards, in its order."""
        # The newest bulk operations of one shard need not be those of another.
        most = None if verb.name == "list_bulk" else limit
        lists = [self.opened(link).pages(verb, keywords, most, timeout) for link in self.links]
        if verb.name == "list_bulk":
            items = bulks_of(lists)
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

    async def page(self, verb: Verb, asked: Raw, until_s: float | None) -> Raw:
        """A page of a listing of all shards, as a daemon alone answers it; ``after`` is ``next`` of
        the page before. Consumers come shard by shard, and all else in the order of the list."""
        if verb.name == "consumers":
            return await self._page_in_turn(verb, asked, until_s)
        if verb.name == "list_bulk":
            return await self._page_of_bulks(asked)
        fields = verb.asked.to_frame(asked)
        asking = (self._ask(link, verb, fields, until_s) for link in self.links)
        answers: list[Any] = await asyncio.gather(*asking, return_exceptions=True)
        raise_first(answers)
        return page_of(verb, asked, answers)

    async def _page_in_turn(self, verb: Verb, asked: Raw, until_s: float | None) -> Raw:
        """A page that goes on in the next shard where one has no more. Its places are places of a
        shard that also say which shard it is."""
        count, limit, found = len(self.links), limit_of(verb, asked), list[Raw]()
        place, shard = divmod(asked.get("after") or 0, count)
        while True:
            some = {**asked, "after": place, "limit": limit - len(found)}
            answer = await self._ask(self.links[shard], verb, (some,), until_s)
            found += answer[verb.pages]
            place = answer["next"]
            if place is None:
                place, shard = 0, shard + 1
            if shard == count or len(found) >= limit:
                following = None if shard == count else place * count + shard
                return {**answer, verb.pages: found, "next": following}

    async def _page_of_bulks(self, asked: Raw) -> Raw:
        """A page of bulk operations, of which all shards together keep few."""
        wanted = {name: asked[name] for name in ("topic", "state") if name in asked}
        every = [one.raw async for one in self.pages(VERBS["list_bulk"], wanted, None, None)]
        after, start = asked.get("after"), 0
        if after is not None:
            start = 1 + next((n for n, one in enumerate(every) if one["id"] == after), len(every))
            if start > len(every):
                raise NotFound(f"there is no bulk operation {after}")
        end = start + limit_of(VERBS["list_bulk"], asked)
        following = every[end - 1]["id"] if end < len(every) else None
        return {"bulk": every[start:end], "next": following}

    # --- consuming ------------------------------------------------------------------------------

    def parts(self, front: Subscription) -> SpreadSubscription:
        """A subscription on each shard for this one."""
        return SpreadSubscription(self.links, front)

    async def pull(
        self,
        names: tuple[str, str],
        count: int,
        wait_ms: int,
        options: dict[str, Any],
        until_s: float | None,
        made: Callable[[MadeGroup], None],
    ) -> list[Delivery]:
        """Up to ``count`` deliveries of all shards: what is there, or else what comes first."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + wait_ms / 1000
        self._next = (self._next + 1) % len(self.links)
        links = [*self.links[self._next :], *self.links[: self._next]]
        order = sorted(map(self.opened, links), key=lambda link: not link.connected)
        found: list[Delivery] = []
        errors: list[TickwheelError] = []
        asked = 0
        try:
            for link in order:
                # What was found, and who waits for what comes first, waits for no shard that is
                # away.
                is_asked = link.connected or not (found or wait_ms)
                if is_asked and (len(found) < count or not count):
                    asked += 1
                    try:
                        left = count - len(found)
                        found += await link.pull(names, left, 0, options, until_s, made)
                    except TickwheelError as error:
                        errors.append(error)
            if errors and (len(errors) == asked or not errors[0].retryable):
                raise errors[0]
        except BaseException:
            self._give_back(found)
            raise
        while not found and (left_ms := int((end_s - loop.time()) * 1000)) > 0:
            wait_ms = min(left_ms, WAIT_MS)
            found = await self._wait(order, names, count, wait_ms, options, until_s, made)
        return found

    async def _wait(
        self, order: Sequence[Link], names: tuple[str, str], count: int, wait_ms: int,
        options: dict[str, Any], until_s: float | None, made: Callable[[MadeGroup], None],
    ) -> list[Delivery]:  # fmt: skip
        """What comes first at any shard; what comes later, or is too much, is given back."""
        each, extra = divmod(count, len(order))
        shares = [max(1, each + (index < extra)) for index in range(len(order))]
        pulls = [
            asyncio.ensure_future(link.pull(names, share, wait_ms, options, until_s, made))
            for link, share in zip(order, shares, strict=True)
        ]
        found: list[Delivery] = []
        errors: list[BaseException] = []
        loop = asyncio.get_running_loop()
        over_s = loop.time() + wait_ms / 1000 + JOIN_S
        left_s: float | None = None
        try:
            waiting = set(pulls)
            while waiting and not found:
                done, waiting = await asyncio.wait(
                    waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                errors += filter(None, (pull.exception() for pull in done))
                found = [one for pull in done if not pull.exception() for one in pull.result()]
                if len(errors) + len(waiting) < len(pulls):
                    # One has answered: those that are away are waited for a while.
                    left_s = max(0.0, over_s - loop.time())
        finally:
            for pull in pulls:
                pull.cancel()
            ends = await asyncio.gather(*pulls, return_exceptions=True)
            taken = set(map(id, found))
            lists = (end for end in ends if not isinstance(end, BaseException))
            self._give_back([one for some in lists for one in some if id(one) not in taken])
        if len(errors) == len(pulls):
            raise errors[0]
        with suppress(TickwheelError):
            await asyncio.gather(*(one.release() for one in found[count:]))
        return found[:count]

    def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Release what nobody takes any more."""

        async def release() -> None:
            releasing = (delivery.release() for delivery in deliveries)
            await asyncio.gather(*releasing, return_exceptions=True)

        if deliveries:
            self._reconnector.spawn(release())


def _file_of(name: str, shard: int) -> str:
    """The name of one shard's own file; a name that no file may have stays as it is."""
    path = PurePosixPath(name)
    if path.name != name or name == "..":
        return name
    return f"{path.stem}-shard-{shard}{path.suffix}"


# --- producing -----------------------------------------------------------------------------------


TOGETHER = 512
"""Tasks that may be anywhere and go to one shard together, before the next one is looked for."""


class SpreadProducer:
    """What ``Producer`` is for one shard, for several: each task goes to the producer of its shard.
    One that is away holds nobody else up."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._full: Producer | None = None
        """The one that had no room for a task when it was last asked."""
        self._filling: Producer | None = None
        """The one that got the last task that may be anywhere,"""
        self._left = 0
        """and how many more may go there with it."""

    @property
    def is_full(self) -> bool:
        """Whether no shard that is connected has room."""
        there = [link.producer for link in self._shards.links if link.connected]
        return bool(there) and all(one.is_full for one in there)

    def _home(self, wire: WireTask) -> Producer:
        """The producer that a task goes to: the way of most tasks. Raises BadRequest."""
        if len(wire) == 4:
            basis = checked_basis(wire[3])
            if basis is not None:
                return self._shards.of_basis(basis).producer
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
        self._filling = producer = self._shards.any().producer
        return producer

    def add(self, checked: CheckedTask) -> asyncio.Future[Any]:
        return self._home(checked[0]).add(checked)

    def join(self, checked: CheckedTask) -> asyncio.Future[Any] | None:
        producer = self._home(checked[0])
        future = producer.join(checked)
        if future is None:
            self._full = producer
        return future

    def put(
        self,
        tasks: list[WireTask],
        count: int,
        size: int,
        time_s: float | None = None,
        *,
        is_ruled: bool = False,
    ) -> asyncio.Future[Any]:
        def send(to: Producer, some: list[WireTask]) -> asyncio.Future[Any]:
            return to.put(some, count and len(some), size_of(some), time_s, is_ruled=is_ruled)

        return self._divide(tasks, count, send)

    def add_columns(
        self, columns: Columns, time_s: float | None = None
    ) -> asyncio.Future[Receipts]:
        return self._shards.any().producer.add_columns(columns, time_s)

    async def wait_room(self, time_s: float | None = None) -> None:
        full, self._full = self._full, None
        await (full or self._shards.any().producer).wait_room(time_s)

    def take_over(self, batches: Iterable[Batch]) -> None:
        """Send what was enqueued before it was known that there are several shards."""
        for batch in batches:
            [future] = batch.futures
            if isinstance(batch, ColumnBatch):
                self._shards.any().producer.adopt(batch)
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
        """Send tasks of one frame to their shards, a frame each; the future of what the caller gets
        (``future``, if there is one already)."""
        parts: dict[Producer, list[int]] = {}
        free: Producer | None = None
        for index, wire in enumerate(tasks):
            basis = checked_basis(wire[3]) if len(wire) == 4 else None
            if basis is not None:
                home = self._shards.of_basis(basis).producer
            else:
                home = free = free or self._home(wire)
            parts.setdefault(home, []).append(index)
        if len(parts) == 1 and future is None:
            [home] = parts
            return send(home, tasks)
        sent: list[tuple[list[int], asyncio.Future[Any]]] = []
        made = self._shards._reconnector.loop.create_future() if future is None else future
        for home, indexes in parts.items():
            try:
                part = send(home, [tasks[index] for index in indexes])
            except TickwheelError as error:
                part = home.create_future()
                fail(part, error)
            sent.append((indexes, part))
        _Joined(sent, count, made)
        return made


class _Joined:
    """The parts of one caller's tasks, whose outcomes become one in ``future``."""

    def __init__(
        self, sent: Sequence[tuple[list[int], asyncio.Future[Any]]], count: int,
        future: asyncio.Future[Any],
    ) -> None:  # fmt: skip
        self._sent, self._count, self._future = sent, count, future
        self._left = len(sent)
        for _, part in sent:
            part.add_done_callback(self._one_done)

    def _one_done(self, part: asyncio.Future[Any]) -> None:
        self._left -= 1
        if self._left or self._future.done():
            if not part.cancelled():
                part.exception()  # seen
            return
        found: dict[int, Receipt | TickwheelError] = {}
        for indexes, one in self._sent:
            is_single = not self._count and not one.cancelled() and one.exception() is None
            outcomes = [one.result()] if is_single else outcomes_of(one, len(indexes))
            found.update(zip(indexes, outcomes, strict=True))
        ends = [found[index] for index in range(len(found))]
        errors = [end for end in ends if isinstance(end, TickwheelError)]
        if errors:
            fail(self._future, failure(ends, errors) if self._count else errors[0])
        else:
            self._future.set_result(ends if self._count else ends[0])


def _adopted(batch: Batch, producer: Producer, tasks: list[WireTask]) -> asyncio.Future[Any]:
    """Give some tasks of a batch to a producer, in a frame of their own with the same deadline."""
    part = Batch(producer, FRAME_BYTES, batch.began_s, batch.deadline_s)
    future = part.put(tasks, batch.counts[0] and len(tasks), size_of(tasks))
    producer.adopt(part)
    return future
