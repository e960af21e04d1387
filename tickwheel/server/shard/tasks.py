"""Tasks by id and by key: cancel, reschedule, run now, look up; the dead letters' verbs; what there
is of both, page by page.

A command by key is about every task of the topic that has the key and has not ended when its turn
comes: tasks that landed before it was sent are among them. Each gets its own word. When there is
none, the answer is about the newest that ended lately, or says that none is known.

``only``: a task of another topic is unknown, and so is whatever has ended, because nothing says any
more which topic it was of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.api.dead import DeadPage, Letters
from tickwheel.api.tasks import PAGE, KeyLookUp, KeyMove, OfKey, TaskIds, TaskMoves, TasksPage
from tickwheel.errors import BadRequest, LimitExceeded, shown
from tickwheel.limits import ID_MAX
from tickwheel.model.records import DeadRow, TaskOptions, id_floor, task_bytes
from tickwheel.server import checks
from tickwheel.server.shard.reads import Records
from tickwheel.server.shard.views import ValueBytes, dead_map, fitting, task_map

if TYPE_CHECKING:
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.access import Only
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.listings import Listings
    from tickwheel.server.shard.parts import Parts

Many = Callable[[str, Mapping[int, int], Mapping[int, str], int], Mapping[int, Any]]
"""Acts on plain tasks of a topic at once: (topic, due times by id, keys by id, time) → words by id.
Nothing but keys may be recorded of the tasks beside that."""
UNKNOWN = "unknown"
SCANNED_PER_REQUEST_MAX, BYTES_PER_REQUEST_MAX = 20_000, 256 << 20
"""Tasks, and bytes, that one request looks at; ``next`` of a shorter page says where to go on."""
STEP_FIRST, STEP_BYTES = 100, 16 << 20
"""Rows of the first read, and bytes of each later one: rows are read with their bodies."""
NEWEST_LOOKED_AT = 100
"""How many of the newest ids with a key's hash are looked at: one of them has the key."""


