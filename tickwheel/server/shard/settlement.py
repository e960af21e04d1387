"""Operations that settle deliveries: ack, nack, reject, snooze, extend and release.

Receipts with a current lease are settled at once. The other receipts wait for one read of the
store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tickwheel.model.records import REASON_LENGTH_MAX
from tickwheel.server import checks

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.engine.engine import Engine
    from tickwheel.engine.topics import Group, Lease
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.parts import Parts

EPOCH_MAX = 2**63 - 1
REASON_CHARACTERS_MAX = 64 * 1024
"""Maximum characters of a reason. It is cut to ``REASON_LENGTH_MAX``."""

Receipts = Sequence[tuple[int, int, int]]
"""(id, epoch, attempt) of each settled delivery."""
Settle = Callable[["Lease", Sequence[Any]], str]


class Settling:
    """The operations that settle deliveries. The answer is None if all receipts had the usual
    outcome, otherwise a word for each receipt, in order."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._core = parts.core
        self._settlement = parts.engine.settlement
        self._control = parts.engine.control

    # --- ack -----------------------------------------------------------------------------------

    def ack(
        self,
        caller: Caller,
        request: int,
        topic: object,
        group: object,
        epoch: int,
        ids: Sequence[int],
        attempts: Sequence[int],
        *,
        may_gather: bool = False,
    ) -> None:
        """Finish tasks. ``may_gather`` means that the caller does not wait for the answer. Raise
        BadRequest, LimitExceeded, Overloaded."""
        self._check_receipts(epoch, ids, attempts)
        group_or_none = self._group(topic, group)
        if group_or_none is None:
            unresolved: Sequence[int] = range(len(ids))
        else:
            settlement = self._parts.border.act().settlement
            unresolved = settlement.ack(group_or_none, epoch, ids, attempts)
        if not unresolved:
            committer = self._parts.committer
            if may_gather:
                committer.gather(caller.replies, request)
            else:
                committer.reply(caller.replies, request, None)
            return
        words = ["acked"] * len(ids)
        unresolved_ids = [ids[index] for index in unresolved]

        def settle_rest(indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> None:
            engine = self._parts.border.act()
            for position in indexes:
                index, task_id = unresolved[position], unresolved_ids[position]
                # If an id is named twice, its first receipt may have ended the task.
                ended = self._core.outcomes.get(task_id) is not None
                task = None if ended else snapshots.get(task_id)
                attempt = attempts[index]
                words[index] = ack_by_record(engine, group_or_none, epoch, task_id, attempt, task)

        def done() -> None:
            are_usual = all(word in ("acked", "done") for word in words)
            self._parts.committer.reply(caller.replies, request, None if are_usual else words)

        self._parts.commands.put(
            caller, partial(caller.refuse, request), unresolved_ids, settle_rest, done
        )

    # --- nack and reject -----------------------------------------------------------------------

    def nack(
        self, caller: Caller, request: int, topic: object, group: object, items: object, now: Now
    ) -> None:
        """Record failed attempts. ``items`` are ``(id, epoch, attempt, delay_ms or None, reason or
        None)``. Raise BadRequest, LimitExceeded, Overloaded."""

        def settle(lease: Lease, item: Sequence[Any]) -> str:
            return self._settlement.nack(lease, item[3], item[4], now.now_ms)

        self._end_each(caller, request, topic, group, items, ("delay_ms", "reason"), settle)

    def reject(
        self, caller: Caller, request: int, topic: object, group: object, items: object, now: Now
    ) -> None:
        """Give up on tasks that will never succeed. ``items`` are ``(id, epoch, attempt, reason or
        None)``. Raise BadRequest, LimitExceeded, Overloaded."""

        def settle(lease: Lease, item: Sequence[Any]) -> str:
            return self._settlement.reject(lease, item[3], now.now_ms)

        self._end_each(caller, request, topic, group, items, ("reason",), settle)

    def snooze(
        self, caller: Caller, request: int, topic: object, group: object, items: object, now: Now
    ) -> None:
        """Postpone tasks without a failure. ``items`` are ``(id, epoch, attempt, delay_ms)``. Raise
        BadRequest, LimitExceeded, Overloaded."""

        def settle(lease: Lease, item: Sequence[Any]) -> str:
            return self._settlement.snooze(lease, item[3], now.now_ms)

        self._end_each(caller, request, topic, group, items, ("delay_ms",), settle)

    def _end_each(
        self,
        caller: Caller,
        request: int,
        topic: object,
        group_name: object,
        items: object,
        fields: tuple[str, ...],
        settle: Settle,
    ) -> None:
        """Check all items, each a receipt followed by ``fields``, then settle them."""
        group, names = self._group(topic, group_name), ("id", "epoch", "attempt", *fields)
        checked = checks.array(items, "items", self._parts.limits.ids_per_frame_max)
        for index, item in enumerate(checked):
            field = f"items[{index}]"
            if type(item) is not tuple or len(item) != len(names):
                checks.wrong(field, f"[{', '.join(names)}]", item)
            for value, name in zip(item[:3], names[:3], strict=True):
                checks.integer(value, f"{field}.{name}", 0, EPOCH_MAX)
            if "reason" in fields and item[-1] is not None:
                checks.text(item[-1], f"{field}.reason", REASON_CHARACTERS_MAX)
            # In an item with a reason, the delay can be None, so that the retry policy determines
            # it.
            if "delay_ms" in fields and not ("reason" in fields and item[3] is None):
                checks.integer(item[3], f"{field}.delay_ms", 0, self._parts.limits.delay_ms_max)
        receipts = [(item[0], item[1], item[2]) for item in checked]

        def act(lease: Lease, index: int) -> str:
            return settle(lease, checked[index])

        self._settle(caller, request, group, receipts, act, None)

    # --- extend and release --------------------------------------------------------------------

    def extend(
        self,
        caller: Caller,
        request: int,
        topic: object,
        group: object,
        epoch: int,
        ids: Sequence[int],
        attempts: Sequence[int],
        lease_ms: int,
        now: Now,
    ) -> None:
        """Extend leases to ``lease_ms`` from now. Raise BadRequest, LimitExceeded, Overloaded."""
        self._check_receipts(epoch, ids, attempts)
        checks.lease(lease_ms, self._parts.limits)

        receipts = [(i, epoch, a) for i, a in zip(ids, attempts, strict=True)]
        group_or_none = self._group(topic, group)
        mine = (s for s in caller.subscribers.values() if s.group is group_or_none)
        subscriber = next(mine, None)

        def extend_lease(lease: Lease, index: int) -> str:
            self._settlement.extend(lease, lease_ms, now.mono_ms, subscriber)
            return "extended"

        self._settle(caller, request, group_or_none, receipts, extend_lease, "extended")

    def release(
        self,
        caller: Caller,
        request: int,
        topic: object,
        group: object,
        epoch: int,
        ids: Sequence[int],
        attempts: Sequence[int],
        now: Now,
    ) -> None:
        """Return tasks that were not started, without a failure. Raise BadRequest, LimitExceeded,
        Overloaded."""
        self._check_receipts(epoch, ids, attempts)

        def release_lease(lease: Lease, index: int) -> str:
            return self._settlement.release(lease, now.now_ms)

        # Each task goes to the front of the queue, so the last one is released first.
        receipts = [(i, epoch, a) for i, a in zip(ids, attempts, strict=True)]
        group_or_none = self._group(topic, group)
        self._settle(
            caller, request, group_or_none, receipts, release_lease, "released", backwards=True
        )

    # --- shared --------------------------------------------------------------------------------

    def _settle(
        self,
        caller: Caller,
        request: int,
        group: Group | None,
        receipts: Receipts,
        act: Callable[[Lease, int], str],
        usual: str | None,
        *,
        backwards: bool = False,
    ) -> None:
        """Call ``act`` for current receipts. For others, answer with the states of their tasks."""
        words: list[str] = [""] * len(receipts)
        unresolved: list[int] = []
        order = range(len(receipts))
        self._parts.border.act()
        for index in reversed(order) if backwards else order:
            task_id, epoch, attempt = receipts[index]
            lease = None
            if group is not None:
                lease = self._settlement.current(group, task_id, epoch, attempt)
            if lease is None:
                unresolved.append(index)
            else:
                words[index] = act(lease, index)
        unresolved_ids = [receipts[index][0] for index in unresolved]

        def settle_rest(indexes: range, snapshots: Mapping[int, TaskSnapshot]) -> None:
            for position in indexes:
                task_id = unresolved_ids[position]
                word = "stale" if task_id in snapshots else self._control.absent(task_id)
                words[unresolved[position]] = word

        def done() -> None:
            are_usual = usual is not None and all(word == usual for word in words)
            self._parts.committer.reply(caller.replies, request, None if are_usual else words)

        if unresolved:
            self._parts.commands.put(
                caller, partial(caller.refuse, request), unresolved_ids, settle_rest, done
            )
        else:
            done()

    def _check_receipts(self, epoch: object, ids: object, attempts: object) -> None:
        checks.integer(epoch, "epoch", 0, EPOCH_MAX)
        checked = checks.task_ids(ids, "ids", self._parts.limits)
        checks.numbers(attempts, "attempts", len(checked))

    def _group(self, topic: object, group: object) -> Group | None:
        topic_name = checks.name(topic, "topic")
        return self._core.find_group(topic_name, checks.group_name(group))


def ack_by_record(
    engine: Engine,
    group: Group | None,
    epoch: int,
    task_id: int,
    attempt: int,
    task: TaskSnapshot | None,
) -> str:
    """Ack a task that has no lease, and return the word for the answer. The task's records
    determine whether an earlier receipt finishes it."""
    if task is None:
        word = engine.control.absent(task_id)
        return "done" if word == "acked" else word
    if group is None:
        return "stale"
    if group.name in task.dead:
        return "dead"
    return engine.settlement.ack_idle(group, epoch, task_id, attempt, task)


assert REASON_LENGTH_MAX < REASON_CHARACTERS_MAX
