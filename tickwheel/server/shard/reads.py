"""Reads of one shard: what is recorded of a task *now*, the commands that need it, and the rows
that must be in memory before they fire.

``Reader``: a read runs beside commits. Effects are absolute and idempotent, so laying every batch
that was not durable when the read began over its result, in order, gives the present state whatever
part of them the read has seen. Each read under way notes what batches that land say of the ids it
asked for, and nothing else: its notes are bounded by these ids, and end with it.

It is also where a row that must be there and is not is noticed, for everybody who reads. A task
that memory holds has not ended, so a read without its row is wrong: the row is read again a few
times, and if it stays away that is logged, counted and shown by ``/readyz``. Whoever asked for it
learns that it is missing, never that it has left. Invariant: of ``ids`` that were read, those that
are neither found nor in ``Core.missing`` have left, as far as memory knows.

``Commands``: cancel, reschedule, look-up, acks by earlier receipts and the like, with one read for
all that wait. Their order is the order of arrival, over all connections. A read ends at so many
bytes, wherever that is among the ids of a command; the rest is read next, before anything later.
A command by key has no ids before its turn to be read has come: then it asks the index of keys.
Invariant: what a command does to an id it does in the same step of the loop in which the record was
overlaid, so nothing can come between.

``Loader``: rows that are not in memory when their time has come are read and handed to the engine.
One load is under way at a time, bounded in rows and in bytes: that is what may be in memory beside
the budget. Missing rows are looked for again, at a bounded pace, until they are found or their
tasks have ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tickwheel.engine.topics import Group
from tickwheel.errors import Overloaded, RowMissing, TickwheelError
from tickwheel.model.kinds import Effects, ProgressKey
from tickwheel.model.lateness import SLOW_MS, Cause
from tickwheel.model.records import NO_BODY, TaskSnapshot, task_bytes
from tickwheel.persistence.contract import Heads, Moves, Store, StoreAway, head_row, is_cut

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.engine.engine import Engine
    from tickwheel.engine.state import Core
    from tickwheel.server.shard.callers import Ask, Border, Caller, OnEvent


AWAY_RETRY_S, BACK_RETRY_S = 0.2, 0.5
"""How soon a store that is away is asked again, in seconds: for somebody who waits, and for work in
the background."""
READS_MAX = 64
"""Reads under way; others wait, because each batch that lands is looked through by all reads."""
SCANS_AT_A_TIME = 4
"""Scans at one time, for listings and replays: each may bring a page of many bytes."""
BULK_READS_MAX = 2
"""Reads of all bulk operations at one time: one is read while another is looked at. They have
places of their own, so that other reads never wait for them."""
BULK_READ_BYTES_MAX = 2 << 20
"""Bytes of rows that all bulk operations together have in memory, and so of one read. A store
decodes a read in one go, which nothing else can interrupt."""
BULK_SCANS_AT_A_TIME = 1
"""Scans of bulk operations at one time, which read rows to find a page of ids."""
BULK_SCAN_BYTES, BULK_SCAN_FIRST = 1 << 20, 64
"""Bytes of a bulk operation's page, by the rows of the page before; rows of the first page."""
READS_AGAIN_MAX = 4
"""How often rows that must be there are read again before they are called missing."""
AGAIN_S = 0.05
IDS_LOGGED_MAX = 10
NO_LIMIT = 1 << 62

NOTHING: Mapping[str, Any] = MappingProxyType({})
T = TypeVar("T")


async def when_back(ask: Callable[[], Awaitable[T]]) -> T:
    """What a store answers work in the background, which waits for it while it is away."""
    while True:
        try:
            return await ask()
        except StoreAway:
            await asyncio.sleep(BACK_RETRY_S)


class Records(Mapping[int, TaskSnapshot]):
    """The records of some tasks now, most of them as columns: a snapshot of one is made when it is
    asked for."""

    __slots__ = ("_whole", "keys_of", "plain")

    def __init__(
        self,
        whole: dict[int, TaskSnapshot],
        plain: dict[str, dict[int, int]],
        keys_of: Mapping[int, str],
    ) -> None:
        self._whole = whole
        self.plain = plain
        """Topic → id → due_ms of tasks of which only bodies and keys are recorded beside."""
        self.keys_of = keys_of
        """Id → key of those tasks of ``plain`` that have one, and maybe of others."""

    def __getitem__(self, task_id: int) -> TaskSnapshot:
        for topic, dues_ms in self.plain.items():
            due_ms = dues_ms.get(task_id)
            if due_ms is not None:
                row = head_row(task_id, due_ms, topic, self.keys_of)
                return TaskSnapshot(row, NOTHING, NOTHING)
        return self._whole[task_id]

    def __iter__(self) -> Iterator[int]:
        return chain(self._whole, *self.plain.values())

    def __len__(self) -> int:
        return len(self._whole) + sum(map(len, self.plain.values()))


