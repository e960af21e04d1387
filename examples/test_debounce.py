"""The tests of debounce.py: who types and who never stops, in a moment.

Run them with ``pytest examples/test_debounce.py``; no daemon is needed.
"""

from debounce import LONGEST_S, TOPIC, changed

from tickwheel import Delivery, Worker
from tickwheel.testing import TestWheel


def indexing(wheel: TestWheel, indexed: list[tuple[float, bytes]]) -> Worker:
    """A worker that notes when it was given which text, in seconds from now."""
    worker, begin = Worker(wheel.client), wheel.now

    @worker.on(TOPIC)
    async def index(delivery: Delivery) -> None:
        indexed.append(((wheel.now - begin).total_seconds(), delivery.body))

    return worker


async def test_a_burst_of_changes_is_indexed_once_with_the_newest_text(
    tickwheel: TestWheel,
) -> None:
    indexed: list[tuple[float, bytes]] = []
    async with tickwheel.working(indexing(tickwheel, indexed)):
        for number in range(10):
            await changed(tickwheel.client, "document-7", b"text %d" % number)
            await tickwheel.advance("100ms")
        await tickwheel.advance("1h")
    assert indexed == [(1.9, b"text 9")]


async def test_who_never_stops_typing_waits_no_longer_than_the_longest_wait(
    tickwheel: TestWheel,
) -> None:
    indexed: list[tuple[float, bytes]] = []
    async with tickwheel.working(indexing(tickwheel, indexed)):
        for number in range(100):
            await changed(tickwheel.client, "document-7", b"text %d" % number)
            await tickwheel.advance("100ms")
    assert [at for at, _ in indexed] == [LONGEST_S, 2 * LONGEST_S]
