"""From lines to rows, and which lines are no rows and why. Column expressions only.

Every line gets a verdict: null when it is a row, else the reason it goes to the quarantine:

========== =====================================================================================
torn       begins like an event and does not end like one: cut off by a crash
not_json   anything else that is no JSON object
wrong_type a field has another type than the schema says, or a value that cannot be
missing    a field that this event needs is not there
unknown    an event that version 1 does not have
newer      written by a newer version of the schema
damaged    (not a line's verdict) a sealed segment that cannot be unpacked
========== =====================================================================================
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tickwheel.reports import schema

DAMAGED = "damaged"
TOO_NEW = ("newer", "unknown")
"""Reasons that a later version of this program may not have."""
_BAD = "_bad"
_PART_MAX = 120


def parse(lines: DataFrame) -> DataFrame:
    """``value``, ``segment`` → the columns of a row, partitions, ``verdict``, and both of those."""
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BAD}
    parsed = F.from_json("value", f"{schema.LINE}, {_BAD} STRING", options)
    rows = lines.filter(F.trim("value") != "").withColumn("line", parsed).select(
        "value", "segment", "line.*"
    )  # fmt: skip
    rows = rows.withColumn("task", F.try_to_number("task_id", F.lit("9" * 19)))
    rows = rows.withColumn("verdict", _verdict())
    # Spark's arithmetic fails a job at an impossible time, so only rows get that far.
    date = F.date_format(F.timestamp_millis("time_ms"), "yyyy-MM-dd")
    return rows.withColumns(
        {
            "task_id": F.col("task").cast("long"),
            "lateness_ms": _lateness(),
            "date": F.when(F.col("verdict").isNull(), date),
            "topic_part": topic_part(F.col("topic")),
        }
    ).drop("task", _BAD)


def good(parsed: DataFrame) -> DataFrame:
    """The rows for the table."""
    names = [field.split()[0].strip("`") for field in schema.ROW.split(",")]
    return parsed.filter(F.col("verdict").isNull()).select(*names, "date", "topic_part")


def bad(parsed: DataFrame, run: int) -> DataFrame:
    """The rows for the quarantine."""
    return parsed.filter(F.col("verdict").isNotNull()).select(
        "segment",
        F.lit(run).alias("run"),
        F.col("verdict").alias("reason"),
        F.left("value", F.lit(schema.LINE_KEPT_MAX)).alias("line"),
        F.octet_length("value").cast("long").alias("bytes"),
    )


def topic_part(topic: Column) -> Column:
    """A folder's name for a topic: bounded, no separators, and different for different topics.

    Topics may hold ``/`` and ``:`` and be 255 long; a folder's name may not. What is not a
    letter, digit, dot or dash becomes ``~`` and its code (``_`` too, which keeps the names that
    Spark hides or reserves out); long ones are cut and get a hash, so that they differ.
    """
    escaped = topic
    for character in "_:/":
        escaped = F.replace(escaped, F.lit(character), F.lit(f"~{ord(character):02x}"))
    short = F.concat(
        F.left(escaped, F.lit(_PART_MAX)), F.lit("~~"), F.left(F.md5(topic), F.lit(16))
    )
    bounded = F.when(F.length(escaped) > _PART_MAX, short).otherwise(escaped)
    return F.coalesce(bounded, F.lit(schema.NO_TOPIC))


def _verdict() -> Column:
    c = F.col
    trimmed = F.trim("value")
    # A newer version may have changed any type, so its number is looked for in the text as well.
    version = F.regexp_extract("value", r'"v"\s*:\s*(\d{1,9})', 1)
    newer = F.coalesce(c("v"), F.try_to_number(version, F.lit("9" * 9))) > schema.VERSION
    is_object = trimmed.startswith("{") & F.expr("try_parse_json(value)").isNotNull()
    shape = (
        F.when(is_object & newer, "newer")
        .when(is_object, "wrong_type")
        .when(trimmed.startswith("{") & ~trimmed.endswith("}"), "torn")
        .otherwise("not_json")
    )
    # A line that lost its end with its line feed, and the next one behind it: neither is whole.
    # (No string can hold these characters: its own quotes would be escaped.)
    glued = c("value").contains('}{"v')
    of_task = c("event").isin(*schema.TASK_EVENTS)
    missing = c("time_ms").isNull() | c("event").isNull() | c("seq").isNull()
    missing |= c("v").isNull() | c("shard").isNull() | c("epoch").isNull()
    lacking = c("event").isin(*schema.TOPIC_EVENTS) & c("topic").isNull()
    lacking |= of_task & c("task_id").isNull()
    lacking |= (c("event") == "delivered") & (c("due_ms").isNull() | c("attempt").isNull())
    lacking |= (c("event") == "enqueued") & c("due_ms").isNull()
    of_schedule = c("event").isin(*schema.SCHEDULE_EVENTS, *schema.OCCURRENCE_EVENTS)
    lacking |= of_schedule & c("schedule").isNull()
    lacking |= c("event").isin(*schema.OCCURRENCE_EVENTS) & c("planned_ms").isNull()
    impossible = c("v") < 1
    for name in schema.TIMES:
        outside = (c(name) < 0) | (c(name) >= schema.TIME_MS_MAX)
        impossible |= F.coalesce(outside, F.lit(False))
    impossible |= c("topic").isNotNull() & ~c("topic").rlike(schema.TOPIC_PATTERN)
    impossible |= c("task_id").isNotNull() & c("task").isNull()
    return (
        F.when(c(_BAD).isNotNull() | ~trimmed.startswith("{"), shape)
        .when(c("v") > schema.VERSION, "newer")
        .when(glued, "torn")
        .when(missing, "missing")
        .when(~c("event").isin(*schema.EVENTS), "unknown")
        .when(lacking, "missing")
        .when(F.coalesce(impossible, F.lit(False)), "wrong_type")
    )


def _lateness() -> Column:
    """The lateness as the daemon wrote it; from the two times where a line has none."""
    first = (F.col("event") == "delivered") & (F.col("attempt") == 1)
    reckoned = F.greatest(F.try_subtract("time_ms", "due_ms"), F.lit(0))
    fired = (F.col("event") == "occurrence_fired") & F.col("reason").isNull()
    late = F.when(first, F.coalesce(F.col("lateness_ms"), reckoned))
    return late.when(fired, F.col("lateness_ms"))
