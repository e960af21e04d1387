"""The lease, its licence and its end, with an election that the test holds in its hands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from support.stand_in import stand_in
from tickwheel.clock import Clock
from tickwheel.persistence.contract import (
    LEADER_WATCH_S,
    ElectionState,
    Leader,
    Standby,
    StoreAway,
    StoreUnreachable,
    StoreUnusable,
)
from tickwheel.server.fleet import lease as module
from tickwheel.server.fleet.lease import STORE, Deposed, Leadership, Life
from tickwheel.server.logs import LINES_MAX, LINES_S
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.roles import Roles

NOW_MS = 1_800_000_000_000
TTL_MS = 3_000
ME, ADDRESS = "here/1", "tcp://here:1"
OTHER = Leader("there/2", "tcp://there:2", NOW_MS, 7)
LIFE = Life.own()
assert LIFE is not None
OVER = str(LIFE._replace(start=LIFE.start - 1))
"""The life of an earlier process with our process id."""


class Sources:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.mono = 1_000

    def wall_ms(self) -> int:
        return NOW_MS + self.mono

    def mono_ms(self) -> int:
        return self.mono


class TableElection:
    """What a store says, as plain attributes."""

    def __init__(self) -> None:
        self.leader: Leader | None = None
        self.incarnation = "x"
        self.epoch = 0
        self.owner = ""
        self.clean = True
        self.up_s = 3_600
        self.rewriting = self.lost_by = ""
        self.is_replica = self.leased_here = self.is_durable = False
        self.away = False
        self.unreachable = 0
        """Number of first questions that find no server."""
        self.asked = 0
        self.connections = 1
        self.address = ""
        self.standbys: tuple[Standby, ...] = ()
        self.said: list[Standby] = []
        """Who said that it stands by."""
        self.released: list[str] = []

    def _ask(self) -> None:
        if self.away:
            raise StoreAway("no answer")

    async def prepare(self) -> None:
        self.asked += 1
        if self.asked <= self.unreachable:
            raise StoreUnreachable("store x: nobody is there")
        self._ask()

    async def look(self, me: Standby | None = None) -> ElectionState:
        self._ask()
        if me is not None:
            self.said.append(me)
        return ElectionState(
            self.leader,
            TTL_MS,
            self.incarnation,
            self.epoch,
            self.owner,
            self.clean,
            self.up_s,
            self.rewriting,
            self.is_replica,
            self.lost_by,
            self.leased_here,
            self.is_durable,
        )

    async def acquire(self, me: Leader, instead_of: Leader | None = None) -> bool:
        self._ask()
        if self.leader is not None and self.leader.owner != me.owner:
            if self.leader != instead_of:
                return False
        self.leader = me
        return True

    async def renew(self, me: Leader) -> bool:
        self._ask()
        return self.leader is not None and self.leader.owner == me.owner

    async def release(self, me: Leader) -> None:
        self._ask()
        self.released.append(me.owner)
        self.leader = None

    async def close(self) -> None:
        pass


class LeaderRig:
    """A leadership whose sleeps are steps of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sources = Sources()
        self.table = TableElection()
        self.events: list[str] = []
        """Without those that say what it waits for."""
        self.waits: list[str] = []
        self.renewals = 0
        self.slept: list[float] = []
        self.script: list[Callable[[], None]] = []
        self.leadership = Leadership(
            self.table,
            TTL_MS,
            Clock(10**12, self.sources),
            on_event=self._on_event,
            on_renewed=self._renewed,
            life=LIFE,
        )

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            if not self.script:
                raise asyncio.CancelledError
            self.script.pop(0)()

        monkeypatch.setattr(module, "asyncio", stand_in(asyncio, sleep=sleep))

    def _on_event(self, event: str, text: str) -> None:
        if event == "waiting":
            self.waits.append(text)
        else:
            self.events.append(event)

    def _renewed(self) -> None:
        self.renewals += 1

    async def hold(self, *steps: Callable[[], None]) -> int:
        """Each step runs before one renewal; how often the store had to be looked at."""
        self.script = list(steps)
        looked: list[int] = []
        with pytest.raises(asyncio.CancelledError):
            await self.leadership.hold(lambda: looked.append(1))
        return len(looked)

    def later(self, ms: int) -> Callable[[], None]:
        def step() -> None:
            self.sources.mono += ms

        return step


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> LeaderRig:
    return LeaderRig(monkeypatch)


