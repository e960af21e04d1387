"""Nemesis *network*: a TCP proxy that delays, loses, tears and forgets, and frozen consumers.

It stands between the clients and each daemon, and between a daemon and Redis. TCP repeats what
was lost, so a loss in one direction is a silence of that direction which ends either in
everything that was held, or in a connection that is gone; nothing is ever left out of a
connection that goes on. What was held when one side gave up may still arrive at the other: late
frames. Every silence is shorter than a client's patience, so "no answer" stays a violation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

from crash.plan import LEASE_MS, Plan
from crash.records import Delivered, Finished, Journal
from support.waiting import rest

CHUNK_BYTES = 1 << 16
SLOW_BYTES_MAX = 400
SLOW_S = 0.004
SHARE = 0.6
"""Share of connections that a fault affects."""
REST_S_MAX = 0.5
HOLD_S_MAX = 1.6
"""Longer than several leases, shorter than a client's patience."""
FREEZE_LEASES_MAX = 4
KINDS = ("cut", "mid-frame", "up", "down", "both", "half-open", "deaf", "slow", "refuse")
TESTS = Path(__file__).resolve().parents[1]


class _Way:
    """One direction of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.open = asyncio.Event()
        """Not set: what comes is held."""
        self.open.set()
        self.slow = False
        self.holds = False
        """It has something that was not passed on."""
        self.last = False
        """Nothing follows what it holds."""
        self.tear: Callable[[], None] | None = None
        """Called after a part of the next bytes was passed on."""

    async def pump(self, rnd: random.Random) -> None:
        """Pass bytes on whole until one side ends or the connection is cut."""
        with contextlib.suppress(OSError):
            while not self.last and (data := await self._reader.read(CHUNK_BYTES)):
                self.holds = True
                await self.open.wait()
                tear, self.tear = self.tear, None
                if tear is not None:
                    self._writer.write(data[: rnd.randrange(len(data))])
                    await self._writer.drain()
                    return tear()
                await self._pass(data, rnd)
                self.holds = False
        return None

    async def _pass(self, data: bytes, rnd: random.Random) -> None:
        while self.slow and data:
            count = rnd.randint(1, SLOW_BYTES_MAX)
            self._writer.write(data[:count])
            await self._writer.drain()
            data = data[count:]
            await rest(SLOW_S * rnd.random())
        self._writer.write(data)
        await self._writer.drain()


class _Connection:
    """Both directions, and both ends."""

    def __init__(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.up = _Way(client[0], server[1])
        self.down = _Way(server[0], client[1])
        self._client, self._server = client[1], server[1]

    @property
    def ways(self) -> tuple[_Way, _Way]:
        return self.up, self.down

    async def run(self, rnd: random.Random) -> None:
        up = asyncio.create_task(self.up.pump(rnd))
        down = asyncio.create_task(self.down.pump(rnd))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if down.done():
                await self._pass_rest(up)
            elif not self.down.open.is_set() or not self.up.open.is_set():
                # The client has gone; the server finds that out by itself, or is told it late.
                await asyncio.wait((up, down))
        finally:
            up.cancel()
            down.cancel()
            self._client.close()  # what was passed on arrives
            self._server.close()

    async def _pass_rest(self, up: asyncio.Task[None]) -> None:
        """The server has gone. What is held may come late; then its client sees the end, which
        otherwise would wait for an answer for ever."""
        for way in self.ways:
            await way.open.wait()
        self.up.last = True
        if self.up.holds:
            await asyncio.wait((up,))

    def cut(self) -> None:
        """Both ends see it at once."""
        self.reset_client()
        self.reset_server()

    @property
    def is_silent(self) -> bool:
        """Whether nothing of it is passed on."""
        return not self.up.open.is_set()

    def fall_silent(self) -> None:
        for way in self.ways:
            way.open.clear()

    def wake(self, *, cut: bool) -> None:
        """Pass on what was held, or lose it with the connection."""
        if cut:
            self.cut()
        for way in self.ways:
            way.open.set()

    def reset(self) -> None:
        """Both ends get RST, and lose what they have not read."""
        for writer in (self._client, self._server):
            _reset(writer)

    def reset_client(self) -> None:
        self._client.transport.abort()

    def reset_server(self) -> None:
        self._server.transport.abort()


def _reset(writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)  # on, for no time: closed without a FIN
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


class Net:
    """The proxy before one server; ``port`` is where clients come. ``target`` may be set later."""

    def __init__(self, rnd: random.Random, target: int = 0, port: int = 0) -> None:
        self.target = target
        self.port = port
        self._rnd = rnd
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing = False
        self._on_new: Callable[[_Connection], None] | None = None
        """What a fault does to connections that are made while it lasts."""

    async def start(self) -> Net:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()
        self._refusing = True
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def suffer(self, kind: str, hold_s: float) -> None:
        """One fault from begin to end; afterwards the network is well."""
        some = [c for c in self._connections if self._rnd.random() < SHARE]
        if kind == "refuse":
            await self._refuse(some, hold_s)
        elif kind == "cut":
            for connection in some:
                connection.cut()
        elif kind == "mid-frame":
            await self._mid_frame(some, hold_s)
        elif kind == "slow":
            await self._change(some, hold_s, "slow")
        elif kind == "half-open":
            await self._forgotten(some, hold_s, by_client=True)
        elif kind == "deaf":
            await self._forgotten(some, hold_s, by_client=False)
        else:
            await self._change(some, hold_s, kind)

    # --- faults that last until they are ended -----------------------------------------------

    def shut(self, *, is_shut: bool) -> None:
        """From now on every connection is reset, or none any more."""
        self._refusing = is_shut
        if is_shut:
            for connection in self._connections:
                connection.reset()

    def swallow(self) -> None:
        """From now on nothing is passed on, neither way, and nobody is told."""
        self._on_new = _Connection.fall_silent
        for connection in self._connections:
            connection.fall_silent()

    def unswallow(self, dead_s: float) -> None:
        """What comes from now on is passed on. Of the connections that were silent one third gets
        all that was held, one third is cut, one third is cut after ``dead_s``."""
        self._on_new = None
        loop = asyncio.get_running_loop()
        for connection in self._connections:
            if not connection.is_silent:
                continue
            fate = self._rnd.randrange(3)
            if fate == 2:
                loop.call_later(dead_s, partial(connection.wake, cut=True))
            else:
                connection.wake(cut=fate == 1)

    # --- the faults --------------------------------------------------------------------------

    async def _refuse(self, some: Sequence[_Connection], hold_s: float) -> None:
        """Nobody gets in."""
        self._refusing = True
        for connection in some:
            connection.cut()
        await rest(hold_s)
        self._refusing = False

    async def _mid_frame(self, some: Sequence[_Connection], hold_s: float) -> None:
        """Cut connections in the middle of the next bytes of either direction."""
        for connection in some:
            self._rnd.choice(connection.ways).tear = connection.cut
        await rest(hold_s)
        for connection in some:
            for way in connection.ways:
                way.tear = None

    async def _change(self, some: Sequence[_Connection], hold_s: float, kind: str) -> None:
        """``slow``, or silence: ``up``, ``down``, ``both``. New connections have it too. At the
        end half of the silent ones are cut, and what they held is lost."""
        met = list(some)

        def meet(connection: _Connection) -> None:
            for name, way in zip(("up", "down"), connection.ways, strict=True):
                if kind == "slow":
                    way.slow = True
                elif kind in (name, "both"):
                    way.open.clear()

        def meet_new(connection: _Connection) -> None:
            met.append(connection)
            meet(connection)

        for connection in some:
            meet(connection)
        self._on_new = meet_new if self._rnd.random() < SHARE else None
        await rest(hold_s)
        self._on_new = None
        for connection in met:
            if kind != "slow" and self._rnd.random() < 0.5:
                connection.cut()
            for way in connection.ways:
                way.slow = False
                way.open.set()

    async def _forgotten(
        self, some: Sequence[_Connection], hold_s: float, *, by_client: bool
    ) -> None:
        """One end is gone and the other does not know; what was under way comes late. A daemon
        is left without any notice: it has to find out by itself."""
        for connection in some:
            for way in connection.ways:
                way.open.clear()
            if by_client:
                connection.reset_client()
            else:
                connection.reset_server()
        await rest(hold_s)
        for connection in some:
            for way in connection.ways:
                way.open.set()
            if not by_client:
                connection.reset_client()

    # --- connections -------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._refusing:
                return _reset(writer)
            server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            return writer.transport.abort()  # nobody is there: its client sees that at once
        except BaseException:  # the run ends
            writer.transport.abort()
            raise
        finally:
            self._tasks.discard(task)
        connection = _Connection((reader, writer), server)
        self._connections.add(connection)
        self._tasks.add(task)
        if self._on_new is not None:
            self._on_new(connection)
        try:
            await connection.run(self._rnd)
        except asyncio.CancelledError:
            pass  # by ``stop``; Python 3.11 reports a server's task that ends with it
        finally:
            self._connections.discard(connection)
            self._tasks.discard(task)


class Frozen:
    """A consumer in a process of its own, the real client, that is stopped and goes on."""

    def __init__(self, plan: Plan, topic: str, group: str) -> None:
        self._plan = plan
        self._where = topic, group
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "crash.frozen_consumer",
            str(self._plan.seed),
            ",".join(map(str, self._plan.ports)),
            *self._where,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 28,
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            cwd=TESTS.parent,
        )

    async def freeze(self, for_s: float) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        await rest(for_s)
        self._process.send_signal(signal.SIGCONT)

    async def end(self) -> None:
        """When all is consumed: its journal joins the others."""
        assert self._process is not None
        journals, _ = await self._process.communicate(b"")
        if self._process.returncode != 0:
            self._plan.journal("frozen").odd.append(f"ended with {self._process.returncode}")
            return
        self._plan.journals += [journal_of(part) for part in json.loads(journals)]

    def kill(self) -> None:
        """In whatever state it is."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


