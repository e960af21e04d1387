"""Schedules of a torture run: put before the first kill, paused after the last, judged by the tasks
that came of them.

Each task carries its schedule and its planned time; the schedule itself says in the end which
planned time is the first that nothing was decided of, and how many fired. So every planned time
before that one is known by arithmetic, however often the daemon was killed: the checker needs no
clock.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from crash.link import Link, now_ms
from crash.plan import Plan
from crash.records import Delivered
from crash.rough_consumers import RoughConsumer
from crash.settle import Receipt
from crash.workload import Workload
from support.waiting import rest
from tickwheel.api.frames import FrameType
from tickwheel.model.kinds import NAME_PROPERTY, PLANNED_PROPERTY

TOPIC, GROUP = "recurring", "default"
AGAIN_S = 0.5
FIRES_WITHIN_S = 60.0
_ALL = {"catch_up": "all", "catch_up_ms": 86_400_000}


@dataclass(frozen=True, slots=True)
class Asked:
    """A schedule of the run. Its planned times are multiples of ``every_ms``: those of cron with
    seconds too, because no zone is off by less than a minute."""

    name: str
    every_ms: int
    options: dict[str, Any]

    @property
    def is_complete(self) -> bool:
        """No occurrence may be left out."""
        return self.options.get("catch_up") == "all" and "overlap" not in self.options


def _every(name: str, every_ms: int, **options: Any) -> Asked:
    return Asked(name, every_ms, {"every_ms": every_ms, "anchor_ms": 0, **options})


def _cron(name: str, every_ms: int, cron: str, timezone: str, **options: Any) -> Asked:
    return Asked(name, every_ms, {"cron": cron, "timezone": timezone, **options})


ASKED = (
    _every("every-all", 300, **_ALL),
    _every("jittered", 400, jitter_ms=500, **_ALL),
    _every("windowed", 350, task={"within_ms": 900}, **_ALL),
    _every("few", 500, runs_max=12, **_ALL),
    _cron("seconds", 1_000, "* * * * * *", "Europe/Berlin", **_ALL),
    _cron("fixed", 2_000, "0-58/2 0-59 0-23 * * *", "America/New_York", fold="both", **_ALL),
    _every("every-last", 300),
    _every("every-skip", 700, catch_up="skip"),
    _every("overlap-skip", 200, overlap="skip"),
    _every("overlap-queue", 200, overlap="queue_one", **_ALL),
    _every("overlap-cancel", 300, overlap="cancel_previous"),
)


@dataclass(frozen=True, slots=True)
class Occurred:
    """A delivery of an occurrence's task."""

    name: str
    planned_ms: int
    id: int
    due_ms: int
    order: int


@dataclass(slots=True)
class Life:
    """One schedule from its put to its last look."""

    asked: Asked
    first_ms: int
    """Its first planned time, as the put was answered."""
    next_ms: int | None = None
    """First undecided planned time at the end."""
    runs: int = 0
    queued_ms: int | None = None
    fired: dict[int, int] = field(default_factory=dict)
    """Planned time → id, of the newest that fired: what ``show`` has."""


class Recurring(Workload):
    """Schedules, each put again and again."""

    what = "schedules"
    settings: ClassVar = {"schedule_interval_min_s": 0.1}
    topic = TOPIC
    asked: Sequence[Asked] = ASKED

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._rnd = plan.rnd("schedules")
        self.lives: list[Life] = []
        self.consumers = [
            Occurrences(plan, "occurrences", TOPIC, GROUP, shard=shard)
            for shard in range(plan.shards)
        ]

    async def begin(self) -> None:
        await self.caller.get(FrameType.SUBSCRIBE, 1, self.topic, GROUP, 0, {})
        for asked in self.asked:
            answer = await self.caller.get(FrameType.SCHEDULE_PUT, asked.name, self._options(asked))
            self.lives.append(Life(asked, answer["next_ms"]))

    async def run(self) -> None:
        """Puts what is there again and again, which changes nothing; in the end pauses all, so
        that nothing comes due any more."""
        while self.plan.producing:
            asked = self._rnd.choice(self.asked)
            answer = await self.caller.get(FrameType.SCHEDULE_PUT, asked.name, self._options(asked))
            if answer["outcome"] != "unchanged":
                self.odd.append(f"{asked.name} was put again and {answer['outcome']}")
            await rest(AGAIN_S * self._rnd.random())
        for life in self.lives:
            await self._fired(life.asked.name)
            await self.caller.get(FrameType.SCHEDULE, life.asked.name, "pause", {})

    async def _fired(self, name: str) -> None:
        """Returns when it has fired at least once, or has had more than enough time for it."""
        enough_s = time.monotonic() + FIRES_WITHIN_S
        while time.monotonic() < enough_s:
            shown = await self.caller.get(FrameType.SCHEDULE, name, "show", {})
            if shown["runs"]:
                return
            await rest(AGAIN_S)

    def _options(self, asked: Asked) -> dict[str, Any]:
        return {"topic": self.topic, "body": b"again", **asked.options}

    async def look(self) -> None:
        for life in self.lives:
            name = life.asked.name
            shown = await self.caller.get(FrameType.SCHEDULE, name, "show", {})
            life.next_ms, life.runs = shown["next_ms"], shown["runs"]
            life.queued_ms = shown["queued_ms"]
            fired = [run for run in shown["recent"] if run["outcome"] == "fired"]
            life.fired = {run["planned_ms"]: run["id"] for run in fired}

    def text(self) -> str:
        tasks = len({task.id for task in self._occurred})
        runs = sum(life.runs for life in self.lives)
        return f"schedules {len(self.lives)}, runs {runs}, tasks of them {tasks}"

    def judge(self) -> list[str]:
        requeued = {again.id for journal in self.plan.journals for again in journal.requeued}
        return judge(self.lives, self._occurred, requeued)

    @property
    def _occurred(self) -> list[Occurred]:
        """A schedule is in one shard, and so is its consumer."""
        return [item for consumer in self.consumers for item in consumer.occurred]


