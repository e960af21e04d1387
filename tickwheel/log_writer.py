"""Lines for a log whose reader, or whose disk, may stand still: a thread writes them.

Whoever logs never waits. ``LogWriter`` is the queue and its thread, ``StreamWriter`` one that
writes to a descriptor, and ``unblock`` puts it behind ``sys.stderr``. This module knows no format.
Invariants:

* Lines keep their order, and each is written in one piece: several processes may share the file.
* Waiting lines are bounded. Lines that found no room, or could not be written, are counted, and the
  next line that is written says how many they were.
* A process that ends waits for its last lines, ``END_S`` at most.
* A forked process begins with an empty queue and a thread of its own.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, TextIO

WAITING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of lines that wait for one log's thread."""
END_S: Final = 1.0
"""Seconds that a process waits for its last lines when it ends."""


class LogWriter:
    """Writes lines in a thread, which begins with the first of them."""

    def __init__(self, name: str) -> None:
        self.dropped = 0
        """Lines that were never written."""
        self._name = name
        self._unsaid = 0
        """Lines dropped since the last one that was written."""
        self._begin_anew()
        _all.add(self)

    def _begin_anew(self) -> None:
        """Begin with an empty queue, as in a process that was just forked."""
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_writing = self._is_closing = False
        self._changed = threading.Condition()
        """Guards the fields above, and wakes whoever waits for them."""
        self._thread: threading.Thread | None = None

    def put(self, line: bytes) -> None:
        """Queue a line, with the newline at its end. Never waits."""
        with self._changed:
            if self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
                self._drop(_count(line))
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            if self._thread is None:
                self._is_closing = False
                # A process does not wait for a thread whose reader stands still.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written. False: they were not in this time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._lines and not self._is_writing, timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Write all lines and end the thread; a later line begins another. False: the lines were
        not written in this time. Not for the event loop."""
        with self._changed:
            thread, self._thread, self._is_closing = self._thread, None, True
            self._changed.notify_all()
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._unsaid += count

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while lines := self._next():
            try:
                self._write_all(lines)
                self._note(None)
            except OSError as error:
                with self._changed:
                    self._drop(sum(map(_count, lines)))
                self._note(error)
        self._end()

    def _next(self) -> deque[bytes]:
        """All lines that wait; empty when the thread has to end."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._is_closing)
            lines, self._lines = self._lines, deque()
            self._waiting_bytes, self._is_writing = 0, bool(lines)
            return lines

    def _write_all(self, lines: deque[bytes]) -> None:
        """Write lines, and remove them from ``lines``, which keeps those that were not written."""
        with self._changed:
            unsaid, self._unsaid = self._unsaid, 0
        if unsaid:
            try:
                self._write(self._line_of_dropped(unsaid))
            except OSError:
                with self._changed:
                    self._unsaid += unsaid
                raise
        while lines:
            self._write(lines[0])
            lines.popleft()

    def _write(self, line: bytes) -> None:
        """Write a line. Raises OSError."""
        raise NotImplementedError

    def _line_of_dropped(self, count: int) -> bytes:
        """Return the line that says how many lines were dropped."""
        raise NotImplementedError

    def _note(self, error: OSError | None) -> None:
        """Take notice that lines were written, or why they were not."""

    def _end(self) -> None:
        """Release what the thread has opened."""


def _count(line: bytes) -> int:
    return line.count(b"\n") or 1


_all: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in _all:
        writer._begin_anew()
        writer.dropped = writer._unsaid = 0


os.register_at_fork(after_in_child=_after_fork)


# --- a descriptor --------------------------------------------------------------------------------


def _line_of_dropped(count: int) -> bytes:
    return f"tickwheel: {count} lines of this log were dropped\n".encode()


class StreamWriter(LogWriter):
    """Writes to a descriptor that stays somebody else's."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(name)
        self.line_of_dropped: Callable[[int], bytes] = _line_of_dropped
        """Makes the line that says how many lines were dropped, in the thread."""
        self.failed: Callable[[OSError], None] = lambda error: None
        """Called in the thread when lines could not be written."""
        self._fd = fd

    def _write(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._fd, line) :]
            except BlockingIOError:  # whoever shares the file has made it so
                select.select((), (self._fd,), ())

    def _line_of_dropped(self, count: int) -> bytes:
        return self.line_of_dropped(count)

    def _note(self, error: OSError | None) -> None:
        if error is not None:
            self.failed(error)


class _Buffer(io.BufferedIOBase):
    """A ``StreamWriter`` as what is below a text stream."""

    def __init__(self, writer: StreamWriter, stream: TextIO) -> None:
        self.writer = writer
        self.stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # a text stream writes bytes
        self.writer.put(bytes(data))
        return len(data)

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()


def unblocked(stream: TextIO, name: str) -> TextIO:
    """Return a stream to the same descriptor on which writing never waits; without a descriptor,
    the stream itself."""
    if writer_of(stream) is not None:
        return stream
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        _Buffer(StreamWriter(fd, name), stream),  # type: ignore[type-var]  # it is only written to
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


def writer_of(stream: TextIO | None) -> StreamWriter | None:
    """Return what writes for a stream of ``unblocked``; None for any other stream."""
    buffer = getattr(stream, "buffer", None)
    return buffer.writer if isinstance(buffer, _Buffer) else None


def unblock_stderr() -> None:
    """Let nothing in this process, and in those that are forked from it, wait for stderr."""
    if sys.stderr is not None:
        sys.stderr = unblocked(sys.stderr, "stderr")


def _flush_all() -> None:
    until_s = time.monotonic() + END_S
    for writer in list(_all):
        if isinstance(writer, StreamWriter):
            writer.flush(max(0.0, until_s - time.monotonic()))


atexit.register(_flush_all)
