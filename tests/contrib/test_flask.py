"""The Flask extension against a real daemon: in requests, in forks, and its command."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.frameworks import need
from support.waiting import WAIT_S, soon
from tickwheel import Client, Unreachable
from tickwheel.errors import BadRequest

need("flask")

from flask import Flask  # noqa: E402

from tickwheel.contrib.flask import Tickwheel  # noqa: E402

ROOT = Path(__file__).parents[2]
NOWHERE = "tcp://127.0.0.1:1"


def application(extension: Tickwheel, url: str, **config: object) -> Flask:
    app = Flask("shop")
    app.config.update(TICKWHEEL_URL=url, **config)
    extension.init_app(app)

    @app.post("/<topic>")
    def place(topic: str) -> str:
        return str(extension.enqueue(topic, b"x", delay=600, key="42").id)

    return app


async def test_a_request_enqueues_with_the_client_of_its_application(
    running: Daemon, client: Client
) -> None:
    extension = Tickwheel()
    app, elsewhere = application(extension, running.url), application(extension, NOWHERE)
    answer = await asyncio.to_thread(app.test_client().post, "/requests")
    [task] = [task async for task in client.list_tasks(topic="requests")]
    assert (str(task.id), task.key, task.body) == (answer.text, "42", b"x")
    with app.app_context():
        assert extension.client is extension.client
        ours = extension.client
    with elsewhere.app_context():
        assert extension.client is not ours
    ours.close()


def test_the_extension_without_a_context_uses_its_application(running: Daemon) -> None:
    app = Flask("shop")
    app.config["TICKWHEEL_URL"] = running.url
    extension = Tickwheel(app)
    assert extension.enqueue("plain", b"", delay=600).id
    extension.client.close()
    with pytest.raises(RuntimeError, match="application context"):
        Tickwheel().enqueue("plain", b"")
    with Flask("other").app_context(), pytest.raises(RuntimeError, match="init_app"):
        extension.enqueue("plain", b"")


def test_an_enqueue_respects_the_configured_timeout() -> None:
    extension = Tickwheel()
    app = application(
        extension, NOWHERE, TICKWHEEL_TIMEOUT=0.1, TICKWHEEL_CLIENT={"connect_timeout": 9}
    )
    with app.app_context():
        with pytest.raises(Unreachable, match=r"within 0\.1 s"):
            extension.enqueue("t", b"")
        extension.client.close()


PROGRAM = """
import os
from flask import Flask, current_app
from tickwheel import Client, Delivery, Worker
from tickwheel.contrib.flask import Tickwheel

tickwheel = Tickwheel()
worker = Worker(Client("tcp://127.0.0.1:1"), grace=20)

def create_app():
    app = Flask("shop")
    app.config.update(
        TICKWHEEL_URL=os.environ["SHOP_URL"], TICKWHEEL_HANDLERS=["shop:worker"], GREETING="hello"
    )
    tickwheel.init_app(app)
    return app

@worker.on("flask.plain")
def plain(delivery: Delivery) -> None:
    tickwheel.enqueue("flask.done", delivery.body)
    print("plain", current_app.config["GREETING"], flush=True)

@worker.on("flask.async")
async def coroutine(delivery: Delivery) -> None:
    print("async", current_app.config["GREETING"], flush=True)
"""


class Project:
    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "SHOP_URL": url}
        # A file that changes twice in a second is told from what was compiled by its size alone.
        self.env["PYTHONDONTWRITEBYTECODE"] = "1"
        self.write(PROGRAM)

    def write(self, text: str) -> None:
        # As editors do: never half a file.
        (self.folder / "shop.new").write_text(text)
        (self.folder / "shop.new").replace(self.folder / "shop.py")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "flask", "--app", "shop", "tickwheel", "worker", *arguments],
            cwd=self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, running: Daemon) -> Project:
    return Project(tmp_path, running.url)


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return (await soon(asyncio.to_thread(process.stdout.readline))).strip()


async def test_the_worker_command_runs_handlers_in_an_app_context(
    project: Project, client: Client
) -> None:
    process = project.start("--concurrency", "1")
    try:
        await client.enqueue("flask.plain", b"it")
        assert await line_of(process) == "plain hello"
        await client.enqueue("flask.async", b"")
        assert await line_of(process) == "async hello"
        [done] = [task async for task in client.list_tasks(topic="flask.done")]
        assert done.body == b"it"
        process.send_signal(signal.SIGTERM)
        _, err = await soon(asyncio.to_thread(process.communicate))
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert "working on flask.plain (default), 1 at a time" in err


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["shop:tickwheel"], 1, "shop:tickwheel is not a tickwheel.Worker, but Tickwheel"),
        (["missing:worker"], 1, "no module missing"),
        (["--concurrency", "0"], 2, "0 is not in the range"),
    ],
)
def test_an_unrunnable_worker_names_the_reason(
    arguments: list[str], code: int, word: str, project: Project
) -> None:
    process = project.start(*arguments)
    _, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, "Traceback" in err) == (code, False)
    assert word in err


def test_a_program_without_handlers_names_the_setting(project: Project) -> None:
    text = PROGRAM.replace(', TICKWHEEL_HANDLERS=["shop:worker"]', "")
    project.write(text)
    process = project.start()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2 and "set TICKWHEEL_HANDLERS" in err


def test_a_mistyped_setting_is_refused() -> None:
    with pytest.raises(BadRequest, match="TICKWHEEL_HANDLER; did you mean TICKWHEEL_HANDLERS"):
        application(Tickwheel(), "tcp://127.0.0.1:1", TICKWHEEL_HANDLER=[])
