"""The contract between a taker and the database of an inbox.

A *row* is one command that an application has written: enqueue, cancel, reschedule or ack. A
*batch* is the part of the rows that is sent next. Invariants of every inbox:

* ``read`` returns rows of committed transactions only. A row is returned after every row whose
  transaction had committed when it was written, and before no row that it was written before in
  the same transaction.
* ``record`` makes the batch durable before it is sent. A row is in the range of exactly one batch,
  apart from batches that repeat parts of the last range.
* Only one taker records batches: ``record`` raises Fenced for any other.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tickwheel.client.sql import SCHEMA
from tickwheel.inbox.schema import FOLDER, in_schema
from tickwheel.limits import Limits
from tickwheel.model.values import members
from tickwheel.upgrades import Upgrade, sql_steps

ROWS_MAX: Final = 1_000
"""Maximum rows of a batch."""
BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes of bodies after which no further row is read."""
ACKS_S: Final = 7 * 86_400.0
"""Seconds for which an inbox remembers which tasks were acknowledged in a transaction."""
SWEEP_S: Final = 60.0
SWEPT_MAX: Final = 100_000
"""Seconds between two removals of older ones, and the maximum number that one removes."""
REFUSED_MAX: Final = 10_000
"""Maximum stored rows that the daemon has refused. Then no row is taken until some are deleted."""


class InboxTrouble(Exception):
    """The database does not answer, or refuses a statement; the taker tries again."""


class Fenced(InboxTrouble):
    """Another taker has recorded a batch."""


def options_of(text: str) -> dict[str, Any]:
    """Return the options of a row from their JSON. Anything but a map becomes an unknown option,
    which the daemon refuses."""
    try:
        options = json.loads(text, object_pairs_hook=members)
    except (ValueError, RecursionError):  # a repeated name, too many digits, or too deep
        options = text[:100]
    return options if isinstance(options, dict) else {"options": options}


class Row(NamedTuple):
    """A command of an application."""

    id: int
    verb: str
    topic: str | None
    body: bytes
    delay_ms: int | None
    due_ms: int | None
    options: dict[str, Any]
    """In the form of the protocol; of other commands: ``id`` or ``key``, and the
    fields of a receipt."""
    at_ms: int
    """When it was written, by the clock of the database."""
    options_text: str = "{}"
    """The options as they are stored. JSON that Python wrote from ``options`` could be invalid."""


@dataclass(slots=True)
class Batch:
    """Rows that are sent together."""

    session: bytes
    """The session in which the batch is sent."""
    number: int
    """The number of the batch in that session."""
    rows: Sequence[Row]
    rest: Sequence[Row] = field(default_factory=list)
    """Rows of the same range that are sent afterwards."""
    offset_ms: int = 0
    """The daemon's clock minus that of the database."""
    shards: int = 1
    """The number of shards for which the batch was made."""
    age_s: float = 0.0
    """Seconds since it was recorded."""


