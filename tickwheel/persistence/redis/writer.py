"""The order of batches, over broken connections and over a Redis that lost something.

Every connection claims the shard before it writes. The claim voids whatever an older connection
may still have under way and answers with the last batch, so that from then on the fate of each
batch is known. It is also where a Redis that came back empty or older shows. Invariants:

* ``CommitUnknown`` is raised for a batch only while it may be applied, or is applied and not
  replicated yet; its number keeps its content until its fate is known.
* Nothing is confirmed while Redis lacks a batch that it had confirmed.

The batches applied last are kept for a Redis that comes back without them: one that syncs its log
once a second may lose the last two seconds of what it confirmed, a stale replica somewhat more.
They are bounded by time and by bytes, whichever comes first. Of new tasks only the records are
kept, which the mirror holds anyway: their rows would take as much memory again. Without a mirror
they have memory of their own.

``Sender`` brings one batch to Redis: a script, or parts that are staged, sealed and applied.
``Claimant`` claims a shard for a connection, and sets the frame around writing it anew: one script
each. They know who owns the shard and on which claim of a connection; they do not know
connections, nor which batch comes next. A claim judges what it finds only as far as it makes this
daemon the wrong one; what is missing in the shard is the writer's business. Invariant: ``unknown``
is the number of a batch whose script was sent and may still be applied, 0 when there is none.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from mmap import mmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tickwheel.model.kinds import Effects
from tickwheel.persistence.codec import decode_task
from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    Fenced,
    Opened,
    StoreBehind,
    StoreBroken,
    StoreError,
    StoreLost,
)
from tickwheel.persistence.identity import Began, Held, mark_of
from tickwheel.persistence.redis.driver import (
    REFUSING,
    Argument,
    NoReply,
    NotConnected,
    Packed,
    ServerError,
)
from tickwheel.persistence.redis.layout import (
    APPLY_PART,
    CLAIM,
    CLOSE,
    COMMIT,
    LAYOUT,
    LOST_BY,
    PART_BYTES_MAX,
    REWRITE,
    SEAL,
    STAGE,
    Ahead,
    Keys,
    Prepared,
    Script,
    id_text,
    prepare,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

    from tickwheel.persistence.redis.connection import Connection
    from tickwheel.persistence.redis.driver import RedisOptions
    from tickwheel.persistence.redis.mirror import Mirror

PART_PATIENCE = 1 + (PART_BYTES_MAX >> 20)
"""The patience for one part of a batch: a second for each MiB, for a slow disk."""


class Again(Exception):
    """The shard has to be claimed again; the claim shows what became of the batch."""


class Sender:
    """Sends batches to Redis in the name of a claim."""

    def __init__(self, line: Connection, keys: Keys) -> None:
        self._line = line
        self._keys = keys
        self.epoch = 0
        self.owner = ""
        self.link = b""
        """The number of the claim, which every script carries."""
        self.id_mark = 0
        self.unknown = 0
        self.staged = False
        """Whether a large batch is being applied, so that a read may show half of it."""

    async def send(self, n: int, effects: Effects, flat: Sequence[Packed], size_bytes: int) -> None:
        """Send a batch; returns when it is applied. Raises Again, Away, Lost, Answer."""
        id_mark = id_text(max(self.id_mark, effects.id_mark))
        position_ms = b"%d" % effects.position_ms
        makes_tasks = int(effects.makes_tasks)
        if len(flat) == 1:
            lowest = id_text(min(effects.enqueued)) if effects.enqueued else b""
            marks = (n, makes_tasks, lowest, id_mark, position_ms)
            await self._decide(COMMIT, n, (), (*marks, flat[0]), 1 + (size_bytes >> 20))
            return
        stages = tuple(self._keys.stage(i) for i in range(1, len(flat) + 1))
        for key, part in zip(stages, flat, strict=True):
            await self._decide(STAGE, n, (key,), (n, makes_tasks, part), PART_PATIENCE)
        self.staged = True
        await self._decide(SEAL, n, stages, (n, id_mark, position_ms))
        await self.apply_parts(len(flat), 0)

    async def _decide(
        self,
        script: Script,
        n: int,
        more: tuple[bytes, ...],
        args: tuple[Argument, ...],
        patience: int = 1,
    ) -> None:
        """Run a script that decides about batch ``n``; returns when it did its work."""
        self.unknown = n
        try:
            status, rest = await self.run(script, more, args, patience)
        except (NotConnected, ServerError):
            # Nothing was sent, or Redis refused at the first write. Whatever an older
            # connection had under way was voided by this one's claim.
            self.unknown = 0
            raise
        if status in ("applied", "staged"):
            return
        self.unknown = 0
        if status == "twice":
            raise StoreBroken(f"id {int(rest[0])} was assigned twice")
        # fenced, stale, gone, gap, before, parts, unstaged: the claim finds out what is there now.
        raise Again(status)

    async def apply_parts(self, count: int, applied: int) -> None:
        """Apply the remaining parts of a sealed batch."""
        self.staged = True
        for i in range(applied + 1, count + 1):
            status, _ = await self.run(APPLY_PART, (self._keys.stage(i),), (i,), PART_PATIENCE)
            if status not in ("applied", "before"):
                raise Again(status)
        self.staged = False

    async def run(
        self,
        script: Script,
        more: tuple[bytes, ...],
        args: tuple[Argument, ...],
        patience: int = 1,
    ) -> tuple[str, list[bytes]]:
        """A fenced script's status and the rest of its reply."""
        fence = (self.epoch, self.owner.encode(), self.link)
        reply: list[Any] = await self._line.run(
            script, self._keys.all + more, (*fence, *args), patience=patience
        )
        return reply[0].decode(), reply[1:]


