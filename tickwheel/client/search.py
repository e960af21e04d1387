"""A client's search for the daemon of a shard among several addresses.

``ShardAddresses`` has the known addresses of all shards; a ``Finder`` decides which of them to try
when, and its creator passes the function that connects. Neither knows about frames. Invariants:

* Addresses are tried one after the other, and concurrently when one does not answer soon ("Happy
  Eyeballs", RFC 8305): an address that accepts connections and never answers, such as a stopped
  process, delays no other. The first daemon that answers as active is chosen, and all other
  attempts are closed before anything else is written. An attempt can outlast its round. At most
  ``ATTEMPTS_MAX`` attempts run, plus one repetition: another connection to the first address of a
  round.
* A daemon that hands its shard over can name its successor. While the successor is a standby, it
  alone is tried, for at most ``HANDOVER_S``. If it fails in another way, all addresses are
  tried, that of the old daemon last.
* A round tries each address at most once and follows few hints, so that it ends in a pause even if
  standbys name each other or keep naming new addresses. Hints add to the list and never replace it:
  a wrong hint costs one attempt. A silent address comes last for a while.
* While a daemon answers that it does not lead, another will probably lead soon. Pauses are then
  short for as long as a lease can take to end.
* The finder of one of several shards asks ``ShardAddresses`` for the list in every round, because
  shards move.
* All finders of a client that search while a connection is open share one budget of requests and
  start at different moments.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

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

OTHERS_MAX = 8
"""Maximum addresses of other shards that one round of a search for a shard tries."""


class ShardAddresses:
    """The known addresses of all shards' daemons, from answers to HELLO and open connections, and
    recent results of attempts at them. A wrong address costs attempts, nothing else."""

    def __init__(self, count: int, configured: Sequence[Address], *, secure: bool) -> None:
        """``count``: the number of shards. ``configured``: the client's own addresses, the only
        ones for a single shard. ``secure``: whether the client uses TLS; addresses of the
        other kind are ignored."""
        self._configured, self._secure = configured, secure
        self.is_many = count > 1
        """Whether there are several shards."""
        self._named: list[Address | None] = [None] * count
        """The address of each shard's daemon; None: no daemon is known to serve it."""
        self._version = 0
        self._doors: list[Address] = []
        """The front doors of nodes. A door is open while its node runs, whatever shards it
        leads."""
        self._connected: dict[int, Address] = {}
        """Shard → address of its open connection."""
        self._last: dict[int, Address] = {}
        """Shard → address of its last connection, which may be newer than the announced one."""
        self.silent_until_s: dict[Address, float] = {}
        """Silent address → time until which it comes after all others."""
        self.redirected_s: dict[Address, float] = {}
        """Address → last time that its daemon redirected a search, and so named all shards."""
        self.probed_s: dict[Address, float] = {}
        """Address → last time that a search beside a connection tried it."""
        self.nodes: dict[int, str] = {}
        """Shard → name of its connected daemon."""
        self.unleased: set[int] = set()
        """Connected shards whose daemons have reported that they no longer hold the lease."""

    @property
    def store_is_away(self) -> bool:
        """Whether daemons of several nodes have lost the store and no daemon is known that reaches
        it: then the store itself is unreachable, not just one node cut off from it."""
        named = {self.nodes[shard] for shard in self.unleased}
        return len(named) > 1 and len(self.unleased) == len(self.nodes)

    def learn(self, info: Mapping[str, Any]) -> None:
        """Store the addresses of an answer to HELLO, unless newer ones are known."""
        urls, version = info.get("shards"), info.get("route_version", 0)
        is_route = isinstance(urls, (list, tuple)) and len(urls) == len(self._named)
        if is_route and type(version) is int and version >= self._version:
            is_newer, self._version = version > self._version, version
            previous, self._named = self._named, [self._address(url) for url in urls or ()]
            for address in set(filter(None, self._named)).difference(previous) if is_newer else ():
                self.silent_until_s.pop(address, None)  # its silence is out of date
            doors = info.get("doors")
            if isinstance(doors, (list, tuple)):
                self._doors = [*filter(None, map(self._address, doors[:OTHERS_MAX]))]

    def _address(self, url: Any) -> Address | None:
        if not isinstance(url, str) or not url:
            return None
        with suppress(BadRequest):
            return parse_url(url)[0] if is_secure(url) == self._secure else None
        return None

    def connected_at(self, shard: int, at: Address | None, node: str = "") -> None:
        """Store the address of the connection to a shard, and the name of its daemon; None: the
        connection has ended."""
        self._connected.pop(shard, None)
        self.nodes.pop(shard, None)
        self.unleased.discard(shard)
        if at is not None:
            self._connected[shard] = self._last[shard] = at
            self.nodes[shard] = node

    def around(self, shard: int) -> Sequence[Address]:
        """Return the addresses to try for a shard: its own, the configured ones, those of connected
        daemons, the doors of nodes, and those of other shards' daemons. The first address of each
        host comes before a second one."""
        if not self.is_many:
            return self._configured
        own = (self._named[shard], self._last.get(shard))
        first = dict.fromkeys((*filter(None, own), *self._configured))
        others = dict.fromkeys(
            (*self._connected.values(), *self._doors, *filter(None, self._named))
        )
        hosts: Counter[str] = Counter()
        ranked: list[tuple[int, int, Address]] = []
        for index, address in enumerate(other for other in others if other not in first):
            ranked.append((hosts[address[0]], index, address))
            hosts[address[0]] += 1
        return [*first, *(address for _, _, address in sorted(ranked)[:OTHERS_MAX])]


BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 5.0
STANDBY_BACKOFF_S_MAX = 1.0
"""Maximum seconds before a standby is asked again: it may take over soon."""
HANDOVER_S = 1.0
"""For this many seconds after the end of a good connection, a standby is expected to take over at
any moment, because the old daemon may have handed over."""
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
REDIRECTING_MAX = 3
"""Maximum daemons without the shard that a round asks again."""
REDIRECTED_S = 0.05
"""Seconds for which a redirection of any search of the client counts towards
``REDIRECTING_MAX``."""
BESIDE_START_S = 0.5
"""Maximum seconds before a search beside a connection starts. The delay is random, because all
clients of a daemon are notified at once."""
BESIDE_SOON_S = 3.0
"""Seconds at the start of a search beside a connection in which pauses are as short as for a
takeover, which happens soon or not at all."""
BESIDE_BACKOFF_S_MAX = 1.0
"""Maximum seconds of later pauses, and of all pauses while the store is away for all nodes."""
BESIDE_PROBES_MAX = 2
"""Maximum addresses that all searches of a client beside connections together try within a pause of
the current maximum length."""
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
    """The answer of a daemon without the requested shard. ``active``: the daemon that has it, if
    the answer names one."""

    def __init__(self, message: str, active: Address | None) -> None:
        super().__init__(message)
        self.active = active


class Silent(Unreachable):
    """A daemon did not answer in time."""


Redirect = (Standby, Elsewhere)
"""Errors of daemons that answer and may name others."""


