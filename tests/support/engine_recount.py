"""Counts everything in an engine again, the slow way, and compares with what it says.

What belongs to which task is taken from the records; where each task stands, from the
engine's containers. Raises AssertionError at the first contradiction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.engine_rig import Rig
from tickwheel.engine.ordering import NEVER_MS
from tickwheel.engine.queues import KeyQueue, ReadyQueue
from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Core
from tickwheel.engine.topics import Group, Topic, ttl_end_ms
from tickwheel.model.filters import length_of
from tickwheel.model.kinds import COUNTER, GROUP, HEADER_PART, PAUSED_KEY, TARGET, TransactionState
from tickwheel.model.records import TaskSnapshot, order_of, task_bytes


def recounted(make: Callable[[], Rig]) -> Any:
    """Fixture: recount a rig after each test."""

    @pytest.fixture
    def rig() -> Iterator[Rig]:
        made = make()
        yield made
        recount(made)

    return rig


def queued(ready: ReadyQueue) -> Counter[int]:
    """Return the number of entries of each id that are not stale."""
    entries = Counter[int]()
    for priority, level in ready.levels().items():
        own, stale = Counter(level.peek(len(level))), Counter(ready.stale.get(priority, {}))
        assert stale <= own and all(stale.values()), "stale without an entry"
        entries += own - stale
    assert ready.stale.keys() <= ready.levels().keys() and all(ready.stale.values())
    assert sum(sum(counts.values()) for counts in ready.stale.values()) == ready.stale_count
    return entries


def ready_ids(core: Core, group: Group) -> list[int]:
    """Return the ids in the ready queue or being loaded, with repeats."""
    return [*queued(group.ready).elements(), *group.loading, *awaiting_turn(core, group)]


def awaiting_turn(core: Core, group: Group) -> list[int]:
    """Return the ids that wait for their turn in a key's line."""
    ordering = core.orderings.by_group.get(group)
    assert group.is_ordered == (ordering is not None)
    if ordering is None:
        assert group.awaiting_turn == group.held == 0
        assert not group.paused_keys
        return []
    task_ids = [task_id for queue in ordering.keys.order.queues.values() for task_id in queue.ids()]
    assert len(task_ids) == ordering.keys.order.waiting
    assert all(queue.waiting for queue in ordering.keys.order.queues.values()), (
        "a key queue of nobody"
    )
    for mark, queue in ordering.keys.order.queues.items():
        assert _is_first(core, group, mark, queue), "a head that nobody has had is overtaken"
    for share in ordering.shares.by_mark.values():
        entries = queued(share.queue or ReadyQueue())
        assert share.waiting == entries.total()
        assert entries.keys().isdisjoint(ordering.shares.unshared or ()), "ready, and waiting"
        task_ids += entries.elements()
        flying = [item for item in group.flight.values() if item.traits.share is share]
        assert share.in_flight == len(flying), "in flight of a value"
        assert not share.is_idle or share.bucket is not None, "a value with nothing is remembered"
    kept = ordering.pauses.kept_back
    assert {item.mark for item in kept.values()} <= group.paused_keys.keys() or group.is_closed
    assert group.paused_keys.keys() <= group.key_intervals.keys()
    task_ids += kept
    assert group.awaiting_turn == len(task_ids)
    coming = {i for comes in ordering.keys._rejoining.values() for i, _, _ in comes}
    assert ordering.keys.rejoining_ids <= coming & group.loading.keys(), "one does not rejoin"
    assert group.held == len(ordering.held) == sum(at == NEVER_MS for at in group.waiting.values())
    return task_ids


def _is_first(core: Core, group: Group, mark: int, queue: KeyQueue) -> bool:
    """Return whether the head of a key precedes the tasks behind it."""
    ordering, row = core.orderings.by_group[group], core.resident_rows.get(queue.head)
    is_looked_at = mark in ordering.keys.order.overtaken or mark in ordering.keys.notes
    if (
        is_looked_at
        or row is None
        or queue.head in group.flight
        or queue.head in group.delivery_attempts
    ):
        return True
    due_ms, task_id = queue.first()
    place = ordering.keys.order.places.get(task_id, task_id)
    return (row.due_ms, order_of(row)) < (due_ms, place)


