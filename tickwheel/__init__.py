"""Tickwheel: a hashed timing-wheel scheduler daemon and its client.

``from tickwheel import Client, Task`` needs nothing but the base install (msgpack). Each name is
imported with its first use: the daemon, its history's writer and the command line import this
package too, and start without the client.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tickwheel.version import __version__

if TYPE_CHECKING:
    from tickwheel.client import Client, Delivery, Receipt, Receipts, Retry, Task
    from tickwheel.client.worker import Reject, RetryLater, Snooze, Worker
    from tickwheel.errors import TickwheelError

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
_PLACES = {
    "tickwheel.client": {"Client", "Delivery", "Receipt", "Receipts", "Retry", "Task"},
    "tickwheel.client.worker": {"Reject", "RetryLater", "Snooze", "Worker"},
    "tickwheel.errors": {"TickwheelError"},
}


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            found = globals()[name] = getattr(import_module(place), name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
