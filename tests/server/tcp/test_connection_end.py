"""How a connection ends, whatever its peer did before."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.shard_rig import FakeTransport, Peer, ShardRig
from support.waiting import comes
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import encode
from tickwheel.server.shard.operations import StandbyOperations
from tickwheel.server.tcp import connection as connections
from tickwheel.server.tcp.listener import Listener


class _WithSocket:
    """A transport's socket, as ``get_extra_info`` gives it."""

    def __init__(self, peer: Peer) -> None:
        self.sock = socket.socket()
        before = peer.transport.get_extra_info

        def get_extra_info(name: str, default: Any = None) -> Any:
            return self.sock if name == "socket" else before(name, default)

        peer.transport.get_extra_info = get_extra_info  # type: ignore[method-assign]  # a fake


async def test_an_abort_after_a_disconnect_has_no_effect() -> None:
    """A deposed daemon says goodbye and aborts a second later: most peers have left by then."""
    rig = await ShardRig().start()
    for gone in (False, True):
        peer = rig.stranger()
        await peer.hello()
        result = _WithSocket(peer)
        if gone:
            peer.connection.close()
            result.sock.close()
        peer.connection.abort()
        assert peer.transport.aborted
        result.sock.close()
    await rig.stop()


@pytest.mark.parametrize("kind", ["mistake", "goodbye", "standby"])
async def test_a_closed_connection_whose_peer_does_not_read_is_aborted(kind: str) -> None:
    rig = await ShardRig(slow_reader_timeout_s=0.01).start()
    listener = rig.listener if kind != "standby" else Listener(standby_of(rig), rig.logins)
    peer = Peer(listener())
    await peer.hello()
    peer.transport.stuck = True
    peer.send(T.PING)
    await rig.settle()
    if kind == "mistake":
        peer.feed(b"\xc1")
        await rig.settle()
    elif kind == "goodbye":
        peer.connection.end("unauthorized", "the token was revoked")
    else:
        listener.end_standby("the daemon is shutting down")
    assert peer.closed
    peer.connection.resume_writing()  # it has read a part
    await comes(lambda: peer.transport.aborted and not listener.connections)
    await rig.stop()


async def test_a_connection_made_after_a_deposition_is_aborted() -> None:
    """The event loop makes its protocol first and gives it the connection later; a daemon may
    be deposed in between. Nobody would ever answer the peer, or say goodbye to it."""
    rig = await ShardRig().start()
    connection, shared = rig.listener(), rig.listener._active
    rig.listener.stand_by()
    peer = Peer(connection)
    await rig.settle()
    assert peer.transport.aborted
    assert shared is not None and not shared.connections
    await rig.stop()


def standby_of(rig: ShardRig) -> StandbyOperations:
    return StandbyOperations(
        rig.settings, rig.settings.limits(), rig.shard.clock,
        active=lambda: None, status=dict, on_event=rig.notice,
    )  # fmt: skip


async def test_an_ungreeted_connection_is_served_by_the_new_leader() -> None:
    """Its client looks for the leader, and would only come again."""
    rig = await ShardRig().start()
    standby = standby_of(rig)
    listener = Listener(standby, rig.logins)
    greeted, quiet, slow = (Peer(listener()) for _ in range(3))
    assert (await greeted.hello())[2]["role"] == "standby"
    hello = encode((int(T.HELLO), 1, {"v": 1, "session": None, "token": None, "client": "slow"}))
    slow.feed(hello[:9])
    listener.serve(rig.operations)
    listener.leave_standby("it leads now")
    assert [frame[:3] for frame in greeted.frames()] == [(T.GOODBYE, "not_active", "it leads now")]
    assert greeted.closed
    assert (await quiet.hello())[2]["role"] == "active"
    slow.feed(hello[9:])
    assert (await slow.answer(1))[2]["role"] == "active"
    for peer in (quiet, slow):
        assert (await peer.enqueue(("t", b"x", 60_000)))[0] == T.OK
    assert listener._standby.unread_bytes == 0
    assert len(listener.connections) == len(rig.shard.callers) == 2
    for peer in (quiet, slow):
        peer.lose()
    assert not listener.connections
    assert not rig.shard.callers
    await rig.stop()


