"""Scores of the StoreQueue: a start reads topics and due times from them, whatever else happens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import pytest

from persistence.redis.subjects import Make, store
from persistence.store_subject import Subject
from support.golden import GOLDEN, stored_tasks
from support.redis_dump import dump, load
from support.redis_server import RedisServer
from support.store_rows import ended, tasks
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.kinds import Effects
from tickwheel.model.records import TaskOptions, TaskRow
from tickwheel.persistence.contract import StoreBroken
from tickwheel.persistence.redis import layout, opening, recovery
from tickwheel.persistence.redis.layout import CODE_BITS, DUE_MS_MAX, SCORE_MIN, TopicNumbers
from tickwheel.persistence.redis.writer import Writer

S = "{tw:default:0}"
MIRRORS = pytest.mark.parametrize("query", ["", "mirror=no"], ids=["mirror", "no mirror"])


def rows_of(topics: Iterable[str], count: int, due_ms: int = 1_000_000) -> dict[int, TaskRow]:
    random = Random(1)
    names = list(topics)
    return {
        i: TaskRow(
            i,
            due_ms + random.randrange(20),
            names[i % len(names)],
            b"%d" % i,
            random.choice([None, TaskOptions(key=f"k{i}"), TaskOptions(priority=1)]),
        )
        for i in range(1, count + 1)
    }


async def check(subject: Subject, rows: dict[int, TaskRow], chunk: int = 10) -> None:
    """A start finds these tasks, each once."""
    await subject.store.recover_small()
    chunks = await subject.handles(chunk)
    handles = [one for c in chunks for one in zip(c.dues_ms, c.ids, c.topics, strict=True)]
    assert sorted(handles) == sorted((row.due_ms, row.id, row.topic) for row in rows.values())
    assert [handle[0] for handle in handles] == sorted(handle[0] for handle in handles)
    assert await subject.keys() == KeyHash(subject.opened.key_seed).of_rows(rows.values())


@pytest.fixture
def two_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two topics can have a number."""
    for module in (layout, opening):
        monkeypatch.setattr(module, "NUMBERS_MAX", 2)


class TestNumbers:
    def test_a_score_is_an_exact_double(self) -> None:
        numbers = TopicNumbers()
        rows = [TaskRow(1, due_ms, "t", b"") for due_ms in (0, 1, DUE_MS_MAX, -1, 2**62)]
        scores = numbers.scores(rows)
        assert [int(float(score)) for score in scores] == scores
        assert all(SCORE_MIN <= score < 1 << 53 for score in scores)
        codes = [score & ((1 << CODE_BITS) - 1) for score in scores]
        assert codes == [2, 2, 2, 0, 0], "records tell the others"

    def test_free_numbers_are_given_away(self) -> None:
        numbers = TopicNumbers()
        names = [f"t{n}" for n in range(layout.NUMBERS_MAX)]
        assert sorted(map(numbers.of, names)) == list(range(1, layout.NUMBERS_MAX + 1))
        assert numbers.of("more") == 0
        numbers.load([name.encode() for name in names])
        assert numbers.of("t9") == 10
        numbers.keep({3, 4})
        assert [numbers.of(name) for name in ("t2", "t3", "t9")] == [3, 4, 10]
        assert numbers.of("more") not in (0, 3, 4, 10)


@MIRRORS
@pytest.mark.usefixtures("two_numbers")
async def test_more_topics_than_numbers(make: Make, query: str) -> None:
    subject = make(query)
    await subject.open()
    rows = rows_of("abcd", 100)
    await subject.commit(Effects(enqueued=rows))
    await subject.reopen()
    await check(subject, rows)
    over = [i for i, row in rows.items() if row.topic in "bc"]
    await subject.commit(ended(over))
    rows = {i: row for i, row in rows.items() if i not in over}
    await subject.reopen()
    await check(subject, rows)
    more = {i + 1_000: row._replace(id=i + 1_000) for i, row in rows_of("ef", 20).items()}
    await subject.commit(Effects(enqueued=more))
    rows |= more
    await subject.reopen()
    await check(subject, rows)
    assert sorted(store(subject)._writer.numbers._numbers) == ["e", "f"]


