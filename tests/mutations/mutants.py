"""The seeded bugs. Each replaces text that must be there, so that none can rot unnoticed."""

from __future__ import annotations

from typing import NamedTuple

COMMITTER = "tickwheel/server/shard/committer.py"
WRITER = "tickwheel/persistence/sqlite/writer.py"
INTAKE = "tickwheel/engine/enqueue.py"

UNIT = "tests/server/shard/test_committer.py::"
SYNC = "tests/crash/test_sync.py::"
TORTURE = "tests/crash/test_torture.py::test_all_promises_hold_under_kills[12]"
DELIVERY = "tickwheel/engine/delivery.py"
LEASE_BATCH = "tickwheel/engine/lease_batch.py"
ENGINE = "tickwheel/engine/engine.py"
SETTLEMENT = "tickwheel/engine/settlement.py"
CONNECTION = "tickwheel/persistence/sqlite/connection.py"
DISK = "tests/crash/test_disk.py::"
PROMISES = "tests/crash/test_promises.py::"
LATER_FORMATS = "tests/upgrade/test_later_formats.py::"
STORE = "tests/persistence/test_conformance.py::"

CLOCK = "tickwheel/clock.py"
JUMPS = "tests/test_clock.py::"
STARTS = "tests/e2e/test_clock_at_start.py::"
DEAD = "tests/e2e/test_dead_consumers.py::"

EVERY_REPLY = SYNC + "test_every_reply_waits_for_a_sync_of_what_it_claims"
OWN_BYTES = SYNC + "test_pipelined_enqueues_and_their_repeats_wait_for_the_sync_of_their_own_bytes"
POWER_CUT = SYNC + "test_a_power_cut_leaves_every_promise"


