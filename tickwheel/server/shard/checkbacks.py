"""Who can be asked about transactions that nobody has decided, and asking.

A producer says which producer groups it answers for; it is asked until it is gone. The one that
prepared a transaction is asked first, because it knows best; else the members of the group take
turns. What is asked leaves with the tick in which its time came, in frames of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakValueDictionary

from tickwheel.server.shard.callers import Caller

if TYPE_CHECKING:
    from tickwheel.model.transactions import TransactionRow
    from tickwheel.server.shard.access import Only

CHECKS_PER_TICK = 256
"""Transactions that are asked about by one tick of the shard."""


class CheckSink(Protocol):
    """Where one caller is asked."""

    def ask(self, group: str, rows: Sequence[TransactionRow]) -> None:
        """What became of these transactions?"""


class _Member(NamedTuple):
    sink: CheckSink
    only: Only | None


class CheckBacks:
    """Of one shard."""

    def __init__(self) -> None:
        self._members: dict[str, dict[Caller, _Member]] = {}
        """By producer group; who was asked last is the last one."""
        self._groups: dict[Caller, tuple[str, ...]] = {}
        self._preparers: WeakValueDictionary[str, Caller] = WeakValueDictionary()
        self._waiting: dict[tuple[Caller, str], list[TransactionRow]] = {}

    def register(
        self, caller: Caller, groups: Sequence[str], sink: CheckSink, only: Only | None
    ) -> None:
        """It answers for these groups from now on, and for no others."""
        self.closed(caller)
        for group in groups:
            self._members.setdefault(group, {})[caller] = _Member(sink, only)
        if groups:
            self._groups[caller] = tuple(groups)

    def closed(self, caller: Caller) -> None:
        """It is gone."""
        for group in self._groups.pop(caller, ()):
            members = self._members.get(group, {})
            members.pop(caller, None)
            if not members:
                self._members.pop(group, None)

    def prepared(self, name: str, caller: Caller) -> None:
        """Its transaction."""
        self._preparers[name] = caller

    def decided(self, name: str) -> None:
        """Nobody will be asked any more."""
        self._preparers.pop(name, None)

    def is_of(self, caller: Caller, row: TransactionRow) -> bool:
        """Whether it prepared this transaction, or answers for its producer group."""
        return self._preparers.get(row.id) is caller or row.group in self._groups.get(caller, ())

    @property
    def members(self) -> int:
        """Connections that are asked."""
        return len(self._groups)

    def ask(self, row: TransactionRow) -> bool:
        """Whether somebody will be asked with the next ``flush``."""
        members = self._members.get(row.group)
        if not members:
            return False
        preparer = self._preparers.get(row.id)
        first = () if preparer is None or preparer not in members else (preparer,)
        for caller in chain(first, members):  # the first of thousands can answer, mostly
            if _can_answer(caller, members[caller], row):
                members[caller] = members.pop(caller)
                self._waiting.setdefault((caller, row.group), []).append(row)
                return True
        return False

    def flush(self, failed: Callable[[Exception], None]) -> None:
        """Write what was to be asked. What cannot be written is ``failed``; it is asked again."""
        waiting, self._waiting = self._waiting, {}
        for (caller, group), rows in waiting.items():
            member = self._members.get(group, {}).get(caller)
            if member is None:
                continue
            try:
                member.sink.ask(group, rows)
            except Exception as error:
                failed(error)


def _can_answer(caller: Caller, member: _Member, row: TransactionRow) -> bool:
    is_there = caller.is_open and not caller.is_blocked
    return is_there and (member.only is None or all(map(member.only, row.topics)))
