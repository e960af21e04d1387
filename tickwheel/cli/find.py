"""``show --key``: the newest task with a key, from the daemon, else from the history.

The daemon knows tasks that are not finished; a finished one is found in the files, if they are
there. Without a daemon the files are asked alone.
"""

from __future__ import annotations

import os
from datetime import datetime

from tickwheel.cli import views
from tickwheel.cli.call import EXIT_NOT_FOUND, Call
from tickwheel.cli.flow import show_flow
from tickwheel.cli.history import DIR_ENV, folder_of, tell_skipped
from tickwheel.client import TaskInfo
from tickwheel.errors import ConnectionLost, Unreachable


async def show_key(
    call: Call,
    key: str,
    topic: str | None,
    before: datetime | None,
    *,
    flow: bool,
    history: str | None,
) -> int:
    """Exit code 4 when nobody knows one."""
    has_files = bool(history or os.environ.get(DIR_ENV))
    if flow:
        folder_of(history, "--history")
    info: TaskInfo | None = None
    try:
        async with call.client() as client:
            info = await client.find(key, topic=topic, not_after=before)
    except (Unreachable, ConnectionLost) as error:
        if not has_files:
            raise
        call.out.remark(f"{error.code}: {error.message}; from the history alone")
    if info is not None:
        if flow:
            return await show_flow(call, [info.id], history)
        views.show_task(call.out, info)
        return 0
    found = _in_history(call, key, topic, before, history) if has_files else None
    if found is not None:
        return await show_flow(call, [found], history)
    where = "" if topic is None else f" in topic {topic}"
    also = ", nor in the history" if has_files else ""
    call.out.remark(f"not_found: no task with key {key!r:.80}{where} is stored{also}")
    return EXIT_NOT_FOUND


def _in_history(
    call: Call, key: str, topic: str | None, before: datetime | None, history: str | None
) -> int | None:
    from tickwheel.history.read import Query, newest_id
    from tickwheel.history.segments import Tally

    tally = Tally()
    until_ms = None if before is None else round(before.timestamp() * 1000) + 1
    query = Query(key=key, topic=topic, until_ms=until_ms)
    found = newest_id(folder_of(history, "--history"), query, tally)
    tell_skipped(call, tally)
    return found
