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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, TypedDict, Unpack

from tickwheel.cli.call import EXIT_FAILED, EXIT_NOT_FOUND, Call, confirmed, given
from tickwheel.cli.options import (
    BulkRate,
    DeadBulkOptions,
    GroupOption,
    Ids,
    LimitOption,
    TopicOption,
    YesOption,
    argument,
    check_rate,
    flag,
    moment,
    option,
    parse_id,
)
from tickwheel.cli.output import (
    Listing,
    column,
    format_duration,
    format_time,
    progress_bar,
    text_columns,
)
from tickwheel.cli.tasks import (
    Matching,
    dead_groups,
    do_bulk,
    named_failures,
    reason_text,
    show_task,
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

_DONE = {"requeue": "requeued", "delete": "deleted"}

IdsOrFilters = Annotated[
    list[str] | None, argument("ID...", "The tasks' ids; or filters, or --all.")
]


class SelectOptions(TypedDict, total=False):
    """The options that select dead letters."""

    topic: TopicOption
    group: GroupOption
    since: Annotated[
        datetime | None, moment("Only what died since: ISO-8601, or 2h for two hours ago.")
    ]
    until: Annotated[
        datetime | None, moment("Only what died before: ISO-8601, or 2h for 2 hours ago.")
    ]
    reason: Annotated[str | None, option("Only with this in its last failure's reason.", "TEXT")]


class SettleOptions(SelectOptions, DeadBulkOptions, total=False):
    """The options that select dead letters which are settled."""

    all_: Annotated[bool, flag("All that the filters select, or all there are.")]


async def list_(call: Call, limit: LimitOption = None, **options: Unpack[SelectOptions]) -> None:
    """Dead letters with the reason of their last failure."""
    query = Selection(**options).query()
    listing = Listing.of(call.out, COLUMNS, dead_fields, spare=SPARE)
    await call.listed(limit, lambda client, most: client.dead_list(**query, limit=most), listing)


async def show(call: Call, ids: Ids) -> int:
    """Dead letters with their bodies and every failure: attempt, time, reason."""
    missing = False
    async with call.client() as client:
        for task_id in ids:
            info = await client.lookup(task_id)
            if dead_groups(info):
                show_task(call.out, info)
            else:
                call.out.remark(f"not_found: task {task_id} is no dead letter ({info.state})")
                missing = True
    return EXIT_NOT_FOUND if missing else 0


async def requeue(
    call: Call,
    ids: IdsOrFilters = None,
    rate: Annotated[float | None, option("So many a second; without, as fast as can.", "N")] = None,
    **options: Unpack[SettleOptions],
) -> int:
    """Let dead letters be delivered again, with their failures counted anew.

    By ids; or those that --topic, --group, --since, --until, --reason select, one page after the
    other; or with a task that matches --where and the like, as a bulk operation in the background.
    """
    return await _settle(call, "requeue", ids, rate, options)


async def delete(
    call: Call, ids: IdsOrFilters = None, rate: BulkRate = None, **options: Unpack[SettleOptions]
) -> int:
    """Delete dead letters for good.

    By ids; or those that --topic, --group, --since, --until, --reason select, one page after the
    other; or with a task that matches --where and the like, as a bulk operation in the background.
    """
    return await _settle(call, "delete", ids, rate, options)


async def _settle(
    call: Call, kind: str, ids: list[str] | None, rate: float | None, options: SettleOptions
) -> int:
    selection = Selection(**{name: options.get(name) for name in _SELECTING})  # type: ignore[arg-type]  # of one block
    # An option that only a bulk operation has; those of a delete have the rate, too.
    if options.keys() - {*_SELECTING, "all_"} or (kind == "delete" and rate is not None):
        if ids or selection.since is not None or selection.until is not None:
            raise BadRequest(
                "a bulk operation selects by --topic and its tasks: ids, --since, --until do not"
                " go with it"
            )
        of_bulk = {name: value for name, value in options.items() if name != "topic"}
        how = of_bulk | given({"rate": rate})
        return await do_bulk(call, Matching(kind, selection.topic, how))
    check_rate(rate)
    wanted = _check(ids, selection, bool(options.get("all_")))
    async with call.client() as client:
        settle: Settle = client.dead_requeue if kind == "requeue" else client.dead_delete
        good = _DONE[kind]
        if wanted:
            return await _by_id(call, client, settle, good, wanted, selection.group)
        return await _selected(call, client, settle, good, selection, rate)


async def purge(
    call: Call, topic: TopicOption = None, group: GroupOption = None, yes: YesOption = False
) -> int:
    """Delete all dead letters of a topic, a group, or the daemon. Asks first."""
    selection = Selection(topic, group)
    if not yes:
        count = await call.ask(lambda client: count_dead(client, selection))
        of = "".join(f" of {n} {v}" for n, v in (("topic", topic), ("group", group)) if v)
        what = f"{count:,} dead letters{of}"
        refusal, question = f"{what} would be deleted for good", f"Delete {what} for good?"
        if not confirmed(call, refusal, question, "nothing was deleted"):
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
    try:
        return [parse_id(text) for text in ids or ()]
    except ValueError as error:
        raise BadRequest(str(error)) from None


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
    call.out.result(tally.fields(), tally.sentence())
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
        fields = {"id": str(task_id), "group": name or None, "status": status}
        call.out.result(fields, f"{task_id}  {name or '-'}  {status}")
    return verdict([answers.get(pair, GONE) for pair in pairs], {good})


async def _pairs_of(client: Client, ids: list[int], group: str | None) -> list[Pair]:
    """(id, group) of each; without ``group``, all groups in which it is dead, or "" for none."""
    if group is not None:
        return [(task_id, group) for task_id in ids]
    pairs: list[Pair] = []
    for info in await client.lookup_many(ids):
        pairs.extend((info.id, name) for name in dead_groups(info) or [""])
    return pairs


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
        return given(vars(self))


_SELECTING = tuple(one.name for one in fields(Selection))


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
    is_counted = sys.stderr.isatty() and selection.counted
    total = await count_dead(client, selection) if is_counted else None
    columns = ("MofNCompleteColumn", "BarColumn", "TimeRemainingColumn")
    with progress_bar(*columns, total=total) as changed:
        async for pairs in _chunks(client.dead_list(**query), chunk_size(rate)):
            tally.statuses.update(await settle(pairs))
            changed(advance=len(pairs))
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


# --- tables and JSON of dead letters -------------------------------------------------------------


COLUMNS = (
    column("id", right=True), *text_columns("group", "topic"),
    column("died", "died_ms", format_time), column("attempts", "attempt", right=True),
    column("reason", show=reason_text),
)  # fmt: skip
SPARE = ("attempts",)


def dead_fields(letter: DeadLetter) -> dict[str, Any]:
    names = ("group", "topic", "died_ms", "attempt", "deaths", "reason")
    failures = named_failures(letter.failures)
    said = {name: getattr(letter, name) for name in names}
    return {"id": str(letter.id), **said, "failures": failures}
