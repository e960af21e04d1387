"""Commands on a daemon's history: ``history`` searches and shows it, ``restore`` rebuilds a lost
store from the latest backup and the history, ``report`` creates tables and an HTML page from it.
None of them needs a daemon, and no daemon may have the target of a restore open.

Their packages, and Spark, are imported when a command runs, so that other commands start quickly.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypedDict, Unpack

from tickwheel import environment
from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call, Default, limit_file_mode, offline
from tickwheel.cli.options import (
    LimitOption,
    duration,
    flag,
    one_of,
    option,
    parse_id,
    past_time_option,
)
from tickwheel.cli.output import (
    BODY_SHOWN_MAX,
    ROWS_SHOWN,
    Column,
    Grid,
    Listing,
    Map,
    Output,
    column,
    count_columns,
    cut,
    facts_grid,
    format_count,
    format_duration,
    format_time,
    grid_of,
    printable,
    progress_bars,
    remark,
    stored_text,
    text_columns,
    wanted,
)
from tickwheel.errors import BadRequest

if TYPE_CHECKING:
    from tickwheel.history.read import Query
    from tickwheel.history.restore import Listed, Report
    from tickwheel.history.segments import Tally
    from tickwheel.reports import ReportSettings
    from tickwheel.reports.state import Summary

Event = dict[str, Any]

GRID_ROWS_MAX = 10_000
"""Maximum number of events in a table; more are printed line by line as they are found."""
FOLLOW_POLL_S = 0.2
DIR_ENV = "TICKWHEEL_HISTORY_DIR"
DIR_HELP = "Folder of the history: the daemon's setting history_dir."

DirOption = Annotated[str | None, option(DIR_HELP, "DIR", "--dir", envvar=DIR_ENV)]


class QueryOptions(TypedDict, total=False):
    """The options that select events."""

    ids: Annotated[
        list[int] | None,
        option("Only events of this task; can be repeated.", "ID", "--id", parse=parse_id),
    ]
    key: Annotated[str | None, option("Only events of tasks with this key.")]
    topic: Annotated[str | None, option("Only events of this topic.")]
    group: Annotated[str | None, option("Only events of this group.")]
    schedule: Annotated[str | None, option("Only events of this schedule.")]
    transaction: Annotated[str | None, option("Only events of this transaction.")]
    events: Annotated[
        list[str] | None, option("Only this event: acked, …; can be repeated.", "EVENT", "--event")
    ]
    since: Annotated[datetime | None, past_time_option("From this time on.")]
    until: Annotated[datetime | None, past_time_option("Before this time.")]


@offline("The events as they are stored.")
def list_(
    call: Call,
    directory: DirOption = None,
    limit: Annotated[
        int | None,
        option(
            "Maximum number of events; 0: all, oldest first."
            f" Default: all with --json, {ROWS_SHOWN} as a table.",
            "N",
            min=0,
        ),
    ] = None,
    oldest_first: Annotated[bool, flag("Show the oldest events instead of the newest.")] = False,
    follow: Annotated[
        bool, flag("Continue with new events until Ctrl-C.", "--follow", "-f")
    ] = False,
    **options: Unpack[QueryOptions],
) -> int:
    """Show events of the history, newest first.

    Exit code 4 if a task, a key or a transaction was given and has no events.
    """
    from tickwheel.history import read
    from tickwheel.history.segments import Tally

    folder = folder_of(directory, "--dir")
    query_options: dict[str, Any] = {**options}
    query_options["ids"] = frozenset(options.get("ids") or ()) or None
    query_options["events"] = _event_names(options.get("events"))
    for name in ("since", "until"):
        query_options[f"{name}_ms"] = _ms(query_options.pop(name, None))
    query, tally = read.Query(**query_options), Tally()
    if follow:
        return _follow(call, folder, query, tally)
    events_max = None if limit == 0 else wanted(call.out, limit)
    events: Iterable[Event]
    if events_max is None or oldest_first:
        events = read.search(folder, query, tally)
    else:  # one more shows whether there are more
        count = min(events_max + 1, max(events_max, read.NEWEST_MAX))
        events = read.newest(folder, query, count, tally)
    if events_max is not None:
        events = cut(call.out, events_max, events)
    if call.out.as_json or (events_max is not None and events_max <= GRID_ROWS_MAX):
        shown = Listing(call.out, COLUMNS, dict, "").show(events)
    else:
        shown = 0
        for event in events:
            shown += 1
            call.out.line(event_line(event))
    remark_skipped(call, tally)
    is_specific = (query.ids, query.key, query.transaction) != (None, None, None)
    return EXIT_NOT_FOUND if is_specific and not shown else 0


@offline()
def tasks(
    call: Call,
    directory: DirOption = None,
    key: Annotated[str | None, option("Only tasks with this key.")] = None,
    topic: Annotated[str | None, option("Only tasks of this topic.")] = None,
    since: Annotated[datetime | None, past_time_option("Enqueued at this time or later.")] = None,
    until: Annotated[datetime | None, past_time_option("Enqueued before this time.")] = None,
    limit: LimitOption = None,
) -> int:
    """List tasks of the history, newest first, including finished ones and how each ended.

    Exit code 4 if there is none.
    """
    from tickwheel.history.read import Query, search_tasks
    from tickwheel.history.segments import Tally

    tally = Tally()
    columns = (
        column("id", right=True), column("state"), column("topic", show=_cut),
        column("key", show=_cut),
        column("enqueued", "enqueued_ms", format_time), column("ended", "ended_ms", format_time),
        column("attempts", right=True), Column("body", _task_body),
    )  # fmt: skip
    query = Query(key=key, topic=topic, since_ms=_ms(since), until_ms=_ms(until))
    rows = cut(call.out, limit, search_tasks(folder_of(directory, "--dir"), query, tally))
    count = Listing(call.out, columns, dict, "", ("attempts",)).show(rows)
    remark_skipped(call, tally)
    return 0 if count else EXIT_NOT_FOUND


def _cut(value: str | None) -> str:
    return printable(value or "-", BODY_SHOWN_MAX)


def _task_body(task: Mapping[str, Any]) -> str:
    body = printable(str(task.get("body", task.get("body_base64", ""))), BODY_SHOWN_MAX)
    if body and task.get("encoding") is not None:
        text = task.get("body")
        stored = base64.b64decode(task["body_base64"]) if text is None else text.encode()
        body = stored_text(task["topic"], stored, task["encoding"])
    return body


def _follow(call: Call, folder: Path, query: Query, tally: Tally) -> int:
    from tickwheel.history.read import Follow

    following = Follow(folder, query, query.since_ms, tally)
    while True:
        for event in following.read():
            call.out.result(event, event_line(event))
        if query.until_ms is not None and time.time() * 1000 >= query.until_ms:
            return 0
        time.sleep(FOLLOW_POLL_S)


# --- shared with other commands ------------------------------------------------------------------


def folder_of(name: str | None, option: str) -> Path:
    """Return the folder of the history, which must exist. Raise BadRequest."""
    name = name or environment.value(DIR_ENV)
    if not name:
        raise BadRequest(f"give the history's folder with {option} or {DIR_ENV}")
    folder = Path(name)
    if not folder.is_dir():
        raise BadRequest(f"the history's folder {name} does not exist")
    return folder


def remark_skipped(call: Call, tally: Tally) -> None:
    """Print the number of lines and segments that could not be read."""
    if tally.torn:
        call.out.remark(f"{tally.torn:,} torn lines were skipped")
    if tally.unreadable:
        call.out.remark(f"{tally.unreadable:,} segments could not be read to their end")


def _event_names(events: list[str] | None) -> frozenset[str] | None:
    from tickwheel.history.lines import EVENTS

    names = [name for text in events or () for name in text.replace("-", "_").split(",")]
    for name in names:
        if name not in EVENTS:
            raise BadRequest(f"--event must be one of {', '.join(EVENTS)}, not {name!r:.60}")
    return frozenset(names) if names else None


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


# --- events as readable text ---------------------------------------------------------------------

REASON_SHOWN_MAX = 80


def event_line(event: Event) -> str:
    """Return an event as one line, for events that are printed one by one."""
    at, word, task, topic, group, details = (column.cell(event) for column in COLUMNS)
    return f"{at}  {word:<12}  {task:>19}  {topic}  {group}  {details}".rstrip()


def flow_grid(task_id: int, events: Iterable[Event]) -> Grid:
    """Return one task's history: time, time since the previous event, event, details, node."""
    previous_ms: int | None = None

    def after(event: Event) -> str:
        nonlocal previous_ms
        earlier_ms, previous_ms = previous_ms, event["time_ms"]
        return "" if earlier_ms is None else format_duration((event["time_ms"] - earlier_ms) / 1000)

    columns = (
        TIME, Column("after", after, right=True), EVENT, column("group", show=_plain),
        column("attempt", show=_plain, right=True),
        Column[Event]("details", lambda event: _details(event, with_attempt=False)),
        column("node", show=_plain),
    )  # fmt: skip
    return grid_of(columns, events, title=f"History of task {task_id}")


