"""Questions to the history: by id, key, topic, group, event and time; newest or oldest first. Last,
all events of one shard in the order in which they were written: by epoch, then by number.

In bounded memory: one hour is looked at at a time, its segments side by side. Most lines are
passed over by their bytes alone and never parsed. A key stands in ``enqueued`` events only, so a
search by key first looks for the ids that have it.

A daemon asks two things: the story of one task, and tasks by key, topic and time, finished ones
too. The answers are bounded in events or tasks, in bytes and in time. To look through an hour of
history is work for a processor, and a thread of the daemon would take that from the event loop. So
``python -m tickwheel.history.read`` does it: it reads a question a line from its standard input and
writes an answer a line to its standard output, one at a time, at a low priority, and ends when its
standard input does: with the daemon, however that ends.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import json
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from json import dumps, loads
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from tickwheel.api.tasks import kept_options
from tickwheel.errors import LimitExceeded
from tickwheel.history import segments, spool
from tickwheel.history.lines import ENDINGS, MALFORMED, NAMES, Renderer
from tickwheel.history.segments import HOUR_MS, Event, Segment, Tally, hour_of
from tickwheel.history.spool import SpoolName
from tickwheel.history.writer import LATE_MS, Place, Position, load_position

KEY_IDS_MAX = 100_000
"""Tasks that one key may have; more need a narrower question."""
NEWEST_MAX = 1_000_000
ENQUEUED = frozenset(("enqueued",))
_TASK_ID = re.compile(rb'"task_id"\s*:\s*"(\d+)"')


@dataclass(frozen=True, slots=True)
class Query:
    """What events must have; None: anything. Times are from ``since_ms`` to before ``until_ms``."""

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
        """Whether the event is wanted; its key is not looked at: see ``by_ids``."""
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
        """Whether a line can be wanted, by its bytes. Passes too much rather than too little."""
        # Of all events only these have the key.
        names = [value for _, value in self._named()]
        names += [self.key] if self.events == ENQUEUED and self.key is not None else []
        needles = [spellings(name) for name in names]
        if self.events is not None:
            needles.append([needle for name in self.events for needle in spellings(name)])
        ids = None if self.ids is None else frozenset(str(i).encode() for i in self.ids)

        def may(line: bytes) -> bool:
            if ids is not None:
                found = _TASK_ID.search(line)
                if found is None or found[1] not in ids:
                    return False
            return all(any(needle in line for needle in some) for some in needles)

        return may


def task_id(event: Event) -> int | None:
    """The id of the event's task; None: the event is not one of a task."""
    text = event.get("task_id")
    return int(text) if isinstance(text, str) and text.isdecimal() else None


def search(history_dir: Path, query: Query, tally: Tally) -> Iterator[Event]:
    """All wanted events, oldest first. Raises LimitExceeded for a key that too many have."""
    query = by_ids(history_dir, query, tally)
    for _, hour in hours(history_dir, query):
        yield from merged(hour, query, tally)


def newest(history_dir: Path, query: Query, limit: int, tally: Tally) -> Iterator[Event]:
    """The newest ``limit`` wanted events, newest first. Raises LimitExceeded."""
    if limit > NEWEST_MAX:
        raise LimitExceeded(f"the newest {limit} events; the limit is {NEWEST_MAX}")
    query = by_ids(history_dir, query, tally)
    left = limit
    for _, hour in reversed(hours(history_dir, query)):
        if left <= 0:
            return
        found = deque(merged(hour, query, tally), maxlen=left)
        left -= len(found)
        yield from reversed(found)


def by_ids(history_dir: Path, query: Query, tally: Tally) -> Query:
    """The question with the ids of the key's tasks, in place of the key."""
    if query.key is None:
        return query
    enqueued = Query(query.ids, query.key, query.topic, events=ENQUEUED, until_ms=query.until_ms)
    found: set[int] = set()
    for one in _with_key(segments.find(history_dir, until_ms=query.until_ms), enqueued, tally):
        found.add(one)
        if len(found) > KEY_IDS_MAX:
            raise LimitExceeded(
                f"more than {KEY_IDS_MAX} tasks have the key {query.key!r:.60};"
                " name a topic, or an earlier end of the time"
            )
    return replace(query, key=None, ids=frozenset(found))


