"""A client's search for its daemon among several addresses.

``Search`` decides which address to try when; its creator passes the function that connects. It
knows no frames. Invariants:

* Addresses are tried one after the other, and concurrently when one does not answer soon ("Happy
  Eyeballs", RFC 8305): an address that accepts connections and never answers, such as a stopped
  process, delays no other. The first daemon that answers as active is chosen, and all other
  attempts are closed before anything else is written. An attempt outlasts its round. At most
  ``ATTEMPTS_MAX`` attempts run, plus one repetition: another connection to the first address of a
  round.
* A daemon that hands its shard over can name its successor. The successor alone is tried while it
is
  a standby, for at most ``HANDOVER_S``; meanwhile the address of the old daemon comes last.
* A round tries each address at most once and follows few hints, so that standbys that name each
  other, or always new addresses, end in a pause. Hints add to the list and never replace it: a
  wrong hint costs one attempt. A silent address comes last for a while.
* While a daemon says that it does not lead, another is about to. Pauses are then short for as long
  as a lease can take to end.
* A client of several shards asks its ``Route`` for the list in every round, because shards move.
* ``ReplacementSearch`` searches while a connection is open. All such searches of a client share one
  budget of requests and start at different moments.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from tickwheel.client.connection import (
    LOGGER,
    Address,
    Connection,
    address_text,
    is_secure,
    parse_url,
)
from tickwheel.errors import (
    BadRequest,
    ClientClosed,
    Draining,
    NotActive,
    TickwheelError,
    Unreachable,
)


class Seen:
    """Recent results of attempts at addresses, shared by all connections of a client."""

    def __init__(self) -> None:
        self.silent_until_s: dict[Address, float] = {}
        """Silent address → time until which it comes after all others."""
        self.redirected_s: dict[Address, float] = {}
        """Address → last time that its daemon redirected a search, and so named all shards."""
        self.probed_s: dict[Address, float] = {}
        """Address → last time that a search beside a connection tried it."""
        self.nodes: dict[int, str] = {}
        """Shard → name of its connected daemon."""
        self.unleased: set[int] = set()
        """Connected shards with daemons that report the end of their leases."""

    @property
    def store_is_away(self) -> bool:
        """Whether daemons of several nodes have lost the store and no daemon is known that reaches
        it: then no single node was cut off."""
        named = {self.nodes[shard] for shard in self.unleased}
        return len(named) > 1 and len(self.unleased) == len(self.nodes)


class Route(Protocol):
    """The known addresses of one shard, which change while the client is open."""

    shard: int
    seen: Seen

    def addresses(self) -> Sequence[Address]:
        """Return the addresses to try for the shard, the likeliest first."""

    def learn(self, info: Mapping[str, Any]) -> None:
        """Store the addresses of shards in an answer to HELLO."""

    def connected_at(self, at: Address | None) -> None:
        """Store the address of the connection; None: the connection has ended."""


class Configured:
    """The ``Route`` to a daemon without shards: the client's configured addresses."""

    shard = 0

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self.seen = Seen()

    def addresses(self) -> Sequence[Address]:
        return self._addresses

    def learn(self, info: Mapping[str, Any]) -> None:
        """Do nothing: the answer to HELLO names no other address."""

    def connected_at(self, at: Address | None) -> None:
        """Do nothing: the list does not change."""


BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 5.0
STANDBY_BACKOFF_S_MAX = 1.0
"""Maximum seconds before a standby is asked again: it may take over soon."""
HANDOVER_S = 1.0
"""Seconds after a good connection has ended in which a standby is expected to take over at any
moment, because the old daemon has handed over."""
HANDOVER_BACKOFF_S_MAX = 0.1
"""Maximum seconds of a pause within ``HANDOVER_S``."""
TAKEOVER_BACKOFF_S_MAX = 0.2
"""Maximum seconds of a pause within ``connect_timeout``: the old daemon may have died, and its
lease has to end first."""
ATTEMPT_S_MAX = 2.0
"""Maximum seconds for one of several addresses to answer."""
APART_S = 0.25
"""Seconds without an answer after which the next address, or the same one again, is tried
concurrently."""
ATTEMPTS_MAX = 6
"""Maximum addresses that are tried concurrently."""
SLOW_ADDRESSES = 4
"""Addresses of a route that fit into ``connect_timeout`` even if each takes its full time."""
SILENT_S = 3.0
"""Seconds for which a silent address comes after all others."""
HINTS_MAX = 8
"""Maximum addresses outside the list that one round tries."""
INFORMANTS_MAX = 3
"""Maximum daemons that redirected in vain and are asked again in a round."""
INFORMED_S = 0.05
"""Seconds for which a redirection of another connection of the client counts towards
``INFORMANTS_MAX``."""
NOWHERE = frozenset(("0.0.0.0", "::"))  # noqa: S104  # to refuse them
"""Listening addresses that other hosts cannot connect to."""


