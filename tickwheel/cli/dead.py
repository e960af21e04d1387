"""``tickwheel dead``: tasks whose retries are used up, or that a consumer rejected."""

from __future__ import annotations

from typing import Annotated

import typer

from tickwheel.cli import views
from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call, ask, can_ask
from tickwheel.cli.dead_select import (
    Pair,
    Selection,
    Settle,
    Tally,
    count_dead,
    settle_selection,
    tell,
)
from tickwheel.cli.options import (
    GroupOption,
    Ids,
    ReasonOption,
    SinceOption,
    TopicOption,
    UntilOption,
)
from tickwheel.cli.tasks import LIST_DEFAULT, verdict
from tickwheel.cli.values import parse_id
from tickwheel.client import Client
from tickwheel.errors import BadRequest

GONE = "unknown"
"""Somebody else settled it in the meantime."""

All = Annotated[bool, typer.Option("--all", help="All that the filters select, or all there are.")]
MaybeIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID...", help="The tasks' ids; or filters, or --all.")
]


async def list_(
    call: Call,
    topic: TopicOption = None,
    group: GroupOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    reason: ReasonOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = LIST_DEFAULT,
) -> None:
    """Dead letters with the reason of their last failure."""
    grid = views.dead_grid()
    query = Selection(topic, group, since, until, reason).query()
    async with call.client() as client:
        async for letter in client.dead_list(**query, limit=limit):
            if call.out.as_json:
                call.out.record(views.dead_fields(letter))
            else:
                grid.rows.append(views.dead_row(letter))
    if not call.out.as_json:
        call.out.grid(grid)


async def show(call: Call, ids: Ids) -> int:
    """Dead letters with their bodies and every failure: attempt, time, reason."""
    missing = False
    async with call.client() as client:
        for task_id in ids:
            info = await client.lookup(task_id)
            if not views.dead_groups(info):
                call.out.remark(f"not_found: task {task_id} is no dead letter ({info.state})")
                missing = True
            elif call.out.as_json:
                call.out.record(views.task_fields(info))
            else:
                call.out.grid(views.task_grid(info))
                call.out.grid(views.attempts_grid(info))
    return EXIT_NOT_FOUND if missing else 0


async def requeue(
    call: Call,
    ids: MaybeIds = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    reason: ReasonOption = None,
    all_: All = False,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="So many a second; without, as fast as can.")
    ] = None,
) -> int:
    """Let dead letters be delivered again, with their attempts counted anew."""
    if rate is not None and not 0 < rate < float("inf"):
        raise BadRequest(f"--rate is {rate:g}; a number above 0 is needed")
    selection = Selection(topic, group, since, until, reason)
    wanted = _check(ids, selection, all_)
    async with call.client() as client:
        settle = client.dead_requeue
        if wanted:
            return await _by_id(call, client, settle, "requeued", wanted, group)
        return await _selected(call, client, settle, "requeued", selection, rate)


async def delete(
    call: Call,
    ids: MaybeIds = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    reason: ReasonOption = None,
    all_: All = False,
) -> int:
    """Delete dead letters for good."""
    selection = Selection(topic, group, since, until, reason)
    wanted = _check(ids, selection, all_)
    async with call.client() as client:
        settle = client.dead_delete
        if wanted:
            return await _by_id(call, client, settle, "deleted", wanted, group)
        return await _selected(call, client, settle, "deleted", selection, None)


async def purge(
    call: Call,
    topic: TopicOption = None,
    group: GroupOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> int:
    """Delete all dead letters of a topic, a group, or the daemon. Asks first."""
    selection = Selection(topic, group)
    if not yes:
        async with call.client() as client:
            count = await count_dead(client, selection)
        of = "".join(f" of {n} {v}" for n, v in (("topic", topic), ("group", group)) if v)
        what = f"{count:,} dead letters{of}"
        if not can_ask(call):
            call.out.remark(f"conflict: {what} would be deleted for good; say --yes")
            return EXIT_FAILED
        if not ask(f"Delete {what} for good?"):
            call.out.remark("nothing was deleted")
            return EXIT_FAILED
    async with call.client() as client:
        return await _selected(call, client, client.dead_delete, "deleted", selection, None)


# --- settling --------------------------------------------------------------------------------


def _check(ids: list[str] | None, selection: Selection, all_: bool) -> list[int]:
    """The ids, none for a selection. That everything is meant has to be said: a filter that was
    forgotten settles nothing."""
    if not ids and not all_ and not selection.given:
        raise BadRequest("give ids, or --topic, --group, --since, --until, --reason, or --all")
    if ids and all_:
        raise BadRequest("give ids or --all, not both")
    for name in ("topic", "since", "until", "reason"):
        if ids and getattr(selection, name) is not None:
            raise BadRequest(f"--{name} selects dead letters and does not go with ids")
    return [_id(text) for text in ids or ()]


async def _selected(
    call: Call, client: Client, settle: Settle, good: str, selection: Selection, rate: float | None
) -> int:
    tally = Tally(good)
    try:
        await settle_selection(client, selection, settle, tally, rate)
    except BaseException:
        if tally.matched:
            call.out.remark(f"{tally.statuses[good]} were {good} before this")
        raise
    tell(call.out, tally)
    return verdict([status for status in tally.statuses if status != GONE], {good})


async def _by_id(
    call: Call, client: Client, settle: Settle, good: str, ids: list[int], group: str | None
) -> int:
    """Each is told; the exit code says whether all went well."""
    pairs = await _pairs_of(client, ids, group)
    found = [pair for pair in pairs if pair[1]]
    answers = dict(zip(found, await settle(found), strict=True)) if found else {}
    for pair in pairs:
        task_id, name = pair
        status = answers.get(pair, GONE)
        if call.out.as_json:
            call.out.record({"id": str(task_id), "group": name or None, "status": status})
        else:
            call.out.line(f"{task_id}  {name or '-'}  {status}")
    return verdict([answers.get(pair, GONE) for pair in pairs], {good})


async def _pairs_of(client: Client, ids: list[int], group: str | None) -> list[Pair]:
    """(id, group) for each; without ``group`` all in which it is dead, or "" when there is none."""
    if group is not None:
        return [(task_id, group) for task_id in ids]
    pairs: list[Pair] = []
    for info in await client.lookup_many(ids):
        pairs.extend((info.id, name) for name in views.dead_groups(info) or [""])
    return pairs


def _id(text: str) -> int:
    try:
        return parse_id(text)
    except ValueError as error:
        raise BadRequest(str(error)) from None
