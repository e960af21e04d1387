"""Seeded bugs of filters; each must be found by each of its tests."""

from __future__ import annotations

from mutations.mutants import Edit, Mutant

CONDITIONS = "tickwheel/model/filters/conditions.py"
FILTER = "tickwheel/model/filters/filter.py"
MODEL = "tests/model/filters/test_filter_model.py::"
RULES = "tests/model/filters/test_filter.py::"
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
)  # fmt: skip
