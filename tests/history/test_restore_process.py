"""A restore that is stopped on its way, and the process that a daemon watches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from support.history_rig import NOW_MS, enqueued, make_id, write
from support.restore_rig import LATER_MS, STARTED, group, make_backup, stopped
from tickwheel.api.daemon import RESTORE_STEPS
from tickwheel.history import restore as module
from tickwheel.history.restore import Plan, restore
from tickwheel.model.records import TaskRow
from tickwheel.persistence import sqlite_url


async def sources(folder: Path) -> Plan:
    """A backup with a task, and a history with another."""
    folder.mkdir()
    rows = [TaskRow(make_id(1), NOW_MS + 1, "t", b"a")]
    backup = await make_backup(folder, rows)
    event = enqueued([make_id(2)], bodies=[b"b"], time_ms=NOW_MS + 10)
    write(folder, [[STARTED, group()], [event], [stopped()]])
    target = folder / "target"
    target.mkdir()
    return Plan(sqlite_url(target / "new.db"), backup, (str(folder),))


class Enough(Exception):
    pass


@pytest.mark.parametrize("last", RESTORE_STEPS)
async def test_a_stopped_restore_leaves_no_files(tmp_path: Path, last: str) -> None:
    plan, seen = await sources(tmp_path / "x"), list[str]()

    def watch(step: str, done: int, of: int | None) -> None:
        seen.append(step)
        if step == last:
            raise Enough

    with pytest.raises(Enough):
        await restore(plan, LATER_MS, watch)
    steps = [step for step, _ in groupby(seen)]
    assert steps == list(RESTORE_STEPS[: RESTORE_STEPS.index(last) + 1])
    assert list((tmp_path / "x" / "target").iterdir()) == []


def begin(plan: Plan, **more: Any) -> subprocess.Popen[bytes]:
    made = subprocess.Popen(
        [sys.executable, "-m", "tickwheel.history.restore"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert made.stdin is not None
    fields = {"into": plan.into, "backup": plan.backup, "history": plan.history, "ids": None}
    made.stdin.write(json.dumps(fields | {"now_ms": LATER_MS} | more).encode() + b"\n")
    made.stdin.flush()
    return made


async def test_the_process_reports_progress_and_result(tmp_path: Path) -> None:
    plan = await sources(tmp_path / "x")
    with begin(plan) as process:
        assert process.stdout is not None
        texts = [json.loads(line) for line in process.stdout]
        assert process.wait() == 0
    assert list(dict.fromkeys(entry["step"] for entry in texts[:-1])) == list(RESTORE_STEPS)
    assert texts[-1]["report"]["restored"] == 2
    assert texts[-1]["report"]["transactions_lost"] == {"count": 0, "names": []}
    with begin(plan) as again:
        out, err = again.communicate()
    assert (again.returncode, err) == (0, b"")
    assert json.loads(out.splitlines()[-1])["error"]["code"] == "conflict"


def test_a_restore_process_without_its_daemon_ends() -> None:
    for given in (b"", b'{"into": "half a'):
        done = subprocess.run(
            [sys.executable, "-m", "tickwheel.history.restore"],
            input=given,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")


def test_the_end_of_its_input_stops_a_restore_process(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    out_end, said_end = os.pipe()
    monkeypatch.setattr(module, "STDIN", read_end)
    monkeypatch.setattr(module, "STDOUT", said_end)
    watch = module._Watch()
    watch("events", 1, None)
    watch("events", 2, None)  # too soon after that to be said
    watch("tasks", 0, None)
    os.close(write_end)
    assert watch._ended.wait(20)
    with pytest.raises(module._Stopped):
        watch("tasks", 1_000, None)
    os.close(said_end)
    with os.fdopen(out_end, "rb") as out:
        assert [json.loads(line)["step"] for line in out] == ["events", "tasks"]
    os.close(read_end)
