"""A scripted daemon: real TCP and the codec, but no rules.

    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()                 # a connection whose HELLO was answered
        call = asyncio.ensure_future(client.ping())
        frame = await peer.next(T.PING)            # the client's frames, in order
        peer.ok(frame)

Every wait is bounded. The event loop must not have reported an error at the end.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any, Self, cast

from support.waiting import WAIT_S, soon
from tickwheel import Client
from tickwheel.api.frames import FrameType as T
from tickwheel.client import Subscription
from tickwheel.limits import Limits
from tickwheel.protocol import Decoder, Frame, encode

NOW_MS = 1_790_000_000_000
ID_STEP = 1024


def overview(troubles: list[tuple[str, str]], left_out: int = 0) -> dict[str, Any]:
    """Return an answer to OVERVIEW with these troubles, each (level, text)."""
    none = {"topic": None, "group": None, "about": "daemon"}
    ring = {"slots": 1, "tick_ms": 1, "slots_per_cell": 1, "slot": 0, "this": [0], "next": [0]}
    return {
        "node": "fake", "version": "0", "epoch": 1, "state": "ready", "detail": None,
        "now_ms": NOW_MS, "uptime_s": 1.0, "ring": ring | {"exact": True, "later": 0},
        "counts": {}, "totals": {}, "lateness": {}, "troubles_left_out": left_out,
        "troubles": [{"level": level, "text": text, **none} for level, text in troubles],
    }  # fmt: skip


class Peer(asyncio.Protocol):
    """The daemon's side of one connection."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.hello: dict[str, Any] = {}
        self.seen: list[Frame] = []
        """Every frame that came, HELLO included."""
        self.auto = {T.BYE, T.UNSUBSCRIBE}
        """Answered with nil without a word of the test's; ``next`` does not show them."""
        self.closed = asyncio.Event()
        self._frames: asyncio.Queue[Frame] = asyncio.Queue()
        self._decoder = Decoder(1 << 26)
        self._transport: asyncio.Transport | None = None

    # --- the event loop's -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.daemon.connections += 1
        self.daemon.open.add(self)

    def data_received(self, data: bytes) -> None:
        for frame in self._decoder.feed(data):
            self.seen.append(frame)
            if frame[0] == T.HELLO:
                self.hello = frame[2]
                self.daemon.greet(self, frame)
            elif frame[0] in self.auto:
                self.ok(frame)
            elif frame[0] == T.STATUS and self.daemon.status is not None:
                self.ok(frame, self.daemon.status)
            elif frame[0] == T.OVERVIEW and self.daemon.troubles is None:
                self.error(frame, "unknown_type")  # as an older one does
            elif frame[0] == T.OVERVIEW:
                self.ok(frame, overview(self.daemon.troubles))
            else:
                self._frames.put_nowait(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self.daemon.open.discard(self)
        self.closed.set()

    # --- what the client sent -------------------------------------------------------------------

    async def next(self, kind: T | None = None) -> Frame:
        """Return the next frame that is not answered automatically."""
        async with asyncio.timeout(WAIT_S):
            frame = await self._frames.get()
        assert kind is None or frame[0] == kind, f"{T(frame[0]).name} came, not {kind.name}"
        return frame

    def nothing(self) -> bool:
        """Return whether no frame waits for ``next``."""
        return self._frames.empty()

    def sent(self, kind: T) -> list[Frame]:
        return [frame for frame in self.seen if frame[0] == kind]

    async def gone(self) -> None:
        """Wait until the connection has ended."""
        async with asyncio.timeout(WAIT_S):
            await self.closed.wait()

    # --- what the daemon says -------------------------------------------------------------------

    def send(self, *frame: Any) -> None:
        if self._transport is not None:
            self._transport.write(encode(frame))

    @contextmanager
    def in_one_write(self) -> Iterator[None]:
        """Send all frames of the block in one write, so that the client reads them together."""
        transport, frames = self._transport, bytearray()
        assert transport is not None
        self._transport = cast(asyncio.Transport, SimpleNamespace(write=frames.extend))
        try:
            yield
        finally:
            self._transport = transport
        self.send_bytes(bytes(frames))

    def send_bytes(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def ok(self, frame: Frame, result: Any = None) -> None:
        self.send(T.OK, frame[1], result)

    def error(self, frame: Frame, code: str, message: str = "as the test says") -> None:
        self.send(T.ERROR, frame[1], code, message)

    def store(self, frame: Frame, accepted_ms: int = NOW_MS) -> list[int]:
        """Answer an ENQUEUE with new ids and return them."""
        assert frame[0] == T.ENQUEUE
        ids = [self.daemon.new_id() for _ in frame[3]]
        self.ok(frame, (accepted_ms, ids))
        return ids

    def deliver(
        self,
        sub: int,
        *bodies: bytes,
        attempt: int = 1,
        epoch: int = 1,
        options: dict[str, Any] | None = None,
    ) -> list[int]:
        """Send a DELIVER frame and return its ids."""
        ids = [self.daemon.new_id() for _ in bodies]
        more = () if options is None else (options,)
        items = [(i, attempt, NOW_MS, body, *more) for i, body in zip(ids, bodies, strict=True)]
        self.send(T.DELIVER, sub, epoch, NOW_MS, items)
        return ids

    async def subscribed(self, lease_ms: int = 30_000) -> int:
        """Answer the next SUBSCRIBE and return its subscription number."""
        frame = await self.next(T.SUBSCRIBE)
        self.ok(frame, {"lease_ms": lease_ms})
        return int(frame[2])

    def goodbye(self, code: str = "draining", *heir: str) -> None:
        """Send GOODBYE. `heir` is the address of the shard's next daemon."""
        self.send(T.GOODBYE, code, "as the test says", *heir)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def stop_reading(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def read_again(self) -> None:
        assert self._transport is not None
        self._transport.resume_reading()


class FakeDaemon:
    """Listen, and return connections in the order of their HELLO."""

    def __init__(self, **limits: int) -> None:
        self.limits = Limits(**limits)
        self.epoch = 1
        self.role: str | None = None
        """The role in HELLO's answer; None: as a daemon that knows no roles."""
        self.active: str | None = None
        """Whom a standby names."""
        self.more: dict[str, Any] = {}
        """What HELLO's answer has beside that."""
        self.troubles: list[tuple[str, str]] | None = None
        """The present troubles, each (level, text); None: the daemon cannot be asked."""
        self.status: dict[str, Any] | None = None
        """The answer to STATUS; None: it is the test's to give."""
        self.port = 0
        self.connections = 0
        """That were ever made."""
        self.open: set[Peer] = set()
        self.greet: Callable[[Peer, Frame], None] = self.welcome
        """What is done with a HELLO."""
        self.complaints: list[dict[str, Any]] = []
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._server: asyncio.Server | None = None
        self._last_id = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"tcp://{self.address}"

    def stand_by(self, active: FakeDaemon | str | None = None) -> None:
        """Answer further HELLOs as a standby that names `active`."""
        self.role = "standby"
        self.active = active.url if isinstance(active, FakeDaemon) else active

    def set_status(self, **fields: Any) -> dict[str, Any]:
        """Answer STATUS as an active, ready daemon, changed by `fields`."""
        self.status = {
            "node": "fake", "version": "0", "role": "active", "state": "ready", "detail": None,
            "epoch": self.epoch, "address": self.url, "since_ms": NOW_MS - 3_723_000,
            "active": None, "store": "redis://r:6379/0", "store_ok": True, "now_ms": NOW_MS,
            "uptime_s": 5.5, "loaded": 0, "to_load": 0,
        } | fields  # fmt: skip
        return self.status

    def lead(self) -> None:
        """Answer further HELLOs as the active daemon."""
        self.role, self.active = "active", None

    def client(self, url: str | None = None, **options: Any) -> Client:
        return Client(url or self.url, **options)

    def new_id(self) -> int:
        self._last_id += ID_STEP
        return self._last_id

    def welcome(self, peer: Peer, frame: Frame) -> None:
        """Answer HELLO and pass the connection to the test."""
        answer: dict[str, Any] = {"v": 1, "epoch": self.epoch, "node": "fake", "now_ms": NOW_MS}
        if self.role is not None:
            answer |= {"role": self.role, "active": self.active}
        peer.ok(frame, answer | {"limits": self.limits.to_wire()} | self.more)
        self._peers.put_nowait(peer)

    async def peer(self) -> Peer:
        """Return the next connection whose HELLO was answered."""
        async with asyncio.timeout(WAIT_S):
            return await self._peers.get()

    async def listen(self) -> None:
        """Listen at the previous port, if there was one."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Peer(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def deaf(self) -> None:
        """Stop listening; connections stay open."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.complaints.append(context)
        )
        await self.listen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.deaf()
        for peer in list(self.open):
            peer.close()
            await peer.gone()
        gc.collect()
        if error is None:
            assert not self.complaints


async def turns(count: int = 5) -> None:
    """Let the event loop turn several times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def consume(
    daemon: FakeDaemon, client: Client, lease_ms: int = 30_000, **options: Any
) -> tuple[Peer, Subscription, int]:
    """A started subscription to topic ``t``."""
    peer = await daemon.peer()
    subscription = client.subscribe("t", **options)
    starting = asyncio.ensure_future(subscription.start())
    sub = await peer.subscribed(lease_ms)
    await soon(starting)
    return peer, subscription, sub
