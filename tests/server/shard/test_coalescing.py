"""Tasks whose key is pending, with everything of a daemon but its sockets: stored, kept, replaced
or rejected, and whose id that is, whatever comes between."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from server.shard.test_keys import Collides
from support.in_process import InProcess
from support.shard_rig import NOW_MS, Peer, ShardRig, started
from support.store_rows import kept
from support.waiting import counted_turns
from tickwheel.api.frames import FrameType as T
from tickwheel.clock import Now
from tickwheel.engine.enqueue import Coalescer
from tickwheel.engine.keys import Table
from tickwheel.limits import Limits
from tickwheel.model.kinds import SESSION
from tickwheel.persistence.contract import CommitRefused
from tickwheel.protocol import encode
from tickwheel.server.shard import enqueue as shard_enqueue

FAR_MS = 3_600_000


def task(
    rule: Any = None, delay_ms: int = FAR_MS, body: bytes = b"", topic: str = "t", **more: Any
) -> tuple[Any, ...]:
    options = {"key": "k", **more}
    if rule is not None:
        options["if_pending"] = rule
    return topic, body, delay_ms, options


def replace(**more: Any) -> dict[str, Any]:
    return {"action": "replace", **more}


async def enqueue(daemon: InProcess, peer: Peer, *tasks: Any) -> list[tuple[str, int]]:
    """(outcome, id) of each."""
    return _pairs(await daemon.ask(peer, T.ENQUEUE, 0, tasks))


def _pairs(answer: Any) -> list[tuple[str, int]]:
    _, ids, *outcomes = answer
    words = [word for word, _ in outcomes[0]["outcomes"]] if outcomes else ["stored"] * len(ids)
    return list(zip(words, ids, strict=True))


async def one(daemon: InProcess, peer: Peer, *given: Any, **more: Any) -> tuple[str, int]:
    (found,) = await enqueue(daemon, peer, task(*given, **more))
    return found


async def shown(daemon: InProcess, peer: Peer, task_id: int) -> dict[str, Any]:
    (found,) = await daemon.ask(peer, T.LOOKUP, (task_id,))
    return dict(found)


async def pull(daemon: InProcess, peer: Peer, group: str = "g", topic: str = "t") -> list[Any]:
    _, _, deliveries = await daemon.ask(peer, T.PULL, topic, group, 10, 0, None)
    return list(deliveries)


async def settle_one(daemon: InProcess, peer: Peer, verb: int, delivery: Any, *more: Any) -> None:
    epoch = daemon.shard.core.epoch
    if verb == T.ACK:
        await daemon.ask(peer, verb, "t", "g", epoch, (delivery[0],), (delivery[1],))
    else:
        await daemon.ask(peer, verb, "t", "g", ((delivery[0], epoch, delivery[1], *more),))


# --- the four actions ----------------------------------------------------------------------------


async def test_an_enqueue_without_a_rule_has_a_plain_answer(daemon: InProcess, peer: Peer) -> None:
    answer = await daemon.ask(peer, T.ENQUEUE, 0, (task(), task("add")))
    assert len(answer) == 2 and len(set(answer[1])) == 2


async def test_keep_returns_the_pending_task_and_its_due_time(
    daemon: InProcess, peer: Peer
) -> None:
    word, first = await one(daemon, peer, "keep", 5_000, b"first")
    assert word == "stored"
    accepted_ms, ids, more = await daemon.ask(peer, T.ENQUEUE, 0, (task("keep", 9_000, b"second"),))
    assert ids == (first,) and more["outcomes"] == (("kept", accepted_ms + 5_000),)
    daemon.pass_time(5_000)
    assert [(d[0], d[3]) for d in await pull(daemon, peer)] == [(first, b"first")]


async def test_reject_stores_no_task(daemon: InProcess, peer: Peer) -> None:
    _, first = await one(daemon, peer)
    assert await one(daemon, peer, "reject") == ("rejected", first)
    assert daemon.shard.core.tasks == 1


async def test_replace_keeps_the_id_and_has_the_new_body_and_due_time(
    daemon: InProcess, peer: Peer
) -> None:
    _, first = await one(daemon, peer, None, 5_000, b"old", tag="a", priority=3)
    assert await one(daemon, peer, "replace", 9_000, b"new", tag="b") == ("replaced", first)
    daemon.pass_time(5_000)
    assert await pull(daemon, peer) == []
    daemon.pass_time(4_000)
    ((task_id, _, _, body, options),) = await pull(daemon, peer)
    assert (task_id, body, options) == (first, b"new", {"key": "k", "tag": "b"})


@pytest.mark.parametrize(
    ("more", "delay_ms", "wanted"),
    [
        ({"replaces": "body"}, 1_000, (b"new", 5_000)),
        ({"replaces": "due"}, 1_000, (b"old", 1_000)),
        ({"due": "later"}, 1_000, (b"new", 5_000)),
        ({"due": "later"}, 7_000, (b"new", 7_000)),
        ({"due": "earlier"}, 1_000, (b"new", 1_000)),
        ({"due": "earlier"}, 7_000, (b"new", 5_000)),
        ({"max_wait_ms": 6_000}, 7_000, (b"new", 6_000)),
        ({"max_wait_ms": 6_000, "due": "later", "replaces": "due"}, 9_000, (b"old", 6_000)),
    ],
)
async def test_replace_changes_the_chosen_parts(
    daemon: InProcess, peer: Peer, more: dict[str, Any], delay_ms: int, wanted: tuple[bytes, int]
) -> None:
    _, first = await one(daemon, peer, None, 5_000, b"old")
    began_ms = daemon.shard.clock.read().now_ms
    answer = await daemon.ask(peer, T.ENQUEUE, 0, (task(replace(**more), delay_ms, b"new"),))
    body, after_ms = wanted
    assert answer[1:] == ((first,), {"outcomes": (("replaced", began_ms + after_ms),)})
    daemon.pass_time(after_ms - 1)
    assert await pull(daemon, peer) == []
    daemon.pass_time(1)
    assert [(d[0], d[3]) for d in await pull(daemon, peer)] == [(first, body)]


async def test_debounce_is_bounded_by_max_wait(daemon: InProcess, peer: Peer) -> None:
    rule = replace(max_wait_ms=1_000)
    _, first = await one(daemon, peer, rule, 300)
    for _ in range(4):
        daemon.pass_time(200)
        assert await one(daemon, peer, rule, 300) == ("replaced", first)
        assert await pull(daemon, peer) == []
    daemon.pass_time(199)
    assert await pull(daemon, peer) == []
    daemon.pass_time(1)
    assert [d[0] for d in await pull(daemon, peer)] == [first]


# --- what is pending -----------------------------------------------------------------------------


async def test_a_task_in_flight_is_pending_until_finished(daemon: InProcess, peer: Peer) -> None:
    _, first = await one(daemon, peer, None, 0)
    (delivery,) = await pull(daemon, peer)
    started = {"action": "keep", "unique_until": "started"}
    assert await one(daemon, peer, "keep") == ("kept", first)
    assert await one(daemon, peer, "reject") == ("rejected", first)
    word, second = await one(daemon, peer, started)
    assert word == "stored" != first
    assert await one(daemon, peer, started) == ("kept", second)
    await settle_one(daemon, peer, T.ACK, delivery)
    await daemon.ask(peer, T.CANCEL, (second,))
    assert (await one(daemon, peer, "keep"))[0] == "stored"


async def test_a_task_waiting_for_a_retry_is_pending(daemon: InProcess, peer: Peer) -> None:
    _, first = await one(daemon, peer, None, 0)
    (delivery,) = await pull(daemon, peer)
    await settle_one(daemon, peer, T.NACK, delivery, 5_000, "no")
    for rule in ("keep", {"action": "keep", "unique_until": "started"}):
        assert await one(daemon, peer, rule) == ("kept", first)


async def test_a_ready_task_is_pending_and_replaced_in_place(daemon: InProcess, peer: Peer) -> None:
    await daemon.ask(peer, T.GROUP_CREATE, "t", "g", None)
    _, first = await one(daemon, peer, None, 0, b"old")
    assert await one(daemon, peer, "keep") == ("kept", first)
    assert await one(daemon, peer, "replace", 2_000, b"new") == ("replaced", first)
    assert await pull(daemon, peer) == []
    daemon.pass_time(2_000)
    assert [(d[0], d[3]) for d in await pull(daemon, peer)] == [(first, b"new")]


async def test_a_delivered_task_is_replaced_under_a_new_id(daemon: InProcess, peer: Peer) -> None:
    """So that a late ack of the old body does not settle the new one."""
    _, first = await one(daemon, peer, None, 0, b"old")
    (delivery,) = await pull(daemon, peer)
    await settle_one(daemon, peer, T.NACK, delivery, 5_000, "no")
    word, second = await one(daemon, peer, "replace", 1_000, b"new")
    assert word == "replaced" and second != first
    assert (await shown(daemon, peer, first))["state"] == "cancelled"
    await settle_one(daemon, peer, T.ACK, delivery)
    daemon.pass_time(6_000)
    assert [(d[0], d[1], d[3]) for d in await pull(daemon, peer)] == [(second, 1, b"new")]


@pytest.mark.parametrize(
    ("due", "delay_ms", "after_ms"),
    [
        ("new", 1_000, 1_000),
        ("later", 1_000, 5_000),
        ("later", 9_000, 9_000),
        ("earlier", 1_000, 1_000),
        ("earlier", 9_000, 5_000),
    ],
)
async def test_replacing_only_the_due_time_moves_the_next_attempt(
    daemon: InProcess, peer: Peer, due: str, delay_ms: int, after_ms: int
) -> None:
    _, first = await one(daemon, peer, None, 0, b"old")
    (delivery,) = await pull(daemon, peer)
    await settle_one(daemon, peer, T.NACK, delivery, 5_000, "no")
    rule = replace(replaces="due", due=due)
    assert await one(daemon, peer, rule, delay_ms) == ("replaced", first)
    daemon.pass_time(after_ms - 1)
    assert await pull(daemon, peer) == []
    daemon.pass_time(1)
    assert [(d[0], d[1], d[3]) for d in await pull(daemon, peer)] == [(first, 2, b"old")]


async def test_a_delivered_task_moved_in_the_same_frame_gets_a_new_id(
    daemon: InProcess, peer: Peer
) -> None:
    """In one frame; every outcome says where the work is then."""
    _, first = await one(daemon, peer, None, 0, b"old")
    (delivery,) = await pull(daemon, peer)
    await settle_one(daemon, peer, T.NACK, delivery, 5_000, "no")
    rules = ("keep", replace(replaces="due"), replace(due="later"))
    result = await enqueue(daemon, peer, *[task(rule, 1_000, b"new") for rule in rules])
    assert [word for word, _ in result] == ["kept", "replaced", "replaced"]
    (second,) = {task_id for _, task_id in result}
    assert second != first
    assert (await shown(daemon, peer, first))["state"] == "cancelled"


async def test_a_task_in_flight_is_not_replaced(daemon: InProcess, peer: Peer) -> None:
    _, first = await one(daemon, peer, None, 0, b"old")
    await pull(daemon, peer)
    word, second = await one(daemon, peer, "replace", 1_000, b"new")
    assert word == "stored" and second != first


ENDS: dict[str, tuple[Any, ...]] = {
    "nack": (T.NACK, 0, "no"),
    "nack later": (T.NACK, 5_000, "no"),
    "reject": (T.REJECT, "no"),
    "snooze": (T.SNOOZE, 5_000),
    "release": (T.RELEASE,),
    "lease over": (),
    "connection lost": (),
    "restart": (),
}


@pytest.mark.parametrize("more", [{}, {"order_key": "o"}])
@pytest.mark.parametrize("end", ENDS)
async def test_a_replaced_delivery_never_runs_after_its_replacement(
    tmp_path: Path, end: str, more: dict[str, Any]
) -> None:
    """The older body never comes after the newer one."""
    async with InProcess(tmp_path) as daemon:
        peer, worker = daemon.connect(), daemon.connect()
        _, first = await one(daemon, peer, "replace", 0, b"1", **more)
        (delivery,) = await pull(daemon, worker)
        _, second = await one(daemon, peer, "replace", 1_000, b"2", **more)
        assert await one(daemon, peer, "replace", 1_000, b"3", **more) == ("replaced", second)
        epoch = daemon.shard.core.epoch
        if end == "release":
            ids, attempts = (delivery[0],), (delivery[1],)
            assert await daemon.ask(worker, T.RELEASE, "t", "g", epoch, ids, attempts) == (
                "cancelled",
            )
        elif ENDS[end]:
            verb, *said = ENDS[end]
            item = delivery[0], epoch, delivery[1], *said
            assert await daemon.ask(worker, verb, "t", "g", (item,)) == ("cancelled",)
        elif end == "connection lost":
            worker.transport.abort()
        store = daemon.store
        if end != "restart":
            daemon.pass_time(daemon.shard.core.config.reconnect_grace_ms + 60_000)
            await daemon.settle()
            assert (await shown(daemon, peer, first))["state"] == "cancelled"
            assert [d[3] for d in await pull(daemon, peer)] == [b"3"]
            daemon.recount()
    if end == "restart":
        async with InProcess(tmp_path, store=store) as daemon:
            peer = daemon.connect()
            assert (await shown(daemon, peer, first))["state"] == "in_flight"
            daemon.pass_time(60_000)
            await daemon.settle()
            assert (await shown(daemon, peer, first))["state"] == "cancelled"
            assert [d[3] for d in await pull(daemon, peer)] == [b"3"]
            daemon.recount()


async def test_a_replaced_delivery_can_be_acked(daemon: InProcess, peer: Peer) -> None:
    _, first = await one(daemon, peer, "replace", 0, b"1")
    (delivery,) = await pull(daemon, peer)
    await one(daemon, peer, "replace", 0, b"2")
    await settle_one(daemon, peer, T.ACK, delivery)
    assert (await shown(daemon, peer, first))["state"] == "acked"


async def test_a_replaced_delivery_is_cancelled_even_if_the_newer_ended(
    daemon: InProcess, peer: Peer
) -> None:
    _, first = await one(daemon, peer, "replace", 0, b"1")
    (delivery,) = await pull(daemon, peer)
    await one(daemon, peer, "replace", 0, b"2")
    (newer,) = await pull(daemon, peer)
    await settle_one(daemon, peer, T.ACK, newer)
    await settle_one(daemon, peer, T.NACK, delivery, 0, "no")
    assert (await shown(daemon, peer, first))["state"] == "cancelled"
    assert await pull(daemon, peer) == []


@pytest.mark.parametrize(
    ("rule", "states"),
    [
        ({"action": "keep", "unique_until": "started"}, ["waiting", "scheduled"]),
        ("add", ["waiting", "scheduled"]),
        (replace(window_ms=1), ["waiting", "scheduled"]),
        (replace(replaces="body"), ["cancelled", "scheduled"]),
        (replace(replaces="due"), ["cancelled", "scheduled"]),
    ],
)
async def test_a_newer_task_without_replace_cancels_no_delivery(
    daemon: InProcess, peer: Peer, rule: Any, states: list[str]
) -> None:
    _, first = await one(daemon, peer, "replace", 0, b"1")
    (delivery,) = await pull(daemon, peer)
    daemon.pass_time(10)
    _, second = await one(daemon, peer, rule, 1_000, b"2")
    await settle_one(daemon, peer, T.NACK, delivery, 5_000, "no")
    assert [(await shown(daemon, peer, i))["state"] for i in (first, second)] == states


async def test_a_replaced_delivery_is_cancelled_in_groups_without_ack(
    daemon: InProcess, peer: Peer
) -> None:
    for group in ("g", "h", "i", "j"):
        await daemon.ask(peer, T.GROUP_CREATE, "t", group, None)
    _, first = await one(daemon, peer, "replace", 0, b"1")
    (acked,) = await pull(daemon, peer, "h")
    epoch = daemon.shard.core.epoch
    await daemon.ask(peer, T.ACK, "t", "h", epoch, (first,), (acked[1],))
    (failing,) = await pull(daemon, peer, "i")
    await daemon.ask(peer, T.NACK, "t", "i", ((first, epoch, failing[1], 5_000, "no"),))
    (held,) = await pull(daemon, peer, "g")
    word, _ = await one(daemon, peer, "replace", 1_000, b"2")
    assert word == "stored"
    groups = (await shown(daemon, peer, first))["groups"]
    assert {name: group["state"] for name, group in groups.items()} == {
        "g": "in_flight", "h": "acked", "i": "cancelled", "j": "cancelled",
    }  # fmt: skip
    await settle_one(daemon, peer, T.NACK, held, 0, "no")
    assert (await shown(daemon, peer, first))["state"] == "cancelled"
    daemon.pass_time(6_000)
    for group in ("g", "h", "i", "j"):
        assert [d[3] for d in await pull(daemon, peer, group)] == [b"2"]
    daemon.recount()


async def test_a_requeued_dead_letter_is_pending_again(daemon: InProcess, peer: Peer) -> None:
    """An operator's word is obeyed; from then on it is pending."""
    _, first = await one(daemon, peer, "replace", 0, b"1")
    await settle_one(daemon, peer, T.REJECT, (await pull(daemon, peer))[0], "no")
    assert (await one(daemon, peer, "replace", 0, b"2"))[0] == "stored"
    await settle_one(daemon, peer, T.ACK, (await pull(daemon, peer))[0])
    assert (await shown(daemon, peer, first))["state"] == "dead"
    await daemon.ask(peer, T.DEAD_REQUEUE, ((first, "g"),))
    assert (await one(daemon, peer, "replace", 0, b"3"))[0] == "replaced"
    assert [d[3] for d in await pull(daemon, peer)] == [b"3"]


