"""Bulk operations: made, tried without changing anything, listed, shown, cancelled. At work each
goes on in the background, in steps that hold nothing up.

A bulk operation is made with the id that its caller has chosen, so that a resend finds it: the same
request is answered with the bulk operation as it is then, another one with the same id is a
conflict. ``only``: a bulk operation on another topic is as if it were not there.

A bulk operation goes on in *turns*: it reads a few tasks, looks at them in one slice, and lets go
of them. A slice is bounded by rows and by time: however dear a condition is, the event loop gets
its turn after ``SLICE_S`` and one task more. All bulk operations together take one slice at a time,
and have a few places to read, which nobody else needs (``Reader.bulk_turn``); they take turns in
the order of asking, and a bulk operation that waits for its turn, its rate or its commit holds no
place and no row.

What a slice changes and how far the bulk operation is then are in one batch, and after ``PAGE``
tasks the bulk operation waits until that is durable; so one that a restart or a failover cuts off
goes on where it was.

A kind of bulk operation is a ``BulkKind``. It gets its ``Work``: what was asked, how far it is,
and the
means to go on (a turn, the rate, a step, its durability). ``Runner.kinds`` is the table of them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tickwheel.api.bulk import BulkFields, options_of
from tickwheel.engine.queues import Bucket
from tickwheel.engine.tasks import OF_DEAD_LETTERS, OF_TASKS, Selector, Step
from tickwheel.errors import BadRequest, Conflict, NotFound, Overloaded
from tickwheel.model.kinds import START, Bulk, BulkState, Place, Selection
from tickwheel.persistence.contract import StoreError
from tickwheel.server import checks
from tickwheel.server.shard.reads import Records, when_back
from tickwheel.server.shard.views import Page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from tickwheel.api.bulk import BulkName, BulkPage, BulkTrial, NewBulk
    from tickwheel.clock import Now
    from tickwheel.engine.state import Core
    from tickwheel.model.kinds import BulkRow
    from tickwheel.model.records import DeadRow, TaskSnapshot
    from tickwheel.server.shard.callers import Ask, Only
    from tickwheel.server.shard.parts import Listings, Parts
    from tickwheel.server.shard.reads import View
    from tickwheel.server.shard.views import ValueBytes

PAGE = 500
"""How many tasks or dead letters a bulk operation changes before it waits for its commit."""
SLICE = 128
"""How many tasks one turn reads, and its slice looks at, at most."""
SLICE_S = 0.003
"""How long, in seconds, a slice looks at tasks; one task, and 2 ms for changes, come on top."""
PACE_S_MAX = 0.25
"""How often, in seconds, a bulk operation that waits for its rate looks whether it is ended."""
BURSTS_PER_S = 10
"""A rate is kept over each tenth of a second, as far as it makes whole tasks in that."""
PREVIEW_ROWS_MAX, PREVIEW_S_MAX = 20_000, 1.0
"""Rows, and seconds, after which a dry run answers with the part that it has."""
EXAMPLES_MAX = 10


class BulkKind(Protocol):
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
            rate = bulk.rate / runner.engine.core.config.shards
            burst = max(1, int(rate / BURSTS_PER_S))
            self._bucket = Bucket(rate, burst, runner.clock.read().mono_ms)
        self.is_half_changed = False
        """Whether an error came in the middle of ``change``."""
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
        self.is_half_changed, before = True, self.row.changed
        row = self._runner.engine.bulks.stepped(self._name, act())
        self.is_half_changed = False
        changed = row.changed - before
        self._runner.parts.observed.bulk_changes[self.bulk.kind] += changed
        if self._bucket is not None:
            self._bucket.take(changed)

    async def durable(self) -> None:
        """Wait until all changes so far are sent and durable."""
        self._runner.parts.wake()
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

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.engine = parts.engine
        self.reader = parts.reader
        self.committer = parts.committer
        self.clock = parts.clock
        self.slices = asyncio.Lock()
        tasks, letters = OverTasks(self), OverDeadLetters(self)
        self.searches: dict[str, Search] = {
            **dict.fromkeys(OF_TASKS, tasks),
            **dict.fromkeys(OF_DEAD_LETTERS, letters),
        }
        self.kinds: dict[str, BulkKind] = dict(self.searches)

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
        self.parts.spawn(self._run(name))

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
            self.parts.border.report(f"bulk operation {name}", error)
            state, note = BulkState.FAILED, f"{type(error).__name__}: the daemon's log says more"
        if work.is_wanted:
            row = self.engine.bulks.end(name, state, self.clock.read().now_ms, note)
            self.committer.kick()
            said = f"looked at {row.looked_at}, changed {row.changed} of {row.matched}"
            what = f"{name} ({row.bulk.kind}): {state.name.lower()}"
            self.parts.on_event("bulk_ended", f"{what}, {said}")

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

    def judge(self, bulk: Bulk, selector: Selector, task: TaskSnapshot, key: Place) -> bool | None:
        """Whether what is at ``key`` matches; None: it is not there any more."""
        raise NotImplementedError

    def words(self, bulk: Bulk, seen: Seen) -> list[str | None]:
        """Why each one that matched would not be changed; None: it would."""
        raise NotImplementedError

    def act(self, bulk: Bulk, seen: Seen, view: View) -> Counter[str]:
        """Change those that matched; how many had each word for their outcome."""
        raise NotImplementedError

    def look(
        self, bulk: Bulk, selector: Selector, keys: Sequence[Place], view: View, most: int
    ) -> Seen:
        """The keys of a slice that match: up to ``most``, as many as can be judged in time."""
        known, until_s = view(_ids(keys)), time.monotonic() + SLICE_S
        done, looked_at, matched, judge = 0, 0, list[Place](), self.judge
        for key in keys:
            done += 1
            task = known.get(key[0])
            fits = None if task is None else judge(bulk, selector, task, key)
            if fits is None:
                continue
            looked_at += 1
            if fits:
                matched.append(key)
                if len(matched) >= most:
                    break
            if time.monotonic() >= until_s:
                break
        return Seen(done, looked_at, matched, known)

    async def run(self, work: Work) -> None:
        """See ``BulkKind``."""
        selector, reach = Selector(work.bulk.selection), SLICE if work.bulk.rate is None else 1
        while work.is_wanted:
            keys, is_last = await self.page(work.bulk, work.row.place)
            while keys and work.is_wanted:
                await work.paced()
                done = await self._turn(work, selector, keys[:reach])
                # Few should be read in vain, but each read be worth its while.
                reach = min(SLICE, 2 * reach) if done >= reach else max(1, done)
                keys = keys[done:]
                if work.bulk.rate is not None:
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
        read = partial(self._runner.reader.ids_after, place[0], PAGE, bulk.topic)
        ids, is_last = await when_back(read)
        keys = [(task_id, "") for task_id in ids if task_id <= bulk.until_id]
        return keys, is_last or len(keys) < len(ids)

    def judge(self, bulk: Bulk, selector: Selector, task: TaskSnapshot, key: Place) -> bool | None:
        state = selector.state
        return selector.fits(task.row) and (state is None or self._control.state(task) == state)

    def words(self, bulk: Bulk, seen: Seen) -> list[str | None]:
        now_ms, latest_ms = self._runner.clock.read().now_ms, self._runner.parts.limits.delay_ms_max
        known = seen.known
        return [self._bulks.says_no(bulk, known[i], now_ms, latest_ms) for i, _ in seen.matched]

    def act(self, bulk: Bulk, seen: Seen, view: View) -> Counter[str]:
        known, plain = seen.known, dict[int, int]()
        keys: Mapping[int, str] = {}
        if isinstance(known, Records):
            found, keys = known.plain.get(bulk.topic, {}), known.keys_of
            plain = {i: found[i] for i, _ in seen.matched if i in found}
        tasks = [known[task_id] for task_id, _ in seen.matched]
        now_ms, latest_ms = self._runner.clock.read().now_ms, self._runner.parts.limits.delay_ms_max
        done = self._bulks.act(bulk, tasks, bulk.topic, plain, keys, now_ms, latest_ms)
        return Counter(word for word, _ in done.values())


class OverDeadLetters(Search):
    """Bulk operations over the dead letters of one group, or of all."""

    async def page(self, bulk: Bulk, place: Place) -> tuple[list[Place], bool]:
        await self._runner.committer.barrier()
        group, scan = bulk.selection.group, self._runner.parts.store.scan_dead

        async def read() -> list[DeadRow]:
            async with self._runner.reader.bulk_scan():
                return await scan(place, PAGE, bulk.topic, group)

        rows = await when_back(read)
        keys = [(row.id, row.group) for row in rows if row.id <= bulk.until_id]
        return keys, len(keys) < PAGE

    def judge(self, bulk: Bulk, selector: Selector, task: TaskSnapshot, key: Place) -> bool | None:
        letter = task.dead.get(key[1])
        if letter is None or letter.behind_id >= bulk.until_id:
            return None
        return selector.reason in letter.reason.casefold() and selector.fits(task.row)

    def words(self, bulk: Bulk, seen: Seen) -> list[str | None]:
        now_ms, ttl_ms = self._runner.clock.read().now_ms, _ttl_ms(bulk)
        says_no = self._control.says_no_to_dead
        return [says_no(bulk.kind, seen.known[i], now_ms, ttl_ms) for i, _ in seen.matched]

    def act(self, bulk: Bulk, seen: Seen, view: View) -> Counter[str]:
        words, now_ms = Counter[str](), self._runner.clock.read().now_ms
        settle, ttl_ms = self._control.settle_dead, _ttl_ms(bulk)
        for task_id, group in seen.matched:
            # One by one: a task with letters of two groups changes with the first.
            known = view([task_id]).get(task_id)
            words[settle(bulk.kind, task_id, group, known, now_ms, ttl_ms)] += 1
        return words


def _ttl_ms(bulk: Bulk) -> int | None:
    """The new time to live of what a bulk operation requeues."""
    found = bulk.argument("ttl_ms")
    return None if found is None else int(found)


def _ids(keys: Sequence[Place]) -> list[int]:
    """The task ids of these places, each once."""
    return list(dict.fromkeys(key[0] for key in keys))


def _read(keys: Sequence[Place], rest: Sequence[int]) -> list[Place]:
    """The keys before the first one that was left for another read."""
    unread = frozenset(rest)
    return list(takewhile(lambda key: key[0] not in unread, keys))


# --- the operations ------------------------------------------------------------------------------

STATES = {state.name.lower(): state for state in BulkState}


class Bulks:
    """The operations on bulk operations."""

    def __init__(
        self, parts: Parts, runner: Runner, listings: Listings, value_bytes: ValueBytes
    ) -> None:
        self._parts = parts
        self._bulks = parts.engine.bulks
        self._runner = runner
        self._listings = listings
        self._value_bytes = value_bytes

    def make_bulk(self, ask: Ask[NewBulk]) -> None:
        """Do to everything on the topic that is selected what ``kind`` says, from now on in the
        background; answered with the bulk operation when it is durable. Raises BadRequest,
        LimitExceeded, DueTooFar, and once its turn has come Conflict, NotFound, Overloaded."""
        core, now = self._parts.core, ask.now
        wanted = self._checked(ask.request, ask.request.id, now)
        # Its moment is now, not when its turn comes: what is sent behind it is not touched.
        until_id = core.ids.last
        if wanted.kind in OF_DEAD_LETTERS:
            # A place of its own in the order: what dies from now on is behind it.
            until_id = core.ids.take(1, now.now_ms)
        wanted = wanted._replace(by=ask.caller.principal.name or "anonymous", until_id=until_id)
        checks.storable_bulk(wanted)

        def make() -> BulkRow:
            if wanted.topic not in core.topics:
                raise NotFound(f"there is no topic {wanted.topic}")
            check_room(core)
            return self._parts.border.act().bulks.make(wanted)

        begin(self._parts, self._runner, ask, wanted, make)

    def preview_bulk(self, ask: Ask[BulkTrial]) -> None:
        """What a bulk operation would do now, without doing it: the part of the answer behind
        ``after``, with ``next`` to go on after. ``until_id`` and ``until_ms``, of the first part's
        answer, keep its moment. Raises BadRequest, LimitExceeded, DueTooFar, Overloaded."""
        bulk = self._checked(ask.request, ask.request.id, ask.now)
        place, until_id = ask.request.after or START, ask.request.until_id
        if ask.request.until_ms is not None:
            bulk = bulk._replace(made_ms=ask.request.until_ms)

        async def part() -> dict[str, Any]:
            parts = self._parts
            await parts.committer.barrier()
            until = parts.core.ids.last + 1 if until_id is None else until_id
            asked = bulk._replace(until_id=until)
            if asked.topic not in parts.core.topics:
                raise NotFound(f"there is no topic {asked.topic}")
            found = await self._runner.preview(asked, place)
            return {
                "looked_at": found.looked_at,
                "matched": found.matched,
                "refused": dict(found.refused),
                "examples": found.examples,
                "until_id": until,
                "until_ms": asked.made_ms,
                "next": None if found.is_over else found.place,
            }

        self._listings.answer(ask, part)

    def cancel_bulk(self, ask: Ask[BulkName]) -> None:
        """End a bulk operation; what it has changed stays. One that is over stays as it is. Raises
        NotFound."""
        name = ask.request.bulk

        def done() -> None:
            found = self._found(name, ask.only)
            if not found.state.is_over:
                bulks = self._parts.border.act().bulks
                found = bulks.end(name, BulkState.CANCELLED, ask.now.now_ms)
            self._parts.committer.answer(ask, bulk_map(found))

        self._parts.commands.put_last(ask, done)

    def show_bulk(self, ask: Ask[BulkName]) -> None:
        """Answer one bulk operation, and how far it is. Raises NotFound."""
        found = self._found(ask.request.bulk, ask.only)
        self._parts.committer.answer(ask, bulk_map(found))

    def list_bulk(self, ask: Ask[BulkPage]) -> None:
        """Answer a page of bulk operations, newest first. Raises NotFound."""
        asked, only = ask.request, ask.only
        topic, state = asked.topic, asked.state
        rows = list(reversed(self._bulks.known.values()))
        if asked.after is not None:
            rows = rows[rows.index(self._found(asked.after, only)) + 1 :]
        maps = (
            bulk_map(row)
            for row in rows
            if _is_seen(row, only)
            and topic in (None, row.bulk.topic)
            and (state is None or row.state is STATES[state])
        )
        page = Page(self._parts, asked.limit, self._value_bytes)
        self._parts.committer.answer(ask, page.answer(maps, "bulk", "id"))

    def _found(self, name: str, only: Only | None) -> BulkRow:
        found = self._bulks.known.get(name)
        if found is None or not _is_seen(found, only):
            raise NotFound(
                f"there is no bulk operation {name}, or it ended so long ago that it is forgotten"
            )
        return found

    # --- what is asked for -----------------------------------------------------------------------

    def _checked(self, asked: BulkFields, own: str | None, now: Now) -> Bulk:
        """The checked bulk operation. Raises BadRequest, LimitExceeded, DueTooFar."""
        kind, options = asked.kind, options_of(asked.kind)
        for name in asked.said(BulkFields):
            if name not in options and name not in ("topic", "kind"):
                raise BadRequest(_not_of(kind, name))
        return Bulk(
            id=own or f"{kind}-{secrets.token_hex(6)}",
            kind=kind,
            topic=asked.topic,
            selection=_selection(asked),
            # As it was asked for: a resend says the same.
            arguments=tuple(checks.moved(kind, asked, now.now_ms, self._parts.limits).items()),
            rate=asked.rate,
            made_ms=now.now_ms,
            until_id=0,
        )


def check_room(core: Core) -> None:
    """Raises Overloaded when no further bulk operation may run."""
    said = "bulk operations are running"
    checks.room(Overloaded, core.bulk_running, said, core.config, "bulk_max")


def begin(
    parts: Parts, runner: Runner, ask: Ask[Any], wanted: Bulk, make: Callable[[], BulkRow]
) -> None:
    """Once its turn has come, ``make`` the bulk operation and let it run, unless it is known by its
    id; then answer it. Raises Conflict, and what ``make`` raises."""

    def done() -> None:
        found = parts.engine.bulks.known.get(wanted.id)
        if found is not None and not found.bulk.is_same(wanted):
            raise Conflict(f"there is a bulk operation {wanted.id} that does something else")
        if found is None:
            found = make()
            runner.begin(wanted.id)
        parts.committer.answer(ask, bulk_map(found))

    parts.commands.put_last(ask, done)


def bulk_map(row: BulkRow) -> dict[str, Any]:
    """A bulk operation as every answer has it."""
    bulk = row.bulk
    selected = {
        name: value
        for name, value in bulk.selection._asdict().items()
        if value is not None and value != ""
    }
    return {
        "id": bulk.id,
        "kind": bulk.kind,
        "topic": bulk.topic,
        "selection": selected,
        "arguments": dict(bulk.arguments),
        "rate": bulk.rate,
        "state": row.state.name.lower(),
        "looked_at": row.looked_at,
        "matched": row.matched,
        "changed": row.changed,
        "refused": dict(row.refused),
        "made_ms": bulk.made_ms,
        "by": bulk.by,
        "ended_ms": row.ended_ms or None,
        "note": row.note,
    }


def _selection(asked: BulkFields) -> Selection:
    checks.check_can_hold(checks.filter_of(asked.tags, asked.where))
    said = {name: getattr(asked, name) for name in Selection._fields}
    return Selection(**{name: value for name, value in said.items() if value is not None})


def _not_of(kind: str, name: str) -> str:
    known = ", ".join(options_of(kind))
    hint = ""
    if kind in OF_DEAD_LETTERS and name == "state":
        hint = f"; {kind} is about dead letters: cancel ends tasks that are pending"
    return (
        f"a bulk operation of kind {kind} has no {checks.shown(name)}; it may have: {known}{hint}"
    )


def _is_seen(row: BulkRow, only: Only | None) -> bool:
    return only is None or only(row.bulk.topic)
