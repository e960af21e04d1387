"""Bulk operations: handles requests to create, preview, list, show and cancel them, and runs them
in the background.

The caller chooses the id of a bulk operation, so that a resend finds it: the same request is
answered with the current state, and a different request with the same id is a conflict. A caller's
topic filter (``topic_filter``) hides bulk operations on other topics.

A bulk operation runs in *turns*. A turn reads a few tasks, examines them in one slice, and then
releases them from memory. A slice is bounded by rows and time, so that even an expensive filter
blocks the event loop for only ``SLICE_S`` plus one task. All bulk operations together run one slice
at a time and share a few reads, which are limited separately from other reads
(``Reader.bulk_turn``). They take turns in order of arrival. A bulk operation that waits for its
turn, its rate or a commit occupies no read and keeps no rows in memory.

The changes of a slice and the new position of the bulk operation are in the same batch. After
``PAGE`` tasks the bulk operation waits until its batch is durable. After a restart or failover it
continues from the stored position.

A kind of bulk operation is a ``BulkKind``. It receives a ``Work``, which holds the request and the
current position, and has methods to wait for the rate, record a step, and wait until it is durable.
``Runner.kinds`` lists the kinds.
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
from tickwheel.engine.tasks import DEAD_LETTER_KINDS, TASK_KINDS, Selector, Step
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
    from tickwheel.server.shard.callers import Call, TopicFilter
    from tickwheel.server.shard.parts import Parts, SlowRequests
    from tickwheel.server.shard.reads import View
    from tickwheel.server.shard.views import ValueBytes

PAGE = 500
"""Number of tasks or dead letters after which a bulk operation waits for its commit."""
SLICE = 128
"""Maximum number of tasks that a turn reads and its slice examines."""
SLICE_S = 0.003
"""Maximum seconds that a slice examines tasks, exceeded by at most one task and 2 ms of changes."""
PACE_S_MAX = 0.25
"""Maximum seconds between checks for cancellation while a bulk operation waits for its rate."""
BURSTS_PER_S = 10
"""Number of bursts per second into which a rate is divided. A burst has at least one task."""
PREVIEW_ROWS_MAX, PREVIEW_S_MAX = 20_000, 1.0
"""Rows and seconds after which a dry run answers with a partial result."""
EXAMPLES_MAX = 10


class BulkKind(Protocol):
    """Executes bulk operations of one kind."""

    async def run(self, work: Work) -> None:
        """Continue from ``work.row.place`` until the bulk operation is complete or cancelled. An
        error inside ``work.change`` ends the daemon; any other error fails only the bulk
        operation."""
        ...


class Work:
    """A running bulk operation, as its kind sees it."""

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
        """Whether an error has interrupted ``change``."""
        self.note = ""
        """A remark that is stored with the completed bulk operation and shown to users."""

    @property
    def row(self) -> BulkRow:
        return self._runner.engine.bulks.rows[self._name]

    @property
    def is_running(self) -> bool:
        """Whether the bulk operation has neither completed nor been cancelled."""
        row = self._runner.engine.bulks.rows.get(self._name)
        return row is not None and not row.state.is_over

    def allowed(self, limit: int) -> int:
        """Return the number of changes that the rate allows now, at most ``limit``."""
        if self._bucket is None:
            return limit
        return min(limit, self._bucket.left(self._runner.clock.read().mono_ms))

    async def wait_for_rate(self) -> None:
        """Wait until the rate allows a change or the bulk operation has ended."""
        while self.is_running and self._bucket is not None and not self.allowed(1):
            wait_ms = self._bucket.next_mono_ms() - self._runner.clock.read().mono_ms
            await asyncio.sleep(min(PACE_S_MAX, max(1, wait_ms) / 1000))

    def change(self, act: Callable[[], Step]) -> None:
        """Run ``act``, and record its changes and the position that it returns in one batch."""
        self.is_half_changed, before = True, self.row.changed
        row = self._runner.engine.bulks.record_step(self._name, act())
        self.is_half_changed = False
        changed = row.changed - before
        self._runner.parts.observed.bulk_changes[self.bulk.kind] += changed
        if self._bucket is not None:
            self._bucket.take(changed)

    async def wait_until_durable(self) -> None:
        """Wait until all changes so far are durable."""
        self._runner.parts.wake()
        self._runner.committer.kick()
        await self._runner.committer.barrier()


@dataclass
class Preview:
    """The results of a dry run so far."""

    place: Place = START
    """The position up to which every task or dead letter has been examined."""
    is_over: bool = False
    looked_at: int = 0
    matched: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Reason → number of matching tasks that would not be changed."""
    examples: list[int] = field(default_factory=list)
    """The ids of the first tasks that would be changed."""


