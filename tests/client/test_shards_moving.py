"""A client of several shards that move: it follows them, whoever knows where they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from support.fake_daemon import FakeDaemon, Peer, turns
from support.shards import key_in
from support.stand_in import stand_in
from support.waiting import comes, slowly, soon
from tickwheel import Client, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.client import search as module
from tickwheel.client.connection import Address
from tickwheel.client.search import ShardAddresses
from tickwheel.errors import TickwheelError
from tickwheel.protocol import Frame


class Route:
    """Where the shards are, as all daemons of it say in HELLO, and as HELLO's ``shard`` is
    answered."""

    def __init__(self, count: int) -> None:
        self.version = 1
        self.urls = [""] * count
        self.hellos: list[tuple[FakeDaemon, dict[str, Any]]] = []
        self.stands_by: dict[FakeDaemon, int] = {}
        """To how many HELLOs for its own shard a daemon will answer that it stands by."""

    def serve(self, shard: int | None, daemon: FakeDaemon) -> FakeDaemon:
        """Let a daemon have a shard from the next HELLO on, or be a front door (None)."""

        def greet(peer: Peer, frame: Frame) -> None:
            self.hellos.append((daemon, frame[2]))
            asked = frame[2].get("shard", shard)
            own = {} if shard is None else {"shard": shard}
            route = {**own, "shards": list(self.urls), "route_version": self.version}
            left = self.stands_by.get(daemon, 0)
            if shard is not None and asked == shard and not left:
                daemon.more = route
                daemon.welcome(peer, frame)
                return
            self.stands_by[daemon] = max(left - 1, 0)
            led = next(filter(None, self.urls)) if asked is None else self.urls[asked]
            active = led if asked != shard or asked is None else ""
            peer.ok(frame, {"epoch": 0, "role": "standby", "active": active or None, **route})

        daemon.greet = greet
        if shard is not None:
            self.urls[shard] = daemon.url
            self.version += 1
        return daemon

    def asked(self, daemon: FakeDaemon) -> list[int | None]:
        """Which shards were looked for at a daemon, in order."""
        return [hello.get("shard") for one, hello in self.hellos if one is daemon]


@contextlib.asynccontextmanager
async def daemons(count: int) -> AsyncIterator[list[FakeDaemon]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(FakeDaemon()) for _ in range(count)]


async def enqueued(client: Client, daemon: FakeDaemon, key: str) -> None:
    """A task with this key is sent to this daemon, whose newest connection has it."""
    future = client.enqueue_nowait("t", b"", key=key)
    peer = await daemon.peer()
    peer.store(await peer.next(T.ENQUEUE))
    await soon(future)


async def enqueued_at(peer: Peer, client: Client, key: str) -> None:
    """The same, by this connection."""
    future = client.enqueue_nowait("t", b"", key=key)
    peer.store(await peer.next(T.ENQUEUE))
    await soon(future)


def newest(daemon: FakeDaemon) -> Peer:
    """The connection that is open."""
    [peer] = daemon.open
    return peer


# --- finding -----------------------------------------------------------------------------------


async def test_a_front_door_leads_to_all_shards() -> None:
    async with daemons(3) as (door, first, second):
        route = Route(2)
        route.serve(None, door)
        route.serve(0, first)
        route.serve(1, second)
        async with door.client() as client:
            await enqueued(client, second, key_in(1, 2))
            await enqueued(client, first, key_in(0, 2))
        assert route.asked(door) == [None]
        assert route.asked(first) == [None], "its first HELLO looked for any shard"
        assert route.asked(second) == [1]


async def test_a_moved_shard_is_found_through_other_daemons() -> None:
    """Its old daemon is gone, and nobody had to say goodbye."""
    async with moving() as (route, first, second, new, client):
        waiting = client.enqueue_nowait("t", b"x", key=key_in(1, 2))
        old = newest(second)
        sent = await old.next(T.ENQUEUE)
        route.serve(1, new)
        await second.deaf()
        old.close()
        peer = await new.peer()
        assert peer.hello["session"] == old.hello["session"]
        again = await peer.next(T.ENQUEUE)
        assert again == sent, "under the same number"
        peer.store(again)
        await soon(waiting)
    assert route.asked(first)[1:] == [1], "a daemon of another shard was asked once"


async def test_the_clients_own_shard_can_move() -> None:
    async with moving() as (route, first, second, new, client):
        peer = await first.peer()
        subscription = client.subscribe("t")
        starting = asyncio.ensure_future(subscription.start())
        sub = await peer.subscribed()
        await newest(second).subscribed()
        await soon(starting)
        ids = peer.deliver(sub, b"a")
        delivery = await soon(anext(subscription))
        route.serve(0, new)
        await first.deaf()
        peer.goodbye("not_active")
        other = await new.peer()
        assert other.hello["shard"] == 0
        again = await other.next(T.SUBSCRIBE)
        other.ok(again, {"lease_ms": 30_000})
        ack = delivery.ack_nowait()
        asked = await other.next(T.ACK)
        assert list(asked[5]) == ids, "what the old daemon delivered is acked at the new one"
        other.ok(asked)
        assert await soon(ack) == "acked"
        other.deliver(again[2], b"b", epoch=2)
        assert (await soon(anext(subscription))).body == b"b"
        assert client.server_info["shards"] == tuple(route.urls)


async def test_an_unserved_shard_does_not_block_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with daemons(2) as (first, second):
        route = Route(2)
        route.serve(0, first)
        async with first.client(connect_timeout=0.3, active_timeout=0.3) as client:
            await enqueued(client, first, key_in(0, 2))
            with pytest.raises(errors.Unreachable, match="no daemon of shard 1") as raised:
                await soon(client.enqueue("t", b"", key=key_in(1, 2)))
            assert "does not have shard 1; no other daemon known" in raised.value.message
            route.serve(1, second)
            await enqueued(client, second, key_in(1, 2))


async def test_a_client_waits_for_the_standby_of_a_shard() -> None:
    """It takes over when the daemon before it has handed over."""
    async with moving() as (route, first, second, new, client):
        waiting = client.enqueue_nowait("t", b"", key=key_in(1, 2))
        old = newest(second)
        await old.next(T.ENQUEUE)
        route.serve(1, new)
        route.stands_by[new] = 3
        await second.deaf()
        old.goodbye("not_active")
        peer = await new.peer()
        peer.store(await peer.next(T.ENQUEUE))
        await soon(waiting)
    assert route.asked(new) == [1] * 4


@contextlib.asynccontextmanager
async def moving() -> AsyncIterator[tuple[Route, FakeDaemon, FakeDaemon, FakeDaemon, Client]]:
    """Shard 1 is with the second of two daemons, and the third one is to have it; the client has
    the address of the first and a connection to both."""
    async with daemons(3) as (first, second, new):
        route = Route(2)
        route.serve(0, first)
        route.serve(1, second)
        async with first.client() as client:
            await enqueued(client, second, key_in(1, 2))
            yield route, first, second, new, client


async def test_only_the_daemon_named_by_a_goodbye_is_asked() -> None:
    """It stands by for a moment still."""
    async with moving() as (route, _, second, new, client):
        route.serve(1, new)
        route.stands_by[new] = 3
        asked = len(route.hellos)
        newest(second).goodbye("draining", new.url)
        await new.peer()
        assert [daemon for daemon, _ in route.hellos[asked:]] == [new] * 4
        await enqueued_at(newest(new), client, key_in(1, 2))


@pytest.mark.parametrize("heir", ["tcp://127.0.0.1:1", "tls://127.0.0.1:7356", "", 5])
async def test_a_goodbye_naming_a_dead_daemon_costs_one_attempt(heir: Any) -> None:
    async with moving() as (route, first, second, new, client):
        route.serve(1, new)
        await second.deaf()
        old = newest(second)
        old.goodbye("draining", heir)
        await new.peer()
        assert route.asked(first)[-1] == 1
        await enqueued_at(newest(new), client, key_in(1, 2))


async def test_a_silent_successor_does_not_delay_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowly(monkeypatch)
    async with moving() as (route, _, second, new, client), FakeDaemon() as silent:
        silent.greet = lambda peer, frame: None
        route.serve(1, new)
        await second.deaf()
        began_s = asyncio.get_running_loop().time()
        old = newest(second)
        old.goodbye("draining", silent.url)
        await new.peer()
        assert asyncio.get_running_loop().time() - began_s < 2 * module.APART_S
        await enqueued_at(newest(new), client, key_in(1, 2))


async def test_a_silent_connection_does_not_block_another_to_the_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process waited for a processor, or the kernel took it for one that was about to end."""
    slowly(monkeypatch)
    async with moving() as (route, _, second, new, client):
        greet = route.serve(1, new).greet
        unanswered: list[Peer] = []

        def swallow(peer: Peer, frame: Frame) -> None:
            unanswered.append(peer)
            new.greet = greet

        new.greet = swallow
        await second.deaf()
        began_s = asyncio.get_running_loop().time()
        newest(second).close()
        peer = await new.peer()
        assert asyncio.get_running_loop().time() - began_s < 2 * module.APART_S
        await enqueued_at(peer, client, key_in(1, 2))
        assert len(unanswered) == 1
        await unanswered[0].gone()


