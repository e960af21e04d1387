"""Reports over the delivery history, computed by Spark.

Bird's eye::

    history segments ──load──► table/events (Parquet by date and topic)      what happened
                                  │  new rows only
                                  ├─rollups──► table/facts, reasons, …   exact, additive counts
                                  └─journeys─► table/journeys            one row a task and group
    table ──metrics──► metrics/*.parquet, csv/*.csv, report.html

Only :mod:`~tickwheel.reports.table` writes the table, one numbered run after another; a run is
there when its manifest is. Metrics are functions from DataFrame to DataFrame and write nothing.
No code of ours runs on a cluster's executors: everything is column expressions, so it needs nothing
installed. This package imports nothing else of ours, and importing it does not import
pyspark.
"""

from __future__ import annotations

from tickwheel.reports.settings import ReportError, ReportSettings, Slo

__all__ = ["ReportError", "ReportSettings", "Slo"]
