"""Quotas: what one token may take, at the limit and one above it, over both transports."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from weakref import ref

import pytest

from server.access.access_rig import AccessRig
from support.shard_rig import NOW_MS, Peer
from support.shards import Shards, key_in
from tickwheel.api.frames import FrameType as T
from tickwheel.api.verb import Right
from tickwheel.engine.engine import Engine
from tickwheel.errors import BadRequest, Overloaded
from tickwheel.server.access import tokens
from tickwheel.server.settings import Settings
from tickwheel.server.shard.callers import Principal, Quota, Quotas, Scopes, Topics

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


async def test_tasks_per_second_are_limited(make: Make) -> None:
    rig = await make()
    token = await rig.token("produce", quotas={"tasks_per_s": 10})
    one, same = await rig.peer(token=token), await rig.peer(token=token)
    assert (await one.enqueue(*[task()] * 4))[0] == T.OK
    assert (await same.enqueue(*[task()] * 6))[0] == T.OK
    refused(await one.enqueue(task()), "token somebody", "tasks_per_s (10)", "try again in 0.001 s")
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


async def test_bytes_per_second_are_limited(make: Make) -> None:
    rig = await make()
    token = await rig.token("produce", quotas={"bytes_per_s": 1_000})
    peer = await rig.peer(token=token)
    assert (await peer.enqueue(task(body=b"x" * 3_000)))[0] == T.OK
    refused(await peer.enqueue(task()), "bytes_per_s (1000)", "try again in 2.")
    rig.pass_time(2_200)
    assert (await peer.enqueue(task()))[0] == T.OK


async def test_pending_tasks_of_a_tokens_topics_are_limited(make: Make) -> None:
    rig = await make()
    token = await rig.token("produce=ours.*", quotas={"pending": 5})
    owner, peer = await rig.peer_with("all"), await rig.peer(token=token)
    assert (await owner.enqueue(*[task("theirs")] * 20, task("ours.b")))[0] == T.OK
    assert (await peer.enqueue(*[task("ours.a")] * 3))[0] == T.OK
    refused(
        await peer.enqueue(*[task("ours.a")] * 2), "4 unfinished", "2 more", "limit 5 (pending)"
    )
    ids = (await peer.enqueue(task("ours.a")))[2][1]
    refused(await peer.enqueue(task("ours.a")), "5 unfinished", "(pending)")
    # Also the quick way in, and through HTTP.
    number = peer.send(T.ENQUEUE, 1, (task("ours.a"),))
    refused(await peer.answer(number), "(pending)")
    body = {"topic": "ours.a", "body": ""}
    assert (await rig.http(token, "POST", "/v1/tasks", body)).status == 429
    assert (await peer.call(T.CANCEL, tuple(ids)))[2][0][1] == "cancelled"
    rig.pass_time(100)
    assert (await peer.enqueue(task("ours.a")))[0] == T.OK


async def test_pending_counts_every_unfinished_task_of_its_topics(make: Make) -> None:
    """However it came in, at any moment: it is staged, it is half, it is durable."""
    rig = await make()
    few = await rig.token("produce=ours.*", name="few", quotas={"pending": 10})
    peer, owner = await rig.peer(token=few), await rig.peer_with("all")
    rig.store.stall()
    theirs = owner.send(T.ENQUEUE, 1, (task("theirs"),) * 500)
    peer.send(T.ENQUEUE, 1, (task("ours.a"),) * 3)
    half = peer.send(T.PREPARE, "x", "g", 1, [task("ours.b")] * 3, None)
    await rig.settle()
    number = peer.send(T.ENQUEUE, 1, (task("ours.a"),) * 5)
    refused(await peer.answer(number), "6 unfinished", "5 more", "limit 10 (pending)")
    rig.store.go_on()
    assert (await owner.answer(theirs))[0] == (await peer.answer(half))[0] == T.OK
    refused(
        await peer.call(T.PREPARE, "x", "g", 2, [task("ours.b")] * 5, None),
        "6 unfinished",
        "5 more",
    )
    assert (await peer.enqueue(*[task("ours.a")] * 4))[0] == T.OK
    refused(
        await peer.call(T.PREPARE, "y", "g", 1, [task("ours.b")], None), "limit is 10 (pending)"
    )
    assert len((await peer.call(T.COMMIT, "x"))[2][1]) == 3
    refused(await peer.enqueue(task("ours.a")), "has 10 unfinished", "limit is 10 (pending)")


async def test_pending_falls_with_every_end_of_a_task(make: Make) -> None:
    rig = await make()
    token = await rig.token("all=ours.*", quotas={"pending": 4})
    peer = await rig.peer(token=token)
    assert (await peer.call(T.SUBSCRIBE, 1, "ours.a", "g", 4, {}))[0] == T.OK
    assert (await peer.call(T.PREPARE, "x", "g", 1, [task("ours.b")], None))[0] == T.OK
    ids = (await peer.enqueue(task("ours.a"), ("ours.a", b"", 0), ("ours.a", b"", 0)))[2][1]
    refused(await peer.enqueue(task("ours.a")), "(pending)")
    assert (await peer.call(T.CANCEL, ids[:1]))[2][0][1] == "cancelled"
    assert (await peer.call(T.ROLLBACK, "x"))[0] == T.OK
    rig.pass_time(1)
    await rig.settle()
    epoch = rig.core.epoch
    assert (await peer.call(T.ACK, "ours.a", "g", epoch, [ids[1]], [1]))[0] == T.OK
    rejected = (ids[2], epoch, 1, "bad")
    assert (await peer.call(T.REJECT, "ours.a", "g", [rejected]))[0] == T.OK
    assert rig.core.dead == 1, "which nobody waits for"
    assert (await peer.enqueue(*[task("ours.a")] * 4))[0] == T.OK
    refused(await peer.enqueue(task("ours.a")), "4 unfinished", "(pending)")


async def test_a_rotated_token_counts_its_predecessors_tasks(make: Make) -> None:
    rig = await make()
    old = await rig.token("produce=old.*", name="roll", quotas={"pending": 10})
    peer = await rig.peer(token=old)
    assert (await peer.enqueue(*[task("old.a")] * 6))[0] == T.OK
    token = await rig.token("produce=new.*", name="roll", quotas={"pending": 10})
    new = await rig.peer(token=token)
    refused(await new.enqueue(*[task("new.a")] * 5), "6 unfinished", "5 more")
    assert (await new.enqueue(*[task("new.a")] * 4))[0] == T.OK
    refused(await peer.enqueue(task("old.a")), "10 unfinished")


async def test_a_pending_check_does_not_scan_topics(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await make()
    peer = await rig.peer(token=await rig.token("produce", quotas={"pending": 10_000}))
    assert (await peer.enqueue(*[task(f"t{n}") for n in range(200)]))[0] == T.OK
    looked_at: list[str] = []
    has = Topics.__call__

    def look(topics: Topics, name: str) -> bool:
        looked_at.append(name)
        return has(topics, name)

    monkeypatch.setattr(Topics, "__call__", look)
    for n in range(20):
        assert (await peer.enqueue(task(f"t{n}")))[0] == T.OK
        rig.pass_time(1_000)
    assert len(looked_at) <= 20, "what is new is looked at once"


def test_a_quota_keeps_no_tasks_of_a_former_leader() -> None:
    scopes, quotas = Scopes(), Quotas(pending=5)
    scopes.put([Principal("few", ((Right.PRODUCE, ("*",)),), "id", quotas)])
    quota = Quota("few", quotas, scopes)
    engine = Engine(Settings(store="memory:").engine(), 1, 0, NOW_MS)
    assert quota.room(engine.core, 0) == 5
    core = ref(engine.core)
    del engine
    gc.collect()
    assert core() is None
    assert quota.room(Engine(Settings(store="memory:").engine(), 2, 0, NOW_MS).core, 0) == 5


async def test_transactions_of_a_token_are_limited(make: Make) -> None:
    rig = await make()
    one = await rig.peer(token=await rig.token("produce", name="a", quotas={"transactions": 2}))
    same = await rig.peer(token=await rig.token("produce", name="a", quotas={"transactions": 2}))
    assert (await one.call(T.PREPARE, "x", "g", 1, [task()], None))[0] == T.OK
    assert (await same.call(T.PREPARE, "y", "g", 1, [task()], None))[0] == T.OK
    words = "token a has 2 undecided transactions", "the limit is 2 (transactions)"
    refused(await one.call(T.PREPARE, "z", "g", 1, [task()], None), *words)
    assert (await one.call(T.PREPARE, "y", "g", 2, [task()], None))[0] == T.OK, "more of one"
    assert (await one.call(T.ROLLBACK, "x"))[0] == T.OK
    assert (await one.call(T.PREPARE, "z", "g", 1, [task()], None))[0] == T.OK


async def test_tokens_leave_each_other_room_for_transactions(make: Make) -> None:
    """One leaves as much as it has, and so does the next; the one password has all of it."""
    rig = await make(
        transactions_max=12, transactions_bytes_max=1 << 20, serve_token="of-everything"
    )
    counts = []
    for name in ("a", "b", "c", "d"):
        peer, count = await rig.peer(token=await rig.token("produce", name=name)), 0
        for n in range(12):
            answer = await peer.call(T.PREPARE, f"{name}{n}", "g", 1, [task()], None)
            if answer[0] != T.OK:
                refused(answer, *(("remain for others",) if count > 1 else ()), "(transactions")
                break
            count += 1
        counts.append(count)
    assert counts == [6, 3, 2, 1]
    large = b"x" * 1_000
    rig = await make(transactions_bytes_max=12_000, serve_token="of-everything")
    for name in ("a", "b", "c"):
        peer, count = await rig.peer(token=await rig.token("produce", name=name)), 0
        for n in range(12):
            answer = await peer.call(T.PREPARE, name, "g", n + 1, [task(body=large)], None)
            if answer[0] != T.OK:
                refused(
                    answer, f"half tasks of token {name} would take", "(transactions_bytes_max)"
                )
                break
            count += 1
        assert count, name
    peer = await rig.peer(token="of-everything")
    assert (await peer.call(T.PREPARE, "m", "g", 1, [task(body=large)], None))[0] == T.OK


async def test_due_tasks_count_as_pending(make: Make) -> None:
    rig = await make()
    token = await rig.token("produce", "consume", quotas={"pending": 2})
    peer = await rig.peer(token=token)
    assert (await peer.enqueue(("t", b"", 0), ("t", b"", 0)))[0] == T.OK
    rig.pass_time(1_000)
    await rig.settle()
    refused(await peer.enqueue(task()), "(pending)")


async def test_prepared_tasks_count_towards_a_quota(make: Make) -> None:
    rig = await make()
    peer = await rig.peer(token=await rig.token("produce", quotas={"tasks_per_s": 3}))
    for part in (1, 1, 2):
        answer = await peer.call(T.PREPARE, "x", "g", part, [task()] * 2, None)
        assert answer[0] == T.OK, "a resend costs nothing"
    refused(await peer.call(T.PREPARE, "x", "g", 3, [task()], None), "tasks_per_s (3)")
    assert (await peer.call(T.PREPARE, "x", "g", 2, [task()] * 2, None))[0] == T.OK
    assert len((await peer.call(T.COMMIT, "x"))[2][1]) == 4


async def test_a_prepare_that_had_to_wait_refills_no_quota(make: Make) -> None:
    rig = await make()
    peer = await rig.peer(token=await rig.token("produce", quotas={"tasks_per_s": 10}))
    rig.store.stall()
    first = peer.send(T.PREPARE, "x", "g", 1, [task()], None)
    await rig.settle()
    waiting = peer.send(T.PREPARE, "x", "g", 2, [task()], None)
    rig.pass_time(1_000)
    taken = peer.send(T.ENQUEUE, 1, (task(),) * 15)
    rig.store.go_on()
    assert (await peer.answer(first))[0] == (await peer.answer(taken))[0] == T.OK
    refused(await peer.answer(waiting), "tasks_per_s (10)")
    refused(await peer.enqueue(task()), "tasks_per_s (10)")


async def test_a_resend_is_answered_also_above_a_quota(make: Make) -> None:
    """Else who has it refused would think that it was not stored."""
    rig = await make()
    peer = await rig.peer(token=await rig.token("produce", quotas={"pending": 1}))
    first = await peer.call(T.ENQUEUE, 1, (task(),))
    peer.request -= 1
    again = await peer.call(T.ENQUEUE, 1, (task(),))
    assert again[0] == T.OK and again[2] == first[2]
    refused(await peer.enqueue(task()), "(pending)")


@pytest.mark.parametrize("limit", ["key_tasks_max", "commands_max"])
async def test_a_refused_rule_for_a_pending_key_costs_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Whether it is refused at once, or when it has waited."""
    rig = await make()
    peer = await rig.peer(token=await rig.token("produce", quotas={"tasks_per_s": 10}))
    ruled = ("t", b"", DAY_MS, {"key": "k", "if_pending": "keep"})
    assert (await peer.enqueue(ruled))[0] == T.OK
    if limit == "key_tasks_max":
        monkeypatch.setattr(rig.shard.coalescing, "_ids_max", 0)
    else:
        settings = rig.settings.model_copy(update={limit: 0})
        monkeypatch.setattr(rig.shard, "settings", settings)
    for _ in range(3):
        answer = await peer.enqueue(*[ruled] * 9)
        assert answer[0] == T.ERROR and f"the limit is 0 ({limit})" in answer[3]
    assert (await peer.enqueue(task()))[0] == T.OK


