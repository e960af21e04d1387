"""From spool to segments: chunk by chunk, each written and then remembered.

Follows the spool files of all epochs: an epoch is over when the daemon that wrote it is gone, or
has begun another file, and everything is read. Invariants:

* Lines are written, then the position is saved, then both are held in memory: whatever fails or
  is killed in between, the same lines are written again with the same numbers.
* A spool file is removed when what came from it is written and the position says so.
* What cannot be read or understood is counted in a ``dropped`` event and told; nothing is left
  out silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tickwheel.history import spool_read
from tickwheel.history.lines import MALFORMED, Renderer
from tickwheel.history.names import POSITION, SpoolName, hour_of
from tickwheel.history.records import Kind
from tickwheel.history.writer.open_segments import Output
from tickwheel.history.writer.position import Place, Position, sync

TIME_MS_MAX = 4_102_444_800_000
"""1 January 2100: a time beyond is no time."""

Log = Callable[[str], None]


class Follower:
    """One writer's reading of one state folder."""

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
        chunk_bytes: int = spool_read.CHUNK_BYTES,
    ) -> None:
        self._folder = folder
        self._output = output
        self.position = position
        self._node, self._shard = node, shard
        self._now_ms = now_ms
        self._log = log
        self._chunk_bytes = chunk_bytes
        self._renderers: dict[int, Renderer] = {}
        self._told = 0
        self.events = 0
        """Lines written since the start."""
        self.held = False
        """Some daemon may append more, as far as the last ``step`` saw."""
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
        for name in spool_read.files(self._folder):
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
        held = len(names) == 1 and spool_read.is_held(path)
        self.held = self.held or held
        chunk = spool_read.read_chunk(path, place.offset, self._chunk_bytes)
        if chunk.arrays:
            self._take(epoch, place, [r for _, records in chunk.arrays for r in records])
            return self._adopt(epoch, replace(place, offset=chunk.offset), chunk.offset)
        size = path.stat().st_size
        rest = size - chunk.offset
        if chunk.damaged or (rest and not held):
            why = chunk.damaged or "the end is torn"
            self._tell(f"{rest} bytes of {name} are lost: {why}")
            record = [Kind.DROPPED, place.last_ms or self._now_ms(), None, f"{why}: {rest} bytes"]
            self._take(epoch, place, [record])
            return self._adopt(epoch, replace(place, offset=size), rest)
        if held:
            return 0
        self._remove(epoch, place, path, last=len(names) == 1)
        return 1

    # --- writing -----------------------------------------------------------------------------

    def _take(self, epoch: int, place: Place, records: list[Any]) -> None:
        """Write what ``records`` say, and count on in ``place``."""
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
                self._tell(f"a record was not understood: {error!r}")
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
        """Remember what the output has open now. Raises OSError."""
        position = replace(self.position, number=self._output.number, open=self._output.lengths())
        position.save(self._folder)
        self.position = position

    def _remove(self, epoch: int, place: Place, path: Path, *, last: bool) -> None:
        """The file is read to its end. The position is on the disk before the file is gone."""
        if last:
            self._output.end_epoch(epoch)
            self._renderers.pop(epoch, None)
        self._lengths = self._output.lengths()
        self._save(epoch, replace(place, file=place.file + 1, offset=0))
        sync(self._folder / POSITION)
        path.unlink(missing_ok=True)

    def _tell(self, text: str) -> None:
        """Damage comes in crowds: the first ones are told."""
        self._told += 1
        if self._told <= 20:
            self._log(text)
