"""``history``: what happened to tasks, from the files that the daemon writes.

No daemon is needed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tickwheel.cli import history_view as view
from tickwheel.cli.call import EXIT_NOT_FOUND, Call, merge
from tickwheel.cli.options import moment, typed
from tickwheel.cli.values import parse_id
from tickwheel.errors import BadRequest

if TYPE_CHECKING:
    from tickwheel.history.read import Query
    from tickwheel.history.segments import Tally

LIMIT_DEFAULT = 100
GRID_ROWS_MAX = 10_000
"""More are shown line by line, as they are found."""
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
        int, typer.Option(min=0, help="At most so many; 0: all, oldest first.")
    ] = LIMIT_DEFAULT,
    oldest_first: Annotated[
        bool, typer.Option("--oldest-first", help="The oldest of them, instead of the newest.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what happens; Ctrl-C ends.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The events as they are stored.")] = False,
) -> int:
    """Events of the history, newest first.

    Exit code 4 when a task or a key was asked for and nothing is there.
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
        events=_known(events),
        since_ms=_ms(since),
        until_ms=_ms(until),
    )
    tally = Tally()
    if follow:
        return _follow(call, folder, query, tally)
    found = _show(call, _find(folder, query, limit, tally, oldest_first=oldest_first), limit)
    tell_skipped(call, tally)
    asked = query.ids is not None or query.key is not None
    return EXIT_NOT_FOUND if asked and not found else 0


def _find(
    folder: Path, query: Query, limit: int, tally: Tally, *, oldest_first: bool
) -> Iterable[view.Event]:
    from itertools import islice

    from tickwheel.history import read

    if not limit:
        return read.search(folder, query, tally)
    if oldest_first:
        return islice(read.search(folder, query, tally), limit)
    return read.newest(folder, query, limit, tally)


def _show(call: Call, events: Iterable[view.Event], limit: int) -> int:
    """How many there were."""
    if not call.out.as_json and 0 < limit <= GRID_ROWS_MAX:
        grid = view.events_grid(events)
        if grid.rows:
            call.out.grid(grid)
        return len(grid.rows)
    count = 0
    for event in events:
        count += 1
        _one(call, event)
    return count


def _one(call: Call, event: view.Event) -> None:
    if call.out.as_json:
        call.out.record(event)
    else:
        call.out.line(view.line(event))


def _follow(call: Call, folder: Path, query: Query, tally: Tally) -> int:
    from tickwheel.history.read import Follow

    now_ms = int(time.time() * 1000)
    following = Follow(
        folder, query, query.since_ms if query.since_ms is not None else now_ms, tally
    )
    while True:
        for event in following.read():
            _one(call, event)
        if query.until_ms is not None and time.time() * 1000 >= query.until_ms:
            return 0
        time.sleep(FOLLOW_POLL_S)


# --- shared with other commands ----------------------------------------------------------------


def folder_of(given: str | None, option: str) -> Path:
    """The history's folder, which must be there. Raises BadRequest."""
    name = given or os.environ.get(DIR_ENV)
    if not name:
        raise BadRequest(f"name the history's folder with {option} or {DIR_ENV}")
    folder = Path(name)
    if not folder.is_dir():
        raise BadRequest(f"history {name}: no such folder")
    return folder


def tell_skipped(call: Call, tally: Tally) -> None:
    """What reading came upon that is no event."""
    if tally.torn:
        call.out.remark(f"{tally.torn:,} torn lines were skipped")
    if tally.unreadable:
        call.out.remark(f"{tally.unreadable:,} segments could not be read to their end")


def _known(events: list[str] | None) -> frozenset[str] | None:
    from tickwheel.history.records import EVENTS

    names = [name for text in events or () for name in text.replace("-", "_").split(",")]
    for name in names:
        if name not in EVENTS:
            raise BadRequest(f"--event is {name!r:.60}; known are {', '.join(EVENTS)}")
    return frozenset(names) if names else None


def _ms(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)
