"""Operations that read for the console: overview, counts, lag of a group, consumers, history and
the last report.

Invariants:

* An overview is computed at most once in ``FRESH_MS``, no matter how many clients read it, and in
  steps, so that no delivery waits for it.
* A separate process reads the history (``history/read.py``). The process starts with the first
  query, stays for ``IDLE_S`` after its last answer, and ends when this daemon stops serving. A
  process that dies or does not answer is replaced. It gets one query at a time; the shard's queue
  ``lookups`` limits and orders the queries. Its answers are bounded.
"""

from __future__ import annotations

import asyncio
import heapq
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tickwheel.api.daemon import ConsumersPage, HistoryPage, LoadSpans, Nothing, OfTask
from tickwheel.api.groups import OfGroup, OfTopic
from tickwheel.api.kinds import Whole
from tickwheel.api.schedules import NamesPage
from tickwheel.api.times import moment
from tickwheel.engine.tasks import failing_key
from tickwheel.errors import BadRequest, LimitExceeded, NotFound, Overloaded
from tickwheel.history import read
from tickwheel.history.daemon import dismiss, kill, start_process
from tickwheel.history.read import S_MAX
from tickwheel.model.lateness import LATE_MS
from tickwheel.model.policies import duration_ms
from tickwheel.model.records import id_time_ms
from tickwheel.server.shard.groups import find_group, in_steps
from tickwheel.server.shard.views import Page, StatsAnswer, age_ms, topic_map

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from tickwheel.clock import Now
    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Group, Subscriber, Topic
    from tickwheel.history.read import Answer, Query
    from tickwheel.server.shard.background import Lags
    from tickwheel.server.shard.callers import Call, Caller, TopicFilter
    from tickwheel.server.shard.parts import Parts, SlowRequests
    from tickwheel.server.shard.views import ValueBytes

FRESH_MS: Final = 450
LOAD_STEP_MS_DEFAULT: Final = 60_000
LOAD_STEPS_DEFAULT: Final = 60
CALLERS_PER_STEP: Final = 512
CELLS_MAX: Final = 3_600
"""Maximum cells of the displayed ring. If there are more slots, a cell represents several."""
TROUBLES_MAX: Final = 20
WAITS_LONG_MS: Final = 60_000
"""Age in ms from which a ready task is reported as waiting."""
STUCK_FAILURES: Final = 3
"""Number of failures of its first task from which an order key counts as stuck."""
BACKUP_OLD_MS: Final = 26 * 3_600_000
"""Maximum age in ms of the newest daily backup."""
DISK_MARGIN: Final = 0.05
"""Disk usage is reported from this distance below ``disk_refuse`` on."""
REASON_LENGTH: Final = 80
"""Number of characters of the last failure's reason that are shown."""
REPORT_BYTES_MAX: Final = 64 * 1024 * 1024
_LEVELS = ("error", "warning", "note")


@dataclass(slots=True)
class _Sums:
    """Sums over all topics and groups."""

    ready: int = 0
    waiting: int = 0
    groups: int = 0
    oldest_ready_ms: int = 0


