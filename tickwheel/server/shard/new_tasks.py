"""Converts and checks the tasks of an enqueue against the limits of the daemon.

Runs of plain tasks use the faster ``enqueue_plain``, and this module only if one of them is
refused.
"""

from __future__ import annotations

from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tickwheel.api.tasks import TaskFields, basis_of, check_options, kept_options
from tickwheel.errors import (
    BacklogFull,
    BadRequest,
    BodyTooLarge,
    DueTooFar,
    LimitExceeded,
    Refused,
)
from tickwheel.limits import Limits, delay_of_level
from tickwheel.model.policies import ADD, Coalescing
from tickwheel.model.records import TaskOptions, keys_bytes, size_of
from tickwheel.model.values import EXTRAS_BYTES, is_utf8
from tickwheel.server import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tickwheel.engine.enqueue import Rules
    from tickwheel.engine.state import Core
    from tickwheel.model.records import NewTask

CHARACTER_BYTES_MAX = 4
"""Maximum bytes of a character in UTF-8."""
_key_of = itemgetter("key")
_new_options: Callable[..., TaskOptions] = tuple.__new__
_NOTHING = TaskOptions()
_PLAIN = _NOTHING[1:]
_PLAIN_COLUMNS = [repeat(default) for default in _PLAIN]


def key_alone(task: tuple[Any, ...], length_max: int) -> TaskOptions | None:
    """Return the options of a task whose only option is a valid key, or None for any other task."""
    if len(task) != 4:
        return None
    options = task[3]
    if type(options) is not dict or len(options) != 1:
        return None
    key = options.get("key")
    if type(key) is not str or len(key) > length_max:
        return None
    return _new_options(TaskOptions, (key, *_PLAIN))


_STORED = {
    field.name: (TaskOptions._fields.index(field.name), field.kind.check, field.may_be_none)
    for field, _ in kept_options()
}
"""Name of an option that is stored with a task → (its index in ``TaskOptions``, its check, whether
None means unset)."""
_RETRY = _STORED["retry"][0]
_OPTIONS = ("due_ms", "delay_level", *_STORED)
_RULE = "if_pending"
_OPTIONS_AND_RULE = (*_OPTIONS, _RULE)
_DELAY_LEVEL = TaskFields.field("delay_level").kind


def check_stays(core: Core, topic: str) -> None:
    """Raise Refused if the topic is being deleted."""
    if topic in core.closing_topics:
        raise Refused(f"topic {topic} is being deleted; try again soon")


