"""The seeded bugs: each breaks a promise or a border, and names the tests that find it always."""

from __future__ import annotations

from typing import NamedTuple

from mutations.changes import (
    Change,
    condition,
    dropped,
    followed,
    instead,
    preceded,
    replaced,
    returning,
    without,
    word,
)


class Bug(NamedTuple):
    """``changes``: of each function, by its name ``Class.function``, what is changed. ``tests``:
    each of them finds it, on its own. ``usual``: tried by `make test`."""

    name: str
    why: str
    changes: dict[str, tuple[Change, ...]]
    tests: tuple[str, ...]
    usual: bool = False


COMMITTER = "tests/server/shard/test_committer.py::test_"
PROMISES = "tests/crash/test_promises.py::test_"
SYNC = "tests/crash/test_sync.py::test_"
TORTURE = "tests/crash/test_torture.py::test_all_promises_hold_under_kills[12]"
SIMULATION = "tests/simulation/test_simulation.py::test_every_run_holds[1000]"
SIMULATED_NODES = "tests/simulation/test_simulation.py::test_every_run_of_nodes_holds[2000]"
SIMULATED_WHOLE = "tests/simulation/test_simulation.py::test_every_run_of_the_whole_holds[40]"
BRANCHES = "tests/history/test_branches.py::test_"
WORKER = "tests/client/test_worker.py::test_"
CONNECTING = "tests/client/test_client_connecting.py::test_"
ONCE = "tests/client/test_idempotence.py::test_"
ORDERING = "tests/engine/test_engine_ordering.py::test_"
RECEIPTS = "tests/engine/test_engine_receipts.py::test_"
KEY_PAUSES = "tests/engine/test_key_pauses.py::test_"
OWNERSHIP = "tests/engine/test_engine_ownership.py::test_"
COALESCING = "tests/server/shard/test_coalescing.py::test_"
EXPLAINED = "tests/server/shard/test_explaining.py::test_a_task_is_explained"
MODES = "tests/e2e/test_lifecycle.py::test_files_have_at_most_the_configured_mode[args0-None-416]"
GIVEN_UP = "tests/server/fleet/test_reshard.py::test_a_check_refuses_superseded_databases[1]"
COALESCING_MODEL = (
    "tests/engine/test_coalescing_model.py::test_a_long_random_run_matches_the_model[3-800]"
)

# What is answered is durable, and a resend is harmless.
LOST = (
    Bug(
        "reply-without-its-commit",
        "an enqueue is answered when its batch is handed to the store",
        {"Committer._seal": (followed("hit", "release(batch)"),)},
        (
            COMMITTER + "an_enqueue_is_answered_only_when_its_batch_is_durable",
            SYNC + "pipelined_enqueues_wait_for_their_own_sync",
        ),
    ),
    Bug(
        "ack-confirmed-before-its-commit",
        "every OK is written at once",
        {
            "Committer.reply": (condition("is_empty", "isinstance(sink, _Turn)"),),
        },
        (SYNC + "every_reply_waits_for_its_sync", SIMULATION),
    ),
    Bug(
        "a-resend-recognised-by-number-alone",
        "other tasks under a used part of a transaction are confirmed and dropped",
        {"Transacting._check_same": (condition("_contents", "False"),)},
        (
            "tests/server/shard/test_operations.py"
            "::test_a_part_of_a_transaction_is_recognised_by_its_tasks[False-another body]",
        ),
        usual=True,
    ),
    Bug(
        "a-request-recognised-by-number-alone",
        "other tasks under a used number of a session are confirmed and dropped",
        {"Producing._is_repeat": (dropped("self._check_same"),)},
        (
            "tests/server/shard/test_operations.py"
            "::test_a_resend_is_recognised_by_its_tasks[True-another key]",
        ),
    ),
    Bug(
        "dedupe-mark-survives-a-refusal",
        "the resend of a refused request is answered with ids of tasks that were dropped",
        {"Intake._forget": (dropped("session.drop"),)},
        (
            COMMITTER + "a_refused_batch_refuses_its_enqueues_and_forgets_their_requests",
            "tests/crash/test_disk.py::test_a_refused_request_can_be_sent_again[refusing]",
        ),
    ),
    Bug(
        "dedupe-mark-not-in-the-commit",
        "a resend to a restarted daemon makes a second task",
        {"Engine.seal": (dropped("session.changes"),)},
        (PROMISES + "a_resend_after_a_kill_is_one_task[commit.after]",),
    ),
    Bug(
        "unknown-batch-tried-under-a-new-number",
        "a batch whose fate is unknown is applied twice",
        {
            "Committer._store_batch": (preceded("_set_trouble", "number += 1"),),
        },
        (COMMITTER + "an_unknown_outcome_is_retried_under_the_same_number",),
    ),
    Bug(
        "acks-of-a-refused-batch-forgotten",
        "what is not an enqueue has to be committed again",
        {"Intake.refuse": (dropped("core.open"),)},
        (COMMITTER + "a_refused_batch_keeps_its_acks_for_the_next_one",),
    ),
    Bug(
        "sync-off",
        "commits are not synced",
        {"make_durable": (word("FULL", "OFF"),)},
        (
            SYNC + "every_reply_waits_for_its_sync",
            SYNC + "a_power_cut_leaves_every_promise[40]",
        ),
    ),
    Bug(
        "sync-normal",
        "the log is synced at checkpoints only, SQLite's usual advice",
        {"make_durable": (word("FULL", "NORMAL"),)},
        (SYNC + "a_power_cut_leaves_every_promise[40]",),
    ),
    Bug(
        "recovery-skips-a-chunk",
        "a chunk of handles lacks the first of each part",
        {
            "_Later.take": (instead("self._sorted[-missing:]", "self._sorted[-missing:-1]"),),
        },
        (PROMISES + "a_restart_finds_every_task",),
    ),
    Bug(
        "a-lease-ends-by-a-clock-that-was-set-back",
        "a second start waits for hours for a consumer that died before the first",
        {"Recovery._restore_progress": (dropped("core.unsaved.append"),)},
        ("tests/engine/test_engine_recovery.py::test_no_later_start_prolongs_a_lease[ends0]",),
    ),
    Bug(
        "an-upgraded-database-keeps-its-number",
        "a release that does not know the layout opens it, and lacks what is in it",
        {
            "sqlite/database:upgrade_steps": (
                returning(
                    "tuple(sql for n in range(layout or LAYOUT, LAYOUT) for sql in UPGRADES[n])"
                ),
            )
        },
        (
            "tests/upgrade/test_later_formats.py"
            "::test_a_store_is_upgraded_when_it_is_opened[sqlite]",
        ),
    ),
    Bug(
        "torture-finds-a-lost-ack",
        "acks are answered and not written",
        {
            "Writer._small_transaction": (returning("None"),),
            "Writer._transaction": (dropped("end"),),
        },
        (TORTURE,),
    ),
    Bug(
        "half-a-change-is-survived",
        "an error in the middle of a command is answered like one before it",
        {"Border.act": (dropped("_acting"),)},
        (
            "tests/server/tcp/test_boundary.py"
            "::test_an_error_in_the_middle_of_a_change_ends_the_daemon[nack]",
        ),
    ),
    Bug(
        "what-is-staged-was-not-encoded",
        "the bounds alone keep from the store what it cannot hold",
        {"storable_options": (dropped("_pack"),)},
        ("tests/server/test_values.py::test_an_unencodable_value_is_refused_alone[task]",),
    ),
)

