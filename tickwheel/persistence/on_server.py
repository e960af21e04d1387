"""The common parts of the stores on a server, Redis and PostgreSQL: the errors of a connection, the
settings in a URL, the reads of an open store, the registry of nodes, and the watch for a leader. It
imports no driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from tickwheel.model.values import SHARD_BITS, whole_number
from tickwheel.persistence.codec import decode_node, encode_node
from tickwheel.persistence.contract import (
    LEADER_WATCH_S,
    NodesSeen,
    StoreAway,
    StoreBroken,
    StoreError,
    StoreUnreachable,
    StoreUnusable,
)
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.model.kinds import ProgressKey
    from tickwheel.model.records import DeadRow
    from tickwheel.persistence.contract import (
        Administration,
        Election,
        NodeRecord,
        NodeRegistry,
        Reads,
        Siblings,
        Standby,
        Store,
        StoredTask,
    )

T = TypeVar("T")


class Closing(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=Closing)

# --- errors --------------------------------------------------------------------------------------


class ServerTrouble(StoreError):
    """The server was not reached, did not answer, or answered with an error. Each driver has a
    subclass ``ServerError`` for the last case."""


class NotConnected(ServerTrouble):
    """The server cannot be reached; nothing was sent."""


class NoReply(ServerTrouble):
    """A command was sent, but no answer was received."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent
        """Whether the call timed out on a connection that was not broken."""


def unusable(name: str, reason: str) -> StoreUnusable:
    return StoreUnusable(f"store {name}: {reason.removeprefix(f'{name}: ')}")


def unreachable(name: str, error: StoreError) -> StoreUnreachable:
    return StoreUnreachable(f"store {name}: {error.message.removeprefix(f'{name}: ')}")


@contextmanager
def opening_errors(name: str) -> Iterator[None]:
    """Convert trouble with the server to the errors of a store that cannot be opened."""
    try:
        yield
    except (NotConnected, NoReply) as error:
        raise unreachable(name, error) from error
    except ServerTrouble as error:
        raise unusable(name, error.message) from error


# --- kinds ---------------------------------------------------------------------------------------


class ServerKind(NamedTuple):
    """A kind of store on a server: what ``options_from`` returns, the others take. See the classes
    of ``contract`` with these names."""

    options_from: Callable[[str], Any]
    """Raises StoreUnusable for an invalid URL."""
    check: Callable[[Any], None]
    """Imports the driver. Raises StoreUnusable if a package or a file is missing."""
    store: Callable[[Any, int | None], Store]
    """Also takes the maximum bytes that the store keeps in memory; None: as the URL says."""
    election: Callable[[Any, int], Election]
    """Also takes the time to live of a lease in milliseconds."""
    nodes: Callable[[Any, int], NodeRegistry]
    """Also takes the number of shards."""
    siblings: Callable[[Any], Siblings]
    administration: Callable[[Any], Administration]
    has_one_layout: bool
    """Whether an upgrade of one shard upgrades all."""


# --- URLs ----------------------------------------------------------------------------------------

YES_OR_NO: Final = {"yes": True, "no": False}


class Address(NamedTuple):
    """The address of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def invalid(name: str, objection: str) -> StoreUnusable:
    """Return the error of a store's URL; ``name`` is the URL without secrets."""
    return StoreUnusable(f"store {name!r}: {objection}")


def address_from(name: str, text: str, port: int) -> Address:
    """Parse HOST, HOST:PORT or [HOST]:PORT in the URL of the store ``name``."""
    parts = urlsplit(f"//{text}")
    try:
        return Address(parts.hostname or "127.0.0.1", parts.port or port)
    except ValueError:
        objection = f"the port of {text!r} must be a number between 1 and 65535"
        raise invalid(name, objection) from None


