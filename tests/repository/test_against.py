"""The comparison of two builds runs; its figures are not judged here."""

from __future__ import annotations

import sys

import pytest

from benchmarks.against import main

COMMAND = f"{sys.executable} -m tickwheel"


def test_two_builds_are_run_in_turn_and_shown_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both are this one."""
    assert main([COMMAND, "--quick", "--rounds", "1", "--only", "enqueue_batched", "burst"]) == 0
    shown = capsys.readouterr().out
    for metric in ("enqueue_batched.rate_server_us", "burst.rate"):
        assert metric in shown
    assert "new / old" in shown


def test_a_case_that_there_is_not_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([COMMAND, "--only", "none"]) == 2
    assert "not one of enqueue_frame" in capsys.readouterr().err
