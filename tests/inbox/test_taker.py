"""The taker between an inbox, in PostgreSQL or SQLite, and a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar
from unittest.mock import AsyncMock

import asyncpg
import pytest

from inbox.conftest import Taking
from support.daemon import Daemon
from support.pgbouncer import pooled
from support.postgresql import USER, PostgresServer
from support.waiting import LOOK_S, WAIT_S, Patience, comes, soon
from tickwheel import BadRequest, Client, Conflict, StaleReceipt, Task, Unauthorized, sql, sync
from tickwheel.client.sql import Command, write
from tickwheel.client.wire import NumberedClient
from tickwheel.inbox import contract, open_inbox, taker
from tickwheel.inbox import postgresql as postgresql_inbox
from tickwheel.inbox import sqlite as sqlite_inbox
from tickwheel.inbox.contract import Batch, InboxTrouble
from tickwheel.inbox.postgresql import SESSION, PostgresInbox
from tickwheel.inbox.sqlite import SqliteInbox
from tickwheel.server import companion
from tickwheel.server import inbox as server_inbox
from tickwheel.server.settings import load

HOUR_S = 3600.0
T = TypeVar("T")


@pytest.fixture(params=["postgresql", "sqlite"])
def inbox(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty inbox."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'app.db'}"
    return str(request.getfixturevalue("database"))


class Application:
    """A program that writes to its database."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.connection: Any = None

    async def __aenter__(self) -> Self:
        if self._url.startswith("sqlite"):
            self.connection = sqlite3.connect(self._url.removeprefix("sqlite:///"))
            return self
        self.connection = await asyncpg.connect(self._url)
        return self

    async def __aexit__(self, *_: object) -> None:
        closed = self.connection.close()
        if isinstance(closed, Awaitable):
            await closed

    async def commit(self, *works: Callable[[Any], Any]) -> None:
        """Run functions of the connection in one transaction."""
        if isinstance(self.connection, sqlite3.Connection):
            with self.connection:
                await self._run(works)
        else:
            async with self.connection.transaction():
                await self._run(works)

    async def _run(self, works: Sequence[Callable[[Any], Any]]) -> None:
        for work in works:
            result = work(self.connection)
            if isinstance(result, Awaitable):
                await result

    async def refused(self) -> list[tuple[str, str]]:
        """Return (code, topic) of refused rows."""
        if isinstance(self.connection, sqlite3.Connection):
            rows: Any = self.connection.execute(
                "SELECT code, topic FROM tickwheel_inbox_refused ORDER BY id"
            ).fetchall()
        else:
            rows = await self.connection.fetch(
                "SELECT code, topic FROM tickwheel.inbox_refused ORDER BY id"
            )
        return [tuple(row) for row in rows]

    async def forget_refused(self) -> None:
        is_sqlite = isinstance(self.connection, sqlite3.Connection)
        table = "tickwheel_inbox_refused" if is_sqlite else "tickwheel.inbox_refused"
        await self.commit(lambda connection: connection.execute(f"DELETE FROM {table}"))

    async def rows(self) -> int:
        """Return the number of rows in the inbox."""
        if isinstance(self.connection, sqlite3.Connection):
            return await self.number("SELECT count(*) FROM tickwheel_inbox")
        return await self.number(
            "SELECT (SELECT count(*) FROM tickwheel.inbox_0)"
            " + (SELECT count(*) FROM tickwheel.inbox_1)"
        )

    async def number(self, query: str) -> int:
        """Return the number that a query selects."""
        if isinstance(self.connection, sqlite3.Connection):
            return int(self.connection.execute(query).fetchone()[0])
        return int(await self.connection.fetchval(query))


def enqueue(*tasks: Task) -> Callable[[Any], Any]:
    def work(connection: Any) -> Any:
        ends = [sql.enqueue(connection, task) for task in tasks]
        return _all(ends) if ends and isinstance(ends[0], Awaitable) else None

    return work


async def _all(ends: list[Any]) -> None:
    for end in ends:
        await end