def settings_from(
    name: str,
    query: str,
    types: Mapping[str, Any],
    *,
    never_zero: Collection[str],
    in_words: Collection[str] = (),
) -> dict[str, Any]:
    """Parse the settings in the query of a store's URL. ``types``: setting → "str", "int" or
    "bool". ``in_words``: settings with the values yes and no. Raise StoreUnusable."""
    settings: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        objection, type_ = "", types.get(key)
        if key == "shards":
            objection = "shards= is only for nodes (`tickwheel serve`); name one shard with shard="
        elif type_ is None:
            objection = f"unknown setting {key!r}; use {', '.join(sorted(types))}"
        elif type_ == "str":
            settings[key] = text
        elif key in in_words:
            if text not in YES_OR_NO:
                objection = f"{key}={text!r} is not one of {', '.join(YES_OR_NO)}"
            settings[key] = YES_OR_NO.get(text)
        elif (number := whole_number(text)) is None:
            objection = f"{key}={text!r:.60} is not a whole number of up to 19 digits"
        elif key in never_zero and not number:
            objection = f"{key} must be at least 1"
        else:
            settings[key] = bool(number) if type_ == "bool" else number
        if objection:
            raise invalid(name, objection)
    shard, shard_max = settings.get("shard", 0), (1 << SHARD_BITS) - 1
    if shard > shard_max:
        raise invalid(name, f"shard must be between 0 and {shard_max}, not {shard}")
    return settings


# --- an open store -------------------------------------------------------------------------------