class Greeted(NamedTuple):
    """A connection with a daemon that has answered HELLO as active for the shard."""

    connection: Connection
    info: dict[str, Any]


Attempt = Callable[[Address, float], Coroutine[Any, Any, Greeted]]


class Standby(NotActive):
    """The answer of a standby, with the address of the active daemon if it names one."""

    def __init__(self, message: str, active: Address | None) -> None:
        super().__init__(message)
        self.active = active


class Elsewhere(Unreachable):
    """The answer of a daemon without the requested shard, with the address of the daemon that has
    it if it names one."""

    def __init__(self, message: str, active: Address | None) -> None:
        super().__init__(message)
        self.active = active


class Silent(Unreachable):
    """A daemon did not answer in time."""


Redirect = (Standby, Elsewhere)
"""Errors of daemons that answer and may name others."""


def standby(
    info: dict[str, Any], *, secure: bool = False, shard: int | None = None
) -> Standby | Elsewhere | None:
    """Return the error for an answer to HELLO by a standby or by a daemon without ``shard``. None:
    the daemon is active; so is a daemon that reports no role. ``secure``: whether this client uses
    TLS, which an address in the answer must use as well."""
    role = info.get("role", "active")
    if role == "active":
        return None
    active = address_named(info.get("active"), secure=secure)
    if shard is not None and info.get("shard") != shard:
        hint = f"try {address_text(active)}" if active else "no other daemon known"
        return Elsewhere(f"it does not have shard {shard}; {hint}", active)
    hint = f"active: {address_text(active)}" if active else "no active daemon known"
    return Standby(f"{role!s:.20}; {hint}", active)


def address_named(value: Any, *, secure: bool) -> Address | None:
    """Parse an address that a daemon names; None if it is missing or unusable. ``secure`` is as in
    ``standby``."""
    with suppress(BadRequest):
        address = parse_url(value)[0]
        # An address without TLS is unusable for a client with TLS: the token would be sent in plain
        # text.
        return None if address[0] in NOWHERE or is_secure(value) != secure else address
    return None


