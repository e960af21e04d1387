"""The client under pressure: parts of a batch refused, windows full, time over, odd addresses."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from support.fake_daemon import FakeDaemon, Peer, turns
from support.waiting import slowly, soon
from tickwheel import Client, Receipt, Task, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.client import Partly
from tickwheel.protocol import encode


async def stored(peer: Peer) -> None:
    peer.store(await peer.next(T.ENQUEUE))


# --- several frames, not all of them taken ---------------------------------------------------


async def test_partly_stored_has_receipts_and_errors_in_order() -> None:
    async with FakeDaemon(tasks_per_frame_max=2) as daemon, daemon.client(retries=0) as client:
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.enqueue_many([Task("t", b"x")] * 6))
        first, second, third = [await peer.next(T.ENQUEUE) for _ in range(3)]
        ids = peer.store(first)
        peer.error(second, "store_full", "no room")
        ids += peer.store(third)
        with pytest.raises(Partly) as raised:
            await soon(call)
        assert isinstance(raised.value, errors.OutcomeUnknown)
        receipts = raised.value.receipts
        assert [item.id for item in receipts if isinstance(item, Receipt)] == ids
        assert [type(item) for item in receipts[2:4]] == [errors.StoreFull] * 2


async def test_a_wholly_refused_batch_raises_the_daemons_error() -> None:
    async with FakeDaemon(tasks_per_frame_max=2) as daemon, daemon.client(retries=0) as client:
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.enqueue_many([Task("t", b"x")] * 4))
        for frame in [await peer.next(T.ENQUEUE) for _ in range(2)]:
            peer.error(frame, "store_full", "no room")
        with pytest.raises(errors.StoreFull, match="no room"):
            await soon(call)


async def test_the_error_that_promises_least_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with (
        FakeDaemon(tasks_per_frame_max=1) as daemon,
        daemon.client(retries=0, send_timeout=0.3) as client,
    ):
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.enqueue_many([Task("t", b"x")] * 2))
        peer.error(await peer.next(T.ENQUEUE), "refused")
        await peer.next(T.ENQUEUE)
        with pytest.raises(errors.OutcomeUnknown):
            await soon(call)


async def test_a_failed_frame_stops_the_rest_of_the_batch() -> None:
    async with FakeDaemon(tasks_per_frame_max=1) as daemon, daemon.client(retries=0) as client:
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.enqueue_many([Task("t", b"x")] * 100))
        answered = 0
        while not call.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    frame = await peer.next(T.ENQUEUE)
                answered += 1
                if answered == 1:
                    peer.error(frame, "refused")
                else:
                    peer.store(frame)
            await turns()
        with pytest.raises(Partly) as raised:
            call.result()
        assert len(raised.value.receipts) == 100
        assert answered < 30
        assert isinstance(raised.value.receipts[-1], errors.Unreachable), "not sent"


# --- room ------------------------------------------------------------------------------------


async def test_awaited_calls_wait_for_room_in_the_window() -> None:
    async with FakeDaemon(window_max=2) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        calls = []
        for i in range(6):
            calls.append(asyncio.ensure_future(client.enqueue("t", b"%d" % i)))
            await turns()
        first = [await peer.next(T.ENQUEUE) for _ in range(2)]
        await turns()
        assert peer.nothing()
        for frame in first:
            peer.store(frame)
        while not all(call.done() for call in calls):
            await stored(peer)
            await turns(20)
        assert len({receipt.id for receipt in await asyncio.gather(*calls)}) == 6


async def test_a_call_without_room_in_the_window_names_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowly(monkeypatch)
    async with (
        FakeDaemon(window_max=1) as daemon,
        daemon.client(send_timeout=0.3, retries=0) as client,
    ):
        peer = await daemon.peer()
        first = client.enqueue_nowait("t", b"x", timeout=60)  # its room is not given to another
        frame = await peer.next(T.ENQUEUE)
        second = asyncio.ensure_future(client.enqueue("t", b"y"))
        with pytest.raises(errors.TickwheelError) as raised:
            await soon(second)
        assert isinstance(raised.value, (errors.Refused, errors.Unreachable)), (
            "certainly not stored"
        )
        peer.store(frame)
        await soon(first)


async def test_oneway_waits_for_a_peer_that_does_not_read() -> None:
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.3, retries=0) as client:
        peer = await daemon.peer()
        peer.stop_reading()
        with pytest.raises(errors.TickwheelError):
            for _ in range(200):
                await soon(client.oneway("t", b"x" * 500_000))
        peer.read_again()


async def test_oneway_without_a_connection_raises() -> None:
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.2, retries=0) as client:
        peer = await daemon.peer()
        await daemon.deaf()
        peer.close()
        while client.connected:
            await turns()
        with pytest.raises(errors.Unreachable):
            await soon(client.oneway("t", b"x"))


# --- time over -------------------------------------------------------------------------------


async def test_an_unanswered_call_says_whether_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.3, retries=0) as client:
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.stats())
        await peer.next(T.STATS)
        with pytest.raises((errors.SendTimeout, errors.ConnectionLost)):
            await soon(call)
        await daemon.deaf()
        for open_one in list(daemon.open):
            open_one.close()
        while client.connected:
            await turns()
        with pytest.raises(errors.Unreachable):
            await soon(client.stats())


async def test_a_call_to_a_draining_daemon_moves_to_the_next(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    call = asyncio.ensure_future(client.pull("t"))
    peer.error(await peer.next(T.PULL), "draining")
    await peer.gone()
    peer = await daemon.peer()
    peer.ok(await peer.next(T.PULL), (1, 0, ()))
    assert await soon(call) == []


async def test_a_retryable_error_of_a_call_is_retried_then_raised() -> None:
    async with FakeDaemon() as daemon, daemon.client(retries=1) as client:
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.cancel(5))
        peer.error(await peer.next(T.CANCEL), "overloaded")
        peer.error(await peer.next(T.CANCEL), "overloaded", "still")
        with pytest.raises(errors.Overloaded, match="still"):
            await soon(call)


async def test_a_refused_repetition_of_a_lost_call_does_not_deny_its_effect() -> None:
    async with FakeDaemon() as daemon, daemon.client(retries=0) as client:
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.cancel(5))
        await peer.next(T.CANCEL)
        peer.close()
        peer = await daemon.peer()
        peer.error(await peer.next(T.CANCEL), "overloaded", "too much")
        with pytest.raises(errors.ConnectionLost, match="may have been executed.*too much"):
            await soon(call)


async def test_acks_over_a_drain_are_answered_by_the_next_start(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    pulling = asyncio.ensure_future(client.pull("t"))
    peer.ok(await peer.next(T.PULL), (1, 0, ((5, 1, 0, b"x"),)))
    [delivery] = await soon(pulling)
    peer.goodbye()
    ack = delivery.ack_nowait()
    await peer.gone()
    peer = await daemon.peer()
    peer.ok(await peer.next(T.ACK), ("done",))
    assert await soon(ack) == "done"


# --- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("tcp://[::1]:1", "[::1]:1"),
        ("[::1]:1", "[::1]:1"),
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("tcp://127.0.0.1:1/", "127.0.0.1:1"),
        ("tcp://127.0.0.1:1, 127.0.0.1:2", "127.0.0.1:2"),
    ],
)
async def test_addresses_are_parsed_in_every_form(url: str, shown: str) -> None:
    with pytest.raises(errors.Unreachable) as raised:
        await soon(Client(url, connect_timeout=0.2).connect())
    assert shown in raised.value.message


@pytest.mark.parametrize("host", ["x" * 300, "no..such..host", "\ud800"])
async def test_an_invalid_host_name_is_unreachable(host: str) -> None:
    with pytest.raises((errors.Unreachable, errors.BadRequest)):
        await soon(Client(f"tcp://{host}:1", connect_timeout=0.3).connect())


async def test_more_calls_than_the_client_keeps_are_overloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tickwheel.client.requests.CALLS_MAX", 3)
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        calls = [asyncio.ensure_future(client.ping()) for _ in range(3)]
        frames = [await peer.next(T.PING) for _ in calls]
        with pytest.raises(errors.Overloaded, match="the limit is 3"):
            await client.ping()
        for frame in frames:
            peer.ok(frame)
        await soon(asyncio.gather(*calls))
        asked = asyncio.ensure_future(client.ping())
        peer.ok(await peer.next(T.PING))
        await soon(asked)


async def test_an_oversized_answer_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4_096
    monkeypatch.setattr("tickwheel.client.connection.FRAME_BYTES_MAX", limit)
    async with FakeDaemon() as daemon, daemon.client() as client:
        for over in (0, 1):
            peer = await daemon.peer()
            asked = asyncio.ensure_future(client.ping())
            frame = await peer.next(T.PING)
            head = len(encode((T.OK, frame[1], b"x" * (limit - 100)))) - (limit - 100)
            peer.ok(frame, b"x" * (limit - head + over))
            if not over:
                await soon(asked)
                peer.close()
        again = await daemon.peer()
        again.ok(await again.next(T.PING))
        await soon(asked)
