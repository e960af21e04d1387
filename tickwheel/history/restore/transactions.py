"""What events mean for transactions: from those of a backup to those at the last event.

The history does not hold half tasks. So a transaction of the backup comes back as it was, or as it
was decided since; one to which something was added after the backup cannot come back whole, does
not come back, and is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from tickwheel.model.records import ID_STEP
from tickwheel.model.transactions import Half, Halves, TransactionRow, TransactionState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tickwheel.history.segments import Event
    from tickwheel.model.records import TaskRow

PREPARED, COMMITTED = "transaction_prepared", "transaction_committed"
ROLLED_BACK, PARKED, CHECKED = (
    "transaction_rolled_back",
    "transaction_parked",
    "transaction_checked",
)


class _Task(Protocol):
    row: TaskRow
    has_body: bool


class Transactions:
    """The state of transactions after events; ``apply`` each event."""

    def __init__(self, rows: Iterable[TransactionRow | Halves]) -> None:
        self._heads: dict[str, TransactionRow] = {}
        self._parts: dict[str, dict[int, Halves]] = {}
        self._lost: dict[str, None] = {}
        for row in rows:
            if isinstance(row, Halves):
                self._parts.setdefault(row.transaction, {})[row.part] = row
            else:
                self._heads[row.id] = row

    def rows(self) -> list[TransactionRow | Halves]:
        """The transactions that come back."""
        parts = [part for some in self._parts.values() for part in some.values()]
        return [*self._heads.values(), *parts]

    def lost(self) -> list[str]:
        """Names of undecided transactions that do not come back."""
        return sorted(self._lost)

    def apply(self, event: Event, tasks: Mapping[int, Any]) -> bool:
        """Apply one event. False: it is not one of a transaction. ``tasks`` get the bodies of their
        half tasks."""
        kind, name = event["event"], event.get("transaction")
        if name is None:
            return False
        if kind == PREPARED:
            if event["details"]["part"] not in self._parts.get(name, {}):
                self._drop(name)
                self._lost[name] = None
        elif kind == COMMITTED:
            first = int(event["task_id"])
            self._fill(name, first, event["count"], tasks)
            self._decide(event, TransactionState.COMMITTED, first)
        elif kind == ROLLED_BACK:
            self._decide(event, TransactionState.ROLLED_BACK, 0)
        elif kind == PARKED and name in self._heads:
            self._heads[name] = self._heads[name]._replace(state=TransactionState.PARKED)
        return True

    def _drop(self, name: str) -> None:
        self._heads.pop(name, None)
        self._parts.pop(name, None)

    def _decide(self, event: Event, state: TransactionState, first_id: int) -> None:
        name, at_ms, details = event["transaction"], event["time_ms"], event["details"]
        self._drop(name)
        self._lost.pop(name, None)
        self._heads[name] = TransactionRow(
            name, details["group"], state, at_ms, at_ms, event["count"], details["bytes"],
            decided_ms=at_ms, first_id=first_id,
        )  # fmt: skip

    def _fill(self, name: str, first: int, count: int, tasks: Mapping[int, _Task]) -> None:
        """Give new tasks the bodies of their half tasks, which the history does not hold."""
        parts = self._parts.get(name, {})
        halves: list[Half] = [half for part in sorted(parts) for half in parts[part].halves]
        if len(halves) != count:
            return
        for index, half in enumerate(halves):
            task = tasks.get(first + index * ID_STEP)
            if task is not None and not task.has_body:
                task.row, task.has_body = task.row._replace(body=half.body), True
