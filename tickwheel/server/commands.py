"""Commands that need what the store holds: one read for all that wait, then each in order.

Cancel, reschedule, look-up, acks by earlier receipts and the like. Order between them is the
order of arrival, over all connections. Invariant: a command runs in the same step of the loop
in which its records were overlaid, so nothing can come between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tickwheel.errors import Overloaded
from tickwheel.server.reader import Reader
from tickwheel.wheel.control import Known

IDS_PER_READ_MAX = 50_000

Action = Callable[[Mapping[int, Known]], None]


class Command(NamedTuple):
    """``action`` gets the records of those of ``ids`` that exist."""

    ids: Sequence[int]
    action: Action


class Commands:
    """The queue; ``run`` is its life."""

    def __init__(self, reader: Reader, commands_max: int) -> None:
        self._reader = reader
        self._commands_max = commands_max
        self._waiting: list[Command] = []
        self._wake = asyncio.Event()

    def put(self, ids: Sequence[int], action: Action) -> None:
        """Queue a command. Raises Overloaded when the queue is full."""
        if len(self._waiting) >= self._commands_max:
            raise Overloaded(
                f"{len(self._waiting)} commands are waiting; the limit is {self._commands_max}"
                " (commands_max)"
            )
        self._waiting.append(Command(ids, action))
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = self._take()
                ids = list({task_id for command in batch for task_id in command.ids})
                async with self._reader.read(ids) as view:
                    for command in batch:
                        command.action(view(command.ids))

    def _take(self) -> list[Command]:
        count = total = 0
        for command in self._waiting:
            total += len(command.ids)
            if count and total > IDS_PER_READ_MAX:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch
