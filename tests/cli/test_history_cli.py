"""``history``, ``show --flow`` and ``restore`` as they are called."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support.fake_daemon import FakeDaemon
from support.history_rig import NOW_MS, acked, delivered, enqueued, make_id, spool_of, write
from support.history_rig import writer_of as make_writer
from support.restore_rig import LATER_MS, STARTED, group, held, make_backup, stopped, url
from support.stand_in import stand_in
from tickwheel.api.frames import FrameType as T
from tickwheel.cli import history as history_command
from tickwheel.cli.app import run
from tickwheel.cli.history import RestoreProgress, _report_facts, restore_line
from tickwheel.history.lines import EventKind
from tickwheel.history.restore import Report
from tickwheel.model.records import TaskRow

Capture = pytest.CaptureFixture[str]
A, B = make_id(1), make_id(2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tasks: one acked at its second attempt, one only enqueued."""
    nacked = [
        EventKind.NACKED,
        NOW_MS + 9,
        "t",
        "g",
        "w@1",
        [A],
        [1],
        [NOW_MS + 50],
        ["no\x1b[31m"],
    ]
    write(
        tmp_path,
        [
            [STARTED, group()],
            [enqueued([A, B], options={0: ["k1"]}, bodies=[b"a", b"b"])],
            [delivered([A]), nacked, delivered([A], 2, time_ms=NOW_MS + 51)],
            [acked([A], 2, time_ms=NOW_MS + 60, delivered_ms=NOW_MS + 51)],
        ],
    )
    return tmp_path


