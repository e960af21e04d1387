"""The shape of a history line, of a row of the table, and the versions that are understood.

A line of version 1 is what the daemon writes. A line of a newer version is not guessed at: it goes
to the quarantine, and its segment is read again by the first version that knows it.
"""

from __future__ import annotations

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
KEY_EVENTS = ("replaced", "kept", "rejected")
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

LINE = """
    v LONG, time_ms LONG, event STRING, task_id STRING, topic STRING, `group` STRING, key STRING,
    tag STRING, due_ms LONG, attempt INT, lateness_ms LONG, ack_ms LONG, subscriber STRING,
    producer STRING, reason STRING, ended BOOLEAN, priority INT, ttl_ms LONG, clean BOOLEAN,
    count LONG, node STRING, shard INT, epoch LONG, seq LONG, synthetic BOOLEAN, schedule STRING,
    planned_ms LONG, cause STRING
"""
"""The fields of a line that are parsed: without bodies, properties and retry policies."""

ROW = """
    time_ms LONG, event STRING, task_id LONG, topic STRING, `group` STRING, key STRING,
    tag STRING, due_ms LONG, attempt INT, lateness_ms LONG, ack_ms LONG, subscriber STRING,
    producer STRING, reason STRING, ended BOOLEAN, priority INT, ttl_ms LONG, clean BOOLEAN,
    count LONG, node STRING, shard INT, epoch LONG, seq LONG, synthetic BOOLEAN, schedule STRING,
    planned_ms LONG, cause STRING
"""
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