def redirect_error(
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


def _expire(times_s: dict[Address, float], until_s: float) -> None:
    """Remove the addresses with times up to ``until_s``."""
    for address in [address for address, time_s in times_s.items() if time_s <= until_s]:
        del times_s[address]


class _Attempt(NamedTuple):
    """A running attempt at an address."""

    address: Address
    task: asyncio.Task[Greeted]
    since_s: float
    is_second: bool
    """Whether another attempt at this address was running when it started."""


class Finder:
    """The search for the active daemon of one shard, one ``find`` at a time.

    State      Event                                              Next state
    ---------  -------------------------------------------------  ---------------------------
    searching  a daemon answers as active                         connected
               a daemon names another                             searching, that one first
               an address is quiet for ``APART_S``                searching, the next as well
               all addresses refuse for good, and none ever led   closed: ``find`` raises
               all addresses were tried                           resting
    resting    an earlier attempt answers as active               connected
               the pause is over                                  searching
    connected  the connection ends                                searching, the next one first
               the daemon names its successor and leaves          following
               the daemon's lease ends                            doubting
    following  the successor answers as active                    connected
               the successor stands by                            resting, then following
               it fails otherwise, or ``HANDOVER_S`` is over      searching
    doubting   the daemon holds its lease again                   connected
               another daemon answers with a later epoch          connected to that one
               another daemon answers with an earlier epoch       doubting
               the connection ends                                searching

    A finder that is ``beside`` a connection is doubting. It is a separate object, so that the
    search after the end of the connection starts afresh. It tries much less than a search
    without a connection: if the store is away for all nodes, there is no daemon to find.
    """

    def __init__(
        self,
        shard_addresses: ShardAddresses,
        shard: int,
        attempt: Attempt,
        choose: Callable[[Greeted], None],
        connect_timeout_s: float,
        *,
        beside: Address | None = None,
    ) -> None:
        """``choose`` accepts the daemon that was found, or raises a TickwheelError. ``beside``: the
        address of the open connection, which is not tried."""
        self.shard_addresses, self.shard = shard_addresses, shard
        self._attempt, self._choose = attempt, choose
        self._connect_timeout_s = connect_timeout_s
        self._beside = beside
        self._loop = asyncio.get_running_loop()
        self._addresses: list[Address] = list(dict.fromkeys(shard_addresses.around(shard)))
        self._first = 0
        """The index of the first address in the next round; always 0 with several shards, where the
        shard's own address comes first."""
        self.at: Address | None = None
        """The address of the open connection, or of the daemon that ``find`` has chosen."""
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
        self._was_active = beside is not None
        self._resigned: Address | None = None
        """The address of the daemon that has given up the shard."""
        self._successor: Address | None = None
        """The successor that the last daemon has named, while only this successor is tried."""
        self._successor_until_s = 0.0
        """When ``_resigned`` and ``_successor`` expire."""
        self._handover_until_s = 0.0
        self._takeover_until_s = self._loop.time() + connect_timeout_s
        self._soon_until_s = self._loop.time() + BESIDE_SOON_S

    async def find(self) -> Connection:
        """Search for an active daemon, in rounds with growing pauses.

        Raise the last address's error if all addresses refuse permanently and none was ever
        active.
        """
        if self._beside is not None:
            await asyncio.sleep(random.uniform(0.0, BESIDE_START_S))
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
        self._resigned = at if isinstance(error, (Draining, NotActive)) else None
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
        now_s = self._loop.time()
        if self._beside is not None:
            is_soon = now_s < self._soon_until_s and not self.shard_addresses.store_is_away
            return TAKEOVER_BACKOFF_S_MAX if is_soon else BESIDE_BACKOFF_S_MAX
        if not self.any_redirect:
            return BACKOFF_S_MAX
        if now_s < self._handover_until_s:
            return HANDOVER_BACKOFF_S_MAX
        return TAKEOVER_BACKOFF_S_MAX if now_s < self._takeover_until_s else STANDBY_BACKOFF_S_MAX

    def failure(self, waited_s: float) -> TickwheelError:
        """Return the error for no connection after ``waited_s``, with each address's error."""
        addresses = dict.fromkeys((*self._addresses, *self._failures))
        details = "; ".join(
            f"{address_text(address)}: {self._report(address)}" for address in addresses
        )
        shard = f" of shard {self.shard}" if self.shard_addresses.is_many else ""
        if any(isinstance(error, NotActive) for error in self._failures.values()):
            return NotActive(f"no active daemon{shard} within {waited_s:g} s: {details}")
        return Unreachable(f"no daemon{shard} within {waited_s:g} s: {details}")

    @property
    def any_redirect(self) -> bool:
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
        waiting = self._addresses_in_order() if successor is None else deque((successor,))
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
        # A round beside a connection may be idle only because the budget is used up.
        waits = self._is_idle and bool(self._running) and self._beside is None
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
            self._successor = self._resigned = None
        error = None if self._successor is None else self._failures.get(self._successor)
        is_running = any(attempt.address == self._successor for attempt in self._running)
        if is_running or not (error is None or isinstance(error, NotActive)):
            self._successor = None
        return self._successor

    def _addresses_in_order(self) -> deque[Address]:
        """Return the addresses of a round in order."""
        shard_addresses, now_s = self.shard_addresses, self._loop.time()
        self._addresses = list(dict.fromkeys(shard_addresses.around(self.shard)))
        self._first = 0 if shard_addresses.is_many else self._first
        _expire(shard_addresses.silent_until_s, now_s)
        if self._beside is not None:
            return deque(self._probes(now_s))
        _expire(shard_addresses.redirected_s, now_s - self._connect_timeout_s)
        order = self._addresses[self._first :] + self._addresses[: self._first]
        redirected = shard_addresses.redirected_s
        redirecting = [a for a in order[1:] if isinstance(self._failures.get(a), Elsewhere)]
        redirecting.sort(key=lambda address: redirected.get(address, 0.0))
        fresh = sum(now_s - at_s < REDIRECTED_S for at_s in redirected.values())
        spared = set(redirecting[max(REDIRECTING_MAX - fresh, 0) :])
        order = [address for address in order if address not in spared]
        silent = shard_addresses.silent_until_s
        order.sort(key=lambda address: (address == self._resigned, address in silent))
        return deque(order)

    def _probes(self, now_s: float) -> Sequence[Address]:
        """Return the first address, unless it is the connection's, and the addresses that were
        tried longest ago, within the budget of all finders beside a connection."""
        shard_addresses, window_s = self.shard_addresses, self._backoff_s_max()
        named = [address for address in self._addresses[:1] if address != self._beside]
        self._addresses = [address for address in self._addresses if address != self._beside]
        silent, probed_s = shard_addresses.silent_until_s, shard_addresses.probed_s
        _expire(probed_s, now_s - BESIDE_BACKOFF_S_MAX)
        most = 1 if shard_addresses.store_is_away else BESIDE_PROBES_MAX
        fresh = sum(now_s - at_s < window_s for at_s in probed_s.values())
        rest = [address for address in self._addresses if address not in named]
        rest.sort(key=lambda address: (address in silent, probed_s.get(address, 0.0)))
        return (*named, *rest[: max(most - fresh, 0)])

    def _follow_hints(self, waiting: deque[Address]) -> None:
        for hint in self._hints:
            if hint in self.shard_addresses.silent_until_s:
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
        if self._beside is not None or any(attempt.is_second for attempt in self._running):
            return False
        silent_s = self._loop.time() - APART_S
        return any(a.address == address and a.since_s <= silent_s for a in self._running)

    def _try(self, address: Address) -> None:
        self._tried.add(address)
        self._is_idle = False
        if self._beside is not None:
            self.shard_addresses.probed_s[address] = self._loop.time()
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
        if hint in self._tried or hint == self._beside:
            return False
        return hint in self._addresses or len(self._tried.difference(self._addresses)) < HINTS_MAX

    def _patience_s(self, address: Address) -> float:
        """Return the seconds that an address may take, so that a silent one leaves time for
        others."""
        if self._addresses == [address]:
            return self._connect_timeout_s
        count = len(self._addresses)
        if self.shard_addresses.is_many:
            count = min(count, SLOW_ADDRESSES)
        return min(ATTEMPT_S_MAX, self._connect_timeout_s / count)

    def _note(self, address: Address, error: TickwheelError) -> None:
        previous = self._failures.get(address)
        self._failures[address] = error
        if isinstance(error, Silent):
            self._mark_silent(address)
        else:
            self.shard_addresses.silent_until_s.pop(address, None)
        if isinstance(error, Elsewhere):
            self.shard_addresses.redirected_s[address] = self._loop.time()
        hint = error.active if isinstance(error, Redirect) else None
        if isinstance(error, Standby) and hint == self._resigned:
            hint = None  # it does not know yet that it is about to take over from that daemon
        if hint is not None and self._is_worth_trying(hint):
            self._hints.append(hint)
        if not error.retryable and (previous is None or previous.code != error.code):
            LOGGER.warning("%s: %s: %s", address_text(address), error.code, error.message)

    def _mark_silent(self, address: Address) -> None:
        self.shard_addresses.silent_until_s[address] = self._loop.time() + SILENT_S
