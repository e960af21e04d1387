"""Why a task is where it is: every cause, each brought about in a daemon."""

from __future__ import annotations

import re
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from server.shard.test_filters import put
from server.shard.test_lining import HOLD, fail, later, pull
from server.shard.test_targets import PUSH
from support.in_process import InProcess
from support.sender import FakeSender
from support.shard_rig import NOW_MS, Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.api.tasks import EXPLAINED
from tickwheel.cli.app import app
from tickwheel.client.merging import ENDED, NOWHERE
from tickwheel.engine.explanation import ExplainContext, Explained, Reason, explain
from tickwheel.model.kinds import TargetRow
from tickwheel.model.records import ID_STEP, TaskSnapshot
from tickwheel.server.shard.operations import Operations
from tickwheel.server.shard.tasks import Explaining
from tickwheel.server.tcp.listener import value_bytes

Wanted = dict[str, Any]
"""What an explanation must say: of a text, a part; and ``id``, the task to ask about."""
Scene = Callable[[InProcess, Peer], Awaitable[Wanted]]
SCENES: dict[str, list[Scene]] = {}


def scene(cause: str) -> Callable[[Scene], Scene]:
    """Mark what brings a cause about."""

    def mark(play: Scene) -> Scene:
        SCENES.setdefault(cause, []).append(play)
        return play

    return mark


async def explained(peer: Peer, task_id: int | None, **of: str) -> Any:
    return await peer.do(T.EXPLAIN, task_id, of or None)


# --- nothing is delivered, by somebody's will ----------------------------------------------------


