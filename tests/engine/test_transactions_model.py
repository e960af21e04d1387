"""Transactions against a model that is slow and obvious: a dictionary of what was said.

Producers prepare, decide, ask again after a lost answer and are asked; batches land, are refused or
get lost half way; the engine restarts. What must hold: nothing is delivered of a transaction that
is not committed, everything of one that is, and never both; what was answered stays.

The second model is of who is asked and when: owners, other members and strangers come and go, the
wall clock is put forward and back, the engine restarts. What must hold: each question comes at its
time, to the nearest who is there, or as soon as somebody nearer comes, parked or not.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.transaction_rig import CHECK_MS, CHECKS_MAX, EVERY_MS, TransactionRig, half
from support.engine_recount import recount
from tickwheel.model.kinds import Reach, TransactionState

names = st.sampled_from(["a", "b", "c", "d"])
nearness = st.sampled_from(list(Reach))


class TransactionsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = self.make_rig()
        self.count = 0
        self.kept: dict[str, set[bytes]] = {}
        """Name → bodies of half tasks whose answer has come;"""
        self.sent: dict[str, set[bytes]] = {}
        """of all that were ever prepared;"""
        self.decided: dict[str, str] = {}
        """and what was answered of it."""
        self.delivered: set[bytes] = set()
        self.seen = 0
        self.generation: dict[str, int] = {}
        self.newest_ms = 0
        """The latest that the wall clock has shown."""
        self._serve()

    def make_rig(self) -> TransactionRig:
        return TransactionRig()

    def _serve(self) -> None:
        self.rig.subscribe()

    def _name(self, name: str) -> str:
        """A decided one never comes again: its name is used anew with a number."""
        return f"{name}{self.generation.get(name, 0)}"

    # --- producers -----------------------------------------------------------------------------

    @rule(name=names, count=st.integers(1, 3), delay_ms=st.sampled_from([0, 0, 5_000]))
    def prepare(self, name: str, count: int, delay_ms: int) -> None:
        full = self._name(name)
        standing = self.rig.standing(full)
        if not self.rig.is_free(full) or (standing is not None and standing.is_decided):
            return
        bodies = {b"%s-%d" % (full.encode(), self.count + n) for n in range(count)}
        self.count += count
        due_ms = self.rig.now_ms + delay_ms
        halves = [half(body, due_ms) for body in sorted(bodies)]
        self.sent.setdefault(full, set()).update(bodies)
        self.rig.prepare(full, self.count, *halves, address=("kept", full, bodies))

    @rule(name=names, how=st.sampled_from(["commit", "rollback"]))
    def decide(self, name: str, how: str) -> None:
        full = self._name(name)
        result = self.rig.at(full)
        if result is None or not self.rig.is_free(full):
            return
        if result.row.state.is_decided:
            # What a second command is answered: it rests on what is durable.
            word = "commit" if result.row.state is TransactionState.COMMITTED else "rollback"
            self._answered(("decided", full, word))
            return
        if how == "commit":
            self.rig.commit_of(full, ("decided", full, "commit"))
        else:
            self.rig.roll_back(full, ("decided", full, "rollback"))

    @rule(name=names)
    def begin_anew(self, name: str) -> None:
        if self._name(name) in self.decided:
            self.generation[name] = self.generation.get(name, 0) + 1

    # --- the daemon ----------------------------------------------------------------------------

    @rule(
        end=st.sampled_from(["land", "land", "refuse", "withdraw", "crash before", "crash after"])
    )
    def a_batch(self, end: str) -> None:
        rig = self.rig
        if end == "withdraw":
            rig.engine.intake.withdraw()
            return
        if rig.core.sealed is None and rig.seal() is None:
            return
        if end == "refuse":
            rig.refuse()
        elif end == "land":
            rig.apply_and_land()
        else:
            if end == "crash after":
                rig.apply()
            rig.crash()
            self._serve()
        self._look()

    @rule()
    def all_is_durable(self) -> None:
        self.rig.commit()
        self._look()

    @rule(name=names, how=st.sampled_from(["commit", "rollback"]), in_between=st.booleans())
    def trade(self, name: str, how: str, in_between: bool) -> None:
        """From the first half task to the decision, without a disturbance but those that follow."""
        self.all_is_durable()
        self.prepare(name, 2, 0)
        if in_between:
            self.all_is_durable()
        self.decide(name, how)

    @rule(ms=st.sampled_from([100, 5_000, CHECK_MS]))
    def time_passes(self, ms: int) -> None:
        self.rig.pass_time(ms)

    @rule(ms=st.sampled_from([-7_200_000, -5_000, 5_000, 7_200_000]))
    def the_wall_clock_is_set(self, ms: int) -> None:
        self.newest_ms = max(self.newest_ms, self.rig.now_ms)
        self.rig.now_ms += ms

    @rule(there=nearness)
    def check(self, there: Reach) -> None:
        self.rig.there = there
        for name in self.rig.check():
            assert name not in self.decided, "it was decided, and that was answered"

    @rule(who=nearness)
    def somebody_comes(self, who: Reach) -> None:
        self.rig.comes(who)

    @rule()
    def deliver(self) -> None:
        for got in self.rig.tick():
            self.delivered.add(got.body)
            self.rig.ack(got)

    @rule()
    def restart(self) -> None:
        self.rig.stop_and_start()
        self._look()
        self._serve()

    # --- what must hold ------------------------------------------------------------------------

    def _look(self) -> None:
        for address in self.rig.answered[self.seen :]:
            if address is not None:
                self._answered(address)
        self.seen = len(self.rig.answered)

    def _answered(self, address: Any) -> None:
        what, name, value = address
        if what == "kept":
            self.kept.setdefault(name, set()).update(value)
        else:
            assert self.decided.setdefault(name, value) == value, "both ways"

    @invariant()
    def nobody_sees_half_a_task(self) -> None:
        committed = {
            key[0]
            for key, row in self.rig.rows.transactions.items()
            if not key[1] and getattr(row, "state", None) is TransactionState.COMMITTED
        }
        for body in self.delivered | set(self.rig.bodies()):
            name = body.decode().partition("-")[0]
            assert name in committed, f"{body!r} is there, and {name} is not committed"
        for name, word in self.decided.items():
            assert (name in committed) == (word == "commit")

    @invariant()
    def nothing_is_lost(self) -> None:
        there = self.delivered | set(self.rig.bodies())
        for name, bodies in self.kept.items():
            if self.decided.get(name) == "commit":
                assert bodies <= there, f"{bodies - there} are lost"
            elif name not in self.decided:
                self._still_half(name, bodies, there)

    def _still_half(self, name: str, bodies: set[bytes], there: set[bytes]) -> None:
        """Or decided, and the answer was lost with a crash."""
        rows = self.rig.rows.transactions
        if rows[name, 0].state.is_decided:  # type: ignore[union-attr]
            return
        stored = {
            half.body
            for key, row in rows.items()
            if key[0] == name and key[1]
            for half in row.halves  # type: ignore[union-attr]
        }
        assert bodies <= stored, f"half tasks {bodies - stored} are lost"

    @invariant()
    def the_sums_are_right(self) -> None:
        recount(self.rig)

    def teardown(self) -> None:
        """In the end each is decided, and everything of the committed ones is delivered."""
        rig = self.rig
        rig.commit()
        self._look()
        for name in [
            n
            for n, one in rig.core.transaction_registry.by_name.items()
            if not one.row.state.is_decided
        ]:
            rig.commit_of(name, ("decided", name, "commit"))
        rig.commit()
        self._look()
        rig.now_ms = max(rig.now_ms, self.newest_ms)
        rig.pass_time(10_000)
        for _ in range(20):
            self.deliver()
            rig.commit()
        for name, word in self.decided.items():
            bodies = self.kept.get(name, set())
            there = {body for body in self.sent.get(name, set()) if body in self.delivered}
            assert bodies <= there if word == "commit" else not there


class Question:
    """What a transaction that nobody has decided waits for."""

    def __init__(self, due_ms: int) -> None:
        self.due_ms = due_ms
        """Next checkback on the steady clock; parked transactions have none."""
        self.checks = 0
        self.reached = Reach.NOBODY
        self.is_parked = False


class AskingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = TransactionRig()
        self.rig.there = Reach.NOBODY
        self.open: dict[str, Question] = {}
        self.count = 0
        self.somebody_came = False

    @rule(name=names)
    def prepare(self, name: str) -> None:
        if (result := self.rig.standing(name)) is not None and result.is_decided:
            return
        self.count += 1
        self.rig.prepare(name, self.count, half())
        self.open[name] = Question(self.rig.mono_ms + CHECK_MS)

    @rule(name=names, is_committed=st.booleans())
    def decide(self, name: str, is_committed: bool) -> None:
        if self.open.pop(name, None) is not None:
            (self.rig.commit_of if is_committed else self.rig.roll_back)(name)

    @rule(ms=st.sampled_from([1, EVERY_MS - 1, EVERY_MS, CHECK_MS, 4 * CHECK_MS]))
    def time_passes(self, ms: int) -> None:
        self.rig.pass_time(ms)

    @rule(ms=st.sampled_from([-7_200_000, -1, 1, 7_200_000]))
    def the_wall_clock_is_set(self, ms: int) -> None:
        self.rig.now_ms += ms

    @rule(who=nearness)
    def somebody_comes(self, who: Reach) -> None:
        """``NOBODY``: a stranger, whom nothing may be asked."""
        self.rig.comes(who)
        self.somebody_came = True

    @rule()
    def all_go(self) -> None:
        self.rig.there = Reach.NOBODY

    @rule(is_clean=st.booleans())
    def restart(self, is_clean: bool) -> None:
        """Nobody is asked before the whole time has passed once more."""
        if is_clean:
            self.rig.stop_and_start(back_ms=3_600_000)
        else:
            self.rig.crash()
        self.rig.there = Reach.NOBODY
        for task in self.open.values():
            task.due_ms = self.rig.mono_ms + (EVERY_MS if task.checks else CHECK_MS)

    @rule()
    def park_all(self) -> None:
        """So often it was time, and nobody was there."""
        self.all_go()
        for _ in range(CHECKS_MAX + 1):
            self.rig.pass_time(CHECK_MS)
            self._tick()

    @invariant()
    def they_are_asked(self) -> None:
        """As the daemon does after everything that happens."""
        self._tick()

    def _tick(self) -> None:
        self.rig.commit()
        expected = self._missed() if self.somebody_came else set()
        self.somebody_came = False
        expected |= self._due()
        assert set(self.rig.check()) == expected
        self.rig.commit()
        for name, one in self.open.items():
            row = self.rig.core.transaction_registry.by_name[name].row
            assert (row.checks, row.reached) == (one.checks, one.reached)
            assert (row.state is TransactionState.PARKED) == one.is_parked
            assert row.asked <= row.checks
        recount(self.rig)

    def _missed(self) -> set[str]:
        """Those whose last question has reached nobody as near as who is there now."""
        asked = set()
        for name, one in self.open.items():
            if one.checks and one.reached < self.rig.there:
                asked.add(name)
                one.checks = 1 if one.is_parked else one.checks
                one.is_parked, one.reached = False, self.rig.there
                one.due_ms = self.rig.mono_ms + EVERY_MS
        return asked

    def _due(self) -> set[str]:
        asked = set()
        for name, one in self.open.items():
            if one.is_parked or one.due_ms > self.rig.mono_ms:
                continue
            if one.checks >= CHECKS_MAX:
                one.is_parked = True
                continue
            if self.rig.there:
                asked.add(name)
            one.checks, one.reached = one.checks + 1, self.rig.there
            one.due_ms = self.rig.mono_ms + EVERY_MS
        return asked


TestAsking = AskingMachine.TestCase
TestAsking.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTransactions = TransactionsMachine.TestCase
TestTransactions.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
