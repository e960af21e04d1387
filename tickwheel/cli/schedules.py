"""``tickwheel schedule``: recurring schedules: put, list, show, next, pause, resume, run, backfill,
delete; and ``apply``, which makes what stands in a file so and shows the difference first.

A file has one table a schedule; its keys are those of ``put``:

    [schedule.daily]
    topic = "mails"
    body = "hi"
    cron = "0 9 * * *"
    timezone = "Europe/Berlin"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

from tickwheel.api.kinds import Body, Moment, Policy, Properties, Span, Whole
from tickwheel.api.policies import policy_wire
from tickwheel.api.schedules import NewSchedule
from tickwheel.api.tasks import kept_options
from tickwheel.api.times import local_time
from tickwheel.cli.call import EXIT_FAILED, Call, ask, can_ask, described
from tickwheel.cli.declared import Show, declared
from tickwheel.cli.options import (
    SPEC_HELP,
    TaskOptions,
    argument,
    duration,
    flag,
    option,
    parse_at,
    point,
    retry_of,
    task_keywords,
)
from tickwheel.cli.output import (
    Column,
    Grid,
    Listing,
    column,
    count_columns,
    facts_grid,
    fields_of,
    format_count,
    format_time,
    iso_time,
    spec_duration,
    stored_fields,
    stored_text,
    text_columns,
    unpacked,
)
from tickwheel.client import ScheduleInfo
from tickwheel.client.encodings import encoding_of
from tickwheel.errors import BadRequest
from tickwheel.model.policies import parse_duration, parse_policy

NameArgument = Annotated[str, argument("NAME", "The schedule's name.")]


class TimingOptions(TypedDict, total=False):
    """When a schedule runs."""

    cron: Annotated[str | None, option("Five fields, six with seconds first, or @daily, …", "EXPR")]
    timezone: Annotated[str | None, option("Zone of --cron: Europe/Berlin. Default: UTC.", "ZONE")]
    every: Annotated[float | None, duration("Instead of --cron: 5s, 1h30m.")]
    anchor: Annotated[datetime | None, point("What --every is counted from. Default: now.")]
    jitter: Annotated[float | None, duration("Longest random delay, fixed for an occurrence.")]
    start: Annotated[datetime | None, point("Nothing before it.")]
    end: Annotated[datetime | None, point("Nothing after it.")]
    runs_max: Annotated[int | None, option("Maximum number of runs.", "N", "--runs", min=1)]
    gap: Annotated[str | None, option("A fixed time that the clock jumps over.", "after|skip")]
    fold: Annotated[str | None, option("A fixed time that comes twice.", "first|second|both")]
    catch_up: Annotated[
        str | None, option("What was missed is made up for, or not.", "last|skip|all")
    ]
    catch_up_window: Annotated[float | None, duration("Nothing older. Default: 1d.")]
    overlap: Annotated[
        str | None,
        option(
            "While the task of the run before is unfinished.",
            "allow|skip|queue_one|cancel_previous",
        ),
    ]


class PutOptions(TimingOptions, TaskOptions):
    """When a schedule runs, and what its tasks are."""


_OF_TASKS = [field for field, _ in kept_options()]
_HELPS = {
    **dict.fromkeys((field.python for field in _OF_TASKS), "For its tasks."),
    "prop": "For its tasks; may be repeated.",
    "within": "A due window of its tasks.",
    "retry": SPEC_HELP,
}


@described(**_HELPS)
async def put(
    call: Call,
    name: NameArgument,
    topic: Annotated[str, option("Where its tasks belong.")],
    body: Annotated[str, option("What is delivered.")] = "",
    **options: Unpack[PutOptions],
) -> None:
    """Make a schedule, or make the one of this name so. Putting the same again changes nothing."""
    keywords = task_keywords(options)
    keywords |= {"topic": topic, "body": os.fsencode(body)}
    found = await call.ask(lambda client: client.put_schedule(name, **keywords))
    _say(call, found, str(found.outcome))


# --- looking -------------------------------------------------------------------------------------


async def list_(call: Call) -> None:
    """Every schedule: when it runs, what is next, how often it ran."""
    async with call.client() as client:
        found = [one async for one in client.list_schedules()]
    Listing.of(call.out, COLUMNS, schedule_fields).show(found)


def _show(call: Call, asked: Mapping[str, Any], found: ScheduleInfo) -> None:
    if call.out.as_json:
        call.out.record(schedule_fields(found))
        return
    raw = found.raw
    facts = {
        "schedule": found.name,
        "topic": found.topic,
        "when": timing(raw),
        "state": _state(found),
        "catch-up": f"{raw['catch_up']}, of {spec_duration(raw['catch_up_ms'])}",
        "overlap": str(raw["overlap"]),
        "runs": format_count(found.runs),
        "body": stored_text(found.topic, found.body, encoding_of(found)),
    }
    grid = facts_grid(("field", "value"), facts)
    grid.rows += [("next", format_time(at)) for at in raw.get("planned_ms") or ()]
    call.out.grid(grid)
    runs = Grid(("planned", "outcome", "task", "state"))
    for run in raw.get("recent") or ():
        times = f" ({run['occurrences']})" if run["occurrences"] > 1 else ""
        task = (str(run["id"] or ""), str(run["state"] or ""))
        runs.rows.append((format_time(run["planned_ms"]), f"{run['outcome']}{times}", *task))
    if runs.rows:
        call.out.grid(runs)


async def next_(
    call: Call,
    name: NameArgument,
    count: Annotated[int, option("How many.", None, "-n", min=1, max=100)] = 5,
) -> None:
    """The next planned times of a schedule."""
    found = await call.ask(lambda client: client.show_schedule(name, planned=count))
    for at_ms in found.raw.get("planned_ms") or ():
        record = {"name": name, "planned_ms": at_ms, "planned": iso_time(at_ms)}
        call.out.result(record, format_time(at_ms))


# --- changing ------------------------------------------------------------------------------------


def _said(word: str) -> Show:
    return lambda call, asked, found: _say(call, found, word)


def _say(call: Call, found: ScheduleInfo, word: str) -> None:
    line = f"{found.name}  {word}  {timing(found.raw)}  next {_next(found)}"
    call.out.result(schedule_fields(found) | {"outcome": word}, line)


def _say_ids(call: Call, asked: Mapping[str, Any], ids: list[int]) -> None:
    for task_id in ids:
        call.out.result({"name": asked["name"], "id": str(task_id)}, str(task_id))


show = declared("show_schedule", _show)
pause = declared("pause_schedule", _said("paused"))
resume = declared("resume_schedule", _said("resumed"))
run = declared("run_schedule", lambda call, asked, task_id: _say_ids(call, asked, [task_id]))
backfill = declared("backfill_schedule", _say_ids)
delete = declared("delete_schedule", _said("deleted"))


# --- apply ---------------------------------------------------------------------------------------

_FIELDS = {
    field.python: field
    for field in (*NewSchedule.fields(), *_OF_TASKS)
    if field.name not in {"name", "task"}
}


def _rank(name: str) -> int:
    """The place of a field among others: texts, durations, times, numbers, what is a table."""
    kind = _FIELDS[name].kind
    number = next((n for n, one in enumerate((Span, Moment, Whole), 1) if isinstance(kind, one)), 4)
    return 0 if isinstance(kind, Body) or kind.json is str else number


FIELDS = tuple(sorted(_FIELDS, key=_rank))


async def apply(
    call: Call,
    file: Annotated[Path, argument("FILE.toml", "One table a schedule.")],
    yes: Annotated[bool, flag("Do not ask.")] = False,
    prune: Annotated[bool, flag("Delete those that are not in the file.")] = False,
) -> int:
    """Make what stands in a file so. The difference is shown and asked about first."""
    wanted = read_file(file)
    async with call.client() as client:
        there = {one.name: one async for one in client.list_schedules()}
        plan = [(_difference(there.get(name), given), name) for name, given in wanted.items()]
        plan += [("delete", name) for name in there if prune and name not in wanted]
        changes = [(what, name) for what, name in plan if what]
        for what, name in changes:
            call.out.remark(f"{name}: {what}")
        if not changes:
            call.out.remark("nothing is different")
            return 0
        if not yes and not can_ask(call):
            raise BadRequest("this would change schedules; --yes does it without being asked")
        if not yes and not ask(f"Change {len(changes)} schedules?"):
            call.out.remark("nothing was changed")
            return EXIT_FAILED
        for what, name in changes:
            if what == "delete":
                _say(call, await client.delete_schedule(name), "deleted")
            else:
                found: ScheduleInfo = await client.put_schedule(name, **wanted[name])
                _say(call, found, str(found.outcome))
    return 0


def read_file(file: Path) -> dict[str, dict[str, Any]]:
    """Name → arguments of ``Client.put_schedule``. Raises BadRequest naming what is wrong."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRequest(f"{file}: {error}") from None
    tables = content.pop("schedule", {})
    if content or not isinstance(tables, dict):
        raise BadRequest(f"{file}: only tables [schedule.NAME] are known")
    found: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise BadRequest(f"{file}: schedule.{name} is not a table")
        try:
            found[name] = {field: _value(field, value) for field, value in table.items()}
        except ValueError as error:
            raise BadRequest(f"{file}: schedule.{name}: {error}") from None
        if "topic" not in found[name]:
            raise BadRequest(f"{file}: schedule.{name}: topic is missing")
    return found


