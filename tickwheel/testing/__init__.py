"""For the tests of programs that use Tickwheel: the real daemon in the test's own process, on a
clock that the test moves.

    from tickwheel.testing import TestWheel

    async with TestWheel() as wheel:
        await wheel.client.enqueue("orders.close", b"42", delay=1800)
        async with wheel.working(worker):
            await wheel.advance("30m")

``TestWheel`` is for programs with an event loop, ``SyncTestWheel`` for those without. With pytest
there is nothing to import: the fixtures ``tickwheel`` and ``tickwheel_sync`` are there once the
package is installed. ``WheelCase`` is for unittest. Needs the extra ``server``.

Each name is imported with its first use: pytest loads the fixtures of whoever has the package, also
of those who have the client alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tickwheel.errors import module_needs_extra

if TYPE_CHECKING:
    from tickwheel.testing.wheel import StillBusy, SyncTestWheel, TestWheel, WheelCase

__all__ = ["StillBusy", "SyncTestWheel", "TestWheel", "WheelCase"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with module_needs_extra("tickwheel.testing", "server"):
        return getattr(import_module("tickwheel.testing.wheel"), name)
