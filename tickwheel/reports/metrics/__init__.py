"""Figures, each a function from the table's parts (DataFrames) to a DataFrame.

They read no clock, no file and no setting: zones, targets and horizons are arguments. ``keys``
are the columns that a figure is grouped by: any of ``topic``, ``group``, and the ``start_ms`` and
``local`` that :mod:`~tickwheel.reports.metrics.buckets` adds.
"""
