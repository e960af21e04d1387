"""Reads beside commits, with commits in between any two statements of a read: every answer must be
what the store held after some whole batch between the read's begin and its end.

The truth is kept as one memory store for each batch. The pauses are made here and not in the
product: SQLite reports every statement before it runs, Redis is reached over a line whose calls
can be held.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from persistence.store_subject import Subject
from tickwheel.model.kinds import Effects
from tickwheel.model.records import (
    ID_STEP,
    DeadRow,
    Outcome,
    ProgressRow,
    ProgressState,
    TaskOptions,
    TaskRow,
)
from tickwheel.persistence.contract import Store
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.postgresql import PostgresStore
from tickwheel.persistence.postgresql import upkeep as postgres_upkeep
from tickwheel.persistence.postgresql.driver import Link
from tickwheel.persistence.redis import RedisStore, layout
from tickwheel.persistence.sqlite import SqliteStore
from tickwheel.persistence.sqlite import packs as packindex


class Read(NamedTuple):
    """One kind of read. ``truth`` is what the answer should have been at a state, if that is
    not the same question."""

    name: str
    ask: Callable[[Store], Awaitable[Any]]
    truth: Callable[[Store, Any], Awaitable[Any]] | None = None


WAIT_S = 60.0
FIRST_ID = 1 << 40
GROUPS = ("a", "b")
TOPICS = ("t", "t", "t", "u")
READERS = 3
LIVE = 300
"""Approximate number of tasks at a time."""
TURNS = 30
"""Turns of the event loop until a local Redis answers."""
BIG = 20_000
"""Bytes of a body that SQLite reads on its own."""


class Race:
    """Commits random batches, and knows what the store may hold at any time."""

    def __init__(self, subject: Subject, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.label = f"seed {seed}"
        self._subject = subject
        self._truth = MemoryStore(1_000)
        self._lock = asyncio.Lock()
        self._next_id = FIRST_ID
        self._live: dict[int, TaskRow] = {}
        self._dead: set[tuple[int, str]] = set()
        self._in_progress: set[tuple[int, str]] = set()
        self.states: list[MemoryStore] = []
        """After each number of batches."""
        self.done = 0
        """Batches whose commit has returned."""

    async def open(self) -> None:
        opened = await self._truth.open("truth", 1)
        self._epoch = opened.epoch
        self.states.append(await self._copy())

    async def _copy(self) -> MemoryStore:
        copy = self._truth.copy()
        await copy.open("copy", 1)
        return copy

    # --- batches -----------------------------------------------------------------------------

    async def commit(self) -> None:
        """One random batch. It may be in the store from the moment it is among the states."""
        async with self._lock:
            effects = self._effects()
            n = len(self.states)
            await self._truth.commit(self._epoch, "truth", n, effects)
            self.states.append(await self._copy())
            await self._subject.commit(effects)
            self.done += 1

    def _effects(self) -> Effects:
        effects, rnd = Effects(position_ms=1), self.rnd
        over = max(0, len(self._live) - LIVE)
        for task_id in self._some(over + rnd.choice((0, 0, 3, 40))):
            self._end(effects, task_id)
        live = list(self._live)
        for task_id in rnd.sample(live, min(len(live), rnd.choice((0, 1, 12)))):
            row = self._live[task_id]._replace(due_ms=rnd.randrange(10**6))
            effects.updated[task_id] = self._live[task_id] = row
        for task_id in rnd.sample(live, min(len(live), rnd.choice((0, 2, 12)))):
            self._stand(effects, (task_id, rnd.choice(GROUPS)))
        if rnd.random() < 0.6:
            self._enqueue(effects)
        effects.id_mark = self._next_id
        return effects

    def _some(self, count: int) -> list[int]:
        """Neighbours, as consumers take them, so that packs become sparse."""
        live = sorted(self._live)
        start = self.rnd.randrange(len(live) + 1)
        return live[start : start + count]

    def _enqueue(self, effects: Effects) -> None:
        rnd = self.rnd
        for _ in range(rnd.choice((1, 8, 60, 130))):
            self._next_id += ID_STEP
            size = BIG if rnd.random() < 0.01 else rnd.randrange(40)
            options = (
                TaskOptions(key="k", priority=rnd.randrange(3)) if rnd.random() < 0.1 else None
            )
            row = TaskRow(
                self._next_id, rnd.randrange(10**6), rnd.choice(TOPICS), bytes(size), options
            )
            effects.enqueued[row.id] = self._live[row.id] = row
        if rnd.random() < 0.3:
            self._next_id += 7 * ID_STEP

    def _end(self, effects: Effects, task_id: int) -> None:
        effects.ended[task_id] = Outcome.ACKED
        del self._live[task_id]
        for group in GROUPS:
            self._dead.discard((task_id, group))
            self._in_progress.discard((task_id, group))

    def _stand(self, effects: Effects, key: tuple[int, str]) -> None:
        """Handed out, dead, or as if it had never been."""
        (task_id, group), attempt = key, self.rnd.randrange(1, 9)
        kind = self.rnd.choice(("progress", "dead", "none"))
        if key in self._dead:
            effects.dead[key] = None
            self._dead.discard(key)
        if key in self._in_progress and kind != "progress":
            effects.progress[key] = None
            self._in_progress.discard(key)
        if kind == "progress":
            effects.progress[key] = ProgressRow(
                task_id, group, ProgressState.WAITING, attempt, 5, self._epoch
            )
            self._in_progress.add(key)
        elif kind == "dead":
            topic = self._live[task_id].topic
            effects.dead[key] = DeadRow(task_id, group, topic, 5, attempt, "why")
            self._dead.add(key)

    # --- reads -------------------------------------------------------------------------------

    def read(self) -> Read:
        """A random one."""
        rnd, topic, group = self.rnd, self.rnd.choice((None, "t", "u")), self.rnd.choice(GROUPS)
        count = (self._next_id - FIRST_ID) // ID_STEP + 3
        start, limit = rnd.randrange(count), rnd.choice((1, 50, 700))
        stop = min(count, start + rnd.choice((1, 60, 500, 1_200)))
        ids = [FIRST_ID + n * ID_STEP for n in range(start, stop)]
        at, (bytes_max, some) = ids[0], rnd.choice(((1, ids[:20]), (1 << 20, ids)))
        few = [task_id for task_id in self._some(400) if len(self._live[task_id].body) < BIG]
        dead_of = rnd.choice((None, group))
        return rnd.choice(
            (
                Read(f"read of {len(ids)}", lambda store: store.read(ids)),
                Read(f"read of {len(few)}", lambda store: store.read(few)),
                Read(f"scan of {limit}", lambda store: store.scan(at, limit, topic)),
                Read(f"scan_back of {limit}", lambda store: store.scan_back(at, limit, topic)),
                Read(
                    f"scan_dead of {limit}",
                    lambda store: store.scan_dead((at, group), limit, topic, dead_of),
                ),
                Read(
                    f"read_some of {len(some)}",
                    lambda store: store.read_some(some, bytes_max),
                    lambda store, scanned: _read_some(store, some, scanned),
                ),
            )
        )

    async def check(self) -> None:
        read, began = self.read(), self.done
        answer = await read.ask(self._subject.store)
        ended = len(self.states) - 1
        for number in range(began, ended + 1):
            state = self.states[number]
            truth = read.truth(state, answer) if read.truth is not None else read.ask(state)
            if await truth == answer:
                return
        pytest.fail(
            f"{self.label}: {read.name}: not what was there after any of batches {began} to {ended}"
        )


async def _read_some(truth: Store, ids: list[int], scanned: tuple[Any, Sequence[int]]) -> object:
    """How far it comes is the store's affair; what it says of the way is not."""
    left = list(scanned[1])
    read = ids[: len(ids) - len(left)]
    assert read and ids == [*read, *left]
    return await truth.read(read), scanned[1]


