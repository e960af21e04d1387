"""A process that is forked is what the command itself would have started."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from e2e.cli_runner import Cli
from support import forked
from support.daemon import Daemon, DaemonFailed
from support.waiting import soon
from tickwheel import Client

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture(params=["1", "0"], ids=["forked", "command"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKED", request.param)


def test_it_serves_and_ends_by_signals(tmp_path: Path) -> None:
    with Daemon(tmp_path, http=True) as daemon:
        assert isinstance(daemon._process, subprocess.Popen) == (not forked.can_fork())
        assert Cli(daemon).one("stats")["pending"] == 0
        assert daemon.terminate() == 0
        daemon.start()
        daemon.kill()
        assert daemon.wait() == -signal.SIGKILL
    assert daemon.log_text().count(" serving ") == 2


async def test_it_is_killed_at_a_failpoint_of_its_own_environment(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, failpoints="commit.after=1")
    async with daemon, Client(daemon.url) as client:
        sent = client.enqueue_nowait("t", b"x")
        assert await daemon.awaited() == -signal.SIGKILL
        await daemon.astart()
        await soon(sent)
    assert daemon.hits == ["commit.after"]


def test_its_errors_are_the_program_s(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, no_such_setting=1)
    with pytest.raises(DaemonFailed, match=r"ended with 2 before(.|\n)*no_such_setting"):
        daemon.start()
    with Daemon(tmp_path / "other") as other:
        cli = Cli(other)
        assert "unknown" in cli.fails(4, "show", "1")
        assert "bad_request" in cli.fails(2, "show")
        assert cli.run("enqueue", "t", "-", stdin=b"body").returncode == 0
        assert cli.one("subscribe", "t", "--max", "1")["body"] == "body"
