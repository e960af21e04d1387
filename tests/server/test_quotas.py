"""Quotas: what one token may take, at the limit and one above it, over both transports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from server.access_rig import AccessRig
from support.shard_rig import Peer
from tickwheel.errors import BadRequest
from tickwheel.protocol.frames import FrameType as T
from tickwheel.server import tokens
from tickwheel.server.shard.access import Quotas

DAY_MS = 86_400_000
Make = Callable[..., Coroutine[Any, Any, AccessRig]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[AccessRig] = []

    async def start(**settings: Any) -> AccessRig:
        rig = await AccessRig(**settings).start()
        assert isinstance(rig, AccessRig)
        made.append(rig)
        return rig

    yield start
    for rig in made:
        await rig.stop()


def task(topic: str = "t", body: bytes = b"") -> tuple[Any, ...]:
    return (topic, body, DAY_MS)


def refused(frame: Any, *words: str) -> None:
    assert frame[0] == T.ERROR and frame[2] == "overloaded", frame
    assert all(word in frame[3] for word in words), frame


async def one_by_one(peer: Peer, count: int) -> list[Any]:
    """Frames of one plain task each, in one piece: the quick way in."""
    numbers = [peer.send(T.ENQUEUE, 1, (task(),)) for _ in range(count)]
    return [await peer.answer(number) for number in numbers]


async def test_tasks_a_second(make: Make) -> None:
    rig = await make()
    token = await rig.token("produce", quotas={"tasks_per_s": 10})
    one, same = await rig.peer(token=token), await rig.peer(token=token)
    assert (await one.enqueue(*[task()] * 4))[0] == T.OK
    assert (await same.enqueue(*[task()] * 6))[0] == T.OK
    refused(
        await one.enqueue(task()), "token somebody", "tasks_per_s (10)", "come again in 0.001 s"
    )
    rig.pass_time(50)  # half a task is something: the rest is owed
    assert (await one.enqueue(*[task()] * 3))[0] == T.OK
    refused(await same.enqueue(task()), "0.250 s")
    answer = await rig.http(token, "POST", "/v1/tasks", {"topic": "t", "body": ""})
    assert answer.status == 429 and answer.json["code"] == "overloaded"
    assert answer.headers["retry-after"] == "1"
    rig.pass_time(251)
    answer = await rig.http(token, "POST", "/v1/tasks", {"topic": "t", "body": ""})
    assert answer.status == 201
    rig.pass_time(3_600_000)  # what was not used is not kept
    kinds = [frame[0] for frame in await one_by_one(one, 30)]
    assert T.OK in kinds and T.ERROR in kinds


async def test_bytes_a_second(make: Make) -> None:
    rig = await make()
    token = await rig.token("produce", quotas={"bytes_per_s": 1_000})
    peer = await rig.peer(token=token)
    assert (await peer.enqueue(task(body=b"x" * 3_000)))[0] == T.OK
    refused(await peer.enqueue(task()), "bytes_per_s (1000)", "come again in 2.")
    rig.pass_time(2_200)
    assert (await peer.enqueue(task()))[0] == T.OK


async def test_tasks_that_are_not_finished_of_the_topics_that_it_may_produce_to(
    make: Make,
) -> None:
    rig = await make()
    token = await rig.token("produce=ours.*", quotas={"pending": 5})
    owner, peer = await rig.peer_with("all"), await rig.peer(token=token)
    assert (await owner.enqueue(*[task("theirs")] * 20, task("ours.b")))[0] == T.OK
    assert (await peer.enqueue(*[task("ours.a")] * 3))[0] == T.OK
    refused(await peer.enqueue(*[task("ours.a")] * 2), "4 tasks", "2 more", "over 5 (pending)")
    ids = (await peer.enqueue(task("ours.a")))[2][1]
    refused(await peer.enqueue(task("ours.a")), "5 tasks", "(pending)")
    # Also the quick way in, and through HTTP.
    number = peer.send(T.ENQUEUE, 1, (task("ours.a"),))
    refused(await peer.answer(number), "(pending)")
    body = {"topic": "ours.a", "body": ""}
    assert (await rig.http(token, "POST", "/v1/tasks", body)).status == 429
    assert (await peer.call(T.CANCEL, tuple(ids)))[2] == ("cancelled",)
    rig.pass_time(100)
    assert (await peer.enqueue(task("ours.a")))[0] == T.OK


async def test_what_is_due_and_not_finished_counts(make: Make) -> None:
    rig = await make()
    token = await rig.token("produce", "consume", quotas={"pending": 2})
    peer = await rig.peer(token=token)
    assert (await peer.enqueue(("t", b"", 0), ("t", b"", 0)))[0] == T.OK
    rig.pass_time(1_000)
    await rig.settle()
    refused(await peer.enqueue(task()), "(pending)")


async def test_half_tasks_are_tasks_for_a_quota(make: Make) -> None:
    rig = await make()
    peer = await rig.peer(token=await rig.token("produce", quotas={"tasks_per_s": 3}))
    for part in (1, 1, 2):
        answer = await peer.call(T.PREPARE, "x", "g", part, [task()] * 2, None)
        assert answer[0] == T.OK, "a resend costs nothing"
    refused(await peer.call(T.PREPARE, "x", "g", 3, [task()], None), "tasks_per_s (3)")
    assert (await peer.call(T.PREPARE, "x", "g", 2, [task()], None))[0] == T.OK
    assert len((await peer.call(T.COMMIT, "x"))[2][1]) == 4


async def test_a_resend_is_answered_also_above_a_quota(make: Make) -> None:
    """Else who has it refused would think that it was not stored."""
    rig = await make()
    peer = await rig.peer(token=await rig.token("produce", quotas={"pending": 1}))
    first = await peer.call(T.ENQUEUE, 1, (task(),))
    peer.request -= 1
    again = await peer.call(T.ENQUEUE, 1, (task(),))
    assert again[0] == T.OK and again[2] == first[2]
    refused(await peer.enqueue(task()), "(pending)")


async def test_connections(make: Make) -> None:
    rig = await make()
    token = await rig.token("all", quotas={"connections": 2})
    first, second = await rig.peer(token=token), await rig.peer(token=token)
    refused(await rig.stranger().hello(token=token), "2 connections")
    assert (await rig.http(token, "GET", "/v1/status")).status == 429
    assert (await rig.stranger().hello(token=await rig.token("all", name="other")))[0] == T.OK
    second.lose()
    assert (await rig.http(token, "GET", "/v1/status")).status == 200
    third = rig.stranger()
    assert (await third.hello(token=token))[0] == T.OK
    assert not first.closed


async def test_subscriptions(make: Make) -> None:
    rig = await make()
    token = await rig.token("consume", quotas={"subscriptions": 2})
    one, two = await rig.peer(token=token), await rig.peer(token=token)
    assert (await one.call(T.SUBSCRIBE, 1, "t", "g", 1, {}))[0] == T.OK
    two.send(T.PULL, "t", "g", 1, 60_000, {})
    await rig.settle()
    refused(await two.call(T.SUBSCRIBE, 1, "t", "g", 1, {}), "2 subscriptions")
    refused(await one.call(T.PULL, "t", "g", 1, 0, {}), "2 subscriptions")
    one.lose()
    assert (await two.call(T.SUBSCRIBE, 1, "t", "g", 1, {}))[0] == T.OK


async def test_settings_hold_where_a_token_says_nothing(make: Make) -> None:
    rig = await make(quota_connections=1, quota_pending=100, serve_token="of-everything")
    own = await rig.token("all", name="own", quotas={"connections": 2})
    plain = await rig.token("all", name="plain")
    for token, most in ((own, 2), (plain, 1)):
        for _ in range(most):
            peer = await rig.peer(token=token)
            assert peer.closed is False
        refused(await rig.stranger().hello(token=token), f"{most} connections")
        refused(await peer.enqueue(*[task()] * 101), "(pending)")
    for _ in range(5):  # the one password of the settings has none
        await rig.peer(token="of-everything")


async def test_a_change_of_its_quotas_ends_what_a_token_has_opened(make: Make) -> None:
    rig = await make()
    token = await rig.token("all", quotas={"connections": 2})
    peer = await rig.peer(token=token)
    text = rig.path.read_text()
    rig.path.write_text(text.replace('"connections": 2', '"connections": 3'))
    await rig.reload()
    assert peer.frames()[-1][:2] == (T.GOODBYE, "unauthorized")


def test_quotas_are_read_strictly() -> None:
    assert tokens.parse_quotas([]) is None
    found = tokens.parse_quotas(["tasks_per_s=0.5", "pending=3"])
    assert found == Quotas(tasks_per_s=0.5, pending=3)
    names = ("pending", "pending=", "tasks=1", "=1", "tasks_per_s=nan", "tasks_per_s=inf")
    for wrong in (*names, "pending=0", "pending=-1", "pending=1.5", "tasks_per_s=0"):
        with pytest.raises(BadRequest):
            tokens.parse_quotas([wrong])
