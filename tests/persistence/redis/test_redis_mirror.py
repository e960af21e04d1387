"""Everything that Redis holds is in memory too: filled at the start, bounded, read from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from persistence.redis.subjects import Make, store
from persistence.store_subject import Subject
from support.redis_server import RedisServer
from support.stand_in import stand_in
from support.store_rows import ended, everything, in_flight, tasks
from tickwheel.model.kinds import GROUP, SESSION, Effects, keyed
from tickwheel.model.records import DeadRow, GroupRow, Outcome, SessionRow, TaskRow
from tickwheel.persistence import codec, open_url
from tickwheel.persistence.codec import decode_heads
from tickwheel.persistence.contract import CommitRefused, CommitUnknown, StoreAway, StoredTask
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.redis import RedisStore, reader
from tickwheel.persistence.redis.driver import RedisOptions, options_from
from tickwheel.persistence.redis.layout import RECORDS, TopicNumbers, prepare
from tickwheel.persistence.redis.mirror import (
    PLACED_TASKS_MAX,
    ROW_BYTES,
    TASK_BYTES,
    GroupRecords,
    Mirror,
    TaskRecords,
)

NEW = 1_000_000
"""Ids from here on are of tasks made while others are loaded."""


def _mirror(subject: Subject) -> Mirror:
    return store(subject)._mirror


@pytest.fixture
async def subject(make: Make) -> Subject:
    result = make()
    await result.open()
    return result


class TestFilling:
    @pytest.mark.parametrize("chunk", [1, 7, 10_000])
    async def test_brings_all_there_is(self, subject: Subject, chunk: int) -> None:
        await subject.commit(everything())
        await subject.commit(tasks(range(1_100, 1_200)))
        ids = await subject.ids()
        before = await _content(subject)
        await subject.reopen()
        assert not _mirror(subject).complete
        assert sorted(await subject.recover(chunk)) == ids
        assert _mirror(subject).complete
        assert await subject.ids() == ids
        assert await _content(subject) == before

    async def test_a_new_shard_is_complete(self, subject: Subject) -> None:
        assert _mirror(subject).complete

    async def test_an_abandoned_recovery_leaves_the_mirror_incomplete(
        self, subject: Subject
    ) -> None:
        await subject.commit(tasks(range(1, 101)))
        await subject.reopen()
        await subject.store.recover_small()
        stream = subject.store.recover_handles(10)
        await anext(aiter(stream))
        await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
        assert not _mirror(subject).complete
        assert await subject.ids() == list(range(1, 101)), "from Redis"
        await subject.commit(ended([1]))
        assert await subject.recover() == list(range(2, 101))
        assert _mirror(subject).complete
        assert await subject.ids() == list(range(2, 101))

    async def test_batches_between_chunks_are_newer(self, subject: Subject) -> None:
        reference = await _reference(subject, range(1, 301))
        await subject.reopen()
        await subject.store.recover_small()
        first = True
        async for handles in subject.store.recover_handles(10):
            if first:
                for effects in _changes(list(range(1, 301))):
                    await subject.commit(effects)
                    await reference.commit(effects)
                first = False
            assert max(handles.ids) < NEW
        await subject.keys()
        await _compare(subject, reference)

    @pytest.mark.parametrize("read", ["checked", "script"])
    async def test_batches_while_a_part_is_on_its_way_are_newer(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, read: str
    ) -> None:
        """The part was read before they were applied, and comes after they landed."""
        reference = await _reference(subject, range(1, 101))
        await subject.reopen()
        await subject.store.recover_small()
        read_client = store(subject)._recovering._read_client
        ask = getattr(read_client, read)
        seen: set[int] = set()
        over: set[int] = set()

        async def late(what: Any, *args: Any, **options: Any) -> Any:
            reply = await ask(what, *args, **options)
            ids = []
            if what == "ZRANGE":
                ids = list(map(int, reply[::2]))
            elif what is RECORDS:
                ids = decode_heads([one for some in reply[0] for one in some if one]).ids
            ids = [task_id for task_id in ids if task_id < NEW and task_id not in seen]
            seen.update(ids)
            over.update(ids[:2])
            for effects in _changes(ids):
                # No due time changes before all handles are loaded.
                if what is RECORDS or not effects.updated:
                    await subject.commit(effects)
                    await reference.commit(effects)
            return reply

        monkeypatch.setattr(read_client, read, late)
        results: list[int] = []
        async for handles in subject.store.recover_handles(10):
            results += handles.ids
        assert len(over) == (0 if read == "script" else 4)
        assert sorted(results) == sorted(set(range(1, 101)) - over)
        await subject.keys()
        assert len(over) >= 2
        await _compare(subject, reference)

    @pytest.mark.parametrize("phase", ["handles", "keys"])
    async def test_an_outage_during_recovery_is_waited_for(
        self,
        subject: Subject,
        redis_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        phase: str,
    ) -> None:
        await subject.commit(tasks(range(1, 101)))
        await subject.reopen()
        await subject.store.recover_small()
        read_client = store(subject)._recovering._read_client
        back = [redis_server.snapshot()]

        def returning(ask: Any) -> Any:
            async def away(*args: Any, **options: Any) -> Any:
                try:
                    return await ask(*args, **options)
                except StoreAway:
                    redis_server.restart_from(back.pop())
                    raise

            return away

        for name in ("checked", "script"):
            monkeypatch.setattr(read_client, name, returning(getattr(read_client, name)))
        results: list[int] = []
        async for handles in subject.store.recover_handles(10):
            if not results:
                await subject.commit(tasks([1_000]))
                if phase == "handles":
                    redis_server.kill()
            results += handles.ids
        if phase == "keys":
            redis_server.kill()
        await subject.keys()
        assert results == list(range(1, 101))
        assert back == [], "it was away"
        await subject.reopen()
        assert await subject.ids() == [*range(1, 101), 1_000]

    async def test_an_outage_at_the_first_chunk_is_reported(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        await subject.commit(tasks(range(1, 101)))
        await subject.reopen()
        await subject.store.recover_small()
        redis_server.kill()
        with pytest.raises(StoreAway):
            await anext(aiter(subject.store.recover_handles(10)))
        redis_server.start()

    async def test_a_redis_that_lost_the_rest_meanwhile_is_reported(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        await subject.commit(tasks(range(1, 101)))
        await subject.reopen()
        await subject.store.recover_small()
        with pytest.raises(Exception, match="has lost its data"):
            async for _ in subject.store.recover_handles(10):
                redis_server.call("FLUSHALL")
        with pytest.raises(Exception, match="has lost its data"):
            await subject.commit(tasks([1_000]))


def _changes(ids: list[int]) -> list[Effects]:
    """Batches that end, move and touch some of ``ids``, and make others."""
    if not ids:
        return []
    new = [NEW + task_id for task_id in ids[:5]]
    row = TaskRow(ids[2], 77_777, "moved", b"body")
    return [
        ended(ids[:2]),
        Effects(updated={ids[2]: row, ids[3]: row._replace(id=ids[3])}),
        Effects(
            progress={(i, "g"): in_flight(i, "g") for i in ids[4:6]},
            dead={(ids[6], "g"): DeadRow(ids[6], "g", "t", 1, 2, "why")},
        ),
        tasks(new),
        ended([new[0]]),
        Effects(progress={(ids[4], "g"): None}, dead={(ids[6], "h"): None}),
        Effects(
            records=keyed(GROUP, [GroupRow("t", str(ids[0]), 1)])
            | keyed(SESSION, [SessionRow(b"%016d" % ids[0], 1, 2, ())]),
        ),
    ]


async def _reference(subject: Subject, ids: range) -> Subject:
    """The same content in a store of plain dictionaries."""
    reference = Subject(MemoryStore())
    await reference.open()
    rows = {i: TaskRow(i, i * 7_919 % 500, "t", b"%d" % i) for i in ids}
    touched = Effects(
        progress={(i, g): in_flight(i, g) for i in ids[::7] for g in ("a", "b")},
        dead={(i, "c"): DeadRow(i, "c", "t", 1, 2, "why") for i in ids[::5]},
    )
    for effects in (Effects(enqueued=rows, id_mark=ids[-1]), touched, ended([5_000])):
        await subject.commit(effects)
        await reference.commit(effects)
    return reference


async def _dead(subject: Subject) -> list[DeadRow]:
    return await subject.store.scan_dead((-1, ""), 10_000, None, None)


async def _content(subject: Subject) -> tuple[list[StoredTask], list[DeadRow], Any]:
    small = await subject.small()
    return await subject.store.scan(-1, 1_000_000, None), await _dead(subject), small


async def _compare(subject: Subject, reference: Subject) -> None:
    """The mirror holds what the reference holds, and so does Redis."""
    assert _mirror(subject).complete
    expected = await _content(reference)
    assert await _content(subject) == expected
    counted = _mirror(subject).bytes_held
    await subject.reopen()
    assert not _mirror(subject).complete
    assert await _content(subject) == expected
    await subject.recover()
    assert _mirror(subject).bytes_held == counted


class TestReading:
    async def test_reads_continue_while_redis_is_frozen(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        await subject.commit(everything())
        await subject.commit(tasks(range(1_100, 3_000)))
        await subject.reopen()
        await subject.recover()
        redis_server.pause()
        async with asyncio.timeout(20):
            assert len(await subject.store.read(range(1_100, 3_000))) == 1_900
            assert len(await subject.ids()) == 1_900 + len(everything().enqueued)
            assert len(await _dead(subject)) == len(everything().dead)
            assert (await subject.small()).records == everything().records

    async def test_reads_do_not_see_batches_with_an_unknown_outcome(
        self, subject: Subject, redis_server: RedisServer
    ) -> None:
        await subject.commit(tasks([1]))
        redis_server.pause()
        with pytest.raises(CommitUnknown):
            await subject.commit(ended([1]))
        assert await subject.ids() == [1]
        redis_server.go_on()
        await subject.store.verify()
        assert await subject.ids() == [1], "applied perhaps, but not confirmed"
        await subject.commit(ended([1]))
        assert await subject.ids() == []

    async def test_a_listing_sees_tasks_made_between_its_pages(self, subject: Subject) -> None:
        await subject.commit(tasks(range(1, 11)))
        assert [t.row.id for t in await subject.store.scan(-1, 5, None)] == [1, 2, 3, 4, 5]
        await subject.commit(tasks([11]))
        await subject.commit(Effects(dead={(11, "g"): DeadRow(11, "g", "t", 1, 1, "")}))
        await subject.commit(ended([6]))
        assert [t.row.id for t in await subject.store.scan(5, 9, None)] == [7, 8, 9, 10, 11]
        assert [row.id for row in await _dead(subject)] == [11]
        await subject.commit(Effects(dead={(7, "g"): DeadRow(7, "g", "t", 1, 1, "")}))
        await subject.commit(Effects(dead={(11, "g"): None}))
        assert [row.id for row in await _dead(subject)] == [7]

    async def test_a_long_listing_lets_other_work_run_and_shows_one_moment(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader, "PAGE_MAX", 5)
        monkeypatch.setattr(reader, "IDS_PER_TURN", 10)
        await subject.commit(tasks([1], topic="rare"))
        await subject.commit(tasks(range(2, 40)))
        await subject.commit(tasks([40], topic="rare"))
        batches = [replace(tasks([41], topic="rare"), ended={1: Outcome.ACKED})]

        async def land(delay_s: float) -> None:
            while batches:
                await subject.commit(batches.pop())

        with monkeypatch.context() as patch:
            patch.setattr(reader, "asyncio", stand_in(asyncio, sleep=land))
            page = await subject.store.scan(-1, 10, "rare")
        assert ([t.row.id for t in page], batches) == ([40, 41], [])

    async def test_a_long_list_of_dead_letters_does_the_same(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader, "PAGE_MAX", 5)
        topics = {i: "rare" if i in (1, 40) else "t" for i in range(1, 41)}
        await subject.commit(tasks(topics))
        letters = {(i, "g"): DeadRow(i, "g", name, 1, 1, "") for i, name in topics.items()}
        await subject.commit(Effects(dead={**letters}))
        new = DeadRow(3, "h", "rare", 1, 1, "")
        batches = [Effects(dead={(1, "g"): None, (3, "h"): new})]

        async def land(delay_s: float) -> None:
            while batches:
                await subject.commit(batches.pop())

        with monkeypatch.context() as patch:
            patch.setattr(reader, "asyncio", stand_in(asyncio, sleep=land))
            page = await subject.store.scan_dead((-1, ""), 10, "rare", None)
        assert (page, batches) == ([new, letters[40, "g"]], [])

    async def test_the_indexes_forget_what_has_ended(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader, "ENDED_MIN", 5)
        dead = {(i, "g"): DeadRow(i, "g", "t", 1, 1, "") for i in range(12, 21)}
        await subject.commit(tasks(range(1, 21)))
        await subject.commit(Effects(dead={**dead}))
        assert (len(await subject.ids()), len(await _dead(subject))) == (20, 9)
        await subject.commit(replace(ended(range(1, 12)), dead=dict.fromkeys([*dead][1:])))
        assert await subject.ids() == list(range(12, 21))
        assert [row.id for row in await _dead(subject)] == [12]
        indexes = store(subject)._reader
        assert (len(indexes._index), len(indexes._dead_index)) == (9, 1)


def _size(effects: Effects) -> int:
    records = prepare(effects, 1, TopicNumbers()).records.enqueued
    return sum(map(len, records)) + TASK_BYTES * len(records)


class TestTheBound:
    async def test_is_kept_to_the_byte(self, make: Make) -> None:
        first, more = tasks(range(1, 11)), tasks([11])
        limit = _size(first) + _size(more)
        subject = make(f"resident_bytes_max={limit}")
        await subject.open()
        await subject.commit(first)
        row = more.enqueued[11]
        with pytest.raises(CommitRefused, match=f"{limit + 1} bytes.*limit is {limit}") as refused:
            await subject.commit(Effects(enqueued={11: row._replace(body=row.body + b".")}))
        assert refused.value.full
        assert await subject.commit(more) is True
        assert store(subject).resident_bytes == limit
        with pytest.raises(CommitRefused):
            await subject.commit(tasks([12], body=b""))
        assert await subject.store.probe_room() is False

    async def test_the_mirrors_limit_accepts_batches_without_tasks(self, make: Make) -> None:
        subject = make(f"resident_bytes_max={_size(tasks(range(10)))}")
        await subject.open()
        await subject.commit(tasks(range(10)))
        await subject.commit(Effects(progress={(i, "g"): in_flight(i, "g") for i in range(10)}))
        await subject.commit(Effects(updated={1: TaskRow(1, 5, "t", bytes(100_000))}))
        assert store(subject).resident_bytes > 100_000
        assert await subject.store.probe_room() is False
        await subject.commit(ended([1]))
        assert await subject.store.probe_room() is False, "nine rows of progress"
        await subject.commit(ended([2, 3, 4, 5, 6, 7, 8, 9]))
        assert await subject.store.probe_room() is True
        await subject.commit(tasks([20]))
        await subject.commit(ended([0, 20]))
        assert store(subject).resident_bytes == 0

    async def test_a_batch_that_was_applied_is_not_refused_for_it(
        self, make: Make, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = make(f"resident_bytes_max={_size(tasks([1]))}")
        await subject.open()
        redis_server.pause()
        with pytest.raises(CommitUnknown):
            await subject.commit(tasks([1]))
        monkeypatch.setattr(_mirror(subject), "_bytes_max", 1)
        redis_server.go_on()
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await subject.commit(tasks([1])) is False
                    break
                except CommitUnknown:
                    await asyncio.sleep(0.05)  # real time: Redis is another process
                except CommitRefused as error:  # it came late: void, and too much now
                    assert error.full
                    return
        assert await subject.ids() == [1]

    async def test_more_than_it_is_loaded_all_the_same(
        self, make: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        subject = make()
        await subject.open()
        await subject.commit(tasks(range(1, 5_001), body=bytes(200)))
        await subject.store.close(clean=True)
        small = make("resident_bytes_max=100000")
        opened = await small.open()
        assert opened.has_room is False
        assert opened.no_room.endswith("the limit is 100000 (resident_bytes_max)")
        assert "the limit is 100000 (resident_bytes_max); all tasks are loaded" in caplog.text
        assert await small.store.probe_room() is False
        assert len(await small.recover()) == 5_000
        assert _mirror(small).complete
        with pytest.raises(CommitRefused) as refused:
            await small.commit(tasks([9_000]))
        assert refused.value.full
        await small.commit(ended(range(1, 4_990)))
        assert await small.store.probe_room() is True
        assert await small.commit(tasks([9_000])) is True

    @pytest.mark.parametrize("body", [10, 300, 3_000])
    async def test_resident_bytes_are_estimated_at_the_start(self, make: Make, body: int) -> None:
        subject = make()
        await subject.open()
        for start in range(0, 6_000, 2_000):
            await subject.commit(tasks(range(start, start + 2_000), body=bytes(body)))
        held = store(subject).resident_bytes
        assert (await subject.reopen()).has_room
        assert store(subject).resident_bytes == pytest.approx(held, rel=0.25)

    def test_is_set_by_url_or_keyword(self) -> None:
        assert options_from("redis://h").resident_bytes_max == 2 << 30
        assert options_from("redis://h?resident_bytes_max=5").resident_bytes_max == 5
        store = open_url("redis://h?resident_bytes_max=5", resident_bytes_max=7)
        assert isinstance(store, RedisStore)
        assert store.options == RedisOptions(host="h", resident_bytes_max=7)
        assert open_url("memory:", resident_bytes_max=7) is not None


class TestContainers:
    def test_count_their_bytes(self) -> None:
        records = TaskRecords()
        records.add([1, 2], [b"12", b"3"], 3)
        assert records.bytes_held == 2 * TASK_BYTES + 3
        records.put([2, 3], [b"4567", b"8"])
        assert records.bytes_held == 3 * TASK_BYTES + 7
        assert [records.get(i) for i in range(5)] == [None, b"12", b"4567", b"8", None]
        assert sorted(records) == [1, 2, 3]
        records.drop([1, 1, 9])
        assert len(records) == 2
        records.drop([2, 3])
        assert records.bytes_held == 0

    def test_count_their_rows(self) -> None:
        result = GroupRecords()
        result.change([(1, "b"), (1, "a"), (2, "a")], [b"1", b"22", b"3"])
        result.change([(1, "b"), (2, "a"), (3, "a")], [b"4444", None, None])
        assert result.get(1) == [b"22", b"4444"]
        assert (len(result), list(result.ids())) == (2, [1])
        assert result.bytes_held == 2 * ROW_BYTES + 6
        result.drop([1, 2])
        assert (len(result), result.bytes_held) == (0, 0)

    def test_dictionaries_of_the_mirror_grow_separately(self) -> None:
        """So that the event loop never waits for one large one, nor for all at once."""
        for step in (1 << 10, 1 << 15, 1 << 20, 1 << 22, 1 << 30):
            records = TaskRecords()
            ids = range(1 << 50, (1 << 50) + 100_000 * step, step)
            records.add(ids, [b""] * len(ids), 0)
            records.place()
            sizes = sorted(map(len, records._buckets))
            assert sum(sizes) == len(records) == 100_000
            if step >= 1 << 20:
                assert sizes[-1] < 2_000
                assert len(set(sizes)) > 15
            else:  # they are filled one after the other
                assert sizes[-1] < 65_536

    @pytest.mark.parametrize("count", [1, PLACED_TASKS_MAX, PLACED_TASKS_MAX + 1, 100])
    def test_few_are_placed_at_once_and_many_later(self, count: int) -> None:
        found, is_many = TaskRecords(), count > PLACED_TASKS_MAX
        records = {(1 << 50) + (n << 19): b"%d" % n for n in range(count)}
        found.add(list(records), list(records.values()), sum(map(len, records.values())))
        assert found.has_to_place == is_many
        assert sum(map(len, found._buckets)) == (0 if is_many else count)
        assert {task_id: found.get(task_id) for task_id in records} == records
        assert not found.has_to_place
        found.drop(records)
        assert (len(found), found.bytes_held) == (0, 0)

    def test_take_ids_in_any_order(self) -> None:
        found, expected = TaskRecords(), {}
        for n, step in enumerate((1, 7, 1 << 10, 1 << 19, 1 << 20, 1 << 40)):
            ids = list(range(n + step, n + 50 * step, step))
            Random(n).shuffle(ids)
            for some in (ids[:20], sorted(ids[20:])):
                some = [task_id for task_id in some if task_id not in expected]
                records = [b"%d" % task_id for task_id in some]
                found.add(some, records, sum(map(len, records)))
                expected |= dict(zip(some, records, strict=True))
        assert {task_id: found.get(task_id) for task_id in found} == expected
        found.drop(list(expected)[::2])
        assert sorted(found) == sorted(list(expected)[1::2])
        found.drop(expected)
        assert (len(found), found.bytes_held) == (0, 0)

    @pytest.mark.parametrize("ask", ["len", "iter", "get", "put", "drop", "records", "add"])
    def test_every_reader_finds_the_last_added_records(self, ask: str) -> None:
        records = TaskRecords()
        records.add([1, 2], [b"1", b"2"], 2)
        if ask == "len":
            assert len(records) == 2
        elif ask == "iter":
            assert list(records) == [1, 2]
        elif ask == "get":
            assert records.get(2) == b"2"
        elif ask == "put":
            records.put([2], [b"two"])
            assert records.bytes_held == 2 * TASK_BYTES + 4
        elif ask == "drop":
            records.drop([1, 2])
            assert (len(records), records.bytes_held) == (0, 0)
        elif ask == "records":
            assert list(records.records()) == [b"1", b"2"]
        else:
            records.add([3], [b"3"], 1)
            assert sorted(records) == [1, 2, 3]

    def test_come_in_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(codec, "ROWS_PER_BATCH", 300)
        records = TaskRecords()
        records.add(range(1_000), [b"%03d" % i for i in range(1_000)], 3_000)
        batches = list(codec.in_parts(records.records(), len))
        assert [len(batch) for batch in batches] == [300, 300, 300, 100]
        assert sorted(record for batch in batches for record in batch) == [
            b"%03d" % i for i in range(1_000)
        ]
        monkeypatch.setattr(codec, "BYTES_PER_BATCH", 30)
        assert {len(batch) for batch in codec.in_parts(records.records(), len)} == {10}
