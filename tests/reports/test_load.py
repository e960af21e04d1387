"""The table: each event once, whatever segments arrive in whatever order and state."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F

from support.story import MAIL, Book, story, write
from tickwheel.reports import ReportError, schema
from tickwheel.reports import table as table_module
from tickwheel.reports.files import Files
from tickwheel.reports.state import Manifest, newest_manifest
from tickwheel.reports.table import Lock, Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tickwheel.reports.table import Outcome

Load = Callable[..., "Outcome"]


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path) -> Table:
    return Table(spark, Files(spark), str(tmp_path / "out/table"))


def seqs(table: Table, manifest: Manifest) -> list[tuple[int, int, int]]:
    rows = table.events(manifest).select("shard", "epoch", "seq").collect()
    return sorted((row.shard, row.epoch, row.seq) for row in rows)


def facts(table: Table, manifest: Manifest) -> dict[tuple[Any, ...], int]:
    """All facts added up, to compare with."""
    keys = ("quarter_ms", "topic", "group", "event", "attempt", "value_ms")
    rows = table.rollup("facts", manifest).groupBy(*keys).agg(F.sum("n").alias("n")).collect()
    return {tuple(row[k] for k in keys): row.n for row in rows}


def whole(count: int) -> list[tuple[int, int, int]]:
    return [(0, 1, n) for n in range(1, count + 1)]


def test_each_event_is_in_the_table_once(load: Load, history: Path, table: Table) -> None:
    """Twice in one segment, sealed and open at once, again in another, and a run repeated."""
    book = story()
    events = book.events
    write(history, [*events[:10], *events[5:]])
    write(history, events, sealed=False)  # the open ones of the same segments: passed over
    write(history, events[3:20], number=2)
    first = load()
    assert seqs(table, first.manifest) == whole(len(events))
    assert (first.rows, first.duplicates) == (len(events), 5 + 17)
    before = facts(table, first.manifest)
    again = load()
    assert (again.batches, again.rows) == (0, 0)
    assert again.manifest == first.manifest
    # A later run with nothing but duplicates adds none, even from the folder of another day.
    write(history, events[:12], number=3)
    odd = history / "dt=2026-11-27/hour=00"
    odd.mkdir(parents=True)
    text = "".join(json.dumps(event) + "\n" for event in events[:5])
    (odd / "n1-s0-e1-000005.jsonl").write_text(text)
    third = load()
    assert (third.rows, third.duplicates) == (0, 17)
    assert list(third.manifest.events) == ["2026-11-20"]
    assert facts(table, third.manifest) == before
    assert seqs(table, third.manifest) == whole(len(events))


def test_an_open_segment_is_read_again_as_it_grows_until_it_is_sealed(
    load: Load, history: Path, table: Table
) -> None:
    events = story().events[:12]  # all in one hour
    torn = '{"v":1,"time_ms":17951'
    (path,) = write(history, events[1:6], sealed=False, tail=torn)
    first = load()
    assert first.rows == 5
    assert reasons(table, first.manifest) == {"torn": 1}
    write(history, events[1:9], sealed=False, tail=json.dumps(events[9]))
    second = load()
    # The last line has no line feed, but it is whole: taken, and taken once.
    assert (second.rows, second.duplicates) == (4, 5)
    assert reasons(table, second.manifest) == {}
    path.unlink()
    write(history, events[1:])
    third = load()
    assert seqs(table, third.manifest) == whole(12)[1:]
    assert third.manifest.segments.keys() == second.manifest.segments.keys()
    assert load(open_segments=False).batches == 0


def reasons(table: Table, manifest: Manifest) -> dict[str, int]:
    rows = table.quarantine(manifest).groupBy("reason").count().collect()
    return {row.reason: row["count"] for row in rows}


TOPICS = ("a/b", "a:b", "a_b", "a-2fb", "2024", "1e5", "..", "_", "x" * 255, "x" * 254 + "/",
          "__HIVE_DEFAULT_PARTITION__", "A", "a", MAIL)  # fmt: skip
"""They fit no path as they are, or are alike as names of files."""


def test_valid_lines_are_loaded_and_others_counted_by_kind(
    load: Load, history: Path, table: Table
) -> None:
    """Lines of other versions and bad ones, a segment that cannot be unpacked (until it can), and
    topics that come back as they are."""
    book = story()
    one = book.events[1]
    lines = {
        "torn": ['{"v":1,"time_ms":17', json.dumps(one)[:-1] + "}" + json.dumps(one)],
        "not_json": ["garbage", "[]", "5", '"text"', "\x00\x00\x00"],
        "wrong_type": [
            json.dumps(one | {"time_ms": "soon"}), json.dumps(one | {"task_id": "x7"}),
            *(json.dumps(one | {"task_id": text}) for text in ("-7", "+7", " 7", "07", "9" * 19)),
            json.dumps(one | {"topic": "no good"}), json.dumps(one | {"time_ms": 10**17}),
            json.dumps(one | {"seq": 1.5}), json.dumps(one | {"due_ms": -(2**63)}),
            json.dumps(one | {"v": 0}),
        ],
        "missing": [
            json.dumps({k: v for k, v in (one | event).items() if k != name})
            for event in ({}, {"event": "replaced"})
            for name in ("v", "time_ms", "event", "task_id", "topic", "shard", "epoch", "seq",
                         "due_ms")
        ],
        "unknown": [json.dumps(one | {"event": "teleported"})],
        "newer": [json.dumps(one | {"v": 2}), json.dumps({"v": 3, "time": {"at": 1}})],
    }  # fmt: skip
    write(history, book.events, tail="\n".join(line for group in lines.values() for line in group))
    (history / "dt=2026-11-20/hour=10/.tmp-n1-s0-e1-000009.jsonl.gz").write_bytes(b"half")
    (history / "_state").mkdir()
    # Fields of this version that are no figures, one that a later daemon adds, and a topic's own.
    more = {"settings": {"rate": 5, "retry": {"kind": "none"}}, "since_ms": 5, "added": {"x": [1]}}
    rate = {"v": 1, "time_ms": one["time_ms"], "event": "group_configured", "topic": "t"}
    place = {"node": "n1", "shard": 0, "epoch": 2}
    write(history, [{**rate, **more, **place, "seq": 1},
                    {**rate, **more, **place, "seq": 2, "event": "group_created", "group": "g"},
                    {**one, **more, **place, "seq": 3, "body": "eA==", "props": {"a": "}{"}},
                    ], number=2)  # fmt: skip
    odd = Book(shard=1)
    for number, topic in enumerate(TOPICS, 1):
        odd.task(number, topic, "10:00:00", "10:00:01")
    write(history, odd.events, number=3)
    torn, *_ = write(history, [{**event, "shard": 2} for event in book.events], number=4)
    packed = torn.read_bytes()
    torn.write_bytes(packed[: len(packed) // 2])
    answer = load()
    counted = {name: len(group) for name, group in lines.items()}
    assert reasons(table, answer.manifest) == {**counted, "damaged": 1}
    good = [*whole(len(book.events)), (0, 2, 1), (0, 2, 2), (0, 2, 3)]
    there = seqs(table, answer.manifest)
    assert [item for item in there if item[0] == 0] == good
    assert len([item for item in there if item[0] == 1]) == len(odd.events)
    assert 0 < len([item for item in there if item[0] == 2]) < len(book.events)
    kept = table.quarantine(answer.manifest).filter("reason = 'unknown'").collect()
    assert kept[0].line == lines["unknown"][0]
    rows = (
        table.events(answer.manifest).filter("shard = 1").select("topic", "topic_part").distinct()
    )
    parts = {row.topic: row.topic_part for row in rows.collect()}
    assert parts.keys() == set(TOPICS) and len(set(parts.values())) == len(TOPICS)
    assert all(len(part) < 200 for part in parts.values())
    places = {path.name for path in (Path(table.root) / "events/run=1/date=2026-11-20").iterdir()}
    assert places >= {f"topic_part={part}" for part in parts.values()}
    torn.write_bytes(packed)
    again = seqs(table, load().manifest)
    assert [item for item in again if item[0] != 2] == [item for item in there if item[0] != 2]
    mended = [number for shard, _, number in again if shard == 2]
    assert mended == list(range(1, len(book.events) + 1))


def test_both_parsers_take_the_same_lines(spark: SparkSession) -> None:
    """The quick one for the table, the exact one for the quarantine: else a line is in neither."""
    whole = json.dumps(story().events[1] | {"reason": "ä💥\u2028"}, ensure_ascii=False)
    texts = [
        whole, f" {whole} ", f"\t{whole}", f"\ufeff{whole}", whole + whole, f"{whole} {{}}",
        f"[{whole}]", f"{whole},", whole[:-1], whole[1:], "", "  ", "\t", "[]", "{}", "~", '"~"',
        *(whole.replace('"v": 1', f'"v": {v}') for v in ("2", "null", '"1"', "1.0", "01", 9**30)),
        *(f"{whole[:-1]}, {more}}}" for more in ('"key": {"a": 1}', '"due_ms": 1e3', '"seq": [1]')),
    ]  # fmt: skip
    lines = spark.createDataFrame([(text,) for text in texts], "value STRING")
    exact, quick = (how(lines) for how in (schema.parse, schema.parse_quickly))
    assert sorted(map(repr, schema.good_rows(quick).collect())) == sorted(
        map(repr, schema.good_rows(exact).collect())
    )
    assert (
        quick.filter("verdict is not null").count()
        == schema.bad_rows(exact.withColumn("segment", F.lit("")), 1).count()
    )


@pytest.mark.slow
def test_late_segments_and_many_runs_give_the_same_table(
    load: Load, history: Path, table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, in batches of any size, before and after runs are made into fewer."""
    events = story().events
    write(history, events[15:], number=2)
    late = load()
    write(history, events[:15], number=1)
    write(history, [events[16]], number=3)
    answer = load(batch_bytes=500)
    assert answer.batches > 1
    assert (answer.rows, answer.duplicates) == (15, 1)
    assert seqs(table, answer.manifest) == whole(len(events))
    assert late.manifest.last_ms == answer.manifest.last_ms
    split = everything(table, answer.manifest)
    for name in ("ROLLUP_RUNS_MAX", "EVENT_RUNS_MAX", "JOURNEY_RUNS_MAX"):
        monkeypatch.setattr(table_module, name, 2)
    fewer = load()
    assert len(fewer.manifest.rollups) == len(fewer.manifest.journeys) == 1
    assert [len(runs) for runs in fewer.manifest.events.values()] == [1]
    assert everything(table, fewer.manifest) == split
    left = {path.name for path in (Path(table.root) / "events").iterdir()}
    assert left == {f"run={fewer.manifest.events['2026-11-20'][0]}"}
    shutil.rmtree(tmp_path / "out")
    assert everything(table, load().manifest) == split