View = Callable[[Sequence[int]], Mapping[int, TaskSnapshot]]


class BulkReads(Protocol):
    """Reads the first of ``ids`` up to a bulk operation's share of bytes, as
    ``Reader.read_some``."""

    def __call__(
        self, ids: Sequence[int], *, bodies: bool = False
    ) -> AbstractAsyncContextManager[tuple[View, Sequence[int]]]: ...


class _UnderWay:
    """One read under way, and what landed of its tasks since it began."""

    __slots__ = ("bodies", "since", "wanted")

    def __init__(self, ids: Iterable[int], *, bodies: bool = True) -> None:
        self.bodies = bodies
        self.wanted = frozenset(ids)
        self.since = Effects()

    def landed(self, effects: Effects) -> None:
        """Note a batch that landed; later states replace earlier ones."""
        wanted, since = self.wanted, self.since
        for task_id in wanted & effects.enqueued.keys():
            since.enqueued[task_id] = effects.enqueued[task_id]
        for task_id in wanted & effects.updated.keys():
            since.updated[task_id] = effects.updated[task_id]
            since.moved.pop(task_id, None)
        for task_id in wanted & effects.moved.keys():
            since.moved[task_id] = effects.moved[task_id]
        for task_id in wanted & effects.ended.keys():
            since.ended[task_id] = effects.ended[task_id]
        since.progress |= {k: row for k, row in effects.progress.items() if k[0] in wanted}
        since.dead |= {k: row for k, row in effects.dead.items() if k[0] in wanted}


