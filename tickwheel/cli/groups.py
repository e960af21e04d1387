"""``topics``, ``pause``, ``resume``, ``rate``, ``groups``, ``policy``: a topic and its groups.

Each group of a topic gets every task of it. Of the retry policies that are set, the task's own
wins, then the group's, the topic's, the daemon's.

``tickwheel groups reset``: what came due since a moment comes to a group again.

``tickwheel groups held|lines|release-key|skip-key``: order keys and fair shares of a group.

``tickwheel pending``, and the options of an enqueue about a key that is pending: what becomes of
a task then, as options and as a line of JSON."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Annotated, Any, TypeVar, Unpack

import typer

from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call, ask, can_ask
from tickwheel.cli.options import (
    SPEC_HELP,
    SPEC_METAVAR,
    ActionArgument,
    DueOption,
    GroupOptions,
    MaxWaitOption,
    MaybeGroup,
    ReplacesOption,
    RetryOption,
    SpecParser,
    TopicArgument,
    UniqueOption,
    WindowOption,
    describe_policy,
    describe_rule,
    format_count,
    format_duration,
    format_time,
    group_keywords,
    iso_time,
    parse_at,
    parse_id,
    parse_moment,
    printable,
    retry_of,
    rule_of,
    typed,
)
from tickwheel.cli.output import (
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
    ROWS_SHOWN,
    STATES,
    TOTALS,
    UNUSED,
    UNUSED_GROUPS,
    Grid,
    asked,
    count_columns,
    counts_grid,
    cut,
    filter_text,
    head,
    lines_texts,
    rate_limit,
)
from tickwheel.cli.tasks import follow_bulk, reason_text, say_bulk
from tickwheel.client import GroupSettings, HeldKey, KeyLine, ResetPreview
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
        held: Mapping[str, Any] = await client.delete_topic(topic, force=force)
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
        held: Mapping[str, Any] = await client.delete_group(topic, group, force=force)
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


# --- resets --------------------------------------------------------------------------------------

FROM_FIRST = "first"


def parse_to(text: str) -> str | datetime:
    """The start of a reset: ``first``, a time, or how long ago."""
    if text == FROM_FIRST:
        return text
    try:
        return parse_moment(text)
    except ValueError:
        raise ValueError(
            f"{text!r:.60} is neither first nor an ISO-8601 time nor a duration such as 2h (ago)"
        ) from None


async def reset_group(
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
            bulk = await follow_bulk(client, bulk)
    say_bulk(call, bulk)
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


# --- order keys and fair shares ------------------------------------------------------------------

ANSWER_MAX = 1000
"""Keys in one answer of the daemon, which has no next page: the first ones matter most."""
KeyLimitOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=ANSWER_MAX,
        metavar="N",
        help=f"At most so many. Default: {ANSWER_MAX} with --json, {ROWS_SHOWN} as a table.",
    ),
]
HeldArgument = Annotated[
    int | None,
    typer.Argument(metavar="TASK_ID", parser=typed(parse_id), help="The task that is held."),
]
HeldKeyOption = Annotated[str | None, typer.Option("--key", help="Instead of it: its order key.")]
NOT_HELD = "not_held"
Verb = Callable[..., Awaitable[str]]
T = TypeVar("T")


async def held_keys(
    call: Call, topic: TopicArgument, group: GroupArgument, limit: KeyLimitOption = None
) -> None:
    """Order keys that wait for you, the oldest first: the task that failed, why, what waits."""
    async with call.client() as client:
        found = await _first(call, limit, partial(client.held_keys, topic, group))
    if call.out.as_json:
        for one in found:
            fields = _key_fields(one) | {"since": iso_time(one.since_ms)}
            call.out.record({"topic": topic, "group": group, **fields})
        return
    if not found:
        call.out.remark(f"no key of group {group} of topic {topic} is held")
        return
    grid = Grid(
        ("key", "task", "since", "attempts", "waiting", "reason"),
        right=frozenset(("task", "since", "attempts", "waiting")),
    )
    for one in found:
        age = format_duration(max(0.0, time.time() - one.since_ms / 1000))
        counts = format_count(one.attempt), format_count(one.waiting)
        grid.rows.append((_key_text(one.key), str(one.id), age, *counts, reason_text(one.reason)))
    call.out.grid(grid)


async def key_lines(
    call: Call, topic: TopicArgument, group: GroupArgument, limit: KeyLimitOption = None
) -> None:
    """Who waits for whom: order keys, and values that share the group, with most tasks waiting."""
    async with call.client() as client:
        found = await _first(call, limit, partial(client.key_lines, topic, group))
    if call.out.as_json:
        for one in found:
            call.out.record({"topic": topic, "group": group, **_key_fields(one)})
        return
    if not found:
        call.out.remark(f"nothing of group {group} of topic {topic} waits for its turn")
        return
    grid = Grid(
        ("by", "value", "state", "in flight", "waiting", "task"),
        right=frozenset(("in flight", "waiting", "task")),
    )
    for one in found:
        counts = format_count(one.in_flight), format_count(one.waiting)
        state = one.state.replace("_", " ")
        grid.rows.append((one.kind, _key_text(one.value), state, *counts, str(one.id)))
    call.out.grid(grid)


async def _first(call: Call, limit: int | None, ask: Callable[..., Awaitable[list[T]]]) -> list[T]:
    """As many keys as the list shows; says so if the daemon's answer is full."""
    most = min(asked(call.out, limit) or ANSWER_MAX, ANSWER_MAX)
    found = await ask(limit=most)
    if limit is None and len(found) == ANSWER_MAX:
        call.out.remark(f"these are the first {ANSWER_MAX:,}; the daemon shows no more at once")
    return list(cut(call.out, limit, found))


