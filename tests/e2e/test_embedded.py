"""The daemon inside a program: on its event loop and in a thread, killed with it, broken without
it, and followed by a real daemon on the same file."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from support.daemon import Daemon
from support.redis_server import RedisServer
from support.waiting import comes, soon
from tickwheel import BadRequest, Client, Retry, StoreBroken, TickwheelError, Worker, embedded
from tickwheel.client.delivery import mark_retrieved
from tickwheel.inside import _Log
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.sqlite.store import SqliteStore
from tickwheel.server.daemon import Daemon as Served
from tickwheel.server.settings import Settings
from tickwheel.server.shard.shard import Recovering
from tickwheel.testing import TestWheel
from tickwheel.waiting import finish_despite_cancellation

ROOT = Path(__file__).parents[2]
Begin = Callable[[str], Coroutine[Any, Any, None]]
PROGRAM = """
import asyncio, sys
from tickwheel import embedded

async def main():
    async with embedded(sys.argv[1]) as client:
        await client.enqueue("t", b"before the kill", delay=0.5, key="k")
        print("stored", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'app.db'}"


async def test_tasks_are_delivered_to_handlers_of_the_same_loop(store: str) -> None:
    async with embedded(store) as client:
        worker, came = Worker(client, signals=False), []

        @worker.on("t", retry=Retry.fixed(0.05))
        async def handle(delivery: Any) -> None:
            came.append((delivery.body, delivery.attempt))
            if delivery.attempt == 1:
                raise ValueError("once more")

        running = asyncio.create_task(worker.run())
        await client.enqueue("t", b"x", delay=0.05)
        await comes(lambda: len(came) == 2)
        worker.stop()
        await soon(running)
    assert came == [(b"x", 1), (b"x", 2)]


async def test_pending_tasks_survive_an_embedded_restart(store: str) -> None:
    before = asyncio.all_tasks()
    async with embedded(store) as client:
        receipt = await client.enqueue("t", b"x", delay=3_600, key="k")
    assert asyncio.all_tasks() <= before, "nothing is left running"
    async with embedded(store) as client:
        (task,) = await client.lookup(topic="t", key="k")
        assert (task.id, task.state, task.body) == (receipt.id, "scheduled", b"x")


def test_a_blocking_embedded_daemon_runs_in_a_thread(store: str) -> None:
    with embedded(store) as client:
        client.enqueue("t", b"x", delay=0.05)
        with client.subscribe("t") as deliveries:
            delivery = deliveries.get(timeout=20)
            assert delivery is not None and delivery.ack() == "acked"
    with embedded(store) as client:
        assert list(client.list_tasks(topic="t")) == []


def test_closing_the_blocking_client_stops_the_embedded_daemon(store: str) -> None:
    with embedded(store) as client:
        receipt = client.enqueue("t", b"x", delay=3_600)
        client.close()
        with embedded(store) as again:
            assert again.lookup(receipt.id).state == "scheduled"


async def test_a_daemon_can_serve_an_embedded_file(store: str, tmp_path: Path) -> None:
    async with embedded(store) as client:
        receipt = await client.enqueue("t", b"x", delay=3_600)
    with Daemon(tmp_path / "daemon", store=store) as daemon:
        async with Client(daemon.url) as client:
            assert (await client.lookup(receipt.id)).state == "scheduled"


