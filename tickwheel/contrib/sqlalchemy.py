"""SQLAlchemy: ``SqlOnce``, marks of done work in the transaction of the work itself.

    once = SqlOnce(metadata=Base.metadata)         # its table is made with yours

    @worker.on("orders.charge")
    def charge(delivery: Delivery) -> None:
        with Session(engine) as session, session.begin():
            if once.claim(session, delivery):
                ...                                # committed together with the mark, or neither

An asynchronous handler calls it as SQLAlchemy has it: ``await session.run_sync(once.claim,
delivery)``. Needs the extra ``sqlalchemy``; PostgreSQL and SQLite are known, other databases are
refused.

Invariants: a mark is there if, and only if, the transaction that wrote it was committed. Of all
transactions that claim the same work at most one is first; another one waits in the database until
that has ended, and then knows. A connection that commits each statement by itself is refused.
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
"""How many claims there are between two looks for marks that are over."""
SWEPT_MAX = 1_000
"""How many marks one look removes, at most."""
INSERTS: dict[str, Any] = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}
"""By the name of a dialect: an INSERT that knows ON CONFLICT."""


class SqlOnce:
    """Which work is done, in a table of a database.

    ``table``, ``schema``: where the table is. ``metadata``: which MetaData it belongs to, so that
    ``metadata.create_all`` and Alembic create it; ``once.table.create(engine, checkfirst=True)``
    creates it alone. ``ttl``: how long a mark counts, by the clock of this process; later it is
    removed, 1,000 of them with every hundredth claim at most. It must be longer than the time
    between two deliveries of a task. ``namespace`` stands before every key, as in ``Once``.

    Every method takes a Connection or a Session, and works in its transaction. Any thread may use
    the object.
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
            Column("mark", String(64), primary_key=True),  # a text of any length, hashed
            Column("until_ms", BigInteger, nullable=False, index=True),
            schema=schema,
        )

    def claim(
        self, connection: Connection | Session, work: str | Delivered, *, key: str | None = None
    ) -> bool:
        """Mark the work as done by this transaction. Returns False when another one has done it:
        then there is nothing to do.

        ``work`` and ``key`` are those of ``Once.claim``: by default the task's id. While another
        transaction works on it this waits, for as long as the database lets it. A rollback removes
        the mark. Raises BadRequest for a connection without transactions, or of another database.
        """
        asked, mark = _connection(connection), self._mark(work, key)
        now_ms = _now_ms()
        wanted = {"mark": mark, "until_ms": now_ms + self._ttl_ms}
        insert = INSERTS[asked.dialect.name](self.table).values(**wanted)
        taken = insert.on_conflict_do_update(
            index_elements=["mark"],
            set_={"until_ms": wanted["until_ms"]},
            where=self.table.c.until_ms <= now_ms,  # what is over counts as not there
        )
        is_first = asked.execute(taken).rowcount == 1
        if self._claims % SWEEP_EVERY == 0:  # also at the first one, for programs that live shortly
            self._sweep(asked, now_ms)
        self._claims += 1
        return is_first

    def is_done(
        self, connection: Connection | Session, work: str | Delivered, *, key: str | None = None
    ) -> bool:
        """Whether the work is done, as this transaction sees it."""
        column = self.table.c
        mark = self._mark(work, key)
        asked = select(column.mark).where(column.mark == mark, column.until_ms > _now_ms())
        return _connection(connection).execute(asked).first() is not None

    def forget(
        self, connection: Connection | Session, work: str | Delivered, *, key: str | None = None
    ) -> None:
        """Forget, with the commit of this transaction, that the work was done."""
        mark = self._mark(work, key)
        _connection(connection).execute(delete(self.table).where(self.table.c.mark == mark))

    def _mark(self, work: Any, key: Any) -> str:
        return hashlib.sha256(f"{self._namespace}:{name_of(work, key)}".encode()).hexdigest()

    def _sweep(self, connection: Connection, now_ms: int) -> None:
        """Remove some marks that are over; those that another transaction has are left to it."""
        column = self.table.c
        over = connection.execute(
            select(column.mark)
            .where(column.until_ms <= now_ms)
            .order_by(column.until_ms)
            .limit(SWEPT_MAX)
            .with_for_update(skip_locked=True)
        ).scalars()
        if marks := list(over):
            connection.execute(delete(self.table).where(column.mark.in_(marks)))


def _connection(given: Any) -> Connection:
    """The connection of a Session or a Connection, with a transaction on it. Raises BadRequest."""
    if isinstance(given, (Session, scoped_session)):
        found = given.connection()
    elif isinstance(given, Connection):
        found = given
    else:
        raise BadRequest(
            f"connection must be a Connection or a Session of SQLAlchemy, not {shown(given)};"
            " with an AsyncSession: await session.run_sync(once.claim, delivery)"
        )
    if found.dialect.name not in INSERTS:
        raise BadRequest(
            f"SqlOnce knows {' and '.join(sorted(INSERTS))}, not {found.dialect.name!r:.60}"
        )
    if not found.in_transaction():
        found.begin()  # as its next statement would
    if _commits_by_itself(found):
        raise BadRequest(
            "the connection commits each statement by itself (AUTOCOMMIT), so that work could be"
            " marked as done and be lost: SqlOnce needs a transaction"
        )
    return found


def _commits_by_itself(connection: Connection) -> bool:
    raw: Any = connection.connection
    if connection.dialect.name == "sqlite":
        driver = raw.driver_connection
        # Who sends BEGIN by an event has switched the driver's own off.
        return not driver.in_transaction and (
            driver.isolation_level is None or getattr(driver, "autocommit", None) is True
        )
    return connection.dialect.detect_autocommit_setting(raw.dbapi_connection)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
