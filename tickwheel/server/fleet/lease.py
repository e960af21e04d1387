"""Leadership of a shard: waiting to lead, holding the lease, and detecting its end.

A leader is certainly the only one for the lease's time to live, minus a margin, after it sent its
last renewal, on a clock that also counts suspension. Deliveries are allowed only during that time
(``may_deliver``). Writes to the store do not depend on the lease, because they are fenced.

A daemon never initializes an empty store if it has seen data in it. It initializes an empty store
that can lose its data only after the store was empty and without a leader for a whole time to live:
if the owner of the data still runs, it writes the data back. While daemons wait for the owner, none
acquires the lease, because the store may have lost the owner's lease as well.

``Life`` identifies a process and detects whether another process has certainly ended. Node names
and addresses are configured, and two machines can have the same (clones, a load balancer). The
combination of a machine's boot, a process number with its namespace, and the process's start time
is unique. Only a process in the same boot and namespace can know that the process with that number
and start time has ended.
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
from tickwheel.model.policies import duration_ms
from tickwheel.persistence.contract import (
    Election,
    ElectionState,
    Leader,
    Standby,
    StoreAway,
    StoreError,
    StoreUnreachable,
    StoreUnusable,
)
from tickwheel.waiting import finish_despite_cancellation

# --- the identity of a process -------------------------------------------------------------------


_BOOT = "/proc/sys/kernel/random/boot_id"
_GONE = frozenset("ZXx")
"""States of a process that has ended but whose parent has not yet waited for it."""
_STATE, _START = 0, 19
"""Indexes of two fields of /proc/PID/stat, counted after the command's name."""


class Life(NamedTuple):
    """Identifies one process, even after its number is reused."""

    boot: str
    """Id that the kernel creates at each boot of the machine."""
    namespace: str
    """Namespace of ``pid``, because containers on one machine have the same boot."""
    pid: int
    start: int
    """Start in clock ticks since the boot, because process numbers are reused."""

    @classmethod
    def own(cls) -> Self | None:
        """Return the life of this process, or None if the system is not Linux."""
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
        """Return the life that ``str`` converted to this text, or None for any other text."""
        parts = text.split("/")
        if len(parts) != 4 or not all(parts) or not (parts[2] + parts[3]).isdecimal():
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}/{self.pid}/{self.start}"


def is_over(life: str, here: Life | None) -> bool:
    """Return whether the process with this ``life`` has certainly ended, as seen from ``here``.

    False means that it may be alive, or that its machine or namespace cannot be inspected.
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
        pass  # the process exists and belongs to another user
    state = _stat(other.pid)
    # A process that is hidden from this user has no readable state, so it may be alive.
    return state is not None and (state[1] != other.start or state[0] in _GONE)


def _stat(pid: int) -> tuple[str, int] | None:
    """Return the state and start of a process, or None if it is missing or unreadable."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
        return fields[_STATE], int(fields[_START])
    except (OSError, LookupError, ValueError):
        return None


# --- the election --------------------------------------------------------------------------------


POLL_S_MAX = 0.25
RELEASE_CHECK_S = 0.05
"""Seconds after which a standby checks again whether the leader is about to release the lease."""
LEAD_RETRY_S = 0.02
"""Seconds between a standby's attempts to lead while the leader is about to release the lease."""
TROUBLE_RETRY_S = 0.2
ANSWER_S = 0.2
"""Seconds from the end of the permission to deliver until clients are told, unless the store has
confirmed the lease by then, as it does after a mere suspension of this process."""
RENEWALS_PER_TTL = 4
RENEW_S_MAX = 3.0
"""Maximum seconds between renewals, on which ``contract.LEADER_WATCH_S`` relies."""
MARGIN_PART = 6
"""The permission to deliver ends before the lease, by 1/6 of the lease's time to live."""
LOG_AGAIN_MS = 60_000
"""Milliseconds after which a continuing wait is logged again."""

OnEvent = Callable[[str, str], None]


class Deposed(StoreError):
    """Another daemon leads or may lead, so deliveries must stop immediately."""


