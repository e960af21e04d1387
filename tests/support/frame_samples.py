"""One well-formed frame of every type, as docs/protocol.md lays them out."""

from __future__ import annotations

from typing import Any

from tickwheel.api.frames import FrameType as T

ID = 7_627_861_917_696
MOMENT_MS = 1_790_000_000_000
OPTIONS = {
    "key": "k",
    "tag": "t",
    "properties": {"a": 1, "b": "x", "c": 1.5, "d": True},
    "ttl_ms": 5,
}

OF_KEY = {"topic": "t", "key": "order-42"}
SAMPLES: dict[T, tuple[Any, ...]] = {
    T.HELLO: (1, {"v": 1, "session": bytes(16), "token": None, "client": "sample"}),
    T.ENQUEUE_COLUMNS: (30, 3, "t", (b"body", b""), (60_000, 0)),
    T.ENQUEUE: (2, 2, (("t", b"body", 60_000), ("t", b"", None, OPTIONS | {"due_ms": MOMENT_MS}))),
    T.ONEWAY: (0, (("t", b"body", 60_000),)),
    T.SUBSCRIBE: (3, 1, "t", "g", 10, {"lease_ms": 1000}),
    T.PREFETCH: (4, 1, 0),
    T.UNSUBSCRIBE: (5, 1),
    T.PULL: (6, "t", "g", 10, 0, None),
    T.ACK: (7, "t", "g", 1, (ID, ID + 1024), (1, 2)),
    T.NACK: (8, "t", "g", ((ID, 1, 1, None, "it failed"),)),
    T.REJECT: (9, "t", "g", ((ID, 1, 1, None),)),
    T.SNOOZE: (27, "t", "g", ((ID, 1, 1, 60_000),)),
    T.EXTEND: (10, "t", "g", 1, (ID,), (1,), 1000),
    T.RELEASE: (11, "t", "g", 1, (ID,), (1,)),
    T.CANCEL: (12, (ID,), {}),
    T.RESCHEDULE: (13, (ID,), {"delay_ms": 5}),
    T.RUN_NOW: (14, None, OF_KEY),
    T.SPREAD: (16, None, {**OF_KEY, "start_ms": MOMENT_MS, "within_ms": 60_000}),
    T.LOOKUP: (15, None, {**OF_KEY, "newest": True, "until_ms": MOMENT_MS}),
    T.LIST: (
        16,
        {
            "topic": "t",
            "state": "scheduled",
            "key": "k",
            "until_ms": MOMENT_MS,
            "newest": True,
            "after": 5,
            "limit": 10,
        },
    ),
    T.STATS: (17,),
    T.LOAD: (17, {"from_ms": MOMENT_MS, "step_ms": 60_000, "steps": 60}),
    T.CONSUMER_LIST: (17, {"topic": "t", "group": "g", "after": 0, "limit": 10}),
    T.DEAD_LIST: (18, {"topic": "t", "group": "g", "after": (5, "g"), "limit": 10}),
    T.DEAD_REQUEUE: (19, ((ID, "g"),)),
    T.DEAD_DELETE: (20, ((ID, "g"),)),
    T.BACKUP: (21, "copy.db"),
    T.PING: (22,),
    T.BYE: (23,),
    T.GROUP_CREATE: (24, "t", "g", {"since": "first", "rate": 2.5, "retry": "rocketmq"}),
    T.GROUP_DELETE: (25, "t", "g", True),
    T.TOPIC_DELETE: (31, "t", False),
    T.CONFIGURE: (26, "t", None, {"paused": False, "retry": {"kind": "fixed", "delay_ms": 5}}),
    T.STATUS: (24,),
    T.SCHEDULE_PUT: (28, "daily", {"topic": "t", "body": b"hi", "cron": "0 9 * * *"}),
    T.SCHEDULE_LIST: (29, {"after": "daily", "limit": 10}),
    T.SCHEDULE: (30, "daily", "show", {"next": 5}),
    T.PREPARE: (31, "order-17", "payments", 1, (("t", b"body", 60_000),), {"from": "commit"}),
    T.COMMIT: (32, "order-17"),
    T.ROLLBACK: (33, "order-17"),
    T.TRANSACTION_LIST: (34, {"group": "payments", "state": "parked", "limit": 10}),
    T.TRANSACTION_SHOW: (35, "order-17"),
    T.CHECKS: (36, ("payments", "refunds")),
    T.HELD_KEYS: (37, "t", "g", {"limit": 10}),
    T.KEY_LINES: (38, "t", "g", None),
    T.RELEASE_KEY: (39, "t", "g", (ID, ID + 1024), None),
    T.SKIP_KEY: (40, "t", "g", None, "customer-7"),
    T.PAUSE_KEY: (41, "t", "g", "customer-7", None),
    T.RESUME_KEY: (42, "t", "g", None, 7.5),
    T.PUSH_SET: (
        43,
        "t",
        "g",
        "https://93.184.216.34/hook",
        {"secrets": ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",), "format": "cloudevents"},
    ),
    T.FORWARD_SET: (44, "t", "g", "redis://93.184.216.34/0?stream=orders", {"batch": 100}),
    T.TARGET_REMOVE: (45, "t", "g"),
    T.TARGET_LIST: (46, {"topic": "t"}),
    T.PUSH_TEST: (47, "https://93.184.216.34/hook", None),
    T.PUSH_LOG: (48, "t", "g", {"limit": 10}),
    T.PUSH_RESEND: (49, "t", "g", 7),
    T.NODE_LIST: (50,),
    T.SHARD_MOVE: (51, 3, "host-a"),
    T.NODE_DRAIN: (52, "host-a", True),
    T.LEASE: (False,),
    T.TOPIC_LIST: (53, {"after": "t", "limit": 10}),
    T.TOPIC_SHOW: (54, "t"),
    T.OVERVIEW: (55,),
    T.GROUP_LAG: (56, "t", "g"),
    T.TASK_HISTORY: (57, ID),
    T.ENQUEUE_ONCE: (59, b"key", 7, (("t", b"body", 60_000),)),
    T.HISTORY_LIST: (58, {"key": "k", "topic": "t", "since_ms": MOMENT_MS, "limit": 10}),
    T.CHECK: ("payments", (("order-17", MOMENT_MS, 3, 1),)),
    T.BULK_MAKE: (37, "t", "cancel", {"where": "amount > 10", "rate": 5.5, "id": "mine"}),
    T.BULK_PREVIEW: (38, "t", "reschedule", {"shift_ms": -5, "after": (ID, ""), "until_id": ID}),
    T.BULK_LIST: (39, {"topic": "t", "state": "running", "after": "mine", "limit": 10}),
    T.BULK: (40, "mine", "cancel"),
    T.GROUP_RESET: (41, "t", "g", {"to": MOMENT_MS, "rate": 100, "id": "again"}),
    T.GROUP_RESET_PREVIEW: (42, "t", "g", {"to": "first"}),
    T.OK: (2, (MOMENT_MS, (ID, ID + 1024))),
    T.ERROR: (2, "bad_request", "tasks[0].body must be binary, not 'ä'"),
    T.DELIVER: (1, 3, MOMENT_MS, ((ID, 1, MOMENT_MS, b"body"), (ID, 2, 0, b"", {"priority": 9}))),
    T.ALIVE: (0,),
    T.HEARTBEAT: (),
    T.ENDED: (1, "not_found", "group g of topic t was deleted"),
    T.GOODBYE: ("draining", "the daemon is shutting down", "tcp://b:7357"),
}


def sample(kind: T) -> tuple[Any, ...]:
    """The whole frame."""
    return (int(kind), *SAMPLES[kind])
