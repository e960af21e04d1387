"""Rows and effects for the store tests: ordinary ones and every extreme."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from support.encodings import LONGEST as ENCODING_LONGEST
from support.traces import HIGHEST, TRACE
from tickwheel.model.kinds import (
    GROUP,
    SESSION,
    Bulk,
    BulkRow,
    BulkState,
    ClaimRow,
    Effects,
    Half,
    Halves,
    Key,
    Kind,
    PausedKey,
    Reach,
    RecordKey,
    Run,
    Schedule,
    ScheduleRow,
    Selection,
    TargetRow,
    TransactionRow,
    TransactionState,
    keyed,
)
from tickwheel.model.policies import BUILT_IN, Coalescing, RetryPolicy
from tickwheel.model.records import (
    DeadRow,
    Failure,
    FormerFilter,
    GroupRow,
    GroupSettings,
    Once,
    OncePart,
    OrderSettings,
    Outcome,
    ProgressRow,
    ProgressState,
    Replayed,
    SessionRow,
    SettingsCounter,
    ShareSettings,
    TaskOptions,
    TaskRow,
)
from tickwheel.persistence.memory import MemoryStore

ID_MAX = 2**63 - 1
MS_MAX = 2**53
UNICODE = "naïve/ключ/钥匙/🗝\x01\t\"'\\,[]{}"

FAILURES = (
    Failure(1, 1_700_000_000_000, "no answer"),
    Failure(65_535, MS_MAX, "r" * 200),
    Failure(3, 0, ""),
)
KNOWN_FAILURES = (Failure(1, 1_700_000_000_000, UNICODE, "worker 10.0.0.7:51234"), *FAILURES)
FULL_EXTRAS = TaskOptions(
    key=UNICODE,
    tag="",
    properties={
        "minus zero": -0.0,
        "tiny": 5e-324,
        "large": 1.7976931348623157e308,
        "int": -(2**63),
        "uint": 2**63,
        "yes": True,
        "no": False,
        "one": 1,
        "": "",
        UNICODE: UNICODE,
    },
    priority=255,
    ttl_ms=MS_MAX,
)
PLAIN_TASKS = (
    TaskRow(1, 0, "t", b""),
    TaskRow(2, -1, "t", b"\x00"),
    TaskRow(3, MS_MAX, "orders.close", bytes(range(256)), FULL_EXTRAS),
    TaskRow(4, 1_700_000_000_000, "t", b"\xff\xfe,\x00", TaskOptions()),
    TaskRow(5, 1, "t", b"x" * 16_384, TaskOptions(priority=1)),
    TaskRow(6, 1, "t", b"y" * 16_385, TaskOptions(key="")),
    TaskRow(7, 1, "t", bytes(1 << 20), TaskOptions(properties={})),
    TaskRow(2**53 + 1, 5, UNICODE, b"beyond doubles"),
    TaskRow(ID_MAX - 1, 5, "t" * 255, b"last but one"),
    TaskRow(ID_MAX, MS_MAX, "t", b"last", TaskOptions(ttl_ms=0)),
)
TASKS = (
    *PLAIN_TASKS,
    TaskRow(21, 7, "t", b"named", TaskOptions(retry="slow")),
    TaskRow(22, 7, "t", b"numbers", TaskOptions(priority=3, retry=RetryPolicy(1, 1.5, 2, 3, 0.25))),
    TaskRow(23, 7, "t", b"table", TaskOptions(retry=BUILT_IN["rocketmq"])),
    TaskRow(31, 7, "t", b"placed", TaskOptions(order_id=ID_MAX)),
    TaskRow(32, 7, "t", b"placed too", TaskOptions("k", ttl_ms=5, retry="slow", order_id=33)),
    TaskRow(141, 9, "t", b"windowed", TaskOptions(within_ms=5, asked_ms=7)),
    TaskRow(
        142, MS_MAX, "t", b"windowed too",
        TaskOptions("k", "t", {"a": 1}, 7, 5, "slow", 43, MS_MAX, MS_MAX),
    ),
    TaskRow(151, 9, "t", b"ordered", TaskOptions(order_key="customer-7")),
    TaskRow(
        152, MS_MAX, "t", b"ordered too",
        TaskOptions("k", "t", {"a": 1}, 7, 5, None, 53, MS_MAX, MS_MAX, UNICODE),
    ),
    TaskRow(153, 9, "t", b"ordered by nothing", TaskOptions(order_key="")),
    TaskRow(161, 9, "t", b"again", TaskOptions(replayed=Replayed(3, "default"))),
    TaskRow(
        162, MS_MAX, "t", b"again too",
        TaskOptions(
            None, "t", {"a": 1}, 7, 5, "slow", 53, None, None, UNICODE,
            Replayed(ID_MAX, UNICODE, UNICODE),
        ),
    ),
    TaskRow(171, 9, "t", b"traced", TaskOptions(trace=TRACE)),
    TaskRow(
        172, MS_MAX, "t", b"traced too",
        TaskOptions(
            None, "t", {"a": 1}, 7, 5, "slow", 53, None, None, UNICODE,
            Replayed(ID_MAX, UNICODE, UNICODE), HIGHEST,
        ),
    ),
    TaskRow(181, 9, "t", b'{"n": 1}', TaskOptions(encoding="json;v=2")),
    TaskRow(
        182, MS_MAX, "t", b"\x00\xff",
        TaskOptions(
            None, "t", {"a": 1}, 7, 5, "slow", 53, None, None, UNICODE,
            Replayed(ID_MAX, UNICODE, UNICODE), HIGHEST, ENCODING_LONGEST,
        ),
    ),
    TaskRow(191, 9, "t", b"of a customer", TaskOptions(key="k", shard_by="customer-7")),
    TaskRow(
        192, MS_MAX, "t", b"",
        TaskOptions(
            UNICODE, "t", {"a": 1}, 7, 5, "slow", 53, None, None, None,
            Replayed(ID_MAX, UNICODE, UNICODE), HIGHEST, ENCODING_LONGEST, UNICODE,
        ),
    ),
)  # fmt: skip
PROGRESS = (
    ProgressRow(3, "default", ProgressState.IN_FLIGHT, 1, 1_700_000_030_000, 1),
    ProgressRow(3, UNICODE, ProgressState.WAITING, 65_535, MS_MAX, 2**31, FAILURES),
    ProgressRow(3, "g" * 255, ProgressState.DONE, 1, 0, 0),
    ProgressRow(3, "late", ProgressState.EXPIRED, 2, 0, 0),
    ProgressRow(ID_MAX, "a", ProgressState.RELEASED, 2, -5, 7, FAILURES[:1]),
    ProgressRow(21, "a", ProgressState.WAITING, 2, 5, 7, KNOWN_FAILURES),
    ProgressRow(22, "b", ProgressState.WAITING, 0, MS_MAX, 7, KNOWN_FAILURES, 2, 1_000, 1),
    ProgressRow(22, "c", ProgressState.WAITING, 0, MS_MAX, 7, (), 0, 1),
    ProgressRow(151, UNICODE, ProgressState.HELD, 16, MS_MAX, 7, KNOWN_FAILURES),
    ProgressRow(22, "x", ProgressState.IN_FLIGHT, 1, MS_MAX, 7, (), 0, 0, 0, ID_MAX),
    ProgressRow(22, "y", ProgressState.REPLACED, 1, 0, 0),
)
DEAD = (
    DeadRow(3, "billing", "orders.close", MS_MAX, 16, UNICODE, FAILURES, 0, ID_MAX),
    DeadRow(4, "billing", "t", 5, 1, ""),
    DeadRow(ID_MAX, "b", "t", 6, 17, "r" * 200, FAILURES[:2]),
    DeadRow(22, "a", "t", 5, 2, "why", KNOWN_FAILURES, 2, 1 << 40),
    DeadRow(22, "d", "t", 5, 20, "why", KNOWN_FAILURES, 17, 5, 3),
)
GROUPS = (
    GroupRow("orders.close", "default", 0),
    GroupRow("orders.close", UNICODE, MS_MAX),
    GroupRow("t", "default", 1_700_000_000_000),
    GroupRow("orders.close", "", 0, GroupSettings(paused=True)),
    GroupRow("t", "", 0, GroupSettings(rate=0.125, burst=2**31, retry=BUILT_IN["rocketmq"])),
    GroupRow("t", "named", 5, GroupSettings(retry="slow", closed_ms=MS_MAX, closed_id=ID_MAX)),
    GroupRow("t", "nothing set", 5, GroupSettings()),
    GroupRow("t", "placed", 0, None, 0),
    GroupRow("t", "placed too", MS_MAX, GroupSettings(closed_ms=-1, closed_id=5), ID_MAX - 1),
    GroupRow("alone", "", 0, GroupSettings(broadcast_only=True)),
    GroupRow(
        "alone too",
        "",
        0,
        GroupSettings(rate=0.5, if_pending=Coalescing("keep"), broadcast_only=True),
    ),
    GroupRow("tags", "g", 0, GroupSettings(tags="eu || us"), 5),
    GroupRow(
        "both",
        UNICODE,
        MS_MAX,
        GroupSettings(
            rate=0.5,
            retry="slow",
            tags=UNICODE,
            where='"' + UNICODE.replace('"', "") + '" IS NULL',
            former=(
                FormerFilter(None, None, -1, 0),
                FormerFilter("a", "b > 1 AND c LIKE '%'", MS_MAX, ID_MAX),
            ),
        ),
        ID_MAX,
    ),
    GroupRow("former", "g", 0, GroupSettings(former=(FormerFilter("a", None, 5, 6),)), 7),
    GroupRow("retried", "g", 0, GroupSettings(order=OrderSettings(10)), 5),
    GroupRow("held", "g", 0, GroupSettings(order=OrderSettings(attempts=1, failure="hold")), 5),
    GroupRow(
        "shared",
        UNICODE,
        MS_MAX,
        GroupSettings(
            True, 0.5, 3, "slow", tags="a", former=(FormerFilter("a", None, 5, 6),),
            order=OrderSettings(30_000, 2**31, "dead"),
            shares=ShareSettings(UNICODE, 2**31, 0.125),
        ),
        ID_MAX,
    ),
    GroupRow("fair", "g", 0, GroupSettings(shares=ShareSettings("tag", 1)), 7),
    GroupRow("paused", "g", 0, GroupSettings(paused=True, paused_ms=MS_MAX), 7),
    GroupRow("ruled", "", 0, GroupSettings(if_pending=Coalescing("keep"))),
    GroupRow(
        "ruled too",
        "",
        0,
        GroupSettings(
            rate=0.5,
            retry="slow",
            if_pending=Coalescing("replace", MS_MAX, "started", "due", "later", 1),
        ),
    ),
    GroupRow("numbered", "g", 5, None, 7, 1),
    GroupRow("numbered", "", 0, GroupSettings(paused=True), version=2**53),
)  # fmt: skip
"""Groups; rows with an empty name hold the settings of their topic."""
SCHEDULES = (
    ScheduleRow(Schedule("daily", "mails", b"hi", None, "0 9 * * *", "Europe/Berlin", None, 0)),
    ScheduleRow(
        Schedule(
            "every.5s", "t", bytes(range(256)), FULL_EXTRAS, None, "UTC", 5_000, MS_MAX, 2**31, 5,
            ID_MAX, 7, "skip", "both", "all", MS_MAX, "queue_one",
        ),
        paused=True,
        next_ms=MS_MAX,
        runs=2**40,
        last_id=ID_MAX,
        queued_ms=-5,
        recent=(Run(5, 6, "missed", occurrences=1_000), Run(7, 8, "fired", ID_MAX)),
    ),
    ScheduleRow(
        Schedule(
            "ordered", "t", b"", TaskOptions(within_ms=MS_MAX, order_key=UNICODE), "0 9 * * *",
            "UTC", None, 0,
        )
    ),
)  # fmt: skip
HALVES = (
    Halves("order-17", 1, 1_700_000_000_000, (Half("t", 5, None, b"", None),)),
    Halves(
        "order-17",
        2**31 - 1,
        MS_MAX,
        (
            Half("t", MS_MAX, 0, bytes(range(256)), FULL_EXTRAS),
            Half(UNICODE, -5, MS_MAX, b"x" * 20_000, TaskOptions("k")),
        ),
    ),
)
TRANSACTIONS: tuple[TransactionRow | Halves, ...] = (
    *HALVES,
    TransactionRow("order-17", "payments", TransactionState.OPEN, 5, 6, 3, 20_999, ("t", UNICODE)),
    TransactionRow(
        "a/1", "p", TransactionState.COMMITTED, 5, 6, 1, 2, ("t",), 3, 4, MS_MAX, MS_MAX, ID_MAX
    ),
    TransactionRow(
        "b", "p", TransactionState.PARKED, 0, 0, checks=15, owner=UNICODE, reached=Reach.ANOTHER
    ),
    TransactionRow("c", "p", TransactionState.ROLLED_BACK, 0, 0, decided_ms=7),
)
BULKS: tuple[BulkRow, ...] = (
    BulkRow(Bulk("a", "cancel", "t", Selection(), (), None, 0, 0)),
    BulkRow(
        Bulk(
            "b/1",
            "reschedule",
            UNICODE,
            Selection("a || b", "x = 'é'", UNICODE, -5, MS_MAX, "ready", "g", UNICODE),
            (("shift_ms", -MS_MAX), ("text", UNICODE), ("share", 0.5), ("yes", True)),
            0.001,
            MS_MAX,
            ID_MAX,
            UNICODE,
        ),
        BulkState.FAILED,
        (ID_MAX, UNICODE),
        2**53,
        2**53 - 1,
        17,
        (("due_too_far", 2**53 - 19), ("in_flight", 1)),
        MS_MAX,
        UNICODE,
    ),
    BulkRow(Bulk("c", "delete", "t", Selection(group="g"), (), 5.0, 1, 2, "ops"), BulkState.DONE),
    BulkRow(Bulk("d", "later", "t", Selection(), (), None, 1, 2), BulkState.CANCELLED, (7, "")),
)
PAUSED_KEYS = (
    PausedKey("t", "g", None, "k", 0, ""),
    PausedKey("t", "g", "tag", "k", MS_MAX, UNICODE),
    PausedKey("t", UNICODE, UNICODE, UNICODE, 1, "ops"),
    *(PausedKey("t", "g", "p", value, 1, "ops") for value in ("1", 1, 1.5, True, -(2**63))),
)
TARGETS = (
    TargetRow("t", "g", "push", "https://example.com/hook", ("whsec_" + "A" * 32,), (), 0, ""),
    TargetRow(
        "t", UNICODE, "forward", UNICODE, ("a", UNICODE),
        (("format", UNICODE), ("concurrency", 2**53), ("rate", 1.5), ("flag", True)),
        MS_MAX, UNICODE, MS_MAX, UNICODE,
    ),
)  # fmt: skip
COUNTER_ROW = SettingsCounter(2**53, ID_MAX)
CLAIMS = (
    ClaimRow("schedule", "nightly", "t", 0, 1, 0),
    ClaimRow("transaction", "x" * 255, "t", 1023, ID_MAX, MS_MAX, is_over=True),
)
SESSIONS = (
    SessionRow(b"\x00" * 16, 0, 0, ()),
    SessionRow(
        bytes(range(16)),
        2**53 - 1,
        MS_MAX,
        tuple((2**53 - 1024 + i, ID_MAX - i, 16_384, MS_MAX) for i in range(1024)),
    ),
    SessionRow(
        b"m" * 16,
        5,
        MS_MAX,
        ((5, 7, 1, 1), (6, ID_MAX, 2, MS_MAX), (7, 0, 1, 3)),
        ((6, ((1, ID_MAX, MS_MAX), (2, 3, -5))), (7, ((4, ID_MAX, 0),))),
    ),
    SessionRow(b"o" * 16, 0, 1, ((2**53 - 1, 7, 1, 1),), once=Once(b"\x00" * 255)),
    SessionRow(
        b"p" * 16,
        0,
        MS_MAX,
        ((2**53 - 1, 0, 0, 1),),
        once=Once(
            b"k",
            1024,
            (
                OncePart(0, 7, 2, 1),
                OncePart(1023, 0, 1, MS_MAX, ((2, ID_MAX, MS_MAX),)),
                OncePart(1, 7, 2, 1, chosen=((ID_MAX, MS_MAX),)),
            ),
        ),
    ),
)


def everything() -> Effects:
    """Return a batch with every extreme."""
    return Effects(
        enqueued={row.id: row for row in TASKS},
        ended={ID_MAX - 5: Outcome.ACKED, 2**53 + 3: Outcome.DELETED, 9: Outcome.EXPIRED},
        progress={(row.id, row.group): row for row in PROGRESS},
        dead={(row.id, row.group): row for row in DEAD},
        records=keyed(GROUP, GROUPS) | keyed(SESSION, SESSIONS),
        id_mark=ID_MAX,
        position_ms=MS_MAX,
    )


def dropped(kind: Kind[Any], *keys: Key) -> dict[RecordKey, Any]:
    """Return changes that drop the records with these keys."""
    return {(kind, key): None for key in keys}


def kept(store: MemoryStore, kind: Kind[Any]) -> dict[Any, Any]:
    """Return the rows of a kind in a memory store, by key."""
    return {key: row for (other, key), row in store._records.items() if other is kind}


def tasks(
    ids: Iterable[int], topic: str = "t", due_ms: int = 1_000, body: bytes = b"body"
) -> Effects:
    """Return a batch that creates tasks."""
    rows = {task_id: TaskRow(task_id, due_ms, topic, body) for task_id in ids}
    return Effects(enqueued=rows, id_mark=max(rows, default=0))


def ended(ids: Iterable[int], how: Outcome = Outcome.ACKED) -> Effects:
    """Return a batch that ends tasks."""
    return Effects(ended=dict.fromkeys(ids, how))


def in_flight(task_id: int, group: str = "default", attempt: int = 1) -> ProgressRow:
    return ProgressRow(task_id, group, ProgressState.IN_FLIGHT, attempt, 31_000, 1)
