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
        """Cancel tasks that are not being worked on: "cancelled", "already_cancelled", or what is
        too late for that: "in_flight", "acked", "expired", "dead", "gone", "unknown", … By topic
        and key: every unfinished task with that key, the oldest first, each with an outcome.
        Without any, the last finished task that the daemon remembers, or a single outcome "unknown"
        without an id.

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
        """Give tasks another due time, by one of ``delay`` (by the daemon's clock), ``at`` and
        ``shift``. By topic and key: every unfinished task with that key, the oldest first, each
        with an outcome. Without any, the last finished task that the daemon remembers, or a single
        outcome "unknown" without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty dict selects the whole
        topic): a bulk operation, which is durable when this returns and runs in the background
        (``wait_bulk``). It ignores tasks that are enqueued, or die, later. ``rate``: maximum
        changes per second. ``id``: your name for it, as in ``reset_group``. Raises NotFound for an
        unknown topic, Overloaded when too many bulk operations are running.

        ``delay``: the new delay, from now on. ``at``: the new due time. ``shift``: how much later
        each task becomes due; negative: earlier."""
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
        """Give scheduled tasks a due window: each is moved to one of its emptiest ticks, which
        replaces its due time. A task that is not scheduled stays; its outcome is its state. By
        topic and key: every unfinished task with that key, the oldest first, each with an outcome.
        Without any, the last finished task that the daemon remembers, or a single outcome "unknown"
        without an id.

        By topic and ``filter``, a dict of TaskSelectionKeywords (an empty dict selects the whole
        topic): a bulk operation, which is durable when this returns and runs in the background
        (``wait_bulk``). It ignores tasks that are enqueued, or die, later. ``rate``: maximum
        changes per second. ``id``: your name for it, as in ``reset_group``. Raises NotFound for an
        unknown topic, Overloaded when too many bulk operations are running.

        ``start``: the first moment of the window; by default each task's own due time. ``within``:
        the length of the window. ``end``: the first moment behind the window."""
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
        """Make tasks due at once. By topic and key: every unfinished task with that key, the oldest
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
        """Stored tasks in the order of their ids (``newest_first``: the other way round). A key
        without its topic has no index: the tasks are looked through. Read page by page, at most
        ``limit``; ``timeout`` is for each page.

        ``topic``: only those of this topic. ``state``: only those in this state. ``key``: only
        those with this key. ``key_prefix``: only those whose key begins with this. ``tag``: only
        those with this tag. ``property``: only those with this property: NAME=VALUE. ``not_after``:
        only those that were enqueued at this moment or earlier. ``newest_first``: whether the
        newest come first."""
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
        """The tasks that the topic still has to deliver, with their bodies: scheduled, ready, in
        flight and waiting for a retry, but no dead letters. Looking has no effect: it needs no
        group, takes no lease and counts no attempt. Read page by page, at most ``limit``;
        ``timeout`` is for each page.

        ``key``: with this key. ``due``: only tasks that have come due. ``newest_first``: in the
        order of ids, backwards."""
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
        """Dead letters in the order of their ids. Read page by page, at most ``limit``; ``timeout``
        is for each page.

        ``topic``: only those of this topic. ``group``: only those of this group. ``since``: only
        those that died at this moment or later. ``until``: only those that died before this moment.
        ``reason``: only those whose last reason contains this text, in upper or lower case."""
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
        """Deliver dead letters again, failures counted anew: "requeued", "unknown", or "ttl_over",
        of one that stays because its time to live is over and ``ttl`` gives it no new one.
        ``pairs``: (id, group) of each dead letter.

        By topic and ``filter``, a dict of DeadSelectionKeywords (an empty dict selects the whole
        topic): a bulk operation, which is durable when this returns and runs in the background
        (``wait_bulk``). It ignores tasks that are enqueued, or die, later. ``rate``: maximum
        changes per second. ``id``: your name for it, as in ``reset_group``. Raises NotFound for an
        unknown topic, Overloaded when too many bulk operations are running.

        ``ttl``: a new time to live, from the requeue on, in place of the task's own. It is the
        task's in all of its groups."""
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
        """Delete dead letters for good: "deleted" or "unknown". ``pairs``: (id, group) of each dead
        letter.

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
        """Make a group before its first subscriber comes; one that exists stays as it is
        (``created`` of the answer says which).

        ``start``: it is owed what comes due from "now" on, from the "first" task that is still
        there, or from a moment. ``settings`` are those of NewGroupKeywords."""
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
        """Change settings of a group, or of the topic itself. Others stay; None removes a setting.
        A filter applies to tasks that come due from now on. Durable when it returns. Raises
        NotFound for a group, Conflict for ``broadcast_only`` of a topic with groups.

        ``settings`` are those of SettingsKeywords."""
        refuse_unknown(settings, SettingsKeywords, "Client.configure")
        return await self._ask("configure", {"topic": topic, "group": group, **settings}, timeout)

    async def delete_group(
        self, topic: str, group: str, *, force: bool = False, timeout: Duration | None = None
    ) -> GroupHeld:
        """Delete a group; what it held. Raises Conflict when it holds anything, unless ``force``:
        then that is gone for it.

        ``force``: whether to delete it although it holds tasks or has subscribers."""
        return await self._ask(
            "delete_group", {"topic": topic, "group": group, "force": force}, timeout
        )

    async def delete_topic(
        self, topic: str, *, force: bool = False, timeout: Duration | None = None
    ) -> TopicHeld:
        """Delete a topic with its groups, settings and dead letters; what it held. Durable when it
        returns; its tasks end as deleted in the background, and until then the topic takes no new
        ones (Refused). Raises Conflict when it holds tasks or has subscribers, unless ``force``,
        and always when a schedule enqueues to it; NotFound.

        ``force``: whether to delete it although it holds tasks or has subscribers."""
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
        """Give the group again what came due since ``to`` and that it has finished, or was never
        owed. A bulk operation: durable when it returns, done in the background (``wait_bulk``).
        Each task comes as one of its own, of which ``Delivery.replay_of`` is the former's id. Other
        groups notice nothing. Raises NotFound, Conflict when the group is being reset already,
        Overloaded.

        ``to``: a moment, or "first": all that is known. ``rate``: the most tasks a second; without
        it there is no limit. ``id``: yours: the same request again is the same bulk operation, and
        another one with it is a Conflict; by default a random one."""
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
        """What a reset to that moment would give now; nothing is given. The whole history is looked
        through. Raises NotFound, Overloaded.

        ``to``: a moment, or "first": all that is known."""
        return await self._ask("preview_reset", {"topic": topic, "group": group, "to": to}, timeout)

    async def held_keys(
        self, topic: str, group: str | None, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[HeldKey]:
        """Order keys that are held until an operator acts, the oldest first. Raises NotFound.

        ``limit``: the most items of the answer."""
        return await self._ask(
            "held_keys", {"topic": topic, "group": group, "limit": limit}, timeout, "keys"
        )

    async def paused_keys(
        self, topic: str, group: str | None, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[PausedKey]:
        """Keys that operators have paused, order keys and values of ``fair_by``, the oldest first.
        Raises NotFound.

        ``limit``: the most items of the answer."""
        return await self._ask(
            "held_keys", {"topic": topic, "group": group, "limit": limit}, timeout, "paused"
        )

    async def key_lines(
        self, topic: str, group: str | None, *, limit: int = 100, timeout: Duration | None = None
    ) -> list[KeyLine]:
        """Order keys, and values that share the group, for whose turn most tasks wait. Raises
        NotFound.

        ``limit``: the most items of the answer."""
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
        """The task of a held key, by its id or the key, is tried again at once, its failures
        counted anew: "released", or "not_held". Raises NotFound for a group.

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
        """The task of a held key goes to the dead letters, and its key goes on: "skipped", or
        "not_held". Raises NotFound for a group.

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
        """Hand out no task of one key of the group, an order key or a value of ``fair_by``, until
        it is resumed. Its tasks become due and wait, other keys go on, what is in flight can be
        acked. Durable when it returns. One that is paused stays as it is. Raises NotFound for a
        group, Conflict for a value of a group without ``fair_by``, LimitExceeded.

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
        """Hand out the tasks of a paused key again. ``changed`` is false if it was not paused.
        Raises as ``pause_key``.

        ``key``: the order key. ``value``: the value of ``fair_by``."""
        return await self._ask(
            "resume_key", {"topic": topic, "group": group, "key": key, "value": value}, timeout
        )

    def list_schedules(
        self, *, limit: int | None = None, timeout: Duration | None = None
    ) -> AsyncIterator[ScheduleInfo]:
        """All schedules, by name. Read page by page, at most ``limit``; ``timeout`` is for each
        page."""
        return self._pages("list_schedules", {}, limit, timeout)

    async def show_schedule(
        self, name: str, *, planned: int = 5, timeout: Duration | None = None
    ) -> ScheduleInfo:
        """One schedule, with its next ``planned`` times and its newest runs. Raises NotFound.

        ``planned``: how many planned times to answer."""
        return await self._ask("show_schedule", {"name": name, "planned": planned}, timeout)

    async def pause_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """Nothing of it fires until it is resumed. Raises NotFound."""
        return await self._ask("pause_schedule", {"name": name}, timeout)

    async def resume_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """Go on; what was missed meanwhile is for its catch-up. Raises NotFound."""
        return await self._ask("resume_schedule", {"name": name}, timeout)

    async def delete_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """Delete a schedule; its tasks stay. The answer is what it was. Raises NotFound."""
        return await self._ask("delete_schedule", {"name": name}, timeout)

    def list_transactions(
        self,
        *,
        group: str | None = None,
        state: TransactionState | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[TransactionInfo]:
        """Undecided transactions, or those in ``state``, by name. Read page by page, at most
        ``limit``; ``timeout`` is for each page.

        ``group``: only those of this producer group. ``state``: only those in this state."""
        return self._pages("list_transactions", {"group": group, "state": state}, limit, timeout)

    async def show_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> TransactionInfo:
        """One transaction, with its half tasks. Raises UnknownTransaction."""
        return await self._ask("show_transaction", {"transaction": transaction}, timeout)

    def list_bulk(
        self,
        *,
        topic: str | None = None,
        state: BulkState | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[BulkInfo]:
        """Bulk operations, the newest first. Read page by page, at most ``limit``; ``timeout`` is
        for each page.

        ``topic``: only those on this topic. ``state``: only those in this state."""
        return self._pages("list_bulk", {"topic": topic, "state": state}, limit, timeout)

    async def show_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """One bulk operation, and how far it is. Raises NotFound."""
        return await self._ask("show_bulk", {"bulk": bulk}, timeout)

    async def cancel_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """Cancel a bulk operation: it changes nothing more; what it has changed stays. Once more is
        harmless. Raises NotFound."""
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
        """Send the tasks of a group to a URL, signed as Standard Webhooks says. A group that is not
        there is made; a target that is there is replaced. Raises BadRequest for an address that may
        not be asked (push_allow), Conflict while somebody is subscribed.

        ``secrets``: what requests are signed with; several, while receivers change to the first of
        them. Left out: those of the push that is there. ``format``: "plain": the body is the
        task's; "cloudevents": a CloudEvent in JSON. ``concurrency``: the most requests at a time.
        ``request_timeout``: the most time for a whole request with its answer; by default 30 s.
        ``connect_timeout``: the most time for a connection to the host; by default 5 s.
        ``callback_lease``: how long a task waits for its callback after a 202; without this, a 202
        acks."""
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
        """Send the tasks of a group to another broker. A group that is not there is made; a target
        that is there is replaced. Raises as ``set_push``.

        ``secret``: the password for the broker; the user stands in the URL. ``batch``: the most
        tasks that are sent together. ``concurrency``: the most batches at a time."""
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
        """Send the tasks of a group nowhere any more, and forget the secrets. The group keeps what
        it holds, and takes subscribers again. Raises NotFound."""
        return await self._ask("remove_target", {"topic": topic, "group": group}, timeout)

    async def targets(
        self, *, topic: str | None = None, timeout: Duration | None = None
    ) -> list[TargetInfo]:
        """The targets of all groups, or of those of a topic, and how they go.

        ``topic``: only those of this topic; by default those of all topics."""
        return await self._ask("targets", {"topic": topic}, timeout, "targets")

    async def test_push(
        self,
        url: str,
        *,
        secrets: Iterable[str] | None = None,
        format: PushFormat = "plain",
        timeout: Duration | None = None,
    ) -> PushSent:
        """Send one request to a URL as a push would, and say what came of it. Raises BadRequest for
        an address that may not be asked, Conflict where no process sends.

        ``secrets``: the secrets that the request is signed with; without them it is not signed.
        ``format``: the format of the body, as in a push."""
        return await self._ask(
            "test_push", {"url": url, "secrets": secrets, "format": format}, timeout
        )

    async def push_log(
        self, topic: str, group: str, *, limit: int = 50, timeout: Duration | None = None
    ) -> list[PushSent]:
        """The last requests of a group's push, the newest first; the daemon keeps 200 in memory.
        Raises NotFound, Conflict where no process sends.

        ``limit``: the most items of the answer."""
        return await self._ask(
            "push_log", {"topic": topic, "group": group, "limit": limit}, timeout, "requests"
        )

    async def resend(
        self, topic: str, group: str, number: int, *, timeout: Duration | None = None
    ) -> PushSent:
        """Send one of the last requests of a push once more; nothing becomes of its task. Raises
        NotFound, Conflict."""
        return await self._ask(
            "resend", {"topic": topic, "group": group, "number": number}, timeout
        )

    async def nodes(self, *, timeout: Duration | None = None) -> Nodes:
        """All nodes that serve shards of this store, and who leads which shard since when. Raises
        Conflict for a daemon that is not a node (``?shards=N``)."""
        return await self._ask("nodes", {}, timeout)

    async def move_shard(
        self, shard: int, node: str | None = None, *, timeout: Duration | None = None
    ) -> ShardPlaced:
        """Say that a shard shall be on a node, or, without ``node``, wherever it belongs. The
        answer comes once that is noted; the shard moves as soon as its new node stands by. While
        the node is not there, or drains, the shard is elsewhere. Raises NotFound for a node that is
        not there, Conflict for a daemon that is not a node."""
        return await self._ask("move_shard", {"shard": shard, "node": node}, timeout)

    async def drain_node(
        self, node: str, *, draining: bool = True, timeout: Duration | None = None
    ) -> NodeDrained:
        """Say that a node shall have no shards, also after it was started again, until it is said
        with ``draining=False`` that it shall. The answer comes once that is noted; its shards move
        one after the other. Raises NotFound for a node that is not there, Conflict for a daemon
        that is not a node.

        ``draining``: whether the node gives its shards away; false: it gets shards again."""
        return await self._ask("drain_node", {"node": node, "draining": draining}, timeout)

    async def status(self, *, timeout: Duration | None = None) -> Status:
        """How the daemon is: its role and state, and since when. For one that is not active see
        ``status_at``."""
        return await self._ask("status", {}, timeout)

    async def stats(self, *, timeout: Duration | None = None) -> Stats:
        """The daemon's counts at this moment."""
        return await self._ask("stats", {}, timeout)

    async def load(
        self,
        *,
        since: datetime | None = None,
        step: Duration | None = None,
        steps: int | None = None,
        timeout: Duration | None = None,
    ) -> Load:
        """How many tasks the wheel has for each of ``steps`` spans of ``step``, from ``since`` on,
        which is rounded down to a whole ``step``. Raises BadRequest.

        ``since``: the beginning of the first span; by default now. ``step``: the length of a span;
        by default a minute. ``steps``: how many spans to answer; by default 60."""
        return await self._ask("load", {"since": since, "step": step, "steps": steps}, timeout)

    def list_consumers(
        self,
        *,
        topic: str | None = None,
        group: str | None = None,
        limit: int | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[ConsumerInfo]:
        """Who is connected and takes tasks: each subscription, and each pull that waits, in the
        order in which their connections came; of a topic, of a group. Read page by page, at most
        ``limit``; ``timeout`` is for each page.

        ``topic``: only those of this topic. ``group``: only those of this group."""
        return self._pages("consumers", {"topic": topic, "group": group}, limit, timeout)

    async def overview(self, *, timeout: Duration | None = None) -> Overview:
        """The wheel, counts, and what is wrong right now in words (``troubles``), the worst
        first."""
        return await self._ask("overview", {}, timeout)

    async def task_history(self, id: int, *, timeout: Duration | None = None) -> TaskHistory:
        """The events of a task in their order, as the history has them, a moment late."""
        return await self._ask("task_history", {"id": id}, timeout)

    async def backup(self, name: str, *, timeout: Duration | None = None) -> Backup:
        """Copy the store to a new file ``name`` in the daemon's backup folder, while it works."""
        return await self._ask("backup", {"name": name}, timeout)