async def test_ended_tasks_are_not_pending(daemon: InProcess, peer: Peer) -> None:
    await daemon.ask(peer, T.GROUP_CREATE, "t", "g", None)
    ended = [await one(daemon, peer, "reject", FAR_MS)]
    await daemon.ask(peer, T.CANCEL, None, {"topic": "t", "key": "k"})
    ended.append(await one(daemon, peer, "reject", 0, ttl_ms=5))
    daemon.pass_time(10)
    await daemon.settle()
    ended.append(await one(daemon, peer, "reject", 0))
    await settle_one(daemon, peer, T.ACK, (await pull(daemon, peer))[0])
    ended.append(await one(daemon, peer, "reject", 0))
    await settle_one(daemon, peer, T.REJECT, (await pull(daemon, peer))[0], None)
    dead = ended[-1][1]
    assert (await shown(daemon, peer, dead))["state"] == "dead"
    ended.append(await one(daemon, peer, "reject"))
    assert [word for word, _ in ended] == ["stored"] * 5
    # One that comes back counts again.
    await daemon.ask(peer, T.CANCEL, (ended[-1][1],))
    await daemon.ask(peer, T.DEAD_REQUEUE, ((dead, "g"),))
    assert await one(daemon, peer, "keep") == ("kept", dead)
    await daemon.ask(peer, T.CANCEL, (dead,))
    assert (await one(daemon, peer, "keep"))[0] == "stored"


