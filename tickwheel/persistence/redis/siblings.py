"""The other shards of a Redis; see ``contract.Siblings``.

Reads are plain commands on connections separate from the store's. At one address, and with
Sentinels, all shards are on the same master, and one connection reads them all. In a Cluster there
is one connection per master. One per shard would make the number of connections grow with the
square of the number of shards. The locations of slots are cached until a master refuses a call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tickwheel.model.kinds import COUNTER, GROUP, RecordKey
from tickwheel.model.records import GroupRow, SettingsCounter
from tickwheel.persistence.codec import decode_record
from tickwheel.persistence.contract import SiblingSettings, StoreAway
from tickwheel.persistence.on_server import (
    Address,
    NoReply,
    NotConnected,
    ServerSiblings,
    ServerTrouble,
    SharedLine,
    check_whole,
)
from tickwheel.persistence.redis.connection import (
    SHARD_MOVED_ERRORS,
    TEMPORARY_ERRORS,
    TEMPORARY_RETRY_S,
    Connection,
    SlotRange,
    master_of,
    slot_of,
    slot_ranges,
)
from tickwheel.persistence.redis.driver import CLUSTER, SINGLE, RedisOptions, ServerError
from tickwheel.persistence.redis.layout import GROUPS, Keys, record_field

ROWS_PER_SCAN = 10_000
"""Number of fields that one call scans, including sessions and all other records."""
TRIES = 3
_T = TypeVar("_T")
_Ask = Callable[[Connection, Keys], Awaitable[_T]]
_COUNTER = record_field((COUNTER, COUNTER.key(SettingsCounter())))
_GROUP = f"{GROUP.name} *"
"""Pattern of the fields of groups."""


class RedisSiblings(ServerSiblings):
    """The other shards of a store. The options name the shard of this daemon, to whose master the
    first connection is."""

    def __init__(self, options: RedisOptions) -> None:
        super().__init__(Connection(options))
        self._options = options
        self._masters = _Masters(options, self._line) if options.kind == CLUSTER else None

    async def _prepare(self) -> None:
        await super()._prepare()
        if self._masters is not None:
            with contextlib.suppress(ServerTrouble):
                await self._masters.ready()

    async def settings(self, shard: int, known_number: int | None) -> SiblingSettings:
        return await self._read(shard, lambda link, keys: _settings(link, keys, known_number))

    async def contains(self, shard: int, keys: Sequence[RecordKey]) -> Sequence[bool]:
        fields = [record_field(key) for key in keys]

        async def check(link: Connection, its: Keys) -> None:
            owner, rewriting = await link.call("HMGET", its.named["wheel"], "owner", "rewriting")
            check_whole(its.shard, "" if rewriting is not None else (owner or b"").decode())

        async def read(link: Connection, its: Keys) -> list[Any]:
            await check(link, its)
            records: list[Any] = await link.call("HMGET", its.named["records"], *fields)
            await check(link, its)
            return records

        return [record is not None for record in await self._read(shard, read)]

    async def _read(self, shard: int, ask: _Ask[_T]) -> _T:
        """Call ``ask`` for a shard. Raise StoreAway."""
        options = replace(self._options, shard=shard)
        keys = Keys(options.prefix, options.namespace, shard)
        try:
            if self._masters is None:
                return await self._line.read(ask, keys)
            return await self._of_master(self._masters, slot_of(options), keys, ask)
        except ServerTrouble as error:
            raise StoreAway(f"{keys.shard} of {options.name}: {error.message}") from error

    async def _of_master(self, masters: _Masters, slot: int, keys: Keys, ask: _Ask[_T]) -> _T:
        """Call ``ask`` in a Cluster, and wait up to ``call_ms`` for a slot in migration."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._options.call_ms / 1000
        while True:
            try:
                return await (await masters.line(slot)).read(ask, keys)
            except (NotConnected, NoReply):
                masters.forget()
                raise
            except ServerError as error:
                if error.kind in SHARD_MOVED_ERRORS:
                    masters.forget()
                elif error.kind not in TEMPORARY_ERRORS:
                    raise
                if loop.time() >= until_s:
                    raise
            await asyncio.sleep(TEMPORARY_RETRY_S)

    async def close(self) -> None:
        await super().close()
        if self._masters is not None:
            await self._masters.close()