class SliceResult(NamedTuple):
    """The results of one slice."""

    examined: int
    """Number of keys that were examined before the slice ended."""
    looked_at: int
    """Number of these keys that exist."""
    matched: Sequence[Place]
    tasks: Mapping[int, TaskSnapshot]


class Runner:
    """Runs all bulk operations of a shard. Call ``start`` after every task is loaded."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.engine = parts.engine
        self.reader = parts.reader
        self.committer = parts.committer
        self.clock = parts.clock
        self.slices = asyncio.Lock()
        tasks, dead_letters = TaskSearch(self), DeadLetterSearch(self)
        self.searches: dict[str, Search] = {
            **dict.fromkeys(TASK_KINDS, tasks),
            **dict.fromkeys(DEAD_LETTER_KINDS, dead_letters),
        }
        self.kinds: dict[str, BulkKind] = dict(self.searches)

    def start(self) -> None:
        """Continue the bulk operations that were running when the daemon last ended."""
        for row in list(self.engine.bulks.rows.values()):
            if not row.state.is_over:
                self.begin(row.bulk.id)

    @asynccontextmanager
    async def slice(self) -> AsyncIterator[None]:
        """Admit one slice at a time, and let the event loop run after each."""
        async with self.slices:
            yield
            await asyncio.sleep(0)

    def begin(self, name: str) -> None:
        """Run a bulk operation in the background. Its steps begin after its record is durable."""
        self.parts.spawn(self._run(name))

    async def _run(self, name: str) -> None:
        await self.committer.barrier()
        row = self.engine.bulks.rows.get(name)
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
            state, note = BulkState.FAILED, f"{type(error).__name__}; see the daemon's log"
        if work.is_running:
            row = self.engine.bulks.end(name, state, *self.clock.read(), note)
            self.committer.kick()
            counts = f"looked at {row.looked_at}, changed {row.changed} of {row.matched}"
            outcome = f"{name} ({row.bulk.kind}): {state.name.lower()}"
            self.parts.on_event("bulk_ended", f"{outcome}, {counts}")

    async def preview(self, bulk: Bulk, place: Place) -> Preview:
        """Return the results of a dry run from ``place`` on. For a large topic they are partial."""
        search, selector = self.searches[bulk.kind], Selector(bulk.selection)
        preview, until_s = Preview(place), time.monotonic() + PREVIEW_S_MAX
        while preview.looked_at < PREVIEW_ROWS_MAX and time.monotonic() < until_s:
            keys, is_last = await search.page(bulk, preview.place)
            while keys and time.monotonic() < until_s:
                keys = keys[await self._preview_slice(search, bulk, selector, keys, preview) :]
            preview.is_over = is_last and not keys
            if preview.is_over:
                break
        return preview

    async def _preview_slice(
        self, search: Search, bulk: Bulk, selector: Selector, keys: list[Place], preview: Preview
    ) -> int:
        """Run one turn of a dry run. Return the number of examined keys."""
        async with self.reader.bulk_turn() as read, read(_ids(keys[:SLICE])) as (view, rest):
            keys_read = _keys_read(keys[:SLICE], rest)
            async with self.slice():
                result = search.examine(bulk, selector, keys_read, view, SLICE)
                reasons = search.refusals(bulk, result)
        preview.place = keys_read[result.examined - 1]
        preview.looked_at += result.looked_at
        preview.matched += len(result.matched)
        preview.refused.update(filter(None, reasons))
        changeable_ids = (
            key[0] for key, why in zip(result.matched, reasons, strict=True) if not why
        )
        preview.examples += islice(changeable_ids, EXAMPLES_MAX - len(preview.examples))
        return result.examined


class Search:
    """A kind of bulk operation on stored tasks or dead letters, read in pages of ascending keys."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._bulks = runner.engine.bulks
        self._control = runner.engine.control

    async def page(self, bulk: Bulk, place: Place) -> tuple[list[Place], bool]:
        """Return the next keys after ``place``, and whether they are the last."""
        raise NotImplementedError

    def judge(self, bulk: Bulk, selector: Selector, task: TaskSnapshot, key: Place) -> bool | None:
        """Return whether the task or dead letter at ``key`` matches; None if it has left."""
        raise NotImplementedError

    def refusals(self, bulk: Bulk, result: SliceResult) -> list[str | None]:
        """Return why each match would not be changed, or None if it would be."""
        raise NotImplementedError

    def act(self, bulk: Bulk, result: SliceResult, view: View) -> Counter[str]:
        """Change the matching tasks or dead letters. Return outcome word → number of matches."""
        raise NotImplementedError

    def examine(
        self, bulk: Bulk, selector: Selector, keys: Sequence[Place], view: View, limit: int
    ) -> SliceResult:
        """Examine keys until ``limit`` match or the time of a slice is used up."""
        tasks, until_s = view(_ids(keys)), time.monotonic() + SLICE_S
        examined, looked_at, matched, judge = 0, 0, list[Place](), self.judge
        for key in keys:
            examined += 1
            task = tasks.get(key[0])
            fits = None if task is None else judge(bulk, selector, task, key)
            if fits is None:
                continue
            looked_at += 1
            if fits:
                matched.append(key)
                if len(matched) >= limit:
                    break
            if time.monotonic() >= until_s:
                break
        return SliceResult(examined, looked_at, matched, tasks)

    async def run(self, work: Work) -> None:
        """See ``BulkKind``."""
        selector, batch_size = Selector(work.bulk.selection), SLICE if work.bulk.rate is None else 1
        while work.is_running:
            keys, is_last = await self.page(work.bulk, work.row.place)
            while keys and work.is_running:
                await work.wait_for_rate()
                examined = await self._turn(work, selector, keys[:batch_size])
                # Adapt the size of the read to the slice, so that few rows are read twice and reads
                # stay large.
                batch_size = (
                    min(SLICE, 2 * batch_size) if examined >= batch_size else max(1, examined)
                )
                keys = keys[examined:]
                if work.bulk.rate is not None:
                    await work.wait_until_durable()
            await work.wait_until_durable()
            if is_last:
                return

    async def _turn(self, work: Work, selector: Selector, keys: Sequence[Place]) -> int:
        """Read and examine one slice. Return the number of examined keys."""
        async with self._runner.reader.bulk_turn() as read, read(_ids(keys)) as (view, rest):
            keys = _keys_read(keys, rest)
            async with self._runner.slice():
                limit = work.allowed(len(keys))
                if not limit or not work.is_running:
                    return 0
                result = self.examine(work.bulk, selector, keys, view, limit)
                work.change(partial(self._step, work.bulk, keys, result, view))
        return result.examined

    def _step(self, bulk: Bulk, keys: Sequence[Place], result: SliceResult, view: View) -> Step:
        outcomes = self.act(bulk, result, view) if result.matched else Counter[str]()
        return Step(keys[result.examined - 1], result.looked_at, len(result.matched), outcomes)


