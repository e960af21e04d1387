"""The verbs of the asynchronous client with one request and one answer.

Written by scripts/generate from the verbs of tickwheel/api: change that, and run it.
"""

# ruff: noqa: A002
from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Unpack, overload

from tickwheel.api.bulk import BulkInfo
from tickwheel.api.daemon import Backup, ConsumerInfo, Load, Overview, Stats, Status, TaskHistory
from tickwheel.api.frames import (
    BulkState,
    CancelWord,
    DeleteWord,
    PushFormat,
    ReleaseKeyWord,
    RequeueWord,
    SkipKeyWord,
    TaskState,
    TransactionState,
)
from tickwheel.api.groups import (
    GroupHeld,
    GroupSettings,
    HeldKey,
    KeyLine,
    KeyPause,
    PausedKey,
    ResetPreview,
    TopicHeld,
)
from tickwheel.api.nodes import NodeDrained, Nodes, ShardPlaced
from tickwheel.api.schedules import ScheduleInfo
from tickwheel.api.targets import PushSent, TargetInfo, TargetRemoved
from tickwheel.api.tasks import DeadLetter, TaskInfo, TaskOutcome, Value
from tickwheel.api.times import Duration
from tickwheel.api.transactions import TransactionInfo
from tickwheel.client.keywords import (
    DeadSelectionKeywords,
    NewGroupKeywords,
    SettingsKeywords,
    TaskSelectionKeywords,
)
from tickwheel.client.link import Verbs
from tickwheel.client.requests import own_name
from tickwheel.client.tasks import refuse_unknown, spelled_out


