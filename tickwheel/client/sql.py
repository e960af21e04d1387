"""Commands for the daemon, written into an inbox in the application's own transaction.

A command is a row; a process of the daemon takes it when the transaction has committed
(``tickwheel/inbox/``). ``write`` supports connections, cursors and sessions of asyncpg, psycopg,
SQLAlchemy, Django and sqlite3, which it recognizes by the module of their class: this module
imports none of them. On asynchronous connections it returns an awaitable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tickwheel.api.times import Duration, duration_ms, moment_ms
from tickwheel.client.task_options import Task
from tickwheel.client.tasks import TaskChecker
from tickwheel.errors import (
    BY_CODE,
    BadRequest,
    LimitExceeded,
    TickwheelError,
    from_wire,
    shown,
)
from tickwheel.model.values import stored_bytes

if TYPE_CHECKING:
    from datetime import datetime

SCHEMA: Final = "tickwheel"
COLUMNS: Final = ("verb", "topic", "body", "delay_ms", "due_ms", "options")
TYPES: Final = ("text", "text", "bytea", "bigint", "bigint", "text")
"""The types of the values in PostgreSQL. The options are not jsonb, because a codec of the
application's connection would convert the JSON to JSON again."""
REFUSAL_STATES: Final = "TW"
"""The first letters of the SQLSTATE of errors that the inbox raises."""
_DOLLAR: Final = tuple(f"${number}" for number in range(1, len(COLUMNS) + 1))
_PERCENT: Final = ("%s",) * len(COLUMNS)
_SCHEMA: Final = re.compile(r"[\w-]+")
_CODE: Final = re.compile(r"\b([a-z_]+): ")
_CHECKER = TaskChecker()


class Command(NamedTuple):
    """A row of an inbox. Its fields are those of ``COLUMNS``."""

    verb: str
    topic: str | None
    body: bytes | None
    delay_ms: int | None
    due_ms: int | None
    options: str
    """JSON of a map."""


# --- commands ------------------------------------------------------------------------------------


def enqueue_command(task: Task) -> Command:
    """Return the command that enqueues a task. Raise BadRequest for an invalid task, judged by the
    default limits."""
    (topic, body, delay_ms, *more), _ = _CHECKER.check(task)
    given = more[0].items() if more else ()
    options = {name: value for name, value in given if value is not None}
    due_ms = options.pop("due_ms", None)
    size, limit = len(body) + stored_bytes(options), _CHECKER.limits.task_bytes_max
    if size > limit:
        raise LimitExceeded(
            f"task has {size} bytes with all its fields; the limit is {limit} (task_bytes_max)"
        )
    return Command("enqueue", topic, body, delay_ms or None, due_ms, json.dumps(options))


def ack_command(topic: str, group: str, epoch: int, task_id: int, attempt: int) -> Command:
    """Return the command that acknowledges a delivery."""
    options = {"id": task_id, "group": group, "epoch": epoch, "attempt": attempt}
    return Command("ack", topic, None, None, None, json.dumps(options))


def _selection(task_id: int | None, topic: str | None, key: str | None) -> str:
    if (topic is None) != (key is None) or (task_id is None) == (topic is None):
        raise BadRequest("select tasks either by task_id or by topic and key")
    if task_id is None:
        _CHECKER.check(Task(str(topic), b"", key=key))
        return json.dumps({"key": key})
    if type(task_id) is not int or not 0 <= task_id < 2**63:
        raise BadRequest(f"task_id must be an integer from 0 to 2^63 - 1, not {shown(task_id)}")
    return json.dumps({"id": task_id})


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
    selection = _selection(task_id, topic, key)
    return write(connection, Command("cancel", topic, None, None, None, selection), schema)


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
    if (delay is None) == (at is None):
        raise BadRequest("reschedule must have exactly one of delay and at")
    delay_ms = None if delay is None else duration_ms(delay, "delay")
    due_ms = None if at is None else moment_ms(at, "at")
    selection = _selection(task_id, topic, key)
    command = Command("reschedule", topic, None, delay_ms, due_ms, selection)
    return write(connection, command, schema)


# --- writing -------------------------------------------------------------------------------------


def check_schema(schema: str) -> None:
    """Raise BadRequest for a schema that SQL, with any driver, cannot name between quotes."""
    if not _SCHEMA.fullmatch(schema) or len(schema.encode()) > 63:
        raise BadRequest(
            "schema must be a name of up to 63 bytes of letters, digits, _ and -, not"
            f" {shown(schema)}"
        )


