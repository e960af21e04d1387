"""Who can be asked about transactions that nobody has decided, and asking.

A producer says which producer groups it answers for; it is asked until it is gone. A *member* for a
transaction is who says its group and may produce to every topic of its tasks, because it could
decide about it unasked as well; whoever may not is a stranger, and as if it were not there. The
transaction's owner is asked first: the connection that prepared it, because it knows best, then
others of its name, in turn; then the other members, in turn. What is asked leaves with the tick in
which its time came, in frames of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from tickwheel.model.transactions import Reach
from tickwheel.server.shard.callers import Caller

if TYPE_CHECKING:
    from tickwheel.model.transactions import TransactionRow
    from tickwheel.server.shard.access import Only, Principal

CHECKS_PER_TICK = 256
"""Transactions that one tick of the shard asks about."""


class CheckSink(Protocol):
    """Asks one caller about transactions."""

    def ask(self, group: str, rows: Sequence[TransactionRow]) -> None:
        """Ask what became of these transactions."""


class _Line:
    """The members of one producer group with one principal, and so the same rights."""

    __slots__ = ("only", "sinks")

    def __init__(self, only: Only | None) -> None:
        self.only = only
        self.sinks: dict[Caller, CheckSink] = {}
        """Members by caller; the one who was asked last is at the end."""

    def is_of(self, row: TransactionRow) -> bool:
        """Whether these members may be asked about the transaction."""
        return self.only is None or all(map(self.only, row.topics))

    def next(self, preparer: Caller | None) -> Caller | None:
        """The member who is asked next: the preparer, if it is there; None: nobody is."""
        if preparer is not None and preparer in self.sinks and _is_there(preparer):
            return preparer
        return next(filter(_is_there, self.sinks), None)


class CheckBacks:
    """The members of producer groups on one shard, who are asked about transactions."""

    def __init__(self) -> None:
        self._members: dict[str, dict[Principal, _Line]] = {}
        """By producer group: its members by principal; the principal asked last is at the end."""
        self._groups: dict[Caller, tuple[str, ...]] = {}
        self._preparers: WeakValueDictionary[str, Caller] = WeakValueDictionary()
        """Transaction → the caller that prepared it as its owner."""
        self._waiting: dict[tuple[Caller, str], list[TransactionRow]] = {}

    def register(
        self, caller: Caller, groups: Sequence[str], sink: CheckSink, only: Only | None
    ) -> None:
        """Register the caller as a member of these producer groups, and of no others."""
        self.closed(caller)
        principal = caller.principal
        for group in groups:
            lines = self._members.setdefault(group, {})
            line = lines.get(principal)
            if line is None:
                line = lines[principal] = _Line(only)
            line.sinks[caller] = sink
        if groups:
            self._groups[caller] = tuple(groups)

    def closed(self, caller: Caller) -> None:
        """Forget a caller that is gone."""
        for group in self._groups.pop(caller, ()):
            lines = self._members.get(group, {})
            line = lines.get(caller.principal)
            if line is None:
                continue
            line.sinks.pop(caller, None)
            if not line.sinks:
                del lines[caller.principal]
            if not lines:
                del self._members[group]

    def groups_of(self, caller: Caller) -> Sequence[str]:
        """The producer groups that the caller is a member of."""
        return self._groups.get(caller, ())

    def prepared(self, row: TransactionRow, caller: Caller) -> None:
        """Note that the caller prepared the transaction, or more of it."""
        if caller.principal.name == row.owner:
            self._preparers[row.id] = caller

    def decided(self, name: str) -> None:
        """Forget who prepared a transaction that is decided."""
        self._preparers.pop(name, None)

    def is_own(self, caller: Caller, row: TransactionRow) -> bool:
        """Whether the caller decides as the owner: its connection prepared the transaction, or is a
        member of its producer group, and has the owner's name. Being asked makes nobody the
        owner."""
        if caller.principal.name != row.owner:
            return False
        return self._preparers.get(row.id) is caller or row.group in self.groups_of(caller)

    @property
    def members(self) -> int:
        """How many connections are members of producer groups."""
        return len(self._groups)

    def ask(self, row: TransactionRow, above: Reach) -> Reach:
        """Choose whom the next ``flush`` asks about the transaction, if that one is nearer to it
        than ``above``; returns whom it reaches, else NOBODY."""
        lines = self._members.get(row.group, {})
        for reach in (Reach.OWN, Reach.ANOTHER):
            if reach <= above:
                break
            for principal, line in lines.items():
                is_owner = principal.name == row.owner
                if is_owner != (reach is Reach.OWN) or not line.is_of(row):
                    continue
                caller = line.next(self._preparers.get(row.id))
                if caller is not None:
                    line.sinks[caller] = line.sinks.pop(caller)
                    lines[principal] = lines.pop(principal)
                    self._waiting.setdefault((caller, row.group), []).append(row)
                    return reach
        return Reach.NOBODY

    def flush(self, failed: Callable[[Exception], None]) -> None:
        """Send the questions. One that cannot be written is ``failed``, and asked again."""
        waiting, self._waiting = self._waiting, {}
        for (caller, group), rows in waiting.items():
            line = self._members.get(group, {}).get(caller.principal)
            sink = None if line is None else line.sinks.get(caller)
            if sink is None:
                continue
            try:
                sink.ask(group, rows)
            except Exception as error:
                failed(error)


def _is_there(caller: Caller) -> bool:
    return caller.is_open and not caller.is_blocked