async def test_hello_omits_the_shard_for_older_daemons() -> None:
    """Daemons older than moving shards are asked separately."""
    async with daemons(2) as (first, second):
        urls = [first.url, second.url]
        texts: list[Any] = []

        def greet(shard: int, daemon: FakeDaemon) -> None:
            def old(peer: Peer, frame: Frame) -> None:
                texts.append((shard, frame[2].get("shard"), frame[2].get("heartbeat")))
                if "shard" in frame[2]:
                    peer.error(frame, "bad_request", "options has an unknown key 'shard'")
                    peer.close()
                else:
                    daemon.more = {"shard": shard, "shards": urls}
                    daemon.welcome(peer, frame)

            daemon.greet = old

        greet(0, first)
        greet(1, second)
        async with first.client() as client:
            await enqueued(client, second, key_in(1, 2))
            assert texts[:2] == [(0, None, True), (1, 1, True)]
            assert (1, None, True) in texts, "heartbeats were not given up with it"
            peer = await first.peer()
            peer.close()
            await enqueued(client, first, key_in(0, 2))


async def test_a_number_of_shards_that_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with daemons(3) as (first, second, new):
        route, other = Route(2), Route(3)
        route.serve(0, first)
        route.serve(1, second)
        async with first.client() as client:
            await enqueued(client, second, key_in(1, 2))
            other.serve(1, new)
            route.urls[1] = new.url
            await second.deaf()
            old = newest(second)
            old.close()
            await old.gone()
            await turns(20)  # until the client has noticed
            with pytest.raises(errors.Unreachable, match="shard 1 of 3 answers here"):
                await soon(client.enqueue("t", b"", key=key_in(1, 2), timeout=0.5))