class Edit(NamedTuple):
    """``old`` stands once in ``path``."""

    path: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A bug and the tests that must find it: each of them, on its own."""

    name: str
    why: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "reply-without-its-commit",
        "an enqueue is answered when its batch is handed to the store",
        (
            Edit(
                COMMITTER,
                '        failpoints.hit("commit.before")\n',
                '        failpoints.hit("commit.before")\n        release(batch)\n',
            ),
        ),
        (UNIT + "test_an_enqueue_is_answered_only_when_its_batch_is_durable", OWN_BYTES),
    ),
    Mutant(
        "reply-overtakes-the-commit-it-rests-on",
        "an answer without effects of its own leaves while what it saw is with the store",
        (
            Edit(
                COMMITTER,
                "            self._put(core.sealed, sink, answer)\n",
                "            sink.give(answer)\n            sink.flush()\n",
            ),
        ),
        (UNIT + "test_a_reply_without_effects_rests_on_the_batch_with_the_store",),
    ),
    Mutant(
        "ack-confirmed-before-its-commit",
        "every OK is written at once",
        (
            Edit(
                COMMITTER,
                "        if not core.open.is_empty():\n            self._put(core.open, sink",
                "        if isinstance(sink, _Turn):\n            self._put(core.open, sink",
            ),
        ),
        (EVERY_REPLY,),
    ),
    Mutant(
        "repeat-taken-as-durable",
        "the resend of a staged request is not refused with it",
        (
            Edit(
                INTAKE,
                "        if answer[1] <= core.landed_id:\n",
                "        if answer[1] > 0:\n",
            ),
        ),
        (UNIT + "test_a_repeat_of_a_staged_request_is_answered_with_its_batch",),
    ),
    Mutant(
        "dedupe-mark-survives-a-refusal",
        "the resend of a refused request is answered with ids of tasks that were dropped",
        (
            Edit(
                INTAKE,
                "                session.drop(answer[0])\n",
                "                continue\n",
            ),
        ),
        (
            UNIT + "test_a_refused_batch_refuses_its_enqueues_and_forgets_their_requests",
            DISK + "test_a_refused_request_may_be_sent_again_under_its_number[refusing]",
        ),
    ),
    Mutant(
        "dedupe-mark-not-in-the-commit",
        "a resend to a restarted daemon makes a second task",
        (
            Edit(
                ENGINE,
                "        core.dirty_sessions.clear()\n",
                "        core.dirty_sessions.clear()\n        effects.forget(SESSION)\n",
            ),
        ),
        (PROMISES + "test_a_resend_after_a_kill_is_one_task[commit.after]",),
    ),
    Mutant(
        "update-elided-with-its-drop",
        "a task that was rescheduled and cancelled in one batch is in neither map",
        (
            Edit(
                "tickwheel/engine/state.py",
                "    if effects.updated:\n",
                "    if effects.updated:\n"
                "        for task_id in effects.updated:\n"
                "            ended.pop(task_id, None)\n"
                "        effects.updated = {}\n"
                "    if effects.updated:\n",
            ),
        ),
        (PROMISES + "test_an_update_and_its_drop_in_one_batch_leave_nothing",),
    ),
    Mutant(
        "late-batch-applied-again",
        "n <= last is not turned away",
        (
            Edit(
                WRITER,
                '                connection.execute("ROLLBACK")\n'
                "                if self._is_next(connection, epoch, owner, n):\n"
                '                    raise StoreError("meta says that the batch is next, and did'
                ' not advance")\n'
                "                return False\n",
                "                self._is_next(connection, epoch, owner, n)\n",
            ),
        ),
        (STORE + "TestBatches::test_are_applied_in_order_and_once[sqlite]",),
    ),
    Mutant(
        "unknown-batch-tried-under-a-new-number",
        "a batch whose fate is unknown is applied twice",
        (
            Edit(
                COMMITTER,
                "                except CommitUnknown as error:\n",
                "                except CommitUnknown as error:\n                    number += 1\n",
            ),
        ),
        (UNIT + "test_an_unknown_outcome_is_tried_again_under_the_same_number",),
    ),
    Mutant(
        "acks-of-a-refused-batch-forgotten",
        "what is not an enqueue has to be committed again",
        (Edit(INTAKE, "        rejoin(batch, core.open)\n", ""),),
        (UNIT + "test_a_refused_batch_keeps_its_acks_for_the_next_one",),
    ),
    Mutant(
        "sync-off",
        "commits are not synced",
        (Edit(CONNECTION, "PRAGMA synchronous = FULL", "PRAGMA synchronous = OFF"),),
        (EVERY_REPLY, OWN_BYTES, POWER_CUT),
    ),
    Mutant(
        "sync-normal",
        "the log is synced at checkpoints only, SQLite's usual advice",
        (Edit(CONNECTION, "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL"),),
        (EVERY_REPLY, OWN_BYTES, POWER_CUT),
    ),
    Mutant(
        "early-by-one-tick",
        "the wheel fires a tick ahead, and the two later checks look away",
        (
            Edit(
                DELIVERY,
                "core.wheel.advance(now_ms, ",
                "core.wheel.advance(now_ms + core.config.tick_ms, ",
            ),
            Edit(
                DELIVERY,
                "            if due_ms > now_ms or (",
                "            if due_ms > now_ms + core.config.tick_ms or (",
            ),
            Edit(
                DELIVERY,
                "        if row.due_ms > now_ms:\n            # The clock went back while",
                "        if row.due_ms > now_ms + core.config.tick_ms:\n"
                "            # The clock went back while",
            ),
        ),
        (PROMISES + "test_nothing_comes_early",),
    ),
    Mutant(
        "lease-not-kept",
        "a lease ends long before its time",
        (
            Edit(
                DELIVERY,
                "deadline_ms = mono_ms + subscriber.lease_ms",
                "deadline_ms = mono_ms + subscriber.lease_ms // 10",
            ),
            Edit(
                DELIVERY,
                "len(items), mono_ms + subscriber.lease_ms)",
                "len(items), mono_ms + subscriber.lease_ms // 10)",
            ),
            Edit(
                LEASE_BATCH,
                "repeat(mono_ms + subscriber.lease_ms)",
                "repeat(mono_ms + subscriber.lease_ms // 10)",
            ),
        ),
        (PROMISES + "test_a_lease_is_kept_and_then_ends",),
    ),
    Mutant(
        "lease-never-ends",
        "a task whose consumer is gone stays with it",
        (
            Edit(
                SETTLEMENT,
                "            if end_ms <= mono_ms:\n",
                "            if end_ms <= 0:\n",
            ),
        ),
        (PROMISES + "test_a_lease_is_kept_and_then_ends",),
    ),
    Mutant(
        "leases-as-long-as-the-clock-was-set-back",
        "the end of a stored lease is taken from the new clock alone",
        (
            Edit(
                "tickwheel/engine/recovery.py",
                "progress.at_ms - max(now_ms, self.stopped_ms)",
                "progress.at_ms - now_ms",
            ),
        ),
        (
            "tests/engine/test_engine_recovery.py"
            "::test_a_clock_that_was_set_back_meanwhile_makes_no_lease_longer",
        ),
    ),
    Mutant(
        "leases-forgotten-by-a-stop",
        "what is in flight is not written when the daemon is asked to stop",
        (
            Edit(COMMITTER, "checkpoint_all=self._stopping", "checkpoint_all=False"),
            Edit(
                ENGINE,
                "            lease.checkpointed = True\n",
                "            lease.checkpointed = True\n            continue\n",
            ),
        ),
        (PROMISES + "test_a_stop_keeps_leases_and_a_late_ack_is_taken",),
    ),
    Mutant(
        "leases-clipped-by-a-stop",
        "after a clean stop leases last no longer than those of a broken connection",
        (
            Edit(
                "tickwheel/server/shard/recovery.py",
                "grace_ms = None if self._opened.clean else self._grace_ms",
                "grace_ms = self._grace_ms",
            ),
        ),
        (PROMISES + "test_a_stop_keeps_leases_and_a_late_ack_is_taken",),
    ),
    Mutant(
        "a-jump-far-ahead-is-followed",
        "a clock that jumps a year ahead fires what is due by then",
        (Edit(CLOCK, "        if jump_ms > self._limit_ms:\n", "        if False:\n"),),
        (
            JUMPS + "test_jumps_fire_nothing_early_nothing_twice_and_nothing_of_a_far_future",
            JUMPS + "test_a_jump_ahead_above_the_limit_is_held_until_the_clock_is_back",
        ),
    ),
    Mutant(
        "a-clock-that-is-set-back-is-not-followed",
        "time never goes back, so what is due between fires before it is due again",
        (
            Edit(
                CLOCK,
                "        self._count(jump_ms)\n"
                "        self._follow(jump_ms)\n"
                "        return wall_ms\n",
                "        self._count(jump_ms)\n        if jump_ms < 0:\n"
                "            return mono_ms + self._offset_ms\n"
                "        self._follow(jump_ms)\n        return wall_ms\n",
            ),
        ),
        (JUMPS + "test_jumps_fire_nothing_early_nothing_twice_and_nothing_of_a_far_future",),
    ),
    Mutant(
        "ready-is-ready-though-the-clock-went-back",
        "what was ready when the clock was set back is handed out before its time",
        (Edit(DELIVERY, "            if due_ms > now_ms or (", "            if ("),),
        (JUMPS + "test_jumps_fire_nothing_early_nothing_twice_and_nothing_of_a_far_future",),
    ),
    Mutant(
        "a-start-believes-any-clock",
        "what the store has seen last is not compared with the clock",
        (
            Edit(
                "tickwheel/server/cluster/failover.py",
                "        elif opened.position_ms and not opened.created:\n",
                "        elif False:\n",
            ),
        ),
        (
            STARTS + "test_a_clock_that_is_a_month_ahead_fires_nothing",
            STARTS + "test_a_standby_with_a_wrong_clock_takes_over_and_fires_nothing",
        ),
    ),
    Mutant(
        "a-dead-consumer-gets-its-tasks-back",
        "credit returns to whoever let a lease end, and nothing was heard of it",
        (
            Edit(
                SETTLEMENT,
                "                subscriber.presence.doubt(lease)\n",
                "                pass\n",
            ),
        ),
        (
            "tests/engine/test_engine_leases.py::"
            "test_one_that_shows_no_life_costs_each_of_its_tasks_one_attempt",
            DEAD + "test_one_that_holds_its_connection_and_is_dead_buries_nothing",
        ),
    ),
    Mutant(
        "silent-clients-stay",
        "a client that answers heartbeats is not missed when it does not",
        (
            Edit(
                "tickwheel/server/tcp/heartbeats.py",
                "                peer.give_up_silent(quiet_ms)\n",
                "                peer.ask_for_life()\n",
            ),
        ),
        (
            "tests/server/tcp/test_heartbeats.py::"
            "test_a_silent_peer_is_asked_each_interval_and_given_up_after_the_time_out",
            DEAD + "test_the_tasks_of_a_stopped_process_go_to_others",
        ),
    ),
    Mutant(
        "a-name-proves-a-death",
        "the lease of whoever has this node's name is taken at once",
        (
            Edit(
                "tickwheel/server/cluster/lease.py",
                "turn = before.node == self._node and is_over(before.life, self._life)",
                "turn = before.node == self._node",
            ),
        ),
        (
            "tests/e2e/test_failover.py::"
            "test_a_daemon_that_lives_keeps_its_lease_from_another_of_its_name_and_address",
            "tests/server/cluster/test_leadership.py::"
            "test_the_first_campaign_yields_to_whoever_is_not_proven_dead",
        ),
    ),
    Mutant(
        "any-receipt-is-current",
        "a nack by an earlier receipt ends the attempt of somebody else",
        (
            Edit(
                SETTLEMENT,
                "if lease is None or lease.attempt != attempt or lease.epoch != epoch:",
                "if lease is None:",
            ),
        ),
        (PROMISES + "test_an_earlier_receipt_acks_and_does_nothing_else",),
    ),
    Mutant(
        "recovery-skips-a-chunk",
        "a chunk of handles lacks the first of each part",
        (
            Edit(
                "tickwheel/persistence/sqlite/recovery.py",
                "            some += reversed(self._sorted[-wanted:])\n",
                "            some += reversed(self._sorted[-wanted:-1])\n",
            ),
        ),
        (PROMISES + "test_a_restart_finds_every_task",),
    ),
    Mutant(
        "retry-time-forgotten",
        "a nack's delay is over with the process",
        (
            Edit(
                "tickwheel/engine/recovery.py",
                "        if progress.state is ProgressState.WAITING:\n",
                "        if progress.state is None:\n",
            ),
        ),
        (PROMISES + "test_a_task_that_was_nacked_keeps_its_time_over_a_kill",),
    ),
    Mutant(
        "an-upgraded-shard-keeps-its-number",
        "a release that does not know the layout opens the shard, and lacks what is in it",
        (
            Edit(
                "tickwheel/persistence/redis/lua/open.lua",
                "WHEEL, 'format', ARGV[4], 'owner', ARGV[1], 'clean', 0,",
                "WHEEL, 'owner', ARGV[1], 'clean', 0,",
            ),
        ),
        (LATER_FORMATS + "test_a_store_of_format_1_is_upgraded_when_it_is_opened[redis]",),
    ),
    Mutant(
        "an-upgraded-database-keeps-its-number",
        "the same of SQLite; the next start upgrades it once more",
        (
            Edit(
                "tickwheel/persistence/sqlite/schema.py",
                """WHERE key = 'layout'", (LAYOUT,))\n    _mark(connection)\n""",
                """WHERE key = 'layout'", (LAYOUT,))\n""",
            ),
        ),
        (LATER_FORMATS + "test_a_store_of_format_1_is_upgraded_when_it_is_opened[sqlite]",),
    ),
    Mutant(
        "torture-finds-a-resent-duplicate",
        "no memory for resends at all: many clients have to notice",
        (
            Edit(
                "tickwheel/server/shard/operations/producing.py",
                "        if answer is not None:\n",
                "        if answer is False:\n",
            ),
        ),
        (TORTURE,),
    ),
    Mutant(
        "torture-finds-a-lost-ack",
        "acks are answered and not written",
        (
            Edit(
                "tickwheel/persistence/sqlite/writer.py",
                "            if effects.ended:\n",
                "            if len(effects.ended) > 1:\n",
            ),
        ),
        (TORTURE,),
    ),
)
