"""Operations on groups, on settings of groups and topics, and on order keys and fair shares.

Each answer waits until the change is durable. The engine knows only the hash of an order key. The
text of a key and the reason for a failure are stored in the row of one of its tasks, which is read
first.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
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
from tickwheel.engine.tasks import HeldKey, KeyQueueState, PausedKeyState
from tickwheel.engine.topics import NOTHING_SET, Group, Topic
from tickwheel.errors import BadRequest, Conflict, LimitExceeded, NotFound, Refused
from tickwheel.model.filters import TOPIC_STEPS_MAX
from tickwheel.model.kinds import PausedKey
from tickwheel.model.records import (
    DEFAULT_GROUP,
    FILTERS_LENGTH_MAX,
    FORMER_FILTERS_MAX,
    LINE_SETTINGS,
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
    from tickwheel.server.shard.callers import Call
    from tickwheel.server.shard.parts import Parts

COUNTED_STATES = ("scheduled", "ready", "in_flight", "waiting", "dead")
TOPICS_PER_STEP = 64
"""Maximum number of topics and groups that are visited in one step of the loop, unless a topic has
more groups."""
TOPICS_EXAMINED = 1_000
"""Topics that are examined at a time for idle ones if there is no room for a new topic."""
NAMED_MAX = 5
"""Maximum number of schedules that a message names."""
TOPIC_SETTINGS = ("if_pending", "broadcast_only")
OF_GROUPS = tuple(field.name for field in GroupFields.fields())
assert set(OF_GROUPS) == {"tags", "where", *LINE_SETTINGS}, "RequestedSettings has each of them"


class Grouping:
    """The operations on groups and topics."""

    def __init__(self, parts: Parts, upkeep: Upkeep) -> None:
        self._parts = parts
        self._upkeep = upkeep
        self._core = parts.core

    @property
    def _grouping(self) -> GroupVerbs:
        return self._parts.border.act().grouping

    def create_group(self, call: Call[NewGroup]) -> None:
        """Create a group with its settings, or answer with the existing group unchanged. Raise
        BadRequest, LimitExceeded, Refused."""
        topic_name, name, now = call.request.topic, call.request.group, call.now
        since_ms, options = _since(call.request.since), call.request.values(NewGroupFields)
        core = self._core
        settings = checks.settings(options, NOTHING_SET, core.policies, now.now_ms)
        checks.storable_settings(settings)
        topic, group = find_room(self._parts, topic_name, name)
        created = group is None
        if group is None:
            check_filter(core, topic, settings)
            group = make_group(self._grouping, topic, name, since_ms, now, settings)
        answer = {"topic": topic_name, "group": name}
        answer |= settings_map(group.settings, core.policies)
        self._parts.committer.answer(call, answer | {"created": created})
        self._parts.wake()

    def delete_group(self, call: Call[GroupDeletion]) -> None:
        """Delete a group with its tasks, and answer with their counts; with ``dry_run`` only
        answer. Raise NotFound, Conflict; Refused while tasks that came due before the start may be
        missing in the counts."""
        topic_name, name, force = call.request.topic, call.request.group, call.request.force
        group = find_group(self._core, topic_name, name)
        counts = {
            "ready": group.ready_count,
            "in_flight": len(group.flight),
            "waiting": len(group.waiting),
            "dead": group.dead,
        }
        if not force and (any(counts.values()) or group.subscribers):
            counts_text = ", ".join(f"{count} {word}" for word, count in counts.items())
            raise Conflict(
                f"group {name} of topic {topic_name} holds {counts_text} and has"
                f" {len(group.subscribers)} subscribers; use force to delete it anyway"
            )
        ownership = self._parts.engine.ownership
        if not force and ownership.unfired_ms() <= ownership.started_ms:
            raise Refused(
                f"group {name} of topic {topic_name} may hold tasks that are still being loaded"
                " after the start of the daemon; try again soon, or use force to delete it anyway"
            )
        if not call.request.dry_run:
            self._parts.border.act()
            self._upkeep.end_group(group)
            targets_changed(self._parts)
        self._parts.committer.answer(call, counts)
        self._parts.wake()

    def delete_topic(self, call: Call[Deletion]) -> None:
        """Delete a topic with its groups, settings, dead letters and tasks, and answer with the
        counts; with ``dry_run`` only answer. The tasks end as deleted. Raise NotFound, Refused,
        Overloaded; Conflict if a schedule enqueues to the topic, or if it has tasks or subscribers
        and ``force`` is not set."""

        def done() -> None:
            held = self._delete_topic(call.request, call.now)
            self._parts.committer.answer(call, held)
            self._parts.wake()

        # Commands run after every stored task is in memory, so the counts are complete.
        self._parts.commands.put_last(call, done)

    def _delete_topic(self, request: Deletion, now: Now) -> dict[str, int]:
        name = request.topic
        topic = self._core.topics.get(name)
        if topic is None:
            raise NotFound(f"there is no topic {name}")
        check_stays(self._core, name)
        self._check_unscheduled(name)
        closing = self._parts.engine.topic_closing
        held = closing.held(topic)
        subscribers = sum(len(group.subscribers) for group in topic.groups.values())
        subscribers += len(topic.broadcasters)
        if not request.force and (subscribers or any(held[state] for state in COUNTED_STATES)):
            counts = ", ".join(f"{held[state]} {state}" for state in COUNTED_STATES)
            raise Conflict(
                f"topic {name} holds {counts} and has {subscribers} subscribers; use force to"
                " delete it anyway"
            )
        if request.dry_run:
            return held
        self._parts.border.act()
        for group in closing.close(topic, now.now_ms):
            self._upkeep.drain(group)
        self._upkeep.withdraw(topic)
        targets_changed(self._parts)
        return held

    def _check_unscheduled(self, topic: str) -> None:
        """Raise Conflict if a schedule enqueues to the topic, as it would create the topic
        again."""
        known = self._core.schedule_heap.by_name
        names = sorted(n for n, planned in known.items() if planned.row.schedule.topic == topic)
        if names:
            more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
            raise Conflict(
                f"schedules enqueue to topic {topic}: {', '.join(names[:NAMED_MAX])}{more};"
                " delete them first"
            )

    def configure(self, call: Call[Settings]) -> None:
        """Change settings of a group, or of the topic if no group is named. Answer with all
        settings. Raise BadRequest, LimitExceeded, NotFound."""
        topic_name, name, now = call.request.topic, call.request.group, call.now
        settings = call.request.values(SettingsFields)
        core, is_ordered = self._core, False
        if name is None:
            for field in OF_GROUPS:
                if settings.get(field) is not None:
                    raise BadRequest(f"{field} is a setting of a group, not of a topic")
            topic, _ = find_room(self._parts, topic_name, None)
            after = checks.settings(settings, topic.settings, core.policies, now.now_ms)
            checks.storable_settings(after)
            check_broadcast_only(topic, after)
            if after != topic.settings:
                set_topic(self._grouping, self._upkeep, topic, after, now)
        else:
            group = find_group(self._core, topic_name, name)
            is_ordered = group.is_ordered
            _check_group_settings(settings)
            after = checks.settings(settings, group.settings, core.policies, now.now_ms)
            checks.storable_settings(after)
            after = with_filter(self._parts, group, after, now.now_ms)
            if after != group.settings:
                self._grouping.set(group, after, now.mono_ms)
        answer = {"topic": topic_name, "group": name}
        answer |= settings_map(after, core.policies, is_ordered=is_ordered)
        self._parts.committer.answer(call, answer)
        self._parts.wake()


def targets_changed(parts: Parts) -> None:
    """Tell the outbound process that targets were set or removed."""
    if parts.outbound is not None:
        parts.outbound.changed()


def find_group(core: Core, topic: str, name: str) -> Group:
    """Return the group. Raise NotFound if it does not exist or is being deleted."""
    group = core.find_group(topic, name)
    if group is None or group.is_closed:
        raise NotFound(f"topic {topic} has no group {name}")
    return group


def find_room(parts: Parts, topic_name: str, name: str | None) -> tuple[Topic, Group | None]:
    """Return (the topic, created if necessary; the group, or None if it does not exist). Raise
    LimitExceeded if there is no room for a new topic or group, Conflict if the topic is for
    broadcasts only, and Refused while the topic or group is being deleted."""
    core = parts.core
    check_stays(core, topic_name)
    config, topic = core.config, core.topics.get(topic_name)
    if topic is None:
        reserve_topics(parts, (topic_name,))
    group = topic.groups.get(name) if topic is not None and name is not None else None
    if group is None and name is not None and core.group_count >= config.groups_max:
        raise LimitExceeded(
            f"cannot create group {name} of topic {topic_name}: there are already"
            f" {core.group_count} groups; the limit is {config.groups_max} (groups_max)"
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
            f"cannot create group {name}: topic {topic_name} has {len(topic.groups)} groups; the"
            f" limit is {config.groups_per_topic_max} (groups_per_topic_max)"
        )
    if group is not None and group.is_closed:
        raise Refused(f"group {name} of topic {topic_name} is being deleted; try again soon")
    return topic, group


def reserve_topics(parts: Parts, names: Iterable[str]) -> None:
    """Make room for those of these topics that do not exist. Raise LimitExceeded."""
    topics, topics_max = parts.core.topics, parts.core.config.topics_max
    new_names = [name for name in names if name not in topics]
    while len(topics) + len(new_names) > topics_max and parts.core.maybe_idle:
        if not forget_topics(parts, TOPICS_EXAMINED):
            break
    if len(topics) + len(new_names) > topics_max:
        raise LimitExceeded(
            f"cannot create topic {new_names[0]}: there are already {len(topics)} topics;"
            f" the limit is {topics_max} (topics_max)"
        )


def forget_topics(parts: Parts, limit: int) -> int:
    """Examine up to ``limit`` topics and forget the idle ones. Return how many were forgotten."""
    forgotten = parts.engine.grouping.forget_idle(limit)
    parts.observed.lateness.forget(forgotten)
    return len(forgotten)


def check_filter_room(core: Core, topic: Topic, wanted: Filter, own_steps: int = 0) -> None:
    """Raise LimitExceeded if ``wanted`` would make the topic's filters take too many steps, or all
    filters together too long. ``own_steps`` are the steps of the filter that ``wanted``
    replaces."""
    steps = topic.steps() + topic.broadcast_steps() - own_steps + wanted.steps
    if steps > TOPIC_STEPS_MAX and not wanted.is_open:
        raise LimitExceeded(
            f"evaluating all filters of topic {topic.name} for a task would take {steps} steps; the"
            f" limit is {TOPIC_STEPS_MAX} (TOPIC_STEPS_MAX)"
        )
    length = core.filters_length + len(wanted.tags or "") + len(wanted.where or "")
    if length > FILTERS_LENGTH_MAX and not wanted.is_open:
        raise LimitExceeded(
            f"the filters of all groups would have {length} characters; the limit is"
            f" {FILTERS_LENGTH_MAX} (FILTERS_LENGTH_MAX)"
        )


def check_filter(core: Core, topic: Topic, settings: GroupSettings) -> None:
    """Check the filter of a new group with these settings. Raise BadRequest, LimitExceeded."""
    check_filter_room(core, topic, checks.filter_of(settings.tags, settings.where))


def with_filter(parts: Parts, group: Group, after: GroupSettings, now_ms: int) -> GroupSettings:
    """Return new settings of a group. Raise LimitExceeded. If the filter changes, the settings keep
    the former filter for tasks that have already come due."""
    before = group.settings
    wanted = checks.filter_of(after.tags, after.where)
    if wanted == checks.filter_of(before.tags, before.where):
        return after
    own_steps = 0 if group.judge is None else group.judge.steps
    check_filter_room(parts.core, group.topic, wanted, own_steps)
    after = parts.engine.grouping.with_filter(group, after, wanted.tags, wanted.where, now_ms)
    if len(after.former) > FORMER_FILTERS_MAX:
        raise LimitExceeded(
            f"group {group.name} of topic {group.topic.name} has {len(after.former)} former filters"
            " that unfinished tasks and dead letters depend on; the limit is"
            f" {FORMER_FILTERS_MAX} (FORMER_FILTERS_MAX)"
        )
    return after


def check_broadcast_only(topic: Topic, after: GroupSettings) -> None:
    """Raise Conflict if the settings make the topic broadcast-only although it has groups."""
    if after.broadcast_only and topic.groups:
        raise Conflict(
            f"topic {topic.name} has {len(topic.groups)} groups, which are owed its tasks; delete"
            " the groups before you set broadcast_only"
        )


def set_topic(
    grouping: GroupVerbs, upkeep: Upkeep, topic: Topic, settings: GroupSettings, now: Now
) -> None:
    """Replace the settings of a topic."""
    grouping.set_topic(topic, settings, now.mono_ms)
    if settings.broadcast_only:
        upkeep.end_backlog(topic)


def make_group(
    grouping: GroupVerbs,
    topic: Topic,
    name: str,
    since_ms: int | None,
    now: Now,
    settings: GroupSettings,
) -> Group:
    """Create a group with all these settings. ``since_ms`` is the one of ``begin_group``."""
    group = begin_group(grouping, topic, name, since_ms, now.now_ms, settings)
    if settings != group.settings:
        grouping.set(group, settings, now.mono_ms)
    return group


def begin_group(
    grouping: GroupVerbs,
    topic: Topic,
    name: str,
    since_ms: int | None,
    now_ms: int,
    settings: GroupSettings = NOTHING_SET,
) -> Group:
    """Create a group with only the filter of ``settings``, from ``since_ms`` on (None: now)."""
    if since_ms is None:
        return grouping.create_now(topic, name, now_ms, settings)
    return grouping.create(topic, name, since_ms, settings, by_due=since_ms > now_ms)


def _check_group_settings(settings: dict[str, Any]) -> None:
    for name in TOPIC_SETTINGS:
        if settings.get(name):
            raise BadRequest(f"{name} is a setting of a topic, not of a group")


def _since(value: object) -> int | None:
    """Return the start in ms; None means now."""
    if value == "now":
        return None
    if value == "first":
        return 0
    if type(value) is not int:
        checks.wrong("since", "'now', 'first' or milliseconds", value)
    return checks.moment(value, "since")


async def in_steps(topics: Iterable[Topic]) -> AsyncIterator[Topic]:
    """Yield the topics, and let other work run after each ``TOPICS_PER_STEP``."""
    visited = 0
    for topic in topics:
        visited += 1 + len(topic.groups)
        if visited > TOPICS_PER_STEP:
            await asyncio.sleep(0)
            visited = 1 + len(topic.groups)
        yield topic


NOT_HELD = "not_held"

Verb = Callable[["Group", "TaskSnapshot", int], str]


class KeyOperations:
    """The operations on order keys and fair shares of a group, by default the default group."""

    def __init__(self, parts: Parts, value_bytes: ValueBytes) -> None:
        self._parts = parts
        self._key_control = parts.engine.key_control
        self._value_bytes = value_bytes

    def held_keys(self, call: Call[KeysPage]) -> None:
        """Answer with held keys, oldest first, and paused keys. Raise NotFound, Overloaded."""
        limit = call.request.limit

        def answer(group: Group, maps: list[dict[str, Any]]) -> dict[str, Any]:
            return {"keys": maps, "held": group.held, "paused": self._paused(group, limit)}

        self._show(call, lambda group: self._key_control.held_keys(group, limit), _held_map, answer)

    def _paused(self, group: Group, limit: int) -> list[dict[str, Any]]:
        """Return as many paused keys as fit into an answer that also contains held keys."""
        bytes_left = self._parts.limits.frame_bytes_max // 4
        maps: list[dict[str, Any]] = []
        for paused in self._key_control.paused_keys(group)[:limit]:
            line = _paused_map(paused)
            bytes_left -= self._value_bytes(line)
            if bytes_left <= 0:
                break
            maps.append(line)
        return maps

    def key_lines(self, call: Call[KeysPage]) -> None:
        """Answer with the order keys and fair-share values that have the most waiting tasks, and
        the number of all waiting tasks. Raise NotFound, Overloaded."""
        limit = call.request.limit

        def answer(group: Group, maps: list[dict[str, Any]]) -> dict[str, Any]:
            return {"lines": maps, "waiting": group.awaiting_turn}

        self._show(
            call,
            lambda group: self._key_control.longest_queues(group, limit),
            _key_queue_map,
            answer,
        )

    def _show(
        self,
        call: Call[KeysPage],
        list_keys: Callable[[Group], Sequence[Any]],
        describe: Callable[[Any, TaskSnapshot, Group], dict[str, Any]],
        answer: Callable[[Group, list[dict[str, Any]]], dict[str, Any]],
    ) -> None:
        """Answer with as many keys as fit, without keys whose task has left since the listing."""
        parts, names = self._parts, _names(call.request)
        self._find(names)
        bytes_left = parts.limits.frame_bytes_max // 2
        keys: list[Any] = []
        maps: list[dict[str, Any]] = []

        def find() -> tuple[Sequence[int], int]:
            group = self._find(names)
            keys[:] = list_keys(group)
            return [key.task_id for key in keys], self._key_control.listing_steps(group)

        def act(indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> None:
            nonlocal bytes_left
            for index in indexes:
                task = snapshots.get(keys[index].task_id)
                if task is None or bytes_left <= 0:
                    continue
                line = describe(keys[index], task, self._find(names))
                bytes_left -= self._value_bytes(line)
                if bytes_left > 0:
                    maps.append(line)

        def done() -> None:
            parts.committer.answer(call, answer(self._find(names), maps))

        parts.commands.put(call.caller, call.refuse, find, act, done, lambda: call.caller.is_open)

    def release_key(self, call: Call[HeldTasks]) -> None:
        """Retry held tasks, by id or by ``key``, at once, and reset their failures. Answer with
        (id, "released" or "not_held") for each. Raise NotFound, Overloaded."""
        self._act(call, self._key_control.release)

    def skip_key(self, call: Call[HeldTasks]) -> None:
        """Turn held tasks into dead letters, which unblocks their keys. Answer with (id, "skipped"
        or "not_held") for each. Raise NotFound, Overloaded."""
        self._act(call, self._key_control.skip)

    def _act(self, call: Call[HeldTasks], verb: Verb) -> None:
        parts, names = self._parts, _names(call.request)
        ids, key = call.request.ids or (), call.request.key
        self._find(names)
        candidates: list[int] = []
        words: dict[int, str] = {}

        def find() -> tuple[Sequence[int], int]:
            group = self._find(names)
            if key is None:
                candidates[:] = dict.fromkeys(ids)
                return candidates, len(candidates)
            candidates[:] = self._key_control.held_tasks(group, key)
            return candidates, group.held

        def act(indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> None:
            parts.border.act()
            group, now_ms = self._find(names), parts.clock.read().now_ms
            for index in indexes:
                task = snapshots.get(candidates[index])
                if task is None or task.row.topic != names[0]:
                    continue
                if key is None or _order_key(task.row) == key:
                    words[task.row.id] = verb(group, task, now_ms)

        def done() -> None:
            answer: list[tuple[int | None, str]] = list(words.items())
            if key is None:
                answer = [(task_id, words.get(task_id, NOT_HELD)) for task_id in ids]
            parts.committer.answer(call, answer or [(None, NOT_HELD)])
            parts.wake()

        parts.commands.put(call.caller, call.refuse, find, act, done)

    def pause_key(self, call: Call[OneKey]) -> None:
        """Stop deliveries of a key until it is resumed. Raise NotFound, Conflict, LimitExceeded."""
        group, fair_by, value = self._key(call.request)
        by = call.caller.principal.name or "anonymous"
        key = PausedKey(group.topic.name, group.name, fair_by, value, call.now.now_ms, by)
        count, limit = len(group.paused_keys), self._parts.limits.paused_keys_max
        if count >= limit and mark_of_key(fair_by, value) not in group.paused_keys:
            raise LimitExceeded(
                f"group {group.name} of topic {group.topic.name} has {count} paused keys; the limit"
                f" is {limit} (paused_keys_max)"
            )
        paused_key = self._parts.border.act().key_control.pause(group, key)
        self._answer_with_pause(call, paused_key, paused=True, changed=paused_key is key)

    def resume_key(self, call: Call[OneKey]) -> None:
        """Resume deliveries of a paused key's tasks. Raise NotFound, Conflict."""
        group_and_key = self._key(call.request)
        paused_key = self._parts.border.act().key_control.resume(*group_and_key, call.now.now_ms)
        self._answer_with_pause(call, paused_key, paused=False, changed=paused_key is not None)

    def _key(self, request: OneKey) -> tuple[Group, str | None, Any]:
        """Return (the group, its ``fair_by`` or None for an order key, the value of the key)."""
        group = self._find(_names(request))
        if request.value is None:
            return group, None, request.key
        if group.settings.shares.fair_by is None:
            raise Conflict(
                f"group {group.name} of topic {group.topic.name} has no fair_by, so value"
                " is not a valid field; use key"
            )
        return group, group.settings.shares.fair_by, request.value

    def _answer_with_pause(
        self, call: Call[OneKey], paused_key: PausedKey | None, *, paused: bool, changed: bool
    ) -> None:
        since_ms, by = (None, None) if paused_key is None else (paused_key.since_ms, paused_key.by)
        answer = {"paused": paused, "changed": changed, "since_ms": since_ms, "by": by}
        self._parts.committer.answer(call, answer)
        self._parts.wake()

    def _find(self, names: tuple[str, str]) -> Group:
        return find_group(self._parts.core, *names)


def _names(request: OfGroupOrDefault) -> tuple[str, str]:
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


def _paused_map(paused: PausedKeyState) -> dict[str, Any]:
    key = paused.key
    return {
        "kind": "order" if key.fair_by is None else "fair",
        "value": key.value,
        "since_ms": key.since_ms,
        "by": key.by,
        "waiting": paused.waiting,
    }


def _key_queue_map(line: KeyQueueState, task: TaskSnapshot, group: Group) -> dict[str, Any]:
    return {
        "id": line.task_id,
        "kind": line.kind,
        "value": _value(line.kind, task.row, group.settings),
        "state": line.state,
        "in_flight": line.in_flight,
        "waiting": line.waiting,
    }


def _value(kind: str, row: TaskRow, settings: GroupSettings) -> Any:
    """Return the task's order key or fair-share value, or None if it has none."""
    if kind == "order":
        return _order_key(row)
    return None if settings.shares.fair_by is None else shared_value(row, settings.shares.fair_by)
