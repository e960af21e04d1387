"""A whole daemon in this process, with a clock moved by hand and connections without sockets.

    async with InProcess(tmp_path) as daemon:
        peer = daemon.connect()
        peer.send(FrameType.STATS)
        await daemon.settle()
        peer.frames()                   # the frames received

Everything except the transport is the daemon's own: connection, handlers, shard, committer,
store.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

from support.daemon import NO_DISK_LIMITS
from support.engine_recount import recount
from support.shard_rig import NOW_MS, FakeTransport, Peer, Sources
from support.store_rows import kept
from tickwheel.api.frames import FrameType as T
from tickwheel.clock import Clock
from tickwheel.model.kinds import COUNTER, GROUP, PAUSED_KEY, TARGET, TRANSACTION
from tickwheel.model.records import TaskSnapshot
from tickwheel.persistence.contract import Heads
from tickwheel.persistence.memory import MemoryStore
from tickwheel.protocol import encode
from tickwheel.server.daemon import Daemon
from tickwheel.server.settings import Settings
from tickwheel.server.shard.reads import _RunningRead as RunningRead
from tickwheel.server.shard.shard import Shard
from tickwheel.server.tcp.connection import Connection

SETTLE_S = 300.0
_TURNS = 8
"""Turns of the event loop in which a batch and its consequences usually end."""


class _Log:
    """Keep what the daemon logs."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **fields: self.lines.append(f"{level} {event} {fields}")


class InProcess:
    """A daemon on a memory store. The `store` of one that ended can be passed to the next."""

    request = 10
    """The number of the last request. A session never uses a number twice, over all its
    connections."""

    def __init__(
        self,
        folder: Path,
        *,
        store: MemoryStore | None = None,
        now_ms: int = NOW_MS,
        **settings: Any,
    ) -> None:
        self.log = _Log()
        settings = {"backup_dir": str(folder)} | NO_DISK_LIMITS | settings
        given = Settings(store="memory:", listen="tcp://127.0.0.1:0", **settings)
        self.daemon = Daemon(given, cast(Any, self.log))
        self.sources = Sources()
        self.sources.now_ms = now_ms
        self.daemon.roles.clock = Clock(10**15, self.sources)
        if store is not None:
            self.daemon.roles.store = store
        self._numbers = 0

    async def __aenter__(self) -> Self:
        await self.daemon.start()
        await self.shard.loaded.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self.daemon.listener.connections:
            cast(FakeTransport, connection._transport).lose()
        await self.daemon.stop()

    @property
    def shard(self) -> Shard:
        assert self.daemon.roles.shard is not None
        return self.daemon.roles.shard

    @property
    def store(self) -> MemoryStore:
        return cast(MemoryStore, self.daemon.roles.store)

    @property
    def alive(self) -> bool:
        return not self.shard.failed.done()

    def connect(self, *, hello: bool = True, **options: Any) -> Peer:
        self._numbers += 1
        peer = Peer(cast(Connection, self.daemon.listener()), self._numbers)
        if hello:
            peer.say_hello(**options)
        return peer

    def pass_time(self, ms: int) -> None:
        self.sources.now_ms += ms
        self.shard.wake()

    async def turn(self) -> None:
        """Let the daemon do what is possible at once."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Wait until all requests are committed and answered."""
        deadline_s = time.monotonic() + SETTLE_S
        core, now_ms = self.shard.core, self.sources.now_ms
        while True:
            await self.turn()
            assert self.alive, self.shard.failed.exception()
            self.shard.committer.kick()
            busy = {
                "batch": core.sealed is not None or not core.open.is_empty(),
                "firing": core.firing or core.refiring,
                "listings": self.shard.listings.count,
                "commands": self.shard.commands.waiting,
                "deciding": self.shard.coalescing.waiting,
                "runnable": core.runnable,
                "schedules": [
                    planned.name
                    for planned in core.schedule_heap.by_name.values()
                    if planned.cancelling or planned.staged
                ],
                "occurrences": (core.schedule_heap.next_ms() or now_ms + 1) <= now_ms,
            }
            # Threads write backups, look into the history and try resets; a group that is deleted
            # is looked at now and then.
            lines = [
                queue.count
                for queue in self.shard.request_queues
                if queue is not self.shard.listings
            ]
            slow = {
                "lines": lines if any(lines) else (),
                "groups": [t.name for t in core.topics.values() if t.closing],
                "topics": core.closing_topics,
            }
            if not (any(busy.values()) or any(slow.values())):
                return
            left = {what: some for what, some in (busy | slow).items() if some}
            assert time.monotonic() < deadline_s, f"it does not come to rest: {left}"
            self.shard.wake()
            await asyncio.sleep(0.01 if any(slow.values()) else 0)  # real time: a thread does it

    async def send(self, peer: Peer, *frames: tuple[Any, ...]) -> list[Any]:
        """Feed frames together and return their answers in order."""
        first = InProcess.request + 1
        InProcess.request += len(frames)
        peer.feed(b"".join(encode((int(f[0]), n, *f[1:])) for n, f in enumerate(frames, first)))
        await self.settle()
        result = {frame[1]: frame for frame in peer.frames() if frame[0] in (T.OK, T.ERROR)}
        return [result[n][2:] for n in range(first, first + len(frames))]

    async def ask(self, peer: Peer, *frame: Any) -> Any:
        """Send a frame and return the value of its OK. Fail if the answer is an error."""
        ((result, *error),) = await self.send(peer, frame)
        assert not error, error
        return result

    def recount(self) -> dict[tuple[int, str], str]:
        """Compare all counts of the engine with a slow count. Call it when settled."""
        core, store = self.shard.core, self.store
        assert core.sealed is None

        def known(ids: list[int]) -> dict[int, TaskSnapshot]:
            overlaid = self.shard.reader._overlay(
                RunningRead(ids),
                Heads(others={i: store._stored(store._tasks[i]) for i in ids if i in store._tasks}),
                ids,
            )
            return dict(overlaid)

        rows = SimpleNamespace(
            tasks=dict(store._tasks),
            groups=kept(store, GROUP),
            transactions=kept(store, TRANSACTION),
            paused_keys=kept(store, PAUSED_KEY),
            targets=kept(store, TARGET),
            counter=kept(store, COUNTER),
        )
        return recount(
            cast(Any, SimpleNamespace(engine=self.shard.engine, core=core, rows=rows, known=known))
        )