def write(connection: Any, command: Command, schema: str = SCHEMA) -> Any:
    """Write a command in the current transaction of a connection. Return the id of its row, or an
    awaitable of it. ``schema`` is that of the inbox in PostgreSQL. Raise BadRequest for an
    unsupported connection, and the error of the inbox if it refuses the command."""
    check_schema(schema)
    for base in type(connection).__mro__:
        writer = _WRITERS.get(base.__module__.partition(".")[0])
        if writer is not None:
            with _refusals():
                return writer(connection, command, schema)
    raise BadRequest(
        "connection must be one of asyncpg, psycopg, SQLAlchemy, Django or sqlite3, not"
        f" {shown(connection)}"
    )


def _statement(dialect: str, schema: str, places: Iterable[str]) -> str:
    """Return the statement that writes a command, with these placeholders."""
    if dialect == "sqlite":
        return f"INSERT INTO tickwheel_inbox ({', '.join(COLUMNS)}) VALUES ({', '.join(places)})"
    if dialect != "postgresql":
        raise BadRequest(f"an inbox is in postgresql or sqlite, not {dialect!r:.60}")
    casts = (f"CAST({place} AS {kind})" for place, kind in zip(places, TYPES, strict=True))
    return f'SELECT "{schema}".inbox_put({", ".join(casts)}::jsonb)'


async def _awaited(work: Awaitable[Any]) -> Any:
    with _refusals():
        return await work


def _asyncpg(connection: Any, command: Command, schema: str) -> Awaitable[Any]:
    return _awaited(connection.fetchval(_statement("postgresql", schema, _DOLLAR), *command))


def _psycopg(connection: Any, command: Command, schema: str) -> Any:
    from psycopg import AsyncRawCursor, RawCursor
    from psycopg.rows import tuple_row

    # The cursors of the application can have another form of rows, or a name.
    cursor = getattr(connection, "connection", connection).cursor(row_factory=tuple_row)
    places = _DOLLAR if isinstance(cursor, (AsyncRawCursor, RawCursor)) else _PERCENT
    result = cursor.execute(_statement("postgresql", schema, places), command)
    if not isinstance(result, Awaitable):
        return int(cursor.fetchone()[0])

    async def finish() -> Any:
        return int((await (await result).fetchone())[0])

    return _awaited(finish())


def _sqlite3(connection: Any, command: Command, schema: str) -> int:
    insert = _statement("sqlite", schema, ["?"] * len(COLUMNS))
    return int(connection.execute(insert, command).lastrowid)


def _django(connection: Any, command: Command, schema: str) -> int:
    statement = _statement(connection.vendor, schema, _PERCENT)
    with connection.cursor() as cursor:
        cursor.execute(statement, command)
        return int(cursor.lastrowid if connection.vendor == "sqlite" else cursor.fetchone()[0])


def _sqlalchemy(connection: Any, command: Command, schema: str) -> Any:
    connection = getattr(connection, "registry", lambda: connection)()  # of a scoped session
    if hasattr(connection, "run_sync"):
        return _awaited(connection.run_sync(_sqlalchemy_sync, command, schema))
    return _sqlalchemy_sync(connection, command, schema)


def _sqlalchemy_sync(connection: Any, command: Command, schema: str) -> int:
    from sqlalchemy import BigInteger, LargeBinary, String, bindparam, text
    from sqlalchemy.engine import Connection

    if not isinstance(connection, Connection):
        connection = connection.connection()  # of a Session
    dialect = connection.dialect.name
    statement = _statement(dialect, schema, [f":{name}" for name in COLUMNS])
    kinds = (String, String, LargeBinary, BigInteger, BigInteger, String)
    values = [
        bindparam(name, value, type_=kind())
        for name, value, kind in zip(COLUMNS, command, kinds, strict=True)
    ]
    result = connection.execute(text(statement).bindparams(*values))
    return int(result.lastrowid if dialect == "sqlite" else result.scalar_one())


_WRITERS: Final[Mapping[str, Callable[[Any, Command, str], Any]]] = {
    "asyncpg": _asyncpg,
    "django": _django,
    "psycopg": _psycopg,
    "sqlalchemy": _sqlalchemy,
    "sqlite3": _sqlite3,
}
"""Package of the connection's class → the function that writes with it."""


@contextmanager
def _refusals() -> Iterator[None]:
    """Convert errors that the inbox raises to ours. The transaction has failed all the same."""
    try:
        yield
    except Exception as error:
        part: Any = error
        while part is not None:
            refusal = _refusal(part)
            if refusal is not None:
                raise refusal from error
            part = getattr(part, "orig", None) or part.__cause__
        raise


def _refusal(error: Any) -> TickwheelError | None:
    """Return our error in a driver's error, or None."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None) or ""
    if state.startswith(REFUSAL_STATES) or type(error).__module__ == "sqlite3":
        line = str(error).partition("\n")[0]
        for match in _CODE.finditer(line):
            if match[1] in BY_CODE:
                return from_wire(match[1], line[match.end() :])
    return None
