"""The model of transactions on real stores: what a restart finds is what the store says.

Everything of ``test_transactions_model`` holds; beside it what was committed to the store is
compared with what it has, whenever it is opened again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from engine.test_transactions_model import TransactionsMachine
from engine.transaction_rig import TransactionRig, half
from support.engine_rows import Rows
from support.redis_server import RedisServer
from tickwheel.model.kinds import GROUP, TRANSACTION, key_of
from tickwheel.persistence.contract import Store
from tickwheel.persistence.redis import RedisStore, options_from
from tickwheel.persistence.sqlite import SqliteOptions, SqliteStore

OWNER = "model"
MakeStore = Callable[[], Store]


class StoreRig(TransactionRig):
    """A rig that also commits to a store and restarts from it."""

    def __init__(self, make_store: MakeStore) -> None:
        self._make_store = make_store
        self._runner = asyncio.Runner()
        self._store: Store | None = None
        self._last_batch = 0
        super().__init__()

    def apply(self) -> None:
        super().apply()
        assert self._store is not None and self.core.sealed is not None
        self._last_batch += 1
        done = self._store.commit(self.epoch, OWNER, self._last_batch, self.core.sealed.effects)
        assert self._runner.run(done)

    def _start(self, *, clean: bool) -> None:
        finished = self._runner.run(self._open(clean))
        expected = self.rows
        assert finished.transactions == expected.transactions
        assert (finished.tasks, finished.progress, finished.dead) == (
            expected.tasks,
            expected.progress,
            expected.dead,
        )
        assert finished.id_mark >= expected.id_mark
        finished.sessions, finished.schedules = expected.sessions, expected.schedules
        finished.outcomes, finished.position_ms = expected.outcomes, expected.position_ms
        self.rows = finished
        super()._start(clean=clean)

    async def _open(self, clean: bool) -> Rows:
        if self._store is not None:
            await self._store.close(clean)
        store = self._store = self._make_store()
        opened = await store.open(OWNER, self.now_ms)
        assert opened.epoch == self.epoch + 1
        self._last_batch = opened.last_batch
        return await self._found(store, opened.id_mark)

    @staticmethod
    async def _found(store: Store, id_mark: int) -> Rows:
        rows, small = Rows(), await store.recover_small()
        rows.id_mark = id_mark
        rows.groups = {(row.topic, row.group): row for row in small.of_kind(GROUP)}
        rows.transactions = {key_of(row): row for row in small.of_kind(TRANSACTION)}
        for stored in await store.scan(-1, 1_000_000, None):
            rows.tasks[stored.row.id] = stored.row
            rows.progress |= {(item.id, item.group): item for item in stored.progress}
            rows.dead |= {(item.id, item.group): item for item in stored.dead}
        return rows

    def close(self) -> None:
        if self._store is not None:
            self._runner.run(self._store.close(clean=False))
        self._runner.close()


class OnStore(TransactionsMachine):
    """``make_store`` is set by the test, for each example a new one."""

    make_stores: Callable[[], MakeStore]

    def make_rig(self) -> TransactionRig:
        self.on_store = StoreRig(type(self).make_stores())
        return self.on_store

    def teardown(self) -> None:
        try:
            self.rig.stop_and_start()  # and the store has just that
            self._serve()
            super().teardown()
        finally:
            self.on_store.close()


def on_sqlite(folder: Path, request: pytest.FixtureRequest) -> Callable[[], MakeStore]:
    numbers = itertools.count()

    def new() -> MakeStore:
        path = str(folder / f"{next(numbers)}.db")
        return lambda: SqliteStore(path, SqliteOptions(reserve_bytes=0))

    return new


def on_redis(folder: Path, request: pytest.FixtureRequest) -> Callable[[], MakeStore]:
    server: RedisServer = request.getfixturevalue("shared_redis")

    def new() -> MakeStore:
        server.call("FLUSHALL")
        return lambda: RedisStore(options_from(server.url("connect_ms=20000&call_ms=20000")))

    return new


@pytest.mark.parametrize("kind", [on_sqlite, on_redis])
@pytest.mark.parametrize(
    ("examples", "steps"), [(15, 40), pytest.param(150, 80, marks=pytest.mark.slow)]
)
def test_transactions_match_the_model_on_each_store(
    kind: Callable[..., Callable[[], MakeStore]],
    examples: int,
    steps: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    class Machine(OnStore):
        make_stores = staticmethod(kind(tmp_path, request))

    size = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(Machine, settings=size)


def test_a_store_that_loses_half_tasks_is_found(tmp_path: Path) -> None:
    """The comparison can fail."""

    class Forgetful(SqliteStore):
        async def recover_small(self):  # type: ignore[no-untyped-def]
            small = await super().recover_small()
            for row in small.of_kind(TRANSACTION):
                del small.records[TRANSACTION, key_of(row)]
            return small

    rig = StoreRig(lambda: Forgetful(str(tmp_path / "x.db"), SqliteOptions(reserve_bytes=0)))
    try:
        rig.prepare("a", 1, half())
        rig.commit()
        with pytest.raises(AssertionError):
            rig.stop_and_start()
    finally:
        rig.close()