class ServerStore:
    """The part of a store that only reads rows. A subclass sets ``_reader`` when it is opened."""

    _reader: Reads

    def __init__(self, name: str) -> None:
        self.name = name
        """The URL without secrets."""
        self._is_open = False
        self._durability = ""

    @property
    def durability(self) -> str:
        """See ``Store.durability``; it depends on the settings of the server at ``open``."""
        return self._durability

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        self._check_open()
        return await self._reader.read(ids)

    async def read_some(
        self, ids: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, StoredTask], Sequence[int]]:
        self._check_open()
        return await self._reader.read_some(ids, bytes_max)

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        self._check_open()
        return await self._reader.scan(after_id, limit, topic)

    async def scan_back(self, before_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        self._check_open()
        return await self._reader.scan_back(before_id, limit, topic)

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        self._check_open()
        return await self._reader.scan_dead(after, limit, topic, group)

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreBroken("the store is not open")


# --- the lease -----------------------------------------------------------------------------------

CALL_MS_MIN: Final = 100


class ServerElection:
    """The common part of the elections; see ``contract.Election``. The connection has time-outs
    well below the time to live."""

    def __init__(self, options: Any, ttl_ms: int, connect: Callable[[Any], Any]) -> None:
        """``connect`` returns the connection of these options."""
        self._options, self._ttl_ms = options, ttl_ms
        call_ms = max(CALL_MS_MIN, ttl_ms // 4)
        limits = {name: min(getattr(options, name), call_ms) for name in ("call_ms", "connect_ms")}
        self._link = connect(replace(options, **limits))
        self._standbys: tuple[Standby, ...] = ()

    @property
    def connections(self) -> int:
        return int(self._link.connections)

    @property
    def address(self) -> str:
        return str(self._link.address or "")

    @property
    def standbys(self) -> tuple[Standby, ...]:
        return self._standbys

    async def close(self) -> None:
        await self._link.close()


# --- the registry of nodes -----------------------------------------------------------------------


class ServerNodes:
    """The common part of the registries of nodes; see ``contract.NodeRegistry``. Records expire by
    the clock of the server, so the clocks of two machines are never compared."""

    def __init__(self, name: str, shards: int) -> None:
        self._name = name
        self._shards = shards

    async def beat(self, me: NodeRecord, instead_of: str = "") -> NodesSeen:
        return await self._write(me, encode_node(me), instead_of)

    async def leave(self, me: NodeRecord) -> None:
        await self._write(replace(me, claims=()), "", "")

    async def _write(self, me: NodeRecord, text: str, instead_of: str) -> NodesSeen:
        """Write the node's entry, or remove it if ``text`` is empty, and read all entries."""
        raise NotImplementedError

    def _check_shards(self, stored: int) -> None:
        if stored != self._shards:
            raise unusable(
                self._name,
                f"it was initialized for {stored} shards, but the setting shards is {self._shards}",
            )

    def _too_many(self, count: int, limit: int) -> StoreUnusable:
        return unusable(
            self._name,
            f"it has {count} nodes; the limit is {limit} (NODES_MAX). A dead node counts until"
            " leader_ttl_s has passed",
        )

    def _seen(
        self,
        me: NodeRecord,
        texts: Mapping[str, str],
        until_ms: Mapping[str, int],
        *,
        is_mine: bool,
        now_ms: int,
        placed: Mapping[int, str],
        drained: Collection[str],
        version: int,
    ) -> NodesSeen:
        """``texts`` and ``until_ms``: name of a node → its record, and the end of its entry.
        ``is_mine``: whether the entry with the name of ``me`` is of this run."""
        parsed = {name: decode_node(name, text) for name, text in texts.items()}
        records = {name: record for name, record in parsed.items() if record is not None}
        return NodesSeen(
            now_ms=now_ms,
            nodes={name: record for name, record in records.items() if is_mine or name != me.name},
            seen_ms={name: until_ms.get(name, 0) - node.ttl_ms for name, node in records.items()},
            placed=placed,
            drained=frozenset(drained),
            version=version,
            namesake=None if is_mine else records.get(me.name),
        )


# --- other shards --------------------------------------------------------------------------------

AWAY_S: Final = 1.0
"""For this many seconds after a time-out, a server is not called for other shards, each of which
would otherwise wait for the time-out again."""


class SharedLine:
    """A connection that is shared by shards, one call at a time."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._lock = asyncio.Lock()
        self._away_until_s = 0.0

    async def ready(self) -> None:
        async with self._lock:
            await self.connection.ready()

    async def read(self, ask: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call ``ask`` with the connection and these arguments. Raise as ``ask``, or NotConnected
        shortly after a time-out."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if loop.time() < self._away_until_s:
                raise NotConnected("the server did not answer a recent request for another shard")
            try:
                return await ask(self.connection, *args)
            except (NotConnected, NoReply):
                self._away_until_s = loop.time() + AWAY_S
                raise


class ServerSiblings:
    """The common part of the reads of other shards; see ``contract.Siblings``."""

    def __init__(self, connection: Any) -> None:
        self._line = SharedLine(connection)
        self._preparing: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.get_running_loop().create_task(self._prepare())

    async def _prepare(self) -> None:
        with suppress(StoreError):  # the first read raises it
            await self._line.ready()

    async def close(self) -> None:
        if self._preparing is not None:
            await cancel_all([self._preparing])
        await self._line.connection.close()


# --- administration ------------------------------------------------------------------------------


@asynccontextmanager
async def connected(name: str, connection: C) -> AsyncIterator[C]:
    """Yield a connection to the store ``name``, and close it. Raise StoreUnusable or
    StoreUnreachable."""
    try:
        with opening_errors(name):
            yield connection
    finally:
        await connection.close()


INIT_OWNER: Final = "init"
"""The owner of a shard that an operator has initialized."""
RESTORE_OWNERS: Final = "restore/"
"""Prefix of the owners of a shard while a restore fills it."""


def check_whole(shard: str, owner: str) -> None:
    """Raise StoreAway if a shard has no data of a daemon, or may not have all of it."""
    if owner in ("", INIT_OWNER) or owner.startswith(RESTORE_OWNERS):
        state = f"owned by {owner}" if owner else "empty"
        raise StoreAway(f"{shard} is {state}; no daemon uses it")


def check_restored(shard: str, owner: str, branch: str, opener: str) -> None:
    """Raise StoreUnusable if an interrupted restore has left this shard, unless another restore
    opens it, or an operator continues with its data (``branch``)."""
    if owner.startswith(RESTORE_OWNERS) and not branch and not opener.startswith(RESTORE_OWNERS):
        raise StoreUnusable(
            f"{shard} is incomplete, because a restore into it was interrupted; run `tickwheel init"
            " --force`, then `tickwheel restore` again"
        )


WATCH_STEP_S: Final = 0.25


def led(name: str, owner: str, address: str, shard: str) -> StoreUnusable:
    """Return the error of a change to a shard that a daemon leads."""
    return unusable(name, f"{owner} at {address} leads {shard}; stop it, and all standbys, first")


async def watch_lease(
    find: Callable[[], Awaitable[StoreUnusable | None]], watch_s: float | None
) -> None:
    """Raise the error that ``find`` returns if a daemon leads, within ``watch_s`` (default:
    LEADER_WATCH_S)."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + (LEADER_WATCH_S if watch_s is None else watch_s)
    while True:
        error = await find()
        if error is not None:
            raise error
        left_s = until_s - loop.time()
        if left_s <= 0:
            return
        await asyncio.sleep(min(WATCH_STEP_S, left_s))
