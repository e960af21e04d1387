"""Who is told that a daemon's lease is over, and that it is held again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T

ROUTE = {"shard": 0, "route": "tcp://a:7355,tcp://b:7355"}
OVER, HELD = (T.LEASE, False), (T.LEASE, True)


async def heard(daemon: InProcess, peer: Peer) -> list[Any]:
    """Return the frames after the answer to HELLO, or since the last call."""
    await daemon.settle()
    return [frame for frame in peer.frames() if frame[0] != T.OK]


async def test_subscribed_clients_hear_of_a_lost_and_regained_lease(tmp_path: Path) -> None:
    async with InProcess(tmp_path, **ROUTE) as daemon:
        asked, another = daemon.connect(lease=True), daemon.connect(lease=True, shard=0)
        silent, refused = daemon.connect(), daemon.connect(lease=False)
        peers = asked, another, silent, refused
        assert [await heard(daemon, peer) for peer in peers] == [[], [], [], []]
        daemon.daemon.listener.set_lease(held=False)
        assert [await heard(daemon, peer) for peer in peers] == [[OVER], [OVER], [], []]
        late, elsewhere = daemon.connect(lease=True), daemon.connect(lease=True, shard=1)
        await daemon.settle()
        assert [frame[0] for frame in late.frames()] == [T.OK, T.LEASE], "behind the greeting"
        daemon.daemon.listener.set_lease(held=True)
        assert await heard(daemon, late) == await heard(daemon, asked) == [HELD]
        assert await heard(daemon, elsewhere) == await heard(daemon, silent) == []
        assert await heard(daemon, daemon.connect(lease=True)) == []


async def test_requests_are_answered_during_a_lost_lease(tmp_path: Path) -> None:
    async with InProcess(tmp_path, **ROUTE) as daemon:
        peer = daemon.connect(lease=True)
        daemon.daemon.listener.set_lease(held=False)
        _, ids = await daemon.ask(peer, T.ENQUEUE, 0, [("t", b"", 60_000)])
        assert (await daemon.ask(peer, T.CANCEL, ids))[0][1] == "cancelled"


async def test_a_single_daemon_reports_a_lost_lease(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as daemon:
        asked, silent = daemon.connect(lease=True), daemon.connect()
        daemon.daemon.listener.set_lease(held=False)
        assert [await heard(daemon, peer) for peer in (asked, silent)] == [[OVER], []]


@pytest.mark.parametrize("said", [1, "yes", None])
async def test_hello_lease_must_be_a_boolean(tmp_path: Path, said: Any) -> None:
    async with InProcess(tmp_path, **ROUTE) as daemon:
        peer = daemon.connect(lease=said)
        await daemon.settle()
        [answer] = peer.frames()
        assert (answer[0], answer[2]) == (T.ERROR, "bad_request")
        assert "lease must be true or false" in answer[3]
