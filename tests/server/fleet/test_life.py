"""When one process may say of another that it is over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.stand_in import stand_in
from tickwheel.server.fleet import lease
from tickwheel.server.fleet.lease import Life, is_over

READS = [sys.executable, "-c", "import sys; sys.stdin.read()"]
WRITES = [
    sys.executable,
    "-c",
    "from tickwheel.server.fleet.lease import Life; print(Life.own(), end='')",
]


@pytest.fixture
def here() -> Life:
    own = Life.own()
    assert own is not None
    return own


def life_of(pid: int, here: Life) -> Life:
    """As that process would write it."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return here._replace(pid=pid, start=int(stat.rpartition(")")[2].split()[19]))


def test_a_process_reads_its_own_life_and_finds_it_again(here: Life) -> None:
    assert (here.pid, Life.own()) == (os.getpid(), here)
    assert Life.parse(str(here)) == here
    assert "|" not in str(here), "the lease's value is separated by it"


def test_an_ended_process_is_over(here: Life) -> None:
    written = subprocess.run(WRITES, capture_output=True, text=True, check=True).stdout
    known = Life.parse(written)
    assert known is not None
    assert (known.boot, known.namespace) == (here.boot, here.namespace)
    assert is_over(written, here)


def test_a_live_process_is_over_only_after_its_kill(here: Life) -> None:
    with subprocess.Popen(READS, stdin=subprocess.PIPE) as process:
        life = str(life_of(process.pid, here))
        assert not is_over(life, here)
        process.kill()
        # Nobody has waited for it: it is still in the table of processes.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_over(life, here)
        process.wait()
        assert is_over(life, here)


def test_a_reused_pid_does_not_hide_the_end(here: Life) -> None:
    assert is_over(str(here._replace(start=here.start - 1)), here)
    assert not is_over(str(here), here)


def test_processes_of_other_machines_are_not_judged(here: Life) -> None:
    ended = here._replace(start=0)
    assert is_over(str(ended), here)
    assert not is_over(str(ended._replace(boot="other")), here)
    assert not is_over(str(ended._replace(namespace="1")), here)
    assert not is_over(str(ended), None), "this system does not say where we are"


@pytest.mark.parametrize("text", ["", "a/b/c/d", "a/b/1", "a/b/1/2/3", "a//1/2", "a/b/-1/2", "|"])
def test_an_invalid_life_is_not_over(text: str, here: Life) -> None:
    assert Life.parse(text) is None
    assert not is_over(text, here)


def test_an_unreadable_process_counts_as_alive(here: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden from other users (hidepid), or a number that no system has."""

    def denied(pid: int, signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(lease, "os", stand_in(os, kill=denied))
    assert not is_over(str(here._replace(pid=2**22 + 1)), here)
    monkeypatch.undo()
    assert not is_over(str(here._replace(pid=2**80)), here)
