"""Commands on tasks by id, by key, or by selection: ``cancel``, ``reschedule``, ``run-now``,
``show``, ``list``; ``bulk`` for bulk operations; and ``dead`` for tasks that have used up their
retries or were rejected.

The daemon knows unfinished tasks. A finished task is found in the files of the history, if there
are any; without a daemon only the files are read. ``show --flow`` combines the history with the
current state of the task.

A command with a selection (``--where`` and the like) says what it would do, asks, creates a bulk
operation, and can follow it. Dead letters can also be selected by group, time and reason; these are
settled page by page, at a rate, with bounded memory: a page is read, settled and forgotten before
the next is read. Ids only rise from page to page, and a task that died after the start is left
alone. A task that dies again is therefore not read again, and the command ends however quickly
tasks die.

Ids are decimal strings in JSON: readers that store numbers as doubles lose digits above 2^53.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, Unpack

from tickwheel import environment
from tickwheel.api.kinds import Properties, Span, Window
from tickwheel.api.tasks import (
    DeadPage,
    Explanation,
    Failure,
    check_selection,
    kept_options,
    success_outcomes,
)
from tickwheel.api.times import moment
from tickwheel.api.verbs import VERBS
from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call, confirmed, given
from tickwheel.cli.declared import declared, listed
from tickwheel.cli.history import DIR_ENV, DIR_HELP, flow_grid, folder_of, remark_skipped
from tickwheel.cli.options import (
    AtOption,
    BeforeOption,
    BulkRate,
    DeadBulkOptions,
    DelayOption,
    GroupOption,
    Ids,
    MaybeIds,
    RateOption,
    ShiftOption,
    TaskBulkOptions,
    TopicOption,
    YesOption,
    argument,
    derive,
    duration,
    flag,
    option,
    parse_id,
    past_time_option,
)
from tickwheel.cli.output import (
    BODY_SHOWN_MAX,
    Grid,
    Output,
    column,
    count_columns,
    describe_policy,
    facts_grid,
    fields_of,
    format_count,
    format_duration,
    format_time,
    head,
    iso_time,
    printable,
    progress_bar,
    remark,
    stored_fields,
    stored_text,
    text_columns,
    time_facts,
)
from tickwheel.client import BulkInfo, BulkPreview, Client, DeadLetter, TaskInfo, TaskOutcome
from tickwheel.errors import BadRequest, ConnectionLost, Unreachable
from tickwheel.model.policies import duration_spec
from tickwheel.model.records import CONSUMER_DIED, id_time_ms

T = TypeVar("T")

NOT_THERE = frozenset(("unknown", "gone"))
METHODS = {verb.bulk: verb.methods[0].name for verb in VERBS.values() if verb.bulk}
"""Bulk operation → the client's method for single tasks."""
TASK_NAMES = ("ids", "topic", "key")
"""Options that name tasks."""

SpreadOption = Annotated[
    float | None,
    duration("Move to the emptiest moments of the wheel within this time: 10m, 1h30m."),
]


async def cancel(call: Call, **options: Unpack[TaskBulkOptions]) -> int:
    """Cancel tasks that are not in flight. A cancelled task is never delivered.

    Select tasks by ids, by topic and key, or by options in a bulk operation in the background.
    """
    return await _change(call, "cancel", options)


async def reschedule(
    call: Call,
    delay: DelayOption = None,
    at: AtOption = None,
    shift: ShiftOption = None,
    spread: SpreadOption = None,
    **options: Unpack[TaskBulkOptions],
) -> int:
    """Change the due time of tasks: to --delay from now, to --at, or by --shift.

    --spread moves each to one of the emptiest moments after --at, or after its own due time. Select
    tasks by ids, by topic and key, or by options in a bulk operation in the background.
    """
    arguments = given({"delay": delay, "at": at, "shift": shift})
    if spread is not None:
        if arguments.keys() - {"at"}:
            raise BadRequest("--spread cannot be combined with --delay or --shift")
        return await _change(call, "spread", options, given({"within": spread, "start": at}))
    if len(arguments) != 1:
        raise BadRequest("give exactly one of --delay, --at, --shift, --spread")
    return await _change(call, "reschedule", options, arguments)


