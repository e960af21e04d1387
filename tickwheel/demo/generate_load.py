"""Who enqueues what in synthetic history: topics, their groups, their days. Data, no logic."""

from __future__ import annotations

from dataclasses import dataclass

_MINUTE, _HOUR = 60_000, 3_600_000

OFFICE = (1, 1, 1, 1, 1, 2, 4, 8, 14, 18, 20, 19, 16, 17, 19, 18, 16, 13, 9, 7, 5, 4, 2, 1)
EVENING = (5, 3, 2, 1, 1, 1, 2, 4, 6, 7, 8, 9, 11, 10, 9, 9, 10, 13, 17, 21, 23, 20, 14, 9)
FLAT = (10,) * 24
NIGHTLY = (0, 0, 120, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 60)


@dataclass(frozen=True)
class Group:
    """One subscriber group: how quick, how often failing, whether it falls behind by day."""

    name: str
    subscribers: tuple[str, ...]
    ack_ms: float
    failing: float
    retries: int = 5
    slow: bool = False
    reasons: tuple[str, ...] = ("timed out",)


@dataclass(frozen=True)
class Load:
    """One topic. Delays are spread evenly over the magnitudes between their bounds."""

    topic: str
    share: float
    rhythm: tuple[int, ...]
    delay_min_ms: int
    delay_max_ms: int
    producers: tuple[str, ...]
    groups: tuple[Group, ...]
    key: str = ""
    keys: int = 0
    burst_ms: int = 0
    on_minute: bool = False
    crowd_ms: float = 0.0
    ttl_ms: int = 0


def _workers(name: str, count: int) -> tuple[str, ...]:
    return tuple(f"{name}-{i}@10.0.3.{10 + i}:{50_000 + 7 * i}" for i in range(1, count + 1))


LOADS = (
    Load(
        "orders.close", 24, OFFICE, 30 * _MINUTE, 2 * _HOUR, ("shop-api-1", "shop-api-2"),
        (
            Group("billing", _workers("billing", 4), 24, 0.012, reasons=(
                "payment provider: 503", "payment provider: timed out", "order is locked")),
            Group("audit", _workers("audit", 1), 3, 0.0005, reasons=("disk quota",)),
        ),
        key="customer", keys=4_000, on_minute=True, crowd_ms=9,
    ),
    Load(
        "push.reminder", 30, EVENING, 1_000, 6 * _HOUR, ("app-backend-1", "app-backend-2",
        "app-backend-3"),
        (Group("push", _workers("push", 6), 38, 0.004, retries=3, slow=True, reasons=(
            "device token is gone", "rate limited")),),
        key="device", keys=60_000, ttl_ms=10 * _MINUTE,
    ),
    Load(
        "webhooks:deliver", 14, FLAT, 1_000, 10 * _MINUTE, ("events-1",),
        (Group("dispatch", _workers("dispatch", 3), 180, 0.16, slow=True, reasons=(
            "HTTP 500", "HTTP 404", "HTTP 410", "connection refused", "timed out",
            "TLS: expired")),),
        key="endpoint", keys=300,
    ),
    Load(
        "payments/retry", 6, OFFICE, 60_000, 24 * _HOUR, ("payments-1", "payments-2"),
        (Group("gateway", _workers("gateway", 2), 320, 0.06, retries=6, reasons=(
            "card declined", "issuer unavailable", "3-D Secure pending")),),
        key="card", keys=9_000,
    ),
    Load(
        "sessions.expire", 16, EVENING, 15 * _MINUTE, 30 * _MINUTE, ("auth-1", "auth-2"),
        (Group("default", _workers("janitor", 1), 2, 0.0003, reasons=("store busy",)),),
    ),
    Load(
        "reports/nightly", 4, NIGHTLY, 1_000, 20 * _MINUTE, ("cron-1",),
        (Group("render", _workers("render", 2), 900, 0.02, retries=2, reasons=(
            "out of memory", "no data for day")),),
        key="tenant", keys=1_200, burst_ms=90_000, crowd_ms=420,
    ),
    Load(
        "search.index", 6, OFFICE, 500, 5_000, ("catalogue-1",),
        (Group("indexer", _workers("indexer", 2), 55, 0.008, slow=True, reasons=(
            "version conflict", "shard not ready")),),
        key="product", keys=20_000,
    ),
    Load(
        "legacy.import:v1", 0.02, FLAT, 60_000, 4 * _HOUR, ("legacy-importer",), (),
    ),
)  # fmt: skip
"""The last one has no subscriber: its tasks stay, and a report lists them as stuck."""
