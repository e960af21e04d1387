"""The worker against a daemon that does what a test says: outcomes, leases, stopping."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon, Peer, turns
from support.waiting import soon
from tickwheel import Client, Delivery, Reject, Retry, RetryLater, Snooze, Worker, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.api.groups import SET_OTHERWISE, TO_CHANGE
from tickwheel.cli.options import parse_retry
from tickwheel.client.subscription import REASON_CHARACTERS_MAX, TRACE_CHARACTERS_MAX
from tickwheel.protocol import Frame, encode


class WorkerRig:
    """A worker that runs, with one handler of topic ``t``."""

    def __init__(self, worker: Worker, peer: Peer, sub: int) -> None:
        self.worker = worker
        self.peer = peer
        self.sub = sub
        self.running: asyncio.Task[BaseException | None]

    async def deliver(self, *bodies: bytes, attempt: int = 1) -> list[int]:
        return self.peer.deliver(self.sub, *bodies, attempt=attempt)

    async def ended(self) -> None:
        await soon(self.running)


async def run(worker: Worker) -> BaseException | None:
    """Run a worker; an exit is returned, because a task that raises it ends the event loop."""
    try:
        await worker.run()
    except (SystemExit, KeyboardInterrupt) as error:
        return error
    return None


@asynccontextmanager
async def rig(
    handler: Callable[[Delivery], Any],
    lease_ms: int = 30_000,
    grace: float = 5.0,
    daemon: FakeDaemon | None = None,
    **options: Any,
) -> AsyncIterator[WorkerRig]:
    async with daemon or FakeDaemon() as fake, fake.client() as client:
        peer = await fake.peer()
        worker = Worker(client, grace=grace, signals=False)
        worker.on("t", **options)(handler)
        running = asyncio.ensure_future(run(worker))
        made = WorkerRig(worker, peer, await peer.subscribed(lease_ms))
        made.running = running
        yield made
        worker.stop()
        await soon(asyncio.wait({running}))
        assert not peer.sent(T.ENQUEUE)


async def answered_until(peer: Peer, kind: T) -> Frame:
    """Return the first frame of this kind, after answering all frames before it."""
    while True:
        frame = await peer.next()
        peer.ok(frame)
        if frame[0] == kind:
            return frame


async def answer(peer: Peer, kind: T, result: Any = None) -> Frame:
    frame = await peer.next(kind)
    peer.ok(frame, result)
    return frame


async def nothing(delivery: Delivery) -> None:
    """Handles."""


# --- outcomes of a delivery --------------------------------------------------------------------


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise AttributeError("message")


class Bare(Reject):
    """Lacks what ``Reject`` sets."""

    def __init__(self) -> None:
        """Set nothing."""


TEXTS = {
    "lone surrogate": "half \ud83d",
    "long": "x" * 5_000_000,
    "long in UTF-8": "\u20ac" * 100_000,
    "no text at all": Mute(),
    "no text but an object": {"a": "\ud83d"},
}


async def _ends(delivery: Delivery, how: str, text: Any) -> None:
    """End a delivery in one of the ways that say why."""
    if how == "nack":
        await delivery.nack(reason=text)
    elif how == "reject":
        await delivery.reject(text)
    elif how == "Reject":
        raise Reject(text)
    elif how == "RetryLater":
        raise RetryLater(1, text)
    elif how == "Mute":
        raise Mute(text)
    elif how == "Bare":
        raise Bare
    raise text if isinstance(text, Exception) else ValueError(text)


RAISED = ("raise", "Reject", "RetryLater", "Mute", "Bare")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(
    ("how", "plain"),
    [
        *((how, plain) for how in RAISED for plain in (False, True)),
        ("nack", False),
        ("reject", False),
    ],
)
async def test_any_text_of_a_reason_settles_the_delivery(
    how: str, text: Any, plain: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "tickwheel")  # a report of pytest cannot hold such a text

    def in_a_thread(delivery: Delivery) -> None:
        asyncio.run(_ends(delivery, how, text))

    async def handler(delivery: Delivery) -> None:
        await _ends(delivery, how, text)

    async with rig(in_a_thread if plain else handler) as r:
        [task_id] = await r.deliver(b"a")
        frame = await r.peer.next()
        r.peer.ok(frame, ("dead",))
        assert frame[0] in (T.NACK, T.REJECT)
        ((*receipt, said),) = frame[4]
        assert receipt[:3] == [task_id, 1, 1]
        assert said and len(said.encode()) <= 64 * 1024
        if isinstance(text, str) and how not in ("Mute", "Bare"):
            assert text[:4] in said
        await r.deliver(b"b")  # the worker goes on
        r.peer.ok(await r.peer.next(), ("dead",))


async def test_a_reason_is_cut_to_a_small_frame_limit() -> None:
    async with FakeDaemon(frame_bytes_max=1024) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        subscription = client.subscribe("t" * 255, group="g" * 255)
        starting = asyncio.ensure_future(subscription.start())
        sub = await peer.subscribed()
        await starting
        peer.deliver(sub, b"a")
        delivery = await anext(subscription)
        asking = asyncio.ensure_future(delivery.nack(reason="x" * 5000))
        frame = await peer.next(T.NACK)
        assert len(encode(frame)) <= 1024
        peer.ok(frame, ("retrying",))
        assert await asking == "retrying"


class Own(BaseException):
    """No Exception."""


EXITS = (SystemExit(3), KeyboardInterrupt("by hand"))


@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize("error", [*EXITS, Own("of mine"), GeneratorExit()], ids=repr)
async def test_a_failing_handler_does_not_fail_others(
    error: BaseException, timeout: float | None
) -> None:
    started = asyncio.Semaphore(0)

    async def handler(delivery: Delivery) -> None:
        if delivery.body == b"bad":
            for _ in range(2):
                await started.acquire()
            raise error
        started.release()
        await asyncio.Event().wait()

    async with rig(handler, timeout=timeout, concurrency=3) as r:
        good, bad, other = await r.deliver(b"good", b"bad", b"other")
        frame = await answer(r.peer, T.NACK, ("retrying",))
        ((task_id, _, _, delay, reason),) = frame[4]
        assert (task_id, delay) == (bad, None)
        assert reason.startswith(type(error).__name__)
        if error not in EXITS:
            assert not r.running.done()
            r.worker.stop()
            r.worker._hurry.set()  # type: ignore[union-attr]
        frames = [await answer(r.peer, T.RELEASE) for _ in range(2)]
        assert sorted(frame[5][0] for frame in frames) == [good, other]
        await asyncio.wait((r.running,), timeout=5)
        assert r.running.result() is (error if error in EXITS else None)


async def test_an_ending_event_loop_releases_running_deliveries() -> None:
    started = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        if delivery.body == b"b":
            started.set()
        await asyncio.Event().wait()

    async with rig(handler, concurrency=2) as r:
        ids = await r.deliver(b"a", b"b")
        await soon(started.wait())
        for runner in r.worker._lanes[0]._runners:
            runner.task.cancel()
        r.running.cancel()
        given = [(await answer(r.peer, T.RELEASE))[5][0] for _ in ids]
        assert sorted(given) == ids
        await asyncio.wait((r.running,), timeout=5)
        assert not r.peer.sent(T.NACK)


async def test_a_returning_handler_acks() -> None:
    seen = []

    async def handler(delivery: Delivery) -> None:
        seen.append((delivery.body, delivery.attempt))

    async with rig(handler) as r:
        ids = await r.deliver(b"a", b"b", attempt=2)
        frame = await answer(r.peer, T.ACK)
        assert frame[2:] == ("t", "default", 1, tuple(ids), (2, 2), True)
        assert seen == [(b"a", 2), (b"b", 2)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such order"), "ValueError: no such order"),
        (KeyError(), "KeyError"),
        (TimeoutError("of its own"), "TimeoutError: of its own"),
        (errors.Refused("later"), "Refused: later"),
        (asyncio.CancelledError(), "CancelledError"),
        (ValueError("x" * 5000), "ValueError: " + "x" * 988),
    ],
)
async def test_an_exception_nacks_with_its_text_and_its_trace(
    error: BaseException, reason: str
) -> None:
    async def handler(delivery: Delivery) -> None:
        raise error

    async with rig(handler, timeout=5) as r:
        [task_id] = await r.deliver(b"a", attempt=3)
        frame = await answer(r.peer, T.NACK, ("retrying",))
        ((*receipt, said),) = frame[4]
        summary, _, trace = said.partition("\n")
        assert (frame[2:4], receipt) == (("t", "default"), [task_id, 1, 3, None])
        assert summary == reason
        # Where it was raised, and nothing of the worker's own.
        assert trace.startswith('  File "')
        assert "in handler\n" in trace and "tickwheel/client" not in trace
        assert len(said) <= REASON_CHARACTERS_MAX + 1 + TRACE_CHARACTERS_MAX
        await turns()
        assert r.peer.nothing()


async def test_reject_and_retry_later_settle_the_delivery() -> None:
    async def handler(delivery: Delivery) -> None:
        if delivery.body == b"never":
            raise Reject("not ours")
        raise RetryLater(timedelta(minutes=2), "closed")

    async with rig(handler) as r:
        [task_id] = await r.deliver(b"never")
        frame = await answer(r.peer, T.REJECT, ("dead",))
        assert frame[4] == ((task_id, 1, 1, "not ours"),)
        [task_id] = await r.deliver(b"later")
        frame = await answer(r.peer, T.NACK, ("retrying",))
        assert frame[4] == ((task_id, 1, 1, 120_000, "closed"),)


async def test_snoozing_too_often_becomes_a_nack() -> None:
    async def handler(delivery: Delivery) -> None:
        raise Snooze(60)

    async with rig(handler) as r:
        [task_id] = await r.deliver(b"busy")
        frame = await answer(r.peer, T.SNOOZE, ("snoozed",))
        assert frame[4] == ((task_id, 1, 1, 60_000),)
        [task_id] = await r.deliver(b"busy")
        await answer(r.peer, T.SNOOZE, ("too_often",))
        frame = await answer(r.peer, T.NACK, ("retrying",))
        assert frame[4] == ((task_id, 1, 1, 60_000, "postponed too often; snoozed for 60"),)


@pytest.mark.parametrize("how", [Delivery.nack, RetryLater, Delivery.snooze, Snooze])
async def test_a_delay_is_cut_to_the_limit_of_the_daemon(
    how: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(delivery: Delivery) -> None:
        if isinstance(how, type):
            raise how(60)
        await how(delivery, 60)

    async with rig(handler, daemon=FakeDaemon(delay_ms_max=5_000)) as r:
        [task_id] = await r.deliver(b"a")
        kind = T.NACK if how in (Delivery.nack, RetryLater) else T.SNOOZE
        frame = await answer(r.peer, kind, ("retrying",))
        assert frame[4][0][:4] == (task_id, 1, 1, 5_000)
    assert "the delay of 60000 ms was cut to the daemon's delay_max_s, 5000 ms" in caplog.text


async def test_an_ack_in_a_transaction_requests_no_longer_lease_than_the_limit() -> None:
    async def handler(delivery: Delivery) -> None:
        await delivery.ack_in(None)

    async with rig(handler, lease_ms=5_000, daemon=FakeDaemon(lease_ms_max=5_000)) as r:
        await r.deliver(b"a")
        frame = await answer(r.peer, T.EXTEND, ("stale",))
        assert frame[-1] == 5_000
        assert (await answer(r.peer, T.NACK, ("retrying",)))[4][0][4].startswith("StaleReceipt")


@pytest.mark.parametrize("delay", [-1, "soon", None])
@pytest.mark.parametrize("kind", [RetryLater, Snooze])
def test_an_invalid_delay_is_refused_by_the_exceptions_constructor(kind: Any, delay: Any) -> None:
    with pytest.raises(errors.BadRequest, match="delay"):
        kind(delay)


async def test_a_handler_over_its_timeout_is_cancelled_and_nacked() -> None:
    cancelled = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with rig(handler, timeout=0.05) as r:
        await r.deliver(b"a")
        frame = await answer(r.peer, T.NACK, ("retrying",))
        assert frame[4][0][4] == "timed out after 0.05 s"
        assert cancelled.is_set()


async def test_a_handler_that_finishes_despite_its_timeout_is_acked() -> None:
    async def handler(delivery: Delivery) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    async with rig(handler, timeout=0.02) as r:
        await r.deliver(b"a")
        await answer(r.peer, T.ACK)


@pytest.mark.parametrize("raising", [False, True])
async def test_a_worker_leaves_settled_deliveries_alone(raising: bool) -> None:
    async def handler(delivery: Delivery) -> None:
        await delivery.nack(7, "mine")
        if raising:
            raise ValueError

    async with rig(handler) as r:
        await r.deliver(b"a")
        await answer(r.peer, T.NACK, ("retrying",))
        await turns(20)
        assert r.peer.nothing()


async def test_a_settlement_that_fails_does_not_end_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handler(delivery: Delivery) -> None:
        if delivery.body == b"bad":
            raise ValueError

    async with rig(handler) as r:
        await r.deliver(b"bad")
        r.peer.error(await r.peer.next(T.NACK), "stale_receipt", "too late")
        await r.deliver(b"good")
        await answer(r.peer, T.ACK)
    assert "too late" in caplog.text


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (ValueError("no such order"), "failed: ValueError: no such order"),
        (Reject("not ours"), "was rejected: not ours"),
        (RetryLater(60, "closed"), "will be delivered again: closed"),
        (Snooze(60), "was postponed: snoozed for 60"),
        (asyncio.CancelledError(), "failed: the handler raised CancelledError"),
    ],
)
async def test_a_log_line_names_task_topic_key_group_and_attempt(
    error: BaseException, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Who reads a worker's log searches it for what the order is called, not for an id."""

    async def handler(delivery: Delivery) -> None:
        raise error

    caplog.set_level(logging.DEBUG, "tickwheel.worker")
    async with rig(handler) as r:
        r.peer.send(T.DELIVER, r.sub, 1, NOW_MS, ((77, 3, NOW_MS, b"x", {"key": "order-17"}),))
        r.peer.ok(await r.peer.next(), ("dead",))
        await turns(20)
        records = [record for record in caplog.records if "Delivery" in record.getMessage()]
    of = "<Delivery 77 of t 'order-17', group default, attempt 3>"
    assert f"{of} {word}" in [record.getMessage() for record in records]
    # Each line of a delivery, also the one that says how it ended.
    assert any(record.levelname == "ERROR" for record in records)
    assert all(record.getMessage().startswith(of) for record in records)