async def test_a_task_of_several_groups_is_pending_until_all_have_finished_it(
    daemon: InProcess, peer: Peer
) -> None:
    for group in ("g", "h"):
        await daemon.ask(peer, T.GROUP_CREATE, "t", group, None)
    _, first = await one(daemon, peer, None, 0)
    (delivery,) = await pull(daemon, peer)
    started = {"action": "keep", "unique_until": "started"}
    word, second = await one(daemon, peer, started)
    assert word == "stored", "one group has it"
    await daemon.ask(peer, T.CANCEL, (second,))
    await settle_one(daemon, peer, T.ACK, delivery)
    assert await one(daemon, peer, "keep") == ("kept", first)
    word, third = await one(daemon, peer, started)
    assert word == "stored", "one group has had it, and would miss the new one"
    await daemon.ask(peer, T.CANCEL, (third,))
    (other,) = await pull(daemon, peer, "h")
    await daemon.ask(peer, T.ACK, "t", "h", daemon.shard.core.epoch, (other[0],), (other[1],))
    assert (await one(daemon, peer, "keep"))[0] == "stored"


async def test_the_window_starts_when_the_pending_task_was_enqueued(
    daemon: InProcess, peer: Peer
) -> None:
    rule = {"action": "keep", "window_ms": 1_000}
    _, first = await one(daemon, peer, rule)
    daemon.pass_time(999)
    assert await one(daemon, peer, rule) == ("kept", first)
    daemon.pass_time(1)
    word, second = await one(daemon, peer, rule)
    assert word == "stored"
    daemon.pass_time(500)
    assert await one(daemon, peer, rule) == ("kept", second)
    assert await one(daemon, peer, "reject") == ("rejected", second), "the newest"


