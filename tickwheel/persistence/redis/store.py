"""The Redis store: the contract over two lines, one that writes and one that reads.

Durable as far as Redis is: a batch is there when ``commit`` returns, and survives what Redis's
own ``appendonly`` and ``appendfsync`` make it survive, or ``wait_replicas`` of its replicas.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, AsyncIterator, Sequence

from tickwheel.persistence.redis import opening
from tickwheel.persistence.redis.backup import copy_to_sqlite
from tickwheel.persistence.redis.drivers import Answer, Away, Lost, check
from tickwheel.persistence.redis.layout import LAYOUT, Keys
from tickwheel.persistence.redis.line import Line
from tickwheel.persistence.redis.options import RedisOptions
from tickwheel.persistence.redis.reader import Reader
from tickwheel.persistence.redis.scripts_life import REWRITE
from tickwheel.persistence.redis.writer import Writer
from tickwheel.persistence.store import (
    Fenced,
    Handles,
    Opened,
    Small,
    StoreAway,
    StoreBroken,
    StoredTask,
    StoreError,
    StoreUnusable,
)
from tickwheel.wheel.effects import Effects, ProgressKey
from tickwheel.wheel.records import DeadRow

log = logging.getLogger(__name__)

ROOM_PART = 64
"""Room for enqueues means that 1/64 of the memory, or 1 MiB, is free."""
ROOM_BYTES_MIN = 1 << 20


class RedisStore:
    """See ``store.Store``. May be opened again after it was closed."""

    def __init__(self, options: RedisOptions) -> None:
        self.options = options
        self.keys = Keys(options.prefix, options.namespace, options.shard)
        self._is_open = False
        self._renew()

    def _renew(self) -> None:
        self._writing, self._reading = Line(self.options), Line(self.options)
        self._writer = Writer(self._writing, self.keys, self.options)
        self._reader = Reader(self._reading, self.keys, self.options, self._writer)

    @property
    def name(self) -> str:
        """The address without its secrets."""
        return self.options.name

    @property
    def incarnation(self) -> str:
        """Made when the shard was laid out; another one means other data."""
        return self._writer.incarnation

    @property
    def replays(self) -> int:
        """How often batches were replayed to a Redis that had lost them."""
        return self._writer.replays

    async def open(self, owner: str, now_ms: int, *, may_create: bool = True) -> Opened:
        """See ``Store.open``. ``may_create`` False: an empty Redis is refused (a standby that
        has seen data here must not lay out an empty shard while its owner may live)."""
        check(self.options)
        self._renew()
        line = self._writing
        try:
            await opening.inspect(line, self.options)
            opened, incarnation = await opening.begin_epoch(
                line, self.keys, self.options, owner, now_ms, may_create
            )
            await self._writer.begin(owner, opened, incarnation)
        except (Away, Lost, Answer) as error:
            await line.close()
            raise StoreUnusable(f"store {self.name}: {error.message}") from error
        except BaseException:
            await line.close()
            raise
        self._is_open = True
        return opened

    async def recover_small(self) -> Small:
        self._check_open()
        return await self._reader.small()

    async def recover_handles(self, chunk: int = 10_000) -> AsyncIterator[Handles]:
        self._check_open()
        async for handles in self._reader.handles(chunk):
            yield handles

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``; also raises StoreBehind and StoreLost."""
        self._check_open()
        applied = await self._writer.commit(epoch, owner, n, effects)
        if effects.enqueued:
            self._reader.committed(effects.enqueued)
        return applied

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        self._check_open()
        return await self._reader.read(ids)

    async def scan(self, after_id: int, limit: int, topic: str | None) -> list[StoredTask]:
        self._check_open()
        return await self._reader.scan(after_id, limit, topic)

    async def scan_dead(
        self, after: ProgressKey, limit: int, topic: str | None, group: str | None
    ) -> list[DeadRow]:
        self._check_open()
        return await self._reader.scan_dead(after, limit, topic, group)

    async def backup(self, path: str) -> int:
        """Into a SQLite store, which a daemon can be started on."""
        self._check_open()
        return await copy_to_sqlite(self._reader, self._writer, path)

    async def probe_room(self) -> bool:
        self._check_open()
        try:
            text: bytes = await self._reading.call("INFO", "memory")
        except (Away, Lost, Answer):
            return False
        rows = (row.split(":", 1) for row in text.decode().splitlines() if ":" in row)
        info = dict(rows)
        limit, used = int(info["maxmemory"]), int(info["used_memory"])
        return limit == 0 or limit - used >= max(ROOM_BYTES_MIN, limit // ROOM_PART)

    async def rewrite(self, batches: AsyncIterable[Effects]) -> None:
        """Lay the shard out anew and write what this daemon holds; after StoreBehind, StoreLost.

        ``batches`` hold everything: tasks, progress, dead letters, groups, sessions. The batch
        numbers go on as if nothing had happened. Refused (Fenced) while another owner, or
        another incarnation, is there. Cut short, it can be called again.
        """
        self._check_open()
        writer, line = self._writer, self._writing
        last = writer.last

        async def phase(name: str) -> None:
            args = (writer.epoch, writer.owner.encode(), writer.incarnation, LAYOUT, name, last, 0)
            reply = await line.run(REWRITE, self.keys.all, args)
            if reply[0] != b"applied":
                raise Fenced(f"{self.name}: {[part.decode() for part in reply]}")

        async with writer.rewriting():
            try:
                await phase("begin")
                n = 0
                async for effects in batches:
                    n += 1
                    await writer.commit_alone(n, effects)
                await phase("end")
            except (Away, Lost, Answer) as error:
                raise StoreAway(f"writing anew was cut short: {error.message}") from error
        log.warning("store %s: %s was written anew from memory", self.name, self.keys.shard)

    async def close(self, clean: bool) -> None:
        """``clean`` is recorded when Redis can be reached; else the next start is unclean."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if clean:
                await self._writer.end()
        except StoreError as error:
            log.warning("store %s: not closed cleanly: %s", self.name, error.message)
        finally:
            await self._writing.close()
            await self._reading.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise StoreBroken("the store is not open")