class Reader:
    """Reads records for the engine. Use a result before the next await."""

    def __init__(
        self, core: Core, store: Store, on_event: OnEvent = lambda event, text: None
    ) -> None:
        self._core = core
        self._store = store
        self._moves = store if isinstance(store, Moves) else None
        self._on_event = on_event
        self._under_way: set[_UnderWay] = set()
        self._places = asyncio.Semaphore(READS_MAX)
        self._scans = asyncio.Semaphore(SCANS_AT_A_TIME)
        self._bulk_places = asyncio.Semaphore(BULK_READS_MAX)
        self._bulk_scans = asyncio.Semaphore(BULK_SCANS_AT_A_TIME)
        self._bulk_rows = BULK_SCAN_FIRST
        """Rows of the next page for a bulk operation."""

    def landed(self, effects: Effects) -> None:
        """Tell reads under way of a durable batch, which they may or may not have seen."""
        for read in self._under_way:
            read.landed(effects)

    async def known(self, ids: Sequence[int]) -> Mapping[int, TaskSnapshot]:
        """The records of those of ``ids`` that exist now."""
        async with self.read(ids) as view:
            return view(ids)

    @asynccontextmanager
    async def read(self, ids: Sequence[int]) -> AsyncIterator[View]:
        """Read once and look several times: the view shows any of ``ids`` as of its call, with the
        effects of what was commanded meanwhile."""
        async with self.read_some(ids, NO_LIMIT) as (view, _):
            yield view

    @asynccontextmanager
    async def read_some(
        self, ids: Sequence[int], bytes_max: int, *, bodies: bool = True
    ) -> AsyncIterator[tuple[View, Sequence[int]]]:
        """``read`` of the first of ``ids``, which are distinct, until their rows reach
        ``bytes_max``; the others are given beside the view, for another read. Without
        ``bodies`` rows may have ``NO_BODY``, and the view may show ``Records``."""
        async with self._places, self._read(ids, bytes_max, bodies=bodies) as found:
            yield found

    @asynccontextmanager
    async def bulk_turn(self) -> AsyncIterator[BulkReads]:
        """A bulk operation's turn to read, in the order of asking: it gets the means to read, for
        what it looks at before it gives the turn back."""
        async with self._bulk_places:
            yield self._read_for_bulk

    @asynccontextmanager
    async def bulk_scan(self) -> AsyncIterator[None]:
        """Wait for the turn to scan for a bulk operation."""
        async with self._bulk_scans:
            yield

    def _read_for_bulk(
        self, ids: Sequence[int], *, bodies: bool = False
    ) -> AbstractAsyncContextManager[tuple[View, Sequence[int]]]:
        return self._read(ids, BULK_READ_BYTES_MAX // BULK_READS_MAX, bodies=bodies)

    @asynccontextmanager
    async def _read(
        self, ids: Sequence[int], bytes_max: int, *, bodies: bool
    ) -> AsyncIterator[tuple[View, Sequence[int]]]:
        """A read that has a place."""
        with self._noting(ids, bodies=bodies) as read:
            stored, rest = await self._stored(read, ids, bytes_max) if ids else (Heads(), ())
            rest = await self._look_again(read, stored, ids, rest, bytes_max)
            yield lambda some: self._overlay(read, stored, some), rest

    async def scan(
        self, after_id: int, limit: int, topic: str | None, *, back: bool = False
    ) -> tuple[list[TaskSnapshot], int | None]:
        """A page of tasks by id, and the id to go on after (None: this was the last page).

        ``back``: those below ``after_id``, the highest first. Which tasks these are is known only
        when the store has answered, so what landed meanwhile is not noted: they are read again by
        their ids.
        """
        scan = self._store.scan_back if back else self._store.scan
        async with self._scans:
            stored = await scan(after_id, limit, topic)
            ids = [task.row.id for task in stored]
            following = ids[-1] if len(ids) >= limit or is_cut(stored) else None
            del stored  # the bodies of a page are here once
            found = await self.known(ids)
        return [found[i] for i in ids if i in found], following

    async def ids_after(
        self, after_id: int, limit: int, topic: str | None
    ) -> tuple[list[int], bool]:
        """The ids of a page of stored tasks, and whether it is the last: for bulk operations."""
        async with self.bulk_scan():
            rows = min(limit, self._bulk_rows)
            stored = await self._store.scan(after_id, rows, topic)
            if stored:
                each_bytes = max(1, sum(task_bytes(task.row) for task in stored) / len(stored))
                self._bulk_rows = max(1, min(4 * rows, int(BULK_SCAN_BYTES / each_bytes)))
            return [task.row.id for task in stored], len(stored) < rows and not is_cut(stored)

    @contextmanager
    def _noting(self, ids: Iterable[int], *, bodies: bool) -> Iterator[_UnderWay]:
        """Note what lands of these tasks meanwhile."""
        read = _UnderWay(ids, bodies=bodies)
        self._under_way.add(read)
        try:
            yield read
        finally:
            self._under_way.remove(read)

    async def _stored(
        self, read: _UnderWay, ids: Sequence[int], bytes_max: int
    ) -> tuple[Heads, Sequence[int]]:
        """Read from the store. While it is away, commands and due tasks wait for it."""
        while True:
            try:
                if self._moves is not None and not read.bodies:
                    return await self._moves.read_heads(ids, bytes_max)
                if bytes_max == NO_LIMIT:
                    return Heads(others=await self._store.read(ids)), ()
                found, rest = await self._store.read_some(ids, bytes_max)
                return Heads(others=found), rest
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)

    # --- rows that are missing -------------------------------------------------------------------

    async def _look_again(
        self,
        read: _UnderWay,
        stored: Heads,
        ids: Sequence[int],
        rest: Sequence[int],
        bytes_max: int,
    ) -> Sequence[int]:
        """Add tasks to ``stored`` that must exist and were not found at first, and note missing
        ones; returns the ids that are left."""
        asked = ids[: len(ids) - len(rest)]
        absent = self._unexplained(read, stored.absent(asked))
        # Of some of these only the store could say that they have not ended: once more for all.
        turn = 0
        while absent and turn <= READS_AGAIN_MAX:
            if turn:
                await asyncio.sleep(AGAIN_S)
            wanted = [task_id for task_id in asked if task_id in absent]
            found, left = await self._stored(read, wanted, bytes_max)
            stored.add(found)
            if left:  # all that come after the first of them wait for another read
                place = asked.index(left[0])
                stored.drop(frozenset(asked[place:]))
                asked = asked[:place]
            turn += 1
            absent = self._core.held(self._unexplained(read, stored.absent(asked)))
            absent -= self._core.missing.keys()
        if absent or self._core.missing:
            unexplained = self._unexplained(read, stored.absent(asked))
            self._note(set(asked), self._core.held(unexplained))
        return ids[len(asked) :]

    def _unexplained(self, read: _UnderWay, absent: set[int]) -> set[int]:
        """The absent tasks that must exist, or are long forgotten, as far as memory knows."""
        core = self._core
        return {
            task_id
            for task_id in absent
            if core.was_assigned(task_id)
            and task_id not in read.since.enqueued
            and task_id not in read.since.ended
            and core.outcomes.get(task_id) is None
        }

    def _note(self, asked: set[int], absent: set[int]) -> None:
        missing = self._core.missing
        again = (asked & missing.keys()) - absent
        for task_id in again:
            del missing[task_id]
        if again:
            self._on_event("rows_found_again", _described(again, "are there again, or have ended"))
        fresh = absent - missing.keys()
        if fresh:
            missing.update(dict.fromkeys(fresh))
            self._core.totals.rows_missing += len(fresh)
            why = "have not ended, and the store does not have their rows; they wait for them"
            self._on_event("rows_missing", _described(fresh, why))

    def missing(self, ids: Iterable[int]) -> list[int]:
        """The ids of unfinished tasks whose last read found no row."""
        missing = self._core.missing
        return [task_id for task_id in ids if task_id in missing] if missing else []

    # --- what is not committed yet ---------------------------------------------------------------

    def _overlay(
        self, read: _UnderWay, stored: Heads, ids: Sequence[int]
    ) -> Mapping[int, TaskSnapshot]:
        landed_id, others, sealed = self._core.landed_id, stored.others, self._core.sealed
        found = {
            row.id: TaskSnapshot(row, {p.group: p for p in progress}, {d.group: d for d in dead})
            if progress or dead
            else TaskSnapshot(row, NOTHING, NOTHING)
            for row, progress, dead in (others[i] for i in ids if i in others)
            # The store may be a step ahead: a task whose batch has not landed here is unseen.
            if row.id <= landed_id
        }
        batches = [read.since, self._core.open.effects]
        if sealed is not None:
            batches.insert(1, sealed.effects)
        plain = {
            topic: self._plain_now(topic, stored, ids, batches, found) for topic in stored.plain
        }
        wanted = frozenset(ids)
        for task_id in wanted & read.since.enqueued.keys():
            if not any(task_id in dues_ms for dues_ms in plain.values()):
                found.setdefault(task_id, TaskSnapshot(read.since.enqueued[task_id], {}, {}))
        for effects in batches:
            self._lay_over(found, wanted, effects)
        return Records(found, plain, stored.keys) if plain else found

    def _plain_now(
        self,
        topic: str,
        heads: Heads,
        ids: Sequence[int],
        batches: Sequence[Effects],
        found: dict[int, TaskSnapshot],
    ) -> dict[int, int]:
        """Id → due_ms of those of ``ids`` that are still plain. The others go to ``found``, as
        stored."""
        landed_id, stored = self._core.landed_id, heads.plain[topic]
        plain = {i: stored[i] for i in ids if i in stored and i <= landed_id}
        groups = self._groups_of(topic)
        changed: set[int] = set()
        for effects in batches:
            changed |= plain.keys() & effects.updated.keys()
            changed |= plain.keys() & effects.ended.keys()
            if groups and (effects.progress or effects.dead):
                changed |= {
                    task_id
                    for task_id in plain
                    for group in groups
                    if (task_id, group) in effects.progress or (task_id, group) in effects.dead
                }
        for task_id in changed:
            row = head_row(task_id, plain.pop(task_id), topic, heads.keys)
            found[task_id] = TaskSnapshot(row, NOTHING, NOTHING)
        for effects in batches:
            for task_id in plain.keys() & effects.moved.keys():
                plain[task_id] = effects.moved[task_id]
        return plain

    def _groups_of(self, topic: str) -> Mapping[str, Group]:
        """The groups that the topic has now, by name."""
        found = self._core.topics.get(topic)
        return NOTHING if found is None else found.groups

    def _lay_over(
        self, found: dict[int, TaskSnapshot], wanted: frozenset[int], effects: Effects
    ) -> None:
        """Apply one batch to records already found; tasks that are only staged stay unseen."""
        for task_id in wanted & effects.updated.keys():
            if task_id in found:
                row = effects.updated[task_id]
                if row.body is NO_BODY:
                    row = row._replace(body=found[task_id].row.body)
                found[task_id] = found[task_id]._replace(row=row)
        for task_id in wanted & effects.moved.keys():
            if task_id in found:
                row = found[task_id].row._replace(due_ms=effects.moved[task_id])
                found[task_id] = found[task_id]._replace(row=row)
        if effects.progress or effects.dead:
            for task_id, known in found.items():
                # Of a group that is gone by now, too: what was read may still say of it.
                for group in {**self._groups_of(known.row.topic), **known.progress, **known.dead}:
                    known = _with_group(known, (task_id, group), effects)
                found[task_id] = known
        for task_id in wanted & effects.ended.keys():
            found.pop(task_id, None)


