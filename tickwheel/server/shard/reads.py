"""Reads the current records of tasks, runs commands that need records, and loads due rows.

``Reader`` reads during commits. Effects are absolute and idempotent, so applying to the result of a
read, in order, all batches that were not durable when it began gives the current state, whether or
not the read saw them. Each running read records the effects of landing batches on its own ids only,
which bounds the recorded effects.

``Reader`` also detects missing rows. A task in memory has not ended, so a read without its row is
wrong. The row is read again a few times; if it stays missing, this is logged, counted and shown by
``/readyz``. The caller learns that the row is missing, never that the task has ended. Invariant: as
far as memory knows, a task whose id a read neither returned nor added to ``Core.missing`` has
ended.

``Commands`` runs cancel, reschedule, look-up, acks by earlier receipts and similar commands in
order of arrival over all connections, with one read for all waiting commands. A read stops at a
limit of bytes, possibly within the ids of a command; the remaining ids are read next. A command by
key asks the index of keys for its ids when its turn comes. Invariant: a command changes a task in
the same step of the loop in which its record was overlaid, so no other change can come in between.

``Loader`` reads due rows that are not in memory and gives them to the engine. One load runs at a
time. Its rows and bytes are bounded, and are not part of the memory budget. Missing rows are
searched for at a bounded rate until they are found or their tasks have ended.
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
    from tickwheel.server.shard.callers import Border, Call, Caller, OnEvent


AWAY_RETRY_S, BACK_RETRY_S = 0.2, 0.5
"""Seconds between two tries while the store is unreachable: for waiting callers, and for background
work."""
READS_MAX = 64
"""Maximum number of running reads; others wait, because every landing batch is compared with all
reads."""
SCANS_MAX = 4
"""Maximum number of running scans of listings and replays; each can return a large page."""
BULK_READS_MAX = 2
"""Maximum number of running reads of bulk operations, so that one slice is read while another is
processed. They are limited separately, so that other reads never wait for them."""
BULK_READ_BYTES_MAX = 2 << 20
"""Maximum bytes of rows that all bulk operations together hold in memory. A store decodes the rows
of a read without interruption."""
BULK_SCANS_MAX = 1
"""Maximum number of running scans of bulk operations, which read rows to find a page of ids."""
BULK_SCAN_BYTES, BULK_SCAN_FIRST = 1 << 20, 64
"""Target size of a bulk operation's page, estimated from the rows of the previous page; and the
number of rows of the first page."""
REREADS_MAX = 4
"""Maximum number of further reads before an absent row counts as missing."""
REREAD_S = 0.05
IDS_LOGGED_MAX = 10
NO_LIMIT = 1 << 62

NOTHING: Mapping[str, Any] = MappingProxyType({})
T = TypeVar("T")


async def when_back(query: Callable[[], Awaitable[T]]) -> T:
    """Query the store for background work. While it is unreachable, wait and try again."""
    while True:
        try:
            return await query()
        except StoreAway:
            await asyncio.sleep(BACK_RETRY_S)


class Records(Mapping[int, TaskSnapshot]):
    """Current records of tasks, most of them as columns. A lookup creates the snapshot."""

    __slots__ = ("_snapshots", "keys_of", "plain")

    def __init__(
        self,
        snapshots: dict[int, TaskSnapshot],
        plain: dict[str, dict[int, int]],
        keys_of: Mapping[int, str],
    ) -> None:
        self._snapshots = snapshots
        self.plain = plain
        """Topic → id → due_ms of tasks that have no fields except a body and a key."""
        self.keys_of = keys_of
        """Id → key of the tasks of ``plain`` that have a key, and possibly of other tasks."""

    def __getitem__(self, task_id: int) -> TaskSnapshot:
        for topic, dues_ms in self.plain.items():
            due_ms = dues_ms.get(task_id)
            if due_ms is not None:
                row = head_row(task_id, due_ms, topic, self.keys_of)
                return TaskSnapshot(row, NOTHING, NOTHING)
        return self._snapshots[task_id]

    def __iter__(self) -> Iterator[int]:
        return chain(self._snapshots, *self.plain.values())

    def __len__(self) -> int:
        return len(self._snapshots) + sum(map(len, self.plain.values()))


View = Callable[[Sequence[int]], Mapping[int, TaskSnapshot]]


class BulkReads(Protocol):
    """Calls ``Reader.read_some`` with a bulk operation's share of bytes as the limit."""

    def __call__(
        self, ids: Sequence[int], *, bodies: bool = False
    ) -> AbstractAsyncContextManager[tuple[View, Sequence[int]]]: ...


