"""Clients with their defaults and the address of one node, while shards move and a node dies: no
call ends in an error, nothing is lost, order keys stay in order. And the commands about nodes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from support.nodes import Node, Nodes
from support.redis_proxy import Proxy
from support.redis_server import RedisServer
from support.shards import key_in
from support.waiting import comes, rest, until
from tickwheel import Client, Delivery, Task, Worker, sync

SHARDS = 3
TTL_S = 1.0
KEYS = [f"customer-{n}" for n in range(6)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    registry = RedisServer(folder / "redis").start().lay_out(SHARDS)
    with Nodes(folder, registry.url(), SHARDS, leader_ttl_s=TTL_S) as nodes:
        yield nodes
    registry.kill()


@pytest.fixture
def pair(shared: Nodes) -> Nodes:
    """The same two nodes for many tests; both live, neither is drained, and no shard is placed."""
    settle(shared)
    return shared


def settle(nodes: Nodes) -> None:
    for node in nodes.all.values():
        if not node.alive:
            node.start()
    until(lambda: None not in nodes.leaders("a").values(), 60, nodes.log)
    listing = nodes["a"].nodes()
    with sync.Client(nodes["a"].url) as client:
        for entry in listing["nodes"]:
            if entry["draining"]:
                client.drain_node(entry["node"], draining=False)
        for entry in listing["shards"]:
            if entry["placed"]:
                client.move_shard(entry["shard"], None)
    nodes.until_led("a", "ab")
    until(lambda: nodes.leaders("b") == nodes.leaders("a"), 60, nodes.log)


_numbers = itertools.count()


class Work:
    """What programs do all the time, on topics of their own; each turn of each kind of work is
    counted."""

    def __init__(self, client: Client, consumer: Client) -> None:
        number = next(_numbers)
        self.topic, self.ticks, self.later = f"t{number}", f"ticks{number}", f"later{number}"
        self.client, self.consumer = client, consumer
        self.turns: dict[str, int] = {}
        self.cancelled = {"cancelled"}
        """What a cancel may be answered by,"""
        self.ended = {"acked"}
        """and an ack; after another word than the first one the task comes again."""
        self.sent: set[str] = set()
        self.got: set[str] = set()
        self.acked: set[str] = set()
        self.worked: set[str] = set()
        self.in_order: dict[str, list[int]] = {key: [] for key in KEYS}
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        await self.client.create_group(self.topic, "g", order_failure="retry")
        await self.client.create_group(self.topic, "w")
        await self.client.put_schedule(self.ticks, topic=self.ticks, every=1)
        self._tasks = [asyncio.ensure_future(self._consume()), asyncio.ensure_future(self._work())]
        for kind in (self._single, self._many, self._transact, self._look, self._pull):
            self.turns[kind.__name__] = 0
            self._tasks.append(asyncio.ensure_future(self._repeat(kind)))

    async def _repeat(self, work: Callable[[int], Awaitable[None]]) -> None:
        while not self._is_over:
            await work(self.turns[work.__name__])
            self.turns[work.__name__] += 1

    async def go_on(self, turns: int = 3) -> None:
        """Until each kind of work was done some more times. Raises what one of them raised."""
        before = dict(self.turns)

        def done() -> bool:
            self.check()
            return all(self.turns[kind] >= count + turns for kind, count in before.items())

        await comes(done)

    def check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        """Stop, and wait until all has come that was sent."""
        self._is_over = True
        await asyncio.gather(*self._tasks[2:])

        def all_came() -> bool:
            self.check()
            return self.sent <= self.got & self.worked

        await comes(all_came)
        for task in self._tasks[:2]:
            task.cancel()
        await asyncio.wait(self._tasks[:2])

    # --- kinds of work --------------------------------------------------------------------------

    async def _send(self, body: str, sending: Awaitable[Any]) -> None:
        await sending
        self.sent.add(body)

    async def _single(self, turn: int) -> None:
        key = f"key-{turn}"
        await self._send(key, self.client.enqueue(self.topic, key.encode(), key=key))
        plain = f"plain-{turn}"
        await self._send(plain, self.client.enqueue(self.topic, plain.encode()))

    async def _many(self, turn: int) -> None:
        bodies = {key: f"{key}/{turn}" for key in KEYS}
        tasks = [Task(self.topic, body.encode(), order_key=key) for key, body in bodies.items()]
        await self.client.enqueue_many(tasks)
        self.sent.update(bodies.values())

    async def _transact(self, turn: int) -> None:
        body, key = f"half-{turn}", KEYS[turn % len(KEYS)]
        transaction = self.client.transaction("p")
        await transaction.enqueue(self.topic, body.encode(), key=key)
        await self._send(body, transaction.commit())

    async def _look(self, turn: int) -> None:
        await self.client.stats()
        made = await self.client.enqueue(self.later, b"", key=f"later-{turn}", delay=3600)
        assert (await self.client.lookup(made.id)).state == "scheduled"
        assert await self.client.cancel(made.id) in self.cancelled
        assert [schedule.name async for schedule in self.client.list_schedules()] == [self.ticks]

    async def _pull(self, turn: int) -> None:
        # Not for long: a tick comes each second, and the others fill the queues meanwhile.
        for delivery in await self.client.pull(self.ticks, group="p", wait=0.05):
            await delivery.ack()

    async def _consume(self) -> None:
        async with self.consumer.subscribe(self.topic, group="g") as deliveries:
            async for delivery in deliveries:
                body = delivery.body.decode()
                assert body not in self.acked, "it comes again"
                if body not in self.got and delivery.order_key is not None:
                    self.in_order[delivery.order_key].append(int(body.rpartition("/")[2]))
                self.got.add(body)
                word = await delivery.ack()
                assert word in self.ended, (body, word)
                if word == "acked":
                    self.acked.add(body)

    async def _work(self) -> None:
        async def handle(delivery: Delivery) -> None:
            self.worked.add(delivery.body.decode())

        worker = Worker(self.consumer)
        worker.on(self.topic, group="w")(handle)
        await worker.run()


@contextlib.asynccontextmanager
async def working(nodes: Nodes) -> AsyncIterator[Work]:
    """Programs that were given the addresses of both nodes' front doors, with all else as it is by
    default."""
    url = ",".join(node.url for node in nodes.all.values())
    async with Client(url) as client, Client(url) as consumer:
        work = Work(client, consumer)
        await work.begin()
        await work.go_on()
        yield work
        await work.end()
        assert all(seen == sorted(seen) for seen in work.in_order.values()), work.in_order
        await comes(partial(_fired, client, work.ticks))
        await client.delete_schedule(work.ticks)


async def _fired(client: Client, name: str) -> bool:
    return (await client.show_schedule(name)).runs > 0


async def led(nodes: Nodes, asked: str, by: str, shards: range) -> None:
    """Until the nodes named in ``by`` lead these shards, as the one that is asked says."""
    await comes(lambda: _led(nodes, asked, by, shards))


async def _led(nodes: Nodes, asked: str, by: str, shards: range) -> bool:
    leaders = await asyncio.to_thread(nodes.leaders, asked)
    return {leaders.get(shard) for shard in shards} == set(by)


async def test_clients_see_no_error_while_shards_move(pair: Nodes) -> None:
    async with working(pair) as work:
        own = int(work.client.server_info["shard"])
        for shard in (own, (own + 1) % SHARDS):
            name = "b" if pair.leaders("a")[shard] == "a" else "a"
            await work.client.move_shard(shard, name)
            await led(pair, name, name, range(shard, shard + 1))
            await work.go_on()
        assert {node.node for node in (await work.client.nodes()).nodes} == {"a", "b"}


async def test_clients_see_no_error_during_a_drain_and_stop(pair: Nodes) -> None:
    async with working(pair) as work:
        await work.client.drain_node("b")
        await led(pair, "a", "a", range(SHARDS))
        await work.go_on()
        await work.client.drain_node("b", draining=False)
        await led(pair, "b", "ab", range(SHARDS))
        await work.go_on()
        assert await pair["a"].aterminate() == 0
        await work.go_on()


async def test_clients_see_no_error_after_a_node_was_killed(pair: Nodes) -> None:
    async with working(pair) as work:
        # The node may die behind a commit and before the answer; then the next one is asked, which
        # does not know of a lease that was not written down yet.
        work.cancelled.add("already_cancelled")
        work.ended.add("stale")
        pair["b"].kill()
        await work.go_on()
        await led(pair, "a", "a", range(SHARDS))
        await work.go_on()


async def test_a_client_of_one_address_survives_losing_that_node(pair: Nodes) -> None:
    async with Client(pair["a"].url) as client:
        await client.drain_node("b")
        await led(pair, "a", "a", range(SHARDS))
        made = [await client.enqueue("t", b"x", delay=3600) for _ in range(SHARDS)]
        await client.drain_node("b", draining=False)
        pair["a"].kill()
        for task in made:
            assert await client.cancel(task.id) in ("cancelled", "already_cancelled")


# --- without Redis -------------------------------------------------------------------------------

CUT_S = 1.5
"""What is promised beyond ``leader_ttl_s`` of a node that is cut off, on a machine that has nothing
else to do; on one whose processors are all taken it may take ``BUSY`` times as long."""
BUSY = 6


@contextlib.asynccontextmanager
async def walled(server: RedisServer, folder: Path) -> AsyncIterator[tuple[Nodes, Proxy]]:
    """Two nodes, of which b reaches Redis through a proxy."""
    server.lay_out(SHARDS)
    wall = await Proxy(server.port).start()
    nodes = Nodes(folder, server.url(), SHARDS, leader_ttl_s=TTL_S)
    store = f"redis://127.0.0.1:{wall.port}/0"
    nodes.all["b"] = Node(folder / "node-b", "b", store, SHARDS, leader_ttl_s=TTL_S)
    try:
        await asyncio.to_thread(nodes.__enter__)
        await asyncio.to_thread(nodes.until_led, "a", "ab")
        await led(nodes, "b", "ab", range(SHARDS))
        yield nodes, wall
    finally:
        nodes.__exit__()
        await wall.stop()


def connections(client: Client) -> list[Any]:
    """Those to each shard."""
    assert client._shards is not None
    return [link.reconnector.connection for link in client._shards.links]


async def test_clients_leave_a_node_cut_off_from_redis(server: RedisServer, tmp_path: Path) -> None:
    """It stays cut off until all goes on: its clients reach it, and it cannot know more."""
    async with walled(server, tmp_path) as (nodes, wall), working(nodes) as work:
        work.cancelled.add("already_cancelled")
        # It delivers until its licence ends, and the next one does not know of these leases.
        work.ended.add("stale")
        leaders = await asyncio.to_thread(nodes.leaders, "a")
        lost = next(shard for shard, name in leaders.items() if name == "b")
        old = connections(work.client)[lost]
        loop = asyncio.get_running_loop()
        wall.hold()
        began_s = loop.time()
        made = await work.client.enqueue("later", b"", key=key_in(lost, SHARDS), delay=3600)
        gap_s = loop.time() - began_s
        assert made.id % 1024 == lost
        assert gap_s < BUSY * (TTL_S + CUT_S), gap_s
        assert not old.is_leased, "it said so"
        await work.go_on()
        assert {connection.peer.rpartition(":")[2] for connection in connections(work.client)} == {
            nodes["a"].url_of(shard).rpartition(":")[2] for shard in range(SHARDS)
        }
        assert all(connection.is_leased for connection in connections(work.client))
        wall.let_go()
        await led(nodes, "b", "ab", range(SHARDS))
        await work.go_on()


async def test_clients_stay_during_a_redis_outage(server: RedisServer, tmp_path: Path) -> None:
    async with walled(server, tmp_path) as (nodes, _), working(nodes) as work:
        work.cancelled.add("already_cancelled")
        before = connections(work.client), connections(work.consumer)
        server.pause()
        await comes(lambda: not any(item.is_leased for item in before[0]))
        await rest(1.0)  # it is looked for meanwhile
        server.go_on()
        await comes(lambda: all(item.is_leased for item in before[0]))
        await work.go_on()
        assert (connections(work.client), connections(work.consumer)) == before


def has(nodes: Nodes, name: str, shard: int) -> bool:
    return nodes.leaders(name)[shard] == name


def test_a_program_without_an_event_loop_follows_a_shard(pair: Nodes) -> None:
    with sync.Client(pair["a"].url) as client:
        for shard in range(SHARDS):
            client.enqueue("sync", b"%d" % shard, key=key_in(shard, SHARDS), delay=3600)
        for shard, name in pair.leaders("a").items():
            other = "b" if name == "a" else "a"
            client.move_shard(shard, other)
            until(partial(has, pair, other, shard), 60, pair.log)
            client.enqueue("sync", b"again", key=key_in(shard, SHARDS), delay=3600)
        assert client.stats().topics["sync"].raw["scheduled"] == 2 * SHARDS


# --- commands ------------------------------------------------------------------------------------


@pytest.mark.slow  # quicker: verbs/scenes/nodes.py
def test_commands_show_nodes_and_move_shards(pair: Nodes) -> None:
    cli = Cli(pair["a"])
    until(lambda: cli.code("shards") == 0, 60, pair.log)
    leaders = pair.leaders("a")
    nodes = cli.json("nodes")
    assert [(node["node"], node["draining"]) for node in nodes] == [("a", False), ("b", False)]
    assert {shard: node["node"] for node in nodes for shard in node["shards"]} == leaders
    shards = cli.json("shards")
    assert {entry["shard"]: entry["node"] for entry in shards} == leaders
    assert all(entry["reachable"] and entry["state"] == "ready" for entry in shards)
    head, *_ = cli.run("shards", "list").stdout.decode().splitlines()
    assert head.split() == [
        "shard", "node", "address", "pid", "state", "epoch", "since", "store",
    ]  # fmt: skip
    other = "b" if leaders[0] == "a" else "a"
    assert cli.one("shards", "move", "0", other) == {"shard": 0, "node": other}
    until(lambda: pair.leaders(other)[0] == other, 60, pair.log)
    pair.until_led("a", "ab")  # another shard moves in exchange
    until(lambda: cli.code("shards") == 0, 60, pair.log)
    [first] = [entry for entry in cli.json("shards") if entry["shard"] == 0]
    assert (first["node"], first["placed"]) == (other, other)
    assert "can be on any node" in cli.run("shards", "move", "0", "--anywhere").stdout.decode()
    assert "not found" in cli.fails(4, "shards", "move", "0", "nobody")
    assert "between 0 and 2" in cli.fails(2, "shards", "move", "9", "a")
    assert "--anywhere" in cli.fails(2, "shards", "move", "0")
    assert "not found" in cli.fails(4, "nodes", "drain", "nobody")
    assert cli.one("shards", "drain", "b") == {"node": "b", "draining": True}
    until(lambda: set(pair.leaders("a").values()) == {"a"}, 60, pair.log)
    shown = cli.run("nodes").stdout.decode()
    assert " draining " in shown and "0-2" in shown
    assert "gets shards again" in cli.run("nodes", "drain", "b", "--undo").stdout.decode()
    pair.until_led("a", "ab")
