"""GROUP_CREATE, GROUP_DELETE and CONFIGURE: groups and what is set for them and for topics."""

from __future__ import annotations

from typing import Any

from tickwheel.clock import Now
from tickwheel.engine.groups import Grouping as GroupVerbs
from tickwheel.engine.topics import NOTHING_SET, Group, Topic
from tickwheel.errors import Conflict, LimitExceeded, NotFound, Refused
from tickwheel.server import policies
from tickwheel.server.shard.shard import Shell
from tickwheel.server.tcp import decode as checks
from tickwheel.server.tcp.connection import Connection

SINCE_MS_MAX = 2**53 - 1
_SETTINGS = ("paused", "rate", "burst", "retry")


class Grouping:
    """Each answer waits until what it says is durable."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._core = shell.core

    @property
    def _grouping(self) -> GroupVerbs:
        return self._shell.act().grouping

    def create(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 3, "topic, group, options")
        request = checks.request_number(frame[1])
        topic_name, name = checks.name(frame[2], "topic"), checks.name(frame[3], "group")
        options = checks.options(frame[4], ("since", *_SETTINGS))
        since_ms = _since(options.get("since", "now"))
        core = self._core
        settings = policies.settings(options, NOTHING_SET, core.policies)
        topic, known = find_room(self._shell, topic_name, name)
        if known is None:
            if since_ms is None:
                known = self._grouping.create_now(topic, name, now.now_ms)
            else:
                by_due = since_ms > now.now_ms
                known = self._grouping.create(topic, name, since_ms, by_due=by_due)
            if settings != NOTHING_SET:
                self._grouping.set(known, settings, now.mono_ms)
            created = True
        else:
            created = False
        told = policies.settings_map(topic_name, name, known.settings, core.policies)
        peer.ok(request, told | {"created": created})
        self._shell.poke()

    def delete(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 3, "topic, group, force")
        request = checks.request_number(frame[1])
        topic_name, name = checks.name(frame[2], "topic"), checks.name(frame[3], "group")
        force = frame[4]
        if not isinstance(force, bool):
            checks.wrong("force", "true or false", force)
        group = self._core.find_group(topic_name, name)
        if group is None or group.is_closed:
            raise NotFound(f"topic {topic_name} has no group {name}")
        held = {
            "ready": group.ready_count,
            "in_flight": len(group.flight),
            "waiting": len(group.waiting),
            "dead": group.dead,
        }
        if not force and (any(held.values()) or group.subscribers):
            told = ", ".join(f"{count} {word}" for word, count in held.items())
            raise Conflict(
                f"group {name} of topic {topic_name} holds {told}, and has"
                f" {len(group.subscribers)} subscribers; delete it by force if that may go"
            )
        closing = self._shell.act().closing
        closing.close(group)
        if closing.is_drained(group):
            closing.finish(group)
        else:
            self._shell.upkeep.drain(group)
        peer.ok(request, held)
        self._shell.poke()

    def configure(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 3, "topic, group, settings")
        request = checks.request_number(frame[1])
        topic_name = checks.name(frame[2], "topic")
        name = None if frame[3] is None else checks.name(frame[3], "group")
        given, core = checks.options(frame[4], _SETTINGS), self._core
        if name is None:
            topic, _ = find_room(self._shell, topic_name, None)
            after = policies.settings(given, topic.settings, core.policies)
            if after != topic.settings:
                self._grouping.set_topic(topic, after, now.mono_ms)
        else:
            group = core.find_group(topic_name, name)
            if group is None or group.is_closed:
                raise NotFound(f"topic {topic_name} has no group {name}")
            after = policies.settings(given, group.settings, core.policies)
            if after != group.settings:
                self._grouping.set(group, after, now.mono_ms)
        peer.ok(request, policies.settings_map(topic_name, name, after, core.policies))
        self._shell.poke()


def find_room(shell: Shell, topic_name: str, name: str | None) -> tuple[Topic, Group | None]:
    """The topic, made if there is room for another; the group, or None when there is room for it.

    Raises LimitExceeded, or Refused while the group is being deleted.
    """
    core = shell.core
    config, topic = core.config, core.topics.get(topic_name)
    if topic is None:
        shell.make_topic_room((topic_name,))
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
    if group is None and len(topic.groups) >= config.groups_per_topic_max:
        raise LimitExceeded(
            f"group {name} is new and topic {topic_name} has {len(topic.groups)} groups; the"
            f" limit is {config.groups_per_topic_max} (groups_per_topic_max)"
        )
    if group is not None and group.is_closed:
        raise Refused(f"group {name} of topic {topic_name} is being deleted; try again soon")
    return topic, group


def _since(value: object) -> int | None:
    """None: from now on."""
    if value == "now":
        return None
    if value == "first":
        return 0
    if type(value) is not int:
        checks.wrong("since", "'now', 'first' or milliseconds", value)
    return checks.integer(value, "since", 0, SINCE_MS_MAX)