def start_shards(make_daemon: Callable[..., Daemon], folder: Path, **settings: Any) -> Daemon:
    """Start the daemons of two shards."""
    store = f"sqlite:///{folder / 'shards'}/"
    return make_daemon(args=("--processes", "2"), store=store, **settings).start()


async def keys(client: Client, topic: str = "orders.close") -> list[str]:
    return sorted([str(task.key) async for task in client.list_tasks(topic=topic)])


async def test_a_task_has_every_option_and_counts_its_delay_from_the_call(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], inbox: str
) -> None:
    daemon = make_daemon().start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads and made.taker.trouble is None)
    async with Application(inbox) as application, Client(daemon.url) as client:
        began = datetime.now(UTC)
        properties = {"count": 3, "share": 0.5, "text": "ä", "flag": True}
        await application.commit(
            enqueue(
                Task(
                    "orders.close", b"\x00\xff", delay=HOUR_S, key="order-42", tag="fast",
                    properties=properties, priority=7, ttl=60, order_key="o", encoding="json;v=2",
                )
            )
        )  # fmt: skip
        await comes(lambda: made.taker.taken)
        (task,) = [task async for task in client.list_tasks(topic="orders.close")]
        assert (task.key, task.tag, task.priority, task.order_key) == ("order-42", "fast", 7, "o")
        assert dict(task.properties) == properties
        assert task.encoding == "json;v=2"
        late_s = (task.due - began).total_seconds() - HOUR_S
        assert 0 <= late_s < 30


async def test_a_rolled_back_transaction_has_no_task(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], inbox: str
) -> None:
    daemon = make_daemon().start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    async with Application(inbox) as application, Client(daemon.url) as client:
        dropped = Task("orders.close", b"", delay=HOUR_S, key="dropped")

        def fail(connection: Any) -> Any:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await application.commit(enqueue(dropped), fail)
        await application.commit(enqueue(Task("orders.close", b"", delay=HOUR_S, key="kept")))
        await comes(lambda: made.taker.taken)
        assert await keys(client) == ["kept"]


async def test_commands_follow_the_enqueues_before_them(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], inbox: str
) -> None:
    daemon = make_daemon().start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=365)
    tasks = [Task("orders.close", b"", delay=HOUR_S, key=key) for key in ("a", "b", "c")]
    async with Application(inbox) as application, Client(daemon.url) as client:
        await application.commit(
            enqueue(*tasks),
            lambda connection: sql.cancel(connection, topic="orders.close", key="a"),
            lambda connection: sql.reschedule(connection, topic="orders.close", key="b", at=at),
            enqueue(Task("orders.close", b"", delay=HOUR_S, key="a")),
        )
        await comes(lambda: made.taker.taken == 6)
        dues = {task.key: task.due async for task in client.list_tasks(topic="orders.close")}
        assert sorted(map(str, dues)) == ["a", "b", "c"]
        assert dues["b"] == at
        (task,) = [t async for t in client.list_tasks(topic="orders.close") if t.key == "c"]
        await application.commit(lambda connection: sql.cancel(connection, task.id))
        await comes(lambda: made.taker.taken == 7)
        assert await keys(client) == ["a", "b"]


async def test_refused_rows_are_kept_and_do_not_stop_the_others(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], inbox: str
) -> None:
    daemon = make_daemon(delay_max_s=7200).start()
    async with Application(inbox) as application, Client(daemon.url) as client:
        database = open_inbox(inbox)
        await database.open()
        await database.close()
        tasks = [
            Task("far" if n in (3, 4, 17) else "orders.close", b"", key=f"{n:02}",
                 delay=100 * HOUR_S if n in (3, 4, 17) else HOUR_S)
            for n in range(20)
        ]  # fmt: skip
        await application.commit(enqueue(*tasks))
        made = taking(daemon.url, inbox)
        await comes(lambda: made.taker.taken == 20)
        assert await application.refused() == [("due_too_far", "far")] * 3
        assert len(await keys(client)) == 17
        assert made.taker.refused == 3


