"""Searches of the history by id, key, topic, group, event and time, newest or oldest first; and a
replay of all events of a shard in the order in which they were written, by epoch and number.

Memory is bounded: a search reads one hour at a time, merging its segments. Most lines are skipped
by their bytes, without being parsed. Only ``enqueued`` events contain the key, so a search by key
first finds the ids of the tasks.

A daemon asks two kinds of questions: for the story of a task, and for tasks by key, topic and time,
including finished tasks. Answers are bounded in events or tasks, in bytes and in time. A search
needs much processor time, which a thread would take from the daemon's event loop. So ``python -m
tickwheel.history.read`` runs as a process with a low priority. It reads one question from each line
of standard input, writes one answer to each line of standard output, and ends at the end of
standard input, and thus with the daemon.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import os
import re
import signal
import sys
import time
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby, islice
from json import dumps, loads
from operator import itemgetter, lt
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from tickwheel.api.tasks import kept_options
from tickwheel.errors import LimitExceeded
from tickwheel.history import segments, spool
from tickwheel.history.lines import CLOCK_SET_BACK, ENDINGS, MALFORMED, NAMES, Renderer
from tickwheel.history.segments import DAY_MS, HOUR_MS, Event, Segment, Tally, hour_of
from tickwheel.history.spool import SpoolName
from tickwheel.history.writer import LATE_MS, EpochPosition, Position, load_position

KEY_IDS_MAX = 100_000
"""Maximum number of tasks with the key of a search. If there are more, narrow the search."""
NEWEST_MAX = 1_000_000
ENQUEUED = frozenset(("enqueued",))
_TASK_ID = re.compile(rb'"task_id"\s*:\s*"(\d+)"')


@dataclass(frozen=True, slots=True)
class Query:
    """The values that events must have; None: any. ``until_ms`` is exclusive."""

    ids: AbstractSet[int] | None = None
    key: str | None = None
    topic: str | None = None
    group: str | None = None
    schedule: str | None = None
    transaction: str | None = None
    events: frozenset[str] | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    def wants(self, event: Event) -> bool:
        """Return whether the event matches, without checking its key; see ``by_ids``."""
        at_ms = event["time_ms"]
        return (
            (self.since_ms is None or at_ms >= self.since_ms)
            and (self.until_ms is None or at_ms < self.until_ms)
            and (self.events is None or event.get("event") in self.events)
            and all(event.get(name) == value for name, value in self._named())
            and (self.ids is None or task_id(event) in self.ids)
        )

    def _named(self) -> Iterator[tuple[str, str]]:
        for name in ("topic", "group", "schedule", "transaction"):
            if (value := getattr(self, name)) is not None:
                yield name, value

    def sieve(self) -> Callable[[bytes], bool]:
        """Return a function that tells from a line's bytes whether its event can match. It returns
        True for all matches, and for some other lines."""
        # Only ``enqueued`` events contain the key.
        names = [value for _, value in self._named()]
        names += [self.key] if self.events == ENQUEUED and self.key is not None else []
        needles = [spellings(name) for name in names]
        if self.events is not None:
            needles.append([needle for name in self.events for needle in spellings(name)])
        ids = None if self.ids is None else frozenset(str(i).encode() for i in self.ids)

        def may(line: bytes) -> bool:
            if ids is not None:
                match = _TASK_ID.search(line)
                if match is None or match[1] not in ids:
                    return False
            return all(any(needle in line for needle in spelled) for spelled in needles)

        return may


def task_id(event: Event) -> int | None:
    """Return the id of the event's task, or None for an event without a task."""
    text = event.get("task_id")
    return int(text) if isinstance(text, str) and text.isdecimal() else None


def search(history_dir: Path, query: Query, tally: Tally) -> Iterator[Event]:
    """Yield all matching events, oldest first. Raise LimitExceeded for too many tasks."""
    query = by_ids(history_dir, query, tally)
    for _, hour in hours(history_dir, query):
        yield from merged(hour, query, tally)


def newest(history_dir: Path, query: Query, limit: int, tally: Tally) -> Iterator[Event]:
    """Yield the newest ``limit`` matching events, newest first. Raise LimitExceeded."""
    if limit > NEWEST_MAX:
        raise LimitExceeded(f"limit must be at most {NEWEST_MAX} events, not {limit}")
    query = by_ids(history_dir, query, tally)
    remaining = limit
    for _, hour in reversed(hours(history_dir, query)):
        if remaining <= 0:
            return
        events = deque(merged(hour, query, tally), maxlen=remaining)
        remaining -= len(events)
        yield from reversed(events)