def _described(ids: set[int], what: str) -> str:
    named = ", ".join(map(str, sorted(ids)[:IDS_LOGGED_MAX]))
    more = f" and {len(ids) - IDS_LOGGED_MAX} more" if len(ids) > IDS_LOGGED_MAX else ""
    return f"{len(ids)} tasks {what}: {named}{more}"


def _with_group(known: TaskSnapshot, key: ProgressKey, effects: Effects) -> TaskSnapshot:
    if key in effects.progress:
        rows = {g: p for g, p in known.progress.items() if g != key[1]}
        progress = effects.progress[key]
        if progress is not None:
            rows[key[1]] = progress
        known = known._replace(progress=rows)
    if key in effects.dead:
        letters = {g: d for g, d in known.dead.items() if g != key[1]}
        dead = effects.dead[key]
        if dead is not None:
            letters[key[1]] = dead
        known = known._replace(dead=letters)
    return known


IDS_PER_READ_MAX = 16_384
BYTES_PER_READ_MAX = 16 << 20
"""Bytes of one read of rows with their bodies."""

Act = Callable[[range, Mapping[int, TaskSnapshot]], None]
Find = Callable[[], Sequence[int]]


@dataclass(slots=True, eq=False)
class Command:
    """One command that needs records. ``act`` gets ranges of indexes into ``ids``, one after the
    other, and the records of those that exist; ``done`` answers at the end, ``refuse`` with an
    error. One that is not ``wanted`` any more is not read."""

    caller: Caller
    refuse: Callable[[TickwheelError], None]
    ids: Sequence[int]
    find: Find | None
    """Finds the ids when the command's turn has come; None: they are known."""
    act: Act
    done: Callable[[], None]
    wanted: Callable[[], bool]
    bodies: bool
    at_once: int
    """On so many of its ids it acts in one turn of the event loop."""
    error: TickwheelError | None = None
    at: int = 0
    """How many of the ids are done with."""

    def resolve(self) -> int:
        """Find the ids when the command's turn has come; returns how many were added."""
        find, self.find = self.find, None
        if find is None:
            return 0
        try:
            self.ids = find()
        except TickwheelError as error:
            self.error = error
        return len(self.ids)

    @property
    def is_over(self) -> bool:
        return self.at >= len(self.ids) or not self.wanted()


