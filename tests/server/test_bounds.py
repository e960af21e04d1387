"""Every limit of what a client can make grow: at it, and one above it. ``docs/limits.md`` lists
them with the tests that are here and elsewhere."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from support.shard_rig import Peer, ShardRig
from support.waiting import counted_turns
from tickwheel.api.daemon import BackupName, OfTask
from tickwheel.api.frames import PROTOCOL_VERSION
from tickwheel.api.frames import FrameType as T
from tickwheel.engine.state import MOVE_BYTES
from tickwheel.engine.topics import DELIVERY_BYTES, FRAME_HEAD_BYTES
from tickwheel.errors import Overloaded
from tickwheel.model.records import ID_STEP, TaskRow
from tickwheel.protocol import encode
from tickwheel.server import logs
from tickwheel.server.shard.callers import Call
from tickwheel.server.shard.groups import TOPICS_PER_STEP
from tickwheel.server.tcp import connection

DAY_MS = 86_400_000
Make = Callable[..., Coroutine[Any, Any, ShardRig]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[ShardRig] = []

    async def start(**settings: Any) -> ShardRig:
        made.append(await ShardRig(**settings).start())
        return made[-1]

    yield start
    for rig in made:
        await rig.stop()


def asking(rig: ShardRig, peer: Peer, number: int, request: Any) -> Call[Any]:
    return Call(peer.connection.caller, number, request, rig.shard.clock.read())


def ok(frame: Any) -> Any:
    assert frame[0] == T.OK, frame
    return frame[2]


def refused(frame: Any, code: str, *words: str) -> None:
    assert frame[0] == T.ERROR, frame
    assert frame[2] == code, frame
    for word in words:
        assert word in frame[3], frame


# --- one task ------------------------------------------------------------------------------------

TASK = 2_000
SIZES = {"body_bytes_max": 1_000, "task_bytes_max": TASK, "property_value_bytes_max": 100}


@pytest.mark.parametrize(
    ("task", "code", "limit"),
    [
        (lambda over: ("t", b"x" * (1_000 + over), DAY_MS), "body_too_large", "body_bytes_max"),
        (
            lambda over: ("t", b"", DAY_MS, {"properties": {"p": "v" * (100 + over)}}),
            "limit_exceeded",
            "property_value_bytes_max",
        ),
        (
            # An "é" takes two bytes.
            lambda over: ("t", b"", DAY_MS, {"properties": {"p": "é" * 49 + "v" * (2 + over)}}),
            "limit_exceeded",
            "property_value_bytes_max",
        ),
        (
            # 64 for the extras, 8 for a property, its name and its value.
            lambda over: (
                "t",
                b"x" * (1_000 + over),
                DAY_MS,
                {"properties": {f"{n:02}": "v" * 90 for n in range(9)} | {"last": "v" * 24}},
            ),
            "body_too_large",
            "body_bytes_max",
        ),
    ],
)
async def test_fields_of_a_task_have_size_limits(
    make: Make, task: Callable[[int], Any], code: str, limit: str
) -> None:
    rig = await make(**SIZES)
    peer = await rig.peer()
    ok(await peer.enqueue(task(0)))
    refused(await peer.enqueue(task(1)), code, limit)


async def test_total_size_of_a_task_is_limited(make: Make) -> None:
    rig = await make(**SIZES)
    peer = await rig.peer()
    # 64 for the extras; each property 8, its name and its text; what is left is the body.
    properties = {f"{n:02}": "v" * 90 for n in range(10)}
    body = b"x" * (TASK - 64 - 10 * (8 + 2 + 90))
    ok(await peer.enqueue(("t", body, DAY_MS, {"properties": properties})))
    answer = await peer.enqueue(("t", body + b"x", DAY_MS, {"properties": properties}))
    refused(answer, "limit_exceeded", "2001 bytes", "the limit is 2000 (task_bytes_max)")


async def test_tasks_of_a_frame_are_limited(make: Make) -> None:
    rig = await make(tasks_per_frame_max=5)
    peer = await rig.peer()
    ok(await peer.enqueue(*[("t", b"", DAY_MS)] * 5))
    refused(await peer.enqueue(*[("t", b"", DAY_MS)] * 6), "limit_exceeded", "the limit is 5")
    ok(await peer.call(T.CANCEL, [1] * 5))
    refused(await peer.call(T.CANCEL, [1] * 6), "limit_exceeded", "the limit is 5")


@pytest.mark.parametrize("pull", [False, True])
async def test_the_largest_task_fits_a_delivery_frame(make: Make, pull: bool) -> None:
    """The least that ``out_bytes_max`` may be for it; one byte less is refused at the start."""
    frame_max = 8_192
    task_max = frame_max - DELIVERY_BYTES - FRAME_HEAD_BYTES
    out_max = 8 * frame_max + 65_536 - 65_536 % 8
    rig = await make(frame_bytes_max=frame_max, out_bytes_max=out_max, body_bytes_max=frame_max)
    assert rig.shard.limits.task_bytes_max == task_max
    consumer, producer = await rig.peer(), await rig.peer()
    properties = {f"{n:02}": "v" * 4_000 for n in range(2)}
    ok(await consumer.call(T.GROUP_CREATE, "t", "g", None))
    for n in range(30):
        body = b"x" * (task_max - 64 - 2 * (8 + 2 + 4_000) - (n % 3))
        ok(await producer.enqueue(("t", body, 0, {"properties": properties})))
    seen = 0
    if not pull:
        ok(await consumer.call(T.SUBSCRIBE, 1, "t", "g", 100, None))
    while seen < 30:
        if pull:
            frame = await consumer.call(T.PULL, "t", "g", 100, 1_000, None)
            deliveries = ok(frame)[2]
            frames = [frame]
        else:
            await rig.settle(5)
            frames = [frame for frame in consumer.frames() if frame[0] == T.DELIVER]
            deliveries = [d for frame in frames for d in frame[4]]
        assert all(len(encode(frame)) <= frame_max for frame in frames)
        seen += len(deliveries)
    assert not consumer.transport.aborted


# --- consumers -----------------------------------------------------------------------------------


async def test_subscriptions_of_a_connection_are_limited(make: Make) -> None:
    rig = await make(subscriptions_max=3)
    peer = await rig.peer()
    for number in range(3):
        ok(await peer.call(T.SUBSCRIBE, number, "t", "g", 1, None))
    answer = await peer.call(T.SUBSCRIBE, 3, "t", "g", 1, None)
    refused(answer, "limit_exceeded", "the limit is 3 (subscriptions_max)")
    ok(await peer.call(T.UNSUBSCRIBE, 0))
    ok(await peer.call(T.SUBSCRIBE, 3, "t", "g", 1, None))


async def test_pulls_of_a_connection_are_limited(make: Make) -> None:
    rig = await make(pulls_max=3)
    peer, other = await rig.peer(), await rig.peer()
    ok(await other.call(T.GROUP_CREATE, "t", "g", None))
    first, *_ = [peer.send(T.PULL, "t", "g", 1, 60_000, None) for _ in range(3)]
    answer = await peer.call(T.PULL, "t", "g", 1, 60_000, None)
    refused(answer, "overloaded", "the limit is 3 (pulls_max)")
    # Whichever way one ends, another may wait.
    ok(await other.enqueue(("t", b"x", 0)))
    assert len(ok(await peer.answer(first))[2]) == 1
    again = peer.send(T.PULL, "t", "g", 1, 60_000, None)
    ok(await other.call(T.GROUP_DELETE, "t", "g", True))
    refused(await peer.answer(again), "not_found")
    assert peer.connection.caller.pulls == {}
    for _ in range(3):
        peer.send(T.PULL, "u", "g", 1, 60_000, None)
    await rig.settle()
    assert rig.core.subscribers == 3
    peer.lose()
    assert rig.core.subscribers == 0


async def test_finished_pulls_leave_no_state(make: Make) -> None:
    rig = await make()
    peer = await rig.peer()
    ok(await peer.call(T.GROUP_CREATE, "t", "g", None))
    for _ in range(300):
        ok(await peer.enqueue(("t", b"x", 0)))
        epoch, _, ((task_id, attempt, *_),) = ok(await peer.call(T.PULL, "t", "g", 1, 1_000, None))
        ok(await peer.call(T.ACK, "t", "g", epoch, [task_id], [attempt]))
    assert len(peer.connection.caller.ended_subscribers) <= 64
    assert not peer.connection.caller.pulls and not rig.core.in_flight and not rig.core.subscribers


async def test_subscribers_of_a_daemon_are_limited(make: Make) -> None:
    rig = await make(subscribers_max=3)
    one, two = await rig.peer(), await rig.peer()
    ok(await one.call(T.SUBSCRIBE, 1, "t", "g", 1, None))
    ok(await one.call(T.SUBSCRIBE, 2, "t", None, 1, {"broadcast": True}))
    waits = two.send(T.PULL, "t", "g", 1, 60_000, None)
    await rig.settle()
    limit = "the limit is 3 (subscribers_max)"
    refused(await two.call(T.SUBSCRIBE, 1, "t", "g", 1, None), "overloaded", limit)
    refused(await two.call(T.PULL, "t", "g", 1, 60_000, None), "overloaded", limit)
    ok(await one.call(T.UNSUBSCRIBE, 2))
    ok(await two.call(T.SUBSCRIBE, 1, "t", "g", 1, None))
    assert waits


@pytest.mark.parametrize(
    ("frame", "limit"),
    [
        (lambda n: (T.SUBSCRIBE, 1, "t", "g", n, None), "prefetch_max"),
        (lambda n: (T.PULL, "t", "g", n, 0, None), "pull_max"),
    ],
)
async def test_credit_of_a_subscriber_is_limited(
    make: Make, frame: Callable[[int], Any], limit: str
) -> None:
    rig = await make(**{limit: 7})
    peer = await rig.peer()
    refused(await peer.call(*frame(8)), "bad_request", "7", "8")
    ok(await peer.call(*frame(7)))


async def test_deliveries_in_flight_are_limited(make: Make) -> None:
    rig = await make(in_flight_max=5)
    peer = await rig.peer()
    ok(await peer.call(T.SUBSCRIBE, 1, "t", "g", 100, None))
    ok(await peer.enqueue(*[("t", b"x", 0)] * 8))
    await rig.settle()
    (frame,) = [frame for frame in peer.frames() if frame[0] == T.DELIVER]
    assert len(frame[4]) == rig.core.in_flight == 5
    ids = [delivery[0] for delivery in frame[4]]
    ok(await peer.call(T.ACK, "t", "g", frame[2], ids, [1] * 5))
    await rig.settle()
    assert rig.core.in_flight == 3


async def test_acks_ahead_of_the_store_are_limited(make: Make) -> None:
    rig = await make(acks_ahead_max=3)
    peer = await rig.peer()
    ok(await peer.call(T.SUBSCRIBE, 1, "t", "g", 2, None))
    ok(await peer.enqueue(*[("t", b"x", 0)] * 9))
    await rig.settle()
    rig.store.stall()
    acked: list[int] = []
    while frames := [frame for frame in peer.frames() if frame[0] == T.DELIVER]:
        for _, _, epoch, _, deliveries in frames:
            for task_id, *_ in deliveries:
                peer.send(T.ACK, "t", "g", epoch, [task_id], [1])
                acked.append(task_id)
        await rig.settle()
    # The first two, the three that acks made room for, and no more.
    assert len(acked) == 5
    rig.store.go_on()
    await rig.settle()
    assert rig.core.in_flight == 2


# --- tasks and what has names --------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["tasks_max", "scheduled_max"])
async def test_tasks_are_limited_including_uncommitted(make: Make, limit: str) -> None:
    rig = await make(**{limit: 5})
    peer = await rig.peer()
    ids = list(ok(await peer.enqueue(*[("t", b"x", DAY_MS)] * 2))[1])
    rig.store.stall()
    first = peer.send(T.ENQUEUE, 1, [("t", b"x", DAY_MS)])
    await rig.settle()
    second = peer.send(T.ENQUEUE, 1, [("t", b"x", DAY_MS)])
    full = await peer.enqueue(*[("t", b"x", DAY_MS)] * 2)
    refused(full, "backlog_full", f"exceed the limit 5 ({limit})")
    # Frames of one task each are taken by another way.
    numbers = range(peer.request + 1, peer.request + 4)
    peer.request += 3
    peer.feed(b"".join(encode((2, n, 1, [("t", b"x", DAY_MS)])) for n in numbers))
    third, *others = numbers
    for number in others:
        refused(await peer.answer(number), "backlog_full", f"exceed the limit 5 ({limit})")
    rig.store.go_on()
    for number in (first, second, third):
        ids += ok(await peer.answer(number))[1]
    assert (rig.core.tasks, rig.core.room) == (5, 0)
    ok(await peer.call(T.CANCEL, ids[:1]))
    ok(await peer.enqueue(("t", b"x", DAY_MS)))


async def test_backlog_of_a_topic_without_groups_is_limited(make: Make) -> None:
    rig = await make(backlog_max=3)
    peer = await rig.peer()
    ok(await peer.enqueue(*[("t", b"x", 0)] * 3))
    await rig.until(lambda: rig.core.full_topics)
    refused(await peer.enqueue(("t", b"x", 0)), "backlog_full", "backlog_max")
    ok(await peer.enqueue(("other", b"x", 0)))
    every = {"topic": "t", "body": b"", "every_ms": 60_000}
    ok(await peer.call(T.SCHEDULE_PUT, "s", every))
    for verb, fields in (("run", {}), ("backfill", {"from_ms": 0, "to_ms": 3_600_000})):
        answer = await peer.call(T.SCHEDULE, "s", verb, fields)
        refused(answer, "backlog_full", "backlog_max")


async def test_topics_are_limited(make: Make) -> None:
    rig = await make(topics_max=3)
    peer = await rig.peer()
    ids = ok(await peer.enqueue(*[(f"t{n}", b"x", DAY_MS) for n in range(3)]))[1]
    limit = "the limit is 3 (topics_max)"
    refused(await peer.enqueue(("t3", b"x", DAY_MS)), "limit_exceeded", "t3", limit)
    refused(await peer.call(T.SUBSCRIBE, 1, "t3", "g", 1, None), "limit_exceeded", limit)
    refused(await peer.call(T.CONFIGURE, "t3", None, {}), "limit_exceeded", limit)
    ok(await peer.call(T.CANCEL, ids[:2]))
    # Two have room in a frame, a third has not: none of them is made.
    three = [("t1", b"x", DAY_MS)] + [(f"u{n}", b"x", DAY_MS) for n in range(3)]
    refused(await peer.enqueue(*three), "limit_exceeded", limit)
    ok(await peer.enqueue(*[(f"t{n}", b"x", DAY_MS) for n in (3, 4)]))
    assert rig.core.topics.keys() == {"t2", "t3", "t4"}
    stats = ok(await peer.call(T.STATS))
    assert (stats["enqueued"], stats["cancelled"], stats["scheduled"]) == (5, 2, 3)
    assert stats["topics"].keys() == {"t2", "t3", "t4"}


async def test_new_topics_count_before_their_tasks_are_durable(make: Make) -> None:
    rig = await make(topics_max=3)
    peer = await rig.peer()
    rig.store.stall()
    for n in range(3):
        peer.send(T.ENQUEUE, 1, [(f"t{n}", b"x", DAY_MS)])
    answer = await peer.enqueue(("t3", b"x", DAY_MS))
    refused(answer, "limit_exceeded", "the limit is 3 (topics_max)")


async def test_topics_come_and_go_without_end(make: Make) -> None:
    rig = await make(topics_max=10)
    peer = await rig.peer()
    for n in range(100):
        (task_id,) = ok(await peer.enqueue((f"order.{n}", b"", DAY_MS)))[1]
        ok(await peer.call(T.CANCEL, [task_id]))
        if n % 10 == 0:
            ok(await peer.call(T.GROUP_CREATE, f"group.{n}", "g", None))
            ok(await peer.call(T.GROUP_DELETE, f"group.{n}", "g", True))
    assert len(rig.core.topics) <= 10


async def test_groups_are_limited_per_topic_and_in_total(make: Make) -> None:
    rig = await make(groups_per_topic_max=2, groups_max=3)
    peer = await rig.peer()
    for group in ("a", "b"):
        ok(await peer.call(T.GROUP_CREATE, "t", group, None))
    answer = await peer.call(T.GROUP_CREATE, "t", "c", None)
    refused(answer, "limit_exceeded", "the limit is 2 (groups_per_topic_max)")
    ok(await peer.call(T.SUBSCRIBE, 1, "u", "a", 1, None))
    limit = "the limit is 3 (groups_max)"
    refused(await peer.call(T.SUBSCRIBE, 2, "u", "b", 1, None), "limit_exceeded", limit)
    refused(await peer.call(T.PULL, "v", None, 1, 0, None), "limit_exceeded", limit)
    ok(await peer.call(T.GROUP_DELETE, "t", "a", True))
    ok(await peer.call(T.GROUP_CREATE, "v", "a", None))


# --- producers' sessions -------------------------------------------------------------------------


async def test_requests_of_a_session_are_limited_by_the_window(make: Make) -> None:
    rig = await make(window_max=3)
    peer = await rig.peer()
    for number in range(2, 5):
        ok(await peer.call(T.ENQUEUE, 2, [("t", b"x", DAY_MS)]))
        assert peer.request == number
    limit = "the limit is 3 (window_max)"
    refused(await peer.call(T.ENQUEUE, 2, [("t", b"x", DAY_MS)]), "window_full", limit)
    ok(await peer.call(T.ENQUEUE, 3, [("t", b"x", DAY_MS)]))


@pytest.mark.parametrize("rule", [None, "keep", "replace", "reject"])
async def test_requests_in_one_read_count_towards_the_window(make: Make, rule: str | None) -> None:
    """Those that are not decided of yet count like those that were answered, and like those that
    came before."""
    rig = await make(window_max=5)
    peer, other = await rig.peer(), await rig.peer()
    ok(await other.enqueue(*[("t", b"", DAY_MS, {"key": f"k{n}"}) for n in range(9)]))
    floor = peer.request + 1
    ok(await peer.call(T.ENQUEUE, floor, [("t", b"", DAY_MS)]))
    options = {} if rule is None else {"if_pending": rule}
    numbers = range(floor + 1, floor + 8)
    peer.request = numbers[-1]
    peer.feed(
        b"".join(
            encode((int(T.ENQUEUE), n, floor, (("t", b"", DAY_MS, {"key": f"k{i}", **options}),)))
            for i, n in enumerate(numbers)
        )
    )
    answers = [await peer.answer(number) for number in numbers]
    for answer in answers[:4]:
        ok(answer)
    for answer in answers[4:]:
        refused(answer, "window_full", "the limit is 5 (window_max)")
    (session,) = (item for item in rig.core.sessions if item.request_count > 1)
    assert session.request_count == len(session.answers) == 5
    ok(await peer.call(T.ENQUEUE, floor + 1, [("t", b"", DAY_MS, {"key": "k0", **options})]))


async def test_sessions_are_limited(make: Make) -> None:
    rig = await make(sessions_max=2)
    for _ in range(2):
        ok(await (await rig.peer()).enqueue(("t", b"x", DAY_MS)))
    stranger = rig.stranger()
    refused(await stranger.hello(), "too_many_sessions", "the limit is 2 (sessions_max)")
    ok(await rig.stranger().hello(session=None))


async def test_a_clock_set_back_keeps_no_idle_session(make: Make) -> None:
    rig = await make(sessions_max=1)
    idle = await rig.peer()
    ok(await idle.enqueue(("t", b"x", DAY_MS)))
    idle.lose()
    rig.sources.ahead_ms = -DAY_MS
    rig.pass_time(59_000)
    refused(await rig.stranger().hello(), "too_many_sessions")
    rig.pass_time(2_000)
    ok(await rig.stranger().hello())


@pytest.mark.parametrize("rule", [None, "keep"])
async def test_remembered_outcomes_per_session_are_limited(make: Make, rule: str | None) -> None:
    """Each task with a rule counts."""
    rig = await make(outcomes_per_session_max=4)
    peer, other = await rig.peer(), await rig.peer()
    options = {} if rule is None else {"key": "k", "if_pending": rule}
    task = ("t", b"x", DAY_MS, options)
    floor = peer.request + 1
    if rule is None:
        for _ in range(4):
            ok(await peer.call(T.ENQUEUE, floor, [task]))
    else:
        ok(await peer.call(T.ENQUEUE, floor, [task] * 3))
        refused(
            await peer.call(T.ENQUEUE, floor, [task] * 2), "overloaded",
            "3 answers of this session are remembered for resends; 2 more would exceed the limit 4"
            " (outcomes_per_session_max)",
        )  # fmt: skip
        ok(await peer.call(T.ENQUEUE, floor, [task]))
    limit = "1 more would exceed the limit 4 (outcomes_per_session_max)"
    refused(await peer.call(T.ENQUEUE, floor, [task]), "overloaded", limit)
    refused(await peer.call(T.ENQUEUE, floor, [("t", b"x", DAY_MS)]), "overloaded", limit)
    ok(await other.enqueue(task))
    ok(await peer.enqueue(task))  # it has seen the others


async def test_remembered_outcomes_of_all_sessions_are_limited(make: Make) -> None:
    rig = await make(session_outcomes_max=4)
    idle, busy = await rig.peer(), await rig.peer()
    for _ in range(2):
        ok(await idle.call(T.ENQUEUE, 1, [("t", b"x", DAY_MS)]))
        ok(await busy.call(T.ENQUEUE, 1, [("t", b"x", DAY_MS)]))
    limit = "the limit is 4 (session_outcomes_max)"
    refused(await busy.call(T.ENQUEUE, 1, [("t", b"x", DAY_MS)]), "overloaded", limit)
    assert rig.core.sessions.answer_count == 4
    # The client has its answers: what it says so of is forgotten.
    floor = busy.request + 1
    for _ in range(2):
        ok(await busy.call(T.ENQUEUE, floor, [("t", b"x", DAY_MS)]))
    refused(await busy.call(T.ENQUEUE, floor, [("t", b"x", DAY_MS)]), "overloaded", limit)
    # One that nobody has used for a minute makes room, also if the clock is set back.
    idle.lose()
    rig.sources.ahead_ms = -DAY_MS
    rig.pass_time(61_000)
    session = rig.core.sessions.get(busy.connection.caller.session.key)
    assert session is not None
    session.use(*rig.shard.clock.read())
    ok(await busy.call(T.ENQUEUE, floor, [("t", b"x", DAY_MS)]))
    assert len(rig.core.sessions) == 1
    # Without a session nothing is remembered.
    other = await rig.peer(session=None)
    for _ in range(5):
        ok(await other.enqueue(("t", b"x", DAY_MS)))


# --- what waits for the store --------------------------------------------------------------------


async def test_uncommitted_enqueues_are_limited_by_bytes(make: Make) -> None:
    """A task counts with its extras, and 250 bytes."""
    rig = await make(staged_bytes_max=4 * (250 + 64 + 8 + 1 + 1_000), outcome_timeout_s=60)
    peer = await rig.peer()
    rig.store.stall()
    task = ("t", b"", DAY_MS, {"properties": {"p": "v" * 1_000}})
    taken = [peer.send(T.ENQUEUE, 1, [task]) for _ in range(4)]
    refused(await peer.enqueue(("t", b"", DAY_MS)), "overloaded", "(staged_bytes_max)")
    rig.store.go_on()
    for number in taken:
        ok(await peer.answer(number))
    ok(await peer.enqueue(task))


async def test_uncommitted_answers_of_a_connection_are_limited(make: Make) -> None:
    rig = await make(replies_bytes_max=1_600)
    busy, other = await rig.peer(), await rig.peer()
    rig.store.stall()
    ok_at_once = other.send(T.PING)
    blob = b"".join(encode((T.CONFIGURE, n, "t", None, {"rate": float(n)})) for n in range(2, 102))
    busy.request = 102
    busy.feed(blob)
    await rig.settle()
    waiting = len(rig.core.open.replies) + len(rig.core.sealed.replies if rig.core.sealed else ())
    assert waiting <= 1_600 // 150 + 1
    assert not busy.transport.reading
    ok(await other.answer(ok_at_once))
    later = other.send(T.CONFIGURE, "u", None, {"rate": 1.0})
    rig.store.go_on()
    for number in range(2, 102):
        ok(await busy.answer(number))
    ok(await other.answer(later))
    assert busy.transport.reading and rig.held == {}
    assert rig.shard.committer.replies_bytes == 0


async def test_uncommitted_answers_of_all_connections_are_limited(make: Make) -> None:
    rig = await make(replies_all_bytes_max=1_600)
    peers = [await rig.peer() for _ in range(30)]
    rig.store.stall()
    numbers = [peer.send(T.CONFIGURE, f"t{n}", None, {"rate": 1.0}) for n, peer in enumerate(peers)]
    await rig.settle()
    assert 1_600 <= rig.shard.committer.replies_bytes <= 2_000
    assert len(rig.held) >= 30 - 2_000 // 150
    rig.store.go_on()
    for number, peer in zip(numbers, peers, strict=True):
        ok(await peer.answer(number))
    assert rig.held == {}


async def test_a_held_connection_that_breaks_leaves_no_state(make: Make) -> None:
    rig = await make(replies_bytes_max=200)
    peer = await rig.peer()
    rig.store.stall()
    for n in range(10):
        peer.send(T.CONFIGURE, f"t{n}", None, {"rate": 1.0})
    await rig.settle()
    assert rig.held
    peer.lose()
    assert rig.held == {}
    rig.store.go_on()
    await rig.settle()
    assert len(rig.core.topics) < 10


@pytest.mark.parametrize(
    ("task", "limit"),
    [
        pytest.param(("t", b"x" * 10, DAY_MS), 40 * MOVE_BYTES, id="due times"),
        pytest.param(("t", b"x" * 10_000, DAY_MS, {"tag": "x"}), 300_000, id="rows"),
    ],
)
async def test_uncommitted_changes_are_limited_by_bytes(
    make: Make, task: tuple[Any, ...], limit: int
) -> None:
    """One that is written whole waits with its body."""
    rig = await make(staged_bytes_max=limit)
    peer = await rig.peer()
    ids: list[int] = []
    for _ in range(4):
        ids += ok(await peer.enqueue(*[task] * 20))[1]
    rig.store.stall()

    def move(some: list[int]) -> int:
        return peer.send(T.RESCHEDULE, some, {"delay_ms": 2 * DAY_MS})

    numbers = [move(ids[:20])]
    await rig.settle()
    numbers.append(move(ids[20:40]))
    await rig.settle()

    def waiting() -> int:
        batches = [batch for batch in (rig.core.open, rig.core.sealed) if batch is not None]
        return sum(len(batch.effects.updated) + len(batch.effects.moved) for batch in batches)

    assert waiting() == 40
    numbers.append(move(ids[40:]))
    await rig.settle()
    assert waiting() == 40, "no room for more"
    rig.store.go_on()
    for number in numbers:
        assert all(row[1] == "scheduled" for row in ok(await peer.answer(number)))


# --- what reads ----------------------------------------------------------------------------------


async def test_waiting_commands_and_their_ids_are_limited(make: Make) -> None:
    rig = await make(commands_max=3, command_ids_max=10)
    peer = await rig.peer()
    # One frame after the other, before the loop has a turn.
    numbers = [peer.send(T.CANCEL, [n + 1]) for n in range(4)]
    answers = [await peer.answer(number) for number in numbers]
    for answer in answers[:3]:
        ok(answer)
    refused(answers[3], "overloaded", "the limit is 3 (commands_max)")
    taken, over = peer.send(T.CANCEL, list(range(1, 11))), peer.send(T.CANCEL, [11])
    assert len(ok(await peer.answer(taken))) == 10
    refused(await peer.answer(over), "overloaded", "exceed the limit 10 (command_ids_max)")


async def test_enqueues_waiting_for_coalescing_are_limited(make: Make) -> None:
    rig = await make(commands_max=3, staged_bytes_max=10_000)
    peer = await rig.peer()

    def ruled(body: bytes = b"") -> Any:
        return ("t", body, DAY_MS, {"key": "k", "if_pending": "replace"})

    ok(await peer.enqueue(ruled()))
    # One frame after the other, before the loop has a turn.
    numbers = [peer.send(T.ENQUEUE, 0, (ruled(),)) for _ in range(4)]
    answers = [await peer.answer(number) for number in numbers]
    for answer in answers[:3]:
        assert ok(answer)[2]["outcomes"][0][0] == "replaced"
    refused(answers[3], "overloaded", "3 enqueues wait", "the limit is 3 (commands_max)")
    large, over = (peer.send(T.ENQUEUE, 0, (ruled(b"x" * n),)) for n in (10_000, 1))
    ok(await peer.answer(large))
    refused(await peer.answer(over), "overloaded", "the limit is 10000 (staged_bytes_max)")
    assert rig.engine.intake.inflight_bytes == 0


MIB = 1 << 20


async def test_a_command_on_large_tasks_reads_them_in_parts(make: Make) -> None:
    rig = await make()
    peer = await rig.peer()
    ids: list[int] = []
    for _ in range(20):
        ids += ok(await peer.enqueue(*[("t", bytes(MIB), DAY_MS)] * 3))[1]
    rig.store.reads.clear()
    lookup = await peer.call(T.LOOKUP, ids)
    refused(lookup, "limit_exceeded", "60 ids", "half of frame_bytes_max")
    assert sum(rig.store.reads) <= 17 * MIB, "it stops when it is too much"
    assert len(ok(await peer.call(T.LOOKUP, ids[:1]))) == 1
    rig.store.reads.clear()
    asked = [peer.send(T.CANCEL, ids[:40]), peer.send(T.CANCEL, ids[30:] + ids[:1])]
    words = [[row[1] for row in ok(await peer.answer(number))] for number in asked]
    assert words[0] == ["cancelled"] * 40
    assert words[1] == ["already_cancelled"] * 10 + ["cancelled"] * 20 + ["already_cancelled"]
    assert max(rig.store.reads) <= 17 * MIB
    assert rig.core.tasks == 0


async def test_a_lookup_is_limited_by_bytes(make: Make) -> None:
    rig = await make(frame_bytes_max=20_000, body_bytes_max=9_000)
    peer = await rig.peer()
    (task_id,) = ok(await peer.enqueue(("t", b"x" * 9_000, DAY_MS)))[1]
    size = len(encode(ok(await peer.call(T.LOOKUP, [task_id]))[0]))
    room = 10_000 - size - len(encode({"id": 1, "state": "unknown"}))
    (other,) = ok(await peer.enqueue(("t", b"", DAY_MS)))[1]
    small = len(encode(ok(await peer.call(T.LOOKUP, [other]))[0]))
    extra = 10_000 - size - small
    assert room > 0 and extra > 0
    for over in (0, 1):
        (third,) = ok(await peer.enqueue(("t", b"y" * (extra + over), DAY_MS)))[1]
        answer = await peer.call(T.LOOKUP, [task_id, third])
        # A body of 256 bytes has a header of one byte more.
        header = len(encode(b"y" * (extra + over))) - extra - over - len(encode(b""))
        if size + small + extra + over + header <= 10_000:
            ok(answer)
        else:
            refused(answer, "limit_exceeded", "10000")


async def test_a_page_ends_when_its_bytes_are_used_up(make: Make) -> None:
    rig = await make(frame_bytes_max=40_000, body_bytes_max=9_000)
    peer = await rig.peer()
    for size in (9_000, 9_000, 5, 9_000, 5):
        ok(await peer.enqueue(("t", b"x" * size, DAY_MS)))
    pages, after = [], 0
    while after is not None:
        frame = await peer.call(T.LIST, {"after": after})
        page = ok(frame)
        assert len(encode(frame)) <= 20_000 + 100
        pages.append([len(task["body"]) for task in page["tasks"]])
        after = page["next"]
    assert pages == [[9_000, 9_000, 5], [9_000, 5]]


async def test_a_page_of_dead_letters_ends_when_its_bytes_are_used_up(make: Make) -> None:
    rig = await make(frame_bytes_max=4_096)
    peer = await rig.peer()
    ok(await peer.call(T.SUBSCRIBE, 1, "t", "g", 100, None))
    ok(await peer.enqueue(*[("t", b"x", 0)] * 20))
    await rig.settle()
    for frame in [frame for frame in peer.frames() if frame[0] == T.DELIVER]:
        for delivery in frame[4]:
            item = (delivery[0], frame[2], delivery[1], "r" * 200)
            ok(await peer.call(T.REJECT, "t", "g", [item]))
    after, found = None, 0
    while True:
        frame = await peer.call(T.DEAD_LIST, {} if after is None else {"after": after})
        assert len(encode(frame)) <= 2_048 + 100
        found += len(ok(frame)["dead"])
        after = ok(frame)["next"]
        if after is None:
            break
    assert found == 20


async def test_listings_of_a_connection_are_limited(make: Make) -> None:
    rig = await make(listings_max=3, listings_all_max=100)
    peer, other = await rig.peer(), await rig.peer()
    ok(await peer.enqueue(("t", b"x", DAY_MS)))
    numbers = [peer.send(T.LIST, {}) for _ in range(4)]
    elsewhere = other.send(T.DEAD_LIST, {})
    for number in numbers[:3]:
        assert len(ok(await peer.answer(number))["tasks"]) == 1
    refused(await peer.answer(numbers[3]), "overloaded", "the limit is 3 (listings_max)")
    ok(await other.answer(elsewhere))
    assert rig.shard.listings.count == 0
    ok(await peer.call(T.LIST, {}))


async def test_listings_of_all_connections_take_turns(make: Make) -> None:
    rig = await make(listings_max=100, listings_all_max=12)
    greedy, modest = await rig.peer(), await rig.peer()
    ok(await greedy.enqueue(("t", b"x", DAY_MS)))
    asked = [greedy.send(T.LIST, {}) for _ in range(11)]
    once = modest.send(T.LIST, {})
    refused(await modest.call(T.LIST, {}), "overloaded", "the limit is 12 (listings_all_max)")
    ok(await modest.answer(once))
    answered = len(greedy.frames())
    assert answered <= 3, "it did not have to wait for the other's"
    greedy.lose()
    await rig.until(lambda: rig.shard.listings.count == 0)
    assert asked


async def test_a_connection_that_does_not_read_gets_no_turn(make: Make) -> None:
    rig = await make(frame_bytes_max=100_000, out_bytes_soft=1_000, body_bytes_max=60_000)
    peer, other = await rig.peer(), await rig.peer()
    ok(await peer.enqueue(("t", b"x" * 40_000, DAY_MS)))
    peer.transport.stuck = True
    for _ in range(10):
        peer.send(T.LIST, {})
    ok(await other.call(T.LIST, {}))
    await rig.settle()
    assert len(peer.transport.out) < 100_000, "one answer, or two"
    assert rig.shard.listings.count >= 8
    peer.transport.stuck = False
    for _ in range(200):
        peer.transport.read()
        await asyncio.sleep(0)
    assert rig.shard.listings.count == 0


async def test_a_backup_waits_until_its_caller_reads(make: Make) -> None:
    rig = await make(out_bytes_soft=1_000)
    peer = await rig.peer()
    peer.transport.stuck = True
    while not peer.connection.paused:
        peer.send(T.STATS)
    rig.operations.verbs.backup(asking(rig, peer, 999, BackupName(name="a.db")))
    await rig.settle()
    assert rig.shard.backups.count == 1
    peer.transport.stuck = False
    assert ok(await peer.answer(999))["path"].endswith("a.db")


async def test_waiting_backups_are_limited(make: Make, tmp_path: Any) -> None:
    rig = await make(backups_max=2)
    rig.shard.backup_folder = tmp_path
    peer, other = await rig.peer(), await rig.peer()
    ok(await peer.enqueue(("t", b"x", DAY_MS)))
    rig.store.stall()
    peer.send(T.CONFIGURE, "t", None, {"rate": 1.0})
    await rig.settle()
    first, second = peer.send(T.BACKUP, "a.db"), other.send(T.BACKUP, "b.db")
    refused(await other.call(T.BACKUP, "c.db"), "overloaded", "the limit is 2 (backups_max)")
    ok(await other.call(T.PING))
    rig.store.go_on()
    assert ok(await peer.answer(first))["path"].endswith("a.db")
    assert ok(await other.answer(second))["path"].endswith("b.db")


async def test_waiting_history_lookups_are_limited(make: Make, tmp_path: Any) -> None:
    rig = await make(history_lookups_max=2, history_dir=str(tmp_path))
    peer, others = await rig.peer(), [await rig.peer() for _ in range(2)]
    gate, asked = asyncio.Event(), list[int]()

    async def look_up(task_id: int) -> tuple[list[Any], bool]:
        asked.append(task_id)
        await gate.wait()
        return [], True

    rig.shard.stories.of = look_up  # type: ignore[method-assign]  # it never comes to a process
    for number, one in enumerate(others):
        rig.operations.verbs.task_history(asking(rig, one, 900, OfTask(id=number)))
    await rig.settle()
    assert asked == [0], "one at a time"
    with pytest.raises(Overloaded, match=r"the limit is 2 \(history_lookups_max\)"):
        rig.operations.verbs.task_history(asking(rig, peer, 901, OfTask(id=7)))
    ok(await peer.call(T.PING))
    gate.set()
    for one in others:
        assert ok(await one.answer(900)) == {"events": (), "is_kept": True, "complete": True}


# --- answers and requests on the wire ------------------------------------------------------------


async def test_requests_of_a_connection_that_does_not_read_wait(make: Make) -> None:
    rig = await make(out_bytes_soft=65_536, out_bytes_max=9_000_000)
    peer = await rig.peer()
    (task_id,) = ok(await peer.enqueue(("t", b"x" * 30_000, DAY_MS)))[1]
    peer.transport.stuck = True
    # Answers of 30,000 bytes to requests of 20, in one piece.
    blob = b"".join(encode((T.LOOKUP, n, [task_id])) for n in range(100, 1_100))
    peer.feed(blob)
    for _ in range(20):
        peer.send(T.STATS)
    await rig.settle(500)
    assert not peer.transport.aborted or len(peer.transport.out) <= 9_000_000 + 65_536
    assert not peer.transport.reading


async def test_unfinished_frames_of_all_connections_are_limited(make: Make) -> None:
    rig = await make(unread_bytes_max=10_000)
    peers = [await rig.peer() for _ in range(3)]
    half = encode((T.ENQUEUE, 9, 9, [("t", b"x" * 8_000, 0)]))[:5_000]
    peers[0].feed(half)
    peers[1].feed(half)
    assert rig.unread_bytes == 10_000
    assert [peer.frames() for peer in peers] == [[], [], []]
    peers[2].feed(half[:1])
    (frame,) = peers[2].frames()
    refused(frame, "overloaded", "the limit is 10000 (unread_bytes_max)")
    await rig.settle()
    assert peers[2].transport.closed
    assert rig.unread_bytes == 10_000
    peers[0].lose()
    assert rig.unread_bytes == 5_000


async def test_a_connection_over_the_limit_is_refused_at_once(make: Make) -> None:
    """One connection too many is refused at once, also while the store stands still."""
    rig = await make(connections_max=2)
    peer, _ = await rig.peer(), await rig.peer()
    rig.store.stall()
    peer.send(T.CONFIGURE, "t", None, {"rate": 1.0})
    await rig.settle()
    for _ in range(3):
        stranger = rig.stranger()
        (frame,) = stranger.frames()
        refused(frame, "too_many_connections", "the limit is 2 (connections_max)")
        assert stranger.transport.closed
    assert len(rig.core.open.replies) + len(rig.core.sealed.replies if rig.core.sealed else ()) == 1


async def test_many_unauthenticated_connections_shorten_the_hello_timeout(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make()
    monkeypatch.setattr(connection, "STRANGERS_MAX", 2)
    monkeypatch.setattr(connection, "CROWDED_TIMEOUT_S", 0.0)
    first, second = rig.stranger(), rig.stranger()
    third = rig.stranger()
    await rig.until(lambda: third.closed)
    refused(third.frames()[0], "hello_required", "2 other connections had not sent HELLO")
    assert not first.closed and not second.closed
    ok(await first.hello())
    fourth = rig.stranger()
    second.lose()
    await rig.settle()
    assert not fourth.closed  # whoever was let in, or has left, is no stranger


async def test_an_unauthenticated_connection_costs_few_bytes(make: Make) -> None:
    rig = await make()
    await rig.peer()
    tracemalloc.start()
    try:
        strangers = [rig.stranger() for _ in range(200)]
        each = tracemalloc.get_traced_memory()[0] / len(strangers)
    finally:
        tracemalloc.stop()
    assert each < 8_192


async def test_log_lines_of_unauthenticated_connections_are_limited(make: Make) -> None:
    """And so have those that were let in, whose lines no stranger takes."""
    rig = await make(serve_token="right")

    async def ended(begin: Callable[[], Awaitable[Peer]], text: str) -> list[str]:
        before = len(rig.notices)
        for _ in range(logs.LINES_MAX + 5):
            peer = await begin()
            peer.connection.data_received(b"\xc1")
            await rig.until(partial(getattr, peer, "closed"))
        results = [said for event, said in rig.notices[before:] if event == "connection_closed"]
        assert len(results) == logs.LINES_MAX and all(text in said for said in results)
        assert results[-1].endswith("; further events are only counted")
        return results

    async def stranger() -> Peer:
        return rig.stranger()

    await ended(stranger, "the bytes are not valid msgpack")
    (wrong := rig.stranger()).send(T.HELLO, {"v": PROTOCOL_VERSION, "token": "wrong"})
    await rig.until(lambda: wrong.closed)
    assert "wrong" not in rig.notices[-1][1]
    await ended(lambda: rig.peer(token="right"), "the bytes are not valid msgpack")
    rig.pass_time(int(logs.LINES_S * 1000))
    rig.stranger().connection.data_received(b"\xc1")
    assert rig.notices[-1][1].endswith(
        "the bytes are not valid msgpack; 6 more like it were not logged"
    )


async def test_stats_of_many_topics_are_paged(make: Make) -> None:
    rig = await make(out_bytes_max=9_000_000, out_bytes_soft=1_000_000)
    object.__setattr__(rig.settings, "out_bytes_soft", 1_000_000 - 1)
    object.__setattr__(rig.settings, "out_bytes_max", 2_000_000)
    peer = await rig.peer()
    for n in range(4_000):
        rig.core.topic(f"topic.{n}").enqueued = 1
    frame = await peer.call(T.STATS)
    stats = ok(frame)
    assert 500_000 - 5_000 < len(encode(frame)) <= 500_000 + 2_000
    assert stats["topics_left_out"] + len(stats["topics"]) == 4_000
    assert stats["topics_left_out"] > 0
    object.__setattr__(rig.settings, "out_bytes_max", 9_000_000)
    assert ok(await peer.call(T.STATS))["topics_left_out"] == 0


@pytest.mark.parametrize("frame", [(T.STATS,), (T.OVERVIEW,), (T.TOPIC_LIST, {})])
async def test_topics_and_groups_are_visited_in_steps(make: Make, frame: tuple[Any, ...]) -> None:
    rig = await make()
    peer = await rig.peer()
    for n in range(50):
        for name in range(31):
            topic = rig.core.topic(f"topic.{n}")
            rig.engine.grouping.group(topic, f"g{name}", rig.sources.now_ms)
    with counted_turns() as turns:
        answer = ok(await peer.call(*frame))
    assert turns[0] >= 50 * 32 // TOPICS_PER_STEP
    if frame[0] != T.OVERVIEW:
        assert len(answer["topics"]) == 50


async def test_oversized_tasks_of_an_older_store_are_delivered_alone(make: Make) -> None:
    rig = await make()
    peer = await rig.peer()
    ok(await peer.call(T.GROUP_CREATE, "t", "g", None))
    options = {"properties": {"p": "v" * 4_000}}
    (small,) = ok(await peer.enqueue(("t", b"", 0, options)))[1]
    row = rig.core.resident_rows[small]
    assert row.options is not None
    for n in range(1, 4):
        large = TaskRow(small + n * ID_STEP, row.due_ms, "t", b"", row.options._replace(
            properties={"p": "v" * 3_000_000}))  # fmt: skip
        rig.core.tasks += 1
        rig.store._tasks[large.id] = large
        rig.core.find_group("t", "g").ready.push(large.id, 0, rig.sources.now_ms)  # type: ignore[union-attr]  # made above
    rig.core.landed_id = small + 3 * ID_STEP
    ok(await peer.call(T.SUBSCRIBE, 1, "t", "g", 10, None))
    await rig.settle(200)
    frames = [frame for frame in peer.frames() if frame[0] == T.DELIVER]
    assert [len(frame[4]) for frame in frames] == [1, 1, 1, 1]
    assert not peer.transport.aborted


# --- transactions --------------------------------------------------------------------------------


async def prepare(peer: Any, name: str, part: int, *tasks: Any, group: str = "g") -> Any:
    return await peer.call(T.PREPARE, name, group, part, list(tasks), None)


async def test_undecided_transactions_are_limited(make: Make) -> None:
    rig = await make(transactions_max=2)
    peer = await rig.peer()
    for name in ("a", "b"):
        ok(await prepare(peer, name, 1, ("t", b"", 0)))
    refused(await prepare(peer, "c", 1, ("t", b"", 0)), "overloaded", "is 2 (transactions_max)")
    ok(await prepare(peer, "b", 2, ("t", b"", 0)))
    ok(await peer.call(T.ROLLBACK, "a"))
    ok(await prepare(peer, "c", 1, ("t", b"", 0)))


async def test_prepared_tasks_of_all_transactions_are_limited(make: Make) -> None:
    # Each counts 250 bytes beside what it has.
    rig = await make(transactions_bytes_max=600)
    peer = await rig.peer()
    ok(await prepare(peer, "a", 1, ("t", b"x" * 60, 0)))
    refused(
        await prepare(peer, "b", 1, ("t", b"x" * 41, 0)),
        "overloaded",
        "310 bytes; 291 more",
        "exceed the limit 600 (transactions_bytes_max)",
    )
    ok(await prepare(peer, "b", 1, ("t", b"x" * 40, 0)))
    ok(await peer.call(T.COMMIT, "a"))
    ok(await prepare(peer, "c", 1, ("t", b"x" * 60, 0)))


async def test_prepared_tasks_of_a_transaction_are_limited(make: Make) -> None:
    rig = await make(transaction_tasks_max=300, transaction_bytes_max=1_000)
    peer = await rig.peer()
    ok(await prepare(peer, "a", 1, *[("t", b"", 0)] * 299))
    refused(
        await prepare(peer, "a", 2, *[("t", b"", 0)] * 2),
        "limit_exceeded",
        "301 tasks; the limit is 300 (transaction_tasks_max)",
    )
    ok(await prepare(peer, "a", 2, ("t", b"", 0)))
    ok(await prepare(peer, "b", 1, ("t", b"x" * 1_000, 0)))
    refused(
        await prepare(peer, "b", 2, ("t", b"x", 0)),
        "limit_exceeded",
        "1001 bytes; the limit is 1000 (transaction_bytes_max)",
    )
    ok(await prepare(peer, "c", 1, *[(f"t{n}", b"", 0) for n in range(100)]))
    refused(
        await prepare(peer, "c", 2, ("t", b"", 0)),
        "limit_exceeded",
        "101 topics; the limit is 100 (TRANSACTION_TOPICS_MAX)",
    )


async def test_producer_groups_of_a_connection_are_limited(make: Make) -> None:
    peer = await (await make()).peer()
    ok(await peer.call(T.CHECKS, [f"g{n}" for n in range(1_000)]))
    refused(await peer.call(T.CHECKS, [f"g{n}" for n in range(1_001)]), "limit_exceeded", "1000")
