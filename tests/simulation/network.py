"""The network of the simulation: TCP as programs see it, between hosts, in memory.

What one end writes arrives after some latency, in order, on that connection; connections overtake
each other. While a way is blocked bytes wait, as TCP sends them again; a connection that one end
has given up meanwhile stands at the other end until that writes (half open). A process that was
killed sends a reset, unless its whole machine is gone. Everything else is the programs' business:
they notice silence by their own heartbeats.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.loop import passes
from tickwheel.client.connection import Address, Connection

if TYPE_CHECKING:
    import ssl

    from simulation.loop import Host, SimLoop

LATENCY_S = (0.0002, 0.004)
SLOW_LATENCY_S = (0.02, 0.3)
HIGH_BYTES = 64 * 1024
APART_S = 1e-7
"""Timers of one moment have no order, so nothing arrives at the same moment as what is before."""

Trace = Callable[..., None]


class End(asyncio.Transport):
    """One end of a connection: the transport of its protocol."""

    peer: End

    def __init__(self, net: Network, host: Host, make: Callable[[], Any], name: str) -> None:
        super().__init__({"peername": (name, 0)})
        self.net, self.host = net, host
        self._make = make
        self.protocol: Any = None
        self._unsent = bytearray()
        """What waits because the way is blocked or the peer does not read."""
        self._arrived: list[bytes] = []
        """What the program has not read."""
        self._last_s = 0.0
        """When the last thing on the way to this end arrives."""
        self._high_bytes = HIGH_BYTES
        self._is_reading = True
        self._is_full = self._is_closing = self._fin_waits = False
        self.is_over = False
        """Whether this end was told that the connection is gone."""

    # --- the protocol's -------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self._is_closing or self.is_over:
            return
        self._unsent += data
        self._push()
        if len(self._unsent) > self._high_bytes and not self._is_full:
            self._is_full = True
            self.protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = HIGH_BYTES if high is None else high

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def is_reading(self) -> bool:
        return self._is_reading

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        if self._arrived:
            self.net.loop.call_soon(self._read)

    def is_closing(self) -> bool:
        return self._is_closing or self.is_over

    def close(self) -> None:
        """Close when what was written has left."""
        if not self.is_closing():
            self._is_closing = self._fin_waits = True
            self._push()

    def abort(self) -> None:
        if not self.is_over:
            self._is_closing = True
            self._fin_waits = False
            self._unsent.clear()
            self.net.loop.call_soon(self._lost, None)
            self.reset_peer()

    def get_protocol(self) -> Any:
        return self.protocol

    # --- the way --------------------------------------------------------------------------------

    def begin(self) -> None:
        """The handshake has come to this end: the program gets its connection."""
        self.protocol = self._make()
        self.protocol.connection_made(self)
        self._read()

    def _push(self) -> None:
        """Send what waits, if the way is free."""
        if self.net.is_blocked(self.host.name, self.peer.host.name):
            self.net.waiting[self] = None
            return
        if not self.peer.host.is_alive:
            self.arrives(self._lost, ConnectionResetError("no such connection"))
            return
        if self._unsent:
            data = bytes(self._unsent)
            self._unsent.clear()
            self.net.trace("send", self.host, self.peer.host, len(data))
            self.peer.arrives(self.peer._take, data)
        if self._is_full:
            self._is_full = False
            self.net.loop.call_soon(self._resumed)
        if self._fin_waits:
            self._fin_waits = False
            self.peer.arrives(self.peer._lost, None)
            self.net.loop.call_soon(self._lost, None)

    def _resumed(self) -> None:
        if not self.is_over:
            self.protocol.resume_writing()

    def unblocked(self) -> None:
        """The way is free again."""
        if self.is_over:
            self.reset_peer()
        else:
            self.host.context.run(self._push)

    def arrives(self, act: Callable[..., object], *args: Any) -> None:
        """Let something happen at this end, behind all that is on the way to it."""
        now_s = self.net.loop.time()
        self._last_s = max(self._last_s + APART_S, now_s + self.net.latency_s())
        self.host.call_at(self._last_s, act, *args)

    def _take(self, data: bytes) -> None:
        if self.is_over:
            self.reset_peer()  # half open: the other end learns it now
            return
        self._arrived.append(data)
        self._read()

    def _read(self) -> None:
        while self._arrived and self._is_reading and self.protocol and not self.is_over:
            self.protocol.data_received(self._arrived.pop(0))

    def _lost(self, error: Exception | None) -> None:
        if self.is_over:
            return
        self.is_over = self._is_closing = True
        self._unsent.clear()
        if self.protocol is not None:
            self.protocol.connection_lost(error)

    def reset_peer(self) -> None:
        """Tell the other end that there is no connection, if that can be told now."""
        if self.peer.is_over:
            return
        if self.net.is_blocked(self.host.name, self.peer.host.name):
            self.net.waiting[self] = None
        else:
            self.peer.arrives(self.peer._lost, ConnectionResetError("reset by the peer"))

    def cut(self) -> None:
        """This end of the connection breaks."""
        self.arrives(self._lost, ConnectionResetError("the connection was cut"))


class Listening:
    """What a process has that takes connections, of which ``asyncio.Server`` is the model."""

    def __init__(self, net: Network, address: Address, host: Host) -> None:
        self._net, self._address, self._host = net, address, host

    def close(self) -> None:
        """Take none any more; those that stand go on."""
        if self._net.listening.get(self._address, (None,))[0] is self._host:
            del self._net.listening[self._address]


class Network:
    """All connections, and what is wrong with them."""

    def __init__(self, loop: SimLoop, rnd: random.Random, trace: Trace) -> None:
        self.loop, self._rnd, self.trace = loop, rnd, trace
        self.listening: dict[Address, tuple[Host, Callable[[], Any]]] = {}
        """Address → the process that takes connections there, and what makes them."""
        self.gone: set[str] = set()
        """Machines that answer nothing, not even that nobody listens."""
        self.blocked: set[tuple[str, str]] = set()
        """Ways on which nothing comes through."""
        self.waiting: dict[End, None] = {}
        """Ends that have something to send when their way is free."""
        self.ends: list[End] = []
        self.is_slow = False

    def latency_s(self) -> float:
        return self._rnd.uniform(*(SLOW_LATENCY_S if self.is_slow else LATENCY_S))

    def is_blocked(self, here: str, there: str) -> bool:
        return (here, there) in self.blocked or here in self.gone or there in self.gone

    def block(self, here: str, there: str, *, one_way: bool = False) -> None:
        """Let nothing through from ``here`` to ``there``, nor back unless ``one_way``."""
        self.blocked |= {(here, there)} if one_way else {(here, there), (there, here)}

    def unblock(self, here: str, there: str) -> None:
        self.blocked -= {(here, there), (there, here)}
        self._try_again()

    def heal(self) -> None:
        """Let everything through again."""
        self.blocked.clear()
        self.is_slow = False
        self._try_again()

    def _try_again(self) -> None:
        waiting, self.waiting = self.waiting, {}
        for end in waiting:
            if end.host.is_alive:
                end.unblocked()
            else:
                end.reset_peer()

    def cut(self, name: str) -> None:
        """Break all connections of a host."""
        for end in self._alive():
            if name in (end.host.name, end.peer.host.name):
                end.cut()

    def _alive(self) -> list[End]:
        self.ends = [end for end in self.ends if not (end.is_over and end.peer.is_over)]
        return self.ends

    def died(self, host: Host, *, silently: bool) -> None:
        """A process has ended: its system says so to all peers, unless the machine is gone."""
        for address in [one for one, there in self.listening.items() if there[0] is host]:
            del self.listening[address]
        if silently:
            self.gone.add(host.name)
        for end in self._alive():
            if end.host is host and not end.is_over:
                end.is_over = end._is_closing = True
                end.reset_peer()

    def is_back(self, name: str) -> None:
        """The machine runs again, and knows nothing of its former connections."""
        self.gone.discard(name)
        self._try_again()

    def listen(self, address: Address, host: Host, make: Callable[[], Any]) -> Listening:
        """Let a process take connections at an address."""
        self.listening[address] = host, make
        return Listening(self, address, host)

    async def open_to(
        self, connection: Connection, address: Address, tls: ssl.SSLContext | None, here: Host
    ) -> None:
        """Connect a client of ``here``; see ``Client``. Raises OSError."""
        name = address[0]
        await passes(self.latency_s())
        while self.is_blocked(here.name, name) or self.is_blocked(name, here.name):
            await passes(0.2)  # SYN is sent again; who waits has a time-out
        there = self.listening.get(address)
        if there is None:
            await passes(self.latency_s())
            raise ConnectionRefusedError(f"nobody listens at {name}:{address[1]}")
        first = End(self, here, lambda: connection, name)
        second = End(self, there[0], there[1], here.name)
        first.peer, second.peer = second, first
        self.ends += first, second
        second.arrives(second.begin)
        try:
            await passes(self.latency_s())
        except BaseException:
            first.is_over = True
            first.reset_peer()
            raise
        if first.is_over:
            raise ConnectionResetError(f"{name} has closed the connection at once")
        first.begin()
