"""A daemon's shard without sockets.

Tests feed frames into its connections, hold its commits back, and move its clock.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tickwheel.api.frames import PROTOCOL_VERSION
from tickwheel.api.frames import FrameType as T
from tickwheel.clock import Clock
from tickwheel.engine.engine import Engine
from tickwheel.model.kinds import Effects
from tickwheel.persistence.memory import MemoryStore
from tickwheel.protocol import Decoder, Frame, encode
from tickwheel.server.access.logins import Logins
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.settings import Settings
from tickwheel.server.shard.operations import Operations, StandbyOperations
from tickwheel.server.shard.shard import Shard
from tickwheel.server.tcp.connection import Connection
from tickwheel.server.tcp.listener import Listener, value_bytes

NOW_MS = 1_800_000_000_000
TURNS_AT_ONCE = 2_000
PAUSE_S = 0.001
PATIENCE_S = 60.0


class Turns:
    """Yield turns of the event loop: ``async for _ in Turns()``.

    The first turns follow each other at once, later ones after pauses, because a thread may have
    to work.
    """

    def __init__(self) -> None:
        self._left = TURNS_AT_ONCE
        self._deadline_s = time.monotonic() + PATIENCE_S

    def __aiter__(self) -> Turns:
        return self

    async def __anext__(self) -> None:
        self._left -= 1
        if self._left < 0 and time.monotonic() > self._deadline_s:
            raise StopAsyncIteration
        await asyncio.sleep(0 if self._left >= 0 else PAUSE_S)  # real time: a thread


class Sources:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        self.ahead_ms = 0
        """How far the wall clock alone is ahead."""

    def wall_ms(self) -> int:
        return self.now_ms + self.ahead_ms

    def mono_ms(self) -> int:
        return self.now_ms - NOW_MS


class GatedStore(MemoryStore):
    """A store whose commits wait between ``stall`` and ``go_on``.

    `reads` are the numbers of ids of each read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.reads: list[int] = []

    def stall(self) -> None:
        self.gate.clear()

    def go_on(self) -> None:
        self.gate.set()

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        await self.gate.wait()
        return await super().commit(epoch, owner, n, effects)

    async def backup(self, path: str) -> int:
        return len(path)

    async def read_some(self, ids: Any, bytes_max: int) -> Any:
        found, rest = await super().read_some(ids, bytes_max)
        self.reads.append(sum(len(task.row.body) for task in found.values()))
        return found, rest


class FakeTransport(asyncio.Transport):
    """A transport that keeps what is written until the test calls ``read``; it pauses like a
    real one."""

    def __init__(self, number: int) -> None:
        super().__init__({"peername": ("127.0.0.1", number)})
        self.high = 1 << 62
        self.out = bytearray()
        self.reading = True
        self.stuck = False
        """The peer does not read."""
        self.closed = self.aborted = False
        self.protocol: Connection
        self._paused = self._is_lost = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high or 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.out += data
        if self.stuck and len(self.out) > self.high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.out) if self.stuck else 0

    def read(self) -> bytes:
        """Let the peer read everything that was written."""
        data, self.out = bytes(self.out), bytearray()
        if self._paused:
            self._paused = False
            self.protocol.resume_writing()
        return data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True
        if not self.get_write_buffer_size():  # otherwise it waits until the peer reads
            self._close()

    def abort(self) -> None:
        self.aborted = True
        self._close()

    def lose(self) -> None:
        if not self._is_lost:
            self.closed = self._is_lost = True
            self.protocol.connection_lost(None)

    def _close(self) -> None:
        self.closed = True
        if not self._is_lost:
            self._is_lost = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class Peer:
    """A client's connection."""

    def __init__(self, connection: Connection, number: int = 1) -> None:
        self.transport = FakeTransport(number)
        self.connection = connection
        self.transport.protocol = self.connection
        self._decoder = Decoder(1 << 30)
        self._frames: list[Frame] = []
        self.kept: list[Frame] = []
        """All that ever came."""
        self.request = 0
        self.connection.connection_made(self.transport)

    def send(self, kind: int, *fields: Any) -> int:
        """Send a frame with the next request number and return that number."""
        self.request += 1
        self.feed(encode((int(kind), self.request, *fields)))
        return self.request

    def feed(self, data: bytes) -> None:
        """Feed the bytes to the connection in one piece."""
        if not self.transport.closed:
            self.connection.data_received(data)

    def frames(self) -> list[Frame]:
        """Return all frames since the last call."""
        self._read()
        found, self._frames = self._frames, []
        return found

    def _read(self) -> None:
        arrived = self._decoder.feed(self.transport.read())
        self._frames += arrived
        self.kept += arrived

    async def answer(self, request: int) -> Frame:
        async for _ in Turns():
            self._read()
            for frame in self._frames:
                if frame[0] in (T.OK, T.ERROR) and frame[1] in (request, 0):
                    self._frames.remove(frame)
                    return frame
        raise AssertionError(f"no answer to {request}")

    async def call(self, kind: int, *fields: Any) -> Frame:
        return await self.answer(self.send(kind, *fields))

    async def do(self, kind: int, *fields: Any) -> Any:
        """Send a request and return the value of its OK. Fail if the answer is an error."""
        answer = await self.call(kind, *fields)
        assert answer[0] == T.OK, answer
        return answer[2]

    async def refused(self, kind: int, *fields: Any) -> tuple[str, str]:
        """Send a request and return the code and the message of its error. Fail if the answer is
        OK."""
        answer = await self.call(kind, *fields)
        assert answer[0] == T.ERROR, answer
        return answer[2], answer[3]

    async def enqueue(self, *tasks: Any) -> Frame:
        return await self.call(T.ENQUEUE, self.request + 1, tasks)

    async def hello(self, **options: Any) -> Frame:
        fields = {"session": os.urandom(16), "token": None, "client": "rig"}
        return await self.answer(self.say_hello(**fields | options))

    def say_hello(self, **options: Any) -> int:
        return self.send(T.HELLO, {"v": PROTOCOL_VERSION, **options})

    @property
    def closed(self) -> bool:
        return self.transport.closed

    def lose(self) -> None:
        """Break the connection."""
        self.transport.lose()


