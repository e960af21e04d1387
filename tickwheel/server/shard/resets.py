"""Resets of groups: made as bulk operations (``bulk.py`` lists, shows and cancels them), or tried
without giving anything. What a group is given again is found out, then given, step by step.

First a *plan* is made (``history/past.py``): where there is a history, by a process of its own, up
to the event of this very reset; then the daemon looks through the tasks of the topic that its store
still has, and adds those that the history does not know. The plan lies in a file without a name and
goes with the daemon; after a restart it is made anew, and says the same of all that the history
knows. Then the plan is worked off by due times at the bulk operation's rate: the tasks of a step
and how far the bulk operation is are one commit.

A dry run makes the same plan, up to now, and counts it.
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
from tickwheel.history import past
from tickwheel.history.daemon import kill
from tickwheel.history.past import Plan, Wanted
from tickwheel.history.segments import STATE, safe_node
from tickwheel.model.kinds import Bulk, BulkState, Selection
from tickwheel.server import checks
from tickwheel.server.shard.bulk import PAGE, SLICE, begin, check_room
from tickwheel.server.shard.groups import found_group
from tickwheel.server.shard.reads import when_back

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from tickwheel.api.groups import Reset, ResetTrial
    from tickwheel.clock import Now
    from tickwheel.engine.tasks import Step
    from tickwheel.engine.topics import Group
    from tickwheel.history.past import Count, Kept
    from tickwheel.model.kinds import BulkRow, Place
    from tickwheel.model.records import TaskRow
    from tickwheel.server.shard.bulk import Runner, Work
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.parts import Listings, Parts
    from tickwheel.server.shard.reads import BulkReads

T = TypeVar("T")
GIVE_BYTES = 4 << 20
"""Bytes of tasks that one step gives; one task may exceed them."""
NO_ROOM_RETRY_S = 0.25
LOOK_S = 0.25
"""How often, in seconds, a plan in the making is checked for being wanted."""


class CannotPlan(Exception):
    """The plan of a reset cannot be made; the text says why."""


class Planned:
    """A plan of a reset, and the thread that alone touches it: a waiting caller may be cut off."""

    def __init__(self, path: str, bytes_max: int) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reset")
        self._plan = Plan(path, bytes_max)

    async def do(self, act: Callable[..., T], *args: object) -> T:
        """What a method of ``Plan`` returns."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, act, self._plan, *args)

    def close(self) -> None:
        """Close the plan when what is under way is over."""
        self._thread.submit(self._plan.close)
        self._thread.shutdown(wait=False)


