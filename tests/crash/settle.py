"""How a consumer of the torture ends deliveries, and what it writes down about the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from crash.link import Link, Lost, Numbers, now_ms
from crash.plan import Plan
from crash.records import Finished, Journal, Retry
from tickwheel.api.frames import FrameType
from tickwheel.protocol import Frame

RETRYABLE = {"draining", "overloaded", "refused", "store_full"}
LEGAL = {"acked", "done", "stale", "cancelled", "dead", "retrying", "released", "extended"}
"""Words about a genuine receipt; ``gone`` and ``unknown`` would mean that a task was lost."""

ACKS_PER_FRAME = 1_000
"""Fewer than a frame may have: a consumer that was long away has very many."""


class Receipt(NamedTuple):
    """What a delivery is ended with."""

    topic: str
    group: str
    id: int
    epoch: int
    attempt: int

    @property
    def place(self) -> tuple[str, str, int]:
        return self.topic, self.group, self.epoch


class Settler:
    """Acks, nacks and rejects with a memory for those whose answer was lost."""

    def __init__(self, plan: Plan, journal: Journal, also_legal: Iterable[str] = ()) -> None:
        """`also_legal` are further statuses that are not losses."""
        self._legal = LEGAL.union(also_legal)
        self._plan = plan
        self._journal = journal
        self.unconfirmed: list[Receipt] = []
        """Acks that were sent and not answered: the daemon may have them or not."""
        self._sent_before: set[Receipt] = set()
        """Every ack that has been without an answer: when it is sent again, it is not the first."""

    async def ack(self, link: Link, receipts: Sequence[Receipt]) -> None:
        """All at once, pipelined. Raises Lost; what was not answered is then unconfirmed."""
        sent = []
        for place, group in groupby(sorted(receipts), key=lambda r: r.place):
            while some := list(islice(group, ACKS_PER_FRAME)):
                fields = (*place, [r.id for r in some], [r.attempt for r in some])
                answer = link.send(FrameType.ACK, *fields)
                sent.append((some, link.numbers.last, answer))
        lost: Lost | None = None
        for some, number, answer in sent:
            try:
                frame = await link.wait(answer)
                self._words(link, some, frame, link.orders[number])
            except Lost as error:
                self.unconfirmed += some
                self._sent_before.update(some)
                lost = error
        if lost is not None:
            raise lost

    async def end(
        self, link: Link, kind: FrameType, receipt: Receipt, delay_ms: int | None = None
    ) -> None:
        """NACK or REJECT one delivery."""
        item = [receipt.id, receipt.epoch, receipt.attempt]
        item += [delay_ms, "not now"] if kind == FrameType.NACK else ["never"]  # type: ignore[list-item]  # a mixed frame
        sent_ms = now_ms()
        frame = await link.call(kind, receipt.topic, receipt.group, [item])
        if not self._fine(frame):
            return
        (word,), order = frame[2], link.orders[frame[1]]
        if word == "retrying":
            self._journal.retries.append(
                Retry(
                    receipt.id,
                    receipt.group,
                    self._plan.clocks.low(sent_ms, now_ms()) + (delay_ms or 0),
                    link.epoch,
                    now_ms(),
                    link.name,
                    order,
                )
            )
        elif word == "dead":
            self._finished(receipt, "dead", link.epoch, link.name, order)
        elif word not in self._legal:
            self._journal.odd.append(f"{kind.name} of {receipt} answered {word!r}")

    async def settle_rest(self) -> None:
        """Ask again about every ack that was not answered, until all are."""
        while self.unconfirmed:
            shard = self._plan.shard_of_id(self.unconfirmed[0].id)
            link = await self._plan.link(Numbers(), shard)
            again = [task for task in self.unconfirmed if self._plan.shard_of_id(task.id) == shard]
            others = [task for task in self.unconfirmed if self._plan.shard_of_id(task.id) != shard]
            self.unconfirmed = others
            self._sent_before.update(again)
            try:
                await self.ack(link, again)
            except Lost:
                continue
            finally:
                link.abort()

    def word(self, receipt: Receipt, word: str, epoch: int, connection: int, order: int) -> None:
        """Write down how an ack was answered. When one that was sent before finds the task ended by
        the deletion of another group, the first may have counted."""
        may_have_counted = word == "deleted" and receipt in self._sent_before
        if word in ("acked", "done") or may_have_counted:
            self._finished(receipt, "acked", epoch, connection, order)
        elif word in self._legal:
            self._journal.vain.append((receipt, word))
        else:
            self._journal.odd.append(f"ack of {receipt} answered {word!r}")

    def _words(self, link: Link, receipts: Sequence[Receipt], frame: Frame, order: int) -> None:
        if not self._fine(frame):
            self.unconfirmed += receipts
            return
        words = frame[2] if frame[2] is not None else ["acked"] * len(receipts)
        for receipt, word in zip(receipts, words, strict=True):
            self.word(receipt, word, link.epoch, link.name, order)

    def _fine(self, frame: Frame) -> bool:
        if frame[0] == FrameType.OK:
            return True
        if frame[2] not in RETRYABLE:
            self._journal.odd.append(f"a consumer was answered {frame}")
        return False

    def _finished(
        self, receipt: Receipt, how: str, epoch: int, connection: int, order: int
    ) -> None:
        self._journal.finished.append(
            Finished(receipt.id, receipt.group, how, epoch, now_ms(), connection, order)
        )