async def test_rows_wait_while_the_table_of_refused_rows_is_full(
    make_daemon: Callable[..., Daemon],
    taking: Callable[..., Taking],
    inbox: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(taker, "REFUSED_MAX", 2)
    daemon = make_daemon(delay_max_s=7200).start()
    async with Application(inbox) as application, Client(daemon.url) as client:
        database = open_inbox(inbox)
        await database.open()
        await database.close()
        far = [Task("far", b"", key=f"far-{n}", delay=100 * HOUR_S) for n in range(3)]
        await application.commit(enqueue(*far, Task("orders.close", b"", key="1", delay=HOUR_S)))
        made = taking(daemon.url, inbox)
        await comes(lambda: "2 refused rows" in (made.taker.trouble or ""))
        assert await application.refused() == [("due_too_far", "far")] * 2
        await application.commit(enqueue(Task("orders.close", b"", key="2", delay=HOUR_S)))
        await application.forget_refused()
        await _come(lambda: keys(client), ["1", "2"])
        assert await application.refused() == [("due_too_far", "far")]
        assert made.taker.refused == 3
    assert caplog.text.count("the inbox waits") == 1


async def test_a_taker_that_died_after_sending_repeats_without_effect(
    make_daemon: Callable[..., Daemon],
    taking: Callable[..., Taking],
    inbox: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon is killed as well, so that it answers from its store."""
    daemon = make_daemon().start()
    confirmed = asyncio.Event()

    def stop_before(self: Any) -> None:
        confirmed.set()
        raise asyncio.CancelledError

    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    async with Application(inbox) as application:
        with monkeypatch.context() as patch:
            patch.setattr(type(made.taker._inbox), "confirm", stop_before)
            task = Task("orders.close", b"", delay=HOUR_S, key="a")
            await application.commit(enqueue(task, task))
            await soon(confirmed.wait())
            await made.kill()
        daemon.kill()
        daemon.start()
        made.start()
        await application.commit(enqueue(Task("orders.close", b"", delay=HOUR_S, key="b")))
        await comes(lambda: made.taker.taken)
        async with Client(daemon.url) as client:
            assert await keys(client) == ["a", "a", "b"]


async def test_an_error_that_is_not_about_a_row_refuses_none(
    make_daemon: Callable[..., Daemon],
    taking: Callable[..., Taking],
    inbox: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon = make_daemon().start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)

    async def revoked(self: NumberedClient, number: int, tasks: Sequence[Any]) -> list[Any]:
        return [Unauthorized("the token was revoked")] * len(tasks)

    async with Application(inbox) as application, Client(daemon.url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(NumberedClient, "put_numbered", revoked)
            await application.commit(enqueue(Task("orders.close", b"", delay=HOUR_S, key="a")))
            with pytest.raises(Unauthorized):
                await soon(made.end())
        made.start()
        await _come(lambda: keys(client), ["a"])
        assert await application.refused() == []


@pytest.mark.parametrize(("decision", "left"), [("resend", ["a"]), ("skip", [])])
async def test_an_uncertain_batch_needs_a_decision(
    make_daemon: Callable[..., Daemon],
    taking: Callable[..., Taking],
    inbox: str,
    monkeypatch: pytest.MonkeyPatch,
    decision: str,
    left: list[str],
) -> None:
    daemon = make_daemon().start()
    database = open_inbox(inbox)
    await database.open()
    await database.lead()
    await database.take_over()
    async with Application(inbox) as application:
        await application.commit(enqueue(Task("orders.close", b"", delay=HOUR_S, key="a")))
    rows = list(await database.read())
    await database.record(Batch(b"s" * 16, 1, rows), 1)
    await database.close()
    monkeypatch.setattr(taker, "MEMORY_S", -1.0)
    made = taking(daemon.url, inbox)
    with pytest.raises(Conflict, match="may have been enqueued"):
        await soon(made.end())
    made.options = {"uncertain": decision}
    made.start()
    await comes(lambda: made.taker.leads and made.taker.trouble is None)
    async with Application(inbox) as application, Client(daemon.url) as client:
        await application.commit(enqueue(Task("other", b"", delay=HOUR_S)))
        await comes(lambda: made.taker.taken)
        assert await keys(client) == left


AGED = {
    "postgresql": "UPDATE tickwheel.inbox_batches SET at = at - interval '2 days'",
    "sqlite": "UPDATE tickwheel_inbox_batch SET recorded_ms = recorded_ms - 172800000",
}


async def test_a_batch_stays_uncertain_however_often_takers_begin(inbox: str) -> None:
    database = open_inbox(inbox)
    await database.open()
    await database.lead()
    await database.take_over()
    async with Application(inbox) as application:
        await application.commit(enqueue(Task("orders.close", b"")))
        rows = list(await database.read())
        await database.record(Batch(b"s" * 16, 1, rows), 1)
        aged = AGED[inbox.partition(":")[0]]
        await application.commit(lambda connection: connection.execute(aged))
    for _ in range(2):
        batch = await database.take_over()
        assert batch is not None and batch.age_s > 47 * HOUR_S
    await database.close()


async def test_a_batch_without_an_answer_for_too_long_is_uncertain(
    make_daemon: Callable[..., Daemon],
    taking: Callable[..., Taking],
    inbox: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon may have stored it, died, and come back without its session."""
    daemon = make_daemon().start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    for name, value in (("ANSWER_S", 0.0), ("STOP_S", 0.0), ("MEMORY_S", -1.0)):
        monkeypatch.setattr(taker, name, value)

    async def unanswered(self: NumberedClient, number: int, tasks: Sequence[Any]) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(NumberedClient, "put_numbered", unanswered)
    async with Application(inbox) as application:
        await application.commit(enqueue(Task("orders.close", b"", delay=HOUR_S)))
        with pytest.raises(Conflict, match="may have been enqueued"):
            await soon(made.end())


async def test_a_second_taker_waits_for_the_first(
    make_daemon: Callable[..., Daemon],
    taking: Callable[..., Taking],
    inbox: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(taker, "TIDY_S", 0.01)
    daemon = make_daemon().start()
    first = taking(daemon.url, inbox)
    await comes(lambda: first.taker.leads)
    second = taking(daemon.url, inbox)
    async with Application(inbox) as application, Client(daemon.url) as client:
        for number in range(3):
            task = Task("orders.close", b"", delay=HOUR_S, key=str(number))
            await application.commit(enqueue(task))
        await comes(lambda: first.taker.taken == 3)
        assert not second.taker.leads
        await first.stop()
        await application.commit(enqueue(Task("orders.close", b"", delay=HOUR_S, key="3")))
        await comes(lambda: second.taker.taken == 1)
        assert await keys(client) == ["0", "1", "2", "3"]


async def test_a_taker_that_waits_for_another_has_no_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its database was away, and the other one has the lead since."""
    monkeypatch.setattr(taker, "AGAIN_S", 0.0)
    waiting: Any = AsyncMock()
    waiting.open.side_effect = [InboxTrouble("the database is away"), None]
    asked = asyncio.Event()
    waiting.lead.side_effect = lambda: asked.set()
    second = taker.Taker(waiting, None)
    running = asyncio.create_task(second.run())
    await soon(asked.wait())
    await comes(lambda: second.trouble is None, 10)
    second.stop()
    await soon(running)
    assert not second.leads


async def test_rows_wait_while_the_backlog_is_full(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], inbox: str
) -> None:
    daemon = make_daemon(scheduled_max=2).start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    async with Application(inbox) as application, Client(daemon.url) as client:
        for number in range(3):
            task = Task("orders.close", b"", delay=HOUR_S, key=str(number))
            await application.commit(enqueue(task))
        await _come(lambda: keys(client), ["0", "1"])
        await comes(lambda: "backlog_full" in (made.taker.trouble or ""))
        await client.cancel(topic="orders.close", key="0")
        await comes(lambda: made.taker.taken == 3)
        assert made.taker.trouble is None
        assert await keys(client) == ["1", "2"]
        assert await application.refused() == []


async def test_taken_rows_are_removed(
    make_daemon: Callable[..., Daemon],
    taking: Callable[..., Taking],
    inbox: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(taker, "TIDY_S", 0.02)
    monkeypatch.setattr("tickwheel.inbox.postgresql.ROTATE_ROWS", 1)
    daemon = make_daemon().start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    async with Application(inbox) as application:
        await application.commit(enqueue(*[Task("t", b"", delay=HOUR_S)] * 50))
        await comes(lambda: made.taker.taken == 50)
        await _come(application.rows, 0)


# --- acks in transactions ------------------------------------------------------------------------


async def test_the_changes_of_a_handler_and_its_ack_commit_together(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], inbox: str
) -> None:
    daemon = make_daemon(lease_default_s=0.5).start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    async with (
        Application(inbox) as application,
        Client(daemon.url) as client,
        client.subscribe("orders.close", group="g") as deliveries,
    ):
        await client.enqueue("orders.close", b"1")
        first = await soon(anext(deliveries))
        await application.commit(lambda connection: sql.ack(connection, first))
        with pytest.raises(StaleReceipt, match="another attempt"):
            await application.commit(lambda connection: sql.ack(connection, first))
        await comes(lambda: made.taker.taken == 1)
        assert await first.ack() == "acked"  # "done" has the same answer

        await client.enqueue("orders.close", b"2")
        second = await soon(anext(deliveries))
        assert second.body == b"2"

        def fail(connection: Any) -> Any:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await application.commit(lambda connection: second.ack_in(connection), fail)
        await second.nack(0)
        third = await soon(anext(deliveries))
        assert (third.body, third.attempt) == (b"2", 2)


async def test_a_synchronous_delivery_is_acknowledged_in_a_transaction(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], tmp_path: Path
) -> None:
    daemon = make_daemon().start()
    made = taking(daemon.url, f"sqlite:///{tmp_path / 'app.db'}")
    await comes(lambda: made.taker.leads)

    def handle() -> None:
        connection = sqlite3.connect(tmp_path / "app.db")
        with sync.Client(daemon.url) as client:
            client.enqueue("orders.close", b"1")
            with client.subscribe("orders.close", group="g") as deliveries:
                delivery = next(iter(deliveries))
                delivery.ack_in(connection)
                with pytest.raises(StaleReceipt, match="another attempt"):
                    delivery.ack_in(connection)
                connection.commit()
        connection.close()

    await asyncio.to_thread(handle)
    await comes(lambda: made.taker.taken)


OLD_ACKS = {
    "postgresql": "INSERT INTO tickwheel.inbox_acks"
    " SELECT n, 'g', now() - n * interval '1 day' FROM generate_series(5, 9) AS n",
    "sqlite": "INSERT INTO tickwheel_inbox_acks SELECT value, 'g',"
    " (unixepoch() - value * 86400) * 1000 FROM json_each('[5, 6, 8, 9]')",
}


async def test_acks_leave_after_a_week_by_an_index(inbox: str) -> None:
    database = open_inbox(inbox)
    await database.open()
    await database.lead()
    await database.take_over()
    kind = inbox.partition(":")[0]
    async with Application(inbox) as application:
        await application.commit(lambda connection: connection.execute(OLD_ACKS[kind]))
        await database.tidy()
        table = "tickwheel_inbox_acks" if kind == "sqlite" else "tickwheel.inbox_acks"
        assert await application.number(f"SELECT count(*) FROM {table}") == 2
        if kind == "sqlite":
            plan = application.connection.execute(
                f"EXPLAIN QUERY PLAN {sqlite_inbox._SWEEP}", (0, 1)
            ).fetchall()
        else:
            await application.connection.execute("SET enable_seqscan = off")
            sweep = postgresql_inbox.STATEMENTS["sweep"].replace("$1", "1").replace("$2", "1")
            plan = await application.connection.fetch(f"EXPLAIN {sweep}")
        assert "inbox_acks_at" in str(plan)
    await database.close()


async def test_a_lapsed_lease_refuses_the_transaction(
    make_daemon: Callable[..., Daemon], database: str
) -> None:
    daemon = make_daemon(lease_default_s=0.2).start()
    opened = open_inbox(database)
    await opened.open()
    async with (
        Application(database) as application,
        Client(daemon.url) as client,
        client.subscribe("orders.close", group="g") as deliveries,
    ):
        await client.enqueue("orders.close", b"1")
        first = await soon(anext(deliveries))
        second = await soon(anext(deliveries))
        with pytest.raises(StaleReceipt, match="attempt 1: stale"):
            await application.commit(lambda connection: first.ack_in(connection))
        await application.commit(lambda connection: second.ack_in(connection))
        count = "SELECT count(*) FROM tickwheel.inbox_acks"
        assert await application.connection.fetchval(count) == 1
    await opened.close()


# --- the daemon's own process --------------------------------------------------------------------


async def test_a_daemon_takes_tasks_while_it_leads(
    make_daemon: Callable[..., Daemon], inbox: str
) -> None:
    daemon = make_daemon(http=True, inbox=inbox).start()
    async with Client(daemon.url) as client:
        database = open_inbox(inbox)
        await database.open()  # the daemon's process may not have created the tables yet
        await database.close()
        async with Application(inbox) as application:
            task = Task("orders.close", b"", delay=HOUR_S, key="a")
            await application.commit(enqueue(task))
            await _come(lambda: keys(client), ["a"])
            daemon.kill()
            await application.commit(enqueue(Task("orders.close", b"", delay=HOUR_S, key="b")))
            daemon.start()
            await _come(lambda: keys(client), ["a", "b"])
            assert daemon.terminate() == 0
            assert "inbox_ended" not in daemon.log_text()


async def test_a_standby_does_not_wait_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(companion, "PYTHON", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    logins: Any = SimpleNamespace(companions={})
    roles: Any = SimpleNamespace(on_event=lambda name, text: None)
    never: Any = None
    process = server_inbox.InboxProcess(
        "sqlite:///app.db", logins, roles, url=lambda: "tcp://127.0.0.1:1", connection=never
    )
    assert not process.is_waiting
    process.serve()
    assert process.is_waiting, "it has not reported yet"
    process.stand_by()
    assert not process.is_waiting
    await process.stop()


async def _come(ask: Callable[[], Awaitable[T]], wanted: T) -> None:
    """Wait until `ask` returns `wanted`."""
    patience = Patience(WAIT_S)
    answers = []
    while not patience.is_over:
        answers = [await ask()]
        if answers == [wanted]:
            return
        await asyncio.sleep(LOOK_S)  # real time: other processes
    raise AssertionError(f"{answers} instead of {wanted}")


async def test_rows_that_an_application_inserts_itself_are_checked(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], tmp_path: Path
) -> None:
    """SQLite has no functions, so that programs in other languages insert rows."""
    inbox = f"sqlite:///{tmp_path / 'app.db'}"
    daemon = make_daemon().start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    connection = sqlite3.connect(tmp_path / "app.db")
    insert = "INSERT INTO tickwheel_inbox (verb, topic, body, options) VALUES (?, ?, ?, ?)"
    with connection:
        for topic, options in [
            ("good", "{}"), ("bad topic", "{}"), ("good", '{"unknown": 1}'), ("good", "[1]"),
            ("good", '{"properties": {"n": 99999999999999999999999}}'), ("good", '{"key": "k"}'),
            ("good", '{"key": "k", "key": "l"}'),
        ]:  # fmt: skip
            connection.execute(insert, ("enqueue", topic, "text", options))
        connection.execute(insert, ("cancel", None, None, "{}"))
    await comes(lambda: made.taker.taken == 8)
    codes = connection.execute("SELECT code FROM tickwheel_inbox_refused ORDER BY id").fetchall()
    assert [code for (code,) in codes] == ["bad_request"] * 6
    connection.close()


INSERTS = {
    "sqlite": "INSERT INTO tickwheel_inbox (verb, topic, body, options)"
    " VALUES ('enqueue', 'far', 'x', ?)",
    "postgresql": "INSERT INTO tickwheel.inbox_0 VALUES (nextval('tickwheel.inbox_id'),"
    " pg_current_xact_id(), 0, 'enqueue', 'far', 'x', NULL, NULL, $1::text::jsonb)",
}
"""Statements that write options without a check."""


async def test_a_row_with_a_number_beyond_a_float_is_refused_and_kept(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], inbox: str
) -> None:
    """Python reads the number as infinite, which JSON cannot express."""
    daemon = make_daemon().start()
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    options = f'{{"properties": {{"a": {"9" * 310}.5}}}}'
    table = "tickwheel_inbox" if inbox.startswith("sqlite") else "tickwheel.inbox"
    async with Application(inbox) as application, Client(daemon.url) as client:
        insert = INSERTS[inbox.partition(":")[0]]
        await application.commit(
            lambda connection: (
                connection.execute(insert, (options,))
                if inbox.startswith("sqlite")
                else connection.execute(insert, options)
            ),
            enqueue(Task("orders.close", b"", delay=HOUR_S, key="a")),
        )
        await _come(lambda: keys(client), ["a"])
        assert await application.refused() == [("bad_request", "far")]
        count = f"SELECT count(*) FROM {table}_refused WHERE options = '{options}'"
        assert await application.number(count) == 1


ODD = ("x", "", -1, 0, 2**70, 0.5, True, None, [], [1], {}, {"a": {}}, "x" * 300, "\ud800")
VERBS: dict[str, dict[str, Any]] = {
    "enqueue": {"key": "k", "id": 5, "shard_by": "s", "order_key": "s"},
    "cancel": {"id": 5, "key": "k"},
    "reschedule": {"id": 5, "key": "k"},
    "ack": {"id": 5, "group": "g", "epoch": 1, "attempt": 1},
}


async def test_no_row_stops_a_taker(
    make_daemon: Callable[..., Daemon], taking: Callable[..., Taking], tmp_path: Path
) -> None:
    daemon = start_shards(make_daemon, tmp_path)
    made = taking(daemon.url, f"sqlite:///{tmp_path / 'app.db'}")
    await comes(lambda: made.taker.leads)
    rows: list[dict[str, Any]] = []
    for verb, options in VERBS.items():
        for name, value in itertools.product(options, ODD):
            rows.append({"options": json.dumps({name: value})})
            rows.append({"options": json.dumps(options | {name: value})})
        for column in ("topic", "body", "delay_ms", "due_ms", "at_ms"):
            rows += [{column: value} for value in ("x", -5, 2**62, 1.5, b"\xff")]
        rows += [{"options": json.dumps(options | {"id": 0, "key": []})}]
        rows += [{"options": value} for value in (b'{"key": "\xff"}', b'["\xff"]', b"{}")]
        rows = [{"verb": verb, "options": json.dumps(options)} | row for row in rows]
    connection = sqlite3.connect(tmp_path / "app.db")
    written = 0
    for row in rows:
        places = f"({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
        with contextlib.suppress(sqlite3.IntegrityError, sqlite3.OperationalError), connection:
            connection.execute(f"INSERT INTO tickwheel_inbox {places}", list(row.values()))
            written += 1
    assert written > 200
    many = ["[" * 900 + "]" * 900, f"[{'9' * 5_000}]", '{"key": "\\ud800"}']
    with connection:
        for options in many:
            connection.execute(
                "INSERT INTO tickwheel_inbox (verb, topic, body, options) VALUES"
                " ('enqueue', CAST(x'ff' AS TEXT), CAST(x'ff' AS TEXT), ?)", (options,)
            )  # fmt: skip
        connection.execute(
            "INSERT INTO tickwheel_inbox (verb, topic, options) VALUES"
            " ('cancel', CAST(x'ff' AS TEXT), ?), ('cancel', 'orders.close', ?)",
            ('{"key": "k"}', many[-1]),
        )
        sql.enqueue(connection, Task("orders.close", b"", delay=HOUR_S, key="last"))
    connection.close()
    await comes(lambda: made.taker.taken == written + len(many) + 3, 120)
    async with Client(daemon.url) as client:
        assert await keys(client) == ["last"]


def test_a_row_of_an_unknown_form_is_not_written(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "app.db")
    connection.executescript(sql.sqlite_sql())
    with pytest.raises(sqlite3.IntegrityError):
        write(connection, Command("explode", "t", b"", None, None, "{}"))
    assert contract.ROWS_MAX > 1
    connection.close()


async def test_each_shard_takes_its_part_once(
    make_daemon: Callable[..., Daemon],
    taking: Callable[..., Taking],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal of one shard concerns only its part of the batch."""
    daemon = start_shards(make_daemon, tmp_path, delay_max_s=7200)
    inbox = f"sqlite:///{tmp_path / 'app.db'}"
    made = taking(daemon.url, inbox)
    await comes(lambda: made.taker.leads)
    tasks = [
        Task("far" if n == 17 else "orders.close", b"", key=f"{n:02}",
             delay=100 * HOUR_S if n == 17 else HOUR_S)
        for n in range(40)
    ]  # fmt: skip
    died = asyncio.Event()

    def die(self: Any) -> None:
        died.set()
        raise asyncio.CancelledError

    async with Application(inbox) as application, Client(daemon.url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteInbox, "confirm", die)
            await application.commit(enqueue(*tasks))
            await soon(died.wait())
            await made.kill()
        made.start()
        await comes(lambda: made.taker.leads and made.taker.trouble is None)
        await application.commit(enqueue(Task("orders.close", b"", delay=HOUR_S, key="last")))
        await _come(lambda: keys(client), [*(f"{n:02}" for n in range(40) if n != 17), "last"])
        assert await application.refused() == [("due_too_far", "far")]
        await application.commit(
            lambda connection: sql.cancel(connection, topic="orders.close", key="03")
        )
        await _come(lambda: _length(client), 39)


async def _length(client: Client) -> int:
    return len(await keys(client))


def test_a_daemon_with_several_shards_has_no_inbox() -> None:
    with pytest.raises(BadRequest, match="`tickwheel inbox run` beside them"):
        load(None, {"processes": 2, "store": "sqlite:///shards/", "inbox": "sqlite:///app.db"})


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        ConnectionResetError(),
        asyncpg.ConnectionDoesNotExistError("connection was closed"),
        asyncpg.InternalClientError("got result for unknown protocol state 13"),
    ],
)
async def test_a_broken_connection_is_a_trouble_of_the_inbox(
    database: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    inbox = PostgresInbox(database)
    await inbox.open()
    with monkeypatch.context() as patch:
        patch.setattr(asyncpg.Connection, "fetchval", AsyncMock(side_effect=error))
        with pytest.raises(InboxTrouble, match=str(error) or type(error).__name__):
            await inbox.clock_ms()
    await inbox.close()


@pytest.mark.parametrize("mode", ["session", "transaction"])
@pytest.mark.parametrize(
    ("drops", "reason"), [("", "unsupported startup parameter"), (", ".join(SESSION), "a pooler")]
)
async def test_a_pooler_is_refused(
    server: PostgresServer, database: str, mode: str, drops: str, reason: str
) -> None:
    with pooled(server, mode, USER, drops) as port:
        inbox = PostgresInbox(database.replace(f":{server.port}/", f":{port}/"))
        with pytest.raises(InboxTrouble, match=reason):
            await inbox.open()
        await inbox.close()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://me:secret@host/app", "sqlite://app.db", f"postgresql://h/d?schema={'x' * 64}",
        "postgresql://h/d?schema=o'b", "postgresql://h/d?schema=a$$b", "postgresql://h:x/d",
        "postgresql://me:secret@h:0/d", "postgresql://h:65536/d", "postgresql://a,/d",
        "postgresql://[::1/d",
    ],
)  # fmt: skip
def test_the_url_of_an_inbox_is_checked(url: str) -> None:
    with pytest.raises(BadRequest, match="must be") as caught:
        open_inbox(url)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "url", ["postgresql://a:1,b/d?schema=a-b", "postgresql:///d", "postgresql://[::1]:5/d"]
)
def test_the_primary_of_several_hosts_is_taken(url: str) -> None:
    inbox = PostgresInbox(url)
    assert ("target_session_attrs=primary" in inbox._dsn) == ("," in url)


async def test_a_taker_ends_although_its_driver_loses_the_cancellation() -> None:
    class Losing:
        label = "inbox"

        async def open(self) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise InboxTrouble("the connection is lost") from None

        async def close(self) -> None:
            pass

    losing: Any = Losing()
    running = asyncio.create_task(taker.Taker(losing, None).run())
    await asyncio.sleep(0)  # real time: none
    running.cancel()
    await asyncio.wait([running], timeout=WAIT_S)
    assert running.cancelled()
