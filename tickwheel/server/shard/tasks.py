"""Tasks that a selection names: cancelled, moved, looked up; the dead letters' verbs; what there is
of both, page by page.

A selection is ids, or a topic and a key: then it is about every task of the topic that has the key
and has not ended when its turn comes: tasks that landed before it was sent are among them. Each
task gets its own outcome. When none has the key, the answer is about the newest that ended lately,
or says that none is known. What is done is what a bulk operation of that kind does, at once.

``only``: a task of another topic is unknown, and so is whatever has ended, because nothing says any
more which topic it was of.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.api.tasks import PAGE, DeadPage, Letters, PeekPage, Requeue, TasksPage, TaskToExplain
from tickwheel.engine.explanation import (
    Around,
    Explained,
    Reason,
    explain,
    explain_absent,
    explain_filtered,
    explain_half,
    explain_no_key,
)
from tickwheel.engine.tasks import AT_ONCE
from tickwheel.engine.timetables import shown_time
from tickwheel.errors import BadRequest, LimitExceeded, shown
from tickwheel.history.read import UNFINISHED, outline
from tickwheel.limits import ID_MAX
from tickwheel.model.kinds import at_once
from tickwheel.model.records import (
    NO_BODY,
    DeadRow,
    TaskOptions,
    TaskRow,
    id_floor,
    task_bytes,
)
from tickwheel.server import checks
from tickwheel.server.shard.reads import IDS_PER_READ_MAX, Records
from tickwheel.server.shard.views import ValueBytes, dead_map, fitting, task_map

if TYPE_CHECKING:
    from tickwheel.api.tasks import LookUp, Move, Selection, Spread
    from tickwheel.engine.tasks import Done
    from tickwheel.history.read import Answer as Story
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.callers import Ask, Only
    from tickwheel.server.shard.parts import Listings, Parts

UNKNOWN = "unknown"
SCANNED_PER_REQUEST_MAX, BYTES_PER_REQUEST_MAX = 20_000, 256 << 20
"""Tasks, and bytes, that one request looks at; ``next`` of a shorter page says where to go on."""
STEP_FIRST, STEP_BYTES = 100, 16 << 20
"""Rows of the first read, and bytes of each later one: rows are read with their bodies."""
DUE = frozenset(("ready", "in_flight", "waiting"))
UNDELIVERED = DUE | {"scheduled"}
"""The states of tasks that have come due, and of all that still have to be delivered."""
NEWEST_LOOKED_AT = 100
"""How many of the newest ids with a key's hash are looked at: one of them has the key."""


