"""Real daemons as shards of a folder, of which one is away while groups begin and are set."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.ports import free_port
from support.shards import alone, key_in
from support.waiting import comes
from tickwheel import Client, errors
from tickwheel.persistence import ShardFolder

COUNT, HOME, AWAY = 3, 1, 2
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
                tmp_path / str(shard), store=folder.url(shard), shard=shard, route=",".join(urls)
            )
            daemon._listen = url
            results.append(stack.enter_context(daemon))
        yield results


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


async def test_a_new_group_gets_tasks_of_a_returning_shard(
    daemons: list[Daemon],
) -> None:
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


async def test_racing_clients_end_with_the_home_shards_settings(
    daemons: list[Daemon],
) -> None:
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


async def test_a_deletion_without_all_shards_is_undone(
    daemons: list[Daemon],
) -> None:
    async with Client(daemons[0].url) as client:
        await client.create_group(TOPIC, "g")
        await daemons[AWAY].akill()
        with pytest.raises((errors.Unreachable, errors.SendTimeout)):
            await client.delete_group(TOPIC, "g", timeout=1)
        await daemons[AWAY].astart()
        await comes(lambda: "g of topic" in daemons[0].log_text())

        async def is_gone() -> bool:
            try:
                await client.delete_group(TOPIC, "g")
            except errors.NotFound:
                return True
            return False  # a shard may have looked at the home just before the end of it

        await comes(is_gone)
