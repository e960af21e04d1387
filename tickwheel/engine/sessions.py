"""Producer sessions: what makes the resend of a request harmless.

A session remembers the answers to the requests that its client may still repeat: those at or
above ``floor``, at most ``window_max`` of them, and all
sessions together remember so many. The memory is part of the same commit as the
tasks; a request that was refused leaves nothing. Knows no connection and no clock.

A request that is not decided of when it arrives is *under way*: its number is taken from that
moment on, and it counts like one that was answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nsmallest

from tickwheel.model.coalescing import Merged
from tickwheel.model.records import SessionRow

UNUSED_KEPT = 1_000
"""All sessions have to be looked at to find the longest unused ones: so many at a time."""
LOOK_AGAIN_MS = 500
"""When there are none, they are not looked at again so soon."""
StoredAnswer = tuple[int, int, int, int]
"""(request, first id, number of ids, accepted_ms). Of a request that had rules for its tasks, what
became of them stands in ``Session.merged``; the first id is then the newest of those that it rests
on and that were not durable when it was decided, 0 if there was none."""


class Session:
    """One client's memory. ``connections`` > 0 keeps it from being forgotten."""

    __slots__ = ("_all", "answers", "connections", "floor", "key", "last", "merged", "seen_ms",
                 "under_way")  # fmt: skip

    def __init__(self, key: bytes, now_ms: int, every: Sessions) -> None:
        self._all = every
        self.key = key
        self.floor = 0
        self.last = 0
        """No request above this was ever seen."""
        self.answers: dict[int, StoredAnswer] = {}
        self.merged: dict[int, Merged] = {}
        """Of those among them that had rules: what became of each task."""
        self.under_way: set[int] = set()
        """Requests whose keys are being read."""
        self.seen_ms = now_ms
        self.connections = 0

    @property
    def requests(self) -> int:
        """How many count for ``window_max``."""
        return len(self.answers) + len(self.under_way)

    def knows(self, request: int) -> bool:
        """Whether it was answered, or will be."""
        return request in self.answers or request in self.under_way

    def remember(self, answers: Mapping[int, StoredAnswer]) -> None:
        """Of new requests."""
        self.answers.update(answers)
        self._all.answers += len(answers)

    def remember_merged(self, answer: StoredAnswer, merged: Merged) -> None:
        """Of a request that had rules; each of its tasks counts as an answer."""
        self.remember({answer[0]: answer})
        self.merged[answer[0]] = merged
        self._all.answers += len(merged) - 1

    def drop(self, request: int) -> None:
        """It was refused."""
        if self.answers.pop(request, None) is not None:
            self._all.answers -= 1
            self._drop_merged(request)

    def _drop_merged(self, request: int) -> None:
        merged = self.merged.pop(request, None)
        if merged is not None:
            self._all.answers -= len(merged) - 1

    def raise_floor(self, floor: int) -> None:
        """The client has seen every answer below ``floor``: forget them."""
        if floor <= self.floor:
            return
        before = len(self.answers)
        if floor - self.floor > len(self.answers):
            self.answers = {r: o for r, o in self.answers.items() if r >= floor}
        else:
            for request in range(self.floor, floor):
                self.answers.pop(request, None)
        self._all.answers -= before - len(self.answers)
        self.floor = floor
        for request in [r for r in self.merged if r < floor] if self.merged else ():
            self._drop_merged(request)

    @property
    def weight(self) -> int:
        """How many answers it counts for."""
        return len(self.answers) + sum(len(merged) - 1 for merged in self.merged.values())

    def row(self) -> SessionRow:
        answers = tuple(self.answers.values())
        return SessionRow(self.key, self.floor, self.seen_ms, answers, tuple(self.merged.items()))


class Sessions:
    """All sessions of a daemon, at most ``sessions_max``."""

    def __init__(self, sessions_max: int, idle_ms_max: int) -> None:
        self.answers = 0
        """That are remembered in all."""
        self._all: dict[bytes, Session] = {}
        self._unused: list[tuple[bytes, int]] = []
        """The longest unused ones when all were looked at last, the longest at the end."""
        self._looked_ms = -LOOK_AGAIN_MS
        self._found_many = False
        """There may be more like them."""
        self._sessions_max = sessions_max
        self._idle_ms_max = idle_ms_max

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._all.values())

    def get(self, key: bytes) -> Session | None:
        return self._all.get(key)

    def restore(self, row: SessionRow) -> None:
        session = Session(row.session, row.seen_ms, self)
        session.floor = row.floor
        session.remember({answer[0]: answer for answer in row.answers})
        for request, merged in row.merged:
            session.merged[request] = merged
            self.answers += len(merged) - 1
        session.last = max(session.answers, default=row.floor)
        self._all[row.session] = session

    def open(self, key: bytes, now_ms: int) -> Session | None:
        """The session of ``key``, new if need be; None when there is no room for a new one."""
        session = self._all.get(key)
        if session is None:
            if len(self._all) >= self._sessions_max:
                return None
            session = self._all[key] = Session(key, now_ms, self)
        return session

    def forget(self, key: bytes) -> bool:
        session = self._all.pop(key, None)
        if session is None:
            return False
        self.answers -= session.weight
        # A request of it may still be refused; it has left nothing that could be dropped again.
        session.answers, session.merged = {}, {}
        return True

    def expired(self, now_ms: int) -> list[bytes]:
        """Keys of sessions without a connection that were last used too long ago."""
        limit = now_ms - self._idle_ms_max
        return [s.key for s in self._all.values() if not s.connections and s.seen_ms < limit]

    def make_room(self, now_ms: int, idle_ms_min: int) -> bytes | None:
        """The key of the longest unused session that nobody is likely to resume, if any."""
        limit = now_ms - idle_ms_min
        while True:
            while self._unused:
                key, seen_ms = self._unused.pop()
                session = self._all.get(key)
                # Those that were used since they were found are among the others again.
                if session is None or session.connections or session.seen_ms != seen_ms:
                    continue
                if seen_ms < limit:
                    return key
            if 0 <= now_ms - self._looked_ms < LOOK_AGAIN_MS and not self._found_many:
                return None
            self._looked_ms = now_ms
            idle = ((s.seen_ms, s.key) for s in self._all.values() if not s.connections)
            found = nsmallest(UNUSED_KEPT, (one for one in idle if one[0] < limit))
            self._found_many = len(found) == UNUSED_KEPT
            self._unused = [(key, seen_ms) for seen_ms, key in reversed(found)]
            if not found:
                return None
