"""The writer process of the history, which writes the events in the spool into segment files.

``Writer`` combines the steps for one state folder: lines, sealing, retention. ``Follower`` reads
the spool files of all epochs in chunks. An epoch is finished once its daemon has stopped (or begun
another file) and all of its files have been read.

``Position`` has the spool position, the last event number, and the lengths of open segments. It is
saved after the lines are written. If the writer is killed before the save, the next writer resumes
at the old position, truncates the segments to the saved lengths, and writes the same lines again.

``Output`` appends lines to the file of their hour. Every write has an explicit offset, so a retry
overwrites a partial write, and a reader never sees bytes change. When a file is full, or the clock
was set back, the next file begins, so that the numbers of files show in which order events were
written. A file that gets no more lines is closed and passed to the sealer.

``Sealer`` compresses such a file, piece by piece, into a segment that never changes. The segment
gets its name when it is complete and synced; then the open file is removed. Sealing can start
again.

Invariants:

* Lines are written, then the position is saved, then the position in memory is updated. After a
  failure between these steps, the same lines are written again with the same numbers.
* A spool file is removed after its lines are written and the saved position is behind it.
* Records that are unreadable or invalid are counted in a ``dropped`` event and logged.

The daemon starts and watches ``python -m tickwheel.history.writer`` at a low priority. An operator
can also run it, to finish the spool of a daemon that has ended. Standard input is a pipe from the
daemon: a byte wakes the writer, and the end of the pipe means that the daemon has ended. Then the
writer writes the rest, seals it once no daemon holds the spool, and ends.

A lock ensures that a state folder has one writer at a time. A second writer waits until the first
one, or its own daemon, has ended. If the folder is removed or moved, the writer restarts.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from tickwheel.clock import Now, Sources, sources
from tickwheel.disk import Use, measure, sync
from tickwheel.history import segments, spool
from tickwheel.history.lines import MALFORMED, EventKind, Renderer, begins_set_back
from tickwheel.history.segments import (
    HOUR_MS,
    PARTIAL_PREFIX,
    Limits,
    SegmentName,
    Upkeep,
    hour_folder,
    hour_of,
    replace_file,
    safe_node,
    state_folder,
)
from tickwheel.history.spool import SpoolName
from tickwheel.model.policies import duration_ms

SEGMENT_BYTES = 64 << 20
RETENTION_S = 72 * 3600.0
CLEAN_HOUR = 4
DISK_WARN, DISK_CLEAN = 0.75, 0.85
"""The used share of the disk above which the writer warns, and above which it removes files."""


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """Options of a daemon's writer. Without ``retention_s``, ``bytes_max`` and ``disk_clean``, the
    writer removes no history."""

    folder: str
    node: str
    shard: int = 0
    segment_bytes: int = SEGMENT_BYTES
    retention_s: float | None = None
    bytes_max: int | None = None
    clean_hour: int = CLEAN_HOUR
    disk_warn: float = 1.0
    disk_clean: float = 1.0

    @property
    def limits(self) -> Limits:
        retention_ms = None if self.retention_s is None else duration_ms(self.retention_s)
        return Limits(retention_ms, self.bytes_max, self.disk_warn, self.disk_clean)

    def command(self) -> list[str]:
        """Return the writer's command line. Its standard input must be a pipe that ends with the
        daemon. Its standard error contains lines for the daemon's log."""
        command = [sys.executable, "-m", "tickwheel.history.writer"]
        for option in fields(WriterOptions):
            if (value := getattr(self, option.name)) is not None:
                command += [_flag(option.name), str(value)]
        return command


def _flag(name: str) -> str:
    return "--dir" if name == "folder" else f"--{name.replace('_', '-')}"


