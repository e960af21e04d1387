"""No process waits for whoever reads its log: each kind, on a pipe that is full and never read."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from support.daemon import Daemon
from support.nodes import Node
from support.redis_server import RedisServer
from support.waiting import WAIT_S, soon, until
from tickwheel import Client, Task
from tickwheel.log_writer import END_S

ROOT = Path(__file__).parents[2]
PIPE_BYTES = 4_096


class FullPipe:
    """A pipe in the file system that takes nothing: whoever writes to it waits."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(self.fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.fd, b"-" * PIPE_BYTES)

    def text(self) -> str:
        """Return the content of the pipe, for the message of a failed test. Makes room in it."""
        result = b""
        with contextlib.suppress(BlockingIOError):
            while some := os.read(self.fd, 1 << 16):
                result += some
        return result.decode(errors="replace").lstrip("-")


@contextlib.contextmanager
def unread(daemon: Daemon) -> Iterator[Daemon]:
    """Run a daemon whose log is such a pipe."""
    pipe = FullPipe(daemon.log)
    daemon.log_text = pipe.text  # type: ignore[method-assign]
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()
        os.close(pipe.fd)


async def asked(url: str) -> None:
    async with Client(url) as client:
        await soon(client.enqueue("t", b"x"))


def got(url: str) -> str:
    """The body of an answer of 200."""
    with urlopen(url, timeout=WAIT_S) as answer:  # noqa: S310  # a daemon of this test
        return str(answer.read().decode())


async def strangers(port: int, count: int = 20) -> None:
    """Make a daemon log: each sends bytes that are not a valid frame."""
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            await soon(reader.read())
        writer.close()


async def test_a_daemon_with_an_unread_log_answers_and_ends(tmp_path: Path) -> None:
    with unread(Daemon(tmp_path, http=True)) as daemon:
        await strangers(daemon.port)
        await asked(daemon.url)
        assert got(f"{daemon.http}/healthz")
        assert "\ntickwheel_log_dropped_total 0\n" in got(f"{daemon.http}/metrics")
        assert await daemon.aterminate() == 0


async def test_shards_with_an_unread_log_answer_and_end(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'shards'}/"
    args = ("--processes", "2", "--http-all", "127.0.0.1:0")
    with unread(Daemon(tmp_path / "run", store=store, http=True, args=args)) as daemon:
        await asked(daemon.url)
        assert got(f"{daemon.http_all}/healthz")
        assert got(f"{daemon.http}/healthz")
        assert await daemon.aterminate() == 0


async def test_a_node_with_an_unread_log_answers_and_ends(
    server: RedisServer, tmp_path: Path
) -> None:
    node = Node(tmp_path / "a", "a", server.url(), 2, http=True, leader_ttl_s=1)
    with unread(node):
        until(lambda: all(shard["node"] == "a" for shard in node.nodes()["shards"]))
        await asked(node.url)
        assert got(f"{node.http}/healthz")
        assert await node.aterminate() == 0


WORKER = """
from tickwheel import Client, Worker
worker = Worker(Client(), grace=1)

@worker.on("t")
async def handle(delivery):
    if delivery.body == b"last":
        open("last", "w").close()
    print("printed")
    raise ValueError("so there is a line with a traceback")
"""


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_worker_with_an_unread_log_handles_tasks_and_ends(
    tmp_path: Path, as_json: bool
) -> None:
    """Its log, and with --json its lines, which are a log of what it did."""
    (tmp_path / "app.py").write_text(WORKER)
    with Daemon(tmp_path / "daemon") as daemon:
        pipe = FullPipe(tmp_path / "pipe")
        command = [sys.executable, "-m", "tickwheel", "--url", daemon.url]
        command += ["--json"] if as_json else []
        process = subprocess.Popen(
            [*command, "work", "app:worker"], cwd=tmp_path, stderr=blocking(tmp_path / "pipe"),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=blocking(tmp_path / "pipe") if as_json else subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with Client(daemon.url) as client:
                await client.enqueue_many([Task("t", b"x")] * 50 + [Task("t", b"last", delay=0.1)])
            await asyncio.to_thread(until, (tmp_path / "last").exists, WAIT_S, pipe.text)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, WAIT_S + END_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(pipe.fd)


def blocking(path: Path) -> int:
    """A descriptor of its own on the pipe, on which writing waits."""
    return os.open(path, os.O_RDWR)
