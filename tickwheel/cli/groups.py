"""Commands on topics and their groups: ``topics``, ``groups``, ``pause``, ``resume``, ``rate``,
``policy``, ``pending``; resets, order keys and fair shares of a group; ``push`` and ``forward`` for
groups that send their tasks to a URL or to another broker instead of to subscribers.

Each group of a topic gets every task of it. A task's own retry policy takes precedence, then the
group's, the topic's, and the daemon's.

Secrets of targets are read from files, one on each line, and no command shows them. (The address of
a target is ``--to``, because ``--url`` is the daemon's for every command.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Unpack

from tickwheel.api.targets import TargetRemoved
from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call, confirmed
from tickwheel.cli.declared import declared, listed
from tickwheel.cli.options import (
    SPEC_HELP,
    SPEC_METAVAR,
    ActionArgument,
    GroupArgument,
    GroupOptions,
    MaybeGroup,
    RateOption,
    RuleOptions,
    TopicArgument,
    YesOption,
    argument,
    flag,
    group_keywords,
    option,
    parse_moment,
    parse_rate,
    parse_retry,
    rule_of,
    word_or,
)
from tickwheel.cli.output import (
    GROUP_STATES,
    OLDEST,
    STATES,
    TOTALS,
    Column,
    Listing,
    Map,
    age,
    ago,
    column,
    count_columns,
    describe_policy,
    describe_rule,
    facts_grid,
    fields_of,
    format_count,
    format_duration,
    format_time,
    head,
    printable,
    short_policy,
    text_columns,
)
from tickwheel.cli.tasks import reason_text, start_bulk
from tickwheel.client import (
    Client,
    GroupHeld,
    GroupSettings,
    KeyPause,
    PushSent,
    ResetPreview,
    TargetInfo,
    TopicHeld,
)
from tickwheel.errors import BadRequest, NotFound
from tickwheel.model.policies import duration_spec

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
    if replay is None:
        return "-"
    return "started" if replay["share"] is None else f"{replay['share']:.0%}"


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
        texts.append(f"order retry {duration_spec(retry_ms)}")
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
SPARE = (
    "acked", "delivered", "enqueued", "unused", "groups", "replay", "members", "retry", "rate",
    "oldest", "order, shares", "filter",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, in this order; current counts stay longest."""


TOPICS = (
    column("topic"), *count_columns(*STATES), OLDEST, _PAUSED, _RATE,
    Column[Map]("groups", lambda row: format_count(len(row.get("groups") or {})), right=True),
    Column("unused", _unused_groups, right=True), *count_columns(*TOTALS),
)  # fmt: skip


def group_columns(groups: Sequence[Map]) -> Sequence[Column[Any]]:
    """Return the columns of a table of groups, which have the names of topic and group."""
    return (
        *text_columns("topic", "group"), *count_columns(*GROUP_STATES), OLDEST,
        column("members", "subscribers", format_count),
        column("unused", "unused_ms", age, right=True), _PAUSED, _RATE,
        column("retry", show=short_policy),
        Column("filter", filter_text), *([_LINES] if any(map(lines_texts, groups)) else []),
        Column("replay", _replay, right=True), *count_columns("acked"),
    )  # fmt: skip


# --- topics and groups ---------------------------------------------------------------------------


async def _topics(call: Call) -> dict[str, Any]:
    """Return the statistics of each topic by name, sorted."""
    stats = await call.ask(Client.stats)
    return dict(sorted((stats.raw.get("topics") or {}).items()))


async def topics(call: Call) -> None:
    """List topics: counts, oldest ready task, pause, rate limit."""
    rows = [{"topic": name, **topic} for name, topic in (await _topics(call)).items()]
    Listing(call.out, TOPICS, dict, spare=SPARE).show(rows)


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
    Listing(call.out, group_columns(rows), dict, spare=SPARE).show(rows)


def _known(topics: Map, topic: str) -> Any:
    if topic not in topics:
        raise NotFound(f"there is no topic {topic!r:.255}")
    return topics[topic]


def _show_deleted(call: Call, request: Map, held: GroupHeld | TopicHeld) -> None:
    counts = ((n, held.raw.get(n)) for n in (*STATES, "groups"))
    contents = ", ".join(f"{count:,} {head(n)}" for n, count in counts if count)
    labels = {name: request[name] for name in ("topic", "group") if name in request}
    is_trial = "dry_run" in request
    line = f"{'  '.join(labels.values())}  {'would be ' * is_trial}deleted"
    line += f" with {contents}" if contents else ""
    call.out.result({**labels, "deleted": not is_trial, **held.raw}, line)


