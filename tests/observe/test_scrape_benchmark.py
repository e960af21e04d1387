"""The benchmark of scrapes still runs; its figures are not judged here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from observe.prometheus import ROOT, clean_environment


@pytest.mark.slow
def test_the_benchmark_of_scrapes_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.metrics_scrape", "--topics", "20"]
    command += ["--rate", "200", "--seconds", "2", "--dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("20 topics, 200 deliveries a second", "scrape (", "late with scraping"):
        assert words in done.stdout
