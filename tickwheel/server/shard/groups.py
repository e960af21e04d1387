"""Groups: made, deleted, and what is set for them and for topics; their order keys and fair shares
as operators see them. Each answer waits until it is durable.

What the engine knows of a key is a hash: its text, and what went wrong, are in the row of one of
its tasks, which is read first.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tickwheel.api.groups import (
    TO_CHANGE,
    Deletion,
    GroupDeletion,
    GroupFields,
    HeldTasks,
    KeysPage,
    NewGroup,
    NewGroupFields,
    OfGroupOrDefault,
    OneKey,
    Settings,
    SettingsFields,
)
from tickwheel.engine.ordering import mark_of_key, shared_value
from tickwheel.engine.tasks import HeldKey, KeyOfPause, KeyQueueState
from tickwheel.engine.topics import NOTHING_SET, Group, Topic
from tickwheel.errors import BadRequest, Conflict, LimitExceeded, NotFound, Refused
from tickwheel.limits import KEY_TASKS_MAX
from tickwheel.model.filters import TOPIC_STEPS_MAX
from tickwheel.model.kinds import PausedKey
from tickwheel.model.records import (
    DEFAULT_GROUP,
    FILTERS_LENGTH_MAX,
    FORMER_FILTERS_MAX,
    GroupSettings,
)
from tickwheel.server import checks
from tickwheel.server.shard.new_tasks import check_stays
from tickwheel.server.shard.views import ValueBytes, settings_map

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.engine.groups import Grouping as GroupVerbs
    from tickwheel.engine.state import Core
    from tickwheel.model.filters import Filter
    from tickwheel.model.records import TaskRow, TaskSnapshot
    from tickwheel.server.shard.background import Upkeep
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.parts import Parts

HELD = ("scheduled", "ready", "in_flight", "waiting", "dead")
TOPICS_PER_LOOK = 1_000
"""Topics that are looked at for one to forget when there is no room for a new one."""
NAMED_MAX = 5
"""How many schedules one message names."""
OF_TOPICS = ("if_pending", "broadcast_only")
OF_GROUPS = tuple(field.name for field in GroupFields.fields())


class Grouping:
    """The operations on groups and topics."""

    def __init__(self, parts: Parts, upkeep: Upkeep) -> None:
        self._parts = parts
        self._upkeep = upkeep
        self._core = parts.core

    @property
    def _grouping(self) -> GroupVerbs:
        return self._parts.border.act().grouping

    def create_group(self, ask: Ask[NewGroup]) -> None:
        """Make a group with its settings; an existing one is answered as it is. Raises BadRequest,
        LimitExceeded, Refused."""
        topic_name, name, now = ask.request.topic, ask.request.group, ask.now
        since_ms, options = _since(ask.request.since), ask.request.said(NewGroupFields)
        core = self._core
        settings = checks.settings(options, NOTHING_SET, core.policies, now.now_ms)
        checks.storable_settings(settings)
        found, known = find_room(self._parts, topic_name, name)
        created = known is None
        if known is None:
            check_filter(core, found, settings)
            known = make_group(self._grouping, found, name, since_ms, now, settings)
        answer = {"topic": topic_name, "group": name}
        answer |= settings_map(known.settings, core.policies)
        self._parts.committer.answer(ask, answer | {"created": created})
        self._parts.wake()

    def delete_group(self, ask: Ask[GroupDeletion]) -> None:
        """Delete a group with all that it holds; the answer counts that. Raises NotFound,
        Conflict."""
        topic_name, name, force = ask.request.topic, ask.request.group, ask.request.force
        found = found_group(self._core, topic_name, name)
        held = {
            "ready": found.ready_count,
            "in_flight": len(found.flight),
            "waiting": len(found.waiting),
            "dead": found.dead,
        }
        if not force and (any(held.values()) or found.subscribers):
            counts = ", ".join(f"{count} {word}" for word, count in held.items())
            raise Conflict(
                f"group {name} of topic {topic_name} holds {counts}, and has"
                f" {len(found.subscribers)} subscribers; delete it by force if that may go"
            )
        self._parts.border.act()
        self._upkeep.end_group(found)
        targets_changed(self._parts)
        self._parts.committer.answer(ask, held)
        self._parts.wake()

    def delete_topic(self, ask: Ask[Deletion]) -> None:
        """Delete a topic with its groups, settings, dead letters and tasks, which end as deleted;
        the answer counts them. Raises NotFound, Refused, Overloaded; Conflict when it holds tasks
        or has subscribers, unless ``force``, and always when a schedule enqueues to it."""

        def done() -> None:
            held = self._delete_topic(ask.request.topic, ask.now, force=ask.request.force)
            self._parts.committer.answer(ask, held)
            self._parts.wake()

        # Behind other commands, whose turn comes when every stored task is in memory and counted.
        self._parts.commands.put_last(ask, done)

    def _delete_topic(self, name: str, now: Now, *, force: bool) -> dict[str, int]:
        topic = self._core.topics.get(name)
        if topic is None:
            raise NotFound(f"there is no topic {name}")
        check_stays(self._core, name)
        self._check_unscheduled(name)
        closing = self._parts.engine.topic_closing
        held = closing.held(topic)
        subscribers = sum(len(group.subscribers) for group in topic.groups.values())
        subscribers += len(topic.broadcasters)
        if not force and (subscribers or any(held[state] for state in HELD)):
            counts = ", ".join(f"{held[state]} {state}" for state in HELD)
            raise Conflict(
                f"topic {name} holds {counts}, and has {subscribers} subscribers; delete it by"
                " force if that may go"
            )
        self._parts.border.act()
        for group in closing.close(topic, now.now_ms):
            self._upkeep.drain(group)
        self._upkeep.withdraw(topic)
        targets_changed(self._parts)
        return held

    def _check_unscheduled(self, topic: str) -> None:
        """Raises Conflict if schedules enqueue to the topic: the next run would make it anew."""
        known = self._core.schedule_heap.known
        names = sorted(n for n, planned in known.items() if planned.row.schedule.topic == topic)
        if names:
            more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
            raise Conflict(
                f"schedules enqueue to topic {topic}: {', '.join(names[:NAMED_MAX])}{more};"
                " delete them first"
            )

    def configure(self, ask: Ask[Settings]) -> None:
        """Set what is said of a group, or (None) of the topic; the answer has all settings. Raises
        BadRequest, LimitExceeded, NotFound."""
        topic_name, name, now = ask.request.topic, ask.request.group, ask.now
        settings = ask.request.said(SettingsFields)
        core, is_ordered = self._core, False
        if name is None:
            for wrong in OF_GROUPS:
                if settings.get(wrong) is not None:
                    raise BadRequest(f"{wrong} is a setting of a group, not of a topic")
            found_topic, _ = find_room(self._parts, topic_name, None)
            after = checks.settings(settings, found_topic.settings, core.policies, now.now_ms)
            checks.storable_settings(after)
            check_broadcast_only(found_topic, after)
            if after != found_topic.settings:
                set_topic(self._grouping, self._upkeep, found_topic, after, now)
        else:
            found = found_group(self._core, topic_name, name)
            is_ordered = found.is_ordered
            _check_of_group(settings)
            after = checks.settings(settings, found.settings, core.policies, now.now_ms)
            checks.storable_settings(after)
            after = with_filter(self._parts, found, after, now.now_ms)
            if after != found.settings:
                self._grouping.set(found, after, now.mono_ms)
        answer = {"topic": topic_name, "group": name}
        answer |= settings_map(after, core.policies, is_ordered=is_ordered)
        self._parts.committer.answer(ask, answer)
        self._parts.wake()


def targets_changed(parts: Parts) -> None:
    """Tell what sends tasks to targets that some were set, or have gone."""
    if parts.outbound is not None:
        parts.outbound.changed()


def found_group(core: Core, topic: str, name: str) -> Group:
    """The group. Raises NotFound when there is none, or it is being deleted."""
    found = core.find_group(topic, name)
    if found is None or found.is_closed:
        raise NotFound(f"topic {topic} has no group {name}")
    return found


def find_room(parts: Parts, topic_name: str, name: str | None) -> tuple[Topic, Group | None]:
    """The topic, made if there is room for another; the group, or None when there is room for it.

    Raises LimitExceeded, Conflict when the topic is for broadcasts only, or Refused while it or the
    group is being deleted.
    """
    core = parts.core
    check_stays(core, topic_name)
    config, topic = core.config, core.topics.get(topic_name)
    if topic is None:
        make_topic_room(parts, (topic_name,))
    group = topic.groups.get(name) if topic is not None and name is not None else None
    if group is None and name is not None and core.group_count >= config.groups_max:
        raise LimitExceeded(
            f"group {name} of topic {topic_name} is new and there are {core.group_count} groups;"
            f" the limit is {config.groups_max} (groups_max)"
        )
    if topic is None:
        return core.topic(topic_name), None
    if name is None:
        return topic, None
    if topic.settings.broadcast_only:
        raise Conflict(
            f"topic {topic_name} is for broadcasts only and has no groups{TO_CHANGE}"
            f"tickwheel topics broadcast {shlex.quote(topic_name)} --off"
        )
    if group is None and len(topic.groups) >= config.groups_per_topic_max:
        raise LimitExceeded(
            f"group {name} is new and topic {topic_name} has {len(topic.groups)} groups; the"
            f" limit is {config.groups_per_topic_max} (groups_per_topic_max)"
        )
    if group is not None and group.is_closed:
        raise Refused(f"group {name} of topic {topic_name} is being deleted; try again soon")
    return topic, group


def make_topic_room(parts: Parts, names: Iterable[str]) -> None:
    """Make room for those of these topics that are new. Raises LimitExceeded."""
    topics, topics_max = parts.core.topics, parts.core.config.topics_max
    fresh = [name for name in names if name not in topics]
    while len(topics) + len(fresh) > topics_max and parts.core.maybe_idle:
        if not forget_topics(parts, TOPICS_PER_LOOK):
            break
    if len(topics) + len(fresh) > topics_max:
        raise LimitExceeded(
            f"topic {fresh[0]} is new and there are {len(topics)} topics;"
            f" the limit is {topics_max} (topics_max)"
        )


def forget_topics(parts: Parts, looked_at: int) -> int:
    """Look at so many topics and forget the idle ones; returns how many these were."""
    forgotten = parts.engine.grouping.forget_idle(looked_at)
    parts.observed.lateness.forget(forgotten)
    return len(forgotten)


def check_filter_room(core: Core, topic: Topic, wanted: Filter, own_steps: int = 0) -> None:
    """Raises LimitExceeded when the filters of all groups are too long already for another, or
    those of the topic too dear. ``own_steps``: of the filter that it replaces."""
    steps = topic.steps() + topic.broadcast_steps() - own_steps + wanted.steps
    if steps > TOPIC_STEPS_MAX and not wanted.is_open:
        raise LimitExceeded(
            f"judging a task by all filters of topic {topic.name} would take {steps} steps; the"
            f" limit is {TOPIC_STEPS_MAX} (TOPIC_STEPS_MAX)"
        )
    length = core.filters_length + len(wanted.tags or "") + len(wanted.where or "")
    if length > FILTERS_LENGTH_MAX and not wanted.is_open:
        raise LimitExceeded(
            f"the filters of all groups would have {length} characters; the limit is"
            f" {FILTERS_LENGTH_MAX} (FILTERS_LENGTH_MAX)"
        )


def check_filter(core: Core, topic: Topic, settings: GroupSettings) -> None:
    """Raises BadRequest or LimitExceeded for the filter of a new group with these settings."""
    check_filter_room(core, topic, checks.filter_of(settings.tags, settings.where))


def with_filter(parts: Parts, group: Group, after: GroupSettings, now_ms: int) -> GroupSettings:
    """The settings that a group gets, with former filters for tasks that came due before, if the
    filter is new. Raises LimitExceeded."""
    before = group.settings
    wanted = checks.filter_of(after.tags, after.where)
    if wanted == checks.filter_of(before.tags, before.where):
        return after
    own_steps = 0 if group.judge is None else group.judge.steps
    check_filter_room(parts.core, group.topic, wanted, own_steps)
    after = parts.engine.grouping.with_filter(group, after, wanted.tags, wanted.where, now_ms)
    if len(after.former) > FORMER_FILTERS_MAX:
        raise LimitExceeded(
            f"the filter of group {group.name} of topic {group.topic.name} was changed"
            f" {FORMER_FILTERS_MAX} times since tasks came due that are not over, or are dead"
            " letters; the limit is"
            f" {FORMER_FILTERS_MAX} (FORMER_FILTERS_MAX)"
        )
    return after


def check_broadcast_only(topic: Topic, after: GroupSettings) -> None:
    """Raises Conflict for settings of a topic without groups, when it has some."""
    if after.broadcast_only and topic.groups:
        raise Conflict(
            f"topic {topic.name} has {len(topic.groups)} groups, which are owed its tasks; delete"
            " them before it is for broadcasts only"
        )


def set_topic(
    grouping: GroupVerbs, upkeep: Upkeep, topic: Topic, settings: GroupSettings, now: Now
) -> None:
    """Give a topic settings of its own."""
    grouping.set_topic(topic, settings, now.mono_ms)
    if settings.broadcast_only:
        upkeep.let_go(topic)


def make_group(
    grouping: GroupVerbs,
    topic: Topic,
    name: str,
    since_ms: int | None,
    now: Now,
    settings: GroupSettings,
) -> Group:
    """A new group with these settings, which begins as ``begin_group`` says."""
    made = begin_group(grouping, topic, name, since_ms, now.now_ms, settings)
    if settings != made.settings:
        grouping.set(made, settings, now.mono_ms)
    return made


def begin_group(
    grouping: GroupVerbs,
    topic: Topic,
    name: str,
    since_ms: int | None,
    now_ms: int,
    settings: GroupSettings = NOTHING_SET,
) -> Group:
    """A new group that begins now (None), or at a time, with the filter of ``settings``."""
    if since_ms is None:
        return grouping.create_now(topic, name, now_ms, settings)
    return grouping.create(topic, name, since_ms, settings, by_due=since_ms > now_ms)


def _check_of_group(settings: dict[str, Any]) -> None:
    for name in OF_TOPICS:
        if settings.get(name):
            raise BadRequest(f"{name} is a setting of a topic, not of a group")


def _since(value: object) -> int | None:
    """The start in ms; None: from now on."""
    if value == "now":
        return None
    if value == "first":
        return 0
    if type(value) is not int:
        checks.wrong("since", "'now', 'first' or milliseconds", value)
    return checks.moment(value, "since")


NOT_HELD = "not_held"

Verb = Callable[["Group", "TaskSnapshot", int], str]


class Lining:
    """The operations on order keys and fair shares of a group; nil names the default group."""

    def __init__(self, parts: Parts, value_bytes: ValueBytes) -> None:
        self._parts = parts
        self._key_control = parts.engine.key_control
        self._value_bytes = value_bytes

    def held_keys(self, ask: Ask[KeysPage]) -> None:
        """Answer held order keys, oldest first, and how many there are; paused keys. Raises
        NotFound, Overloaded."""
        limit = ask.request.limit

        def answer(found: Group, maps: list[dict[str, Any]]) -> dict[str, Any]:
            return {"keys": maps, "held": found.held, "paused": self._paused(found, limit)}

        self._show(ask, lambda found: self._key_control.held(found, limit), _held_map, answer)

    def _paused(self, group: Group, limit: int) -> list[dict[str, Any]]:
        """As many paused keys as fit beside the held ones."""
        bytes_left = self._parts.limits.frame_bytes_max // 4
        maps: list[dict[str, Any]] = []
        for one in self._key_control.paused(group)[:limit]:
            line = _paused_map(one)
            bytes_left -= self._value_bytes(line)
            if bytes_left <= 0:
                break
            maps.append(line)
        return maps

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
        parts, named = self._parts, _named(ask.request)
        self._found(named)
        bytes_left = parts.limits.frame_bytes_max // 2
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
            parts.committer.answer(ask, answer(self._found(named), maps))

        parts.commands.put(ask.caller, ask.refuse, find, act, done, lambda: ask.caller.is_open)

    def release_key(self, ask: Ask[HeldTasks]) -> None:
        """Try held tasks of these ids, or that of ``key``, again at once, with failures counted
        anew: (id, "released" or "not_held") of each. Raises NotFound, Overloaded."""
        self._act(ask, self._key_control.release)

    def skip_key(self, ask: Ask[HeldTasks]) -> None:
        """Make held tasks dead letters, so that their keys go on: (id, "skipped" or "not_held") of
        each. Raises as ``release_key``."""
        self._act(ask, self._key_control.skip)

    def _act(self, ask: Ask[HeldTasks], verb: Verb) -> None:
        parts, named = self._parts, _named(ask.request)
        asked, key = ask.request.ids or (), ask.request.key
        self._found(named)
        looked_at: list[int] = []
        words: dict[int, str] = {}

        def find() -> Sequence[int]:
            found = self._found(named)
            held = (one.task_id for one in self._key_control.held(found, KEY_TASKS_MAX))
            looked_at[:] = dict.fromkeys(asked) if key is None else held
            return looked_at

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            parts.border.act()
            found, now_ms = self._found(named), parts.clock.read().now_ms
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
            parts.committer.answer(ask, answer or [(None, NOT_HELD)])
            parts.wake()

        parts.commands.put(ask.caller, ask.refuse, find, act, done)

    def pause_key(self, ask: Ask[OneKey]) -> None:
        """Hand out no task of one key until it is resumed. Raises NotFound, Conflict,
        LimitExceeded."""
        found, fair_by, value = self._key(ask.request)
        by = ask.caller.principal.name or "anonymous"
        key = PausedKey(found.topic.name, found.name, fair_by, value, ask.now.now_ms, by)
        count, most = len(found.paused_keys), self._parts.limits.paused_keys_max
        if count >= most and mark_of_key(fair_by, value) not in found.paused_keys:
            raise LimitExceeded(
                f"group {found.name} of topic {found.topic.name} has {count} paused keys; the limit"
                f" is {most} (paused_keys_max)"
            )
        known = self._parts.border.act().key_control.pause(found, key)
        self._say_pause(ask, known, paused=True, changed=known is key)

    def resume_key(self, ask: Ask[OneKey]) -> None:
        """Hand out the tasks of a paused key again. Raises NotFound, Conflict."""
        named = self._key(ask.request)
        known = self._parts.border.act().key_control.resume(*named, ask.now.now_ms)
        self._say_pause(ask, known, paused=False, changed=known is not None)

    def _key(self, request: OneKey) -> tuple[Group, str | None, Any]:
        """The group, and what tells the key that is meant: (fair_by or None, value)."""
        found = self._found(_named(request))
        if request.value is None:
            return found, None, request.key
        if found.settings.shares.fair_by is None:
            raise Conflict(
                f"group {found.name} of topic {found.topic.name} is shared by nothing (fair_by):"
                " there is no value to name"
            )
        return found, found.settings.shares.fair_by, request.value

    def _say_pause(
        self, ask: Ask[OneKey], known: PausedKey | None, *, paused: bool, changed: bool
    ) -> None:
        since_ms, by = (None, None) if known is None else (known.since_ms, known.by)
        answer = {"paused": paused, "changed": changed, "since_ms": since_ms, "by": by}
        self._parts.committer.answer(ask, answer)
        self._parts.wake()

    def _found(self, named: tuple[str, str]) -> Group:
        return found_group(self._parts.core, *named)


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


def _paused_map(paused: KeyOfPause) -> dict[str, Any]:
    key = paused.key
    return {
        "kind": "order" if key.fair_by is None else "fair",
        "value": key.value,
        "since_ms": key.since_ms,
        "by": key.by,
        "waiting": paused.waiting,
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
    return None if settings.shares.fair_by is None else shared_value(row, settings.shares.fair_by)
