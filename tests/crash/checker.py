"""The judge of a torture run: reads the clients' records and nothing else.

What "after a confirmation" means, soundly, with frames of several connections in flight: a
delivery was written after a confirmation was written if one of these holds.

* Both came on one connection, the delivery later.
* The delivery carries a higher epoch than the daemon that confirmed: that daemon was dead
  before the delivery's daemon began.
* The daemon stamped the delivery (before it decided on it) later than the moment at which the
  client had the confirmation in hand; both clocks are the same machine's.

Deliveries that were merely on their way when the confirmation came satisfy none of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from crash.records import Accepted, Delivered, Finished, Journal, Moved, Retry

SHOWN_MAX = 20
Key = tuple[int, str]


@dataclass(slots=True)
class Verdict:
    """What was found; a run is good when ``violations`` is empty."""

    violations: list[str] = field(default_factory=list)
    tasks: int = 0
    refused: int = 0
    deliveries: int = 0
    duplicates: int = 0
    """Deliveries of a task to a group beyond the first: allowed, and worth knowing."""
    resent: int = 0
    acked: int = 0
    cancelled: int = 0

    def text(self) -> str:
        lines = [
            f"tasks {self.tasks}, refused {self.refused}, requests resent {self.resent},"
            f" deliveries {self.deliveries} ({self.duplicates} of them repeated),"
            f" acked {self.acked}, cancelled {self.cancelled},"
            f" violations {len(self.violations)}"
        ]
        lines += [f"VIOLATION {text}" for text in self.violations[:SHOWN_MAX]]
        if len(self.violations) > SHOWN_MAX:
            lines.append(f"… and {len(self.violations) - SHOWN_MAX} more")
        return "\n".join(lines)


def check(journals: Sequence[Journal], groups: Mapping[str, Sequence[str]]) -> Verdict:
    """``groups`` says which groups of a topic must get its tasks."""
    return _Check(journals, groups).run()


def is_after(confirmed: Finished | Retry, delivery: Delivered) -> bool:
    """Whether ``delivery`` was certainly written after ``confirmed`` was: see the module."""
    if delivery.connection == confirmed.connection >= 0 and delivery.order > confirmed.order:
        return True
    return delivery.epoch > confirmed.epoch or delivery.delivered_ms > confirmed.got_ms


class _Check:
    def __init__(self, journals: Sequence[Journal], groups: Mapping[str, Sequence[str]]) -> None:
        self._journals = journals
        self._groups = groups
        self._verdict = Verdict()
        self._wrong = self._verdict.violations
        self._tasks: dict[int, tuple[str, str, int]] = {}
        """id → (topic, token, due_ms) of every acknowledged task."""
        self._id_of: dict[str, int] = {}
        self._deliveries: dict[Key, list[Delivered]] = defaultdict(list)
        self._ends: dict[Key, list[Finished]] = defaultdict(list)
        self._cancels: dict[int, list[Finished]] = defaultdict(list)
        self._moves: dict[int, list[Moved]] = defaultdict(list)
        self._requeued: dict[Key, int] = {}

    def run(self) -> Verdict:
        for journal in self._journals:
            self._read(journal)
        self._one_id_for_a_request()
        self._nothing_refused_comes()
        for key, deliveries in self._deliveries.items():
            for delivery in deliveries:
                self._not_early(delivery)
                self._not_after_its_end(key, delivery)
        for journal in self._journals:
            for retry in journal.retries:
                self._delay_of_nack_kept(retry)
        self._none_lost()
        self._count()
        return self._verdict

    def _read(self, journal: Journal) -> None:
        self._wrong += [f"{journal.client}: {text}" for text in journal.odd]
        self._verdict.resent += journal.resent
        for accepted in journal.accepted:
            self._accept(journal.client, accepted)
        for delivery in journal.delivered:
            self._deliveries[delivery.id, delivery.group].append(delivery)
        for end in journal.finished:
            if end.group is None:
                self._cancels[end.id].append(end)
            else:
                self._ends[end.id, end.group].append(end)
        for move in journal.moved:
            self._moves[move.id].append(move)
        for again in journal.requeued:
            key = again.id, again.group
            self._requeued[key] = min(again.sent_ms, self._requeued.get(key, again.sent_ms))

    def _accept(self, client: str, accepted: Accepted) -> None:
        if len(accepted.ids) != len(accepted.tokens):
            self._wrong.append(f"{client}: {len(accepted.tokens)} tasks got {accepted.ids}")
            return
        for token, task_id, due_ms in zip(
            accepted.tokens, accepted.ids, accepted.dues_ms, strict=True
        ):
            fresh = (accepted.topic, token, due_ms)
            if self._id_of.setdefault(token, task_id) != task_id:
                self._wrong.append(
                    f"duplicate: {token} was answered with id {self._id_of[token]} and {task_id}"
                )
            if self._tasks.setdefault(task_id, fresh) != fresh:
                self._wrong.append(
                    f"duplicate: id {task_id} was given as {self._tasks[task_id]} and {fresh}"
                )

    def _one_id_for_a_request(self) -> None:
        found: dict[str, set[int]] = defaultdict(set)
        for deliveries in self._deliveries.values():
            for delivery in deliveries:
                found[delivery.token].add(delivery.id)
        for token, task_id in self._id_of.items():
            found[token].add(task_id)
        self._wrong += [
            f"duplicate: {token} is several tasks: {sorted(ids)}"
            for token, ids in found.items()
            if len(ids) > 1
        ]

    def _nothing_refused_comes(self) -> None:
        came = {d.token for ds in self._deliveries.values() for d in ds} | self._id_of.keys()
        for journal in self._journals:
            for refused in journal.refused:
                self._verdict.refused += len(refused.tokens)
                self._wrong += [
                    f"{journal.client}: {token} was refused ({refused.code}) and is there"
                    for token in refused.tokens
                    if token in came
                ]

    def _not_early(self, delivery: Delivered) -> None:
        shown = f"{delivery.token} (id {delivery.id}, group {delivery.group})"
        if min(delivery.delivered_ms, delivery.got_ms) < delivery.due_ms:
            self._wrong.append(f"early: {shown}: {delivery}")
        task = self._tasks.get(delivery.id)
        if task is None:
            return  # its answer was lost and its client gave up: nobody was promised anything
        moves = self._moves[delivery.id]
        allowed = [task[2], *(move.due_ms for move in moves)]
        # One that arrived after its own due time counted from its arrival.
        late = any(m.got_ms is None and m.due_ms <= delivery.due_ms for m in moves)
        if delivery.due_ms not in allowed and not late:
            self._wrong.append(f"due: {shown} came with a due time it never had: {delivery}")
        settled = [
            index
            for index, move in enumerate(moves, 1)
            if move.got_ms is not None and move.got_ms < delivery.delivered_ms
        ]
        since = settled[-1] if settled else 0
        if delivery.delivered_ms < min(allowed[since:]):
            self._wrong.append(f"early: {shown}, due {allowed} (rescheduled): {delivery}")

    def _not_after_its_end(self, key: Key, delivery: Delivered) -> None:
        for end in (*self._ends[key], *self._cancels[key[0]]):
            if not is_after(end, delivery):
                continue
            again_ms = self._requeued.get(key)
            if end.how == "dead" and again_ms is not None and delivery.got_ms >= again_ms:
                continue
            self._wrong.append(f"again: {delivery.token} came after {end}: {delivery}")

    def _delay_of_nack_kept(self, retry: Retry) -> None:
        if self._moves[retry.id]:
            return
        for delivery in self._deliveries[retry.id, retry.group]:
            if is_after(retry, delivery) and delivery.delivered_ms < retry.not_before_ms:
                self._wrong.append(f"early: after {retry}: {delivery}")

    def _none_lost(self) -> None:
        for task_id, (topic, token, _) in self._tasks.items():
            if self._cancels[task_id]:
                continue
            for group in self._groups[topic]:
                key = task_id, group
                if not self._deliveries[key]:
                    self._wrong.append(f"lost: {token} (id {task_id}) never came to {group}")
                elif not _acked(self._ends[key]):
                    self._wrong.append(
                        f"lost: {token} (id {task_id}) came to {group} and its ack was never"
                        " confirmed"
                    )

    def _count(self) -> None:
        verdict = self._verdict
        verdict.tasks = len(self._tasks)
        verdict.cancelled = sum(1 for ends in self._cancels.values() if ends)
        verdict.acked = sum(1 for ends in self._ends.values() if _acked(ends))
        for deliveries in self._deliveries.values():
            verdict.deliveries += len(deliveries)
            verdict.duplicates += max(0, len(deliveries) - 1)


def _acked(ends: Iterable[Finished]) -> bool:
    return any(end.how == "acked" for end in ends)
