"""Explains why a task is in its state: one cause, a sentence, and the command that resolves it.

``explain`` covers stored tasks, ``explain_absent`` tasks without a record, and ``explain_half``
half tasks of a transaction. They only read the engine's memory. The engine records nothing for
them.

A task that is owed to several groups has a cause in each of them. The answer is about the group
whose cause comes first in ``Explained``: causes that need an operator, then causes that pass by
themselves, then ends.

This module reads no clock and no history; the caller passes the time.
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
"""Maximum number of consumers, tasks or transactions that a sentence names."""
EXAMINED_MAX = 64
"""Maximum subscribers of a group that are examined."""
LEASES_EXAMINED_MAX = 4_096
"""Maximum number of deliveries in flight that are searched for a value."""
TOPICS_EXAMINED_MAX = 10_000
"""Maximum number of topics that are searched for consumers."""
COMPARED_MAX = 1_000
"""Maximum number of topics whose names are compared."""
HALVES_EXAMINED_MAX = 10_000
"""Maximum number of half tasks that are searched for a key."""
SIMILARITY_MIN = 0.8
"""Minimum similarity, 0 to 1, of two topic names for one to be a likely misspelling."""
SHOWN_MAX = 200
"""Maximum characters of a reason, or of a user's text, in a sentence."""


class Explained(StrEnum):
    """Why a task is in its state, in the order of precedence among groups."""

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
    """A cause, a sentence, and the command that resolves it."""

    cause: Explained
    detail: str
    command: str | None = None
    """The command that resolves the cause or shows more; None if there is nothing to do."""
    group: str | None = None
    behind: int | None = None
    """The task that this one waits for."""
    next_ms: int | None = None
    """When the task proceeds by itself (wall ms); None if that is unknown."""


class ExplainContext(NamedTuple):
    """The context of a request for an explanation."""

    now_ms: int
    mono_ms: int
    may_see: Callable[[str], bool]
    """Returns whether the caller may see a topic."""
    clock_ms: int | None = None
    """The time of the wall clock if it is not trusted; None if it is trusted."""
    accept_clock: str | None = None
    """The command that makes the daemon trust the clock."""

    def wall_ms(self, mono_ms: int) -> int:
        return mono_ms + self.now_ms - self.mono_ms


# --- a task that is stored -----------------------------------------------------------------------


def explain(
    core: Core, control: Control, snapshot: TaskSnapshot, context: ExplainContext
) -> list[Reason]:
    """Return why a stored task is in its state, then the reasons in its other groups."""
    row, state = snapshot.row, control.state(snapshot)
    if state is State.SCHEDULED:
        return [_reason_of_scheduled(core, row, context)]
    topic = core.topic(row.topic)
    backlog = topic.default_backlog
    if backlog is not None and state is State.READY:
        return [_reason_of_ready(core, backlog, row, context)]
    views = control.view(snapshot, context.now_ms - context.mono_ms)
    reasons = [
        _reason_in_group(core, topic, name, view, row, context)._replace(group=name)
        for name, view in views.items()
    ]
    reasons.sort(key=lambda reason: RANKS[reason.cause])
    return reasons or [Reason(Explained.QUEUED, "It is due and about to reach its groups.")]


def _reason_of_scheduled(core: Core, row: TaskRow, context: ExplainContext) -> Reason:
    due_ms, shown = row.due_ms, shown_time(row.due_ms)
    if context.clock_ms is not None and due_ms <= context.clock_ms:
        return Reason(
            Explained.CLOCK_HELD,
            f"It is due {shown}. The wall clock shows {shown_time(context.clock_ms)}, which is too"
            f" far ahead to be trusted; the daemon's time is {shown_time(context.now_ms)}.",
            context.accept_clock,
        )
    deferred = core.topic(row.topic).deferred
    if deferred is not None and row.id in deferred.waiting:
        return Reason(
            Explained.DELETING,
            f"It came due while the last group of topic {row.topic} was being deleted, and waits"
            " until the deletion is finished.",
        )
    if due_ms > context.now_ms:
        left = _duration(due_ms - context.now_ms)
        return Reason(
            Explained.SCHEDULED,
            f"It is not due yet: its time is {shown}, in {left}."
            + _delay_if_due(core, row, context),
            f"tickwheel run-now {row.id}",
            next_ms=due_ms,
        )
    return Reason(Explained.QUEUED, f"It has been due since {shown} and is being read.")


