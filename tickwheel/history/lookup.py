"""What a daemon asks of the history, answered by a process of its own: the story of one task, and
tasks by key, topic and time.

To look through an hour of history is work for a processor, and a thread of the daemon would take
that from the event loop. So ``python -m tickwheel.history.lookup`` does it: it reads a question a
line from its standard input and writes an answer a line to its standard output, one at a time, at a
low priority, and ends when its standard input does: with the daemon, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from tickwheel.history.segments import Event
from tickwheel.history.story import BYTES_MAX, story
from tickwheel.history.tasks import Wanted, find

NICENESS: Final = 10
LINE_BYTES_MAX: Final = 2 * BYTES_MAX
"""Bytes of an answer's line: its events have ``BYTES_MAX``, and names and quotes as many."""


class Answer(NamedTuple):
    """Events of a task, or outlines of tasks, and whether these are all."""

    found: list[Event]
    is_whole: bool


def story_question(task_id: int, begun_ms: int) -> bytes:
    """The question for the story of a task, as a line for the process. ``begun_ms``: when it was
    enqueued, as far as is known."""
    return json.dumps({"story": task_id, "begun_ms": begun_ms}).encode() + b"\n"


def tasks_question(wanted: Wanted, limit: int) -> bytes:
    """The question for at most ``limit`` tasks, as a line for the process."""
    return json.dumps({"tasks": wanted, "limit": limit}).encode() + b"\n"


def answer_of(line: bytes) -> Answer:
    """The answer in a line of the process. Raises ValueError when it is none."""
    said = json.loads(line)
    return Answer(said["found"], said["complete"])


def _answer(folder: Path, asked: dict[str, Any]) -> Answer:
    if "story" in asked:
        return Answer(*story(folder, asked["story"], asked["begun_ms"]))
    return Answer(*find(folder, Wanted(*asked["tasks"]), asked["limit"]))


def command(folder: str) -> list[str]:
    """The command that starts the process."""
    return [sys.executable, "-m", "tickwheel.history.lookup", folder]


def serve(folder: Path, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions until there are no more."""
    for line in questions:
        found, is_whole = _answer(folder, json.loads(line))
        answers.write(json.dumps({"found": found, "complete": is_whole}).encode() + b"\n")
        answers.flush()


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        # They are meant for the daemon, whose end ends this process.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(BrokenPipeError):
        serve(Path(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
