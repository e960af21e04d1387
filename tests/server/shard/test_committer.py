"""The commit, precisely: no reply before the batch it rests on, whatever the store answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from support.shard_rig import NOW_MS, Sources
from support.waiting import soon
from tickwheel.clock import Clock, Now
from tickwheel.engine.engine import Engine
from tickwheel.engine.sessions import StoredAnswer
from tickwheel.engine.state import EngineConfig
from tickwheel.engine.topics import Subscriber
from tickwheel.history.daemon import History
from tickwheel.model.kinds import Effects
from tickwheel.model.records import Outcome
from tickwheel.persistence.contract import CommitRefused, CommitUnknown, StoreBroken
from tickwheel.persistence.memory import MemoryStore
from tickwheel.server.shard import committer as committer_module
from tickwheel.server.shard.committer import Committer
from tickwheel.server.shard.reads import Reader
from tickwheel.server.tcp.connection import ids_of


class GatedStore(MemoryStore):
    """Each commit waits for the test to say how it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: asyncio.Queue[tuple[int, Effects]] = asyncio.Queue()
        self.verdicts: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        await self.arrived.put((n, effects))
        verdict = await self.verdicts.get()
        if verdict is not None:
            raise verdict
        return await super().commit(epoch, owner, n, effects)


class Peer:
    """A client; its answers as frames."""

    label = "shop 1.2.3.4:5"

    def __init__(self) -> None:
        self.frames: list[tuple[object, ...]] = []
        self.arrived = asyncio.Event()

    def accepted(self, outcomes: Sequence[StoredAnswer]) -> None:
        self.frames += [
            (65, request, (accepted_ms, ids_of(first, count)))
            for request, first, count, accepted_ms in outcomes
        ]

    def answer_to(self, request: int, value: object) -> tuple[object, ...]:
        return 65, request, value

    def give(self, answer: Any) -> None:
        self.frames.append(answer)

    def error(self, request: int, code: str, message: str) -> None:
        self.frames.append((66, request, code, message))

    def flush(self) -> None:
        self.arrived.set()

    async def next(self) -> tuple[object, ...]:
        while not self.frames:
            self.arrived.clear()
            await soon(self.arrived.wait())
        return self.frames.pop(0)


class Bench:
    """An engine, a store whose commits are gated, and a committer between them."""

    def __init__(self, history: History | None = None) -> None:
        self.history = history

    async def start(self) -> Bench:
        self.store, history = GatedStore(), self.history
        opened = await self.store.open("me", NOW_MS)
        recorder = history.begin(opened) if history is not None else None
        self.engine = Engine(EngineConfig(), opened.epoch, opened.id_mark, NOW_MS, recorder)
        self.notices: list[str] = []
        self.landings = 0
        self.sources = Sources()
        self.clock = Clock(86_400_000, self.sources)
        self.committer = Committer(
            self.engine,
            self.store,
            Reader(self.engine.core, self.store),
            self.clock,
            owner="me",
            epoch=opened.epoch,
            last_batch=opened.last_batch,
            outcome_timeout_s=0.0,
            landed=self._landed,
            on_event=lambda event, text: self.notices.append(event),
            history=history,
        )
        self.running = asyncio.create_task(self.committer.run())
        session = self.engine.core.sessions.open(b"s" * 16, NOW_MS, 0)
        assert session is not None
        self.session = session
        return self

    def _landed(self, now: Now, wait_ms: int) -> None:
        self.landings += 1

    def enqueue(self, peer: Peer, request: int, topic: str = "t") -> None:
        new_tasks = [(topic, NOW_MS + 5_000, b"x", None)]
        self.engine.intake.enqueue(peer, self.session, request, new_tasks, 1, NOW_MS)
        self.committer.kick()

    async def arrived(self) -> tuple[int, Effects]:
        return await soon(self.store.arrived.get())

    def let(self, verdict: Exception | None = None) -> None:
        self.store.verdicts.put_nowait(verdict)

    async def stop(self) -> None:
        if not self.running.done():
            self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(committer_module, "UNKNOWN_RETRY_S", 0)
    monkeypatch.setattr(committer_module, "REFUSED_RETRY_S", 0)
    made = await Bench().start()
    yield made
    await made.stop()


