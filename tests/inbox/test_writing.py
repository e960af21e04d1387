"""What applications write into an inbox: with every driver, and with SQL alone."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import django
import psycopg
import pytest
from django.conf import settings as django_settings
from psycopg.rows import dict_row, scalar_row
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session

from server.http.rig import HttpRig
from support.odd_values import places, put
from support.pgbouncer import pooled
from support.postgresql import USER, PostgresServer
from tickwheel import BadRequest, LimitExceeded, StaleReceipt, Task, sql
from tickwheel.api.policies import IfPending, Retry
from tickwheel.api.times import duration_ms, moment_ms
from tickwheel.client.sql import Command, ack_command, enqueue_command, write
from tickwheel.client.typed import task as typed_task
from tickwheel.errors import TickwheelError
from tickwheel.inbox.contract import Row
from tickwheel.inbox.postgresql import PostgresInbox
from tickwheel.inbox.sqlite import SqliteInbox
from tickwheel.limits import Limits
from tickwheel.model.values import stored_bytes

AT = datetime.now(UTC).replace(microsecond=0) + timedelta(days=365)
TASK = Task(
    "orders.close", b"\x00\xff", delay=1.5, key="order-42", tag="fast", priority=7, ttl="1h",
    properties={"n": 2**62, "x": 0.5, "t": "ä'\"", "b": False}, retry=Retry.fixed(5, retries=2),
    if_pending=IfPending("replace", replaces="due"),
)  # fmt: skip
WRITTEN = Row(
    0, "enqueue", "orders.close", b"\x00\xff", 1500, None,
    {
        "key": "order-42", "tag": "fast", "priority": 7, "ttl_ms": 3_600_000,
        "properties": {"n": 2**62, "x": 0.5, "t": "ä'\"", "b": False},
        "retry": {"kind": "fixed", "delay_ms": 5000, "retries": 2, "jitter": 0.0},
        "if_pending": {"action": "replace", "replaces": "due"},
    },
    0,
)  # fmt: skip


@typed_task("orders.typed")
def close_order(order_id: int) -> None:
    """Close an order."""


@pytest.fixture
async def postgres(database: str) -> AsyncIterator[PostgresInbox]:
    inbox = PostgresInbox(database)
    await inbox.open()
    await inbox.lead()
    await inbox.take_over()
    yield inbox
    await inbox.close()


def plain(row: Row) -> Row:
    return row._replace(id=0, at_ms=0, options_text="{}")


async def check(inbox: PostgresInbox | SqliteInbox) -> None:
    """Check that exactly the rows of ``do_all`` are there."""
    rows = [plain(row) for row in await inbox.read()]
    assert rows[0] == WRITTEN
    assert rows[1] == Row(0, "cancel", "orders.close", b"", None, None, {"key": "k"}, 0)
    due_ms = int(AT.timestamp() * 1000)
    assert rows[2] == Row(0, "reschedule", None, b"", None, due_ms, {"id": 5}, 0)
    assert rows[3] == Row(
        0, "enqueue", "orders.typed", b'{"order_id":42}', 1_800_000, None, {"encoding": "json"}, 0
    )
    assert len(rows) == 4


def do_all(connection: Any) -> list[Any]:
    """Write four rows. With an asynchronous connection the results are to be awaited in order."""
    typed: Any = close_order
    return [
        sql.enqueue(connection, TASK),
        sql.cancel(connection, topic="orders.close", key="k"),
        sql.reschedule(connection, 5, at=AT),
        typed.options(delay="30m").enqueue_in(connection, order_id=42),
    ]


async def do_all_async(connection: Any) -> None:
    for result in do_all(connection):
        assert isinstance(result, Awaitable)
        assert type(await result) is int


CODECS: list[tuple[str, Any, Any, Any]] = [
    ("json", json.dumps, json.loads, "text"),
    ("jsonb", json.dumps, json.loads, "text"),
    ("text", str, str, "text"),
    ("bytea", bytes, bytes, "binary"),
]


@pytest.mark.parametrize("codecs", [[], CODECS], ids=["no codecs", "codecs"])
async def test_asyncpg(postgres: PostgresInbox, database: str, codecs: list[Any]) -> None:
    pool = await asyncpg.create_pool(database, min_size=1, max_size=1)
    async with pool, pool.acquire() as connection:
        for name, encoder, decoder, form in codecs:
            await connection.set_type_codec(
                name, schema="pg_catalog", encoder=encoder, decoder=decoder, format=form
            )
        transaction = connection.transaction()
        await transaction.start()
        await do_all_async(connection)
        await transaction.rollback()
        async with connection.transaction():
            await do_all_async(connection)
    await check(postgres)


@pytest.mark.parametrize(
    "options", [{}, {"row_factory": dict_row}, {"cursor_factory": psycopg.RawCursor}]
)
async def test_psycopg(postgres: PostgresInbox, database: str, options: dict[str, Any]) -> None:
    with psycopg.connect(database, **options) as connection:
        do_all(connection)
        connection.rollback()
        assert [type(row) for row in do_all(connection)] == [int] * 4
    await check(postgres)


async def test_through_a_pooler(
    postgres: PostgresInbox, server: PostgresServer, database: str
) -> None:
    with pooled(server, "transaction", USER) as port:
        url = database.replace(f":{server.port}/", f":{port}/")
        with psycopg.connect(url, prepare_threshold=None) as connection:
            do_all(connection)
            connection.rollback()
            do_all(connection)
        await check(postgres)
        link = await asyncpg.connect(url, statement_cache_size=0)
        async with link.transaction():
            await do_all_async(link)
        await link.close()
    count = "SELECT count(*) FROM tickwheel.inbox_0"
    assert server.sql(count, db=database.rpartition("/")[2])[0][0] == 8


@pytest.mark.parametrize(
    "options", [{}, {"row_factory": scalar_row, "binary": True}, {"name": "orders"}]
)
async def test_a_cursor_of_psycopg(
    postgres: PostgresInbox, database: str, options: dict[str, Any]
) -> None:
    with psycopg.connect(database) as connection, connection.cursor(**options) as cursor:
        do_all(cursor)
    await check(postgres)


@pytest.mark.parametrize(
    "options", [{}, {"row_factory": dict_row}, {"cursor_factory": psycopg.AsyncRawCursor}]
)
async def test_psycopg_asynchronous(
    postgres: PostgresInbox, database: str, options: dict[str, Any]
) -> None:
    async with await psycopg.AsyncConnection.connect(database, **options) as connection:
        await do_all_async(connection)
        await connection.rollback()
        await do_all_async(connection)
    await check(postgres)


async def test_sqlalchemy_on_postgresql(postgres: PostgresInbox, database: str) -> None:
    engine = create_engine(database.replace("postgresql:", "postgresql+psycopg:"))
    with Session(engine) as session:
        do_all(session)
        session.rollback()
        do_all(session)
        session.commit()
    engine.dispose()
    await check(postgres)


async def test_sqlalchemy_asynchronous(postgres: PostgresInbox, database: str) -> None:
    engine = create_async_engine(database.replace("postgresql:", "postgresql+asyncpg:"))
    async with AsyncSession(engine) as session:
        await do_all_async(session)
        await session.rollback()
    scoped = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
    await do_all_async(scoped)
    await scoped.rollback()
    await scoped.remove()
    async with engine.begin() as connection:
        await do_all_async(connection)
    await engine.dispose()
    await check(postgres)


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[tuple[Path, SqliteInbox]]:
    path = tmp_path / "app.db"
    inbox = SqliteInbox(f"sqlite:///{path}")
    await inbox.open()
    await inbox.take_over()
    yield path, inbox
    await inbox.close()


async def test_sqlite3(file: tuple[Path, SqliteInbox]) -> None:
    path, inbox = file
    connection = sqlite3.connect(path)
    do_all(connection)
    connection.rollback()
    with connection:
        assert [type(row) for row in do_all(connection.cursor())] == [int] * 4
    connection.close()
    await check(inbox)


async def test_sqlalchemy_on_sqlite(file: tuple[Path, SqliteInbox]) -> None:
    path, inbox = file
    engine = create_engine(f"sqlite:///{path}")
    with Session(engine) as session:
        do_all(session)
        session.rollback()
    with engine.begin() as connection:
        do_all(connection)
    engine.dispose()
    await check(inbox)


def _django(options: dict[str, Any]) -> Any:
    """Return a connection of Django."""
    from django.db import ConnectionHandler

    if not django_settings.configured:
        django_settings.configure(USE_TZ=True)
        django.setup()
    return ConnectionHandler({"default": options})["default"]


def _do_all_in_django(connection: Any) -> None:
    connection.set_autocommit(False)
    do_all(connection)
    connection.rollback()
    do_all(connection)
    connection.commit()
    connection.close()


async def test_django_on_sqlite(file: tuple[Path, SqliteInbox]) -> None:
    path, inbox = file
    options = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
    await asyncio.to_thread(lambda: _do_all_in_django(_django(options)))
    await check(inbox)


async def test_django_on_postgresql(postgres: PostgresInbox, database: str) -> None:
    host, _, port = database.partition("@")[2].partition("/")[0].partition(":")
    options = {
        "ENGINE": "django.db.backends.postgresql", "NAME": database.rpartition("/")[2],
        "USER": "postgres", "HOST": host, "PORT": port,
    }  # fmt: skip
    await asyncio.to_thread(lambda: _do_all_in_django(_django(options)))
    await check(postgres)


# --- refusals ------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"verb": "explode"}, "verb must be"),
    ({"topic": "bad topic"}, "topic must be 1 to 255 characters"),
    ({"topic": None}, "must have a topic and a body"),
    ({"body": None}, "must have a topic and a body"),
    ({"delay_ms": -1}, "delay must be at least 0, not -1 ms"),
    ({"delay_ms": 1, "due_ms": 1}, "only one of delay and at"),
    ({"delay_ms": 2**50}, "the limit is 315576000000 ms"),
    ({"delay_ms": 1, "options": {"delay_level": 1}}, "only one of delay_level, delay and at"),
    ({"options": {"unknown": 1}}, "unknown option 'unknown'"),
    ({"options": {"key": 1}}, "key must be text, not '1'"),
    ({"options": {"key": "ä" * 256}}, "key has 256 characters; the limit is 255"),
    ({"options": {"tag": "*"}}, "tag must be"),
    ({"options": {"tag": " x"}}, "tag must be"),
    ({"options": {"tag": "a||b"}}, "tag must be"),
    ({"options": {"priority": 256}}, "priority must be a whole number from 0 to 255"),
    ({"options": {"priority": 1.5}}, "priority must be a whole number"),
    ({"options": {"priority": "1"}}, "priority must be a whole number"),
    ({"options": {"ttl_ms": 0}}, "ttl_ms must be a whole number from 1 to"),
    ({"options": {"within_ms": 2**40}}, "within_ms must be a whole number from 0 to"),
    ({"options": {"trace": "00-1-2-00"}}, "trace must be a valid traceparent"),
    ({"options": {"trace": f"ff-{'1' * 32}-{'1' * 16}-00"}}, "trace must be"),
    ({"options": {"encoding": "Json"}}, "encoding must be a valid encoding"),
    ({"options": {"properties": [1]}}, "properties must be a map"),
    ({"options": {"properties": {"a": None}}}, "properties must be a map"),
    ({"options": {"properties": {"a": {}}}}, "properties must be a map"),
    ({"options": {"properties": {str(n): 1 for n in range(65)}}}, "has 65; the limit is 64"),
    ({"options": {"properties": {"a": "x" * 4097}}}, "a property has 4097 bytes; the limit is"),
    ({"options": {"properties": {"a": 2**63}}}, "without integers of more than 64 bits"),
    ({"options": f'{{"properties": {{"a": {"9" * 310}.5}}}}'}, "numbers above 1.79769e+308"),
    ({"options": f'{{"properties": {{"a": -{"9" * 310}.5}}}}'}, "numbers above 1.79769e+308"),
    ({"options": {"retry": 5}}, "retry must be the name of a policy or a map, not '5'"),
    ({"options": {"retry": "fixed:delay=5s"}}, "retry must be the name of a policy or a map"),
    (
        {"options": {"retry": {"kind": "slow"}}},
        "kind must be one of exponential, fixed, none, table",
    ),
    ({"options": {"retry": {"kind": "table"}}}, "retry.delays_ms must be 1 to 1024 numbers, each"),
    ({"options": {"retry": {"kind": "none", "retries": 1}}}, "retry has no option 'retries'"),
    (
        {"options": {"key": "k", "if_pending": "maybe"}},
        "if_pending must be one of add, keep, replace",
    ),
    (
        {"options": {"key": "k", "if_pending": {"action": "keep", "due": "new"}}},
        "has no option 'due'",
    ),
    ({"options": {"if_pending": "keep"}}, "if_pending needs a key"),
    ({"options": {"order_key": "a", "retry": "r"}}, "either order_key or retry"),
    ({"options": {"order_key": "a", "shard_by": "b"}}, "shard_by and order_key must be equal"),
    ({"verb": "cancel", "body": None}, "by id or by topic and key"),
    ({"verb": "cancel", "options": {"id": 1, "key": "k"}}, "by id or by topic and key"),
    ({"verb": "reschedule", "options": {"key": "k"}}, "exactly one of delay and at"),
    ({"verb": "cancel", "delay_ms": 1, "options": {"key": "k"}}, "exactly one of delay and at"),
    ({"verb": "cancel", "options": {"id": "x"}}, "cancel.id must be a whole number of 63 bits"),
    ({"verb": "cancel", "options": {"id": -1}}, "cancel.id must be a whole number of 63 bits"),
    ({"verb": "cancel", "options": {"key": 5}}, "cancel.key must be text of up to 255 characters"),
    ({"verb": "cancel", "options": {"key": "k", "x": 1}}, "cancel has no option 'x'"),
    ({"verb": "ack", "options": {"id": 1}}, "an ack must have"),
    ({"due_ms": -1}, "at must not be before 1970"),
    ({"options": [1]}, "options must be a map"),
]


async def test_sql_refuses_what_the_daemon_would(postgres: PostgresInbox, database: str) -> None:
    connection = await asyncpg.connect(database)
    for change, message in REFUSED:
        fields = {"verb": "enqueue", "topic": "t", "body": b"", "delay_ms": None, "due_ms": None}
        fields |= {"options": {}} | change
        if not isinstance(fields["options"], str):
            fields["options"] = json.dumps(fields["options"])
        with pytest.raises(BadRequest) as caught:
            await write(connection, Command(**fields))
        assert message in caught.value.message
        is_limit = "; the limit is" in message and "ms" not in message
        assert isinstance(caught.value, LimitExceeded) == is_limit, message
    await connection.close()
    assert await postgres.read() == []


BASES: tuple[dict[str, Any], ...] = (
    {
        "key": "k", "tag": "g", "priority": 1, "properties": {"n": 5, "r": 1.5, "s": "x"},
        "ttl_ms": 5_000, "within_ms": 5,
        "retry": {"kind": "exponential", "base_ms": 5, "factor": 2.0, "cap_ms": 9, "retries": 3},
        "if_pending": {"action": "replace", "window_ms": 5, "due": "later", "max_wait_ms": 9},
    },
    {"order_key": "o", "shard_by": "o", "encoding": "json"},
    {"trace": f"00-{'1' * 32}-{'2' * 16}-01"},
    {"retry": {"kind": "table", "delays_ms": [1, 2]}, "delay_level": 1},
    {"retry": {"kind": "fixed", "delay_ms": 5, "jitter": 0.5}},
    {"key": "k", "if_pending": {"action": "keep", "unique_until": "started"}},
)  # fmt: skip
NEW = ("", "x", "a||b", 0, 1, 2**63, -1, 0.5, 1.0, True, [], ["x"], {}, {"a": 1})
"""Tried at each place of ``BASES``."""
NOT_IN_SQL = ("does not exist; known", "delay_level must be")
"""Errors about names and levels that are settings of the daemon."""


BLANKS = [chr(code) for code in range(0x3001) if chr(code).isspace()]
EXTREMES: tuple[dict[str, Any], ...] = (
    *({"tag": f"{blank}x"} for blank in BLANKS),
    *({"tag": f"x{blank}"} for blank in BLANKS),
    *({"tag": tag} for tag in ("x y", "vip", "dev", "t" * 255, "t" * 256)),
    *({"encoding": f"{first}zlib,zstd"} for first in ("", "json,", "json;v=2,", "zlib;a=b,")),
    {"encoding": "json,zlib,zstd,aesgcm"},
    *({"properties": {"a": "ä" * n}} for n in (2_048, 2_049)),
    *({"properties": {"n" * n: 1}} for n in (255, 256)),
    *({"properties": {str(n): True for n in range(count)}} for count in (64, 65)),
    *({"properties": {"a": n}} for n in (2**63 - 1, 2**63, -(2**63), -(2**63) - 1)),
)
"""Options at each limit, and just above it."""


async def verdicts(
    rig: HttpRig, connection: Any, options: dict[str, Any], size: int = 1
) -> tuple[str, str]:
    """Return the error of the daemon and that of SQL for a task with a body of ``size`` bytes; "":
    they accept it."""
    due = {} if "delay_level" in options else {"delay_ms": 60_000}
    body = "x" * size
    answer = await rig.call("POST", "/v1/tasks", {"topic": "t", "body": body} | due | options)
    command = Command("enqueue", "t", body.encode(), due.get("delay_ms"), None, json.dumps(options))
    error = "" if answer.status == 201 else answer.json["detail"]
    try:
        await write(connection, command)
    except TickwheelError as caught:
        return error, caught.message
    return error, ""


async def test_sql_accepts_what_the_daemon_does(postgres: PostgresInbox, database: str) -> None:
    rig, connection = await HttpRig().start(), await asyncpg.connect(database)
    differing: list[Any] = []
    changed = (put(b, way, new) for b in BASES for way in places(b) if way for new in NEW)
    for options in (*changed, *EXTREMES):
        error, refused = await verdicts(rig, connection, options)
        if bool(error) != bool(refused) and not any(text in error for text in NOT_IN_SQL):
            differing.append((options, error, refused))
    await connection.close()
    await rig.stop()
    assert not differing


async def test_sql_counts_the_bytes_of_a_task_as_the_daemon_does(
    postgres: PostgresInbox, database: str
) -> None:
    limit = 2_000
    rig = await HttpRig(task_bytes_max=limit, body_bytes_max=limit).start()
    await postgres.announce(rig.settings.limits())
    connection = await asyncpg.connect(database)
    for options in (*BASES, {"key": "ä"}, {"tag": "ä", "properties": {"ä": "ä"}}):
        left = limit - stored_bytes(options)
        assert await verdicts(rig, connection, options, left) == ("", "")
        for error in await verdicts(rig, connection, options, left + 1):
            assert f"{limit + 1} bytes with all its fields; the limit is {limit}" in error
    for options in ({}, {"priority": 0, "within_ms": 0, "properties": {}}):
        assert await verdicts(rig, connection, options, limit) == ("", "")
    await connection.close()
    await rig.stop()


def test_python_counts_the_bytes_of_a_task_as_the_daemon_does() -> None:
    limits = Limits()
    properties = {f"{n:02}": "v" * limits.property_value_bytes_max for n in range(20)}
    size = limits.task_bytes_max - stored_bytes({"properties": properties})
    command = enqueue_command(Task("t", b"x" * size, properties=properties, within=0))
    assert json.loads(command.options) == {"properties": properties}
    with pytest.raises(LimitExceeded, match=r"1114113 bytes .* is 1114112 \(task_bytes_max\)"):
        enqueue_command(Task("t", b"x" * (size + 1), properties=properties))


async def test_a_body_over_the_limit_has_its_own_code(
    postgres: PostgresInbox, database: str
) -> None:
    await postgres.announce(Limits(body_bytes_max=3))
    connection = await asyncpg.connect(database)
    with pytest.raises(TickwheelError, match="body has 4 bytes; the limit is 3") as caught:
        await sql.enqueue(connection, Task("t", b"1234"))
    assert caught.value.code == "body_too_large"
    await sql.enqueue(connection, Task("t", b"123"))
    await connection.close()


@pytest.mark.parametrize("driver", ["psycopg", "sqlalchemy", "sqlalchemy async", "sqlite3"])
async def test_every_driver_has_our_errors(
    postgres: PostgresInbox, database: str, file: tuple[Path, SqliteInbox], driver: str
) -> None:
    command = ack_command("t", "g", 1, 2, 3)
    match = "another attempt has acknowledged this task"
    if driver == "psycopg":
        with psycopg.connect(database) as connection:
            write(connection, command)
            with pytest.raises(StaleReceipt, match=match):
                write(connection, command)
    elif driver == "sqlalchemy":
        engine = create_engine(database.replace("postgresql:", "postgresql+psycopg:"))
        with Session(engine) as session:
            write(session, command)
            with pytest.raises(StaleReceipt, match=match):
                write(session, command)
        engine.dispose()
    elif driver == "sqlalchemy async":
        engine_async = create_async_engine(database.replace("postgresql:", "postgresql+asyncpg:"))
        async with AsyncSession(engine_async) as session_async:
            await write(session_async, command)
            with pytest.raises(StaleReceipt, match=match):
                await write(session_async, command)
        await engine_async.dispose()
    else:
        file_connection = sqlite3.connect(file[0])
        write(file_connection, command)
        with pytest.raises(StaleReceipt, match=match):
            write(file_connection, command)
        file_connection.close()


def test_other_errors_of_a_driver_are_left_alone(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "empty.db")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        sql.enqueue(connection, Task("t", b""))
    connection.close()


def _wrong(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        call()


def test_python_checks_before_it_writes() -> None:
    connection = sqlite3.connect(":memory:")
    _wrong(lambda: sql.enqueue(object(), Task("t", b"")), "must be one of asyncpg, psycopg")
    _wrong(lambda: sql.enqueue(connection, Task("bad topic", b"")), "topic must be")
    _wrong(lambda: sql.enqueue(connection, Task("t", b""), schema="a b"), "schema must be a name")
    _wrong(lambda: sql.cancel(connection), "either by task_id or by topic and key")
    _wrong(lambda: sql.cancel(connection, topic="t"), "either by task_id or by topic and key")
    _wrong(lambda: sql.cancel(connection, 1, topic="t"), "either by task_id or by topic and key")
    _wrong(lambda: sql.cancel(connection, -1), "task_id must be")
    _wrong(lambda: sql.reschedule(connection, 1), "exactly one of delay and at")
    _wrong(lambda: sql.reschedule(connection, 1, delay=1, at=AT), "exactly one of delay and at")
    connection.close()


# --- SQL alone -----------------------------------------------------------------------------------


async def test_every_option_has_an_argument_in_sql(postgres: PostgresInbox, database: str) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute(
        """SELECT tickwheel.enqueue(topic => 't', body => '{"a": 1}'::jsonb,
            delay => interval '1.5 s', key => 'k', tag => 'g', properties => '{"n": 1}',
            priority => 3, ttl => interval '1 h', within => interval '2 s', order_key => 'o',
            trace => $1, shard_by => 'o', if_pending => '{"action": "keep"}')""",
        f"00-{'1' * 32}-{'2' * 16}-01",
    )
    await connection.execute(
        "SELECT tickwheel.enqueue(topic => 't', body => 'text', retry => 'slow', delay_level => 2)"
    )
    await connection.execute(
        r"SELECT tickwheel.enqueue(topic => 't', body => '\x00ff'::bytea, at => $1)", AT
    )
    await connection.close()
    first, second, third = [plain(row) for row in await postgres.read()]
    assert first == Row(
        0, "enqueue", "t", b'{"a": 1}', 1500, None,
        {
            "key": "k", "tag": "g", "properties": {"n": 1}, "priority": 3, "ttl_ms": 3_600_000,
            "within_ms": 2000, "order_key": "o", "trace": f"00-{'1' * 32}-{'2' * 16}-01",
            "encoding": "json", "shard_by": "o", "if_pending": {"action": "keep"},
        },
        0,
    )  # fmt: skip
    assert second[3:8] == (b"text", None, None, {"retry": "slow", "delay_level": 2}, 0)
    assert third[3:8] == (b"\x00\xff", None, int(AT.timestamp() * 1000), {}, 0)


@pytest.mark.parametrize("micros", [0, 1, 499, 500, 999, 1_000])
async def test_sql_rounds_times_up_as_python_does(
    postgres: PostgresInbox, database: str, micros: int
) -> None:
    span, at = timedelta(seconds=5, microseconds=micros), AT + timedelta(microseconds=micros)
    connection = await asyncpg.connect(database)
    await connection.execute(
        "SELECT tickwheel.enqueue('t', 'x'::text, delay => $1, ttl => $1, within => $1)", span
    )
    await connection.execute("SELECT tickwheel.enqueue('t', 'x'::text, at => $1)", at)
    await connection.execute("SELECT tickwheel.reschedule(5, delay => $1)", span)
    await connection.execute("SELECT tickwheel.reschedule(5, at => $1)", at)
    await connection.close()
    span_ms, at_ms = duration_ms(span, "delay"), moment_ms(at, "at")
    rows = await postgres.read()
    assert rows[0].options == {"ttl_ms": span_ms, "within_ms": span_ms}
    times = [(row.delay_ms, row.due_ms) for row in rows]
    assert times == [(span_ms, None), (None, at_ms)] * 2


@pytest.mark.parametrize("call", ["enqueue('t', 'x'::text,", "reschedule(5,"])
async def test_sql_refuses_an_infinite_time_by_name(
    postgres: PostgresInbox, database: str, call: str
) -> None:
    connection = await asyncpg.connect(database)
    with pytest.raises(asyncpg.PostgresError, match="at must be finite, not Inf") as caught:
        await connection.execute(f"SELECT tickwheel.{call} at => 'infinity')")
    assert caught.value.sqlstate == "TW001"
    await connection.close()


async def test_an_application_needs_no_other_privileges(
    postgres: PostgresInbox, database: str
) -> None:
    admin = await asyncpg.connect(database)
    await admin.execute("DROP ROLE IF EXISTS shop")
    await admin.execute("CREATE ROLE shop LOGIN")
    grants = [line.strip("- ") for line in sql.postgresql_sql().splitlines() if "GRANT" in line]
    assert len(grants) == 2
    for grant in grants:
        await admin.execute(grant.replace("TO application", "TO shop"))
    shop = await asyncpg.connect(database.replace("postgres@", "shop@"))
    await shop.execute("SELECT tickwheel.enqueue(topic => 't', body => 'x')")
    await shop.execute("SELECT tickwheel.cancel(topic => 't', key => 'x')")
    await sql.enqueue(shop, TASK)
    for statement in (
        "SELECT * FROM tickwheel.inbox_0", "DELETE FROM tickwheel.inbox_refused",
        "UPDATE tickwheel.inbox_state SET side = 1",
        "SELECT tickwheel.inbox_realign('1:1:', 0)",
    ):  # fmt: skip
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await shop.execute(statement)
    await shop.close()
    await admin.execute("DROP OWNED BY shop")
    await admin.execute("DROP ROLE shop")
    await admin.close()
    assert len(await postgres.read()) == 3


def test_a_command_has_the_form_of_the_protocol() -> None:
    command = enqueue_command(TASK)
    assert json.loads(command.options) == WRITTEN.options
