"""From spool to segments: what the writer process does, step by step, for one state folder.

``Writer`` puts it together: lines, sealing, retention. ``Follower`` reads the spool files of all
epochs, chunk by chunk. An epoch is over when the daemon that wrote it is gone, or has begun another
file, and everything is read. Invariants:

* Lines are written, then the position is saved, then both are held in memory. Whatever fails or
  is killed in between, the same lines are written again with the same numbers.
* A spool file is removed when what came from it is written and the position says so.
* What cannot be read or understood is counted in a ``dropped`` event and logged. Nothing is left
  out silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tickwheel.clock import sources
from tickwheel.disk import Use, measure
from tickwheel.history import segments, spool
from tickwheel.history.lines import MALFORMED, Kind, Renderer
from tickwheel.history.segments import hour_of, state_folder
from tickwheel.history.spool import SpoolName
from tickwheel.history.writer.open_segments import Output, Sealer
from tickwheel.history.writer.position import POSITION, Place, Position, load, sync
from tickwheel.history.writer.retention import Limits, Upkeep

LITTLE_BYTES = 64 << 10
"""Bytes of spool; a step that has taken fewer is not behind."""
UPKEEP_MS = 1_000
TIME_MS_MAX = 4_102_444_800_000
"""1 January 2100; a later time is taken for damage."""
DAMAGES_LOGGED_MAX = 20
"""Damages that are logged: they come in crowds."""

Log = Callable[[str], None]


class Writer:
    """Writes, seals and removes the files of one state folder."""

    def __init__(
        self,
        history_dir: Path,
        node: str,
        shard: int,
        *,
        segment_bytes: int,
        limits: Limits,
        clean_hour: int,
        log: Log,
        now_ms: Callable[[], int] | None = None,
        measured: Callable[[Path], Use] = measure,
    ) -> None:
        self._dir = history_dir
        self._folder = state_folder(history_dir, node, shard)
        self._now_ms = now_ms or sources().wall_ms
        self._upkeep = Upkeep(
            history_dir, limits, clean_hour=clean_hour, log=log, measured=measured
        )
        self.output = Output(history_dir, node, shard, segment_bytes)
        self.sealer = Sealer()
        position = load(self._folder)
        self.output.resume(position)
        if position is None:
            position = self._first_position(shard)
        self.follower = Follower(
            self._folder,
            self.output,
            position,
            node=node,
            shard=shard,
            now_ms=self._now_ms,
            log=log,
        )
        self.follower.save()
        self._upkeep_ms = 0

    def step(self) -> int:
        """Write some lines and seal a piece; the bytes of spool that were dealt with, or 1 when
        there is more to seal. 0: there is nothing to do. Raises OSError."""
        done = self.follower.step()
        behind = done >= LITTLE_BYTES
        self._ripen(self.follower.newest_ms if behind else self._now_ms())
        if self.sealer.step() and not self.sealer.busy:
            self._upkeep.sealed(self._now_ms(), self._busy())
        return done or int(self.sealer.busy)

    def finish(self) -> bool:
        """Write and seal everything; whether all could be sealed. Raises OSError."""
        while self.step():
            pass
        if not self.follower.held:
            self.output.end()
        self._ripen(self._now_ms())
        self.follower.save()
        while self.sealer.step():
            pass
        return not self.follower.held

    def _first_position(self, shard: int) -> Position:
        """The position when none was saved: behind the highest numbers in the segments."""
        epochs = {name.epoch for name in spool.files(self._folder)}
        places: dict[int, Place] = {}
        for segment in segments.find(self._dir) if epochs else []:
            name = segment.name
            if name.shard == shard and name.epoch in epochs:
                place = places.setdefault(name.epoch, Place())
                place.seq = max(place.seq, segments.last_seq(segment.path))
        return Position(number=self.output.number, epochs=places)

    def close(self) -> None:
        """Close the files as they are; the next writer goes on from there."""
        self.sealer.abandon()
        self.output.release()

    def _ripen(self, reached_ms: int) -> None:
        if self.output.ripen(reached_ms):
            self.follower.save()
        while self.output.ripe:
            self.sealer.add(self.output.ripe.pop(0))
        now_ms = self._now_ms()
        if abs(now_ms - self._upkeep_ms) >= UPKEEP_MS:
            self._upkeep_ms = now_ms
            if self._upkeep.is_hour(now_ms, self.follower.position.cleaned_ms):
                self.follower.position.cleaned_ms = now_ms
                self.follower.save()
                self._upkeep.daily(now_ms, self._busy())
            self._upkeep.now_and_then(now_ms, self._busy())

    def _busy(self) -> set[Path]:
        return self.output.busy | self.sealer.paths


# --- following the spool ---------------------------------------------------------------------


class Follower:
    """Reads one state folder for its writer."""

    def __init__(
        self,
        folder: Path,
        output: Output,
        position: Position,
        *,
        node: str,
        shard: int,
        now_ms: Callable[[], int],
        log: Log,
        chunk_bytes: int = spool.CHUNK_BYTES,
    ) -> None:
        self._folder = folder
        self._output = output
        self.position = position
        self._node, self._shard = node, shard
        self._now_ms = now_ms
        self._log = log
        self._chunk_bytes = chunk_bytes
        self._renderers: dict[int, Renderer] = {}
        self._damages = 0
        self.events = 0
        """Lines written since the start."""
        self.held = False
        """Whether some daemon may append more, as far as the last ``step`` saw."""
        self.newest_ms = 0
        """The time of the event that was written last."""

    def step(self) -> int:
        """Take what one chunk holds; the bytes of spool that were dealt with, 0: nothing is there.

        Raises OSError: nothing is lost, call again later.
        """
        self.held = False
        for epoch, names in self._by_epoch().items():
            done = self._step(epoch, names)
            if done:
                return done
        return 0

    def _by_epoch(self) -> dict[int, list[SpoolName]]:
        found: dict[int, list[SpoolName]] = {}
        for name in spool.files(self._folder):
            if name.number < self.position.place(name.epoch).file:
                # Read to its end; only the removal was cut off.
                (self._folder / str(name)).unlink(missing_ok=True)
            else:
                found.setdefault(name.epoch, []).append(name)
        return found

    def _step(self, epoch: int, names: list[SpoolName]) -> int:
        # A copy: should writing fail, the position must be as it was.
        place = replace(self.position.place(epoch))
        name = names[0]
        path = self._folder / str(name)
        if name.number != place.file:
            place = replace(place, file=name.number, offset=0)
        # Asked before reading: what is appended after the answer cannot be the last.
        held = len(names) == 1 and spool.is_held(path)
        self.held = self.held or held
        chunk = spool.read_chunk(path, place.offset, self._chunk_bytes)
        if chunk.arrays:
            self._take(epoch, place, [r for _, records in chunk.arrays for r in records])
            return self._adopt(epoch, replace(place, offset=chunk.offset), chunk.offset)
        size = path.stat().st_size
        rest = size - chunk.offset
        if chunk.damaged or (rest and not held):
            why = chunk.damaged or "the end is torn"
            self._log_damage(f"{rest} bytes of {name} are lost: {why}")
            record = [Kind.DROPPED, place.last_ms or self._now_ms(), None, f"{why}: {rest} bytes"]
            self._take(epoch, place, [record])
            return self._adopt(epoch, replace(place, offset=size), rest)
        if held:
            return 0
        self._remove(epoch, place, path, last=len(names) == 1)
        return 1

    # --- writing -----------------------------------------------------------------------------

    def _take(self, epoch: int, place: Place, records: list[Any]) -> None:
        """Write the lines of ``records``, and count on in ``place``."""
        texts: dict[int, list[str]] = {}
        renderer = self._renderers.get(epoch)
        if renderer is None:
            renderer = self._renderers[epoch] = Renderer(self._node, self._shard, epoch)
        for record in records:
            try:
                time_ms = record[1]
                lines = renderer.render(record, place.seq + 1)
                if not 0 <= time_ms < TIME_MS_MAX:
                    raise ValueError(f"the time {time_ms} is none")
            except MALFORMED as error:
                self._log_damage(f"a record was not understood: {error!r}")
                time_ms = place.last_ms or self._now_ms()
                dropped = [Kind.DROPPED, time_ms, None, "a record was not understood"]
                lines = renderer.render(dropped, place.seq + 1)
            if lines:
                place.seq += len(lines)
                place.last_ms = time_ms
                hour_ms = hour_of(time_ms)
                if hour_ms in texts:
                    texts[hour_ms] += lines
                else:
                    texts[hour_ms] = lines
        self._lengths = self._output.write(epoch, texts)
        self._written = sum(map(len, texts.values()))

    def _adopt(self, epoch: int, place: Place, done: int) -> int:
        self._save(epoch, place)
        self._output.keep(self._lengths)
        self.events += self._written
        self.newest_ms = place.last_ms
        return done

    def _save(self, epoch: int, place: Place) -> None:
        position = replace(
            self.position,
            number=self._output.number,
            epochs=self.position.moved(epoch, place),
            open=self._lengths,
        )
        position.save(self._folder)
        self.position = position

    def save(self) -> None:
        """Save the position with what the output has open now. Raises OSError."""
        position = replace(self.position, number=self._output.number, open=self._output.lengths())
        position.save(self._folder)
        self.position = position

    def _remove(self, epoch: int, place: Place, path: Path, *, last: bool) -> None:
        """Remove a spool file that was read to its end, once the position is on the disk."""
        if last:
            self._output.end_epoch(epoch)
            self._renderers.pop(epoch, None)
        self._lengths = self._output.lengths()
        self._save(epoch, replace(place, file=place.file + 1, offset=0))
        sync(self._folder / POSITION)
        path.unlink(missing_ok=True)

    def _log_damage(self, text: str) -> None:
        self._damages += 1
        if self._damages <= DAMAGES_LOGGED_MAX:
            self._log(text)
