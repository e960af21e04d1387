"""``restore``: a lost store again, from the latest backup and the history since. No daemon runs.

Knows the stores, as ``init`` does, and imports them when it runs.
"""

from __future__ import annotations

import asyncio
import os
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call, merge
from tickwheel.cli.history import DIR_ENV, DIR_HELP
from tickwheel.cli.options import typed
from tickwheel.cli.output import Grid
from tickwheel.cli.values import format_duration, format_time, parse_id

if TYPE_CHECKING:
    from tickwheel.history.restore import Report
    from tickwheel.history.restore.report import Listed

SHOWN_IDS_MAX = 10


class Overdue(StrEnum):
    """What becomes of tasks that were due already."""

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
    _tell(call, into, report)
    if report.refused:
        return EXIT_FAILED
    return EXIT_NOT_FOUND if report.not_found.count else 0


def _tell(call: Call, into: str, report: Report) -> None:
    from tickwheel.persistence.urls import without_secrets

    if call.out.as_json:
        call.out.record({"into": without_secrets(into), **report.fields()})
        return
    grid = Grid(("what", "value"), title=_title(without_secrets(into), report))
    grid.rows.extend(_rows(report))
    call.out.grid(grid)
    for text in _remarks(report):
        call.out.remark(text)


def _title(into: str, report: Report) -> str:
    if report.refused:
        return f"Nothing was written to {into}"
    return f"What would be restored into {into}" if report.dry_run else f"Restored into {into}"


def _rows(report: Report) -> list[tuple[str, str]]:
    shown = {
        "tasks": report.restored,
        "of the backup": report.from_backup,
        "of the history": report.from_history,
        "overdue, they go out at once": report.overdue,
        "waiting for a retry": report.waiting,
        "dead letters": report.dead_letters,
        "groups": report.groups,
        "ended since the backup": report.ended_since,
        "overdue, left out": report.skipped_overdue.count,
        "without a body, left out": report.without_body.count,
    }
    rows = [(name, f"{count:,}") for name, count in shown.items()]
    rows.append(("backup of", format_time(report.backup_ms)))
    if report.history:
        rows.append(("events applied", f"{report.events:,}"))
        rows.append(("newest event", format_time(report.last_event_ms)))
        why_not = "tasks without a body" if report.without_body.count else "at least once"
        rows.append(("exact", "yes" if report.exact else f"no: {why_not}"))
    rows.append(("epoch", str(report.epoch)))
    return rows


def _remarks(report: Report) -> list[str]:
    found = [f"the history has gaps: {gap}" for gap in report.gaps]
    if report.history and not report.clean_stop:
        told = "" if report.tail_ms is None else (
            f"; the spool was written to for {format_duration(report.tail_ms / 1000)} after it"
        )  # fmt: skip
        found.append(
            f"the daemon did not stop cleanly: what came after the newest event is lost{told}"
        )
    if not report.history:
        found.append("without a history the store is as it was when the backup was made")
    if report.without_body.count:
        found.append(
            f"{_listed(report.without_body)} cannot be restored: enqueued after the backup, and"
            " the history has no bodies"
            + ("" if not report.refused else "; --allow-missing-bodies restores the others")
        )
    if report.not_found.count:
        found.append(f"not_found: {_listed(report.not_found)} not there, or ended")
    return found


def _listed(listed: Listed) -> str:
    shown = ", ".join(listed.ids[:SHOWN_IDS_MAX])
    more = ", …" if listed.count > SHOWN_IDS_MAX else ""
    return f"{listed.count:,} tasks ({shown}{more})"