def everything(table: Table, manifest: Manifest) -> dict[str, list[Any]]:
    """All parts of the table in a form that does not depend on how they came about."""
    from tickwheel.reports import rollups

    parts = {"facts": facts(table, manifest)}
    result: dict[str, list[Any]] = {"facts": sorted(map(repr, parts["facts"].items()))}
    for name in sorted(set(schema.ROLLUPS) - {"facts"}):
        frame = rollups.merged(name, table.rollup(name, manifest))
        columns = sorted(set(frame.columns) - {"run"})
        result[name] = sorted(map(repr, frame.select(*columns).collect()))
    for name, frame in (
        ("open", table.open_journeys(manifest)),
        ("closed", table.closed_journeys(manifest.journeys)),
    ):
        result[name] = sorted(map(repr, frame.collect()))
    return result


def test_leftovers_of_a_killed_run_are_removed(
    load: Load, history: Path, table: Table, spark: SparkSession
) -> None:
    """Its files, its torn manifest, its lock; the real kill is in test_processes.py."""
    events = story().events
    write(history, events[:20])
    manifest = load().manifest
    root = Path(table.root)
    shutil.copytree(root / "events/run=1", root / "events/run=2")
    shutil.copytree(root / "facts/run=1", root / "facts/run=2")
    (root / "_manifests/00000002.json").write_text(
        (root / "_manifests/00000001.json").read_text()[:50]
    )
    (root / "_lock").write_text(json.dumps({"host": "elsewhere", "pid": 1})[:9])
    assert newest_manifest(Files(spark), table.root) == manifest
    assert seqs(table, manifest) == whole(20)
    write(history, events[20:], number=2)
    (root / "_manifests/.tmp-1-00000002.json").write_text("{")
    assert seqs(table, load().manifest) == whole(len(events))
    assert {path.name for path in (root / "facts").iterdir()} == {"run=1", "run=2"}
    names = {path.name for path in (root / "_manifests").iterdir()}
    assert names == {"00000001.json", "00000002.json"}


