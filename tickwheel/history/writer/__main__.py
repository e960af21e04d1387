"""The process that turns the spool into files: ``python -m tickwheel.history.writer``.

Started and watched by the daemon, at a low priority; it can also be run by hand to finish what a
daemon that is gone has left. Standard input is a pipe from the daemon: a byte in it is a wake-up,
its end says that the daemon is gone. Then what is there is written, sealed when no daemon holds
the spool any more, and the process ends.

One writer has a state folder at a time; another one waits for its end, or for that of its own
daemon. When the folder is removed or moved it ends, to be started anew.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tickwheel.disk import Use, measure
from tickwheel.history import segments, spool_read
from tickwheel.history.names import state_folder
from tickwheel.history.writer import parser
from tickwheel.history.writer.conversion import Follower
from tickwheel.history.writer.lock import Lock
from tickwheel.history.writer.open_segments import Output
from tickwheel.history.writer.position import Place, Position, load
from tickwheel.history.writer.retention import Limits
from tickwheel.history.writer.sealing import Sealer
from tickwheel.history.writer.upkeep import Upkeep

NICE = 10
IDLE_S_MIN, IDLE_S_MAX = 0.02, 0.5
GATHER_S = 0.1
"""After little work: what comes in small batches is taken together."""
LITTLE_BYTES = 64 << 10
TROUBLE_S_MIN, TROUBLE_S_MAX = 0.25, 5.0
GONE_PATIENCE_S = 5.0
"""After the end of standard input: until the daemon's lock is free."""
TROUBLE_PATIENCE_S = 15.0
"""The same while the disk does not take it; the spool keeps what is left."""
UPKEEP_MS = 1_000


class Writer:
    """One state folder's lines, seals and retention."""

    def __init__(
        self,
        history_dir: Path,
        node: str,
        shard: int,
        *,
        segment_bytes: int,
        limits: Limits,
        clean_hour: int,
        log: Callable[[str], None],
        now_ms: Callable[[], int] = lambda: int(time.time() * 1000),
        measured: Callable[[Path], Use] = measure,
    ) -> None:
        self._dir = history_dir
        self._folder = state_folder(history_dir, node, shard)
        self._now_ms = now_ms
        self._upkeep = Upkeep(
            history_dir, limits, clean_hour=clean_hour, log=log, measured=measured
        )
        self.output = Output(history_dir, node, shard, segment_bytes)
        self.sealer = Sealer()
        position = load(self._folder)
        self.output.take_up(position)
        if position is None:
            position = self._anew(shard)
        self.follower = Follower(
            self._folder, self.output, position, node=node, shard=shard, now_ms=now_ms, log=log
        )
        self.follower.save()
        self._upkeep_ms = 0

    def step(self) -> int:
        """Some lines and a piece of sealing; the bytes of spool that were dealt with, or 1 when
        there is more to seal. 0: there is nothing to do. Raises OSError."""
        done = self.follower.step()
        behind = done >= LITTLE_BYTES
        self._ripen(self.follower.newest_ms if behind else self._now_ms())
        if self.sealer.step() and not self.sealer.busy:
            self._upkeep.sealed(self._now_ms(), self._busy())
        return done or int(self.sealer.busy)

    def finish(self) -> bool:
        """Everything to its end; whether all could be sealed. Raises OSError."""
        while self.step():
            pass
        if not self.follower.held:
            self.output.end()
        self._ripen(self._now_ms())
        self.follower.save()
        while self.sealer.step():
            pass
        return not self.follower.held

    def _anew(self, shard: int) -> Position:
        """Without a position: numbers go on behind the highest that is there."""
        epochs = {name.epoch for name in spool_read.files(self._folder)}
        places: dict[int, Place] = {}
        for segment in segments.find(self._dir) if epochs else []:
            name = segment.name
            if name.shard == shard and name.epoch in epochs:
                place = places.setdefault(name.epoch, Place())
                place.seq = max(place.seq, segments.last_seq(segment.path))
        return Position(number=self.output.number, epochs=places)

    def close(self) -> None:
        """Leave everything as it is; the next writer goes on from there."""
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


class Process:
    """The loop: work, wait, and the end of standard input."""

    def __init__(
        self, arguments: argparse.Namespace, lock: Lock, log: Callable[[str], None]
    ) -> None:
        self._arguments = arguments
        self._lock = lock
        self._log = log
        self._writer: Writer | None = None
        self._stdin_ended_s: float | None = None
        self._trouble = ""

    def run(self) -> int:
        """0: everything is written and sealed, or another writer has it; 1: something is left in
        the spool, or the folder is gone."""
        wait_s, idle_s, trouble_s = 0.0, IDLE_S_MIN, TROUBLE_S_MIN
        if not self._lock.take(self._is_alone):
            return 0
        while True:
            self._wait(wait_s)
            if self._lock.is_gone:
                self._log("its folder was removed or moved; what was in it is left alone")
                return int(self._stdin_ended_s is None)
            try:
                writer = self._writer or self._begin()
                if self._stdin_ended_s is not None and writer.finish():
                    self._well()
                    return 0
                done = writer.step()
                self._well()
                trouble_s = TROUBLE_S_MIN
            except OSError as error:
                self._ill(error)
                wait_s, trouble_s = trouble_s, min(trouble_s * 2, TROUBLE_S_MAX)
            else:
                if done >= LITTLE_BYTES or (done and writer.sealer.busy):
                    wait_s = 0.0
                elif done:
                    wait_s, idle_s = GATHER_S, IDLE_S_MIN
                else:
                    wait_s, idle_s = idle_s, min(idle_s * 2, IDLE_S_MAX)
            if self._is_over():
                return 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _begin(self) -> Writer:
        told = self._arguments
        limits = Limits(
            None if told.retention_s is None else int(told.retention_s * 1000),
            told.bytes_max,
            told.disk_warn,
            told.disk_clean,
        )
        self._writer = Writer(
            Path(told.dir),
            told.node,
            told.shard,
            segment_bytes=told.segment_bytes,
            limits=limits,
            clean_hour=told.clean_hour,
            log=self._log,
        )
        return self._writer

    def _wait(self, wait_s: float) -> None:
        if self._stdin_ended_s is not None:
            time.sleep(min(wait_s, GATHER_S))
            return
        # A wake-up is no reason to hurry more than ``GATHER_S``; the end of the daemon is.
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

    def _is_alone(self, wait_s: float) -> bool:
        """After so many seconds at most: whether the daemon is gone."""
        self._wait(wait_s)
        return self._stdin_ended_s is not None

    def _is_over(self) -> bool:
        if self._stdin_ended_s is None:
            return False
        patience_s = TROUBLE_PATIENCE_S if self._trouble else GONE_PATIENCE_S
        return time.monotonic() - self._stdin_ended_s > patience_s

    def _ill(self, error: OSError) -> None:
        if not self._trouble:
            self._log(f"cannot write history: {error}; trying on, the spool keeps it meanwhile")
        self._trouble = str(error)

    def _well(self) -> None:
        if self._trouble:
            self._trouble = ""
            self._log("history is written again")


def say(text: str) -> None:
    """One line for the daemon's log."""
    try:
        os.write(2, f"history writer: {text}\n".encode("utf-8", "replace"))
    except OSError:
        return  # there is nobody to tell


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    told = parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        # They are meant for the daemon, whose end ends this process in order.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    folder = state_folder(told.dir, told.node, told.shard)
    try:
        process = Process(told, Lock(folder), say)
    except OSError as error:
        say(f"cannot begin: {error}")
        return 1
    try:
        return process.run()
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main())
