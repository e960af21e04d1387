"""What a driver does when not even a descriptor is left: Redis is away, and may come back. And how
long a call may take, one after the other on one connection."""

from __future__ import annotations

import asyncio
import os
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hiredis
import pytest

from support.redis_server import RedisServer
from support.waiting import comes, soon
from tickwheel.persistence.on_server import NoReply, NotConnected
from tickwheel.persistence.redis.connection import Connection, check, connect
from tickwheel.persistence.redis.driver import ServerError, options_from
from tickwheel.persistence.redis.store import RedisStore


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """For this process, in which nothing else runs meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(used)]  # fills the gaps below
    highest = max(map(int, os.listdir("/proc/self/fd")))
    for fd in spare[len(spare) - count :]:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in spare[: len(spare) - count]:
            os.close(fd)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
async def test_without_descriptors_redis_is_away(driver: str, count: int) -> None:
    """With one left it comes as far as a port at which nobody answers."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    options = options_from(f"redis://127.0.0.1:{port}/0?driver={driver}")
    check(options)  # imported, as in a daemon
    with descriptors_left(count), pytest.raises(NotConnected):
        await connect(options)
    with pytest.raises(NotConnected):
        await connect(options)


@pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
async def test_each_call_has_its_own_patience(driver: str, shared_redis: RedisServer) -> None:
    """One that may take a minute does not have the next one, which gets no answer, wait as long;
    and the connection after it takes its own answers."""
    line = Connection(options_from(f"{shared_redis.url()}?driver={driver}&call_ms=100"))
    try:
        assert await line.call("ECHO", "a", timeout_ms=60_000) == b"a"
        for _ in range(3):
            async with asyncio.timeout(20):
                with pytest.raises(NoReply, match="did not answer within 100 ms") as error:
                    await line.call("BLPOP", "nobody:pushes", 0)
            assert error.value.silent
            assert not line.connected
            assert await line.call("ECHO", "b", timeout_ms=60_000) == b"b"
        assert line.connections == 4
    finally:
        await line.close()


@pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
async def test_a_call_that_takes_longer_than_others_may_is_waited_for(
    driver: str, shared_redis: RedisServer
) -> None:
    """The timer of a former call rings while it is under way."""
    line = Connection(options_from(f"{shared_redis.url()}?driver={driver}&call_ms=100"))
    try:
        assert await line.call("PING") in (b"PONG", "PONG")
        assert await line.call("BLPOP", "nobody:pushes", "0.4", timeout_ms=60_000) is None
        assert line.connections == 1
    finally:
        await line.close()


@pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
async def test_close_ends_a_call_under_way(driver: str, shared_redis: RedisServer) -> None:
    wire = await connect(options_from(f"{shared_redis.url()}?driver={driver}"))
    calling = asyncio.create_task(wire.call("BLPOP", "nobody:pushes", 0))
    await asyncio.sleep(0)
    await wire.close()
    async with asyncio.timeout(20):
        with pytest.raises(NoReply):
            await calling
    with pytest.raises(NoReply):
        await wire.call("PING")


@pytest.mark.parametrize("driver", ["redis", "asyncio-redis"])
async def test_errors_and_large_answers_keep_the_connection(
    driver: str, shared_redis: RedisServer
) -> None:
    """An answer of several reads is one answer, and an error leaves the connection as it was."""
    wire = await connect(options_from(f"{shared_redis.url()}?driver={driver}"))
    try:
        body = bytes(range(256)) * 8_192
        assert await wire.call("ECHO", body) == body
        with pytest.raises(ServerError) as error:
            await wire.call("EVALSHA", "0" * 40, 0)
        assert error.value.kind == "NOSCRIPT"
        assert await wire.call("ECHO", b"after it") == b"after it"
    finally:
        await wire.close()


async def test_an_unexpected_answer_ends_the_connection() -> None:
    """It could be taken for the answer to the next call."""
    talking: list[asyncio.StreamWriter] = []

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talking.append(writer)
        commands = hiredis.Reader()
        while data := await reader.read(4_096):
            commands.feed(data)
            while commands.gets() is not False:
                writer.write(b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(answers, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        wire = await connect(options_from(f"redis://127.0.0.1:{port}/0"))
        assert await wire.call("PING") == b"OK"
        talking[0].write(b"+AND MORE\r\n")
        async with asyncio.timeout(20):
            await talking[0].wait_closed()
        with pytest.raises(NoReply, match="an answer without a request: b'AND MORE'"):
            await wire.call("PING")
        await wire.close()


def connections_of(server: RedisServer) -> int:
    """How many connections a store has open."""
    return server.call("CLIENT", "LIST").count(b"name=tickwheel")


STEPS = [*range(0, 8, 2), *range(8, 26), *range(30, 96, 12), 192, 256]
DRIVERS = ["redis", "asyncio-redis"]
PATIENT = "connect_ms=20000&call_ms=20000"


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_cancelled_opening_leaves_no_connection(driver: str, tmp_path: Path) -> None:
    """Neither a task nor a connection; and the next one opens it."""
    tasks, ends = asyncio.all_tasks(), Counter[str]()
    server = RedisServer(tmp_path / "redis").start()
    try:
        for steps in STEPS:
            store = RedisStore(options_from(f"{server.url()}?driver={driver}&{PATIENT}"))
            opening = asyncio.ensure_future(store.open("me", steps))
            for _ in range(steps):
                await asyncio.sleep(0)
            for _ in range(1 + steps % 3):  # who cancels again does not wait for the clean-up
                opening.cancel()
                await asyncio.sleep(0)
            await soon(asyncio.wait((opening,)))
            ends["cancelled" if opening.cancelled() else "opened"] += 1
            if not opening.cancelled():
                assert opening.result().epoch
                await store.close(clean=True)
            assert asyncio.all_tasks() <= tasks
            await comes(lambda: connections_of(server) == 0)
        assert ends["cancelled"] > len(STEPS) / 2, ends
    finally:
        server.stop()
