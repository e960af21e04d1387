"""The table of a task's life: each edge can be walked, and the documents show it as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.engine_recount import recount
from support.engine_rig import CONFIG, GRACE_MS, LEASE_MS, RETRY, Got, Rig
from tickwheel.model.records import TRANSITIONS, Event, GroupSettings, State, diagram

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "durability.md"
S, E = State, Event
Edge = tuple[State, Event]


class Life:
    """One task of one group (or two), brought to any state."""

    def __init__(self) -> None:
        self.rig = Rig(replace(CONFIG, retry=replace(RETRY, retries_max=1)))
        self.task_id = 0
        self.got: Got | None = None

    def staged(self) -> None:
        (self.task_id,) = self.rig.stage(delay_ms=1_000, ttl_ms=100_000)

    def scheduled(self) -> None:
        self.rig.subscribe(group="a", prefetch=0)
        self.staged()
        self.rig.commit()

    def scheduled_for_nobody(self) -> None:
        self.staged()
        self.rig.commit()

    def scheduled_again(self) -> None:
        """After a crash that forgot its delivery."""
        self.in_flight()
        self.rig.crash()

    def ready(self) -> None:
        self.scheduled()
        self.rig.pass_time(1_000)
        self.rig.fire()

    def ready_again(self) -> None:
        self.in_flight()
        self.rig.pass_time(LEASE_MS)
        self.rig.expire()

    def in_flight(self) -> None:
        self.ready()
        subscriber = self.rig.subscribe(group="a", prefetch=1)
        (self.got,) = self.rig.dispatch()
        subscriber.prefetch = 0

    def last_in_flight(self) -> None:
        """No further retry is allowed."""
        self.waiting()
        self.due_again()
        subscriber = self.rig.subscribe(group="a", prefetch=2)
        (self.got,) = self.rig.dispatch()
        subscriber.prefetch = 0

    def waiting(self) -> None:
        self.in_flight()
        self.nack()

    def waiting_for_the_clock(self) -> None:
        self.ready()
        self.hold()

    def replaced_in_flight(self) -> None:
        self.in_flight()
        known = self.rig.find(self.task_id)
        assert known is not None
        self.rig.engine.control.give_way(known, self.task_id + 1, self.rig.now_ms)

    def dead(self) -> None:
        self.in_flight()
        self.reject()

    def dead_beside_another(self) -> None:
        self.rig.subscribe(group="b", prefetch=0)
        self.dead()

    # --- events --------------------------------------------------------------------------------

    def commit(self) -> None:
        self.rig.commit()

    def refuse(self) -> None:
        self.rig.seal()
        self.rig.refuse()

    def due(self) -> None:
        self.rig.pass_time(1_000)
        self.rig.fire()

    def due_again(self) -> None:
        self.due()

    def deliver(self) -> None:
        self.rig.subscribe(group="a")
        assert self.rig.dispatch()

    def hold(self) -> None:
        self.rig.now_ms -= 500
        self.rig.subscribe(group="a", prefetch=1)
        assert self.rig.dispatch() == []

    def lapse(self) -> None:
        """Its ttl ends, and nobody asks for it."""
        self.rig.pass_time(100_001)
        while self.rig.engine.firing.request_lapsed(self.rig.now_ms, 100):
            pass
        self.rig.load()

    def expire(self) -> None:
        self.rig.pass_time(100_001)
        self.rig.subscribe(group="a")
        assert self.rig.dispatch() == []

    def lease_over(self) -> None:
        self.rig.pass_time(LEASE_MS)
        assert self.rig.expire() == 1

    def consumer_died(self) -> None:
        self.rig.disconnect(self._got().subscriber, "killed")
        self.rig.pass_time(GRACE_MS)
        assert self.rig.expire() == 1

    def _got(self) -> Got:
        assert self.got is not None
        return self.got

    def ack(self) -> None:
        assert self.rig.ack(self._got()) == "acked"

    def nack(self) -> None:
        assert self.rig.nack(self._got(), 1_000) == "retrying"

    def give_way(self) -> None:
        assert self.rig.nack(self._got(), 1_000) == "cancelled"

    def give_up(self) -> None:
        assert self.rig.nack(self._got()) == "dead"

    def reject(self) -> None:
        self.rig.reject(self._got())

    def waits_for_a_group(self) -> None:
        """It is due, and its topic has none."""
        self.staged()
        self.rig.commit()
        self.due()

    def wants_nothing(self) -> None:
        """A group comes, and it is looked at for it."""
        topic, now_ms = self.rig.core.topic("t"), self.rig.now_ms
        grouping, settings = self.rig.engine.grouping, GroupSettings(tags="other")
        grouping.create_now(topic, "a", now_ms, settings)
        self.rig.pass_time(1_000)
        self.rig.subscribe(group="a")
        assert self.rig.tick() == []

    def release(self) -> None:
        self.rig.release(self._got())

    def cancel(self) -> None:
        assert self.rig.cancel(self.task_id) == "cancelled"

    def reschedule(self) -> None:
        assert self.rig.reschedule(self.task_id, 3_000) == "scheduled"

    def requeue(self) -> None:
        assert self.rig.requeue(self.task_id, "a") == "requeued"

    def delete(self) -> None:
        assert self.rig.delete_dead(self.task_id, "a") == "deleted"

    def state(self) -> str:
        if self.task_id in self.rig.core.open.effects.enqueued:
            return "staged"
        word = self.rig.state(self.task_id)
        return "refused" if word == "unknown" else word


Step = Callable[[Life], None]
WALKS: dict[Edge, tuple[Step, Step]] = {
    (S.STAGED, E.LANDED): (Life.staged, Life.commit),
    (S.STAGED, E.REFUSED): (Life.staged, Life.refuse),
    (S.SCHEDULED, E.DUE): (Life.scheduled, Life.due),
    (S.SCHEDULED, E.RESCHEDULE): (Life.scheduled, Life.reschedule),
    (S.SCHEDULED, E.CANCEL): (Life.scheduled, Life.cancel),
    (S.SCHEDULED, E.ACK): (Life.scheduled_again, Life.ack),
    (S.SCHEDULED, E.LEAVE_OUT): (Life.scheduled_for_nobody, Life.wants_nothing),
    (S.READY, E.DELIVER): (Life.ready, Life.deliver),
    (S.READY, E.RESCHEDULE): (Life.ready, Life.reschedule),
    (S.READY, E.CANCEL): (Life.ready, Life.cancel),
    (S.READY, E.EXPIRE): (Life.ready, Life.expire),
    (S.READY, E.ACK): (Life.ready_again, Life.ack),
    (S.READY, E.HOLD): (Life.ready, Life.hold),
    (S.READY, E.LEAVE_OUT): (Life.waits_for_a_group, Life.wants_nothing),
    (S.READY, E.POSTPONE): (Life.ready_again, Life.reschedule),
    (S.IN_FLIGHT, E.ACK): (Life.in_flight, Life.ack),
    (S.IN_FLIGHT, E.NACK): (Life.in_flight, Life.nack),
    (S.IN_FLIGHT, E.GIVE_UP): (Life.last_in_flight, Life.give_up),
    (S.IN_FLIGHT, E.REJECT): (Life.in_flight, Life.reject),
    (S.IN_FLIGHT, E.LEASE_OVER): (Life.in_flight, Life.lease_over),
    (S.IN_FLIGHT, E.CONSUMER_DIED): (Life.in_flight, Life.consumer_died),
    (S.IN_FLIGHT, E.RELEASE): (Life.in_flight, Life.release),
    (S.IN_FLIGHT, E.GIVE_WAY): (Life.replaced_in_flight, Life.give_way),
    (S.WAITING, E.DUE): (Life.waiting, Life.due_again),
    (S.WAITING, E.POSTPONE): (Life.waiting, Life.reschedule),
    (S.WAITING, E.RESCHEDULE): (Life.waiting_for_the_clock, Life.reschedule),
    (S.WAITING, E.CANCEL): (Life.waiting, Life.cancel),
    (S.WAITING, E.ACK): (Life.waiting, Life.ack),
    (S.WAITING, E.EXPIRE): (Life.waiting, Life.lapse),
    (S.DEAD, E.REQUEUE): (Life.dead, Life.requeue),
    (S.DEAD, E.DELETE): (Life.dead, Life.delete),
    (S.DEAD, E.CANCEL): (Life.dead_beside_another, Life.cancel),
}


def test_every_transition_has_a_walk() -> None:
    assert WALKS.keys() == TRANSITIONS.keys()


@pytest.mark.parametrize("edge", TRANSITIONS, ids=lambda edge: f"{edge[0]} {edge[1].name}")
def test_the_engine_takes_every_edge(edge: Edge) -> None:
    begin, event = WALKS[edge]
    life = Life()
    begin(life)
    if begin is not Life.dead_beside_another:
        assert life.state() == edge[0]
    event(life)
    assert life.state() == TRANSITIONS[edge]
    recount(life.rig)
    life.rig.commit()
    recount(life.rig)


def test_final_states_have_no_transitions() -> None:
    finals = {S.ACKED, S.CANCELLED, S.EXPIRED, S.DELETED, S.FILTERED, S.REFUSED}
    assert {state for state, _ in TRANSITIONS} == set(S) - finals


def test_every_state_can_be_reached_and_every_event_happens() -> None:
    reached = {S.STAGED}
    while True:
        more = {end for (start, _), end in TRANSITIONS.items() if start in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(S)
    assert {event for _, event in TRANSITIONS} == set(E)


def test_the_document_shows_the_table() -> None:
    assert diagram() in DOCUMENT.read_text()
