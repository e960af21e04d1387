"""How a connection ends, whatever its peer did before."""

from __future__ import annotations

import socket
from typing import Any

from support.shard_rig import Peer, ShardRig


class _WithSocket:
    """A transport's socket, as ``get_extra_info`` gives it."""

    def __init__(self, peer: Peer) -> None:
        self.sock = socket.socket()
        before = peer.transport.get_extra_info

        def get_extra_info(name: str, default: Any = None) -> Any:
            return self.sock if name == "socket" else before(name, default)

        peer.transport.get_extra_info = get_extra_info  # type: ignore[method-assign]  # a fake


async def test_an_abort_after_the_peer_has_gone_does_nothing() -> None:
    """A deposed daemon says goodbye and aborts a second later: most peers have left by then."""
    rig = await ShardRig().start()
    for gone in (False, True):
        peer = rig.stranger()
        await peer.hello()
        found = _WithSocket(peer)
        if gone:
            peer.connection.close()
            found.sock.close()
        peer.connection.abort()
        assert peer.transport.aborted
        found.sock.close()
    await rig.stop()
