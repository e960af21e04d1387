"""The interface to the Redis libraries, and the options of the store, which a URL sets.

A ``Driver`` is one connection, without reconnection, retries, a pool or time-outs. ``connection``
adds these and chooses the library. Commands are encoded here, because the encoders of both
libraries take three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from tickwheel.errors import module_needs_extra
from tickwheel.model.values import whole_number
from tickwheel.persistence.on_server import (
    Address,
    ServerTrouble,
    address_from,
    invalid,
    settings_from,
)

with module_needs_extra("a store in Redis", "redis"):
    import hiredis

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
PORT = 6379
SENTINEL_PORT = 26379
SINGLE, SENTINEL, CLUSTER = "single", "sentinel", "cluster"
SCHEMES = {
    "redis": (SINGLE, False),
    "rediss": (SINGLE, True),
    "redis+sentinel": (SENTINEL, False),
    "rediss+sentinel": (SENTINEL, True),
    "redis+cluster": (CLUSTER, False),
    "rediss+cluster": (CLUSTER, True),
}
"""Scheme of a URL → (how to find the server, whether TLS is used)."""
SEEDS_MAX = 32
"""Maximum number of addresses of Sentinels or nodes in a URL."""
DRIVERS = ("redis", "asyncio-redis")
NAME_LENGTH_MAX = 64
NEVER_ZERO = ("call_ms", "connect_ms", "wait_ms", "resident_bytes_max", "endings_max")
"""Options that must not be 0. For example, WAIT treats 0 as no time-out."""
IN_WORDS = ("mirror",)
"""Options with the values yes and no."""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options of the Redis store, also as a URL query: ``redis://host/0?wait_replicas=1``."""

    kind: str = SINGLE
    """``SINGLE``: the server is at ``host`` and ``port``. Otherwise the ``seeds`` know its
    address."""
    seeds: tuple[Address, ...] = ()
    """The Sentinels, or some nodes of the Cluster."""
    master: str = ""
    """The name by which the Sentinels know the master."""
    sentinel_user: str = ""
    sentinel_password_file: str = ""
    """File with the password for the Sentinels; empty: no password."""
    host: str = "127.0.0.1"
    port: int = PORT
    db: int = 0
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    tls_ca: str = ""
    """File with the trusted certificate authorities; empty: those of the system."""
    tls_cert: str = ""
    tls_key: str = ""
    driver: str = "redis"
    prefix: str = "tw"
    namespace: str = "default"
    shard: int = 0
    part: str = ""
    """Name of data that belongs to all shards, used in keys instead of ``shard``; never in a
    URL."""
    allow_volatile_store: bool = False
    """Whether to accept a Redis that can lose or evict its data."""
    wait_replicas: int = 0
    """Number of replicas that must have received a batch before it counts as durable."""
    wait_ms: int = 1_000
    """Maximum milliseconds to wait for replicas; after that, the outcome is unknown."""
    connect_ms: int = 750
    """Maximum milliseconds to connect."""
    call_ms: int = 1_000
    """Maximum milliseconds to wait for an answer. A producer must get its answer within 3 s, and
    two more attempts to connect fit into that time."""
    load_ms: int = 60_000
    """Maximum milliseconds that a starting daemon waits for Redis to load its data."""
    keep_ms: int = 10_000
    """Milliseconds for which applied batches are kept, to replay them if Redis loses them."""
    keep_bytes: int = 64 * MIB
    """Maximum bytes of these batches."""
    mirror: bool = True
    """Whether the daemon keeps all data in memory, to write it again if Redis loses it. Otherwise
    the daemon keeps only the newest batches (``keep_ms``, ``keep_bytes``)."""
    resident_bytes_max: int = 2 << 30
    """Maximum bytes of the mirror; further tasks are refused."""
    endings_max: int = 100_000
    """Number of finished tasks whose outcomes are kept."""

    @property
    def name(self) -> str:
        """The URL without secrets, for messages."""
        scheme = "rediss" if self.tls else "redis"
        if self.kind == SINGLE:
            return f"{scheme}://{Address(self.host, self.port)}/{self.db}"
        seeds = ",".join(map(str, self.seeds))
        query = f"?master={self.master}" if self.master else ""
        return f"{scheme}+{self.kind}://{seeds}/{self.db}{query}"

    @property
    def tag(self) -> str:
        """The hash tag in all keys of the shard."""
        return f"{self.prefix}:{self.namespace}:{self.part or self.shard}"


SENTINEL_SETTINGS = ("master", "sentinel_user", "sentinel_password_file")
_IN_PATH = ("kind", "seeds", "host", "port", "db", "username", "password", "tls", "part")
_IN_QUERY = {item.name: item.type for item in fields(RedisOptions) if item.name not in _IN_PATH}


