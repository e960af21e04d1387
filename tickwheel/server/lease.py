"""Leading a shard: waiting for one's turn, holding the lease, noticing that it is over.

The lease is a promise about time: whoever sent its last renewal less than the time to live ago
(minus a margin, on a clock that also counts suspension) is the only leader. Deliveries may be
written only then; ask ``may_deliver``. Writes to the store need no licence: they are fenced.

A daemon lays out an empty store only after it has been empty and leaderless for a whole time to
live, and never when it has seen data there: an owner that lives writes its memory back. While
it does, nobody asks for its lease, which the store may have lost as well.

``Life`` is which life of which process this is, and whether another one is certainly over.
A node's name and its address are what an operator says, and two machines may say the same
(clones, a load balancer's address). What a process cannot share with another one is where its
kernel was started (boot), in which namespace its number counts, and when it began. Whoever
finds no such process in that very place knows that it is over; everybody else knows nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

from tickwheel.clock import Clock
from tickwheel.persistence.contract import (
    Election,
    Leader,
    Seen,
    Standby,
    StoreAway,
    StoreError,
    StoreUnreachable,
    StoreUnusable,
)
from tickwheel.waiting import to_its_end

# --- the life of a process -----------------------------------------------------------------------


_BOOT = "/proc/sys/kernel/random/boot_id"
_GONE = frozenset("ZXx")
"""States of a process that has ended and was not waited for yet."""
_STATE, _START = 0, 19
"""Fields of /proc/PID/stat, counted from behind the command's name."""


