"""A batch that makes nothing due makes no tick; whatever does, is not left until the timer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import encode

FAR_MS = 3_600_000
TURNS = 20


class Ticks:
    """Counts the ticks of a shard whose clock and timers stand still."""

    def __init__(self, daemon: InProcess, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.daemon, self.peer = daemon, peer
        self.count, self._request = 0, 1_000
        fire = daemon.shard.engine.firing.fire

        def counted(*arguments: Any) -> bool:
            self.count += 1
            return fire(*arguments)

        monkeypatch.setattr(daemon.shard.engine.firing, "fire", counted)

    async def send(self, *frame: Any) -> None:
        """Send it, and let the daemon do what follows at once."""
        self._request += 1
        self.peer.feed(encode((int(frame[0]), self._request, *frame[1:])))
        await self.turn()

    async def turn(self) -> None:
        for _ in range(TURNS):
            await self.daemon.turn()

    async def enqueue(self, *tasks: Any) -> None:
        await self.send(T.ENQUEUE, 0, tasks)

    @property
    def timer_ms(self) -> int:
        """In how many ms the next tick is."""
        return self.daemon.shard.next_tick_mono_ms - self.daemon.shard.clock.read().mono_ms

    def delivered(self) -> list[tuple[int, int]]:
        """Return (id, attempt) of new deliveries."""
        frames = [frame for frame in self.peer.frames() if frame[0] == T.DELIVER]
        return [(item[0], item[1]) for frame in frames for item in frame[4]]


@pytest.fixture
async def ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ticks]:
    """With a subscription to the topic "t", and nothing to do for a second."""
    async with InProcess(tmp_path) as daemon:
        peer = daemon.connect()
        await daemon.ask(peer, T.SUBSCRIBE, 1, "t", "g", 10, None)
        await daemon.settle()
        yield Ticks(daemon, peer, monkeypatch)


async def test_tasks_due_later_cause_no_tick(ticks: Ticks) -> None:
    await ticks.enqueue(("t", b"", FAR_MS), ("u", b"", FAR_MS))
    await ticks.enqueue(("t", b"", FAR_MS, {"key": "k", "ttl_ms": 5}))
    assert ticks.daemon.shard.core.scheduled == 3
    assert ticks.count == 0


async def test_an_ack_causes_no_tick(ticks: Ticks) -> None:
    await ticks.enqueue(("t", b"", 0))
    ((task_id, attempt),) = ticks.delivered()
    before = ticks.count
    await ticks.send(T.ACK, "t", "g", ticks.daemon.shard.epoch, (task_id,), (attempt,))
    assert ticks.daemon.shard.core.in_flight == 0
    assert ticks.count == before


async def test_a_task_that_is_due_before_the_timer_sets_another(ticks: Ticks) -> None:
    await ticks.enqueue(("t", b"", 500))
    assert ticks.count == 1
    await ticks.enqueue(("t", b"", 100))
    assert ticks.count == 2
    await ticks.enqueue(("t", b"", 700))
    assert ticks.count == 2
    ticks.daemon.sources.now_ms += 100
    ticks.daemon.shard.on_timer()
    assert len(ticks.delivered()) == 1


async def test_a_task_due_now_is_delivered_at_once(ticks: Ticks) -> None:
    await ticks.enqueue(("t", b"", 0))
    assert len(ticks.delivered()) == 1


async def test_a_task_due_now_is_delivered_at_once_after_a_clock_jump(ticks: Ticks) -> None:
    ticks.daemon.sources.now_ms += 24 * FAR_MS
    await ticks.enqueue(("t", b"", 0))
    assert len(ticks.delivered()) == 1


async def test_a_retry_sets_the_timer(ticks: Ticks) -> None:
    await ticks.enqueue(("t", b"", 0))
    ((task_id, attempt),) = ticks.delivered()
    nack = task_id, ticks.daemon.shard.epoch, attempt, 50, None
    before = ticks.count
    await ticks.send(T.NACK, "t", "g", (nack,))
    assert ticks.count > before, "the timer is for the retry"
    assert ticks.timer_ms == 50


async def test_a_rescheduled_task_sets_the_timer(ticks: Ticks) -> None:
    await ticks.daemon.ask(ticks.peer, T.ENQUEUE, 0, (("t", b"", FAR_MS, {"key": "k"}),))
    await ticks.send(T.RESCHEDULE, None, {"topic": "t", "key": "k", "delay_ms": 60})
    assert ticks.timer_ms == 60


async def test_a_replaced_task_sets_the_timer(ticks: Ticks) -> None:
    await ticks.daemon.ask(ticks.peer, T.ENQUEUE, 0, (("t", b"a", FAR_MS, {"key": "k"}),))
    replace = {"key": "k", "if_pending": "replace"}
    await ticks.enqueue(("t", b"b", 70, replace))
    assert ticks.timer_ms == 70


async def test_the_next_task_of_an_order_key_is_delivered_with_the_ack(ticks: Ticks) -> None:
    await ticks.enqueue(*[("t", b"", 0, {"order_key": "k"})] * 2)
    ((task_id, attempt),) = ticks.delivered()
    await ticks.send(T.ACK, "t", "g", ticks.daemon.shard.epoch, (task_id,), (attempt,))
    assert len(ticks.delivered()) == 1


async def test_a_slow_store_does_not_repeat_ticks(
    ticks: Ticks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery that no batch holds is to be written after a while; with a batch under way that
    cannot be, and its timer must not ring all the time."""
    gate, commit, shard = asyncio.Event(), ticks.daemon.store.commit, ticks.daemon.shard

    async def stalled(*arguments: Any) -> bool:
        await gate.wait()
        return await commit(*arguments)

    await ticks.enqueue(("t", b"", 0), ("t", b"", 60))
    monkeypatch.setattr(ticks.daemon.store, "commit", stalled)
    await ticks.enqueue(("u", b"", FAR_MS))  # the batch that is under way
    ticks.daemon.pass_time(60)
    await ticks.turn()
    assert len(ticks.delivered()) == 2
    ticks.daemon.sources.now_ms += 40  # the first of them has waited for 100 ms, the other for 40
    before = ticks.count
    shard.on_timer()
    set_ms: list[int] = []
    assert shard._alarm is not None
    monkeypatch.setattr(shard._alarm, "set", set_ms.append)
    shard.wake()
    await ticks.turn()
    assert ticks.count == before + 2
    assert min(set_ms) > 0, "the timer is for something that can be done then"
    gate.set()
    await ticks.turn()
    assert not shard.core.unsaved[0].checkpointed, "the other one has time"
    assert ticks.timer_ms == 60, "its timer is set again"