def call(capsys: Capture, *arguments: str) -> tuple[int, list[str], str]:
    code = run(arguments)
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def objects(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


def test_history_shows_why_a_delivery_was_late(tmp_path: Path, capsys: Capture) -> None:
    late = [*delivered([A], time_ms=NOW_MS + 60_000), "no_credit"]
    write(tmp_path, [[STARTED, group()], [enqueued([A])], [late]])
    _, lines, _ = call(capsys, "history", "--dir", str(tmp_path))
    assert "+1m 0s (no_credit), by w@1" in lines[1]


def test_history_lists_newest_first(folder: Path, capsys: Capture) -> None:
    code, lines, err = call(capsys, "history", "--dir", str(folder))
    assert (code, err) == (0, "")
    assert lines[0].split() == ["time", "event", "task", "topic", "group", "details"]
    words = [
        "acked",
        "delivered",
        "nacked",
        "delivered",
        "enqueued",
        "enqueued",
        "group",
        "started",
    ]
    assert [line.split()[2] for line in lines[1:]] == words
    assert "attempt 2, in 9 ms, by w@1" in lines[1]
    assert "no\\x1b[31m" in lines[3] and "\x1b" not in lines[3]
    assert "key=k1" in lines[6]


def test_json_is_the_events_as_they_are(folder: Path, capsys: Capture) -> None:
    code, lines, _ = call(capsys, "history", "--dir", str(folder), "--json", "--oldest-first")
    assert code == 0
    result = objects(lines)
    assert [event["seq"] for event in result] == list(range(1, 9))
    assert result[2]["body"] == "YQ==" and result[2]["v"] == 1


@pytest.mark.parametrize(
    ("options", "seqs"),
    [
        (["--id", str(B)], [4]),
        (["--id", str(A), "--id", str(B), "--event", "enqueued"], [3, 4]),
        (["--key", "k1", "--event", "nacked,acked"], [6, 8]),
        (["--topic", "t", "--group", "g", "--event", "group-created"], [2]),
        (["--since", "2026-11-21T10:00:00.051+00:00"], [7, 8]),
        (["--until", "2026-11-21T10:00:00+00:00"], [1, 2]),
        (["--limit", "2"], [7, 8]),
        (["--limit", "0"], list(range(1, 9))),
    ],
)
def test_history_filters_select_events(
    folder: Path, capsys: Capture, options: list[str], seqs: list[int]
) -> None:
    code, lines, _ = call(capsys, "history", "--dir", str(folder), "--json", *options)
    assert code == 0
    assert sorted(event["seq"] for event in objects(lines)) == seqs


def test_history_exits_4_for_unknown_and_2_for_invalid(folder: Path, capsys: Capture) -> None:
    assert call(capsys, "history", "--dir", str(folder), "--id", "5")[0] == 4
    assert call(capsys, "history", "--dir", str(folder), "--key", "none")[0] == 4
    assert call(capsys, "history", "--dir", str(folder), "--topic", "none")[0] == 0
    for wrong, said in (
        (["--event", "eaten"], "--event must be one of enqueued"),
        (["--id", "x"], "not a valid task id"),
        (["--since", "soon"], "neither"),
    ):
        code, _, err = call(capsys, "history", "--dir", str(folder), *wrong)
        assert code == 2 and said in err, err
    assert call(capsys, "history", "--dir", str(folder / "none"))[0] == 2
    code, _, err = call(capsys, "history")
    assert code == 2 and "TICKWHEEL_HISTORY_DIR" in err


def test_a_transaction_has_its_own_story(tmp_path: Path, capsys: Capture) -> None:
    details = {"group": "payments", "part": 1, "bytes": 9}
    records = [
        [
            EventKind.TRANSACTION,
            NOW_MS + n,
            "p" if what == "prepared" else "",
            name,
            what,
            3,
            A,
            details,
        ]
        for n, (name, what) in enumerate(
            (("order-1", "prepared"), ("order-2", "prepared"), ("order-1", "committed"))
        )
    ]
    write(tmp_path, [[STARTED, group()], *([record] for record in records), [enqueued([A])]])
    options = ("--dir", str(tmp_path), "--transaction", "order-1")
    code, lines, _ = call(capsys, "history", "--json", "--oldest-first", *options)
    assert code == 0
    rows = [(event["event"], event["transaction"]) for event in objects(lines)]
    words = ("transaction_prepared", "transaction_committed")
    assert rows == [(word, "order-1") for word in words]
    shown = "\n".join(call(capsys, "history", *options)[1])
    assert shown.count("transaction order-1, 3 tasks") == 2 and "order-2" not in shown
    assert call(capsys, "history", "--dir", str(tmp_path), "--transaction", "none")[0] == 4


def test_the_folder_may_come_from_the_environment(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TICKWHEEL_HISTORY_DIR", str(folder))
    assert len(call(capsys, "history", "--limit", "3")[1]) == 4
    assert len(call(capsys, "history", "list", "--limit", "3")[1]) == 4


def test_torn_lines_are_reported(folder: Path, capsys: Capture) -> None:
    (path,) = folder.glob("dt=*/hour=10/*.gz")
    (path.parent / "other-s0-e1-000009.jsonl").write_text('{"torn')
    code, _, err = call(capsys, "history", "--dir", str(folder))
    assert (code, err) == (0, "tickwheel: 1 torn lines were skipped\n")


def test_follow_prints_new_events(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = spool_of(tmp_path)
    writer = make_writer(tmp_path)
    rounds = iter(range(1, 100))

    def next_round(_: float) -> None:
        n = next(rounds)
        if n > 3:
            raise KeyboardInterrupt
        spool.append(n, [enqueued([make_id(n)])])
        writer.step()

    monkeypatch.setattr(history_command, "time", stand_in(time, sleep=next_round))
    since = "2026-11-21T10:00:00+00:00"
    code, lines, _ = call(
        capsys, "history", "--dir", str(tmp_path), "-f", "--json", "--since", since
    )
    assert code == 130
    assert [event["task_id"] for event in objects(lines)] == [str(make_id(n)) for n in (1, 2, 3)]
    writer.close()


# --- show --flow -------------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_a_finished_task_is_shown_from_history_alone(folder: Path, capsys: Capture) -> None:
    arguments = ["show", str(A), "--flow", "--history", str(folder), "--url", "127.0.0.1:1"]
    code, lines, err = call(capsys, *arguments)
    assert code == 0 and "using only the history" in err
    assert lines[0] == f"History of task {A}"
    assert [line.split()[2] for line in lines[2:3]] == ["enqueued"]
    assert [word in "\n".join(lines) for word in ("42 ms", "node-1", "attempt")] == [True] * 3
    code, lines, _ = call(capsys, *arguments, "--json")
    (found,) = objects(lines)
    assert code == 0 and found["id"] == str(A)
    assert [event["event"] for event in found["flow"]] == [
        "enqueued", "delivered", "nacked", "delivered", "acked"
    ]  # fmt: skip


@pytest.mark.usefixtures("impatient")
def test_an_unknown_task_exits_with_4(folder: Path, capsys: Capture) -> None:
    code, _, err = call(
        capsys, "show", "77", str(A), "--flow", "--history", str(folder), "--url", "127.0.0.1:1"
    )
    assert code == 4 and "not_found: task 77 is unknown" in err
    code, _, err = call(capsys, "show", "77", "--flow", "--url", "127.0.0.1:1")
    assert code == 3 and "unreachable" in err


async def test_show_prints_the_current_state_and_the_history(folder: Path, capsys: Capture) -> None:
    async with FakeDaemon() as daemon:
        arguments = ["show", str(B), "--flow", "--history", str(folder), "--url", daemon.url]
        showing = asyncio.create_task(asyncio.to_thread(run, arguments))
        peer = await daemon.peer()
        frame = await peer.next(T.LOOKUP)
        peer.ok(frame, [{"id": B, "state": "scheduled", "topic": "t", "body": b"b"}])
        assert await showing == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Task {B}"
    assert f"History of task {B}" in lines


async def show_flow(told: dict[str, Any], info: dict[str, Any], *options: str) -> int:
    """``show --flow`` of a daemon that has this history of the task; the exit code."""
    async with FakeDaemon() as daemon:
        arguments = ["show", str(info["id"]), "--flow", "--url", daemon.url, *options]
        showing = asyncio.create_task(asyncio.to_thread(run, arguments))
        peer = await daemon.peer()
        peer.ok(await peer.next(T.LOOKUP), [info])
        frame = await peer.next(T.TASK_HISTORY)
        assert frame[2] == info["id"]
        peer.ok(frame, told)
        return await showing


async def test_history_without_a_folder_asks_the_daemon(capsys: Capture) -> None:
    events = [
        {"v": 1, "time_ms": NOW_MS, "event": "enqueued", "task_id": str(A), "topic": "t"},
        {"v": 1, "time_ms": NOW_MS + 9, "event": "acked", "task_id": str(A), "topic": "t"},
    ]
    told = {"events": events, "is_kept": True, "complete": True}
    ended = {"id": A, "state": "acked"}
    assert await show_flow(told, ended, "--json") == 0
    [shown] = objects(capsys.readouterr().out.splitlines())
    assert (shown["state"], shown["flow"]) == ("acked", events)
    assert await show_flow(told | {"complete": False}, ended) == 0
    out, err = capsys.readouterr()
    assert f"History of task {A}" in out and "acked" in out
    assert "the history is too long for one answer" in err
    none = {"events": [], "is_kept": False, "complete": True}
    assert await show_flow(none, {"id": A, "state": "gone"}) == 4
    err = capsys.readouterr().err
    assert "the daemon keeps no history" in err and "not_found" in err


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_stored_task_without_history_exits_with_4(is_kept: bool, capsys: Capture) -> None:
    """The table says where it stands, but no flow was found."""
    told = {"events": [], "is_kept": is_kept, "complete": True}
    stored = {"id": A, "state": "scheduled", "topic": "t", "body": b"b"}
    assert await show_flow(told, stored) == 4
    out, err = capsys.readouterr()
    assert f"Task {A}" in out
    assert f"the daemon's history has no events of task {A}" in err


# --- restore -----------------------------------------------------------------------------------


async def test_restore_shows_progress_on_stderr(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, with a share, a rate and an estimate; stdout has the result alone."""
    backup = await make_backup(folder)
    monkeypatch.setattr(RestoreProgress, "EVERY_S_LINES", 0.0)
    code, lines, err = restore(capsys, folder, "--from", backup, "--json")
    assert code == 0 and [json.loads(line)["dry_run"] for line in lines] == [False]
    assert all(line.startswith("tickwheel: ") for line in err.splitlines())
    assert restore_line("events applied", 0, None, 0.1) == "events applied"
    assert restore_line("events applied", 250, 1_000, 0.5) == (
        "250 of 1,000 events applied (25 %), 500/s, 1.5 s left"
    )


def restore(capsys: Capture, folder: Path, *options: str) -> tuple[int, list[str], str]:
    arguments = ["restore", "--into", url(folder), "--history", str(folder), *options]
    results: list[tuple[int, list[str], str]] = []
    # A loop of its own: the tests that look at the store run in one.
    thread = threading.Thread(target=lambda: results.append(call(capsys, *arguments)))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "yes"),
        ({"targets_lost": ["t g"]}, "no: targets are missing"),
        ({"transactions_lost": ["x"], "schedules_without_body": ["s"], "clean_stop": False},
         "no: bodies are missing, transactions are missing, tasks may be delivered again"),
    ],
)  # fmt: skip
def test_a_restore_says_why_it_is_not_exact(fields: dict[str, Any], expected: str) -> None:
    report = Report(**{"history": True, "clean_stop": True, **fields})
    assert (_report_facts(report)["exact"], report.exact) == (expected, expected == "yes")


async def test_restore_from_the_command_line(folder: Path, capsys: Capture) -> None:
    backup = await make_backup(folder, [TaskRow(make_id(9), LATER_MS, "t", b"old")])
    code, lines, err = restore(capsys, folder, "--from", backup, "--dry-run")
    assert code == 0 and lines[0].startswith("Would be restored into sqlite:///")
    assert not (folder / "new.db").exists()
    code, lines, err = restore(capsys, folder, "--from", backup)
    assert code == 0 and lines[0].startswith("Restored into sqlite:///")
    shown = {line.rsplit("  ", 1)[0].strip(): line.rsplit("  ", 1)[1] for line in lines[2:]}
    assert (shown["tasks"], shown["from the backup"], shown["from the history"]) == ("2", "1", "1")
    assert shown["exact"] == "no: tasks may be delivered again"
    assert "did not stop cleanly" in err
    assert set((await held(url(folder))).rows) == {make_id(9), B}
    code, _, err = restore(capsys, folder, "--from", backup)
    assert code == 1 and "already exists" in err


async def test_restore_skips_overdue_tasks(folder: Path, capsys: Capture) -> None:
    write(folder, [[stopped()]])
    code, lines, _ = restore(capsys, folder, "--id", str(B), "--id", str(A), "--json")
    (report,) = objects(lines)
    assert code == 4 and report["restored"] == 1 and report["exact"] is True
    assert report["not_found"] == {"count": 1, "ids": [str(A)]}
    (folder / "new.db").unlink()
    code, lines, err = restore(capsys, folder, "--overdue", "skip", "--json")
    (report,) = objects(lines)
    assert code == 0 and report["restored"] == 0
    assert report["skipped_overdue"] == {"count": 1, "ids": [str(B)]}


async def test_restore_without_bodies_exits_with_1(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, [[STARTED, group()], [enqueued([A])], [stopped()]])
    code, lines, err = restore(capsys, tmp_path)
    assert code == 1 and lines[0].startswith("Nothing was written to ")
    assert f"1 tasks ({A}) cannot be restored" in err and "--allow-missing-bodies" in err
    assert not (tmp_path / "new.db").exists()
    assert restore(capsys, tmp_path, "--allow-missing-bodies")[0] == 0
    assert (tmp_path / "new.db").exists()


NOBODY = ("--url", "tcp://127.0.0.1:1")


@pytest.mark.usefixtures("impatient")
def test_a_key_is_looked_up_in_the_history_without_a_daemon(folder: Path, capsys: Capture) -> None:
    asked = (*NOBODY, "show", "--key", "k1", "--history", str(folder), "--json")
    code, lines, err = call(capsys, *asked)
    assert code == 0
    assert "using only the history" in err
    (shown,) = objects(lines)
    assert shown["id"] == str(A)
    assert shown["flow"][0]["event"] == "enqueued"
    code, lines, err = call(capsys, *NOBODY, "show", "--key", "none", "--history", str(folder))
    assert (code, lines) == (4, [])
    assert "no task with key 'none' is stored, or in the history" in err
    code, _, err = call(capsys, *NOBODY, "show", "--key", "k1")
    assert code == 3 and "unreachable" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show"], "either ids or --key"),
        (["show", "5", "--key", "k"], "either ids or --key"),
        (["show", "5", "--topic", "t"], "require --key"),
        (["show", "5", "--before", "1h"], "require --key"),
        (["show", "--key", "k", "--before", "tomorrow"], "tomorrow"),
        (["list", "--before", "tomorrow"], "tomorrow"),
    ],
)
def test_invalid_options_of_show_by_key_are_usage_errors(
    capsys: Capture, arguments: list[str], words: str
) -> None:
    code, lines, err = call(capsys, *NOBODY, *arguments)
    assert (code, lines) == (2, [])
    assert words in err