def _value(field: str, value: Any) -> Any:
    if field not in _FIELDS:
        raise ValueError(f"{field} is not known; known are {', '.join(FIELDS)}")
    kind = _FIELDS[field].kind
    if isinstance(kind, Whole) and not isinstance(kind, Span) and type(value) is int:
        return value
    if isinstance(kind, Moment) and isinstance(value, datetime):
        return local_time(value) if value.tzinfo is None else value
    if isinstance(kind, Properties) and isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{field} is {value!r:.40}, which is of the wrong type")
    if isinstance(kind, Body):
        return value.encode()
    if isinstance(kind, Span):
        return parse_duration(value)
    if isinstance(kind, Moment):
        return parse_at(value)
    return retry_of(parse_policy(value)) if isinstance(kind, Policy) else value


def _difference(there: ScheduleInfo | None, given: Mapping[str, Any]) -> str:
    """The change of a schedule in words; empty: nothing changes."""
    if there is None:
        return "create"
    body, encoding, _ = unpacked(there.topic, there.body, encoding_of(there), whole=True)
    of_tasks = {**there.raw["task"], "encoding": encoding}
    known: dict[str, Any] = {**there.raw, **of_tasks, "body": body}
    changed = [
        f"{field} {_plain(before)} -> {_plain(after)}"
        for field in FIELDS
        for before, after in [_pair(field, known, given.get(field))]
        if before != after
    ]
    return f"change {', '.join(changed)}" if changed else ""


