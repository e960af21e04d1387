"""Consistent copies of a database in use, made beside the writer.

The copy is written under another name, synced, and given its name last: a file of the name
asked for is always whole. It never replaces a file that is there.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable

from tickwheel.persistence.sqlite.connection import describe, snapshot
from tickwheel.persistence.sqlite.room import free_bytes
from tickwheel.persistence.store import StoreError

PAGES_A_STEP = 4096


def copy_database(
    source: sqlite3.Connection, path: str, slack_bytes: int, stop: Callable[[], bool]
) -> int:
    """Copy everything committed so far to ``path``; the copy's size in bytes.

    ``slack_bytes`` stay free on the disk. ``stop`` is asked between steps, to give up.
    """
    if os.path.lexists(path):
        raise StoreError(f"backup: {path} exists already")
    part = f"{path}.part-{os.getpid()}"
    try:
        _copy(source, part, slack_bytes, stop)
        size_bytes = os.path.getsize(part)
        _publish(part, path)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"backup to {path} failed: {describe(error)}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
    return size_bytes


def _copy(
    source: sqlite3.Connection, part: str, slack_bytes: int, stop: Callable[[], bool]
) -> None:
    def progress(status: int, remaining: int, total: int) -> None:
        if stop():
            raise StoreError("backup: the store is closing")

    # One snapshot around all steps: without it a commit would start the copy over.
    with snapshot(source):
        (pages,) = source.execute("PRAGMA page_count").fetchone()
        (page_bytes,) = source.execute("PRAGMA page_size").fetchone()
        source.execute("SELECT 1 FROM meta").fetchone()
        if free_bytes(part) < pages * page_bytes + slack_bytes:
            raise StoreError(f"backup: no room on the disk for {pages * page_bytes} bytes more")
        target = sqlite3.connect(part, isolation_level=None)
        try:
            target.execute("PRAGMA synchronous = OFF")  # synced once, when it is whole
            source.backup(target, pages=PAGES_A_STEP, progress=progress, sleep=0)
        finally:
            target.close()
    fd = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(part: str, path: str) -> None:
    """Give the copy its name, unless that exists by now; durable when it returns."""
    os.link(part, path)
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