def options_from(url: str) -> RedisOptions:
    """Return the options in a URL. Raise StoreUnusable, without the password in its message."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    name = f"{parts.scheme}://{hosts}{parts.path}"
    kind, tls = SCHEMES[parts.scheme]
    port = SENTINEL_PORT if kind == SENTINEL else PORT
    seeds = tuple(address_from(name, text, port) for text in hosts.split(","))
    if len(seeds) > (1 if kind == SINGLE else SEEDS_MAX):
        seeds_max = 1 if kind == SINGLE else SEEDS_MAX
        raise invalid(name, f"it has {len(seeds)} addresses; the maximum is {seeds_max}")
    path = parts.path.strip("/")
    db = whole_number(path or "0")
    if db is None:
        raise invalid(name, f"the path must be a database number, not {path!r:.60}")
    username, _, password = credentials.partition(":")
    options = RedisOptions(
        kind=kind,
        seeds=() if kind == SINGLE else seeds,
        host=seeds[0].host,
        port=seeds[0].port,
        db=db,
        username=unquote(username),
        password=unquote(password),
        tls=tls,
    )
    not_here = () if kind == SENTINEL else SENTINEL_SETTINGS
    types = {key: type_ for key, type_ in _IN_QUERY.items() if key not in not_here}
    settings = settings_from(name, parts.query, types, never_zero=NEVER_ZERO, in_words=IN_WORDS)
    options = replace(options, **settings)
    objection = _objection(options)
    if objection:
        raise invalid(name, objection)
    return options


def _objection(options: RedisOptions) -> str:
    """Return the reason why the options are invalid, or an empty text if they are valid."""
    if options.driver not in DRIVERS:
        return f"driver={options.driver!r} is not one of {', '.join(DRIVERS)}"
    if options.kind == SENTINEL and not options.master:
        return "master= is missing, the sentinels' name of the master"
    if options.sentinel_user and not options.sentinel_password_file:
        return "sentinel_user= needs sentinel_password_file="
    if options.kind == CLUSTER and options.db:
        return f"the database of a Redis Cluster must be 0, not {options.db}"
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
    """Encode these arguments for the protocol, as a part of a command."""
    return Packed(len(args), _after_count(args))


def joined(parts: Sequence[Packed]) -> Packed:
    """Concatenate packed arguments."""
    return Packed(sum([part.number for part in parts]), b"".join([part.data for part in parts]))


def pack(args: tuple[Argument, ...]) -> list[bytes]:
    """Encode one command for the protocol, without copying its large parts."""
    last = args[-1]
    if not isinstance(last, Packed):
        return [_command(args)]
    head = b"*%d\r\n%b" % (len(args) - 1 + last.number, _after_count(args[:-1]))
    return [head, last.data] if last.data else [head]


def _command(args: Sequence[Argument]) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(args))  # type: ignore[arg-type]  # its tuple is too narrow
    return packed


def _after_count(args: Sequence[Argument]) -> bytes:
    """Encode the arguments for the protocol, without their count."""
    packed = _command(args)
    return packed[packed.index(b"\n") + 1 :]


class Packed(NamedTuple):
    """Encoded arguments, which must be last in a command."""

    number: int
    """Number of arguments."""
    data: bytes
    weight: int = 0
    """Number of arguments that count towards ``PART_ARGS_MAX``; 0: ``number``."""


Argument = bytes | str | int | Packed

REFUSING = frozenset((
    "OOM", "LOADING", "READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY", "CLUSTERDOWN",
    "TRYAGAIN", "MOVED", "ASK", "NOAUTH", "WRONGPASS", "NOPERM",
))  # fmt: skip
"""Errors that Redis raises before the first write of a script, so that nothing has changed."""


class ServerError(ServerTrouble):
    """Redis answered with an error; ``kind`` is its first word, such as OOM."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind} {text}".strip())
        self.kind = kind


class Driver(Protocol):
    """One connection to Redis, used by one call at a time."""

    async def call(self, *args: Argument) -> Any:
        """Send one command and return its answer: bytes, int, None, or a list of these. Raise
        ServerError, or NoReply, after which the connection must not be used again."""
        ...

    def give_up(self) -> bool:
        """End the current call with NoReply. Return False if its answer has already arrived. If
        True is returned, do not use the connection again, but close it."""
        ...

    async def close(self) -> None:
        """Close the connection at once, even during a call. Can be repeated."""
        ...


def server_error(text: str) -> ServerError:
    """Return the error described by the text of a reply. Redis before 7 wraps errors of scripts."""
    kind, _, text_after_kind = text.partition(" ")
    if kind == "ERR":
        for part in text_after_kind.split():
            if part.startswith("-") and part[1:].isupper():
                return ServerError(part[1:], text_after_kind)
    return ServerError(kind, text_after_kind)
