"""The fleet benchmark runs, small, and distinguishes starved subscribers from others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import fleet
from benchmarks.environment import NoDisk, choose_folder


def test_a_small_fleet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        choose_folder(None)
    except NoDisk as error:
        pytest.skip(str(error))
    size = ["--topics", "3", "--groups", "2", "--connections", "2", "--tasks", "300"]
    code = fleet.main([*size, "--per-group", "2", "--waves", "1"])
    out, err = capsys.readouterr()
    assert code == 0, err
    [run] = json.loads(out)
    assert (run["topics"], run["groups"], run["subscribers"]) == (3, 6, 12)
    assert run["deliveries_a_subscriber"]["fair"] == 50
    assert run["waves"][0]["without_any"] == 0
    assert run["memory"]["bytes_a_subscriber"] >= 0


def figures(**changed: Any) -> dict[str, Any]:
    waves = [{"early": 0, "refused": 0}]
    return {"starved": 0, "memory_grew": False, "subscribers": 5, "waves": waves} | changed


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (figures(), []),
        (figures(starved=2), ["2 of 5 subscribers are starved"]),
        (figures(memory_grew=True), ["memory grew in the second half of the waves"]),
        (figures(waves=[{"early": 1, "refused": 0}, {"early": 1, "refused": 3}]),
         ["2 early", "3 refused"]),
    ],
)  # fmt: skip
def test_failures_of_a_run_are_named(run: dict[str, Any], words: list[str]) -> None:
    assert fleet.failures(run) == words


def test_an_empty_list_has_no_spread() -> None:
    assert fleet.spread([]) == {}
    assert fleet.spread([1, 2, 30]) == {"min": 1, "median": 2, "max": 30}
