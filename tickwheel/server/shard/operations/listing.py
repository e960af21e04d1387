"""What is there, page by page: tasks, dead letters, counts; and backups."""

from __future__ import annotations

import errno
import heapq
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.api.daemon import BackupName, LoadSpans, Nothing
from tickwheel.api.dead import DeadPage
from tickwheel.api.groups import OfTopic
from tickwheel.api.kinds import Whole
from tickwheel.api.schedules import NamesPage
from tickwheel.api.tasks import PAGE, TasksPage
from tickwheel.errors import (
    BadRequest,
    Conflict,
    LimitExceeded,
    NotFound,
    Overloaded,
    shown,
)
from tickwheel.limits import ID_MAX
from tickwheel.model.records import DeadRow, TaskOptions, id_floor, task_bytes
from tickwheel.server.shard.operations.controlling import described
from tickwheel.server.shard.stats import stats_map, topic_map
from tickwheel.server.shard.views import ValueBytes, dead_map, fitting

if TYPE_CHECKING:
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.access import Only
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.listings import Listings
    from tickwheel.server.shard.parts import Parts

SCANNED_PER_REQUEST_MAX, BYTES_PER_REQUEST_MAX = 20_000, 256 << 20
"""Tasks, and bytes, that one request looks at; ``next`` of a shorter page says where to go on."""
STEP_FIRST, STEP_BYTES = 100, 16 << 20
"""Rows of the first read, and bytes of each later one: rows are read with their bodies."""
BACKUP_NAME_BYTES_MAX = 200
"""Bytes of a backup's name: most file systems allow 255, and an unfinished copy's is longer."""
LOAD_STEP_MS_DEFAULT = 60_000
LOAD_STEPS_DEFAULT = 60


