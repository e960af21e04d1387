"""Seeded bugs of keys and of what becomes of tasks whose key is pending; each must be found by each
of its tests."""

from __future__ import annotations

from mutations.mutants import INTAKE, Edit, Mutant

COALESCING = "tickwheel/engine/enqueue.py"
STATE = "tickwheel/engine/state.py"
TASKS = "tickwheel/engine/tasks.py"
CONTROLLING = "tickwheel/server/shard/operations/controlling.py"
QUEUE = "tickwheel/server/shard/coalescing.py"
SESSIONS = "tickwheel/engine/sessions.py"
SERVED = "tests/server/shard/test_coalescing.py::"
BY_KEY = "tests/server/shard/test_keys.py::"
LIFE = "tests/engine/test_coalescing_model.py::test_a_long_life[1-800]"

KEY_MUTANTS = (
    Mutant(
        "equal-hashes-are-equal-keys",
        "the key of a pending task is not compared, only its hash",
        (
            Edit(
                COALESCING,
                "            if found is not None and _name_of(found.row) == named and",
                "            if found is not None and",
            ),
        ),
        (SERVED + "test_keys_that_collide_never_meet", LIFE),
    ),
    Mutant(
        "equal-hashes-are-equal-keys-on-their-way",
        "the key of a staged task is not compared, only its hash",
        (
            Edit(
                COALESCING,
                "if _name_of(row) == named and _is_within(rule, row.id, now_ms))",
                "if _is_within(rule, row.id, now_ms))",
            ),
        ),
        (LIFE,),
    ),
    Mutant(
        "a-command-by-key-meets-another-key",
        "cancel by key does not compare the key",
        (
            Edit(
                CONTROLLING,
                "                if found is not None and _has_key(found, named):\n",
                "                if found is not None:\n",
            ),
        ),
        (BY_KEY + "test_keys_that_collide_never_meet",),
    ),
    Mutant(
        "an-acked-key-stays-in-the-index",
        "what a consumer has finished is not taken out of the index of keys",
        (
            Edit(
                STATE,
                "for i, lease in leases.items() if lease.traits.key is not None}\n",
                "for i, lease in leases.items() if lease.traits.key is None}\n",
            ),
        ),
        (SERVED + "test_tasks_that_ended_block_nobody",),
    ),
    Mutant(
        "a-cancelled-key-stays-in-the-index",
        "tasks that are cancelled many at once are not taken out of the index of keys",
        (
            Edit(
                TASKS,
                "        core.end_plain(far, Outcome.CANCELLED, name, keys)\n",
                "        core.end_plain(far, Outcome.CANCELLED, name, {})\n",
            ),
        ),
        (BY_KEY + "test_by_their_ids_tasks_with_a_key_are_cancelled_and_moved",),
    ),
    Mutant(
        "a-head-without-its-key",
        "what is read without its body has no key either",
        (
            Edit(
                "tickwheel/persistence/contract.py",
                "    key = keys.get(task_id)\n",
                "    key = None\n",
            ),
        ),
        (BY_KEY + "test_cancel_answers_for_every_task_that_has_the_key",),
    ),
    Mutant(
        "a-decision-rests-on-what-may-be-refused",
        "a task that is with the store counts as nothing: two of a key become pending",
        (
            Edit(
                COALESCING,
                "            waits = waits or staged is not None or self._is_landing("
                "named, rule, now_ms)\n",
                "            waits = waits or staged is not None\n",
            ),
            Edit(
                COALESCING,
                "        plan.waits |= self._is_landing(named, rule, now_ms)\n",
                "",
            ),
        ),
        (LIFE,),
    ),
    Mutant(
        "what-was-replaced-is-refused",
        "the new tasks of a request that replaced something are forgotten with a refused batch",
        (
            Edit(
                COALESCING,
                "                core.open.accepted.update(ids)\n",
                "                core.open.accepted.update(())\n",
            ),
        ),
        (SERVED + "test_what_was_replaced_stays_replaced_and_waits_for_the_store", LIFE),
    ),
    Mutant(
        "an-accepted-task-is-not-staged-again",
        "what must not be refused is forgotten all the same",
        (
            Edit(
                INTAKE,
                "        effects.enqueued = accepted | effects.enqueued\n",
                "",
            ),
        ),
        (LIFE,),
    ),
    Mutant(
        "a-body-that-is-not-durable-is-delivered",
        "a replaced task goes onto the wheel at once",
        (
            Edit(
                TASKS,
                "        core.write(row, is_moved=False)\n        core.hold(row)\n",
                "        core.write(row, is_moved=False)\n        core.schedule(row, now_ms)\n",
            ),
        ),
        (SERVED + "test_a_new_body_is_not_delivered_before_it_is_durable", LIFE),
    ),
    Mutant(
        "a-late-ack-settles-the-new-body",
        "what somebody has had is replaced under its id",
        (
            Edit(
                COALESCING,
                "if rule.replaces != DUE and not has_body and self._control.has_history(known):",
                "if rule.replaces != DUE and not has_body and self._control.has_history is None:",
            ),
        ),
        (SERVED + "test_what_somebody_has_had_is_replaced_by_a_new_id",),
    ),
    Mutant(
        "dead-letters-block",
        "a dead letter that nobody is owed is pending",
        (
            Edit(
                COALESCING,
                "        if not groups:\n            return False\n",
                "        if not groups:\n            return True\n",
            ),
        ),
        (SERVED + "test_tasks_that_ended_block_nobody", LIFE),
    ),
    Mutant(
        "an-answer-without-its-mark",
        "what became of tasks is answered before it is remembered durably",
        (Edit(COALESCING, "            core.open.has_marks = True\n", ""),),
        (SERVED + "test_what_was_answered_is_durable_before",),
    ),
    Mutant(
        "a-resend-is-decided-anew",
        "a restart forgets what became of tasks",
        (
            Edit(
                SESSIONS,
                "        if self.merged:\n            merged = tuple(",
                "        if False:\n            merged = tuple(",
            ),
        ),
        (SERVED + "test_a_resend_gets_the_first_answer",),
    ),
    Mutant(
        "a-number-is-taken-when-its-request-is-decided-of",
        "two payloads under one request number, and more requests than window_max, are taken",
        (Edit(QUEUE, "            session.under_way.add(number)\n", ""),),
        (
            SERVED + "test_what_comes_under_a_number_that_is_under_way_gets_its_answer"
            "[done-here-plain]",
            "tests/server/test_bounds.py::test_the_requests_of_a_session_in_one_piece[keep]",
        ),
    ),
    Mutant(
        "a-session-is-written-whole",
        "each batch writes all that a session remembers, however little it has answered",
        (Edit(SESSIONS, "        self._fresh = []\n        while", "        while"),),
        ("tests/engine/test_session_rows.py",),
    ),
    Mutant(
        "what-is-left-of-a-refused-batch-is-forgotten",
        "an accepted answer of a batch that was refused is lost with the next crash",
        (
            Edit(
                SESSIONS,
                "        self._fresh += [answer[0] for answer in row.answers]\n",
                "",
            ),
        ),
        (
            "tests/engine/test_session_rows.py::"
            "test_what_is_left_of_a_refused_batch_is_written_with_the_next",
        ),
    ),
    Mutant(
        "a-task-that-came-between-is-not-seen",
        "a request is decided of with what was read, whatever has landed since",
        (
            Edit(
                QUEUE,
                "wanted.waits or not all(task_id in asked for task_id in wanted.ids):",
                "wanted.waits:",
            ),
        ),
        (SERVED + "test_a_task_that_lands_while_the_others_are_read_is_seen",),
    ),
    Mutant(
        "a-plain-task-passes-the-rule-of-its-topic",
        "the fast way of tasks with a key knows no rules of topics",
        (
            Edit(
                "tickwheel/server/shard/operations/producing.py",
                "        if keyed and core.ruled_topics:\n            return 0\n",
                "",
            ),
        ),
        (SERVED + "test_a_topic_has_a_rule_for_tasks_with_a_key",),
    ),
)
