"""The rows of an inbox in PostgreSQL: each committed row once, in the order of visibility."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from tickwheel.inbox import postgresql
from tickwheel.inbox.contract import Batch, Fenced, InboxTrouble, Row
from tickwheel.inbox.postgresql import PostgresInbox

PUT = "SELECT tickwheel.enqueue(topic => 't', body => $1::text)"


@asynccontextmanager
async def opened(database: str) -> AsyncIterator[PostgresInbox]:
    inbox = PostgresInbox(database)
    try:
        await inbox.open()
        assert await inbox.lead()
        yield inbox
    finally:
        await inbox.close()


def batch_of(rows: list[Row], number: int = 1) -> Batch:
    return Batch(b"s" * 16, number, rows)


async def take(inbox: PostgresInbox) -> list[str]:
    """Take all rows that are visible now."""
    taken: list[str] = []
    while rows := list(await inbox.read()):
        await inbox.record(batch_of(rows), len(rows))
        inbox.confirm()
        taken += [row.body.decode() for row in rows]
    return taken


async def test_rows_of_a_transaction_are_taken_when_it_commits(database: str) -> None:
    application = await asyncpg.connect(database)
    async with opened(database) as inbox:
        assert await inbox.take_over() is None
        async with application.transaction():
            await application.execute(PUT, "a")
            await application.execute(PUT, "b")
            assert await take(inbox) == []
        assert await take(inbox) == ["a", "b"]
        assert await take(inbox) == []
    await application.close()


async def test_a_late_transaction_is_neither_skipped_nor_in_the_way(database: str) -> None:
    late, early = await asyncpg.connect(database), await asyncpg.connect(database)
    async with opened(database) as inbox:
        await inbox.take_over()
        transaction = late.transaction()
        await transaction.start()
        await late.execute(PUT, "late")
        for number in range(5):
            await early.execute(PUT, str(number))
            assert await take(inbox) == [str(number)]
            await inbox.note_idle()
        await transaction.commit()
        assert await take(inbox) == ["late"]
        assert await take(inbox) == []
    await late.close()
    await early.close()


async def test_a_transaction_with_the_highest_xid_may_have_the_lowest_id(database: str) -> None:
    """Its xid is beyond the snapshot's xmax, because no later transaction has completed."""
    first, second = await asyncpg.connect(database), await asyncpg.connect(database)
    async with opened(database) as inbox:
        await inbox.take_over()
        one, two = first.transaction(), second.transaction()
        await one.start()
        await first.fetchval("SELECT pg_current_xact_id()")
        await two.start()
        await second.execute(PUT, "second")
        await first.execute(PUT, "first")
        await one.commit()
        assert await take(inbox) == ["first"]
        await two.commit()
        assert await take(inbox) == ["second"]
    await first.close()
    await second.close()


async def test_rolled_back_savepoints_and_transactions_leave_nothing(database: str) -> None:
    application = await asyncpg.connect(database)
    async with opened(database) as inbox:
        await inbox.take_over()
        async with application.transaction():
            await application.execute(PUT, "kept")
            with pytest.raises(ZeroDivisionError):
                async with application.transaction():  # a savepoint
                    await application.execute(PUT, "dropped")
                    raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError):
            async with application.transaction():
                await application.execute(PUT, "dropped as well")
                raise ZeroDivisionError
        assert await take(inbox) == ["kept"]
    await application.close()


async def test_a_prepared_transaction_is_taken_when_it_commits(database: str) -> None:
    application = await asyncpg.connect(database)
    async with opened(database) as inbox:
        await inbox.take_over()
        await application.execute("BEGIN")
        await application.execute(PUT, "prepared")
        await application.execute("PREPARE TRANSACTION 'p'")
        await application.execute(PUT, "plain")
        assert await take(inbox) == ["plain"]
        await application.execute("COMMIT PREPARED 'p'")
        assert await take(inbox) == ["prepared"]
    await application.close()


async def test_a_taker_repeats_the_last_batch_of_its_predecessor(database: str) -> None:
    application = await asyncpg.connect(database)
    async with opened(database) as inbox:
        await inbox.take_over()
        for body in ("a", "b", "c"):
            await application.execute(PUT, body)
        rows = list(await inbox.read())
        await inbox.record(batch_of(rows[:2], 7), 2)
    await application.execute(PUT, "d")
    async with opened(database) as inbox:
        batch = await inbox.take_over()
        assert batch is not None
        assert (batch.session, batch.number) == (b"s" * 16, 7)
        assert [row.body for row in batch.rows] == [b"a", b"b"]
        inbox.confirm()
        assert await take(inbox) == ["c", "d"]
        await inbox.note_idle()
    async with opened(database) as inbox:
        assert await inbox.take_over() is None
        assert await take(inbox) == []
    await application.close()


