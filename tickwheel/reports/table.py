"""The table: its runs, its parts as DataFrames, and the loading of new history, in which each event
counts exactly once.

A run writes its Parquet files into folders with its number and, last, its manifest, a small JSON
file. The newest complete manifest is valid. Files that no manifest names come from a killed run:
readers do not see them, and the next run deletes them. So a commit is the creation of one file,
which every file system supports, and no repeated or killed run can count an event twice.

Layout below ``OUT/table/`` (``run=N``: added by run N)::

    _manifests/00000007.json                       the valid runs
    events/run=7/date=2026-11-20/topic_part=…/     a row for each event, without duplicates
    facts, reasons, parties, rates, slow, waits, origins, occurrences /run=7/
    journeys/run=7/closed=true|false/              a row for each task and group
    quarantine/run=7/                              lines that are not valid events

:mod:`~tickwheel.reports.state` finds new segments. A batch of segments becomes one run: parse the
lines, drop rows that are in the table, write the others with their rollups and journeys, and commit
the manifest. A run that is killed before the commit leaves only folders that the next run deletes.
``compact`` merges small runs into fewer files, with ordinary commits. docs/decisions/0009 explains
why this does not use Spark's streaming file source.

Only one report at a time can use a table. Manifests alone ensure that only one of two runs counts.
The lock saves the second run wasted work, and prevents it from deleting files that the first is
writing or reading. A killed run leaves its lock file, which is recognized as stale by the missing
process on the same machine, and by the file's age on others.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from pyspark.sql import DataFrame, Observation, SparkSession, Window
from pyspark.sql import functions as F

from tickwheel.reports import ReportError, ReportSettings, rollups, schema
from tickwheel.reports.files import SPARK_ERRORS, Files
from tickwheel.reports.state import (
    ASIDE,
    SEGMENT_SQL,
    Loaded,
    Manifest,
    Segment,
    batches,
    left_out,
    listed,
    manifest_folder,
    manifest_names,
    new_segments,
    newest_manifest,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


PARTS = ("events", "journeys", "quarantine", *schema.ROLLUPS)
MANIFESTS_KEPT = 3
"""Number of manifests that are kept, with their files, for readers of an older manifest."""
_EVENTS = f"{schema.ROW}, run INT, {schema.PARTITIONS}"


class Table:
    """The parts and manifests of one table. Each read is given the manifest from which it reads."""

    def __init__(self, spark: SparkSession, files: Files, root: str) -> None:
        self.root = root
        self._spark, self._files = spark, files

    def place(self, part: str, run: int) -> str:
        return f"{self.root}/{part}/run={run}"

    def events(self, manifest: Manifest, dates: Collection[str] | None = None) -> DataFrame:
        """Return the events of the table, or of these UTC dates."""
        paths = [
            f"{self.place('events', run)}/date={date}"
            for date, runs in sorted(manifest.events.items())
            if dates is None or date in dates
            for run in runs
        ]
        return self._read("events", _EVENTS, paths)

    def added(self, run: int) -> DataFrame:
        """Return the rows that one run added."""
        return self._read("events", _EVENTS, [self.place("events", run)])

    def rollup(self, name: str, manifest: Manifest) -> DataFrame:
        """Return a rollup of all runs. Rows of different runs must be added up, as figures do."""
        rows = self._runs(name, schema.ROLLUPS[name], manifest.rollups)
        return rollups.newest_rates(rows) if name == "rates" else rows

    def open_journeys(self, manifest: Manifest) -> DataFrame:
        """Return the journeys that have not ended."""
        runs = () if manifest.open is None else (manifest.open,)
        return self._journeys(runs, "not closed")

    def closed_journeys(self, runs: Iterable[int]) -> DataFrame:
        """Return the journeys that these runs have finished."""
        return self._journeys(runs, "closed")

    def quarantine(self, manifest: Manifest) -> DataFrame:
        """Return the invalid lines in the newest state of each segment. When a segment is read
        again, because it grew or was sealed, the new lines replace the earlier ones."""
        rows = self._runs("quarantine", schema.QUARANTINE, manifest.quarantine)
        newest = [(name, loaded.run) for name, loaded in manifest.segments.items()]
        current = self._spark.createDataFrame(newest, "segment STRING, newest INT")
        return rows.join(F.broadcast(current), "segment").filter("run = newest").drop("newest")

    def _journeys(self, runs: Iterable[int], which: str) -> DataFrame:
        journeys = self._runs("journeys", f"{schema.JOURNEY}, closed BOOLEAN", runs)
        return journeys.filter(which).drop("closed")

    def _runs(self, part: str, columns: str, runs: Iterable[int]) -> DataFrame:
        names = {field.split()[0] for field in columns.split(",")}
        shape = columns if "run" in names else f"{columns}, run INT"
        rows = self._read(part, shape, [self.place(part, run) for run in runs])
        return rows if "run" in names else rows.drop("run")

    def _read(self, part: str, columns: str, paths: list[str]) -> DataFrame:
        if not paths:
            return self._spark.createDataFrame([], columns)
        reader = self._spark.read.schema(columns).option("basePath", f"{self.root}/{part}")
        return reader.parquet(*paths)

    def write(self, rows: DataFrame, part: str, run: int, *folders: str) -> None:
        """Write the rows that ``run`` adds to a part, partitioned by ``folders``."""
        writer = rows.write.mode("overwrite")
        (writer.partitionBy(*folders) if folders else writer).parquet(self.place(part, run))

    def sweep(self, manifest: Manifest) -> None:
        """Delete files that ``manifest`` does not need: those of killed runs, and replaced ones."""
        needed: dict[str, Collection[int | None]] = {
            "events": {run for runs in manifest.events.values() for run in runs},
            "journeys": {*manifest.journeys, manifest.open},
            "quarantine": {*manifest.quarantine},
            **{name: {*manifest.rollups} for name in schema.ROLLUPS},
        }
        for part in PARTS:
            for name in self._files.names(f"{self.root}/{part}"):
                run = name.removeprefix("run=")
                if name != run and not (run.isdecimal() and int(run) in needed[part]):
                    self._files.delete(f"{self.root}/{part}/{name}")
        for name in self._files.names(f"{self.root}/events"):
            dates = self._files.names(f"{self.root}/events/{name}")
            for date in (d for d in dates if d.startswith("date=")):
                if int(name.removeprefix("run=")) not in manifest.events.get(date[5:], ()):
                    self._files.delete(f"{self.root}/events/{name}/{date}")

    # --- commits -----------------------------------------------------------------------------

    def sweep_manifests(self) -> None:
        """Delete torn manifests, so that their numbers can be used again. The caller must hold the
        lock."""
        folder, names = manifest_folder(self.root), manifest_names(self._files, self.root)
        for name in self._files.names(folder):
            text = self._files.read(f"{folder}/{name}")
            torn = text is None or (name in names and Manifest.from_text(text) is None)
            if torn or name.startswith(ASIDE):
                self._files.delete(f"{folder}/{name}")

    def commit(self, manifest: Manifest) -> Manifest:
        """Make ``manifest`` the newest manifest. Raise ReportError if another run was first."""
        folder, names = manifest_folder(self.root), manifest_names(self._files, self.root)
        path = f"{folder}/{manifest.run:08d}.json"
        newer = bool(names) and int(names[-1].partition(".")[0]) >= manifest.run
        if newer or not self._files.create(path, manifest.to_text()):
            raise ReportError(
                "another report has changed this table since this run began; this run was discarded"
            )
        for name in names[: -(MANIFESTS_KEPT - 1)]:
            self._files.delete(f"{folder}/{name}")
        return manifest


# --- loading -------------------------------------------------------------------------------------


SALT_BYTES = 32 << 20
"""Bytes of a batch per Spark task; several tasks write a unit (date and topic) of a large batch."""
BLOCK = 4_096
"""Number of events that are compared for duplicates together; they fit into Spark's buffer in
memory."""
CONCURRENT_JOBS = 3
"""Number of rollups, or figures, that are computed concurrently, because their jobs are short."""

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, of)``; stages are "loading" (bytes) and "figures"."""


