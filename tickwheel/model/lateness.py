"""Why a delivery was late: one word for each cause, in metrics, history and documents."""

from __future__ import annotations

from enum import StrEnum

LATE_MS = 100
"""A first delivery is late when it leaves more than this after its due time; only then has it a
cause. The objective of ``grafana/prometheus`` is the same number."""

SLOW_MS = 50
"""A shorter hold-up of the whole daemon, in ms, is not noted."""


class Cause(StrEnum):
    """What a late delivery has waited for. The order decides when several held it at once: the
    first one counts."""

    UNKNOWN = "unknown"
    """The task was waiting before the daemon's start, and nothing says for what."""
    PAUSED = "paused"
    """The group or its topic was paused."""
    RATE = "rate"
    """A rate limit held the group back."""
    DAEMON_DOWN = "daemon_down"
    """No daemon was active, or it was so lately that consumers were not back."""
    NO_SUBSCRIBER = "no_subscriber"
    """The group had no subscriber."""
    CLOCK = "clock"
    """The wall clock jumped ahead, or was held."""
    STORE = "store"
    """The store was slow or away."""
    LOOP_BUSY = "loop_busy"
    """The daemon had too much to do; also the cause when nothing else explains the wait."""
    LEASE_OVER = "lease_over"
    """The group's consumers let their leases end, and nobody else was there."""
    NO_CREDIT = "no_credit"
    """The group's consumers held as many deliveries as they had asked for."""
    KEY_BUSY = "key_busy"
    """An earlier task of the order key was not done, or its fair share had no place."""


DAEMONS_CAUSES = (Cause.DAEMON_DOWN, Cause.CLOCK, Cause.STORE, Cause.LOOP_BUSY)
"""The causes that lie with the daemon and its machine; the others lie with its users."""
