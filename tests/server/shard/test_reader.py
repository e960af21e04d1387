"""Reads with uncommitted changes applied show the present state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.shard.holey_store import HoleyStore
from tickwheel.engine.engine import Engine
from tickwheel.engine.state import Batch, EngineConfig, rejoin, strip_ended
from tickwheel.model.kinds import Effects
from tickwheel.model.records import NO_BODY, DeadRow, Outcome, ProgressRow, ProgressState, TaskRow
from tickwheel.persistence.contract import Heads, StoredTask
from tickwheel.persistence.memory import MemoryStore
from tickwheel.server.shard import reads as reader_module
from tickwheel.server.shard.reads import NO_LIMIT, READS_MAX, REREADS_MAX, Reader, Records

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
        rows = await super().read(ids)
        self._act()
        return rows

    async def read_heads(self, ids: Sequence[int], bytes_max: int) -> tuple[Heads, Sequence[int]]:
        result = await super().read_heads(ids, bytes_max)
        self._act()
        return result

    def _act(self) -> None:
        for action in self.meanwhile:
            action()
        self.meanwhile = []


async def made(*rows: TaskRow) -> tuple[Engine, MeanwhileStore, Reader]:
    store = MeanwhileStore()
    opened = await store.open("me", NOW_MS)
    effects = Effects(enqueued={r.id: r for r in rows}, id_mark=100 * SHARD_STEP)
    await store.commit(opened.epoch, "me", 1, effects)
    engine = Engine(EngineConfig(), opened.epoch, 100 * SHARD_STEP, NOW_MS)
    core = engine.core
    engine.grouping.group(core.topic("t"), "g", NOW_MS)
    core.open.effects.records.clear()
    return engine, store, Reader(core, store)


async def test_known_returns_stored_tasks_only() -> None:
    _, _, reader = await made(row(1))
    assert set(await reader.known([1024, 2048])) == {1024}
    assert await reader.known([]) == {}


async def test_an_end_that_is_not_committed_hides_the_task() -> None:
    engine, _, reader = await made(row(1), row(2))
    engine.core.open.effects.ended[1024] = Outcome.ACKED
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


RECORDS = st.sampled_from([None, "progress", "dead"])


def recorded(task_id: int, group: str, kind: str | None, attempt: int, *, drops: bool) -> Effects:
    """A batch after which that is what is recorded of the task in the group."""
    key, effects = (task_id, group), Effects()
    if kind == "progress":
        effects.progress[key] = ProgressRow(task_id, group, ProgressState.WAITING, attempt, NOW_MS)
    elif drops:
        effects.progress[key] = None
    if kind == "dead":
        effects.dead[key] = DeadRow(task_id, group, "t", NOW_MS, attempt, "why")
    elif drops:
        effects.dead[key] = None
    return effects


@given(
    before=RECORDS,
    after=RECORDS,
    when=st.sampled_from(["landed", "sealed", "open"]),
    is_gone=st.booleans(),
    bodies=st.booleans(),
)
def test_progress_is_hidden_only_for_a_group_ended_meanwhile(
    before: str | None, after: str | None, when: str, is_gone: bool, bodies: bool
) -> None:
    """A group that ended during the read leaves no record."""

    async def body() -> None:
        engine, store, reader = await made(row(1), row(2))
        await store.commit(1, "me", 2, recorded(1024, "g", before, 1, drops=False))
        core, last = engine.core, recorded(1024, "g", None if is_gone else after, 2, drops=True)

        def change() -> None:
            if when == "landed":
                reader.landed(last)
            else:
                core.open.effects.progress |= last.progress
                core.open.effects.dead |= last.dead
            if when == "sealed":
                engine.seal(NOW_MS, 0)
            if is_gone:
                del core.topics["t"].groups["g"]

        store.meanwhile = [change]
        async with reader.read_some([1024, 2048], NO_LIMIT, bodies=bodies) as (view, _):
            known = view([1024, 2048])
        progress, dead = last.progress[1024, "g"], last.dead[1024, "g"]
        assert known[1024].progress == ({} if progress is None else {"g": progress})
        assert known[1024].dead == ({} if dead is None else {"g": dead})
        assert not known[2048].progress and not known[2048].dead

    asyncio.run(body())


async def test_a_batch_committed_during_the_read_is_applied() -> None:
    _, store, reader = await made(row(1), row(2))
    store.meanwhile = [lambda: reader.landed(Effects(ended={1024: Outcome.CANCELLED}))]
    assert set(await reader.known([1024, 2048])) == {2048}
    # After the read nothing is kept of it.
    assert set(await reader.known([1024, 2048])) == {1024, 2048}


async def test_a_task_committed_during_the_read_is_found() -> None:
    _, store, reader = await made()
    fresh = row(7)
    store.meanwhile = [lambda: reader.landed(Effects(enqueued={fresh.id: fresh}))]
    assert set(await reader.known([fresh.id])) == {fresh.id}


async def test_an_uncommitted_task_is_not_found() -> None:
    early = row(101)
    _, _, reader = await made(row(1), early)
    assert set(await reader.known([1024, early.id])) == {1024}


async def test_a_page_goes_on_after_its_last_id() -> None:
    engine, _, reader = await made(*(row(n) for n in range(1, 8)))
    engine.core.open.effects.ended[2 * 1024] = Outcome.ACKED
    first, following = await reader.scan(0, 3, None)
    assert [k.row.id // 1024 for k in first] == [1, 3]
    assert following == 3 * 1024
    second, following = await reader.scan(following, 10, None)
    assert [k.row.id // 1024 for k in second] == [4, 5, 6, 7]
    assert following is None


async def test_a_page_back_goes_on_below_its_last_id() -> None:
    engine, _, reader = await made(*(row(n) for n in range(1, 8)))
    engine.core.open.effects.ended[6 * 1024] = Outcome.ACKED
    first, following = await reader.scan(99 * 1024, 3, None, back=True)
    assert [k.row.id // 1024 for k in first] == [7, 5]
    assert following == 5 * 1024
    second, following = await reader.scan(following, 10, None, back=True)
    assert [k.row.id // 1024 for k in second] == [4, 3, 2, 1]
    assert following is None


# --- what is noted while a read is under way -----------------------------------------------------


class SlowStore(MemoryStore):
    """Each read waits until the test lets it answer; what it sees is as of its begin."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[asyncio.Event] = []

    async def read(self, ids: Sequence[int]) -> dict[int, StoredTask]:
        rows = await super().read(ids)
        self.asked.append(asyncio.Event())
        await self.asked[-1].wait()
        return rows


