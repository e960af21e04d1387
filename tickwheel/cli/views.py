"""What the client returns, as JSON fields and as tables.

Ids are decimal strings in JSON: readers that keep numbers as doubles lose digits above 2^53.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tickwheel.cli.output import Grid, Output
from tickwheel.cli.values import (
    body_fields,
    body_text,
    describe_policy,
    format_duration,
    format_time,
    printable,
)
from tickwheel.client import DeadLetter, Delivery, Stats, TaskInfo

COUNTS = ("pending", "ready", "in_flight", "waiting", "dead")
TOTALS = (
    "enqueued", "delivered", "acked", "nacked", "retried", "expired", "cancelled", "dead_total",
    "dead_expired", "dropped_once", "early",
)  # fmt: skip
REASON_SHOWN_MAX = 60

# --- one task --------------------------------------------------------------------------------


def task_fields(info: TaskInfo) -> dict[str, Any]:
    """One looked-up task; of one that is not stored any more only id and state."""
    raw = dict(info.raw)
    fields: dict[str, Any] = {"id": str(raw.pop("id")), "state": raw.pop("state")}
    if isinstance(body := raw.pop("body", None), bytes):
        fields |= body_fields(body)
    if "props" in raw:
        raw["properties"] = raw.pop("props")
    groups = raw.pop("groups", None)
    fields |= raw
    if groups is not None:
        fields["groups"] = {
            name: {**group, "failures": failures(group.get("failures", ()))}
            for name, group in groups.items()
        }
    return fields


def show_task(out: Output, info: TaskInfo) -> None:
    """One task as the output is wanted."""
    if out.as_json:
        out.record(task_fields(info))
        return
    out.grid(task_grid(info))
    if info.groups:
        out.grid(attempts_grid(info))


def failures(found: Any) -> list[dict[str, Any]]:
    """``[[attempt, at_ms, reason, subscriber], …]`` with names."""
    names = ("attempt", "at_ms", "reason", "subscriber")
    return [dict(zip(names, one, strict=False)) for one in found]


def dead_groups(info: TaskInfo) -> list[str]:
    """The groups in which the task is a dead letter."""
    return [name for name, group in _groups(info).items() if group.get("state") == "dead"]


def _groups(info: TaskInfo) -> Mapping[str, Mapping[str, Any]]:
    groups: Mapping[str, Mapping[str, Any]] = info.raw.get("groups") or {}
    return groups


def task_grid(info: TaskInfo) -> Grid:
    """One task, a field a row."""
    raw = info.raw
    grid = Grid(("field", "value"), title=f"Task {info.id}")
    body = raw.get("body")
    shown: dict[str, Any] = {
        "state": str(raw["state"]).replace("_", " "),
        "topic": raw.get("topic"),
        "due": format_time(raw.get("due_ms")),
        "enqueued": format_time(raw.get("enqueued_ms")),
        "key": raw.get("key"),
        "tag": raw.get("tag"),
        "properties": ", ".join(f"{k}={v}" for k, v in (raw.get("props") or {}).items()),
        "priority": raw.get("priority") or None,
        "ttl": _duration_ms(raw.get("ttl_ms")),
        "retry": describe_policy(raw["retry"]) if raw.get("retry") else None,
        "slot": raw.get("slot"),
        "rotations left": raw.get("cycles"),
        "body": body_text(body, None) if isinstance(body, bytes) else None,
    }
    grid.rows.extend((k, printable(str(v))) for k, v in shown.items() if v not in {None, ""})
    return grid


def attempts_grid(info: TaskInfo) -> Grid:
    """What happened to a task in each group."""
    heads = ("group", "state", "attempt", "at", "retries left", "reason")
    grid = Grid(heads, right=frozenset(("attempt", "retries left")))
    for name, group in _groups(info).items():
        for attempt, at_ms, reason, *_ in group.get("failures", ()):
            at = format_time(at_ms)
            grid.rows.append((name, "failed", str(attempt), at, "", _reason(reason)))
        state = str(group.get("state")).replace("_", " ")
        at = format_time(group.get("at_ms") or None)
        left = _count(group.get("retries_left"))
        grid.rows.append((name, state, str(group.get("attempt")), at, left, ""))
    return grid


# --- one delivery ----------------------------------------------------------------------------


def delivery_fields(delivery: Delivery) -> dict[str, object]:
    """One delivery as ``--json`` shows it."""
    return {
        "id": str(delivery.id),
        "topic": delivery.topic,
        "group": delivery.group,
        **body_fields(delivery.body),
        "due_ms": delivery.due_ms,
        "delivered_ms": delivery.delivered_ms,
        "attempt": delivery.attempt,
        "key": delivery.key,
        "tag": delivery.tag,
        "properties": dict(delivery.properties or {}),
        "priority": delivery.priority,
    }


def delivery_line(delivery: Delivery) -> str:
    """One delivery for people: when, how late, which, what."""
    late = format_duration((delivery.delivered_ms - delivery.due_ms) / 1000)
    again = f"  attempt {delivery.attempt}" if delivery.attempt > 1 else ""
    body = body_text(delivery.body, None)
    return f"{format_time(delivery.delivered_ms)}  +{late:<7}  {delivery.id}{again}  {body}"


# --- lists -----------------------------------------------------------------------------------


def tasks_grid() -> Grid:
    return Grid(("id", "state", "topic", "due", "key", "body"), right=frozenset(("id",)))


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


def dead_grid() -> Grid:
    return Grid(
        ("id", "group", "topic", "died", "attempts", "reason"),
        right=frozenset(("id", "attempts")),
    )


def dead_row(letter: DeadLetter) -> tuple[str, ...]:
    return (
        str(letter.id),
        letter.group,
        letter.topic,
        format_time(letter.died_ms),
        str(letter.attempt),
        _reason(letter.reason),
    )


def dead_fields(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": str(letter.id),
        "group": letter.group,
        "topic": letter.topic,
        "died_ms": letter.died_ms,
        "attempt": letter.attempt,
        "reason": letter.reason,
        "failures": failures(letter.failures),
    }


# --- counts ----------------------------------------------------------------------------------


def stats_grids(stats: Stats) -> list[Grid]:
    """The daemon, and a row for each topic and group."""
    raw = stats.raw
    grid = Grid(("what", "value"), title="Daemon", right=frozenset(("value",)))
    lateness = raw.get("lateness") or {}
    shown: dict[str, str] = {
        "node": printable(str(raw.get("node"))),
        "version": str(raw.get("version")),
        "up": format_duration(raw.get("uptime_s") or 0),
        "store": "ok" if raw.get("store_ok") else "NOT OK",
        "slot": f"{raw.get('slot')} of {raw.get('slots')}",
        "connections": _count(raw.get("connections")),
        **{name.replace("_", " "): _count(raw[name]) for name in (*COUNTS, *TOTALS) if name in raw},
        "lateness p50 / p99 / max": " / ".join(
            f"{lateness.get(name) or 0:g} ms" for name in ("p50_ms", "p99_ms", "max_ms")
        ),
    }
    grid.rows.extend(shown.items())
    return [grid, topics_grid(raw.get("topics") or {})]


def topics_grid(topics: Mapping[str, Mapping[str, Any]]) -> Grid:
    numbers = ("pending", "ready", "in_flight", "waiting", "dead", "delivered", "acked")
    heads = tuple(name.replace("_", " ") for name in numbers)
    grid = Grid(("topic", "group", *heads), title="Topics", right=frozenset(heads))
    for topic, counts in sorted(topics.items()):
        grid.rows.append((topic, "", *(_count(counts.get(name)) for name in numbers)))
        for group, of_group in sorted((counts.get("groups") or {}).items()):
            cells = (_count(of_group.get(name)) if name in of_group else "" for name in numbers)
            grid.rows.append(("", group, *cells))
    return grid


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _reason(reason: str | None) -> str:
    return printable(reason or "-", REASON_SHOWN_MAX)


def _duration_ms(value: int | None) -> str | None:
    return None if value is None else format_duration(value / 1000)
