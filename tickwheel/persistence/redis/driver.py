"""The seam between the store and the libraries that speak to Redis; and the settings of the store,
with their units and reasons, and how a URL says them.

A ``Driver`` is one connection. It does not reconnect, retry or pool, and it has no time-outs: all
that is the store's business (``connection``), where a library is chosen and where an answer that
did not come decides the fate of a batch. Commands become bytes here, because both libraries' own
ways take three times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit

from tickwheel.errors import module_needs_extra
from tickwheel.model.values import SHARD_BITS
from tickwheel.persistence.contract import StoreError, StoreUnusable

with module_needs_extra("a store in Redis", "redis"):
    import hiredis

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
"""Scheme of a URL → how the server is found, and whether over TLS."""
SEEDS_MAX = 32
"""Addresses in a URL: of Sentinels, or of nodes."""
DRIVERS = ("redis", "asyncio-redis")
NAME_LENGTH_MAX = 64
NEVER_ZERO = ("call_ms", "connect_ms", "wait_ms", "resident_bytes_max", "endings_max")
"""Options that must not be 0: WAIT takes 0 for ever, and each batch keeps its own endings."""
YES_OR_NO = {"yes": True, "no": False}
IN_WORDS = ("mirror",)
"""Options whose value is yes or no."""


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options of the Redis store, which its URL may set: ``redis://host/0?wait_replicas=1``."""

    kind: str = SINGLE
    """How the server is found: at ``host`` and ``port``, or by asking the ``seeds``."""
    seeds: tuple[Address, ...] = ()
    """The Sentinels, or some nodes of the Cluster."""
    master: str = ""
    """The name under which the Sentinels know the master."""
    sentinel_user: str = ""
    sentinel_password_file: str = ""
    """A file with the password for the Sentinels; empty: they ask for none."""
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
    part: str = ""
    """What is kept for all shards together instead of a shard; not a setting of the URL."""
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
    mirror: bool = True
    """Whether everything that Redis holds is kept in memory too, so that a Redis that lost it gets
    it back. Without, only the newest batches are kept (``keep_ms``, ``keep_bytes``)."""
    resident_bytes_max: int = 2 << 30
    """With the mirror: everything that Redis holds is kept in memory up to this much of it."""
    endings_max: int = 100_000
    """For how many finished tasks the ending is remembered."""

    @property
    def name(self) -> str:
        """The address without secrets, for messages."""
        scheme = "rediss" if self.tls else "redis"
        if self.kind == SINGLE:
            return f"{scheme}://{Address(self.host, self.port)}/{self.db}"
        seeds = ",".join(map(str, self.seeds))
        query = f"?master={self.master}" if self.master else ""
        return f"{scheme}+{self.kind}://{seeds}/{self.db}{query}"

    @property
    def tag(self) -> str:
        """The hash tag of the shard, which all of its keys share."""
        return f"{self.prefix}:{self.namespace}:{self.part or self.shard}"


OF_SENTINELS = ("master", "sentinel_user", "sentinel_password_file")
_IN_PATH = ("kind", "seeds", "host", "port", "db", "username", "password", "tls", "part")
_IN_QUERY = {item.name: item.type for item in fields(RedisOptions) if item.name not in _IN_PATH}


