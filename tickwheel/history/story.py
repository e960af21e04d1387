"""The story of one task out of the history, bounded in events, in bytes and in the time that it
takes. A daemon has it looked up by a process of its own (``lookup.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Any, Final

from tickwheel.errors import LimitExceeded
from tickwheel.history.read import Query, search, written
from tickwheel.history.segments import HOUR_MS, Event, Tally

EVENTS_MAX: Final = 1_000
BYTES_MAX: Final = 2 << 20
"""Bytes of an answer's events, as JSON."""
S_MAX: Final = 5.0
"""Seconds after which a search answers with what it has found."""
LINES_PER_LOOK: Final = 10_000
"""Lines that are read between two looks at the clock."""


class Hurried(Tally):
    """A tally that raises LimitExceeded when there is more to read than there is time for."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + S_MAX
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "lines" and value % LINES_PER_LOOK == 1 and time.monotonic() > self._until_s:
            raise LimitExceeded(f"the history is too long for {S_MAX:g} s")


def story(folder: Path, task_id: int, begun_ms: int) -> tuple[list[Event], bool]:
    """The events of a task in their order, and whether these are all; ``begun_ms``: when it was
    enqueued, as its id says."""
    found: list[Event] = []
    left, is_whole = BYTES_MAX, False
    with contextlib.suppress(LimitExceeded):
        for event in _events(folder, task_id, begun_ms, Hurried()):
            left -= len(dumps(event))
            if left < 0 or len(found) == EVENTS_MAX:
                break
            found.append(event)
        else:
            is_whole = True
    return sorted(found, key=written), is_whole


def _events(folder: Path, task_id: int, begun_ms: int, tally: Tally) -> Iterator[Event]:
    """The task's events since its enqueue; where there are none, everything is looked through."""
    is_found = False
    for since_ms in (begun_ms - HOUR_MS, None):
        for event in search(folder, Query(ids=frozenset((task_id,)), since_ms=since_ms), tally):
            is_found = True
            yield event
        if is_found:
            return
