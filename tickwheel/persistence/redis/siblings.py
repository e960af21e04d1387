"""The other shards of a Redis: see ``contract.Siblings``.

Reads are plain commands on lines beside the store's. At one address, and behind Sentinels, all
shards are on the same master, and one line reads them all; in a Cluster each shard has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tickwheel.model.kinds import COUNTER, GROUP
from tickwheel.model.records import GroupRow, SettingsCounter
from tickwheel.persistence.codec import decode_record
from tickwheel.persistence.contract import SiblingSettings, StoreAway
from tickwheel.persistence.redis.connection import Connection
from tickwheel.persistence.redis.driver import (
    CLUSTER,
    NoReply,
    NotConnected,
    RedisOptions,
    ServerError,
)
from tickwheel.persistence.redis.layout import Keys, record_field

ROWS_A_SCAN = 10_000
"""Fields that one call looks at: sessions and all other records are among them."""
TRIES = 3
_COUNTER = record_field((COUNTER, COUNTER.key(SettingsCounter())))


class RedisSiblings:
    """The shards beside the one that the options name."""

    def __init__(self, options: RedisOptions) -> None:
        self._options = options
        self._lines: dict[int, Connection] = {}

    async def settings(self, shard: int, known: int | None) -> SiblingSettings:
        options = self._options
        keys = Keys(options.prefix, options.namespace, shard)
        place = shard if options.kind == CLUSTER else options.shard
        if place not in self._lines:
            self._lines[place] = Connection(replace(options, shard=place))
        line, records = self._lines[place], keys.named["records"]
        try:
            counter = await _counter(line, records)
            for _ in range(TRIES):
                if counter.number == known:
                    return SiblingSettings(counter, None)
                rows = await _groups(line, records)
                # What a scan finds is of one moment only if nothing has changed meanwhile.
                before, counter = counter, await _counter(line, records)
                if counter == before:
                    return SiblingSettings(counter, rows)
        except (NotConnected, NoReply, ServerError) as error:
            raise StoreAway(f"{keys.shard} of {options.name}: {error.message}") from error
        raise StoreAway(f"{keys.shard} of {options.name}: its groups change all the time")

    async def close(self) -> None:
        for line in self._lines.values():
            await line.close()


async def _counter(line: Connection, records: bytes) -> SettingsCounter:
    data = await line.call("HGET", records, _COUNTER)
    return SettingsCounter() if data is None else decode_record(COUNTER, data)


async def _groups(line: Connection, records: bytes) -> list[GroupRow]:
    found: dict[bytes, bytes] = {}  # a scan may show one twice
    cursor: Any = b"0"
    match = f"{GROUP.name} *"
    while True:
        cursor, items = await line.call(
            "HSCAN", records, cursor, "MATCH", match, "COUNT", ROWS_A_SCAN
        )
        found.update(_pairs(items))
        if cursor == b"0":
            return [decode_record(GROUP, data) for data in found.values()]


def _pairs(flat: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)