async def run_now(call: Call, **options: Unpack[TaskBulkOptions]) -> int:
    """Make tasks due at once.

    Select tasks by ids, by topic and key, or by options in a bulk operation in the background.
    """
    return await _change(call, "run_now", options)


async def _change(
    call: Call, kind: str, options: Mapping[str, Any], arguments: Mapping[str, Any] = {}
) -> int:
    """Change tasks by ids, by topic and key, or by selection."""
    ids, topic, key = (options.get(name) for name in TASK_NAMES)
    verb, bulk_options = METHODS[kind], {n: v for n, v in options.items() if n not in TASK_NAMES}
    check_selection(ids or None, topic, key, bulk_options or None)
    if bulk_options:
        return await do_bulk(call, kind, topic, bulk_options, arguments)
    async with call.client() as client:
        if ids:
            results = await getattr(client, f"{verb}_many")(ids, **arguments)
        else:
            results = await getattr(client, verb)(topic=topic, key=key, **arguments)
    statuses = []
    for task_id, answer in zip_longest(ids or (), results):
        outcome = TaskOutcome(task_id, answer) if isinstance(answer, str) else answer
        statuses.append(outcome.status)
        shown_id, due_ms = None if outcome.id is None else str(outcome.id), outcome.due_ms
        fields: dict[str, Any] = {"id": shown_id, "status": outcome.status}
        line = f"{shown_id or 'no task'}  {outcome.status.replace('_', ' ')}"
        if due_ms is not None:
            fields |= {"due_ms": due_ms, "due": iso_time(due_ms)}
            line += f", due {format_time(due_ms)}"
        call.out.result(fields, line)
    return verdict(statuses, set(success_outcomes(kind)))


async def show(
    call: Call,
    ids: MaybeIds = None,
    key: Annotated[str | None, option("Instead of ids: the newest task with this key.")] = None,
    topic: Annotated[str | None, option("With --key: only in this topic.")] = None,
    before: BeforeOption = None,
    flow: Annotated[bool, flag("Show their history.")] = False,
    history: Annotated[
        str | None, option(f"With --flow: {DIR_HELP}", "DIR", envvar=DIR_ENV)
    ] = None,
) -> int:
    """Show tasks: state, due time, slot and cycles left, attempts, failures.

    Select tasks by ids, or the newest with a key: a stored task, else one in the history.
    """
    if bool(ids) == (key is not None):
        raise BadRequest("give either ids or --key")
    if key is None and (topic is not None or before is not None):
        raise BadRequest("--topic and --before require --key")
    has_files = bool(history or environment.value(DIR_ENV))
    folder = folder_of(history, "--history") if flow and has_files else None
    if key is not None:
        info = await _ask(
            call, lambda client: client.find(key, topic=topic, not_after=before), has_files
        )
        if info is not None and not flow:
            show_task(call.out, info)
            return 0
        ids, flow = [] if info is None else [info.id], True
        if info is None and has_files:
            folder = folder_of(history, "--history")
            ids = _newest_in_history(call, folder, key, topic, before)
        if not ids:
            where = "" if topic is None else f" in topic {topic}"
            also = ", or in the history" if has_files else ""
            call.out.remark(f"not_found: no task with key {key!r:.80}{where} is stored{also}")
            return EXIT_NOT_FOUND
    assert ids
    if flow:
        return await _show_flow(call, ids, folder)
    states = []
    async with call.client() as client:
        for task_id in ids:
            info = await client.lookup(task_id)
            states.append(info.state)
            if info.state in NOT_THERE and not call.out.as_json:
                call.out.remark(f"not_found: task {task_id} is {info.state}")
            else:
                show_task(call.out, info)
    return EXIT_NOT_FOUND if any(state in NOT_THERE for state in states) else 0


async def _ask(call: Call, question: Callable[[Client], Awaitable[T]], has_files: bool) -> T | None:
    """Return the daemon's answer. If there are files of the history, an unreachable daemon is a
    remark, and the answer None."""
    try:
        return await call.ask(question)
    except (Unreachable, ConnectionLost) as error:
        if not has_files:
            raise
        call.out.remark(f"{error.code}: {error.message}; using only the history")
        return None


