"""The tests of worker_app.py: what each end of a handler means for its task, in a moment.

Run them with ``pytest examples/test_worker_app.py``; no daemon is needed.
"""

import pytest
from worker_app import worker

from tickwheel.testing import TestWheel

REPORTS = "example.reports"


async def test_a_report_that_is_not_ready_is_asked_for_again(
    tickwheel: TestWheel, capsys: pytest.CaptureFixture[str]
) -> None:
    async with tickwheel.working(worker):
        for name in (b"monthly", b"early", b"broken"):
            await tickwheel.client.enqueue(REPORTS, name)
        await tickwheel.settle()
        assert capsys.readouterr().out == "report monthly: printed at attempt 1\n"
        await tickwheel.advance("1s")
    printed = capsys.readouterr().out.splitlines()
    # The group's policy has it again 0.2 s later, the handler of the early one asked for 0.3 s.
    assert printed == [f"report {name}: printed at attempt 2" for name in ("broken", "early")]


async def test_what_does_not_exist_is_a_dead_letter(tickwheel: TestWheel) -> None:
    async with tickwheel.working(worker):
        await tickwheel.client.enqueue(REPORTS, b"nonsense")
        await tickwheel.settle()
    [letter] = await tickwheel.dead_letters(REPORTS)
    assert letter.reason == "there is no such report"


async def test_a_plain_function_works_in_a_thread(
    tickwheel: TestWheel, capsys: pytest.CaptureFixture[str]
) -> None:
    async with tickwheel.working(worker):
        await tickwheel.client.enqueue("example.cleanup", b"/var/spool", delay=60)
        await tickwheel.advance("1m")
    assert capsys.readouterr().out == "cleaned /var/spool\n"
    assert await tickwheel.enqueued() == []
