"""Real daemons as shards of a folder: one is killed while tasks come and go, or away while groups
begin and are set."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from outbound.endpoint import SECRET, Endpoint, serving
from support.daemon import Daemon
from support.ports import free_port
from support.shards import alone, key_in
from support.waiting import comes
from tickwheel import Client, Task, errors, sync
from tickwheel.persistence import ShardFolder

COUNT, HOME, AWAY = 3, 1, 2
KILLS = 3
TOPIC = key_in(HOME, COUNT, "t")
"""Its home is shard 1."""


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[list[Daemon]]:
    urls = [f"tcp://127.0.0.1:{free_port()}" for _ in range(COUNT)]
    (tmp_path / "shards").mkdir()
    folder = ShardFolder(f"{tmp_path}/shards/")
    with ExitStack() as stack:
        results = []
        for shard, url in enumerate(urls):
            daemon = Daemon(
                tmp_path / str(shard),
                store=folder.url(shard),
                shard=shard,
                route=",".join(urls),
                http=True,
                push_allow="127.0.0.0/8",
            )
            daemon._listen = url
            results.append(stack.enter_context(daemon))
        yield results


async def test_a_killed_shard_loses_no_task_and_keeps_the_order(daemons: list[Daemon]) -> None:
    keys = [f"o{n}" for n in range(20)]
    confirmed: dict[str, list[int]] = {key: [] for key in keys}
    first_seen: dict[str, list[int]] = {key: [] for key in keys}
    is_over = asyncio.Event()

    async def produce(client: Client) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            tasks = [Task("t", b"%d" % number, order_key=key) for key in keys]
            await client.enqueue_many(tasks, timeout=30)
            for key in keys:
                confirmed[key].append(number)

    async def consume(client: Client) -> None:
        async for delivery in client.subscribe("t", group="g"):
            seen = first_seen[delivery.order_key or ""]
            if int(delivery.body) not in seen:
                seen.append(int(delivery.body))
            delivery.ack_nowait()

    async with Client(daemons[0].url) as producer, Client(daemons[2].url) as consumer:
        await producer.create_group("t", "g", order_failure="retry")
        consuming = asyncio.ensure_future(consume(consumer))
        producing = asyncio.ensure_future(produce(producer))
        for kill in range(KILLS):
            await comes(lambda least=kill * 20 + 5: len(confirmed["o0"]) >= least)
            await daemons[1].arestart()
        is_over.set()
        await producing
        await comes(lambda: first_seen == confirmed)
        consuming.cancel()
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in first_seen.values())


def test_programs_without_an_event_loop_have_all_shards(daemons: list[Daemon]) -> None:
    with sync.Client(daemons[1].url) as client:
        keys = [key_in(shard, COUNT) for shard in range(COUNT)]
        made = client.enqueue_many([Task("t", b"", key=key) for key in keys])
        assert [task.id % 1024 for task in made] == [0, 1, 2]
        with client.subscribe("t") as deliveries:
            results = [next(deliveries) for _ in keys]
            assert [delivery.ack() for delivery in results] == ["acked"] * COUNT
        assert client.stats().acked == COUNT
        daemons[2].kill()
        with pytest.raises((errors.Unreachable, errors.SendTimeout)):
            client.enqueue("t", b"", key=keys[2], timeout=0.5)
        assert client.enqueue("t", b"", key=keys[0]).id % 1024 == 0


def test_the_sharded_clients_page_runs(daemons: list[Daemon]) -> None:
    page = (Path(__file__).parents[2] / "docs/sharded-clients.md").read_text()
    [program] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    env = {**os.environ, "TICKWHEEL_URL": daemons[1].url}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    with sync.Client(daemons[0].url) as client:
        assert [task.key for task in client.list_tasks()] == ["order-42"]


async def test_each_shard_pushes_its_own_tasks(daemons: list[Daemon]) -> None:
    keys = [key_in(shard, COUNT, f"{n}-") for shard in range(COUNT) for n in range(10)]
    async with serving(Endpoint()) as endpoint, Client(daemons[1].url) as client:
        await client.set_push("t", "g", endpoint.url, secrets=[SECRET])
        await client.enqueue_many([Task("t", key.encode(), key=key) for key in keys])

        async def acked() -> int:
            (target,) = await client.targets()
            return target.acked if target.acked == len(keys) else 0

        await comes(acked)
    assert sorted(got.body.decode() for got in endpoint.got) == sorted(keys), "each once"
    assert not endpoint.bad


async def test_a_returning_shard_follows_before_it_serves(
    daemons: list[Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    async with Client(daemons[0].url) as client:
        await client.create_group(TOPIC, "old", rate=30)
        await daemons[AWAY].akill()
        await client.create_group(TOPIC, "g", tags="eu")
        await client.configure(TOPIC, group="old", paused=True)
        await daemons[AWAY].astart()
        key = key_in(AWAY, COUNT)
        receipt = await client.enqueue(TOPIC, b"", key=key, tag="us")
        theirs = await client.enqueue(TOPIC, b"", key=key, tag="eu")
        assert receipt.id % 1024 == theirs.id % 1024 == AWAY
        (delivery,) = await client.pull(TOPIC, group="g", wait=30)
        assert delivery.id == theirs.id, "the filter holds there"
        await delivery.ack()
        assert not await client.pull(TOPIC, group="old", wait=0), "it is paused there"
    log = daemons[AWAY].log_text()
    assert "settings_followed" in log and log.rindex("settings_followed") < log.rindex("serving")


async def test_a_new_group_gets_tasks_of_a_returning_shard(daemons: list[Daemon]) -> None:
    for away in (AWAY, HOME):
        group = f"g{away}"
        await daemons[away].akill()
        async with Client(daemons[0].url) as client:
            subscription = client.subscribe(TOPIC, group=group)
            await subscription.start()
            await subscription.close()
        await daemons[away].astart()
        async with Client(daemons[0].url) as client:
            receipt = await client.enqueue(TOPIC, b"", key=key_in(away, COUNT))
            (delivery,) = await client.pull(TOPIC, group=group, wait=30)
            assert delivery.id == receipt.id
            await delivery.ack()


async def test_racing_clients_end_with_the_home_shards_settings(daemons: list[Daemon]) -> None:
    async with Client(daemons[0].url) as one, Client(daemons[2].url) as other:
        await one.create_group(TOPIC, "g")
        for n in range(1, 20):
            await asyncio.gather(
                one.configure(TOPIC, group="g", rate=float(n)),
                other.configure(TOPIC, group="g", rate=float(100 + n)),
            )

        async def rates() -> set[float]:
            stats = [await alone(one, n).stats() for n in range(COUNT)]
            return {found.topics[TOPIC].groups["g"].rate for found in stats}

        async def are_one() -> bool:
            return len(await rates()) == 1

        await comes(are_one)