# Nothing comes early, everything comes until it is acknowledged, and only whoever has it ends it.
DELIVERED = (
    Bug(
        "early-by-one-tick",
        "the wheel fires a tick ahead, and the two later checks look away",
        {
            "Firing.fire": (
                instead(
                    "core.wheel.advance",
                    "(lambda ms, most: core.wheel.advance(ms + core.config.tick_ms, most))",
                ),
            ),
            "Firing._due": (instead("row.due_ms > now_ms", "False"),),
            "Leasing._lease_all": (instead("due_ms > now_ms", "False"),),
        },
        (PROMISES + "no_task_is_early",),
        usual=True,
    ),
    Bug(
        "a-jump-far-ahead-is-followed",
        "a clock that jumps a year ahead fires what is due by then",
        {"Clock._after_jump": (condition("_limit_ms", "False"),)},
        ("tests/test_clock.py::test_a_jump_ahead_above_the_limit_is_held_until_the_clock_is_back",),
    ),
    Bug(
        "lease-never-ends",
        "a task whose consumer is gone stays with it",
        {"Settlement._search_group": (instead("end_ms <= mono_ms", "False"),)},
        (PROMISES + "a_lease_is_kept_and_then_ends",),
    ),
    Bug(
        "retry-time-forgotten",
        "a nack's delay is over with the process",
        {"Recovery._restore_progress": (condition("WAITING", "False"),)},
        (PROMISES + "a_task_that_was_nacked_keeps_its_time_over_a_kill",),
    ),
    Bug(
        "a-death-is-a-failure",
        "a consumer that is killed uses up the retries of what it had",
        {"Past.with_failure": (condition("is_death", "False"),)},
        (
            "tests/engine/test_engine_deaths.py::test_a_death_counts_apart_from_failures_and_delays_the_retry",
        ),
    ),
    Bug(
        "another-connection-is-kept-free",
        "a connection is kept free for a lone task while another one is",
        {"Isolation.keep_free": (condition("keep", "presence.kept_for is None"),)},
        ("tests/engine/test_engine_deaths.py::test_a_suspect_being_read_reserves_one_connection",),
    ),
    Bug(
        "once-is-not-finished-first",
        "an at-most-once delivery is written at once and stays unfinished",
        {"Leasing._send_frame": (condition("at_most_once", "False"),)},
        ("tests/engine/test_engine_kinds.py::test_at_most_once_ends_durably_before_the_delivery",),
    ),
    Bug(
        "a-missing-row-is-answered-as-gone",
        "cancel and look-up of a task whose row is missing say that it has left",
        {"Commands._check": (condition("missing", "False"),)},
        ("tests/server/shard/test_missing_rows.py::test_a_row_missing_at_its_due_time_is_counted",),
    ),
    Bug(
        "packs-read-by-a-statement-of-their-own",
        "a task that moves from its pack to a row between the two statements is in neither",
        {
            "Reader._read_whole_packs": (
                followed(
                    "self._columns",
                    "columns = (*columns[:_ROW_COLUMNS],"
                    " *self._columns(self._read, ids)[_ROW_COLUMNS:])",
                ),
            ),
        },
        ("tests/persistence/test_races.py::test_reads_during_commits_see_whole_batches[sqlite]",),
    ),
)

