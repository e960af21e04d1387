"""Which ends of a connection count as the death of a consumer, and how they are reported."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from support.shard_rig import Peer, ShardRig
from tickwheel.api.frames import FrameType as T
from tickwheel.engine.settlement import Settlement
from tickwheel.model.records import CONSUMER_DIED
from tickwheel.server.shard import enqueue

GRACE_MS = 5_000
End = Callable[[ShardRig, Peer], None]
WHO = {"client": "mailer", "host": "web-3", "pid": 812}


@pytest.fixture
async def rig() -> AsyncIterator[ShardRig]:
    made = await ShardRig(heartbeat_timeout_s=30).start()
    yield made
    await made.stop()


async def consumer(rig: ShardRig, **who: Any) -> Peer:
    """It has one delivery of the task that there is."""
    peer = await rig.peer(heartbeat=True, **who)
    assert (await peer.call(T.SUBSCRIBE, 1, "t", "g", 1, {}))[0] == T.OK

    def has_come() -> bool:
        peer._read()
        return any(frame[0] == T.DELIVER for frame in peer._frames)

    await rig.until(has_come)
    return peer


async def ended(rig: ShardRig, peer: Peer, end: End) -> tuple[str, int, int]:
    """(reason of its last failure, failures, deaths) when the grace is over."""
    end(rig, peer)
    await rig.settle()
    rig.pass_time(GRACE_MS)
    group = rig.core.find_group("t", "g")
    assert group is not None
    await rig.until(lambda: not group.flight)
    (attempts,) = group.delivery_attempts.values()
    return attempts.past.failures[-1].reason, attempts.past.failed, attempts.past.deaths


def breaks(rig: ShardRig, peer: Peer) -> None:
    rig.sources.now_ms += 1_200
    peer.lose()


def falls_silent(rig: ShardRig, peer: Peer) -> None:
    peer.connection.end_silent(30_000)


def sends_nonsense(rig: ShardRig, peer: Peer) -> None:
    peer.feed(b"\xff" * 64)


def is_dismissed(rig: ShardRig, peer: Peer) -> None:
    peer.connection.end("unauthorized", "its token was revoked")


def does_not_read(rig: ShardRig, peer: Peer) -> None:
    peer.connection._abort_slow_reader()


def while_the_daemon_stops(rig: ShardRig, peer: Peer) -> None:
    rig.shard.draining = True
    peer.lose()


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (breaks, "process 812 on web-3: its connection broke 1.2 s after its last message"),
        (falls_silent, "process 812 on web-3: silent for 30 s"),
    ],
)
async def test_a_broken_connection_counts_as_a_death(rig: ShardRig, end: End, told: str) -> None:
    peer = await rig.peer()
    await peer.enqueue(("t", b"x", 0))
    result = await ended(rig, await consumer(rig, **WHO), end)
    assert result == (f"{CONSUMER_DIED}: {told}", 0, 1)
    stats = (await peer.call(T.STATS))[2]
    assert (stats["deaths"], stats["topics"]["t"]["groups"]["g"]["deaths"]) == (1, 1)


async def test_an_anonymous_consumer_can_die(rig: ShardRig) -> None:
    peer = await rig.peer()
    await peer.enqueue(("t", b"x", 0))
    reason, _, deaths = await ended(rig, await consumer(rig), breaks)
    assert reason.startswith(f"{CONSUMER_DIED}: its connection broke") and deaths == 1


@pytest.mark.parametrize(
    "end", [sends_nonsense, is_dismissed, does_not_read, while_the_daemon_stops]
)
async def test_a_connection_ended_by_the_daemon_is_no_death(rig: ShardRig, end: End) -> None:
    peer = await rig.peer()
    await peer.enqueue(("t", b"x", 0))
    assert await ended(rig, await consumer(rig, **WHO), end) == ("connection lost", 1, 0)


async def test_bye_releases_the_deliveries(rig: ShardRig) -> None:
    """Also through a subscription that is open still: it gets nothing more."""
    peer = await rig.peer()
    await peer.enqueue(*(("t", b"x", 0) for _ in range(3)))
    leaver = await rig.peer(**WHO)
    await leaver.call(T.SUBSCRIBE, 1, "t", "g", 3, {})
    group = rig.core.find_group("t", "g")
    assert group is not None
    await rig.until(lambda: len(group.flight) == 3)
    ids = list(group.flight)
    assert (await leaver.call(T.BYE))[0] == T.OK
    assert (len(group.ready), group.flight, group.delivery_attempts) == (3, {}, {})
    again = await consumer(rig)
    (frame,) = [frame for frame in again.frames() if frame[0] == T.DELIVER]
    assert [(item[0], item[1]) for item in frame[4]] == [(ids[0], 2)]


async def test_bye_releases_many_deliveries_in_steps(
    rig: ShardRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueue, "RELEASED_PER_STEP", 4)
    peer, leaver = await rig.peer(), await rig.peer(**WHO)
    await peer.enqueue(*(("t", b"x", 0) for _ in range(10)))
    await leaver.call(T.SUBSCRIBE, 1, "t", "g", 10, {})
    group = rig.core.find_group("t", "g")
    assert group is not None
    await rig.until(lambda: len(group.flight) == 10)
    ids, steps, release_all = list(group.flight), list[int](), Settlement.release_all

    def released(*args: Any) -> None:
        release_all(*args)
        steps.append(len(group.flight))

    monkeypatch.setattr(Settlement, "release_all", released)
    assert (await leaver.call(T.BYE))[0] == T.OK
    assert (steps, group.delivery_attempts) == ([6, 2, 0], {})
    assert group.ready.take(10) == ids


async def test_the_next_delivery_has_the_number_of_deaths(rig: ShardRig) -> None:
    peer = await rig.peer()
    await peer.enqueue(("t", b"x", 0, {"tag": "a"}))
    await ended(rig, await consumer(rig, **WHO), breaks)
    rig.pass_time(1_000)
    again = await consumer(rig)
    (frame,) = [frame for frame in again.frames() if frame[0] == T.DELIVER]
    ((_, attempt, _, _, options),) = frame[4]
    assert (attempt, options) == (2, {"tag": "a", "deaths": 1})
