"""Tasks out of the history: found by key, topic and time, as they were, with their ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from history.recording_rig import RecordingRig
from support.engine_rig import CONFIG
from support.history_rig import HOUR_MS, NOW_MS, acked, delivered, enqueued, make_id, write
from tickwheel.history import read
from tickwheel.history.lines import EventKind, Renderer
from tickwheel.history.read import Query, search_tasks
from tickwheel.history.segments import Tally
from tickwheel.model.records import ID_STEP

KEY = 'ключ "1"\n'
A, B, C, D = (make_id(n, NOW_MS + n) for n in range(4))
LATER = make_id(9, NOW_MS + 2 * HOUR_MS)
DUE_MS = NOW_MS + HOUR_MS
BODIES = [b"a", b"\xff"]


def ended(kind: str, task_id: int, group: str | None = None, *, last: bool = True) -> list[Any]:
    is_last = last if group else None
    return [EventKind.ENDED, NOW_MS + 500, "t", group, kind, [task_id], is_last]


def dead(task_id: int) -> list[Any]:
    return [EventKind.DEAD, NOW_MS + 400, "t", "g", [task_id], [2], ["no good\nline 1"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Over three hours: one acked, one of another topic that is cancelled, a dead letter, one that
    waits, and one that came later."""
    write(
        tmp_path,
        [
            [enqueued([A, B], DUE_MS, ["t", "u"], options={0: [KEY, "tag"]}, bodies=BODIES)],
            [enqueued([C, D], DUE_MS, options={0: [KEY]}, bodies=BODIES, time_ms=NOW_MS + 9)],
            [delivered([A, C], time_ms=DUE_MS), acked([A], time_ms=DUE_MS + 1), dead(C)],
            [ended("cancelled", B)],
            [enqueued([LATER], LATER, options={0: [KEY]}, time_ms=NOW_MS + 2 * HOUR_MS)],
        ],
    )
    return tmp_path


def find(folder: Path, **wanted: Any) -> list[dict[str, Any]]:
    return list(search_tasks(folder, Query(**wanted), Tally()))


def ids(found: list[dict[str, Any]]) -> list[int]:
    return [int(row["id"]) for row in found]


def test_a_finished_task_is_shown_as_it_was(folder: Path) -> None:
    result = {int(row["id"]): row for row in find(folder)}
    assert result[A] == {
        "id": str(A), "state": "acked", "topic": "t", "key": KEY, "tag": "tag", "body": "a",
        "enqueued_ms": NOW_MS, "due_ms": DUE_MS, "ended_ms": DUE_MS + 1, "attempts": 1,
    }  # fmt: skip
    assert (result[B]["state"], result[B]["body_base64"]) == ("cancelled", "/w==")
    assert (result[C]["state"], result[C]["reason"], result[C]["ended_ms"]) == (
        "dead",
        "no good",
        None,
    )
    assert (result[D]["state"], result[D]["attempts"]) == (read.UNFINISHED, 0)


def test_a_task_that_ended_after_the_clock_was_set_back_is_finished(tmp_path: Path) -> None:
    write(tmp_path, [[enqueued([A])], [delivered([A]), dead(A)]])
    back_ms = NOW_MS - 2 * HOUR_MS
    write(tmp_path, [[[EventKind.REQUEUED, back_ms, "t", "g", [A]]]])
    assert [row["state"] for row in find(tmp_path)] == [read.UNFINISHED]
    write(tmp_path, [[acked([A], time_ms=back_ms + 1)]])
    assert [row["state"] for row in find(tmp_path)] == ["acked"]


@pytest.mark.parametrize(
    ("wanted", "newest_first"),
    [
        ({}, [LATER, D, C, B, A]),
        ({"key": KEY}, [LATER, C, A]),
        ({"key": KEY, "topic": "t", "until_ms": NOW_MS + 9}, [A]),
        ({"topic": "u"}, [B]),
        ({"since_ms": NOW_MS + 9}, [LATER, D, C]),
        ({"since_ms": NOW_MS + 9, "until_ms": NOW_MS + HOUR_MS, "key": KEY}, [C]),
        ({"key": "nothing has this"}, []),
    ],
)
def test_tasks_are_found_by_key_topic_and_time(
    folder: Path, wanted: Any, newest_first: list[int]
) -> None:
    assert ids(find(folder, **wanted)) == newest_first


