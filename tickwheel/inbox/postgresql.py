"""An inbox in PostgreSQL: rows in the order in which their transactions became visible.

``postgresql.sql`` has the tables. The position is a snapshot: all rows visible in it are taken, and
the next rows are those visible in a newer one, the *target*, in the order of their ids. So a row
whose transaction commits late is never skipped, and an open transaction delays its own rows only.
The rows to look at are those of the transactions that were in progress in the snapshot, and of
those that began later; both are found by an index, however old the snapshot is.

Invariants: a transaction gets its xid before its rows get their ids, so a row of a transaction that
began after ``bound`` was assigned has a higher id than ``floor``, which was read before. Statements
that advance the position only insert; rows leave by TRUNCATE, whose lock is never waited for.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
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
from tickwheel.inbox.schema import in_schema, postgresql_sql
from tickwheel.limits import Limits
from tickwheel.upgrades import Upgrade

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
_FOREIGN: Final = """
SELECT string_agg(s.name, ', ') FROM unnest($1::text[], $2::text[]) AS s(name, value)
WHERE current_setting(s.name) <> s.value
"""
"""Returns the settings that a session does not have."""
_COLUMNS: Final = "id, xid, verb, topic, body, delay_ms, due_ms, options::text AS options, at_ms"
_VISIBLE: Final = "($5::text IS NULL OR pg_visible_in_snapshot(xid, $5::text::pg_snapshot))"
_SIDE: Final = f"""
    (SELECT found.* FROM pg_snapshot_xip($1::text::pg_snapshot) AS late(xid), LATERAL (
        SELECT {_COLUMNS} FROM tickwheel.%(table)s AS r
        WHERE r.xid = late.xid AND id > $4 AND {_VISIBLE.replace("(xid", "(r.xid")}
        ORDER BY id LIMIT $6) AS found)
    UNION ALL
    (SELECT {_COLUMNS} FROM (
        SELECT * FROM tickwheel.%(table)s
        WHERE xid >= pg_snapshot_xmax($1::text::pg_snapshot) AND xid < $2::text::xid8
            AND id > $4 AND {_VISIBLE} OFFSET 0) AS r
    ORDER BY id LIMIT $6)
    UNION ALL
    (SELECT {_COLUMNS} FROM tickwheel.%(table)s
    WHERE id > greatest($3::bigint, $4) AND (xid >= $2::text::xid8) IS NOT FALSE AND {_VISIBLE}
    ORDER BY id LIMIT $6)
"""
_READ: Final = f"""
SELECT pg_current_snapshot()::text AS snapshot, last.id AS last_id, r.*
FROM (SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS id FROM tickwheel.inbox_id) AS last
LEFT JOIN LATERAL (
    SELECT id, verb, topic, body, delay_ms, due_ms, options, at_ms, found FROM (
        SELECT *, count(*) OVER () AS found,
            sum(octet_length(body)) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING EXCLUDE CURRENT ROW)
                AS bytes_before
        FROM (
            SELECT * FROM (
                {_SIDE % {"table": "inbox_0"}} UNION ALL {_SIDE % {"table": "inbox_1"}}
            ) AS new ORDER BY id LIMIT $6
        ) AS first
    ) AS measured WHERE coalesce(bytes_before, 0) < $7
) AS r ON true ORDER BY r.id
"""
_RECORD: Final = """
INSERT INTO tickwheel.inbox_batches (
    seq, session, number, snapshot, bound, floor, target, after_id, until_id, is_last,
    next_bound, next_floor, rows, ids, rest, offset_ms, shards, at
)
SELECT $1::bigint, $2::bytea, $3::bigint, $4::text::pg_snapshot, $5::text::xid8, $6::bigint,
    $7::text::pg_snapshot, $8::bigint, $9::bigint, $10::boolean,
    coalesce($11::text::xid8, pg_current_xact_id()), $12::bigint, $13::integer, $14::bigint[],
    $15::bigint[], $16::bigint, $17::integer, coalesce($18::timestamptz, clock_timestamp())
WHERE NOT EXISTS (SELECT FROM tickwheel.inbox_batches WHERE seq >= $1::bigint)
RETURNING next_bound::text
"""
_STATE: Final = """
SELECT side, cluster, (SELECT count(*) FROM tickwheel.inbox_batches) AS batches
FROM tickwheel.inbox_state
"""
_LAST: Final = """
SELECT seq, session, number, snapshot::text, bound::text, floor, target::text, after_id, until_id,
    is_last, next_bound::text, next_floor, rows, ids, rest, offset_ms, shards, at,
    extract(epoch FROM clock_timestamp() - at)::float8 AS age_s
