"""Tickwheel: a hashed timing-wheel scheduler daemon and its client.

Only the client is imported here, so that ``from tickwheel import Client, Task`` needs
nothing but the base install (msgpack); the worker comes with its first use.
"""

from typing import TYPE_CHECKING, Any

from tickwheel.client import Client, Delivery, Receipt, Receipts, Retry, Task
from tickwheel.errors import TickwheelError
from tickwheel.version import __version__

if TYPE_CHECKING:
    from tickwheel.client.worker import Reject, RetryLater, Snooze, Worker

__all__ = [
    "Client",
    "Delivery",
    "Receipt",
    "Receipts",
    "Reject",
    "Retry",
    "RetryLater",
    "Snooze",
    "Task",
    "TickwheelError",
    "Worker",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in {"Reject", "RetryLater", "Snooze", "Worker"}:
        from tickwheel.client import worker

        return getattr(worker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
