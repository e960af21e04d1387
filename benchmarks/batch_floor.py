"""Cost of a batch of one task, part by part, on this machine.

    python -m benchmarks.batch_floor [--store redis] [--count 2000] [--rounds 3] [--dir FOLDER]

One enqueue after the other gives each batch one task. Each part is measured alone, one after the
other as a lone producer asks, and beside them the daemon that has all of them: the p50 of one, and
the processor time of one. The median of the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import payload
from benchmarks.client_jobs import loop_factory
from benchmarks.environment import choose_folder
from benchmarks.pump import Stream, one_by_one
from benchmarks.redis_server import Redis, TickwheelOnRedis, find_redis
from benchmarks.servers import Echo, Server, Tickwheel
from benchmarks.wire import Control, FrameCounter, connect
from tickwheel.api.frames import FrameType
from tickwheel.model.kinds import SESSION, Effects, keyed
from tickwheel.model.records import ID_STEP, SessionRow, TaskRow
from tickwheel.persistence.redis.connection import connect as connect_driver
from tickwheel.persistence.redis.driver import options_from, pack
from tickwheel.persistence.redis.layout import COMMIT, TopicNumbers, prepare
from tickwheel.persistence.redis.store import RedisStore
from tickwheel.persistence.sqlite.database import SqliteOptions
from tickwheel.persistence.sqlite.store import SqliteStore, StoreThread
from tickwheel.persistence.sqlite.writer import Writer
from tickwheel.protocol import Decoder, encode_all

BODY = b"x" * 100
BLOCK = 4_096
PLACES = 256
FRAME_BYTES_MAX = 1 << 20
OWNER = "batch-floor"


class Price(NamedTuple):
    """The cost of one execution of a part."""

    p50_us: float
    processor_us: float
    """Processor time of all threads of the measured process, without the load."""


Part = Callable[[Path, int], Price]
"""Measures its part in a fresh folder, the given number of times."""


def lone_batch(number: int) -> Effects:
    """Return the batch of an enqueue by a producer with a session, which has the previous
    answer."""
    row = TaskRow(number * ID_STEP, number + 3_600_000, "bench", BODY)
    answer = (number, row.id, 1, number)
    effects = Effects(
        enqueued={row.id: row},
        enqueued_bytes=len(BODY),
        records=keyed(SESSION, [SessionRow(b"s" * 16, number, number, (answer,), ())]),
    )
    effects.drop(SESSION, (b"s" * 16, number - 1))
    effects.id_mark, effects.position_ms = row.id, number
    return effects


def repeated(act: Callable[[int], object], count: int) -> Price:
    """Call ``act`` with 1, 2, 3, … and time each call."""
    took: list[float] = []
    began_s = time.process_time()
    for number in range(1, count + 1):
        at_s = time.perf_counter()
        act(number)
        took.append(time.perf_counter() - at_s)
    spent_s = time.process_time() - began_s
    return Price(statistics.median(took) * 1e6, spent_s / count * 1e6)


# --- the disk ------------------------------------------------------------------------------------


def sync(folder: Path, count: int, *, in_place: bool) -> Price:
    descriptor, block = os.open(folder / "probe", os.O_CREAT | os.O_WRONLY), os.urandom(BLOCK)

    def one(number: int) -> None:
        os.pwrite(descriptor, block, (number % PLACES if in_place else number) * BLOCK)
        os.fdatasync(descriptor)

    with contextlib.ExitStack() as opened:
        opened.callback(os.close, descriptor)
        os.pwrite(descriptor, block * PLACES * in_place, 0)
        os.fsync(descriptor)
        return repeated(one, count)


# --- SQLite --------------------------------------------------------------------------------------


@contextlib.contextmanager
def database(folder: Path) -> Iterator[tuple[Writer, int]]:
    writer = Writer(str(folder / "store.db"), SqliteOptions())
    opened = writer.open(OWNER, 1)
    try:
        yield writer, opened.epoch
    finally:
        writer.close(clean=True)


def transaction(folder: Path, count: int, *, is_empty: bool, synced: bool) -> Price:
    """Time SQLite alone: a transaction that changes one row of ``meta``, or the batch of one task
    in one statement."""
    with database(folder) as (writer, epoch):
        connection = writer._connection
        assert isinstance(connection, sqlite3.Connection), "it is open"
        if not synced:
            connection.execute("PRAGMA synchronous = OFF")

        def empty(number: int) -> None:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'position_ms'", (number,))

        def whole(number: int) -> None:
            assert writer._apply(connection, epoch, OWNER, number, batches[number])

        batches = {number: lone_batch(number) for number in range(1, count + 1)}
        return repeated(empty if is_empty else whole, count)


def many_statements(folder: Path, count: int) -> Price:
    """Time SQLite alone with the statements of a batch of any size."""
    with database(folder) as (writer, epoch):
        connection = writer._connection
        assert isinstance(connection, sqlite3.Connection), "it is open"
        batches = {number: lone_batch(number) for number in range(1, count + 1)}
        return repeated(
            lambda number: writer._transaction(connection, epoch, OWNER, number, batches[number]),
            count,
        )


def commit(folder: Path, count: int) -> Price:
    """Time the work of the store's thread for the batch."""
    with database(folder) as (writer, epoch):
        batches = {number: lone_batch(number) for number in range(1, count + 1)}
        return repeated(lambda n: writer.commit(epoch, OWNER, n, batches[n]), count)