async def test_tasks_stay_pending_after_a_clock_set_back(daemon: InProcess, peer: Peer) -> None:
    rule = {"action": "keep", "window_ms": 1_000}
    _, first = await one(daemon, peer, rule)
    daemon.pass_time(-500_000)
    assert await one(daemon, peer, rule) == ("kept", first)
    assert await one(daemon, peer, replace(max_wait_ms=100), 900) == ("replaced", first)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_clock_that_was_ahead_extends_no_wait_or_window(
    tmp_path: Path, is_restarted: bool
) -> None:
    async with InProcess(tmp_path, now_ms=NOW_MS + 20 * FAR_MS) as daemon:
        peer, store = daemon.connect(), daemon.store
        await one(daemon, peer, KEEP_5_S, topic="w")
        await one(daemon, peer, WAIT_5_S)
        daemon.pass_time(-20 * FAR_MS)
        if not is_restarted:
            await waits_and_windows_end(daemon, peer)
    if is_restarted:
        async with InProcess(tmp_path, store=store) as daemon:
            await waits_and_windows_end(daemon, daemon.connect())


KEEP_5_S, WAIT_5_S = {"action": "keep", "window_ms": 5_000}, replace(max_wait_ms=5_000)


async def waits_and_windows_end(daemon: InProcess, peer: Peer) -> None:
    """At most a second late, of tasks from before the clock was set back and of later ones."""
    for key, word in (("k", "kept"), ("new", "stored")):
        begun_ms = daemon.shard.clock.read().now_ms
        assert (await one(daemon, peer, KEEP_5_S, topic="w", key=key))[0] == word
        await one(daemon, peer, WAIT_5_S, key=key)
        daemon.pass_time(1_000)
        await daemon.settle()
        answer = await daemon.ask(peer, T.ENQUEUE, 0, (task(WAIT_5_S, key=key),))
        ((word, due_ms),) = answer[2]["outcomes"]
        assert word == "replaced" and due_ms <= begun_ms + 6_000
        assert (await one(daemon, peer, KEEP_5_S, topic="w", key=key))[0] == "kept"
        daemon.pass_time(5_000)
        await daemon.settle()
        assert (await one(daemon, peer, KEEP_5_S, topic="w", key=key))[0] == "stored"


# --- between producers, frames and batches -------------------------------------------------------


async def test_tasks_of_one_frame_coalesce(daemon: InProcess, peer: Peer) -> None:
    result = await enqueue(
        daemon, peer,
        task("keep", body=b"1"), task("keep", body=b"2"), task("keep", topic="u"),
        task("keep", key="l"), task("replace", body=b"3"), task("reject"), task("add", body=b"4"),
        task("replace", 7_000, b"5"),
    )  # fmt: skip
    first, added = result[0][1], result[6][1]
    assert [word for word, _ in result] == [
        "stored", "kept", "stored", "stored", "replaced", "rejected", "stored", "replaced",
    ]  # fmt: skip
    assert [i for _, i in result][1::3] == [first, first, added]
    assert result[5][1] == first
    assert len({i for _, i in result}) == 4
    await daemon.ask(peer, T.RUN_NOW, None, {"topic": "t", "key": "k"})
    bodies = {d[0]: d[3] for d in await pull(daemon, peer)}
    assert bodies == {first: b"3", added: b"5"}


async def test_a_pending_task_is_replaced_many_times_in_one_frame(
    daemon: InProcess, peer: Peer
) -> None:
    _, first = await one(daemon, peer, None, FAR_MS, b"old")
    rules = [replace(), replace(replaces="due"), replace(replaces="body"), replace(due="earlier")]
    result = await enqueue(
        daemon, peer, *[task(rule, 1_000 * n, b"%d" % n) for n, rule in enumerate(rules, 1)]
    )
    assert result == [("replaced", first)] * 4
    daemon.pass_time(2_000)
    assert [(d[0], d[3]) for d in await pull(daemon, peer)] == [(first, b"4")]


