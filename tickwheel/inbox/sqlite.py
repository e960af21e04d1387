"""An inbox in SQLite, for an application and a daemon on one machine.

``sqlite.sql`` has the tables. SQLite has one writer at a time, so the order of ids is the order of
commits, and the position is an id. Rows are deleted together with the record of the next batch. A
lock file next to the database selects the taker.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar
from urllib.parse import quote

from tickwheel.errors import BadRequest, shown
from tickwheel.inbox.contract import (
    ACKS_S,
    BYTES_MAX,
    ROWS_MAX,
    SWEEP_S,
    SWEPT_MAX,
    Batch,
    Fenced,
    Inbox,
    InboxTrouble,
    Row,
    options_of,
)
from tickwheel.inbox.schema import sqlite_sql
from tickwheel.limits import Limits
from tickwheel.upgrades import Upgrade

T = TypeVar("T")
LAYOUT: Final = 1
BUSY_S: Final = 5.0
"""Maximum seconds to wait for the application's transactions."""
_READ: Final = """
SELECT id, verb, topic, body, delay_ms, due_ms, options, at_ms FROM tickwheel_inbox
WHERE id > ? ORDER BY id LIMIT ?
"""
_RECORD: Final = """
UPDATE tickwheel_inbox_batch SET seq = seq + 1, session = ?, number = ?, after_id = ?, until_id = ?,
    rows = ?, ids = ?, rest = ?, offset_ms = ?, shards = ?, recorded_ms = ?
WHERE seq = ?
"""
_SWEEP: Final = """
DELETE FROM tickwheel_inbox_acks WHERE (task_id, task_group) IN
    (SELECT task_id, task_group FROM tickwheel_inbox_acks WHERE at_ms < ? ORDER BY at_ms LIMIT ?)
"""