# --- where to look -------------------------------------------------------------------------------


def address(host: str, port: int = 7356) -> tuple[str, int]:
    return host, port


def test_a_shard_is_sought_at_its_own_address_first() -> None:
    places = ShardAddresses(4, [address("given", 7355)], secure=False)
    urls = [f"tcp://{host}:{7356 + n}" for n, host in enumerate("aabb")]
    places.learn({"shards": urls, "route_version": 3})
    assert places.around(1) == [
        ("a", 7357), ("given", 7355), ("a", 7356), ("b", 7358), ("b", 7359),
    ]  # fmt: skip
    places.connected_at(3, address("b", 7359))
    assert places.around(1)[2:4] == [("b", 7359), ("a", 7356)], "a daemon that is there comes first"
    places.connected_at(3, None)
    assert places.around(1)[2:4] == [("a", 7356), ("b", 7358)]


def test_node_doors_are_asked_before_old_daemon_addresses() -> None:
    places = ShardAddresses(2, [address("given")], secure=False)
    doors = ["tcp://a:1", "tcp://b:1", "tls://c:1", None]
    places.learn({"shards": ["tcp://a:2", "tcp://a:3"], "route_version": 1, "doors": doors})
    assert places.around(0) == [("a", 2), address("given"), ("a", 1), ("b", 1), ("a", 3)]
    places.learn({"shards": ["tcp://a:2", "tcp://a:3"], "route_version": 1, "doors": 5})
    assert ("b", 1) in places.around(1)


