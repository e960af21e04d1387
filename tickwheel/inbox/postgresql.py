"""An inbox in PostgreSQL: rows in the order in which their transactions became visible.

``postgresql.sql`` has the tables, ``postgresql-statements.sql`` the statements. The position is a
snapshot: all rows visible in it are taken, and the next rows are those visible in a newer one, the
*target*, in the order of their ids. So a row whose transaction commits late is never skipped, and
an open transaction delays its own rows only. The rows to look at are those of the transactions that
were in progress in the snapshot, and of those that began later; both are found by an index, however
old the snapshot is.

Invariants: a transaction gets its xid before its rows get their ids, so a row of a transaction that
began after ``bound`` was assigned has a higher id than ``floor``, which was read before. Statements
that advance the position only insert; rows leave by TRUNCATE, whose lock is never waited for.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit, urlunsplit

import asyncpg

from tickwheel.client.sql import SCHEMA, check_schema
from tickwheel.errors import BadRequest
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
from tickwheel.inbox.schema import FOLDER, in_schema, postgresql_sql
from tickwheel.limits import Limits
from tickwheel.statements import read_statements
from tickwheel.upgrades import Upgrade

STATEMENTS: Final = read_statements(FOLDER / "postgresql-statements.sql")
TABLES: Final = "inbox_0", "inbox_1"
LAYOUT: Final = 1
CONNECT_S: Final = 10.0
COMMAND_S: Final = 30.0
UPGRADE_S: Final = 3600.0
ROTATE_ROWS: Final = 20_000
ROTATE_S: Final = 60.0
"""Rows, and seconds, after which new rows go into the other table, if there are any."""
BATCHES_MAX: Final = 10_000
"""Recorded batches after which the table of batches is truncated."""
SESSION: Final[dict[str, str]] = {
    "application_name": "tickwheel inbox",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "enable_seqscan": "off",  # the tables have no statistics
    "idle_in_transaction_session_timeout": "0",
    "jit": "off",
    "lock_timeout": "0",
    "plan_cache_mode": "force_generic_plan",
    "search_path": "pg_catalog",
    "statement_timeout": "0",
}
"""Settings of the taker's session, whatever the database's defaults are."""
_LIMITS: Final = (
    "body_bytes_max", "task_bytes_max", "delay_ms_max", "within_ms_max", "key_length_max",
    "properties_max", "property_value_bytes_max",
)  # fmt: skip


def _parts(url: str) -> tuple[SplitResult, str]:
    """Return the parts of a URL, and its hosts with their ports. Raise BadRequest if the driver
    could not parse it."""
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        for host in hosts.split(",") if hosts else ():
            if not host or urlsplit(f"//{host}").port == 0:
                raise ValueError
    except ValueError:
        raise BadRequest(
            "inbox must be postgresql://USER@HOST[:PORT][,HOST[:PORT]]/DATABASE with valid hosts"
            " and ports"
        ) from None
    return parts, hosts


class Base(NamedTuple):
    """A position: all rows visible in the snapshot are taken."""

    snapshot: str
    bound: str
    """An xid that was assigned after the snapshot."""
    floor: int
    """Rows of transactions from ``bound`` on have higher ids."""


START: Final = Base("1:1:", "1", 0)
"""The position before all transactions."""


class PostgresInbox(Inbox):
    """The inbox in a schema of a PostgreSQL database."""

    def __init__(self, url: str) -> None:
        parts, hosts = _parts(url)
        query = parse_qs(parts.query)
        self._schema = query.pop("schema", [SCHEMA])[-1]
        check_schema(self._schema)
        if "," in hosts:
            query.setdefault("target_session_attrs", ["primary"])
        self._sql = {name: in_schema(text, self._schema) for name, text in STATEMENTS.items()}
        sides = [self._sql["side"].format(table=table) for table in TABLES]
        self._sql["read"] = self._sql["read"].format(sides=" UNION ALL ".join(sides))
        self._dsn = urlunsplit(parts._replace(query=urlencode(query, doseq=True)))
        super().__init__(f"postgresql://{hosts}{parts.path}, schema {self._schema}")
        self._connection: Any = None
        self._base = START
        self._target: str | None = None
        """The snapshot whose new rows are being taken; None: all are."""
        self._following: Base | None = None
        """The position after the recorded range, if that has the last new rows of the target."""
        self._newest = START.snapshot
        self._last_id = 0
        """The last id that was given out before the last read ended."""
        self._is_whole = True
        """Whether the buffer has all remaining new rows of the target."""
        self._last: tuple[Any, ...] = ()
        """The values of the last record."""
        self._cluster = ""
        self._is_moved = False
        """Whether the position is of another cluster."""
        self._side = 0
        self._has_old = False
        """Whether the table that takes no new rows may have rows."""
        self._taken = self._batches = 0
        """Rows taken since the tables changed, and batches in their table."""
        self._rotated_s = 0.0

    async def _value(self, name: str, *args: Any, **names: str) -> Any:
        """Return the value that the statement with this name returns."""
        async with _troubles(self.label):
            return await self._connection.fetchval(self._sql[name].format(**names), *args)

    # --- life ------------------------------------------------------------------------------------

    async def open(self, *, dry_run: bool = False) -> Upgrade:
        async with _troubles(self.label):
            self._connection = await asyncpg.connect(
                self._dsn, timeout=CONNECT_S, command_timeout=COMMAND_S, server_settings=SESSION
            )
            foreign = await self._value("foreign_settings", list(SESSION), list(SESSION.values()))
            if foreign:
                raise InboxTrouble(
                    f"{self.label}: it is reached through a pooler (PgBouncer?) that does not pass"
                    f" startup parameters on ({foreign}); name PostgreSQL itself"
                )
            await self._value("be_durable")
            facts = await self._connection.fetchrow(self._sql["facts"])
        is_standby, encoding, version, has_tables = facts
        if is_standby:
            raise InboxTrouble(f"{self.label}: this server is a read-only standby")
        if encoding != "UTF8":
            raise InboxTrouble(f"{self.label}: the encoding must be UTF8, not {encoding}")
        if version < 140_000:
            raise InboxTrouble(f"{self.label}: version 14 or later is needed, not {version}")
        layout = int(await self._value("layout")) if has_tables else 0
        return await self._lay_out("postgresql", layout, LAYOUT, self._schema, dry_run=dry_run)

    async def _execute(self, steps: Sequence[str]) -> None:
        script = "\n".join(steps) or postgresql_sql(self._schema)
        async with _troubles(self.label):
            try:
                async with self._connection.transaction():
                    await self._connection.execute(script, timeout=UPGRADE_S)
            except (
                asyncpg.DuplicateSchemaError,
                asyncpg.DuplicateTableError,
                asyncpg.UniqueViolationError,
            ):
                if steps:
                    raise
                # Another taker has just created them.
            except asyncpg.InsufficientPrivilegeError as error:
                command = "upgrade --dry-run" if steps else "sql"
                raise InboxTrouble(
                    f"{self.label}: {error}; run the statements of `tickwheel inbox {command}` as"
                    " the role that owns the schema"
                ) from None

    async def lead(self) -> bool:
        return bool(await self._value("lead"))

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def clock_ms(self) -> int:
        return int(await self._value("clock_ms"))

    async def announce(self, limits: Limits) -> None:
        values = [getattr(limits, name) for name in _LIMITS]
        places = ", ".join(f"${number}::bigint" for number in range(1, len(values) + 1))
        await self._value("announce", *values, names=", ".join(_LIMITS), places=places)

    # --- taking over -----------------------------------------------------------------------------

    async def take_over(self) -> Batch | None:
        async with _troubles(self.label):
            state = await self._connection.fetchrow(self._sql["state"])
            self._side, self._has_old, self._rotated_s = state["side"], True, time.monotonic()
            self._batches = state["batches"]
            # The ids of transactions mean nothing after a restore into another cluster.
            self._cluster = await self._value("cluster")
            self._is_moved = state["cluster"] not in (None, self._cluster)
            last = await self._connection.fetchrow(self._sql["last"])
            batch = None
            if last is None:
                self._seq = self._last_id = 0
                self._become(START, None, 0, is_whole=True)
                values = (b"", 0, *START, START.snapshot, 0, 0, True, START.bound, START.floor)
                self._last = (*values, 0, None, None, 0, 1)
            else:
                batch = await self._restore(last)
            await self._insert(self._last, last and last["at"])
            if state["cluster"] is None:
                await self._value("store_cluster", self._cluster)
        return batch

    def _become(self, base: Base, target: str | None, after: int, *, is_whole: bool) -> None:
        self._base, self._target, self._after = base, target, after
        self._newest = target or base.snapshot
        self._buffer, self._is_whole, self._recorded, self._is_noted = [], is_whole, None, True

    async def _restore(self, last: Any) -> Batch | None:
        """Continue after the last record. Return its batch if it has rows."""
        values = tuple(last.values())
        self._seq, self._last = last["seq"], values[1:-2]
        base = Base(last["snapshot"], last["bound"], last["floor"])
        following = Base(last["target"], last["next_bound"], last["next_floor"])
        self._last_id = last["next_floor"]
        if last["is_last"] and not last["rows"]:
            self._become(following, None, 0, is_whole=True)
            return None
        after, until, is_last = last["after_id"], last["until_id"], last["is_last"]
        self._become(base, last["target"], after, is_whole=is_last)
        if not last["rows"]:
            return None
        self._following = following if is_last else None
        rows: list[Row] = []
        while after < until and (more := (await self._fetch(after))[0]):
            rows += (row for row in more if row.id <= until)
            after = more[-1].id
        return self._resume(last, rows, last["age_s"])

    async def _realign(self) -> None:
        """Replace the position, which is of another cluster; everything before it is confirmed.
        Rows written since the restore have higher ids than all rows that were taken."""
        async with self._connection.transaction():
            before = await self._value("realign", self._base.snapshot, self._base.floor)
            bound = await self._value("next_xid")
            await self._value("store_cluster", self._cluster)
            values = (b"", 0, *self._base, before, 0, 0, True, bound, self._last_id)
            await self._insert((*values, 0, None, None, 0, 1))
        self._become(Base(before, bound, self._last_id), None, 0, is_whole=True)
        self._is_moved = False

    # --- rows ------------------------------------------------------------------------------------

    async def _fetch(self, after: int) -> tuple[list[Row], str, bool]:
        """Return new rows, the current snapshot, and whether these are all new rows."""
        records = await self._connection.fetch(
            self._sql["read"], *self._base, after, self._target, ROWS_MAX + 1, BYTES_MAX
        )
        first = records[0]
        if not self._is_moved:  # otherwise rows written since the restore have ids up to this one
            self._last_id = first["last_id"]
        if first["id"] is None:
            return [], first["snapshot"], True
        rows = [
            Row(r[2], r[3], r[4], r[5] or b"", r[6], r[7], options_of(r[8]), r[9], r[8])
            for r in records[:ROWS_MAX]
        ]
        return rows, first["snapshot"], first["found"] == len(rows)

    async def read(self) -> Sequence[Row]:
        if not self._buffer:
            async with _troubles(self.label):
                if self._is_moved and self._target is None:
                    await self._realign()
                rows, snapshot, is_whole = await self._fetch(self._after)
            if not rows and self._target is not None:
                raise InboxTrouble(f"{self.label}: rows that were not taken have vanished")
            self._buffer, self._is_whole = rows, is_whole
            self._newest = self._target or snapshot
            if rows:
                self._target = self._newest
        return self._buffer

    async def _write(
        self, batch: Batch, until: int, ids: list[int] | None, rest: list[int] | None
    ) -> None:
        is_last = self._target is None
        if batch.rows:
            is_last = self._is_whole and until == self._buffer[-1].id
        target = self._target or self._newest
        position = (*self._base, target, self._after, until, is_last, None, self._last_id)
        rest_of = (len(batch.rows), ids, rest, batch.offset_ms, batch.shards)
        bound = await self._insert((batch.session, batch.number, *position, *rest_of))
        self._following = Base(target, bound, self._last_id) if is_last else None
        if self._following is not None and not batch.rows:
            self._base = self._following

    async def _insert(self, values: tuple[Any, ...], at: datetime | None = None) -> str:
        """Insert a record, and return its ``next_bound``. ``values`` are those of the columns from
        ``session`` on; without a ``next_bound`` it is the xid of this statement. ``at``: when its
        batch was first recorded, if not now."""
        self._seq += 1
        bound: str | None = await self._value("record", self._seq, *values, at)
        if bound is None:
            raise Fenced(f"{self.label}: another taker has recorded batch {self._seq}")
        self._last = (*values[:9], bound, *values[10:])
        self._batches += 1
        return bound

    def confirm(self) -> None:
        self._taken += self._recorded or 0
        super().confirm()
        if self._following is not None:
            self._base, self._target, self._after = self._following, None, 0
            self._newest = self._base.snapshot

    async def refuse(self, row: Row, code: str, message: str) -> None:
        await self._value(
            "refuse", row.id, row.at_ms, row.verb, row.topic, row.body, row.delay_ms, row.due_ms,
            row.options_text, code, message,
        )  # fmt: skip

    async def count_refused(self) -> int:
        return int(await self._value("count_refused"))

    # --- removing rows ---------------------------------------------------------------------------

    async def tidy(self) -> None:
        is_between = self._target is None and self._recorded is None
        if not is_between or self._buffer or self._is_moved:
            return
        async with _troubles(self.label):
            if not self._has_old:
                await self._rotate()
            else:
                await self.note_idle()  # a record whose rows are gone could not be repeated
                await self._truncate_old()
            if time.monotonic() - self._swept_s >= SWEEP_S:
                self._swept_s = time.monotonic()
                await self._value("sweep", ACKS_S, SWEPT_MAX)
            if self._batches >= BATCHES_MAX:
                await self._truncate_batches()

    async def _rotate(self) -> None:
        """Let new rows go into the other table, which is empty."""
        age_s = time.monotonic() - self._rotated_s
        if self._taken < ROTATE_ROWS and (not self._taken or age_s < ROTATE_S):
            return
        side = 1 - self._side
        await self._value("rotate", side)
        self._side, self._has_old = side, True
        self._taken, self._rotated_s = 0, time.monotonic()

    async def _truncate_old(self) -> None:
        """Truncate the table that takes no new rows, if all its rows are taken and no transaction
        is using it."""
        table = TABLES[1 - self._side]
        self._has_old = await self._value("is_filled", table=table)
        if not self._has_old:
            return
        with suppress(asyncpg.LockNotAvailableError):  # a transaction is using it, or a dump
            async with self._locked(table) as truncate:
                if not await self._value("has_new", self._base.snapshot, table=table):
                    await self._connection.execute(truncate)
                    self._has_old = False

    async def _truncate_batches(self) -> None:
        await self.note_idle()
        with suppress(asyncpg.LockNotAvailableError):
            async with self._locked("inbox_batches") as truncate:
                await self._connection.execute(truncate)
                await self._insert(self._last)
                self._batches = 0

    @asynccontextmanager
    async def _locked(self, table: str) -> AsyncIterator[str]:
        """Lock a table in a transaction, and yield the statement that truncates it. Raise
        LockNotAvailableError."""
        async with self._connection.transaction():
            await self._connection.execute(self._sql["lock"].format(table=table))
            yield self._sql["truncate"].format(table=table)


_TROUBLES: Final = (
    TimeoutError,
    OSError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the connection broke in the middle of an exchange
)


@asynccontextmanager
async def _troubles(label: str) -> AsyncIterator[None]:
    """Convert errors of the database to InboxTrouble."""
    try:
        yield
    except asyncpg.UniqueViolationError as error:
        raise Fenced(f"{label}: {error}") from None
    except _TROUBLES as error:
        text = str(error) or type(error).__name__
        raise InboxTrouble(f"{label}: {text}") from None