# Only one writes, and only whoever has a receipt settles.
FENCED = (
    Bug(
        "leader-delivers-without-a-lease",
        "one whose lease may be over delivers on, beside the next leader",
        {"Leadership.may_deliver": (returning("True"),)},
        (SIMULATION,),
    ),
    Bug(
        "a-lost-lease-is-over",
        "whoever finds no lease behind a failover leads, though its owner knows more and lives",
        {"Leadership._owner_had_time": (instead("state.leased_here", "True"),)},
        (
            "tests/server/fleet/test_leadership.py::test_a_returning_store_waits_for_its_owner_first",
            "tests/server/fleet/test_leadership.py::test_a_promoted_replica_waits_for_its_owner_first",
        ),
    ),
    Bug(
        "hand-over-without-a-drain",
        "the store is closed as clean, and what was under way was not written",
        {"Shard.stop": (dropped("committer.stop"),)},
        (SIMULATION,),
    ),
    Bug(
        "late-batch-applied-again",
        "the store takes whatever batch comes: one that it had, and one of a former epoch",
        {
            "Writer._small_transaction": (returning("None"),),
            "Writer._transaction": (
                condition("ADVANCE", "connection.execute(sql.ADVANCE, marks).rowcount < 0"),
            ),
        },
        (
            "tests/persistence/test_conformance.py"
            "::TestBatches::test_batches_are_applied_in_order_and_once[sqlite]",
            "tests/persistence/test_conformance.py"
            "::TestBatches::test_another_epoch_or_owner_is_fenced[sqlite]",
        ),
    ),
    Bug(
        "a-name-proves-a-death",
        "the lease of whoever has this node's name is taken at once",
        {"Leadership.first_campaign": (without("is_over"),)},
        (
            "tests/server/fleet/test_leadership.py"
            "::test_the_first_campaign_yields_unless_the_leader_is_dead",
        ),
    ),
    Bug(
        "any-receipt-is-current",
        "a nack by an earlier receipt ends the attempt of somebody else",
        {"Settlement.current": (condition("attempt", "lease is None"),)},
        (PROMISES + "an_earlier_receipt_can_only_ack",),
    ),
    Bug(
        "receipts-begin-anew-with-a-requeue",
        "a late answer to a delivery of before ends the work of whoever has the task now",
        {"DeadLetters.requeue": (dropped("forget_deliveries"),)},
        ("tests/engine/test_engine_receipts.py::test_receipts_are_unique",),
    ),
)

