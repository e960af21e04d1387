"""Keeps batches in order across broken connections and losses of data in Redis.

Every connection claims the shard before it writes. The claim voids all scripts that older
connections have sent, and returns the last batch, so afterwards the state of every batch is known.
The claim also detects a Redis whose data is gone or older. Invariants:

* ``CommitUnknown`` is raised for a batch only while it can still be applied, or is applied but not
  yet replicated. Until its state is known, no other batch can use its number.
* Nothing is confirmed while Redis lacks a confirmed batch.

The writer keeps the newest batches, within limits of time and bytes, to replay them after a loss: a
Redis that syncs its log once a second can lose the last two seconds, a stale replica somewhat more.
It keeps new tasks only as records, which the mirror shares; rows would double the memory.
Without a mirror the records have separate memory.

``Sender`` sends one batch to Redis: one script, or parts that are staged, sealed and applied.
``Claimant`` claims a shard for a connection, and marks the beginning and the end of a rewrite. Both
know the owner and the claim; they do not know connections or the next batch. A claim detects only
that this daemon is not the owner; the writer detects missing batches. Invariant: ``unknown`` is the
number of a batch whose script was sent and can still be applied; 0: there is none.
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
    LOST_BY,
    CommitRefused,
    CommitUnknown,
    Fenced,
    Opened,
    StoreBehind,
    StoreBroken,
    StoreError,
    StoreLost,
)
from tickwheel.persistence.identity import EpochRecord, StoreIdentity, mark_of
from tickwheel.persistence.on_server import NoReply, NotConnected, ServerTrouble
from tickwheel.persistence.redis.driver import REFUSING, Argument, Packed, ServerError
from tickwheel.persistence.redis.layout import (
    APPLY_PART,
    CLAIM,
    CLOSE,
    COMMIT,
    LAYOUT,
    PART_BYTES_MAX,
    RESCORE,
    REWRITE,
    SEAL,
    STAGE,
    UNSTAGE,
    AheadEncoder,
    Keys,
    Prepared,
    Script,
    TopicNumbers,
    id_text,
    prepare,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

    from tickwheel.model.records import TaskRow
    from tickwheel.persistence.redis.connection import Connection
    from tickwheel.persistence.redis.driver import RedisOptions
    from tickwheel.persistence.redis.mirror import Mirror

PART_PATIENCE = 1 + (PART_BYTES_MAX >> 20)
"""Factor by which the time-out is multiplied for one part of a batch: 1, plus 1 for each MiB, for
slow disks."""
UNSTAGED_AT_ONCE = 16
"""Number of parts that are removed at once, more than a batch usually has."""


class ReclaimNeeded(Exception):
    """The shard must be claimed again; the claim returns the state of the batch."""


class Sender:
    """Sends batches to Redis under a claim."""

    def __init__(self, connection: Connection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self.epoch = 0
        self.owner = ""
        self.link = b""
        """Number of the claim. It is an argument of every script."""
        self.id_mark = 0
        self.unknown = 0
        self.staged = False
        """Whether a large batch is being applied, so that a read can see a part of it."""
        self.has_stages = True
        """Whether Redis can have parts of an unsealed batch, at first of a predecessor."""

    async def send(
        self,
        n: int,
        effects: Effects,
        flat: Sequence[Packed],
        size_bytes: int,
        *,
        must: bool = False,
    ) -> None:
        """Send a batch and return when it is applied. Raise ReclaimNeeded, NotConnected, NoReply or
        ServerError. ``must``: Redis takes new tasks even if it is out of memory, because they were
        confirmed before."""
        id_mark = id_text(max(self.id_mark, effects.id_mark))
        position_ms = b"%d" % effects.position_ms
        makes_tasks = int(effects.makes_tasks and not must)
        if len(flat) == 1:
            lowest = id_text(min(effects.enqueued)) if effects.enqueued else b""
            marks = (n, makes_tasks, lowest, id_mark, position_ms)
            await self._decide(COMMIT, n, (), (*marks, flat[0]), 1 + (size_bytes >> 20))
            return
        stages = tuple(self._keys.stage(i) for i in range(1, len(flat) + 1))
        self.has_stages = True
        try:
            for key, part in zip(stages, flat, strict=True):
                await self._decide(STAGE, n, (key,), (n, makes_tasks, part), PART_PATIENCE)
            self.staged = True
            await self._decide(SEAL, n, stages, (n, id_mark, position_ms))
        except (ServerError, StoreBroken):  # refused; otherwise the next claim decides
            with suppress(ServerTrouble):
                await self.unstage()
            raise
        await self.apply_parts(len(flat), 0)

    async def _decide(
        self,
        script: Script,
        n: int,
        extra_keys: tuple[bytes, ...],
        args: tuple[Argument, ...],
        patience: int = 1,
    ) -> None:
        """Run a script that decides batch ``n``. Raise ReclaimNeeded if it was not applied."""
        self.unknown = n
        try:
            status, details = await self.run(script, extra_keys, args, patience)
        except (NotConnected, ServerError):
            # Nothing was sent, or Redis refused the first write. The claim has voided all scripts
            # of older connections.
            self.unknown = 0
            raise
        if status in ("applied", "staged"):
            return
        self.unknown = 0
        if status == "twice":
            raise StoreBroken(f"id {int(details[0])} was assigned twice")
        # fenced, stale, gone, gap, before, parts, unstaged: a new claim reads the current state.
        raise ReclaimNeeded(status)

    async def apply_parts(self, count: int, applied: int) -> None:
        """Apply the remaining parts of a sealed batch."""
        self.staged = True
        for i in range(applied + 1, count + 1):
            status, _ = await self.run(APPLY_PART, (self._keys.stage(i),), (i,), PART_PATIENCE)
            if status not in ("applied", "before"):
                raise ReclaimNeeded(status)
        self.staged = self.has_stages = False

    async def unstage(self) -> None:
        """Remove the parts of a batch that was not sealed. Raise ServerTrouble."""
        first, count = 1, UNSTAGED_AT_ONCE
        while count:
            keys = tuple(self._keys.stage(first + i) for i in range(UNSTAGED_AT_ONCE))
            status, details = await self.run(UNSTAGE, keys, ())
            if status != "applied":
                return
            first, count = first + UNSTAGED_AT_ONCE, int(details[0])
        self.has_stages = False

    async def run(
        self,
        script: Script,
        extra_keys: tuple[bytes, ...],
        args: tuple[Argument, ...],
        patience: int = 1,
    ) -> tuple[str, list[bytes]]:
        """Run a fenced script. Return its status and the rest of its reply."""
        fence = (self.epoch, self.owner.encode(), self.link)
        reply: list[Any] = await self._connection.run(
            script, self._keys.all + extra_keys, (*fence, *args), patience=patience
        )
        return reply[0].decode(), reply[1:]


class Expecting(Protocol):
    """The expected state, with which a claim is compared; see ``Writer``."""

    rewriting: bool
    last: int
    base: int

    @property
    def epoch(self) -> int: ...


class Claim(NamedTuple):
    """The state of the shard when it was claimed."""

    last: int
    parts: int
    """Number of parts of a sealed batch that is being applied; 0: there is none."""
    part: int
    rewriting: bool
    epoch: int
    """The epoch of the previous claim."""

    def check(self, shown_name: str, writer: Expecting) -> None:
        """Raise StoreBehind if the batch number does not prove the contents of the shard."""
        if self.rewriting != writer.rewriting:
            raise StoreBehind(
                f"{shown_name} is not complete: rewriting it was interrupted",
                last_seen=0,
                last_known=writer.last,
            )
        if self.epoch < writer.epoch and self.last > writer.base:
            raise StoreBehind(
                f"{shown_name} was written by epoch {self.epoch} after epoch {writer.epoch} began",
                last_seen=writer.base,
                last_known=writer.last,
            )


class Claimant:
    """Claims a shard for its owner on one connection. All methods also raise ServerTrouble."""

    def __init__(self, connection: Connection, keys: Keys, name: str) -> None:
        self._connection = connection
        self._keys = keys
        self._name = name

    async def take(self, sender: Sender, incarnation: str) -> Claim:
        """Claim the shard and void all scripts of older connections. Raise Fenced, or StoreLost if
        the shard is empty."""
        shard = self._keys.shard
        identity = (sender.epoch, sender.owner.encode(), incarnation, sender.link or 0)
        reply: list[Any] = await self._connection.run(CLAIM, self._keys.all, identity)
        status, *details = [part.decode() for part in reply]
        if status == "fenced":
            raise Fenced(
                f"epoch {sender.epoch} of {sender.owner!r} ended:"
                f" epoch {details[0]} of {details[1]!r} began"
            )
        if status == "other":
            raise Fenced(
                f"{self._name}: {shard} was initialized again (incarnation {details[0]},"
                f" epoch {details[1]}, by {details[2]!r})"
            )
        if status == "gone":
            raise StoreLost(f"{self._name} has lost its data: {shard} no longer exists")
        sender.link = reply[1]
        last, parts, part, rewriting, epoch = details[1:6]
        return Claim(int(last), int(parts or 0), int(part or 0), bool(rewriting), int(epoch))

    async def run_phase(
        self, sender: Sender, incarnation: str, phase: str, written: int, last: int
    ) -> None:
        """Run a phase of a rewrite. ``begin``: empty the shard and mark it as incomplete. ``end``:
        let its ``written`` batches replace all confirmed batches up to ``last``. ``lost``: mark the
        shard as lacking data, and change nothing else. Raise Fenced, or StoreLost if another client
        has changed the shard."""
        identity = (sender.epoch, sender.owner.encode(), incarnation)
        mark = f"{LOST_BY}{sender.owner}" if phase == "lost" else sender.owner
        args = (*identity, LAYOUT, phase, last, 0, sender.link or 0, written, mark.encode())
        reply: list[Any] = await self._connection.run(REWRITE, self._keys.all, args)
        status, *details = [part.decode() for part in reply]
        if status == "fenced":
            raise Fenced(f"{self._name}: epoch {details[0]} of {details[1]!r} began")
        if status != "applied":
            raise StoreLost(f"{self._name}: another client changed {self._keys.shard} ({status})")


BATCH_BYTES = 200
"""Approximate bytes of a kept batch in addition to its content."""


@dataclass(slots=True)
class Tally:
    """Counts of losses in Redis, over all openings of a store."""

    replays: int = 0
    """Losses that were repaired by replaying kept batches."""
    rewrites: int = 0
    """Losses that were repaired by writing all data again from memory."""


SEPARATE_BYTES_MIN = 64 << 10
"""Minimum size of a batch's records for which they get separate memory, which wastes up to two
pages."""


class SeparateRecords:
    """Records in separate memory, which returns to the system when it is released. As single
    objects among objects that live longer, the records would fragment the heap."""

    def __init__(self, records: Sequence[bytes], size_bytes: int) -> None:
        """``size_bytes``: total size of the records, above 0."""
        self._sizes = array("I", map(len, records))
        self._memory = mmap(-1, size_bytes)
        self._memory.write(b"".join(records))

    def __iter__(self) -> Iterator[bytes]:
        start = 0
        for size in self._sizes:
            yield self._memory[start : start + size]
            start += size


@dataclass(slots=True)
class _ReplayableBatch:
    """An applied batch, kept so that it can be replayed."""

    n: int
    rest: Effects
    """The effects of the batch without its new tasks."""
    enqueued: Iterable[bytes]
    """The records of the batch's new tasks."""
    size_bytes: int
    at_s: float
    """The time at which it was last applied, in seconds of the event loop's clock."""

    def effects(self) -> Effects:
        rows = map(decode_task, self.enqueued)
        return replace(self.rest, enqueued={row.id: row for row in rows})