@dataclass(frozen=True)
class Outcome:
    """The result of a load."""

    manifest: Manifest
    batches: int
    segments: int
    rows: int
    duplicates: int
    left_out: list[str]
    """See :func:`~tickwheel.reports.state.left_out`."""


class Loader:
    """One load of one table. It can be used only once."""

    def __init__(self, spark: SparkSession, settings: ReportSettings, progress: Progress) -> None:
        self._spark, self._settings, self._progress = spark, settings, progress
        self._files = Files(spark)
        self.table = Table(spark, self._files, settings.table)

    def lock(self) -> Lock:
        """Return the lock that every report holds to change the table and read its figures."""
        return Lock(self._files, f"{self._settings.table}/_lock")

    def load(self, lock: Lock) -> Outcome:
        """Load new history into the table. The caller must hold the lock."""
        self.table.sweep_manifests()
        before = manifest = newest_manifest(self._files, self.table.root)
        self.table.sweep(manifest)
        reloaded = self._not_understood(manifest)
        segments = new_segments(
            listed(self._files, self._settings, manifest.histories), manifest, reloaded
        )
        total = sum(segment.bytes for segment in segments)
        loaded_bytes = 0
        parts = list(batches(segments, self._settings.batch_bytes))
        self._progress("loading", 0, total)
        for batch in parts:
            manifest = self._load(batch, manifest)
            lock.refresh()
            loaded_bytes += sum(segment.bytes for segment in batch)
            self._progress("loading", loaded_bytes, total)
        manifest = compact(self.table, manifest)
        self.table.sweep(manifest)
        return Outcome(
            manifest,
            len(parts),
            len(segments),
            manifest.rows - before.rows,
            manifest.duplicates - before.duplicates,
            left_out(before, self._settings),
        )

    def _not_understood(self, manifest: Manifest) -> set[str]:
        """Return the segments with lines that were too new for an older release."""
        if not manifest.quarantine:
            return set()
        old_runs = {s.run for s in manifest.segments.values() if s.schema < schema.VERSION}
        if not old_runs:
            return set()
        lines = self.table.quarantine(manifest).filter(F.col("reason").isin(*schema.TOO_NEW))
        rows = lines.select("segment").distinct().collect()
        return {r.segment for r in rows if manifest.segments[r.segment].schema < schema.VERSION}

    def _load(self, batch: Sequence[Segment], manifest: Manifest) -> Manifest:
        """Load and commit one batch, without segments that cannot be decompressed."""
        damaged: list[Segment] = []
        try:
            return self._commit(batch, damaged, manifest)
        except SPARK_ERRORS:
            # Missing segments were sealed or removed after the listing. The next run handles them.
            present = [segment for segment in batch if self._files.exists(segment.path)]
            damaged = [segment for segment in present if not self._readable(segment.path)]
            if not damaged and len(present) == len(batch):
                raise
        if not present:
            return manifest
        readable = [segment for segment in present if segment not in damaged]
        mended = {segment.name: self._from_copy(segment) for segment in damaged}
        readable += [copy for copy in mended.values() if copy is not None]
        damaged = [segment for segment in damaged if mended[segment.name] is None]
        return self._commit(readable, damaged, manifest)

    def _from_copy(self, segment: Segment) -> Segment | None:
        """Return the segment with a readable copy from another folder, or None if there is none."""
        for path in segment.copies:
            if self._files.exists(path) and self._readable(path):
                return replace(segment, path=path)
        return None

    def _readable(self, path: str) -> bool:
        try:
            self._spark.read.text(path).write.format("noop").mode("overwrite").save()
        except SPARK_ERRORS:
            return False
        return True

    def _commit(
        self, batch: Sequence[Segment], damaged: Sequence[Segment], manifest: Manifest
    ) -> Manifest:
        run = manifest.run + 1
        counts, written = self._write_events(batch, manifest, run)
        if counts["bad"] or damaged:
            bad = schema.bad_rows(schema.parse(self._lines(batch, named=True)), run)
            lost = [(s.name, run, schema.DAMAGED, "", s.bytes) for s in damaged]
            broken = self._spark.createDataFrame(lost, schema.QUARANTINE)
            self.table.write(bad.unionByName(broken), "quarantine", run)
        self._write_parts(manifest, run, written)
        rows, lines = int(counts["rows"]), int(counts["lines"])
        loaded = {
            s.name: Loaded(s.bytes, s.sealed, run, schema.VERSION) for s in (*batch, *damaged)
        }
        changed = replace(
            manifest,
            run=run,
            segments={**manifest.segments, **loaded},
            histories=self._settings.folders,
            events={
                **manifest.events,
                **{day: (*manifest.events.get(day, ()), run) for day in written},
            },
            rollups=(*manifest.rollups, run),
            journeys=(*manifest.journeys, run),
            open=run,
            quarantine=(*manifest.quarantine, run)
            if counts["bad"] or damaged
            else manifest.quarantine,
            rows=manifest.rows + rows,
            lines=manifest.lines + lines,
            duplicates=manifest.duplicates + lines - int(counts["bad"]) - rows,
            first_ms=min(_without_none(manifest.first_ms, counts["first_ms"]), default=None),
            last_ms=max(_without_none(manifest.last_ms, counts["last_ms"]), default=None),
            synthetic=manifest.synthetic + int(counts["synthetic"]),
        )
        return self.table.commit(changed)

    # --- rows ------------------------------------------------------------------------------

    def _lines(self, batch: Sequence[Segment], named: bool = False) -> DataFrame:
        """Return the lines of ``batch``; ``named``: with the names of their segments."""
        if not batch:
            return self._spark.createDataFrame([], "value STRING, segment STRING")
        lines = self._spark.read.text([segment.path for segment in batch])
        path = F.col("_metadata.file_path")
        names = [F.regexp_extract(path, SEGMENT_SQL, 1).alias("segment")] if named else []
        return lines.select("value", *names)

    def _write_events(
        self, batch: Sequence[Segment], manifest: Manifest, run: int
    ) -> tuple[Mapping[str, Any], set[str]]:
        """Write the new rows of ``batch``. Return the counts and the written dates.

        Most batches have every event once. They are written as they come, and checked afterwards.
        Without a shuffle this and the quick parser take 0.6 of the processor time.
        """
        dates = {segment.date for segment in batch} & set(manifest.events)
        is_distinct = any(segment.name in manifest.segments for segment in batch)
        while True:
            seen = Observation(f"lines-{run}-{len(dates)}-{is_distinct}")
            parsed = schema.parse_quickly(self._lines(batch)).observe(
                seen, F.count(F.lit(1)).alias("lines"), F.count("verdict").alias("bad")
            )
            rows = schema.good_rows(parsed)
            if is_distinct:
                rows = self._distinct(rows, batch, manifest, dates)
            else:  # rollups read some kinds of events, and skip the pages without these
                rows = rows.sortWithinPartitions("date", "topic_part", "event")
            self.table.write(rows, "events", run, "date", "topic_part")
            names = self._files.names(self.table.place("events", run))
            written = {name.removeprefix("date=") for name in names if name.startswith("date=")}
            # Lines can be in the folder of another day than that of their times.
            unchecked = written & set(manifest.events) - (dates if is_distinct else set())
            counts = self._counts(run, manifest, unchecked)
            if not counts["repeated"] or (is_distinct and not unchecked):
                return {**seen.get, **counts}, written
            self._files.delete(self.table.place("events", run))
            dates, is_distinct = dates | unchecked, True

    def _counts(self, run: int, manifest: Manifest, dates: set[str]) -> Mapping[str, Any]:
        """Return the number and the times of the rows that ``run`` has written, and how often these
        repeat an event, their own or one of the table on these dates. Each bit of a word stands for
        an event, so few groups are shuffled."""
        c = F.col
        columns = ("shard", "epoch", "seq", "time_ms", "synthetic")
        rows = self.table.added(run).select(*columns)
        if dates:
            table_rows = self.table.events(manifest, dates).select("shard", "epoch", "seq")
            rows = rows.unionByName(table_rows, allowMissingColumns=True)
        words = rows.groupBy("shard", "epoch", F.shiftright("seq", 6)).agg(
            F.count(F.lit(1)).alias("events"),
            F.bit_or(F.expr("shiftleft(1L, cast(seq & 63 AS INT))")).alias("word"),
            F.count("time_ms").alias("rows"),
            F.count(F.when(c("synthetic"), 1)).alias("synthetic"),
            F.min("time_ms").alias("first_ms"),
            F.max("time_ms").alias("last_ms"),
        )
        (counts,) = words.agg(
            F.sum(c("events") - F.bit_count("word")).alias("repeated"),
            F.coalesce(F.sum("rows"), F.lit(0)).alias("rows"),
            F.coalesce(F.sum("synthetic"), F.lit(0)).alias("synthetic"),
            F.min("first_ms").alias("first_ms"),
            F.max("last_ms").alias("last_ms"),
        ).collect()
        return cast("Mapping[str, Any]", counts.asDict())

    def _distinct(
        self, rows: DataFrame, batch: Sequence[Segment], manifest: Manifest, dates: set[str]
    ) -> DataFrame:
        """Return the rows of ``batch`` once each, without those in the table."""
        if dates:
            table_rows = self.table.events(manifest, dates).select("shard", "epoch", "seq")
            rows = rows.join(table_rows, ["shard", "epoch", "seq"], "left_anti")
        size = sum(segment.bytes for segment in batch)
        return distinct(rows, min(16, 1 + size // SALT_BYTES))

    # --- rollups and journeys ---------------------------------------------------------------

    def _write_parts(self, manifest: Manifest, run: int, dates: set[str]) -> None:
        """Write rollups and journeys of the rows that ``run`` has added."""
        added = self.table.added(run)
        open_journeys = None if manifest.open is None else self.table.open_journeys(manifest)

        def write_journeys() -> None:
            self.table.write(rollups.advance(added, open_journeys), "journeys", run, "closed")
            closed = self.table.closed_journeys([run])
            for name, count in rollups.JOURNEY_ROLLUPS.items():
                self.table.write(count(closed), name, run)

        def write_rates() -> None:
            overlapping = self._overlapping(added, manifest, dates)
            self.table.write(rollups.rates(overlapping, run), "rates", run)

        def write_rollup(name: str) -> None:
            self.table.write(rollups.EVENT_ROLLUPS[name](added), name, run)

        work: list[Callable[[], None]] = [write_journeys, write_rates]
        work += [partial(write_rollup, name) for name in rollups.EVENT_ROLLUPS]
        with ThreadPoolExecutor(CONCURRENT_JOBS) as pool:
            for future in [pool.submit(job) for job in work]:
                future.result()

    def _overlapping(self, added: DataFrame, manifest: Manifest, dates: set[str]) -> DataFrame:
        """Return ``added`` with the table's earlier rows of the same quarters and topics."""
        existing_dates = dates & set(manifest.events)
        if not existing_dates:
            return added
        touched = added.select(
            rollups.quarter(F.col("time_ms")).alias("quarter_ms"), "date", "topic_part"
        ).distinct()
        table_rows = self.table.events(manifest, existing_dates).withColumn(
            "quarter_ms", rollups.quarter(F.col("time_ms"))
        )
        same_quarters = table_rows.join(
            F.broadcast(touched), ["quarter_ms", "date", "topic_part"], "left_semi"
        )
        return added.unionByName(same_quarters.drop("quarter_ms"))


def distinct(rows: DataFrame, salts: int) -> DataFrame:
    """Return one row for each (shard, epoch, seq) of a unit, sorted for writing. Partitioned
    writing needs the same shuffle and sort. A duplicate is the same event, so it has the same date,
    topic and block."""
    keyed = rows.withColumns(
        {
            "block": F.floor(F.col("seq") / BLOCK),
            "salt": F.pmod(F.hash("shard", "epoch", F.floor(F.col("seq") / (16 * BLOCK))), salts),
        }
    )
    number = int(str(rows.sparkSession.conf.get("spark.sql.shuffle.partitions")))
    unit = ("date", "topic_part", "salt")
    block = Window.partitionBy(*unit, "shard", "epoch", "block").orderBy("seq")
    return (
        keyed.repartition(number, *unit)
        .withColumn("before", F.lag("seq").over(block))
        .filter(F.col("before").isNull() | (F.col("before") != F.col("seq")))
        .drop("before", "block", "salt")
    )


def _without_none(*values: int | None) -> list[int]:
    return [value for value in values if value is not None]


_HELD: set[object] = set()
"""The locks of this process."""
STALE_S = 1_800.0
"""A lock is stale if it was last refreshed this many seconds ago. Every batch refreshes it."""


class Lock:
    """The lock of a table, held in a ``with`` block, which raises ReportError if another run holds
    it."""

    def __init__(self, files: Files, path: str) -> None:
        self._files, self._path = files, path
        self._content = {
            "host": socket.gethostname(), "pid": os.getpid(), "id": uuid.uuid4().hex[:12],
        }  # fmt: skip

    def __enter__(self) -> Self:
        text = self._files.read(self._path)
        if text is not None and not self._is_held(text):
            self._files.delete(self._path)
        if not self._files.create(self._path, json.dumps(self._content)):
            raise self._refusal()
        _HELD.add(self._content["id"])
        return self

    def __exit__(self, *_: object) -> None:
        _HELD.discard(self._content["id"])
        if self._is_ours():
            self._files.delete(self._path)

    def refresh(self) -> None:
        """Refresh the lock. Raise ReportError if another run has taken it over as stale."""
        if not self._is_ours():
            raise self._refusal()
        self._files.write(self._path, json.dumps(self._content))

    def _is_ours(self) -> bool:
        text = self._files.read(self._path)
        return text is not None and text == json.dumps(self._content)

    def _refusal(self) -> ReportError:
        owner = (self._files.read(self._path) or "unknown").strip()
        return ReportError(
            f"another report uses this table ({owner}); if it has ended, delete {self._path}"
        )

    def _is_held(self, text: str) -> bool:
        try:
            owner = json.loads(text)
            host, pid = str(owner["host"]), int(owner["pid"])
        except (ValueError, KeyError, TypeError):
            return False  # torn: its writer was killed
        if host == self._content["host"]:
            # Before a restart of the machine, another process may have had the id of this process.
            return owner.get("id") in _HELD if pid == self._content["pid"] else _alive(pid)
        return self._files.age_s(self._path, time.time_ns() // 1_000_000) < STALE_S


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # another user's process is also alive
    return True


ROLLUP_RUNS_MAX = 24
EVENT_RUNS_MAX = 24
"""Maximum number of runs with events of one date before these are rewritten."""
JOURNEY_RUNS_MAX = 48
JOURNEY_RUNS_MERGED = 32
"""Number of runs of journeys, the newest and smallest ones, that are merged."""


def compact(table: Table, manifest: Manifest) -> Manifest:
    """Rewrite parts with too many runs, with one commit for each kind."""
    if len(manifest.rollups) > ROLLUP_RUNS_MAX:
        manifest = table.commit(_rollups(table, manifest))
    if len(manifest.journeys) > JOURNEY_RUNS_MAX:
        manifest = table.commit(_journeys(table, manifest))
    dates = {date for date, runs in manifest.events.items() if len(runs) > EVENT_RUNS_MAX}
    return table.commit(_events(table, manifest, dates)) if dates else manifest


def _rollups(table: Table, manifest: Manifest) -> Manifest:
    run = manifest.run + 1
    for name in schema.ROLLUPS:
        merged_rows = rollups.merged(name, table.rollup(name, manifest))
        table.write(merged_rows.coalesce(4), name, run)
    return replace(manifest, run=run, rollups=(run,))


def _journeys(table: Table, manifest: Manifest) -> Manifest:
    """Merge runs of closed journeys. Open journeys always have one run."""
    run, runs = manifest.run + 1, manifest.journeys
    unmerged, merged = runs[:-JOURNEY_RUNS_MERGED], runs[-JOURNEY_RUNS_MERGED:]
    rows = table.closed_journeys(merged).withColumn("closed", F.lit(True))
    table.write(rows.coalesce(4), "journeys", run, "closed")
    return replace(manifest, run=run, journeys=(*unmerged, run))


def _events(table: Table, manifest: Manifest, dates: set[str]) -> Manifest:
    run = manifest.run + 1
    rows = table.events(manifest, dates).drop("run").repartition("date", "topic_part")
    sorted_rows = rows.sortWithinPartitions("date", "topic_part", "shard", "epoch", "seq")
    table.write(sorted_rows, "events", run, "date", "topic_part")
    return replace(manifest, run=run, events={**manifest.events, **dict.fromkeys(dates, (run,))})