class TaskSearch(Search):
    """Bulk operations on unfinished tasks."""

    async def page(self, bulk: Bulk, place: Place) -> tuple[list[Place], bool]:
        read = partial(self._runner.reader.ids_after, place[0], PAGE, bulk.topic)
        ids, is_last = await when_back(read)
        keys = [(task_id, "") for task_id in ids if task_id <= bulk.until_id]
        return keys, is_last or len(keys) < len(ids)

    def judge(self, bulk: Bulk, selector: Selector, task: TaskSnapshot, key: Place) -> bool | None:
        state = selector.state
        return selector.fits(task.row) and (state is None or self._control.state(task) == state)

    def refusals(self, bulk: Bulk, result: SliceResult) -> list[str | None]:
        now_ms, latest_ms = self._runner.clock.read().now_ms, self._runner.parts.limits.delay_ms_max
        tasks = result.tasks
        return [
            self._bulks.refusal_reason(bulk, tasks[i], now_ms, latest_ms) for i, _ in result.matched
        ]

    def act(self, bulk: Bulk, result: SliceResult, view: View) -> Counter[str]:
        snapshots, plain = result.tasks, dict[int, int]()
        keys: Mapping[int, str] = {}
        if isinstance(snapshots, Records):
            dues_ms, keys = snapshots.plain.get(bulk.topic, {}), snapshots.keys_of
            plain = {i: dues_ms[i] for i, _ in result.matched if i in dues_ms}
        tasks = [snapshots[task_id] for task_id, _ in result.matched]
        now_ms, latest_ms = self._runner.clock.read().now_ms, self._runner.parts.limits.delay_ms_max
        results = self._bulks.act(bulk, tasks, bulk.topic, plain, keys, now_ms, latest_ms)
        return Counter(word for word, _ in results.values())