# --- plain functions -------------------------------------------------------------------------


async def test_a_plain_function_runs_in_a_thread() -> None:
    threads: list[str] = []

    def handler(delivery: Delivery) -> None:
        threads.append(threading.current_thread().name)
        if delivery.body == b"bad":
            raise ValueError("in a thread")
        if delivery.body == b"stop":
            raise StopIteration

    async with rig(handler) as r:
        for body, reason in ((b"bad", "ValueError: in a thread"), (b"stop", "StopIteration: ")):
            await r.deliver(body)
            frame = await answer(r.peer, T.NACK, ("retrying",))
            assert reason in frame[4][0][4]
        await r.deliver(b"good")
        await answer(r.peer, T.ACK)
    assert threads == ["tickwheel-worker-1"] * 3, "it is kept, with what is local to it"


async def test_a_thread_over_its_timeout_keeps_its_lease_until_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on, runs = threading.Event(), []

    def handler(delivery: Delivery) -> None:
        runs.append(delivery.body)
        if delivery.body == b"slow":
            go_on.wait(10)

    async with rig(handler, timeout=0.05, concurrency=1, prefetch=2) as r:
        await r.deliver(b"slow", b"next")
        async with asyncio.timeout(10):
            while "is taking longer than 0.05 s" not in caplog.text:
                await turns()
        await turns(20)
        assert runs == [b"slow"]
        assert not r.peer.sent(T.NACK)
        go_on.set()
        acked = 0
        while acked < 2:
            acked += len((await answer(r.peer, T.ACK))[5])
        assert runs == [b"slow", b"next"]


