"""Bulk operations against a naive loop over all tasks, with other traffic, bulk operations that are
cancelled, and crashes that lose what was not durable.

The naive side does, when a step of a bulk operation is noted, what the step should have done: it
goes through its own tasks from the place before to the place of the step. It keeps what it knew at
each batch that was sealed, and goes back to what was durable when the daemon is killed.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.in_process import InProcess
from support.shard_rig import NOW_MS, Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.engine.tasks import Step
from tickwheel.model.records import is_key_alone
from tickwheel.persistence.contract import Heads
from tickwheel.persistence.memory import MemoryStore
from tickwheel.server.shard import bulk as bulks

TURNS_MAX = 20_000
COMMIT_TURNS = 12
"""Turns of the event loop that end a bulk operation's wait between two pages."""
CANCEL, LATER, NOW, FIXED = "cancel", "later", "run_now", "fixed"
FIXED_MS = NOW_MS + 500_000
SHIFT_MS = 20_000


@dataclass
class Task:
    due_ms: int
    amount: int | None
    tag: str | None
    key: str | None


SELECTIONS: dict[str, tuple[dict[str, Any], Callable[[Task], bool]]] = {
    "all": ({}, lambda task: True),
    "dear": ({"where": "amount >= 3"}, lambda task: (task.amount or 0) >= 3),
    "tagged": ({"tags": "a || b"}, lambda task: task.tag in ("a", "b")),
    "keyed": ({"key_prefix": "k"}, lambda task: (task.key or "").startswith("k")),
    "soon": ({"due_to_ms": NOW_MS + 40_000}, lambda task: task.due_ms < NOW_MS + 40_000),
    "both": (
        {"tags": "a", "where": "amount < 4 OR key IS NULL", "due_from_ms": NOW_MS + 10_000},
        lambda task: (
            task.tag == "a"
            and (task.key is None or (task.amount is not None and task.amount < 4))
            and task.due_ms >= NOW_MS + 10_000
        ),
    ),
}


@dataclass
class Bulk:
    kind: str
    fits: Callable[[Task], bool]
    until_id: int
    place: int = 0
    counts: tuple[int, int, int] = (0, 0, 0)
    """Looked at, matched, changed."""
    is_cancelled: bool = False


@dataclass
class Naive:
    """What should be there."""

    tasks: dict[int, Task] = field(default_factory=dict)
    bulks: dict[str, Bulk] = field(default_factory=dict)

    def stepped(self, name: str, place: int, now_ms: int) -> tuple[int, int, int]:
        bulk = self.bulks[name]
        some = sorted(i for i in self.tasks if bulk.place < i <= min(place, bulk.until_id))
        matched = [i for i in some if bulk.fits(self.tasks[i])]
        for task_id in matched:
            task = self.tasks[task_id]
            if bulk.kind == CANCEL:
                del self.tasks[task_id]
            elif bulk.kind == LATER:
                task.due_ms = max(now_ms, task.due_ms + SHIFT_MS)
            else:
                task.due_ms = now_ms if bulk.kind == NOW else max(now_ms, FIXED_MS)
        bulk.place = place
        counts = len(some), len(matched), len(matched)
        bulk.counts = tuple(map(sum, zip(bulk.counts, counts, strict=True)))
        return counts


class ColumnStore(MemoryStore):
    """Reads most tasks as columns and moves them without their bodies, as SQLite does."""

    def copy(self) -> MemoryStore:
        other = ColumnStore()
        vars(other).update(vars(super().copy()))
        return other

    async def read_heads(self, ids: Sequence[int], bytes_max: int) -> tuple[Heads, Sequence[int]]:
        found, rest = await self.read_some(ids, bytes_max)
        heads = Heads()
        for task_id, task in found.items():
            row = task.row
            is_plain = row.options is None or is_key_alone(row.options)
            if not is_plain or task.progress or task.dead:
                heads.others[task_id] = task
                continue
            heads.plain.setdefault(row.topic, {})[task_id] = row.due_ms
            if row.options is not None and row.options.key is not None:
                heads.keys[task_id] = row.options.key
        return heads, rest


