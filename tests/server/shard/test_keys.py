"""Commands by key, with everything of a daemon but its sockets: every task gets its own word,
whatever comes between, and keys whose hashes collide never meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import Peer
from support.waiting import counted_turns
from tickwheel.api.frames import FrameType as T
from tickwheel.engine.keys import KeyIndex
from tickwheel.limits import Limits
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.kinds import Effects
from tickwheel.protocol import encode
from tickwheel.server.shard import reads

FAR_MS = 3_600_000
KEY = {"topic": "t", "key": "k"}
FAR = ("t", b"", FAR_MS, {"key": "k"})


async def enqueue(daemon: InProcess, peer: Peer, *tasks: Any) -> Sequence[int]:
    ids: Sequence[int] = (await daemon.ask(peer, T.ENQUEUE, 0, tasks))[1]
    return ids


async def test_cancel_answers_for_every_task_that_has_the_key(
    daemon: InProcess, peer: Peer
) -> None:
    ids = await enqueue(
        daemon, peer, FAR, ("t", b"", FAR_MS, {"key": "l"}), ("u", b"", FAR_MS, {"key": "k"}), FAR,
        ("t", b"", FAR_MS),
    )  # fmt: skip
    answer = await daemon.ask(peer, T.CANCEL, None, KEY)
    assert answer == ((ids[0], "cancelled"), (ids[3], "cancelled"))
    words = [task["state"] for task in await daemon.ask(peer, T.LOOKUP, ids)]
    assert words == ["cancelled", "scheduled", "scheduled", "cancelled", "scheduled"]


async def test_each_outcome_has_its_own_status(daemon: InProcess, peer: Peer) -> None:
    await daemon.ask(peer, T.GROUP_CREATE, "t", "g", None)
    now = ("t", b"", 0, {"key": "k"})
    (acked,) = await enqueue(daemon, peer, now)
    await daemon.ask(peer, T.PULL, "t", "g", 1, 0, None)
    epoch = daemon.shard.core.epoch
    assert await daemon.ask(peer, T.CANCEL, None, KEY) == ((acked, "in_flight"),)
    await daemon.ask(peer, T.ACK, "t", "g", epoch, (acked,), (1,))
    assert await daemon.ask(peer, T.CANCEL, None, KEY) == ((acked, "acked"),)
    assert await daemon.ask(peer, T.RUN_NOW, None, KEY) == ((acked, "acked"),)
    dead, flying, far = await enqueue(daemon, peer, now, now, FAR)
    await daemon.ask(peer, T.PULL, "t", "g", 2, 0, None)
    await daemon.ask(peer, T.REJECT, "t", "g", ((dead, epoch, 1, None),))
    assert await daemon.ask(peer, T.CANCEL, None, KEY) == (
        (dead, "dead"), (flying, "in_flight"), (far, "cancelled"),
    )  # fmt: skip
    await daemon.ask(peer, T.DEAD_DELETE, ((dead, "g"),))
    await daemon.ask(peer, T.ACK, "t", "g", epoch, (flying,), (1,))
    (last,) = await enqueue(daemon, peer, FAR)
    assert await daemon.ask(peer, T.CANCEL, None, KEY) == ((last, "cancelled"),)
    assert await daemon.ask(peer, T.CANCEL, None, KEY) == ((last, "already_cancelled"),)
    assert await daemon.ask(peer, T.CANCEL, None, {"topic": "t", "key": "never"}) == (
        (None, "unknown"),
    )
    assert await daemon.ask(peer, T.RUN_NOW, None, {"topic": "t", "key": "never"}) == (
        (None, "unknown"),
    )
    assert await daemon.ask(peer, T.LOOKUP, None, {"topic": "t", "key": "never"}) == ()


async def test_an_expired_task_has_the_status_expired(daemon: InProcess, peer: Peer) -> None:
    (task_id,) = await enqueue(daemon, peer, ("t", b"", 0, {"key": "k", "ttl_ms": 5}))
    daemon.pass_time(10)
    await daemon.settle()
    assert await daemon.ask(peer, T.CANCEL, None, KEY) == ((task_id, "expired"),)


async def test_single_tasks_with_only_a_key_use_the_plain_path(
    daemon: InProcess, peer: Peer
) -> None:
    """Many frames of one task each in one read: with a key alone, without, with more."""
    await enqueue(daemon, peer, ("t", b"", FAR_MS))  # the topic is known from here on
    frames = [
        (T.ENQUEUE, 0, (("t", b"x", FAR_MS, {"key": f"k{n % 3}"}),)) if n % 4 else
        (T.ENQUEUE, 0, (("t", b"x", FAR_MS, *([{"key": "é", "tag": "t"}] * (n % 8 == 0))),))
        for n in range(40)
    ]  # fmt: skip
    answers = await daemon.send(peer, *frames)
    ids = [answer[0][1][0] for answer in answers]
    for key in ("k0", "k1", "k2"):
        wanted = [i for n, i in enumerate(ids) if n % 4 and f"k{n % 3}" == key]
        result = await daemon.ask(peer, T.CANCEL, None, {"topic": "t", "key": key})
        assert result == tuple((task_id, "cancelled") for task_id in wanted)
    result = await daemon.ask(peer, T.CANCEL, None, {"topic": "t", "key": "é"})
    assert [task_id for task_id, _ in result] == ids[::8]
    assert daemon.shard.engine.intake.inflight_bytes == 0
    wrong = [{"key": "k" * 256}, {"key": 5}, {"kez": "k"}, {"key": "k", "kez": 1}, "k", ("k",)]
    frames = [(T.ENQUEUE, 0, (("t", b"x", FAR_MS, options),)) for options in wrong]
    codes = [answer[0] for answer in await daemon.send(peer, *frames)]
    assert codes == ["limit_exceeded", *["bad_request"] * 5]


async def test_keyed_tasks_are_cancelled_and_rescheduled_by_id(
    daemon: InProcess, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at once, with and without a key, and with more: the index follows, and of those with a
    key alone only the due time is written."""
    commit, updated = daemon.store.commit, set[int]()

    async def noting(epoch: int, owner: str, n: int, effects: Effects) -> bool:
        updated.update(effects.updated)
        return await commit(epoch, owner, n, effects)

    monkeypatch.setattr(daemon.store, "commit", noting)
    more = ({"key": "k", "tag": "t"}, {"key": "l"}, {"key": "k"}, None)
    tasks = [("t", b"x", FAR_MS, more[n % 4]) if n % 4 < 3 else FAR[:3] for n in range(40)]
    ids = await enqueue(daemon, peer, *tasks)
    assert {row[1] for row in await daemon.ask(peer, T.CANCEL, ids[::2])} == {"cancelled"}
    left = [i for n, i in enumerate(ids) if n % 4 == 1]
    assert [a[0] for a in await daemon.ask(peer, T.CANCEL, None, KEY)] == [ids[38]]
    answer = await daemon.ask(peer, T.LOOKUP, None, {"topic": "t", "key": "l"})
    assert [task["id"] for task in answer] == left[::-1]
    moved = await daemon.ask(peer, T.RESCHEDULE, ids[1::2], {"delay_ms": FAR_MS + 5})
    assert {row[1] for row in moved} == {"scheduled"}
    assert not updated
    assert await daemon.ask(peer, T.CANCEL, left[:3]) == tuple((i, "cancelled") for i in left[:3])
    answer = await daemon.ask(peer, T.LOOKUP, None, {"topic": "t", "key": "l"})
    assert [task["id"] for task in answer] == left[:2:-1]
    assert {task["due_ms"] for task in answer} == {daemon.sources.now_ms + FAR_MS + 5}