# Whose turn it is, and who is owed what.
OWED = (
    Bug(
        "a-look-owns",
        "a peek makes a group, which adopts the backlog and is owed all that comes later",
        {
            "TaskPages.peek": (
                preceded(
                    "self._listings",
                    "one = self._parts.core.topic(asked.topic);"
                    " 'default' in one.groups or"
                    " self._parts.engine.grouping.create(one, 'default', ask.now.now_ms)",
                ),
            )
        },
        (
            "tests/verbs/test_verbs.py"
            "::test_reading_changes_no_group_and_no_lease[peek: what is due]",
            "tests/e2e/test_cli.py::test_reading_commands_change_no_state[2]",
        ),
    ),
    Bug(
        "a-new-group-is-told-nothing",
        "who makes a group does not hear of a backlog that another one holds for nobody",
        {"_describe_new": (returning('{"adopted": 0, "idle": {}}'),)},
        ("tests/client/test_shards.py::test_creating_a_group_logs_its_backlog_once[2]",),
    ),
    Bug(
        "the-next-one-before-the-end-is-durable",
        "a crash brings the earlier one back after the later one was handed out",
        {
            "KeyHolders.finish": (replaced("call_when_durable", "self.durable(marks, 0)"),),
        },
        (ORDERING + "the_next_task_of_a_key_waits_for_the_durable_ack",),
    ),
    Bug(
        "a-key-queue-in-order-of-arrival",
        "what came later and is due before stands behind",
        {"KeyQueue.add": (condition("last_ms", "False"),)},
        ("tests/engine/test_ordering_model.py::TestOrder::runTest",),
    ),
    Bug(
        "a-restart-forgets-key-holders",
        "what waits for a retry is not the holder of its key",
        {"Recovery._restore_progress": (dropped("claim"),)},
        (ORDERING + "a_held_key_waits_for_an_operator[release-crash]",),
    ),
    Bug(
        "a-restart-forgets-paused-keys",
        "what an operator has stopped is handed out after a crash",
        {"Recovery.records": (dropped("key_control"),)},
        (
            KEY_PAUSES + "tasks_of_a_paused_key_wait_for_its_resume[crash]",
            KEY_PAUSES + "tasks_of_a_paused_value_wait_for_its_resume[crash]",
        ),
    ),
    Bug(
        "lease-batches-take-paused-keys",
        "tasks that are handed out in one step are not looked at",
        {"Ordering.can_lease_together": (without("pauses"),)},
        (KEY_PAUSES + "lease_batches_leave_paused_keys_out[one]",),
    ),
    Bug(
        "called-ones-do-not-count",
        "a value has more in flight than its limit",
        {
            "FairShares._has_place": (instead("called + share.in_flight", "share.in_flight"),),
        },
        (ORDERING + "limit_each_limits_tasks_in_flight_per_value",),
    ),
    Bug(
        "owing-goes-by-due-times-alone",
        "a group misses what is enqueued after it while the clock is behind",
        {
            "owes": (without("since_id"),),
            "Ownership.assign": (without("since_id"),),
        },
        (
            OWNERSHIP + "tasks_enqueued_after_a_group_belong_to_it_despite_the_clock",
            OWNERSHIP + "a_takeover_with_another_clock_keeps_ownership",
        ),
    ),
    Bug(
        "a-replay-is-no-owner",
        "what a replay has not reached ends with the last group that had it",
        {"Ownership._give_to_replays": (condition("claiming", "True"),)},
        (
            OWNERSHIP + "unreplayed_tasks_outlive_their_other_groups",
            "tests/engine/test_ownership_model.py::TestOwnershipAtLength",
        ),
    ),
    Bug(
        "what-is-given-again-is-everybodys",
        "a task that stands for another, by a reset, comes to all groups",
        {"Firing.make_ready": (condition("replayed", "False"),)},
        ("tests/engine/test_resets.py::test_a_replayed_task_goes_only_to_its_group[b-False]",),
    ),
    Bug(
        "unknown-passes",
        "a task of which the condition is UNKNOWN is handed out",
        {
            "Filter.passes": (
                replaced(
                    "NO_PROPERTIES",
                    "return judge is None or judge(options, options[2] or NO_PROPERTIES)"
                    " is not False",
                ),
            ),
        },
        ("tests/model/test_filter.py::test_conditions_that_are_unknown",),
    ),
    Bug(
        "a-newer-replacement-overtaken-by-an-older-failure",
        "a task that fails after a newer one with its key has come waits for its retry, and is"
        " handled last",
        {"Settlement._go_on": (condition("replaced_by", "False"),)},
        (
            COALESCING_MODEL,
            COALESCING + "a_replaced_delivery_never_runs_after_its_replacement[nack-more0]",
        ),
    ),
    Bug(
        "a-crash-forgets-what-was-replaced-in-flight",
        "that a newer task has come is in memory only: after a restart the older one comes again",
        {"Control.give_way": (dropped("replaced_leases.append"),)},
        (COALESCING_MODEL,),
    ),
    Bug(
        "a-receipt-of-the-body-before",
        "a late ack of a requeued task ends the newer body that has replaced it in place",
        {
            "Coalescer._replacing": (
                instead("self._control.was_delivered", "self._control.has_history"),
            )
        },
        (
            COALESCING_MODEL,
            RECEIPTS + "a_receipt_does_not_settle_a_later_body[1-requeued]",
        ),
    ),
    Bug(
        "a-receipt-of-the-start-before",
        "a late ack of a delivery that a crash has lost ends a newer body",
        {"Control.replace": (condition("earlier_id", "False"),)},
        (RECEIPTS + "a_receipt_does_not_settle_a_later_body[1-crashed]",),
    ),
    Bug(
        "a-decision-rests-on-what-may-be-refused",
        "a task that is with the store counts as nothing: two of a key become pending",
        {
            "Coalescer.needed_records": (without("_is_landing"),),
            "Coalescer._plan_task": (dropped("_is_landing"),),
        },
        (COALESCING_MODEL,),
    ),
    Bug(
        "an-answer-without-its-mark",
        "what became of tasks is answered before it is remembered durably",
        {"Coalescer._execute": (dropped("has_marks"),)},
        ("tests/server/shard/test_coalescing.py::test_coalescing_answers_are_durable",),
    ),
)