class Expecting(Protocol):
    """What a claim is compared with; see ``Writer``."""

    rewriting: bool
    last: int
    base: int

    @property
    def epoch(self) -> int: ...


class Claim(NamedTuple):
    """What the shard said of itself when it was claimed."""

    last: int
    parts: int
    """How many parts a sealed batch has that is being applied; 0: there is none."""
    part: int
    rewriting: bool
    epoch: int
    """The epoch of the previous claim."""

    def check(self, what: str, writer: Expecting) -> None:
        """Raises StoreBehind when the batch number alone does not show what is there."""
        if self.rewriting != writer.rewriting:
            raise StoreBehind(
                f"{what} is not whole: writing it anew was cut short",
                last_seen=0,
                last_known=writer.last,
            )
        if self.epoch < writer.epoch and self.last > writer.base:
            raise StoreBehind(
                f"{what} was written by epoch {self.epoch} after {writer.epoch} had begun",
                last_seen=writer.base,
                last_known=writer.last,
            )


class Claimant:
    """Claims a shard for its owner on one line. Raises Away, Lost, Answer beside what is named."""

    def __init__(self, line: Connection, keys: Keys, name: str) -> None:
        self._line = line
        self._keys = keys
        self._name = name

    async def take(self, sender: Sender, incarnation: str) -> Claim:
        """Claim the shard, which voids all that older connections still send.

        Raises Fenced, StoreLost (it is empty).
        """
        shard = self._keys.shard
        mine = (sender.epoch, sender.owner.encode(), incarnation, sender.link or 0)
        reply: list[Any] = await self._line.run(CLAIM, self._keys.all, mine)
        status, *rest = [part.decode() for part in reply]
        if status == "fenced":
            raise Fenced(
                f"epoch {sender.epoch} of {sender.owner!r} is over:"
                f" epoch {rest[0]} of {rest[1]!r} began"
            )
        if status == "other":
            raise Fenced(
                f"{self._name}: {shard} was laid out anew (incarnation {rest[0]},"
                f" epoch {rest[1]} of {rest[2]!r})"
            )
        if status == "gone":
            raise StoreLost(f"{self._name} came back empty: {shard} is gone")
        sender.link = reply[1]
        last, parts, part, rewriting, epoch = rest[1:6]
        return Claim(int(last), int(parts or 0), int(part or 0), bool(rewriting), int(epoch))

    async def frame(
        self, sender: Sender, incarnation: str, phase: str, written: int, last: int
    ) -> None:
        """``begin``: empty the shard and mark it as not whole; ``end``: the ``written`` batches
        there are all that was confirmed up to ``last``; ``lost``: mark it as it is.

        Raises Fenced, StoreLost (somebody changed it between).
        """
        mine = (sender.epoch, sender.owner.encode(), incarnation)
        mark = f"{LOST_BY}{sender.owner}" if phase == "lost" else sender.owner
        args = (*mine, LAYOUT, phase, last, 0, sender.link or 0, written, mark.encode())
        reply: list[Any] = await self._line.run(REWRITE, self._keys.all, args)
        status, *rest = [part.decode() for part in reply]
        if status == "fenced":
            raise Fenced(f"{self._name}: epoch {rest[0]} of {rest[1]!r} began")
        if status != "applied":
            raise StoreLost(f"{self._name}: {self._keys.shard} is not as it was left ({status})")