async def test_reschedule_and_run_now_move_all_tasks_of_a_key(
    daemon: InProcess, peer: Peer
) -> None:
    ids = await enqueue(daemon, peer, FAR, FAR)
    now_ms = daemon.shard.clock.read().now_ms
    answer = await daemon.ask(peer, T.RESCHEDULE, None, {**KEY, "delay_ms": 5_000})
    assert answer == tuple((i, "scheduled", now_ms + 5_000) for i in ids)
    answer = await daemon.ask(peer, T.RESCHEDULE, None, {**KEY, "due_ms": now_ms + 9_000})
    assert answer == tuple((i, "scheduled", now_ms + 9_000) for i in ids)
    answer = await daemon.ask(peer, T.RUN_NOW, None, KEY)
    assert answer == tuple((i, "scheduled", now_ms) for i in ids)
    await daemon.settle()
    _, _, deliveries = await daemon.ask(peer, T.PULL, "t", None, 5, 0, None)
    assert [delivery[0] for delivery in deliveries] == list(ids)


async def test_lookup_by_key_returns_the_newest_first(daemon: InProcess, peer: Peer) -> None:
    (first,) = await enqueue(daemon, peer, FAR)
    then_ms = daemon.shard.clock.read().now_ms
    daemon.pass_time(50)
    (second,) = await enqueue(daemon, peer, FAR)

    async def found(options: dict[str, Any]) -> list[int]:
        return [row["id"] for row in await daemon.ask(peer, T.LOOKUP, None, KEY | options)]

    assert await found({}) == [second, first]
    assert await found({"newest": True}) == [second]
    assert await found({"newest": True, "until_ms": then_ms}) == [first]
    assert await found({"until_ms": then_ms - 1}) == []
    await daemon.ask(peer, T.CANCEL, (second, first))
    (ended,) = await daemon.ask(peer, T.LOOKUP, None, KEY)
    assert ended == {"id": second, "state": "cancelled"}
    assert await found({"until_ms": then_ms}) == []


