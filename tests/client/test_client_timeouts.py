"""``timeout=`` of single calls: over when the caller said, and with the error that is true."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from support.fake_daemon import FakeDaemon, Peer, turns
from support.waiting import soon
from tickwheel import Client, Delivery, Task, errors
from tickwheel.api.frames import FrameType as T

SHORT_S = 0.05
LONG_S = 60.0
"""The client's own time: a test that waits for it fails."""


def patient(daemon: FakeDaemon, **options: Any) -> Client:
    """One that would wait for long if the call did not say otherwise."""
    return daemon.client(send_timeout=LONG_S, heartbeat=LONG_S, retries=0, **options)


@pytest.fixture
async def client(daemon: FakeDaemon) -> AsyncIterator[Client]:
    async with patient(daemon) as made:
        yield made


# --- enqueues ------------------------------------------------------------------------------------


async def test_an_enqueue_unanswered_in_its_timeout_is_unknown(client: Client, peer: Peer) -> None:
    began_s = time.monotonic()
    call = asyncio.ensure_future(client.enqueue("t", b"x", timeout=SHORT_S))
    await peer.next(T.ENQUEUE)
    with pytest.raises(errors.OutcomeUnknown, match=r"not answered within 0\.[01]"):
        await soon(call)
    assert time.monotonic() - began_s >= SHORT_S
    # Its place is free again, and what comes after it is not held up.
    after = asyncio.ensure_future(client.enqueue("t", b"y", timeout=LONG_S))
    peer.store(await peer.next(T.ENQUEUE))
    await soon(after)


async def test_an_unsent_enqueue_times_out_and_is_not_stored(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    await daemon.deaf()
    peer.close()
    await peer.gone()
    await turns()
    assert not client.connected
    calls = [client.enqueue("t", b"x", timeout=SHORT_S) for _ in range(3)]
    calls.append(client.enqueue("t", b"x", key="k", timeout=timedelta(seconds=SHORT_S)))
    for outcome in await soon(asyncio.gather(*calls, return_exceptions=True)):
        assert type(outcome) is errors.Unreachable
    await daemon.listen()
    kept = asyncio.ensure_future(client.enqueue("t", b"kept", timeout=LONG_S))
    peer = await daemon.peer()
    frame = await peer.next(T.ENQUEUE)
    assert [task[1] for task in frame[3]] == [b"kept"]  # none of the others comes after all
    peer.store(frame)
    await soon(kept)


async def test_calls_with_the_same_timeout_share_a_frame(client: Client, peer: Peer) -> None:
    named = [("a", None), ("b", 5), ("c", 5), ("d", 7), ("e", None), ("f", None)]
    calls = [
        asyncio.ensure_future(client.enqueue("t", body.encode(), timeout=timeout))
        for body, timeout in named
    ]
    frames = [await peer.next(T.ENQUEUE) for _ in range(4)]
    bodies = [b"".join(task[1] for task in frame[3]) for frame in frames]
    assert bodies == [b"a", b"bc", b"d", b"ef"]
    ids = [item for frame in frames for item in peer.store(frame)]
    assert [receipt.id for receipt in await soon(asyncio.gather(*calls))] == ids


async def test_a_refused_enqueue_ends_with_the_refusal() -> None:
    async with FakeDaemon() as daemon, daemon.client(send_timeout=LONG_S, retries=1000) as client:
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.enqueue("t", b"x", timeout=SHORT_S))
        peer.error(await peer.next(T.ENQUEUE), "store_full", "no room")
        with pytest.raises(errors.StoreFull, match="no room"):
            await soon(call)


async def test_a_timeout_covers_all_frames_of_a_call() -> None:
    async with FakeDaemon(tasks_per_frame_max=2) as daemon, patient(daemon) as client:
        peer = await daemon.peer()
        many = asyncio.ensure_future(client.enqueue_many([Task("t", b"x")] * 4, timeout=SHORT_S))
        with pytest.raises(errors.OutcomeUnknown):
            await soon(many)
        columns = asyncio.ensure_future(client.enqueue_columns("t", [b"x"] * 4, timeout=SHORT_S))
        with pytest.raises(errors.OutcomeUnknown):
            await soon(columns)
        assert [frame[0] for frame in [await peer.next() for _ in range(4)]] == [
            T.ENQUEUE, T.ENQUEUE, T.ENQUEUE_COLUMNS, T.ENQUEUE_COLUMNS,
        ]  # fmt: skip