async def slow(count: int) -> tuple[Engine, SlowStore, Reader]:
    store = SlowStore()
    opened = await store.open("me", NOW_MS)
    rows = {row(n).id: row(n) for n in range(1, count + 1)}
    mark = 100_000 * SHARD_STEP
    await store.commit(opened.epoch, "me", 1, Effects(enqueued=rows, id_mark=mark))
    engine = Engine(EngineConfig(), opened.epoch, mark, NOW_MS)
    return engine, store, Reader(engine.core, store)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def noted(reader: Reader) -> int:
    """Rows and marks that all reads under way keep."""
    return sum(
        len(r.since.enqueued) + len(r.since.updated) + len(r.since.ended) + len(r.since.progress)
        for r in reader._running
    )


async def test_overlapping_reads_note_only_their_own_ids() -> None:
    """There is always one under way: what is noted is bounded by its ids, whatever lands."""
    _, store, reader = await slow(3)
    before = asyncio.create_task(reader.known([1024]))
    await turns()
    for n in range(200):
        following = asyncio.create_task(reader.known([1024, 2048]))
        await turns()
        fresh = {row(i).id: row(i) for i in range(1_000 * (n + 1), 1_000 * (n + 1) + 500)}
        reader.landed(Effects(enqueued=fresh, updated={1024: row(1, n)}))
        reader.landed(Effects(ended=dict.fromkeys(fresh, Outcome.ACKED)))
        assert noted(reader) <= 2
        store.asked[n].set()
        assert (await before)[1024].row.due_ms == n
        assert len(reader._running) == 1
        before = following
    store.asked[-1].set()
    await before
    assert not reader._running


