"""``?mirror=no``: no record is kept in memory; the newest batches alone are there for a Redis that
came back older, and one that lacks more stops the store for good."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from persistence.conftest import QUICK
from persistence.redis.subjects import Make, both, content, store
from persistence.store_subject import Subject, taken
from support.redis_server import RedisServer
from support.store_rows import ended, everything, in_flight, tasks
from support.waiting import comes
from tickwheel.model.kinds import Effects
from tickwheel.model.records import TaskOptions, TaskRow
from tickwheel.persistence.contract import (
    StoreError,
    StoreForgot,
    StoreUnusable,
)
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.redis import options_from
from tickwheel.persistence.redis.driver import SCHEMES
from tickwheel.persistence.redis.opening import RedisAdministration
from tickwheel.persistence.redis.recovery import BODILESS_BYTES_MIN
from tickwheel.persistence.redis.store import RedisElection
from tickwheel.persistence.redis.writer import SEPARATE_BYTES_MIN, KeptBatches, SeparateRecords

PATIENCE_S = 60.0
BODY = b"a body that is nowhere but in Redis"


@pytest.fixture
async def pair(make: Make) -> tuple[Subject, Subject]:
    """A store without a mirror, and what it should hold."""
    subject, reference = make("mirror=no"), Subject(MemoryStore())
    await subject.open()
    await reference.open()
    await both((subject, reference), everything())
    await both((subject, reference), tasks(range(1_000, 1_500)))
    return subject, reference


async def _compare(pair: tuple[Subject, Subject]) -> None:
    assert await content(pair[0]) == await content(pair[1])


class TestNothingIsKept:
    async def test_neither_batches_nor_recovered_rows_are_kept(
        self, pair: tuple[Subject, Subject]
    ) -> None:
        subject = pair[0]
        for _ in range(2):
            result = store(subject)
            assert not result.mirror
            assert result.resident_bytes == 0
            assert list(result._mirror.ids()) == []
            await _compare(pair)
            for item in pair:
                await item.reopen()
                await item.small()
            handles = [await item.handles() for item in pair]
            ids = [sorted(i for some in result for i in some.ids) for result in handles]
            assert ids[0] == ids[1] != []

    async def test_a_start_reads_no_large_bodies(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject, large = make("mirror=no"), BODY * (BODILESS_BYTES_MIN // len(BODY) + 1)
        await subject.open()
        rows = {
            i: TaskRow(i, i, f"t{i % 3}", BODY if i % 2 else large, TaskOptions(f"k{i}"))
            for i in range(1, 301)
        }
        await subject.commit(Effects(enqueued=rows))
        await subject.reopen()
        await subject.small()
        read_client, replies = store(subject)._recovering._read_client, list[Any]()
        script = read_client.script

        async def noted(*args: Any, **options: Any) -> tuple[Any, Any]:
            reply = await script(*args, **options)
            replies.append(reply)
            return reply

        monkeypatch.setattr(read_client, "script", noted)
        handles = await subject.handles(100)
        assert [i for some in handles for i in some.ids] == list(rows)
        assert [t for some in handles for t in some.topics] == [row.topic for row in rows.values()]
        assert (await subject.keys()).keys() == rows.keys()
        (lists, _) = replies[0]
        assert len(replies) == 1, "a start reads records only of tasks with a key"
        records = [record for some in lists for record in some]
        assert [BODY in record for record in records] == [i % 2 == 1 for i in rows]

    async def test_a_start_reads_rows_of_all_kinds_in_sequence(self, make: Make) -> None:
        """Runs of a topic, names and bodies of all lengths, small numbers, options of all kinds."""
        subject = make("mirror=no")
        await subject.open()
        topics = ["a"] * 3 + ["b" * 31, "b" * 32, "b" * 32, "é" * 100, "a", "a"]
        keyed, priority = TaskOptions("k"), TaskOptions(priority=3)
        kinds = [None, keyed, None, priority, priority, keyed, None]
        rows = {}
        for i in range(1, 700):
            task_id = i if i % 5 else (1_790_000_000_000 << 10) + i
            due_ms = i if i < 300 else 1_790_000_000_000 + i
            body = b"\xc0" * (i % 3 * 200 if i % 7 else 70_000)
            rows[task_id] = TaskRow(
                task_id, due_ms, topics[i // 2 % len(topics)], body, kinds[i % len(kinds)]
            )
        await subject.commit(Effects(enqueued=rows))
        await subject.reopen()
        await subject.small()
        handles = await subject.handles(150)
        by_task_id = {
            task_id: (due_ms, topic)
            for some in handles
            for task_id, due_ms, topic in zip(some.ids, some.dues_ms, some.topics, strict=True)
        }
        assert by_task_id == {row.id: (row.due_ms, row.topic) for row in rows.values()}
        with_key = {row.id for row in rows.values() if row.options == keyed}
        assert (await subject.keys()).keys() == with_key

    async def test_many_rows_are_read_in_one_round_trip(
        self, pair: tuple[Subject, Subject], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject, ids = pair[0], list(range(1_000, 1_500))
        read_client, count = store(subject)._reader._read_client, 0
        script = read_client.script

        async def counted(*args: Any, **options: Any) -> tuple[Any, Any]:
            nonlocal count
            count += 1
            return await script(*args, **options)

        monkeypatch.setattr(read_client, "script", counted)
        found, rest = await subject.store.read_some([*ids, *range(5_000, 5_500)], 1 << 20)
        assert (sorted(found), list(rest), count) == (ids, [], 1)

    async def test_commits_continue_while_a_listing_reads_all_ids(
        self, pair: tuple[Subject, Subject], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = pair[0]
        read_client = store(subject)._reader._read_client
        pairs = read_client.pairs

        async def slow(*args: Any, **options: Any) -> AsyncIterator[tuple[bytes, bytes]]:
            async for item in pairs(*args, **options):
                yield item
            async with asyncio.timeout(PATIENCE_S):
                await both(pair, tasks([3_000]))

        monkeypatch.setattr(read_client, "pairs", slow)
        expected = [*(await pair[1].ids()), 3_000]
        assert await subject.ids() == sorted(expected)


class TestCameBackOlder:
    async def test_gets_the_kept_batches_again(
        self, pair: tuple[Subject, Subject], redis_server: RedisServer
    ) -> None:
        before = redis_server.snapshot()
        rows = {i: TaskRow(i, i, "t", bytes(200)) for i in range(2_000, 3_000)}
        assert len(rows) * 200 > SEPARATE_BYTES_MIN, "kept apart"
        await both(pair, Effects(enqueued=rows))
        await both(pair, ended(range(1_000, 1_100)))
        await both(pair, Effects(progress={(2_000, "g"): in_flight(2_000, "g")}))
        redis_server.restart_from(before)
        await both(pair, tasks([3_500]))
        await _compare(pair)
        assert (store(pair[0]).replays, store(pair[0]).rewrites) == (1, 0)
        await pair[0].reopen()
        await pair[1].reopen()
        await _compare(pair)

    async def test_kept_batches_are_replayed_after_a_truncated_log(
        self, pair: tuple[Subject, Subject], redis_server: RedisServer
    ) -> None:
        log = redis_server.log_tail()
        size_bytes = os.path.getsize(log)
        await both(pair, tasks(range(2_000, 2_100)))
        redis_server.kill()
        assert os.path.getsize(log) > size_bytes
        os.truncate(log, size_bytes + 100)
        redis_server.start()
        await comes(lambda: _verified(pair[0]))
        await _compare(pair)
        assert store(pair[0]).replays == 1

    async def test_twice_in_a_row(
        self, make: Make, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Replayed batches are kept as long as newly confirmed ones."""
        subject = make("mirror=no&keep_ms=60000")
        await subject.open()
        await subject.commit(tasks([1]))
        before = redis_server.snapshot()
        await subject.commit(tasks([2]))
        history = store(subject)._writer._kept
        history._batches[-1].at_s -= 58.5
        redis_server.restart_from(before)
        await comes(lambda: _verified(subject))
        await asyncio.sleep(1.6)  # real time: the first of the two confirmations is too old now
        await taken(subject, tasks([3]))
        redis_server.restart_from(before)
        await comes(lambda: _verified(subject))
        assert await subject.ids() == [1, 2, 3]
        assert store(subject).replays == 2

    async def test_old_batches_are_let_go_of_only_while_redis_has_them(
        self, make: Make, redis_server: RedisServer
    ) -> None:
        """Also without further batches; and an absence makes nothing old."""
        subject = make("mirror=no&keep_ms=1500")
        await subject.open()
        history = store(subject)._writer._kept
        before = redis_server.snapshot()
        await subject.commit(tasks([1]))
        redis_server.kill()
        await asyncio.sleep(3)  # real time: longer than batches are kept
        assert history.covers(1, 1)
        redis_server.restart_from(before)
        await comes(lambda: _verified(subject))
        assert await subject.ids() == [1]
        await comes(lambda: not history.covers(1, 1))


