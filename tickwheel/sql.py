"""Tasks in the application's own transaction: a task exists if and only if it commits.

    with Session(engine) as session, session.begin():
        session.add(Order(number="42"))
        sql.enqueue(session, Task("orders.close", b"42", delay="30m", key="order-42"))

The database has an inbox, from which the daemon takes the tasks (docs/inbox.md). ``connection`` is
a connection, cursor or session of asyncpg, psycopg, SQLAlchemy, Django or sqlite3. With an
asynchronous one, ``await`` the call.
"""

from __future__ import annotations

from typing import Any

from tickwheel.client.delivery import Delivered
from tickwheel.client.sql import SCHEMA, ack_command, cancel, enqueue, reschedule, write
from tickwheel.inbox.schema import postgresql_sql, sqlite_sql

__all__ = ["ack", "cancel", "enqueue", "postgresql_sql", "reschedule", "sqlite_sql"]


def ack(connection: Any, delivery: Delivered, *, schema: str = SCHEMA) -> Any:
    """Acknowledge a delivery when the transaction commits. Return the id of the row. Raise
    StaleReceipt if another attempt has acknowledged the task in a transaction, so that this one
    must be rolled back."""
    receipt = delivery.epoch, delivery.id, delivery.attempt
    return write(connection, ack_command(delivery.topic, delivery.group, *receipt), schema)