FROM tickwheel.inbox_batches ORDER BY seq DESC LIMIT 1
"""
_HAS_NEW: Final = """
SELECT EXISTS (SELECT FROM tickwheel.%(table)s
        WHERE xid >= pg_snapshot_xmax($1::text::pg_snapshot))
    OR EXISTS (SELECT FROM tickwheel.%(table)s AS r, pg_snapshot_xip($1::text::pg_snapshot) AS x(id)
        WHERE r.xid = x.id)
"""
_REFUSE: Final = """
INSERT INTO tickwheel.inbox_refused
    (id, at_ms, verb, topic, body, delay_ms, due_ms, options, code, message)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8::text::jsonb, $9, $10) ON CONFLICT (id) DO NOTHING
"""
_SWEEP: Final = """
DELETE FROM tickwheel.inbox_acks WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM tickwheel.inbox_acks
    WHERE at < clock_timestamp() - $1::float8 * interval '1 second' ORDER BY at LIMIT $2))
"""
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

    def _sql(self, text: str) -> str:
        return in_schema(text, self._schema)

    async def _value(self, statement: str, *args: Any) -> Any:
        """Return the value that a statement, written for the schema ``tickwheel``, returns."""
        async with _troubles(self.label):
            return await self._connection.fetchval(self._sql(statement), *args)

    # --- life ------------------------------------------------------------------------------------

    async def open(self, *, dry_run: bool = False) -> Upgrade:
        async with _troubles(self.label):
            self._connection = await asyncpg.connect(
                self._dsn, timeout=CONNECT_S, command_timeout=COMMAND_S, server_settings=SESSION
            )
        foreign = await self._value(_FOREIGN, list(SESSION), list(SESSION.values()))
        if foreign:
            raise InboxTrouble(
                f"{self.label}: it is reached through a pooler (PgBouncer?) that does not pass"
                f" startup parameters on ({foreign}); name PostgreSQL itself"
            )
        await self._value(  # a batch must be durable before it is sent
            "SELECT set_config('synchronous_commit', 'on', false)"
            " WHERE current_setting('synchronous_commit') = 'off'"
        )
        layout = await self._layout()
        return await self._lay_out("postgresql", layout, LAYOUT, self._schema, dry_run=dry_run)

    async def _layout(self) -> int:
        """Return the layout of the schema; 0: it has no tables. Raise InboxTrouble if the inbox
        cannot be used."""
        if await self._value("SELECT pg_is_in_recovery()"):
            raise InboxTrouble(f"{self.label}: this server is a read-only standby")
        encoding = await self._value("SHOW server_encoding")
        if encoding != "UTF8":
            raise InboxTrouble(f"{self.label}: the encoding must be UTF8, not {encoding}")
        version = int(await self._value("SHOW server_version_num"))
        if version < 140_000:
            raise InboxTrouble(f"{self.label}: version 14 or later is needed, not {version}")
        table = self._sql("tickwheel.inbox_state")
        if await self._value("SELECT to_regclass($1) IS NULL", table):
            return 0
        return int(await self._value("SELECT layout FROM tickwheel.inbox_state"))

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
        leads = await self._value(
            "SELECT pg_try_advisory_lock(hashtext('tickwheel inbox'),"
            " 'tickwheel.inbox_state'::regclass::oid::bigint::bit(32)::integer)"
        )
        return bool(leads)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def clock_ms(self) -> int:
        return int(
            await self._value("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint")
        )

    async def announce(self, limits: Limits) -> None:
        values = [getattr(limits, name) for name in _LIMITS]
        names = ", ".join(_LIMITS)
        places = ", ".join(f"${number}::bigint" for number in range(1, len(values) + 1))
        statement = (
            f"UPDATE tickwheel.inbox_state SET ({names}) = ROW({places})"
            f" WHERE ({names}) IS DISTINCT FROM ROW({places})"
        )
        await self._value(statement, *values)

    # --- taking over -----------------------------------------------------------------------------

    async def take_over(self) -> Batch | None:
        async with _troubles(self.label):
            state = await self._connection.fetchrow(self._sql(_STATE))
            self._side, self._has_old, self._rotated_s = state["side"], True, time.monotonic()
            self._batches = state["batches"]
            # The ids of transactions mean nothing after a restore into another cluster.
            self._cluster = str(
                await self._value("SELECT system_identifier FROM pg_control_system()")
            )
            self._is_moved = state["cluster"] not in (None, self._cluster)
            last = await self._connection.fetchrow(self._sql(_LAST))
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
                await self._store_cluster()
        return batch

    def _become(self, base: Base, target: str | None, after: int, *, is_whole: bool) -> None:
        self._base, self._target, self._after = base, target, after
        self._newest = target or base.snapshot
        self._buffer, self._is_whole, self._recorded = [], is_whole, None

    async def _restore(self, last: Any) -> Batch | None:
        """Continue after the last record. Return its batch if it has rows."""
        values = tuple(last.values())
        self._seq, self._last = last["seq"], values[1:-2]
        base = Base(last["snapshot"], last["bound"], last["floor"])
        following = Base(last["target"], last["next_bound"], last["next_floor"])
        self._last_id = last["next_floor"]
        if not last["rows"]:
            if last["is_last"]:
                self._become(following, None, 0, is_whole=True)
            else:
                self._become(base, last["target"], last["after_id"], is_whole=False)
            self._is_noted = True
            return None
        rows: list[Row] = []
        while not rows or rows[-1].id < last["until_id"]:
            after = rows[-1].id if rows else last["after_id"]
            more, _, _ = await self._fetch(base, last["target"], after)
            if not more:
                break
            rows += more
        rows = [row for row in rows if row.id <= last["until_id"]]
        self._become(base, last["target"], last["after_id"], is_whole=last["is_last"])
        self._following = following if last["is_last"] else None
        return self._resume(last, rows, last["age_s"])

    async def _store_cluster(self) -> None:
        await self._value("UPDATE tickwheel.inbox_state SET cluster = $1", self._cluster)

    async def _realign(self) -> None:
        """Replace the position, which is of another cluster; everything before it is confirmed.
        Rows written since the restore have higher ids than all rows that were taken."""
        async with self._connection.transaction():
            before = await self._value(
                "SELECT tickwheel.inbox_realign($1::text::pg_snapshot, $2)",
                self._base.snapshot, self._base.floor,
            )  # fmt: skip
            bound = await self._value("SELECT (pg_current_xact_id()::text::bigint + 1)::text")
            await self._store_cluster()
            values = (b"", 0, *self._base, before, 0, 0, True, bound, self._last_id)
            await self._insert((*values, 0, None, None, 0, 1))
        self._become(Base(before, bound, self._last_id), None, 0, is_whole=True)
        self._is_moved, self._is_noted = False, True

    # --- rows ------------------------------------------------------------------------------------

    async def _fetch(
        self, base: Base, target: str | None, after: int
    ) -> tuple[list[Row], str, bool]:
        """Return new rows, the current snapshot, and whether these are all new rows."""
        records = await self._connection.fetch(
            self._sql(_READ), *base, after, target, ROWS_MAX + 1, BYTES_MAX
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
                rows, snapshot, is_whole = await self._fetch(self._base, self._target, self._after)
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
        bound: str | None = await self._value(_RECORD, self._seq, *values, at)
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
            _REFUSE, row.id, row.at_ms, row.verb, row.topic, row.body, row.delay_ms, row.due_ms,
            row.options_text, code, message,
        )  # fmt: skip

    async def count_refused(self) -> int:
        return int(await self._value("SELECT count(*) FROM tickwheel.inbox_refused"))

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
                await self._value(_SWEEP, ACKS_S, SWEPT_MAX)
            if self._batches >= BATCHES_MAX:
                await self._truncate_batches()

    async def _rotate(self) -> None:
        """Let new rows go into the other table, which is empty."""
        age_s = time.monotonic() - self._rotated_s
        if self._taken < ROTATE_ROWS and (not self._taken or age_s < ROTATE_S):
            return
        side = 1 - self._side
        await self._value("UPDATE tickwheel.inbox_state SET side = $1", side)
        self._side, self._has_old = side, True
        self._taken, self._rotated_s = 0, time.monotonic()

    async def _truncate_old(self) -> None:
        """Truncate the table that takes no new rows, if all its rows are taken and no transaction
        is using it."""
        table = f"inbox_{1 - self._side}"
        name = self._sql(f"tickwheel.{table}")
        if not await self._value(f"SELECT EXISTS (SELECT FROM tickwheel.{table})"):
            size = "SELECT pg_relation_size($1::text::regclass) > 0"
            self._has_old = await self._value(size, name)
            if not self._has_old:
                return
        try:
            async with self._connection.transaction():
                await self._connection.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE NOWAIT")
                if not await self._value(_HAS_NEW % {"table": table}, self._base.snapshot):
                    await self._connection.execute(f"TRUNCATE {name}")
                    self._has_old = False
        except asyncpg.LockNotAvailableError:
            return  # a transaction is using it, or a dump

    async def _truncate_batches(self) -> None:
        name = self._sql("tickwheel.inbox_batches")
        await self.note_idle()
        try:
            async with self._connection.transaction():
                await self._connection.execute(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE NOWAIT")
                await self._connection.execute(f"TRUNCATE {name}")
                await self._insert(self._last)
        except asyncpg.LockNotAvailableError:
            return
        self._batches = 0


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