def _delay_if_due(core: Core, row: TaskRow, context: ExplainContext) -> str:
    """Return a sentence about the worst pause or missing consumer that would delay the task if it
    were due now, or "" if there is none."""
    topic = core.topic(row.topic)
    backlog = topic.default_backlog
    groups = topic.live_groups if backlog is None else [backlog]
    reasons = [
        _reason_of_pause(group) or _reason_of_absence(core, group, context) for group in groups
    ]
    delays = [reason for reason in reasons if reason is not None]
    worst = min(delays, key=lambda reason: RANKS[reason.cause], default=None)
    return "" if worst is None else f" If it were due now, it would wait. {worst.detail}"


def _reason_in_group(
    core: Core, topic: Topic, name: str, view: GroupView, row: TaskRow, context: ExplainContext
) -> Reason:
    """Return the reason in one group, according to the task's state there."""
    of = f"group {name} of topic {topic.name}"
    group = topic.groups.get(name)
    if group is not None:
        match view.state:
            case "ready":
                return _reason_of_ready(core, group, row, context)
            case "in_flight":
                return _reason_of_lease(group, row.id, view, of)
            case "waiting":
                return _reason_of_wait(row.id, view, context, of)
            case "held":
                return _reason_of_held(group, row.id, row.id, _failure(view), of)
            case "filtered":
                return _reason_of_filter(group, row)
    if view.state == "dead":
        return Reason(
            Explained.DEAD,
            f"It is a dead letter of {of} since {shown_time(view.at_ms)}, after"
            f" {_plural(view.attempt, 'attempt', 'attempts')}: {_failure(view)}.",
            f"tickwheel dead requeue {row.id} --group {name}",
        )
    cause = Explained(view.state)
    return Reason(cause, f"It was {cause.value} in {of}.")


def _reason_of_filter(group: Group, row: TaskRow) -> Reason:
    why = "" if group.judge is None else group.judge.why_not(row)
    return Reason(
        Explained.FILTERED,
        f"The filter of group {group.name} of topic {group.topic.name} excluded it:"
        f" {why or 'the filter has changed since'}.",
        f"tickwheel groups set {group.topic.name} {group.name} --where CONDITION",
        group.name,
    )


def explain_filtered(core: Core, row: TaskRow) -> list[Reason]:
    """Return why each filter of the topic excluded an ended task, whose last row is ``row``."""
    topic = core.topics.get(row.topic)
    groups = [] if topic is None else topic.live_groups
    return [_reason_of_filter(group, row) for group in groups if group.judge is not None]


def _reason_of_lease(group: Group, task_id: int, view: GroupView, of: str) -> Reason:
    lease = group.flight[task_id]
    by = lease.subscriber.label or "a consumer from before the daemon's restart"
    return Reason(
        Explained.LEASED,
        f"It is with {_short(by)}, which got it from {of} as attempt {view.attempt}. Its lease ends"
        f" {shown_time(view.at_ms)}; without an ack it is then delivered again.",
        f"tickwheel consumers --topic {group.topic.name} --group {group.name}",
        next_ms=view.at_ms,
    )