@pytest.mark.parametrize("word", ["cancelled", "expired", "deleted", "filtered"])
@pytest.mark.parametrize(("group", "last"), [(None, True), ("g", True), ("g", False)])
def test_a_task_has_ended_when_all_groups_ended_it(
    tmp_path: Path, word: str, group: str | None, last: bool
) -> None:
    write(tmp_path, [[enqueued([A], DUE_MS)], [ended(word, A, group, last=last)]])
    (found,) = find(tmp_path)
    assert found["state"] == (word if last else read.UNFINISHED)
    assert found["ended_ms"] == (NOW_MS + 500 if last else None)


def test_tasks_beyond_one_read_are_found_once(tmp_path: Path) -> None:
    many = [make_id(n) for n in range(3 * read.PART + 7)]
    write(tmp_path, [[enqueued(many, DUE_MS)], [delivered(many), acked(many)]])
    write(tmp_path, [[enqueued(many, DUE_MS)]], epoch=2)  # a crash doubled the batch
    tasks = find(tmp_path)
    assert sorted(ids(tasks)) == sorted(many)
    assert {entry["state"] for entry in tasks} == {"acked"}


def test_every_task_of_a_busy_hour_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "PART", 1 << 20)
    many = [make_id(n) for n in range(100_001)]
    write(tmp_path, [[enqueued(many, DUE_MS)]])
    assert ids(find(tmp_path)) == many[::-1]


@pytest.mark.parametrize(("limit", "complete"), [(2, False), (5, True), (100, True)])
def test_an_answer_says_whether_it_is_whole(folder: Path, limit: int, complete: bool) -> None:
    found, is_whole = read.find_tasks(folder, Query(), limit)
    assert (len(found), is_whole) == (min(limit, 5), complete)


def test_an_answer_keeps_only_the_newest_tasks_of_an_hour(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlines, kept = read._outlines, list[int]()

    def noted(folder: Path, since_ms: int, ids: Any, tally: Tally) -> Iterator[dict[str, Any]]:
        kept.extend(ids)
        return outlines(folder, since_ms, ids, tally)

    monkeypatch.setattr(read, "_outlines", noted)
    assert ids(read.find_tasks(folder, Query(), 2).found) == [LATER, D]
    assert kept == [LATER, D, C, B]


def test_an_answer_is_bounded_in_bytes_and_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "BYTES_MAX", 300)
    found, is_whole = read.find_tasks(folder, Query(), 100)
    assert 0 < len(found) < 5 and not is_whole
    monkeypatch.setattr(read, "S_MAX", -1.0)
    assert read.find_tasks(folder, Query(), 100) == ([], False)


def test_the_process_answers_a_question(folder: Path) -> None:
    done = subprocess.run(
        read.lookup_command(str(folder)), input=read.tasks_question(Query(key=KEY), 2),
        capture_output=True, check=True,
    )  # fmt: skip
    found, is_whole = read.answer_of(done.stdout)
    assert (ids(found), is_whole) == ([LATER, C], False)


RENDERER = Renderer("n", 0, 1)


def test_a_replaced_task_names_its_replacement_and_failure() -> None:
    rig = RecordingRig(CONFIG)
    rig.subscribe(group="a")
    task_id = rig.enqueue()
    got, known = rig.one(), rig.find(task_id)
    assert known is not None
    rig.engine.control.give_way(known, task_id + ID_STEP, rig.now_ms)
    assert rig.nack(got, reason="no") == "cancelled"
    rig.commit()
    results = [json.loads(line) for _, one in rig.history for line in RENDERER.render(one, 1)]
    (event,) = [entry for entry in results if entry["event"] == "cancelled"]
    assert (event["task_id"], event["group"], event["ended"]) == (str(task_id), "a", True)
    assert event["reason"] == f"replaced by {task_id + ID_STEP}; no"
