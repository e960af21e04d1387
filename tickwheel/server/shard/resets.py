"""Runs resets of groups, which give a group its past tasks again, and their dry runs.

A reset is a bulk operation (``bulk.py`` lists, shows and cancels it). It first creates a *plan*
(``history/reset_plan.py``). If a history is kept, a separate process reads it up to the event of
this reset. Then the daemon adds stored tasks of the topic that the history does not contain. The
plan is an unlinked file, which disappears with the daemon. After a restart a new plan is created,
with the same tasks from the history. The reset then enqueues the tasks of the plan by due time at
the bulk operation's rate. The tasks of a step and the new position are in one commit.

A dry run creates the same plan, up to now, and counts its tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sqlite3
import tempfile
from asyncio.subprocess import PIPE
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tickwheel.api.bulk import TIME_MS_MAX
from tickwheel.engine.groups import Original
from tickwheel.engine.tasks import RESET
from tickwheel.errors import BadRequest, Conflict, Overloaded, Refused
from tickwheel.history import reset_plan
from tickwheel.history.daemon import kill
from tickwheel.history.reset_plan import Plan, ResetScope
from tickwheel.history.segments import STATE, safe_node
from tickwheel.model.kinds import Bulk, BulkState, Selection
from tickwheel.server import checks
from tickwheel.server.shard.bulk import PAGE, SLICE, check_room, submit
from tickwheel.server.shard.groups import find_group
from tickwheel.server.shard.reads import when_back
from tickwheel.waiting import in_thread

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Callable, Sequence

    from tickwheel.api.groups import Reset, ResetTrial
    from tickwheel.clock import Now
    from tickwheel.engine.tasks import Step
    from tickwheel.engine.topics import Group
    from tickwheel.history.reset_plan import Count, PlannedTask
    from tickwheel.model.kinds import BulkRow, Place
    from tickwheel.model.records import TaskRow
    from tickwheel.server.shard.bulk import Runner, Work
    from tickwheel.server.shard.callers import Call
    from tickwheel.server.shard.parts import Parts, SlowRequests
    from tickwheel.server.shard.reads import BulkReads

T = TypeVar("T")
STEP_BYTES_MAX = 4 << 20
"""Maximum bytes of tasks in one step. A single task can exceed it."""
NO_ROOM_RETRY_S = 0.25
CHECK_S = 0.25
"""Seconds between two checks whether a plan in progress is still needed."""


class CannotPlan(Exception):
    """The plan of a reset cannot be created. The text is the reason."""


class PlanThread:
    """A plan of a reset, and the only thread that uses it. Its callers can be cancelled."""

    def __init__(self, path: str, bytes_max: int) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reset")
        self._opening = self._thread.submit(_open, path, bytes_max)

    async def do(self, act: Callable[..., T], *args: object) -> T:
        """Call a method of ``Plan`` in the thread and return its result. Raise sqlite3.Error, also
        if the plan cannot be opened."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._do, act, *args)

    def _do(self, act: Callable[..., T], *args: object) -> T:
        return act(self._opening.result(), *args)

    def close(self) -> None:
        """Close the plan once the running call has ended."""
        self._thread.submit(self._do, Plan.close)
        self._thread.shutdown(wait=False)


def _open(path: str, bytes_max: int) -> Plan:
    """Open the file of a plan and unlink it. Its space is freed when it is closed, no matter how
    this process ends. Without a path, the file is temporary."""
    try:
        return Plan(path, bytes_max)
    finally:
        if path:
            _unlink(path)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _create_file(folder: Path, prefix: str) -> str:
    """Create the empty file of a plan and return its path. Raise OSError."""
    # Plans are created one at a time and unlinked, so these files were left by a killed daemon.
    for leftover in folder.glob(f"{prefix}*.plan"):
        leftover.unlink(missing_ok=True)
    handle, path = tempfile.mkstemp(".plan", prefix, folder)
    os.close(handle)
    return path