BATCH_BYTES = 200
"""The bytes that a kept batch takes beside its content."""


@dataclass(slots=True)
class Tally:
    """How often Redis had lost something, over all openings of a store."""

    replays: int = 0
    """How often the batches that were kept were enough."""
    rewrites: int = 0
    """How often everything was written anew from memory."""


APART_BYTES_MIN = 64 << 10
"""Records of a batch that have memory of their own: a page or two more is little beside them."""


class Apart:
    """Some records in memory of their own, which the system has again when they are let go of. As
    single objects, here for a while among others that stay, they would leave it full of holes."""

    def __init__(self, records: Sequence[bytes], size_bytes: int) -> None:
        """``size_bytes``: that of all records, above 0."""
        self._sizes = array("I", map(len, records))
        self._memory = mmap(-1, size_bytes)
        self._memory.write(b"".join(records))

    def __iter__(self) -> Iterator[bytes]:
        start = 0
        for size in self._sizes:
            yield self._memory[start : start + size]
            start += size


@dataclass(slots=True)
class _Kept:
    """One applied batch that is kept to be replayed."""

    n: int
    rest: Effects
    """The effects of the batch without its new tasks."""
    enqueued: Iterable[bytes]
    """The records of its new tasks."""
    size_bytes: int
    at_s: float
    """When it was applied last, by the clock of the event loop."""

    def effects(self) -> Effects:
        rows = map(decode_task, self.enqueued)
        return replace(self.rest, enqueued={row.id: row for row in rows})


class History:
    """The newest batches, in order and without gaps; the newest stays unless it is too large."""

    def __init__(self, keep_ms: int, keep_bytes: int) -> None:
        self._keep_s = keep_ms / 1000
        self._keep_bytes = keep_bytes
        self._batches: deque[_Kept] = deque()
        self._bytes = 0

    def add(
        self, n: int, effects: Effects, enqueued: Iterable[bytes], size_bytes: int, now_s: float
    ) -> None:
        """Batch ``n`` was applied; the one before it is the newest here, or none is.

        ``enqueued``: the records of its new tasks.
        """
        size_bytes += BATCH_BYTES
        rest = replace(effects, enqueued={}, hashes={})
        self._batches.append(_Kept(n, rest, enqueued, size_bytes, now_s))
        self._bytes += size_bytes
        self.forget(now_s)

    def forget(self, now_s: float) -> None:
        """Let go of the oldest batches, as far as there are too many or they are too old."""
        while self._batches and (
            self._bytes > self._keep_bytes or self._batches[0].at_s < now_s - self._keep_s
        ):
            self._bytes -= self._batches.popleft().size_bytes

    def clear(self) -> None:
        self._batches.clear()
        self._bytes = 0

    def sent_again(self, first: int, now_s: float) -> None:
        """The batches from ``first`` on were applied once more."""
        for batch in self._batches:
            if batch.n >= first:
                batch.at_s = now_s

    def covers(self, first: int, last: int) -> bool:
        """Whether every batch from ``first`` to ``last`` is kept."""
        batches = self._batches
        return bool(batches) and batches[0].n <= first and last <= batches[-1].n

    def since(self, first: int) -> Iterator[tuple[int, Effects]]:
        """The batches from ``first`` on, as a copy that outlasts awaits."""
        kept = [batch for batch in self._batches if batch.n >= first]
        return ((batch.n, batch.effects()) for batch in kept)


log = logging.getLogger(__name__)

ROUNDS_MAX = 5
"""How often one batch is tried before its fate is left to the next call."""


