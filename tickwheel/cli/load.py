"""``load``: how full the next hours are, as they stand on the wheel."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from tickwheel.cli.call import Call
from tickwheel.cli.options import moment, typed
from tickwheel.cli.output import Grid
from tickwheel.cli.values import format_count, format_duration, format_time, iso_time
from tickwheel.client import Load
from tickwheel.model.written import parse_duration

BAR_LENGTH = 40


async def load(
    call: Call,
    step: Annotated[
        float, typer.Option(parser=typed(parse_duration), metavar="DURATION", help="Of each row.")
    ] = "1m",  # type: ignore[assignment]  # what the parser is given
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="So many rows, at most 1440.")
    ] = 60,
    since: Annotated[
        datetime | None, moment("--from", "The first row: ISO-8601. Default: now.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Rows in which nothing is due, too.")
    ] = False,
) -> None:
    """How many tasks are due in each of the next minutes, or hours: --step 1h --steps 24."""
    async with call.client() as client:
        found = await client.load(step=step, steps=steps, since=since)
    if call.out.as_json:
        call.out.record(_fields(found))
        return
    grid = Grid(("from", "tasks", ""), right=frozenset(("tasks",)))
    most = max(found.counts)
    for at_ms, count in _rows(found):
        if count or everything:
            bar = "█" * -(-count * BAR_LENGTH // most) if most else ""
            grid.rows.append((format_time(at_ms), format_count(count), bar))
    call.out.grid(grid)
    until = format_duration(found.step_ms * len(found.counts) / 1000)
    estimated = "" if found.exact else ", far ones estimated from a part of them"
    call.out.remark(
        f"{sum(found.counts):,} of {found.scheduled:,} tasks on the wheel are due within {until}"
        f"{estimated}"
    )


def _rows(found: Load) -> list[tuple[int, int]]:
    return [(found.from_ms + n * found.step_ms, count) for n, count in enumerate(found.counts)]


def _fields(found: Load) -> dict[str, object]:
    return {
        "from_ms": found.from_ms,
        "from": iso_time(found.from_ms),
        "step_ms": found.step_ms,
        "counts": list(found.counts),
        "exact": found.exact,
        "scheduled": found.scheduled,
    }