@MIRRORS
@pytest.mark.usefixtures("two_numbers")
async def test_a_task_that_ends_before_its_record_is_read_is_left_out(
    make: Make, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    """A batch has ended it, whose answer is on its way."""
    subject = make(query)
    await subject.open()
    rows = rows_of("abcd", 100)
    await subject.commit(Effects(enqueued=rows))
    await subject.reopen()
    await subject.store.recover_small()
    heads, gone = recovery.Recovering._heads, list[int]()

    async def end_one(self: Any, ids: Sequence[int], *, waits: bool) -> Any:
        if waits and not gone:
            gone.append(ids[0])
            redis_server.call("HDEL", f"{S}:task", b"%019d" % ids[0])
            redis_server.call("ZREM", f"{S}:store", b"%019d" % ids[0])
        return await heads(self, ids, waits=waits)

    monkeypatch.setattr(recovery.Recovering, "_heads", end_one)
    ids = [task_id for chunk in await subject.handles(10) for task_id in chunk.ids]
    assert sorted(ids) == sorted(rows.keys() - {*gone})
    assert len(gone) == 1
    await subject.keys()


@MIRRORS
@pytest.mark.usefixtures("two_numbers")
async def test_a_topic_with_two_numbers(make: Make, query: str) -> None:
    """It had no task for a while. None of its numbers is given away before all tasks are known."""
    subject = make(query)
    await subject.open()
    await subject.commit(Effects(enqueued=rows_of("ab", 2)))
    await subject.commit(ended([1, 2]))
    await subject.reopen()
    await subject.recover()
    rows = {10: TaskRow(10, 10, "a", b"")}
    await subject.commit(Effects(enqueued=dict(rows)))  # with the number that "b" had
    await subject.reopen()
    assert store(subject)._writer.numbers._names == {1: "a", 2: "a"}
    rows[20] = TaskRow(20, 20, "c", b"")
    await subject.commit(Effects(enqueued={20: rows[20]}))
    await check(subject, rows)
    await subject.reopen()
    await check(subject, rows)


@MIRRORS
async def test_due_times_that_no_score_contains(make: Make, query: str) -> None:
    subject = make(query)
    await subject.open()
    dues_ms = [-(2**40), -1, 0, DUE_MS_MAX, DUE_MS_MAX + 1, 2**50]
    rows = {i: TaskRow(i, due_ms, "t", b"") for i, due_ms in enumerate(dues_ms, 1)}
    await subject.commit(Effects(enqueued=rows))
    await subject.reopen()
    await check(subject, rows, 100)


@MIRRORS
@pytest.mark.parametrize("is_crowd", [True, False])
async def test_ranks_change_between_chunks(
    make: Make, monkeypatch: pytest.MonkeyPatch, query: str, is_crowd: bool
) -> None:
    """Tasks that were read end, and others arrive before them: more than a page has again."""
    monkeypatch.setattr(recovery, "OVERLAP", 2)
    subject = make(query)
    await subject.open()
    rows = {i: TaskRow(i, 5 if is_crowd else 1_000 + i, "ab"[i % 2], b"") for i in range(1, 301)}
    await subject.commit(Effects(enqueued=rows))
    await subject.reopen()
    await subject.store.recover_small()
    results: list[int] = []
    new = 10_000
    async for handles in subject.store.recover_handles(10):
        results += handles.ids
        if len(results) % 50 < 10:
            await subject.commit(ended(results[-40:]))
        else:
            await subject.commit(tasks(range(new, new + 15), due_ms=0))
            new += 15
    assert sorted(results) == list(rows)
    await subject.keys()


@pytest.mark.parametrize("query", ["", "mirror=no"])
async def test_a_task_without_a_record_is_reported(
    make: Make, redis_server: RedisServer, query: str
) -> None:
    subject = make(query)
    await subject.open()
    await subject.commit(Effects(enqueued=rows_of("a", 20)))
    await subject.commit(Effects(enqueued={99: TaskRow(99, 5, "a", b"", TaskOptions(key="k"))}))
    redis_server.call("HDEL", f"{S}:task", b"%019d" % 99)
    await subject.reopen()
    with pytest.raises(StoreBroken, match="task 99 has no record"):
        await subject.recover()


# --- layout 1 ------------------------------------------------------------------------------------


@pytest.fixture
async def former(redis_server: RedisServer) -> dict[str, Any]:
    """A shard that layout 1 wrote."""
    dumped: dict[str, Any] = json.loads((GOLDEN / "v1" / "redis.json").read_text("utf-8"))
    await load(redis_server.url(), dumped)
    return dumped


async def _check_scores(server: RedisServer) -> None:
    dumped, rows = await dump(server.url()), stored_tasks()
    names = dumped[f"{S}:topics"][1]
    seen = set()
    for member, number in dumped[f"{S}:store"][1]:
        score, row = int(number), rows[int(member)]
        seen.add(row.id)
        if row.due_ms >= SCORE_MIN:  # no command has ever made such a task
            continue
        due_ms = (score - SCORE_MIN) >> CODE_BITS
        assert due_ms == min(max(0, row.due_ms), DUE_MS_MAX)
        code = score & ((1 << CODE_BITS) - 1)
        if code > 1:
            assert names[str(code >> 1)].encode("latin-1").decode() == row.topic
            assert bool(code & 1) == (row.options is not None and row.options.key is not None)
        else:
            assert due_ms != row.due_ms
    assert seen == rows.keys()
    assert dumped[f"{S}:wheel"][1]["format"] == "2"


async def test_an_upgrade_changes_all_scores(
    make: Make, redis_server: RedisServer, former: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    subject = make()
    await subject.open()
    count = sum(score < SCORE_MIN for _, score in former[f"{S}:store"][1])
    assert f"changed {count} scores to layout 2" in caplog.text
    await _check_scores(redis_server)
    await check(subject, stored_tasks(), 10_000)
    caplog.clear()
    await subject.reopen()
    assert "scores" not in caplog.text
    await check(subject, stored_tasks(), 10_000)


@pytest.mark.usefixtures("former")
async def test_an_interrupted_upgrade_is_continued(
    make: Make, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "IDS_PER_PAGE", 7)
    subject = make()
    done: list[int] = []

    original = Writer.rescore

    async def cut(writer: Writer, rows: Sequence[TaskRow]) -> None:
        if len(done) == 2:
            raise StoreBroken("cut off")
        await original(writer, rows)
        done.append(len(rows))

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "rescore", cut)
        with pytest.raises(StoreBroken, match="cut off"):
            await subject.open()
    assert done == [1, 7]
    await subject.open()
    await _check_scores(redis_server)
    await check(subject, stored_tasks(), 10_000)
