"""Sealing: an open segment becomes a compressed one that never changes, a piece at a time.

The compressed file appears under its name when it is whole and on the disk; then the open one
goes. Cut off anywhere, it begins again: the open one is still there.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections import deque
from pathlib import Path

from tickwheel.history.names import PART

PIECE_BYTES = 1 << 20
GZIP_LEVEL = 3
_GZIP = 31
"""zlib's word for a gzip header; it holds no time, so the same lines are the same bytes."""


class Sealer:
    """Segments to be sealed, in order; one is being worked on."""

    def __init__(self) -> None:
        self._waiting: deque[Path] = deque()
        self._current: _Current | None = None
        self.sealed = 0

    def add(self, path: Path) -> None:
        self._waiting.append(path)

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._waiting)

    @property
    def paths(self) -> set[Path]:
        """Files that nobody else may remove."""
        return set(self._waiting) | ({self._current.source} if self._current else set())

    def step(self) -> bool:
        """One piece; whether there was something to do. Raises OSError; call again later."""
        if self._current is None:
            if not self._waiting:
                return False
            self._current = _Current(self._waiting.popleft())
        current = self._current
        try:
            done = current.step()
        except BaseException:
            self.abandon()
            raise
        if done:
            self._current = None
            self.sealed += 1
        return True

    def abandon(self) -> None:
        """Leave what is half done; it begins again with the next ``step``."""
        current, self._current = self._current, None
        if current is not None:
            current.abandon()
            self._waiting.appendleft(current.source)


class _Current:
    """One segment on its way."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self._target = source.with_name(source.name + ".gz")
        self._part = source.with_name(f"{PART}{self._target.name}")
        self._from: int | None = None
        self._to: int | None = None
        self._left = 0
        self._compress = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP)

    def step(self) -> bool:
        """True when it is sealed."""
        if self._from is None:
            return self._begin()
        assert self._to is not None
        data = os.read(self._from, min(PIECE_BYTES, self._left))
        self._left -= len(data)
        _write_all(self._to, self._compress.compress(data))
        if self._left and data:
            return False
        _write_all(self._to, self._compress.flush())
        os.fdatasync(self._to)
        self._close()
        self._part.rename(self._target)
        self.source.unlink()
        return True

    def _begin(self) -> bool:
        try:
            self._from = os.open(self.source, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        self._left = _whole_bytes(self._from)
        if not self._left or self._target.exists():
            # Nothing in it; or sealed before, and only the removal was cut off.
            self._close()
            self.source.unlink()
            return True
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._to = os.open(self._part, flags, 0o644)
        return False

    def abandon(self) -> None:
        self._close()
        with contextlib.suppress(OSError):
            self._part.unlink(missing_ok=True)

    def _close(self) -> None:
        for fd in (self._from, self._to):
            if fd is not None:
                os.close(fd)
        self._from = self._to = None


def _whole_bytes(fd: int) -> int:
    """Up to the end of the last whole line."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - PIECE_BYTES)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