def _close(attempt: asyncio.Task[Greeted]) -> None:
    """Close the connection of an attempt that was not chosen."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().connection.abort(ClientClosed("another daemon was chosen"))


class _Attempt(NamedTuple):
    """A running attempt at an address."""

    address: Address
    task: asyncio.Task[Greeted]
    since_s: float
    is_second: bool
    """Whether another attempt at this address was running when it started."""


class Search:
    """A client's search through its addresses, one ``find`` at a time."""

    def __init__(
        self,
        addresses: Sequence[Address],
        attempt: Attempt,
        choose: Callable[[Greeted], None],
        connect_timeout_s: float,
    ) -> None:
        """``choose`` accepts the daemon that was found, or raises a TickwheelError."""
        self._addresses = list(dict.fromkeys(addresses))
        self._attempt, self._choose = attempt, choose
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._first = 0
        """The index of the first address in the next round."""
        self.at: Address | None = None
        """The address of the last connection."""
        self.route: Route | None = None
        """The source of the list in each round, if any."""
        self._seen = Seen()
        self._failures: dict[Address, TickwheelError] = {}
        """Each address's error since the last connection."""
        self._running: list[_Attempt] = []
        """Running attempts, the newest last."""
        self._tried: set[Address] = set()
        """The addresses that this round has tried, or that were being tried when it began."""
        self._is_idle = True
        """Whether this round has tried no address."""
        self._hints: deque[Address] = deque()
        """Addresses that daemons have named and that are still to be tried."""
        self.backoff_s = BACKOFF_S_MIN
        """Maximum seconds of the next pause."""
        self._was_active = False
        self._left: Address | None = None
        """The address of the daemon that has given up the shard."""
        self._successor: Address | None = None
        """The successor that this daemon has named, while it alone is tried."""
        self._successor_until_s = 0.0
        """When ``_left`` and ``_successor`` expire."""
        self._handover_until_s = 0.0
        self._takeover_until_s = self._loop.time() + connect_timeout_s

    def follow(self, route: Route) -> None:
        """Search for the shard of this route from now on."""
        self.route, self._seen = route, route.seen

    async def find(self) -> Connection:
        """Search for an active daemon, in rounds with growing pauses.

        Raise the last address's error if all addresses refuse permanently and none was ever
        active.
        """
        connection: Connection | None = None
        try:
            while connection is None:
                connection = await self._round() or await self._rest()
            self._was_active = True
            self._failures.clear()
        finally:
            try:
                await self._cancel_attempts()
            except asyncio.CancelledError:
                if connection is not None:
                    connection.abort(ClientClosed())
                raise
        return connection

    def ended(
        self, error: TickwheelError, *, silent: bool, steady: bool, successor: Address | None = None
    ) -> None:
        """Record that the connection has ended, so that the next search begins with another
        address. ``successor``: the address that its daemon named."""
        at, self.at = self.at, None
        if at is None:
            return
        self._left = at if isinstance(error, (Draining, NotActive)) else None
        self._successor, self._successor_until_s = successor, self._loop.time() + HANDOVER_S
        self._failures[at] = error
        if silent:
            self._mark_silent(at)
        if at in self._addresses:
            self._first = (self._addresses.index(at) + 1) % len(self._addresses)
        if steady:
            self.backoff_s = BACKOFF_S_MIN
            now_s = self._loop.time()
            self._handover_until_s = now_s + HANDOVER_S
            self._takeover_until_s = now_s + self._connect_timeout_s

    async def pause(self) -> None:
        """Sleep for a growing time with jitter."""
        await asyncio.sleep(self._pause_s())

    def _pause_s(self) -> float:
        limit_s = self._backoff_s_max()
        pause_s = min(self.backoff_s, limit_s) * random.uniform(0.5, 1.0)
        self.backoff_s = min(self.backoff_s * 2, limit_s)
        return pause_s

    def _backoff_s_max(self) -> float:
        if not self.any_standby:
            return BACKOFF_S_MAX
        now_s = self._loop.time()
        if now_s < self._handover_until_s:
            return HANDOVER_BACKOFF_S_MAX
        return TAKEOVER_BACKOFF_S_MAX if now_s < self._takeover_until_s else STANDBY_BACKOFF_S_MAX

    def failure(self, waited_s: float) -> TickwheelError:
        """Return the error for no connection, with each address's error."""
        addresses = dict.fromkeys((*self._addresses, *self._failures))
        details = "; ".join(
            f"{address_text(address)}: {self._report(address)}" for address in addresses
        )
        shard = "" if self.route is None else f" of shard {self.route.shard}"
        if any(isinstance(error, NotActive) for error in self._failures.values()):
            return NotActive(f"no active daemon{shard} within {waited_s:g} s: {details}")
        return Unreachable(f"no daemon{shard} within {waited_s:g} s: {details}")

    @property
    def any_standby(self) -> bool:
        """Whether a daemon was found that does not lead, or does not have the shard."""
        return any(isinstance(error, (NotActive, Elsewhere)) for error in self._failures.values())

    def _report(self, address: Address) -> str:
        error = self._failures.get(address)
        if error is None:
            return "no answer yet"
        is_plain = isinstance(error, (NotActive, Unreachable))
        return error.message if is_plain else f"{error.code}: {error.message}"

    # --- one round ------------------------------------------------------------------------------

    async def _round(self) -> Connection | None:
        """Try each address once, and the hints of standbys. Return the connection to an active
        daemon, if any. Slow attempts outlast the round."""
        successor = self._only_successor()
        waiting = self._list() if successor is None else deque((successor,))
        self._tried, self._is_idle = {attempt.address for attempt in self._running}, True
        if waiting and self._may_repeat(waiting[0]):
            self._try(waiting.popleft())
        while True:
            self._follow_hints(waiting)
            while waiting and waiting[0] in self._tried:
                waiting.popleft()
            head_start_s = self._head_start_s()
            if head_start_s > 0:
                connection = await self._wait(head_start_s)
            elif not waiting:
                break
            elif sum(not attempt.is_second for attempt in self._running) < ATTEMPTS_MAX:
                self._try(waiting.popleft())
                continue
            else:
                connection = await self._wait(None)
            if connection is not None:
                return connection
        known = self._tried.union(self._addresses)
        self._failures = {a: e for a, e in self._failures.items() if a in known}
        self._raise_permanent()
        return None

    async def _rest(self) -> Connection | None:
        """Pause after a round. If it had nothing to try, because every address is being tried, wait
        for an attempt to end. Return the connection, if an earlier attempt has made one."""
        waits = self._is_idle and bool(self._running)
        until_s = self._loop.time() + (0.0 if waits else self._pause_s())
        while waits or self._loop.time() < until_s:
            connection = await self._wait(None if waits else until_s - self._loop.time())
            if connection is not None:
                return connection
            self._raise_permanent()
            waits = False
        return None

    def _only_successor(self) -> Address | None:
        """Return the successor if it alone is to be tried: it was named recently, and has failed
        only as a standby since."""
        if self._loop.time() > self._successor_until_s:
            self._successor = self._left = None
        error = None if self._successor is None else self._failures.get(self._successor)
        is_running = any(attempt.address == self._successor for attempt in self._running)
        if is_running or not (error is None or isinstance(error, NotActive)):
            self._successor = None
        return self._successor

    def _list(self) -> deque[Address]:
        """Return the addresses of a round in order."""
        if self.route is not None:
            self._addresses, self._first = list(dict.fromkeys(self.route.addresses())), 0
        order = self._addresses[self._first :] + self._addresses[: self._first]
        now_s = self._loop.time()
        silent, redirected = self._seen.silent_until_s, self._seen.redirected_s
        for address in [a for a, until_s in silent.items() if until_s <= now_s]:
            del silent[address]
        for address in [
            a for a, at_s in redirected.items() if at_s < now_s - self._connect_timeout_s
        ]:
            del redirected[address]
        if self.route is not None:
            uninformed = [a for a in order[1:] if isinstance(self._failures.get(a), Elsewhere)]
            uninformed.sort(key=lambda address: redirected.get(address, 0.0))
            fresh = sum(now_s - at_s < INFORMED_S for at_s in redirected.values())
            spared = set(uninformed[max(INFORMANTS_MAX - fresh, 0) :])
            order = [address for address in order if address not in spared]
        left = self._left if self.route is not None else None
        return deque(sorted(order, key=lambda address: (address == left, address in silent)))

    def _follow_hints(self, waiting: deque[Address]) -> None:
        for hint in self._hints:
            if hint in self._seen.silent_until_s:
                waiting.append(hint)
            else:
                waiting.appendleft(hint)
        self._hints.clear()

    def _raise_permanent(self) -> None:
        errors = [self._failures[a] for a in self._addresses if a in self._failures]
        are_all = 0 < len(errors) == len(self._addresses)
        if are_all and not self._was_active and not any(error.retryable for error in errors):
            raise errors[-1]

    # --- attempts -------------------------------------------------------------------------------

    def _head_start_s(self) -> float:
        """Return the seconds before another attempt may start beside the newest."""
        newest = next((a for a in reversed(self._running) if not a.is_second), None)
        return 0.0 if newest is None else newest.since_s + APART_S - self._loop.time()

    def _may_repeat(self, address: Address) -> bool:
        """Return whether an attempt at this address has been silent so long that another connection
        may be answered sooner. Only one such repetition runs at a time."""
        if any(attempt.is_second for attempt in self._running):
            return False
        silent_s = self._loop.time() - APART_S
        return any(a.address == address and a.since_s <= silent_s for a in self._running)

    def _try(self, address: Address) -> None:
        self._tried.add(address)
        self._is_idle = False
        is_second = any(attempt.address == address for attempt in self._running)
        task = self._loop.create_task(self._attempt(address, self._patience_s(address)))
        self._running.append(_Attempt(address, task, self._loop.time(), is_second))

    async def _wait(self, timeout_s: float | None) -> Connection | None:
        """Wait until an attempt has ended, at most ``timeout_s``. Return its connection, if any."""
        if not self._running:
            await asyncio.sleep(timeout_s or 0.0)
            return None
        tasks = [attempt.task for attempt in self._running]
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for attempt in list(self._running):
            if attempt.task.done():
                self._running.remove(attempt)
                try:
                    greeted = attempt.task.result()
                    self._choose(greeted)
                except TickwheelError as error:
                    self._note(attempt.address, error)
                else:
                    self.at = attempt.address
                    return greeted.connection
        return None

    async def _cancel_attempts(self) -> None:
        """Cancel all running attempts, and close connections that came too late."""
        tasks = [attempt.task for attempt in self._running]
        self._running.clear()
        self._hints.clear()
        for task in tasks:
            task.add_done_callback(_close)  # even if this coroutine is cancelled
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_worth_trying(self, hint: Address) -> bool:
        extra = len(self._tried.difference(self._addresses))
        return hint not in self._tried and (hint in self._addresses or extra < HINTS_MAX)

    def _patience_s(self, address: Address) -> float:
        """Return the seconds that an address may take, so that a silent one leaves time for
        others."""
        if self._addresses == [address]:
            return self._connect_timeout_s
        count = len(self._addresses)
        if self.route is not None:
            count = min(count, SLOW_ADDRESSES)
        return min(ATTEMPT_S_MAX, self._connect_timeout_s / count)

    def _note(self, address: Address, error: TickwheelError) -> None:
        previous = self._failures.get(address)
        self._failures[address] = error
        if isinstance(error, Silent):
            self._mark_silent(address)
        else:
            self._seen.silent_until_s.pop(address, None)
        if isinstance(error, Elsewhere):
            self._seen.redirected_s[address] = self._loop.time()
        hint = error.active if isinstance(error, Redirect) else None
        if isinstance(error, Standby) and hint == self._left:
            hint = None  # it does not know yet that it is about to take over from that daemon
        if hint is not None and self._is_worth_trying(hint):
            self._hints.append(hint)
        if not error.retryable and (previous is None or previous.code != error.code):
            LOGGER.warning("%s: %s: %s", address_text(address), error.code, error.message)

    def _mark_silent(self, address: Address) -> None:
        self._seen.silent_until_s[address] = self._loop.time() + SILENT_S