class _RunningRead:
    """A running read, and the effects on its tasks that have landed since it began."""

    __slots__ = ("bodies", "since", "wanted")

    def __init__(self, ids: Iterable[int], *, bodies: bool = True) -> None:
        self.bodies = bodies
        self.wanted = frozenset(ids)
        self.since = Effects()

    def landed(self, effects: Effects) -> None:
        """Record the effects of a landed batch. Later states replace earlier ones."""
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
        self._running: set[_RunningRead] = set()
        self._places = asyncio.Semaphore(READS_MAX)
        self._scans = asyncio.Semaphore(SCANS_MAX)
        self._bulk_places = asyncio.Semaphore(BULK_READS_MAX)
        self._bulk_scans = asyncio.Semaphore(BULK_SCANS_MAX)
        self._bulk_rows = BULK_SCAN_FIRST
        """Maximum rows of a bulk operation's next page."""

    def landed(self, effects: Effects) -> None:
        """Record a durable batch in the running reads, because they may not have seen it."""
        for read in self._running:
            read.landed(effects)

    async def known(self, ids: Sequence[int]) -> Mapping[int, TaskSnapshot]:
        """Return the current records of those tasks of ``ids`` that exist."""
        async with self.read(ids) as view:
            return view(ids)

    @asynccontextmanager
    async def read(self, ids: Sequence[int]) -> AsyncIterator[View]:
        """Read ``ids`` once. Each call of the view returns their current records, including changes
        since the read."""
        async with self.read_some(ids, NO_LIMIT) as (view, _):
            yield view

    @asynccontextmanager
    async def read_some(
        self, ids: Sequence[int], bytes_max: int, *, bodies: bool = True
    ) -> AsyncIterator[tuple[View, Sequence[int]]]:
        """Do ``read`` for the first of the distinct ``ids``, until their rows reach ``bytes_max``.
        Yield the view and the ids that are left for another read. Without ``bodies``, rows may have
        ``NO_BODY`` and the view may return ``Records``."""
        async with self._places, self._read(ids, bytes_max, bodies=bodies) as view_and_rest:
            yield view_and_rest

    @asynccontextmanager
    async def bulk_turn(self) -> AsyncIterator[BulkReads]:
        """Wait for a bulk operation's turn to read, in order of arrival. Yield the read function,
        which is valid during the turn."""
        async with self._bulk_places:
            yield self._read_for_bulk

    @asynccontextmanager
    async def bulk_scan(self) -> AsyncIterator[None]:
        """Wait for a bulk operation's turn to scan."""
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
        """Perform a read that ``_places`` or ``_bulk_places`` has admitted."""
        with self._recording(ids, bodies=bodies) as read:
            stored, rest = await self._stored(read, ids, bytes_max) if ids else (Heads(), ())
            rest = await self._read_absent_again(read, stored, ids, rest, bytes_max)
            yield lambda ids: self._overlay(read, stored, ids), rest

    async def scan(
        self, after_id: int, limit: int, topic: str | None, *, back: bool = False
    ) -> tuple[list[TaskSnapshot], int | None]:
        """Return a page of tasks by id, and the id after which the next page begins, or None. With
        ``back``, return tasks below ``after_id``, the highest first. Before the store answers, the
        ids are unknown, so changes that land during the scan are not recorded. The tasks are
        therefore read again by id."""
        scan = self._store.scan_back if back else self._store.scan
        async with self._scans:
            stored = await scan(after_id, limit, topic)
            ids = [task.row.id for task in stored]
            following = ids[-1] if len(ids) >= limit or is_cut(stored) else None
            del stored  # keep the bodies of a page in memory only once
            tasks = await self.known(ids)
        return [tasks[i] for i in ids if i in tasks], following

    async def ids_after(
        self, after_id: int, limit: int, topic: str | None
    ) -> tuple[list[int], bool]:
        """Return the ids of a page of stored tasks for a bulk operation, and whether the page is
        the last."""
        async with self.bulk_scan():
            rows = min(limit, self._bulk_rows)
            stored = await self._store.scan(after_id, rows, topic)
            if stored:
                each_bytes = max(1, sum(task_bytes(task.row) for task in stored) / len(stored))
                self._bulk_rows = max(1, min(4 * rows, int(BULK_SCAN_BYTES / each_bytes)))
            return [task.row.id for task in stored], len(stored) < rows and not is_cut(stored)

    @contextmanager
    def _recording(self, ids: Iterable[int], *, bodies: bool) -> Iterator[_RunningRead]:
        """Record effects on these tasks that land during a read."""
        read = _RunningRead(ids, bodies=bodies)
        self._running.add(read)
        try:
            yield read
        finally:
            self._running.remove(read)

    async def _stored(
        self, read: _RunningRead, ids: Sequence[int], bytes_max: int
    ) -> tuple[Heads, Sequence[int]]:
        """Read from the store. While it is unreachable, wait and try again."""
        while True:
            try:
                if self._moves is not None and not read.bodies:
                    return await self._moves.read_heads(ids, bytes_max)
                if bytes_max == NO_LIMIT:
                    return Heads(others=await self._store.read(ids)), ()
                tasks, rest = await self._store.read_some(ids, bytes_max)
                return Heads(others=tasks), rest
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)

    # --- rows that are missing -------------------------------------------------------------------

    async def _read_absent_again(
        self,
        read: _RunningRead,
        stored: Heads,
        ids: Sequence[int],
        rest: Sequence[int],
        bytes_max: int,
    ) -> Sequence[int]:
        """Read again those tasks that are absent although they must exist, add them to ``stored``,
        and record the missing ones. Return the ids that are left for another read."""
        read_ids = ids[: len(ids) - len(rest)]
        absent = self._unexplained(read, stored.absent(read_ids))
        # Read all of them once more, because some may have ended without a trace in memory.
        turn = 0
        while absent and turn <= REREADS_MAX:
            if turn:
                await asyncio.sleep(REREAD_S)
            wanted = [task_id for task_id in read_ids if task_id in absent]
            heads, left = await self._stored(read, wanted, bytes_max)
            stored.add(heads)
            if left:  # the first of these ids and all later ones wait for another read
                index = read_ids.index(left[0])
                stored.drop(frozenset(read_ids[index:]))
                read_ids = read_ids[:index]
            turn += 1
            absent = self._core.unfinished_among(self._unexplained(read, stored.absent(read_ids)))
            absent -= self._core.missing.keys()
        if absent or self._core.missing:
            unexplained = self._unexplained(read, stored.absent(read_ids))
            self._update_missing(set(read_ids), self._core.unfinished_among(unexplained))
        return ids[len(read_ids) :]

    def _unexplained(self, read: _RunningRead, absent: set[int]) -> set[int]:
        """Return the absent tasks of whose end memory has no record."""
        core = self._core
        return {
            task_id
            for task_id in absent
            if core.was_assigned(task_id)
            and task_id not in read.since.enqueued
            and task_id not in read.since.ended
            and core.outcomes.get(task_id) is None
        }

    def _update_missing(self, read_ids: set[int], absent: set[int]) -> None:
        missing = self._core.missing
        found_ids = (read_ids & missing.keys()) - absent
        for task_id in found_ids:
            del missing[task_id]
        if found_ids:
            self._on_event(
                "rows_found_again", _described(found_ids, "were found again or have ended")
            )
        new_ids = absent - missing.keys()
        if new_ids:
            missing.update(dict.fromkeys(new_ids))
            self._core.totals.rows_missing += len(new_ids)
            why = "have no row in the store and wait for it"
            self._on_event("rows_missing", _described(new_ids, why))

    def missing(self, ids: Iterable[int]) -> list[int]:
        """Return the ids of tasks that have not ended but had no row in the last read."""
        missing = self._core.missing
        return [task_id for task_id in ids if task_id in missing] if missing else []

    # --- changes that are not durable ------------------------------------------------------------

    def _overlay(
        self, read: _RunningRead, stored: Heads, ids: Sequence[int]
    ) -> Mapping[int, TaskSnapshot]:
        landed_id, others, sealed = self._core.landed_id, stored.others, self._core.sealed
        snapshots = {
            row.id: TaskSnapshot(row, {p.group: p for p in progress}, {d.group: d for d in dead})
            if progress or dead
            else TaskSnapshot(row, NOTHING, NOTHING)
            for row, progress, dead in (others[i] for i in ids if i in others)
            # The store can be ahead of memory. Tasks whose batch has not landed stay invisible.
            if row.id <= landed_id
        }
        batches = [read.since, self._core.open.effects]
        if sealed is not None:
            batches.insert(1, sealed.effects)
        plain = {
            topic: self._plain_now(topic, stored, ids, batches, snapshots) for topic in stored.plain
        }
        wanted = frozenset(ids)
        for task_id in wanted & read.since.enqueued.keys():
            if not any(task_id in dues_ms for dues_ms in plain.values()):
                snapshots.setdefault(task_id, TaskSnapshot(read.since.enqueued[task_id], {}, {}))
        for effects in batches:
            self._apply(snapshots, wanted, effects)
        return Records(snapshots, plain, stored.keys) if plain else snapshots

    def _plain_now(
        self,
        topic: str,
        heads: Heads,
        ids: Sequence[int],
        batches: Sequence[Effects],
        snapshots: dict[int, TaskSnapshot],
    ) -> dict[int, int]:
        """Return id → due_ms of those tasks of ``ids`` that are still plain. Add the others, as
        stored, to ``snapshots``."""
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
            snapshots[task_id] = TaskSnapshot(row, NOTHING, NOTHING)
        for effects in batches:
            for task_id in plain.keys() & effects.moved.keys():
                plain[task_id] = effects.moved[task_id]
        return plain

    def _groups_of(self, topic: str) -> Mapping[str, Group]:
        """Return the current groups of the topic by name."""
        entry = self._core.topics.get(topic)
        return NOTHING if entry is None else entry.groups

    def _apply(
        self, snapshots: dict[int, TaskSnapshot], wanted: frozenset[int], effects: Effects
    ) -> None:
        """Apply one batch to ``snapshots``. Tasks that are only staged stay invisible."""
        for task_id in wanted & effects.updated.keys():
            if task_id in snapshots:
                row = effects.updated[task_id]
                if row.body is NO_BODY:
                    row = row._replace(body=snapshots[task_id].row.body)
                snapshots[task_id] = snapshots[task_id]._replace(row=row)
        for task_id in wanted & effects.moved.keys():
            if task_id in snapshots:
                row = snapshots[task_id].row._replace(due_ms=effects.moved[task_id])
                snapshots[task_id] = snapshots[task_id]._replace(row=row)
        if effects.progress or effects.dead:
            for task_id, task in snapshots.items():
                # Include deleted groups, because the rows that were read can still contain them.
                for group in {**self._groups_of(task.row.topic), **task.progress, **task.dead}:
                    task = _with_group(task, (task_id, group), effects)
                snapshots[task_id] = task
        for task_id in wanted & effects.ended.keys():
            snapshots.pop(task_id, None)