class DeadLetterSearch(Search):
    """Bulk operations on the dead letters of one group or of all groups."""

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
        dead_letter = task.dead.get(key[1])
        if dead_letter is None or dead_letter.newest_id >= bulk.until_id:
            return None
        return selector.reason in dead_letter.reason.casefold() and selector.fits(task.row)

    def refusals(self, bulk: Bulk, result: SliceResult) -> list[str | None]:
        now_ms, ttl_ms = self._runner.clock.read().now_ms, _ttl_ms(bulk)
        refusal_reason = self._control.dead_letter_refusal_reason
        return [
            refusal_reason(bulk.kind, result.tasks[i], now_ms, ttl_ms) for i, _ in result.matched
        ]

    def act(self, bulk: Bulk, result: SliceResult, view: View) -> Counter[str]:
        outcomes, now_ms = Counter[str](), self._runner.clock.read().now_ms
        settle, ttl_ms = self._control.settle_dead, _ttl_ms(bulk)
        for task_id, group in result.matched:
            # View each task again, because settling the dead letter of another group may have
            # changed it.
            task = view([task_id]).get(task_id)
            outcomes[settle(bulk.kind, task_id, group, task, now_ms, ttl_ms)] += 1
        return outcomes


def _ttl_ms(bulk: Bulk) -> int | None:
    """Return the new time to live of requeued tasks in ms, or None to keep their own."""
    ttl_ms = bulk.argument("ttl_ms")
    return None if ttl_ms is None else int(ttl_ms)


def _ids(keys: Sequence[Place]) -> list[int]:
    """Return the distinct task ids of these places."""
    return list(dict.fromkeys(key[0] for key in keys))


def _keys_read(keys: Sequence[Place], rest: Sequence[int]) -> list[Place]:
    """Return the keys before the first one whose id is in ``rest``, the ids that were not read."""
    unread = frozenset(rest)
    return list(takewhile(lambda key: key[0] not in unread, keys))


# --- the operations ------------------------------------------------------------------------------

STATES = {state.name.lower(): state for state in BulkState}


class Bulks:
    """Handles requests to create, preview, cancel, show and list bulk operations."""

    def __init__(
        self, parts: Parts, runner: Runner, listings: SlowRequests, value_bytes: ValueBytes
    ) -> None:
        self._parts = parts
        self._bulks = parts.engine.bulks
        self._runner = runner
        self._listings = listings
        self._value_bytes = value_bytes

    def make_bulk(self, call: Call[NewBulk]) -> None:
        """Start a bulk operation in the background, and answer when its record is durable. Raise
        BadRequest, LimitExceeded, DueTooFar; answer with Conflict, NotFound, Overloaded when the
        queued request is processed."""
        core, now = self._parts.core, call.now
        wanted = self._checked(call.request, call.request.id, now)
        # Fix the selection now, so that tasks enqueued while the request is queued are not
        # affected.
        until_id = core.ids.last
        if wanted.kind in DEAD_LETTER_KINDS:
            # Take an id, so that dead letters created from now on have a higher ``newest_id``.
            until_id = core.ids.take(1, now.now_ms)
        wanted = wanted._replace(by=call.caller.principal.name or "anonymous", until_id=until_id)
        checks.storable_bulk(wanted)

        def make() -> BulkRow:
            # With several shards, each registers the id, even without tasks of the topic.
            if wanted.topic not in core.topics and core.versions.shards == 1:
                raise NotFound(f"there is no topic {wanted.topic}")
            check_room(core)
            return self._parts.border.act().bulks.make(wanted)

        submit(self._parts, self._runner, call, wanted, make)

    def preview_bulk(self, call: Call[BulkTrial]) -> None:
        """Answer with one part of a dry run, beginning after ``after``. Pass ``next`` from the
        answer to get the next part. Passing ``until_id`` and ``until_ms`` from the first answer
        keeps the selection the same. Raise BadRequest, LimitExceeded, DueTooFar, Overloaded."""
        bulk = self._checked(call.request, call.request.id, call.now)
        place, until_id = call.request.after or START, call.request.until_id
        if call.request.until_ms is not None:
            bulk = bulk._replace(made_ms=call.request.until_ms)

        async def part() -> dict[str, Any]:
            parts = self._parts
            await parts.committer.barrier()
            until = parts.core.ids.last + 1 if until_id is None else until_id
            trial = bulk._replace(until_id=until)
            if trial.topic not in parts.core.topics:
                raise NotFound(f"there is no topic {trial.topic}")
            preview = await self._runner.preview(trial, place)
            return {
                "looked_at": preview.looked_at,
                "matched": preview.matched,
                "refused": dict(preview.refused),
                "examples": preview.examples,
                "until_id": until,
                "until_ms": trial.made_ms,
                "next": None if preview.is_over else preview.place,
            }

        self._listings.answer(call, part)

    def cancel_bulk(self, call: Call[BulkName]) -> None:
        """Cancel a bulk operation that has not ended, keeping its changes. Raise NotFound."""
        name = call.request.bulk

        def process() -> None:
            row = self._find(name, call.topic_filter)
            if not row.state.is_over:
                bulks = self._parts.border.act().bulks
                row = bulks.end(name, BulkState.CANCELLED, *call.now)
            self._parts.committer.answer(call, bulk_map(row))

        self._parts.commands.put_last(call, process)

    def show_bulk(self, call: Call[BulkName]) -> None:
        """Answer with a bulk operation and its progress. Raise NotFound."""
        row = self._find(call.request.bulk, call.topic_filter)
        self._parts.committer.answer(call, bulk_map(row))

    def list_bulk(self, call: Call[BulkPage]) -> None:
        """Answer with a page of bulk operations, newest first. Raise NotFound."""
        request, topic_filter = call.request, call.topic_filter
        topic, state = request.topic, request.state
        rows = list(reversed(self._bulks.rows.values()))
        if request.after is not None:
            rows = rows[rows.index(self._find(request.after, topic_filter)) + 1 :]
        maps = (
            bulk_map(row)
            for row in rows
            if _is_visible(row, topic_filter)
            and topic in (None, row.bulk.topic)
            and (state is None or row.state is STATES[state])
        )
        page = Page(self._parts, request.limit, self._value_bytes)
        self._parts.committer.answer(call, page.answer(maps, "bulk", "id"))

    def _find(self, name: str, topic_filter: TopicFilter | None) -> BulkRow:
        row = self._bulks.rows.get(name)
        if row is None or not _is_visible(row, topic_filter):
            raise NotFound(
                f"there is no bulk operation {name}, or it ended so long ago that its record was"
                " removed"
            )
        return row

    # --- checks of requests ----------------------------------------------------------------------

    def _checked(self, fields: BulkFields, chosen_id: str | None, now: Now) -> Bulk:
        """Check the fields, and return the bulk operation. Raise BadRequest, LimitExceeded,
        DueTooFar."""
        kind, options = fields.kind, options_of(fields.kind)
        for name in fields.values(BulkFields):
            if name not in options and name not in ("topic", "kind"):
                raise BadRequest(_unknown_field(kind, name))
        return Bulk(
            id=chosen_id or f"{kind}-{secrets.token_hex(6)}",
            kind=kind,
            topic=fields.topic,
            selection=_selection(fields),
            # Keep the arguments as requested, so that a resend can be recognized by them.
            arguments=tuple(checks.moved(kind, fields, now.now_ms, self._parts.limits).items()),
            rate=fields.rate,
            made_ms=now.now_ms,
            until_id=0,
        )