class NewTasks:
    """Creates tasks from ``(topic, body, delay_ms)``, optionally followed by a map of options."""

    def __init__(
        self,
        core: Core,
        limits: Limits,
        reserve_topics: Callable[[Iterable[str]], None],
        delay_levels_ms: Sequence[int],
    ) -> None:
        self._core = core
        self._delay_levels_ms = delay_levels_ms
        self._reserve_topics = reserve_topics
        self._limits = limits
        self._topics = core.topics
        longest_bytes = EXTRAS_BYTES + CHARACTER_BYTES_MAX * limits.key_length_max
        fits = limits.body_bytes_max + longest_bytes <= limits.task_bytes_max
        self.key_alone_max = limits.key_length_max if fits else -1
        """Maximum characters of a key that cannot make the task exceed any other limit."""
        self.has_windows = False
        """Whether any of the most recently parsed tasks has a due window."""

    def parse(self, tasks: Sequence[Any], now_ms: int) -> tuple[list[NewTask], int, Rules | None]:
        """Return (new tasks, their size in bytes, their rules for pending keys). Raise the error of
        the first invalid task."""
        rules: dict[int, Coalescing] = {}
        self.has_windows = False
        if len(tasks) > 1 and (keyed := self._lone_key_tasks(tasks, now_ms)) is not None:
            self.check_room(keyed[0])
            return *keyed, self._rules(keyed[0], rules)
        limits, topics = self._limits, self._topics
        body_max, delay_max = limits.body_bytes_max, limits.delay_ms_max
        new_tasks: list[NewTask] = []
        new_topics: dict[str, None] = {}
        size = 0
        for index, task in enumerate(tasks):
            if type(task) is tuple and len(task) == 3:
                topic, body, delay_ms = task
                if (
                    type(body) is bytes
                    and type(delay_ms) is int
                    and 0 <= delay_ms <= delay_max
                    and len(body) <= body_max
                    and type(topic) is str
                    and topic in topics
                ):
                    new_tasks.append((topic, now_ms + delay_ms, body, None))
                    size += len(body)
                    continue
            new_task = self._lone_key_task(task, now_ms)
            if new_task is None:
                field = f"tasks[{index}]"
                new_task = self.check_task(task, field, now_ms, _OPTIONS_AND_RULE)
                if len(task) == 4 and task[3] and task[3].get(_RULE) is not None:
                    rules[index] = _rule(task[3][_RULE], new_task, f"{field}.{_RULE}")
            if new_task[0] not in topics:
                new_topics[new_task[0]] = None
            new_tasks.append(new_task)
            size += size_of(new_task[2], new_task[3])
        self.check_room(new_tasks)
        if new_topics:
            self._reserve_topics(new_topics)
            for name in new_topics:
                self._core.topic(name)
        return new_tasks, size, self._rules(new_tasks, rules)

    def _rules(self, new_tasks: Sequence[NewTask], rules: dict[int, Coalescing]) -> Rules | None:
        """Return the rule of each task, or None if all are stored regardless of their keys."""
        ruled = self._core.ruled_topics
        if ruled:
            for index, (topic, _, _, options) in enumerate(new_tasks):
                if topic in ruled and options is not None and options.key is not None:
                    rule = self._topics[topic].settings.if_pending
                    if rule is not None:
                        rules.setdefault(index, rule)
        count = sum(rule.action != ADD for rule in rules.values())
        if not count:
            return None
        if self._core.versions.shards > 1:
            for index, rule in rules.items():
                if rule.action != ADD:
                    _check_in_shard_of_key(new_tasks[index][3], f"tasks[{index}]")
        if count > self._limits.coalesced_tasks_max:
            raise LimitExceeded(
                f"{count} tasks of the request have a rule for a pending key; the limit is"
                f" {self._limits.coalesced_tasks_max} (coalesced_tasks_max)"
            )
        return [rules.get(index) for index in range(len(new_tasks))]

    def _lone_key_task(self, task: Any, now_ms: int) -> NewTask | None:
        """Return a task whose only option is a key, or None for any other task. A lone key is the
        most common option, and this path takes a third of the time."""
        options = key_alone(task, self.key_alone_max) if type(task) is tuple else None
        if options is None:
            return None
        topic, body, delay_ms, _ = task
        if (
            type(body) is bytes
            and type(delay_ms) is int
            and 0 <= delay_ms <= self._limits.delay_ms_max
            and len(body) <= self._limits.body_bytes_max
            and type(topic) is str
            and topic in self._topics
            and is_utf8(task[3]["key"])
        ):
            return topic, now_ms + delay_ms, body, options
        return None

    def _lone_key_tasks(
        self, tasks: Sequence[Any], now_ms: int
    ) -> tuple[list[NewTask], int] | None:
        """Parse tasks whose only option is a key, by column, in a third of the time. Return None if
        any task is different."""
        if type(tasks[0]) is not tuple or len(tasks[0]) != 4:
            return None
        if set(map(type, tasks)) != {tuple} or set(map(len, tasks)) != {4}:
            return None
        topics, bodies, delays_ms, options_column = zip(*tasks, strict=True)
        kinds = [set(map(type, column)) for column in (topics, bodies, delays_ms, options_column)]
        if kinds != [{str}, {bytes}, {int}, {dict}] or set(map(len, options_column)) != {1}:
            return None
        try:
            keys = list(map(_key_of, options_column))
        except KeyError:
            return None
        if set(map(type, keys)) != {str} or max(map(len, keys)) > self.key_alone_max:
            return None
        limits = self._limits
        if (
            not self._topics.keys() >= set(topics)
            or min(delays_ms) < 0
            or max(delays_ms) > limits.delay_ms_max
            or max(map(len, bodies)) > limits.body_bytes_max
        ):
            return None
        options = map(_new_options, repeat(TaskOptions), zip(keys, *_PLAIN_COLUMNS, strict=False))
        dues_ms = [now_ms + delay_ms for delay_ms in delays_ms]
        new_tasks: list[NewTask] = list(zip(topics, dues_ms, bodies, options, strict=True))
        try:
            size = sum(map(len, bodies)) + keys_bytes(keys)
        except UnicodeEncodeError:
            return None
        return new_tasks, size

    def columns(
        self, topic: object, bodies: Sequence[Any], delays_ms: object, now_ms: int
    ) -> tuple[list[NewTask], int]:
        """Return (new tasks of one topic, their bytes). Raise the error of the first invalid
        task."""
        name, limits = checks.name(topic, "topic"), self._limits
        if set(map(type, bodies)) != {bytes}:
            index = next(i for i, body in enumerate(bodies) if type(body) is not bytes)
            checks.wrong(f"bodies[{index}]", "binary", bodies[index])
        lengths = list(map(len, bodies))
        if max(lengths) > limits.body_bytes_max:
            index = next(i for i, length in enumerate(lengths) if length > limits.body_bytes_max)
            raise BodyTooLarge(
                f"bodies[{index}] has {lengths[index]} bytes; the limit is"
                f" {limits.body_bytes_max} (body_bytes_max)"
            )
        dues_ms: Iterable[int]
        if type(delays_ms) is tuple:
            dues_ms = self._dues(delays_ms, len(bodies), now_ms)
        else:
            dues_ms = repeat(now_ms + self._delay(delays_ms, "delays_ms"))
        new_tasks: list[NewTask]
        new_tasks = list(zip(repeat(name), dues_ms, bodies, repeat(None)))
        self.check_room(new_tasks)
        if name not in self._topics:
            self._reserve_topics((name,))
            self._core.topic(name)
        return new_tasks, sum(lengths)

    def _dues(self, delays_ms: Sequence[Any], count: int, now_ms: int) -> list[int]:
        if len(delays_ms) != count:
            raise BadRequest(
                f"delays_ms must have {count} elements, one for each body, not {len(delays_ms)}"
            )
        if set(map(type, delays_ms)) == {int} and min(delays_ms) >= 0:
            if max(delays_ms) <= self._limits.delay_ms_max:
                return [now_ms + delay_ms for delay_ms in delays_ms]
        return [
            now_ms + self._delay(delay_ms, f"delays_ms[{index}]")
            for index, delay_ms in enumerate(delays_ms)
        ]

    def _delay(self, delay_ms: object, field: str) -> int:
        if type(delay_ms) is not int or delay_ms < 0:
            checks.wrong(field, "a non-negative integer", delay_ms)
        if delay_ms > self._limits.delay_ms_max:
            raise DueTooFar(
                f"{field} is {delay_ms} ms; the limit is {self._limits.delay_ms_max} ms"
                " (the daemon's delay_max_s)"
            )
        return delay_ms

    def check_room(self, new_tasks: Sequence[NewTask]) -> None:
        """Raise BacklogFull if there is no room for these tasks, Refused if a topic is being
        deleted."""
        core = self._core
        if len(new_tasks) > core.room:
            count, limit = core.scheduled + core.staged, "scheduled_max"
            if core.config.tasks_max - core.tasks < core.config.scheduled_max - core.scheduled:
                count, limit = core.tasks + core.staged, "tasks_max"
            raise BacklogFull(
                f"there are {count} tasks; {len(new_tasks)} more would exceed the limit"
                f" {getattr(core.config, limit)} ({limit})"
            )
        if core.closing_topics:
            for name in dict.fromkeys(new_task[0] for new_task in new_tasks):
                check_stays(core, name)
        if core.full_topics:
            for new_task in new_tasks:
                if new_task[0] in core.full_topics:
                    raise BacklogFull(
                        f"topic {new_task[0]} has no group and {core.config.backlog_max} due tasks,"
                        " which is the limit (backlog_max)"
                    )

    def check_task(
        self, task: Any, field: str, now_ms: int, allowed: Sequence[str] = _OPTIONS
    ) -> NewTask:
        """Check a task completely, and return it. ``allowed`` names the options that it may have.
        Raise the error of the first invalid field."""
        if type(task) is not tuple or len(task) not in (3, 4):
            raise BadRequest(
                f"{field} must be an array [topic, body, delay_ms] or one with options,"
                f" not {checks.shown(task)}"
            )
        topic = checks.name(task[0], f"{field}.topic")
        body = task[1]
        if type(body) is not bytes:
            raise BadRequest(f"{field}.body must be binary, not {checks.shown(body)}")
        if len(body) > self._limits.body_bytes_max:
            raise BodyTooLarge(
                f"{field}.body has {len(body)} bytes; the limit is"
                f" {self._limits.body_bytes_max} (body_bytes_max)"
            )
        options = checks.options(task[3] if len(task) == 4 else None, allowed, field)
        due_ms = self._due(task[2], options, field, now_ms)
        task_options = self._options(options, field)
        if task_options is not None and task_options.within_ms is not None:
            self.has_windows = True
            task_options = task_options._replace(asked_ms=due_ms)
        if task_options is not None and size_of(body, task_options) > self._limits.task_bytes_max:
            raise LimitExceeded(
                f"{field} has {size_of(body, task_options)} bytes with all its fields; the limit is"
                f" {self._limits.task_bytes_max} (task_bytes_max)"
            )
        return topic, due_ms, body, task_options

    def _due(self, delay_ms: object, options: dict[str, Any], field: str, now_ms: int) -> int:
        level = options.get("delay_level")
        if level is not None:
            if delay_ms is not None or options.get("due_ms") is not None:
                raise BadRequest(f"{field} must have one of delay_ms, due_ms and delay_level")
            _DELAY_LEVEL.check(level, f"{field}.delay_level", self._limits)
            delay_ms = delay_of_level(self._delay_levels_ms, level)
        return checks.due(delay_ms, options.get("due_ms"), field, now_ms, self._limits)

    def _options(self, options: dict[str, Any], field: str) -> TaskOptions | None:
        limits = self._limits
        values = list(_NOTHING)
        for name, value in options.items():
            if name in _STORED:
                index, check, may_be_none = _STORED[name]
                if value is not None or not may_be_none:
                    values[index] = check(value, f"{field}.{name}", limits)
        if values[_RETRY] is not None:  # it may be the name of a policy
            policy = checks.policy(values[_RETRY], f"{field}.retry", self._core.policies)
            values[_RETRY] = policy
        check_options(options, field)
        task_options = _new_options(TaskOptions, values)
        checks.storable_options(task_options, field)
        return None if task_options == _NOTHING else task_options


def _check_in_shard_of_key(options: TaskOptions | None, field: str) -> None:
    """Raise BadRequest if a task with a rule for its key is not stored in the shard of that key."""
    if options is None or basis_of(options.shard_by, options.order_key, options.key) == options.key:
        return
    name = "order_key" if options.shard_by is None else "shard_by"
    raise BadRequest(
        f"{field} is subject to if_pending (its own or its topic's), so {name}, which determines"
        " its shard, must equal its key"
    )


def _rule(value: Any, new_task: NewTask, field: str) -> Coalescing:
    rule = checks.rule(value, field)
    options = new_task[3]
    if rule.action != ADD and (options is None or options.key is None):
        raise BadRequest(f"{field} is {rule.action}, which needs a key")
    return rule
