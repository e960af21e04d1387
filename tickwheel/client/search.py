"""A client's way through the addresses at which the daemon that it looks for may be.

``Search`` says which address is tried when, and opens nothing: whoever makes it gives it the
attempts. Knows no frame. Invariants:

* Addresses are tried one after the other, and side by side where one does not answer soon, as
  "Happy Eyeballs" (RFC 8305) has it: an address that takes connections and says nothing, as a
  stopped process does, holds up nobody. The first daemon that greets as the active one is taken,
  and all other attempts are closed before anything else is written to it. An attempt that is under
  way outlasts its round; never are there more than ``ATTEMPTS_MAX``, and one repetition beside
  them: another connection to the address that a round begins with.
* Whom a daemon that hands its shard over names as its heir is asked alone, as long as it stands by
  and ``HANDOVER_S`` is not over; the address that was left comes last meanwhile.
* In one round an address is tried once at most, whoever names it. So few hints are followed that
  standbys which name each other, or ever new addresses, end in a pause like all others. Hints add
  to the list and never replace it: a wrong one costs one attempt. An address that was silent comes
  last for a while.
* While a daemon says that it does not lead, another one is about to: pauses are short then, for as
  long as a lease may take to end.
* A client of one of several shards asks a ``Route`` for its list, anew in each round, because
  shards move.
* ``Beside`` searches while a connection stands. All such searches of a client together ask no more
  than one would, and begin at no common moment.
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
    """What has become of attempts at addresses lately; all connections of a client share it."""

    def __init__(self) -> None:
        self.silent_until_s: dict[Address, float] = {}
        """Until when an address that was silent comes after all others."""
        self.told_s: dict[Address, float] = {}
        """When a daemon has sent elsewhere last, and so has told where all shards are."""
        self.asked_s: dict[Address, float] = {}
        """When a search beside a connection has asked at an address last."""
        self.nodes: dict[int, str] = {}
        """Shard → the name of the daemon that the connection to it stands with."""
        self.unleased: set[int] = set()
        """Those of these shards whose daemons say that their leases are over."""

    @property
    def store_is_away(self) -> bool:
        """Whether daemons of several nodes cannot reach the store, and no other one is known that
        can: then it is not one node that was cut off."""
        named = {self.nodes[shard] for shard in self.unleased}
        return len(named) > 1 and len(self.unleased) == len(self.nodes)


class Route(Protocol):
    """What is known of where one of several shards is; it changes while the client is open."""

    shard: int
    seen: Seen

    def addresses(self) -> Sequence[Address]:
        """Where to look for the shard now, the likeliest place first."""

    def learn(self, info: Mapping[str, Any]) -> None:
        """Take what the answer to a HELLO says of where shards are."""

    def stands(self, at: Address | None) -> None:
        """Take note of where the shard was found; None: that connection has ended."""


class Given:
    """The ``Route`` to a daemon that is no shard: the addresses that the client was given."""

    shard = 0

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses
        self.seen = Seen()

    def addresses(self) -> Sequence[Address]:
        return self._addresses

    def learn(self, info: Mapping[str, Any]) -> None:
        """Do nothing: the answer to a HELLO names no other address."""

    def stands(self, at: Address | None) -> None:
        """Do nothing: there is nothing to be chosen."""


BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 5.0
STANDBY_BACKOFF_S_MAX = 1.0
"""The longest pause, in seconds, before a standby is asked again: it may take over soon."""
HANDOVER_S = 1.0
"""For so many seconds after a good connection has ended, a standby is expected to take over at any
moment, because that connection's daemon has handed over;"""
HANDOVER_BACKOFF_S_MAX = 0.1
"""and so long is a pause then, in seconds, at most."""
TAKEOVER_BACKOFF_S_MAX = 0.2
"""The same until ``connect_timeout`` is over: that daemon may have died, and its lease has to end
first."""
ATTEMPT_S_MAX = 2.0
"""How long one of several addresses may take to answer, in seconds."""
APART_S = 0.25
"""When an address has not answered for so many seconds, the next one is tried beside it, or itself
again."""
ATTEMPTS_MAX = 6
"""So many addresses are tried at once."""
SLOW_ONES = 4
"""So many addresses of a route that take all of their time are tried within ``connect_timeout``."""
SILENT_S = 3.0
"""How long an address that was silent comes after all others, in seconds."""
HINTS_MAX = 8
"""Addresses beside the list that one round tries."""
INFORMANTS_MAX = 3
"""Of daemons that have sent elsewhere in vain so many are asked again in a round;"""
INFORMED_S = 0.05
"""less those that have told another connection of the same client so many seconds ago."""
NOWHERE = frozenset(("0.0.0.0", "::"))  # noqa: S104  # to refuse them
"""Hosts at which a daemon listens, and where others cannot find it."""