def recount(rig: Rig) -> dict[tuple[int, str], str]:
    """Check all counts. Return the place of every due, unfinished task by (id, group)."""
    core = rig.core
    ids = [i for i in rig.rows.tasks if i <= core.landed_id]
    known = rig.known(ids)
    places: dict[tuple[int, str], str] = {}
    for topic in core.topics.values():
        groups = list(topic.groups.values())
        for group in [
            *groups,
            *([topic.default_backlog] if topic.default_backlog is not None else []),
        ]:
            _group(rig, group, known, places)
        assert not (groups and topic.default_backlog is not None)
        assert topic.closing == sum(group.is_closed for group in groups)
        waiting = topic.deferred.waiting if topic.deferred is not None else {}
        assert not (waiting and topic.live_groups), "deferred, though there is a group"
        if topic.deferred is not None and topic.deferred.released:
            assert core.refiring[topic] is topic.deferred
    scheduled = _scheduled(rig, known, places)
    _tasks(rig, known, places, scheduled)
    all_waits = (g.waiting.values() for t in core.topics.values() for g in t.groups.values())
    waits = sum(at_ms != NEVER_MS for waits in all_waits for at_ms in waits)
    deferred = sum(len(topic.deferred or ()) for topic in core.topics.values())
    handles = len(scheduled) - len(core.firing) - deferred - len(core.replaced) + waits
    assert len(core.wheel) == handles, "handles on the wheel"
    _lifetimes(rig, known, places)
    _transactions(rig)
    _settings(rig)
    for task_id, row in core.resident_rows.items():
        assert task_id in known, f"a row of {task_id} is kept, which has ended"
        assert row == known[task_id].row, f"the row kept of {task_id} is not its newest"
    sizes = (task_bytes(row) + ROW_OVERHEAD_BYTES for row in core.resident_rows.values())
    assert core.resident_bytes == sum(sizes)
    for name, topic in core.topics.items():
        idle = rig.engine.grouping.is_idle(topic)
        assert not idle or name in core.maybe_idle, f"{name} will never be forgotten"
    all_groups = [g for t in core.topics.values() for g in t.groups.values()]
    assert core.tasks == len(known)
    _unfinished(core, known, {*scheduled, *(task_id for task_id, _ in places)})
    _keys(rig, known)
    assert core.sessions.answer_count == sum(session.weight for session in core.sessions)
    held = [batch.replaced for batch in (core.sealed, core.landing, core.open) if batch is not None]
    for task_id, row in core.replaced.items():
        assert any(rows.get(task_id) is row for rows in held), f"{task_id} is held for ever"
    assert core.group_count == len(all_groups)
    assert core.filters_length == sum(length_of(group.settings) for group in all_groups)
    for topic in core.topics.values():
        results = [group.judge is not None for group in topic.groups.values()]
        assert topic.filtering == any(results)
    listening = sum(len(topic.broadcasters) for topic in core.topics.values())
    assert core.subscribers == listening + sum(len(group.subscribers) for group in all_groups)
    assert core.in_flight == sum(len(group.flight) for group in all_groups)
    _presences(all_groups)
    batches = [batch for batch in (core.sealed, core.open) if batch is not None]
    assert core.handed_bytes == sum(batch.handed_bytes for batch in batches)
    assert (core.handed_bytes > 0) == any(batch.handed for batch in batches)
    return places


def _unfinished(core: Core, known: dict[int, TaskSnapshot], wanted: set[int]) -> None:
    """Check the tallies of scheduled, owed and staged tasks by topic."""
    durable = Counter(known[task_id].row.topic for task_id in wanted)
    for name, topic in core.topics.items():
        assert topic.unfinished == durable[name], f"unfinished of {name}"
    batches = [batch for batch in (core.sealed, core.landing, core.open) if batch is not None]
    staged = Counter(row.topic for batch in batches for row in batch.effects.enqueued.values())
    halves = Counter(
        half.topic
        for item in core.transaction_registry.by_name.values()
        for part in item.parts.values()
        for half in part.halves
    )
    assert core.transaction_registry.topics == halves
    fresh = core.tally(lambda name: name > "a")
    for tally in core.tallies.all:
        counts = (durable, staged, halves)
        wanted_count = sum(n for each in counts for name, n in each.items() if tally.has(name))
        assert tally.tasks == wanted_count, "a tally"
    core.tallies.remove(fresh)