def _details(event: Event, *, with_attempt: bool) -> str:
    """Describe an event, apart from its name."""
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
        parts.append(f"schedule {_text(event, 'schedule')}")
        for name in ("planned", "next"):
            if f"{name}_ms" in event:
                parts.append(f"{name} {format_time(event[f'{name}_ms'])}")
        if "count" in event:
            parts.append(f"{event['count']:,} occurrences")
    elif "transaction" in event:
        parts += [f"transaction {_text(event, 'transaction')}", f"{event['count']:,} tasks"]
    elif "count" in event:
        parts.append(f"{event['count']:,} events")
    if "clean" in event:
        parts.append("clean" if event["clean"] else "after an unclean stop")
    return ", ".join(parts)


def _word(event: Event) -> str:
    return _text(event, "event").replace("_", " ")


def _text(event: Event, name: str) -> str:
    return _plain(event.get(name))


def _plain(value: Any) -> str:
    return "" if value is None else printable(str(value))


TIME = Column[Event]("time", lambda event: format_time(event["time_ms"]))
EVENT = Column("event", _word)
COLUMNS = (
    TIME, EVENT, column("task", "task_id", _plain, right=True), column("topic", show=_plain),
    column("group", show=_plain),
    Column[Event]("details", lambda event: _details(event, with_attempt=True)),
)  # fmt: skip


