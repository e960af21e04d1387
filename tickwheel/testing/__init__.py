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
"""

from tickwheel.testing.wheel import StillBusy, SyncTestWheel, TestWheel, WheelCase

__all__ = ["StillBusy", "SyncTestWheel", "TestWheel", "WheelCase"]