async def test_waiting_for_room_counts_towards_the_timeout() -> None:
    async with FakeDaemon(window_max=1) as daemon, patient(daemon) as client:
        peer = await daemon.peer()
        first = asyncio.ensure_future(client.enqueue("t", b"x"))
        frame = await peer.next(T.ENQUEUE)
        with pytest.raises(errors.Overloaded, match="window_max"):
            await soon(client.enqueue("t", b"y", timeout=SHORT_S))
        peer.store(frame)
        await soon(first)


async def test_enqueue_nowait_takes_a_timeout(daemon: FakeDaemon, client: Client) -> None:
    await daemon.peer()
    with pytest.raises(errors.OutcomeUnknown):
        await soon(client.enqueue_nowait("t", b"x", timeout=SHORT_S))


# --- other calls ---------------------------------------------------------------------------------


async def test_a_sent_call_ends_at_its_timeout(daemon: FakeDaemon, client: Client) -> None:
    await daemon.peer()
    for call in (
        client.cancel(1, timeout=SHORT_S),
        client.reschedule(1, delay=1, timeout=SHORT_S),
        client.run_now(topic="t", key="k", timeout=SHORT_S),
        client.lookup(1, timeout=SHORT_S),
        client.pull("t", wait=LONG_S, timeout=SHORT_S),
        client.stats(timeout=SHORT_S),
        client.pause("t", timeout=SHORT_S),
        client.ping(timeout=SHORT_S),
        client.wait_bulk("b", timeout=SHORT_S),
        anext(aiter(client.list_tasks(timeout=SHORT_S))),
        anext(aiter(client.list_schedules(timeout=SHORT_S))),
    ):
        with pytest.raises(errors.SendTimeout, match="not answered within"):
            await soon(call)


async def test_a_search_of_many_pages_ends_at_its_timeout(client: Client, peer: Peer) -> None:
    async def answer() -> None:
        while True:
            frame = await peer.next(T.LIST)
            peer.ok(frame, {"tasks": (), "next": frame[1]})

    answering = asyncio.ensure_future(answer())
    with pytest.raises(errors.SendTimeout):
        await soon(client.find("k", timeout=SHORT_S))
    answering.cancel()


async def test_a_call_without_a_daemon_ends_at_its_timeout(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    await daemon.deaf()
    peer.close()
    await peer.gone()
    with pytest.raises(errors.Unreachable):
        await soon(client.cancel(1, timeout=SHORT_S))
    with pytest.raises(errors.Unreachable):
        await soon(client.oneway("t", b"x", timeout=SHORT_S))


async def test_verbs_of_a_delivery_take_a_timeout(client: Client, peer: Peer) -> None:
    deliveries = client.subscribe("t")
    starting = asyncio.ensure_future(deliveries.start())
    sub = await peer.subscribed()
    await soon(starting)
    peer.deliver(sub, *[b"x"] * 6)
    for verb in (
        lambda d: d.ack(timeout=SHORT_S),
        lambda d: d.nack(timeout=SHORT_S),
        lambda d: d.reject(timeout=SHORT_S),
        lambda d: d.extend(5, timeout=SHORT_S),
        lambda d: d.release(timeout=SHORT_S),
        lambda d: d.snooze(5, timeout=SHORT_S),
    ):
        delivery = await soon(anext(deliveries))
        with pytest.raises(errors.SendTimeout):
            await soon(verb(delivery))
    peer.ok(peer.sent(T.ACK)[0])


async def test_an_invalid_timeout_is_refused_at_once(client: Client) -> None:
    for wrong in (0, -1, "soon", timedelta(0), float("nan")):
        for call in (client.enqueue("t", b"x", timeout=wrong), client.stats(timeout=wrong)):
            with pytest.raises(errors.BadRequest, match="timeout"):
                await call


def test_every_call_takes_a_timeout() -> None:
    """A new verb has one as well."""
    without = {"connect"}  # connect_timeout and active_timeout are the client's
    for kind in (Client, Delivery):
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            written = inspect.unwrap(method)
            waits = inspect.iscoroutinefunction(written) or inspect.isasyncgenfunction(written)
            if waits and not name.startswith("_") and name not in without:
                assert "timeout" in inspect.signature(method).parameters, name
