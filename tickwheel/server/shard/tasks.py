"""Operations on selected tasks and dead letters: cancel, move, look up, explain, list.

A selection consists of ids, or of a topic and a key. By key it contains every unfinished task that
has the key when the request is processed, which includes all tasks that landed before the request
was sent. Each task has its own outcome. If no unfinished task has the key, the answer describes the
newest remembered task with the key that has ended, if there is one. A change has the same effect as
a bulk operation of the same kind.

To a caller with a topic filter, tasks of other topics appear as unknown. So do ended tasks, because
their topics are no longer recorded.
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
    ExplainContext,
    Explained,
    Reason,
    explain,
    explain_absent,
    explain_filtered,
    explain_half,
    explain_no_key,
)
from tickwheel.engine.tasks import TASKS_PER_STEP_MAX
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
from tickwheel.server.shard.reads import IDS_PER_READ_MAX, Find, Records
from tickwheel.server.shard.views import ValueBytes, dead_map, fitting, task_map

if TYPE_CHECKING:
    from tickwheel.api.tasks import LookUp, Move, Selection, Spread
    from tickwheel.engine.tasks import Done
    from tickwheel.history.read import Answer as Story
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.callers import Call, TopicFilter
    from tickwheel.server.shard.parts import Parts, SlowRequests

UNKNOWN = "unknown"
SCANNED_PER_REQUEST_MAX, BYTES_PER_REQUEST_MAX = 20_000, 256 << 20
"""Maximum number of tasks and bytes that one request examines; ``next`` of a shorter page continues
it."""
STEP_FIRST, STEP_BYTES = 100, 16 << 20
"""Number of rows of the first read, and target bytes of each later read. Rows are read with their
bodies."""
DUE = frozenset(("ready", "in_flight", "waiting"))
UNDELIVERED = DUE | {"scheduled"}
"""The states of due tasks, and of all tasks that must still be delivered."""
NEWEST_EXAMINED_MAX = 100
"""Number of the newest ids with a key's hash that are examined to find one with the key."""


