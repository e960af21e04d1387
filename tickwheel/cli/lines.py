"""``tickwheel groups held|lines|release-key|skip-key``: order keys and fair shares of a group."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, TypeVar

import typer

from tickwheel.cli.call import EXIT_NOT_FOUND, Call
from tickwheel.cli.groups import GroupArgument
from tickwheel.cli.listing import ROWS_SHOWN, asked, cut
from tickwheel.cli.options import TopicArgument, typed
from tickwheel.cli.output import Grid
from tickwheel.cli.tasks import reason_text
from tickwheel.cli.values import format_count, format_duration, iso_time, parse_id, printable
from tickwheel.client import HeldKey, KeyLine
from tickwheel.errors import BadRequest

ANSWER_MAX = 1000
"""Keys in one answer of the daemon, which has no next page: the first ones matter most."""
LimitOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=ANSWER_MAX,
        metavar="N",
        help=f"At most so many. Default: {ANSWER_MAX} with --json, {ROWS_SHOWN} as a table.",
    ),
]
IdArgument = Annotated[
    int | None,
    typer.Argument(metavar="TASK_ID", parser=typed(parse_id), help="The task that is held."),
]
KeyOption = Annotated[str | None, typer.Option("--key", help="Instead of it: its order key.")]
NOT_HELD = "not_held"
Verb = Callable[..., Awaitable[str]]
T = TypeVar("T")


async def held(
    call: Call, topic: TopicArgument, group: GroupArgument, limit: LimitOption = None
) -> None:
    """Order keys that wait for you, the oldest first: the task that failed, why, what waits."""
    async with call.client() as client:
        found = await _first(call, limit, partial(client.held_keys, topic, group))
    if call.out.as_json:
        for one in found:
            fields = _fields(one) | {"since": iso_time(one.since_ms)}
            call.out.record({"topic": topic, "group": group, **fields})
        return
    if not found:
        call.out.remark(f"no key of group {group} of topic {topic} is held")
        return
    grid = Grid(
        ("key", "task", "since", "attempts", "waiting", "reason"),
        right=frozenset(("task", "since", "attempts", "waiting")),
    )
    for one in found:
        age = format_duration(max(0.0, time.time() - one.since_ms / 1000))
        counts = format_count(one.attempt), format_count(one.waiting)
        grid.rows.append((_text(one.key), str(one.id), age, *counts, reason_text(one.reason)))
    call.out.grid(grid)


async def lines(
    call: Call, topic: TopicArgument, group: GroupArgument, limit: LimitOption = None
) -> None:
    """Who waits for whom: order keys, and values that share the group, with most tasks waiting."""
    async with call.client() as client:
        found = await _first(call, limit, partial(client.key_lines, topic, group))
    if call.out.as_json:
        for one in found:
            call.out.record({"topic": topic, "group": group, **_fields(one)})
        return
    if not found:
        call.out.remark(f"nothing of group {group} of topic {topic} waits for its turn")
        return
    grid = Grid(
        ("by", "value", "state", "in flight", "waiting", "task"),
        right=frozenset(("in flight", "waiting", "task")),
    )
    for one in found:
        counts = format_count(one.in_flight), format_count(one.waiting)
        state = one.state.replace("_", " ")
        grid.rows.append((one.kind, _text(one.value), state, *counts, str(one.id)))
    call.out.grid(grid)


async def _first(call: Call, limit: int | None, ask: Callable[..., Awaitable[list[T]]]) -> list[T]:
    """As many keys as the list shows; says so if the daemon's answer is full."""
    most = min(asked(call, limit) or ANSWER_MAX, ANSWER_MAX)
    found = await ask(limit=most)
    if limit is None and len(found) == ANSWER_MAX:
        call.out.remark(f"these are the first {ANSWER_MAX:,}; the daemon shows no more at once")
    return list(cut(call, limit, found))


async def release_key(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    task_id: IdArgument = None,
    key: KeyOption = None,
) -> int:
    """Try the task of a held key again at once, its failures counted anew."""
    return await _act(call, "release_key", (topic, group), task_id, key)


async def skip_key(
    call: Call,
    topic: TopicArgument,
    group: GroupArgument,
    task_id: IdArgument = None,
    key: KeyOption = None,
) -> int:
    """Give the task of a held key up: it is a dead letter, and its key goes on."""
    return await _act(call, "skip_key", (topic, group), task_id, key)


async def _act(
    call: Call, verb: str, names: tuple[str, str], task_id: int | None, key: str | None
) -> int:
    if (task_id is None) == (key is None):
        raise BadRequest("give TASK_ID or --key, one of them")
    async with call.client() as client:
        word: str = await getattr(client, verb)(*names, task_id, key=key)
    if call.out.as_json:
        named = {"task_id": None if task_id is None else str(task_id), "key": key}
        call.out.record({"topic": names[0], "group": names[1], **named, "result": word})
    else:
        called = f"key {_text(key)}" if task_id is None else str(task_id)
        call.out.line(f"{called}  {word.replace('_', ' ')}")
    return EXIT_NOT_FOUND if word == NOT_HELD else 0


def _fields(one: HeldKey | KeyLine) -> dict[str, Any]:
    found = asdict(one)
    del found["raw"]
    return found | {"id": str(one.id)}


def _text(value: object) -> str:
    return "-" if value is None else printable(str(value))
