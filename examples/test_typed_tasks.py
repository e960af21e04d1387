"""The tests of typed_tasks.py: a function called by its tasks, those of last year too.

Run them with ``pytest examples/test_typed_tasks.py``; no daemon is needed.
"""

import pytest
from typed_tasks import TOPIC, Amount, remind, reminded, worker

from tickwheel.testing import TestWheel


@pytest.fixture(autouse=True)
def nobody_is_reminded() -> None:
    reminded.clear()


async def test_a_reminder_comes_in_time(
    tickwheel: TestWheel, capsys: pytest.CaptureFixture[str]
) -> None:
    later = remind.using(tickwheel.client).options(delay="30d", key="1001")
    await later.enqueue("1001", Amount(4200, "CHF"))
    async with tickwheel.working(worker):
        await tickwheel.advance("29d")
        assert not reminded
        await tickwheel.advance("1d")
    assert capsys.readouterr().out == "order 1001: 42.00 CHF are due\n"


async def test_what_was_enqueued_before_currencies_means_euros(
    tickwheel: TestWheel, capsys: pytest.CaptureFixture[str]
) -> None:
    await tickwheel.client.enqueue(TOPIC, b'{"order": "1000", "amount": 990}', encoding="json")
    async with tickwheel.working(worker):
        await tickwheel.settle()
    assert capsys.readouterr().out == "order 1000: 9.90 EUR are due\n"


async def test_what_does_not_fit_is_a_dead_letter_that_says_where(tickwheel: TestWheel) -> None:
    await tickwheel.client.enqueue(TOPIC, b'{"order": 7, "amount": 990}', encoding="json")
    async with tickwheel.working(worker):
        await tickwheel.settle()
    [letter] = await tickwheel.dead_letters(TOPIC)
    assert "$.order: expected str, got int" in letter.reason
    assert not reminded