class GeneratedVerbs(Verbs):
    """One method for each verb with one request and one answer."""

    @overload
    async def cancel(self, task_id: int, *, timeout: Duration | None = None) -> CancelWord: ...
    @overload
    async def cancel(
        self, *, topic: str, key: str, timeout: Duration | None = None
    ) -> list[TaskOutcome]: ...
    @overload
    async def cancel(
        self,
        *,
        topic: str,
        filter: TaskSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    async def cancel(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        filter: TaskSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> CancelWord | list[TaskOutcome] | BulkInfo:
        """Cancel tasks that no consumer has. The status of each is "cancelled",
        "already_cancelled", or the state that prevents it: "in_flight", "acked", "expired", "dead",
        "gone", "unknown", … By topic and key: every unfinished task with that key, the oldest
        first, each with an outcome. Without any, the last finished task that the daemon remembers,
        or a single outcome "unknown" without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty dict selects the whole
        topic): a bulk operation, which is durable when this returns and runs in the background
        (``wait_bulk``). It ignores tasks that are enqueued, or die, later. ``rate``: maximum
        changes per second. ``id``: your name for it, as in ``reset_group``. Raises NotFound for an
        unknown topic, Overloaded when too many bulk operations are running."""
        return await self._selected(
            "cancel", task_id, topic, key, filter, {"rate": rate, "id": id}, timeout
        )

    async def cancel_many(
        self, ids: Iterable[int], *, timeout: Duration | None = None
    ) -> list[CancelWord]:
        """``cancel`` of each, in order."""
        return [one.status for one in await self._each("cancel", ids, timeout, {})]

    @overload
    async def reschedule(
        self,
        task_id: int,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome: ...
    @overload
    async def reschedule(
        self,
        *,
        topic: str,
        key: str,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskOutcome]: ...
    @overload
    async def reschedule(
        self,
        *,
        topic: str,
        filter: TaskSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    async def reschedule(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        filter: TaskSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome | list[TaskOutcome] | BulkInfo:
        """Give tasks a new due time by exactly one of ``delay`` (from now, by the daemon's clock),
        ``at`` and ``shift``. By topic and key: every unfinished task with that key, the oldest
        first, each with an outcome. Without any, the last finished task that the daemon remembers,
        or a single outcome "unknown" without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty dict selects the whole
        topic): a bulk operation, which is durable when this returns and runs in the background
        (``wait_bulk``). It ignores tasks that are enqueued, or die, later. ``rate``: maximum
        changes per second. ``id``: your name for it, as in ``reset_group``. Raises NotFound for an
        unknown topic, Overloaded when too many bulk operations are running.

        ``delay``: the new delay, counted from now. ``at``: the new due time. ``shift``: how much
        later each task becomes due; negative values mean earlier."""
        return await self._selected(
            "reschedule",
            task_id,
            topic,
            key,
            filter,
            {"rate": rate, "id": id, "delay": delay, "at": at, "shift": shift},
            timeout,
        )

    async def reschedule_many(
        self,
        ids: Iterable[int],
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        shift: Duration | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskOutcome]:
        """``reschedule`` of each, in order."""
        return await self._each(
            "reschedule", ids, timeout, {"delay": delay, "at": at, "shift": shift}
        )

    @overload
    async def spread(
        self,
        task_id: int,
        *,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome: ...
    @overload
    async def spread(
        self,
        *,
        topic: str,
        key: str,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskOutcome]: ...
    @overload
    async def spread(
        self,
        *,
        topic: str,
        filter: TaskSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    async def spread(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        filter: TaskSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome | list[TaskOutcome] | BulkInfo:
        """Give scheduled tasks a due window: each task moves to one of its emptiest ticks, which
        becomes its due time. A task that is not scheduled does not move, and its state is the
        status. By topic and key: every unfinished task with that key, the oldest first, each with
        an outcome. Without any, the last finished task that the daemon remembers, or a single
        outcome "unknown" without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty dict selects the whole
        topic): a bulk operation, which is durable when this returns and runs in the background
        (``wait_bulk``). It ignores tasks that are enqueued, or die, later. ``rate``: maximum
        changes per second. ``id``: your name for it, as in ``reset_group``. Raises NotFound for an
        unknown topic, Overloaded when too many bulk operations are running.

        ``start``: the start of the window; by default each task's own due time. ``within``: the
        length of the window. ``end``: the first moment after the window."""
        return await self._selected(
            "spread",
            task_id,
            topic,
            key,
            filter,
            {"rate": rate, "id": id, "start": start, "within": within, "end": end},
            timeout,
        )

    async def spread_many(
        self,
        ids: Iterable[int],
        *,
        start: datetime | None = None,
        within: Duration | None = None,
        end: datetime | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskOutcome]:
        """``spread`` of each, in order."""
        return await self._each(
            "spread", ids, timeout, {"start": start, "within": within, "end": end}
        )

    @overload
    async def run_now(self, task_id: int, *, timeout: Duration | None = None) -> TaskOutcome: ...
    @overload
    async def run_now(
        self, *, topic: str, key: str, timeout: Duration | None = None
    ) -> list[TaskOutcome]: ...
    @overload
    async def run_now(
        self,
        *,
        topic: str,
        filter: TaskSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    async def run_now(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        filter: TaskSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> TaskOutcome | list[TaskOutcome] | BulkInfo:
        """Make tasks due now. By topic and key: every unfinished task with that key, the oldest
        first, each with an outcome. Without any, the last finished task that the daemon remembers,
        or a single outcome "unknown" without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty dict selects the whole
        topic): a bulk operation, which is durable when this returns and runs in the background
        (``wait_bulk``). It ignores tasks that are enqueued, or die, later. ``rate``: maximum
        changes per second. ``id``: your name for it, as in ``reset_group``. Raises NotFound for an
        unknown topic, Overloaded when too many bulk operations are running."""
        return await self._selected(
            "run_now", task_id, topic, key, filter, {"rate": rate, "id": id}, timeout
        )

    async def run_now_many(
        self, ids: Iterable[int], *, timeout: Duration | None = None
    ) -> list[TaskOutcome]:
        """``run_now`` of each, in order."""
        return await self._each("run_now", ids, timeout, {})

    def list_tasks(
        self,
        *,
        topic: str | None = None,
        state: TaskState | None = None,
        key: str | None = None,
        key_prefix: str | None = None,
        tag: str | None = None,
        property: str | None = None,
        not_after: datetime | None = None,
        newest_first: bool = False,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[TaskInfo]:
        """Return stored tasks in the order of their ids, descending with ``newest_first``.
        Filtering by a key without its topic uses no index and reads all tasks. Read page by page,
        at most ``limit``; ``timeout`` is for each page.

        ``topic``: only tasks of this topic. ``state``: only tasks in this state. ``key``: only
        tasks with this key. ``key_prefix``: only tasks whose key begins with this text. ``tag``:
        only tasks with this tag. ``property``: only tasks with this property: NAME=VALUE.
        ``not_after``: only tasks that were enqueued at this moment or earlier. ``newest_first``:
        list the newest tasks first."""
        return self._pages(
            "list_tasks",
            {
                "topic": topic,
                "state": state,
                "key": key,
                "key_prefix": key_prefix,
                "tag": tag,
                "property": property,
                "not_after": not_after,
                "newest_first": newest_first,
            },
            limit,
            timeout,
        )

    def peek(
        self,
        topic: str,
        *,
        key: str | None = None,
        due: bool = False,
        newest_first: bool = False,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[TaskInfo]:
        """Return the tasks that the topic still has to deliver, with their bodies: scheduled,
        ready, in flight and waiting for a retry, but no dead letters. Peeking needs no group, takes
        no lease and counts no attempt. Read page by page, at most ``limit``; ``timeout`` is for
        each page.

        ``key``: only tasks with this key. ``due``: only tasks that are due. ``newest_first``: list
        tasks in descending order of ids."""
        return self._pages(
            "peek",
            {"topic": topic, "key": key, "due": due, "newest_first": newest_first},
            limit,
            timeout,
        )

    def dead_list(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        reason: str | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[DeadLetter]:
        """Return dead letters in the order of their ids. Read page by page, at most ``limit``;
        ``timeout`` is for each page.

        ``topic``: only dead letters of this topic. ``group``: only dead letters of this group.
        ``since``: only tasks that died at this moment or later. ``until``: only tasks that died
        before this moment. ``reason``: only dead letters whose last reason contains this text,
        ignoring case."""
        return self._pages(
            "list_dead",
            {"topic": topic, "group": group, "since": since, "until": until, "reason": reason},
            limit,
            timeout,
        )

    @overload
    async def dead_requeue(
        self,
        pairs: Iterable[tuple[int, str]],
        *,
        ttl: Duration | None = None,
        timeout: Duration | None = None,
    ) -> list[RequeueWord]: ...
    @overload
    async def dead_requeue(
        self,
        *,
        topic: str,
        filter: DeadSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        ttl: Duration | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    async def dead_requeue(
        self,
        pairs: Iterable[tuple[int, str]] | None = None,
        *,
        topic: str | None = None,
        filter: DeadSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        ttl: Duration | None = None,
        timeout: Duration | None = None,
    ) -> list[RequeueWord] | BulkInfo:
        """Deliver dead letters again and reset their failures. Return for each "requeued",
        "unknown", or "ttl_over" if its time to live has passed and ``ttl`` is not given. ``pairs``:
        (id, group) of each dead letter.

        By topic and ``filter``, a dict of DeadSelectionKeywords (an empty dict selects the whole
        topic): a bulk operation, which is durable when this returns and runs in the background
        (``wait_bulk``). It ignores tasks that are enqueued, or die, later. ``rate``: maximum
        changes per second. ``id``: your name for it, as in ``reset_group``. Raises NotFound for an
        unknown topic, Overloaded when too many bulk operations are running.

        ``ttl``: a new time to live, counted from the requeue. It replaces the task's own in all of
        its groups."""
        return await self._selected(
            "requeue_dead",
            pairs,
            topic,
            None,
            filter,
            {"rate": rate, "id": id, "ttl": ttl},
            timeout,
        )

    @overload
    async def dead_delete(
        self, pairs: Iterable[tuple[int, str]], *, timeout: Duration | None = None
    ) -> list[DeleteWord]: ...
    @overload
    async def dead_delete(
        self,
        *,
        topic: str,
        filter: DeadSelectionKeywords,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo: ...
    async def dead_delete(
        self,
        pairs: Iterable[tuple[int, str]] | None = None,
        *,
        topic: str | None = None,
        filter: DeadSelectionKeywords | None = None,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> list[DeleteWord] | BulkInfo:
        """Delete dead letters permanently. Return "deleted" or "unknown" for each. ``pairs``: (id,
        group) of each dead letter.

        By topic and ``filter``, a dict of DeadSelectionKeywords (an empty dict selects the whole
        topic): a bulk operation, which is durable when this returns and runs in the background
        (``wait_bulk``). It ignores tasks that are enqueued, or die, later. ``rate``: maximum
        changes per second. ``id``: your name for it, as in ``reset_group``. Raises NotFound for an
        unknown topic, Overloaded when too many bulk operations are running."""
        return await self._selected(
            "delete_dead", pairs, topic, None, filter, {"rate": rate, "id": id}, timeout
        )

    @spelled_out(NewGroupKeywords)
    async def create_group(
        self,
        topic: str,
        group: str,
        *,
        start: datetime | str = "now",
        timeout: Duration | None = None,
        **settings: Unpack[NewGroupKeywords],
    ) -> GroupSettings:
        """Create a group before its first subscriber connects. An existing group does not change,
        and ``created`` in the answer is false.

        ``start``: the group is owed tasks that come due from "now" on, from the "first" stored task
        on, or from a moment on. ``settings`` are those of NewGroupKeywords."""
        refuse_unknown(settings, NewGroupKeywords, "Client.create_group")
        return await self._ask(
            "create_group", {"topic": topic, "group": group, "start": start, **settings}, timeout
        )

    @spelled_out(SettingsKeywords)
    async def configure(
        self,
        topic: str,
        group: str | None = None,
        *,
        timeout: Duration | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> GroupSettings:
        """Change settings of a group, or of the topic itself. Settings that are left out do not
        change; None removes a setting. A filter applies to tasks that come due from now on. The
        change is durable when the call returns. Raise NotFound if there is no such group, and
        Conflict for ``broadcast_only`` if the topic has groups.

        ``settings`` are those of SettingsKeywords."""
        refuse_unknown(settings, SettingsKeywords, "Client.configure")
        return await self._ask("configure", {"topic": topic, "group": group, **settings}, timeout)

    async def delete_group(
        self, topic: str, group: str, *, force: bool = False, timeout: Duration | None = None
    ) -> GroupHeld:
        """Delete a group and return the number of tasks that it held. Raise Conflict if it holds
        tasks, unless ``force``, which drops them for this group.

        ``force``: delete it even if it holds tasks or has subscribers."""
        return await self._ask(
            "delete_group", {"topic": topic, "group": group, "force": force}, timeout
        )

    async def delete_topic(
        self, topic: str, *, force: bool = False, timeout: Duration | None = None
    ) -> TopicHeld:
        """Delete a topic with its groups, settings and dead letters, and return the number of tasks
        that it held. The deletion is durable when the call returns. Its tasks are deleted in the
        background, and until then the topic takes no new tasks (Refused). Raise Conflict if the
        topic holds tasks or has subscribers, unless ``force``, and always if a schedule enqueues to
        it. Raise NotFound if there is no such topic.

        ``force``: delete it even if it holds tasks or has subscribers."""
        return await self._ask("delete_topic", {"topic": topic, "force": force}, timeout)

    async def reset_group(
        self,
        topic: str,
        group: str,
        *,
        to: datetime | str,
        rate: float | None = None,
        id: str | None = None,
        timeout: Duration | None = None,
    ) -> BulkInfo:
        """Deliver those tasks to the group that came due since ``to`` and that it has finished or
        was never owed. Each becomes a new task, whose ``Delivery.replay_of`` is the id of the
        original. Other groups are not affected. The reset is a bulk operation: it is durable when
        the call returns, and runs in the background (``wait_bulk``). Raise NotFound if there is no
        such group, Conflict if the group is already being reset, or Overloaded.

        ``to``: a moment, or "first" for the beginning of the history. ``rate``: maximum tasks per
        second; unlimited by default. ``id``: your id for the bulk operation. Repeating the same
        request with it has no further effect; another request with it is a Conflict. By default a
        random id."""
        return await self._ask(
            "reset_group",
            {
                "topic": topic,
                "group": group,
                "to": to,
                "rate": rate,
                "id": own_name("reset") if id is None else id,
            },
            timeout,
        )

    async def preview_reset(
        self, topic: str, group: str, *, to: datetime | str, timeout: Duration | None = None
    ) -> ResetPreview:
        """Return how many tasks a reset to that moment would deliver, without resetting. The call
        reads the whole history. Raise NotFound if there is no such group, or Overloaded.

        ``to``: a moment, or "first" for the beginning of the history."""
        return await self._ask("preview_reset", {"topic": topic, "group": group, "to": to}, timeout)

    async def held_keys(
        self, topic: str, group: str | None, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[HeldKey]:
        """Return order keys that are held until an operator acts, the oldest first. Raise NotFound
        if there is no such group.

        ``limit``: maximum number of items in the answer."""
        return await self._ask(
            "held_keys", {"topic": topic, "group": group, "limit": limit}, timeout, "keys"
        )

    async def paused_keys(
        self, topic: str, group: str | None, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[PausedKey]:
        """Return the order keys and values of ``fair_by`` that operators have paused, the oldest
        first. Raise NotFound if there is no such group.

        ``limit``: maximum number of items in the answer."""
        return await self._ask(
            "held_keys", {"topic": topic, "group": group, "limit": limit}, timeout, "paused"
        )

    async def key_lines(
        self, topic: str, group: str | None, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[KeyLine]:
        """Return the order keys and values of ``fair_by`` with the most waiting tasks. Raise
        NotFound if there is no such group.

        ``limit``: maximum number of items in the answer."""
        return await self._ask(
            "key_lines", {"topic": topic, "group": group, "limit": limit}, timeout, "lines"
        )

    async def release_key(
        self,
        topic: str,
        group: str | None,
        task_id: int | None = None,
        *,
        key: str | None = None,
        timeout: Duration | None = None,
    ) -> ReleaseKeyWord:
        """Try the task of a held key, named by its id or the key, again at once and reset its
        failures. Return "released" or "not_held". Raise NotFound if there is no such group.

        ``key``: the order key whose task is held."""
        return await self._ask_word(
            "release_key",
            {
                "topic": topic,
                "group": group,
                "ids": None if task_id is None else [task_id],
                "key": key,
            },
            timeout,
        )

    async def skip_key(
        self,
        topic: str,
        group: str | None,
        task_id: int | None = None,
        *,
        key: str | None = None,
        timeout: Duration | None = None,
    ) -> SkipKeyWord:
        """Move the task of a held key to the dead letters, so that the key's next task can be
        delivered. Return "skipped" or "not_held". Raise NotFound if there is no such group.

        ``key``: the order key whose task is held."""
        return await self._ask_word(
            "skip_key",
            {
                "topic": topic,
                "group": group,
                "ids": None if task_id is None else [task_id],
                "key": key,
            },
            timeout,
        )

    async def pause_key(
        self,
        topic: str,
        group: str | None,
        *,
        key: str | None = None,
        value: Value | None = None,
        timeout: Duration | None = None,
    ) -> KeyPause:
        """Pause one key of the group, an order key or a value of ``fair_by``. Its tasks become due
        and wait; tasks in flight can be acked, and other keys are not affected. The pause is
        durable when the call returns. Pausing a paused key changes nothing. Raise NotFound if there
        is no such group, Conflict for a value if the group has no ``fair_by``, or LimitExceeded.

        ``key``: the order key. ``value``: the value of ``fair_by``."""
        return await self._ask(
            "pause_key", {"topic": topic, "group": group, "key": key, "value": value}, timeout
        )

    async def resume_key(
        self,
        topic: str,
        group: str | None,
        *,
        key: str | None = None,
        value: Value | None = None,
        timeout: Duration | None = None,
    ) -> KeyPause:
        """Resume the deliveries of a paused key. ``changed`` is false if it was not paused. Raise
        the same errors as ``pause_key``.

        ``key``: the order key. ``value``: the value of ``fair_by``."""
        return await self._ask(
            "resume_key", {"topic": topic, "group": group, "key": key, "value": value}, timeout
        )

    def list_schedules(
        self, *, limit: int | None = None, timeout: Duration | None = None
    ) -> AsyncIterator[ScheduleInfo]:
        """Return all schedules, ordered by name. Read page by page, at most ``limit``; ``timeout``
        is for each page."""
        return self._pages("list_schedules", {}, limit, timeout)

    async def show_schedule(
        self, name: str, *, planned: int = 5, timeout: Duration | None = None
    ) -> ScheduleInfo:
        """Return one schedule with its next ``planned`` times and its newest runs. Raise NotFound
        if there is no such schedule.

        ``planned``: how many planned times to return."""
        return await self._ask("show_schedule", {"name": name, "planned": planned}, timeout)

    async def pause_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """Fire no occurrence until the schedule is resumed. Raise NotFound if there is no such
        schedule."""
        return await self._ask("pause_schedule", {"name": name}, timeout)

    async def resume_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """Resume a paused schedule. Its ``catch_up`` decides about missed occurrences. Raise
        NotFound if there is no such schedule."""
        return await self._ask("resume_schedule", {"name": name}, timeout)

    async def delete_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """Delete a schedule and return it; its tasks stay. Raise NotFound if there is no such
        schedule."""
        return await self._ask("delete_schedule", {"name": name}, timeout)

    def list_transactions(
        self,
        *,
        group: str | None = None,
        state: TransactionState | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[TransactionInfo]:
        """Return undecided transactions, or transactions in ``state``, ordered by name. Read page
        by page, at most ``limit``; ``timeout`` is for each page.

        ``group``: only transactions of this producer group. ``state``: only transactions in this
        state."""
        return self._pages("list_transactions", {"group": group, "state": state}, limit, timeout)

    async def show_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> TransactionInfo:
        """Return one transaction with its half tasks. Raise UnknownTransaction if there is none."""
        return await self._ask("show_transaction", {"transaction": transaction}, timeout)

    def list_bulk(
        self,
        *,
        topic: str | None = None,
        state: BulkState | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[BulkInfo]:
        """Return bulk operations, the newest first. Read page by page, at most ``limit``;
        ``timeout`` is for each page.

        ``topic``: only bulk operations on this topic. ``state``: only bulk operations in this
        state."""
        return self._pages("list_bulk", {"topic": topic, "state": state}, limit, timeout)

    async def show_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """Return one bulk operation and its progress. Raise NotFound if there is none."""
        return await self._ask("show_bulk", {"bulk": bulk}, timeout)

    async def cancel_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """Cancel a bulk operation; changes that it has already made stay. Cancelling it again has
        no effect. Raise NotFound if there is none."""
        return await self._ask("cancel_bulk", {"bulk": bulk}, timeout)

    async def set_push(
        self,
        topic: str,
        group: str,
        url: str,
        *,
        secrets: Iterable[str] | None = None,
        format: PushFormat = "plain",
        concurrency: int = 32,
        request_timeout: Duration | None = None,
        connect_timeout: Duration | None = None,
        callback_lease: Duration | None = None,
        timeout: Duration | None = None,
    ) -> TargetInfo:
        """Send the tasks of a group to a URL, signed as in Standard Webhooks. Create the group if
        it does not exist, and replace an existing target. Raise BadRequest for an address that
        push_allow does not permit, and Conflict while the group has subscribers.

        ``secrets``: the secrets that sign requests; use several while receivers switch to the
        first. By default an existing push keeps its secrets. ``format``: "plain" sends the task's
        body; "cloudevents" sends a CloudEvent in JSON. ``concurrency``: maximum number of
        concurrent requests. ``request_timeout``: timeout of a whole request with its answer; by
        default 30 s. ``connect_timeout``: timeout of a connection to the host; by default 5 s.
        ``callback_lease``: how long a task waits for its callback after a 202; by default a 202
        acks the task."""
        return await self._ask(
            "set_push",
            {
                "topic": topic,
                "group": group,
                "url": url,
                "secrets": secrets,
                "format": format,
                "concurrency": concurrency,
                "request_timeout": request_timeout,
                "connect_timeout": connect_timeout,
                "callback_lease": callback_lease,
            },
            timeout,
        )

    async def set_forward(
        self,
        topic: str,
        group: str,
        url: str,
        *,
        secret: str | None = None,
        batch: int = 512,
        concurrency: int = 1,
        timeout: Duration | None = None,
    ) -> TargetInfo:
        """Send the tasks of a group to another broker. Create the group if it does not exist, and
        replace an existing target. Raise the same errors as ``set_push``.

        ``secret``: the password for the broker; the user is part of the URL. ``batch``: maximum
        number of tasks per batch. ``concurrency``: maximum number of concurrent batches."""
        return await self._ask(
            "set_forward",
            {
                "topic": topic,
                "group": group,
                "url": url,
                "secret": secret,
                "batch": batch,
                "concurrency": concurrency,
            },
            timeout,
        )

    async def remove_target(
        self, topic: str, group: str, *, timeout: Duration | None = None
    ) -> TargetRemoved:
        """Remove the target of a group with its secrets. The group keeps its tasks and accepts
        subscribers again. Raise NotFound if there is no target."""
        return await self._ask("remove_target", {"topic": topic, "group": group}, timeout)

    async def targets(
        self, *, topic: str | None = None, timeout: Duration | None = None
    ) -> list[TargetInfo]:
        """Return the targets of all groups, or of the groups of a topic, with their states.

        ``topic``: only targets of this topic; by default all targets."""
        return await self._ask("targets", {"topic": topic}, timeout, "targets")

    async def test_push(
        self,
        url: str,
        *,
        secrets: Iterable[str] | None = None,
        format: PushFormat = "plain",
        timeout: Duration | None = None,
    ) -> PushSent:
        """Send one request to a URL as a push would, and return the result. Raise BadRequest for an
        address that push_allow does not permit, and Conflict if the daemon has no process that
        sends.

        ``secrets``: the secrets that sign the request; without them it is not signed. ``format``:
        the format of the body, as in a push."""
        return await self._ask(
            "test_push", {"url": url, "secrets": secrets, "format": format}, timeout
        )

    async def push_log(
        self, topic: str, group: str, *, limit: int = 50, timeout: Duration | None = None
    ) -> list[PushSent]:
        """Return the last requests of a group's push, the newest first. The daemon keeps 200 in
        memory. Raise NotFound if there is no push, and Conflict if the daemon has no process that
        sends.

        ``limit``: maximum number of items in the answer."""
        return await self._ask(
            "push_log", {"topic": topic, "group": group, "limit": limit}, timeout, "requests"
        )

    async def resend(
        self, topic: str, group: str, number: int, *, timeout: Duration | None = None
    ) -> PushSent:
        """Send one of the last requests of a push again, without an effect on its task. Raise
        NotFound if the request is not in the log, and Conflict if the daemon has no process that
        sends."""
        return await self._ask(
            "resend", {"topic": topic, "group": group, "number": number}, timeout
        )

    async def nodes(self, *, timeout: Duration | None = None) -> Nodes:
        """Return all nodes that serve shards of this store, and the leader of each shard. Raise
        Conflict if the daemon is not a node (``?shards=N``)."""
        return await self._ask("nodes", {}, timeout)

    async def move_shard(
        self, shard: int, node: str | None = None, *, timeout: Duration | None = None
    ) -> ShardPlaced:
        """Assign a shard to a node, or, without ``node``, let the daemons choose. The call returns
        once the assignment is recorded; the shard moves as soon as its new node stands by. While
        that node is away or drains, another node leads the shard. Raise NotFound for an unknown
        node, and Conflict if the daemon is not a node."""
        return await self._ask("move_shard", {"shard": shard, "node": node}, timeout)

    async def drain_node(
        self, node: str, *, draining: bool = True, timeout: Duration | None = None
    ) -> NodeDrained:
        """Drain a node: it leads no shards, also after a restart, until ``draining=False``. The
        call returns once that is recorded; the shards then move one by one. Raise NotFound for an
        unknown node, and Conflict if the daemon is not a node.

        ``draining``: whether the node gives its shards to others; false lets it lead shards
        again."""
        return await self._ask("drain_node", {"node": node, "draining": draining}, timeout)

    async def status(self, *, timeout: Duration | None = None) -> Status:
        """Return the daemon's role and state, and when its role began. For a daemon that is not
        active, use ``status_at``."""
        return await self._ask("status", {}, timeout)

    async def stats(self, *, timeout: Duration | None = None) -> Stats:
        """Return the daemon's present counts."""
        return await self._ask("stats", {}, timeout)

    async def load(
        self,
        *,
        since: datetime | None = None,
        step: Duration | None = None,
        steps: int | None = None,
        timeout: Duration | None = None,
    ) -> Load:
        """Return how many tasks the wheel has for each of ``steps`` spans of ``step``. The first
        begins at ``since``, rounded down to a multiple of ``step``. Raise BadRequest if a value is
        out of range.

        ``since``: the start of the first span; by default now. ``step``: the length of a span; by
        default a minute. ``steps``: the number of spans; by default 60."""
        return await self._ask("load", {"since": since, "step": step, "steps": steps}, timeout)

    def list_consumers(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[ConsumerInfo]:
        """Return each subscription and each waiting pull, in the order in which their clients
        connected, optionally only of a topic or a group. Read page by page, at most ``limit``;
        ``timeout`` is for each page.

        ``topic``: only consumers of this topic. ``group``: only consumers of this group."""
        return self._pages("consumers", {"topic": topic, "group": group}, limit, timeout)

    async def overview(self, *, timeout: Duration | None = None) -> Overview:
        """Return the wheel, counts, and present problems in words (``troubles``), the worst
        first."""
        return await self._ask("overview", {}, timeout)

    async def task_history(self, id: int, *, timeout: Duration | None = None) -> TaskHistory:
        """Return the events of a task from the history, in order. The newest events can be missing
        for a moment."""
        return await self._ask("task_history", {"id": id}, timeout)

    async def backup(self, name: str, *, timeout: Duration | None = None) -> Backup:
        """Copy the store of the running daemon to a new file ``name`` in its backup folder."""
        return await self._ask("backup", {"name": name}, timeout)
