"""Delay of an inbox in PostgreSQL: from COMMIT to the delivery.

    python -m benchmarks.inbox [--per-s 1000] [--seconds 20] [--hold]

An application inserts a row and enqueues a task that is due at once, in one transaction, at a fixed
rate over eight connections. A consumer receives the tasks. The delay of a task is the time from the
answer to COMMIT until its delivery, so it contains the poll, the record, the enqueue and the
hand-over. The programs share the machine and its disk. With --hold another transaction stays open
for the whole run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvloop

from benchmarks.environment import choose_folder
from benchmarks.postgres_server import Postgres, find_postgres
from benchmarks.servers import Tickwheel
from tickwheel.client import Client

if TYPE_CHECKING:
    from collections.abc import Sequence

CONNECTIONS: Final = 8
TOPIC: Final = "bench.orders"
WARM_UP_S: Final = 2.0
WAIT_S: Final = 30.0
"""Seconds in which all tasks must have been delivered after the last commit."""
GOAL_MS: Final = 10.0
TABLE: Final = "CREATE TABLE orders (number bigint PRIMARY KEY)"
BUY: Final = f"""
WITH bought AS (INSERT INTO orders VALUES ($1) RETURNING number)
SELECT tickwheel.enqueue(topic => '{TOPIC}', body => number::text) FROM bought
"""
READY: Final = "SELECT to_regclass('tickwheel.inbox_state') IS NOT NULL"
DEAD: Final = """
SELECT coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables
WHERE schemaname = 'tickwheel' AND relname LIKE 'inbox%'
"""


class Buyers:
    """Transactions at a fixed rate. ``committed_s`` has the time of each answer, by its number."""

    def __init__(self, pool: Any, per_s: float, seconds: float) -> None:
        self._pool = pool
        self._per_s = per_s
        self._count = int(per_s * seconds)
        self._next = 0
        self.committed_s: list[float] = [0.0] * self._count
        self.late_s = 0.0
        """Maximum seconds that a transaction began after its time."""

    async def run(self) -> None:
        began_s = time.perf_counter()
        await asyncio.gather(*(self._buy(began_s) for _ in range(CONNECTIONS)))

    async def _buy(self, began_s: float) -> None:
        async with self._pool.acquire() as connection:
            statement = await connection.prepare(BUY)
            while self._next < self._count:
                number, self._next = self._next, self._next + 1
                wait_s = began_s + number / self._per_s - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                self.late_s = max(self.late_s, -wait_s)
                await statement.fetchval(number)
                self.committed_s[number] = time.perf_counter()


async def consume(url: str, delivered_s: list[float]) -> None:
    """Record the time of each delivery, by the number in its body, until all are there."""
    missing = len(delivered_s)
    async with (
        Client(url) as client,
        client.subscribe(TOPIC, group="bench", auto_ack=True) as deliveries,
    ):
        async for delivery in deliveries:
            now_s, number = time.perf_counter(), int(delivery.body)
            missing -= not delivered_s[number]
            delivered_s[number] = delivered_s[number] or now_s
            if not missing:
                return


async def measure(dsn: str, url: str, options: argparse.Namespace) -> list[float]:
    """Return the delays of all transactions after the warm-up, in seconds, in order of size."""
    import asyncpg

    pool = await asyncpg.create_pool(dsn, min_size=CONNECTIONS, max_size=CONNECTIONS + 2)
    async with pool, pool.acquire() as other:
        await other.execute(TABLE)
        while not await other.fetchval(READY):  # noqa: ASYNC110  # another process creates it
            await asyncio.sleep(0.05)
        holding = other.transaction(isolation="repeatable_read")
        if options.hold:
            await holding.start()
            await other.fetchval("SELECT pg_current_xact_id()")
        buyers = Buyers(pool, options.per_s, WARM_UP_S + options.seconds)
        delivered_s = [0.0] * len(buyers.committed_s)
        consuming = asyncio.create_task(consume(url, delivered_s))
        await buyers.run()
        async with asyncio.timeout(WAIT_S):
            await consuming
        if options.hold:
            await holding.rollback()
        print(
            f"{len(delivered_s):,} transactions; the last began at most"
            f" {buyers.late_s * 1000:.0f} ms late; dead rows {await other.fetchval(DEAD)}"
        )
    first = int(WARM_UP_S * options.per_s)
    pairs = list(zip(buyers.committed_s, delivered_s, strict=True))[first:]
    return sorted(delivered - committed for committed, delivered in pairs)


def show(delays_s: Sequence[float]) -> float:
    """Print the delays and return the 99th percentile, in ms."""
    words, value_ms = [], 0.0
    for share in (0.5, 0.9, 0.99, 1.0):
        value_ms = delays_s[min(len(delays_s) - 1, int(share * len(delays_s)))] * 1000
        words.append(f"{share:.0%} {value_ms:.1f} ms")
    print("from COMMIT to the delivery: " + ", ".join(words))
    return delays_s[int(0.99 * len(delays_s))] * 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inbox")
    parser.add_argument("--per-s", type=float, default=1_000, help="transactions a second")
    parser.add_argument("--seconds", type=float, default=20, help="seconds after the warm-up")
    parser.add_argument("--hold", action="store_true", help="keep another transaction open")
    parser.add_argument("--dir", metavar="FOLDER", help="folder for the files, on a real disk")
    parser.add_argument("--check", action="store_true", help="exit code 1 above the goal")
    options = parser.parse_args()
    programs = find_postgres()
    if programs is None:
        print("no PostgreSQL: apt-get install postgresql, pip install asyncpg", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="tickwheel-bench-", dir=choose_folder(options.dir)))
    folder.chmod(0o755)  # PostgreSQL has a user of its own
    try:
        with Postgres(folder / "postgres", programs[0]) as postgres:
            dsn = f"postgresql://postgres@127.0.0.1:{postgres.port}/postgres"
            with Tickwheel(folder / "daemon", settings=(f"inbox={dsn}",)) as daemon:
                url = f"tcp://127.0.0.1:{daemon.port}"
                delays_s = uvloop.run(measure(dsn, url, options))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    load, _, _ = os.getloadavg()
    print(f"load {load:.1f}")
    p99_ms = show(delays_s)
    if p99_ms > GOAL_MS:
        print(f"the goal for 99 % is {GOAL_MS:.0f} ms")
    return 1 if p99_ms > GOAL_MS and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
