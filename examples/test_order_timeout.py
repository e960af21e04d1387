"""The tests of order_timeout.py: half an hour, a crash and a duplicate, in a moment.

Run them with ``pytest examples/test_order_timeout.py``; no daemon is needed.
"""

import pytest
from order_timeout import TOPIC, closed, pay, place, worker

from tickwheel.testing import TestWheel

HALF_AN_HOUR_S = 1800.0


@pytest.fixture(autouse=True)
def nothing_is_closed() -> None:
    closed.clear()


async def test_who_does_not_pay_in_time_finds_the_order_closed(tickwheel: TestWheel) -> None:
    await place(tickwheel.client, "1001", HALF_AN_HOUR_S)
    async with tickwheel.working(worker):
        await tickwheel.advance("29m59s")
        assert not closed
        await tickwheel.advance("1s")
        assert closed == {"1001"}


async def test_who_pays_keeps_it(tickwheel: TestWheel) -> None:
    await place(tickwheel.client, "1001", HALF_AN_HOUR_S)
    await tickwheel.assert_enqueued(TOPIC, key="1001", within="30m")
    assert await pay(tickwheel.client, "1001") == "cancelled"
    async with tickwheel.working(worker):
        await tickwheel.advance("1d")
    assert not closed


async def test_neither_a_crash_nor_a_duplicate_does_harm(
    tickwheel: TestWheel, capsys: pytest.CaptureFixture[str]
) -> None:
    await place(tickwheel.client, "1001", HALF_AN_HOUR_S)
    await tickwheel.advance("20m")
    await tickwheel.crash()
    tickwheel.duplicate()
    async with tickwheel.working(worker):
        await tickwheel.advance("10m")
    assert capsys.readouterr().out.count("closed (0 ms late)") == 1
    assert await tickwheel.enqueued() == []