async def _verified(subject: Subject) -> bool:
    await subject.store.verify()
    try:
        await store(subject)._reader._read_client.glance()
    except StoreForgot:
        raise
    except StoreError:
        return False
    return True


def test_split_records_are_unchanged() -> None:
    records = [b"a" * size for size in (0, 1, 70_000, 3)] + [b"last"]
    assert list(SeparateRecords(records, sum(map(len, records)))) == records


def test_kept_batches_are_bounded_by_bytes_and_age() -> None:
    history = KeptBatches(keep_ms=1_000, keep_bytes=1_000)
    for n in range(1, 6):
        history.add(n, Effects(), (), 100, now_s=n / 10)
    assert history.covers(3, 5)
    assert not history.covers(2, 5), "300 bytes each, and 1,000 at most"
    history.note_resent(5, now_s=1.45)
    history.forget(now_s=1.45)
    assert history.covers(5, 5)
    assert not history.covers(4, 5), "from 0.4 s"
    history.forget(now_s=2.5)
    assert not history.covers(5, 5)


class TestCameBackWithoutMore:
    """Empty, or older than the batches that are kept."""

    @pytest.fixture
    async def lost(
        self, make: Make, redis_server: RedisServer, request: pytest.FixtureRequest
    ) -> Subject:
        """A store whose Redis has just lost more than is kept."""
        subject = make("mirror=no&keep_bytes=10")
        await subject.open()
        await subject.commit(everything())
        before = redis_server.snapshot()
        await subject.commit(tasks([1_000]))
        await subject.commit(tasks([1_001]))
        redis_server.restart_from(before if request.param == "older" else None)
        return subject

    @pytest.mark.parametrize("lost", ["older", "empty"], indirect=True)
    @pytest.mark.parametrize("noticed_by", ["commit", "read", "verify", "scan"])
    async def test_an_unrecoverable_redis_stops_the_store_with_advice(
        self, lost: Subject, noticed_by: str
    ) -> None:
        async def notice() -> object:
            if noticed_by == "commit":
                return await taken(lost, tasks([1_002]))
            if noticed_by == "read":
                return await lost.store.read([1_000])
            if noticed_by == "scan":
                return await lost.store.scan(-1, 10, None)
            return await comes(lambda: _verified(lost))

        with pytest.raises(StoreForgot, match="(older|lost its data).*`tickwheel restore`") as e:
            await notice()
        assert "\n" not in e.value.message
        with pytest.raises(StoreForgot):
            await lost.commit(ended([1_000]))
        with pytest.raises(StoreForgot):
            await lost.store.verify()
        assert (store(lost).replays, store(lost).rewrites) == (0, 0)

    @pytest.mark.parametrize("lost", ["older", "empty"], indirect=True)
    async def test_no_daemon_uses_an_incomplete_redis(
        self, lost: Subject, make: Make, redis_server: RedisServer
    ) -> None:
        with pytest.raises(StoreForgot):
            await taken(lost, tasks([1_002]))
        tasks_before = redis_server.call("HLEN", "{tw:default:0}:task")
        for query in ("mirror=no", "mirror=yes"):
            with pytest.raises(
                StoreUnusable, match="lacks data that tester had confirmed.*restore"
            ):
                await make(query).open()
        options = options_from(redis_server.url(QUICK))
        election = RedisElection(options, 1_000)
        seen = await election.look()
        await election.close()
        assert (seen.lost_by, seen.rewriting) == ("tester", "")
        administration = RedisAdministration(options)
        result = await administration.look()
        assert "lacks data that tester had confirmed" in result.state
        assert not result.unused
        assert redis_server.call("HLEN", "{tw:default:0}:task") == tasks_before, "nothing removed"
        await administration.lay_out(result, 0, watch_s=0)
        fresh = make("mirror=no")
        assert (await fresh.open()).last_batch == 0

    @pytest.mark.parametrize("lost", ["older"], indirect=True)
    async def test_a_newly_initialised_shard_is_left_alone(
        self, lost: Subject, make: Make, redis_server: RedisServer
    ) -> None:
        redis_server.lay_out()
        other = make()
        await other.open()
        with pytest.raises(StoreError):
            await taken(lost, tasks([1_002]))
        await other.commit(tasks([1]))
        assert await other.ids() == [1]


