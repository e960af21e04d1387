"""Seeded bugs of schedules and of snoozes; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import INTAKE, SETTLEMENT, Edit, Mutant

SCHEDULES = "tickwheel/engine/schedules.py"
TIMETABLES = "tickwheel/engine/timetables.py"
SCHEDULING = "tickwheel/server/shard/operations/scheduling.py"
RULES = "tests/engine/test_engine_schedules.py::"
TIMES = "tests/engine/test_timetables.py::"
COMMANDS = "tests/server/shard/test_scheduling.py::"
SNOOZE = "tests/engine/test_engine_snooze.py::"

SCHEDULE_MUTANTS = (
    Mutant(
        "a-refused-run-is-lost",
        "the advance of a schedule stays when its task was refused",
        (Edit(INTAKE, "        agenda.undo(batch.runs)\n", "        agenda.landed(batch.runs)\n"),),
        (RULES + "test_a_refused_batch_undoes_the_run_which_comes_again",),
    ),
    Mutant(
        "an-advance-without-its-task",
        "a schedule is written, and its task is not in the same batch",
        (
            Edit(
                SCHEDULES,
                "        self._core.open.effects.schedules[planned.name] = planned.row = row\n"
                "        if fired and",
                "        planned.row = row\n        if fired and",
            ),
        ),
        (
            RULES + "test_the_task_and_the_advance_are_one_batch",
            RULES + "test_a_crash_neither_loses_nor_doubles_an_occurrence",
        ),
    ),
    Mutant(
        "a-run-that-may-be-undone-is-seen",
        "commands do not wait for the batch of a run",
        (
            Edit(
                SCHEDULING,
                "        if planned is None or not planned.staged:\n",
                "        if planned is None or planned.staged in (True, False):\n",
            ),
        ),
        (COMMANDS + "test_a_command_waits_for_the_run_that_is_under_way",),
    ),
    Mutant(
        "a-flood-after-a-downtime",
        "everything that was missed is made up for, whatever was asked",
        (Edit(SCHEDULES, '    if schedule.catch_up == "all":\n', "    if schedule.catch_up:\n"),),
        (RULES + "test_what_was_missed_is_for_the_catch_up",),
    ),
    Mutant(
        "a-jumped-hour-fires-by-the-old-offset",
        "a time that does not exist is read by the offset before the change",
        (
            Edit(
                TIMETABLES,
                "[self._bisected(second, first)]",
                "[first]",
            ),
        ),
        (
            TIMES + "test_both_changes_in_berlin_as_the_document_has_them",
            TIMES + "test_a_fixed_time_is_once_a_day_over_every_change",
        ),
    ),
    Mutant(
        "a-snooze-that-costs-an-attempt",
        "a postponed delivery counts as an attempt",
        (
            Edit(
                SETTLEMENT,
                "            self._keep_tries(lease, lease.attempt - 1, lease.failures)\n",
                "            self._keep_tries(lease, lease.attempt, lease.failures)\n",
            ),
        ),
        (SNOOZE + "test_a_snoozed_task_comes_again_at_its_time_and_the_attempt_did_not_count",),
    ),
)