def _reason_of_wait(task_id: int, view: GroupView, context: ExplainContext, of: str) -> Reason:
    last = view.failures[-1] if view.failures else None
    if last is not None and last.attempt == view.attempt:
        has_died = last.reason.startswith(CONSUMER_DIED)
        event = f"attempt {last.attempt} failed"
        if has_died:
            event = f"the consumer of attempt {last.attempt} died"
        # An operator may have moved the next attempt.
        why = f"; {event}: {_first_line(last.reason)}"
    elif view.snoozes:
        why = f"; its consumers have postponed it {_plural(view.snoozes, 'time', 'times')}"
    else:
        why = ", because it was rescheduled"
    left = max(0, view.at_ms - context.now_ms)
    return Reason(
        Explained.RETRY_WAIT,
        f"It is delivered to {of} again {shown_time(view.at_ms)}, in {_duration(left)}{why}.",
        f"tickwheel run-now {task_id}",
        next_ms=view.at_ms,
    )


def _reason_of_held(group: Group, task_id: int, head: int, why: str, of: str) -> Reason:
    topic, is_head = group.topic.name, head == task_id
    command = f"tickwheel groups release-key {topic} {group.name} {head}"
    if is_head:
        text = f"It has failed for good in {of}, and its order key is held: {why}."
        return Reason(Explained.KEY_HELD, text, command)
    text = f"It waits in {of} for task {head}, which has failed for good and holds the order key"
    text += f": {why}."
    return Reason(Explained.KEY_HELD, text, command, behind=head)


# --- a task that is ready ------------------------------------------------------------------------


def _reason_of_ready(core: Core, group: Group, row: TaskRow, context: ExplainContext) -> Reason:
    """Return what prevents the delivery of a ready task, by precedence."""
    topic, key = group.topic, _reason_of_key(core, group, row)
    # The reason of a ready key holder is also the reason of the tasks that wait for it.
    waits_for_ready = key is not None and _is_ready(group, key.behind)
    for reason in (
        _reason_of_pause(group),
        None if waits_for_ready else key,
        _reason_of_absence(core, group, context),
        _reason_of_share(core, group, row),
        _reason_of_rate(core, group, context),
        _reason_of_isolation(group, row.id),
        _reason_of_credit(core, group),
        key,
    ):
        if reason is not None:
            return reason
    before = len(group.ready)
    return Reason(
        Explained.QUEUED,
        f"It is ready in group {group.name} of topic {topic.name}, whose consumers have credit;"
        f" {_plural(before, 'task is', 'tasks are')} in the queue, including it.",
        f"tickwheel consumers --topic {topic.name} --group {group.name}",
    )


def _reason_of_pause(group: Group) -> Reason | None:
    topic, of = group.topic, f"Group {group.name} of topic {group.topic.name}"
    if topic.settings.paused:
        return Reason(
            Explained.TOPIC_PAUSED,
            f"Topic {topic.name} is paused; its tasks are not delivered until it is resumed.",
            f"tickwheel resume {topic.name}",
        )
    if group.settings.paused:
        return Reason(
            Explained.GROUP_PAUSED,
            f"{of} is paused; it gets no deliveries until it is resumed.",
            f"tickwheel resume {topic.name} --group {group.name}",
        )
    if group.is_closed:
        return Reason(Explained.DELETING, f"{of} is being deleted, with this task in it.")
    return None


