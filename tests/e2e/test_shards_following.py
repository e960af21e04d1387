"""Real daemons as shards of a folder, of which one is away while groups begin and are set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.ports import free_port
from support.shards import key_in
from tickwheel import Client
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
