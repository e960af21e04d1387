"""The verbs of recurring schedules."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Unpack

from tickwheel.api.frames import FrameType
from tickwheel.api.times import Duration, moment_ms
from tickwheel.api.words import CatchUp, Fold, Gap, Overlap
from tickwheel.client.keywords import ScheduledTaskKeywords, refuse_unknown, spelled_out
from tickwheel.client.results import read
from tickwheel.client.schedules import ScheduleInfo, put_options, task_options
from tickwheel.client.verbs.base import PAGE, Verbs


class ScheduleVerbs(Verbs):
    """Make, look at and end schedules."""

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
        until_s = self._until(timeout)
        schedule = put_options(
            topic, body, task_options(options), cron=cron, timezone=timezone, every=every,
            anchor=anchor, jitter=jitter, start=start, end=end, runs_max=runs_max, gap=gap,
            fold=fold, catch_up=catch_up, catch_up_window=catch_up_window, overlap=overlap,
        )  # fmt: skip
        answer = await self._calls.call(FrameType.SCHEDULE_PUT, name, schedule, until_s=until_s)
        return read(ScheduleInfo.of, answer)

    async def list_schedules(
        self, *, timeout: Duration | None = None
    ) -> AsyncIterator[ScheduleInfo]:
        """All schedules, by name; page by page (``timeout``: of each page)."""
        self._ready()
        after: str | None = None
        while True:
            options: dict[str, Any] = {"limit": PAGE}
            if after is not None:
                options["after"] = after
            until_s = self._until(timeout)
            page = await self._calls.call(FrameType.SCHEDULE_LIST, options, until_s=until_s)
            for one in page["schedules"]:
                yield read(ScheduleInfo.of, one)
            after = page["next"]
            if after is None:
                return

    async def show_schedule(
        self, name: str, *, planned: int = 5, timeout: Duration | None = None
    ) -> ScheduleInfo:
        """One, with its next ``planned`` times and its newest runs. Raises NotFound."""
        return await self._schedule(name, "show", {"next": planned}, timeout=timeout)

    async def pause_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """Nothing of it fires until it is resumed. Raises NotFound."""
        return await self._schedule(name, "pause", timeout=timeout)

    async def resume_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """What was missed meanwhile is for its catch-up. Raises NotFound."""
        return await self._schedule(name, "resume", timeout=timeout)

    async def delete_schedule(self, name: str, *, timeout: Duration | None = None) -> ScheduleInfo:
        """It, as it was; its tasks stay. Raises NotFound."""
        return await self._schedule(name, "delete", repeat=False, timeout=timeout)

    async def run_schedule(self, name: str, *, timeout: Duration | None = None) -> int:
        """A task of it at once, whatever is planned; its id. Raises NotFound, and ConnectionLost
        when nobody knows whether it was made: it is not asked for twice."""
        _, ids = await self._ask_schedule(name, "run", None, repeat=False, timeout=timeout)
        return int(ids[0])

    async def backfill_schedule(
        self, name: str, start: datetime, end: datetime, *, timeout: Duration | None = None
    ) -> list[int]:
        """A task for each occurrence from ``start`` up to, and without, ``end``; their ids. Raises
        as ``run_schedule``."""
        options = {"from_ms": moment_ms(start, "start"), "to_ms": moment_ms(end, "end")}
        _, ids = await self._ask_schedule(name, "backfill", options, repeat=False, timeout=timeout)
        return list(ids)

    async def _schedule(
        self,
        name: str,
        verb: str,
        options: Any = None,
        *,
        repeat: bool = True,
        timeout: Duration | None,
    ) -> ScheduleInfo:
        answer = await self._ask_schedule(name, verb, options, repeat=repeat, timeout=timeout)
        return read(ScheduleInfo.of, answer)

    async def _ask_schedule(
        self, name: str, verb: str, options: Any, *, repeat: bool, timeout: Duration | None
    ) -> Any:
        until_s = self._until(timeout)
        return await self._calls.call(
            FrameType.SCHEDULE, name, verb, options, repeat=repeat, until_s=until_s
        )
