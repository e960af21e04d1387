"""Seeded bugs of resets; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import FIRING, INTAKE, Edit, Mutant

OWNERSHIP = "tickwheel/engine/ownership.py"
RESETS = "tickwheel/engine/groups.py"
PAST = "tickwheel/history/past.py"
KIND = "tickwheel/server/shard/resets.py"
RULES = "tests/engine/test_resets.py::"
PLANS = "tests/history/test_past.py::"
DAEMON = "tests/server/shard/test_resets.py::"
MODEL = "tests/history/test_resets_model.py::TestResets::runTest"
STORE_MODEL = "tests/history/test_resets_model.py::TestResetsOfTheStore::runTest"

RESET_MUTANTS = (
    Mutant(
        "a-refused-step-of-a-reset-counts",
        "tasks that the store refused were given, as far as the bulk knows",
        (Edit(INTAKE, "            self.undo_bulks(batch)\n", "            pass\n"),),
        (DAEMON + "test_what_the_store_refuses_is_given_later", MODEL),
    ),
    Mutant(
        "what-is-given-again-is-everybodys",
        "a task that stands for another comes to all groups",
        (
            Edit(
                FIRING,
                "            replayed = row.options.replayed is not None\n",
                "            replayed = False\n",
            ),
        ),
        (RULES + "test_only_the_group_that_it_names_gets_it[b-False]", MODEL, STORE_MODEL),
    ),
    Mutant(
        "a-crash-forgets-whose-it-is",
        "after a restart a group that had it once is not the only one any more",
        (
            Edit(OWNERSHIP, "    if named is not None:\n        return member.name == named\n", ""),
        ),
        (RULES + "test_only_the_group_that_it_names_gets_it[a-True]", MODEL),
    ),
    Mutant(
        "what-is-given-again-goes-on",
        "a group that begins in the past inherits it",
        (Edit(OWNERSHIP, "        if traits.is_again:\n", "        if False:\n"),),
        (RULES + "test_a_group_that_is_made_later_is_not_owed_it",),
    ),
    Mutant(
        "a-key-that-is-pending-for-all",
        "a task that stands for another has its key as any task has",
        (Edit(RESETS, "        key=None,\n", ""),),
        (RULES + "test_its_key_is_seen_and_is_not_pending",),
    ),
    Mutant(
        "a-plan-without-an-end",
        "what happens after a reset was made changes what it gives",
        (Edit(PAST, "                return\n        yield event\n", "                pass\n"
              "        yield event\n"),),
        (
            PLANS + "test_the_mark_ends_it",
            DAEMON + "test_what_is_acked_after_the_reset_was_made_is_not_given",
            MODEL,
        ),
    ),
    Mutant(
        "what-the-group-has-comes-twice",
        "a task that the group holds is given again, too",
        (
            Edit(
                RESETS,
                "        return group not in owing(topic.groups, row, known.progress.keys() |"
                " known.dead.keys())\n",
                "        return True or owing is topic\n",
            ),
        ),
        (STORE_MODEL,),
    ),
    Mutant(
        "a-letter-that-was-deleted-counts-as-expired",
        "without a history a reset leaves it out",
        (
            Edit(
                RESETS,
                "known.progress[group.name].state is not ProgressState.EXPIRED\n",
                "known.progress[group.name].epoch > 0\n",
            ),
        ),
        (RULES + "test_how_a_group_stands_with_a_task_says_whether_it_is_given_again"
         "[a letter that was deleted-False]",),
    ),
    Mutant(
        "what-fires-anew-after-a-restart-is-not-due",
        "a reset that goes on right after a restart leaves out what has not fired yet",
        (
            Edit(
                RESETS,
                "        if row.id > self._core.wheel_id:\n",
                "        if row.id > self._core.wheel_id or self._core.is_scheduled(row):\n",
            ),
        ),
        (RULES + "test_what_has_not_fired_since_a_restart_is_given_all_the_same",),
    ),
    Mutant(
        "a-reset-that-says-nothing-of-gaps",
        "tasks that the history dropped are left out, and nobody learns that",
        (
            Edit(
                PAST,
                '            gaps += event["time_ms"] >= wanted.from_ms\n',
                "",
            ),
        ),
        (
            PLANS + "test_what_was_dropped_in_the_time_is_a_gap",
            DAEMON + "test_what_the_history_dropped_is_said",
        ),
    ),
    Mutant(
        "what-was-cancelled-comes",
        "a cancelled task counts as one that has ended",
        (
            Edit(
                PAST,
                '        if kind == "cancelled" or (kind in ("expired", "deleted") and group is'
                " None):\n            return found | Stand.GONE\n",
                '        if kind == "cancelled" or (kind in ("expired", "deleted") and group is'
                " None):\n            return found | Stand.ENDED\n",
            ),
        ),
        (MODEL,),
    ),
    Mutant(
        "a-step-from-the-beginning",
        "a restart gives what was given before once more",
        (
            Edit(KIND, "    return due_ms, int(task_id or -1)\n",
                 "    return (due_ms, -1) if task_id else (0, -1)\n"),
        ),
        (DAEMON + "test_a_restart_in_the_middle_goes_on_where_it_was",),
    ),
)  # fmt: skip