async def test_the_licence_lasts_less_than_the_lease(rig: LeaderRig) -> None:
    assert not rig.leadership.may_deliver(rig.sources.mono)
    assert await rig.leadership.acquire(ME, ADDRESS)
    start = rig.sources.mono
    assert rig.leadership.may_deliver(start + 2_499)
    assert not rig.leadership.may_deliver(start + 2_500)


async def test_renewals_extend_it_from_when_they_were_sent(rig: LeaderRig) -> None:
    await rig.leadership.acquire(ME, ADDRESS)
    assert await rig.hold(rig.later(750), rig.later(750)) == 0
    assert rig.leadership.may_deliver(rig.sources.mono + 2_499)
    assert rig.renewals == 3
    assert rig.slept[0] == TTL_MS / 1000 / module.RENEWALS_PER_TTL


async def test_a_long_lease_is_renewed_within_the_watch_for_a_leader(rig: LeaderRig) -> None:
    rig.leadership._ttl_ms = 3_600_000
    await rig.leadership.acquire(ME, ADDRESS)
    await rig.hold(rig.later(0))
    assert rig.slept[0] < LEADER_WATCH_S


async def test_an_unreachable_store_is_logged_once_per_outage(rig: LeaderRig) -> None:
    await rig.leadership.acquire(ME, ADDRESS)
    until = rig.sources.mono + 2_500

    def away() -> None:
        rig.table.away = True
        rig.sources.mono += 1_000

    def back() -> None:
        rig.table.away = False
        rig.sources.mono += 1_000

    await rig.hold(away, rig.later(1_000), back)
    assert rig.events == ["election_trouble", "election_works_again"]
    assert rig.leadership.may_deliver(until + 1)


async def test_watchers_hear_when_the_lease_ends_and_returns(rig: LeaderRig) -> None:
    await rig.leadership.acquire(ME, ADDRESS)
    told: list[bool] = []

    def renewed() -> None:
        assert told == [True, False]
        rig.leadership._extend_permission(rig.sources.mono)

    rig.script = [rig.later(2_500), rig.later(200), rig.later(200), rig.later(200), renewed]
    with pytest.raises(asyncio.CancelledError):
        await rig.leadership.watch(told.append)
    assert told == [True, False, True]
    assert rig.slept == [2.5, *4 * [module.ANSWER_S], 2.5]


async def test_a_paused_process_asks_the_store_before_it_reports(rig: LeaderRig) -> None:
    await rig.leadership.acquire(ME, ADDRESS)
    told: list[bool] = []
    renewed = partial(rig.leadership._extend_permission, rig.sources.mono + 60_000)
    rig.script = [rig.later(60_000), renewed]
    with pytest.raises(asyncio.CancelledError):
        await rig.leadership.watch(told.append)
    assert told == [True], "the store has answered at once"


async def test_an_expired_lease_is_retaken_and_the_store_checked(rig: LeaderRig) -> None:
    await rig.leadership.acquire(ME, ADDRESS)
    rig.leadership.set_epoch(4)
    rig.table.owner, rig.table.epoch = ME, 4

    def gone() -> None:
        rig.table.leader = None
        rig.sources.mono += 5_000

    assert await rig.hold(gone) == 1
    assert rig.leadership.may_deliver(rig.sources.mono)
    assert rig.table.leader is not None


@pytest.mark.parametrize("fails", [False, True])
async def test_a_new_connection_checks_the_store(rig: LeaderRig, fails: bool) -> None:
    await rig.leadership.acquire(ME, ADDRESS)
    original = rig.table.renew

    async def reconnecting(me: Leader) -> bool:
        if rig.table.connections == 1:
            rig.table.connections += 1
            if fails:
                raise StoreAway("no answer over the new connection")
        return await original(me)

    rig.table.renew = reconnecting  # type: ignore[method-assign]  # this once
    assert await rig.hold(rig.later(750), rig.later(750)) == 1


@pytest.mark.parametrize("how", ["leads", "led"])
async def test_another_leader_deposes(rig: LeaderRig, how: str) -> None:
    await rig.leadership.acquire(ME, ADDRESS)
    rig.leadership.set_epoch(4)

    def other() -> None:
        rig.table.leader = OTHER if how == "leads" else None
        rig.table.owner, rig.table.epoch = OTHER.owner, 5

    rig.script = [other]
    with pytest.raises(Deposed):
        await rig.leadership.hold(lambda: None)
    assert rig.table.leader == (OTHER if how == "leads" else None)