async def test_concurrent_producers_store_one_task(daemon: InProcess, peer: Peer) -> None:
    """In frames that arrive before either is durable."""
    other = daemon.connect()
    for number in range(5, 45):
        other.feed(encode((int(T.ENQUEUE), number, 0, (task("keep", key=f"k{number % 4}"),))))
        peer.feed(encode((int(T.ENQUEUE), number, 0, (task("keep", key=f"k{number % 4}"),))))
    await daemon.settle()
    answers = [f for p in (peer, other) for f in p.frames() if f[0] == T.OK and f[1] >= 5]
    assert len(answers) == 80
    results = [_pairs(f[2])[0] for f in answers]
    assert daemon.shard.core.tasks == 4 == len({i for _, i in results})
    assert sum(word == "stored" for word, _ in results) == 4


@pytest.mark.parametrize("rule", ["keep", "reject", "replace"])
async def test_an_uncommitted_plain_task_is_pending(
    daemon: InProcess, peer: Peer, rule: str
) -> None:
    plain, ruled, again = await daemon.send(peer,
        (T.ENQUEUE, 0, (task(),)), (T.ENQUEUE, 0, (task(rule),)), (T.ENQUEUE, 0, (task(rule),)),
    )  # fmt: skip
    ((_, first),) = _pairs(plain[0])
    word = {"keep": "kept", "reject": "rejected", "replace": "replaced"}[rule]
    assert [_pairs(answer[0]) for answer in (ruled, again)] == [[(word, first)]] * 2


async def test_keys_with_colliding_hashes_do_not_coalesce(daemon: InProcess, peer: Peer) -> None:
    daemon.shard.core.keys.hash = Collides(b"")
    for rule in ("keep", "replace", "reject"):
        frames = [
            (T.ENQUEUE, 0, (task(rule, topic=topic, key=key + rule),))
            for topic in ("t", "u")
            for key in ("k", "l")
        ]
        for answers in (await daemon.send(peer, *frames), await daemon.send(peer, *frames)):
            assert len({_pairs(answer[0])[0][1] for answer in answers}) == 4
    assert daemon.shard.core.tasks == 12


async def test_a_resend_gets_the_first_answer(tmp_path: Path) -> None:
    """Also of another daemon, and though the pending task has ended since."""
    session = b"s" * 16
    sent = [(T.ENQUEUE, 0, (task(rule), task(rule, key="l"))) for rule in ("keep", "replace")]
    async with InProcess(tmp_path) as first:
        peer = first.connect(session=session)
        answers = await first.send(peer, *sent)
        base = InProcess.request - 1
        await first.ask(first.connect(), T.CANCEL, None, {"topic": "t", "key": "k"})

        async def again(daemon: InProcess) -> list[Any]:
            peer = daemon.connect(session=session)
            for n, frame in enumerate(sent):
                peer.feed(encode((int(frame[0]), base + n, *frame[1:])))
            await daemon.settle()
            result = {f[1]: f[2:] for f in peer.frames()}
            return [result[base + n] for n in range(len(sent))]

        assert await again(first) == answers
        first.recount()
        store = first.store
    async with InProcess(tmp_path, store=store) as second:
        await second.settle()
        assert await again(second) == answers
        peer = second.connect(session=session)
        peer.feed(encode((int(T.ENQUEUE), base + 2, base + 2, (task("keep"),))))
        await second.settle()
        assert [len(s.merged) for s in second.shard.core.sessions if s.merged] == [1]
        second.recount()


# --- refused batches, stalls, crashes ------------------------------------------------------------


rig = started(ShardRig)


def refuse_next(rig: ShardRig, count: int = 1) -> None:
    commit = rig.store.commit
    left = [count]

    async def refusing(*given: Any) -> bool:
        await rig.store.gate.wait()
        if left[0]:
            left[0] -= 1
            raise CommitRefused("not now")
        return await commit(*given)

    rig.store.commit = refusing  # type: ignore[method-assign]


async def test_an_enqueue_kept_on_a_refused_task_is_refused(rig: ShardRig) -> None:
    peer = await rig.peer()
    refuse_next(rig)
    first = peer.send(T.ENQUEUE, 0, (task(),))
    second = peer.send(T.ENQUEUE, 0, (task("keep"),))
    assert (await peer.answer(first))[2] == "refused"
    assert (await peer.answer(second))[2] == "refused"
    answer = await peer.call(T.ENQUEUE, 0, (task("keep"),))
    assert answer[2][2]["outcomes"][0][0] == "stored"
    assert rig.core.tasks == 1
    topic = rig.core.topics["t"]
    assert not topic.merged, "nothing was kept"


async def test_a_rule_is_decided_again_if_its_pending_task_is_refused(rig: ShardRig) -> None:
    peer = await rig.peer()
    rig.store.stall()
    refuse_next(rig)
    first = peer.send(T.ENQUEUE, 0, (task(),))
    await rig.until(lambda: rig.core.sealed is not None)
    second = peer.send(T.ENQUEUE, 0, (task("keep"),))
    await rig.settle()
    rig.store.go_on()
    assert (await peer.answer(first))[2] == "refused"
    answer = await peer.answer(second)
    assert answer[2][2]["outcomes"][0][0] == "stored"
    assert rig.core.tasks == 1


async def both(first: Peer, second: Peer, number: int) -> list[Any]:
    """The answers to a request and to what came again under its number; a refusal is the second."""
    answers = [await first.answer(number), await second.answer(number)]
    return sorted(answers, key=lambda answer: answer[2] == "conflict")


PLAIN = ("t", b"two", FAR_MS)
UNDER_ONE_NUMBER = {
    "the same": (T.ENQUEUE, 0, (task("replace", body=b"one"),)),
    "another body": (T.ENQUEUE, 0, (task("replace", body=b"two"),)),
    "another key": (T.ENQUEUE, 0, (task("keep", key="other"),)),
    "more tasks": (T.ENQUEUE, 0, (task("keep", key="other"), PLAIN)),
    "without a rule": (T.ENQUEUE, 0, (task(body=b"two"),)),
    "plain": (T.ENQUEUE, 0, (PLAIN,)),
    "columns": (T.ENQUEUE_COLUMNS, 0, "t", (b"two",), FAR_MS),
}


