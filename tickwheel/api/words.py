"""The words that verbs take and answer, as types: a misspelt one is found before the program runs.

What each of them means: docs/protocol.md, "Words", with which a test compares. A daemon that is
newer than this client may answer one that is not here yet.
"""

from __future__ import annotations

from typing import Literal

# What became of a task that is not there to be settled or changed.
Ended = Literal["acked", "cancelled", "deleted", "expired", "filtered", "gone", "unknown"]

AckWord = Ended | Literal["done", "dead", "stale"]
NackWord = Ended | Literal["retrying", "held", "dead", "stale"]
RejectWord = Ended | Literal["dead", "held", "stale"]
SnoozeWord = Ended | Literal["snoozed", "too_often", "stale"]
ExtendWord = Ended | Literal["extended", "stale"]
ReleaseWord = Ended | Literal["released", "stale"]
CancelWord = Ended | Literal["already_cancelled", "dead", "in_flight"]
RunNowWord = Ended | Literal["scheduled", "already_cancelled", "dead", "in_flight"]
RescheduleWord = RunNowWord | Literal["due_too_far"]
RequeueWord = Ended | Literal["requeued"]
DeleteWord = Ended
ReleaseKeyWord = Literal["released", "not_held"]
SkipKeyWord = Literal["skipped", "not_held"]
Outcome = Literal["stored", "kept", "replaced", "rejected"]

Action = Literal["add", "keep", "replace", "reject"]
UniqueUntil = Literal["started", "finished"]
Replaces = Literal["both", "body", "due"]
DueOf = Literal["new", "later", "earlier"]
AckMode = Literal["manual", "on_delivery"]
OrderFailure = Literal["dead", "hold", "retry"]
TaskState = Literal["scheduled", "ready", "in_flight", "waiting", "dead"]
BulkState = Literal["running", "done", "cancelled", "failed"]
TransactionState = Literal["open", "parked", "committed", "rolled_back"]
CountFrom = Literal["enqueue", "commit"]
CatchUp = Literal["skip", "last", "all"]
Overlap = Literal["allow", "skip", "queue_one", "cancel_previous"]
Gap = Literal["after", "skip"]
Fold = Literal["first", "second", "both"]
PushFormat = Literal["plain", "cloudevents"]