def _reason_of_key(core: Core, group: Group, row: TaskRow) -> Reason | None:
    """Return why the task's order key, or its value of ``fair_by``, delays it."""
    ordering, of = (
        core.orderings.by_group.get(group),
        f"group {group.name} of topic {group.topic.name}",
    )
    if ordering is None:
        return None
    order = mark_of(row)
    for mark in (order, ordering.shares.mark_of(row)) if group.paused_keys else ():
        paused = group.paused_keys.get(mark)
        if paused is None:
            continue
        option = "--key" if paused.fair_by is None else "--value"
        noun = "Order key" if paused.fair_by is None else f"The {paused.fair_by}"
        is_text = isinstance(paused.value, str)
        text = str(paused.value) if is_text else repr(paused.value).lower()  # true, not True
        return Reason(
            Explained.KEY_PAUSED,
            f"{noun} {_short(text)} has been paused in {of} since {shown_time(paused.since_ms)}.",
            f"tickwheel groups resume-key {group.topic.name} {group.name} {option}"
            f" {shlex.quote(text if is_text else f':={text}')}",
        )
    if not order:
        return None
    head = ordering.keys.order.head(order)
    if head == NOBODY:
        why = (
            "the group may still get earlier tasks"
            if ordering.keys.awaits_replay
            else "the end of the previous task is being stored"
        )
        return Reason(Explained.KEY_BUSY, f"Its order key waits in {of}: {why}.")
    if head in (0, row.id):
        return None
    if head in ordering.held:
        attempts = group.delivery_attempts.get(head)
        failures = () if attempts is None else attempts.past.failures
        return _reason_of_held(
            group,
            row.id,
            head,
            _first_line(failures[-1].reason) if failures else "no reason was given",
            of,
        )
    return Reason(
        Explained.KEY_BUSY,
        f"It waits in {of} for task {head} of its order key, which {_state_of(group, head)}.",
        f"tickwheel explain {head}",
        behind=head,
    )


def _is_ready(group: Group, head: int | None) -> bool:
    return head is not None and head not in group.flight and head not in group.waiting


def _state_of(group: Group, task_id: int) -> str:
    """Return what the holder of an order key is doing, in words."""
    lease = group.flight.get(task_id)
    if lease is not None:
        return f"is with {_short(lease.subscriber.label or 'a consumer')}"
    at_ms = group.waiting.get(task_id)
    return "is ready" if at_ms is None else f"is tried again {shown_time(at_ms)}"


def _reason_of_absence(core: Core, group: Group, context: ExplainContext) -> Reason | None:
    """Return the reason if there is no consumer for the task."""
    topic = group.topic
    if group.subscribers:
        return None
    is_backlog = group is topic.default_backlog
    target = None if is_backlog else core.targets.get((topic.name, group.name))
    if target is not None:
        return Reason(
            Explained.ENDPOINT,
            f"The tasks of group {group.name} of topic {topic.name} are sent to another system, but"
            " no process sends at the moment.",
            f"tickwheel {target.kind} list {topic.name}",
        )
    absence = (
        f"Topic {topic.name} has no group, so due tasks wait for the first subscriber"
        if is_backlog
        else f"Group {group.name} of topic {topic.name} has no subscriber"
    )
    similar = similar_topic(core, topic.name, context)
    if similar is not None:
        return Reason(
            Explained.SIMILAR_TOPIC,
            f"{absence}, but the similarly named topic {similar} has consumers. Check both names"
            " for a typing error.",
            f"tickwheel consumers --topic {similar}",
        )
    if is_backlog:
        command = f"tickwheel groups create {topic.name} {DEFAULT_GROUP}"
        text = f"{absence}. Start a worker, or create a group."
        return Reason(Explained.NO_GROUP, text, command)
    # `tickwheel subscribe` is not suggested, because it would ack tasks without doing their work.
    return Reason(
        Explained.NO_SUBSCRIBER, f"{absence}. Start its worker.", f"tickwheel peek {topic.name}"
    )


def similar_topic(core: Core, name: str, context: ExplainContext) -> str | None:
    """Return a topic with consumers and a name so similar that one may be a typing error."""
    consumed = [
        topic.name
        for topic in islice(core.topics.values(), TOPICS_EXAMINED_MAX)
        if topic.name != name
        and (topic.broadcasters or any(group.subscribers for group in topic.groups.values()))
        and context.may_see(topic.name)
    ]
    folded: dict[str, str] = {}
    for topic_name in consumed[:COMPARED_MAX]:
        folded.setdefault(_folded(topic_name), topic_name)
    matches = get_close_matches(_folded(name), folded, 1, SIMILARITY_MIN)
    return folded[matches[0]] if matches else None


def _folded(name: str) -> str:
    """Return a name without differences in case and in the separators of words."""
    return name.lower().translate(_SIGNS)


_SIGNS = str.maketrans("_-:/", "....")


