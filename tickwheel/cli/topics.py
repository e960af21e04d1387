"""``topics``, ``pause``, ``resume``, ``rate``: what goes through a topic, and how fast."""

from __future__ import annotations

from typing import Annotated

import typer

from tickwheel.cli import counts
from tickwheel.cli.call import Call
from tickwheel.cli.options import MaybeGroup, TopicArgument
from tickwheel.client import GroupSettings
from tickwheel.errors import BadRequest

NONE = "none"
BurstOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="So many at once after a pause. Default: the rate."),
]


async def topics(call: Call) -> None:
    """Every topic: its counts, its oldest ready task, whether it is paused, its rate limit."""
    async with call.client() as client:
        found = (await client.stats()).raw.get("topics") or {}
    if call.out.as_json:
        for name, topic in sorted(found.items()):
            call.out.record(counts.topic_fields(name, topic))
        return
    call.out.grid(counts.topics_grid(found))


async def pause(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Deliver nothing of a topic, or to one of its groups, until it is resumed.

    Enqueues go on; what is in flight may still be acked. It holds over restarts.
    """
    async with call.client() as client:
        tell(call, await client.pause(topic, group))


async def resume(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Deliver again what was paused."""
    async with call.client() as client:
        tell(call, await client.resume(topic, group))


async def rate(
    call: Call,
    topic: TopicArgument,
    limit: Annotated[
        str, typer.Argument(metavar="N|none", help="Deliveries a second; none lifts the limit.")
    ],
    group: MaybeGroup = None,
    burst: BurstOption = None,
) -> None:
    """Deliver no more than N a second of a topic, or to one of its groups.

    For the backlog after a downtime: what is due waits its turn, nothing is lost.
    """
    per_second = parse_rate(limit)
    if per_second is None and burst is not None:
        raise BadRequest("--burst goes with a rate, not with none")
    async with call.client() as client:
        if per_second is None:
            settings = await client.configure(topic, group, rate=None, burst=None)
        elif burst is None:
            settings = await client.configure(topic, group, rate=per_second)
        else:
            settings = await client.configure(topic, group, rate=per_second, burst=burst)
    tell(call, settings)


def parse_rate(text: str) -> float | None:
    """A number above 0, or none."""
    if text.strip().lower() == NONE:
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise BadRequest(f"the rate is {text!r:.40}; a number above 0 is needed, or {NONE}")
    return found


def tell(call: Call, settings: GroupSettings) -> None:
    """What holds now."""
    if call.out.as_json:
        call.out.record(dict(settings.raw))
    else:
        call.out.line(counts.settings_line(settings.raw))
