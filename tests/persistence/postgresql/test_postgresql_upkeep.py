"""Ended tasks leave the database with their tables, and no table has dead rows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from persistence.postgresql.conftest import Make, store
from persistence.postgresql.test_postgresql_faults import lose_answer, session
from persistence.store_subject import OWNER, Subject
from support.postgresql import PostgresServer
from support.stand_in import stand_in
from support.store_rows import GROUPS, ended, in_flight, tasks
from support.waiting import comes
from tickwheel.model.kinds import GROUP, Effects, keyed
from tickwheel.model.records import DeadRow, GroupRow, TaskRow
from tickwheel.persistence.contract import CommitUnknown
from tickwheel.persistence.memory import MemoryStore
from tickwheel.persistence.on_server import NoReply
from tickwheel.persistence.postgresql import upkeep as upkeep_module
from tickwheel.persistence.postgresql.driver import Link, ServerError


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the test lets tasks leave."""
    monkeypatch.setattr(upkeep_module, "EVERY_S", 3_600.0)


def tables(subject: Subject, server: PostgresServer, kind: str) -> list[str]:
    schema = store(subject).options.schema
    return [
        row["relname"]
        for row in server.sql(
            f"SELECT relname FROM pg_class WHERE relnamespace = '{schema}'::regnamespace"
            f" AND relkind = 'r' AND relname LIKE '{kind}\\_%' ORDER BY relname"
        )
    ]


async def step(subject: Subject, times: int = 1) -> None:
    for _ in range(times):
        await store(subject)._upkeep.step()


async def test_parts_leave_with_their_last_task(
    subject: Subject, shared_postgres: PostgresServer
) -> None:
    for first in range(1, 1_001, 100):
        ids = range(first, first + 100)
        await subject.commit(tasks(ids))
        await subject.commit(ended(ids))
        await step(subject)
    assert len(tables(subject, shared_postgres, "task")) <= 2
    assert len(tables(subject, shared_postgres, "note")) <= 2
    assert await subject.ids() == []
    await subject.reopen()
    assert [task_id for task_id, _ in (await subject.small()).outcomes] == list(range(1, 1_001))


async def test_what_counts_is_copied(subject: Subject, shared_postgres: PostgresServer) -> None:
    truth = Subject(MemoryStore())
    await truth.open()
    changed = TaskRow(7, 9_000, "t", b"changed")
    dead = DeadRow(8, "g", "t", 5, 3, "why")
    batches = [
        tasks(range(1, 301)),
        Effects(updated={7: changed}, progress={(9, "a"): in_flight(9, "a")}),
        Effects(dead={(8, "g"): dead, (10, "g"): DeadRow(10, "g", "t", 5, 3, "")}),
        Effects(progress={(9, "a"): in_flight(9, "a", 2), (9, "b"): in_flight(9, "b")}),
        Effects(dead={(10, "g"): None}, progress={(9, "b"): None}),
        ended([*range(1, 7), *range(11, 290)]),
        tasks([400]),
    ]
    for effects in batches:
        await truth.commit(effects)
        await subject.commit(effects)
        await step(subject, 2)
    assert len(tables(subject, shared_postgres, "task")) <= 3
    for restart in (False, True):
        if restart:
            await subject.reopen(clean=False)
        everything = await truth.store.scan(-1, 1_000, None)
        assert len(everything) == 16
        assert await subject.store.scan(-1, 1_000, None) == everything
        assert await subject.store.scan_back(2**64, 1_000, None) == everything[::-1]
        assert await subject.store.scan_dead((0, ""), 9, None, None) == [dead]
        assert (await subject.small()).progress == [in_flight(9, "a", 2)]


