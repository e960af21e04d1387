"""The leader's lease, the registry of nodes, and the data of other shards, each with a connection
of its own, so that a commit never delays a renewal.

The lease is a row whose end is a time of PostgreSQL's clock, and is compared with that clock only.
It also names the server's *timeline*, which changes when a standby is promoted: such a server can
lack the newest renewals, as it can lack batches.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from tickwheel.limits import NODES_MAX
from tickwheel.model.kinds import COUNTER, GROUP
from tickwheel.model.records import SettingsCounter
from tickwheel.persistence.codec import decode_record, key_text
from tickwheel.persistence.contract import (
    ElectionState,
    Leader,
    NodesSeen,
    SiblingSettings,
    Standby,
    StoreAway,
    StoreError,
)
from tickwheel.persistence.on_server import (
    ServerElection,
    ServerNodes,
    ServerTrouble,
    check_whole,
)
from tickwheel.persistence.postgresql import opening
from tickwheel.persistence.postgresql.driver import (
    LOOKUPS,
    SNAPSHOT,
    Link,
    PostgresOptions,
    ServerError,
    is_table_dropped,
)
from tickwheel.persistence.postgresql.layout import KEY_CHARS, records_statement

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tickwheel.model.kinds import RecordKey
    from tickwheel.persistence.contract import NodeRecord

STANDBYS_MAX: Final = 64
_TIMELINE = (
    "CASE WHEN pg_is_in_recovery() THEN ''"
    " ELSE left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) END"
)
_LOOK = f"""
SELECT l.owner, l.address, l.since_ms, l.epoch AS lease_epoch, l.life, l.http,
    coalesce(ceil(1000 * extract(epoch FROM l.until - clock_timestamp())), 0)::bigint AS left_ms,
    coalesce(l.timeline = {_TIMELINE}, false) AS leased_here,
    s.incarnation, s.epoch, s.owner AS opened_by, s.clean,
    pg_is_in_recovery() AS is_standby,
    extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::bigint AS up_s
FROM (SELECT) one LEFT JOIN lease l ON l.shard = $1 LEFT JOIN shard s ON s.number = $1
"""
_UNTIL = "clock_timestamp() + ${} * interval '1 millisecond'"
_ACQUIRE = f"""
INSERT INTO lease (shard, owner, address, since_ms, epoch, life, http, until, timeline)
VALUES ($1, $2, $3, $4, $5, $6, $7, {_UNTIL.format("8::int")}, {_TIMELINE})
ON CONFLICT (shard) DO UPDATE SET owner = excluded.owner, address = excluded.address,
    since_ms = excluded.since_ms, epoch = excluded.epoch, life = excluded.life,
    http = excluded.http, until = excluded.until, timeline = excluded.timeline
WHERE lease.until <= clock_timestamp() OR lease.owner IN (excluded.owner, $9)
RETURNING 1
"""
_RENEW = f"""
UPDATE lease SET address = $3, since_ms = $4, epoch = $5, life = $6, http = $7,
    until = {_UNTIL.format("8::int")}, timeline = {_TIMELINE}
WHERE shard = $1 AND owner = $2 AND until > clock_timestamp()
RETURNING 1
"""
_RELEASE = "UPDATE lease SET until = to_timestamp(0) WHERE shard = $1 AND owner = $2"
_ANNOUNCE = f"""
INSERT INTO standby (shard, node, address, since_ms, http, until)
VALUES ($1, $2, $3, $4, $5, {_UNTIL.format("6::int")})
ON CONFLICT (shard, node, address) DO UPDATE SET since_ms = excluded.since_ms,
    http = excluded.http, until = excluded.until