async def test_parts_of_a_refused_batch_are_recorded_with_their_rest(database: str) -> None:
    application = await asyncpg.connect(database)
    async with opened(database) as inbox:
        await inbox.take_over()
        for body in ("a", "b", "c", "d"):
            await application.execute(PUT, body)
        rows = list(await inbox.read())
        await inbox.record(batch_of(rows, 1), 4)
        await inbox.record(Batch(b"s" * 16, 2, rows[:1], rows[2:]))
    async with opened(database) as inbox:
        batch = await inbox.take_over()
        assert batch is not None
        assert batch.number == 2
        assert [row.body for row in batch.rows] == [b"a"]
        assert [row.body for row in batch.rest] == [b"c", b"d"]
        await inbox.record(Batch(b"s" * 16, 3, batch.rest))
        inbox.confirm()
        assert await take(inbox) == []
    await application.close()


async def test_a_former_taker_cannot_record(database: str) -> None:
    application = await asyncpg.connect(database)
    async with opened(database) as former:
        await former.take_over()
        await application.execute(PUT, "a")
        rows = list(await former.read())
        successor = PostgresInbox(database)
        await successor.open()
        assert not await successor.lead()
        await successor.take_over()
        with pytest.raises(Fenced):
            await former.record(batch_of(rows), 1)
        assert await take(successor) == ["a"]
        await successor.close()
    await application.close()


async def test_tables_are_truncated_in_turn(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "ROTATE_ROWS", 1)
    monkeypatch.setattr(postgresql, "BATCHES_MAX", 3)
    application = await asyncpg.connect(database)

    async def sizes() -> list[int]:
        tables = ("inbox_0", "inbox_1")
        count = "SELECT pg_relation_size($1::text::regclass)"
        return [await application.fetchval(count, f"tickwheel.{name}") for name in tables]

    async with opened(database) as inbox:
        await inbox.take_over()
        await inbox.tidy()
        for turn in range(6):
            await application.execute(PUT, str(turn))
            assert await take(inbox) == [str(turn)]
            await inbox.tidy()  # changes tables
            await inbox.tidy()  # truncates the old one
            assert await sizes() == [0, 0]
        count = await application.fetchval("SELECT count(*) FROM tickwheel.inbox_batches")
        assert count <= 4
        assert await application.fetchval("SELECT side FROM tickwheel.inbox_state") == 0
    await application.close()


async def test_the_batches_of_former_takers_leave_as_well(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "BATCHES_MAX", 8)
    application = await asyncpg.connect(database)
    for turn in range(6):
        inbox = PostgresInbox(database)
        await inbox.open()
        await inbox.take_over()
        await application.execute(PUT, str(turn))
        assert await take(inbox) == [str(turn)]
        await inbox.tidy()
        await inbox.close()
        count = await application.fetchval("SELECT count(*) FROM tickwheel.inbox_batches")
        assert count <= 11
    await application.close()


async def test_an_open_transaction_keeps_its_table(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "ROTATE_ROWS", 1)
    holder, application = await asyncpg.connect(database), await asyncpg.connect(database)
    async with opened(database) as inbox:
        await inbox.take_over()
        await inbox.tidy()
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute(PUT, "held")
        await application.execute(PUT, "a")
        assert await take(inbox) == ["a"]
        for _ in range(3):
            await inbox.tidy()
        await application.execute(PUT, "b")  # nobody waits for a lock
        assert await take(inbox) == ["b"]
        await transaction.commit()
        await inbox.tidy()
        assert await take(inbox) == ["held"]
        await inbox.tidy()
        count = "SELECT count(*) FROM tickwheel.inbox_0"
        assert await application.fetchval(count) == 0
    await holder.close()
    await application.close()