def parse_options(arguments: Sequence[str] | None) -> WriterOptions:
    """Parse the options of the writer's command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tickwheel.history.writer", description=__doc__.partition("\n")[0]
    )
    kinds = {"str": str, "int": int, "float": float}
    for option in fields(WriterOptions):
        is_required = option.default is MISSING
        parser.add_argument(
            _flag(option.name), dest=option.name, type=kinds[str(option.type).split()[0]],
            required=is_required, default=None if is_required else option.default,
        )  # fmt: skip
    return WriterOptions(**vars(parser.parse_args(arguments)))


# --- the position --------------------------------------------------------------------------------


POSITION = "position.json"
VERSION = 1
EPOCHS_MAX = 512
"""Maximum number of epochs whose last event number is kept. A new store can repeat an epoch, and
its event numbers must then continue."""


@dataclass(slots=True)
class EpochPosition:
    """The position in one epoch: spool file, offset of its next array, number of the last event."""

    file: int = 0
    offset: int = 0
    seq: int = 0
    last_ms: int = 0
    """Time of the newest event."""


@dataclass(slots=True)
class Position:
    """The state that a writer saves for its next start."""

    number: int = 0
    """Number of the newest segment."""
    epochs: dict[int, EpochPosition] = field(default_factory=dict)
    """Epoch → position in it. The epoch written last is at the end."""
    open: dict[str, int] = field(default_factory=dict)
    """Open segments: path below the history's folder → length in bytes."""
    cleaned_ms: int = 0
    """Time at which the daily clean-up last ran."""

    def epoch_position(self, epoch: int) -> EpochPosition:
        return self.epochs.get(epoch) or EpochPosition()

    def with_position(self, epoch: int, progress: EpochPosition) -> dict[int, EpochPosition]:
        """Return ``epochs`` with a new position for ``epoch``."""
        others = {other: position for other, position in self.epochs.items() if other != epoch}
        return others | {epoch: progress}

    def save(self, folder: Path) -> None:
        """Save the position. If this raises OSError, the saved position is unchanged."""
        for epoch in list(self.epochs)[:-EPOCHS_MAX]:
            del self.epochs[epoch]
        text = json.dumps(
            {
                "v": VERSION,
                "number": self.number,
                "epochs": {
                    str(epoch): [progress.file, progress.offset, progress.seq, progress.last_ms]
                    for epoch, progress in self.epochs.items()
                },
                "open": self.open,
                "cleaned_ms": self.cleaned_ms,
            }
        )
        replace_file(folder / POSITION, text)


