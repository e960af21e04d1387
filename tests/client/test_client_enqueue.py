"""Enqueueing through the client: what is sent, what is sent again, what callers get."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon, Peer, turns
from support.waiting import WAIT_S, slowly, soon
from tickwheel import (
    Client,
    IfPending,
    Once,
    Receipt,
    Retry,
    RetryLater,
    Snooze,
    Task,
    Worker,
    errors,
)
from tickwheel.api.frames import FrameType as T
from tickwheel.api.kinds import Moment, Number, Shift, Span, Whole
from tickwheel.api.policies import rule_wire
from tickwheel.api.times import seconds
from tickwheel.api.verbs import VERBS
from tickwheel.client.tasks import TaskChecker
from tickwheel.client.wire import LinkedClient
from tickwheel.protocol import Frame, encode


def bodies(frame: Frame) -> list[bytes]:
    return [task[1] for task in frame[3]]


async def stored(peer: Peer) -> Frame:
    """The next ENQUEUE, answered."""
    frame = await peer.next(T.ENQUEUE)
    peer.store(frame)
    return frame


# --- frames ----------------------------------------------------------------------------------


async def test_concurrent_enqueues_share_a_frame(client: Client, peer: Peer) -> None:
    calls = [asyncio.ensure_future(client.enqueue("t", b"%d" % i)) for i in range(50)]
    futures = [client.enqueue_nowait("u", b"x") for _ in range(50)]
    frame = await peer.next(T.ENQUEUE)
    assert len(frame[3]) == 100
    ids = peer.store(frame)
    receipts = await soon(asyncio.gather(*calls, *futures))
    assert sorted(receipt.id for receipt in receipts) == ids
    for receipt, topic in zip(receipts, ["t"] * 50 + ["u"] * 50, strict=True):
        assert frame[3][ids.index(receipt.id)][0] == topic
    assert peer.nothing()


async def test_frames_are_pipelined(client: Client, peer: Peer) -> None:
    frames, futures = [], []
    for i in range(5):
        futures.append(client.enqueue_nowait("t", b"%d" % i))
        frames.append(await peer.next(T.ENQUEUE))
    assert not any(future.done() for future in futures)
    for frame in reversed(frames):
        peer.store(frame)
    await soon(asyncio.gather(*futures))


async def test_a_receipt_has_id_and_due_time(client: Client, peer: Peer) -> None:
    call = asyncio.ensure_future(client.enqueue("t", b"x", delay=1.5))
    [task_id] = peer.store(await peer.next(T.ENQUEUE))
    receipt = await soon(call)
    assert receipt == Receipt(task_id, NOW_MS + 1500)
    assert receipt.due == datetime.fromtimestamp(NOW_MS / 1000, UTC) + timedelta(seconds=1.5)


async def test_a_due_time_in_the_past_counts_as_the_acceptance(client: Client, peer: Peer) -> None:
    past, future = (datetime.fromtimestamp(s, UTC) for s in (5, NOW_MS // 1000 + 60))
    calls = [client.enqueue_nowait("t", b"x", at=moment) for moment in (past, future)]
    await stored(peer)
    first, second = await soon(asyncio.gather(*calls))
    assert first.due_ms == NOW_MS
    assert second.due == future


async def test_a_delay_level_is_sent_and_resolved_in_the_receipt(
    client: Client, peer: Peer
) -> None:
    future = client.enqueue_nowait("t", b"a", delay_level=3)
    await turns()
    (frame,) = await frames_of(peer)
    assert frame[3] == (("t", b"a", None, {"delay_level": 3}),)
    peer.ok(frame, (NOW_MS, (7,)))
    assert (await soon(future)).due_ms == NOW_MS + 10_000


async def test_if_pending_is_sent_and_its_outcome_returned() -> None:
    rule = IfPending(
        "replace", window=1.5, replaces="due", due="later", max_wait=timedelta(hours=1)
    )
    wired = {
        "action": "replace", "window_ms": 1_500, "replaces": "due", "due": "later",
        "max_wait_ms": 3_600_000,
    }  # fmt: skip
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        plain = client.enqueue_nowait("t", b"a")
        ruled = client.enqueue_nowait("t", b"b", key="k", if_pending=rule)
        beside = client.enqueue_nowait("t", b"c")
        call = asyncio.ensure_future(client.enqueue("t", b"d", key="k", if_pending="keep"))
        frames = [await peer.next(T.ENQUEUE) for _ in range(4)]
        assert [bodies(frame) for frame in frames] == [[b"a"], [b"b"], [b"c"], [b"d"]]
        assert frames[1][3][0][3] == {"key": "k", "if_pending": wired}
        assert frames[3][3][0][3] == {"key": "k", "if_pending": "keep"}
        peer.ok(frames[0], (NOW_MS, (7,)))
        peer.ok(frames[1], (NOW_MS, (5,), {"outcomes": (("replaced", NOW_MS + 9),)}))
        peer.ok(frames[2], (NOW_MS, (8,)))
        peer.ok(frames[3], (NOW_MS, (5,), {"outcomes": (("kept", NOW_MS + 9),)}))
        assert (await soon(plain)).outcome == (await soon(beside)).outcome == "stored"
        assert await soon(ruled) == Receipt(5, NOW_MS + 9, "replaced")
        assert await soon(call) == Receipt(5, NOW_MS + 9, "kept")


async def test_a_frame_respects_the_limit_of_coalesced_tasks() -> None:
    async with FakeDaemon(coalesced_tasks_max=2) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        tasks = [Task("t", b"%d" % n, key="k", if_pending="reject") for n in range(5)]
        call = asyncio.ensure_future(client.enqueue_many(tasks))
        results = []
        for _ in range(3):
            frame = await peer.next(T.ENQUEUE)
            ids = tuple(range(len(frame[3])))
            peer.ok(frame, (NOW_MS, ids, {"outcomes": tuple(("rejected", n) for n in ids)}))
            results.append(bodies(frame))
        assert results == [[b"0", b"1"], [b"2", b"3"], [b"4"]]
        outcomes = [receipt.outcome for receipt in await soon(call)]
        assert outcomes == ["rejected"] * 5


async def test_a_topics_rule_sets_the_outcome_of_a_task_without_one(
    client: Client, peer: Peer
) -> None:
    calls = [client.enqueue_nowait("t", b"x", key="k") for _ in range(2)]
    frame = await peer.next(T.ENQUEUE)
    peer.ok(frame, (NOW_MS, (5, 5), {"outcomes": (("stored", NOW_MS), ("kept", NOW_MS))}))
    outcomes = [(await soon(call)).outcome for call in calls]
    assert outcomes == ["stored", "kept"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"if_pending": "keep"}, "task.if_pending is keep, which needs a key"),
        ({"if_pending": IfPending("replace", due="later")}, "is replace, which needs a key"),
        ({"key": "k", "if_pending": "merge"}, "task.if_pending must be one of add, keep, replace"),
        ({"key": "k", "if_pending": 5}, 'task.if_pending must be an action such as "keep", or an'),
        ({"key": "k", "if_pending": IfPending("add", window=5)}, "add has no option 'window_ms'"),
        ({"key": "k", "if_pending": IfPending("keep", window=0)}, "if_pending.window_ms must be"),
        ({"key": "k", "if_pending": IfPending("keep", window="x")}, "if_pending.window"),  # type: ignore[arg-type]
    ],
)
async def test_an_invalid_if_pending_raises_at_once(
    more: dict[str, Any], said: str, daemon: FakeDaemon, client: Client
) -> None:
    await daemon.peer()
    with pytest.raises(errors.BadRequest) as caught:
        await client.enqueue("t", b"x", **more)
    assert said in str(caught.value)


async def test_every_field_arrives() -> None:
    at = datetime(2030, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)
    options: dict[str, Any] = {
        "key": "k",
        "tag": "g",
        "properties": {"s": "x", "i": -5, "f": 1.5, "b": True},
        "priority": 255,
        "ttl": timedelta(minutes=1),
        "order_key": "o",
    }
    sent = {"key": "k", "tag": "g", "properties": options["properties"], "priority": 255}
    sent |= {"order_key": "o"}
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        client.enqueue_nowait("t", b"a", at=at, **options)
        client.enqueue_nowait("t", b"b", delay=timedelta(seconds=2))
        client.enqueue_nowait("t", bytearray(b"c"), delay=0.5, **options)  # type: ignore[arg-type]
        client.enqueue_nowait("t", b"d")
        many = asyncio.ensure_future(client.enqueue_many([Task("t", b"e", at=at, **options)]))
        await turns()
        tasks = [task for frame in await frames_of(peer) for task in frame[3]]
        due_ms = round(at.timestamp() * 1000)
        with_due = sent | {"ttl_ms": 60_000, "due_ms": due_ms}
        assert tasks == [
            ("t", b"a", None, with_due),
            ("t", b"b", 2000),
            ("t", b"c", 500, sent | {"ttl_ms": 60_000}),
            ("t", b"d", 0),
            ("t", b"e", None, with_due),
        ]
        await soon(many)


async def frames_of(peer: Peer) -> list[Frame]:
    """The ENQUEUE frames that have come, answered."""
    results = [await stored(peer)]
    while not peer.nothing():
        results.append(await stored(peer))
    return results


async def test_oneway_has_request_zero_and_does_not_wait(client: Client, peer: Peer) -> None:
    await soon(client.oneway("t", b"x", delay=1))
    assert await peer.next() == (T.ONEWAY, 0, (("t", b"x", 1000),))
    peer.send(T.ERROR, 0, "bad_request", "tasks[0] is wrong")
    call = asyncio.ensure_future(client.ping())
    peer.ok(await peer.next(T.PING))
    await soon(call)


# --- many ------------------------------------------------------------------------------------


async def test_many_are_split_by_count_and_keep_their_order() -> None:
    async with FakeDaemon(tasks_per_frame_max=7) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        tasks = [Task("t", b"%d" % i, delay=i) for i in range(30)]
        call = asyncio.ensure_future(client.enqueue_many(iter(tasks)))
        sizes, ids = [], []
        while len(ids) < 30:
            frame = await peer.next(T.ENQUEUE)
            sizes.append(len(frame[3]))
            ids += peer.store(frame)
        receipts = await soon(call)
        assert max(sizes) == 7
        assert [receipt.id for receipt in receipts] == ids
        assert [receipt.due_ms - NOW_MS for receipt in receipts] == [i * 1000 for i in range(30)]


async def test_many_are_split_by_size() -> None:
    limits = {"frame_bytes_max": 10_000, "body_bytes_max": 9_000}
    async with FakeDaemon(**limits) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        tasks = [Task("t", b"x" * 3000, key="k" * 100) for _ in range(20)]
        call = asyncio.ensure_future(client.enqueue_many(tasks))
        count = 0
        while count < 20:
            frame = await stored(peer)
            count += len(frame[3])
            assert len(encode(frame)) <= 10_000
        assert len(await soon(call)) == 20


async def test_enqueueing_no_tasks_sends_nothing(daemon: FakeDaemon, client: Client) -> None:
    assert await soon(client.enqueue_many([])) == []
    assert (await daemon.peer()).nothing()


async def test_merged_calls_respect_the_frame_limits() -> None:
    limits = {"frame_bytes_max": 10_000, "body_bytes_max": 9_000, "tasks_per_frame_max": 50}
    async with FakeDaemon(**limits) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        futures = [client.enqueue_nowait("t" * 200, b"x" * (i * 40)) for i in range(200)]
        while not all(future.done() for future in futures):
            frame = await stored(peer)
            assert len(encode(frame)) <= 10_000
            assert len(frame[3]) <= 50
            await turns()
        await soon(asyncio.gather(*futures))


async def test_the_window_is_kept_and_goes_on() -> None:
    async with FakeDaemon(window_max=4, tasks_per_frame_max=1) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        futures = [client.enqueue_nowait("t", b"%d" % i) for i in range(12)]
        first = [await peer.next(T.ENQUEUE) for _ in range(4)]
        await turns()
        assert peer.nothing(), "four lie between the floor and the newest"
        for frame in first[1:]:
            peer.store(frame)
        await turns()
        assert peer.nothing(), "the floor is the first one, which is not answered"
        peer.store(first[0])
        for _ in range(8):
            frame = await stored(peer)
            assert frame[1] - frame[2] < 4 * 2
        receipts = await soon(asyncio.gather(*futures))
        assert len({receipt.id for receipt in receipts}) == 12


async def test_the_floor_is_the_lowest_unanswered(client: Client, peer: Peer) -> None:
    frames = []
    for i in range(3):
        client.enqueue_nowait("t", b"%d" % i)
        frames.append(await peer.next(T.ENQUEUE))
    assert [frame[2] for frame in frames] == [frames[0][1]] * 3
    peer.store(frames[1])
    peer.store(frames[0])
    ping = asyncio.ensure_future(client.ping())
    peer.ok(await peer.next(T.PING))
    await soon(ping)
    client.enqueue_nowait("t", b"3")
    last = await peer.next(T.ENQUEUE)
    assert last[2] == frames[2][1]
    peer.store(frames[2])
    peer.store(last)


async def test_sending_stops_and_resumes_with_a_slow_peer(client: Client, peer: Peer) -> None:
    peer.stop_reading()
    futures = [client.enqueue_nowait("t", b"x" * 400_000) for _ in range(60)]
    await turns(20)
    peer.read_again()
    while not all(future.done() for future in futures):
        await stored(peer)
        await turns()
    assert len({(await future).id for future in futures}) == 60


@pytest.mark.parametrize(("name", "limit"), [("TASKS", 100), ("BYTES", 100_000)])
async def test_enqueue_nowait_over_the_queue_limit_is_overloaded(
    monkeypatch: pytest.MonkeyPatch, name: str, limit: int
) -> None:
    monkeypatch.setattr(f"tickwheel.client.producer.QUEUE_{name}_MAX", limit)
    async with FakeDaemon() as daemon, daemon.client(retries=0) as client:
        peer = await daemon.peer()
        futures = []
        with pytest.raises(errors.Overloaded) as raised:
            for _ in range(1000):
                futures.append(client.enqueue_nowait("t", b"x" * 1000))
        assert str(limit) in raised.value.message
        assert len(futures) in range(90, 101)
        await stored(peer)
        await soon(asyncio.gather(*futures))
        future = client.enqueue_nowait("t", b"there is room again")
        await stored(peer)
        await soon(future)


async def test_repeated_calls_of_a_failed_client_keep_no_frames(daemon: FakeDaemon) -> None:
    client, counts = LinkedClient(daemon.url), set()
    await client.connect()
    await client.fail(errors.Unreachable("as the test says"))
    for _ in range(3):
        with pytest.raises(errors.Unreachable) as raised:
            await client.enqueue("t", b"x")
        counts.add(len(raised.traceback))
    assert len(counts) == 1
    await client.close()


async def test_an_awaited_enqueue_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tickwheel.client.producer.QUEUE_TASKS_MAX", 10)
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        calls = [asyncio.ensure_future(client.enqueue("t", b"%d" % i)) for i in range(35)]
        sizes = []
        while sum(sizes) < len(calls):
            frame = await stored(peer)
            sizes.append(len(frame[3]))
        receipts = await soon(asyncio.gather(*calls))
        assert len({receipt.id for receipt in receipts}) == len(calls)
        assert max(sizes) == 10


# --- resend ----------------------------------------------------------------------------------


async def test_unanswered_frames_go_out_again_unchanged_and_in_order(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    futures, frames = [], []
    for i in range(4):
        futures.append(client.enqueue_nowait("t", b"%d" % i))
        frames.append(await peer.next(T.ENQUEUE))
    peer.store(frames[1])
    await soon(futures[1])
    peer.close()
    peer = await daemon.peer()
    futures.append(client.enqueue_nowait("t", b"new"))
    again = [await peer.next(T.ENQUEUE) for _ in range(4)]
    assert [frame[1] for frame in again[:3]] == [frames[i][1] for i in (0, 2, 3)]
    assert [bodies(frame) for frame in again] == [[b"0"], [b"2"], [b"3"], [b"new"]]
    assert again[3][1] > frames[3][1]
    assert {frame[2] for frame in again} == {frames[0][1]}
    for frame in again:
        peer.store(frame)
    await soon(asyncio.gather(*futures))


async def test_a_resend_does_not_disturb_the_window() -> None:
    async with FakeDaemon(window_max=3, tasks_per_frame_max=1) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        futures = [client.enqueue_nowait("t", b"%d" % i) for i in range(9)]
        first = [await peer.next(T.ENQUEUE) for _ in range(3)]
        peer.close()
        peer = await daemon.peer()
        assert [await peer.next(T.ENQUEUE) for _ in range(3)] == first
        await turns()
        assert peer.nothing()
        for frame in first:
            peer.store(frame)
        for _ in range(6):
            await stored(peer)
        await soon(asyncio.gather(*futures))


# --- errors ----------------------------------------------------------------------------------


async def test_an_invalid_task_in_a_shared_frame_fails_alone(client: Client, peer: Peer) -> None:
    futures = [client.enqueue_nowait("t", b"%d" % i) for i in range(10)]

    async def judge() -> None:
        while not all(future.done() for future in futures):
            frame = await peer.next(T.ENQUEUE)
            if b"7" in bodies(frame):
                peer.error(frame, "bad_request", "tasks[n] is wrong")
            else:
                peer.store(frame)
            await turns()

    await soon(judge())
    with pytest.raises(errors.BadRequest, match="is wrong"):
        await futures.pop(7)
    assert len({receipt.id for receipt in await asyncio.gather(*futures)}) == 9


async def test_enqueue_many_with_an_invalid_task_fails_as_a_whole(
    client: Client, peer: Peer
) -> None:
    call = asyncio.ensure_future(client.enqueue_many([Task("t", b"a"), Task("t", b"b")]))
    peer.error(await peer.next(T.ENQUEUE), "bad_request", "tasks[1] is wrong")
    with pytest.raises(errors.BadRequest):
        await soon(call)
    await turns()
    assert peer.nothing()


@pytest.mark.parametrize("retries", [0, 2])
async def test_a_full_store_is_retried_until_the_send_timeout(retries: int) -> None:
    async with FakeDaemon() as daemon, daemon.client(retries=retries, send_timeout=0.5) as client:
        peer = await daemon.peer()
        peer.auto.add(T.ENQUEUE)
        peer.auto.add(T.CANCEL)
        refused = 0

        def refuse(frame: Frame, result: Any = None) -> None:
            nonlocal refused
            refused += 1
            peer.error(frame, "refused", "not now")

        peer.ok = refuse  # type: ignore[method-assign]
        for ask in (lambda: client.enqueue("t", b"x"), lambda: client.cancel(5)):
            refused = 0
            with pytest.raises(errors.Refused, match="not now"):
                await soon(ask())
            assert (refused == 1) if retries == 0 else (refused > 3)
        peer.auto |= {T.BYE}
        del peer.ok


@pytest.mark.parametrize("code", ["overloaded", "store_full", "window_full"])
async def test_a_retryable_refusal_is_retried_then_raised(code: str) -> None:
    async with FakeDaemon() as daemon, daemon.client(retries=2) as client:
        peer = await daemon.peer()
        future = client.enqueue_nowait("t", b"x")
        numbers = []
        for _ in range(3):
            frame = await peer.next(T.ENQUEUE)
            numbers.append(frame[1])
            peer.error(frame, code, "not now")
        with pytest.raises(errors.BY_CODE[code], match="not now"):
            await soon(future)
        assert numbers == sorted(numbers)
        assert peer.nothing()


async def test_an_enqueue_refused_once_is_retried(client: Client, peer: Peer) -> None:
    future = client.enqueue_nowait("t", b"x")
    peer.error(await peer.next(T.ENQUEUE), "overloaded")
    await stored(peer)
    assert (await soon(future)).due_ms == NOW_MS


async def test_outcome_unknown_is_retried_with_the_same_request_number(
    client: Client, peer: Peer
) -> None:
    """The daemon kept it or not; only the same number can find out."""
    future = client.enqueue_nowait("t", b"x")
    first = await peer.next(T.ENQUEUE)
    peer.error(first, "outcome_unknown")
    again = await stored(peer)
    assert again[1] == first[1]
    await soon(future)


async def test_a_missing_answer_is_an_unknown_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.2, retries=0) as client:
        peer = await daemon.peer()
        future = client.enqueue_nowait("t", b"x")
        await peer.next(T.ENQUEUE)
        with pytest.raises(errors.OutcomeUnknown):
            await soon(future)


async def test_an_enqueue_never_sent_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.2, retries=0) as client:
        peer = await daemon.peer()
        await daemon.deaf()
        peer.close()
        while client.connected:
            await turns()
        future = client.enqueue_nowait("t", b"x")
        with pytest.raises(errors.Unreachable) as raised:
            await soon(future)
        assert str(daemon.port) in raised.value.message


async def test_an_enqueue_sent_and_lost_is_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.3, retries=0) as client:
        peer = await daemon.peer()
        future = client.enqueue_nowait("t", b"x")
        await peer.next(T.ENQUEUE)
        await daemon.deaf()
        peer.close()
        with pytest.raises(errors.OutcomeUnknown):
            await soon(future)


async def test_an_answer_of_the_wrong_shape_is_an_unknown_outcome() -> None:
    for answer in (None, 5, (NOW_MS,), (NOW_MS, ()), (NOW_MS, (1, 2)), ("x", (1,)), {}):
        async with FakeDaemon() as daemon, daemon.client(send_timeout=0.3, retries=0) as client:
            peer = await daemon.peer()
            future = client.enqueue_nowait("t", b"x")
            peer.ok(await peer.next(T.ENQUEUE), answer)
            with pytest.raises(errors.TickwheelError) as raised:
                await soon(future)
            assert isinstance(raised.value, (errors.OutcomeUnknown, errors.ProtocolError))


async def test_a_late_answer_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.2, retries=0) as client:
        peer = await daemon.peer()
        late = client.enqueue_nowait("t", b"x")
        frame = await peer.next(T.ENQUEUE)
        with pytest.raises(errors.OutcomeUnknown):
            await soon(late)
        if peer in daemon.open:
            peer.store(frame)
        peer = peer if peer in daemon.open else await daemon.peer()
        future = client.enqueue_nowait("t", b"y", timeout=WAIT_S)
        frame = await stored(peer)
        assert bodies(frame) == [b"y"]
        assert frame[2] == frame[1], "what was given up is below the floor"
        await soon(future)


async def test_failed_futures_that_nobody_looks_at_are_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        async with FakeDaemon() as daemon, daemon.client(retries=0) as client:
            peer = await daemon.peer()
            client.enqueue_nowait("t", b"x")
            peer.error(await peer.next(T.ENQUEUE), "bad_request")
            await turns()
    assert "never retrieved" not in caplog.text


# --- cancelled callers -----------------------------------------------------------------------


async def test_an_enqueue_cancelled_before_sending_stores_nothing(
    client: Client, peer: Peer
) -> None:
    gone = asyncio.ensure_future(client.enqueue("t", b"gone"))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await turns()
    future = client.enqueue_nowait("t", b"here")
    sent = [bodies(frame) for frame in await frames_of(peer)]
    await soon(future)
    assert sent in ([[b"here"]], [[b"gone"], [b"here"]])


async def test_a_cancelled_enqueue_frees_its_place_in_the_window() -> None:
    async with FakeDaemon(window_max=2) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        for _ in range(6):
            call = asyncio.ensure_future(client.enqueue("t", b"x"))
            frame = await peer.next(T.ENQUEUE)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            peer.store(frame)
        many = asyncio.ensure_future(client.enqueue_many([Task("t", b"y")] * 10))
        frame = await peer.next(T.ENQUEUE)
        many.cancel()
        await asyncio.gather(many, return_exceptions=True)
        peer.store(frame)
        future = client.enqueue_nowait("t", b"z")
        await stored(peer)
        await soon(future)


# --- what is wrong at once -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delay": -1}, ("delay", "-1")),
        ({"delay": float("nan")}, ("delay", "nan")),
        ({"delay": float("inf")}, ("delay", "inf")),
        ({"delay": "5 parsecs"}, ("delay", "5 parsecs")),
        ({"delay": True}, ("delay", "True")),
        ({"delay": timedelta(seconds=-5)}, ("delay",)),
        ({"delay": 11 * 366 * 86_400}, ("delay_max_s", "315576000000")),
        ({"at": datetime(2030, 1, 1)}, ("at", "time zone")),  # noqa: DTZ001
        ({"at": 5}, ("at", "5")),
        ({"at": datetime.now(UTC), "delay": 5}, ("delay", "at")),
        ({"priority": 256}, ("priority", "255", "256")),
        ({"priority": -1}, ("priority", "-1")),
        ({"priority": 1.5}, ("priority", "1.5")),
        ({"delay_level": 0}, ("delay_level", "0")),
        ({"delay_level": 1, "delay": 5}, ("delay_level", "delay")),
        ({"ttl": -1}, ("ttl", "-1")),
        ({"ttl": 0}, ("ttl", "0")),
        ({"key": 5}, ("key", "5")),
        ({"key": "k" * 256}, ("key", "255", "256")),
        ({"tag": b"x"}, ("tag",)),
        ({"order_key": 5}, ("order_key", "5")),
        ({"order_key": "k" * 256}, ("order_key", "255", "256")),
        ({"order_key": "k", "retry": Retry.none()}, ("order_key", "retry", "order_retry")),
        ({"properties": {"a": None}}, ("properties", "a")),
        ({"properties": {"a": float("nan")}}, ("properties", "nan")),
        ({"properties": {5: "a"}}, ("properties", "5")),
        ({"properties": {str(i): i for i in range(65)}}, ("properties", "64", "65")),
        ({"properties": ["a"]}, ("properties",)),
        ({"body": "text"}, ("body", "bytes")),
        ({"body": b"x" * (1024 * 1024 + 1)}, ("body", "1048576", "1048577", "body_bytes_max")),
        ({"topic": ""}, ("topic",)),
        ({"topic": "a b"}, ("topic", "a b")),
        ({"topic": "t" * 256}, ("topic", "255")),
        ({"topic": 5}, ("topic", "5")),
        ({"topic": "\ud800"}, ("topic",)),
        ({"properties": {"a": "\ud800"}}, ()),
        ({"properties": {"a": 2**64}}, ()),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
async def test_invalid_task_fields_are_named_before_sending(
    options: dict[str, Any], words: tuple[str, ...]
) -> None:
    given = {"topic": "t", "body": b"x", **options}
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        with pytest.raises(errors.BadRequest) as raised:
            client.enqueue_nowait(**given)
        for word in words:
            assert word in raised.value.message
        with pytest.raises(errors.BadRequest):
            await client.enqueue(**given)
        with pytest.raises(errors.BadRequest):
            await client.oneway(**given)
        good, topic, body = Task("t", b"x"), given.pop("topic"), given.pop("body")
        with pytest.raises(errors.BadRequest):
            await client.enqueue_many([good, Task(topic, body, **given)])
        await turns()
        assert peer.nothing(), "all are checked before the first is sent"


async def test_invalid_client_settings_are_refused() -> None:
    for options in ({"send_timeout": 0}, {"connect_timeout": -1}, {"retries": -1}):
        with pytest.raises(errors.BadRequest) as raised:
            Client("tcp://127.0.0.1:1", **options)  # type: ignore[arg-type]
        assert next(iter(options)) in raised.value.message


# --- durations as text ---------------------------------------------------------------------------

FIVE_M = 300
DURATIONS: Final[list[Callable[[Any], Any]]] = [
    lambda of: Retry.exponential(base=of, cap=of),
    Retry.fixed,
    lambda of: Retry.table([of, of]),
    lambda of: rule_wire(IfPending("keep", window=of), "if_pending"),
    lambda of: rule_wire(IfPending("replace", max_wait=of), "if_pending"),
    lambda of: Client(send_timeout=of)._options.send_timeout_s,
    lambda of: Client(connect_timeout=of, active_timeout=of, heartbeat=of)._options.heartbeat_s,
    lambda of: Worker(Client(), grace=of)._grace_s,
    lambda of: seconds(RetryLater(of).delay, "delay"),
    lambda of: seconds(Snooze(of).delay, "delay"),
    lambda of: Once(ttl=of, claim=of, wait=of)._wait_s,
    lambda of: TaskChecker().check(Task("t", b"", delay=of, ttl=of, within=of)),
    lambda of: TaskChecker().check_columns("t", [b"", b""], of, None),
    lambda of: TaskChecker().check_columns("t", [b"", b""], None, [of, 1]),
]
"""What takes a duration from its caller."""


@pytest.mark.parametrize("made", DURATIONS)
def test_a_duration_can_be_text(made: Any) -> None:
    assert made("5m") == made(FIVE_M) == made(timedelta(minutes=5))
    for wrong in ("5 minutes", "", "m", "1s2m", b"5m", "1e3"):
        with pytest.raises(errors.BadRequest):
            made(wrong)


def test_every_duration_of_a_verb_can_be_text() -> None:
    """Leases, time-outs of schedules, shifts: whatever the declarations call a span."""
    spans = {
        (verb.name, field.name): field.kind
        for verb in VERBS.values()
        if verb.request is not None
        for field in verb.request_type.fields()
        if isinstance(field.kind, Span)
    }
    assert ("reschedule", "delay_ms") in spans and ("put_schedule", "every_ms") in spans, spans
    for name, kind in spans.items():
        assert kind.of_python("5m", "field") == kind.of_python(FIVE_M, "field"), name
    shift = Shift()
    assert shift.of_python("-5m", "shift") == shift.of_python(-FIVE_M, "shift") == -300_000


EXTREME = (
    10**400, -(10**400), 10**5_000, 1e305, -1e305, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
"""Numbers that no duration and no rate can be. Some are beyond a float, one beyond ``repr``."""


@pytest.mark.parametrize("made", DURATIONS)
def test_an_extreme_duration_is_a_bad_request(made: Any) -> None:
    for wrong in (*EXTREME, timedelta.min):
        with pytest.raises(errors.BadRequest):
            made(wrong)


def test_an_extreme_number_in_a_verb_is_a_bad_request() -> None:
    requests = [verb.request_type for verb in VERBS.values() if verb.request is not None]
    numbers = {
        field.kind: field.name
        for request in requests
        for field in request.fields()
        if isinstance(field.kind, (Number, Whole)) and not isinstance(field.kind, Moment)
    }
    assert {"rate", "burst", "shift_ms", "limit"} <= set(numbers.values())
    for kind, name in numbers.items():
        for wrong in EXTREME:
            with pytest.raises(errors.BadRequest, match=name):
                kind.of_python(wrong, name)


def test_a_single_text_is_not_a_list_of_delays() -> None:
    """Each of its characters would be a duration."""
    with pytest.raises(errors.BadRequest, match="delays must be a list of durations, not '123'"):
        TaskChecker().check_columns("t", [b"", b"", b""], None, "123")
