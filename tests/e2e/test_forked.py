"""A process that is forked is what the command itself would have started."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from e2e.cli_runner import Cli
from support import forked
from support.daemon import ANY_DISK, Daemon, DaemonFailed
from support.forked_shell import commands
from support.waiting import soon, until
from tickwheel import Client

pytestmark = pytest.mark.usefixtures("way")


# What a forked one does is written down here; that the command does the same takes long to show.
COMMAND = pytest.param("0", id="command", marks=pytest.mark.slow)


@pytest.fixture(params=[pytest.param("1", id="forked"), COMMAND])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKED", request.param)


def test_a_forked_daemon_serves_and_ends_by_signals(tmp_path: Path) -> None:
    with Daemon(tmp_path, http=True) as daemon:
        assert isinstance(daemon._process, subprocess.Popen) == (not forked.can_fork())
        assert Cli(daemon).one("stats")["scheduled"] == 0
        assert daemon.terminate() == 0
        daemon.start()
        until(lambda: daemon.log_text().count(" serving ") == 2)  # a thread writes it
        daemon.kill()
        assert daemon.wait() == -signal.SIGKILL


async def test_a_forked_daemon_dies_at_its_failpoint(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, failpoints="commit.after=1")
    async with daemon, Client(daemon.url) as client:
        sent = client.enqueue_nowait("t", b"x")
        assert await daemon.awaited() == -signal.SIGKILL
        await daemon.astart()
        await soon(sent)
    assert daemon.hits == ["commit.after"]


def test_a_forked_daemons_errors_equal_the_programs(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, no_such_setting=1)
    with pytest.raises(DaemonFailed, match=r"ended with 2 before(.|\n)*no_such_setting"):
        daemon.start()
    with Daemon(tmp_path / "other") as other:
        cli = Cli(other)
        assert "unknown" in cli.fails(4, "show", "1")
        assert "bad_request" in cli.fails(2, "show")
        assert cli.run("enqueue", "t", "-", stdin=b"body").returncode == 0
        assert cli.one("subscribe", "t", "--max", "1")["body"] == "body"


def test_a_shells_tickwheel_works_in_pipes_and_other_folders(tmp_path: Path) -> None:
    with Daemon(tmp_path / "daemon") as daemon, commands() as command:
        done = shell(
            command,
            """
            mkdir there && cd there
            echo -n "two words" > 'a file'
            tickwheel enqueue t - --json < 'a file' | grep -o '"state"'
            tickwheel subscribe t --max 1 --json 2> /dev/null | tr a-z A-Z
            tickwheel show 1
            """,
            tmp_path, TICKWHEEL_URL=daemon.url,
        )  # fmt: skip
    assert "TWO WORDS" in done.stdout, done
    assert done.stderr.count("\n") == 1
    assert "unknown" in done.stderr
    assert done.returncode == 4


@pytest.mark.parametrize(("name", "code"), [("TERM", 0), ("KILL", 128 + signal.SIGKILL)])
def test_a_shells_tickwheel_ends_by_signals(tmp_path: Path, name: str, code: int) -> None:
    """A job's number is that of the process, or of one whose end is the process' end."""
    with commands() as command:
        done = shell(
            command,
            f"""
            tickwheel serve --store sqlite:///s.db --listen tcp://127.0.0.1:0 \\
                --ready-file ready &> log &
            until [ -s ready ]; do kill -0 $! || exit; sleep 0.02; done
            port=$(grep -o ':[0-9]*"' ready | tr -d ':"')
            (: < /dev/tcp/127.0.0.1/$port) && echo serves
            kill -{name} $!; wait $!; echo ended with $?
            while (: < /dev/tcp/127.0.0.1/$port) 2> /dev/null; do sleep 0.02; done
            """,
            tmp_path,
        )  # fmt: skip
    assert "serves" in done.stdout, (done, (tmp_path / "log").read_text())
    assert f"ended with {code}" in done.stdout, done


def shell(
    command: list[str], script: str, folder: Path, **env: str
) -> subprocess.CompletedProcess[str]:
    """``script`` with a `tickwheel` that is ``command``; nothing that it leaves lives on."""
    program = folder / "bin" / "tickwheel"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    with subprocess.Popen(
        ["bash", "-c", f"trap 'kill -9 $(jobs -p) 2>/dev/null' EXIT\n{script}"],
        cwd=folder, env=os.environ | ANY_DISK | path | env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as running:  # fmt: skip
        try:
            out, err = running.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(script, running.returncode, out, err)
