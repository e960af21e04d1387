"""Resets of groups of a real daemon: by both clients, over HTTP, at the command line; and one that
is killed in the middle, on each store."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from e2e.stores import killed_on
from support.daemon import Daemon
from support.waiting import comes
from tickwheel import BadRequest, Client, Conflict, Delivery, NotFound


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("daemon")
    with Daemon(
        folder, http=True, history_dir=str(folder / "history"), history_bodies=True
    ) as daemon:
        yield daemon


def with_history(store: str, folder: Path) -> dict[str, Any]:
    if store.endswith("history"):
        return {}
    return {"history_dir": str(folder / "history"), "history_bodies": True}


killed = killed_on(
    *("sqlite", "redis without a history", "redis", "asyncio-redis", "postgresql"),
    usual=2,
    settings=with_history,
)


async def had(client: Client, topic: str, group: str, count: int) -> list[Delivery]:
    """Ack `count` deliveries and return them."""
    results: list[Delivery] = []
    while len(results) < count:
        deliveries = await client.pull(topic, group=group, max=count, wait=10)
        assert deliveries, f"{len(results)} of {count} came"
        await asyncio.gather(*(delivery.ack() for delivery in deliveries))
        results += deliveries
    return results


async def finished(client: Client, topic: str, *groups: str, count: int = 3) -> list[int]:
    """Tasks that all these groups have had."""
    for group in groups:
        await client.create_group(topic, group)
    for n in range(count):
        await client.enqueue(topic, b"%d" % n, key=f"k{n}")
    ids = [task.id for task in await had(client, topic, groups[0], count)]
    for group in groups[1:]:
        await had(client, topic, group, count)
    return ids


async def test_a_replayed_task_names_its_original(
    client: Client, running: Daemon, topic: str
) -> None:
    (original,) = await finished(client, topic, "g", count=1)
    bulk = await client.reset_group(topic, "g", to="first")
    await client.wait_bulk(bulk.id, timeout=30)
    (shown,) = [task async for task in client.list_tasks(topic=topic)]
    assert (shown.replay_of, shown.replay_to, shown.key) == (original, "g", "k0")
    (named,) = await client.lookup(topic=topic, key="k0")
    assert (named.id, named.state) == (original, "acked"), "it is not what the key names"
    done = await asyncio.to_thread(Cli(running).run, "show", str(shown.id))
    assert f"replay of {original}" in " ".join(done.stdout.decode().split())
    answer = await ask(running, "GET", f"/v1/tasks/{shown.id}")
    assert (answer["replay_of"], answer["replay_to"]) == (str(original), "g")
    pulled = await ask(running, "POST", f"/v1/topics/{topic}/pull", {"group": "g"})
    assert pulled["deliveries"][0]["replay_of"] == str(original)


async def ask(daemon: Daemon, method: str, path: str, body: object = None) -> dict[str, Any]:
    """Over HTTP."""

    def call() -> dict[str, Any]:
        host, _, port = daemon.http.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=30)
        given = None if body is None else json.dumps(body)
        connection.request(method, path, given, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        result = json.loads(answer.read())
        connection.close()
        assert answer.status in (200, 201), result
        return dict(result)

    return await asyncio.to_thread(call)


async def test_invalid_resets_are_refused(client: Client, topic: str) -> None:
    with pytest.raises(NotFound):
        await client.reset_group(topic, "g", to="first")
    await client.create_group(topic, "g")
    with pytest.raises(BadRequest, match="in the future"):
        await client.reset_group(topic, "g", to=datetime.now(UTC) + timedelta(hours=1))
    with pytest.raises(BadRequest, match="'first' or a datetime"):
        await client.reset_group(topic, "g", to="last")
    bulk = await client.reset_group(topic, "g", to="first", rate=5, id=topic)
    assert (await client.reset_group(topic, "g", to="first", rate=5, id=topic)).id == bulk.id
    with pytest.raises(Conflict, match="another bulk operation has the id"):
        await client.reset_group(topic, "g", to="first", rate=6, id=topic)


async def has_given(client: Client, count: int) -> bool:
    return (await client.show_bulk("r")).changed >= count


@pytest.fixture
async def acked(killed: Daemon) -> AsyncIterator[list[Delivery]]:
    """What group g has had and acked, from any of the daemon's lives."""
    await killed.astart()
    deliveries: list[Delivery] = []

    async def consume() -> None:
        async with (
            Client(killed.url) as client,
            client.subscribe("t", group="g", prefetch=20) as coming,
        ):
            async for delivery in coming:
                await delivery.ack()
                deliveries.append(delivery)

    task = asyncio.create_task(consume())
    yield deliveries
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_reset_resumes_after_kills(killed: Daemon, acked: list[Delivery]) -> None:
    """Each task is given once, however often the daemon dies; the other group has nothing of it."""
    count = 60
    async with Client(killed.url) as client:
        # Two groups: without a history only what one of them still has can come again.
        for group in ("g", "other"):
            await client.create_group("t", group)
        await asyncio.gather(*(client.enqueue("t", b"%d" % n) for n in range(count)))
        ids = [task.id async for task in client.list_tasks(topic="t")]

        async def have_come(deliveries: int) -> bool:
            return len({delivery.id for delivery in acked}) == deliveries

        await comes(partial(have_come, count))
        await client.reset_group("t", "g", to="first", rate=60, id="r")
        for at in (5, 25):
            await comes(partial(has_given, client, at))
            await killed.akill()
            await killed.astart()
        done = await client.wait_bulk("r", timeout=60)
        assert (done.state, done.matched, done.changed) == ("done", count, count)

        await comes(partial(have_come, 2 * count))
        made = {item.id: item.replay_of for item in acked if item.replay_of is not None}
        assert Counter(made.values()) == Counter(ids), "each of them once"
        other = await had(client, "t", "other", count)
        assert sorted(item.id for item in other) == sorted(ids)
        assert {item.replay_of for item in other} == {None}
        assert await client.pull("t", group="other", wait=0.2) == []