class Greeted(NamedTuple):
    """A connection whose daemon has answered HELLO as the active one of the shard."""

    connection: Connection
    info: dict[str, Any]


Attempt = Callable[[Address, float], Coroutine[Any, Any, Greeted]]


class Standby(NotActive):
    """The greeting of a standby, with the address of the active daemon, if it says one."""

    def __init__(self, message: str, active: Address | None) -> None:
        super().__init__(message)
        self.active = active


class Elsewhere(Unreachable):
    """The greeting of a daemon that has not the shard that is looked for, with that one's address,
    if it says one."""

    def __init__(self, message: str, active: Address | None) -> None:
        super().__init__(message)
        self.active = active


class Silent(Unreachable):
    """A daemon did not answer in time."""


Redirect = (Standby, Elsewhere)
"""Errors of daemons that are there and know who else there is."""


def standby(
    info: dict[str, Any], *, secure: bool = False, shard: int | None = None
) -> Standby | Elsewhere | None:
    """The error for the answer to HELLO of a standby, or of a daemon that has another shard than
    the one that was asked for (``shard``); None: the daemon is active, as one without a role is.
    ``secure``: this client speaks TLS, and so it does where a standby sends it."""
    role = info.get("role", "active")
    if role == "active":
        return None
    active = address_named(info.get("active"), secure=secure)
    if shard is not None and info.get("shard") != shard:
        names = f"it names {address_text(active)}" if active else "it knows nobody who has it"
        return Elsewhere(f"it does not have shard {shard}, {names}", active)
    names = f"it names {address_text(active)} as active" if active else "it knows no active one"
    return Standby(f"{role!s:.20}, {names}", active)


def address_named(value: Any, *, secure: bool) -> Address | None:
    """The address that a daemon names as where another one is; None: it names none that a client
    can go to. ``secure`` as above."""
    with suppress(BadRequest):
        address = parse_url(value)[0]
        # One that speaks otherwise is none: a token never goes where there is no TLS.
        return None if address[0] in NOWHERE or is_secure(value) != secure else address
    return None


def _close(attempt: asyncio.Task[Greeted]) -> None:
    """Close the connection that an attempt has made in vain."""
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().connection.abort(ClientClosed("another daemon was there before it"))


class _Try(NamedTuple):
    """An attempt at an address that is under way."""

    address: Address
    task: asyncio.Task[Greeted]
    since_s: float
    is_second: bool
    """Whether it is beside another attempt at this address."""