async def test_connections_of_a_token_are_limited(make: Make) -> None:
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


async def test_subscriptions_of_a_token_are_limited(make: Make) -> None:
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


async def test_settings_are_the_default_quotas(make: Make) -> None:
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


async def test_changed_quotas_end_a_tokens_connections(make: Make) -> None:
    rig = await make()
    token = await rig.token("all", quotas={"connections": 2})
    peer = await rig.peer(token=token)
    text = rig.path.read_text()
    rig.path.write_text(text.replace('"connections": 2', '"connections": 3'))
    await rig.reload()
    assert peer.frames()[-1][:2] == (T.GOODBYE, "unauthorized")


def test_quotas_are_read_strictly() -> None:
    assert tokens.parse_quotas([]) is None
    result = tokens.parse_quotas(["tasks_per_s=0.5", "pending=3"])
    assert result == Quotas(tasks_per_s=0.5, pending=3)
    names = ("pending", "pending=", "tasks=1", "=1", "tasks_per_s=nan", "tasks_per_s=inf")
    for wrong in (*names, "pending=0", "pending=-1", "pending=1.5", "tasks_per_s=0"):
        with pytest.raises(BadRequest):
            tokens.parse_quotas([wrong])


@pytest.mark.parametrize(
    ("quotas", "most"), [({"pending": 10}, 10), ({"tasks_per_s": 6}, 6), ({"pending": 2}, 3)]
)
async def test_quotas_cover_all_shards_together(
    tmp_path: Path, quotas: dict[str, float], most: int
) -> None:
    path, count = tmp_path / "tokens.json", 3
    own = tokens.parse_quotas([f"{name}={value}" for name, value in quotas.items()])
    grants = tokens.parse_scopes(["produce", "read"])
    text = tokens.create(path, "few", grants, NOW_MS, None, None, own)[1]
    async with Shards(count, tokens_file=str(path)) as shards:
        client = await shards.client(token=text, retries=0).connect()
        for shard in range(count):
            with pytest.raises(Overloaded):
                for _ in range(most + 1):
                    await client.enqueue("t", b"", key=key_in(shard, count), delay=3_600)
        assert len([item async for item in client.list_tasks()]) == most