# Schedules, bulk operations and the history are one commit with what they stand for.
TOGETHER = (
    Bug(
        "a-condition-taken-for-one-that-never-holds",
        "a filter between two whole numbers that lie far apart is refused, though tasks meet it",
        {"conditions:_around": (instead("floor(number) + 1", "floor(number)"),)},
        (
            "tests/model/test_filter.py"
            "::test_why_never_accepts_a_satisfiable_condition"
            "[a > 9007199254740992 AND a < 9007199254740994]",
        ),
    ),
    Bug(
        "a-stored-schedule-checked-as-a-new-one",
        "a restart pauses schedules that were accepted before a check was there",
        {
            "Recovering.begin": (
                instead("Timetable(row.schedule)", "Timetable(row.schedule, is_new=True)"),
            ),
        },
        (
            "tests/server/shard/test_scheduling.py"
            "::test_a_stored_schedule_that_a_put_would_refuse_runs_on",
        ),
    ),
    Bug(
        "a-webhook-signed-with-no-secret",
        "a receiver whose secret is missing accepts what anybody signs",
        {"webhooks:_sign_of": (instead("not key", "False"),)},
        ("tests/test_signing.py::test_an_empty_secret_verifies_no_request[whsec_]",),
    ),
    Bug(
        "a-cron-step-beyond-its-range",
        "a schedule fires at times that its cron expression does not name",
        {"timetables:_term": (instead("first == last", "False"),)},
        (
            "tests/engine/test_timetables.py"
            "::test_cron_expressions_follow_crontab[0 0 2-2/5 * *-days8]",
            "tests/engine/test_timetables_model.py"
            "::test_every_minute_of_some_days_matches_as_crontab_says",
        ),
    ),
    Bug(
        "an-advance-without-its-task",
        "a schedule is not written in the batch of its task",
        {
            "Schedules._advance": (dropped("put"),),
        },
        (
            "tests/engine/test_engine_schedules.py::test_a_run_and_its_schedules_advance_are_one_batch",
        ),
    ),
    Bug(
        "a-refused-run-is-lost",
        "the advance of a schedule stays when its task was refused",
        {
            "Intake._undo_runs": (instead("schedule_heap.undo", "schedule_heap.landed"),),
        },
        ("tests/engine/test_engine_schedules.py::test_a_run_in_a_refused_batch_is_repeated",),
    ),
    Bug(
        "a-bulk-whose-place-is-not-stored-with-its-step",
        "after a restart it does again what it had done",
        {
            "Bulks._write": (
                replaced(
                    "self.rows",
                    "before = self.rows.get(row.bulk.id, row); self.rows[row.bulk.id] = row",
                ),
                replaced("put", "self._core.open.effects.put(BULK, before)"),
            ),
        },
        ("tests/server/shard/test_bulk.py::test_a_bulk_resumes_after_a_restart",),
    ),
    Bug(
        "reply-before-its-history",
        "a kill between the answer and the spool loses what a client got as an answer",
        {
            "Committer._land": (
                condition("_history", "False"),
                followed("release", "self._history and self._history.keep(number, batch.notes)"),
            ),
        },
        ("tests/server/test_history_service.py::test_history_is_spooled_before_the_answer",),
    ),
    Bug(
        "history-of-a-refused-batch",
        "tasks that were refused stand in the history",
        {
            "history/daemon:Recorder.rejoin": (
                instead("_arrivals_of(notes.arrivals, accepted)", "notes.arrivals"),
            ),
        },
        ("tests/server/test_history_service.py::test_a_refused_batch_leaves_no_history",),
    ),
    Bug(
        "requeued-though-its-ttl-is-over",
        "a dead letter whose time to live is over is requeued, and vanishes",
        {"DeadLetters.would_expire": (instead("now_ms >= end_ms", "False"),)},
        (
            "tests/engine/test_engine_failures.py::"
            "test_a_dead_letter_with_an_expired_ttl_is_not_requeued",
        ),
    ),
    Bug(
        "new-ttl-is-not-written",
        "a requeued task has its new time to live until a restart",
        {"DeadLetters._live_on": (instead("core.write(row, is_moved=False)", "None"),)},
        ("tests/engine/test_engine_failures.py::test_a_new_ttl_applies_to_all_groups_of_the_task",),
    ),
    Bug(
        "restore-forgets-records",
        "a key that was paused after the backup is delivered by the restored store",
        {"history/fold:Fold._apply_other": (instead("self.records.apply(event)", "False"),)},
        (
            "tests/history/test_restore_records.py"
            "::test_events_since_any_backup_lead_to_the_records_of_the_store",
        ),
    ),
    Bug(
        "resharding-forgets-chosen-times",
        "a repeated request gets other due times than the first, although its tasks did not move",
        {"fleet/reshard:_ChosenDues.add": (instead("row.options.within_ms is None", "True"),)},
        ("tests/server/fleet/test_reshard.py::test_chosen_due_times_are_answered_again",),
    ),
    Bug(
        "restore-begins-too-late",
        "a restore passes over events since the backup that are about tasks in it",
        {"history/read:Start.is_backed_up": (instead("time_ms < self.since_ms", "True"),)},
        ("tests/history/test_restore.py::test_a_restore_begins_at_the_backup[3]",),
    ),
    Bug(
        "restore-misses-a-gap-behind-the-backup",
        "a restore begins at the first file since the backup, whatever was before it",
        {"history/read:_from_start": (instead("head.seq >= begin.seq", "head.seq > begin.seq"),)},
        ("tests/history/test_restore.py::test_a_gap_after_the_backup_is_never_exact",),
    ),
)

# A store that was lost or set back is not served in silence.
WHICH = (
    Bug(
        "a-store-of-another-branch-is-served",
        "an older copy of a database goes on beside the history of what it lacks",
        {"persistence/identity:_is_lacking": (returning("False"),)},
        (
            BRANCHES + "an_operator_can_serve_an_older_copy",
            BRANCHES + "a_loss_by_file_operations_is_never_silent[0]",
        ),
    ),
    Bug(
        "an-empty-file-is-made-anew",
        "what lies beside a database that is missing or empty is not looked at",
        {"sqlite/database:left_behind": (returning("[]"),)},
        (
            "tests/persistence/sqlite/test_sqlite_opening.py"
            "::TestLost::test_a_lost_database_is_not_recreated_next_to_its_files[.lock-empty]",
        ),
    ),
    Bug(
        "a-branch-that-was-lost-is-restored",
        "a restore applies the events of every branch",
        {"history/branches:Branch.includes": (returning("True"),)},
        (BRANCHES + "the_last_served_branch_is_followed",),
    ),
)