async def test_an_enqueue_is_answered_only_when_its_batch_is_durable(bench: Bench) -> None:
    peer = Peer()
    bench.enqueue(peer, 1)
    await bench.arrived()
    assert peer.frames == []
    bench.let()
    frame = await peer.next()
    assert frame[:2] == (65, 1)
    assert bench.engine.core.scheduled == 1


async def test_requests_during_a_commit_join_the_next_batch(bench: Bench) -> None:
    first, second = Peer(), Peer()
    bench.enqueue(first, 1)
    number, _ = await bench.arrived()
    bench.enqueue(second, 2)
    bench.enqueue(second, 3)
    bench.let()
    assert (await first.next())[1] == 1
    following, effects = await bench.arrived()
    assert following == number + 1
    assert len(effects.enqueued) == 2
    assert second.frames == []
    bench.let()
    assert [(await second.next())[1], (await second.next())[1]] == [2, 3]


async def test_a_reply_without_effects_waits_for_the_current_commit(bench: Bench) -> None:
    producer, reader = Peer(), Peer()
    bench.enqueue(producer, 1)
    await bench.arrived()
    bench.committer.reply(reader, 7, None)
    assert reader.frames == []
    bench.let()
    assert await reader.next() == (65, 7, None)


async def test_a_reply_waits_for_the_open_batch(bench: Bench) -> None:
    producer, reader = Peer(), Peer()
    bench.enqueue(producer, 1)
    await bench.arrived()
    bench.enqueue(producer, 2)
    bench.committer.reply(reader, 7, None)
    bench.let()
    await bench.arrived()
    assert reader.frames == []
    bench.let()
    assert await reader.next() == (65, 7, None)


async def test_a_reply_without_a_batch_is_sent_at_once(bench: Bench) -> None:
    peer = Peer()
    bench.committer.reply(peer, 7, None)
    assert peer.frames == [(65, 7, None)]


async def test_a_repeat_of_a_staged_request_is_answered_with_its_batch(bench: Bench) -> None:
    first, again = Peer(), Peer()
    bench.enqueue(first, 1)
    await bench.arrived()
    assert not bench.engine.intake.repeat(again, bench.session, bench.session.answers[1])
    assert again.frames == []
    bench.let()
    assert await first.next() == await again.next()


async def test_a_refused_batch_refuses_its_enqueues_and_forgets_their_requests(
    bench: Bench,
) -> None:
    peer, again = Peer(), Peer()
    bench.enqueue(peer, 1)
    await bench.arrived()
    bench.engine.intake.repeat(again, bench.session, bench.session.answers[1])
    bench.let(CommitRefused("the disk says no"))
    for caller in (peer, again):
        frame = await caller.next()
        assert frame[:3] == (66, 1, "refused")
    assert bench.session.answers == {}
    assert bench.engine.core.scheduled == 0
    # The same request may come again and is a new one, under the number that was not used.
    bench.enqueue(peer, 1)
    for _ in range(3):
        bench.let()
    assert (await peer.next())[:2] == (65, 1)
    assert bench.engine.core.scheduled == 1


async def test_a_refused_batch_keeps_its_acks_for_the_next_one(bench: Bench) -> None:
    engine, core = bench.engine, bench.engine.core
    producer, consumer = Peer(), Peer()
    new_tasks = [("t", NOW_MS, b"x", None)]
    engine.intake.enqueue(producer, bench.session, 1, new_tasks, 1, NOW_MS)
    bench.committer.kick()
    await bench.arrived()
    bench.let()
    await producer.next()
    group = engine.grouping.group(core.topic("t"), "g", NOW_MS)
    engine.subscriptions.subscribe(Subscriber(None, group, 10, 30_000))
    engine.firing.fire(NOW_MS, 10)
    (dispatch,), _ = engine.delivery.dispatch(NOW_MS, 0, 10)
    ((row, attempt, _),) = dispatch.items
    assert engine.settlement.ack(group, core.epoch, [row.id], [attempt]) == []
    bench.committer.reply(consumer, 9, None)
    bench.enqueue(producer, 2)
    number, effects = await bench.arrived()
    assert effects.ended == {row.id: Outcome.ACKED}
    bench.let(CommitRefused("no room", full=True))
    assert (await producer.next())[2] == "store_full"
    assert consumer.frames == []
    again, effects = await bench.arrived()
    assert again == number
    assert effects.enqueued == {}
    assert effects.ended == {row.id: Outcome.ACKED}
    bench.let()
    assert await consumer.next() == (65, 9, None)
    assert bench.committer.full
    assert "store_full" in bench.notices