class TestTheUrl:
    @pytest.mark.parametrize("scheme", sorted(SCHEMES))
    def test_takes_it_with_every_way_to_find_the_server(self, scheme: str) -> None:
        more = "&master=m" if scheme.endswith("sentinel") else ""
        assert not options_from(f"{scheme}://h/?mirror=no{more}").mirror
        assert options_from(f"{scheme}://h/?mirror=yes{more}").mirror
        assert options_from(f"{scheme}://h/?wait_ms=5{more}").mirror, "the default"

    @pytest.mark.parametrize("value", ["", "1", "No", "maybe"])
    def test_the_mirror_option_names_its_values(self, value: str) -> None:
        with pytest.raises(StoreUnusable, match=f"mirror={value!r} is not one of yes, no"):
            options_from(f"redis://h?mirror={value}")

    @pytest.mark.parametrize(
        ("appendfsync", "survives"),
        [("everysec", "sends those of the last 10 s again"), ("always", "a confirmed task")],
    )
    async def test_the_mirror_option_decides_the_durability(
        self, make: Make, redis_server: RedisServer, appendfsync: str, survives: str
    ) -> None:
        redis_server.call("CONFIG", "SET", "appendfsync", appendfsync)
        subject = make("mirror=no")
        await subject.open()
        assert survives in subject.store.durability
        assert "mirror=no: a Redis that came back empty" in subject.store.durability
        await subject.store.close(clean=True)
        mirrored = make()
        await mirrored.open()
        assert "mirror" not in mirrored.store.durability