def test_concurrent_reports_are_refused(
    load: Load, history: Path, table: Table, tmp_path: Path
) -> None:
    (tmp_path / "out/table").mkdir(parents=True)
    lock = tmp_path / "out/table/_lock"
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    with pytest.raises(ReportError, match="another report uses this table"):
        load()
    lock.unlink()
    with pytest.raises(ReportError, match="the folder has no history"):
        load()
    assert not lock.exists()


def test_a_table_of_a_newer_version_is_left_alone(
    load: Load, history: Path, tmp_path: Path
) -> None:
    place = tmp_path / "out/table/_manifests"
    place.mkdir(parents=True)
    (place / "00000001.json").write_text('{"format": 2, "end": true}')
    with pytest.raises(ReportError, match="format 2"):
        load()


def test_a_missing_history_is_named(load: Load, history: Path) -> None:
    history.rmdir()
    with pytest.raises(ReportError, match="history_dir"):
        load()


def test_only_one_of_many_creates_a_file(spark: SparkSession, tmp_path: Path) -> None:
    """A lock and a commit rest on this."""
    files, at_once = Files(spark), 6
    for number in range(20):
        path = tmp_path / f"{number}.json"
        together = threading.Barrier(at_once)

        def make(text: str, path: Path = path, together: threading.Barrier = together) -> bool:
            together.wait()
            return files.create(str(path), text)

        with ThreadPoolExecutor(at_once) as pool:
            made = list(pool.map(make, map(str, range(at_once))))
        assert made.count(True) == 1
        assert path.read_text() == str(made.index(True))
    assert len(list(tmp_path.iterdir())) == 20