def by_ids(history_dir: Path, query: Query, tally: Tally) -> Query:
    """Return the query with the ids of the key's tasks instead of the key."""
    if query.key is None:
        return query
    enqueued = Query(query.ids, query.key, query.topic, events=ENQUEUED, until_ms=query.until_ms)
    ids: set[int] = set()
    for id_ in _with_key(segments.find(history_dir, until_ms=query.until_ms), enqueued, tally):
        ids.add(id_)
        if len(ids) > KEY_IDS_MAX:
            raise LimitExceeded(
                f"more than {KEY_IDS_MAX} tasks have the key {query.key!r:.60};"
                " use a topic, or an earlier end of the period"
            )
    return replace(query, key=None, ids=frozenset(ids))


def newest_id(history_dir: Path, query: Query, tally: Tally) -> int | None:
    """Return the id of the newest matching task that was enqueued with ``query.key``, or None. Read
    hours from the newest, and stop at the first match. Ids ascend, even if the clock was set back.
    """
    enqueued = replace(query, events=ENQUEUED)
    for hour_ms, hour in reversed(hours(history_dir, query)):
        newest_of_hour = max(_with_key(hour, enqueued, tally), default=None)
        if newest_of_hour is not None:
            later = _with_key(segments.find_later(history_dir, hour_ms), enqueued, tally)
            return max(newest_of_hour, max(later, default=0))
    return None


def _with_key(files: Iterable[Segment], enqueued: Query, tally: Tally) -> Iterator[int]:
    """Yield the ids of tasks that were enqueued with the key of the query."""
    assert enqueued.key is not None
    needles = spellings(enqueued.key)
    for segment in files:
        for event in segments.events(segment.path, tally, needles):
            id_ = task_id(event)
            if event.get("key") == enqueued.key and enqueued.wants(event) and id_ is not None:
                yield id_


def flow(history_dir: Path, wanted_id: int, since_ms: int, tally: Tally) -> list[Event]:
    """Return the events of one task in order. ``since_ms``: the enqueue time in its id."""
    return sorted(_since_enqueue(history_dir, wanted_id, since_ms, tally), key=write_order)


def write_order(event: Event) -> tuple[int, int, int]:
    """Return the sort key of a task's events."""
    epoch, seq = event.get("epoch"), event.get("seq")
    if type(epoch) is int and type(seq) is int:
        return epoch, seq, 0
    return 0, 0, int(event["time_ms"])


# --- merging an hour's segments ----------------------------------------------------------------


def hours(history_dir: Path, query: Query) -> list[tuple[int, list[Segment]]]:
    """Return the hours within the query's times, oldest first, with their segments."""
    if query.ids is not None and not query.ids:
        return []
    return _by_hour(segments.find(history_dir, query.since_ms, query.until_ms))


def _by_hour(files: Iterable[Segment]) -> list[tuple[int, list[Segment]]]:
    return [(hour, list(of_hour)) for hour, of_hour in groupby(files, lambda s: s.hour_ms)]


def merged(hour: list[Segment], query: Query, tally: Tally) -> Iterator[Event]:
    """Yield the matching events of an hour, by time."""
    # Read the segments of each daemon and epoch in the order of their numbers.
    ordered = groupby(sorted(hour, key=lambda s: s.name), lambda s: s.name[:3])
    chains = [_chain(list(chain), query, tally) for _, chain in ordered]
    return chains[0] if len(chains) == 1 else heapq.merge(*chains, key=_order)


def _chain(chain: list[Segment], query: Query, tally: Tally) -> Iterator[Event]:
    """Yield each matching event of one daemon's segments of an hour once."""
    may, last = query.sieve(), 0
    for segment in chain:
        for line in segments.raw_lines(segment.path, tally):
            tally.lines += 1
            if not may(line):
                continue
            event = segments.parse_line(line, tally)
            if event is None:
                continue
            seq = event.get("seq")
            if type(seq) is int:
                if seq <= last:
                    continue
                last = seq
            if query.wants(event):
                yield event


def _order(event: Event) -> tuple[int, int, int]:
    epoch, seq = event.get("epoch"), event.get("seq")
    return (event["time_ms"], epoch if type(epoch) is int else 0, seq if type(seq) is int else 0)


def spellings(text: str) -> list[bytes]:
    """Return the spellings of a text in a line: with non-ASCII characters escaped or not."""
    kinds = {dumps(text), dumps(text, ensure_ascii=False)}
    return [kind.encode("utf-8", "surrogatepass") for kind in kinds]


# --- following new events ----------------------------------------------------------------------


