"""``topics``, ``pause``, ``resume``, ``rate``, ``groups``, ``policy``: a topic and its groups.

Each group of a topic gets every task of it. Of the retry policies that are set, the task's own
wins, then the group's, the topic's, the daemon's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Unpack

import typer

from tickwheel.cli.call import EXIT_FAILED, Call, ask, can_ask
from tickwheel.cli.counts import (
    FILTER,
    GROUP_STATES,
    GROUPS,
    LINES,
    MEMBERS,
    OLDEST,
    PAUSED,
    RATE,
    REPLAY,
    RETRY,
    STATES,
    TOTALS,
    UNUSED,
    UNUSED_GROUPS,
    count_columns,
    counts_grid,
    filter_text,
    head,
    lines_texts,
    rate_limit,
)
from tickwheel.cli.options import (
    GroupOptions,
    MaybeGroup,
    RetryOption,
    SpecParser,
    TopicArgument,
    group_keywords,
    typed,
)
from tickwheel.cli.output import Grid
from tickwheel.cli.values import (
    SPEC_HELP,
    SPEC_METAVAR,
    describe_policy,
    describe_rule,
    parse_at,
    retry_of,
)
from tickwheel.client import GroupSettings
from tickwheel.errors import BadRequest, Conflict, NotFound

# --- topics --------------------------------------------------------------------------------------

NONE = "none"
FIRST = "delete them first"
"""Ends the daemon's message when force does not help."""
BurstOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="So many at once after a pause. Default: the rate."),
]


