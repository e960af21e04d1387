"""Kinds of subscriptions: options, at most once, broadcast, auto_ack, and daemons that refuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.fake_daemon import FakeDaemon, Peer, consume, turns
from support.waiting import slowly, soon
from tickwheel import Client, Retry, errors
from tickwheel.api.frames import FrameType as T

# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "group", "wire"),
    [
        ({"retry": Retry.none()}, "default", {"retry": {"kind": "none"}}),
        ({"retry": Retry.named("x"), "lease": 1}, "default", {"retry": "x", "lease_ms": 1000}),
        ({"ack": "on_delivery", "group": "g"}, "g", {"ack": "on_delivery"}),
        ({"ack": "manual"}, "default", {}),
        ({"broadcast": True}, None, {"broadcast": True}),
        ({"broadcast": True, "group": ""}, None, {"broadcast": True}),
        ({"auto_ack": True}, "default", {}),
    ],
)
async def test_options_are_sent_and_kept_over_a_reconnect(
    options: dict[str, Any],
    group: str | None,
    wire: dict[str, Any],
    daemon: FakeDaemon,
    client: Client,
    peer: Peer,
) -> None:
    starting = asyncio.ensure_future(client.subscribe("t", prefetch=7, **options).start())
    for _ in range(3):
        frame = await peer.next(T.SUBSCRIBE)
        assert frame[3:] == ("t", group, 7, wire)
        peer.ok(frame, {"lease_ms": 30_000})
        await soon(starting)
        await turns()
        peer.close()
        peer = await daemon.peer()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"ack": "never"}, "'never'"),
        ({"auto_ack": 1}, "auto_ack"),
        ({"broadcast": None}, "broadcast"),
        ({"broadcast": True, "group": "g"}, "group"),
        ({"broadcast": True, "retry": Retry.none()}, "retry"),
        ({"broadcast": True, "auto_ack": True}, "auto_ack"),
        ({"ack": "on_delivery", "lease": 5}, "lease"),
        ({"ack": "on_delivery", "auto_ack": True}, "auto_ack"),
        ({"group": ""}, "group"),
    ],
)
async def test_contradictory_subscribe_options_are_refused_at_once(
    options: dict[str, Any], word: str, daemon: FakeDaemon, client: Client
) -> None:
    await daemon.peer()
    with pytest.raises(errors.BadRequest, match=word):
        client.subscribe("t", **options)


# --- daemons that refuse ---------------------------------------------------------------------


async def test_a_conflicting_policy_is_refused_at_the_start(client: Client, peer: Peer) -> None:
    peer.auto.discard(T.UNSUBSCRIBE)
    starting = asyncio.ensure_future(client.subscribe("t", retry=Retry.none()).start())
    peer.error(await peer.next(T.SUBSCRIBE), "conflict", "the group has exponential")
    peer.error(await peer.next(T.UNSUBSCRIBE), "not_found")
    with pytest.raises(errors.Conflict, match="exponential"):
        await soon(starting)


async def test_a_conflicting_policy_after_a_reconnect_raises(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, _ = await consume(daemon, client, retry=Retry.none())
    reading = asyncio.ensure_future(anext(subscription))
    await turns()
    peer.close()
    peer = await daemon.peer()
    peer.auto.discard(T.UNSUBSCRIBE)
    peer.error(await peer.next(T.SUBSCRIBE), "conflict", "the group has exponential")
    peer.error(await peer.next(T.UNSUBSCRIBE), "not_found")
    with pytest.raises(errors.Conflict, match="exponential"):
        await soon(reading)


async def test_a_number_used_by_a_late_subscribe_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.1, retries=0) as client:
        peer, subscription, _ = await consume(daemon, client)
        peer.close()
        peer = await daemon.peer()
        peer.auto.discard(T.UNSUBSCRIBE)
        late = await peer.next(T.SUBSCRIBE)
        again = await peer.next()
        while again[0] == T.PING:  # the daemon lives, its store is slow
            peer.ok(again)
            again = await peer.next()
        assert again[0] == T.SUBSCRIBE and again[2] == late[2]
        peer.ok(late, {"lease_ms": 30_000})
        peer.error(again, "conflict", "sub 1 is in use on this connection")
        peer.ok(await peer.next(T.UNSUBSCRIBE))
        peer.ok(await peer.next(T.SUBSCRIBE), {"lease_ms": 30_000})
        peer.deliver(late[2], b"x")
        assert (await soon(anext(subscription))).body == b"x"


async def test_a_number_kept_by_refused_subscribes_is_freed() -> None:
    """While a store refuses batches, a subscription is there, but its group may not be stored."""
    async with FakeDaemon() as daemon, daemon.client(send_timeout=5.0) as client:
        peer, subscription, _ = await consume(daemon, client)
        peer.close()
        peer = await daemon.peer()
        peer.auto.discard(T.UNSUBSCRIBE)
        for _ in range(3):
            peer.error(await peer.next(T.SUBSCRIBE), "refused", "the store refuses batches")
            again = await peer.next(T.SUBSCRIBE)
            peer.error(again, "conflict", "sub 1 is in use on this connection")
            peer.ok(await peer.next(T.UNSUBSCRIBE))
        peer.ok(await peer.next(T.SUBSCRIBE), {"lease_ms": 30_000})
        peer.deliver(again[2], b"x")
        assert (await soon(anext(subscription))).body == b"x"


# --- at most once, and broadcasts ------------------------------------------------------------


@pytest.mark.parametrize("options", [{"ack": "on_delivery"}, {"broadcast": True}])
async def test_verbs_of_a_delivery_without_a_lease_are_answered_locally(
    options: dict[str, Any], daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client, **options)
    peer.deliver(sub, b"x")
    delivery = await soon(anext(subscription))
    assert delivery.group == ("" if "broadcast" in options else "default")
    for verb in (
        delivery.ack(), delivery.ack_nowait(), delivery.nack(1, "why"), delivery.reject("why"),
        delivery.extend(5), delivery.release(),
    ):  # fmt: skip
        assert await soon(verb) == "done"
    await turns()
    assert peer.nothing()


async def test_deliveries_without_a_lease_outlast_the_connection(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    subscription = client.subscribe("t", ack="on_delivery")
    starting = asyncio.ensure_future(subscription.start())
    sub = await peer.subscribed(lease_ms=100)
    await soon(starting)
    peer.deliver(sub, b"a", b"b")
    assert (await soon(anext(subscription))).body == b"a"
    await asyncio.wait({asyncio.ensure_future(peer.closed.wait())}, timeout=0.3)
    assert peer.nothing(), "nothing is extended"
    peer.close()
    peer = await daemon.peer()
    frame = await peer.next(T.SUBSCRIBE)
    assert frame[5] == 255, "what waits counts"
    peer.ok(frame, {"lease_ms": 100})
    assert (await soon(anext(subscription))).body == b"b"
    await subscription.close()
    assert not peer.sent(T.RELEASE) and not peer.sent(T.EXTEND)


async def test_a_slow_reader_without_acks_holds_the_daemon_back(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client, ack="on_delivery", prefetch=4)
    peer.deliver(sub, b"1", b"2")
    await turns()
    assert peer.nothing()
    peer.deliver(sub, b"3", b"4", b"5")
    frame = await peer.next(T.PREFETCH)
    assert frame[2:] == (sub, 0)
    peer.ok(frame)
    for body in (b"1", b"2", b"3", b"4", b"5"):
        assert (await soon(anext(subscription))).body == body
    reading = asyncio.ensure_future(anext(subscription))
    frame = await peer.next(T.PREFETCH)
    assert frame[2:] == (sub, 4)
    peer.ok(frame)
    peer.deliver(sub, b"6")
    assert (await soon(reading)).body == b"6"


# --- auto_ack --------------------------------------------------------------------------------


async def test_reading_the_next_delivery_acks_the_previous(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client, auto_ack=True)
    ids = peer.deliver(sub, b"a", b"b")
    reader = aiter(subscription)
    first = await soon(anext(reader))
    await turns()
    assert peer.nothing(), "not before the body is done"
    assert not first.settled
    await soon(anext(reader))
    frame = await peer.next(T.ACK)
    assert frame[5] == (ids[0],)
    peer.ok(frame)
    reading = asyncio.ensure_future(anext(reader))
    frame = await peer.next(T.ACK)
    assert frame[5] == (ids[1],)
    peer.ok(frame)
    reading.cancel()


async def test_a_new_loop_acks_the_delivery_left_by_the_old_loop(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client, auto_ack=True)
    ids = peer.deliver(sub, b"a", b"b")
    for task_id in ids:
        async for delivery in subscription:
            assert delivery.id == task_id
            break
    frame = await peer.next(T.ACK)
    assert frame[5] == (ids[0],)
    peer.ok(frame)
    assert peer.nothing()


async def test_auto_ack_needs_an_async_for_loop(daemon: FakeDaemon, client: Client) -> None:
    _, subscription, _ = await consume(daemon, client, auto_ack=True)
    with pytest.raises(errors.BadRequest, match="async for"):
        await anext(subscription)


async def test_auto_ack_leaves_settled_deliveries_alone(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client, auto_ack=True)
    peer.deliver(sub, b"a")
    reader = aiter(subscription)
    delivery = await soon(anext(reader))
    nacking = asyncio.ensure_future(delivery.nack(5))
    peer.ok(await peer.next(T.NACK), ("retrying",))
    assert await soon(nacking) == "retrying"
    reading = asyncio.ensure_future(anext(reader))
    await turns()
    assert peer.nothing()
    reading.cancel()


async def test_a_break_acks_and_an_exception_nacks_with_its_text(
    client: Client, peer: Peer
) -> None:

    async def read(wrong: str | None) -> None:
        async with client.subscribe("t", auto_ack=True) as deliveries:
            async for _ in deliveries:
                if wrong is not None:
                    raise ValueError(wrong)
                break

    reading = asyncio.ensure_future(read(None))
    [task_id] = peer.deliver(await peer.subscribed(), b"a")
    frame = await peer.next(T.ACK)
    assert frame[5] == (task_id,)
    peer.ok(frame)
    await soon(reading)

    reading = asyncio.ensure_future(read("no such order"))
    [task_id] = peer.deliver(await peer.subscribed(), b"b")
    frame = await peer.next(T.NACK)
    [(*receipt, reason)] = frame[4]
    assert receipt == [task_id, 1, 1, None]
    assert reason.splitlines()[0] == "ValueError: no such order"
    peer.ok(frame, ("retrying",))
    with pytest.raises(ValueError, match="no such order"):
        await soon(reading)


async def test_a_reader_cancelled_in_its_loop_releases_the_delivery(
    client: Client, peer: Peer
) -> None:
    working = asyncio.Event()

    async def read() -> None:
        async with client.subscribe("t", auto_ack=True) as deliveries:
            async for _ in deliveries:
                working.set()
                await asyncio.Event().wait()

    reading = asyncio.ensure_future(read())
    [task_id] = peer.deliver(await peer.subscribed(), b"a")
    await soon(working.wait())
    reading.cancel()
    frame = await peer.next(T.RELEASE)
    assert frame[5] == (task_id,)
    peer.ok(frame)
    await asyncio.gather(reading, return_exceptions=True)
    assert reading.cancelled()


async def test_each_reader_acks_its_own_deliveries(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client, auto_ack=True)
    go_on = asyncio.Event()
    got: list[int] = []

    async def read() -> None:
        async for delivery in subscription:
            got.append(delivery.id)
            await go_on.wait()
            break

    readers = [asyncio.ensure_future(read()) for _ in range(2)]
    await turns()
    peer.deliver(sub, b"a", b"b")
    while len(got) < 2:
        await turns()
    own = asyncio.ensure_future(anext(aiter(subscription)))
    await turns()
    assert peer.nothing(), "another one's work is no business of this one"
    go_on.set()
    await soon(asyncio.gather(*readers))
    own.cancel()


async def test_auto_ack_acks_a_batch_in_one_frame(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client, auto_ack=True)
    ids = peer.deliver(sub, b"a", b"b", b"c")
    batches = subscription.batches(8)
    assert len(await soon(anext(batches))) == 3
    reading = asyncio.ensure_future(anext(batches))
    frame = await peer.next(T.ACK)
    assert frame[5] == tuple(ids)
    peer.ok(frame)
    peer.deliver(sub, b"d")
    assert [d.body for d in await soon(reading)] == [b"d"]


# --- ended by the daemon ---------------------------------------------------------------------


async def test_a_subscription_ended_by_the_daemon_raises_the_reason(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client, group="g")
    other = client.subscribe("u")
    starting = asyncio.ensure_future(other.start())
    number = await peer.subscribed()
    await soon(starting)
    reading = asyncio.ensure_future(anext(subscription))
    await turns()
    peer.send(T.ENDED, sub, "not_found", "the group was deleted")
    peer.send(T.ENDED, 999, "not_found", "nobody's")
    with pytest.raises(errors.NotFound, match="deleted"):
        await soon(reading)
    peer.deliver(number, b"x")
    assert (await soon(anext(other))).body == b"x"
    peer.close()
    peer = await daemon.peer()
    assert (await peer.next(T.SUBSCRIBE))[2] == number, "it is not asked for again"
