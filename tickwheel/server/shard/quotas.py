"""Quotas: how much one principal may take of a daemon that it shares with others.

A ``Quota`` is what one principal has used: its tokens of one name share it, over both transports.
It is asked once a request or a run of plain ones, never once a task, and not at all where there
are no quotas: then a caller has none. Knows no connection and no clock.

Invariants:

* Rates are buckets of a second. A request goes through while something is left, however large it
  is, and the next ones wait until it is paid: nothing that fits a frame can never be sent.
* ``pending`` is a count of topics, not of who enqueued: what is not finished in those that the
  principal may produce to. So it is right after a restart, and costs a task nothing. It is counted
  anew when the last count is ``COUNT_MS`` old (longer, where there are very many topics), and
  whatever the principal has enqueued since is added: it never gets over the limit by itself.
* A refusal leaves no mark, and says when to come again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tickwheel.errors import Overloaded
from tickwheel.server.shard.access import Quotas, Right

if TYPE_CHECKING:
    from tickwheel.engine.state import Core
    from tickwheel.engine.topics import Topic
    from tickwheel.server.shard.access import Principal, Topics

COUNT_MS: Final = 100
TOPICS_PER_MS: Final = 20
"""With more topics than ``COUNT_MS`` times this they are counted less often."""
FULL_WAIT_S: Final = 1.0
"""What is said of a limit that no clock ends."""
USED_MAX: Final = 10_000
"""Principals whose use is remembered; those that do nothing are forgotten first."""


class Conversation(Protocol):
    """What is asked here of a caller."""

    principal: Principal
    quota: Quota | None

    @property
    def subscribers(self) -> Sized: ...

    @property
    def pulls(self) -> Sized: ...


class Bucket:
    """So much a second."""

    def __init__(self, name: str, rate: float) -> None:
        self._name = name
        self._rate = rate
        self._left = float(rate)
        self._at_ms = 0

    def wait_s(self, mono_ms: int) -> float:
        """Until something is left; 0: now."""
        elapsed_ms, self._at_ms = mono_ms - self._at_ms, mono_ms
        self._left = min(self._rate, self._left + max(0, elapsed_ms) * self._rate / 1000)
        return 0.0 if self._left > 0 else max(0.001, -self._left / self._rate)

    def take(self, count: int) -> None:
        self._left -= count

    def refusal(self, who: str, wait_s: float) -> Overloaded:
        return over(f"{who} has used its {self._name} ({self._rate:g})", wait_s)


def _bucket(name: str, rate: float | None) -> Bucket | None:
    return None if rate is None else Bucket(name, rate)


def over(why: str, wait_s: float) -> Overloaded:
    """``overloaded``, with when to come again."""
    error = Overloaded(f"{why}; come again in {wait_s:.3f} s")
    error.after_s = wait_s
    return error


class Quota:
    """Of one principal."""

    def __init__(self, principal: Principal, quotas: Quotas) -> None:
        self.quotas = quotas
        self._who = principal.name
        self._topics = principal.topics(Right.PRODUCE)
        self.callers: set[Conversation] = set()
        """Connections, and requests over HTTP that are under way."""
        self._tasks = _bucket("tasks_per_s", quotas.tasks_per_s)
        self._bytes = _bucket("bytes_per_s", quotas.bytes_per_s)
        self._pending = 0
        self._counted_ms = -1
        self._core: Core | None = None

    # --- a conversation --------------------------------------------------------------------------

    def enter(self, caller: Conversation) -> None:
        """Raises Overloaded."""
        most = self.quotas.connections
        if most is not None and len(self.callers) >= most:
            raise over(f"{self._who} has {most} connections (connections)", FULL_WAIT_S)
        self.callers.add(caller)
        caller.quota = self

    def leave(self, caller: Conversation) -> None:
        """Harmless when it is not there."""
        self.callers.discard(caller)

    def check_subscription(self) -> None:
        """Raises Overloaded: one more is too many."""
        most = self.quotas.subscriptions
        if most is None:
            return
        if sum(len(one.subscribers) + len(one.pulls) for one in self.callers) >= most:
            raise over(f"{self._who} has {most} subscriptions (subscriptions)", FULL_WAIT_S)

    # --- enqueues --------------------------------------------------------------------------------

    def check(self, core: Core, mono_ms: int) -> None:
        """Raises Overloaded: no task at the moment."""
        for bucket in (self._tasks, self._bytes):
            wait_s = 0.0 if bucket is None else bucket.wait_s(mono_ms)
            if bucket is not None and wait_s:
                raise bucket.refusal(self._who, wait_s)
        most = self.quotas.pending
        if most is None:
            return
        self._count(core, mono_ms)
        if self._pending >= most:
            raise over(f"{self._who} has {most} tasks that are not finished (pending)", FULL_WAIT_S)

    def room(self, core: Core, mono_ms: int) -> int:
        """How many plain tasks may be taken now."""
        try:
            self.check(core, mono_ms)
        except Overloaded:
            return 0
        most = self.quotas.pending
        return core.config.tasks_max if most is None else most - self._pending

    def check_count(self, count: int) -> None:
        """Raises Overloaded: ``check`` let a request pass, and it has too many."""
        most = self.quotas.pending
        if most is not None and self._pending + count > most:
            raise over(
                f"{self._who} has {self._pending} tasks that are not finished, and {count} more"
                f" are over {most} (pending)",
                FULL_WAIT_S,
            )

    def charge(self, count: int, size_bytes: int) -> None:
        """So many were taken."""
        self._pending += count
        if self._tasks is not None:
            self._tasks.take(count)
        if self._bytes is not None:
            self._bytes.take(size_bytes)

    def _count(self, core: Core, mono_ms: int) -> None:
        pause_ms = max(COUNT_MS, len(core.topics) // TOPICS_PER_MS)
        if core is self._core and 0 <= mono_ms - self._counted_ms < pause_ms:
            return
        self._pending = core.staged + _pending(core.topics, self._topics)
        self._core, self._counted_ms = core, mono_ms


def _pending(topics: Mapping[str, Topic], which: Topics) -> int:
    return sum(unfinished(topic) for name, topic in topics.items() if which.are_all or which(name))


def unfinished(topic: Topic) -> int:
    """Tasks that are not due, and the longest backlog of its groups."""
    holders = list(topic.groups.values())
    if topic.unowned is not None:
        holders.append(topic.unowned)
    return topic.scheduled + max(
        (g.ready_count + len(g.flight) + len(g.waiting) for g in holders), default=0
    )


class Used(NamedTuple):
    """What a principal's use is remembered by."""

    name: str
    quotas: Quotas


class QuotaBook:
    """The quota of each principal that has one."""

    def __init__(self) -> None:
        self._known: dict[Used, Quota] = {}

    def enter(self, caller: Conversation) -> None:
        """It is let in. Raises Overloaded."""
        quota = self._of(caller.principal)
        if quota is not None:
            quota.enter(caller)

    @staticmethod
    def leave(caller: Conversation) -> None:
        """Harmless when it was not let in."""
        if caller.quota is not None:
            caller.quota.leave(caller)

    def _of(self, principal: Principal) -> Quota | None:
        """None: it has no limits."""
        quotas = principal.quotas
        if quotas is None:
            return None
        key = Used(principal.name, quotas)
        found = self._known.pop(key, None) or Quota(principal, quotas)
        self._known[key] = found  # the last one used is the last one to go
        if len(self._known) > USED_MAX:
            idle = next((k for k, quota in self._known.items() if not quota.callers), None)
            if idle is not None:
                del self._known[idle]
        return found