def _presences(groups: list[Group]) -> None:
    """Check the deliveries of each connection, and what it is reserved for."""
    unsettled = Counter(item.subscriber.presence for g in groups for item in g.flight.values())
    for group in groups:
        for subscriber in group.subscribers:
            presence = subscriber.presence
            assert presence.unsettled == unsettled[presence], "deliveries of a connection"
            assert subscriber in presence.subscribers
            assert presence.kept_for is None or presence.kept_for in groups


def _keys(rig: Rig, known: dict[int, TaskSnapshot]) -> None:
    """Check that the key index has exactly the tasks with a key."""
    by_key: dict[tuple[str, str], list[int]] = {}
    for task_id, one in known.items():
        if one.row.options is not None and one.row.options.key is not None:
            by_key.setdefault((one.row.topic, one.row.options.key), []).append(task_id)
    assert len(rig.core.keys) == sum(map(len, by_key.values()))
    for (topic, key), ids in by_key.items():
        tasks = rig.core.keys.find(topic, key)
        assert set(ids) <= set(tasks) and len(set(tasks)) == len(tasks)


def _lifetimes(
    rig: Rig, known: dict[int, TaskSnapshot], places: dict[tuple[int, str], str]
) -> None:
    """Check that every running TTL has one handle."""
    lifetimes = rig.core.lifetimes
    wanted: Counter[int] = Counter()
    for (task_id, _), place in places.items():
        row = known[task_id].row
        end_ms = ttl_end_ms(row.due_ms, row.options)
        if place in ("ready", "waiting") and end_ms is not None:
            wanted[task_id] += 1
            waits = lifetimes.wheel.holds(task_id, end_ms)
            assert waits or task_id in lifetimes.fired, f"the ttl of {task_id} does not end"
    assert all(count <= wanted[i] for i, count in lifetimes.fired.items())
    assert len(lifetimes) == wanted.total(), "handles of times to live"


def _settings(rig: Rig) -> None:
    """Check that a restart would find the current groups, settings and paused keys."""
    core = rig.core
    stored, paused = dict(rig.rows.groups), dict(rig.rows.paused_keys)
    targets, counter = dict(rig.rows.targets), dict(rig.rows.counter)
    sealed = [core.sealed.effects] if core.sealed is not None else []
    for effects in (*sealed, core.open.effects):
        _apply(stored, effects.of_kind(GROUP))
        _apply(paused, effects.of_kind(PAUSED_KEY))
        _apply(targets, effects.of_kind(TARGET))
        _apply(counter, effects.of_kind(COUNTER))
    groups = [group for t in core.topics.values() for group in t.groups.values()]
    keys = [key for group in groups for key in group.paused_keys.values()]
    assert paused == {PAUSED_KEY.key(key): key for key in keys}
    assert targets == core.targets
    assert sum(row.number for row in counter.values()) == core.versions.counter
    holds = [group.row() for t in core.topics.values() for group in t.groups.values()]
    holds += [row for t in core.topics.values() if (row := t.row()) is not None]
    assert stored == {(row.topic, row.group): row for row in holds}
    for topic in core.topics.values():
        ones: list[Topic | Group] = [topic, *topic.groups.values()]
        for item in ones:
            rate = item.settings.rate
            assert (item.bucket is None) == (rate is None)
            assert item.bucket is None or item.bucket.rate == rate


def _apply(stored: dict[Any, Any], changes: dict[Any, Any]) -> None:
    for key, row in changes.items():
        stored.pop(key, None)
        if row is not None:
            stored[key] = row