class Occurrences(RoughConsumer):
    """With all the manners of a rough consumer: many tasks are unfinished for long."""

    def __init__(self, plan: Plan, name: str, topic: str, group: str, *, shard: int = 0) -> None:
        super().__init__(plan, name, topic, group, shard=shard)
        self.occurred: list[Occurred] = []

    def _note(
        self, link: Link, epoch: int, delivered_ms: int, items: tuple[tuple[Any, ...], ...]
    ) -> None:
        for task_id, attempt, due_ms, _, options in items:
            name, planned_ms = (options["properties"][k] for k in (NAME_PROPERTY, PLANNED_PROPERTY))
            self._inbox.append(Receipt(TOPIC, GROUP, task_id, epoch, attempt))
            delivered = Delivered(
                task_id, GROUP, f"{name}/{planned_ms}", epoch, attempt, due_ms, delivered_ms,
                now_ms(), link.name, Link.order(), link.opened_ms,
            )  # fmt: skip
            self._journal.delivered.append(delivered)
            self.occurred.append(Occurred(name, planned_ms, task_id, due_ms, delivered.order))


# --- the judge -----------------------------------------------------------------------------------


def judge(
    lives: Sequence[Life], occurred: Sequence[Occurred], requeued: Collection[int] = ()
) -> list[str]:
    """Which occurrences were missed, doubled or out of their time, and which runs were lost."""
    by_name: dict[str, list[Occurred]] = defaultdict(list)
    for item in occurred:
        by_name[item.name].append(item)
    wrong: list[str] = []
    for life in lives:
        wrong += _judge_one(life, by_name.pop(life.asked.name, []), requeued)
    return [*wrong, *(f"schedule {name} was never put" for name in by_name)]


def _judge_one(life: Life, came: list[Occurred], requeued: Collection[int]) -> list[str]:
    asked, name = life.asked, life.asked.name
    ids: dict[int, set[int]] = defaultdict(set)
    for item in came:
        ids[item.planned_ms].add(item.id)
    wrong = [
        f"doubled: {name} at {planned_ms} is several tasks: {sorted(found)}"
        for planned_ms, found in sorted(ids.items())
        if len(found) > 1
    ]
    wrong += [
        f"early: {name} at {task.planned_ms} was due at {task.due_ms}"
        for task in came
        if task.due_ms < task.planned_ms
    ]
    decided = _decided(life, ids)
    wrong += [f"unplanned: {name} at {ms}" for ms in sorted(ids.keys() - set(decided))]
    if asked.is_complete:
        wrong += [f"missed: {name} at {ms}" for ms in sorted(set(decided) - ids.keys())]
    replaces = asked.options.get("overlap") == "cancel_previous"
    if life.runs < len(ids) or (life.runs > len(ids) and not replaces):
        wrong.append(f"lost: {name} fired {life.runs} times and {len(ids)} came")
    wrong += [
        f"doubled: {name} at {ms} was noted as task {task_id} and came as {sorted(ids[ms])}"
        for ms, task_id in life.fired.items()
        if ids.get(ms, {task_id}) != {task_id}
    ]
    if asked.options.get("overlap") in ("skip", "queue_one"):
        wrong += _overlapping(name, came, requeued)
    if not life.runs:
        wrong.append(f"{name} fired {life.runs} times: the run shows nothing")
    return wrong


def _decided(life: Life, ids: Collection[int]) -> range:
    """Return the planned times with a decision."""
    asked = life.asked
    if life.next_ms is not None:
        return range(life.first_ms, life.next_ms, asked.every_ms)
    runs_max = asked.options["runs_max"]
    return range(life.first_ms, life.first_ms + runs_max * asked.every_ms, asked.every_ms)


def _overlapping(name: str, came: list[Occurred], requeued: Collection[int]) -> list[str]:
    """One that comes after a later occurrence came was unfinished when that one fired. There is
    one consumer, on one connection after the other, so what it got is in its order. A dead letter
    blocks nobody, and may be brought back."""
    wrong = []
    newest_ms = 0
    for one in sorted(came, key=lambda one: one.order):
        if one.planned_ms < newest_ms and one.id not in requeued:
            wrong.append(f"overlap: {name} at {one.planned_ms} came after that at {newest_ms}")
        newest_ms = max(newest_ms, one.planned_ms)
    return wrong
