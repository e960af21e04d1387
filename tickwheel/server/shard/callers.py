"""A caller: one connection's conversation with the shard, whatever the transport is."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import count
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tickwheel.engine.sessions import ReplySink, Session, StoredAnswer
from tickwheel.engine.topics import Presence, Subscriber
from tickwheel.errors import TickwheelError
from tickwheel.server.shard.access import ANONYMOUS, Principal
from tickwheel.server.shard.quotas import Quota

if TYPE_CHECKING:
    from tickwheel.clock import Now
    from tickwheel.server.shard.access import Only

R = TypeVar("R")
HOST_SHOWN_MAX = 64
OTHERS_MIN = 64
"""How many ended subscribers are kept before those that no longer matter are dropped."""


class _Nobody:
    """The sink of a caller that is gone: answers are dropped."""

    label = ""

    def accepted(self, answers: Sequence[StoredAnswer]) -> None: ...

    def answer_to(self, request: int, value: object) -> Sized:
        return ()

    def give(self, answer: Sized) -> None: ...

    def error(self, request: int, code: str, message: str) -> None: ...

    def flush(self) -> None: ...


_NOBODY = _Nobody()


class Process(NamedTuple):
    """What a client says of its process, for people; "" and None: nothing."""

    host: str = ""
    pid: int | None = None
    version: str = ""


_numbers = count(1)


class Caller:
    """What the operations remember of one caller while it is there."""

    def __init__(
        self, replies: ReplySink, *, principal: Principal = ANONYMOUS, address: str = "?"
    ) -> None:
        self.replies = replies
        self.audited: ReplySink | None = None
        """The sink that takes the place of ``replies`` for requests that are logged."""
        self.principal = principal
        self.quota: Quota | None = None
        """The use of the caller's principal, once let in; None: no limits of its own."""
        self.name = ""
        """The caller's name, as it calls itself."""
        self.address = address
        self.process = Process()
        self.number = next(_numbers)
        """A number that rises with each caller of this process."""
        self.has_left = False
        """Whether the caller said goodbye, and so gave up what it still has."""
        self.since_ms = 0
        """When the caller came, by the wall clock."""
        self.is_open = True
        self.is_blocked = False
        """Whether the caller does not read what it is sent."""
        self.session: Session | None = None
        """The session of the caller's enqueues, which makes a resend harmless."""
        self.presence = Presence()
        self.subscribers: dict[int, Subscriber] = {}
        """The caller's subscriptions, by the number that it chose."""
        self.pulls: dict[Subscriber, None] = {}
        """The caller's pulls that are not answered yet."""
        self.others: list[Subscriber] = []
        """Ended pulls and subscriptions that may have deliveries in flight."""
        self._others_max = OTHERS_MIN

    def close(self) -> None:
        """Forget the caller's sinks. A connection and its caller must not hold each other: what was
        read and not understood yet would stay until the next collection of garbage, which may never
        come in a daemon that has little to do."""
        self.is_open = False
        self.replies = _NOBODY
        self.audited = None

    @property
    def label(self) -> str:
        """The name and address to which failed attempts are put down."""
        return f"{self.name} {self.address}".strip()

    def death(self, how: str) -> str:
        """What is known of an end that nobody meant, with ``how`` from the transport; "": a
        goodbye."""
        if self.has_left:
            return ""
        host, pid, _ = self.process
        named = [f"process {pid}"] if pid is not None else []
        named += [f"on {host[:HOST_SHOWN_MAX]}"] if host else []
        return how if not named else f"{' '.join(named)}: {how}"

    @property
    def consumers(self) -> tuple[Subscriber, ...]:
        """All subscribers of the caller that may get deliveries, or have some in flight."""
        return (*self.subscribers.values(), *self.pulls, *self.others)

    def remember(self, subscriber: Subscriber) -> None:
        """Keep a subscriber that gets no more deliveries but may hold leases."""
        if len(self.others) >= self._others_max:
            self.others = [s for s in self.others if s.outstanding > 0]
            # Each is looked at a bounded number of times, however many stay.
            self._others_max = max(OTHERS_MIN, 2 * len(self.others))
        self.others.append(subscriber)

    def answer(self, request: int, value: object) -> None:
        """Answer at once, with a value that rests on nothing that the store has to keep."""
        self.replies.give(self.replies.answer_to(request, value))
        self.replies.flush()

    def refuse(self, request: int, error: TickwheelError) -> None:
        """Answer with an error at once."""
        self.replies.error(request, error.code, error.message)
        self.replies.flush()


class Ask(NamedTuple, Generic[R]):
    """One request for an operation: who asks, the number to answer with, and what, checked."""

    caller: Caller
    number: int
    request: R
    now: Now
    """When the request came."""
    only: Only | None = None
    """The topics that the caller may touch: anything else is as if it were not there. None: all."""

    def answer(self, value: object) -> None:
        """Answer at once, with a value that rests on nothing that the store has to keep."""
        self.caller.answer(self.number, value)

    def refuse(self, error: TickwheelError) -> None:
        """Answer with an error at once."""
        self.caller.refuse(self.number, error)
