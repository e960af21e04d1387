"""The life of a task in one group, as a table.

``docs/durability.md`` shows the diagram made from it; a test regenerates the diagram and
fails on a difference, and the engine's model test fails on a transition that is not here.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a task stands for a group; the values are what LOOKUP answers."""

    STAGED = "staged"
    SCHEDULED = "scheduled"
    READY = "ready"
    IN_FLIGHT = "in_flight"
    WAITING = "waiting"
    DEAD = "dead"
    ACKED = "acked"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DELETED = "deleted"
    FILTERED = "filtered"
    REFUSED = "refused"


class Event(StrEnum):
    """What can happen to a task in a group."""

    LANDED = "batch durable"
    REFUSED = "batch refused"
    DUE = "due"
    DELIVER = "deliver"
    ACK = "ack"
    NACK = "nack"
    GIVE_UP = "retries used up"
    REJECT = "reject"
    LEASE_OVER = "lease over"
    CONSUMER_DIED = "consumer died"
    RELEASE = "release"
    CANCEL = "cancel"
    RESCHEDULE = "reschedule"
    POSTPONE = "reschedule after a failure"
    HOLD = "clock went back"
    EXPIRE = "ttl over"
    REQUEUE = "requeue"
    DELETE = "delete"
    LEAVE_OUT = "left out by a filter"


S, E = State, Event

TRANSITIONS: dict[tuple[State, Event], State] = {
    (S.STAGED, E.LANDED): S.SCHEDULED,
    (S.STAGED, E.REFUSED): S.REFUSED,
    (S.SCHEDULED, E.DUE): S.READY,
    (S.SCHEDULED, E.RESCHEDULE): S.SCHEDULED,
    (S.SCHEDULED, E.CANCEL): S.CANCELLED,
    (S.SCHEDULED, E.ACK): S.ACKED,
    (S.SCHEDULED, E.LEAVE_OUT): S.FILTERED,
    (S.READY, E.DELIVER): S.IN_FLIGHT,
    (S.READY, E.RESCHEDULE): S.SCHEDULED,
    (S.READY, E.CANCEL): S.CANCELLED,
    (S.READY, E.EXPIRE): S.EXPIRED,
    (S.READY, E.ACK): S.ACKED,
    (S.READY, E.HOLD): S.WAITING,
    (S.READY, E.LEAVE_OUT): S.FILTERED,
    (S.IN_FLIGHT, E.ACK): S.ACKED,
    (S.IN_FLIGHT, E.NACK): S.WAITING,
    (S.IN_FLIGHT, E.GIVE_UP): S.DEAD,
    (S.IN_FLIGHT, E.REJECT): S.DEAD,
    (S.IN_FLIGHT, E.LEASE_OVER): S.READY,
    (S.IN_FLIGHT, E.CONSUMER_DIED): S.WAITING,
    (S.IN_FLIGHT, E.RELEASE): S.READY,
    (S.WAITING, E.DUE): S.READY,
    (S.READY, E.POSTPONE): S.WAITING,
    (S.WAITING, E.POSTPONE): S.WAITING,
    (S.WAITING, E.RESCHEDULE): S.SCHEDULED,
    (S.WAITING, E.CANCEL): S.CANCELLED,
    (S.WAITING, E.ACK): S.ACKED,
    (S.WAITING, E.EXPIRE): S.EXPIRED,
    (S.DEAD, E.REQUEUE): S.READY,
    (S.DEAD, E.DELETE): S.DELETED,
    (S.DEAD, E.CANCEL): S.CANCELLED,
}
"""An ack of a task that is READY or WAITING carries an earlier, genuine receipt; of one that is
SCHEDULED, a receipt from before a crash that forgot the delivery. A plain reschedule of a task
that is WAITING finds one without an attempt, which waits because the clock went back. A cancel
takes dead letters with it when another group still waits for the task. A crash goes back to the
last state that is recorded. What waited for the first group of its topic is judged by that group's
filter when its turn has come.
"""


def diagram() -> str:
    """The table of transitions as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> staged: enqueue"]
    lines += [f"    {a} --> {b}: {event}" for (a, event), b in TRANSITIONS.items()]
    finals = sorted(set(TRANSITIONS.values()) - {a for a, _ in TRANSITIONS})
    lines += [f"    {state} --> [*]" for state in finals]
    return "\n".join(lines) + "\n"
