"""Producer sessions, which make resending a request harmless.

A session remembers the answers to requests that its client can still repeat: requests at or above
``floor``, at most ``window_max`` of them. The total of all sessions is bounded as well. Answers are
part of the same commit as their tasks; a refused request leaves no trace. This module knows no
connection and no clock.

A request that cannot be decided when it arrives is *undecided*. Its number is used from then on,
and it counts like an answered request.

A store contains one row for each batch in which requests of a session were answered. Rows are
written only once, so that a batch costs only its own answers. A row is dropped when all of its
requests are below the floor. Rows with several requests do not overlap, so at most one of them is
partly below the floor; a request that arrives after a higher one gets a separate row.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from heapq import heapify, heappop, heappush, nsmallest
from typing import NamedTuple, Protocol

from tickwheel.model.policies import Merged
from tickwheel.model.records import NOT_ONCE, SessionKey, SessionRow

UNUSED_MAX = 1_000
"""Maximum number of sessions that a scan of all sessions collects: the longest unused."""
SCAN_GAP_MS = 500
"""Minimum time between two scans if the first has not found the maximum number of sessions."""
StoredAnswer = tuple[int, int, int, int]
"""(request, first id, number of ids, accepted_ms). For a request with rules, ``Session.merged``
contains the outcomes, and in place of the first id is the newest id on which the decision depends
and which was not durable, or 0."""


class ReplySink(Protocol):
    """The destination of the answers to a caller's requests. A transport provides it. Its methods
    are called synchronously and must not block. If the caller has disconnected, they do nothing.
    ``answer_to`` encodes an answer at once, so that it takes no more memory than its ``len`` while
    it waits for the store."""

    @property
    def label(self) -> str:
        """The name of the caller for the history."""
        ...

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        """Answer enqueue requests whose tasks are durable."""

    def answer_to(self, request: int, value: object) -> Sized:
        """Encode the answer to any other request. The ``len`` of the result is its approximate size
        in bytes. A value that cannot be encoded becomes an ``error``."""
        ...

    def give(self, answer: Sized) -> None:
        """Queue an answer from ``answer_to``, once it is durable, for the next ``flush``."""

    def error(self, request: int, code: str, message: str) -> None:
        """Answer that the request was refused or failed. ``code`` is a code of the error table."""

    def flush(self) -> None:
        """Send all answers since the last flush as one piece."""


class Source(NamedTuple):
    """The origin, as shown in the history, of tasks that no caller has enqueued."""

    label: str


class Session:
    """A producer session. It is not forgotten while ``connections`` > 0."""

    __slots__ = (
        "_rows",
        "_sessions",
        "_unwritten",
        "_written",
        "answers",
        "connections",
        "floor",
        "key",
        "last",
        "merged",
        "once",
        "seen_mono_ms",
        "seen_ms",
        "undecided",
        "weight",
    )  # fmt: skip

    def __init__(self, key: bytes, now_ms: int, mono_ms: int, sessions: Sessions) -> None:
        self._sessions = sessions
        self.key = key
        self.floor = 0
        self.last = 0
        """The highest request number so far."""
        self.answers: dict[int, StoredAnswer] = {}
        self.merged: dict[int, Merged] = {}
        """Number of an answered request with rules → outcome of each of its tasks."""
        self.once = NOT_ONCE
        """The record of the session's only request, if the request has an idempotency key."""
        self.undecided: set[int] = set()
        """Requests whose keys are being read."""
        self.seen_ms = now_ms
        """The last use by wall time, for the store."""
        self.seen_mono_ms = mono_ms
        """The last use by steady time, which decides whether the session is forgotten."""
        self.connections = 0
        self.weight = 0
        """Number of answers of the session; a request with rules counts once per task."""
        self._unwritten: list[int] = []
        """Requests that were answered since the last batch was sealed."""
        self._rows: list[tuple[int, int]] = []
        """A heap of (last request, first request) of the session's stored and sealed rows."""
        self._written = 0
        """The highest request number in those rows."""

    @property
    def request_count(self) -> int:
        """Number of requests that count against ``window_max``."""
        return len(self.answers) + len(self.undecided)

    def use(self, now_ms: int, mono_ms: int) -> None:
        """Record that a new request of the session has come."""
        self.seen_ms, self.seen_mono_ms = now_ms, mono_ms

    def knows(self, request: int) -> bool:
        """Return whether the request was answered, or its keys are being read."""
        return request in self.answers or request in self.undecided

    def remember(self, answers: Mapping[int, StoredAnswer]) -> None:
        """Remember the answers to new requests."""
        self.answers.update(answers)
        self._unwritten += answers
        self._count(len(answers))

    def _count(self, more: int) -> None:
        self.weight += more
        self._sessions.answer_count += more

    def remember_merged(self, answer: StoredAnswer, merged: Merged) -> None:
        """Remember the answer to a request with rules. Each of its tasks counts as an answer."""
        self.remember({answer[0]: answer})
        self.merged[answer[0]] = merged
        self._count(len(merged) - 1)

    def drop(self, request: int) -> None:
        """Forget the answer to a request that was refused."""
        if self.answers.pop(request, None) is not None:
            self._count(-1)
            self._drop_merged(request)

    def _drop_merged(self, request: int) -> None:
        merged = self.merged.pop(request, None)
        if merged is not None:
            self._count(1 - len(merged))

    def raise_floor(self, floor: int) -> None:
        """Forget the answers to requests below ``floor``. The client has received all of them."""
        if floor <= self.floor:
            return
        before = len(self.answers)
        if floor - self.floor > len(self.answers):
            self.answers = {r: o for r, o in self.answers.items() if r >= floor}
        else:
            for request in range(self.floor, floor):
                self.answers.pop(request, None)
        self._count(len(self.answers) - before)
        self.floor = floor
        for request in [r for r in self.merged if r < floor] if self.merged else ():
            self._drop_merged(request)

    # --- stored rows ---------------------------------------------------------------------------

    def changes(self) -> dict[SessionKey, SessionRow | None]:
        """Return the changed rows for the batch that is being sealed: rows with new answers and the
        floor, and None for rows whose answers the client has all received."""
        changes: dict[SessionKey, SessionRow | None] = {}
        answers, rows = self.answers, self._rows
        fresh = sorted(dict.fromkeys(request for request in self._unwritten if request in answers))
        self._unwritten = []
        while fresh and rows and rows[0][0] < self.floor:
            changes[self.key, heappop(rows)[1]] = None
        late = bisect(fresh, self._written)
        for request in fresh[:late]:
            changes[self.key, request] = self._row((request,))
            heappush(rows, (request, request))
        if late < len(fresh):
            fresh = fresh[late:]
            changes[self.key, fresh[0]] = self._row(fresh)
            heappush(rows, (fresh[-1], fresh[0]))
            self._written = fresh[-1]
        return changes

    def _row(self, requests: Iterable[int]) -> SessionRow:
        answers = tuple(map(self.answers.__getitem__, requests))
        merged: tuple[tuple[int, Merged], ...] = ()
        if self.merged:
            merged = tuple((a[0], self.merged[a[0]]) for a in answers if a[0] in self.merged)
        return SessionRow(self.key, self.floor, self.seen_ms, answers, merged, self.once)

    def undo_change(self, key: SessionKey, row: SessionRow | None) -> bool:
        """Undo a refused change of a row, so that its valid part is written again. Return False if
        the change was the removal of a forgotten session's row, which must be repeated."""
        _, first = key
        if row is None:
            if first < self.floor:
                heappush(self._rows, (first, first))
            return first < self.floor
        self._rows = [span for span in self._rows if span[1] != first]
        heapify(self._rows)
        self._written = max((last for last, _ in self._rows), default=0)
        self._unwritten += [answer[0] for answer in row.answers]
        return True

    def restore(self, row: SessionRow) -> None:
        """Restore a stored row. Call ``finish_restore`` after the last row."""
        self.remember({answer[0]: answer for answer in row.answers})
        for request, merged in row.merged:
            self.merged[request] = merged
            self._count(len(merged) - 1)
        self.once = row.once
        last = row.answers[-1][0] if row.answers else 0
        heappush(self._rows, (last, row.key[1]))
        self._written = max(self._written, last)
        self.last = max(self.last, last)
        self.seen_ms = max(self.seen_ms, row.seen_ms)

    def finish_restore(self, floor: int, now_ms: int, mono_ms: int) -> None:
        """Finish after the last row. If the clock was set back, the last use counts as now."""
        self.seen_mono_ms = mono_ms - max(0, now_ms - self.seen_ms)
        self._unwritten = []
        self.raise_floor(floor)
        self.last = max(self.last, floor)

    def end(self) -> list[SessionKey]:
        """End the session and return the keys of its rows. A later ``drop`` changes no count."""
        self._count(-self.weight)
        self.answers, self.merged, self._unwritten = {}, {}, []
        return [(self.key, first) for _, first in self._rows]