def _group(
    rig: Rig, group: Group, known: dict[int, TaskSnapshot], places: dict[tuple[int, str], str]
) -> None:
    rows = [(i, "ready") for i in ready_ids(rig.core, group)]
    rows += [(i, "in_flight") for i in group.flight]
    rows += [(i, "waiting") for i in group.waiting]
    for task_id, place in rows:
        key = task_id, group.name
        assert key not in places, f"{key} is {places[key]} and {place}"
        assert task_id in known, f"{key} is {place} and has ended"
        assert known[task_id].row.topic == group.topic.name
        places[key] = place
    assert group.ready_count == sum(place == "ready" for _, place in rows)
    since_ms = group.oldest_since_ms()
    assert since_ms is None or group.ready_count
    assert group.ready_count == sum(place == "ready" for _, place in rows), "by looking"
    dead = [i for i, k in known.items() if group.name in k.dead and _is_of(k, group)]
    assert group.dead == len(dead), f"{group.name} counts {group.dead} dead, has {dead}"
    for task_id in dead:
        assert (task_id, group.name) not in places, f"{task_id} is dead and alive"
    for task_id in group.delivery_attempts:
        assert places.get((task_id, group.name)) in ("ready", "waiting"), "tries without a task"
    numbered = rig.core.numbered.get(group.topic.name, {})
    assert not group.numbers or group in numbered, "its numbers are never forgotten"
    for task_id in group.numbers:
        assert task_id in known, "the number of a task that has ended"
        remembered = (*group.delivery_attempts, *group.flight)
        assert task_id not in remembered, "two of them know what the newest delivery is"
    for task_id in group.waiting:
        assert group in rig.core.retrying[task_id]
    assert group.withheld.keys() <= group.waiting.keys()
    for task_id, lease in group.flight.items():
        assert lease.live and lease.id == task_id and lease.group is group
    assert group.able.keys() <= group.subscribers.keys()
    for lease in group.flight.values():
        presence = lease.subscriber.presence
        is_last = lease.past.deaths >= rig.core.config.deaths_alone
        if is_last and lease.subscriber.is_subscribed:
            assert presence.unsettled == 1, "it is not alone on its connection"
            assert presence.kept_for is group
    outstanding = Counter(lease.subscriber for lease in group.flight.values())
    assert not group.detached.held, "it is with nobody"
    for subscriber in {*outstanding, *group.subscribers} - {group.detached}:
        mine = {i: one for i, one in group.flight.items() if one.subscriber is subscriber}
        assert subscriber.held == mine, "what a subscriber holds"
    for subscriber in group.subscribers:
        unconfirmed = rig.core.open.credits.get(subscriber, 0)
        if rig.core.sealed is not None:
            unconfirmed += rig.core.sealed.credits.get(subscriber, 0)
        assert subscriber.outstanding == outstanding[subscriber] + unconfirmed, "credit"
        assert subscriber.unconfirmed == unconfirmed, "ends that no batch confirms"
        assert subscriber.credit <= 0 or subscriber in group.able, "its turn never comes"


def _is_of(known: TaskSnapshot, group: Group) -> bool:
    return known.row.topic == group.topic.name


def _transactions(rig: Rig) -> None:
    """Check the sums and rows of open transactions."""
    registry = rig.core.transaction_registry
    open_ = [item for item in registry.by_name.values() if not item.row.state.is_decided]
    halves = [half for item in open_ for part in item.parts.values() for half in part.halves]
    assert registry.tasks == len(halves)
    assert registry.size_bytes == sum(half.size_bytes for half in halves)
    assert registry.undecided == len(open_)
    assert registry.parked == sum(item.row.state is TransactionState.PARKED for item in open_)
    batches = (rig.core.sealed, rig.core.open)
    for name, one in registry.by_name.items():
        assert one.staged is None or one.staged in batches, f"{name} is staged in no batch"
        if one.staged is None:
            assert rig.rows.transactions[name, HEADER_PART] == one.row
            parts = {n: part for (i, n), part in rig.rows.transactions.items() if i == name and n}
            assert parts == one.parts
        is_open = one.staged is None and one.row.state is TransactionState.OPEN
        due_ms = registry._due._times_ms.get(name)
        assert due_ms == (one.check_ms if is_open else None)
    _asked_and_listed(rig)