class ShardRig:
    """A started shard: ``await ShardRig(setting=…).start()``, then ``await stop()``."""

    def __init__(self, **settings: Any) -> None:
        fields = {"store": "memory:", "login_delay_s": 0, **settings}
        self.settings = Settings(**{name: one for name, one in fields.items() if one is not None})
        self.sources = Sources()
        self.store = GatedStore()
        self.notices: list[tuple[str, str]] = []
        self.shard: Shard
        self.operations: Operations
        self.listener: Listener
        self.logins: Logins
        self.observed = Observed()

    async def start(self) -> ShardRig:
        opened = await self.store.open("me", NOW_MS)
        self.engine = Engine(self.settings.engine(), opened.epoch, opened.id_mark, NOW_MS)
        self.core = self.engine.core
        self.shard = Shard(
            self.settings,
            self.engine,
            self.store,
            opened,
            Clock(86_400_000, self.sources),
            owner="me",
            backup_folder=Path("/proc"),
            on_event=self.notice,
        )
        self.operations = Operations(self.shard, value_bytes)
        own = SimpleNamespace(ping=None, status=None, nodes=None, unreadable=None)
        standby: Any = SimpleNamespace(limits=None, verbs=own)
        self.logins = Logins(self.settings, self.shard.clock, self.notice, self.observed)
        await self.logins.start()
        self.listener = Listener(cast(StandbyOperations, standby), self.logins)
        self.listener.serve(self.operations)
        self.shard.start(_nothing())
        await self.until(self.shard.loaded.is_set)
        return self

    def notice(self, event: str, text: str) -> None:
        self.notices.append((event, text))

    async def stop(self) -> None:
        self.store.go_on()
        assert not self.shard.failed.done(), self.shard.failed
        await self.shard.stop()

    @property
    def held(self) -> dict[Connection, None]:
        """Return the connections whose requests wait."""
        assert self.listener._active is not None
        return self.listener._active.waiting

    @property
    def unread_bytes(self) -> int:
        assert self.listener._active is not None
        return self.listener._active.unread_bytes

    async def peer(self, **options: Any) -> Peer:
        """Return a connection that has sent HELLO."""
        peer = self.stranger()
        answer = await peer.hello(**options)
        assert answer[0] == T.OK, answer
        return peer

    def stranger(self) -> Peer:
        return Peer(self.listener())

    def pass_time(self, ms: int) -> None:
        self.sources.now_ms += ms
        self.shard.wake()

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the event loop turn until `condition` is true."""
        async for _ in Turns():
            if condition():
                return
        raise AssertionError("it never came to that")

    async def settle(self, steps: int = 50) -> None:
        """Let the shard do everything that is possible now."""
        for _ in range(steps):
            await asyncio.sleep(0)


async def _nothing() -> None:
    """Load no rows."""


def started(make: Callable[[], ShardRig]) -> Any:
    """Fixture: start a rig, and stop it after the test."""

    @pytest.fixture
    async def rig() -> AsyncIterator[ShardRig]:
        made = await make().start()
        yield made
        await made.stop()

    return rig
