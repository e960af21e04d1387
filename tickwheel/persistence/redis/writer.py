"""Batches to Redis: fenced, numbered, and whole whatever becomes of the connection.

Every connection claims the shard before it writes. The claim voids whatever an older connection
may still have under way and tells the last batch, so that from then on the fate of each batch
is known. It is also where a Redis that lost something shows. Invariants:

* ``CommitUnknown`` is raised for a batch only while its script may still be applied.
* A batch too large for one script is staged, sealed (from there on it counts), then applied in
  parts; nothing else happens to the shard before the last part.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tickwheel.persistence.redis.drivers import Answer, Argument, Away, Lost
from tickwheel.persistence.redis.encode import operations, parts
from tickwheel.persistence.redis.history import History
from tickwheel.persistence.redis.layout import Keys, id_text
from tickwheel.persistence.redis.line import Line
from tickwheel.persistence.redis.options import RedisOptions
from tickwheel.persistence.redis.scripts import APPLY_PART, CLAIM, COMMIT, SEAL, STAGE, Script
from tickwheel.persistence.store import (
    CommitRefused,
    CommitUnknown,
    Fenced,
    Opened,
    StoreBehind,
    StoreBroken,
    StoreError,
    StoreLost,
)
from tickwheel.wheel.effects import Effects

log = logging.getLogger(__name__)

REFUSING = frozenset(
    (
        "OOM",
        "LOADING",
        "READONLY",
        "MASTERDOWN",
        "MISCONF",
        "NOREPLICAS",
        "BUSY",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "MOVED",
        "ASK",
        "NOAUTH",
        "WRONGPASS",
        "NOPERM",
    )
)
"""Redis says these before the first write of a script: nothing was changed."""
ROUNDS_MAX = 5
"""Tries to bring one batch home before its fate is left to the next call."""


class _Again(Exception):
    """The connection has to be claimed anew, then the same batch sent again."""


class Writer:
    """The only one that changes the shard while this daemon owns it."""

    def __init__(self, line: Line, keys: Keys, options: RedisOptions) -> None:
        self._line = line
        self._keys = keys
        self._options = options
        self._history = History(options.keep_ms, options.keep_bytes)
        self._claimed = 0
        self._link = b""
        self._unknown = 0
        self._unreplicated = False
        self._rewriting = False
        self.lock = asyncio.Lock()
        """Held while a batch is on its way; a reader that needs several scripts takes it too."""
        self.staged = False
        """A large batch is being applied: what is read now may be half of it."""
        self.epoch = 0
        self.owner = ""
        self.incarnation = ""
        self.last = 0
        self.id_mark = 0
        self.position_ms = 0
        self.replays = 0
        """How often batches were replayed to a Redis that had lost them."""
        self.watchers: list[deque[Effects]] = []
        """Get every batch that lands (a backup)."""

    def begin(self, owner: str, opened: Opened, incarnation: str) -> None:
        """An epoch was opened."""
        self.owner, self.epoch, self.incarnation = owner, opened.epoch, incarnation
        self.last, self.id_mark = opened.last_batch, opened.id_mark
        self.position_ms = opened.position_ms
        self._claimed = self._unknown = 0
        self._unreplicated = False
        self._history.clear()

    # --- batches -----------------------------------------------------------------------------

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``; also raises StoreBehind and StoreLost."""
        if (epoch, owner) != (self.epoch, self.owner):
            raise Fenced(f"epoch {epoch} of {owner!r} is over: epoch {self.epoch} began here")
        async with self.lock:
            try:
                return await self._commit(n, effects)
            except Answer as error:
                if error.kind not in REFUSING:
                    raise StoreBroken(f"{self._options.name}: {error.message}") from error
                if self._unknown == n:
                    raise CommitUnknown(f"batch {n}: {error.message}") from error
                raise CommitRefused(
                    f"batch {n}: {error.message}", full=error.kind == "OOM"
                ) from error
            except (Away, Lost) as error:
                if self._unknown == n:
                    raise CommitUnknown(f"batch {n}: {error.message}") from error
                raise CommitRefused(f"batch {n}: {error.message}") from error

    async def _commit(self, n: int, effects: Effects) -> bool:
        prepared: tuple[list[list[bytes]], int] | None = None
        for _ in range(ROUNDS_MAX):
            await self._ready(n, effects)
            if n <= self.last:
                await self._replicated(n)
                return False
            if n > self.last + 1:
                raise CommitRefused(f"batch {n} does not follow batch {self.last}")
            if prepared is None:
                prepared = parts(operations(effects, self._options.endings_max))
            try:
                await self._send(n, effects, prepared[0])
            except _Again:
                continue
            self._landed(n, effects, prepared[1])
            await self._replicated(n)
            return True
        raise CommitUnknown(f"batch {n}: {self._options.name} keeps changing hands")

    async def _send(self, n: int, effects: Effects, flat: list[list[bytes]]) -> None:
        """Until the batch counts. Raises _Again, or what ``commit`` translates."""
        id_mark = id_text(max(self.id_mark, effects.id_mark))
        position_ms = b"%d" % effects.position_ms
        makes_tasks = int(bool(effects.enqueued))
        if len(flat) == 1:
            lowest = id_text(min(effects.enqueued)) if effects.enqueued else b""
            marks = (n, makes_tasks, lowest, id_mark, position_ms)
            await self._fateful(COMMIT, n, (), (*marks, *flat[0]))
        else:
            for i, part in enumerate(flat, 1):
                await self._fateful(STAGE, n, (self._keys.stage(i),), (n, makes_tasks, *part))
            stages = tuple(self._keys.stage(i) for i in range(1, len(flat) + 1))
            self.staged = True
            await self._fateful(SEAL, n, stages, (n, id_mark, position_ms))
            await self._apply_parts(len(flat), 0)

    async def _fateful(
        self, script: Script, n: int, more: tuple[bytes, ...], args: tuple[Argument, ...]
    ) -> None:
        """Run a script that decides about batch ``n``; returns when it did its work."""
        self._unknown = n
        try:
            status, rest = await self._script(script, more, args)
        except (Away, Answer):
            # Nothing was sent, or Redis refused at the first write. An older try of this batch
            # was voided by this connection's claim.
            self._unknown = 0
            raise
        if status in ("applied", "staged"):
            return
        self._unknown = 0
        if status == "twice":
            raise StoreBroken(f"id {int(rest[0])} was assigned twice")
        # stale, gone, gap, before, parts, unstaged: the claim finds out what is there now.
        self._claimed = 0
        raise _Again(status)

    async def _apply_parts(self, count: int, applied: int) -> None:
        self.staged = True
        for i in range(applied + 1, count + 1):
            status, _ = await self._script(APPLY_PART, (self._keys.stage(i),), (i,))
            if status not in ("applied", "before"):
                self._claimed = 0
                raise _Again(status)
        self.staged = False

    async def _script(
        self, script: Script, more: tuple[bytes, ...], args: tuple[Argument, ...]
    ) -> tuple[str, list[bytes]]:
        keys = self._keys.all + more
        fence = (self.epoch, self.owner.encode(), self._link)
        reply: list[Any] = await self._line.run(script, keys, (*fence, *args))
        status = reply[0].decode()
        if status == "fenced":
            raise self._fenced(reply[1:])
        return status, reply[1:]

    def _landed(self, n: int, effects: Effects, size_bytes: int) -> None:
        self.last = n
        self._unknown = 0
        self.id_mark = max(self.id_mark, effects.id_mark)
        self.position_ms = effects.position_ms
        for watcher in self.watchers:
            watcher.append(effects)
        self._unreplicated = bool(self._options.wait_replicas)
        now_s = asyncio.get_running_loop().time()
        self._history.add(n, effects, size_bytes, now_s)

    async def _replicated(self, n: int) -> None:
        """With ``wait_replicas``: until that many have everything sent on this connection."""
        if not self._unreplicated:
            return
        wanted, wait_ms = self._options.wait_replicas, self._options.wait_ms
        why = ""
        try:
            have = await self._line.call("WAIT", wanted, wait_ms, timeout_ms=wait_ms + 500)
        except StoreError as error:
            have, why = 0, f": {error.message}"
        if have < wanted:
            raise CommitUnknown(
                f"batch {n} is in {self._options.name}, but only {have} of {wanted} replicas"
                f" confirmed it within {wait_ms} ms{why}"
            )
        self._unreplicated = False

    @asynccontextmanager
    async def rewriting(self) -> AsyncIterator[None]:
        """While a shard is laid out anew: nothing else is sent, batches count from 1."""
        async with self.lock:
            last, self._rewriting = self.last, True
            self.last = self._claimed = 0
            self._history.clear()
            try:
                yield
            finally:
                self.last, self._rewriting, self._unknown = last, False, 0
                self._claimed = 0
                self._history.clear()

    async def commit_alone(self, n: int, effects: Effects) -> None:
        """One batch while ``rewriting``. Raises Away, Lost, Answer."""
        await self._commit(n, effects)

    # --- the claim ---------------------------------------------------------------------------

    async def verify(self) -> None:
        """Claim anew, and replay what Redis lost. Raises StoreBehind, StoreLost, Fenced, …"""
        async with self.lock:
            self._claimed = 0
            await self._ready(0, None)

    async def claim(self) -> None:
        """After ``begin``: the connection may write from here on; unfinished parts are applied."""
        async with self.lock:
            await self._ready(0, None)

    async def _ready(self, n: int, effects: Effects | None) -> None:
        """Claimed, nothing staged, and every batch up to ``last`` there."""
        for _ in range(ROUNDS_MAX):
            if self._claimed == self._line.connections and self._line.connected:
                return
            try:
                await self._claim(n, effects)
            except _Again:
                continue
        if self._claimed != self._line.connections:
            raise Lost(f"{self._options.name} keeps changing hands")

    async def _claim(self, n: int, effects: Effects | None) -> None:
        mine = (self.epoch, self.owner.encode(), self.incarnation)
        reply: list[Any] = await self._line.run(CLAIM, self._keys.all, mine)
        status = reply[0].decode()
        if status == "fenced":
            raise self._fenced(reply[1:])
        if status == "gone":
            raise StoreLost(f"{self._options.name} came back empty: {self._keys.shard} is gone")
        if status == "other":
            raise StoreLost(
                f"{self._options.name}: {self._keys.shard} was laid out anew (incarnation"
                f" {reply[1].decode()}, epoch {int(reply[2])} of {reply[3].decode()!r})"
            )
        if reply[5] and not self._rewriting:
            raise StoreBehind(
                f"{self._options.name}: writing {self._keys.shard} anew was cut short",
                last_seen=0,
                last_known=self.last,
            )
        self._link, last, count, applied = reply[1], int(reply[2]), reply[3], reply[4]
        self._claimed = self._line.connections
        if count:
            await self._apply_parts(int(count), int(applied))
        self.staged = False
        self._unreplicated = bool(self._options.wait_replicas)
        if last == self.last + 1 and last == self._unknown == n and effects is not None:
            self._landed(n, effects, sum(len(row.body) for row in effects.enqueued.values()))
        elif last < self.last:
            await self._replay(last)
        elif last > self.last and last != self._unknown:
            raise StoreBroken(
                f"{self._options.name} holds batch {last} of this epoch; {self.last} was the"
                " last one sent"
            )

    async def _replay(self, last: int) -> None:
        """Send again what Redis had confirmed and lost. Absolute states: order is all it needs."""
        if not self._history.covers(last + 1, self.last):
            self._claimed = 0
            raise StoreBehind(
                f"{self._options.name} came back older: it holds batch {last}, had confirmed"
                f" {self.last}, and not all between are kept",
                last_seen=last,
                last_known=self.last,
            )
        log.warning(
            "store %s came back older: replaying batches %d to %d",
            self._options.name, last + 1, self.last,
        )  # fmt: skip
        unknown = self._unknown
        try:
            for n, effects in self._history.since(last + 1):
                flat, _ = parts(operations(effects, self._options.endings_max))
                await self._send(n, effects, flat)
        except BaseException:
            self._claimed = 0
            raise
        finally:
            self._unknown = unknown
        self.replays += 1

    def _fenced(self, rest: list[bytes]) -> Fenced:
        epoch, owner = int(rest[0]), rest[1].decode()
        return Fenced(
            f"epoch {self.epoch} of {self.owner!r} is over: epoch {epoch} of {owner!r} began"
        )

    @property
    def link(self) -> bytes:
        """The claim's number, which every script of this connection carries."""
        return self._link