async def test_two_callers_cancel_each_task_once(daemon: InProcess, peer: Peer) -> None:
    """One of them cancels each task; both meet what was confirmed before."""
    first, second = await enqueue(daemon, peer, FAR, FAR)
    other = daemon.connect()
    other.feed(encode((int(T.CANCEL), 5, None, KEY)))
    ((mine,),) = await daemon.send(peer, (T.CANCEL, None, KEY))
    (theirs,) = [frame[2] for frame in other.frames() if frame[:2] == (T.OK, 5)]
    assert theirs == ((first, "cancelled"), (second, "cancelled"))
    assert mine == ((second, "already_cancelled"),)


async def test_a_command_races_with_delivery_and_ack(daemon: InProcess, peer: Peer) -> None:
    """In frames of one read of the socket; and with tasks that are not confirmed yet."""
    await daemon.ask(peer, T.GROUP_CREATE, "t", "g", None)
    (due,) = await enqueue(daemon, peer, ("t", b"", 0, {"key": "k"}))
    epoch = daemon.shard.core.epoch
    _, _, deliveries = await daemon.ask(peer, T.PULL, "t", "g", 1, 0, None)
    assert [delivery[0] for delivery in deliveries] == [due]
    cancelled, acked, again, stored, last = await daemon.send(
        peer,
        (T.CANCEL, None, KEY),
        (T.ACK, "t", "g", epoch, (due,), (1,)),
        (T.CANCEL, None, KEY),
        (T.ENQUEUE, 0, (FAR,)),
        (T.CANCEL, None, KEY),
    )
    new = stored[0][1][0]
    # Whether an unconfirmed one is met is not promised; what is met has the word that is true.
    for words in (cancelled[0], again[0], last[0]):
        assert set(words) <= {
            (due, "in_flight"), (due, "acked"), (new, "cancelled"), (new, "already_cancelled"),
        }  # fmt: skip
    assert acked[0] is None
    words = await daemon.ask(peer, T.CANCEL, None, KEY)
    assert words in (((new, "cancelled"),), ((new, "already_cancelled"),))


