"""Peers that are gone and left their connections behind.

A host that lost power says nothing, and for a stopped process the kernel still answers TCP. So a
connection that was quiet for an interval gets HEARTBEAT, if its client said in HELLO that it
answers; one that was quiet for the time-out is ended. For other clients the kernel probes the peer
(keepalive), which notices a host that is gone and nothing else.

Invariants: any data counts as a sign of life; a time in which this process stood still, or did not
read from a peer, does not count against that peer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from typing import Any, Protocol

from tickwheel.clock import Clock

SWEEPS_PER_INTERVAL = 4
SWEEP_S_MAX = 1.0
PROBES = 3
"""Keepalive probes without an answer before the kernel gives a host up."""


class Peer(Protocol):
    """What heartbeats need to know of a connection."""

    answers_heartbeats: bool
    heard_mono_ms: int
    asked_mono_ms: int
    """When HEARTBEAT was sent last (steady ms); 0: never."""

    @property
    def is_read(self) -> bool:
        """Whether what the peer sends is taken at the moment."""
        ...

    def ask_for_life(self) -> None: ...

    def give_up_silent(self, quiet_ms: int) -> None: ...


class Heartbeats:
    """Finds silent peers: looks at all connections now and then."""

    def __init__(
        self, peers: Collection[Peer], clock: Clock, *, interval_s: float, timeout_s: float
    ) -> None:
        self._peers = peers
        self._clock = clock
        self._interval_ms = int(interval_s * 1000)
        self._timeout_ms = int(timeout_s * 1000)
        self.pause_s = min(SWEEP_S_MAX, interval_s / SWEEPS_PER_INTERVAL)
        self._swept_mono_ms = self._since_mono_ms = clock.read().mono_ms

    async def run(self) -> None:
        """Look at all connections again and again, for ever."""
        while True:
            await asyncio.sleep(self.pause_s)
            self.sweep()

    def sweep(self) -> None:
        mono_ms = self._clock.read().mono_ms
        if mono_ms - self._swept_mono_ms > 2 * self.pause_s * 1000:
            # What they said meanwhile may lie unread.
            self._since_mono_ms = mono_ms
        self._swept_mono_ms = mono_ms
        for peer in list(self._peers):
            if not (peer.answers_heartbeats and peer.is_read):
                continue
            quiet_ms = mono_ms - max(peer.heard_mono_ms, self._since_mono_ms)
            if quiet_ms >= self._timeout_ms:
                peer.give_up_silent(quiet_ms)
            elif quiet_ms >= self._interval_ms:
                if mono_ms - peer.asked_mono_ms >= self._interval_ms:
                    peer.asked_mono_ms = mono_ms
                    peer.ask_for_life()


def keep_alive(sock: Any, interval_s: float) -> None:
    """Let the kernel probe whether the peer's host is there, where the interval can be set."""
    if sock is None:
        return
    every_s = max(1, round(interval_s))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("IDLE", every_s), ("INTVL", every_s), ("CNT", PROBES)):
        option = getattr(socket, f"TCP_KEEP{name}", None)
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def limit_unacknowledged(sock: Any, timeout_s: float) -> None:
    """End the connection when the peer's kernel leaves sent bytes unacknowledged for so long.

    Also a receive window that stays closed so long: only for peers that are known to read.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None and sock is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, round(timeout_s * 1000))
