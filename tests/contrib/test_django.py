"""A Django project that is really run: its checks, its enqueues, its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contrib.forking import Forking
from support.daemon import Daemon
from support.frameworks import need
from support.waiting import comes, soon
from tickwheel import Client

need("django")

ROOT = Path(__file__).parents[2]
NOWHERE = "tcp://127.0.0.1:1"
FILES = {
    "manage.py": """
        import os, sys
        from django.core.management import execute_from_command_line
        os.environ["DJANGO_SETTINGS_MODULE"] = "site_settings"
        execute_from_command_line(sys.argv)
        """,
    "site_settings.py": """
        import os
        from pathlib import Path
        BASE_DIR = Path(__file__).parent
        SECRET_KEY = "x"
        USE_TZ = True
        INSTALLED_APPS = ["tickwheel.contrib.django", "shop"]
        DATABASES = {
            name: {"ENGINE": "django.db.backends.sqlite3", "NAME": BASE_DIR / f"{name}.db"}
            for name in ("default", "other")
        }
        DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
        TICKWHEEL = {
            "URL": os.environ["SHOP_URL"], "HANDLERS": ["shop.tasks:worker"], "TIMEOUT": 5,
            "CONNECT_TIMEOUT": 0.3,
        }
        """,
    "shop/__init__.py": "",
    "shop/models.py": """
        from django.db import models
        class Order(models.Model):
            number = models.CharField(max_length=20)
        """,
    "shop/tasks.py": """
        import threading, time
        from django.db import connection
        from shop.models import Order
        from tickwheel import Client, Delivery, Worker
        worker = Worker(Client("tcp://127.0.0.1:1"))
        @worker.on("django.close", concurrency=1)
        def close(delivery: Delivery) -> None:
            was_open = connection.connection is not None
            deleted = Order.objects.filter(number=delivery.key).delete()[0]
            print("closed", delivery.key, deleted, was_open, threading.get_ident(), flush=True)
        @worker.on("django.slow")
        def slow(delivery: Delivery) -> None:
            print("begins", delivery.attempt, flush=True)
            time.sleep(float(delivery.body))  # real time: a slow handler
        """,
}


FORKING = Forking(
    "django.core.management", "django.core.management.commands.check",
    "django.core.management.commands.shell", "django.db.backends.sqlite3.base",
    "tickwheel.contrib.django", "tickwheel.sync",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def forking() -> Iterator[None]:
    yield
    FORKING.close()


class Project:
    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": str(ROOT), "SHOP_URL": url}
        # A file that changes twice in a second is told from what was compiled by its size alone.
        self.env["PYTHONDONTWRITEBYTECODE"] = "1"
        for name, text in FILES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def settings(self, text: str) -> None:
        self.write("site_settings.py", FILES["site_settings.py"])
        with (self.folder / "site_settings.py").open("a") as file:
            file.write(f"\n{text}\n")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "manage.py", *arguments], cwd=self.folder, env=self.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = (self.folder / "manage.py").read_text()
        return FORKING.run(code, *arguments, env=self.env, cwd=self.folder)

    def shell(self, program: str) -> str:
        """What a program prints that runs in the project."""
        code, out, err = self.run("shell", "--no-imports", "-c", textwrap.dedent(program))
        assert code == 0, err
        return out

    @contextmanager
    def working(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        process = self.start("tickwheel_worker", *arguments)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def project(tmp_path: Path, running: Daemon) -> Project:
    return Project(tmp_path, running.url)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


# --- settings ------------------------------------------------------------------------------------


def test_a_project_with_good_settings_passes_the_checks(project: Project) -> None:
    assert project.run("check") == (0, "System check identified no issues (0 silenced).\n", "")
    project.settings("del TICKWHEEL")
    assert project.run("check")[0] == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("TICKWHEEL = 'tcp://x:1'", ["E001", "must be a dict, not str"]),
        ("TICKWHEEL['HANDLER'] = []", ["E002", "no key 'HANDLER'", "Do you mean HANDLERS?"]),
        pytest.param(
            "TICKWHEEL['Colour'] = []",
            ["E002", "no key 'Colour'", "Valid keys are ACTIVE_TIMEOUT, "],
            marks=pytest.mark.slow,
        ),
        ("TICKWHEEL['URL'] = 'http://x'", ["E003", "http://x"]),
        pytest.param("TICKWHEEL['URL'] = 7", ["E003"], marks=pytest.mark.slow),
        pytest.param(
            "TICKWHEEL['RETRIES'] = -1",
            ["E003", "must be an integer between 0 and 1000, not -1"],
            marks=pytest.mark.slow,
        ),
        ("TICKWHEEL['TIMEOUT'] = 'soon'", ["E004", "TICKWHEEL['TIMEOUT']", "soon"]),
        ("TICKWHEEL['HANDLERS'] = 'shop.tasks:worker'", ["E005", "must be a list of strings"]),
        pytest.param(
            "TICKWHEEL['HANDLERS'] = ['shop.tasks']",
            ["E006", "is not MODULE:WORKER"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "TICKWHEEL['HANDLERS'] = ['shop.jobs:worker']",
            ["E006", "no module shop.jobs"],
            marks=pytest.mark.slow,
        ),
        ("TICKWHEEL['HANDLERS'] = ['shop.tasks:close']", ["E006", "is not a tickwheel.Worker"]),
        ("TICKWHEEL['HANDLERS'] *= 2", ["E007", "'django.close', group 'default' has two"]),
    ],
)
def test_invalid_settings_fail_the_checks(wrong: str, words: list[str], project: Project) -> None:
    project.settings(wrong)
    code, _, err = project.run("check")
    assert code == 1
    assert "Traceback" not in err
    for word in words:
        assert word in err, err


# --- enqueue -------------------------------------------------------------------------------------


async def test_a_task_exists_only_after_the_commit(project: Project, client: Client) -> None:
    project.run("migrate", "--run-syncdb")
    shown = project.shell(
        """
        from django.db import transaction
        from shop.models import Order
        from tickwheel.contrib.django import client, enqueue_on_commit
        def place(number, fails):
            with transaction.atomic():
                Order.objects.create(number=number)
                enqueue_on_commit("django.committed", b"x", delay=600, key=number, tag="a")
                assert not [*client().list_tasks(topic="django.committed", key=number)]
                if fails:
                    raise ValueError
        place("kept", False)
        try:
            place("rolled-back", True)
        except ValueError:
            print("rolled back", Order.objects.count())
        """
    )
    assert shown == "rolled back 1\n"
    [task] = [task async for task in client.list_tasks(topic="django.committed")]
    assert (task.key, task.tag, task.body) == ("kept", "a", b"x")
    assert task.due_ms is not None and task.due_ms > time.time() * 1000 + 500_000


async def test_on_commit_uses_the_named_database(project: Project, client: Client) -> None:
    project.shell(
        """
        from django.db import transaction
        from tickwheel.contrib.django import client, enqueue, enqueue_on_commit
        def count():
            return len([*client().list_tasks(topic="django.using")])
        enqueue_on_commit("django.using", b"", delay=600)
        assert count() == 1
        with transaction.atomic():  # of the default database: the other one has none
            enqueue_on_commit("django.using", b"", delay=600, using="other")
            assert count() == 2
        with transaction.atomic(using="other"):
            enqueue_on_commit("django.using", b"", delay=600, using="other")
            assert count() == 2
        assert count() == 3
        assert enqueue("django.using", b"", delay=600).id
        assert count() == 4
        """
    )


def test_a_wrong_task_is_refused_before_the_commit(project: Project) -> None:
    shown = project.shell(
        """
        from django.db import transaction
        from tickwheel import TickwheelError
        from tickwheel.contrib.django import enqueue_on_commit
        for options in ({"delay": -1}, {"key": "x" * 10_000}, {"at": "tomorrow"}):
            try:
                with transaction.atomic():
                    enqueue_on_commit("django.wrong", b"", **options)
            except TickwheelError as error:
                print(transaction.get_connection().run_on_commit, *options, error.code)
        """
    )
    assert shown.splitlines() == [
        "[] delay bad_request", "[] key limit_exceeded", "[] at bad_request",
    ]  # fmt: skip


def test_an_unreachable_daemon_is_raised_or_logged_after_the_commit(tmp_path: Path) -> None:
    project = Project(tmp_path, NOWHERE)
    project.run("migrate", "--run-syncdb")
    shown = project.shell(
        """
        from django.db import transaction
        from shop.models import Order
        from tickwheel import Unreachable
        from tickwheel.contrib.django import enqueue_on_commit
        for robust in (False, True):
            try:
                with transaction.atomic():
                    Order.objects.create(number="1")
                    enqueue_on_commit("t", b"", robust=robust, timeout=0.2)
                    transaction.on_commit(lambda: print("the next one is called"))
            except Unreachable:
                print("raised")
        print(Order.objects.count())
        """
    )
    assert shown.splitlines() == ["raised", "the next one is called", "2"]


async def test_each_preforked_process_has_its_own_client(project: Project, client: Client) -> None:
    shown = project.shell(
        """
        import os
        from tickwheel.contrib import django as tickwheel
        tickwheel.enqueue("django.forked", b"master", delay=600)
        for number in range(3):
            if os.fork() == 0:
                tickwheel.enqueue("django.forked", b"child", delay=600)
                print("child", flush=True)
                os._exit(0)
            os.wait()
        tickwheel.enqueue("django.forked", b"master", delay=600)
        """
    )
    assert shown.split() == ["child"] * 3
    bodies = [task.body async for task in client.list_tasks(topic="django.forked")]
    assert sorted(map(bytes, filter(None, bodies))) == [b"child"] * 3 + [b"master"] * 2


def test_overridden_settings_have_their_own_client(project: Project, running: Daemon) -> None:
    project.shell(
        f"""
        from django.test import override_settings
        from tickwheel import ClientClosed
        from tickwheel.contrib.django import client, enqueue
        first = client()
        enqueue("django.overridden", b"")
        with override_settings(TICKWHEEL={{"URL": "{running.url}", "SEND_TIMEOUT": 25}}):
            assert client() is not first and enqueue("django.overridden", b"")
            try:
                first.ping()
                raise AssertionError
            except ClientClosed:
                pass
        assert enqueue("django.overridden", b"")
        """
    )


# --- the worker ----------------------------------------------------------------------------------


async def test_the_worker_closes_database_connections_around_each_task(
    project: Project, client: Client
) -> None:
    await asyncio.to_thread(project.run, "migrate", "--run-syncdb")
    await asyncio.to_thread(
        project.shell,
        """
        from shop.models import Order
        Order.objects.create(number="1")
        from tickwheel.contrib.django import enqueue
        enqueue("django.close", b"", key="1")
        enqueue("django.close", b"", key="2")
        """,
    )
    with project.working("--concurrency", "1") as process:
        lines = [(await soon(asyncio.to_thread(line_of, process))).split() for _ in range(2)]
        assert [line[:4] for line in lines] == [
            ["closed", "1", "1", "False"], ["closed", "2", "0", "False"],
        ]  # fmt: skip
        assert lines[0][4] == lines[1][4], "the same thread, whose connection was closed meanwhile"
        process.send_signal(signal.SIGTERM)
        _, err = await soon(asyncio.to_thread(process.communicate))
    assert process.returncode == 0, err
    assert "working on django.close (default), 1 at a time" in err


async def test_sigterm_waits_for_handlers_up_to_the_grace(project: Project, client: Client) -> None:
    receipt = await client.enqueue("django.slow", b"0.4")
    with project.working("--grace", "10") as process:
        assert await soon(asyncio.to_thread(line_of, process)) == "begins 1"
        process.send_signal(signal.SIGTERM)
        await soon(asyncio.to_thread(process.communicate))
    assert process.returncode == 0
    assert (await client.lookup(receipt.id)).state == "acked"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["shop.tasks:close"], "shop.tasks:close is not a tickwheel.Worker"),
        pytest.param(["shop.missing:worker"], "no module shop.missing", marks=pytest.mark.slow),
        pytest.param(
            ["--concurrency", "0"],
            "concurrency must be an integer between 1 and 65535, not 0",
            marks=pytest.mark.slow,
        ),
        pytest.param(["--grace", "-1"], "grace", marks=pytest.mark.slow),
    ],
)
def test_worker_errors_are_one_line(arguments: list[str], word: str, project: Project) -> None:
    code, _, err = project.run("tickwheel_worker", *arguments)
    assert code == 1
    assert len(err.splitlines()) == 1 and word in err, err


def test_a_worker_without_handlers_names_the_setting(project: Project) -> None:
    project.settings("TICKWHEEL['HANDLER'] = []")
    code, _, err = project.run("tickwheel_worker")
    assert code == 1 and "Do you mean HANDLERS?" in err
    project.settings("del TICKWHEEL['HANDLERS']")
    code, _, err = project.run("tickwheel_worker")
    assert code == 1 and "no handlers are configured" in err


async def test_a_child_does_not_outlive_a_parent_that_is_killed(
    project: Project, client: Client
) -> None:
    need("watchfiles")

    async def consumers() -> int:
        return len([consumer async for consumer in client.list_consumers(topic="django.slow")])

    async def nobody() -> bool:
        return await consumers() == 0

    with project.working("--reload") as process:
        await comes(consumers)
        process.kill()
        assert await comes(nobody)


async def test_a_worker_restarts_when_the_project_changes(project: Project, client: Client) -> None:
    need("watchfiles")
    with project.working("--reload") as process:
        await client.enqueue("django.slow", b"0")
        assert await soon(asyncio.to_thread(line_of, process)) == "begins 1"
        broken = FILES["shop/tasks.py"] + "\n        1 / 0\n"
        project.write("shop/tasks.py", broken)
        assert process.stderr is not None
        while "waiting for a change" not in await soon(asyncio.to_thread(process.stderr.readline)):
            pass
        project.write("shop/tasks.py", FILES["shop/tasks.py"].replace("begins", "anew"))
        await client.enqueue("django.slow", b"0")
        assert await soon(asyncio.to_thread(line_of, process)) == "anew 1"
        process.send_signal(signal.SIGTERM)
        await soon(asyncio.to_thread(process.communicate))
    assert process.returncode == 0

    async def gone() -> bool:
        return [consumer async for consumer in client.list_consumers(topic="django.slow")] == []

    assert await comes(gone), "no child is left"
