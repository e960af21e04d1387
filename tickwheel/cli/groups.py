"""Commands on topics and their groups: ``topics``, ``groups``, ``pause``, ``resume``, ``rate``,
``policy``, ``pending``; resets of a group, its order keys and fair shares; ``push`` and
``forward``: groups whose tasks are sent to a URL, or to another broker, instead of to subscribers.

Each group of a topic gets every task of it. Of the retry policies that are set, the task's own
wins, then the group's, the topic's, the daemon's.

Secrets of targets come from files, a line each, and are shown by no command. (The address of a
target is ``--to``: ``--url`` is the daemon's, here as everywhere.)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypedDict, TypeVar, Unpack

from tickwheel.api.targets import TargetRemoved
from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call, ask, can_ask, confirmed
from tickwheel.cli.declared import declared
from tickwheel.cli.options import (
    SPEC_HELP,
    SPEC_METAVAR,
    ActionArgument,
    BurstOption,
    GroupArgument,
    GroupOptions,
    MaybeGroup,
    NewGroupOptions,
    RuleOptions,
    TopicArgument,
    YesOption,
    argument,
    check_rate,
    flag,
    group_keywords,
    option,
    parse_at,
    parse_id,
    parse_moment,
    retry_of,
    rule_of,
    word_or,
)
from tickwheel.cli.output import (
    GROUP_STATES,
    OLDEST,
    ROWS_SHOWN,
    STATES,
    TOTALS,
    Column,
    Grid,
    Listing,
    Map,
    age,
    ago,
    asked,
    column,
    count_columns,
    cut,
    describe_policy,
    describe_rule,
    facts_grid,
    fields_of,
    format_count,
    format_duration,
    format_time,
    grid_of,
    head,
    printable,
    short_policy,
    spec_duration,
    text_columns,
)
from tickwheel.cli.tasks import follow_bulk, reason_text, say_bulk
from tickwheel.client import (
    Client,
    GroupSettings,
    HeldKey,
    KeyLine,
    KeyPause,
    PausedKey,
    PushSent,
    ResetPreview,
    TargetInfo,
)
from tickwheel.errors import BadRequest, Conflict, NotFound
from tickwheel.model.policies import parse_policy

FIRST = "delete them first"
"""Ends the daemon's message when force does not help."""

# --- columns of topics and groups ----------------------------------------------------------------


def rate_limit(settings: Map) -> str:
    """``100/s``, ``100/s burst 200``, or a dash for no limit."""
    limit, burst = settings.get("rate"), settings.get("burst")
    if limit is None:
        return "-"
    return f"{limit:g}/s" + ("" if burst is None else f" burst {burst}")


def _replay(group: Map) -> str:
    """How far tasks from before the group have been looked at for it; a dash: all have been."""
    found = group.get("replay")
    return "-" if found is None else f"{found['share']:.0%}"


def _held_up(row: Map) -> str:
    if row.get("deleting"):
        return "deleting"
    return _pause(row) if row.get("paused") else "-"


def _pause(row: Map) -> str:
    """That a topic or group is paused, and since when if that is known."""
    since_ms = row.get("paused_ms")
    return "paused" if since_ms is None else f"paused {ago(since_ms)}"


def filter_text(group: Map) -> str:
    """The filter of a group, or a dash for none."""
    parts = (f"{name} {group[name]}" for name in ("tags", "where") if group.get(name))
    return ", ".join(parts) or "-"


def lines_texts(group: Map) -> list[str]:
    """The settings of order keys and fair shares of a group, in words."""
    found = []
    if (retry_ms := group.get("order_retry_ms")) is not None:
        found.append(f"order retry {spec_duration(retry_ms)}")
    failure, attempts = group.get("order_failure"), group.get("order_attempts")
    if failure is not None:
        found.append(
            "tried for ever" if attempts is None else f"{failure} after {attempts} attempts"
        )
    if (value := group.get("fair_by")) is not None:
        limit, rate = group.get("limit_each"), group.get("rate_each")
        limits = [f"{limit} in flight"] if limit is not None else []
        limits += [f"{rate:g}/s"] if rate is not None else []
        found.append(f"fair by {value}" + (f" ({', '.join(limits)} each)" if limits else ""))
    return found


