"""``cancel``, ``reschedule``, ``run-now``, ``show``, ``list``: tasks by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer

from tickwheel.cli import views
from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call
from tickwheel.cli.find import show_key
from tickwheel.cli.flow import show_flow
from tickwheel.cli.history import DIR_ENV, DIR_HELP
from tickwheel.cli.options import AtOption, BeforeOption, DelayOption, Ids, MaybeIds
from tickwheel.cli.values import format_time, iso_time
from tickwheel.errors import BadRequest

NOT_THERE = frozenset(("unknown", "gone"))
STATES = ("scheduled", "ready", "in_flight", "waiting", "dead")
LIST_DEFAULT = 100


async def cancel(call: Call, ids: Ids) -> int:
    """Cancel tasks that are not being worked on. Confirmed means they will not come."""
    async with call.client() as client:
        statuses = await client.cancel_many(ids)
    for task_id, status in zip(ids, statuses, strict=True):
        _tell(call, task_id, status, None)
    return verdict(statuses, {"cancelled", "already_cancelled"})


async def reschedule(call: Call, ids: Ids, delay: DelayOption = None, at: AtOption = None) -> int:
    """Give tasks another due time: --delay from now, or --at."""
    if (delay is None) == (at is None):
        raise BadRequest("give --delay or --at, one of them")
    return await _move(call, ids, delay, at)


async def run_now(call: Call, ids: Ids) -> int:
    """Make tasks due at once."""
    return await _move(call, ids, 0.0, None)


async def _move(call: Call, ids: list[int], delay: float | None, at: datetime | None) -> int:
    statuses = []
    async with call.client() as client:
        for task_id in ids:
            moved = await client.reschedule(task_id, delay=delay, at=at)
            due_ms = None if moved.due is None else round(moved.due.timestamp() * 1000)
            _tell(call, task_id, moved.status, due_ms)
            statuses.append(moved.status)
    return verdict(statuses, {"scheduled"})


async def show(
    call: Call,
    ids: MaybeIds = None,
    key: Annotated[
        str | None, typer.Option(help="Instead of ids: the newest task with this key.")
    ] = None,
    topic: Annotated[str | None, typer.Option(help="With --key: only in this topic.")] = None,
    before: BeforeOption = None,
    flow: Annotated[
        bool, typer.Option("--flow", help="What happened to them, also after their end.")
    ] = False,
    history: Annotated[
        str | None, typer.Option(envvar=DIR_ENV, metavar="DIR", help=f"For --flow. {DIR_HELP}")
    ] = None,
) -> int:
    """Everything about tasks: state, due time, slot and rotations left, attempts, failures.

    By ids, or the newest with a key: of those that are stored, else of the history.
    """
    if key is not None:
        if ids:
            raise BadRequest("give ids or --key, one of them")
        return await show_key(call, key, topic, before, flow=flow, history=history)
    if not ids:
        raise BadRequest("give the tasks' ids, or --key")
    if topic is not None or before is not None:
        raise BadRequest("--topic and --before go with --key")
    if flow:
        return await show_flow(call, ids, history)
    states = []
    async with call.client() as client:
        for task_id in ids:
            info = await client.lookup(task_id)
            states.append(info.state)
            if info.state in NOT_THERE and not call.out.as_json:
                call.out.remark(f"not_found: task {task_id} is {info.state}")
            else:
                views.show_task(call.out, info)
    return EXIT_NOT_FOUND if any(state in NOT_THERE for state in states) else 0


async def list_(
    call: Call,
    topic: Annotated[str | None, typer.Option(help="Only this topic's.")] = None,
    state: Annotated[
        str | None, typer.Option(help=f"Only those in this state: {', '.join(STATES)}.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Only those with this key. All tasks are looked through.")
    ] = None,
    before: BeforeOption = None,
    newest_first: Annotated[
        bool, typer.Option("--newest-first", help="The highest id first.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = LIST_DEFAULT,
) -> None:
    """Tasks that are stored, by id."""
    if state is not None and state not in STATES:
        raise BadRequest(f"--state is {state!r}; known are {', '.join(STATES)}")
    grid = views.tasks_grid()
    async with call.client() as client:
        async for info in client.list_tasks(
            topic=topic,
            state=state,
            key=key,
            not_after=before,
            newest_first=newest_first,
            limit=limit,
        ):
            if call.out.as_json:
                call.out.record(views.task_fields(info))
            else:
                grid.rows.append(views.task_row(info))
    if not call.out.as_json:
        call.out.grid(grid)


def verdict(statuses: Sequence[str], good: set[str]) -> int:
    """0 when all are good, 4 when the bad ones are not there at all, else 1."""
    bad = [status for status in statuses if status not in good]
    if not bad:
        return 0
    return EXIT_NOT_FOUND if all(status in NOT_THERE for status in bad) else EXIT_FAILED


def _tell(call: Call, task_id: int, status: str, due_ms: int | None) -> None:
    if call.out.as_json:
        due = {} if due_ms is None else {"due_ms": due_ms, "due": iso_time(due_ms)}
        call.out.record({"id": str(task_id), "status": status, **due})
    else:
        when = "" if due_ms is None else f", due {format_time(due_ms)}"
        call.out.line(f"{task_id}  {status.replace('_', ' ')}{when}")