ASKS = "Shows the number of its tasks and asks first."
delete_topic = declared("delete_topic", _show_deleted, ASKS)
delete_group = declared("delete_group", _show_deleted, ASKS)


# --- settings ------------------------------------------------------------------------------------


async def _configure(call: Call, topic: str, group: str | None = None, **changed: Any) -> None:
    """Change settings of a topic or group, and show all of them."""
    _show_settings(call, await call.ask(lambda client: client.configure(topic, group, **changed)))


def _show_settings(call: Call, settings: GroupSettings) -> None:
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
        _show_settings(call, await client.pause(topic, group))


async def resume(call: Call, topic: TopicArgument, group: MaybeGroup = None) -> None:
    """Resume delivery after a pause."""
    await _configure(call, topic, group, paused=False)


async def rate(
    call: Call,
    topic: TopicArgument,
    limit: Annotated[
        str,
        argument(
            "N|none",
            "Deliveries per second; none removes the limit.",
            word_or(("none",), parse_rate, "none nor a number above 0"),
        ),
    ],
    group: MaybeGroup = None,
    burst: Annotated[
        int | None, option("Deliveries at once after a pause. Default: the rate.", "N", min=1)
    ] = None,
) -> None:
    """Limit deliveries of a topic, or to one of its groups, to N per second.

    Use it for the backlog after a downtime: due tasks wait, and none is lost.
    """
    per_second = None if limit == "none" else limit
    also = {} if burst is None else {"burst": burst}
    await _configure(call, topic, group, rate=per_second, **also)


def _show_created(call: Call, request: Map, settings: GroupSettings) -> None:
    _show_settings(call, settings)
    if not settings.raw.get("created", True):
        names = f"{request['group']} of {request['topic']}"
        call.out.remark(f"group {names} already exists; nothing was changed")


create_group = declared("create_group", _show_created)


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
    """Remove a topic's rule: tasks with a pending key are then stored like any others."""
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
    Listing(call.out, POLICIES, dict).show(rows)


POLICIES = (
    column("topic"),
    Column[Map]("group", lambda row: row["group"] or ""),
    column("own policy", "retry", describe_policy),
    Column[Map](
        "effective",
        lambda row: describe_policy(row["holds"]) if row["holds"] else "the daemon's default",
    ),
)


async def set_policy(
    call: Call,
    topic: TopicArgument,
    spec: Annotated[Any, argument(SPEC_METAVAR, SPEC_HELP, parse_retry)],
    group: MaybeGroup = None,
) -> None:
    """Set the policy of a topic, or of one of its groups."""
    await _configure(call, topic, group, retry=spec)


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
    rate: RateOption = None,
    dry_run: Annotated[bool, flag("Print what would be delivered again; change nothing.")] = False,
    yes: YesOption = False,
    wait: Annotated[bool, flag("Wait for the end, and show progress.")] = False,
) -> int:
    """Deliver tasks due since a time to a group again, if it has finished or missed them.

    Each task is delivered as a new task that refers to the old one. Other groups are not affected.
    """
    if dry_run or not yes:
        preview = await call.ask(lambda client: client.preview_reset(topic, group, to=to))
        counted, when = f"{preview.tasks:,} tasks", f"{_span(preview)}{_lost(preview)}"
        if dry_run:
            fields = {"topic": topic, "group": group, **preview.raw}
            call.out.result(fields, f"dry run  {counted} would be delivered again{when}")
            return 0
        target, subject = f"group {group} of topic {topic}", f"{counted}{when}"
        refusal = f"{subject} would be delivered to {target} again"
        if not confirmed(call, refusal, f"Deliver {subject} to {target} again?"):
            return EXIT_FAILED
    return await start_bulk(
        call, lambda client: client.reset_group(topic, group, to=to, rate=rate), wait=wait
    )


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

NOT_HELD = "Exit code 4 if it is not held."
SINCE = column("since", "since_ms", ago)


def _show_held(call: Call, request: Map, word: str) -> int:
    task_id, key = request.get("task_id"), request.get("key")
    shown_id = None if task_id is None else str(task_id)
    fields = {name: request[name] for name in ("topic", "group")}
    fields |= {"task_id": shown_id, "key": key, "result": word}
    line = f"{shown_id or f'key {_key_text(key)}'}  {word.replace('_', ' ')}"
    call.out.result(fields, line)
    return EXIT_NOT_FOUND if word == "not_held" else 0