class Controlling:
    """Operations on tasks."""

    def __init__(self, parts: Parts, value_bytes: ValueBytes) -> None:
        self._parts = parts
        self._control = parts.engine.control
        self._value_bytes = value_bytes

    def cancel(self, call: Call[Selection]) -> None:
        """Cancel tasks. Raise LimitExceeded, Overloaded."""
        self._change(call, "cancel")

    def reschedule(self, call: Call[Move]) -> None:
        """Move tasks. Raise BadRequest, DueTooFar, LimitExceeded, Overloaded."""
        self._change(call, "reschedule")

    def spread(self, call: Call[Spread]) -> None:
        """Move scheduled tasks to the emptiest ticks of a due window. Raise BadRequest, DueTooFar,
        LimitExceeded, Overloaded."""
        self._change(call, "spread")

    def run_now(self, call: Call[Selection]) -> None:
        """Make tasks due now. Raise LimitExceeded, Overloaded."""
        self._change(call, "run_now")

    def _change(self, call: Call[Any], kind: str) -> None:
        """Change the selected tasks like a bulk operation of this kind, and answer with their
        outcomes. A task that is named twice is changed once, and its outcome appears twice in the
        answer."""
        parts, selected, topic_filter = (
            self._parts,
            _Selected(self._parts, call.request),
            call.topic_filter,
        )
        now_ms = call.now.now_ms
        change = at_once(kind, checks.moved(kind, call.request, now_ms, parts.limits), now_ms)
        done: dict[int, Done] = {}

        def act(indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> None:
            parts.border.act()
            now_ms, most_ms = parts.clock.read().now_ms, parts.limits.delay_ms_max
            wanted = [i for i in selected.ids_of(indexes, snapshots) if i not in done]
            if isinstance(snapshots, Records):
                for topic, dues_ms in snapshots.plain.items():
                    if topic_filter is None or topic_filter(topic):
                        plain = {i: dues_ms[i] for i in wanted if i in dues_ms}
                        keys = snapshots.keys_of
                        done.update(bulks.act(change, (), topic, plain, keys, now_ms, most_ms))
            rest = []
            for task_id in wanted:
                if task_id in done:
                    continue
                task = snapshots.get(task_id)
                if not _is_visible(task, topic_filter):
                    done[task_id] = UNKNOWN, None
                elif task is None:
                    done[task_id] = self._control.too_late(task_id), None
                else:
                    rest.append(task)
            done.update(bulks.act(change, rest, "", {}, {}, now_ms, most_ms))

        def answer() -> None:
            outcomes = [
                _outcome(task_id, *done[task_id]) for task_id in selected.ids if task_id in done
            ]
            if not outcomes and selected.topic_and_key is not None:
                ended = selected.ended
                word = UNKNOWN if ended is None else self._control.too_late(ended)
                outcomes = [(ended, word)]
            parts.committer.answer(call, outcomes)
            parts.wake()

        bulks = parts.engine.bulks
        most = TASKS_PER_STEP_MAX.get(kind, IDS_PER_READ_MAX)
        parts.commands.put(
            call.caller, call.refuse, selected.to_read, act, answer, ids_per_turn=most
        )

    def look_up(self, call: Call[LookUp]) -> None:
        """Answer with a map for each id, or for each unfinished task with the key, newest first. If
        no unfinished task has the key, answer with the newest remembered task that has ended, if
        any. Raise LimitExceeded, Overloaded."""
        request, topic_filter, caller, parts = (
            call.request,
            call.topic_filter,
            call.caller,
            self._parts,
        )
        selected = _Selected(parts, request)
        until_ms = ID_MAX if request.until_ms is None else request.until_ms
        end_id, bytes_max = id_floor(until_ms + 1, 0), parts.limits.frame_bytes_max // 2
        maps: list[dict[str, Any]] = []
        size = 0
        is_cut = False

        def find() -> tuple[Sequence[int], int]:
            ids, steps = selected.find()
            selected.ids = [i for i in reversed(ids) if i < end_id]
            if request.newest:
                selected.ids = selected.ids[:NEWEST_EXAMINED_MAX]
            return selected.ids, steps

        def act(indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> None:
            nonlocal size, is_cut
            for task_id in selected.ids_of(indexes, snapshots):
                if request.newest and maps and selected.topic_and_key is not None:
                    return
                task = self._described(task_id, snapshots.get(task_id), topic_filter)
                task, task_bytes = fitting(task, bytes_max, self._value_bytes)
                size += task_bytes
                is_cut = is_cut or (size > bytes_max and bool(maps))
                if is_cut:
                    return
                maps.append(task)

        def done() -> None:
            if is_cut:
                subject, fewer = selected.described
                call.refuse(
                    LimitExceeded(
                        f"the answer for {subject} has at least {size} bytes; the limit is"
                        f" {bytes_max} (half of frame_bytes_max): ask for {fewer}"
                    )
                )
                return
            ended = None if maps else selected.ended
            if ended is not None and ended < end_id:
                maps.append({"id": ended, "state": self._control.absent(ended)})
            if caller.is_open:
                parts.committer.answer(call, maps)

        def is_wanted() -> bool:
            return caller.is_open and not is_cut

        to_read = selected.ids if selected.topic_and_key is None else find
        parts.commands.put(caller, call.refuse, to_read, act, done, is_wanted, bodies=True)

    def _described(
        self, task_id: int, task: TaskSnapshot | None, topic_filter: TopicFilter | None
    ) -> dict[str, Any]:
        if not _is_visible(task, topic_filter):
            return {"id": task_id, "state": UNKNOWN}
        if task is None:
            return {"id": task_id, "state": self._control.absent(task_id)}
        return described(self._parts, task)

    # --- dead letters --------------------------------------------------------------------------

    def requeue_dead(self, call: Call[Requeue]) -> None:
        """Requeue dead letters ``(id, group)``. Raise Overloaded."""
        self._settle_dead(call, "requeue", call.request.ttl_ms)

    def delete_dead(self, call: Call[Letters]) -> None:
        """Delete dead letters ``(id, group)``. Raise Overloaded."""
        self._settle_dead(call, "delete")

    def _settle_dead(self, call: Call[Any], kind: str, ttl_ms: int | None = None) -> None:
        """Change dead letters like a bulk operation of this kind, and answer with a word for each.
        A dead letter that is named twice is changed once, and its word appears twice in the
        answer."""
        parts, pairs, topic_filter = self._parts, call.request.pairs, call.topic_filter
        words: dict[tuple[int, str], str] = {}

        def act(indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> None:
            parts.border.act()
            now_ms = parts.clock.read().now_ms
            for index in indexes:
                task_id, group = pair = pairs[index]
                if pair not in words:
                    task, words[pair] = snapshots.get(task_id), UNKNOWN
                    if _is_visible(task, topic_filter):
                        words[pair] = self._control.settle_dead(
                            kind, task_id, group, task, now_ms, ttl_ms
                        )

        def done() -> None:
            answer = [words[pair] for pair in pairs]
            parts.committer.answer(call, answer)
            parts.wake()

        parts.commands.put(call.caller, call.refuse, [pair[0] for pair in pairs], act, done)


OTHERS_MAX = 32
"""Maximum number of other groups of a task in an explanation."""
CLOCK_COMMAND = "kill -USR1 {pid}"
"""The shell command that makes the daemon accept its clock."""


class Explaining:
    """Explains the states of tasks. Ended tasks are explained from the history if one is kept."""

    def __init__(
        self, parts: Parts, story: Callable[[int], Awaitable[Story]] | None, lookups: SlowRequests
    ) -> None:
        """``story`` returns the events of a task from the history; None if no history is kept."""
        self._parts = parts
        self._story = story
        self._lookups = lookups

    def explain(self, call: Call[TaskToExplain]) -> None:
        """Answer with the cause, a sentence and a command. Raise LimitExceeded, Overloaded."""
        parts, selected, topic_filter = (
            self._parts,
            _Selected(self._parts, call.request),
            call.topic_filter,
        )
        explanations: list[dict[str, Any]] = []

        def find() -> tuple[Sequence[int], int]:
            ids, steps = selected.find()
            selected.ids = ids[: -NEWEST_EXAMINED_MAX - 1 : -1]
            return selected.ids, steps

        def act(indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> None:
            for task_id in selected.ids_of(indexes, snapshots):
                task = snapshots.get(task_id)
                if explanations or task is None or not _is_visible(task, topic_filter):
                    continue
                reasons = explain(
                    parts.core, parts.engine.control, task, self._context(topic_filter)
                )
                explanations.append(_explained(task_id, task.row.topic, reasons))

        def done() -> None:
            if explanations:
                parts.committer.answer(call, explanations[0])
            else:
                self._explain_absent(call, selected)

        to_read = selected.ids if selected.topic_and_key is None else find
        parts.commands.put(
            call.caller, call.refuse, to_read, act, done, lambda: call.caller.is_open
        )

    def _context(self, topic_filter: TopicFilter | None) -> ExplainContext:
        clock = self._parts.clock
        now = clock.read()
        context = ExplainContext(now.now_ms, now.mono_ms, topic_filter or _any_topic)
        if not clock.held:
            return context
        command = CLOCK_COMMAND.format(pid=os.getpid())
        return context._replace(clock_ms=now.now_ms + clock.ahead_ms, accept_clock=command)

    def _explain_absent(self, call: Call[TaskToExplain], selected: _Selected) -> None:
        """Answer with the explanation of a task that is not stored or that is hidden."""
        parts, topic_filter, topic_and_key = self._parts, call.topic_filter, selected.topic_and_key
        core, control = parts.core, parts.engine.control
        task_id, topic = call.request.id, None
        if topic_and_key is not None:
            topic, key = topic_and_key
            context = self._context(topic_filter)
            reason = explain_half(core, topic, key, context)
            task_id = selected.ended if reason is None else None
            if task_id is None:
                reason = reason or explain_no_key(core, topic, key, context)
                parts.committer.answer(call, _explained(None, topic, [reason]))
                return
        assert task_id is not None
        reason = explain_absent(core, control, task_id)
        if topic_filter is not None and topic_and_key is None:  # the topic is no longer recorded
            reason = Reason(Explained.NOT_FOUND, f"No task {task_id} is known.", "tickwheel list")
        if self._story is None:
            parts.committer.answer(call, _explained(task_id, topic, [reason]))
            return
        look_up = partial(self._story, task_id)
        with_history = partial(self._with_history, look_up, task_id, topic, reason, topic_filter)
        self._lookups.answer(call, with_history)

    async def _with_history(
        self,
        look_up: Callable[[], Awaitable[Story]],
        task_id: int,
        topic: str | None,
        reason: Reason,
        topic_filter: TopicFilter | None,
    ) -> dict[str, Any]:
        """Return the explanation, completed with details from the history."""
        events, _ = await look_up()
        events = [
            event
            for event in events
            if topic_filter is None or topic_filter(str(event.get("topic", "")))
        ]
        if not events:
            if reason.cause in (Explained.GONE, Explained.NOT_FOUND):
                reason = reason._replace(detail=f"{reason.detail} The history does not contain it.")
            return _explained(task_id, topic, [reason])
        task = outline(task_id, events)
        last, state = events[-1], task["state"]
        text = f"{str(last['event']).replace('_', ' ')} {shown_time(int(last['time_ms']))}"
        text += "".join(f", {name} {last[name]}" for name in ("group", "attempt") if last.get(name))
        if last.get("reason"):
            text += f", because {str(last['reason'])[:REASON_LENGTH]}"
        topic = task.get("topic") or topic
        if state != UNFINISHED and state in set(Explained):
            reason = reason._replace(cause=Explained(state))
        status = "It has ended" if state != UNFINISHED else "It is not stored here"
        detail = f"{status}; its last event in the history of topic {topic}: {text}."
        if reason.cause is Explained.FILTERED and topic is not None:
            reasons = explain_filtered(self._parts.core, _past_row(task_id, topic, task))
            if reasons:
                return _explained(task_id, topic, reasons)
        return _explained(task_id, topic, [reason._replace(detail=detail)])


def _past_row(task_id: int, topic: str, task: Mapping[str, Any]) -> TaskRow:
    """Return a row with the fields that filters examine, from an outline of the history."""
    names = ("key", "tag", "properties", "priority")
    options = {name: task[name] for name in names if task.get(name) is not None}
    return TaskRow(task_id, task["due_ms"] or 0, topic, NO_BODY, TaskOptions(**options))


REASON_LENGTH = 200
"""Number of characters of a reason that are shown."""


def _any_topic(name: str) -> bool:
    return True


def _explained(task_id: int | None, topic: str | None, reasons: Sequence[Reason]) -> dict[str, Any]:
    first, *others = reasons
    return {
        "id": task_id,
        "topic": topic,
        **first._asdict(),
        "others": [reason._asdict() for reason in others[:OTHERS_MAX]],
        "others_left_out": max(0, len(others) - OTHERS_MAX),
    }


class _Selected:
    """The tasks of a selection. It finds the ids for a key."""

    def __init__(self, parts: Parts, selection: Selection | TaskToExplain) -> None:
        self._parts = parts
        self.ids: Sequence[int] = selection.ids or ()
        """The ids of the selection, or, after ``find``, the ids of all tasks that may have its
        key."""
        self.topic_and_key: tuple[str, str] | None = None
        """The topic and key; None if the selection has ids."""
        if selection.topic is not None and selection.key is not None:
            self.topic_and_key = selection.topic, selection.key

    @property
    def to_read(self) -> Sequence[int] | Find:
        """The ids, or the function that finds them when they can be read."""
        return self.ids if self.topic_and_key is None else self.find

    def find(self) -> tuple[Sequence[int], int]:
        """Return (ids, ascending, of all tasks that may have the key; number of steps). Raise
        LimitExceeded."""
        assert self.topic_and_key is not None
        keys, limit = self._parts.core.keys, self._parts.limits.key_tasks_max
        count = keys.count(*self.topic_and_key)
        if count > limit:
            raise LimitExceeded(
                f"{count} tasks have this key; the limit is {limit} (key_tasks_max): nothing was"
                " done; use their ids"
            )
        self.ids = keys.find(*self.topic_and_key)
        return self.ids, count

    def ids_of(self, indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> Sequence[int]:
        """Return the ids at ``indexes``. For a key, return only those of unfinished tasks that have
        the key."""
        ids = self.ids[indexes.start : indexes.stop]
        if self.topic_and_key is None:
            return ids
        return [i for i in ids if (task := snapshots.get(i)) is not None and self._has_key(task)]

    def _has_key(self, task: TaskSnapshot) -> bool:
        """Return whether the task has the key. Different keys can have the same hash."""
        row = task.row
        return row.options is not None and (row.topic, row.options.key) == self.topic_and_key

    @property
    def ended(self) -> int | None:
        """The remembered task with the key that ended last, or None."""
        if self.topic_and_key is None:
            return None
        return self._parts.core.keys.finished(*self.topic_and_key)

    @property
    def described(self) -> tuple[str, str]:
        """The selection, and a smaller one, as texts for messages."""
        if self.topic_and_key is None:
            return f"the {len(self.ids)} ids", "fewer"
        return "the tasks with this key", "the newest"


def described(parts: Parts, task: TaskSnapshot) -> dict[str, Any]:
    """Return an unfinished task as the map that LOOKUP and LIST use."""
    now = parts.clock.read()
    control, wheel = parts.engine.control, parts.core.wheel
    groups = control.view(task, now.now_ms - now.mono_ms)
    due_ms = task.row.due_ms
    cycles = max(0, wheel.cycles_left(due_ms, now.now_ms))
    return task_map(task, control.state(task), wheel.slot_of(due_ms), cycles, groups)


def _outcome(task_id: int, word: str, due_ms: int | None) -> tuple[Any, ...]:
    return (task_id, word) if due_ms is None else (task_id, word, due_ms)


def _is_visible(task: TaskSnapshot | None, topic_filter: TopicFilter | None) -> bool:
    """Return whether the caller may see the task."""
    return topic_filter is None or (task is not None and topic_filter(task.row.topic))


# --- pages ---------------------------------------------------------------------------------------


class TaskPages:
    """Lists tasks and dead letters in pages."""

    def __init__(self, parts: Parts, listings: SlowRequests, value_bytes: ValueBytes) -> None:
        self._parts = parts
        self._listings = listings
        self._value_bytes = value_bytes

    def list_tasks(self, call: Call[TasksPage]) -> None:
        """Answer with a page of unfinished tasks. Raise BadRequest, Overloaded. ``next`` is the
        ``after`` of the next page."""
        wanted, limit = _Conditions.of(call.request, call.topic_filter), call.request.limit
        self._listings.answer(call, lambda: self._page(wanted, limit))

    def peek(self, call: Call[PeekPage]) -> None:
        """Answer with a page of the tasks that a topic must still deliver. Raise Overloaded."""
        request = call.request
        page = TasksPage(
            topic=request.topic,
            key=request.key,
            newest=request.newest,
            after=request.after,
            until_ms=None,
        )
        wanted = replace(_Conditions.of(page), states=DUE if request.due else UNDELIVERED)
        self._listings.answer(call, lambda: self._page(wanted, request.limit))

    async def _page(self, wanted: _Conditions, limit: int) -> dict[str, Any]:
        parts = self._parts
        bytes_left = bytes_max = parts.limits.frame_bytes_max // 2
        tasks: list[dict[str, Any]] = []
        scanned = scanned_bytes = 0
        position, step = wanted.start_id, STEP_FIRST
        ids = self._ids_of_key(wanted)
        while True:
            # A selective search reads in large steps even if the limit is small.
            step = min(step, PAGE.high if wanted.is_selective else limit - len(tasks))
            if ids is None:
                page, following = await parts.reader.scan(
                    position, step, wanted.store_topic, back=wanted.newest
                )
            else:
                page, following = await self._indexed(ids, step)
            page_bytes = sum(task_bytes(snapshot.row) for snapshot in page)
            for snapshot in page:
                if snapshot.row.id >= wanted.end_id and not wanted.newest:
                    return {"tasks": tasks, "next": None}
                if len(tasks) >= limit:
                    return {"tasks": tasks, "next": position}
                if wanted.fits(snapshot) and (
                    wanted.states is None or parts.engine.control.state(snapshot) in wanted.states
                ):
                    task, size = fitting(described(parts, snapshot), bytes_max, self._value_bytes)
                    if tasks and size > bytes_left:
                        return {"tasks": tasks, "next": position}
                    tasks.append(task)
                    bytes_left -= size
                position = snapshot.row.id
            if following is None:
                return {"tasks": tasks, "next": None}
            position = following
            scanned += step
            scanned_bytes += page_bytes
            is_much = scanned >= SCANNED_PER_REQUEST_MAX or scanned_bytes >= BYTES_PER_REQUEST_MAX
            if len(tasks) >= limit or is_much:
                return {"tasks": tasks, "next": position}
            step = min(4 * step, 1 + step * STEP_BYTES // (page_bytes + 1))
            step = min(step, SCANNED_PER_REQUEST_MAX - scanned)

    def _ids_of_key(self, wanted: _Conditions) -> list[int] | None:
        """Return the ids of the tasks that may have the key, in the order of the listing. Return
        None if the store has to be searched, because there is no topic, or because sorting the ids
        of the key's tasks would block the loop."""
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
        """Remove the first ids from the list, and return their page as ``Reader.scan`` does."""
        step_ids = ids[:step]
        async with self._parts.reader.read_some(step_ids, STEP_BYTES) as (view, rest):
            read_ids = step_ids[: len(step_ids) - len(rest)]
            tasks = view(read_ids)
        del ids[: len(read_ids)]
        page = [tasks[task_id] for task_id in read_ids if task_id in tasks]
        return page, read_ids[-1] if ids else None

    def list_dead(self, call: Call[DeadPage]) -> None:
        """Answer with a page of dead letters, sorted by id and group. Raise Overloaded."""
        request = call.request
        since_ms = 0 if request.since_ms is None else request.since_ms
        until_ms = ID_MAX if request.until_ms is None else request.until_ms
        reason = (request.reason or "").casefold()

        def fits(row: DeadRow) -> bool:
            in_time = since_ms <= row.died_ms <= until_ms
            return in_time and reason in row.reason.casefold()

        is_seen = call.topic_filter or _any_topic
        self._listings.answer(call, partial(self._dead_page, request, is_seen, fits))

    async def _dead_page(
        self, request: DeadPage, is_seen: TopicFilter, fits: Callable[[DeadRow], bool]
    ) -> dict[str, Any]:
        after, limit = request.after or (0, ""), request.limit
        await self._parts.committer.barrier()
        letters: list[dict[str, Any]] = []
        scanned, bytes_left = 0, self._parts.limits.frame_bytes_max // 2
        while True:
            rows = await self._parts.store.scan_dead(after, PAGE.high, request.topic, request.group)
            for row in rows:
                if len(letters) >= limit:
                    return {"dead": letters, "next": after}
                if is_seen(row.topic) and fits(row):
                    letter = dead_map(row)
                    bytes_left -= self._value_bytes(letter)
                    if letters and bytes_left < 0:
                        return {"dead": letters, "next": after}
                    letters.append(letter)
                # A page must not begin with the group of a topic that the caller may not see.
                after = (row.id, row.group) if is_seen(row.topic) else (row.id + 1, "")
            scanned += len(rows)
            if len(rows) < PAGE.high:
                return {"dead": letters, "next": None}
            if len(letters) >= limit or scanned >= SCANNED_PER_REQUEST_MAX:
                return {"dead": letters, "next": after}


@dataclass(frozen=True, slots=True)
class _Conditions:
    """The conditions of a LIST request."""

    topic: str | None
    states: frozenset[str] | None
    key: str | None
    has: _Has | None
    newest: bool
    start_id: int
    """The page begins after this id, or, if the newest tasks come first, below it."""
    end_id: int
    """Tasks with this id or a higher one were enqueued after ``until_ms``."""
    topic_filter: TopicFilter | None

    @classmethod
    def of(cls, request: TasksPage, topic_filter: TopicFilter | None = None) -> _Conditions:
        """Return the conditions of a request. Raise BadRequest."""
        if request.key == "":
            raise BadRequest("key must be a string of 1 to 255 characters, not ''")
        until_ms = ID_MAX if request.until_ms is None else request.until_ms
        # An id contains the time of its assignment, so a time can be compared with ids.
        end_id = min(max(0, id_floor(until_ms + 1, 0)), ID_MAX + 1)
        after_id = request.after
        if request.newest:
            start_id = end_id if after_id is None else min(after_id, end_id)
        else:
            start_id = after_id or 0
        has = _Has.of(request)
        states = None if request.state is None else frozenset((request.state,))
        return cls(
            request.topic, states, request.key, has, request.newest, start_id, end_id, topic_filter
        )

    @property
    def is_selective(self) -> bool:
        is_partial = self.topic_filter is not None and self.topic is None
        conditions = self.key, self.states, self.has
        return is_partial or any(condition is not None for condition in conditions)

    @property
    def store_topic(self) -> str | None:
        """The topic by which the store filters. None if there is a key, so that rows of other
        topics count as scanned."""
        return None if self.key is not None else self.topic

    def fits(self, task: TaskSnapshot) -> bool:
        """Return whether the task meets all conditions except the state."""
        row = task.row
        if self.topic_filter is not None and not self.topic_filter(row.topic):
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
    """The name of a property and its value as text, for example true, 5 or eu."""

    @classmethod
    def of(cls, request: TasksPage) -> _Has | None:
        """Return the conditions of a request, or None if it has none. Raise BadRequest."""
        prefix, wanted = request.key_prefix or "", None
        if request.property is not None:
            name, equals, value = request.property.partition("=")
            if not name or not equals:
                raise BadRequest(f"property must be NAME=VALUE, not {shown(request.property)}")
            wanted = name, value
        has_any = prefix or request.tag is not None or wanted
        return cls(prefix, request.tag, wanted) if has_any else None

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