# --- restore -------------------------------------------------------------------------------------

SHOWN_IDS_MAX = 10


OVERDUE = INCLUDE, SKIP = "include", "skip"


@offline("The report as JSON.")
def restore(
    call: Call,
    into: Annotated[
        str,
        option("The new, empty store: sqlite:///…, redis://… or postgresql://…", "URL", "--into"),
    ],
    backup: Annotated[
        str | None, option("The latest backup. Default: only the history.", "BACKUP.db", "--from")
    ] = None,
    history: Annotated[list[str] | None, option(f"{DIR_HELP} Can be repeated.", "DIR")] = None,
    ids: Annotated[
        list[int] | None, option("Only this task; can be repeated.", "ID", "--id", parse=parse_id)
    ] = None,
    overdue: Annotated[
        str, one_of(OVERDUE, "Tasks that are already due: deliver them at once, or leave them out.")
    ] = INCLUDE,
    allow_missing_bodies: Annotated[bool, flag("Leave out tasks that cannot be restored.")] = False,
    dry_run: Annotated[bool, flag("Print what would be restored; write nothing.")] = False,
    shard: Annotated[
        int | None, option("The shard, if the history has several.", min=0, max=1023)
    ] = None,
) -> int:
    """Rebuild a lost store from the latest backup and the history since.

    Ids are kept. The result is exact after a clean stop; after a crash, tasks may be delivered once
    more. Exit code 1 if tasks enqueued after the backup have no body in the history (history_bodies
    was off): nothing is written then, unless --allow-missing-bodies is given. Exit code 4 if a task
    given by --id does not exist.
    """
    from tickwheel.history.restore import Plan
    from tickwheel.history.restore import restore as run
    from tickwheel.persistence import without_secrets

    plan = Plan(
        into=into,
        backup=backup,
        history=tuple(history or filter(None, [environment.value(DIR_ENV)])),
        ids=frozenset(ids) if ids else None,
        include_overdue=overdue == INCLUDE,
        allow_missing_bodies=allow_missing_bodies,
        dry_run=dry_run,
        shard=shard,
    )
    limit_file_mode()
    watch = RestoreProgress()
    report = asyncio.run(run(plan, int(time.time() * 1000), watch))
    watch.end()
    name = without_secrets(into)
    title = f"Would be restored into {name}" if report.dry_run else f"Restored into {name}"
    if report.refused:
        title = f"Nothing was written to {name}"
    table = facts_grid(("count", "value"), _report_facts(report), title)
    call.out.result({"into": name, **report.fields()}, table)
    if not call.out.as_json:
        for text in _report_remarks(report):
            call.out.remark(text)
    if report.refused:
        return EXIT_FAILED
    return EXIT_NOT_FOUND if report.not_found.count else 0