class KeptBatches:
    """The newest applied batches, in order and without gaps, within limits of time and bytes."""

    def __init__(self, keep_ms: int, keep_bytes: int) -> None:
        self._keep_s = keep_ms / 1000
        self._keep_bytes = keep_bytes
        self._batches: deque[_ReplayableBatch] = deque()
        self._bytes = 0

    def add(
        self, n: int, effects: Effects, enqueued: Iterable[bytes], size_bytes: int, now_s: float
    ) -> None:
        """Add the applied batch ``n``, which follows the newest kept batch. ``enqueued``: the
        records of its new tasks."""
        size_bytes += BATCH_BYTES
        rest = replace(effects, enqueued={}, hashes={})
        self._batches.append(_ReplayableBatch(n, rest, enqueued, size_bytes, now_s))
        self._bytes += size_bytes
        self.forget(now_s)

    def forget(self, now_s: float) -> None:
        """Drop the oldest batches that exceed the limits."""
        while self._batches and (
            self._bytes > self._keep_bytes or self._batches[0].at_s < now_s - self._keep_s
        ):
            self._bytes -= self._batches.popleft().size_bytes

    def clear(self) -> None:
        self._batches.clear()
        self._bytes = 0

    def note_resent(self, first: int, now_s: float) -> None:
        """Record that the batches from ``first`` on were applied again."""
        for batch in self._batches:
            if batch.n >= first:
                batch.at_s = now_s

    def covers(self, first: int, last: int) -> bool:
        """Return whether every batch from ``first`` to ``last`` is kept."""
        batches = self._batches
        return bool(batches) and batches[0].n <= first and last <= batches[-1].n

    def since(self, first: int) -> Iterator[tuple[int, Effects]]:
        """Return the batches from ``first`` on, unaffected by later changes."""
        replayed = [batch for batch in self._batches if batch.n >= first]
        return ((batch.n, batch.effects()) for batch in replayed)