def options_from(url: str) -> RedisOptions:
    """Options from a URL; raises StoreUnusable, never naming the password."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    name = f"{parts.scheme}://{hosts}{parts.path}"

    def wrong(why: str) -> StoreUnusable:
        return StoreUnusable(f"store {name!r}: {why}")

    kind, tls = SCHEMES[parts.scheme]
    port = SENTINEL_PORT if kind == SENTINEL else PORT
    seeds = tuple(_address(text, port, wrong) for text in hosts.split(","))
    if len(seeds) > (1 if kind == SINGLE else SEEDS_MAX):
        most = "it names one server" if kind == SINGLE else f"at most {SEEDS_MAX} are asked"
        raise wrong(f"{len(seeds)} addresses: {most}")
    db = parts.path.strip("/") or "0"
    if not db.isdecimal():
        raise wrong(f"the path is the number of the database, not {db!r}")
    username, _, password = credentials.partition(":")
    options = RedisOptions(
        kind=kind,
        seeds=() if kind == SINGLE else seeds,
        host=seeds[0].host,
        port=seeds[0].port,
        db=int(db),
        username=unquote(username),
        password=unquote(password),
        tls=tls,
    )
    options = replace(options, **_given(parts.query, kind, wrong))
    why = _objection(options)
    if why:
        raise wrong(why)
    return options


def _address(text: str, port: int, wrong: Callable[[str], StoreUnusable]) -> Address:
    """HOST, HOST:PORT or [HOST]:PORT."""
    parts = urlsplit(f"//{text}")
    try:
        return Address(parts.hostname or "127.0.0.1", parts.port or port)
    except ValueError:
        raise wrong(f"the port of {text!r} is not a number of 1 to 65535") from None


def _given(query: str, kind: str, wrong: Callable[[str], StoreUnusable]) -> dict[str, Any]:
    """The settings in a URL's query."""
    known = {
        key: of for key, of in _IN_QUERY.items() if kind == SENTINEL or key not in OF_SENTINELS
    }
    given: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        of = known.get(key)
        if key == "shards":
            raise wrong(
                "shards= is of a node, which `tickwheel serve` is; everything else is done to one"
                " of its shards, which shard= names"
            )
        if of is None:
            raise wrong(f"unknown setting {key!r}; known are {', '.join(sorted(known))}")
        if of == "str":
            given[key] = text
        elif key in IN_WORDS:
            if text not in YES_OR_NO:
                raise wrong(f"{key}={text!r} is not one of {', '.join(YES_OR_NO)}")
            given[key] = YES_OR_NO[text]
        elif not text.isdecimal():
            raise wrong(f"{key}={text!r} is not a whole number")
        elif key in NEVER_ZERO and not int(text):
            raise wrong(f"{key} must be at least 1")
        else:
            given[key] = bool(int(text)) if of == "bool" else int(text)
    return given


def _objection(options: RedisOptions) -> str:
    """What is wrong with the options; empty: nothing."""
    if options.driver not in DRIVERS:
        return f"driver={options.driver!r} is not one of {', '.join(DRIVERS)}"
    if options.kind == SENTINEL and not options.master:
        return "master= is missing: the name under which its sentinels know the master"
    if options.sentinel_user and not options.sentinel_password_file:
        return "sentinel_user= needs sentinel_password_file="
    if options.kind == CLUSTER and options.db:
        return f"the path is database {options.db}; a Redis Cluster has database 0 only"
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
    return Packed(sum([one.number for one in some]), b"".join([one.data for one in some]))


def pack(args: tuple[Argument, ...]) -> list[bytes]:
    """One command in the protocol's form; its large parts are not copied."""
    last = args[-1]
    if not isinstance(last, Packed):
        return [_command(args)]
    head = b"*%d\r\n%b" % (len(args) - 1 + last.number, _after_count(args[:-1]))
    return [head, last.data] if last.data else [head]


def _command(args: Sequence[Argument]) -> bytes:
    packed: bytes = hiredis.pack_command(tuple(args))  # type: ignore[arg-type]  # its tuple is too narrow
    return packed


def _after_count(args: Sequence[Argument]) -> bytes:
    """The arguments in the protocol's form, without their count in front."""
    packed = _command(args)
    return packed[packed.index(b"\n") + 1 :]


class Packed(NamedTuple):
    """Arguments in the protocol's form, which may only stand last in a command."""

    number: int
    """How many arguments there are."""
    data: bytes
    weight: int = 0
    """The arguments that it counts for where a script is cut into parts; 0: ``number``."""


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

    def give_up(self) -> bool:
        """End the call under way by NoReply, unless its answer is there already; whether it did.
        The connection is of no use then, and still has to be closed."""
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