def load_position(folder: Path) -> Position | None:
    """Return the saved position, or None if it is missing or unreadable. Raise OSError."""
    try:
        saved = json.loads((folder / POSITION).read_bytes())
        if saved["v"] != VERSION:
            return None
        return Position(
            number=int(saved["number"]),
            epochs={
                int(epoch): EpochPosition(*map(int, p)) for epoch, p in saved["epochs"].items()
            },
            open={str(path): int(length) for path, length in saved["open"].items()},
            cleaned_ms=int(saved["cleaned_ms"]),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


# --- open segments -------------------------------------------------------------------------------


OPEN_MAX = 4
"""Maximum number of hours with open segments: the current hour, the previous one, and others in
case clocks are set back."""
LATE_MS = 60_000
"""How long an hour stays open after it ends, in milliseconds."""
PIECE_BYTES = 1 << 20
"""Number of bytes of an open segment that one step seals."""
GZIP_LEVEL = 3
_GZIP = 31
"""The zlib setting for a gzip header without a time, so that equal lines result in equal bytes."""


@dataclass(slots=True)
class OpenSegment:
    """A segment to which lines are appended."""

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
        self.to_seal: list[Path] = []
        """Closed files, which must be sealed."""

    def resume(self, position: Position | None) -> None:
        """Continue with the files of an earlier writer. Lines after its position are removed: they
        are still in the spool, and will be written again. Without a position all lines are kept."""
        own_segments = [
            segment
            for segment in segments.find(self._dir, shard=self._shard)
            if segment.name.node == self._node
        ]
        saved = position or Position(max((s.name.number for s in own_segments), default=0))
        self.number = saved.number
        for segment in own_segments:
            if segment.name.sealed:
                # A writer that was killed during sealing has left the open file.
                open_name = str(segment.name._replace(sealed=False))
                segment.path.with_name(open_name).unlink(missing_ok=True)
                continue
            length = saved.open.get(self._key(segment.path))
            if length is not None:
                self._reopen(segment, length)
            elif segment.name.number > saved.number:
                segment.path.unlink()
            else:
                self.to_seal.append(segment.path)
        for part in self._dir.glob(f"dt=*/hour=*/{PARTIAL_PREFIX}{self._node}-s{self._shard}-e*"):
            part.unlink(missing_ok=True)

    def _reopen(self, segment: segments.Segment, length: int) -> None:
        key = segment.name.epoch, segment.hour_ms
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < length or key in self._open:
                # A power cut has removed the end of the file; keep the rest.
                os.close(fd)
                self.to_seal.append(segment.path)
                return
            os.ftruncate(fd, length)
        except OSError:
            os.close(fd)
            raise
        self._open[key] = OpenSegment(segment.path, fd, length, segment.hour_ms, key[0])

    # --- writing -----------------------------------------------------------------------------

    def write(self, epoch: int, texts: dict[int, list[str]]) -> dict[str, int]:
        """Append lines to the segments of their hours. Return the new lengths of all open segments.
        Lines count as written only after ``commit_lengths``. If writing fails, raise OSError; the
        caller can write the same lines again."""
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

    def commit_lengths(self, lengths: dict[str, int]) -> None:
        """Apply the lengths that ``write`` returned. Call this after they were saved."""
        for segment in self._open.values():
            segment.length = lengths[self._key(segment.path)]

    def lengths(self) -> dict[str, int]:
        return {self._key(s.path): s.length for s in self._open.values()}

    def _forget_removed(self) -> None:
        """Forget open files that were removed, so that lines go to a new, visible file."""
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

    def close_finished(self, reached_ms: int) -> bool:
        """Close full segments, and segments of hours that ended before ``reached_ms``, the time up
        to which events are written. Return whether any segment was closed."""
        finished = [
            s
            for s in self._open.values()
            if s.length >= self._segment_bytes or s.hour_ms + HOUR_MS + LATE_MS <= reached_ms
        ]
        unfinished = [s for s in self._open.values() if s not in finished]
        if len(unfinished) > OPEN_MAX:
            finished += sorted(unfinished, key=lambda s: s.hour_ms)[: len(unfinished) - OPEN_MAX]
        return self._close(finished)

    def end_epoch(self, epoch: int) -> bool:
        """Close the segments of an epoch that has ended, or whose clock was set back."""
        return self._close([s for s in self._open.values() if s.epoch == epoch])

    def end(self) -> None:
        self._close(list(self._open.values()))

    def release(self) -> None:
        """Close the files without sealing them."""
        for segment in self._open.values():
            os.close(segment.fd)
        self._open.clear()

    def _close(self, closed: list[OpenSegment]) -> bool:
        for segment in closed:
            del self._open[segment.epoch, segment.hour_ms]
            os.close(segment.fd)
            self.to_seal.append(segment.path)
        return bool(closed)

    @property
    def busy(self) -> set[Path]:
        """The files that retention must not remove."""
        return {s.path for s in self._open.values()} | set(self.to_seal)


# --- sealing ---------------------------------------------------------------------------------


class Sealer:
    """Compresses closed segments, one after the other."""

    def __init__(self) -> None:
        self._waiting: deque[Path] = deque()
        self._sealing: Generator[None] | None = None
        """The running sealing of the first waiting segment, or None."""
        self.sealed = 0

    def add(self, path: Path) -> None:
        self._waiting.append(path)

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    @property
    def paths(self) -> set[Path]:
        """The files that retention must not remove."""
        return set(self._waiting)

    def step(self) -> bool:
        """Seal one piece. Return False if there was none. After OSError, call again later."""
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
        """Abandon a partly sealed segment; the next ``step`` starts it again."""
        if self._sealing is not None:
            self._sealing.close()
            self._sealing = None


def _seal(source: Path) -> Generator[None]:
    """Seal one segment, a piece at a time. If sealing is abandoned, only ``source`` remains."""
    target = source.with_name(source.name + ".gz")
    try:
        reading = source.open("rb")
    except FileNotFoundError:
        return
    with reading:
        bytes_left = _whole_bytes(reading.fileno())
        # The file is empty, or it was sealed and only its removal was interrupted.
        if bytes_left and not target.exists():
            part = source.with_name(f"{PARTIAL_PREFIX}{target.name}")
            try:
                with open(part, "wb", opener=partial(os.open, mode=0o644)) as writing:
                    compress = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP)
                    while bytes_left:
                        yield
                        data = reading.read(min(PIECE_BYTES, bytes_left))
                        bytes_left -= len(data) if data else bytes_left
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
    """Return the bytes of a file up to the end of its last complete line."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - PIECE_BYTES)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


# --- from spool to segments ----------------------------------------------------------------------


CAUGHT_UP_BYTES_MAX = 64 << 10
"""If a step processes fewer bytes of the spool than this, the writer has caught up."""
UPKEEP_MS = 1_000
TIME_MS_MAX = 4_102_444_800_000
"""1 January 2100; a later time counts as damage."""
DAMAGE_MESSAGES_MAX = 20
"""Maximum number of messages about damage that are logged."""

Log = Callable[[str], None]


class Writer:
    """Writes, seals and removes the files of one state folder."""

    def __init__(
        self, options: WriterOptions, log: Log, *,
        clocks: Sources | None = None, measured: Callable[[Path], Use] = measure,
    ) -> None:  # fmt: skip
        node, shard = options.node, options.shard
        self._dir = Path(options.folder)
        self._folder = state_folder(self._dir, node, shard)
        self._clocks = clocks = clocks or sources()
        self._now_ms = clocks.wall_ms
        self._upkeep = Upkeep(self._dir, options.limits, options.clean_hour, log, measured)
        self.output = Output(self._dir, node, shard, options.segment_bytes)
        self.sealer = Sealer()
        position = load_position(self._folder)
        self.output.resume(position)
        if position is None:
            position = self._first_position(shard)
        self.follower = Follower(self._folder, self.output, position, options, self._now_ms, log)
        self.follower.save()
        self._upkeep_ms = 0
        self._newest = Now(0, 0)
        """Time of the newest event, and when it was noticed."""

    def step(self) -> int:
        """Write some lines and seal a piece. Return the number of spool bytes that were processed,
        1 if only sealing remains, or 0 if there is nothing to do. Raise OSError."""
        processed = self.follower.step()
        behind = processed >= CAUGHT_UP_BYTES_MAX
        self._close_finished(self.follower.newest_ms if behind else self._daemon_ms())
        if self.sealer.step() and not self.sealer.busy:
            self._upkeep.sealed(self._now_ms(), self._busy())
        return processed or int(self.sealer.busy)

    def finish(self) -> bool:
        """Write and seal everything. Return False if a daemon still holds the spool. Raise
        OSError."""
        while self.step():
            pass
        if not self.follower.held:
            self.output.end()
        self._close_finished(self._daemon_ms())
        self.follower.save()
        while self.sealer.step():
            pass
        return not self.follower.held

    def _first_position(self, shard: int) -> Position:
        """Return the position to start at if none was saved: after the last event in segments."""
        epochs = {name.epoch for name in spool.files(self._folder)}
        positions = {
            epoch: EpochPosition(seq=seq)
            for epoch, seq in segments.last_seqs(self._dir, shard, epochs).items()
            if seq
        }
        return Position(number=self.output.number, epochs=positions)

    def close(self) -> None:
        """Close the files. The next writer continues with them."""
        self.sealer.abandon()
        self.output.release()

    def _close_finished(self, reached_ms: int) -> None:
        if self.output.close_finished(reached_ms):
            self.follower.save()
        while self.output.to_seal:
            self.sealer.add(self.output.to_seal.pop(0))
        now_ms = self._now_ms()
        if abs(now_ms - self._upkeep_ms) >= UPKEEP_MS:
            self._upkeep_ms = now_ms
            clean_ms = self._daemon_ms()
            if self._upkeep.is_daily_due(clean_ms, self.follower.position.cleaned_ms):
                self.follower.position.cleaned_ms = clean_ms
                self.follower.save()
                self._upkeep.daily(clean_ms, self._busy())
            self._upkeep.check_disk_if_due(now_ms, self._busy())

    def _daemon_ms(self) -> int:
        """Return the time of the newest event plus the steady time since, or the wall clock if that
        is earlier. A wall clock that is later may be wrong, and the daemon may not follow it."""
        mono_ms, newest_ms = self._clocks.mono_ms(), self.follower.newest_ms
        if newest_ms != self._newest.now_ms:
            self._newest = Now(newest_ms, mono_ms)
        return min(self._now_ms(), newest_ms + mono_ms - self._newest.mono_ms)

    def _busy(self) -> set[Path]:
        return self.output.busy | self.sealer.paths


# --- following the spool ---------------------------------------------------------------------


class Follower:
    """Reads one state folder for its writer."""

    def __init__(
        self, folder: Path, output: Output, position: Position, options: WriterOptions,
        now_ms: Callable[[], int], log: Log,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._output = output
        self.position = position
        self._options = options
        self._now_ms = now_ms
        self._log = log
        self._chunk_bytes = spool.CHUNK_BYTES
        self._renderers: dict[int, Renderer] = {}
        self._damage_messages = 0
        self.events = 0
        """Number of lines written since the start."""
        self.held = False
        """Whether a daemon could still append to the spool at the last ``step``."""
        self.newest_ms = next(reversed(position.epochs.values()), EpochPosition()).last_ms
        """Time of the last event written."""

    def step(self) -> int:
        """Write the lines of one chunk. Return the number of spool bytes that were processed. If
        OSError is raised, nothing is lost; call again later."""
        self.held = False
        for epoch, names in self._by_epoch().items():
            processed = self._step(epoch, names)
            if processed:
                return processed
        return 0

    def _by_epoch(self) -> dict[int, list[SpoolName]]:
        names: dict[int, list[SpoolName]] = {}
        for name in spool.files(self._folder):
            if name.number < self.position.epoch_position(name.epoch).file:
                # The file was read completely; only its removal was interrupted.
                (self._folder / str(name)).unlink(missing_ok=True)
            else:
                names.setdefault(name.epoch, []).append(name)
        return names

    def _step(self, epoch: int, names: list[SpoolName]) -> int:
        # Change a copy, because a failed write must leave the position unchanged.
        progress = replace(self.position.epoch_position(epoch))
        name = names[0]
        path = self._folder / str(name)
        if name.number != progress.file:
            progress = replace(progress, file=name.number, offset=0)
        # Check this before reading: if nobody holds the file now, the chunk includes its end.
        is_held = len(names) == 1 and spool.is_held(path)
        self.held = self.held or is_held
        chunk = spool.read_chunk(path, progress.offset, self._chunk_bytes)
        if chunk.arrays:
            if begins_set_back(chunk.arrays[0][1]):
                self._output.end_epoch(epoch)
            self._write_lines(epoch, progress, [r for _, records in chunk.arrays for r in records])
            return self._adopt(epoch, replace(progress, offset=chunk.offset), chunk.offset)
        size = path.stat().st_size
        lost_bytes = size - chunk.offset
        if chunk.damage or (lost_bytes and not is_held):
            reason = chunk.damage or "its end is torn"
            self._log_damage(f"{lost_bytes} bytes of {name} are lost: {reason}")
            record = [
                EventKind.DROPPED,
                progress.last_ms or self._now_ms(),
                None,
                f"{reason}: {lost_bytes} bytes",
            ]
            self._write_lines(epoch, progress, [record])
            return self._adopt(epoch, replace(progress, offset=size), lost_bytes)
        if is_held:
            return 0
        self._remove(epoch, progress, path, last=len(names) == 1)
        return 1

    # --- writing -----------------------------------------------------------------------------

    def _write_lines(self, epoch: int, progress: EpochPosition, records: list[Any]) -> None:
        """Write the lines of ``records``, and advance ``progress``."""
        texts: dict[int, list[str]] = {}
        renderer = self._renderers.get(epoch)
        if renderer is None:
            node, shard = self._options.node, self._options.shard
            renderer = self._renderers[epoch] = Renderer(node, shard, epoch)
        for record in records:
            try:
                time_ms = record[1]
                lines = renderer.render(record, progress.seq + 1)
                if not 0 <= time_ms < TIME_MS_MAX:
                    raise ValueError(f"the time {time_ms} is not between 0 and {TIME_MS_MAX}")
            except MALFORMED as error:
                self._log_damage(f"a record is invalid: {error!r}")
                time_ms = progress.last_ms or self._now_ms()
                dropped = [EventKind.DROPPED, time_ms, None, "a record is invalid"]
                lines = renderer.render(dropped, progress.seq + 1)
            if lines:
                progress.seq += len(lines)
                progress.last_ms = time_ms
                hour_ms = hour_of(time_ms)
                if hour_ms in texts:
                    texts[hour_ms] += lines
                else:
                    texts[hour_ms] = lines
        self._lengths = self._output.write(epoch, texts)
        self._written = sum(map(len, texts.values()))

    def _adopt(self, epoch: int, progress: EpochPosition, processed: int) -> int:
        self._save(self.position.with_position(epoch, progress), self._lengths)
        self._output.commit_lengths(self._lengths)
        self.events += self._written
        self.newest_ms = progress.last_ms
        return processed

    def save(self) -> None:
        """Save the position with the current open segments. Raise OSError."""
        self._save(self.position.epochs, self._output.lengths())

    def _save(self, epochs: dict[int, EpochPosition], lengths: dict[str, int]) -> None:
        number = self._output.number
        position = replace(self.position, number=number, epochs=epochs, open=lengths)
        position.save(self._folder)
        self.position = position

    def _remove(self, epoch: int, progress: EpochPosition, path: Path, *, last: bool) -> None:
        """Sync the position, then remove a spool file that was read completely."""
        if last:
            self._output.end_epoch(epoch)
            self._renderers.pop(epoch, None)
        progress = replace(progress, file=progress.file + 1, offset=0)
        self._save(self.position.with_position(epoch, progress), self._output.lengths())
        sync(self._folder / POSITION)
        path.unlink(missing_ok=True)

    def _log_damage(self, text: str) -> None:
        self._damage_messages += 1
        if self._damage_messages <= DAMAGE_MESSAGES_MAX:
            self._log(text)


# --- the process ---------------------------------------------------------------------------------


LOCK = "lock"
"""Name of the locked file in the state folder."""
NICE = 10
IDLE_S_MIN, IDLE_S_MAX = 0.02, 0.5
GATHER_S = 0.1
"""Seconds to wait when the writer has caught up, so that small batches are combined."""
TROUBLE_S_MIN, TROUBLE_S_MAX = 0.25, 5.0
GONE_PATIENCE_S = 5.0
"""Seconds to wait, after standard input has ended, until the daemon's lock ends."""
TROUBLE_PATIENCE_S = 15.0
"""Seconds to wait instead while the disk fails. The spool keeps the rest."""
LOCK_POLL_S = 0.05