# --- concurrency -----------------------------------------------------------------------------


async def test_running_handlers_are_limited_by_concurrency() -> None:
    running: list[bytes] = []
    go_on = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        running.append(delivery.body)
        await go_on.wait()

    async with rig(handler, concurrency=2, prefetch=10) as r:
        await r.deliver(*[b"%d" % i for i in range(6)])
        while len(running) < 2:
            await turns()
        await turns(20)
        assert running == [b"0", b"1"]
        go_on.set()
        acked = 0
        while acked < 6:
            acked += len((await answer(r.peer, T.ACK))[5])
        assert len(running) == 6


async def test_subscribe_frames_have_the_handlers_options(client: Client, peer: Peer) -> None:
    worker = Worker(client, signals=False)
    worker.on("a")(nothing)
    worker.on(
        "b",
        group="g",
        concurrency=5,
        prefetch=9,
        retry=Retry.none(),
        lease=timedelta(minutes=1),
    )(nothing)
    running = asyncio.ensure_future(worker.run())
    frames = [await peer.next(T.SUBSCRIBE) for _ in range(2)]
    assert frames[0][3:] == ("a", "default", 32, {})
    options = {"lease_ms": 60_000, "retry": {"kind": "none"}}
    assert frames[1][3:] == ("b", "g", 9, options)
    for frame in frames:
        peer.ok(frame, {"lease_ms": 60_000})
    worker.stop()
    await soon(running)
    assert len(peer.sent(T.UNSUBSCRIBE)) == 2
    assert client.connected, "the client is the caller's"


