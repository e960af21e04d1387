"""The leader's lease, the registry of nodes, and the data of other shards, each with a connection
of its own, so that a commit never delays a renewal.

The lease is a row whose end is a time of PostgreSQL's clock, and is compared with that clock only.
It also names the server's *timeline*, which changes when a standby is promoted: such a server can
lack the newest renewals, as it can lack batches.
"""

from __future__ import annotations

from dataclasses import astuple
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
)
from tickwheel.persistence.on_server import (
    ServerElection,
    ServerNodes,
    ServerSiblings,
    ServerTrouble,
    check_whole,
    connected,
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
from tickwheel.persistence.postgresql.layout import SQL

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tickwheel.model.kinds import RecordKey
    from tickwheel.persistence.contract import NodeRecord

STANDBYS_MAX: Final = 64
"""Maximum standbys that a look returns."""


class PostgresElection(ServerElection):
    """The election in PostgreSQL; see ``contract.Election``."""

    _link: Link

    def __init__(self, options: PostgresOptions, ttl_ms: int) -> None:
        super().__init__(options, ttl_ms, Link)

    async def prepare(self) -> None:
        async with connected(self._options.name, Link(self._options)) as link:
            await opening.inspect(link, self._options)

    async def look(self, me: Standby | None = None) -> ElectionState:
        shard = self._options.shard
        try:
            (row,) = await self._link.fetch(SQL["look"], shard)
            if me is not None and not row["is_standby"]:
                await self._announce(me)
            self._standbys = await self._listed()
        except ServerError as error:
            if not is_table_dropped(error):
                raise
            await opening.inspect(self._link, self._options)
            (row,) = await self._link.fetch(SQL["look"], shard)
        up_s = row["up_s"] if row["leased_here"] else min(row["up_s"], self._link.connected_s)
        return ElectionState(
            leader=Leader(*row[:6]) if row["left_ms"] > 0 else None,
            ttl_ms=max(0, row["left_ms"]),
            incarnation=row["incarnation"] or "",
            epoch=row["epoch"] or 0,
            owner=row["opened_by"] or "",
            clean=row["clean"] is not False,
            up_s=up_s,
            is_replica=row["is_standby"],
            leased_here=row["leased_here"],
            is_durable=True,
        )  # fmt: skip

    async def _announce(self, me: Standby) -> None:
        """Write the entry of a standby, which only informs people."""
        try:
            await self._link.fetch(
                SQL["announce"], self._options.shard, me.node, me.address, me.since_ms, me.http,
                self._ttl_ms + 1_000,
            )  # fmt: skip
        except ServerError as error:
            if is_table_dropped(error):
                raise

    async def _listed(self) -> tuple[Standby, ...]:
        rows = await self._link.fetch(SQL["standbys"], self._options.shard, STANDBYS_MAX)
        return tuple(Standby(*row) for row in rows)

    def _arguments(self, me: Leader) -> tuple[object, ...]:
        return self._options.shard, *astuple(me), self._ttl_ms

    async def acquire(self, me: Leader, instead_of: Leader | None = None) -> bool:
        replaced = me.owner if instead_of is None else instead_of.owner
        return bool(await self._link.fetch(SQL["acquire"], *self._arguments(me), replaced))

    async def renew(self, me: Leader) -> bool:
        renewed = bool(await self._link.fetch(SQL["renew"], *self._arguments(me)))
        self._standbys = await self._listed()
        return renewed

    async def release(self, me: Leader) -> None:
        await self._link.fetch(SQL["release"], self._options.shard, me.owner)


# --- the registry of nodes ------------------------------------------------------------------------


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
            ((now_ms,),) = await link.fetch(SQL["now_ms"])
            rows = await link.fetch(SQL["nodes"])
            placed = await link.fetch("SELECT shard, node FROM placed")
            drained = await link.fetch("SELECT node FROM drained")
            ((version,),) = await link.fetch("SELECT version FROM registry")
        return self._seen(
            me, {name: record for name, record, _ in rows}, {name: ms for name, _, ms in rows},
            is_mine=is_mine, now_ms=now_ms, placed=dict(map(tuple, placed)),
            drained=[node for (node,) in drained], version=version,
        )  # fmt: skip

    async def _enter(self, me: NodeRecord, text: str, instead_of: str) -> bool:
        """Write or remove the node's entry. Return whether the entry with its name is its own."""
        link = self._link
        await link.fetch(SQL["register"], self._shards)
        ((shards,),) = await link.fetch("SELECT shards FROM registry")
        self._check_shards(shards)
        await link.fetch(SQL["expire"])
        runs = {row["name"]: row["run"] for row in await link.fetch("SELECT name, run FROM node")}
        if text and me.name not in runs and len(runs) >= NODES_MAX:
            raise self._too_many(len(runs), NODES_MAX)
        if runs.get(me.name, me.run) not in (me.run, instead_of):
            return False
        if not text:
            await link.fetch("DELETE FROM node WHERE name = $1", me.name)
            return True
        await link.fetch(SQL["beat"], me.name, me.run, text, me.ttl_ms)
        for claim in me.claims:
            # The claim of a deposed leader changes nothing.
            if await link.fetch(SQL["route"], claim.shard, claim.epoch, claim.address):
                await link.fetch("UPDATE registry SET version = version + 1")
        return True

    async def place(self, shard: int, node: str | None) -> None:
        link = await self._inspected()
        if node is None:
            await link.fetch("DELETE FROM placed WHERE shard = $1", shard)
        else:
            await link.fetch(SQL["place"], shard, node)

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
_T = TypeVar("_T")


class PostgresSiblings(ServerSiblings):
    """The other shards of a schema; see ``contract.Siblings``. One connection reads them all."""

    def __init__(self, options: PostgresOptions) -> None:
        super().__init__(Link(options, LOOKUPS))
        self._name = options.name

    async def settings(self, shard: int, known_number: int | None) -> SiblingSettings:
        async def read(link: Link, at: str, owner: str) -> SiblingSettings:
            statement = SQL["records_of_kind"].format(at=at)
            rows = await link.fetch(statement, COUNTER.number)
            counter = decode_record(COUNTER, rows[0]["data"]) if rows else SettingsCounter()
            if counter.number == known_number:
                return SiblingSettings(counter, None)
            rows = await link.fetch(statement, GROUP.number)
            return SiblingSettings(counter, [decode_record(GROUP, row["data"]) for row in rows])

        return await self._read(shard, read) or SiblingSettings(SettingsCounter(), ())

    async def contains(self, shard: int, keys: Sequence[RecordKey]) -> Sequence[bool]:
        wanted = [(kind.number, key_text(key)) for kind, key in keys]

        async def read(link: Link, at: str, owner: str) -> Sequence[bool]:
            check_whole(f"shard {shard}", owner)
            statement = SQL["records_with_keys"].format(at=at)
            numbers, texts = [number for number, _ in wanted], [text for _, text in wanted]
            found = set(map(tuple, await link.fetch(statement, numbers, texts)))
            return [pair in found for pair in wanted]

        existing = await self._read(shard, read)
        if existing is None:
            raise StoreAway(f"shard {shard} is empty; no daemon uses it")
        return existing

    async def _read(self, shard: int, read: Callable[[Link, str, str], Awaitable[_T]]) -> _T | None:
        """Call ``read`` with the current generation and the owner of a shard, inside a snapshot.
        Return None for a shard that does not exist. Raise StoreAway."""

        async def ask(link: Link) -> _T | None:
            async with link.transaction(SNAPSHOT):
                rows = await link.fetch(SQL["shard"], shard)
                if not rows:
                    return None
                return await read(link, f"{shard}_{rows[0]['generation']}", rows[0]["owner"])

        for attempt in range(TRIES):
            try:
                return await self._line.read(ask)
            except ServerTrouble as error:
                # The shard may just have dropped this generation.
                if not is_table_dropped(error) or attempt == TRIES - 1:
                    raise StoreAway(f"shard {shard} of {self._name}: {error.message}") from error
        raise AssertionError("unreachable")
