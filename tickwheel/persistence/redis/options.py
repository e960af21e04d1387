"""Settings of the Redis store, with their units and reasons, and how a URL says them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tickwheel.model.records import SHARD_BITS
from tickwheel.persistence.contract import StoreUnusable

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
