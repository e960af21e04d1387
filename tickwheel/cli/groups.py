"""Commands on topics and their groups: ``topics``, ``groups``, ``pause``, ``resume``, ``rate``,
``policy``, ``pending``; resets, order keys and fair shares of a group; ``push`` and ``forward`` for
groups that send their tasks to a URL or to another broker instead of to subscribers.

Each group of a topic gets every task of it. A task's own retry policy takes precedence, then the
group's, the topic's, and the daemon's.

Secrets of targets are read from files, one on each line, and no command shows them. (The address of
a target is ``--to``, because ``--url`` is the daemon's for every command.)
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
"""The end of the daemon's message when force does not help."""

# --- columns of topics and groups ----------------------------------------------------------------


def rate_limit(settings: Map) -> str:
    """Format ``100/s``, ``100/s burst 200``, or a dash without a limit."""
    limit, burst = settings.get("rate"), settings.get("burst")
    if limit is None:
        return "-"
    return f"{limit:g}/s" + ("" if burst is None else f" burst {burst}")


def _replay(group: Map) -> str:
    """Format the progress of a group's replay; a dash when it is complete."""
    replay = group.get("replay")
    return "-" if replay is None else f"{replay['share']:.0%}"


def _held_up(row: Map) -> str:
    if row.get("deleting"):
        return "deleting"
    return _pause(row) if row.get("paused") else "-"


def _pause(row: Map) -> str:
    """Return that a topic or group is paused, and since when if known."""
    since_ms = row.get("paused_ms")
    return "paused" if since_ms is None else f"paused {ago(since_ms)}"


def filter_text(group: Map) -> str:
    """Format the filter of a group; a dash without one."""
    parts = (f"{name} {group[name]}" for name in ("tags", "where") if group.get(name))
    return ", ".join(parts) or "-"


def lines_texts(group: Map) -> list[str]:
    """Return the settings of a group's order keys and fair shares in words."""
    texts = []
    if (retry_ms := group.get("order_retry_ms")) is not None:
        texts.append(f"order retry {spec_duration(retry_ms)}")
    failure, attempts = group.get("order_failure"), group.get("order_attempts")
    if failure is not None:
        texts.append(
            "retried forever" if attempts is None else f"{failure} after {attempts} attempts"
        )
    if (value := group.get("fair_by")) is not None:
        limit, rate = group.get("limit_each"), group.get("rate_each")
        limits = [f"{limit} in flight"] if limit is not None else []
        limits += [f"{rate:g}/s"] if rate is not None else []
        texts.append(f"fair by {value}" + (f" ({', '.join(limits)} each)" if limits else ""))
    return texts


def _unused_groups(topic: Map) -> str:
    """Format the number of groups that have been unused for long; a dash for none."""
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
"""Columns that a narrow terminal leaves out, in this order; current counts stay longest."""


def topics_grid(topics: Map) -> Grid:
    """Return a table with a row for each topic of the statistics."""
    columns = (
        column("topic"), *count_columns(*STATES), OLDEST, _PAUSED, _RATE,
        Column[Map]("groups", lambda row: format_count(len(row.get("groups") or {})), right=True),
        Column("unused", _unused_groups, right=True), *count_columns(*TOTALS),
    )  # fmt: skip
    rows = ({"topic": name, **topic} for name, topic in sorted(topics.items()))
    return grid_of(columns, rows, spare=_SPARE)


def groups_grid(groups: Sequence[Map]) -> Grid:
    """Return a table with a row for each group, including the names of topic and group."""
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
    """Return the statistics of each topic by name, sorted."""
    stats = await call.ask(Client.stats)
    return dict(sorted((stats.raw.get("topics") or {}).items()))


async def topics(call: Call) -> None:
    """List topics: counts, oldest ready task, pause, rate limit."""
    by_name = await _topics(call)
    if not call.out.as_json:
        call.out.grid(topics_grid(by_name))
        return
    for name, topic in by_name.items():
        call.out.record({"topic": name, **topic})