def newest_id(history_dir: Path, query: Query, tally: Tally) -> int | None:
    """The newest task that was enqueued with ``query.key``, in its topic and time. The newest
    hours are looked at first, and no more than needed."""
    enqueued = replace(query, events=ENQUEUED)
    for _, hour in reversed(hours(history_dir, query)):
        newest_of_hour = max(_with_key(hour, enqueued, tally), default=None)
        if newest_of_hour is not None:
            return newest_of_hour
    return None


def _with_key(found: Iterable[Segment], enqueued: Query, tally: Tally) -> Iterator[int]:
    """The ids of tasks that were enqueued with the key of the question."""
    assert enqueued.key is not None
    needles = spellings(enqueued.key)
    for segment in found:
        for event in segments.events(segment.path, tally, needles):
            one = task_id(event)
            if event.get("key") == enqueued.key and enqueued.wants(event) and one is not None:
                yield one


def flow(history_dir: Path, wanted: int, since_ms: int, tally: Tally) -> list[Event]:
    """The events of one task in their order. ``since_ms``: when it was enqueued, as its id says."""
    return sorted(_since_enqueue(history_dir, wanted, since_ms, tally), key=written)


def written(event: Event) -> tuple[int, int, int]:
    """A key by which a task's events sort in their order."""
    epoch, seq = event.get("epoch"), event.get("seq")
    if type(epoch) is int and type(seq) is int:
        return epoch, seq, 0
    return 0, 0, int(event["time_ms"])


# --- an hour's segments side by side -----------------------------------------------------------


def hours(history_dir: Path, query: Query) -> list[tuple[int, list[Segment]]]:
    """The hours that the question is about, oldest first, with their segments."""
    if query.ids is not None and not query.ids:
        return []
    found = segments.find(history_dir, query.since_ms, query.until_ms)
    return [(hour, list(some)) for hour, some in groupby(found, lambda s: s.hour_ms)]


def merged(hour: list[Segment], query: Query, tally: Tally) -> Iterator[Event]:
    """The wanted events of an hour, by time."""
    # Segments of one writing daemon and epoch together, in the order of their numbers.
    ordered = groupby(sorted(hour, key=lambda s: s.name), lambda s: s.name[:3])
    chains = [_chain(list(some), query, tally) for _, some in ordered]
    return chains[0] if len(chains) == 1 else heapq.merge(*chains, key=_order)


def _chain(chain: list[Segment], query: Query, tally: Tally) -> Iterator[Event]:
    """The wanted events of one daemon's segments of one hour; none twice."""
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
    """The ways in which a text may stand in a line: escaped as here, or as by others."""
    kinds = {dumps(text), dumps(text, ensure_ascii=False)}
    return [kind.encode("utf-8", "surrogatepass") for kind in kinds]


# --- as it comes -------------------------------------------------------------------------------


