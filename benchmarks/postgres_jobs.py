"""The peer of the client cases: delayed tasks in a PostgreSQL table, with hand-written asyncpg
code; and a transaction that stays open.

What a program does that keeps its tasks itself: a table with an index on the due time. It is
quicker than a queue in what it leaves out: no lease, no retry, no single ack (what is fetched is
deleted, so a consumer that dies loses it), no resend without duplicates.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from benchmarks import payload
from benchmarks.client_jobs import loop_factory, timed
from benchmarks.scale import CONNECTIONS, POSTGRES_POOL

Job = Generator[None, None, dict[str, Any]]
Record = tuple[str, int, bytes]

TABLE = """
    CREATE TABLE task (
        id bigserial PRIMARY KEY,
        topic text NOT NULL, due_ms bigint NOT NULL, body bytea NOT NULL
    );
    CREATE INDEX task_due ON task (due_ms)
"""
COLUMNS = ("topic", "due_ms", "body")
INSERT = "INSERT INTO task (topic, due_ms, body) VALUES ($1, $2, $3) RETURNING id"
FETCH = """
    DELETE FROM task WHERE id = ANY(ARRAY(
        SELECT id FROM task WHERE due_ms <= $1 ORDER BY due_ms LIMIT $2 FOR UPDATE SKIP LOCKED))
    RETURNING id, topic, due_ms, body
"""
"""ANY(ARRAY(...)) looks each id up once. With IN the planner could scan the whole table."""
TABLES = """
    SELECT coalesce(sum(n_dead_tup) FILTER (WHERE relname ~ $1), 0)::bigint AS dead,
        coalesce(sum(n_dead_tup), 0)::bigint AS dead_all,
        coalesce(sum(pg_total_relation_size(relid)), 0)::bigint AS bytes
    FROM pg_stat_user_tables
"""
HELD = "SELECT age(backend_xmin) FROM pg_stat_activity WHERE pid = $1"


async def _as_it_is(connection: Any) -> None:
    """Replace asyncpg's reset, which costs a round trip for each returned connection."""


async def _pool(port: int, size: int, *, make: bool = True) -> Any:
    import asyncpg

    address = {"host": "127.0.0.1", "port": port, "user": "postgres", "ssl": False}
    pool = await asyncpg.create_pool(**address, min_size=size, max_size=size, reset=_as_it_is)
    if make:
        await pool.execute(TABLE)
    return pool


def _records(count: int, seed: int, due_ms: int | None = None) -> list[Record]:
    texts, now_ms = payload.bodies(seed), int(time.time() * 1000)
    if due_ms is not None:
        return [(payload.TOPIC, due_ms, texts[i % len(texts)]) for i in range(count)]
    delays = payload.delays_s(count, seed)
    return [
        (payload.TOPIC, now_ms + int(delay * 1000), texts[i % len(texts)])
        for i, delay in enumerate(delays)
    ]


async def _copy(pool: Any, calls: Iterator[list[Record]]) -> None:
    for records in calls:
        async with pool.acquire() as connection:
            await connection.copy_records_to_table("task", records=records, columns=COLUMNS)


async def _check(pool: Any, count: int) -> None:
    stored = await pool.fetchval("SELECT count(*) FROM task")
    assert stored == count, f"{stored} of {count} records"


def postgres_copy(port: int, count: int, per_call: int, in_flight: int, seed: int) -> Job:
    """COPY ``per_call`` records per call, ``in_flight`` calls at a time. Each call is synced."""

    async def run(pool: Any, calls: Iterator[list[Record]]) -> None:
        # One iterator for all: whoever is free takes the next call.
        await asyncio.gather(*(_copy(pool, calls) for _ in range(in_flight)))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        pool = runner.run(_pool(port, in_flight))
        made = payload.in_calls(lambda number: _records(per_call, seed + number), count, per_call)
        yield
        figures = timed(runner, run(pool, made), count)
        runner.run(_check(pool, count))
        runner.run(pool.close())
        return figures


def postgres_insert(port: int, count: int, callers: int, seed: int) -> Job:
    """INSERT one row after the other in each of ``callers`` coroutines. Each insert is synced."""

    async def insert(pool: Any, records: Sequence[Record]) -> None:
        for topic, due_ms, body in records:
            async with pool.acquire() as connection:
                await connection.fetchval(INSERT, topic, due_ms, body)

    async def run(pool: Any, shares: list[list[Record]]) -> None:
        await asyncio.gather(*(insert(pool, share) for share in shares))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        pool = runner.run(_pool(port, POSTGRES_POOL))
        records = _records(count, seed)
        shares = [records[start::callers] for start in range(callers)]
        yield
        figures = timed(runner, run(pool, shares), count)
        runner.run(_check(pool, count))
        runner.run(pool.close())
        return figures


def postgres_fill(port: int, count: int, seed: int) -> Job:
    """Fill a table with due tasks, and prepare it for the planner."""

    async def fill() -> None:
        pool = await _pool(port, 1)
        await _copy(pool, iter([_records(count, seed, int(time.time() * 1000))]))
        await pool.execute("VACUUM ANALYZE task")
        await _check(pool, count)
        await pool.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        yield
        return timed(runner, fill(), count)


def postgres_burst(port: int, count: int, per_fetch: int) -> Job:
    """Fetch and delete due tasks in batches over several connections."""
    got = 0

    async def fetch(pool: Any) -> None:
        nonlocal got
        now_ms = int(time.time() * 1000)
        async with pool.acquire() as connection:
            while records := await connection.fetch(FETCH, now_ms, per_fetch):
                got += len(records)

    async def run(pool: Any) -> None:
        await asyncio.gather(*(fetch(pool) for _ in range(CONNECTIONS)))

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        pool = runner.run(_pool(port, CONNECTIONS, make=False))
        yield
        figures = timed(runner, run(pool), count)
        assert got == count, f"{got} of {count} records"
        runner.run(_check(pool, 0))
        runner.run(pool.close())
        return figures


def postgres_watch(port: int, seconds: float, samples: int, hold_s: float, tables: str) -> Job:
    """Keep a transaction open for ``hold_s``, so that no vacuum removes a row that dies meanwhile.
    Count ``samples`` times in ``seconds`` the dead rows of the tables whose names match ``tables``,
    those of all tables, and the bytes of all."""

    async def connect() -> Any:
        import asyncpg

        return await asyncpg.connect(host="127.0.0.1", port=port, user="postgres", ssl=False)

    async def hold() -> tuple[Any, int]:
        holder = await connect()
        await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT txid_current()")
        return holder, await holder.fetchval("SELECT pg_backend_pid()")

    async def watch(watcher: Any, pid: int) -> dict[str, Any]:
        started_s, rows = time.perf_counter(), []
        for number in range(1, samples + 1):
            at_s = started_s + seconds * number / samples
            await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
            rows.append(dict(await watcher.fetchrow(TABLES, tables)))
        await asyncio.sleep(max(0.0, started_s + hold_s - time.perf_counter()))
        return {"samples": rows, "held_xids": await watcher.fetchval(HELD, pid)}

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        holder, pid = runner.run(hold())
        watcher = runner.run(connect())
        yield
        figures = runner.run(watch(watcher, pid))
        runner.run(holder.execute("ROLLBACK"))
        return figures