class Play:
    """One daemon after the other over one store, and the naive side."""

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        self.folder = folder
        self.naive = self.durable = Naive()
        self.sealed: dict[int, Naive] = {}
        self.store = store
        self.daemon: InProcess
        self.peer: Peer
        self.names = 0
        self.wrong = ""
        """The first step that was not as it should be."""

    # --- what the daemon does, seen from here ------------------------------------------------

    async def start(self) -> None:
        now_ms = getattr(self, "now_ms", NOW_MS)
        self.daemon = await InProcess(self.folder, store=self.store, now_ms=now_ms).__aenter__()
        shard = self.daemon.shard
        await shard.bulks.slices.acquire()
        self.peer = self.daemon.connect()
        stepped, seal, commit = shard.engine.bulks.record_step, shard.engine.seal, self.store.commit

        def noted(name: str, step: Step) -> Any:
            wanted = self.naive.stepped(name, step.place[0], self.daemon.sources.now_ms)
            if (step.looked_at, step.matched, sum(step.words.values())) != wanted:
                # Raised here it would end the daemon, and a shorter example take long to find.
                self.wrong = self.wrong or f"{name}: {step}, and not {wanted}"
            return stepped(name, step)

        def sealing(*args: Any, **named: Any) -> Any:
            batch = seal(*args, **named)
            if batch is not None:
                self.sealed[id(batch.effects)] = copy.deepcopy(self.naive)
            return batch

        async def committing(epoch: int, owner: str, n: int, effects: Any) -> bool:
            done = await commit(epoch, owner, n, effects)
            self.durable = self.sealed.pop(id(effects))
            return done

        shard.engine.bulks.record_step = noted  # type: ignore[method-assign]  # it is watched
        shard.engine.seal = sealing  # type: ignore[method-assign]
        self.store.commit = committing  # type: ignore[method-assign]

    async def ask(self, kind: T, *fields: Any) -> Any:
        answer = await self.peer.call(kind, *fields)
        assert answer[0] == T.OK, answer
        return answer[2]

    async def settled(self) -> None:
        """All bulk operations stand still, and everything is durable."""
        await self.daemon.settle()
        self.durable = copy.deepcopy(self.naive)

    # --- what happens -----------------------------------------------------------------------

    async def enqueue(
        self, delay_s: int, amount: int | None, tag: str | None, key: str | None
    ) -> None:
        options: dict[str, Any] = {} if amount is None else {"properties": {"amount": amount}}
        options |= {n: v for n, v in (("tag", tag), ("key", key)) if v is not None}
        _, ids = await self.ask(
            T.ENQUEUE, self.peer.request + 1, (("t", b"", delay_s * 1000, options),)
        )
        due_ms = self.daemon.sources.now_ms + delay_s * 1000
        self.naive.tasks[ids[0]] = Task(due_ms, amount, tag, key)

    async def cancel(self, nth: int) -> None:
        if self.naive.tasks:
            task_id = sorted(self.naive.tasks)[nth % len(self.naive.tasks)]
            assert await self.ask(T.CANCEL, (task_id,)) == ((task_id, "cancelled"),)
            del self.naive.tasks[task_id]

    async def reschedule(self, nth: int, delay_s: int) -> None:
        if self.naive.tasks:
            task_id = sorted(self.naive.tasks)[nth % len(self.naive.tasks)]
            moved = {"delay_ms": delay_s * 1000}
            ((_, word, due_ms),) = await self.ask(T.RESCHEDULE, (task_id,), moved)
            assert word == "scheduled"
            self.naive.tasks[task_id].due_ms = due_ms

    async def make(self, kind: str, selection: str) -> None:
        if not self.naive.tasks:
            return
        options, fits = SELECTIONS[selection]
        moved = {LATER: {"shift_ms": SHIFT_MS}, FIXED: {"due_ms": FIXED_MS}}.get(kind, {})
        self.names += 1
        name = f"j{self.names}"
        # Known before the first step comes.
        self.naive.bulks[name] = Bulk(kind, fits, self.daemon.shard.core.ids.last)
        if not self.daemon.shard.core.bulk_running:
            matching = [i for i in sorted(self.naive.tasks) if fits(self.naive.tasks[i])]
            assert await self.tried(kind, {**options, **moved}) == matching
        frame_kind = {LATER: "reschedule", FIXED: "reschedule"}.get(kind, kind)
        await self.ask(T.BULK_MAKE, "t", frame_kind, {**options, **moved, "id": name})

    async def tried(self, kind: str, options: dict[str, Any]) -> list[int]:
        """What a dry run finds while no bulk operation is running."""
        frame_kind = {LATER: "reschedule", FIXED: "reschedule"}.get(kind, kind)
        turns = self.daemon.shard.bulks.slices
        turns.release()
        with patch.object(bulks, "EXAMPLES_MAX", 1_000):
            answer = await self.ask(T.BULK_PREVIEW, "t", frame_kind, options)
        await turns.acquire()
        assert answer["next"] is None and answer["refused"] == {}
        assert answer["looked_at"] == len(self.naive.tasks)
        return list(answer["examples"])

    async def end_bulk(self, nth: int) -> None:
        if self.naive.bulks:
            name = list(self.naive.bulks)[nth % len(self.naive.bulks)]
            answer = await self.ask(T.BULK, name, "cancel")
            self.naive.bulks[name].is_cancelled = answer["state"] == "cancelled"

    async def pass_time(self, seconds: int) -> None:
        self.daemon.pass_time(seconds * 1000)

    async def let(self, slices: int) -> None:
        """The bulk operations do some steps, and stand still in whatever state that is."""
        turns = self.daemon.shard.bulks.slices
        for _ in range(slices):
            for _ in range(COMMIT_TURNS):
                await asyncio.sleep(0)
            turns.release()
            # Whoever waits for its turn is before this in the line.
            await turns.acquire()

    async def crash(self) -> None:
        """Restart from the durable state; the old daemon's later actions are lost."""
        self.now_ms = self.daemon.sources.now_ms
        left, durable = self.store.copy(), copy.deepcopy(self.durable)
        await self.daemon.__aexit__()
        self.store, self.durable, self.naive = left, durable, copy.deepcopy(durable)
        await self.start()

    async def cut_off(self, kind: str, selection: str, slices: int) -> None:
        """A bulk operation that a crash ends in the middle: what chance alone would seldom make."""
        await self.make(kind, selection)
        await self.settled()
        await self.let(slices)
        await self.crash()

    async def check(self) -> None:
        """All bulk operations come to their ends."""
        shard = self.daemon.shard
        shard.bulks.slices.release()
        for _ in range(TURNS_MAX):
            if not shard.core.bulk_running:
                break
            await asyncio.sleep(0)
        await self.daemon.settle()
        assert not self.wrong, self.wrong
        for name, bulk in self.naive.bulks.items():
            answer = await self.ask(T.BULK, name, "show")
            assert answer["state"] == ("cancelled" if bulk.is_cancelled else "done")
            assert (answer["looked_at"], answer["matched"], answer["changed"]) == bulk.counts
        page = await self.ask(T.LIST, {"topic": "t", "limit": 1_000})
        answer = {task["id"]: task["due_ms"] for task in page["tasks"]}
        assert answer == {i: task.due_ms for i, task in self.naive.tasks.items()}
        self.daemon.recount()


