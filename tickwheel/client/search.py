"""Looking for the daemon that is active: addresses in turn, hints of standbys, pauses between.

Opens nothing and knows no frame: an attempt at one address is the link's. Invariants:

* In one round an address is tried once at most, whoever names it, and so few hints are followed
  that standbys which name each other, or ever new addresses, end in a pause like all others.
* Hints add to the list and never replace it: a wrong one costs one attempt.
* An address that was silent (it takes connections and says nothing, as a stopped process does)
  costs time at every attempt: for a while it is only tried when no other daemon answers.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from tickwheel.client.addresses import Address, parse_url, shown
from tickwheel.client.connection import LOGGER, Connection
from tickwheel.errors import BadRequest, NotActive, TickwheelError, Unreachable

BACKOFF_S_MIN = 0.05
BACKOFF_S_MAX = 5.0
STANDBY_BACKOFF_S_MAX = 1.0
"""A standby answers: it may take over at any moment."""
ATTEMPT_S_MAX = 2.0
"""How long one of several addresses may take to answer."""
SILENT_S = 3.0
"""For so long others are preferred to an address that was silent."""
HINTS_MAX = 8
"""Addresses beside the list that are tried in one round."""
NOWHERE = frozenset(("0.0.0.0", "::"))  # noqa: S104  # to refuse them
"""What a daemon listens at is not always where others find it."""

Attempt = Callable[[Address, float], Awaitable[Connection]]


class Standby(NotActive):
    """What a standby's greeting amounts to, and where it says the active daemon is."""

    def __init__(self, message: str, active: Address | None) -> None:
        super().__init__(message)
        self.active = active


class Silent(Unreachable):
    """No answer in time."""


def standby(info: dict[str, Any]) -> Standby | None:
    """From the answer to HELLO. None: the daemon is active, as one that names no role is."""
    role = info.get("role", "active")
    if role == "active":
        return None
    active = _hint(info.get("active"))
    names = f"it names {shown(active)} as active" if active else "it knows no active one"
    return Standby(f"{role!s:.20}, {names}", active)


def _hint(value: Any) -> Address | None:
    with suppress(BadRequest):
        address = parse_url(value)[0]
        return None if address[0] in NOWHERE else address
    return None


class Search:
    """Where the client stands among its addresses. One ``find`` at a time."""

    def __init__(
        self, addresses: Sequence[Address], attempt: Attempt, connect_timeout_s: float
    ) -> None:
        self._addresses = list(dict.fromkeys(addresses))
        self._attempt = attempt
        self._connect_timeout_s = connect_timeout_s
        self._first = 0
        """Index of the address that the next round begins with."""
        self._at: Address | None = None
        """Where the last connection was."""
        self._silent_until_s: dict[Address, float] = {}
        self._said: dict[Address, TickwheelError] = {}
        """Why each did not do, since there was a connection."""
        self._backoff_s = BACKOFF_S_MIN
        self._found_once = False

    async def find(self) -> Connection:
        """Rounds, with a growing pause after each, until a daemon is active.

        Raises what all addresses object to for good, as long as none was ever active.
        """
        while True:
            connection = await self._round()
            if connection is not None:
                self._found_once = True
                self._said.clear()
                return connection
            said = [self._said[a] for a in self._addresses if a in self._said]
            if not self._found_once and not any(error.retryable for error in said):
                raise said[-1]
            await self.pause()

    def ended(self, error: TickwheelError, *, silent: bool, steady: bool) -> None:
        """The connection that was found has ended: another address comes first."""
        at, self._at = self._at, None
        if at is None:
            return
        self._said[at] = error
        if silent:
            self._mark_silent(at)
        if at in self._addresses:
            self._first = (self._addresses.index(at) + 1) % len(self._addresses)
        if steady:
            self._backoff_s = BACKOFF_S_MIN

    async def pause(self) -> None:
        """Longer each time, with jitter."""
        limit_s = STANDBY_BACKOFF_S_MAX if self.any_standby else BACKOFF_S_MAX
        await asyncio.sleep(min(self._backoff_s, limit_s) * random.uniform(0.5, 1.0))
        self._backoff_s = min(self._backoff_s * 2, limit_s)

    def failure(self, waited_s: float) -> TickwheelError:
        """Why there is no connection: each address with what it said."""
        addresses = dict.fromkeys((*self._addresses, *self._said))
        said = "; ".join(f"{shown(address)}: {self._report(address)}" for address in addresses)
        if self.any_standby:
            return NotActive(f"no active daemon within {waited_s:g} s: {said}")
        return Unreachable(f"no daemon within {waited_s:g} s: {said}")

    @property
    def any_standby(self) -> bool:
        """A daemon is there, and does not lead."""
        return any(isinstance(error, NotActive) for error in self._said.values())

    def _report(self, address: Address) -> str:
        error = self._said.get(address)
        if error is None:
            return "no answer yet"
        clear = isinstance(error, (NotActive, Unreachable))
        return error.message if clear else f"{error.code}: {error.message}"

    # --- one round ------------------------------------------------------------------------------

    async def _round(self) -> Connection | None:
        """Each address once, the hints of standbys next; the connection to an active daemon."""
        order = self._addresses[self._first :] + self._addresses[: self._first]
        now_s = asyncio.get_running_loop().time()
        self._silent_until_s = {a: s for a, s in self._silent_until_s.items() if s > now_s}
        waiting = deque(a for a in order if a not in self._silent_until_s)
        silent = deque(a for a in order if a in self._silent_until_s)
        tried: set[Address] = set()
        standbys = False
        while waiting or (silent and not standbys):
            address = waiting.popleft() if waiting else silent.popleft()
            if address in tried:
                continue
            tried.add(address)
            try:
                connection = await self._attempt(address, self._patience_s(address))
            except TickwheelError as error:
                self._note(address, error)
                standbys = standbys or isinstance(error, NotActive)
                hint = error.active if isinstance(error, Standby) else None
                if hint is not None and self._worth_trying(hint, tried):
                    waiting.appendleft(hint)
            else:
                self._at = address
                return connection
        known = tried.union(self._addresses)
        self._said = {a: error for a, error in self._said.items() if a in known}
        return None

    def _worth_trying(self, hint: Address, tried: set[Address]) -> bool:
        extra = len(tried.difference(self._addresses))
        return (
            hint not in tried
            and hint not in self._silent_until_s
            and (hint in self._addresses or extra < HINTS_MAX)
        )

    def _patience_s(self, address: Address) -> float:
        """A share of the time for each, so that a silent one leaves some for the others."""
        if self._addresses == [address]:
            return self._connect_timeout_s
        return min(ATTEMPT_S_MAX, self._connect_timeout_s / len(self._addresses))

    def _note(self, address: Address, error: TickwheelError) -> None:
        self._said[address] = error
        if isinstance(error, Silent):
            self._mark_silent(address)
        else:
            self._silent_until_s.pop(address, None)
        if not error.retryable:
            LOGGER.warning("%s: %s: %s", shown(address), error.code, error.message)

    def _mark_silent(self, address: Address) -> None:
        self._silent_until_s[address] = asyncio.get_running_loop().time() + SILENT_S