# --- threads and the event loop ------------------------------------------------------------------


async def awaited(ask: Callable[[int], Awaitable[object]], count: int) -> Price:
    """Await ``ask`` with 1, 2, 3, … and time each call."""
    took: list[float] = []
    began_s = time.process_time()
    for number in range(1, count + 1):
        at_s = time.perf_counter()
        await ask(number)
        took.append(time.perf_counter() - at_s)
    spent_s = time.process_time() - began_s
    return Price(statistics.median(took) * 1e6, spent_s / count * 1e6)


def run(work: Coroutine[Any, Any, Price]) -> Price:
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def hand_over(folder: Path, count: int) -> Price:
    """Time a call from the event loop to the idle store's thread and back."""

    async def measure() -> Price:
        thread = StoreThread("hand-over")
        try:
            return await awaited(lambda _: thread.ask(bool), count)
        finally:
            thread.shutdown()

    return run(measure())


def store(folder: Path, count: int) -> Price:
    """Time the commit as the event loop calls it."""

    async def measure() -> Price:
        sqlite = SqliteStore(str(folder / "store.db"))
        opened = await sqlite.open(OWNER, 1)
        batches = {number: lone_batch(number) for number in range(1, count + 1)}
        try:
            return await awaited(lambda n: sqlite.commit(opened.epoch, OWNER, n, batches[n]), count)
        finally:
            await sqlite.close(clean=True)

    return run(measure())


# --- Redis ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[Redis]:
    redis = find_redis()
    assert redis is not None, "main has looked"
    with Redis(folder / "redis", redis[0]) as server:
        yield server


def plain_ping(folder: Path, count: int) -> Price:
    """Time a command that needs no work in Redis, sent by a program that does nothing else."""
    with redis_server(folder) as server, connect(server.port) as sock:

        def one(_: int) -> None:
            sock.sendall(b"PING\r\n")
            sock.recv(64)

        return repeated(one, count)


def driver_ping(folder: Path, count: int) -> Price:
    """Time this command through the event loop and the driver."""

    async def measure(url: str) -> Price:
        driver = await connect_driver(options_from(url))
        try:
            return await awaited(lambda _: driver.call("PING"), count)
        finally:
            await driver.close()

    with redis_server(folder) as server:
        return run(measure(server.url))


def packing(folder: Path, count: int) -> Price:
    """Time the encoding of the batch as arguments of its script."""
    endings_max, numbers = options_from("redis://localhost/0").endings_max, TopicNumbers()
    batches = {number: lone_batch(number) for number in range(1, count + 1)}
    return repeated(lambda number: prepare(batches[number], endings_max, numbers), count)


def plain_script(folder: Path, count: int, *, of_redis: bool = False) -> Price:
    """Time the packed script of the batch, sent by a program that does nothing else, or the CPU
    time of Redis for it."""

    async def opened(url: str) -> tuple[RedisStore, int, bytes]:
        store = RedisStore(options_from(url))
        epoch = (await store.open(OWNER, 1)).epoch
        return store, epoch, store._writer._sender.link

    async def measure(server: Redis) -> Price:
        store, epoch, link = await opened(server.url)
        commands = {n: script_command(store, epoch, link, n) for n in range(1, count + 1)}
        with connect(server.port) as sock:

            def one(number: int) -> None:
                sock.sendall(commands[number])
                assert b"applied" in sock.recv(256)

            sock.sendall(b"".join(pack(("SCRIPT", "LOAD", COMMIT.text))))
            sock.recv(256)
            before_s = server.cpu_s()
            price = repeated(one, count)
            spent_us = (server.cpu_s() - before_s) / count * 1e6
        await store.close(clean=False)
        return price._replace(processor_us=spent_us) if of_redis else price

    with redis_server(folder) as server:
        return run(measure(server))


def script_command(store: RedisStore, epoch: int, link: bytes, number: int) -> bytes:
    """Return the command that the store sends for a batch without others."""
    effects = lone_batch(number)
    ((lowest, _),) = effects.enqueued.items()
    (flat,) = prepare(effects, store.options.endings_max, TopicNumbers()).flat
    fence, keys = (epoch, OWNER, link), store.keys.all
    marks = (number, 1, b"%019d" % lowest, b"%019d" % effects.id_mark, effects.position_ms)
    return b"".join(pack(("EVALSHA", COMMIT.sha, len(keys), *keys, *fence, *marks, flat)))


