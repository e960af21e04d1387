"""Workers that are killed by a task, and workers that are stopped in order, in real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from e2e.cli_runner import tickwheel
from support.daemon import Daemon
from support.waiting import comes, rest
from tickwheel import Client
from tickwheel.client import DeadLetter
from tickwheel.model.records import CONSUMER_DIED

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio, os, signal
from tickwheel import Client, Delivery, Worker

worker = Worker(Client())

@worker.on("jobs", group="g", concurrency=4)
async def handle(delivery: Delivery) -> None:
    if delivery.body == b"poison":
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.02)  # real time: the work
"""


class Fleet:
    """Worker processes; a killed one is restarted, as by a supervisor."""

    def __init__(
        self, folder: Path, url: str, count: int, command: Sequence[str] | None = None
    ) -> None:
        self._folder = folder
        self._command = command or tickwheel()
        self._url = url
        self._count = count
        self._running: list[asyncio.Task[None]] = []
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.killed: list[int] = []
        """Process ids, in the order of their deaths."""
        self.ended: list[int | None] = []
        """Exit codes of all others."""

    async def start(self, place: int) -> asyncio.subprocess.Process:
        process = self.processes[place] = await asyncio.create_subprocess_exec(
            *self._command, "work", "app:worker", "--url", self._url,
            cwd=self._folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        # A process that a task kills at once can lose the line.
        while (line := await process.stderr.readline()) and b"working on" not in line:
            pass
        return process

    async def _keep(self, place: int) -> None:
        while True:
            process = await self.start(place)
            await process.communicate()
            if process.returncode == -signal.SIGKILL:
                self.killed.append(process.pid)
            else:
                self.ended.append(process.returncode)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[Fleet]:
        """Until the end."""
        self._running = [asyncio.create_task(self._keep(place)) for place in range(self._count)]
        try:
            yield self
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            for process in self.processes.values():
                if process.returncode is None:
                    process.kill()
                    await process.communicate()  # until its pipe is closed, too


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(PROGRAM)
    return tmp_path


T = TypeVar("T")


class Looks:
    """Wait for counts of the group."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def group(self) -> dict[str, Any]:
        stats: dict[str, Any] = (await self._client.stats()).raw
        result: dict[str, Any] = stats["topics"]["jobs"]["groups"]["g"]
        return result

    async def acked(self, count: int) -> dict[str, Any]:
        """Wait until `count` tasks are acked."""

        async def look() -> dict[str, Any]:
            group = await self.group()
            return group if group["acked"] >= count else {}

        return await comes(look)

    async def subscribed(self, count: int) -> None:
        """Wait until `count` workers have subscribed."""

        async def look() -> bool:
            return (await self.group())["subscribers"] == count

        await comes(look)

    async def dead_letter(self, after_ms: int = 0) -> DeadLetter:
        """The only one, that died after this."""

        async def look() -> list[DeadLetter]:
            letters = self._client.dead_list(topic="jobs")
            return [letter async for letter in letters if letter.died_ms > after_ms]

        (letter,) = await comes(look)
        return letter


async def test_a_task_that_kills_its_workers_becomes_a_dead_letter(
    make_daemon: Callable[..., Daemon], folder: Path
) -> None:
    daemon = make_daemon(reconnect_grace_s=0.3, death_retry_base_s=0.2, retry_max=0)
    async with daemon, Client(daemon.url) as client:
        await client.create_group("jobs", "g")
        alone = (sys.executable, "-m", "tickwheel")  # its process id is that of its worker
        async with Fleet(folder, daemon.url, 2, alone).kept() as fleet:
            innocent = [await client.enqueue("jobs", b"%d" % i) for i in range(20)]
            poison = await client.enqueue("jobs", b"poison")
            innocent += [await client.enqueue("jobs", b"%d" % i) for i in range(80)]
            letter = await Looks(client).dead_letter()
            await Looks(client).acked(len(innocent))
            await comes(lambda: len(fleet.killed) >= 3)  # seen here a moment later than there
            assert len(fleet.killed) == 3, "as many as deaths_max, and no more"
            assert (letter.id, letter.attempt, letter.deaths) == (poison.id, 3, 3)
            assert letter.reason.startswith(CONSUMER_DIED)
            for pid, failure in zip(fleet.killed, letter.failures, strict=True):
                assert f"process {pid} on {socket.gethostname()[:64]}" in failure[2]
            states = {task.state for task in await client.lookup_many(t.id for t in innocent)}
            assert states == {"acked"}
            assert await client.dead_requeue([(poison.id, "g")]) == ["requeued"]
            again = await Looks(client).dead_letter(letter.died_ms)
            assert (again.attempt, again.deaths) == (6, 3)


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow)])
async def test_a_rolling_restart_of_consumers_counts_no_deaths(
    make_daemon: Callable[..., Daemon], folder: Path, count: int
) -> None:
    daemon = make_daemon(retry_max=0, deaths_max=1)
    async with daemon, Client(daemon.url) as client:
        await client.create_group("jobs", "g")
        async with Fleet(folder, daemon.url, count).kept() as fleet:
            await Looks(client).subscribed(count)
            stop, ids = asyncio.Event(), list[int]()

            async def load() -> None:
                while not stop.is_set():
                    ids.append((await client.enqueue("jobs", b"x")).id)
                    await rest(0.01)

            loading = asyncio.create_task(load())
            for place in range(count):
                before = fleet.processes[place]
                before.send_signal(signal.SIGTERM)
                await before.wait()
                await Looks(client).subscribed(count - 1)
                await Looks(client).subscribed(count)
            stop.set()
            await loading
            result = await Looks(client).acked(len(ids))
            assert fleet.ended == [0] * count and not fleet.killed
            assert (result["dead"], result["nacked"], result["deaths"]) == (0, 0, 0)
            stats = (await client.stats()).raw
            assert stats["leases_over"] == 0
            if count > 3:
                assert stats["lateness"]["max_ms"] < 1_000


@pytest.mark.parametrize("kill", [True, False])
async def test_a_restart_of_the_daemon_counts_no_deaths(
    make_daemon: Callable[..., Daemon], folder: Path, kill: bool
) -> None:
    daemon = make_daemon(retry_max=0, deaths_max=1)
    async with daemon, Client(daemon.url) as client:
        await client.create_group("jobs", "g")
        async with Fleet(folder, daemon.url, 2).kept():
            receipts = [await client.enqueue("jobs", b"x") for _ in range(300)]
            await Looks(client).acked(1)
            await daemon.arestart(kill=kill)

            async def all_acked() -> bool:
                tasks = await client.lookup_many(r.id for r in receipts)
                states = {task.state for task in tasks}
                assert "dead" not in states
                return states == {"acked"}

            await comes(all_acked)
            assert (await client.stats()).raw["deaths"] == 0
