"""CANCEL, RESCHEDULE, RUN_NOW, LOOKUP and the dead letters' verbs: commands by id."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tickwheel.clock import Now
from tickwheel.errors import LimitExceeded
from tickwheel.protocol.frames import ID_MAX
from tickwheel.server import checks
from tickwheel.server.connection import Connection
from tickwheel.server.shell import Shell
from tickwheel.wheel.control import Known


class Controlling:
    """Each answer has a word, or a map, for each id, in the order asked."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._control = shell.engine.control

    def cancel(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        request, ids = self._ids(frame)
        shell = self._shell

        def action(known: Mapping[int, Known]) -> None:
            # Each look-up is made anew: an id named twice is cancelled the second time.
            peer.ok(request, self._each(ids, known, shell.act().control.cancel))

        shell.commands.put(peer, request, ids, action)

    @staticmethod
    def _each(
        ids: Sequence[int],
        known: Mapping[int, Known],
        verb: Callable[[int, Known | None], Any],
    ) -> list[Any]:
        seen: dict[int, Any] = {}
        answers = []
        for task_id in ids:
            if task_id not in seen:
                seen[task_id] = verb(task_id, known.get(task_id))
            answers.append(seen[task_id])
        return answers

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
        shell = self._shell

        def action(known: Mapping[int, Known]) -> None:
            now_ms = shell.clock.read().now_ms
            control = shell.act().control

            def verb(task_id: int, found: Known | None) -> tuple[str, int | None]:
                return control.reschedule(task_id, dues[task_id], found, now_ms)

            peer.ok(request, self._each(ids, known, verb))
            shell.poke()

        shell.commands.put(peer, request, ids, action)

    def lookup(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        request, ids = self._ids(frame)
        bytes_max = self._shell.limits.frame_bytes_max // 2

        def action(known: Mapping[int, Known]) -> None:
            size = sum(len(found.row.body) for found in known.values())
            if size > bytes_max:
                peer.refuse(
                    request,
                    LimitExceeded(
                        f"the {len(ids)} ids have {size} bytes of bodies; the limit is"
                        f" {bytes_max} (half of frame_bytes_max): ask for fewer"
                    ),
                )
                return
            maps = []
            for task_id in ids:
                found = known.get(task_id)
                maps.append(
                    self._shell.describe(found)
                    if found is not None
                    else {"id": task_id, "state": self._control.absent(task_id)}
                )
            peer.ok(request, maps)

        self._shell.commands.put(peer, request, ids, action)

    def dead_requeue(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        shell = self._shell

        def requeue(task_id: int, group: str, found: Known | None) -> str:
            return self._control.requeue(task_id, group, found, shell.clock.read().now_ms)

        self._dead(peer, frame, requeue)

    def dead_delete(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        self._dead(peer, frame, self._control.delete_dead)

    def _dead(
        self,
        peer: Connection,
        frame: tuple[Any, ...],
        verb: Callable[[int, str, Known | None], str],
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

        def action(known: Mapping[int, Known]) -> None:
            seen: dict[tuple[int, str], str] = {}
            self._shell.act()
            for task_id, group in pairs:
                if (task_id, group) not in seen:
                    seen[task_id, group] = verb(task_id, group, known.get(task_id))
            peer.ok(request, [seen[pair] for pair in pairs])
            self._shell.poke()

        self._shell.commands.put(peer, request, [pair[0] for pair in pairs], action)

    def _ids(self, frame: tuple[Any, ...]) -> tuple[int, Sequence[int]]:
        checks.arity(frame, 1, "ids")
        request = checks.request_number(frame[1])
        return request, checks.task_ids(frame[2], self._shell.limits)