def _newest_in_history(
    call: Call, folder: Path, key: str, topic: str | None, before: datetime | None
) -> list[int]:
    """Return the id of the newest task with the key; empty if there is none."""
    from tickwheel.history.read import Query, newest_id
    from tickwheel.history.segments import Tally

    tally = Tally()
    until_ms = None if before is None else round(before.timestamp() * 1000) + 1
    task_id = newest_id(folder, Query(key=key, topic=topic, until_ms=until_ms), tally)
    remark_skipped(call, tally)
    return [] if task_id is None else [task_id]


async def _show_flow(call: Call, ids: Sequence[int], folder: Path | None) -> int:
    """Show the history of tasks from the files in ``folder``, or from the daemon. Return exit code
    4 if a task has no history."""
    missing = 0
    if folder is not None:
        from tickwheel.history.read import flow
        from tickwheel.history.segments import Tally

        async def look_up(client: Client) -> dict[int, TaskInfo]:
            return {task_id: await client.lookup(task_id) for task_id in ids}

        infos = await _ask(call, look_up, has_files=True) or {}
        for task_id in ids:
            tally = Tally()
            events = flow(folder, task_id, id_time_ms(task_id), tally)
            source = f"the history in {folder}"
            missing += not _show_events(call, task_id, infos.get(task_id), events, source)
            remark_skipped(call, tally)
        return EXIT_NOT_FOUND if missing else 0
    async with call.client() as client:
        for task_id in ids:
            info, answer = await client.lookup(task_id), await client.task_history(task_id)
            if not answer.is_kept:
                call.out.remark("the daemon keeps no history (history_dir is not set)")
            elif not answer.complete:
                call.out.remark("the history is too long for one answer: use --history DIR")
            missing += not _show_events(call, task_id, info, answer.events, "the daemon's history")
    return EXIT_NOT_FOUND if missing else 0


def _show_events(
    call: Call, task_id: int, info: TaskInfo | None, events: Sequence[dict[str, Any]], source: str
) -> bool:
    """Show the state and the events of a task. Return whether it has events."""
    is_known = info is not None and info.state not in NOT_THERE
    if call.out.as_json:
        fields = task_fields(info) if info is not None else {"id": str(task_id)}
        call.out.record({**fields, "flow": events})
    else:
        if info is not None and is_known:
            call.out.grid(task_grid(info))
        if events:
            call.out.grid(flow_grid(task_id, events))
        elif is_known:
            call.out.remark(f"{source} has no events of task {task_id}")
        else:
            call.out.remark(f"not_found: task {task_id} is unknown")
    return bool(events)


# --- explain -------------------------------------------------------------------------------------

NOT_KNOWN = frozenset(("gone", "not_found"))
"""Causes of an unknown task."""


def _show_explained(call: Call, request: Mapping[str, Any], explanation: Explanation) -> int:
    lines: list[str] = []
    for reason in (explanation, *explanation.others):
        lines += ["", printable(f"{reason.cause.replace('_', ' ')}: {reason.detail}")]
        if reason.command:
            lines.append(printable(f"  {reason.command}"))
    call.out.result(fields_of(explanation), *lines[1:])
    if explanation.others_left_out and not call.out.as_json:
        call.out.remark(f"{explanation.others_left_out:,} more groups are left out")
    return EXIT_NOT_FOUND if explanation.cause in NOT_KNOWN else 0


def _check_explained(request: Mapping[str, Any]) -> None:
    if request.keys() not in ({"task_id"}, {"topic", "key"}):
        raise BadRequest("give either ID, or --topic and --key")


explain = declared(
    "explain", _show_explained,
    "Select the task by id, or the newest by topic and key. Exit code 4 if it is not known.",
    _check_explained,
)  # fmt: skip


def verdict(statuses: Sequence[str], good: set[str]) -> int:
    """Return the exit code: 0 if all are good, 4 if all others do not exist, else 1."""
    bad = [status for status in statuses if status not in good]
    if not bad:
        return 0
    return EXIT_NOT_FOUND if all(status in NOT_THERE for status in bad) else EXIT_FAILED


# --- tables and JSON of tasks --------------------------------------------------------------------

REASON_SHOWN_MAX = 60


