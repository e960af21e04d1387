"""``tickwheel dead``: tasks whose retries are used up, or that a consumer rejected; listed, shown,
requeued or deleted, by ids or by selection.

A selection is settled page by page, at a rate, with bounded memory: a page is read, settled and
forgotten before the next one is read. Ids only rise from page to page, and what died after the
start is left alone. So a task that dies again is not met again, and this ends however quickly
tasks die.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Unpack

import typer

from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call, ask, can_ask, given
from tickwheel.cli.options import (
    BulkRate,
    DeadBulkOptions,
    GroupOption,
    Ids,
    ReasonOption,
    SinceOption,
    TopicOption,
    UntilOption,
    format_duration,
    format_time,
    parse_id,
)
from tickwheel.cli.output import Grid, LimitOption, shown
from tickwheel.cli.tasks import (
    Matching,
    attempts_grid,
    dead_groups,
    do_bulk,
    named_failures,
    reason_text,
    show_traces,
    task_fields,
    task_grid,
    verdict,
)
from tickwheel.client import Client, DeadLetter
from tickwheel.errors import BadRequest

Pair = tuple[int, str]
"""(task id, group)"""
Settle = Callable[[Sequence[Pair]], Awaitable[Sequence[str]]]

CHUNK_MAX = 1_000
"""Dead letters settled with one request."""
CHUNKS_PER_S = 5
"""With a rate, how many requests a second are sent at most: even, and not one for each task."""
GONE = "unknown"
"""The status of a dead letter that somebody else settled in the meantime."""

All = Annotated[bool, typer.Option("--all", help="All that the filters select, or all there are.")]
IdsOrFilters = Annotated[
    list[str] | None, typer.Argument(metavar="ID...", help="The tasks' ids; or filters, or --all.")
]


async def list_(
    call: Call,
    topic: TopicOption = None,
    group: GroupOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    reason: ReasonOption = None,
    limit: LimitOption = None,
) -> None:
    """Dead letters with the reason of their last failure."""
    grid = dead_grid()
    query = Selection(topic, group, since, until, reason).query()
    async with call.client() as client:
        found = shown(call.out, limit, lambda most: client.dead_list(**query, limit=most))
        async for letter in found:
            if call.out.as_json:
                call.out.record(dead_fields(letter))
            else:
                grid.rows.append(dead_row(letter))
    if not call.out.as_json:
        call.out.grid(grid)


async def show(call: Call, ids: Ids) -> int:
    """Dead letters with their bodies and every failure: attempt, time, reason."""
    missing = False
    async with call.client() as client:
        for task_id in ids:
            info = await client.lookup(task_id)
            if not dead_groups(info):
                call.out.remark(f"not_found: task {task_id} is no dead letter ({info.state})")
                missing = True
            elif call.out.as_json:
                call.out.record(task_fields(info))
            else:
                call.out.grid(task_grid(info))
                call.out.grid(attempts_grid(info))
                show_traces(call.out, info)
    return EXIT_NOT_FOUND if missing else 0


async def requeue(
    call: Call,
    ids: IdsOrFilters = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    reason: ReasonOption = None,
    all_: All = False,
    rate: Annotated[
        float | None, typer.Option(metavar="N", help="So many a second; without, as fast as can.")
    ] = None,
    **options: Unpack[DeadBulkOptions],
) -> int:
    """Let dead letters be delivered again, with their failures counted anew.

    By ids; or those that --topic, --group, --since, --until, --reason select, one page after the
    other; or with a task that matches --where and the like, as a bulk operation in the background.
    """
    bulk = given({"group": group, "reason": reason, "all_": all_, "rate": rate}) | options
    if _is_bulk(options, ids, since, until):
        return await do_bulk(call, Matching("requeue", topic, bulk))
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
    ids: IdsOrFilters = None,
    topic: TopicOption = None,
    group: GroupOption = None,
    since: SinceOption = None,
    until: UntilOption = None,
    reason: ReasonOption = None,
    all_: All = False,
    rate: BulkRate = None,
    **options: Unpack[DeadBulkOptions],
) -> int:
    """Delete dead letters for good.

    By ids; or those that --topic, --group, --since, --until, --reason select, one page after the
    other; or with a task that matches --where and the like, as a bulk operation in the background.
    """
    bulk = given({"group": group, "reason": reason, "all_": all_, "rate": rate}) | options
    if _is_bulk(options or rate is not None, ids, since, until):
        return await do_bulk(call, Matching("delete", topic, bulk))
    selection = Selection(topic, group, since, until, reason)
    wanted = _check(ids, selection, all_)
    async with call.client() as client:
        settle = client.dead_delete
        if wanted:
            return await _by_id(call, client, settle, "deleted", wanted, group)
        return await _selected(call, client, settle, "deleted", selection, None)


def _is_bulk(
    is_said: object, ids: list[str] | None, since: datetime | None, until: datetime | None
) -> bool:
    """Whether an option was given that only a bulk operation has."""
    if not is_said:
        return False
    if ids or since is not None or until is not None:
        raise BadRequest(
            "a bulk operation selects by --topic and its tasks: ids, --since, --until do not go"
            " with it"
        )
    return True


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


# --- settling by ids -----------------------------------------------------------------------------


def _check(ids: list[str] | None, selection: Selection, all_: bool) -> list[int]:
    """The given ids; none for a selection. ``--all`` is explicit: no filter settles nothing."""
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
    if call.out.as_json:
        call.out.record(tally.fields())
    else:
        call.out.line(tally.sentence())
    return verdict([status for status in tally.statuses if status != GONE], {good})


async def _by_id(
    call: Call, client: Client, settle: Settle, good: str, ids: list[int], group: str | None
) -> int:
    """Settle dead letters by id, and show each; the exit code says whether all went well."""
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
    """(id, group) of each; without ``group``, all groups in which it is dead, or "" for none."""
    if group is not None:
        return [(task_id, group) for task_id in ids]
    pairs: list[Pair] = []
    for info in await client.lookup_many(ids):
        pairs.extend((info.id, name) for name in dead_groups(info) or [""])
    return pairs


def _id(text: str) -> int:
    try:
        return parse_id(text)
    except ValueError as error:
        raise BadRequest(str(error)) from None


# --- by selection --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selection:
    """The selection of ``--topic --group --since --until --reason``."""

    topic: str | None = None
    group: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    reason: str | None = None

    @property
    def given(self) -> bool:
        return bool(self.query())

    @property
    def counted(self) -> bool:
        """Whether the daemon's counts say how many dead letters are selected."""
        return not self.query().keys() & {"since", "until", "reason"}

    def query(self) -> dict[str, Any]:
        """The selection as arguments of ``Client.dead_list``."""
        named = {
            "topic": self.topic, "group": self.group, "since": self.since, "until": self.until,
            "reason": self.reason,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None}


