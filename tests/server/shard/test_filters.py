"""Filters of groups as clients give them: made with the group, kept by it, changed, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.in_process import InProcess
from support.shard_rig import Peer
from tickwheel.api.frames import FrameType as T
from tickwheel.model.filters import (
    FILTER_COST_MAX,
    FILTER_DEPTH_MAX,
    TOPIC_STEPS_MAX,
    Filter,
)
from tickwheel.model.records import FORMER_FILTERS_MAX
from tickwheel.model.values import FILTER_LENGTH_MAX
from tickwheel.server import checks
from tickwheel.server.shard import groups

EU = {"tags": "eu"}
BIG = {"where": "amount > 10"}


async def put(daemon: InProcess, peer: Peer, *options: dict[str, Any]) -> list[int]:
    answer = await peer.enqueue(*(("t", b"x", 0, option or None) for option in options))
    assert answer[0] == T.OK, answer
    await daemon.settle()
    return list(answer[2][1])


async def pulled(peer: Peer, group: str, options: dict[str, Any] | None = None) -> list[int]:
    _, _, items = await peer.do(T.PULL, "t", group, 100, 0, options)
    return [item[0] for item in items]


async def subscribe(peer: Peer, number: int, group: str | None, options: dict[str, Any]) -> Any:
    return await peer.call(T.SUBSCRIBE, number, "t", group, 1, options)


async def test_the_first_consumer_creates_the_group_with_its_filter(daemon: InProcess) -> None:
    peer = daemon.connect()
    made = await peer.do(T.GROUP_CREATE, "t", "a", EU | {"rate": 5})
    assert (made["tags"], made["rate"], made["created"]) == ("eu", 5.0, True)
    assert "where" not in made
    assert (await subscribe(peer, 1, "b", EU | BIG))[0] == T.OK
    assert await pulled(peer, "c", BIG) == []
    plain, small, large = await put(
        daemon,
        peer,
        {},
        {"tag": "eu", "properties": {"amount": 1}},
        {"tag": "eu", "properties": {"amount": 11}},
    )
    assert await pulled(peer, "a") == [small, large]
    assert await pulled(peer, "c") == [large]
    states = [task["state"] for task in await peer.do(T.LOOKUP, (plain, small, large))]
    assert states == ["filtered", "in_flight", "in_flight"]
    groups = (await peer.do(T.STATS))["topics"]["t"]["groups"]
    assert [(g.get("tags"), g.get("where"), g["filtered"]) for g in groups.values()] == [
        ("eu", None, 1), ("eu", "amount > 10", 2), (None, "amount > 10", 2),
    ]  # fmt: skip
    assert (await peer.do(T.STATS))["filtered"] == 5
    (one,) = await peer.do(T.LOOKUP, (small,))
    assert {name: group["state"] for name, group in one["groups"].items()} == {
        "a": "in_flight", "b": "filtered", "c": "filtered",
    }  # fmt: skip
    daemon.recount()


async def test_another_filter_than_the_groups_is_refused_with_both(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "a", EU | BIG)
    await peer.do(T.GROUP_CREATE, "t", "open", {})
    own = "is set otherwise: the filter tags eu, where amount > 10, not "
    for wanted, named, options in (
        (EU, "tags eu", "--tags eu --no-where"),
        ({"tags": "us"} | BIG, "tags us, where amount > 10", "--tags us --where 'amount > 10'"),
        ({"tags": "*"}, "none", "--all"),
    ):
        for answer in (
            await subscribe(peer, 1, "a", wanted),
            await peer.call(T.PULL, "t", "a", 1, 0, wanted),
        ):
            assert answer[0] == T.ERROR and answer[2] == "conflict"
            command = f"tickwheel groups set t a {options}"
            assert answer[3] == f"group a of topic t {own}{named}; to change it: {command}"
    answer = await subscribe(peer, 1, "open", EU)
    assert answer[2] == "conflict" and "the filter none, not tags eu" in answer[3]
    same = {"tags": " eu", "where": "(amount>10.0)"}
    for number, wanted in enumerate(({}, EU | BIG, same), 1):
        assert (await subscribe(peer, number, "a", wanted))[0] == T.OK
    assert (await subscribe(peer, 9, "open", {"tags": "*"}))[0] == T.OK
    assert await pulled(peer, "a", same) == []


async def test_a_filter_is_changed_part_by_part(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "a", EU)

    async def change(**changes: Any) -> tuple[Any, Any]:
        answer = await peer.do(T.CONFIGURE, "t", "a", changes)
        return answer.get("tags"), answer.get("where")

    assert await change(where="amount > 10") == ("eu", "amount > 10")
    assert await change(paused=True) == ("eu", "amount > 10")
    assert await change(tags=None) == (None, "amount > 10")
    assert await change(tags="*") == ("*", "amount > 10")
    assert await change(where=None) == (None, None)
    assert await change(tags="us", where="TRUE") == ("us", "TRUE")
    assert await change(tags=None, where=None) == (None, None)


async def test_a_filter_change_and_older_due_tasks_survive_a_restart(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as first:
        peer = first.connect()
        await peer.do(T.GROUP_CREATE, "t", "a", EU | {"paused": True})
        await peer.do(T.GROUP_CREATE, "t", "b", {"paused": True})
        old = await put(first, peer, {"tag": "eu"}, {"tag": "us"})
        await peer.do(T.CONFIGURE, "t", "a", {"tags": "us"})
        new = await put(first, peer, {"tag": "eu"}, {"tag": "us"})
        store, now_ms = first.store, first.sources.now_ms
    async with InProcess(tmp_path, store=store, now_ms=now_ms) as second:
        peer = second.connect()
        for group in "ab":
            await peer.do(T.CONFIGURE, "t", group, {"paused": False})
        await second.settle()
        assert await pulled(peer, "a") == [old[0], new[1]]
        assert await pulled(peer, "b") == [*old, *new]


async def test_an_unsatisfiable_condition_is_refused(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "kept", BIG)
    for where, reason in (
        ("a = NULL", "where: a = NULL is UNKNOWN for every task"),
        ("a BETWEEN 10 AND 0", "where: a >= 10 AND a <= 0 cannot be TRUE for any value of a"),
    ):
        wrong = {"where": where}
        for kind, fields in (
            (T.SUBSCRIBE, (1, "t", "g", 1, wrong)),
            (T.SUBSCRIBE, (1, "t", None, 1, wrong | {"broadcast": True})),
            (T.PULL, ("t", "g", 1, 0, wrong)),
            (T.GROUP_CREATE, ("t", "g", wrong)),
            (T.CONFIGURE, ("t", "kept", wrong)),
        ):
            code, message = await peer.refused(kind, *fields)
            assert code == "bad_request" and message.startswith(reason)
    assert set((await peer.do(T.STATS))["topics"]["t"]["groups"]) == {"kept"}


async def test_a_stored_unsatisfiable_condition_still_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with InProcess(tmp_path) as daemon:
        with monkeypatch.context() as before_it_was_checked:
            before_it_was_checked.setattr(checks, "check_can_hold", lambda _wanted: None)
            await daemon.connect().do(T.GROUP_CREATE, "t", "g", {"where": "a = NULL"})
        store = daemon.store
    async with InProcess(tmp_path, store=store) as daemon:
        peer = daemon.connect()
        (left_out,) = await put(daemon, peer, {"properties": {"a": 1}})
        assert [entry["state"] for entry in await peer.do(T.LOOKUP, (left_out,))] == ["filtered"]
        assert (await peer.do(T.CONFIGURE, "t", "g", {"rate": 5}))["where"] == "a = NULL"
        assert (await peer.do(T.CONFIGURE, "t", "g", {"tags": "eu"}))["where"] == "a = NULL"
        assert (await subscribe(peer, 1, "g", {}))[0] == T.OK
        code, message = await peer.refused(T.PULL, "t", "g", 1, 0, BIG)
        assert code == "conflict" and "a = NULL" in message
        assert (await peer.do(T.CONFIGURE, "t", "g", {"tags": None} | BIG))["where"] == BIG["where"]


async def test_a_filter_over_a_limit_is_refused(daemon: InProcess) -> None:
    peer = daemon.connect()
    at_most = (
        ({"tags": "e" * FILTER_LENGTH_MAX}, {"tags": "e" * (FILTER_LENGTH_MAX + 1)}),
        ({"where": "a" + " " * (FILTER_LENGTH_MAX - 1)}, {"where": "a" + " " * FILTER_LENGTH_MAX}),
        (
            {"where": "NOT " * (FILTER_DEPTH_MAX - 1) + "a"},
            {"where": "NOT " * (FILTER_DEPTH_MAX + 1) + "a"},
        ),
        (
            {"where": " OR ".join(["a=1"] * FILTER_COST_MAX)},
            {"where": " OR ".join(["a=1"] * (FILTER_COST_MAX + 1))},
        ),
    )
    for number, (fits, exceeds) in enumerate(at_most):
        assert (await peer.do(T.GROUP_CREATE, "t", f"g{number}", fits))["created"]
        code, message = await peer.refused(T.GROUP_CREATE, "t", "x", exceeds)
        assert code == "limit_exceeded"
        assert "the limit is" in message and "FILTER_" in message


async def test_the_filters_of_all_groups_have_a_limit(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "FILTERS_LENGTH_MAX", 20)
    peer, core = daemon.connect(), daemon.shard.core
    assert (await peer.do(T.GROUP_CREATE, "t", "a", {"tags": "1234567890"}))["created"]
    assert (await subscribe(peer, 1, "b", {"tags": "1234567890"}))[0] == T.OK
    assert core.filters_length == 20
    for answer in (
        await peer.call(T.GROUP_CREATE, "t", "c", EU),
        await subscribe(peer, 2, "c", EU),
        await peer.call(T.PULL, "t", "c", 1, 0, EU),
        await peer.call(T.CONFIGURE, "t", "a", {"where": "n"}),
    ):
        assert answer[2] == "limit_exceeded" and "(FILTERS_LENGTH_MAX)" in answer[3], answer
    assert (await peer.do(T.GROUP_CREATE, "t", "c", {"tags": "*"}))["created"]
    await peer.do(T.CONFIGURE, "t", "a", {"tags": None})
    assert core.filters_length == 10
    await peer.do(T.GROUP_DELETE, "t", "b", True)
    await daemon.settle()
    assert core.filters_length == 0
    assert (await peer.do(T.CONFIGURE, "t", "c", EU))["tags"] == "eu"


async def test_the_filters_of_a_topic_have_a_limit(daemon: InProcess) -> None:
    """However dear they are, judging a task holds nothing up for long."""
    peer, dear = daemon.connect(), {"where": "s LIKE '%" + "a_" * 25 + "%'"}
    steps = Filter(None, dear["where"]).steps
    for number in range(TOPIC_STEPS_MAX // steps):
        assert (await peer.do(T.GROUP_CREATE, "t", f"g{number}", dear))["created"]
    for answer in (
        await peer.call(T.GROUP_CREATE, "t", "x", dear),
        await subscribe(peer, 1, "x", dear),
        await peer.call(T.PULL, "t", "x", 1, 0, dear),
        await subscribe(peer, 2, None, {**dear, "broadcast": True}),
    ):
        assert answer[2] == "limit_exceeded" and "(TOPIC_STEPS_MAX)" in answer[3], answer
    assert (await peer.do(T.GROUP_CREATE, "t", "x", {"tags": "eu"}))["created"]
    dear["where"] = dear["where"].replace("a_", "b_")
    assert (await peer.do(T.CONFIGURE, "t", "g0", dear))["where"] == dear["where"]
    assert (await peer.do(T.GROUP_CREATE, "u", "x", dear))["created"]


async def test_a_filter_is_changed_as_often_as_the_limit_says(daemon: InProcess) -> None:
    peer = daemon.connect()
    await peer.do(T.GROUP_CREATE, "t", "a", {"where": "n >= 0"})
    kept: list[int] = []
    for number in range(FORMER_FILTERS_MAX + 1):
        kept += await put(daemon, peer, {"properties": {"n": number}})
        change = (T.CONFIGURE, "t", "a", {"where": f"n > {number}"})
        if number < FORMER_FILTERS_MAX:
            await peer.do(*change)
    code, message = await peer.refused(*change)
    assert code == "limit_exceeded"
    assert f"{FORMER_FILTERS_MAX} (FORMER_FILTERS_MAX)" in message
    _, _, items = await peer.do(T.PULL, "t", "a", 100, 0, None)
    assert [item[0] for item in items] == kept
    (epoch,) = {(await peer.do(T.STATS))["epoch"]}
    ids, attempts = tuple(item[0] for item in items), tuple(item[1] for item in items)
    assert await peer.do(T.ACK, "t", "a", epoch, ids, attempts) is None
    assert (await peer.do(*change))["where"] == f"n > {number}"
    group = daemon.shard.core.find_group("t", "a")
    assert group is not None and group.settings.former == ()


async def test_broadcast_subscribers_get_tasks_by_their_own_filter(daemon: InProcess) -> None:
    peer = daemon.connect()
    heard = [daemon.connect() for _ in range(3)]
    for one, wanted in zip(heard, ({}, EU, BIG), strict=True):
        await one.do(T.SUBSCRIBE, 1, "t", None, 9, {"broadcast": True} | wanted)
    ids = await put(daemon, peer, {"tag": "eu"}, {"tag": "us", "properties": {"amount": 11}})
    got = [
        [item[0] for frame in element.frames() if frame[0] == T.DELIVER for item in frame[4]]
        for element in heard
    ]
    assert got == [ids, ids[:1], ids[1:]]
    assert (await peer.do(T.STATS))["filtered"] == 0
