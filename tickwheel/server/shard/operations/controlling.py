"""Commands on the tasks that a selection names: cancel, reschedule, run now, look up; the dead
letters' verbs.

A selection is ids, or a topic and a key: then it is about every task of the topic that has the key
and has not ended when its turn comes: tasks that landed before it was sent are among them. Each
task gets its own outcome. When none has the key, the answer is about the newest that ended lately,
or says that none is known. What is done is what a bulk operation of that kind does, at once.

``only``: a task of another topic is unknown, and so is whatever has ended, because nothing says any
more which topic it was of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tickwheel.api.dead import Letters
from tickwheel.errors import LimitExceeded
from tickwheel.limits import ID_MAX
from tickwheel.model.bulk import at_once
from tickwheel.model.records import id_floor
from tickwheel.server import checks
from tickwheel.server.shard.reads import Records
from tickwheel.server.shard.views import ValueBytes, fitting

if TYPE_CHECKING:
    from tickwheel.api.tasks import LookUp, Move, Selection, Spread
    from tickwheel.engine.tasks import Done
    from tickwheel.model.records import TaskSnapshot
    from tickwheel.server.shard.access import Only
    from tickwheel.server.shard.callers import Ask
    from tickwheel.server.shard.shard import Shard

UNKNOWN = "unknown"
NEWEST_LOOKED_AT = 100
"""How many of the newest ids with a key's hash are looked at: one of them has the key."""


class Controlling:
    """Commands on tasks."""

    def __init__(self, shard: Shard, value_bytes: ValueBytes) -> None:
        self._shard = shard
        self._control = shard.engine.control
        self._value_bytes = value_bytes

    def cancel(self, ask: Ask[Selection]) -> None:
        """Cancel tasks. Raises LimitExceeded, Overloaded."""
        self._change(ask, "cancel")

    def reschedule(self, ask: Ask[Move]) -> None:
        """Move tasks. Raises BadRequest, DueTooFar, LimitExceeded, Overloaded."""
        self._change(ask, "reschedule")

    def spread(self, ask: Ask[Spread]) -> None:
        """Move scheduled tasks to the emptiest ticks of a due window. Raises BadRequest,
        DueTooFar, LimitExceeded, Overloaded."""
        self._change(ask, "spread")

    def run_now(self, ask: Ask[Selection]) -> None:
        """Make tasks due now. Raises LimitExceeded, Overloaded."""
        self._change(ask, "run_now")

    def _change(self, ask: Ask[Any], kind: str) -> None:
        """Do to the selected tasks what bulk operations of this kind do: answers an outcome of
        each. One that is named twice is acted on once, and has the same outcome twice."""
        shard, chosen, only = self._shard, _Chosen(self._shard, ask.request), ask.only
        now_ms = ask.now.now_ms
        change = at_once(kind, checks.moved(kind, ask.request, now_ms, shard.limits), now_ms)
        done: dict[int, Done] = {}

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            shard.border.act()
            now_ms, most_ms = shard.clock.read().now_ms, shard.limits.delay_ms_max
            wanted = [task_id for task_id in chosen.some(some, known) if task_id not in done]
            if isinstance(known, Records):
                for topic, found in known.plain.items():
                    if only is None or only(topic):
                        plain = {i: found[i] for i in wanted if i in found}
                        keys = known.keys_of
                        done.update(bulks.act(change, (), topic, plain, keys, now_ms, most_ms))
            rest = []
            for task_id in wanted:
                if task_id in done:
                    continue
                task = known.get(task_id)
                if not _is_seen(task, only):
                    done[task_id] = UNKNOWN, None
                elif task is None:
                    done[task_id] = self._control.too_late(task_id), None
                else:
                    rest.append(task)
            done.update(bulks.act(change, rest, "", {}, {}, now_ms, most_ms))

        def answer() -> None:
            outcomes = [
                _outcome(task_id, *done[task_id]) for task_id in chosen.ids if task_id in done
            ]
            if not outcomes and chosen.named is not None:
                ended = chosen.ended
                word = UNKNOWN if ended is None else self._control.too_late(ended)
                outcomes = [(ended, word)]
            shard.committer.reply(ask.caller.replies, ask.number, outcomes)
            shard.wake()

        bulks = shard.engine.bulks
        shard.commands.put(ask.caller, ask.number, chosen.to_read, act, answer)

    def look_up(self, ask: Ask[LookUp]) -> None:
        """Answer a map for each id; for a key one for each unfinished task, the newest first, else
        one for the newest that ended lately, or none. Raises LimitExceeded, Overloaded."""
        request, only, caller, shard = ask.request, ask.only, ask.caller, self._shard
        chosen = _Chosen(shard, request)
        until_ms = ID_MAX if request.until_ms is None else request.until_ms
        end_id, bytes_max = id_floor(until_ms + 1, 0), shard.limits.frame_bytes_max // 2
        maps: list[dict[str, Any]] = []
        size = 0
        is_cut = False

        def find() -> Sequence[int]:
            chosen.ids = [i for i in reversed(chosen.find()) if i < end_id]
            if request.newest:
                chosen.ids = chosen.ids[:NEWEST_LOOKED_AT]
            return chosen.ids

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            nonlocal size, is_cut
            for task_id in chosen.some(some, known):
                if request.newest and maps and chosen.named is not None:
                    return
                task = self._described(task_id, known.get(task_id), only)
                task, task_bytes = fitting(task, bytes_max, self._value_bytes)
                size += task_bytes
                is_cut = is_cut or (size > bytes_max and bool(maps))
                if is_cut:
                    return
                maps.append(task)

        def done() -> None:
            if is_cut:
                of, fewer = chosen.told
                ask.refuse(
                    LimitExceeded(
                        f"what there is to say of {of} has {size} bytes or more; the limit is"
                        f" {bytes_max} (half of frame_bytes_max): ask for {fewer}"
                    )
                )
                return
            ended = None if maps else chosen.ended
            if ended is not None and ended < end_id:
                maps.append({"id": ended, "state": self._control.absent(ended)})
            if caller.is_open:
                shard.committer.reply(caller.replies, ask.number, maps)

        def is_wanted() -> bool:
            return caller.is_open and not is_cut

        to_read = chosen.ids if chosen.named is None else find
        shard.commands.put(caller, ask.number, to_read, act, done, is_wanted, bodies=True)

    def _described(
        self, task_id: int, task: TaskSnapshot | None, only: Only | None
    ) -> dict[str, Any]:
        if not _is_seen(task, only):
            return {"id": task_id, "state": UNKNOWN}
        if task is None:
            return {"id": task_id, "state": self._control.absent(task_id)}
        return self._shard.describe(task)

    # --- dead letters --------------------------------------------------------------------------

    def requeue_dead(self, ask: Ask[Letters]) -> None:
        """Requeue dead letters ``(id, group)``. Raises Overloaded."""

        def requeue(pair: tuple[int, str], found: TaskSnapshot | None, now_ms: int) -> str:
            return self._control.requeue(*pair, found, now_ms)

        self._dead(ask, requeue)

    def delete_dead(self, ask: Ask[Letters]) -> None:
        """Delete dead letters ``(id, group)``. Raises Overloaded."""

        def delete(pair: tuple[int, str], found: TaskSnapshot | None, now_ms: int) -> str:
            return self._control.delete_dead(*pair, found)

        self._dead(ask, delete)

    def _dead(
        self,
        ask: Ask[Letters],
        verb: Callable[[tuple[int, str], TaskSnapshot | None, int], str],
    ) -> None:
        """Answer with the word of ``verb`` for each dead letter. One that is named twice is acted
        on once, and has the same word twice."""
        shard, pairs, only = self._shard, ask.request.pairs, ask.only
        words: dict[tuple[int, str], str] = {}

        def act(some: range, known: Mapping[int, TaskSnapshot]) -> None:
            shard.border.act()
            now_ms = shard.clock.read().now_ms
            for index in some:
                pair = pairs[index]
                if pair not in words:
                    task = known.get(pair[0])
                    words[pair] = verb(pair, task, now_ms) if _is_seen(task, only) else UNKNOWN

        def done() -> None:
            answer = [words[pair] for pair in pairs]
            shard.committer.reply(ask.caller.replies, ask.number, answer)
            shard.wake()

        shard.commands.put(ask.caller, ask.number, [pair[0] for pair in pairs], act, done)


