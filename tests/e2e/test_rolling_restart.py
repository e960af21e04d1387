"""All shards, or all nodes, are restarted one after the other, as docs/scaling.md says, while
clients that have their defaults work: they see no error, and nothing is lost. How late tasks were
is printed."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.nodes import Nodes
from support.ports import free_ports
from support.redis_server import RedisServer
from support.waiting import comes, rest
from tickwheel import Client, Delivery, Task, Worker

SHARDS = 3
TOPIC, WORKED, PULLED = "rolling", "rolling.worked", "rolling.pulled"
PAUSE_S = 0.05
DELAY_S = 0.05
BETWEEN_S = 0.5
"""Seconds of full load before each restart and after the last."""
NODE_TTL_S = 3.0


class Load:
    """What clients do meanwhile, until ``is_over``; whatever they see wrong is raised."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.is_over = asyncio.Event()
        self.owed: dict[str, set[str]] = {TOPIC: set(), WORKED: set(), PULLED: set()}
        """By topic, the bodies whose enqueue was answered;"""
        self.came: dict[str, list[str]] = {TOPIC: [], WORKED: [], PULLED: []}
        """and those that were delivered and acked."""
        self.longest_ms = 0
        self.rounds: dict[str, int] = {}
        """How often each kind of work was done."""
        self._numbers = itertools.count()

    async def repeat(self, work: Callable[[Client], Awaitable[None]], client: Client) -> None:
        while not self.is_over.is_set():
            await work(client)
            self.rounds[work.__name__] = self.rounds.get(work.__name__, 0) + 1
            await rest(PAUSE_S)

    def _body(self) -> str:
        return f"task-{next(self._numbers)}"

    async def enqueue(self, client: Client) -> None:
        body = self._body()
        await client.enqueue(TOPIC, body.encode(), delay=DELAY_S)
        self.owed[TOPIC].add(body)

    async def enqueue_with_a_key(self, client: Client) -> None:
        body = self._body()
        made = await client.enqueue(WORKED, body.encode(), delay=DELAY_S, key=body)
        self.owed[WORKED].add(body)
        await client.lookup(made.id)

    async def enqueue_many(self, client: Client) -> None:
        bodies = [self._body() for _ in range(10)]
        keys = [f"order-{number}" for number in range(10)]
        await client.enqueue_many(
            Task(TOPIC, body.encode(), delay=DELAY_S, order_key=key)
            for body, key in zip(bodies, keys, strict=True)
        )
        self.owed[TOPIC].update(bodies)

    async def change_one(self, client: Client) -> None:
        made = await client.enqueue("rolling.changed", b"", delay=3_600)
        assert (await client.reschedule(made.id, delay=7_200)).status == "scheduled"
        assert await client.cancel(made.id) in ("cancelled", "already_cancelled")

    async def schedules(self, client: Client) -> None:
        await client.put_schedule("nightly", topic="rolling.changed", cron="0 3 * * *")
        await client.show_schedule("nightly")
        assert "nightly" in [schedule.name async for schedule in client.list_schedules()]
        await client.delete_schedule("nightly")

    async def transact(self, client: Client) -> None:
        body = self._body()
        async with client.transaction("tellers") as deal:
            await deal.enqueue(TOPIC, body.encode())
        self.owed[TOPIC].add(body)

    async def pull(self, client: Client) -> None:
        body = self._body()
        await client.enqueue(PULLED, body.encode())
        self.owed[PULLED].add(body)
        while not self.owed[PULLED] <= set(self.came[PULLED]):
            for delivery in await client.pull(PULLED, group="g", wait=0.2):
                self.note(delivery)
                assert await delivery.ack() in ("acked", "done")

    async def subscribe_anew(self, client: Client) -> None:
        async with client.subscribe(TOPIC, group="others") as deliveries:
            assert await (await anext(deliveries)).ack() in ("acked", "done")

    async def start_a_client(self, client: Client) -> None:
        """A program that begins just now; it knows the address of one shard."""
        body = self._body()
        async with Client(self._url) as fresh:
            await fresh.enqueue(TOPIC, body.encode(), key=body)
        self.owed[TOPIC].add(body)

    async def look(self, client: Client) -> None:
        await client.stats()
        async for _ in client.list_tasks(topic=TOPIC, limit=5):
            pass
        await client.ping()
        await client.configure(TOPIC, "g", paused=False)

    async def consume(self, client: Client) -> None:
        async for delivery in client.subscribe(TOPIC, group="g"):
            self.note(delivery)
            delivery.ack_nowait()

    def note(self, delivery: Delivery) -> None:
        self.longest_ms = max(self.longest_ms, time.time_ns() // 1_000_000 - delivery.due_ms)
        self.came[delivery.topic].append(delivery.body.decode())

    def is_done(self) -> bool:
        return all(self.owed[topic] <= set(self.came[topic]) for topic in self.owed)


async def rolls(url: str, restarts: list[Callable[[], Awaitable[None]]]) -> Load:
    """All kinds of work, while one thing after the other is restarted."""
    load = Load(url)
    kinds = [load.enqueue, load.enqueue_with_a_key, load.enqueue_many, load.change_one]
    kinds += [load.schedules, load.transact, load.pull, load.subscribe_anew, load.look]
    kinds += [load.start_a_client]
    async with Client(url) as producer, Client(url) as consumer:
        for topic, name in ((TOPIC, "g"), (TOPIC, "others"), (PULLED, "g")):
            await producer.create_group(topic, name)
        worker = Worker(consumer, signals=False)

        @worker.on(WORKED)
        async def handle(delivery: Delivery) -> None:
            load.note(delivery)

        async with asyncio.TaskGroup() as group:  # the first error of any ends all
            consuming = [group.create_task(load.consume(consumer))]
            consuming += [group.create_task(worker.run())]
            working = [group.create_task(load.repeat(kind, producer)) for kind in kinds]
            for restarted in restarts:
                await rest(BETWEEN_S)
                await restarted()
            await rest(BETWEEN_S)
            load.is_over.set()
            await asyncio.wait(working)
            await comes(load.is_done)
            for task in consuming:
                task.cancel()
        assert (await producer.stats()).raw["early"] == 0
    assert set(load.rounds) == {kind.__name__ for kind in kinds}
    print(f"longest lateness {load.longest_ms} ms, {load.rounds}")  # noqa: T201
    return load


async def test_clients_see_no_error_while_shards_restart(tmp_path: Path) -> None:
    args = ("--processes", str(SHARDS), "--listen", f"tcp://127.0.0.1:{free_ports(SHARDS)}")
    parent = Daemon(tmp_path / "parent", store=f"sqlite:///{tmp_path}/shards/", args=args)
    async with parent:
        await rolls(parent.url, [partial(restart, parent, shard) for shard in range(SHARDS)])
    assert parent.log_text().count("recovered") == 2 * SHARDS
    assert "unclean" not in parent.log_text()
    assert parent.log_text().count("restarting now") == SHARDS


async def restart(parent: Daemon, shard: int) -> None:
    """``kill PID``, and wait until it is back."""
    before = pids(parent)
    os.kill(before[shard], signal.SIGTERM)
    await comes(lambda: pids(parent)[shard] != before[shard])


def pids(parent: Daemon) -> list[int]:
    return [
        shard["pid"] for shard in json.loads((parent.folder / "ready.json").read_text())["shards"]
    ]


@pytest.mark.slow  # one node: test_nodes_clients.py, in a drain and stop
async def test_clients_see_no_error_while_nodes_restart(
    server: RedisServer, tmp_path: Path
) -> None:
    with Nodes(tmp_path, server.url(), SHARDS, "abc", leader_ttl_s=NODE_TTL_S) as nodes:
        nodes.until_led("a", "abc")
        url = f"tcp://{','.join(f'127.0.0.1:{node.first_port}' for node in nodes.all.values())}"
        await rolls(url, [partial(restart_node, nodes, name) for name in nodes.all])
        for node in nodes.all.values():
            assert "unclean" not in node.log_text()
            assert "handed_over" in node.log_text()


async def restart_node(nodes: Nodes, name: str) -> None:
    """SIGTERM to a node, then a new one of its name; wait until it has shards again."""
    assert await nodes[name].aterminate() == 0
    nodes[name].spawn()
    await asyncio.to_thread(nodes[name].wait_ready)
    await comes(lambda: name in nodes.leaders(name).values())