def _described(ids: set[int], what: str) -> str:
    named = ", ".join(map(str, sorted(ids)[:IDS_LOGGED_MAX]))
    more = f" and {len(ids) - IDS_LOGGED_MAX} more" if len(ids) > IDS_LOGGED_MAX else ""
    return f"{len(ids)} tasks {what}: {named}{more}"


def _with_group(task: TaskSnapshot, key: ProgressKey, effects: Effects) -> TaskSnapshot:
    if key in effects.progress:
        rows = {g: p for g, p in task.progress.items() if g != key[1]}
        progress = effects.progress[key]
        if progress is not None:
            rows[key[1]] = progress
        task = task._replace(progress=rows)
    if key in effects.dead:
        letters = {g: d for g, d in task.dead.items() if g != key[1]}
        dead = effects.dead[key]
        if dead is not None:
            letters[key[1]] = dead
        task = task._replace(dead=letters)
    return task


IDS_PER_READ_MAX = 16_384
BYTES_PER_READ_MAX = 16 << 20
"""Maximum bytes of one read of rows with their bodies."""

Act = Callable[[range, Mapping[int, TaskSnapshot]], None]
Find = Callable[[], tuple[Sequence[int], int]]
"""Returns (ids of a command, number of steps that finding them took)."""
COMMANDS_PER_READ_MAX = 1_024