class Inbox(ABC):
    """An inbox in a database. Every method raises InboxTrouble."""

    def __init__(self, label: str) -> None:
        self.label = label
        """The database and the schema for messages, without secrets."""
        self._seq = 0
        """The number of the last record."""
        self._after = 0
        """Rows of the current range up to this id are confirmed."""
        self._buffer: list[Row] = []
        """Rows after ``_after`` that were read."""
        self._recorded: int | None = None
        """The number of rows in the unconfirmed range."""
        self._is_noted = True
        """Whether the last record says that nothing is unconfirmed."""
        self._swept_s = 0.0

    @abstractmethod
    async def open(self, *, dry_run: bool = False) -> Upgrade:
        """Connect, and create the tables or upgrade them in one transaction; ``dry_run``: change
        nothing. Return what was, or would be, upgraded. An upgrade needs the lead."""

    async def _lay_out(
        self, kind: str, layout: int, needed: int, schema: str = SCHEMA, *, dry_run: bool
    ) -> Upgrade:
        """Create the tables if ``layout`` is 0, or upgrade them to the layout ``needed``."""
        if layout > needed:
            raise InboxTrouble(
                f"{self.label}: the layout is {layout}; this version supports {needed}"
            )
        steps = sql_steps(FOLDER, layout, needed, f"{kind}-")
        steps = tuple(in_schema(step, schema) for step in steps)
        if steps and not dry_run and not await self.lead():
            raise InboxTrouble(
                f"{self.label}: layout {layout} cannot be upgraded to {needed} while a taker of an"
                " older release works; stop it"
            )
        if not dry_run and (steps or not layout):
            await self._execute(steps)
        return Upgrade(self.label, layout, needed, steps)

    @abstractmethod
    async def _execute(self, steps: Sequence[str]) -> None:
        """Execute the steps of an upgrade, or create the tables if there are none."""

    @abstractmethod
    async def lead(self) -> bool:
        """Return whether this is now the only taker of the inbox."""

    @abstractmethod
    async def take_over(self) -> Batch | None:
        """Fence off earlier takers, and return the last recorded batch unless all its rows are
        known to have been sent. It counts as recorded."""

    @abstractmethod
    async def clock_ms(self) -> int:
        """Return the time by the clock of the database."""

    @abstractmethod
    async def announce(self, limits: Limits) -> None:
        """Store the daemon's limits, by which rows are checked when they are written."""

    @abstractmethod
    async def read(self) -> Sequence[Row]:
        """Return the next rows that no confirmed batch has, at most ``ROWS_MAX``."""

    async def record(self, batch: Batch, count: int | None = None) -> None:
        """Record a batch of the next ``count`` rows that ``read`` has returned; None: of the rows
        of the last batch, which is not confirmed."""
        if count is None:
            assert self._recorded is not None, "a batch is recorded"
            count = self._recorded
        ids = None if len(batch.rows) == count else [row.id for row in batch.rows]
        rest = [row.id for row in batch.rest] or None
        await self._write(batch, self._buffer[count - 1].id, ids, rest)
        self._recorded, self._is_noted = count, False

    @abstractmethod
    async def _write(
        self, batch: Batch, until: int, ids: list[int] | None, rest: list[int] | None
    ) -> None:
        """Record a batch of the rows up to ``until``: ``ids``, or all. ``rest`` is sent later. A
        batch without rows: all rows up to ``until`` are confirmed. Raise Fenced."""

    def confirm(self) -> None:
        """Note that no row of the recorded batch has to be sent any more."""
        assert self._recorded is not None, "a batch is recorded"
        self._after = self._buffer[self._recorded - 1].id
        del self._buffer[: self._recorded]
        self._recorded = None

    def _resume(self, last: Mapping[str, Any], rows: list[Row], age_s: float) -> Batch:
        """Continue with the batch of the last record, whose range has these rows."""
        ids, rest = set(last["ids"] or ()), set(last["rest"] or ())
        sent = [row for row in rows if not ids or row.id in ids]
        if len(sent) != last["rows"]:
            raise InboxTrouble(
                f"{self.label}: batch {last['seq']} has {len(sent)} of its {last['rows']} rows"
            )
        self._buffer, self._recorded, self._is_noted = rows, len(rows), False
        return Batch(
            last["session"], last["number"], sent, [row for row in rows if row.id in rest],
            last["offset_ms"], last["shards"], age_s,
        )  # fmt: skip

    async def note_idle(self) -> None:
        """Record that no batch is unconfirmed."""
        if not self._is_noted and self._recorded is None:
            await self._write(Batch(b"", 0, ()), self._after, None, None)
            self._is_noted = True

    @abstractmethod
    async def refuse(self, row: Row, code: str, message: str) -> None:
        """Store a row that the daemon has refused, with its error. Repeating this is harmless."""

    @abstractmethod
    async def count_refused(self) -> int:
        """Return how many refused rows are stored."""

    @abstractmethod
    async def tidy(self) -> None:
        """Remove rows of confirmed batches, if this is possible without waiting."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect. Does nothing if it is not connected."""
