"""``tickwheel transactions``: those that nobody has decided: list, show, commit, rollback."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from tickwheel.cli.call import Call
from tickwheel.cli.listing import LimitOption, shown
from tickwheel.cli.output import Grid, facts_grid
from tickwheel.cli.values import format_count, format_time, iso_time
from tickwheel.client import TransactionInfo

IdArgument = Annotated[str, typer.Argument(metavar="ID", help="The transaction's name.")]
_MOMENTS = ("began_ms", "touched_ms", "checked_ms", "decided_ms")


class State(StrEnum):
    """The states of transactions that may be asked for."""

    OPEN = "open"
    PARKED = "parked"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


async def list_(
    call: Call,
    group: Annotated[str | None, typer.Option(help="Of this producer group.")] = None,
    state: Annotated[
        State | None, typer.Option(help="Default: open and parked, those that are not decided.")
    ] = None,
    limit: LimitOption = None,
) -> None:
    """Transactions that nobody has decided. A parked one waits for you: its producers were asked
    often enough."""
    grid = transactions_grid()
    async with call.client() as client:
        ask = partial(
            client.list_transactions, group=group, state=None if state is None else state.value
        )
        async for one in shown(call, limit, lambda most: ask(limit=most)):
            if call.out.as_json:
                call.out.record(fields_of(one))
                continue
            asked = f"{one.asked} of {one.checks}"
            grid.rows.append(
                (one.id, one.group, one.state, str(one.tasks), format_time(one.raw["began_ms"]),
                 asked, ", ".join(one.topics))
            )  # fmt: skip
    if call.out.as_json:
        return
    if grid.rows:
        call.out.grid(grid)
    else:
        call.out.remark("there is no such transaction")


def transactions_grid() -> Grid:
    return Grid(
        ("transaction", "group", "state", "tasks", "began", "asked", "topics"),
        right=frozenset(("tasks", "asked")),
        times=frozenset(("began",)),
        spare=("topics", "asked"),
    )


async def show(call: Call, transaction: IdArgument) -> None:
    """A transaction and its half tasks."""
    async with call.client() as client:
        found = await client.show_transaction(transaction)
    if call.out.as_json:
        call.out.record(fields_of(found) | {"halves": list(found.raw["halves"])})
        return
    facts: dict[str, str | int] = {
        "group": found.group,
        "state": found.state,
        "tasks": found.tasks,
        "bytes": found.bytes,
        "topics": ", ".join(found.topics),
        "asked": f"{found.asked} of {found.checks} times",
    }
    for name in _MOMENTS:
        if found.raw.get(name) is not None:
            facts[name.removesuffix("_ms")] = format_time(found.raw[name])
    call.out.grid(facts_grid(("transaction", found.id), facts))
    if found.halves:
        call.out.grid(_halves(found))


def _halves(found: TransactionInfo) -> Grid:
    grid = Grid(("topic", "due", "key", "tag", "bytes"), right=frozenset(("bytes",)))
    for half in found.halves or ():
        due_ms, delay_ms = half.due_ms, half.delay_ms
        due = f"{delay_ms} ms after the commit" if due_ms is None else format_time(due_ms)
        key, tag = half.key or "", half.tag or ""
        grid.rows.append((half.topic, due, key, tag, format_count(half.bytes)))
    return grid


async def commit(call: Call, transaction: IdArgument) -> None:
    """Decide it: its half tasks are tasks. Once more says the same."""
    async with call.client() as client:
        ids = await client.commit_transaction(transaction)
    if call.out.as_json:
        outcome = {"id": transaction, "outcome": "committed", "ids": [str(i) for i in ids]}
        call.out.record(outcome)
    else:
        call.out.line(f"{transaction}  committed  {len(ids)} tasks")


async def rollback(call: Call, transaction: IdArgument) -> None:
    """Decide it: none of its tasks ever was. Once more says the same."""
    async with call.client() as client:
        await client.rollback_transaction(transaction)
    if call.out.as_json:
        call.out.record({"id": transaction, "outcome": "rolled_back", "ids": []})
    else:
        call.out.line(f"{transaction}  rolled back")


def fields_of(found: TransactionInfo) -> dict[str, Any]:
    """A transaction in the form of ``--json``."""
    fields = {name: value for name, value in found.raw.items() if name != "halves"}
    for name in _MOMENTS:
        if fields.get(name) is not None:
            fields[name.removesuffix("_ms")] = iso_time(fields[name])
    first_id = fields.get("first_id")
    return fields | {"first_id": None if first_id is None else str(first_id)}