async def test_more_reads_than_the_limit_wait_for_a_place() -> None:
    _, store, reader = await slow(1)
    reads = [asyncio.create_task(reader.known([1024])) for _ in range(READS_MAX + 1)]
    await turns()
    assert len(store.asked) == READS_MAX
    store.asked[0].set()
    await reads[0]
    await turns()
    assert len(store.asked) == READS_MAX + 1
    for event in store.asked:
        event.set()
    for read in reads:
        assert set(await read) == {1024}


async def test_a_page_shows_batches_committed_during_its_scan() -> None:
    _, store, reader = await made(*(row(n) for n in range(1, 5)))
    store.meanwhile = [
        lambda: reader.landed(Effects(ended={2048: Outcome.ACKED}, updated={1024: row(1, 7)}))
    ]
    page, _ = await reader.scan(0, 10, None)
    assert [(k.row.id // 1024, k.row.due_ms == 7) for k in page] == [
        (1, True), (3, False), (4, False)
    ]  # fmt: skip


# --- rows that are missing -----------------------------------------------------------------------


async def holey(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, HoleyStore, Reader, list[str]]:
    monkeypatch.setattr(reader_module, "REREAD_S", 0.0)
    store, notices = HoleyStore(), list[str]()
    opened = await store.open("me", NOW_MS)
    rows = {row(n).id: row(n) for n in range(1, 4)}
    mark = 100 * SHARD_STEP
    await store.commit(opened.epoch, "me", 1, Effects(enqueued=rows, id_mark=mark))
    engine = Engine(EngineConfig(), opened.epoch, mark, NOW_MS)
    engine.core.firing[1024] = NOW_MS
    store.hidden = {1024}
    return (
        engine,
        store,
        Reader(engine.core, store, lambda event, text: notices.append(event)),
        (notices),
    )


async def test_a_row_that_memory_holds_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, store, reader, notices = await holey(monkeypatch)
    for missed in range(1, REREADS_MAX + 1):
        store.reads_left = missed
        assert set(await reader.known([1024, 2048])) == {1024, 2048}
    assert not engine.core.missing and not notices
    assert store.reads[1] == [1024], "only what is missing"


async def test_a_missing_row_is_logged_once_and_can_reappear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, store, reader, notices = await holey(monkeypatch)
    core = engine.core
    for _ in range(3):
        assert set(await reader.known([1024, 2048])) == {2048}
        assert reader.missing([2048, 1024]) == [1024]
    assert (notices, core.totals.rows_missing) == (["rows_missing"], 1)
    async with reader.read_some([1024, 2048], 1 << 20) as (view, left):
        assert (set(view([1024, 2048])), list(left)) == ({2048}, [])
    store.hidden = set()
    assert set(await reader.known([1024])) == {1024}
    assert (notices, core.missing) == (["rows_missing", "rows_found_again"], {})


async def test_a_row_of_a_task_that_left_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended and known so, ended while it was read, or ended so long ago that nobody knows how."""
    engine, store, reader, notices = await holey(monkeypatch)
    core = engine.core
    core.firing.clear()
    assert await reader.known([1024]) == {}
    core.firing[1024] = NOW_MS
    core.topic("t")  # it counts what is not finished
    core.end(1024, Outcome.CANCELLED, "t", None)
    assert await reader.known([1024]) == {}
    del core.open.effects.ended[1024]
    assert not core.missing and not notices
    assert len(store.reads) < 4


@pytest.mark.parametrize("bodies", [True, False])
async def test_a_due_time_that_is_not_committed_shows(bodies: bool) -> None:
    engine, _, reader = await made(row(1), row(2))
    core = engine.core
    core.open.effects.updated[1024] = row(1, NOW_MS + 5)._replace(body=NO_BODY)
    engine.seal(NOW_MS, 0)
    core.open.effects.moved[1024] = NOW_MS + 7
    async with reader.read_some([1024, 2048], NO_LIMIT, bodies=bodies) as (view, _):
        known = view([1024, 2048])
    assert known[1024].row.due_ms == NOW_MS + 7
    assert known[2048].row.due_ms == NOW_MS
    for task_id in known:
        assert (known[task_id].row.body is NO_BODY) != bodies
        assert known[task_id].row.body == (b"x" if bodies else b"")


async def test_columns_omit_tasks_with_other_records() -> None:
    """Whatever is not committed, or landed meanwhile, shows in them as it does in snapshots."""
    early = row(101)
    engine, store, reader = await made(*(row(n) for n in range(1, 9)), early)
    core = engine.core
    engine.grouping.group(core.topic("t"), "h", NOW_MS)
    core.open.effects.progress[1024, "g"] = ProgressRow(1024, "g", ProgressState.WAITING, 1, NOW_MS)
    core.open.effects.dead[2048, "h"] = DeadRow(2048, "h", "t", NOW_MS, 2, "why")
    core.open.effects.moved[3072] = NOW_MS + 7
    engine.seal(NOW_MS, 0)
    core.open.effects.moved[4096] = NOW_MS + 8
    core.open.effects.updated[3072] = row(3, NOW_MS + 9)._replace(body=NO_BODY)
    core.open.effects.ended[5120] = Outcome.CANCELLED
    landed = Effects(moved={6144: NOW_MS + 1}, ended={7168: Outcome.ACKED})
    ids = [*range(1024, 9 * 1024, 1024), early.id]
    seen = []
    for bodies in (True, False):
        store.meanwhile = [partial(reader.landed, landed)]
        async with reader.read_some(ids, NO_LIMIT, bodies=bodies) as (view, _):
            seen.append(view(ids))
    whole, columns = seen
    assert isinstance(columns, Records) and not isinstance(whole, Records)
    assert columns.plain == {"t": {4096: NOW_MS + 8, 6144: NOW_MS + 1, 8192: NOW_MS}}
    assert set(columns) == set(whole) and len(columns) == len(whole) == 6
    for task_id, known in columns.items():
        body = whole[task_id].row.body
        assert known._replace(row=known.row._replace(body=body)) == whole[task_id]
    assert 5120 not in columns and early.id not in columns


@pytest.mark.parametrize("last", ["updated", "moved"])
async def test_the_last_change_committed_during_a_read_wins(last: str) -> None:
    _, store, reader = await made(row(1))
    moved = Effects(moved={1024: NOW_MS + 7})
    updated = Effects(updated={1024: row(1, NOW_MS + 5)})
    both = [updated, moved] if last == "moved" else [moved, updated]
    store.meanwhile = [partial(reader.landed, effects) for effects in both]
    due_ms = (await reader.known([1024]))[1024].row.due_ms
    assert due_ms == NOW_MS + (7 if last == "moved" else 5)


def test_a_refused_batch_of_moves_joins_the_next() -> None:
    older, newer = Batch(), Batch()
    older.effects.moved = {1: 10, 2: 10}
    older.effects.updated = {3: row(3, 10), 4: row(4, 10)}
    newer.effects.moved = {2: 20, 3: 20}
    newer.effects.updated = {1: row(1, 20)}
    rejoin(older, newer)
    assert newer.effects.moved == {2: 20}
    dues = {i: found.due_ms for i, found in newer.effects.updated.items()}
    assert dues == {1: 20, 3: 20, 4: 10}


def test_a_task_ended_in_a_batch_is_not_moved_in_it() -> None:
    effects = Effects(moved={1: 10, 2: 10}, ended={1: Outcome.CANCELLED})
    strip_ended(effects)
    assert effects.moved == {2: 10}
