"""The story of one task: whole, in order, and never larger than it may be; as a process."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support import history_rig
from support.history_rig import HOUR_MS, NOW_MS, acked, delivered, enqueued, make_id
from tickwheel.history import read, segments
from tickwheel.history.read import answer_of, lookup_command, serve, story, story_question
from tickwheel.history.segments import SegmentName, Tally, hour_folder, hour_of

TASK = make_id(5)


def write(folder: Path, events: int, *, at_ms: int = NOW_MS, task: int = TASK, **more: Any) -> None:
    """Of the task, and as many of another one."""
    path = folder / hour_folder(hour_of(at_ms)) / str(SegmentName("n", 0, 1, 1, False))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number in range(2 * events):
            event = {
                "event": "delivered", "topic": "t", "epoch": 1, "seq": number + 1,
                "time_ms": at_ms + number, "task_id": str(task if number % 2 == 0 else task + 1024),
            }  # fmt: skip
            file.write(json.dumps(event | more) + "\n")


def test_a_story_is_complete_and_in_order(tmp_path: Path) -> None:
    write(tmp_path, 20)
    events, is_whole = story(tmp_path, TASK, NOW_MS)
    assert is_whole and [event["seq"] for event in events] == list(range(1, 41, 2))


def test_a_story_of_a_moved_shard_needs_all_folders(tmp_path: Path) -> None:
    """The folder of one machine has what was written there."""
    history_rig.write(tmp_path / "a", [[enqueued([TASK])]], 1, node="host-a")
    history_rig.write(tmp_path / "b", [[delivered([TASK]), acked([TASK])]], 2, node="host-b")
    for folder in "ba":
        shutil.copytree(tmp_path / folder, tmp_path / "all", dirs_exist_ok=True)

    def told(folder: str) -> list[tuple[str, str]]:
        return [(e["node"], e["event"]) for e in story(tmp_path / folder, TASK, NOW_MS).found]

    of_a, of_b = [("host-a", "enqueued")], [("host-b", "delivered"), ("host-b", "acked")]
    assert (told("a"), told("b"), told("all")) == (of_a, of_b, of_a + of_b)


def test_events_older_than_the_id_are_found(tmp_path: Path) -> None:
    write(tmp_path, 3, at_ms=NOW_MS - 10 * 3_600_000)
    events, is_whole = story(tmp_path, TASK, NOW_MS)
    assert is_whole and len(events) == 3
    assert story(tmp_path, TASK + 2048, NOW_MS) == ([], True)


def test_a_story_continues_where_the_clock_was_set_back(tmp_path: Path) -> None:
    """It does not read what was written before the task."""
    history_rig.write(tmp_path, [[enqueued([TASK + 1024], time_ms=NOW_MS - 4 * HOUR_MS)]])
    (before,) = segments.find(tmp_path)
    before.path.write_bytes(b"not a segment")
    for record in (enqueued([TASK]), acked([TASK], time_ms=NOW_MS - 3 * HOUR_MS)):
        history_rig.write(tmp_path, [[record]])
    tally = Tally()
    assert [e["event"] for e in read.flow(tmp_path, TASK, NOW_MS, tally)] == ["enqueued", "acked"]
    assert tally.unreadable == 0


def test_a_story_begins_where_the_clock_was_behind_the_id(tmp_path: Path) -> None:
    ahead_ms = NOW_MS + 5 * HOUR_MS
    history_rig.write(tmp_path, [[enqueued([TASK])], [delivered([TASK], time_ms=ahead_ms)]])
    events, is_whole = story(tmp_path, TASK, ahead_ms)
    assert is_whole and [event["event"] for event in events] == ["enqueued", "delivered"]


@pytest.mark.parametrize(
    ("limit", "most", "has"), [("EVENTS_MAX", 3, 3), ("BYTES_MAX", 1_000, 8), ("BYTES_MAX", 9, 0)]
)
def test_a_story_ends_at_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int, has: int
) -> None:
    write(tmp_path, 200)
    monkeypatch.setattr(read, limit, most)
    events, is_whole = story(tmp_path, TASK, NOW_MS)
    assert (len(events), is_whole) == (has, False)


def test_an_oversized_event_ends_a_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 2, body="x" * 5_000)
    monkeypatch.setattr(read, "BYTES_MAX", 4_000)
    assert story(tmp_path, TASK, NOW_MS) == ([], False)


def test_a_story_ends_at_its_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 20)
    monkeypatch.setattr(read, "LINES_PER_LOOK", 10)
    monkeypatch.setattr(read, "S_MAX", -1.0)
    events, is_whole = story(tmp_path, TASK, NOW_MS)
    assert not is_whole and len(events) < 20


def test_questions_are_answered_in_turn(tmp_path: Path) -> None:
    write(tmp_path, 2)
    answers = io.BytesIO()
    serve(
        tmp_path,
        io.BytesIO(
            story_question(TASK, NOW_MS) + story_question(7, 0) + story_question(TASK, NOW_MS)
        ),
        answers,
    )
    texts = [answer_of(line) for line in answers.getvalue().splitlines()]
    assert [(len(events), is_whole) for events, is_whole in texts] == [
        (2, True), (0, True), (2, True),
    ]  # fmt: skip


def test_the_process_ends_with_its_questions(tmp_path: Path) -> None:
    write(tmp_path, 2)
    done = subprocess.run(
        lookup_command(str(tmp_path)),
        input=story_question(TASK, NOW_MS),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert len(answer_of(done.stdout)[0]) == 2
