"""``enqueue_columns``: many tasks that differ in body and delay only."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon, Peer
from support.waiting import soon
from tickwheel import Client, Receipt, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import Frame, encode
from tickwheel.server.daemon import Daemon
from tickwheel.server.logs import configure
from tickwheel.server.settings import Settings


def store(peer: Peer, frame: Frame) -> list[int]:
    """Answer with new ids."""
    assert frame[0] == T.ENQUEUE_COLUMNS
    ids = [peer.daemon.new_id() for _ in frame[4]]
    peer.ok(frame, (NOW_MS, ids))
    return ids


async def test_a_columns_frame_has_topic_and_common_delay_once(client: Client, peer: Peer) -> None:
    call = asyncio.ensure_future(client.enqueue_columns("t", [b"a", b"b"], delay=1.5))
    frame = await peer.next()
    assert frame[3:] == ("t", (b"a", b"b"), 1_500)
    ids = store(peer, frame)
    receipts = await soon(call)
    assert list(receipts.ids) == ids and list(receipts.dues_ms) == [NOW_MS + 1_500] * 2
    assert receipts[1] == Receipt(ids[1], NOW_MS + 1_500)
    assert list(receipts[:1]) == [receipts[0]] and len(receipts) == 2


async def test_each_task_of_columns_has_its_own_delay(client: Client, peer: Peer) -> None:
    delays = [0.0001, 2, timedelta(seconds=3)]
    call = asyncio.ensure_future(client.enqueue_columns("t", [b"", b"", b""], delays=delays))
    frame = await peer.next()
    assert frame[5] == (1, 2_000, 3_000)
    store(peer, frame)
    assert [receipt.due_ms - NOW_MS for receipt in await soon(call)] == [1, 2_000, 3_000]


async def test_a_lost_frame_is_sent_again_under_its_number(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    call = asyncio.ensure_future(client.enqueue_columns("t", [b"a"]))
    first = await peer.next()
    peer.close()
    peer = await daemon.peer()
    again = await peer.next()
    assert again[:2] == first[:2] and again[3:] == first[3:]
    store(peer, again)
    assert len(await soon(call)) == 1


async def test_an_older_daemon_gets_columns_as_tasks_with_the_same_request(
    client: Client, peer: Peer
) -> None:
    call = asyncio.ensure_future(client.enqueue_columns("t", [b"a", b"b"], delays=[1, 2]))
    frame = await peer.next()
    peer.error(frame, "unknown_type")
    plain = await peer.next(T.ENQUEUE)
    assert plain[1] == frame[1]
    assert plain[3] == (("t", b"a", 1_000), ("t", b"b", 2_000))
    ids = peer.store(plain)
    assert list((await soon(call)).ids) == ids


async def test_columns_over_the_frame_limit_are_split() -> None:
    async with FakeDaemon(tasks_per_frame_max=3) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        results = [b"%d" % n for n in range(8)]
        call = asyncio.ensure_future(client.enqueue_columns("t", results, delays=range(8)))
        sent: list[bytes] = []
        ids: list[int] = []
        while len(sent) < len(results):
            frame = await peer.next()
            sent += frame[4]
            ids += store(peer, frame)
        receipts = await soon(call)
        assert sent == results and list(receipts.ids) == ids
        assert receipts.dues_ms[7] == NOW_MS + 7_000


async def test_a_columns_frame_resent_as_tasks_still_fits() -> None:
    topic = "t" * 255
    async with FakeDaemon(frame_bytes_max=10_000) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.enqueue_columns(topic, [b""] * 100))
        stored = 0
        while stored < 100:
            frame = await peer.next()
            if frame[0] == T.ENQUEUE_COLUMNS:
                peer.error(frame, "unknown_type")
            else:
                assert len(encode(frame)) <= 10_000
                stored += len(peer.store(frame))
        assert len(await soon(call)) == 100


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"bodies": [b"", "x"]}, errors.BadRequest, "bodies[1] must be bytes"),
        ({"bodies": [b"x" * 11]}, errors.BodyTooLarge, "bodies[0] has 11 bytes; the limit is 10"),
        ({"bodies": [b""], "delays": []}, errors.BadRequest, "delays has 0 elements"),
        ({"bodies": [b""], "delays": [-1]}, errors.BadRequest, "delays[0]"),
        ({"bodies": [b""], "delays": [float("nan")]}, errors.BadRequest, "delays[0]"),
        ({"bodies": [b""], "delays": [1e9]}, errors.DueTooFar, "delays[0] is"),
        ({"bodies": [b""], "delay": 1e9}, errors.DueTooFar, "delay is"),
        ({"bodies": [b""], "delay": 1, "delays": [1]}, errors.BadRequest, "either delay or delays"),
        ({"topic": "a b", "bodies": []}, errors.BadRequest, "topic must be"),
    ],
)
async def test_invalid_columns_are_refused_before_sending(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    async with FakeDaemon(body_bytes_max=10) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        with pytest.raises(error) as raised:
            await client.enqueue_columns(**({"topic": "t"} | arguments))
        assert text in str(raised.value)
        assert peer.nothing()


async def test_empty_columns_send_nothing(client: Client, peer: Peer) -> None:
    assert list(await client.enqueue_columns("t", [])) == []
    assert peer.nothing()


async def test_a_real_daemon_stores_and_delivers_columns() -> None:
    settings = Settings(store="memory:", listen="tcp://127.0.0.1:0")
    daemon = Daemon(settings, configure("json", "critical"))
    await daemon.start()
    try:
        async with Client(daemon.url) as client, client.subscribe("t", group="g") as deliveries:
            receipts = await client.enqueue_columns("t", [b"1", b"2", b"3"], delays=[0, 0, 60])
            got = [await soon(anext(aiter(deliveries))) for _ in range(2)]
            assert {task.body for task in got} == {b"1", b"2"}
            assert {task.id for task in got} == {receipts[0].id, receipts[1].id}
            for delivery in got:
                await delivery.ack()
            assert await client.cancel(receipts[2].id) == "cancelled"
    finally:
        await daemon.stop()
