"""How a handler says what an exception alone cannot: raise one of these.

They are no errors of this package (those are ``TickwheelError``s) and are never sent as such.
"""

from __future__ import annotations

from tickwheel.client.times import Duration, duration_ms


class Reject(Exception):
    """It can never succeed: to the dead letters at once, whatever retries are left."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "rejected")
        self.reason = reason


class RetryLater(Exception):
    """Not now: delivered again after ``delay`` (seconds or a timedelta), as one of its retries."""

    def __init__(self, delay: Duration, reason: str | None = None) -> None:
        duration_ms(delay, "delay")  # a wrong one fails where it is written
        super().__init__(reason or f"retry after {delay}")
        self.delay = delay
        self.reason = reason
