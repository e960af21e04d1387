"""Groups and settings: what is asked, what is made of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon, Peer
from support.waiting import soon
from tickwheel import Client, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.api.shapes import reader_of

LINES: dict[str, Any] = {
    "order_retry": 0.05, "order_attempts": 3, "order_failure": "hold", "fair_by": "tenant",
    "limit_each": 5, "rate_each": 2.5,
}  # fmt: skip
LINES_WIRE = {"order_retry_ms": 50} | {n: v for n, v in LINES.items() if n != "order_retry"}


async def asked(
    kind: T, answer: Any, call: Callable[[Client], Coroutine[Any, Any, Any]]
) -> tuple[Any, Any]:
    """(fields sent, result)"""
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        asking = asyncio.ensure_future(call(client))
        frame = await peer.next(kind)
        peer.ok(frame, answer)
        return frame[2:], await soon(asking)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.create_group("t", "g", start="yesterday"), ("start", "'yesterday'")),
        (lambda c: c.create_group("t", "g", start=datetime(2030, 1, 1)), ("start", "zone")),  # noqa: DTZ001
        (lambda c: c.create_group("t", "g", rate=0), ("rate", "0")),
        (lambda c: c.create_group("t", "g", burst=0), ("burst", "0")),
        (lambda c: c.create_group("t", "g", paused=1), ("paused", "1")),
        (lambda c: c.create_group("t", "a b"), ("group", "'a b'")),
        (lambda c: c.create_group("t", None), ("group", "None")),
        (lambda c: c.delete_group("t", None), ("group", "None")),
        (lambda c: c.delete_group("t", "g", force=None), ("force", "None")),
        (lambda c: c.configure(""), ("topic", "''")),
        (lambda c: c.configure("t", rate=float("inf")), ("rate", "inf")),
        (lambda c: c.configure("t", rate=True), ("rate", "True")),
        (lambda c: c.configure("t", burst=1.5), ("burst", "1.5")),
        (lambda c: c.configure("t", paused=None), ("paused", "None")),
        (lambda c: c.configure("t", retry={"kind": "none"}), ("retry", "Retry.fixed")),
    ],
)
async def test_invalid_group_options_are_named_and_not_sent(
    call: Any, words: tuple[str, ...], client: Client, peer: Peer
) -> None:
    with pytest.raises(errors.BadRequest) as raised:
        await soon(call(client))
    for word in words:
        assert word in raised.value.message
    assert peer.nothing()


async def test_an_answer_of_the_wrong_shape_is_a_protocol_error() -> None:
    for kind, call in (
        (T.GROUP_CREATE, lambda c: c.create_group("t", "g")),
        (T.CONFIGURE, lambda c: c.configure("t")),
        (T.GROUP_DELETE, lambda c: c.delete_group("t", "g")),
    ):
        for answer in (None, {}, 5, [1]):
            with pytest.raises(errors.ProtocolError):
                await asked(kind, answer, call)


@pytest.mark.parametrize("broadcast", [False, True])
async def test_a_consumer_names_the_filter(broadcast: bool, client: Client, peer: Peer) -> None:
    wanted = {"tags": "eu", "where": "n > 1"}
    pulling = asyncio.ensure_future(client.pull("t", group="g", **wanted))
    frame = await peer.next(T.PULL)
    assert frame[-1] == wanted | {"tell": True}
    peer.ok(frame, (1, NOW_MS, ()))
    assert await soon(pulling) == []
    subscription = client.subscribe("t", broadcast=broadcast, **wanted)
    starting = asyncio.ensure_future(subscription.start())
    frame = await peer.next(T.SUBSCRIBE)
    assert frame[-1] == wanted | ({"broadcast": True} if broadcast else {})
    peer.ok(frame, {"lease_ms": 30_000})
    await soon(starting)


async def test_consumers_send_ordering_and_fairness_options(client: Client, peer: Peer) -> None:
    pulling = asyncio.ensure_future(client.pull("t", group="g", **LINES))
    frame = await peer.next(T.PULL)
    assert frame[-1] == LINES_WIRE | {"tell": True}
    peer.ok(frame, (1, NOW_MS, ()))
    assert await soon(pulling) == []
    starting = asyncio.ensure_future(client.subscribe("t", **LINES).start())
    frame = await peer.next(T.SUBSCRIBE)
    assert frame[-1] == LINES_WIRE
    peer.ok(frame, {"lease_ms": 30_000})
    await soon(starting)
    with pytest.raises(errors.BadRequest, match="fair_by has no effect with broadcast"):
        client.subscribe("t", broadcast=True, fair_by="key")


async def test_ordering_and_fairness_options_are_type_checked() -> None:
    wrong: Any
    async with FakeDaemon() as daemon, daemon.client() as client:
        for name, wrong, words in (
            ("order_attempts", 1.5, "an integer"), ("order_attempts", True, "an integer"),
            ("order_failure", 5, "a str"), ("fair_by", b"key", "a str"),
            ("limit_each", "5", "an integer"), ("rate_each", "5", "a number"),
            ("order_retry", -1, "order_retry"),
        ):  # fmt: skip
            with pytest.raises(errors.BadRequest, match=words):
                client.subscribe("t", **{name: wrong})
            for call in (client.create_group, client.configure):
                with pytest.raises(errors.BadRequest, match=words):
                    await call("t", "g", **{name: wrong})


async def test_a_held_key_is_named_by_task_or_key(client: Client) -> None:
    for task_id, key in ((None, None), (5, "a")):
        with pytest.raises(errors.BadRequest, match="exactly one of ids and key must be given"):
            await client.release_key("t", "g", task_id, key=key)


async def test_a_filter_must_be_text() -> None:
    wrong: Any = 5
    async with FakeDaemon() as daemon, daemon.client() as client:
        for name in ("tags", "where"):
            with pytest.raises(errors.BadRequest, match=f"{name} must be a str"):
                client.subscribe("t", **{name: wrong})
            for call in (client.create_group, client.configure):
                with pytest.raises(errors.BadRequest, match=f"{name} must be a str"):
                    await call("t", "g", **{name: wrong})


def test_a_page_cursor_can_have_parts_of_several_types() -> None:
    assert reader_of(tuple[int, str])((3, "g")) == (3, "g")
    assert reader_of(tuple[int, ...])((3, 4, 5)) == (3, 4, 5)
    with pytest.raises(ValueError, match="argument 2"):
        reader_of(tuple[int, str])((3,))