STORE = "a reachable store"


class _Wait(NamedTuple):
    """The event for which this daemon waits before it can lead."""

    subject: str
    left_ms: int | None
    suffix: str = ""
    """Text after the time in the log line."""
    is_repeated: bool = True
    """Whether the wait is logged repeatedly."""


class Leadership:
    """A daemon's participation in the election of a shard's leader."""

    def __init__(
        self,
        election: Election,
        ttl_ms: int,
        clock: Clock,
        *,
        on_event: OnEvent,
        on_renewed: Callable[[], None],
        life: Life | None = None,
        is_release_near: Callable[[], bool] | None = None,
    ) -> None:
        """``life`` identifies this process, if it can be identified. ``is_release_near`` returns
        whether the leader is about to release the lease; None if this is never known."""
        self._election = election
        self._ttl_ms = ttl_ms
        self._poll_s = min(POLL_S_MAX, ttl_ms / 4000)
        self._clock = clock
        self._on_event = on_event
        self._on_renewed = on_renewed
        self._life = life
        self._is_release_near = is_release_near
        self._node = ""
        """Name of this node, which must be unique. The first campaign sets it."""
        self._namesake = ("", 0)
        """The ``owner`` of a leader with this node's name, and the steady time when first seen."""
        self._logged_namesake = ""
        self._wait: _Wait | None = None
        self._logged_wait = ("", 0)
        """Subject of the last logged wait, and the steady time of the log line."""
        self._gives_up = False
        self.http = ""
        """URL of this daemon's HTTP server for other machines, or "". Set it before the first
        campaign."""
        self._as_standby: Standby | None = None
        """This daemon's announcement while another daemon leads."""
        self._announced_mono_ms = 0
        self._until_mono_ms = 0
        self._empty_since_mono_ms: int | None = None
        self._trouble = False
        self._logged_empty = False
        self._partial_since_mono_ms: int | None = None
        self._partial = ""
        """Why the store is incomplete and no owner completes it; empty otherwise."""
        self._connection = 0
        self._first_connection = True
        self._since_mono_ms = 0
        self.me: Leader | None = None
        """This daemon as the leader; None while it does not lead."""
        self.leader: Leader | None = None
        """The last known leader."""
        self._stored_leader: Leader | None = None
        """The leader recorded in the store."""
        self.incarnation = ""
        """The last known incarnation of the store's data."""
        self._epoch_max = 0
        """The highest epoch that the store has had. In a lower epoch it lacks data."""

    def may_deliver(self, mono_ms: int) -> bool:
        return mono_ms < self._until_mono_ms

    @property
    def store_at(self) -> str:
        """Address of the store's server that was used last; empty if none was reached."""
        return self._election.address

    @property
    def standbys(self) -> tuple[Standby, ...]:
        """The standbys, except the leader, that announced themselves within the time to live."""
        leader = self.leader
        return tuple(
            standby
            for standby in self._election.standbys
            if leader is None or (standby.node, standby.address) != (leader.node, leader.address)
        )

    # --- standing by -------------------------------------------------------------------------

    async def prepare(self, wait_s: float | None) -> None:
        """Check the store. If it is unreachable, wait up to ``wait_s`` (None: forever), because
        machines that boot together become ready at different times. Raise StoreUnusable if the
        store must not be used, or StoreUnreachable after the wait."""
        began_mono_ms = self._clock.read().mono_ms
        while True:
            try:
                await self._election.prepare()
            except StoreUnreachable as error:
                waited_ms = self._clock.read().mono_ms - began_mono_ms
                left_ms = None if wait_s is None else duration_ms(wait_s) - waited_ms
                if self._gives_up or (left_ms is not None and left_ms <= 0):
                    raise
                end = "" if left_ms is None else ", then the daemon gives up (store_wait_s)"
                self._wait = _Wait(STORE, left_ms, f"{end}: {error.message}")
            else:
                self._wait = None
                return
            self._log_wait()
            await asyncio.sleep(self._poll_s)

    def give_up(self) -> None:
        """Stop waiting for an unreachable store, because the daemon is stopping."""
        self._gives_up = True

    async def _pause(self) -> None:
        """Wait until the store should be checked again."""
        if self._is_release_near is None:
            await asyncio.sleep(self._poll_s)
            return
        waited_s = 0.0
        while waited_s < self._poll_s:
            if self._is_release_near():
                await asyncio.sleep(LEAD_RETRY_S)
                return
            await asyncio.sleep(RELEASE_CHECK_S)
            waited_s += RELEASE_CHECK_S

    async def can_lead(self) -> bool:
        """Check the store once, and return whether this daemon can lead. Raise StoreError on
        failure."""
        state = await self._election.look(self._announcement())
        if state.is_replica:
            # After its promotion, a replica can lack data that the owner still has in memory.
            self._connection, self._first_connection = self._election.connections, False
            self._since_mono_ms = self._clock.read().mono_ms
            raise StoreAway("the server is a replica, which accepts no writes")
        self._note_recovery()
        self._stored_leader, self.leader = state.leader, state.known_leader
        self._report_namesake(state.leader)
        if state.incarnation:
            self.incarnation = state.incarnation
        self._epoch_max = max(self._epoch_max, state.epoch)
        if state.leader is not None or not (state.rewriting or state.lost_by):
            self._partial_since_mono_ms, self._partial = None, ""
        self._wait = None
        if state.leader is None:
            return self._may_lead(state)
        held = f"the lease of {state.leader.owner} at {state.leader.address}"
        self._wait = _Wait(held, state.ttl_ms, ", unless it is renewed", is_repeated=False)
        return False

    def _announcement(self) -> Standby | None:
        """Return the announcement of this daemon for the next check of the store, or None. It is
        sent as often as a lease is renewed, and only while another daemon leads."""
        mono_ms = self._clock.read().mono_ms
        is_recent = mono_ms - self._announced_mono_ms < self._ttl_ms // RENEWALS_PER_TTL
        if self.leader is None or self._as_standby is None or is_recent:
            return None
        self._announced_mono_ms = mono_ms
        return self._as_standby

    def _prepare_announcement(self, owner: str, address: str) -> None:
        node = owner.rpartition("/")[0]
        self._as_standby = Standby(node, address, self.http, self._clock.read().now_ms)
        self._announced_mono_ms = 0

    def _report_namesake(self, leader: Leader | None) -> None:
        """Report another leader that has this node's name, once it has certainly renewed its lease
        since it was first seen and is therefore alive."""
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
            f"{leader.owner} at {leader.address} is running with this node's name {self._node};"
            " give each daemon a unique name (--set node=NAME)",
        )

    def _log_wait(self) -> None:
        """Log what this daemon waits for, repeatedly while the wait lasts."""
        now, wait = self._clock.read(), self._wait
        logged, logged_mono_ms = self._logged_wait
        if wait is None:
            return
        # A wait for another leader's lease can last for weeks and is logged only once.
        is_due = wait.is_repeated and now.mono_ms - logged_mono_ms >= LOG_AGAIN_MS
        if wait.subject == logged and not is_due:
            return
        self._logged_wait = (wait.subject, now.mono_ms)
        until = "no time limit"
        if wait.left_ms is not None:
            at = datetime.fromtimestamp((now.now_ms + wait.left_ms) // 1000, UTC)
            until = f"{wait.left_ms / 1000:.1f} s, until {at:%H:%M:%S} UTC"
        self._on_event("waiting", f"for {wait.subject}: {until}{wait.suffix}")

    def _may_lead(self, state: ElectionState) -> bool:
        mono_ms = self._clock.read().mono_ms
        if self._election.connections != self._connection:
            self._first_connection = self._connection == 0
            self._connection, self._since_mono_ms = self._election.connections, mono_ms
        if state.incarnation:
            self._empty_since_mono_ms, self._logged_empty = None, False
            if state.lost_by:
                self._report_lost_data(state.lost_by)
                return False
            if state.rewriting:
                self._check_rewriter(state, mono_ms)
                self._wait = _Wait(f"{state.rewriting}, which is rewriting the store", None)
                return False
            is_whole = state.clean and state.epoch >= self._epoch_max
            return is_whole or self._owner_had_time(state, mono_ms)
        if self._empty_since_mono_ms is None:
            self._empty_since_mono_ms = mono_ms
        if state.is_durable and not self.incarnation:
            return True
        if self.incarnation:
            if not self._logged_empty:
                self._logged_empty = True
                self._on_event(
                    "store_came_back_empty",
                    f"the store had incarnation {self.incarnation}; its owner can write the data"
                    " back if it is still running, otherwise use tickwheel init --force",
                )
            self._wait = _Wait("the owner of the store, which came back empty", None)
            return False
        left_ms = self._empty_since_mono_ms + self._ttl_ms - mono_ms
        self._wait = _Wait("a possible owner of the empty store", left_ms)
        return left_ms <= 0

    def _owner_had_time(self, state: ElectionState, mono_ms: int) -> bool:
        """Return whether the owner, if it is alive, has had enough time to return. A restarted
        store may have lost its newest batches and the lease; the owner must write them back before
        another daemon leads. A store in which the lease expired has lost nothing. Its owner, whose
        connection may be broken, gets only the time of two renewals, because it does not have to
        read the store."""
        left_ms, time_ms = self._ttl_ms + 1000 - state.up_s * 1000, self._ttl_ms
        if state.leased_here:
            left_ms, time_ms = 0, 2 * self._ttl_ms // RENEWALS_PER_TTL
        if not self._first_connection:
            left_ms = max(left_ms, self._since_mono_ms + time_ms - mono_ms)
        subject = "the owner of the restarted store, which may have newer data"
        self._wait = _Wait(subject, left_ms)
        return left_ms <= 0

    def _check_rewriter(self, state: ElectionState, mono_ms: int) -> None:
        """Report an incomplete store if the owner that was rewriting it has disappeared."""
        if self._partial_since_mono_ms is None:
            self._partial_since_mono_ms = mono_ms
        if not self._partial and mono_ms - self._partial_since_mono_ms >= self._ttl_ms:
            self._partial = (
                f"{state.rewriting} was rewriting it from memory and has disappeared; if it is"
                " still running, it continues once it reaches the store, otherwise use tickwheel"
                " init --force and restore a backup"
            )
            self._on_event("store_is_partial", self._partial)

    def _report_lost_data(self, owner: str) -> None:
        """Report that an operator must restore the store, because no daemon has the lost data."""
        if not self._partial:
            self._partial = (
                f"it lacks data that {owner} had confirmed without keeping a copy (mirror=no);"
                " use tickwheel init --force, then tickwheel restore"
            )
            self._on_event("store_is_partial", self._partial)
        self._wait = _Wait("a restore of the store, which lacks confirmed data", None)

    async def first_campaign(self, owner: str, address: str) -> bool:
        """Return True once this daemon leads, or False once another daemon leads or the store is
        unreachable.

        The lease of an earlier process of this node is taken over if that process has certainly
        ended. Its name and address do not prove this, because two living daemons can have the same.
        Raise StoreUnusable for a store whose owner died while rewriting it.
        """
        self._node = owner.rpartition("/")[0]
        self._prepare_announcement(owner, address)
        while True:
            try:
                turn, before = await self.can_lead(), self._stored_leader
                if before is not None:
                    turn = before.node == self._node and is_over(before.life, self._life)
                if turn and await self.acquire(owner, address, before):
                    return True
            except (
                StoreError
            ) as error:  # the store was reachable a moment ago; ``campaign`` retries
                self._note_trouble(error)
                return False
            self._log_wait()
            if self.leader is not None:
                return False
            if self._partial:
                raise StoreUnusable(f"the store is incomplete: {self._partial}")
            await asyncio.sleep(self._poll_s)

    async def campaign(self, owner: str, address: str) -> None:
        """Return once this daemon leads."""
        self._prepare_announcement(owner, address)
        while True:
            try:
                if await self.can_lead() and await self.acquire(owner, address):
                    return
            except StoreError as error:
                self._note_trouble(error)
                self._wait = _Wait("an answer from the store", None)
            self._log_wait()
            await self._pause()

    async def acquire(self, owner: str, address: str, instead_of: Leader | None = None) -> bool:
        now = self._clock.read()
        life = str(self._life) if self._life is not None else ""
        me = Leader(owner, address, now.now_ms, 0, life, self.http)
        try:
            is_given = await self._election.acquire(me, instead_of)
        except asyncio.CancelledError:
            # The store may already have granted the lease.
            await finish_despite_cancellation(self._release(me))
            raise
        if not is_given:
            return False
        self.me = self.leader = me
        self._extend_permission(now.mono_ms)
        return True

    # --- leading -----------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Record the epoch with which this daemon opened the store."""
        assert self.me is not None
        self.me = self.leader = replace(self.me, epoch=epoch)

    async def hold(self, on_regained: Callable[[], None]) -> None:
        """Renew the lease, forever. Raise Deposed if another daemon may lead. ``on_regained`` is
        called when a lost lease or connection is restored: the store may have lost data."""
        pause_s = min(RENEW_S_MAX, self._ttl_ms / 1000 / RENEWALS_PER_TTL)
        is_lost, connections = False, self._election.connections
        while True:
            await asyncio.sleep(pause_s if not self._trouble else TROUBLE_RETRY_S)
            mono_ms, me = self._clock.read().mono_ms, self._own_entry()
            try:
                # A lost lease stays lost until it is regained and checked: a call between may fail.
                is_lost = is_lost or not await self._election.renew(me)
                if is_lost:
                    await self._regain(me)
            except Deposed:
                raise
            except StoreError as error:
                self._note_trouble(error)
                continue
            if is_lost or self._election.connections > connections:
                on_regained()
            is_lost, connections = False, self._election.connections
            self._note_recovery()
            self._extend_permission(mono_ms)

    async def watch(self, on_change: Callable[[bool], None]) -> None:
        """Watch the lease, forever. Call ``on_change`` with False when the lease expires on this
        daemon's clock and the store does not answer, and with True when it is held again."""
        is_held = True
        on_change(is_held)
        while True:
            left_ms = self._until_mono_ms - self._clock.read().mono_ms
            if left_ms > 0 and not is_held:
                is_held = True
                on_change(is_held)
            await asyncio.sleep(left_ms / 1000 if left_ms > 0 else ANSWER_S)
            if left_ms <= 0 and is_held and not self.may_deliver(self._clock.read().mono_ms):
                is_held = False
                on_change(is_held)

    async def _regain(self, me: Leader) -> None:
        """Reacquire a lease that expired while the store or this process was suspended."""
        if me.epoch and await self._election.acquire(me):
            state = await self._election.look()
            another_led = state.owner != me.owner and state.epoch >= me.epoch
            if not (state.incarnation and another_led):
                return
            await self._election.release(me)
        raise Deposed("the lease has expired, and another daemon leads or has led since then")

    def _extend_permission(self, sent_mono_ms: int) -> None:
        self._until_mono_ms = sent_mono_ms + self._ttl_ms - self._ttl_ms // MARGIN_PART
        self._on_renewed()

    def _own_entry(self) -> Leader:
        assert self.me is not None
        return self.me

    async def resign(self) -> None:
        """Release the lease, so that a standby does not have to wait until it expires."""
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
            self._note_trouble(error)

    def forfeit(self, *, for_good: bool) -> None:
        """Stop deliveries. ``for_good`` means that another daemon leads, so this daemon has no
        lease to release."""
        self._until_mono_ms = 0
        if for_good:
            self.me = None

    async def close(self) -> None:
        await self._election.close()

    # --- logging of trouble --------------------------------------------------------------------

    def _note_trouble(self, error: StoreError) -> None:
        if not self._trouble:
            self._trouble = True
            self._on_event("election_trouble", error.message)

    def _note_recovery(self) -> None:
        if self._trouble:
            self._trouble = False
            self._on_event("election_works_again", "the store can be used for the election again")