def _asked_and_listed(rig: Rig) -> None:
    """Check pending checkbacks, owners' counts, and the names of durable transactions."""
    registry = rig.core.transaction_registry
    waiting: dict[str, set[str]] = {}
    shares: dict[str, tuple[int, int, int]] = {}
    for name, one in registry.by_name.items():
        if one.row.waits_for_members:
            waiting.setdefault(one.row.group, set()).add(name)
        if not one.row.state.is_decided:
            count, tasks, size_bytes = shares.get(one.row.owner, (0, 0, 0))
            more = count + 1, tasks + one.row.tasks, size_bytes + one.row.size_bytes
            shares[one.row.owner] = more
    assert {group: set(names) for group, names in registry.unasked.items()} == waiting
    by_name = {name: (s.count, s.tasks, s.size_bytes) for name, s in registry.shares.items()}
    assert by_name == shares
    for state in TransactionState:
        # What the store has, or has had and is not known to have lost.
        names = sorted(
            name
            for (name, part), row in rig.rows.transactions.items()
            if part == HEADER_PART and getattr(row, "state", None) is state
        )
        in_flight = rig.core.sealed is not None and rig.core.sealed.transactions
        assert in_flight or list(registry.listed("", state)) == names


def _scheduled(
    rig: Rig, known: dict[int, TaskSnapshot], places: dict[tuple[int, str], str]
) -> set[int]:
    core = rig.core
    placed = {task_id for task_id, _ in places}
    scheduled = {i for i, k in known.items() if i not in placed and not k.dead}
    for task_id, k in known.items():
        deferred = core.topics[k.row.topic].deferred or ()
        on_wheel = core.wheel.holds(task_id, k.row.due_ms) or task_id in core.firing
        on_wheel |= task_id in deferred or task_id in core.replaced
        assert core.is_scheduled(k.row) == (task_id in scheduled)
        if task_id in scheduled:
            assert on_wheel, f"{task_id} is lost: in no group and not on the wheel"
        elif task_id not in core.retrying:
            assert not on_wheel, f"{task_id} is due, and on the wheel again"
    assert core.firing.keys() <= scheduled
    assert core.scheduled == len(scheduled), f"{core.scheduled} counted, {len(scheduled)} there"
    by_topic = Counter(known[i].row.topic for i in scheduled)
    assert {n: t.scheduled for n, t in core.topics.items() if t.scheduled} == dict(by_topic)
    retrying = Counter(i for (i, _), place in places.items() if place == "waiting")
    assert {i: len(groups) for i, groups in core.retrying.items()} == dict(retrying)
    return scheduled


def _lies_for_a_replay(core: Core, topic: str, name: str, task_id: int) -> bool:
    group = core.topics[topic].groups.get(name)
    if group is None:
        return False
    is_under_way = group in core.topics[topic].replays or group.is_closed
    return is_under_way and task_id in group.loading


def _tasks(
    rig: Rig,
    known: dict[int, TaskSnapshot],
    places: dict[tuple[int, str], str],
    scheduled: set[int],
) -> None:
    core = rig.core
    assert core.dead == sum(len(k.dead) for k in known.values())
    assert core.owed.keys() <= known.keys() - scheduled
    groups_of: dict[int, set[str]] = {}
    for task_id, group in places:
        groups_of.setdefault(task_id, set()).add(group)
    for task_id, k in known.items():
        groups = groups_of.get(task_id, set())
        owed = core.owed.get(task_id)
        if owed is not None:
            assert owed.remaining == groups, f"{task_id} is owed to {owed.remaining}, in {groups}"
            assert owed.dead_lettered == len(k.dead)
        else:
            assert len(groups) + len(k.dead) == (task_id not in scheduled)
        for name, row in k.progress.items():
            finished = row.state.is_over
            if finished and _lies_for_a_replay(core, k.row.topic, name, task_id):
                continue  # a former group of this name acked it: replay or deletion will end it
            assert finished == (name not in groups), f"{row} of {name}, which is in {groups}"
        if task_id not in scheduled:
            first = core.topics[k.row.topic].first_group
            assert owed is not None or first is None or groups <= {first.name}
