"""The verbs of a client that are more than one question and its answer.

All others are generated (``generated.py``) from their declarations. Here is what is asked for in
parts or again and again, and what answers with less than the daemon says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from functools import reduce
from typing import Any, TypeVar, Unpack, overload

from tickwheel.api.bulk import BulkInfo, BulkPreview, BulkTrial
from tickwheel.api.frames import CatchUp, CountFrom, Fold, Gap, Overlap
from tickwheel.api.groups import GroupSettings
from tickwheel.api.kinds import BODY, IDS
from tickwheel.api.schedules import ScheduleInfo
from tickwheel.api.tasks import (
    Explanation,
    LookUp,
    ScheduledTaskFields,
    TaskInfo,
    check_selection,
)
from tickwheel.api.times import Duration, seconds
from tickwheel.api.verbs import VERBS
from tickwheel.client.checks import CheckHandler, Checks
from tickwheel.client.generated import GeneratedVerbs
from tickwheel.client.keywords import AnyMoveKeywords, AnySelectionKeywords, ScheduledTaskKeywords
from tickwheel.client.requests import check_filter, list_of, read
from tickwheel.client.tasks import refuse_unknown, spelled_out
from tickwheel.client.transactions import Transaction
from tickwheel.errors import BadRequest, LimitExceeded, SendTimeout, UnknownType, shown

LOOKUP_IDS = 256
"""Ids of one LOOKUP: their bodies have to fit one answer."""
LOOK_S = 0.25
"""How often, in seconds, ``wait_bulk`` looks."""

H = TypeVar("H", bound=CheckHandler)


class WrittenVerbs(GeneratedVerbs):
    """Verbs on tasks that are looked up, bulk operations, schedules and transactions."""

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
        """Where a task stands. By topic and key: every unfinished task with that key, the newest
        first (``newest``: only that one; ``not_after``: only what was enqueued then or earlier);
        when there is none, the one that finished last, as far as the daemon remembers."""
        check_selection(task_id, topic, key)
        if task_id is not None:
            return (await self.lookup_many([task_id], timeout=timeout))[0]
        asked = {"topic": topic, "key": key, "newest": newest, "not_after": not_after}
        tasks: list[TaskInfo] = await self._ask("look_up", asked, timeout)
        return tasks

    async def lookup_many(
        self, ids: Iterable[int], *, timeout: Duration | None = None
    ) -> list[TaskInfo]:
        """``lookup`` of each, in order."""
        until_s = self._until(timeout)
        wanted, found = IDS.of_python(ids, "ids"), list[TaskInfo]()
        for start in range(0, len(wanted), LOOKUP_IDS):
            found += await self._lookup(wanted[start : start + LOOKUP_IDS], until_s)
        return found

    async def _lookup(self, ids: list[int], until_s: float | None) -> list[TaskInfo]:
        verb = VERBS["look_up"]
        try:
            answer = await self._call(verb, LookUp.to_frame({"ids": ids}), until_s)
        except LimitExceeded:
            # Their bodies are too large for one answer.
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
        """Why a task is where it is: one ``cause``, a sentence about it (``detail``), and the
        command that mends it. By its id, or by topic and key: then it is the newest that has not
        ended, a half task of a transaction, or the one that ended last."""
        asked = {"id": task_id, "topic": topic, "key": key}
        found: Explanation = await self._ask("explain", asked, timeout)
        return found

    async def find(
        self,
        key: str,
        *,
        topic: str | None = None,
        not_after: datetime | None = None,
        timeout: Duration | None = None,
    ) -> TaskInfo | None:
        """The newest task with that key that is stored (not finished; dead letters are), enqueued
        at ``not_after`` or before. With ``topic`` the index of keys says it; else the newest tasks
        are looked at first, and None, when no task has it, is known when all were."""
        found = None
        if topic is not None:
            # An older daemon, or one with very many of them, looks through all tasks.
            with suppress(UnknownType, LimitExceeded):
                tasks = await self.lookup(
                    topic=topic, key=key, newest=True, not_after=not_after, timeout=timeout
                )
                return next((task for task in tasks if task.topic is not None), None)
        async for task in self.list_tasks(
            topic=topic,
            key=key,
            not_after=not_after,
            newest_first=True,
            limit=1,
            timeout=timeout,
        ):
            found = task
        return found

    async def pause(
        self, topic: str, group: str | None = None, *, timeout: Duration | None = None
    ) -> GroupSettings:
        """Deliver nothing until ``resume``; it outlasts restarts of the daemon."""
        return await self.configure(topic, group, paused=True, timeout=timeout)

    async def resume(
        self, topic: str, group: str | None = None, *, timeout: Duration | None = None
    ) -> GroupSettings:
        """Deliver again."""
        return await self.configure(topic, group, paused=False, timeout=timeout)

    # --- bulk operations ------------------------------------------------------------------------

    @spelled_out(AnyMoveKeywords)
    async def preview_bulk(
        self,
        kind: str,
        topic: str,
        filter: AnySelectionKeywords,  # noqa: A002  # the name of the published surface
        *,
        timeout: Duration | None = None,
        **moves: Unpack[AnyMoveKeywords],
    ) -> BulkPreview:
        """What a bulk operation of this ``kind`` ("cancel", "requeue", …: those of BulkInfo) would
        do now: nothing is changed. A large topic is looked through in parts (``timeout``: of
        each). ``moves`` are those of AnyMoveKeywords, for a kind that moves tasks."""
        refuse_unknown(moves, AnyMoveKeywords, "Client.preview_bulk")
        check_filter(filter, AnySelectionKeywords, "preview_bulk")
        asked = BulkTrial.of_keywords({"topic": topic, "kind": kind, **moves, **filter})
        await self._know_shards(self._until(timeout))
        parts = [await link.preview(asked, timeout) for link in self._links]
        return reduce(BulkPreview.and_then, parts)

    async def wait_bulk(self, bulk: str, *, timeout: Duration | None = None) -> BulkInfo:
        """The bulk operation when it is over. Raises NotFound, and SendTimeout if it is not after
        ``timeout``."""
        loop = asyncio.get_running_loop()
        until_s = None if timeout is None else loop.time() + seconds(timeout, "timeout")
        while True:
            found = await self.show_bulk(bulk)
            if found.is_over:
                return found
            if until_s is not None and loop.time() >= until_s:
                raise SendTimeout(
                    f"bulk operation {bulk} goes on: it has changed {found.changed} tasks so far"
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
        """Make a schedule, or make the one of that name so; its ``outcome`` says which. Putting
        the same again changes nothing.

        ``cron`` (five fields, six with seconds first, ``@daily``, …) in ``timezone`` (IANA; UTC),
        or ``every`` so long, counted from ``anchor``. ``jitter``: up to so much later, the same
        for the same occurrence. ``gap`` ("after", "skip") and ``fold`` ("first", "second", "both"):
        fixed times that a clock jumps over, or that come twice. ``catch_up`` ("last", "skip",
        "all") of what was missed in the last ``catch_up_window`` (a day). ``overlap`` ("allow",
        "skip", "queue_one", "cancel_previous"): while the task before is unfinished. ``options``
        are those of ScheduledTaskKeywords, for its tasks. Raises BadRequest, LimitExceeded.
        """
        refuse_unknown(options, ScheduledTaskKeywords, "Client.put_schedule")
        task = ScheduledTaskFields.of_keywords(options)
        # What is nothing is not sent: that the schedule is unchanged is seen by comparing.
        task = {n: it for n, it in task.items() if it or n not in ("priority", "properties")}
        if self._checker.codec is not None:
            # In the same bytes each time, for the same reason.
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
        """A task of it at once, whatever is planned; its id. Raises NotFound, and ConnectionLost
        when nobody knows whether it was made: it is not asked for twice."""
        answer = await self._ask("run_schedule", {"name": name}, timeout)
        return read(lambda raw: int(raw[1][0]), answer)

    async def backfill_schedule(
        self, name: str, start: datetime, end: datetime, *, timeout: Duration | None = None
    ) -> list[int]:
        """A task for each occurrence from ``start`` up to, and without, ``end``; their ids. Raises
        as ``run_schedule``."""
        asked = {"name": name, "start": start, "end": end}
        return read(_ids, await self._ask("backfill_schedule", asked, timeout))

    # --- transactions ---------------------------------------------------------------------------

    def transaction(
        self,
        group: str,
        *,
        id: str | None = None,  # noqa: A002  # the name of the published surface
        count_from: CountFrom = "enqueue",
    ) -> Transaction:
        """A transaction of the producer group ``group``, to be used in a ``with`` block.

        ``id``: its name; yours for ever, so do not use one twice (default: a random one).
        ``count_from``: what the delays of its tasks count from, "enqueue" or "commit"."""
        self._ready()
        return Transaction(self, self._checks, group, id, count_from)

    def on_check(self, group: str) -> Callable[[H], H]:
        """``@client.on_check("payments")``: the function is asked about transactions of the
        producer group that nobody has decided in time, with a Check; it returns "commit",
        "rollback", or "unknown" to be asked again. Any member of the group may be asked."""
        name = self._checker.name(group, "group")

        def register(handler: H) -> H:
            if not callable(handler):
                raise BadRequest(f"a handler of checks must be a function, not {shown(handler)}")
            self._checks.handlers[name] = handler
            for link in self._links:
                if link.connected and link.state == "open":
                    link.answers.up()
            if self._shards is not None:
                self._shards.answer_checks()
            return handler

        return register

    async def commit_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> list[int]:
        """Decide one by its name: its half tasks are tasks; their ids. Once more gives the same.
        Raises UnknownTransaction, TransactionRolledBack."""
        asked = {"transaction": transaction}
        return read(_ids, await self._ask("commit_transaction", asked, timeout))

    async def rollback_transaction(
        self, transaction: str, *, timeout: Duration | None = None
    ) -> None:
        """Decide one by its name: none of its tasks ever was. Once more is harmless. Raises
        UnknownTransaction, TransactionCommitted."""
        await self._ask("rollback_transaction", {"transaction": transaction}, timeout)


def _ids(answer: Any) -> list[int]:
    """The ids in the answer to what makes tasks."""
    return list(map(int, answer[1]))
