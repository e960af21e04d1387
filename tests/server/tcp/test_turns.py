"""What came in one piece is looked at a share at a time, whatever it is and however many send it:
frames are counted between the turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from support.shard_rig import Peer, ShardRig
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import encode
from tickwheel.server.tcp.connection import Connection
from tickwheel.server.tcp.listener import ProducerFrames
from tickwheel.server.tcp.shared import (
    FRAME_STEPS,
    PLAIN_RUN_MAX,
    PLAIN_RUN_MIN,
    STEPS_AT_A_TIME,
    STEPS_PER_TURN,
    Turns,
)

DAY_MS = 86_400_000
FRAMES = 3_000
FLOODS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "lists": lambda n: (T.LIST, n, {"key": "x"}),
    "pulls": lambda n: (T.PULL, n, "far", "g", 1, 60_000, None),
    "pings": lambda n: (T.PING, n),
    "acks": lambda n: (T.ACK, n, "far", "g", 1, (5,), (1,)),
    "nonsense": lambda n: (T.CANCEL, n, "what?"),
    "unknown": lambda n: (120, n),
    "enqueues": lambda n: (T.ENQUEUE, n, 0, (("far", b"", DAY_MS),)),
    "windows": lambda n: (T.ENQUEUE, n, 0, (("far", b"", DAY_MS, {"within_ms": 5}),)),
}


@pytest.fixture
async def rig() -> AsyncIterator[ShardRig]:
    made = await ShardRig().start()
    yield made
    await made.stop()


class Watch:
    """Counts what is looked at in each turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = self.offered = 0
        self.turns: list[tuple[int, int]] = []
        handle, plain = Connection._handle, ProducerFrames.enqueue_plain

        def handling(*args: Any) -> None:
            self.steps += FRAME_STEPS
            handle(*args)

        def taking(own: Any, peer: Any, frames: Any, start: int, stop: int, now: Any) -> int:
            reached = plain(own, peer, frames, start, stop, now)
            self.steps += reached - start
            self.offered += stop - start
            return reached

        monkeypatch.setattr(Connection, "_handle", handling)
        monkeypatch.setattr(ProducerFrames, "enqueue_plain", taking)

    async def run(self) -> None:
        while True:
            before = self.steps, self.offered
            await asyncio.sleep(0)
            self.turns.append((self.steps - before[0], self.offered - before[1]))


def piece(kind: str, count: int = FRAMES) -> bytes:
    return b"".join(encode(FLOODS[kind](n)) for n in range(1_000, 1_000 + count))


async def answered(peer: Peer, count: int) -> list[int]:
    """Wait for `count` answers and return their request numbers."""
    results: list[int] = []
    for _ in range(20_000):
        results += [frame[1] for frame in peer.frames() if frame[0] in (T.OK, T.ERROR)]
        if len(results) >= count:
            return results
        await asyncio.sleep(0)
    raise AssertionError(f"{len(results)} of {count} answers")


@pytest.mark.parametrize("kind", FLOODS)
@pytest.mark.parametrize("senders", [1, 5])
async def test_a_large_read_is_handled_in_shares(
    rig: ShardRig, monkeypatch: pytest.MonkeyPatch, kind: str, senders: int
) -> None:
    watch = Watch(monkeypatch)
    peers, other = [await rig.peer() for _ in range(senders)], await rig.peer()
    assert (await other.enqueue(("far", b"", DAY_MS)))[0] == T.OK
    watching = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    for peer in peers:
        peer.feed(piece(kind, FRAMES // senders))
    assert watch.steps <= STEPS_PER_TURN + PLAIN_RUN_MAX, "all of it at once"
    begun = watch.steps
    assert (await other.enqueue(("far", b"", DAY_MS)))[0] == T.OK
    if kind != "pulls":
        for peer in peers:
            result = await answered(peer, FRAMES // senders)
            assert len(set(result)) == len(result) == FRAMES // senders, "each once"
    else:
        await rig.until(lambda: all(not peer.connection._frames for peer in peers))
    watching.cancel()
    most, offered = (max(column) for column in zip(*watch.turns, strict=True))
    assert max(begun, most) <= STEPS_PER_TURN + PLAIN_RUN_MAX
    few = STEPS_PER_TURN // FRAME_STEPS * PLAIN_RUN_MIN
    assert offered <= STEPS_PER_TURN + few + senders * PLAIN_RUN_MAX
    assert all(peer.transport.reading for peer in peers)
    assert not rig.held


async def test_other_connections_are_served_during_a_large_read(rig: ShardRig) -> None:
    busy, other = await rig.peer(), await rig.peer()
    busy.feed(piece("lists", 20_000))
    assert busy.connection._frames and not busy.transport.reading
    assert (await other.enqueue(("far", b"", DAY_MS)))[0] == T.OK
    assert busy.connection._frames, "it did not wait for all of it"
    assert len(await answered(busy, 20_000)) == 20_000


async def test_a_connection_lost_while_waiting_leaves_no_state(rig: ShardRig) -> None:
    busy = await rig.peer()
    busy.feed(piece("lists", 5_000))
    assert busy.connection._frames
    busy.lose()
    await rig.settle()
    assert not busy.connection._frames and not rig.held
    assert (await (await rig.peer()).enqueue(("far", b"", DAY_MS)))[0] == T.OK


class Member:
    def __init__(self, turns: Turns[Any], frames: int) -> None:
        self.turns, self.left = turns, frames
        self.shares: list[int] = []

    def resume(self) -> None:
        used = 0
        while self.left and not self.turns.is_over(used):
            self.turns.take(FRAME_STEPS)
            used += FRAME_STEPS
            self.left -= 1
        self.shares.append(used)
        if self.left:
            self.turns.wait(self)


def test_waiting_connections_take_turns() -> None:
    soon: list[Callable[[], None]] = []
    turns = Turns[Any](soon.append)
    large, small = Member(turns, 10_000), [Member(turns, 10) for _ in range(6)]
    large.resume()
    for member in small:
        turns.wait(member)
    passed = 0
    while any(member.left for member in small):
        passed += 1
        act = soon.pop()
        assert not soon, "one call for all"
        act()
    assert passed <= 2 and large.left
    assert large.shares[0] == STEPS_PER_TURN, "nobody waited then"
    assert max(large.shares[1:], default=0) <= STEPS_AT_A_TIME, "others do now"