def test_an_older_route_does_not_replace_a_newer_one() -> None:
    places = ShardAddresses(2, [], secure=False)
    places.learn({"shards": ["tcp://a:1", "tcp://b:1"], "route_version": 5})
    places.learn({"shards": ["tcp://c:1", "tcp://d:1"], "route_version": 4})
    assert places.around(0)[0] == ("a", 1)
    places.learn({"shards": ["tcp://c:1", "tcp://d:1"], "route_version": 6})
    assert places.around(0)[0] == ("c", 1)
    places.learn({"shards": ["tcp://e:1"], "route_version": 7})
    places.learn({"route_version": 8})
    assert places.around(0)[0] == ("c", 1), "of another number of shards, or of none"


def test_an_unnamed_shard_is_sought_at_its_last_address() -> None:
    places = ShardAddresses(2, [address("given")], secure=False)
    places.learn({"shards": ["", "tcp://b:1"]})
    assert places.around(0) == [address("given"), ("b", 1)]
    places.connected_at(0, ("x", 9))
    places.connected_at(0, None)
    assert places.around(0) == [("x", 9), address("given"), ("b", 1)]


def test_a_newer_route_clears_an_addresss_silence() -> None:
    places = ShardAddresses(2, [], secure=False)
    places.learn({"shards": ["tcp://a:1", "tcp://b:1"], "route_version": 5})
    places.silent_until_s = dict.fromkeys((("a", 1), ("c", 1)), 60.0)
    places.learn({"shards": ["tcp://a:1", "tcp://c:1"], "route_version": 5})
    assert places.silent_until_s.keys() == {("a", 1), ("c", 1)}
    places.learn({"shards": ["tcp://a:1", "tcp://b:1"], "route_version": 6})
    places.learn({"shards": ["tcp://a:1", "tcp://c:1"], "route_version": 7})
    assert places.silent_until_s.keys() == {("a", 1)}, "it was named all the time"


@pytest.mark.parametrize("url", ["tls://b:1", "http://b", "tcp://", 5])
def test_an_invalid_address_in_a_route_is_skipped(url: Any) -> None:
    places = ShardAddresses(2, [address("given")], secure=False)
    places.learn({"shards": ["tcp://a:1", url]})
    assert places.around(1) == [address("given"), ("a", 1)]


def test_a_search_asks_a_few_shards_on_different_hosts_first() -> None:
    places = ShardAddresses(64, [address("given")], secure=False)
    places.learn({"shards": [f"tcp://h{n % 4}:{1000 + n}" for n in range(64)]})
    result = places.around(63)
    assert len(result) == 2 + module.OTHERS_MAX
    assert {host for host, _ in result[2:6]} == {"h0", "h1", "h2", "h3"}


class Around(ShardAddresses):
    """Places of several shards whose lists stay."""

    def __init__(self, *hosts: str) -> None:
        super().__init__(2, [], secure=False)
        self._lists = [[address(host) for host in some] for some in hosts]

    def around(self, shard: int) -> list[Address]:
        return self._lists[shard]


def nobody_leads(greeted: module.Greeted) -> None:
    raise AssertionError("nobody leads")


