"""Recurring schedules: ``put``, ``list``, ``show``, ``next``, ``pause``, ``resume``, ``run``,
``backfill``, ``delete``; and ``apply``, which changes schedules to match a file and shows the
differences first.

A file has one table for each schedule, with the options of ``put``:

    [schedule.daily]
    topic = "mails"
    body = "hi"
    cron = "0 9 * * *"
    timezone = "Europe/Berlin"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tickwheel.api.kinds import Policy
from tickwheel.api.schedules import NewSchedule, ScheduleRun
from tickwheel.api.tasks import kept_options
from tickwheel.cli.call import EXIT_FAILED, Call, ask_person, can_ask
from tickwheel.cli.declared import Show, declared, listed
from tickwheel.cli.options import LIMITS, argument, flag, option, read_value
from tickwheel.cli.output import (
    Column,
    column,
    count_columns,
    facts_grid,
    fields_of,
    format_count,
    format_time,
    grid_of,
    iso_time,
    stored_fields,
    stored_text,
    text_columns,
    unpacked,
)
from tickwheel.client import ScheduleInfo
from tickwheel.client.encodings import encoding_of
from tickwheel.errors import BadRequest
from tickwheel.model.policies import duration_spec

# --- reading -------------------------------------------------------------------------------------


def _show(call: Call, request: Mapping[str, Any], schedule: ScheduleInfo) -> None:
    raw = schedule.raw
    facts = {
        "schedule": schedule.name,
        "topic": schedule.topic,
        "when": timing(raw),
        "state": _state(schedule),
        "catch-up": f"{raw['catch_up']}, of {duration_spec(raw['catch_up_ms'])}",
        "overlap": str(raw["overlap"]),
        "runs": format_count(schedule.runs),
        "body": stored_text(schedule.topic, schedule.body, encoding_of(schedule)),
    }
    grid = facts_grid(("field", "value"), facts)
    grid.rows += [("next", format_time(at)) for at in raw.get("planned_ms") or ()]
    tables = [grid, *([grid_of(RUNS, schedule.recent)] if schedule.recent else [])]
    call.out.result(schedule_fields(schedule), *tables)


def _outcome(run: ScheduleRun) -> str:
    return f"{run.outcome} ({run.occurrences})" if run.occurrences > 1 else run.outcome


RUNS = (
    column("planned", "planned_ms", format_time), Column("outcome", _outcome), column("task", "id"),
    column("state"),
)  # fmt: skip


async def next_(
    call: Call,
    name: Annotated[str, argument("NAME", "The schedule's name.")],
    count: Annotated[int, option("Number of times.", None, "-n", min=1, max=100)] = 5,
) -> None:
    """Show the next planned times of a schedule."""
    schedule = await call.ask(lambda client: client.show_schedule(name, planned=count))
    for at_ms in schedule.raw.get("planned_ms") or ():
        record = {"name": name, "planned_ms": at_ms, "planned": iso_time(at_ms)}
        call.out.result(record, format_time(at_ms))


# --- changing ------------------------------------------------------------------------------------


def _changed(word: str = "") -> Show:
    return lambda call, request, schedule: _show_change(call, schedule, word)


def _show_change(call: Call, schedule: ScheduleInfo, word: str) -> None:
    word = word or str(schedule.outcome)
    line = f"{schedule.name}  {word}  {timing(schedule.raw)}  next {_next(schedule)}"
    call.out.result(schedule_fields(schedule) | {"outcome": word}, line)


def _show_ids(call: Call, request: Mapping[str, Any], ids: list[int]) -> None:
    for task_id in ids:
        call.out.result({"name": request["name"], "id": str(task_id)}, str(task_id))


put = declared("put_schedule", _changed(), "Repeating the same command changes nothing.")
show = declared("show_schedule", _show)
pause = declared("pause_schedule", _changed("paused"))
resume = declared("resume_schedule", _changed("resumed"))
run = declared("run_schedule", lambda call, request, task_id: _show_ids(call, request, [task_id]))
backfill = declared("backfill_schedule", _show_ids)
delete = declared("delete_schedule", _changed("deleted"))


# --- apply ---------------------------------------------------------------------------------------

FIELDS = {
    field.python: field
    for field in (*NewSchedule.fields(), *(field for field, _ in kept_options()))
    if field.name not in {"name", "task"}
}


async def apply(
    call: Call,
    file: Annotated[Path, argument("FILE.toml", "A file with one table for each schedule.")],
    yes: Annotated[bool, flag("Do not ask for confirmation.")] = False,
    prune: Annotated[bool, flag("Delete schedules that are not in the file.")] = False,
) -> int:
    """Change schedules to match a file. Shows the differences and asks first."""
    tables = read_file(file)
    async with call.client() as client:
        existing = {schedule.name: schedule async for schedule in client.list_schedules()}
        plan = [(_difference(existing.get(name), table), name) for name, table in tables.items()]
        plan += [("delete", name) for name in existing if prune and name not in tables]
        changes = [(change, name) for change, name in plan if change]
        for change, name in changes:
            call.out.remark(f"{name}: {change}")
        if not changes:
            call.out.remark("no schedule differs from the file")
            return 0
        if not yes and not can_ask(call):
            raise BadRequest("this would change schedules; add --yes to confirm")
        if not yes and not ask_person(f"Change {len(changes)} schedules?"):
            call.out.remark("nothing was changed")
            return EXIT_FAILED
        for change, name in changes:
            if change == "delete":
                _show_change(call, await client.delete_schedule(name), "deleted")
            else:
                _show_change(call, await client.put_schedule(name, **tables[name]), "")
    return 0


def read_file(file: Path) -> dict[str, dict[str, Any]]:
    """Return name → arguments of ``Client.put_schedule``. Raise BadRequest naming the error."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # of tomllib too
        raise BadRequest(f"{file}: {error}") from None
    tables = content.pop("schedule", {})
    if content or not isinstance(tables, dict):
        raise BadRequest(f"{file}: must contain only tables [schedule.NAME]")
    schedules: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise BadRequest(f"{file}: schedule.{name} must be a table")
        try:
            schedules[name] = {field: _value(field, value) for field, value in table.items()}
        except (ValueError, BadRequest) as error:
            raise BadRequest(f"{file}: schedule.{name}: {error}") from None
        if "topic" not in schedules[name]:
            raise BadRequest(f"{file}: schedule.{name}: topic is missing")
    return schedules