async def test_batches_during_a_copy_are_in_it(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subject.commit(tasks(range(1, 301)))
    await step(subject)
    await subject.commit(ended(range(1, 200)))
    upkeep = store(subject)._upkeep
    count = upkeep._filling
    later = [
        ended([200, 201]),
        Effects(updated={202: TaskRow(202, 5, "t", b"late")}),
        Effects(progress={(203, "a"): in_flight(203, "a")}),
    ]

    async def meanwhile(number: int) -> object:
        """After the copy was made, and before it is used."""
        while later:
            await subject.commit(later.pop(0))
        return await count(number)

    monkeypatch.setattr(upkeep, "_filling", meanwhile)
    former = store(subject)._writer.parts
    await step(subject)
    assert store(subject)._writer.parts.numbers[0] != former.numbers[0]
    assert not later
    assert await subject.ids() == list(range(202, 301))
    found = await subject.store.read([202, 203])
    assert found[202].row.body == b"late"
    assert found[203].progress == (in_flight(203, "a"),)
    await subject.commit(ended(range(202, 301)))
    assert await subject.ids() == []


async def test_no_copy_from_before_a_new_claim_is_used(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby that was promoted meanwhile has its tables, and not yet its rows."""
    await subject.commit(tasks(range(1, 301)))
    await step(subject)
    await subject.commit(ended(range(1, 200)))
    upkeep = store(subject)._upkeep
    count, numbers = upkeep._filling, store(subject)._writer.parts.numbers

    async def fail_over(number: int) -> object:
        filling = await count(number)
        await upkeep._link.execute(f"TRUNCATE task_0_{number}")
        store(subject)._link.drop()
        return filling

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, "_filling", fail_over)
        await step(subject)
    assert await subject.ids() == list(range(200, 301))
    await step(subject)
    assert store(subject)._writer.parts.numbers[0] != numbers[0], "it was copied now"
    assert await subject.ids() == list(range(200, 301))


async def test_a_part_begins_after_the_ids_of_an_unanswered_batch(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subject.commit(tasks(range(1, 101)))
    lose_answer(monkeypatch, store(subject)._link, silent=True)
    with pytest.raises(CommitUnknown):
        await subject.commit(tasks(range(101, 111)))
    await step(subject)
    assert store(subject)._writer.parts.lows[-1] == 111
    assert await subject.commit(tasks(range(101, 111))) is False
    await subject.commit(tasks([200]))
    ids = [*range(1, 111), 200]
    assert list(await subject.store.read(ids)) == ids


async def test_no_table_has_dead_rows(subject: Subject, shared_postgres: PostgresServer) -> None:
    schema = store(subject).options.schema
    async with session(shared_postgres, schema) as other:
        async with other.transaction(isolation="repeatable_read"):
            await other.fetchval("SELECT count(*) FROM layout")
            for first in range(1, 1_001, 100):
                ids = range(first, first + 100)
                await subject.commit(tasks(ids))
                await subject.commit(Effects(progress={(i, "g"): in_flight(i, "g") for i in ids}))
                group = GroupRow("t", "g", first)
                await subject.commit(Effects(records=keyed(GROUP, [group])))
                await subject.commit(ended(ids))
                await step(subject)
        await subject.store.close(clean=True)

        async def stats() -> list[tuple[str, int, int, int]]:
            rows = await other.fetch(
                "SELECT relname, n_dead_tup, n_tup_upd, n_tup_del FROM pg_stat_user_tables"
                f" WHERE schemaname = '{schema}' AND n_tup_ins > 0"
                " AND relname ~ '^(task|note|journal|record)_'"
            )
            return [tuple(row) for row in rows]

        async def is_there() -> bool:
            return bool(await stats())

        await comes(is_there)
        assert {
            counts for _, *counts in map(tuple, await stats()) for counts in [tuple(counts)]
        } == {(0, 0, 0)}
        assert len(tables(subject, shared_postgres, "task")) <= 2, "though it was open all the time"


async def test_a_table_that_somebody_reads_leaves_later(
    subject: Subject, shared_postgres: PostgresServer
) -> None:
    await subject.commit(tasks(range(1, 101)))
    first = f"task_0_{store(subject)._writer.parts.numbers[0]}"
    async with session(shared_postgres, store(subject).options.schema) as other:
        async with other.transaction():
            await other.fetchval(f"SELECT count(*) FROM {first}")
            await subject.commit(ended(range(1, 101)))
            await step(subject, 2)
            assert first in tables(subject, shared_postgres, "task")
            assert await subject.ids() == []
            assert await subject.commit(tasks([200])) is True
        await step(subject)
    assert first not in tables(subject, shared_postgres, "task")


async def test_generations_keep_records_and_outcomes(
    subject: Subject, shared_postgres: PostgresServer
) -> None:
    await subject.commit(Effects(records=keyed(GROUP, GROUPS)))
    await subject.commit(ended([5]))
    for number in range(1, 200):
        await subject.commit(Effects(records=keyed(GROUP, [GroupRow("t", "g", number)])))
        if number % 20 == 0:
            await step(subject)
    assert len(tables(subject, shared_postgres, "journal")) == 1
    schema = store(subject).options.schema
    (name,) = tables(subject, shared_postgres, "record")
    assert shared_postgres.sql(f"SELECT count(*) FROM {schema}.{name}")[0][0] < 100
    opened = await subject.reopen()
    assert opened.last_batch == 201
    small = await subject.small()
    assert sorted(small.of_kind(GROUP)) == sorted([*GROUPS, GroupRow("t", "g", 199)])
    assert [task_id for task_id, _ in small.outcomes] == [5]


async def test_tables_of_an_interrupted_copy_are_dropped_at_the_next_start(
    subject: Subject, shared_postgres: PostgresServer, make: Make
) -> None:
    schema = store(subject).options.schema
    number = shared_postgres.sql(f"SELECT nextval('{schema}.part_number')")[0][0]
    shared_postgres.sql(
        f"CREATE TABLE {schema}.task_0_{number} (x int)",
        f"CREATE TABLE {schema}.task_1_{number} (x int)",
        f"CREATE TABLE {schema}.task_0_{number + 99} (x int)",
    )
    await subject.reopen(clean=False)
    await comes(lambda: f"task_0_{number}" not in tables(subject, shared_postgres, "task"))
    left = tables(subject, shared_postgres, "task")
    assert f"task_1_{number}" in left, "another shard's"
    assert f"task_0_{number + 99}" in left, "a successor's"


async def with_waste(subject: Subject) -> None:
    """A part and a generation in which little counts."""
    await subject.commit(tasks(range(1, 301)))
    await step(subject)
    await subject.commit(ended(range(1, 270)))
    for number in range(40):
        await subject.commit(Effects(records=keyed(GROUP, [GroupRow("t", "g", number)])))


async def copied(subject: Subject, server: PostgresServer) -> None:
    """Both were copied, and no table is left over."""
    await step(subject)
    counts = [len(tables(subject, server, kind)) for kind in ("task", "note", "journal", "record")]
    assert counts == [2, 2, 1, 1]
    assert await subject.ids() == list(range(270, 301))
    await subject.reopen()
    assert (await subject.small()).of_kind(GROUP) == [GroupRow("t", "g", 39)]


@pytest.mark.parametrize("statement", ["INSERT INTO task_", "INSERT INTO record_"])
async def test_copies_that_fail_leave_no_tables(
    subject: Subject,
    shared_postgres: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
) -> None:
    await with_waste(subject)
    link = store(subject)._upkeep._link
    execute, counts = link.execute, list[int]()

    async def full(script: str, **more: Any) -> None:
        if script.startswith(statement):
            raise ServerError("53100", "could not extend file: No space left on device")
        await execute(script, **more)

    with monkeypatch.context() as patch:
        patch.setattr(link, "execute", full)
        for _ in range(5):
            with pytest.raises(ServerError, match="No space left"):
                await step(subject)
            counts.append(len(tables(subject, shared_postgres, "%")))
    assert counts[1:] == counts[1:2] * 4
    await copied(subject, shared_postgres)


@pytest.mark.parametrize("part", ["DELETE FROM part", "SET generation"])
async def test_tables_leave_though_the_answer_to_their_replacement_was_lost(
    subject: Subject, shared_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    await with_waste(subject)
    lose_answer(monkeypatch, store(subject)._link, silent=False, part=part)
    with pytest.raises(NoReply):
        await step(subject)
    await copied(subject, shared_postgres)


async def test_the_upkeep_waits_longer_after_each_failure(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    upkeep, pauses, is_broken = store(subject)._upkeep, list[float](), iter("yyn" + 9 * "y")

    async def fail() -> None:
        if next(is_broken) == "y":
            raise ServerError("53100", "No space left on device")

    async def noted(delay_s: float) -> None:
        pauses.append(delay_s)
        if len(pauses) == 12:
            raise asyncio.CancelledError

    await upkeep.stop()
    with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
        patch.setattr(upkeep_module, "EVERY_S", 1.0)
        patch.setattr(upkeep, "step", fail)
        patch.setattr(upkeep_module, "asyncio", stand_in(asyncio, sleep=noted))
        await upkeep._run(store(subject)._writer.parts, 0)
    assert pauses == [1, 2, 4, 1, 2, 4, 8, 16, 32, 60, 60, 60]


async def test_a_deposed_daemon_changes_no_table(
    subject: Subject, shared_postgres: PostgresServer, make: Make
) -> None:
    await subject.commit(tasks(range(1, 101)))
    await subject.commit(ended(range(1, 90)))
    successor = make(shared_postgres.url("part_rows=100", schema=store(subject).options.schema))
    await successor.open("next/1")
    with pytest.raises(Exception, match="epoch 2 of 'next/1' began"):
        await step(subject)
    assert await successor.ids() == list(range(90, 101))
    await successor.commit_as("next/1", ended(range(90, 101)))
    assert await successor.ids() == []
    assert OWNER != "next/1"


async def test_nothing_is_changed_on_another_server(
    subject: Subject, shared_postgres: PostgresServer, make: Make
) -> None:
    """After a failover the former primary can go on. Another schema stands in for it."""
    other, upkeep = make(shared_postgres.url("part_rows=100")), store(subject)._upkeep
    await other.open()
    await subject.store.verify()  # the claim of a new connection
    await subject.commit(tasks(range(1, 101)))
    await upkeep.stop()
    upkeep._link = Link(store(other).options)
    with pytest.raises(NoReply, match="another server"):
        await step(subject)
    await subject.commit(tasks([200]))
    assert await subject.ids() == [*range(1, 101), 200]


async def test_a_part_without_tables_is_not_begun(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were made on a former primary, and the connection has changed since."""
    await subject.commit(tasks(range(1, 101)))
    statements = {**upkeep_module.SQL, "part_tables": "SELECT 1"}
    monkeypatch.setattr(upkeep_module, "SQL", statements)
    await step(subject)
    await subject.commit(tasks([200]))
    assert await subject.ids() == [*range(1, 101), 200]


async def test_an_unexpected_error_does_not_end_the_upkeep(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    upkeep, steps = store(subject)._upkeep, []

    async def fail() -> None:
        steps.append(1)
        raise KeyError("a bug")

    monkeypatch.setattr(upkeep, "step", fail)
    monkeypatch.setattr("tickwheel.persistence.postgresql.upkeep.EVERY_S", 0.0)
    await upkeep.stop()
    upkeep.start(0)
    await comes(lambda: len(steps) > 1)