class Standbys:
    """Attempts all of which meet an error, which the test makes; who was asked in which order."""

    def __init__(self, error: Callable[[], TickwheelError]) -> None:
        self.asked: list[Address] = []
        self._error = error

    async def attempt(self, address: Address, timeout_s: float) -> module.Greeted:
        self.asked.append(address)
        raise self._error()

    def search(self, places: ShardAddresses, shard: int = 0) -> module.Finder:
        return module.Finder(places, shard, self.attempt, nobody_leads, 10.0)


async def test_pauses_are_short_while_another_daemon_is_about_to_lead() -> None:
    """At first because of a hand-over; then until a lease has surely ended."""
    search = Standbys(lambda: module.Standby("standby", None)).search(
        ShardAddresses(1, [address("a")], secure=False)
    )
    search.at = address("a")
    search.ended(errors.NotActive(), silent=False, steady=True)
    assert await search._round() is None
    for most_s in (module.HANDOVER_BACKOFF_S_MAX, module.TAKEOVER_BACKOFF_S_MAX):
        for _ in range(4):
            assert search._pause_s() <= most_s
        assert search._pause_s() >= most_s / 2, "and steady"
        search._handover_until_s = 0.0
    search._takeover_until_s = 0.0
    for _ in range(4):
        search._pause_s()
    assert search.backoff_s == module.STANDBY_BACKOFF_S_MAX


async def test_the_takeover_pace_lasts_for_the_connect_timeout() -> None:
    search = Standbys(lambda: module.Standby("standby", None)).search(
        ShardAddresses(1, [address("a")], secure=False)
    )
    search.at = address("a")
    before_s = asyncio.get_running_loop().time()
    search.ended(errors.NotActive(), silent=False, steady=True)
    assert before_s + 10.0 <= search._takeover_until_s <= before_s + 11.0
    search._takeover_until_s = 0.0
    search.at = address("a")
    search.ended(errors.NotActive(), silent=False, steady=False)
    assert search._takeover_until_s == 0.0, "not after one that ended at once"


async def test_redirecting_daemons_are_asked_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REDIRECTED_S", 0.0)
    daemons = Standbys(lambda: module.Elsewhere("elsewhere", None))
    search = daemons.search(Around("abcdefg"))
    await search._round()
    assert daemons.asked == [address(host) for host in "abcdefg"], "at first all"
    for hosts in ("abcd", "aefg", "abcd"):
        daemons.asked.clear()
        await search._round()
        assert daemons.asked == [address(host) for host in hosts]


