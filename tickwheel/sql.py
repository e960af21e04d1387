"""Tasks in the application's own transaction: a task exists if and only if it commits.

    with Session(engine) as session, session.begin():
        session.add(Order(number="42"))
        sql.enqueue(session, Task("orders.close", b"42", delay="30m", key="order-42"))

The database has an inbox, from which the daemon takes the tasks (docs/inbox.md). ``connection`` is
a connection, cursor or session of asyncpg, psycopg, SQLAlchemy, Django or sqlite3. With an
asynchronous one, ``await`` the call.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tickwheel.api.times import Duration
from tickwheel.client.delivery import Delivered
from tickwheel.client.sql import (
    SCHEMA,
    ack_command,
    cancel_command,
    enqueue_command,
    reschedule_command,
    write,
)
from tickwheel.client.task_options import Task
from tickwheel.inbox.schema import postgresql_sql, sqlite_sql

__all__ = ["ack", "cancel", "enqueue", "postgresql_sql", "reschedule", "sqlite_sql"]


def enqueue(connection: Any, task: Task, *, schema: str = SCHEMA) -> Any:
    """Enqueue a task when the transaction commits. ``delay`` counts from this call. Return the id
    of the row in the inbox. Raise BadRequest for an invalid task."""
    return write(connection, enqueue_command(task), schema)


def cancel(
    connection: Any,
    task_id: int | None = None,
    *,
    topic: str | None = None,
    key: str | None = None,
    schema: str = SCHEMA,
) -> Any:
    """Cancel a task by its id, or all unfinished tasks of a topic with a key, when the transaction
    commits. Return the id of the row. Raise BadRequest."""
    return write(connection, cancel_command(task_id, topic, key), schema)


def reschedule(
    connection: Any,
    task_id: int | None = None,
    *,
    topic: str | None = None,
    key: str | None = None,
    delay: Duration | None = None,
    at: datetime | None = None,
    schema: str = SCHEMA,
) -> Any:
    """Give the tasks that ``cancel`` would select a new due time when the transaction commits.
    ``delay`` counts from this call. Return the id of the row. Raise BadRequest."""
    return write(connection, reschedule_command(task_id, topic, key, delay, at), schema)


def ack(connection: Any, delivery: Delivered, *, schema: str = SCHEMA) -> Any:
    """Acknowledge a delivery when the transaction commits. Return the id of the row. Raise
    StaleReceipt if another attempt has acknowledged the task in a transaction, so that this one
    must be rolled back."""
    receipt = delivery.epoch, delivery.id, delivery.attempt
    return write(connection, ack_command(delivery.topic, delivery.group, *receipt), schema)