# Who may do what, and what others see of it.
ALLOWED = (
    Bug(
        "the-topic-is-not-checked",
        "a right for one topic is one for all",
        {"RightsStage._check": (condition("topics", "False"),)},
        (
            "tests/server/access/test_rights.py::test_every_tcp_request_needs_its_right[produce=u]",
            "tests/server/test_guard.py::test_one_forbidden_topic_refuses_the_whole_request",
        ),
    ),
    Bug(
        "ids-of-other-topics-are-found",
        "what is named by an id is not asked for its topic",
        {
            "shard/tasks:_is_visible": (returning("True"),),
            "shard/tasks:Controlling._change.act": (condition("topic", "True"),),
        },
        ("tests/server/test_guard.py::test_ids_of_other_topics_are_unknown",),
    ),
    Bug(
        "what-is-in-no-table-is-done",
        "a new operation is open to everybody until somebody thinks of its right",
        {
            "guard:with_stage": (
                replaced(
                    "table",
                    "return table({**{n: one for n, one in vars(verbs).items() if n not in"
                    " ('plain_tasks', 'unreadable')}, **operations}, plain_tasks, unreadable)",
                ),
            ),
        },
        ("tests/server/access/test_rights.py::test_undeclared_operations_are_not_exposed",),
    ),
    Bug(
        "an-expired-token-passes",
        "the end of a token is only shown",
        {"Logins.authenticate": (without("is_over"),)},
        (
            "tests/server/access/test_logins.py::test_an_expired_token_is_refused_and_ends_its_connections",
        ),
    ),
    Bug(
        "a-cookie-counts-alone",
        "a page on another port of the host acts as whoever is logged in",
        {"_session_text": (instead("CONSOLE_HEADER in headers", "True"),)},
        ("tests/server/http/test_sessions.py::test_a_cookie_needs_the_console_header[/v1/stats]",),
    ),
    Bug(
        "a-token-goes-where-there-is-no-tls",
        "a client follows a standby's hint to a port without TLS",
        {"search:address_named": (without("is_secure"),)},
        ("tests/client/test_client_failover.py::test_a_hint_with_another_security_is_ignored",),
    ),
    Bug(
        "the-audit-log-comes-after-the-answer",
        "who was answered is not in it yet",
        {"guard:_Line.give": (dropped("self.write"),)},
        ("tests/server/test_audit.py::test_an_audit_line_is_written_before_the_answer",),
    ),
)

# Whatever a client can make grow has a bound, and no turn of the loop does without one.
BOUNDED = (
    Bug(
        "every-stranger-has-a-line-of-the-log",
        "a port scanner fills the log",
        {"LogRateLimit.note": (returning('""'),)},
        (
            "tests/server/test_bounds.py"
            "::test_log_lines_of_unauthenticated_connections_are_limited",
            "tests/server/fleet/test_leadership.py::test_repeated_log_events_are_limited",
        ),
    ),
    Bug(
        "the-loop-waits-for-the-log",
        "a process whose log nobody reads stands still",
        {"log_writer:unblock_stderr": (returning("None"),)},
        (
            "tests/e2e/test_unread_log.py::test_a_daemon_with_an_unread_log_answers_and_ends",
            "tests/e2e/test_unread_log.py::test_shards_with_an_unread_log_answer_and_end",
            "tests/e2e/test_unread_log.py::test_a_worker_with_an_unread_log_handles_tasks_and_ends[False]",
        ),
    ),
    Bug(
        "a-targets-not-now-counted-as-a-failure",
        "what a target says of itself costs the tasks of the batch their retries",
        {"Runner._send": (condition("NotNow", "True"),)},
        ("tests/outbound/test_runner.py::test_target_errors_use_no_attempt",),
    ),
    Bug(
        "requests-are-looked-at-however-many-wait",
        "a peer whose answers wait goes on asking",
        {"Connection.must_wait": (without("is_behind"),)},
        ("tests/server/test_bounds.py::test_uncommitted_answers_of_a_connection_are_limited",),
    ),
    Bug(
        "a-piece-of-frames-in-one-go",
        "tens of thousands of small frames that come together hold up everybody",
        {"Connection._handle_all": (without("is_over"),)},
        ("tests/server/tcp/test_turns.py::test_a_large_read_is_handled_in_shares[1-lists]",),
    ),
    Bug(
        "schedules-are-decided-of-until-all-are",
        "all schedules that are due make their tasks in one turn of the loop",
        {"Schedules.fire": (without("steps_left"),)},
        (
            "tests/engine/test_engine_schedules.py"
            "::test_catch_up_after_a_clock_jump_is_sliced[3600000-all]",
        ),
    ),
)