class Resets:
    """The bulk operations that give groups their tasks again, and their dry runs."""

    def __init__(self, runner: Runner, previews: Listings) -> None:
        """``previews``: dry runs that wait for their turn."""
        self._runner = runner
        self._engine = runner.engine
        self._settings = runner.parts.settings
        self.previews = previews
        self._making = asyncio.Lock()
        self.plans = 0
        """How many plans there are now."""

    # --- the bulk operation ---------------------------------------------------------------------

    async def run(self, work: Work) -> None:
        """See ``bulk.Kind``."""
        group = self._group(work)
        if group is None:
            return
        wanted = wanted_of(work.bulk, group, mark=work.bulk.id)
        try:
            async with self.plan(wanted, work.bulk.until_id, lambda: work.is_wanted) as plan:
                if gaps := (await plan.do(Plan.count)).incomplete:
                    work.note = incomplete(gaps)
                while work.is_wanted and await self._some(work, plan):
                    pass
        except CannotPlan as error:
            self._fail(work, f"what it would give cannot be found out: {error}")

    def _group(self, work: Work) -> Group | None:
        """The group of a reset; None: it was deleted, and so the bulk operation has failed."""
        name = str(work.bulk.argument("group"))
        group = self._engine.core.find_group(work.bulk.topic, name)
        if group is None or group.is_closed:
            self._fail(work, f"group {name} of topic {work.bulk.topic} was deleted")
            return None
        return group

    def _fail(self, work: Work, note: str) -> None:
        if work.is_wanted:
            now_ms = self._runner.clock.read().now_ms
            self._engine.bulks.end(work.bulk.id, BulkState.FAILED, now_ms, note)
            self._runner.committer.kick()

    async def _some(self, work: Work, plan: Planned) -> bool:
        """Give some tasks in one step. False: there are no more."""
        await work.paced()
        room = self._engine.core.room
        if room <= 0 or not self._runner.parts.takes_tasks():
            await asyncio.sleep(NO_ROOM_RETRY_S)
            return True
        after, most = after_of(work.row.place), max(1, work.left(min(PAGE, room)))
        async with self._runner.reader.bulk_turn() as read:
            kept = await plan.do(Plan.read, after, most, GIVE_BYTES)
            if not kept:
                return False
            some, originals = await self._originals(kept, read)
            async with self._runner.slice():
                group = self._group(work)
                if not work.is_wanted or group is None:
                    return False
                work.change(partial(self._step, work.bulk, group, some, originals))
        await work.durable()
        return True

    def _step(
        self, bulk: Bulk, group: Group, some: Sequence[Kept], originals: Sequence[Original]
    ) -> Step:
        now_ms, lost = self._runner.clock.read().now_ms, len(some) - len(originals)
        place = place_of(some[-1])
        give = self._engine.resets.give
        return give(bulk, group.name, originals, place, len(some), lost, now_ms)

    async def _originals(
        self, kept: list[Kept], reads: BulkReads
    ) -> tuple[list[Kept], list[Original]]:
        """The tasks whose originals could be read now, and the originals of those with bodies."""
        lacking = [one.id for one in kept if one.body is None]
        found: dict[int, TaskRow] = {}
        if lacking:
            async with reads(lacking, bodies=True) as (view, rest):
                read = lacking[: len(lacking) - len(rest)]
                found = {i: known.row for i, known in view(read).items()}
            if rest:
                kept = kept[: [one.id for one in kept].index(rest[0])]
        originals = []
        for one in kept:
            row = found.get(one.id)
            if one.body is not None:
                originals.append(Original(one.id, one.options, one.body))
            elif row is not None:
                originals.append(Original(one.id, row.options, row.body))
        return kept, originals

    # --- the plan ------------------------------------------------------------------------------

    async def count(self, wanted: Wanted, until_id: int) -> Count:
        """A dry run: what a reset would give now. Raises CannotPlan."""
        async with self.plan(wanted, until_id, lambda: True) as plan:
            return await plan.do(Plan.count)

    @asynccontextmanager
    async def plan(
        self, wanted: Wanted, until_id: int, is_wanted: Callable[[], bool]
    ) -> AsyncIterator[Planned]:
        """Make a plan, one at a time, and close it later. Raises CannotPlan, also while in use."""
        self.plans += 1
        try:
            async with self._making:
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
            raise self._cannot(str(error)) from error
        finally:
            self.plans -= 1

    def _cannot(self, why: str) -> CannotPlan:
        if "full" in why:
            why += f"; a plan may have {self._settings.reset_plan_bytes_max} bytes"
            why += " (reset_plan_bytes_max)"
        return CannotPlan(why)

    async def _from_history(self, wanted: Wanted, is_wanted: Callable[[], bool]) -> Planned:
        settings = self._settings
        if settings.history_dir is None:
            return Planned("", settings.reset_plan_bytes_max)
        shard, folder = self._engine.core.config.shard, Path(settings.history_dir) / STATE
        prefix = f"reset-{safe_node(settings.node)}-s{shard}-"
        try:
            # One is made at a time, and has no name afterwards: a kill has left these.
            for left in folder.glob(f"{prefix}*.plan"):
                left.unlink(missing_ok=True)
            handle, path = tempfile.mkstemp(".plan", prefix, folder)
        except OSError as error:
            raise CannotPlan(f"{folder}: {error.strerror}") from None
        os.close(handle)
        try:
            given = past.request(
                path, settings.history_dir, shard, settings.reset_plan_bytes_max, wanted
            )
            try:
                await _made(given, is_wanted)
            except CannotPlan as error:
                raise self._cannot(str(error)) from None
            return Planned(path, settings.reset_plan_bytes_max)
        finally:
            # It is open: what it holds goes when it is closed, however this process ends.
            with contextlib.suppress(OSError):
                os.unlink(path)

    async def _from_store(
        self, plan: Planned, wanted: Wanted, until_id: int, is_wanted: Callable[[], bool]
    ) -> None:
        """Add the tasks of the topic that other groups still have to the plan."""
        after, is_last = 0, False
        while not is_last and is_wanted():
            read_ids = partial(self._runner.reader.ids_after, after, PAGE, wanted.topic)
            ids, is_last = await when_back(read_ids)
            after = ids[-1] if ids else after
            is_last |= after > until_id
            rest: Sequence[int] = [task_id for task_id in ids if task_id <= until_id]
            while rest:
                async with self._runner.reader.bulk_turn() as read:
                    stored, rest = await self._look(wanted, rest, read)
                if stored:
                    await plan.do(Plan.meet, wanted, stored)

    async def _look(
        self, wanted: Wanted, ids: Sequence[int], reads: BulkReads
    ) -> tuple[list[tuple[TaskRow, bool]], Sequence[int]]:
        """Which of the first of these tasks came due in the time, and whether the group may have
        them; and the ids that are left."""
        some, later = ids[:SLICE], ids[SLICE:]
        async with reads(some) as (view, rest), self._runner.slice():
            group = self._engine.core.find_group(wanted.topic, wanted.group)
            if group is None:
                return [], ()
            may_have = self._engine.resets.may_have
            found = [
                (known.row, may_have(group, known))
                for known in view(some[: len(some) - len(rest)]).values()
                if wanted.covers(known.row.due_ms)
            ]
        return found, [*rest, *later]