@dataclass
class Tally:
    """What became of the selected dead letters."""

    good: str
    """The status that was asked for."""
    began_s: float = field(default_factory=time.monotonic)
    statuses: Counter[str] = field(default_factory=Counter)

    @property
    def matched(self) -> int:
        return self.statuses.total()

    def fields(self) -> dict[str, Any]:
        counted = {self.good: self.statuses[self.good], **self.statuses}
        took_s = round(time.monotonic() - self.began_s, 3)
        return {"matched": self.matched, **counted, "took_s": took_s}

    def sentence(self) -> str:
        others = [
            f", {n:,} {status.replace('_', ' ')}"
            for status, n in sorted(self.statuses.items())
            if status != self.good
        ]
        took = format_duration(time.monotonic() - self.began_s)
        return f"{self.statuses[self.good]:,} {self.good}{''.join(others)} in {took}"


def chunk_size(rate: float | None) -> int:
    """How many dead letters one request settles."""
    return CHUNK_MAX if rate is None else min(CHUNK_MAX, max(1, int(rate / CHUNKS_PER_S)))


def pause_s(done: int, elapsed_s: float, rate: float | None) -> float:
    """How long, in seconds, to wait after ``done`` dead letters to keep to ``rate`` a second."""
    return 0.0 if rate is None else max(0.0, done / rate - elapsed_s)


async def settle_selection(
    client: Client, selection: Selection, settle: Settle, tally: Tally, rate: float | None
) -> None:
    """Settle each selected dead letter; ``tally`` is true at every moment, also when cut off."""
    query = selection.query()
    query.setdefault("until", _daemon_now(client))
    with _progress(await _total(client, selection)) as advance:
        async for pairs in _chunks(client.dead_list(**query), chunk_size(rate)):
            tally.statuses.update(await settle(pairs))
            advance(len(pairs))
            wait_s = pause_s(tally.matched, time.monotonic() - tally.began_s, rate)
            if wait_s:
                await asyncio.sleep(wait_s)


def _daemon_now(client: Client) -> datetime:
    """The first millisecond after the daemon's HELLO, by its clock."""
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=client.server_info["now_ms"] + 1)


async def _chunks(letters: AsyncIterator[Any], size: int) -> AsyncIterator[list[Pair]]:
    chunk: list[Pair] = []
    async for letter in letters:
        chunk.append((letter.id, letter.group))
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def count_dead(client: Client, selection: Selection) -> int:
    """How many dead letters a topic, a group or all have; times and reasons do not count here."""
    topics: Mapping[str, Any] = (await client.stats()).raw.get("topics") or {}
    found = 0
    for name, topic in topics.items():
        if selection.topic in {None, name}:
            groups = topic.get("groups") or {}
            if selection.group is None:
                found += int(topic.get("dead") or 0)
            elif selection.group in groups:
                found += int(groups[selection.group].get("dead") or 0)
    return found


async def _total(client: Client, selection: Selection) -> int | None:
    if not sys.stderr.isatty() or not selection.counted:
        return None
    return await count_dead(client, selection)


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=total)
        yield lambda done: progress.update(bar, advance=done)


# --- tables and JSON of dead letters -------------------------------------------------------------


def dead_grid() -> Grid:
    return Grid(
        ("id", "group", "topic", "died", "attempts", "reason"),
        right=frozenset(("id", "attempts")),
        times=frozenset(("died",)),
        spare=("attempts",),
    )


def dead_row(letter: DeadLetter) -> tuple[str, ...]:
    return (
        str(letter.id),
        letter.group,
        letter.topic,
        format_time(letter.died_ms),
        str(letter.attempt),
        reason_text(letter.reason),
    )


def dead_fields(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": str(letter.id),
        "group": letter.group,
        "topic": letter.topic,
        "died_ms": letter.died_ms,
        "attempt": letter.attempt,
        "deaths": letter.deaths,
        "reason": letter.reason,
        "failures": named_failures(letter.failures),
    }