class Writer:
    """The only writer of the shard while this daemon owns it."""

    def __init__(
        self, line: Connection, keys: Keys, options: RedisOptions, mirror: Mirror, tally: Tally
    ) -> None:
        self._line = line
        self._keys = keys
        self._options = options
        self._endings_max = options.endings_max
        self._mirror = mirror
        self._tally = tally
        self._claimant = Claimant(line, keys, options.name)
        self._sender = Sender(line, keys)
        self._history = History(options.keep_ms, options.keep_bytes)
        self.ahead = Ahead()
        self._claimed = 0
        self._unreplicated = False
        self._replaying = False
        self._found = 0
        """The batch after ``last`` that turned out to be applied and is not confirmed; 0: none."""
        self.lock = asyncio.Lock()
        """Held while a batch is on its way; a reader that needs several scripts takes it too."""
        self.incarnation = ""
        self.last = self.base = 0
        """The numbers of the last confirmed batch, and of the last one before this epoch."""
        self.position_ms = 0
        self.rewriting = False
        """Whether everything is written anew, from batch 1 on; no reads or commits then."""
        self.watchers: list[deque[Effects]] = []
        """Queues that get every batch that lands, for backups."""
        self.landed: Callable[[Effects], None] = lambda effects: None
        """Called in the step in which a batch is in the mirror, before it is replicated."""

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
    def held(self) -> Held:
        """What the shard says of itself, with all batches that were confirmed so far."""
        sender = self._sender
        return Held(Began(sender.epoch, mark_of(sender.owner), self.last), self.incarnation)

    @property
    def unsettled(self) -> bool:
        """Whether a read may show half of a batch, or half of the shard."""
        return self._sender.staged or self.rewriting

    async def begin(self, owner: str, opened: Opened, incarnation: str) -> None:
        """Begin with an opened epoch: apply what its predecessor left unfinished."""
        sender = self._sender = Sender(self._line, self._keys)
        sender.owner, sender.epoch, sender.id_mark = owner, opened.epoch, opened.id_mark
        self.incarnation = incarnation
        self.last = self.base = opened.last_batch
        self.position_ms = opened.position_ms
        self._claimed, self._found, self._unreplicated = 0, 0, False
        self._history.clear()
        await self.verify()

    async def end(self) -> None:
        """Record a clean end in the shard. Raises StoreError."""
        async with self.lock:
            await self._ready()
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
            except (ServerError, NotConnected, NoReply) as error:
                kind = error.kind if isinstance(error, ServerError) else ""
                if kind and kind not in REFUSING:
                    raise StoreBroken(f"{self._options.name}: {error.message}") from error
                # One that landed and was not replicated yet is in memory, and counts when it is.
                if self._sender.unknown == n or n <= self.last:
                    raise CommitUnknown(f"batch {n}: {error.message}") from error
                raise CommitRefused(f"batch {n}: {error.message}", full=kind == "OOM") from error

    async def _commit(self, n: int, effects: Effects) -> bool:
        prepared: Prepared | None = None
        lost = False
        for _ in range(ROUNDS_MAX):
            await self._ready()
            if 0 < n == self._found:
                self._landed(n, effects, prepare(effects, self._endings_max))
            if n <= self.last:
                await self._replicated(n)
                return False
            if n > self.last + 1:
                raise CommitRefused(f"batch {n} does not follow batch {self.last}")
            if prepared is None:
                prepared = prepare(effects, self._endings_max, self.ahead)
                if effects.enqueued and not self.rewriting:
                    self._mirror.admit(n, prepared.records)
            try:
                await self._sender.send(n, effects, prepared.flat, prepared.size_bytes)
            except Again:
                self._claimed = 0
                continue
            except NoReply as error:
                # A connection that broke while it was idle shows only now: once more at once.
                if error.silent or lost:
                    raise
                lost = True
                continue
            self._landed(n, effects, prepared)
            await self._replicated(n)
            return True
        raise CommitUnknown(f"batch {n}: {self._options.name} keeps changing hands")

    def _landed(self, n: int, effects: Effects, prepared: Prepared) -> None:
        sender = self._sender
        self.last, self._found = n, 0
        sender.unknown = 0
        sender.id_mark = max(sender.id_mark, effects.id_mark)
        self._unreplicated = bool(self._options.wait_replicas)
        loop, records = asyncio.get_running_loop(), prepared.records
        enqueued: Iterable[bytes] = records.enqueued
        if not self._mirror.keeps_records and records.enqueued_bytes >= APART_BYTES_MIN:
            enqueued = Apart(records.enqueued, records.enqueued_bytes)
        self._history.add(n, effects, enqueued, prepared.size_bytes, loop.time())
        if self.rewriting:
            return
        self.position_ms = effects.position_ms
        self._mirror.landed(effects, records)
        self.landed(effects)
        if self._mirror.has_to_place:
            loop.call_soon(self._mirror.place)  # when the next batch is on its way
        for watcher in self.watchers:
            watcher.append(effects)

    async def _replicated(self, n: int) -> None:
        """With ``wait_replicas``: wait until so many replicas have all that was sent here."""
        if self.rewriting or not self._unreplicated:
            return
        wanted, wait_ms, why = self._options.wait_replicas, self._options.wait_ms, ""
        try:
            have = await self._line.call("WAIT", wanted, wait_ms, timeout_ms=wait_ms + 500)
        except StoreError as error:
            have, why = 0, f": {error.message}"
        if have < wanted:
            await self._line.doubt()
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
            await self._ready()

    async def _ready(self) -> None:
        """Claim the shard if need be, finish a half applied batch, and replay up to ``last``."""
        lost = False
        for _ in range(ROUNDS_MAX):
            if self._line.connected and self._claimed == self._line.connections:
                return
            try:
                await self._claim()
            except Again:
                self._claimed = 0
            except NoReply as error:
                if error.silent or lost:
                    raise
                lost = True
        if self._claimed != self._line.connections:
            raise NoReply(f"{self._options.name} keeps changing hands")

    async def _claim(self) -> None:
        sender, name = self._sender, self._options.name
        claim = await self._claimant.take(self._sender, self.incarnation)
        last = claim.last
        claim.check(f"{name}: {self._keys.shard}", self)
        self._claimed = self._line.connections
        if claim.parts:
            await sender.apply_parts(claim.parts, claim.part)
        sender.staged = False
        # Whatever was under way is void now, so that this is final.
        sender.unknown = self._found = last if last == self.last + 1 == sender.unknown else 0
        if last < self.last:
            await self._replay(last)
        elif last > self.last and not self._found:
            message = f"{name} holds batch {last}; {self.last} was the last one sent"
            if self.rewriting:  # of a former try
                raise StoreBehind(message, last_seen=last, last_known=self.last)
            raise StoreBroken(message)

    async def _replay(self, last: int) -> None:
        """Send again the batches that Redis had confirmed and lost, in order."""
        name, self._claimed = self._options.name, 0
        if not self._history.covers(last + 1, self.last):
            raise StoreBehind(
                f"{name} came back older: it holds batch {last}, had confirmed {self.last},"
                " and not all between are kept",
                last_seen=last,
                last_known=self.last,
            )
        if not self._replaying:
            self._replaying = True
            log.warning(
                "store %s came back older: replaying batches %d to %d", name, last + 1, self.last
            )
        unknown = self._sender.unknown
        try:
            for n, effects in self._history.since(last + 1):
                prepared = prepare(effects, self._endings_max)
                await self._sender.send(n, effects, prepared.flat, prepared.size_bytes)
        finally:
            self._sender.unknown = unknown
        self._claimed, self._replaying = self._line.connections, False
        self._history.sent_again(last + 1, asyncio.get_running_loop().time())
        self._tally.replays += 1

    def holds_all(self) -> None:
        """Note that Redis holds all that was confirmed. Without a mirror, whose records they share,
        batches that are old by now are kept no longer."""
        if not self._mirror.keeps_records:
            self._history.forget(asyncio.get_running_loop().time())

    async def mark_lost(self) -> None:
        """Mark the shard as one that lacks what was confirmed: nobody opens it from then on, and
        nothing that is there is removed. Raises StoreError."""
        async with self.lock:
            await self._claimant.frame(self._sender, self.incarnation, "lost", 0, self.last)

    # --- writing everything anew ---------------------------------------------------------------

    @asynccontextmanager
    async def write_anew(self) -> AsyncIterator[Callable[[Effects], Awaitable[None]]]:
        """Empty the shard; what the given function writes is all of it when this ends well.

        Raises Fenced, StoreLost, StoreBehind, Away, Lost, Answer; so does the function.
        """
        async with self.lock:
            sender, claimant = self._sender, self._claimant
            last, id_mark = self.last, sender.id_mark
            with suppress(StoreLost):
                await claimant.take(sender, self.incarnation)
            self._start_over(0, 0, rewriting=True)
            try:
                await claimant.frame(sender, self.incarnation, "begin", 0, last)
                yield self._write
                await self._write(Effects(id_mark=id_mark, position_ms=self.position_ms))
                await claimant.frame(sender, self.incarnation, "end", self.last, last)
            finally:
                self._start_over(last, id_mark, rewriting=False)

    async def _write(self, effects: Effects) -> None:
        await self._commit(self.last + 1, effects)

    def _start_over(self, last: int, id_mark: int, *, rewriting: bool) -> None:
        sender = self._sender
        self.last, self.rewriting, self._claimed, self._found = last, rewriting, 0, 0
        sender.id_mark, sender.unknown, sender.staged = id_mark, 0, False
        self._unreplicated = bool(self._options.wait_replicas)
        self._history.clear()
