"""ACK, NACK, REJECT, EXTEND and RELEASE: how deliveries end.

What the engine knows by its leases is done at once; the rest waits for one read of the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tickwheel.clock import Now
from tickwheel.engine.tasks import Known
from tickwheel.engine.topics import Group, Lease
from tickwheel.model.records import REASON_LENGTH_MAX
from tickwheel.server.shard.shard import Shell
from tickwheel.server.tcp import decode as checks
from tickwheel.server.tcp.connection import Connection

EPOCH_MAX = 2**63 - 1
REASON_CHARACTERS_MAX = 64 * 1024
"""Longer ones are a mistake; up to here they are cut to what is kept."""

Settle = Callable[[Lease, Sequence[Any]], str]


class Settling:
    """What consumers send about deliveries."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._core = shell.core
        self._settlement = shell.engine.settlement
        self._control = shell.engine.control

    # --- ack -----------------------------------------------------------------------------------

    def ack(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        """Finish tasks; nil when all are finished by an ack, else a word for each."""
        checks.arity(frame, 5, "topic, group, epoch, ids, attempts")
        request, topic, group_name, epoch = frame[1:5]
        ids, attempts = self._receipts(epoch, frame[5], frame[6])
        checks.request_number(request)
        group = self._group(topic, group_name)
        if group is None:
            unresolved: Sequence[int] = range(len(ids))
        else:
            unresolved = self._shell.act().settlement.ack(group, epoch, ids, attempts)
        if not unresolved:
            peer.ok(request, None)
            return
        words = ["acked"] * len(ids)

        asked = [ids[index] for index in unresolved]

        def rest(some: range, known: Mapping[int, Known]) -> None:
            self._shell.act()
            for place in some:
                index, task_id = unresolved[place], asked[place]
                # An id that is named twice may have ended by its first mention.
                ended = self._core.endings.get(task_id) is not None
                found = None if ended else known.get(task_id)
                words[index] = self._ack_one(group, epoch, task_id, attempts[index], found)

        def done() -> None:
            fine = all(word in ("acked", "done") for word in words)
            peer.ok(request, None if fine else words)

        self._shell.commands.put(peer, request, asked, rest, done)

    def _ack_one(
        self, group: Group | None, epoch: int, task_id: int, attempt: int, known: Known | None
    ) -> str:
        if known is None:
            word = self._control.absent(task_id)
            return "done" if word == "acked" else word
        if group is None:
            return "stale"
        if group.name in known.dead:
            return "dead"
        return self._settlement.ack_idle(group, epoch, task_id, attempt, known)

    # --- nack and reject -----------------------------------------------------------------------

    def nack(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        delay_ms_max = self._shell.limits.delay_ms_max

        def check(item: Sequence[Any], field: str) -> None:
            if item[3] is not None:
                checks.integer(item[3], f"{field}.delay_ms", 0, delay_ms_max)

        self._end_each(
            peer,
            frame,
            "[id, epoch, attempt, delay_ms, reason]",
            5,
            check,
            lambda lease, item: self._settlement.nack(lease, item[3], item[4], now.now_ms),
        )

    def reject(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        def bury(lease: Lease, item: Sequence[Any]) -> str:
            self._settlement.reject(lease, item[3], now.now_ms)
            return "dead"

        shape = "[id, epoch, attempt, reason]"
        self._end_each(peer, frame, shape, 4, lambda item, field: None, bury)

    def _end_each(
        self,
        peer: Connection,
        frame: tuple[Any, ...],
        shape: str,
        fields: int,
        check: Callable[[Sequence[Any], str], None],
        settle: Settle,
    ) -> None:
        """Checks every item before it touches the first one."""
        checks.arity(frame, 3, "topic, group, items")
        request, topic, group_name, items = frame[1:]
        checks.request_number(request)
        group = self._group(topic, group_name)
        checks.sequence(items, "items", self._shell.limits.ids_per_frame_max)
        for index, item in enumerate(items):
            field = f"items[{index}]"
            if type(item) is not tuple or len(item) != fields:
                checks.wrong(field, shape, item)
            self._check_receipt(item, field)
            if item[-1] is not None:
                checks.text(item[-1], f"{field}.reason", REASON_CHARACTERS_MAX)
            check(item, field)
        receipts = [(item[0], item[1], item[2]) for item in items]
        self._settle(peer, request, group, receipts, lambda lease, i: settle(lease, items[i]), None)

    @staticmethod
    def _check_receipt(item: Sequence[Any], field: str) -> None:
        for value, name in zip(item[:3], ("id", "epoch", "attempt"), strict=True):
            checks.integer(value, f"{field}.{name}", 0, EPOCH_MAX)

    # --- extend and release --------------------------------------------------------------------

    def extend(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 6, "topic, group, epoch, ids, attempts, lease_ms")
        request, topic, group_name, epoch = frame[1:5]
        checks.request_number(request)
        ids, attempts = self._receipts(epoch, frame[5], frame[6])
        limits = self._shell.limits
        lease_ms = checks.integer(frame[7], "lease_ms", limits.lease_ms_min, limits.lease_ms_max)

        def prolong(lease: Lease, index: int) -> str:
            self._settlement.extend(lease, lease_ms, now.mono_ms)
            return "extended"

        receipts = [(i, epoch, a) for i, a in zip(ids, attempts, strict=True)]
        group = self._group(topic, group_name)
        self._settle(peer, request, group, receipts, prolong, "extended")

    def release(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 5, "topic, group, epoch, ids, attempts")
        request, topic, group_name, epoch = frame[1:5]
        checks.request_number(request)
        ids, attempts = self._receipts(epoch, frame[5], frame[6])

        def give_back(lease: Lease, index: int) -> str:
            self._settlement.release(lease, now.now_ms)
            return "released"

        # Last first: each goes to the front of the line, so the first is first again.
        receipts = [(i, epoch, a) for i, a in zip(ids, attempts, strict=True)]
        group = self._group(topic, group_name)
        self._settle(peer, request, group, receipts, give_back, "released", backwards=True)

    # --- what they share -----------------------------------------------------------------------

    def _settle(
        self,
        peer: Connection,
        request: int,
        group: Group | None,
        receipts: Sequence[tuple[int, int, int]],
        act: Callable[[Lease, int], str],
        usual: str | None,
        *,
        backwards: bool = False,
    ) -> None:
        """Act on current receipts; say of the others what became of their tasks.

        The answer is nil when every word is the ``usual`` one.
        """
        words: list[str] = [""] * len(receipts)
        unresolved: list[int] = []
        order = range(len(receipts))
        self._shell.act()
        for index in reversed(order) if backwards else order:
            task_id, epoch, attempt = receipts[index]
            lease = None
            if group is not None:
                lease = self._settlement.current(group, task_id, epoch, attempt)
            if lease is None:
                unresolved.append(index)
            else:
                words[index] = act(lease, index)

        asked = [receipts[index][0] for index in unresolved]

        def rest(some: range, known: Mapping[int, Known]) -> None:
            for place in some:
                task_id = asked[place]
                word = "stale" if task_id in known else self._control.absent(task_id)
                words[unresolved[place]] = word

        def answer() -> None:
            fine = usual is not None and all(word == usual for word in words)
            peer.ok(request, None if fine else words)

        if unresolved:
            self._shell.commands.put(peer, request, asked, rest, answer)
        else:
            answer()

    def _receipts(
        self, epoch: object, ids: object, attempts: object
    ) -> tuple[Sequence[int], Sequence[int]]:
        checks.integer(epoch, "epoch", 0, EPOCH_MAX)
        checked = checks.task_ids(ids, self._shell.limits)
        return checked, checks.numbers(attempts, "attempts", len(checked))

    def _group(self, topic: object, group: object) -> Group | None:
        topic_name = checks.name(topic, "topic")
        return self._core.find_group(topic_name, checks.group_name(group))


assert REASON_LENGTH_MAX < REASON_CHARACTERS_MAX
