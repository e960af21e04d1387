"""Bulk operations at work: each goes on in the background, in steps that hold nothing up.

A bulk operation goes on in *turns*: it reads a few tasks, looks at them in one slice, and lets go
of them. A slice is bounded by rows and by time: however dear a condition is, the event loop gets
its turn after ``SLICE_S`` and one task more. All bulk operations together take one slice at a time,
and have a few places to read, which nobody else needs (``Reader.bulk_turn``); they take turns in
the order of asking, and a bulk operation that waits for its turn, its rate or its commit holds no
place and no row.

What a slice changes and how far the bulk operation is then are in one batch, and after ``PAGE``
tasks the bulk operation waits until that is durable; so one that a restart or a failover cuts off
goes on where it was.

A kind of bulk operation is a ``Kind``. It gets its ``Work``: what was asked, how far it is, and the
means to go on (a turn, the rate, a step, its durability). ``Runner.kinds`` is the table of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tickwheel.engine.queues import Bucket
from tickwheel.engine.tasks import OF_DEAD_LETTERS, OF_TASKS, Selector, Step
from tickwheel.model.bulk import START, BulkState, Place
from tickwheel.persistence.contract import StoreAway, StoreError
from tickwheel.server.shard.reads import Records

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
    from typing import Any

    from tickwheel.clock import Clock
    from tickwheel.engine.engine import Engine
    from tickwheel.model.bulk import Bulk, BulkRow
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.persistence.contract import Store
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.shard.border import Border, OnEvent
    from tickwheel.server.shard.committer import Committer
    from tickwheel.server.shard.reads import Reader, View

PAGE = 500
"""How many tasks or dead letters a bulk operation changes before it waits for its commit."""
SLICE = 128
"""How many tasks one turn reads, and its slice looks at, at most."""
SLICE_S = 0.003
"""How long, in seconds, a slice looks at tasks; one task, and 2 ms for changes, come on top."""
AWAY_RETRY_S = 0.5
PACE_S_MAX = 0.25
"""How often, in seconds, a bulk operation that waits for its rate looks whether it is ended."""
BURSTS_PER_S = 10
"""A rate is kept over each tenth of a second, as far as it makes whole tasks in that."""
PREVIEW_ROWS_MAX, PREVIEW_S_MAX = 20_000, 1.0
"""Rows, and seconds, after which a dry run answers with the part that it has."""
EXAMPLES_MAX = 10


class Kind(Protocol):
    """The work of bulk operations of one kind."""

    async def run(self, work: Work) -> None:
        """Go on from ``work.row.place`` until the end, or until the operation is ended. An error
        outside of ``work.change`` fails the bulk operation; inside, the daemon."""
        ...


class Work:
    """One bulk operation under way, as its kind sees it."""

    def __init__(self, runner: Runner, bulk: Bulk) -> None:
        self._runner = runner
        self._name = bulk.id
        self.bulk = bulk
        self._bucket: Bucket | None = None
        if bulk.rate is not None:
            burst = max(1, int(bulk.rate / BURSTS_PER_S))
            self._bucket = Bucket(bulk.rate, burst, runner.clock.read().mono_ms)
        self._is_acting = False
        self.note = ""
        """A remark for people that is kept when the bulk operation is done."""

    @property
    def row(self) -> BulkRow:
        return self._runner.engine.bulks.known[self._name]

    @property
    def is_wanted(self) -> bool:
        """Whether nobody has ended the bulk operation."""
        row = self._runner.engine.bulks.known.get(self._name)
        return row is not None and not row.state.is_over

    @property
    def is_half_changed(self) -> bool:
        """Whether an error came in the middle of ``change``."""
        return self._is_acting

    @property
    def has_rate(self) -> bool:
        """Whether the bulk operation has a rate."""
        return self._bucket is not None

    def left(self, most: int) -> int:
        """How many changes the rate allows now, ``most`` at most."""
        if self._bucket is None:
            return most
        return min(most, self._bucket.left(self._runner.clock.read().mono_ms))

    async def paced(self) -> None:
        """Wait until the rate allows a change, or the bulk operation is not wanted any more."""
        while self.is_wanted and self._bucket is not None and not self.left(1):
            wait_ms = self._bucket.next_mono_ms() - self._runner.clock.read().mono_ms
            await asyncio.sleep(min(PACE_S_MAX, max(1, wait_ms) / 1000))

    def change(self, act: Callable[[], Step]) -> None:
        """Run ``act``, which awaits nothing and says how far the operation is then, in one
        batch."""
        self._is_acting, before = True, self.row.changed
        row = self._runner.engine.bulks.stepped(self._name, act())
        self._is_acting = False
        changed = row.changed - before
        self._runner.observed.bulk_changes[self.bulk.kind] += changed
        if self._bucket is not None:
            self._bucket.take(changed)

    async def durable(self) -> None:
        """Wait until all changes so far are sent and durable."""
        self._runner.wake()
        self._runner.committer.kick()
        await self._runner.committer.barrier()


@dataclass
class Preview:
    """What a dry run of a bulk operation has found so far."""

    place: Place = START
    """Every task or dead letter up to this place has been looked at."""
    is_over: bool = False
    looked_at: int = 0
    matched: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Reason → how many of those that matched would not be changed."""
    examples: list[int] = field(default_factory=list)
    """The ids of the first tasks that would be changed."""


