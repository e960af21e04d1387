"""The vocabulary of the wire: frame numbers, the version, the words in requests and answers.

``docs/protocol.md`` specifies the layout of each frame and the meaning of each word (tests
compare); ``protocol.py`` encodes them. Invariant: a number never changes its meaning. Type checkers
find misspelt words. A newer daemon can answer with words that are not listed here.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

PROTOCOL_VERSION = 1
DEFAULT_PORT = 7355
REQUEST_MAX = 2**53 - 1
"""Highest request number. Every language can represent it exactly."""
SESSION_BYTES = 16


class FrameType(IntEnum):
    """The first element of every frame. Numbers from 65 to 95 go from daemon to client, all others
    from client to daemon."""

    HELLO = 1
    ENQUEUE = 2
    ONEWAY = 3
    SUBSCRIBE = 4
    PREFETCH = 5
    UNSUBSCRIBE = 6
    PULL = 7
    ACK = 8
    NACK = 9
    REJECT = 10
    EXTEND = 11
    RELEASE = 12
    CANCEL = 13
    RESCHEDULE = 14
    RUN_NOW = 15
    LOOKUP = 16
    LIST = 17
    STATS = 18
    DEAD_LIST = 19
    DEAD_REQUEUE = 20
    DEAD_DELETE = 21
    BACKUP = 22
    PING = 23
    BYE = 24
    STATUS = 25
    GROUP_CREATE = 26
    GROUP_DELETE = 27
    CONFIGURE = 28
    ALIVE = 29
    ENQUEUE_COLUMNS = 30
    PUSH_SET = 31
    FORWARD_SET = 32
    TARGET_REMOVE = 33
    TARGET_LIST = 34
    TOPIC_DELETE = 35
    PREPARE = 36
    COMMIT = 37
    ROLLBACK = 38
    TRANSACTION_LIST = 39
    TRANSACTION_SHOW = 40
    CHECKS = 41
    HELD_KEYS = 42
    KEY_LINES = 43
    RELEASE_KEY = 44
    SKIP_KEY = 45
    SPREAD = 46
    BULK_MAKE = 47
    BULK_PREVIEW = 48
    BULK_LIST = 49
    BULK = 50
    GROUP_RESET = 51
    GROUP_RESET_PREVIEW = 52
    CONSUMER_LIST = 53
    PAUSE_KEY = 54
    RESUME_KEY = 55
    PUSH_TEST = 56
    PUSH_LOG = 57
    PUSH_RESEND = 58
    LOAD = 59
    SNOOZE = 60
    SCHEDULE_PUT = 61
    SCHEDULE_LIST = 62
    SCHEDULE = 63

    OK = 65
    ERROR = 66
    DELIVER = 67
    GOODBYE = 68
    ENDED = 69
    HEARTBEAT = 70
    CHECK = 71
    LEASE = 72

    NODE_LIST = 96
    SHARD_MOVE = 97
    NODE_DRAIN = 98
    TOPIC_LIST = 99
    TOPIC_SHOW = 100
    OVERVIEW = 101
    GROUP_LAG = 102
    TASK_HISTORY = 103
    HISTORY_LIST = 104
    ENQUEUE_ONCE = 105
    RESTORE = 106
    RESTORE_LIST = 107
    RESTORE_SHOW = 108
    RESTORE_CANCEL = 109
    CLAIM = 110
    PEEK = 111
    EXPLAIN = 112


# --- words --------------------------------------------------------------------------------------

# How a task ended that can no longer be settled or changed.
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
RequeueWord = Ended | Literal["requeued", "ttl_over"]
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
