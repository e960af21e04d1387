"""Client verbs that do more than send one request and return its answer.

All others are generated (``generated.py``) from their declarations. These verbs send several
requests, or return less than the daemon answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar, Unpack, overload

from tickwheel.api.bulk import BulkInfo, BulkPreview, BulkTrial
from tickwheel.api.frames import CatchUp, CountFrom, Fold, Gap, Overlap
from tickwheel.api.groups import GroupSettings
from tickwheel.api.kinds import BODY, IDS
from tickwheel.api.schedules import ScheduleInfo
from tickwheel.api.tasks import Explanation, LookUp, ScheduledTaskFields, TaskInfo, check_selection
from tickwheel.api.times import Duration, seconds
from tickwheel.api.verbs import VERBS
from tickwheel.client.checks import CheckHandler, Checks
from tickwheel.client.generated import GeneratedVerbs
from tickwheel.client.keywords import AnyMoveKeywords, AnySelectionKeywords, ScheduledTaskKeywords
from tickwheel.client.requests import check_filter, list_of, read
from tickwheel.client.tasks import refuse_unknown, spelled_out
from tickwheel.client.transactions import Transaction
from tickwheel.errors import BadRequest, LimitExceeded, SendTimeout, UnknownType, shown

LOOKUP_IDS_MAX = 256
"""Maximum ids of one LOOKUP; their bodies must fit into one answer."""
LOOK_S = 0.25
"""Seconds between two requests of ``wait_bulk``."""

H = TypeVar("H", bound=CheckHandler)


class HandwrittenVerbs(GeneratedVerbs):
    """Verbs for looking up tasks, bulk operations, schedules and transactions."""

    _checks: Checks

    # --- looking tasks up -----------------------------------------------------------------------

    @overload
    async def lookup(self, task_id: int, *, timeout: Duration | None = None) -> TaskInfo: ...

    @overload
    async def lookup(
        self,
        *,
        topic: str,
        key: str,
        newest: bool = False,
        not_after: datetime | None = None,
        timeout: Duration | None = None,
    ) -> list[TaskInfo]: ...

    async def lookup(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        newest: bool = False,
        not_after: datetime | None = None,
        timeout: Duration | None = None,
    ) -> TaskInfo | list[TaskInfo]:
        """Return a task's state. By topic and key: every unfinished task with that key, the newest
        first (``newest``: only the newest; ``not_after``: only tasks enqueued at that time or
        earlier), or else the last finished one that the daemon remembers."""
        check_selection(task_id, topic, key)
        if task_id is not None:
            return (await self.lookup_many([task_id], timeout=timeout))[0]
        request = {"topic": topic, "key": key, "newest": newest, "not_after": not_after}
        tasks: list[TaskInfo] = await self._ask("look_up", request, timeout)
        return tasks

    async def lookup_many(
        self, ids: Iterable[int], *, timeout: Duration | None = None
    ) -> list[TaskInfo]:
        """Return the state of each task, in the order of the ids."""
        until_s = self._until(timeout)
        wanted, tasks = IDS.of_python(ids, "ids"), list[TaskInfo]()
        for start in range(0, len(wanted), LOOKUP_IDS_MAX):
            tasks += await self._lookup(wanted[start : start + LOOKUP_IDS_MAX], until_s)
        return tasks

    async def _lookup(self, ids: list[int], until_s: float | None) -> list[TaskInfo]:
        verb = VERBS["look_up"]
        try:
            answer = await self._call(verb, LookUp.to_frame({"ids": ids}), until_s)
        except LimitExceeded:
            # The bodies are too large for one answer.
            if len(ids) == 1:
                raise
            half = len(ids) // 2
            return await self._lookup(ids[:half], until_s) + await self._lookup(ids[half:], until_s)
        return list_of(answer, len(ids), verb.answer)

    async def explain(
        self,
        task_id: int | None = None,
        *,
        topic: str | None = None,
        key: str | None = None,
        timeout: Duration | None = None,
    ) -> Explanation:
        """Return why a task is where it is: one ``cause``, a sentence (``detail``), and a command
        that resolves it. Select the task by id, or by topic and key: the newest unfinished task, a
        half task of a transaction, or the last finished task."""
        request = {"id": task_id, "topic": topic, "key": key}
        explanation: Explanation = await self._ask("explain", request, timeout)
        return explanation

    async def find(
        self,
        key: str,
        *,
        topic: str | None = None,
        not_after: datetime | None = None,
        timeout: Duration | None = None,
    ) -> TaskInfo | None:
        """Return the newest stored task with that key, enqueued at ``not_after`` or earlier, or
        None. Dead letters are stored, finished tasks are not. With ``topic`` the index of keys is
        used; without it all tasks are searched from the newest."""
        if topic is not None:
            # An older daemon, or a daemon with too many such tasks, needs the search below.
            with suppress(UnknownType, LimitExceeded):
                tasks = await self.lookup(
                    topic=topic, key=key, newest=True, not_after=not_after, timeout=timeout
                )
                return next((task for task in tasks if task.topic is not None), None)
        newest, time_s = None, None if timeout is None else seconds(timeout, "timeout")
        pages = self.list_tasks(
            topic=topic, key=key, not_after=not_after, newest_first=True, limit=1, timeout=timeout
        )
        try:
            async with asyncio.timeout(time_s):
                async for task in pages:
                    newest = task
        except TimeoutError:
            raise SendTimeout(f"the search took longer than {time_s:g} s") from None
        return newest

    async def pause(
        self, topic: str, group: str | None = None, *, timeout: Duration | None = None
    ) -> GroupSettings:
        """Deliver nothing until ``resume``, even after a restart of the daemon."""
        return await self.configure(topic, group, paused=True, timeout=timeout)

    async def resume(
        self, topic: str, group: str | None = None, *, timeout: Duration | None = None
    ) -> GroupSettings:
        """Deliver again after ``pause``."""
        return await self.configure(topic, group, paused=False, timeout=timeout)

    # --- bulk operations ------------------------------------------------------------------------

    @spelled_out(AnyMoveKeywords)
    async def preview_bulk(
        self,
        kind: str,
        topic: str,
        filter: AnySelectionKeywords,  # noqa: A002  # the name in the public API
        *,
        timeout: Duration | None = None,
        **moves: Unpack[AnyMoveKeywords],
    ) -> BulkPreview:
        """Return what a bulk operation of this ``kind`` ("cancel", "requeue", …: see BulkInfo)
        would do now, without changing anything. A large topic is read in parts, and ``timeout``
        applies to each. ``moves``: see AnyMoveKeywords, for a kind that moves tasks."""
        refuse_unknown(moves, AnyMoveKeywords, "Client.preview_bulk")
        check_filter(filter, AnySelectionKeywords, "preview_bulk")
        request = BulkTrial.of_keywords({"topic": topic, "kind": kind, **moves, **filter})
        await self._know_shards(self._until(timeout))
        return await self._preview(request, timeout)

    async def wait_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """Return the bulk operation once it is over. Raise NotFound, and SendTimeout if it is not
        over after ``timeout``."""
        loop = asyncio.get_running_loop()
        until_s = None if timeout is None else loop.time() + seconds(timeout, "timeout")
        while True:
            left_s = None if until_s is None else max(until_s - loop.time(), LOOK_S)
            bulk_info = await self.show_bulk(bulk, timeout=left_s)
            if bulk_info.is_over:
                return bulk_info
            if until_s is not None and loop.time() >= until_s:
                raise SendTimeout(
                    f"bulk operation {bulk} is still running; tasks changed: {bulk_info.changed}"
                )
            await asyncio.sleep(LOOK_S)

    # --- schedules ------------------------------------------------------------------------------

    @spelled_out(ScheduledTaskKeywords)
    async def put_schedule(
        self,
        name: str,
        *,
        topic: str,
        body: bytes = b"",
        cron: str | None = None,
        timezone: str | None = None,
        every: Duration | None = None,
        anchor: datetime | None = None,
        jitter: Duration | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        runs_max: int | None = None,
        gap: Gap | None = None,
        fold: Fold | None = None,
        catch_up: CatchUp | None = None,
        catch_up_window: Duration | None = None,
        overlap: Overlap | None = None,
        timeout: Duration | None = None,
        **options: Unpack[ScheduledTaskKeywords],
    ) -> ScheduleInfo:
        """Create a schedule, or change the schedule of that name; ``outcome`` says which. Repeating
        the same call changes nothing.

        Give ``cron`` (five fields, six with seconds first, ``@daily``, …) in ``timezone`` (IANA;
        default UTC), or the interval ``every``, counted from ``anchor``. ``jitter``: maximum
        additional delay, always the same for one occurrence. ``gap`` ("after", "skip") and
        ``fold`` ("first", "second", "both"): local times that a clock change skips or repeats.
        ``catch_up`` ("last", "skip", "all"): occurrences missed within ``catch_up_window`` (a day).
        ``overlap`` ("allow", "skip", "queue_one", "cancel_previous"): what to do while the previous
        task is unfinished. ``options``: see ScheduledTaskKeywords. Raise BadRequest,
        LimitExceeded.
        """
        refuse_unknown(options, ScheduledTaskKeywords, "Client.put_schedule")
        task = ScheduledTaskFields.of_keywords(options)
        # Leave empty options out: the daemon compares options to recognize an unchanged schedule.
        task = {
            n: value for n, value in task.items() if value or n not in ("priority", "properties")
        }
        if self._checker.codec is not None:
            # Pack into the same bytes each time, for the same reason.
            topic, body = self._checker.name(topic, "topic"), BODY.of_python(body, "body")
            packed = self._checker.packed(
                topic, body, task.pop("encoding", None), "task", repeatable=True
            )
            body, encoding = packed
            task |= {} if encoding is None else {"encoding": encoding}
        answer: ScheduleInfo = await self._ask(
            "put_schedule",
            {
                "name": name, "topic": topic, "body": body, "task": task or None, "cron": cron,
                "timezone": timezone, "every": every, "anchor": anchor, "jitter": jitter,
                "start": start, "end": end, "runs_max": runs_max, "gap": gap, "fold": fold,
                "catch_up": catch_up, "catch_up_window": catch_up_window, "overlap": overlap,
            },
            timeout,
        )  # fmt: skip
        return answer

    async def run_schedule(self, name: str, *, timeout: Duration | None = None) -> int:
        """Create one task of the schedule now, besides the planned ones. Return its id. Raise
        NotFound, and ConnectionLost or OutcomeUnknown if it may have been created: the request is
        not repeated."""
        answer = await self._ask("run_schedule", {"name": name}, timeout)
        return read(lambda raw: int(raw[1][0]), answer)

    async def backfill_schedule(
        self, name: str, start: datetime, end: datetime, *, timeout: Duration | None = None
    ) -> list[int]:
        """Create a task for each occurrence from ``start`` up to, but not including, ``end``.
        Return their ids. Raise errors like ``run_schedule``."""
        request = {"name": name, "start": start, "end": end}
        return read(_ids, await self._ask("backfill_schedule", request, timeout))

    # --- transactions ---------------------------------------------------------------------------

    def transaction(
        self,
        group: str,
        *,
        id: str | None = None,  # noqa: A002  # the name in the public API
        count_from: CountFrom = "enqueue",
    ) -> Transaction:
        """Return a transaction of the producer group, which is a context manager.

        ``id``: the transaction's name, to be used only once (default: a random name).
        ``count_from``: what the delays of its tasks count from, "enqueue" or "commit"."""
        self._ready()
        return Transaction(self, self._checks, group, id, count_from)

    def on_check(self, group: str) -> Callable[[H], H]:
        """Register a function that decides transactions: ``@client.on_check("payments")``. It gets
        a Check for each transaction of the producer group that was not decided in time, and returns
        "commit", "rollback", or "unknown" to be asked again. Any member of the group may be
        asked."""
        name = self._checker.name(group, "group")

        def register(handler: H) -> H:
            if not callable(handler):
                raise BadRequest(f"a check handler must be a function, not {shown(handler)}")
            self._checks.handlers[name] = handler
            for link in self._links:
                if link.connected and link.state == "open":
                    link.answers.up()
            if self._shards is not None:
                self._shards.connect_for_checks()
            return handler

        return register

    async def commit_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> list[int]:
        """Commit a transaction by name: its half tasks become tasks. Return their ids. Can be
        repeated. Raise UnknownTransaction, TransactionRolledBack."""
        request = {"transaction": transaction}
        return read(_ids, await self._ask("commit_transaction", request, timeout))

    async def rollback_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> None:
        """Roll back a transaction by name: discard its half tasks. Can be repeated. Raise
        UnknownTransaction, TransactionCommitted."""
        await self._ask("rollback_transaction", {"transaction": transaction}, timeout)


def _ids(answer: Any) -> list[int]:
    """Return the ids in the answer of a verb that creates tasks."""
    return list(map(int, answer[1]))