async def release_key(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    task_id: HeldArgument = None,
    key: HeldKeyOption = None,
) -> int:
    """Try the task of a held key again at once, its failures counted anew."""
    return await _act_on_key(call, "release_key", (topic, group), task_id, key)


async def skip_key(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    task_id: HeldArgument = None,
    key: HeldKeyOption = None,
) -> int:
    """Give the task of a held key up: it is a dead letter, and its key goes on."""
    return await _act_on_key(call, "skip_key", (topic, group), task_id, key)


async def _act_on_key(
    call: Call, verb: str, names: tuple[str, str], task_id: int | None, key: str | None
) -> int:
    if (task_id is None) == (key is None):
        raise BadRequest("give TASK_ID or --key, one of them")
    async with call.client() as client:
        word: str = await getattr(client, verb)(*names, task_id, key=key)
    if call.out.as_json:
        named = {"task_id": None if task_id is None else str(task_id), "key": key}
        call.out.record({"topic": names[0], "group": names[1], **named, "result": word})
    else:
        called = f"key {_key_text(key)}" if task_id is None else str(task_id)
        call.out.line(f"{called}  {word.replace('_', ' ')}")
    return EXIT_NOT_FOUND if word == NOT_HELD else 0


def _key_fields(one: HeldKey | KeyLine) -> dict[str, Any]:
    found = asdict(one)
    del found["raw"]
    return found | {"id": str(one.id)}


def _key_text(value: object) -> str:
    return "-" if value is None else printable(str(value))


# --- the rule of a topic -------------------------------------------------------------------------


async def set_pending(
    call: Call,
    topic: TopicArgument,
    action: ActionArgument,
    window: WindowOption = None,
    unique_until: UniqueOption = None,
    replaces: ReplacesOption = None,
    due: DueOption = None,
    max_wait: MaxWaitOption = None,
) -> None:
    """What becomes of a topic's tasks whose key is pending, unless they say it themselves."""
    rule = rule_of(action, window, unique_until, replaces, due, max_wait)
    async with call.client() as client:
        show_settings(call, await client.configure(topic, if_pending=rule))


async def clear_pending(call: Call, topic: TopicArgument) -> None:
    """Such tasks are all stored again."""
    async with call.client() as client:
        show_settings(call, await client.configure(topic, if_pending=None))