class Follow:
    """Wanted events as they are written; ``read`` gives what is new since its last call."""

    def __init__(self, history_dir: Path, query: Query, since_ms: int, tally: Tally) -> None:
        self._dir = history_dir
        self._key = query.key
        self._query = replace(by_ids(history_dir, query, tally), since_ms=since_ms)
        if self._key is not None:
            self._ids = set(self._query.ids or ())
            self._query = replace(self._query, ids=self._ids)
        self._start_ms = hour_of(since_ms)
        self._tally = tally
        self._offsets: dict[Path, int] = {}
        self._done: set[Path] = set()
        self._last: dict[tuple[int, str, int, int], int] = {}

    def read(self) -> list[Event]:
        """The new events, oldest first."""
        found: list[Event] = []
        for segment in segments.find(self._dir, self._start_ms):
            if segment.path in self._done:
                continue
            lines = self._sealed(segment) if segment.name.sealed else self._grown(segment)
            chain = segment.hour_ms, *segment.name[:3]
            for line in lines:
                self._tally.lines += 1
                event = segments.parse_line(line, self._tally)
                if event is None or self._is_known(chain, event):
                    continue
                one = task_id(event)
                if one is not None and event.get("event") == "enqueued":
                    if self._key is not None and event.get("key") == self._key:
                        self._ids.add(one)
                if self._query.wants(event):
                    found.append(event)
        return sorted(found, key=_order)

    def _sealed(self, segment: Segment) -> Iterator[bytes]:
        self._done.add(segment.path)
        self._offsets.pop(segment.path.with_suffix(""), None)
        return segments.raw_lines(segment.path, self._tally)

    def _grown(self, segment: Segment) -> Iterator[bytes]:
        try:
            with segment.path.open("rb") as file:
                file.seek(self._offsets.get(segment.path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    self._offsets[segment.path] = self._offsets.get(segment.path, 0) + len(line)
                    yield line
        except FileNotFoundError:
            # Sealed meanwhile. Not left for the next time: the segment behind it is read in this
            # one, and what has lower numbers would be taken for known then.
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


class Answer(NamedTuple):
    """Events of a task, or outlines of tasks, and whether these are all."""

    found: list[Event]
    is_whole: bool


def _bounded(each: Iterator[Event], limit: int) -> Answer:
    """At most ``limit`` of these, and ``BYTES_MAX`` bytes as JSON, as far as time allows."""
    found: list[Event] = []
    left = BYTES_MAX
    with contextlib.suppress(LimitExceeded):
        for one in each:
            left -= len(dumps(one))
            if left < 0 or len(found) == limit:
                return Answer(found, is_whole=False)
            found.append(one)
        return Answer(found, is_whole=True)
    return Answer(found, is_whole=False)


def story(folder: Path, task_id: int, begun_ms: int) -> Answer:
    """The events of a task in their order; ``begun_ms``: when it was enqueued, as its id says."""
    found, is_whole = _bounded(_since_enqueue(folder, task_id, begun_ms, Hurried()), EVENTS_MAX)
    return Answer(sorted(found, key=written), is_whole)


def _since_enqueue(folder: Path, task_id: int, begun_ms: int, tally: Tally) -> Iterator[Event]:
    """The task's events since its enqueue; where there are none, everything is looked through."""
    is_found = False
    for since_ms in (begun_ms - HOUR_MS, None):
        for event in search(folder, Query(ids=frozenset((task_id,)), since_ms=since_ms), tally):
            is_found = True
            yield event
        if is_found:
            return


# --- tasks, and what became of them --------------------------------------------------------------


TASKS_MAX: Final = 1_000
"""Tasks in one answer to a daemon."""
KEPT_MAX: Final = 100_000
"""Enqueues of an hour that are remembered while it is looked through."""
PART: Final = 256
"""Tasks whose events are looked for at once."""
_ENDS: Final = ("acked", *ENDINGS)
_WHAT: Final = (
    ("topic", "topic"), ("schedule", "schedule"),
    *((one.name, NAMES.get(one.name, one.name)) for one, said in kept_options() if said.is_listed),
)  # fmt: skip
"""What an outline says of a task, and the field of an event that says it."""
UNFINISHED: Final = "unfinished"


def search_tasks(history_dir: Path, wanted: Query, tally: Tally) -> Iterator[dict[str, Any]]:
    """Outlines of the tasks that were enqueued as ``wanted`` says, the newest first, as they are
    found."""
    query = replace(wanted, events=ENQUEUED)
    for hour_ms, hour in reversed(hours(history_dir, query)):
        ids = deque(_enqueued(hour, query, tally), maxlen=KEPT_MAX)
        newest_first = reversed(dict.fromkeys(ids))
        while some := list(islice(newest_first, PART)):
            yield from _outlines(history_dir, hour_ms, some, tally)


def _enqueued(hour: list[Segment], query: Query, tally: Tally) -> Iterator[int]:
    for event in merged(hour, query, tally):
        one = task_id(event)
        if one is not None and query.key in (None, event.get("key")):
            yield one


def _outlines(
    history_dir: Path, since_ms: int, ids: Sequence[int], tally: Tally
) -> Iterator[dict[str, Any]]:
    stories: dict[int, list[Event]] = {one: [] for one in ids}
    query = Query(ids=stories.keys(), since_ms=since_ms)
    for event in search(history_dir, query, tally):
        stories[int(event["task_id"])].append(event)
    for task_id, events in stories.items():
        yield outline(task_id, events)


def outline(task_id: int, events: Sequence[Event]) -> dict[str, Any]:
    """What a task was, and what became of it, by its events in their order: all that is known of
    ``topic``, ``key``, its other options and its body; ``state`` is its end, "dead", or
    "unfinished"; ``ended_ms`` when that was."""
    found: dict[str, Any] = {"id": str(task_id), "state": UNFINISHED, "ended_ms": None}
    found |= {"enqueued_ms": None, "due_ms": None, "attempts": 0}
    dead: dict[str, str] = {}
    for event in events:
        name, group = str(event["event"]), str(event.get("group", ""))
        if name in ("enqueued", "replaced"):
            _take_over(found, event)
        elif name == "rescheduled":
            found["due_ms"] = event.get("due_ms")
        elif name == "delivered":
            found["attempts"] = max(found["attempts"], int(event.get("attempt", 0)))
        elif name == "dead":
            dead[group] = str(event.get("reason", ""))
        elif name == "requeued":
            dead.pop(group, None)
            if "ttl_ms" in event:
                found["ttl_ms"] = event["ttl_ms"]
        if name in _ENDS and (not group or event.get("ended")):
            found |= {"state": name, "ended_ms": event["time_ms"]}
    if found["state"] == UNFINISHED and dead:
        found |= {"state": "dead", "reason": next(reversed(dead.values()))}
    return found


def _take_over(found: dict[str, Any], event: Event) -> None:
    found |= {name: event[field] for name, field in _WHAT if field in event}
    found["due_ms"] = event.get("due_ms")
    if event["event"] == "enqueued":
        found["enqueued_ms"] = event["time_ms"]
    if "body" in event:
        found.pop("body", None)
        found.pop("body_base64", None)
        body = base64.b64decode(event["body"])
        try:
            found["body"] = body.decode()
        except UnicodeDecodeError:
            found["body_base64"] = event["body"]


def find_tasks(folder: Path, wanted: Query, limit: int) -> Answer:
    """Outlines of at most ``limit`` tasks."""
    return _bounded(search_tasks(folder, wanted, Hurried()), limit)


# --- the process that answers a daemon -----------------------------------------------------------


NICENESS: Final = 10
ANSWER_BYTES_MAX: Final = 2 * BYTES_MAX
"""Bytes of an answer's line: its events have ``BYTES_MAX``, and names and quotes as many."""


def story_question(task_id: int, begun_ms: int) -> bytes:
    """The question for the story of a task, as a line for the process. ``begun_ms``: when it was
    enqueued, as far as is known."""
    return dumps({"story": task_id, "begun_ms": begun_ms}).encode() + b"\n"


def tasks_question(wanted: Query, limit: int) -> bytes:
    """The question for at most ``limit`` tasks, as a line for the process."""
    return dumps({"tasks": asdict(wanted), "limit": limit}).encode() + b"\n"


def answer_of(line: bytes) -> Answer:
    """The answer in a line of the process. Raises ValueError when it is none."""
    said = loads(line)
    return Answer(said["found"], said["complete"])


def _answer(folder: Path, asked: dict[str, Any]) -> Answer:
    if "story" in asked:
        return story(folder, asked["story"], asked["begun_ms"])
    return find_tasks(folder, Query(**asked["tasks"]), asked["limit"])


def lookup_command(folder: str) -> list[str]:
    """The command that starts the process."""
    return [sys.executable, "-m", "tickwheel.history.read", folder]


def serve(folder: Path, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer questions until there are no more."""
    for line in questions:
        found, is_whole = _answer(folder, loads(line))
        answers.write(dumps({"found": found, "complete": is_whole}).encode() + b"\n")
        answers.flush()


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        # They are meant for the daemon, whose end ends this process.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(BrokenPipeError):
        serve(Path(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
    return 0


# --- all events in order --------------------------------------------------------------------------
# They come from any number of folders, as the daemons of a failover pair may each have their own:
# segments first, then what lies in spools that no writer has taken up, as the events that a writer
# would make of it. A segment is opened when its first number is reached, so few are open at a time.
# Spool files are held open from the beginning: a writer that works at the same time may remove
# them. The numbers show what is missing, and it is counted.


@dataclass(slots=True)
class Replayed:
    """What a replay finds, and a restore's report says."""

    events: int = 0
    first_event_ms: int | None = None
    last_event_ms: int | None = None
    missing_events: int = 0
    """Numbers of events that are in no file."""
    dropped_events: int = 0
    """Events that the daemon says it could not keep."""
    spool_events: int = 0
    """Events read from a spool, because no writer had turned them into files."""
    lost_bytes: int = 0
    """Bytes of spools that are torn or damaged."""
    drops: int = 0
    """How often an unknown number of events is missing."""
    crashes: int = 0
    """Starts since the backup that found the store not closed in order; each crash may have lost
    the batch that was being appended."""
    clean_stop: bool = False
    """Whether the newest event is a daemon's clean stop, after which nothing can have happened."""


@dataclass(slots=True)
class Seen(Replayed):
    """What the replay has found so far."""

    spool_ms: int | None = None
    """When something was appended to a spool last, by its file."""
    tally: Tally = field(default_factory=Tally)


STEP_BACK_MS = 60_000
"""An event that is older than one before it by more: its daemon's clock was set back."""
HEAD_LINES = 200


class Start(NamedTuple):
    """The place in the history at which a backup was made, as far as the backup knows it."""

    epoch: int
    since_ms: int
    """What is older, up to that epoch, had happened when the backup was made."""
    id_mark: int
    """An event of a later id came after the backup, whatever the clock said."""

    def is_behind(self, event: Event) -> bool:
        """Whether the backup certainly has what this event, up to its epoch, says."""
        return event["time_ms"] < self.since_ms and (task_id(event) or 0) <= self.id_mark


class Replay:
    """One pass over all events since a backup, or over all that there are.

    Files of the backup's epoch are passed over up to the last one that begins before the backup;
    in that one events are read, to see that none is missing from there on, and not given. Of
    earlier epochs the files of former hours are not opened.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        shard: int,
        start: Start | None = None,
        backup_ms: int = 0,
        needles: Sequence[bytes] = (),
    ) -> None:
        """``needles``: only lines of segments that hold one of these are looked at. What is missing
        is counted wrongly then."""
        self._needles = needles
        self._folders = folders
        self._shard = shard
        self._start = start
        self._backup_ms = backup_ms
        self._reaches_back = False
        self._ends: dict[int, int] = {}
        """Epoch → the number of its last event in a segment, where that is known."""
        self._at = (0, 0)
        """Epoch and number of the event that was read last."""
        self.seen = Seen()

    @property
    def reaches_back(self) -> bool:
        """Whether the history goes on where the backup ends; known after the events."""
        return self._start is None or self._reaches_back

    def expected(self) -> int | None:
        """How many events there will have been at the end; None: that is not known."""
        epoch, seq = self._at
        if epoch not in self._ends:
            return None
        later = sum(end for other, end in self._ends.items() if other > epoch)
        return self.seen.events + max(0, self._ends[epoch] - seq) + later

    def events(self) -> Iterator[Event]:
        """Every event once, in the order of epochs and numbers."""
        with ExitStack() as stack:
            # Before the segments: what a writer takes from a spool meanwhile is in both then.
            spools = [Spools(folder, self._shard, stack) for folder in self._folders]
            yield from self._events(spools)

    def _events(self, opened: list[Spools]) -> Iterator[Event]:
        start = self._start
        by_epoch: dict[int, list[Segment]] = {}
        for folder in self._folders:
            for segment in segments.find(folder, shard=self._shard):
                if self._counts(segment):
                    by_epoch.setdefault(segment.name.epoch, []).append(segment)
        spools: dict[int, list[Iterator[Event]]] = {}
        for one in opened:
            if one.written_ms is not None:
                self.seen.spool_ms = max(self.seen.spool_ms or 0, one.written_ms)
            for epoch, spooled in one.by_epoch(self.seen).items():
                spools.setdefault(epoch, []).append(spooled)
            for epoch, end in one.ends().items():
                self._ends[epoch] = max(end, self._ends.get(epoch, 0))
        for epoch in sorted(by_epoch.keys() | spools.keys()):
            events = self._counted(
                epoch, self._epoch(epoch, by_epoch.get(epoch, []), spools.get(epoch, []))
            )
            if start is not None and epoch <= start.epoch:
                events = self._after(start, epoch, events)
            for event in events:
                self._look(event)
                yield event

    def _counts(self, segment: Segment) -> bool:
        """Whether a segment may hold what the backup lacks, as far as its name says. One of an
        epoch before the backup's may where the store was set back, if it is not of an hour before.
        """
        start = self._start
        if start is None or segment.name.epoch >= start.epoch:
            return True
        return segment.hour_ms + HOUR_MS > start.since_ms

    def _counted(self, epoch: int, events: Iterator[Event]) -> Iterator[Event]:
        """The events of an epoch, none twice; numbers that are missing are counted."""
        start = self._start
        is_cut = epoch <= start.epoch if start is not None else self._at == (0, 0)
        last = None if is_cut else 0
        for event in events:
            seq = event["seq"]
            if last is not None:
                if seq <= last:
                    continue
                self.seen.missing_events += seq - last - 1
            last = seq
            self._at = epoch, seq
            yield event

    def _after(self, start: Start, epoch: int, events: Iterator[Event]) -> Iterator[Event]:
        """The events of the backup's epoch, or of one before, that it may lack."""
        newest_ms = 0
        for event in events:
            time_ms = event["time_ms"]
            is_first = event["seq"] == 1 and event.get("event") == "started"
            if epoch == start.epoch:
                self._reaches_back |= is_first or time_ms <= self._backup_ms
            if not start.is_behind(event) or time_ms < newest_ms - STEP_BACK_MS:
                yield event
                break
            newest_ms = max(newest_ms, time_ms)
            self._place(event)
        yield from events

    def _place(self, event: Event) -> None:
        seen = self.seen
        time_ms = event["time_ms"]
        first_ms, last_ms = seen.first_event_ms, seen.last_event_ms
        seen.first_event_ms = time_ms if first_ms is None else min(first_ms, time_ms)
        seen.last_event_ms = time_ms if last_ms is None else max(last_ms, time_ms)
        seen.clean_stop = event.get("event") == "stopped" and event.get("clean") is True

    def _look(self, event: Event) -> None:
        seen = self.seen
        time_ms = event["time_ms"]
        seen.events += 1
        self._place(event)
        if event.get("event") == "started" and time_ms > self._backup_ms:
            seen.crashes += event.get("clean") is False
        if event.get("event") == "dropped":
            seen.drops += 1
            count = event.get("count")
            seen.dropped_events += count if type(count) is int else 0

    # --- one epoch -----------------------------------------------------------------------------

    def _epoch(
        self, epoch: int, found: list[Segment], spooled: list[Iterator[Event]]
    ) -> Iterator[Event]:
        """The events of one epoch by number, from files that are read side by side."""
        heads: list[_Head] = []
        for index, segment in enumerate(found):
            first = next(self._numbered(segment, Tally()), None)
            if first is not None:
                heads.append(_Head(first["seq"], index, segment, first))
        heads.sort(key=lambda head: head[:2])
        if self._start is not None and epoch <= self._start.epoch:
            heads = _from_start(heads, self._start)
        entries = [head[:3] for head in reversed(heads)]
        heap: list[tuple[int, int, Event, Iterator[Event]]] = []

        def push(index: int, events: Iterator[Event]) -> None:
            event = next(events, None)
            if event is not None:
                heapq.heappush(heap, (event["seq"], index, event, events))

        for number, events in enumerate(spooled, len(found)):
            push(number, events)
        while entries or heap:
            if entries and (not heap or entries[-1][0] <= heap[0][0]):
                _, index, segment = entries.pop()
                push(index, self._numbered(segment, self.seen.tally, self._needles))
                continue
            _, index, event, events = heapq.heappop(heap)
            yield event
            push(index, events)

    def _numbered(
        self, segment: Segment, tally: Tally, needles: Sequence[bytes] = ()
    ) -> Iterator[Event]:
        for event in segments.events(segment.path, tally, needles):
            if type(event.get("seq")) is int:
                yield event
            else:
                tally.torn += 1


class _Head(NamedTuple):
    """A segment, and how it begins."""

    seq: int
    place: int
    segment: Segment
    first: Event


def _from_start(heads: list[_Head], start: Start) -> list[_Head]:
    """Those of an epoch's segments, by their first numbers, that may hold what a backup lacks, and
    the one before them. A segment of an hour is full when the next one of that hour begins."""
    begin: _Head | None = None
    newest_ms = 0
    for head in heads:
        time_ms = head.first["time_ms"]
        if time_ms < newest_ms - STEP_BACK_MS or not start.is_behind(head.first):
            break
        if _newest_id(head.segment) > start.id_mark:
            break
        begin, newest_ms = head, max(newest_ms, time_ms)
    if begin is None:
        return heads
    # An hour that was just over still got events.
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
    """The highest id that the first lines of a segment name."""
    lines = islice(segments.raw_lines(segment.path, Tally()), HEAD_LINES)
    found = (_TASK_ID.search(line) for line in lines)
    return max((int(one[1]) for one in found if one is not None), default=0)


# --- spools ----------------------------------------------------------------------------------


class Spools:
    """The spools of one shard in one history, which ``stack`` holds open."""

    def __init__(self, history_dir: Path, shard: int, stack: ExitStack) -> None:
        self._history_dir = history_dir
        self._shard = shard
        self._files: dict[Path, list[tuple[SpoolName, int]]] = {}
        self._positions: dict[Path, Position | None] = {}
        self.written_ms: int | None = None
        """When something was appended last, by the files."""
        for folder in segments.state_folders(history_dir, shard):
            found = self._files[folder] = []
            for name in spool.files(folder):
                with contextlib.suppress(FileNotFoundError):
                    fd = stack.enter_context((folder / str(name)).open("rb")).fileno()
                    found.append((name, fd))
                    written_ms = os.fstat(fd).st_mtime_ns // 1_000_000
                    self.written_ms = max(self.written_ms or 0, written_ms)
            # After the files: what lies before it is in segments by now.
            self._positions[folder] = load_position(folder)

    def ends(self) -> dict[int, int]:
        """Epoch → the number of its last event in a segment."""
        known = [position for position in self._positions.values() if position is not None]
        return {epoch: place.seq for position in known for epoch, place in position.epochs.items()}

    def by_epoch(self, seen: Seen) -> dict[int, Iterator[Event]]:
        """The events of each epoch; ``seen`` counts while they are read."""
        epochs: dict[int, Iterator[Event]] = {}
        for folder, found in self._files.items():
            for epoch in sorted({name.epoch for name, _ in found}):
                files = [(name.number, fd) for name, fd in found if name.epoch == epoch]
                epochs[epoch] = self._events(folder, epoch, files, seen)
        return epochs

    def _events(
        self, folder: Path, epoch: int, files: list[tuple[int, int]], seen: Seen
    ) -> Iterator[Event]:
        position = self._positions[folder]
        if position is not None:
            place = position.place(epoch)
        else:
            place = Place(seq=segments.last_seqs(self._history_dir, self._shard, {epoch})[epoch])
        node = folder.name.removesuffix(f"-s{self._shard}")
        renderer, seq = Renderer(node, self._shard, epoch), place.seq
        for number, fd in files:
            if number < place.file:
                continue
            offset = place.offset if number == place.file else 0
            for record in _records(fd, offset, seen):
                try:
                    lines = renderer.render(record, seq + 1)
                except MALFORMED:
                    seen.drops += 1
                    continue
                seq += len(lines)
                seen.spool_events += len(lines)
                yield from map(json.loads, lines)


def _records(fd: int, offset: int, seen: Seen) -> Iterator[list[object]]:
    while True:
        chunk = spool.read_open(fd, offset)
        for _, records in chunk.arrays:
            yield from records
        if not chunk.arrays:
            seen.lost_bytes += os.fstat(fd).st_size - chunk.offset
            return
        offset = chunk.offset


if __name__ == "__main__":
    sys.exit(main())
