"""Acks for whose answer nobody waits gather: they begin no batch, and hold nothing up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import encode

LONG_MS = 1_000
"""Longer than a test looks: what gathers is still there."""
TURNS = 20


class Consumer:
    """A peer with a subscription, which acks what it has by hand."""

    def __init__(self, daemon: InProcess, peer: Peer) -> None:
        self.daemon, self.peer = daemon, peer
        self.held: list[tuple[int, int]] = []
        self.epoch = 0
        self.answered: set[int] = set()
        self._request = 1_000

    async def look(self) -> None:
        """Let the daemon do what it does at once, without asking it to commit."""
        for _ in range(TURNS):
            await self.daemon.turn()
        for frame in self.peer.frames():
            if frame[0] == T.DELIVER:
                self.epoch = frame[2]
                self.held += [(item[0], item[1]) for item in frame[4]]
            elif frame[0] == T.OK:
                self.answered.add(frame[1])
            else:
                raise AssertionError(frame)

    def ack(self, *, may_gather: bool = True) -> int:
        """Ack the oldest delivery; the number of the request."""
        task_id, attempt = self.held.pop(0)
        self._request += 1
        ack = (T.ACK, self._request, "t", "g", self.epoch, (task_id,), (attempt,), may_gather)
        self.peer.feed(encode(ack))
        return self._request

    async def has_answer(self, request: int) -> bool:
        await self.look()
        return request in self.answered


@asynccontextmanager
async def consumer(
    folder: Path, prefetch: int = 10, options: Any = None, **settings: Any
) -> AsyncIterator[Consumer]:
    """With three tasks of an order key that are due, and two without."""
    async with InProcess(folder, **({"ack_gather_ms": LONG_MS} | settings)) as daemon:
        peer = daemon.connect()
        await daemon.ask(peer, T.GROUP_CREATE, "t", "g", None)
        for key in ("k", None, None, "k", "k"):
            option = {"order_key": key} if key else None
            await daemon.ask(peer, T.ENQUEUE, 0, (("t", b"", 0, option),))
        result = Consumer(daemon, peer)
        peer.feed(encode((T.SUBSCRIBE, 999, 1, "t", "g", prefetch, options)))
        await daemon.settle()
        await result.look()
        yield result


def batches(found: Consumer) -> int:
    return found.daemon.shard.committer.last_batch


async def enqueue(found: Consumer) -> None:
    found.peer.feed(encode((T.ENQUEUE, 5_000, 5_000, (("other", b"", 60_000),))))


async def test_a_gathering_ack_joins_the_next_batch(tmp_path: Path) -> None:
    async with consumer(tmp_path) as found:
        found.held.pop(0)  # of the order key
        before = batches(found)
        first, second = found.ack(), found.ack()
        assert not await found.has_answer(first)
        assert batches(found) == before
        await enqueue(found)
        assert await found.has_answer(first) and await found.has_answer(second)
        assert batches(found) == before + 1


async def test_an_awaited_ack_commits_the_gathered_acks(tmp_path: Path) -> None:
    async with consumer(tmp_path) as found:
        found.held.pop(0)
        first = found.ack()
        assert not await found.has_answer(first)
        second = found.ack(may_gather=False)
        assert await found.has_answer(first) and await found.has_answer(second)


async def test_a_single_ack_waits_for_ack_gather_ms(tmp_path: Path) -> None:
    async with consumer(tmp_path, ack_gather_ms=1) as found:
        found.held.pop(0)
        request = found.ack()
        while not await found.has_answer(request):
            pass


async def test_ack_gather_ms_0_never_waits(tmp_path: Path) -> None:
    async with consumer(tmp_path, ack_gather_ms=0) as found:
        found.held.pop(0)
        assert await found.has_answer(found.ack())


async def test_the_next_of_an_order_key_does_not_wait(tmp_path: Path) -> None:
    async with consumer(tmp_path) as found:
        assert len(found.held) == 3
        request = found.ack()
        assert await found.has_answer(request)
        assert len(found.held) == 3, "the next of the key has come"


async def test_a_consumer_without_credit_does_not_wait(tmp_path: Path) -> None:
    async with consumer(tmp_path, prefetch=1, acks_ahead_max=0) as found:
        (first,) = found.held
        assert await found.has_answer(found.ack())
        (second,) = found.held
        assert second != first
        assert await found.has_answer(found.ack())


async def test_a_batch_that_has_gathered_enough_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tickwheel.server.shard.committer.GATHERED_MAX", 2)
    async with consumer(tmp_path) as found:
        found.held.pop(0)
        first = found.ack()
        assert not await found.has_answer(first)
        second = found.ack()
        assert await found.has_answer(first) and await found.has_answer(second)


async def test_tasks_due_during_gathering_are_delivered_at_once(tmp_path: Path) -> None:
    async with consumer(tmp_path) as found:
        await found.daemon.ask(found.peer, T.ENQUEUE, 0, (("t", b"", 50),))
        await found.look()
        found.held.pop(0)
        request, before = found.ack(), batches(found)
        assert not await found.has_answer(request)
        found.daemon.pass_time(50)
        assert not await found.has_answer(request)
        assert len(found.held) == 2, "one was there, one has come"
        assert batches(found) == before


async def test_a_consumer_that_runs_out_of_credit_does_not_wait(tmp_path: Path) -> None:
    async with consumer(tmp_path, prefetch=4, acks_ahead_max=0) as found:
        await found.daemon.ask(found.peer, T.ENQUEUE, 0, (("t", b"", 50),) * 2)
        await found.look()
        assert len(found.held) == 3, "there is room for one more"
        found.held.pop(0)
        request = found.ack()
        assert not await found.has_answer(request)
        found.daemon.pass_time(50)
        assert await found.has_answer(request)
        assert len(found.held) == 3, "one was there, one had room, one has got the ack's"


async def test_changes_by_a_tick_end_the_gathering(tmp_path: Path) -> None:
    async with consumer(tmp_path) as found:
        task = ("unheard", b"", 50, {"ttl_ms": 50})
        await found.daemon.ask(found.peer, T.ENQUEUE, 0, (task,))
        await found.look()
        found.held.pop(0)
        request = found.ack()
        assert not await found.has_answer(request)
        found.daemon.pass_time(200)  # it expires
        assert await found.has_answer(request)


async def test_a_stop_commits_gathered_acks(tmp_path: Path) -> None:
    async with consumer(tmp_path) as found:
        found.held.pop(0)
        task_id = found.held[0][0]
        assert not await found.has_answer(found.ack())
        store = found.daemon.store
        await found.daemon.shard.stop()
        assert await store.read([task_id]) == {}


async def test_may_gather_must_be_a_boolean(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as daemon:
        peer = daemon.connect()
        ack = T.ACK, "t", "g", 1, (5,), (1,)
        ((code, message),) = await daemon.send(peer, (*ack, 1))
        assert code == "bad_request" and "may_gather must be true or false, not 1" in message
        ((code, message),) = await daemon.send(peer, (*ack, True, None))
        assert code == "bad_request" and "5 fields, not 7" in message