@pytest.mark.parametrize(
    ("frame", "searches_max"),
    [
        ((T.LOOKUP, None, {**KEY, "until_ms": 0}), 2),
        ((T.LOOKUP, None, {**KEY, "newest": True}), 2),
        ((T.EXPLAIN, None, KEY), 2),
        ((T.LOOKUP, None, {"topic": "t", "key": "unknown"}), 5),
    ],
)
async def test_searches_for_keys_per_step_are_limited(
    daemon: InProcess,
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    frame: tuple[Any, ...],
    searches_max: int,
) -> None:
    await enqueue(daemon, peer, *[FAR] * 150)
    monkeypatch.setattr(reads, "IDS_PER_READ_MAX", 300)
    monkeypatch.setattr(reads, "COMMANDS_PER_READ_MAX", 5)
    steps, find = Counter[int](), KeyIndex.find

    def found(*args: Any) -> list[int]:
        steps[turns[0]] += 1
        return find(*args)

    with monkeypatch.context() as patch, counted_turns() as turns:
        patch.setattr(KeyIndex, "find", found)
        answers = await daemon.send(peer, *[frame] * 20)
    assert len(answers) == sum(steps.values()) == 20
    assert max(steps.values()) == searches_max


class Collides(KeyHash):
    """All keys of all topics have one hash."""

    def __call__(self, topic: str, key: str) -> int:
        return 7

    def of_many(self, topics: Sequence[str], keys: Sequence[str]) -> list[int]:
        return [7] * len(keys)


async def test_keys_with_colliding_hashes_are_distinct(daemon: InProcess, peer: Peer) -> None:
    daemon.shard.core.keys.hash = Collides(b"")
    mine, other, elsewhere = await enqueue(
        daemon, peer, FAR, ("t", b"", FAR_MS, {"key": "l"}), ("u", b"", FAR_MS, {"key": "k"})
    )
    (found,) = await daemon.ask(peer, T.LOOKUP, None, {**KEY, "newest": True})
    assert found["id"] == mine
    assert await daemon.ask(peer, T.CANCEL, None, KEY) == ((mine, "cancelled"),)
    words = [task["state"] for task in await daemon.ask(peer, T.LOOKUP, (other, elsewhere))]
    assert words == ["scheduled", "scheduled"]


@pytest.mark.parametrize("over", [0, 1])
async def test_tasks_of_a_key_command_are_limited(
    daemon: InProcess, peer: Peer, over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon.shard, "limits", Limits(key_tasks_max=3))
    ids = await enqueue(daemon, peer, *[FAR] * (3 + over))
    frames = (T.LOOKUP, None, KEY), (T.RUN_NOW, None, KEY), (T.CANCEL, None, KEY)
    for kind, *fields in frames:
        (answer,) = await daemon.send(peer, (kind, *fields))
        if over:
            assert answer[0] == "limit_exceeded"
            assert "4 tasks have this key; the limit is 3 (key_tasks_max)" in answer[1]
        else:
            assert len(answer[0]) == 3
    states = {task["state"] for task in await daemon.ask(peer, T.LOOKUP, ids)}
    assert states == ({"scheduled"} if over else {"cancelled"})


async def test_uncommitted_tasks_are_moved_by_a_shift(daemon: InProcess, peer: Peer) -> None:
    first, second = await enqueue(daemon, peer, FAR, ("t", b"", 2 * FAR_MS, {"key": "k"}))
    moved = await daemon.ask(peer, T.RESCHEDULE, None, {**KEY, "shift_ms": 500})
    now_ms = daemon.sources.now_ms
    assert moved == (
        (first, "scheduled", now_ms + FAR_MS + 500),
        (second, "scheduled", now_ms + 2 * FAR_MS + 500),
    )
    most_ms = daemon.shard.limits.delay_ms_max
    moved = await daemon.ask(
        peer, T.RESCHEDULE, (first, second), {"shift_ms": most_ms - FAR_MS - 500}
    )
    assert moved == ((first, "scheduled", now_ms + most_ms), (second, "due_too_far"))
    moved = await daemon.ask(peer, T.RESCHEDULE, (first,), {"shift_ms": -most_ms})
    assert moved == ((first, "scheduled", now_ms),)


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ((T.CANCEL, None, {"topic": "no topic", "key": "k"}), "bad_request"),
        ((T.CANCEL, None, {"topic": "t", "key": 7}), "bad_request"),
        ((T.CANCEL, None, KEY | {"key": "k" * 256}), "limit_exceeded"),
        ((T.CANCEL, None), "bad_request"),
        ((T.CANCEL, None, {"topic": "t"}), "bad_request"),
        ((T.RUN_NOW, (1,), KEY), "bad_request"),
        ((T.LOOKUP, (1,), {"topic": "t"}), "bad_request"),
        ((T.RESCHEDULE, None, KEY), "bad_request"),
        ((T.RESCHEDULE, None, {**KEY, "delay_ms": 1, "shift_ms": 1}), "bad_request"),
        ((T.RESCHEDULE, None, {**KEY, "delay_ms": -1}), "bad_request"),
        ((T.RESCHEDULE, None, {**KEY, "delay_ms": 2**50}), "due_too_far"),
        ((T.LOOKUP, None, {**KEY, "newest": 1}), "bad_request"),
        ((T.LOOKUP, None, {**KEY, "until_ms": "x"}), "bad_request"),
        ((T.LOOKUP, None, {**KEY, "limit": 1}), "bad_request"),
    ],
)
async def test_invalid_key_commands_are_refused(
    daemon: InProcess, peer: Peer, frame: tuple[Any, ...], code: str
) -> None:
    (answer,) = await daemon.send(peer, frame)
    assert answer[0] == code