# --- pauses --------------------------------------------------------------------------------------


def hold_sqlite(store: SqliteStore, race: Race) -> None:
    """Before any statement of a read a few batches may land."""
    loop, rnd = asyncio.get_running_loop(), random.Random(race.label)

    def before(statement: str) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # the first statement of a connection, where nobody reads yet
        for _ in range(rnd.choice((0, 0, 1, 3))):
            asyncio.run_coroutine_threadsafe(race.commit(), loop).result(WAIT_S)

    def held(cache_bytes: int) -> sqlite3.Connection:
        connection = SqliteStore._connect(store, cache_bytes)
        connection.set_trace_callback(before)
        return connection

    store._connect = held  # type: ignore[method-assign]
    reader, writer = store._reader, store._writer._connection
    assert reader is not None and writer is not None
    writer.execute("PRAGMA synchronous = OFF")  # syncs are another test's, and many here
    reader._connection.set_trace_callback(before)


def hold_redis(store: RedisStore, race: Race) -> None:
    """Before and after any call of a read batches may land, unless it holds them up; and other
    reads go on between the parts of a batch. How late an answer may be is not the matter here."""
    reading, writing, rnd = store._reading, store._writing, random.Random(race.label)
    ask, write, patient = reading.call, writing.call, {"timeout_ms": int(WAIT_S * 1000)}

    async def held(*args: Any, **more: Any) -> Any:
        for _ in range(rnd.choice((0, 1, 2))):
            if not store._writer.lock.locked():
                await race.commit()
        return await ask(*args, **more | patient)

    async def slow(*args: Any, **more: Any) -> Any:
        for _ in range(rnd.choice((0, 0, TURNS))):
            await asyncio.sleep(0)
        return await write(*args, **more | patient)

    reading.call = held  # type: ignore[method-assign]
    writing.call = slow  # type: ignore[method-assign]