class Resets:
    """Executes resets and their dry runs."""

    def __init__(self, runner: Runner, previews: SlowRequests) -> None:
        """``previews`` is the queue of dry runs."""
        self._runner = runner
        self._engine = runner.engine
        self._settings = runner.parts.settings
        self.previews = previews
        self._plan_lock = asyncio.Lock()
        self.plans = 0
        """Number of existing plans."""

    # --- the bulk operation ---------------------------------------------------------------------

    async def run(self, work: Work) -> None:
        """See ``bulk.BulkKind``."""
        group = self._engine.core.find_group(work.bulk.topic, str(work.bulk.argument("group")))
        if group is None or group.is_closed:
            self._fail_deleted(work)
            return
        wanted = scope_of(work.bulk, group, work.bulk.id)
        try:
            async with self.plan(wanted, work.bulk.until_id, lambda: work.is_running) as plan:
                if gaps := (await plan.do(Plan.count)).incomplete:
                    work.note = incomplete(gaps)
                while work.is_running and await self._enqueue_some(work, group, plan):
                    pass
        except CannotPlan as error:
            self._fail(work, f"its tasks cannot be determined: {error}")

    def _fail_deleted(self, work: Work) -> None:
        name, topic = work.bulk.argument("group"), work.bulk.topic
        self._fail(work, f"group {name} of topic {topic} was deleted")

    def _fail(self, work: Work, note: str) -> None:
        if work.is_running:
            now = self._runner.clock.read()
            self._engine.bulks.end(work.bulk.id, BulkState.FAILED, *now, note)
            self._runner.committer.kick()

    async def _enqueue_some(self, work: Work, group: Group, plan: PlanThread) -> bool:
        """Enqueue some tasks in one step. Return False if the plan contains no more tasks."""
        await work.wait_for_rate()
        room = self._engine.core.room
        if room <= 0 or not self._runner.parts.accepts_tasks():
            await asyncio.sleep(NO_ROOM_RETRY_S)
            return True
        after, most = place_after(work.row.place), max(1, work.allowed(min(PAGE, room)))
        async with self._runner.reader.bulk_turn() as read:
            kept = await plan.do(Plan.read, after, most, STEP_BYTES_MAX)
            if not kept:
                return False
            tasks, originals = await self._originals(kept, read)
            async with self._runner.slice():
                if group.is_closed:  # a group that was created again is another one
                    self._fail_deleted(work)
                if not work.is_running:
                    return False
                work.change(partial(self._step, work.bulk, group, tasks, originals))
        await work.wait_until_durable()
        return True

    def _step(
        self, bulk: Bulk, group: Group, tasks: Sequence[PlannedTask], originals: Sequence[Original]
    ) -> Step:
        now_ms, lost = self._runner.clock.read().now_ms, len(tasks) - len(originals)
        place = place_of(tasks[-1])
        repeat = self._engine.resets.repeat
        return repeat(bulk, group.name, originals, place, len(tasks), lost, now_ms)

    async def _originals(
        self, kept: list[PlannedTask], reads: BulkReads
    ) -> tuple[list[PlannedTask], list[Original]]:
        """Return (the first tasks, as many as one read suffices for; the originals of those that
        have a body)."""
        without_body = [task.id for task in kept if task.body is None]
        rows: dict[int, TaskRow] = {}
        if without_body:
            async with reads(without_body, bodies=True) as (view, rest):
                read_ids = without_body[: len(without_body) - len(rest)]
                rows = {i: snapshot.row for i, snapshot in view(read_ids).items()}
            if rest:
                kept = kept[: [task.id for task in kept].index(rest[0])]
        originals = []
        for task in kept:
            row = rows.get(task.id)
            if task.body is not None:
                originals.append(Original(task.id, task.options, task.body))
            elif row is not None:
                originals.append(Original(task.id, row.options, row.body))
        return kept, originals

    # --- the plan ------------------------------------------------------------------------------

    async def count(self, wanted: ResetScope, until_id: int) -> Count:
        """Count the tasks that a reset would enqueue now. Raise CannotPlan."""
        async with self.plan(wanted, until_id, lambda: True) as plan:
            return await plan.do(Plan.count)

    @asynccontextmanager
    async def plan(
        self, wanted: ResetScope, until_id: int, is_wanted: Callable[[], bool]
    ) -> AsyncIterator[PlanThread]:
        """Create a plan, one at a time, and close it after use. Raise CannotPlan, even during
        use."""
        self.plans += 1
        try:
            async with self._plan_lock:
                plan = await self._from_history(wanted, is_wanted)
                try:
                    await self._from_store(plan, wanted, until_id, is_wanted)
                    await plan.do(Plan.finish)
                except BaseException:
                    plan.close()
                    raise
            try:
                yield plan
            finally:
                plan.close()
        except sqlite3.Error as error:
            raise self._as_cannot_plan(str(error)) from error
        finally:
            self.plans -= 1

    def _as_cannot_plan(self, why: str) -> CannotPlan:
        if "full" in why:
            why += f"; the limit of a plan is {self._settings.reset_plan_bytes_max} bytes"
            why += " (reset_plan_bytes_max)"
        return CannotPlan(why)

    async def _from_history(self, wanted: ResetScope, is_wanted: Callable[[], bool]) -> PlanThread:
        settings = self._settings
        if settings.history_dir is None:
            return PlanThread("", settings.reset_plan_bytes_max)
        shard, folder = self._engine.core.config.shard, Path(settings.history_dir) / STATE
        prefix = f"reset-{safe_node(settings.node)}-s{shard}-"
        try:
            # In threads, because the disk of the history can be slow or hang.
            path = await in_thread(partial(_create_file, folder, prefix))
        except OSError as error:
            raise CannotPlan(f"{folder}: {error.strerror}") from None
        try:
            request = reset_plan.request(
                path, settings.history_dir, shard, settings.reset_plan_bytes_max, wanted
            )
            try:
                await _make_file(request, is_wanted)
            except CannotPlan as error:
                raise self._as_cannot_plan(str(error)) from None
        except BaseException:
            await in_thread(partial(_unlink, path))
            raise
        return PlanThread(path, settings.reset_plan_bytes_max)

    async def _from_store(
        self, plan: PlanThread, wanted: ResetScope, until_id: int, is_wanted: Callable[[], bool]
    ) -> None:
        """Add the stored tasks of the topic to the plan."""
        after, is_last = 0, False
        while not is_last and is_wanted():
            read_ids = partial(self._runner.reader.ids_after, after, PAGE, wanted.topic)
            ids, is_last = await when_back(read_ids)
            after = ids[-1] if ids else after
            is_last |= after > until_id
            rest: Sequence[int] = [task_id for task_id in ids if task_id <= until_id]
            while rest:
                async with self._runner.reader.bulk_turn() as read:
                    stored, rest = await self._examine(wanted, rest, read)
                if stored:
                    await plan.do(Plan.add_stored, wanted, stored)

    async def _examine(
        self, wanted: ResetScope, ids: Sequence[int], reads: BulkReads
    ) -> tuple[list[tuple[TaskRow, bool]], Sequence[int]]:
        """Return (the first of these tasks that came due in the period, each with whether it can be
        repeated; the ids that are left)."""
        slice_ids, later = ids[:SLICE], ids[SLICE:]
        async with reads(slice_ids) as (view, rest), self._runner.slice():
            group = self._engine.core.find_group(wanted.topic, wanted.group)
            if group is None:
                return [], ()
            can_repeat = self._engine.resets.can_repeat
            rows = [
                (task.row, can_repeat(group, task))
                for task in view(slice_ids[: len(slice_ids) - len(rest)]).values()
                if wanted.covers(task.row.due_ms)
            ]
        return rows, [*rest, *later]