async def test_a_lookup_over_the_answer_limit_can_ask_the_newest(
    daemon: InProcess, peer: Peer
) -> None:
    large = ("t", bytes(900_000), FAR_MS, {"key": "k"})
    ids = [(await enqueue(daemon, peer, large))[0] for _ in range(3)]
    (answer,) = await daemon.send(peer, (T.LOOKUP, None, KEY))
    assert answer[0] == "limit_exceeded" and "ask for the newest" in answer[1]
    largest = ("t", bytes(1 << 20), FAR_MS, {"key": "two"})
    for _ in range(2):
        await enqueue(daemon, peer, largest)
    (answer,) = await daemon.send(peer, (T.LOOKUP, None, KEY | {"key": "two"}))
    assert answer[0] == "limit_exceeded", "none of the two is left out"
    (found,) = await daemon.ask(peer, T.LOOKUP, None, {**KEY, "newest": True})
    assert found["id"] == ids[-1]


async def test_unfinished_tasks_of_a_key_are_found_after_a_restart(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as first:
        peer = first.connect()
        ids = await enqueue(first, peer, FAR, FAR, ("t", b"", FAR_MS, {"key": "l"}))
        await first.ask(peer, T.CANCEL, None, {"topic": "t", "key": "l"})
        await first.ask(peer, T.RESCHEDULE, None, {**KEY, "delay_ms": 5_000})
        store = first.store
    async with InProcess(tmp_path, store=store) as second:
        peer = second.connect()
        await second.settle()
        assert await second.ask(peer, T.CANCEL, None, {"topic": "t", "key": "l"}) == (
            (None, "unknown"),
        )
        answer = await second.ask(peer, T.CANCEL, None, KEY)
        assert answer == ((ids[0], "cancelled"), (ids[1], "cancelled"))
        second.recount()


@pytest.mark.parametrize("newest", [False, True])
async def test_a_key_is_listed_page_by_page(
    daemon: InProcess, peer: Peer, monkeypatch: pytest.MonkeyPatch, *, newest: bool
) -> None:
    """From the index, and from the store where more tasks have it than a command may name."""
    other = ("t", b"", FAR_MS, {"key": "l"})
    mine = (await enqueue(daemon, peer, *[FAR, other] * 5))[::2]
    expected = list(mine[::-1] if newest else mine)

    async def listed() -> list[int]:
        results: list[int] = []
        after = None
        for _ in range(20):
            asked = KEY | {"limit": 2, "after": after, "newest": newest}
            page = await daemon.ask(peer, T.LIST, asked)
            results += [task["id"] for task in page["tasks"]]
            after = page["next"]
            if after is None:
                return results
        raise AssertionError(results)

    assert await listed() == expected
    monkeypatch.setattr(daemon.shard, "limits", Limits(key_tasks_max=4))
    assert await listed() == expected