def hold_postgresql(store: PostgresStore, race: Race) -> None:
    """Before any statement of a read batches may land, and tables may be replaced by copies."""
    borrowed, upkeep, rnd = store._reader._link, store._upkeep, random.Random(race.label)
    turn = asyncio.Lock()

    @asynccontextmanager
    async def held() -> AsyncIterator[Link]:
        async with borrowed() as link:

            async def slow(*args: Any, **more: Any) -> Any:
                for _ in range(rnd.choice((0, 1, 2))):
                    await race.commit()
                if rnd.random() < 0.3 and not turn.locked():
                    async with turn:
                        await upkeep.step()
                return await Link.fetch(link, *args, **more)

            link.fetch = slow  # type: ignore[method-assign]
            yield link

    store._reader._link = held  # type: ignore[method-assign]


def hold(subject: Subject, race: Race) -> None:
    if isinstance(subject.store, SqliteStore):
        hold_sqlite(subject.store, race)
    elif isinstance(subject.store, RedisStore):
        hold_redis(subject.store, race)
    elif isinstance(subject.store, PostgresStore):
        hold_postgresql(subject.store, race)


# --- the tests -----------------------------------------------------------------------------------


async def run(subject: Subject, seed: int, reads: int) -> None:
    """Some readers, and commits beside them, in a store that was just laid out and in one that
    was opened again: Redis answers the one from memory, the other itself."""
    race = Race(subject, seed)
    await race.open()
    if isinstance(subject.store, PostgresStore):
        reads //= 3  # each statement is a round trip
        subject.store.options = replace(subject.store.options, part_rows=100)
        await subject.reopen()

    async def check() -> None:
        for _ in range(reads):
            for _ in range(race.rnd.randrange(TURNS)):
                await asyncio.sleep(0)
            await race.check()

    for _ in range(2):
        for _ in range(5):
            await race.commit()
        hold(subject, race)
        async with asyncio.timeout(WAIT_S * (1 + reads / 100)), asyncio.TaskGroup() as group:
            readers = [group.create_task(check()) for _ in range(READERS)]
            group.create_task(_beside(race, readers))
        assert race.done > 5
        await subject.reopen()


async def _beside(race: Race, readers: Sequence[asyncio.Task[None]]) -> None:
    """Batches, as quickly as the store takes them, for as long as somebody reads."""
    while not all(reader.done() for reader in readers):
        await race.commit()
        for _ in range(TURNS):
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make split packs, multi-part batches and copies of tables frequent by small sizes."""
    monkeypatch.setattr(packindex, "SPARSE_EVERY_BATCHES", 3)
    monkeypatch.setattr(layout, "PART_ARGS_MAX", 400)
    monkeypatch.setattr(postgres_upkeep, "EVERY_S", 3_600.0)


async def test_reads_during_commits_see_whole_batches(subject: Subject) -> None:
    await run(subject, random.randrange(2**32), 40)


@pytest.mark.slow
async def test_many_reads_during_commits_see_whole_batches(subject: Subject) -> None:
    await run(subject, random.randrange(2**32), 300)