class Controlling:
    """Commands on tasks. Each answer has a word, or a map, for each id, in the order asked."""

    def __init__(self, parts: Parts, value_bytes: ValueBytes) -> None:
        self._parts = parts
        self._control = parts.engine.control
        self._value_bytes = value_bytes

    def cancel(self, ask: Ask[TaskIds]) -> None:
        """Cancel tasks. Raises Overloaded."""

        def cancel(task_id: int, found: TaskSnapshot | None, now_ms: int) -> str:
            return self._control.cancel(task_id, found)

        def cancel_many(
            topic: str, found: Mapping[int, int], keys: Mapping[int, str], now_ms: int
        ) -> dict[int, str]:
            return dict.fromkeys(self._control.cancel_many(topic, found, keys), "cancelled")

        self._each(ask, ask.request.ids, ask.request.ids, cancel, cancel_many)

    def _each(
        self,
        ask: Ask[Any],
        ids: Sequence[int],
        keys: Sequence[Any],
        verb: Callable[[Any, TaskSnapshot | None, int], Any],
        many: Many | None = None,
        *,
        unknown: Any = UNKNOWN,
    ) -> None:
        """Answer with the word of ``verb`` for each of ``keys``, which are about ``ids``. It gets
        the key, the record of the task and the time. A key named twice is acted on once, and has
        the same word twice. ``unknown``: the word for what ``ask.only`` leaves out.

        ``many``: for keys that are ids, the words of those that it can do at once."""
        words: dict[Any, Any] = {}
        only = ask.only

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            self._parts.border.act()
            now_ms = self._parts.clock.read().now_ms
            if many is not None and isinstance(known, Records):
                for topic, found in known.plain.items():
                    if only is not None and not only(topic):
                        continue
                    if words:
                        found = {i: due_ms for i, due_ms in found.items() if i not in words}
                    words.update(many(topic, found, known.keys_of, now_ms))
            for index in some:
                key = keys[index]
                if key in words:
                    continue
                task = known.get(ids[index])
                words[key] = verb(key, task, now_ms) if _is_seen(task, only) else unknown

        def done() -> None:
            answer = [words[key] for key in keys]
            self._parts.committer.answer(ask, answer)
            self._parts.wake()

        self._parts.commands.put(ask.caller, ask.number, ids, act, done)

    def reschedule(self, ask: Ask[TaskMoves]) -> None:
        """Move tasks; ``items`` are ``(id, delay_ms or None, due_ms or None)``. Raises BadRequest,
        DueTooFar, Overloaded."""
        limits, now_ms, items = self._parts.limits, ask.now.now_ms, ask.request.items
        ids = [item[0] for item in items]
        delays_ms = _delays(items, limits.delay_ms_max)
        if delays_ms is not None:
            dues = {i: now_ms + after for i, after in zip(ids, delays_ms, strict=True)}
        else:
            dues = {
                task_id: checks.due(delay_ms, due_ms, f"items[{index}]", now_ms, limits)
                for index, (task_id, delay_ms, due_ms) in enumerate(items)
            }
        self._reschedule(ask, ids, dues)

    def run_now(self, ask: Ask[TaskIds]) -> None:
        """Make tasks due now. Raises Overloaded."""
        ids = ask.request.ids
        self._reschedule(ask, ids, dict.fromkeys(ids, ask.now.now_ms))

    def _reschedule(self, ask: Ask[Any], ids: Sequence[int], dues: dict[int, int]) -> None:
        reschedule = self._control.reschedule

        def verb(task_id: int, found: TaskSnapshot | None, now_ms: int) -> tuple[str, int | None]:
            return reschedule(task_id, dues[task_id], found, now_ms)

        def many(
            topic: str, found: Mapping[int, int], keys: Mapping[int, str], now_ms: int
        ) -> dict[int, tuple[str, int]]:
            moved = self._control.reschedule_many(topic, found, dues, now_ms)
            return {task_id: ("scheduled", due_ms) for task_id, due_ms in moved.items()}

        unknown = (UNKNOWN, None)
        self._each(ask, ids, ids, verb, many, unknown=unknown)

    def look_up(self, ask: Ask[TaskIds]) -> None:
        """Answer a map for each id. Raises Overloaded; answers LimitExceeded."""
        ids, only, caller = ask.request.ids, ask.only, ask.caller
        parts = self._parts
        bytes_max = parts.limits.frame_bytes_max // 2
        maps: list[dict[str, Any]] = []
        size = 0

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            nonlocal size
            for index in some:
                task_id = ids[index]
                found = known.get(task_id)
                if not _is_seen(found, only):
                    task = {"id": task_id, "state": UNKNOWN}
                elif found is None:
                    task = {"id": task_id, "state": self._control.absent(task_id)}
                else:
                    task = described(parts, found)
                task, task_bytes = fitting(task, bytes_max, self._value_bytes)
                size += task_bytes
                if size > bytes_max and len(ids) > 1:
                    return
                maps.append(task)

        def done() -> None:
            if size > bytes_max and len(ids) > 1:
                ask.refuse(
                    LimitExceeded(
                        f"what there is to say of the {len(ids)} ids has {size} bytes or more;"
                        f" the limit is {bytes_max} (half of frame_bytes_max): ask for fewer"
                    )
                )
            elif caller.is_open:
                parts.committer.reply(caller.replies, ask.number, maps)

        def is_wanted() -> bool:
            return caller.is_open and size <= bytes_max

        parts.commands.put(caller, ask.number, ids, act, done, is_wanted, bodies=True)

    # --- by key --------------------------------------------------------------------------------

    def cancel_key(self, ask: Ask[OfKey]) -> None:
        """Cancel a key's tasks: ``(id, word)``. Raises LimitExceeded, Overloaded."""

        def cancel(task_id: int, found: TaskSnapshot | None, now_ms: int) -> tuple[Any, ...]:
            return task_id, self._control.cancel(task_id, found)

        self._each_of_key(ask, cancel, (None, UNKNOWN))

    def reschedule_key(self, ask: Ask[KeyMove]) -> None:
        """Move the tasks of a key; answers ``(id, word, due_ms or None)`` of each. Raises
        BadRequest, LimitExceeded, DueTooFar, Overloaded."""
        delay_ms, due_ms, limits = ask.request.delay_ms, ask.request.due_ms, self._parts.limits
        at_ms = checks.due(delay_ms, due_ms, "reschedule", ask.now.now_ms, limits)
        self._move_key(ask, at_ms)

    def run_now_key(self, ask: Ask[OfKey]) -> None:
        """Make the tasks of a key due now; answers and raises like ``reschedule_key``."""
        self._move_key(ask, ask.now.now_ms)

    def _move_key(self, ask: Ask[Any], at_ms: int) -> None:
        def move(task_id: int, found: TaskSnapshot | None, now_ms: int) -> tuple[Any, ...]:
            return task_id, *self._control.reschedule(task_id, at_ms, found, now_ms)

        self._each_of_key(ask, move, (None, UNKNOWN, None))

    def look_up_key(self, ask: Ask[KeyLookUp]) -> None:
        """Answer a map for each live task of a key, newest first; else one for the newest that
        ended lately, or none. Raises LimitExceeded, Overloaded."""
        named, newest, parts = _named(ask.request), ask.request.newest, self._parts
        until_ms = ID_MAX if ask.request.until_ms is None else ask.request.until_ms
        end_id = id_floor(until_ms + 1, 0)
        bytes_max = parts.limits.frame_bytes_max // 2
        maps: list[dict[str, Any]] = []
        ids: list[int] = []
        size = 0

        def find() -> Sequence[int]:
            ids[:] = [i for i in reversed(self._of_key(named)) if i < end_id]
            if newest:
                del ids[NEWEST_LOOKED_AT:]
            return ids

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            nonlocal size
            for found in filter(None, (known.get(ids[index]) for index in some)):
                if not _has_key(found, named) or (newest and maps):
                    continue
                task, task_bytes = fitting(described(parts, found), bytes_max, self._value_bytes)
                size += task_bytes
                if size > bytes_max and maps:
                    return
                maps.append(task)

        def done() -> None:
            if size > bytes_max and len(maps) > 1:
                ask.refuse(
                    LimitExceeded(
                        f"what there is to say of the tasks with this key has {size} bytes or more;"
                        f" the limit is {bytes_max} (half of frame_bytes_max): ask for the newest"
                    )
                )
                return
            ended = None if maps else parts.core.keys.finished(*named)
            if ended is not None and ended < end_id:
                maps.append({"id": ended, "state": self._control.absent(ended)})
            parts.committer.answer(ask, maps)

        parts.commands.put(
            ask.caller, ask.number, find, act, done, lambda: ask.caller.is_open, bodies=True
        )

    def _of_key(self, named: tuple[str, str]) -> list[int]:
        """The ids, ascending, of all tasks that may have the key. Raises LimitExceeded."""
        keys, limit = self._parts.core.keys, self._parts.limits.key_tasks_max
        count = keys.count(*named)
        if count > limit:
            raise LimitExceeded(
                f"{count} tasks have this key; the limit is {limit} (key_tasks_max): nothing was"
                " done; use their ids"
            )
        return keys.find(*named)

    def _each_of_key(
        self,
        ask: Ask[Any],
        verb: Callable[[int, TaskSnapshot | None, int], tuple[Any, ...]],
        nobody: tuple[Any, ...],
    ) -> None:
        """Answer what ``verb`` gives for each task of a key, oldest first; for none ``nobody``."""
        parts, named = self._parts, _named(ask.request)
        answers: list[tuple[Any, ...]] = []
        ids: list[int] = []

        def find() -> Sequence[int]:
            ids[:] = self._of_key(named)
            return ids

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            parts.border.act()
            now_ms = parts.clock.read().now_ms
            for index in some:
                found = known.get(ids[index])
                # One that has ended since it was found is none any more.
                if found is not None and _has_key(found, named):
                    answers.append(verb(ids[index], found, now_ms))

        def done() -> None:
            ended = None if answers else parts.core.keys.finished(*named)
            if ended is not None:
                answers.append(verb(ended, None, 0))
            parts.committer.answer(ask, answers or [nobody])
            parts.wake()

        parts.commands.put(ask.caller, ask.number, find, act, done)

    # --- dead letters --------------------------------------------------------------------------

    def requeue_dead(self, ask: Ask[Letters]) -> None:
        """Requeue dead letters ``(id, group)``. Raises Overloaded."""

        def requeue(pair: tuple[int, str], found: TaskSnapshot | None, now_ms: int) -> str:
            return self._control.requeue(*pair, found, now_ms)

        self._dead(ask, requeue)

    def delete_dead(self, ask: Ask[Letters]) -> None:
        """Delete dead letters ``(id, group)``. Raises Overloaded."""

        def delete(pair: tuple[int, str], found: TaskSnapshot | None, now_ms: int) -> str:
            return self._control.delete_dead(*pair, found)

        self._dead(ask, delete)

    def _dead(
        self,
        ask: Ask[Letters],
        verb: Callable[[tuple[int, str], TaskSnapshot | None, int], str],
    ) -> None:
        pairs = ask.request.pairs
        self._each(ask, [pair[0] for pair in pairs], pairs, verb)