class SqliteInbox(Inbox):
    """The inbox in a SQLite database."""

    def __init__(self, url: str) -> None:
        self._path = url.removeprefix("sqlite:///")
        if not self._path or self._path == url or "?" in self._path:
            raise BadRequest(f"inbox must be sqlite:///PATH, not {shown(url)}")
        super().__init__(f"sqlite:///{self._path}")
        self._connection: sqlite3.Connection | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._lock: int | None = None
        self._version: int | None = None
        """SQLite's number of the data for which the last read returned no rows."""

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of ``work`` in the thread of the connection."""
        connection, thread = self._connection, self._thread
        if connection is None or thread is None:
            raise InboxTrouble(f"{self.label}: not connected")
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work, connection)
        except sqlite3.Error as error:
            raise InboxTrouble(f"{self.label}: {error}") from None

    # --- life ------------------------------------------------------------------------------------

    async def open(self, *, dry_run: bool = False) -> Upgrade:
        self._thread = ThreadPoolExecutor(1, "tickwheel-inbox")
        mode = "ro" if dry_run else "rwc"

        def connect() -> sqlite3.Connection:
            path = f"file:{quote(self._path)}?mode={mode}"
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, uri=True)
            connection.text_factory = _text
            connection.execute("PRAGMA synchronous = FULL")
            return connection

        try:
            loop = asyncio.get_running_loop()
            self._connection = await loop.run_in_executor(self._thread, connect)
        except sqlite3.Error as error:
            raise InboxTrouble(f"{self.label}: {error}") from None
        return await self._lay_out("sqlite", await self._run(_layout), LAYOUT, dry_run=dry_run)

    async def _execute(self, steps: Sequence[str]) -> None:
        script = f"BEGIN IMMEDIATE; {''.join(steps) or sqlite_sql()} COMMIT;"
        await self._run(lambda connection: connection.executescript(script))

    async def lead(self) -> bool:
        if self._lock is not None:
            return True
        path = f"{self._path}-tickwheel-inbox.lock"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise InboxTrouble(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        thread, self._thread = self._thread, None
        if thread is not None:
            if connection is not None:
                thread.submit(connection.close)
            await asyncio.to_thread(thread.shutdown)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    async def clock_ms(self) -> int:
        return time.time_ns() // 1_000_000  # SQLite uses this machine's clock

    async def announce(self, limits: Limits) -> None:
        pass  # applications check tasks before they write them

    # --- batches ---------------------------------------------------------------------------------

    async def take_over(self) -> Batch | None:
        return await self._run(self._take_over)

    def _take_over(self, connection: sqlite3.Connection) -> Batch | None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.execute("UPDATE tickwheel_inbox_batch SET seq = seq + 1")
            found = connection.execute("SELECT * FROM tickwheel_inbox_batch")
            last = dict(zip((d[0] for d in found.description), found.fetchone(), strict=True))
        finally:
            connection.execute("COMMIT")
        self._seq, self._after, self._version = last["seq"], last["after_id"], None
        self._buffer, self._recorded, self._is_noted = [], None, True
        if not last["rows"]:
            return None
        rows: list[Row] = []
        while more := _rows(connection, rows[-1].id if rows else self._after):
            rows += (row for row in more if row.id <= last["until_id"])
            if more[-1].id >= last["until_id"]:
                break
        last |= {name: json.loads(last[name] or "[]") for name in ("ids", "rest")}
        return self._resume(last, rows, max(0.0, time.time() - last["recorded_ms"] / 1000))

    async def read(self) -> Sequence[Row]:
        if not self._buffer:
            self._buffer = await self._run(self._read)
        return self._buffer

    def _read(self, connection: sqlite3.Connection) -> list[Row]:
        (version,) = connection.execute("PRAGMA data_version").fetchone()
        if version == self._version:
            return []
        rows = _rows(connection, self._after)
        self._version = None if rows else version
        return rows

    async def _write(
        self, batch: Batch, until: int, ids: list[int] | None, rest: list[int] | None
    ) -> None:
        """Replace the record, and delete the rows of confirmed batches."""
        values = (
            batch.session, batch.number, self._after, until, len(batch.rows),
            ids and json.dumps(ids), rest and json.dumps(rest), batch.offset_ms, batch.shards,
            await self.clock_ms(), self._seq,
        )  # fmt: skip

        def write(connection: sqlite3.Connection) -> int:
            connection.execute("BEGIN IMMEDIATE")
            try:
                count = connection.execute(_RECORD, values).rowcount
                if count:
                    connection.execute("DELETE FROM tickwheel_inbox WHERE id <= ?", (self._after,))
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            return count

        if not await self._run(write):
            raise Fenced(f"{self.label}: another taker has recorded a batch")
        self._seq += 1

    async def refuse(self, row: Row, code: str, message: str) -> None:
        values = [
            value.encode(errors="replace").decode() if isinstance(value, str) else value
            for value in (
                *(row.id, row.at_ms, row.verb, row.topic, row.body, row.delay_ms, row.due_ms),
                *(row.options_text, code, message),
            )
        ]
        places = ", ".join("?" * len(values))
        insert = f"INSERT OR IGNORE INTO tickwheel_inbox_refused VALUES ({places})"
        await self._run(lambda connection: connection.execute(insert, values))

    async def count_refused(self) -> int:
        statement = "SELECT count(*) FROM tickwheel_inbox_refused"
        return await self._run(lambda connection: int(connection.execute(statement).fetchone()[0]))

    async def tidy(self) -> None:
        await self.note_idle()
        if time.monotonic() - self._swept_s >= SWEEP_S:
            self._swept_s = time.monotonic()
            until_ms = time.time_ns() // 1_000_000 - int(ACKS_S * 1000)
            await self._run(lambda connection: connection.execute(_SWEEP, (until_ms, SWEPT_MAX)))


def _layout(connection: sqlite3.Connection) -> int:
    """Return the layout of the tables; 0: there are none."""
    has_tables = "SELECT 1 FROM sqlite_master WHERE name = 'tickwheel_inbox_batch'"
    if connection.execute(has_tables).fetchone() is None:
        return 0
    return int(connection.execute("SELECT layout FROM tickwheel_inbox_batch").fetchone()[0])


def _rows(connection: sqlite3.Connection, after: int) -> list[Row]:
    """Return the next rows."""
    rows, size = [], 0
    found = connection.execute(_READ, (after, ROWS_MAX))
    for row_id, verb, topic, body, delay_ms, due_ms, text, at_ms in found:
        data = body.encode(errors="surrogateescape") if isinstance(body, str) else body
        data = b"" if data is None else data
        text = _text(text) if isinstance(text, bytes) else text  # it may be stored as a blob
        options = options_of(text)
        rows.append(Row(row_id, verb, topic, data, delay_ms, due_ms, options, at_ms, text))
        size += len(data) if isinstance(data, bytes) else 0
        if size >= BYTES_MAX:
            break
    return rows


def _text(data: bytes) -> str:
    """Decode text that an application may have stored in another encoding."""
    return data.decode(errors="surrogateescape")
