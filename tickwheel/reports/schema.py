"""The fields of a history line and of a row of the table, and the conversion of lines into rows,
with column expressions only.

The daemon writes lines of version 1. A line of a newer version is quarantined, and its segment is
read again by the first release that knows the version. Every line gets a verdict: null for a valid
row, otherwise the reason for its quarantine:

========== =====================================================================================
torn       begins like an event but has no end, because a crash cut it off
not_json   is not a JSON object for another reason
wrong_type has a field of the wrong type or with an impossible value
missing    lacks a required field
unknown    has an event that version 1 does not define
newer      was written by a newer version of the schema
damaged    (for a whole file) a sealed segment cannot be decompressed
========== =====================================================================================
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from tickwheel.reports import HOUR_MS

VERSION = 1

TASK_EVENTS = (
    "enqueued", "rescheduled", "requeued", "delivered", "released", "nacked", "lease_over",
    "dead", "acked", "cancelled", "expired", "filtered", "deleted",
)  # fmt: skip
"""Events of tasks. If several are in the same millisecond, the one that is later in this order
applies."""
GROUP_EVENTS = ("group_created", "group_deleted", "group_configured", "group_reset")
RECORD_EVENTS = ("record_put", "record_dropped")
SCHEDULE_EVENTS = ("schedule_put", "schedule_paused", "schedule_resumed", "schedule_deleted")
OCCURRENCE_EVENTS = ("occurrence_fired", "occurrence_skipped", "occurrence_queued")
TRANSACTION_EVENTS = (
    "transaction_prepared", "transaction_committed", "transaction_rolled_back",
    "transaction_checked", "transaction_parked",
)  # fmt: skip
"""Events of transactions; the tasks of a committed transaction have ``enqueued`` events."""
TRANSACTION_WITH_AGE = ("transaction_committed", "transaction_rolled_back", "transaction_parked")
"""Events that contain the age of a transaction."""
KEY_BUSY = "key_busy"
"""The cause of a delivery that was late because its order key or fair share was busy."""
KEY_EVENTS = ("replaced", "kept", "rejected", "overtaken")
"""Events of enqueues whose key was already pending. No metric counts them."""
OTHER_EVENTS = (
    *GROUP_EVENTS, *SCHEDULE_EVENTS, *OCCURRENCE_EVENTS, *KEY_EVENTS, *TRANSACTION_EVENTS,
    *RECORD_EVENTS, "started", "stopped", "clock_set_back", "dropped",
)  # fmt: skip
EVENTS = TASK_EVENTS + OTHER_EVENTS
TOPIC_EVENTS = TASK_EVENTS + KEY_EVENTS + GROUP_EVENTS + SCHEDULE_EVENTS + OCCURRENCE_EVENTS
FINAL = ("acked", "cancelled", "expired", "filtered", "deleted")
"""Events that end a task in its group."""

NO_TOPIC = "~"
"""Stands for the topic of daemon events, which have none; no real topic can have this name."""
TOPIC_PATTERN = r"^[A-Za-z0-9._:/-]{1,255}$"
TIME_MS_MAX = 4_102_444_800_000
"""1 January 2100. A line with a later time is invalid."""
TIMES = ("time_ms", "due_ms", "lateness_ms", "ack_ms", "count", "planned_ms")
"""Numeric fields, which must be between 0 and ``TIME_MS_MAX``."""
REASON_MAX = 200
"""Maximum characters of a reason in figures."""

_SHARED = """
    topic STRING, `group` STRING, key STRING, tag STRING, due_ms LONG, attempt INT,
    lateness_ms LONG, ack_ms LONG, subscriber STRING, producer STRING, reason STRING,
    ended BOOLEAN, priority INT, ttl_ms LONG, clean BOOLEAN, count LONG, node STRING, shard INT,
    epoch LONG, seq LONG, synthetic BOOLEAN, schedule STRING, planned_ms LONG, cause STRING
"""
LINE = f"v LONG, time_ms LONG, event STRING, task_id STRING, {_SHARED}"
"""The parsed fields of a line, without bodies, properties and retry policies."""
ROW = f"time_ms LONG, event STRING, task_id LONG, {_SHARED}"
PARTITIONS = "date STRING, topic_part STRING"
"""The folders of the table: the UTC date, and the topic in a form that is valid in paths."""

QUARANTINE = "segment STRING, run INT, reason STRING, line STRING, bytes LONG"
LINE_KEPT_MAX = 2_000
"""Maximum characters of a quarantined line that are kept."""

FACTS = """
    quarter_ms LONG, topic STRING, `group` STRING, event STRING, attempt INT, value_ms LONG,
    held BOOLEAN, n LONG
