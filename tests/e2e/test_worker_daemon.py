"""The worker against a real daemon: outcomes, the heartbeat, stops, restarts, the command line."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from e2e.cli_runner import tickwheel
from support.daemon import Daemon
from support.raw import Raw
from support.waiting import WAIT_S, comes, soon
from tickwheel import Client, Delivery, Worker
from tickwheel.api.frames import FrameType
from tickwheel.cli.subscribe import named_worker
from tickwheel.client import TaskInfo

ROOT = Path(__file__).parents[2]


async def look(client: Client, task_id: int, for_what: Callable[[TaskInfo], bool]) -> TaskInfo:
    """The task, as soon as it is so."""

    async def look() -> TaskInfo | None:
        tasks = await client.lookup(task_id)
        return tasks if for_what(tasks) else None

    tasks = await comes(look)
    assert tasks is not None
    return tasks


async def task_in(client: Client, task_id: int, state: str) -> TaskInfo:
    """The task, as soon as it is in this state."""
    return await look(client, task_id, lambda task: task.state == state)


class Running:
    """A worker with one handler, from entering to leaving."""

    def __init__(self, client: Client, topic: str, handler: Callable[[Delivery], Any], **o: Any):
        self.worker = Worker(client, grace=o.pop("grace", 5.0), signals=False)
        self.worker.on(topic, **o)(handler)

    async def __aenter__(self) -> Worker:
        self.task = asyncio.create_task(self.worker.run())
        return self.worker

    async def __aexit__(self, *_: object) -> None:
        self.worker.stop()
        await soon(self.task)


# --- outcomes --------------------------------------------------------------------------------


async def test_a_handler_that_raises_is_retried_and_then_dead(client: Client, topic: str) -> None:
    attempts = []

    async def handler(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        raise ValueError(f"attempt {delivery.attempt}")

    receipt = await client.enqueue(topic, b"x")
    async with Running(client, topic, handler, group="g"):
        await task_in(client, receipt.id, "dead")
    [letter] = [letter async for letter in client.dead_list(topic=topic)]
    assert attempts == [1, 2, 3]
    assert (letter.group, letter.reason) == ("g", "ValueError: attempt 3")
    assert [failure[2] for failure in letter.failures] == [
        f"ValueError: attempt {n}" for n in attempts
    ]


# --- the heartbeat ---------------------------------------------------------------------------


async def test_a_handler_can_outlast_its_lease(client: Client, topic: str) -> None:
    runs = 0

    async def handler(delivery: Delivery) -> None:
        nonlocal runs
        runs += 1
        await asyncio.sleep(3.6)  # real time: the work; three leases long

    receipt = await client.enqueue(topic, b"x")
    async with Running(client, topic, handler, lease=1.2):
        await task_in(client, receipt.id, "acked")
    assert runs == 1


async def test_a_function_in_a_thread_can_outlast_its_lease(client: Client, topic: str) -> None:
    runs = []

    def handler(delivery: Delivery) -> None:
        runs.append(delivery.attempt)
        threading.Event().wait(2.0)

    receipts = [await client.enqueue(topic, b"x") for _ in range(4)]
    async with Running(client, topic, handler, lease=1.5, concurrency=2, prefetch=4):
        for receipt in receipts:
            await task_in(client, receipt.id, "acked")
    assert runs == [1] * 4, "those that wait are kept, too"


async def test_a_handler_of_a_finished_task_is_cancelled(
    client: Client, topic: str, running: Daemon
) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()
    deliveries: list[Delivery] = []

    async def handler(delivery: Delivery) -> None:
        deliveries.append(delivery)
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    receipt = await client.enqueue(topic, b"x")
    with Raw(running.port) as other:
        async with Running(client, topic, handler, lease=0.3):
            await soon(started.wait())
            [mine] = deliveries
            ack = (topic, "default", mine.epoch, [mine.id], [mine.attempt])
            answer = await asyncio.to_thread(other.call, FrameType.ACK, *ack)
            assert answer[0] == FrameType.OK
            await soon(cancelled.wait())
    assert (await client.lookup(receipt.id)).state == "acked"


# --- a daemon that goes away -----------------------------------------------------------------


@pytest.mark.parametrize("kill", [True, False])
async def test_a_worker_outlives_its_daemon(make_daemon: Callable[..., Daemon], kill: bool) -> None:
    daemon = make_daemon(retry_base_s=0.05, retry_jitter=0).start()
    done: set[bytes] = set()
    started, go_on = asyncio.Event(), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.set()
        if delivery.body == b"0":
            await go_on.wait()
        done.add(delivery.body)

    async with (
        Client(daemon.url, retries=10) as client,
        Running(client, "t", handler, lease=2.0),
    ):
        receipts = [await client.enqueue("t", b"0")]
        await soon(started.wait())
        await daemon.arestart(kill=kill)
        receipts += [await client.enqueue("t", b"%d" % i) for i in range(1, 5)]
        go_on.set()
        for receipt in receipts:
            await task_in(client, receipt.id, "acked")
    assert done == {b"%d" % i for i in range(5)}


# --- tickwheel work --------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from tickwheel import Client, Delivery, Worker

worker = Worker(Client())

class shop:
    jobs = worker

@worker.on("{topic}", concurrency=8)
async def handle(delivery: Delivery) -> None:
    print("started", delivery.body.decode(), flush=True)
    await asyncio.sleep(float(delivery.body))  # real time: the work
    print("ended", delivery.body.decode(), flush=True)
"""