class Life(NamedTuple):
    """The life of one process, from its start to its end."""

    boot: str
    """The id that the kernel makes at each start of the machine."""
    namespace: str
    """The namespace in which ``pid`` counts: containers of one machine have the same boot."""
    pid: int
    start: int
    """The start in clock ticks since the machine's: numbers of processes are used again."""

    @classmethod
    def own(cls) -> Self | None:
        """The life of this process; None: the system does not tell (it is no Linux)."""
        try:
            boot = Path(_BOOT).read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
            state = _stat(os.getpid())
        except OSError:
            return None
        if not boot or state is None:
            return None
        return cls(boot, namespace.strip("pid:[]"), os.getpid(), state[1])

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The life in a text that ``str`` made; None: the text is something else."""
        parts = text.split("/")
        if len(parts) != 4 or not all(parts) or not (parts[2] + parts[3]).isdecimal():
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}/{self.pid}/{self.start}"


def is_over(life: str, here: Life | None) -> bool:
    """Whether the process that said ``life`` of itself has certainly ended, seen from ``here``.

    False says nothing: it may live, or be where this process cannot look.
    """
    other = Life.parse(life)
    if other is None or here is None:
        return False
    if (other.boot, other.namespace) != (here.boot, here.namespace):
        return False
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # it is there, and somebody else's
    state = _stat(other.pid)
    # A process that is hidden from this user has no readable state: nothing is known.
    return state is not None and (state[1] != other.start or state[0] in _GONE)


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, start) of a process; None: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
        return fields[_STATE], int(fields[_START])
    except (OSError, LookupError, ValueError):
        return None


# --- leading -------------------------------------------------------------------------------------


POLL_S_MAX = 0.25
NOTICE_S = 0.05
"""How often a standby asks, in seconds, whether the lease is expected to be given back,"""
HURRY_S = 0.02
"""and how often it looks for its turn while it is."""
TROUBLE_RETRY_S = 0.2
ANSWER_S = 0.2
"""For so many seconds after the end of the licence the store may still answer, as it does at once
to a process that stood still, before anybody is told."""
RENEWALS_PER_TTL = 4
MARGIN_PART = 6
"""The part of the time to live by which the licence ends before the lease."""
LOG_AGAIN_MS = 60_000
"""How often, in ms, a wait that goes on is logged again."""

OnEvent = Callable[[str, str], None]


class Deposed(StoreError):
    """Another daemon leads now, or may: stop delivering at once."""


STORE = "a store that can be asked"


class _Wait(NamedTuple):
    """Why this daemon does not lead yet."""

    what: str
    left_ms: int | None
    unless: str = ""
    again: bool = True
    """Whether the reason is worth logging more than once."""


class Leadership:
    """One daemon's part in the election of one shard."""

    def __init__(
        self,
        election: Election,
        ttl_ms: int,
        clock: Clock,
        *,
        on_event: OnEvent,
        renewed: Callable[[], None],
        life: Life | None = None,
        hurries: Callable[[], bool] | None = None,
    ) -> None:
        """``life``: that of this process, if the system tells. ``hurries``: whether the leader is
        about to give the lease back; None: that is never known."""
        self._election = election
        self._ttl_ms = ttl_ms
        self._poll_s = min(POLL_S_MAX, ttl_ms / 4000)
        self._clock = clock
        self._on_event = on_event
        self._renewed = renewed
        self._life = life
        self._hurries = hurries
        self._node = ""
        """The name that no other daemon should have; set with the first campaign."""
        self._namesake = ("", 0)
        """Another leader under this name, and since when it was seen; logged once."""
        self._logged_namesake = ""
        self._wait: _Wait | None = None
        self._logged_wait = ("", 0)
        """The reason of the wait, and when that was logged."""
        self._gives_up = False
        self.http = ""
        """The URL of this daemon's HTTP for others, set before it takes part; empty: it has
        none."""
        self._as_standby: Standby | None = None
        """What this daemon says of itself while another one leads."""
        self._said_mono_ms = 0
        self._until_mono_ms = 0
        self._empty_since_mono_ms: int | None = None
        self._trouble = False
        self._logged_empty = False
        self._partial_since_mono_ms: int | None = None
        self._partial = ""
        """Why the store stays in part, with nobody to complete it; empty: it does not."""
        self._connection = 0
        self._first_connection = True
        self._since_mono_ms = 0
        self.me: Leader | None = None
        """Set while this daemon leads."""
        self.leader: Leader | None = None
        """The leader that was seen last."""
        self._found: Leader | None = None
        """The leader as it stands in the store."""
        self.incarnation = ""
        """The incarnation of the data that was last seen in the store."""

    def may_deliver(self, mono_ms: int) -> bool:
        return mono_ms < self._until_mono_ms

    @property
    def store_at(self) -> str:
        """The server of the store that was asked last; empty: none was reached yet."""
        return self._election.at

    @property
    def standbys(self) -> tuple[Standby, ...]:
        """Daemons that said within the time to live that they stand by, without the leader."""
        leader = self.leader
        return tuple(
            one
            for one in self._election.standbys
            if leader is None or (one.node, one.address) != (leader.node, leader.address)
        )

    # --- standing by -------------------------------------------------------------------------

    async def prepare(self, wait_s: float | None) -> None:
        """Check the store. Raises StoreUnusable if it must not be used, or cannot be asked for so
        long (None: there is no such time): machines that start together are there one after the
        other."""
        began_mono_ms = self._clock.read().mono_ms
        while True:
            try:
                await self._election.prepare()
            except StoreUnreachable as error:
                waited_ms = self._clock.read().mono_ms - began_mono_ms
                left_ms = None if wait_s is None else int(wait_s * 1000) - waited_ms
                if self._gives_up or (left_ms is not None and left_ms <= 0):
                    raise
                end = "" if left_ms is None else ", then it gives up (store_wait_s)"
                self._wait = _Wait(STORE, left_ms, f"{end}: {error.message}")
            else:
                self._wait = None
                return
            self._log_wait()
            await asyncio.sleep(self._poll_s)

    def give_up(self) -> None:
        """Wait no longer for a store that cannot be asked: the daemon shall stop."""
        self._gives_up = True

    async def _pause(self) -> None:
        """Wait until it is time to look again."""
        if self._hurries is None:
            await asyncio.sleep(self._poll_s)
            return
        waited_s = 0.0
        while waited_s < self._poll_s:
            if self._hurries():
                await asyncio.sleep(HURRY_S)
                return
            await asyncio.sleep(NOTICE_S)
            waited_s += NOTICE_S

    async def look(self) -> bool:
        """Look once; whether it is this daemon's turn to lead. Raises StoreError."""
        seen = await self._election.look(self._announcement())
        if seen.is_replica:
            # One that is promoted may lack what its owner still has, like one that came back.
            self._connection, self._first_connection = self._election.connections, False
            self._since_mono_ms = self._clock.read().mono_ms
            raise StoreAway("the server is a replica, which takes no writes")
        self._well()
        self._found, self.leader = seen.leader, seen.known_leader
        self._look_for_a_namesake(seen.leader)
        if seen.incarnation:
            self.incarnation = seen.incarnation
        if seen.leader is not None or not (seen.rewriting or seen.lost_by):
            self._partial_since_mono_ms, self._partial = None, ""
        self._wait = None
        if seen.leader is None:
            return self._may_begin(seen)
        held = f"the lease of {seen.leader.owner} at {seen.leader.address}"
        self._wait = _Wait(held, seen.ttl_ms, ", unless it is renewed", again=False)
        return False

    def _announcement(self) -> Standby | None:
        """What the next look says of this daemon: as often as a lease is renewed, and only behind a
        leader: until there is one nothing is written into the store."""
        mono_ms = self._clock.read().mono_ms
        often_enough = mono_ms - self._said_mono_ms < self._ttl_ms // RENEWALS_PER_TTL
        if self.leader is None or self._as_standby is None or often_enough:
            return None
        self._said_mono_ms = mono_ms
        return self._as_standby

    def _takes_part(self, owner: str, address: str) -> None:
        node = owner.rpartition("/")[0]
        self._as_standby = Standby(node, address, self.http, self._clock.read().now_ms)
        self._said_mono_ms = 0

    def _look_for_a_namesake(self, leader: Leader | None) -> None:
        """Look for another leader under this node's name that is not a former life of it.

        A lease that was renewed since it was first seen is held by one that lives.
        """
        if leader is None or not self._node or leader.node != self._node:
            return
        mono_ms = self._clock.read().mono_ms
        if leader.owner != self._namesake[0]:
            self._namesake = (leader.owner, mono_ms)
        if leader.owner == self._logged_namesake or mono_ms - self._namesake[1] <= self._ttl_ms:
            return
        self._logged_namesake = leader.owner
        self._on_event(
            "same_node_name",
            f"{leader.owner} at {leader.address} lives and has this node's name, {self._node};"
            " give each daemon a name of its own (--set node=NAME)",
        )

    def _log_wait(self) -> None:
        """Log the reason of the wait: once, and now and then while it lasts."""
        now, wait = self._clock.read(), self._wait
        logged, logged_mono_ms = self._logged_wait
        if wait is None:
            return
        # A standby waits behind a leader for weeks: that is logged once.
        again = wait.again and now.mono_ms - logged_mono_ms >= LOG_AGAIN_MS
        if wait.what == logged and not again:
            return
        self._logged_wait = (wait.what, now.mono_ms)
        until = "until it is there"
        if wait.left_ms is not None:
            at = datetime.fromtimestamp((now.now_ms + wait.left_ms) // 1000, UTC)
            until = f"{wait.left_ms / 1000:.1f} s, until {at:%H:%M:%S} UTC"
        self._on_event("waiting", f"for {wait.what}: {until}{wait.unless}")

    def _may_begin(self, seen: Seen) -> bool:
        mono_ms = self._clock.read().mono_ms
        if self._election.connections != self._connection:
            self._first_connection = self._connection == 0
            self._connection, self._since_mono_ms = self._election.connections, mono_ms
        if seen.incarnation:
            self._empty_since_mono_ms, self._logged_empty = None, False
            if seen.lost_by:
                self._wait_for_a_restore(seen.lost_by)
                return False
            if seen.rewriting:
                self._wait_for_the_rest(seen, mono_ms)
                self._wait = _Wait(f"{seen.rewriting}, which writes the store anew", None)
                return False
            return seen.clean or self._owner_had_time(seen, mono_ms)
        if self._empty_since_mono_ms is None:
            self._empty_since_mono_ms = mono_ms
        if self.incarnation:
            if not self._logged_empty:
                self._logged_empty = True
                self._on_event(
                    "store_came_back_empty",
                    f"it held incarnation {self.incarnation}, whose owner may still live and"
                    " write it again; if it does not: tickwheel init --force",
                )
            self._wait = _Wait("the owner of the store, which came back empty", None)
            return False
        left_ms = self._empty_since_mono_ms + self._ttl_ms - mono_ms
        self._wait = _Wait("an owner of the empty store that may live", left_ms)
        return left_ms <= 0

    def _owner_had_time(self, seen: Seen, mono_ms: int) -> bool:
        """Whether a living owner had time to come back. A store that came back may have lost its
        newest batches and the lease with them; the owner is to write them again before anybody else
        leads. One in which the lease has ended has lost nothing: behind a broken connection its
        owner gets the time of two renewals, because it need not read the store."""
        left_ms, time_ms = self._ttl_ms + 1000 - seen.up_s * 1000, self._ttl_ms
        if seen.leased_here:
            left_ms, time_ms = 0, 2 * self._ttl_ms // RENEWALS_PER_TTL
        if not self._first_connection:
            left_ms = max(left_ms, self._since_mono_ms + time_ms - mono_ms)
        what = "the owner of the store, which has just come back, that may live and know more"
        self._wait = _Wait(what, left_ms)
        return left_ms <= 0

    def _wait_for_the_rest(self, seen: Seen, mono_ms: int) -> None:
        """Wait for an owner who has all of the data in memory; without it the rest would be
        gone."""
        if self._partial_since_mono_ms is None:
            self._partial_since_mono_ms = mono_ms
        if not self._partial and mono_ms - self._partial_since_mono_ms >= self._ttl_ms:
            self._partial = (
                f"{seen.rewriting} was writing it anew from memory and is not there: if it lives,"
                " it goes on once it reaches the store; if not: tickwheel init --force, then"
                " restore a backup if there is one"
            )
            self._on_event("store_is_partial", self._partial)

    def _wait_for_a_restore(self, owner: str) -> None:
        """Wait for an operator: nobody has what is missing in the store."""
        if not self._partial:
            self._partial = (
                f"it lacks what {owner} had confirmed, who kept no copy (mirror=no):"
                " tickwheel init --force, then tickwheel restore"
            )
            self._on_event("store_is_partial", self._partial)
        self._wait = _Wait("a restore of the store, which lacks what was confirmed", None)

    async def first_campaign(self, owner: str, address: str) -> bool:
        """Wait until this daemon leads, or another one does, or the store cannot be asked.

        The lease of a former life of this node need not be waited for, if that is certainly over:
        name and address prove nothing, as two that live may have them both. Raises StoreUnusable
        for a store whose owner died while it wrote it anew.
        """
        self._node = owner.rpartition("/")[0]
        self._takes_part(owner, address)
        while True:
            try:
                turn, before = await self.look(), self._found
                if before is not None:
                    turn = before.node == self._node and is_over(before.life, self._life)
                if turn and await self.acquire(owner, address, before):
                    return True
            except StoreError as error:  # it was there a moment ago: ``campaign`` tries on
                self._ill(error)
                return False
            self._log_wait()
            if self.leader is not None:
                return False
            if self._partial:
                raise StoreUnusable(f"the store is not whole: {self._partial}")
            await asyncio.sleep(self._poll_s)

    async def campaign(self, owner: str, address: str) -> None:
        """Wait until this daemon leads."""
        self._takes_part(owner, address)
        while True:
            try:
                if await self.look() and await self.acquire(owner, address):
                    return
            except StoreError as error:
                self._ill(error)
                self._wait = _Wait("the store, which does not answer", None)
            self._log_wait()
            await self._pause()

    async def acquire(self, owner: str, address: str, instead_of: Leader | None = None) -> bool:
        now = self._clock.read()
        life = str(self._life) if self._life is not None else ""
        me = Leader(owner, address, now.now_ms, 0, life, self.http)
        try:
            is_given = await self._election.acquire(me, instead_of)
        except asyncio.CancelledError:
            # The store may have given it all the same.
            await to_its_end(self._release(me))
            raise
        if not is_given:
            return False
        self.me = self.leader = me
        self._licensed(now.mono_ms)
        return True

    # --- leading -----------------------------------------------------------------------------

    def opened(self, epoch: int) -> None:
        """Publish the epoch of the store that was opened."""
        assert self.me is not None
        self.me = self.leader = replace(self.me, epoch=epoch)

    async def hold(self, regained: Callable[[], None]) -> None:
        """Renew the lease for ever. Raises Deposed. ``regained``: the lease, or the connection, was
        gone for a while, so the store may have lost more."""
        pause_s = self._ttl_ms / 1000 / RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(pause_s if not self._trouble else TROUBLE_RETRY_S)
            mono_ms = self._clock.read().mono_ms
            me, connections = self._lead(), self._election.connections
            try:
                renewed = await self._election.renew(me)
                if not renewed:
                    await self._regain(me)
                if not renewed or self._election.connections > connections:
                    regained()
            except Deposed:
                raise
            except StoreError as error:
                self._ill(error)
                continue
            self._well()
            self._licensed(mono_ms)

    async def watch(self, told: Callable[[bool], None]) -> None:
        """Tell, for ever, whether the lease is held (True): when it is over by this daemon's clock
        and the store does not say more, and when it is held again."""
        is_held = True
        told(is_held)
        while True:
            left_ms = self._until_mono_ms - self._clock.read().mono_ms
            if left_ms > 0 and not is_held:
                is_held = True
                told(is_held)
            await asyncio.sleep(left_ms / 1000 if left_ms > 0 else ANSWER_S)
            if left_ms <= 0 and is_held and not self.may_deliver(self._clock.read().mono_ms):
                is_held = False
                told(is_held)

    async def _regain(self, me: Leader) -> None:
        """Take the lease again that ran out while the store, or this process, stood still."""
        if me.epoch and await self._election.acquire(me):
            seen = await self._election.look()
            stranger = seen.owner != me.owner and seen.epoch >= me.epoch
            if not (seen.incarnation and stranger):
                return
            await self._election.release(me)
        raise Deposed("the lease is over, and another daemon leads or has led since")

    def _licensed(self, sent_mono_ms: int) -> None:
        self._until_mono_ms = sent_mono_ms + self._ttl_ms - self._ttl_ms // MARGIN_PART
        self._renewed()

    def _lead(self) -> Leader:
        assert self.me is not None
        return self.me

    async def resign(self) -> None:
        """Give the lease back, so that a standby need not wait for its end."""
        me, self.me = self.me, None
        self._until_mono_ms = 0
        if me is None:
            return
        self.leader = None
        await self._release(me)

    async def _release(self, me: Leader) -> None:
        try:
            await self._election.release(me)
        except StoreError as error:
            self._ill(error)

    def forfeit(self, *, for_good: bool) -> None:
        """Deliver nothing from now on. ``for_good``: another one leads, so no lease is given
        back."""
        self._until_mono_ms = 0
        if for_good:
            self.me = None

    async def close(self) -> None:
        await self._election.close()

    # --- one line when it begins, one when it ends ---------------------------------------------

    def _ill(self, error: StoreError) -> None:
        if not self._trouble:
            self._trouble = True
            self._on_event("election_trouble", error.message)

    def _well(self) -> None:
        if self._trouble:
            self._trouble = False
            self._on_event("election_works_again", "the lease can be asked for")