@pytest.mark.parametrize("failing", ["acquire", "look", "release"])
async def test_another_leader_deposes_after_a_failed_check(
    rig: LeaderRig, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The lease is regained, and a call fails before it is known that another daemon led."""
    await rig.leadership.acquire(ME, ADDRESS)
    rig.leadership.set_epoch(4)
    original, failures = getattr(rig.table, failing), [StoreAway("no answer")]

    async def fail_once(*given: Any) -> Any:
        if failures and failing != "acquire":
            raise failures.pop()
        result = await original(*given)
        if failures:
            raise failures.pop()  # the call had its effect, and the answer is lost
        return result

    def other_led() -> None:
        rig.table.leader = None
        rig.table.owner, rig.table.epoch = OTHER.owner, 5
        monkeypatch.setattr(rig.table, failing, fail_once)

    rig.script = [other_led, rig.later(100), rig.later(100)]
    with pytest.raises(Deposed):
        await rig.leadership.hold(lambda: None)
    assert rig.table.leader is None


async def test_a_lease_lost_before_the_store_was_opened_is_lost(rig: LeaderRig) -> None:
    await rig.leadership.acquire(ME, ADDRESS)

    def gone() -> None:
        rig.table.leader = None

    rig.script = [gone]
    with pytest.raises(Deposed):
        await rig.leadership.hold(lambda: None)


async def test_an_empty_store_is_initialised_after_one_lease_time(rig: LeaderRig) -> None:
    rig.table.incarnation = ""
    assert not await rig.leadership.can_lead()
    rig.sources.mono += TTL_MS - 1
    assert not await rig.leadership.can_lead()
    rig.sources.mono += 1
    assert await rig.leadership.can_lead()


async def test_an_empty_store_that_cannot_lose_its_data_is_initialised_at_once(
    rig: LeaderRig,
) -> None:
    rig.table.incarnation, rig.table.is_durable = "", True
    assert await rig.leadership.can_lead()


@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_store_seen_with_data_is_never_initialised_again(
    rig: LeaderRig, is_durable: bool
) -> None:
    rig.table.is_durable = is_durable
    rig.table.leader = OTHER
    assert not await rig.leadership.can_lead()
    rig.table.leader, rig.table.incarnation = None, ""
    for _ in range(3):
        rig.sources.mono += 10 * TTL_MS
        assert not await rig.leadership.can_lead()
    assert rig.events == ["store_came_back_empty"]
    rig.table.incarnation = "written again by its owner, or laid out by an operator"
    assert await rig.leadership.can_lead()


async def test_a_returning_store_waits_for_its_owner_first(rig: LeaderRig) -> None:
    """It may be older than what its owner, if it lives, has in memory."""
    rig.table.clean, rig.table.up_s = False, 3
    assert not await rig.leadership.can_lead()
    rig.table.up_s = 4
    assert await rig.leadership.can_lead()
    rig.table.connections += 1  # a replica that was promoted, or a network that came back
    assert not await rig.leadership.can_lead()
    rig.sources.mono += TTL_MS
    assert await rig.leadership.can_lead()


async def test_a_lease_that_ended_at_this_server_was_not_lost(rig: LeaderRig) -> None:
    """However short it has been there: its owner was there too."""
    rig.table.clean, rig.table.up_s, rig.table.leased_here = False, 0, True
    assert await rig.leadership.can_lead()
    rig.table.connections += 1  # the store may have stood still: its owner tries again, too
    assert not await rig.leadership.can_lead()
    rig.sources.mono += TTL_MS // 2 - 1
    assert not await rig.leadership.can_lead()
    rig.sources.mono += 1
    assert await rig.leadership.can_lead()


async def test_a_promoted_replica_waits_for_its_owner_first(rig: LeaderRig) -> None:
    rig.table.clean, rig.table.is_replica = False, True
    for _ in range(3):
        rig.sources.mono += TTL_MS
        with pytest.raises(StoreAway, match="replica"):
            await rig.leadership.can_lead()
    rig.table.is_replica = False
    assert not await rig.leadership.can_lead()
    rig.sources.mono += TTL_MS - 1
    assert not await rig.leadership.can_lead()
    rig.sources.mono += 1
    assert await rig.leadership.can_lead()


async def test_a_store_being_rewritten_is_left_to_its_owner(rig: LeaderRig) -> None:
    # FLUSHALL took the lease too; taking it now would depose the only one who has everything.
    rig.table.rewriting, rig.table.clean, rig.table.up_s = OTHER.owner, False, 3_600
    for _ in range(10):
        assert not await rig.leadership.can_lead()
        rig.sources.mono += TTL_MS
    assert rig.events == ["store_is_partial"], "its owner is not there: logged once"
    rig.table.leader = OTHER
    assert not await rig.leadership.can_lead()
    rig.table.leader = None
    assert not await rig.leadership.can_lead()
    assert rig.events == ["store_is_partial"], "it may come back"
    rig.table.rewriting = ""
    assert await rig.leadership.can_lead()


async def test_a_start_on_a_partial_store_fails_without_its_owner(rig: LeaderRig) -> None:
    rig.table.rewriting = OTHER.owner
    rig.script = [rig.later(TTL_MS // 2)] * 3
    with pytest.raises(StoreUnusable, match=f"{OTHER.owner}.*tickwheel init --force"):
        await rig.leadership.first_campaign(ME, ADDRESS)
    assert rig.table.leader is None, "its lease was never asked for"


async def test_a_store_whose_owner_has_no_copy_waits_for_an_operator(rig: LeaderRig) -> None:
    """There is nobody to wait for, so that is said at once, and it lasts until it is restored."""
    rig.table.lost_by = OTHER.owner
    for _ in range(10):
        assert not await rig.leadership.can_lead()
        assert rig.events == ["store_is_partial"]
        rig.sources.mono += TTL_MS
    with pytest.raises(
        StoreUnusable, match=f"lacks data that {OTHER.owner} had.*tickwheel restore"
    ):
        await rig.leadership.first_campaign(ME, ADDRESS)
    assert rig.table.leader is None, "its lease was never asked for"
    rig.table.lost_by = ""
    assert await rig.leadership.can_lead()


async def test_a_cleanly_closed_store_needs_no_wait(rig: LeaderRig) -> None:
    rig.table.up_s = 0
    assert await rig.leadership.can_lead()


async def test_a_clean_end_before_an_epoch_that_the_store_has_lost_counts_for_nothing(
    rig: LeaderRig,
) -> None:
    """It came back as it was before the last opening, whose owner may live."""
    rig.table.leader, rig.table.epoch = OTHER, 7
    assert not await rig.leadership.can_lead()
    rig.table.leader, rig.table.epoch, rig.table.up_s = None, 6, 0
    assert not await rig.leadership.can_lead()
    rig.table.up_s = 4
    assert await rig.leadership.can_lead()


async def test_a_new_leaders_epoch_is_known_after_it_opened_the_store(rig: LeaderRig) -> None:
    rig.table.leader, rig.table.owner, rig.table.epoch = replace(OTHER, epoch=0), "before/1", 6
    await rig.leadership.can_lead()
    assert rig.leadership.leader == replace(OTHER, epoch=0), "that was its predecessor's"
    rig.table.owner, rig.table.epoch = OTHER.owner, 7
    await rig.leadership.can_lead()
    assert rig.leadership.leader == OTHER


async def test_a_local_leader_that_died_without_an_epoch_is_replaced(rig: LeaderRig) -> None:
    rig.table.leader = Leader("here/0", ADDRESS, NOW_MS, 0, OVER)
    rig.table.owner, rig.table.epoch = "here/0", 3
    assert await rig.leadership.first_campaign(ME, ADDRESS)


@pytest.mark.parametrize("address", [ADDRESS, "tcp://here:9"])
async def test_the_first_campaign_replaces_a_dead_local_leader(
    rig: LeaderRig, address: str
) -> None:
    rig.table.leader = replace(OTHER, owner="here/0", address=address, life=OVER)
    assert await rig.leadership.first_campaign(ME, ADDRESS)
    assert rig.table.leader == Leader(ME, ADDRESS, NOW_MS + rig.sources.mono, 0, str(LIFE))


@pytest.mark.parametrize("address", [ADDRESS, OTHER.address])
@pytest.mark.parametrize(
    ("owner", "life"),
    [
        ("there/2", OVER),
        ("here/0", ""),
        ("here/0", "rubbish"),
        ("here/0", str(LIFE)),
        ("here/0", str(LIFE._replace(boot="of another machine", start=0))),
        ("here/0", str(LIFE._replace(namespace="1", start=0))),
    ],
    ids=["another node", "unsaid", "unreadable", "alive", "other machine", "other container"],
)
async def test_the_first_campaign_yields_unless_the_leader_is_dead(
    rig: LeaderRig, owner: str, life: str, address: str
) -> None:
    """Name and address prove nothing: cloned machines, a load balancer's address."""
    rig.table.leader = replace(OTHER, owner=owner, address=address, life=life)
    assert not await rig.leadership.first_campaign(ME, ADDRESS)
    assert rig.leadership.leader == rig.table.leader


async def test_a_live_daemon_with_the_same_node_name_is_logged_once(rig: LeaderRig) -> None:
    former = replace(OTHER, owner="here/0", address=ADDRESS)
    rig.table.leader = former
    assert not await rig.leadership.first_campaign(ME, ADDRESS)
    rig.sources.mono += TTL_MS
    await rig.leadership.can_lead()
    assert not rig.events, "it may have been this node's former life, whose lease still ran"
    rig.table.leader = replace(former, owner="here/7")
    await rig.leadership.can_lead()
    rig.sources.mono += TTL_MS
    await rig.leadership.can_lead()
    assert not rig.events
    for _ in range(3):
        rig.sources.mono += 1
        await rig.leadership.can_lead()
    assert rig.events == ["same_node_name"]
    rig.table.leader = OTHER
    for _ in range(3):
        rig.sources.mono += TTL_MS
        await rig.leadership.can_lead()
    assert rig.events == ["same_node_name"]


async def _campaign(rig: LeaderRig, *steps: Callable[[], None]) -> None:
    rig.script = list(steps)
    with pytest.raises(asyncio.CancelledError):
        await rig.leadership.campaign(ME, ADDRESS)


async def test_a_wait_for_a_lease_is_logged_once_with_its_end(rig: LeaderRig) -> None:
    rig.table.leader = OTHER
    assert not await rig.leadership.first_campaign(ME, ADDRESS)
    await _campaign(rig, *[rig.later(module.LOG_AGAIN_MS)] * 5)
    [logged] = rig.waits
    assert f"the lease of {OTHER.owner} at {OTHER.address}: 3.0 s, until 08:00:04 UTC" in logged
    rig.table.leader = replace(OTHER, owner="third/3")
    await _campaign(rig)
    assert "third/3" in rig.waits[1]
    assert len(rig.waits) == 2


@pytest.mark.parametrize("why", ["away", "empty", "came back", "rewriting"])
async def test_a_wait_with_nobody_leading_is_logged_again_each_minute(
    rig: LeaderRig, why: str
) -> None:
    rig.table.away = why == "away"
    rig.table.incarnation = "" if why == "empty" else "x"
    rig.table.rewriting = OTHER.owner if why == "rewriting" else ""
    rig.table.clean = False
    rig.table.up_s = 0 if why == "came back" else 3_600
    rig.leadership.incarnation = "x"
    await _campaign(rig, *[rig.later(module.LOG_AGAIN_MS // 10)] * 19)
    assert len(rig.waits) == 2, rig.waits
    assert len(set(rig.waits)) == (2 if "UTC" in rig.waits[0] else 1)


async def test_the_wait_for_an_owner_names_its_end(rig: LeaderRig) -> None:
    rig.table.clean, rig.table.up_s = False, 1
    await _campaign(rig)
    assert "the restarted store, which may have newer data: 3.0 s, until 08:00:04" in rig.waits[0]


async def test_resigning_gives_the_lease_back(rig: LeaderRig) -> None:
    await rig.leadership.acquire(ME, ADDRESS)
    await rig.leadership.resign()
    assert rig.table.released == [ME]
    assert not rig.leadership.may_deliver(rig.sources.mono)
    await rig.leadership.resign()
    assert rig.table.released == [ME]


async def test_a_fenced_daemon_does_not_release_the_lease(rig: LeaderRig) -> None:
    await rig.leadership.acquire(ME, ADDRESS)
    rig.leadership.forfeit(for_good=True)
    rig.table.leader = OTHER
    await rig.leadership.resign()
    assert rig.table.leader == OTHER


async def test_the_first_campaign_skips_an_unreachable_store(rig: LeaderRig) -> None:
    rig.table.away = True
    assert not await rig.leadership.first_campaign(ME, ADDRESS)
    assert rig.events == ["election_trouble"]


# --- a start before its store --------------------------------------------------------------------


async def test_a_start_waits_for_the_store(rig: LeaderRig) -> None:
    rig.table.unreachable = 3
    rig.script = [rig.later(250)] * 3
    await rig.leadership.prepare(1.0)
    assert rig.table.asked == 4 and not rig.script
    [said] = rig.waits
    assert "1.0 s" in said and "store_wait_s" in said and "nobody is there" in said


async def test_a_start_without_a_limit_waits_for_ever(rig: LeaderRig) -> None:
    rig.table.unreachable = 500
    rig.script = [rig.later(60_000)] * 500
    await rig.leadership.prepare(None)
    assert rig.table.asked == 501
    assert set(rig.waits) == {f"for {STORE}: no time limit: store x: nobody is there"}
    assert len(rig.waits) > 1, "now and then it says so again"


async def test_a_start_gives_up_at_its_limit(rig: LeaderRig) -> None:
    rig.table.unreachable = 100
    rig.script = [rig.later(250)] * 4
    with pytest.raises(StoreUnreachable, match="nobody is there"):
        await rig.leadership.prepare(1.0)
    assert rig.table.asked == 5 and not rig.script


async def test_a_start_gives_up_at_once_with_limit_0_or_a_stop(rig: LeaderRig) -> None:
    rig.table.unreachable = 100
    with pytest.raises(StoreUnreachable):
        await rig.leadership.prepare(0)
    rig.script = [rig.leadership.give_up]
    with pytest.raises(StoreUnreachable):
        await rig.leadership.prepare(100)
    assert rig.table.asked == 3


async def test_an_unusable_store_ends_the_wait(rig: LeaderRig) -> None:
    rig.table.away = True
    with pytest.raises(StoreAway):
        await rig.leadership.prepare(100)
    assert rig.table.asked == 1


async def test_a_standby_announces_itself_behind_a_leader(rig: LeaderRig) -> None:
    rig.leadership.http = "http://here:2"
    rig.table.incarnation = ""  # an owner that lives may come back: nobody leads yet
    rig.script = [rig.later(250)] * 3
    with pytest.raises(asyncio.CancelledError):
        await rig.leadership.campaign(ME, ADDRESS)
    assert not rig.table.said, "into a store without a leader nothing is written"
    rig.table.leader, rig.table.incarnation = OTHER, "x"
    rig.script = [rig.later(250)] * 12
    with pytest.raises(asyncio.CancelledError):
        await rig.leadership.campaign(ME, ADDRESS)
    since_ms = NOW_MS + 1_000 + 750
    assert rig.table.said == [Standby("here", ADDRESS, "http://here:2", since_ms)] * 4


async def test_a_new_leader_is_not_listed_as_a_standby(rig: LeaderRig) -> None:
    """It was, a moment ago."""
    waiting = Standby("there", "tcp://there:2", "", NOW_MS)
    rig.table.standbys = (Standby("here", ADDRESS, "", NOW_MS), waiting)
    await rig.leadership.acquire(ME, ADDRESS)
    assert rig.leadership.standbys == (waiting,)


def test_repeated_log_events_are_limited() -> None:
    """A store that can be asked and refuses, in turn; each time counts, ten a minute are said."""
    sources = Sources()
    logged: list[str] = []
    log: Any = SimpleNamespace(
        warning=lambda event, detail: logged.append(f"{event} {detail}"),
        info=lambda event, detail: logged.append(f"{event} {detail}"),
    )
    roles: Any = SimpleNamespace(
        log=log, observed=Observed(), clock=Clock(86_400_000, sources), _repeating={}
    )
    for _ in range(100):
        Roles.on_event(roles, "election_trouble", "why")
        Roles.on_event(roles, "election_works_again", "well")
    assert len(logged) == 2 * LINES_MAX
    assert roles.observed.store_errors["election"] == 100
    Roles.on_event(roles, "deposed", "another event")
    assert logged[-1] == "deposed another event"
    sources.mono += int(LINES_S * 1000)
    Roles.on_event(roles, "election_trouble", "why")
    assert logged[-1] == "election_trouble why; 90 more like it were not logged"
