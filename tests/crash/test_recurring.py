"""The judge of a torture run's schedules: what it has to find, and what is allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from crash.recurring import ASKED, Asked, Life, Occurred, judge

ALL = Asked("s", 300, {"every_ms": 300, "catch_up": "all"})
CAME = [
    Occurred("s", planned_ms, planned_ms + 1, planned_ms, order)
    for order, planned_ms in enumerate((3_000, 3_300, 3_600))
]
"""A good life: three occurrences, each its own task."""


def life(asked: Asked = ALL, **fields: Any) -> Life:
    return Life(asked, 3_000, **({"next_ms": 3_900, "runs": 3} | fields))


def with_overlap(overlap: str) -> Asked:
    return Asked("s", 300, ALL.options | {"overlap": overlap})


def test_a_correct_schedule_has_no_problems() -> None:
    assert judge([life(fired={3_600: 3_601})], CAME) == []


def test_a_repeated_delivery_is_not_a_problem() -> None:
    assert judge([life()], [*CAME, replace(CAME[0], order=9)]) == []


def test_runs_up_to_runs_max_are_accepted() -> None:
    few = Asked("s", 300, ALL.options | {"runs_max": 3})
    assert judge([life(few, next_ms=None)], CAME) == []
    assert judge([life(few, next_ms=None, runs=2)], CAME[:2]) == ["missed: s at 3600"]


@pytest.mark.parametrize(
    ("changed", "came", "word"),
    [
        ({"runs": 2}, CAME[:2], "missed: s at 3600"),
        ({}, [*CAME, replace(CAME[0], id=7)], "doubled: s at 3000"),
        ({"fired": {3_600: 9}}, CAME, "noted as task 9"),
        ({}, [replace(CAME[0], due_ms=2_999), *CAME[1:]], "early: s at 3000"),
        ({}, [*CAME, Occurred("s", 3_100, 7, 3_100, 9)], "unplanned: s at 3100"),
        ({}, [*CAME, Occurred("s", 3_900, 7, 3_900, 9)], "unplanned: s at 3900"),
        ({"runs": 4}, CAME, "lost: s fired 4 times and 3 came"),
        ({"runs": 2}, CAME, "lost: s fired 2 times and 3 came"),
        ({}, [*CAME, replace(CAME[0], name="x")], "schedule x was never put"),
        ({"next_ms": 3_000, "runs": 0}, [], "the run shows nothing"),
    ],
)
def test_each_broken_promise_is_found(
    changed: dict[str, Any], came: list[Occurred], word: str
) -> None:
    assert any(word in text for text in judge([life(**changed)], came))


def test_skippable_occurrences_are_not_required() -> None:
    for asked in (Asked("s", 300, {"every_ms": 300}), with_overlap("skip")):
        assert judge([life(asked, runs=2)], CAME[:2]) == []


def test_a_replaced_occurrence_is_not_required() -> None:
    assert judge([life(with_overlap("cancel_previous"))], CAME[1:]) == []
    assert judge([life(with_overlap("queue_one"))], CAME[1:])


@pytest.mark.parametrize("overlap", ["skip", "queue_one"])
def test_an_occurrence_after_a_later_one_is_an_overlap(overlap: str) -> None:
    late = [*CAME, replace(CAME[1], order=9)]
    assert judge([life(with_overlap(overlap))], late) == [
        "overlap: s at 3300 came after that at 3600"
    ]
    assert judge([life(with_overlap(overlap))], late, requeued={CAME[1].id}) == []


def test_a_run_has_every_catch_up_and_overlap() -> None:
    options = [asked.options for asked in ASKED]
    assert {given.get("catch_up", "last") for given in options} == {"skip", "last", "all"}
    assert {given.get("overlap", "allow") for given in options} == {
        "allow", "skip", "queue_one", "cancel_previous",
    }  # fmt: skip
    assert sum("cron" in given for given in options) >= 2