async def test_run_overrides_the_concurrency(client: Client, peer: Peer) -> None:
    worker = Worker(client, signals=False)
    worker.on("a")(nothing)
    running = asyncio.ensure_future(worker.run(concurrency=3, grace=0))
    frame = await peer.next(T.SUBSCRIBE)
    assert frame[5] == 3
    peer.ok(frame, {"lease_ms": 30_000})
    worker.stop()
    await soon(running)


async def test_fast_handlers_prefetch_more_and_stuck_handlers_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tickwheel.client.worker.LOOK_S", 0.02)
    stuck, started = asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        if delivery.body != b"fast":
            started.set()
            await stuck.wait()

    async with rig(handler, concurrency=2) as r:
        await r.deliver(*[b"fast"] * 200)
        assert (await answered_until(r.peer, T.PREFETCH))[3] > 2
        ids = await r.deliver(b"1", b"2", b"3", b"4")
        await soon(started.wait())
        assert (await answered_until(r.peer, T.RELEASE))[5] == tuple(ids[2:])
        assert r.peer.sent(T.PREFETCH)[-1][3] == 2
        stuck.set()
        await answered_until(r.peer, T.ACK)


async def test_short_handlers_share_an_asyncio_task() -> None:
    tasks: set[Any] = set()

    async def handler(delivery: Delivery) -> None:
        tasks.add(asyncio.current_task())

    async with rig(handler, concurrency=1, prefetch=10) as r:
        await r.deliver(*[b"x"] * 10)
        acked = 0
        while acked < 10:
            acked += len((await answer(r.peer, T.ACK))[5])
    assert len(tasks) == 1