def test_a_lock_that_was_taken_over_is_not_taken_back(spark: SparkSession, tmp_path: Path) -> None:
    files, path = Files(spark), tmp_path / "_lock"
    with pytest.raises(ReportError, match="elsewhere"), Lock(files, str(path)) as lock:
        lock.refresh()
        path.write_text(json.dumps({"host": "elsewhere", "pid": 1}))
        lock.refresh()
    assert "elsewhere" in path.read_text()


@pytest.mark.slow
def test_a_segment_removed_during_loading_is_not_damaged(
    load: Load, history: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed under another name, or removed by retention, between the listing and the reading."""
    events = story().events
    paths = write(history, events)
    listed = table_module.listed

    def then_gone(*arguments: Any) -> list[Any]:
        result = listed(*arguments)
        paths[0].rename(paths[0].with_name("n1-s0-e1-000009.jsonl.gz"))
        return result

    with monkeypatch.context() as patched:
        patched.setattr(table_module, "listed", then_gone)
        first = load()
    assert reasons(table, first.manifest) == {}
    assert 0 < first.rows < len(events)
    assert len(first.manifest.segments) == len(paths) - 1
    assert seqs(table, load().manifest) == whole(len(events))


@pytest.mark.slow
def test_lines_of_a_newer_version_are_loaded_after_an_update(
    load: Load, history: Path, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By themselves, after an update of the program; a segment that is gone stays counted."""
    events = story().events
    newer = [{**event, "v": 2} for event in events[5:]]
    paths = write(history, [*events[:5], *newer])
    write(history, [{**newer[0], "seq": 500}], number=2)
    old = load()
    assert old.rows == 5
    assert reasons(table, old.manifest) == {"newer": len(newer) + 1}
    assert load().segments == 0
    monkeypatch.setattr(schema, "VERSION", 2)
    (gone,) = history.glob("dt=*/hour=*/*000002*")
    gone.unlink()
    answer = load()
    assert 0 < answer.segments <= len(paths)
    assert seqs(table, answer.manifest) == whole(len(events))
    assert reasons(table, answer.manifest) == {"newer": 1}
    assert load().segments == 0
