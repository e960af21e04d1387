"""The history of an older daemon, as ``tests/upgrade`` stores it, loaded into the table."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tickwheel.reports.files import Files
from tickwheel.reports.table import Table
from upgrade.sample import found_samples

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.reports.load import Outcome


@pytest.mark.parametrize("sample", found_samples(), ids=lambda path: "-".join(path.parts[-2:]))
def test_every_line_of_an_older_daemon_is_a_row(
    sample: Path, load: Callable[..., Outcome], spark: SparkSession, history: Path, tmp_path: Path
) -> None:
    shutil.copytree(sample / "history", history, dirs_exist_ok=True)
    sealed = [gzip.decompress(path.read_bytes()) for path in history.rglob("*.jsonl.gz")]
    segments = sealed + [path.read_bytes() for path in history.rglob("*.jsonl")]
    found = load()
    lines = sum(segment.count(b"\n") for segment in segments)
    assert (found.segments, found.rows) == (len(segments), lines)
    table = Table(spark, Files(spark), str(tmp_path / "out/table"))
    assert table.quarantine(found.manifest).count() == 0
