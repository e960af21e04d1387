"""The worker against a real daemon: outcomes, the heartbeat, stops, restarts, the command line."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.raw import Raw
from support.waiting import WAIT_S, comes, soon
from tickwheel import Client, Delivery, Reject, Retry, RetryLater, Worker
from tickwheel.api.frames import FrameType
from tickwheel.client import TaskInfo

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("worker")
    with Daemon(folder, retry_base_s=0.05, retry_jitter=0, retry_max=2) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


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


async def test_a_handler_that_returns_has_acked(client: Client, topic: str) -> None:
    async def handler(delivery: Delivery) -> None: ...

    receipt = await client.enqueue(topic, b"x")
    async with Running(client, topic, handler):
        await task_in(client, receipt.id, "acked")


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


async def test_reject_buries_at_the_first_attempt(client: Client, topic: str) -> None:
    async def handler(delivery: Delivery) -> None:
        raise Reject("no such order")

    receipt = await client.enqueue(topic, b"x")
    async with Running(client, topic, handler):
        await task_in(client, receipt.id, "dead")
    [letter] = [letter async for letter in client.dead_list(topic=topic)]
    assert (letter.attempt, letter.reason) == (1, "no such order")


async def test_retry_later_waits_for_its_delay(client: Client, topic: str) -> None:
    seen: list[Delivery] = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery)
        if delivery.attempt == 1:
            raise RetryLater(0.4, "closed")

    receipt = await client.enqueue(topic, b"x")
    async with Running(client, topic, handler):
        await task_in(client, receipt.id, "acked")
    assert [delivery.attempt for delivery in seen] == [1, 2]
    assert seen[1].delivered_ms - seen[0].delivered_ms >= 400


async def test_the_groups_policy_is_the_handlers(client: Client, topic: str) -> None:
    async def handler(delivery: Delivery) -> None:
        raise ValueError

    receipt = await client.enqueue(topic, b"x")
    async with Running(client, topic, handler, retry=Retry.none()):
        result = await task_in(client, receipt.id, "dead")
    assert result.groups["default"].attempt == 1


async def test_a_time_out_is_a_failed_attempt(client: Client, topic: str) -> None:
    seen = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        await seen.wait()

    receipt = await client.enqueue(topic, b"x")
    async with Running(client, topic, handler, timeout=0.2, retry=Retry.fixed(0.05, 100)):
        result = await look(
            client,
            receipt.id,
            lambda task: "default" in task.groups and bool(task.groups["default"].failures),
        )
        assert result.groups["default"].failures[0][2] == "timed out after 0.2 s"
        seen.set()
        await task_in(client, receipt.id, "acked")


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


# --- stopping --------------------------------------------------------------------------------


async def test_stop_waits_for_running_handlers(client: Client, topic: str) -> None:
    started, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.release()
        await go_on.wait()

    receipts = [await client.enqueue(topic, b"%d" % i) for i in range(10)]
    async with Running(client, topic, handler, concurrency=3, prefetch=10) as worker:
        for _ in range(3):
            await soon(started.acquire())
        worker.stop()
        # Unstarted tasks are ready for others at once, without a failure.
        others = []
        while len(others) < 7:
            others += await soon(client.pull(topic, max=10, wait=20))
        assert {delivery.failures for delivery in others} == {0}
        await asyncio.gather(*(delivery.ack() for delivery in others))
        go_on.set()
    states = [task.state for task in await client.lookup_many(r.id for r in receipts)]
    assert states == ["acked"] * 10


async def test_a_task_is_released_without_failure_after_the_grace(
    client: Client, topic: str
) -> None:
    started = asyncio.Event()

    async def handler(delivery: Delivery) -> None:
        started.set()
        await asyncio.Event().wait()

    await client.enqueue(topic, b"x")
    async with Running(client, topic, handler, grace=0.1) as worker:
        await soon(started.wait())
        worker.stop()
    [delivery] = await client.pull(topic, wait=20)
    assert (delivery.attempt, delivery.failures) == (2, 0)
    assert await delivery.ack() == "acked"


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
        [sys.executable, "-m", "tickwheel", "work", *arguments],
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
        ("empty:worker", "no handlers"),
    ],
)
def test_an_unrunnable_program_exits_with_2(target: str, word: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(PROGRAM.format(topic="t"))
    (tmp_path / "needs.py").write_text("\nimport not_installed\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "syntax.py").write_text("def :\n")
    (tmp_path / "empty.py").write_text("import tickwheel as t\nworker = t.Worker(t.Client())\n")
    process = work(tmp_path, target)
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert word.format(folder=tmp_path) in err
