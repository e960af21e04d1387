"""Writes log lines in a thread, because the reader of a log or its disk can block.

Logging never waits. ``LogWriter`` is a queue with its thread. ``StreamWriter`` writes to a file
descriptor, and ``unblock_stderr`` installs a ``StreamWriter`` for ``sys.stderr``. This module does
not know the format of a log. Invariants:

* Lines keep their order. Each is written in one piece, because several processes can share a file.
* The queue is bounded. Lines that do not fit or cannot be written are counted, and the next line
  that is written reports their number.
* A process that exits waits for its last lines, at most ``END_S``.
* A forked process starts with an empty queue and a new thread.
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
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

WAITING_BYTES_MAX: Final = 4 * 1024 * 1024
"""Maximum bytes of lines that are queued for a log."""
END_S: Final = 1.0
"""Maximum seconds that a process waits for its last lines when it exits."""


class LogWriter:
    """Writes lines in a thread, which is started for the first line."""

    def __init__(self, name: str) -> None:
        self.dropped = 0
        """Number of lines that were never written."""
        self.is_torn = False
        """Whether a part of a line was written last; the next line then begins with a newline."""
        self._name = name
        self._unreported = 0
        """Number of lines that were dropped since the last line was written."""
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        """Start with an empty queue, as in a process that was just forked."""
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_writing = self._is_closing = False
        self._changed = threading.Condition()
        """Guards the fields above, and notifies waiting threads of changes."""
        self._thread: threading.Thread | None = None

    def put(self, line: bytes) -> None:
        """Queue a line, which must end with a newline. Never wait."""
        with self._changed:
            if self._waiting_bytes + len(line) > WAITING_BYTES_MAX:
                self._drop(_count(line))
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
            if self._thread is None:
                self._is_closing = False
                # A daemon thread does not keep the process alive while the reader of the log
                # blocks.
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written. Return False if the timeout expired first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._lines and not self._is_writing, timeout_s
            )

    def close(self, timeout_s: float) -> bool:
        """Write all lines and end the thread; a later line starts another thread. Return False if
        the timeout expired first. This blocks, so the event loop must not call it."""
        with self._changed:
            thread, self._thread, self._is_closing = self._thread, None, True
            self._changed.notify_all()
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._unreported += count

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while lines := self._next():
            try:
                self._write_all(lines)
                self.on_write_result(None)
            except OSError as error:
                with self._changed:
                    self._drop(sum(map(_count, lines)))
                self.on_write_result(error)
        self.end()

    def _next(self) -> deque[bytes]:
        """Wait for lines and return all of them, or none if the thread must end."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._is_closing)
            lines, self._lines = self._lines, deque()
            self._waiting_bytes, self._is_writing = 0, bool(lines)
            return lines

    def _write_all(self, lines: deque[bytes]) -> None:
        """Write the lines and remove them from ``lines``. After an error, unwritten lines
        remain."""
        with self._changed:
            unreported, self._unreported = self._unreported, 0
        if unreported:
            try:
                self.write_line(self.line_for_lost_lines(unreported))
            except OSError:
                with self._changed:
                    self._unreported += unreported
                raise
        while lines:
            self.write_line(lines[0])
            lines.popleft()

    def write_line(self, line: bytes) -> None:
        """Write a line. Raise OSError on failure."""
        raise NotImplementedError

    def write_to(self, fd: int, line: bytes) -> int:
        """Write a line to a file, and return the number of bytes. Raise OSError on failure."""
        rest = line = b"\n" + line if self.is_torn else line
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
                self.is_torn = bool(rest)
            except BlockingIOError:  # another process that shares the file made it non-blocking
                select.select((), (fd,), ())
        return len(line)

    def line_for_lost_lines(self, count: int) -> bytes:
        """Return the line that reports ``count`` dropped lines."""
        raise NotImplementedError

    def on_write_result(self, error: OSError | None) -> None:
        """Handle the error of a write, or None after a successful write."""

    def end(self) -> None:
        """Release the thread's resources."""


def _count(line: bytes) -> int:
    return line.count(b"\n") or 1


def ends_torn(path: Path) -> bool:
    """Return whether a file ends with a part of a line; False if this process may not read it, as
    may be the case for an audit log."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False


_all: weakref.WeakSet[LogWriter] = weakref.WeakSet()


def _after_fork() -> None:
    for writer in _all:
        writer._reset()
        writer.dropped = writer._unreported = 0


os.register_at_fork(after_in_child=_after_fork)


# --- a descriptor --------------------------------------------------------------------------------


def _format_dropped(count: int) -> bytes:
    return f"tickwheel: {count} lines of this log were dropped\n".encode()


class StreamWriter(LogWriter):
    """Writes to a file descriptor that it does not own."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(name)
        self.format_dropped: Callable[[int], bytes] = _format_dropped
        """Formats the line that reports dropped lines. It is called in the thread."""
        self.failed: Callable[[OSError], None] = lambda error: None
        """Is called in the thread when lines could not be written."""
        self._fd = fd

    def write_line(self, line: bytes) -> None:
        self.write_to(self._fd, line)

    def line_for_lost_lines(self, count: int) -> bytes:
        return self.format_dropped(count)

    def on_write_result(self, error: OSError | None) -> None:
        if error is not None:
            self.failed(error)


class _Buffer(io.BufferedIOBase):
    """The buffer of a text stream. It writes to a ``StreamWriter``."""

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
    """Return a stream that writes to the same descriptor and never waits. Return ``stream`` itself
    if it has no descriptor."""
    if writer_of(stream) is not None:
        return stream
    try:
        fd = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        _Buffer(StreamWriter(fd, name), stream),  # type: ignore[type-var]  # it is write-only
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


def writer_of(stream: TextIO | None) -> StreamWriter | None:
    """Return the writer of a stream that ``unblocked`` created, or None for any other stream."""
    buffer = getattr(stream, "buffer", None)
    return buffer.writer if isinstance(buffer, _Buffer) else None


def unblock_stderr() -> None:
    """Ensure that writes to stderr never wait, in this process and in processes forked from it."""
    if sys.stderr is not None:
        sys.stderr = unblocked(sys.stderr, "stderr")


def _flush_all() -> None:
    until_s = time.monotonic() + END_S
    for writer in list(_all):
        if isinstance(writer, StreamWriter):
            writer.flush(max(0.0, until_s - time.monotonic()))


atexit.register(_flush_all)