def runners() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "t (default)"]


async def test_idle_asyncio_tasks_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tickwheel.client.worker.WAITING_MAX", 2)
    started, go_on = [], asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.append(delivery.body)
        await go_on.wait()

    async with rig(handler) as r:
        await r.deliver(b"a", b"b", b"c", b"d", b"e")
        while len(started) < 5:
            await turns()
        assert len(runners()) == 5
        go_on.set()
        await answer(r.peer, T.ACK)
        await turns()
        assert len(runners()) == 2
    assert not runners()


@pytest.mark.parametrize("seen", [False, True])
async def test_a_cancelled_idle_asyncio_task_loses_no_delivery(seen: bool) -> None:
    handled = []

    async def handler(delivery: Delivery) -> None:
        handled.append(delivery.body)

    async with rig(handler, concurrency=1) as r:
        await r.deliver(b"a")
        await answered_until(r.peer, T.ACK)
        [runner] = runners()
        runner.cancel()
        if seen:
            await asyncio.wait([runner])
        await r.deliver(b"b")
        await answered_until(r.peer, T.ACK)
    assert handled == [b"a", b"b"]


async def test_handlers_do_not_share_context_variables() -> None:
    word: contextvars.ContextVar[str] = contextvars.ContextVar("word", default="none")
    results = []

    async def handler(delivery: Delivery) -> None:
        results.append(word.get())
        word.set(delivery.body.decode())

    async with rig(handler, concurrency=1, prefetch=10) as r:
        await r.deliver(b"a", b"b", b"c")
        acked = 0
        while acked < 3:
            acked += len((await answer(r.peer, T.ACK))[5])
    assert results == ["none"] * 3


async def test_an_ack_answered_with_another_status_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tickwheel.client")
    async with rig(nothing) as r:
        _, late = await r.deliver(b"a", b"b")
        await answer(r.peer, T.ACK, ("acked", "cancelled"))
        await turns()
    assert (
        f"task {late} of t, group default: the daemon answered its ack with cancelled"
        in caplog.text
    )
    assert caplog.text.count("the daemon answered its ack") == 1


# --- leases ----------------------------------------------------------------------------------


async def test_leases_of_running_handlers_are_extended_in_one_frame() -> None:
    go_on = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        await go_on.wait()

    lease_ms = 2_400  # a busy machine may stand still for longer than a short one
    async with rig(handler, lease_ms=lease_ms) as r:
        ids = await r.deliver(b"a", b"b", b"c")
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(2):
            frame = await answer(r.peer, T.EXTEND)
            assert frame[2:5] == ("t", "default", 1)
            assert (sorted(frame[5]), frame[6], frame[7]) == (ids, (1, 1, 1), lease_ms)
        assert loop.time() - began_s >= 2 * 0.78, "after a third of the lease each"
        go_on.set()
        await answer(r.peer, T.ACK)
        await asyncio.wait({r.running}, timeout=1.0)
        assert r.peer.nothing(), "nothing is extended any more"