class Seen(NamedTuple):
    """What one slice has found."""

    done: int
    """How many keys were looked up: the slice may have ended before its last one."""
    looked_at: int
    """How many of these exist."""
    matched: Sequence[Place]
    known: Mapping[int, TaskSnapshot]


class Runner:
    """All bulk operations of a shard: ``start`` once everything is loaded."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        reader: Reader,
        committer: Committer,
        clock: Clock,
        border: Border,
        *,
        delay_ms_max: int,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        wake: Callable[[], None],
        on_event: OnEvent,
        observed: Observed,
    ) -> None:
        self.engine = engine
        self.store = store
        self.reader = reader
        self.committer = committer
        self.clock = clock
        self.wake = wake
        self.delay_ms_max = delay_ms_max
        self.observed = observed
        self.slices = asyncio.Lock()
        self._border = border
        self._spawn = spawn
        self._on_event = on_event
        tasks, letters = OverTasks(self), OverDeadLetters(self)
        self.searches: dict[str, Search] = {
            **dict.fromkeys(OF_TASKS, tasks),
            **dict.fromkeys(OF_DEAD_LETTERS, letters),
        }
        self.kinds: dict[str, Kind] = dict(self.searches)

    def start(self) -> None:
        """Go on with the bulk operations that were under way when the daemon ended last."""
        for row in list(self.engine.bulks.known.values()):
            if not row.state.is_over:
                self.begin(row.bulk.id)

    @asynccontextmanager
    async def slice(self) -> AsyncIterator[None]:
        """Let one bulk operation at a time look at a slice, which awaits nothing, and everybody
        else work after it."""
        async with self.slices:
            yield
            await asyncio.sleep(0)

    def begin(self, name: str) -> None:
        """Run a bulk operation in the background; its steps begin once it is durable."""
        self._spawn(self._run(name))

    async def _run(self, name: str) -> None:
        await self.committer.barrier()
        row = self.engine.bulks.known.get(name)
        if row is None or row.state.is_over:
            return
        work, state, note = Work(self, row.bulk), BulkState.DONE, ""
        kind = self.kinds.get(row.bulk.kind)
        try:
            if kind is None:
                state, note = (
                    BulkState.FAILED,
                    f"this release has no bulk operations of kind {row.bulk.kind}",
                )
            else:
                await kind.run(work)
                note = work.note
        except StoreError:
            raise
        except Exception as error:
            if work.is_half_changed:
                raise
            self._border.report(f"bulk operation {name}", error)
            state, note = BulkState.FAILED, f"{type(error).__name__}: the daemon's log says more"
        if work.is_wanted:
            row = self.engine.bulks.end(name, state, self.clock.read().now_ms, note)
            self.committer.kick()
            said = f"looked at {row.looked_at}, changed {row.changed} of {row.matched}"
            self._on_event("bulk_ended", f"{name} ({row.bulk.kind}): {state.name.lower()}, {said}")

    async def preview(self, bulk: Bulk, place: Place) -> Preview:
        """What a dry run finds from ``place`` on; of a large topic the first part."""
        search, selector = self.searches[bulk.kind], Selector(bulk.selection)
        found, until_s = Preview(place), time.monotonic() + PREVIEW_S_MAX
        while found.looked_at < PREVIEW_ROWS_MAX and time.monotonic() < until_s:
            keys, is_last = await search.page(bulk, found.place)
            while keys and time.monotonic() < until_s:
                keys = keys[await self._preview_some(search, bulk, selector, keys, found) :]
            found.is_over = is_last and not keys
            if found.is_over:
                break
        return found

    async def _preview_some(
        self, search: Search, bulk: Bulk, selector: Selector, keys: list[Place], found: Preview
    ) -> int:
        """One turn of a dry run; returns how many keys were looked at."""
        async with self.reader.bulk_turn() as read, read(_ids(keys[:SLICE])) as (view, rest):
            some = _read(keys[:SLICE], rest)
            async with self.slice():
                seen = search.look(bulk, selector, some, view, SLICE)
                no = search.words(bulk, seen)
        found.place = some[seen.done - 1]
        found.looked_at += seen.looked_at
        found.matched += len(seen.matched)
        found.refused.update(filter(None, no))
        yes = (key[0] for key, why in zip(seen.matched, no, strict=True) if not why)
        found.examples += islice(yes, EXAMPLES_MAX - len(found.examples))
        return seen.done


class Search:
    """A kind of bulk operation over stored things: pages of keys, which rise from page to page, and
    slices of those."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._bulks = runner.engine.bulks
        self._control = runner.engine.control

    async def page(self, bulk: Bulk, place: Place) -> tuple[list[Place], bool]:
        """The next keys behind ``place``, and whether they are the last."""
        raise NotImplementedError

    def look(
        self, bulk: Bulk, selector: Selector, keys: Sequence[Place], view: View, most: int
    ) -> Seen:
        """The keys of a slice that match: up to ``most``, as many as can be judged in time."""
        raise NotImplementedError

    def words(self, bulk: Bulk, seen: Seen) -> list[str | None]:
        """Why each one that matched would not be changed; None: it would."""
        raise NotImplementedError

    def act(self, bulk: Bulk, seen: Seen, view: View) -> Counter[str]:
        """Change those that matched; how many had each word for their outcome."""
        raise NotImplementedError

    async def run(self, work: Work) -> None:
        """See ``Kind``."""
        selector, reach = Selector(work.bulk.selection), SLICE if work.bulk.rate is None else 1
        while work.is_wanted:
            keys, is_last = await self.page(work.bulk, work.row.place)
            while keys and work.is_wanted:
                await work.paced()
                done = await self._turn(work, selector, keys[:reach])
                # Few should be read in vain, but each read be worth its while.
                reach = min(SLICE, 2 * reach) if done >= reach else max(1, done)
                keys = keys[done:]
                if work.has_rate:
                    await work.durable()
            await work.durable()
            if is_last:
                return

    async def _turn(self, work: Work, selector: Selector, keys: Sequence[Place]) -> int:
        """Read and look at one slice; returns how many keys were looked at."""
        async with self._runner.reader.bulk_turn() as read, read(_ids(keys)) as (view, rest):
            keys = _read(keys, rest)
            async with self._runner.slice():
                most = work.left(len(keys))
                if not most or not work.is_wanted:
                    return 0
                seen = self.look(work.bulk, selector, keys, view, most)
                work.change(partial(self._step, work.bulk, keys, seen, view))
        return seen.done

    def _step(self, bulk: Bulk, keys: Sequence[Place], seen: Seen, view: View) -> Step:
        words = self.act(bulk, seen, view) if seen.matched else Counter[str]()
        return Step(keys[seen.done - 1], seen.looked_at, len(seen.matched), words)