def check_room(core: Core) -> None:
    """Raise Overloaded if the maximum number of bulk operations is running."""
    subject = "bulk operations are running"
    checks.check_limit(Overloaded, core.bulk_running, subject, core.config, "bulk_max")


def submit(
    parts: Parts, runner: Runner, call: Call[Any], wanted: Bulk, make: Callable[[], BulkRow]
) -> None:
    """Queue the request. When it is processed, create the bulk operation with ``make`` and run it,
    unless its id is known; then answer with the bulk operation. The answer is Conflict if a
    different bulk operation has the id, or the error of ``make``."""

    def process() -> None:
        row = parts.engine.bulks.rows.get(wanted.id)
        if row is not None and not row.bulk.is_same(wanted):
            raise Conflict(f"another bulk operation has the id {wanted.id}; choose a new id")
        if row is None:
            row = make()
            runner.begin(wanted.id)
        parts.committer.answer(call, bulk_map(row))

    parts.commands.put_last(call, process)


def bulk_map(row: BulkRow) -> dict[str, Any]:
    """Return a bulk operation as the map that all answers use."""
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


def _selection(request: BulkFields) -> Selection:
    checks.check_can_hold(checks.filter_of(request.tags, request.where))
    values = {name: getattr(request, name) for name in Selection._fields}
    return Selection(**{name: value for name, value in values.items() if value is not None})


def _unknown_field(kind: str, name: str) -> str:
    options = ", ".join(options_of(kind))
    hint = ""
    if kind in DEAD_LETTER_KINDS and name == "state":
        hint = f"; {kind} changes dead letters: use cancel for pending tasks"
    return (
        f"a bulk operation of kind {kind} has no field {checks.shown(name)}; its fields are"
        f" {options}{hint}"
    )


def _is_visible(row: BulkRow, topic_filter: TopicFilter | None) -> bool:
    return topic_filter is None or topic_filter(row.bulk.topic)