async def test_connections_of_a_client_share_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer tells where all shards are, so two lost shards cost no more questions than one."""
    monkeypatch.setattr(module, "REDIRECTED_S", 600.0)
    daemons = Standbys(lambda: module.Elsewhere("elsewhere", None))
    places = Around("abcde", "xbcde")
    first, second = daemons.search(places, 0), daemons.search(places, 1)
    await first._round()
    await second._round()
    daemons.asked.clear()
    await first._round()
    await second._round()
    assert daemons.asked == [address("a"), address("x")], "each asks for its own shard alone"


async def test_an_address_silent_to_one_connection_is_tried_last_by_all() -> None:
    places = Around("a", "abc")
    first = Standbys(lambda: module.Silent("silent")).search(places, 0)
    await first._round()
    daemons = Standbys(lambda: module.Standby("standby", None))
    second = daemons.search(places, 1)
    await second._round()
    assert daemons.asked == [address(host) for host in "bca"]


async def test_an_address_after_goodbye_is_tried_last_for_a_while() -> None:
    daemons = Standbys(lambda: errors.Unreachable("nobody listens"))
    search = daemons.search(Around("abc"))
    search.at = address("a")
    search.ended(errors.Draining(), silent=False, steady=True)
    await search._round()
    assert daemons.asked == [address(host) for host in "bca"]
    search._successor_until_s = 0.0
    daemons.asked.clear()
    await search._round()
    assert daemons.asked == [address(host) for host in "abc"]
    search.at = address("a")
    search.ended(errors.ConnectionLost(), silent=False, steady=True)
    daemons.asked.clear()
    await search._round()
    assert daemons.asked == [address(host) for host in "abc"], "it may be back any moment"


@pytest.mark.parametrize(
    "error",
    [
        lambda: module.Standby("standby", address("a")),
        lambda: errors.NotActive("this daemon is now active: reconnect"),
    ],
)
async def test_a_successor_naming_its_predecessor_is_not_followed(
    error: Callable[[], TickwheelError],
) -> None:
    """It may also hang up, because it begins to lead at this moment."""
    daemons = Standbys(error)
    search = daemons.search(Around("ac"))
    search.at = address("a")
    search.ended(errors.Draining(), silent=False, steady=True, successor=address("b"))
    for _ in range(3):
        await search._round()
    assert daemons.asked == [address("b")] * 3
    search._successor_until_s = 0.0
    await search._round()
    assert daemons.asked[3:] == [address("a"), address("c")], "not for ever"


async def test_an_address_that_fails_slowly_is_tried_with_growing_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "APART_S", 0.001)
    daemons = Standbys(lambda: errors.Unreachable("far away"))
    search = daemons.search(ShardAddresses(1, [address("a")], secure=False))
    at_once = daemons.attempt

    async def slowly(address: Address, timeout_s: float) -> module.Greeted:
        await asyncio.sleep(0.01)  # real time: longer than the next address would wait
        return await at_once(address, timeout_s)

    monkeypatch.setattr(search, "_attempt", slowly)
    finding = asyncio.ensure_future(search.find())
    await comes(lambda: len(daemons.asked) >= 4)
    finding.cancel()
    await asyncio.wait((finding,))
    assert search.backoff_s >= 8 * module.BACKOFF_S_MIN


# --- a daemon whose lease is over ----------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search beside a connection begins at once."""
    monkeypatch.setattr(module, "BESIDE_START_S", 0.0)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Route, FakeDaemon, FakeDaemon, FakeDaemon, Client]]:
    """Two daemons with a shard each, one more that is a front door, and a client of them all."""
    async with daemons(3) as (first, second, third):
        route = Route(2)
        route.serve(0, first)
        route.serve(1, second)
        route.serve(None, third)
        async with both_of(first, third) as client:
            await enqueued(client, first, key_in(0, 2))
            await enqueued(client, second, key_in(1, 2))
            yield route, first, second, third, client


def both_of(*of: FakeDaemon) -> Client:
    return Client("tcp://" + ",".join(daemon.address for daemon in of))


def reconnector_of(client: Client, shard: int) -> Any:
    assert client._shards is not None
    return client._shards.links[shard].reconnector


async def asked_again(route: Route, daemon: FakeDaemon, times: int = 3, *, by: Peer) -> None:
    """Wait until a daemon was asked `times` more for a shard while the connection stays."""
    most = len(route.asked(daemon)) + times
    await comes(lambda: by.closed.is_set() or len(route.asked(daemon)) >= most)
    assert not by.closed.is_set()


async def test_a_shard_is_used_at_its_new_daemon_after_a_lost_lease(hasty: None) -> None:
    async with served() as (route, first, second, third, client):
        old = newest(first)
        subscription = client.subscribe("t")
        starting = asyncio.ensure_future(subscription.start())
        sub = await old.subscribed()
        await newest(second).subscribed()
        await soon(starting)
        ids = old.deliver(sub, b"a")
        delivery = await soon(anext(subscription))
        waiting = client.enqueue_nowait("t", b"x", key=key_in(0, 2))
        sent = await old.next(T.ENQUEUE)
        old.send(T.LEASE, False)
        await asked_again(route, third, by=old)  # nobody else serves it yet
        third.epoch = 2
        route.serve(0, third)
        peer = await third.peer()
        await old.gone()
        assert peer.hello["session"] == old.hello["session"]
        frames = {T(frame[0]): frame for frame in [await peer.next(), await peer.next()]}
        assert frames[T.ENQUEUE] == sent, "under the same number"
        peer.store(sent)
        await soon(waiting)
        peer.ok(frames[T.SUBSCRIBE], {"lease_ms": 30_000})
        ack = delivery.ack_nowait()
        asked = await peer.next(T.ACK)
        assert list(asked[5]) == ids
        peer.ok(asked)
        assert await soon(ack) == "acked"
        peer.deliver(frames[T.SUBSCRIBE][2], b"b", epoch=2)
        assert (await soon(anext(subscription))).body == b"b"
        assert (len(third.open), client.server_info["epoch"]) == (1, 2)