async def test_hello_waits_for_a_standby_about_to_lead() -> None:
    """Its client was sent here, and would come again and again."""
    rig = await ShardRig().start()
    standby = standby_of(rig)
    listener = Listener(standby, rig.logins, lambda: True)
    waiting, hurried, gone, stranger = (Peer(listener()) for _ in range(4))
    session = b"s" * 16
    waiting.say_hello(session=session, shard=0)
    hurried.feed(
        encode((int(T.HELLO), 1, {"v": 1, "session": b"h" * 16, "shard": 0}))
        + encode((int(T.ENQUEUE), 2, 2, (("t", b"x", 60_000),)))
    )
    gone.say_hello(session=b"g" * 16, shard=0)
    assert (await stranger.hello())[2]["role"] == "standby", "it looks for no shard of several"
    await rig.settle()
    assert not waiting.frames() and not hurried.frames() and not gone.frames()
    gone.lose()
    listener.serve(rig.operations)
    listener.leave_standby("it leads now")
    assert (await waiting.answer(1))[2]["role"] == "active"
    assert (await hurried.answer(1))[2]["role"] == "active"
    assert (await hurried.answer(2))[0] == T.OK
    assert (await waiting.enqueue(("t", b"x", 60_000)))[0] == T.OK
    assert stranger.closed
    assert len(listener.connections) == len(rig.shard.callers) == 2
    for peer in (waiting, hurried):
        peer.lose()
    assert not listener.connections and not rig.shard.callers
    await rig.stop()


async def test_a_hello_does_not_wait_for_ever_for_a_standby_to_lead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "LEAD_WAIT_S", 0.01)
    rig = await ShardRig().start()
    standby = standby_of(rig)
    listener = Listener(standby, rig.logins, lambda: True)
    peer = Peer(listener())
    request = peer.say_hello(session=b"s" * 16, shard=0)
    await comes(lambda: [frame for frame in peer.frames() if frame[1] == request])
    assert peer.kept[0][2]["role"] == "standby"
    assert (await peer.call(T.PING))[0] == T.OK, "the conversation goes on"
    await rig.stop()


async def test_a_new_leader_without_room_ends_standby_connections() -> None:
    rig = await ShardRig(connections_max=1).start()
    rig.stranger()
    standby = standby_of(rig)
    listener = Listener(standby, rig.logins)
    peer = Peer(listener())
    listener._active = rig.listener._active
    listener.leave_standby("it leads now")
    assert [frame[:2] for frame in peer.frames()] == [(T.GOODBYE, "not_active")]
    assert peer.closed
    await rig.stop()


@contextmanager
def _without_collections() -> Iterator[None]:
    """As in a daemon that has too little to do for one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _subscribe(peer: Peer) -> None:
    await peer.call(T.SUBSCRIBE, 1, "t", "g", 8, {})


async def _wait_for_a_pull(peer: Peer) -> None:
    peer.send(T.PULL, "t", "h", 1, 60_000, {})


async def _pull_in_vain(peer: Peer) -> None:
    await peer.call(T.PULL, "t", "h", 1, 0, {})


async def _enqueue(peer: Peer) -> None:
    await peer.enqueue(("t", 60_000, None, b"x", {}))


async def _look_up(peer: Peer) -> None:
    await peer.call(T.LOOKUP, (1, 2))


async def _leave_half_a_frame(peer: Peer) -> None:
    peer.feed(encode((int(T.LOOKUP), 99, (1, 2)))[:-1])


async def _ask_and_not_wait(peer: Peer) -> None:
    peer.send(T.LOOKUP, (3, 4))


@pytest.mark.parametrize(
    "use",
    [
        _subscribe,
        _wait_for_a_pull,
        _pull_in_vain,
        _enqueue,
        _look_up,
        _leave_half_a_frame,
        _ask_and_not_wait,
    ],
)
async def test_a_closed_connection_uses_no_memory(use: Any) -> None:
    """Its decoder has buffers as large as what it has read. A cycle would keep them until the next
    collection of garbage, of which thousands of connections cause none."""
    rig = await ShardRig().start()
    with _without_collections():
        peer = await rig.peer()
        await use(peer)
        result = weakref.ref(peer.connection)
        # A transport of the event loop lets go of its protocol when it has closed.
        transport: FakeTransport = peer.transport
        peer.lose()
        del transport.protocol, peer.connection
        await rig.settle()
        rig.pass_time(60_000)
        await rig.settle()
        assert result() is None
    await rig.stop()