class Process:
    """Runs the writer in a loop until standard input ends."""

    def __init__(self, options: WriterOptions, lock: Lock, log: Log) -> None:
        self._options = options
        self._lock = lock
        self._log = log
        self._writer: Writer | None = None
        self._stdin_ended_s: float | None = None
        self._trouble = ""

    def run(self) -> int:
        """Run the writer and return its exit code. 0: everything is written and sealed, or another
        writer has the folder. 1: the spool is not empty, or the folder is missing."""
        wait_s, idle_s, trouble_s = 0.0, IDLE_S_MIN, TROUBLE_S_MIN
        if not self._lock.take(self._daemon_ended_within):
            return 0
        while True:
            self._wait(wait_s)
            if self._lock.is_gone:
                self._log("its folder was removed or moved; the writer ends")
                return int(self._stdin_ended_s is None)
            try:
                writer = self._writer = self._writer or Writer(self._options, self._log)
                if self._stdin_ended_s is not None and writer.finish():
                    self._recovered()
                    return 0
                processed = writer.step()
                self._recovered()
                trouble_s = TROUBLE_S_MIN
            except OSError as error:
                self._failed(error)
                wait_s, trouble_s = trouble_s, min(trouble_s * 2, TROUBLE_S_MAX)
            else:
                if processed >= CAUGHT_UP_BYTES_MAX or (processed and writer.sealer.busy):
                    wait_s = 0.0
                elif processed:
                    wait_s, idle_s = GATHER_S, IDLE_S_MIN
                else:
                    wait_s, idle_s = idle_s, min(idle_s * 2, IDLE_S_MAX)
            if self._is_over():
                return 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _wait(self, wait_s: float) -> None:
        if self._stdin_ended_s is not None:
            time.sleep(min(wait_s, GATHER_S))
            return
        # After a wake-up, pause briefly to gather more events, unless the daemon has ended.
        ready, _, _ = select.select([0], [], [], wait_s)
        if not ready:
            return
        try:
            data = os.read(0, 4096)
        except OSError:
            data = b""
        if data:
            time.sleep(min(wait_s, IDLE_S_MIN))
        else:
            self._stdin_ended_s = time.monotonic()

    def _daemon_ended_within(self, wait_s: float) -> bool:
        """Wait at most ``wait_s`` seconds. Return whether the daemon has ended."""
        self._wait(wait_s)
        return self._stdin_ended_s is not None

    def _is_over(self) -> bool:
        if self._stdin_ended_s is None:
            return False
        patience_s = TROUBLE_PATIENCE_S if self._trouble else GONE_PATIENCE_S
        return time.monotonic() - self._stdin_ended_s > patience_s

    def _failed(self, error: OSError) -> None:
        if not self._trouble:
            self._log(f"cannot write history: {error}; it stays in the spool, retrying")
        self._trouble = str(error)

    def _recovered(self) -> None:
        if self._trouble:
            self._trouble = ""
            self._log("history is written again")


