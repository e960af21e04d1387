"""How one daemon says it is: its role, its state, and whom it knows to be active.

``status_at`` asks one address whatever its role, which the client's own connection cannot: that
one stands with the active daemon only. ``statuses`` asks all that there are.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tickwheel.client.addresses import DEFAULT_URL, Address, parse_url, shown
from tickwheel.client.connection import Connection, Request, hello
from tickwheel.client.futures import fail
from tickwheel.client.results import Map, read
from tickwheel.client.times import moment
from tickwheel.errors import BadRequest, ProtocolError, TickwheelError, UnknownType, Unreachable
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import PROTOCOL_VERSION, FrameType
from tickwheel.version import __version__

UNKNOWN = "unknown"
"""State of a daemon that is too old to be asked."""
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
    """Where it tells others to find it."""
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
    url: str | None = None, *, token: str | None = None, timeout: float = 3.0, name: str = NAME
) -> dict[str, Status | TickwheelError]:
    """The answer of each address of ``url``, and of the active daemons that others name.

    Keys are ``tcp://HOST:PORT``; an error stands for one that did not answer as it should.
    ``url`` and ``token`` default as ``Client``'s do. Takes at most twice ``timeout`` seconds.
    """
    token = token if token is not None else os.environ.get("TICKWHEEL_TOKEN")
    found: dict[str, Status | TickwheelError] = {}

    async def ask(url: str) -> None:
        try:
            found[url] = await status_at(url, token=token, timeout=timeout, name=name)
        except TickwheelError as error:
            found[url] = error

    listed = parse_url(url or os.environ.get("TICKWHEEL_URL") or DEFAULT_URL)
    urls = dict.fromkeys(f"tcp://{shown(address)}" for address in listed)
    await asyncio.gather(*map(ask, urls))
    found = {url: found[url] for url in urls}
    named = _named(status for status in found.values() if isinstance(status, Status))
    await asyncio.gather(*map(ask, sorted(named.difference(urls))))
    return found


def _named(known: Iterable[Status]) -> set[str]:
    """Where active daemons are that did not answer under the address they tell."""
    told: set[str] = set()
    own: set[str] = set()
    for status in known:
        with suppress(BadRequest):
            own.add(f"tcp://{shown(parse_url(status.address)[0])}")
        with suppress(BadRequest):
            if status.active is not None and status.role != "active":
                told.add(f"tcp://{shown(parse_url(status.active.address)[0])}")
    return told - own


async def status_at(
    url: str, *, token: str | None = None, timeout: float = 3.0, name: str = NAME
) -> Status:
    """What the daemon at ``url``, one address, says of itself; standbys answer, too.

    Raises Unreachable after ``timeout`` seconds, or what the daemon objects to.
    """
    addresses = parse_url(url)
    if len(addresses) != 1:
        raise BadRequest(f"status_at asks one address, not {len(addresses)}: {url!r:.200}")
    [address] = addresses
    connection = Connection(lambda *delivery: None, lambda: None)
    try:
        async with asyncio.timeout(timeout):
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: connection, *address)
            return await _ask(connection, address, token, name)
    except TimeoutError:
        raise Unreachable(f"{shown(address)} did not answer within {timeout:g} s") from None
    except (OSError, UnicodeError) as problem:
        raise Unreachable(f"{shown(address)}: {problem}") from None
    finally:
        connection.abort(Unreachable())


class _Question(Request):
    """A request whose answer is awaited on its own connection."""

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
    """A daemon from before STATUS: it serves alone, or would not have answered."""
    told = {
        "node": info["node"], "version": UNKNOWN, "role": "active", "state": UNKNOWN,
        "detail": None, "epoch": info["epoch"], "address": f"tcp://{shown(address)}",
        "since_ms": 0, "active": None, "store": UNKNOWN, "store_ok": True,
        "now_ms": info["now_ms"], "uptime_s": 0.0, "loaded": 0,
    }  # fmt: skip
    return Status.of(told)