def _value(name: str, value: Any) -> Any:
    """Return the checked value of a field as the client takes it. Raise ValueError, BadRequest."""
    if name not in FIELDS:
        raise ValueError(f"{name} is not a valid field; valid fields are {', '.join(FIELDS)}")
    kind = FIELDS[name].kind
    result = read_value(kind, value)
    kind.check(kind.of_python(result, name), name, LIMITS)
    return result


def _difference(existing: ScheduleInfo | None, table: Mapping[str, Any]) -> str:
    """Describe the change of a schedule; empty without a change."""
    if existing is None:
        return "create"
    body, encoding, _ = unpacked(existing.topic, existing.body, encoding_of(existing), whole=True)
    task_fields = {**existing.raw["task"], "encoding": encoding}
    current: dict[str, Any] = {**existing.raw, **task_fields, "body": body}
    changed = []
    for name, field in FIELDS.items():
        value, before = table.get(name), current.get(field.name)
        if name == "anchor" and (value is None or current.get("every_ms") is None):
            continue  # the daemon chooses it
        default = _DEFAULTS.get(name, field.default)
        before = default if before is None else before
        after = default if value is None else field.kind.of_python(value, name)
        if isinstance(field.kind, Policy) and isinstance(before, Mapping) and after is not None:
            # The daemon returns all numbers of a policy; those of the file must be among them.
            policy = {"name": after} if isinstance(after, str) else after
            after = before if policy.items() <= before.items() else after
        if before != after:
            changed.append(f"{name} {_plain(before)} -> {_plain(after)}")
    return f"change {', '.join(changed)}" if changed else ""


def _plain(value: Any) -> str:
    return "none" if value is None else f"{value!r:.60}"


_DEFAULTS: dict[str, Any] = {
    "body": b"", "timezone": "UTC", "gap": "after", "fold": "first", "catch_up": "last",
    "overlap": "allow", "jitter": 0, "catch_up_window": 86_400_000,
}  # fmt: skip


# --- for people and for programs -----------------------------------------------------------------


def timing(raw: Mapping[str, Any]) -> str:
    """Return the timing of a schedule in short."""
    if raw.get("cron") is not None:
        return f"{raw['cron']} {raw['timezone']}"
    return f"every {duration_spec(raw['every_ms'])}"


def _state(schedule: ScheduleInfo) -> str:
    if schedule.paused:
        return "paused"
    return "active" if schedule.next is not None else "over"


def _next(schedule: ScheduleInfo) -> str:
    next_ms = schedule.raw.get("next_ms")
    return _state(schedule) if schedule.paused or next_ms is None else format_time(next_ms)


COLUMNS = (
    *text_columns("name", "topic"), column("when", "raw", timing),
    Column("next", _next, is_time=True), *count_columns("runs"),
)  # fmt: skip


def schedule_fields(schedule: ScheduleInfo) -> dict[str, Any]:
    """Return a schedule for ``--json``, with body, ids and times also as text."""
    fields = fields_of(schedule)
    del fields["body"]
    stored = stored_fields(schedule.topic, schedule.body, encoding_of(schedule))
    if (encoding := stored.pop("encoding")) is not None:
        fields["task"] = {**fields["task"], "encoding": encoding}
    fields |= stored
    if "planned_ms" in schedule.raw:
        planned_ms = list(schedule.raw["planned_ms"])
        fields |= {"planned_ms": planned_ms, "planned": list(map(iso_time, planned_ms))}
    return fields


list_ = listed(
    "list_schedules",
    "List schedules with their timing, next time and number of runs.",
    COLUMNS,
    schedule_fields,
)
