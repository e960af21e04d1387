"""Consuming through the client: deliveries, acks, leases of what waits, reconnects."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon, Peer, consume, turns
from support.waiting import slowly, soon
from tickwheel import Client, Delivery, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.client import Subscription
from tickwheel.client.subscription import Buffer


async def deliveries(subscription: Subscription, count: int) -> list[Delivery]:
    return [await soon(anext(subscription)) for _ in range(count)]


# --- deliveries ------------------------------------------------------------------------------


async def test_subscribe_sends_all_its_options(client: Client, peer: Peer) -> None:
    first = client.subscribe("t", group="g", prefetch=7, lease=timedelta(seconds=2))
    second = client.subscribe("t")
    starting = [asyncio.ensure_future(s.start()) for s in (first, second)]
    frames = [await peer.next(T.SUBSCRIBE) for _ in starting]
    assert frames[0][3:] == ("t", "g", 7, {"lease_ms": 2000})
    assert frames[1][3:] == ("t", "default", 256, {})
    assert frames[0][2] != frames[1][2]
    for frame in frames:
        peer.ok(frame, {"lease_ms": 2000})
    await soon(asyncio.gather(*starting))


async def test_a_delivery_has_all_its_fields(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client, group="g")
    options = {"key": "k", "tag": "x", "properties": {"a": 1}, "priority": 9}
    plain = (5, 1, NOW_MS - 50, b"plain")
    rich = (6, 3, NOW_MS - 40, b"rich", options)
    peer.send(T.DELIVER, sub, 4, NOW_MS, (plain, rich))
    first, second = await deliveries(subscription, 2)
    assert (first.id, first.attempt, first.due_ms, first.body) == plain
    assert (first.key, first.tag, dict(first.properties), first.priority) == (None, None, {}, 0)
    assert (second.key, second.tag, second.priority) == ("k", "x", 9)
    assert dict(second.properties) == {"a": 1}
    assert (second.topic, second.group, second.epoch) == ("t", "g", 4)
    assert second.delivered_ms == NOW_MS
    assert second.due == datetime.fromtimestamp((NOW_MS - 40) / 1000, UTC)
    assert second.due.tzinfo is not None
    assert "6" in repr(second)


async def test_a_delivery_before_the_answer_to_subscribe_counts(client: Client, peer: Peer) -> None:
    subscription = client.subscribe("t")
    starting = asyncio.ensure_future(subscription.start())
    frame = await peer.next(T.SUBSCRIBE)
    peer.deliver(frame[2], b"early")
    peer.ok(frame, {"lease_ms": 30_000})
    await soon(starting)
    assert (await soon(anext(subscription))).body == b"early"


async def test_a_subscription_starts_with_its_first_read(client: Client, peer: Peer) -> None:

    async def first() -> bytes:
        async for delivery in client.subscribe("t"):
            return delivery.body
        raise AssertionError

    reading = asyncio.ensure_future(first())
    peer.deliver(await peer.subscribed(), b"x")
    assert await soon(reading) == b"x"


async def test_a_reader_cancelled_during_the_start_leaves_it_to_the_next(
    client: Client, peer: Peer
) -> None:
    subscription = client.subscribe("t")
    reading = asyncio.ensure_future(anext(subscription))
    frame = await peer.next(T.SUBSCRIBE)
    reading.cancel()
    await asyncio.wait((reading,))
    peer.ok(frame, {"lease_ms": 30_000})
    peer.deliver(frame[2], b"x")
    assert (await soon(anext(subscription))).body == b"x"
    assert not peer.sent(T.UNSUBSCRIBE)


async def test_several_tasks_share_a_subscription(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    readers = [asyncio.ensure_future(anext(subscription)) for _ in range(3)]
    await turns()
    peer.deliver(sub, b"a", b"b")
    peer.deliver(sub, b"c")
    result = await soon(asyncio.gather(*readers))
    assert {delivery.body for delivery in result} == {b"a", b"b", b"c"}


async def test_batches_return_the_buffered_deliveries(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, *[b"%d" % i for i in range(10)])
    sizes = []
    async for batch in subscription.batches(4):
        sizes.append(len(batch))
        if sum(sizes) == 10:
            break
    assert sizes == [4, 4, 2]


async def test_a_cancelled_reader_loses_no_delivery(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    reading = asyncio.ensure_future(anext(subscription))
    await turns()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    peer.deliver(sub, b"a")
    assert (await soon(anext(subscription))).body == b"a"


async def test_a_delivery_for_a_cancelled_reader_goes_to_the_next(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client)
    first, second = [asyncio.ensure_future(anext(subscription)) for _ in range(2)]
    await turns()
    peer.deliver(sub, b"a")
    while not subscription._buffer:
        await turns(1)  # one more would be too many
    first.cancel()
    assert (await soon(second)).body == b"a"
    await asyncio.gather(first, return_exceptions=True)


async def test_subscribe_raises_the_daemons_error(client: Client, peer: Peer) -> None:
    subscription = client.subscribe("t")
    starting = asyncio.ensure_future(subscription.start())
    peer.error(await peer.next(T.SUBSCRIBE), "limit_exceeded", "too many")
    with pytest.raises(errors.LimitExceeded, match="too many"):
        await soon(starting)
    with pytest.raises(errors.LimitExceeded, match="too many"):
        await soon(anext(subscription))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"prefetch": -1}, "prefetch"),
        ({"prefetch": 65_536}, "65535"),
        ({"lease": 0.05}, "lease must be between 100 ms"),
        ({"lease": 13 * 3600}, "lease_max_s"),
        ({"lease": -1}, "lease"),
        ({"group": "a b"}, "group"),
        ({"topic": ""}, "topic"),
    ],
)
async def test_invalid_subscribe_options_are_refused_at_once(
    options: dict[str, Any], word: str, daemon: FakeDaemon, client: Client
) -> None:
    await daemon.peer()
    with pytest.raises(errors.BadRequest, match=word):
        client.subscribe(**{"topic": "t", **options})


async def test_prefetch_can_be_changed(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    changing = asyncio.ensure_future(subscription.set_prefetch(0))
    frame = await peer.next(T.PREFETCH)
    assert frame[2:] == (sub, 0)
    peer.ok(frame)
    await soon(changing)


@pytest.mark.parametrize("sent", [True, False])
async def test_a_prefetch_set_around_a_reconnect_is_that_of_the_next_subscribe(
    sent: bool, daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, _ = await consume(daemon, client)
    if sent:
        changing = asyncio.ensure_future(subscription.set_prefetch(3))
        await peer.next(T.PREFETCH)
    peer.close()
    while client.connected:
        await turns()
    if not sent:
        changing = asyncio.ensure_future(subscription.set_prefetch(3))
    peer = await daemon.peer()
    frame = await peer.next(T.SUBSCRIBE)
    assert frame[5] == 3
    peer.ok(frame, {"lease_ms": 30_000})
    await soon(changing)


# --- acks ------------------------------------------------------------------------------------


async def test_acks_of_one_step_share_a_frame(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    ids = peer.deliver(sub, *[b"x"] * 20)
    result = await deliveries(subscription, 20)
    futures = [delivery.ack_nowait() for delivery in result]
    frame = await peer.next(T.ACK)
    assert frame[2:] == ("t", "default", 1, tuple(ids), (1,) * 20)
    assert not any(future.done() for future in futures), "an ack is durable when it is done"
    peer.ok(frame)
    assert set(await soon(asyncio.gather(*futures))) == {"acked"}
    assert peer.nothing()


async def test_flush_acks_waits_for_every_ack_up_to_now(daemon: FakeDaemon, client: Client) -> None:
    await soon(client.flush_acks())  # nothing to wait for
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, b"a", b"b", b"c")
    first, second, third = await deliveries(subscription, 3)
    first.ack_unwatched()
    second.ack_nowait()
    flushing = asyncio.ensure_future(client.flush_acks())
    ack = await peer.next(T.ACK)
    third.ack_nowait()
    later = await peer.next(T.ACK)
    with pytest.raises(errors.SendTimeout, match="not all acks were answered within 0.01 s"):
        await client.flush_acks(timeout=0.01)
    assert not flushing.done()
    peer.ok(ack)
    await soon(flushing)
    peer.ok(later)


async def test_acks_of_different_epochs_go_apart(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, b"old", epoch=1)
    peer.deliver(sub, b"new", epoch=2, attempt=2)
    for delivery in await deliveries(subscription, 2):
        delivery.ack_nowait()
    frames = [await peer.next(T.ACK) for _ in range(2)]
    assert sorted((frame[4], frame[6]) for frame in frames) == [(1, (1,)), (2, (2,))]
    for frame in frames:
        peer.ok(frame)


async def test_acks_are_split_by_the_daemons_limit() -> None:
    async with FakeDaemon(ids_per_frame_max=3) as daemon, daemon.client() as client:
        peer, subscription, sub = await consume(daemon, client)
        peer.deliver(sub, *[b"x"] * 7)
        futures = [delivery.ack_nowait() for delivery in await deliveries(subscription, 7)]
        frames = [await peer.next(T.ACK) for _ in range(3)]
        assert [len(frame[5]) for frame in frames] == [3, 3, 1]
        for frame in frames:
            peer.ok(frame)
        await soon(asyncio.gather(*futures))


async def test_each_ack_gets_its_own_word(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, b"a", b"b", b"c")
    acks = [asyncio.ensure_future(d.ack()) for d in await deliveries(subscription, 3)]
    peer.ok(await peer.next(T.ACK), ("acked", "cancelled", "stale"))
    assert await soon(asyncio.gather(*acks)) == ["acked", "cancelled", "stale"]


async def test_an_ack_survives_its_connection(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    [task_id] = peer.deliver(sub, b"x")
    [delivery] = await deliveries(subscription, 1)
    ack = delivery.ack_nowait()
    await peer.next(T.ACK)
    peer.close()
    peer = await daemon.peer()
    frames = {frame[0]: frame for frame in [await peer.next(), await peer.next()]}
    assert frames[T.ACK][5] == (task_id,)
    peer.ok(frames[T.SUBSCRIBE], {"lease_ms": 30_000})
    peer.ok(frames[T.ACK], ("done",))
    assert await soon(ack) == "done"


async def test_an_ack_without_a_connection_is_sent_on_the_next(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, b"x")
    [delivery] = await deliveries(subscription, 1)
    await daemon.deaf()
    peer.close()
    while client.connected:
        await turns()
    ack = asyncio.ensure_future(delivery.ack())
    await turns()
    await daemon.listen()
    peer = await daemon.peer()
    frames = {frame[0]: frame for frame in [await peer.next(), await peer.next()]}
    peer.ok(frames[T.ACK])
    assert await soon(ack) == "acked"


async def test_a_retryable_refusal_of_an_ack_is_retried(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, b"x")
    [delivery] = await deliveries(subscription, 1)
    ack = delivery.ack_nowait()
    peer.error(await peer.next(T.ACK), "overloaded")
    peer.ok(await peer.next(T.ACK))
    assert await soon(ack) == "acked"


async def test_an_unanswered_ack_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.2, retries=0) as client:
        peer, subscription, sub = await consume(daemon, client)
        peer.deliver(sub, b"x")
        [delivery] = await deliveries(subscription, 1)
        with pytest.raises(errors.TickwheelError) as raised:
            await soon(delivery.ack())
        assert isinstance(raised.value, (errors.SendTimeout, errors.ConnectionLost))


async def test_a_failed_ack_that_nobody_awaits_is_only_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        async with FakeDaemon() as daemon, daemon.client() as client:
            peer, subscription, sub = await consume(daemon, client)
            peer.deliver(sub, b"x")
            [delivery] = await deliveries(subscription, 1)
            delivery.ack_nowait()
            peer.error(await peer.next(T.ACK), "bad_request")
            await turns()
    assert "never retrieved" not in caplog.text


async def test_an_ack_after_the_lease_ended_says_so(daemon: FakeDaemon) -> None:
    async with daemon.client() as client:
        peer, subscription, sub = await consume(daemon, client)
        peer.deliver(sub, b"x")
        [delivery] = await deliveries(subscription, 1)
    with pytest.raises(errors.ClientClosed):
        await delivery.ack()
    with pytest.raises(errors.ClientClosed):
        await delivery.nack()


async def test_close_waits_for_acks(daemon: FakeDaemon) -> None:
    client = daemon.client()
    await client.connect()
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, b"x")
    [delivery] = await deliveries(subscription, 1)
    ack = delivery.ack_nowait()
    closing = asyncio.ensure_future(client.close())
    peer.ok(await peer.next(T.ACK))
    await soon(closing)
    assert ack.result() == "acked"


# --- other ends of a delivery ----------------------------------------------------------------


async def test_each_verb_of_a_delivery_sends_its_frame(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client, group="g")
    [task_id] = peer.deliver(sub, b"x", attempt=2, epoch=3)
    [delivery] = await deliveries(subscription, 1)
    receipt, place = (task_id, 3, 2), ("t", "g")
    batch, minute = (*place, 3, (task_id,), (2,)), timedelta(minutes=1)

    async def says(verb: Any, kind: T, fields: Any, answer: Any, word: str) -> None:
        asking = asyncio.ensure_future(verb)
        frame = await peer.next(kind)
        assert frame[2:] == fields
        peer.ok(frame, answer)
        assert await soon(asking) == word

    for verb, said, word in (
        (delivery.nack(1.5, "why"), (1500, "why"), "retrying"),
        (delivery.nack(), (None, None), "dead"),
        (delivery.nack(delay=minute), (60_000, None), "stale"),
    ):
        await says(verb, T.NACK, (*place, ((*receipt, *said),)), [word], word)
    await says(delivery.reject("bad"), T.REJECT, (*place, ((*receipt, "bad"),)), ["dead"], "dead")
    await says(delivery.extend(60), T.EXTEND, (*batch, 60_000), None, "extended")
    await says(delivery.extend(1), T.EXTEND, (*batch, 1000), ["stale"], "stale")
    await says(delivery.release(), T.RELEASE, batch, None, "released")
    await says(delivery.release(), T.RELEASE, batch, ["gone"], "gone")


async def test_wrong_delays_and_leases_are_refused_here(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, b"x")
    [delivery] = await deliveries(subscription, 1)
    with pytest.raises(errors.BadRequest, match="delay"):
        await delivery.nack(delay=-1)
    with pytest.raises(errors.BadRequest, match="seconds"):
        await delivery.extend(-1)
    assert peer.nothing()


# --- leases of what waits --------------------------------------------------------------------


async def test_leases_of_buffered_deliveries_are_extended_in_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer, subscription, sub = await consume(daemon, client, lease_ms=300)
        with peer.in_one_write():
            first = peer.deliver(sub, b"a", b"b", b"c")
            second = peer.deliver(sub, b"d")
        await deliveries(subscription, 1)
        for _ in range(3):
            frame = await peer.next(T.EXTEND)
            assert sorted(frame[5]) == [*first[1:], *second], "one frame; not what was handed out"
            assert frame[7] == 300
            peer.ok(frame)
        assert [d.body for d in await deliveries(subscription, 3)] == [b"b", b"c", b"d"]


async def test_very_short_leases_are_extended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer, subscription, sub = await consume(daemon, client, lease_ms=100)
        peer.deliver(sub, b"a")
        for _ in range(10):
            peer.ok(await peer.next(T.EXTEND))
        assert (await soon(anext(subscription))).body == b"a"


async def test_a_delivery_whose_extension_failed_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer, subscription, sub = await consume(daemon, client, lease_ms=300)
        peer.deliver(sub, b"a", b"b", b"c")
        peer.ok(await peer.next(T.EXTEND), ("extended", "stale", "extended"))
        peer.ok(await peer.next(T.EXTEND))
        assert [d.body for d in await deliveries(subscription, 2)] == [b"a", b"c"]


async def test_a_delivery_that_expired_in_the_buffer_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer, subscription, sub = await consume(daemon, client, lease_ms=200)
        peer.deliver(sub, b"old")
        frame = await peer.next(T.EXTEND)
        await asyncio.get_running_loop().run_in_executor(None, _block, 1.25)
        peer.deliver(sub, b"new", attempt=2)
        assert (await soon(anext(subscription))).body == b"new"
        if peer in daemon.open:
            peer.ok(frame, ("stale",))


def _block(seconds: float) -> None:
    """Real time passes; nobody extends anything meanwhile."""
    import threading

    threading.Event().wait(seconds)


# --- reconnects ------------------------------------------------------------------------------


async def test_a_subscription_goes_on_over_a_reconnect(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client, group="g", prefetch=5, lease=2)
    peer.close()
    peer = await daemon.peer()
    frame = await peer.next(T.SUBSCRIBE)
    assert frame[2:] == (sub, "t", "g", 5, {"lease_ms": 2000})
    peer.ok(frame, {"lease_ms": 2000})
    peer.deliver(sub, b"after", epoch=2)
    [delivery] = await deliveries(subscription, 1)
    assert (delivery.body, delivery.epoch) == (b"after", 2)


async def test_buffered_deliveries_are_confirmed_after_a_reconnect(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client, lease_ms=8_001)
    ids = peer.deliver(sub, b"a", b"b", b"c")
    await deliveries(subscription, 1)
    peer.close()
    while client.connected:
        await turns()
    reading = asyncio.ensure_future(anext(subscription))
    peer = await daemon.peer()
    frames = {frame[0]: frame for frame in [await peer.next(), await peer.next()]}
    peer.ok(frames[T.SUBSCRIBE], {"lease_ms": 30_000})
    await turns()
    assert not reading.done()
    extend = frames[T.EXTEND]
    assert extend[2:] == ("t", "default", 1, tuple(ids[1:]), (1, 1), 8_001)
    peer.ok(extend, ("stale", "extended"))
    assert (await soon(reading)).body == b"c"


async def test_buffered_deliveries_are_confirmed_until_their_lease_ends(
    daemon: FakeDaemon, client: Client
) -> None:
    """A daemon that stopped in order keeps leases whole, however long its next start takes."""
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, b"a", b"b")
    [first] = await deliveries(subscription, 1)
    buffer = Buffer(lease_s=30.0)
    buffer.put(first._batch, 100.0)
    buffer.connection_lost()
    assert buffer.take(100.0) is None, "somebody else may have it"
    assert buffer.to_confirm(125.0) == [first._batch]
    assert buffer.to_confirm(130.0) == [] and buffer.dropped == 1


async def test_new_deliveries_do_not_wait_for_confirmations(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client)
    peer.deliver(sub, b"old")
    await turns()
    peer.close()
    peer = await daemon.peer()
    frames = {frame[0]: frame for frame in [await peer.next(), await peer.next()]}
    peer.ok(frames[T.SUBSCRIBE], {"lease_ms": 30_000})
    peer.deliver(sub, b"new", epoch=2)
    assert (await soon(anext(subscription))).body == b"new"
    peer.ok(frames[T.EXTEND])
    assert (await soon(anext(subscription))).body == b"old"


@pytest.mark.parametrize("later", [True, False])
async def test_a_failed_confirmation_is_repeated_until_the_lease_ends(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer, subscription, sub = await consume(daemon, client, lease_ms=300, prefetch=1)
        peer.deliver(sub, b"old")
        await turns()
        peer.close()
        peer = await daemon.peer()
        reading = asyncio.ensure_future(anext(subscription))
        frames = {frame[0]: frame for frame in [await peer.next(), await peer.next()]}
        assert frames[T.SUBSCRIBE][5] == 0, "the one is here already"
        peer.ok(frames[T.SUBSCRIBE], {"lease_ms": 300})
        peer.error(frames[T.EXTEND], "internal")
        frame = await peer.next(T.EXTEND)
        if later:
            peer.ok(frame)
        else:
            while frame[0] == T.EXTEND:
                peer.error(frame, "internal")
                frame = await peer.next()
            assert (frame[0], frame[2:4]) == (T.PREFETCH, (sub, 1))
            peer.ok(frame)
            peer.deliver(sub, b"new", attempt=2)
        assert (await soon(reading)).body == (b"old" if later else b"new")


async def test_a_buffer_emptied_before_the_answer_to_subscribe_is_filled_again(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client, prefetch=1)
    peer.deliver(sub, b"old")
    await turns()
    peer.close()
    peer = await daemon.peer()
    frames = {frame[0]: frame for frame in [await peer.next(), await peer.next()]}
    peer.ok(frames[T.EXTEND])
    assert (await soon(anext(subscription))).body == b"old"
    reading = asyncio.ensure_future(anext(subscription))
    await turns()
    peer.ok(frames[T.SUBSCRIBE], {"lease_ms": 30_000})
    frame = await peer.next(T.PREFETCH)
    assert frame[2:] == (sub, 1)
    peer.ok(frame)
    peer.deliver(sub, b"new")
    assert (await soon(reading)).body == b"new"


async def test_repeated_reconnects_keep_one_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tickwheel.client.search.BACKOFF_S_MAX", 0.02)
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer, subscription, sub = await consume(daemon, client)
        for step in range(6):
            peer.close()
            peer = await daemon.peer()
            if step % 2:
                await peer.next(T.SUBSCRIBE)  # lost before its answer
        await peer_settled(peer, sub)
        peer.deliver(sub, b"x")
        assert (await soon(anext(subscription))).body == b"x"


async def peer_settled(peer: Peer, sub: int) -> None:
    """Answer as a daemon would: the first SUBSCRIBE of a number is fine, others conflict."""
    seen = len(peer.sent(T.SUBSCRIBE))
    if seen:
        peer.send(T.OK, peer.sent(T.SUBSCRIBE)[0][1], {"lease_ms": 30_000})
    else:
        await peer.subscribed()
    await turns(20)
    while not peer.nothing():
        peer.error(await peer.next(T.SUBSCRIBE), "conflict", f"sub {sub} is in use")
        await turns(20)


async def test_subscribe_retries_until_the_daemon_is_ready(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client)
    peer.close()
    peer = await daemon.peer()
    peer.error(await peer.next(T.SUBSCRIBE), "overloaded")
    await peer.subscribed()
    peer.deliver(sub, b"x")
    assert (await soon(anext(subscription))).body == b"x"


async def test_a_permanently_refused_subscription_raises_the_reason(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, _ = await consume(daemon, client)
    reading = asyncio.ensure_future(anext(subscription))
    peer.close()
    peer = await daemon.peer()
    peer.error(await peer.next(T.SUBSCRIBE), "limit_exceeded", "too many topics")
    with pytest.raises(errors.LimitExceeded, match="too many topics"):
        await soon(reading)


async def test_a_flapping_line_does_not_pile_up_deliveries(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client, prefetch=4)
    peer.deliver(sub, b"a", b"b", b"c")
    await turns()
    peer.close()
    peer = await daemon.peer()
    frames = {frame[0]: frame for frame in [await peer.next(), await peer.next()]}
    assert frames[T.SUBSCRIBE][5] == 1, "three of four are here already"
    peer.ok(frames[T.SUBSCRIBE], {"lease_ms": 30_000})
    peer.ok(frames[T.EXTEND])
    await deliveries(subscription, 3)
    reading = asyncio.ensure_future(anext(subscription))
    frame = await peer.next(T.PREFETCH)
    assert frame[2:] == (sub, 4)
    peer.ok(frame)
    peer.deliver(sub, b"d")
    await soon(reading)


# --- closing ---------------------------------------------------------------------------------


async def test_close_releases_buffered_deliveries(daemon: FakeDaemon, client: Client) -> None:
    peer, subscription, sub = await consume(daemon, client)
    ids = peer.deliver(sub, b"a", b"b", b"c")
    await deliveries(subscription, 1)
    closing = asyncio.ensure_future(subscription.close())
    frame = await peer.next(T.RELEASE)
    assert frame[2:] == ("t", "default", 1, tuple(ids[1:]), (1, 1))
    assert peer.sent(T.UNSUBSCRIBE)[0][2] == sub
    peer.ok(frame)
    await soon(closing)
    with pytest.raises(StopAsyncIteration):
        await anext(subscription)


async def test_deliveries_that_arrive_during_close_are_released(
    daemon: FakeDaemon, client: Client
) -> None:
    peer, subscription, sub = await consume(daemon, client)
    peer.auto.discard(T.UNSUBSCRIBE)
    closing = asyncio.ensure_future(subscription.close())
    frame = await peer.next(T.UNSUBSCRIBE)
    ids = peer.deliver(sub, b"late")
    peer.ok(frame)
    frame = await peer.next(T.RELEASE)
    assert frame[5] == tuple(ids)
    peer.ok(frame)
    await soon(closing)


async def test_close_wakes_waiting_readers(daemon: FakeDaemon, client: Client) -> None:
    _, subscription, _ = await consume(daemon, client)
    readers = [asyncio.ensure_future(anext(subscription)) for _ in range(3)]
    await turns()
    await soon(subscription.close())
    ends = await soon(asyncio.gather(*readers, return_exceptions=True))
    assert {type(end) for end in ends} == {StopAsyncIteration}


async def test_closing_the_client_ends_its_subscriptions(daemon: FakeDaemon) -> None:
    client = daemon.client()
    await client.connect()
    peer, subscription, sub = await consume(daemon, client)
    bodies = []

    async def read() -> None:
        async for delivery in subscription:
            bodies.append(delivery.body)

    reading = asyncio.ensure_future(read())
    peer.deliver(sub, b"a")
    await turns(20)
    await soon(client.close())
    await soon(reading)
    assert bodies == [b"a"]
    assert peer.sent(T.UNSUBSCRIBE)


async def test_a_cancelled_subscribe_is_unsubscribed(client: Client, peer: Peer) -> None:
    """The daemon may have subscribed us all the same, and would deliver to nobody."""
    starting = asyncio.ensure_future(client.subscribe("t").start())
    frame = await peer.next(T.SUBSCRIBE)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    ids = peer.deliver(frame[2], b"for nobody")
    peer.ok(frame, {"lease_ms": 30_000})
    release = await peer.next(T.RELEASE)
    assert peer.sent(T.UNSUBSCRIBE)[0][2] == frame[2]
    assert release[5] == tuple(ids)
    peer.ok(release)


@pytest.mark.parametrize("closes", [False, True])
async def test_a_subscribe_ended_before_sending_is_never_sent(
    daemon: FakeDaemon, client: Client, peer: Peer, *, closes: bool
) -> None:
    await daemon.deaf()
    peer.close()
    while client.connected:
        await turns()
    subscription = client.subscribe("t")
    starting = asyncio.ensure_future(subscription.start())
    await turns()
    if closes:
        await subscription.close()
        await soon(starting)
    else:
        starting.cancel()
        await asyncio.wait((starting,))
    await daemon.listen()
    peer = await daemon.peer()
    call = asyncio.ensure_future(client.ping())
    peer.ok(await peer.next(T.PING))
    await soon(call)


# --- pull ------------------------------------------------------------------------------------


async def test_pull_returns_deliveries(client: Client, peer: Peer) -> None:
    pulling = asyncio.ensure_future(client.pull("t", group="g", max=3, wait=2, lease=5))
    frame = await peer.next(T.PULL)
    assert frame[2:] == ("t", "g", 3, 2000, {"lease_ms": 5000, "tell": True})
    peer.ok(frame, (2, NOW_MS, ((5, 1, NOW_MS, b"a"), (6, 2, NOW_MS, b"b", {"key": "k"}))))
    first, second = await soon(pulling)
    assert (first.body, second.key, second.attempt) == (b"a", "k", 2)
    assert (first.group, first.epoch, first.delivered_ms) == ("g", 2, NOW_MS)
    ack = second.ack_nowait()
    frame = await peer.next(T.ACK)
    assert frame[2:] == ("t", "g", 2, (6,), (2,))
    peer.ok(frame)
    assert await soon(ack) == "acked"


async def test_an_empty_pull_returns_an_empty_list(client: Client, peer: Peer) -> None:
    pulling = asyncio.ensure_future(client.pull("t"))
    frame = await peer.next(T.PULL)
    assert frame[2:] == ("t", "default", 32, 0, {"tell": True})
    peer.ok(frame, (2, NOW_MS, ()))
    assert await soon(pulling) == []


async def test_a_long_pull_outlasts_the_send_timeout() -> None:
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.1, retries=0) as client:
        peer = await daemon.peer()
        pulling = asyncio.ensure_future(client.pull("t", wait=20))
        frame = await peer.next(T.PULL)
        await soon(asyncio.to_thread(_block, 0.5))
        peer.ok(frame, (2, NOW_MS, ((5, 1, NOW_MS, b"a"),)))
        assert len(await soon(pulling)) == 1
        assert daemon.connections == 1


@pytest.mark.parametrize("end", ["cancelled", "cancelled with the answer", "out of time"])
async def test_a_pull_that_ended_early_releases_its_deliveries(
    client: Client, peer: Peer, end: str
) -> None:
    timeout = 0.05 if end == "out of time" else None
    pulling = asyncio.ensure_future(client.pull("t", wait=10, timeout=timeout))
    frame = await peer.next(T.PULL)
    assert frame[5] <= 1000 * (timeout or 10)
    answer = (2, NOW_MS, ((5, 1, NOW_MS, b"a"), (6, 3, NOW_MS, b"b")))
    reconnector = client._reconnector
    assert reconnector.connection is not None
    if end == "cancelled with the answer":
        reconnector.connection._take((T.OK, frame[1], answer))
    if timeout is None:
        pulling.cancel()
    await soon(asyncio.wait((pulling,)))
    assert pulling.cancelled() or isinstance(pulling.exception(), errors.SendTimeout)
    reconnector._watch._sweep()
    peer.ok(frame, answer)
    frame = await peer.next(T.RELEASE)
    assert frame[2:] == ("t", "default", 2, (5, 6), (1, 3))
    peer.ok(frame)