class Lock:
    """The lock of a state folder, held until the process ends. Methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1
        self._open()

    def take(self, is_over: Callable[[float], bool]) -> bool:
        """Wait for the lock. Return False if the daemon has ended and another writer holds the
        lock; that writer will write the whole spool. ``is_over`` waits at most the given seconds,
        and returns whether the daemon has ended."""
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_over(LOCK_POLL_S) and not self._has_orphaned_files():
                    return False
            else:
                if not self.is_gone:
                    return True
                os.close(self._fd)
                self._open()

    @property
    def is_gone(self) -> bool:
        """Whether the folder was removed or moved."""
        try:
            current = os.stat(self._folder / LOCK)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return not os.path.samestat(current, os.fstat(self._fd))

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _has_orphaned_files(self) -> bool:
        """Return whether the spool has files that no running daemon holds. The other writer may be
        about to end without writing them. Files of a running daemon are left to its own writer."""
        names = spool.files(self._folder)
        living = {n.epoch for n in names if spool.is_held(self._folder / str(n))}
        return any(name.epoch not in living for name in names)


def log_line(text: str) -> None:
    """Write one line for the daemon's log."""
    try:
        os.write(2, f"history writer: {text}\n".encode("utf-8", "replace"))
    except OSError:
        return  # nobody reads standard error any longer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the writer. Return its exit code."""
    options = parse_options(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        # The signals are meant for the daemon; when it ends, this process ends properly.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    folder = state_folder(options.folder, options.node, options.shard)
    try:
        process = Process(options, Lock(folder), log_line)
    except OSError as error:
        log_line(f"cannot begin: {error}")
        return 1
    try:
        return process.run()
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main())