class Sessions:
    """All sessions of a daemon, at most ``sessions_max``."""

    def __init__(self, sessions_max: int, idle_ms_max: int) -> None:
        self.answer_count = 0
        """Number of remembered answers of all sessions."""
        self._all: dict[bytes, Session] = {}
        self._unused: list[tuple[bytes, int]] = []
        """(key, last use) of the longest unused sessions at the last scan, most recent first."""
        self._scanned_mono_ms = -SCAN_GAP_MS
        self._found_many = False
        """Whether the last scan has found the maximum number of sessions."""
        self._sessions_max = sessions_max
        self._idle_ms_max = idle_ms_max

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._all.values())

    def get(self, key: bytes) -> Session | None:
        return self._all.get(key)

    def restore(self, rows: Iterable[SessionRow], now_ms: int, mono_ms: int) -> None:
        """Restore all stored session rows, in any order."""
        floors: dict[Session, int] = {}
        for row in rows:
            session = self._all.get(row.session)
            if session is None:
                session = Session(row.session, row.seen_ms, mono_ms, self)
                self._all[row.session] = session
            session.restore(row)
            floors[session] = max(floors.get(session, 0), row.floor)
        for session, floor in floors.items():
            session.finish_restore(floor, now_ms, mono_ms)

    def open(self, key: bytes, now_ms: int, mono_ms: int) -> Session | None:
        """Return the session of ``key``, creating it if there is room. Otherwise return None."""
        session = self._all.get(key)
        if session is None:
            if len(self._all) >= self._sessions_max:
                return None
            session = self._all[key] = Session(key, now_ms, mono_ms, self)
        return session

    def forget(self, key: bytes) -> list[SessionKey]:
        """Forget a session and return the keys of its stored rows."""
        session = self._all.pop(key, None)
        return [] if session is None else session.end()

    def expired(self, mono_ms: int) -> list[bytes]:
        """Return the keys of sessions that have no connection and have been unused for too long."""
        limit = mono_ms - self._idle_ms_max
        return [s.key for s in self._all.values() if not s.connections and s.seen_mono_ms < limit]

    def find_evictable(self, mono_ms: int, idle_ms_min: int) -> bytes | None:
        """Return the key of the longest unused session that is unlikely to be resumed, or None."""
        limit = mono_ms - idle_ms_min
        while True:
            while self._unused:
                key, seen_mono_ms = self._unused.pop()
                session = self._all.get(key)
                # Sessions that were used since the scan are skipped.
                if session is None or session.connections or session.seen_mono_ms != seen_mono_ms:
                    continue
                if seen_mono_ms < limit:
                    return key
            if mono_ms - self._scanned_mono_ms < SCAN_GAP_MS and not self._found_many:
                return None
            self._scanned_mono_ms = mono_ms
            idle = ((s.seen_mono_ms, s.key) for s in self._all.values() if not s.connections)
            unused = nsmallest(UNUSED_MAX, (entry for entry in idle if entry[0] < limit))
            self._found_many = len(unused) == UNUSED_MAX
            self._unused = [(key, seen_mono_ms) for seen_mono_ms, key in reversed(unused)]
            if not unused:
                return None
