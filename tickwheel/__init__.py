"""Tickwheel: a hashed timing-wheel scheduler daemon and its client.

Only the client is imported here, so that ``from tickwheel import Client, Task`` needs
nothing but the base install (msgpack).
"""

from tickwheel.client import Client, Delivery, Receipt, Task
from tickwheel.errors import TickwheelError
from tickwheel.version import __version__

__all__ = ["Client", "Delivery", "Receipt", "Task", "TickwheelError", "__version__"]
