"""Seeded bugs of schedules and of snoozes; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import INTAKE, SETTLEMENT, Edit, Mutant

SCHEDULE_HEAP = "tickwheel/engine/schedule_heap.py"
SCHEDULES = "tickwheel/engine/schedules.py"
TIMETABLES = "tickwheel/engine/timetables.py"
SCHEDULING = "tickwheel/server/shard/operations/scheduling.py"
RULES = "tests/engine/test_engine_schedules.py::"
TIMES = "tests/engine/test_timetables.py::"
COMMANDS = "tests/server/shard/test_scheduling.py::"
SNOOZE = "tests/engine/test_engine_snooze.py::"

WINDOWS = "tickwheel/wheel/windows.py"
RECORDER = "tickwheel/history/recorder.py"
PRODUCING = "tickwheel/server/shard/operations/producing.py"
MODEL = "tests/wheel/test_windows.py::"
PLACES = "tests/server/shard/test_windows.py::"
RESTORED = "tests/history/restore/test_restore_schedules.py::"

SCHEDULE_MUTANTS = (
    Mutant(
        "a-window-begins-before-it-is-due",
        "a task with a due window may come before its due time",
        (
            Edit(
                WINDOWS,
                "low_ms, high_ms = max(asked_ms, tick * tick_ms), ",
                "low_ms, high_ms = tick * tick_ms, ",
            ),
        ),
        (MODEL + "test_each_gets_the_first_of_the_emptiest",),
    ),
    Mutant(
        "a-window-ends-later",
        "a task with a due window may come after its end",
        (Edit(WINDOWS, "min(end_ms, (tick + 1) * tick_ms - 1)", "(tick + 1) * tick_ms - 1"),),
        (MODEL + "test_each_gets_the_first_of_the_emptiest",),
    ),
    Mutant(
        "what-was-chosen-does-not-count",
        "requests that come before the first is stored all get the same moments",
        (
            Edit(
                WINDOWS,
                "        counts.update(tick for tick in self._placed() "
                "if tick >> PAGE_BITS == number)\n",
                "",
            ),
        ),
        (
            MODEL + "test_what_was_chosen_counts_until_it_is_on_the_wheel",
            PLACES + "test_what_is_staged_counts_before_it_is_stored",
        ),
    ),
    Mutant(
        "a-request-reads-without-bound",
        "a frame of tasks on thousands of days holds the loop for minutes",
        (Edit(WINDOWS, "            if self._reads_left <= 0:\n", "            if False:\n"),),
        (MODEL + "test_a_request_reads_so_much_and_no_more",),
    ),
    Mutant(
        "a-resend-forgets-the-moments",
        "a resend is answered as if its tasks had no window",
        (
            Edit(
                PRODUCING,
                "                if type(tasks) is tuple and any(map(_has_window, tasks)):\n",
                "                if not tasks:\n",
            ),
        ),
        (PLACES + "test_a_resend_is_answered_with_the_same_moments",),
    ),
    Mutant(
        "a-refused-run-is-in-the-history",
        "what became of an occurrence stays in the history when its task was refused",
        (
            Edit(
                RECORDER,
                "            self._records[:0] = notes.records\n",
                "            self._records[:0] = notes.records + notes.occurrences\n",
            ),
        ),
        (RESTORED + "test_a_refused_run_leaves_no_event",),
    ),
    Mutant(
        "a-refused-run-is-lost",
        "the advance of a schedule stays when its task was refused",
        (
            Edit(
                INTAKE,
                "        schedule_heap.undo(batch.runs)\n",
                "        schedule_heap.landed(batch.runs)\n",
            ),
        ),
        (RULES + "test_a_refused_batch_undoes_the_run_which_comes_again",),
    ),
    Mutant(
        "a-refused-run-forgets-what-was-unfinished",
        "a schedule that skips fires beside its unfinished task, once a run on demand was refused",
        (
            Edit(
                SCHEDULE_HEAP,
                "            if planned.row.last_id != undo.before.last_id:\n",
                "            if True:\n",
            ),
        ),
        (RULES + "test_whatever_is_refused_leaves_a_schedule_as_it_was[True-run-True-skip]",),
    ),
    Mutant(
        "what-a-refused-run-counted-counts",
        "an occurrence that was missed beside a refused run is counted again",
        (
            Edit(
                SCHEDULES,
                "        else:\n            totals.schedules_missed += decision.missed\n",
                "        if True:\n            totals.schedules_missed += decision.missed\n",
            ),
        ),
        (
            RULES
            + "test_whatever_is_refused_leaves_a_schedule_as_it_was[True-occurrence-False-skip]",
        ),
    ),
    Mutant(
        "an-advance-without-its-task",
        "a schedule is written, and its task is not in the same batch",
        (
            Edit(
                SCHEDULES,
                "        planned.row = row\n"
                "        self._core.open.effects.put(SCHEDULE, row)\n"
                "        if self._core.recorder is not None and decision.happened:\n",
                "        planned.row = row\n"
                "        if self._core.recorder is not None and decision.happened:\n",
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
                "return change  # the clock jumps over it",
                "return found",
            ),
        ),
        (
            TIMES + "test_both_changes_in_berlin_as_the_document_has_them",
            TIMES + "test_a_fixed_time_is_once_a_day_over_every_change",
        ),
    ),
    Mutant(
        "what-was-missed-is-counted-one-by-one",
        "schedules hold the loop for as long as there were occurrences while the clock was behind",
        (
            Edit(
                SCHEDULES,
                "    missed = table.count(first_ms, until_ms, COUNTED_MAX)\n",
                "    missed = len(list(islice(table.between(first_ms, until_ms), COUNTED_MAX)))\n",
            ),
        ),
        (RULES + "test_a_clock_that_jumps_ahead_is_made_up_for_in_slices[3600000-last]",),
    ),
    Mutant(
        "schedules-are-decided-of-until-all-are",
        "all schedules that are due make their tasks in one turn of the loop",
        (Edit(SCHEDULES, " or steps_left <= 0:\n", ":\n"),),
        (RULES + "test_a_clock_that_jumps_ahead_is_made_up_for_in_slices[3600000-all]",),
    ),
    Mutant(
        "a-rare-time-is-walked-to-week-by-week",
        "a cron expression that matches every few years holds the loop",
        (
            Edit(
                TIMETABLES,
                "self._change(at, min(found, at + 2 * _NEAR_S))",
                "self._change(at, found)",
            ),
        ),
        ("tests/engine/test_timetables_model.py::test_what_a_question_costs",),
    ),
    Mutant(
        "a-repeated-hour-counts-twice",
        "what was missed in an hour that the clock shows twice is counted twice",
        (Edit(TIMETABLES, '        if self._fold == "first":\n', "        if False:\n"),),
        ("tests/engine/test_timetables_model.py::test_every_second_around_a_change",),
    ),
    Mutant(
        "a-snooze-that-costs-a-retry",
        "a postponed delivery counts as a failed one",
        (
            Edit(
                SETTLEMENT,
                "lease.past._replace(snoozes=lease.past.snoozes + 1)",
                "lease.past._replace(snoozes=lease.past.snoozes + 1, failed=lease.past.failed + 1)",
            ),
        ),
        (SNOOZE + "test_a_snoozed_task_comes_again_at_its_time_and_has_not_failed",),
    ),
)
