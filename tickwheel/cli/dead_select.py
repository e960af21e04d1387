"""Dead letters by selection: page by page, at a rate, with bounded memory.

A page is read, settled and forgotten before the next one is read. Ids only rise from page to
page, and what died after the start is left alone: a task that dies again is not met again, so
that this ends however quickly tasks die.
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
from typing import Any

from tickwheel.cli.output import Output
from tickwheel.cli.values import format_duration
from tickwheel.client import Client

Pair = tuple[int, str]
Settle = Callable[[Sequence[Pair]], Awaitable[Sequence[str]]]

CHUNK_MAX = 1_000
"""Dead letters settled with one request."""
CHUNKS_PER_S = 5
"""With a rate, so many requests a second at most: smooth, and not one request a task."""


@dataclass(frozen=True)
class Selection:
    """What ``--topic --group --since --until --reason`` say."""

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
        """The daemon's counts say how many that are."""
        return not self.query().keys() & {"since", "until", "reason"}

    def query(self) -> dict[str, Any]:
        """As ``Client.dead_list`` takes it."""
        named = {
            "topic": self.topic, "group": self.group, "since": self.since, "until": self.until,
            "reason": self.reason,
        }  # fmt: skip
        return {name: value for name, value in named.items() if value is not None}


@dataclass
class Tally:
    """What became of the selected ones."""

    good: str
    """The status that was wished for."""
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
    """Dead letters a request."""
    return CHUNK_MAX if rate is None else min(CHUNK_MAX, max(1, int(rate / CHUNKS_PER_S)))


def pause_s(done: int, elapsed_s: float, rate: float | None) -> float:
    """How long to wait after ``done`` of them so that no more than ``rate`` a second go."""
    return 0.0 if rate is None else max(0.0, done / rate - elapsed_s)


async def settle_selection(
    client: Client, selection: Selection, settle: Settle, tally: Tally, rate: float | None
) -> None:
    """Settle each; ``tally`` is true at every moment, also when this is ended in the middle."""
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
    """The first millisecond after the daemon said hello, by its clock."""
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


def tell(out: Output, tally: Tally, extra: Mapping[str, Any] | None = None) -> None:
    """The summary."""
    if out.as_json:
        out.record({**tally.fields(), **(extra or {})})
    else:
        out.line(tally.sentence())


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, when that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=total)
        yield lambda done: progress.update(bar, advance=done)
