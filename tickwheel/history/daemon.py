"""The daemon's end of the delivery history: what is noted goes to the spool, batch by batch, and a
process of its own makes files of it.

Invariants: service comes first. A failing disk raises nothing here, and nothing waits for a disk
longer than one ``write``; what cannot be kept is counted, logged once, and leaves a ``dropped``
event. A batch is appended before its replies leave, and noted before the store has it. So SIGKILL
loses nothing that a client got as an answer, from this daemon or from the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from tickwheel.clock import Clock
from tickwheel.engine.state import Core
from tickwheel.errors import BadRequest
from tickwheel.history.lines import Kind
from tickwheel.history.process import begin, dismiss
from tickwheel.history.recorder import Notes, Recorder, events_in
from tickwheel.history.segments import state_folder
from tickwheel.history.spool import BYTES_MAX, Pending, Spool, take_pending
from tickwheel.history.writer import (
    CLEAN_HOUR,
    DISK_CLEAN,
    DISK_WARN,
    RETENTION_S,
    SEGMENT_BYTES,
    writer_command,
)
from tickwheel.persistence.contract import Opened
from tickwheel.version import __version__

FLUSH_S = 1.0
"""How often, in seconds, events that no batch carries (broadcasts) are kept."""
RESTART_S = 2.0
FINISH_S = 10.0
"""How long a stop waits for the writing process to end in order; it goes on by itself."""


@dataclass(frozen=True, slots=True)
class HistoryOptions:
    """Where one shard's history goes, and how much of it is kept."""

    folder: str
    node: str
    shard: int
    bodies: bool = False
    spool_bytes_max: int = BYTES_MAX
    segment_bytes: int = SEGMENT_BYTES
    retention_s: float = RETENTION_S
    bytes_max: int | None = None
    clean_hour: int = CLEAN_HOUR
    disk_warn: float = DISK_WARN
    disk_clean: float = DISK_CLEAN