@dataclass(eq=False)
class Commands:
    """The queue of commands that need records; ``run`` works on it."""

    _reader: Reader
    _border: Border
    _commands_max: int
    _ids_max: int
    _has_room: Callable[[Caller], bool]
    """Whether what commands change, and what this caller is answered, may grow further. If not, the
    next one waits for ``_durable``."""
    _durable: Callable[[], Awaitable[None]]

    def __post_init__(self) -> None:
        self._waiting: deque[Command] = deque()
        self._ids = 0
        self._wake = asyncio.Event()

    def put(
        self,
        caller: Caller,
        refuse: Callable[[TickwheelError], None],
        ids: Sequence[int] | Find,
        act: Act,
        done: Callable[[], None],
        wanted: Callable[[], bool] = lambda: True,
        *,
        bodies: bool = False,
        at_once: int = IDS_PER_READ_MAX,
    ) -> None:
        """Queue a command; ``bodies``: it needs them; ``at_once``: on so many ids it acts in one
        turn of the event loop. ``ids`` may be a function that says them when they can be read; what
        it raises is the answer. Raises Overloaded when the queue is full."""
        if len(self._waiting) >= self._commands_max:
            raise Overloaded(
                f"{len(self._waiting)} commands are waiting; the limit is {self._commands_max}"
                " (commands_max)"
            )
        known, find = ((), ids) if callable(ids) else (ids, None)
        count = len(known)
        if self._ids and self._ids + count > self._ids_max:
            raise Overloaded(
                f"commands on {self._ids} ids are waiting, and {count} more would be too many;"
                f" the limit is {self._ids_max} (command_ids_max)"
            )
        self._ids += count
        self._waiting.append(
            Command(caller, refuse, known, find, act, done, wanted, bodies, at_once)
        )
        self._wake.set()

    def put_last(self, ask: Ask[Any], done: Callable[[], None]) -> None:
        """Queue a command that names no ids: it is ``done`` when its turn has come, and every
        stored task is in memory. Raises Overloaded."""
        self.put(ask.caller, ask.refuse, (), lambda some, known: None, done)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                if not self._has_room(self._waiting[0].caller):
                    await self._durable()
                await self._some()
                await asyncio.sleep(0)  # the read may have come from memory

    async def _some(self) -> None:
        """Read once, and act on the commands that the read is for."""
        parts = self._parts()
        wanted = dict.fromkeys(i for command, stop in parts for i in command.ids[command.at : stop])
        bodies = any(command.bodies for command, _ in parts)
        reading = self._reader.read_some(list(wanted), BYTES_PER_READ_MAX, bodies=bodies)
        async with reading as (view, rest):
            unread = frozenset(rest)
            for command, stop in parts:
                ids = command.ids
                # The first has waited for its room, and whatever else its caller asks for since
                # must not hold up the others behind it.
                if command is not parts[0][0] and not self._has_room(command.caller):
                    break
                if unread:
                    stop = next((i for i in range(command.at, stop) if ids[i] in unread), stop)
                if not self._is_over(command, stop, view):
                    break
                self._waiting.popleft()
                self._ids -= len(ids)

    def _is_over(self, command: Command, stop: int, view: View) -> bool:
        """Act on a command's ids up to ``stop``; whether it is answered, be it by an error."""
        some, command.at = range(command.at, stop), stop
        self._border.begin()
        try:
            if command.error is not None:
                raise command.error
            if some:
                self._check(command.ids[some.start : some.stop])
                command.act(some, view(command.ids[some.start : some.stop]))
            if not command.is_over:
                return False
            command.done()
        except TickwheelError as error:
            command.refuse(error)
        except Exception as error:
            command.refuse(self._border.contain(f"a command of {command.caller.address}", error))
        return True

    def _check(self, ids: Sequence[int]) -> None:
        """Raises RowMissing for a missing row: it would count as that of an ended task."""
        missing = self._reader.missing(ids)
        if missing:
            raise RowMissing(f"the store has no row of {missing[0]}, which has not ended")

    def _parts(self) -> list[tuple[Command, int]]:
        """The next commands, and how far to read for each."""
        parts: list[tuple[Command, int]] = []
        left = IDS_PER_READ_MAX
        for command in self._waiting:
            self._ids += command.resolve()
            is_wanted, stop = command.wanted(), command.at
            if is_wanted:
                stop = min(len(command.ids), stop + min(left, command.at_once))
            parts.append((command, stop))
            left -= stop - command.at
            if left <= 0 or (is_wanted and stop < len(command.ids)):
                break
        return parts