def _unused_groups(topic: Map) -> str:
    """How many groups nobody has used for long; a dash: none."""
    groups = (topic.get("groups") or {}).values()
    count = sum(group.get("unused_ms") is not None for group in groups)
    return format_count(count) if count else "-"


_PAUSED = Column("paused", _held_up)
_RATE = Column("rate", rate_limit)
_LINES = Column[Map]("order, shares", lambda row: ", ".join(lines_texts(row)) or "-")
_SPARE = (
    "acked", "delivered", "enqueued", "unused", "groups", "replay", "members", "retry", "rate",
    "oldest", "order, shares", "filter",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, in this order: current counts stay longest."""


def topics_grid(topics: Map) -> Grid:
    """A table with a row for each topic of STATS."""
    columns = (
        column("topic"), *count_columns(*STATES), OLDEST, _PAUSED, _RATE,
        Column[Map]("groups", lambda row: format_count(len(row.get("groups") or {})), right=True),
        Column("unused", _unused_groups, right=True), *count_columns(*TOTALS),
    )  # fmt: skip
    rows = ({"topic": name, **topic} for name, topic in sorted(topics.items()))
    return grid_of(columns, rows, spare=_SPARE)


def groups_grid(groups: Sequence[Map]) -> Grid:
    """A table with a row for each group of STATS, with the names of its topic and its own."""
    columns = (
        *text_columns("topic", "group"), *count_columns(*GROUP_STATES), OLDEST,
        column("members", "subscribers", format_count),
        column("unused", "unused_ms", age, right=True), _PAUSED, _RATE,
        column("retry", show=short_policy),
        Column("filter", filter_text), *([_LINES] if any(map(lines_texts, groups)) else []),
        Column("replay", _replay, right=True), *count_columns("acked"),
    )  # fmt: skip
    return grid_of(columns, groups, spare=_SPARE)


# --- topics and groups ---------------------------------------------------------------------------


async def _topics(call: Call) -> dict[str, Any]:
    """Each topic by name with what STATS say of it, sorted."""
    stats = await call.ask(Client.stats)
    return dict(sorted((stats.raw.get("topics") or {}).items()))


async def topics(call: Call) -> None:
    """Every topic: its counts, its oldest ready task, whether it is paused, its rate limit."""
    found = await _topics(call)
    if not call.out.as_json:
        call.out.grid(topics_grid(found))
        return
    for name, topic in found.items():
        call.out.record({"topic": name, **topic})


async def list_groups(
    call: Call, topic: Annotated[str | None, argument("TOPIC", "Only this topic's groups.")] = None
) -> None:
    """Groups with their counts and settings."""
    topics = await _topics(call)
    if topic is not None:
        topics = {topic: _known(topics, topic)}
    found = [
        {"topic": name, "group": group, **of_group}
        for name, of_topic in topics.items()
        for group, of_group in sorted((of_topic.get("groups") or {}).items())
    ]
    if not call.out.as_json:
        call.out.grid(groups_grid(found))
        return
    for group in found:
        call.out.record(group)


def _known(topics: Map, topic: str) -> Any:
    if topic not in topics:
        raise NotFound(f"there is no topic {topic!r:.255}")
    return topics[topic]


async def delete_topic(
    call: Call,
    topic: TopicArgument,
    force: Annotated[bool, flag("Also when it holds tasks; they end as deleted.")] = False,
) -> int:
    """Delete a topic with its groups, settings and dead letters.

    What it still holds is shown and asked about first. A schedule that enqueues to it has to be
    deleted before.
    """
    return await _delete(call, topic, None, force)


async def delete_group(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    force: Annotated[bool, flag("Also when it holds tasks; they are gone for it.")] = False,
) -> int:
    """Delete a group. What it still holds is shown and asked about first."""
    return await _delete(call, topic, group, force)


async def _delete(call: Call, topic: str, group: str | None, force: bool) -> int:
    """Delete a group or topic; at a terminal ask first if it holds anything, and then use force."""
    try:
        await _delete_now(call, topic, group, force)
    except Conflict as conflict:
        if force or conflict.message.endswith(FIRST):
            raise
        if not can_ask(call):
            raise Conflict(f"{conflict.message}; --force deletes it with them") from None
        call.out.remark(conflict.message)
        what = f"topic {topic}" if group is None else f"group {group} of {topic}"
        if not ask(f"Delete {what} and what it holds?"):
            call.out.remark("nothing was deleted")
            return EXIT_FAILED
        await _delete_now(call, topic, group, True)
    return 0


async def _delete_now(call: Call, topic: str, group: str | None, force: bool) -> None:
    held: Map
    if group is None:
        held = (await call.ask(lambda client: client.delete_topic(topic, force=force))).raw
    else:
        held = (await call.ask(lambda client: client.delete_group(topic, group, force=force))).raw
    counted = (*STATES, "groups") if group is None else GROUP_STATES
    what = ", ".join(f"{held[n]:,} {head(n)}" for n in counted if held.get(n))
    named = {"topic": topic} if group is None else {"topic": topic, "group": group}
    line = f"{'  '.join(named.values())}  deleted" + (f" with {what}" if what else "")
    call.out.result({**named, "deleted": True, **held}, line)


# --- settings ------------------------------------------------------------------------------------


async def _configure(call: Call, topic: str, group: str | None = None, **changed: Any) -> None:
    """Change settings of a topic or group, and show those that hold now."""
    settings = await call.ask(lambda client: client.configure(topic, group, **changed))
    show_settings(call, settings)


def show_settings(call: Call, settings: GroupSettings) -> None:
    """Show the settings that hold now."""
    call.out.result(dict(settings.raw), settings_line(settings.raw))


def settings_line(settings: Map) -> str:
    """The settings of a topic or group on one line."""
    group = settings.get("group")
    limit, wanted = rate_limit(settings), filter_text(settings)
    policy, rule = settings.get("retry"), settings.get("if_pending")
    parts = [
        f"{settings.get('topic')}" + (f"  {group}" if group else ""),
        _pause(settings) if settings.get("paused") else "active",
        "no rate limit" if limit == "-" else f"rate {limit}",
        None if policy is None else f"retry {describe_policy(policy)}",
        None if rule is None else f"if pending: {describe_rule(rule)}",
        "broadcasts only" if settings.get("broadcast_only") else None,
        None if wanted == "-" else wanted,
        *lines_texts(settings),
    ]
    return "  ".join(part for part in parts if part is not None)


async def broadcast_topic(
    call: Call,
    topic: TopicArgument,
    off: Annotated[bool, flag("It keeps what comes due for its first group again.")] = False,
) -> None:
    """Keep a topic for broadcasts only: what comes due goes to whoever listens, and ends.

    It has no groups then, and keeps nothing for one. What is waiting for a group ends, too.
    """
    await _configure(call, topic, broadcast_only=not off)


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
    show_settings(call, await call.ask(lambda client: client.resume(topic, group)))


async def rate(
    call: Call,
    topic: TopicArgument,
    limit: Annotated[str, argument("N|none", "Deliveries a second; none lifts the limit.")],
    group: MaybeGroup = None,
    burst: BurstOption = None,
) -> None:
    """Deliver no more than N a second of a topic, or to one of its groups.

    For the backlog after a downtime: what is due waits its turn, nothing is lost.
    """
    per_second = parse_rate(limit)
    if per_second is None and burst is not None:
        raise BadRequest("--burst goes with a rate, not with none")
    also = {"burst": burst} if per_second is None or burst is not None else {}
    await _configure(call, topic, group, rate=per_second, **also)


def parse_rate(text: str) -> float | None:
    """A rate above 0; None for ``none``."""
    if text.strip().lower() == "none":
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise BadRequest(f"the rate is {text!r:.40}; a number above 0 is needed, or none")
    return found


parse_start = word_or(("now", "first"), parse_at, "now nor first nor an ISO-8601 time")


async def create_group(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    start: Annotated[
        Any,
        option(
            "From when on tasks are its own: from now, all that are there, or ISO-8601.",
            "now|first|TIME",
            parse=parse_start,
        ),
    ] = "now",
    **options: Unpack[NewGroupOptions],
) -> None:
    """Create a group before its first subscriber comes. One that exists stays as it is."""
    check_rate(options.get("rate"))
    if "burst" in options and "rate" not in options:
        raise BadRequest("--burst goes with --rate")
    keywords: dict[str, Any] = {"start": start, **group_keywords(options)}
    keywords["retry"] = retry_of(options.get("retry"))
    settings = await call.ask(lambda client: client.create_group(topic, group, **keywords))
    show_settings(call, settings)
    if not settings.raw.get("created", True):
        call.out.remark(f"group {group} of {topic} existed before; nothing was changed")


async def set_group(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    all_: Annotated[bool, flag("No filter: it gets every task again.")] = False,
    no_tags: Annotated[bool, flag("Remove the filter's tags.")] = False,
    no_where: Annotated[bool, flag("Remove the filter's condition.")] = False,
    no_order: Annotated[bool, flag("Failed tasks of order keys as by default again.")] = False,
    no_fair: Annotated[bool, flag("No fair shares.")] = False,
    **of_group: Unpack[GroupOptions],
) -> None:
    """Change a group's filter, how it tries tasks of order keys again, and its fair shares.

    What came due before is judged by the filter that it had. What is not named stays; a limit of 0
    is none.
    """
    changed: dict[str, Any] = {**group_keywords(of_group)}
    if all_ and (no_tags or no_where or changed.keys() & {"tags", "where"}):
        raise BadRequest("name --tags, --where or both; or --all")
    for none, option_, names in (
        (all_, "--all", ("tags", "where")),
        (no_tags, "--no-tags", ("tags",)),
        (no_where, "--no-where", ("where",)),
        (no_order, "--no-order", ("order_retry", "order_attempts", "order_failure")),
        (no_fair, "--no-fair", ("fair_by", "limit_each", "rate_each")),
    ):
        if none and changed.keys() & set(names):
            raise BadRequest(f"{option_} takes away what other options set; give one of them")
        changed |= dict.fromkeys(names) if none else {}
    if not changed:
        raise BadRequest("name what shall change: --tags, --where, --order-retry, --fair-by, …")
    await _configure(call, topic, group, **changed)


async def set_pending(
    call: Call, topic: TopicArgument, action: ActionArgument, **options: Unpack[RuleOptions]
) -> None:
    """What becomes of a topic's tasks whose key is pending, unless they say it themselves."""
    await _configure(call, topic, if_pending=rule_of(action, options))


async def clear_pending(call: Call, topic: TopicArgument) -> None:
    """Such tasks are all stored again."""
    await _configure(call, topic, if_pending=None)


# --- policies ------------------------------------------------------------------------------------


async def show_policy(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """The policies of a topic and its groups; none set means the next outer one."""
    of_topic = _known(await _topics(call), topic)
    groups, own = of_topic.get("groups") or {}, of_topic.get("retry")
    if group is not None and group not in groups:
        raise NotFound(f"there is no group {group!r:.255} of topic {topic}")
    policies: list[tuple[str | None, Any]] = [] if group is not None else [(None, own)]
    policies += [(n, g.get("retry")) for n, g in sorted(groups.items()) if group in {None, n}]
    rows = []
    for name, policy in policies:
        holds, level = (policy, "group") if policy is not None and name else (own, "topic")
        said = {"topic": topic, "group": name, "retry": policy, "holds": holds}
        rows.append(said | {"from": level if holds is not None else "daemon"})
    Listing.of(call.out, POLICIES, dict).show(rows)


def _what_holds(row: Map) -> str:
    holds = row["holds"]
    return describe_policy(holds) if holds is not None else "the daemon's default"


POLICIES = (
    column("topic"),
    Column[Map]("group", lambda row: row["group"] or ""),
    column("own policy", "retry", describe_policy),
    Column("what holds", _what_holds),
)


async def set_policy(
    call: Call,
    topic: TopicArgument,
    spec: Annotated[Any, argument(SPEC_METAVAR, SPEC_HELP, parse_policy)],
    group: MaybeGroup = None,
) -> None:
    """Set the policy of a topic, or of one of its groups."""
    await _configure(call, topic, group, retry=retry_of(spec))


async def clear_policy(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Take away a topic's or group's own policy; the next outer one holds again."""
    await _configure(call, topic, group, retry=None)


# --- resets --------------------------------------------------------------------------------------


parse_to = word_or(
    ("first",), parse_moment, "first nor an ISO-8601 time nor a duration such as 2h (ago)"
)


async def reset_group(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    to: Annotated[
        Any,
        option(
            "Since when: all that is known, ISO-8601, or 2h for two hours ago.",
            "first|TIME|AGO",
            parse=parse_to,
        ),
    ],
    rate: Annotated[float | None, option("Maximum tasks per second.", "N")] = None,
    dry_run: Annotated[bool, flag("Say what would come again; do nothing.")] = False,
    yes: YesOption = False,
    wait: Annotated[bool, flag("Until the bulk operation is over; shows how far it is.")] = False,
) -> int:
    """Give a group again what came due since a moment and what it has finished, or missed.

    Each task comes as a new one that says which it stands for. Other groups notice nothing.
    """
    check_rate(rate)
    async with call.client() as client:
        if dry_run or not yes:
            preview = await client.preview_reset(topic, group, to=to)
            counted = f"{preview.tasks:,} tasks"
            when = f"{_span(preview)}{_lost(preview)}"
            if dry_run:
                fields = {"topic": topic, "group": group, **preview.raw}
                call.out.result(fields, f"dry run  {counted} would come again{when}")
                return 0
            whom, what = f"group {group} of topic {topic}", f"{counted}{when}"
            refusal = f"{what} would come to {whom} again"
            if not confirmed(call, refusal, f"Give {whom} {what} again?"):
                return EXIT_FAILED
        bulk = await client.reset_group(topic, group, to=to, rate=rate)
        if wait:
            bulk = await follow_bulk(client, bulk)
    return say_bulk(call, bulk)


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
    option(
        f"Maximum number. Default: {ANSWER_MAX} with --json, {ROWS_SHOWN} as a table.",
        "N",
        min=1,
        max=ANSWER_MAX,
    ),
]
NOT_HELD = "not_held"
SINCE = column("since", "since_ms", ago)
Verb = Callable[..., Awaitable[str]]
K = TypeVar("K", HeldKey, KeyLine, PausedKey)


async def held_keys(
    call: Call, topic: TopicArgument, group: GroupArgument, limit: KeyLimitOption = None
) -> None:
    """Order keys that wait for you, the oldest first: the task that failed, why, what waits."""
    columns = (
        column("key", show=_key_text), column("task", "id", right=True), SINCE,
        column("attempts", "attempt", format_count), *count_columns("waiting"),
        column("reason", show=reason_text),
    )  # fmt: skip
    none = f"no key of group {group} of topic {topic} is held"
    await _list_keys(call, limit, Client.held_keys, (topic, group), columns, none)


async def paused_keys(
    call: Call, topic: TopicArgument, group: GroupArgument, limit: KeyLimitOption = None
) -> None:
    """Keys that were stopped by pause-key, the oldest first: who did it, when, what waits."""
    columns = (
        column("by", "kind"), column("value", show=_key_text), SINCE,
        column("who", "by", _key_text), *count_columns("waiting"),
    )  # fmt: skip
    none = f"no key of group {group} of topic {topic} is paused"
    await _list_keys(call, limit, Client.paused_keys, (topic, group), columns, none)


async def key_lines(
    call: Call, topic: TopicArgument, group: GroupArgument, limit: KeyLimitOption = None
) -> None:
    """Who waits for whom: order keys, and values that share the group, with most tasks waiting."""
    columns = (
        column("by", "kind"), column("value", show=_key_text),
        column("state", show=head), *count_columns("in_flight", "waiting"),
        column("task", "id", right=True),
    )  # fmt: skip
    none = f"nothing of group {group} of topic {topic} waits for its turn"
    await _list_keys(call, limit, Client.key_lines, (topic, group), columns, none)


async def _list_keys(
    call: Call,
    limit: int | None,
    find: Callable[..., Awaitable[list[K]]],
    names: tuple[str, str],
    columns: Sequence[Column[Any]],
    none: str,
) -> None:
    """Show as many keys as the list goes; says so if the daemon's answer is full."""
    most = min(asked(call.out, limit) or ANSWER_MAX, ANSWER_MAX)
    found = await call.ask(lambda client: find(client, *names, limit=most))
    if limit is None and len(found) == ANSWER_MAX:
        call.out.remark(f"these are the first {ANSWER_MAX:,}; the daemon shows no more at once")

    def fields(one: K) -> dict[str, Any]:
        whose = dict(zip(("topic", "group"), names, strict=True))
        return whose | fields_of(one)

    Listing.of(call.out, columns, fields, none).show(cut(call.out, limit, found))


class HeldOptions(TypedDict, total=False):
    """Which held key is meant."""

    task_id: Annotated[int | None, argument("TASK_ID", "The task that is held.", parse_id)]
    key: Annotated[str | None, option("Instead of it: its order key.")]


async def release_key(
    call: Call, topic: TopicArgument, group: GroupArgument, **held: Unpack[HeldOptions]
) -> int:
    """Try the task of a held key again at once, its failures counted anew."""
    return await _act_on_key(call, Client.release_key, topic, group, held)


async def skip_key(
    call: Call, topic: TopicArgument, group: GroupArgument, **held: Unpack[HeldOptions]
) -> int:
    """Give the task of a held key up: it is a dead letter, and its key goes on."""
    return await _act_on_key(call, Client.skip_key, topic, group, held)


async def _act_on_key(call: Call, verb: Verb, topic: str, group: str, held: HeldOptions) -> int:
    task_id, key = held.get("task_id"), held.get("key")
    if (task_id is None) == (key is None):
        raise BadRequest("give TASK_ID or --key, one of them")
    word = await call.ask(lambda client: verb(client, topic, group, task_id, key=key))
    shown_id = None if task_id is None else str(task_id)
    fields = {"topic": topic, "group": group, "task_id": shown_id, "key": key, "result": word}
    line = f"{shown_id or f'key {_key_text(key)}'}  {word.replace('_', ' ')}"
    call.out.result(fields, line)
    return EXIT_NOT_FOUND if word == NOT_HELD else 0


def _say_pause(call: Call, asked: Map, found: KeyPause) -> None:
    if not found.changed:
        since = format_time(found.raw["since_ms"])
        how = f"paused before, since {since} by {found.by}" if found.paused else "was not paused"
    else:
        how = "paused" if found.paused else "resumed"
    said = {name: asked.get(name) for name in ("topic", "group", "key", "value")}
    name = "key" if "key" in asked else "value"
    call.out.result(said | fields_of(found), f"{name} {_key_text(asked[name])}  {how}")


def _say_resumed(call: Call, asked: Map, found: KeyPause) -> int:
    _say_pause(call, asked, found)
    return 0 if found.changed else EXIT_NOT_FOUND


pause_key = declared("pause_key", _say_pause)
resume_key = declared("resume_key", _say_resumed, "Exit code 4: it was not paused.")


def _key_text(value: object) -> str:
    return "-" if value is None else printable(str(value))


OF_GROUPS: dict[str, Callable[..., Any]] = {
    "list": list_groups,
    "create": create_group,
    "set": set_group,
    "delete": delete_group,
    "reset": reset_group,
    "held": held_keys,
    "lines": key_lines,
    "release_key": release_key,
    "skip_key": skip_key,
    "pause_key": pause_key,
    "resume_key": resume_key,
    "paused": paused_keys,
}
"""The commands below ``tickwheel groups``, by name, in the order in which the help shows them."""


# --- groups that are sent elsewhere --------------------------------------------------------------

ERROR_SHOWN = 60
"""Characters of an error in a table."""
MaybeTopic = Annotated[str | None, argument("TOPIC", "Only of this topic.")]


# --- push ----------------------------------------------------------------------------------------


async def list_push(call: Call, topic: MaybeTopic = None) -> None:
    """Every push, and how it goes."""
    await _list(call, topic, "push")


def _say_log(call: Call, asked: Map, found: Sequence[PushSent]) -> None:
    nothing = f"nothing was sent for group {asked['group']} of topic {asked['topic']} yet"
    Listing.of(call.out, SENT, fields_of, nothing).show(found)


def _cut(text: str | None) -> str:
    return printable(text or "")[:ERROR_SHOWN] or "-"


def _took(one: PushSent) -> str:
    return format_duration(one.duration_ms / 1000)


STATUS = column("status", right=True)
SENT = (
    column("number", right=True), column("at", "at_ms", format_time),
    column("task", "id", right=True), column("attempt", right=True),
    Column[PushSent]("result", lambda one: one.result + (" (again)" if one.again else "")),
    STATUS, Column("took", _took, right=True),
    Column[PushSent]("answer", lambda one: _cut(one.error or one.body)),
)  # fmt: skip


def _say_sent(call: Call, asked: Map, one: PushSent) -> int | None:
    if call.out.as_json:
        call.out.record(fields_of(one))
    else:
        facts = {
            "result": one.result,
            "status": STATUS.cell(one),
            "took": _took(one),
            "address": one.address or "-",
            "error": _cut(one.error),
            "answer": _cut(one.body),
        }
        call.out.grid(facts_grid(("what", "value"), facts))
    return None if one.result == "acked" else EXIT_FAILED


# --- forward, and both ----------------------------------------------------------------------------


async def list_forward(call: Call, topic: MaybeTopic = None) -> None:
    """Every forwarder, and how it goes."""
    await _list(call, topic, "forward")


async def _list(call: Call, topic: str | None, kind: str) -> None:
    found = await call.ask(lambda client: client.targets(topic=topic))
    nothing = "no group is pushed" if kind == "push" else "no group is forwarded"
    rows = [one for one in found if one.kind == kind]
    Listing.of(call.out, TARGETS, fields_of, nothing).show(rows)


def _trouble(one: TargetInfo) -> str:
    if one.state not in ("ended", "failing", "open"):
        return "-"
    return _cut(one.reason if one.state == "ended" else one.last_error)


TARGETS = (
    *text_columns("topic", "group"), column("to", "url"), column("state"),
    *count_columns("sent", "acked", "failed"), column("last", "last_ms", ago),
    Column("trouble", _trouble),
)  # fmt: skip


def _say_set(call: Call, asked: Map, one: TargetInfo) -> None:
    verb = "pushed" if one.kind == "push" else "forwarded"
    said = f"group {one.group} of topic {one.topic} is {verb} to {one.url}"
    call.out.result(fields_of(one), said)


def _say_removed(call: Call, asked: Map, found: TargetRemoved) -> None:
    said = f"group {asked['group']} of topic {asked['topic']} is not sent to {found.url} any more"
    call.out.result(fields_of(found), said)


NOT_ACKED = "Exit code 1 unless the answer was 2xx."
_remove = declared("remove_target", _say_removed)
OF_PUSH: dict[str, Callable[..., Any]] = {
    "list": list_push,
    "set": declared("set_push", _say_set),
    "remove": _remove,
    "test": declared("test_push", _say_sent, NOT_ACKED),
    "log": declared("push_log", _say_log),
    "resend": declared("resend", _say_sent, NOT_ACKED),
}
"""The commands below ``tickwheel push``, as ``OF_GROUPS``, and ``tickwheel forward``."""
OF_FORWARD: dict[str, Callable[..., Any]] = {
    "list": list_forward, "set": declared("set_forward", _say_set), "remove": _remove
}  # fmt: skip
