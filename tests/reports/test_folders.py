"""The history of several nodes, each in a folder of its own: one table, each event once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reports.conftest import CHOSEN
from support.story import Event, story, write
from tickwheel.reports import ReportError, ReportSettings, state
from tickwheel.reports.files import Files
from tickwheel.reports.state import Loaded, LocalFiles, Manifest, left_out, listed, new_segments

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.reports.job import Report
    from tickwheel.reports.table import Outcome, Table

NAME = "dt=2026-11-20/hour=10/a-s3-e5-000001.jsonl"


def moved() -> list[list[Event]]:
    """The story in three epochs of a shard: on host-a, on host-b, and on host-a again."""
    events = story().events
    parts = ("host-a", 1, events[:9]), ("host-b", 2, events[9:20]), ("host-a", 3, events[20:])
    return [
        [{**event, "node": node, "epoch": epoch, "seq": seq} for seq, event in enumerate(part, 1)]
        for node, epoch, part in parts
    ]


def put(folder: Path, name: str, size: int) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return str(path)


def settings_of(*folders: Path, **options: Any) -> ReportSettings:
    return ReportSettings(tuple(map(str, folders)), str(folders[0] / "out"), **options)


# --- what is loaded, without Spark ---------------------------------------------------------------


def test_the_most_complete_copy_of_a_segment_is_used(tmp_path: Path) -> None:
    """A sealed one before an open one, the longest of these, the first of equal ones."""
    a, b, c = (tmp_path / name for name in "abc")
    put(a, NAME, 900)
    short, first = put(b, f"{NAME}.gz", 40), put(c, f"{NAME}.gz", 50)
    (found,) = listed(LocalFiles(), settings_of(a, b, c))
    assert (found.path, found.bytes, found.sealed, found.copies) == (first, 50, True, (short,))
    again = put(a, f"{NAME}.gz", 50)
    (found,) = listed(LocalFiles(), settings_of(a, b, c, open_segments=False))
    assert (found.path, found.copies) == (again, (first, short))
    assert [s.path for s in listed(LocalFiles(), settings_of(b, Path(f"{b}/"), b))] == [short]


def test_segments_are_in_the_order_of_writing(tmp_path: Path) -> None:
    """Whichever node had it: a batch holds what comes before the next one."""
    written = [
        ("hour=10", "b-s3-e9-000007"), ("hour=10", "a-s3-e10-000008"),
        ("hour=10", "b-s3-e11-000008"), ("hour=11", "a-s3-e12-000009"),
    ]  # fmt: skip
    names = [f"dt=2026-11-20/{hour}/{name}.jsonl" for hour, name in written]
    for name, (_, file) in zip(names, written, strict=True):
        put(tmp_path / file[0], name, 1)
    result = listed(LocalFiles(), settings_of(tmp_path / "a", tmp_path / "b"))
    assert [segment.name for segment in result] == names


@pytest.mark.parametrize(
    ("size", "sealed", "is_new"),
    [(100, False, False), (99, False, False), (101, False, True), (9, True, True)],
)
def test_an_older_copy_of_a_loaded_segment_is_ignored(
    tmp_path: Path, size: int, sealed: bool, is_new: bool
) -> None:
    """Left over in a folder that was copied earlier, when the folder that it is of is left out."""
    put(tmp_path, NAME + ".gz" * sealed, size)
    held = Manifest(segments={NAME: Loaded(100, False, 1, 1)})
    segments = listed(LocalFiles(), settings_of(tmp_path))
    assert bool(new_segments(segments, held)) is is_new
    # The sealed one had it all.
    held = Manifest(segments={NAME: Loaded(9, True, 1, 1)})
    assert not new_segments(segments, held)


def test_histories_of_two_stores_are_not_mixed(tmp_path: Path) -> None:
    """Their numbers are the same: events of one would be taken for duplicates of the other."""
    a, b = tmp_path / "a", tmp_path / "b"
    other = NAME.replace("/a-s3", "/b-s3")
    put(a, NAME, 9)
    put(a, NAME.replace("e5", "e6"), 9)
    put(b, other, 9)
    put(b, other.replace("e5", "e7"), 9)
    text = "b-s3-e5-000001.jsonl belong to different stores, because both have epoch 5 of shard 3"
    with pytest.raises(ReportError, match=text):
        new_segments(listed(LocalFiles(), settings_of(a, b)), Manifest())
    held = Manifest(segments={NAME: Loaded(9, False, 1, 1)})
    with pytest.raises(ReportError, match=text):
        new_segments(listed(LocalFiles(), settings_of(b)), held)
    (b / other).unlink()
    assert len(new_segments(listed(LocalFiles(), settings_of(a, b)), held)) == 2


def test_folder_errors_name_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="history must have at least 1 folder"):
        ReportSettings((), "out")
    with pytest.raises(ReportError, match=r"^b\*: Spark reads"):
        ReportSettings(("a", "b*"), "out")
    gone, empty = tmp_path / "gone", tmp_path / "empty"
    (empty / "dt=2026-11-20").mkdir(parents=True)
    with pytest.raises(ReportError, match=rf"^{gone}: the folder does not exist"):
        listed(LocalFiles(), settings_of(gone))
    for more in ({}, {"open_segments": False}):
        with pytest.raises(ReportError, match=rf"^{empty}: the folder has no history.*mounted"):
            listed(LocalFiles(), settings_of(empty, **more))
        # Retention may have removed what the last report read.
        assert listed(LocalFiles(), settings_of(empty, **more), (str(empty),)) == []


# --- the whole report ----------------------------------------------------------------------------


@pytest.fixture
def load(spark: SparkSession) -> Callable[[ReportSettings], tuple[Outcome, Table]]:
    from tickwheel.reports.table import Loader

    def run(settings: ReportSettings) -> tuple[Outcome, Table]:
        loader = Loader(spark, settings, lambda stage, done, of: None)
        with loader.lock() as lock:
            return loader.load(lock), loader.table

    return run


@pytest.mark.slow  # folders that are read together: below
def test_a_report_of_two_nodes_equals_one_history(
    load: Callable[[ReportSettings], tuple[Outcome, Table]], whole_story: Report,
    spark: SparkSession, tmp_path: Path
) -> None:  # fmt: skip
    """With an archive of the first node's folder, which was copied too early; then what is new in
    both folders; folders left out; all copied into one."""
    from tickwheel.reports.job import run

    first, second, third = moved()
    a, b, archive = (tmp_path / name for name in ("a", "b", "archive"))
    write(a, first)
    write(b, second[:-3], sealed=False, tail='{"v":1,"ti')
    shutil.copytree(a, archive)
    for path in archive.rglob("*.gz"):
        path.write_bytes(path.read_bytes()[:-20])  # the copy was cut off
    folders = (str(archive), str(b), str(a))
    settings = ReportSettings(folders, str(tmp_path / "out"), **CHOSEN)
    found, table = load(settings)
    assert (found.rows, found.duplicates, found.left_out) == (17, 0, [])
    assert [row.reason for row in table.quarantine(found.manifest).collect()] == ["torn"]
    for path in b.rglob("*.jsonl"):
        path.unlink()
    write(b, second)
    write(a, third, number=2)
    report = run(spark, settings)
    assert report.loaded.rows == 3 + len(third)
    assert report.rows["quarantine"] == []
    for name in ("by_topic", "by_hour", "backlog", "stuck", "attempts", "reasons", "peaks", "slo"):
        assert report.rows[name] == whole_story.rows[name], name
    assert state.unchanged_summary(settings) is not None
    # What is left out is said, also when nothing else has changed.
    answer = state.unchanged_summary(replace(settings, history=(str(a),)))
    assert answer is not None and answer.left_out == [str(archive), str(b)]
    together = tmp_path / "together"
    for folder in (b, a):
        shutil.copytree(folder, together, dirs_exist_ok=True)
    for files in (LocalFiles(), Files(spark)):
        there = replace(settings, history=(str(together),))
        assert new_segments(listed(files, there), report.loaded.manifest) == []
    assert left_out(report.loaded.manifest, settings) == []


def test_a_damaged_copy_is_replaced_by_another_folders(
    load: Callable[[ReportSettings], tuple[Outcome, Table]], history: Path, tmp_path: Path
) -> None:
    """And it is not read again, as long as it lies there."""
    (path,) = write(history, story().events[1:9])
    shutil.copytree(history, tmp_path / "other")
    whole = path.read_bytes()
    path.write_bytes(whole[:10] + b"\xff" * (len(whole) - 10))
    settings = ReportSettings((str(history), str(tmp_path / "other")), str(tmp_path / "out"))
    found, _ = load(settings)
    assert (found.rows, found.manifest.quarantine) == (8, ())
    assert load(replace(settings, history=(str(history),)))[0].segments == 0
