"""What the writer writes: how far it is, the open segments, and sealed ones made of them.

``Position`` is spool position, last number given, and lengths of open segments, as one. It is saved
after the lines are written, so a writer that is killed in between finds the old position, cuts the
segments to the lengths in it, and writes the same lines with the same numbers again.

``Output`` appends lines to the file of their hour. Every write names its offset, so a write that
failed half way is repeated over itself, and a reader never sees other bytes at a place. A full file
is followed by the next one. A file that gets no more lines is ripe and goes to the sealer.

``Sealer`` makes a compressed segment of it that never changes, a piece at a time. The compressed
file appears under its name when it is whole and on the disk; then the open one goes. Cut off
anywhere, sealing begins again: the open one is still there.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tickwheel.history import segments
from tickwheel.history.segments import HOUR_MS, PART, SegmentName, hour_folder, safe_node

POSITION = "position.json"
VERSION = 1
EPOCHS_MAX = 512
"""Past epochs whose last numbers are kept: an epoch begins anew with a new store, and its numbers
must go on."""


@dataclass(slots=True)
class Place:
    """The place in one epoch: spool file, offset of its next array, number of the last event."""

    file: int = 0
    offset: int = 0
    seq: int = 0
    last_ms: int = 0
    """The time of the newest event."""


@dataclass(slots=True)
class Position:
    """All that a writer must know when it starts again."""

    number: int = 0
    """The number of the newest segment."""
    epochs: dict[int, Place] = field(default_factory=dict)
    """Epoch → its place; the epoch that was written last is at the end."""
    open: dict[str, int] = field(default_factory=dict)
    """Segments that are being written: path below the history's folder → length in bytes."""
    cleaned_ms: int = 0
    """When retention was last enforced at its hour."""

    def place(self, epoch: int) -> Place:
        return self.epochs.get(epoch) or Place()

    def moved(self, epoch: int, place: Place) -> dict[int, Place]:
        """The epochs, with one of them at another place."""
        others = {other: at for other, at in self.epochs.items() if other != epoch}
        return others | {epoch: place}

    def save(self, folder: Path) -> None:
        """Save the position. Raises OSError; then the former one is still there."""
        for epoch in list(self.epochs)[:-EPOCHS_MAX]:
            del self.epochs[epoch]
        text = json.dumps(
            {
                "v": VERSION,
                "number": self.number,
                "epochs": {
                    str(epoch): [place.file, place.offset, place.seq, place.last_ms]
                    for epoch, place in self.epochs.items()
                },
                "open": self.open,
                "cleaned_ms": self.cleaned_ms,
            }
        )
        part = folder / (PART + POSITION)
        try:
            part.write_text(text)
            part.rename(folder / POSITION)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def load_position(folder: Path) -> Position | None:
    """The position that was saved; None when there is none that can be read. Raises OSError."""
    try:
        saved = json.loads((folder / POSITION).read_bytes())
        if saved["v"] != VERSION:
            return None
        return Position(
            number=int(saved["number"]),
            epochs={int(epoch): Place(*map(int, p)) for epoch, p in saved["epochs"].items()},
            open={str(path): int(length) for path, length in saved["open"].items()},
            cleaned_ms=int(saved["cleaned_ms"]),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


# --- open segments -------------------------------------------------------------------------------


OPEN_MAX = 4
"""Hours that are open at once: the current and the last one, and for clocks that went back."""
LATE_MS = 60_000
"""How long after its end, in ms, an hour may still get events."""
PIECE_BYTES = 1 << 20
"""Bytes of an open segment that one step seals."""
GZIP_LEVEL = 3
_GZIP = 31
"""The zlib setting for a gzip header, without a time, so that equal lines are equal bytes."""


@dataclass(slots=True)
class OpenSegment:
    """A file that lines are being appended to."""

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
        """Files that are closed here, to be sealed."""

    def resume(self, position: Position | None) -> None:
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
        """Append lines to their hours; returns the new lengths of all open segments.

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
        """Keep the lengths that ``write`` returned: they were saved with the position."""
        for segment in self._open.values():
            segment.length = lengths[self._key(segment.path)]

    def lengths(self) -> dict[str, int]:
        return {self._key(s.path): s.length for s in self._open.values()}

    def _forget_removed(self) -> None:
        """Forget open files that somebody removed; lines go to a file that readers find."""
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
        """Close full segments and those of past hours; events up to ``reached_ms`` are written."""
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
        """Close the segments of an epoch, of which no more comes."""
        return self._close([s for s in self._open.values() if s.epoch == epoch])

    def end(self) -> None:
        self._close(list(self._open.values()))

    def release(self) -> None:
        """Close the files as they are."""
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
        """The files that nobody else may remove."""
        return {s.path for s in self._open.values()} | set(self.ripe)


# --- sealing ---------------------------------------------------------------------------------


class Sealer:
    """Seals segments one after the other."""

    def __init__(self) -> None:
        self._waiting: deque[Path] = deque()
        self._sealing: Generator[None] | None = None
        """The sealing of the first one that waits, if it has begun."""
        self.sealed = 0

    def add(self, path: Path) -> None:
        self._waiting.append(path)

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def paths(self) -> set[Path]:
        """The files that nobody else may remove."""
        return set(self._waiting)

    def step(self) -> bool:
        """Seal one piece; whether there was one. Raises OSError; call again later."""
        if not self._waiting:
            return False
        self._sealing = self._sealing or _seal(self._waiting[0])
        try:
            next(self._sealing)
        except StopIteration:
            self._sealing = None
            self._waiting.popleft()
            self.sealed += 1
        except BaseException:
            self._sealing = None
            raise
        return True

    def abandon(self) -> None:
        """Leave a half sealed segment; it begins again with the next ``step``."""
        if self._sealing is not None:
            self._sealing.close()
            self._sealing = None


def _seal(source: Path) -> Generator[None]:
    """Seal one segment, a piece at a time; one that is abandoned leaves nothing but ``source``."""
    target = source.with_name(source.name + ".gz")
    try:
        reading = source.open("rb")
    except FileNotFoundError:
        return
    with reading:
        left = _whole_bytes(reading.fileno())
        # Else there is nothing in it; or it was sealed, and only the removal was cut off.
        if left and not target.exists():
            part = source.with_name(f"{PART}{target.name}")
            try:
                with open(part, "wb", opener=partial(os.open, mode=0o644)) as writing:
                    compress = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP)
                    while left:
                        yield
                        data = reading.read(min(PIECE_BYTES, left))
                        left -= len(data) if data else left
                        writing.write(compress.compress(data))
                    writing.write(compress.flush())
                    writing.flush()
                    os.fdatasync(writing.fileno())
                part.rename(target)
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
                raise
    source.unlink()


def _whole_bytes(fd: int) -> int:
    """The bytes of a file up to the end of its last whole line."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - PIECE_BYTES)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