# --- beside an open connection -------------------------------------------------------------------


BESIDE_START_S = 0.5
"""Maximum seconds before a search beside a connection starts. The delay is random, because all
clients of a daemon are notified at once."""
BESIDE_SOON_S = 3.0
"""Seconds of a search beside a connection with pauses as short as for a takeover, which happens
soon or not at all."""
BESIDE_BACKOFF_S_MAX = 1.0
"""Maximum seconds of later pauses, and of all pauses while the store is away for all nodes."""
BESIDE_PROBES_MAX = 2
"""Maximum addresses that all searches of a client together try within one longest pause."""


class ReplacementSearch(Search):
    """The search for the next daemon of a shard while the connection to the current one, whose
    lease has ended, is still open. It tries much less than a search without a connection: if the
    store is away for all nodes, there is no daemon to find."""

    def __init__(
        self,
        current: Address | None,
        route: Route,
        attempt: Attempt,
        choose: Callable[[Greeted], None],
        connect_timeout_s: float,
    ) -> None:
        """``current``: the address of the open connection, which is not tried."""
        super().__init__((), attempt, choose, connect_timeout_s)
        self._current = current
        self._soon_until_s = self._loop.time() + BESIDE_SOON_S
        self._was_active = True
        self.follow(route)

    async def find(self) -> Connection:
        await asyncio.sleep(random.uniform(0.0, BESIDE_START_S))
        return await super().find()

    def _backoff_s_max(self) -> float:
        soon = self._loop.time() < self._soon_until_s and not self._seen.store_is_away
        return TAKEOVER_BACKOFF_S_MAX if soon else BESIDE_BACKOFF_S_MAX

    def _list(self) -> deque[Address]:
        """Return the address in the newest route, unless it is the current one, and the addresses
        that were tried longest ago."""
        assert self.route is not None, "set by the constructor"
        known = list(dict.fromkeys(self.route.addresses()))
        self._addresses = [address for address in known if address != self._current]
        named = [address for address in known[:1] if address != self._current]
        now_s, window_s, probed_s = self._loop.time(), self._backoff_s_max(), self._seen.probed_s
        for address in [a for a, at_s in probed_s.items() if at_s < now_s - BESIDE_BACKOFF_S_MAX]:
            del probed_s[address]
        silent = self._seen.silent_until_s
        for address in [a for a, until_s in silent.items() if until_s <= now_s]:
            del silent[address]
        most = 1 if self._seen.store_is_away else BESIDE_PROBES_MAX
        fresh = sum(now_s - at_s < window_s for at_s in probed_s.values())
        rest = [address for address in self._addresses if address not in named]
        rest.sort(key=lambda address: (address in silent, probed_s.get(address, 0.0)))
        return deque((*named, *rest[: max(most - fresh, 0)]))

    async def _rest(self) -> Connection | None:
        self._is_idle = False  # other searches used up the budget; no attempt is running
        return await super()._rest()

    def _try(self, address: Address) -> None:
        self._seen.probed_s[address] = self._loop.time()
        super()._try(address)

    def _may_repeat(self, address: Address) -> bool:
        return False

    def _is_worth_trying(self, hint: Address) -> bool:
        return hint != self._current and super()._is_worth_trying(hint)