@pytest.mark.parametrize("second", UNDER_ONE_NUMBER)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "on another connection"])
@pytest.mark.parametrize("end", ["done", "draining", "forgotten"])
async def test_a_resend_during_the_first_attempt_gets_its_answer(
    rig: ShardRig, second: str, elsewhere: bool, end: str
) -> None:
    """The first of two payloads is accepted, and only its resend gets its answer."""
    session = b"s" * 16
    peer, other = await rig.peer(session=session), await rig.peer(session=session)
    again = other if elsewhere else peer
    rig.store.stall()
    number = peer.send(T.ENQUEUE, 0, (task(),)) + 1
    await rig.until(lambda: rig.core.sealed is not None)
    assert peer.send(T.ENQUEUE, 0, (task("replace", body=b"one"),)) == number
    kind, *fields = UNDER_ONE_NUMBER[second]
    again.feed(encode((int(kind), number, *fields)))
    if end == "forgotten":
        peer.send(T.ENQUEUE, number + 1, (task("add", key="next"),))
    (found,) = rig.core.sessions
    assert found.undecided == {number}
    rig.shard.draining = end == "draining"
    rig.store.go_on()
    answers = await both(peer, again, number)
    if second == "the same":
        assert answers[0][2:] == answers[1][2:]
    else:
        assert answers[1][2] == "conflict" and "has different tasks" in answers[1][3]
    assert not found.undecided and not rig.shard.coalescing._by_number
    if end == "done":
        assert answers[0][2][2]["outcomes"][0][0] == "replaced"
        assert [item.row.body for item in await rig.store.scan(0, 10, None)] == [b"one"]
    else:
        assert answers[0][2] == {"forgotten": "request_forgotten"}.get(end, end)


async def test_coalescing_answers_are_durable(rig: ShardRig) -> None:
    """Also where a request has changed nothing: a resend to the next daemon gets the same."""
    session = b"s" * 16
    peer = await rig.peer(session=session)
    await peer.call(T.ENQUEUE, 0, (task(),))
    rig.store.stall()
    number = peer.send(T.ENQUEUE, 0, (task("keep"),))
    await rig.settle()
    assert not peer.frames()
    rig.store.go_on()
    await peer.answer(number)
    merged = [item for row in kept(rig.store, SESSION).values() for item in row.merged]
    assert [request for request, _ in merged] == [number]


async def test_a_task_committed_during_the_read_is_seen(rig: ShardRig) -> None:
    peer = await rig.peer()
    await peer.call(T.ENQUEUE, 0, (task(delay_ms=0),))
    pulled = await peer.call(T.PULL, "t", None, 1, 60_000, None)
    assert len(pulled[2][2]) == 1  # in flight: not pending for what follows
    read, gate = rig.store.read_heads, asyncio.Event()

    async def slow(ids: Any, bytes_max: int) -> Any:
        await gate.wait()
        return await read(ids, bytes_max)

    rig.store.read_heads = slow  # type: ignore[method-assign]
    ruled = peer.send(T.ENQUEUE, 0, (task({"action": "keep", "unique_until": "started"}),))
    await rig.settle()
    plain = await peer.call(T.ENQUEUE, 0, (task(),))
    gate.set()
    answer = await peer.answer(ruled)
    assert answer[2][1] == plain[2][1] and answer[2][2]["outcomes"][0][0] == "kept"


async def test_a_busy_producer_does_not_starve_other_decisions(rig: ShardRig) -> None:
    """A request that never comes to rest is refused in the end, and may be sent again."""
    peer, other = await rig.peer(), await rig.peer()
    await peer.call(T.ENQUEUE, 0, (task(),))
    ruled = {rule: peer.send(T.ENQUEUE, 0, (task(rule),)) for rule in ("keep", "replace", "reject")}
    landed = rig.shard._landed

    def again(now: Now, wait_ms: int) -> None:
        other.send(T.ENQUEUE, 0, (task(),))
        landed(now, wait_ms)

    rig.shard.committer._landed = again
    other.send(T.ENQUEUE, 0, (task(),))
    words = {}
    for rule, number in ruled.items():
        answer = await peer.answer(number)
        words[rule] = answer[2] if answer[0] == T.ERROR else answer[2][2]["outcomes"][0][0]
    rig.shard.committer._landed = landed
    assert words["keep"] == "kept" and words["reject"] == "rejected"
    assert words["replace"] in ("replaced", "overloaded")


async def test_a_request_that_replaces_and_keeps_waits_for_the_commit(rig: ShardRig) -> None:
    peer, other = await rig.peer(), await rig.peer()
    await peer.call(T.ENQUEUE, 0, (task(),))
    rig.store.stall()
    other.send(T.ENQUEUE, 0, (task(key="other"),))
    await rig.until(lambda: rig.core.sealed is not None)
    other.send(T.ENQUEUE, 0, (task(key="l"),))
    number = peer.send(T.ENQUEUE, 0, (task("replace"), task("keep", key="l")))
    await rig.settle(4 * shard_enqueue.ATTEMPTS_MAX)
    rig.store.go_on()
    answer = await peer.answer(number)
    assert [word for word, _ in answer[2][2]["outcomes"]] == ["replaced", "kept"]


async def test_a_refused_replacement_is_committed_later(rig: ShardRig) -> None:
    """With the other tasks of its request; a plain one beside it is refused."""
    peer = await rig.peer()
    stored = await peer.call(T.ENQUEUE, 0, (task(body=b"old"),))
    refuse_next(rig)
    number = peer.send(T.ENQUEUE, 0, (task("replace", 50, b"new"), task("keep", key="l")))
    plain = peer.send(T.ENQUEUE, 0, (task(key="m"),))
    rig.pass_time(50)
    answer = await peer.answer(number)
    assert (await peer.answer(plain))[2] == "refused"
    assert [word for word, _ in answer[2][2]["outcomes"]] == ["replaced", "stored"]
    assert answer[2][1][0] == stored[2][1][0]
    await rig.until(lambda: rig.core.sealed is None)
    assert rig.core.tasks == 2 and not rig.core.replaced
    assert rig.engine.intake.inflight_bytes == 0
    pulled = await peer.call(T.PULL, "t", None, 5, 0, None)
    assert [d[3] for d in pulled[2][2]] == [b"new"]
    assert {row.options.key for row in rig.store._tasks.values() if row.options} == {"k", "l"}


