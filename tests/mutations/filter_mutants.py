"""Seeded bugs of filters; each must be found by each of its tests."""

from __future__ import annotations

from mutations.delivery_mutants import OWNERSHIP
from mutations.mutants import DELIVERY, Edit, Mutant

CONDITIONS = "tickwheel/model/conditions.py"
FILTER = "tickwheel/model/filters.py"
MODEL = "tests/model/test_filter_model.py::"
GROUPS = "tests/engine/test_engine_filters.py::"
SHARD = "tests/server/shard/test_filters.py::"
FILTERING = "tickwheel/model/filters.py"
RULES = "tests/model/test_filter.py::"
SAME_TEXT = MODEL + "test_the_same_text_chooses_the_same_rows"
TWO_KINDS = MODEL + "test_what_compares_two_kinds_is_unknown"

FILTER_MUTANTS = (
    Mutant(
        "not-of-unknown-is-true",
        "two-valued logic: what is not TRUE is FALSE",
        (Edit(CONDITIONS, "        return None if found is None else not found\n",
              "        return not found\n"),),
        (SAME_TEXT, TWO_KINDS, RULES + "test_what_is_unknown"),
    ),
    Mutant(
        "a-null-in-a-list-is-passed-over",
        "NOT IN of a list with NULL is TRUE",
        (Edit(CONDITIONS, "False if all(each.kind is kind for each in values) else None",
              "False"),),
        (SAME_TEXT, TWO_KINDS, RULES + "test_what_is_unknown"),
    ),
    Mutant(
        "a-pattern-finds-the-same-characters-twice",
        "the second part of a pattern is searched from the beginning",
        (Edit(CONDITIONS, "            place = search(text, place, end)\n",
              "            place = search(text, head_length, end)\n"),),
        (RULES + "test_patterns",),
    ),
    Mutant(
        "true-is-the-number-1",
        "a truth value is looked for among the numbers",
        (Edit(CONDITIONS, "    bool: Kind.TRUTH,\n", "    bool: Kind.NUMBER,\n"),),
        (TWO_KINDS, RULES + "test_what_is_unknown"),
    ),
    Mutant(
        "unknown-passes",
        "a task of which the condition is UNKNOWN is handed out",
        (Edit(FILTER, "options[2] or NO_PROPERTIES) is True",
              "options[2] or NO_PROPERTIES) is not False"),),
        (SAME_TEXT, TWO_KINDS, RULES + "test_what_is_unknown"),
    ),
    Mutant(
        "a-change-has-no-moment",
        "what came due before a filter was changed is judged by the new one after a crash",
        (Edit(FILTERING, "            if is_before(former, row):\n",
              "            if former is None:\n"),),
        (GROUPS + "test_what_came_due_before_a_change_is_judged_by_the_old_filter[True]",
         SHARD + "test_what_came_due_before_a_change_outlasts_a_restart"),
    ),
    Mutant(
        "former-filters-judge-by-due-time-alone",
        "what is enqueued in the millisecond of a change is judged by the former filter",
        (Edit(FILTERING, "row.due_ms <= former.due_ms and order_of(row) <= former.id",
              "row.due_ms <= former.due_ms"),),
        (GROUPS + "test_what_came_due_before_a_change_is_judged_by_the_old_filter[False]",),
    ),
    Mutant(
        "a-restart-forgets-filters",
        "a task that others have is handed to a group that left it out",
        (Edit(OWNERSHIP, "    owed = [member for member in owed if wants(member, row)]\n", ""),),
        (GROUPS + "test_what_one_group_was_handed_is_not_another_ones_after_a_crash",),
    ),
    Mutant(
        "a-replay-asks-no-filter",
        "a group that begins in the past gets what its filter leaves out",
        (Edit(OWNERSHIP,
              "        if not wants(group, row):\n"
              "            self._count_left_out(group, row, last=False)\n"
              "            return\n        if not owners",
              "        if not owners"),),
        (GROUPS + "test_a_group_that_begins_in_the_past_gets_what_its_filter_lets_pass",),
    ),
    Mutant(
        "what-is-left-out-together-keeps-its-keys",
        "a task that was judged with others and left out is still found by its key",
        (Edit(OWNERSHIP,
              " in others], Outcome.FILTERED, topic, keys)\n",
              " in others], Outcome.FILTERED, topic, {})\n"),),
        ("tests/engine/test_engine_filters.py::"
         "test_many_that_come_due_together_are_judged_together",),
    ),
    Mutant(
        "the-first-group-takes-everything",
        "what waited for the first group is handed out whatever its filter says",
        (Edit(DELIVERY, "group.stale or task_id <= unjudged_id or group.delivery_attempts:",
              "group.stale or group.delivery_attempts:"),),
        (GROUPS + "test_what_waited_for_the_first_group_is_judged_as_its_turn_comes",),
    ),
    Mutant(
        "former-filters-are-dropped-at-once",
        "a change forgets the former filter though tasks wait that it has to judge",
        (Edit(OWNERSHIP,
              "            if not any(one.holds_any for one in topic.groups.values()):\n"
              "                return ()\n",
              "            return ()\n"),),
        (GROUPS + "test_what_came_due_before_a_change_is_judged_by_the_old_filter[True]",),
    ),
)  # fmt: skip
