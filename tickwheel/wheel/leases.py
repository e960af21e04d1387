"""Deliveries that are not finished, and who has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tickwheel.wheel.records import SUBSCRIBER_LENGTH_MAX, Extras, Failure, TaskRow
from tickwheel.wheel.retry import PolicyRef

if TYPE_CHECKING:
    from tickwheel.wheel.groups import Group


class Traits(NamedTuple):
    """What a task in flight has that decides about it afterwards; most tasks have none of it."""

    priority: int
    retry: PolicyRef | None
    ttl_end_ms: int | None
    """The first millisecond in which it is over."""


PLAIN = Traits(0, None, None)


Item = tuple[TaskRow, int]
"""(row, attempt)"""
DELIVERY_BYTES = 33
"""What a delivery takes in a frame beside its body and extras, at most."""
FRAME_HEAD_BYTES = 40
"""What such a frame takes beside its deliveries, at most."""


class Dispatch(NamedTuple):
    """Deliveries to write to one subscriber, as one frame."""

    subscriber: Subscriber
    items: list[Item]


def priority_of(row: TaskRow) -> int:
    return row.extras.priority if row.extras is not None else 0


def traits_of(row: TaskRow) -> Traits:
    extras = row.extras
    if extras is None:
        return PLAIN
    return Traits(extras.priority, extras.retry, ttl_end_ms(row.due_ms, extras))


def ttl_end_ms(due_ms: int, extras: Extras | None) -> int | None:
    """The first millisecond in which nobody wants the task any more; None: there is none."""
    if extras is None or extras.ttl_ms is None:
        return None
    return due_ms + extras.ttl_ms + 1


class Tries(NamedTuple):
    """Earlier attempts of a task that is not in flight now."""

    attempt: int
    epoch: int
    priority: int
    failures: tuple[Failure, ...]


class Lease:
    """One delivery that is not finished."""

    __slots__ = (
        "attempt",
        "checkpointed",
        "deadline_mono_ms",
        "due_ms",
        "epoch",
        "failures",
        "group",
        "id",
        "live",
        "since_mono_ms",
        "subscriber",
        "traits",
    )

    def __init__(
        self,
        task_id: int,
        group: Group,
        subscriber: Subscriber,
        attempt: int,
        epoch: int,
        since_mono_ms: int,
        deadline_mono_ms: int,
        due_ms: int,
        traits: Traits,
        failures: tuple[Failure, ...],
    ) -> None:
        self.id = task_id
        self.group = group
        self.subscriber = subscriber
        self.attempt = attempt
        self.epoch = epoch
        self.since_mono_ms = since_mono_ms
        self.deadline_mono_ms = deadline_mono_ms
        self.due_ms = due_ms
        self.traits = traits
        self.failures = failures
        self.live = True
        self.checkpointed = False
        """Whether a batch that was sealed holds this delivery's progress row."""


class Presence:
    """Whether the consumer behind some subscribers, those of one connection, is there.

    A connection that stands says nothing: its peer may be stopped, or without power. A lease of
    its that ends by time puts it in doubt, and whatever it sends ends the doubt.
    """

    __slots__ = ("doubted", "doubted_mono_ms")

    def __init__(self) -> None:
        self.doubted = False
        """A lease has ended by time, and nothing was heard since: it is handed nothing more."""
        self.doubted_mono_ms = 0
        """When the last delivery of those was made whose leases have ended."""

    def doubt(self, lease: Lease) -> None:
        """This lease has ended by time."""
        self.doubted = True
        self.doubted_mono_ms = max(self.doubted_mono_ms, lease.since_mono_ms)


class Subscriber:
    """One consumer of one group: a subscription of a connection, or one pull.

    ``owner`` belongs to the shell and is never looked at here. ``outstanding`` counts
    deliveries whose end is not confirmed yet; it may not exceed ``prefetch``.
    """

    __slots__ = (
        "asked_mono_ms",
        "at_most_once",
        "blocked",
        "gone_mono_ms",
        "group",
        "label",
        "lease_ms",
        "once",
        "outstanding",
        "owner",
        "prefetch",
        "presence",
    )

    def __init__(
        self,
        owner: object,
        group: Group,
        prefetch: int,
        lease_ms: int,
        *,
        once: bool = False,
        at_most_once: bool = False,
        label: str = "",
    ) -> None:
        self.owner = owner
        self.group = group
        self.prefetch = prefetch
        self.lease_ms = lease_ms
        self.once = once
        """A pull: it leaves after its first delivery."""
        self.label = label[:SUBSCRIBER_LENGTH_MAX]
        """Who it is, for the records of failed attempts."""
        self.at_most_once = at_most_once
        """A delivery to it is finished before it is written."""
        self.asked_mono_ms: int | None = None
        """A pull: when it was asked for. After a delivery, that is a sign of life behind it."""
        self.presence = Presence()
        """Shared by the subscribers of one connection."""
        self.outstanding = 0
        self.blocked = False
        """The connection's buffer is full."""
        self.gone_mono_ms: int | None = None
        """Its connection broke: leases end then at the latest."""

    @property
    def is_subscribed(self) -> bool:
        """It may still get deliveries."""
        return self in self.group.subscribers

    @property
    def credit(self) -> int:
        if self.blocked or (self.presence.doubted and not self._asked_since):
            return 0
        return self.prefetch - self.outstanding

    @property
    def _asked_since(self) -> bool:
        """It is a pull that was asked for after the deliveries which put its consumer in doubt."""
        asked_mono_ms = self.asked_mono_ms
        return asked_mono_ms is not None and asked_mono_ms >= self.presence.doubted_mono_ms