async def list_groups(
    call: Call, topic: Annotated[str | None, argument("TOPIC", "Only groups of this topic.")] = None
) -> None:
    """List groups with their counts and settings."""
    topics = await _topics(call)
    if topic is not None:
        topics = {topic: _known(topics, topic)}
    rows = [
        {"topic": name, "group": group, **stats}
        for name, topic_stats in topics.items()
        for group, stats in sorted((topic_stats.get("groups") or {}).items())
    ]
    if not call.out.as_json:
        call.out.grid(groups_grid(rows))
        return
    for group in rows:
        call.out.record(group)


def _known(topics: Map, topic: str) -> Any:
    if topic not in topics:
        raise NotFound(f"there is no topic {topic!r:.255}")
    return topics[topic]


async def delete_topic(
    call: Call,
    topic: TopicArgument,
    force: Annotated[bool, flag("Delete it even with tasks; they end as deleted.")] = False,
) -> int:
    """Delete a topic with its groups, settings and dead letters.

    Shows the number of its tasks and asks first. A schedule that enqueues to the topic must be
    deleted before.
    """
    return await _delete(call, topic, None, force)


async def delete_group(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    force: Annotated[bool, flag("Delete it even with tasks; the group loses them.")] = False,
) -> int:
    """Delete a group. Shows the number of its tasks and asks first."""
    return await _delete(call, topic, group, force)


async def _delete(call: Call, topic: str, group: str | None, force: bool) -> int:
    """Delete a group or topic. If it has tasks, ask at a terminal, and then force it."""
    try:
        await _delete_now(call, topic, group, force)
    except Conflict as conflict:
        if force or conflict.message.endswith(FIRST):
            raise
        if not can_ask(call):
            raise Conflict(f"{conflict.message}; --force deletes it with them") from None
        call.out.remark(conflict.message)
        subject = f"topic {topic}" if group is None else f"group {group} of {topic}"
        if not ask(f"Delete {subject} with its contents?"):
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
    names = (*STATES, "groups") if group is None else GROUP_STATES
    contents = ", ".join(f"{held[n]:,} {head(n)}" for n in names if held.get(n))
    labels = {"topic": topic} if group is None else {"topic": topic, "group": group}
    line = f"{'  '.join(labels.values())}  deleted" + (f" with {contents}" if contents else "")
    call.out.result({**labels, "deleted": True, **held}, line)


# --- settings ------------------------------------------------------------------------------------


async def _configure(call: Call, topic: str, group: str | None = None, **changed: Any) -> None:
    """Change settings of a topic or group, and show all of them."""
    settings = await call.ask(lambda client: client.configure(topic, group, **changed))
    show_settings(call, settings)


def show_settings(call: Call, settings: GroupSettings) -> None:
    """Show the current settings."""
    call.out.result(dict(settings.raw), settings_line(settings.raw))


def settings_line(settings: Map) -> str:
    """Format the settings of a topic or group on one line."""
    group = settings.get("group")
    limit, filter_ = rate_limit(settings), filter_text(settings)
    policy, rule = settings.get("retry"), settings.get("if_pending")
    parts = [
        f"{settings.get('topic')}" + (f"  {group}" if group else ""),
        _pause(settings) if settings.get("paused") else "active",
        "no rate limit" if limit == "-" else f"rate {limit}",
        None if policy is None else f"retry {describe_policy(policy)}",
        None if rule is None else f"if pending: {describe_rule(rule)}",
        "broadcasts only" if settings.get("broadcast_only") else None,
        None if filter_ == "-" else filter_,
        *lines_texts(settings),
    ]
    return "  ".join(part for part in parts if part is not None)


async def broadcast_topic(
    call: Call,
    topic: TopicArgument,
    off: Annotated[bool, flag("Undo: keep due tasks for the topic's first group again.")] = False,
) -> None:
    """Use a topic for broadcasts only: a due task goes to the current listeners and ends.

    The topic then has no groups and keeps no tasks for one. Tasks waiting for a group end as well.
    """
    await _configure(call, topic, broadcast_only=not off)