def task_fields(info: TaskInfo) -> dict[str, Any]:
    """Return a task for ``--json``; only id and state if it is no longer stored."""
    raw = dict(info.raw)
    fields: dict[str, Any] = {"id": str(raw.pop("id")), "state": raw.pop("state")}
    if isinstance(body := raw.pop("body", None), bytes):
        fields |= stored_fields(raw["topic"], body, raw.pop("encoding", None))
    if info.groups:
        raw["groups"] = {
            name: {**group, "failures": failure_fields(info.groups[name].failures)}
            for name, group in raw["groups"].items()
        }
    return fields | raw


def failure_fields(failures: Iterable[Failure]) -> list[dict[str, Any]]:
    return [failure._asdict() for failure in failures]


def task_line(info: TaskInfo) -> str:
    """Format a stored task on one line: due time, id, state and body."""
    body = stored_text(str(info.topic), info.body or b"", info.encoding, None, whole=True)
    return f"{format_time(info.due_ms)}  {info.id}  {head(info.state)}  {body}"


def show_task(out: Output, info: TaskInfo) -> None:
    """Show a task, as JSON or for people."""
    shown: list[str | Grid] = [task_grid(info)]
    if info.groups:
        shown.append(attempts_grid(info))
    for name, group in info.groups.items():
        for failure in group.failures:
            if failure.trace:
                shown.append(f"\ngroup {printable(name)}, attempt {failure.attempt}:")
                shown += (f"  {printable(line)}" for line in failure.trace.splitlines())
    out.result(task_fields(info), *shown)


def dead_groups(info: TaskInfo) -> list[str]:
    """Return the groups in which the task is a dead letter."""
    return [name for name, group in info.groups.items() if group.state == "dead"]


def task_grid(info: TaskInfo) -> Grid:
    """Return a table of one task with a row for each field."""
    raw = info.raw
    shown: dict[str, Any] = {
        "state": str(raw["state"]).replace("_", " "),
        "topic": raw.get("topic"),
        "due": format_time(raw.get("due_ms")),
        "requested": format_time(asked_ms) if (asked_ms := raw.get("asked_ms")) else None,
        "within": _window_text(raw),
        "enqueued": format_time(raw.get("enqueued_ms")),
        **dict(_options_shown(raw)),
        "replay of": raw.get("replay_of"),
        "replay to": raw.get("replay_to"),
        "retry": describe_policy(raw["retry"]) if raw.get("retry") else None,
        "slot": raw.get("slot"),
        "cycles left": raw.get("cycles"),
        "body": _body_text(raw, None),
    }
    facts = {k: printable(str(v)) for k, v in shown.items() if v not in {None, ""}}
    return facts_grid(("field", "value"), facts, f"Task {info.id}")


