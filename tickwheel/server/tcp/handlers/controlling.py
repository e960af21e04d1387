"""CANCEL, RESCHEDULE, RUN_NOW, LOOKUP and the dead letters' verbs: commands by id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tickwheel.clock import Now
from tickwheel.engine.tasks import Known
from tickwheel.errors import LimitExceeded
from tickwheel.protocol.frames import ID_MAX
from tickwheel.server.shard.shard import Shell
from tickwheel.server.tcp import decode as checks
from tickwheel.server.tcp.connection import Connection
from tickwheel.server.tcp.encode import fitting


class Controlling:
    """Each answer has a word, or a map, for each id, in the order asked."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._control = shell.engine.control

    def cancel(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        request, ids = self._ids(frame)
        self._each(peer, request, ids, ids, self._control.cancel)

    def _each(
        self,
        peer: Connection,
        request: int,
        ids: Sequence[int],
        keys: Sequence[Any],
        verb: Callable[[Any, Known | None], Any],
    ) -> None:
        """Answer with the word of ``verb`` for each of ``keys``, which are about ``ids``. A key
        named twice is acted on once, and has the same word twice."""
        words: dict[Any, Any] = {}

        def act(some: range, known: Mapping[int, Known]) -> None:
            self._shell.act()
            for index in some:
                key = keys[index]
                if key not in words:
                    words[key] = verb(key, known.get(ids[index]))

        def done() -> None:
            peer.ok(request, [words[key] for key in keys])
            self._shell.poke()

        self._shell.commands.put(peer, request, ids, act, done)

    def reschedule(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 1, "items")
        request = checks.request_number(frame[1])
        limits = self._shell.limits
        items = checks.sequence(frame[2], "items", limits.ids_per_frame_max)
        dues: dict[int, int] = {}
        for index, item in enumerate(items):
            field = f"items[{index}]"
            if type(item) is not tuple or len(item) != 3:
                checks.wrong(field, "[id, delay_ms, due_ms]", item)
            task_id = checks.integer(item[0], f"{field}.id", 0, ID_MAX)
            dues[task_id] = checks.due(item[1], item[2], field, now.now_ms, limits)
        self._reschedule(peer, request, [item[0] for item in items], dues)

    def run_now(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        request, ids = self._ids(frame)
        self._reschedule(peer, request, ids, dict.fromkeys(ids, now.now_ms))

    def _reschedule(
        self, peer: Connection, request: int, ids: Sequence[int], dues: dict[int, int]
    ) -> None:
        clock = self._shell.clock

        def verb(task_id: int, found: Known | None) -> tuple[str, int | None]:
            return self._control.reschedule(task_id, dues[task_id], found, clock.read().now_ms)

        self._each(peer, request, ids, ids, verb)

    def lookup(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        request, ids = self._ids(frame)
        shell = self._shell
        bytes_max = shell.limits.frame_bytes_max // 2
        maps: list[dict[str, Any]] = []
        size = 0

        def act(some: range, known: Mapping[int, Known]) -> None:
            nonlocal size
            for index in some:
                task_id = ids[index]
                found = known.get(task_id)
                if found is None:
                    told = {"id": task_id, "state": self._control.absent(task_id)}
                else:
                    told = shell.describe(found)
                told, told_bytes = fitting(told, bytes_max)
                size += told_bytes
                if size > bytes_max and len(ids) > 1:
                    return
                maps.append(told)

        def done() -> None:
            if size > bytes_max and len(ids) > 1:
                told = (
                    f"what there is to say of the {len(ids)} ids has {size} bytes or more; the"
                    f" limit is {bytes_max} (half of frame_bytes_max): ask for fewer"
                )
                peer.refuse(request, LimitExceeded(told))
            elif peer.open:
                peer.ok(request, maps)

        shell.commands.put(peer, request, ids, act, done, lambda: peer.open and size <= bytes_max)

    def dead_requeue(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        clock = self._shell.clock

        def requeue(pair: tuple[int, str], found: Known | None) -> str:
            return self._control.requeue(*pair, found, clock.read().now_ms)

        self._dead(peer, frame, requeue)

    def dead_delete(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        def delete(pair: tuple[int, str], found: Known | None) -> str:
            return self._control.delete_dead(*pair, found)

        self._dead(peer, frame, delete)

    def _dead(
        self,
        peer: Connection,
        frame: tuple[Any, ...],
        verb: Callable[[tuple[int, str], Known | None], str],
    ) -> None:
        checks.arity(frame, 1, "pairs")
        request = checks.request_number(frame[1])
        pairs = checks.sequence(frame[2], "pairs", self._shell.limits.ids_per_frame_max)
        for index, pair in enumerate(pairs):
            field = f"pairs[{index}]"
            if type(pair) is not tuple or len(pair) != 2:
                checks.wrong(field, "[id, group]", pair)
            checks.integer(pair[0], f"{field}.id", 0, ID_MAX)
            checks.name(pair[1], f"{field}.group")
        self._each(peer, request, [pair[0] for pair in pairs], pairs, verb)

    def _ids(self, frame: tuple[Any, ...]) -> tuple[int, Sequence[int]]:
        checks.arity(frame, 1, "ids")
        request = checks.request_number(frame[1])
        return request, checks.task_ids(frame[2], self._shell.limits)