async def pause(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Deliver nothing of a topic, or to one of its groups, until it is resumed.

    Enqueues continue; tasks in flight can still be acked. The pause outlasts restarts.
    """
    async with call.client() as client:
        if group is None and topic not in (await client.stats()).topics:
            call.out.remark(f"topic {topic} does not exist yet; it is paused from its first task")
        show_settings(call, await client.pause(topic, group))


async def resume(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Resume delivery after a pause."""
    show_settings(call, await call.ask(lambda client: client.resume(topic, group)))


async def rate(
    call: Call,
    topic: TopicArgument,
    limit: Annotated[str, argument("N|none", "Deliveries per second; none removes the limit.")],
    group: MaybeGroup = None,
    burst: BurstOption = None,
) -> None:
    """Limit deliveries of a topic, or to one of its groups, to N per second.

    Use it for the backlog after a downtime: due tasks wait, and none is lost.
    """
    per_second = parse_rate(limit)
    if per_second is None and burst is not None:
        raise BadRequest("--burst requires a rate, not none")
    also = {"burst": burst} if per_second is None or burst is not None else {}
    await _configure(call, topic, group, rate=per_second, **also)


def parse_rate(text: str) -> float | None:
    """Parse a rate above 0; None for ``none``. Raise BadRequest."""
    if text.strip().lower() == "none":
        return None
    try:
        per_second = float(text)
    except ValueError:
        per_second = 0.0
    if not 0 < per_second < float("inf"):
        raise BadRequest(f"the rate must be a number above 0, or none, not {text!r:.40}")
    return per_second


parse_start = word_or(("now", "first"), parse_at, "now nor first nor an ISO-8601 time")


async def create_group(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    start: Annotated[
        Any,
        option(
            "The first tasks of the group: from now, all stored tasks, or since an ISO-8601 time.",
            "now|first|TIME",
            parse=parse_start,
        ),
    ] = "now",
    **options: Unpack[NewGroupOptions],
) -> None:
    """Create a group before its first subscriber. An existing group is not changed."""
    check_rate(options.get("rate"))
    if "burst" in options and "rate" not in options:
        raise BadRequest("--burst requires --rate")
    keywords: dict[str, Any] = {"start": start, **group_keywords(options)}
    keywords["retry"] = retry_of(options.get("retry"))
    settings = await call.ask(lambda client: client.create_group(topic, group, **keywords))
    show_settings(call, settings)
    if not settings.raw.get("created", True):
        call.out.remark(f"group {group} of {topic} already exists; nothing was changed")


async def set_group(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    all_: Annotated[bool, flag("Remove the filter: the group gets every task again.")] = False,
    no_tags: Annotated[bool, flag("Remove the filter's tags.")] = False,
    no_where: Annotated[bool, flag("Remove the filter's condition.")] = False,
    no_order: Annotated[bool, flag("Reset the settings of order keys to the defaults.")] = False,
    no_fair: Annotated[bool, flag("Remove the fair shares.")] = False,
    **options: Unpack[GroupOptions],
) -> None:
    """Change a group's filter, its retries of order keys, and its fair shares.

    Tasks that came due earlier keep the filter of that time. Options that are not given do not
    change; a limit of 0 removes the limit.
    """
    changed: dict[str, Any] = {**group_keywords(options)}
    if all_ and (no_tags or no_where or changed.keys() & {"tags", "where"}):
        raise BadRequest("give --tags, --where or both, or else --all")
    for is_removed, option_, names in (
        (all_, "--all", ("tags", "where")),
        (no_tags, "--no-tags", ("tags",)),
        (no_where, "--no-where", ("where",)),
        (no_order, "--no-order", ("order_retry", "order_attempts", "order_failure")),
        (no_fair, "--no-fair", ("fair_by", "limit_each", "rate_each")),
    ):
        if is_removed and changed.keys() & set(names):
            raise BadRequest(
                f"{option_} removes a setting that another option sets; give only one of them"
            )
        changed |= dict.fromkeys(names) if is_removed else {}
    if not changed:
        raise BadRequest("give at least one setting: --tags, --where, --order-retry, --fair-by, …")
    await _configure(call, topic, group, **changed)


async def set_pending(
    call: Call, topic: TopicArgument, action: ActionArgument, **options: Unpack[RuleOptions]
) -> None:
    """Set a topic's rule for tasks with a pending key, unless a task has its own rule."""
    await _configure(call, topic, if_pending=rule_of(action, options))


async def clear_pending(call: Call, topic: TopicArgument) -> None:
    """Remove a topic's rule: every task with a pending key is stored again."""
    await _configure(call, topic, if_pending=None)


# --- policies ------------------------------------------------------------------------------------


async def show_policy(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Show the policies of a topic and its groups, and which policy applies."""
    of_topic = _known(await _topics(call), topic)
    groups, own = of_topic.get("groups") or {}, of_topic.get("retry")
    if group is not None and group not in groups:
        raise NotFound(f"there is no group {group!r:.255} of topic {topic}")
    policies: list[tuple[str | None, Any]] = [] if group is not None else [(None, own)]
    policies += [(n, g.get("retry")) for n, g in sorted(groups.items()) if group in {None, n}]
    rows = []
    for name, policy in policies:
        holds, level = (policy, "group") if policy is not None and name else (own, "topic")
        row = {"topic": topic, "group": name, "retry": policy, "holds": holds}
        rows.append(row | {"from": level if holds is not None else "daemon"})
    Listing.of(call.out, POLICIES, dict).show(rows)


def _effective(row: Map) -> str:
    holds = row["holds"]
    return describe_policy(holds) if holds is not None else "the daemon's default"


POLICIES = (
    column("topic"),
    Column[Map]("group", lambda row: row["group"] or ""),
    column("own policy", "retry", describe_policy),
    Column("effective", _effective),
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
    """Remove the policy of a topic or group; the next outer policy applies again."""
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
            "Start of the time span: the first known task, ISO-8601, or 2h for two hours ago.",
            "first|TIME|AGO",
            parse=parse_to,
        ),
    ],
    rate: Annotated[float | None, option("Maximum tasks per second.", "N")] = None,
    dry_run: Annotated[bool, flag("Print what would be delivered again; change nothing.")] = False,
    yes: YesOption = False,
    wait: Annotated[bool, flag("Wait for the end, and show progress.")] = False,
) -> int:
    """Deliver to a group again the tasks due since a time that it has finished or missed.

    Each task is delivered as a new task that refers to the old one. Other groups are not affected.
    """
    check_rate(rate)
    async with call.client() as client:
        if dry_run or not yes:
            preview = await client.preview_reset(topic, group, to=to)
            counted = f"{preview.tasks:,} tasks"
            when = f"{_span(preview)}{_lost(preview)}"
            if dry_run:
                fields = {"topic": topic, "group": group, **preview.raw}
                call.out.result(fields, f"dry run  {counted} would be delivered again{when}")
                return 0
            target, subject = f"group {group} of topic {topic}", f"{counted}{when}"
            refusal = f"{subject} would be delivered to {target} again"
            if not confirmed(call, refusal, f"Deliver {subject} to {target} again?"):
                return EXIT_FAILED
        bulk = await client.reset_group(topic, group, to=to, rate=rate)
        if wait:
            bulk = await follow_bulk(client, bulk)
    return say_bulk(call, bulk)


def _span(preview: ResetPreview) -> str:
    if preview.first is None:
        return ""
    first, last = (format_time(preview.raw[name]) for name in ("first_ms", "last_ms"))
    return f", due from {first} to {last}"


def _lost(preview: ResetPreview) -> str:
    """Describe lost tasks and gaps in a preview; empty without any."""
    lost = f"; {preview.lost:,} cannot be: their bodies were not kept" if preview.lost else ""
    if preview.incomplete:
        gaps = "a gap" if preview.incomplete == 1 else f"{preview.incomplete:,} gaps"
        lost += f"; incomplete: the history has {gaps} in that time, so tasks may be missing"
    return lost


# --- order keys and fair shares ------------------------------------------------------------------

ANSWER_MAX = 1000
"""Maximum keys in one answer of the daemon, which has no next page: the first matter most."""
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
    """List held order keys, the oldest first: the failed task, its reason, waiting tasks."""
    columns = (
        column("key", show=_key_text), column("task", "id", right=True), SINCE,
        column("attempts", "attempt", format_count), *count_columns("waiting"),
        column("reason", show=reason_text),
    )  # fmt: skip
    nothing = f"no key of group {group} of topic {topic} is held"
    await _list_keys(call, limit, Client.held_keys, (topic, group), columns, nothing)


async def paused_keys(
    call: Call, topic: TopicArgument, group: GroupArgument, limit: KeyLimitOption = None
) -> None:
    """List keys stopped by pause-key, the oldest first: by whom, since when, waiting tasks."""
    columns = (
        column("by", "kind"), column("value", show=_key_text), SINCE,
        column("who", "by", _key_text), *count_columns("waiting"),
    )  # fmt: skip
    nothing = f"no key of group {group} of topic {topic} is paused"
    await _list_keys(call, limit, Client.paused_keys, (topic, group), columns, nothing)


async def key_lines(
    call: Call, topic: TopicArgument, group: GroupArgument, limit: KeyLimitOption = None
) -> None:
    """List order keys and values of fair shares with the most waiting tasks."""
    columns = (
        column("by", "kind"), column("value", show=_key_text),
        column("state", show=head), *count_columns("in_flight", "waiting"),
        column("task", "id", right=True),
    )  # fmt: skip
    nothing = f"no task of group {group} of topic {topic} waits for its turn"
    await _list_keys(call, limit, Client.key_lines, (topic, group), columns, nothing)


async def _list_keys(
    call: Call,
    limit: int | None,
    find: Callable[..., Awaitable[list[K]]],
    names: tuple[str, str],
    columns: Sequence[Column[Any]],
    nothing: str,
) -> None:
    """Show keys up to the limit, and remark if the daemon's answer is full."""
    keys_max = min(asked(call.out, limit) or ANSWER_MAX, ANSWER_MAX)
    keys = await call.ask(lambda client: find(client, *names, limit=keys_max))
    if limit is None and len(keys) == ANSWER_MAX:
        call.out.remark(f"these are the first {ANSWER_MAX:,}; the daemon returns no more at once")

    def fields(key: K) -> dict[str, Any]:
        labels = dict(zip(("topic", "group"), names, strict=True))
        return labels | fields_of(key)

    Listing.of(call.out, columns, fields, nothing).show(cut(call.out, limit, keys))


class HeldOptions(TypedDict, total=False):
    """The options that select a held key."""

    task_id: Annotated[int | None, argument("TASK_ID", "The held task.", parse_id)]
    key: Annotated[str | None, option("The order key, instead of the task.")]


async def release_key(
    call: Call, topic: TopicArgument, group: GroupArgument, **held: Unpack[HeldOptions]
) -> int:
    """Try the task of a held key again at once, with its failures reset."""
    return await _act_on_key(call, Client.release_key, topic, group, held)


async def skip_key(
    call: Call, topic: TopicArgument, group: GroupArgument, **held: Unpack[HeldOptions]
) -> int:
    """Give up the task of a held key: it becomes a dead letter, and the key continues."""
    return await _act_on_key(call, Client.skip_key, topic, group, held)


async def _act_on_key(call: Call, verb: Verb, topic: str, group: str, held: HeldOptions) -> int:
    task_id, key = held.get("task_id"), held.get("key")
    if (task_id is None) == (key is None):
        raise BadRequest("give either TASK_ID or --key")
    word = await call.ask(lambda client: verb(client, topic, group, task_id, key=key))
    shown_id = None if task_id is None else str(task_id)
    fields = {"topic": topic, "group": group, "task_id": shown_id, "key": key, "result": word}
    line = f"{shown_id or f'key {_key_text(key)}'}  {word.replace('_', ' ')}"
    call.out.result(fields, line)
    return EXIT_NOT_FOUND if word == NOT_HELD else 0


def _show_pause(call: Call, request: Map, pause_: KeyPause) -> None:
    if not pause_.changed:
        since = format_time(pause_.raw["since_ms"])
        effect = (
            f"already paused since {since} by {pause_.by}" if pause_.paused else "was not paused"
        )
    else:
        effect = "paused" if pause_.paused else "resumed"
    labels = {name: request.get(name) for name in ("topic", "group", "key", "value")}
    name = "key" if "key" in request else "value"
    call.out.result(labels | fields_of(pause_), f"{name} {_key_text(request[name])}  {effect}")


def _show_resumed(call: Call, request: Map, pause_: KeyPause) -> int:
    _show_pause(call, request, pause_)
    return 0 if pause_.changed else EXIT_NOT_FOUND


pause_key = declared("pause_key", _show_pause)
resume_key = declared("resume_key", _show_resumed, "Exit code 4 if it was not paused.")


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
"""The commands of ``tickwheel groups`` by name, in the order of the help."""


# --- groups with targets ------------------------------------------------------------------------

ERROR_SHOWN = 60
"""Maximum characters of an error in a table."""
MaybeTopic = Annotated[str | None, argument("TOPIC", "Only this topic.")]


# --- push ----------------------------------------------------------------------------------------


async def list_push(call: Call, topic: MaybeTopic = None) -> None:
    """List pushes with their states."""
    await _list(call, topic, "push")


def _show_log(call: Call, request: Map, requests: Sequence[PushSent]) -> None:
    nothing = f"no request was sent for group {request['group']} of topic {request['topic']} yet"
    Listing.of(call.out, SENT, fields_of, nothing).show(requests)


def _cut(text: str | None) -> str:
    return printable(text or "")[:ERROR_SHOWN] or "-"


def _took(sent: PushSent) -> str:
    return format_duration(sent.duration_ms / 1000)


STATUS = column("status", right=True)
SENT = (
    column("number", right=True), column("at", "at_ms", format_time),
    column("task", "id", right=True), column("attempt", right=True),
    Column[PushSent]("result", lambda sent: sent.result + (" (again)" if sent.again else "")),
    STATUS, Column("took", _took, right=True),
    Column[PushSent]("answer", lambda sent: _cut(sent.error or sent.body)),
)  # fmt: skip


def _show_sent(call: Call, request: Map, sent: PushSent) -> int | None:
    if call.out.as_json:
        call.out.record(fields_of(sent))
    else:
        facts = {
            "result": sent.result,
            "status": STATUS.cell(sent),
            "took": _took(sent),
            "address": sent.address or "-",
            "error": _cut(sent.error),
            "answer": _cut(sent.body),
        }
        call.out.grid(facts_grid(("field", "value"), facts))
    return None if sent.result == "acked" else EXIT_FAILED


# --- forward, and both ----------------------------------------------------------------------------


async def list_forward(call: Call, topic: MaybeTopic = None) -> None:
    """List forwarders with their states."""
    await _list(call, topic, "forward")


async def _list(call: Call, topic: str | None, kind: str) -> None:
    targets = await call.ask(lambda client: client.targets(topic=topic))
    nothing = "no group is pushed" if kind == "push" else "no group is forwarded"
    rows = [target for target in targets if target.kind == kind]
    Listing.of(call.out, TARGETS, fields_of, nothing).show(rows)


def _trouble(target: TargetInfo) -> str:
    if target.state not in ("ended", "failing", "open"):
        return "-"
    return _cut(target.reason if target.state == "ended" else target.last_error)


TARGETS = (
    *text_columns("topic", "group"), column("to", "url"), column("state"),
    *count_columns("sent", "acked", "failed"), column("last", "last_ms", ago),
    Column("trouble", _trouble),
)  # fmt: skip


def _show_set(call: Call, request: Map, target: TargetInfo) -> None:
    verb = "pushed" if target.kind == "push" else "forwarded"
    line = f"group {target.group} of topic {target.topic} is {verb} to {target.url}"
    call.out.result(fields_of(target), line)


def _show_removed(call: Call, request: Map, removed: TargetRemoved) -> None:
    line = (
        f"group {request['group']} of topic {request['topic']} is no longer sent to {removed.url}"
    )
    call.out.result(fields_of(removed), line)


NOT_ACKED = "Exit code 1 unless the answer was 2xx."
_remove = declared("remove_target", _show_removed)
OF_PUSH: dict[str, Callable[..., Any]] = {
    "list": list_push,
    "set": declared("set_push", _show_set),
    "remove": _remove,
    "test": declared("test_push", _show_sent, NOT_ACKED),
    "log": declared("push_log", _show_log),
    "resend": declared("resend", _show_sent, NOT_ACKED),
}
"""The commands of ``tickwheel push`` by name; ``OF_FORWARD`` has those of ``tickwheel forward``."""
OF_FORWARD: dict[str, Callable[..., Any]] = {
    "list": list_forward, "set": declared("set_forward", _show_set), "remove": _remove
}  # fmt: skip