class _Chosen:
    """The tasks that one selection names: the one place where ids are found for it."""

    def __init__(self, shard: Shard, selection: Selection) -> None:
        self._shard = shard
        self.ids: Sequence[int] = selection.ids or ()
        """Those of the selection, or all that may have its key, once they were found."""
        self.named: tuple[str, str] | None = None
        """The topic and the key; None: the selection has ids."""
        if selection.topic is not None and selection.key is not None:
            self.named = selection.topic, selection.key

    @property
    def to_read(self) -> Sequence[int] | Callable[[], Sequence[int]]:
        """The ids, or what finds them when they can be read."""
        return self.ids if self.named is None else self.find

    def find(self) -> Sequence[int]:
        """The ids, ascending, of all tasks that may have the key. Raises LimitExceeded."""
        assert self.named is not None
        keys, limit = self._shard.core.keys, self._shard.limits.key_tasks_max
        count = keys.count(*self.named)
        if count > limit:
            raise LimitExceeded(
                f"{count} tasks have this key; the limit is {limit} (key_tasks_max): nothing was"
                " done; use their ids"
            )
        self.ids = keys.find(*self.named)
        return self.ids

    def some(self, part: range, known: Mapping[int, TaskSnapshot]) -> Sequence[int]:
        """The ids of a part: of a key those of tasks that have it and have not ended since."""
        ids = self.ids[part.start : part.stop]
        if self.named is None:
            return ids
        return [i for i in ids if (task := known.get(i)) is not None and self._has_key(task)]

    def _has_key(self, task: TaskSnapshot) -> bool:
        """Whether the task has the key: equal hashes are not equal keys."""
        row = task.row
        return row.options is not None and (row.topic, row.options.key) == self.named

    @property
    def ended(self) -> int | None:
        """The task with the key that ended last, as far as that is known."""
        return None if self.named is None else self._shard.core.keys.finished(*self.named)

    @property
    def told(self) -> tuple[str, str]:
        """What it is, and what would be less, for a message."""
        if self.named is None:
            return f"the {len(self.ids)} ids", "fewer"
        return "the tasks with this key", "the newest"


def _outcome(task_id: int, word: str, due_ms: int | None) -> tuple[Any, ...]:
    return (task_id, word) if due_ms is None else (task_id, word, due_ms)


def _is_seen(task: TaskSnapshot | None, only: Only | None) -> bool:
    """Whether the caller may be told of the task."""
    return only is None or (task is not None and only(task.row.topic))
