"""``tickwheel report``: history → Parquet, CSV and one HTML page, with Spark on this machine.

The work is tickwheel.reports'; here are its options, its progress and the summary. Spark is
imported when the command runs, so that no other command waits for it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tickwheel.cli.call import EXIT_FAILED, JSON_HELP, shared_of
from tickwheel.cli.output import Grid, Output, remark
from tickwheel.cli.values import format_duration, printable
from tickwheel.model.written import parse_duration

if TYPE_CHECKING:
    from tickwheel.reports.settings import ReportSettings
    from tickwheel.reports.state import Summary

STUCK_AFTER = "1h"
_HEAP = "2g"


def report(
    ctx: typer.Context,
    history: Annotated[
        str,
        typer.Option(metavar="DIR", help="The daemon's history_dir, or a URL that Spark knows."),
    ],
    out: Annotated[
        str, typer.Option(metavar="DIR", help="Where table, figures and page are kept.")
    ],
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="From this time on, by the quarter of an hour."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before this time.")] = None,
    topic: Annotated[
        list[str] | None, typer.Option(help="Only these topics; * stands for anything. Repeat it.")
    ] = None,
    timezone: Annotated[
        str, typer.Option(metavar="ZONE", help="Whose hours and days: Europe/Berlin, …")
    ] = "UTC",
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC=TARGET@SHARE", help="For example 'orders.*=50ms@99.9%'."),
    ] = None,
    stuck_after: Annotated[
        str, typer.Option(metavar="DURATION", help="Overdue for so long is stuck.")
    ] = STUCK_AFTER,
    sealed_only: Annotated[
        bool, typer.Option("--sealed-only", help="Leave out segments that are still written.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, max=1000, help="So many of the slowest.")] = 20,
    batch_mb: Annotated[
        int, typer.Option(min=1, metavar="MB", help="History loaded at a time, as it lies there.")
    ] = 256,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Spark's heap.")] = _HEAP,
    master: Annotated[
        str, typer.Option(metavar="URL", help="Spark's master; for clusters see docs/reports.md.")
    ] = "local[*]",
    class_cache: Annotated[
        str | None,
        typer.Option(
            envvar="TICKWHEEL_CLASS_CACHE",
            metavar="DIR",
            help="Keeps Java's classes (200 MB) for a quicker start; 'off': does not.",
            show_default="~/.cache/tickwheel/java",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> int:
    """Make a report of the delivery history: an HTML page, CSV and Parquet.

    Only what is new since the last report into the same folder is loaded; when nothing is, and the
    options are the same, the last report still holds and is not made again.
    """
    options = dict(locals())
    return _report(Output(as_json=as_json or shared_of(ctx).as_json), options)


def _report(output: Output, options: dict[str, Any]) -> int:
    """Make a report, or show the last one if it still holds; ``options`` by name."""
    from tickwheel.reports.session import missing_part
    from tickwheel.reports.settings import ReportError
    from tickwheel.reports.state import still_holds

    missing = missing_part()
    if missing is not None:
        remark(f"missing: {missing}")
        return EXIT_FAILED
    began_s = time.monotonic()
    try:
        settings = _settings(options)
        found = still_holds(settings) or _made(output, settings, options)
    except ReportError as error:
        remark(f"report_failed: {' '.join(str(error).split())}")
        return EXIT_FAILED
    _show(output, found, settings, time.monotonic() - began_s)
    return 0


def _settings(options: dict[str, Any]) -> ReportSettings:
    from tickwheel.reports.settings import ReportSettings

    return ReportSettings.of(options, round(_seconds(options["stuck_after"]) * 1000))


def _made(output: Output, settings: ReportSettings, options: dict[str, Any]) -> Summary:
    """Make a report, with a Spark of its own."""
    from tickwheel.reports.job import run
    from tickwheel.reports.session import little_to_do, started

    with _progress(quiet=output.as_json) as progress:
        progress("starting", 0, 1)
        little = little_to_do(settings)
        session = started(
            options["master"], memory=options["memory"], quiet=True, little=little,
            class_cache=options["class_cache"],
        )  # fmt: skip
        with session as spark:
            progress("starting", 1, 1)
            return run(spark, settings, progress).summary()


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--stuck-after") from None


_STAGES = {
    "starting": "starting Spark", "loading": "loading history", "figures": "computing figures",
}  # fmt: skip


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Progress on stderr: bars on a terminal, else a line for each stage."""
    if quiet:
        yield lambda stage, done, of: None
        return
    if not sys.stderr.isatty():
        shown: set[str] = set()

        def line(stage: str, done: int, of: int) -> None:
            if stage not in shown:
                shown.add(stage)
                remark(_STAGES[stage] + (f" ({of / 1e6:.1f} MB)" if stage == "loading" else ""))

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars: dict[str, Any] = {}

        def bar(stage: str, done: int, of: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(_STAGES[stage], total=max(of, 1))
            # Nothing to do is done.
            progress.update(bars[stage], completed=done if of else 1)

        yield bar


def _show(output: Output, found: Summary, settings: ReportSettings, took_s: float) -> None:
    if output.as_json:
        output.record(
            {
                "page": found.page,
                "new_events": found.new_events,
                "events": found.events,
                "duplicates": found.duplicates,
                "quarantined": sum(row["lines"] for row in found.quarantine),
                "synthetic": bool(found.synthetic),
                "stuck": found.stuck,
                "slo_missed": sum(row["met"] is False for row in found.slo),
                "load_s": round(found.load_s, 3),
                "figures_s": round(found.figures_s, 3),
                "all": found.all,
                "topics": found.topics,
            }
        )
        return
    from tickwheel.reports.page import whole

    output.grid(grid(whole(found.topics), found.slo))
    new, every = found.new_events, found.events
    output.line("")
    output.line(f"{new:,} new events, {every:,} in all, {format_duration(took_s)}: {found.page}")
    if found.synthetic:
        output.remark("synthetic data: no figure here was measured")
    for row in found.quarantine:
        output.remark(f"quarantine: {row['lines']:,} lines {row['reason']}")
    if found.stuck:
        output.remark(f"stuck: {found.stuck:,} tasks, see {settings.out}/csv/stuck.csv")


def grid(topics: list[dict[str, Any]], slos: list[dict[str, Any]]) -> Grid:
    """The summary as a table: a row for each topic and group."""
    met = {(row["topic"], row["group"]): row["met"] for row in slos}
    numbers = (
        "enqueued", "delivered", "acked", "retried", "dead", "on time", "p50", "p99", "max",
        "first try",
    )  # fmt: skip
    spare = ("retried", "first try", "max", "acked", "p50")
    table = Grid(("topic", "group", *numbers, "slo"), right=frozenset(numbers), spare=spare)
    for row in topics:
        kept = {None: "-", True: "met", False: "MISSED"}[met.get((row["topic"], row["group"]))]
        table.rows.append(
            (
                printable(row["topic"]),
                printable(row["group"]),
                *(f"{row[n]:,}" for n in ("enqueued", "delivered", "acked", "nacked", "dead")),
                _share(row["on_time_share"]),
                *(_ms(row[f"late_{n}_ms"]) for n in ("p50", "p99", "max")),
                _share(row["first_try_share"]),
                kept,
            )
        )
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def _ms(value: float | None) -> str:
    return "-" if value is None else format_duration(value / 1000)
