"""The process that turns the spool into files: ``python -m tickwheel.history.writer``.

The daemon starts and watches it, at a low priority. It can also be run by hand, to finish what a
daemon that is gone has left. Standard input is a pipe from the daemon: a byte in it is a wake-up,
its end says that the daemon is gone. Then what is there is written, sealed when no daemon holds
the spool any more, and the process ends.

A state folder has one writer at a time, by its lock. Another writer waits for the end of the first
one, or for that of its own daemon. When the folder is removed or moved the process ends, to be
started again.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tickwheel.history import spool
from tickwheel.history.segments import state_folder
from tickwheel.history.writer import parser
from tickwheel.history.writer.conversion import LITTLE_BYTES, Writer
from tickwheel.history.writer.retention import Limits

LOCK = "lock"
"""The name of the locked file in the state folder."""
NICE = 10
IDLE_S_MIN, IDLE_S_MAX = 0.02, 0.5
GATHER_S = 0.1
"""Seconds to wait after little work, so that small batches are taken together."""
TROUBLE_S_MIN, TROUBLE_S_MAX = 0.25, 5.0
GONE_PATIENCE_S = 5.0
"""Seconds to wait for the daemon's lock after the end of standard input."""
TROUBLE_PATIENCE_S = 15.0
"""Seconds to wait after that while the disk takes nothing; the spool keeps what is left."""
GLANCE_S = 0.05


class Process:
    """The writer's loop: work, wait, and end with standard input."""

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
                    self._recovered()
                    return 0
                done = writer.step()
                self._recovered()
                trouble_s = TROUBLE_S_MIN
            except OSError as error:
                self._failed(error)
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
        given = self._arguments
        limits = Limits(
            None if given.retention_s is None else int(given.retention_s * 1000),
            given.bytes_max,
            given.disk_warn,
            given.disk_clean,
        )
        self._writer = Writer(
            Path(given.dir),
            given.node,
            given.shard,
            segment_bytes=given.segment_bytes,
            limits=limits,
            clean_hour=given.clean_hour,
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
        """Wait so many seconds at most; whether the daemon is gone."""
        self._wait(wait_s)
        return self._stdin_ended_s is not None

    def _is_over(self) -> bool:
        if self._stdin_ended_s is None:
            return False
        patience_s = TROUBLE_PATIENCE_S if self._trouble else GONE_PATIENCE_S
        return time.monotonic() - self._stdin_ended_s > patience_s

    def _failed(self, error: OSError) -> None:
        if not self._trouble:
            self._log(f"cannot write history: {error}; trying on, the spool keeps it meanwhile")
        self._trouble = str(error)

    def _recovered(self) -> None:
        if self._trouble:
            self._trouble = ""
            self._log("history is written again")


class Lock:
    """The lock of a state folder, held for as long as the process lives. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1
        self._open()

    def take(self, is_over: Callable[[float], bool]) -> bool:
        """Wait for it. False: it is another's, who will write all that is there.

        ``is_over`` waits so many seconds at most, and says whether the daemon is gone by then.
        """
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_over(GLANCE_S) and not self._is_left():
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
            there = os.stat(self._folder / LOCK)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False
        return not os.path.samestat(there, os.fstat(self._fd))

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _is_left(self) -> bool:
        """Whether something is in the spool that no living daemon adds to: a writer that is about
        to end may have seen its last, and what a living one has is its own writer's work."""
        names = spool.files(self._folder)
        living = {n.epoch for n in names if spool.is_held(self._folder / str(n))}
        return any(name.epoch not in living for name in names)


def log_line(text: str) -> None:
    """Write one line for the daemon's log."""
    try:
        os.write(2, f"history writer: {text}\n".encode("utf-8", "replace"))
    except OSError:
        return  # there is nobody who reads it


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the writer; returns the exit code."""
    given = parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        # They are meant for the daemon, whose end ends this process in order.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    folder = state_folder(given.dir, given.node, given.shard)
    try:
        process = Process(given, Lock(folder), log_line)
    except OSError as error:
        log_line(f"cannot begin: {error}")
        return 1
    try:
        return process.run()
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main())
