"""The events of one shard in the order in which they were written: by epoch, then by number.

They come from any number of folders, as the daemons of a failover pair may each have their own:
segments first, then what lies in spools that no writer has taken up, as the events that a writer
would make of it. A segment is opened when its first number is reached, so few are open at a time.
Spool files are held open from the beginning: a writer that works at the same time may remove them.
The numbers show what is missing, and it is counted.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.history import segments, spool
from tickwheel.history.lines import MALFORMED, Renderer
from tickwheel.history.segments import HOUR_MS, STATE, Event, Segment, Tally
from tickwheel.history.spool import SpoolName
from tickwheel.history.writer import Place, Position, load_position


@dataclass(slots=True)
class Replayed:
    """What a replay finds, and a restore's report says."""

    events: int = 0
    first_event_ms: int | None = None
    last_event_ms: int | None = None
    missing_events: int = 0
    """Numbers of events that are in no file."""
    dropped_events: int = 0
    """Events that the daemon says it could not keep."""
    spool_events: int = 0
    """Events read from a spool, because no writer had turned them into files."""
    lost_bytes: int = 0
    """Bytes of spools that are torn or damaged."""
    drops: int = 0
    """How often an unknown number of events is missing."""
    crashes: int = 0
    """Starts since the backup that found the store not closed in order; each crash may have lost
    the batch that was being appended."""
    clean_stop: bool = False
    """Whether the newest event is a daemon's clean stop, after which nothing can have happened."""


@dataclass(slots=True)
class Seen(Replayed):
    """What the replay has found so far."""

    spool_ms: int | None = None
    """When something was appended to a spool last, by its file."""
    tally: Tally = field(default_factory=Tally)


class Replay:
    """One pass over all events from ``since_ms`` on."""

    def __init__(
        self,
        folders: Sequence[Path],
        shard: int,
        since_ms: int | None,
        backup_ms: int = 0,
        needles: Sequence[bytes] = (),
    ) -> None:
        """``needles``: only lines of segments that hold one of these are looked at. What is missing
        is counted wrongly then."""
        self._needles = needles
        self._folders = folders
        self._shard = shard
        self._since_ms = since_ms
        self._backup_ms = backup_ms
        self.seen = Seen()

    def reaches_back(self, time_ms: int) -> bool:
        """Whether there is history of that time, or from before it; known after the events."""
        if self.seen.first_event_ms is not None and self.seen.first_event_ms <= time_ms:
            return True
        return any(
            segment.name.shard == self._shard and segment.hour_ms + HOUR_MS <= time_ms
            for folder in self._folders
            for segment in segments.find(folder, until_ms=time_ms)
        )

    def events(self) -> Iterator[Event]:
        """Every event once, in the order of epochs and numbers."""
        with ExitStack() as stack:
            # Before the segments: what a writer takes from a spool meanwhile is in both then.
            spools = [Spools(folder, self._shard, stack) for folder in self._folders]
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
                    self.seen.missing_events += seq - last - 1
                last = expected = seq
                self._look(event)
                yield event

    def _look(self, event: Event) -> None:
        seen = self.seen
        time_ms = event["time_ms"]
        seen.events += 1
        first_ms, last_ms = seen.first_event_ms, seen.last_event_ms
        seen.first_event_ms = time_ms if first_ms is None else min(first_ms, time_ms)
        seen.last_event_ms = time_ms if last_ms is None else max(last_ms, time_ms)
        seen.clean_stop = event.get("event") == "stopped" and event.get("clean") is True
        if event.get("event") == "started" and time_ms > self._backup_ms:
            seen.crashes += event.get("clean") is False
        if event.get("event") == "dropped":
            seen.drops += 1
            count = event.get("count")
            seen.dropped_events += count if type(count) is int else 0

    # --- one epoch -----------------------------------------------------------------------------

    def _epoch(self, found: list[Segment], spooled: list[Iterator[Event]]) -> Iterator[Event]:
        """The events of one epoch by number, from files that are read side by side."""
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
                push(index, self._numbered(segment, self.seen.tally, self._needles))
                continue
            _, index, event, events = heapq.heappop(heap)
            yield event
            push(index, events)

    def _numbered(
        self, segment: Segment, tally: Tally, needles: Sequence[bytes] = ()
    ) -> Iterator[Event]:
        for event in segments.events(segment.path, tally, needles):
            if type(event.get("seq")) is int:
                yield event
            else:
                tally.torn += 1


# --- spools ----------------------------------------------------------------------------------


class Spools:
    """The spools of one shard in one history, which ``stack`` holds open."""

    def __init__(self, history_dir: Path, shard: int, stack: ExitStack) -> None:
        self._history_dir = history_dir
        self._shard = shard
        self._files: dict[Path, list[tuple[SpoolName, int]]] = {}
        self._positions: dict[Path, Position | None] = {}
        self.written_ms: int | None = None
        """When something was appended last, by the files."""
        for folder in sorted((self._history_dir / STATE).glob(f"*-s{self._shard}")):
            if not folder.is_dir():
                continue  # the mark of the last backup
            found = self._files[folder] = []
            for name in spool.files(folder):
                with contextlib.suppress(FileNotFoundError):
                    fd = stack.enter_context((folder / str(name)).open("rb")).fileno()
                    found.append((name, fd))
                    written_ms = os.fstat(fd).st_mtime_ns // 1_000_000
                    self.written_ms = max(self.written_ms or 0, written_ms)
            # After the files: what lies before it is in segments by now.
            self._positions[folder] = load_position(folder)

    def by_epoch(self, seen: Seen) -> dict[int, Iterator[Event]]:
        """The events of each epoch; ``seen`` counts while they are read."""
        epochs: dict[int, Iterator[Event]] = {}
        for folder, found in self._files.items():
            for epoch in sorted({name.epoch for name, _ in found}):
                files = [(name.number, fd) for name, fd in found if name.epoch == epoch]
                epochs[epoch] = self._events(folder, epoch, files, seen)
        return epochs

    def _events(
        self, folder: Path, epoch: int, files: list[tuple[int, int]], seen: Seen
    ) -> Iterator[Event]:
        position = self._positions[folder]
        if position is not None:
            place = position.place(epoch)
        else:
            place = Place(seq=segments.last_seqs(self._history_dir, self._shard, {epoch})[epoch])
        node = folder.name.removesuffix(f"-s{self._shard}")
        renderer, seq = Renderer(node, self._shard, epoch), place.seq
        for number, fd in files:
            if number < place.file:
                continue
            offset = place.offset if number == place.file else 0
            for record in _records(fd, offset, seen):
                try:
                    lines = renderer.render(record, seq + 1)
                except MALFORMED:
                    seen.drops += 1
                    continue
                seq += len(lines)
                seen.spool_events += len(lines)
                yield from map(json.loads, lines)


def _records(fd: int, offset: int, seen: Seen) -> Iterator[list[object]]:
    while True:
        chunk = spool.read_open(fd, offset)
        for _, records in chunk.arrays:
            yield from records
        if not chunk.arrays:
            seen.lost_bytes += os.fstat(fd).st_size - chunk.offset
            return
        offset = chunk.offset