async def move(application: Any) -> None:
    """Change the tables as a restore into another cluster would. The ids of transactions there are
    lower: here those in the tables are raised instead."""
    raised = "({0}::text::bigint + 1000000)::text::xid8"
    for table in ("inbox_0", "inbox_1"):
        await application.execute(f"UPDATE tickwheel.{table} SET xid = {raised.format('xid')}")
    snapshots = await application.fetch("SELECT seq, target::text, snapshot::text FROM"
                                        " tickwheel.inbox_batches")  # fmt: skip
    for seq, target, snapshot in snapshots:
        await application.execute(
            "UPDATE tickwheel.inbox_batches SET target = $2::text::pg_snapshot, snapshot ="
            f" $3::text::pg_snapshot, bound = {raised.format('bound')},"
            f" next_bound = {raised.format('next_bound')} WHERE seq = $1",
            seq, _raised(target), _raised(snapshot),
        )  # fmt: skip
    await application.execute("UPDATE tickwheel.inbox_state SET cluster = 'another'")


async def test_rows_are_taken_once_after_a_restore_into_another_cluster(database: str) -> None:
    application = await asyncpg.connect(database)
    async with opened(database) as inbox:
        await inbox.take_over()
        await application.execute(PUT, "taken")
        assert await take(inbox) == ["taken"]
        await inbox.note_idle()
    await application.execute(PUT, "restored")
    await move(application)
    await application.execute(PUT, "new")
    async with opened(database) as inbox:
        assert await inbox.take_over() is None
        assert await take(inbox) == ["restored", "new"]
        await application.execute(PUT, "newer")
        assert await take(inbox) == ["newer"]
    async with opened(database) as inbox:
        batch = await inbox.take_over()
        assert batch is not None
        assert [row.body for row in batch.rows] == [b"newer"]
    await application.close()


async def test_rows_written_after_a_restore_are_kept_while_an_older_range_is_taken(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "ROWS_MAX", 1)
    application = await asyncpg.connect(database)
    async with opened(database) as inbox:
        await inbox.take_over()
        async with application.transaction():
            await application.execute(PUT, "first")
            await application.execute(PUT, "second")
        await inbox.record(batch_of(list(await inbox.read())), 1)
    await move(application)
    await application.execute(PUT, "new")
    async with opened(database) as inbox:
        batch = await inbox.take_over()
        assert batch is not None
        assert [row.body for row in batch.rows] == [b"first"]
        await inbox.record(batch)  # as for a part of it
        inbox.confirm()
        assert await take(inbox) == ["second", "new"]
    await application.close()


def _raised(snapshot: str) -> str:
    low, high, inside = snapshot.split(":")
    more = [str(int(xid) + 1_000_000) for xid in inside.split(",") if xid]
    return f"{int(low) + 1_000_000}:{int(high) + 1_000_000}:{','.join(more)}"


# --- random transactions -------------------------------------------------------------------------


class World:
    """Transactions of an application, in a random order, and a taker that dies now and then."""

    def __init__(self, rng: random.Random, connections: list[Any]) -> None:
        self.rng = rng
        self.connections = connections
        self.open: dict[int, list[str]] = {}
        """Connection → bodies that its transaction has written."""
        self.step = 0
        self.written: dict[str, int] = {}
        """Body → step in which it was written."""
        self.committed: dict[str, int] = {}
        """Body → step in which it was committed."""
        self.taken: list[str] = []

    async def act(self) -> None:
        """Let one connection do one thing."""
        self.step += 1
        index = self.rng.randrange(len(self.connections))
        connection = self.connections[index]
        if index not in self.open:
            await connection.execute("BEGIN")
            self.open[index] = []
            if self.rng.random() < 0.3:
                await connection.fetchval("SELECT pg_current_xact_id()")
            return
        choice = self.rng.random()
        if choice < 0.6:
            body = f"{self.step}"
            if self.rng.random() < 0.2:
                await connection.execute("SAVEPOINT s")
                await connection.execute(PUT, f"{body} dropped")
                await connection.execute("ROLLBACK TO s")
            await connection.execute(PUT, body)
            self.written[body] = self.step
            self.open[index].append(body)
        elif choice < 0.85:
            await connection.execute("COMMIT")
            self.committed |= dict.fromkeys(self.open.pop(index), self.step)
        else:
            await connection.execute("ROLLBACK")
            self.open.pop(index)

    async def settle(self) -> None:
        for index in list(self.open):
            await self.connections[index].execute("COMMIT")
            self.committed |= dict.fromkeys(self.open.pop(index), self.step)

    def check(self) -> None:
        assert sorted(self.taken) == sorted(self.committed)
        places = {body: place for place, body in enumerate(self.taken)}
        for body, place in places.items():
            before = [b for b, step in self.committed.items() if step < self.written[body]]
            assert all(places[earlier] < place for earlier in before)


