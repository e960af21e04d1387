"""Commands by id and by key: cancel, reschedule, run now, look up; the dead letters' verbs.

A command by key is about every task of the topic that has the key and has not ended when its turn
comes: tasks that landed before it was sent are among them. Each gets its own word. When there is
none, the answer is about the newest that ended lately, or says that none is known.

``only``: a task of another topic is unknown, and so is whatever has ended, because nothing says any
more which topic it was of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tickwheel.errors import LimitExceeded
from tickwheel.limits import ID_MAX
from tickwheel.model.records import id_floor
from tickwheel.server import checks
from tickwheel.server.shard.reads import Records
from tickwheel.server.shard.views import ValueBytes, fitting

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.access import Only
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.shard import Shard


Many = Callable[[str, Mapping[int, int], Mapping[int, str], int], Mapping[int, Any]]
"""Acts on plain tasks of a topic at once: (topic, due times by id, keys by id, time) → words by id.
Nothing but keys may be recorded of the tasks beside that."""
UNKNOWN = "unknown"
NEWEST_LOOKED_AT = 100
"""How many of the newest ids with a key's hash are looked at: one of them has the key."""
KEY_OPTIONS = ("newest", "until_ms")


class Controlling:
    """Commands on tasks. Each answer has a word, or a map, for each id, in the order asked."""

    def __init__(self, shard: Shard, value_bytes: ValueBytes) -> None:
        self._shard = shard
        self._control = shard.engine.control
        self._value_bytes = value_bytes

    def cancel(
        self, caller: Caller, request: int, ids: object, *, only: Only | None = None
    ) -> None:
        """Cancel tasks. Raises BadRequest, LimitExceeded, Overloaded."""
        checked = checks.task_ids(ids, self._shard.limits)

        def cancel(task_id: int, found: TaskSnapshot | None, now_ms: int) -> str:
            return self._control.cancel(task_id, found)

        def cancel_many(
            topic: str, found: Mapping[int, int], keys: Mapping[int, str], now_ms: int
        ) -> dict[int, str]:
            return dict.fromkeys(self._control.cancel_many(topic, found, keys), "cancelled")

        self._each(caller, request, checked, checked, cancel, cancel_many, only=only)

    def _each(
        self,
        caller: Caller,
        request: int,
        ids: Sequence[int],
        keys: Sequence[Any],
        verb: Callable[[Any, TaskSnapshot | None, int], Any],
        many: Many | None = None,
        *,
        only: Only | None,
        unknown: Any = UNKNOWN,
    ) -> None:
        """Answer with the word of ``verb`` for each of ``keys``, which are about ``ids``. It gets
        the key, the record of the task and the time. A key named twice is acted on once, and has
        the same word twice. ``unknown``: the word for what ``only`` leaves out.

        ``many``: for keys that are ids, the words of those that it can do at once."""
        words: dict[Any, Any] = {}

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            self._shard.border.act()
            now_ms = self._shard.clock.read().now_ms
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
            self._shard.committer.reply(caller.replies, request, answer)
            self._shard.wake()

        self._shard.commands.put(caller, request, ids, act, done)

    def reschedule(
        self, caller: Caller, request: int, items: object, now: Now, *, only: Only | None = None
    ) -> None:
        """Move tasks; ``items`` are ``(id, delay_ms or None, due_ms or None)``. Raises BadRequest,
        LimitExceeded, DueTooFar, Overloaded."""
        limits = self._shard.limits
        given = checks.sequence(items, "items", limits.ids_per_frame_max)
        found = _delays(given, limits.delay_ms_max)
        if found is not None:
            ids, delays_ms = found
            dues = {i: now.now_ms + after for i, after in zip(ids, delays_ms, strict=True)}
            self._reschedule(caller, request, ids, dues, only)
            return
        dues = {}
        for index, item in enumerate(given):
            field = f"items[{index}]"
            if type(item) is not tuple or len(item) != 3:
                checks.wrong(field, "[id, delay_ms, due_ms]", item)
            task_id = checks.integer(item[0], f"{field}.id", 0, ID_MAX)
            dues[task_id] = checks.due(item[1], item[2], field, now.now_ms, limits)
        self._reschedule(caller, request, [item[0] for item in given], dues, only)

    def run_now(
        self, caller: Caller, request: int, ids: object, now: Now, *, only: Only | None = None
    ) -> None:
        """Make tasks due now. Raises BadRequest, LimitExceeded, Overloaded."""
        checked = checks.task_ids(ids, self._shard.limits)
        self._reschedule(caller, request, checked, dict.fromkeys(checked, now.now_ms), only)

    def _reschedule(
        self,
        caller: Caller,
        request: int,
        ids: Sequence[int],
        dues: dict[int, int],
        only: Only | None,
    ) -> None:
        reschedule = self._control.reschedule

        def verb(task_id: int, found: TaskSnapshot | None, now_ms: int) -> tuple[str, int | None]:
            return reschedule(task_id, dues[task_id], found, now_ms)

        def many(
            topic: str, found: Mapping[int, int], keys: Mapping[int, str], now_ms: int
        ) -> dict[int, tuple[str, int]]:
            moved = self._control.reschedule_many(topic, found, dues, now_ms)
            return {task_id: ("scheduled", due_ms) for task_id, due_ms in moved.items()}

        unknown = (UNKNOWN, None)
        self._each(caller, request, ids, ids, verb, many, only=only, unknown=unknown)

    def look_up(
        self, caller: Caller, request: int, ids: object, *, only: Only | None = None
    ) -> None:
        """Answer a map for each id. Raises BadRequest, LimitExceeded, Overloaded."""
        checked = checks.task_ids(ids, self._shard.limits)
        shard = self._shard
        bytes_max = shard.limits.frame_bytes_max // 2
        maps: list[dict[str, Any]] = []
        size = 0

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            nonlocal size
            for index in some:
                task_id = checked[index]
                found = known.get(task_id)
                if not _is_seen(found, only):
                    task = {"id": task_id, "state": UNKNOWN}
                elif found is None:
                    task = {"id": task_id, "state": self._control.absent(task_id)}
                else:
                    task = shard.describe(found)
                task, task_bytes = fitting(task, bytes_max, self._value_bytes)
                size += task_bytes
                if size > bytes_max and len(checked) > 1:
                    return
                maps.append(task)

        def done() -> None:
            if size > bytes_max and len(checked) > 1:
                caller.refuse(
                    request,
                    LimitExceeded(
                        f"what there is to say of the {len(checked)} ids has {size} bytes or more;"
                        f" the limit is {bytes_max} (half of frame_bytes_max): ask for fewer"
                    ),
                )
            elif caller.is_open:
                shard.committer.reply(caller.replies, request, maps)

        def is_wanted() -> bool:
            return caller.is_open and size <= bytes_max

        shard.commands.put(caller, request, checked, act, done, is_wanted, bodies=True)

    # --- by key --------------------------------------------------------------------------------

    def cancel_key(self, caller: Caller, request: int, topic: object, key: object) -> None:
        """Cancel a key's tasks: ``(id, word)``. Raises BadRequest, LimitExceeded, Overloaded."""

        def cancel(task_id: int, found: TaskSnapshot | None, now_ms: int) -> tuple[Any, ...]:
            return task_id, self._control.cancel(task_id, found)

        self._each_of_key(caller, request, self._named(topic, key), cancel, (None, UNKNOWN))

    def reschedule_key(
        self,
        caller: Caller,
        request: int,
        topic: object,
        key: object,
        delay_ms: object,
        due_ms: object,
        now: Now,
    ) -> None:
        """Move the tasks of a key; answers ``(id, word, due_ms or None)`` of each. Raises
        BadRequest, LimitExceeded, DueTooFar, Overloaded."""
        named = self._named(topic, key)
        at_ms = checks.due(delay_ms, due_ms, "reschedule", now.now_ms, self._shard.limits)
        self._move_key(caller, request, named, at_ms)

    def run_now_key(
        self, caller: Caller, request: int, topic: object, key: object, now: Now
    ) -> None:
        """Make the tasks of a key due now; answers and raises like ``reschedule_key``."""
        self._move_key(caller, request, self._named(topic, key), now.now_ms)

    def _move_key(self, caller: Caller, request: int, named: tuple[str, str], at_ms: int) -> None:
        def move(task_id: int, found: TaskSnapshot | None, now_ms: int) -> tuple[Any, ...]:
            return task_id, *self._control.reschedule(task_id, at_ms, found, now_ms)

        self._each_of_key(caller, request, named, move, (None, UNKNOWN, None))

    def look_up_key(
        self, caller: Caller, request: int, topic: object, key: object, options: dict[str, Any]
    ) -> None:
        """Answer a map for each live task of a key, newest first; else one for the newest that
        ended lately, or none. ``options``: ``newest``: that one only; ``until_ms``: enqueued then
        or earlier. Raises BadRequest, LimitExceeded, Overloaded."""
        named, shard = self._named(topic, key), self._shard
        newest = options.get("newest", False)
        if type(newest) is not bool:
            checks.wrong("newest", "true or false", newest)
        until_ms = checks.integer(options.get("until_ms", ID_MAX), "until_ms", 0, ID_MAX)
        end_id = id_floor(until_ms + 1, 0)
        bytes_max = shard.limits.frame_bytes_max // 2
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
                task, task_bytes = fitting(shard.describe(found), bytes_max, self._value_bytes)
                size += task_bytes
                if size > bytes_max and maps:
                    return
                maps.append(task)

        def done() -> None:
            if size > bytes_max and len(maps) > 1:
                caller.refuse(
                    request,
                    LimitExceeded(
                        f"what there is to say of the tasks with this key has {size} bytes or more;"
                        f" the limit is {bytes_max} (half of frame_bytes_max): ask for the newest"
                    ),
                )
                return
            ended = None if maps else shard.core.keys.finished(*named)
            if ended is not None and ended < end_id:
                maps.append({"id": ended, "state": self._control.absent(ended)})
            shard.committer.reply(caller.replies, request, maps)

        shard.commands.put(caller, request, find, act, done, lambda: caller.is_open, bodies=True)

    def _named(self, topic: object, key: object) -> tuple[str, str]:
        limits = self._shard.limits
        return checks.name(topic, "topic"), checks.text(key, "key", limits.key_length_max)

    def _of_key(self, named: tuple[str, str]) -> list[int]:
        """The ids, ascending, of all tasks that may have the key. Raises LimitExceeded."""
        keys, limit = self._shard.core.keys, self._shard.limits.key_tasks_max
        count = keys.count(*named)
        if count > limit:
            raise LimitExceeded(
                f"{count} tasks have this key; the limit is {limit} (key_tasks_max): nothing was"
                " done; use their ids"
            )
        return keys.find(*named)

    def _each_of_key(
        self,
        caller: Caller,
        request: int,
        named: tuple[str, str],
        verb: Callable[[int, TaskSnapshot | None, int], tuple[Any, ...]],
        nobody: tuple[Any, ...],
    ) -> None:
        """Answer what ``verb`` gives for each task of a key, oldest first; for none ``nobody``."""
        shard = self._shard
        answers: list[tuple[Any, ...]] = []
        ids: list[int] = []

        def find() -> Sequence[int]:
            ids[:] = self._of_key(named)
            return ids

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            shard.border.act()
            now_ms = shard.clock.read().now_ms
            for index in some:
                found = known.get(ids[index])
                # One that has ended since it was found is none any more.
                if found is not None and _has_key(found, named):
                    answers.append(verb(ids[index], found, now_ms))

        def done() -> None:
            ended = None if answers else shard.core.keys.finished(*named)
            if ended is not None:
                answers.append(verb(ended, None, 0))
            shard.committer.reply(caller.replies, request, answers or [nobody])
            shard.wake()

        shard.commands.put(caller, request, find, act, done)

    # --- dead letters --------------------------------------------------------------------------

    def requeue_dead(
        self, caller: Caller, request: int, pairs: object, *, only: Only | None = None
    ) -> None:
        """Requeue dead letters ``(id, group)``. Raises BadRequest, LimitExceeded, Overloaded."""

        def requeue(pair: tuple[int, str], found: TaskSnapshot | None, now_ms: int) -> str:
            return self._control.requeue(*pair, found, now_ms)

        self._dead(caller, request, pairs, requeue, only)

    def delete_dead(
        self, caller: Caller, request: int, pairs: object, *, only: Only | None = None
    ) -> None:
        """Delete dead letters ``(id, group)``. Raises BadRequest, LimitExceeded, Overloaded."""

        def delete(pair: tuple[int, str], found: TaskSnapshot | None, now_ms: int) -> str:
            return self._control.delete_dead(*pair, found)

        self._dead(caller, request, pairs, delete, only)

    def _dead(
        self,
        caller: Caller,
        request: int,
        pairs: object,
        verb: Callable[[tuple[int, str], TaskSnapshot | None, int], str],
        only: Only | None,
    ) -> None:
        given = checks.sequence(pairs, "pairs", self._shard.limits.ids_per_frame_max)
        for index, pair in enumerate(given):
            field = f"pairs[{index}]"
            if type(pair) is not tuple or len(pair) != 2:
                checks.wrong(field, "[id, group]", pair)
            checks.integer(pair[0], f"{field}.id", 0, ID_MAX)
            checks.name(pair[1], f"{field}.group")
        self._each(caller, request, [pair[0] for pair in given], given, verb, only=only)


def _delays(items: Sequence[Any], delay_ms_max: int) -> tuple[Sequence[int], Sequence[int]] | None:
    """Ids and delays, if all items are correct and have a delay, as is usual. None: look at each of
    them."""
    if set(map(type, items)) != {tuple} or set(map(len, items)) != {3}:
        return None
    ids, delays_ms, dues_ms = zip(*items, strict=True)
    if set(map(type, ids + delays_ms)) != {int} or dues_ms.count(None) != len(ids):
        return None
    if min(ids) < 0 or max(ids) > ID_MAX or min(delays_ms) < 0 or max(delays_ms) > delay_ms_max:
        return None
    return ids, delays_ms


def _is_seen(task: TaskSnapshot | None, only: Only | None) -> bool:
    """Whether the caller may be told of the task."""
    return only is None or (task is not None and only(task.row.topic))


def _has_key(found: TaskSnapshot, named: tuple[str, str]) -> bool:
    """Whether the task has the key: equal hashes are not equal keys."""
    row = found.row
    return row.options is not None and (row.topic, row.options.key) == named
