"""Seeded bugs of order keys and fair shares; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import SETTLEMENT, Edit, Mutant

LATENESS = "tickwheel/engine/events.py"
OWNERSHIP = "tickwheel/engine/ownership.py"
ORDERING = "tickwheel/engine/ordering.py"
KEY_QUEUES = "tickwheel/engine/queues.py"
DELIVERY = "tickwheel/engine/delivery.py"
FIRING = "tickwheel/engine/firing.py"
DUE_BATCH = "tickwheel/engine/firing.py"
LEASE_BATCH = "tickwheel/engine/delivery.py"
TASKS = "tickwheel/engine/tasks.py"
RECOVERY = "tickwheel/engine/engine.py"
STATE = "tickwheel/engine/state.py"
ENGINE = "tests/engine/test_engine_ordering.py::"
MODEL = "tests/engine/test_ordering_model.py::TestOrder::runTest"
LONE_MODEL = "tests/engine/test_ordering_model.py::TestLoneOrder::runTest"
ENGINE_MODEL = "tests/engine/test_engine_model.py::TestEngine::runTest"
LEASE_BATCH_TESTS = "tests/engine/test_lease_batch.py::"
NOTHING_LEFT = LEASE_BATCH_TESTS + "test_nothing_is_left_of_what_was_handed_out_in_one_step"
ALL_DURABLE = ENGINE + "test_a_key_goes_on_when_all_that_has_changed_is_durable"

ONE_RECEIPT = "tests/engine/test_engine_receipts.py::test_no_two_deliveries_have_one_receipt"
DEAD_LETTERS = "tickwheel/engine/settlement.py"
HELD_KEYS = "tickwheel/engine/tasks.py"

ORDER_MUTANTS = (
    Mutant(
        "receipts-begin-anew-with-a-requeue",
        "a late answer to a delivery of before ends the work of whoever has the task now",
        (
            Edit(
                DEAD_LETTERS,
                "        core.begins_anew(group, row.id, known.dead[name].attempt)\n",
                "",
            ),
        ),
        (ONE_RECEIPT, ENGINE_MODEL),
    ),
    Mutant(
        "receipts-begin-anew-when-a-held-key-is-released",
        "a late answer to a delivery of before ends the work, and the key goes on",
        (
            Edit(
                HELD_KEYS,
                "core.begins_anew(group, task_id, self._take_out(group, task_id).attempt)",
                "self._take_out(group, task_id)",
            ),
        ),
        (ONE_RECEIPT,),
    ),
    Mutant(
        "receipts-begin-anew-with-a-release",
        "what was given back is handed out with the same receipt again",
        (
            Edit(
                SETTLEMENT,
                "            core.begins_anew(lease.group, lease.id, lease.attempt)\n",
                "",
            ),
        ),
        (ONE_RECEIPT, ENGINE_MODEL),
    ),
    Mutant(
        "a-moved-task-forgets-its-number",
        "what was given back and moved is handed out with the same receipt again",
        (
            Edit(
                STATE,
                "        group.delivery_attempts.pop(task_id, None)\n"
                "        self.lifetimes.end(row)\n",
                "        group.delivery_attempts.pop(task_id, None)\n"
                "        self.lifetimes.end(row)\n"
                "        group.numbers.pop(task_id, None)\n",
            ),
        ),
        (ONE_RECEIPT,),
    ),
    Mutant(
        "the-next-one-before-the-end-is-durable",
        "a crash brings the earlier one back after the later one was handed out",
        (
            Edit(
                ORDERING,
                "            self._orderings.goes_on((self, marks))\n",
                "            self.durable(marks, self._now_ms)\n",
            ),
        ),
        (ENGINE + "test_the_next_one_comes_when_the_end_of_the_one_before_is_durable",),
    ),
    Mutant(
        "whose-turn-came-late-waited-for-nothing-else",
        "the whole wait of a task that stood in a key queue counts as its key's",
        (
            Edit(
                LATENESS,
                "            return cause_of(index, Cause.KEY_BUSY)\n",
                "            return Cause.KEY_BUSY\n",
            ),
        ),
        (ENGINE + "test_who_waited_for_its_turn_waited_longer_for_something_else",),
    ),
    Mutant(
        "an-earlier-one-waits-behind",
        "a task that nobody has had goes out before one that is due before it",
        (
            Edit(
                KEY_QUEUES,
                "        if (due_ms, place) < self._newest:\n",
                "        if mark == 0:\n",
            ),
        ),
        (ENGINE + "test_one_that_nobody_has_had_gives_way_to_an_earlier_one",),
    ),
    Mutant(
        "those-that-come-together-live-for-ever",
        "the time to live of a task that becomes ready with others is not watched",
        (
            Edit(
                DUE_BATCH,
                "options is not None and (options.ttl_ms is not None or options.replayed",
                "options is not None and (options.replayed",
            ),
        ),
        ("tests/engine/test_engine_delivery.py::test_what_comes_due_together_is_of_several_kinds",),
    ),
    Mutant(
        "a-key-queue-in-order-of-arrival",
        "what came later and is due before stands behind",
        (
            Edit(
                KEY_QUEUES,
                "        if last_ms > due_ms or (",
                "        if places == 0 and (",
            ),
        ),
        (MODEL,),
    ),
    Mutant(
        "nobody-gives-way",
        "one that nobody has had is handed out before an earlier one that came after it",
        (
            Edit(
                KEY_QUEUES,
                "        if (first_ms, self.places.get(first, first)) >= (due_ms, place):\n",
                "        if first_ms >= 0:\n",
            ),
        ),
        (ENGINE + "test_one_that_nobody_has_had_gives_way_to_an_earlier_one",),
    ),
    Mutant(
        "one-that-is-back-is-no-key-holder",
        "a requeued task and the next of its key are both on their way",
        (
            Edit(
                ORDERING,
                "                    self._ending[order] = 0\n",
                "                    pass\n",
            ),
        ),
        (ENGINE + "test_one_that_is_back_before_its_end_is_durable_keeps_its_turn",),
    ),
    Mutant(
        "any-receipt-ends-it",
        "an earlier receipt ends a task whose attempt somebody else has now",
        (
            Edit(
                SETTLEMENT,
                "                or (lease.order and"
                " (epoch, attempt) != (lease.epoch, lease.attempt))\n",
                "",
            ),
        ),
        (ENGINE + "test_only_the_current_receipt_ends_it",),
    ),
    Mutant(
        "a-moved-one-gives-up-its-key",
        "after an attempt the key goes on without it",
        (
            Edit(
                TASKS,
                "stays_holder=attempts.was_had)",
                "stays_holder=False)",
            ),
        ),
        (ENGINE + "test_one_that_has_had_an_attempt_keeps_its_turn_when_it_is_moved",),
    ),
    Mutant(
        "a-restart-forgets-key-holders",
        "what waits for a retry is not the holder of its key",
        (
            Edit(
                RECOVERY,
                "            ordering.claim(known.row)\n",
                "            pass\n",
            ),
        ),
        (ENGINE + "test_a_held_key_waits_for_an_operator[release-crash]",),
    ),
    Mutant(
        "rows-are-not-waited-for",
        "what is in memory is ready before what is due before it has been read",
        (
            Edit(
                FIRING,
                "                is_early = (firing or is_unloaded) and",
                "                is_early = False and",
            ),
        ),
        (ENGINE + "test_rows_that_are_not_in_memory_come_in_order_too",),
    ),
    Mutant(
        "a-replay-hands-out-at-once",
        "tasks of a key come by their ids, not by their due times",
        (
            Edit(
                ORDERING,
                "return self._group in self._group.topic.replays or EVERY_KEY in self._ending",
                "return False",
            ),
        ),
        (ENGINE + "test_a_group_that_begins_in_the_past_gets_a_key_by_due_times_too",),
    ),
    Mutant(
        "a-replay-does-not-wait-for-what-ended-before-it",
        "a crash gives the group a task whose key has gone on",
        (
            Edit(
                ORDERING,
                "        self.keep_from_going_on(EVERY_KEY)\n",
                "        self._may_all_go_on()\n",
            ),
        ),
        (ENGINE + "test_a_group_that_begins_in_the_past_waits_for_what_ended_just_before_it",),
    ),
    Mutant(
        "a-replay-takes-what-comes-again",
        "a task is in the queues twice, and the daemon ends",
        (
            Edit(
                OWNERSHIP,
                "            if row.id in core.orderings.coming(group):\n",
                "            if False:\n",
            ),
        ),
        (ENGINE + "test_a_replay_leaves_alone_what_comes_again_when_that_is_durable",),
    ),
    Mutant(
        "a-refused-batch-forgets-who-goes-on",
        "the keys whose tasks ended in it stand still for ever",
        (Edit(STATE, "    newer.ended[:0] = older.ended\n", ""),),
        (ENGINE + "test_the_next_one_comes_when_the_end_of_the_one_before_is_durable",),
    ),
    Mutant(
        "called-ones-do-not-count",
        "a value has more in flight than its limit",
        (
            Edit(
                ORDERING,
                "        if limit is not None and called + share.in_flight >= limit:\n",
                "        if limit is not None and share.in_flight >= limit:\n",
            ),
        ),
        (ENGINE + "test_no_more_than_so_many_of_a_value_are_in_flight",),
    ),
    Mutant(
        "an-end-does-not-call-the-next",
        "what waits for its share is never handed out",
        (
            Edit(
                ORDERING,
                "share.in_flight -= 1\n                self._admit(share)\n",
                "share.in_flight -= 1\n",
            ),
        ),
        (ENGINE + "test_no_more_than_so_many_of_a_value_are_in_flight", MODEL),
    ),
    Mutant(
        "a-restart-does-not-count-shares",
        "after it a value has more in flight than its limit",
        (
            Edit(
                ORDERING,
                "        if share is not None:\n            share.in_flight += 1\n        return",
                "        return",
            ),
        ),
        (ENGINE + "test_a_restart_counts_what_is_in_flight[crash]",),
    ),
    Mutant(
        "a-lease-batch-of-what-others-have-overtaken",
        "handed out in one step, one that nobody has had goes before an earlier one",
        (
            Edit(
                ORDERING,
                "        odd = (self.order.overtaken, self._notes.keys())\n",
                "        odd = (self._notes.keys(),)\n",
            ),
        ),
        (ENGINE + "test_one_that_nobody_has_had_gives_way_to_an_earlier_one",),
    ),
    Mutant(
        "a-lease-batch-outlives-its-time",
        "the time to live of what is handed out in one step goes on",
        (
            Edit(
                LEASE_BATCH,
                "    if not is_absent(columns.ttl_ms) or (marks",
                "    if (marks",
            ),
        ),
        (NOTHING_LEFT,),
    ),
    Mutant(
        "a-lease-batch-forgets-keys",
        "the key of what was handed out in one step is pending for ever",
        (
            Edit(
                LEASE_BATCH,
                "    others = (columns.key, columns.retry, columns.replayed)\n",
                "    others = (columns.retry, columns.replayed)\n",
            ),
        ),
        (NOTHING_LEFT,),
    ),
    Mutant(
        "a-lease-batch-forgets-order-keys",
        "two tasks of a key are in flight",
        (
            Edit(
                LEASE_BATCH,
                "            repeat(0) if self.marks is None else self.marks,\n",
                "            repeat(0),\n",
            ),
        ),
        (NOTHING_LEFT, LONE_MODEL),
    ),
    Mutant(
        "a-lease-batch-forgets-who-had-the-keys",
        "a key goes to another subscriber each time somebody comes",
        (
            Edit(
                DELIVERY,
                "                ordering.preferences.remember(part.marks, subscriber)\n",
                "                pass\n",
            ),
        ),
        (ENGINE + "test_keys_prefer_the_subscriber_that_had_them",),
    ),
    Mutant(
        "many-acks-do-not-look-at-what-has-left",
        "a key goes on before it is durable that another task of it has left",
        (
            Edit(
                ORDERING,
                "        if all(marks) and not self._strange and"
                " self._notes.keys().isdisjoint(marks):\n",
                "        if all(marks):\n",
            ),
        ),
        (ALL_DURABLE,),
    ),
    Mutant(
        "a-second-change-of-a-key-counts-alone",
        "a key goes on with the first of several changes that is durable",
        (
            Edit(
                ORDERING,
                "            before = int(mark in self._ending)\n",
                "            before = 0\n",
            ),
        ),
        (ALL_DURABLE,),
    ),
    Mutant(
        "a-head-that-comes-back-is-not-looked-at",
        "one that was moved to a later time goes before those that came meanwhile",
        (
            Edit(
                KEY_QUEUES,
                "        if mark in self.queues:  # it has come before, and others since\n",
                "        if mark == 0:\n",
            ),
        ),
        (ENGINE + "test_one_that_was_moved_behind_another_comes_behind_it",),
    ),
    Mutant(
        "a-scheduled-one-leaves-its-key-at-once",
        "a crash undoes a cancel, and the task comes after one that was due behind it",
        (
            Edit(
                STATE,
                "                ordering.keys.keep_from_going_on(mark_of(row))\n",
                "                pass\n",
            ),
        ),
        (ENGINE + "test_what_a_crash_would_put_back_holds_those_behind_it",),
    ),
    Mutant(
        "one-that-comes-back-stops-its-key",
        "a task that waited comes behind others, and nobody of its key is handed out",
        (
            Edit(
                ORDERING,
                "                self._comes_again(mark)\n",
                "                self._comes_again(mark)\n"
                "                ended = [one for one in ended if one != mark]\n"
                "                del self._ending[mark]\n",
            ),
        ),
        (ENGINE + "test_one_that_comes_back_behind_others_does_not_stop_its_key",),
    ),
    Mutant(
        "without-a-word-it-is-tried-for-ever",
        "a task that always fails holds up its key, and nobody is told",
        (
            Edit(
                "tickwheel/model/records.py",
                "        failure = settings.order_failure or ORDER_HOLD\n",
                "        failure = settings.order_failure or ORDER_RETRY\n",
            ),
        ),
        (ENGINE + "test_nobody_waits_for_ever_behind_one_that_always_fails",),
    ),
    Mutant(
        "one-that-comes-again-is-taken-for-one-that-was-read",
        "a read that began before a task was moved puts it into its turn beside the next one",
        (
            Edit(
                DELIVERY,
                "            if row is None or task_id in coming or group.loading.pop(",
                "            if row is None or group.loading.pop(",
            ),
        ),
        (ENGINE + "test_one_that_comes_again_while_its_row_is_read_waits_until_that_is_durable",),
    ),
    Mutant(
        "a-head-that-comes-again-has-ended",
        "run now of a task that another group has finished: two of its key are in flight",
        (
            Edit(
                ORDERING,
                "        if self._again:\n"
                "            # A head among them takes its end back, which is pending still.\n",
                "        heads = list(map(self._ending.pop, ended))\n        if self._again:\n",
            ),
            Edit(
                ORDERING,
                "        heads = list(map(self._ending.pop, ended))\n        if not all(heads):\n",
                "        if not all(heads):\n",
            ),
        ),
        (ENGINE + "test_one_that_comes_again_before_its_end_is_durable_has_its_turn_alone", MODEL),
    ),
    Mutant(
        "one-that-was-only-moved-does-not-give-way",
        "a task that this group has not had goes before an earlier one that it has not had",
        (
            Edit(
                DELIVERY,
                "mark_of(row), attempts is None or not attempts.was_had\n",
                "mark_of(row), attempts is None\n",
            ),
        ),
        (ENGINE + "test_one_that_was_only_moved_gives_way_to_an_earlier_one_that_comes_later",),
    ),
)
