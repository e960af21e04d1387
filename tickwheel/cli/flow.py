"""``show --flow``: a task's whole story from the history, beside where it stands now.

A daemon is asked if there is one; a task that has long ended is shown from the files alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tickwheel.cli import history_view, views
from tickwheel.cli.call import EXIT_NOT_FOUND, Call
from tickwheel.cli.history import folder_of, tell_skipped
from tickwheel.client import TaskInfo
from tickwheel.errors import ConnectionLost, Unreachable

NOT_THERE = frozenset(("unknown", "gone"))


async def show_flow(call: Call, ids: Sequence[int], history: str | None) -> int:
    """Exit code 4 when nobody knows one of them."""
    folder = folder_of(history, "--history")
    known = await _ask(call, ids)
    missing = 0
    for task_id in ids:
        missing += not _show(call, task_id, known.get(task_id), folder)
    return EXIT_NOT_FOUND if missing else 0


async def _ask(call: Call, ids: Sequence[int]) -> dict[int, TaskInfo]:
    """Where they stand now, as far as a daemon says."""
    try:
        async with call.client() as client:
            return {task_id: await client.lookup(task_id) for task_id in ids}
    except (Unreachable, ConnectionLost) as error:
        call.out.remark(f"{error.code}: {error.message}; from the history alone")
        return {}


def _show(call: Call, task_id: int, info: TaskInfo | None, folder: Path) -> bool:
    """Whether there is anything to show."""
    from tickwheel.history.read import flow
    from tickwheel.history.segments import Tally
    from tickwheel.wheel.records import id_time_ms

    tally = Tally()
    events = flow(folder, task_id, id_time_ms(task_id), tally)
    is_known = info is not None and info.state not in NOT_THERE
    if call.out.as_json:
        fields = views.task_fields(info) if info is not None else {"id": str(task_id)}
        call.out.record({**fields, "flow": events})
    else:
        if info is not None and is_known:
            call.out.grid(views.task_grid(info))
        if events:
            call.out.grid(history_view.flow_grid(task_id, events))
        elif is_known:
            call.out.remark(f"the history in {folder} says nothing of task {task_id}")
        else:
            call.out.remark(f"not_found: nothing is known of task {task_id}")
    tell_skipped(call, tally)
    return bool(events) or is_known