async def _make_file(request: bytes, is_wanted: Callable[[], bool]) -> None:
    """Run the process that creates the plan's file. Raise CannotPlan."""
    try:
        process = await asyncio.create_subprocess_exec(
            *reset_plan.command(), stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
    except OSError as error:
        raise CannotPlan(f"the process cannot be started: {error.strerror}") from None
    ending = asyncio.create_task(_outcome(process, request))
    try:
        while not ending.done():
            await asyncio.wait((ending,), timeout=CHECK_S)
            if not is_wanted():
                raise CannotPlan("the reset was cancelled")
        output, errors = ending.result()
        if process.returncode or output != b"done\n":
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            raise CannotPlan(lines[-1] if lines else f"exit code {process.returncode}")
    finally:
        if not ending.done():
            kill(process)
            await asyncio.gather(ending, return_exceptions=True)


async def _outcome(process: Process, request: bytes) -> tuple[bytes, bytes]:
    """Send the request, and return the process's output and errors after its end. The process
    exits when its standard input ends, so the input stays open until then."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write(request)
    output, errors = await asyncio.gather(process.stdout.read(), process.stderr.read())
    await process.wait()
    process.stdin.close()
    return output, errors


def incomplete(gaps: int) -> str:
    """Return the note that a reset gets if the history has gaps."""
    count = "a gap" if gaps == 1 else f"{gaps} gaps"
    return f"incomplete: the history has {count} in that time, so tasks may be left out"


def scope_of(bulk: Bulk, group: Group, bulk_id: str | None = None) -> ResetScope:
    """Return the conditions that the tasks in the plan of a reset must meet."""
    from_ms = bulk.argument("from_ms")
    return ResetScope(
        bulk.topic,
        group.name,
        int(from_ms or 0),
        bulk.made_ms,
        bulk_id,
        group.since_ms,
        group.since_id,
        group.settings.tags,
        group.settings.where,
    )


def place_of(kept: PlannedTask) -> Place:
    """Return the position of a task for the bulk operation's row. Positions ascend with due
    times."""
    return kept.due_ms, f"{kept.id:020d}"


def place_after(place: Place) -> tuple[int, int]:
    due_ms, task_id = place
    return due_ms, int(task_id or -1)


# --- the operations ------------------------------------------------------------------------------


class Resetting:
    """The operations that reset groups."""

    def __init__(self, parts: Parts, runner: Runner, resets: Resets) -> None:
        self._parts = parts
        self._bulks = parts.engine.bulks
        self._runner = runner
        self._resets = resets

    def reset_group(self, call: Call[Reset]) -> None:
        """Start a reset of the group to ``to``, and answer when its record is durable. Raise
        BadRequest; answer with Conflict, NotFound, Overloaded, Refused when the queued request is
        processed."""
        wanted = self._checked(call.request, call.request.id, call.request.rate, call.now)
        wanted = wanted._replace(by=call.caller.principal.name or "anonymous")
        checks.storable_bulk(wanted)

        def make() -> BulkRow:
            parts, group = self._parts, self._find_group(wanted)
            self._check_room(wanted)
            bulk = wanted._replace(until_id=parts.core.ids.last)
            return parts.border.act().resets.begin(group, bulk, from_ms_of(bulk))

        submit(self._parts, self._runner, call, wanted, make)

    def preview_reset(self, call: Call[ResetTrial]) -> None:
        """Answer with the result of a dry run: the number of tasks, and the due times of the first
        and the last. ``lost`` counts additional tasks whose bodies are lost, ``incomplete`` the
        gaps of the history in that time. Raise BadRequest, Overloaded; answer with NotFound,
        Refused when the queued request is processed."""
        wanted = self._checked(call.request, None, None, call.now)

        async def count() -> dict[str, Any]:
            parts = self._parts
            await parts.committer.barrier()
            bulk = wanted._replace(until_id=parts.core.ids.last)
            conditions = scope_of(bulk, self._find_group(bulk))
            try:
                counts = await self._resets.count(conditions, bulk.until_id)
            except CannotPlan as error:
                raise Refused(f"the tasks of the reset cannot be determined: {error}") from None
            return {
                **asdict(counts),
                "from_ms": from_ms_of(bulk),
                "until_ms": bulk.made_ms,
            }

        self._resets.previews.answer(call, count)

    def _checked(
        self, request: ResetTrial, chosen_id: str | None, rate: float | None, now: Now
    ) -> Bulk:
        """Check a request, and return the bulk operation of the reset. Raise BadRequest."""
        to = request.to
        if to != "first" and type(to) is not int:
            checks.wrong("to", "'first' or milliseconds", to)
        from_ms = 0 if to == "first" else checks.integer(to, "to", 0, TIME_MS_MAX)
        if from_ms > now.now_ms:
            raise BadRequest(
                f"to must be a time in the past, not {from_ms - now.now_ms} ms in the future"
            )
        return Bulk(
            id=chosen_id or f"{RESET}-{secrets.token_hex(6)}",
            kind=RESET,
            topic=request.topic,
            selection=Selection(),
            arguments=(("group", request.group), ("from_ms", from_ms)),
            rate=rate,
            made_ms=now.now_ms,
            until_id=0,
        )

    def _find_group(self, bulk: Bulk) -> Group:
        return find_group(self._parts.core, bulk.topic, str(bulk.argument("group")))

    def _check_room(self, bulk: Bulk) -> None:
        check_room(self._parts.core)
        resets = 0
        for name, row in self._bulks.rows.items():
            if row.state.is_over or row.bulk.kind != RESET:
                continue
            resets += 1
            if row.bulk.topic == bulk.topic and row.bulk.argument("group") == bulk.argument(
                "group"
            ):
                raise Conflict(
                    f"bulk operation {name} is already resetting this group;"
                    " wait for it or cancel it"
                )
        checks.check_limit(
            Overloaded, resets, "resets are running", self._parts.settings, "resets_max"
        )


def from_ms_of(bulk: Bulk) -> int:
    return int(bulk.argument("from_ms") or 0)
