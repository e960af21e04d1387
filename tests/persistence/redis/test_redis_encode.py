"""The encoding of a batch for Redis: limits, order, and tasks encoded ahead."""

from __future__ import annotations

import hiredis
import msgpack
import pytest

from support.store_rows import ended, in_flight, tasks
from tickwheel.model.kinds import Effects
from tickwheel.model.records import TaskRow
from tickwheel.persistence.codec import encode_tasks
from tickwheel.persistence.redis import layout
from tickwheel.persistence.redis.driver import Packed, joined, pack, pack_args
from tickwheel.persistence.redis.layout import (
    DUE_MS_MAX,
    KEY,
    NEW_ROWS,
    PART_ARGS_MAX,
    PART_BYTES_MAX,
    AheadEncoder,
    Prepared,
    TopicNumbers,
    prepare,
)

DUE_MS = 1_800_000_000_000
NUMBERS = TopicNumbers()


def arguments(packed: Packed) -> list[bytes]:
    """As Redis reads them."""
    reader = hiredis.Reader()
    reader.feed(b"*%d\r\n%b" % (packed.number, packed.data))
    result = reader.gets()
    assert isinstance(result, list)
    assert reader.gets() is False, "nothing is left"
    return result


def by_operation(prepared: Prepared) -> dict[tuple[bytes, bytes], list[bytes]]:
    """Arguments by name and key; each operation within its limits, no pair divided."""
    result: dict[tuple[bytes, bytes], list[bytes]] = {}
    for part in prepared.flat:
        args, at = arguments(part), 0
        while at < len(args):
            name, key, count = args[at], args[at + 1], int(args[at + 2])
            some = args[at + 3 : at + 3 + count]
            if name in (b"NEW", b"RECORDS"):
                (one,) = some
                some = msgpack.unpackb(one, raw=True)
            assert len(some) <= 1_000
            assert name in (b"END", b"ENDING", b"ZREM", b"HDEL") or len(some) % 2 == 0
            result.setdefault((name, key), []).extend(some)
            at += 3 + count
    return result


def rows(first: int, stop: int, due_ms: int = DUE_MS) -> dict[int, TaskRow]:
    """Due in an order of their own."""
    return {i: TaskRow(i, due_ms + i * 7_919 % 1_000, "t", b"%d" % i) for i in range(first, stop)}


def check_tasks(prepared: Prepared, wanted: dict[int, TaskRow]) -> None:
    """Every row once in both keys, and the records in the order of the map."""
    result = by_operation(prepared)
    queue, fields = result[b"NEW", KEY["store"]], result[b"RECORDS", KEY["task"]]
    assert len(queue) == len(fields) == 2 * len(wanted)
    ids = [b"%019d" % i for i in wanted]
    scores = [b"%d" % score for score in NUMBERS.scores(list(wanted.values()))]
    assert dict(zip(queue[1::2], queue[::2], strict=True)) == dict(zip(ids, scores, strict=True))
    records = encode_tasks(wanted.values())
    assert dict(zip(fields[::2], fields[1::2], strict=True)) == dict(zip(ids, records, strict=True))
    assert prepared.records.enqueued == records