def redis_store(folder: Path, count: int) -> Price:
    """Time the commit as the event loop calls it."""

    async def measure(url: str) -> Price:
        store = RedisStore(options_from(url))
        opened = await store.open(OWNER, 1)
        batches = {number: lone_batch(number) for number in range(1, count + 1)}
        try:
            return await awaited(lambda n: store.commit(opened.epoch, OWNER, n, batches[n]), count)
        finally:
            await store.close(clean=True)

    with redis_server(folder) as server:
        return run(measure(server.url))


def daemon_on_redis(folder: Path, count: int) -> Price:
    with contextlib.ExitStack() as opened:
        redis = opened.enter_context(redis_server(folder))
        server = opened.enter_context(TickwheelOnRedis(folder / "daemon", redis))
        sock = opened.enter_context(Control(server.port, session=True).sock)
        return asked(server, sock, count)


# --- frames --------------------------------------------------------------------------------------


def frames(folder: Path, count: int) -> Price:
    """Time the decoding of a frame and the encoding of its answer."""
    decoder = Decoder(FRAME_BYTES_MAX)
    load = payload.enqueue_frames(count, 1, 1, seed=1)
    sent = [load.blob[start:end] for start, end in pairwise([0, *load.ends])]

    def one(number: int) -> bytes:
        (frame,) = decoder.feed(sent[number - 1])
        return encode_all([(int(FrameType.OK), frame[1], (number, (number,)))])

    return repeated(one, count)


def asked(server: Server, sock: socket.socket, count: int) -> Price:
    """Time single frames, each sent after the previous answer."""
    stream = Stream(sock, payload.enqueue_frames(count, 1, 1, seed=1), 1, FrameCounter())
    before_s = server.cpu_s()
    took = one_by_one(stream)
    spent_s = server.cpu_s() - before_s
    return Price(statistics.median(took) * 1e6, spent_s / count * 1e6)


def echo(folder: Path, count: int) -> Price:
    """Time the frame with a server that only sends it back."""
    with Echo(folder / "echo") as server, connect(server.port) as sock:
        return asked(server, sock, count)


def daemon(folder: Path, count: int, *, store: str | None) -> Price:
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(Tickwheel(folder / "daemon", store=store))
        sock = opened.enter_context(Control(server.port, session=True).sock)
        return asked(server, sock, count)


SQLITE: dict[str, Part] = {
    "a frame over loopback and back (echo)": echo,
    "fdatasync of 4 KiB, appended": partial(sync, in_place=False),
    "fdatasync of 4 KiB, written over": partial(sync, in_place=True),
    "SQLite: one row, not synced": partial(transaction, is_empty=True, synced=False),
    "SQLite: one row, synced": partial(transaction, is_empty=True, synced=True),
    "SQLite: the batch, one statement, not synced": partial(
        transaction, is_empty=False, synced=False
    ),
    "SQLite: the batch, one statement, synced": partial(transaction, is_empty=False, synced=True),
    "SQLite: the batch, many statements, synced": many_statements,
    "the commit of the store's thread": commit,
    "to the store's thread and back, nothing done": hand_over,
    "the commit, asked for by the event loop": store,
    "a frame decoded, its answer encoded": frames,
    "the daemon without a disk (memory:)": partial(daemon, store="memory:"),
    "the daemon": partial(daemon, store=None),
}

REDIS: dict[str, Part] = {
    "a frame over loopback and back (echo)": echo,
    "Redis: a command that does nothing (PING)": plain_ping,
    "the same through event loop and driver": driver_ping,
    "Redis: the batch's script, packed beforehand": plain_script,
    "the same, and what Redis spends on it": partial(plain_script, of_redis=True),
    "the batch, packed": packing,
    "the commit, asked for by the event loop": redis_store,
    "a frame decoded, its answer encoded": frames,
    "the daemon without a store (memory:)": partial(daemon, store="memory:"),
    "the daemon": daemon_on_redis,
}
PARTS = {"sqlite": SQLITE, "redis": REDIS}


def measured(parts: dict[str, Part], count: int, rounds: int, folder: Path) -> dict[str, Price]:
    """Measure all parts in turn, repeatedly. Return the medians of each."""
    by_part: dict[str, list[Price]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            with tempfile.TemporaryDirectory(dir=folder) as fresh:
                by_part[name].append(part(Path(fresh), count))
    return {
        name: Price(*(statistics.median(column) for column in zip(*prices, strict=True)))
        for name, prices in by_part.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table. Return 0, or 2 without a Redis."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_floor", description=__doc__)
    parser.add_argument("--store", choices=tuple(PARTS), default="sqlite")
    parser.add_argument("--count", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None, help="a folder on a real disk")
    options = parser.parse_args(arguments)
    if options.store == "redis" and find_redis() is None:
        print("--store redis: no redis-server is installed", file=sys.stderr)
        return 2
    prices = measured(
        PARTS[options.store], options.count, options.rounds, choose_folder(options.dir)
    )
    print(f"{'part':46} {'p50':>9} {'processor':>12}")
    for name, price in prices.items():
        print(f"{name:46} {price.p50_us:6.0f} us {price.processor_us:9.0f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
