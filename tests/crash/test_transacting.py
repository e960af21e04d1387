"""The judge of a torture run's transactions: what it has to find, and what is allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crash.transacting import Deal, judge

BODIES = {"d/1/0", "d/1/1"}
PAID = Deal("d", kept=BODIES, sent=BODIES, answered={"commit"}, state="committed")
REFUSED = Deal("d", kept=BODIES, sent=BODIES, answered={"rollback"}, state="rolled_back")


def test_correct_transactions_have_no_problems() -> None:
    assert judge([PAID], {"d": "commit"}, ["d/1/0", "d/1/1", "d/1/1"]) == []
    assert judge([REFUSED], {"d": "rollback"}, []) == []
    assert judge([replace(PAID, answered=set())], {"d": "commit"}, BODIES) == []


def test_unanswered_transactions_can_have_either_outcome() -> None:
    more = replace(PAID, sent=BODIES | {"d/2/0"})
    assert judge([more], {"d": "commit"}, BODIES) == []
    assert judge([more], {"d": "commit"}, BODIES | {"d/2/0"}) == []
    begun = Deal("d", sent=BODIES, state="unknown_transaction")
    assert judge([begun], {}, []) == []


@pytest.mark.parametrize(
    ("deal", "decision", "came", "word"),
    [
        (PAID, "commit", {"d/1/0"}, "lost: d/1/1"),
        (REFUSED, "rollback", {"d/1/0"}, "half a task was seen: d/1/0"),
        (replace(PAID, state="rolled_back"), "commit", BODIES, "both ways: d is rolled_back"),
        (replace(REFUSED, state="open"), "rollback", set(), "both ways: d is open"),
        (replace(PAID, answered={"rollback"}), "commit", BODIES, "answered ['rollback']"),
        (replace(PAID, answered={"commit", "rollback"}), "commit", BODIES, "both ways"),
        (replace(PAID, state="unknown_transaction"), "commit", BODIES, "lost: nobody knows d"),
        (PAID, "commit", BODIES | {"d/9/0"}, "unknown: d/9/0"),
        (PAID, "commit", BODIES | {"x/1/0"}, "nobody's: x"),
    ],
)
def test_each_broken_promise_is_found(deal: Deal, decision: str, came: set[str], word: str) -> None:
    assert any(word in text for text in judge([deal], {"d": decision}, came))
