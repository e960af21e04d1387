"""The comparison of two builds runs, and the parts of a batch; figures are not judged here."""

from __future__ import annotations

import sys

import pytest

from benchmarks import batch_floor
from benchmarks.against import main

COMMAND = f"{sys.executable} -m tickwheel"


def test_two_builds_are_run_in_turn_and_shown_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both are this one."""
    assert main([COMMAND, "--quick", "--rounds", "1", "--only", "enqueue_batched"]) == 0
    shown = capsys.readouterr().out
    assert "enqueue_batched.rate_server_us" in shown
    assert "new / old" in shown


def test_the_other_build_has_its_own_client(capsys: pytest.CaptureFixture[str]) -> None:
    """The other interpreter is this one."""
    assert main([COMMAND, "--client", sys.executable, "--quick", "--rounds", "1",
                 "--only", "sequential_client"]) == 0  # fmt: skip
    shown = capsys.readouterr().out
    for metric in ("sequential_client.enqueue_p50_ms", "sequential_client.ack"):
        assert metric in shown


@pytest.mark.slow  # the same on SQLite is quick
def test_builds_are_compared_on_redis(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--store", "redis", "--only", "steady"]
    assert main([COMMAND, "--quick", "--rounds", "1", *only]) == 0
    assert "steady.batches_at_2000" in capsys.readouterr().out


def test_an_unknown_case_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([COMMAND, "--only", "none"]) == 2
    assert "not one of enqueue_frame" in capsys.readouterr().err


@pytest.mark.parametrize("store", ["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def test_the_parts_of_a_batch_are_measured(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert batch_floor.main(["--store", store, "--count", "30", "--rounds", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["part", "p50", "processor"]
    assert [line[:46].rstrip() for line in lines] == list(batch_floor.PARTS[store])
    for line in lines:
        assert float(line.split()[-4]) > 0, line
