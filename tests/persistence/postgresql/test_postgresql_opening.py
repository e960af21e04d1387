"""Which PostgreSQL is refused at a start and why, and what an opening makes of one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from persistence.postgresql.conftest import Make
from persistence.store_subject import OWNER
from support.pgbouncer import pooled
from support.ports import free_port
from support.postgresql import PostgresServer
from support.store_rows import everything, tasks
from tickwheel.persistence import open_administration
from tickwheel.persistence.contract import (
    Evidence,
    Fenced,
    StoreUnreachable,
    StoreUnusable,
)
from tickwheel.persistence.on_server import RESTORE_OWNERS
from tickwheel.persistence.postgresql import PostgresStore, opening, options_from, writer
from tickwheel.persistence.postgresql.driver import LOOKUPS, SETTINGS


async def refused(url: str, match: str, kind: type[StoreUnusable] = StoreUnusable) -> None:
    with pytest.raises(kind, match=match) as error:
        await PostgresStore(options_from(url)).open(OWNER, 0)
    assert "\n" not in error.value.message


@pytest.fixture
def role(shared_postgres: PostgresServer) -> Iterator[str]:
    """A role without rights."""
    name = f"r_{shared_postgres.new_schema()}"
    shared_postgres.sql(f"CREATE ROLE {name} LOGIN")
    yield name
    shared_postgres.sql(f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


class TestUrls:
    @pytest.mark.parametrize(
        ("query", "match"),
        [
            ("?schema=Upper", "schema='Upper' must be 1 to 40 characters"),
            ("?schema=pg_x", "not begin with a digit or pg_"),
            ("?shard=1024", "shard must be between 0 and 1023, not 1024"),
            ("?shards=4", "shards= is only for nodes"),
            ("?call_ms=0", "call_ms must be at least 1"),
            ("?call_ms=x", "call_ms='x' is not a whole number"),
            ("?call_ms=٣", "call_ms='٣' is not a whole number"),
            (f"?call_ms={'9' * 5_000}", "call_ms='9{59} is not a whole number"),
            ("?synchronous_commit=no", "is not one of on, remote_apply"),
            ("?color=red", "unknown setting 'color'"),
        ],
    )
    def test_invalid_settings_are_named(self, query: str, match: str) -> None:
        with pytest.raises(StoreUnusable, match=match) as error:
            options_from(f"postgresql://me:secret@host/app{query}")
        assert "secret" not in error.value.message

    def test_the_database_is_required(self) -> None:
        with pytest.raises(StoreUnusable, match="the name of the database"):
            options_from("postgresql://host")

    def test_each_host_has_a_name(self) -> None:
        with pytest.raises(StoreUnusable, match="one of its hosts has no name"):
            options_from("postgresql://a,/app")

    def test_several_hosts_are_tried_for_the_primary(self) -> None:
        options = options_from("postgresql://a:1,b/app?sslmode=require&schema=x")
        assert options.address == "a:1,b:5432"
        assert options.dsn == (
            "postgresql://a:1,b/app?sslmode=require&target_session_attrs=primary"
        )
        assert "secret" not in repr(options_from("postgresql://me:secret@host/app"))


class TestRefusals:
    async def test_nobody_answers(self) -> None:
        url = f"postgresql://127.0.0.1:{free_port()}/app"
        await refused(url, "store postgresql", StoreUnreachable)

    async def test_a_database_or_user_that_does_not_exist(
        self, shared_postgres: PostgresServer
    ) -> None:
        await refused(shared_postgres.url(db="nowhere"), 'database "nowhere" does not exist')
        await refused(shared_postgres.url(user="nobody"), 'role "nobody" does not exist')

    @pytest.mark.parametrize("mode", ["session", "transaction"])
    @pytest.mark.parametrize("drops", [False, True])
    async def test_a_pooler(
        self, shared_postgres: PostgresServer, role: str, mode: str, drops: bool
    ) -> None:
        """``drops``: it drops the settings of a session instead of refusing it. The role has the
        schema's name as its own setting, as if only the schema had come through."""
        schema = shared_postgres.new_schema()
        shared_postgres.sql(
            f"CREATE SCHEMA {schema} AUTHORIZATION {role}",
            f"ALTER ROLE {role} SET search_path = {schema}",
        )
        url = shared_postgres.url(schema=schema, user=role)
        ignored = (
            ", ".join([*SETTINGS, *LOOKUPS, "search_path", "synchronous_commit"]) if drops else ""
        )
        with pooled(shared_postgres, mode, role, ignored) as port:
            pooled_url = url.replace(f":{shared_postgres.port}/", f":{port}/")
            await refused(pooled_url, "reached through a pooler")

    async def test_a_word_of_sql_can_name_the_schema(self, shared_postgres: PostgresServer) -> None:
        opened = PostgresStore(options_from(shared_postgres.url(schema="order")))
        assert (await opened.open(OWNER, 0)).created
        await opened.close(clean=True)

    async def test_a_role_without_privileges(
        self, shared_postgres: PostgresServer, role: str
    ) -> None:
        schema = shared_postgres.new_schema()
        url = shared_postgres.url(schema=schema, user=role)
        await refused(url, f"CREATE SCHEMA {schema} AUTHORIZATION {role}")
        shared_postgres.sql(f"CREATE SCHEMA {schema}")
        await refused(url, f"lacks the privilege USAGE on the schema {schema}")
        shared_postgres.sql(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
        await refused(url, f"GRANT USAGE, CREATE ON SCHEMA {schema} TO {role}")
        shared_postgres.sql(f"GRANT CREATE ON SCHEMA {schema} TO {role}")
        opened = PostgresStore(options_from(url))
        assert (await opened.open(OWNER, 0)).created
        await opened.close(clean=True)

    async def test_a_dba_can_create_the_tables_before(
        self, shared_postgres: PostgresServer, role: str
    ) -> None:
        """As the first lines of ``schema.sql`` say."""
        schema = shared_postgres.new_schema()
        lines = [line for line in opening.SCHEMA.splitlines() if line.startswith("--   ")]
        script = "\n".join(lines).replace("-- ", "").replace("\\i schema.sql", opening.SCHEMA)
        for phrase, name in (
            ("SCHEMA", schema), ("search_path =", schema), ("AUTHORIZATION", role), ("ROLE", role),
        ):  # fmt: skip
            script = script.replace(f"{phrase} tickwheel", f"{phrase} {name}")
        admin = await asyncpg.connect(shared_postgres.database_url())
        await admin.execute(script)
        await admin.close()
        opened = PostgresStore(options_from(shared_postgres.url(schema=schema, user=role)))
        assert (await opened.open(OWNER, 0)).created
        await opened.close(clean=True)

    async def test_read_only_transactions(self, shared_postgres: PostgresServer, role: str) -> None:
        shared_postgres.sql(f"ALTER ROLE {role} SET default_transaction_read_only = on")
        url = shared_postgres.url(user=role)
        await refused(url, f"ALTER ROLE {role} SET default_transaction_read_only = off")

    async def test_another_encoding(self, shared_postgres: PostgresServer) -> None:
        name = shared_postgres.new_schema()
        shared_postgres.sql(
            f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0"
        )
        await refused(shared_postgres.url(db=name), f"of the database {name} must be UTF8")

    async def test_another_layout_or_program(self, shared_postgres: PostgresServer) -> None:
        schema = shared_postgres.new_schema()
        opened = PostgresStore(options_from(shared_postgres.url(schema=schema)))
        await opened.open(OWNER, 0)
        await opened.close(clean=True)
        shared_postgres.sql(f"UPDATE {schema}.layout SET format = 2")
        await refused(shared_postgres.url(schema=schema), "has layout 2; this release reads layout")
        theirs = shared_postgres.new_schema()
        shared_postgres.sql(f"CREATE SCHEMA {theirs}", f"CREATE TABLE {theirs}.shard (x int)")
        await refused(shared_postgres.url(schema=theirs), "belongs to another program")

    async def test_a_server_that_can_lose_its_data(self, shared_postgres: PostgresServer) -> None:
        url = shared_postgres.url().replace("allow_volatile_store=1&", "")
        await refused(url, "fsync is off: a power cut can destroy it.*--allow-volatile-store")

    async def test_no_connections_are_left(self, shared_postgres: PostgresServer) -> None:
        name = f"few_{shared_postgres.new_schema()}"
        shared_postgres.sql(f"CREATE ROLE {name} LOGIN CONNECTION LIMIT 0")
        await refused(shared_postgres.url(user=name), "too many connections", StoreUnreachable)

    async def test_settings_of_a_dba_do_not_reach_the_store(
        self, shared_postgres: PostgresServer, make: Make, role: str
    ) -> None:
        """Time-outs, another isolation level, and asynchronous commits."""
        schema = shared_postgres.new_schema()
        shared_postgres.sql(
            f"CREATE SCHEMA {schema} AUTHORIZATION {role}",
            *(
                f"ALTER ROLE {role} SET {setting}"
                for setting in (
                    "statement_timeout = 1", "lock_timeout = 1",
                    "default_transaction_isolation = 'serializable'", "synchronous_commit = off",
                )
            ),
        )  # fmt: skip
        subject = make(shared_postgres.url(schema=schema, user=role))
        await subject.open()
        await subject.commit(everything())
        await subject.commit(tasks(range(1_000, 6_000)))
        assert len(await subject.ids()) > 5_000
        assert "fsync" in subject.store.durability


class TestEpochs:
    async def test_a_new_owner_fences_the_former_one(
        self, shared_postgres: PostgresServer, make: Make
    ) -> None:
        url = shared_postgres.url()
        former, successor = make(url), make(url)
        await former.open("a/1")
        await former.commit_as("a/1", tasks([1]))
        opened = await successor.open("b/2")
        assert (opened.epoch, opened.last_batch, opened.clean) == (2, 1, False)
        with pytest.raises(Fenced, match="epoch 2 of 'b/2' began"):
            await former.commit_as("a/1", tasks([2]))
        assert await successor.ids() == [1]

    async def test_two_daemons_create_the_tables_at_once(
        self, shared_postgres: PostgresServer, make: Make
    ) -> None:
        url = shared_postgres.url()
        subjects = [make(f"{url}&shard={shard}") for shard in range(4)]
        opened = await asyncio.gather(*(subject.open() for subject in subjects))
        assert [one.created for one in opened] == [True] * 4

    async def test_an_older_dump_is_detected(
        self, shared_postgres: PostgresServer, make: Make
    ) -> None:
        subject = make(shared_postgres.url())
        opened = await subject.open("me/mark")
        await subject.commit_as("me/mark", tasks([1]))
        await subject.store.close(clean=True)
        known = Evidence("the history", opened.epoch, "mark", batch=5)
        with pytest.raises(StoreUnusable, match=r"older or another store.*batch 1,.*batch 5"):
            await subject.store.open("me/next", 1, evidence=[known])
        lost = Evidence("the history", 1, "mark")
        empty = make(shared_postgres.url())
        with pytest.raises(StoreUnusable, match=r"is empty, but the history has reached epoch 1"):
            await empty.store.open("me/next", 1, evidence=[lost])


UPGRADE = "ALTER TABLE shard ADD COLUMN remark text NOT NULL DEFAULT '';"


class TestUpgrades:
    """To an invented layout 2; ``tests/upgrade`` shows what all stores do."""

    @pytest.fixture
    def layout_2(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        """``layout_2(sql)``: from now on as a release with this upgrade."""

        def begin(sql: str = UPGRADE) -> None:
            script = f"{sql} UPDATE layout SET format = 2;"
            (tmp_path / "upgrade-2.sql").write_text(script)
            monkeypatch.setattr(opening, "FOLDER", tmp_path)
            for module in (opening, writer):
                monkeypatch.setattr(module, "LAYOUT", 2)

        return begin

    @pytest.fixture
    def schema(self, shared_postgres: PostgresServer) -> str:
        return shared_postgres.new_schema()

    @pytest.fixture
    def url(self, shared_postgres: PostgresServer, schema: str) -> str:
        return shared_postgres.url(schema=schema)

    async def test_a_failed_upgrade_changes_nothing_and_names_the_command(
        self, url: str, make: Make, layout_2: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        subject = make(url)
        await subject.open()
        await subject.commit(tasks([1]))
        await subject.store.close(clean=True)
        layout_2(f"{UPGRADE} SELECT 1 / 0;")
        await refused(url, "layout 1 cannot be upgraded to 2: division by zero.*upgrade --dry-run")
        monkeypatch.undo()
        await subject.open()
        assert await subject.ids() == [1]

    async def test_a_daemon_of_another_shard_prevents_the_upgrade_at_a_start(
        self, url: str, schema: str, shared_postgres: PostgresServer, make: Make,
        layout_2: Callable[..., None],
    ) -> None:  # fmt: skip
        other = make(f"{url}&shard=1")
        await other.open("b/2")
        lease = f"INSERT INTO {schema}.lease VALUES (1, '{{}}', 'host:1', 0, 0, '', '', '{{}}', '')"
        shared_postgres.sql(lease.format("b/2", "infinity"))
        layout_2()
        await refused(url, "b/2 at host:1 leads shard 1, which has an older layout; stop it")
        # One that has the lease and has not opened the shard yet does not.
        shared_postgres.sql(f"UPDATE {schema}.lease SET owner = 'c/3'")
        subject = make(url)
        assert (await subject.open()).created
        assert await subject.commit(tasks([1]))

    async def test_an_upgrade_fences_daemons_of_the_older_release(
        self, url: str, make: Make, layout_2: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also one whose lease has ended unnoticed."""
        older, newer = make(url), make(f"{url}&shard=1")
        await older.open()
        await older.commit(tasks([1]))
        layout_2()
        await newer.open()
        monkeypatch.undo()
        with pytest.raises(Fenced, match="was upgraded to layout 2"):
            await older.commit(tasks([2]))

    @pytest.mark.parametrize("exists", [True, False])
    async def test_a_start_that_an_upgrade_overtakes_is_repeated(
        self, url: str, exists: bool, make: Make, layout_2: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        subject, newer = make(url), make(f"{url}&shard=1")
        await (subject if exists else newer).open()
        await (subject if exists else newer).store.close(clean=True)
        inspect = opening.inspect

        async def overtaken(*args: Any) -> tuple[str, int]:
            found = await inspect(*args)
            monkeypatch.undo()
            layout_2()
            await newer.open()
            monkeypatch.undo()
            return found

        monkeypatch.setattr(opening, "inspect", overtaken)
        with pytest.raises(StoreUnreachable, match="another daemon has just"):
            await subject.store.open(OWNER, 0)
        await refused(url, "has layout 2; this release reads layouts up to 1: use a newer release")

    async def test_operators_upgrade_before_anything_else(
        self, url: str, make: Make, layout_2: Callable[..., None]
    ) -> None:
        subject = make(url)
        await subject.open()
        await subject.store.close(clean=True)
        administration = open_administration(url)
        stored = await administration.look()
        layout_2()
        for refused_step in (
            administration.look(), administration.lay_out(stored, 1, watch_s=0),
            administration.begin_branch(watch_s=0),
        ):  # fmt: skip
            with pytest.raises(StoreUnusable, match="layout 2: run `tickwheel store upgrade`"):
                await refused_step
        await administration.upgrade(watch_s=0)
        assert (await administration.look()).exists

    async def test_the_printed_steps_are_a_script(
        self, url: str, schema: str, shared_postgres: PostgresServer, make: Make,
        layout_2: Callable[..., None],
    ) -> None:  # fmt: skip
        subject = make(url)
        await subject.open()
        await subject.store.close(clean=True)
        layout_2()
        planned = await open_administration(url).upgrade(dry_run=True)
        connection = await asyncpg.connect(shared_postgres.database_url())
        await connection.execute("\n".join(planned.steps))  # as one transaction, as psql -1 does
        await connection.close()
        assert (await subject.open()).epoch == 2

    async def test_a_look_at_an_empty_database_creates_nothing(
        self, url: str, schema: str, shared_postgres: PostgresServer
    ) -> None:
        assert (await open_administration(url).upgrade(dry_run=True)).layout == 0
        (row,) = shared_postgres.sql(f"SELECT to_regnamespace('{schema}') IS NULL")
        assert row[0]


class TestAdministration:
    async def test_init_replaces_a_shard_that_nobody_leads(
        self, shared_postgres: PostgresServer, make: Make
    ) -> None:
        url = shared_postgres.url()
        administration = open_administration(url)
        found = await administration.look()
        assert (found.exists, found.state) == (False, "empty")
        subject = make(url)
        await subject.open()
        await subject.commit(everything())
        found = await administration.look()
        assert found.counts["tasks"] == len(everything().enqueued)
        assert found.counts["dead"] == len(everything().dead)
        await administration.lay_out(found, 1, watch_s=0, is_branch=True)
        with pytest.raises(Fenced, match="initialized again"):
            await subject.commit(tasks([1]))
        with pytest.raises(StoreUnusable, match="has changed since it was read"):
            await administration.lay_out(found, 1, watch_s=0)
        again = make(url)
        opened = await again.open("next/one")
        assert (opened.is_branch, opened.last_batch, await again.ids()) == (True, 0, [])

    async def test_a_shard_with_a_part_of_a_backup_is_not_opened(
        self, shared_postgres: PostgresServer, make: Make
    ) -> None:
        url = shared_postgres.url()
        for _ in range(2):  # until it has a batch, the restore can be repeated
            await make(url).open(f"{RESTORE_OWNERS}one")
        await refused(url, "a restore into it was interrupted")
        await open_administration(url).end_restore("mark")
        assert (await make(url).open()).is_branch

    async def test_init_is_refused_while_a_daemon_leads(
        self, shared_postgres: PostgresServer
    ) -> None:
        url = shared_postgres.url()
        administration = open_administration(url)
        found = await administration.look()
        shared_postgres.sql(
            f"INSERT INTO {options_from(url).schema}.lease VALUES"
            " (0, 'me/1', 'host:1', 0, 1, '', '', now() + interval '1 minute', '')"
        )
        with pytest.raises(StoreUnusable, match="me/1 at host:1 leads shard 0"):
            await administration.lay_out(found, 1, watch_s=0)
        with pytest.raises(StoreUnusable, match="me/1 at host:1 leads shard 0"):
            await administration.begin_branch(watch_s=0)


def test_durability_states_what_each_setting_promises() -> None:
    from tickwheel.persistence.postgresql.opening import durability

    facts = {
        "synchronous_commit": "on", "standbys": "", "fsync": "on", "full_page_writes": "on",
    }  # fmt: skip
    assert "survives a power cut" in durability(facts)
    assert "promoted can lack the newest tasks" in durability(facts)
    named = facts | {"standbys": "ANY 1 (a, b)"}
    assert "synchronous standbys (ANY 1 (a, b)) have it on their disks" in durability(named)
    assert "power cut of theirs can lose it" in durability(
        named | {"synchronous_commit": "remote_write"}
    )
    assert "promoted can lack" in durability(named | {"synchronous_commit": "local"})
    assert "last second" in durability(named | {"synchronous_commit": "off"})
    assert "can destroy" in durability(facts | {"fsync": "off"})
