"""``history`` and ``restore``: the files that a daemon writes, searched and shown; made-up ones for
trying reports; and a lost store rebuilt from the latest backup and these files.
No daemon is needed; none may use the store that is restored.

The history's own package is imported when a command runs, so that other commands start quickly.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, JSON_HELP, Call, merge, shared_of
from tickwheel.cli.listing import ROWS_SHOWN, LimitOption, cut, wanted
from tickwheel.cli.options import moment, typed
from tickwheel.cli.output import Grid, Output, facts_grid, remark
from tickwheel.cli.values import BODY_SHOWN_MAX, format_duration, format_time, parse_id, printable
from tickwheel.errors import BadRequest

if TYPE_CHECKING:
    from tickwheel.history.read import Query
    from tickwheel.history.restore import Listed, Report
    from tickwheel.history.segments import Tally


Event = dict[str, Any]

GRID_ROWS_MAX = 10_000
"""Up to so many events are shown as a table; more are shown line by line, as they are found."""
FOLLOW_POLL_S = 0.2
DIR_ENV = "TICKWHEEL_HISTORY_DIR"
DIR_HELP = "The history's folder: the daemon's setting history_dir."

DirOption = Annotated[
    str | None, typer.Option("--dir", envvar=DIR_ENV, metavar="DIR", help=DIR_HELP)
]


def list_(
    ctx: typer.Context,
    directory: DirOption = None,
    ids: Annotated[
        list[int] | None,
        typer.Option("--id", parser=typed(parse_id), metavar="ID", help="This task's; repeatable."),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Of tasks with this key.")] = None,
    topic: Annotated[str | None, typer.Option(help="Only this topic's.")] = None,
    group: Annotated[str | None, typer.Option(help="Only this group's.")] = None,
    schedule: Annotated[str | None, typer.Option(help="Only of this schedule.")] = None,
    transaction: Annotated[str | None, typer.Option(help="Only of this transaction.")] = None,
    events: Annotated[
        list[str] | None,
        typer.Option(
            "--event", metavar="EVENT", help="Only these: delivered, acked, …; repeatable."
        ),
    ] = None,
    since: Annotated[
        datetime | None, moment("--since", "From then on: ISO-8601, or 2h for two hours ago.")
    ] = None,
    until: Annotated[
        datetime | None, moment("--until", "Before then: ISO-8601, or 2h for two hours ago.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="At most so many; 0: all, oldest first."
            f" Default: all with --json, {ROWS_SHOWN} as a table.",
        ),
    ] = None,
    oldest_first: Annotated[
        bool, typer.Option("--oldest-first", help="The oldest of them, instead of the newest.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what happens; Ctrl-C ends.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The events as they are stored.")] = False,
) -> int:
    """Events of the history, newest first.

    Exit code 4 when a task, a key or a transaction was asked for and nothing is there.
    """
    from tickwheel.history.read import Query
    from tickwheel.history.segments import Tally

    call = merge(ctx, None, None, as_json)
    folder = folder_of(directory, "--dir")
    query = Query(
        ids=frozenset(ids) if ids else None,
        key=key,
        topic=topic,
        group=group,
        schedule=schedule,
        transaction=transaction,
        events=_event_names(events),
        since_ms=_ms(since),
        until_ms=_ms(until),
    )
    tally = Tally()
    if follow:
        return _follow(call, folder, query, tally)
    most = None if limit == 0 else wanted(call, limit)
    found = _show_events(call, _find(folder, query, most, tally, oldest_first=oldest_first), most)
    remark_skipped(call, tally)
    asked = (query.ids, query.key, query.transaction) != (None, None, None)
    return EXIT_NOT_FOUND if asked and not found else 0


def tasks(
    ctx: typer.Context,
    directory: DirOption = None,
    key: Annotated[str | None, typer.Option(help="With this key.")] = None,
    topic: Annotated[str | None, typer.Option(help="Of this topic.")] = None,
    since: Annotated[
        datetime | None, moment("--since", "Enqueued then or later: ISO-8601, or 2h ago.")
    ] = None,
    until: Annotated[datetime | None, moment("--until", "Enqueued before then.")] = None,
    limit: LimitOption = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> int:
    """Tasks of the history, finished ones too, the newest first: what each was, and its end.

    Exit code 4 when there is none.
    """
    from tickwheel.history.read import TaskQuery, search_tasks
    from tickwheel.history.segments import Tally

    call = merge(ctx, None, None, as_json)
    tally = Tally()
    wanted_ = TaskQuery(key, topic, _ms(since), _ms(until))
    grid = Grid(
        ("id", "state", "topic", "key", "enqueued", "ended", "attempts", "body"),
        right=frozenset(("id", "attempts")),
        times=frozenset(("enqueued", "ended")),
        spare=("attempts",),
    )
    count = 0
    for one in cut(call, limit, search_tasks(folder_of(directory, "--dir"), wanted_, tally)):
        count += 1
        if call.out.as_json:
            call.out.record(one)
            continue
        texts = [printable(str(one.get(name) or "-"), BODY_SHOWN_MAX) for name in ("topic", "key")]
        times = format_time(one["enqueued_ms"]), format_time(one["ended_ms"])
        body = printable(str(one.get("body", one.get("body_base64", ""))), BODY_SHOWN_MAX)
        grid.rows.append((one["id"], one["state"], *texts, *times, str(one["attempts"]), body))
    if grid.rows:
        call.out.grid(grid)
    remark_skipped(call, tally)
    return 0 if count else EXIT_NOT_FOUND


def _find(
    folder: Path, query: Query, most: int | None, tally: Tally, *, oldest_first: bool
) -> Iterable[Event]:
    """The events of a query: all without ``most``, else one more than these, if there is one."""
    from tickwheel.history import read

    if most is None or oldest_first:
        return read.search(folder, query, tally)
    return read.newest(folder, query, min(most + 1, max(most, read.NEWEST_MAX)), tally)


def _show_events(call: Call, events: Iterable[Event], most: int | None) -> int:
    """Show events; returns how many there were."""
    if most is not None:
        events = cut(call, most, events)
    if not call.out.as_json and most is not None and most <= GRID_ROWS_MAX:
        grid = events_grid(events)
        if grid.rows:
            call.out.grid(grid)
        return len(grid.rows)
    count = 0
    for event in events:
        count += 1
        _show_event(call, event)
    return count


def _show_event(call: Call, event: Event) -> None:
    if call.out.as_json:
        call.out.record(event)
    else:
        call.out.line(event_line(event))


def _follow(call: Call, folder: Path, query: Query, tally: Tally) -> int:
    from tickwheel.history.read import Follow

    now_ms = int(time.time() * 1000)
    following = Follow(
        folder, query, query.since_ms if query.since_ms is not None else now_ms, tally
    )
    while True:
        for event in following.read():
            _show_event(call, event)
        if query.until_ms is not None and time.time() * 1000 >= query.until_ms:
            return 0
        time.sleep(FOLLOW_POLL_S)


# --- shared with other commands ------------------------------------------------------------------


def folder_of(given: str | None, option: str) -> Path:
    """The folder of the history, which must exist. Raises BadRequest."""
    name = given or os.environ.get(DIR_ENV)
    if not name:
        raise BadRequest(f"name the history's folder with {option} or {DIR_ENV}")
    folder = Path(name)
    if not folder.is_dir():
        raise BadRequest(f"history {name}: no such folder")
    return folder


def remark_skipped(call: Call, tally: Tally) -> None:
    """Report lines and segments that could not be read."""
    if tally.torn:
        call.out.remark(f"{tally.torn:,} torn lines were skipped")
    if tally.unreadable:
        call.out.remark(f"{tally.unreadable:,} segments could not be read to their end")


def _event_names(events: list[str] | None) -> frozenset[str] | None:
    from tickwheel.history.lines import EVENTS

    names = [name for text in events or () for name in text.replace("-", "_").split(",")]
    for name in names:
        if name not in EVENTS:
            raise BadRequest(f"--event is {name!r:.60}; known are {', '.join(EVENTS)}")
    return frozenset(names) if names else None


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


# --- events for people ---------------------------------------------------------------------------

_COLUMNS = ("time", "event", "task", "topic", "group", "what")
_FLOW_COLUMNS = ("time", "after", "event", "group", "attempt", "what", "node")
REASON_SHOWN_MAX = 80


def events_grid(events: Iterable[Event]) -> Grid:
    """A table with a row for each event, in the order given."""
    return Grid(_COLUMNS, rows=[_cells(event) for event in events], right=frozenset(("task",)))


def _cells(event: Event) -> tuple[str, ...]:
    return (
        format_time(event["time_ms"]),
        _word(event),
        _text(event, "task_id"),
        _text(event, "topic"),
        _text(event, "group"),
        _what(event, with_attempt=True),
    )


def event_line(event: Event) -> str:
    """An event as one line, for events that are shown as they come."""
    at, word, task, topic, group, what = _cells(event)
    return f"{at}  {word:<12}  {task:>19}  {topic}  {group}  {what}".rstrip()


def flow_grid(task_id: int, events: Iterable[Event]) -> Grid:
    """One task's story: when, how long after the one before, what, who, where."""
    grid = Grid(
        _FLOW_COLUMNS, title=f"History of task {task_id}", right=frozenset(("after", "attempt"))
    )
    before_ms: int | None = None
    for event in events:
        at_ms = event["time_ms"]
        after = "" if before_ms is None else format_duration((at_ms - before_ms) / 1000)
        before_ms = at_ms
        grid.rows.append(
            (
                format_time(at_ms),
                after,
                _word(event),
                _text(event, "group"),
                str(event.get("attempt", "")),
                _what(event, with_attempt=False),
                _text(event, "node"),
            )
        )
    return grid


