"""Rules of the engine's state machine: subscribers, and what a tick does."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from support.engine_model import SCAN_MS
from support.engine_model_content import Start, Task
from support.engine_model_rules import (
    ROOMY,
    TIGHT,
    StoreRules,
    groups,
    policies,
    steps_ms,
    topics,
    ttls_ms,
)
from support.engine_recount import recount
from support.engine_rig import Got
from tickwheel.engine.state import EngineConfig
from tickwheel.model.policies import RetryPolicy
from tickwheel.model.records import State

LEASE_MS = 400
ROUNDING = 1e-5


class DeliveryRules(StoreRules):
    """Check that the engine does what the model allows, and leaves nothing out."""

    @initialize(config=st.sampled_from([ROOMY, TIGHT]), names=st.lists(groups, unique=True))
    def begin_with(self, config: EngineConfig, names: list[str]) -> None:
        self.begin(config)
        for group in names:
            self.subscribe("a", group, 100, once=False)

    @rule(
        topic=topics,
        group=groups,
        prefetch=st.sampled_from([0, 1, 3, 100]),
        once=st.sampled_from([False, False, True]),
        at_most_once=st.sampled_from([False, False, False, True]),
    )
    def subscribe(
        self, topic: str, group: str, prefetch: int, once: bool, at_most_once: bool = False
    ) -> None:
        if self.model.now.is_closed(topic, group):
            return  # refused at the door
        self.subscribers.append(
            self.rig.subscribe(
                topic,
                group,
                prefetch=prefetch,
                lease_ms=LEASE_MS,
                once=once,
                at_most_once=at_most_once,
            )
        )
        self.see_group(topic, group)

    def see_group(self, topic: str, name: str) -> None:
        """Add a group that the engine has just created."""
        made = self.rig.group(topic, name)
        self.model.add_group(topic, name, Start(made.since_ms, made.since_id))

    # --- what is due ---------------------------------------------------------------------------

    @rule(step=st.sampled_from(["fire", "load", "dispatch", "expire"]), loads=st.booleans())
    def a_part_of_a_pulse(self, step: str, loads: bool) -> None:
        if step == "fire":
            self.fire(loads)
        elif step == "load":
            self.rig.load()
            self._see_due(everything=False)
        elif step == "dispatch":
            self.dispatch(loads)
        else:
            self.expire()

    def fire(self, loads: bool) -> None:
        if loads:
            self.rig.fire()
        else:
            self.rig.engine.firing.fire(self.rig.now_ms, 3)
        self._see_due(everything=loads)

    @rule(ms=steps_ms)
    def tick(self, ms: int) -> None:
        """Do a tick, as the shard does regularly."""
        self.pass_time(ms)
        self.fire(loads=True)
        self.expire()
        self.dispatch(loads=True)

    @rule(count=st.integers(1, 3), group=groups, ttl_ms=ttls_ms, retry=policies)
    def enqueue_and_deliver(
        self, count: int, group: str, ttl_ms: int | None, retry: RetryPolicy | None
    ) -> None:
        """Enqueue and deliver often, because most rules concern deliveries."""
        for _ in range(count):
            self.stage("a", 0, ttl_ms=ttl_ms, retry=retry)
        self.commit()
        if not any(s.group.name == group for s in self.subscribers):
            self.subscribe("a", group, 100, once=False)
        self.tick(0)

    def _see_due(self, *, everything: bool) -> None:
        places, now_ms = recount(self.rig), self.rig.now_ms
        owners = {i for i, _ in places}
        content, there = self.model.now, self.rig.known([*self.model.now.tasks])
        for task in list(content.tasks.values()):
            waits = bool(content.groups.get(task.topic)) and not content.live(task.topic)
            if task.standings is None and (task.id in owners or task.id not in there):
                assert task.due_ms <= self.high_ms, "fired early"
                self.model.due(task)
            elif task.standings is None and everything and not waits:
                assert task.due_ms > now_ms, f"{task.id} was not fired"
            self._see_lapsed(task, places, everything=everything)
            if task.id not in content.tasks:
                continue
            for group, standing in (task.standings or {}).items():
                if standing.state is not State.WAITING:
                    continue
                if places.get((task.id, group)) == "ready":
                    assert standing.at_ms <= self.high_ms, "tried again early"
                    standing.come()
                elif everything:
                    assert standing.at_ms > now_ms, f"{task.id} was not tried again"

    def _see_lapsed(
        self, task: Task, places: dict[tuple[int, str], str], *, everything: bool
    ) -> None:
        """Expire tasks that were not taken in time."""
        is_over = task.is_over(self.high_ms)
        if task.standings == {}:
            # Due on a topic without a group.
            if (task.id, "") not in places and not self.model.now.groups.get(task.topic):
                assert is_over, f"{task.id} is gone"
                self.model.expire_without_group(task)
            return
        for group, standing in list((task.standings or {}).items()):
            if standing.state not in (State.READY, State.WAITING):
                continue
            if (task.id, group) not in places:
                if standing.coming and self.rig.find(task.id) is not None:
                    continue
                assert is_over, f"{task.id} left {group}"
                self.model.expire(task, group)
            elif everything:
                assert not task.is_over(self.rig.now_ms), f"{task.id} does not expire in {group}"

    def dispatch(self, loads: bool) -> None:
        if loads:
            self.rig.load()
            self._see_due(everything=False)
        before = len(self.rig.core.open.handed)
        if loads:
            got = self.rig.dispatch()
        else:
            got = self.rig.take(self.rig.engine.delivery.dispatch(*self.rig.now, 2)[0])
        handed = self.rig.take(self.rig.core.open.handed[before:])
        self._see_deliveries(got, handed, everything=loads)

    def _see_deliveries(self, got: list[Got], handed: list[Got], *, everything: bool) -> None:
        model, rig = self.model, self.rig
        assert not any(item.subscriber.at_most_once for item in got), "sent before its end"
        assert not any(item.subscriber in self.doubted for item in (*got, *handed)), "to the dead"
        for delivery in (*got, *handed):
            task = model.now.tasks[delivery.id]
            assert task.due_ms == delivery.due_ms <= rig.now_ms, "delivered early"
            assert not task.is_over(rig.now_ms), "delivered when its time to live was over"
            assert not model.now.is_held(task.topic, delivery.group.name), "delivered in a pause"
            for key in ((task.topic, delivery.group.name), (task.topic, "")):
                if key in model.rates:
                    assert model.rates[key].tokens(rig.mono_ms) > 1 - ROUNDING, "over the rate"
                    model.rates[key].sent_mono_ms.append(rig.mono_ms)
            failed = model.standing(delivery.id, delivery.group.name).failed
            attempt = model.deliver(
                task, delivery.group.name, rig.mono_ms, delivery.subscriber.lease_ms
            )
            assert (attempt, failed) == (delivery.attempt, delivery.failures)
            receipt = delivery.id, delivery.group, delivery.epoch, delivery.attempt
            assert receipt not in self.receipts, "two deliveries have one receipt"
            self.receipts.add(receipt)
        for delivery in handed:
            assert (
                model.ack((delivery.id, delivery.group.name, delivery.epoch, delivery.attempt))
                == "acked"
            )
        self.got += (*got, *handed)
        places = recount(rig)
        for task in list(model.now.tasks.values()):
            for name, standing in list((task.standings or {}).items()):
                place = places.get((task.id, name))
                if standing.state is not State.READY or place == "ready":
                    continue
                if standing.coming and self.rig.find(task.id) is not None:
                    continue
                if place == "waiting":
                    assert task.due_ms > rig.now_ms, "held back without need"
                    model.hold(task, name)
                else:
                    assert task.is_over(rig.now_ms), f"{task.id} left {name}"
                    model.expire(task, name)
        for (task_id, name), place in places.items() if everything else ():
            topic = model.now.tasks[task_id].topic
            group = rig.core.topics[topic].groups.get(name)
            # One that one more death ends waits for a connection that has nothing else.
            deaths = model.standing(task_id, name).deaths if name else 0
            alone = deaths >= rig.core.config.deaths_alone
            able = group is not None and any(
                s.prefetch + min(s.unconfirmed, s.acks_ahead_max) > s.outstanding
                and s not in self.doubted
                and not (s.presence.unsettled if alone else s.presence.kept_for)
                for s in group.subscribers
            )
            able = able and not model.now.is_held(topic, name)
            replay = rig.core.topics[topic].replays.get(group) if group is not None else None
            able = able and not (replay is not None and replay.is_ahead(task_id))
            limits = [model.rates[k] for k in ((topic, name), (topic, "")) if k in model.rates]
            tokens = min((limit.tokens(rig.mono_ms) for limit in limits), default=1.0)
            assert place != "ready" or not able or tokens < 1, f"{task_id} is left lying"
            if place == "ready" and able:
                wake_ms = rig.engine.wake_in_ms(*rig.now)
                assert wake_ms is not None, "nobody wakes it when there is a token"
                soonest = max((1 - limit.tokens(rig.mono_ms)) / limit.rate for limit in limits)
                assert wake_ms <= soonest * 1000 + 2

    def expire(self) -> None:
        holders = {
            (lease.id, group.name): lease.subscriber
            for group in self.rig.core.leased
            for lease in group.flight.values()
        }
        self.rig.expire()
        places, mono_ms = recount(self.rig), self.rig.mono_ms
        for task in self.model.now.tasks.values():
            for group, standing in (task.standings or {}).items():
                if standing.state is not State.IN_FLIGHT:
                    continue
                if places.get((task.id, group)) == "in_flight":
                    assert standing.end_mono_ms + SCAN_MS > mono_ms, "its lease is over"
                else:
                    assert standing.end_mono_ms <= mono_ms, "its lease was not over"
                    if holders[task.id, group].death:
                        self.model.died(task, group, self.rig.now_ms)
                    else:
                        self.model.lease_over(task, group)
                    self.doubted |= {holders[task.id, group]} & self.rig.frozen