def _reason_of_share(core: Core, group: Group, row: TaskRow) -> Reason | None:
    """Return the reason if the limits of the task's value of ``fair_by`` delay it."""
    by, ordering = group.settings.shares.fair_by, core.orderings.by_group.get(group)
    if by is None or ordering is None:
        return None
    value, shares = shared_value(row, by), ordering.shares
    share = shares.by_mark.get(mark_of_key(by, value))
    is_called = row.id in shares.called or row.id in group.loading
    if share is None or share.queue is None or is_called:
        return None
    of = f"group {group.name} of topic {group.topic.name}"
    shown_value, limit = f"{by} {_short(str(value))}", group.settings.shares.limit_each
    if limit is not None and share.called + share.in_flight >= limit:
        leases = islice(group.flight.values(), LEASES_EXAMINED_MAX)
        ids = [lease.id for lease in leases if lease.traits.share is share]
        named = ", ".join(map(str, ids[:NAMED_MAX])) + (" …" if len(ids) > NAMED_MAX else "")
        count = _plural(share.in_flight, "task is", "tasks are")
        return Reason(
            Explained.SHARE_LIMIT,
            f"{count} in flight in {of} with {shown_value}{f' ({named})' if ids else ''}; its"
            f" limit_each is {limit}.",
            f"tickwheel groups set {group.topic.name} {group.name} --limit-each N",
            behind=ids[0] if ids else None,
        )
    if share.is_paced and share.bucket is not None:
        return Reason(
            Explained.RATE,
            f"The rate_each of {of} allows {group.settings.shares.rate_each:g} tasks per second"
            f" with {shown_value}, and {_plural(share.waiting, 'task waits', 'tasks wait')}.",
            f"tickwheel groups set {group.topic.name} {group.name} --rate-each N",
        )
    return None


def _reason_of_rate(core: Core, group: Group, context: ExplainContext) -> Reason | None:
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
        f"The rate of {of} is {rate or 0:g} per second, and"
        f" {_plural(group.ready_count, 'ready task waits', 'ready tasks wait')} for it.",
        f"tickwheel rate {topic.name} none{option}",
        next_ms=context.wall_ms(at_mono_ms),
    )


def _reason_of_isolation(group: Group, task_id: int) -> Reason | None:
    if task_id not in group.isolated:
        return None
    return Reason(
        Explained.ALONE,
        f"Consumers have died with it, so it waits in group {group.name} of topic"
        f" {group.topic.name} for a connection with no other delivery.",
        f"tickwheel consumers --topic {group.topic.name} --group {group.name}",
    )


def _reason_of_credit(core: Core, group: Group) -> Reason | None:
    """Return the reason if no consumer has credit."""
    if any(subscriber.credit > 0 for subscriber in group.able):
        return None
    topic, sample = group.topic.name, list(islice(group.subscribers, EXAMINED_MAX))
    target = core.targets.get((topic, group.name))
    if target is not None:
        log = f"tickwheel push log {topic} {group.name}"
        return Reason(
            Explained.ENDPOINT,
            f"The tasks of group {group.name} of topic {topic} are sent to another system, which is"
            f" slow or unreachable; {_plural(len(group.flight), 'task waits', 'tasks wait')} for"
            " its answer.",
            log if target.kind == "push" else f"tickwheel forward list {topic}",
        )
    sample.sort(key=lambda subscriber: -subscriber.in_flight)
    named = "; ".join(map(_consumer, sample[:NAMED_MAX]))
    more = len(group.subscribers) - len(sample[:NAMED_MAX])
    named += f"; and {more} more" if more > 0 else ""
    count = _plural(len(group.subscribers), "consumer", "consumers")
    verb = "has" if len(group.subscribers) == 1 else "have"
    return Reason(
        Explained.SLOW_CONSUMERS,
        f"{count} of group {group.name} of topic {topic} {verb} no credit: {named}.",
        f"tickwheel consumers --topic {topic} --group {group.name}",
    )


