"""``tickwheel history generate``: made-up history, for trying reports and for benchmarks."""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from tickwheel.cli.call import EXIT_FAILED, JSON_HELP, shared_of
from tickwheel.cli.output import Output, remark
from tickwheel.cli.values import format_duration


def register(history: typer.Typer) -> None:
    history.command()(generate)


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
