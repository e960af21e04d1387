"""The only writer of a shard while this daemon owns it: batches, in order, across broken
connections.

Every connection claims the shard before it writes. The claim gives it the next *link*, a number
that each batch checks under a lock of the shard's row. So it waits for the end of a batch that an
older connection has sent, and voids all that arrive later; then the number of the last batch tells
whether an unanswered batch was applied. The claim commits like a batch, so its answer also proves
that synchronous standbys have all earlier batches. Invariants:

* A batch is one statement, and thus one transaction. Nothing is applied in part, or twice.
* ``CommitUnknown`` is raised only for a batch that was sent and not answered. Until a claim has
  decided it, no other batch gets its number.
* Nothing is confirmed while PostgreSQL lacks a confirmed batch. A server that comes back without
  one (a standby that was promoted, an older dump) ends the daemon: see ``StoreForgot``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    Fenced,
    StoreBroken,
    StoreError,
    StoreForgot,
    StoreLost,
)
from tickwheel.persistence.identity import EpochRecord, StoreIdentity, mark_of
from tickwheel.persistence.on_server import NoReply, NotConnected, ServerTrouble
from tickwheel.persistence.postgresql.driver import (
    DISK_FULL,
    REFUSING,
    ServerError,
    is_table_dropped,
)
from tickwheel.persistence.postgresql.layout import (
    LAYOUT,
    SQL,
    TASK,
    Batch,
    Filling,
    Parts,
    encode,
    read_statement,
)
from tickwheel.persistence.postgresql.opening import read_parts

if TYPE_CHECKING:
    from collections.abc import Collection

    from tickwheel.model.kinds import Effects
    from tickwheel.persistence.contract import Opened
    from tickwheel.persistence.postgresql.driver import Link, PostgresOptions

log = logging.getLogger(__name__)

ROUNDS_MAX: Final = 5
"""Number of attempts for one batch before ``commit`` raises CommitUnknown."""


class Writer:
    """See the module."""

    def __init__(self, link: Link, options: PostgresOptions) -> None:
        self._link = link
        self._options = options
        self._claimed = 0
        """Number of the connection that has the claim; 0: none has."""
        self._number = 0
        """The link of the claim."""
        self._unknown = 0
        """The batch that was sent and not answered; 0: there is none."""
        self.lock = asyncio.Lock()
        """Held during a commit, and while ``parts`` change."""
        self.epoch = self.last = self.id_mark = 0
        self.owner = self.incarnation = ""
        self.parts = Parts(options.shard, 0, (), ())
        """The tables of the shard. A read whose snapshot was taken while they changed is
        repeated."""
        self.fillings: dict[int, Filling] = {}
        self.batches = self.record_bytes = 0
        """Number of batches, and bytes of their records, in the current generation."""

    @property
    def identity(self) -> StoreIdentity:
        """The identity of the shard, with its last confirmed batch."""
        return StoreIdentity(
            EpochRecord(self.epoch, mark_of(self.owner), self.last), self.incarnation
        )

    @property
    def fence(self) -> tuple[int, int, str, int]:
        """The arguments of ``fence``."""
        return self._options.shard, self.epoch, self.owner, self._number

    async def begin(self, owner: str, opened: Opened) -> None:
        """Begin to write in an opened epoch. Raise as ``ready``."""
        self.owner, self.epoch, self.incarnation = owner, opened.epoch, opened.incarnation
        self.last, self.id_mark = opened.last_batch, opened.id_mark
        self._claimed = self._unknown = self.batches = self.record_bytes = 0
        self.fillings = {}
        async with self.lock:
            await self.ready()

    async def end(self) -> None:
        """Record a clean end. Raise StoreError."""
        async with self.lock:
            await self.ready()
            shard, epoch, owner, _ = self.fence
            if not await self._link.fetch(SQL["end_epoch"], shard, epoch, owner):
                raise StoreError(f"{self._options.name} no longer belongs to this daemon")

    # --- batches -----------------------------------------------------------------------------

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``."""
        if (epoch, owner) != (self.epoch, self.owner):
            raise Fenced(f"epoch {epoch} of {owner!r} ended: epoch {self.epoch} began here")
        async with self.lock:
            try:
                return await self._commit(n, effects)
            except ServerTrouble as error:
                if self._unknown == n:
                    raise CommitUnknown(f"batch {n}: {error.message}") from error
                if isinstance(error, ServerError):
                    raise self._refusal(n, error) from error
                raise CommitRefused(f"batch {n}: {error.message}") from error

    async def _commit(self, n: int, effects: Effects) -> bool:
        batch: Batch | None = None
        encoded_for: Parts | None = None
        sent = is_repeated = False
        for _ in range(ROUNDS_MAX):
            await self.ready()
            if n <= self.last:
                return sent and n == self.last
            if n != self.last + 1:
                raise CommitRefused(f"batch {n} does not follow batch {self.last}")
            if batch is None or encoded_for is not self.parts:
                encoded_for = self.parts
                batch = encode(effects, encoded_for, self._options.endings_max)
            id_mark = max(self.id_mark, effects.id_mark)
            try:
                if effects.enqueued and not sent and min(effects.enqueued) <= self.id_mark:
                    await self._check_new(effects.enqueued)
                self._unknown, sent = n, True
                rows = await self._link.fetch(
                    batch.statement, *self.fence, n, id_mark, *batch.arguments
                )
            except (NotConnected, ServerError) as error:
                self._unknown = 0  # it was not sent, or PostgreSQL has rolled it back
                # A successor of this daemon may have dropped a table: a new claim tells.
                if not is_table_dropped(error) or is_repeated:
                    raise
                self._claimed, is_repeated = 0, True
                continue
            except NoReply as error:
                # The connection may have broken while idle, so ask once for the batch's fate.
                if error.silent or is_repeated:
                    raise
                is_repeated = True
                continue
            self._unknown = 0
            if rows[0][0]:
                self._landed(n, effects, batch)
                return True
            self._claimed = 0  # somebody else has claimed the shard; a new claim tells who
        raise CommitRefused(f"batch {n}: several daemons claim {self._options.name}")

    def _landed(self, n: int, effects: Effects, batch: Batch) -> None:
        self.last, self.id_mark = n, max(self.id_mark, effects.id_mark)
        self.batches += 1
        self.record_bytes += batch.record_bytes
        for part, added in batch.added.items():
            self.fillings[part] = self.fillings.get(part, Filling()).plus(added)

    async def _check_new(self, ids: Collection[int]) -> None:
        """Raise StoreBroken if a task with one of these ids is stored."""
        by_part = self.parts.split(sorted(ids))
        statement = read_statement(self.parts.shard, self.parts.generation, tuple(by_part))
        places = [column for part in by_part.values() for column in (part, [0] * len(part))]
        rows = await self._link.fetch(statement, 0, *places)
        twice = {row["id"] for row in rows if row["kind"] == TASK}
        if twice:
            raise StoreBroken(f"id {min(twice)} was assigned twice")

    def _refusal(self, n: int, error: ServerError) -> StoreError:
        """Return the error of a batch that PostgreSQL has rolled back."""
        if error.state in REFUSING:
            return CommitRefused(f"batch {n}: {error.message}", full=error.state == DISK_FULL)
        remedy = "; restore a backup" if is_table_dropped(error) else ""
        return StoreBroken(f"{error.message}{remedy}")

    # --- the claim ---------------------------------------------------------------------------

    async def verify(self) -> None:
        """Claim the shard again. Raise as ``ready``."""
        async with self.lock:
            self._claimed = 0
            await self.ready()

    async def ready(self) -> None:
        """If the connection has no claim, claim the shard. Call it under the lock. Raise Fenced,
        StoreLost, StoreForgot, StoreBroken, ServerTrouble."""
        link = self._link
        if link.connected and self._claimed == link.connections:
            return
        self._claimed = 0
        await link.ready()
        options, connection = self._options, link.connections
        shard, epoch, owner, _ = self.fence
        rows = await link.fetch(SQL["claim"], shard, epoch, owner, self.incarnation, LAYOUT)
        if not rows:
            raise await self._deposed()
        parts = await read_parts(link, shard, rows[0]["generation"])
        ((last, id_mark, _),) = await link.fetch(SQL["last"].format(at=parts.at))
        if last < self.last:
            raise StoreForgot(
                f"{options.name} came back older: its last batch is {last}, and it had confirmed"
                f" batch {self.last} (a standby without it was promoted, or a backup restored)"
            )
        if last > self.last and last != self._unknown:
            raise StoreBroken(
                f"{options.name} has batch {last}, but {self.last} was the last batch sent"
            )
        self._number, self._unknown = rows[0]["link"], 0
        self.last, self.id_mark = last, max(self.id_mark, id_mark)
        if parts != self.parts:
            self.parts = parts
        self._claimed = connection

    async def _deposed(self) -> StoreError:
        """Return the error for a shard that this daemon no longer owns."""
        options = self._options
        rows = await self._link.fetch(SQL["owner"], options.shard)
        if not rows:
            return StoreLost(f"{options.name} has lost its data: the shard no longer exists")
        epoch, owner, incarnation, layout = rows[0]
        if layout != LAYOUT:
            return Fenced(f"{options.name}: the schema was upgraded to layout {layout}")
        if incarnation != self.incarnation:
            return Fenced(
                f"{options.name}: the shard was initialized again (incarnation {incarnation},"
                f" epoch {epoch}, by {owner!r})"
            )
        return Fenced(
            f"epoch {self.epoch} of {self.owner!r} ended: epoch {epoch} of {owner!r} began"
        )

    # --- the tables --------------------------------------------------------------------------

    async def switch(self, statement: str, *args: object) -> bool:
        """Change the tables by a statement that begins with ``fence``, and read them again.
        Return False if this daemon no longer holds the shard. Call it under the lock."""
        await self.ready()
        self._claimed = 0  # whatever happens, the tables are read again before the next batch
        rows = await self._link.fetch(statement, *self.fence, *args)
        await self.ready()
        return bool(rows[0][0])