class Search:
    """The client's way through its addresses, one ``find`` at a time."""

    def __init__(
        self,
        addresses: Sequence[Address],
        attempt: Attempt,
        choose: Callable[[Greeted], None],
        connect_timeout_s: float,
    ) -> None:
        """``choose`` takes the daemon that was found, or raises a TickwheelError."""
        self._addresses = list(dict.fromkeys(addresses))
        self._attempt, self._choose = attempt, choose
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._first = 0
        """The index of the address that the next round begins with."""
        self.at: Address | None = None
        """The address of the last connection."""
        self.route: Route | None = None
        """Where the list comes from instead, anew in each round."""
        self._seen = Seen()
        self._said: dict[Address, TickwheelError] = {}
        """Why each address has failed since the last connection."""
        self._tries: list[_Try] = []
        """Attempts that are under way, the newest last."""
        self._tried: set[Address] = set()
        """What this round has tried, and what was under way before it."""
        self._is_idle = True
        """Whether this round has tried nothing."""
        self._hints: deque[Address] = deque()
        """What daemons have named and nobody has tried."""
        self.backoff_s = BACKOFF_S_MIN
        """How long the next pause is at most."""
        self._found_once = False
        self._gone: Address | None = None
        """The address whose daemon has said that it does not have the shard any more."""
        self._heir: Address | None = None
        """Where it has said that the next one is, as long as that one alone is asked."""
        self._given_until_s = 0.0
        """How long both count."""
        self._handover_until_s = 0.0
        self._takeover_until_s = self._loop.time() + connect_timeout_s

    def follow(self, route: Route) -> None:
        """From now on look for the shard of this route."""
        self.route, self._seen = route, route.seen

    async def find(self) -> Connection:
        """Look for an active daemon, in rounds with growing pauses.

        Raises what all addresses object to for good, as long as none was ever active.
        """
        connection: Connection | None = None
        try:
            while connection is None:
                connection = await self._round() or await self._rest()
            self._found_once = True
            self._said.clear()
        finally:
            try:
                await self._drop_tries()
            except asyncio.CancelledError:
                if connection is not None:
                    connection.abort(ClientClosed())
                raise
        return connection

    def ended(
        self,
        error: TickwheelError,
        *,
        silent: bool,
        steady: bool,
        heir: Address | None = None,
    ) -> None:
        """Note that the found connection has ended, so that another address comes first. ``heir``:
        the one at which its daemon has said that the next one is."""
        at, self.at = self.at, None
        if at is None:
            return
        self._gone = at if isinstance(error, (Draining, NotActive)) else None
        self._heir, self._given_until_s = heir, self._loop.time() + HANDOVER_S
        self._said[at] = error
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
        """Pause, longer each time, with jitter."""
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
        """The error for no connection, with what each address said."""
        addresses = dict.fromkeys((*self._addresses, *self._said))
        said = "; ".join(
            f"{address_text(address)}: {self._report(address)}" for address in addresses
        )
        of = "" if self.route is None else f" of shard {self.route.shard}"
        if any(isinstance(error, NotActive) for error in self._said.values()):
            return NotActive(f"no active daemon{of} within {waited_s:g} s: {said}")
        return Unreachable(f"no daemon{of} within {waited_s:g} s: {said}")

    @property
    def any_standby(self) -> bool:
        """Whether a daemon was found that does not lead, or has not the shard."""
        return any(isinstance(error, (NotActive, Elsewhere)) for error in self._said.values())

    def _report(self, address: Address) -> str:
        error = self._said.get(address)
        if error is None:
            return "no answer yet"
        clear = isinstance(error, (NotActive, Unreachable))
        return error.message if clear else f"{error.code}: {error.message}"

    # --- one round ------------------------------------------------------------------------------

    async def _round(self) -> Connection | None:
        """Try each address once, and the hints of standbys; the connection to an active daemon.
        Attempts that take long outlast it."""
        heir = self._heir_alone()
        waiting = self._list() if heir is None else deque((heir,))
        self._tried, self._is_idle = {one.address for one in self._tries}, True
        if waiting and self._may_repeat(waiting[0]):
            self._try(waiting.popleft())
        while True:
            self._follow_hints(waiting)
            while waiting and waiting[0] in self._tried:
                waiting.popleft()
            young_s = self._young_s()
            if young_s > 0:
                connection = await self._wait(young_s)
            elif not waiting:
                break
            elif sum(not one.is_second for one in self._tries) < ATTEMPTS_MAX:
                self._try(waiting.popleft())
                continue
            else:
                connection = await self._wait(None)
            if connection is not None:
                return connection
        known = self._tried.union(self._addresses)
        self._said = {a: error for a, error in self._said.items() if a in known}
        self._refuse_for_good()
        return None

    async def _rest(self) -> Connection | None:
        """Pause after a round; where it had nothing to try, because all is being tried, wait until
        an attempt has ended. The connection, if an attempt from before has made one."""
        waits = self._is_idle and bool(self._tries)
        until_s = self._loop.time() + (0.0 if waits else self._pause_s())
        while waits or self._loop.time() < until_s:
            connection = await self._wait(None if waits else until_s - self._loop.time())
            if connection is not None:
                return connection
            self._refuse_for_good()
            waits = False
        return None

    def _heir_alone(self) -> Address | None:
        """The heir, while nobody else has to be asked: it has been named just now, and since then
        has said nothing else than that it stands by."""
        if self._loop.time() > self._given_until_s:
            self._heir = self._gone = None
        said = None if self._heir is None else self._said.get(self._heir)
        is_asked = any(one.address == self._heir for one in self._tries)
        if is_asked or not (said is None or isinstance(said, NotActive)):
            self._heir = None
        return self._heir

    def _list(self) -> deque[Address]:
        """The addresses that a round begins with."""
        if self.route is not None:
            self._addresses, self._first = list(dict.fromkeys(self.route.addresses())), 0
        order = self._addresses[self._first :] + self._addresses[: self._first]
        now_s = self._loop.time()
        silent, told = self._seen.silent_until_s, self._seen.told_s
        for address in [a for a, until_s in silent.items() if until_s <= now_s]:
            del silent[address]
        for address in [
            a for a, told_s in told.items() if told_s < now_s - self._connect_timeout_s
        ]:
            del told[address]
        if self.route is not None:
            knew_nothing = [a for a in order[1:] if isinstance(self._said.get(a), Elsewhere)]
            knew_nothing.sort(key=lambda address: told.get(address, 0.0))
            fresh = sum(now_s - told_s < INFORMED_S for told_s in told.values())
            spared = set(knew_nothing[max(INFORMANTS_MAX - fresh, 0) :])
            order = [address for address in order if address not in spared]
        is_gone = self._gone if self.route is not None else None
        return deque(sorted(order, key=lambda one: (one == is_gone, one in silent)))

    def _follow_hints(self, waiting: deque[Address]) -> None:
        for hint in self._hints:
            if hint in self._seen.silent_until_s:
                waiting.append(hint)
            else:
                waiting.appendleft(hint)
        self._hints.clear()

    def _refuse_for_good(self) -> None:
        said = [self._said[a] for a in self._addresses if a in self._said]
        are_all = 0 < len(said) == len(self._addresses)
        if are_all and not self._found_once and not any(error.retryable for error in said):
            raise said[-1]

    # --- attempts -------------------------------------------------------------------------------

    def _young_s(self) -> float:
        """For how many seconds the newest attempt is still to be left alone."""
        newest = next((one for one in reversed(self._tries) if not one.is_second), None)
        return 0.0 if newest is None else newest.since_s + APART_S - self._loop.time()

    def _may_repeat(self, address: Address) -> bool:
        """Whether an attempt at this address has been silent for so long that another connection
        may be answered sooner. Only one such repetition is under way at a time."""
        if any(one.is_second for one in self._tries):
            return False
        silent_s = self._loop.time() - APART_S
        return any(one.address == address and one.since_s <= silent_s for one in self._tries)

    def _try(self, address: Address) -> None:
        self._tried.add(address)
        self._is_idle = False
        is_second = any(one.address == address for one in self._tries)
        task = self._loop.create_task(self._attempt(address, self._patience_s(address)))
        self._tries.append(_Try(address, task, self._loop.time(), is_second))

    async def _wait(self, timeout_s: float | None) -> Connection | None:
        """Wait until an attempt has ended, so long at most; the connection that it has made."""
        if not self._tries:
            await asyncio.sleep(timeout_s or 0.0)
            return None
        tasks = [one.task for one in self._tries]
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for one in list(self._tries):
            if one.task.done():
                self._tries.remove(one)
                try:
                    greeted = one.task.result()
                    self._choose(greeted)
                except TickwheelError as error:
                    self._note(one.address, error)
                else:
                    self.at = one.address
                    return greeted.connection
        return None

    async def _drop_tries(self) -> None:
        """Close all attempts that are under way, and connections that came too late."""
        tasks = [one.task for one in self._tries]
        self._tries.clear()
        self._hints.clear()
        for task in tasks:
            task.add_done_callback(_close)  # also where nobody waits for its end any more
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _worth_trying(self, hint: Address) -> bool:
        extra = len(self._tried.difference(self._addresses))
        return hint not in self._tried and (hint in self._addresses or extra < HINTS_MAX)

    def _patience_s(self, address: Address) -> float:
        """How long an address may take, in seconds, so that a silent one leaves time for others."""
        if self._addresses == [address]:
            return self._connect_timeout_s
        count = len(self._addresses)
        if self.route is not None:
            count = min(count, SLOW_ONES)
        return min(ATTEMPT_S_MAX, self._connect_timeout_s / count)

    def _note(self, address: Address, error: TickwheelError) -> None:
        before = self._said.get(address)
        self._said[address] = error
        if isinstance(error, Silent):
            self._mark_silent(address)
        else:
            self._seen.silent_until_s.pop(address, None)
        if isinstance(error, Elsewhere):
            self._seen.told_s[address] = self._loop.time()
        hint = error.active if isinstance(error, Redirect) else None
        if isinstance(error, Standby) and hint == self._gone:
            hint = None  # it is about to take over from that one, and does not know it yet
        if hint is not None and self._worth_trying(hint):
            self._hints.append(hint)
        if not error.retryable and (before is None or before.code != error.code):
            LOGGER.warning("%s: %s: %s", address_text(address), error.code, error.message)

    def _mark_silent(self, address: Address) -> None:
        self._seen.silent_until_s[address] = self._loop.time() + SILENT_S