tasks = st.tuples(
    st.just("enqueue"),
    st.integers(0, 100),
    st.sampled_from((None, None, *range(6))),
    st.sampled_from((None, "a", "b", "c")),
    st.sampled_from((None, "k1", "x")),
)
kinds = st.sampled_from((CANCEL, LATER, NOW, FIXED))
selections = st.sampled_from(sorted(SELECTIONS))
steps = st.one_of(
    tasks,
    st.tuples(st.just("make"), kinds, selections),
    st.tuples(st.just("cut_off"), kinds, selections, st.integers(1, 4)),
    st.tuples(st.just("let"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 50)),
    st.tuples(st.just("reschedule"), st.integers(0, 50), st.integers(0, 100)),
    st.tuples(st.just("pass_time"), st.integers(0, 30)),
    st.tuples(st.just("end_bulk"), st.integers(0, 5)),
    st.tuples(st.just("crash")),
)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""A shorter example is not looked for: each has daemons to start and to end."""
SEEDS = st.lists(tasks, min_size=6, max_size=14)


@pytest.mark.parametrize(
    ("page", "size", "store"),
    [(3, 2, MemoryStore), (4, 3, ColumnStore), (5, 1, ColumnStore), (500, 128, ColumnStore)],
)
@settings(
    max_examples=40, deadline=None, print_blob=True, phases=PHASES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(seeds=SEEDS, played=st.lists(steps, max_size=25))
def test_a_bulk_equals_a_loop_over_all_tasks(
    tmp_path: Path,
    page: int,
    size: int,
    store: type[MemoryStore],
    seeds: list[Any],
    played: list[Any],
) -> None:
    async def run() -> None:
        play = Play(tmp_path, store())
        await play.start()
        try:
            for name, *given_ in [*seeds, *played]:
                await getattr(play, name)(*given_)
                assert not play.wrong, play.wrong
                if name not in ("let", "crash", "cut_off"):
                    await play.settled()
            await play.check()
        except BaseException:
            await play.daemon.shard.kill()
            raise
        await play.daemon.__aexit__()

    with patch.object(bulks, "PAGE", page), patch.object(bulks, "SLICE", size):
        asyncio.run(run())