class _Masters:
    """Connections to the masters of a Cluster."""

    def __init__(self, options: RedisOptions, slots_line: SharedLine) -> None:
        """``slots_line``: the connection on which the locations of all slots are read."""
        self._options = options
        self._slots_connection = slots_line.connection
        self._asking = asyncio.Lock()
        self._ranges: Sequence[SlotRange] = ()
        """The locations of all slots; empty: unknown."""
        self._lines: dict[Address, SharedLine] = {}

    async def line(self, slot: int) -> SharedLine:
        """Return the connection to a slot's master. Raise ServerTrouble."""
        await self._load_slots()
        address = master_of(slot, self._ranges)
        if address is None:
            raise NotConnected(f"no node serves slot {slot}")
        return self._line_to(address)

    def _line_to(self, address: Address) -> SharedLine:
        if address not in self._lines:
            host, port = address
            options = replace(self._options, kind=SINGLE, host=host, port=port)
            self._lines[address] = SharedLine(Connection(options))
        return self._lines[address]

    async def ready(self) -> None:
        """Connect to all masters. Raise ServerTrouble."""
        await self._load_slots()
        lines = [self._line_to(slots.nodes[0]) for slots in self._ranges]
        await asyncio.gather(*(line.connection.ready() for line in lines))

    async def _load_slots(self) -> None:
        async with self._asking:
            if self._ranges:
                return
            answer = await self._slots_connection.call("CLUSTER", "SLOTS")
            assert self._slots_connection.address is not None, "it has answered"
            self._ranges = slot_ranges(answer, self._slots_connection.address)
            for address in self._lines.keys() - {slots.nodes[0] for slots in self._ranges}:
                await self._lines.pop(address).connection.close()

    def forget(self) -> None:
        """Forget the locations of slots, so that they are looked up again."""
        self._ranges = ()

    async def close(self) -> None:
        for line in self._lines.values():
            await line.connection.close()


async def _settings(
    connection: Connection, keys: Keys, known_number: int | None
) -> SiblingSettings:
    records = keys.named["records"]
    if known_number is not None:
        counter = _counter_of(await connection.call("HGET", records, _COUNTER))
        if counter.number == known_number:
            return SiblingSettings(counter, None)
    counter, groups = await _groups(connection, keys)
    if groups is not None:
        return SiblingSettings(counter, groups)
    for _ in range(TRIES):
        rows = await _scan(connection, records)
        # The result of a scan is consistent only if no setting has changed during the scan.
        before, (counter, _) = counter, await _groups(connection, keys)
        if counter == before:
            return SiblingSettings(counter, rows)
    raise StoreAway(f"the groups of {keys.shard} changed during each of {TRIES} scans")


async def _groups(
    connection: Connection, keys: Keys
) -> tuple[SettingsCounter, list[GroupRow] | None]:
    """Return a shard's counter and its groups, None for a shard with too many records. Raise
    StoreAway if the shard is incomplete: groups that it lacks have not been deleted."""
    names = keys.named["records"], keys.named["wheel"]
    reply = await connection.run(GROUPS, names, (_COUNTER, _GROUP, ROWS_PER_SCAN))
    if not reply:
        raise StoreAway(f"{keys.shard} is incomplete at the moment")
    data, *groups = reply
    return _counter_of(data or None), _rows(_pairs(groups[0])) if groups else None


def _counter_of(data: bytes | None) -> SettingsCounter:
    return SettingsCounter() if data is None else decode_record(COUNTER, data)


async def _scan(connection: Connection, records: bytes) -> list[GroupRow]:
    fields: dict[bytes, bytes] = {}  # a scan can return a field twice
    cursor: Any = b"0"
    while True:
        cursor, items = await connection.call(
            "HSCAN", records, cursor, "MATCH", _GROUP, "COUNT", ROWS_PER_SCAN
        )
        fields.update(_pairs(items))
        if cursor == b"0":
            return _rows(fields.items())


def _rows(fields: Iterable[tuple[bytes, bytes]]) -> list[GroupRow]:
    return [decode_record(GROUP, data) for data in dict(fields).values()]


def _pairs(flat: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
