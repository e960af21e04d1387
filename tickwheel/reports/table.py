"""The table: which runs make it up, its places, and its parts as DataFrames.

A run writes its Parquet files into folders of its own number first and its manifest last: one small
JSON file a commit, the newest whole one holds. What no manifest names was left by a run that was
killed: no reader sees it, the next run deletes it. So a commit is the appearance of one file, which
every file system offers, and neither a repeated run nor a killed one can count an event twice.

Layout below ``OUT/table/`` (``run=N``: what run N added)::

    _manifests/00000007.json                       which runs count
    events/run=7/date=2026-11-20/topic_part=…/     one row an event, without duplicates
    facts, reasons, parties, rates, slow, waits, origins, occurrences /run=7/
    journeys/run=7/closed=true|false/              one row a task and group
    quarantine/run=7/                              lines that are no events
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tickwheel.reports import rollups, schema

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from tickwheel.reports.files import Files
    from tickwheel.reports.manifest import Manifest

PARTS = ("events", "journeys", "quarantine", *schema.ROLLUPS)


class Table:
    """The parts of one table; each call is given the manifest that says what to read."""

    def __init__(self, spark: SparkSession, files: Files, root: str) -> None:
        self.root = root
        self._spark, self._files = spark, files

    def place(self, part: str, run: int) -> str:
        return f"{self.root}/{part}/run={run}"

    def events(self, manifest: Manifest, dates: Collection[str] | None = None) -> DataFrame:
        """The events of the table, or of some of its UTC dates."""
        paths = [
            f"{self.place('events', run)}/date={date}"
            for date, runs in sorted(manifest.events.items())
            if dates is None or date in dates
            for run in runs
        ]
        return self._read("events", f"{schema.ROW}, run INT, {schema.PARTITIONS}", paths)

    def added(self, run: int) -> DataFrame:
        """The rows that one run added."""
        return self._read(
            "events", f"{schema.ROW}, run INT, {schema.PARTITIONS}", [self.place("events", run)]
        )

    def rollup(self, name: str, manifest: Manifest) -> DataFrame:
        """One rollup over all runs. Its rows may have to be added up; figures do that anyway."""
        found = self._runs(name, schema.ROLLUPS[name], manifest.rollups)
        return rollups.newest_rates(found) if name == "rates" else found

    def open_journeys(self, manifest: Manifest) -> DataFrame:
        """The journeys that have not ended."""
        runs = () if manifest.open is None else (manifest.open,)
        return self._journeys(runs).filter("not closed").drop("closed")

    def closed_journeys(self, runs: Iterable[int]) -> DataFrame:
        """The journeys that the given runs finished."""
        return self._journeys(runs).filter("closed").drop("closed")

    def quarantine(self, manifest: Manifest) -> DataFrame:
        """Bad lines, each as often as it lies in the newest state of its segment.

        A segment that is read again (it grew, or was sealed) replaces what was found in it.
        """
        found = self._runs("quarantine", schema.QUARANTINE, manifest.quarantine)
        newest = [(name, loaded.run) for name, loaded in manifest.segments.items()]
        current = self._spark.createDataFrame(newest, "segment STRING, newest INT")
        return found.join(F.broadcast(current), "segment").filter("run = newest").drop("newest")

    def _journeys(self, runs: Iterable[int]) -> DataFrame:
        paths = [self.place("journeys", run) for run in runs]
        return self._read("journeys", f"{schema.JOURNEY}, run INT, closed BOOLEAN", paths).drop(
            "run"
        )

    def _runs(self, part: str, columns: str, runs: Iterable[int]) -> DataFrame:
        names = {field.split()[0] for field in columns.split(",")}
        shape = columns if "run" in names else f"{columns}, run INT"
        found = self._read(part, shape, [self.place(part, run) for run in runs])
        return found if "run" in names else found.drop("run")

    def _read(self, part: str, columns: str, paths: list[str]) -> DataFrame:
        if not paths:
            return self._spark.createDataFrame([], columns)
        reader = self._spark.read.schema(columns).option("basePath", f"{self.root}/{part}")
        return reader.parquet(*paths)

    def sweep(self, manifest: Manifest) -> int:
        """Delete what no run of ``manifest`` needs: left by killed runs, or replaced; how many."""
        needed: dict[str, Collection[int | None]] = {
            "events": {run for runs in manifest.events.values() for run in runs},
            "journeys": {*manifest.journeys, manifest.open},
            "quarantine": {*manifest.quarantine},
            **{name: {*manifest.rollups} for name in schema.ROLLUPS},
        }
        gone = 0
        for part in PARTS:
            for name in self._files.names(f"{self.root}/{part}"):
                run = name.removeprefix("run=")
                if name != run and not (run.isdecimal() and int(run) in needed[part]):
                    self._files.delete(f"{self.root}/{part}/{name}")
                    gone += 1
        for name in self._files.names(f"{self.root}/events"):
            dates = self._files.names(f"{self.root}/events/{name}")
            for date in (d for d in dates if d.startswith("date=")):
                if int(name.removeprefix("run=")) not in manifest.events.get(date[5:], ()):
                    self._files.delete(f"{self.root}/events/{name}/{date}")
        return gone
