"""What goes together: each cell of the table in ``docs/delivery.md``, against a real daemon."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.waiting import comes, soon
from tickwheel import BadRequest, Client, Delivery, Subscription, Task

DOCUMENT = Path(__file__).parents[2] / "docs" / "delivery.md"
DELAY, BATCH, TRANSACTION, ORDER, PRIORITY = (
    "delay",
    "batch",
    "transaction",
    "order key",
    "priority",
)
TTL, RULE, FILTER = "ttl", "rule for its key", "filter"
PUSH, PULL, BROADCAST = "push", "pull", "broadcast"
FEATURES = (DELAY, BATCH, TRANSACTION, ORDER, PRIORITY, TTL, RULE, FILTER, PUSH, PULL, BROADCAST)
DELAY_S = 0.5
FAR_S = 60.0
"""Delay of tasks that must not be due before they are replaced."""
TTL_S = 0.1
ORDERS_WAIT_S = 0.1
"""Real seconds in which no further task of a key is delivered."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


def table() -> dict[frozenset[str], str]:
    """Return the cell of each pair of features."""
    section = DOCUMENT.read_text().partition("## What goes together\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    heads = rows[0][1:]
    assert tuple(heads) == FEATURES
    result: dict[frozenset[str], str] = {}
    for at, row in enumerate(rows[2:]):
        assert row[0] == heads[at] and len(row) == len(heads) + 1
        assert row[at + 1] == "-" and set(row[at + 2 :]) <= {""}
        result |= {frozenset((row[0], head)): row[n] for n, head in enumerate(heads[:at], 1)}
    return result


TABLE = table()
PAIRS = list(combinations(FEATURES, 2))


def test_the_table_has_every_pair_and_every_note() -> None:
    assert TABLE.keys() == {frozenset(pair) for pair in PAIRS}
    assert all(re.fullmatch(r"(yes|no)(, [a-z])?", cell) for cell in TABLE.values())
    section = DOCUMENT.read_text().partition("## What goes together\n")[2]
    notes = re.findall(r"^([a-z])\. \S", section, re.MULTILINE)
    assert notes == sorted({cell[-1] for cell in TABLE.values() if ", " in cell})
    assert all(", " in cell for cell in TABLE.values() if cell.startswith("no"))


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
async def test_two_features_work_together(
    running: Daemon, client: Client, pair: tuple[str, str]
) -> None:
    cell = Cell(client, frozenset(pair), f"cell.{PAIRS.index(pair)}")
    if TABLE[frozenset(pair)].startswith("yes"):
        await soon(cell.run())
    else:
        with pytest.raises(BadRequest):
            await soon(cell.run())


class Cell:
    """Two tasks, a and b, with both features, through a group that has them."""

    def __init__(self, client: Client, asked: frozenset[str], topic: str) -> None:
        self._client = client
        self._asked = asked
        self._topic = topic
        self._ids: dict[bytes, int] = {}
        self._due_ms: dict[bytes, int] = {}

    async def run(self) -> None:
        asked, topic = self._asked, self._topic
        tags = "eu" if FILTER in asked else None
        await self._client.create_group(topic, "g", tags=tags)
        async with AsyncExitStack() as open_:
            broadcast = None
            if BROADCAST in asked:
                listening = self._client.subscribe(topic, group="", broadcast=True, tags=tags)
                broadcast = await open_.enter_async_context(listening)
            await self._enqueue()
            if broadcast is not None:
                await self._broadcast(broadcast)
            await self._all_due()
            await self._consume()

    # --- in ---------------------------------------------------------------------------------------

    def _task(self, body: bytes, **options: Any) -> Task:
        asked = self._asked
        if DELAY in asked or RULE in asked:
            options["delay"] = FAR_S if body.startswith(b"old") else DELAY_S
        if ORDER in asked:
            options["order_key"] = "k"
        if TTL in asked:
            options.setdefault("ttl", 60)
        if FILTER in asked:
            options.setdefault("tag", "eu")
        if RULE in asked:
            options |= {"key": body[-1:].decode(), "if_pending": "replace"}
        if PRIORITY in asked and body == b"b":
            options["priority"] = 9
        return Task(self._topic, body, **options)

    def _tasks(self) -> list[Task]:
        tasks = [self._task(b"a")]
        if RULE in self._asked:
            tasks = [self._task(b"old a"), self._task(b"old b"), *tasks]
        if FILTER in self._asked:
            tasks.append(self._task(b"us", tag="us"))
        if TTL in self._asked:
            tasks.append(self._task(b"late", ttl=TTL_S))
        return [*tasks, self._task(b"b")]

    async def _enqueue(self) -> None:
        tasks, client = self._tasks(), self._client
        if TRANSACTION in self._asked:
            async with client.transaction("p") as transaction:
                if BATCH in self._asked:
                    await transaction.enqueue_many(tasks)
                for task in [] if BATCH in self._asked else tasks:
                    await transaction.enqueue_many([task])
            receipts = transaction.receipts
        elif BATCH in self._asked:
            receipts = await client.enqueue_many(tasks)
        else:
            receipts = [(await client.enqueue_many([task]))[0] for task in tasks]
        for task, receipt in zip(tasks, receipts, strict=True):
            self._ids[task.body], self._due_ms[task.body] = receipt.id, receipt.due_ms
        if RULE in self._asked:
            outcomes = [receipt.outcome for receipt in receipts]
            assert outcomes.count("replaced") == 2, outcomes
            assert self._ids[b"old a"] == self._ids[b"a"]

    # --- out --------------------------------------------------------------------------------------

    @property
    def _expected(self) -> list[bytes]:
        """Return the bodies that the group gets, in order."""
        if PRIORITY in self._asked and ORDER not in self._asked:
            return [b"b", b"a"]
        return [b"a", b"b"]

    async def _all_due(self) -> None:
        """Wait until deliverable tasks are ready and the others have ended."""

        async def states() -> dict[bytes, str]:
            result = await self._client.lookup_many(list(self._ids.values()))
            return dict(zip(self._ids, (task.state for task in result), strict=True))

        ended = {b"us": "filtered", b"late": "expired"}

        async def are_due() -> bool:
            result = await states()
            return all(result[body] == ended.get(body, "ready") for body in result)

        await comes(are_due)

    async def _broadcast(self, heard: Subscription) -> None:
        """Everything, in the order of its due times; nobody acks."""
        got: list[bytes] = []
        while not {b"a", b"b"} <= set(got):
            got.append((await anext(heard)).body)
        assert [body for body in got if body != b"late"] == [b"a", b"b"]

    async def _consume(self) -> None:
        client, topic = self._client, self._topic
        if {PUSH, PULL} <= self._asked:
            first = await client.pull(topic, group="g", max=1, wait=20)
            async with client.subscribe(topic, group="g") as deliveries:
                rest = [await anext(deliveries)]
                await self._end(*first, *rest)
            assert [task.body for task in (*first, *rest)] == self._expected
        elif PULL in self._asked:
            await self._one_after_the_other(
                lambda: client.pull(topic, group="g", max=10, wait=ORDERS_WAIT_S)
            )
        else:
            async with client.subscribe(topic, group="g", prefetch=10) as deliveries:
                await self._one_after_the_other(lambda: pushed(deliveries))

    async def _one_after_the_other(
        self, ask: Callable[[], Coroutine[Any, Any, list[Delivery]]]
    ) -> None:
        """All at once; with an order key each when the one before is acked."""
        got: list[bytes] = []
        while len(got) < 2:
            deliveries: list[Delivery] = []
            while not deliveries or (ORDER not in self._asked and len(got) + len(deliveries) < 2):
                deliveries += await ask()
            if ORDER in self._asked:
                assert len(deliveries) == 1 and await ask() == []
            got += [delivery.body for delivery in deliveries]
            await self._end(*deliveries)
        assert got == self._expected
        assert await ask() == []

    async def _end(self, *deliveries: Delivery) -> None:
        for delivery in deliveries:
            assert delivery.delivered_ms >= delivery.due_ms == self._due_ms[delivery.body]
            assert await delivery.ack() == "acked"


async def pushed(deliveries: Subscription) -> list[Delivery]:
    """Return deliveries that have arrived or arrive soon."""
    try:
        async with asyncio.timeout(ORDERS_WAIT_S):
            return [await anext(deliveries)]
    except TimeoutError:
        return []
