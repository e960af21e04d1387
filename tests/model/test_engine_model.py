"""The engine as a state machine: a dictionary store behind it, a slow obvious model beside it.

After every step a full recount of the engine's memory has to agree with the model, task by
task and group by group; at the end everything is consumed, and nothing may be left anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest
from engine_model import Receipt
from engine_model_content import Standing
from engine_model_delivery import LEASE_MS, DeliveryRules
from engine_model_rules import (
    delays_ms,
    picks,
)
from engine_recount import recount
from engine_rig import Got
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

DAY_MS = 86_400_000
PASSES_MAX = 100

T = TypeVar("T")


def chosen(items: Sequence[T], pick: int) -> T:
    """The newest ones are the most interesting: small picks count from the end."""
    return items[-1 - pick % len(items)]


def receipt_of(got: Got) -> Receipt:
    return got.id, got.group.name, got.epoch, got.attempt


class EngineMachine(DeliveryRules):
    """Adds what consumers and operators do."""

    # --- subscribers ---------------------------------------------------------------------------

    @precondition(lambda self: self.subscribers)
    @rule(pick=picks, says_so=st.booleans())
    def leave(self, pick: int, says_so: bool) -> None:
        gone = chosen(self.subscribers, pick)
        if says_so:
            self.rig.engine.delivery.unsubscribe(gone)
            return
        self.subscribers.remove(gone)
        self.rig.disconnect(gone)
        grace_end_ms = self.rig.mono_ms + self.rig.config.reconnect_grace_ms
        for lease in gone.group.flight.values():
            if lease.subscriber is gone:
                standing = self.model.standing(lease.id, gone.group.name)
                standing.end_mono_ms = min(standing.end_mono_ms, grace_end_ms)

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
            wait_ms = delay_ms
            if wait_ms is None:
                wait_ms = self.model.retry.delay_ms(got.attempt, got.id)
            word = self.model.nack(standing, self.rig.now_ms + wait_ms)
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

    @rule(pick=picks, requeues=st.booleans())
    def operate_on_the_dead(self, pick: int, requeues: bool) -> None:
        dead = sorted(self.model.now.dead())
        if not dead:
            return
        key = chosen(dead, pick)
        if requeues:
            assert self.rig.requeue(*key) == "requeued"
            self.model.requeue(*key)
        else:
            assert self.rig.delete_dead(*key) == "deleted"
            self.model.delete_dead(*key)

    # --- what must be true ---------------------------------------------------------------------

    @invariant()
    def every_task_is_where_the_model_says(self) -> None:
        places = recount(self.rig)
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
        for topic in {task.topic for task in self.model.now.tasks.values()}:
            for group in self.model.now.groups.get(topic) or {"default": 0}:
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
        assert not (core.hot or core.owed or core.retrying or core.firing)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=300, stateful_step_count=60)


class LongEngineMachine(EngineMachine):
    """The same for minutes."""


TestEngineAtLength = pytest.mark.slow(LongEngineMachine.TestCase)
TestEngineAtLength.settings = settings(max_examples=2_000, stateful_step_count=80)
