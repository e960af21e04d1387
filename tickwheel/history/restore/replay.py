"""The events of one shard in the order in which they were written: by epoch, then by number.

From any number of folders, as the daemons of a failover pair may each have their own; segments
first, then what lies in spools that no writer has taken up. A file is opened when its first
number is reached, so few are open at a time. Numbers tell what is missing: it is counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.history import segments
from tickwheel.history.names import HOUR_MS
from tickwheel.history.restore.spooled import Spools, SpoolSeen
from tickwheel.history.segments import Event, Segment, Tally


@dataclass(slots=True)
class Seen(SpoolSeen):
    """What the replay has come upon so far."""

    events: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    last_epoch: int = 0
    missing: int = 0
    """Numbers that no file has."""
    dropped: int = 0
    """Events that the daemon says it could not keep."""
    spool_ms: int | None = None
    """When something was appended to a spool last, by its file."""
    crashes: int = 0
    """Daemons that found their store not closed in order, since the backup."""
    ends_clean: bool = False
    """The newest event is the clean stop of a daemon."""
    tally: Tally = field(default_factory=Tally)


class Replay:
    """One pass over everything from ``since_ms`` on."""

    def __init__(
        self, folders: Sequence[Path], shard: int, since_ms: int | None, backup_ms: int = 0
    ) -> None:
        self._folders = folders
        self._shard = shard
        self._since_ms = since_ms
        self._backup_ms = backup_ms
        self.seen = Seen()

    def reaches_back(self, time_ms: int) -> bool:
        """After the events: whether there is history of that time, or from before it."""
        if self.seen.first_ms is not None and self.seen.first_ms <= time_ms:
            return True
        return any(
            segment.name.shard == self._shard and segment.hour_ms + HOUR_MS <= time_ms
            for folder in self._folders
            for segment in segments.find(folder, until_ms=time_ms)
        )

    def events(self) -> Iterator[Event]:
        """Every event once."""
        with ExitStack() as stack:
            # Before the segments: what a writer takes from a spool meanwhile is in both then.
            spools = [stack.enter_context(Spools(f, self._shard)) for f in self._folders]
            yield from self._events(spools)

    def _events(self, opened: list[Spools]) -> Iterator[Event]:
        by_epoch: dict[int, list[Segment]] = {}
        for folder in self._folders:
            for segment in segments.find(folder, self._since_ms):
                if segment.name.shard == self._shard:
                    by_epoch.setdefault(segment.name.epoch, []).append(segment)
        spools: dict[int, list[Iterator[Event]]] = {}
        for one in opened:
            if one.written_ms is not None:
                self.seen.spool_ms = max(self.seen.spool_ms or 0, one.written_ms)
            for epoch, spooled in one.by_epoch(self.seen).items():
                spools.setdefault(epoch, []).append(spooled)
        expected: int | None = None
        for epoch in sorted(by_epoch.keys() | spools.keys()):
            last = 0 if expected is not None else None
            for event in self._epoch(by_epoch.get(epoch, []), spools.get(epoch, [])):
                seq = event["seq"]
                if last is not None:
                    if seq <= last:
                        continue
                    self.seen.missing += seq - last - 1
                last = expected = seq
                self._look(event, epoch)
                yield event

    def _look(self, event: Event, epoch: int) -> None:
        seen = self.seen
        time_ms = event["time_ms"]
        seen.events += 1
        seen.first_ms = time_ms if seen.first_ms is None else min(seen.first_ms, time_ms)
        seen.last_ms = time_ms if seen.last_ms is None else max(seen.last_ms, time_ms)
        seen.last_epoch = epoch
        seen.ends_clean = event.get("event") == "stopped" and event.get("clean") is True
        if event.get("event") == "started" and time_ms > self._backup_ms:
            seen.crashes += event.get("clean") is False
        if event.get("event") == "dropped":
            seen.drops += 1
            count = event.get("count")
            seen.dropped += count if type(count) is int else 0

    # --- one epoch -----------------------------------------------------------------------------

    def _epoch(self, found: list[Segment], spooled: list[Iterator[Event]]) -> Iterator[Event]:
        """Its files side by side, by number."""
        entries: list[tuple[int, int, Segment]] = []
        for index, segment in enumerate(found):
            first = next(self._numbered(segment, Tally()), None)
            if first is not None:
                entries.append((first["seq"], index, segment))
        entries.sort(reverse=True)
        heap: list[tuple[int, int, Event, Iterator[Event]]] = []

        def push(index: int, events: Iterator[Event]) -> None:
            event = next(events, None)
            if event is not None:
                heapq.heappush(heap, (event["seq"], index, event, events))

        for number, events in enumerate(spooled, len(found)):
            push(number, events)
        while entries or heap:
            if entries and (not heap or entries[-1][0] <= heap[0][0]):
                _, index, segment = entries.pop()
                push(index, self._numbered(segment, self.seen.tally))
                continue
            _, index, event, events = heapq.heappop(heap)
            yield event
            push(index, events)

    def _numbered(self, segment: Segment, tally: Tally) -> Iterator[Event]:
        for event in segments.events(segment.path, tally):
            if type(event.get("seq")) is int:
                yield event
            else:
                tally.torn += 1
