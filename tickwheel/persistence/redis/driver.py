"""The seam between the store and the libraries that speak to Redis; and the settings of the store,
with their units and reasons, and how a URL says them.

A ``Driver`` is one connection. It does not reconnect, retry or pool, and it has no time-outs: all
that is the store's business (``connection``), where a library is chosen and where an answer that
did not come decides the fate of a batch. Commands become bytes here, because both libraries' own
ways take three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

import hiredis

from tickwheel.model.records import SHARD_BITS
from tickwheel.persistence.contract import StoreError, StoreUnusable

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
PORT = 6379
DRIVERS = ("redis", "asyncio-redis")
NAME_LENGTH_MAX = 64
NEVER_ZERO = ("call_ms", "connect_ms", "wait_ms", "resident_bytes_max", "endings_max")
"""Options that must not be 0: WAIT takes 0 for ever, and each batch keeps its own endings."""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options of the Redis store, which its URL may set: ``redis://host/0?wait_replicas=1``."""

    host: str = "127.0.0.1"
    port: int = PORT
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    tls_ca: str = ""
    """A file with the authorities to trust; empty: the system's."""
    tls_cert: str = ""
    tls_key: str = ""
    driver: str = "redis"
    prefix: str = "tw"
    namespace: str = "default"
    shard: int = 0
    allow_volatile_store: bool = False
    """Whether a Redis may be used that can lose or evict its data."""
    wait_replicas: int = 0
    """How many replicas must have a batch before it counts as durable."""
    wait_ms: int = 1_000
    """How long to wait for replicas, in ms; then the fate of the batch counts as unknown."""
    connect_ms: int = 750
    call_ms: int = 1_000
    """A producer gets an answer within 3 s; two more tries to connect fit in them."""
    load_ms: int = 60_000
    """How long an opening waits for a Redis that is still loading its data."""
    keep_ms: int = 10_000
    """Applied batches are kept this long, to be replayed to a Redis that lost them."""
    keep_bytes: int = 64 * MIB
    resident_bytes_max: int = 2 << 30
    """Everything that Redis holds is kept in memory too, up to this much of it."""
    endings_max: int = 100_000
    """For how many finished tasks the ending is remembered."""

    @property
    def name(self) -> str:
        """The address without secrets, for messages."""
        scheme = "rediss" if self.tls else "redis"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}/{self.db}"


_IN_QUERY = {
    item.name: item.type
    for item in fields(RedisOptions)
    if item.name not in ("host", "port", "db", "username", "password", "tls")
}


def options_from(url: str) -> RedisOptions:
    """Options from a URL; raises StoreUnusable, never naming the password."""
    parts = urlsplit(url)
    name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def wrong(why: str) -> StoreUnusable:
        return StoreUnusable(f"store {name!r}: {why}")

    try:
        port = parts.port or PORT
    except ValueError:
        raise wrong("the port is not a number of 1 to 65535") from None
    db = parts.path.strip("/") or "0"
    if not db.isdecimal():
        raise wrong(f"the path is the number of the database, not {db!r}")
    options = RedisOptions(
        host=parts.hostname or "127.0.0.1",
        port=port,
        db=int(db),
        username=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        tls=parts.scheme == "rediss",
    )
    given: dict[str, Any] = {}
    for key, text in parse_qsl(parts.query, keep_blank_values=True):
        kind = _IN_QUERY.get(key)
        if kind is None:
            raise wrong(f"unknown setting {key!r}; known are {', '.join(sorted(_IN_QUERY))}")
        if kind == "str":
            given[key] = text
        elif not text.isdecimal():
            raise wrong(f"{key}={text!r} is not a whole number")
        elif key in NEVER_ZERO and not int(text):
            raise wrong(f"{key} must be at least 1")
        else:
            given[key] = bool(int(text)) if kind == "bool" else int(text)
    options = replace(options, **given)
    why = _objection(options)
    if why:
        raise wrong(why)
    return options


def _objection(options: RedisOptions) -> str:
    """What is wrong with the options; empty: nothing."""
    if options.driver not in DRIVERS:
        return f"driver={options.driver!r} is not one of {', '.join(DRIVERS)}"
    if options.shard >> SHARD_BITS:
        return f"shard={options.shard} must be 0 to {(1 << SHARD_BITS) - 1}"
    for key in ("prefix", "namespace"):
        text = getattr(options, key)
        if (
            not 0 < len(text) <= NAME_LENGTH_MAX
            or set(text) & set("{}:*?[]\\ ")
            or not text.isascii()
        ):
            return f"{key}={text!r} must be 1 to {NAME_LENGTH_MAX} letters, digits, . _ or -"
    return ""


def pack_args(args: Sequence[bytes]) -> Packed:
    """These arguments in the protocol's form, as a part of a command."""
    return Packed(len(args), _after_count(args))


def joined(some: Sequence[Packed]) -> Packed:
    """Packed arguments put end to end."""
    return Packed(sum([one.count for one in some]), b"".join([one.data for one in some]))


def pack(args: tuple[Argument, ...]) -> list[bytes]:
    """One command in the protocol's form; its large parts are not copied."""
    last = args[-1]
    if not isinstance(last, Packed):
        return [_command(args)]
    head = b"*%d\r\n%b" % (len(args) - 1 + last.count, _after_count(args[:-1]))
    return [head, last.data] if last.data else [head]


def _command(args: Sequence[Argument]) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(args))  # type: ignore[arg-type]  # its tuple is too narrow
    return packed


def _after_count(args: Sequence[Argument]) -> bytes:
    """The arguments in the protocol's form, without their count in front."""
    packed = _command(args)
    return packed[packed.index(b"\n") + 1 :]


@dataclass(frozen=True, slots=True)
class Packed:
    """Arguments in the protocol's form, which may only stand last in a command."""

    count: int
    data: bytes
    weight: int = 0
    """The arguments that it counts for where a script is cut into parts; 0: ``count``."""


Argument = bytes | str | int | Packed

REFUSING = frozenset((
    "OOM", "LOADING", "READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY", "CLUSTERDOWN",
    "TRYAGAIN", "MOVED", "ASK", "NOAUTH", "WRONGPASS", "NOPERM",
))  # fmt: skip
"""Errors that Redis raises before the first write of a script: nothing was changed."""


class NotConnected(StoreError):
    """There is no connection, and nothing was sent."""


class NoReply(StoreError):
    """Something was sent, and no answer came."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent
        """Whether the connection stands, and only no answer came in time."""


class ServerError(StoreError):
    """Redis answered with an error; ``kind`` is its first word, such as OOM."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind} {text}".strip())
        self.kind = kind


class Driver(Protocol):
    """One connection to Redis, used by one call at a time."""

    async def call(self, *args: Argument) -> Any:
        """Send one command and wait for its answer: bytes, int, None, or a list of them.

        Raises Answer, or Lost: then the connection is of no use any more.
        """
        ...

    async def close(self) -> None:
        """Close the connection at once, whatever is under way. May be repeated."""
        ...


def answer(text: str) -> ServerError:
    """The error in the text of a reply; Redis before 7 wraps errors inside of scripts."""
    kind, _, rest = text.partition(" ")
    if kind == "ERR":
        for word in rest.split():
            if word.startswith("-") and word[1:].isupper():
                return ServerError(word[1:], rest)
    return ServerError(kind, rest)
