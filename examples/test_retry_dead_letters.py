"""The test of retry_dead_letters.py: three attempts, a dead letter and its second life.

Run it with ``pytest examples/test_retry_dead_letters.py``; no daemon is needed.
"""

import asyncio

import pytest
from retry_dead_letters import GROUP, TOPIC, consume_one, troubles

from tickwheel.testing import TestWheel


async def test_what_fails_three_times_waits_for_somebody_and_is_sent_then(
    tickwheel: TestWheel, capsys: pytest.CaptureFixture[str]
) -> None:
    troubles[:] = ["the mail server does not answer"]
    receipt = await tickwheel.client.enqueue(TOPIC, b"ann@example.com")
    consuming = asyncio.create_task(consume_one(tickwheel.client, attempts=3))
    await tickwheel.advance("200ms")
    assert not consuming.done()
    await tickwheel.advance("200ms")
    await consuming

    [letter] = await tickwheel.dead_letters(TOPIC, GROUP)
    assert letter.reason == "the mail server does not answer"
    assert [failure.attempt for failure in letter.failures] == [1, 2, 3]

    troubles.clear()
    assert await tickwheel.client.dead_requeue([(receipt.id, GROUP)]) == ["requeued"]
    await consume_one(tickwheel.client, attempts=1)
    assert "sent to ann@example.com" in capsys.readouterr().out
    assert await tickwheel.enqueued() == []
