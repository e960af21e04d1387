"""``tickwheel groups reset``: what came due since a moment comes to a group again."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from tickwheel.cli.bulk import follow, say
from tickwheel.cli.call import EXIT_FAILED, Call, ask, can_ask
from tickwheel.cli.groups import GroupArgument
from tickwheel.cli.options import TopicArgument, parse_moment, typed
from tickwheel.cli.values import format_time
from tickwheel.client import ResetPreview
from tickwheel.errors import BadRequest

FIRST = "first"


def parse_to(text: str) -> str | datetime:
    """The start of a reset: ``first``, a time, or how long ago."""
    if text == FIRST:
        return text
    try:
        return parse_moment(text)
    except ValueError:
        raise ValueError(
            f"{text!r:.60} is neither first nor an ISO-8601 time nor a duration such as 2h (ago)"
        ) from None


async def reset(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    to: Annotated[
        Any,
        typer.Option(
            parser=typed(parse_to),
            metavar="first|TIME|AGO",
            help="Since when: all that is known, ISO-8601, or 2h for two hours ago.",
        ),
    ],
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="So many tasks a second at most.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would come again; do nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until the bulk operation is over; shows how far it is.")
    ] = False,
) -> int:
    """Give a group again what came due since a moment and what it has finished, or missed.

    Each task comes as a new one that says which it stands for. Other groups notice nothing.
    """
    if rate is not None and rate <= 0:
        raise BadRequest(f"--rate is {rate:g}; a number above 0 is needed")
    async with call.client() as client:
        if dry_run:
            _say_preview(call, topic, group, await client.preview_reset(topic, group, to=to))
            return 0
        if not yes:
            found = await client.preview_reset(topic, group, to=to)
            if not _is_confirmed(call, f"group {group} of topic {topic}", found):
                return EXIT_FAILED
        bulk = await client.reset_group(topic, group, to=to, rate=rate)
        if wait:
            bulk = await follow(client, bulk)
    say(call, bulk)
    return EXIT_FAILED if bulk.state in ("failed", "cancelled") else 0


def _is_confirmed(call: Call, whom: str, found: ResetPreview) -> bool:
    what = f"{found.tasks:,} tasks{_span(found)}{_lost(found)}"
    if not can_ask(call):
        call.out.remark(f"conflict: {what} would come to {whom} again; say --yes")
        return False
    if not ask(f"Give {whom} {what} again?"):
        call.out.remark("nothing was changed")
        return False
    return True


def _say_preview(call: Call, topic: str, group: str, found: ResetPreview) -> None:
    if call.out.as_json:
        call.out.record({"topic": topic, "group": group, **found.raw})
        return
    call.out.line(f"dry run  {found.tasks:,} tasks would come again{_span(found)}{_lost(found)}")


def _span(found: ResetPreview) -> str:
    if found.first is None:
        return ""
    first, last = (format_time(found.raw[name]) for name in ("first_ms", "last_ms"))
    return f", due from {first} to {last}"


def _lost(found: ResetPreview) -> str:
    """The part of a preview about tasks that cannot come again, and gaps; empty: there are none."""
    lost = f"; {found.lost:,} cannot, their bodies were not kept" if found.lost else ""
    if found.incomplete:
        gaps = "a gap" if found.incomplete == 1 else f"{found.incomplete:,} gaps"
        lost += f"; incomplete: the history has {gaps} in that time, more may be left out"
    return lost
