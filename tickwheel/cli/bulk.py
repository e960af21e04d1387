"""``tickwheel bulk``: what is done to all that matches: list, show, cancel. And the commands with
``--where`` and the like: what they would do, whether to do it, the bulk operation, and how it goes
on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, cast

import typer

from tickwheel.api.words import BulkState
from tickwheel.cli.call import EXIT_FAILED, Call, ask, can_ask
from tickwheel.cli.listing import LimitOption, shown
from tickwheel.cli.options import TopicOption
from tickwheel.cli.output import Grid, facts_grid
from tickwheel.cli.values import format_count, format_time, iso_time
from tickwheel.client import BulkInfo, BulkPreview, Client
from tickwheel.errors import BadRequest

BulkArgument = Annotated[str, typer.Argument(metavar="BULK", help="The bulk operation's id.")]
LOOK_S = 0.25
_MOMENTS = ("made_ms", "ended_ms")
_WORDS = {
    "cancel": "Cancel",
    "reschedule": "Reschedule",
    "run_now": "Run now",
    "requeue": "Requeue",
    "delete": "Delete for good",
}
OF_DEAD_LETTERS = ("requeue", "delete")
ENDS_TASKS = ("cancel", "delete")
HOW = ("all_", "dry_run", "yes", "wait", "rate")
"""Options of a bulk operation that do not select tasks."""
"""What cannot be taken back: these ask first."""


class State(StrEnum):
    """The states of bulk operations that may be asked for."""

    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


# --- the commands --------------------------------------------------------------------------------


async def list_(
    call: Call,
    topic: TopicOption = None,
    state: Annotated[State | None, typer.Option(help="Only these.")] = None,
    limit: LimitOption = None,
) -> None:
    """Bulk operations, the newest first."""
    columns = ("bulk", "topic", "state", "looked at", "matched", "changed", "made")
    grid = Grid(columns, right=frozenset(columns[3:6]))
    async with call.client() as client:
        only = None if state is None else state.value
        find = partial(client.list_bulk, topic=topic, state=cast("BulkState | None", only))
        async for one in shown(call, limit, lambda most: find(limit=most)):
            if call.out.as_json:
                call.out.record(fields_of(one))
                continue
            counts = map(format_count, (one.looked_at, one.matched, one.changed))
            made = format_time(one.raw["made_ms"])
            grid.rows.append((one.id, one.topic, one.state, *counts, made))
    if call.out.as_json:
        return
    if grid.rows:
        call.out.grid(grid)
    else:
        call.out.remark("there is no such bulk operation")


async def show(call: Call, bulk: BulkArgument) -> None:
    """A bulk operation: what was asked for, and how far it is."""
    async with call.client() as client:
        found = await client.show_bulk(bulk)
    if call.out.as_json:
        call.out.record(fields_of(found))
        return
    facts: dict[str, str | int] = {"kind": found.kind, "topic": found.topic, "state": found.state}
    for name in ("selection", "arguments", "refused"):
        for key, value in found.raw[name].items():
            facts[f"{name}: {key}"] = format_time(value) if key.endswith("due_ms") else str(value)
    if found.rate is not None:
        facts["rate"] = f"{found.rate:g} a second"
    facts |= {"looked at": found.looked_at, "matched": found.matched, "changed": found.changed}
    for name in _MOMENTS:
        if found.raw[name] is not None:
            facts[name.removesuffix("_ms")] = format_time(found.raw[name])
    facts |= {n: found.raw[n] for n in ("by", "note") if found.raw[n]}
    call.out.grid(facts_grid(("bulk", found.id), facts))


async def cancel(call: Call, bulk: BulkArgument) -> None:
    """It changes nothing more; what it has changed stays. Once more says the same."""
    async with call.client() as client:
        say(call, await client.cancel_bulk(bulk))


def fields_of(found: BulkInfo) -> dict[str, Any]:
    """A bulk operation in the form of ``--json``."""
    fields = dict(found.raw)
    for name in _MOMENTS:
        if fields[name] is not None:
            fields[name.removesuffix("_ms")] = iso_time(fields[name])
    return fields


def say(call: Call, found: BulkInfo) -> None:
    if call.out.as_json:
        call.out.record(fields_of(found))
        return
    of = f"{found.changed:,} of {found.matched:,} changed"
    note = f": {found.note}" if found.note else ""
    call.out.line(f"{found.id}  {found.state}  {of}{_reasons(found.refused)}{note}")


def _reasons(refused: Mapping[str, int]) -> str:
    return "".join(f", {n:,} {word.replace('_', ' ')}" for word, n in sorted(refused.items()))


# --- commands that make one ----------------------------------------------------------------------


@dataclass(frozen=True)
class Matching:
    """What the options of a command with a selection say."""

    kind: str
    topic: str | None
    options: Mapping[str, Any]
    """The options that were given, by the client's names: those that select, and HOW."""
    moved: Mapping[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """The options that select."""
        return {name: value for name, value in self.options.items() if name not in HOW}

    def described(self) -> str:
        """The selection in words, for a question."""
        what = "dead letters" if self.kind in OF_DEAD_LETTERS else "tasks"
        named = {n: v.isoformat() if isinstance(v, datetime) else v for n, v in self.given.items()}
        parts = [f"{name.replace('_', '-')} {value}" for name, value in named.items()]
        return f"{what} of topic {self.topic}" + (f" with {', '.join(parts)}" if parts else "")


async def do_bulk(call: Call, wanted: Matching) -> int:
    """Try a bulk operation, or ask and make it, and follow it if that is asked for."""
    if wanted.topic is None:
        raise BadRequest("--topic is needed to select what is done to all that matches")
    if not wanted.given and not wanted.options.get("all_"):
        raise BadRequest(
            "give --where, --tags, --key-prefix or another option that selects, or --all"
        )
    if wanted.options.get("dry_run"):
        _say_preview(call, wanted, await _try(call, wanted))
        return 0
    if (
        wanted.kind in ENDS_TASKS
        and not wanted.options.get("yes")
        and not await _is_confirmed(call, wanted)
    ):
        return EXIT_FAILED
    async with call.client() as client:
        found = await _make(client, wanted)
        if wanted.options.get("wait"):
            found = await follow(client, found)
    say(call, found)
    return EXIT_FAILED if found.state in ("failed", "cancelled") else 0


async def _try(call: Call, wanted: Matching) -> BulkPreview:
    assert wanted.topic is not None
    async with call.client() as client:
        return await client.preview_matching(
            wanted.kind, wanted.topic, **wanted.given, **wanted.moved
        )


async def _is_confirmed(call: Call, wanted: Matching) -> bool:
    found = await _try(call, wanted)
    what = f"{found.would_change:,} {wanted.described()}"
    if not can_ask(call):
        ends = "cancelled" if wanted.kind == "cancel" else "deleted for good"
        call.out.remark(f"conflict: {what} would be {ends}; say --yes")
        return False
    if not ask(f"{_WORDS[wanted.kind]} {what}?"):
        call.out.remark("nothing was changed")
        return False
    return True


async def _make(client: Client, wanted: Matching) -> BulkInfo:
    assert wanted.topic is not None
    verbs: dict[str, Any] = {
        "cancel": client.cancel_matching,
        "reschedule": client.reschedule_matching,
        "run_now": client.run_now_matching,
        "requeue": client.dead_requeue_matching,
        "delete": client.dead_delete_matching,
    }
    found: BulkInfo = await verbs[wanted.kind](
        wanted.topic, **wanted.given, **wanted.moved, rate=wanted.options.get("rate")
    )
    return found


async def follow(client: Client, found: BulkInfo) -> BulkInfo:
    """Follow a bulk operation until it is over; a terminal shows how far it is."""
    status: Any = None
    if sys.stderr.isatty():
        from rich.console import Console

        status = Console(stderr=True).status("")
    with status or nullcontext():
        while not found.is_over:
            if status is not None:
                status.update(f"looked at {found.looked_at:,}, changed {found.changed:,}")
            await asyncio.sleep(LOOK_S)
            found = await client.show_bulk(found.id)
    return found


def _say_preview(call: Call, wanted: Matching, found: BulkPreview) -> None:
    if call.out.as_json:
        call.out.record(
            {
                "kind": wanted.kind,
                "topic": wanted.topic,
                "looked_at": found.looked_at,
                "matched": found.matched,
                "would_change": found.would_change,
                "refused": dict(found.refused),
                "examples": [str(task_id) for task_id in found.examples],
            }
        )
        return
    counts = f"{found.would_change:,} of {found.looked_at:,} would be changed"
    call.out.line(f"dry run  {counts}{_reasons(found.refused)}")
    for task_id in found.examples:
        call.out.line(f"{task_id}")