def work(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*tickwheel(), "work", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


async def test_the_command_runs_a_worker_until_sigterm(
    client: Client, topic: str, running: Daemon, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(PROGRAM.format(topic=topic))
    quick = await client.enqueue(topic, b"0")
    process = work(tmp_path, "app:shop.jobs", "--url", running.url, "--concurrency", "2")
    try:
        await task_in(client, quick.id, "acked")
        slow = await client.enqueue(topic, b"3")
        await task_in(client, slow.id, "in_flight")
        assert process.stdout is not None
        for _ in range(3):  # started 0, ended 0, started 3
            line = await soon(asyncio.to_thread(process.stdout.readline))
        assert line == "started 3\n"
        process.send_signal(signal.SIGTERM)
        out, err = await soon(asyncio.to_thread(process.communicate))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert out == "ended 3\n"
    assert "working on" in err and "2 at a time" in err and "handlers running: 1" in err
    await task_in(client, slow.id, "acked")


async def test_a_second_signal_ends_the_grace(
    client: Client, topic: str, running: Daemon, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(PROGRAM.format(topic=topic))
    await client.enqueue(topic, b"60")
    process = work(tmp_path, "app:worker", "--url", running.url, "--grace", "1m")
    try:
        assert process.stdout is not None
        assert await soon(asyncio.to_thread(process.stdout.readline)) == "started 60\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "stopping" not in await soon(asyncio.to_thread(process.stderr.readline)):
            pass
        process.send_signal(signal.SIGINT)
        await soon(asyncio.to_thread(process.communicate))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    [delivery] = await client.pull(topic, wait=20)
    assert (delivery.attempt, delivery.failures) == (2, 0)


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("app", "MODULE:WORKER"),
        ("app:", "MODULE:WORKER"),
        ("app:work-er", "MODULE:WORKER"),
        ("missing:worker", "no module missing"),
        ("app.missing:worker", "no module app.missing"),
        ("app:missing", "module app has no missing"),
        ("app:shop.missing", "module app has no shop.missing"),
        ("app:shop", "app:shop is not a tickwheel.Worker, but type"),
        ("needs:worker", "importing needs failed at {folder}/needs.py:2: ModuleNotFoundError"),
        ("broken:worker", "importing broken failed at {folder}/broken.py:1: ZeroDivisionError"),
        ("syntax:worker", "importing syntax failed at {folder}/syntax.py:1: SyntaxError"),
    ],
)
def test_an_unrunnable_program_is_named(
    target: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "app.py").write_text(PROGRAM.format(topic="t"))
    (tmp_path / "needs.py").write_text("\nimport not_installed\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "syntax.py").write_text("def :\n")
    with pytest.raises(typer.BadParameter, match=re.escape(word.format(folder=tmp_path))):
        named_worker(target)
    sys.modules.pop("app", None)


def test_an_unrunnable_program_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("import tickwheel as t\nworker = t.Worker(t.Client())\n")
    for target, word in (("missing:worker", "no module missing"), ("empty:worker", "no handlers")):
        process = work(tmp_path, target)
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, out) == (2, "")
        assert len(err.splitlines()) == 1 and word in err, err
