"""The PostgreSQL of a torture run: a real server of its own, and the ways in which it goes wrong.

Each fault is over, and PostgreSQL is well again, when its call returns. None of them may lose what
it had confirmed.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from pathlib import Path

from crash.store_rig import Fault, ServerRig
from support.postgresql import PostgresServer
from support.waiting import rest

SYNCED = "synced"
SCHEMA = "torture"
ENDED = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE application_name = 'tickwheel' AND pid <> pg_backend_pid()"
)


class PostgresRig(ServerRig):
    """See ``faults``."""

    def __init__(self, folder: Path, query: str = "", *, proxied: bool = False) -> None:
        self.server = PostgresServer(fsync="on", full_page_writes="on")
        super().__init__(query, proxied=proxied)
        self.faults: dict[str, Fault] = {
            "stop": self._stop,
            "immediate": self._immediate,
            "kill": self._kill,
            "pause": self._pause,
            "cut": self._cut,
            "readonly": self._readonly,
            "hole": self._hole,
        }

    @property
    def kinds(self) -> dict[str, frozenset[str]]:
        return {SYNCED: frozenset(self.faults)}

    @property
    def lossy(self) -> dict[str, frozenset[str]]:
        return {SYNCED: frozenset()}

    @property
    def url(self) -> str:
        url = self.server.url(self._query, schema=SCHEMA).replace("allow_volatile_store=1&", "")
        return self.through_proxy(url)

    def close(self) -> None:
        self.server.close()

    async def answers(self) -> None:
        await self._sql("SELECT 1")

    async def sync(self, mode: str) -> None:
        """There is one way in which this server is set."""

    async def left(self) -> list[str]:
        """Tables with tasks that have not ended."""
        rows = await self._sql(
            f"SELECT shard, number FROM {SCHEMA}.part ORDER BY number",
        )
        left = []
        for shard, number in rows:
            at = f"{shard}_{number}"
            (row,) = await self._sql(
                f"SELECT count(*) FROM {SCHEMA}.task_{at} t WHERE NOT EXISTS"
                f" (SELECT FROM {SCHEMA}.note_{at} n WHERE n.id = t.id AND n.kind < 2)"
            )
            left += [f"{row[0]} tasks in task_{at}"] if row[0] else []
        return left

    async def _sql(self, *statements: str) -> list[tuple[int, ...]]:
        return [tuple(row) for row in await asyncio.to_thread(self.server.sql, *statements)]

    # --- the faults ----------------------------------------------------------------------------

    async def _stop(self, rnd: random.Random, hold_s: float) -> None:
        await self._down(self.server.stop, hold_s)

    async def _immediate(self, rnd: random.Random, hold_s: float) -> None:
        await self._down(lambda: self.server.stop(signal.SIGQUIT), hold_s)

    async def _kill(self, rnd: random.Random, hold_s: float) -> None:
        await self._down(self.server.kill, hold_s)

    async def _down(self, end: Callable[[], None], hold_s: float) -> None:
        await asyncio.to_thread(end)
        await rest(hold_s / 2)
        await asyncio.to_thread(self.server.start)

    async def _cut(self, rnd: random.Random, hold_s: float) -> None:
        for _ in range(rnd.randint(2, 8)):
            await self._sql(ENDED)
            await rest(hold_s / 8 * rnd.random())

    async def _readonly(self, rnd: random.Random, hold_s: float) -> None:
        await self._sql(
            "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()"
        )
        await rest(hold_s)
        await self._sql(
            "SET default_transaction_read_only = off",
            "ALTER SYSTEM RESET default_transaction_read_only",
            "SELECT pg_reload_conf()",
        )
