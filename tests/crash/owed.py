"""What a group that is made while tasks are under way is owed: the rule of the torture's judge.

It says "owed" only where that is certain from what clients saw, and rests on the order in which
they saw it, not on a clock (but where all clocks are known to be right). Places are those of
``Link.order``: one request was over before another began.

A group is owed a task that is not cancelled and not expired, and for a group since a moment not
due before that, if one of these holds.

* ``enqueued after it``: the enqueue was sent after the group's creation was confirmed.
* ``still there``: it begins with the ``first`` task, or with a moment not after the task's due
  time, and at its confirmation the task was not finished: another group was owed it then, was
  not being deleted, and got it for the first time later.
* ``waiting for a group``: when the enqueue was sent every earlier group of the topic was gone,
  and this is the first one since.
* ``due after it`` (clocks are right): the task came due after the confirmation; or
  (``due without a group``) after the deletion of all earlier groups.

Of a group whose deletion was asked nothing more is required, unless it was seen to hold nothing
just before (``quiet``): then all that had come due until then is over, by its acks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from crash.records import Delivered, GroupLife


class Task(NamedTuple):
    """An acknowledged task, as its producer knows it."""

    id: int
    topic: str
    token: str
    due_ms: int
    ttl_ms: int | None
    priority: int
    sent: int
    order: int
    within_ms: int = 0


class PendingGroups:
    """``of(task)``: the lives of groups that must have got it, each with the reason."""

    def __init__(
        self,
        lives: Iterable[GroupLife],
        deliveries: Mapping[tuple[int, str], Sequence[Delivered]],
        *,
        by_time: bool,
    ) -> None:
        self._lives: dict[str, list[GroupLife]] = defaultdict(list)
        for life in sorted(lives, key=lambda life: life.sent):
            self._lives[life.topic].append(life)
        self._deliveries = deliveries
        self._by_time = by_time

    def of(self, task: Task) -> Iterator[tuple[GroupLife, str]]:
        certain: list[GroupLife] = []
        for index, life in enumerate(self._lives[task.topic]):
            why = self._why(task, life, self._lives[task.topic][:index], certain)
            if not why:
                continue
            certain.append(life)
            if life.deleted is None:
                yield life, why
            elif (
                life.quiet is not None
                and why != "still there"
                and task.order < life.quiet
                and task.due_ms <= life.quiet_ms
            ):
                yield life, f"{why}, and the group held nothing"

    def _why(
        self,
        task: Task,
        life: GroupLife,
        earlier: Sequence[GroupLife],
        certain: Sequence[GroupLife],
    ) -> str:
        if isinstance(life.since, int) and task.due_ms < life.since:
            return ""  # a first group gets it if it waited by then, which an order does not show
        if task.due_ms < life.perhaps_since_ms:
            return ""
        if all(before.gone is not None and before.gone < task.sent for before in earlier):
            return "waiting for a group"
        if self._by_time and all(
            before.gone is not None and before.gone < life.sent and before.deleted_ms < task.due_ms
            for before in earlier
        ):
            return "due without a group"
        if task.sent > life.confirmed:
            return "enqueued after it"
        if self._by_time and task.due_ms > life.confirmed_ms:
            return "due after it"
        if life.since != "now" and any(self._had(other, task, life) for other in certain):
            return "" if self._came_before(task, life) else "still there"
        return ""

    def _came_before(self, task: Task, life: GroupLife) -> bool:
        """An earlier group of the name got it, and may have acked it: then it stays acked."""
        got = self._deliveries.get((task.id, life.group), ())
        return any(delivery.order < life.sent for delivery in got)

    def _had(self, other: GroupLife, task: Task, life: GroupLife) -> bool:
        """``other``, which is owed the task, certainly was when ``life`` was confirmed."""
        if other.confirmed > life.sent:
            return False
        if other.deleted is not None and other.deleted < life.confirmed:
            return False
        got = [
            delivery.order
            for delivery in self._deliveries.get((task.id, other.group), ())
            if delivery.order > other.sent
        ]
        return not got or min(got) > life.confirmed