async def _made(given: bytes, is_wanted: Callable[[], bool]) -> None:
    """Wait until the process has made the plan's file. Raises CannotPlan."""
    try:
        process = await asyncio.create_subprocess_exec(
            *past.command(), stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
    except OSError as error:
        raise CannotPlan(f"no process can be started: {error.strerror}") from None
    ending = asyncio.create_task(process.communicate(given))
    try:
        while not ending.done():
            await asyncio.wait((ending,), timeout=LOOK_S)
            if not is_wanted():
                raise CannotPlan("it is not wanted any more")
        said, complaint = ending.result()
        if process.returncode or said != b"done\n":
            lines = complaint.decode("utf-8", "replace").strip().splitlines()
            raise CannotPlan(lines[-1] if lines else f"exit code {process.returncode}")
    finally:
        if not ending.done():
            kill(process)
            await asyncio.gather(ending, return_exceptions=True)


def incomplete(gaps: int) -> str:
    """The sentence that a reset says about gaps in the history."""
    which = "a gap" if gaps == 1 else f"{gaps} gaps"
    return f"incomplete: the history has {which} in that time, so tasks may be left out"


def wanted_of(bulk: Bulk, group: Group, mark: str | None = None) -> Wanted:
    """What the plan of a reset has to hold."""
    from_ms = bulk.argument("from_ms")
    return Wanted(
        bulk.topic,
        group.name,
        int(from_ms or 0),
        bulk.made_ms,
        mark,
        group.since_ms,
        group.since_id,
        group.settings.tags,
        group.settings.where,
    )


def place_of(kept: Kept) -> Place:
    """The place of a task in the bulk operation's row; it rises with due times."""
    return kept.due_ms, f"{kept.id:020d}"


def after_of(place: Place) -> tuple[int, int]:
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

    def reset_group(self, ask: Ask[Reset]) -> None:
        """Give the group again what came due since ``to``, in the background; answered with the
        bulk operation when it is durable. Raises BadRequest, and once its turn has come Conflict,
        NotFound, Overloaded, Refused."""
        wanted = self._checked(ask.request, ask.request.id, ask.request.rate, ask.now)
        wanted = wanted._replace(by=ask.caller.principal.name or "anonymous")
        checks.storable_bulk(wanted)

        def make() -> BulkRow:
            parts, known = self._parts, self._found(wanted)
            self._check_room(wanted)
            bulk = wanted._replace(until_id=parts.core.ids.last)
            return parts.border.act().resets.begin(known, bulk, from_ms_of(bulk))

        begin(self._parts, self._runner, ask, wanted, make)

    def preview_reset(self, ask: Ask[ResetTrial]) -> None:
        """What a reset would give now, without giving it: how many tasks, and the due times of the
        first and the last; ``lost``: of so many more nobody has the bodies; ``incomplete``: so
        many gaps the history has in the time. Raises BadRequest, Overloaded, and once its turn has
        come NotFound, Refused."""
        asked = self._checked(ask.request, None, None, ask.now)

        async def count() -> dict[str, Any]:
            parts = self._parts
            await parts.committer.barrier()
            bulk = asked._replace(until_id=parts.core.ids.last)
            try:
                found = await self._resets.count(wanted_of(bulk, self._found(bulk)), bulk.until_id)
            except CannotPlan as error:
                raise Refused(f"what a reset would give cannot be found out: {error}") from None
            return {
                **asdict(found),
                "from_ms": from_ms_of(bulk),
                "until_ms": bulk.made_ms,
            }

        self._resets.previews.answer(ask, count)

    def _checked(self, asked: ResetTrial, own: str | None, rate: float | None, now: Now) -> Bulk:
        """The checked bulk operation of a reset. Raises BadRequest."""
        to = asked.to
        if to != "first" and type(to) is not int:
            checks.wrong("to", "'first' or milliseconds", to)
        from_ms = 0 if to == "first" else checks.integer(to, "to", 0, TIME_MS_MAX)
        if from_ms > now.now_ms:
            raise BadRequest(
                f"to is {from_ms - now.now_ms} ms in the future: what comes due then comes anyway"
            )
        return Bulk(
            id=own or f"{RESET}-{secrets.token_hex(6)}",
            kind=RESET,
            topic=asked.topic,
            selection=Selection(),
            arguments=(("group", asked.group), ("from_ms", from_ms)),
            rate=rate,
            made_ms=now.now_ms,
            until_id=0,
        )

    def _found(self, bulk: Bulk) -> Group:
        return found_group(self._parts.core, bulk.topic, str(bulk.argument("group")))

    def _check_room(self, bulk: Bulk) -> None:
        check_room(self._parts.core)
        resets = 0
        for name, row in self._bulks.known.items():
            if row.state.is_over or row.bulk.kind != RESET:
                continue
            resets += 1
            if row.bulk.topic == bulk.topic and row.bulk.argument("group") == bulk.argument(
                "group"
            ):
                raise Conflict(
                    f"bulk operation {name} resets that group already; wait for it, or cancel it"
                )
        if resets >= self._parts.settings.resets_max:
            raise Overloaded(f"{resets} resets are running; the limit is {resets} (resets_max)")


def from_ms_of(bulk: Bulk) -> int:
    return int(bulk.argument("from_ms") or 0)