def _what(event: Event, *, with_attempt: bool) -> str:
    """What an event says beside its name."""
    parts = []
    if with_attempt and event.get("attempt", 1) != 1:
        parts.append(f"attempt {event['attempt']}")
    if "lateness_ms" in event:
        late = f"+{format_duration(event['lateness_ms'] / 1000)}"
        parts.append(f"{late} ({_text(event, 'cause')})" if "cause" in event else late)
    if "ack_ms" in event:
        parts.append(f"in {format_duration(event['ack_ms'] / 1000)}")
    if "due_ms" in event and event.get("event") != "delivered":
        word = "next" if event.get("event") == "nacked" else "due"
        parts.append(f"{word} {format_time(event['due_ms'])}")
    parts += [f"{name}={_text(event, name)}" for name in ("key", "tag") if name in event]
    shown = (("replay_of", "replay of"), ("replay_to", "for"), ("subscriber", "by"))
    parts += [f"{word} {_text(event, n)}" for n, word in (*shown, ("producer", "by")) if n in event]
    if "reason" in event:
        parts.append(printable(str(event["reason"]), REASON_SHOWN_MAX))
    if "schedule" in event:
        parts += _of_schedule(event)
    elif "transaction" in event:
        parts += [f"transaction {_text(event, 'transaction')}", f"{event['count']:,} tasks"]
    elif "count" in event:
        parts.append(f"{event['count']:,} events")
    if "clean" in event:
        parts.append("clean" if event["clean"] else "after an unclean stop")
    return ", ".join(parts)