# Shards come to the nodes where they shall be, and are without a leader for a moment only.
NODES = (
    Bug(
        "handed-over-to-nobody",
        "a shard is given away before its heir stands by",
        {"registrar:decide": (without("standbys"),)},
        (
            SIMULATED_NODES,
            "tests/server/fleet/test_placement.py::test_a_shard_is_handed_over_only_to_a_standby",
        ),
    ),
    Bug(
        "what-is-kept-counts-as-given",
        "a shard that a node keeps after all is given away without an heir when it moves again",
        {
            "Registrar._decide": (
                replaced(
                    "handing_over",
                    "self._handovers = dict.fromkeys(decision.handing_over, now_s)"
                    " | self._handovers",
                ),
            ),
        },
        (SIMULATED_NODES,),
    ),
    Bug(
        "a-standby-never-hurries",
        "the lease that was given back waits for a standby that looks four times a second",
        {"Member.is_release_near": (returning("False"),)},
        (SIMULATED_NODES,),
    ),
    Bug(
        "a-route-of-before",
        "the address of a shard is kept once it is known",
        {
            "Registrar._write": (
                instead(
                    'claims[s].address if s in claims else ""',
                    '(self._node.bulletin.read().get("route") or [""] * self._count)[s]'
                    ' or (claims[s].address if s in claims else "")',
                ),
            ),
        },
        (SIMULATED_NODES,),
    ),
    Bug(
        "a-node-that-lapsed-counts",
        "whoever was seen once has its part of the shards for ever",
        {
            "Registrar._decide": (
                preceded(
                    "monotonic",
                    'ever = self.__dict__.setdefault("ever", {}); ever.update(cluster.nodes);'
                    " cluster.seen_ms.update(dict.fromkeys(ever, 0)); cluster.nodes.update(ever)",
                ),
            ),
        },
        (SIMULATED_NODES,),
    ),
    Bug(
        "decides-before-others-are-seen",
        "nodes that start together take all shards, and then give them to each other",
        {"Registrar._decide": (instead("now_s >= self._decides_after_s", "True"),)},
        (SIMULATED_NODES,),
    ),
)

# A client leaves a daemon without a lease for the one that leads now, and troubles nobody else.
MOVING = "tests/client/test_shards_moving.py::test_"
UNREAD = "tests/server/http/test_gateway.py::test_an_unread_stream_uses_bounded_memory"
NAMES = "tests/client/test_shards_names.py::test_"
BESIDE = (
    Bug(
        "an-heir-is-one-of-many",
        "a client asks around where its shard goes, although it was told",
        {"Finder._only_successor": (returning("None"),)},
        (MOVING + "only_the_daemon_named_by_a_goodbye_is_asked",),
    ),
    Bug(
        "an-attempt-blocks-its-address",
        "one connection that says nothing keeps a client from a daemon that would answer another",
        {"Finder._may_repeat": (instead("a.since_s <= silent_s", "False"),)},
        (MOVING + "a_silent_connection_does_not_block_another_to_the_successor",),
    ),
    Bug(
        "whoever-says-it-serves-is-the-next-one",
        "a daemon that stood still gets the clients of the one that leads since",
        {"Reconnector._check_newer": (instead("epoch > own", "True"),)},
        (MOVING + "a_stale_daemon_is_not_followed",),
    ),
    Bug(
        "a-lease-that-is-back-is-still-looked-for",
        "clients ask others as long as the connection stands",
        {"Reconnector._lease_changed": (dropped("_end_search"),)},
        (MOVING + "a_daemon_that_gets_its_lease_back_keeps_its_clients",),
    ),
    Bug(
        "each-shard-asks-for-itself",
        "a client of 64 shards asks 64 times as often where they are",
        {"Finder._probes": (instead("max(most - fresh, 0)", "most"),)},
        (MOVING + "searches_of_a_client_share_their_attempts",),
    ),
    Bug(
        "a-lease-that-is-over-is-told-to-nobody",
        "clients of a node that is cut off from Redis wait until it reaches it again",
        {"Listener.set_lease": (dropped("send_lease"),)},
        ("tests/e2e/test_nodes_clients.py::test_clients_leave_a_node_cut_off_from_redis",),
    ),
)

# Clients: what one handler does is no failure of another one.
CLIENTS = (
    Bug(
        "a-neighbour-failed-by-sys-exit",
        "a handler's sys.exit ends the event loop, with the deliveries of all others in hand",
        {"Runner._exit_by": (replaced("_exits", "raise error"),)},
        (WORKER + "a_failing_handler_does_not_fail_others",),
        usual=True,
    ),
    Bug(
        "a-goodbye-that-fails-what-is-in-hand",
        "what a client did not settle before its goodbye counts as a failed attempt",
        {"Producing._release_some": (dropped("release_all"),)},
        ("tests/server/tcp/test_deaths.py::test_bye_releases_the_deliveries",),
    ),
    Bug(
        "a-text-that-cannot-be-sent",
        "an exception whose text has a lone surrogate leaves its task unsettled",
        {"errors:text_of": (word("backslashreplace", "strict"),)},
        (WORKER + "any_text_of_a_reason_settles_the_delivery",),
    ),
    Bug(
        "a-call-that-nobody-awaits",
        "an enqueue where no event loop runs returns a coroutine that nobody awaits",
        {"requests:needs_loop": (replaced("name", "pass"),)},
        (CONNECTING + "verbs_without_an_event_loop_raise_bad_request[enqueue]",),
    ),
    Bug(
        "two-tasks-with-one-key-are-one-claim",
        "work that was asked for twice is done once, because both tasks have the same key",
        {"idempotence:name_of": (instead("work.id", "work.key or work.id"),)},
        (ONCE + "claims_are_per_task_by_default",),
    ),
)

# A restore.
RESTORED = (
    Bug(
        "a-restore-that-forgets-a-replacement",
        "a restore brings a task back that was replaced while a consumer had it",
        {"Fold._overtaken": (returning("None"),)},
        ("tests/history/test_restore.py::test_a_task_replaced_in_flight_has_no_further_attempt",),
    ),
)

