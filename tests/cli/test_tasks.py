"""Tasks by their ids: what a lookup says, and the exit code for many of them."""

from __future__ import annotations

import pytest

from tickwheel.cli.tasks import named_failures, verdict


def test_failures_get_names() -> None:
    assert named_failures([[1, 5, "exit code 1"]]) == [
        {"attempt": 1, "at_ms": 5, "reason": "exit code 1"}
    ]


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["cancelled"], 0), ([], 0), (["unknown"], 4), (["gone", "cancelled"], 4),
        (["in_flight"], 1), (["unknown", "in_flight"], 1),
    ],
)  # fmt: skip
def test_the_verdict_on_many_ids(statuses: list[str], code: int) -> None:
    assert verdict(statuses, {"cancelled"}) == code