class TestParts:
    def test_an_ordinary_batch_is_one_part(self) -> None:
        prepared = prepare(tasks(range(16_384)), 10, NUMBERS)
        assert len(prepared.flat) == 1
        assert prepared.size_bytes > 16_384 * 60

    def test_an_empty_batch_is_one_part(self) -> None:
        assert prepare(Effects(), 10, NUMBERS).flat == [Packed(0, b"")]

    @pytest.mark.parametrize(
        "effects",
        [
            tasks(range(1, 30_001)),
            tasks(range(1, 40), body=bytes(1 << 20)),
            Effects(enqueued={i: TaskRow(i, 1, "t", bytes(20 << 20)) for i in (1, 2)}),
            Effects(updated={i: TaskRow(i, 1, "t", bytes(1 << 20)) for i in range(40)}),
            Effects(progress={(i, "g"): in_flight(i, "g") for i in range(19_999)}),
            ended(range(100_001)),
        ],
        ids=["tasks", "bytes", "large bodies", "updated", "progress", "ended"],
    )
    def test_a_large_batch_is_split_at_the_limits(
        self, effects: Effects, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepared = prepare(effects, 200_000, NUMBERS)
        assert len(prepared.flat) > 1
        for part in prepared.flat:
            assert part.number <= PART_ARGS_MAX
            assert len(part.data) <= PART_BYTES_MAX * 1.1 or part.number <= 10
        result = by_operation(prepared)
        assert prepared.size_bytes == sum(len(part.data) for part in prepared.flat)
        monkeypatch.setattr("tickwheel.persistence.redis.layout.PART_ARGS_MAX", 1 << 60)
        monkeypatch.setattr("tickwheel.persistence.redis.layout.PART_BYTES_MAX", 1 << 60)
        whole = prepare(effects, 200_000, NUMBERS)
        assert len(whole.flat) == 1
        assert by_operation(whole) == result


class TestNewTasks:
    @pytest.mark.parametrize("count", [1, NEW_ROWS - 1, NEW_ROWS, NEW_ROWS + 1, 3 * NEW_ROWS + 7])
    def test_every_new_task_is_encoded_once(self, count: int) -> None:
        wanted = rows(1, 1 + count)
        check_tasks(prepare(Effects(enqueued=wanted), 10, NUMBERS), wanted)

    @pytest.mark.parametrize("due_ms", [0, 10**12 - 500, DUE_MS_MAX - 900, 2**53])
    def test_times_of_any_length(self, due_ms: int) -> None:
        wanted = rows(1, 800, due_ms)
        check_tasks(prepare(Effects(enqueued=wanted), 10, NUMBERS), wanted)

    @pytest.mark.parametrize("due_ms", [DUE_MS, 10**12 - 500])
    def test_a_batch_ascends_by_due(self, due_ms: int) -> None:
        ahead, effects = AheadEncoder(NUMBERS), Effects()
        for first in (1, 700, 2_000):  # encoded at three times, the last of it at the end
            effects.enqueued.update(rows(first, first + NEW_ROWS + 9, due_ms))
            ahead.add(effects.enqueued)
        queue = by_operation(prepare(effects, 10, NUMBERS, ahead))
        scores = [int(score) for score in queue[b"NEW", KEY["store"]][::2]]
        assert len(scores) == 3 * (NEW_ROWS + 9)
        assert scores == sorted(scores)

    def test_records_of_any_length(self) -> None:
        sizes = (0, 1, 31, 32, 255, 256, *range(65_490, 65_540), 100_000)
        wanted = {i: TaskRow(i, DUE_MS, "t", bytes(size)) for i, size in enumerate(sizes, 1)}
        lengths = set(map(len, encode_tasks(wanted.values())))
        assert {65_535, 65_536} <= lengths
        check_tasks(prepare(Effects(enqueued=wanted), 10, NUMBERS), wanted)

    def test_the_largest_id(self) -> None:
        wanted = {2**63 - 1: TaskRow(2**63 - 1, DUE_MS, "t", b"")}
        check_tasks(prepare(Effects(enqueued=wanted), 10, NUMBERS), wanted)


class TestAhead:
    def test_tasks_encoded_ahead_are_not_encoded_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encoded: list[int] = []

        def counting(some: list[TaskRow]) -> list[bytes]:
            encoded.append(len(some))
            return encode_tasks(some)

        monkeypatch.setattr(layout, "encode_tasks", counting)
        ahead, effects = AheadEncoder(NUMBERS), Effects()
        effects.enqueued.update(rows(1, NEW_ROWS))
        ahead.add(effects.enqueued)
        assert encoded == [], "too few to be worth it"
        effects.enqueued.update(rows(NEW_ROWS, 2 * NEW_ROWS + 10))
        ahead.add(effects.enqueued)
        assert encoded == [2 * NEW_ROWS]
        effects.enqueued.update(rows(5_000, 5_005))
        check_tasks(prepare(effects, 10, NUMBERS, ahead), effects.enqueued)
        assert sum(encoded) == len(effects.enqueued)

    @pytest.mark.parametrize("change", ["drop", "replace", "drop the last", "nothing"])
    def test_tasks_changed_since_are_encoded_again(self, change: str) -> None:
        ahead, effects = AheadEncoder(NUMBERS), Effects(enqueued=rows(1, 2_001))
        ahead.add(effects.enqueued)
        if change == "drop":
            del effects.enqueued[7]
        elif change == "replace":
            effects.enqueued[7] = TaskRow(7, DUE_MS + 9, "other", b"x")
        elif change == "drop the last":
            del effects.enqueued[2_000]
        check_tasks(prepare(effects, 10, NUMBERS, ahead), effects.enqueued)

    def test_tasks_encoded_ahead_for_another_batch_are_ignored(self) -> None:
        ahead = AheadEncoder(NUMBERS)
        first, second = Effects(enqueued=rows(1, 1_501)), Effects(enqueued=rows(2_000, 3_000))
        ahead.add(first.enqueued)
        check_tasks(prepare(second, 10, NUMBERS, ahead), second.enqueued)
        ahead.add(second.enqueued)
        check_tasks(prepare(first, 10, NUMBERS, ahead), first.enqueued)
        check_tasks(prepare(second, 10, NUMBERS, ahead), second.enqueued)

    def test_a_batch_sent_again_is_whole_again(self) -> None:
        ahead, effects = AheadEncoder(NUMBERS), Effects(enqueued=rows(1, 1_501))
        ahead.add(effects.enqueued)
        check_tasks(prepare(effects, 10, NUMBERS, ahead), effects.enqueued)
        check_tasks(prepare(effects, 10, NUMBERS, ahead), effects.enqueued)


class TestPacking:
    def test_a_packed_end_reads_like_plain_arguments(self) -> None:
        plain = ("EVALSHA", b"x", 7, b"a\r\n", b"", b"b")
        end = joined([pack_args([b"a\r\n", b""]), pack_args([b"b"])])
        (whole,) = pack(plain)
        assert b"".join(pack((*plain[:3], end))) == whole
        assert pack((*plain, Packed(0, b""))) == [whole]