async def test_a_new_body_is_not_delivered_before_it_is_durable(rig: ShardRig) -> None:
    peer = await rig.peer()
    await peer.call(T.ENQUEUE, 0, (task(body=b"old"),))
    waits = peer.send(T.PULL, "t", None, 5, 60_000, None)
    await rig.settle()
    rig.store.stall()
    number = peer.send(T.ENQUEUE, 0, (task("replace", 0, b"new"),))
    rig.pass_time(10)
    await rig.settle()
    assert not rig.core.in_flight
    rig.store.go_on()
    await peer.answer(number)
    answer = await peer.answer(waits)
    assert [d[3] for d in answer[2][2]] == [b"new"]


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("verb", [T.CANCEL, T.RUN_NOW])
async def test_a_command_acts_on_an_uncommitted_replacement(
    rig: ShardRig, verb: T, by_key: bool
) -> None:
    peer = await rig.peer()
    stored = await peer.call(T.ENQUEUE, 0, (task(body=b"old"),))
    rig.store.stall()
    number = peer.send(T.ENQUEUE, 0, (task("replace", 60_000, b"new"),))
    await rig.settle()
    assert len(rig.core.replaced) == 1
    ids = stored[2][1]
    other = peer.send(verb, *((None, {"topic": "t", "key": "k"}) if by_key else (ids,)))
    await rig.settle()
    rig.store.go_on()
    await peer.answer(number)
    await peer.answer(other)
    pulled = await peer.call(T.PULL, "t", None, 5, 0, None)
    assert [d[3] for d in pulled[2][2]] == ([b"new"] if verb is T.RUN_NOW else [])
    assert not rig.core.replaced and rig.core.scheduled == 0
    assert len(rig.core.wheel) == 0