@scene("topic_paused")
async def of_a_paused_topic(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    await peer.do(T.CONFIGURE, "t", None, {"paused": True})
    [task] = await put(daemon, peer, {})
    return {"id": task, "group": "g", "command": "tickwheel resume t"}


@scene("topic_paused")
async def of_a_paused_topic_that_has_no_group(daemon: InProcess, peer: Peer) -> Wanted:
    [task] = await put(daemon, peer, {})
    await peer.do(T.CONFIGURE, "t", None, {"paused": True})
    return {"id": task, "group": None, "command": "tickwheel resume t"}


@scene("group_paused")
async def of_a_paused_group(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    await peer.do(T.CONFIGURE, "t", "g", {"paused": True})
    [task] = await put(daemon, peer, {})
    return {"id": task, "group": "g", "command": "tickwheel resume t --group g"}


@scene("key_paused")
async def of_a_paused_order_key(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    await peer.do(T.PAUSE_KEY, "t", "g", "ann's", None)
    [task] = await put(daemon, peer, {"order_key": "ann's"})
    return {"id": task, "command": "tickwheel groups resume-key t g --key 'ann'\"'\"'s'"}


@scene("key_paused")
async def of_a_paused_value(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", {"fair_by": "shop"})
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    await peer.do(T.PAUSE_KEY, "t", "g", None, 7)
    [task] = await put(daemon, peer, {"properties": {"shop": 7}})
    return {
        "id": task,
        "command": "resume-key t g --value :=7",
        "detail": "The shop 7 has been paused",
    }


@scene("key_held")
async def of_the_task_that_holds_its_key(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", HOLD)
    [task] = await put(daemon, peer, {"order_key": "a"})
    await fail(daemon, peer, "no such order")
    release = f"tickwheel groups release-key t g {task}"
    return {"id": task, "detail": "no such order", "command": release, "behind": None}


@scene("key_held")
async def of_one_behind_a_held_task(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", HOLD)
    head, task = await put(daemon, peer, {"order_key": "a"}, {"order_key": "a"})
    await fail(daemon, peer, "no such order")
    text = f"for task {head}, which has failed for good"
    return {"id": task, "behind": head, "detail": text, "command": f"release-key t g {head}"}


@scene("clock_held")
async def of_a_clock_that_is_not_believed(daemon: InProcess, peer: Peer) -> Wanted:
    answer = await peer.enqueue(("t", b"x", 3_600_000))
    await daemon.settle()
    clock = daemon.daemon.roles.clock
    clock._hold_over_ms = clock._limit_ms = 60_000
    daemon.sources.wall_ms = lambda: daemon.sources.now_ms + 86_400_000  # type: ignore[method-assign]
    daemon.shard.wake()
    await daemon.settle()
    return {"id": answer[2][1][0], "command": "kill -USR1 ", "detail": "2027-01-16T08:00:00Z"}


# --- nobody takes it -----------------------------------------------------------------------------


@scene("no_group")
async def of_a_topic_without_a_group(daemon: InProcess, peer: Peer) -> Wanted:
    [task] = await put(daemon, peer, {})
    return {"id": task, "group": None, "command": "tickwheel groups create t default"}


@scene("no_subscriber")
async def of_a_group_without_a_subscriber(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    [task] = await put(daemon, peer, {})
    return {"id": task, "group": "g", "command": "tickwheel peek t"}


@scene("similar_topic")
async def of_a_misspelt_topic(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "orders.close", "g", 10, None)
    answer = await peer.enqueue(("Orders_close", b"x", 0))
    await daemon.settle()
    command = "tickwheel consumers --topic orders.close"
    return {"id": answer[2][1][0], "detail": "topic orders.close has consumers", "command": command}


@scene("similar_topic")
async def of_a_group_that_nobody_serves_beside_one_that_is(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "orders.closed", "g", 10, None)
    await peer.do(T.GROUP_CREATE, "orders.close", "g", None)
    answer = await peer.enqueue(("orders.close", b"x", 0))
    await daemon.settle()
    return {"id": answer[2][1][0], "group": "g", "detail": "topic orders.closed has consumers"}


@scene("endpoint")
async def of_a_group_that_is_sent_elsewhere(daemon: InProcess, peer: Peer) -> Wanted:
    daemon.daemon.outbound, daemon.shard.outbound = None, FakeSender()
    await peer.do(T.PUSH_SET, "t", "g", *PUSH)
    [task] = await put(daemon, peer, {})
    return {"id": task, "group": "g", "command": "tickwheel push list t"}


@scene("endpoint")
async def of_a_slow_broker(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 1, None)
    _, task = await put(daemon, peer, {}, {})
    row = TargetRow("t", "g", "forward", "redis://8.8.8.8/0", (), (), 0, "")
    daemon.shard.engine.grouping.set_target(row)
    await daemon.settle()
    return {"id": task, "group": "g", "command": "tickwheel forward list t"}


@scene("slow_consumers")
async def of_consumers_that_have_enough(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 1, None)
    _, task = await put(daemon, peer, {}, {})
    command = "tickwheel consumers --topic t --group g"
    return {"id": task, "command": command, "detail": "127.0.0.1:1 has 1 of 1"}


@scene("slow_consumers")
async def of_one_whose_order_key_is_not_the_cause(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 0, None)
    _, task = await put(daemon, peer, {"order_key": "a"}, {"order_key": "a"})
    return {"id": task, "detail": "127.0.0.1:1 has 0 of 0"}


@scene("alone")
async def of_one_that_has_to_be_alone(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    [task] = await put(daemon, peer, {})
    for _ in range(2):
        victim = daemon.connect()
        await victim.do(T.SUBSCRIBE, 1, "t", "g", 1, None)
        await daemon.settle()
        victim.lose()
        await later(daemon, daemon.shard.core.config.reconnect_grace_ms + 1)
        await later(daemon, 60_000)  # the wait after a death
    await peer.do(T.CONFIGURE, "t", "g", {"paused": True})
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 5, None)
    await put(daemon, peer, {"priority": 9})
    await peer.do(T.CONFIGURE, "t", "g", {"paused": False})
    await daemon.settle()
    return {"id": task, "detail": "a connection with no other delivery"}


# --- it goes on by itself ------------------------------------------------------------------------


@scene("rate")
async def of_the_rate_of_a_group(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", {"rate": 0.1, "burst": 1})
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    _, task = await put(daemon, peer, {}, {})
    command = "tickwheel rate t none --group g"
    return {
        "id": task,
        "next_ms": NOW_MS + 10_000,
        "command": command,
        "detail": "is 0.1 per second",
    }


@scene("rate")
async def of_the_rate_of_a_topic(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    await peer.do(T.CONFIGURE, "t", None, {"rate": 0.1, "burst": 1})
    _, task = await put(daemon, peer, {}, {})
    command = "tickwheel rate t none"
    return {"id": task, "next_ms": NOW_MS + 10_000, "command": command, "detail": "of topic t is"}


@scene("rate")
async def of_the_rate_of_a_value(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", {"fair_by": "key", "rate_each": 0.1})
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    _, task = await put(daemon, peer, {"key": "ann"}, {"key": "ann"})
    return {
        "id": task,
        "detail": "allows 0.1 tasks per second with key ann",
        "command": "--rate-each N",
    }


@scene("share_limit")
async def of_a_value_with_as_many_as_it_may_have(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", {"fair_by": "key", "limit_each": 1})
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    first, task = await put(daemon, peer, {"key": "ann"}, {"key": "ann"})
    return {
        "id": task,
        "behind": first,
        "detail": f"key ann ({first})",
        "command": "--limit-each N",
    }


@scene("key_busy")
async def of_one_behind_a_delivery(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    first, task = await put(daemon, peer, {"order_key": "a"}, {"order_key": "a"})
    command = f"tickwheel explain {first}"
    return {"id": task, "behind": first, "detail": "which is with", "command": command}


@scene("key_busy")
async def of_one_behind_a_retry(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", {"order_retry_ms": 30_000})
    first, task = await put(daemon, peer, {"order_key": "a"}, {"order_key": "a"})
    await fail(daemon, peer)
    return {"id": task, "behind": first, "detail": "is tried again 2027-01-15T08:00:30Z"}


@scene("retry_wait")
async def of_one_that_has_failed(daemon: InProcess, peer: Peer) -> Wanted:
    retry = {"kind": "fixed", "delay_ms": 60_000, "retries": 5, "jitter": 0}
    await peer.do(T.GROUP_CREATE, "t", "g", {"retry": retry})
    [task] = await put(daemon, peer, {})
    await fail(daemon, peer, "the bank said no")
    next_ms, why = daemon.sources.now_ms + 60_000, "attempt 1 failed: the bank said no"
    return {"id": task, "next_ms": next_ms, "detail": why, "command": f"tickwheel run-now {task}"}


@scene("retry_wait")
async def of_one_whose_consumer_died(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    [task] = await put(daemon, peer, {})
    victim = daemon.connect()
    await victim.do(T.SUBSCRIBE, 1, "t", "g", 1, None)
    await daemon.settle()
    victim.lose()
    await later(daemon, daemon.shard.core.config.reconnect_grace_ms + 1)
    return {"id": task, "detail": "the consumer of attempt 1 died"}


@scene("retry_wait")
async def of_one_that_was_postponed(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    [task] = await put(daemon, peer, {})
    epoch, [(_, attempt)] = await pull(peer)
    await peer.do(T.SNOOZE, "t", "g", ((task, epoch, attempt, 60_000),))
    await daemon.settle()
    return {"id": task, "detail": "its consumers have postponed it 1 time"}


@scene("retry_wait")
async def of_one_that_was_postponed_after_a_failure(daemon: InProcess, peer: Peer) -> Wanted:
    retry = {"kind": "fixed", "delay_ms": 0, "retries": 5, "jitter": 0}
    await peer.do(T.GROUP_CREATE, "t", "g", {"retry": retry})
    [task] = await put(daemon, peer, {})
    await fail(daemon, peer, "the bank said no")
    await daemon.settle()
    epoch, [(_, attempt)] = await pull(peer)
    await peer.do(T.SNOOZE, "t", "g", ((task, epoch, attempt, 60_000),))
    await daemon.settle()
    return {"id": task, "detail": "; its consumers have postponed it 1 time"}


@scene("retry_wait")
async def of_one_that_was_moved(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    await peer.do(T.GROUP_CREATE, "t", "other", None)
    [task] = await put(daemon, peer, {})
    epoch, [(_, attempt)] = await pull(peer)
    await peer.do(T.ACK, "t", "g", epoch, (task,), (attempt,))
    await peer.do(T.RESCHEDULE, (task,), {"delay_ms": 60_000})
    return {"id": task, "group": "other", "detail": "because it was rescheduled"}


@scene("leased")
async def of_one_that_a_consumer_has(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, {"lease_ms": 60_000})
    [task] = await put(daemon, peer, {})
    text = "with sample 127.0.0.1:1"
    return {"id": task, "next_ms": NOW_MS + 60_000, "detail": text, "group": "g"}


@scene("scheduled")
async def of_one_that_is_not_due(daemon: InProcess, peer: Peer) -> Wanted:
    answer = await peer.enqueue(("t", b"x", 7_200_000))
    await daemon.settle()
    task = answer[2][1][0]
    said, command = "its time is 2027-01-15T10:00:00Z, in 2 hours", f"tickwheel run-now {task}"
    return {"id": task, "next_ms": NOW_MS + 7_200_000, "detail": said, "command": command}


@scene("scheduled")
async def of_one_that_will_be_held_by_a_pause(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "served", 10, None)
    await peer.do(T.SUBSCRIBE, 2, "t", "g", 10, None)
    await peer.do(T.CONFIGURE, "t", "g", {"paused": True})
    answer = await peer.enqueue(("t", b"x", 7_200_000))
    await daemon.settle()
    detail = "in 2 hours. If it were due now, it would wait. Group g of topic t is paused"
    return {"id": answer[2][1][0], "next_ms": NOW_MS + 7_200_000, "detail": detail}


@scene("scheduled")
async def of_one_that_nobody_will_take(daemon: InProcess, peer: Peer) -> Wanted:
    answer = await peer.enqueue(("t", b"x", 7_200_000))
    await daemon.settle()
    detail = "in 2 hours. If it were due now, it would wait. Topic t has no group"
    return {"id": answer[2][1][0], "next_ms": NOW_MS + 7_200_000, "detail": detail}


@scene("scheduled")
async def of_one_that_nothing_will_hold(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 10, None)
    answer = await peer.enqueue(("t", b"x", 7_200_000))
    await daemon.settle()
    assert (await explained(peer, answer[2][1][0]))["detail"].endswith("in 2 hours.")
    return {"id": answer[2][1][0], "detail": "in 2 hours."}


@scene("transaction")
async def of_a_half_task(daemon: InProcess, peer: Peer) -> Wanted:
    half = ("t", b"x", 0, {"key": "order-9"})
    await peer.do(T.PREPARE, "pay-9", "payments", 1, (half,), None)
    said, command = "of transaction pay-9, which is open", "tickwheel transactions show pay-9"
    return {"topic": "t", "key": "order-9", "id": None, "detail": said, "command": command}


# --- it is over ----------------------------------------------------------------------------------


@scene("dead")
async def of_a_dead_letter(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", {"retry": "none"})
    [task] = await put(daemon, peer, {})
    await fail(daemon, peer, "the card is void")
    command = f"tickwheel dead requeue {task} --group g"
    return {"id": task, "detail": "1 attempt: the card is void", "command": command}


@scene("acked")
async def of_one_that_is_done(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    [task] = await put(daemon, peer, {"key": "order-1"})
    epoch, [(_, attempt)] = await pull(peer)
    await peer.do(T.ACK, "t", "g", epoch, (task,), (attempt,))
    await daemon.settle()
    by_key = await explained(peer, None, topic="t", key="order-1")
    assert (by_key["id"], by_key["cause"]) == (task, "acked")
    return {"id": task, "detail": "Every group that was owed it has acked it."}


@scene("filtered")
async def of_one_that_a_filter_left_out(daemon: InProcess, peer: Peer) -> Wanted:
    where = {"where": "amount > 10 AND region = 'eu'"}
    await peer.do(T.GROUP_CREATE, "t", "g", where)
    await peer.do(T.GROUP_CREATE, "t", "other", None)
    [task] = await put(daemon, peer, {"properties": {"amount": 5}})
    explanation = await explained(peer, task)
    assert (explanation["cause"], explanation["group"]) == ("no_subscriber", "other")
    [left_out] = explanation["others"]
    assert (left_out["cause"], left_out["group"]) == ("filtered", "g")
    assert left_out["detail"] == (
        "The filter of group g of topic t excluded it: amount > 10 is FALSE (amount is 5) and"
        " region = 'eu' is UNKNOWN (the task has no property region)."
    )
    await peer.do(T.GROUP_DELETE, "t", "other", True)
    [task] = await put(daemon, peer, {"properties": {"amount": 5}})
    await daemon.settle()
    return {"id": task, "detail": "The filters of all groups"}


@scene("expired")
async def of_one_that_came_too_late(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    [task] = await put(daemon, peer, {"ttl_ms": 1_000})
    await later(daemon, 10_000)
    return {"id": task}


@scene("cancelled")
async def of_one_that_was_cancelled(daemon: InProcess, peer: Peer) -> Wanted:
    [task] = await put(daemon, peer, {})
    await peer.do(T.CANCEL, (task,), {})
    return {"id": task, "command": f"tickwheel show {task} --flow"}


@scene("deleted")
async def of_a_deleted_dead_letter(daemon: InProcess, peer: Peer) -> Wanted:
    wanted = await of_a_dead_letter(daemon, peer)
    await peer.do(T.DEAD_DELETE, ((wanted["id"], "g"),))
    return {"id": wanted["id"]}


@scene("gone")
async def of_one_that_nobody_remembers(daemon: InProcess, peer: Peer) -> Wanted:
    [task] = await put(daemon, peer, {})
    return {"id": task - ID_STEP, "detail": "so long ago"}


@scene("not_found")
async def of_one_that_never_was(daemon: InProcess, peer: Peer) -> Wanted:
    return {"id": 1 << 60, "detail": f"No task has had the id {1 << 60} here."}


@scene("not_found")
async def of_a_key_that_nobody_has(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.enqueue(("orders", b"x", 60_000, {"key": "order-1"}))
    await daemon.settle()
    text = "there is no such topic, but there is orders"
    return {"topic": "order", "key": "order-1", "id": None, "detail": text}


# --- the engine alone: what lasts no longer than a step of the loop -------------------------------


async def asked_now(daemon: InProcess, task_id: int) -> Reason:
    """The reason at this moment, without a turn of the loop."""
    row = (await daemon.store.read([task_id]))[task_id].row
    known = TaskSnapshot(row, {}, {})
    now = daemon.daemon.roles.clock.read()
    around = ExplainContext(now.now_ms, now.mono_ms, lambda topic: True)
    return explain(daemon.shard.core, daemon.shard.engine.control, known, around)[0]


@scene("queued")
async def of_one_that_is_next(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.SUBSCRIBE, 1, "t", "g", 0, None)
    [task] = await put(daemon, peer, {})
    group = daemon.shard.core.topics["t"].groups["g"]
    known = await asked_now(daemon, task)
    assert known.cause is Explained.SLOW_CONSUMERS
    [subscriber] = group.subscribers
    subscriber.prefetch = 1
    group.able[subscriber] = None
    reason = await asked_now(daemon, task)
    return {"is": reason, "group": "g", "detail": "whose consumers have credit"}


@scene("deleting")
async def of_a_group_that_is_being_deleted(daemon: InProcess, peer: Peer) -> Wanted:
    await peer.do(T.GROUP_CREATE, "t", "g", None)
    [task] = await put(daemon, peer, {})
    peer.send(T.GROUP_DELETE, "t", "g", True)
    reason = await asked_now(daemon, task)
    await daemon.settle()
    return {"is": reason, "group": "g", "detail": "is being deleted"}


# --- all of them ---------------------------------------------------------------------------------


def parse_command(line: str) -> None:
    """Fail if the command line does not know the command, its arguments or its options."""
    here: Any = get_command(app)
    _, *words = shlex.split(line)
    while hasattr(here, "commands"):
        here = here.commands[words.pop(0)]
    here.make_context(line, words)


@pytest.mark.parametrize(
    ("cause", "play"), [(cause, play) for cause, plays in SCENES.items() for play in plays]
)
async def test_a_task_is_explained(daemon: InProcess, cause: str, play: Scene) -> None:
    peer = daemon.connect(client="sample")
    wanted = await play(daemon, peer)
    if "is" in wanted:
        result = wanted.pop("is")._asdict()
    elif "topic" in wanted:
        result = await explained(peer, None, topic=wanted["topic"], key=wanted.pop("key"))
    else:
        result = await explained(peer, wanted["id"])
    assert result["cause"] == cause, result
    for name, value in wanted.items():
        is_part = isinstance(value, str) and name in ("detail", "command")
        assert value in result[name] if is_part else result[name] == value, (name, result)
    assert re.fullmatch(r"[A-Z0-9].+[.?]", result["detail"])
    if (command := result["command"]) and command.startswith("tickwheel"):
        parse_command(command.replace("each N", "each 1"))


def test_every_cause_is_brought_about_and_documented() -> None:
    of_shards = {"shard_away"}  # tests/client/test_shards_verbs.py
    assert SCENES.keys() | of_shards == set(Explained)
    assert list(EXPLAINED) == list(Explained)
    assert set(Explained) >= ENDED | NOWHERE
    _, _, text = (
        Path("docs/operations.md").read_text().partition("\n## Why does a task not come?\n")
    )
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", text, re.MULTILINE)
    assert rows == list(EXPLAINED.items())


async def test_groups_with_a_problem_are_explained_first(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.SUBSCRIBE, 1, "t", "busy", 10, None)
    await peer.do(T.GROUP_CREATE, "t", "paused", {"paused": True})
    await peer.do(T.GROUP_CREATE, "t", "alone", None)
    [task] = await put(daemon, peer, {})
    explanation = await explained(peer, task)
    causes = [(row["cause"], row["group"]) for row in (explanation, *explanation["others"])]
    wanted = [("group_paused", "paused"), ("no_subscriber", "alone"), ("leased", "busy")]
    assert causes == wanted


async def test_explain_by_key_uses_the_newest_task(daemon: InProcess) -> None:
    peer = daemon.connect()
    first, second = await put(daemon, peer, {"key": "k"}, {"key": "k"})
    assert (await explained(peer, None, topic="t", key="k"))["id"] == second
    await peer.do(T.CANCEL, (second,), {})
    assert (await explained(peer, None, topic="t", key="k"))["id"] == first


async def test_explain_takes_an_id_or_topic_and_key(daemon: InProcess) -> None:
    peer = daemon.connect()
    for fields in ((7, {"topic": "t", "key": "k"}), (None, None), (None, {"topic": "t"})):
        code, _ = await peer.refused(T.EXPLAIN, *fields)
        assert code == "bad_request"


# --- with a history ------------------------------------------------------------------------------

STORY: list[dict[str, Any]] = [
    {"event": "enqueued", "time_ms": NOW_MS, "topic": "t", "due_ms": NOW_MS},
    {"event": "delivered", "time_ms": NOW_MS + 5, "topic": "t", "group": "g", "attempt": 1},
]
ACK = {"event": "acked", "time_ms": NOW_MS + 9, "topic": "t", "group": "g", "attempt": 1}


FILTERED = [
    STORY[0] | {"props": {"amount": 5}, "tag": "us"},
    {"event": "filtered", "time_ms": NOW_MS, "topic": "t", "group": "g", "ended": True},
]
WHY = "The filter of group g of topic t excluded it: amount > 10 is FALSE (amount is 5)."


@pytest.mark.parametrize(
    ("events", "cause", "said"),
    [
        ([*STORY, ACK | {"ended": True}], "acked", "acked 2027-01-15T08:00:00.009Z, group g"),
        (FILTERED, "filtered", WHY),
        (STORY, "gone", "It is not stored here; its last event in the history of topic t"),
        ([], "gone", "The history does not contain it."),
    ],
)
async def test_explain_uses_the_history_for_ended_tasks(
    daemon: InProcess, events: list[dict[str, Any]], cause: str, said: str
) -> None:
    async def story(task_id: int) -> tuple[list[dict[str, Any]], bool]:
        return events, True

    operations = Operations(daemon.shard, value_bytes)
    explaining = Explaining(daemon.shard, story, daemon.shard.lookups)
    operations.verbs.explain = explaining.explain
    daemon.daemon.listener.serve(operations)
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", {"where": "amount > 10"})
    [task] = await put(daemon, peer, {})
    explanation = await explained(peer, task - ID_STEP)
    assert explanation["cause"] == cause and said in explanation["detail"], explanation