async def test_a_daemon_that_gets_its_lease_back_keeps_its_clients(hasty: None) -> None:
    async with served() as (route, _, second, third, client):
        peer = newest(second)
        peer.send(T.LEASE, False)
        await asked_again(route, third, by=peer)
        waiting = client.enqueue_nowait("t", b"", key=key_in(1, 2))
        peer.store(await peer.next(T.ENQUEUE))
        await soon(waiting)
        peer.send(T.LEASE, True)
        member = reconnector_of(client, 1)
        await comes(lambda: member._searching is None)
        await comes(lambda: not third.open)
        count = len(route.hellos)
        for _ in range(20):  # it flaps, faster than a search begins
            peer.send(T.LEASE, False)
            peer.send(T.LEASE, True)
        waiting = client.enqueue_nowait("t", b"", key=key_in(1, 2))
        peer.store(await peer.next(T.ENQUEUE))
        await soon(waiting)
        assert len(route.hellos) == count, "nobody is asked any more"
        assert (newest(second), member.connection.is_leased) == (peer, True)


async def test_a_stale_daemon_is_not_followed(hasty: None) -> None:
    """It says that it serves the shard, and does not know that another one has it since."""
    async with served() as (route, first, _, third, client):
        route.urls[0] = third.url
        third.epoch = 4
        route.serve(0, third)
        old = newest(first)
        old.send(T.GOODBYE, "not_active", "as the test says")
        peer = await third.peer()
        await comes(lambda: client.server_info["epoch"] == 4)
        route.serve(0, first)  # at epoch 1
        peer.send(T.LEASE, False)
        await asked_again(route, first, by=peer)
        first.epoch = 5
        await comes(lambda: client.server_info["epoch"] == 5)
        await peer.gone()


async def test_a_search_skips_the_daemon_that_lost_its_lease(hasty: None) -> None:
    async with served() as (route, first, _, third, _client):
        count, peer = len(route.asked(first)), newest(first)
        peer.send(T.LEASE, False)
        await asked_again(route, third, 6, by=peer)
        assert len(route.asked(first)) == count


async def test_a_lost_lease_in_the_greeting_starts_the_search(hasty: None) -> None:
    """A client that connects during a lost lease searches for another daemon."""
    async with daemons(3) as (first, second, third):
        route = Route(2)
        for shard, daemon in enumerate((first, second)):
            route.serve(shard, daemon)
        route.serve(None, third)
        greet = first.greet

        def unleased(peer: Peer, frame: Frame) -> None:
            assert frame[2]["lease"] is True
            with peer.in_one_write():
                greet(peer, frame)
                peer.send(T.LEASE, False)

        first.greet = unleased
        async with both_of(first, third) as client:
            await asked_again(route, third, by=newest(first))
            third.epoch = 2
            route.serve(0, third)
            await third.peer()
            await comes(lambda: client.server_info["epoch"] == 2)


async def test_a_connection_lost_during_the_search_is_reconnected(hasty: None) -> None:
    async with served() as (route, _, second, third, client):
        old = newest(second)
        old.send(T.LEASE, False)
        await asked_again(route, third, by=old)
        route.serve(1, third)  # at the same epoch: a search without a connection takes it
        waiting = client.enqueue_nowait("t", b"", key=key_in(1, 2))
        await old.next(T.ENQUEUE)
        old.close()
        peer = await third.peer()
        peer.store(await peer.next(T.ENQUEUE))
        await soon(waiting)
        assert reconnector_of(client, 1)._searching is None


