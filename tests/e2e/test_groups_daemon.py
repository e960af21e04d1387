"""Groups, policies, dead letters and the like over a real daemon, each with a ``kill -9`` in the
middle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.groups_rig import SOON_S, Peer, daemon_on
from e2e.stores import stores
from support.daemon import Daemon
from support.waiting import until
from tickwheel.api.frames import FrameType as T


@pytest.fixture(params=stores("sqlite", "redis", "postgresql"))
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    with daemon_on(request.param, tmp_path, request) as made:
        yield made


# --- groups --------------------------------------------------------------------------------------


def test_a_group_is_made_with_settings_that_outlast_a_kill(daemon: Daemon) -> None:
    wanted = {"since": "now", "paused": True, "rate": 5, "burst": 2, "retry": "rocketmq"}
    with Peer(daemon.port) as peer:
        made = peer.do(T.GROUP_CREATE, "t", "g", wanted)
        assert made["created"] is True
        again = peer.do(T.GROUP_CREATE, "t", "g", {"paused": False})
        assert (again["created"], again["paused"]) == (False, True)
    daemon.restart()
    with Peer(daemon.port) as peer:
        answer = peer.do(T.CONFIGURE, "t", "g", {})
        assert answer == {name: made[name] for name in answer}
        assert (answer["rate"], answer["burst"], answer["retry"]["name"]) == (5.0, 2, "rocketmq")
        assert peer.refused(T.CONFIGURE, "t", "x", {})[0] == "not_found"


def test_deleting_a_group_keeps_other_groups_tasks(daemon: Daemon) -> None:
    with Peer(daemon.port) as peer:
        peer.do(T.GROUP_CREATE, "t", "other", {})
        peer.sub(0, "t", "g", prefetch=3)
        ids = peer.put("t", *(b"%d" % n for n in range(6)))
        (_, one), (_, two), (_, _) = peer.deliveries(3)
        peer.nack("t", "g", one, delay_ms=60_000)
        peer.do(T.REJECT, "t", "g", [(two[0], peer.epoch, two[1], "bad")])
        code, message = peer.refused(T.GROUP_DELETE, "t", "g", False)
        assert code == "conflict"
        assert "1 waiting, 1 dead" in message
        held = peer.do(T.GROUP_DELETE, "t", "g", True)
        assert sum(held.values()) == 6
        assert (held["waiting"], held["dead"]) == (1, 1)
    daemon.restart()
    with Peer(daemon.port) as peer:
        until(lambda: peer.call(T.GROUP_CREATE, "t", "g", {})[0] == T.OK, SOON_S)
        groups = peer.topic("t")["groups"]
        assert (groups["g"]["ready"], groups["other"]["ready"]) == (0, 6)
        assert peer.dead() == []
        assert peer.words(*ids) == ["ready"] * 6


COUNT = 3_000
"""Six steps of a replay, and of a deletion."""


def held_by_old(peer: Peer) -> list[int]:
    """Tasks that a group has, due against the order of their ids, as a replay goes."""
    peer.do(T.GROUP_CREATE, "t", "old", {})
    tasks = [("t", b"%d" % n, (COUNT - n) // 20, {}) for n in range(COUNT)]
    answer = peer.enqueue(*tasks)
    assert answer[0] == T.OK
    until(lambda: peer.topic("t")["groups"]["old"]["ready"] == COUNT, SOON_S)
    return list(answer[2][1])


def new_has_all(peer: Peer, ids: list[int]) -> None:
    """Every one of them once, and nothing is left when it has acked them. The old group has let go
    of all before: the last group to end a task says how it ended."""
    until(lambda: peer.topic("t")["groups"]["new"]["replay"] is None, SOON_S)
    until(lambda: peer.topic("t")["ready"] == COUNT, SOON_S)
    assert peer.words(*ids) == ["ready"] * COUNT
    peer.sub(5, "t", "new", prefetch=COUNT)
    got = [item for _, item in peer.deliveries(COUNT)]
    assert sorted(item[0] for item in got) == ids
    assert peer.ack("t", "new", *got) is None


@pytest.mark.parametrize("kills", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_replayed_group_outlives_the_older_group(daemon: Daemon, kills: bool) -> None:
    with Peer(daemon.port) as peer:
        ids = held_by_old(peer)
        peer.do(T.GROUP_CREATE, "t", "new", {"since": "first"})
        assert peer.do(T.GROUP_DELETE, "t", "old", True)["ready"] == COUNT
    if kills:
        daemon.restart()
    with Peer(daemon.port) as peer:
        new_has_all(peer, ids)
        until(lambda: peer.topic("t")["groups"].keys() == {"new"}, SOON_S)
        assert peer.words(*ids) == ["acked"] * COUNT


@pytest.mark.parametrize("kills", [pytest.param(False, marks=pytest.mark.slow), True])
def test_acks_of_one_group_do_not_affect_a_replayed_group(daemon: Daemon, kills: bool) -> None:
    with Peer(daemon.port) as peer, Peer(daemon.port) as other:
        ids = held_by_old(peer)
        peer.sub(1, "t", "old", prefetch=COUNT)
        got = [item for _, item in peer.deliveries(COUNT)]
        other.do(T.GROUP_CREATE, "t", "new", {"since": "first"})
        assert peer.ack("t", "old", *got) is None
    if kills:
        daemon.restart()
    with Peer(daemon.port) as peer:
        new_has_all(peer, ids)
        assert peer.words(*ids) == ["acked"] * COUNT
        assert peer.topic("t")["groups"]["old"]["ready"] == 0


def test_subscribers_of_a_deleted_group_get_an_error(daemon: Daemon) -> None:
    with Peer(daemon.port) as peer, Peer(daemon.port) as other:
        peer.sub(7, "t", "g")
        other.do(T.GROUP_DELETE, "t", "g", True)
        assert peer.next() == (T.ENDED, 7, "not_found", "group g of topic t was deleted")
        until(lambda: peer.call(T.SUBSCRIBE, 7, "t", "g", 1, None)[0] == T.OK, SOON_S)


# --- topics --------------------------------------------------------------------------------------


def test_a_deleted_topic_ends_with_all_it_held_over_a_kill(daemon: Daemon) -> None:
    with Peer(daemon.port) as peer:
        peer.do(T.CONFIGURE, "t", None, {"rate": 1e6, "retry": "none", "if_pending": "keep"})
        peer.sub(0, "t", "g", prefetch=2)
        ids = peer.put("t", b"1", b"2")
        (_, one), _ = peer.deliveries(2)
        assert peer.nack("t", "g", one) == "dead"
        ids += peer.put("t", *(b"%d" % n for n in range(1_200)), delay_ms=60_000)
        ids += peer.put("t", b"keyed", key="k", delay_ms=60_000)
        (other,) = peer.put("other", b"stays", delay_ms=60_000)
        code, message = peer.refused(T.TOPIC_DELETE, "t", False)
        assert code == "conflict"
        assert "1201 scheduled, 0 ready, 1 in_flight, 0 waiting, 1 dead" in message
        held = peer.do(T.TOPIC_DELETE, "t", True)
        assert (held["scheduled"], held["in_flight"], held["dead"]) == (1_201, 1, 1)
    daemon.restart()
    with Peer(daemon.port) as peer:
        until(lambda: "t" not in peer.topics(), SOON_S)
        assert set(peer.words(*ids)) == {"deleted"}
        assert peer.words(other) == ["scheduled"]
        assert peer.dead() == []
        assert peer.do(T.LOOKUP, None, {"topic": "t", "key": "k"})[0]["state"] == "deleted"
    daemon.restart()
    with Peer(daemon.port) as peer:
        assert "t" not in peer.topics()
        fresh = peer.do(T.CONFIGURE, "t", None, {})
        assert (fresh["rate"], fresh["retry"], fresh.get("if_pending")) == (None, None, None)


def test_a_broadcast_only_topic_keeps_no_tasks_over_a_kill(daemon: Daemon) -> None:
    with Peer(daemon.port) as peer:
        kept = peer.put("t", b"1", b"2")
        until(lambda: peer.topic("t")["ready"] == 2, SOON_S)
        peer.do(T.CONFIGURE, "t", None, {"broadcast_only": True})
    daemon.restart()
    with Peer(daemon.port) as peer:
        until(lambda: peer.words(*kept) == ["expired"] * 2, SOON_S)
        peer.do(T.SUBSCRIBE, 3, "t", None, 1, {"broadcast": True})
        (task_id,) = peer.put("t", b"3")
        ((_, item),) = peer.deliveries(1)
        assert (item[0], item[3]) == (task_id, b"3")
        until(lambda: peer.words(task_id) == ["expired"], SOON_S)
        assert peer.refused(T.GROUP_CREATE, "t", "g", {})[0] == "conflict"


# --- retries -------------------------------------------------------------------------------------


def test_policies_of_task_group_and_topic_outlast_a_kill(daemon: Daemon) -> None:
    fixed = {"kind": "fixed", "delay_ms": 200, "retries": 1}
    with Peer(daemon.port) as peer:
        peer.do(T.CONFIGURE, "t", None, {"retry": "none"})
        peer.sub(0, "t", "by-topic")
        peer.sub(1, "t", "by-group", retry=fixed)
        (task_id,) = peer.put("t", b"1")
        (own,) = peer.put("t", b"2", retry={"kind": "table", "delays_ms": [100], "retries": 1})
        names = {0: "by-topic", 1: "by-group"}
        words = [
            (item[0] == own, sub, peer.nack("t", names[sub], item, reason="no"))
            for sub, item in peer.deliveries(4)
        ]
        assert sorted(words) == [
            (False, 0, "dead"), (False, 1, "retrying"), (True, 0, "retrying"),
            (True, 1, "retrying"),
        ]  # fmt: skip
    daemon.restart()
    with Peer(daemon.port) as peer:
        for number, name in names.items():
            peer.sub(number, "t", name)
        got = peer.deliveries(3)
        assert {item[1] for _, item in got} == {2}
        assert {peer.nack("t", names[sub], item) for sub, item in got} == {"dead"}
        letters = peer.dead()
        assert sorted((x["id"] == own, x["group"], x["attempt"]) for x in letters) == [
            (False, "by-group", 2), (False, "by-topic", 1), (True, "by-group", 2),
            (True, "by-topic", 2),
        ]  # fmt: skip
        view = peer.do(T.LOOKUP, [task_id])[0]["groups"]["by-group"]
        assert (view["state"], view["retries_left"]) == ("dead", 0)
        failure = view["failures"][0]
        assert failure[0] == 1
        assert failure[2] == "no"
        assert failure[3].startswith("raw 127.0.0.1:")


# --- dead letters --------------------------------------------------------------------------------


def test_dead_letters_are_requeued_and_deleted_over_a_kill(daemon: Daemon) -> None:
    with Peer(daemon.port) as peer:
        peer.sub(0, "t", "g")
        ids = peer.put("t", b"1", b"2", b"3")
        for (_, item), reason in zip(
            peer.deliveries(3), ["Time-out", "bad data", "TIME-OUT again"], strict=True
        ):
            peer.do(T.REJECT, "t", "g", [(item[0], peer.epoch, item[1], reason)])
    daemon.restart()
    with Peer(daemon.port) as peer:
        times = [letter["died_ms"] for letter in peer.dead()]
        assert len(times) == 3
        assert [x["id"] for x in peer.dead(reason="time-out")] == [ids[0], ids[2]]
        assert peer.dead(since_ms=max(times) + 1) == []
        assert len(peer.dead(since_ms=min(times), until_ms=max(times))) == 3
        assert peer.dead(until_ms=min(times) - 1) == []
        assert peer.dead(topic="x") + peer.dead(group="x") == []
        page = peer.do(T.DEAD_LIST, {"limit": 2})
        assert page["next"] == (ids[1], "g")
        rest = peer.do(T.DEAD_LIST, {"limit": 2, "after": page["next"]})
        assert [x["id"] for x in rest["dead"]] == [ids[2]]
        assert peer.do(T.DEAD_REQUEUE, [(ids[0], "g")]) == ("requeued",)
        assert peer.do(T.DEAD_DELETE, [(ids[1], "g")]) == ("deleted",)
    daemon.restart()
    with Peer(daemon.port) as peer:
        assert [x["id"] for x in peer.dead()] == [ids[2]]
        peer.sub(0, "t", "g")
        ((_, item),) = peer.deliveries(1)
        assert item[:2] == (ids[0], 1)
        assert peer.words(ids[1]) == ["deleted"]


@pytest.mark.parametrize("store", stores("sqlite", "redis", "postgresql"))
def test_dead_letters_are_kept_for_their_retention(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with daemon_on(store, tmp_path, request, dead_retention_s=5) as daemon:
        with Peer(daemon.port) as peer:
            peer.do(T.GROUP_CREATE, "t", "other", {})
            peer.sub(0, "t", "g", retry="none")
            alone, shared = peer.put("t", b"1", b"2")
            for _, item in peer.deliveries(2):
                peer.nack("t", "g", item)
            peer.sub(1, "t", "other", prefetch=1)
            ((_, item),) = peer.deliveries(1)
            peer.do(T.PREFETCH, 1, 0)
            peer.ack("t", "other", item)
            assert len(peer.dead()) == 2
        daemon.restart()
        with Peer(daemon.port) as peer:
            until(lambda: peer.dead() == [], SOON_S)
            assert peer.do(T.STATS)["dead_expired"] == 2
            assert peer.words(alone, shared) == ["deleted", "ready"]


# --- at most once, broadcast ---------------------------------------------------------------------


def test_a_kill_after_an_at_most_once_commit_never_redelivers(daemon: Daemon) -> None:
    # The first commit makes the group, the second takes the task, the third ends it.
    daemon.kill()
    daemon.failpoints = "commit.after=3"
    daemon.start()
    with Peer(daemon.port) as peer:
        peer.sub(0, "t", "g", ack="on_delivery")
        (task_id,) = peer.put("t", b"1")
        assert peer.closed(), "killed when the end was durable"
    daemon.wait()
    daemon.start()
    with Peer(daemon.port) as peer:
        peer.sub(0, "t", "g")
        assert peer.silent()
        assert peer.words(task_id) == ["acked"]


def test_a_kill_before_an_at_most_once_commit_redelivers(daemon: Daemon) -> None:
    daemon.kill()
    daemon.failpoints = "commit.before=3"
    daemon.start()
    with Peer(daemon.port) as peer:
        peer.sub(0, "t", "g", ack="on_delivery")
        peer.put("t", b"1")
        with pytest.raises((EOFError, ConnectionError)):
            peer.next()
    daemon.wait()
    daemon.start()
    with Peer(daemon.port) as peer:
        peer.sub(0, "t", "g", ack="on_delivery")
        ((_, item),) = peer.deliveries(1)
        assert item[3] == b"1"


def test_a_broadcast_creates_no_group(daemon: Daemon) -> None:
    with Peer(daemon.port) as peer, Peer(daemon.port) as other:
        peer.sub(0, "t", None, broadcast=True)
        other.sub(0, "t", "", broadcast=True)
        (task_id,) = peer.put("t", b"1", key="k")
        for element in (peer, other):
            ((_, item),) = element.deliveries(1)
            assert (item[0], item[1], item[4]) == (task_id, 1, {"key": "k"})
        result = peer.topic("t")
        assert (result["broadcasters"], result["ready"], result["groups"]) == (2, 1, {})
    daemon.restart()
    with Peer(daemon.port) as peer:
        peer.sub(0, "t", "g")
        ((_, item),) = peer.deliveries(1)
        assert item[0] == task_id
        code, message = peer.refused(T.SUBSCRIBE, 1, "t", "g", 1, {"broadcast": True})
        assert (code, "group" in message) == ("bad_request", True)
        peer.do(T.UNSUBSCRIBE, 0)


# --- priority, ttl, pause, rate ------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "g"])
def test_a_pause_outlasts_a_kill(daemon: Daemon, group: str | None) -> None:
    with Peer(daemon.port) as peer:
        peer.sub(0, "t", "g")
        (first,) = peer.put("t", b"1")
        ((_, item),) = peer.deliveries(1)
        assert peer.do(T.CONFIGURE, "t", group, {"paused": True})["paused"] is True
        (second,) = peer.put("t", b"2")
        assert peer.ack("t", "g", item) is None
        assert peer.silent()
    daemon.restart()
    with Peer(daemon.port) as peer:
        peer.sub(0, "t", "g")
        assert peer.silent()
        assert peer.words(first, second) == ["acked", "ready"]
        assert peer.topic("t")["oldest_ready_ms"] > 0
        assert peer.do(T.PULL, "t", "g", 5, 0, None)[2] == ()
        peer.do(T.CONFIGURE, "t", group, {"paused": False})
        ((_, item),) = peer.deliveries(1)
        assert item[0] == second
