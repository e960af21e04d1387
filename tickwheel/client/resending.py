"""Sending again: what waits for the next chance to be sent, and what pauses before its next try.

Enqueues, acks and calls differ in what a number means and when a failure is final; how they wait
is the same. A request waits for the next step of the loop, or, without a connection, for the next
one. One that the daemon refused for now pauses first, longer with each try. Knows no frame's
meaning. Invariant: a request is in one place only, waiting, pausing or under way.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from tickwheel.client.connection import Request

if TYPE_CHECKING:
    from tickwheel.client.reconnector import Reconnector
    from tickwheel.errors import TickwheelError

RETRY_S = 0.1
RETRY_S_MAX = 2.0


def retry_pause_s(tries: int) -> float:
    """Seconds before the next try of a request that was refused ``tries`` times."""
    return min(RETRY_S_MAX, RETRY_S * 2.0 ** min(tries, 8)) * random.uniform(0.5, 1.0)


class Resendable(Request):
    """A request that may be sent more than once."""

    __slots__ = ("began_s", "refusal", "sent", "tries")

    def __init__(self, began_s: float, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.began_s = began_s
        self.sent = 0
        """How often it was sent, not counting daemons that said they were not active."""
        self.tries = 0
        """How often it was refused for now."""
        self.refusal: TickwheelError | None = None
        """The error of the last try, while it is certain that nothing was done."""

    def overdue(self, reconnector: Reconnector, what: str) -> TickwheelError:
        """The error for a request whose time is over without an answer."""
        waited_s = round(reconnector.loop.time() - self.began_s, 1)
        return self.refusal or reconnector.overdue(what, waited_s, written=self.sent > 0)


R = TypeVar("R", bound=Resendable)


class Pauses(Generic[R]):
    """Requests that pause; each goes to ``resume`` when its pause is over."""

    def __init__(self, reconnector: Reconnector, resume: Callable[[R], None]) -> None:
        self._reconnector = reconnector
        self._resume = resume
        self._pausing: set[R] = set()

    def begin(self, request: R) -> None:
        self._pausing.add(request)
        pause_s = retry_pause_s(request.tries)
        self._reconnector.loop.call_later(pause_s, self._over, request)
        request.tries += 1

    def forget(self, request: R) -> None:
        """Stop the pause of a request that has its outcome, if it pauses."""
        self._pausing.discard(request)

    def clear(self) -> None:
        self._pausing.clear()

    def __contains__(self, request: R) -> bool:
        return request in self._pausing

    def __iter__(self) -> Iterator[R]:
        return iter(self._pausing)

    def _over(self, request: R) -> None:
        if request in self._pausing:
            self._pausing.discard(request)
            self._resume(request)


class Outbox(Generic[R]):
    """Requests in the order in which they go out, and those that pause before that."""

    def __init__(self, reconnector: Reconnector) -> None:
        self._reconnector = reconnector
        self._waiting: deque[R] = deque()
        self._pauses: Pauses[R] = Pauses(reconnector, self.add)

    def add(self, request: R) -> None:
        """Send a request with the next step of the loop, or on the next connection."""
        self._waiting.append(request)
        self._reconnector.wake()

    def extend(self, requests: Iterable[R]) -> None:
        """``add`` many requests while the sources write: nothing has to be woken."""
        self._waiting.extend(requests)

    def add_again(self, request: R) -> None:
        """Send a request again whose try does not count: the daemon stands by, and did nothing."""
        request.sent -= 1
        self.add(request)

    def pause(self, request: R, refusal: TickwheelError) -> None:
        """Send a request again after a pause, because it was refused for now."""
        request.refusal = refusal
        self._pauses.begin(request)

    def forget(self, request: R) -> None:
        """Forget a request that has its outcome; if it waits, it is passed over."""
        self._pauses.forget(request)

    def take(self) -> Iterator[R]:
        """Remove the waiting requests, oldest first."""
        while self._waiting:
            yield self._waiting.popleft()

    def take_overdue(self, now_s: float) -> list[R]:
        """Remove and return the requests that wait or pause and have no time left."""
        over = [r for r in (*self._waiting, *self._pauses) if r.deadline_s <= now_s]
        if over:
            self._waiting = deque(r for r in self._waiting if r.deadline_s > now_s)
        for request in over:
            self._pauses.forget(request)
        return over

    def take_all(self) -> list[R]:
        """Remove and return all requests: nothing will be sent any more."""
        found = [*self._waiting, *self._pauses]
        self._waiting.clear()
        self._pauses.clear()
        return found
