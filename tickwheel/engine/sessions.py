"""Producer sessions: what makes the resend of a request harmless.

A session remembers the answers to the requests that its client may still repeat: those at or
above ``floor``, at most ``window_max`` of them, and all
sessions together remember so many. The memory is part of the same commit as the
tasks; a request that was refused leaves nothing. Knows no connection and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tickwheel.model.records import SessionRow

StoredAnswer = tuple[int, int, int, int]
"""(request, first id, number of ids, accepted_ms)"""


class Session:
    """One client's memory. ``connections`` > 0 keeps it from being forgotten."""

    __slots__ = ("_all", "answers", "connections", "floor", "key", "last", "seen_ms")

    def __init__(self, key: bytes, now_ms: int, every: Sessions) -> None:
        self._all = every
        self.key = key
        self.floor = 0
        self.last = 0
        """No request above this was ever seen."""
        self.answers: dict[int, StoredAnswer] = {}
        self.seen_ms = now_ms
        self.connections = 0

    def remember(self, answers: Mapping[int, StoredAnswer]) -> None:
        """Of new requests."""
        self.answers.update(answers)
        self._all.answers += len(answers)

    def drop(self, request: int) -> None:
        """It was refused."""
        if self.answers.pop(request, None) is not None:
            self._all.answers -= 1

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

    def row(self) -> SessionRow:
        return SessionRow(self.key, self.floor, self.seen_ms, tuple(self.answers.values()))


class Sessions:
    """All sessions of a daemon, at most ``sessions_max``."""

    def __init__(self, sessions_max: int, idle_ms_max: int) -> None:
        self.answers = 0
        """That are remembered in all."""
        self._all: dict[bytes, Session] = {}
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
        self.answers -= len(session.answers)
        return True

    def expired(self, now_ms: int) -> list[bytes]:
        """Keys of sessions without a connection that were last used too long ago."""
        limit = now_ms - self._idle_ms_max
        return [s.key for s in self._all.values() if not s.connections and s.seen_ms < limit]

    def make_room(self, now_ms: int, idle_ms_min: int) -> bytes | None:
        """The key of the longest unused session that nobody is likely to resume, if any."""
        limit = now_ms - idle_ms_min
        idle = [s for s in self._all.values() if not s.connections and s.seen_ms < limit]
        return min(idle, key=lambda s: s.seen_ms).key if idle else None
