"""Commands that need what the store holds: one read for all that wait, then each in order.

Cancel, reschedule, look-up, acks by earlier receipts and the like. Order between them is the
order of arrival, over all connections. A read ends at so many bytes, wherever that is among the
ids of a command; the rest is read next, before anything later. Invariant: what a command does to
an id it does in the same step of the loop in which the record was overlaid, so nothing can come
between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tickwheel.engine.tasks import Known
from tickwheel.errors import Overloaded, RowMissing, TickwheelError
from tickwheel.server.reader import View

if TYPE_CHECKING:
    from tickwheel.server.connection import Connection
    from tickwheel.server.shell import Shell

IDS_PER_READ_MAX = 16_384
BYTES_PER_READ_MAX = 16 << 20
"""Rows are read with their bodies."""

Act = Callable[[range, Mapping[int, Known]], None]


class Command:
    """``act`` gets ranges of indexes into ``ids``, one after the other, and the records of those
    that exist; ``done`` answers ``request`` at the end. One that is not ``wanted`` any more is not
    read."""

    __slots__ = ("act", "at", "done", "ids", "peer", "request", "wanted")

    def __init__(
        self,
        peer: Connection,
        request: int,
        ids: Sequence[int],
        act: Act,
        done: Callable[[], None],
        wanted: Callable[[], bool],
    ) -> None:
        self.peer = peer
        self.request = request
        self.ids = ids
        self.act = act
        self.done = done
        self.wanted = wanted
        self.at = 0
        """How many of the ids are done with."""

    @property
    def is_over(self) -> bool:
        return self.at >= len(self.ids) or not self.wanted()


class Commands:
    """The queue; ``run`` is its life."""

    def __init__(
        self,
        shell: Shell,
        commands_max: int,
        command_ids_max: int,
        room: Callable[[], Awaitable[None]],
    ) -> None:
        """``room``: wait until what commands change may grow further."""
        self._shell = shell
        self._commands_max = commands_max
        self._ids_max = command_ids_max
        self._room = room
        self._waiting: deque[Command] = deque()
        self._ids = 0
        self._wake = asyncio.Event()

    def put(
        self,
        peer: Connection,
        request: int,
        ids: Sequence[int],
        act: Act,
        done: Callable[[], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Queue a command. Raises Overloaded when the queue is full."""
        if len(self._waiting) >= self._commands_max:
            raise Overloaded(
                f"{len(self._waiting)} commands are waiting; the limit is {self._commands_max}"
                " (commands_max)"
            )
        if self._ids and self._ids + len(ids) > self._ids_max:
            raise Overloaded(
                f"commands on {self._ids} ids are waiting, and {len(ids)} more would be too many;"
                f" the limit is {self._ids_max} (command_ids_max)"
            )
        self._ids += len(ids)
        self._waiting.append(Command(peer, request, ids, act, done, wanted))
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._room()
                await self._some()

    async def _some(self) -> None:
        """One read, and what it is for."""
        parts = self._parts()
        wanted = dict.fromkeys(i for command, stop in parts for i in command.ids[command.at : stop])
        reader = self._shell.reader
        async with reader.read_some(list(wanted), BYTES_PER_READ_MAX) as (view, rest):
            unread = frozenset(rest)
            for command, stop in parts:
                ids = command.ids
                if unread:
                    stop = next((i for i in range(command.at, stop) if ids[i] in unread), stop)
                if not self._is_over(command, stop, view):
                    break
                self._waiting.popleft()
                self._ids -= len(ids)

    def _is_over(self, command: Command, stop: int, view: View) -> bool:
        """Act on its ids up to ``stop``; whether it was answered then, be it by an error."""
        some, command.at = range(command.at, stop), stop
        self._shell.acting = False
        try:
            if some:
                self._check(command.ids[some.start : some.stop])
                command.act(some, view(command.ids[some.start : some.stop]))
            if not command.is_over:
                return False
            command.done()
        except TickwheelError as error:
            command.peer.refuse(command.request, error)
        except Exception as error:
            told = self._shell.contain(f"a command of {command.peer.peer}", error)
            command.peer.refuse(command.request, told)
        return True

    def _check(self, ids: Sequence[int]) -> None:
        """What is not found counts as ended, which would be wrong of a row that is missing."""
        missing = self._shell.reader.missing(ids)
        if missing:
            raise RowMissing(f"the store has no row of {missing[0]}, which has not ended")

    def _parts(self) -> list[tuple[Command, int]]:
        """The next commands and how far to read for each."""
        parts: list[tuple[Command, int]] = []
        left = IDS_PER_READ_MAX
        for command in self._waiting:
            stop = min(len(command.ids), command.at + left) if command.wanted() else command.at
            parts.append((command, stop))
            left -= stop - command.at
            if left <= 0:
                break
        return parts
