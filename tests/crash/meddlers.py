"""Those who do everything to a daemon at once: producers, operators, and consumers that pull.

Each has random numbers of its own from the seed. What they do is a table of verbs with weights:
a new feature gets a line there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from crash.witness import Sent
from support.waiting import rest
from tickwheel.client import Client, Delivery, Task
from tickwheel.errors import TickwheelError

if TYPE_CHECKING:
    from crash.everything import Scene

GROUPS, ORDER_KEYS, KEYS = ("g0", "g1", "g2"), ("a", "b", "c"), ("x", "y")
SCHEDULES = ("s0", "s1")
PRODUCERS = "meddlers"
NEWEST = 300
"""Number of newest tasks among which a meddler chooses."""
AT_ONCE_MAX = 4
"""Maximum actions that a meddler starts at once on one group."""
UNDERMINED_S_MAX = 0.05
PAUSE_S_MAX = 0.03
FAILED_PAUSE_S = 0.05
GROUP_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"fair_by": "tenant", "limit_each": 2},
    {"order_failure": "hold", "order_attempts": 2},
    {"where": "n > 4 OR n IS NULL"},
    {"tags": "e || f"},
)
CHANGES: tuple[dict[str, Any], ...] = (
    {"fair_by": "tenant", "limit_each": 1},
    {"fair_by": None},
    {"fair_by": "key", "rate_each": 50.0},
    {"order_failure": "hold", "order_attempts": 1},
    {"order_failure": "dead", "order_attempts": 2},
    {"order_failure": "retry"},
    {"order_failure": None},
    {"order_retry": 0.02},
    {"paused": True},
    {"paused": False},
    {"rate": 100.0},
    {"rate": None},
)
FILTERS: tuple[dict[str, Any], ...] = (
    {"where": "n < 7"}, {"where": None}, {"tags": "e"}, {"tags": None},
)  # fmt: skip
TEXTS = {f"text{n}": "ab" * 2_000 for n in range(6)}
DEAR = " OR ".join(f"{name} LIKE '%_b_b_bq%r%'" for name in (*TEXTS, "other")) + " OR n < 5"
"""A condition that costs a good part of a millisecond for each task that has the texts: a bulk
operation with it takes many steps, and everybody else comes between."""
SELECTIONS: tuple[dict[str, Any], ...] = ({}, {"where": "n = 3"}, {"tags": "e"}, {"where": DEAR})


class Meddler:
    """One that does one thing after the other, or some at once."""

    def __init__(self, scene: Scene, client: Client, name: str) -> None:
        self._scene = scene
        self._witness = scene.witness
        self._client = client
        self._name = name
        self._rnd = scene.rnd(name)
        self._texts = scene.rnd("texts").choice((0.05, 0.8))
        """Share of tasks with long texts, which are expensive to filter."""
        self._verbs: dict[Callable[[str, str], Awaitable[object]], int] = {
            self._put: 45, self._transact: 5, self._cancel: 5, self._move: 5, self._run_now: 4,
            self._by_key: 5, self._make_group: 4, self._delete_group: 2, self._configure: 6,
            self._held: 4, self._dead: 4, self._bulk: 4, self._reset: 2, self._schedule: 3,
            self._unschedule: 2, self._delete_topic: 1, self._undermine: 4,
        }  # fmt: skip

    async def run(self) -> None:
        """Until the run is over."""
        rnd, verbs = self._rnd, list(self._verbs)
        weights = list(self._verbs.values())
        while self._scene.is_meddling:
            topic, group = rnd.choice(self._scene.topics), rnd.choice(GROUPS)
            at_once = 1 if rnd.random() < 0.7 else rnd.randint(2, AT_ONCE_MAX)
            chosen = rnd.choices(verbs, weights, k=at_once)
            await asyncio.gather(*(self._do(verb, topic, group) for verb in chosen))
            await rest(rnd.uniform(0, PAUSE_S_MAX))

    async def _do(self, verb: Callable[[str, str], Awaitable[object]], *of: str) -> None:
        what = " ".join((verb.__name__.strip("_"), *of))
        self._scene.note(self._name, what)
        try:
            await verb(*of)
            self._witness.counts["done"] += 1
        except TickwheelError as error:
            self._witness.error(error, what)

    # --- producers -------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        rnd, found = self._rnd, dict[str, Any]()
        for name, share, choose in (
            ("order_key", 0.6, lambda: rnd.choice(ORDER_KEYS)),
            ("key", 0.3, lambda: rnd.choice(KEYS)),
            ("priority", 0.2, lambda: rnd.randint(0, 3)),
            ("ttl", 0.1, lambda: rnd.uniform(0.05, 2)),
            ("tag", 0.3, lambda: rnd.choice("ef")),
            ("within", 0.1, lambda: rnd.uniform(0.01, 2)),
            ("properties", 0.5, self._properties),
        ):
            if rnd.random() < share:
                found[name] = choose()
        return found

    def _properties(self) -> dict[str, Any]:
        rnd = self._rnd
        result: dict[str, Any] = {"tenant": rnd.choice("pqr"), "n": rnd.randint(0, 9)}
        return result | (TEXTS if rnd.random() < self._texts else {})

    def _body(self) -> bytes:
        return self._rnd.randbytes(self._rnd.choice((1, 20, 3_000)))

    async def _put(self, topic: str, group: str) -> None:
        if self._scene.is_crowded:
            return
        rnd, tasks = self._rnd, list[Task]()
        for _ in range(rnd.choice((1, 5, 30))):
            options = self._options()
            if "key" in options and rnd.random() < 0.5:
                options["if_pending"] = rnd.choice(("keep", "replace", "reject"))
            to, delay = rnd.choice(self._scene.topics), rnd.choice((0, 0, rnd.uniform(0, 1.5)))
            if options.get("if_pending") == "replace":
                self._witness.cancelled.keys.add((to, options["key"]))
                if "ttl" in options:
                    self._witness.cancelled.limited.add((to, options["key"]))
            tasks.append(Task(to, self._body(), delay=delay, **options))
        for task, receipt in zip(tasks, await self._client.enqueue_many(tasks), strict=True):
            has_ttl = task.ttl is not None or receipt.id in self._witness.accepted
            self._witness.stored(receipt.id, Sent(task.topic, task.key, has_ttl))

    async def _transact(self, topic: str, group: str) -> None:
        found, half = self._client.transaction(PRODUCERS), list[Sent]()
        for _ in range(3):
            options = self._options()
            to = self._rnd.choice(self._scene.topics)
            half.append(Sent(to, options.get("key"), "ttl" in options))
            await found.enqueue(to, self._body(), delay=self._rnd.uniform(0, 0.5), **options)
        if self._rnd.random() < 0.3:
            await found.rollback()
            return
        for sent, receipt in zip(half, await found.commit(), strict=True):
            self._witness.stored(receipt.id, sent)

    # --- operators: tasks ------------------------------------------------------------------------

    def _some(self, count: int) -> list[int]:
        """Tasks that are young, or that one group has done with and others may have."""
        lately = list(self._witness.acked_lately)
        if not lately or self._rnd.random() < 0.5:
            lately = list(self._witness.accepted)[-NEWEST:]
        return list({self._rnd.choice(lately) for _ in range(count)}) if lately else []

    async def _cancel(self, topic: str, group: str) -> None:
        ids = self._some(5)
        self._witness.cancelled.ids |= set(ids)
        if ids:
            await self._client.cancel_many(ids)

    async def _move(self, topic: str, group: str) -> None:
        for task_id in self._some(1):
            delay = self._rnd.choice((0, self._rnd.uniform(0, 1)))
            await self._client.reschedule(task_id, delay=delay)

    async def _run_now(self, topic: str, group: str) -> None:
        ids = self._some(self._rnd.choice((1, 5)))
        if ids:
            await self._client.run_now_many(ids)

    async def _by_key(self, topic: str, group: str) -> None:
        key = self._rnd.choice(KEYS)
        if self._rnd.random() < 0.5:
            self._witness.cancelled.keys.add((topic, key))
            await self._client.cancel(topic=topic, key=key)
        else:
            await self._client.reschedule(topic=topic, key=key, delay=self._rnd.uniform(0, 1))

    async def _bulk(self, topic: str, group: str) -> None:
        await self._change_all(topic, self._rnd.choice(SELECTIONS))

    async def _undermine(self, topic: str, group: str) -> None:
        """Delete a group while operations on it are under way."""
        await asyncio.gather(*(self._change_all(topic, {"where": DEAR}) for _ in range(3)))
        await rest(self._rnd.uniform(0, UNDERMINED_S_MAX))
        await self._delete_group(topic, group)

    async def _change_all(self, topic: str, selection: dict[str, Any]) -> None:
        client = self._client
        verbs: tuple[Any, ...] = (
            client.cancel, client.run_now, client.dead_requeue, client.dead_delete,
        )  # fmt: skip
        verb = self._rnd.choice(verbs)
        if verb == client.cancel:
            if topic == self._scene.keeper[0] and self._rnd.random() < 0.9:
                return  # it would explain too much
            self._witness.cancelled.topics.add(topic)
        await verb(topic=topic, filter=selection)

    async def _reset(self, topic: str, group: str) -> None:
        await self._client.reset_group(topic, group, to="first", rate=self._rnd.choice((None, 200)))

    # --- operators: groups and topics ------------------------------------------------------------

    async def _make_group(self, topic: str, group: str) -> None:
        start = self._rnd.choice(("now", "first"))
        settings = self._rnd.choice(GROUP_SETTINGS)
        if (topic, group) != self._scene.keeper:
            await self._client.create_group(topic, group, start=start, **settings)

    async def _delete_group(self, topic: str, group: str) -> None:
        if (topic, group) == self._scene.keeper:
            return
        self._witness.new_life(topic, group)
        try:
            await self._client.delete_group(topic, group, force=True)
        finally:
            self._witness.new_life(topic, group)

    async def _configure(self, topic: str, group: str) -> None:
        is_keeper = (topic, group) == self._scene.keeper
        changes = CHANGES if is_keeper else (*CHANGES, *FILTERS)
        await self._client.configure(topic, group, **self._rnd.choice(changes))

    async def _held(self, topic: str, group: str) -> None:
        for held in (await self._client.held_keys(topic, group))[:2]:
            verb = self._rnd.choice((self._client.release_key, self._client.skip_key))
            await verb(topic, group, held.id)

    async def _dead(self, topic: str, group: str) -> None:
        count = 0
        async for letter in self._client.dead_list():
            verb = self._rnd.choice((self._client.dead_requeue, self._client.dead_delete))
            await verb([(letter.id, letter.group)])
            count += 1
            if count == 3:
                return

    async def _delete_topic(self, topic: str, group: str) -> None:
        if topic == self._scene.keeper[0] or self._rnd.random() < 0.5:
            return
        for item in GROUPS:
            self._witness.new_life(topic, item)
        try:
            await self._client.delete_topic(topic, force=True)
        finally:
            for item in GROUPS:
                self._witness.new_life(topic, item)

    async def _schedule(self, topic: str, group: str) -> None:
        rnd, name = self._rnd, self._rnd.choice(SCHEDULES)
        await self._client.put_schedule(
            name,
            topic=topic,
            body=b"s",
            every=1,
            overlap=rnd.choice(("allow", "skip", "queue_one", "cancel_previous")),
            catch_up=rnd.choice(("last", "all", "skip")),
            order_key=rnd.choice((None, "a")),
        )
        if rnd.random() < 0.3:
            await self._client.run_schedule(name)

    async def _unschedule(self, topic: str, group: str) -> None:
        await self._client.delete_schedule(self._rnd.choice(SCHEDULES))


class Puller:
    """A consumer of one group: fails, gives back, postpones, forgets; in the end it only acks."""

    def __init__(self, scene: Scene, client: Client, topic: str, group: str) -> None:
        self._scene = scene
        self._witness = scene.witness
        self._client = client
        self._member = topic, group
        self._rnd: random.Random = scene.rnd(f"puller/{topic}/{group}")

    async def run(self) -> None:
        """Until nothing is left."""
        topic, group = self._member
        while not self._scene.is_over:
            lease_s = self._rnd.choice((0.3, 1.0, 5.0))
            asked = self._witness.asks(topic, group, lease_s)
            try:
                got = await self._client.pull(
                    topic, group=group, max=self._rnd.choice((1, 3, 20)), wait=0.3, lease=lease_s
                )
                self._witness.took(asked, topic, group, got)
                self._rnd.shuffle(got)
                for delivery in got:
                    await self._settle(delivery, lease_s)
            except TickwheelError as error:
                self._witness.error(error, f"a pull of {topic} {group}")
                await rest(FAILED_PAUSE_S)

    async def _settle(self, delivery: Delivery, lease_s: float) -> None:
        rnd, is_meddling = self._rnd, self._scene.is_meddling
        if is_meddling and rnd.random() < 0.3:
            await rest(rnd.uniform(0, lease_s * 0.2))
        share = rnd.random() if is_meddling else 0.0
        self._witness.ends(*self._member, delivery, acks=share < 0.6)
        if share < 0.6:
            await delivery.ack()
        elif share < 0.75:
            await delivery.nack(delay=rnd.choice((None, 0.02)))
        elif share < 0.80:
            await delivery.reject("rejected")
        elif share < 0.85:
            await delivery.snooze(0.05)
        elif share < 0.92:
            await delivery.release()
