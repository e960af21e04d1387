"""What stands between the processes of a torture run over nodes, and is a process of its own: a
busy test would hold them up.

A ``Wall`` is between a node and the servers of Redis; ``Doors`` are between clients and all nodes.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from crash.network import Net
from support.ports import free_ports
from support.redis_proxy import Proxy
from support.waiting import rest

TESTS = Path(__file__).resolve().parents[1]
DEAD_S = 12.0
"""What a black hole leaves dead is cut after so long: the real client has given it up by then, and
one that keeps nothing alive waits for an answer for longer than that."""
_ADDRESS = re.compile(rb"(127\.0\.0\.1(?:\r\n)?:)(\d{5})")


class _Aside:
    """Another process of this module, which is told by lines what to do."""

    _process: asyncio.subprocess.Process | None = None

    async def _begin(self, *arguments: object) -> str:
        """Start it; the line that it says when it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "crash.walls", *map(str, arguments),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(TESTS)}, cwd=TESTS.parent,
        )  # fmt: skip
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode()

    async def stop(self) -> None:
        """It ends when nobody speaks to it any more."""
        if self._process is not None:
            await self._process.communicate(b"")  # its standard input ends

    def _say(self, *words: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(f"{' '.join(map(str, words))}\n".encode())


class Wall(_Aside):
    """What stands between one node and all servers of Redis. The servers name themselves by their
    own addresses, in whose places the proxies' are put."""

    def __init__(self, servers: Sequence[int]) -> None:
        self._servers = servers
        self._ports: dict[int, int] = {}
        """Server → proxy."""

    async def start(self) -> None:
        ports = map(int, (await self._begin("wall", *self._servers)).split())
        self._ports = dict(zip(self._servers, ports, strict=True))

    def url(self, url: str) -> str:
        """The address of Redis as the node has to know it."""
        return _renamed(url.encode(), self._ports).decode()

    async def cut(self, rnd: random.Random, hold_s: float) -> None:
        """Nothing arrives; then all of it does, perhaps long after others have taken over."""
        self._say("hold", *self._servers)
        await rest(hold_s)
        passing = [server for server in self._servers if rnd.random() < 0.5]
        self._say("let_new_through", *passing)
        await rest(hold_s / 4 * rnd.random())
        self._say("let_go", *self._servers)


async def _be_wall(servers: Sequence[int]) -> None:
    """Be the wall before these servers, until standard input ends."""
    ports = dict[int, int]()
    proxies = {server: await _Renaming(server, ports).start() for server in servers}
    ports |= {server: proxy.port for server, proxy in proxies.items()}
    print(*ports.values(), flush=True)  # noqa: T201  # the answer
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, *some = line.split()
        for server in map(int, some):
            getattr(proxies[server], word)()
    for proxy in proxies.values():
        await proxy.stop()


def _renamed(data: bytes, ports: Mapping[int, int]) -> bytes:
    def other(found: re.Match[bytes]) -> bytes:
        return found[1] + b"%d" % ports.get(int(found[2]), int(found[2]))

    return _ADDRESS.sub(other, data)


class _Renaming(Proxy):
    """Both ports have five digits, so nothing that it changes becomes longer."""

    def __init__(self, port: int, ports: Mapping[int, int]) -> None:
        """``ports``: those of servers, and those to put in their places."""
        super().__init__(port)
        self._ports = ports

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rest_ = b""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                # An address may be in two pieces; only what ends in a line can be an answer's end.
                data = rest_ + data
                end = data.rfind(b"\r\n") + 2 if b"\r\n" in data else 0
                if data[:end].endswith(b"127.0.0.1\r\n"):
                    end -= len(b"127.0.0.1\r\n")
                data, rest_ = data[:end], data[end:]
                writer.write(_renamed(data, self._ports))
        writer.close()


class Doors(_Aside):
    """The ports at which clients find the nodes: a row for each, of its front door and the daemons
    of its shards. A node advertises its row, and listens where nobody else is told of."""

    def __init__(self, seed: int, count: int) -> None:
        """``count``: the ports of a row."""
        self._seed = seed
        self._count = count
        self._telling = asyncio.Lock()
        self._rows: dict[int, int] = {}
        """The first port of a row → that at which its node listens."""

    def before(self, first_port: int) -> int:
        """The first port of a new row, before the ports from this one on. Call it before start."""
        row = free_ports(self._count)
        self._rows[row] = first_port
        return row

    async def start(self) -> None:
        pairs = (f"{row}:{target}" for row, target in self._rows.items())
        assert await self._begin("doors", self._seed, self._count, *pairs) == "ready\n"

    async def tell(self, word: str, row: int) -> None:
        """Say it, and wait until it is done."""
        assert self._process is not None and self._process.stdout is not None
        async with self._telling:
            self._say(word, row)
            await self._process.stdout.readline()

    async def shut(self, row: int, hold_s: float) -> None:
        """All connections to a node are reset, and all that are tried meanwhile."""
        await self.tell("shut", row)
        await rest(hold_s)
        await self.tell("unshut", row)

    async def swallow(self, row: int, hold_s: float) -> None:
        """A black hole: nothing comes through in either direction, and nobody is told. Afterwards
        some connections go on, and all comes late; some are reset; some stay dead for
        ``DEAD_S``, during which neither end is told that the other has closed it."""
        await self.tell("swallow", row)
        await rest(hold_s)
        await self.tell("unswallow", row)


async def _be_doors(seed: int, count: int, pairs: Sequence[str]) -> None:
    """Be the doors of these rows (``ROW:TARGET``), until standard input ends."""
    rows: dict[int, list[Net]] = {}
    for row, target in (map(int, pair.split(":")) for pair in pairs):
        rnd = random.Random(f"{seed}/doors/{len(rows)}")
        rows[row] = [await Net(rnd, target + i, row + i).start() for i in range(count)]
    print("ready", flush=True)  # noqa: T201  # the answer
    while line := await asyncio.to_thread(sys.stdin.readline):
        word, row_text = line.split()
        for net in rows[int(row_text)]:
            if word in ("shut", "unshut"):
                net.shut(is_shut=word == "shut")
            elif word == "swallow":
                net.swallow()
            else:
                net.unswallow(DEAD_S)
        print("done", flush=True)  # noqa: T201  # the answer
    for net in (net for nets in rows.values() for net in nets):
        await net.stop()


def _main(kind: str, *arguments: str) -> None:
    if kind == "wall":
        asyncio.run(_be_wall([int(port) for port in arguments]))
    else:
        seed, count, *pairs = arguments
        asyncio.run(_be_doors(int(seed), int(count), pairs))


if __name__ == "__main__":
    _main(*sys.argv[1:])
