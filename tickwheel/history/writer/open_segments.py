"""The open segments: lines appended to the file of their hour, and to a next one when it is full.

Every write names its offset, so a write that failed half way is repeated over itself, and a
reader never sees other bytes at a place. What is ripe goes to the sealer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tickwheel.history import segments
from tickwheel.history.names import HOUR_MS, PART, SegmentName, hour_folder, safe_node
from tickwheel.history.writer.position import Position

OPEN_MAX = 4
"""Hours open at once: the current one, the last, and what a clock that went back brings."""
LATE_MS = 60_000
"""So long after its end an hour may still get events."""


@dataclass(slots=True)
class OpenSegment:
    """One file that is being appended to."""

    path: Path
    fd: int
    length: int
    hour_ms: int
    epoch: int


class Output:
    """All open segments of one writer."""

    def __init__(self, history_dir: Path, node: str, shard: int, segment_bytes: int) -> None:
        self._dir = history_dir
        self._node, self._shard = safe_node(node), shard
        self._segment_bytes = segment_bytes
        self._open: dict[tuple[int, int], OpenSegment] = {}
        self.number = 0
        self.ripe: list[Path] = []
        """Closed here, to be sealed."""

    def take_up(self, position: Position | None) -> None:
        """Go on with what a writer before this one left.

        What is newer than its position is removed: the spool still holds it, and it will be
        written again. Without a position nothing is known to be repeated, so all is kept.
        """
        mine = [
            segment
            for segment in segments.find(self._dir)
            if (segment.name.node, segment.name.shard) == (self._node, self._shard)
        ]
        known = position or Position(max((s.name.number for s in mine), default=0))
        self.number = known.number
        for segment in mine:
            if segment.name.sealed:
                # Whoever was killed while it sealed has left what it is made of beside it.
                open_name = str(segment.name._replace(sealed=False))
                segment.path.with_name(open_name).unlink(missing_ok=True)
                continue
            length = known.open.get(self._key(segment.path))
            if length is not None:
                self._reopen(segment, length)
            elif segment.name.number > known.number:
                segment.path.unlink()
            else:
                self.ripe.append(segment.path)
        for part in self._dir.glob(f"dt=*/hour=*/{PART}{self._node}-s{self._shard}-e*"):
            part.unlink(missing_ok=True)

    def _reopen(self, segment: segments.Segment, length: int) -> None:
        key = segment.name.epoch, segment.hour_ms
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < length or key in self._open:
                # A power cut took the end; what is left is as it is.
                os.close(fd)
                self.ripe.append(segment.path)
                return
            os.ftruncate(fd, length)
        except OSError:
            os.close(fd)
            raise
        self._open[key] = OpenSegment(segment.path, fd, length, segment.hour_ms, key[0])

    # --- writing -----------------------------------------------------------------------------

    def write(self, epoch: int, texts: dict[int, list[str]]) -> dict[str, int]:
        """Lines by their hour; the lengths of all open segments with them.

        Raises OSError: then nothing counts as written until ``keep`` is called, and the same
        lines may be written again.
        """
        self._forget_removed()
        lengths = self.lengths()
        for hour_ms, lines in texts.items():
            segment = self._open.get((epoch, hour_ms)) or self._create(epoch, hour_ms)
            data = memoryview("".join(lines).encode("ascii"))
            at = segment.length
            while data:
                written = os.pwrite(segment.fd, data, at)
                data, at = data[written:], at + written
            lengths[self._key(segment.path)] = at
        return lengths

    def keep(self, lengths: dict[str, int]) -> None:
        """What ``write`` answered was saved with the position."""
        for segment in self._open.values():
            segment.length = lengths[self._key(segment.path)]

    def lengths(self) -> dict[str, int]:
        return {self._key(s.path): s.length for s in self._open.values()}

    def _forget_removed(self) -> None:
        """Somebody may remove an open file; what follows is for one that readers find."""
        for key, segment in list(self._open.items()):
            if not os.fstat(segment.fd).st_nlink:
                os.close(segment.fd)
                del self._open[key]

    def _create(self, epoch: int, hour_ms: int) -> OpenSegment:
        folder = self._dir / hour_folder(hour_ms)
        folder.mkdir(parents=True, exist_ok=True)
        self.number += 1
        path = folder / str(SegmentName(self._node, self._shard, epoch, self.number, sealed=False))
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        segment = OpenSegment(path, os.open(path, flags, 0o644), 0, hour_ms, epoch)
        self._open[epoch, hour_ms] = segment
        return segment

    def _key(self, path: Path) -> str:
        return str(path.relative_to(self._dir))

    # --- closing -----------------------------------------------------------------------------

    def ripen(self, reached_ms: int) -> bool:
        """Close what is full, and whose hour is over; events up to ``reached_ms`` are written."""
        found = [
            s
            for s in self._open.values()
            if s.length >= self._segment_bytes or s.hour_ms + HOUR_MS + LATE_MS <= reached_ms
        ]
        rest = [s for s in self._open.values() if s not in found]
        if len(rest) > OPEN_MAX:
            found += sorted(rest, key=lambda s: s.hour_ms)[: len(rest) - OPEN_MAX]
        return self._close(found)

    def end_epoch(self, epoch: int) -> bool:
        """No more of this epoch will come."""
        return self._close([s for s in self._open.values() if s.epoch == epoch])

    def end(self) -> None:
        self._close(list(self._open.values()))

    def release(self) -> None:
        """Close the files and leave them as they are."""
        for segment in self._open.values():
            os.close(segment.fd)
        self._open.clear()

    def _close(self, found: list[OpenSegment]) -> bool:
        for segment in found:
            del self._open[segment.epoch, segment.hour_ms]
            os.close(segment.fd)
            self.ripe.append(segment.path)
        return bool(found)

    @property
    def busy(self) -> set[Path]:
        """Files that nobody else may remove."""
        return {s.path for s in self._open.values()} | set(self.ripe)
