"""``tickwheel groups``: who gets a topic's tasks. Each group gets every task."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import typer

from tickwheel.cli import counts
from tickwheel.cli.call import EXIT_FAILED, Call, ask, can_ask
from tickwheel.cli.options import RetryOption, TopicArgument, typed
from tickwheel.cli.topics import BurstOption, tell
from tickwheel.cli.values import parse_at, retry_of
from tickwheel.errors import BadRequest, Conflict, NotFound

HELD = ("ready", "in_flight", "waiting", "dead")
STARTS = ("now", "first")

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]


def parse_start(text: str) -> str | datetime:
    """``now``, ``first`` or ISO-8601."""
    if text in STARTS:
        return text
    try:
        return parse_at(text)
    except ValueError:
        raise ValueError(f"{text!r:.60} is neither now nor first nor an ISO-8601 time") from None


async def list_(
    call: Call,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="Only this topic's groups.")
    ] = None,
) -> None:
    """Groups with their counts and settings."""
    async with call.client() as client:
        topics = (await client.stats()).raw.get("topics") or {}
    if topic is not None and topic not in topics:
        raise NotFound(f"there is no topic {topic!r:.255}")
    found = counts.each_group(topics, topic)
    if not call.out.as_json:
        call.out.grid(counts.groups_grid(found))
        return
    for name, group, of_group in found:
        call.out.record({"topic": name, "group": group, **of_group})


async def create(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    start: Annotated[
        Any,
        typer.Option(
            parser=typed(parse_start),
            metavar="now|first|TIME",
            help="From when on tasks are its own: from now, all that are there, or ISO-8601.",
        ),
    ] = "now",
    retry: RetryOption = None,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="Deliveries a second at most.")
    ] = None,
    burst: BurstOption = None,
    paused: Annotated[
        bool, typer.Option("--paused", help="Deliver nothing until resumed.")
    ] = False,
) -> None:
    """Create a group before its first subscriber comes. One that exists stays as it is."""
    if rate is not None and rate <= 0:
        raise BadRequest(f"--rate is {rate:g}; a number above 0 is needed")
    if rate is None and burst is not None:
        raise BadRequest("--burst goes with --rate")
    async with call.client() as client:
        settings = await client.create_group(
            topic,
            group,
            start=start,
            retry=retry_of(retry),
            rate=rate,
            burst=burst,
            paused=paused,
        )
    tell(call, settings)
    if not settings.raw.get("created", True):
        call.out.remark(f"group {group} of {topic} existed before; nothing was changed")


async def delete(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Also when it holds tasks; they are gone for it.")
    ] = False,
) -> int:
    """Delete a group. What it still holds is shown and asked about first."""
    try:
        await _delete(call, topic, group, force)
    except Conflict as conflict:
        if force or not can_ask(call):
            raise Conflict(f"{conflict.message}; --force deletes it with them") from None
        call.out.remark(conflict.message)
        if not ask(f"Delete group {group} of {topic} and what it holds?"):
            call.out.remark("nothing was deleted")
            return EXIT_FAILED
        await _delete(call, topic, group, force=True)
    return 0


async def _delete(call: Call, topic: str, group: str, force: bool) -> None:
    async with call.client() as client:
        held: Mapping[str, Any] = await client.delete_group(topic, group, force=force)
    if call.out.as_json:
        call.out.record({"topic": topic, "group": group, "deleted": True, **held})
        return
    what = ", ".join(f"{held[n]:,} {counts.head(n)}" for n in HELD if held.get(n))
    call.out.line(f"{topic}  {group}  deleted" + (f" with {what}" if what else ""))
