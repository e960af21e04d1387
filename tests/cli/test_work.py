"""``tickwheel work`` as a process: what it shows, and how it starts anew; real daemon."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.terminal import Terminal
from support.daemon import Daemon
from support.frameworks import need
from support.waiting import WAIT_S, comes, soon
from tickwheel import Client, Delivery, Reject, Retry, RetryLater, Snooze, Task, Worker
from tickwheel.cli.subscribe import error_text
from tickwheel.contrib.workers import _Supervisor
from tickwheel.testing import TestWheel

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio
from tickwheel import Client, Delivery, Reject, Retry, Snooze, Worker

worker = Worker(Client(), grace=20)
snoozed: set[int] = set()


@worker.on("{topic}", concurrency=2, retry=Retry.fixed(0.05, retries=1))
async def handle(delivery: Delivery) -> None:
    print("{word}", delivery.body.decode(), delivery.failures, flush=True)
    if delivery.body == b"broken":
        raise ValueError("broken")
    if delivery.body == b"never":
        raise Reject("never")
    if delivery.body == b"later" and delivery.id not in snoozed:
        snoozed.add(delivery.id)
        raise Snooze(0.05)
    if delivery.body.startswith(b"slow") and delivery.attempt == 1:
        await asyncio.sleep(float(delivery.body[5:]))  # real time: a slow handler
"""

OWNS = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Its terminal controls what it becomes, as a person's does: Ctrl-C is a signal."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("work")) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


class Program:
    """A program with handlers in a folder, and ``tickwheel work`` on it."""

    def __init__(self, folder: Path, url: str, topic: str) -> None:
        self.folder, self.url, self.topic = folder, url, topic
        self._readers: list[threading.Thread] = []
        self.write()

    def write(self, word: str = "got", more: str = "") -> None:
        text = PROGRAM.format(topic=self.topic, word=word) + more
        # As editors do: never half a file.
        (self.folder / "app.new").write_text(text)
        (self.folder / "app.new").replace(self.folder / "app.py")

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "tickwheel", "--url", self.url, "work", "app:worker"]

    @contextmanager
    def working(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [*self.command, *arguments], cwd=self.folder, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            for reader in self._readers:  # nothing is closed under its hands
                reader.join(WAIT_S)
            process.communicate()

    def reading(self, process: subprocess.Popen[str]) -> list[str]:
        """The lines of stderr, as they come."""
        lines: list[str] = []
        assert process.stderr is not None
        reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        self._readers.append(reader)
        reader.start()
        return lines


@pytest.fixture
def program(tmp_path: Path, running: Daemon, topic: str) -> Program:
    return Program(tmp_path, running.url, topic)


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await soon(asyncio.to_thread(process.stdout.readline))).rstrip("\n")