class Controlling:
    """Commands on tasks."""

    def __init__(self, parts: Parts, value_bytes: ValueBytes) -> None:
        self._parts = parts
        self._control = parts.engine.control
        self._value_bytes = value_bytes

    def cancel(self, ask: Ask[Selection]) -> None:
        """Cancel tasks. Raises LimitExceeded, Overloaded."""
        self._change(ask, "cancel")

    def reschedule(self, ask: Ask[Move]) -> None:
        """Move tasks. Raises BadRequest, DueTooFar, LimitExceeded, Overloaded."""
        self._change(ask, "reschedule")

    def spread(self, ask: Ask[Spread]) -> None:
        """Move scheduled tasks to the emptiest ticks of a due window. Raises BadRequest,
        DueTooFar, LimitExceeded, Overloaded."""
        self._change(ask, "spread")

    def run_now(self, ask: Ask[Selection]) -> None:
        """Make tasks due now. Raises LimitExceeded, Overloaded."""
        self._change(ask, "run_now")

    def _change(self, ask: Ask[Any], kind: str) -> None:
        """Do to the selected tasks what bulk operations of this kind do: answers an outcome of
        each. One that is named twice is acted on once, and has the same outcome twice."""
        parts, chosen, only = self._parts, _Chosen(self._parts, ask.request), ask.only
        now_ms = ask.now.now_ms
        change = at_once(kind, checks.moved(kind, ask.request, now_ms, parts.limits), now_ms)
        done: dict[int, Done] = {}

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            parts.border.act()
            now_ms, most_ms = parts.clock.read().now_ms, parts.limits.delay_ms_max
            wanted = [task_id for task_id in chosen.some(some, known) if task_id not in done]
            if isinstance(known, Records):
                for topic, found in known.plain.items():
                    if only is None or only(topic):
                        plain = {i: found[i] for i in wanted if i in found}
                        keys = known.keys_of
                        done.update(bulks.act(change, (), topic, plain, keys, now_ms, most_ms))
            rest = []
            for task_id in wanted:
                if task_id in done:
                    continue
                task = known.get(task_id)
                if not _is_seen(task, only):
                    done[task_id] = UNKNOWN, None
                elif task is None:
                    done[task_id] = self._control.too_late(task_id), None
                else:
                    rest.append(task)
            done.update(bulks.act(change, rest, "", {}, {}, now_ms, most_ms))

        def answer() -> None:
            outcomes = [
                _outcome(task_id, *done[task_id]) for task_id in chosen.ids if task_id in done
            ]
            if not outcomes and chosen.named is not None:
                ended = chosen.ended
                word = UNKNOWN if ended is None else self._control.too_late(ended)
                outcomes = [(ended, word)]
            parts.committer.answer(ask, outcomes)
            parts.wake()

        bulks = parts.engine.bulks
        most = AT_ONCE.get(kind, IDS_PER_READ_MAX)
        parts.commands.put(ask.caller, ask.refuse, chosen.to_read, act, answer, at_once=most)

    def look_up(self, ask: Ask[LookUp]) -> None:
        """Answer a map for each id; for a key one for each unfinished task, the newest first, else
        one for the newest that ended lately, or none. Raises LimitExceeded, Overloaded."""
        request, only, caller, parts = ask.request, ask.only, ask.caller, self._parts
        chosen = _Chosen(parts, request)
        until_ms = ID_MAX if request.until_ms is None else request.until_ms
        end_id, bytes_max = id_floor(until_ms + 1, 0), parts.limits.frame_bytes_max // 2
        maps: list[dict[str, Any]] = []
        size = 0
        is_cut = False

        def find() -> Sequence[int]:
            chosen.ids = [i for i in reversed(chosen.find()) if i < end_id]
            if request.newest:
                chosen.ids = chosen.ids[:NEWEST_LOOKED_AT]
            return chosen.ids

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            nonlocal size, is_cut
            for task_id in chosen.some(some, known):
                if request.newest and maps and chosen.named is not None:
                    return
                task = self._described(task_id, known.get(task_id), only)
                task, task_bytes = fitting(task, bytes_max, self._value_bytes)
                size += task_bytes
                is_cut = is_cut or (size > bytes_max and bool(maps))
                if is_cut:
                    return
                maps.append(task)

        def done() -> None:
            if is_cut:
                of, fewer = chosen.told
                ask.refuse(
                    LimitExceeded(
                        f"what there is to say of {of} has {size} bytes or more; the limit is"
                        f" {bytes_max} (half of frame_bytes_max): ask for {fewer}"
                    )
                )
                return
            ended = None if maps else chosen.ended
            if ended is not None and ended < end_id:
                maps.append({"id": ended, "state": self._control.absent(ended)})
            if caller.is_open:
                parts.committer.answer(ask, maps)

        def is_wanted() -> bool:
            return caller.is_open and not is_cut

        to_read = chosen.ids if chosen.named is None else find
        parts.commands.put(caller, ask.refuse, to_read, act, done, is_wanted, bodies=True)

    def _described(
        self, task_id: int, task: TaskSnapshot | None, only: Only | None
    ) -> dict[str, Any]:
        if not _is_seen(task, only):
            return {"id": task_id, "state": UNKNOWN}
        if task is None:
            return {"id": task_id, "state": self._control.absent(task_id)}
        return described(self._parts, task)

    # --- dead letters --------------------------------------------------------------------------

    def requeue_dead(self, ask: Ask[Requeue]) -> None:
        """Requeue dead letters ``(id, group)``. Raises Overloaded."""
        self._dead(ask, "requeue", ask.request.ttl_ms)

    def delete_dead(self, ask: Ask[Letters]) -> None:
        """Delete dead letters ``(id, group)``. Raises Overloaded."""
        self._dead(ask, "delete")

    def _dead(self, ask: Ask[Any], kind: str, ttl_ms: int | None = None) -> None:
        """Do to each dead letter what bulk operations of this kind do; answers a word for each. One
        that is named twice is acted on once, and has the same word twice."""
        parts, pairs, only = self._parts, ask.request.pairs, ask.only
        words: dict[tuple[int, str], str] = {}

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            parts.border.act()
            now_ms = parts.clock.read().now_ms
            for index in some:
                task_id, group = pair = pairs[index]
                if pair not in words:
                    task, words[pair] = known.get(task_id), UNKNOWN
                    if _is_seen(task, only):
                        words[pair] = self._control.settle_dead(
                            kind, task_id, group, task, now_ms, ttl_ms
                        )

        def done() -> None:
            answer = [words[pair] for pair in pairs]
            parts.committer.answer(ask, answer)
            parts.wake()

        parts.commands.put(ask.caller, ask.refuse, [pair[0] for pair in pairs], act, done)