@pytest.mark.parametrize("seed", [0, *(
    pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60)
)])  # fmt: skip
async def test_every_committed_row_is_taken_once_in_causal_order(
    database: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(postgresql, "ROWS_MAX", rng.choice((1, 2, 5, 1_000)))
    monkeypatch.setattr(postgresql, "ROTATE_ROWS", rng.choice((1, 10)))
    monkeypatch.setattr(postgresql, "BATCHES_MAX", 20)
    inbox = PostgresInbox(database)
    await inbox.open()
    await inbox.lead()
    await inbox.take_over()
    world = World(rng, [await asyncpg.connect(database) for _ in range(5)])

    async def confirm(batch: Batch) -> None:
        world.taken.extend(row.body.decode() for row in batch.rows)
        inbox.confirm()

    for _ in range(400):
        await world.act()
        choice = rng.random()
        if choice < 0.3:
            rows = list(await inbox.read())
            if rows:
                count = rng.randint(1, len(rows))
                batch = batch_of(rows[:count])
                await inbox.record(batch, count)
                if rng.random() < 0.9:
                    await confirm(batch)
                    continue
                # The taker dies, and its successor repeats the batch.
                await inbox.close()
                inbox = PostgresInbox(database)
                await inbox.open()
                while not await inbox.lead():  # the server notices the end of a session soon
                    pass
                repeated = await inbox.take_over()
                assert repeated is not None
                assert list(repeated.rows) == list(batch.rows)
                await confirm(repeated)
        elif choice < 0.4:
            await inbox.tidy()
        elif choice < 0.45:
            await inbox.note_idle()
    await world.settle()
    world.taken += await take(inbox)
    world.check()
    await inbox.close()
    for connection in world.connections:
        await connection.close()


# --- databases that cannot be used ---------------------------------------------------------------


async def test_a_read_only_default_does_not_stop_the_taker(database: str) -> None:
    name = database.rpartition("/")[2]
    application = await asyncpg.connect(database)
    await application.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    await application.execute(f"ALTER DATABASE {name} SET statement_timeout = '1ms'")
    async with opened(database) as inbox:
        assert await inbox.take_over() is None
        assert await take(inbox) == []
    await application.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE tickwheel.inbox_state SET layout = 2", "the layout is 2; this version supports 1"),
        ("DROP TABLE tickwheel.inbox_1", "inbox_1"),
    ],
)
async def test_an_unusable_inbox_is_named(database: str, change: str, message: str) -> None:
    async with opened(database) as inbox:
        await inbox.take_over()
    application = await asyncpg.connect(database)
    await application.execute(change)
    await application.close()
    with pytest.raises(InboxTrouble, match=message):
        async with opened(database) as inbox:
            await inbox.take_over()
            await inbox.read()


async def test_a_role_without_privileges_gets_the_way_out(database: str) -> None:
    admin = await asyncpg.connect(database)
    await admin.execute("DROP ROLE IF EXISTS nobody_here")
    await admin.execute("CREATE ROLE nobody_here LOGIN")
    inbox = PostgresInbox(database.replace("postgres@", "nobody_here@"))
    with pytest.raises(InboxTrouble, match="tickwheel inbox sql"):
        await inbox.open()
    await inbox.close()
    await admin.close()


async def test_a_role_needs_only_its_schema(database: str) -> None:
    admin = await asyncpg.connect(database)
    await admin.execute("DROP ROLE IF EXISTS owner_here")
    await admin.execute("CREATE ROLE owner_here LOGIN")
    await admin.execute('CREATE SCHEMA "Jobs" AUTHORIZATION owner_here')
    async with opened(f"{database.replace('postgres@', 'owner_here@')}?schema=Jobs") as inbox:
        await inbox.take_over()
        await admin.execute("SELECT \"Jobs\".enqueue(topic => 't', body => 'x')")
        assert await take(inbox) == ["x"]
    await admin.close()


async def test_an_inbox_can_be_in_another_schema(database: str) -> None:
    async with opened(f"{database}?schema=Jobs") as inbox:
        await inbox.take_over()
        application = await asyncpg.connect(database)
        put = "SELECT \"Jobs\".enqueue(topic => 't', body => 'x')"
        await application.execute(put)
        assert await take(inbox) == ["x"]
        await inbox.tidy()
        await application.close()