log = logging.getLogger(__name__)

ROUNDS_MAX = 5
"""Number of attempts for one batch before ``commit`` raises CommitUnknown."""


class Writer:
    """The only writer of the shard while this daemon owns it."""

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        options: RedisOptions,
        mirror: Mirror,
        tally: Tally,
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._options = options
        self._endings_max = options.endings_max
        self._mirror = mirror
        self._tally = tally
        self._claimant = Claimant(connection, keys, options.name)
        self._sender = Sender(connection, keys)
        self._kept = KeptBatches(options.keep_ms, options.keep_bytes)
        self.numbers = TopicNumbers()
        self.ahead = AheadEncoder(self.numbers)
        self._claimed = 0
        self._unreplicated = False
        self._replaying = False
        self._unconfirmed = 0
        """The batch after ``last`` if it is applied but not confirmed; 0: there is none."""
        self.lock = asyncio.Lock()
        """Held during a commit, and by readers that need several scripts."""
        self.incarnation = ""
        self.last = self.base = 0
        """Numbers of the last confirmed batch, and of the last batch before this epoch."""
        self.position_ms = 0
        self.rewriting = False
        """Whether all data is being written again, from batch 1 on, without reads or commits."""
        self._rewritten: tuple[int, int] | None = None
        """The last confirmed batch and the id mark during a rewrite, which has its own."""
        self.watchers: list[deque[Effects]] = []
        """Queues that receive every applied batch, for backups."""
        self.landed: Callable[[Effects], None] = lambda effects: None
        """Called when a batch has been added to the mirror, before it is replicated."""

    @property
    def epoch(self) -> int:
        return self._sender.epoch

    @property
    def owner(self) -> str:
        return self._sender.owner

    @property
    def id_mark(self) -> int:
        return self._sender.id_mark if self._rewritten is None else self._rewritten[1]

    @property
    def identity(self) -> StoreIdentity:
        """The identity of the shard, with its last confirmed batch."""
        last = self.last if self._rewritten is None else self._rewritten[0]
        return StoreIdentity(EpochRecord(self.epoch, mark_of(self.owner), last), self.incarnation)

    @property
    def unsettled(self) -> bool:
        """Whether a read can see part of a batch, or an incomplete shard."""
        return self._sender.staged or self.rewriting

    async def begin(self, owner: str, opened: Opened, topics: Sequence[bytes | None]) -> None:
        """Begin to write in an opened epoch. Finish a batch that the previous owner applied partly.
        ``topics``: see ``TopicNumbers.load``."""
        sender = self._sender = Sender(self._connection, self._keys)
        sender.owner, sender.epoch, sender.id_mark = owner, opened.epoch, opened.id_mark
        self.incarnation = opened.incarnation
        self.numbers.load(topics)
        self.last = self.base = opened.last_batch
        self.position_ms = opened.position_ms
        self._claimed, self._unconfirmed, self._unreplicated = 0, 0, False
        self._kept.clear()
        await self.verify()

    async def end(self) -> None:
        """Record a clean end in the shard. Raise StoreError."""
        async with self.lock:
            await self._ready()
            status, _ = await self._sender.run(CLOSE, (), ())
        if status != "applied":
            raise StoreError(f"{self._options.name} no longer belongs to this daemon ({status})")

    async def rescore(self, rows: Sequence[TaskRow]) -> None:
        """Give stored tasks their scores in the StoreQueue. Raise StoreError."""
        scores, pairs = self.numbers.scores(rows), self.numbers.pairs({row.topic for row in rows})
        args: list[Argument] = [len(pairs) // 2, *pairs]
        for score, row in zip(scores, rows, strict=True):
            args += (score, id_text(row.id))
        async with self.lock:
            await self._ready()
            status, _ = await self._sender.run(RESCORE, (), tuple(args))
        if status != "applied":
            raise StoreError(f"{self._options.name} no longer belongs to this daemon ({status})")

    # --- batches -----------------------------------------------------------------------------

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``. Also raise StoreBehind and StoreLost."""
        if (epoch, owner) != (self.epoch, self.owner):
            raise Fenced(f"epoch {epoch} of {owner!r} has ended; this writer has {self.epoch}")
        async with self.lock:
            try:
                return await self._commit(n, effects)
            except ServerTrouble as error:
                kind = error.kind if isinstance(error, ServerError) else ""
                if kind and kind not in REFUSING:
                    raise StoreBroken(f"{self._options.name}: {error.message}") from error
                # A batch that was applied but not replicated is confirmed once it is replicated.
                if self._sender.unknown == n or n <= self.last:
                    raise CommitUnknown(f"batch {n}: {error.message}") from error
                raise CommitRefused(f"batch {n}: {error.message}", full=kind == "OOM") from error

    async def _commit(self, n: int, effects: Effects) -> bool:
        prepared: Prepared | None = None
        retried = False
        for _ in range(ROUNDS_MAX):
            await self._ready()
            if 0 < n == self._unconfirmed:
                self._landed(n, effects, prepare(effects, self._endings_max, self.numbers))
            if n <= self.last:
                await self._replicated(n)
                return False
            if n > self.last + 1:
                raise CommitRefused(f"batch {n} does not follow batch {self.last}")
            if prepared is None:
                prepared = prepare(effects, self._endings_max, self.numbers, self.ahead)
                if effects.enqueued and not self.rewriting:
                    self._mirror.admit(n, prepared.records)
            try:
                await self._sender.send(n, effects, prepared.flat, prepared.size_bytes)
            except ReclaimNeeded:
                self._claimed = 0
                continue
            except NoReply as error:
                # Only this call notices that the connection broke while idle, so retry at once.
                if error.silent or retried:
                    raise
                retried = True
                continue
            self._landed(n, effects, prepared)
            await self._replicated(n)
            return True
        raise CommitUnknown(f"batch {n}: {self._options.name} is being claimed by several daemons")

    def _landed(self, n: int, effects: Effects, prepared: Prepared) -> None:
        sender = self._sender
        self.last, self._unconfirmed = n, 0
        sender.unknown = 0
        sender.id_mark = max(sender.id_mark, effects.id_mark)
        self._unreplicated = bool(self._options.wait_replicas)
        loop, records = asyncio.get_running_loop(), prepared.records
        enqueued: Iterable[bytes] = records.enqueued
        if not self._mirror.keeps_records and records.enqueued_bytes >= SEPARATE_BYTES_MIN:
            enqueued = SeparateRecords(records.enqueued, records.enqueued_bytes)
        self._kept.add(n, effects, enqueued, prepared.size_bytes, loop.time())
        if self.rewriting:
            return
        self.position_ms = effects.position_ms
        self._mirror.landed(effects, records)
        self.landed(effects)
        if self._mirror.has_to_place:
            loop.call_soon(self._mirror.place)  # after the next batch has been sent
        for watcher in self.watchers:
            watcher.append(effects)

    async def _replicated(self, n: int) -> None:
        """Wait until ``wait_replicas`` replicas have the batch. Raise CommitUnknown otherwise."""
        if self.rewriting or not self._unreplicated:
            return
        replicas, wait_ms, reason = self._options.wait_replicas, self._options.wait_ms, ""
        try:
            confirmed = await self._connection.call(
                "WAIT", replicas, wait_ms, timeout_ms=wait_ms + 500
            )
        except StoreError as error:
            confirmed, reason = 0, f": {error.message}"
        if confirmed < replicas:
            await self._connection.drop_if_movable()
            raise CommitUnknown(
                f"batch {n} is in {self._options.name}, but only {confirmed} of {replicas} replicas"
                f" confirmed it within {wait_ms} ms{reason}"
            )
        self._unreplicated = False

    # --- the claim ---------------------------------------------------------------------------

    async def verify(self) -> None:
        """Claim the shard again, and replay batches that Redis has lost. Raise StoreBehind,
        StoreLost, Fenced or ServerTrouble."""
        async with self.lock:
            self._claimed = 0
            await self._ready()

    async def _ready(self) -> None:
        """If the connection has no claim, claim the shard, finish a partly applied batch, and
        replay batches up to ``last``."""
        retried = False
        for _ in range(ROUNDS_MAX):
            if self._connection.connected and self._claimed == self._connection.connections:
                return
            try:
                await self._claim()
            except ReclaimNeeded:
                self._claimed = 0
            except NoReply as error:
                if error.silent or retried:
                    raise
                retried = True
        if self._claimed != self._connection.connections:
            raise NoReply(f"{self._options.name} is being claimed by several daemons")

    async def _claim(self) -> None:
        sender, name = self._sender, self._options.name
        claim = await self._claimant.take(self._sender, self.incarnation)
        last = claim.last
        claim.check(f"{name}: {self._keys.shard}", self)
        self._claimed = self._connection.connections
        if claim.parts:
            await sender.apply_parts(claim.parts, claim.part)
        sender.staged = False
        # The claim has voided all earlier scripts, so this state is final.
        sender.unknown = self._unconfirmed = last if last == self.last + 1 == sender.unknown else 0
        if last < self.last:
            await self._replay(last)
        elif last > self.last and not self._unconfirmed:
            message = f"{name} has batch {last}, but {self.last} was the last batch sent"
            if self.rewriting:  # from an earlier attempt
                raise StoreBehind(message, last_seen=last, last_known=self.last)
            raise StoreBroken(message)
        if sender.has_stages:
            await sender.unstage()

    async def _replay(self, last: int) -> None:
        """Replay the confirmed batches that Redis has lost, in order."""
        name, self._claimed = self._options.name, 0
        if not self._kept.covers(last + 1, self.last):
            raise StoreBehind(
                f"{name} came back older: its last batch is {last}, after it confirmed {self.last},"
                " and not all batches between them are kept",
                last_seen=last,
                last_known=self.last,
            )
        if not self._replaying:
            self._replaying = True
            log.warning(
                "store %s came back with older data: replaying batches %d to %d",
                name,
                last + 1,
                self.last,
            )
        unknown = self._sender.unknown
        try:
            for n, effects in self._kept.since(last + 1):
                _, flat, size_bytes = prepare(effects, self._endings_max, self.numbers)
                await self._sender.send(n, effects, flat, size_bytes, must=True)
        finally:
            self._sender.unknown = unknown
        self._claimed, self._replaying = self._connection.connections, False
        self._kept.note_resent(last + 1, asyncio.get_running_loop().time())
        self._tally.replays += 1

    def note_complete(self) -> None:
        """Note that Redis has all confirmed batches. Without a mirror, drop old batches, because
        they do not share its records."""
        if not self._mirror.keeps_records:
            self._kept.forget(asyncio.get_running_loop().time())

    async def mark_lost(self) -> None:
        """Mark the shard as lacking confirmed data. The shard keeps its data, but no daemon opens
        it any more. Raise StoreError."""
        async with self.lock:
            await self._claimant.run_phase(self._sender, self.incarnation, "lost", 0, self.last)

    # --- rewriting all data --------------------------------------------------------------------

    @asynccontextmanager
    async def write_anew(self) -> AsyncIterator[Callable[[Effects], Awaitable[None]]]:
        """Empty the shard, and yield a function that writes its new contents. The shard is complete
        when the block has ended without an error. Both this method and the function raise Fenced,
        StoreLost, StoreBehind or ServerTrouble."""
        async with self.lock:
            sender, claimant = self._sender, self._claimant
            last, id_mark = self.last, sender.id_mark
            with suppress(StoreLost):
                await claimant.take(sender, self.incarnation)
            self._rewritten = last, id_mark
            self._start_over(0, 0, rewriting=True)
            try:
                await claimant.run_phase(sender, self.incarnation, "begin", 0, last)
                yield self._write
                await self._write(Effects(id_mark=id_mark, position_ms=self.position_ms))
                await claimant.run_phase(sender, self.incarnation, "end", self.last, last)
            finally:
                self._start_over(last, id_mark, rewriting=False)
                self._rewritten = None

    async def _write(self, effects: Effects) -> None:
        await self._commit(self.last + 1, effects)

    def _start_over(self, last: int, id_mark: int, *, rewriting: bool) -> None:
        sender = self._sender
        self.last, self.rewriting, self._claimed, self._unconfirmed = last, rewriting, 0, 0
        sender.id_mark, sender.unknown, sender.staged = id_mark, 0, False
        self._unreplicated = bool(self._options.wait_replicas)
        self._kept.clear()
