"""Commands that need what the store holds: one read for all that wait, then each in order.

Cancel, reschedule, look-up, acks by earlier receipts and the like. Order between them is the
order of arrival, over all connections. Invariant: a command runs in the same step of the loop
in which its records were overlaid, so nothing can come between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.errors import Overloaded, TickwheelError
from tickwheel.server.reader import View
from tickwheel.wheel.control import Known

if TYPE_CHECKING:
    from tickwheel.server.connection import Connection
    from tickwheel.server.shell import Shell

IDS_PER_READ_MAX = 50_000

Action = Callable[[Mapping[int, Known]], None]


class Command(NamedTuple):
    """``action`` gets the records of those of ``ids`` that exist, and answers ``request``."""

    peer: Connection
    request: int
    ids: Sequence[int]
    action: Action


class Commands:
    """The queue; ``run`` is its life."""

    def __init__(self, shell: Shell, commands_max: int) -> None:
        self._shell = shell
        self._commands_max = commands_max
        self._waiting: list[Command] = []
        self._wake = asyncio.Event()

    def put(self, peer: Connection, request: int, ids: Sequence[int], action: Action) -> None:
        """Queue a command. Raises Overloaded when the queue is full."""
        if len(self._waiting) >= self._commands_max:
            raise Overloaded(
                f"{len(self._waiting)} commands are waiting; the limit is {self._commands_max}"
                " (commands_max)"
            )
        self._waiting.append(Command(peer, request, ids, action))
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                batch = self._take()
                ids = list({task_id for command in batch for task_id in command.ids})
                async with self._shell.reader.read(ids) as view:
                    for command in batch:
                        self._run(command, view)

    def _run(self, command: Command, view: View) -> None:
        self._shell.acting = False
        try:
            command.action(view(command.ids))
        except TickwheelError as error:
            command.peer.refuse(command.request, error)
        except Exception as error:
            told = self._shell.contain(f"a command of {command.peer.peer}", error)
            command.peer.refuse(command.request, told)

    def _take(self) -> list[Command]:
        count = total = 0
        for command in self._waiting:
            total += len(command.ids)
            if count and total > IDS_PER_READ_MAX:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch
