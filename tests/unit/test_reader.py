"""Reads overlaid with what is not durable yet: the present state, whatever the store saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.store import StoredTask
from tickwheel.server.reader import Reader
from tickwheel.wheel.core import EngineConfig
from tickwheel.wheel.effects import Effects
from tickwheel.wheel.engine import Engine
from tickwheel.wheel.records import DeadRow, Ending, ProgressRow, ProgressState, TaskRow

NOW_MS = 1_800_000_000_000
SHARD_STEP = 1024


def row(number: int, due_ms: int = NOW_MS) -> TaskRow:
    return TaskRow(number * SHARD_STEP, due_ms, "t", b"x")


class MeanwhileStore(MemoryStore):
    """Lets something happen between the read's answer and the reader's use of it."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], None]] = []

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        found = await super().read(ids)
        for action in self.meanwhile:
            action()
        self.meanwhile = []
        return found


async def made(*rows: TaskRow) -> tuple[Engine, MeanwhileStore, Reader]:
    store = MeanwhileStore()
    opened = await store.open("me", NOW_MS)
    effects = Effects(enqueued={r.id: r for r in rows}, id_mark=100 * SHARD_STEP)
    await store.commit(opened.epoch, "me", 1, effects)
    engine = Engine(EngineConfig(), opened.epoch, 100 * SHARD_STEP, NOW_MS)
    core = engine.core
    engine.grouping.group(core.topic("t"), "g", NOW_MS)
    core.open.effects.groups.clear()
    return engine, store, Reader(core, store)


async def test_what_the_store_has_is_found_and_the_rest_is_absent() -> None:
    _, _, reader = await made(row(1))
    assert set(await reader.known([1024, 2048])) == {1024}
    assert await reader.known([]) == {}


async def test_an_end_that_is_not_committed_hides_the_task() -> None:
    engine, _, reader = await made(row(1), row(2))
    engine.core.open.effects.ended[1024] = Ending.ACKED
    assert set(await reader.known([1024, 2048])) == {2048}


async def test_an_update_that_is_with_the_store_shows() -> None:
    engine, _, reader = await made(row(1))
    engine.core.open.effects.updated[1024] = row(1, NOW_MS + 5)
    engine.seal(NOW_MS, 0)
    assert (await reader.known([1024]))[1024].row.due_ms == NOW_MS + 5


async def test_progress_and_dead_letters_are_overlaid_drops_included() -> None:
    engine, _, reader = await made(row(1))
    effects = engine.core.open.effects
    effects.progress[1024, "g"] = ProgressRow(1024, "g", ProgressState.WAITING, 1, NOW_MS)
    engine.seal(NOW_MS, 0)
    known = (await reader.known([1024]))[1024]
    assert known.progress["g"].attempt == 1
    effects = engine.core.open.effects
    effects.progress[1024, "g"] = None
    effects.dead[1024, "g"] = DeadRow(1024, "g", "t", NOW_MS, 2, "why")
    known = (await reader.known([1024]))[1024]
    assert known.progress == {}
    assert known.dead["g"].reason == "why"


async def test_a_batch_that_landed_during_the_read_is_laid_over_it() -> None:
    _, store, reader = await made(row(1), row(2))
    store.meanwhile = [lambda: reader.landed(Effects(ended={1024: Ending.CANCELLED}))]
    assert set(await reader.known([1024, 2048])) == {2048}
    # After the read nothing is kept of it.
    assert set(await reader.known([1024, 2048])) == {1024, 2048}


async def test_a_task_enqueued_and_landed_during_the_read_is_found() -> None:
    _, store, reader = await made()
    fresh = row(7)
    store.meanwhile = [lambda: reader.landed(Effects(enqueued={fresh.id: fresh}))]
    assert set(await reader.known([fresh.id])) == {fresh.id}


async def test_a_task_whose_batch_has_not_landed_here_is_unseen() -> None:
    early = row(101)
    _, _, reader = await made(row(1), early)
    assert set(await reader.known([1024, early.id])) == {1024}


async def test_a_page_goes_on_after_its_last_id() -> None:
    engine, _, reader = await made(*(row(n) for n in range(1, 8)))
    engine.core.open.effects.ended[2 * 1024] = Ending.ACKED
    first, following = await reader.scan(0, 3, None)
    assert [k.row.id // 1024 for k in first] == [1, 3]
    assert following == 3 * 1024
    second, following = await reader.scan(following, 10, None)
    assert [k.row.id // 1024 for k in second] == [4, 5, 6, 7]
    assert following is None


async def test_a_page_back_goes_on_below_its_last_id() -> None:
    engine, _, reader = await made(*(row(n) for n in range(1, 8)))
    engine.core.open.effects.ended[6 * 1024] = Ending.ACKED
    first, following = await reader.scan(99 * 1024, 3, None, back=True)
    assert [k.row.id // 1024 for k in first] == [7, 5]
    assert following == 5 * 1024
    second, following = await reader.scan(following, 10, None, back=True)
    assert [k.row.id // 1024 for k in second] == [4, 3, 2, 1]
    assert following is None
