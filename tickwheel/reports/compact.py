"""Many small runs made into fewer: the same rows in fewer files. A commit like any other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from tickwheel.reports import rollups, schema
from tickwheel.reports.manifest import Manifest, Manifests

if TYPE_CHECKING:
    from tickwheel.reports.table import Table

ROLLUP_RUNS_MAX = 24
EVENT_RUNS_MAX = 24
"""Of one date."""
JOURNEY_RUNS_MAX = 48
JOURNEY_RUNS_MERGED = 32
"""The newest, which are the smallest: old large ones are left alone."""


def compact(table: Table, manifest: Manifest, manifests: Manifests) -> Manifest:
    """Rewrite what has too many runs, each kind under a commit of its own."""
    if len(manifest.rollups) > ROLLUP_RUNS_MAX:
        manifest = _commit(manifests, _rollups(table, manifest))
    if len(manifest.journeys) > JOURNEY_RUNS_MAX:
        manifest = _commit(manifests, _journeys(table, manifest))
    many = {date for date, runs in manifest.events.items() if len(runs) > EVENT_RUNS_MAX}
    if many:
        manifest = _commit(manifests, _events(table, manifest, many))
    return manifest


def _commit(manifests: Manifests, changed: Manifest) -> Manifest:
    manifests.commit(changed)
    return changed


def _rollups(table: Table, manifest: Manifest) -> Manifest:
    run = manifest.run + 1
    for name in schema.ROLLUPS:
        found = table.rollup(name, manifest)
        whole = found if name == "slow" else rollups.merged(name, found)
        whole.coalesce(4).write.mode("overwrite").parquet(table.place(name, run))
    return replace(manifest, run=run, rollups=(run,))


def _journeys(table: Table, manifest: Manifest) -> Manifest:
    """The closed ones; the open ones have one run anyway."""
    run = manifest.run + 1
    kept, merged = (
        manifest.journeys[:-JOURNEY_RUNS_MERGED],
        manifest.journeys[-JOURNEY_RUNS_MERGED:],
    )
    found = table.closed_journeys(merged).withColumn("closed", F.lit(True))
    place = table.place("journeys", run)
    found.coalesce(4).write.mode("overwrite").partitionBy("closed").parquet(place)
    return replace(manifest, run=run, journeys=(*kept, run))


def _events(table: Table, manifest: Manifest, dates: set[str]) -> Manifest:
    run = manifest.run + 1
    rows = table.events(manifest, dates).drop("run").repartition("date", "topic_part")
    sorted_rows = rows.sortWithinPartitions("date", "topic_part", "shard", "epoch", "seq")
    place = table.place("events", run)
    sorted_rows.write.mode("overwrite").partitionBy("date", "topic_part").parquet(place)
    return replace(manifest, run=run, events={**manifest.events, **dict.fromkeys(dates, (run,))})
