"""Order keys of tasks, and what groups say of them and of fair shares, as clients give them."""

from __future__ import annotations

from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.api.groups import FAIR_BY_LENGTH_MAX, LIMIT_EACH_MAX, ORDER_ATTEMPTS_MAX
from tickwheel.limits import Limits

LONGEST = Limits().key_length_max
FAIR = {"fair_by": "tenant", "limit_each": 5, "rate_each": 2.5}
DEFAULTS = {"order_retry_ms": 1_000, "order_attempts": 16, "order_failure": "hold"}
ORDER = {"order_retry_ms": 50, "order_attempts": 3, "order_failure": "hold"}


async def put(peer: Peer, **options: Any) -> tuple[Any, ...]:
    return await peer.enqueue(("t", b"x", 0, options))


async def test_an_order_key_is_kept_and_shown(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", {})
    for key in ("customer 7", "é" * LONGEST, ""):
        answer = await put(peer, order_key=key, key="k")
        assert answer[0] == T.OK, answer
        await daemon.settle()
        (task,) = await peer.do(T.LOOKUP, tuple(answer[2][1]))
        assert (task["order_key"], task["key"]) == (key, "k")
        epoch, _, ((task_id, attempt, *_, options),) = await peer.do(T.PULL, "t", "g", 1, 0, None)
        assert options == {"order_key": key, "key": "k"}
        assert await peer.do(T.ACK, "t", "g", epoch, (task_id,), (attempt,)) is None
        await daemon.settle()
    (plain,) = await peer.do(T.LOOKUP, tuple((await put(peer))[2][1]))
    assert plain["order_key"] is None


async def test_invalid_order_keys_are_refused(daemon: InProcess) -> None:
    peer = daemon.connect()
    for options, code, words in (
        ({"order_key": 7}, "bad_request", "tasks[0].order_key must be a string, not 7"),
        ({"order_key": b"x"}, "bad_request", "tasks[0].order_key must be a string"),
        ({"order_key": "x" * (LONGEST + 1)}, "limit_exceeded", f"the limit is {LONGEST}"),
        ({"order_key": "x", "retry": "none"}, "bad_request", "the group's order_retry"),
        ({"order_key": "", "retry": {"kind": "none"}}, "bad_request", "order_key and retry"),
        (
            {"order_key": "x", "shard_by": "y"},
            "bad_request",
            "tasks[0] has different values for shard_by and order_key",
        ),
        ({"order_key": "x", "shard_by": 7}, "bad_request", "tasks[0].shard_by must be a string"),
    ):
        answer = await put(peer, **options)
        assert answer[0] == T.ERROR and answer[2] == code and words in answer[3], answer
        answer = await peer.call(T.PREPARE, "x", "p", 1, (("t", b"", 0, options),), None)
        assert answer[0] == T.ERROR and answer[2] == code, answer
        answer = await peer.call(
            T.SCHEDULE_PUT, "s", {"topic": "t", "every_ms": 60_000, "task": options}
        )
        assert answer[0] == T.ERROR and answer[2] == code, answer
    assert (await peer.do(T.STATS))["scheduled"] == 0


async def test_schedules_and_transactions_keep_order_keys(daemon: InProcess) -> None:
    peer = daemon.connect()
    options = {"topic": "t", "every_ms": 60_000, "task": {"order_key": "k"}}
    for outcome in ("created", "unchanged"):
        made = await peer.do(T.SCHEDULE_PUT, "s", options)
        assert (made["outcome"], made["task"]) == (outcome, {"order_key": "k"})
    _, ids = await peer.do(T.SCHEDULE, "s", "run", None)
    (task,) = await peer.do(T.LOOKUP, tuple(ids))
    assert task["order_key"] == "k"
    await peer.do(T.PREPARE, "x", "p", 1, (("t", b"", 0, {"order_key": "l"}),), None)
    _, ids, *_ = await peer.do(T.COMMIT, "x")
    (task,) = await peer.do(T.LOOKUP, tuple(ids))
    assert task["order_key"] == "l"


async def test_a_replacement_has_its_own_order_key(daemon: InProcess) -> None:
    peer = daemon.connect()

    async def ruled(order_key: str, action: str) -> str:
        options = {"key": "k", "order_key": order_key, "if_pending": action}
        answer = await peer.enqueue(("t", b"x", 60_000, options))
        assert answer[0] == T.OK, answer
        await daemon.settle()
        (task,) = await peer.do(T.LOOKUP, tuple(answer[2][1]))
        return str(task["order_key"])

    assert await ruled("a", "keep") == "a"
    assert await ruled("b", "keep") == "a"
    assert await ruled("c", "replace") == "c"
    assert await ruled("d", "reject") == "c"


async def test_the_first_consumer_sets_ordering_and_fairness(daemon: InProcess) -> None:
    peer = daemon.connect()
    made = await peer.do(T.GROUP_CREATE, "t", "a", FAIR | ORDER | {"tags": "eu"})
    assert {k: made[k] for k in (*FAIR, *ORDER, "tags")} == FAIR | ORDER | {"tags": "eu"}
    assert (await peer.call(T.SUBSCRIBE, 1, "t", "b", 1, FAIR))[0] == T.OK
    await peer.do(T.PULL, "t", "c", 1, 0, ORDER | {"where": "n > 1"})
    await peer.do(T.PULL, "t", "d", 1, 0, {"order_failure": "dead"})
    await peer.do(T.GROUP_CREATE, "t", "e", {})
    groups = (await peer.do(T.STATS))["topics"]["t"]["groups"]
    names = (*FAIR, *ORDER, "where")
    assert [{n: groups[g][n] for n in names if n in groups[g]} for g in "abcde"] == [
        FAIR | ORDER, FAIR | DEFAULTS, ORDER | {"where": "n > 1"},
        {"order_failure": "dead", "order_attempts": 16, "order_retry_ms": 1_000}, {},
    ]  # fmt: skip


async def test_a_conflicting_value_is_refused_naming_both(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "a", FAIR | ORDER)
    await peer.do(T.GROUP_CREATE, "t", "none", {})
    for group, wanted, words in (
        (
            "a",
            FAIR | {"fair_by": "tag"},
            "fair_by 'tenant', not 'tag'{}fair-by tag",
        ),
        ("a", FAIR | {"limit_each": 6}, "limit_each 5, not 6{}limit-each 6"),
        (
            "a",
            {"order_retry_ms": 51},
            "order_retry_ms 50, not 51{}order-retry 51ms",
        ),
        (
            "a",
            {"order_failure": "dead"},
            "order_failure 'hold', not 'dead'{}order-failure dead",
        ),
        ("none", {"fair_by": "tag"}, "fair_by None, not 'tag'{}fair-by tag"),
    ):
        for answer in (
            await peer.call(T.SUBSCRIBE, 1, "t", group, 1, wanted),
            await peer.call(T.PULL, "t", group, 1, 0, wanted),
        ):
            assert answer[0] == T.ERROR and answer[2] == "conflict", answer
            outcome = words.format(f"; to change it: tickwheel groups set t {group} --")
            assert answer[3] == f"group {group} of topic t is set otherwise: {outcome}"
    for number, wanted in enumerate(({}, FAIR, ORDER, FAIR | ORDER, {"order_failure": "hold"})):
        assert (await peer.call(T.SUBSCRIBE, number, "t", "a", 1, wanted))[0] == T.OK
        assert (await peer.call(T.PULL, "t", "a", 1, 0, wanted))[0] == T.OK


async def test_ordering_and_fairness_are_changed_and_removed(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "g", FAIR | ORDER)
    names = (*FAIR, *ORDER)
    for changed, left in (
        ({"limit_each": 6}, FAIR | ORDER | {"limit_each": 6}),
        ({"rate_each": None}, {"fair_by": "tenant", "limit_each": 6} | ORDER),
        ({"rate": 5}, {"fair_by": "tenant", "limit_each": 6} | ORDER),
        ({"fair_by": None}, ORDER),
        ({"order_failure": None}, DEFAULTS | {"order_retry_ms": 50}),
        ({"order_failure": "retry"}, {"order_retry_ms": 50, "order_failure": "retry"}),
        ({"order_failure": "dead"}, DEFAULTS | {"order_retry_ms": 50, "order_failure": "dead"}),
        ({"order_attempts": 3}, ORDER | {"order_failure": "dead"}),
        ({"order_failure": "retry"}, {"order_retry_ms": 50, "order_failure": "retry"}),
        # What holds when nothing is said; the group has lines since it was shared.
        ({"order_retry_ms": None, "order_failure": None}, DEFAULTS),
    ):
        answer = await peer.do(T.CONFIGURE, "t", "g", changed)
        assert {name: answer[name] for name in names if name in answer} == left


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"order_retry_ms": 9}, "bad_request", "order_retry_ms must be an integer between 10"),
        ({"order_retry_ms": 30_001}, "bad_request", "not 30001"),
        ({"order_retry_ms": 10.0}, "bad_request", "order_retry_ms"),
        (
            {"order_attempts": 3, "order_failure": "retry"},
            "bad_request",
            "order_attempts (3) cannot be set with order_failure retry",
        ),
        ({"order_attempts": 0, "order_failure": "dead"}, "bad_request", "order_attempts"),
        (
            {"order_attempts": ORDER_ATTEMPTS_MAX + 1, "order_failure": "dead"},
            "bad_request",
            f"between 1 and {ORDER_ATTEMPTS_MAX}",
        ),
        ({"order_failure": "drop"}, "bad_request", "one of dead, hold, retry, not 'drop'"),
        ({"order_failure": 5}, "bad_request", "one of dead, hold, retry, not 5"),
        ({"fair_by": ""}, "bad_request", "fair_by"),
        ({"fair_by": 5}, "bad_request", "fair_by must be a string"),
        ({"fair_by": "x" * (FAIR_BY_LENGTH_MAX + 1)}, "limit_exceeded", "fair_by has 256"),
        ({"limit_each": 1}, "bad_request", "limit_each (1) needs fair_by"),
        ({"rate_each": 1}, "bad_request", "rate_each (1.0) needs fair_by"),
        ({"fair_by": "key", "limit_each": 0}, "bad_request", "limit_each"),
        ({"fair_by": "key", "limit_each": LIMIT_EACH_MAX + 1}, "bad_request", "limit_each"),
        ({"fair_by": "key", "rate_each": 0}, "bad_request", "rate_each must be a number"),
        ({"fair_by": "key", "rate_each": float("nan")}, "bad_request", "rate_each"),
    ],
)
async def test_ordering_and_fairness_values_are_validated(
    daemon: InProcess, settings: dict[str, Any], code: str, words: str
) -> None:
    peer = daemon.connect()
    at_most = {
        "order_retry_ms": 30_000, "order_attempts": ORDER_ATTEMPTS_MAX, "order_failure": "dead",
        "fair_by": "x" * FAIR_BY_LENGTH_MAX, "limit_each": LIMIT_EACH_MAX, "rate_each": 1e9,
    }  # fmt: skip
    assert (await peer.do(T.GROUP_CREATE, "t", "most", at_most))["created"]
    await peer.do(T.GROUP_CREATE, "t", "g", {})
    for kind, fields in (
        (T.SUBSCRIBE, (1, "t", "new", 1, settings)),
        (T.PULL, ("t", "new", 1, 0, settings)),
        (T.GROUP_CREATE, ("t", "new", settings)),
        (T.CONFIGURE, ("t", "g", settings)),
    ):
        refusal = await peer.refused(kind, *fields)
        assert refusal[0] == code and words in refusal[1], refusal
    assert {"g", "most"} == (await peer.do(T.STATS))["topics"]["t"]["groups"].keys()


async def test_ordering_and_fairness_are_refused_for_topics_and_broadcasts(
    daemon: InProcess,
) -> None:
    peer = daemon.connect()
    for name, value in (FAIR | ORDER).items():
        code, message = await peer.refused(T.CONFIGURE, "t", None, {name: value})
        assert (code, message) == ("bad_request", f"{name} is a setting of a group, not of a topic")
        options = {"broadcast": True, name: value}
        code, message = await peer.refused(T.SUBSCRIBE, 1, "t", None, 1, options)
        assert code == "bad_request" and f"cannot have {name}" in message