def _options_shown(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a task as text, except the due window, which ``_window_text``
    formats."""
    for option_, meta in kept_options():
        value, name = raw.get(option_.name), option_.python.replace("_", " ")
        if not meta.is_listed or isinstance(option_.kind, Window):
            continue
        if isinstance(option_.kind, Properties):
            yield name, ", ".join(f"{k}={v}" for k, v in (value or {}).items())
        elif isinstance(option_.kind, Span):
            yield name, None if value is None else format_duration(value / 1000)
        else:
            yield name, None if value == option_.default else value


def _window_text(raw: Mapping[str, Any]) -> str | None:
    """Describe a task's due window and the choice within it; None without a window."""
    within_ms, asked_ms = raw.get("within_ms"), raw.get("asked_ms")
    if within_ms is None or asked_ms is None:
        return None
    chosen = asked_ms <= raw["due_ms"] <= asked_ms + within_ms
    choice = "at its emptiest moment" if chosen else "rescheduled since"
    return f"{duration_spec(within_ms)}, {choice}"


def attempts_grid(info: TaskInfo) -> Grid:
    """Return a table of a task's failures in each group, with their reasons."""
    heads = ("group", "state", "attempt", "at", "retries left", "subscriber", "reason")
    grid = Grid(heads, right=("attempt", "retries left"))
    for name, group in info.groups.items():
        for failure in group.failures:
            end = "died" if failure.reason.startswith(CONSUMER_DIED) else "failed"
            at = format_time(failure.at_ms)
            texts = printable(failure.subscriber or "-"), printable(failure.reason or "-")
            grid.rows.append((name, end, str(failure.attempt), at, "", *texts))
        at, left = format_time(group.at_ms or None), format_count(group.retries_left)
        grid.rows.append((name, head(group.state), str(group.attempt), at, left, "", ""))
    return grid


def _body_text(raw: Mapping[str, Any], length_max: int | None = BODY_SHOWN_MAX) -> str:
    """Return the body of a task as text if possible; empty if it has none any more."""
    body = raw.get("body")
    if not isinstance(body, bytes):
        return ""
    return stored_text(raw["topic"], body, raw.get("encoding"), length_max)


COLUMNS = (
    column("id", right=True), column("state", show=head), column("topic"),
    column("due", "due_ms", format_time), column("key"), column("body", "raw", _body_text),
)  # fmt: skip
list_ = listed(
    "list_tasks",
    "List stored tasks by id. A search by --key without --topic reads all tasks.",
    COLUMNS,
    task_fields,
)


def reason_text(reason: str | None) -> str:
    return printable(reason or "-", REASON_SHOWN_MAX)


# --- bulk operations -----------------------------------------------------------------------------

LOOK_S = 0.25
ENDS_TASKS = {
    "cancel": ("tasks", "Cancel", "cancelled"),
    "delete": ("dead letters", "Delete for good", "deleted for good"),
}
"""Operations that cannot be undone, which ask first: what they change, and words about it."""
NON_SELECTING = ("all_", "dry_run", "yes", "wait", "rate")
"""Options of a bulk operation that do not select tasks."""


def _show_bulk(call: Call, request: Mapping[str, Any], bulk: BulkInfo) -> None:
    facts: dict[str, str | int] = {"kind": bulk.kind, "topic": bulk.topic, "state": bulk.state}
    for name in ("selection", "arguments", "refused"):
        for key, value in bulk.raw[name].items():
            facts[f"{name}: {key}"] = format_time(value) if key.endswith("due_ms") else str(value)
    if bulk.rate is not None:
        facts["rate"] = f"{bulk.rate:g} per second"
    facts |= {"looked at": bulk.looked_at, "matched": bulk.matched, "changed": bulk.changed}
    facts |= time_facts(bulk)
    facts |= {n: bulk.raw[n] for n in ("by", "note") if bulk.raw[n]}
    call.out.result(fields_of(bulk), facts_grid(("bulk", bulk.id), facts))


def say_bulk(call: Call, bulk: BulkInfo) -> int:
    """Show a bulk operation. Return exit code 1 if it failed or was cancelled."""
    progress = f"{bulk.changed:,} of {bulk.matched:,} changed"
    if not bulk.is_over:
        progress += f" so far; `tickwheel bulk show {bulk.id}` shows its progress"
    note = f": {bulk.note}" if bulk.note else ""
    line = f"{bulk.id}  {bulk.state}  {progress}{_reasons(bulk.refused)}{note}"
    call.out.result(fields_of(bulk), line)
    _remark_ttl_over(call, bulk.refused.get(TTL_OVER, 0))
    return EXIT_FAILED if bulk.state in ("failed", "cancelled") else 0


def _say_cancelled(call: Call, request: Mapping[str, Any], bulk: BulkInfo) -> None:
    say_bulk(call, bulk)


list_bulk = listed(
    "list_bulk",
    "List bulk operations, newest first.",
    (
        column("bulk", "id"), *text_columns("topic", "state"),
        *count_columns("looked_at", "matched", "changed"), column("made", "made_ms", format_time),
    ),
    nothing="no matching bulk operations",
)  # fmt: skip
show_bulk = declared("show_bulk", _show_bulk)
cancel_bulk = declared("cancel_bulk", _say_cancelled)


def _reasons(refused: Mapping[str, int]) -> str:
    return "".join(f", {n:,} {word.replace('_', ' ')}" for word, n in sorted(refused.items()))


# --- commands with a selection -------------------------------------------------------------------


async def do_bulk(
    call: Call,
    kind: str,
    topic: str | None,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any] = {},
) -> int:
    """Try a bulk operation, or confirm and start it. ``options`` are those that select, by the
    client's names, and NON_SELECTING."""
    selection: Any = {name: v for name, v in options.items() if name not in NON_SELECTING}
    if topic is None:
        raise BadRequest("a selection requires --topic")
    if not selection and not options.get("all_"):
        raise BadRequest("give --where, --tags, --key-prefix or another selection, or --all")

    async def preview() -> BulkPreview:
        return await call.ask(lambda c: c.preview_bulk(kind, topic, selection, **arguments))

    if options.get("dry_run"):
        _show_preview(call, {"kind": kind, "topic": topic}, await preview())
        return 0
    if kind in ENDS_TASKS and not options.get("yes"):
        noun, verb, ended = ENDS_TASKS[kind]
        parts = ", ".join(
            f"{name.replace('_', '-')} {v.isoformat() if isinstance(v, datetime) else v}"
            for name, v in selection.items()
        )
        subject = f"{(await preview()).would_change:,} {noun} of topic {topic}"
        subject += f" with {parts}" if parts else ""
        if not confirmed(call, f"{subject} would be {ended}", f"{verb} {subject}?"):
            return EXIT_FAILED
    rate = options.get("rate")
    return await start_bulk(
        call,
        lambda client: getattr(client, METHODS[kind])(
            topic=topic, filter=selection, rate=rate, **arguments
        ),
        wait=bool(options.get("wait")),
    )


