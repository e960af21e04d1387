"""The story of one task out of the history, for a daemon: found by a process of its own.

To look through an hour of history is work for a processor, and a thread of the daemon would take
that from the event loop. So ``python -m tickwheel.history.story`` does it: it reads a question a
line from its standard input and writes an answer a line to its standard output, one at a time, at a
low priority, and ends when its standard input does: with the daemon, however that ends.

An answer is bounded in events, in bytes and in the time that it takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Any, BinaryIO, Final

from tickwheel.errors import LimitExceeded
from tickwheel.history.read import Query, search, written
from tickwheel.history.segments import HOUR_MS, Event, Tally
from tickwheel.model.records import id_time_ms

EVENTS_MAX: Final = 1_000
BYTES_MAX: Final = 2 << 20
"""Of the events of an answer, as JSON."""
S_MAX: Final = 5.0
"""A search that takes longer says what it has found."""
LINES_PER_LOOK: Final = 10_000
"""It looks at the clock so often."""
NICENESS: Final = 10


class _Hurried(Tally):
    """Gives up when there is too much to read."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + S_MAX
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "lines" and value % LINES_PER_LOOK == 1 and time.monotonic() > self._until_s:
            raise LimitExceeded(f"the history is too long for {S_MAX:g} s")


def story(folder: Path, task_id: int) -> tuple[list[Event], bool]:
    """The task's events in the order of their happening, and whether these are all."""
    found: list[Event] = []
    left, is_whole = BYTES_MAX, False
    with contextlib.suppress(LimitExceeded):
        for event in _events(folder, task_id, _Hurried()):
            left -= len(dumps(event))
            if left < 0 or len(found) == EVENTS_MAX:
                break
            found.append(event)
        else:
            is_whole = True
    return sorted(found, key=written), is_whole


def _events(folder: Path, task_id: int, tally: Tally) -> Iterator[Event]:
    """From when it was enqueued, as its id says; where that finds nothing, everything is looked
    through."""
    is_found = False
    for since_ms in (id_time_ms(task_id) - HOUR_MS, None):
        for event in search(folder, Query(ids=frozenset((task_id,)), since_ms=since_ms), tally):
            is_found = True
            yield event
        if is_found:
            return


# --- the process ---------------------------------------------------------------------------------


def command(folder: str) -> list[str]:
    """How it is started."""
    return [sys.executable, "-m", "tickwheel.history.story", folder]


def question(task_id: int) -> bytes:
    """A line of its standard input."""
    return b"%d\n" % task_id


def answer_of(line: bytes) -> tuple[list[Event], bool]:
    """A line of its standard output. Raises ValueError when that is no answer."""
    said = json.loads(line)
    return said["events"], said["complete"]


def serve(folder: Path, questions: BinaryIO, answers: BinaryIO) -> None:
    """Until the questions end."""
    for line in questions:
        events, is_whole = story(folder, int(line))
        answers.write(dumps({"events": events, "complete": is_whole}).encode() + b"\n")
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