def _pair(field: str, known: Mapping[str, Any], given: Any) -> tuple[Any, Any]:
    """The present and the wanted value of a field, comparable; equal if the file says nothing."""
    kind, before = _FIELDS[field].kind, known.get(_FIELDS[field].name)
    if field == "retry" and isinstance(before, Mapping):
        # A policy is answered with all its numbers: those that are said must be among them.
        after = given and policy_wire(given, field)
        said = {"name": after} if isinstance(after, str) else after or {}
        return (after, after) if after and said.items() <= before.items() else (before, after)
    if field == "anchor" and (given is None or known.get("every_ms") is None):
        return before, before
    if given is None:
        return before, _DEFAULTS.get(field)
    of_wire = isinstance(kind, (Span, Moment, Policy))
    return before, kind.of_python(given, field) if of_wire else given


def _plain(value: Any) -> str:
    return "none" if value is None else f"{value!r:.60}"


_DEFAULTS: dict[str, Any] = {
    "body": b"", "timezone": "UTC", "gap": "after", "fold": "first", "catch_up": "last",
    "overlap": "allow", "jitter": 0, "catch_up_window": 86_400_000,
}  # fmt: skip


# --- for people and for programs -----------------------------------------------------------------


def timing(raw: Mapping[str, Any]) -> str:
    """The timing of a schedule in short."""
    if raw.get("cron") is not None:
        return f"{raw['cron']} {raw['timezone']}"
    return f"every {spec_duration(raw['every_ms'])}"


def _state(found: ScheduleInfo) -> str:
    if found.paused:
        return "paused"
    return "active" if found.next is not None else "over"


def _next(found: ScheduleInfo) -> str:
    next_ms = found.raw.get("next_ms")
    return _state(found) if found.paused or next_ms is None else format_time(next_ms)


COLUMNS = (
    *text_columns("name", "topic"), column("when", "raw", timing),
    Column("next", _next, is_time=True), *count_columns("runs"),
)  # fmt: skip


def schedule_fields(found: ScheduleInfo) -> dict[str, Any]:
    """A schedule for ``--json``: what the daemon says, with body, ids and times as text, too."""
    fields = fields_of(found, without="body")
    stored = stored_fields(found.topic, found.body, encoding_of(found))
    if (encoding := stored.pop("encoding")) is not None:
        fields["task"] = {**fields["task"], "encoding": encoding}
    fields |= stored
    if fields.get("recent") is not None:
        fields["recent"] = [{**run, "id": run["id"] and str(run["id"])} for run in fields["recent"]]
    if "planned_ms" in found.raw:
        planned_ms = list(found.raw["planned_ms"])
        fields |= {"planned_ms": planned_ms, "planned": list(map(iso_time, planned_ms))}
    return fields
