"""``tickwheel dead``: tasks whose retries are used up, or that a consumer rejected."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated

import typer

from tickwheel.cli import views
from tickwheel.cli.call import EXIT_NOT_FOUND, Call, command
from tickwheel.cli.tasks import LIST_DEFAULT, Ids, verdict
from tickwheel.client import Client
from tickwheel.errors import BadRequest

Pair = tuple[int, str]
ALL_CHUNK = 1_000
"""Dead letters that ``--all`` settles with one request."""

Topic = Annotated[str | None, typer.Option(help="Only this topic's.")]
Group = Annotated[str | None, typer.Option(help="Only this group's. Default: every group's.")]
All = Annotated[bool, typer.Option("--all", help="All that --topic and --group select.")]
MaybeIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID...", help="The tasks' ids; or --all.")
]


def register(app: typer.Typer) -> None:
    dead = typer.Typer(help="Dead letters: look at them, requeue them, delete them.")
    app.add_typer(dead, name="dead", no_args_is_help=True)
    command(dead, "list")(list_)
    command(dead)(show)
    command(dead)(requeue)
    command(dead)(delete)


async def list_(
    call: Call,
    topic: Topic = None,
    group: Group = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = LIST_DEFAULT,
) -> None:
    """Dead letters with the reason of their last failure."""
    grid = views.dead_grid()
    async with call.client() as client:
        async for letter in client.dead_list(topic=topic, group=group, limit=limit):
            if call.out.as_json:
                call.out.record(views.dead_fields(letter))
            else:
                grid.rows.append(views.dead_row(letter))
    if not call.out.as_json:
        call.out.grid(grid)


async def show(call: Call, ids: Ids) -> int:
    """Dead letters with their bodies and every failure."""
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
    call: Call, ids: MaybeIds = None, topic: Topic = None, group: Group = None, all_: All = False
) -> int:
    """Let dead letters be delivered again, with their attempts counted anew."""
    async with call.client() as client:
        return await _settle(call, client, client.dead_requeue, "requeued", ids, topic, group, all_)


async def delete(
    call: Call, ids: MaybeIds = None, topic: Topic = None, group: Group = None, all_: All = False
) -> int:
    """Delete dead letters for good."""
    async with call.client() as client:
        return await _settle(call, client, client.dead_delete, "deleted", ids, topic, group, all_)


async def _settle(
    call: Call,
    client: Client,
    settle: Callable[[Sequence[Pair]], Awaitable[Sequence[str]]],
    good: str,
    ids: list[str] | None,
    topic: str | None,
    group: str | None,
    all_: bool,
) -> int:
    """By ids or by selection. Each is told; the exit code says whether all went well."""
    if bool(ids) == all_:
        raise BadRequest("give ids, or --all with --topic and --group as wanted")
    if ids and topic is not None:
        raise BadRequest("--topic goes with --all")
    statuses: list[str] = []
    if ids:
        pairs = await _pairs_of(client, [_id(text) for text in ids], group)
        found = [pair for pair in pairs if pair[1]]
        answers = dict(zip(found, await settle(found), strict=True)) if found else {}
        for pair in pairs:
            statuses.append(answers.get(pair, "unknown"))
            _tell(call, pair, statuses[-1])
        return verdict(statuses, {good})
    pairs = [(d.id, d.group) async for d in client.dead_list(topic=topic, group=group)]
    for start in range(0, len(pairs), ALL_CHUNK):
        chunk = pairs[start : start + ALL_CHUNK]
        for pair, status in zip(chunk, await settle(chunk), strict=True):
            statuses.append(status)
            _tell(call, pair, status)
    return verdict(statuses, {good})


async def _pairs_of(client: Client, ids: list[int], group: str | None) -> list[Pair]:
    """(id, group) for each; without ``group`` all in which it is dead, or "" when there is none."""
    if group is not None:
        return [(task_id, group) for task_id in ids]
    pairs: list[Pair] = []
    for task_id in ids:
        groups = views.dead_groups(await client.lookup(task_id))
        pairs.extend((task_id, name) for name in groups or [""])
    return pairs


def _id(text: str) -> int:
    from tickwheel.cli.values import parse_id

    try:
        return parse_id(text)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def _tell(call: Call, pair: Pair, status: str) -> None:
    task_id, group = pair
    if call.out.as_json:
        call.out.record({"id": str(task_id), "group": group or None, "status": status})
    else:
        call.out.line(f"{task_id}  {group or '-'}  {status}")
