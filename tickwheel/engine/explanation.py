"""Why a task is where it is: one cause, a sentence, and the command that mends it.

``explain`` says it of a task that is stored, ``explain_absent`` of one of which no record is left,
``explain_half`` of one that a transaction still keeps. They read the engine's memory and change
nothing; nothing is noted for them while tasks come and go.

A task that several groups are owed has a cause in each of them. The answer is about the group
whose cause stands first in ``Explained``: what a person has to mend comes before what goes on by
itself, and that before what is over.

Knows no clock and no history: the shell says the time, and what a history knows.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.engine.ordering import mark_of, mark_of_key, shared_value
from tickwheel.engine.queues import NOBODY
from tickwheel.engine.timetables import shown_time
from tickwheel.model.records import CONSUMER_DIED, DEFAULT_GROUP, State

if TYPE_CHECKING:
    from tickwheel.engine.state import Core
    from tickwheel.engine.tasks import Control, GroupView
    from tickwheel.engine.topics import Group, Subscriber, Topic
    from tickwheel.model.kinds import TransactionRow
    from tickwheel.model.records import TaskRow, TaskSnapshot

NAMED_MAX = 3
"""How many consumers, tasks or transactions a sentence names."""
LOOKED_AT_MAX = 64
"""How many subscribers of a group are looked at."""
LEASES_LOOKED_AT = 4_096
"""How many deliveries in flight are looked at for those of one value."""
TOPICS_LOOKED_AT = 10_000
"""How many topics are looked at for those that somebody consumes,"""
COMPARED_MAX = 1_000
"""and how many of these have their names compared."""
HALVES_LOOKED_AT = 10_000
"""How many half tasks are looked at for one with a key."""
SIMILAR = 0.8
"""How alike two names of topics are, from 0 to 1, so that one may be meant by the other."""
SHOWN_MAX = 200
"""Characters of a reason, or of a text of a user, in a sentence."""


class Explained(StrEnum):
    """Why a task is where it is. The order decides which of several groups an answer is about."""

    TOPIC_PAUSED = "topic_paused"
    GROUP_PAUSED = "group_paused"
    KEY_PAUSED = "key_paused"
    KEY_HELD = "key_held"
    CLOCK_HELD = "clock_held"
    SHARD_AWAY = "shard_away"
    SIMILAR_TOPIC = "similar_topic"
    NO_GROUP = "no_group"
    NO_SUBSCRIBER = "no_subscriber"
    ENDPOINT = "endpoint"
    SLOW_CONSUMERS = "slow_consumers"
    DEAD = "dead"
    RATE = "rate"
    SHARE_LIMIT = "share_limit"
    KEY_BUSY = "key_busy"
    ALONE = "alone"
    DELETING = "deleting"
    RETRY_WAIT = "retry_wait"
    QUEUED = "queued"
    LEASED = "leased"
    SCHEDULED = "scheduled"
    TRANSACTION = "transaction"
    ACKED = "acked"
    FILTERED = "filtered"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DELETED = "deleted"
    GONE = "gone"
    NOT_FOUND = "not_found"


RANKS = {cause: rank for rank, cause in enumerate(Explained)}


class Reason(NamedTuple):
    """A cause, what there is to say of it, and what mends it."""

    cause: Explained
    detail: str
    command: str | None = None
    """The command that mends it, or shows more; None: nothing has to be done."""
    group: str | None = None
    behind: int | None = None
    """The task that it waits for."""
    next_ms: int | None = None
    """When it goes on by itself (wall ms); None: that is not known."""


class Around(NamedTuple):
    """What the shell knows."""

    now_ms: int
    mono_ms: int
    may_see: Callable[[str], bool]
    """Whether whoever asks may be told of a topic."""
    clock_ms: int | None = None
    """What a wall clock shows that is not believed; None: it is believed."""
    accept_clock: str | None = None
    """The command that makes the daemon believe it."""

    def wall_ms(self, mono_ms: int) -> int:
        return mono_ms + self.now_ms - self.mono_ms


# --- a task that is stored -----------------------------------------------------------------------


def explain(core: Core, control: Control, known: TaskSnapshot, around: Around) -> list[Reason]:
    """Why a stored task is where it is: the answer, then what holds in its other groups."""
    row, state = known.row, control.state(known)
    if state is State.SCHEDULED:
        return [_of_scheduled(core, row, around)]
    topic = core.topic(row.topic)
    backlog = topic.default_backlog
    if backlog is not None and state is State.READY:
        return [_of_ready(core, backlog, row, around)]
    views = control.view(known, around.now_ms - around.mono_ms)
    found = [
        _of_group(core, topic, name, view, row, around)._replace(group=name)
        for name, view in views.items()
    ]
    found.sort(key=lambda reason: RANKS[reason.cause])
    return found or [Reason(Explained.QUEUED, "It is due, and about to be given to its groups.")]


def _of_scheduled(core: Core, row: TaskRow, around: Around) -> Reason:
    due_ms, shown = row.due_ms, shown_time(row.due_ms)
    if around.clock_ms is not None and due_ms <= around.clock_ms:
        return Reason(
            Explained.CLOCK_HELD,
            f"It is due {shown}. The wall clock shows {shown_time(around.clock_ms)}, which is too"
            f" far ahead to be believed: the daemon's time is {shown_time(around.now_ms)}.",
            around.accept_clock,
        )
    if row.id in core.topic(row.topic).deferred:
        return Reason(
            Explained.DELETING,
            f"It came due while the last group of topic {row.topic} was being deleted, and waits"
            " for the end of that.",
        )
    if due_ms > around.now_ms:
        left = _duration(due_ms - around.now_ms)
        return Reason(
            Explained.SCHEDULED,
            f"It is not due yet: its time is {shown}, in {left}.{_held_then(core, row, around)}",
            f"tickwheel run-now {row.id}",
            next_ms=due_ms,
        )
    return Reason(Explained.QUEUED, f"It is due since {shown}, and being read from the store.")


def _held_then(core: Core, row: TaskRow, around: Around) -> str:
    """The pause or the missing consumer that would keep the task waiting if it were due now, as a
    sentence that follows another; "" where there is none. Of several groups, the worst counts."""
    topic = core.topic(row.topic)
    backlog = topic.default_backlog
    groups = topic.live_groups if backlog is None else [backlog]
    reasons = [_pause(group) or _absence(core, group, around) for group in groups]
    found = [reason for reason in reasons if reason is not None]
    worst = min(found, key=lambda reason: RANKS[reason.cause], default=None)
    return "" if worst is None else f" If it were due now, it would wait. {worst.detail}"


def _of_group(
    core: Core, topic: Topic, name: str, view: GroupView, row: TaskRow, around: Around
) -> Reason:
    """The reason in one group, by its standing there."""
    of = f"group {name} of topic {topic.name}"
    group = topic.groups.get(name)
    if group is not None:
        match view.state:
            case "ready":
                return _of_ready(core, group, row, around)
            case "in_flight":
                return _of_lease(group, row.id, view, of)
            case "waiting":
                return _of_wait(row.id, view, around, of)
            case "held":
                return _of_held(group, row.id, row.id, _failure(view), of)
            case "filtered":
                return _left_out(group, row)
    if view.state == "dead":
        return Reason(
            Explained.DEAD,
            f"It is a dead letter of {of} since {shown_time(view.at_ms)}, after"
            f" {_many(view.attempt, 'attempt', 'attempts')}: {_failure(view)}.",
            f"tickwheel dead requeue {row.id} --group {name}",
        )
    cause = Explained(view.state)
    return Reason(cause, f"It was {cause.value} in {of}.")


def _left_out(group: Group, row: TaskRow) -> Reason:
    why = "" if group.judge is None else group.judge.why_not(row)
    return Reason(
        Explained.FILTERED,
        f"The filter of group {group.name} of topic {group.topic.name} left it out:"
        f" {why or 'it has changed since'}.",
        f"tickwheel groups set {group.topic.name} {group.name} --where CONDITION",
        group.name,
    )


def explain_filtered(core: Core, row: TaskRow) -> list[Reason]:
    """Why each filter of the topic left out a task that has ended so. ``row``: as it was."""
    topic = core.topics.get(row.topic)
    groups = [] if topic is None else topic.live_groups
    return [_left_out(group, row) for group in groups if group.judge is not None]


def _of_lease(group: Group, task_id: int, view: GroupView, of: str) -> Reason:
    lease = group.flight[task_id]
    by = lease.subscriber.label or "a consumer of before the daemon's restart"
    return Reason(
        Explained.LEASED,
        f"It is with {_cut(by)}, which got it from {of} as attempt {view.attempt}; its lease ends"
        f" {shown_time(view.at_ms)}, and without an ack it comes again.",
        f"tickwheel consumers --topic {group.topic.name} --group {group.name}",
        next_ms=view.at_ms,
    )


def _of_wait(task_id: int, view: GroupView, around: Around, of: str) -> Reason:
    if view.failures:
        last = view.failures[-1]
        has_died = last.reason.startswith(CONSUMER_DIED)
        what = f"attempt {last.attempt} failed"
        if has_died:
            what = f"the consumer of attempt {last.attempt} died"
        why = f"{what}: {_line(last.reason)}"
    elif view.snoozes:
        why = f"its consumer postponed it, {_many(view.snoozes, 'time', 'times')} by now"
    else:
        why = "it was moved there"
    left = max(0, view.at_ms - around.now_ms)
    return Reason(
        Explained.RETRY_WAIT,
        f"It comes to {of} again {shown_time(view.at_ms)}, in {_duration(left)}, because {why}.",
        f"tickwheel run-now {task_id}",
        next_ms=view.at_ms,
    )


def _of_held(group: Group, task_id: int, head: int, why: str, of: str) -> Reason:
    topic, is_head = group.topic.name, head == task_id
    mend = f"tickwheel groups release-key {topic} {group.name} {head}"
    if is_head:
        text = f"It has failed for good in {of}, and its order key is held with it: {why}."
        return Reason(Explained.KEY_HELD, text, mend)
    text = f"It waits in {of} behind task {head}, which has failed for good and holds the order key"
    text += f": {why}."
    return Reason(Explained.KEY_HELD, text, mend, behind=head)


# --- a task that is ready ------------------------------------------------------------------------


def _of_ready(core: Core, group: Group, row: TaskRow, around: Around) -> Reason:
    """What keeps a ready task from being handed out, the hardest first."""
    topic, key = group.topic, _key(core, group, row)
    # What keeps a head that is ready keeps those behind it as well.
    waits_for_ready = key is not None and _is_ready(group, key.behind)
    for reason in (
        _pause(group),
        None if waits_for_ready else key,
        _absence(core, group, around),
        _share(core, group, row),
        _rate(core, group, around),
        _alone(group, row.id),
        _credit(core, group),
        key,
    ):
        if reason is not None:
            return reason
    before = len(group.ready)
    return Reason(
        Explained.QUEUED,
        f"It is ready in group {group.name} of topic {topic.name}, whose consumers take more;"
        f" {_many(before, 'task stands', 'tasks stand')} in the queue with it.",
        f"tickwheel consumers --topic {topic.name} --group {group.name}",
    )


def _pause(group: Group) -> Reason | None:
    topic, of = group.topic, f"Group {group.name} of topic {group.topic.name}"
    if topic.settings.paused:
        return Reason(
            Explained.TOPIC_PAUSED,
            f"Topic {topic.name} is paused: nothing of it is delivered until it is resumed.",
            f"tickwheel resume {topic.name}",
        )
    if group.settings.paused:
        return Reason(
            Explained.GROUP_PAUSED,
            f"{of} is paused: it is delivered nothing until it is resumed.",
            f"tickwheel resume {topic.name} --group {group.name}",
        )
    if group.is_closed:
        return Reason(Explained.DELETING, f"{of} is being deleted, and the task leaves it.")
    return None


def _key(core: Core, group: Group, row: TaskRow) -> Reason | None:
    """What the order key of the task, or the value that shares its group, waits for."""
    ordering, of = core.orderings.of.get(group), f"group {group.name} of topic {group.topic.name}"
    if ordering is None:
        return None
    order = mark_of(row)
    for mark in (order, ordering.shares.mark_of(row)) if group.paused_keys else ():
        paused = group.paused_keys.get(mark)
        if paused is None:
            continue
        option = "--key" if paused.fair_by is None else "--value"
        what = "Order key" if paused.fair_by is None else f"The value of {paused.fair_by},"
        text = paused.value if isinstance(paused.value, str) else repr(paused.value)
        return Reason(
            Explained.KEY_PAUSED,
            f"{what} {_cut(text)} is paused in {of} since {shown_time(paused.since_ms)}.",
            f"tickwheel groups resume-key {group.topic.name} {group.name} {option}"
            f" {shlex.quote(text)}",
        )
    if not order:
        return None
    head = ordering.keys.order.head(order)
    if head == NOBODY:
        why = (
            "earlier tasks may still come to the group"
            if ordering.keys.gathers
            else "what became of the task before it is being stored"
        )
        return Reason(Explained.KEY_BUSY, f"Its order key waits in {of}: {why}.")
    if head in (0, row.id):
        return None
    if head in ordering.held:
        attempts = group.delivery_attempts.get(head)
        failures = () if attempts is None else attempts.past.failures
        return _of_held(
            group,
            row.id,
            head,
            _line(failures[-1].reason) if failures else "no reason was given",
            of,
        )
    return Reason(
        Explained.KEY_BUSY,
        f"It waits in {of} behind task {head} of its order key, which {_stand(group, head)}.",
        f"tickwheel explain {head}",
        behind=head,
    )


def _is_ready(group: Group, head: int | None) -> bool:
    return head is not None and head not in group.flight and head not in group.waiting


def _stand(group: Group, task_id: int) -> str:
    """How the head of an order key stands, in words."""
    lease = group.flight.get(task_id)
    if lease is not None:
        return f"is with {_cut(lease.subscriber.label or 'a consumer')}"
    at_ms = group.waiting.get(task_id)
    return "is ready" if at_ms is None else f"is tried again {shown_time(at_ms)}"


def _absence(core: Core, group: Group, around: Around) -> Reason | None:
    """Nobody is there to take the task."""
    topic = group.topic
    if group.subscribers:
        return None
    is_backlog = group is topic.default_backlog
    if not is_backlog and (topic.name, group.name) in core.targets:
        return Reason(
            Explained.ENDPOINT,
            f"Group {group.name} of topic {topic.name} is sent to another system, and nothing is"
            " sent at the moment.",
            f"tickwheel push list --topic {topic.name}",
        )
    nobody = (
        f"Topic {topic.name} has no group: what is due waits for the first subscriber"
        if is_backlog
        else f"Nobody subscribes to group {group.name} of topic {topic.name}"
    )
    similar = similar_topic(core, topic.name, around)
    if similar is not None:
        return Reason(
            Explained.SIMILAR_TOPIC,
            f"{nobody}; the similar topic {similar} is consumed. Is its name misspelt here, or"
            " there?",
            f"tickwheel consumers --topic {similar}",
        )
    if is_backlog:
        command = f"tickwheel groups create {topic.name} {DEFAULT_GROUP}"
        return Reason(Explained.NO_GROUP, f"{nobody}. Start a worker, or make its group.", command)
    # No `tickwheel subscribe`: it would ack tasks whose work nobody has done.
    return Reason(
        Explained.NO_SUBSCRIBER, f"{nobody}. Start its worker.", f"tickwheel peek {topic.name}"
    )


def similar_topic(core: Core, name: str, around: Around) -> str | None:
    """A topic that somebody consumes, and whose name is so similar that it may be meant."""
    consumed = [
        topic.name
        for topic in islice(core.topics.values(), TOPICS_LOOKED_AT)
        if topic.name != name
        and (topic.broadcasters or any(one.subscribers for one in topic.groups.values()))
        and around.may_see(topic.name)
    ]
    folded: dict[str, str] = {}
    for one in consumed[:COMPARED_MAX]:
        folded.setdefault(_folded(one), one)
    found = get_close_matches(_folded(name), folded, 1, SIMILAR)
    return folded[found[0]] if found else None


def _folded(name: str) -> str:
    """A name without what is easily mistaken: case, and which sign separates its words."""
    return name.lower().translate(_SIGNS)


_SIGNS = str.maketrans("_-:/", "....")


def _share(core: Core, group: Group, row: TaskRow) -> Reason | None:
    """The value that shares the group has no place for the task."""
    by, ordering = group.settings.shares.fair_by, core.orderings.of.get(group)
    if by is None or ordering is None:
        return None
    value, shares = shared_value(row, by), ordering.shares
    share = shares.of.get(mark_of_key(by, value))
    is_called = row.id in shares.called or row.id in group.loading
    if share is None or share.queue is None or is_called:
        return None
    of = f"group {group.name} of topic {group.topic.name}"
    what, limit = f"{by} {_cut(str(value))}", group.settings.shares.limit_each
    if limit is not None and share.called + share.in_flight >= limit:
        leases = islice(group.flight.values(), LEASES_LOOKED_AT)
        ids = [lease.id for lease in leases if lease.traits.share is share]
        named = ", ".join(map(str, ids[:NAMED_MAX])) + (" …" if len(ids) > NAMED_MAX else "")
        count = _many(share.in_flight, "task is", "tasks are")
        return Reason(
            Explained.SHARE_LIMIT,
            f"{count} in flight in {of} with {what}{f' ({named})' if ids else ''}; its limit_each"
            f" is {limit}.",
            f"tickwheel groups set {group.topic.name} {group.name} --limit-each N",
            behind=ids[0] if ids else None,
        )
    if share.is_paced and share.bucket is not None:
        return Reason(
            Explained.RATE,
            f"The rate_each of {of} lets {group.settings.shares.rate_each:g} tasks of {what} go a"
            f" second, and {_many(share.waiting, 'waits', 'wait')}.",
            f"tickwheel groups set {group.topic.name} {group.name} --rate-each N",
        )
    return None


def _rate(core: Core, group: Group, around: Around) -> Reason | None:
    at_mono_ms = core.throttled.get(group)
    if at_mono_ms is None:
        return None
    topic, own = group.topic, group.settings.rate
    is_own = own is not None and (group.bucket is None or group.bucket.next_mono_ms() >= at_mono_ms)
    rate = own if is_own else topic.settings.rate
    of = f"group {group.name} of topic {topic.name}" if is_own else f"topic {topic.name}"
    option = f" --group {group.name}" if is_own else ""
    return Reason(
        Explained.RATE,
        f"The rate of {of} is {rate or 0:g} a second, and"
        f" {_many(group.ready_count, 'ready task waits', 'ready tasks wait')} for it.",
        f"tickwheel rate {topic.name} none{option}",
        next_ms=around.wall_ms(at_mono_ms),
    )


def _alone(group: Group, task_id: int) -> Reason | None:
    if task_id not in group.apart:
        return None
    return Reason(
        Explained.ALONE,
        f"Consumers have died with it, so it is handed out alone: it waits in group {group.name} of"
        f" topic {group.topic.name} for a connection that has nothing else.",
        f"tickwheel consumers --topic {group.topic.name} --group {group.name}",
    )


def _credit(core: Core, group: Group) -> Reason | None:
    """All consumers have as much as they take."""
    if any(one.credit > 0 for one in group.able):
        return None
    topic, some = group.topic.name, list(islice(group.subscribers, LOOKED_AT_MAX))
    if (topic, group.name) in core.targets:
        return Reason(
            Explained.ENDPOINT,
            f"Group {group.name} of topic {topic} is sent to another system, which is slow or away:"
            f" {_many(len(group.flight), 'task waits', 'tasks wait')} for its answer.",
            f"tickwheel push log {topic} {group.name}",
        )
    some.sort(key=lambda one: -one.in_flight)
    named = "; ".join(map(_consumer, some[:NAMED_MAX]))
    more = len(group.subscribers) - len(some[:NAMED_MAX])
    named += f"; and {more} more" if more > 0 else ""
    count = _many(len(group.subscribers), "consumer", "consumers")
    take = "takes" if len(group.subscribers) == 1 else "take"
    return Reason(
        Explained.SLOW_CONSUMERS,
        f"{count} of group {group.name} of topic {topic} {take} no more: {named}.",
        f"tickwheel consumers --topic {topic} --group {group.name}",
    )


def _consumer(one: Subscriber) -> str:
    who = _cut(one.label or "a consumer")
    if one.presence.doubted:
        return f"{who} let a lease end, and was not heard of since"
    if one.blocked:
        return f"{who} does not read what it is sent"
    if one.presence.kept_for is not None:
        return f"{who} is kept free for a task that is to be alone"
    return f"{who} has {one.in_flight} of {one.prefetch}"


# --- a task that is not stored -------------------------------------------------------------------


def explain_absent(core: Core, control: Control, task_id: int) -> Reason:
    """What memory says of a task of which no record is left."""
    word = control.absent(task_id)
    if word == "unknown":
        return Reason(
            Explained.NOT_FOUND, f"No task has had the id {task_id} here.", "tickwheel list"
        )
    if word == "gone":
        return Reason(
            Explained.GONE,
            f"Task {task_id} has ended, so long ago that the daemon does not remember how.",
            f"tickwheel show {task_id} --flow",
        )
    cause = Explained(word)
    if cause is Explained.FILTERED:
        detail = f"{ENDS[cause]} Which condition failed is known only where a history is kept."
        return Reason(cause, detail)
    return Reason(cause, ENDS[cause], f"tickwheel show {task_id} --flow")


ENDS = {
    Explained.ACKED: "Every group that was owed it has acked it.",
    Explained.CANCELLED: "It was cancelled.",
    Explained.EXPIRED: "Its time to live was over before it was delivered.",
    Explained.DELETED: "It was deleted: from the dead letters, or with its group or topic.",
    Explained.FILTERED: "The filters of all groups of its topic left it out.",
}
"""How a task ended, in a sentence."""


def explain_half(core: Core, topic: str, key: str) -> Reason | None:
    """The reason for a task with a key that a transaction keeps, as long as nobody has decided
    it."""
    for row, name, of in islice(_halves(core), HALVES_LOOKED_AT):
        if (name, of) == (topic, key):
            return Reason(
                Explained.TRANSACTION,
                f"It is a half task of transaction {row.id}, which is {row.state.name.lower()}:"
                f" producer group {row.group} has not decided it.",
                f"tickwheel transactions show {row.id}",
            )
    return None


def _halves(core: Core) -> Iterator[tuple[TransactionRow, str, str | None]]:
    for transaction in core.transaction_registry.known.values():
        for part in transaction.parts.values():
            for half in part.halves:
                yield (
                    transaction.row,
                    half.topic,
                    None if half.options is None else half.options.key,
                )


def explain_no_key(core: Core, topic: str, key: str, around: Around) -> Reason:
    """No task of the topic has the key."""
    text = f"No task of topic {topic} with the key {_cut(key)!r} is stored, nor was one lately"
    if topic not in core.topics:
        names = [name for name in islice(core.topics, COMPARED_MAX) if around.may_see(name)]
        found = get_close_matches(topic, names, 1, SIMILAR)
        text += "; there is no such topic" + (f", but there is {found[0]}" if found else "")
    return Reason(Explained.NOT_FOUND, f"{text}.", f"tickwheel list --key {shlex.quote(key)}")


# --- words ---------------------------------------------------------------------------------------


def _failure(view: GroupView) -> str:
    return _line(view.failures[-1].reason) if view.failures else "no reason was given"


def _line(text: str) -> str:
    return _cut(text.partition("\n")[0]) or "no reason was given"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _many(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _duration(ms: int) -> str:
    for unit, length_ms in (("days", 86_400_000), ("hours", 3_600_000), ("minutes", 60_000)):
        if ms >= 2 * length_ms:
            return f"{ms // length_ms} {unit}"
    return f"{ms / 1000:g} s" if ms < 1_000 else f"{ms // 1000} s"
