"""The tests of daily_reminder.py: a week in which Berlin's clocks change, in a moment.

Run them with ``pytest examples/test_daily_reminder.py``; no daemon is needed.
"""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from daily_reminder import MAILS, remind_daily

from tickwheel import Delivery, Worker
from tickwheel.testing import TestWheel

BERLIN = ZoneInfo("Europe/Berlin")


async def test_it_comes_at_nine_whatever_the_clocks_do() -> None:
    reminded: list[datetime] = []
    async with TestWheel(datetime(2027, 3, 26, 0, 0, tzinfo=UTC)) as wheel:
        worker = Worker(wheel.client)

        @worker.on(MAILS)
        async def remind(delivery: Delivery) -> None:
            reminded.append(wheel.now)

        await remind_daily(wheel.client)
        async with wheel.working(worker):
            await wheel.advance("4d")
    assert [f"{at.astimezone(BERLIN):%a %H:%M}" for at in reminded] == [
        "Fri 09:00", "Sat 09:00", "Sun 09:00", "Mon 09:00"
    ]  # fmt: skip
    assert [at.hour for at in reminded] == [8, 8, 7, 7], "summer time began on Sunday"