# Another number of shards.
RESHARDED = (
    Bug(
        "an-idempotency-key-that-stays-behind",
        "what was answered to a request with a key is not where its repeat is asked for",
        {
            "_Move._add_once": (
                instead("self.shard_of(row.once.key.hex())", "self._shard_without_basis(source)"),
            )
        },
        (
            "tests/server/fleet/test_reshard.py::test_idempotency_answers_move_to_their_new_home_shard",
        ),
    ),
)

# Daemons of nodes and clients of several shards: what neither simulation of only one of them finds.
WHOLE = (
    Bug(
        "a-node's-daemon-without-a-lease",
        "a daemon of a node delivers on when its lease may be over",
        {"Roles._take_over": (condition("_leadership", "self._member is None"),)},
        (SIMULATED_WHOLE,),
    ),
    Bug(
        "a-node's-daemon-without-a-drain",
        "a daemon of a node gives its shard away, and what was under way is not written",
        {
            "Daemon.stop": (
                condition(
                    "shard.failed.done",
                    "shard is not None and self.member is None and not shard.failed.done()",
                ),
            ),
        },
        (SIMULATED_WHOLE,),
    ),
    Bug(
        "a-client-asks-the-old-daemon",
        "a shard is looked for where it was found last, and nowhere else",
        {
            "ShardAddresses.around": (
                preceded("_last", "if shard in self._last: return [self._last[shard]]"),
            ),
        },
        (SIMULATED_WHOLE,),
    ),
    Bug(
        "a-client-follows-no-hint",
        "who says where the shard is is not believed",
        {"Finder._note": (replaced("active", "hint = None"),)},
        (SIMULATED_WHOLE,),
    ),
    Bug(
        "a-key-goes-to-any-shard",
        "tasks of an order key are in several shards, and none knows of the others",
        {"Shards.of_basis": (returning("self.any()"),)},
        (SIMULATED_WHOLE,),
    ),
    Bug(
        "a-name-is-unique-in-one-shard-only",
        "the home of a name grants it to whoever asks, whatever it has granted before",
        {
            "Naming._at_home": (
                replaced("claims.get", "found = None"),
                condition("is_in_use", "False"),
            ),
            "check_new_name": (returning("None"),),
        },
        (
            NAMES + "two_programs_use_a_name_at_once[race_for_a_schedule]",
            NAMES + "two_programs_use_a_name_at_once[race_for_a_transaction]",
        ),
    ),
    Bug(
        "a-subscription-counts-no-bytes",
        "whoever reads slowly has as many bodies in memory as its prefetch says",
        {"Subscription._hold_back": (without("_bytes_max"),)},
        (UNREAD,),
    ),
    Bug(
        "a-quick-reader-is-not-heard",
        "a peer that has read all gets more before what it has sent is read, for ever",
        {
            "server/tcp/connection:Connection.resume_writing": (
                replaced("loop.call_soon", "self._operations.unblocked(self.caller)"),
            )
        },
        (UNREAD,),
    ),
    Bug(
        "an-explanation-that-ignores-a-pause",
        "a task of a paused topic or group is said to wait for the next subscriber",
        {"explanation:_reason_of_pause": (returning("None"),)},
        (
            EXPLAINED + "[topic_paused-of_a_paused_topic]",
            EXPLAINED + "[group_paused-of_a_paused_group]",
        ),
    ),
    Bug(
        "a-quota-of-each-shard",
        "a token has its quota once in each shard",
        {"share_of_limit": (returning("most"),)},
        ("tests/server/access/test_quotas.py::test_quotas_cover_all_shards_together[quotas0-10]",),
    ),
    Bug(
        "a-claim-that-has-ended-counts",
        "what was claimed is made, although somebody else has the name by now",
        {"check_new_name": (condition("_is_over", "False"),)},
        (NAMES + "an_ended_claim_creates_nothing",),
    ),
    Bug(
        "files-that-everybody-reads",
        "a daemon's database, backups and history have the mode that its umask leaves",
        {"disk:withhold": (returning("None"),)},
        (MODES,),
    ),
    Bug(
        "a-database-that-was-given-up-is-checked",
        "the databases of before a reshard are said to be right, and those that count are not read",
        {"check_not_moved": (returning("None"),)},
        (GIVEN_UP,),
    ),
    Bug(
        "a-new-file-of-tokens-is-roots",
        "the daemon cannot read what root has changed, and goes by tokens that were revoked",
        {"server/access/tokens:_replace": (dropped("os.fchown"),)},
        ("tests/server/access/test_tokens.py::test_root_keeps_the_owner_of_the_token_file",),
    ),
    Bug(
        "an-idempotency-key-is-known-where-its-tasks-are",
        "the home of the key is not asked about a request of which it has no task",
        {
            "WireClient._put_once": (
                replaced(
                    "parts.get",
                    "if not (some := [tasks[at] for at in parts.get(shard, ())]): return ()",
                ),
            )
        },
        (NAMES + "two_programs_use_a_name_at_once[race_for_an_idempotency_key]",),
    ),
)

BUGS = (
    *LOST, *DELIVERED, *FENCED, *OWED, *TOGETHER, *WHICH, *ALLOWED, *BOUNDED, *NODES, *BESIDE,
    *CLIENTS, *RESTORED, *RESHARDED, *WHOLE,
)  # fmt: skip