def described(parts: Parts, known: TaskSnapshot) -> dict[str, Any]:
    """A live task as LOOKUP and LIST answer it."""
    now = parts.clock.read()
    control, wheel = parts.engine.control, parts.core.wheel
    groups = control.view(known, now.now_ms - now.mono_ms)
    due_ms = known.row.due_ms
    cycles = max(0, wheel.cycles_left(due_ms, now.now_ms))
    return task_map(known, control.state(known), wheel.slot_of(due_ms), cycles, groups)


def _delays(items: Sequence[Any], delay_ms_max: int) -> Sequence[int] | None:
    """The delays of the items, if all have a correct one, as is usual. None: look at each item."""
    if any(due_ms is not None for _, _, due_ms in items):
        return None
    delays_ms = [delay_ms for _, delay_ms, _ in items]
    if set(map(type, delays_ms)) != {int}:
        return None
    return delays_ms if 0 <= min(delays_ms) <= max(delays_ms) <= delay_ms_max else None


def _named(request: OfKey) -> tuple[str, str]:
    return request.topic, request.key


def _is_seen(task: TaskSnapshot | None, only: Only | None) -> bool:
    """Whether the caller may be told of the task."""
    return only is None or (task is not None and only(task.row.topic))


def _has_key(found: TaskSnapshot, named: tuple[str, str]) -> bool:
    """Whether the task has the key: equal hashes are not equal keys."""
    row = found.row
    return row.options is not None and (row.topic, row.options.key) == named


# --- page by page --------------------------------------------------------------------------------


class TaskPages:
    """What tasks and dead letters there are, page by page."""

    def __init__(self, parts: Parts, listings: Listings, value_bytes: ValueBytes) -> None:
        self._parts = parts
        self._listings = listings
        self._value_bytes = value_bytes

    def list_tasks(self, ask: Ask[TasksPage]) -> None:
        """A page of live tasks; ``next`` of the answer is ``after`` of the next page. Raises
        BadRequest, Overloaded."""
        wanted, limit = _Wanted.of(ask.request, ask.only), ask.request.limit
        self._listings.answer(ask, lambda: self._page(wanted, limit))

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
                    task, size = fitting(described(parts, known), bytes_max, self._value_bytes)
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
