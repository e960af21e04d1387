"""STATUS through the client, and of daemons that the client would not stay with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon, Peer
from support.waiting import soon
from tickwheel import Client, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.client import Active, Status, status_at, statuses
from tickwheel.protocol import Frame


async def test_status_of_the_active_daemon(daemon: FakeDaemon, client: Client) -> None:
    raw = daemon.set_status(state="loading", detail="half way", loaded=5, to_load=9, newer="field")
    status = await soon(client.status())
    assert (status.role, status.state, status.detail) == ("active", "loading", "half way")
    assert (status.epoch, status.loaded, status.to_load) == (1, 5, 9)
    assert (NOW_MS - status.since_ms) == 3_723_000
    assert status.since.tzinfo is not None
    assert (status.store, status.store_ok, status.active) == ("redis://r:6379/0", True, None)
    assert status.serves
    assert dict(status.raw) == raw
    assert status.raw["newer"] == "field"


@pytest.mark.parametrize(
    ("role", "state", "serves"),
    [
        ("active", "ready", True),
        ("active", "loading", True),
        ("active", "store_trouble", False),
        ("active", "draining", False),
        ("standby", "standby", False),
        ("starting", "recovering", False),
    ],
)
def test_status_serves_by_role_and_state(role: str, state: str, serves: bool) -> None:
    raw = FakeDaemon().set_status(role=role, state=state)
    assert Status.of(raw).serves is serves


@pytest.mark.parametrize("answer", [None, 5, [], {}, {"node": "x"}])
async def test_an_answer_of_another_shape_is_a_protocol_error(
    answer: Any, client: Client, peer: Peer
) -> None:
    call = asyncio.ensure_future(client.status())
    peer.ok(await peer.next(T.STATUS), answer)
    with pytest.raises(errors.ProtocolError):
        await soon(call)


async def test_a_standby_is_asked_without_following_it() -> None:
    async with FakeDaemon() as standby, FakeDaemon() as active:
        standby.stand_by(active)
        leader = {"node": "other", "address": active.url, "epoch": 4, "since_ms": 9}
        standby.set_status(role="standby", state="standby", active=leader)
        status = await soon(status_at(standby.url, token="secret"))
        assert status.active == Active(node="other", address=active.url, epoch=4, since_ms=9)
        standby.set_status(role="standby", state="standby", active=leader | {"epoch": None})
        status = await soon(status_at(standby.url, token="secret"))
        assert status.active == Active(node="other", address=active.url, epoch=None, since_ms=9), (
            "it is taking over"
        )
        assert active.connections == 0
        peer = await standby.peer()
        assert peer.hello["token"] == "secret"
        assert peer.hello["session"] is None, "nothing to remember"
        await peer.gone()


async def test_a_daemon_without_status_is_active_and_unknown() -> None:
    async with FakeDaemon() as old:
        asking = asyncio.ensure_future(status_at(old.url))
        peer = await old.peer()
        peer.error(await peer.next(T.STATUS), "unknown_type")
        result = await soon(asking)
        assert (result.role, result.state, result.node) == ("active", "unknown", "fake")
        assert result.serves


async def test_status_of_a_silent_daemon_is_unreachable_in_time() -> None:
    async with FakeDaemon() as silent:
        silent.greet = lambda peer, frame: None
        with pytest.raises(errors.Unreachable, match="0.1 s"):
            await soon(status_at(silent.url, timeout=0.1))


async def test_status_of_a_daemon_that_hangs_up_is_connection_lost() -> None:
    async with FakeDaemon() as daemon:
        daemon.greet = lambda peer, frame: peer.close()
        with pytest.raises(errors.ConnectionLost):
            await soon(status_at(daemon.url))


async def test_status_raises_the_daemons_error() -> None:
    def refuse(peer: Peer, frame: Frame) -> None:
        peer.error(frame, "unauthorized", "the token is wrong")
        peer.close()

    async with FakeDaemon() as daemon:
        daemon.greet = refuse
        with pytest.raises(errors.Unauthorized, match="the token is wrong"):
            await soon(status_at(daemon.url))


async def test_status_at_takes_one_address() -> None:
    with pytest.raises(errors.BadRequest, match="one address"):
        await status_at("tcp://a:1,b:1")


async def test_statuses_include_daemons_named_by_others() -> None:
    async with FakeDaemon() as first, FakeDaemon() as second, FakeDaemon() as active:
        active.set_status(node="c")
        leader = {"node": "c", "address": active.url, "epoch": 1, "since_ms": 9}
        for daemon in (first, second):
            daemon.set_status(role="standby", state="standby", active=leader)
        url = f"tcp://{first.address},127.0.0.1:1,{second.address},{first.address}"
        result = await soon(statuses(url))
        assert list(result) == [first.url, "tcp://127.0.0.1:1", second.url, active.url]
        assert isinstance(result["tcp://127.0.0.1:1"], errors.Unreachable)
        assert isinstance(result[active.url], Status)
        assert [d.connections for d in (first, second, active)] == [1, 1, 1]


async def test_statuses_ask_each_daemon_once() -> None:
    async with FakeDaemon() as standby, FakeDaemon() as active:
        active.set_status(address="tcp://a.name.of.its.own:7355")
        leader = {"node": "c", "address": "tcp://a.name.of.its.own:7355", "epoch": 1, "since_ms": 9}
        standby.set_status(role="standby", state="standby", active=leader)
        result = await soon(statuses(f"{standby.url},{active.address}"))
        assert list(result) == [standby.url, active.url]


@pytest.mark.parametrize("address", ["nonsense://x", "", "tcp://x:0"])
async def test_statuses_skip_an_invalid_leader_address(address: str) -> None:
    async with FakeDaemon() as standby:
        leader = {"node": "c", "address": address, "epoch": 1, "since_ms": 9}
        standby.set_status(role="standby", state="standby", active=leader)
        assert list(await soon(statuses(standby.url))) == [standby.url]
