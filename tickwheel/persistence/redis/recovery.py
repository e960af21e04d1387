"""What a start needs from Redis: the small tables whole, then every task in due order.

All of it goes into the mirror as it passes. Batches may land meanwhile: they know better. From the
first chunk on a Redis that is away is waited for: this daemon serves, and what it has confirmed
since is kept by it alone if Redis comes back older.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from tickwheel import failpoints
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.records import Outcome
from tickwheel.persistence.codec import decode_dead, decode_endings, decode_progress
from tickwheel.persistence.contract import Handles, Keyed, Small, StoreAway
from tickwheel.persistence.redis.driver import Argument
from tickwheel.persistence.redis.keys import Keys, split_member
from tickwheel.persistence.redis.mirror import Filling, Mirror, SmallRecords, decode_records
from tickwheel.persistence.redis.reader import ReadClient
from tickwheel.persistence.redis.scripts import HANDLES
from tickwheel.persistence.redis.writer import Writer

ROWS_A_SCAN = 500
BYTES_A_CHUNK = 8 << 20
KEYS_AT_ONCE = 10_000
AWAY_RETRY_S = 0.5


class _Columns(NamedTuple):
    """Ids and key hashes of tasks that have a key."""

    ids: array[int]
    hashes: array[int]


class Recovering:
    """Reads what a start needs from Redis, and fills the mirror with it."""

    def __init__(
        self, asker: ReadClient, keys: Keys, writer: Writer, mirror: Mirror, key_hash: KeyHash
    ) -> None:
        self._key_hash = key_hash
        self._keyed = _Columns(array("q"), array("Q"))
        """The keyed tasks among the records that the stream has brought."""
        self._asker = asker
        self._keys = keys
        self._writer = writer
        self._mirror = mirror

    async def small(self, endings_max: int) -> Small:
        """See ``Store.recover_small``. No batch lands while it is read."""
        if self._mirror.complete:
            return self._mirror.small()
        await self._asker.look()
        async with self._writer.lock:
            small = SmallRecords(
                records=await self._fields("records"),
                progress=await self._rows("progress"),
                dead=await self._rows("dead_record"),
                outcomes=await self._endings(),
            )
            # What was there at the beginning is still there.
            await self._asker.look(locked=True)
            self._mirror.fill_small(small)
        outcomes: list[tuple[int, Outcome]] = []
        for _, record in small.outcomes:
            outcomes += decode_endings(record)
        return Small(
            records=decode_records(small.records),
            progress=[decode_progress(record) for _, record in small.progress],
            dead=sorted(
                (row.id, row.group, row.topic)
                for row in (decode_dead(record) for _, record in small.dead)
            ),
            outcomes=outcomes[-endings_max:],
        )

    async def _fields(self, name: str) -> list[tuple[bytes, bytes]]:
        """The fields of a hash with their values, each once: a scan may show one twice."""
        pairs = dict([pair async for pair in self._asker.pairs("HSCAN", name, ROWS_A_SCAN)])
        return list(pairs.items())

    async def _rows(self, name: str) -> list[tuple[tuple[int, str], bytes]]:
        return [(split_member(key), record) for key, record in await self._fields(name)]

    async def _endings(self) -> list[tuple[int, bytes]]:
        items = await self._asker.call("LRANGE", self._keys.named["endings"], 0, -1)
        parts = (item.partition(b":") for item in items)
        return [(int(count), record) for count, _, record in parts]

    async def handles(self, chunk: int) -> AsyncIterator[Handles]:
        """See ``Store.recover_handles``. Its chunks are not of one moment, but come to the same
        as the first was: tasks made meanwhile are left out, ended ones may be, and nobody changes
        a due time before all are loaded."""
        filling = self._mirror.begin_filling()
        self._keyed = _Columns(array("q"), array("Q"))
        whole = False
        score, name = b"", b""
        topics: dict[bytes, str] = {}
        first = True
        try:
            while True:
                filling.ask()
                args = (score, name, chunk, BYTES_A_CHUNK)
                pairs, values = await self._page(args, waits=not first)
                texts, records, keys = values[::3], values[1::3], values[2::3]
                pairs = pairs[: 2 * len(texts)]
                if not pairs:
                    whole = True
                    return
                name, score = pairs[-2], pairs[-1]
                ids, dues_ms = list(map(int, pairs[::2])), list(map(int, pairs[1::2]))
                self._mirror.fill(filling, ids, records)
                for text in set(texts):
                    topics.setdefault(text, text.decode())
                if keys.count(None) < len(keys):
                    self._hash(ids, [topics[text] for text in texts], keys)
                handles = _without(filling, Handles(ids, dues_ms, [topics[text] for text in texts]))
                if handles.ids:
                    yield handles
                if first:
                    failpoints.hit("recovery.middle")
                    first = False
        finally:
            self._mirror.end_filling(filling, whole=whole)

    def _hash(
        self, ids: Sequence[int], topics: Sequence[str], keys: Sequence[bytes | None]
    ) -> None:
        """Note the key hashes of those of the tasks that have a key."""
        hash_of, (keyed_ids, hashes) = self._key_hash, self._keyed
        for task_id, topic, key in zip(ids, topics, keys, strict=True):
            if key is not None:
                keyed_ids.append(task_id)
                hashes.append(hash_of(topic, key.decode("utf-8", "surrogatepass")))

    async def keys(self) -> AsyncIterator[Keyed]:
        """See ``Store.recover_keys``."""
        keyed, self._keyed = self._keyed, _Columns(array("q"), array("Q"))
        for start in range(0, len(keyed.ids), KEYS_AT_ONCE):
            stop = start + KEYS_AT_ONCE
            yield Keyed(keyed.ids[start:stop], keyed.hashes[start:stop])

    async def _page(self, args: Sequence[Argument], *, waits: bool) -> tuple[Any, Any]:
        while True:
            try:
                return await self._asker.script(HANDLES, args)
            except StoreAway:
                if not waits:
                    raise
            await asyncio.sleep(AWAY_RETRY_S)


def _without(filling: Filling, handles: Handles) -> Handles:
    """The handles without tasks that were made since the stream began, or have ended since."""
    gone: Any = filling.new | filling.ended if filling.ended else filling.new
    if not gone:
        return handles
    kept = [i for i, task_id in enumerate(handles.ids) if task_id not in gone]
    return Handles(
        [handles.ids[i] for i in kept],
        [handles.dues_ms[i] for i in kept],
        [handles.topics[i] for i in kept],
    )