@pytest.mark.parametrize("raising", [False, True])
async def test_a_lost_lease_cancels_the_handler_and_acks_nothing(
    raising: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ended = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if raising:
                raise ValueError("in the end") from None
        finally:
            ended.set()

    async with rig(handler, lease_ms=1_500) as r:
        await r.deliver(b"a")
        await answer(r.peer, T.EXTEND, ("stale",))
        await soon(ended.wait())
        await turns(20)
        assert r.peer.nothing()
        assert "stale" in caplog.text


async def test_an_expired_lease_cancels_the_handler() -> None:
    cancelled = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with rig(handler, lease_ms=1_500) as r:
        await r.deliver(b"a")
        await r.peer.next(T.EXTEND)  # never answered
        await soon(cancelled.wait())


async def test_on_a_new_connection_leases_are_claimed_until_that_succeeds() -> None:
    go_on = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        await go_on.wait()

    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        worker = Worker(client, signals=False)
        worker.on("t")(handler)
        running = asyncio.ensure_future(worker.run())
        [task_id] = peer.deliver(await peer.subscribed(9_000), b"a")
        began_s = asyncio.get_running_loop().time()
        while not peer.nothing():
            await turns()
        await turns(20)
        peer.close()
        peer = await daemon.peer()
        frames = {frame[0]: frame for frame in [await peer.next(), await peer.next()]}
        assert frames[T.EXTEND][5] == (task_id,)
        peer.ok(frames[T.SUBSCRIBE], {"lease_ms": 9_000})
        peer.error(frames[T.EXTEND], "internal")
        await answer(peer, T.EXTEND)
        assert asyncio.get_running_loop().time() - began_s < 2.5, "before a third of the lease"
        go_on.set()
        await answer(peer, T.ACK)
        worker.stop()
        await soon(running)


# --- stopping --------------------------------------------------------------------------------


async def test_stop_releases_unstarted_deliveries_and_waits_for_the_rest() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.set()
        await go_on.wait()

    async with rig(handler, concurrency=1, prefetch=10) as r:
        ids = await r.deliver(b"a", b"b", b"c")
        await soon(started.wait())
        r.worker.stop()
        frame = await answer(r.peer, T.RELEASE)
        assert frame[5] == tuple(ids[1:])
        assert len(r.peer.sent(T.UNSUBSCRIBE)) == 1
        assert not r.running.done()
        go_on.set()
        frame = await r.peer.next(T.ACK)
        assert frame[5] == (ids[0],)
        await turns(20)
        assert not r.running.done(), "an ack that is not answered is waited for"
        r.peer.ok(frame)
        await r.ended()


async def test_no_handler_starts_after_stop() -> None:
    begun = []

    async def handler(delivery: Delivery) -> None:
        begun.append(delivery.body)
        r.worker.stop()

    async with rig(handler, concurrency=1, prefetch=10) as r:
        ids = await r.deliver(b"a", b"b", b"c")
        frames = {}
        while set(frames) < {T.ACK, T.RELEASE}:
            frame = await r.peer.next()
            r.peer.ok(frame)
            frames[frame[0]] = frame
        assert frames[T.ACK][5] == (ids[0],)
        assert frames[T.RELEASE][5] == tuple(ids[1:])
        await r.ended()
    assert begun == [b"a"]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_delivery_that_stop_overtakes_is_released(has_begun: bool) -> None:
    handled = []

    async def handler(delivery: Delivery) -> None:
        handled.append(delivery.body)

    def and_stop(delivered: Any) -> None:
        go_on(delivered)
        r.worker.stop()

    async with rig(handler) as r:
        (lane,) = r.worker._lanes
        part, name = (lane, "_begin") if has_begun else (lane._subscription, "deliver")
        go_on = getattr(part, name)
        setattr(part, name, and_stop)
        ids = await r.deliver(b"a")
        frame = await r.peer.next()
        r.peer.ok(frame)
        assert (frame[0], frame[5]) == (T.RELEASE, tuple(ids))
        await r.ended()
    assert handled == []


async def test_handlers_are_cancelled_and_released_after_the_grace() -> None:
    started = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.set()
        await asyncio.Event().wait()

    async with rig(handler, grace=0.05) as r:
        [task_id] = await r.deliver(b"a")
        await soon(started.wait())
        r.worker.stop()
        frame = await answer(r.peer, T.RELEASE)
        assert frame[5] == (task_id,)
        await r.ended()


async def test_a_cancelled_worker_releases_all_deliveries() -> None:
    started = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.set()
        await asyncio.Event().wait()

    async with rig(handler, concurrency=1, prefetch=2) as r:
        ids = await r.deliver(b"a", b"b")
        await soon(started.wait())
        r.running.cancel()
        assert (await answer(r.peer, T.RELEASE))[5] == (ids[1],)
        assert (await answer(r.peer, T.RELEASE))[5] == (ids[0],)
        await asyncio.gather(r.running, return_exceptions=True)
        assert r.running.cancelled()


async def test_a_stuck_handler_does_not_block_the_worker_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tickwheel.client.worker.ABANDON_S", 0.05)
    started, end = asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.set()
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue

    async with rig(handler, grace=0) as r:
        try:
            await r.deliver(b"a")
            await soon(started.wait())
            r.worker.stop()
            await r.ended()
            assert "ignored its cancellation" in caplog.text
        finally:
            end.set()  # else the end of the loop waits for the handler for ever
        await answer(r.peer, T.ACK)


async def test_signals_stop_the_worker_and_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        worker = Worker(client, grace=60)
        worker.on("t")(handler)
        running = asyncio.ensure_future(worker.run())
        peer.deliver(await peer.subscribed(), b"a")
        await soon(started.wait())
        os.kill(os.getpid(), signal.SIGTERM)
        while not peer.sent(T.UNSUBSCRIBE):
            await turns()
        assert not cancelled.is_set(), "the first one lets it finish"
        os.kill(os.getpid(), signal.SIGINT)
        await answer(peer, T.RELEASE)
        await soon(running)
        assert cancelled.is_set()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


async def test_a_worker_stopped_before_run_does_not_connect(daemon: FakeDaemon) -> None:
    client = daemon.client()
    worker = Worker(client)
    worker.on("t")(nothing)
    worker.stop()
    worker.stop()
    await soon(worker.run())
    assert daemon.connections == 0
    with pytest.raises(errors.BadRequest, match="once"):
        await worker.run()


async def test_a_client_that_is_not_connected_is_connected_and_closed(daemon: FakeDaemon) -> None:
    client = daemon.client()
    worker = Worker(client, signals=False)
    worker.on("t")(nothing)
    running = asyncio.ensure_future(worker.run())
    peer = await daemon.peer()
    await peer.subscribed()
    worker.stop()
    await soon(running)
    await peer.gone()
    assert peer.sent(T.BYE)


async def test_a_differing_group_policy_is_kept_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its own stays, now and after a reconnect; the log has the command that changes it, once."""
    differs, command = "retry.delay_ms 1, not 500", f"{TO_CHANGE}tickwheel policy set t …"
    async with FakeDaemon() as daemon, daemon.client() as client:
        worker = Worker(client, signals=False)
        worker.on("t", group="g-1", retry=Retry.fixed(0.5, retries=3))(nothing)
        running = asyncio.ensure_future(worker.run())
        for _ in range(2):
            peer = await daemon.peer()
            peer.auto.discard(T.UNSUBSCRIBE)
            first = await peer.next(T.SUBSCRIBE)
            assert first[6]["retry"]["delay_ms"] == 500
            peer.error(first, "conflict", f"group g-1 of topic t{SET_OTHERWISE}{differs}{command}")
            peer.error(await peer.next(T.UNSUBSCRIBE), "not_found")
            again = await peer.next(T.SUBSCRIBE)
            assert "retry" not in again[6]
            peer.ok(again, {"lease_ms": 30_000})
            peer.auto.add(T.UNSUBSCRIBE)
            await turns()
            assert not running.done()
            peer.close()
        worker.stop()
        await soon(running)
    (said,) = {r.getMessage() for r in caplog.records if "otherwise" in r.getMessage()}
    assert differs in said and said.endswith("code's: tickwheel policy set t …")


async def test_a_reconnect_does_not_update_the_group_settings(
    daemon: FakeDaemon, client: Client
) -> None:
    """A newer release has set it meanwhile: ``update`` is for the start."""
    worker = Worker(client, signals=False, on_mismatch="update")
    worker.on("t", group="g-1", where="n > 1")(nothing)
    running = asyncio.ensure_future(worker.run())
    peer = await daemon.peer()
    await peer.subscribed()
    await worker.started.wait()
    peer.close()
    peer = await daemon.peer()
    peer.auto.discard(T.UNSUBSCRIBE)
    first = await peer.next(T.SUBSCRIBE)
    peer.error(first, "conflict", f"group g-1 of topic t{SET_OTHERWISE}the filter{TO_CHANGE}x")
    peer.error(await peer.next(T.UNSUBSCRIBE), "not_found")
    again = await peer.next(T.SUBSCRIBE)
    assert not peer.sent(T.CONFIGURE) and "where" not in again[6]
    peer.ok(again, {"lease_ms": 30_000})
    peer.auto.add(T.UNSUBSCRIBE)
    worker.stop()
    await soon(running)


def test_an_unknown_on_mismatch_is_refused() -> None:
    with pytest.raises(errors.BadRequest, match="on_mismatch must be one of update, warn, refuse"):
        Worker(Client(), on_mismatch="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "policy",
    [
        Retry.exponential(base=1.5, factor=3, cap=60, retries=5, jitter=0.25),
        Retry.exponential(base=1),
        Retry.fixed(0.05),
        Retry.table([1, 2.5], retries=4),
        Retry.table([1]),
        Retry.named("mine"),
    ],
)
def test_the_spec_of_a_policy_is_what_the_command_line_reads(policy: Retry) -> None:
    assert parse_retry(policy.spec()) == policy
    assert Retry.none().spec() == "none"  # a name to the command line


async def test_a_refused_subscription_ends_the_worker(client: Client, peer: Peer) -> None:
    peer.auto.discard(T.UNSUBSCRIBE)
    worker = Worker(client, signals=False)
    worker.on("t", retry=Retry.none())(nothing)
    running = asyncio.ensure_future(worker.run())
    peer.error(await peer.next(T.SUBSCRIBE), "limit_exceeded", "groups_max")
    with pytest.raises(errors.LimitExceeded, match="groups_max"):
        await soon(running)


@pytest.mark.parametrize("order", [{}, {"order_retry": 0.1}, {"order_failure": "dead"}])
@pytest.mark.parametrize("ahead", [0, 3])
async def test_a_retry_that_cannot_apply_ends_the_worker(order: dict[str, Any], ahead: int) -> None:
    """Where it meets a task with an order key, and nothing says how that is tried again."""
    handled: list[Delivery] = []

    async def handler(delivery: Delivery) -> None:
        handled.append(delivery)

    with_retry = {"retry": Retry.fixed(0.1, retries=2), "concurrency": 1, "prefetch": 8}
    async with rig(handler, **with_retry, **order) as ours:
        await ours.deliver(*[b"plain"] * ahead)
        (ordered,) = ours.peer.deliver(ours.sub, b"ordered", options={"order_key": "k"})
        if order:
            await turns(50)
            assert len(handled) == ahead + 1
            acked = 0  # else it waits for the answers until their time is over
            while acked < ahead + 1:
                acked += len((await answer(ours.peer, T.ACK))[5])
            return
        await answered_until(ours.peer, T.RELEASE)
        await soon(asyncio.wait({ours.running}))
        error = ours.running.exception()
        assert isinstance(error, errors.BadRequest)
        assert str(ordered) in error.message and "add order_retry" in error.message
        assert [delivery.body for delivery in handled] == [b"plain"] * ahead


async def test_closing_the_client_ends_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with rig(nothing) as r:
        await r.worker._client.close()
        with pytest.raises(errors.ClientClosed):
            await r.ended()


# --- registering -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"topic": "a b"}, "topic"),
        ({"group": ""}, "group"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 65_536}, "65535"),
        ({"prefetch": 0}, "prefetch"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"lease": -1}, "lease"),
        ({"retry": "none"}, "retry"),
    ],
)
def test_invalid_handler_options_are_refused_by_the_decorator(
    options: dict[str, Any], word: str
) -> None:
    worker = Worker(Client())
    with pytest.raises(errors.BadRequest, match=word):
        worker.on(**{"topic": "t", **options})(nothing)


def no_parameter() -> None: ...


def two_parameters(delivery: Delivery, more: int) -> None: ...


def named_only(*, delivery: Delivery) -> None: ...


async def several(delivery: Delivery) -> AsyncIterator[int]:
    yield 1


def one_by_one(delivery: Delivery) -> Iterator[int]:
    yield 1


def acks_without_await(delivery: Delivery) -> None:
    if delivery.attempt:
        delivery.ack()


class Handling:
    def __call__(self, delivery: Delivery) -> None: ...

    def gives_up(self, task: Delivery) -> None:
        task.reject("never")

    def works(self, task: Delivery) -> None: ...


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (no_parameter, "no_parameter cannot be called with one argument, the delivery"),
        (two_parameters, "one argument, the delivery: missing a required argument: 'more'"),
        (named_only, "named_only cannot be called"),
        (several, "several must not be a generator"),
        (one_by_one, "one_by_one must not be a generator"),
        (acks_without_await, "plain function and calls delivery.ack, which must be awaited"),
        (Handling().gives_up, "calls delivery.reject"),
        (Handling, "not the class Handling"),
    ],
)
def test_an_uncallable_handler_is_refused_by_the_decorator(handler: Any, words: str) -> None:
    with pytest.raises(errors.BadRequest, match=words):
        Worker(Client()).on("t")(handler)


def test_handlers_of_every_kind_are_accepted() -> None:
    loop = asyncio.new_event_loop()

    def waits_for_it(delivery: Delivery) -> None:
        asyncio.run_coroutine_threadsafe(delivery.ack(), loop).result()

    worker = Worker(Client())
    kinds: list[Any] = [
        nothing, Handling(), Handling().works, partial(two_parameters, more=1), waits_for_it,
        lambda delivery: None, lambda *given: None, lambda delivery, more=1: None, print,
    ]  # fmt: skip
    for number, handler in enumerate(kinds):
        worker.on(f"t{number}")(handler)
    loop.close()


@pytest.mark.parametrize("plain", [True, False])
async def test_a_handler_that_returns_a_coroutine_has_failed(plain: bool) -> None:
    """Nobody awaits it, so nothing was done: an ack would lose the task."""

    async def not_awaited(delivery: Delivery) -> object:
        return nothing(delivery)

    async with rig((lambda delivery: nothing(delivery)) if plain else not_awaited) as r:
        await r.deliver(b"a")
        frame = await answer(r.peer, T.NACK, ("retrying",))
        assert "returned the coroutine nothing, which was never awaited" in str(frame)


async def test_worker_misuse_raises_bad_request() -> None:
    wrong: Any = "tcp://127.0.0.1"
    with pytest.raises(errors.BadRequest, match="Client"):
        Worker(wrong)
    worker = Worker(Client())
    with pytest.raises(errors.BadRequest, match="no handlers"):
        await worker.run()
    worker.on("t")(nothing)
    with pytest.raises(errors.BadRequest, match="already"):
        worker.on("t", group="default")(nothing)
    with pytest.raises(errors.BadRequest, match="function"):
        worker.on("u")(wrong)
    assert worker.on("t", group="other")(nothing) is nothing


def test_the_worker_logger_has_a_null_handler() -> None:
    handlers = logging.getLogger("tickwheel.worker").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
