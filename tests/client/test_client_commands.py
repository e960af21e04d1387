"""The client's questions: what is asked, and what is made of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon, Peer, turns
from support.waiting import soon
from tickwheel import Client, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.api.verbs import VERBS
from tickwheel.client.wire import WireClient
from tickwheel.errors import BadRequest
from tickwheel.protocol import encode

MOMENT = datetime(2027, 1, 1, tzinfo=UTC)


async def collect(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_many_ids_are_split_by_the_limit_and_keep_their_order() -> None:
    async with FakeDaemon(ids_per_frame_max=4) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        asking = asyncio.ensure_future(client.cancel_many(range(1, 11)))
        sizes = []
        for _ in range(3):
            frame = await peer.next(T.CANCEL)
            sizes.append(len(frame[2]))
            peer.ok(frame, [(i, f"word-{i}") for i in frame[2]])
        assert sizes == [4, 4, 2]
        assert await soon(asking) == [f"word-{i}" for i in range(1, 11)]


async def test_an_empty_list_of_ids_sends_nothing(client: Client, peer: Peer) -> None:
    assert await soon(client.cancel_many([])) == []
    assert await soon(client.lookup_many([])) == []
    assert peer.nothing()


TASK: dict[str, Any] = {
    "id": 5,
    "state": "waiting",
    "topic": "t",
    "body": b"x",
    "due_ms": NOW_MS,
    "enqueued_ms": NOW_MS - 5,
    "key": "k",
    "tag": None,
    "properties": {"a": 1},
    "priority": 3,
    "ttl_ms": None,
    "slot": 11,
    "cycles": 1,
    "groups": {
        "g": {"state": "waiting", "attempt": 2, "at_ms": 9, "failures": ((1, 8, "why", "", ""),)}
    },
    "from_a_newer_daemon": True,
}


async def test_lookup(client: Client, peer: Peer) -> None:
    asking = asyncio.ensure_future(client.lookup_many([5, 6]))
    peer.ok(await peer.next(T.LOOKUP), (TASK, {"id": 6, "state": "unknown"}))
    known, unknown = await soon(asking)
    assert (known.id, known.state, known.topic, known.body) == (5, "waiting", "t", b"x")
    assert (known.key, known.tag, known.priority, known.slot, known.cycles) == (
        *("k", None, 3, 11, 1),
    )
    assert known.due == datetime.fromtimestamp(NOW_MS / 1000, UTC)
    assert dict(known.properties) == {"a": 1}
    assert "g" in known.groups
    assert known.raw["from_a_newer_daemon"]
    assert (unknown.id, unknown.state, unknown.due, unknown.topic) == (6, "unknown", None, None)


async def test_a_lookup_over_the_frame_limit_is_split_in_halves(client: Client, peer: Peer) -> None:
    asking = asyncio.ensure_future(client.lookup_many([1, 2, 3, 4]))
    peer.error(await peer.next(T.LOOKUP), "limit_exceeded")
    for ids in ((1, 2), (3, 4)):
        frame = await peer.next(T.LOOKUP)
        assert frame[2] == ids
        peer.ok(frame, [{"id": i, "state": "gone"} for i in ids])
    assert [task.id for task in await soon(asking)] == [1, 2, 3, 4]


async def test_pages_are_followed_to_the_end(client: Client, peer: Peer) -> None:
    asking = asyncio.ensure_future(collect(client.list_tasks(topic="t", state="waiting")))
    frame = await peer.next(T.LIST)
    assert (frame[2]["topic"], frame[2]["state"], "after" in frame[2]) == (
        "t",
        "waiting",
        False,
    )
    peer.ok(frame, {"tasks": [TASK | {"id": 1}], "next": 1})
    frame = await peer.next(T.LIST)
    assert frame[2]["after"] == 1
    peer.ok(frame, {"tasks": [], "next": 7})
    frame = await peer.next(T.LIST)
    assert frame[2]["after"] == 7
    peer.ok(frame, {"tasks": [TASK | {"id": 8}], "next": None})
    assert [task.id for task in await soon(asking)] == [1, 8]


async def test_a_limit_ends_the_pages(client: Client, peer: Peer) -> None:
    asking = asyncio.ensure_future(collect(client.list_tasks(limit=3)))
    frame = await peer.next(T.LIST)
    assert frame[2]["limit"] == 3
    peer.ok(frame, {"tasks": [TASK] * 2, "next": 2})
    frame = await peer.next(T.LIST)
    assert frame[2]["limit"] == 1
    peer.ok(frame, {"tasks": [TASK], "next": 3})
    assert len(await soon(asking)) == 3
    assert peer.nothing()


async def test_consumers_respects_the_limit_when_pages_are_longer() -> None:
    """The daemon ends a page behind all of one connection."""
    one = {
        "topic": "t", "group": None, "kind": "subscription", "in_flight": 0, "prefetch": 5,
        "since_ms": NOW_MS, "client": "", "address": "a:1", "host": None, "pid": None,
        "version": None, "token": None,
    }  # fmt: skip
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        asking = asyncio.ensure_future(collect(client.list_consumers(topic="t", limit=3)))
        frame = await peer.next(T.CONSUMER_LIST)
        assert frame[2] == {"topic": "t", "limit": 3}
        peer.ok(frame, {"consumers": [one] * 2, "next": 7})
        frame = await peer.next(T.CONSUMER_LIST)
        assert frame[2] == {"topic": "t", "limit": 1, "after": 7}
        peer.ok(frame, {"consumers": [one] * 4, "next": 9})
        result = await soon(asking)
        assert [info.raw for info in result] == [one] * 3
        assert result[0].since == datetime.fromtimestamp(NOW_MS / 1000, UTC)
        assert peer.nothing()


async def test_the_newest_task_with_a_key_is_searched_page_by_page(
    client: Client, peer: Peer
) -> None:
    asking = asyncio.ensure_future(
        client.find("k", topic="t", not_after=datetime.fromtimestamp(NOW_MS / 1000, UTC))
    )
    frame = await peer.next(T.LOOKUP)
    assert frame[2:] == (None, {"topic": "t", "key": "k", "newest": True, "until_ms": NOW_MS})
    peer.error(frame, "unknown_type", "an older daemon")
    asked = {"topic": "t", "key": "k", "until_ms": NOW_MS, "newest": True, "limit": 1}
    frame = await peer.next(T.LIST)
    assert frame[2] == asked
    peer.ok(frame, {"tasks": [], "next": 9000})
    frame = await peer.next(T.LIST)
    assert frame[2] == asked | {"after": 9000}
    peer.ok(frame, {"tasks": [TASK | {"id": 8}], "next": 8})
    result = await soon(asking)
    assert result is not None and result.id == 8
    asking = asyncio.ensure_future(client.find("none"))
    frame = await peer.next(T.LIST)
    assert frame[2] == {"key": "none", "newest": True, "limit": 1}
    peer.ok(frame, {"tasks": [], "next": None})
    assert await soon(asking) is None
    assert peer.nothing()


async def test_the_newest_of_a_topic_is_found_by_the_index(client: Client, peer: Peer) -> None:
    for answer, found in (
        ([TASK | {"id": 8}], 8),
        ([{"id": 8, "state": "acked"}], None),
        ([], None),
    ):
        asking = asyncio.ensure_future(client.find("k", topic="t"))
        frame = await peer.next(T.LOOKUP)
        assert frame[2:] == (None, {"topic": "t", "key": "k", "newest": True})
        peer.ok(frame, answer)
        info = await soon(asking)
        assert (info and info.id) == found
    assert peer.nothing()


async def test_a_task_is_named_by_its_id_or_by_topic_and_key(client: Client, peer: Peer) -> None:
    wrong: list[dict[str, Any]] = [
        {}, {"topic": "t"}, {"key": "k"}, {"topic": "t", "key": 5}, {"task_id": 5, "key": "k"},
    ]  # fmt: skip
    for given in wrong:
        for command in (client.cancel, client.run_now, client.lookup):
            with pytest.raises(BadRequest, match="by topic and key|must be a str"):
                await command(**given)
        with pytest.raises(BadRequest, match="by topic and key|must be a str"):
            await client.reschedule(**given, delay=5)
    assert peer.nothing()


async def test_a_backup_that_takes_long_is_waited_for() -> None:
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.1, retries=0) as client:
        peer = await daemon.peer()
        asking = asyncio.ensure_future(client.backup("copy.db"))
        frame = await peer.next(T.BACKUP)
        await asyncio.wait({asking}, timeout=0.4)
        assert not asking.done()
        peer.ok(frame, {"path": "p", "bytes": 5})
        await soon(asking)
        assert daemon.connections == 1
        await client.close()


Ask = Callable[[Client], Coroutine[Any, Any, Any]]
NOT_TWICE: dict[str, tuple[T, Ask]] = {
    "backup": (T.BACKUP, lambda c: c.backup("copy.db")),
    "delete_group": (T.GROUP_DELETE, lambda c: c.delete_group("t", "g")),
    "run_schedule": (T.SCHEDULE, lambda c: c.run_schedule("s")),
    "backfill_schedule": (T.SCHEDULE, lambda c: c.backfill_schedule("s", MOMENT, MOMENT)),
    "a shift": (T.RESCHEDULE, lambda c: c.reschedule(5, shift=3600)),
    "a shift by key": (T.RESCHEDULE, lambda c: c.reschedule(topic="t", key="k", shift=-3600)),
    "a spread from the due time": (T.SPREAD, lambda c: c.spread(5, within=60)),
    "dead_requeue": (T.DEAD_REQUEUE, lambda c: c.dead_requeue([(5, "g")])),
    "dead_delete": (T.DEAD_DELETE, lambda c: c.dead_delete([(5, "g")])),
    "skip_key": (T.SKIP_KEY, lambda c: c.skip_key("t", "g", key="k")),
    "release_key": (T.RELEASE_KEY, lambda c: c.release_key("t", "g", key="k")),
    "remove_target": (T.TARGET_REMOVE, lambda c: c.remove_target("t", "g")),
}
"""Requests whose second execution would change more, or have another answer."""
TWICE: dict[str, tuple[T, Ask]] = {
    "a delay": (T.RESCHEDULE, lambda c: c.reschedule(5, delay=3600)),
    "a due time": (T.RESCHEDULE, lambda c: c.reschedule(5, at=MOMENT)),
    "a spread over one window": (T.SPREAD, lambda c: c.spread(5, start=MOMENT, within=60)),
}


@pytest.mark.parametrize("name", NOT_TWICE)
@pytest.mark.parametrize("error", [errors.ConnectionLost, errors.OutcomeUnknown])
async def test_a_request_that_may_have_been_executed_is_not_repeated(
    client: Client, peer: Peer, name: str, error: type[errors.TickwheelError]
) -> None:
    kind, ask = NOT_TWICE[name]
    asking = asyncio.ensure_future(ask(client))
    frame = await peer.next(kind)
    if error is errors.ConnectionLost:
        peer.close()
    else:
        peer.error(frame, error.code)
    with pytest.raises(error):
        await soon(asking)


@pytest.mark.parametrize("name", TWICE)
async def test_a_move_to_the_same_time_is_repeated(
    daemon: FakeDaemon, client: Client, peer: Peer, name: str
) -> None:
    kind, ask = TWICE[name]
    asking = asyncio.ensure_future(ask(client))
    frame = await peer.next(kind)
    peer.close()
    again = await (peer := await daemon.peer()).next(kind)
    assert again[2:] == frame[2:]
    peer.ok(again, [(5, "scheduled", NOW_MS)])
    assert (await soon(asking)).status == "scheduled"


async def test_a_repeated_bulk_operation_of_another_has_the_same_id(daemon: FakeDaemon) -> None:
    verb, values = VERBS["make_bulk"], {"topic": "t", "kind": "reschedule", "shift_ms": 5}
    async with WireClient(daemon.url) as client:
        peer = await daemon.peer()
        request = verb.request_type.checked(values, client.limits)
        asking = asyncio.ensure_future(client.execute(verb, request))
        frame = await peer.next(T.BULK_MAKE)
        peer.close()
        again = await (peer := await daemon.peer()).next(T.BULK_MAKE)
        assert again[2:] == frame[2:] and frame[-1]["id"]
        peer.ok(again, {})
        await soon(asking)


async def test_the_daemons_error_is_raised() -> None:
    async with FakeDaemon() as daemon, daemon.client(retries=0) as client:
        peer = await daemon.peer()
        asking = asyncio.ensure_future(client.backup("copy.db"))
        peer.error(await peer.next(T.BACKUP), "conflict", "it exists")
        with pytest.raises(errors.Conflict, match="it exists"):
            await soon(asking)
        asking = asyncio.ensure_future(client.stats())
        peer.error(await peer.next(T.STATS), "a_code_of_the_future", "who knows")
        with pytest.raises(errors.TickwheelError, match="who knows"):
            await soon(asking)


async def test_an_answer_of_the_wrong_shape_is_a_protocol_error(client: Client, peer: Peer) -> None:
    for ask, answer in (
        (client.stats, None),
        (client.stats, {"topics": {}}),
        (lambda: client.cancel(5), []),
        (lambda: client.cancel(5), None),
        (lambda: client.lookup(5), [5]),
        (lambda: client.reschedule(5, delay=1), ["scheduled"]),
        (lambda: client.pull("t"), (1, 2)),
        (lambda: client.pull("t"), (1, 2, ((5,),))),
        (lambda: collect(client.list_tasks()), {"tasks": 5, "next": None}),
        (lambda: collect(client.dead_list()), {}),
        (lambda: client.backup("x"), 5),
    ):
        asking = asyncio.ensure_future(ask())
        peer.ok(await peer.next(), answer)
        with pytest.raises(errors.TickwheelError):
            await soon(asking)


@pytest.mark.parametrize("task_id", [-1, 2**63, "5", 1.5, None, True])
async def test_an_invalid_id_is_refused_before_sending(
    task_id: Any, client: Client, peer: Peer
) -> None:
    for call in (
        client.cancel(task_id),
        client.lookup(task_id),
        client.run_now(task_id),
        client.reschedule(task_id, delay=1),
        client.dead_delete([(task_id, "g")]),
    ):
        with pytest.raises(errors.BadRequest):
            await soon(call)
    assert peer.nothing()


async def test_a_cancelled_call_is_not_sent_later(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    sent = asyncio.ensure_future(client.stats())
    frame = await peer.next(T.STATS)
    sent.cancel()
    await asyncio.gather(sent, return_exceptions=True)
    peer.ok(frame, {})
    await daemon.deaf()
    peer.close()
    while client.connected:
        await turns()
    waiting = asyncio.ensure_future(client.cancel(5))
    await asyncio.wait({waiting}, timeout=0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await daemon.listen()
    peer = await daemon.peer()
    pinging = asyncio.ensure_future(client.ping())
    peer.ok(await peer.next(T.PING))
    await soon(pinging)


async def test_a_frame_over_the_daemons_limit_is_never_sent() -> None:
    kinds = {verb.frame for verb in VERBS.values() if verb.frame is not None} | {T.NACK, T.REJECT}
    async with FakeDaemon(frame_bytes_max=1024) as daemon:
        client = daemon.client()
        early = client.enqueue_nowait("t", b"x" * 2000)  # the daemon has not said its limit yet
        with pytest.raises(errors.LimitExceeded, match=r"has 2\d+ bytes; the limit is 1024"):
            await soon(early)
        peer = await daemon.peer()
        for kind in kinds:
            with pytest.raises(errors.LimitExceeded, match=f"{kind.name.lower()}.*frame_bytes_max"):
                await soon(client._link.calls.call(kind, "x" * 1024))
        asking = asyncio.ensure_future(client.ping())
        peer.ok(await peer.next(T.PING))
        await soon(asking)
        assert daemon.connections == 1
        await client.close()


async def test_acks_are_split_by_a_small_frame_limit() -> None:
    async with FakeDaemon(frame_bytes_max=1024) as daemon, daemon.client() as client:
        peer = await daemon.peer()
        channel = client._link.acks.channel("t" * 255, "g" * 255, 1)
        acks = [channel.add(2**63 - n, 2**31) for n in range(1, 100)]
        while not all(ack.done() for ack in acks):
            frame = await peer.next(T.ACK)
            assert len(encode(frame)) <= 1024
            peer.ok(frame)
            await turns()


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_transaction_with_an_unanswered_enqueue_is_rolled_back(
    client: Client, peer: Peer, *, leaves: bool
) -> None:
    transaction = client.transaction("p")
    enqueueing = asyncio.ensure_future(transaction.enqueue("t", b"x"))
    prepare = await peer.next(T.PREPARE)
    with pytest.raises(errors.Conflict, match="under way"):
        await transaction.commit()
    end = transaction.__aexit__(None, None, None) if leaves else transaction.rollback()
    ending = asyncio.gather(end, return_exceptions=True)
    peer.ok(await peer.next(T.ROLLBACK))
    assert [type(result) is errors.Conflict for result in await soon(ending)] == [leaves]
    peer.ok(prepare, (NOW_MS,))
    await soon(enqueueing)
    with pytest.raises(errors.TransactionRolledBack):
        await transaction.enqueue("t", b"y")


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_rollback_includes_a_half_task_that_is_sent_again(
    client: Client, peer: Peer, *, is_stored: bool
) -> None:
    transaction = client.transaction("p")
    enqueueing = asyncio.ensure_future(transaction.enqueue("t", b"x"))
    peer.error(await peer.next(T.PREPARE), "refused")
    ending = asyncio.ensure_future(transaction.rollback())
    peer.error(await peer.next(T.ROLLBACK), "unknown_transaction")
    prepare = await peer.next(T.PREPARE)
    if is_stored:
        peer.ok(prepare, (NOW_MS,))
        peer.ok(await peer.next(T.ROLLBACK))
        await soon(enqueueing)
    else:
        peer.error(prepare, "backlog_full")
        peer.error(await peer.next(T.PREPARE), "bad_request")
        with pytest.raises(errors.BadRequest):
            await soon(enqueueing)
    await soon(ending)
    with pytest.raises(errors.TransactionRolledBack):
        await transaction.enqueue("t", b"y")


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_rollback_succeeds_if_its_only_half_task_never_arrived(
    client: Client, peer: Peer, *, is_first: bool
) -> None:
    transaction = client.transaction("p")
    if not is_first:
        enqueueing = asyncio.ensure_future(transaction.enqueue("t", b"w"))
        peer.ok(await peer.next(T.PREPARE), (NOW_MS,))
        await soon(enqueueing)
    enqueueing = asyncio.ensure_future(transaction.enqueue("t", b"x"))
    await peer.next(T.PREPARE)
    enqueueing.cancel()
    await asyncio.gather(enqueueing, return_exceptions=True)
    ending = asyncio.gather(transaction.rollback(), return_exceptions=True)
    peer.error(await peer.next(T.ROLLBACK), "unknown_transaction")
    [result] = await soon(ending)
    assert result is None if is_first else isinstance(result, errors.UnknownTransaction)