async def test_a_replacement_survives_a_restart(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as first:
        peer = first.connect()
        _, task_id = await one(first, peer, None, FAR_MS, b"old")
        assert await one(first, peer, "replace", 5_000, b"new", tag="x") == ("replaced", task_id)
        store = first.store
    async with InProcess(tmp_path, store=store) as second:
        peer = second.connect()
        assert await one(second, peer, "keep") == ("kept", task_id)
        second.pass_time(5_000)
        ((got, _, _, body, options),) = await pull(second, peer)
        assert (got, body, options["tag"]) == (task_id, b"new", "x")
        second.recount()


# --- defaults of a topic, one-way, limits, errors ------------------------------------------------


async def test_a_topic_has_a_rule_for_tasks_with_a_key(tmp_path: Path) -> None:
    rule = {"action": "keep", "window_ms": 60_000}
    async with InProcess(tmp_path) as first:
        peer = first.connect(session=b"s" * 16)
        await one(first, peer, topic="u")
        answer = await first.ask(peer, T.CONFIGURE, "t", None, {"if_pending": rule})
        assert answer["if_pending"] == rule
        _, task_id = await one(first, peer)
        assert await one(first, peer) == ("kept", task_id)
        frames = [(T.ENQUEUE, 0, (task(),))] * 3 + [(T.ENQUEUE, 0, (("t", b"", 0),))]
        results = [_pairs(answer[0])[0] for answer in await first.send(peer, *frames)]
        assert results[:3] == [("kept", task_id)] * 3 and results[3][0] == "stored"
        assert await enqueue(first, peer, task(), task()) == [("kept", task_id)] * 2
        assert (await one(first, peer, "reject")) == ("rejected", task_id)
        assert (await one(first, peer, "add"))[1] != task_id
        assert (await one(first, peer, topic="u"))[0] == "stored"
        first.recount()
        store = first.store
    async with InProcess(tmp_path, store=store) as second:
        peer = second.connect()
        assert (await one(second, peer))[0] == "kept"
        await second.ask(peer, T.CONFIGURE, "t", None, {"if_pending": None})
        assert (await one(second, peer))[0] == "stored"
        second.recount()


async def test_oneway_tasks_follow_their_rules(daemon: InProcess, peer: Peer) -> None:
    _, task_id = await one(daemon, peer)
    peer.send(T.ONEWAY, (task("keep"), task("replace", 10, b"new"), task("keep", key="l")))
    await daemon.settle()
    daemon.pass_time(10)
    assert daemon.shard.core.tasks == 2
    assert [(d[0], d[3]) for d in await pull(daemon, peer)] == [(task_id, b"new")]


@pytest.mark.parametrize("over", [0, 1])
async def test_tasks_with_a_rule_per_enqueue_are_limited(
    daemon: InProcess, peer: Peer, over: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon.shard.new_tasks, "_limits", Limits(coalesced_tasks_max=3))
    tasks = [task("keep", key=f"k{n}") for n in range(3 + over)]
    (answer,) = await daemon.send(peer, (T.ENQUEUE, 0, (*tasks, task(), ("t", b"", 0))))
    if over:
        assert answer[0] == "limit_exceeded" and "4 tasks" in answer[1]
        assert "the limit is 3 (coalesced_tasks_max)" in answer[1]
    assert daemon.shard.core.tasks == (0 if over else 5)


@pytest.mark.parametrize("frame", [(T.ENQUEUE, 0), (T.ENQUEUE_ONCE, b"once", 7)])
async def test_tasks_with_the_keys_of_an_enqueue_are_limited(
    daemon: InProcess, peer: Peer, monkeypatch: pytest.MonkeyPatch, frame: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(daemon.shard.coalescing, "_ids_max", 3)
    await enqueue(daemon, peer, *[task()] * 3)
    assert (await one(daemon, peer, "keep"))[0] == "kept"
    await enqueue(daemon, peer, task())
    (answer,) = await daemon.send(peer, (*frame, (task("keep"),)))
    assert answer[0] == "limit_exceeded" and "the limit is 3 (key_tasks_max)" in answer[1]


async def test_too_many_tasks_with_a_key_are_not_searched(
    daemon: InProcess, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        await enqueue(daemon, peer, *[task()] * 500)
    windowed = {"action": "keep", "window_ms": 1}
    with monkeypatch.context() as patch:
        patch.setattr(daemon.shard.coalescing, "_ids_max", 1_499)
        patch.setattr(Table, "ids", None)
        frames = [(T.ENQUEUE, 0, (task(rule),)) for rule in ("keep", "replace", windowed)]
        for answer in await daemon.send(peer, *frames):
            assert answer[0] == "limit_exceeded" and "at least 1500 tasks" in answer[1]
    assert (await one(daemon, peer, "keep"))[0] == "kept"


@pytest.mark.parametrize(
    "rule", ["keep", {"action": "keep", "unique_until": "started"}, replace(window_ms=FAR_MS)]
)
async def test_tasks_of_a_request_share_the_search_for_their_key(
    daemon: InProcess, peer: Peer, monkeypatch: pytest.MonkeyPatch, rule: Any
) -> None:
    count = 50
    await enqueue(daemon, peer, task(), *[task(delay_ms=0)] * count)
    await daemon.ask(peer, T.PULL, "t", "g", count, 0, None)
    calls = Counter[str]()
    finds, is_pending = Table.find, Coalescer.is_pending

    def found(table: Table, place: int) -> list[int]:
        calls["find"] += 1
        return finds(table, place)

    def judged(*args: Any) -> bool:
        calls["is_pending"] += 1
        return is_pending(*args)

    monkeypatch.setattr(Table, "find", found)
    monkeypatch.setattr(Coalescer, "is_pending", judged)
    results = await enqueue(daemon, peer, *[task(rule)] * count)
    assert {word for word, _ in results} == {"replaced" if "replace" in str(rule) else "kept"}
    assert calls["find"] < 10 and 0 < calls["is_pending"] <= 2 * count + 2


@pytest.mark.parametrize(
    ("limit", "requests_max"), [("TASKS_PER_READ_MAX", 5), ("IDS_PER_READ_MAX", 3)]
)
async def test_waiting_enqueues_are_decided_in_steps(
    daemon: InProcess, peer: Peer, monkeypatch: pytest.MonkeyPatch, limit: str, requests_max: int
) -> None:
    monkeypatch.setattr(shard_enqueue, limit, 10)
    await enqueue(daemon, peer, *[task()] * 3)
    steps, decide = Counter[int](), Coalescer.decide

    def decided(*args: Any) -> Any:
        steps[turns[0]] += 1
        return decide(*args)

    monkeypatch.setattr(Coalescer, "decide", decided)
    with counted_turns() as turns:
        answers = await daemon.send(peer, *[(T.ENQUEUE, 0, (task("keep"),) * 2)] * 20)
    assert {word for answer in answers for word, _ in _pairs(answer[0])} == {"kept"}
    assert sum(steps.values()) == 20 and max(steps.values()) == requests_max


async def test_bytes_with_the_keys_of_an_enqueue_are_limited(
    daemon: InProcess, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_enqueue, "KEY_BYTES_MAX", 3_000)
    for key, count in (("k", 3), ("more", 4)):
        await enqueue(daemon, peer, *[task(body=bytes(1_000), key=key, tag="a")] * count)
    frames = [(T.ENQUEUE, 0, (task("keep", key=key),)) for key in ("k", "more", "k")]
    first, more, last = await daemon.send(peer, *frames)
    assert _pairs(first[0])[0][0] == _pairs(last[0])[0][0] == "kept"
    assert more[0] == "limit_exceeded" and "3000 bytes, the limit (KEY_BYTES_MAX)" in more[1]
    assert daemon.shard.core.tasks == 7


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("merge", "tasks[0].if_pending must be one of add, keep, replace, reject, not 'merge'"),
        (5, "tasks[0].if_pending must be one of add, keep, replace, reject, or a map, not 5"),
        ({"window_ms": 5}, "if_pending must be one of add, keep, replace, reject, not None"),
        ({"action": "keep", "window_ms": 0}, "window_ms must be an integer between 1 and"),
        ({"action": "add", "window_ms": 5}, "add has no option 'window_ms'; its options: none"),
        (
            {"action": "keep", "due": "new"},
            "keep has no option 'due'; its options: window_ms, unique_until",
        ),
        (replace(unique_until="finished"), "replace has no option 'unique_until'"),
        (replace(due="sooner"), "if_pending.due must be one of new, later, earlier, not 'sooner'"),
        (replace(replaces="body", max_wait_ms=5), "need replaces both or due, not body"),
    ],
)
async def test_invalid_rules_are_refused(
    daemon: InProcess, peer: Peer, rule: Any, said: str
) -> None:
    (answer,) = await daemon.send(peer, (T.ENQUEUE, 0, (task(rule),)))
    assert answer[0] == "bad_request" and said in answer[1]
    assert daemon.shard.core.tasks == 0


async def test_a_rule_needs_a_key_and_a_task(daemon: InProcess, peer: Peer) -> None:
    keyless = ("t", b"", 0, {"if_pending": "keep"})
    (answer,) = await daemon.send(peer, (T.ENQUEUE, 0, (keyless,)))
    assert answer == ("bad_request", "tasks[0].if_pending is keep, which needs a key")
    (answer,) = await daemon.send(peer, (T.CONFIGURE, "t", "g", {"if_pending": "keep"}))
    assert answer[0] in ("bad_request", "not_found")
    options = {"topic": "t", "every_ms": 5_000, "task": {"key": "k", "if_pending": "keep"}}
    (answer,) = await daemon.send(peer, (T.SCHEDULE_PUT, "s", options))
    assert answer[0] == "bad_request" and "unknown key 'if_pending'" in answer[1]


async def test_coalescing_outcomes_are_counted(daemon: InProcess, peer: Peer) -> None:
    for rule in ("keep", "keep", "replace", "reject", "reject", "reject"):
        await one(daemon, peer, rule)
    counts = {what.word: n for what, n in daemon.shard.core.topics["t"].merged.items()}
    assert counts == {"kept": 1, "replaced": 1, "rejected": 3}
