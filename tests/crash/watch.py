"""Nemesis *watch*: nothing at all is done to the daemon, and it is watched for a long life.

A restart heals whatever only memory has forgotten, so short lives do not show it. While clients
work as in every run, two things must hold at every moment:

* What was due 5 s ago, in a group with a subscriber that was free all that time, was delivered.
* At a quiet moment STATS says of every topic and group what a walk over all tasks by LIST finds,
  LOOKUP says the same of each task, and DEAD_LIST has each dead letter.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from crash.fair_clients import FairConsumer
from crash.link import now_ms
from crash.plan import BRIEF, GROUPS, ONCE, Plan
from crash.records import Journal
from crash.workload import Caller
from support.waiting import rest
from tickwheel.api.frames import FrameType

LATE_MS_MAX = 5_000
LOOK_S = 0.1
UNWATCHED_MS_MAX = 1_000
"""After a longer pause between two looks nobody knows whether a subscriber was free meanwhile: what
it was sent has not been read either."""
WALK_EVERY_S = 12.0
QUIET_S_MAX = 20.0
"""Within it everything that was begun is over; else the walk is tried again later."""
EXTRA_WALKS = 4
"""On a machine that is busy with something else the first may find no quiet moment."""
PAGE = 1_000
LOOKED_UP = 500
FAR_MS = 3_600_000
STILL = "still"
"""A topic with a task in each state, for ever."""
PAIRS = ("ready", "in_flight", "waiting", "dead")
COUNTED = ("scheduled", *PAIRS)
MOVES = (*COUNTED, "enqueued", "delivered", "acked", "nacked", "retried", "expired", "cancelled")


class Lateness:
    """Find due tasks that were not delivered. ``look`` is called regularly with free credit."""

    def __init__(self, journals: Sequence[Journal], groups: Mapping[str, Sequence[str]]) -> None:
        self._journals = journals
        self._groups = groups
        self._read: dict[int, Counter[str]] = {}
        self._come: set[tuple[int, str]] = set()
        self._due: dict[int, int] = {}
        """Changed by a reschedule; gone with a cancel."""
        self._waiting: list[tuple[int, int, str]] = []
        """(when to look at it, id, topic)"""
        self._free_since: dict[tuple[str, str], int] = {}
        self._seen_ms = 0
        self.looked = 0
        self.problems: list[str] = []

    def look(self, now: int, free: Mapping[tuple[str, str], bool]) -> None:
        if now - self._seen_ms > UNWATCHED_MS_MAX:
            self._free_since.clear()
        self._seen_ms = now
        for place, is_free in free.items():
            if not is_free:
                self._free_since.pop(place, None)
            else:
                self._free_since.setdefault(place, now)
        for index, journal in enumerate(self._journals):
            self._take(journal, self._read.setdefault(index, Counter()))
        while self._waiting and self._waiting[0][0] <= now:
            _, task_id, topic = heapq.heappop(self._waiting)
            self._judge(task_id, topic, now)

    def _take(self, journal: Journal, read: Counter[str]) -> None:
        for accepted in _fresh(journal, "accepted", read):
            for task_id, due_ms in zip(accepted.ids, accepted.dues_ms, strict=False):
                self._due[task_id] = due_ms
                heapq.heappush(self._waiting, (due_ms + LATE_MS_MAX, task_id, accepted.topic))
        for delivery in _fresh(journal, "delivered", read):
            self._come.add((delivery.id, delivery.group))
        for move in _fresh(journal, "moved", read):
            self._due[move.id] = max(self._due.get(move.id, 0), move.due_ms)
        for end in _fresh(journal, "finished", read):
            if end.group is None:
                self._due.pop(end.id, None)

    def _judge(self, task_id: int, topic: str, now: int) -> None:
        due_ms = self._due.get(task_id)
        if due_ms is None or topic == BRIEF:
            return
        again_ms = due_ms + LATE_MS_MAX
        for group in self._groups.get(topic, ()):
            if (task_id, group) in self._come or now < again_ms:
                continue
            since_ms = self._free_since.get((topic, group), now)
            if max(since_ms, due_ms) + LATE_MS_MAX <= now:
                self.problems.append(
                    f"late: id {task_id} of {topic} was due {now - due_ms} ms ago, {group} has a"
                    f" free subscriber for {now - since_ms} ms, and it did not come"
                )
            else:
                again_ms = max(again_ms, since_ms + LATE_MS_MAX)
        self.looked += 1
        if again_ms > now:
            heapq.heappush(self._waiting, (again_ms, task_id, topic))


def _fresh(journal: Journal, name: str, read: Counter[str]) -> Iterator[Any]:
    records = getattr(journal, name)
    fresh = records[read[name] :]
    read[name] = len(records)
    return iter(fresh)


class Watch:
    """``run`` watches for ``for_s`` seconds and walks over everything now and then."""

    def __init__(self, plan: Plan, consumers: Sequence[FairConsumer], for_s: float) -> None:
        self._plan = plan
        self._consumers = consumers
        self._for_s = for_s
        self._caller = Caller(plan)
        self._lateness = Lateness(plan.journals, {t: g for t, g in GROUPS.items() if t != ONCE})
        self._own: list[str] = []
        self._still: list[int] = []
        self._lent: list[Any] = []
        """[epoch, id, attempt] of the still task in flight."""
        self.walks = 0
        self.given_up = 0
        self.seen = 0
        """Tasks that walks have found."""

    @property
    def problems(self) -> list[str]:
        return [*self._own, *self._lateness.problems]

    @property
    def missed(self) -> list[str]:
        result = [] if self.walks else ["watch: no quiet moment was found for a walk"]
        return result if self._lateness.looked else [*result, "watch: nothing was ever judged"]

    def text(self) -> str:
        return (
            f"watched for {self._for_s:.0f} s, {self._lateness.looked} tasks looked at 5 s after"
            f" their due time, {self.walks} walks over {self.seen} tasks in all"
            f" ({self.given_up} given up)"
        )

    async def run(self) -> None:
        await self._lay_out()
        looking = asyncio.create_task(self._look())
        try:
            loop = asyncio.get_running_loop()
            end_s = loop.time() + self._for_s
            while (left_s := end_s - loop.time()) > 0:
                await rest(min(WALK_EVERY_S, left_s))
                await self._walk_when_quiet()
            for _ in range(EXTRA_WALKS):
                if not self.walks:
                    await self._walk_when_quiet()
        finally:
            looking.cancel()
        await self._clear()
        self._caller.close()

    async def _look(self) -> None:
        while True:
            self._lateness.look(now_ms(), {c.place: c.is_free for c in self._consumers})
            await rest(LOOK_S)

    # --- a task in every state ---------------------------------------------------------------

    async def _lay_out(self) -> None:
        """Scheduled, ready, in flight, waiting and dead, each for longer than the run."""
        ask = self._caller.ask
        await ask(FrameType.GROUP_CREATE, STILL, "default", {})
        dues = [0, 0, 0, 0, FAR_MS, FAR_MS]
        tasks = [[STILL, b"still", due_ms] for due_ms in dues]
        self._still = list((await ask(FrameType.ENQUEUE, 1, tasks))[2][1])
        pulled = (await ask(FrameType.PULL, STILL, "default", 3, 500, {"lease_ms": FAR_MS}))[2]
        receipts = [(item[0], pulled[0], item[1]) for item in pulled[2]]
        if len(receipts) != 3:
            self._own.append(f"PULL gave {pulled} of {tasks}")
            return
        (one, two, three) = receipts
        self._lent = [one]
        nack, reject = [*two, FAR_MS, "later"], [*three, "never"]
        await ask(FrameType.NACK, STILL, "default", [nack])
        await ask(FrameType.REJECT, STILL, "default", [reject])

    async def _clear(self) -> None:
        for task_id, epoch, attempt in self._lent:
            await self._caller.ask(FrameType.ACK, STILL, "default", epoch, [task_id], [attempt])
        letters = [[task_id, "default"] for task_id in self._still]
        await self._caller.ask(FrameType.DEAD_DELETE, letters)
        await self._caller.ask(FrameType.CANCEL, self._still)

    # --- a walk ------------------------------------------------------------------------------

    async def _walk_when_quiet(self) -> None:
        self._plan.quiet = True
        try:
            async with asyncio.timeout(QUIET_S_MAX):
                await self._walk()
        except TimeoutError:
            self.given_up += 1
        finally:
            self._plan.quiet = False

    async def _walk(self) -> None:
        while True:
            if await self._walked():
                return
            await rest(LOOK_S)

    async def _walked(self) -> bool:
        """False when something changed meanwhile."""
        before = await self._stats()
        tasks = await self._all("LIST", "tasks")
        dead = await self._all("DEAD_LIST", "dead")
        looked = (await self._caller.ask(FrameType.LOOKUP, [t["id"] for t in tasks[:LOOKED_UP]]))[2]
        after = await self._stats()
        if any(before[name] != after[name] for name in MOVES):
            return False
        self.walks += 1
        self.seen += len(tasks)
        self._own += differences(before, tasks, dead)
        for listed, found in zip(tasks, looked, strict=False):
            if _still(listed) != _still(found):
                self._own.append(f"walk: LIST says {listed} and LOOKUP {found}")
        return True

    async def _stats(self) -> dict[str, Any]:
        return dict((await self._caller.ask(FrameType.STATS))[2])

    async def _all(self, kind: str, name: str) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        after: Any = None
        while True:
            options = {"limit": PAGE} | ({} if after is None else {"after": after})
            page = (await self._caller.ask(FrameType[kind], options))[2]
            results += page[name]
            if (after := page["next"]) is None:
                return results


def _still(task: dict[str, Any]) -> dict[str, Any]:
    """What does not change by itself: the rotations left do, and the end of a lease, which is
    given by the wall clock and kept by the steady one, may by a millisecond."""
    groups = {
        group: {name: value for name, value in pair.items() if name != "at_ms"}
        for group, pair in task.get("groups", {}).items()
    }
    fixed = {name: value for name, value in task.items() if name not in ("cycles", "slot")}
    return fixed | {"groups": groups}


def differences(
    stats: Mapping[str, Any], tasks: Sequence[Mapping[str, Any]], dead: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Between the daemon's counts and what was found by looking at every task."""
    groups: Counter[tuple[str, str, str]] = Counter()
    topics: Counter[tuple[str, str]] = Counter()
    for task in tasks:
        _add(task, groups, topics)
    wrong = []
    for topic, said in stats["topics"].items():
        places = [(topic, name, said[name], topics[topic, name]) for name in COUNTED]
        for group, held in said["groups"].items():
            where = f"group {group} of {topic}"
            places += [(where, name, held[name], groups[topic, group, name]) for name in PAIRS]
        wrong += [
            f"walk: {where} has {count} {name}, not {counted}"
            for where, name, counted, count in places
            if counted != count
        ]
    for name in COUNTED:
        total = sum(count for (_, state), count in topics.items() if state == name)
        if stats[name] != total:
            wrong.append(f"walk: there are {total} {name}, not {stats[name]}")
    if len(dead) != stats["dead"]:
        wrong.append(f"walk: DEAD_LIST has {len(dead)} letters, not {stats['dead']}")
    return wrong


def _add(
    task: Mapping[str, Any], groups: Counter[tuple[str, str, str]], topics: Counter[tuple[str, str]]
) -> None:
    topic = task["topic"]
    if task["state"] == "scheduled":
        topics[topic, "scheduled"] += 1
    elif not task["groups"]:
        topics[topic, task["state"]] += 1
    for group, pair in task["groups"].items():
        if pair["state"] in PAIRS:
            groups[topic, group, pair["state"]] += 1
            topics[topic, pair["state"]] += 1
