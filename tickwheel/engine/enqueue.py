"""The first half: enqueue requests are staged, land when durable, or are refused.

Invariants: a staged task is not deliverable; a refused request leaves no mark, so that its
resend is a new request; a repeat of a request is answered with the first outcome, and its
answer waits for (and fails with) the batch that holds the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from tickwheel.engine.sessions import Session, StoredAnswer
from tickwheel.engine.sinks import ReplySink
from tickwheel.engine.state import ROW_OVERHEAD_BYTES, Batch, Core, Staged, rejoin
from tickwheel.model.kinds import SCHEDULE, SESSION, TRANSACTION
from tickwheel.model.records import ID_STEP, NewTask, TaskRow, task_bytes
from tickwheel.wheel.windows import Windows

_new_row = tuple.__new__
_topic_of = itemgetter(0)
_options_of = itemgetter(3)
_key_of = itemgetter(0)


class Intake:
    """Stages enqueued tasks, and lands or refuses them with their batch."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._windows = Windows(core.wheel, self._placed)
        self.undo_bulks: Callable[[Batch], None] = lambda batch: None
        """Undoes what bulk operations did in a batch whose tasks are forgotten."""
        self.inflight_bytes = 0
        """The bytes of bodies and overhead of tasks that are staged in either batch."""

    def known(self, session: Session, request: int) -> StoredAnswer | None:
        """The stored answer to a request that was seen before; None: it was not."""
        return session.answers.get(request)

    def enqueue(
        self,
        address: ReplySink | None,
        session: Session | None,
        request: int,
        new_tasks: Sequence[NewTask],
        size_bytes: int,
        now_ms: int,
        source: object = None,
        *,
        placed: bool = False,
    ) -> int:
        """Stage the tasks of one request; ``address`` gets the outcome when they landed. Returns
        the first id; the others follow at steps of ``ID_STEP``.

        ``source`` is whose they are, when nobody wants the outcome; ``placed``: some have been.
        """
        core = self._core
        ids = self.stage(new_tasks, size_bytes, now_ms, address or source)
        first = ids[0]
        answer = (request, first, len(ids), now_ms)
        if session is not None:
            session.remember({request: answer})
            session.last = max(session.last, request)
            session.seen_ms = now_ms
            core.dirty_sessions[session.key] = None
        core.open.staged.append((address, session, answer))
        if placed:
            core.open.chosen[first] = [new_task[1] for new_task in new_tasks]
        return first

    def stage(
        self, new_tasks: Sequence[NewTask], size_bytes: int, now_ms: int, source: object
    ) -> range:
        """Stage new tasks in the open batch; their ids. The caller sees to who waits for them."""
        core, count = self._core, len(new_tasks)
        first = core.ids.take(count, now_ms)
        ids = range(first, first + count * ID_STEP, ID_STEP)
        self._stage(ids, new_tasks, size_bytes)
        if any(map(_options_of, new_tasks)):
            self._hash(ids, new_tasks)
        if core.recorder is not None:
            core.recorder.arrived(source, ids, new_tasks, now_ms)
        return ids

    def place(self, new_tasks: Sequence[NewTask], now_ms: int) -> list[NewTask]:
        """The tasks, of which those with a due window have the due time that was chosen in it."""
        core, found = self._core, list(new_tasks)
        alike: dict[tuple[int, int], list[int]] = {}
        for index, (_, due_ms, _, options) in enumerate(found):
            if options is not None and options.within_ms is not None:
                asked_ms = due_ms if options.asked_ms is None else options.asked_ms
                window = due_ms, max(due_ms, asked_ms + options.within_ms)
                alike.setdefault(window, []).append(index)
        self._windows.begin()
        for (due_ms, end_ms), places in alike.items():
            moments = self._windows.choose(due_ms, end_ms, len(places), now_ms)
            core.totals.windows += len(places)
            core.open.placed += [moment_ms // core.wheel.tick_ms for moment_ms in moments]
            for index, moment_ms in zip(places, moments, strict=True):
                topic, _, body, options = found[index]
                found[index] = topic, moment_ms, body, options
        return found

    def _placed(self) -> Iterator[int]:
        """The ticks chosen for tasks with a due window that are not on the wheel yet."""
        core = self._core
        for batch in (core.landing, core.sealed, core.open):
            if batch is not None:
                yield from batch.placed

    def enqueue_singles(
        self,
        address: ReplySink | None,
        session: Session,
        requests: Sequence[int],
        new_tasks: Sequence[NewTask],
        size_bytes: int,
        now_ms: int,
        *,
        keyed: bool,
    ) -> None:
        """``enqueue`` for many requests of one task each, all above ``session.last``; ``keyed``:
        some of them have a key."""
        core = self._core
        count = len(requests)
        first = core.ids.take(count, now_ms)
        ids = range(first, first + count * ID_STEP, ID_STEP)
        self._stage(ids, new_tasks, size_bytes)
        if keyed:
            self._hash(ids, new_tasks)
        if core.recorder is not None:
            core.recorder.arrived(address, ids, new_tasks, now_ms)
        answers = [(r, task_id, 1, now_ms) for r, task_id in zip(requests, ids, strict=True)]
        session.remember(dict(zip(requests, answers, strict=True)))
        session.last = requests[-1]
        session.seen_ms = now_ms
        core.dirty_sessions[session.key] = None
        core.open.staged += [(address, session, answer) for answer in answers]

    def stage_bytes(self, size_bytes: int) -> None:
        """Count bytes that the open batch holds for something that is no new task yet."""
        self._core.open.staged_bytes += size_bytes
        self.inflight_bytes += size_bytes

    def _stage(self, ids: range, new_tasks: Sequence[NewTask], size_bytes: int) -> None:
        batch, tallies = self._core.open, self._core.tallies
        batch.topics.update(map(_topic_of, new_tasks))
        if tallies.all:
            tallies.count_all(Counter(map(_topic_of, new_tasks)), 1)
        batch.effects.enqueued.update(
            {
                task_id: _new_row(TaskRow, (task_id, due_ms, topic, body, options))
                for task_id, (topic, due_ms, body, options) in zip(ids, new_tasks, strict=True)
            }
        )
        size_bytes += len(ids) * ROW_OVERHEAD_BYTES
        batch.staged_bytes += size_bytes
        self.inflight_bytes += size_bytes

    def _hash(self, ids: Sequence[int], new_tasks: Sequence[NewTask]) -> None:
        """Record the key hashes of those of the tasks that have a key."""
        options: list[Any] = list(map(_options_of, new_tasks))
        keys: list[Any] = list(map(_key_of, options)) if all(options) else [None]
        if None in keys:
            places = [
                at for at, one in enumerate(options) if one is not None and one[0] is not None
            ]
            ids, new_tasks = [ids[at] for at in places], [new_tasks[at] for at in places]
            keys = [options[at][0] for at in places]
        hashes = self._core.keys.hash.of_many(list(map(_topic_of, new_tasks)), keys)
        self._core.open.effects.hashes.update(zip(ids, hashes, strict=True))

    def repeat(self, address: ReplySink, session: Session, answer: StoredAnswer) -> bool:
        """Answer a repeated request. True: at once. False: ``address`` waits for its batch."""
        core = self._core
        if answer[1] <= core.landed_id:
            return True
        sealed = core.sealed
        holder = core.open
        if sealed is not None and answer[1] <= sealed.effects.id_mark:
            holder = sealed
        holder.staged.append((address, session, answer))
        return False

    def durable(self, batch: Batch) -> None:
        """The batch is durable, and the next one may be sealed; ``landed`` follows soon."""
        core = self._core
        core.sealed, core.landing = None, batch
        if batch.effects.enqueued:
            core.landed_id = max(core.landed_id, batch.effects.id_mark)
        for planned, undo in batch.runs.items():
            core.totals.schedules_fired += planned.row.runs - undo.before.runs
            core.totals.schedules_missed += undo.missed
            core.totals.schedules_overlapped += undo.overlapped
        core.schedule_heap.landed(batch.runs)
        if batch.transactions:
            self._decided(batch)

    def _decided(self, batch: Batch) -> None:
        core = self._core
        committed, rolled_back = core.transaction_registry.landed(batch)
        core.totals.transactions_committed += committed
        core.totals.transactions_rolled_back += rolled_back

    def landed(self, batch: Batch, now_ms: int) -> None:
        """The batch is durable: its tasks go to the wheel, its credits to the consumers."""
        core = self._core
        if core.sealed is batch:
            self.durable(batch)
        rows = batch.effects.enqueued
        if rows:
            self._to_wheel(batch, rows, now_ms)
            core.wheel_id = max(core.wheel_id, batch.effects.id_mark)
        if batch.replaced:
            self._unhold(batch.replaced, now_ms)
        for (name, what), count in batch.merged.items():
            core.topic(name).merged[what] += count
        core.landing = None
        self.inflight_bytes -= batch.staged_bytes
        for ordering, ended in batch.ended:
            ordering.durable(ended, now_ms)
        for subscriber, count in batch.credits.items():
            subscriber.outstanding -= count
            subscriber.unconfirmed -= count
            core.regained(subscriber)
        core.handed_bytes -= batch.handed_bytes
        if core.held_back:
            groups, core.held_back = core.held_back, {}
            for group in groups:
                core.wake(group)

    def _to_wheel(self, batch: Batch, rows: dict[int, TaskRow], now_ms: int) -> None:
        core = self._core
        dues = [row[1] for row in rows.values()]
        for name, count in batch.topics.items():
            topic = core.topic(name)
            topic.scheduled += count
            topic.unfinished += count
            topic.enqueued += count
        core.tasks += len(dues)
        core.scheduled += len(dues)
        core.totals.enqueued += len(dues)
        core.wheel.add_many(list(rows), dues)
        if batch.effects.hashes:
            core.keys.add(batch.effects.hashes)
        horizon_ms = now_ms + core.config.resident_horizon_ms
        if min(dues) > horizon_ms:
            return
        for row in rows.values():
            if row[1] <= horizon_ms and core.has_room:
                core.keep(row)

    def _unhold(self, replaced: dict[int, TaskRow], now_ms: int) -> None:
        """Put replaced tasks, now durable, onto the wheel. One that was replaced again waits."""
        core = self._core
        for task_id, row in replaced.items():
            if core.replaced.get(task_id) is row:
                del core.replaced[task_id]
                core.put_on_wheel(row, now_ms)

    def refused(self, batch: Batch) -> None:
        """The batch was certainly not applied: forget its tasks, keep all the rest for later.

        The caller answers every address in ``batch.staged`` and then drops the list.
        """
        core = self._core
        core.sealed = None
        accepted = self._accepted(batch)
        self._forget(batch)
        rejoin(batch, core.open)
        if core.recorder is not None:
            core.recorder.rejoin(batch.notes, accepted)
        self._restage(accepted)

    def withdraw(self) -> list[Staged]:
        """Forget what is staged in the open batch, which no store has seen; the caller answers
        the addresses."""
        batch = self._core.open
        accepted = self._accepted(batch)
        self._forget(batch)
        if self._core.recorder is not None:
            self._core.recorder.forget_arrivals(accepted)
        batch.staged_bytes = 0
        staged, batch.staged = batch.staged, []
        self._restage(accepted)
        return staged

    @staticmethod
    def _accepted(batch: Batch) -> dict[int, TaskRow]:
        """The accepted tasks of a refused batch, which stay, by id, oldest first."""
        enqueued = batch.effects.enqueued
        return {task_id: enqueued[task_id] for task_id in sorted(batch.accepted)}

    def _restage(self, accepted: dict[int, TaskRow]) -> None:
        """Stage the accepted tasks of a refused batch again, for the next batch."""
        if not accepted:
            return
        batch, effects = self._core.open, self._core.open.effects
        size_bytes = sum(map(task_bytes, accepted.values())) + len(accepted) * ROW_OVERHEAD_BYTES
        batch.staged_bytes += size_bytes
        self.inflight_bytes += size_bytes
        batch.accepted |= accepted.keys()
        topics = Counter(row.topic for row in accepted.values())
        batch.topics += topics
        self._core.tallies.count_all(topics, 1)
        # Ids ascend in a batch, and these are the oldest.
        effects.enqueued = accepted | effects.enqueued
        effects.hashes = self._core.keys.hash.of_rows(accepted.values()) | effects.hashes

    def _forget(self, batch: Batch) -> None:
        core = self._core
        for _, session, answer in batch.staged:
            if session is not None:
                session.drop(answer[0])
        self._forget_answers(batch)
        batch.placed, batch.chosen = [], {}
        self._undo_runs(batch)
        if batch.bulks_before:
            self.undo_bulks(batch)
        if batch.transactions:
            core.transaction_registry.undo(batch)
            batch.transactions = {}
            batch.effects.forget(TRANSACTION)
        self.inflight_bytes -= batch.staged_bytes
        core.maybe_idle.update(dict.fromkeys(batch.topics.keys() & core.topics.keys()))
        core.tallies.count_all(batch.topics, -1)
        batch.effects.enqueued, batch.effects.hashes, batch.topics = {}, {}, Counter()
        batch.accepted, batch.merged = set(), Counter()

    def _forget_answers(self, batch: Batch) -> None:
        """Take back what a refused batch said of sessions; what still holds is written anew."""
        sessions, dirty = self._core.sessions, self._core.dirty_sessions
        effects = batch.effects
        for key, row in effects.of_kind(SESSION).items():
            session = sessions.get(key[0])
            if session is not None and session.takes_back(key, row):
                dirty[key[0]] = None
                del effects.records[SESSION, key]
            elif row is not None:
                del effects.records[SESSION, key]

    def _undo_runs(self, batch: Batch) -> None:
        """Undo the advances of schedules in a refused batch, whose tasks are forgotten with all
        others."""
        schedule_heap, changed = self._core.schedule_heap, batch.effects.forget(SCHEDULE)
        schedule_heap.undo(batch.runs)
        batch.runs = {}
        self._core.open.effects.change(
            SCHEDULE, {name: schedule_heap.row(name) for name in changed}
        )