class OverTasks(Search):
    """Bulk operations over tasks that are not finished."""

    async def page(self, bulk: Bulk, place: Place) -> tuple[list[Place], bool]:
        while True:
            try:
                ids, is_last = await self._runner.reader.ids_after(place[0], PAGE, bulk.topic)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)
                continue
            keys = [(task_id, "") for task_id in ids if task_id <= bulk.until_id]
            return keys, is_last or len(keys) < len(ids)

    def look(
        self, bulk: Bulk, selector: Selector, keys: Sequence[Place], view: View, most: int
    ) -> Seen:
        known, until_s = view([key[0] for key in keys]), time.monotonic() + SLICE_S
        state, done, looked_at, matched = selector.state, 0, 0, list[Place]()
        for key in keys:
            done += 1
            task = known.get(key[0])
            if task is None:
                continue
            looked_at += 1
            if selector.fits(task.row) and (state is None or self._control.state(task) == state):
                matched.append(key)
                if len(matched) >= most:
                    break
            if time.monotonic() >= until_s:
                break
        return Seen(done, looked_at, matched, known)

    def words(self, bulk: Bulk, seen: Seen) -> list[str | None]:
        now_ms, latest_ms = self._runner.clock.read().now_ms, self._runner.delay_ms_max
        known = seen.known
        return [self._bulks.says_no(bulk, known[i], now_ms, latest_ms) for i, _ in seen.matched]

    def act(self, bulk: Bulk, seen: Seen, view: View) -> Counter[str]:
        known, plain = seen.known, dict[int, int]()
        keys: Mapping[int, str] = {}
        if isinstance(known, Records):
            found, keys = known.plain.get(bulk.topic, {}), known.keys_of
            plain = {i: found[i] for i, _ in seen.matched if i in found}
        tasks = [known[task_id] for task_id, _ in seen.matched]
        now_ms, latest_ms = self._runner.clock.read().now_ms, self._runner.delay_ms_max
        done = self._bulks.act(bulk, tasks, bulk.topic, plain, keys, now_ms, latest_ms)
        return Counter(word for word, _ in done.values())