"""
"""Columns of ``facts``; ``held`` is true or null."""
WAITS = "quarter_ms LONG, topic STRING, `group` STRING, kind STRING, n LONG"
REASONS = "quarter_ms LONG, topic STRING, `group` STRING, event STRING, reason STRING, n LONG"
PARTIES = """
    quarter_ms LONG, topic STRING, `group` STRING, role STRING, name STRING, n LONG, acked LONG,
    failed LONG, took_sum_ms LONG, took_max_ms LONG
"""
RATES = """
    quarter_ms LONG, topic STRING, `group` STRING, event STRING, peak LONG, at_ms LONG, run INT
"""
SLOW = """
    quarter_ms LONG, topic STRING, `group` STRING, key STRING, task_id LONG, came_due_ms LONG,
    acked_ms LONG, took_ms LONG, deliveries LONG
"""
OCCURRENCES = """
    quarter_ms LONG, topic STRING, `group` STRING, schedule STRING, outcome STRING, value_ms LONG,
    n LONG
"""
ROLLUPS = {
    "facts": FACTS, "reasons": REASONS, "parties": PARTIES, "rates": RATES, "slow": SLOW,
    "waits": WAITS, "origins": PARTIES, "occurrences": OCCURRENCES,
}  # fmt: skip

JOURNEY = """
    task_id LONG, topic STRING, `group` STRING, lead BOOLEAN, left_ms LONG, key STRING,
    producer STRING, enqueued_ms LONG, planned_ms LONG, due_ms LONG, came_due_ms LONG,
    first_ms LONG, acked_ms LONG, ended_ms LONG, whole_ms LONG, partly BOOLEAN, owed BOOLEAN,
    last_code LONG, deliveries LONG, attempts INT
