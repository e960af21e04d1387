"""Synthetic history: marked, repeatable, whole, and like what a daemon writes."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.story import ms
from tickwheel.cli.app import app
from tickwheel.demo.synthetic_history import Plan, generate

START_MS = ms("2026-11-17T00:00:00")


def events(folder: Path) -> list[dict[str, Any]]:
    """All lines, segment by segment."""
    return [
        json.loads(line)
        for path in sorted(folder.glob("dt=*/hour=*/*.jsonl.gz"))
        for line in gzip.decompress(path.read_bytes()).splitlines()
    ]


def test_a_synthetic_history_is_complete_and_in_order(tmp_path: Path) -> None:
    made = generate(Plan(tasks=6_000, days=4, seed=3, start_ms=START_MS), tmp_path)
    result = events(tmp_path)
    assert len(result) == made.lines
    assert Counter(event["event"] for event in result) == made.events
    assert made.events["enqueued"] == 6_000
    assert {"cancelled", "rescheduled", "nacked", "dead", "requeued"} <= set(made.events)
    assert all(event["synthetic"] is True and event["v"] == 1 for event in result)
    last: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for event in result:
        before_ms, before = last[event["epoch"]]
        assert event["seq"] == before + 1
        assert before_ms <= event["time_ms"] < START_MS + 4 * 86_400_000
        last[event["epoch"]] = (event["time_ms"], event["seq"])
    assert sorted(last) == [1, 2]


def test_every_synthetic_task_follows_the_state_machine(tmp_path: Path) -> None:
    """Never early, attempts one by one, nothing after the end."""
    generate(Plan(tasks=4_000, days=2, seed=4, start_ms=START_MS), tmp_path)
    enqueued: dict[str, int] = {}
    ways: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events(tmp_path):
        if event["event"] in {"enqueued", "rescheduled"}:
            enqueued[event["task_id"]] = event["due_ms"]
        elif "group" in event:
            ways[event["task_id"], event["group"]].append(event)
    for (task, _), way in ways.items():
        assert task in enqueued
        deliveries = [event for event in way if event["event"] == "delivered"]
        attempts = [event["attempt"] for event in deliveries]
        assert attempts == sorted(attempts)
        assert all(event["time_ms"] >= event["due_ms"] for event in deliveries)
        ends = [n for n, event in enumerate(way) if event["event"] in {"acked", "expired"}]
        assert ends in ([], [len(way) - 1])


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    plans = [Plan(500, 1, seed, START_MS, segment_bytes=20_000) for seed in (7, 7, 8)]
    made = []
    for number, plan in enumerate(plans):
        generate(plan, tmp_path / str(number))
        files = sorted((tmp_path / str(number)).rglob("*.gz"))
        made.append({path.name: path.read_bytes() for path in files})
    assert made[0] == made[1] != made[2]
    assert len(made[0]) >= 24
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name]


def test_the_command_refuses_a_folder_with_something_in_it(tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(
            app, ["history", "generate", "--out", str(tmp_path / "h"), *arguments],
            standalone_mode=False,
        )  # fmt: skip

    done = run("--tasks", "50", "--days", "1", "--start", "2026-11-20", "--json")
    summary = json.loads(done.stdout)
    assert summary["synthetic"] is True
    assert summary["by_event"]["enqueued"] == 50
    assert list((tmp_path / "h").glob("dt=2026-11-20/*"))
    again = run("--tasks", "50")
    assert again.return_value == 1
    assert "must be empty" in again.stderr
    with pytest.raises(ValueError, match="at least 1"):
        Plan(0, 1, 1, START_MS)