def test_kill_9_of_the_program_loses_no_task(store: str) -> None:
    command = [sys.executable, "-c", PROGRAM, store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert program.stdout is not None and program.stdout.readline() == "stored\n"
        with pytest.raises(StoreUnusable, match="in use"), embedded(store):
            pass
        program.send_signal(signal.SIGKILL)
    with embedded(store) as client, client.subscribe("t") as deliveries:
        delivery = deliveries.get(timeout=20)
        assert delivery is not None and delivery.body == b"before the kill"
        assert delivery.ack() == "acked"


async def _fails(*_: Any) -> bool:
    raise StoreBroken("the disk failed: a sync returned EIO")


async def test_a_broken_store_makes_each_call_raise(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with embedded(store) as client:
        kept = await client.enqueue("t", b"kept", delay=3_600)
        monkeypatch.setattr(SqliteStore, "commit", _fails)
        with pytest.raises(TickwheelError):
            await client.enqueue("t", b"never", delay=3_600)
        for call in (client.enqueue("t", b""), client.lookup(kept.id), client.stats()):
            with pytest.raises(StoreBroken, match="EIO"):
                await soon(call)
        monkeypatch.undo()
    async with embedded(store) as client:
        assert (await client.lookup(kept.id)).state == "scheduled"


async def test_invalid_embedded_options_are_refused(store: str) -> None:
    with pytest.raises(BadRequest, match="body_bytes_max"):
        embedded(store, body_bytes_max="many")
    with pytest.raises(BadRequest, match="no_such_setting"):
        embedded(store, no_such_setting=1)
    async with embedded(store):
        with pytest.raises(StoreUnusable, match="in use"):
            async with embedded(store):
                pass


async def begin_daemon(store: str) -> None:
    daemon = Served(Settings(store=store), cast("Any", _Log()), is_embedded=True)
    try:
        await daemon.start()
    finally:
        await finish_despite_cancellation(daemon.stop())


async def begin_embedded(store: str) -> None:
    async with embedded(store):
        pass


async def begin_in_thread(store: str) -> None:
    def begin() -> None:
        with embedded(store):
            pass

    await asyncio.to_thread(begin)


async def begin_wheel(store: str) -> None:
    async with TestWheel():
        pass


async def begin_client(store: str) -> None:
    client = Client("tcp://127.0.0.1:1")  # nobody listens there
    early = client.enqueue_nowait("t", b"x")
    early.add_done_callback(mark_retrieved)
    async with client:
        pass


def own_threads() -> list[threading.Thread]:
    return [item for item in threading.enumerate() if item.name.startswith("tickw")]


STEPS = [*range(16), 20, 24, 32, 48, 64, 128, 256]


async def begin_subscription(store: str) -> None:
    async with embedded(store) as client, client.subscribe("t", group="g"):
        pass


@pytest.mark.parametrize(
    ("begin", "every"),
    [
        (begin_daemon, 2), (begin_wheel, 2), (begin_client, 2), (begin_subscription, 2),
        *(
            pytest.param(begin, 1, marks=pytest.mark.slow)
            for begin in (
                begin_daemon, begin_embedded, begin_wheel, begin_client, begin_subscription
            )
        ),
    ],
)  # fmt: skip
async def test_a_cancelled_start_leaves_no_tasks_or_threads(
    begin: Begin, every: int, tmp_path: Path
) -> None:
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    for steps in STEPS[::every]:
        store = f"sqlite:///{tmp_path}/{steps}.db"
        beginning = asyncio.ensure_future(begin(store))
        for _ in range(steps):
            await asyncio.sleep(0)
        for _ in range(1 + steps % 3):  # who cancels again does not wait for the clean-up
            beginning.cancel()
            await asyncio.sleep(0)
        await soon(asyncio.wait((beginning,)))
        assert asyncio.all_tasks() <= tasks
        async with embedded(store) as client:  # its lock is free
            await client.ping()
        await comes(lambda: asyncio.all_tasks() <= tasks)
        await comes(lambda: not [thread for thread in own_threads() if thread not in threads])
        assert beginning.cancelled() or beginning.exception() is None


@pytest.mark.parametrize(
    ("begin", "failure", "error"),
    [
        (begin_embedded, StoreBroken("EIO"), StoreBroken),
        (begin_in_thread, StoreBroken("EIO"), StoreBroken),
        (begin_embedded, ValueError("a bug"), StoreBroken),
        (begin_embedded, asyncio.CancelledError("lost the store"), StoreUnusable),
    ],
)
async def test_a_store_that_cannot_be_read_fails_the_start(
    begin: Begin,
    failure: BaseException,
    error: type[Exception],
    store: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def load_rest(recovering: Recovering) -> None:
        raise failure

    monkeypatch.setattr(Recovering, "load_rest", load_rest)
    with pytest.raises(error, match=str(failure)):
        await soon(begin(store))
    monkeypatch.undo()
    await begin_embedded(store)  # its lock is free


def test_reading_a_store_may_take_longer_than_connecting(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def load_slowly(recovering: Recovering) -> None:
        await asyncio.sleep(1.5)  # real time: longer than connect_timeout
        await load_rest(recovering)

    load_rest, defaults = Recovering.load_rest, Client.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "connect_timeout", 1.0)
    monkeypatch.setattr(Recovering, "load_rest", load_slowly)
    with embedded(store) as client:
        client.ping()


async def test_a_store_that_another_daemon_leads_is_refused(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis").start().lay_out()
    try:
        async with embedded(server.url()) as client:
            with pytest.raises(StoreUnusable, match=r"/\w+ at tcp://.+ leads this store"):
                await soon(begin_embedded(server.url()))
            await client.ping()
    finally:
        server.stop()


LEADING = 240
"""Turns of the event loop after which the start waits for the lease."""
NONE = b"*0\r\n"


async def test_a_cancelled_start_on_redis_leaves_no_lease(tmp_path: Path) -> None:
    """No connection, and no lease: the next one need not wait until that is over."""
    tasks, server = asyncio.all_tasks(), RedisServer(tmp_path / "redis").start().lay_out()
    try:
        for steps in [*range(0, 24, 3), *range(24, 240, 24), LEADING]:
            store = server.url("connect_ms=20000&call_ms=20000")
            beginning = asyncio.ensure_future(begin_daemon(store))
            for _ in range(steps):
                await asyncio.sleep(0)
            while steps == LEADING and not beginning.done():
                if server.call("KEYS", "*leader*") != NONE:
                    break
                await asyncio.sleep(0)
            for _ in range(1 + steps % 3):
                beginning.cancel()
                await asyncio.sleep(0)
            await soon(asyncio.wait((beginning,)))
            assert beginning.cancelled() or beginning.exception() is None
            assert asyncio.all_tasks() <= tasks
            await comes(lambda: server.call("CLIENT", "LIST").count(b"name=tickwheel") == 0)
            assert server.call("KEYS", "*leader*") == NONE
    finally:
        server.stop()
