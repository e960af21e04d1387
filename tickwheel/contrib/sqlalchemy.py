"""SQLAlchemy: ``SqlOnce`` marks work as done in the same transaction as the work.

    once = SqlOnce(metadata=Base.metadata)         # its table is created with yours

    @worker.on("orders.charge")
    def charge(delivery: Delivery) -> None:
        with Session(engine) as session, session.begin():
            if once.claim(session, delivery):
                ...                                # committed together with the mark, or neither

Asynchronous handlers use ``await session.run_sync(once.claim, delivery)``. Needs the extra
``sqlalchemy``. It supports PostgreSQL and SQLite and refuses other databases.

Invariants: a mark exists if and only if the transaction that wrote it was committed. At most one
transaction claims the same work; others wait in the database until it has ended. A connection in
autocommit mode is refused.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

from tickwheel.api.times import Duration
from tickwheel.client.idempotence import name_of, positive_ms
from tickwheel.errors import BadRequest, module_needs_extra, shown

with module_needs_extra("tickwheel.contrib.sqlalchemy", "sqlalchemy"):
    from sqlalchemy import BigInteger, Column, MetaData, String, Table, delete, select
    from sqlalchemy.dialects import postgresql, sqlite
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session, scoped_session

if TYPE_CHECKING:
    from tickwheel.client.delivery import Delivered

TTL_S = 30 * 86_400.0
SWEEP_EVERY = 100
"""Number of claims between two removals of expired marks."""
SWEPT_MAX = 1_000
"""Maximum number of expired marks that one removal deletes."""
INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
"""Dialect → the function that creates an INSERT with ON CONFLICT."""


class SqlOnce:
    """Records in a database table which work is done.

    ``table`` and ``schema`` name the table. If it belongs to ``metadata``, ``metadata.create_all``
    and Alembic create it; ``once.table.create(engine, checkfirst=True)`` creates it alone. ``ttl``
    is the lifetime of a mark, by the clock of this process; it must be longer than the time between
    two deliveries of a task. Every hundredth claim removes at most 1,000 expired marks.
    ``namespace`` is the prefix of every key, as in ``Once``.

    Every method takes a Connection or Session and uses its transaction. The object is thread-safe.
    """

    def __init__(
        self,
        table: str = "tickwheel_once",
        *,
        schema: str | None = None,
        metadata: MetaData | None = None,
        ttl: Duration = TTL_S,
        namespace: str = "tickwheel:once",
    ) -> None:
        self._ttl_ms = positive_ms(ttl, "ttl")
        self._namespace = namespace
        self._claims = 0
        self.table = Table(
            table,
            MetaData() if metadata is None else metadata,
            Column("mark", String(64), primary_key=True),  # hash of a text
            Column("until_ms", BigInteger, nullable=False, index=True),
            schema=schema,
        )

    def claim(
        self, connection: Connection | Session, work: str | Delivered, *, key: str | None = None
    ) -> bool:
        """Mark the work as done in this transaction. Return False if it was already done.

        ``work`` and ``key`` are those of ``Once.claim``; the default ``key`` is the task's id. If
        another transaction has claimed the work, wait for its end, within the database's lock
        timeout. A rollback removes the mark. Raise BadRequest for a connection in autocommit
        mode or an unsupported database.
        """
        open_connection, mark = _connection(connection), self._mark(work, key)
        now_ms = _now_ms()
        row = {"mark": mark, "until_ms": now_ms + self._ttl_ms}
        insert = INSERTS[open_connection.dialect.name](self.table).values(**row)
        upsert = insert.on_conflict_do_update(
            index_elements=["mark"],
            set_={"until_ms": row["until_ms"]},
            where=self.table.c.until_ms <= now_ms,  # an expired mark counts as absent
        )
        is_first = open_connection.execute(upsert).rowcount == 1
        if self._claims % SWEEP_EVERY == 0:  # includes the first, for short-lived programs
            self._sweep(open_connection, now_ms)
        self._claims += 1
        return is_first

    def is_done(
        self, connection: Connection | Session, work: str | Delivered, *, key: str | None = None
    ) -> bool:
        """Return whether the work is done, as seen by this transaction."""
        columns = self.table.c
        mark = self._mark(work, key)
        query = select(columns.mark).where(columns.mark == mark, columns.until_ms > _now_ms())
        return _connection(connection).execute(query).first() is not None

    def forget(
        self, connection: Connection | Session, work: str | Delivered, *, key: str | None = None
    ) -> None:
        """Remove the mark of the work when this transaction commits."""
        mark = self._mark(work, key)
        _connection(connection).execute(delete(self.table).where(self.table.c.mark == mark))

    def _mark(self, work: Any, key: Any) -> str:
        return hashlib.sha256(f"{self._namespace}:{name_of(work, key)}".encode()).hexdigest()

    def _sweep(self, connection: Connection, now_ms: int) -> None:
        """Remove some expired marks, except those locked by another transaction."""
        columns = self.table.c
        expired = connection.execute(
            select(columns.mark)
            .where(columns.until_ms <= now_ms)
            .order_by(columns.until_ms)
            .limit(SWEPT_MAX)
            .with_for_update(skip_locked=True)
        ).scalars()
        if marks := list(expired):
            connection.execute(delete(self.table).where(columns.mark.in_(marks)))


def _connection(value: Any) -> Connection:
    """Return the connection of a Session or Connection, in a transaction. Raise BadRequest if it is
    in autocommit mode or not supported."""
    if isinstance(value, (Session, scoped_session)):
        connection = value.connection()
    elif isinstance(value, Connection):
        connection = value
    else:
        raise BadRequest(
            f"connection must be a Connection or a Session of SQLAlchemy, not {shown(value)};"
            " with an AsyncSession: await session.run_sync(once.claim, delivery)"
        )
    if connection.dialect.name not in INSERTS:
        raise BadRequest(
            f"SqlOnce supports {' and '.join(sorted(INSERTS))}, not {connection.dialect.name!r:.60}"
        )
    if not connection.in_transaction():
        connection.begin()  # as its next statement would
    if _commits_by_itself(connection):
        raise BadRequest(
            "the connection is in AUTOCOMMIT mode, in which lost work could be marked as done:"
            " SqlOnce needs a transaction"
        )
    return connection


def _commits_by_itself(connection: Connection) -> bool:
    raw: Any = connection.connection
    if connection.dialect.name == "sqlite":
        driver = raw.driver_connection
        # A program that sends BEGIN in an event handler has disabled the driver's own BEGIN.
        return not driver.in_transaction and (
            driver.isolation_level is None or getattr(driver, "autocommit", None) is True
        )
    return connection.dialect.detect_autocommit_setting(raw.dbapi_connection)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