def _show_pause(call: Call, request: Map, pause_: KeyPause) -> int:
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
    return 0 if pause_.paused or pause_.changed else EXIT_NOT_FOUND


def _key_text(value: object) -> str:
    return "-" if value is None else printable(str(value))


OF_GROUPS: dict[str, Callable[..., Any]] = {
    "list": list_groups,
    "create": create_group,
    "set": set_group,
    "delete": delete_group,
    "reset": reset_group,
    "held": listed(
        "held_keys",
        "List held order keys, the oldest first: the failed task, its reason, waiting tasks.",
        (
            column("key", show=_key_text), column("task", "id", right=True), SINCE,
            column("attempts", "attempt", format_count), *count_columns("waiting"),
            column("reason", show=reason_text),
        ),
        nothing="no key of group {group} of topic {topic} is held",
    ),
    "lines": listed(
        "key_lines",
        "List order keys and values of fair shares with the most waiting tasks.",
        (
            column("by", "kind"), column("value", show=_key_text),
            column("state", show=head), *count_columns("in_flight", "waiting"),
            column("task", "id", right=True),
        ),
        nothing="no task of group {group} of topic {topic} waits for its turn",
    ),
    "release_key": declared("release_key", _show_held, NOT_HELD),
    "skip_key": declared("skip_key", _show_held, NOT_HELD),
    "pause_key": declared("pause_key", _show_pause),
    "resume_key": declared("resume_key", _show_pause, "Exit code 4 if it was not paused."),
    "paused": listed(
        "held_keys",
        "List keys stopped by pause-key, the oldest first: by whom, since when, waiting tasks.",
        (
            column("by", "kind"), column("value", show=_key_text), SINCE,
            column("who", "by", _key_text), *count_columns("waiting"),
        ),
        nothing="no key of group {group} of topic {topic} is paused",
        method="paused_keys",
    ),
}  # fmt: skip
"""The commands of ``tickwheel groups`` by name, in the order of the help."""


# --- groups with targets ------------------------------------------------------------------------

ERROR_SHOWN = 60
"""Maximum characters of an error in a table."""
MaybeTopic = Annotated[str | None, argument("TOPIC", "Only this topic.")]


# --- push ----------------------------------------------------------------------------------------


async def list_push(call: Call, topic: MaybeTopic = None) -> None:
    """List pushes with their states."""
    await _list(call, topic, "push")


def _cut(text: str | None) -> str:
    return printable(text or "")[:ERROR_SHOWN] or "-"


TOOK = column("took", "duration_ms", lambda ms: format_duration(ms / 1000), right=True)
STATUS = column("status", right=True)
SENT = (
    column("number", right=True), column("at", "at_ms", format_time),
    column("task", "id", right=True), column("attempt", right=True),
    Column[PushSent]("result", lambda sent: sent.result + (" (again)" if sent.again else "")),
    STATUS, TOOK,
    Column[PushSent]("answer", lambda sent: _cut(sent.error or sent.body)),
)  # fmt: skip


def _show_sent(call: Call, request: Map, sent: PushSent) -> int | None:
    facts = {
        "result": sent.result,
        "status": STATUS.cell(sent),
        "took": TOOK.cell(sent),
        "address": sent.address or "-",
        "error": _cut(sent.error),
        "answer": _cut(sent.body),
    }
    call.out.result(fields_of(sent), facts_grid(("field", "value"), facts))
    return None if sent.result == "acked" else EXIT_FAILED


# --- forward, and both ----------------------------------------------------------------------------


async def list_forward(call: Call, topic: MaybeTopic = None) -> None:
    """List forwarders with their states."""
    await _list(call, topic, "forward")


async def _list(call: Call, topic: str | None, kind: str) -> None:
    targets = await call.ask(lambda client: client.targets(topic=topic))
    nothing = "no group is pushed" if kind == "push" else "no group is forwarded"
    rows = [target for target in targets if target.kind == kind]
    Listing(call.out, TARGETS, fields_of, nothing).show(rows)


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
    "log": listed(
        "push_log",
        "List the last requests of a push, the newest first, with status and duration.",
        SENT,
        nothing="no request was sent for group {group} of topic {topic} yet",
    ),
    "resend": declared("resend", _show_sent, NOT_ACKED),
}
"""The commands of ``tickwheel push`` by name; ``OF_FORWARD`` has those of ``tickwheel forward``."""
OF_FORWARD: dict[str, Callable[..., Any]] = {
    "list": list_forward, "set": declared("set_forward", _show_set), "remove": _remove
}  # fmt: skip