async def test_closing_a_client_ends_its_search(hasty: None) -> None:
    async with served() as (route, first, second, third, client):
        for daemon in (first, second):
            newest(daemon).send(T.LEASE, False)
        await asked_again(route, third, by=newest(first))
        third.greet = lambda peer, frame: None  # an attempt is under way
        await comes(lambda: bool(third.open))
        await soon(client.close())
        await comes(lambda: not (first.open or second.open or third.open))
        assert not [task for task in asyncio.all_tasks() if "_search_beside" in repr(task)]


def beside(places: ShardAddresses, attempt: Any) -> module.Finder:
    return module.Finder(places, 0, attempt, nobody_leads, 10.0, beside=address("a"))


async def test_searches_of_a_client_share_their_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, 1_000.0)
    daemons, places = Standbys(lambda: module.Elsewhere("elsewhere", None)), Around("abcdefg")
    searches = [beside(places, daemons.attempt) for _ in range(16)]
    for search in searches:
        await search._round()
    assert daemons.asked == [address("b"), address("c")]
    monkeypatch.setattr(module, "TAKEOVER_BACKOFF_S_MAX", 0.0)
    for search in searches[:2]:
        await search._round()
    assert daemons.asked[2:] == [address(host) for host in "defg"], "others, each time"


async def test_the_routes_address_is_asked_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch, 1_000.0)
    daemons = Standbys(lambda: module.Standby("standby", address("a")))
    search = beside(Around("xabc"), daemons.attempt)
    for _ in range(3):
        await search._round()
    assert daemons.asked == [address(host) for host in "xbcxx"], "the hint is the daemon itself"


async def test_a_silent_address_does_not_delay_a_parallel_search(hasty: None) -> None:
    asked: list[Address] = []

    async def attempt(to: Address, timeout_s: float) -> module.Greeted:
        asked.append(to)
        if to == address("b"):
            await asyncio.Event().wait()
        raise module.Elsewhere("elsewhere", None)

    finding = asyncio.ensure_future(beside(Around("abc"), attempt).find())
    await comes(lambda: asked.count(address("c")) >= 4)
    assert asked.count(address("b")) == 1, "it is still asked"
    finding.cancel()
    await asyncio.wait((finding,))


async def test_an_addresss_refusal_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TAKEOVER_BACKOFF_S_MAX", 0.0)
    daemons = Standbys(lambda: errors.Unauthorized("not with this token"))
    search = beside(Around("ab"), daemons.attempt)
    for _ in range(5):
        await search._round()
    assert len(daemons.asked) == 5
    assert len(caplog.records) == 1


async def test_pauses_of_a_parallel_search_grow_to_a_second(hasty: None) -> None:
    places = Around("ab")
    search = beside(places, None)
    for _ in range(6):
        assert search._pause_s() <= module.TAKEOVER_BACKOFF_S_MAX
    places.nodes, places.unleased = {0: "a", 1: "b", 2: "b"}, {0, 1}
    assert not places.store_is_away, "one of them has its lease"
    places.unleased.add(2)
    assert places.store_is_away
    longest = [search._pause_s() for _ in range(12)]
    assert 0.5 <= max(longest) <= module.BESIDE_BACKOFF_S_MAX
    places.unleased.clear()
    assert search._backoff_s_max() == module.TAKEOVER_BACKOFF_S_MAX
    search._soon_until_s = 0.0
    assert search._backoff_s_max() == module.BESIDE_BACKOFF_S_MAX, "a takeover is over by then"


async def test_many_clients_do_not_search_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(module, "asyncio", stand_in(asyncio, sleep=sleep))
    for _ in range(100):
        with pytest.raises(asyncio.CancelledError):
            await beside(Around("ab"), None).find()
    assert 0.0 <= min(waited) < 0.1, "of a hundred"
    assert 0.4 < max(waited) <= module.BESIDE_START_S