_KINDS: dict[str, Callable[..., Any]] = {"delivered": Delivered, "finished": Finished}


def journal_text(journals: Sequence[Journal]) -> str:
    """What a consumer has written down, to be sent to another process."""
    return json.dumps(
        [
            {
                "client": journal.client,
                "odd": journal.odd,
                **{name: [astuple(r) for r in getattr(journal, name)] for name in _KINDS},
            }
            for journal in journals
        ]
    )


def journal_of(written: dict[str, Any]) -> Journal:
    journal = Journal(written["client"], odd=written["odd"])
    for name, make in _KINDS.items():
        getattr(journal, name).extend(make(*fields) for fields in written[name])
    return journal


class NetworkFaults:
    """``run`` makes ``count`` faults, each kind at least once, on any of ``nets``."""

    def __init__(
        self,
        nets: Sequence[Net],
        stores: Sequence[Net],
        frozen: Frozen,
        plan: Plan,
        count: int,
        hold_s_max: float,
    ) -> None:
        """``stores``: those of ``nets`` that stand before Redis."""
        self._nets = nets
        self._stores = stores
        self._frozen = frozen
        self._rnd = plan.rnd("network")
        self._count = count
        self._hold_s_max = min(hold_s_max, HOLD_S_MAX)
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        self.disturbed = 0
        """Odd while something is done to the network between a daemon and its store."""

    @property
    def missed(self) -> list[str]:
        kinds = (*KINDS, "freeze")
        return [f"network: {kind} never happened" for kind in kinds if not self.done[kind]]

    def text(self) -> str:
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(self.done.items()))
        return f"network {self.done.total()} ({shown})"

    async def run(self) -> None:
        kinds = (*KINDS, "freeze")
        for _ in range(max(self._count, len(kinds))):
            kind = self._rnd.choice([k for k in kinds if not self.done[k]] or kinds)
            if kind == "freeze":
                leases = self._rnd.uniform(1.0, FREEZE_LEASES_MAX)
                await self._frozen.freeze(leases * LEASE_MS / 1_000)
            else:
                await self._fault(kind)
            self.done[kind] += 1
            await rest(REST_S_MAX * self._rnd.random())

    async def _fault(self, kind: str) -> None:
        net = self._rnd.choice(self._nets)
        counted = 1 if net in self._stores else 0
        self.disturbed += counted
        await net.suffer(kind, self._rnd.uniform(0.05, self._hold_s_max))
        self.disturbed += counted
