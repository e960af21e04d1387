"""The order of batches, over broken connections and over a Redis that lost something.

Every connection claims the shard before it writes. The claim voids whatever an older connection
may still have under way and tells the last batch, so that from then on the fate of each batch
is known. It is also where a Redis that came back empty or older shows. Invariants:

* ``CommitUnknown`` is raised for a batch only while it may be applied, or is applied and not
  replicated yet; its number keeps its content until its fate is known.
* Nothing is confirmed while Redis lacks a batch that it had confirmed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tickwheel.persistence.redis.drivers import Answer, Away, Lost
from tickwheel.persistence.redis.encode import operations, parts
from tickwheel.persistence.redis.history import History
from tickwheel.persistence.redis.layout import Keys
from tickwheel.persistence.redis.line import Line
from tickwheel.persistence.redis.options import RedisOptions
from tickwheel.persistence.redis.scripts_life import CLAIM, CLOSE
from tickwheel.persistence.redis.sender import Again, Sender
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

REFUSING = frozenset((
    "OOM", "LOADING", "READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY", "CLUSTERDOWN",
    "TRYAGAIN", "MOVED", "ASK", "NOAUTH", "WRONGPASS", "NOPERM",
))  # fmt: skip
"""Redis says these before the first write of a script: nothing was changed."""
ROUNDS_MAX = 5
"""Tries to bring one batch home before its fate is left to the next call."""


class Writer:
    """The only one that changes the shard while this daemon owns it."""

    def __init__(self, line: Line, keys: Keys, options: RedisOptions) -> None:
        self._line = line
        self._keys = keys
        self._options = options
        self._sender = Sender(line, keys)
        self._history = History(options.keep_ms, options.keep_bytes)
        self._claimed = 0
        self._unreplicated = False
        self._rewriting = False
        self.lock = asyncio.Lock()
        """Held while a batch is on its way; a reader that needs several scripts takes it too."""
        self.incarnation = ""
        self.last = 0
        self.position_ms = 0
        self.replays = 0
        """How often batches were replayed to a Redis that had lost them."""
        self.watchers: list[deque[Effects]] = []
        """Get every batch that lands (a backup)."""

    @property
    def epoch(self) -> int:
        return self._sender.epoch

    @property
    def owner(self) -> str:
        return self._sender.owner

    @property
    def id_mark(self) -> int:
        return self._sender.id_mark

    @property
    def staged(self) -> bool:
        """A large batch is being applied: what is read now may be half of it."""
        return self._sender.staged

    async def begin(self, owner: str, opened: Opened, incarnation: str) -> None:
        """An epoch was opened; what its predecessor left unfinished is applied."""
        sender = self._sender = Sender(self._line, self._keys)
        sender.owner, sender.epoch, sender.id_mark = owner, opened.epoch, opened.id_mark
        self.incarnation = incarnation
        self.last, self.position_ms = opened.last_batch, opened.position_ms
        self._claimed, self._unreplicated = 0, False
        self._history.clear()
        await self.verify()

    async def end(self) -> None:
        """Record a clean end. Raises StoreError."""
        async with self.lock:
            await self._ready(0, None)
            status, _ = await self._sender.run(CLOSE, (), ())
        if status != "applied":
            raise StoreError(f"{self._options.name} is no longer this daemon's ({status})")

    # --- batches -----------------------------------------------------------------------------

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``; also raises StoreBehind and StoreLost."""
        if (epoch, owner) != (self.epoch, self.owner):
            raise Fenced(f"epoch {epoch} of {owner!r} is over: epoch {self.epoch} began here")
        async with self.lock:
            try:
                return await self._commit(n, effects)
            except (Answer, Away, Lost) as error:
                kind = error.kind if isinstance(error, Answer) else ""
                if kind and kind not in REFUSING:
                    raise StoreBroken(f"{self._options.name}: {error.message}") from error
                if self._sender.unknown == n:
                    raise CommitUnknown(f"batch {n}: {error.message}") from error
                raise CommitRefused(f"batch {n}: {error.message}", full=kind == "OOM") from error

    async def _commit(self, n: int, effects: Effects) -> bool:
        prepared: tuple[list[list[bytes]], int] | None = None
        lost = False
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
                await self._sender.send(n, effects, *prepared)
            except Again:
                self._claimed = 0
                continue
            except Lost as error:
                # A connection that broke while it was idle shows only now: once more at once.
                if error.silent or lost:
                    raise
                lost = True
                continue
            self._landed(n, effects, prepared[1])
            await self._replicated(n)
            return True
        raise CommitUnknown(f"batch {n}: {self._options.name} keeps changing hands")

    def _landed(self, n: int, effects: Effects, size_bytes: int) -> None:
        sender = self._sender
        self.last = n
        sender.unknown = 0
        sender.id_mark = max(sender.id_mark, effects.id_mark)
        self.position_ms = effects.position_ms
        self._unreplicated = bool(self._options.wait_replicas)
        self._history.add(n, effects, size_bytes, asyncio.get_running_loop().time())
        for watcher in self.watchers:
            watcher.append(effects)

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

    # --- the claim ---------------------------------------------------------------------------

    async def verify(self) -> None:
        """Look at what Redis holds, and replay what it lost.

        Raises StoreBehind, StoreLost, Fenced; Away, Lost, Answer.
        """
        async with self.lock:
            self._claimed = 0
            await self._ready(0, None)

    async def _ready(self, n: int, effects: Effects | None) -> None:
        """Claimed, nothing half applied, and every batch up to ``last`` there.

        ``n`` and ``effects`` are the batch to be committed: it may turn out to be applied.
        """
        lost = False
        for _ in range(ROUNDS_MAX):
            if self._line.connected and self._claimed == self._line.connections:
                return
            try:
                await self._claim(n, effects)
            except Again:
                self._claimed = 0
            except Lost as error:
                if error.silent or lost:
                    raise
                lost = True
        if self._claimed != self._line.connections:
            raise Lost(f"{self._options.name} keeps changing hands")

    async def _claim(self, n: int, effects: Effects | None) -> None:
        sender, name, shard = self._sender, self._options.name, self._keys.shard
        mine = (sender.epoch, sender.owner.encode(), self.incarnation)
        reply: list[Any] = await self._line.run(CLAIM, self._keys.all, mine)
        status, *rest = [part.decode() for part in reply]
        if status == "fenced":
            raise Fenced(
                f"epoch {sender.epoch} of {sender.owner!r} is over:"
                f" epoch {rest[0]} of {rest[1]!r} began"
            )
        if status == "gone":
            raise StoreLost(f"{name} came back empty: {shard} is gone")
        if status == "other":
            raise StoreLost(
                f"{name}: {shard} was laid out anew (incarnation {rest[0]},"
                f" epoch {rest[1]} of {rest[2]!r})"
            )
        if rest[4] and not self._rewriting:
            raise StoreBehind(
                f"{name}: writing {shard} anew was cut short", last_seen=0, last_known=self.last
            )
        sender.link, last = reply[1], int(rest[1])
        self._claimed = self._line.connections
        if rest[2]:
            await sender.apply_parts(int(rest[2]), int(rest[3]))
        sender.staged = False
        if last == self.last + 1 == sender.unknown == n and effects is not None:
            self._landed(n, effects, sum(len(row.body) for row in effects.enqueued.values()))
        elif last < self.last:
            await self._replay(last)
        elif last > self.last and last != sender.unknown:
            raise StoreBroken(f"{name} holds batch {last}; {self.last} was the last one sent")

    async def _replay(self, last: int) -> None:
        """Send again what Redis had confirmed and lost: absolute states, in order."""
        name, self._claimed = self._options.name, 0
        if not self._history.covers(last + 1, self.last):
            raise StoreBehind(
                f"{name} came back older: it holds batch {last}, had confirmed {self.last},"
                " and not all between are kept",
                last_seen=last,
                last_known=self.last,
            )
        log.warning(
            "store %s came back older: replaying batches %d to %d", name, last + 1, self.last
        )
        unknown = self._sender.unknown
        try:
            for n, effects in self._history.since(last + 1):
                some = parts(operations(effects, self._options.endings_max))
                await self._sender.send(n, effects, *some)
        finally:
            self._sender.unknown = unknown
        self._claimed = self._line.connections
        self.replays += 1

    # --- writing everything anew ---------------------------------------------------------------

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
                self.last, self._rewriting, self._claimed = last, False, 0
                self._sender.unknown = 0
                self._history.clear()

    async def commit_alone(self, n: int, effects: Effects) -> None:
        """One batch while ``rewriting``. Raises Away, Lost, Answer."""
        await self._commit(n, effects)