async def start_bulk(
    call: Call, start: Callable[[Client], Awaitable[BulkInfo]], *, wait: bool
) -> int:
    """Start a bulk operation, follow it if ``wait``, and show it. Return the exit code."""
    async with call.client() as client:
        bulk = await start(client)
        if wait:
            bulk = await follow_bulk(client, bulk)
    return say_bulk(call, bulk)


async def follow_bulk(client: Client, bulk: BulkInfo) -> BulkInfo:
    """Follow a bulk operation until it is over; a terminal shows its progress."""
    status: Any = None
    if sys.stderr.isatty():
        from rich.console import Console

        status = Console(stderr=True).status("")
    with status or nullcontext():
        try:
            while not bulk.is_over:
                if status is not None:
                    status.update(f"looked at {bulk.looked_at:,}, changed {bulk.changed:,}")
                await asyncio.sleep(LOOK_S)
                bulk = await client.show_bulk(bulk.id)
        except BaseException:
            remark(
                f"looked at {bulk.looked_at:,}, changed {bulk.changed:,} so far; the"
                f" operation is still running: `tickwheel bulk show {bulk.id}` shows its progress,"
                f" `tickwheel bulk cancel {bulk.id}` ends it"
            )
            raise
    return bulk


def _show_preview(call: Call, labels: Mapping[str, Any], preview: BulkPreview) -> None:
    names = ("looked_at", "matched", "would_change", "refused")
    fields = {**labels, **{name: getattr(preview, name) for name in names}}
    examples = list(map(str, preview.examples))
    counts = f"{preview.would_change:,} of {preview.looked_at:,} would be changed"
    line = f"dry run  {counts}{_reasons(preview.refused)}"
    call.out.result(fields | {"examples": examples}, line, *examples)


# --- dead letters --------------------------------------------------------------------------------

Pair = tuple[int, str]
"""(task id, group)"""
Settle = Callable[[Sequence[Pair]], Awaitable[Sequence[str]]]

CHUNK_MAX = 1_000
"""Maximum dead letters of one request."""
CHUNKS_PER_S = 5
"""Maximum requests per second with a rate, so that the rate is even without a request per task."""
NO_DEAD_LETTER = "unknown"
"""The status of a task that is not, or no longer, a dead letter of the group."""

TTL_OVER = "ttl_over"
DONE = {"requeue": "requeued", "delete": "deleted"}

OptionalIds = Annotated[
    list[str] | None, argument("ID...", "The tasks' ids, instead of filters or --all.")
]


class SelectOptions(TypedDict, total=False):
    """The options that select dead letters."""


derive(SelectOptions, DeadPage.fields()[:-2], past_time_option)  # without place and size of a page
SELECTING = tuple(SelectOptions.__annotations__)


class SettleOptions(SelectOptions, DeadBulkOptions, total=False):
    """The options that select dead letters to settle."""

    all_: Annotated[bool, flag("Everything that the filters select, or all dead letters.")]


async def show_dead(call: Call, ids: Ids) -> int:
    """Show dead letters with their bodies and every failure: attempt, time, reason."""
    missing = False
    async with call.client() as client:
        for task_id in ids:
            info = await client.lookup(task_id)
            if dead_groups(info):
                show_task(call.out, info)
            else:
                call.out.remark(f"not_found: task {task_id} is not a dead letter ({info.state})")
                missing = True
    return EXIT_NOT_FOUND if missing else 0


