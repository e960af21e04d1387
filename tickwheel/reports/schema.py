"""The shape of a history line and of a row of the table, the versions that are understood, and how
lines become rows. Column expressions only.

A line of version 1 is what the daemon writes. A line of a newer version is not guessed at: it goes
to the quarantine, and its segment is read again by the first version that knows it. Every line gets
a verdict: null when it is a row, else the reason it goes to the quarantine:

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

VERSION = 1

TASK_EVENTS = (
    "enqueued", "rescheduled", "requeued", "delivered", "released", "nacked", "lease_over",
    "dead", "acked", "cancelled", "expired", "filtered", "deleted",
)  # fmt: skip
"""What happens to a task. The order decides between events of one millisecond: later wins."""
GROUP_EVENTS = ("group_created", "group_deleted", "group_configured", "group_reset")
SCHEDULE_EVENTS = ("schedule_put", "schedule_paused", "schedule_resumed", "schedule_deleted")
OCCURRENCE_EVENTS = ("occurrence_fired", "occurrence_skipped", "occurrence_queued")
TRANSACTION_EVENTS = (
    "transaction_prepared", "transaction_committed", "transaction_rolled_back",
    "transaction_checked", "transaction_parked",
)  # fmt: skip
"""Events of transactions; the tasks of a committed one are enqueued like all others."""
TRANSACTION_ENDS = ("transaction_committed", "transaction_rolled_back", "transaction_parked")
"""Events that end a transaction, with how long it took."""
KEY_BUSY = "key_busy"
"""The cause of a late delivery whose order key or fair share was not free."""
KEY_EVENTS = ("replaced", "kept", "rejected", "overtaken")
"""Events of tasks with a pending key: no figure counts them."""
OTHER_EVENTS = (
    *GROUP_EVENTS, *SCHEDULE_EVENTS, *OCCURRENCE_EVENTS, *KEY_EVENTS, *TRANSACTION_EVENTS,
    "started", "stopped", "dropped",
)  # fmt: skip
EVENTS = TASK_EVENTS + OTHER_EVENTS
TOPIC_EVENTS = TASK_EVENTS + GROUP_EVENTS + SCHEDULE_EVENTS + OCCURRENCE_EVENTS
FINAL = ("acked", "cancelled", "expired", "filtered", "deleted")
"""Events after which nothing more becomes of a task in its group."""

NO_TOPIC = "~"
"""Stands for the topic where there is none (events of the daemon); no topic can be called so."""
TOPIC_PATTERN = r"^[A-Za-z0-9._:/-]{1,255}$"
TIME_MS_MAX = 4_102_444_800_000
"""1 January 2100; a later time is a broken line, and makes no partition."""
TIMES = ("time_ms", "due_ms", "lateness_ms", "ack_ms", "count", "planned_ms")
"""Fields that are counted with, from 0 to below that bound."""
REASON_MAX = 200
"""Characters of a reason by which figures are kept."""

_SHARED = """
    topic STRING, `group` STRING, key STRING, tag STRING, due_ms LONG, attempt INT,
    lateness_ms LONG, ack_ms LONG, subscriber STRING, producer STRING, reason STRING,
    ended BOOLEAN, priority INT, ttl_ms LONG, clean BOOLEAN, count LONG, node STRING, shard INT,
    epoch LONG, seq LONG, synthetic BOOLEAN, schedule STRING, planned_ms LONG, cause STRING
"""
LINE = f"v LONG, time_ms LONG, event STRING, task_id STRING, {_SHARED}"
"""The fields of a line that are parsed: without bodies, properties and retry policies."""
ROW = f"time_ms LONG, event STRING, task_id LONG, {_SHARED}"
PARTITIONS = "date STRING, topic_part STRING"
"""The folders of the table: the UTC date, and the topic in a form that is fit for a path."""

QUARANTINE = "segment STRING, run INT, reason STRING, line STRING, bytes LONG"
LINE_KEPT_MAX = 2_000
"""Characters of a quarantined line that are kept."""

FACTS = """
    quarter_ms LONG, topic STRING, `group` STRING, event STRING, attempt INT, value_ms LONG,
    held BOOLEAN, n LONG
"""
"""The columns of facts; ``held`` is true or null."""
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
"""The columns of journeys: a row for a task and group; ``group`` null: no group has seen it."""


# --- from lines to rows --------------------------------------------------------------------------


DAMAGED = "damaged"
TOO_NEW = ("newer", "unknown")
"""Reasons that a later version of this program may not have."""
_BAD = "_bad"
_PART_MAX = 120


def parse(lines: DataFrame) -> DataFrame:
    """``value``, ``segment`` → the columns of a row, partitions, ``verdict``, and both of those."""
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _BAD}
    parsed = F.from_json("value", f"{LINE}, {_BAD} STRING", options)
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


def good_rows(parsed: DataFrame) -> DataFrame:
    """The rows for the table."""
    names = [field.split()[0].strip("`") for field in ROW.split(",")]
    return parsed.filter(F.col("verdict").isNull()).select(*names, "date", "topic_part")


def bad_rows(parsed: DataFrame, run: int) -> DataFrame:
    """The rows for the quarantine."""
    return parsed.filter(F.col("verdict").isNotNull()).select(
        "segment",
        F.lit(run).alias("run"),
        F.col("verdict").alias("reason"),
        F.left("value", F.lit(LINE_KEPT_MAX)).alias("line"),
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
    return F.coalesce(bounded, F.lit(NO_TOPIC))


def _verdict() -> Column:
    c = F.col
    trimmed = F.trim("value")
    # A newer version may have changed any type, so its number is looked for in the text as well.
    version = F.regexp_extract("value", r'"v"\s*:\s*(\d{1,9})', 1)
    newer = F.coalesce(c("v"), F.try_to_number(version, F.lit("9" * 9))) > VERSION
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
    of_task = c("event").isin(*TASK_EVENTS)
    missing = c("time_ms").isNull() | c("event").isNull() | c("seq").isNull()
    missing |= c("v").isNull() | c("shard").isNull() | c("epoch").isNull()
    lacking = c("event").isin(*TOPIC_EVENTS) & c("topic").isNull()
    lacking |= of_task & c("task_id").isNull()
    lacking |= (c("event") == "delivered") & (c("due_ms").isNull() | c("attempt").isNull())
    lacking |= (c("event") == "enqueued") & c("due_ms").isNull()
    of_schedule = c("event").isin(*SCHEDULE_EVENTS, *OCCURRENCE_EVENTS)
    lacking |= of_schedule & c("schedule").isNull()
    lacking |= c("event").isin(*OCCURRENCE_EVENTS) & c("planned_ms").isNull()
    impossible = c("v") < 1
    for name in TIMES:
        outside = (c(name) < 0) | (c(name) >= TIME_MS_MAX)
        impossible |= F.coalesce(outside, F.lit(False))
    impossible |= c("topic").isNotNull() & ~c("topic").rlike(TOPIC_PATTERN)
    impossible |= c("task_id").isNotNull() & c("task").isNull()
    return (
        F.when(c(_BAD).isNotNull() | ~trimmed.startswith("{"), shape)
        .when(c("v") > VERSION, "newer")
        .when(glued, "torn")
        .when(missing, "missing")
        .when(~c("event").isin(*EVENTS), "unknown")
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