class RestoreProgress:
    """The progress of a restore on stderr: one line that is rewritten on a terminal, else a line
    every few seconds."""

    WORDS: ClassVar = {
        "backup": "copying the backup", "events": "events applied", "tasks": "tasks counted",
        "writing": "tasks written",
    }  # fmt: skip
    EVERY_S = 0.2
    EVERY_S_LINES = 5.0

    def __init__(self) -> None:
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._every_s = self.EVERY_S if self._is_terminal else self.EVERY_S_LINES
        self._shown_s = self._began_s = time.monotonic()
        self._step = ""
        self._is_open = False

    def __call__(self, step: str, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if step != self._step:
            self._step, self._began_s = step, now_s
        if now_s - self._shown_s >= self._every_s:
            self._shown_s = now_s
            self._show(restore_line(self.WORDS[step], done, total, now_s - self._began_s))

    def _show(self, text: str) -> None:
        self._is_open = self._is_terminal
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(
                f"\r\x1b[Ktickwheel: {text}" if self._is_open else f"tickwheel: {text}\n"
            )
            sys.stderr.flush()

    def end(self) -> None:
        """Clear the line on a terminal."""
        if self._is_open:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write("\r\x1b[K")


def restore_line(label: str, done: int, total: int | None, spent_s: float) -> str:
    """Format ``120,000 of 1,000,000 events applied (12 %), 30,000/s, 29 s left``."""
    if not done:
        return label
    rate = done / spent_s if spent_s > 0 else 0.0
    text = f"{done:,} {label}"
    if total and total >= done:
        text = f"{done:,} of {total:,} {label} ({done * 100 // total} %)"
    if rate:
        text += f", {rate:,.0f}/s"
        if total and total > done:
            text += f", {format_duration((total - done) / rate)} left"
    return text


def _report_facts(report: Report) -> dict[str, str | int]:
    shown: dict[str, str | int] = {
        "tasks": report.restored,
        "from the backup": report.from_backup,
        "from the history": report.from_history,
        "overdue, delivered at once": report.overdue,
        "waiting for a retry": report.waiting,
        "dead letters": report.dead_letters,
        "groups": report.groups,
        "schedules": report.schedules,
        "ended since the backup": report.ended_since,
        "overdue, left out": report.skipped_overdue.count,
        "without a body, left out": report.without_body.count,
        "backup taken at": format_time(report.backup_ms),
    }
    if report.history:
        shown["events applied"] = report.events
        shown["newest event"] = format_time(report.last_event_ms)
        reasons = {
            "bodies are missing": report.without_body.count or report.schedules_without_body,
            "transactions are missing": report.transactions_lost,
            "targets are missing": report.targets_lost,
            "tasks may be delivered again": report.gaps or not report.clean_stop,
        }
        found = ", ".join(reason for reason, applies in reasons.items() if applies)
        shown["exact"] = f"no: {found}" if found else "yes"
    return shown | {"epoch": str(report.epoch)}


def _report_remarks(report: Report) -> list[str]:
    remarks = [f"the history has gaps: {gap}" for gap in report.gaps]
    if report.history and not report.clean_stop:
        tail = "" if report.tail_ms is None else (
            f"; the daemon ran for at least another {format_duration(report.tail_ms / 1000)}"
        )  # fmt: skip
        remarks.append(
            f"the daemon did not stop cleanly: everything after the newest event is lost{tail}"
        )
    if not report.history:
        remarks.append("without a history the store is in the state of the backup")
    if report.without_body.count:
        remarks.append(
            f"{_task_list(report.without_body)} cannot be restored: they were enqueued after the"
            " backup, and the history has no bodies"
            + ("" if not report.refused else "; --allow-missing-bodies restores the others")
        )
    for noun, names, why in (
        ("schedules", report.schedules_without_body,
         "cannot be restored: they were created or changed after the backup, and the history has no"
         " bodies"),
        ("transactions", report.transactions_lost,
         "are lost: they were undecided, and their tasks were prepared after the backup"),
        ("targets", report.targets_lost,
         "are missing: they got new secrets after the backup; set them again"),
    ):  # fmt: skip
        if names:
            remarks.append(f"{len(names):,} {noun} ({_first(names, len(names))}) {why}")
    if report.not_found.count:
        remarks.append(f"not_found: {_task_list(report.not_found)} do not exist, or have ended")
    return remarks


def _task_list(listed: Listed) -> str:
    return f"{listed.count:,} tasks ({_first(listed.ids, listed.count)})"


def _first(names: Sequence[str], count: int) -> str:
    more = ", …" if count > SHOWN_IDS_MAX else ""
    return ", ".join(names[:SHOWN_IDS_MAX]) + more


# --- generate ------------------------------------------------------------------------------------


def parse_day(text: str) -> datetime:
    """Return midnight UTC of a date. Raise ValueError."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise ValueError(f"{text!r} is not a valid date; write for example 2026-01-31") from None


@offline()
def generate(
    call: Call,
    out: Annotated[Path, option("A new or empty folder.", "DIR", file_okay=False)],
    tasks: Annotated[int, option("Number of tasks; each has about 3.6 events.", min=1)] = 100_000,
    days: Annotated[int, option("Number of days to spread the tasks over.", min=1, max=3660)] = 3,
    seed: Annotated[int, option("Seed; the same seed makes the same history.")] = 1,
    start: Annotated[
        datetime | None,
        option(
            "The first day, UTC. By default the last day is yesterday.", "DATE", parse=parse_day
        ),
    ] = None,
) -> int:
    """Write synthetic history: topics, rhythms, bursts, failures, slow consumers, dead letters.

    Every event, and every report of the events, is marked as synthetic.
    """
    from tickwheel.demo.synthetic_history import Plan
    from tickwheel.demo.synthetic_history import generate as make

    if out.exists() and any(out.iterdir()):
        call.out.remark(
            f"failed: {out} must be empty: synthetic history is never mixed with other files"
        )
        return EXIT_FAILED
    if start is None:
        start = parse_day(f"{datetime.now(UTC) - timedelta(days=days):%Y-%m-%d}")
    plan = Plan(tasks=tasks, days=days, seed=seed, start_ms=round(start.timestamp() * 1000))
    began_s = time.monotonic()
    written = make(plan, out, _show_progress if sys.stderr.isatty() else None)
    took_s = time.monotonic() - began_s
    fields = {
        "out": str(out), "synthetic": True, "seed": seed, "events": written.lines,
        "by_event": dict(sorted(written.events.items())), "segments": written.segments,
        "bytes": written.bytes, "seconds": round(took_s, 3),
    }  # fmt: skip
    call.out.result(
        fields,
        f"{written.lines:,} synthetic events of {tasks:,} tasks in {written.segments:,} segments "
        f"({written.bytes / 1e6:,.1f} MB), {format_duration(took_s)}: {out}",
    )
    return 0


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    sys.stderr.write(f"\rtickwheel: hour {done} of {total}{end}")
    sys.stderr.flush()


# --- report --------------------------------------------------------------------------------------


class ReportOptions(TypedDict, total=False):
    """The options of a report: its data, and how Spark computes it."""

    since: Annotated[str | None, option("From this time on; it must be on a quarter-hour.", "TIME")]
    until: Annotated[str | None, option("Before this time.", "TIME")]
    topic: Annotated[
        list[str] | None, option("Only these topics; * matches anything. Can be repeated.")
    ]
    timezone: Annotated[
        str, option("Time zone of hours and days: Europe/Berlin, …", "ZONE"), Default("UTC")
    ]
    slo: Annotated[
        list[str] | None, option("For example 'orders.*=50ms@99.9%'.", "TOPIC=TARGET@SHARE")
    ]
    stuck_after: Annotated[
        float, duration("Tasks overdue by more than this are stuck."), Default("1h")
    ]
    sealed_only: Annotated[bool, flag("Leave out segments that are still being written.")]
    top: Annotated[int, option("Slowest deliveries to list.", min=1, max=1000), Default(20)]
    batch_mb: Annotated[
        int, option("Size of the files loaded at a time.", "MB", min=1), Default(256)
    ]
    memory: Annotated[str, option("Size of Spark's heap.", "SIZE"), Default("2g")]
    master: Annotated[
        str, option("Spark's master; for clusters see docs/reports.md.", "URL"), Default("local[*]")
    ]
    class_cache: Annotated[
        str | None,
        option(
            "Cache of Java's classes (200 MB) for a quicker start; 'off': no cache.",
            "DIR",
            envvar="TICKWHEEL_CLASS_CACHE",
            show_default="~/.cache/tickwheel/java",
        ),
    ]


@offline()
def report(
    call: Call,
    history: Annotated[
        list[str],
        option(
            "A daemon's history_dir, or a URL that Spark supports; repeat it for each node.", "DIR"
        ),
    ],
    out: Annotated[str, option("Folder for the table, figures and page.", "DIR")],
    **options: Unpack[ReportOptions],
) -> int:
    """Make a report of the delivery history: an HTML page, CSV and Parquet.

    Loads only events that are new since the last report in the same folder. If there are none and
    the options are the same, the last report is kept.
    """
    from tickwheel.reports import ReportError, ReportSettings
    from tickwheel.reports.session import missing_part
    from tickwheel.reports.state import unchanged_summary

    missing = missing_part()
    if missing is not None:
        call.out.remark(f"missing: {missing}")
        return EXIT_FAILED
    limit_file_mode()
    began_s = time.monotonic()
    all_options: dict[str, Any] = {**dict.fromkeys(ReportOptions.__optional_keys__), **options}
    all_options |= {"history": history, "out": out}
    try:
        settings = ReportSettings.of(all_options, round(options["stuck_after"] * 1000))
        summary = unchanged_summary(settings) or _make(call.out, settings, options)
    except ReportError as error:
        call.out.remark(f"report_failed: {' '.join(str(error).split())}")
        return EXIT_FAILED
    show_report(call.out, summary, settings, time.monotonic() - began_s)
    return 0


def _make(output: Output, settings: ReportSettings, options: ReportOptions) -> Summary:
    """Make a report in a new Spark session."""
    from tickwheel.reports.job import run
    from tickwheel.reports.session import little_to_do, started

    with _report_progress(quiet=output.as_json) as progress:
        progress("starting", 0, 1)
        is_small = little_to_do(settings)
        session = started(
            options["master"], memory=options["memory"], quiet=True, little=is_small,
            class_cache=options.get("class_cache"),
        )  # fmt: skip
        with session as spark:
            progress("starting", 1, 1)
            return run(spark, settings, progress).summary()


_STAGES = {
    "starting": "starting Spark", "loading": "loading history", "figures": "computing figures",
}  # fmt: skip


@contextlib.contextmanager
def _report_progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress on stderr: bars on a terminal, else a line for each stage."""
    if quiet:
        yield lambda stage, done, total: None
        return
    if not sys.stderr.isatty():
        shown: set[str] = set()

        def line(stage: str, done: int, total: int) -> None:
            if stage not in shown:
                shown.add(stage)
                remark(_STAGES[stage] + (f" ({total / 1e6:.1f} MB)" if stage == "loading" else ""))

        yield line
        return
    text, percent = "{task.description}", "{task.percentage:>3.0f} %"
    columns = ("SpinnerColumn", text, "BarColumn", percent, "TimeElapsedColumn")
    with progress_bars(*columns) as progress:
        bars: dict[str, Any] = {}

        def bar(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(_STAGES[stage], total=max(total, 1))
            # Without work the stage is complete.
            progress.update(bars[stage], completed=done if total else 1)

        yield bar


def show_report(output: Output, summary: Summary, settings: ReportSettings, took_s: float) -> None:
    names = (
        "page", "new_events", "events", "duplicates", "left_out", "stuck", "stuck_listed", "all",
        "topics",
    )  # fmt: skip
    fields = {name: getattr(summary, name) for name in names} | {
        "quarantined": sum(row["lines"] for row in summary.quarantine),
        "synthetic": bool(summary.synthetic),
        "slo_missed": sum(row["met"] is False for row in summary.slo),
        "load_s": round(summary.load_s, 3),
        "figures_s": round(summary.figures_s, 3),
    }
    if output.as_json:
        output.record(fields)
        return
    from tickwheel.reports.page import with_topic_counts
    from tickwheel.reports.state import left_out_remark

    output.grid(report_grid(with_topic_counts(summary.topics), summary.slo))
    new, total = summary.new_events, summary.events
    output.line("")
    output.line(f"{new:,} new events, {total:,} in all, {format_duration(took_s)}: {summary.page}")
    if summary.synthetic:
        output.remark(
            f"synthetic data: {summary.synthetic:,} of {total:,} events were not measured"
        )
    for folder in summary.left_out:
        output.remark(left_out_remark(folder))
    for row in summary.quarantine:
        output.remark(f"quarantine: {row['lines']:,} lines {row['reason']}")
    if summary.stuck:
        cut = summary.stuck_listed < summary.stuck
        which = f"the {summary.stuck_listed:,} longest overdue are in" if cut else "see"
        output.remark(f"stuck: {summary.stuck:,} tasks, {which} {settings.out}/csv/stuck.csv")


def report_grid(topics: list[dict[str, Any]], slos: list[dict[str, Any]]) -> Grid:
    """Return the summary as a table with a row for each topic and group."""
    met = {(row["topic"], row["group"]): row["met"] for row in slos}
    words = {None: "-", True: "met", False: "MISSED"}
    columns = (
        *text_columns("topic", "group"), *count_columns("enqueued", "delivered", "acked"),
        column("retried", "nacked", format_count), *count_columns("dead"),
        column("on time", "on_time_share", _share, right=True),
        *(column(n, f"late_{n}_ms", _milliseconds, right=True) for n in ("p50", "p99", "max")),
        column("first try", "first_try_share", _share, right=True),
        Column[Map]("slo", lambda row: words[met.get((row["topic"], row["group"]))]),
    )  # fmt: skip
    return grid_of(columns, topics, spare=("retried", "first try", "max", "acked", "p50"))


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else format_duration(value / 1000)