class History:
    """The history of one shard: ``start``, ``stop`` once; ``begin``, ``end`` with each tenure."""

    def __init__(
        self,
        options: HistoryOptions,
        clock: Clock,
        on_event: Callable[[str, str], None],
    ) -> None:
        """Raises BadRequest when there can be no files."""
        self._options = options
        self._clock = clock
        self._on_event = on_event
        self._folder = state_folder(options.folder, options.node, options.shard)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadRequest(
                f"setting history_dir: cannot make {self._folder}: {error.strerror}"
            ) from None
        self._spool: Spool | None = None
        self._recorder: Recorder | None = None
        self._pending: Pending | None = None
        self._prepared: dict[int, bytes] = {}
        """Number of a batch that is with the store → its packed records."""
        self._epoch = self._number = 0
        self._missing = 0
        """Events dropped since the last batch that was kept."""
        self._reason = ""
        """The reason of the events dropped last."""
        self._lost = 0
        """How many of the events that the recorder lost are counted."""
        self._recent = 0
        """Events appended since the spool was looked at."""
        self._writing: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self.dropped = 0
        """Events that were not kept since the process began."""
        self.writer_restarts = 0

    @property
    def spool_bytes(self) -> int:
        """The bytes that wait for the writing process."""
        return self._spool.measure() if self._spool is not None else 0

    # --- a tenure ----------------------------------------------------------------------------

    def begin(self, opened: Opened) -> Recorder:
        """The recorder of this epoch, to which the engine reports its changes."""
        options = self._options
        self._spool = Spool(self._folder, opened.epoch, options.spool_bytes_max)
        self._number = opened.last_batch
        self._recorder = recorder = Recorder(
            opened.epoch, self._clock.read, attrgetter("label"), bodies=options.bodies
        )
        self._lost = 0
        self._take_over(opened)
        self._append([self._daemon("started", clean=opened.clean, version=__version__)], 1)
        return recorder

    def _take_over(self, opened: Opened) -> None:
        """Append what the daemon before had no time for, though its batch was durable."""
        assert self._spool is not None
        folder, shard = Path(self._options.folder), self._options.shard
        left = take_pending(folder, shard, opened.epoch, opened.last_batch)
        for _, data in left:
            if not self._spool.append_packed(data):
                self._drop(1, self._spool.trouble or "unknown")
        self._epoch = opened.epoch
        self._renew_pending()

    def _renew_pending(self) -> None:
        if self._pending is not None:
            self._pending.close()
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._pending = Pending(self._folder, self._epoch)

    def prepare(self, number: int, notes: object) -> None:
        """Note the records of a batch that the store is about to get."""
        spool, pending, recorder = self._spool, self._pending, self._recorder
        if isinstance(notes, Notes) and spool is not None and pending and recorder is not None:
            data = spool.pack(number, recorder.records(notes))
            if data is not None:
                self._prepared[number] = data
                pending.note(number, data)

    def keep(self, number: int, notes: object) -> None:
        """Append the records of a batch that is durable now."""
        self._number = number
        data, pending = self._prepared.pop(number, None), self._pending
        if isinstance(notes, Notes) and self._recorder is not None:
            self._count_lost(self._recorder)
            if pending is not None and pending.is_taken(number):
                return
            if data is not None and not self._missing:
                self._append_packed(data, events_in(notes))
            else:
                self._append(self._recorder.records(notes), events_in(notes))
        if pending is not None:
            pending.kept(number)

    async def flush_for_ever(self, core: Core) -> None:
        """Keep events that would wait for a batch that may never come."""
        while True:
            await asyncio.sleep(FLUSH_S)
            if self._recorder is None:
                continue
            self._look_after()
            self._count_lost(self._recorder)
            if core.sealed is None and core.open.is_empty():
                self.keep(self._number, self._recorder.cut())

    def end(self, clean: bool) -> None:
        """End the tenure; ``clean``: everything noted is durable."""
        spool, recorder = self._spool, self._recorder
        if spool is None or recorder is None:
            return
        if clean:
            self._look_after()
            self.keep(self._number, recorder.cut())
            self._append([self._daemon("stopped", clean=True)], 1)
        self._spool = self._recorder = None
        self._prepared.clear()
        if self._pending is not None:
            self._pending.close(clean)
        spool.close(clean)

    def _daemon(self, what: str, **details: Any) -> list[Any]:
        return [Kind.DAEMON, self._clock.read().now_ms, what, details]

    def _append(self, records: list[list[Any]], events: int) -> None:
        spool = self._spool
        if spool is None:
            return
        if self._missing:
            now_ms = self._clock.read().now_ms
            records = [[Kind.DROPPED, now_ms, self._missing, self._reason], *records]
        if not spool.append(self._number, records):
            self._drop(events, spool.trouble or "unknown")
            return
        self._recent += events
        if self._missing:
            self._on_event("history_kept_again", f"{self._missing} events are missing")
            self._missing = 0

    def _append_packed(self, data: bytes, events: int) -> None:
        assert self._spool is not None
        if self._spool.append_packed(data):
            self._recent += events
        else:
            self._drop(events, self._spool.trouble or "unknown")

    def _look_after(self) -> None:
        """Begin a new spool if its file was removed: writes to that would succeed all the same."""
        recent, self._recent = self._recent, 0
        if self._spool is None or not self._spool.is_lost():
            return
        reason = "the folder of the spool was removed or moved"
        self._on_event("history_dropped", f"{reason}; it begins anew")
        self._renew_pending()
        # How many nobody knows: of what is older, some stands in files, and those may be gone too.
        self.dropped += max(1, recent)
        self._append([[Kind.DROPPED, self._clock.read().now_ms, None, reason]], 1)

    def _count_lost(self, recorder: Recorder) -> None:
        lost, self._lost = recorder.lost - self._lost, recorder.lost
        if lost:
            most = recorder.repeats_max
            self._drop(lost, f"{most} deliveries and retries wait for the store already")

    def _drop(self, events: int, reason: str) -> None:
        if not self._missing:
            self._on_event("history_dropped", f"{reason}; service goes on without it")
        self._missing += events
        self.dropped += events
        self._reason = reason

    # --- the writing process -------------------------------------------------------------------

    def start(self) -> None:
        """Start the writing process, which works also on what an earlier daemon has left."""
        self._writing = asyncio.create_task(self._write_for_ever())

    async def stop(self) -> None:
        """Stop, after ``end``: what is in the spool becomes files, as far as time allows."""
        self._stopping.set()
        writing, self._writing = self._writing, None
        if writing is None:
            return
        if self._process is not None:
            dismiss(self._process)
        done, _ = await asyncio.wait((writing,), timeout=FINISH_S)
        if not done:
            self._on_event("history_unfinished", "the next start goes on with what is in the spool")
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write_for_ever(self) -> None:
        while True:
            is_last = self._stopping.is_set()
            try:
                code = await self._write()
                ended = f"exit code {code}"
            except OSError as error:
                code, ended = 1, f"cannot be started: {error.strerror}"
            if self._stopping.is_set():
                # It failed before it could be asked to stop: one more is started.
                if is_last or code == 0:
                    return
                continue
            self.writer_restarts += 1
            self._on_event("history_writer_ended", f"{ended}; starting it again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTART_S):
                    await self._stopping.wait()

    async def _write(self) -> int:
        """Run the writing process once; its exit code. Raises OSError."""
        options = self._options
        command = writer_command(
            options.folder,
            options.node,
            options.shard,
            segment_bytes=options.segment_bytes,
            retention_s=options.retention_s,
            bytes_max=options.bytes_max,
            clean_hour=options.clean_hour,
            disk_warn=options.disk_warn,
            disk_clean=options.disk_clean,
        )
        self._process = process = await begin(command)
        assert process.stderr is not None
        if self._stopping.is_set():
            dismiss(process)
        with contextlib.suppress(ValueError):  # a line without an end
            async for line in process.stderr:
                text = line.decode("utf-8", "replace").strip()
                self._on_event("history_writer", text.removeprefix("history writer: "))
        return await process.wait()
