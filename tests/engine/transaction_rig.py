"""A rig with transactions and the checks that the operations make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.engine_rig import CONFIG, NOW_MS, Rig
from tickwheel.engine.state import EngineConfig
from tickwheel.engine.transaction_registry import Transaction
from tickwheel.model.kinds import Half, Reach, TransactionRow, TransactionState
from tickwheel.model.records import TaskOptions

CHECK_MS, EVERY_MS, CHECKS_MAX = 60_000, 30_000, 3
GROUP, OWNER = "payments", "shop"
TRANSACTIONS = replace(
    CONFIG,
    transaction_check_ms=CHECK_MS,
    transaction_check_every_ms=EVERY_MS,
    transaction_checks_max=CHECKS_MAX,
    transactions_remembered_ms=600_000,
    transactions_remembered_max=20,
)


def half(
    body: bytes = b"b",
    due_ms: int = 0,
    *,
    topic: str = "t",
    delay_ms: int | None = None,
    options: TaskOptions | None = None,
) -> Half:
    return Half(topic, due_ms, delay_ms, body, options)


class TransactionRig(Rig):
    """``prepare``, ``decide`` and ``check``; ``asked`` are those of the last check."""

    def __init__(self, config: EngineConfig = TRANSACTIONS, now_ms: int = NOW_MS) -> None:
        super().__init__(config, now_ms)
        self.asked: list[str] = []
        self.there = Reach.OWN
        """The nearest of the members that can be asked."""

    def at(self, name: str) -> Transaction | None:
        return self.core.transaction_registry.by_name.get(name)

    def standing(self, name: str) -> TransactionState | None:
        result = self.at(name)
        return None if result is None else result.row.state

    def is_free(self, name: str) -> bool:
        result = self.at(name)
        return result is None or self.engine.transactions.is_free(result)

    def prepare(self, name: str, part: int, *halves: Half, address: Any = None) -> None:
        self.engine.transactions.prepare(name, GROUP, part, halves, address, 0, *self.now, OWNER)

    def commit_of(self, name: str, address: Any = None) -> None:
        result = self.at(name)
        assert result is not None
        self.engine.transactions.commit(result, address, 0, *self.now)

    def roll_back(self, name: str, address: Any = None) -> None:
        result = self.at(name)
        assert result is not None
        self.engine.transactions.rollback(result, address, 0, *self.now)

    def check(self) -> list[str]:
        """Return the transactions with a checkback."""
        self.asked = []
        more = self.engine.transactions.check(*self.now, 1_000, self._ask)
        assert not more
        return self.asked

    def _ask(self, row: TransactionRow, above: Reach) -> Reach:
        if self.there <= above:
            return Reach.NOBODY
        self.asked.append(row.id)
        return self.there

    def comes(self, who: Reach) -> None:
        """A member of the group, who is as near as this."""
        self.there = max(self.there, who)
        self.engine.transactions.member_connected(GROUP)

    def bodies(self) -> list[bytes]:
        """Return the bodies of stored tasks, by id."""
        return [row.body for _, row in sorted(self.rows.tasks.items())]
