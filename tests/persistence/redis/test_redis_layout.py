"""What an operator sees with redis-cli."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from persistence.store_subject import Subject
from support.redis_server import RedisServer
from support.store_rows import ended, everything, tasks
from tickwheel.model.kinds import GROUP, SESSION, TRANSACTION, Effects, Halves, keyed
from tickwheel.model.records import (
    DeadRow,
    GroupRow,
    ProgressRow,
    ProgressState,
    SessionRow,
    TaskRow,
)
from tickwheel.persistence.codec import encode_tasks
from tickwheel.persistence.redis import RedisStore, options_from, reader
from tickwheel.persistence.redis.layout import member, record_field, split_member
from tickwheel.persistence.redis.reader import IdIndex
from tickwheel.persistence.redis.writer import KeptBatches

S = "{tw:default:0}"


@pytest.fixture
async def subject(shared_redis: RedisServer) -> AsyncIterator[Subject]:
    shared_redis.call("FLUSHALL")
    result = Subject(RedisStore(options_from(shared_redis.url())))
    yield result
    await result.store.close(clean=True)


@pytest.fixture
async def cli(shared_redis: RedisServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(shared_redis.url(), decode_responses=True) as redis:
        yield redis


class TestRedisCli:
    async def test_redis_shows_tasks_in_flight_and_retries(
        self, subject: Subject, cli: Redis
    ) -> None:
        await subject.open()
        states = {
            "first": (ProgressState.IN_FLIGHT, 0, 1_700_000_031_999),
            "retry": (ProgressState.WAITING, 2, 1_700_000_031_000),
            "many": (ProgressState.IN_FLIGHT, 5_000, 1_700_000_031_001),
            "held": (ProgressState.HELD, 5, 1_700_000_031_000),
            "released": (ProgressState.RELEASED, 2, 1_700_000_031_000),
            "done": (ProgressState.DONE, 1, 1_700_000_031_000),
        }
        rows = {
            (7, g): ProgressRow(7, g, s, 5_001, at, failed=failed)
            for g, (s, failed, at) in states.items()
        }
        await subject.commit(tasks([7]))
        await subject.commit(Effects(progress=dict(rows)))
        assert await cli.zrange(f"{S}:prepare", 0, -1, withscores=True) == [
            ("0000000000000000007/first", 1_700_000_031_000),
            ("0000000000000000007/retry", 1_700_000_031_002),
            ("0000000000000000007/held", 1_700_000_031_005),
            ("0000000000000000007/many", 1_700_000_031_999),
        ]
        await subject.commit(
            Effects(progress={(7, "first"): rows[7, "first"]._replace(state=ProgressState.DONE)})
        )
        assert await cli.zcard(f"{S}:prepare") == 3
        await subject.commit(ended([7]))
        assert sorted(await cli.keys("*")) == [f"{S}:endings", f"{S}:topics", f"{S}:wheel"]

    async def test_shows_the_queue_in_due_order_and_the_wheel(
        self, subject: Subject, cli: Redis
    ) -> None:
        await subject.open("node/1")
        late, soon = TaskRow(10, 9_000, "t", b""), TaskRow(11, 5_000, "t", b"")
        effects = Effects(enqueued={10: late, 11: soon}, id_mark=11, position_ms=4_000)
        assert await subject.store.commit(1, "node/1", 1, effects)
        assert await cli.zrange(f"{S}:store", 0, -1, withscores=True) == [
            ("0000000000000000011", 2**52 + 5_000 * 512 + 1 * 2),
            ("0000000000000000010", 2**52 + 9_000 * 512 + 1 * 2),
        ]
        assert await cli.hgetall(f"{S}:topics") == {"1": "t"}
        assert await cli.hlen(f"{S}:task") == 2
        wheel = await cli.hgetall(f"{S}:wheel")
        assert wheel["incarnation"] == _incarnation(subject)
        assert {name: wheel[name] for name in ("epoch", "owner", "last", "position_ms")} == {
            "epoch": "1", "owner": "node/1", "last": "1", "position_ms": "4000",
        }  # fmt: skip
        assert wheel["format"] == "2"

    async def test_shows_dead_letters_by_id_and_group(self, subject: Subject, cli: Redis) -> None:
        await subject.open()
        rows = [DeadRow(i, g, "t", 1, 1, "") for i in (30, 4) for g in ("b", "a")]
        await subject.commit(Effects(dead={(row.id, row.group): row for row in rows}))
        assert await cli.zrange(f"{S}:dead", 0, -1) == [
            f"{i:019d}/{g}" for i in (4, 30) for g in ("a", "b")
        ]

    async def test_shows_records_by_kind_and_key(self, subject: Subject, cli: Redis) -> None:
        await subject.open()
        effects = Effects(records=keyed(GROUP, [GroupRow("orders", "billing", 0)]))
        effects.put(SESSION, SessionRow(b"\x01\xff", 0, 0, ((17, 1, 1, 1),)))
        effects.put(TRANSACTION, Halves("order 17", 2, 0, ()))
        await subject.commit(effects)
        assert sorted(await cli.hkeys(f"{S}:records")) == [
            "group orders billing", "session 01ff 17", "transaction order%2017 2",
        ]  # fmt: skip

    async def test_every_key_is_in_one_hash_slot(self, subject: Subject, cli: Redis) -> None:
        await subject.open()
        await subject.commit(everything())
        keys = await cli.keys("*")
        assert len(keys) == 11
        assert all(key.startswith(f"{S}:") for key in keys)


def _incarnation(subject: Subject) -> str:
    assert isinstance(subject.store, RedisStore)
    return subject.store.incarnation


class TestNames:
    @pytest.mark.parametrize("group", ["default", "a/b:c", "a b", "50%", "%0A", "x\ny", "é"])
    def test_members_come_back(self, group: str) -> None:
        assert split_member(member(7, group)) == (7, group)
        assert b"\n" not in member(7, group)

    def test_topics_and_groups_are_not_mixed_up(self) -> None:
        pairs = [("a b", "c"), ("a", "b c"), ("a%20b", "c"), ("a", "b%20c")]
        assert len({record_field((GROUP, pair)) for pair in pairs}) == len(pairs)


class TestHistory:
    def test_is_bounded_by_time_and_bytes(self) -> None:
        history = KeptBatches(keep_ms=10_000, keep_bytes=10_000)
        assert not history.covers(1, 1)
        for n in range(1, 21):
            history.add(n, Effects(id_mark=n), [], 100, now_s=n * 1.0)
        assert history.covers(10, 20)
        assert not history.covers(9, 20), "older than ten seconds"
        assert [n for n, _ in history.since(18)] == [18, 19, 20]
        history.add(21, Effects(), [], 9_700, now_s=21.0)
        assert history.covers(21, 21)
        assert not history.covers(20, 21), "no bytes left for it"
        history.add(22, Effects(), [], 20_000, now_s=21.0)
        assert not history.covers(22, 22)

    def test_gives_batches_back_as_they_were(self) -> None:
        history, effects = KeptBatches(keep_ms=10_000, keep_bytes=1 << 20), everything()
        assert effects.enqueued
        records = encode_tasks(effects.enqueued.values())
        history.add(1, effects, records, 1_000, now_s=1.0)
        history.add(2, tasks([]), [], 0, now_s=1.0)
        assert dict(history.since(1)) == {1: effects, 2: tasks([])}
        assert next(history.since(1))[1] is not effects, "whose rows take much memory"


class TestIdIndex:
    async def test_the_id_index_has_ids_added_during_its_load(self) -> None:
        index = IdIndex()
        index.add([1])
        assert index.after(-1, 9) is None
        with index.loading() as found:
            found += [5, 3, 5]
            index.add([9, 7])
        assert index.after(3, 2) == [5, 7]
        index.add([8])
        assert index.after(-1, 9) == [3, 5, 7, 8, 9]
        assert index.after(9, 9) == []

    async def test_new_ids_are_added_without_sorting_the_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        index, sizes = IdIndex(), list[int]()
        with index.loading() as found:
            found += range(1_000)

        def noted(ids: list[int]) -> list[int]:
            sizes.append(len(ids))
            return sorted(ids)

        monkeypatch.setattr(reader, "sorted", noted, raising=False)
        index.add([1_002, 1_001, 1_002])
        assert index.after(998, 9) == [999, 1_001, 1_002]
        index.add([1_000, 999])
        assert index.after(998, 9) == [999, 1_000, 1_001, 1_002]
        assert sizes[0] == 3

    async def test_is_dropped_when_half_of_its_tasks_have_ended(self) -> None:
        index = IdIndex()
        with index.loading() as found:
            found += range(2 * reader.ENDED_MIN + 2)
        index.end(reader.ENDED_MIN + 1)
        assert index.after(0, 1) == [1]
        index.end(1)
        assert index.after(0, 1) is None

    async def test_is_dropped_when_nobody_lists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        index = IdIndex()
        with index.loading() as found:
            found += [1]
        monkeypatch.setattr(reader, "IDLE_S", -1.0)
        index.add([2])
        assert index.after(-1, 9) is None
