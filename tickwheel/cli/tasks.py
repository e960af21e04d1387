"""``cancel``, ``reschedule``, ``run-now``, ``show``, ``list``: tasks by their ids or keys.

The daemon knows tasks that are not finished. A finished one is found in the files of the history,
if they are there; when no daemon can be reached, only the files are read. ``show --flow`` puts the
story from the history beside where the task stands now.

Ids are decimal strings in JSON: readers that keep numbers as doubles lose digits above 2^53.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Unpack, cast

import typer

from tickwheel.api.words import TaskState
from tickwheel.cli.bulk import Matching, do_bulk
from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call
from tickwheel.cli.history import DIR_ENV, DIR_HELP, flow_grid, folder_of, remark_skipped
from tickwheel.cli.listing import LimitOption, shown
from tickwheel.cli.options import (
    AtOption,
    BeforeOption,
    DelayOption,
    KeyOption,
    MaybeIds,
    OfTopicOption,
    ShiftOption,
    TaskBulkOptions,
    TopicOption,
)
from tickwheel.cli.output import Grid, Output, facts_grid
from tickwheel.cli.values import (
    body_fields,
    body_text,
    describe_policy,
    format_count,
    format_duration,
    format_time,
    iso_time,
    printable,
    spec_duration,
)
from tickwheel.client import KeyOutcome, TaskInfo
from tickwheel.errors import BadRequest, ConnectionLost, Unreachable
from tickwheel.model.records import CONSUMER_DIED

NOT_THERE = frozenset(("unknown", "gone"))
STATES = ("scheduled", "ready", "in_flight", "waiting", "dead")


CANCELLED = {"cancelled", "already_cancelled"}


async def cancel(
    call: Call,
    ids: MaybeIds = None,
    topic: OfTopicOption = None,
    key: KeyOption = None,
    **options: Unpack[TaskBulkOptions],
) -> int:
    """Cancel tasks that are not being worked on. Confirmed means they will not come.

    By ids, or all of a topic with a key, or all that match, as a bulk operation in the background.
    """
    wanted = Matching("cancel", topic, options)
    if _is_bulk(wanted, ids, key):
        return await do_bulk(call, wanted)
    named = _named(ids, topic, key)
    if named is not None:
        async with call.client() as client:
            return _show_outcomes(
                call, await client.cancel(topic=named[0], key=named[1]), CANCELLED
            )
    assert ids
    async with call.client() as client:
        statuses = await client.cancel_many(ids)
    for task_id, status in zip(ids, statuses, strict=True):
        _show_change(call, task_id, status, None)
    return verdict(statuses, CANCELLED)


async def reschedule(
    call: Call,
    ids: MaybeIds = None,
    topic: OfTopicOption = None,
    key: KeyOption = None,
    delay: DelayOption = None,
    at: AtOption = None,
    shift: ShiftOption = None,
    **options: Unpack[TaskBulkOptions],
) -> int:
    """Give tasks another due time: --delay from now, or --at.

    By ids, or all of a topic with a key, or all that match, as a bulk operation in the background:
    these may be moved by --shift, too, each from its own due time.
    """
    moved = {"delay": delay, "at": at, "shift": shift}
    moved = {name: value for name, value in moved.items() if value is not None}
    if len(moved) != 1:
        raise BadRequest("give --delay or --at (or of all that match --shift), one of them")
    wanted = Matching("reschedule", topic, options, moved)
    if _is_bulk(wanted, ids, key):
        return await do_bulk(call, wanted)
    if "shift" in moved:
        raise BadRequest("--shift is for all that match: give --topic and --where")
    return await _move(call, ids, _named(ids, topic, key), delay, at)


async def run_now(
    call: Call,
    ids: MaybeIds = None,
    topic: OfTopicOption = None,
    key: KeyOption = None,
    **options: Unpack[TaskBulkOptions],
) -> int:
    """Make tasks due at once.

    By ids, or all of a topic with a key, or all that match, as a bulk operation in the background.
    """
    wanted = Matching("run_now", topic, options)
    if _is_bulk(wanted, ids, key):
        return await do_bulk(call, wanted)
    return await _move(call, ids, _named(ids, topic, key), 0.0, None)


def _is_bulk(wanted: Matching, ids: Sequence[int] | None, key: str | None) -> bool:
    if wanted.options and (ids or key is not None):
        raise BadRequest("give ids, or --topic and --key, or what selects all that match")
    return bool(wanted.options)


async def _move(
    call: Call,
    ids: Sequence[int] | None,
    named: tuple[str, str] | None,
    delay: float | None,
    at: datetime | None,
) -> int:
    statuses = []
    async with call.client() as client:
        if named is not None:
            topic, key = named
            outcomes = await client.reschedule(topic=topic, key=key, delay=delay, at=at)
            return _show_outcomes(call, outcomes, {"scheduled"})
        assert ids
        for task_id in ids:
            moved = await client.reschedule(task_id, delay=delay, at=at)
            due_ms = None if moved.due is None else round(moved.due.timestamp() * 1000)
            _show_change(call, task_id, moved.status, due_ms)
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
    """Everything about tasks: state, due time, slot and cycles left, attempts, failures.

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
                show_task(call.out, info)
    return EXIT_NOT_FOUND if any(state in NOT_THERE for state in states) else 0