"""
"""Columns of ``journeys``: a row for each task and group, one of them per task with ``lead``. If
``group`` is null, the task was not delivered to any group."""


# --- from lines to rows --------------------------------------------------------------------------


DAMAGED = "damaged"
TOO_NEW = ("newer", "unknown")
"""Verdicts that a later release of Tickwheel can change."""
_BAD = "_bad"
_PART_MAX = 120


def parse(lines: DataFrame) -> DataFrame:
    """Parse lines (``value`` and any other columns). Return these, the columns of rows, the
    partitions, and the ``verdict``."""
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BAD}
    parsed = F.from_json("value", f"{LINE}, {_BAD} STRING", options)
    rows = lines.filter(_trimmed() != "").withColumn("line", parsed)
    reason = F.when(F.col(_BAD).isNotNull() | ~_trimmed().startswith("{"), _shape())
    reason = reason.when(F.col("v") > VERSION, "newer").when(_is_glued(), "torn")
    return _judged(rows.select(*lines.columns, "line.*"), reason)


def parse_quickly(lines: DataFrame) -> DataFrame:
    """Parse lines (``value``) like :func:`parse`, for valid rows: the ``verdict`` tells that a line
    is not valid, but not why. This takes 0.7 of the time, because Spark's JSON source, unlike
    ``from_json``, makes no reader of bytes for each line, and the text is not needed afterwards."""
    is_object = _trimmed().startswith("{") & ~_is_glued()
    objects = lines.filter(_trimmed() != "").select(
        F.when(is_object, F.col("value")).otherwise("~")
    )
    reader = lines.sparkSession.read.schema(f"{LINE}, {_BAD} STRING")
    rows = reader.json(objects, columnNameOfCorruptRecord=_BAD)
    return _judged(rows, F.when(F.col(_BAD).isNotNull(), "not_json"))


def _judged(rows: DataFrame, reason: Column) -> DataFrame:
    """Add to parsed lines the other columns of rows, the partitions, and the ``verdict``, which
    begins with ``reason``."""
    rows = rows.withColumn("task", F.col("task_id").try_cast("long"))
    rows = rows.withColumn("verdict", _verdict(reason))
    # Spark's arithmetic fails the job for an impossible time, so only valid rows get a date. A date
    # is formatted once for each folder, a text would be formatted for each row.
    date = F.date_from_unix_date(F.floor(F.col("time_ms") / (24 * HOUR_MS)).cast("int"))
    return rows.withColumns(
        {
            "task_id": F.col("task"),
            "lateness_ms": _lateness(),
            "date": F.when(F.col("verdict").isNull(), date),
            "topic_part": topic_part(F.col("topic")),
        }
    ).drop("task", _BAD)


def good_rows(parsed: DataFrame) -> DataFrame:
    """Return the rows for the table."""
    names = [field.split()[0].strip("`") for field in ROW.split(",")]
    return parsed.filter(F.col("verdict").isNull()).select(*names, "date", "topic_part")


def bad_rows(parsed: DataFrame, run: int) -> DataFrame:
    """Return the rows for the quarantine."""
    return parsed.filter(F.col("verdict").isNotNull()).select(
        "segment",
        F.lit(run).alias("run"),
        F.col("verdict").alias("reason"),
        F.left("value", F.lit(LINE_KEPT_MAX)).alias("line"),
        F.octet_length("value").cast("long").alias("bytes"),
    )


def topic_part(topic: Column) -> Column:
    """Return a folder name for a topic. It is bounded, without separators, and unique. A topic can
    contain ``/`` and ``:`` and have 255 characters, unlike a folder's name. Characters other than
    letters, digits, dots and dashes become ``~`` and their code; escaping ``_`` avoids names that
    Spark hides or reserves. Long names are truncated and get a hash."""
    escaped = topic
    for character in "_:/":
        escaped = F.replace(escaped, F.lit(character), F.lit(f"~{ord(character):02x}"))
    short = F.concat(
        F.left(escaped, F.lit(_PART_MAX)), F.lit("~~"), F.left(F.md5(topic), F.lit(16))
    )
    bounded = F.when(F.length(escaped) > _PART_MAX, short).otherwise(escaped)
    return F.coalesce(bounded, F.lit(NO_TOPIC))


def _trimmed() -> Column:
    return F.trim("value")


def _is_glued() -> Column:
    """Return whether the line lacks its end and line feed, and is joined with the next line. (No
    JSON string contains these characters, because its quotes would be escaped.)"""
    return F.col("value").contains('}{"v')


def _shape() -> Column:
    """Return the reason why a text is not an event."""
    trimmed = _trimmed()
    # A newer version can change any type, so the raw text is also searched for its number.
    version = F.regexp_extract("value", r'"v"\s*:\s*(\d{1,9})', 1)
    newer = F.coalesce(F.col("v"), F.try_to_number(version, F.lit("9" * 9))) > VERSION
    is_object = trimmed.startswith("{") & F.expr("try_parse_json(value)").isNotNull()
    return (
        F.when(is_object & newer, "newer")
        .when(is_object, "wrong_type")
        .when(trimmed.startswith("{") & ~trimmed.endswith("}"), "torn")
        .otherwise("not_json")
    )


def _verdict(reason: Column) -> Column:
    c = F.col
    of_task = c("event").isin(*TASK_EVENTS, *KEY_EVENTS)
    missing = c("time_ms").isNull() | c("event").isNull() | c("seq").isNull()
    missing |= c("v").isNull() | c("shard").isNull() | c("epoch").isNull()
    incomplete = c("event").isin(*TOPIC_EVENTS) & c("topic").isNull()
    incomplete |= of_task & c("task_id").isNull()
    incomplete |= (c("event") == "delivered") & (c("due_ms").isNull() | c("attempt").isNull())
    incomplete |= c("event").isin("enqueued", "replaced") & c("due_ms").isNull()
    of_schedule = c("event").isin(*SCHEDULE_EVENTS, *OCCURRENCE_EVENTS)
    incomplete |= of_schedule & c("schedule").isNull()
    incomplete |= c("event").isin(*OCCURRENCE_EVENTS) & c("planned_ms").isNull()
    impossible = c("v") < 1
    for name in TIMES:
        outside = (c(name) < 0) | (c(name) >= TIME_MS_MAX)
        impossible |= F.coalesce(outside, F.lit(False))
    impossible |= c("topic").isNotNull() & ~c("topic").rlike(TOPIC_PATTERN)
    # A cast also takes blanks, signs and leading zeros.
    impossible |= ~c("task_id").eqNullSafe(c("task").cast("string")) | (c("task") < 0)
    return (
        reason.when(c("v") > VERSION, "newer")
        .when(missing, "missing")
        .when(~c("event").isin(*EVENTS), "unknown")
        .when(incomplete, "missing")
        .when(F.coalesce(impossible, F.lit(False)), "wrong_type")
    )


def _lateness() -> Column:
    """Return the lateness that the daemon wrote, or else the delivery time minus the due time."""
    first = (F.col("event") == "delivered") & (F.col("attempt") == 1)
    computed = F.greatest(F.try_subtract("time_ms", "due_ms"), F.lit(0))
    fired = (F.col("event") == "occurrence_fired") & F.col("reason").isNull()
    late = F.when(first, F.coalesce(F.col("lateness_ms"), computed))
    return late.when(fired, F.col("lateness_ms"))