def _of_schedule(event: Event) -> list[str]:
    parts = [f"schedule {_text(event, 'schedule')}"]
    parts += [
        f"{name} {format_time(event[f'{name}_ms'])}"
        for name in ("planned", "next")
        if f"{name}_ms" in event
    ]
    if "count" in event:
        parts.append(f"{event['count']:,} occurrences")
    return parts


def _word(event: Event) -> str:
    return _text(event, "event").replace("_", " ")


def _text(event: Event, name: str) -> str:
    value = event.get(name)
    return "" if value is None else printable(str(value))


# --- restore -------------------------------------------------------------------------------------

SHOWN_IDS_MAX = 10


class Overdue(StrEnum):
    """What becomes of restored tasks that are due already."""

    INCLUDE = "include"
    SKIP = "skip"


def restore(
    ctx: typer.Context,
    into: Annotated[
        str,
        typer.Option(
            "--into", metavar="URL", help="The new, empty store: sqlite:///… or redis://…"
        ),
    ],
    backup: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="BACKUP.db", help="The latest backup. Without: history only."
        ),
    ] = None,
    history: Annotated[
        list[str] | None,
        typer.Option("--history", metavar="DIR", help=f"{DIR_HELP} Repeatable."),
    ] = None,
    ids: Annotated[
        list[int] | None,
        typer.Option(
            "--id", parser=typed(parse_id), metavar="ID", help="Only this task; repeatable."
        ),
    ] = None,
    overdue: Annotated[
        Overdue,
        typer.Option(help="Tasks that were due already: they go out at once, or stay away."),
    ] = Overdue.INCLUDE,
    allow_missing_bodies: Annotated[
        bool,
        typer.Option(
            "--allow-missing-bodies", help="Leave out what cannot be restored, and go on."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be restored; write nothing.")
    ] = False,
    shard: Annotated[
        int | None, typer.Option(min=0, max=1023, help="Where the history holds several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> int:
    """Rebuild a lost store from the latest backup and the history since.

    Ids are kept. Exact after a clean stop; after a crash tasks may come once more than they
    should. Exit code 1 when tasks enqueued after the backup have no body in the history
    (history_bodies was off): nothing is written then, unless --allow-missing-bodies. Exit
    code 4 when a task named by --id is not there.
    """
    from tickwheel.history.restore import Plan
    from tickwheel.history.restore import restore as run

    call = merge(ctx, None, None, as_json)
    plan = Plan(
        into=into,
        backup=backup,
        history=tuple(history or filter(None, [os.environ.get(DIR_ENV)])),
        ids=frozenset(ids) if ids else None,
        include_overdue=overdue is Overdue.INCLUDE,
        allow_missing_bodies=allow_missing_bodies,
        dry_run=dry_run,
        shard=shard,
    )
    report = asyncio.run(run(plan, int(time.time() * 1000)))
    _show_report(call, into, report)
    if report.refused:
        return EXIT_FAILED
    return EXIT_NOT_FOUND if report.not_found.count else 0


def _show_report(call: Call, into: str, report: Report) -> None:
    from tickwheel.persistence.urls import without_secrets

    if call.out.as_json:
        call.out.record({"into": without_secrets(into), **report.fields()})
        return
    title = _report_title(without_secrets(into), report)
    call.out.grid(facts_grid(("what", "value"), _report_facts(report), title))
    for text in _report_remarks(report):
        call.out.remark(text)


def _report_title(into: str, report: Report) -> str:
    if report.refused:
        return f"Nothing was written to {into}"
    return f"What would be restored into {into}" if report.dry_run else f"Restored into {into}"


def _report_facts(report: Report) -> dict[str, str | int]:
    shown: dict[str, str | int] = {
        "tasks": report.restored,
        "of the backup": report.from_backup,
        "of the history": report.from_history,
        "overdue, they go out at once": report.overdue,
        "waiting for a retry": report.waiting,
        "dead letters": report.dead_letters,
        "groups": report.groups,
        "schedules": report.schedules,
        "ended since the backup": report.ended_since,
        "overdue, left out": report.skipped_overdue.count,
        "without a body, left out": report.without_body.count,
        "backup of": format_time(report.backup_ms),
    }
    if report.history:
        shown["events applied"] = report.events
        shown["newest event"] = format_time(report.last_event_ms)
        missing = report.without_body.count or report.schedules_without_body
        why_not = "bodies are missing" if missing else "at least once"
        shown["exact"] = "yes" if report.exact else f"no: {why_not}"
    return shown | {"epoch": str(report.epoch)}


def _report_remarks(report: Report) -> list[str]:
    found = [f"the history has gaps: {gap}" for gap in report.gaps]
    if report.history and not report.clean_stop:
        spool = "" if report.tail_ms is None else (
            f"; the spool was written to for {format_duration(report.tail_ms / 1000)} after it"
        )  # fmt: skip
        found.append(
            f"the daemon did not stop cleanly: what came after the newest event is lost{spool}"
        )
    if not report.history:
        found.append("without a history the store is as it was when the backup was made")
    if report.without_body.count:
        found.append(
            f"{_listed(report.without_body)} cannot be restored: enqueued after the backup, and"
            " the history has no bodies"
            + ("" if not report.refused else "; --allow-missing-bodies restores the others")
        )
    if names := report.schedules_without_body:
        more = ", …" if len(names) > SHOWN_IDS_MAX else ""
        found.append(
            f"{len(names):,} schedules ({', '.join(names[:SHOWN_IDS_MAX])}{more}) cannot be"
            " restored: put after the backup, and the history has no bodies"
        )
    if names := report.transactions_lost:
        more = ", …" if len(names) > SHOWN_IDS_MAX else ""
        found.append(
            f"{len(names):,} transactions ({', '.join(names[:SHOWN_IDS_MAX])}{more}) are lost:"
            " tasks were prepared after the backup and not decided"
        )
    if report.not_found.count:
        found.append(f"not_found: {_listed(report.not_found)} not there, or ended")
    return found


def _listed(listed: Listed) -> str:
    shown = ", ".join(listed.ids[:SHOWN_IDS_MAX])
    more = ", …" if listed.count > SHOWN_IDS_MAX else ""
    return f"{listed.count:,} tasks ({shown}{more})"


# --- generate ---------------------------------------------------------------------------------


def generate(
    ctx: typer.Context,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="A new or empty folder.", file_okay=False)
    ],
    tasks: Annotated[
        int, typer.Option(min=1, help="So many; each has about 3.6 events.")
    ] = 100_000,
    days: Annotated[int, typer.Option(min=1, max=3660, help="Spread over so many days.")] = 3,
    seed: Annotated[int, typer.Option(help="The same seed makes the same history.")] = 1,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="DATE", help="The first day, UTC. Default: so that yesterday is the last."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> int:
    """Write synthetic history: topics, rhythms, bursts, failures, slow consumers, dead letters.

    Every event is marked as synthetic, and so is every report of it.
    """
    from tickwheel.demo.synthetic_history import Plan
    from tickwheel.demo.synthetic_history import generate as make

    if out.exists() and any(out.iterdir()):
        remark(f"failed: {out} is not empty; synthetic history is never mixed into another")
        return EXIT_FAILED
    plan = Plan(tasks=tasks, days=days, seed=seed, start_ms=_start_ms(start, days))
    began_s = time.monotonic()
    made = make(plan, out, _show_progress if sys.stderr.isatty() else None)
    took_s = time.monotonic() - began_s
    output = Output(as_json=as_json or shared_of(ctx).as_json)
    if output.as_json:
        output.record(
            {
                "out": str(out), "synthetic": True, "seed": seed, "events": made.lines,
                "by_event": dict(sorted(made.events.items())), "segments": made.segments,
                "bytes": made.bytes, "seconds": round(took_s, 3),
            }
        )  # fmt: skip
        return 0
    output.line(
        f"{made.lines:,} synthetic events of {tasks:,} tasks in {made.segments:,} segments "
        f"({made.bytes / 1e6:,.1f} MB), {format_duration(took_s)}: {out}"
    )
    return 0


def _start_ms(text: str | None, days: int) -> int:
    if text is None:
        first = datetime.now(UTC).date() - timedelta(days=days)
    else:
        try:
            first = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).date()
        except ValueError:
            raise typer.BadParameter(
                f"{text!r} is no date; write for example 2026-01-31", param_hint="--start"
            ) from None
    midnight = datetime(first.year, first.month, first.day, tzinfo=UTC)
    return round(midnight.timestamp() * 1000)


def _show_progress(done: int, of: int) -> None:
    end = "\n" if done == of else ""
    sys.stderr.write(f"\rtickwheel: hour {done} of {of}{end}")
    sys.stderr.flush()