class Listing:
    """Reads that may take a while, each in a task of its own."""

    def __init__(
        self,
        parts: Parts,
        listings: Listings,
        backups: Listings,
        backup_folder: Path,
        value_bytes: ValueBytes,
    ) -> None:
        """``backups``: the requests for one, which wait for their turn."""
        self._parts = parts
        self._listings = listings
        self._backups = backups
        self._backup_folder = backup_folder
        self._value_bytes = value_bytes

    def stats(self, ask: Ask[Nothing]) -> None:
        """Answer the daemon's counts. Raises Overloaded."""
        parts = self._parts
        if parts.loaded.is_set():
            counts = stats_map(parts, ask.now, self._value_bytes, ask.only)
            parts.committer.reply(ask.caller.replies, ask.number, counts)
        else:  # no answer before the counts are true
            self._listings.answer(ask, partial(self._stats_when_loaded, ask.only))

    async def _stats_when_loaded(self, only: Only | None) -> dict[str, Any]:
        return stats_map(self._parts, self._parts.clock.read(), self._value_bytes, only)

    def list_topics(self, ask: Ask[NamesPage]) -> None:
        """A page of topics with their counts, by name; ``next`` is ``after`` of the next page.
        Raises Overloaded."""
        after, limit = ask.request.after or "", ask.request.limit
        self._listings.answer(ask, partial(self._topics, after, limit, ask.only))

    async def _topics(self, after: str, limit: int, only: Only | None) -> dict[str, Any]:
        parts = self._parts
        core, now = parts.core, parts.clock.read()
        seen = core.topics if only is None else filter(only, core.topics)
        names = heapq.nsmallest(limit + 1, (name for name in seen if name > after))
        found: list[dict[str, Any]] = []
        bytes_left = parts.limits.frame_bytes_max // 2
        for name in names[:limit]:
            topic = {"topic": name} | topic_map(core, core.topics[name], now)
            bytes_left -= self._value_bytes(topic)
            if found and bytes_left < 0:
                break
            found.append(topic)
        is_all = len(found) == len(names)
        return {"topics": found, "next": None if is_all else found[-1]["topic"]}

    def show_topic(self, ask: Ask[OfTopic]) -> None:
        """Answer a topic's counts, settings and groups. Raises Overloaded; answers NotFound."""
        self._listings.answer(ask, partial(self._topic, ask.request.topic))

    async def _topic(self, name: str) -> dict[str, Any]:
        core = self._parts.core
        found = core.topics.get(name)
        if found is None:
            raise NotFound(f"there is no topic {name}")
        return {"topic": name} | topic_map(core, found, self._parts.clock.read())

    def load(self, ask: Ask[LoadSpans]) -> None:
        """How many tasks the wheel has for each of ``steps`` spans of ``step_ms`` from ``from_ms``
        on, rounded down to whole spans. Raises BadRequest, Overloaded."""
        tick_ms, delay_max_ms = self._parts.settings.tick_ms, self._parts.limits.delay_ms_max
        asked, now_ms = ask.request, ask.now.now_ms
        steps = LOAD_STEPS_DEFAULT if asked.steps is None else asked.steps
        default_ms = max(tick_ms, LOAD_STEP_MS_DEFAULT // tick_ms * tick_ms)
        step_ms = default_ms if asked.step_ms is None else asked.step_ms
        Whole(tick_ms, delay_max_ms // steps).check(step_ms, "step_ms", self._parts.limits)
        if step_ms % tick_ms:
            raise BadRequest(f"step_ms is {step_ms}; it must be a multiple of tick_ms ({tick_ms})")
        at_ms = now_ms if asked.from_ms is None else asked.from_ms
        Whole(0, now_ms + delay_max_ms).check(at_ms, "from_ms", self._parts.limits)
        first_ms = at_ms // step_ms * step_ms

        def answer() -> dict[str, Any]:
            wheel = self._parts.core.wheel
            counts, exact = wheel.load(first_ms, step_ms, steps)
            return {
                "from_ms": first_ms, "step_ms": step_ms, "counts": counts, "exact": exact,
                "scheduled": len(wheel),
            }  # fmt: skip

        async def when_loaded() -> dict[str, Any]:
            return answer()

        if self._parts.loaded.is_set():
            self._parts.committer.reply(ask.caller.replies, ask.number, answer())
        else:
            self._listings.answer(ask, when_loaded)

    def list_tasks(self, ask: Ask[TasksPage]) -> None:
        """A page of live tasks; ``next`` of the answer is ``after`` of the next page. Raises
        BadRequest, Overloaded."""
        wanted, limit = _Wanted.of(ask.request, ask.only), ask.request.limit
        self._listings.answer(ask, lambda: self._page(wanted, limit))

    def _map(self, known: TaskSnapshot) -> dict[str, Any]:
        return described(self._parts, known)

    async def _page(self, wanted: _Wanted, limit: int) -> dict[str, Any]:
        parts = self._parts
        bytes_left = bytes_max = parts.limits.frame_bytes_max // 2
        found: list[dict[str, Any]] = []
        scanned = scanned_bytes = 0
        position, step = wanted.start_id, STEP_FIRST
        while True:
            # What matches little is looked for in large steps, however few are asked for.
            step = min(step, PAGE.high if wanted.is_selective else limit - len(found))
            page, following = await parts.reader.scan(
                position, step, wanted.store_topic, back=wanted.newest
            )
            page_bytes = sum(task_bytes(known.row) for known in page)
            for known in page:
                if known.row.id >= wanted.end_id and not wanted.newest:
                    return {"tasks": found, "next": None}
                if len(found) >= limit:
                    return {"tasks": found, "next": position}
                if wanted.fits(known) and (
                    wanted.state is None or parts.engine.control.state(known) == wanted.state
                ):
                    task, size = fitting(self._map(known), bytes_max, self._value_bytes)
                    if found and size > bytes_left:
                        return {"tasks": found, "next": position}
                    found.append(task)
                    bytes_left -= size
                position = known.row.id
            if following is None:
                return {"tasks": found, "next": None}
            position = following
            scanned += step
            scanned_bytes += page_bytes
            is_much = scanned >= SCANNED_PER_REQUEST_MAX or scanned_bytes >= BYTES_PER_REQUEST_MAX
            if len(found) >= limit or is_much:
                return {"tasks": found, "next": position}
            step = min(4 * step, 1 + step * STEP_BYTES // (page_bytes + 1))
            step = min(step, SCANNED_PER_REQUEST_MAX - scanned)

    def list_dead(self, ask: Ask[DeadPage]) -> None:
        """A page of dead letters, by id and group. Raises Overloaded."""
        asked, only = ask.request, ask.only
        since_ms = 0 if asked.since_ms is None else asked.since_ms
        until_ms = ID_MAX if asked.until_ms is None else asked.until_ms
        reason = (asked.reason or "").casefold()

        def wanted(row: DeadRow) -> bool:
            is_seen = only is None or only(row.topic)
            in_time = since_ms <= row.died_ms <= until_ms
            return is_seen and in_time and reason in row.reason.casefold()

        self._listings.answer(ask, partial(self._dead_page, asked, wanted))

    async def _dead_page(
        self, asked: DeadPage, wanted: Callable[[DeadRow], bool]
    ) -> dict[str, Any]:
        after, limit = asked.after or (0, ""), asked.limit
        await self._parts.committer.barrier()
        found: list[dict[str, Any]] = []
        scanned, bytes_left = 0, self._parts.limits.frame_bytes_max // 2
        while True:
            rows = await self._parts.store.scan_dead(after, PAGE.high, asked.topic, asked.group)
            for row in rows:
                if len(found) >= limit:
                    return {"dead": found, "next": after}
                if wanted(row):
                    letter = dead_map(row)
                    bytes_left -= self._value_bytes(letter)
                    if found and bytes_left < 0:
                        return {"dead": found, "next": after}
                    found.append(letter)
                after = row.id, row.group
            scanned += len(rows)
            if len(rows) < PAGE.high:
                return {"dead": found, "next": None}
            if len(found) >= limit or scanned >= SCANNED_PER_REQUEST_MAX:
                return {"dead": found, "next": after}

    def backup(self, ask: Ask[BackupName]) -> None:
        """A copy of the store as a new file in the folder for backups. Raises BadRequest,
        LimitExceeded, Overloaded."""
        path = self._backup_folder / file_name(ask.request.name, "name")
        self._backups.answer(ask, lambda: self._backup(path))

    async def _backup(self, path: Path) -> dict[str, Any]:
        """Write the backup. What the file system says of the name is an answer to the client."""
        await self._parts.committer.barrier()
        try:
            if os.path.lexists(path):
                raise Conflict(f"{path} exists; choose another name")
            size = await self._parts.store.backup(str(path))
        except OSError as error:
            kind = Overloaded if error.errno in (errno.EMFILE, errno.ENFILE) else Conflict
            raise kind(f"cannot write {path}: {error.strerror}") from error
        return {"path": str(path), "bytes": size}


def file_name(name: str, field: str) -> str:
    """The name of a file in the folder for backups. Raises BadRequest, LimitExceeded."""
    if not name or name in (".", "..") or Path(name).name != name or "\0" in name:
        raise BadRequest(f"{field} must be a file name without a folder, not {shown(name)}")
    size_bytes = len(os.fsencode(name))
    if size_bytes > BACKUP_NAME_BYTES_MAX:
        raise LimitExceeded(f"{field} has {size_bytes} bytes; the limit is {BACKUP_NAME_BYTES_MAX}")
    return name


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The conditions of one LIST."""

    topic: str | None
    state: str | None
    key: str | None
    has: _Has | None
    newest: bool
    start_id: int
    """The id to go on after; when the newest come first, to go on below."""
    end_id: int
    """Every task with an id from this on was enqueued too late."""
    only: Only | None

    @classmethod
    def of(cls, asked: TasksPage, only: Only | None = None) -> _Wanted:
        """The conditions of a request. Raises BadRequest."""
        if asked.key == "":
            raise BadRequest("key must be a string of 1 to 255 characters, not ''")
        until_ms = ID_MAX if asked.until_ms is None else asked.until_ms
        # An id says when it was assigned, so a time is a place among the ids.
        end_id = min(max(0, id_floor(until_ms + 1, 0)), ID_MAX + 1)
        after_id = asked.after
        if asked.newest:
            start_id = end_id if after_id is None else min(after_id, end_id)
        else:
            start_id = after_id or 0
        has = _Has.of(asked)
        topic, state, key = asked.topic, asked.state, asked.key
        return cls(topic, state, key, has, asked.newest, start_id, end_id, only)

    @property
    def is_selective(self) -> bool:
        is_partial = self.only is not None and self.topic is None
        asked = self.key, self.state, self.has
        return is_partial or any(one is not None for one in asked)

    @property
    def store_topic(self) -> str | None:
        """The topic that the store filters by; None with a key: what it skips is not counted."""
        return None if self.key is not None else self.topic

    def fits(self, known: TaskSnapshot) -> bool:
        """Whether the task fulfils all conditions except the state."""
        row = known.row
        if self.only is not None and not self.only(row.topic):
            return False
        if self.key is not None and (row.options is None or row.options.key != self.key):
            return False
        if self.has is not None and not self.has.fits(row.options):
            return False
        return self.topic is None or row.topic == self.topic


class _Has(NamedTuple):
    """The conditions on the options of a task."""

    key_prefix: str
    tag: str | None
    property: tuple[str, str] | None
    """The name of a property, and its value as text: true, 5, eu."""

    @classmethod
    def of(cls, asked: TasksPage) -> _Has | None:
        """The conditions of a request; None: there are none. Raises BadRequest."""
        prefix, wanted = asked.key_prefix or "", None
        if asked.property is not None:
            name, equals, value = asked.property.partition("=")
            if not name or not equals:
                raise BadRequest(f"property must be NAME=VALUE, not {shown(asked.property)}")
            wanted = name, value
        has_any = prefix or asked.tag is not None or wanted
        return cls(prefix, asked.tag, wanted) if has_any else None

    def fits(self, options: TaskOptions | None) -> bool:
        if options is None:
            return False
        if self.property is not None:
            name, wanted = self.property
            value = (options.properties or {}).get(name)
            if value is None or _as_text(value) != wanted:
                return False
        is_tagged = self.tag is None or options.tag == self.tag
        return is_tagged and (options.key or "").startswith(self.key_prefix)


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
