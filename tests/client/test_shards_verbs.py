"""Every verb, through a client of one shard and through one of three: the same work has the same
answers, but for ids.

The work of a verb is a function of a ``Room``; what it returns is compared. A verb without work, or
without a declaration of which shards it asks, fails here.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest

from support.sender import FakeSender
from support.shards import Shards, key_in
from support.waiting import soon
from tickwheel import Client, Task, errors
from tickwheel.api.shapes import Answer
from tickwheel.api.verb import Routing
from tickwheel.api.verbs import VERBS
from tickwheel.client import merging
from tickwheel.client import shards as client_shards

TASKS = 9
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SOON, HOUR = timedelta(seconds=60), timedelta(hours=1)
OF_ONE = frozenset((
    "wheel_bytes", "resident_bytes", "batches", "connections", "sessions", "subscribers", "node",
    "epoch", "slot", "cycles", "memory_bytes", "pid", "broadcasters", "subscriber", "p50_ms",
    "p99_ms",
))  # fmt: skip
"""Fields that are about a process, and need not be the same."""


class Room:
    """Where the work is done: a client of some shards, and what was enqueued by it."""

    def __init__(self, shards: Shards, client: Client) -> None:
        self.shards = shards
        self.client = client
        self.ids: list[int] = []

    async def enqueue(self, topic: str = "t", body: bytes = b"", **options: Any) -> int:
        """A task; the next one is a millisecond later, so that ids are in that order everywhere."""
        receipt = await self.client.enqueue(topic, body, **{"delay": SOON} | options)
        self.ids.append(receipt.id)
        self.shards.pass_time(1)
        return receipt.id

    async def fill(self, **options: Any) -> list[int]:
        """Tasks with keys, of which each has its own, in a group."""
        await self.client.create_group("t", "g")
        return [
            await self.enqueue(body=b"%d" % n, key=f"k{n}", tag="ab"[n % 2], **options)
            for n in range(TASKS)
        ]

    async def take(self, count: int = 100) -> list[Any]:
        """Return the due deliveries, oldest first."""
        self.shards.pass_time(60_000)
        results: list[Any] = []
        while some := await self.client.pull("t", group="g", max=count):
            results += some
        return sorted(results, key=lambda one: self.ids.index(one.id))

    async def kill(self) -> None:
        """Make dead letters of all that is due now, each a millisecond after the one before."""
        for delivery in await self.take():
            await delivery.reject(f"no {delivery.key}")
            self.shards.pass_time(1)

    async def hold(self) -> None:
        """Let order keys be held, with a task that waits behind each."""
        await self.client.create_group("t", "g", order_attempts=1)
        for n in range(2 * TASKS):
            await self.enqueue(order_key=f"o{n % TASKS}")
        for delivery in await self.take():
            await delivery.nack(reason="no")
            self.shards.pass_time(1)

    def same(self, value: Any) -> Any:
        """A value as it is compared: ids by the order of the tasks, no fields of a process."""
        if isinstance(value, Answer):
            return self.same(value.raw)
        if isinstance(value, Mapping):
            return {self.same(k): self.same(v) for k, v in value.items() if k not in OF_ONE}
        if isinstance(value, (list, tuple)):
            return [self.same(item) for item in value]
        if isinstance(value, str):
            return re.sub(r"inside-\d+", "inside", value)  # the name of a connection
        is_known = type(value) is int and value in self.ids
        return f"#{self.ids.index(value)}" if is_known else value


Work = Callable[[Room], Awaitable[Any]]
WORKS: dict[str, Work] = {}
ELSEWHERE = {
    "claim_schedule": "tests/client/test_shards_names.py",
    "claim_transaction": "tests/client/test_shards_names.py",
    "prepare": "commit_transaction",
    "enqueue_once": "tests/server/http/test_gateway.py: the header Idempotency-Key",
    "set_prefetch": "tests/client/test_shards.py",
    "unsubscribe": "tests/client/test_shards.py",
    "leave": "tests/client/test_shards.py",
    "answer_checks": "tests/client/test_shards.py",
    "enqueue_unanswered": "tests/client/test_shards.py",
    "status": "it is about one daemon",
    "test_push": "it is about one daemon",
    "ping": "it is about one daemon",
    "nodes": "any daemon answers for all: tests/e2e/test_nodes_clients.py",
    "move_shard": "any daemon notes it: tests/e2e/test_nodes_clients.py",
    "drain_node": "any daemon notes it: tests/e2e/test_nodes_clients.py",
}
"""Verbs whose answers are not compared here, and why."""


def work(*verbs: str) -> Callable[[Work], Work]:
    def keep(done: Work) -> Work:
        for verb in verbs:
            assert verb not in WORKS, f"{verb} has two works"
            WORKS[verb] = done
        return done

    return keep


@pytest.fixture(params=sorted(name for name, verb in VERBS.items() if verb.frame is not None))
def verb(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def result(done: Work, count: int) -> Any:
    async with Shards(count, backup_dir="/proc") as shards:
        for inside in shards.insides:
            assert inside.daemon is not None
            assert inside.daemon.roles.shard is not None
            inside.daemon.roles.shard.outbound = FakeSender()
        room = Room(shards, await shards.client(count - 1).connect())
        return room.same(await soon(done(room)))


COMPARED: dict[Work, tuple[Any, Any]] = {}
"""What the works answered: several verbs share one."""


async def test_verbs_answer_the_same_for_one_shard_and_three(verb: str) -> None:
    assert VERBS[verb].routing is not None, f"{verb} does not say which shards it asks"
    if verb in ELSEWHERE:
        assert verb not in WORKS
        return
    done = WORKS[verb]
    if done not in COMPARED:
        COMPARED[done] = await result(done, 1), await result(done, 3)
    of_one, of_three = COMPARED[done]
    assert of_one, "there is nothing to compare"
    assert of_three == of_one


ASKED_ALL = (Routing.ALL, Routing.TURN, Routing.TOGETHER, Routing.HOME, Routing.HOME_LAST)


def test_each_verb_asked_of_all_shards_has_a_merge_rule() -> None:
    asked = {n for n, v in VERBS.items() if v.routing in ASKED_ALL}
    by_key = {n for n, v in VERBS.items() if v.routing is Routing.IDS and v.request is not None}
    of_ids_alone = {"requeue_dead", "delete_dead"}
    assert asked - {"restore"} | by_key - of_ids_alone == merging.MERGED.keys()
    lists = {n for n, v in VERBS.items() if v.routing is Routing.PAGES}
    assert lists == merging.LISTS.keys()


# --- tasks ---------------------------------------------------------------------------------------


@work("enqueue", "look_up")
async def enqueued(room: Room) -> Any:
    ids = await room.fill()
    client = room.client
    more = await client.enqueue_many(
        [Task("t", b"m", delay=SOON, key="k3"), Task("t", b"n", delay=SOON)]
    )
    assert len({task.id for task in more} | set(ids)) == TASKS + 2
    room.ids += [more[0].id, more[1].id]
    return [
        await client.lookup_many(ids[::-1]),
        await client.lookup(topic="t", key="k2"),
        [sorted(task.body or b"" for task in await client.lookup(topic="t", key="k3"))],
        len(await client.lookup(topic="t", key="k3", newest=True)),
        await client.lookup(topic="t", key="none"),
        (await client.lookup(1 << 62)).state,
        [task.due_ms for task in more],
        await client.find("k1", topic="t"),
        await client.find("k1"),
    ]


@work("enqueue_columns")
async def columns(room: Room) -> Any:
    made = await room.client.enqueue_columns("t", [b"a", b"b"], delays=[1, 2])
    return [item.due_ms for item in made], [task.body async for task in room.client.list_tasks()]


@work("cancel")
async def cancelled(room: Room) -> Any:
    ids, client = await room.fill(), room.client
    await room.enqueue(key="k5")
    by_id = await client.cancel_many([ids[4], ids[1], 1 << 62, ids[7], ids[1]])
    by_key = [await client.cancel(topic="t", key=key) for key in ("k5", "k5", "k1", "none")]
    bulk = await client.cancel(topic="t", filter={"tags": "a"}, id="mine")
    done = await client.wait_bulk("mine")
    left = [task.key async for task in client.list_tasks(topic="t")]
    return by_id, by_key, bulk.id, done, left


@work("reschedule")
async def rescheduled(room: Room) -> Any:
    ids, client = await room.fill(), room.client
    by_id = await client.reschedule_many(ids[::2], delay=HOUR)
    by_key = await client.reschedule(topic="t", key="k1", shift=HOUR)
    await client.reschedule(topic="t", filter={"tags": "b"}, shift=HOUR, id="b")
    done = await client.wait_bulk("b")
    return by_id, by_key, done, [task.due_ms async for task in client.list_tasks()]


@work("spread")
async def spread(room: Room) -> Any:
    ids, client = await room.fill(), room.client
    return [task.status for task in await client.spread_many(ids, within=HOUR)]


@work("run_now")
async def run_now(room: Room) -> Any:
    ids, client = await room.fill(), room.client
    by_id = await client.run_now_many(ids[3:6])
    deliveries = await client.pull("t", group="g", max=100, wait=20)
    return by_id, sorted(delivery.key or "" for delivery in deliveries)


@work("list_tasks")
async def listed(room: Room) -> Any:
    await room.fill()
    lists = [
        room.client.list_tasks(**asked)
        for asked in (
            {}, {"limit": 4}, {"newest_first": True}, {"newest_first": True, "limit": 5},
            {"topic": "t", "tag": "a"}, {"key_prefix": "k1"}, {"topic": "none"},
        )
    ]  # fmt: skip
    return [[item async for item in some] for some in lists]


@work("peek")
async def peeked(room: Room) -> Any:
    await room.fill()
    looks = [
        room.client.peek("t", **asked)
        for asked in ({}, {"due": True}, {"newest_first": True}, {"limit": 3})
    ]
    return [[item async for item in some] for some in looks]


# --- dead letters --------------------------------------------------------------------------------


@work("list_dead")
async def dead(room: Room) -> Any:
    await room.fill()
    await room.kill()
    lists = [
        room.client.dead_list(),
        room.client.dead_list(limit=4),
        room.client.dead_list(topic="t"),
    ]
    return [[item async for item in some] for some in lists]


@work("requeue_dead")
async def requeued(room: Room) -> Any:
    ids, client = await room.fill(), room.client
    await room.kill()
    pairs = [(ids[5], "g"), (ids[0], "g"), (ids[1], "none"), (ids[3], "g")]
    words = await client.dead_requeue(pairs)
    again = sorted(task.key or "" for task in await room.take())
    await client.dead_requeue(topic="t", filter={"reason": "no k7"}, id="r")
    return words, again, await client.wait_bulk("r"), [task.key for task in await room.take()]


@work("delete_dead")
async def deleted(room: Room) -> Any:
    ids, client = await room.fill(), room.client
    await room.kill()
    words = await client.dead_delete([(task_id, "g") for task_id in ids[2:5]])
    return words, [letter.id async for letter in client.dead_list()]


# --- groups --------------------------------------------------------------------------------------


@work("create_group", "configure")
async def configured(room: Room) -> Any:
    client = room.client
    made = [await client.create_group("t", "g", rate=5.0), await client.create_group("t", "g")]
    with pytest.raises(errors.NotFound):
        await client.configure("t", "none", rate=1.0)
    of_topic = await client.configure("t", if_pending="keep")
    return made, await client.configure("t", "g", tags="a", rate=None), of_topic


@work("delete_group")
async def group_deleted(room: Room) -> Any:
    await room.fill()
    await room.take()
    with pytest.raises(errors.Conflict):
        await room.client.delete_group("t", "g")
    held = await room.client.delete_group("t", "g", force=True)
    with pytest.raises(errors.NotFound):
        await room.client.delete_group("t", "g", force=True)
    return held


@work("delete_topic")
async def topic_deleted(room: Room) -> Any:
    await room.fill()
    await room.client.create_group("t", "h")
    return await room.client.delete_topic("t", force=True)


@work("held_keys", "key_lines")
async def held(room: Room) -> Any:
    await room.hold()
    client, names = room.client, ("t", "g")
    paused = [await client.pause_key(*names, key=key) for key in ("o1", "o2", "x")]
    lines = await client.key_lines(*names)
    return [
        await client.held_keys(*names),
        await client.held_keys(*names, limit=2),
        paused,
        await client.paused_keys(*names),
        sorted((line.value, line.state, line.waiting) for line in lines),
        len(await client.key_lines(*names, limit=3)),
    ]


@work("release_key", "skip_key")
async def released(room: Room) -> Any:
    await room.hold()
    client, names = room.client, ("t", "g")
    words = [
        await client.release_key(*names, key="o3"),
        await client.release_key(*names, room.ids[4]),
        await client.skip_key(*names, key="o5"),
        await client.skip_key(*names, room.ids[6]),
        await client.skip_key(*names, key="none"),
    ]
    return words, [held_key.key for held_key in await client.held_keys(*names)]


@work("pause_key", "resume_key")
async def paused(room: Room) -> Any:
    client, names = room.client, ("t", "g")
    await client.create_group(*names, fair_by="key")
    pauses = [await client.pause_key(*names, value=value) for value in ("k1", "k2", "k1")]
    await room.fill()
    taken = sorted(task.key or "" for task in await room.take())
    resumed = [await client.resume_key(*names, value=value) for value in ("k1", "none")]
    return pauses, taken, resumed, sorted(task.key or "" for task in await room.take())


@work("preview_reset", "reset_group")
async def reset(room: Room) -> Any:
    await room.fill()
    for delivery in await room.take():
        await delivery.ack()
    preview = await room.client.preview_reset("t", "g", to="first")
    made = await room.client.reset_group("t", "g", to="first")
    done = await room.client.wait_bulk(made.id)
    again = [task.key for task in await room.client.pull("t", group="g", max=100)]
    return preview.tasks, preview.first_ms, preview.last_ms, done.state, done.changed, again


# --- schedules and transactions ------------------------------------------------------------------


async def schedules(room: Room) -> None:
    for n in range(TASKS):
        options = {"key": f"k{n}"} if n % 2 else {}
        await room.client.put_schedule(f"s{n}", topic="t", every=HOUR, body=b"%d" % n, **options)
        room.shards.pass_time(1)


@work("put_schedule", "list_schedules", "show_schedule")
async def schedules_put(room: Room) -> Any:
    await schedules(room)
    client = room.client
    again = await client.put_schedule("s2", topic="t", every=SOON)
    with pytest.raises(errors.NotFound):
        await client.show_schedule("none")
    shown = [await client.show_schedule(f"s{n}", planned=2) for n in range(TASKS)]
    every = [schedule async for schedule in client.list_schedules()]
    return (
        again.outcome,
        shown,
        every,
        [schedule.name async for schedule in client.list_schedules(limit=4)],
    )


@work("pause_schedule", "resume_schedule", "delete_schedule")
async def schedules_changed(room: Room) -> Any:
    await schedules(room)
    client = room.client
    done = [await client.pause_schedule(f"s{n}") for n in range(4)]
    done += [await client.resume_schedule(f"s{n}") for n in range(2)]
    done += [await client.delete_schedule(f"s{n}") for n in range(5, 8)]
    with pytest.raises(errors.NotFound):
        await client.delete_schedule("s5")
    return done, [(schedule.name, schedule.paused) async for schedule in client.list_schedules()]


@work("run_schedule", "backfill_schedule")
async def schedules_run(room: Room) -> Any:
    await schedules(room)
    client = room.client
    start = (await client.show_schedule("s2")).planned[0]
    ids = [await client.run_schedule("s1")]
    ids += await client.backfill_schedule("s2", start, start + 3 * HOUR)
    room.ids += ids
    return [(task.topic, task.body, task.due_ms) for task in await client.lookup_many(ids)]


async def transactions(room: Room) -> list[Any]:
    made = []
    for n in range(TASKS):
        transaction = room.client.transaction("p", id=f"x{n}")
        await transaction.enqueue("t", b"%d" % n, delay=SOON, key=f"k{n}")
        await transaction.enqueue("t", b"more", delay=SOON)
        made.append(transaction)
        room.shards.pass_time(1)
    return made


@work("commit_transaction", "rollback_transaction", "show_transaction", "list_transactions")
async def transactions_decided(room: Room) -> Any:
    made, client = await transactions(room), room.client
    open_ones = [transaction async for transaction in client.list_transactions()]
    receipts = await made[0].commit()
    await made[1].rollback()
    by_name = await client.commit_transaction("x2")
    await client.rollback_transaction("x3")
    with pytest.raises(errors.UnknownTransaction):
        await client.commit_transaction("none")
    with pytest.raises(errors.TransactionRolledBack):
        await client.commit_transaction("x3")
    shown = [await client.show_transaction(f"x{n}") for n in range(4, TASKS)]
    bodies = sorted([task.body async for task in client.list_tasks()])
    return open_ones, [receipt.due_ms for receipt in receipts], len(by_name), shown, bodies


# --- bulk operations -----------------------------------------------------------------------------


@work("make_bulk", "show_bulk", "cancel_bulk", "list_bulk")
async def bulks(room: Room) -> Any:
    await room.fill()
    client = room.client
    for n, tag in enumerate("ab"):
        await client.cancel(topic="t", filter={"tags": tag}, id=f"b{n}")
        await client.wait_bulk(f"b{n}")
        room.shards.pass_time(1)
    slow = await client.run_now(topic="t", filter={"tags": "c"}, id="slow")
    stopped = await client.cancel_bulk("slow")
    with pytest.raises(errors.NotFound):
        await client.show_bulk("none")
    every = [item async for item in client.list_bulk()]
    newest = [task.id async for task in client.list_bulk(limit=2)]
    return slow.id, stopped.kind, await client.show_bulk("b1"), every[1:], newest


@work("preview_bulk")
async def previewed(room: Room) -> Any:
    await room.fill()
    outcome = await room.client.preview_bulk("cancel", "t", {"tags": "a"})
    await room.enqueue("of-one-shard", key="k")
    other = await room.client.preview_bulk("cancel", "of-one-shard", {})
    with pytest.raises(errors.NotFound):
        await room.client.preview_bulk("cancel", "none", {})
    total = outcome.looked_at, outcome.matched, outcome.would_change, len(outcome.examples)
    return *total, other.matched


# --- targets -------------------------------------------------------------------------------------


@work("set_push", "set_forward", "remove_target", "targets")
async def targets(room: Room) -> Any:
    client = room.client
    made = [
        await client.set_push("t", "g", "https://example.com/", secrets=(SECRET,)),
        await client.set_forward("t", "h", "redis://example.com/0?stream=x"),
    ]
    every = [
        (target.topic, target.group, target.kind, target.url) for target in await client.targets()
    ]
    removed = await client.remove_target("t", "g")
    with pytest.raises(errors.NotFound):
        await client.remove_target("t", "g")
    return [(item.topic, item.group, item.url) for item in made], every, removed


@work("push_log", "resend")
async def push_log(room: Room) -> Any:
    client = room.client
    await client.set_push("t", "g", "https://example.com/", secrets=(SECRET,))
    log = await client.push_log("t", "g")
    again = [await client.resend("t", "g", item.number) for item in log]
    assert [item.number for item in again] == [item.number for item in log], "as the log has them"
    return [item.again for item in again][:2], len(await client.push_log("t", "g", limit=1))


# --- the daemon ----------------------------------------------------------------------------------


@work("stats", "load")
async def counts(room: Room) -> Any:
    await room.fill()
    for delivery in (await room.take())[:5]:
        await delivery.ack()
    await room.kill()
    await room.fill(delay=HOUR)
    load = await room.client.load(step=HOUR, steps=3)
    return await room.client.stats(), load


@work("consumers")
async def consumers(room: Room) -> Any:
    async with room.client.subscribe("t", group="g"), room.client.subscribe("u"):
        results = [consumer async for consumer in room.client.list_consumers()]
        of_one = [consumer async for consumer in room.client.list_consumers(topic="u", limit=1)]
    return sorted({(item.topic, item.group, item.kind) for item in results}), len(of_one)


async def asked(room: Room, name: str, **values: Any) -> Any:
    """The answer to a verb that no method of a client asks; of a list the page."""
    verb, client = VERBS[name], room.client
    fields, shards = verb.request_type.to_frame(values), await client._know_shards()
    if shards is not None and verb.routing is Routing.PAGES:
        return await shards.page(verb, fields[0], None)
    return await client._call(verb, fields, None)


@work("list_topics", "show_topic")
async def topics(room: Room) -> Any:
    await room.fill()
    for n in range(2 * TASKS):
        await room.enqueue(f"u{n % 4}", key=f"k{n}")
    found, after = list[Any](), {}
    while True:
        page = await asked(room, "list_topics", limit=2, **after)
        found.append(page["topics"])
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert [len(page) for page in found] == [2, 2, 1]
    return found, await asked(room, "show_topic", topic="t")


@work("overview", "group_lag")
async def seen(room: Room) -> Any:
    await room.fill()
    for delivery in (await room.take())[:5]:
        await delivery.ack()
    outcome = await asked(room, "overview")
    ring = outcome["ring"]
    left = sum(ring["this"]) + sum(ring["next"]) + ring["later"]
    lag = await asked(room, "group_lag", topic="t", group="g")
    return outcome["counts"], outcome["totals"], left, ring["exact"], lag["every_ms"]


@work("explain")
async def explained(room: Room) -> Any:
    ids = await room.fill()
    await room.client.pause("t", "g")
    await room.take()
    await room.client.cancel(ids[1])
    by_id = [await room.client.explain(item) for item in (*ids, 1 << 60)]
    assert [item.cause for item in by_id[:2]] == ["group_paused", "cancelled"]
    by_key = [await room.client.explain(topic="t", key=key) for key in ("k0", "k1", "none")]
    assert [item.cause for item in by_key] == ["group_paused", "cancelled", "not_found"]
    return [{**item.raw, "command": None} for item in (*by_id, *by_key)]  # a command has ids


async def test_explain_names_an_unavailable_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_shards, "ANSWERS_S", 0.2)
    async with Shards(3) as shards:
        room = Room(shards, await shards.client(2).connect())
        ids = [await room.enqueue(key=key_in(shard, 3)) for shard in range(3)]
        shards.lose(1)
        explanation = await room.client.explain(ids[1])
        assert (explanation.cause, explanation.id, explanation.command) == (
            "shard_away",
            ids[1],
            "tickwheel shards",
        )
        assert "The task may be in shard 1" in explanation.detail
        assert (await room.client.explain(ids[2])).cause == "scheduled"
        assert (await room.client.explain(topic="t", key="none")).cause == "shard_away"
        shards.away.clear()
        assert (await soon(room.client.explain(ids[1]))).cause == "scheduled"


@work("task_history", "history_tasks")
async def told(room: Room) -> Any:
    ids = await room.fill()
    return await asked(room, "task_history", id=ids[0]), await asked(room, "history_tasks")


def test_lag_samples_are_merged_from_the_newest() -> None:
    one = {"every_ms": 5, "taken_ms": [1, 6, 11], "ready": [1, None, 2]}
    other = {"every_ms": 5, "taken_ms": [7, 12], "ready": [None, 5]}
    answers = [one | {"oldest_ready_ms": [9, None, 3]}, other | {"oldest_ready_ms": [None, 4]}]
    for some in (answers, answers[::-1]):
        assert merging.MERGED["group_lag"](some, {}) == {
            "every_ms": 5, "taken_ms": [1, 6, 11], "ready": [1, None, 7],
            "oldest_ready_ms": [9, None, 4],
        }  # fmt: skip


def test_histories_of_several_machines_are_merged_without_duplicates() -> None:
    first, second = {"event": "enqueued", "time_ms": 1}, {"event": "acked", "time_ms": 2}
    kept = {"is_kept": True, "complete": True}
    for some in ([[second], [first]], [[first, second], [first, second]]):
        answers = [{"events": events, **kept} for events in some]
        outcome = merging.MERGED["task_history"](answers, {})
        assert outcome == {"events": [first, second], **kept}
    tasks = [{"id": n, "ended_ms": None} for n in (3, 2)], [{"id": 3, "ended_ms": 7}]
    none = {"tasks": [], "is_kept": False, "complete": True}
    answers = [*({"tasks": some, **kept} for some in tasks), none]
    outcome = merging.MERGED["history_tasks"](answers, {})
    assert outcome == {"tasks": [{"id": 3, "ended_ms": 7}, {"id": 2, "ended_ms": None}], **kept}
    outcome = merging.MERGED["history_tasks"](answers, {"limit": 1})
    assert ([task["id"] for task in outcome["tasks"]], outcome["complete"]) == ([3], False)


@work("backup")
async def backed_up(room: Room) -> Any:
    with pytest.raises(errors.TickwheelError) as refused:
        await room.client.backup("copy.db")
    return type(refused.value)


@work("restore", "list_restores", "show_restore", "cancel_restore")
async def restores(room: Room) -> Any:
    results = [await asked(room, "list_restores")]
    for name, values in (
        ("restore", {"into": "new.db", "backup": "none.db"}),
        ("restore", {"into": "new.db", "ids": ()}),
        ("restore", {"into": ".."}),
        ("show_restore", {"id": 7}),
        ("cancel_restore", {"id": 7}),
    ):
        with pytest.raises(errors.TickwheelError) as refused:
            await asked(room, name, **values)
        results.append(refused.value.code)
    return results


# --- deliveries ----------------------------------------------------------------------------------


@work("pull", "ack", "nack", "reject", "extend", "snooze", "release")
async def settled(room: Room) -> Any:
    await room.fill()
    deliveries = await room.take(4)
    words = [
        *[await delivery.ack() for delivery in deliveries[:2]],
        await deliveries[2].nack(delay=HOUR),
        await deliveries[3].reject("no"),
        await deliveries[4].extend(120),
        await deliveries[5].snooze(HOUR),
        await deliveries[6].release(),
    ]
    states = [task.state for task in await room.client.lookup_many(room.ids)]
    return words, [delivery.key for delivery in deliveries], states


@work("subscribe")
async def subscribed(room: Room) -> Any:
    await room.fill()
    keys: list[str] = []
    async with room.client.subscribe("t", group="g", prefetch=4) as deliveries:
        room.shards.pass_time(60_000)
        async for delivery in deliveries:
            keys.append(delivery.key or "")
            await delivery.ack()
            if len(keys) == TASKS:
                break
    return sorted(keys), [task.state for task in await room.client.lookup_many(room.ids)]


async def test_works_name_existing_verbs() -> None:
    assert WORKS.keys() | ELSEWHERE.keys() == {n for n, v in VERBS.items() if v.frame is not None}
