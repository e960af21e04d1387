"""A forwarder in a process of its own, and kills of it, of its daemon and of the other side."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from support.daemon import Daemon
from support.waiting import comes, rest
from tickwheel import Client, Receipt, Retry, Task

ROOT = Path(__file__).resolve().parents[2]
TOPIC, GROUP = "t", "g"
PROGRAM = f"""
import asyncio, sys
from tickwheel import Client
from tickwheel.outbound.runner import Runner
from tickwheel.outbound.target import target_of

async def main():
    async with Client(sys.argv[1]) as client:
        await Runner(client, {TOPIC!r}, {GROUP!r}, target_of(sys.argv[2])).run()

asyncio.run(main())
"""
PER_KILL = 200
"""Tasks that come due between two kills."""
ALL_S = 120.0
"""How long everything may take to arrive after the last kill."""


class Forwarder:
    """The process, started again whenever it has ended, as a supervisor does."""

    def __init__(self, folder: Path, daemon_url: str, target_url: str) -> None:
        self._command = [sys.executable, "-c", PROGRAM, daemon_url, target_url]
        self._log = folder / "forwarder.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is None or self._process.poll() is not None:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, env={**os.environ, "PYTHONPATH": str(ROOT)},
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")


async def survive(
    daemon: Daemon,
    forwarder: Forwarder,
    restart_target: Callable[[], object],
    arrived: Callable[[], Awaitable[Iterable[str]]],
    *,
    kills: int,
) -> None:
    """Enqueue, and meanwhile kill each of the three so many times, in an order of chance; in the
    end every task that was stored has arrived, and is acked. Says the seed when it does not."""
    seed = random.randrange(1 << 32)
    sides = ["daemon", "forwarder", "target"] * kills
    random.Random(seed).shuffle(sides)
    async with Client(daemon.url, retries=20) as client:
        policy = Retry.fixed(delay=0.1, retries=10_000)
        await client.create_group(TOPIC, GROUP, retry=policy)
        forwarder.start()
        stored: list[Receipt] = []
        for side in sides:
            tasks = [Task(TOPIC, b"%d" % n, delay=n / 1000) for n in range(PER_KILL)]
            putting = asyncio.create_task(client.enqueue_many(tasks))
            await rest(random.uniform(0.05, 0.4))
            if side == "daemon":
                await daemon.arestart()
            elif side == "target":
                await asyncio.to_thread(restart_target)
            else:
                forwarder.kill()
            forwarder.start()
            stored += await putting
        wanted = {str(receipt.id) for receipt in stored}
        assert len(wanted) == len(sides) * PER_KILL

        async def is_worked_off() -> bool:
            forwarder.start()
            return not [task async for task in client.list_tasks(topic=TOPIC, limit=1)]

        try:
            await comes(is_worked_off, ALL_S, every_s=0.1)
            assert not [letter async for letter in client.dead_list(topic=TOPIC)]
            missing = wanted - set(await arrived())
            assert not missing, f"{len(missing)} of {len(wanted)} have not arrived"
        except BaseException as error:
            error.add_note(f"seed {seed}\n{forwarder.log_text()[-4000:]}")
            raise
