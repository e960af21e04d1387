"""A transaction of a producer.

This module uses no sockets. Invariant: a transaction with a half task of unknown state cannot be
committed, because it is not known what would be committed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, Unpack

from tickwheel.api.frames import CountFrom, FrameType
from tickwheel.api.tasks import due_of
from tickwheel.api.times import Duration
from tickwheel.client.keywords import TaskKeywords
from tickwheel.client.requests import read
from tickwheel.client.task_options import Task
from tickwheel.client.tasks import Receipt, WireTask, frame_slices, spelled_out, task_of
from tickwheel.errors import (
    BadRequest,
    Conflict,
    TickwheelError,
    TransactionCommitted,
    TransactionRolledBack,
    UnknownTransaction,
    shown,
)
from tickwheel.model.policies import ADD

if TYPE_CHECKING:
    from tickwheel.client.checks import Checks
    from tickwheel.client.link import Link, Verbs

COUNTED_FROM = ("enqueue", "commit")


class Transaction:
    """``async with client.transaction("payments") as tx: await tx.enqueue(…)``

    The half tasks become tasks at the commit: at the end of the ``async with``, or by ``commit``.
    After an exception or ``rollback`` they are discarded. ``id`` is the transaction's name: store
    it with your own transaction, so that the check handler can look it up.
    """

    def __init__(
        self, client: Verbs, checks: Checks, group: str, name: str | None, count_from: CountFrom
    ) -> None:
        if count_from not in COUNTED_FROM:
            raise BadRequest(
                f"count_from must be one of {', '.join(COUNTED_FROM)}, not {shown(count_from)}"
            )
        self.group = client._checker.name(group, "group")
        self.id = os.urandom(16).hex() if name is None else client._checker.name(name, "id")
        self.receipts: list[Receipt] = []
        """The receipts of its tasks in order, once it is committed."""
        self._client = client
        self._checks = checks
        self._from_commit = count_from == "commit"
        self._parts = 0
        self._prepared: dict[int, tuple[list[WireTask], int]] = {}
        """Part → its tasks, and when the daemon stored them."""
        self._doubt: BaseException | None = None
        """The error after which it is unknown whether a half task was stored."""
        self._storing: set[asyncio.Future[None]] = set()
        """Each completes at the end of a request under way that stores half tasks."""
        self._outcome = ""
        self._link_and_claim: tuple[Link, int] | None = None
        """With several shards: the link to the shard of its tasks, once chosen, and the number of
        the claim of its name."""

    # --- half tasks -----------------------------------------------------------------------------

    @spelled_out(TaskKeywords)
    async def enqueue(
        self,
        topic: str,
        body: bytes,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        timeout: Duration | None = None,
        **options: Unpack[TaskKeywords],
    ) -> None:
        """Store a half task durably, invisible until the commit. Arguments and errors are those of
        ``Client.enqueue``; ``if_pending`` is refused. The delay counts from now or from the commit
        (``count_from``); a task that is due before the commit is due at the commit."""
        task = task_of("Transaction.enqueue", topic, body, delay, at, options)
        await self.enqueue_many((task,), timeout=timeout)

    async def enqueue_many(self, tasks: Iterable[Task], *, timeout: Duration | None = None) -> None:
        """Store half tasks, in as few frames as possible. Checks all before sending any."""
        self._check_open()
        client = self._client
        until_s = client._until(timeout)
        wires, sizes = client._checker.check_all(tasks)
        _refuse_rules(wires)
        shards = await client._know_shards(until_s)
        if shards is not None:
            last = self._link_and_claim
            self._link_and_claim = await shards.link_of_transaction(last, self.id, wires, until_s)
        limits = client._reconnector.limits
        parts = []
        for start, end in frame_slices(sizes, limits, limits.tasks_per_frame_max):
            self._parts += 1
            parts.append((self._parts, wires[start:end]))
        for part, part_wires in parts:
            await self._prepare(part, part_wires, until_s)

    async def _prepare(self, part: int, wires: list[WireTask], until_s: float | None) -> None:
        options: dict[str, Any] | None = {"from": "commit"} if self._from_commit else None
        if self._link_and_claim is not None and self._link_and_claim[1]:
            options = {**(options or {}), "claim": self._link_and_claim[1]}
        fields = (self.id, self.group, part, wires, options)
        self._check_open()  # another task may have ended it
        self._storing.add(ended := asyncio.get_running_loop().create_future())
        try:
            answer = await self._call(FrameType.PREPARE, *fields, until_s=until_s)
        except BaseException as error:
            if not isinstance(error, TickwheelError) or not _is_refusal(error):
                self._doubt = error
            raise
        finally:
            self._storing.discard(ended)
            ended.set_result(None)
        self._prepared[part] = (wires, read(lambda raw: int(raw[0]), answer))

    # --- the end --------------------------------------------------------------------------------

    async def commit(self, *, timeout: Duration | None = None) -> list[Receipt]:
        """Commit: the half tasks become tasks. Return their receipts. Can be repeated.

        Raise TransactionRolledBack if another client has rolled it back, Conflict if an enqueue is
        under way or failed without an answer, and SendTimeout or ConnectionLost if the outcome is
        unknown: call it again, or leave the decision to the check handler."""
        if self._outcome == "rolled back":
            raise TransactionRolledBack(f"transaction {self.id} was rolled back")
        if self._storing:
            raise Conflict(
                f"transaction {self.id} cannot be committed while one of its enqueues is under way:"
                " wait for it"
            )
        if self._doubt is not None:
            raise Conflict(
                f"transaction {self.id} cannot be committed: one of its tasks may not have been"
                f" stored ({self._doubt}); roll it back"
            )
        until_s = self._client._until(timeout)
        if self._prepared and self._outcome != "committed":
            answer = await self._call(FrameType.COMMIT, self.id, until_s=until_s)
            self.receipts = read(self._receipts_of, answer)
        self._end("committed")
        return self.receipts

    async def rollback(self, *, timeout: Duration | None = None) -> None:
        """Roll back: discard the half tasks. Can be repeated. Raise TransactionCommitted if
        another client has committed it."""
        if self._outcome == "committed":
            raise TransactionCommitted(f"transaction {self.id} was committed")
        until_s = self._client._until(timeout)
        while self._outcome != "rolled back" and self._may_exist:
            storing = list(self._storing)
            try:
                await self._call(FrameType.ROLLBACK, self.id, until_s=until_s)
                break
            except UnknownTransaction:
                if not storing:
                    if self._prepared:
                        raise
                    break  # the half tasks in doubt were not stored
            # The first half task was refused for the moment, and its request will be repeated.
            left_s = None if until_s is None else until_s - asyncio.get_running_loop().time()
            await asyncio.wait(storing, timeout=left_s)
        self._end("rolled back")

    @property
    def _may_exist(self) -> bool:
        return bool(self._prepared or self._storing) or self._doubt is not None

    async def _call(self, kind: FrameType, *fields: Any, until_s: float | None) -> Any:
        self._client._ready()
        link = self._client._link if self._link_and_claim is None else self._link_and_claim[0]
        return await link.ask(kind, *fields, until_s=until_s)

    def _end(self, outcome: str) -> None:
        self._outcome = outcome
        self._checks.open.pop(self.id, None)

    def _check_open(self) -> None:
        if self._outcome:
            kind = TransactionCommitted if self._outcome == "committed" else TransactionRolledBack
            raise kind(f"transaction {self.id} was {self._outcome}; it accepts no more tasks")

    def _receipts_of(self, answer: Any) -> list[Receipt]:
        accepted_ms, ids = answer[:2]
        dues_ms = answer[2]["dues_ms"] if len(answer) > 2 else self._dues(accepted_ms)
        return [Receipt(i, due_ms) for i, due_ms in zip(ids, dues_ms, strict=True)]

    def _dues(self, committed_ms: int) -> list[int]:
        """Return the tasks' due times, which the answer to a repeated commit does not contain."""
        levels_ms, dues_ms = self._client._reconnector.delay_levels_ms, list[int]()
        for part in sorted(self._prepared):
            wires, prepared_ms = self._prepared[part]
            since_ms = committed_ms if self._from_commit else prepared_ms
            dues_ms += [max(committed_ms, due_of(wire, since_ms, levels_ms)) for wire in wires]
        return dues_ms

    async def __aenter__(self) -> Self:
        self._client._ready()
        self._checks.open[self.id] = None
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._outcome:
                return
            doubt = "its enqueue is under way" if self._storing else self._doubt
            if error is None and doubt is None:
                await self.commit()
                return
            with suppress(TickwheelError):  # the check handler will roll it back
                await self.rollback()
            if error is None:
                raise Conflict(
                    f"transaction {self.id} was rolled back: one of its tasks may not have been"
                    f" stored ({doubt})"
                )
        finally:
            self._checks.open.pop(self.id, None)


def _is_refusal(error: TickwheelError) -> bool:
    """Return whether the error means that nothing was stored."""
    return error.code not in ("send_timeout", "connection_lost", "outcome_unknown", "internal",
                              "client_closed", "protocol_error")  # fmt: skip


def _refuse_rules(wires: Iterable[WireTask]) -> None:
    for index, wire in enumerate(wires):
        rule = wire[3].get("if_pending") if len(wire) == 4 else None
        if rule is not None and rule != ADD:
            raise BadRequest(
                f"tasks[{index}].if_pending is not allowed in a transaction, because pending tasks"
                " may change before the commit; enqueue the task without a transaction"
            )
