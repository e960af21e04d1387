"""Order keys and fair shares as operators see them: which keys are held, who waits for whom, and a
held key let go on.

What the engine knows of a key is a hash: its text, and what went wrong, are in the row of one of
its tasks, which is read first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tickwheel.api.groups import HeldTasks, KeysPage, OfGroupOrDefault
from tickwheel.engine.ordering import shared_value
from tickwheel.engine.tasks import HeldKey, KeyQueueState
from tickwheel.errors import BadRequest, NotFound
from tickwheel.limits import KEY_TASKS_MAX
from tickwheel.model.records import DEFAULT_GROUP
from tickwheel.server.shard.views import ValueBytes

if TYPE_CHECKING:
    from tickwheel.engine.topics import Group
    from tickwheel.model.records import GroupSettings, TaskRow, TaskSnapshot
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.shard import Shard

NOT_HELD = "not_held"

Verb = Callable[["Group", "TaskSnapshot", int], str]


class Lining:
    """The operations on order keys and fair shares of a group; nil names the default group."""

    def __init__(self, shard: Shard, value_bytes: ValueBytes) -> None:
        self._shard = shard
        self._key_control = shard.engine.key_control
        self._value_bytes = value_bytes

    def held_keys(self, ask: Ask[KeysPage]) -> None:
        """Answer held order keys, oldest first, and how many there are. Raises NotFound,
        Overloaded."""
        limit = ask.request.limit

        def answer(found: Group, maps: list[dict[str, Any]]) -> dict[str, Any]:
            return {"keys": maps, "held": found.held}

        self._show(ask, lambda found: self._key_control.held(found, limit), _held_map, answer)

    def key_lines(self, ask: Ask[KeysPage]) -> None:
        """Answer the order keys and fair-share values with most waiting tasks, and how many tasks
        wait in all. Raises NotFound, Overloaded."""
        limit = ask.request.limit

        def answer(found: Group, maps: list[dict[str, Any]]) -> dict[str, Any]:
            return {"lines": maps, "waiting": found.in_key_queues}

        self._show(ask, lambda found: self._key_control.queues(found, limit), _line_map, answer)

    def _show(
        self,
        ask: Ask[KeysPage],
        look: Callable[[Group], Sequence[Any]],
        describe: Callable[[Any, TaskSnapshot, Group], dict[str, Any]],
        answer: Callable[[Group, list[dict[str, Any]]], dict[str, Any]],
    ) -> None:
        """Answer as many keys as fit; one whose task has left meanwhile is left out."""
        shard, named = self._shard, _named(ask.request)
        self._found(named)
        bytes_left = shard.limits.frame_bytes_max // 2
        found: list[Any] = []
        maps: list[dict[str, Any]] = []

        def find() -> Sequence[int]:
            found[:] = look(self._found(named))
            return [one.task_id for one in found]

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            nonlocal bytes_left
            for index in some:
                task = known.get(found[index].task_id)
                if task is None or bytes_left <= 0:
                    continue
                line = describe(found[index], task, self._found(named))
                bytes_left -= self._value_bytes(line)
                if bytes_left > 0:
                    maps.append(line)

        def done() -> None:
            shard.committer.reply(ask.caller.replies, ask.number, answer(self._found(named), maps))

        shard.commands.put(ask.caller, ask.number, find, act, done, lambda: ask.caller.is_open)

    def release_key(self, ask: Ask[HeldTasks]) -> None:
        """Try held tasks of these ids, or that of ``key``, again at once, with failures counted
        anew: (id, "released" or "not_held") of each. Raises BadRequest, NotFound, Overloaded."""
        self._act(ask, self._key_control.release)

    def skip_key(self, ask: Ask[HeldTasks]) -> None:
        """Make held tasks dead letters, so that their keys go on: (id, "skipped" or "not_held") of
        each. Raises as ``release_key``."""
        self._act(ask, self._key_control.skip)

    def _act(self, ask: Ask[HeldTasks], verb: Verb) -> None:
        shard, named = self._shard, _named(ask.request)
        asked, key = ask.request.ids or (), ask.request.key
        if (key is None) == (not asked):
            raise BadRequest("one of ids and key must be given")
        self._found(named)
        looked_at: list[int] = []
        words: dict[int, str] = {}

        def find() -> Sequence[int]:
            found = self._found(named)
            held = (one.task_id for one in self._key_control.held(found, KEY_TASKS_MAX))
            looked_at[:] = dict.fromkeys(asked) if key is None else held
            return looked_at

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            shard.border.act()
            found, now_ms = self._found(named), shard.clock.read().now_ms
            for index in some:
                task = known.get(looked_at[index])
                if task is None or task.row.topic != named[0]:
                    continue
                if key is None or _order_key(task.row) == key:
                    words[task.row.id] = verb(found, task, now_ms)

        def done() -> None:
            answer: list[tuple[int | None, str]] = list(words.items())
            if key is None:
                answer = [(task_id, words.get(task_id, NOT_HELD)) for task_id in asked]
            shard.committer.reply(ask.caller.replies, ask.number, answer or [(None, NOT_HELD)])
            shard.wake()

        shard.commands.put(ask.caller, ask.number, find, act, done)

    def _found(self, named: tuple[str, str]) -> Group:
        topic, name = named
        found = self._shard.core.find_group(topic, name)
        if found is None or found.is_closed:
            raise NotFound(f"topic {topic} has no group {name}")
        return found


def _named(request: OfGroupOrDefault) -> tuple[str, str]:
    return request.topic, DEFAULT_GROUP if request.group is None else request.group


def _order_key(row: TaskRow) -> str | None:
    return None if row.options is None else row.options.order_key


def _held_map(held: HeldKey, task: TaskSnapshot, group: Group) -> dict[str, Any]:
    progress = task.progress.get(group.name)
    failures = progress.failures if progress is not None else ()
    return {
        "id": held.task_id,
        "key": _order_key(task.row),
        "since_ms": held.since_ms,
        "attempt": held.attempt,
        "waiting": held.waiting,
        "reason": failures[-1].reason if failures else "",
        "subscriber": failures[-1].subscriber if failures else "",
    }


def _line_map(line: KeyQueueState, task: TaskSnapshot, group: Group) -> dict[str, Any]:
    return {
        "id": line.task_id,
        "kind": line.kind,
        "value": _value(line.kind, task.row, group.settings),
        "state": line.state,
        "in_flight": line.in_flight,
        "waiting": line.waiting,
    }


def _value(kind: str, row: TaskRow, settings: GroupSettings) -> Any:
    """The order key of the task, or the value by which the group is shared; None: it has none."""
    if kind == "order":
        return _order_key(row)
    return None if settings.fair_by is None else shared_value(row, settings.fair_by)
