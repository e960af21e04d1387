"""What the client's questions are answered with: read-only views of the daemon's maps.

Every class keeps the daemon's answer in ``raw``: fields that a newer daemon adds are there.
Whatever has not the shape of ``docs/protocol.md`` is a ProtocolError. ``status_at`` asks one
address whatever its role, which the client's own connection cannot: that one stands with the
active daemon only. ``statuses`` asks all that there are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from tickwheel.api.frames import PROTOCOL_VERSION, FrameType
from tickwheel.api.pending import IfPending
from tickwheel.api.retry import Retry
from tickwheel.api.times import moment
from tickwheel.client.addresses import (
    DEFAULT_URL,
    Address,
    is_secure,
    parse_url,
    shown,
    url_of,
)
from tickwheel.client.connection import Connection, Request, connect, fail, hello
from tickwheel.client.trust import Trust, explain
from tickwheel.errors import BadRequest, ProtocolError, TickwheelError, UnknownType, Unreachable
from tickwheel.protocol.codec import encode
from tickwheel.version import __version__

if TYPE_CHECKING:
    from datetime import datetime

    from tickwheel.client.tasks import Value

Map = Mapping[str, Any]
Failure = tuple[int, int, str, str, str]
"""(attempt, when in ms since 1970, reason)"""
T = TypeVar("T")


def read(parse: Callable[[Any], T], answer: Any) -> T:
    """``parse(answer)``. Raises ProtocolError when the answer has not the shape it expects."""
    try:
        return parse(answer)
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        raise ProtocolError(
            f"the daemon's answer cannot be understood: {type(problem).__name__}: {problem!s:.200}"
        ) from None


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """``status`` "scheduled": it has the new ``due``. Else what forbids it, and no ``due``."""

    status: str
    due_ms: int | None

    @property
    def due(self) -> datetime | None:
        return None if self.due_ms is None else moment(self.due_ms)

    @classmethod
    def of(cls, answer: Any) -> Rescheduled:
        status, due_ms = answer
        return cls(str(status), None if due_ms is None else int(due_ms))


@dataclass(frozen=True, slots=True)
class KeyOutcome:
    """What a command by key did to one task; ``status`` as by its id."""

    id: int | None
    """None: no task with this key is known (``status`` "unknown")."""
    status: str
    due_ms: int | None = None
    """The new one, when it was moved."""

    @property
    def due(self) -> datetime | None:
        return None if self.due_ms is None else moment(self.due_ms)

    @classmethod
    def of(cls, answer: Any) -> KeyOutcome:
        task_id, status, due_ms = (*answer, None)[:3]
        return cls(
            None if task_id is None else int(task_id),
            str(status),
            None if due_ms is None else int(due_ms),
        )


@dataclass(frozen=True, slots=True)
class GroupInfo:
    """How one group stands with a task."""

    state: str
    attempt: int
    at_ms: int
    """When its lease ends, its retry comes, it died or was acked, by ``state``."""
    failures: tuple[Failure, ...]
    retries_left: int | None = None
    """Before it is dead; None: the daemon does not say."""
    snoozes: int = 0
    """How often it was postponed."""
    deaths: int = 0
    """How many consumers have died while they had it."""

    @classmethod
    def of(cls, raw: Map) -> GroupInfo:
        failures, left = _failures(raw["failures"]), raw.get("retries_left")
        counts = int(raw.get("snoozes", 0)), int(raw.get("deaths", 0))
        return cls(raw["state"], raw["attempt"], raw["at_ms"], failures, left, *counts)


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task as ``lookup`` finds it. When it is not stored any more, only id and state."""

    id: int
    state: str
    """"scheduled", "ready", "in_flight", "waiting", "dead", or how it ended: "acked",
    "cancelled", "expired", "deleted"; "gone": long ago; "unknown": never heard of."""
    raw: Map = field(repr=False)
    topic: str | None = None
    body: bytes | None = None
    due_ms: int | None = None
    enqueued_ms: int | None = None
    key: str | None = None
    tag: str | None = None
    properties: Mapping[str, Value] = field(default_factory=dict)
    priority: int = 0
    ttl_ms: int | None = None
    within_ms: int | None = None
    """Any moment from ``asked_ms`` to so much later would do; ``due_ms`` was the emptiest."""
    asked_ms: int | None = None
    order_key: str | None = None
    """Each group gets the tasks of one key one at a time."""
    slot: int | None = None
    cycles: int | None = None
    """Rotations of the wheel left."""
    groups: Mapping[str, GroupInfo] = field(default_factory=dict)
    replay_of: int | None = None
    """The task that it stands for, by a reset of the group ``replay_to``, whose alone it is."""
    replay_to: str | None = None

    @property
    def due(self) -> datetime | None:
        return None if self.due_ms is None else moment(self.due_ms)

    @classmethod
    def of(cls, raw: Map) -> TaskInfo:
        groups = {name: GroupInfo.of(group) for name, group in raw.get("groups", {}).items()}
        names = (
            "topic", "body", "due_ms", "enqueued_ms", "key", "tag", "ttl_ms", "within_ms",
            "asked_ms", "order_key", "slot", "cycles", "replay_of", "replay_to",
        )  # fmt: skip
        return cls(
            int(raw["id"]),
            str(raw["state"]),
            raw,
            **{name: raw.get(name) for name in names},
            properties=raw.get("properties") or {},
            priority=raw.get("priority", 0),
            groups=groups,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """How many tasks are due in each span of time, as they stand on the wheel."""

    from_ms: int
    step_ms: int
    counts: tuple[int, ...]
    exact: bool
    """False: what is far away and very much was estimated from a part of it."""
    scheduled: int
    """All that is on the wheel."""

    @classmethod
    def of(cls, raw: Map) -> Load:
        return cls(
            int(raw["from_ms"]),
            int(raw["step_ms"]),
            tuple(map(int, raw["counts"])),
            bool(raw["exact"]),
            int(raw["scheduled"]),
        )


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A subscription of somebody who is connected, or a pull that waits. ``group`` is None for a
    broadcast subscription; ``host``, ``pid`` and ``version`` are what the client says of itself,
    None where it says nothing."""

    topic: str
    group: str | None
    kind: str
    """subscription, pull."""
    in_flight: int
    prefetch: int
    client: str
    address: str
    host: str | None
    pid: int | None
    version: str | None
    token: str | None
    raw: Map = field(repr=False)

    @property
    def since(self) -> datetime:
        """When the connection came."""
        return moment(self.raw["since_ms"])

    @classmethod
    def of(cls, raw: Map) -> ConsumerInfo:
        names = ("client", "address", "host", "pid", "version", "token")
        said: dict[str, Any] = {name: raw[name] for name in names}
        counts = int(raw["in_flight"]), int(raw["prefetch"])
        return cls(raw["topic"], raw["group"], raw["kind"], *counts, **said, raw=raw)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A task that a group could not finish, until it is requeued or deleted."""

    id: int
    group: str
    topic: str
    died_ms: int
    attempt: int
    reason: str
    failures: tuple[Failure, ...]
    raw: Map = field(repr=False)

    @property
    def deaths(self) -> int:
        """How many consumers have died while they had it."""
        return int(self.raw.get("deaths", 0))

    @property
    def died(self) -> datetime:
        return moment(self.died_ms)

    @classmethod
    def of(cls, raw: Map) -> DeadLetter:
        return cls(
            raw["id"],
            raw["group"],
            raw["topic"],
            raw["died_ms"],
            raw["attempt"],
            raw["reason"],
            _failures(raw["failures"]),
            raw,
        )


@dataclass(frozen=True, slots=True)
class GroupStats:
    ready: int
    in_flight: int
    waiting: int
    dead: int
    subscribers: int
    delivered: int
    acked: int
    nacked: int
    expired: int
    filtered: int
    """Tasks that its filter left out."""
    since_ms: int
    """It is owed what is due from then on, and what was enqueued since it was made; 0: all that
    is there."""
    oldest_ready_ms: int
    """For how long the oldest of the ready ones has been; 0: there is none."""
    replay: float | None
    """It begins in the past: how much (0 to 1) of what was there before it has been looked at;
    None: all of it."""
    unused_ms: int | None
    """For how long nobody has used it, once that is longer than the daemon waits with saying so."""
    paused: bool
    rate: float | None
    burst: int | None
    retry: Retry | None
    raw: Map = field(repr=False)

    @property
    def retrying(self) -> int:
        """Those that wait for their next attempt."""
        return self.waiting

    @classmethod
    def of(cls, raw: Map) -> GroupStats:
        names = ("ready", "in_flight", "waiting", "dead", "subscribers", "delivered", "acked")
        newer = _newer(raw, "nacked", "expired", "filtered", "since_ms", "oldest_ready_ms")
        replay = raw.get("replay")
        share = None if replay is None else float(replay["share"])
        newer |= {"replay": share, "unused_ms": raw.get("unused_ms")}
        return cls(**_counts(raw, names), **newer, **_settings(raw), raw=raw)


_COUNTS = ("pending", "ready", "in_flight", "waiting", "dead", "enqueued", "delivered", "acked")


@dataclass(frozen=True, slots=True)
class TopicStats:
    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    enqueued: int
    delivered: int
    acked: int
    oldest_ready_ms: int
    """For how long the oldest of the ready ones has been; 0: there is none."""
    broadcasters: int
    """Subscribers that get everything while they are connected."""
    paused: bool
    rate: float | None
    burst: int | None
    retry: Retry | None
    groups: Mapping[str, GroupStats]
    raw: Map = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> TopicStats:
        groups = {name: GroupStats.of(group) for name, group in raw["groups"].items()}
        newer = _newer(raw, "oldest_ready_ms", "broadcasters")
        return cls(**_counts(raw, _COUNTS), **newer, **_settings(raw), groups=groups, raw=raw)


@dataclass(frozen=True, slots=True)
class Stats:
    """The daemon's counts at one moment; totals are since its start."""

    pending: int
    ready: int
    in_flight: int
    waiting: int
    dead: int
    enqueued: int
    delivered: int
    acked: int
    dead_total: int
    """That ever became dead letters."""
    dead_expired: int
    """Dead letters that were kept for as long as they are kept."""
    dropped_once: int
    """Deliveries of at-most-once subscriptions that had their end and were not sent."""
    topics: Mapping[str, TopicStats]
    raw: Map = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> Stats:
        topics = {name: TopicStats.of(topic) for name, topic in raw["topics"].items()}
        newer = _newer(raw, "dead_total", "dead_expired", "dropped_once")
        return cls(**_counts(raw, _COUNTS), **newer, topics=topics, raw=raw)


class Backup(TypedDict):
    """Where a backup was written, on the daemon's machine."""

    path: str
    bytes: int


def _counts(raw: Map, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: int(raw[name]) for name in names}


def _newer(raw: Map, *names: str) -> dict[str, Any]:
    """Counts that an older daemon does not have, as 0."""
    return {name: int(raw.get(name) or 0) for name in names}


def _settings(raw: Map) -> dict[str, Any]:
    retry = raw.get("retry")
    return {
        "paused": bool(raw.get("paused", False)),
        "rate": raw.get("rate"),
        "burst": raw.get("burst"),
        "retry": None if retry is None else Retry.of(retry),
    }


def _failures(raw: Any) -> tuple[Failure, ...]:
    return tuple((one[0], one[1], one[2], one[3], one[4]) for one in raw)


UNKNOWN = "unknown"
"""The state of a daemon that is too old to be asked."""
NAME = f"tickwheel-python/{__version__}"


@dataclass(frozen=True, slots=True)
class Active:
    """The active daemon, as another one knows it."""

    node: str
    address: str
    epoch: int | None
    """None while it takes over."""
    since_ms: int

    @classmethod
    def of(cls, raw: Map) -> Active:
        names, epoch = (str(raw["node"]), str(raw["address"])), raw["epoch"]
        return cls(*names, None if epoch is None else int(epoch), int(raw["since_ms"]))


@dataclass(frozen=True, slots=True)
class Status:
    """A daemon at one moment, by its own clock."""

    node: str
    version: str
    role: str
    """"active", "standby" or "starting"."""
    state: str
    """"ready", "loading", "recovering", "standby", "store_trouble", "store_full", "draining",
    "clock_held"; "unknown": it is too old to say."""
    detail: str | None
    """More about the state, for people."""
    epoch: int
    address: str
    """Where others find it, as it says."""
    since_ms: int
    """When its role began; 0: it is too old to say."""
    active: Active | None
    """The active daemon, if it knows one; on the active one itself that one, or None."""
    store: str
    store_ok: bool
    durability: str | None
    """What a confirmed task survives there, for people; None: it has no store open, or is too old
    to say."""
    now_ms: int
    uptime_s: float
    loaded: int
    """Tasks in memory again after a start."""
    to_load: int | None
    """How many there are; None: that is not known yet."""
    raw: Map = field(repr=False)

    @property
    def since(self) -> datetime:
        return moment(self.since_ms)

    @property
    def serves(self) -> bool:
        """Whether tasks may be handed in and are delivered."""
        return self.role == "active" and self.state in ("ready", "loading", UNKNOWN)

    @classmethod
    def of(cls, raw: Map) -> Status:
        active, detail, to_load = raw.get("active"), raw.get("detail"), raw.get("to_load")
        durability = raw.get("durability")
        texts = {name: str(raw[name]) for name in ("node", "version", "role", "state")}
        return cls(
            **texts,
            detail=None if detail is None else str(detail),
            epoch=int(raw["epoch"]),
            address=str(raw["address"]),
            since_ms=int(raw["since_ms"]),
            active=None if active is None else Active.of(active),
            store=str(raw["store"]),
            store_ok=bool(raw["store_ok"]),
            durability=None if durability is None else str(durability),
            now_ms=int(raw["now_ms"]),
            uptime_s=float(raw["uptime_s"]),
            loaded=int(raw["loaded"]),
            to_load=None if to_load is None else int(to_load),
            raw=raw,
        )


async def statuses(
    url: str | None = None,
    *,
    token: str | None = None,
    timeout: float = 3.0,
    name: str = NAME,
    ca: str | None = None,
    client_cert: str | None = None,
    client_key: str | None = None,
) -> dict[str, Status | TickwheelError]:
    """The answer of each address of ``url``, and of the active daemons that others name.

    Keys are ``tcp://HOST:PORT`` (``tls://``); an error stands for one that did not answer as it
    should. All arguments default as ``Client``'s do. Takes at most twice ``timeout`` seconds.
    """
    token = token if token is not None else os.environ.get("TICKWHEEL_TOKEN")
    found: dict[str, Status | TickwheelError] = {}

    async def ask(url: str) -> None:
        try:
            found[url] = await status_at(
                url, token=token, timeout=timeout, name=name, ca=ca,
                client_cert=client_cert, client_key=client_key,
            )  # fmt: skip
        except TickwheelError as error:
            found[url] = error

    url = url or os.environ.get("TICKWHEEL_URL") or DEFAULT_URL
    secure = is_secure(url)
    urls = dict.fromkeys(url_of(address, secure=secure) for address in parse_url(url))
    await asyncio.gather(*map(ask, urls))
    found = {url: found[url] for url in urls}
    named = _named(status for status in found.values() if isinstance(status, Status))
    named = {url for url in named if is_secure(url) == secure}  # a token goes nowhere else
    await asyncio.gather(*map(ask, sorted(named.difference(urls))))
    return found


def _named(known: Iterable[Status]) -> set[str]:
    """The URLs of active daemons that did not answer under the addresses they give."""
    given: set[str] = set()
    own: set[str] = set()
    for status in known:
        with suppress(BadRequest):
            own.add(_url(status.address))
        with suppress(BadRequest):
            if status.active is not None and status.role != "active":
                given.add(_url(status.active.address))
    return given - own


def _url(given: str) -> str:
    return url_of(parse_url(given)[0], secure=is_secure(given))


async def status_at(
    url: str,
    *,
    token: str | None = None,
    timeout: float = 3.0,
    name: str = NAME,
    ca: str | None = None,
    client_cert: str | None = None,
    client_key: str | None = None,
) -> Status:
    """What the daemon at ``url``, one address, says of itself; standbys answer, too.

    Raises Unreachable after ``timeout`` seconds, or what the daemon objects to.
    """
    addresses = parse_url(url)
    if len(addresses) != 1:
        raise BadRequest(f"status_at asks one address, not {len(addresses)}: {url!r:.200}")
    [address] = addresses
    tls = Trust(ca, client_cert, client_key).context() if is_secure(url) else None
    connection = Connection(lambda *delivery: None, lambda: None)
    try:
        async with asyncio.timeout(timeout):
            await connect(connection, address, tls)
            return await _ask(connection, address, token, name)
    except TimeoutError:
        raise Unreachable(f"{shown(address)} did not answer within {timeout:g} s") from None
    except (OSError, UnicodeError) as problem:
        error = explain(problem)
        raise type(error)(f"{shown(address)}: {error.message}") from None
    finally:
        connection.abort(Unreachable())


class _Question(Request):
    """A request whose answer is awaited on a connection of its own."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        super().__init__(float("inf"))
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answered(self, result: Any) -> None:
        self.answer.set_result(result)

    def failed(self, error: TickwheelError) -> None:
        fail(self.answer, error)


async def _ask(connection: Connection, address: Address, token: str | None, name: str) -> Status:
    options = {"v": PROTOCOL_VERSION, "session": None, "token": token, "client": name}
    info = await _answer(connection, 1, hello(1, options))
    if not isinstance(info, Mapping):
        raise ProtocolError("HELLO's answer is no map")
    try:
        answer = await _answer(connection, 2, encode((int(FrameType.STATUS), 2)))
    except UnknownType:
        return read(lambda known: _from_hello(known, address), info)
    return read(Status.of, answer)


async def _answer(connection: Connection, number: int, data: bytes) -> Any:
    question = _Question()
    connection.ask(number, question, data)
    connection.flush()
    ends: tuple[asyncio.Future[Any], ...] = (question.answer, connection.closed)
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not question.answer.done():
        raise connection.closed.result()
    return question.answer.result()


def _from_hello(info: Map, address: Address) -> Status:
    """The status of a daemon older than STATUS: it serves alone, or it would not have answered."""
    given = {
        "node": info["node"], "version": UNKNOWN, "role": "active", "state": UNKNOWN,
        "detail": None, "epoch": info["epoch"], "address": f"tcp://{shown(address)}",
        "since_ms": 0, "active": None, "store": UNKNOWN, "store_ok": True,
        "now_ms": info["now_ms"], "uptime_s": 0.0, "loaded": 0,
    }  # fmt: skip
    return Status.of(given)


@dataclass(frozen=True, slots=True)
class HeldKey:
    """An order key that a group holds until an operator acts."""

    id: int
    """The task that failed."""
    key: str | None
    since_ms: int
    attempt: int
    """How often it was delivered."""
    waiting: int
    """Tasks of the key behind it."""
    reason: str
    """Why the last attempt failed."""
    subscriber: str
    """Who had it."""
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def since(self) -> datetime:
        return moment(self.since_ms)

    @classmethod
    def of(cls, raw: Map) -> HeldKey:
        return cls(
            id=int(raw["id"]),
            key=raw["key"],
            since_ms=int(raw["since_ms"]),
            attempt=int(raw["attempt"]),
            waiting=int(raw["waiting"]),
            reason=str(raw["reason"]),
            subscriber=str(raw["subscriber"]),
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class KeyLine:
    """Tasks that wait for their turn: of an order key, or of a value that shares a group."""

    id: int
    """One of its tasks."""
    kind: str
    """"order" or "fair"."""
    value: Value | None
    """The order key, or the value; None: of tasks that have none."""
    state: str
    """Of the task whose turn it is: "ready", "in_flight", "retrying", "held"; or what holds back
    the value: "limited" (``limit_each``), "throttled" (``rate_each``)."""
    in_flight: int
    waiting: int
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, raw: Map) -> KeyLine:
        return cls(
            id=int(raw["id"]),
            kind=str(raw["kind"]),
            value=raw["value"],
            state=str(raw["state"]),
            in_flight=int(raw["in_flight"]),
            waiting=int(raw["waiting"]),
            raw=raw,
        )


_LINES = ("order_attempts", "order_failure", "fair_by", "limit_each", "rate_each")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """What holds for a group, or for a topic (then ``group`` is None)."""

    topic: str
    group: str | None
    paused: bool
    """Nothing is delivered; enqueues go on."""
    rate: float | None
    """Deliveries a second at most; None: no limit."""
    burst: int | None
    """Deliveries at once after a pause, when there is a rate."""
    retry: Retry | None
    """Its own policy; None: the one above it holds."""
    created: bool
    """Whether this very call made the group."""
    raw: Mapping[str, Any] = field(repr=False)
    if_pending: IfPending | None = None
    """Of a topic: what becomes of tasks whose key is pending and that do not say it themselves."""
    broadcast_only: bool = False
    """Of a topic: it has no groups, and what comes due is broadcast and ends."""
    tags: str | None = None
    """Of a group, its filter; both None: it wants everything."""
    where: str | None = None
    order_retry: float | None = None
    """Of a group, what holds, set or not: seconds after which a failed task of an order key is
    tried again."""
    order_attempts: int | None = None
    """After so many failed attempts comes"""
    order_failure: str | None = None
    """"hold": its key is held until an operator acts; "dead": it goes to the dead letters, and its
    key goes on; "retry": it is tried until it succeeds."""
    fair_by: str | None = None
    """Of a group, what has equal turns: "key", "tag", or the name of a property."""
    limit_each: int | None = None
    """So many deliveries of each value of it may be in flight."""
    rate_each: float | None = None
    """Deliveries a second of each value of it at most."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> GroupSettings:
        retry, rule = raw.get("retry"), raw.get("if_pending")
        return cls(
            topic=str(raw["topic"]),
            group=raw.get("group") or None,
            if_pending=None if rule is None else IfPending.of(rule),
            paused=bool(raw["paused"]),
            rate=raw.get("rate"),
            burst=raw.get("burst"),
            retry=None if retry is None else Retry.of(retry),
            created=bool(raw.get("created", False)),
            raw=raw,
            broadcast_only=bool(raw.get("broadcast_only", False)),
            tags=raw.get("tags"),
            where=raw.get("where"),
            order_retry=None if (ms := raw.get("order_retry_ms")) is None else ms / 1000,
            **{name: raw.get(name) for name in _LINES},
        )