async def requeue(
    call: Call,
    ids: OptionalIds = None,
    rate: RateOption = None,
    ttl: Annotated[
        float | None,
        duration("New time to live, counted from the requeue: 1h, 2d. Expired tasks require it."),
    ] = None,
    **options: Unpack[SettleOptions],
) -> int:
    """Deliver dead letters again, with their failures reset.

    Select by ids; or by --topic, --group, --since, --until, --reason, processed page by page; or by
    --where and the like, as a bulk operation in the background.
    """
    return await _settle(call, "requeue", ids, rate, options, given({"ttl": ttl}))


async def delete(
    call: Call, ids: OptionalIds = None, rate: BulkRate = None, **options: Unpack[SettleOptions]
) -> int:
    """Delete dead letters for good.

    Select by ids; or by --topic, --group, --since, --until, --reason, processed page by page; or by
    --where and the like, as a bulk operation in the background.
    """
    return await _settle(call, "delete", ids, rate, options)


async def _settle(
    call: Call,
    kind: str,
    ids: list[str] | None,
    rate: float | None,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any] = {},
) -> int:
    """Settle dead letters by ids, page by page, or in a bulk operation."""
    query = {name: value for name, value in options.items() if name in SELECTING}
    # Options that only a bulk operation has; for a delete the rate is one of them.
    if options.keys() - {*SELECTING, "all_"} or (kind == "delete" and rate is not None):
        if ids or query.keys() & {"since", "until"}:
            raise BadRequest(
                "ids, --since and --until cannot be combined with --where and other options of a"
                " bulk operation, which selects by --topic and the tasks' fields"
            )
        bulk_options = {name: value for name, value in options.items() if name != "topic"}
        bulk_options |= given({"rate": rate})
        return await do_bulk(call, kind, query.get("topic"), bulk_options, arguments)
    if not ids and not query and "all_" not in options:
        raise BadRequest("give ids, or --topic, --group, --since, --until, --reason, or --all")
    if ids and "all_" in options:
        raise BadRequest("give ids or --all, not both")
    for name in query:
        if ids and name != "group":
            raise BadRequest(f"--{name} cannot be combined with ids")
    try:
        task_ids = [parse_id(text) for text in ids or ()]
    except ValueError as error:
        raise BadRequest(str(error)) from None
    async with call.client() as client:
        settle: Settle = client.dead_delete
        if kind == "requeue":
            settle = partial(client.dead_requeue, **arguments)
        if task_ids:
            return await _by_id(call, client, settle, DONE[kind], task_ids, query.get("group"))
        return await _selected(call, client, settle, DONE[kind], query, rate)


async def purge(
    call: Call, topic: TopicOption = None, group: GroupOption = None, yes: YesOption = False
) -> int:
    """Delete all dead letters of a topic, a group, or the daemon, after a confirmation."""
    query = given({"topic": topic, "group": group})
    if not yes:
        count = await call.ask(lambda client: count_dead(client, query))
        scope = "".join(f" of {name} {value}" for name, value in query.items())
        subject = f"{count:,} dead letters{scope}"
        refusal, question = f"{subject} would be deleted for good", f"Delete {subject} for good?"
        if not confirmed(call, refusal, question, "nothing was deleted"):
            return EXIT_FAILED
    async with call.client() as client:
        return await _selected(call, client, client.dead_delete, DONE["delete"], query, None)


