"""The histories of killed daemons, as ``tests/upgrade`` stores them, loaded into one table.

Each as that of a shard of its own, because all of them are the first one's: a run of Spark for each
costs more than all else here.
"""

from __future__ import annotations

import gzip
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tickwheel.reports import ReportSettings
from upgrade.sample import found_samples

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SAMPLES = found_samples()


@dataclass
class Loaded:
    lines: list[int]
    """Of each sample."""
    rows: Counter[int]
    segments: tuple[int, int]
    """How many there are, and were loaded."""
    bad: int


@pytest.fixture(scope="module")
def loaded(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    from tickwheel.reports.files import Files
    from tickwheel.reports.table import Loader, Table

    folder = tmp_path_factory.mktemp("samples")
    lines = [copied(n, sample / "history", folder / "history") for n, sample in enumerate(SAMPLES)]
    settings = ReportSettings((str(folder / "history"),), str(folder / "out"))
    loader = Loader(spark, settings, lambda stage, done, of: None)
    with loader.lock() as lock:
        answer = loader.load(lock)
    table = Table(spark, Files(spark), settings.table)
    rows = table.events(answer.manifest).groupBy("shard").count().collect()
    return Loaded(
        lines,
        Counter({row["shard"]: row["count"] for row in rows}),
        (len([*(folder / "history").rglob("*.jsonl*")]), answer.segments),
        table.quarantine(answer.manifest).count(),
    )


def copied(shard: int, sample: Path, history: Path) -> int:
    """How many lines, whose shard is said to be this one; nothing else in them is touched."""
    count = 0
    for path in sample.glob("dt=*/hour=*/*.jsonl*"):
        packed = path.suffix == ".gz"
        held = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
        lines = held.count(b"\n")
        moved, said = re.subn(
            rb'"shard":0,("epoch":\d+,"seq":\d+\}\n)', rb'"shard":%d,\1' % shard, held
        )
        assert said == lines > 0
        place = history / path.relative_to(sample).with_name(
            path.name.replace("-s0-", f"-s{shard}-")
        )
        place.parent.mkdir(parents=True, exist_ok=True)
        assert not place.exists()
        place.write_bytes(gzip.compress(moved) if packed else moved)
        count += lines
    return count


@pytest.mark.slow  # the history of each sample is restored by upgrade/test_upgrade.py
def test_every_sample_segment_is_loaded(loaded: Loaded) -> None:
    there, read = loaded.segments
    assert read == there >= 2 * len(SAMPLES)
    assert loaded.bad == 0


@pytest.mark.parametrize(
    "number", range(len(SAMPLES)), ids=["-".join(path.parts[-2:]) for path in SAMPLES]
)
def test_every_line_of_a_sample_is_a_row(loaded: Loaded, number: int) -> None:
    assert loaded.rows[number] == loaded.lines[number] > 0
