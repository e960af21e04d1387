"""The benchmark of OpenTelemetry still runs; its figures are not judged here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_of_tracing_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.tracing", "--tasks", "100", "--rounds", "1"]
    command += ["--before", str(ROOT), "--dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("before", "client off", "client all", "daemon 0.01, tasks with trace"):
        assert words in done.stdout