@dataclass(slots=True, eq=False)
class Command:
    """A command that needs records. ``act`` is called with successive ranges of indexes into
    ``ids`` and the records of the tasks that exist. ``done`` answers at the end, ``refuse`` answers
    with an error. Once ``wanted`` returns False, no more records are read."""

    caller: Caller
    refuse: Callable[[TickwheelError], None]
    ids: Sequence[int]
    find: Find | None
    """Finds the ids when the command's turn comes; None if ``ids`` contains them."""
    act: Act
    done: Callable[[], None]
    wanted: Callable[[], bool]
    bodies: bool
    ids_per_turn: int
    """Maximum number of ids on which the command acts in one turn of the event loop."""
    error: TickwheelError | None = None
    at: int = 0
    """Number of processed ids."""

    def resolve(self) -> int:
        """Find the ids, now that the command's turn has come. Return the number of steps."""
        find, self.find = self.find, None
        if find is None:
            return 0
        try:
            self.ids, steps = find()
        except TickwheelError as error:
            self.error = error
            return 0
        return steps

    @property
    def is_over(self) -> bool:
        return self.at >= len(self.ids) or not self.wanted()


@dataclass(eq=False)
class Commands:
    """The queue of commands that need records. ``run`` processes it."""

    _reader: Reader
    _border: Border
    _commands_max: int
    _ids_max: int
    _may_begin: Callable[[Caller], bool]
    """Returns whether changes of commands and answers to this caller are within their limits. If
    not, the next command waits for ``_durable``."""
    _durable: Callable[[], Awaitable[None]]

    def __post_init__(self) -> None:
        self.waiting: deque[Command] = deque()
        """Commands that have not run, in order."""
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
        ids_per_turn: int = IDS_PER_READ_MAX,
    ) -> None:
        """Queue a command. Raise Overloaded if the queue is full. ``ids`` can be a function that
        finds the ids when they can be read; an error that it raises is the answer. ``bodies``
        says whether the command needs bodies. ``ids_per_turn`` is the maximum number of ids on
        which it acts in one turn of the event loop."""
        if len(self.waiting) >= self._commands_max:
            raise Overloaded(
                f"{len(self.waiting)} commands are waiting; the limit is {self._commands_max}"
                " (commands_max)"
            )
        known_ids, find = ((), ids) if callable(ids) else (ids, None)
        count = len(known_ids)
        if self._ids and self._ids + count > self._ids_max:
            raise Overloaded(
                f"commands on {self._ids} ids are waiting; {count} more would exceed the limit"
                f" {self._ids_max} (command_ids_max)"
            )
        self._ids += count
        self.waiting.append(
            Command(caller, refuse, known_ids, find, act, done, wanted, bodies, ids_per_turn)
        )
        self._wake.set()

    def put_last(self, call: Call[Any], done: Callable[[], None]) -> None:
        """Queue a command without ids. ``done`` is called at its turn, when every stored task is in
        memory. Raise Overloaded."""
        self.put(call.caller, call.refuse, (), lambda indexes, snapshots: None, done)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.waiting:
                if not self._may_begin(self.waiting[0].caller):
                    await self._durable()
                await self._run_first()
                await asyncio.sleep(0)  # the read may not have waited

    async def _run_first(self) -> None:
        """Read once for the first commands, and run them as far as the rows suffice."""
        parts = self._parts()
        wanted = dict.fromkeys(i for command, stop in parts for i in command.ids[command.at : stop])
        bodies = any(command.bodies for command, _ in parts)
        reading = self._reader.read_some(list(wanted), BYTES_PER_READ_MAX, bodies=bodies)
        async with reading as (view, rest):
            unread = frozenset(rest)
            for command, stop in parts:
                ids = command.ids
                # The first command has already waited for room. Later requests of its caller must
                # not delay the commands after it.
                if command is not parts[0][0] and not self._may_begin(command.caller):
                    break
                if unread:
                    stop = next((i for i in range(command.at, stop) if ids[i] in unread), stop)
                if not self._process(command, stop, view):
                    break
                self.waiting.popleft()
                self._ids -= len(ids)

    def _process(self, command: Command, stop: int, view: View) -> bool:
        """Act on a command's ids up to ``stop``. Return whether it was answered or refused."""
        indexes, command.at = range(command.at, stop), stop
        self._border.begin()
        try:
            if command.error is not None:
                raise command.error
            if indexes:
                self._check(command.ids[indexes.start : indexes.stop])
                command.act(indexes, view(command.ids[indexes.start : indexes.stop]))
            if not command.is_over:
                return False
            command.done()
        except TickwheelError as error:
            command.refuse(error)
        except Exception as error:
            command.refuse(self._border.contain(f"a command of {command.caller.address}", error))
        return True

    def _check(self, ids: Sequence[int]) -> None:
        """Raise RowMissing if a row is missing, because the task would appear to have ended."""
        missing = self._reader.missing(ids)
        if missing:
            raise RowMissing(f"task {missing[0]} has not ended, but has no row in the store")

    def _parts(self) -> list[tuple[Command, int]]:
        """Return the next commands, each with the index before which its read stops."""
        parts: list[tuple[Command, int]] = []
        left = IDS_PER_READ_MAX
        for command in islice(self.waiting, COMMANDS_PER_READ_MAX):
            known = len(command.ids)
            steps = command.resolve()
            self._ids += len(command.ids) - known
            is_wanted, stop = command.wanted(), command.at
            if is_wanted:
                stop = min(len(command.ids), stop + min(left, command.ids_per_turn))
            parts.append((command, stop))
            # A search can take many more steps than it finds ids.
            left -= max(steps, stop - command.at)
            if left <= 0 or (is_wanted and stop < len(command.ids)):
                break
        return parts


