"""What somebody meets who uses the command line for the first time."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

from support import forked
from support.daemon import Daemon
from tickwheel import Client, Task, Worker
from tickwheel.cli.app import app, run
from tickwheel.cli.options import complete_groups, complete_topics
from tickwheel.cli.output import Grid, table_of
from tickwheel.errors import BadRequest
from tickwheel.server.settings import load

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
TERMINAL = 80

# --- 80 columns ----------------------------------------------------------------------------------

COUNTS = ("scheduled", "ready", "in flight", "waiting", "dead", "oldest", "enqueued", "acked")
LONG = "shop.eu-central.orders.close"


def drawn(grid: Grid, width: int = TERMINAL) -> str:
    out = io.StringIO()
    shown, _ = grid.fitted(width)
    Console(file=out, width=width, force_terminal=False).print(table_of(shown, width))
    return out.getvalue()


@pytest.fixture
def wide() -> Grid:
    grid = Grid(("topic", "group", *COUNTS), right=frozenset(COUNTS))
    grid.rows.append((LONG, "billing", *["1,234,567"] * len(COUNTS)))
    grid.rows.append(("a", "b", *["0"] * len(COUNTS)))
    return grid


def test_names_never_disappear(wide: Grid) -> None:
    for width in (40, 60, TERMINAL, 100, 132, 200):
        lines = drawn(wide, width).splitlines()
        assert all(len(line) <= width for line in lines)
        text = "".join(line[: line.find("  ")] if "  " in line else line for line in lines)
        assert LONG[:20] in text, (width, lines)
    assert "billing" in drawn(wide)


def test_count_columns_that_do_not_fit_are_dropped_from_the_right(wide: Grid) -> None:
    shown, hidden = wide.fitted(TERMINAL)
    assert list(shown.columns) + hidden == list(wide.columns)
    assert hidden
    assert hidden[-1] == "acked"
    assert all(len(row) == len(shown.columns) for row in shown.rows)
    assert "1,234,567" in drawn(wide), "what is shown is whole"
    for width in range(50, 140, 7):
        heads = drawn(wide, width).splitlines()[0]
        assert all(head in heads for head in wide.fitted(width)[0].columns), width


def test_a_table_that_fits_is_unchanged(wide: Grid) -> None:
    assert wide.fitted(300) == (wide, [])


def test_help_fits_the_terminal_and_groups_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(TERMINAL))
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for panel in ("A daemon and its store", "Tasks", "Topics and groups", "Observe"):
        assert f" {panel} " in text
    first = [line.split()[1] for line in text.splitlines() if line.startswith("│ ")]
    commands: Any = get_command(app)
    assert set(commands.commands) <= set(first)
    assert "─ Commands ─" not in text, "each command is in a panel with a name"


# --- near misses and hints -----------------------------------------------------------------------


def test_misspelt_commands_and_settings_get_a_suggestion(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["enqeue", "t", "x"]) == 2
    assert "enqueue" in capsys.readouterr().err
    with pytest.raises(BadRequest, match=r"no setting retry_mx; did you mean retry_max\?"):
        load(None, {"retry_mx": "3"})
    with pytest.raises(BadRequest, match=r"no setting qwertyuiop$"):
        load(None, {"qwertyuiop": "3"})


@pytest.mark.usefixtures("impatient")
def test_an_unreachable_daemon_error_suggests_tickwheel_serve(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--url", "tcp://127.0.0.1:1", "stats"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "`tickwheel serve`" in line


# --- against a daemon ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as found:
        yield found


def said(daemon: Daemon, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["--url", daemon.url, *words]
    with TemporaryFile("w+b") as out, TemporaryFile("w+b") as err:
        process = forked.start(command, env=os.environ, stdin=None, stdout=out, stderr=err)
        try:
            code = process.wait(WAIT_S)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        texts = out.read().decode(), err.read().decode()
        return subprocess.CompletedProcess(command, code, *texts)


def test_limit_errors_name_the_setting(daemon: Daemon) -> None:
    done = said(daemon, "enqueue", "t", "x", "--delay", "9999d")
    assert "delay_max_s" in done.stderr
    assert "delay_ms_max" not in done.stderr


def test_subscribe_announces_a_new_durable_group_once(daemon: Daemon) -> None:
    said(daemon, "enqueue", "typo", "x")
    said(daemon, "enqueue", "typo", "y")
    first = said(daemon, "subscribe", "typo", "--group", "biling", "--max", "1")
    assert first.returncode == 0
    (line,) = first.stderr.splitlines()
    assert "creates the group biling of topic typo" in line
    assert "tickwheel groups delete typo biling" in line
    assert "takes over 2 tasks" in line
    again = said(daemon, "subscribe", "typo", "--group", "biling", "--max", "1")
    assert again.stderr == ""


async def test_commands_printed_for_a_new_group_move_its_backlog(daemon: Daemon) -> None:
    """A group that nobody uses has the backlog; the next one gets it by the printed commands."""
    async with Client(daemon.url) as client:
        await client.enqueue_many(Task("orders", b"x") for _ in range(3))
        async with client.subscribe("orders", group="look", prefetch=0):
            """It owns the backlog from now on."""
        async with client.subscribe("orders", group="shop", prefetch=0) as shop:
            assert shop.new_group is not None
            told = shop.new_group.describe("orders", "shop")
            assert shop.new_group.idle == {"look": 3}
        for command in re.findall(
            "`tickwheel (groups (?:reset [^`]*|delete [^`]* --force))`", told
        ):
            done = said(daemon, *command.split(), *["--yes"] * ("reset" in command))
            assert done.returncode == 0, done.stderr
        deliveries = await client.pull("orders", group="shop", max=3, wait=WAIT_S)
        assert deliveries
        assert list((await client.stats()).topics["orders"].groups) == ["shop"]


def test_pausing_an_unknown_topic_is_an_error(daemon: Daemon) -> None:
    assert "topic ordres does not exist yet" in said(daemon, "pause", "ordres").stderr
    said(daemon, "enqueue", "orders", "x")
    assert said(daemon, "pause", "orders").stderr == ""


def test_topics_and_groups_are_completed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    said(daemon, "groups", "create", "complete.me", "one")
    said(daemon, "groups", "create", "complete.other", "two")
    command: Any = get_command(app)
    context = command.make_context("tickwheel", ["--url", daemon.url, "pause", "complete.me"])
    assert complete_topics(context, "compl") == ["complete.me", "complete.other"]
    pause = command.commands["pause"].make_context(
        "pause", ["complete.me"], parent=context, resilient_parsing=True
    )
    assert complete_groups(pause, "") == ["one"]
    assert {"one", "two"} <= set(complete_groups(context, ""))
    daemonless = command.make_context("tickwheel", ["--url", "tcp://127.0.0.1:1", "pause"])
    assert complete_topics(daemonless, "") == []


def test_work_waits_for_the_daemon_to_start(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "from tickwheel import Client, Worker\n"
        "worker = Worker(Client(connect_timeout=0.1))\n"
        "@worker.on('late')\n"
        "async def handle(delivery):\n"
        "    print('handled', delivery.body.decode(), flush=True)\n"
        "    worker.stop()\n"
    )
    with Daemon(tmp_path) as daemon:
        assert said(daemon, "enqueue", "late", "it").returncode == 0
        daemon.terminate()
        with subprocess.Popen(
            [sys.executable, "-m", "tickwheel", "--url", daemon.url, "work", "late:worker"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process:  # fmt: skip
            try:
                assert process.stderr is not None
                assert "waiting for a daemon" in process.stderr.readline()
                daemon.start()
                out, err = process.communicate(timeout=WAIT_S)
            finally:
                process.kill()
    assert (out, process.returncode) == ("handled it\n", 0), err
    assert err.count("waiting for a daemon") == 0, "once"
    assert "connected to 127.0.0.1" in err


async def test_stop_ends_a_workers_wait_for_the_daemon() -> None:
    worker = Worker(Client("tcp://127.0.0.1:1", connect_timeout=0.05), signals=False)

    @worker.on("t")
    async def handle(_: Any) -> None:
        worker.stop()

    worker.stop()
    await worker.run(wait=True)