class OverDeadLetters(Search):
    """Bulk operations over the dead letters of one group, or of all."""

    async def page(self, bulk: Bulk, place: Place) -> tuple[list[Place], bool]:
        await self._runner.committer.barrier()
        group, scan = bulk.selection.group, self._runner.store.scan_dead
        while True:
            try:
                async with self._runner.reader.bulk_scan():
                    rows = await scan(place, PAGE, bulk.topic, group)
            except StoreAway:
                await asyncio.sleep(AWAY_RETRY_S)
                continue
            keys = [(row.id, row.group) for row in rows if row.id <= bulk.until_id]
            return keys, len(keys) < PAGE

    def look(
        self, bulk: Bulk, selector: Selector, keys: Sequence[Place], view: View, most: int
    ) -> Seen:
        known, until_s = view(_ids(keys)), time.monotonic() + SLICE_S
        reason, done, looked_at, matched = selector.reason, 0, 0, list[Place]()
        for task_id, group in keys:
            done += 1
            task = known.get(task_id)
            letter = None if task is None else task.dead.get(group)
            if task is None or letter is None or letter.behind_id >= bulk.until_id:
                continue
            looked_at += 1
            if reason in letter.reason.casefold() and selector.fits(task.row):
                matched.append((task_id, group))
                if len(matched) >= most:
                    break
            if time.monotonic() >= until_s:
                break
        return Seen(done, looked_at, matched, known)

    def words(self, bulk: Bulk, seen: Seen) -> list[str | None]:
        return [None] * len(seen.matched)

    def act(self, bulk: Bulk, seen: Seen, view: View) -> Counter[str]:
        words, now_ms = Counter[str](), self._runner.clock.read().now_ms
        for task_id, group in seen.matched:
            # One by one: a task with letters of two groups changes with the first.
            known = view([task_id]).get(task_id)
            if known is None:
                words[self._control.absent(task_id)] += 1
            else:
                words[self._bulks.settle_dead(bulk.kind, known, group, now_ms)] += 1
        return words


def _ids(keys: Sequence[Place]) -> list[int]:
    """The task ids of these places, each once."""
    return list(dict.fromkeys(key[0] for key in keys))


def _read(keys: Sequence[Place], rest: Sequence[int]) -> list[Place]:
    """The keys before the first one that was left for another read."""
    unread = frozenset(rest)
    return list(takewhile(lambda key: key[0] not in unread, keys))