async def ended(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[str, str]:
    process.send_signal(number)
    return await soon(asyncio.to_thread(process.communicate))


# --- the callback --------------------------------------------------------------------------------


async def test_on_settled_is_called_for_each_outcome(client: Client, topic: str) -> None:
    told: list[tuple[bytes, int, str, float, str]] = []
    worker = Worker(client, signals=False, grace=0)
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()

    @worker.on(topic, retry=Retry.fixed(0.01, retries=1))
    async def handle(delivery: Delivery) -> None:
        match bytes(delivery.body), delivery.attempt:
            case b"broken", _:
                raise ValueError("broken")
            case b"never", _:
                raise Reject("never")
            case b"later", 1:
                raise Snooze(0.01)
            case b"again", 1:
                raise RetryLater(0.01)
            case b"itself", _:
                await delivery.ack()
            case b"endless", _:
                begun.set()
                await asyncio.Event().wait()

    def settled(
        delivery: Delivery, outcome: str, began_s: float, error: BaseException | None
    ) -> None:
        took_s = loop.time() - began_s
        told.append((delivery.body, delivery.attempt, outcome, took_s, type(error).__name__))
        if delivery.body == b"fine":
            raise RuntimeError("a wrong callback ends nothing")

    worker.on_settled = settled
    for body in (b"fine", b"broken", b"never", b"later", b"again", b"itself", b"endless"):
        await client.enqueue(topic, body)
    running = asyncio.create_task(worker.run())
    await comes(lambda: len(told) == 9)
    await begun.wait()
    assert [task.body for task in worker.in_hand] == [b"endless"]
    worker.stop()
    await soon(running)
    assert sorted((body, attempt, outcome, error) for body, attempt, outcome, _, error in told) == [
        (b"again", 1, "retrying", "RetryLater"),
        (b"again", 2, "acked", "NoneType"),
        (b"broken", 1, "retrying", "ValueError"),
        (b"broken", 2, "dead", "ValueError"),
        (b"endless", 1, "released", "CancelledError"),
        (b"fine", 1, "acked", "NoneType"),
        (b"itself", 1, "settled", "NoneType"),
        (b"later", 1, "snoozed", "Snooze"),
        (b"later", 2, "acked", "NoneType"),
        (b"never", 1, "dead", "Reject"),
    ]
    assert all(0 <= took_s < 20 for *_, took_s, _ in told)


async def test_a_reported_handler_error_is_freed_at_once(
    client: Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What refers to itself would live on until the garbage collector comes."""
    caplog.set_level(logging.CRITICAL, "tickwheel.worker")  # a record keeps the error

    class Special(Exception): ...

    left: list[Any] = []
    worker = Worker(client, signals=False, on_settled=lambda *told: left.append(told[1]))

    @worker.on(topic, retry=Retry.none())
    async def handle(_: Delivery) -> None:
        error = Special()
        left.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    gc.disable()
    try:
        running = asyncio.create_task(worker.run())
        await client.enqueue(topic, b"")
        await comes(lambda: left[1:] == ["dead"])
        worker.stop()
        await soon(running)
        assert left[0]() is None
    finally:
        gc.enable()


# --- lines of JSON -------------------------------------------------------------------------------


async def test_work_json_has_one_line_per_finished_delivery(
    program: Program, client: Client, topic: str
) -> None:
    for body in (b"fine", b"broken", b"never", b"later"):
        await client.enqueue(topic, body, key=f"key-{body.decode()}")
    with program.working("--json", "--concurrency", "1") as process:
        results = [json.loads(await line_of(process)) for _ in range(6)]
        rest, err = await ended(process)
    assert process.returncode == 0 and rest == ""
    assert {line["group"] for line in results} == {"default"}
    assert {line["topic"] for line in results} == {topic}
    assert all(line["id"].isdigit() and line["took_ms"] >= 0 for line in results)
    assert all(type(line["late_ms"]) is int and line["late_ms"] >= 0 for line in results)
    # A delivery that waits for a handler may be given back, which raises its attempt as well.
    results.sort(key=lambda line: (line["key"], line["attempt"]))
    assert len({(line["key"], line["attempt"]) for line in results}) == 6
    assert [(line["key"], line["outcome"], line["error"]) for line in results] == [
        ("key-broken", "retrying", "ValueError: broken"),
        ("key-broken", "dead", "ValueError: broken"),
        ("key-fine", "acked", None),
        ("key-later", "snoozed", "Snooze: snoozed for 0.05"),
        ("key-later", "acked", None),
        ("key-never", "dead", "Reject: never"),
    ]
    assert "got fine 0" in err and "working on" in err, "what the program prints is beside it"


async def test_errors_of_encrypted_tasks_show_only_their_type(tickwheel: TestWheel) -> None:
    secret = tickwheel.new_client(keys={"a": b"k" * 32})
    for item in (tickwheel.client, secret):
        await item.enqueue("t", b"of a body")
    plain, encrypted = await tickwheel.client.pull("t", max=2)
    assert error_text(plain, ValueError("of a body")) == "ValueError: of a body"
    assert error_text(encrypted, ValueError("of a body")) == "ValueError"


async def test_a_stop_before_the_child_starts_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("watchfiles")
    waits = "import signal; signal.pause()"
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", waits])
    supervisor = _Supervisor(importlib.import_module("watchfiles"), [tmp_path])
    supervisor._stop(signal.SIGTERM)
    assert await soon(supervisor._run_child()) == -signal.SIGTERM


async def test_a_closed_json_pipe_ends_the_worker(
    program: Program, client: Client, topic: str
) -> None:
    with program.working("--json") as process:
        assert process.stdout is not None and process.stderr is not None
        await client.enqueue(topic, b"first")
        assert json.loads(await line_of(process))["outcome"] == "acked"
        process.stdout.close()
        await client.enqueue(topic, b"second")
        assert await soon(asyncio.to_thread(process.wait)) == 1
        assert "Traceback" not in process.stderr.read()
        process.stdout = None


# --- the live line -------------------------------------------------------------------------------


async def test_a_terminal_has_one_status_line(
    program: Program, client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(program.folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for body in (b"fine", b"never", b"slow-3"):
        await client.enqueue(topic, body)

    def look() -> None:
        with Terminal(program.command) as terminal:
            terminal.read_until("working on")
            shown = terminal.read_until("1 handled  1 failed  1 in flight")
            assert "got fine 0" in shown, "above the line"
            assert "/s  oldest " in terminal.read_until("late")
            terminal.read_until("2 handled  1 failed  0 in flight")
            assert terminal.end(signal.SIGTERM) == 0
            assert "2 handled" in terminal.text, "it stays"

    await asyncio.to_thread(look)


async def test_output_without_a_terminal_is_log_lines_only(
    program: Program, client: Client, topic: str
) -> None:
    await client.enqueue(topic, b"fine")
    with program.working() as process:
        assert await line_of(process) == "got fine 0"
        _, err = await ended(process)
    assert "working on" in err and "handled" not in err and "\x1b" not in err


# --- reload --------------------------------------------------------------------------------------


async def test_a_reload_restarts_the_worker_without_using_an_attempt(
    program: Program, client: Client, topic: str
) -> None:
    need("watchfiles")
    with program.working("--reload", "--grace", "0.3", "--concurrency", "1") as process:
        stderr = program.reading(process)
        await client.enqueue(topic, b"slow-30")
        assert await line_of(process) == "got slow-30 0"
        await client.enqueue_many([Task(topic, b"waits")] * 4)
        program.write("anew")
        seen = [await line_of(process) for _ in range(5)]
        assert sorted(seen) == ["anew slow-30 0"] + ["anew waits 0"] * 4
        process.send_signal(signal.SIGTERM)
        assert await soon(asyncio.to_thread(process.wait)) == 0
    assert f"{program.folder / 'app.py'} has changed" in "".join(stderr)


async def test_a_broken_program_waits_for_the_next_change(
    program: Program, client: Client, topic: str
) -> None:
    need("watchfiles")
    program.write(more="1 / 0\n")
    with program.working("--reload") as process:
        stderr = program.reading(process)
        await comes(lambda: "waiting for a change" in "".join(stderr))
        assert "importing app failed" in "".join(stderr) and "ZeroDivisionError" in "".join(stderr)
        program.write("repaired")
        await client.enqueue(topic, b"fine")
        assert await line_of(process) == "repaired fine 0"
        (program.folder / "notes.txt").write_text("no program")
        process.send_signal(signal.SIGINT)
        assert await soon(asyncio.to_thread(process.wait)) == 0
    assert "notes.txt" not in "".join(stderr)


@pytest.mark.slow  # reloads and JSON each have a quick test
async def test_json_output_continues_over_a_reload(
    program: Program, client: Client, topic: str
) -> None:
    need("watchfiles")
    with program.working("--reload", "--json") as process:
        stderr = program.reading(process)
        await client.enqueue(topic, b"fine", key="1")
        assert json.loads(await line_of(process))["key"] == "1"
        program.write("anew")
        await comes(lambda: "".join(stderr).count("working on") == 2)
        await client.enqueue(topic, b"fine", key="2")
        assert json.loads(await line_of(process))["key"] == "2"
        process.send_signal(signal.SIGTERM)
        assert await soon(asyncio.to_thread(process.wait)) == 0


async def test_ctrl_c_on_a_terminal_reaches_the_worker_once(
    program: Program, client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would end the grace."""
    need("watchfiles")
    monkeypatch.chdir(program.folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    receipt = await client.enqueue(topic, b"slow-1")

    def press() -> None:
        with Terminal([sys.executable, "-c", OWNS, *program.command, "--reload"]) as terminal:
            terminal.read_until("got slow-1 0")
            terminal.type("\x03")
            terminal.read_until("1 handled  0 failed  0 in flight")
            assert terminal.end() == 0

    await asyncio.to_thread(press)
    assert (await client.lookup(receipt.id)).state == "acked"