async def list_(
    call: Call,
    topic: TopicOption = None,
    state: Annotated[
        str | None,
        typer.Option(
            help=f"Only those in this state: {', '.join(STATES)}.",
            autocompletion=lambda incomplete: [s for s in STATES if s.startswith(incomplete)],
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Only those with this key. All tasks are looked through.")
    ] = None,
    before: BeforeOption = None,
    newest_first: Annotated[
        bool, typer.Option("--newest-first", help="The highest id first.")
    ] = False,
    limit: LimitOption = None,
) -> None:
    """Tasks that are stored, by id."""
    if state is not None and state not in STATES:
        raise BadRequest(f"--state is {state!r}; known are {', '.join(STATES)}")
    grid = tasks_grid()
    async with call.client() as client:
        ask = partial(
            client.list_tasks,
            topic=topic,
            state=cast("TaskState | None", state),
            key=key,
            not_after=before,
            newest_first=newest_first,
        )
        async for info in shown(call, limit, lambda most: ask(limit=most)):
            if call.out.as_json:
                call.out.record(task_fields(info))
            else:
                grid.rows.append(task_row(info))
    if not call.out.as_json:
        call.out.grid(grid)


def verdict(statuses: Sequence[str], good: set[str]) -> int:
    """The exit code: 0 when all are good, 4 when bad ones are not there at all, else 1."""
    bad = [status for status in statuses if status not in good]
    if not bad:
        return 0
    return EXIT_NOT_FOUND if all(status in NOT_THERE for status in bad) else EXIT_FAILED


def _named(ids: Sequence[int] | None, topic: str | None, key: str | None) -> tuple[str, str] | None:
    """(topic, key), if tasks are not named by ids; else None."""
    if ids and topic is None and key is None:
        return None
    if ids or topic is None or key is None:
        raise BadRequest("give the tasks' ids, or --topic and --key, one of both")
    return topic, key


def _show_outcomes(call: Call, outcomes: Sequence[KeyOutcome], good: set[str]) -> int:
    for one in outcomes:
        _show_change(call, one.id, one.status, one.due_ms)
    return verdict([one.status for one in outcomes], good)


def _show_change(call: Call, task_id: int | None, status: str, due_ms: int | None) -> None:
    if call.out.as_json:
        due = {} if due_ms is None else {"due_ms": due_ms, "due": iso_time(due_ms)}
        shown = None if task_id is None else str(task_id)
        call.out.record({"id": shown, "status": status, **due})
    else:
        when = "" if due_ms is None else f", due {format_time(due_ms)}"
        shown = "no task" if task_id is None else str(task_id)
        call.out.line(f"{shown}  {status.replace('_', ' ')}{when}")


# --- by key --------------------------------------------------------------------------------------


async def show_key(
    call: Call,
    key: str,
    topic: str | None,
    before: datetime | None,
    *,
    flow: bool,
    history: str | None,
) -> int:
    """Show the newest task of a key. Exit code 4: nobody knows one."""
    has_files = bool(history or os.environ.get(DIR_ENV))
    if flow:
        folder_of(history, "--history")
    info: TaskInfo | None = None
    try:
        async with call.client() as client:
            info = await client.find(key, topic=topic, not_after=before)
    except (Unreachable, ConnectionLost) as error:
        if not has_files:
            raise
        call.out.remark(f"{error.code}: {error.message}; from the history alone")
    if info is not None:
        if flow:
            return await show_flow(call, [info.id], history)
        show_task(call.out, info)
        return 0
    found = _in_history(call, key, topic, before, history) if has_files else None
    if found is not None:
        return await show_flow(call, [found], history)
    where = "" if topic is None else f" in topic {topic}"
    also = ", nor in the history" if has_files else ""
    call.out.remark(f"not_found: no task with key {key!r:.80}{where} is stored{also}")
    return EXIT_NOT_FOUND


def _in_history(
    call: Call, key: str, topic: str | None, before: datetime | None, history: str | None
) -> int | None:
    from tickwheel.history.read import Query, newest_id
    from tickwheel.history.segments import Tally

    tally = Tally()
    until_ms = None if before is None else round(before.timestamp() * 1000) + 1
    query = Query(key=key, topic=topic, until_ms=until_ms)
    found = newest_id(folder_of(history, "--history"), query, tally)
    remark_skipped(call, tally)
    return found


# --- with the history ----------------------------------------------------------------------------


async def show_flow(call: Call, ids: Sequence[int], history: str | None) -> int:
    """Show the stories of tasks. Exit code 4: nobody knows one of them."""
    folder = folder_of(history, "--history")
    known = await _look_up(call, ids)
    missing = 0
    for task_id in ids:
        missing += not _show_story(call, task_id, known.get(task_id), folder)
    return EXIT_NOT_FOUND if missing else 0


async def _look_up(call: Call, ids: Sequence[int]) -> dict[int, TaskInfo]:
    """Where the tasks stand now, as far as a daemon says; empty: there is none."""
    try:
        async with call.client() as client:
            return {task_id: await client.lookup(task_id) for task_id in ids}
    except (Unreachable, ConnectionLost) as error:
        call.out.remark(f"{error.code}: {error.message}; from the history alone")
        return {}


def _show_story(call: Call, task_id: int, info: TaskInfo | None, folder: Path) -> bool:
    """Show the story of a task; whether there is anything to show."""
    from tickwheel.history.read import flow
    from tickwheel.history.segments import Tally
    from tickwheel.model.records import id_time_ms

    tally = Tally()
    events = flow(folder, task_id, id_time_ms(task_id), tally)
    is_known = info is not None and info.state not in NOT_THERE
    if call.out.as_json:
        fields = task_fields(info) if info is not None else {"id": str(task_id)}
        call.out.record({**fields, "flow": events})
    else:
        if info is not None and is_known:
            call.out.grid(task_grid(info))
        if events:
            call.out.grid(flow_grid(task_id, events))
        elif is_known:
            call.out.remark(f"the history in {folder} says nothing of task {task_id}")
        else:
            call.out.remark(f"not_found: nothing is known of task {task_id}")
    remark_skipped(call, tally)
    return bool(events) or is_known


# --- tables and JSON of tasks --------------------------------------------------------------------

REASON_SHOWN_MAX = 60


def task_fields(info: TaskInfo) -> dict[str, Any]:
    """A task in the form of ``--json``; of one that is not stored any more only id and state."""
    raw = dict(info.raw)
    fields: dict[str, Any] = {"id": str(raw.pop("id")), "state": raw.pop("state")}
    if isinstance(body := raw.pop("body", None), bytes):
        fields |= body_fields(body)
    groups = raw.pop("groups", None)
    fields |= raw
    if groups is not None:
        fields["groups"] = {
            name: {**group, "failures": named_failures(group.get("failures", ()))}
            for name, group in groups.items()
        }
    return fields


def show_task(out: Output, info: TaskInfo) -> None:
    """Show one task, as JSON or for people."""
    if out.as_json:
        out.record(task_fields(info))
        return
    out.grid(task_grid(info))
    if info.groups:
        out.grid(attempts_grid(info))
        show_traces(out, info)


def show_traces(out: Output, info: TaskInfo) -> None:
    """Show the traces of a task's failures."""
    for name, group in _groups(info).items():
        for one in named_failures(group.get("failures", ())):
            if trace := one.get("trace"):
                out.line(f"\ngroup {printable(name)}, attempt {one['attempt']}:")
                for line in trace.splitlines():
                    out.line(f"  {printable(line)}")


def named_failures(found: Any) -> list[dict[str, Any]]:
    """``[[attempt, at_ms, reason, subscriber], …]`` as maps with names."""
    names = ("attempt", "at_ms", "reason", "subscriber", "trace")
    return [dict(zip(names, one, strict=False)) for one in found]


def dead_groups(info: TaskInfo) -> list[str]:
    """The groups in which the task is a dead letter."""
    return [name for name, group in _groups(info).items() if group.get("state") == "dead"]


def _groups(info: TaskInfo) -> Mapping[str, Mapping[str, Any]]:
    groups: Mapping[str, Mapping[str, Any]] = info.raw.get("groups") or {}
    return groups


def task_grid(info: TaskInfo) -> Grid:
    """A table of one task, a row for each field."""
    raw = info.raw
    body = raw.get("body")
    shown: dict[str, Any] = {
        "state": str(raw["state"]).replace("_", " "),
        "topic": raw.get("topic"),
        "due": format_time(raw.get("due_ms")),
        "asked for": format_time(asked_ms) if (asked_ms := raw.get("asked_ms")) else None,
        "within": _why_then(raw),
        "enqueued": format_time(raw.get("enqueued_ms")),
        "key": raw.get("key"),
        "order key": raw.get("order_key"),
        "tag": raw.get("tag"),
        "properties": ", ".join(f"{k}={v}" for k, v in (raw.get("properties") or {}).items()),
        "priority": raw.get("priority") or None,
        "ttl": _duration_ms(raw.get("ttl_ms")),
        "replay of": raw.get("replay_of"),
        "replay to": raw.get("replay_to"),
        "retry": describe_policy(raw["retry"]) if raw.get("retry") else None,
        "slot": raw.get("slot"),
        "cycles left": raw.get("cycles"),
        "body": body_text(body, None) if isinstance(body, bytes) else None,
    }
    facts = {k: printable(str(v)) for k, v in shown.items() if v not in {None, ""}}
    return facts_grid(("field", "value"), facts, f"Task {info.id}")


def _why_then(raw: Mapping[str, Any]) -> str | None:
    """Why a task with a due window is due when it is; None: it has no window."""
    within_ms, asked_ms = raw.get("within_ms"), raw.get("asked_ms")
    if within_ms is None or asked_ms is None:
        return None
    chosen = asked_ms <= raw["due_ms"] <= asked_ms + within_ms
    return f"{spec_duration(within_ms)}, {'the emptiest' if chosen else 'rescheduled since'}"


def attempts_grid(info: TaskInfo) -> Grid:
    """A table of a task's failures in each group, with whole reasons."""
    heads = ("group", "state", "attempt", "at", "retries left", "subscriber", "reason")
    grid = Grid(heads, right=frozenset(("attempt", "retries left")))
    for name, group in _groups(info).items():
        for one in named_failures(group.get("failures", ())):
            told = printable(one.get("subscriber") or "-"), printable(one["reason"] or "-")
            at = format_time(one["at_ms"])
            how = "died" if str(one["reason"]).startswith(CONSUMER_DIED) else "failed"
            grid.rows.append((name, how, str(one["attempt"]), at, "", *told))
        state = str(group.get("state")).replace("_", " ")
        at = format_time(group.get("at_ms") or None)
        left = format_count(group.get("retries_left"))
        grid.rows.append((name, state, str(group.get("attempt")), at, left, "", ""))
    return grid


def tasks_grid() -> Grid:
    return Grid(
        ("id", "state", "topic", "due", "key", "body"),
        right=frozenset(("id",)),
        times=frozenset(("due",)),
    )


def task_row(info: TaskInfo) -> tuple[str, ...]:
    raw = info.raw
    body = raw.get("body")
    return (
        str(raw["id"]),
        str(raw["state"]).replace("_", " "),
        str(raw.get("topic")),
        format_time(raw.get("due_ms")),
        printable(raw.get("key") or "-"),
        body_text(body) if isinstance(body, bytes) else "",
    )


def reason_text(reason: str | None) -> str:
    return printable(reason or "-", REASON_SHOWN_MAX)


def _duration_ms(value: int | None) -> str | None:
    return None if value is None else format_duration(value / 1000)
