"""What lies in the spools of one folder, as the events that a writer would make of it.

The files are held open from the beginning: a writer that works at the same time may remove them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tickwheel.history import segments, spool_read
from tickwheel.history.lines import MALFORMED, Renderer
from tickwheel.history.names import STATE, SpoolName
from tickwheel.history.segments import Event
from tickwheel.history.writer.position import Place, Position, load


@dataclass(slots=True)
class SpoolSeen:
    """What reading spools has come upon."""

    drops: int = 0
    """How often events are missing where they should be, and nobody knows how many."""
    spool_events: int = 0
    """Read from a spool: no writer had turned them into files."""
    lost_bytes: int = 0
    """Of spools, torn or damaged."""


class Spools:
    """Those of one shard in one history; a context manager that holds them open."""

    def __init__(self, history_dir: Path, shard: int) -> None:
        self._history_dir = history_dir
        self._shard = shard
        self._files: dict[Path, list[tuple[SpoolName, int]]] = {}
        self._positions: dict[Path, Position | None] = {}
        self.written_ms: int | None = None
        """When something was appended last, by the files."""

    def __enter__(self) -> Self:
        for folder in sorted((self._history_dir / STATE).glob(f"*-s{self._shard}")):
            if not folder.is_dir():
                continue  # the mark of the last backup
            found = self._files[folder] = []
            for name in spool_read.files(folder):
                with contextlib.suppress(FileNotFoundError):
                    fd = os.open(folder / str(name), os.O_RDONLY | os.O_CLOEXEC)
                    found.append((name, fd))
                    written_ms = os.fstat(fd).st_mtime_ns // 1_000_000
                    self.written_ms = max(self.written_ms or 0, written_ms)
            # After the files: what lies before it is in segments by now.
            self._positions[folder] = load(folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for found in self._files.values():
            for _, fd in found:
                os.close(fd)

    def by_epoch(self, seen: SpoolSeen) -> dict[int, Iterator[Event]]:
        """Each epoch's events; ``seen`` counts while they are read."""
        epochs: dict[int, Iterator[Event]] = {}
        for folder, found in self._files.items():
            for epoch in sorted({name.epoch for name, _ in found}):
                files = [(name.number, fd) for name, fd in found if name.epoch == epoch]
                epochs[epoch] = self._events(folder, epoch, files, seen)
        return epochs

    def _events(
        self, folder: Path, epoch: int, files: list[tuple[int, int]], seen: SpoolSeen
    ) -> Iterator[Event]:
        position = self._positions[folder]
        place = position.place(epoch) if position is not None else self._behind(epoch)
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

    def _behind(self, epoch: int) -> Place:
        """Without a position: numbers go on behind the highest that is there."""
        numbers = [
            segments.last_seq(segment.path)
            for segment in segments.find(self._history_dir)
            if segment.name.epoch == epoch and segment.name.shard == self._shard
        ]
        return Place(seq=max(numbers, default=0))


def _records(fd: int, offset: int, seen: SpoolSeen) -> Iterator[list[object]]:
    while True:
        chunk = spool_read.read_open(fd, offset)
        for _, records in chunk.arrays:
            yield from records
        if not chunk.arrays:
            seen.lost_bytes += os.fstat(fd).st_size - chunk.offset
            return
        offset = chunk.offset