OTHERS_MAX = 32
"""Other groups of a task that an explanation has."""
CLOCK_COMMAND = "kill -USR1 {pid}"
"""What makes the daemon believe its clock, on its machine."""


class Explaining:
    """Why tasks are where they are. What memory does not know of one that has ended is looked for
    in the history, where one is kept."""

    def __init__(
        self, parts: Parts, story: Callable[[int], Awaitable[Story]] | None, lookups: Listings
    ) -> None:
        """``story``: the events of a task, as the history has them; None: none is kept."""
        self._parts = parts
        self._story = story
        self._lookups = lookups

    def explain(self, ask: Ask[TaskToExplain]) -> None:
        """Answer one cause, a sentence and a command. Raises LimitExceeded, Overloaded."""
        parts, chosen, only = self._parts, _Chosen(self._parts, ask.request), ask.only
        found: list[dict[str, Any]] = []

        def find() -> Sequence[int]:
            chosen.ids = list(reversed(chosen.find()))[:NEWEST_LOOKED_AT]
            return chosen.ids

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            for task_id in chosen.some(some, known):
                task = known.get(task_id)
                if found or task is None or not _is_seen(task, only):
                    continue
                reasons = explain(parts.core, parts.engine.control, task, self._around(only))
                found.append(_explained(task_id, task.row.topic, reasons))

        def done() -> None:
            if found:
                parts.committer.answer(ask, found[0])
            else:
                self._absent(ask, chosen)

        to_read = chosen.ids if chosen.named is None else find
        parts.commands.put(ask.caller, ask.refuse, to_read, act, done, lambda: ask.caller.is_open)

    def _around(self, only: Only | None) -> Around:
        clock = self._parts.clock
        now = clock.read()
        around = Around(now.now_ms, now.mono_ms, only or _any_topic)
        if not clock.held:
            return around
        command = CLOCK_COMMAND.format(pid=os.getpid())
        return around._replace(clock_ms=now.now_ms + clock.ahead_ms, accept_clock=command)

    def _absent(self, ask: Ask[TaskToExplain], chosen: _Chosen) -> None:
        """Answer about a task that is not stored, or that may not be seen."""
        parts, only, named = self._parts, ask.only, chosen.named
        core, control = parts.core, parts.engine.control
        task_id, topic = ask.request.id, None
        if named is not None:
            topic, key = named
            may_see = only is None or only(topic)
            reason = explain_half(core, topic, key) if may_see else None
            task_id = chosen.ended if may_see and reason is None else None
            if task_id is None:
                reason = reason or explain_no_key(core, topic, key, self._around(only))
                parts.committer.answer(ask, _explained(None, topic, [reason]))
                return
        assert task_id is not None
        reason = explain_absent(core, control, task_id)
        if only is not None and named is None:  # nothing says any more which topic it was of
            reason = Reason(Explained.NOT_FOUND, f"No task {task_id} is known.", "tickwheel list")
        if self._story is None:
            parts.committer.answer(ask, _explained(task_id, topic, [reason]))
            return
        told = partial(self._story, task_id)
        self._lookups.answer(ask, partial(self._with_history, told, task_id, topic, reason, only))

    async def _with_history(
        self,
        told: Callable[[], Awaitable[Story]],
        task_id: int,
        topic: str | None,
        reason: Reason,
        only: Only | None,
    ) -> dict[str, Any]:
        """The reason with what the history knows."""
        events, _ = await told()
        events = [one for one in events if only is None or only(str(one.get("topic", "")))]
        if not events:
            if reason.cause in (Explained.GONE, Explained.NOT_FOUND):
                reason = reason._replace(detail=f"{reason.detail} The history has nothing of it.")
            return _explained(task_id, topic, [reason])
        known = outline(task_id, events)
        last, state = events[-1], known["state"]
        text = f"{str(last['event']).replace('_', ' ')} {shown_time(int(last['time_ms']))}"
        text += "".join(f", {name} {last[name]}" for name in ("group", "attempt") if last.get(name))
        if last.get("reason"):
            text += f", because {str(last['reason'])[:REASON_SHOWN]}"
        of = known.get("topic") or topic
        if state != UNFINISHED and state in set(Explained):
            reason = reason._replace(cause=Explained(state))
        said = "It has ended" if state != UNFINISHED else "It is not stored here"
        detail = f"{said}; the last that the history of topic {of} has of it: {text}."
        if reason.cause is Explained.FILTERED and of is not None:
            left_out = explain_filtered(self._parts.core, _as_it_was(task_id, of, known))
            if left_out:
                return _explained(task_id, of, left_out)
        return _explained(task_id, of, [reason._replace(detail=detail)])