async def _selected(
    call: Call,
    client: Client,
    settle: Settle,
    good: str,
    query: Mapping[str, Any],
    rate: float | None,
) -> int:
    """Settle each dead letter that ``Client.dead_list(**query)`` finds and that died before now, by
    the daemon's clock. Show how many have which status. Return the exit code."""
    is_counted = sys.stderr.isatty() and not query.keys() & {"since", "until", "reason"}
    total = await count_dead(client, query) if is_counted else None
    letters = client.dead_list(**{"until": moment(client.server_info["now_ms"] + 1), **query})
    columns = ("MofNCompleteColumn", "BarColumn", "TimeRemainingColumn")
    statuses: Counter[str] = Counter()
    began_s, size = time.monotonic(), chunk_size(rate)
    try:
        with progress_bar(*columns, total=total) as update:
            while chunk := [letter async for letter in _first(letters, size)]:
                statuses.update(await settle([(letter.id, letter.group) for letter in chunk]))
                update(advance=len(chunk))
                wait_s = pause_s(statuses.total(), time.monotonic() - began_s, rate)
                if wait_s:
                    await asyncio.sleep(wait_s)
    except BaseException:
        if statuses:
            call.out.remark(
                f"{statuses[good]} {good} before this error; repeat the command for the others"
            )
        raise
    took_s = time.monotonic() - began_s
    counted = {good: statuses[good], **statuses}
    fields = {"matched": statuses.total(), **counted, "took_s": round(took_s, 3)}
    others = {status: n for status, n in statuses.items() if status != good}
    line = f"{statuses[good]:,} {good}{_reasons(others)} in {format_duration(took_s)}"
    call.out.result(fields, line)
    _remark_ttl_over(call, statuses[TTL_OVER])
    return verdict([status for status in statuses if status != NO_DEAD_LETTER], {good})


async def _by_id(
    call: Call, client: Client, settle: Settle, good: str, ids: list[int], group: str | None
) -> int:
    """Settle dead letters by id and show each. Return the exit code."""
    if group is not None:
        pairs = [(task_id, group) for task_id in ids]
    else:
        infos = await client.lookup_many(ids)
        pairs = [(info.id, name) for info in infos for name in dead_groups(info) or [""]]
    dead = [pair for pair in pairs if pair[1]]
    answers = dict(zip(dead, await settle(dead), strict=True)) if dead else {}
    for pair in pairs:
        task_id, name = pair
        status = answers.get(pair, NO_DEAD_LETTER)
        fields = {"id": str(task_id), "group": name or None, "status": status}
        call.out.result(fields, f"{task_id}  {name or '-'}  {status}")
    _remark_ttl_over(call, list(answers.values()).count(TTL_OVER))
    return verdict([answers.get(pair, NO_DEAD_LETTER) for pair in pairs], {good})


def _remark_ttl_over(call: Call, count: int) -> None:
    if count:
        call.out.remark(
            f"{TTL_OVER}: {count:,} dead letters were not requeued, because their ttl is over and"
            " they would expire at once; --ttl 1h gives them another hour"
        )


def chunk_size(rate: float | None) -> int:
    """Return the dead letters of one request."""
    return CHUNK_MAX if rate is None else min(CHUNK_MAX, max(1, int(rate / CHUNKS_PER_S)))


def pause_s(done: int, elapsed_s: float, rate: float | None) -> float:
    """Return the seconds to wait after ``done`` dead letters to keep to ``rate`` per second."""
    return 0.0 if rate is None else max(0.0, done / rate - elapsed_s)


async def _first(items: AsyncIterator[T], count: int) -> AsyncIterator[T]:
    """Yield the next items, up to ``count``."""
    for _ in range(count):
        try:
            yield await anext(items)
        except StopAsyncIteration:
            return


async def count_dead(client: Client, query: Mapping[str, Any]) -> int:
    """Return the number of dead letters of a topic, a group or all, ignoring times and reasons."""
    topics: Mapping[str, Any] = (await client.stats()).raw.get("topics") or {}
    count = 0
    for name, topic in topics.items():
        if query.get("topic", name) == name:
            of = topic if "group" not in query else (topic.get("groups") or {}).get(query["group"])
            count += int((of or {}).get("dead") or 0)
    return count


# --- tables and JSON of dead letters -------------------------------------------------------------


DEAD_COLUMNS = (
    column("id", right=True), *text_columns("group", "topic"),
    column("died", "died_ms", format_time), column("attempts", "attempt", right=True),
    column("reason", show=reason_text),
)  # fmt: skip
DEAD_SPARE = ("attempts",)


def dead_fields(letter: DeadLetter) -> dict[str, Any]:
    return fields_of(letter) | {"failures": failure_fields(letter.failures)}


list_dead = listed(
    "list_dead", "List dead letters with the reason of their last failure.", DEAD_COLUMNS,
    dead_fields, spare=DEAD_SPARE,
)  # fmt: skip