ROWS_PER_LOAD = 1_000
LOAD_BYTES_MAX = 8 << 20
LOAD_BYTES_MIN = 1 << 20
LOAD_SHARE = 8
"""Divisor of ``resident_bytes_max`` that determines the bytes of a load, within the bounds
above."""
MISSING_RETRY_S = 1.0
MISSING_PER_ROUND = 1_000


def load_bytes(resident_bytes_max: int) -> int:
    """Return the bytes of bodies after which a load stops. The last body can exceed them."""
    return max(LOAD_BYTES_MIN, min(LOAD_BYTES_MAX, resident_bytes_max // LOAD_SHARE))


@dataclass(eq=False)
class Loader:
    """Reads the rows that the engine requests. Each load requests a tick. Rows requested during a
    load are read by the next one."""

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
        self._is_loading = self._is_searching = False
        self._due: list[int] = []
        self._expired: list[int] = []
        """Ids of tasks whose time to live has expired."""
        self._ready: dict[Group, list[int]] = {}
        """Group → ids of ready tasks; the group that was served least recently is first."""

    @property
    def is_full(self) -> bool:
        """Whether firing waits because the maximum number of rows is being read for it."""
        core = self._core
        return len(core.firing) >= core.config.loading_max + core.uncounted_missing

    def load(self) -> None:
        core = self._core
        if core.missing and not self._is_searching:
            self._is_searching = True
            self._spawn(self._search_missing())
        if not (core.rows_to_read or core.lapsed_rows_to_read or core.ready_rows_to_read):
            return
        self._due += core.rows_to_read
        self._expired += core.lapsed_rows_to_read
        for group, ids in core.ready_rows_to_read.items():
            self._ready.setdefault(group, []).extend(ids)
        core.rows_to_read, core.lapsed_rows_to_read, core.ready_rows_to_read = [], [], {}
        if not self._is_loading:
            self._is_loading = True
            self._spawn(self._load())

    async def _load(self) -> None:
        while self._due or self._expired or self._ready:
            await self._load_some()
        self._is_loading = False

    async def _load_some(self) -> None:
        """Load some rows: due and expired tasks first, but reserve half of the load for groups."""
        share = ROWS_PER_LOAD // 2 if self._ready else ROWS_PER_LOAD
        due, self._due = self._due[:share], self._due[share:]
        share -= len(due)
        expired, self._expired = self._expired[:share], self._expired[share:]
        room, group_parts = ROWS_PER_LOAD - len(due) - len(expired), list[tuple[Group, list[int]]]()
        for group in list(self._ready):
            ids = self._ready.pop(group)
            if len(ids) > room:
                self._ready = {group: ids[room:], **self._ready}
            group_parts.append((group, ids[:room]))
            room -= len(ids)
            if room <= 0:
                break
        tasks, left = await self._next(
            [*due, *expired, *(i for _, ids in group_parts for i in ids)]
        )
        now_ms = self._clock.read().now_ms
        rows = {task_id: task.row for task_id, task in tasks.items()}
        self._due = [*(i for i in due if i in left), *self._due]
        self._expired = [*(i for i in expired if i in left), *self._expired]
        self._firing.process_rows([i for i in due if i not in left], rows, now_ms)
        self._firing.expire_lapsed([i for i in expired if i not in left], tasks, now_ms)
        for group, ids in group_parts:
            self._delivery.reading.process_rows(group, [i for i in ids if i not in left], rows)
        del tasks, rows
        await self._let_tick_run()
        for group, ids in group_parts:
            self._load_more(group, [i for i in ids if i in left])

    def _load_more(self, group: Group, ids: list[int]) -> None:
        """Queue the remaining rows of a group, unless they could neither be delivered nor kept."""
        ids += self._ready.pop(group, ())
        if not ids:
            return
        if group.is_held or not (group.credit_up_to(1) or self._core.reads_ahead):
            self._delivery.reading.return_unread(group, ids)
        else:
            self._ready[group] = ids

    async def _next(self, ids: list[int]) -> tuple[Mapping[int, TaskSnapshot], set[int]]:
        """Return the records of as many ids as one load can read, and the remaining ids."""
        wanted, began_ms = list(dict.fromkeys(ids)), self._clock.read().now_ms
        async with self._turn, self._reader.read_some(wanted, self._bytes_max) as (view, left):
            now_ms = self._clock.read().now_ms
            if now_ms - began_ms >= SLOW_MS:
                self._core.ledger.daemon.add(Cause.STORE, began_ms, now_ms)
            return view(wanted[: len(wanted) - len(left)]), set(left)

    async def _let_tick_run(self) -> None:
        """Let a tick deliver the loaded tasks before more are loaded."""
        self._wake()
        await asyncio.sleep(0)

    async def _search_missing(self) -> None:
        """Search for missing rows in rounds. Rows that stay missing move to the end."""
        missing = self._core.missing
        while missing:
            await asyncio.sleep(MISSING_RETRY_S)
            ids = list(islice(missing, MISSING_PER_ROUND))
            tasks, left = await self._next(ids)
            for task in tasks.values():
                self._delivery.resume_missing(task, self._clock.read().now_ms)
            for task_id in ids:
                if task_id in missing and task_id not in left:
                    del missing[task_id]
                    missing[task_id] = None
            await self._let_tick_run()
        self._is_searching = False