def _as_it_was(task_id: int, topic: str, known: Mapping[str, Any]) -> TaskRow:
    """What filters judge of a task, as the history has it."""
    names = ("key", "tag", "properties", "priority")
    said = {name: known[name] for name in names if known.get(name) is not None}
    return TaskRow(task_id, known["due_ms"] or 0, topic, NO_BODY, TaskOptions(**said))


REASON_SHOWN = 200
"""Characters of a reason that are shown."""


def _any_topic(name: str) -> bool:
    return True


def _explained(task_id: int | None, topic: str | None, reasons: Sequence[Reason]) -> dict[str, Any]:
    first, *others = reasons
    return {
        "id": task_id,
        "topic": topic,
        **first._asdict(),
        "others": [one._asdict() for one in others[:OTHERS_MAX]],
        "others_left_out": max(0, len(others) - OTHERS_MAX),
    }


class _Chosen:
    """The tasks that one selection names: the one place where ids are found for it."""

    def __init__(self, parts: Parts, selection: Selection | TaskToExplain) -> None:
        self._parts = parts
        self.ids: Sequence[int] = selection.ids or ()
        """Those of the selection, or all that may have its key, once they were found."""
        self.named: tuple[str, str] | None = None
        """The topic and the key; None: the selection has ids."""
        if selection.topic is not None and selection.key is not None:
            self.named = selection.topic, selection.key

    @property
    def to_read(self) -> Sequence[int] | Callable[[], Sequence[int]]:
        """The ids, or what finds them when they can be read."""
        return self.ids if self.named is None else self.find

    def find(self) -> Sequence[int]:
        """The ids, ascending, of all tasks that may have the key. Raises LimitExceeded."""
        assert self.named is not None
        keys, limit = self._parts.core.keys, self._parts.limits.key_tasks_max
        count = keys.count(*self.named)
        if count > limit:
            raise LimitExceeded(
                f"{count} tasks have this key; the limit is {limit} (key_tasks_max): nothing was"
                " done; use their ids"
            )
        self.ids = keys.find(*self.named)
        return self.ids

    def some(self, part: range, known: Mapping[int, TaskSnapshot]) -> Sequence[int]:
        """The ids of a part: of a key those of tasks that have it and have not ended since."""
        ids = self.ids[part.start : part.stop]
        if self.named is None:
            return ids
        return [i for i in ids if (task := known.get(i)) is not None and self._has_key(task)]

    def _has_key(self, task: TaskSnapshot) -> bool:
        """Whether the task has the key: equal hashes are not equal keys."""
        row = task.row
        return row.options is not None and (row.topic, row.options.key) == self.named

    @property
    def ended(self) -> int | None:
        """The task with the key that ended last, as far as that is known."""
        return None if self.named is None else self._parts.core.keys.finished(*self.named)

    @property
    def told(self) -> tuple[str, str]:
        """What it is, and what would be less, for a message."""
        if self.named is None:
            return f"the {len(self.ids)} ids", "fewer"
        return "the tasks with this key", "the newest"


