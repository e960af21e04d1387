"""Retry policies: what is checked when they are made, and their shape on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from support.fake_daemon import FakeDaemon
from support.waiting import soon
from tickwheel import Retry, Task, errors
from tickwheel.api.frames import FrameType as T

HOUR_MS = 3_600_000
ROCKETMQ_MS = [
    s * 1000
    for s in (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
]


@pytest.mark.parametrize(
    ("policy", "wire"),
    [
        (
            Retry.exponential(),
            {
                "kind": "exponential", "base_ms": 10_000, "factor": 2.0, "cap_ms": 2 * HOUR_MS,
                "retries": 16, "jitter": 0.1,
            },
        ),
        (
            Retry.exponential(base=timedelta(seconds=1), factor=3, cap=9, retries=0, jitter=0),
            {
                "kind": "exponential", "base_ms": 1000, "factor": 3.0, "cap_ms": 9000,
                "retries": 0, "jitter": 0.0,
            },
        ),
        (Retry.fixed(5), {"kind": "fixed", "delay_ms": 5000, "retries": 16, "jitter": 0.0}),
        (Retry.fixed(0, 1), {"kind": "fixed", "delay_ms": 0, "retries": 1, "jitter": 0.0}),
        (Retry.table("rocketmq"), "rocketmq"),
        (
            Retry.table("rocketmq", retries=20),
            {"kind": "table", "delays_ms": ROCKETMQ_MS, "retries": 20},
        ),
        (
            Retry.table([1, 2.5, timedelta(minutes=1)]),
            {"kind": "table", "delays_ms": [1000, 2500, 60_000], "retries": 3},
        ),
        (Retry.none(), {"kind": "none"}),
        (Retry.named("default"), "default"),
        (Retry.named("slow-2.x_y"), "slow-2.x_y"),
    ],
)  # fmt: skip
def test_retry_policies_are_encoded(policy: Retry, wire: Any) -> None:
    sent = policy.to_wire()
    if isinstance(sent, dict) and "delays_ms" in sent:
        sent["delays_ms"] = list(sent["delays_ms"])
    assert sent == wire


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Retry.exponential(base=0), ("base", "0 ms", "1")),
        (lambda: Retry.exponential(base=-1), ("base", "-1")),
        (lambda: Retry.exponential(base="10 parsecs"), ("base", "10 parsecs")),
        (lambda: Retry.exponential(factor=0.5), ("factor", "0.5", "1")),
        (lambda: Retry.exponential(factor=float("nan")), ("factor", "nan")),
        (lambda: Retry.exponential(factor=True), ("factor", "True")),
        (lambda: Retry.exponential(cap=1), ("cap", "1000 ms", "10000 ms")),
        (lambda: Retry.exponential(retries=-1), ("retries", "-1", "0")),
        (lambda: Retry.exponential(retries=65_536), ("retries", "65536", "65535")),
        (lambda: Retry.exponential(retries=1.5), ("retries", "1.5")),
        (lambda: Retry.exponential(jitter=1.1), ("jitter", "1.1", "between 0 and 1")),
        (lambda: Retry.fixed(timedelta(days=365 * 11)), ("delay", "315576000000")),
        (lambda: Retry.fixed(None), ("delay", "None")),
        (lambda: Retry.table("kafka"), ("table", "'kafka'", "rocketmq")),
        (lambda: Retry.table([]), ("table", "not 0", "1")),
        (lambda: Retry.table([1.0] * 1025), ("table", "1025", "1024")),
        (lambda: Retry.table([1, -2]), ("table[1]", "-2")),
        (lambda: Retry.table(5), ("table", "5")),
        (lambda: Retry.table({"a": 1}), ("table",)),
        (lambda: Retry.named(""), ("name", "''", "64")),
        (lambda: Retry.named("a" * 65), ("name", "64")),
        (lambda: Retry.named("9lives"), ("name", "'9lives'")),
        (lambda: Retry.of({"base_ms": 5}), ("kind",)),
    ],
)
def test_invalid_retry_policies_name_the_field(
    make: Callable[[], Retry], words: tuple[str, ...]
) -> None:
    with pytest.raises(errors.BadRequest) as raised:
        make()
    for word in words:
        assert word in raised.value.message


def test_retry_limits_are_inclusive() -> None:
    assert Retry.exponential(retries=65_535, jitter=1, factor=1, base=1, cap=1).retries == 65_535
    assert len(Retry.table([1.0] * 1024).delays_ms or ()) == 1024
    assert Retry.named("a" * 64).name == "a" * 64


def test_retry_policies_of_the_daemon_are_decoded() -> None:
    result = Retry.of({"kind": "table", "delays_ms": [1, 2], "retries": 2, "name": "mine"})
    assert (result.kind, result.delays_ms, result.retries, result.name) == (
        "table",
        (1, 2),
        2,
        "mine",
    )
    assert result.to_wire() == "mine", "it may be defined anew: the name is what was set"
    fixed = Retry.of({"kind": "fixed", "delay_ms": 5, "retries": 1, "jitter": 0.0, "new": 1})
    assert fixed == Retry.fixed(0.005, 1)
    assert Retry.of("default") == Retry.named("default")
    assert Retry.of({"kind": "of-the-future"}).kind == "of-the-future"
    partly = Retry.of({"kind": "exponential", "retries": 3})
    assert partly.to_wire() == {"kind": "exponential", "retries": 3}
    assert repr(partly) == "<Retry exponential: retries=3>"
    assert repr(Retry.none()) == "<Retry none>"


async def test_a_task_carries_its_own_policy() -> None:
    policy = Retry.fixed(1, 2)
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        calls = [
            asyncio.ensure_future(client.enqueue("t", b"a", retry=policy)),
            asyncio.ensure_future(client.enqueue_many([Task("t", b"b", retry=policy)])),
            client.enqueue_nowait("t", b"c", retry=policy),
        ]
        tasks: list[Any] = []
        while len(tasks) < 3:
            frame = await peer.next(T.ENQUEUE)
            tasks += frame[3]
            peer.store(frame)
        await soon(asyncio.gather(*calls))
        await client.oneway("t", b"d", retry=policy)
        tasks += (await peer.next(T.ONEWAY))[2]
        assert {task[1] for task in tasks} == {b"a", b"b", b"c", b"d"}
        assert all(task[3] == {"retry": policy.to_wire()} for task in tasks)


async def test_a_value_that_is_not_a_policy_is_refused_before_sending() -> None:
    wrong: Any = "fixed"
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        with pytest.raises(errors.BadRequest, match=r"task\.retry .*'fixed'"):
            await client.enqueue("t", b"x", retry=wrong)
        with pytest.raises(errors.BadRequest, match=r"tasks\[0\]\.retry"):
            await client.enqueue_many([Task("t", b"x", retry=wrong)])
        with pytest.raises(errors.BadRequest, match="retry"):
            client.subscribe("t", retry=wrong)
        assert peer.nothing()