class Follow:
    """Follows the history: ``read`` returns the matching events written since its last call."""

    def __init__(self, history_dir: Path, query: Query, since_ms: int | None, tally: Tally) -> None:
        """``since_ms``: None stands for the present ends of the files, whatever the times of later
        events, which may be up to a day before the newest ones."""
        self._dir = history_dir
        self._key = query.key
        self._query = replace(by_ids(history_dir, query, tally), since_ms=since_ms)
        if self._key is not None:
            self._ids = set(self._query.ids or ())
            self._query = replace(self._query, ids=self._ids)
        self._start_ms = hour_of(since_ms or 0)
        self._tally = tally
        self._offsets: dict[Path, int] = {}
        self._read_paths: set[Path] = set()
        self._last: dict[tuple[int, str, int, int], int] = {}
        if since_ms is None:
            self._skip_present()

    def _skip_present(self) -> None:
        files = sorted(segments.find(self._dir), key=lambda segment: segment.name[2:4])
        newest = {segment.name.shard: segment.hour_ms for segment in files}
        self._start_ms = min(newest.values(), default=DAY_MS) - DAY_MS
        self._read_paths.update(segment.path for segment in files if segment.name.sealed)
        self.read()

    def read(self) -> list[Event]:
        """Return the new events, oldest first."""
        new_events: list[Event] = []
        for segment in segments.find(self._dir, self._start_ms):
            if segment.path in self._read_paths:
                continue
            lines = self._sealed(segment) if segment.name.sealed else self._grown(segment)
            chain = segment.hour_ms, *segment.name[:3]
            for line in lines:
                self._tally.lines += 1
                event = segments.parse_line(line, self._tally)
                if event is None or self._is_known(chain, event):
                    continue
                id_ = task_id(event)
                if id_ is not None and event.get("event") == "enqueued":
                    if self._key is not None and event.get("key") == self._key:
                        self._ids.add(id_)
                if self._query.wants(event):
                    new_events.append(event)
        return sorted(new_events, key=_order)

    def _sealed(self, segment: Segment) -> Iterator[bytes]:
        self._read_paths.add(segment.path)
        self._offsets.pop(segment.path.with_suffix(""), None)
        return segments.raw_lines(segment.path, self._tally)

    def _grown(self, segment: Segment) -> Iterator[bytes]:
        try:
            with segment.path.open("rb") as file:
                file.seek(self._offsets.get(segment.path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # the line is still being written
                    self._offsets[segment.path] = self._offsets.get(segment.path, 0) + len(line)
                    yield line
        except FileNotFoundError:
            # The segment has been sealed. Read it now: this call also reads the next segment, and
            # then lower event numbers count as known.
            yield from segments.raw_lines(segment.path, self._tally)

    def _is_known(self, chain: tuple[int, str, int, int], event: Event) -> bool:
        seq = event.get("seq")
        if type(seq) is not int:
            return False
        if seq <= self._last.get(chain, 0):
            return True
        self._last[chain] = seq
        return False


# --- the story of one task -----------------------------------------------------------------------


EVENTS_MAX: Final = 1_000
BYTES_MAX: Final = 2 << 20
"""Maximum bytes of an answer's events, as JSON."""
S_MAX: Final = 5.0
"""Maximum seconds of a search. After that it returns an incomplete answer."""
LINES_PER_LOOK: Final = 10_000
"""Number of lines that are read between two checks of the time."""


class TimedTally(Tally):
    """A tally that raises LimitExceeded after ``S_MAX`` seconds."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + S_MAX
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "lines" and value % LINES_PER_LOOK == 1 and time.monotonic() > self._until_s:
            raise LimitExceeded(f"the search took longer than {S_MAX:g} s; narrow it")


class Answer(NamedTuple):
    """Events of a task, or outlines of tasks."""

    found: list[Event]
    is_whole: bool
    """Whether no further events or tasks match."""


def _bounded(items: Iterator[Event], limit: int) -> Answer:
    """Return at most ``limit`` items and ``BYTES_MAX`` bytes of JSON, read within ``S_MAX`` s."""
    items_read: list[Event] = []
    bytes_left = BYTES_MAX
    with contextlib.suppress(LimitExceeded):
        for item in items:
            bytes_left -= len(dumps(item))
            if bytes_left < 0 or len(items_read) == limit:
                return Answer(items_read, is_whole=False)
            items_read.append(item)
        return Answer(items_read, is_whole=True)
    return Answer(items_read, is_whole=False)


def story(folder: Path, task_id: int, begun_ms: int) -> Answer:
    """Return the events of a task in order. ``begun_ms``: the time of its enqueue, as in its id."""
    events, is_whole = _bounded(_since_enqueue(folder, task_id, begun_ms, TimedTally()), EVENTS_MAX)
    return Answer(sorted(events, key=write_order), is_whole)


def _since_enqueue(folder: Path, task_id: int, begun_ms: int, tally: Tally) -> Iterator[Event]:
    """Yield the task's events since its enqueue, also those with earlier times, because the clock
    was set back. If the enqueue is not found, search the whole history."""
    hour_ms, ids, is_found = hour_of(begun_ms - HOUR_MS), frozenset((task_id,)), False
    for event in search(folder, Query(ids=ids, since_ms=hour_ms), tally):
        is_found |= event.get("event") == "enqueued"
        yield event
    if is_found:
        earlier = segments.find_later(folder, hour_ms)
    else:
        earlier = segments.find(folder, until_ms=hour_ms)
    yield from _in_hours(earlier, ids, tally)


def _in_hours(files: list[Segment], ids: AbstractSet[int], tally: Tally) -> Iterator[Event]:
    """Yield the events of tasks in segments that are in the order of their hours."""
    for _, hour in _by_hour(files):
        yield from merged(hour, Query(ids=ids), tally)


# --- outlines of tasks ---------------------------------------------------------------------------


TASKS_MAX: Final = 1_000
"""Maximum number of tasks in one answer to a daemon."""
PART: Final = 256
"""Number of tasks whose events are searched at once."""
_ENDS: Final = ("acked", *ENDINGS)
_FIELDS: Final = (
    ("topic", "topic"), ("schedule", "schedule"),
    *((option.name, NAMES.get(option.name, option.name))
      for option, kept in kept_options() if kept.is_listed),
)  # fmt: skip
"""(field of an outline, field of an event)."""
UNFINISHED: Final = "unfinished"


def search_tasks(
    history_dir: Path, wanted: Query, tally: Tally, kept_max: int | None = None
) -> Iterator[dict[str, Any]]:
    """Yield outlines of the tasks whose enqueue matches ``wanted``, newest first. ``kept_max``:
    the number of newest tasks of an hour that are kept in memory; None: all."""
    query = replace(wanted, events=ENQUEUED)
    for hour_ms, hour in reversed(hours(history_dir, query)):
        enqueued = _enqueued(hour, query, tally)
        ids = array("q", enqueued if kept_max is None else deque(enqueued, kept_max))
        ids.reverse()
        for start in range(0, len(ids), PART):
            yield from _outlines(history_dir, hour_ms, ids[start : start + PART], tally)


def _enqueued(hour: list[Segment], query: Query, tally: Tally) -> Iterator[int]:
    at_ms, same_time = 0, set[int]()
    for event in merged(hour, query, tally):
        id_ = task_id(event)
        if id_ is None or id_ >> 63 or query.key not in (None, event.get("key")):
            continue
        if event["time_ms"] != at_ms:
            at_ms, same_time = event["time_ms"], set()
        # After a crash, events can appear twice, under two epochs, at the same time.
        if id_ not in same_time:
            same_time.add(id_)
            yield id_


def _outlines(
    history_dir: Path, hour_ms: int, ids: Sequence[int], tally: Tally
) -> Iterator[dict[str, Any]]:
    stories: dict[int, list[Event]] = {id_: [] for id_ in ids}
    since = search(history_dir, Query(ids=stories.keys(), since_ms=hour_ms), tally)
    later = _in_hours(segments.find_later(history_dir, hour_ms), stories.keys(), tally)
    for event in chain(since, later):
        stories[int(event["task_id"])].append(event)
    for task_id, events in stories.items():
        yield outline(task_id, sorted(events, key=write_order))


def outline(task_id: int, events: Sequence[Event]) -> dict[str, Any]:
    """Summarize a task from its events in order: ``topic``, ``key``, other options and body, as far
    as the events contain them; ``state``, which is how it ended, "dead" or "unfinished"; and
    ``ended_ms``, the time at which it ended."""
    fields: dict[str, Any] = {"id": str(task_id), "state": UNFINISHED, "ended_ms": None}
    fields |= {"enqueued_ms": None, "due_ms": None, "attempts": 0}
    dead: dict[str, str] = {}
    for event in events:
        name, group = str(event["event"]), str(event.get("group", ""))
        if name in ("enqueued", "replaced"):
            _copy_fields(fields, event)
        elif name == "rescheduled":
            fields["due_ms"] = event.get("due_ms")
        elif name == "delivered":
            fields["attempts"] = max(fields["attempts"], int(event.get("attempt", 0)))
        elif name == "dead":
            dead[group] = str(event.get("reason", ""))
        elif name == "requeued":
            dead.pop(group, None)
            if "ttl_ms" in event:
                fields["ttl_ms"] = event["ttl_ms"]
        if name in _ENDS and (not group or event.get("ended")):
            fields |= {"state": name, "ended_ms": event["time_ms"]}
    if fields["state"] == UNFINISHED and dead:
        fields |= {"state": "dead", "reason": next(reversed(dead.values()))}
    return fields


def _copy_fields(fields: dict[str, Any], event: Event) -> None:
    fields |= {name: event[field] for name, field in _FIELDS if field in event}
    fields["due_ms"] = event.get("due_ms")
    if event["event"] == "enqueued":
        fields["enqueued_ms"] = event["time_ms"]
    if "body" in event:
        fields.pop("body", None)
        fields.pop("body_base64", None)
        body = base64.b64decode(event["body"])
        try:
            fields["body"] = body.decode()
        except UnicodeDecodeError:
            fields["body_base64"] = event["body"]


def find_tasks(folder: Path, query: Query, limit: int) -> Answer:
    """Return outlines of at most ``limit`` tasks."""
    # One more tells that there are more.
    return _bounded(search_tasks(folder, query, TimedTally(), limit + 1), limit)


# --- the process that answers a daemon -----------------------------------------------------------


NICENESS: Final = 10
ANSWER_BYTES_MAX: Final = 2 * BYTES_MAX
"""Maximum bytes of an answer's line: ``BYTES_MAX`` for its events, and the same for names and
quotes."""


def story_question(task_id: int, begun_ms: int) -> bytes:
    """Return a line that asks the process for the story of a task. ``begun_ms``: see ``story``."""
    return dumps({"story": task_id, "begun_ms": begun_ms}).encode() + b"\n"


def tasks_question(query: Query, limit: int) -> bytes:
    """Return a line that asks the process for at most ``limit`` tasks."""
    return dumps({"tasks": asdict(query), "limit": limit}).encode() + b"\n"


def answer_of(line: bytes) -> Answer:
    """Parse an answer of the process. Raise ValueError if the line is not valid JSON."""
    answer = loads(line)
    return Answer(answer["found"], answer["complete"])


def _answer(folder: Path, question: dict[str, Any]) -> Answer:
    if "story" in question:
        return story(folder, question["story"], question["begun_ms"])
    return find_tasks(folder, Query(**question["tasks"]), question["limit"])


def lookup_command(folder: str) -> list[str]:
    """Return the command that starts the process."""
    return [sys.executable, "-m", "tickwheel.history.read", folder]


def serve(folder: Path, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer all questions."""
    for line in questions:
        matches, is_whole = _answer(folder, loads(line))
        answers.write(dumps({"found": matches, "complete": is_whole}).encode() + b"\n")
        answers.flush()


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        # The signals are meant for the daemon; when it ends, this process ends too.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(BrokenPipeError):
        serve(Path(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
    return 0


# --- all events in order --------------------------------------------------------------------------
# Events come from any number of folders, for example one for each daemon of a failover pair: first
# from segments, then from spools that no writer has processed, rendered as a writer would. A
# segment is opened when its first number is reached, so few are open at a time. Spool files are
# opened at the beginning, because a concurrent writer can remove them. Missing numbers are counted.


@dataclass(slots=True)
class Replayed:
    """The findings of a replay, which are part of a restore's report."""

    events: int = 0
    first_event_ms: int | None = None
    last_event_ms: int | None = None
    missing_events: int = 0
    """Number of missing event numbers."""
    dropped_events: int = 0
    """Number of events that the daemon has reported as dropped."""
    spool_events: int = 0
    """Number of events read from spools that no writer had processed."""
    lost_bytes: int = 0
    """Torn or damaged bytes of spools."""
    drops: int = 0
    """Number of gaps in which an unknown number of events is missing."""
    crashes: int = 0
    """Number of starts after a crash since the backup. Each crash may have lost the batch that was
    being appended."""
    clean_stop: bool = False
    """Whether the newest event is a clean stop of the daemon, so that nothing has changed since."""


@dataclass(slots=True)
class ReplayFindings(Replayed):
    """The findings of a replay in progress."""

    spool_ms: int | None = None
    """Time of the last append to a spool, from its file."""
    tally: Tally = field(default_factory=Tally)


STEP_BACK_MS = 60_000
"""An event that is older than its predecessor by more than these milliseconds shows that the clock
was set back, even if no event says so."""
HEAD_LINES = 200
SPOOLED_AT_ONCE = 500
"""Events that are taken from a spool at once."""


class Start(NamedTuple):
    """The position of a backup in the history."""

    epoch: int
    since_ms: int
    """The backup contains all earlier events of epochs up to ``epoch``, unless the clock was set
    back when it had reached this time."""
    id_mark: int
    """Events of tasks with higher ids are newer than the backup, regardless of their time."""

    def is_backed_up(self, event: Event) -> bool:
        """Return whether the backup certainly contains this event of an epoch up to ``epoch``."""
        time_ms: int = event["time_ms"]
        if event.get("event") == CLOCK_SET_BACK:
            time_ms = event.get("details", {}).get("position_ms", self.since_ms)
        return time_ms < self.since_ms and (task_id(event) or 0) <= self.id_mark


class Replay:
    """One pass over all events, or over all events since a backup. In the backup's epoch, the first
    file read is the last one that begins before the backup. Its events from before the backup are
    read only to detect missing events. In earlier epochs, files of earlier hours are skipped."""

    def __init__(
        self,
        folders: Sequence[Path],
        shard: int,
        start: Start | None = None,
        backup_ms: int = 0,
        needles: Sequence[bytes] = (),
    ) -> None:
        """``needles``: read only lines of segments that contain one of these. The count of missing
        events is then wrong."""
        self._needles = needles
        self._folders = folders
        self._shard = shard
        self._start = start
        self._backup_ms = backup_ms
        self._reaches_back = False
        self._passed_backup = start is None
        self._newest_ms = 0
        """Time of the newest event of the epoch that was compared with the backup."""
        self._ends: dict[int, int] = {}
        """Epoch → the number of its last event in a segment, if known."""
        self._last_position = (0, 0)
        """Epoch and number of the last event read."""
        self.findings = ReplayFindings()

    @property
    def reaches_back(self) -> bool:
        """Whether the history begins before the backup ended; valid after ``events``."""
        return self._start is None or self._reaches_back

    def precedes_backup(self, event: Event) -> bool:
        """Return whether the event is older than the backup. Call this for the events in their
        order: after the first that is newer all are, although a clock that was set back may have
        given them earlier times."""
        start = self._start
        if not self._passed_backup and start is not None:
            is_later = event.get("epoch", 0) > start.epoch or event["time_ms"] >= self._backup_ms
            self._passed_backup = is_later or self._is_set_back(event, start)
        return not self._passed_backup

    def _is_set_back(self, event: Event, start: Start) -> bool:
        """Return whether the event shows that the clock was set back, perhaps after the backup.
        Call this for the events of an epoch in their order."""
        is_earlier = event["time_ms"] < self._newest_ms - STEP_BACK_MS
        self._newest_ms = max(self._newest_ms, event["time_ms"])
        is_noted = event.get("event") == CLOCK_SET_BACK and not start.is_backed_up(event)
        return is_earlier or is_noted

    def expected(self) -> int | None:
        """Return the expected total number of events, or None if it is unknown."""
        epoch, seq = self._last_position
        if epoch not in self._ends:
            return None
        later = sum(end for other, end in self._ends.items() if other > epoch)
        return self.findings.events + max(0, self._ends[epoch] - seq) + later

    def events(self) -> Iterator[Event]:
        """Yield every event once, by epoch and number."""
        return chain.from_iterable(self.blocks())

    def blocks(self) -> Iterator[list[Event]]:
        """Yield the events as ``events`` does, many at once. A list is of one epoch."""
        with ExitStack() as stack:
            # Open spools before segments, so that no event that a writer moves is missed.
            spools = [Spools(folder, self._shard, stack) for folder in self._folders]
            yield from self._blocks(spools)

    def _blocks(self, opened: list[Spools]) -> Iterator[list[Event]]:
        start = self._start
        by_epoch: dict[int, list[Segment]] = {}
        for folder in self._folders:
            for segment in segments.find(folder, shard=self._shard):
                if self._counts(segment):
                    by_epoch.setdefault(segment.name.epoch, []).append(segment)
        spools: dict[int, list[Iterator[Event]]] = {}
        for of_folder in opened:
            if of_folder.written_ms is not None:
                self.findings.spool_ms = max(self.findings.spool_ms or 0, of_folder.written_ms)
            for epoch, spooled in of_folder.by_epoch(self.findings).items():
                spools.setdefault(epoch, []).append(spooled)
            for epoch, end in of_folder.last_seqs().items():
                self._ends[epoch] = max(end, self._ends.get(epoch, 0))
        for epoch in sorted(by_epoch.keys() | spools.keys()):
            blocks = self._counted(
                epoch, self._epoch(epoch, by_epoch.get(epoch, []), spools.get(epoch, []))
            )
            if start is not None and epoch <= start.epoch:
                blocks = self._skip_backed_up(start, epoch, blocks)
            for block in blocks:
                self._note_events(block)
                yield block

    def _counts(self, segment: Segment) -> bool:
        """Return whether, judging by its name, a segment may contain events that the backup lacks.
        A segment of an earlier epoch may if the store was set back, but not in earlier hours."""
        start = self._start
        if start is None or segment.name.epoch >= start.epoch:
            return True
        return segment.hour_ms + HOUR_MS > start.since_ms

    def _counted(self, epoch: int, blocks: Iterator[list[Event]]) -> Iterator[list[Event]]:
        """Yield each event of an epoch once, and count missing numbers."""
        start = self._start
        is_cut = epoch <= start.epoch if start is not None else self._last_position == (0, 0)
        last = None if is_cut else 0
        for block in blocks:
            seqs = [event["seq"] for event in block]
            if last is None:
                last = seqs[0] - 1
            if seqs[0] <= last or not _are_rising(seqs):
                block = _without_repeated(block, last)
                seqs = [event["seq"] for event in block]
            if block:
                self.findings.missing_events += seqs[-1] - last - len(seqs)
                last = seqs[-1]
                self._last_position = epoch, last
                yield block
        if last is not None and (start is None or epoch >= start.epoch):
            self.findings.missing_events += max(0, self._ends.get(epoch, 0) - last)

    def _skip_backed_up(
        self, start: Start, epoch: int, blocks: Iterator[list[Event]]
    ) -> Iterator[list[Event]]:
        """Yield the events that the backup may lack, of an epoch up to the backup's."""
        self._newest_ms = 0
        for block in blocks:
            for index, event in enumerate(block):
                is_first = event["seq"] == 1 and event.get("event") == "started"
                is_set_back = self._is_set_back(event, start)
                if epoch == start.epoch:
                    is_old = not is_set_back and event["time_ms"] <= self._backup_ms
                    self._reaches_back |= is_first or is_old
                if is_set_back or not start.is_backed_up(event):
                    self._note_times(block[:index])
                    yield block[index:]
                    yield from blocks
                    return
            self._note_times(block)

    def _note_times(self, block: list[Event]) -> None:
        if not block:
            return
        findings, last = self.findings, block[-1]
        times_ms = [event["time_ms"] for event in block]
        first_ms, last_ms = findings.first_event_ms, findings.last_event_ms
        findings.first_event_ms = min(times_ms if first_ms is None else [first_ms, *times_ms])
        findings.last_event_ms = max(times_ms if last_ms is None else [last_ms, *times_ms])
        findings.clean_stop = last.get("event") == "stopped" and last.get("clean") is True

    def _note_events(self, block: list[Event]) -> None:
        findings, backup_epoch = self.findings, self._start.epoch if self._start is not None else -1
        findings.events += len(block)
        self._note_times(block)
        for event in block:
            kind = event.get("event")
            if kind == "started" and (
                event.get("epoch", 0) > backup_epoch or event["time_ms"] > self._backup_ms
            ):
                findings.crashes += event.get("clean") is False
            elif kind == "dropped":
                findings.drops += 1
                count = event.get("count")
                findings.dropped_events += count if type(count) is int else 0

    # --- one epoch -----------------------------------------------------------------------------

    def _epoch(
        self, epoch: int, files: list[Segment], spooled: list[Iterator[Event]]
    ) -> Iterator[list[Event]]:
        """Yield the events of one epoch by number, merging its files."""
        heads: list[_Head] = []
        start = self._start if self._start is not None and epoch <= self._start.epoch else None
        for index, segment in enumerate(files):
            tally = Tally()
            first = next(chain.from_iterable(self._numbered(segment, tally)), None)
            if first is not None:
                heads.append(_Head(first["seq"], index, segment, first))
            elif start is None or segment.hour_ms + HOUR_MS > start.since_ms:
                self.findings.tally.unreadable += tally.unreadable
        heads.sort(key=lambda head: head[:2])
        if start is not None:
            heads = _from_start(heads, start)
        entries = [head[:3] for head in reversed(heads)]
        heap: list[tuple[int, int, list[Event], Iterator[list[Event]]]] = []

        def push(index: int, blocks: Iterator[list[Event]]) -> None:
            block = next(blocks, None)
            if block is not None:
                heapq.heappush(heap, (block[0]["seq"], index, block, blocks))

        for number, events in enumerate(spooled, len(files)):
            push(number, _in_blocks(events))
        while entries or heap:
            if entries and (not heap or entries[-1][0] <= heap[0][0]):
                _, index, segment = entries.pop()
                push(index, self._numbered(segment, self.findings.tally, self._needles))
                continue
            _, index, block, blocks = heapq.heappop(heap)
            # Events up to this number precede those of all other files.
            others = [entry[0] for entry in entries[-1:]] + [head[0] for head in heap[:1]]
            if others and block[-1]["seq"] > min(others):
                size = max(1, bisect_right(block, min(others), key=itemgetter("seq")))
                blocks = chain([block[size:]], blocks)
                block = block[:size]
            yield block
            push(index, blocks)

    def _numbered(
        self, segment: Segment, tally: Tally, needles: Sequence[bytes] = ()
    ) -> Iterator[list[Event]]:
        """Yield the events of a segment, those of a list with rising numbers."""
        for block in segments.event_blocks(segment.path, tally, needles):
            numbered = [event for event in block if type(event.get("seq")) is int]
            tally.torn += len(block) - len(numbered)
            if _are_rising([event["seq"] for event in numbered]):
                if numbered:
                    yield numbered
            else:
                yield from ([event] for event in numbered)


def _are_rising(seqs: list[int]) -> bool:
    return all(map(lt, seqs, seqs[1:]))


def _without_repeated(block: list[Event], last: int) -> list[Event]:
    """Return the events whose numbers exceed ``last`` and those of all events before them."""
    kept = []
    for event in block:
        if event["seq"] > last:
            kept.append(event)
            last = event["seq"]
    return kept


def _in_blocks(events: Iterator[Event]) -> Iterator[list[Event]]:
    while block := list(islice(events, SPOOLED_AT_ONCE)):
        yield block


class _Head(NamedTuple):
    """A segment with its first event."""

    seq: int
    position: int
    segment: Segment
    first: Event


def _from_start(heads: list[_Head], start: Start) -> list[_Head]:
    """Return the segments of an epoch, ordered by first number, that may contain events which a
    backup lacks, and the segment before them. A segment is full when the next segment of its hour
    begins."""
    begin: _Head | None = None
    newest_ms = 0
    for head in heads:
        time_ms = head.first["time_ms"]
        if time_ms < newest_ms - STEP_BACK_MS or not start.is_backed_up(head.first):
            break
        if _newest_id(head.segment) > start.id_mark:
            break
        begin, newest_ms = head, max(newest_ms, time_ms)
    if begin is None:
        return heads
    # Events can still be added to an hour that has just ended.
    hour_ms, began_ms = begin.segment.hour_ms, begin.first["time_ms"]
    late = [
        head
        for head in heads
        if head.seq < begin.seq
        and head.segment.hour_ms != hour_ms
        and head.segment.hour_ms + HOUR_MS + 2 * LATE_MS > began_ms
    ]
    return [head for head in heads if head.seq >= begin.seq or head in late]


def _newest_id(segment: Segment) -> int:
    """Return the highest task id in the first lines of a segment."""
    lines = islice(segments.raw_lines(segment.path, Tally()), HEAD_LINES)
    matches = (_TASK_ID.search(line) for line in lines)
    return max((int(match[1]) for match in matches if match is not None), default=0)


# --- spools ----------------------------------------------------------------------------------


class Spools:
    """The spools of a shard in one history, kept open by ``stack``."""

    def __init__(self, history_dir: Path, shard: int, stack: ExitStack) -> None:
        self._history_dir = history_dir
        self._shard = shard
        self._files: dict[Path, list[tuple[SpoolName, int]]] = {}
        self._positions: dict[Path, Position | None] = {}
        self.written_ms: int | None = None
        """Time of the last append, from the files."""
        for folder in segments.state_folders(history_dir, shard):
            opened = self._files[folder] = []
            for name in spool.files(folder):
                with contextlib.suppress(FileNotFoundError):
                    fd = stack.enter_context((folder / str(name)).open("rb")).fileno()
                    opened.append((name, fd))
                    written_ms = os.fstat(fd).st_mtime_ns // 1_000_000
                    self.written_ms = max(self.written_ms or 0, written_ms)
            # Read the position after opening the files, so that segments have all earlier events.
            self._positions[folder] = load_position(folder)

    def last_seqs(self) -> dict[int, int]:
        """Return epoch → the number of its last event in a segment."""
        saved = [position for position in self._positions.values() if position is not None]
        return {epoch: place.seq for position in saved for epoch, place in position.epochs.items()}

    def by_epoch(self, findings: ReplayFindings) -> dict[int, Iterator[Event]]:
        """Return epoch → its events. ``findings`` counts the events while they are read."""
        epochs: dict[int, Iterator[Event]] = {}
        for folder, opened in self._files.items():
            for epoch in sorted({name.epoch for name, _ in opened}):
                files = [(name.number, fd) for name, fd in opened if name.epoch == epoch]
                epochs[epoch] = self._events(folder, epoch, files, findings)
        return epochs

    def _events(
        self, folder: Path, epoch: int, files: list[tuple[int, int]], findings: ReplayFindings
    ) -> Iterator[Event]:
        position = self._positions[folder]
        if position is not None:
            progress = position.epoch_position(epoch)
        else:
            progress = EpochPosition(
                seq=segments.last_seqs(self._history_dir, self._shard, {epoch})[epoch]
            )
        node = folder.name.removesuffix(f"-s{self._shard}")
        renderer, seq = Renderer(node, self._shard, epoch), progress.seq
        for number, fd in files:
            if number < progress.file:
                continue
            offset = progress.offset if number == progress.file else 0
            for record in _records(fd, offset, findings):
                try:
                    lines = renderer.render(record, seq + 1)
                except MALFORMED:
                    findings.drops += 1
                    continue
                seq += len(lines)
                findings.spool_events += len(lines)
                yield from map(segments.decode_json, lines)


def _records(fd: int, offset: int, findings: ReplayFindings) -> Iterator[list[object]]:
    while True:
        chunk = spool.read_open(fd, offset)
        for _, records in chunk.arrays:
            yield from records
        if not chunk.arrays:
            findings.lost_bytes += os.fstat(fd).st_size - chunk.offset
            return
        offset = chunk.offset


if __name__ == "__main__":
    sys.exit(main())
