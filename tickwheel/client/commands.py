"""The client's questions and commands on single tasks, dead letters and the daemon itself.

Each is one request, asked again on a new connection when the old one broke before the answer.
Then the word may be that of the repeat: a cancel that was done may answer "already_cancelled".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from tickwheel.client.reconnector import Link
from tickwheel.client.requests import Calls
from tickwheel.client.results import Backup, DeadLetter, Rescheduled, Stats, Status, TaskInfo, read
from tickwheel.client.times import Duration, duration_ms, moment_ms, shown
from tickwheel.errors import BadRequest, ClientClosed, LimitExceeded, ProtocolError
from tickwheel.protocol.frames import ID_MAX, FrameType, Limits

LOOKUP_IDS = 256
"""Ids of one LOOKUP: their bodies have to fit one answer."""
PAGE = 1000
BACKUP_S = 600.0
"""How much longer than other answers that of a backup may take."""

T = TypeVar("T")


class Commands:
    """What ``Client`` can ask; mixed into it."""

    _link: Link
    _calls: Calls

    def _ready(self) -> None:
        raise ClientClosed

    # --- tasks by id ----------------------------------------------------------------------------

    async def cancel(self, task_id: int) -> str:
        """Cancel a task that is not being worked on: "cancelled", "already_cancelled", or what
        is too late for that: "in_flight", "acked", "expired", "dead", "gone", "unknown", …"""
        return (await self.cancel_many([task_id]))[0]

    async def cancel_many(self, ids: Iterable[int]) -> list[str]:
        """``cancel`` of each, in order."""
        return await self._each(FrameType.CANCEL, _ids(ids), str)

    async def reschedule(
        self, task_id: int, *, delay: Duration | None = None, at: datetime | None = None
    ) -> Rescheduled:
        """Another due time: ``delay`` from now (by the daemon's clock), or ``at``."""
        if (delay is None) == (at is None):
            raise BadRequest("reschedule needs delay or at, one of them")
        item = (
            _id(task_id),
            None if delay is None else duration_ms(delay, "delay"),
            None if at is None else moment_ms(at, "at"),
        )
        return (await self._each(FrameType.RESCHEDULE, [item], Rescheduled.of))[0]

    async def run_now(self, task_id: int) -> Rescheduled:
        """Due at once."""
        return (await self.run_now_many([task_id]))[0]

    async def run_now_many(self, ids: Iterable[int]) -> list[Rescheduled]:
        """``run_now`` of each, in order."""
        return await self._each(FrameType.RUN_NOW, _ids(ids), Rescheduled.of)

    async def lookup(self, task_id: int) -> TaskInfo:
        """Where a task stands."""
        return (await self.lookup_many([task_id]))[0]

    async def lookup_many(self, ids: Iterable[int]) -> list[TaskInfo]:
        """``lookup`` of each, in order."""
        self._ready()
        wanted, found = _ids(ids), list[TaskInfo]()
        for start in range(0, len(wanted), LOOKUP_IDS):
            found += await self._lookup(wanted[start : start + LOOKUP_IDS])
        return found

    async def _lookup(self, ids: list[int]) -> list[TaskInfo]:
        try:
            answer = await self._calls.call(FrameType.LOOKUP, ids)
        except LimitExceeded:
            # Their bodies are too large for one answer.
            if len(ids) == 1:
                raise
            half = len(ids) // 2
            return await self._lookup(ids[:half]) + await self._lookup(ids[half:])
        return _list(answer, len(ids), TaskInfo.of)

    async def list_tasks(
        self,
        *,
        topic: str | None = None,
        state: str | None = None,
        key: str | None = None,
        not_after: datetime | None = None,
        newest_first: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[TaskInfo]:
        """Stored tasks in the order of their ids (``newest_first``: the other way round), at most
        ``limit``, read page by page: those with that ``key``, enqueued at ``not_after`` or before.
        A key has no index: the tasks are looked through."""
        options = {
            "topic": topic,
            "state": state,
            "key": key,
            "until_ms": None if not_after is None else moment_ms(not_after, "not_after"),
            "newest": newest_first or None,
        }
        async for task in self._pages(FrameType.LIST, options, "tasks", limit):
            yield read(TaskInfo.of, task)

    async def find(
        self, key: str, *, topic: str | None = None, not_after: datetime | None = None
    ) -> TaskInfo | None:
        """The newest task with that key that is stored (not finished; dead letters are), enqueued
        at ``not_after`` or before. The newest tasks are looked at first; None, when no task has
        it, is known when all were."""
        found = None
        async for task in self.list_tasks(
            topic=topic, key=key, not_after=not_after, newest_first=True, limit=1
        ):
            found = task
        return found

    # --- dead letters ---------------------------------------------------------------------------

    async def dead_list(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        reason: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[DeadLetter]:
        """Dead letters in the order of their ids, at most ``limit``, read page by page: those
        that died at ``since`` or later and before ``until``, with ``reason`` somewhere in the
        text of the last failure (in whatever case)."""
        options = {
            "topic": topic,
            "group": group,
            "since_ms": None if since is None else moment_ms(since, "since"),
            "until_ms": None if until is None else moment_ms(until, "until"),
            "reason": reason,
        }
        async for letter in self._pages(FrameType.DEAD_LIST, options, "dead", limit):
            yield read(DeadLetter.of, letter)

    async def dead_requeue(self, pairs: Iterable[tuple[int, str]]) -> list[str]:
        """Deliver dead letters, given as (id, group), again: "requeued" or "unknown" for each."""
        return await self._each(FrameType.DEAD_REQUEUE, _pairs(pairs), str)

    async def dead_delete(self, pairs: Iterable[tuple[int, str]]) -> list[str]:
        """Delete dead letters, given as (id, group): "deleted" or "unknown" for each."""
        return await self._each(FrameType.DEAD_DELETE, _pairs(pairs), str)

    # --- the daemon -----------------------------------------------------------------------------

    async def stats(self) -> Stats:
        """Counts of now."""
        self._ready()
        return read(Stats.of, await self._calls.call(FrameType.STATS))

    async def status(self) -> Status:
        """How the daemon is: its role and state, and since when. For one that is not active see
        ``status_at``."""
        self._ready()
        return read(Status.of, await self._calls.call(FrameType.STATUS))

    async def backup(self, name: str) -> Backup:
        """Copy the store to a new file ``name`` in the daemon's backup folder, while it works."""
        self._ready()
        if not isinstance(name, str):
            raise BadRequest(f"name must be a file name, not {shown(name)}")
        answer = await self._calls.call(
            FrameType.BACKUP, name, extra_s=BACKUP_S, prompt=False, repeat=False
        )
        return read(lambda raw: Backup(path=raw["path"], bytes=raw["bytes"]), answer)

    async def ping(self) -> float:
        """How long the daemon takes to answer, in seconds."""
        self._ready()
        began_s = self._link.loop.time()
        await self._calls.call(FrameType.PING)
        return self._link.loop.time() - began_s

    @property
    def server_info(self) -> Mapping[str, Any]:
        """What the daemon said last in answer to HELLO: v, epoch, node, role, now_ms, limits."""
        return self._link.info

    @property
    def limits(self) -> Limits:
        """What the daemon accepts."""
        return self._link.limits

    @property
    def connected(self) -> bool:
        """Whether a connection stands right now; calls wait for the next one anyway."""
        return self._link.connection is not None

    # --- what they share ------------------------------------------------------------------------

    async def _each(
        self, kind: FrameType, items: Sequence[Any], parse: Callable[[Any], T]
    ) -> list[T]:
        self._ready()
        found: list[T] = []
        step = self._link.limits.ids_per_frame_max
        for start in range(0, len(items), step):
            some = items[start : start + step]
            found += _list(await self._calls.call(kind, some), len(some), parse)
        return found

    async def _pages(
        self, kind: FrameType, options: Mapping[str, Any], field: str, limit: int | None
    ) -> AsyncIterator[Any]:
        self._ready()
        if limit is not None and (type(limit) is not int or limit < 1):
            raise BadRequest(f"limit must be an integer of 1 or more, not {shown(limit)}")
        asked = {name: value for name, value in options.items() if value is not None}
        left = limit
        while left is None or left > 0:
            asked["limit"] = PAGE if left is None else min(left, PAGE)
            answer = await self._calls.call(kind, asked, prompt=False)
            items, following = read(lambda raw: (tuple(raw[field]), raw["next"]), answer)
            for item in items:
                yield item
            if following is None:
                return
            if left is not None:
                left -= len(items)
            asked["after"] = following


def _list(answer: Any, count: int, parse: Callable[[Any], T]) -> list[T]:
    if not isinstance(answer, tuple) or len(answer) != count:
        raise ProtocolError(f"the daemon's answer is no list of {count}: {answer!r:.100}")
    return [read(parse, item) for item in answer]


def _id(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= ID_MAX:
        raise BadRequest(f"id must be an integer of 0 to {ID_MAX}, not {shown(value)}")
    return value


def _ids(values: Iterable[int]) -> list[int]:
    return [_id(value) for value in values]


def _pairs(values: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
    return [_pair(value) for value in values]


def _pair(value: Any) -> tuple[int, str]:
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[1], str):
        raise BadRequest(f"a dead letter is (id, group), not {shown(value)}")
    return _id(value[0]), value[1]
