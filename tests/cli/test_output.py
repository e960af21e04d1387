"""Rendering: plain columns into a pipe, one object a line with --json, exit codes by error."""

from __future__ import annotations

import io
import json
import sys

import pytest

from tickwheel import errors
from tickwheel.cli.app import exit_code
from tickwheel.cli.output import Grid, Output
from tickwheel.cli.tasks import named_failures, verdict
from tickwheel.cli.top import stats_topics_grid

TOPICS = {
    "orders": {
        "pending": 1234, "ready": 0, "in_flight": 2, "waiting": 0, "dead": 1, "delivered": 5,
        "acked": 3, "groups": {"billing": {"ready": 0, "in_flight": 2, "dead": 1}},
    }
}  # fmt: skip


def test_columns_are_aligned_and_numbers_stand_right() -> None:
    grid = Grid(("id", "topic"), right=frozenset(("id",)))
    grid.rows.extend([("7", "a"), ("1234", "orders")])
    assert grid.plain() == "  id  topic\n   7  a\n1234  orders"


def test_an_empty_table_is_its_head() -> None:
    assert Grid(("id", "topic"), title="Tasks").plain() == "Tasks\nid  topic"


def test_topics_have_a_row_and_one_for_each_group() -> None:
    lines = stats_topics_grid(TOPICS).plain().splitlines()
    assert lines[0] == "Topics"
    assert lines[2].split() == ["orders", "1,234", "0", "2", "0", "1", "5", "3"]
    assert lines[3].split() == ["billing", "0", "2", "1"]


def test_a_table_into_a_pipe_has_no_frames(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=False).grid(stats_topics_grid(TOPICS))
    assert capsys.readouterr().out.isascii()


def test_a_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).record({"id": "1", "body": "two\nlines, ünïcode"})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"id": "1", "body": "two\nlines, ünïcode"}


def test_output_survives_a_terminal_that_knows_only_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Output(as_json=True).record({"body": "ü"})
    Output(as_json=False).line("ü")
    assert raw.getvalue() == b'{"body": "\\u00fc"}\n?\n'


def test_failures_get_names() -> None:
    assert named_failures([[1, 5, "exit code 1"]]) == [
        {"attempt": 1, "at_ms": 5, "reason": "exit code 1"}
    ]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Refused(), 1), (errors.SendTimeout(), 1), (errors.OutcomeUnknown(), 1),
        (errors.Unauthorized(), 1), (errors.BadRequest(), 2), (errors.DueTooFar(), 2),
        (errors.Unreachable(), 3), (errors.ConnectionLost(), 3), (errors.NotFound(), 4),
        (errors.TaskGone(), 4),
    ],
)  # fmt: skip
def test_exit_codes(error: errors.TickwheelError, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["cancelled"], 0), ([], 0), (["unknown"], 4), (["gone", "cancelled"], 4),
        (["in_flight"], 1), (["unknown", "in_flight"], 1),
    ],
)  # fmt: skip
def test_the_verdict_on_many_ids(statuses: list[str], code: int) -> None:
    assert verdict(statuses, {"cancelled"}) == code
