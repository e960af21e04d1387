"""The stores as a state machine: memory and SQLite against plain dictionaries, with restarts.

Batches are random, keys are few so that they collide, and nothing but the last states counts.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Sequence
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tickwheel.model.key_hash import KeyHash
from tickwheel.model.kinds import (
    BULK,
    GROUP,
    SESSION,
    TRANSACTION,
    Bulk,
    BulkRow,
    Effects,
    Half,
    Halves,
    RecordKey,
    Selection,
    TransactionRow,
    TransactionState,
)
from tickwheel.model.records import (
    ID_STEP,
    NO_BODY,
    DeadRow,
    Failure,
    GroupRow,
    Outcome,
    ProgressRow,
    ProgressState,
    SessionRow,
    TaskOptions,
    TaskRow,
    is_key_alone,
)
from tickwheel.persistence.contract import (
    CommitRefused,
    Fenced,
    Moves,
    Opened,
    Store,
    StoredTask,
    head_row,
)
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore
from tickwheel.persistence.sqlite import packs as packindex
from tickwheel.persistence.sqlite import writer as sqlite_writer

ENDINGS_MAX = 20
OWNER = "model"
TOPICS = ("a", "b", "é")
GROUPS = ("default", "x", "ü")

T = TypeVar("T")

ids = st.integers(1, 12)
small_ints = st.integers(0, 50)
topics = st.sampled_from(TOPICS)
groups = st.sampled_from(GROUPS)
failures = st.lists(st.builds(Failure, small_ints, small_ints, st.just("why")), max_size=2)
bodies = st.sampled_from([b"", b"\x00\xff", b"x" * 100, b"y" * 20_000])
task_options = st.none() | st.sampled_from(
    [TaskOptions(), TaskOptions("k"), TaskOptions("l"), TaskOptions(priority=9, ttl_ms=5)]
)
keys = st.tuples(ids, groups)
states = st.tuples(st.sampled_from(ProgressState), small_ints, small_ints, failures)
sessions = st.sampled_from([bytes([i]) * 16 for i in range(3)])
outcomes = st.lists(st.tuples(small_ints, ids, small_ints, small_ints), max_size=3)


class Content:
    """The expected content of the store."""

    def __init__(self) -> None:
        self.tasks: dict[int, TaskRow] = {}
        self.progress: dict[tuple[int, str], ProgressRow] = {}
        self.dead: dict[tuple[int, str], DeadRow] = {}
        self.records: dict[RecordKey, Any] = {}
        self.outcomes: list[tuple[int, Outcome]] = []
        self.id_mark = 0
        self.position_ms = 0
        self.last_batch = 0

    def apply(self, effects: Effects) -> None:
        self.tasks.update(effects.enqueued)
        for task_id, row in effects.updated.items():
            body = self.tasks[task_id].body if row.body is NO_BODY else row.body
            self.tasks[task_id] = row._replace(body=body)
        for task_id, due_ms in effects.moved.items():
            self.tasks[task_id] = self.tasks[task_id]._replace(due_ms=due_ms)
        for task_id, outcome in effects.ended.items():
            self.tasks.pop(task_id, None)
            self.progress = {k: r for k, r in self.progress.items() if k[0] != task_id}
            self.dead = {k: r for k, r in self.dead.items() if k[0] != task_id}
            self.outcomes.append((task_id, outcome))
        pairs: list[tuple[dict[Any, Any], dict[Any, Any]]] = [
            (self.progress, effects.progress),
            (self.dead, effects.dead),
            (self.records, effects.records),
        ]
        for rows, changes in pairs:
            rows.update(changes)
            for key in [key for key, row in rows.items() if row is None]:
                del rows[key]
        self.outcomes = self.outcomes[-ENDINGS_MAX:]
        self.id_mark = max(self.id_mark, effects.id_mark)
        self.position_ms = effects.position_ms
        self.last_batch += 1

    def stored(self, row: TaskRow) -> StoredTask:
        return StoredTask(
            row,
            tuple(sorted(r for k, r in self.progress.items() if k[0] == row.id)),
            tuple(sorted(r for k, r in self.dead.items() if k[0] == row.id)),
        )


class StoreMachine(RuleBasedStateMachine):
    """Every rule goes to both stores and to the dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        options = SqliteOptions(wal_bytes=64 * 1024, reserve_bytes=0, endings_max=ENDINGS_MAX)
        self.stores: dict[str, Store] = {
            "memory": MemoryStore(ENDINGS_MAX),
            "sqlite": SqliteStore(str(self.folder / "store.db"), options),
        }
        self.opened: dict[str, Opened] = {}
        self.content = Content()
        self.crowd: set[int] = set()
        """Every id of ``commit_a_crowd``, whatever became of it."""

    @property
    def moves(self) -> bool:
        """Each of the stores takes a due time alone."""
        return all(isinstance(store, Moves) for store in self.stores.values())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    @rule(
        names=st.lists(st.sampled_from(["a", "b/1", "c"]), min_size=1, unique=True),
        part=st.integers(0, 3),
        dropped=st.booleans(),
        body=bodies,
        tasks=st.booleans(),
    )
    def commit_transactions(
        self, names: list[str], part: int, dropped: bool, body: bytes, tasks: bool
    ) -> None:
        """Headers and half tasks, beside a task or alone."""
        effects = Effects(id_mark=self.content.id_mark, position_ms=self.content.position_ms)
        for name in names:
            half = Half("é", 5, None, body, TaskOptions("k"))
            row: TransactionRow | Halves = Halves(name, part, self.content.last_batch, (half,))
            if not part:
                number = self.content.last_batch
                row = TransactionRow(name, "g", TransactionState.OPEN, number, 7, topics=TOPICS)
            effects.change(TRANSACTION, {(name, part): None if dropped else row})
            bulk = Bulk(name, "cancel", "a", Selection(), (), None, 5, part)
            effects.change(BULK, {name: None if dropped else BulkRow(bulk, place=(part, name))})
        if tasks and 11 not in self.content.tasks:
            effects.enqueued[11] = TaskRow(11, 5, "a", body)
        self.content.apply(effects)
        n = self.content.last_batch
        for store_name, store in self.stores.items():
            assert self.run(store.commit(self.opened[store_name].epoch, OWNER, n, effects)) is True

    def teardown(self) -> None:
        for store in self.stores.values():
            self.run(store.close(clean=True))
        self.run(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.folder)

    @initialize()
    def begin(self) -> None:
        for name, store in self.stores.items():
            self.opened[name] = self.run(store.open(OWNER, 0))
            assert self.opened[name].created
            assert self.opened[name].clean

    @rule(
        data=st.data(),
        position_ms=small_ints,
        id_mark=ids,
        ended=st.dictionaries(ids, st.sampled_from(Outcome), max_size=4),
        progress=st.dictionaries(keys, st.none() | states, max_size=4),
        dead=st.dictionaries(keys, st.none() | failures, max_size=3),
        grps=st.dictionaries(st.tuples(topics, groups), st.none() | small_ints, max_size=2),
        sess=st.dictionaries(st.tuples(sessions, small_ints), st.none() | outcomes, max_size=3),
    )
    def commit(
        self,
        data: st.DataObject,
        position_ms: int,
        id_mark: int,
        ended: dict[int, Outcome],
        progress: dict[Any, Any],
        dead: dict[Any, Any],
        grps: dict[Any, Any],
        sess: dict[Any, Any],
    ) -> None:
        rows = data.draw(
            st.dictionaries(ids, st.tuples(small_ints, topics, bodies, task_options), max_size=5)
        )
        tasks = {i: TaskRow(i, *columns) for i, columns in rows.items() if i not in ended}
        effects = Effects(
            enqueued={i: row for i, row in tasks.items() if i not in self.content.tasks},
            updated={i: row for i, row in tasks.items() if i in self.content.tasks},
            ended=ended,
            progress={
                key: row and ProgressRow(key[0], key[1], row[0], row[1], row[2], 1, tuple(row[3]))
                for key, row in progress.items()
                if key[0] not in ended
            },
            dead={
                key: None if row is None else DeadRow(key[0], key[1], "a", 1, 2, "why", tuple(row))
                for key, row in dead.items()
                if key[0] not in ended
            },
            records={
                (GROUP, key): None if since is None else GroupRow(key[0], key[1], since)
                for key, since in grps.items()
            }
            | {
                (SESSION, key): None
                if row is None
                else SessionRow(key[0], 1, 2, ((key[1], 1, 1, 1), *row))
                for key, row in sess.items()
            },
            id_mark=id_mark,
            position_ms=position_ms,
        )
        self.content.apply(effects)
        n = self.content.last_batch
        for name, store in self.stores.items():
            assert self.run(store.commit(self.opened[name].epoch, OWNER, n, effects)) is True

    @rule(
        count=st.integers(1, 130),
        gap=st.integers(1, 3),
        skew=st.integers(0, 1),
        kind=st.tuples(small_ints, st.sampled_from([*TOPICS, "[", None]), bodies, task_options),
        leaving=st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 0.8, 0.8, 1.0]),
        moved=st.integers(0, 3),
        random=st.randoms(use_true_random=False),
    )
    def commit_a_crowd(
        self,
        count: int,
        gap: int,
        skew: int,
        kind: tuple[int, str | None, bytes, TaskOptions | None],
        leaving: float,
        moved: int,
        random: Random,
    ) -> None:
        """Ids in a row, as a daemon assigns them; some of those before leave or move."""
        due_ms, topic, body, more = kind
        last = max(self.crowd, default=0) // ID_STEP + gap
        fresh = range(last * ID_STEP + skew, (last + count) * ID_STEP + skew, ID_STEP)
        self.crowd.update(fresh)
        effects = Effects(id_mark=fresh[-1], position_ms=self.content.position_ms)
        for index, task_id in enumerate(fresh):
            name = TOPICS[index % 3] if topic is None else topic
            extra = more if index % 5 else None
            effects.enqueued[task_id] = TaskRow(task_id, due_ms + index % 7, name, body, extra)
        former = sorted(self.content.tasks)
        random.shuffle(former)
        cut = int(len(former) * leaving)
        effects.ended = dict.fromkeys(former[:cut], Outcome.ACKED)
        for task_id in former[cut : cut + moved]:
            row = self.content.tasks[task_id]
            effects.updated[task_id] = row._replace(due_ms=row.due_ms + 1)
        self.content.apply(effects)
        for name, store in self.stores.items():
            epoch, n = self.opened[name].epoch, self.content.last_batch
            assert self.run(store.commit(epoch, OWNER, n, effects)) is True

    @rule(back=st.integers(0, 3))
    def repeat(self, back: int) -> None:
        """A batch that was applied before changes nothing, whatever it holds."""
        n = max(0, self.content.last_batch - back)
        effects = Effects(ended={1: Outcome.DELETED}, position_ms=99)
        for name, store in self.stores.items():
            assert self.run(store.commit(self.opened[name].epoch, OWNER, n, effects)) is False

    @rule(ahead=st.integers(2, 4))
    def leave_out(self, ahead: int) -> None:
        for name, store in self.stores.items():
            epoch = self.opened[name].epoch
            with pytest.raises(CommitRefused):
                self.run(store.commit(epoch, OWNER, self.content.last_batch + ahead, Effects()))

    @rule()
    def come_late(self) -> None:
        for name, store in self.stores.items():
            epoch = self.opened[name].epoch - 1
            with pytest.raises(Fenced):
                self.run(store.commit(epoch, OWNER, self.content.last_batch + 1, Effects()))

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        for name, store in self.stores.items():
            former = self.opened[name]
            self.run(store.close(clean))
            opened = self.opened[name] = self.run(store.open(OWNER, 0))
            assert opened.epoch > former.epoch
            assert opened.clean is clean
            assert not opened.created
            assert opened.last_batch == self.content.last_batch
            assert opened.id_mark == self.content.id_mark
            assert opened.position_ms == self.content.position_ms

    @rule()
    def replace_memory_by_its_copy(self) -> None:
        memory = self.stores["memory"]
        assert isinstance(memory, MemoryStore)
        self.stores["memory"] = copied = memory.copy()
        self.run(memory.close(clean=True))
        self.opened["memory"] = self.run(copied.open(OWNER, 0))

    @rule(chunk=st.integers(1, 5))
    def recover(self, chunk: int) -> None:
        content = self.content
        for store in self.stores.values():
            small = self.run(store.recover_small())
            assert small.records == content.records
            assert sorted(small.progress) == sorted(content.progress.values())
            assert sorted(small.dead) == sorted(
                (row.id, row.group, row.topic) for row in content.dead.values()
            )
            assert small.outcomes == content.outcomes
            handles = self.run(_handles(store, chunk))
            assert sorted(handles) == sorted(
                (row.due_ms, row.id, row.topic) for row in content.tasks.values()
            )
            assert [handle[0] for handle in handles] == sorted(handle[0] for handle in handles)

    @rule()
    def recover_keys(self) -> None:
        for name, store in self.stores.items():
            hashes = KeyHash(self.opened[name].key_seed).of_rows(self.content.tasks.values())
            self.run(_handles(store, 100))
            assert self.run(_keys(store)) == sorted(hashes.items())

    @rule(
        after=st.integers(-1, 13) | st.integers(-1, 300).map(lambda n: n * ID_STEP + n % 3 - 1),
        limit=st.sampled_from([1, 2, 5, 15, 100, 1000]),
        topic=st.none() | topics,
    )
    def scan(self, after: int, limit: int, topic: str | None) -> None:
        expected = [
            self.content.stored(row)
            for task_id, row in sorted(self.content.tasks.items())
            if task_id > after and topic in (None, row.topic)
        ][:limit]
        for store in self.stores.values():
            assert self.run(store.scan(after, limit, topic)) == expected

    @rule(
        before=st.integers(-1, 13) | st.integers(-1, 300).map(lambda n: n * ID_STEP + n % 3 - 1),
        limit=st.sampled_from([1, 2, 5, 15, 100, 1000]),
        topic=st.none() | topics,
    )
    def scan_back(self, before: int, limit: int, topic: str | None) -> None:
        expected = [
            self.content.stored(row)
            for task_id, row in sorted(self.content.tasks.items(), reverse=True)
            if task_id < before and topic in (None, row.topic)
        ][:limit]
        for store in self.stores.values():
            assert self.run(store.scan_back(before, limit, topic)) == expected

    @precondition(lambda self: self.moves)
    @rule(share=st.sampled_from([0.05, 0.3, 1.0]), seed=small_ints)
    def commit_moves(self, share: float, seed: int) -> None:
        """Due times alone, or a row of which the body was left out; of some the rest ends."""
        random = Random(seed)
        moved = {i: random.randrange(60) for i in self.content.tasks if random.random() < share}
        placed = random.sample(sorted(moved), len(moved) // 8)
        for task_id in placed:
            del moved[task_id]
        others = sorted(self.content.tasks.keys() - moved.keys() - set(placed))
        ended = random.sample(others, len(others) // 4)
        effects = Effects(
            moved=moved,
            updated={
                i: self.content.tasks[i]._replace(
                    due_ms=7, body=NO_BODY, options=TaskOptions(order_id=99)
                )
                for i in placed
            },
            ended=dict.fromkeys(ended, Outcome.ACKED),
        )
        self.content.apply(effects)
        n = self.content.last_batch
        for name, store in self.stores.items():
            assert self.run(store.commit(self.opened[name].epoch, OWNER, n, effects)) is True

    @precondition(lambda self: self.moves)
    @rule(seed=small_ints, bytes_max=st.sampled_from([1, 30_000, 1 << 30]))
    def read_heads(self, seed: int, bytes_max: int) -> None:
        ids = [*range(14), *sorted(self.crowd)]
        Random(seed).shuffle(ids)
        for store in self.stores.values():
            assert isinstance(store, Moves)
            left: Sequence[int] = ids
            result: dict[int, StoredTask] = {}
            while left:
                some, rest = self.run(store.read_heads(left, bytes_max))
                assert len(rest) < len(left)
                every = [*some.others, *chain.from_iterable(some.plain.values())]
                assert len(set(every)) == len(every)
                assert set(every) <= set(left[: len(left) - len(rest)])
                result |= some.others
                for topic, dues_ms in some.plain.items():
                    for task_id, due_ms in dues_ms.items():
                        row = head_row(task_id, due_ms, topic, some.keys)
                        result[task_id] = StoredTask(row, (), ())
                left = rest
            assert result.keys() == self.content.tasks.keys()
            for task_id, task in result.items():
                expected = self.content.stored(self.content.tasks[task_id])
                if task.row.body is NO_BODY:
                    options = task.row.options
                    assert options is None or is_key_alone(options)
                    expected = expected._replace(row=expected.row._replace(body=NO_BODY))
                assert task == expected

    @rule(after=keys, limit=st.integers(1, 15), group=st.none() | groups)
    def scan_dead(self, after: tuple[int, str], limit: int, group: str | None) -> None:
        expected = [
            row
            for key, row in sorted(self.content.dead.items())
            if key > after and group in (None, row.group)
        ][:limit]
        for store in self.stores.values():
            assert self.run(store.scan_dead(after, limit, None, group)) == expected

    @invariant()
    def every_task_reads_as_it_is(self) -> None:
        if not self.opened:
            return
        expected = {i: self.content.stored(row) for i, row in self.content.tasks.items()}
        for store in self.stores.values():
            assert self.run(store.read([*range(14), *sorted(self.crowd)])) == expected


async def _handles(store: Store, chunk: int) -> list[tuple[int, int, str]]:
    results: list[tuple[int, int, str]] = []
    async for handles in store.recover_handles(chunk):
        assert len(handles.ids) <= chunk
        results += zip(handles.dues_ms, handles.ids, handles.topics, strict=True)
    return results


async def _keys(store: Store) -> list[tuple[int, int]]:
    return sorted(
        [pair async for keyed in store.recover_keys() for pair in zip(*keyed[:2], strict=True)]
    )


sqlite_writer.MOVES_AT_ONCE = 7
sqlite_writer.MOVES_MAX = 60  # a batch or two: they are written beside their packs in most runs
# Seldom in earnest: packs are taken apart in most runs here. Every other batch does not look for
# them, and is one statement when it is small.
packindex.SPARSE_EVERY_BATCHES = 2
StoreMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, print_blob=True
)
TestStores = StoreMachine.TestCase


class LongStoreMachine(StoreMachine):
    """The same for minutes."""


TestStoresAtLength = pytest.mark.slow(LongStoreMachine.TestCase)
TestStoresAtLength.settings = settings(
    max_examples=500, stateful_step_count=40, deadline=None, print_blob=True
)
