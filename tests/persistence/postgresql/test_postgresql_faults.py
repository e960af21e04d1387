"""PostgreSQL away, slow, late, read-only, older, damaged: nothing confirmed is lost or doubled."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from persistence.postgresql.conftest import QUICK, Make, store
from persistence.store_subject import OWNER, Subject, taken
from support.postgresql import PostgresServer
from support.redis_proxy import Proxy
from support.store_rows import ended, tasks
from support.waiting import comes
from tickwheel.persistence.contract import (
    CommitRefused,
    CommitUnknown,
    StoreAway,
    StoreBroken,
    StoreError,
    StoreForgot,
)
from tickwheel.persistence.on_server import NoReply
from tickwheel.persistence.postgresql import reader
from tickwheel.persistence.postgresql.driver import Link, ServerError, options_from
from tickwheel.persistence.postgresql.layout import SQL
from tickwheel.persistence.sqlite.database import identity_of, meta_of


@asynccontextmanager
async def session(server: PostgresServer, schema: str) -> AsyncIterator[Any]:
    """Another program's connection."""
    connection = await asyncpg.connect(
        host="127.0.0.1", port=server.port, user="postgres", server_settings={"search_path": schema}
    )
    try:
        yield connection
    finally:
        await connection.close()


class TestUnanswered:
    async def test_a_call_that_ends_between_its_steps_has_no_reply(
        self, shared_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after a freeze: the statement is prepared, and the time of the call is over."""
        prepare = asyncpg.Connection._get_statement

        async def prepare_and_expire(connection: Any, *args: Any, **options: Any) -> Any:
            statement = await prepare(connection, *args, **options)
            connection.terminate()
            return statement

        link = Link(options_from(shared_postgres.url(schema="public")))
        await link.ready()
        with monkeypatch.context() as patch:
            patch.setattr(asyncpg.Connection, "_get_statement", prepare_and_expire)
            with pytest.raises(NoReply):
                await link.fetch("SELECT 1")
        assert [tuple(row) for row in await link.fetch("SELECT 2")] == [(2,)]
        await link.close()

    async def test_a_connection_whose_check_failed_is_dropped(
        self, shared_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link = Link(options_from(shared_postgres.url(schema="public")))
        with monkeypatch.context() as patch:
            patch.setitem(SQL, "session", "SELECT 1 / (cardinality($1::text[] || $2::text[]) * 0)")
            with pytest.raises(ServerError, match="division by zero"):
                await link.ready()
        assert not link.connected
        await link.ready()
        assert link.address and link.connected_s < 60
        await link.close()

    async def test_a_batch_that_arrives_late_is_void(
        self, shared_postgres: PostgresServer, make: Make
    ) -> None:
        url = shared_postgres.url("call_ms=400")
        proxy = await Proxy(shared_postgres.port).start()
        subject = make(url.replace(f":{shared_postgres.port}/", f":{proxy.port}/"))
        await subject.open()
        await subject.commit(tasks([1]))
        proxy.hold()
        with pytest.raises(CommitUnknown, match="no answer within 400 ms"):
            await subject.commit(tasks([2]))
        proxy.let_new_through()
        await taken(subject, tasks([2]))
        await taken(subject, ended([2]))
        proxy.let_go()
        await asyncio.wait_for(proxy.late.wait(), 30)
        assert await subject.ids() == [1]
        assert await subject.commit(tasks([3])) is True
        assert await subject.ids() == [1, 3]
        await subject.store.close(clean=True)
        await proxy.stop()

    @pytest.mark.parametrize("silent", [False, True])
    async def test_a_batch_whose_answer_was_lost_is_applied_once(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, silent: bool
    ) -> None:
        link = store(subject)._link
        lose_answer(monkeypatch, link, silent)
        if silent:
            with pytest.raises(CommitUnknown):
                await subject.commit(tasks([1]))
            assert await subject.commit(tasks([1])) is False
            subject.n = 1
        else:
            assert await subject.commit(tasks([1])) is True
        assert await subject.commit(tasks([2])) is True
        assert await subject.ids() == [1, 2]

    async def test_a_batch_that_waits_for_a_lock_is_decided_later(
        self, subject: Subject, shared_postgres: PostgresServer, make: Make
    ) -> None:
        schema = store(subject).options.schema
        slow = make(shared_postgres.url("call_ms=300", schema=schema))
        await subject.store.close(clean=True)
        await slow.open()
        async with session(shared_postgres, schema) as other, other.transaction():
            await other.execute("SELECT 1 FROM shard FOR UPDATE")
            for _ in range(2):
                with pytest.raises(CommitUnknown):
                    await slow.commit(tasks([1]))
            with pytest.raises(CommitUnknown):
                await slow.store.commit(slow.opened.epoch, OWNER, 1, tasks([1]))
        await taken(slow, tasks([1]))
        assert await slow.ids() == [1]

    async def test_a_cancelled_statement_is_refused(
        self, subject: Subject, shared_postgres: PostgresServer
    ) -> None:
        schema = store(subject).options.schema
        async with session(shared_postgres, schema) as other, other.transaction():
            await other.execute("SELECT 1 FROM shard FOR UPDATE")
            commit = asyncio.create_task(subject.commit(tasks([1])))

            async def is_cancelled() -> bool:
                cancel = (
                    "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity"
                    " WHERE wait_event_type = 'Lock' AND query LIKE '%INSERT INTO journal_0_%'"
                )
                return bool((await asyncio.to_thread(shared_postgres.sql, cancel))[0][0])

            await comes(is_cancelled)
            with pytest.raises(CommitRefused, match="57014"):
                await commit
        assert await subject.commit(tasks([1])) is True


def lose_answer(
    monkeypatch: pytest.MonkeyPatch, link: Any, silent: bool, part: str = "INSERT INTO journal"
) -> None:
    """The next batch, or statement with ``part``, is applied, and the connection breaks before the
    answer."""
    fetch = link.fetch

    async def lost(statement: str, *args: object, **more: Any) -> Any:
        rows = await fetch(statement, *args, **more)
        if part in statement:
            monkeypatch.setattr(link, "fetch", fetch)
            link.drop()
            raise NoReply("the connection broke", silent=silent)
        return rows

    monkeypatch.setattr(link, "fetch", lost)


class TestAServerThatGoesAway:
    @pytest.mark.parametrize(
        "how",
        [
            "killed",
            # Gentler ends: the crash is quick.
            *(pytest.param(how, marks=pytest.mark.slow) for how in ("immediate", "fast")),
        ],
    )
    async def test_confirmed_batches_survive_its_restart(
        self, server: PostgresServer, make: Make, how: str
    ) -> None:
        server.stop()
        server.settings |= {"fsync": "on", "full_page_writes": "on"}
        server.start()
        subject = make(server.url(QUICK))
        await subject.open()
        await subject.commit(tasks(range(1, 100)))
        ends: dict[str, Callable[[], None]] = {
            "immediate": lambda: server.stop(signal.SIGQUIT),
            "killed": server.kill,
            "fast": server.stop,
        }
        ends[how]()
        with pytest.raises((CommitUnknown, CommitRefused)):
            await subject.commit(tasks([100]))
        with pytest.raises(StoreAway):
            await subject.store.read([1])
        assert await subject.store.probe_room() is False
        server.start()
        await taken(subject, tasks([100]))
        assert await subject.ids() == list(range(1, 101))
        assert (await subject.reopen()).last_batch == 2

    async def test_an_older_server_ends_the_daemon(
        self, server: PostgresServer, make: Make
    ) -> None:
        subject = make(server.url(QUICK))
        await subject.open()
        await subject.commit(tasks([1]))
        server.stop()
        data, older = server.folder / "data", server.folder / "older"
        await asyncio.to_thread(subprocess.run, ["cp", "-a", data, older], check=True)
        server.start()
        await taken(subject, tasks([2]))
        server.stop()
        shutil.rmtree(data)
        older.rename(data)
        server.start()

        async def is_broken() -> bool:
            try:
                await subject.commit(tasks([3]))
            except (CommitUnknown, CommitRefused):
                return False
            return True

        with pytest.raises(StoreForgot, match="its last batch is 1, and it had confirmed batch 2"):
            await comes(is_broken, every_s=0.05)

    async def test_read_only_transactions_refuse_batches_for_some_time(
        self, server: PostgresServer, make: Make
    ) -> None:
        subject = make(server.url(QUICK))
        await subject.open()
        server.sql("ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")

        async def is_refused() -> bool:
            try:
                await subject.commit(tasks([subject.n + 1]))
            except CommitRefused as error:
                assert "25006" in error.message and not error.full
                return True
            return False

        await comes(is_refused, every_s=0.05)
        server.sql(
            "SET default_transaction_read_only = off",
            "ALTER SYSTEM RESET default_transaction_read_only",
            "SELECT pg_reload_conf()",
        )
        await taken(subject, tasks([subject.n + 1]))
        assert await subject.ids() == list(range(1, subject.n + 1))

    async def test_reads_leave_a_former_primary_that_goes_on(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await subject.commit(tasks([1]))
        assert await subject.ids() == [1]
        (link,) = store(subject)._reader._idle
        fetch, before = link.fetch, link.connections
        last = SQL["last"].format(at=store(subject)._writer.parts.at)

        async def former(statement: str, *args: object, **more: Any) -> Any:
            if link.connections == before and statement == last:
                return [(0, 0, 0)]
            return await fetch(statement, *args, **more)

        monkeypatch.setattr(link, "fetch", former)
        monkeypatch.setattr(reader, "PAUSE_S", 0)
        assert await subject.ids() == [1]

    async def test_a_backup_claims_no_batch_that_is_confirmed_after_its_snapshot(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        await subject.commit(tasks([1]))
        fetch, path = Link.fetch, str(tmp_path / "copy.db")
        last = SQL["last"].format(at=store(subject)._writer.parts.at)

        async def late(link: Link, statement: str, *args: object, **more: Any) -> Any:
            rows = await fetch(link, statement, *args, **more)
            if statement == last:
                monkeypatch.setattr(Link, "fetch", fetch)
                await subject.commit(tasks([2]))
            return rows

        monkeypatch.setattr(Link, "fetch", late)
        await subject.store.backup(path)
        assert identity_of(meta_of(path)).last.batch == 1


class TestDamage:
    async def test_a_dropped_table_is_named(
        self, subject: Subject, shared_postgres: PostgresServer
    ) -> None:
        await subject.commit(tasks([1]))
        parts = store(subject)._writer.parts
        table = f"note_0_{parts.numbers[0]}"
        shared_postgres.sql(f"DROP TABLE {store(subject).options.schema}.{table}")
        with pytest.raises(StoreBroken, match=f'"{table}" does not exist.*restore a backup'):
            await subject.commit(ended([1]))
        with pytest.raises(StoreBroken, match=table):
            await subject.store.read([1])

    async def test_a_value_that_it_cannot_represent_fails_the_read_alone(
        self, subject: Subject
    ) -> None:
        with pytest.raises(StoreError, match="22021") as failed:
            await subject.store.scan_dead((0, "\0"), 1, None, None)
        assert not isinstance(failed.value, StoreBroken)

    async def test_a_full_disk_refuses_new_tasks(
        self, subject: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """PostgreSQL's own error, which a test cannot cause without a small disk."""
        fetch = store(subject)._link.fetch

        async def full(statement: str, *args: object, **more: Any) -> Any:
            if "task_" in statement:
                raise ServerError("53100", "could not extend file: No space left on device")
            return await fetch(statement, *args, **more)

        monkeypatch.setattr(store(subject)._link, "fetch", full)
        with pytest.raises(CommitRefused, match="No space left") as refused:
            await subject.commit(tasks([1]))
        assert refused.value.full
        assert await subject.commit(ended([5])) is True
