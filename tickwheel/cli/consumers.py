"""``tickwheel consumers``: who is connected and takes tasks."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from tickwheel.cli.call import Call
from tickwheel.cli.listing import LimitOption, shown
from tickwheel.cli.options import GroupOption, TopicOption
from tickwheel.cli.output import Grid
from tickwheel.cli.values import format_count, format_duration, iso_time, printable
from tickwheel.client import ConsumerInfo

BROADCAST = "(broadcast)"
"""Shown in place of the group of a broadcast subscription, which has none."""


async def consumers(
    call: Call,
    topic: TopicOption = None,
    group: GroupOption = None,
    limit: LimitOption = None,
) -> None:
    """Who is connected and takes tasks: each subscription, and each pull that waits."""
    grid = consumers_grid()
    async with call.client() as client:
        find = partial(client.list_consumers, topic=topic, group=group)
        async for one in shown(call, limit, lambda most: find(limit=most)):
            if call.out.as_json:
                call.out.record(fields_of(one))
            else:
                grid.rows.append(_row(one))
    if call.out.as_json:
        return
    if grid.rows:
        call.out.grid(grid)
    else:
        call.out.remark("nobody takes such tasks at the moment")


def consumers_grid() -> Grid:
    columns = (
        "host", "pid", "topic", "group", "in flight", "prefetch", "connected", "by",
        "client", "version",
    )  # fmt: skip
    return Grid(
        columns,
        right=frozenset(("pid", "in flight", "prefetch", "connected")),
        spare=("version", "client", "by"),
    )


def _row(one: ConsumerInfo) -> tuple[str, ...]:
    connected = format_duration(max(0.0, time.time() - one.raw["since_ms"] / 1000))
    return (
        printable(one.host or one.address),
        "-" if one.pid is None else str(one.pid),
        one.topic,
        BROADCAST if one.group is None else one.group,
        format_count(one.in_flight),
        format_count(one.prefetch),
        connected,
        one.kind,
        printable(one.client) or "-",
        printable(one.version or "") or "-",
    )


def fields_of(one: ConsumerInfo) -> dict[str, Any]:
    """A consumer in the form of ``--json``."""
    return {**one.raw, "since": iso_time(one.raw["since_ms"])}
