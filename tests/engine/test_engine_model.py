"""The engine as a state machine: a dictionary store behind it, a slow obvious model beside it.

After every step a full recount of the engine's memory has to agree with the model, task by
task and group by group; at the end everything is consumed, and nothing may be left anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from support.engine_model import Receipt
from support.engine_model_content import FINISHED, Standing
from support.engine_model_delivery import LEASE_MS, DeliveryRules
from support.engine_model_rules import delays_ms, groups, picks, policies, topics
from support.engine_recount import recount
from support.engine_rig import Got
from tickwheel.engine.ownership import is_done, order_of
from tickwheel.engine.topics import Group, Replay
from tickwheel.model.policies import RetryPolicy
from tickwheel.model.records import BY_DUE_ALONE, ProgressState, TaskSnapshot

DAY_MS = 86_400_000
PASSES_MAX = 100

T = TypeVar("T")


def chosen(items: Sequence[T], pick: int) -> T:
    """The newest ones are the most interesting: small picks count from the end."""
    return items[-1 - pick % len(items)]


def receipt_of(got: Got) -> Receipt:
    return got.id, got.group.name, got.epoch, got.attempt


def end_of(known: TaskSnapshot, group: str) -> str:
    """How a task ends that a former group of the name was done with: as acked if any has acked
    it."""
    done = [item for item in known.progress.values() if item.state is ProgressState.DONE]
    if any(item.epoch for item in done):  # 0: its dead letter was deleted
        return "acked"
    return "deleted" if known.progress[group] in done else "expired"


class EngineMachine(DeliveryRules):
    """Adds what consumers and operators do."""

    # --- subscribers ---------------------------------------------------------------------------

    @precondition(lambda self: self.subscribers)
    @rule(pick=picks, says_so=st.booleans(), death=st.sampled_from(["", "killed"]))
    def leave(self, pick: int, says_so: bool, death: str = "") -> None:
        gone = chosen(self.subscribers, pick)
        if says_so:
            self.rig.engine.subscriptions.unsubscribe(gone)
            return
        self.subscribers.remove(gone)
        self.rig.disconnect(gone, death)
        grace_end_ms = self.rig.mono_ms + self.rig.config.reconnect_grace_ms
        for lease in gone.group.flight.values():
            if lease.subscriber is gone:
                standing = self.model.standing(lease.id, gone.group.name)
                standing.end_mono_ms = min(standing.end_mono_ms, grace_end_ms)

    @precondition(lambda self: self.subscribers)
    @rule(pick=picks)
    def freeze(self, pick: int) -> None:
        """It holds its connection and is dead: stopped, or without power."""
        self.rig.frozen.add(chosen(self.subscribers, pick))

    @precondition(lambda self: self.rig.frozen.intersection(self.subscribers))
    @rule(pick=picks)
    def show_life(self, pick: int) -> None:
        subscriber = chosen([s for s in self.subscribers if s in self.rig.frozen], pick)
        self.rig.frozen.remove(subscriber)
        self.doubted.discard(subscriber)
        self.rig.engine.subscriptions.consumer_responded(subscriber.presence, [subscriber])

    # --- what consumers send -------------------------------------------------------------------

    @precondition(lambda self: self.got)
    @rule(pick=picks)
    def ack_another(self, pick: int) -> None:
        self.ack(pick)

    @precondition(lambda self: self.got)
    @rule(pick=picks)
    def ack(self, pick: int) -> None:
        got = chosen(self.got, pick)
        assert self.rig.ack(got) == self.model.ack(receipt_of(got))

    def _held(self, pick: int) -> tuple[Got, Standing] | None:
        """A delivery whose receipt is current; the engine and the model agree on that."""
        got = chosen(self.got, pick)
        standing, lease = self.model.held(receipt_of(got)), self.rig.lease(got)
        assert (standing is None) == (lease is None)
        return (got, standing) if standing is not None else None

    @precondition(lambda self: self.got)
    @rule(pick=picks, delay_ms=st.none() | delays_ms)
    def nack(self, pick: int, delay_ms: int | None) -> None:
        held = self._held(pick)
        if held is not None:
            got, standing = held
            task, wait_ms = self.model.now.tasks[got.id], delay_ms
            policy = self.model.policy(task, got.group.name)
            if wait_ms is None and policy.allows(standing.failed + 1):
                wait_ms = policy.delay_ms(standing.failed + 1, got.id)
            word = self.model.nack(task, got.group.name, self.rig.now_ms + (wait_ms or 0))
            assert self.rig.nack(got, delay_ms) == word

    @precondition(lambda self: self.got)
    @rule(pick=picks, how=st.sampled_from(["reject", "reject", "release", "extend"]))
    def settle(self, pick: int, how: str) -> None:
        held = self._held(pick)
        if held is None:
            return
        got, standing = held
        if how == "reject":
            self.rig.reject(got)
            self.model.reject(standing)
        elif how == "release":
            self.rig.release(got)
            self.model.release(standing)
        else:
            self.rig.extend(got, 2 * LEASE_MS)
            standing.end_mono_ms = self.rig.mono_ms + 2 * LEASE_MS

    # --- commands by id ------------------------------------------------------------------------

    def _id(self, pick: int) -> int | None:
        ids = [*self.model.now.ended, *self.model.open.tasks, *self.model.now.tasks]
        return chosen(ids, pick) if ids else None

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        task_id = self._id(pick)
        if task_id is not None:
            assert self.rig.cancel(task_id) == self.model.cancel(task_id)

    @rule(pick=picks, delay_ms=delays_ms)
    def reschedule(self, pick: int, delay_ms: int) -> None:
        task_id = self._id(pick)
        if task_id is not None:
            word = self.model.reschedule(task_id, self.rig.now_ms + delay_ms)
            assert self.rig.reschedule(task_id, delay_ms) == word
            if word == "scheduled":
                self.see_place(task_id)

    def see_place(self, task_id: int) -> None:
        """A moved task that is due anew comes to every group that is there, and to none of those
        that go."""
        known, task = self.rig.find(task_id), self.model.now.tasks[task_id]
        assert known is not None
        task.place = order_of(known.row) if order_of(known.row) != task_id else 0
        if task.standings is None:
            now = self.model.now
            for name, start in now.groups.get(task.topic, {}).items():
                if now.is_closed(task.topic, name):
                    assert name not in now.ever_owed(task)
                elif start.id != BY_DUE_ALONE:
                    assert now.begins_by(task, name)

    @rule(pick=picks, requeues=st.booleans())
    def operate_on_the_dead(self, pick: int, requeues: bool) -> None:
        dead = sorted(self.model.now.dead())
        if not dead:
            return
        key = chosen(dead, pick)
        if requeues:
            is_over = self.model.now.tasks[key[0]].is_over(self.rig.now_ms)
            assert self.rig.requeue(*key) == ("ttl_over" if is_over else "requeued")
            if not is_over:
                self.model.requeue(*key)
        else:
            assert self.rig.delete_dead(*key) == "deleted"
            self.model.delete_dead(*key)

    # --- groups and their settings -------------------------------------------------------------

    def _groups(self) -> list[tuple[str, str]]:
        now = self.model.now
        return sorted((topic, name) for topic in now.groups for name in now.live(topic))

    @rule(
        pick=picks,
        whole=st.booleans(),
        what=st.sampled_from(["pause", "resume", "resume", "retry", "rate", "no rate"]),
        retry=policies,
        rate=st.sampled_from([0.5, 3.0, 50.0]),
        burst=st.sampled_from([None, 1, 2]),
    )
    def configure(
        self,
        pick: int,
        whole: bool,
        what: str,
        retry: RetryPolicy | None,
        rate: float,
        burst: int | None,
    ) -> None:
        groups = self._groups()
        topic, group = ("a", "") if whole or not groups else chosen(groups, pick)
        changes: dict[str, Any] = {
            "pause": {"paused": True},
            "resume": {"paused": False},
            "retry": {"retry": retry},
            "rate": {"rate": rate, "burst": burst},
            "no rate": {"rate": None, "burst": None},
        }[what]
        self.rig.configure(topic, group or None, **changes)
        before = self.model.now.set(topic, group)
        self.model.now.change(topic, group, before._replace(**changes))
        if "rate" in changes and before[1:3] != (changes["rate"], changes["burst"]):
            self.model.set_rate((topic, group), changes["rate"], burst, self.rig.mono_ms)

    FUTURE = True
    """Whether groups may begin in the future."""

    @rule(
        topic=topics,
        group=groups,
        ago_ms=st.sampled_from([None, None, 0, 200, 2_000, 10**12, -1_000]),
        replays=st.booleans(),
    )
    def create_group(self, topic: str, group: str, ago_ms: int | None, replays: bool) -> None:
        if group in self.model.now.groups.get(topic, {}):
            return
        rig, others = self.rig, self.model.now.live(topic)
        if ago_ms is not None and ago_ms < 0 and not self.FUTURE:
            ago_ms = 0
        since_ms = None if ago_ms is None else max(0, rig.now_ms - ago_ms)
        made = rig.create_group(topic, group, since_ms, replays=replays)
        if others:
            if since_ms is not None:
                assert made.since_ms == since_ms
            is_by_due = since_ms is not None and since_ms > rig.now_ms
            assert made.since_id == (BY_DUE_ALONE if is_by_due else rig.core.ids.last)
        self.see_group(topic, group)
        for task in self.model.now.tasks.values() if since_ms is None else ():
            if task.topic == topic and task.standings is None and task.due_ms > rig.now_ms:
                assert group in self.model.now.owed_groups(task)

    @property
    def replays(self) -> list[Replay]:
        topics = self.rig.core.topics.values()
        return [replay for topic in topics for replay in topic.replays.values()]

    @precondition(lambda self: self.replays)
    @rule(pick=picks, limit=st.sampled_from([1, 2, 100]))
    def replay(self, pick: int, limit: int) -> None:
        self.rig.replay(chosen(self.replays, pick).group, limit)

    @rule(pick=picks)
    def close_group(self, pick: int) -> None:
        groups = self._groups()
        if not groups or len(self.closing) > 2:
            return
        topic, name = chosen(groups, pick)
        self.subscribers = [
            s for s in self.subscribers if (s.group.topic.name, s.group.name) != (topic, name)
        ]
        group = self.rig.close_group(topic, name)
        model = self.model
        before = model.now.set(topic, name)
        closed_ms, closed_id = group.settings[4:6]
        assert closed_ms is not None
        after = before._replace(closed_ms=closed_ms, closed_id=closed_id)
        model.now.change(topic, name, after)
        model.close_group(topic, name)
        staged = {**model.open.tasks, **(model.sealed.tasks if model.sealed else {})}
        for task in (*model.now.tasks.values(), *staged.values()):
            is_its = task.topic == topic and task.due_ms <= closed_ms and task.order <= closed_id
            assert task.standings is not None or not is_its, "it ends what is scheduled"

    @property
    def closing(self) -> list[Group]:
        result = self.rig.core.topics.values()
        return [group for topic in result for group in topic.groups.values() if group.is_closed]

    @precondition(lambda self: self.closing)
    @rule(pick=picks, limit=st.sampled_from([1, 2, 100]))
    def drain(self, pick: int, limit: int) -> None:
        group = chosen(self.closing, pick)
        topic, name = group.topic.name, group.name
        gone = self.rig.drain(group, limit)
        self.see_shares_dropped(topic, name)
        if gone:
            self.model.remove_group(topic, name)
            self.model.rates.pop((topic, name), None)

    def see_shares_dropped(self, topic: str, name: str) -> None:
        places = recount(self.rig)
        known = self.rig.known([*self.model.now.tasks])
        for task in list(self.model.now.tasks.values()):
            standing = (task.standings or {}).get(name)
            if task.topic != topic or standing is None or standing.state in FINISHED:
                continue
            answer = known.get(task.id)
            dead_lettered = answer is not None and name in answer.dead
            if (task.id, name) not in places and not dead_lettered:
                self.model.drop_share(task, name)

    # --- what must be true ---------------------------------------------------------------------

    def end_what_former_groups_have_done(self) -> None:
        """Its last share has ended, and the replay of a group that was done with it under the same
        name has not seen that yet. The model has, and calls it deleted, as the last share was."""
        for replay in self.replays:
            group = replay.group
            while done := {
                task_id: end_of(known, group.name)
                for task_id, known in self.rig.known(list(group.loading)).items()
                if is_done(known, group)
            }:
                assert self.rig.replay(group)
                over = self.model.now.ended.keys() & done.keys()
                self.model.now.ended |= {task_id: done[task_id] for task_id in over}

    @invariant()
    def every_task_is_where_the_model_says(self) -> None:
        self.end_what_former_groups_have_done()
        places = recount(self.rig)
        self.model.see_coming(places)
        replaying = {replay.group.name for replay in self.replays}
        assert {group for _, group in self.model.now.coming()} <= replaying
        assert places == self.model.now.places()
        for task in self.model.now.tasks.values():
            assert self.rig.state(task.id) == task.state
            if task.standings:
                assert self.rig.views(task.id) == task.views()

    def teardown(self) -> None:
        self.commit()
        self.commit()
        self.pass_time(DAY_MS)
        while self.subscribers:
            self.leave(0, says_so=False)
        while self.replays:
            self.replay(0, 100)
        self.model.see_coming(recount(self.rig))
        while self.closing:
            self.fire(loads=True)
            self.drain(0, 100)
        for topic, group in [("a", ""), *self._groups()]:
            self.configure_all(topic, group)
        for topic in {task.topic for task in self.model.now.tasks.values()}:
            for group in list(self.model.now.groups.get(topic) or ["default"]):
                self.subscribe(topic, group, 1_000, once=False)
        for _ in range(PASSES_MAX):
            self.pass_time(DAY_MS)
            self.expire()
            self.fire(loads=True)
            before = len(self.got)
            self.dispatch(loads=True)
            for got in self.got[before:]:
                assert self.rig.ack(got) == self.model.ack(receipt_of(got)) == "acked"
            for _ in range(len(self.model.now.dead())):
                self.operate_on_the_dead(0, requeues=False)
            self.commit()
            if not self.model.now.tasks:
                break
        self.every_task_is_where_the_model_says()
        core = self.rig.core
        assert self.rig.rows.is_empty()
        assert (len(core.wheel), core.scheduled, core.dead, core.resident_bytes) == (0, 0, 0, 0)
        assert not (core.resident_rows or core.owed or core.retrying or core.firing)

    def configure_all(self, topic: str, group: str) -> None:
        """Nothing holds deliveries back."""
        free: dict[str, Any] = {"paused": False, "rate": None, "burst": None}
        self.rig.configure(topic, group or None, **free)
        self.model.now.change(topic, group, self.model.now.set(topic, group)._replace(**free))
        self.model.rates.pop((topic, group), None)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=150, stateful_step_count=60)


class LongEngineMachine(EngineMachine):
    """The same for minutes."""


TestEngineAtLength = pytest.mark.slow(LongEngineMachine.TestCase)
TestEngineAtLength.settings = settings(max_examples=500, stateful_step_count=80)