ROWS_PER_LOAD = 1_000
LOAD_BYTES_MAX = 8 << 20
LOAD_BYTES_MIN = 1 << 20
LOAD_SHARE = 8
"""The share of ``resident_bytes_max`` that one load may read, within the bounds above."""
MISSING_RETRY_S = 1.0
MISSING_PER_ROUND = 1_000


def load_bytes(resident_bytes_max: int) -> int:
    """About how many bytes of bodies one load reads; the last body may exceed them."""
    return max(LOAD_BYTES_MIN, min(LOAD_BYTES_MAX, resident_bytes_max // LOAD_SHARE))


@dataclass(eq=False)
class Loader:
    """``load`` takes over whatever the engine wants; each load asks for a tick. What is wanted
    while a load is under way is in the next one, whoever wants it."""

    _engine: Engine
    _reader: Reader
    _clock: Clock
    _spawn: Callable[[Coroutine[Any, Any, None]], object]
    _wake: Callable[[], None]

    def __post_init__(self) -> None:
        engine = self._engine
        self._core, self._firing, self._delivery = engine.core, engine.firing, engine.delivery
        self._bytes_max = load_bytes(self._core.config.resident_bytes_max)
        self._turn = asyncio.Lock()
        self._loads = self._looks = False
        self._due: list[int] = []
        self._over: list[int] = []
        """Ids of tasks whose time to live is over."""
        self._ready: dict[Group, list[int]] = {}
        """Ids of ready tasks by group; the group that was served longest ago is first."""

    @property
    def reads_most(self) -> bool:
        """Whether as many rows are being read for firing as may be, so that firing waits."""
        core = self._core
        return len(core.firing) >= core.config.loading_max + core.missing_apart

    def load(self) -> None:
        core = self._core
        if core.missing and not self._looks:
            self._looks = True
            self._spawn(self._look_for_missing())
        if not (core.wants or core.wants_lapsed or core.wants_ready):
            return
        self._due += core.wants
        self._over += core.wants_lapsed
        for group, ids in core.wants_ready.items():
            self._ready.setdefault(group, []).extend(ids)
        core.wants, core.wants_lapsed, core.wants_ready = [], [], {}
        if not self._loads:
            self._loads = True
            self._spawn(self._load())

    async def _load(self) -> None:
        while self._due or self._over or self._ready:
            await self._load_some()
        self._loads = False

    async def _load_some(self) -> None:
        """Load some rows: due and expired tasks first, but groups get half of the load."""
        share = ROWS_PER_LOAD // 2 if self._ready else ROWS_PER_LOAD
        due, self._due = self._due[:share], self._due[share:]
        share -= len(due)
        over, self._over = self._over[:share], self._over[share:]
        room, parts = ROWS_PER_LOAD - len(due) - len(over), list[tuple[Group, list[int]]]()
        for group in list(self._ready):
            ids = self._ready.pop(group)
            if len(ids) > room:
                self._ready = {group: ids[room:], **self._ready}
            parts.append((group, ids[:room]))
            room -= len(ids)
            if room <= 0:
                break
        known, left = await self._next([*due, *over, *(i for _, ids in parts for i in ids)])
        now_ms = self._clock.read().now_ms
        rows = {task_id: found.row for task_id, found in known.items()}
        self._due = [*(i for i in due if i in left), *self._due]
        self._over = [*(i for i in over if i in left), *self._over]
        self._firing.loaded([i for i in due if i not in left], rows, now_ms)
        self._firing.lapsed([i for i in over if i not in left], known, now_ms)
        for group, ids in parts:
            self._delivery.reading.loaded_ready(group, [i for i in ids if i not in left], rows)
        del known, rows
        await self._let_go()
        for group, ids in parts:
            self._load_more(group, [i for i in ids if i in left])

    def _load_more(self, group: Group, ids: list[int]) -> None:
        """Load as many rows as can be delivered or kept, which the last load may have changed."""
        ids += self._ready.pop(group, ())
        if not ids:
            return
        if group.is_held or not (group.credit_up_to(1) or self._core.reads_ahead):
            self._delivery.reading.not_loaded(group, ids)
        else:
            self._ready[group] = ids

    async def _next(self, ids: list[int]) -> tuple[Mapping[int, TaskSnapshot], set[int]]:
        """Records of those ids that a load has room for, and the ids that are left."""
        wanted, began_ms = list(dict.fromkeys(ids)), self._clock.read().now_ms
        async with self._turn, self._reader.read_some(wanted, self._bytes_max) as (view, left):
            now_ms = self._clock.read().now_ms
            if now_ms - began_ms >= SLOW_MS:
                self._core.ledger.daemon.add(Cause.STORE, began_ms, now_ms)
            return view(wanted[: len(wanted) - len(left)]), set(left)

    async def _let_go(self) -> None:
        """Let loaded tasks leave with the next tick, before more are loaded."""
        self._wake()
        await asyncio.sleep(0)

    async def _look_for_missing(self) -> None:
        """Look for missing rows, some at a time; those that were looked for last come last."""
        missing = self._core.missing
        while missing:
            await asyncio.sleep(MISSING_RETRY_S)
            ids = list(islice(missing, MISSING_PER_ROUND))
            known, left = await self._next(ids)
            for found in known.values():
                self._delivery.found_again(found, self._clock.read().now_ms)
            for task_id in ids:
                if task_id in missing and task_id not in left:
                    del missing[task_id]
                    missing[task_id] = None
            await self._let_go()
        self._looks = False