# --- beside a connection that stands -------------------------------------------------------------


BESIDE_START_S = 0.5
"""A search beside a connection begins at any moment within so many seconds, because all clients of
a daemon are told at once."""
BESIDE_SOON_S = 3.0
"""For so many seconds its pauses are those of a takeover, which comes soon or not at all;"""
BESIDE_BACKOFF_S_MAX = 1.0
"""then, or where the store is away for all, this is the longest one, in seconds."""
BESIDE_ASKED_MAX = 2
"""So many addresses are asked where the shard is, in the time of one of the longest pauses: by all
searches of a client together."""


class Beside(Search):
    """The search for the next daemon of a shard while the connection to the one stands whose lease
    is over. It asks much less than a search without a connection: there is nobody who must be
    found, if the store is away for all."""

    def __init__(
        self,
        standing: Address | None,
        route: Route,
        attempt: Attempt,
        choose: Callable[[Greeted], None],
        connect_timeout_s: float,
    ) -> None:
        """``standing``: the address of the connection, which is not asked."""
        super().__init__((), attempt, choose, connect_timeout_s)
        self._standing = standing
        self._soon_until_s = self._loop.time() + BESIDE_SOON_S
        self._found_once = True
        self.follow(route)

    async def find(self) -> Connection:
        await asyncio.sleep(random.uniform(0.0, BESIDE_START_S))
        return await super().find()

    def _backoff_s_max(self) -> float:
        soon = self._loop.time() < self._soon_until_s and not self._seen.store_is_away
        return TAKEOVER_BACKOFF_S_MAX if soon else BESIDE_BACKOFF_S_MAX

    def _list(self) -> deque[Address]:
        """The address that the newest route names, if that is another one than before; of the
        others those that were asked longest ago."""
        assert self.route is not None, "it has one from the beginning"
        known = list(dict.fromkeys(self.route.addresses()))
        self._addresses = [one for one in known if one != self._standing]
        named = [one for one in known[:1] if one != self._standing]
        now_s, window_s, asked_s = self._loop.time(), self._backoff_s_max(), self._seen.asked_s
        for address in [a for a, at_s in asked_s.items() if at_s < now_s - BESIDE_BACKOFF_S_MAX]:
            del asked_s[address]
        silent = self._seen.silent_until_s
        for address in [a for a, until_s in silent.items() if until_s <= now_s]:
            del silent[address]
        most = 1 if self._seen.store_is_away else BESIDE_ASKED_MAX
        fresh = sum(now_s - at_s < window_s for at_s in asked_s.values())
        rest = [one for one in self._addresses if one not in named]
        rest.sort(key=lambda one: (one in silent, asked_s.get(one, 0.0)))
        return deque((*named, *rest[: max(most - fresh, 0)]))

    async def _rest(self) -> Connection | None:
        self._is_idle = False  # nothing was tried because others have asked, not because all is
        return await super()._rest()

    def _try(self, address: Address) -> None:
        self._seen.asked_s[address] = self._loop.time()
        super()._try(address)

    def _may_repeat(self, address: Address) -> bool:
        return False

    def _worth_trying(self, hint: Address) -> bool:
        return hint != self._standing and super()._worth_trying(hint)
