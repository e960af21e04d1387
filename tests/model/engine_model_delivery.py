"""Rules of the engine's state machine: subscribers, and what a pulse does."""

from __future__ import annotations

from engine_model import SCAN_MS
from engine_model_rules import ROOMY, TIGHT, StoreRules, groups, steps_ms, topics, ttls_ms
from engine_recount import recount
from engine_rig import Got
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tickwheel.wheel.core import EngineConfig
from tickwheel.wheel.states import State

LEASE_MS = 400


class DeliveryRules(StoreRules):
    """Whatever the engine does by itself must be allowed by the model, and nothing left out."""

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
    )
    def subscribe(self, topic: str, group: str, prefetch: int, once: bool) -> None:
        self.subscribers.append(
            self.rig.subscribe(topic, group, prefetch=prefetch, lease_ms=LEASE_MS, once=once)
        )
        self.model.add_group(topic, group, self.rig.now_ms)

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
            self.rig.engine.delivery.fire(self.rig.now_ms, 3)
        self._see_due(everything=loads)

    @rule(ms=steps_ms)
    def pulse(self, ms: int) -> None:
        """What the shell does again and again."""
        self.pass_time(ms)
        self.fire(loads=True)
        self.expire()
        self.dispatch(loads=True)

    @rule(count=st.integers(1, 3), group=groups, ttl_ms=ttls_ms)
    def enqueue_and_deliver(self, count: int, group: str, ttl_ms: int | None) -> None:
        """What happens to deliveries is the most interesting, so there shall be many."""
        for _ in range(count):
            self.stage("a", 0, 0, ttl_ms, 0)
        self.commit()
        if not any(s.group.name == group for s in self.subscribers):
            self.subscribe("a", group, 100, once=False)
        self.pulse(0)

    def _see_due(self, *, everything: bool) -> None:
        places, now_ms = recount(self.rig), self.rig.now_ms
        owners = {i for i, _ in places}
        for task in self.model.now.tasks.values():
            if task.standings is None and task.id in owners:
                assert task.due_ms <= self.high_ms, "fired early"
                self.model.due(task)
            elif task.standings is None and everything:
                assert task.due_ms > now_ms, f"{task.id} was not fired"
            for group, standing in (task.standings or {}).items():
                if standing.state is not State.WAITING:
                    continue
                if places.get((task.id, group)) == "ready":
                    assert standing.at_ms <= self.high_ms, "tried again early"
                    standing.come()
                elif everything:
                    assert standing.at_ms > now_ms, f"{task.id} was not tried again"

    def dispatch(self, loads: bool) -> None:
        if loads:
            self.rig.load()
            self._see_due(everything=False)
            got = self.rig.dispatch()
        else:
            got = self.rig.take(self.rig.engine.delivery.dispatch(*self.rig.now, 2)[0])
        self._see_deliveries(got, everything=loads)

    def _see_deliveries(self, got: list[Got], *, everything: bool) -> None:
        model, rig = self.model, self.rig
        for one in got:
            task = model.now.tasks[one.id]
            assert task.due_ms == one.due_ms <= rig.now_ms, "delivered early"
            assert not task.is_over(rig.now_ms), "delivered when its time to live was over"
            attempt = model.deliver(task, one.group.name, rig.mono_ms, one.subscriber.lease_ms)
            assert attempt == one.attempt
        self.got += got
        places = recount(rig)
        for task in list(model.now.tasks.values()):
            for name, standing in list((task.standings or {}).items()):
                place = places.get((task.id, name))
                if standing.state is not State.READY or place == "ready":
                    continue
                if place == "waiting":
                    assert task.due_ms > rig.now_ms, "held back without need"
                    model.hold(task, name)
                else:
                    assert task.is_over(rig.now_ms), f"{task.id} left {name}"
                    model.expire(task, name)
        for (task_id, name), place in places.items() if everything else ():
            group = rig.core.topics[model.now.tasks[task_id].topic].groups.get(name)
            able = group is not None and any(s.credit > 0 for s in group.subscribers)
            assert place != "ready" or not able, f"{task_id} is left lying"

    def expire(self) -> None:
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
                    self.model.lease_over(standing)
