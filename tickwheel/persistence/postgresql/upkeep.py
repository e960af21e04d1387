"""Lets ended tasks leave the database: begins new parts, and replaces parts and generations in
which little counts by a copy of it.

A copy is made beside the work of the shard: a transaction with one snapshot, of batch N, writes all
that counts into new tables, which nobody else knows. Then, under the writer's lock, one short
statement adds the rows of later batches, and makes the copy a table of the shard, unless the writer
has claimed the shard again meanwhile: a standby that was promoted can lack the copy. The old tables
are dropped; while somebody reads one of them (a backup, pg_dump), it is left until later. A part in
which nothing counts has no copy: it is only dropped, and so are most parts.

A part is complete when it has ``part_rows`` rows; with very many tasks it has more, so that there
are never many parts.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from functools import reduce
from itertools import pairwise, product
from typing import TYPE_CHECKING

from tickwheel import failpoints
from tickwheel.model.records import ID_MAX
from tickwheel.persistence.contract import StoreError
from tickwheel.persistence.on_server import NoReply, ServerTrouble
from tickwheel.persistence.postgresql.driver import LONG_CALL_MS, Link, ServerError
from tickwheel.persistence.postgresql.layout import (
    SQL,
    Filling,
    Parts,
    switch_generation,
    switch_parts,
)
from tickwheel.persistence.postgresql.opening import drop, drop_abandoned, next_number
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tickwheel.persistence.postgresql.driver import PostgresOptions
    from tickwheel.persistence.postgresql.writer import Writer

log = logging.getLogger(__name__)

EVERY_S = 1.0
TROUBLE_S_MAX = 60.0
"""Maximum pause after a failure. A copy that fails can have taken a minute of the server."""
ROW_BYTES = 1_300
"""Average bytes of a body above which a part is complete before it has ``part_rows`` tasks."""
PARTS_SHARE = 16
"""With many tasks a part has at least this fraction of them, which bounds the number of parts."""
PARTS_MAX = 64
WASTE_FACTOR = 4
"""A part is copied when it has this many times the rows that count, and some more."""


class Upkeep:
    """The upkeep of an open shard. Call ``start`` when it is open, ``stop`` before it closes."""

    def __init__(self, options: PostgresOptions, writer: Writer) -> None:
        self._options = options
        self._writer = writer
        self._link = Link(options)
        self._counted: set[int] = set()
        """The parts whose ``Filling`` includes the rows from before the shard was opened."""
        self._has_counted_generation = False
        self._drops: set[int] = set()
        """Numbers of tables that must be dropped unless they are the shard's. They are noted before
        they are made or replaced, because a failure can leave either."""
        self._task: asyncio.Task[None] | None = None
        self._logged = ""
        self._lock = asyncio.Lock()
        """Held while the connection is used."""

    def start(self, upto: int) -> None:
        """``upto``: a number of a part from before this epoch. Tables up to it that are not the
        shard's were abandoned."""
        self._task = asyncio.get_running_loop().create_task(self._run(self._writer.parts, upto))

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await cancel_all([task])
        await self._link.close()

    async def _run(self, parts: Parts, upto: int) -> None:
        with suppress(StoreError):
            async with self._lock:
                await drop_abandoned(self._link, self._options, parts, upto)
        pause_s = EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.step()
                self._logged, pause_s = "", EVERY_S
            except ServerTrouble as error:
                self._link.drop()
                pause_s = min(2 * pause_s, TROUBLE_S_MAX)
                if error.message != self._logged:
                    self._logged = error.message
                    log.warning("store %s: ended tasks stay: %s", self._options.name, error.message)
            except StoreError:
                return  # the next commit gets the error
            except Exception:
                self._link.drop()
                pause_s = min(2 * pause_s, TROUBLE_S_MAX)
                log.exception("store %s: its upkeep failed; it is repeated", self._options.name)

    async def step(self) -> None:
        """Do what is necessary now. Raise StoreError."""
        writer, few = self._writer, self._few
        async with self._lock:
            await self._drop()
            await self._count()
            if self._is_full():
                await self._begin_part()
            sources = self._wasteful()
            if sources:
                await self._copy_parts(sources)
            if writer.batches >= few or writer.record_bytes >= few * ROW_BYTES:
                await self._copy_generation()
            await self._drop()

    async def _drop(self) -> None:
        """Drop the tables that were replaced, and those of copies that failed."""
        if not self._drops:
            return
        async with self._settled():
            parts = self._writer.parts
        self._drops.difference_update((*parts.numbers, parts.generation))
        for number in sorted(self._drops):
            with suppress(ServerError):  # somebody reads one of them
                await drop(self._link, SQL["drop"].format(at=self._at(number)))
                self._drops.discard(number)

    # --- decisions ---------------------------------------------------------------------------

    async def _count(self) -> None:
        """Count the rows from before the shard was opened."""
        writer = self._writer
        for number in writer.parts.numbers:
            if number in self._counted:
                continue
            before = await self._filling(number)
            if number not in writer.parts.numbers:
                continue
            self._counted.add(number)
            # Batches that were applied during the count are counted twice, which does no harm.
            writer.fillings[number] = Filling(*map(max, self._of(number), before))
        if not self._has_counted_generation:
            statement = SQL["fill_of_generation"].format(at=writer.parts.at)
            ((batches, size_bytes),) = await self._link.fetch(statement, timeout_ms=LONG_CALL_MS)
            self._has_counted_generation = True
            writer.batches = max(writer.batches, batches)
            writer.record_bytes = max(writer.record_bytes, size_bytes)

    def _at(self, number: int) -> str:
        return f"{self._options.shard}_{number}"

    async def _filling(self, number: int) -> Filling:
        statement = SQL["fill_of_part"].format(at=self._at(number))
        return Filling(*(await self._link.fetch(statement, timeout_ms=2 * LONG_CALL_MS))[0])

    def _of(self, number: int) -> Filling:
        return self._writer.fillings.get(number, Filling())

    def _part_rows(self) -> int:
        counting = sum(self._of(number).counting for number in self._writer.parts.numbers)
        return max(self._options.part_rows, counting // PARTS_SHARE)

    @property
    def _few(self) -> int:
        """Number of rows that are worth no copy."""
        return self._options.part_rows * 2 // 5

    def _is_full(self) -> bool:
        """Return whether new tasks should go to a new part."""
        filling, rows_max = self._of(self._writer.parts.numbers[-1]), self._part_rows()
        return (
            filling.rows >= rows_max
            or filling.notes >= WASTE_FACTOR * rows_max
            or filling.size_bytes >= rows_max * ROW_BYTES
        )

    def _wasteful(self) -> list[int]:
        """Return neighbouring parts, without the last, that should be replaced by one copy; empty:
        there are none."""
        numbers = self._writer.parts.numbers[:-1]
        for index, number in enumerate(numbers):
            filling = self._of(number)
            counting = filling.counting
            waste = filling.rows + filling.notes - WASTE_FACTOR * counting
            is_over = not counting and filling.rows + filling.passed
            if is_over or waste >= self._few:
                return self._with_neighbours(numbers, index)
        if len(numbers) < PARTS_MAX:
            return []
        return list(
            min(pairwise(numbers), key=lambda pair: sum(self._of(one).counting for one in pair))
        )

    def _with_neighbours(self, numbers: tuple[int, ...], index: int) -> list[int]:
        """Return the part at ``index`` with neighbours that fit into one part with it, or only with
        empty ones if it is empty."""
        start, stop = index, index + 1
        counts = [self._of(number).counting for number in numbers]
        rows_max = self._part_rows() // 2 if counts[index] else 0
        while start > 0 and sum(counts[start - 1 : stop]) <= rows_max:
            start -= 1
        while stop < len(numbers) and sum(counts[start : stop + 1]) <= rows_max:
            stop += 1
        return list(numbers[start:stop])

    # --- changes -----------------------------------------------------------------------------

    async def _begin_part(self) -> None:
        writer, number = self._writer, await next_number(self._link)
        at = self._at(number)
        self._drops.add(number)
        await self._link.execute(SQL["part_tables"].format(at=at))
        async with self._settled():
            # No id of the last part may be above its end, whatever the id mark is.
            last = self._at(writer.parts.numbers[-1])
            ((highest,),) = await self._link.fetch(SQL["highest_id"].format(at=last))
            low = max(writer.id_mark, writer.parts.lows[-1], highest or 0) + 1
            if low <= ID_MAX and await writer.switch(SQL["new_part"], number, low, f"task_{at}"):
                self._counted.add(number)

    async def _copy_parts(self, sources: list[int]) -> None:
        writer, shard = self._writer, self._options.shard
        parts, fence, target = writer.parts, writer.fence, await next_number(self._link)
        before = reduce(Filling.plus, map(self._of, sources))
        self._drops.update((target, *sources))
        names = "part_tables", "copy_tasks", "copy_notes"
        batch = await self._copy(parts, sources, target, *names)
        copied = await self._filling(target)
        is_empty = not copied.rows and not copied.notes
        low = parts.lows[parts.numbers.index(sources[0])]
        failpoints.hit("postgresql.copied")
        async with self._settled():
            now = reduce(Filling.plus, map(self._of, sources))
            notes, passed = now.notes - before.notes, now.passed - before.passed
            is_over = now.rows == before.rows and notes == passed
            if (writer.parts, writer.fence) != (parts, fence) or (is_empty and not is_over):
                return
            statement = switch_parts(shard, sources, None if is_empty else target, low)
            if not await writer.switch(statement, batch):
                return
            for number in sources:
                writer.fillings.pop(number, None)
            if not is_empty:
                writer.fillings[target] = copied.plus(Filling(0, 0, notes, passed))
                self._counted.add(target)
        self._counted.difference_update(sources)

    async def _copy_generation(self) -> None:
        writer, shard = self._writer, self._options.shard
        parts, fence, target = writer.parts, writer.fence, await next_number(self._link)
        source = parts.generation
        self._drops.update((target, source))
        names = "generation_tables", "copy_records", "copy_journal"
        batch = await self._copy(parts, [source], target, *names)
        async with self._settled():
            statement = switch_generation(shard, source, target)
            is_same = (writer.parts, writer.fence) == (parts, fence)
            if is_same and await writer.switch(statement, batch):
                writer.batches = writer.record_bytes = 0

    @asynccontextmanager
    async def _settled(self) -> AsyncIterator[None]:
        """Hold the writer's lock while every batch that was sent is decided. One without an answer
        can have added ids to the last part. Raise NoReply if the connection reaches another server
        than the writer's, for example a former primary."""
        writer, options = self._writer, self._options
        async with writer.lock:
            await writer.ready()
            ((link,),) = await self._link.fetch(SQL["link"], options.shard)
            if (link or 0) < writer.fence[-1]:
                raise NoReply(f"{options.name}: its upkeep reaches another server than its writer")
            yield

    async def _copy(
        self, parts: Parts, sources: Sequence[int], target: int, tables: str, *names: str
    ) -> int:
        """Create tables, and copy to them what counts in ``sources``, in a transaction with one
        snapshot. Return the number of its last batch."""
        link, to, endings_max = self._link, self._at(target), self._options.endings_max
        await link.execute(SQL[tables].format(at=to))
        async with link.transaction("ISOLATION LEVEL REPEATABLE READ"):
            rows = await link.fetch(SQL["last"].format(at=parts.at))
            for at, name in product(map(self._at, sources), names):
                statement = SQL[name].format(at=at, to=to, endings_max=endings_max)
                await link.execute(statement, timeout_ms=LONG_CALL_MS)
        return int(rows[0]["last"])