@dataclass(eq=False)
class Watching:
    """Operations that read for the console and change nothing."""

    _parts: Parts
    _lags: Lags
    _stories: Stories
    _listings: SlowRequests
    _lookups: SlowRequests
    """The queue of queries to the history."""
    _value_bytes: ValueBytes

    def __post_init__(self) -> None:
        self._last_overview: dict[str, Any] | None = None
        self._overview_mono_ms = 0

    # --- the daemon itself -----------------------------------------------------------------------

    def ping(self, call: Call[Nothing]) -> None:
        """Answer without waiting for the store."""
        call.answer(None)

    def status(self, call: Call[Nothing]) -> None:
        """Answer with the daemon's status, without waiting for the store."""
        call.answer(self._parts.status())

    # --- the overview ----------------------------------------------------------------------------

    def overview(self, call: Call[Nothing]) -> None:
        """Answer with the wheel, counts and troubles. Raise Overloaded."""
        self._listings.answer(call, self._overview)

    async def _overview(self) -> dict[str, Any]:
        now = self._parts.clock.read()
        if self._last_overview is None or not 0 <= now.mono_ms - self._overview_mono_ms < FRESH_MS:
            self._overview_mono_ms = now.mono_ms
            self._last_overview = await self._compute_overview(now)
        return self._last_overview

    async def _compute_overview(self, now: Now) -> dict[str, Any]:
        parts = self._parts
        core, status = parts.core, parts.status()
        sums, troubles = await self._walk(now)
        troubles += list(_daemon_troubles(parts, status))
        troubles += list(_peer_troubles(parts, status))
        troubles += list(_target_troubles(parts))
        lateness = parts.observed.lateness.summary() | self._lags.recent_lateness()
        if lateness["recent_p99_ms"] > LATE_MS:
            late = _duration(_at_least_ms(lateness["recent_p99_ms"]))
            text = f"Deliveries are late: in the last minute 1 in 100 was at least {late} late"
            troubles.append(_trouble("warning", text, "topics"))
        troubles.sort(key=lambda trouble: _LEVELS.index(trouble["level"]))
        totals = core.totals
        return {
            "node": parts.settings.node,
            "version": status.get("version", ""),
            "epoch": parts.epoch,
            "state": status.get("state", "ready"),
            "detail": status.get("detail"),
            "now_ms": now.now_ms,
            "uptime_s": (now.mono_ms - parts.started_mono_ms) / 1000,
            "ring": self._ring(now),
            "counts": {
                "scheduled": core.scheduled,
                "ready": sums.ready,
                "in_flight": core.in_flight,
                "waiting": sums.waiting,
                "dead": core.dead,
                "oldest_ready_ms": sums.oldest_ready_ms,
                "topics": len(core.topics),
                "groups": sums.groups,
                "subscribers": core.subscribers,
                "connections": len(parts.callers),
                "schedules": len(core.schedule_heap.by_name),
                "transactions": core.transaction_registry.undecided,
                "bulk": core.bulk_running,
            },
            "totals": {
                name: getattr(totals, name)
                for name in (
                    "enqueued", "delivered", "acked", "nacked", "retried", "expired", "cancelled",
                    "dead", "leases_over", "early",
                )
            },
            "lateness": lateness,
            "troubles": troubles[:TROUBLES_MAX],
            "troubles_left_out": max(0, len(troubles) - TROUBLES_MAX),
        }  # fmt: skip

    async def _walk(self, now: Now) -> tuple[_Sums, list[dict[str, Any]]]:
        """Return the sums and the worst troubles of all groups; visit a few topics per step."""
        sums, waits = _Sums(), list[tuple[int, str, str, dict[str, Any]]]()
        core, idle = self._parts.core, list[dict[str, Any]]()
        async for topic in in_steps(list(core.topics.values())):
            sums.groups += len(topic.groups)
            idle += _idle_pauses(topic)
            for group in topic.holders:
                sums.ready += group.ready_count
                sums.waiting += len(group.waiting)
                if group.held:
                    waits.append(
                        (0, topic.name, group.name, _held_trouble(topic, group, group.held))
                    )
                stuck = _stuck_trouble(core, topic, group)
                if stuck is not None:
                    waits.append((0, topic.name, group.name, stuck))
                if not group.ready_count:
                    continue
                oldest_ms = age_ms(group, now)
                sums.oldest_ready_ms = max(sums.oldest_ready_ms, oldest_ms)
                if group.paused_keys and group.awaiting_turn:
                    waits.append((0, topic.name, group.name, _paused_keys_trouble(topic, group)))
                is_known = stuck is not None or group.held or group.paused_keys
                if is_known and group.ready_count == group.awaiting_turn:
                    continue  # the trouble that was just added explains the wait
                trouble = _group_trouble(topic, group, oldest_ms)
                if trouble is not None:
                    # Below, the longest waits are kept and the others are counted.
                    waits.append((oldest_ms, topic.name, group.name, trouble))
        longest = heapq.nlargest(TROUBLES_MAX, waits, key=lambda wait: wait[:3])
        troubles = [wait[3] for wait in longest]
        if len(waits) > len(troubles):
            groups = _counted(len(waits) - len(troubles), "more group has", "more groups have")
            text = f"{groups} waiting tasks"
            troubles.append(_trouble("warning", text, "groups"))
        if len(idle) > 1:
            text = f"{len(idle):,} topics and groups are paused, with no ready tasks"
            idle = [_trouble("note", text, "groups")]
        return sums, troubles + idle

    def _ring(self, now: Now) -> dict[str, Any]:
        wheel = self._parts.core.wheel
        slots, tick_ms = wheel.slots, wheel.tick_ms
        per_cell = -(-slots // CELLS_MAX)
        first = now.now_ms // tick_ms
        current, following = ([0] * -(-slots // per_cell) for _ in range(2))
        counts, exact = wheel.counts_between(first, first + 2 * slots)
        for tick, count in counts.items():
            cells = current if tick < first + slots else following
            cells[tick % slots // per_cell] += count
        return {
            "slots": slots,
            "tick_ms": tick_ms,
            "slots_per_cell": per_cell,
            "slot": first % slots,
            "this": current,
            "next": following,
            "exact": exact,
            "later": max(0, len(wheel) - sum(counts.values())),
        }

    # --- counts ----------------------------------------------------------------------------------

    def stats(self, call: Call[Nothing]) -> None:
        """Answer with the daemon's counts. Raise Overloaded."""
        self._listings.answer(call, partial(self._stats, call.topic_filter))

    async def _stats(self, topic_filter: TopicFilter | None) -> dict[str, Any]:
        parts = self._parts
        now, is_partial = parts.clock.read(), topic_filter is not None
        stats = StatsAnswer(parts, now, self._value_bytes, is_partial=is_partial)
        async for topic in in_steps(list(parts.core.topics.values())):
            if topic_filter is None or topic_filter(topic.name):
                stats.take(topic)
        return stats.answer()

    def _when_loaded(self, call: Call[Any], compute: Callable[[], dict[str, Any]]) -> None:
        """Answer with the result of ``compute`` as soon as every task is in memory."""
        if self._parts.loaded.is_set():
            self._parts.committer.answer(call, compute())
            return

        async def later() -> dict[str, Any]:
            return compute()

        self._listings.answer(call, later)

    def list_topics(self, call: Call[NamesPage]) -> None:
        """Answer with a page of topics and their counts, sorted by name. Raise Overloaded. ``next``
        is the ``after`` of the next page."""
        after, limit = call.request.after or "", call.request.limit
        self._listings.answer(call, partial(self._topics, after, limit, call.topic_filter))

    async def _topics(
        self, after: str, limit: int, topic_filter: TopicFilter | None
    ) -> dict[str, Any]:
        parts = self._parts
        core, now = parts.core, parts.clock.read()
        seen = core.topics if topic_filter is None else filter(topic_filter, core.topics)
        names = heapq.nsmallest(limit + 1, (name for name in seen if name > after))
        page, is_all = Page(parts, limit, self._value_bytes), True
        async for topic in in_steps([core.topics[name] for name in names]):
            is_all = page.take({"topic": topic.name} | topic_map(core, topic, now))
            if not is_all:
                break
        return {"topics": page.items, "next": None if is_all else page.items[-1]["topic"]}

    def show_topic(self, call: Call[OfTopic]) -> None:
        """Answer with a topic's counts, settings and groups, or with NotFound. Raise Overloaded."""
        self._listings.answer(call, partial(self._topic, call.request.topic))

    async def _topic(self, name: str) -> dict[str, Any]:
        core = self._parts.core
        topic = core.topics.get(name)
        if topic is None:
            raise NotFound(f"there is no topic {name}")
        return {"topic": name} | topic_map(core, topic, self._parts.clock.read())

    def load(self, call: Call[LoadSpans]) -> None:
        """Answer with the number of tasks on the wheel in each of ``steps`` spans of ``step_ms``.
        The first span contains ``from_ms``. Raise BadRequest, Overloaded."""
        tick_ms, delay_max_ms = self._parts.settings.tick_ms, self._parts.limits.delay_ms_max
        request, now_ms = call.request, call.now.now_ms
        steps = LOAD_STEPS_DEFAULT if request.steps is None else request.steps
        default_ms = max(tick_ms, LOAD_STEP_MS_DEFAULT // tick_ms * tick_ms)
        step_ms = default_ms if request.step_ms is None else request.step_ms
        Whole(tick_ms, delay_max_ms // steps).check(step_ms, "step_ms", self._parts.limits)
        if step_ms % tick_ms:
            raise BadRequest(f"step_ms must be a multiple of {tick_ms} (tick_ms), not {step_ms}")
        at_ms = now_ms if request.from_ms is None else request.from_ms
        Whole(0, now_ms + delay_max_ms).check(at_ms, "from_ms", self._parts.limits)
        first_ms = at_ms // step_ms * step_ms

        def answer() -> dict[str, Any]:
            wheel = self._parts.core.wheel
            counts, exact = wheel.load(first_ms, step_ms, steps)
            return {
                "from_ms": first_ms, "step_ms": step_ms, "counts": counts, "exact": exact,
                "scheduled": len(wheel),
            }  # fmt: skip

        self._when_loaded(call, answer)

    # --- the lag of a group ----------------------------------------------------------------------

    def group_lag(self, call: Call[OfGroup]) -> None:
        """Answer with samples, from the last hour, of the number of ready tasks and the age of the
        oldest. Raise NotFound."""
        group = find_group(self._parts.core, call.request.topic, call.request.group)
        self._parts.committer.answer(call, self._lags.of(group))

    # --- consumers -------------------------------------------------------------------------------

    def consumers(self, call: Call[ConsumersPage]) -> None:
        """Answer with a page of subscriptions and waiting pulls, in order of connection. Raise
        Overloaded. A page includes all consumers of its last connection."""
        request = call.request
        matches = partial(_matches, request.topic, request.group, call.topic_filter)
        self._listings.answer(call, partial(self._consumers, matches, request.after, request.limit))

    async def _consumers(
        self, matches: Callable[[Group], bool], after: int, limit: int
    ) -> dict[str, Any]:
        callers: list[Caller] = []
        for step, caller in enumerate(list(self._parts.callers)):
            if step % CALLERS_PER_STEP == CALLERS_PER_STEP - 1:
                await asyncio.sleep(0)
            if caller.number > after and any(matches(sub.group) for sub in _subscribers(caller)):
                callers.append(caller)
        rows: list[dict[str, Any]] = []
        last: int | None = None
        for caller in heapq.nsmallest(limit, callers, key=lambda caller: caller.number):
            if len(rows) >= limit:
                break
            rows += [_consumer(caller, sub) for sub in _subscribers(caller) if matches(sub.group)]
            last = caller.number
        is_all = last is None or last == max(caller.number for caller in callers)
        return {"consumers": rows, "next": None if is_all else last}

    # --- the history of a task -------------------------------------------------------------------

    def task_history(self, call: Call[OfTask]) -> None:
        """Answer with the events of a task in order. Raise Overloaded."""
        # The newest events may not have been written yet. The answer does not wait for them.
        look_up = partial(self._stories.of, call.request.id)
        self._lookups.answer(
            call, partial(self._from_history, "events", look_up, call.topic_filter)
        )

    async def _from_history(
        self, name: str, look_up: Callable[[], Awaitable[Answer]], topic_filter: TopicFilter | None
    ) -> dict[str, Any]:
        """Return an answer that contains the visible results of a look-up in the history as
        ``name``."""
        if not self._stories.is_kept:
            return {name: [], "is_kept": False, "complete": True}
        results, is_complete = await look_up()
        visible = [
            item
            for item in results
            if topic_filter is None or topic_filter(str(item.get("topic", "")))
        ]
        return {name: visible, "is_kept": True, "complete": is_complete}

    def history_tasks(self, call: Call[HistoryPage]) -> None:
        """Answer with past tasks and their outcomes, newest first. Raise Overloaded."""
        request = call.request
        query = read.Query(
            key=request.key,
            topic=request.topic,
            since_ms=request.since_ms,
            until_ms=request.until_ms,
        )
        look_up = partial(self._stories.tasks, query, request.limit)
        self._lookups.answer(call, partial(self._outlines, look_up, call.topic_filter))

    async def _outlines(
        self, look_up: Callable[[], Awaitable[Answer]], topic_filter: TopicFilter | None
    ) -> dict[str, Any]:
        """Return ``_from_history`` for tasks, with ids and bodies of the same types as in other
        answers."""
        answer = await self._from_history("tasks", look_up, topic_filter)
        for task in answer["tasks"]:
            task["id"] = int(task["id"])
            if "body_base64" in task:
                task["body"] = b64decode(task.pop("body_base64"))
            elif "body" in task:
                task["body"] = task["body"].encode()
        return answer

    # --- the last report -------------------------------------------------------------------------

    def report(self, call: Call[Nothing]) -> None:
        """Answer with the page of the last report, or with NotFound. Raise Overloaded."""
        self._listings.answer(call, self._report)

    async def _report(self) -> dict[str, Any]:
        folder = self._parts.settings.report_dir
        if folder is None:
            raise NotFound("there is no report: report_dir is not set")
        return {"page": await asyncio.to_thread(report_page, Path(folder) / "report.html")}


def _subscribers(caller: Caller) -> list[Subscriber]:
    """Return the caller's subscriptions and waiting pulls."""
    return [*caller.subscribers.values(), *caller.pulls]


def _matches(
    topic_name: str | None, group_name: str | None, topic_filter: TopicFilter | None, group: Group
) -> bool:
    name = group.topic.name
    return (
        (topic_name is None or name == topic_name)
        and (group_name is None or group.name == group_name)
        and (topic_filter is None or topic_filter(name))
    )


def _consumer(caller: Caller, subscriber: Subscriber) -> dict[str, Any]:
    process = caller.process
    return {
        "topic": subscriber.group.topic.name,
        "group": subscriber.group.name or None,
        "kind": "pull" if subscriber.once else "subscription",
        "in_flight": subscriber.outstanding - subscriber.unconfirmed,
        "prefetch": subscriber.prefetch,
        "since_ms": caller.since_ms,
        "client": caller.name,
        "address": caller.address,
        "host": process.host or None,
        "pid": process.pid,
        "version": process.version or None,
        "token": caller.principal.name or None,
    }


def report_page(path: Path) -> bytes:
    """Return the page of the last report. Raise NotFound, LimitExceeded."""
    try:
        with path.open("rb") as file:
            data = file.read(REPORT_BYTES_MAX + 1)
    except OSError as error:
        raise NotFound(f"there is no report: {path.name}: {error.strerror}") from None
    if len(data) > REPORT_BYTES_MAX:
        raise LimitExceeded(f"{path.name} exceeds the limit of {REPORT_BYTES_MAX} bytes")
    return data


# --- troubles ------------------------------------------------------------------------------------


def _trouble(
    level: str, text: str, about: str, topic: str | None = None, group: str | None = None
) -> dict[str, Any]:
    return {"level": level, "text": text, "about": about, "topic": topic, "group": group}


def _since(paused: Topic | Group) -> str:
    """Return the time of the pause as text, or an empty string if it is unknown."""
    at_ms = paused.settings.paused_ms
    if at_ms is None:
        return ""
    return f" since {moment(at_ms):%Y-%m-%d %H:%M} UTC"


def _idle_pauses(topic: Topic) -> Iterator[dict[str, Any]]:
    """Yield notes about pauses without ready tasks, which an operator may have forgotten."""
    if topic.settings.paused:
        if not any(group.ready_count for group in topic.holders):
            text = f"Topic {topic.name} is paused{_since(topic)}, with no ready tasks"
            yield _trouble("note", text, "topics", topic.name)
        return
    for group in topic.groups.values():
        if group.settings.paused and not group.ready_count:
            since = _since(group)
            text = f"Group {group.name} of {topic.name} is paused{since}, with no ready tasks"
            yield _trouble("note", text, "groups", topic.name, group.name)


def _group_trouble(topic: Topic, group: Group, oldest_ms: int) -> dict[str, Any] | None:
    """Return a trouble if ready tasks have waited long or wait for an operator, otherwise None."""
    many = _counted(group.ready_count, "ready task", "ready tasks")
    name, label = group.name or None, f"Group {group.name} of {topic.name}"
    if not group.name:
        if topic.broadcasters or oldest_ms < WAITS_LONG_MS:
            return None
        wait = "waits" if group.ready_count == 1 else "wait"
        text = f"Topic {topic.name} has no group yet: {many} {wait} for the first subscriber"
        return _trouble("warning", text, "topics", topic.name)
    if group.is_held:
        if group.settings.paused:
            where = f"is paused{_since(group)}"
        else:
            where = f"waits: its topic is paused{_since(topic)}"
        return _trouble("warning", f"{label} {where}, with {many}", "groups", topic.name, name)
    if oldest_ms < WAITS_LONG_MS:
        return None
    waited = _duration(oldest_ms)
    if not group.subscribers:
        name_in_text = label[0].lower() + label[1:]
        text = f"Nobody subscribes to {name_in_text}: {many}, the oldest for {waited}"
    else:
        text = f"{label} does not keep up: {many}, the oldest for {waited}"
    return _trouble("warning", text, "groups", topic.name, name)


def _held_trouble(topic: Topic, group: Group, count: int) -> dict[str, Any]:
    keys = _counted(count, "order key is", "order keys are")
    text = f"{keys} held in group {group.name} of {topic.name}: release or skip the failed tasks"
    return _trouble("warning", text, "groups", topic.name, group.name)


def _paused_keys_trouble(topic: Topic, group: Group) -> dict[str, Any]:
    keys = _counted(len(group.paused_keys), "key is", "keys are")
    tasks = _counted(group.awaiting_turn, "task waits for its turn", "tasks wait for their turn")
    text = f"{keys} paused in group {group.name} of {topic.name}; {tasks}"
    return _trouble("warning", text, "groups", topic.name, group.name)


def _stuck_trouble(core: Core, topic: Topic, group: Group) -> dict[str, Any] | None:
    """Return a trouble if the first task of an order key fails repeatedly, otherwise None."""
    failing = failing_key(core, group, STUCK_FAILURES)
    if failing is None:
        return None
    tasks = "1 task waits" if failing.waiting == 1 else f"{failing.waiting:,} tasks wait"
    text = (
        f"Group {group.name} of {topic.name} is stuck on one order key: {tasks} behind task"
        f" {failing.task_id}, which has failed {failing.failures} times"
    )
    if failing.reason:
        text += f" ({failing.reason[:REASON_LENGTH]})"
    return _trouble("warning", text, "groups", topic.name, group.name)


def _target_troubles(parts: Parts) -> Iterator[dict[str, Any]]:
    """Yield a trouble for each group whose target has ended or fails."""
    sender = parts.outbound
    for (topic, group), row in parts.core.targets.items():
        label = f"Group {group} of {topic}"
        if row.ended_ms is not None:
            text = f"{label} receives no more tasks: {row.reason}; set its push again or remove it"
            yield _trouble("error", text, "targets", topic, group)
            continue
        state = {} if sender is None else sender.state(topic, group)
        why = f": {state['last_error']:.{REASON_LENGTH}}" if state.get("last_error") else ""
        if state.get("state") == "open":
            text = f"{label} is waiting for a failing host{why}"
            yield _trouble("warning", text, "targets", topic, group)
        elif state.get("state") == "failing":
            yield _trouble(
                "warning", f"{label}: the last attempt failed{why}", "targets", topic, group
            )


def _daemon_troubles(parts: Parts, status: dict[str, Any]) -> Iterator[dict[str, Any]]:
    core, observed = parts.core, parts.observed
    state, detail = status.get("state", "ready"), status.get("detail")
    if state not in ("ready", "loading"):
        why = f": {detail}" if detail else ""
        yield _trouble("error", f"The daemon is not ready ({state}){why}", "daemon")
    for name in list(core.full_topics)[:TROUBLES_MAX]:
        text = f"Topic {name} is full: it has no group, and its backlog is at its limit"
        yield _trouble("error", text, "topics", name)
    if not observed.tokens_file_ok:
        text = "The tokens file cannot be read; the previous tokens stay valid"
        yield _trouble("warning", text, "daemon")
    dropped = 0 if parts.history is None else parts.history.dropped
    since_start = (
        (dropped, "event is", "events are", "missing in the history since the start"),
        (
            observed.backup_failures,
            "daily backup has",
            "daily backups have",
            "failed since the start; see the log",
        ),
        (
            observed.internal_errors,
            "unexpected error",
            "unexpected errors",
            "since the start; see the log",
        ),
    )
    for count, singular, plural, predicate in since_start:
        if count:
            text = f"{_counted(count, singular, plural)} {predicate}"
            yield _trouble("warning", text, "daemon")
    yield from _decision_troubles(core)
    yield from _backup_troubles(parts)
    refuse = parts.settings.disk_refuse
    if observed.disk_used > refuse - DISK_MARGIN:
        text = (
            f"The disk with the database is {observed.disk_used:.0%} full; above"
            f" {refuse:.0%} (disk_refuse) new tasks are refused"
        )
        yield _trouble("warning", text, "daemon")
    if observed.groups_unused:
        groups = _counted(observed.groups_unused, "group has", "groups have")
        unused = _duration(duration_ms(parts.settings.group_unused_report_s))
        text = f"{groups} had no subscriber for {unused} or longer"
        yield _trouble("note", text, "groups")


def _peer_troubles(parts: Parts, status: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield troubles about expected standbys and nodes that are absent."""
    expected, seen = parts.settings.expect_standbys, len(status.get("standbys", ()))
    if seen < expected:
        text = (
            f"{seen} of {_counted(expected, 'expected standby is', 'expected standbys are')} seen"
        )
        yield _trouble("warning", text, "daemon")
    expected, directory = parts.settings.expect_nodes, parts.directory
    if directory is not None and directory.shard:
        return  # shard 0 reports this for all shards
    seen = 0 if directory is None else len(directory.listing()["nodes"])
    if seen < expected:
        text = f"{seen} of {_counted(expected, 'expected node is', 'expected nodes are')} seen"
        yield _trouble("warning", text, "daemon")


def _backup_troubles(parts: Parts) -> Iterator[dict[str, Any]]:
    """Yield a trouble if daily backups are configured but the newest is old or absent."""
    if parts.settings.backup_daily_hour is None:
        return
    now, made_s = parts.clock.read(), parts.observed.backup_s
    if made_s:
        age_ms = now.now_ms - round(made_s * 1000)
        text = f"The newest daily backup is {_duration(age_ms)} old"
    else:
        age_ms = now.mono_ms - parts.started_mono_ms
        text = f"No daily backup has been made since the start {_duration(age_ms)} ago"
    if age_ms > BACKUP_OLD_MS:
        yield _trouble("warning", text, "daemon")


def _decision_troubles(core: Core) -> Iterator[dict[str, Any]]:
    """Yield troubles that stay until an operator decides."""
    if parked := core.transaction_registry.parked:
        many = _counted(parked, "transaction is", "transactions are")
        text = f"{many} parked: no producer knew the decision; commit or roll back by hand"
        yield _trouble("warning", text, "transactions")
    if core.dead:
        many = _counted(core.dead, "dead letter waits", "dead letters wait")
        yield _trouble("note", f"{many} for a decision", "dead")


def _counted(count: int, singular: str, plural: str) -> str:
    """Return a number with its noun: ``1 task``, ``1,234 tasks``."""
    return f"{count:,} {singular if count == 1 else plural}"


def _duration(ms: int) -> str:
    for unit, length_ms in (("days", 86_400_000), ("hours", 3_600_000), ("minutes", 60_000)):
        if ms >= 2 * length_ms:
            return f"{ms // length_ms} {unit}"
    if ms < 10_000:
        return f"{ms:,} ms"
    return f"{ms // 1000} seconds"


def _at_least_ms(bound_ms: int) -> int:
    """Return the minimum lateness in ms of deliveries in the bucket that ends at ``bound_ms``. From
    1,024 ms on, a bucket extends from one power of two to the next."""
    return bound_ms if bound_ms < 1_024 else 1 << (bound_ms.bit_length() - 1)


# --- the process that reads the history ----------------------------------------------------------

PATIENCE_S: Final = 3 * S_MAX
"""Seconds without an answer after which the process is killed, as its disk may hang forever."""
IDLE_S: Final = 60.0
"""How long the process is kept after its last answer, in seconds."""
STOP_S: Final = 1.0
"""Maximum seconds to wait for the end of a killed process, which may wait for a disk."""
TRIES_MAX: Final = 2


class Stories:
    """Looks up tasks in the history while this daemon serves, one query at a time."""

    def __init__(self, folder: str | None) -> None:
        """``folder`` is the folder of the history, or None if no history is kept."""
        self._folder = folder
        self._process: Process | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._exits: set[asyncio.Task[int]] = set()
        self._is_over = False

    @property
    def is_kept(self) -> bool:
        """Whether a history is kept."""
        return self._folder is not None

    async def of(self, task_id: int) -> Answer:
        """Return the events of a task in order. Raise Overloaded if no process answers."""
        return await self._answer(read.story_question(task_id, id_time_ms(task_id)))

    async def tasks(self, query: Query, limit: int) -> Answer:
        """Return outlines of tasks, newest first. Raise Overloaded if no process answers."""
        return await self._answer(read.tasks_question(query, limit))

    async def _answer(self, question: bytes) -> Answer:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        why = ""
        for _ in range(TRIES_MAX):
            try:
                async with asyncio.timeout(PATIENCE_S):
                    answer = await self._ask(question)
            except (OSError, ValueError, TimeoutError) as error:
                why = str(error) or type(error).__name__
                await self._end_and_wait()
            except BaseException:
                await self._end_and_wait()  # its answer would be mistaken for the next question's
                raise
            else:
                self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._end)
                return answer
        raise Overloaded(f"the process that reads the history does not answer: {why}; try again")

    async def _ask(self, question: bytes) -> Answer:
        """Send the process a question and return its answer. Raise OSError, ValueError."""
        if self._process is None:
            assert self._folder is not None
            self._check_tenure()
            command = read.lookup_command(self._folder)
            self._process = await start_process(
                command, answers=True, line_bytes_max=read.ANSWER_BYTES_MAX
            )
            self._check_tenure()
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None and reader is not None
        writer.write(question)
        await writer.drain()
        return read.answer_of(await reader.readline())

    def _check_tenure(self) -> None:
        if self._is_over:
            raise OSError("the daemon is stopping")

    def _end(self) -> None:
        ended, self._process = self._process, None
        if ended is not None:
            dismiss(ended)
            kill(ended)
            ending = asyncio.create_task(ended.wait())
            self._exits.add(ending)
            ending.add_done_callback(self._exits.discard)

    async def stop(self) -> None:
        """End the process permanently, and wait for its exit."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        await self._end_and_wait()

    async def _end_and_wait(self) -> None:
        """End the process and wait up to ``STOP_S`` for its exit, so that the loop can close."""
        self._end()
        if self._exits:
            await asyncio.wait(self._exits, timeout=STOP_S)