"""
_STANDBYS = f"""
SELECT node, address, http, since_ms FROM standby
WHERE shard = $1 AND until > clock_timestamp() ORDER BY node, address LIMIT {STANDBYS_MAX}
"""


class PostgresElection(ServerElection):
    """The election in PostgreSQL; see ``contract.Election``."""

    _link: Link

    def __init__(self, options: PostgresOptions, ttl_ms: int) -> None:
        super().__init__(options, ttl_ms, Link)
        self._connected_s = 0.0

    @property
    def address(self) -> str:
        return self._link.address

    async def prepare(self) -> None:
        async with opening.connected(self._options) as link:
            await opening.inspect(link, self._options)

    async def _ready(self) -> None:
        """Connect. After a new connection, create the tables if they are missing."""
        if self._link.connected:
            return
        await self._link.ready()
        self._connected_s = asyncio.get_running_loop().time()

    async def look(self, me: Standby | None = None) -> ElectionState:
        await self._ready()
        shard = self._options.shard
        try:
            (row,) = await self._link.fetch(_LOOK, shard)
            if me is not None and not row["is_standby"]:
                await self._announce(me)
            self._standbys = await self._listed()
        except ServerError as error:
            if not is_table_dropped(error):
                raise
            await opening.inspect(self._link, self._options)
            (row,) = await self._link.fetch(_LOOK, shard)
        up_s = int(asyncio.get_running_loop().time() - self._connected_s)
        is_led = row["left_ms"] > 0
        return ElectionState(
            leader=Leader(
                row["owner"], row["address"], row["since_ms"], row["lease_epoch"], row["life"],
                row["http"],
            ) if is_led else None,
            ttl_ms=max(0, row["left_ms"]),
            incarnation=row["incarnation"] or "",
            epoch=row["epoch"] or 0,
            owner=row["opened_by"] or "",
            clean=row["clean"] is not False,
            up_s=row["up_s"] if row["leased_here"] else min(row["up_s"], up_s),
            is_replica=row["is_standby"],
            leased_here=row["leased_here"],
            is_durable=True,
        )  # fmt: skip

    async def _announce(self, me: Standby) -> None:
        """Write the entry of a standby, which only informs people."""
        try:
            await self._link.fetch(
                _ANNOUNCE, self._options.shard, me.node, me.address, me.since_ms, me.http,
                self._ttl_ms + 1_000,
            )  # fmt: skip
        except ServerError as error:
            if is_table_dropped(error):
                raise

    async def _listed(self) -> tuple[Standby, ...]:
        rows = await self._link.fetch(_STANDBYS, self._options.shard)
        return tuple(Standby(*row) for row in rows)

    def _arguments(self, me: Leader) -> tuple[object, ...]:
        return (
            self._options.shard, me.owner, me.address, me.since_ms, me.epoch, me.life, me.http,
            self._ttl_ms,
        )  # fmt: skip

    async def acquire(self, me: Leader, instead_of: Leader | None = None) -> bool:
        await self._ready()
        replaced = me.owner if instead_of is None else instead_of.owner
        return bool(await self._link.fetch(_ACQUIRE, *self._arguments(me), replaced))

    async def renew(self, me: Leader) -> bool:
        await self._ready()
        renewed = bool(await self._link.fetch(_RENEW, *self._arguments(me)))
        self._standbys = await self._listed()
        return renewed

    async def release(self, me: Leader) -> None:
        await self._ready()
        await self._link.fetch(_RELEASE, self._options.shard, me.owner)


# --- the registry of nodes ------------------------------------------------------------------------

_REGISTER = "INSERT INTO registry SELECT $1::int, 0 WHERE NOT EXISTS (SELECT FROM registry)"
_EXPIRE = "DELETE FROM node WHERE until <= clock_timestamp()"
_BEAT = f"""
INSERT INTO node (name, run, record, until)
VALUES ($1, $2, $3, {_UNTIL.format("4::int")})
ON CONFLICT (name) DO UPDATE SET run = excluded.run, record = excluded.record,
    until = excluded.until
"""
_CLAIM = """
INSERT INTO route (shard, epoch, address) VALUES ($1, $2, $3)
ON CONFLICT (shard) DO UPDATE SET epoch = excluded.epoch, address = excluded.address
WHERE (route.epoch, route.address) <> (excluded.epoch, excluded.address)
    AND route.epoch <= excluded.epoch
RETURNING 1
"""
_NODES = """
SELECT name, record, (1000 * extract(epoch FROM until))::bigint AS until_ms FROM node
"""


class PostgresNodes(ServerNodes):
    """The registry of the nodes that share a schema; see ``contract.NodeRegistry``. A beat is a
    transaction under an advisory lock."""

    def __init__(self, options: PostgresOptions, shards: int) -> None:
        super().__init__(options.name, shards)
        self._options = options
        self._link = Link(options)
        self._is_inspected = False

    async def _write(self, me: NodeRecord, text: str, instead_of: str) -> NodesSeen:
        link = await self._inspected()
        async with link.transaction():
            await link.fetch("SELECT pg_advisory_xact_lock($1)", opening.DDL_LOCK + 1)
            is_mine = await self._enter(me, text, instead_of)
            ((now_ms,),) = await link.fetch(
                "SELECT (1000 * extract(epoch FROM clock_timestamp()))::bigint"
            )
            rows = await link.fetch(_NODES)
            placed = await link.fetch("SELECT shard, node FROM placed")
            drained = await link.fetch("SELECT node FROM drained")
            ((version,),) = await link.fetch("SELECT version FROM registry")
        return self._seen(
            me,
            {row["name"]: row["record"] for row in rows},
            {row["name"]: row["until_ms"] for row in rows},
            is_mine=is_mine,
            now_ms=now_ms,
            placed={row["shard"]: row["node"] for row in placed},
            drained=[row["node"] for row in drained],
            version=version,
        )

    async def _enter(self, me: NodeRecord, text: str, instead_of: str) -> bool:
        """Write or remove the node's entry. Return whether the entry with its name is its own."""
        link = self._link
        await link.fetch(_REGISTER, self._shards)
        ((shards,),) = await link.fetch("SELECT shards FROM registry")
        self._check_shards(shards)
        await link.fetch(_EXPIRE)
        runs = {row["name"]: row["run"] for row in await link.fetch("SELECT name, run FROM node")}
        if text and me.name not in runs and len(runs) >= NODES_MAX:
            raise self._too_many(len(runs), NODES_MAX)
        if runs.get(me.name, me.run) not in (me.run, instead_of):
            return False
        if not text:
            await link.fetch("DELETE FROM node WHERE name = $1", me.name)
            return True
        await link.fetch(_BEAT, me.name, me.run, text, me.ttl_ms)
        for claim in me.claims:
            # The claim of a deposed leader changes nothing.
            if await link.fetch(_CLAIM, claim.shard, claim.epoch, claim.address):
                await link.fetch("UPDATE registry SET version = version + 1")
        return True

    async def place(self, shard: int, node: str | None) -> None:
        link = await self._inspected()
        if node is None:
            await link.fetch("DELETE FROM placed WHERE shard = $1", shard)
            return
        await link.fetch(
            "INSERT INTO placed VALUES ($1, $2) ON CONFLICT (shard) DO UPDATE SET node ="
            " excluded.node",
            shard, node,
        )  # fmt: skip

    async def drain(self, node: str, *, draining: bool) -> None:
        statement = "DELETE FROM drained WHERE node = $1"
        if draining:
            statement = "INSERT INTO drained VALUES ($1) ON CONFLICT DO NOTHING"
        await (await self._inspected()).fetch(statement, node)

    async def _inspected(self) -> Link:
        """Return the connection after the tables were created or checked once."""
        if not self._is_inspected:
            await opening.inspect(self._link, self._options)
            self._is_inspected = True
        return self._link

    async def close(self) -> None:
        await self._link.close()