async def test_an_unknown_outcome_is_retried_under_the_same_number(bench: Bench) -> None:
    peer, later = Peer(), Peer()
    bench.enqueue(peer, 1)
    number, effects = await bench.arrived()
    bench.enqueue(later, 2)
    bench.let(CommitUnknown("no answer"))
    # The producer that cannot wait gets an error; the outcome stays for its resend.
    assert (await peer.next())[2] == "outcome_unknown"
    again, same = await bench.arrived()
    assert (again, same) == (number, effects)
    bench.let()
    await bench.committer.barrier()
    bench.enqueue(later, 3)
    following, _ = await bench.arrived()
    assert following == number + 1
    assert 1 in bench.session.answers
    assert bench.engine.intake.repeat(peer, bench.session, bench.session.answers[1])


async def test_a_broken_store_ends_the_committer_without_answers(bench: Bench) -> None:
    peer = Peer()
    bench.enqueue(peer, 1)
    await bench.arrived()
    bench.let(StoreBroken("fsync failed"))
    with pytest.raises(StoreBroken):
        await soon(bench.running)
    assert peer.frames == []


async def test_stop_commits_the_open_batch(bench: Bench) -> None:
    peer = Peer()
    bench.enqueue(peer, 1)
    stopping = asyncio.create_task(bench.committer.stop(bench.running))
    await bench.arrived()
    bench.let()
    await soon(stopping)
    assert (await peer.next())[:2] == (65, 1)


async def test_a_barrier_passes_when_everything_before_it_is_durable(bench: Bench) -> None:
    bench.enqueue(Peer(), 1)
    await bench.arrived()
    passed = asyncio.create_task(bench.committer.barrier())
    await asyncio.sleep(0)
    assert not passed.done()
    bench.let()
    await soon(passed)


async def test_a_timed_barrier_stores_the_time_even_if_nothing_has_changed(bench: Bench) -> None:
    bench.sources.now_ms += 700
    passed = asyncio.create_task(bench.committer.barrier(is_timed=True))
    _, effects = await bench.arrived()
    assert (effects.is_empty(), effects.position_ms) == (True, NOW_MS + 700)
    bench.let()
    await soon(passed)


async def test_the_next_batch_is_with_the_store_while_replies_are_written(bench: Bench) -> None:
    seen: list[int] = []

    class Looking(Peer):
        def flush(self) -> None:
            seen.append(bench.store.arrived.qsize())
            super().flush()

    first, second = Looking(), Peer()
    bench.enqueue(first, 1)
    number, _ = await bench.arrived()
    bench.enqueue(second, 2)
    bench.let()
    await first.next()
    assert seen == [1]
    assert second.frames == []
    assert (await bench.arrived())[0] == number + 1
    # A repeat of a durable request does not wait for the next batch.
    session = bench.session
    assert bench.engine.intake.repeat(first, session, session.answers[1])
    assert not bench.engine.intake.repeat(first, session, session.answers[2])
    bench.let(CommitRefused("not this one"))
    assert (await second.next())[2] == "refused"
    assert list(session.answers) == [1]


async def test_an_idle_daemon_stores_the_time_once_an_hour(bench: Bench) -> None:
    """A start compares its clock with it: an idle month must not look like a wrong clock."""
    hour_ms, peer = committer_module.MARK_TIME_MS, Peer()
    bench.committer.mark_time(0)
    for mono_ms in (1, hour_ms - 1):
        bench.committer.mark_time(mono_ms)
    assert bench.engine.core.open.is_empty()
    bench.engine.firing.fire(NOW_MS + 5, 100)
    bench.committer.mark_time(hour_ms)
    number, effects = await bench.arrived()
    assert (effects.is_empty(), effects.position_ms) == (True, NOW_MS + 5)
    bench.let()
    bench.enqueue(peer, 1)
    assert (await bench.arrived())[0] == number + 1
    bench.let()
    await peer.next()
    bench.committer.mark_time(hour_ms + 1)
    bench.committer.mark_time(2 * hour_ms)
    assert bench.engine.core.open.is_empty(), "that batch gave it the time"
