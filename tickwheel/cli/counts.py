"""Counts of topics and groups, from the daemon's STATS, as JSON fields and as tables. Pure.

What an older daemon does not say is left out of JSON and is a dash in tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tickwheel.cli.output import Grid
from tickwheel.cli.values import describe_policy, format_duration, short_policy

Map = Mapping[str, Any]

NUMBERS = ("pending", "ready", "in_flight", "waiting", "dead")
TOTALS = ("enqueued", "delivered", "acked")
HEADS = {"in_flight": "in flight", "waiting": "retrying"}
"""What a count is called for people; all others by their own name."""


def head(name: str) -> str:
    return HEADS.get(name, name.replace("_", " "))


# --- cells -----------------------------------------------------------------------------------


def count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def age(oldest_ms: Any) -> str:
    """How long the oldest ready task has been waiting; a dash when there is none."""
    return format_duration(oldest_ms / 1000) if isinstance(oldest_ms, int) and oldest_ms else "-"


def rate(settings: Map) -> str:
    """``100/s``, ``100/s burst 200``, or a dash for no limit."""
    limit, burst = settings.get("rate"), settings.get("burst")
    if limit is None:
        return "-"
    return f"{limit:g}/s" + ("" if burst is None else f" burst {burst}")


def paused(settings: Map) -> str:
    return "paused" if settings.get("paused") else "-"


# --- tables ----------------------------------------------------------------------------------


def topics_grid(topics: Map) -> Grid:
    """A row a topic."""
    numbers = [head(name) for name in NUMBERS]
    totals = [head(name) for name in TOTALS]
    heads = ("topic", *numbers, "oldest", "paused", "rate", "groups", *totals)
    grid = Grid(heads, right=frozenset((*numbers, "oldest", "groups", *totals)))
    for name, topic in sorted(topics.items()):
        grid.rows.append(
            (
                name,
                *(count(topic.get(field)) for field in NUMBERS),
                age(topic.get("oldest_ready_ms")),
                paused(topic),
                rate(topic),
                count(len(topic.get("groups") or {})),
                *(count(topic.get(field)) for field in TOTALS),
            )
        )
    return grid


def topic_fields(name: str, topic: Map) -> dict[str, Any]:
    """A topic as ``--json`` shows it."""
    return {"topic": name, **topic}


def each_group(topics: Map, only: str | None = None) -> Iterator[tuple[str, str, Map]]:
    """(topic, group, counts) by name."""
    for topic, counts in sorted(topics.items()):
        if only is None or topic == only:
            for group, of_group in sorted((counts.get("groups") or {}).items()):
                yield topic, group, of_group


def groups_grid(groups: Iterator[tuple[str, str, Map]]) -> Grid:
    """A row a group."""
    numbers = [head(name) for name in NUMBERS if name != "pending"]
    heads = (
        "topic", "group", *numbers, "oldest", "members", "paused", "rate", "retry", "acked",
    )  # fmt: skip
    grid = Grid(heads, right=frozenset((*numbers, "oldest", "members", "acked")))
    for topic, group, counts in groups:
        grid.rows.append(
            (
                topic,
                group,
                *(count(counts.get(field)) for field in NUMBERS if field != "pending"),
                age(counts.get("oldest_ready_ms")),
                count(counts.get("subscribers")),
                paused(counts),
                rate(counts),
                short_policy(counts.get("retry")),
                count(counts.get("acked")),
            )
        )
    return grid


def settings_line(settings: Map) -> str:
    """What holds for a topic or group after a change, on one line."""
    group = settings.get("group")
    whom = f"{settings.get('topic')}" + (f"  {group}" if group else "")
    state = "paused" if settings.get("paused") else "active"
    limit = rate(settings)
    limited = "no rate limit" if limit == "-" else f"rate {limit}"
    policy = settings.get("retry")
    retried = "" if policy is None else f"  retry {describe_policy(policy)}"
    return f"{whom}  {state}  {limited}{retried}"
