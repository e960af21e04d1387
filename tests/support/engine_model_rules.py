"""Rules of the engine's state machine: producers, the store, restarts and the clock."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from support.engine_model import DEATHS_MAX, Model
from support.engine_model_content import Task
from support.engine_rig import CONFIG, GRACE_MS, NOW_MS, RETRY, Got, Rig
from tickwheel.engine.state import EngineConfig
from tickwheel.engine.topics import Group, Subscriber
from tickwheel.model.policies import RetryPolicy

TOPICS = ("a", "a", "b")
GROUPS = ("default", "x", "y")
ROOMY = replace(
    CONFIG,
    slots=8,
    resident_horizon_ms=500,
    retry=replace(RETRY, base_ms=100, retries_max=2),
    acks_ahead_max=2,
    deaths_max=DEATHS_MAX,
)
TIGHT = replace(
    ROOMY,
    resident_bytes_max=600,
    loading_max=2,
    delivery_frame_bytes_max=2,
    delivery_frame_tasks_max=2,
    acks_ahead_max=0,
)
"""A configuration with little memory, so that rows are read again, and without credit ahead of
the commit."""

picks = st.integers(0, 10_000)
topics = st.sampled_from(TOPICS)
groups = st.sampled_from(GROUPS)
delays_ms = st.sampled_from([0, 0, 1, 50, 150, 300, 1_000, 5_000])
steps_ms = st.sampled_from([0, 1, 20, 100, 101, 300, 400, 1_000, 6_000])
priorities = st.sampled_from([0, 0, 9])
ttls_ms = st.sampled_from([None, None, 200])
ONCE_MORE = replace(RETRY, base_ms=50, retries_max=1, kind="fixed")
TABLE = replace(RETRY, retries_max=3, kind="table", delays_ms=(20, 300))
NEVER = replace(RETRY, retries_max=0, kind="none")
policies = st.sampled_from([None, None, None, ONCE_MORE, TABLE, NEVER])


KEYS = (None, "k", "l")


class StoreRules(RuleBasedStateMachine):
    """``rig`` is the engine under test, ``model`` its promises."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(ROOMY)

    def begin(self, config: EngineConfig) -> None:
        self.rig = Rig(config)
        self.model = Model(self.rig.config.retry)
        self.subscribers: list[Subscriber] = []
        self.doubted: set[Subscriber] = set()
        """A lease of theirs has ended by time, and they have shown no life since."""
        self.got: list[Got] = []
        self.receipts: set[tuple[int, Group, int, int]] = set()
        """Of all deliveries so far. A group that was deleted and made again is another one."""
        self.requests = 0
        self.high_ms = NOW_MS
        self.applied = False

    # --- producers -----------------------------------------------------------------------------

    @rule(
        topic=topics,
        delay_ms=delays_ms,
        priority=priorities,
        ttl_ms=ttls_ms,
        retry=policies,
        named=st.booleans(),
        count=st.integers(1, 3),
        commits=st.booleans(),
    )
    def enqueue(
        self,
        topic: str,
        delay_ms: int,
        priority: int,
        ttl_ms: int | None,
        retry: RetryPolicy | None,
        named: bool,
        count: int,
        commits: bool,
    ) -> None:
        for _ in range(count):
            self.requests += named
            request = self.requests if named else 0
            self.stage(topic, delay_ms, priority, ttl_ms, request, retry)
        if commits:
            self.commit()
            self.commit()

    def stage(
        self,
        topic: str,
        delay_ms: int,
        priority: int = 0,
        ttl_ms: int | None = None,
        request: int = 0,
        retry: RetryPolicy | None = None,
    ) -> None:
        rig = self.rig
        (task_id,) = rig.stage(
            topic,
            delay_ms,
            priority=priority,
            ttl_ms=ttl_ms,
            retry=retry,
            key=KEYS[(delay_ms + priority + self.requests) % len(KEYS)],
            session=rig.session() if request else None,
            request=request,
            address=request,
        )
        task = Task(task_id, topic, rig.now_ms + delay_ms, ttl_ms, retry)
        self.model.enqueue(task, request)

    @precondition(lambda self: self.requests > 0)
    @rule(pick=picks)
    def resend(self, pick: int) -> None:
        request = 1 + pick % self.requests
        session, intake = self.rig.session(), self.rig.engine.intake
        outcome, answered = session.answers.get(request), self.model.answered(request)
        if answered is None:
            assert outcome is None, "a request without an effect left a mark"
            self.stage("a", 0, request=request)
            return
        assert outcome is not None and outcome[1] == answered
        durable = request in self.model.now.requests
        assert intake.repeat(request, session, outcome) == durable

    # --- the store -----------------------------------------------------------------------------

    @rule(step=st.sampled_from(["commit", "seal", "seal", "apply", "land", "refuse", "refuse"]))
    def store(self, step: str) -> None:
        if step == "commit":
            self.commit()
        elif self.rig.core.sealed is None:
            self._seal(everything=False)
        elif step == "apply" and not self.applied:
            self._apply()
        elif step == "land":
            self._land()
        elif step == "refuse" and not self.applied:
            self.rig.refuse()
            self.model.refuse()

    def commit(self) -> None:
        """Make everything so far durable."""
        if self.rig.core.sealed is not None:
            self._land()
        if self._seal(everything=False):
            self._land()

    def _seal(self, *, everything: bool) -> bool:
        if self.rig.seal(checkpoint_all=everything) is None:
            return False
        self.applied = False
        self.model.seal(self.rig.mono_ms, everything=everything)
        return True

    def _apply(self) -> None:
        """Apply a batch of which the engine does not know; a crash can follow."""
        self.rig.apply()
        self.model.apply()
        self.applied = True
        self._check_rows()

    def _land(self) -> None:
        if not self.applied:
            self._apply()
        batch = self.rig.core.sealed
        assert batch is not None
        answered, handed = len(self.rig.answered), len(self.rig.handed)
        self.rig.land()
        self.model.land()
        for got in self.rig.handed[handed:]:
            self.model.written_once(got.id, got.group.name)
        assert len(self.rig.answered) == answered + len(batch.staged)

    def _check_rows(self) -> None:
        """Check that the store has exactly what a restart needs."""
        rows, content = self.rig.rows, self.model.durable
        assert {i: r.due_ms for i, r in rows.tasks.items()} == {
            i: t.due_ms for i, t in content.tasks.items()
        }
        assert {
            k: (r.state.name, r.attempt, r.failed, r.deaths) for k, r in rows.progress.items()
        } == content.rows()
        assert set(rows.dead) == content.dead()
        assert {i: e.name.lower() for i, e in rows.outcomes.items()} == content.ended
        assert set(rows.groups.values()) == content.rows_of_groups()
        answered = [rows.answered(session) for session, _ in rows.sessions]
        assert (answered[0] if answered else {}) == content.requests

    # --- restarts and time ---------------------------------------------------------------------

    @rule(
        how=st.sampled_from(["", "", "crash", "crash", "clean"]),
        down_ms=steps_ms,
        back_ms=st.sampled_from([0, 0, 0, 1_000]),
    )
    def restart(self, how: str, down_ms: int, back_ms: int) -> None:
        if how == "crash":
            self.rig.now_ms -= back_ms
            self.rig.crash(down_ms=down_ms)
            self._restarted(GRACE_MS)
        elif how == "clean":
            if self.rig.core.sealed is not None:
                self._land()
            while self._seal(everything=True):
                self._land()
            left_ms, stopped_ms = self._left_ms(), self.rig.now_ms
            self.rig.stop_and_start(down_ms=down_ms, back_ms=back_ms)
            self._restarted(10**9)
            # The position lags only while due tasks have not fired.
            lag_ms = max(0, stopped_ms - self.rig.rows.position_ms)
            for key, now_left_ms in self._left_ms().items():
                assert now_left_ms <= left_ms[key] + lag_ms, "no start prolongs a lease"

    def _left_ms(self) -> dict[tuple[int, str], int]:
        """How long each lease lasts."""
        return {
            (lease.id, lease.group.name): max(0, lease.deadline_mono_ms - self.rig.mono_ms)
            for topic in self.rig.core.topics.values()
            for group in topic.groups.values()
            for lease in group.flight.values()
        }

    def _restarted(self, lease_ms_max: int) -> None:
        rig = self.rig
        ends_mono_ms = {
            key: rig.mono_ms
            + min(lease_ms_max, max(0, row.at_ms - max(rig.now_ms, rig.rows.position_ms)))
            for key, row in rig.rows.progress.items()
        }
        self.model.restart(ends_mono_ms, rig.now_ms, rig.core.ids.last)
        self.model.rates.clear()
        for key, settings in self.model.now.settings.items():
            self.model.set_rate(key, settings.rate, settings.burst, rig.mono_ms)
        self.subscribers = []
        self.doubted.clear()
        self.rig.frozen.clear()
        self.high_ms = max(self.high_ms, rig.now_ms)

    def pass_time(self, ms: int) -> None:
        self.rig.pass_time(ms)
        self.high_ms = max(self.high_ms, self.rig.now_ms)

    @rule(jump_ms=st.sampled_from([-2_000, -150, -1, 1, 250, 3_000]))
    def jump(self, jump_ms: int) -> None:
        """Set the wall clock."""
        self.rig.now_ms += jump_ms
        self.high_ms = max(self.high_ms, self.rig.now_ms)