def _consumer(subscriber: Subscriber) -> str:
    label = _short(subscriber.label or "a consumer")
    if subscriber.presence.doubted:
        return f"{label} let a lease end and has not responded since"
    if subscriber.blocked:
        return f"{label} does not read its deliveries"
    if subscriber.presence.kept_for is not None:
        return f"{label} is kept free for a task that must be alone"
    return f"{label} has {subscriber.in_flight} of {subscriber.prefetch} deliveries"


# --- a task that is not stored -------------------------------------------------------------------


def explain_absent(core: Core, control: Control, task_id: int) -> Reason:
    """Return the reason for a task that has no record, from memory."""
    word = control.absent(task_id)
    if word == "unknown":
        return Reason(
            Explained.NOT_FOUND, f"No task has had the id {task_id} here.", "tickwheel list"
        )
    if word == "gone":
        return Reason(
            Explained.GONE,
            f"Task {task_id} ended so long ago that the daemon does not remember how.",
            f"tickwheel show {task_id} --flow",
        )
    cause = Explained(word)
    if cause is Explained.FILTERED:
        detail = f"{ENDS[cause]} Without a history, the failed condition is unknown."
        return Reason(cause, detail)
    return Reason(cause, ENDS[cause], f"tickwheel show {task_id} --flow")


ENDS = {
    Explained.ACKED: "Every group that was owed it has acked it.",
    Explained.CANCELLED: "It was cancelled.",
    Explained.EXPIRED: "Its time to live passed before it was delivered.",
    Explained.DELETED: "It was deleted from the dead letters, or with its group or topic.",
    Explained.FILTERED: "The filters of all groups of its topic excluded it.",
}
"""How a task ended → sentence."""


def explain_half(core: Core, topic: str, key: str, context: ExplainContext) -> Reason | None:
    """Return the reason if an undecided transaction, which the caller may see, has a half task with
    this key."""
    for row, half_topic, half_key in islice(_halves(core), HALVES_EXAMINED_MAX):
        if (half_topic, half_key) == (topic, key) and all(map(context.may_see, row.topics)):
            return Reason(
                Explained.TRANSACTION,
                f"It is a half task of transaction {row.id}, which is {row.state.name.lower()};"
                f" producer group {row.group} has not decided it.",
                f"tickwheel transactions show {row.id}",
            )
    return None


def _halves(core: Core) -> Iterator[tuple[TransactionRow, str, str | None]]:
    for transaction in core.transaction_registry.by_name.values():
        for part in transaction.parts.values():
            for half in part.halves:
                yield (
                    transaction.row,
                    half.topic,
                    None if half.options is None else half.options.key,
                )


def explain_no_key(core: Core, topic: str, key: str, context: ExplainContext) -> Reason:
    """Return the reason if no task of the topic has the key."""
    text = f"No present or recent task of topic {topic} has the key {_short(key)!r}"
    if topic not in core.topics:
        names = [name for name in islice(core.topics, COMPARED_MAX) if context.may_see(name)]
        matches = get_close_matches(topic, names, 1, SIMILARITY_MIN)
        text += "; there is no such topic" + (f", but there is {matches[0]}" if matches else "")
    return Reason(Explained.NOT_FOUND, f"{text}.", f"tickwheel list --key {shlex.quote(key)}")


# --- words ---------------------------------------------------------------------------------------


def _failure(view: GroupView) -> str:
    return _first_line(view.failures[-1].reason) if view.failures else "no reason was given"


def _first_line(text: str) -> str:
    return _short(text.partition("\n")[0]) or "no reason was given"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"


def _plural(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"


def _duration(ms: int) -> str:
    for unit, length_ms in (("days", 86_400_000), ("hours", 3_600_000), ("minutes", 60_000)):
        if ms >= 2 * length_ms:
            return f"{ms // length_ms} {unit}"
    return f"{ms / 1000:g} s" if ms < 1_000 else f"{ms // 1000} s"