# --- other shards ---------------------------------------------------------------------------------

TRIES: Final = 3
AWAY_S: Final = 1.0
"""For this many seconds after a time-out, PostgreSQL is not asked for other shards, each of which
would otherwise wait for the time-out again."""
_T = TypeVar("_T")


class PostgresSiblings:
    """The other shards of a schema; see ``contract.Siblings``. One connection reads them all."""

    def __init__(self, options: PostgresOptions) -> None:
        self._options = options
        self._link = Link(options, LOOKUPS)
        self._lock = asyncio.Lock()
        self._preparing: asyncio.Task[None] | None = None
        self._away_until_s = 0.0

    def prepare(self) -> None:
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        async with self._lock:
            with suppress(StoreError):
                await self._link.ready()

    async def settings(self, shard: int, known_number: int | None) -> SiblingSettings:
        async def read(at: str, owner: str) -> SiblingSettings:
            rows = await self._link.fetch(records_statement(at, f"kind = {COUNTER.number}"))
            counter = decode_record(COUNTER, rows[0]["data"]) if rows else SettingsCounter()
            if counter.number == known_number:
                return SiblingSettings(counter, None)
            rows = await self._link.fetch(records_statement(at, f"kind = {GROUP.number}"))
            return SiblingSettings(counter, [decode_record(GROUP, row["data"]) for row in rows])

        return await self._read(shard, read) or SiblingSettings(SettingsCounter(), ())

    async def contains(self, shard: int, keys: Sequence[RecordKey]) -> Sequence[bool]:
        wanted = [(kind.number, key_text(key)) for kind, key in keys]

        async def read(at: str, owner: str) -> Sequence[bool]:
            check_whole(f"shard {shard}", owner)
            statement = records_statement(
                at,
                f"(kind, left(key, {KEY_CHARS}), key) IN (SELECT kind, left(key, {KEY_CHARS}), key"
                " FROM unnest($1::int[], $2::text[]) AS u(kind, key))",
            )
            numbers, texts = [number for number, _ in wanted], [text for _, text in wanted]
            rows = await self._link.fetch(statement, numbers, texts)
            found = {(row["kind"], row["key"]) for row in rows}
            return [pair in found for pair in wanted]

        existing = await self._read(shard, read)
        if existing is None:
            raise StoreAway(f"shard {shard} is empty; no daemon uses it")
        return existing

    async def _read(self, shard: int, read: Callable[[str, str], Awaitable[_T]]) -> _T | None:
        """Call ``read`` with the current generation and the owner of a shard, inside a snapshot.
        Return None for a shard that does not exist. Raise StoreAway."""
        loop, name = asyncio.get_running_loop(), f"shard {shard} of {self._options.name}"
        async with self._lock:
            if loop.time() < self._away_until_s:
                raise StoreAway(f"{name}: no answer to a request for another shard")
            for attempt in range(TRIES):
                try:
                    async with self._link.transaction(SNAPSHOT):
                        rows = await self._link.fetch(
                            "SELECT generation, owner FROM shard WHERE number = $1", shard
                        )
                        return await read(f"{shard}_{rows[0][0]}", rows[0][1]) if rows else None
                except ServerTrouble as error:
                    # The shard may just have dropped this generation.
                    if not is_table_dropped(error) or attempt == TRIES - 1:
                        self._away_until_s = loop.time() + AWAY_S
                        raise StoreAway(f"{name}: {error.message}") from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait((self._preparing,))
        await self._link.close()