_SPARE = (
    "acked", "delivered", "enqueued", "unused", "groups", "replay", "members", "retry", "rate",
    "oldest", "order, shares", "filter",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, in this order: current counts stay longest."""


async def topics(call: Call) -> None:
    """Every topic: its counts, its oldest ready task, whether it is paused, its rate limit."""
    async with call.client() as client:
        found = (await client.stats()).raw.get("topics") or {}
    if call.out.as_json:
        for name, topic in sorted(found.items()):
            call.out.record({"topic": name, **topic})
        return
    call.out.grid(topics_grid(found))


def topics_grid(topics: Mapping[str, Any]) -> Grid:
    """A table with a row for each topic of STATS."""
    counts, totals = count_columns(STATES), count_columns(TOTALS)
    columns = (*counts, OLDEST, PAUSED, RATE, GROUPS, UNUSED_GROUPS, *totals)
    rows = (((name,), topic) for name, topic in sorted(topics.items()))
    return counts_grid(("topic",), columns, rows, spare=_SPARE)


async def broadcast_topic(
    call: Call,
    topic: TopicArgument,
    off: Annotated[
        bool, typer.Option("--off", help="It keeps what comes due for its first group again.")
    ] = False,
) -> None:
    """Keep a topic for broadcasts only: what comes due goes to whoever listens, and ends.

    It has no groups then, and keeps nothing for one. What is waiting for a group ends, too.
    """
    async with call.client() as client:
        show_settings(call, await client.configure(topic, broadcast_only=not off))


async def delete_topic(
    call: Call,
    topic: TopicArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Also when it holds tasks; they end as deleted.")
    ] = False,
) -> int:
    """Delete a topic with its groups, settings and dead letters.

    What it still holds is shown and asked about first. A schedule that enqueues to it has to be
    deleted before.
    """
    return await _delete(
        call, force, lambda by_force: _delete_topic(call, topic, by_force), f"topic {topic}"
    )


async def _delete_topic(call: Call, topic: str, force: bool) -> None:
    async with call.client() as client:
        held = (await client.delete_topic(topic, force=force)).raw
    if call.out.as_json:
        call.out.record({"topic": topic, "deleted": True, **held})
        return
    call.out.line(f"{topic}  deleted{_with(held, (*STATES, 'groups'))}")


def _with(held: Mapping[str, Any], names: Sequence[str]) -> str:
    what = ", ".join(f"{held[n]:,} {head(n)}" for n in names if held.get(n))
    return f" with {what}" if what else ""


async def _delete(
    call: Call, force: bool, delete: Callable[[bool], Awaitable[None]], what: str
) -> int:
    """Delete a group or topic; at a terminal ask first if it holds anything, and then use force."""
    try:
        await delete(force)
    except Conflict as conflict:
        if force or conflict.message.endswith(FIRST):
            raise
        if not can_ask(call):
            raise Conflict(f"{conflict.message}; --force deletes it with them") from None
        call.out.remark(conflict.message)
        if not ask(f"Delete {what} and what it holds?"):
            call.out.remark("nothing was deleted")
            return EXIT_FAILED
        await delete(True)
    return 0


async def pause(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Deliver nothing of a topic, or to one of its groups, until it is resumed.

    Enqueues go on; what is in flight may still be acked. It holds over restarts.
    """
    async with call.client() as client:
        if group is None and topic not in (await client.stats()).topics:
            call.out.remark(f"there is no topic {topic} yet: it is paused from its first task on")
        show_settings(call, await client.pause(topic, group))


async def resume(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Deliver again what was paused."""
    async with call.client() as client:
        show_settings(call, await client.resume(topic, group))


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
    show_settings(call, settings)


def parse_rate(text: str) -> float | None:
    """A rate above 0; None for ``none``."""
    if text.strip().lower() == NONE:
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise BadRequest(f"the rate is {text!r:.40}; a number above 0 is needed, or {NONE}")
    return found


def show_settings(call: Call, settings: GroupSettings) -> None:
    """Show the settings that hold now."""
    if call.out.as_json:
        call.out.record(dict(settings.raw))
    else:
        call.out.line(settings_line(settings.raw))


def settings_line(settings: Mapping[str, Any]) -> str:
    """The settings of a topic or group on one line."""
    group = settings.get("group")
    whom = f"{settings.get('topic')}" + (f"  {group}" if group else "")
    state = "paused" if settings.get("paused") else "active"
    limit = rate_limit(settings)
    limited = "no rate limit" if limit == "-" else f"rate {limit}"
    policy = settings.get("retry")
    retried = "" if policy is None else f"  retry {describe_policy(policy)}"
    rule = settings.get("if_pending")
    merged = "" if rule is None else f"  if pending: {describe_rule(rule)}"
    alone = "  broadcasts only" if settings.get("broadcast_only") else ""
    wanted = filter_text(settings)
    filtered = "" if wanted == "-" else f"  {wanted}"
    lined = "".join(f"  {part}" for part in lines_texts(settings))
    return f"{whom}  {state}  {limited}{retried}{merged}{alone}{filtered}{lined}"


# --- groups --------------------------------------------------------------------------------------

STARTS = ("now", "first")

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]


def parse_start(text: str) -> str | datetime:
    """The start ``now``, ``first``, or a time in ISO-8601."""
    if text in STARTS:
        return text
    try:
        return parse_at(text)
    except ValueError:
        raise ValueError(f"{text!r:.60} is neither now nor first nor an ISO-8601 time") from None


async def list_groups(
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
    found = [
        ((name, group), of_group)
        for name, of_topic in sorted(topics.items())
        if topic in {None, name}
        for group, of_group in sorted((of_topic.get("groups") or {}).items())
    ]
    if not call.out.as_json:
        call.out.grid(groups_grid(found))
        return
    for (name, group), of_group in found:
        call.out.record({"topic": name, "group": group, **of_group})


def groups_grid(groups: Sequence[tuple[tuple[str, str], Mapping[str, Any]]]) -> Grid:
    """A table with a row for each group of STATS, by topic and group."""
    states, acked = count_columns(GROUP_STATES), count_columns(["acked"])
    lines = (LINES,) if any(lines_texts(group) for _, group in groups) else ()
    columns = (*states, OLDEST, MEMBERS, UNUSED, PAUSED, RATE, RETRY, FILTER, *lines)
    columns += (REPLAY, *acked)
    return counts_grid(("topic", "group"), columns, groups, spare=_SPARE)


async def create_group(
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
    **of_group: Unpack[GroupOptions],
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
            **group_keywords(of_group),
        )
    show_settings(call, settings)
    if not settings.raw.get("created", True):
        call.out.remark(f"group {group} of {topic} existed before; nothing was changed")


async def set_group(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    all_: Annotated[
        bool, typer.Option("--all", help="No filter: it gets every task again.")
    ] = False,
    no_order: Annotated[
        bool, typer.Option("--no-order", help="Failed tasks of order keys as by default again.")
    ] = False,
    no_fair: Annotated[bool, typer.Option("--no-fair", help="No fair shares.")] = False,
    **of_group: Unpack[GroupOptions],
) -> None:
    """Change a group's filter, how it tries tasks of order keys again, and its fair shares.

    What came due before is judged by the filter that it had. What is not named stays; a limit of 0
    is none.
    """
    changed: dict[str, Any] = {**group_keywords(of_group)}
    if all_ and changed.keys() & {"tags", "where"}:
        raise BadRequest("name --tags, --where or both; or --all")
    changed |= dict.fromkeys(("tags", "where")) if all_ else {}
    for none, flag, names in (
        (no_order, "--no-order", ("order_retry", "order_attempts", "order_failure")),
        (no_fair, "--no-fair", ("fair_by", "limit_each", "rate_each")),
    ):
        if none and changed.keys() & set(names):
            raise BadRequest(f"{flag} takes away what other options set; give one of them")
        changed |= dict.fromkeys(names) if none else {}
    if not changed:
        raise BadRequest("name what shall change: --tags, --where, --order-retry, --fair-by, …")
    async with call.client() as client:
        show_settings(call, await client.configure(topic, group, **changed))


async def delete_group(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Also when it holds tasks; they are gone for it.")
    ] = False,
) -> int:
    """Delete a group. What it still holds is shown and asked about first."""
    return await _delete(
        call,
        force,
        lambda by_force: _delete_group(call, topic, group, by_force),
        f"group {group} of {topic}",
    )


async def _delete_group(call: Call, topic: str, group: str, force: bool) -> None:
    async with call.client() as client:
        held = (await client.delete_group(topic, group, force=force)).raw
    if call.out.as_json:
        call.out.record({"topic": topic, "group": group, "deleted": True, **held})
        return
    call.out.line(f"{topic}  {group}  deleted{_with(held, GROUP_STATES)}")


# --- policies ------------------------------------------------------------------------------------

SpecArgument = Annotated[
    Any, typer.Argument(parser=SpecParser, metavar=SPEC_METAVAR, help=SPEC_HELP)
]


async def show_policy(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """The policies of a topic and its groups; none set means the next outer one."""
    async with call.client() as client:
        topics = (await client.stats()).raw.get("topics") or {}
    if topic not in topics:
        raise NotFound(f"there is no topic {topic!r:.255}")
    groups = topics[topic].get("groups") or {}
    if group is not None and group not in groups:
        raise NotFound(f"there is no group {group!r:.255} of topic {topic}")
    own = topics[topic].get("retry")
    rows: list[tuple[str | None, Any]] = [] if group is not None else [(None, own)]
    rows += [(n, g.get("retry")) for n, g in sorted(groups.items()) if group in {None, n}]
    grid = Grid(("topic", "group", "own policy", "what holds"))
    for name, policy in rows:
        found, level = _policy_that_holds(policy, own, name)
        if call.out.as_json:
            call.out.record(
                {"topic": topic, "group": name, "retry": policy, "holds": found, "from": level}
            )
        else:
            shown = describe_policy(found) if found is not None else "the daemon's default"
            grid.rows.append((topic, name or "", describe_policy(policy), shown))
    if not call.out.as_json:
        call.out.grid(grid)


def _policy_that_holds(policy: Any, of_topic: Any, group: str | None) -> tuple[Any, str]:
    """The retry policy that holds, and whose it is."""
    if policy is not None:
        return policy, "topic" if group is None else "group"
    return (of_topic, "topic") if of_topic is not None else (None, "daemon")


async def set_policy(
    call: Call, topic: TopicArgument, spec: SpecArgument, group: MaybeGroup = None
) -> None:
    """Set the policy of a topic, or of one of its groups."""
    async with call.client() as client:
        show_settings(call, await client.configure(topic, group, retry=retry_of(spec)))


async def clear_policy(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Take away a topic's or group's own policy; the next outer one holds again."""
    async with call.client() as client:
        show_settings(call, await client.configure(topic, group, retry=None))
