"""Seeded bugs of who is owed what; each must be found by each of its tests."""

from __future__ import annotations

from mutations.delivery_mutants import GROUPS, OWNERSHIP
from mutations.mutants import Edit, Mutant

ENGINE = "tests/engine/test_engine_ownership.py::"
MODEL = "tests/engine/test_ownership_model.py::TestOwnership"

OWNERSHIP_MUTANTS = (
    Mutant(
        "a-replay-is-no-owner",
        "what a replay has not reached ends with the last group that had it",
        (
            Edit(
                OWNERSHIP,
                "        if not heirs:\n            return False\n",
                "        if heirs is not None:\n            return False\n",
            ),
        ),
        (
            ENGINE + "test_what_a_replay_has_not_reached_outlives_its_other_groups",
            GROUPS + "test_a_new_group_from_the_first_task_on_outlives_the_old_one[sqlite-False]",
            GROUPS + "test_acks_of_the_old_group_take_nothing_from_a_new_one[sqlite-True]",
        ),
    ),
    Mutant(
        "owing-goes-by-due-times-alone",
        "a group misses what is enqueued after it while the clock is behind",
        (
            Edit(
                OWNERSHIP,
                "    return order > member.since_id or row.due_ms >= member.since_ms\n",
                "    return row.due_ms >= member.since_ms\n",
            ),
            Edit(
                OWNERSHIP,
                "if order > group.since_id or due_ms >= group.since_ms]",
                "if due_ms >= group.since_ms]",
            ),
        ),
        (
            ENGINE + "test_what_is_enqueued_after_a_group_is_its_own_whatever_the_clock_says",
            ENGINE + "test_a_takeover_by_another_clock_changes_nothing",
        ),
    ),
    Mutant(
        "a-group-begins-at-the-wheel-whatever-the-clock",
        "a group made while the clock is behind misses what waits for it",
        (
            Edit(
                OWNERSHIP,
                "        return min(position_ms + 1, max(now_ms, first_ms))\n",
                "        return position_ms + 1\n",
            ),
        ),
        (ENGINE + "test_a_group_made_while_the_clock_is_behind_gets_what_waits_for_it",),
    ),
    Mutant(
        "closing-goes-by-the-clock",
        "a deleted group holds what is scheduled, if the clock was ahead before",
        (
            Edit(
                OWNERSHIP,
                "min(core.wheel.position_ms, self.unfired_ms() - 1)",
                "core.wheel.position_ms",
            ),
        ),
        (ENGINE + "test_what_is_scheduled_survives_the_deletion_of_a_group",),
    ),
    Mutant(
        "closing-takes-what-is-staged",
        "a deleted group holds what was not on the wheel yet",
        (Edit(OWNERSHIP, "closed_id=core.wheel_id", "closed_id=core.ids.last"),),
        (ENGINE + "test_what_was_staged_when_the_group_went_is_not_its_own",),
    ),
    Mutant(
        "columns-never-need-a-place",
        "a task that is moved among others stays where a group would miss it",
        (
            Edit(
                OWNERSHIP,
                "        is_closed(member)\n"
                "        or BY_DUE_ALONE > member.since_id >= first_id\n",
                "        member is None\n",
            ),
        ),
        (
            ENGINE + "test_tasks_that_may_need_a_place_do_not_move_as_columns[made]",
            ENGINE + "test_tasks_that_may_need_a_place_do_not_move_as_columns[deleted]",
        ),
    ),
    Mutant(
        "a-moved-task-keeps-its-place",
        "a task that is moved below the start of a group is not its own any more",
        (
            Edit(
                OWNERSHIP,
                "        if not needs_place(core.topic(row.topic).groups.values(), row):\n",
                "        if row is not None:\n",
            ),
        ),
        (
            ENGINE + "test_a_task_moved_below_the_start_of_a_group_is_still_its_own",
            ENGINE + "test_a_task_moved_below_the_end_of_a_group_is_not_held_by_it",
        ),
    ),
    Mutant(
        "a-replay-gives-twice",
        "a group gets again what it has acked before its replay came there",
        (
            Edit(
                OWNERSHIP,
                "            made = owed.made\n",
                "            made = 0\n",
            ),
        ),
        (ENGINE + "test_what_the_new_group_has_acked_does_not_come_to_it_again",),
    ),
    Mutant(
        "the-model-finds-a-replay-that-is-no-owner",
        "the same as the first one: duties and random steps have to notice, and shrink for long",
        (
            Edit(
                OWNERSHIP,
                "        if not heirs:\n            return False\n",
                "        if heirs is not None:\n            return False\n",
            ),
        ),
        (MODEL + "AtLength",),
    ),
)
