"""Tests of programs that use Tickwheel: the real daemon in the test's process, with a manual clock.

    from tickwheel.testing import TestWheel

    async with TestWheel() as wheel:
        await wheel.client.enqueue("orders.close", b"42", delay=1800)
        async with wheel.working(worker):
            await wheel.advance("30m")

``TestWheel`` is for asynchronous programs, ``SyncTestWheel`` for blocking ones. pytest needs no
import: the installed package provides the fixtures ``tickwheel`` and ``tickwheel_sync``.
``WheelCase`` is for unittest. All of them need the extra ``server``.

Each name is imported on first use, because pytest also loads the fixtures if only the client is
installed.
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