def described(parts: Parts, known: TaskSnapshot) -> dict[str, Any]:
    """A live task as LOOKUP and LIST answer it."""
    now = parts.clock.read()
    control, wheel = parts.engine.control, parts.core.wheel
    groups = control.view(known, now.now_ms - now.mono_ms)
    due_ms = known.row.due_ms
    cycles = max(0, wheel.cycles_left(due_ms, now.now_ms))
    return task_map(known, control.state(known), wheel.slot_of(due_ms), cycles, groups)


def _outcome(task_id: int, word: str, due_ms: int | None) -> tuple[Any, ...]:
    return (task_id, word) if due_ms is None else (task_id, word, due_ms)


def _is_seen(task: TaskSnapshot | None, only: Only | None) -> bool:
    """Whether the caller may be told of the task."""
    return only is None or (task is not None and only(task.row.topic))


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

    def peek(self, ask: Ask[PeekPage]) -> None:
        """A page of the tasks that a topic still has to deliver. Raises Overloaded."""
        asked = ask.request
        page = TasksPage(
            topic=asked.topic, key=asked.key, newest=asked.newest, after=asked.after, until_ms=None
        )
        wanted = replace(_Wanted.of(page), states=DUE if asked.due else UNDELIVERED)
        self._listings.answer(ask, lambda: self._page(wanted, asked.limit))

    async def _page(self, wanted: _Wanted, limit: int) -> dict[str, Any]:
        parts = self._parts
        bytes_left = bytes_max = parts.limits.frame_bytes_max // 2
        found: list[dict[str, Any]] = []
        scanned = scanned_bytes = 0
        position, step = wanted.start_id, STEP_FIRST
        ids = self._ids_of_key(wanted)
        while True:
            # What matches little is looked for in large steps, however few are asked for.
            step = min(step, PAGE.high if wanted.is_selective else limit - len(found))
            if ids is None:
                page, following = await parts.reader.scan(
                    position, step, wanted.store_topic, back=wanted.newest
                )
            else:
                page, following = await self._indexed(ids, step)
            page_bytes = sum(task_bytes(known.row) for known in page)
            for known in page:
                if known.row.id >= wanted.end_id and not wanted.newest:
                    return {"tasks": found, "next": None}
                if len(found) >= limit:
                    return {"tasks": found, "next": position}
                if wanted.fits(known) and (
                    wanted.states is None or parts.engine.control.state(known) in wanted.states
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

    def _ids_of_key(self, wanted: _Wanted) -> list[int] | None:
        """The ids of the tasks that may have the key, in the order of the listing; None: they are
        looked for in the store, because nobody names a topic, or so many tasks have the key that to
        sort their ids would hold up the loop."""
        if wanted.key is None or wanted.topic is None:
            return None
        parts, keys = self._parts, self._parts.core.keys
        if keys.count(wanted.topic, wanted.key) > parts.limits.key_tasks_max:
            return None
        ids = keys.find(wanted.topic, wanted.key)
        if wanted.newest:
            return [task_id for task_id in reversed(ids) if task_id < wanted.start_id]
        return ids[bisect_right(ids, wanted.start_id) :]

    async def _indexed(self, ids: list[int], step: int) -> tuple[list[TaskSnapshot], int | None]:
        """What ``Reader.scan`` answers, of the first of these ids, which leave the list."""
        some = ids[:step]
        async with self._parts.reader.read_some(some, STEP_BYTES) as (view, rest):
            looked_at = some[: len(some) - len(rest)]
            found = view(looked_at)
        del ids[: len(looked_at)]
        page = [found[task_id] for task_id in looked_at if task_id in found]
        return page, looked_at[-1] if ids else None

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
    states: frozenset[str] | None
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
        states = None if asked.state is None else frozenset((asked.state,))
        return cls(asked.topic, states, asked.key, has, asked.newest, start_id, end_id, only)

    @property
    def is_selective(self) -> bool:
        is_partial = self.only is not None and self.topic is None
        asked = self.key, self.states, self.has
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
